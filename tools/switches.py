#!/usr/bin/env python3
"""Measures what each switch (TKV_NO_X, TKV_CORE) saves: bytes of text and data, and time of the compiler.

    python3 tools/switches.py            compiles the builds (ten minutes), writes bench/switches.csv, then --fill
    python3 tools/switches.py --fill     writes the numbers of bench/switches.csv into README.md and src/manual.h

CC is the compiler (gcc). Its bytes are the same on each machine. Its processor time depends on the machine and on what
else runs there, so the file has it as a share of the time of `-O2`, the mean of a build just before and one just after.
tests/test_pages.py compares the numbers in README.md and src/manual.h with the file, and the file with the library.
"""
import csv
import os
import re
import resource
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILE = os.path.join(ROOT, "bench", "switches.csv")
PAGES = ("README.md", "src/manual.h")
CC = os.environ.get("CC", "gcc").split()
FAST, SMALL = "-O2", "-Os -DTKV_NO_SIMD"
SMALLEST = "-Os -DTKV_CORE -DTKV_NO_SIMD -DTKV_NO_REPORTS"
TIMED = ["-O0", "-O2 -DTKV_NO_AVX512", "-O2 -DTKV_NO_SIMD", "-O2 -DTKV_CORE", "-O2 -DTKV_CORE -DTKV_NO_SIMD"]


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def switches():
    """The switches of chapter 2 of the manual that leave out a part."""
    names = re.findall(r"^ \*   (TKV_NO_\w+|TKV_CORE) +implementation ", read("src/manual.h"), re.M)
    return [name for name in names if name not in ("TKV_NO_MALLOC", "TKV_NO_SIMD", "TKV_NO_AVX512")]


def compile_library(options):
    """Returns bytes of text and data, and seconds of processor time."""
    with tempfile.TemporaryDirectory() as place:
        out = os.path.join(place, "tieredkv.o")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(CC + options.split() + ["-c", "examples/tieredkv.c", "-o", out], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return bytes_of(out), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bytes_of(library):
    text, data = subprocess.check_output(["size", library]).decode().splitlines()[1].split()[:2]
    return int(text) + int(data)


def compiler():
    return subprocess.check_output(CC + ["--version"]).decode().splitlines()[0]


def measure():
    size, before = compile_library(FAST)
    rows = [(FAST, size, "1.00")]
    print(FAST, size, "%.1f seconds" % before, flush=True)
    for options in TIMED:
        size, seconds = compile_library(options)
        after = compile_library(FAST)[1]
        rows.append((options, size, "%.2f" % (2 * seconds / (before + after))))
        print(*rows[-1], "%.1f seconds, then %.1f" % (seconds, after), flush=True)
        before = after
    for options in [SMALL, SMALLEST] + ["%s -D%s" % (SMALL, name) for name in switches()]:
        rows.append((options, compile_library(options)[0], ""))
        print(*rows[-1], flush=True)
    with open(FILE, "w", newline="", encoding="ascii") as f:
        f.write("# Written by tools/switches.py. %s, -c examples/tieredkv.c\n" % compiler())
        csv.writer(f, lineterminator="\n").writerows([("build", "bytes", "share of the time of -O2")] + rows)


def figures():
    """Build -> bytes, share of the time of -O2 or None."""
    with open(FILE, newline="", encoding="ascii") as f:
        rows = list(csv.reader(f))[2:]
    return {build: (int(size), float(share) if share else None) for build, size, share in rows}


def filled(text, of):
    """The text of a page with the numbers of the file in their places."""

    def fill_row(match):
        saved = [of[SMALL][0] - of["%s -D%s" % (SMALL, name)][0] for name in re.findall(r"`(TKV_\w+)`", match.group(1))]
        return "%s | %s |" % (match.group(1), "; ".join("{:,}".format(n) for n in saved))

    text = re.sub(r"^(\| `TKV_(?:NO_\w+|CORE)`[^|]*\|[^|]*) \|[^|]*\|$", fill_row, text, flags=re.M)
    for options, (size, share) in of.items():
        text = re.sub(r"(`(?:gcc )?%s(?: -c examples/tieredkv\.c)?` )[\d,]+ bytes" % re.escape(options),
                      lambda m, n=size: "%s%s bytes" % (m.group(1), "{:,}".format(n)), text)
        text = re.sub(r"( \*     gcc %s -c tieredkv\.c +)\d+ KB" % re.escape(options),
                      lambda m, n=size: "%s%d KB" % (m.group(1), round(n, -4) / 1000), text)
        if share is not None:
            text = re.sub(r"(`%s` )\d+ %%" % re.escape(options), lambda m, n=share: "%s%.0f %%" % (m.group(1), 100 * n), text)
    return text


def main():
    if sys.argv[1:] not in ([], ["--fill"]):
        sys.exit(__doc__)
    if not sys.argv[1:]:
        measure()
    for name in PAGES:
        text = filled(read(name), figures())
        with open(os.path.join(ROOT, name), "w", encoding="utf-8") as f:
            f.write(text)


if __name__ == "__main__":
    main()
