#!/usr/bin/env python3
"""Changes one place of src/ at a time, and looks whether a test fails. First run tools/coverage.py: it says which
programs run a line. Needs gcc; of Python, the standard library.

    python3 tools/mutate.py [-n 300] [--seed 1]      writes build/mutants.txt, prints survivors and the score
        --parts WORD ...    only parts with a word in their names
        --list              prints the mutants that it would run
        --least PERCENT     fails below this score
        --jobs N            mutants at a time

Kinds, in equal shares: a comparison or its bound, && and ||, a sign, a constant, a statement that is left out. A
quarter is in the kernels of AVX2, the rest in all parts but the kernels of other instruction sets. Programs that run
the changed line are compiled with it, the fastest first; the first failed check ends the mutant. gcc compiles kernels
for AVX2, other parts without vectors. Where tcc is installed, it comes before gcc: it compiles in a tenth of a second,
but has no atomics and skips tests, so gcc compiles what survives. A run with the same header keeps old verdicts.

Verdicts: killed, timeout (a program used six times its processor time), survived, invalid (it does not compile),
argued: tests/mutants.txt says why no test can see it. The score is the share of killed and timeout among all but
invalid and argued.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import random
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
TCC = ["tcc", "-w", "-DTKV_NO_SIMD"]
SCALAR = ["gcc", "-O0", "-w", "-DTKV_NO_SIMD"]
AVX2 = ["gcc", "-O1", "-w", "-DTKV_NO_AVX512"]
MEMORY = 4 << 30  # bytes that a program may map
known = threading.Lock()


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
    """Returns n mutants, one at most of a line: kinds in equal shares, a quarter with vectors."""
    rest, lines, chosen = sorted(set(mutants)), set(), []
    random.Random(seed).shuffle(rest)
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


# >>programs
class Failed(Exception):
    """A program does not compile."""


def build(words, program, folder):
    """Compiles the copy of the header in a folder and a program. Returns the program's path."""
    library, path = os.path.join(folder, "library.o"), os.path.join(folder, program)
    commands = [words + coverage.words_of(program, folder) + [library, "-o", path, "-lm", "-pthread"]]
    if not os.path.exists(library):
        commands.insert(0, words + ["-c", os.path.join(folder, "tieredkv.c"), "-o", library])
    for command in commands:
        done = coverage.run(command)
        if done.returncode:
            raise Failed(done.stdout)
    return path


def run(path, words, cpu, wall):
    """Runs a program until its first failed test. Returns passed, killed or timeout, and its processor time."""
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    env = dict(os.environ, TKV_TEST_QUICK="1", TKV_ISA="auto" if "-DTKV_NO_SIMD" in words else "avx2")
    p = subprocess.Popen([path], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit)
    late = threading.Event()
    timer = threading.Timer(wall, lambda: (late.set(), os.kill(p.pid, signal.SIGKILL)))
    timer.start()  # Popen.kill() would wait for the process, and lose its times
    failed = False
    for line in p.stdout:
        if b"FAILED" in line and not failed:
            failed = True
            os.kill(p.pid, signal.SIGKILL)
    _, status, used = os.wait4(p.pid, 0)
    p.returncode = status
    p.stdout.close()
    timer.cancel()
    seconds = used.ru_utime + used.ru_stime
    if failed:
        return "killed", seconds
    if late.is_set() or seconds >= cpu:
        return "timeout", seconds
    return "killed" if status else "passed", seconds


