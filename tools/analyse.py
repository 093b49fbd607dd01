#!/usr/bin/env python3
"""Runs static analysers over the implementation.

    python3 tools/analyse.py [TOOL ...]     clang-tidy (bugprone, cert), in seconds; or clang, cppcheck, gcc, in minutes
        --all                               prints argued findings too

tests/analysers.txt argues findings, one line each: tool | check | text in the line, or * | reason. What is not argued
is printed and fails. Each tool first has to find the fault of tests/compile/planted.h, since one that looks at nothing
finds nothing. Assertions are on: they tell a tool what cannot be. The scalar build is analysed. Only the findings of clang-tidy are all
argued. Those of clang --analyze, cppcheck and gcc -fanalyzer are not, so these run by name.
"""
import os
import re
import resource
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = ["-std=c99", "-DTKV_NO_SIMD", "-DTIEREDKV_IMPLEMENTATION"]
ASSERTS = ["-include", "assert.h", "-DTKV_ASSERT=assert"]
LIMIT = 1200  # seconds of a tool
# Both clang tools look into the file that they are called with, so the header itself is that file.
TOOLS = {
    "clang-tidy": (["clang-tidy-14", "clang-tidy"], lambda tool, header: [
        tool, "--quiet", "--checks=-*,bugprone-*,cert-*", header, "--", "-x", "c"] + ASSERTS + BUILD),
    "clang": (["clang-14", "clang"], lambda tool, header: [
        tool, "--analyze", "-o", os.devnull] + ASSERTS + BUILD + ["-x", "c", header]),
    "cppcheck": (["cppcheck"], lambda tool, header: [
        tool, "--quiet", "--enable=warning,performance,portability", "--max-configs=1", "--language=c", "--std=c99",
        "--template={file}:{line}:{column}: warning: {message} [{id}]"] + BUILD[1:] + [header]),
    "gcc": (["gcc"], lambda tool, header: [
        tool, "-fanalyzer", "-O0"] + ASSERTS + BUILD + ["-x", "c", "-c", header, "-o", os.devnull]),
}
FINDING = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?:warning|error): (?P<text>.*) \[(?P<check>[^\]]+)\]$", re.M)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def arguments_of(text):
    """[(tool, check, text in the line)]"""
    rows = [[word.strip() for word in line.split(" | ")] for line in text.splitlines() if line and line[0] != "#"]
    for row in rows:
        if len(row) != 4 or row[0] not in TOOLS or not row[3]:
            raise SystemExit("tests/analysers.txt: not tool | check | text | reason: %s" % row)
    return [tuple(row[:3]) for row in rows]


def findings_of(name, header):
    """{(line, check): sentence}"""
    tool = next(filter(shutil.which, TOOLS[name][0]))
    done = subprocess.run(TOOLS[name][1](tool, header), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=LIMIT, check=False)
    text = done.stdout.decode(errors="replace")
    found = {}
    for m in FINDING.finditer(text):
        if os.path.basename(m["file"]) == os.path.basename(header):
            found.setdefault((int(m["line"]), m["check"]), m["text"])
    if done.returncode and not found:
        raise SystemExit("%s ended with %d:\n%s" % (name, done.returncode, text[-2000:]))
    return found


def main(args):
    show_all = "--all" in args
    names = [arg for arg in args if arg != "--all"] or ["clang-tidy"]
    unknown = set(names) - set(TOOLS)
    if unknown:
        raise SystemExit("no tool %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(TOOLS)))
    arguments, lines, status = arguments_of(read("tests", "analysers.txt")), read("tieredkv.h").splitlines(), 0
    for name in names:
        if not any(map(shutil.which, TOOLS[name][0])):
            print("%-10s not installed" % name)
            continue
        if not findings_of(name, os.path.join("tests", "compile", "planted.h")):
            print("%-10s does not find the fault of tests/compile/planted.h" % name)
            status = 1
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found, used, bad = findings_of(name, "tieredkv.h"), set(), []
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        for (line, check), text in sorted(found.items()):
            source = lines[line - 1].strip()
            why = [a for a in arguments if a[0] == name and a[1] in check.split(",") and (a[2] == "*" or a[2] in source)]
            used.update(why)
            if not why:
                bad.append(check)
            if show_all or not why:
                print("tieredkv.h:%d: %s [%s]\n    %s" % (line, text, check, source))
        print("%-10s %d findings, %d not argued; %d s of CPU, %d MB at most" % (
            name, len(found), len(bad), after.ru_utime - before.ru_utime, after.ru_maxrss / 1024))
        for argument in arguments:
            if argument[0] == name and argument not in used:
                print("    argues nothing: %s" % " | ".join(argument))
        status = 1 if bad else status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
