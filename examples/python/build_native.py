"""Builds the module tieredkv._native by cffi: the header is compiled once, with the declarations that it has itself.
TIEREDKV_CFLAGS: words for the compiler in the place of -O2 -g0, such as switches of the header."""
import os
import re
import shutil

HERE = os.path.dirname(os.path.abspath(__file__))
COPY = os.path.join(HERE, "tieredkv", "tieredkv.h")
# Constants that the C compiler evaluates. The others are plain numbers.
FLOATS = ("TKV_ZERO",)


def find_header():
    """Returns the path of the copy in the package. In a checkout it is made from the header two folders further up."""
    original = os.path.join(HERE, os.pardir, os.pardir, "tieredkv.h")
    if os.path.exists(original):
        shutil.copyfile(original, COPY)
    return COPY


def read_version(header):
    """Returns the version that the header states."""
    return re.search(r'#define TKV_VERSION_STRING "(.*)"', header).group(1)


def read_declarations(header):
    """Returns what cffi reads: the constants, types and functions of the interface, without comments and macros."""
    text = re.search(r"^/\* =+ api\.h =+ \*/$(.*)^#endif /\* TIEREDKV_H \*/$", header, re.S | re.M).group(1)
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S).replace("\\\n", " ")
    statuses = re.findall(r"\bX\((TKV_\w+), (-?\d+),", text)
    constants = []
    for name, value in re.findall(r"^#define (TKV_[A-Z_]+) (.+?) *$", text, re.M):
        if re.fullmatch(r"\(?-?\d+\)?", value):
            constants.append("#define %s %s" % (name, value.strip("()")))
        elif name in FLOATS:
            constants.append("static const float %s;" % name)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    text = re.sub(r'^extern "C" \{$|^\}$', "", text, flags=re.M)
    text = re.sub(r"\{\s*TKV_STATUS_LIST\(TKV_STATUS_ENUM_\)", "{ " + " ".join("%s = %s," % row for row in statuses), text)
    text = re.sub(r"\bTKV_API\b", "extern", text)
    return "\n".join(constants) + "\n" + re.sub(r"\n\s*\n+", "\n", text)


def make_builder():
    """Returns the FFI of cffi that setup.py compiles."""
    import cffi
    with open(find_header(), encoding="ascii") as f:
        header = f.read()
    builder = cffi.FFI()
    builder.cdef(read_declarations(header))
    builder.set_source("tieredkv._native", '#define TIEREDKV_IMPLEMENTATION\n#include "tieredkv.h"\n',
                       include_dirs=[os.path.dirname(COPY)], libraries=[] if os.name == "nt" else ["m"],
                       extra_compile_args=os.environ.get("TIEREDKV_CFLAGS", "" if os.name == "nt" else "-O2 -g0").split())
    return builder

