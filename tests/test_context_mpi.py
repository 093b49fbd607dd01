#!/usr/bin/env python3
"""One context over several processes: examples/context_mpi.c. Text and attention are those of one process, for any timing; a rank that dies
ends the job; a job that is resumed writes the same text.

tests/programs.py says what TKV_TEST_STRICT and TKV_TEST_CFLAGS do."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, STRICT, build

DEMO = os.path.join(ROOT, "examples", "data", "demo.gguf")
PROMPT = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")
LIMIT = 120  # seconds of a job
TEXT = [DEMO, "-f", PROMPT, "-t", "0", "--stripe", "2"]
F32 = ["--hot", "64:f32", "--warm", "none", "--archive", "f32"]
F16 = ["--hot", "64:f16", "--warm", "none", "--archive", "f16"]

# More ranks than processors, as root too; a rank that waits leaves the processor to others.
ENV = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
           OMPI_MCA_mpi_yield_when_idle="1", ASAN_OPTIONS="detect_leaks=0")


def rank_of(pid):
    """The rank of a process of mpirun's; None: it is no such process."""
    try:
        with open("/proc/%s/environ" % pid, "rb") as f:
            found = re.search(rb"\bOMPI_COMM_WORLD_RANK=(\d+)\0", f.read())
        return int(found.group(1)) if found else None
    except OSError:
        return None


def children(pid):
    """All processes below one."""
    with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
        own = [int(x) for x in f.read().split()]
    return own + [x for child in own for x in children(child)]


