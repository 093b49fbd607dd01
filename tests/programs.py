"""Builds examples that need a package, for the tests that run them. TKV_TEST_CFLAGS: more words for the compiler, such as
sanitizers. TKV_TEST_STRICT=1: a test whose package is missing fails (STRICT)."""
import os
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STRICT = os.environ.get("TKV_TEST_STRICT") == "1"


def has_header(name, more=(), condition="1"):
    """Returns whether the compiler finds a header, and a condition of its macros holds."""
    text = "#include <%s>\n#if !(%s)\n#error\n#endif\n" % (name, condition)
    done = subprocess.run(["cc", "-E", *more, "-"], input=text, capture_output=True, text=True)
    return done.returncode == 0


def build(folder, name, more=()):
    """Builds examples/NAME.c in a folder with the command in its first lines, and more words. LIBRARY: `make test` has
    compiled the library. Returns the program."""
    with open(os.path.join(ROOT, "examples", name + ".c"), encoding="utf-8") as f:
        command = re.search(r"^ \* ((?:mpi)?cc .*?) && .*?\./%s\b" % name, f.read(), re.M).group(1)
    program = os.path.join(folder, name)
    library = os.environ.get("LIBRARY", "examples/tieredkv.c")
    words = [program if w == name else library if w == "examples/tieredkv.c" else w for w in command.split()]
    done = subprocess.run(words + list(more) + os.environ.get("TKV_TEST_CFLAGS", "").split(), cwd=ROOT, capture_output=True,
                          text=True)
    if (done.returncode, done.stderr) != (0, ""):
        raise AssertionError("%s\n%s" % (" ".join(words), done.stderr))
    return program
