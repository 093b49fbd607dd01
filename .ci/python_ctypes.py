#!/usr/bin/env python3
"""Loads the shared library by ctypes and compares the version and each status text with tieredkv.h.

    python3 .ci/python_ctypes.py libtieredkv.so        from the root of the project
"""
import ctypes
import re
import sys


def main():
    library = ctypes.CDLL(sys.argv[1])

    class Build(ctypes.Structure):  # tkv_build_info
        _fields_ = [("version", ctypes.c_int), ("config_bytes", ctypes.c_size_t), ("isa_mask", ctypes.c_uint32),
                    ("isa", ctypes.c_int)]

    build = Build()
    library.tkv_get_build.argtypes = [ctypes.c_void_p, ctypes.POINTER(Build)]
    if library.tkv_get_build(None, ctypes.byref(build)) != 0:
        sys.exit("tkv_get_build failed")
    library.tkv_get_status_text.restype = ctypes.c_char_p
    library.tkv_get_status_text.argtypes = [ctypes.c_int]
    with open("tieredkv.h", encoding="ascii") as f:
        header = f.read()
    major, minor, patch = (int(re.search(r"#define TKV_VERSION_%s (\d+)\n" % name, header).group(1))
                           for name in ("MAJOR", "MINOR", "PATCH"))
    statuses = re.findall(r'\bX\((TKV_\w+), (-?\d+),[\s\\]*"([^"]*)"', header)
    checks = [("version", build.version, major * 10000 + minor * 100 + patch)]
    checks += [(name, library.tkv_get_status_text(int(number)).decode(), text) for name, number, text in statuses]
    checks += [("the scalar kernels", build.isa_mask >> 1 & 1, 1)]
    checks += [("there are statuses", len(statuses) > 10, True)]
    failed = [check for check in checks if check[1] != check[2]]
    for name, said, expected in failed:
        print("%s: %r, expected %r" % (name, said, expected))
    print("%d passed, %d failed" % (len(checks) - len(failed), len(failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
