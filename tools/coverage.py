#!/usr/bin/env python3
"""Measures with gcov which lines and branches of src/ the C tests run. Needs gcc and gcov; of Python, the standard
library.

    python3 tools/coverage.py                  builds and runs the tests, prints a table of the parts
        --lines PART ...    lists lines that no test runs, and branches that none takes; PART: a part of a name
        --check             fails if a part is below its floor in tests/coverage.txt, or a program fails
        --floors            writes tests/coverage.txt with what was measured
        --only WORD ...     runs programs with a word in their names; the others count as they were measured before
        --keep              runs nothing
        --full              without TKV_TEST_QUICK=1
        --jobs N            programs at a time

Assertions are compiled out. Code has -O0, where gcov counts every line. Kernels have -O1 (SLOW excepted): their
branches are those that remain in the inlined copies. A line of a template counts once, its branches once for each
instruction set. Refusals of switches (`if (!TKVI_HAS_X) return`) do not count: all parts are in this build. What they
call is run by tests/compile/switches.c, whose build leaves parts out (TKV_CORE): of it, lines that ran count. A result
stays in build/coverage, by program, until the program, a header or the library changes.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
import amalgamate

ROOT = amalgamate.ROOT
DIR = os.path.join(ROOT, "build", "coverage")
FLOORS = os.path.join(ROOT, "tests", "coverage.txt")
CC = ["gcc"]
FLAGS = ["-O0", "-fno-inline", "--coverage", "-DNDEBUG", "-DTKV_COVERAGE"]  # NDEBUG: tests/white.h asserts with assert.h
SLOW = "kernels/scalar.h"  # a kernel whose every line counts
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
WITHOUT = "switches"  # a program that includes the implementation, built with
WITHOUT_FLAGS = ["-DTKV_CORE", "-DTKV_NO_SIMD"]
LIMIT = 1800  # seconds of a program
REFUSAL = re.compile(r"\s*if \(!TKVI_HAS_\w+\) return\b")
building = threading.Lock()


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


# >>a copy of the header, which programs compile in the place of tieredkv.h
def write_copy(folder, text):
    """Writes the header, a file with the implementation, and white.h for it."""
    write(os.path.join(folder, "tieredkv.h"), text)
    write(os.path.join(folder, "tieredkv.c"), '#define TIEREDKV_IMPLEMENTATION\n#include "tieredkv.h"\n')
    write(os.path.join(folder, "tests", "white.h"), read("tests", "white.h"))


def is_white(program):
    return program.startswith("white_")


def source_of(program):
    return os.path.join("tests", "compile" if program == WITHOUT else "", program + ".c")


def words_of(program, folder):
    """Returns the compiler's words for a test program with the copy in a folder. Include guards skip the original."""
    first = os.path.join("tests", "white.h") if is_white(program) else "tieredkv.h"
    if program == WITHOUT:
        first = "tieredkv.c"
    return ["-include", os.path.join(folder, first), source_of(program)]


def programs():
    names = sorted(os.listdir(os.path.join(ROOT, "tests")))
    return [n[:-2] for n in names if re.match(r"(test|white)_\w+\.c$", n)] + \
        [WITHOUT] * os.path.exists(os.path.join(ROOT, source_of(WITHOUT)))


def instrumented(text, origins):
    """Returns the header with -O1 for kernels. Pragmas stand in lines of markers, so that no line moves."""
    lines, fast = text.split("\n"), False
    for i, line in enumerate(lines):
        part = re.match(r"/\* =+ (\S+) =+ \*/$", line)
        if part and (part.group(1).startswith("kernels/") and part.group(1) != SLOW) != fast:
            fast = not fast
            lines[i] = '_Pragma("GCC push_options") _Pragma("GCC optimize(\\"O1\\")")' if fast else \
                       '_Pragma("GCC pop_options")'
    return "\n".join(lines)


# >>measuring
def run(words, **more):
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


def compile_or_exit(words):
    done = run(words)
    if done.returncode:
        sys.exit("%s\n%s" % (" ".join(words), done.stdout))


def library_of(program, folder):
    """Builds the library once. Programs with threads link one that counts with atomic additions."""
    threads = "pthread.h" in read(source_of(program))
    out = os.path.join(folder, "threads" if threads else "library", "tieredkv.o")
    with building:
        if not os.path.exists(out):
            os.makedirs(os.path.dirname(out), exist_ok=True)
            compile_or_exit(CC + FLAGS + (["-fprofile-update=atomic"] if threads else []) +
                            ["-c", os.path.join(folder, "tieredkv.c"), "-o", out])
    return out


