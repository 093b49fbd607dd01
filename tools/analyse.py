#!/usr/bin/env python3
"""Runs static analysers over the implementation.

    python3 tools/analyse.py [TOOL ...]     clang-tidy (bugprone, cert), in seconds; or clang, cppcheck, gcc, in minutes
        --all                               prints argued findings too
        --parts core/fit,step/move          only these files of src/, for tools other than clang-tidy

tests/analysers.txt argues findings, one line each: tool | check | text in the line, or * | reason. What is not argued
is printed and fails. A tool that is not installed fails too. Each tool first has to find the fault of
tests/compile/planted.h, since one that looks at nothing finds nothing. Assertions are on: they tell a tool what cannot
be. The scalar build is analysed.

clang-tidy reads the whole header. The others follow calls, and do not end within minutes or 4 GiB on all of it. They
read it once for each file of src/: functions of other files are declarations there. So they follow calls inside a file,
and take a call of another file as one of unknown effect. gcc leaves out paths beyond a number of states per line.
Whole, with -DTKV_CORE and TKV_NO_REPORTS, gcc needs more than 4 GiB; by folders it bails out early. It does so in the
files of PARTLY, which otherwise need more than 4 GiB: of these it sees a part of the paths. On 2026-11-28 all four were
run to the end: clang 21 findings in 180 s of CPU, cppcheck 15 in 88 s, gcc 12 in 154 s and 1.9 GB, all argued.
"""
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = ["-std=c99", "-DTKV_NO_SIMD", "-DTIEREDKV_IMPLEMENTATION"]
ASSERTS = ["-include", "assert.h", "-DTKV_ASSERT=assert"]
SECONDS, BYTES = 300, 4 << 30  # of a run of a tool: CPU and memory
# Both clang tools look into the file that they are called with, so the header itself is that file.
TOOLS = {
    "clang-tidy": (["clang-tidy-14", "clang-tidy"], lambda tool, header: [
        tool, "--quiet", "--checks=-*,bugprone-*,cert-*", header, "--", "-x", "c"] + ASSERTS + BUILD),
    "clang": (["clang-14", "clang"], lambda tool, header: [
        tool, "--analyze", "-Wno-undefined-internal", "-o", os.devnull] + ASSERTS + BUILD + ["-x", "c", header]),
    "cppcheck": (["cppcheck"], lambda tool, header: [
        tool, "--quiet", "--enable=warning,performance,portability", "--max-configs=1", "--language=c", "--std=c99",
        "--template={file}:{line}:{column}: warning: {message} [{id}]"] + BUILD[1:] + [header]),
    "gcc": (["gcc"], lambda tool, header: [
        tool, "-fanalyzer", "-O0", "-fkeep-static-functions", "-Wanalyzer-too-complex",
        "--param=analyzer-bb-explosion-factor=100"] + ASSERTS + BUILD + ["-x", "c", "-c", header, "-o", os.devnull]),
}
PARTLY = {"gcc": ["attention/attend", "cache/plan", "report/info", "report/text"]}  # as far as FEW lets the tool see
FEW = ["--param=analyzer-bb-explosion-factor=5"]
# gcc says so where it leaves paths out, which is usual; where it leaves functions out, it has "bailed out early".
IS_NO_FINDING = {"-Wanalyzer-too-complex"}
MARK = re.compile(r"/\* ======== (\w+/\w+)\.(?:h|inc) ======== \*/$|/\* ======== ")
BODY = re.compile(r"\) \{(?: /\*.*)?$")
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


def bodies_of(lines):
    """[(file of src/ without ending, first line, last line)] of the functions"""
    part, start, bodies = None, None, []
    for i, line in enumerate(lines):
        mark = MARK.match(line)
        if mark:
            part = mark[1]
        elif part and start is None and BODY.search(line) and not re.match(r" \*|#|/\*", line):
            start = i
        elif start is not None and line == "}":
            bodies.append((part, start, i))
            start = None
    return bodies


