cmake_minimum_required(VERSION 3.21)
# cmake -DCURRENT_PORT_DIR=packaging/vcpkg -DCURRENT_PACKAGES_DIR=PREFIX -DBUILD=DIR -P functions.cmake
#
# Runs the portfile. The functions stand for those of vcpkg, which is no package: they build one configuration, fail where
# vcpkg's would, and leave the files of CMake where the build put them.
function(run)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
    if(status)
        message(FATAL_ERROR "${ARGV}: ${status}")
    endif()
endfunction()

function(must_exist path)
    if(NOT EXISTS "${path}")
        message(FATAL_ERROR "${path} is missing")
    endif()
endfunction()

function(vcpkg_cmake_configure)
    cmake_parse_arguments(arg "" "SOURCE_PATH" "OPTIONS" ${ARGV})
    run(${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${BUILD} -DCMAKE_BUILD_TYPE=Debug -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}
        -DCMAKE_INSTALL_LIBDIR=lib ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
    run(${CMAKE_COMMAND} --build ${BUILD})
    run(${CMAKE_COMMAND} --install ${BUILD})
endfunction()

function(vcpkg_cmake_config_fixup)
    cmake_parse_arguments(arg "" "PACKAGE_NAME;CONFIG_PATH" "" ${ARGV})
    must_exist("${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}/${arg_PACKAGE_NAME}-config.cmake")
endfunction()

function(vcpkg_fixup_pkgconfig)
    must_exist("${CURRENT_PACKAGES_DIR}/lib/pkgconfig/tieredkv.pc")
endfunction()

function(vcpkg_copy_pdbs)
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(arg "" "" "FILE_LIST" ${ARGV})
    must_exist("${arg_FILE_LIST}")
endfunction()

include(${CURRENT_PORT_DIR}/portfile.cmake)