class ContextMpi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for tool in ("mpicc", "mpirun"):
            if not shutil.which(tool):
                if STRICT:
                    raise RuntimeError(tool)
                raise unittest.SkipTest("%s is missing: install libopenmpi-dev openmpi-bin" % tool)
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = build(cls.folder.name, "context_mpi")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.place = os.path.join(tempfile.mkdtemp(dir=self.folder.name), "saved")

    def start(self, words):
        return subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, job):
        try:
            out, err = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            job.terminate()  # mpirun then ends its ranks
            job.communicate(timeout=LIMIT)
            raise
        return job.returncode, out, err

    def run_ranks(self, n, *args):
        return self.end(self.start(["mpirun", "-n", str(n), self.program] + list(args)))

    def read(self, n, *args):
        """Runs a job. Returns its text, the checksum of merged outputs, the largest difference and the table."""
        status, out, err = self.run_ranks(n, *args)
        self.assertEqual(status, 0, out + err)
        found = re.search(r"^\[[\d,]+ tokens in \d+ stripes of \d+, [\d.]+ s; all ranks merged the same bits: (\w{16})\]$", out, re.M)
        self.assertTrue(found, out)
        differs = re.search(r"^\[one cache differs by at most (\S+)\]$", out, re.M)
        table = [line.split(None, 8) for line in out[found.end():].splitlines() if re.match(r" +\d+ ", line)]
        self.assertEqual([row[0] for row in table], [str(i) for i in range(n)], out)
        return out[:found.start()], found.group(1), float(differs.group(1)) if differs else None, table

    def refuses(self, sentence, n, *args):
        status, out, err = self.run_ranks(n, *args)
        self.assertNotEqual(status, 0, out)
        self.assertIn(sentence, err)

    def test_text(self):
        one, four = self.read(1, *TEXT, "-n", "64"), self.read(4, *TEXT, "-n", "64")
        self.assertIn("The secret number of", one[0])
        self.assertEqual(one[0], four[0])
        self.assertEqual([row[8] for row in four[3]], ["0-3, 4-131, 516-643, 900 and later", "132-259, 644-771", "260-387, 772-899", "388-515"])
        self.assertEqual([row[1] for row in four[3]], ["851", "256", "256", "128"])
        for row in four[3]:  # 4 heads of 64 channels and a log-sum-exp, as floats
            self.assertEqual(row[3:6], ["1024", "1040", "3120"])
            self.assertTrue(98 <= float(row[6]) <= 110)  # 2 * 2 * 64 values of 3.06 bits, and what a saved sequence adds
        kivi = TEXT + ["-n", "40", "--archive", "kivi3"]
        self.assertEqual(self.read(3, *kivi)[0], self.read(1, *kivi)[0])

    def test_synthetic(self):
        def check(*args):
            return self.read(4, "--synthetic", "12000", "--stripe", "3", "--check", *args)
        sums = set()
        for more in ([], ["--window", "3000"], ["--alibi"], ["--alibi", "--window", "700"]):
            _, checksum, differs, table = check(*F32, *more)
            self.assertLessEqual(differs, 1e-6)
            self.assertGreater(min(float(row[1].replace(",", "")) for row in table), 2000)
            sums.add(checksum)
        self.assertEqual(len(sums), 4)  # the window and ALiBi have an effect
        self.assertLessEqual(check(*F16, "--alibi", "--window", "5000")[2], 1e-6)
        # the bytes of stripes are compared too, whatever kernels round
        self.assertLessEqual(check("--precise", "1", "--window", "3000")[2], 1e-5)
        for plan in ([], ["--warm", "kivi4", "--archive", "kivi2"], ["--warm", "int8", "--archive", "fp8-e4m3"]):
            self.assertLessEqual(check(*plan)[2], 1e-3)

    def test_timing(self):
        args = ["--synthetic", "6000", "--stripe", "2"]
        sums = {self.read(4, *args, "--delay", str(delay))[1] for delay in (0, 500, 20000)}
        self.assertEqual(len(sums), 1)

    def saved_tokens(self):
        try:
            with open(os.path.join(self.place, "state")) as f:
                return int(f.read().split()[7])
        except (OSError, IndexError):
            return 0

    def test_killed(self):
        text = TEXT + ["-t", "0.9", "--seed", "3", "-n", "150", "--every", "50"]
        want = self.read(4, *text)
        for victim, held in ((2, "260-387"), (0, "0-3, 4-131")):
            self.place += "-%d" % victim
            job = self.start([self.program, "--launch", "4"] + text + ["--save", self.place, "--delay", "10000"])
            until = time.monotonic() + LIMIT
            while self.saved_tokens() < 1450 and time.monotonic() < until and job.poll() is None:
                time.sleep(0.02)
            ranks = {rank_of(pid): pid for pid in children(job.pid)}
            os.kill(ranks[victim], signal.SIGKILL)
            start = time.monotonic()
            status, _, err = self.end(job)
            self.assertLess(time.monotonic() - start, 5)
            self.assertNotEqual(status, 0)
            found = re.findall(r"^context_mpi: rank (\d) died; it held the tokens (.*)$", err, re.M)
            self.assertEqual([int(x[0]) for x in found], [victim], err)
            self.assertTrue(found[0][1].startswith(held), err)
            self.assertIn("the checkpoint has %d tokens; --resume %s goes on" % (self.saved_tokens(), self.place), err)
            self.assertEqual(self.read(4, *text, "--resume", self.place)[:2], want[:2])

    def test_resumed_synthetic(self):
        args = ["--synthetic", "9000", "--stripe", "2", "--every", "2000", "--alibi"]
        want = self.read(3, *args, "--save", self.place)
        self.assertEqual(self.saved_tokens() // 2000, 4)
        self.assertEqual(self.read(3, *args, "--resume", self.place)[1], want[1])

    def test_damaged_checkpoints(self):
        text = TEXT + ["-n", "20", "--every", "400"]
        want = self.read(2, *text, "--save", self.place)
        again = text + ["--resume", self.place]
        state = os.path.join(self.place, "state")
        with open(state) as f:
            words = f.read().split()
        path = os.path.join(self.place, "rank-1.%d.tkv" % (int(words[2]) % 2))
        with open(path, "rb") as f:
            whole = f.read()
        for damaged in (whole[:len(whole) // 2], whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:], b""):
            with open(path, "wb") as f:
                f.write(damaged)
            self.refuses("cannot load " + path, 2, *again)
        os.remove(path)
        self.refuses("cannot load %s: No such file" % path, 2, *again)
        with open(path, "wb") as f:
            f.write(whole)

        def change(i, word):
            with open(state, "w") as f:
                f.write(" ".join(words[:i] + [word] + words[i + 1:]) + "\n")
        for i, sentence in ((1, "is of another model"), (7, "is of another checkpoint"), (6, "is of another checkpoint")):
            change(i, "7")
            self.refuses(sentence, 2, *again)
        change(5, "x")
        self.refuses("missing or damaged", 2, *again)
        change(0, words[0])
        self.refuses("is of 2 ranks, stripes of 128 tokens and 4 sinks, and this job has 3, 128 and 4", 3, *again)
        self.refuses("and this job has 2, 192 and 4", 2, *again, "--stripe", "3")
        self.refuses("cannot load", 2, *again, "--archive", "kivi2")
        self.refuses("missing or damaged", 2, *text, "--resume", self.place + "-none")
        self.assertEqual(self.read(2, *again)[:2], want[:2])

    def test_errors(self):
        self.refuses("must end", 1, DEMO, "--hot", "all")
        self.refuses("no rank sees all attention", 1, DEMO, "--evict", "h2o:512")
        self.refuses("--check needs", 1, DEMO, "--check")
        self.refuses("bad value", 1, DEMO, "--stripe", "0")
        self.refuses("takes no model", 1, DEMO, "--synthetic", "9")
        for words, sentence in ((["0"], "a number of ranks"), (["2", DEMO], "needs --save")):
            status, _, err = self.end(self.start([self.program, "--launch"] + words))
            self.assertEqual(status, 1)
            self.assertIn(sentence, err)


if __name__ == "__main__":
    results.run()
