"""Builds tests/consume/cmake with the package, and runs it."""
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout


class Consume(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps", "CMakeToolchain"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=os.path.join(self.source_folder, *[os.pardir] * 3, "tests", "consume", "cmake"))
        cmake.build()

    def test(self):
        if can_run(self):
            for program in ("consume", "consume_own"):
                self.run('"%s"' % os.path.join(self.cpp.build.bindir, program), env="conanrun")
