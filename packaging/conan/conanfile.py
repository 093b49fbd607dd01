"""The recipe for Conan 2: `conan create packaging/conan` in a checkout. The option `shared` makes a shared library."""
import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class TieredKV(ConanFile):
    name = "tieredkv"
    description = "The key/value cache of a transformer in three tiers"
    license = "MIT"
    package_type = "library"
    languages = "C"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False]}
    default_options = {"shared": False, "fPIC": True}
    implements = ["auto_shared_fpic"]

    @property
    def _checkout(self):
        return os.path.join(self.recipe_folder, os.pardir, os.pardir)

    def set_version(self):
        header = load(self, os.path.join(self._checkout, "tieredkv.h"))
        self.version = re.search(r'#define TKV_VERSION_STRING "(.*)"', header).group(1)

    def export_sources(self):
        for name in ("tieredkv.h", "examples/tieredkv.c", "LICENSE", "CMakeLists.txt", "packaging/pkgconfig/*"):
            copy(self, name, self._checkout, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeToolchain(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        """The targets of CMakeLists.txt: the header, and the compiled library."""
        self.cpp_info.set_property("cmake_file_name", "tieredkv")
        header, library = self.cpp_info.components["tieredkv"], self.cpp_info.components["implementation"]
        header.set_property("cmake_target_name", "tieredkv::tieredkv")
        header.set_property("pkg_config_name", "tieredkv")
        header.libdirs, header.bindirs = [], []
        if self.settings.get_safe("os") != "Windows":  # The C library of Windows has the functions of libm.
            header.system_libs = ["m"]
        library.set_property("cmake_target_name", "tieredkv::implementation")
        library.set_property("pkg_config_name", "tieredkv-implementation")
        library.libs, library.requires = ["tieredkv"], ["tieredkv"]
