#!/usr/bin/env python3
"""The examples of threads of the host compile with the command in their first lines, and print that their bits are those of one
call, for every number of parts. generate.c writes the same text with any number of OpenMP threads."""
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


class Threads(unittest.TestCase):
    def run_example(self, name, lines):
        with open(os.path.join(ROOT, "examples", name), encoding="utf-8") as f:
            command = re.search(r"^ \* (c(?:c|\+\+) .*?) && \./(\w+)$", f.read(), re.M)
        self.assertTrue(command, "the file says how to compile it")
        compile_it, program = command.groups()
        with tempfile.TemporaryDirectory() as folder:
            built = os.path.join(folder, program)
            library = os.environ.get("LIBRARY")  # `make test` has compiled it
            if not library:
                library = os.path.join(folder, "tieredkv.o")
                subprocess.run(["cc", "-O2", "-c", "examples/tieredkv.c", "-o", library], cwd=ROOT, check=True)
            words = [built if w == program else library if w in ("tieredkv.o", "examples/tieredkv.c") else w
                     for w in compile_it.split()]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
            if "-fopenmp" in words and done.returncode:
                self.skipTest("the compiler has no OpenMP")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            out = subprocess.run([built], capture_output=True, text=True, timeout=600)
        self.assertEqual((out.returncode, out.stderr), (0, ""))
        self.assertEqual(out.stdout.count("the same bits as one call"), lines, out.stdout)
        self.assertEqual(len(out.stdout.splitlines()), lines + 1, out.stdout)

    def test_openmp(self):
        self.run_example("threads_openmp.c", 4)

    def test_std_thread(self):
        self.run_example("threads_std.cpp", 3)

    def test_job_queue(self):
        self.run_example("threads_queue.c", 4)

    def test_runner(self):
        with tempfile.TemporaryDirectory() as folder:
            said = {}
            for flags, threads in ((), ""), (("-fopenmp",), "2"), (("-fopenmp",), "5"):
                program = os.path.join(folder, "generate" + "".join(flags))
                if not os.path.exists(program):
                    library = os.environ.get("LIBRARY", "examples/tieredkv.c")
                    done = subprocess.run(["cc", "-O2", *flags, "examples/generate.c", library, "-o", program, "-lm"],
                                          cwd=ROOT, capture_output=True, text=True)
                    if flags and done.returncode:
                        self.skipTest("the compiler has no OpenMP")
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                run = subprocess.run([program, "examples/data/demo.gguf", "-f", "examples/data/demo_prompt.txt", "--raw",
                                      "-c", "700", "-n", "8", "-t", "0", "--yarn", "1.5"], cwd=ROOT, capture_output=True, text=True,
                                     timeout=600, env=dict(os.environ, OMP_NUM_THREADS=threads or "1",
                                                           OMP_WAIT_POLICY="passive"))
                self.assertEqual(run.returncode, 0, run.stderr)
                lines = run.stdout.splitlines()
                timed = [line for line in lines if re.match(r"  (speed|each token|latency|first token)", line)]
                self.assertIn("%s thread" % (threads or "one"), "\n".join(timed))
                # times differ, and threads take work space
                said[threads] = [line for line in lines
                                 if not re.search(r"per second|\d ms|^  (other|total|memory) ", line)]
            self.assertTrue(any("KL divergence" in line for line in said[""]), said[""])
            for threads in "25":
                self.assertEqual(said[threads], said[""], threads)


if __name__ == "__main__":
    results.run()
