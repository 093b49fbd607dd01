#!/usr/bin/env python3
"""examples/llama2c.patch: it applies to run.c of llama2.c, and the patched run.c writes text from a tiered cache.

RUN_C=FILE: run.c of karpathy/llama2.c at the commit that the patch names. Without it, only the functions that the patch adds
are tested. TKV_DATA=DIR: models/ has stories15M.bin, stories260K.bin, tokenizer.bin and tok512.bin (../shared/data).
TKV_TEST_STRICT=1: with RUN_C, a missing model fails the tests."""
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, STRICT

RUN_C = os.environ.get("RUN_C", "")
MODELS = os.path.join(os.environ.get("TKV_DATA", os.path.join(os.path.dirname(ROOT), "shared", "data")), "models")
PATCH = os.path.join(ROOT, "examples", "llama2c.patch")
MOST_LINES = 60  # that the patch may change
EXACT = "tiers = {hot_tokens = unlimited, hot = f32}"
SLOW = "-g1 -O1 -DTKV_NO_SIMD -fno-sanitize-recover=all -fsanitize=address,undefined".split()

with open(PATCH, encoding="utf-8") as f:
    HEAD, *HUNKS = re.split(r"^@@ (?=-)", f.read(), flags=re.M)

ALONE = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tieredkv.h"
typedef struct { int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; } Config;
%s
int main(int argc, char **argv) {
    Config p = {96, 0, 2, 4, 2, 0, 300};
    tkv_cache *kv = build_cache(&p, argv[1]);
    float q[96], k[48], v[48], out[96];
    for (int token = 0; token < atoi(argv[argc - 1]); token++)
        for (int layer = 0; layer < 2; layer++) {
            for (int i = 0; i < 96; i++) q[i] = k[i / 2] = (float)((token + i) %% 7), v[i / 2] = (float)(layer + 1);
            attend(kv, layer, q, k, v, out);
        }
    printf("%%d tokens, %%d layers, %%d, %%d heads of %%d, %%.1f\\n", tkv_get_length(kv, 0, 1), p.n_layers, p.n_heads, p.n_kv_heads,
           p.dim / p.n_heads, (double)out[95]);
    tkv_destroy(kv);
    return 0;
}
"""


def lines(hunk, sign):
    return [line[1:] for line in hunk.split("\n")[1:] if line.startswith(sign)]


class Patch(unittest.TestCase):
    def test_size(self):
        changed = sum(len(lines(hunk, sign)) for hunk in HUNKS for sign in "-+")
        print("%d lines change, in %d places" % (changed, len(HUNKS)))
        self.assertIn(": %d changed lines." % changed, HEAD)
        self.assertTrue(0 < changed <= MOST_LINES)
        for hunk in HUNKS:  # little of run.c is copied
            self.assertEqual(len(lines(hunk, " ")), 2, hunk)

    def test_functions(self):
        """The functions that the patch adds, without run.c."""
        added = ["\n".join(lines(hunk, "+")) for hunk in HUNKS]
        with tempfile.TemporaryDirectory() as place:
            source, program = os.path.join(place, "alone.c"), os.path.join(place, "alone")
            with open(source, "w", encoding="utf-8") as f:
                f.write(ALONE % next(text for text in added if "build_cache(Config" in text))
            subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-I.", source,
                            os.environ.get("LIBRARY", "examples/tieredkv.c"), "-o", program, "-lm"], cwd=ROOT, check=True)
            for plan in ("", EXACT, "preset = compact"):
                done = subprocess.run([program, plan, "300"], capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertEqual(done.stdout, "300 tokens, 2 layers, 4, 2 heads of 24, 2.0\n")
            for plan, n, sentence in (("tiers.x = 3", 1, "no cache: line 1: tiers.x is no key"),
                                      ("", 301, "max_tokens leaves room for 0 more tokens")):
                done = subprocess.run([program, plan, str(n)], capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertIn(sentence, done.stderr)


def blob(path):
    """Returns the name that git gives to the bytes of a file."""
    with open(path, "rb") as f:
        data = f.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Patched(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not RUN_C:
            raise unittest.SkipTest("RUN_C is not set. RUN_C=FILE names run.c of karpathy/llama2.c")
        if not os.path.exists(RUN_C):
            raise RuntimeError("RUN_C=%s: there is no such file" % RUN_C)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.place, cls.built = folder.name, {}
        for name in (RUN_C, PATCH, os.path.join(ROOT, "tieredkv.h")):
            shutil.copy(name, os.path.join(cls.place, "run.c" if name == RUN_C else ""))
        for name in ("stories15M.bin", "stories260K.bin", "tokenizer.bin", "tok512.bin"):
            if os.path.exists(os.path.join(MODELS, name)):
                shutil.copyfile(os.path.join(MODELS, name), os.path.join(cls.place, name))
            elif STRICT:
                raise RuntimeError("%s is missing in %s" % (name, MODELS))
        shutil.copy(RUN_C, os.path.join(cls.place, "plain.c"))
        shutil.copy(RUN_C, os.path.join(cls.place, "tiered.c"))
        cls.said = subprocess.run(["patch", "tiered.c", "llama2c.patch"], cwd=cls.place, check=True, capture_output=True,
                                  text=True).stdout

    def build(self, source, flags):
        """Compiles without a warning, once. Returns the program."""
        key = " ".join([source] + flags)
        if key not in self.built:
            program = os.path.join(self.place, "program%d" % len(self.built))
            done = subprocess.run(["cc"] + flags + [source, "-o", program, "-lm"], cwd=self.place, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.built[key] = program
        return self.built[key]

    def run_program(self, program, model, *words, status=0):
        """Returns the text, and the lines on stderr."""
        if not os.path.exists(os.path.join(self.place, model)):
            self.skipTest("%s is missing in %s" % (model, MODELS))
        tokenizer = "tokenizer.bin" if "15M" in model else "tok512.bin"
        done = subprocess.run([program, model, "-z", tokenizer, "-t", "0"] + list(words), cwd=self.place, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout, done.stderr

    def ratio(self, said):
        total, fp16, ratio = re.search(r"^cache: (\d+) bytes, FP16 takes (\d+), ratio ([\d.]+)$", said, re.M).groups()
        self.assertEqual("%.2f" % (int(fp16) / int(total)), ratio)
        return float(ratio)

    def longer_model(self, n_tokens):
        """Writes stories260K with another seq_len. Tables whose size depends on it are at the end of the file, and run.c skips them."""
        path = os.path.join(self.place, "stories260K.bin")
        if not os.path.exists(path):
            self.skipTest("stories260K.bin is missing in %s" % MODELS)
        with open(path, "rb") as f:
            data = bytearray(f.read())
        struct.pack_into("<i", data, 24, n_tokens)
        with open(os.path.join(self.place, "longer260K.bin"), "wb") as f:
            f.write(data)
        return "longer260K.bin"

    def test_applies(self):
        """By patch and by git, without an offset at the commit that it names, to the same file."""
        before, after = re.search(r"^index (\w+)\.\.(\w+) ", HEAD, re.M).groups()
        if blob(RUN_C).startswith(before):
            self.assertEqual(self.said, "patching file tiered.c\n")
            self.assertEqual(blob(os.path.join(self.place, "tiered.c"))[:len(after)], after)
        else:
            print("RUN_C is of another commit:\n" + self.said)
        if shutil.which("git"):
            with tempfile.TemporaryDirectory() as place:
                shutil.copy(RUN_C, os.path.join(place, "run.c"))
                subprocess.run(["git", "apply", PATCH], cwd=place, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(place)})
                self.assertEqual(blob(os.path.join(place, "run.c")), blob(os.path.join(self.place, "tiered.c")))

    def test_no_new_warnings(self):
        warnings = []
        for source in ("plain.c", "tiered.c"):
            said = subprocess.run(["cc", "-fsyntax-only", "-Wall", "-Wextra", source], cwd=self.place, capture_output=True, text=True).stderr
            warnings.append(set(re.findall(r"\bwarning: .*", said)))
        self.assertLessEqual(warnings[1], warnings[0])

    def test_command_of_the_patch(self):
        command = " && ".join(re.findall(r"^    (.*)$", HEAD, re.M))
        if not os.path.exists(os.path.join(self.place, "stories15M.bin")):
            self.skipTest("stories15M.bin is missing in %s" % MODELS)
        done = subprocess.run(command, shell=True, cwd=self.place, capture_output=True, text=True, timeout=600)
        print(done.stdout + done.stderr)
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"\Aachieved tok/s: [\d.]+\ncache: .*\n\Z")  # no warnings
        self.assertGreater(len(done.stdout), 500)
        self.assertGreater(self.ratio(done.stderr), 1)

    def test_exact_plan(self):
        """With all tokens in F32 the text is that of run.c."""
        plain, tiered = self.build("plain.c", ["-O3"]), self.build("tiered.c", ["-O3"])
        for model, n, words in (("stories260K.bin", "512", []), ("stories15M.bin", "256", []),
                                ("stories260K.bin", "100", ["-m", "chat", "-i", "Hello", "-y", "Be kind"])):
            with self.subTest(model):
                before, speed = self.run_program(plain, model, "-n", n, *words)
                after, said = self.run_program(tiered, model, "-n", n, "-k", EXACT, *words)
                print(model, speed.strip(), "; tiered:", said.replace("\n", " "))
                self.assertEqual(after, before)
                self.assertGreater(len(after), 100)

    def test_default_plan(self):
        tiered = self.build("tiered.c", ["-O3"])
        text, said = self.run_program(tiered, "stories15M.bin", "-n", "256")
        print(text, said)
        self.assertGreater(len(text), 500)
        self.ratio(said)
        prompt = "Once upon a time there was a little girl. " * 60
        text, said = self.run_program(tiered, self.longer_model(1024), "-n", "1024", "-i", prompt)
        self.assertGreater(self.ratio(said), 1.2)
        self.assertEqual(text[:2000], prompt[:2000])

    def test_refused(self):
        tiered = self.build("tiered.c", ["-O3"])
        for plan, text, sentence in (("preset = best", "", "no cache: line 1: preset is best; it must be the name of a preset"),
                                     ("tiers.hot = q8", "", "no cache: line 1: tiers.hot.k is 4, which is q8; the hot tier takes"),
                                     ("limits.max_tokens = 9", "Once upon a time", "max_tokens leaves room for 0 more tokens")):
            said = self.run_program(tiered, "stories260K.bin", "-k", plan, status=1)
            self.assertIn(sentence, said[1])
            self.assertTrue(said[0].startswith(text) and len(said[0]) <= 60, said[0])

    def test_sanitizers(self):
        tiered = self.build("tiered.c", SLOW)
        prompt = "One day, Tom and Mia went to the big park. " * 40
        model = self.longer_model(1024)
        for plan in ("", "preset = compact", "tiers = {hot_tokens = 32, warm = kivi4}", EXACT):
            _, said = self.run_program(tiered, model, "-n", "700", "-i", prompt, "-k", plan)
            self.assertRegex(said, r"\Aachieved tok/s: [\d.]+\ncache: .*\n\Z")
        for plan in ("tiers.x = 3", "limits.max_tokens = 9"):
            said = self.run_program(tiered, model, "-k", plan, status=1)[1]
            self.assertNotIn("Sanitizer", said)


if __name__ == "__main__":
    results.run()
