#!/usr/bin/env python3
"""Plans measured in llama.cpp by examples/llamacpp.c: figures like those of our own runner, and attention of other
architectures.

SmolLM2 is in build/models (`make model`). tests/programs.py says what TKV_TEST_LLAMACPP, TKV_TEST_STRICT and
TKV_TEST_CFLAGS do."""
import glob
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results
import tiny_gguf
from programs import LLAMACPP_LIB, ROOT, WARN_C, build, llamacpp_words, missing

TEXT = os.path.join(ROOT, "bench", "QUALITY.md")


class Measured(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        words = llamacpp_words("llama.h")
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)
        cls.program = build(cls.place.name, "llamacpp", WARN_C + words)

    def run_program(self, model, *args):
        return subprocess.run([self.program, model, TEXT, "--threads", "1", "--backends", LLAMACPP_LIB] + list(args),
                              capture_output=True, text=True, timeout=300)

    def measure(self, model, *args):
        """Returns the difference from llama.cpp's attention, and for each row of the table bits, bytes, perplexity and
        divergence, as texts."""
        done = self.run_program(model, *args)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        worst = re.search(r"^exact attention differs from llama.cpp's by at most ([\d.]+) of its length$", done.stdout, re.M)
        rows = re.findall(r"^(.{30}) +(\S+) +(\d+) +[\d.]+ +([\d.]+) +([-\d.e]+)(?: \+-.*)?$", done.stdout, re.M)
        self.assertTrue(worst and len(rows) >= 5, done.stdout)
        return float(worst.group(1)), {name.strip(): row for name, *row in rows}


class Architectures(Measured):
    def model(self, make):
        path = os.path.join(self.place.name, make.__name__ + ".gguf")
        make(path)
        return path

    def test_supported(self):
        for make in (tiny_gguf.qwen3, tiny_gguf.gemma2, tiny_gguf.gpt_oss):
            with self.subTest(make.__name__):
                worst, rows = self.measure(self.model(make), "--window", "7:400", "--plan", "64,none,kivi4",
                                           "--plan", "sinks=none 16,none,kivi4")
                self.assertLess(worst, 0.02)
                exact, own, plan = (rows[name] for name in ("tieredkv, all F32", "llama.cpp, F16", "64,none,kivi4"))
                self.assertEqual((exact[0], own[0], plan[0]), ("32.00", "16.00", "4.50"))
                self.assertLess(abs(float(own[2]) / float(exact[2]) - 1), 0.02)
                self.assertLess(float(own[3]), 0.02)
                self.assertGreater(float(plan[3]), float(own[3]))
                self.assertLess(float(plan[3]), 0.3)

    def test_refused(self):
        for make, sentence in ((tiny_gguf.mpt, "layer 0: ALiBi is not in this program"),
                               (tiny_gguf.deepseek2, "kqv_out-0 is not one operation of attention (MLA, for example)")):
            with self.subTest(make.__name__):
                done = self.run_program(self.model(make), "--window", "0:128")
                self.assertEqual((done.returncode, done.stdout, done.stderr), (1, "", "llamacpp: " + sentence + "\n"))

    def test_bad_arguments(self):
        model = self.model(tiny_gguf.qwen3)
        for words, sentence in ((["--plan", "64,none,kivi9"], '--plan 64,none,kivi9: unknown format "kivi9"'),
                                (["--window", "0:64", "--plan", "layers=4:q8"], "layers: the model has fewer"),
                                (["--window", "0:9999999"], "--window 0:9999999: the text has"),
                                (["--window", "8:0"], "no position is scored"),
                                (["--windows", "0:64"], "--windows: unknown option"),
                                (["--window", "0:64", "--plan", "64,none,kvquant3"], "rope")):
            done = self.run_program(model, *words)
            self.assertEqual((done.returncode, sentence in done.stderr), (1, True), done.stderr)


class SmolLM2(Measured):
    """The same window in llama.cpp and in our own runner (bench/quality.c), which computes with unrounded activations."""
    PLANS = ["64,none,kivi4", "preset=balanced warm=64"]

    def own_runner(self, model):
        program = os.path.join(self.place.name, "quality")
        subprocess.run(["cc", "-O2", "-DTKV_NO_AVX512", "bench/quality.c", "-o", program, "-lm", "-pthread"], cwd=ROOT, check=True)
        csv = os.path.join(self.place.name, "quality.csv")
        words = [program, model, "--text", TEXT, "--window", "0:512", "--no-rivals", "--csv", csv, "--cache", self.place.name]
        for plan in self.PLANS:
            words += ["--plan", plan]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        with open(csv, encoding="utf-8") as f:
            rows = [line.rstrip("\n").split('"')[1:] for line in f if line.startswith('"')]
        return {name: rest.split(",") for name, rest in rows if rest.split(",")[2] == "all"}

    def test_figures_of_our_own_runner(self):
        models = glob.glob(os.path.join(ROOT, "build", "models", "SmolLM2*.gguf"))
        if not models:
            missing("SmolLM2 is missing: make model")
        worst, rows = self.measure(models[0], "--window", "0:512", *[x for plan in self.PLANS for x in ("--plan", plan)])
        own = self.own_runner(models[0])
        exact, llama = rows["tieredkv, all F32"], rows["llama.cpp, F16"]
        noise = float(llama[3])
        self.assertLess(worst, 0.05)
        self.assertLess(noise, 0.01)
        self.assertLess(abs(float(llama[2]) / float(exact[2]) - 1), 0.03)
        for plan in self.PLANS:
            bits, nbytes, kl, exact_ppl = (float(own[plan][i]) for i in (3, 4, 6, 10))
            print("%s: bits %s, %.2f; bytes %s, %.0f; KL %s, %.5f; exact perplexity %s, %.3f; noise %.5f"
                  % (plan, rows[plan][0], bits, rows[plan][1], nbytes, rows[plan][3], kl, exact[2], exact_ppl, noise))
            self.assertEqual(rows[plan][0], "%.2f" % bits)
            self.assertLess(abs(float(rows[plan][1]) - nbytes), 2)  # RoPE is noted there, and rounding
            self.assertLess(abs(float(exact[2]) / exact_ppl - 1), 0.03)
            self.assertGreater(float(rows[plan][3]), kl / 3)
            self.assertLess(float(rows[plan][3]), 2 * (kl + noise))


if __name__ == "__main__":
    results.run()
