#!/usr/bin/env python3
"""Graphs of ggml with the operations of examples/ggml_tkv.h, and a Llama in ggml (examples/ggml_decode.cpp) compared with
our own runner.

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
from programs import LLAMACPP_LIB, ROOT, WARN, WARN_C, build, compile_program, llamacpp_words, missing

DEMO = os.path.join(ROOT, "examples", "data", "demo.gguf")
TEXT = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")
CASES = ["steps", "types", "options", "sequences", "positions", "errors", "batches", "budget", "store"]


class Built(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.words = llamacpp_words("ggml.h")
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)


class Operations(Built):
    def test_cases(self):
        program = os.path.join(self.place.name, "ggml_ops")
        compile_program(["cc", "-O1", "tests/ggml_ops.c", "examples/tieredkv.c", "-o", program, "-lggml", "-lggml-base",
                         "-lm"], WARN_C + self.words)
        for case in CASES:
            with self.subTest(case):
                done = subprocess.run([program, case, LLAMACPP_LIB], capture_output=True, text=True, timeout=300)
                self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
                print(done.stdout, end="")


class Program(Built):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.program = build(cls.place.name, "ggml_decode", WARN + cls.words)

    def run_program(self, *args):
        return subprocess.run([self.program, "--backends", LLAMACPP_LIB] + list(args), capture_output=True, text=True,
                              timeout=600)

    def decode(self, *args):
        done = self.run_program(*args)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def differences(self, *args):
        """Returns the largest difference of a logit from our own runner, and the mean divergence."""
        text = self.decode("--check", "--threads", "1", *args)
        found = re.search(r"logits differ by at most (\S+), KL divergence (\S+) nats, over (\d+) positions$", text, re.M)
        print("%s: %s" % (" ".join(os.path.basename(x) for x in args), found.group(0)))
        return float(found.group(1)), abs(float(found.group(2)))


class Demo(Program):
    """The model of the examples. With F32 weights both engines compute the same, but for the order of sums."""

    def texts(self, *args):
        return self.decode(DEMO, "-n", "24", *args).split("\n\nread ")[0].split("\n\n")

    def test_exact_cache(self):
        worst, divergence = self.differences(DEMO, "--f32", "--plan", "all:f32", "--text", TEXT, "--tokens", "600")
        self.assertLess(worst, 3e-4)
        self.assertLess(divergence, 1e-8)

    def test_plan(self):
        """A code can differ where a value lies between two, so the difference is larger."""
        worst, divergence = self.differences(DEMO, "--f32", "--plan", "preset=compact", "--text", TEXT, "--tokens", "900")
        self.assertLess(worst, 0.5)
        self.assertLess(divergence, 1e-5)

    def test_prompts(self):
        """A batch of prompts gives what each gives alone, and our own runner the same logits."""
        prompts = ["The lighthouse", "My liege, I did deny no prisoners", "Once"]
        words = ["--f32"] + [x for prompt in prompts for x in ("-p", prompt)]
        worst, divergence = self.differences(DEMO, "--plan", "all:f32", "-n", "24", *words)
        self.assertLess(worst, 3e-4)
        one, two = self.texts("--threads", "1", *words), self.texts("--threads", "2", *words)
        self.assertEqual(one, two)
        alone = [text for prompt in prompts for text in self.texts("--threads", "1", "--f32", "-p", prompt)]
        self.assertEqual(one, alone)

    def test_rounded_activations(self):
        """Weights in 8 bits: ggml rounds the vectors that they are multiplied with."""
        worst, divergence = self.differences(DEMO, "--text", TEXT, "--tokens", "300")
        self.assertLess(divergence, 1e-3)

    def test_bad_arguments(self):
        other = os.path.join(self.place.name, "qwen3.gguf")
        tiny_gguf.qwen3(other)
        for words, sentence in (([], "a model is needed (--help)"), (["x.gguf"], "x.gguf: cannot read x.gguf"),
                                ([other], other + ": architecture 'qwen3'; only llama is supported"),
                                ([DEMO, "-n", "0"], "-n 0: it must be a number, at least 1"),
                                ([DEMO, "--threads"], "--threads: unknown option, or its value is missing (--help)"),
                                ([DEMO, "--thread", "1"], "--thread: unknown option (--help)"),
                                ([DEMO, "--plan", "64,none,kivi9"], '--plan 64,none,kivi9: unknown format "kivi9"'),
                                ([DEMO, "--text", "x.txt"], "cannot read x.txt")):
            done = self.run_program(*words)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (1, "", "ggml_decode: %s\n" % sentence))


class SmolLM2(Program):
    def test_own_runner(self):
        models = glob.glob(os.path.join(ROOT, "build", "models", "SmolLM2*.gguf"))
        if not models:
            missing("SmolLM2 is missing: make model")
        words = [models[0], "--plan", "all:f32", "--text", os.path.join(ROOT, "bench", "QUALITY.md"), "--tokens", "300"]
        worst, divergence = self.differences("--f32", *words)
        self.assertLess(worst, 2e-3)
        self.assertLess(divergence, 1e-8)
        worst, divergence = self.differences(*words)
        self.assertLess(divergence, 0.01)


if __name__ == "__main__":
    results.run()
