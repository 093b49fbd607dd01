"""Builds examples that need a package, for the tests that run them. TKV_TEST_CFLAGS: more words for the compiler, such as
sanitizers. TKV_TEST_STRICT=1: a test whose package is missing fails (STRICT). TKV_TEST_LLAMACPP=DIR: headers of llama.cpp
and ggml are in DIR/include, their libraries in DIR/lib; .ci/integrations shows where they come from."""
import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STRICT = os.environ.get("TKV_TEST_STRICT") == "1"
LLAMACPP = os.environ.get("TKV_TEST_LLAMACPP", "")
LLAMACPP_LIB = os.path.join(LLAMACPP, "lib")
WARN = """-Werror -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wcast-qual -Wundef
    -Wdouble-promotion""".split()
WARN_C = ["-std=c99"] + WARN + ["-Wstrict-prototypes", "-Wmissing-prototypes"]


def missing(what):
    """Something that is not here: the tests are skipped and counted, or fail where it was to be installed."""
    if STRICT:
        raise RuntimeError(what)
    raise unittest.SkipTest(what)


def has_header(name, more=(), condition="1"):
    """Returns whether the compiler finds a header, and a condition of its macros holds."""
    text = "#include <%s>\n#if !(%s)\n#error\n#endif\n" % (name, condition)
    done = subprocess.run(["cc", "-E", *more, "-"], input=text, capture_output=True, text=True)
    return done.returncode == 0


def llamacpp_words(header):
    """Returns the compiler's words for a header of llama.cpp or ggml and the libraries."""
    words = ["-isystem", os.path.join(LLAMACPP, "include")]
    if not LLAMACPP or not has_header(header, words):
        missing("%s is missing: TKV_TEST_LLAMACPP names no folder with include/%s" % (header, header))
    return words + ["-L" + LLAMACPP_LIB, "-Wl,-rpath," + LLAMACPP_LIB]


def compile_program(command, more=()):
    """Runs a compiler, which must be silent. LIBRARY: `make test` has compiled the library."""
    library = os.environ.get("LIBRARY", "examples/tieredkv.c")
    words = [library if w in ("examples/tieredkv.c", "tieredkv.o") else w for w in command]
    words += list(more) + os.environ.get("TKV_TEST_CFLAGS", "").split()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if (done.returncode, done.stderr) != (0, ""):
        raise AssertionError("%s\n%s" % (" ".join(words), done.stderr))


def build(folder, name, more=()):
    """Builds examples/NAME.c or .cpp in a folder with the command in its first lines, and more words. Returns the program."""
    path = os.path.join(ROOT, "examples", name + ".c")
    with open(path if os.path.exists(path) else path + "pp", encoding="utf-8") as f:
        command = re.search(r"^ \* ((?:mpicc|cc|c\+\+) .*?) && .*?\./%s\b" % name, f.read(), re.M).group(1)
    program = os.path.join(folder, name)
    compile_program([program if w == name else w for w in command.split()], more)
    return program
