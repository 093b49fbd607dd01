#!/usr/bin/env python3
"""Fuzz targets as plain programs, with any compiler: each runs the inputs kept in tests/data/TARGET, and a few random ones.
`make fuzz` searches for new inputs, with clang; .ci/run runs more of them with sanitizers."""
import glob
import os
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CC = os.environ.get("CC", "cc").split()
LIBRARY = os.environ.get("LIBRARY") or os.path.join(ROOT, "examples", "tieredkv.c")
TARGETS = sorted(os.path.basename(path)[:-2] for path in glob.glob(os.path.join(ROOT, "tests", "fuzz", "*.c")))
RUNS = 50


class Fuzz(unittest.TestCase):
    def run_target(self, target):
        """Builds a target, and runs it. Returns what it printed."""
        kept = sorted(glob.glob(os.path.join(ROOT, "tests", "data", target, "*")))
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, target)
            source = os.path.join(ROOT, "tests", "fuzz", target + ".c")
            subprocess.check_call(CC + ["-O1", "-DTKV_FUZZ_MAIN", source, LIBRARY, "-o", program, "-lm"])
            run = subprocess.run([program, "--runs", str(RUNS)] + kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
            text = run.stdout.decode(errors="replace")
            self.assertEqual(run.returncode, 0, text)
            broken = os.path.join(folder, "missing")
            self.assertEqual(subprocess.run([program, broken], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode, 1)
        return len(kept), text


def add_test(target):
    def test(self):
        n_kept, text = self.run_target(target)
        print("%s: %d kept inputs and %d random ones; %s" % (target, n_kept, RUNS, text.strip().split("\n")[0]))
    setattr(Fuzz, "test_" + target, test)


for name in TARGETS:
    add_test(name)

if __name__ == "__main__":
    results.run()
