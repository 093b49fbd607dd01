#!/usr/bin/env python3
"""Programs that share a prompt through a store of prefixes: examples/store_lmdb.c. Each is another process. The text and the
logits are those of adopting once more, whatever happens to the store; a damaged store gives the text of no store.

TKV_TEST_STRICT=1: a test whose package is missing fails. TKV_TEST_CFLAGS: more words for the compiler, such as sanitizers."""
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
DEMO = os.path.join(ROOT, "examples", "data", "demo.gguf")
PROMPT = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")


def missing(what):
    """A package that is not here: the tests are skipped and counted, or fail where the package was installed."""
    if os.environ.get("TKV_TEST_STRICT") == "1":
        raise RuntimeError(what)
    raise unittest.SkipTest(what)


class Lmdb(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "store_lmdb")
        with open(os.path.join(ROOT, "examples", "store_lmdb.c"), encoding="utf-8") as f:
            command = re.search(r"^ \* (cc .*?) && ", f.read(), re.M).group(1)
        probe = subprocess.run(["cc", "-E", "-x", "c", "-"], input="#include <lmdb.h>\n", capture_output=True, text=True)
        if probe.returncode:
            missing("lmdb.h is missing: install liblmdb-dev")
        library = os.environ.get("LIBRARY")  # `make test` has compiled it
        words = [library if library and w == "examples/tieredkv.c" else cls.program if w == "store_lmdb" else w
                 for w in command.split() + os.environ.get("TKV_TEST_CFLAGS", "").split()]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode or done.stderr:
            raise RuntimeError(done.stderr)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.store = tempfile.mkdtemp(dir=self.folder.name)
        self.n = 0

    def words(self, *args, n=24):
        self.n += 1
        self.logits = os.path.join(self.store, "logits%d" % self.n)
        return [self.program, DEMO, "-f", PROMPT, "-t", "0", "-n", str(n), "--store", os.path.join(self.store, "db"),
                "--logits", self.logits] + list(args)

    def read(self, *args):
        """Runs the program. Returns its text, its logits and the numbers of its last two lines."""
        done = subprocess.run(self.words(*args), capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.parse(done.stdout)

    def parse(self, out):
        found = re.search(r"^\[prompt of ([\d,]+) tokens: ([\d,]+) from the store, (\d+) pages in [\d.]+ ms, ([\d,]+) bytes; ([\d,]+) read"
                          r".*\n\[first token after ([\d.]+) ms; (\d+) pages put in [\d.]+ ms, ([\d,]+) bytes; (\d+) values refused\]$",
                          out, re.M)
        self.assertTrue(found, out)
        names = ("prompt", "found", "pages", "bytes", "read", "first", "put", "put_bytes", "refused")
        numbers = {name: float(x.replace(",", "")) for name, x in zip(names, found.groups())}
        text = re.sub(r"^\[tables learned.*\n", "", out[:found.start()], flags=re.M)
        with open(self.logits, "rb") as f:
            return text, f.read(), numbers

    def test_a_second_process_adopts(self):
        first = self.read()
        self.assertEqual((first[2]["found"], first[2]["refused"]), (0, 0))
        self.assertGreaterEqual(first[2]["put"], 4)
        second, third = self.read(), self.read("--no-publish")
        self.assertGreaterEqual(second[2]["pages"], 4)
        self.assertEqual(second[2]["found"], 4 + 256 * second[2]["pages"])
        self.assertEqual(second[2]["found"] + second[2]["read"], second[2]["prompt"])
        self.assertEqual((second[2]["put"], second[2]["refused"]), (0, 0))
        self.assertEqual(second[:2], third[:2])
        self.assertEqual(second[0], first[0])
        other = self.read("--salt", "tenant")  # another tenant finds nothing
        self.assertEqual(other[2]["found"], 0)
        self.assertEqual(other[0], first[0])

    def test_many_at_once(self):
        processes = [subprocess.Popen(self.words(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                     for _ in range(6)]
        outs = [p.communicate(timeout=120) for p in processes]
        self.assertEqual([p.returncode for p in processes], [0] * 6, outs)
        for out, _ in outs:
            self.assertEqual(self.parse(out)[2]["refused"], 0)
        last = self.read()
        self.assertGreaterEqual(last[2]["pages"], 4)
        self.assertEqual(last[2]["put"], 0)

    def test_a_killed_program_leaves_a_whole_store(self):
        self.read()
        want = self.read()
        for i in range(12):
            p = subprocess.Popen(self.words("--salt", "k%d" % i), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(random.Random(i).uniform(0.05, 0.8))
            p.send_signal(signal.SIGKILL)
            p.wait()
            if i % 4 == 3:
                self.assertEqual(self.read()[:2], want[:2])
        self.assertEqual(self.read("--salt", "k0")[2]["refused"], 0)

    def test_damaged_values_are_read_again(self):
        want = self.read("--no-publish")  # nothing is in the store but tables
        self.read()
        adopted = self.read()
        path = os.path.join(self.store, "db", "data.mdb")
        with open(path, "rb") as f:
            data = bytearray(f.read())
        values = [m.start() for m in re.finditer(rb"TKVS\x01\x00\x00\x00", bytes(data))]
        self.assertGreaterEqual(len(values), 4)
        for at in values:  # within records
            for i in range(20000, 20064):
                data[at + i] ^= 0x55
        with open(path, "wb") as f:
            f.write(data)
        again = self.read("--no-publish")
        self.assertEqual((again[2]["found"], again[2]["refused"]), (0, 1))
        self.assertEqual(again[0], want[0])
        self.assertLess(adopted[2]["read"], again[2]["read"])

    def test_the_oldest_go(self):
        names = ["a", "b", "c", "d"]
        self.read("--limit", "1")
        for name in names:  # each takes two thirds of a MiB or so
            self.read("--limit", "1", "--salt", name)
        last = self.read("--limit", "1", "--salt", "d", "--no-publish")
        self.assertGreaterEqual(last[2]["pages"], 4)
        self.assertEqual(self.read("--limit", "1", "--salt", "a", "--no-publish")[2]["pages"], 0)
        self.assertLess(os.path.getsize(os.path.join(self.store, "db", "data.mdb")), (2 << 20) + (1 << 22))

    def test_errors(self):
        def refuse(args, sentence):
            done = subprocess.run(args, capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(sentence, done.stderr)
        refuse(self.words("--limit", "0"), "bad value")
        refuse([self.program, DEMO, "--store", os.path.join(self.store, "no", "such", "folder")], "cannot make")
        with open(os.path.join(self.store, "file"), "w") as f:
            f.write("no folder")
        refuse([self.program, DEMO, "--store", os.path.join(self.store, "file")], "cannot open the store")


if __name__ == "__main__":
    results.run()
