"""Builds the package: cffi compiles the header, and the version is that of the header. pyproject.toml has the rest."""
import os
import sys

from setuptools import setup

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import build_native

with open(build_native.find_header(), encoding="ascii") as f:
    VERSION = build_native.read_version(f.read())
setup(version=VERSION, cffi_modules=["build_native.py:make_builder"])
