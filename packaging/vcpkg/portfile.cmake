# An overlay port: `vcpkg install tieredkv --overlay-ports=CHECKOUT/packaging/vcpkg`. It builds the checkout that it is in.
# vcpkg compares the files of the port alone: after a change elsewhere remove the package, and add --binarysource=clear.
cmake_path(SET SOURCE_PATH NORMALIZE "${CURRENT_PORT_DIR}/../..")
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME tieredkv CONFIG_PATH lib/cmake/tieredkv)
vcpkg_fixup_pkgconfig()
vcpkg_copy_pdbs()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
