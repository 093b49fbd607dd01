#!/usr/bin/env python3
"""What `make run` and `make budget` show: generate.c finds and asks for what a prompt hides, both measure latency, the
prompt of the demo is as the demo model learnt it, and tools/terminal_svg.py draws what was printed."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STORIES = os.path.join(ROOT, "..", "shared", "data", "models", "stories260K_tok512.gguf")
DEMO = os.path.join(ROOT, "examples", "data", "demo.gguf")
PROMPT = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")
sys.dont_write_bytecode = True
import results
sys.path.insert(0, os.path.join(ROOT, "tools"))
import terminal_svg


compiled = tempfile.TemporaryDirectory()  # each example once


def compile_example(name, place):
    """Returns the path of the program."""
    program, once = os.path.join(place, name), os.path.join(compiled.name, name)
    library = os.path.join(ROOT, os.environ.get("LIBRARY", "examples/tieredkv.c"))  # make test compiled it
    sources = [os.path.join(ROOT, "examples", name + ".c"), library]
    if not os.path.exists(once):
        subprocess.check_call([os.environ.get("CC", "cc"), "-O2", "-o", once] + sources + ["-lm"])
    shutil.copy(once, program)
    return program


class Example:
    """A folder with compiled examples, for tests with a model that may be missing."""

    MODEL = DEMO

    @classmethod
    def setUpClass(cls):
        if not os.path.exists(cls.MODEL):
            raise unittest.SkipTest("no " + cls.MODEL)
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)
        for name in cls.PROGRAMS:
            compile_example(name, cls.place.name)


class Recall(Example, unittest.TestCase):
    """A model of children's stories knows how "Once upon a" goes on, and nothing else."""

    MODEL = STORIES
    PROGRAMS = "generate",

    def generate(self, prompt, *args, status=0):
        program = os.path.join(self.place.name, "generate")
        run = subprocess.run([program, STORIES, "-p", prompt, "-c", "512", "--seed", "3"] + list(args),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(run.returncode, status, run.stderr)
        return run.stdout.decode("utf-8", "replace"), run.stderr.decode()

    def rows(self, text):
        row = r"^  (\S.*?) +([\d,]+)   (hot|warm|archive) +(\S+) +(\S+) +(right|wrong) +(\S+) +(right|wrong)$"
        found = re.findall(row, text, re.M)
        return [(r[0], int(r[1].replace(",", ""))) + r[2:] for r in found]

    def test_right_and_wrong_answers(self):
        text, _ = self.generate("Once upon a time.\nTom was big.\nOnce upon a dog\nThe end", "-n", "8", "--recall",
                                "Once upon")
        rows = self.rows(text)
        self.assertEqual([r[0] for r in rows], ["a", "a"])
        self.assertEqual([r[2:] for r in rows], [("hot", "time", "time", "right", "time", "right"),
                                                ("hot", "dog", "tim", "wrong", "tim", "wrong")])
        self.assertGreater(rows[0][1], rows[1][1])
        self.assertIn("recall      1 of 2 from the tiers, 0 of 0 in the archive; 1 of 2 from the exact cache", text)

    def test_tiers_and_distance(self):
        story = "Tom saw a red ball and a big dog in the park.\n" * 12
        args = "-n", "2", "--hot", "32", "--warm", "64:kivi4", "--archive", "kivi2", "--recall", "Once upon"
        text, _ = self.generate("Once upon a time\n" + story, *args)
        (_, back, tier, *_), = self.rows(text)
        tokens = int(re.search(r"^  total +([\d,]+)", text, re.M).group(1).replace(",", ""))
        self.assertTrue(tokens - 8 < back < tokens, (back, tokens))
        self.assertEqual(tier, "archive")
        # The newest copy of a line is what can be remembered, but a line that only begins so is another one.
        nearer, _ = self.generate("Once upon a time\n" + story + "Once upon a time\nOnce upon a timely\n", *args)
        (_, back, tier, *_), (_, same, *_), (_, back2, _, word, *_) = self.rows(nearer)
        self.assertEqual((back, tier, word), (same, "hot", "timely"))
        self.assertTrue(0 < back2 < back - 3 < 32, (back, back2))

    def test_nothing_to_ask_for(self):
        _, said = self.generate("Once upon a time\n", "-n", "2", "--recall", "The secret", status=1)
        self.assertIn('no line of the prompt begins with "The secret"', said)


class Tables(Example, unittest.TestCase):
    """calibrate writes what generate loads."""

    PROGRAMS = "calibrate", "generate"

    def run_in_place(self, *args):
        return subprocess.run(["./" + args[0]] + list(args[1:]), cwd=self.place.name, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)

    def test_written_loaded_and_damaged(self):
        run = self.run_in_place("calibrate", DEMO, "-f", PROMPT, "-o", "t.bin", "-n", "600")
        self.assertEqual(run.returncode, 0, run.stderr)
        text = run.stdout.decode()
        path = os.path.join(self.place.name, "t.bin")
        with open(path, "rb") as f:
            tables = f.read()
        self.assertIn("t.bin: {:,} bytes, tables of 4 layers from 600 tokens".format(len(tables)), text)
        share = [int(x) for x in re.findall(r"(\d+) % of FP16", text)]
        self.assertEqual(len(share), 3)
        self.assertLess(share[2], 0.9 * share[1])  # 250 tokens, with and without tables
        self.assertIn("\nLoad it: ./generate %s --tables t.bin, or " % DEMO, text)
        ask = "generate", DEMO, "-p", "Once upon a time", "-n", "4", "--raw", "--tables", "t.bin"
        self.assertEqual(self.run_in_place(*ask).returncode, 0)
        with open(path, "wb") as f:
            f.write(tables[:100] + bytes([tables[100] ^ 1]) + tables[101:])
        run = self.run_in_place(*ask)
        self.assertEqual(run.returncode, 1)
        self.assertIn(b"generate: t.bin: ", run.stderr)
        os.remove(path)
        self.assertIn(b"cannot read t.bin", self.run_in_place(*ask).stderr)

    def test_the_command_that_loads_them(self):
        """What the last line shows runs in the folder where calibrate ran, as `make calibrate` runs it from another one."""
        with tempfile.TemporaryDirectory() as elsewhere:
            os.symlink(self.place.name, os.path.join(elsewhere, "build"))
            run = subprocess.run(["./build/calibrate", DEMO, "-f", PROMPT, "-o", "build/t2.bin", "-n", "300"], cwd=elsewhere,
                                 stdout=subprocess.PIPE, check=True)
            shown = re.search(r"^Load it: (.*), or tkv_load_calibration$", run.stdout.decode(), re.M).group(1)
            run = subprocess.run(shown.split() + ["-p", "Once upon a time", "-n", "4", "--raw"], cwd=elsewhere,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.assertEqual(run.returncode, 0, run.stderr)
        rules = subprocess.check_output(["make", "-n", "-B", "calibrate"], cwd=ROOT).decode()
        self.assertIn(" -o build/generate ", rules)

    def test_plans_that_learn_nothing(self):
        run = self.run_in_place("calibrate", DEMO, "-f", PROMPT, "-n", "100", "--warm", "64:kivi4", "--archive",
                                "kivi4")
        self.assertEqual(run.returncode, 1)
        self.assertIn(b"no format that learns", run.stderr)


class Latency(Example, unittest.TestCase):
    """generate and budget measure latency, and write it beside the cache's figures as Prometheus text."""

    PROGRAMS = "generate", "budget"

    LINE = (r"^  latency     first token after ([\d.]+) ms; between tokens P50 ([\d.]+), P95 ([\d.]+), "
            r"P99 ([\d.]+) ms \((\d+) times\)$")

    def said(self, *args, status=0):
        run = subprocess.run(["./" + args[0]] + list(args[1:]), cwd=self.place.name, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
        self.assertEqual(run.returncode, status, run.stderr)
        return run.stdout.decode(), run.stderr.decode()

    def figures(self, text):
        return [float(x) for x in re.search(self.LINE, text, re.M).groups()]

    def metrics(self):
        """Buckets {bound: count}, sum and count of each histogram, read without a parser."""
        with open(os.path.join(self.place.name, "m.prom"), encoding="utf-8") as f:
            text = f.read()
        found = {}
        for name in ("model_time_to_first_token_seconds", "model_time_between_tokens_seconds"):
            buckets = re.findall(r'^%s_bucket\{le="([^"]+)"\} (\d+)$' % name, text, re.M)
            total, = re.findall(r"^%s_sum (\S+)$" % name, text, re.M)
            count, = re.findall(r"^%s_count (\d+)$" % name, text, re.M)
            found[name] = {float(bound): int(n) for bound, n in buckets}, float(total), int(count)
        return text, found["model_time_to_first_token_seconds"], found["model_time_between_tokens_seconds"]

    def check_histogram(self, buckets, total, count):
        bounds = list(buckets)
        self.assertEqual(bounds, sorted(bounds))
        self.assertEqual(bounds[-1], float("inf"))
        counts = list(buckets.values())
        self.assertEqual(counts, sorted(counts))
        self.assertEqual(counts[-1], count)
        least = sum((n - before) * low for n, before, low in zip(counts, [0] + counts, [0] + bounds))
        self.assertGreaterEqual(total * (1 + 1e-6), least)

    def test_printed_and_written(self):
        ask = "-p", "Once upon a time", "--raw", "--metrics", "m.prom", "-n"
        for run in (("generate", DEMO, *ask, "40", "--no-compare"),
                    ("budget", DEMO, *ask, "39", "--budget", "none", "--compare")):  # it samples one token more
            text, _ = self.said(*run)
            first, p50, p95, p99, n = self.figures(text)
            self.assertEqual(n, 39)
            self.assertTrue(0 < p50 <= p95 <= p99, (p50, p95, p99))
            report, once, between = self.metrics()
            self.assertIn("\ntkv_info{", report)
            self.assertEqual((once[2], between[2]), (1, 39))
            self.check_histogram(*once)
            self.check_histogram(*between)
            self.assertAlmostEqual(1e3 * once[1], first, delta=0.051)
            self.assertTrue(p50 <= 1e3 * between[1] <= 39 * p99 + 0.01 * 39, between)  # rounded to .01 ms
            self.assertEqual([f for f in os.listdir(self.place.name) if f.endswith(".new")], [])

    def test_prometheus_reads_it(self):
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            self.skipTest("prometheus_client is not here")
        self.said("budget", DEMO, "-p", "Once upon a time", "-n", "19", "--budget", "none", "--metrics",
                  "m.prom")
        text, _, between = self.metrics()
        families = {f.name: f for f in text_string_to_metric_families(text)}
        self.assertIn("tkv_memory_held_bytes", families)
        for name in ("model_time_to_first_token_seconds", "model_time_between_tokens_seconds"):
            family = families[name]
            self.assertEqual(family.type, "histogram")
            self.assertTrue(family.documentation)
            self.assertEqual({s.name[len(name):] for s in family.samples}, {"_bucket", "_sum", "_count"})
        parsed = {float(s.labels["le"]): s.value for s in families["model_time_between_tokens_seconds"].samples
                  if "le" in s.labels}
        self.assertEqual(parsed, between[0])
        self.assertEqual(between[2], 19)

    def test_a_file_that_cannot_be_written(self):
        _, said = self.said("generate", DEMO, "-p", "Once", "-n", "2", "--raw", "--metrics", "none/m.prom", status=1)
        self.assertIn("cannot write none/m.prom", said)


class Thresholds(Example, unittest.TestCase):
    """generate keeps the plans of runs and their scores in a file, and begins with the plan that the file has."""

    PROGRAMS = "generate",

    def generate(self, *args, model=DEMO, status=0, tokens="600", file="t.txt"):
        run = subprocess.run(["./generate", model, "-f", PROMPT, "-n", "2", "--raw", "-c", tokens, "--thresholds",
                              file] + list(args), cwd=self.place.name, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
        self.assertEqual(run.returncode, status, run.stderr)
        return run.stdout.decode("utf-8", "replace"), run.stderr.decode()

    def entries(self, file="t.txt"):
        with open(os.path.join(self.place.name, file), encoding="utf-8") as f:
            lines = f.read().split("\n")
        self.assertEqual(lines[0], "tieredkv-thresholds 1")
        self.assertRegex(lines[-2], "^sum [0-9a-f]{16}$")
        return [line.split(" ", 8) for line in lines[1:-2]]

    def test_kept_applied_and_replaced(self):
        plan = "--hot", "64", "--warm", "none", "--archive", "a15/r10"
        text, said = self.generate(*plan)
        self.assertNotIn("the plan of", said)
        entry, = self.entries()
        self.assertEqual(entry[:7], ["all", "600", "64", "none", "1", "a15", "r10"])
        self.assertEqual(entry[8], "demo.gguf")
        exact, own = [float(x) for x in re.search(
            r"perplexity of the prompt ([\d.]+), ([\d.]+) with", text).groups()][::-1]
        score = min(1, 1 - (own - exact) / exact)
        self.assertAlmostEqual(float(entry[7]), score, delta=1e-3)  # of perplexities with three digits
        self.assertLess(score, 1)
        text, said = self.generate()
        self.assertIn("the plan of t.txt for 600 tokens: archive a15 / r10, score ", said)
        self.assertRegex(text, r"\n\. archive +\d+ +a15 / r10 ")
        again, = self.entries()
        self.assertEqual(again[4], "2")
        self.assertEqual(again[:4] + again[5:7], entry[:4] + entry[5:7])
        self.assertAlmostEqual(float(again[7]), float(entry[7]), delta=2e-6)
        self.generate("--archive", "kivi4")  # another plan of this context takes its place
        entry, = self.entries()
        self.assertEqual(entry[2:7], ["0", "0", "1", "kivi4", "kivi4"])
        text, said = self.generate(tokens="550")  # the nearest context
        self.assertIn("for 600 tokens: archive kivi4", said)
        self.assertEqual([e[1] for e in self.entries()], ["550", "600"])
        other = os.path.join(self.place.name, "other.gguf")
        shutil.copy(DEMO, other)
        text, said = self.generate(model="./other.gguf")  # of another model: not applied
        self.assertNotIn("the plan of", said)
        self.assertEqual([(e[1], e[5], e[8]) for e in self.entries()],
                         [("550", "kivi4", "demo.gguf"), ("600", "kivi4", "demo.gguf"),
                          ("600", "a30", "other.gguf")])
        self.assertEqual([f for f in os.listdir(self.place.name) if f.endswith(".new")], [])

    def test_the_level_that_the_meter_found(self):
        text, _ = self.generate("--meter", "8", "--meter_every", "1", "--adapt", "1", "--target", "9999",
                                "--no-compare", "--archive", "kivi2", "--warm", "none", file="m.txt", tokens="1400")
        entry, = self.entries("m.txt")
        self.assertIn("m.txt: this plan has a score of %.4f" % float(entry[7]), text)
        self.assertEqual(entry[:7], ["all", "1400", "0", "none", "1", "a40", "r40"])  # it began with kivi2
        self.assertRegex(text, r"\n\. archive +[\d,]+ +a40 / r40 ")

    def test_no_score_or_a_bad_file(self):
        path = os.path.join(self.place.name, "s.txt")
        text, _ = self.generate("--no-compare", file="s.txt")
        self.assertIn("thresholds  s.txt stays", text)
        self.assertFalse(os.path.exists(path))
        self.generate(file="s.txt")
        with open(path, "rb") as f:
            good = f.read()
        damaged = good.replace(b"a30", b"a25")
        self.assertNotEqual(damaged, good)
        with open(path, "wb") as f:
            f.write(damaged)
        _, said = self.generate(file="s.txt", status=1)
        self.assertIn("generate: s.txt: line 3: the checksum is missing or wrong", said)
        with open(path, "rb") as f:
            self.assertEqual(f.read(), damaged)
        _, said = self.generate(file=".", status=1)
        self.assertIn("cannot read .", said)
        _, said = self.generate("--layers", "0:kivi4", file="s.txt", status=1)
        self.assertIn("keeps no plan of single layers", said)


class Prompt(unittest.TestCase):
    def test_numbers_stand_as_the_model_learnt_them(self):
        with open(PROMPT, encoding="utf-8") as f:
            text = f.read()
        lines = [line for line in text.split("\n") if "secret number" in line]
        form = r"The secret number of ([A-Z][a-z]+(?: [A-Z][a-z]+)?) is (\d{5})\."
        numbers = [re.fullmatch(form, line) for line in lines]
        self.assertNotIn(None, numbers)
        self.assertGreaterEqual(len(numbers), 8)
        self.assertEqual(len({m.group(1) for m in numbers}), len(numbers))
        self.assertEqual(len({m.group(2) for m in numbers}), len(numbers))


class Picture(unittest.TestCase):
    def test_lines(self):
        for text, lines in (
                ("a\n\nb\n\n", ["a", "", "b"]),
                ("x" * 12, ["x" * 10, "xx"]),
                ("word " * 3, ["word word", "word"]),
                ("  " + "y" * 12, ["  " + "y" * 8, "yyyy"]),
                ("\u65e5" * 7, ["\u65e5" * 5, "\u65e5" * 2]),  # two columns each
                ("10 %\r50 %\r100 %\r\n", ["100 %"]),
                ("\x1b[1;31mred\x1b[0m\x07\tx", ["red     x"])):
            self.assertEqual(terminal_svg.lines_of(text, 10), lines)

    def test_text_comes_through(self):
        lines = ["$ a", "  if (a < b && c > \"d\")   x", ""]
        svg = xml.dom.minidom.parseString(terminal_svg.picture(lines, 'a "<&', 40, 1))
        texts = svg.getElementsByTagName("text")
        self.assertEqual([t.firstChild.data for t in texts], ["$ a", 'if (a < b && c > "d")', "x"])
        self.assertEqual([t.getAttribute("class") for t in texts], ["command", "", ""])
        self.assertEqual(svg.documentElement.getAttribute("aria-label"), 'a "<&')
        places = [float(t.getAttribute("x")) for t in texts]
        self.assertAlmostEqual(places[1] - places[0], 2 * terminal_svg.ADVANCE)
        self.assertAlmostEqual(places[2] - places[0], 26 * terminal_svg.ADVANCE)

    def test_a_command_that_fails_leaves_no_picture(self):
        tool = [sys.executable, os.path.join(ROOT, "tools", "terminal_svg.py"), "-o"]
        with tempfile.TemporaryDirectory() as place:
            out = os.path.join(place, "x.svg")
            for status in (1, 0):
                command = [sys.executable, "-c", "print('hello'); raise SystemExit(%d)" % status]
                run = subprocess.run(tool + [out, "--show", "hi", "--"] + command, stderr=subprocess.PIPE)
                self.assertEqual(run.returncode, status)
                self.assertEqual(os.path.exists(out), status == 0)
            with open(out, encoding="utf-8") as f:
                self.assertIn(">$ hi</text>", f.read())


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