def counts_of(folder, notes):
    """Returns {line of the header: [whether it ran, a digit for each branch]} of one object and its counts."""
    name = os.path.basename(notes)[:-5]
    link = os.path.join(folder, name + ".gcno")
    if not os.path.exists(link):
        os.symlink(notes, link)
    done = subprocess.run(["gcov", "--json-format", "--stdout", "-b", name + ".gcda"], cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    counts = {}
    for file in json.loads(done.stdout)["files"]:
        if os.path.basename(file["file"]) != "tieredkv.h":
            continue
        for line in file["lines"]:
            old = counts.setdefault(line["line_number"], [0, ""])
            old[0] |= line["count"] > 0
            old[1] += "".join("01"[b["count"] > 0] for b in line["branches"])
    return counts


def join(into, counts):
    """Adds the counts of a second object or program. Different numbers of branches: the better list stays."""
    for line, (ran, taken) in counts.items():
        old = into.setdefault(line, [0, ""])
        old[0] |= ran
        if len(old[1]) == len(taken):
            old[1] = "".join("1" if "1" in pair else "0" for pair in zip(old[1], taken))
        elif taken.count("1") > old[1].count("1") or not old[1]:
            old[1] = taken


def measure(program, folder, keys, full):
    """Builds and runs a program, and writes its counts."""
    place = os.path.join(folder, program)
    os.makedirs(place, exist_ok=True)
    linked = [] if program == WITHOUT else [library_of(program, folder)]
    tested, path = os.path.join(place, program + ".o"), os.path.join(place, "program")
    flags = FLAGS if is_white(program) else ["-O1", "-DNDEBUG"]
    if program == WITHOUT:
        flags = FLAGS + WITHOUT_FLAGS
    compile_or_exit(CC + flags + words_of(program, folder) + ["-c", "-o", tested])
    compile_or_exit(CC + ["--coverage", tested] + linked + ["-o", path, "-lm", "-pthread"])
    env = dict(os.environ, GCOV_PREFIX=os.path.join(place, "counts"))
    if not full:
        env["TKV_TEST_QUICK"] = "1"
    began = time.time()
    try:
        done = run([path], env=env, timeout=LIMIT)
        passed, said = done.returncode == 0, done.stdout.strip().split("\n")
    except subprocess.TimeoutExpired:
        passed, said = False, ["ended after %d seconds" % LIMIT]
    seconds = time.time() - began
    counts = {}
    for obj in linked + [tested]:
        data = os.path.join(place, "counts") + obj[:-2] + ".gcda"
        if os.path.exists(data):
            join(counts, counts_of(os.path.dirname(data), obj[:-2] + ".gcno"))
            os.remove(data)
    os.remove(path)
    with open(os.path.join(folder, program + ".json"), "w") as f:
        json.dump({"keys": keys, "passed": passed, "seconds": round(seconds, 2), "counts": counts}, f)
    return passed, seconds, said


def measured(program):
    """Returns what is known of a program, or None."""
    try:
        with open(os.path.join(DIR, program + ".json")) as f:
            known = json.load(f)
    except (OSError, ValueError):
        return None
    known["counts"] = {int(line): value for line, value in known["counts"].items()}
    return known


def keys_of(program, text, full):
    """Returns hashes of the header, whose lines are counted, and of all that a program is made of."""
    names = [os.path.join(d, n) for d in ("tests", "examples", "bench")
             for n in sorted(os.listdir(os.path.join(ROOT, d))) if n.endswith(".h")]
    total = hashlib.sha256(repr((FLAGS, full)).encode())
    for part in [text, read(source_of(program))] + [read(n) for n in names]:
        total.update(part.encode())
    return [hashlib.sha256(text.encode()).hexdigest(), total.hexdigest()]


# >>reports
class Part:
    """Counts of a part: {line: whether it ran}, {line: [a digit for each branch, for each copy of the line]}."""

    def __init__(self):
        self.lines, self.branches = {}, {}

    def percents(self):
        taken = "".join("".join(b) for b in self.branches.values())
        return (100.0 * sum(self.lines.values()) / len(self.lines),
                100.0 * taken.count("1") / len(taken) if taken else 100.0)


def parts_of(counts, origins, text):
    """Returns {part: Part} from counts by lines of the header."""
    parts, lines = {}, text.split("\n")
    for line, (ran, taken) in sorted(counts.items()):
        origin = origins[line - 1] if line <= len(origins) else None
        if origin and not REFUSAL.match(lines[line - 1]):
            part = parts.setdefault(origin[0], Part())
            part.lines[origin[1]] = part.lines.get(origin[1], 0) | ran
            part.branches.setdefault(origin[1], []).append(taken)
    return parts


def table(parts, order):
    out = ["%-28s %6s %8s %7s %9s %8s" % ("part", "lines", "not run", "%", "branches", "%")]
    total = Part()
    for name in order:
        if name in parts:
            p = parts[name]
            branches = sum(len(b) for copies in p.branches.values() for b in copies)
            out.append("%-28s %6d %8d %7.1f %9d %8.1f" % (
                (name, len(p.lines), len(p.lines) - sum(p.lines.values()), p.percents()[0], branches, p.percents()[1])))
            total.lines.update({(name, i): ran for i, ran in p.lines.items()})
            total.branches.update({(name, i): b for i, b in p.branches.items()})
    if total.lines:
        out.append("%d of %d lines run, %.1f %%; %.1f %% of branches are taken" % (
            sum(total.lines.values()), len(total.lines), *total.percents()))
    return out


def gaps(name, part, text):
    """Returns a line for each line that did not run, and for each with branches that were not taken."""
    lines, out = text.split("\n"), []
    for i in sorted(part.lines):
        missing = [b for b in part.branches[i] if "0" in b]
        if not part.lines[i]:
            out.append("%s:%d: not run: %s" % (name, i, lines[i - 1].strip()))
        elif missing:
            out.append("%s:%d: branches %s: %s" % (name, i, " ".join(missing), lines[i - 1].strip()))
    return out


def floors_text(parts, order):
    rows = ["%-28s %5.1f %5.1f" % ((name,) + tuple(int(x * 10) / 10 for x in parts[name].percents()))
            for name in order if name in parts]
    return "\n".join(["# part, lines %, branches %: floors of `make coverage`, written by ARGS=--floors"] + rows) + "\n"


def below(parts, floors, skip=""):
    """Returns a sentence for each part below its floor or without one. skip: how names begin that stay out."""
    rows, out = {}, []
    for line in floors.split("\n"):
        words = line.split("#")[0].split()
        if words:
            rows[words[0]] = (float(words[1]), float(words[2]))
    for name, part in parts.items():
        if skip and name.startswith(skip):
            continue
        if name not in rows:
            out.append("%s has no floor" % name)
            continue
        for what, got, least in zip(("lines", "branches"), part.percents(), rows[name]):
            if got < least:
                out.append("%s: %.1f %% of %s, and its floor is %.1f" % (name, got, what, least))
    return out + ["%s has a floor, but no line" % name for name in rows if name not in parts]


def has_avx512():
    try:
        return AVX512 <= set(re.search(r"^flags.*", read("/proc/cpuinfo"), re.M).group().split())
    except (OSError, AttributeError):
        return False


def main(args):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--lines", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    for flag in ("check", "floors", "keep", "full"):
        parser.add_argument("--" + flag, action="store_true")
    args = parser.parse_args(args)
    product = amalgamate.PRODUCTS[0]
    built, order, origins = amalgamate.build(product)
    text = built.decode()
    keys = {p: keys_of(p, text, args.full) for p in programs()}
    known = {p: measured(p) for p in keys}
    due = [p for p in keys if not args.keep and any(w in p for w in args.only) and
           (known[p] is None or known[p]["keys"] != keys[p] or not known[p]["passed"])]
    header = os.path.join(DIR, "tieredkv.h")
    copy = instrumented(text, origins)
    if due and (not os.path.exists(header) or read(header) != copy):
        for name in ("library", "threads"):
            if os.path.exists(os.path.join(DIR, name, "tieredkv.o")):
                os.remove(os.path.join(DIR, name, "tieredkv.o"))
        write_copy(DIR, copy)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(measure, p, DIR, keys[p], args.full): p for p in due}
        for job in concurrent.futures.as_completed(jobs):
            passed, seconds, said = job.result()
            print("%-24s %6.1f s  %s" % (jobs[job], seconds, said[-1]), flush=True)
            if not passed:
                print("\n".join(said[-20:]))
    wrong, counts = [], {}
    for p in keys:
        one = measured(p)
        if one is None or one["keys"][0] != keys[p][0]:
            wrong.append("%s was not measured with this header" % p)
            continue
        if one["keys"] != keys[p]:
            wrong.append("%s has changed since it was measured" % p)
        elif not one["passed"]:
            wrong.append("%s fails" % p)
        join(counts, {line: c for line, c in one["counts"].items() if p != WITHOUT or c[0]})
    parts = parts_of(counts, origins, text)
    order = [n for n in amalgamate.parts_in(product) if n in parts]
    for name in order:
        if any(word in name for word in args.lines):
            print("\n".join(gaps(name, parts[name], read(product.src, name))))
    if not args.lines:
        print("\n".join(table(parts, order)))
    if args.floors:
        write(FLOORS, floors_text(parts, order))
    if args.check:
        skip = "" if has_avx512() else "kernels/"
        if skip:
            print("floors of kernels/ are not checked: this processor has no AVX-512")
        wrong += below(parts, read(FLOORS) if os.path.exists(FLOORS) else "", skip)
    print("\n".join(wrong))
    return 1 if wrong and args.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