def text_of(part, lines, bodies):
    """The header, where the functions of all other files are declarations, on the same lines."""
    kept = list(lines)
    for of, first, last in bodies:
        if of != part:
            kept[first:last + 1] = [BODY.sub(");", lines[first])] + [""] * (last - first)
    return "\n".join(kept) + "\n"


def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def findings_of(name, header, partly=False):
    """{(line, check): sentence}"""
    tool = next(filter(shutil.which, TOOLS[name][0]))
    words = TOOLS[name][1](tool, header) + (FEW if partly else [])
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit, check=False)
    text = done.stdout.decode(errors="replace")
    found = {}
    for m in FINDING.finditer(text):
        if os.path.basename(m["file"]) == os.path.basename(header) and m["check"] not in IS_NO_FINDING:
            found.setdefault((int(m["line"]), m["check"]), m["text"])
    if done.returncode or ("bailed out early" in text and not partly):
        raise SystemExit("%s did not look at everything, it ended with %d:\n%s" % (name, done.returncode, text[-2000:]))
    return found


def findings_in_text(name, text, partly=False):
    """The same of a header that is not a file."""
    with tempfile.TemporaryDirectory() as folder:
        header = os.path.join(folder, "tieredkv.h")
        with open(header, "w", encoding="utf-8") as f:
            f.write(text)
        return findings_of(name, header, partly)


def all_findings(name, parts):
    """Yields the findings in the parts, or in all without any; first the fault of planted.h."""
    planted, header = read("tests", "compile", "planted.h"), read("tieredkv.h")
    if name == "clang-tidy":
        yield findings_in_text(name, planted)
        yield findings_in_text(name, header)
        return
    lines = (header + "/* ======== planted/planted.h ======== */\n" + planted).splitlines()
    bodies = bodies_of(lines)
    known = sorted({body[0] for body in bodies} - {"planted/planted"})
    folders = {d for d in os.listdir(os.path.join(ROOT, "src")) if os.path.isdir(os.path.join(ROOT, "src", d))}
    lost = (folders - {"cuda"} - {part.split("/")[0] for part in known}) | (set(parts) - set(known))
    if lost:
        raise SystemExit("no functions in %s" % ", ".join(sorted(lost)))
    for part in ["planted/planted"] + (parts or known):
        yield findings_in_text(name, text_of(part, lines, bodies), part in PARTLY.get(name, ()))


def main(args):
    show_all, parts = "--all" in args, []
    if "--parts" in args:
        at = args.index("--parts")
        parts, args = args[at + 1].split(","), args[:at] + args[at + 2:]
    names = [arg for arg in args if arg != "--all"] or ["clang-tidy"]
    unknown = set(names) - set(TOOLS)
    if unknown:
        raise SystemExit("no tool %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(TOOLS)))
    arguments, lines, status = arguments_of(read("tests", "analysers.txt")), read("tieredkv.h").splitlines(), 0
    for name in names:
        if not any(map(shutil.which, TOOLS[name][0])):
            print("%-10s not installed" % name)
            status = 1
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        each, seen, used, bad = all_findings(name, parts), set(), set(), 0
        if not next(each):
            print("%-10s does not find the fault of tests/compile/planted.h" % name)
            status = 1
            continue
        for found in each:
            for (line, check), text in sorted(item for item in found.items() if item[0] not in seen):
                source = lines[line - 1].strip()
                why = [a for a in arguments
                       if a[0] == name and a[1] in check.split(",") and (a[2] == "*" or a[2] in source)]
                used.update(why)
                bad += not why
                if show_all or not why:
                    print("tieredkv.h:%d: %s [%s]\n    %s" % (line, text, check, source), flush=True)
            seen.update(found)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        print("%-10s %d findings, %d not argued; %d s of CPU, %d MB at most" % (
            name, len(seen), bad, after.ru_utime - before.ru_utime, after.ru_maxrss / 1024), flush=True)
        for argument in arguments:
            if argument[0] == name and argument not in used and not parts:
                print("    argues nothing: %s" % " | ".join(argument))
        status = 1 if bad else status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
