#!/usr/bin/env python3
"""Changes one place of src/ at a time, and looks whether a test fails. Needs gcc, and objdump of binutils; of Python,
the standard library.

    python3 tools/mutate.py [-n 300] [--seed 1]      writes build/mutants.txt, prints survivors and the score
        --parts WORD ...    only parts with a word in their names
        --list              prints the mutants that it would run
        --least PERCENT     fails below this score
        --most SECONDS      ends a mutant after this processor time of tests, as a survivor so far (600)
        --mapped            only programs whose lines are known
        --jobs N            mutants at a time

Kinds, in equal shares: a comparison or its bound, && and ||, a sign, a constant, a statement that is left out. A
quarter is in the kernels of AVX2, the rest in all parts but the kernels of other instruction sets. A first run notes
which lines each test runs (build/mutants/map). Tests that run the changed line are tried, those that end soonest
first; the first failed check ends the mutant. A test counts only if it passes without the mutant. Other parts than
kernels and attention/attend.h, where prefill needs kernels of vectors, are compiled without vectors. Where tcc is installed, it comes before gcc: it compiles in a tenth of a second.
gcc takes the tests that tcc cannot compile, skips or fails. A run with the same header keeps old verdicts,
and goes on with survivors that not all tests have tried.

Verdicts: killed, timeout (a test used six times its processor time), survived, invalid (it does not compile), argued:
tests/mutants.txt says why no test can see it. The score is the share of killed and timeout among all but invalid and
argued.
"""
import argparse
import bisect
import concurrent.futures
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
import amalgamate
import coverage

ROOT = amalgamate.ROOT
DIR = os.path.join(ROOT, "build", "mutants")
LIST = os.path.join(ROOT, "build", "mutants.txt")
ARGUED = os.path.join(ROOT, "tests", "mutants.txt")
KINDS = ("comparison", "logic", "sign", "constant", "left out")
OTHER_MACHINES = re.compile(r"kernels/(neon|wasm|avx512|vectors_128)\.h|kernels/simd_(128|avx512)\.inc")
WITHOUT_VECTORS = re.compile(r"(?!kernels/)|kernels/scalar\.h")
NEEDS_VECTORS = re.compile(r"kernels/(?!scalar\.h)|attention/attend\.h")
TCC = ["tcc", "-w", "-DTKV_NO_SIMD"]
SCALAR = ["gcc", "-O0", "-w", "-DTKV_NO_SIMD"]
AVX2 = ["gcc", "-O0", "-w", "-DTKV_NO_AVX512"]  # kernels have -O1
ASSERTS = ["-include", "assert.h", "-DTKV_ASSERT=assert"]  # of the library, as in `make test`
TRACED = AVX2 + ["-g", "-fno-pie", "-fsanitize-coverage=trace-pc", "-DTKV_TEST_TRACE", "-DTKV_COVERAGE"]
BODIES = re.compile(r"#if(?:def| defined\()\s*TIEREDKV_IMPLEMENTATION")
COMPILING = 20  # seconds that gcc needs on a busy machine
MEMORY = 4 << 30  # bytes that a program may map
known = threading.Lock()
shared = []  # blocks of the library, and its lines


# >>places
CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ ]*#(?:[^\n]*\\\n)*[^\n]*',
                  re.S | re.M)
DECLARATION = re.compile(r"\s*(?:const |static |struct |unsigned |volatile |enum )*[A-Za-z_]\w* [*\w]")
STATEMENT = re.compile(r"\s+(?:\(void\))?[\w*(][^{};]*(?: [-+*/|&^%]?= |\+\+|--|\()[^{};]*;$")
CHECK = re.compile(r"\s+if \([^{};]*\) [^{};]*;$")
WORDS = re.compile(r"\s*(?:return|for|while|do|else|case|default|goto|typedef|break|continue|switch)\b")
PAIRS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
         "+=": "-=", "-=": "+="}
SIZE = re.compile(r"(?:\b[A-Za-z_]\w* \**\w+(?:\[[^\]]*\])*|\w)\[(\d+)\]")


def blanked(text):
    """Returns C with blanks in the place of comments, strings and directives."""
    return CODE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def changed_number(word):
    if "." in word:
        return "1.0f" if float(word.rstrip("f")) == 0 else "(2.0f * %s)" % word
    digits = word.rstrip("uUlL")
    n = int(digits, 0) if digits[:2] == "0x" or digits == "0" or digits[0] != "0" else int(digits, 8)
    return "%d%s" % ({0: 1, 1: 0}.get(n, n + 1), word[len(digits):])