class Baseline:
    """What programs do without a mutant: their seconds, or None if they fail with these flags."""

    def __init__(self, text):
        self.text, self.file = text, os.path.join(DIR, "baseline.json")
        self.key = hashlib.sha256((text + repr((TCC, SCALAR, AVX2))).encode()).hexdigest()
        try:
            with open(self.file) as f:
                data = json.load(f)
        except (OSError, ValueError):
            data = {}
        self.seconds = data.get("seconds", {}) if data.get("key") == self.key else {}
        if not self.seconds:
            shutil.rmtree(DIR, ignore_errors=True)

    def of(self, program, words):
        name = "%s %s" % (program, " ".join(words))
        with known:
            if name not in self.seconds:
                folder = os.path.join(DIR, "-".join(words).replace("-D", ""))
                coverage.write_copy(folder, self.text)
                try:
                    path = build(words, program, folder)
                    verdict, seconds = run(path, words, 1800, 3600)
                    os.remove(path)
                except Failed:
                    verdict, seconds = "invalid", 0
                self.seconds[name] = seconds if verdict == "passed" else None
                coverage.write(self.file, json.dumps({"key": self.key, "seconds": self.seconds}))
            return self.seconds[name]


def judge(mutant, number, text, origins, users, baseline):
    """Returns a verdict and what gave it. users: {(part, line): programs, the fastest first}."""
    _, part, line, _, new = mutant
    programs, lines = users.get((part, line), []), text.split("\n")
    for i, origin in enumerate(origins):
        if origin == (part, line):
            lines[i] = new
    for words in ([TCC] if shutil.which("tcc") else []) + [SCALAR] if WITHOUT_VECTORS.match(part) else [AVX2]:
        verdict, by = judge_with(words, "\n".join(lines), os.path.join(DIR, str(number)), programs, baseline)
        if verdict != "survived" or not programs:
            break
    return verdict, by


def judge_with(words, text, folder, programs, baseline):
    """The same for one compiler. text: the changed header."""
    seen = 0
    try:
        for program in programs:
            usual = baseline.of(program, words)
            if usual is None:
                continue
            if not seen:
                coverage.write_copy(folder, text)
            seen += 1
            try:
                path = build(words, program, folder)
            except Failed:
                return "invalid", ""
            verdict, seconds = run(path, words, 6 * usual + 3, 60 * usual + 120)
            os.remove(path)
            if verdict != "passed":
                return verdict, "%s, %.1f s" % (program, seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "survived", "%d programs" % seen


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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(args)
    product = amalgamate.PRODUCTS[0]
    built, _, origins = amalgamate.build(product)
    text = built.decode()
    lines, users, measured = {}, {}, 0
    for program in coverage.programs():
        one = coverage.measured(program)
        if one is None or one["keys"][0] != coverage.keys_of(program, text, False)[0]:
            print("%s was not measured with this header" % program)
            continue
        measured += 1
        for at, (ran, _) in one["counts"].items():
            origin = origins[at - 1]
            if origin and not OTHER_MACHINES.match(origin[0]) and any(w in origin[0] for w in args.parts):
                lines.setdefault(origin[0], set()).add(origin[1])
                if ran:
                    users.setdefault(origin, set()).add((one["seconds"], program))
    if not measured:
        sys.exit("run python3 tools/coverage.py first")
    users = {at: [p for _, p in sorted(programs)] for at, programs in users.items()}
    mutants = []
    for part in sorted(lines):
        mutants += places(part, coverage.read(product.src, part), lines[part])
    chosen = choose(mutants, args.n, args.seed)
    print("%d of %d mutants, seed %d" % (len(chosen), len(mutants), args.seed), flush=True)
    if args.list:
        print("\n".join("\t".join(name_of(m)) for m in chosen))
        return 0
    key = "# header %s" % hashlib.sha256(built).hexdigest()
    rows = read_rows(coverage.read(LIST), key) if os.path.exists(LIST) else {}
    reasons = read_arguments(coverage.read(ARGUED)) if os.path.exists(ARGUED) else {}
    baseline = Baseline(text)
    began, verdicts = time.time(), []

    def verdict_of(number):
        m = chosen[number]
        if (m[1],) + name_of(m)[1:] in reasons:
            return "argued", ""
        old = rows.get(name_of(m), ("argued", ""))
        return old if old[0] != "argued" else judge(m, number, text, origins, users, baseline)

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