def removed(word):
    return ""


OPERATORS = [
    ("comparison", re.compile(r"(?<= )(?:<=?|>=?|==|!=)(?= |$)"), PAIRS.get),
    ("logic", re.compile(r"(?<= )(?:&&|\|\|)(?= |$)"), PAIRS.get),
    ("logic", re.compile(r"!(?=[\w(])"), removed),
    ("sign", re.compile(r"(?<=[\w)\]] )[-+]=?(?= |$)"), PAIRS.get),
    ("sign", re.compile(r"(?<=return )-(?=[\w(])|(?<=[ (])(?<![\w)\]] )-(?=[\w(])"), removed),
    ("constant", re.compile(r"(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?f?(?![\w.])"), changed_number),
    ("constant", re.compile(r"(?<![\w.])(?:0x[0-9a-fA-F]+|\d+)[uUlL]*(?![\w.])"), changed_number)]


def is_balanced(line):
    return line.count("(") == line.count(")")


def statement_left_out(lines, i):
    """Returns whether line i of blanked lines is one whole statement that can be left out."""
    line = lines[i]
    after = next((n for n in lines[i + 1:] if n.strip()), "")
    before = next((n.rstrip() for n in reversed(lines[:i]) if n.strip()), "")
    if not is_balanced(line) or before[-1:] not in ";{})" and not before.endswith("else"):
        return False
    if CHECK.match(line):
        return not after.strip().startswith("else")
    return bool(STATEMENT.match(line)) and not DECLARATION.match(line) and not WORDS.match(line) and \
        not line.strip().startswith("if ")


def places(part, text, lines_run):
    """Returns mutants of a part as (kind, part, line, old line, new line), in lines that programs can run."""
    out, source, lines = [], text.split("\n"), blanked(text).split("\n")
    for i in sorted(lines_run):
        code, old = lines[i - 1], source[i - 1]
        if "TKVI_ASSERT" in code or coverage.REFUSAL.match(code):
            continue
        sizes = set(m.start(1) for m in SIZE.finditer(code)) if DECLARATION.match(code) else ()
        for kind, pattern, change in OPERATORS:
            for m in pattern.finditer(code):
                if m.start() not in sizes:
                    out.append((kind, part, i, old, old[:m.start()] + change(m.group()) + old[m.end():]))
        if statement_left_out(lines, i - 1):
            out.append(("left out", part, i, old, re.match(r"\s*", old).group() + ";"))
    return out


def choose(mutants, n, seed):
    """Returns n mutants, one at most of a line: kinds in equal shares, a quarter with vectors. Hashes give the order,
    so that other lines of the source do not change it."""
    def order(m):
        return hashlib.sha256(repr((seed, m[0], m[1], m[3], m[4])).encode()).digest(), m
    rest, lines, chosen = sorted(set(mutants), key=order), set(), []
    queues = {(kind, scalar): [m for m in rest if m[0] == kind and bool(WITHOUT_VECTORS.match(m[1])) == scalar]
              for kind in KINDS for scalar in (True, False)}
    turn = 0
    while len(chosen) < n and any(queues.values()):
        queue = queues[KINDS[turn % len(KINDS)], turn // len(KINDS) % 4 != 3] or max(queues.values(), key=len)
        turn += 1
        m = queue.pop()
        if m[1:3] not in lines:
            lines.add(m[1:3])
            chosen.append(m)
    return chosen


def read_arguments(text):
    """Returns {(part, old line, new line): reason} of tests/mutants.txt. Blank lines stand between blocks of: part, -
    line, + line, reason."""
    out = {}
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip().split("\n") if not line.startswith("#")]
        if len(lines) > 3 and lines[1][:1] == "-" and lines[2][:1] == "+":
            out[lines[0].strip(), lines[1][1:].strip(), lines[2][1:].strip()] = " ".join(lines[3:]).strip()
    return out


# >>which lines a test runs
# gcc lets each basic block of the library call a function, which notes the address. After each test, tkv_test.h writes
# the addresses. objdump says which lines a block has.
TRACE = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
enum { ROOM = 1 << 25 };
static unsigned char seen[ROOM];
static FILE *out;
static clock_t began;
extern char __executable_start[], etext[];
void __sanitizer_cov_trace_pc(void) {
    size_t at = (size_t)((char *)__builtin_return_address(0) - __executable_start);
    if (at < ROOM) seen[at] = 1;
}
void tkv_test_trace(const char *name) {
    size_t i, n = (size_t)(etext - __executable_start);
    if (!out) {
        out = fopen(getenv("TRACE_OUT"), "w");
        fprintf(out, "%lx\\n", (unsigned long)(size_t)__sanitizer_cov_trace_pc);
    }
    fprintf(out, "%s %.3f", name, (double)(clock() - began) / (double)CLOCKS_PER_SEC);
    for (i = 0; i < n && i < ROOM; i++) {
        if (seen[i]) fprintf(out, " %lx", (unsigned long)(size_t)(__executable_start + i));
        seen[i] = 0;
    }
    fprintf(out, "\\n");
    fflush(out);
    began = clock();
}
__attribute__((destructor)) static void end(void) { tkv_test_trace(""); }
"""
CALL = re.compile(r"<__sanitizer_cov_trace_pc>\n(?:\n.*\n)?\s*([0-9a-f]+):")
ROW = re.compile(r"^(\S+)\s+(\d+|-)\s+0x([0-9a-f]+)", re.M)


def blocks_of(path):
    """Returns {address after a block's call: lines of the header}, and all lines of the header with code. Programs that
    link the library have its blocks at the same distance from the function that they call."""
    after = sorted(int(a, 16) for a in CALL.findall(coverage.run(["objdump", "-d", "--no-show-raw-insn", path]).stdout))
    rows = sorted((int(at, 16), int(line) if line != "-" and file == "tieredkv.h" else 0) for file, line, at in
                  ROW.findall(coverage.run(["objdump", "--dwarf=decodedline", path]).stdout))
    starts = [bisect.bisect_right(rows, (at - 1, 1 << 30)) - 1 for at in after]  # the row of the call
    blocks = {}
    for at, start, end in zip(after, starts, starts[1:] + [len(rows)]):
        while start > 0 and rows[start - 1][0] == rows[start][0]:
            start -= 1
        blocks[at] = set(line for _, line in rows[start:max(end, start + 1)] if line)
    return blocks, set(line for _, line in rows if line)


def map_of(program, text, must=True):
    """Runs a program once, if it must. Returns {"key", "lines": those with code, "tests": {name: [seconds, lines that
    it runs]}}. Lines are bits of a number. The name "" stands for what runs outside of tests, or without any."""
    file, key = os.path.join(DIR, "map", program + ".json"), coverage.keys_of(program, text + TRACE, False)[1]
    try:
        with open(file) as f:
            one = json.load(f)
        if one["key"] == key:
            return one
    except (OSError, ValueError):
        pass
    if not must:
        return None
    folder = os.path.join(DIR, "traced")
    library, path = os.path.join(folder, "tieredkv.o"), os.path.join(folder, program)
    trace, out = os.path.join(folder, "trace.c"), os.path.join(folder, program + ".txt")
    with known:
        if not os.path.exists(library) or (coverage.read(folder, "tieredkv.h"), coverage.read(trace)) != (text, TRACE):
            coverage.write_copy(folder, text)
            coverage.write(trace, TRACE)
            parts = [library[:-1] + "part.o", trace[:-1] + "o"]
            coverage.compile_or_exit(TRACED + ["-c", os.path.join(folder, "tieredkv.c"), "-o", parts[0]])
            coverage.compile_or_exit(["gcc", "-O2", "-fno-pie", "-c", trace, "-o", parts[1]])
            coverage.compile_or_exit(["gcc", "-r", "-nostdlib"] + parts + ["-o", library])
    words = TRACED if coverage.is_white(program) else [w for w in TRACED if not w.startswith("-fs")]
    coverage.compile_or_exit(words + coverage.words_of(program, folder) +
                             [library, "-no-pie", "-o", path, "-lm", "-pthread"])
    env = dict(os.environ, TKV_TEST_QUICK="1", TRACE_OUT=out)
    began = time.time()
    if coverage.run([path], env=env, timeout=coverage.LIMIT).returncode:
        print("%s fails in %s" % (program, " ".join(TRACED)), flush=True)
    first, *rows = coverage.read(out).split("\n")[:-1]
    place = int(first, 16)
    with known:
        if coverage.is_white(program) or not shared:
            blocks, lines = blocks_of(path)
            blocks = {at - place: ran for at, ran in blocks.items()}
            if not coverage.is_white(program):
                shared.extend((blocks, lines))
        else:
            blocks, lines = shared
    tests = {}
    for row in rows:
        name, used, addresses = re.match(r"(\w*) ([\d.]+)(.*)", row).groups()
        ran = set().union(*(blocks.get(int(a, 16) - place, ()) for a in addresses.split()))
        tests[name] = [float(used), "%x" % sum(1 << line for line in ran)]
    one = {"key": key, "lines": "%x" % sum(1 << line for line in lines), "tests": tests}
    coverage.write(file, json.dumps(one))
    os.remove(path)
    os.remove(out)
    print("%-24s %6.1f s, %d tests" % (program, time.time() - began, len(tests)), flush=True)
    return one


# >>programs
class Failed(Exception):
    """A program does not compile."""


def with_fast_kernels(text, origins, words):
    """Returns the header for a compiler: kernels of AVX2 have -O1."""
    return coverage.instrumented(text, origins) if words == AVX2 else text


def compile_or_fail(words):
    done = coverage.run(words)
    if done.returncode:
        raise Failed(done.stdout)


def version_of(program):
    return coverage.keys_of(program, "", False)[1][:8]


def build_library(words, folder):
    compile_or_fail(words + ASSERTS + ["-c", os.path.join(folder, "tieredkv.c"), "-o",
                                       os.path.join(folder, "library.o")])


def build(words, program, folder, objects):
    """Compiles a program with the copy of the header in a folder. White-box tests contain what they use of the library,
    others link it. objects: a folder where the program's object may come from, or None. Returns the program's path."""
    path, source = os.path.join(folder, program), coverage.words_of(program, folder)
    if coverage.is_white(program):
        compile_or_fail(words + ["-DTKV_STATIC="] + source + ["-o", path, "-lm", "-pthread"])
        return path
    if not os.path.exists(os.path.join(folder, "library.o")):
        build_library(words, folder)
    if objects:
        obj = os.path.join(objects, "%s-%s.o" % (program, version_of(program)))
        with known:
            if not os.path.exists(obj):
                compile_or_fail(words + coverage.words_of(program, objects) + ["-c", "-o", obj])
        source = [obj]
    compile_or_fail(words + source + [os.path.join(folder, "library.o"), "-o", path, "-lm", "-pthread"])
    return path


def run(path, words, test, cpu):
    """Runs a test until its first failed check. Returns passed, skipped, killed or timeout, and its processor time."""
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    env = dict(os.environ, TKV_TEST_QUICK="1", TKV_TEST_FIRST="1", TKV_TEST_FILTER=test)
    p = subprocess.Popen([path], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit)
    late = threading.Event()
    timer = threading.Timer(10 * cpu + 60, lambda: (late.set(), os.kill(p.pid, signal.SIGKILL)))
    timer.start()  # Popen.kill() would wait for the process, and lose its times
    said = p.stdout.read()
    _, status, used = os.wait4(p.pid, 0)
    p.returncode = status
    p.stdout.close()
    timer.cancel()
    seconds = used.ru_utime + used.ru_stime
    if late.is_set() or seconds >= cpu:
        return "timeout", seconds
    return "killed" if status else "skipped" if b" skipped" in said else "passed", seconds


class Baseline:
    """What tests do without a mutant."""

    def __init__(self, text, origins):
        self.text, self.origins, self.file = text, origins, os.path.join(DIR, "baseline.json")
        self.key = hashlib.sha256((text + repr((TCC, SCALAR, AVX2))).encode()).hexdigest()
        try:
            with open(self.file) as f:
                data = json.load(f)
        except (OSError, ValueError):
            data = {}
        self.known = data.get("known", {}) if data.get("key") == self.key else {}
        self.passed = data.get("passed", {}) if data.get("key") == self.key else {}  # {name of a mutant: tests}
        if not self.known:
            shutil.rmtree(os.path.join(DIR, "objects"), ignore_errors=True)

    def objects(self, words):
        """Returns a folder for objects of programs and of the library, all without a mutant."""
        folder = os.path.join(DIR, "objects", "-".join(words).replace("-D", ""))
        with known:
            if not os.path.exists(folder):
                coverage.write_copy(folder, with_fast_kernels(self.text, self.origins, words))
        return folder

    def of(self, program, test, words):
        """Returns a verdict and seconds; the verdict is invalid if the program does not compile with these words."""
        name = "%s %s %s %s" % (version_of(program), program, test, " ".join(words))
        if name not in self.known:
            try:
                folder = self.objects(words)
                path = os.path.join(folder, version_of(program), program)
                with coverage.building:
                    if not os.path.exists(path):
                        os.makedirs(os.path.dirname(path), exist_ok=True)
                        os.replace(build(words, program, folder, folder), path)
                result = run(path, words, test, coverage.LIMIT)
            except Failed:
                result = ("invalid", 0)
            self.known[name] = result
            self.save()
        return self.known[name]

    def save(self):
        with known:
            coverage.write(self.file, json.dumps({"key": self.key, "known": self.known, "passed": self.passed}))


class Users:
    """Programs and tests by the lines that they run."""

    def __init__(self, maps, text):
        self.code = blanked(text).split("\n")
        self.lines = 0
        self.tests = []
        for program, one in maps.items():
            if not one:
                print("%s is left out" % program)
                continue
            self.lines |= int(one["lines"], 16)
            named = [(test, seconds, int(ran, 16)) for test, (seconds, ran) in one["tests"].items()]
            inside = 0
            for test, seconds, ran in named:
                if test:
                    inside |= ran
                self.tests.append((seconds, program, test, ran & ~inside if not test else ran))
        self.keys = {program: one["key"][:8] for program, one in maps.items() if one}

    def of(self, lines):
        """Returns [(seconds, program, test)] that run one of these lines, or an earlier line of the same statement:
        compilers give a condition of two lines to one of them."""
        wanted = 0
        for line in lines:
            wanted |= 1 << line
            while line > 1 and self.code[line - 2].strip() and self.code[line - 2].rstrip()[-1] not in ";{}:":
                line -= 1
                wanted |= 1 << line
        return sorted(t[:3] for t in self.tests if t[3] & wanted)


def judge(mutant, number, text, origins, users, baseline, most):
    """Returns a verdict and what gave it."""
    _, part, line, _, new = mutant
    lines = text.split("\n")
    at = [i for i, origin in enumerate(origins) if origin == (part, line)]
    is_inside = min(at) > next(i for i, old in enumerate(lines) if BODIES.match(old))
    for i in at:
        lines[i] = new
    tests, spent = users.of([i + 1 for i in at]), 0.0

    def key(item):
        return " ".join([users.keys[item[1]]] + list(item[1:]))
    passed = baseline.passed.setdefault("\t".join(name_of(mutant)), [])
    rest = [item for item in tests if key(item) not in passed]
    for words in [AVX2] if NEEDS_VECTORS.match(part) else ([TCC] if shutil.which("tcc") else []) + [SCALAR]:
        if words == SCALAR and spent and most - spent < COMPILING:
            break
        changed = with_fast_kernels("\n".join(lines), origins, words)
        one = Judge(words, changed, os.path.join(DIR, str(number)), baseline, is_inside, "white_" + part.split("/")[0])
        verdict, by, rest, used = one.judge(rest, most - spent)
        spent += used
        if verdict:
            return verdict, by
        passed += [key(item) for item in tests if item not in rest and key(item) not in passed]
        baseline.save()
    return "survived", "%d of %d tests, %.0f s" % (len(tests) - len(rest), len(tests), spent)


class Judge:
    """Tests of a mutant with one compiler."""

    def __init__(self, words, text, folder, baseline, is_inside, own):
        self.own = own  # the white-box test of the part's folder
        self.words, self.folder, self.baseline = words, folder, baseline
        self.objects = baseline.objects(words) if is_inside else None
        self.built, self.text = {}, text

    def program(self, name):
        """Returns the path of a program, or None if it does not compile."""
        if name not in self.built:
            try:
                self.built[name] = build(self.words, name, self.folder, self.objects)
            except Failed:
                self.built[name] = None
        return self.built[name]

    def cost(self, item):
        seconds, program, _ = item
        if program in self.built:
            return seconds
        if self.words[0] == "tcc":
            return seconds + 0.1
        if program == self.own:
            return seconds
        if coverage.is_white(program):
            return seconds + 4.0
        return seconds + (0.5 if os.path.exists(os.path.join(self.folder, "library.o")) else 6.0)

    def verdict_of(self, seconds, program, test):
        """Returns what one test gives. Skipped: it says nothing with this compiler."""
        path = self.program(program)
        if not path:
            return ("skipped" if self.baseline.of(program, test, self.words)[0] == "invalid" else "invalid"), 0
        verdict, used = run(path, self.words, test, 6 * seconds + 3)
        if verdict in ("killed", "timeout"):
            usual, longer = self.baseline.of(program, test, self.words)
            if usual != "passed":
                return "skipped", used
            if verdict == "timeout" and longer > seconds:
                verdict, used = run(path, self.words, test, 6 * longer + 3)
        return verdict, used

    def judge(self, tests, most):
        """Returns a verdict or "", what gave it, the tests that said nothing, and the processor time of tests."""
        spent, rest, left = 0.0, list(tests), []
        try:
            while rest and spent < most:
                if not os.path.exists(self.folder):
                    coverage.write_copy(self.folder, self.text)
                item = min(rest, key=self.cost)
                rest.remove(item)
                verdict, used = self.verdict_of(*item)
                spent += used
                if verdict == "skipped":
                    left.append(item)
                elif verdict != "passed":
                    return verdict, "%s %s, %.1f s" % (item[1], item[2], spent), [], 0
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return "", "", left + rest, spent


# >>reports
def name_of(mutant):
    _, part, line, old, new = mutant
    return "%s:%d" % (part, line), old.strip(), new.strip()


def read_rows(text, key):
    """Returns {name of a mutant: (verdict, what gave it)} of a list whose header was the same."""
    lines = text.split("\n")
    cells = [line.split("\t") for line in lines[1:] if lines[0] == key]
    return {tuple(c[1:4]): (c[0], c[4]) for c in cells if len(c) == 5}


def list_of(rows, key):
    return "\n".join([key] + ["\t".join((row[0],) + name + (row[1],)) for name, row in rows.items()]) + "\n"


def score(verdicts):
    dead = sum(v in ("killed", "timeout") for v in verdicts)
    counted = dead + verdicts.count("survived")
    return 100.0 * dead / counted if counted else 100.0


def main(args):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=[""])
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--most", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--mapped", action="store_true")
    args = parser.parse_args(args)
    product = amalgamate.PRODUCTS[0]
    built, _, origins = amalgamate.build(product)
    text = built.decode()
    traced = coverage.instrumented(text, origins)
    names = coverage.programs()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        users = Users(dict(zip(names, pool.map(lambda p: map_of(p, traced, not args.mapped), names))), text)
    lines = {}
    for at, origin in enumerate(origins):
        if origin and users.lines >> (at + 1) & 1 and not OTHER_MACHINES.match(origin[0]) and \
                any(w in origin[0] for w in args.parts):
            lines.setdefault(origin[0], set()).add(origin[1])
    mutants = []
    for part in sorted(lines):
        mutants += places(part, coverage.read(product.src, part), lines[part])
    chosen = sorted(choose(mutants, args.n, args.seed), key=lambda m: not WITHOUT_VECTORS.match(m[1]))  # slow ones last
    print("%d of %d mutants, seed %d" % (len(chosen), len(mutants), args.seed), flush=True)
    if args.list:
        print("\n".join("\t".join(name_of(m)) for m in chosen))
        return 0
    key = "# header %s" % hashlib.sha256(built).hexdigest()
    rows = read_rows(coverage.read(LIST), key) if os.path.exists(LIST) else {}
    reasons = read_arguments(coverage.read(ARGUED)) if os.path.exists(ARGUED) else {}
    baseline = Baseline(text, origins)
    began, verdicts = time.time(), []

    def tests_of(m):
        return len(users.of([i + 1 for i, origin in enumerate(origins) if origin == m[1:3]]))

    def verdict_of(number):
        m = chosen[number]
        if (m[1],) + name_of(m)[1:] in reasons:
            return "argued", ""
        old = rows.get(name_of(m), ("argued", ""))
        if old[0] == "survived" and not old[1].startswith("%d of %d tests" % (tests_of(m), tests_of(m))):
            old = ("argued", "")  # not all tests have run
        return old if old[0] != "argued" else \
            judge(m, number, text, origins, users, baseline, args.most)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for m, result in zip(chosen, pool.map(verdict_of, range(len(chosen)))):
            rows[name_of(m)] = result
            verdicts.append(result[0])
            if result[0] == "survived":
                print("\t".join(name_of(m) + result[1:]), flush=True)
            coverage.write(LIST, list_of(rows, key))
    print(", ".join("%d %s" % (verdicts.count(v), v) for v in ("killed", "timeout", "survived", "argued", "invalid")))
    print("score %.1f %%, %d s" % (score(verdicts), time.time() - began))
    return 1 if score(verdicts) < args.least else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
