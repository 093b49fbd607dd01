#!/usr/bin/env python3
"""Disks that fail: tests/disk_steps.c keeps a conversation in files, and tests/disk_faults.c makes its n-th call fail, for n = 1, 2, ... until it
ends well. What was acknowledged is there afterwards, in the old file or in the new one, each of them whole.

The faults: EIO, a full disk that stays full, a short count, a kill, a power cut that loses what was not flushed, a disk that cannot be written.
One in twenty calls that write and read is tried, with one of four power cuts; TKV_TEST_LONG=1 (make soak) tries all."""
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import fcntl
except ImportError:
    pass  # not Linux: all is skipped

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CC = os.environ.get("CC", "cc").split()
EVERY = 1 if os.environ.get("TKV_TEST_LONG", "0") not in ("", "0") else 20
CHANGES = {"make", "write", "flush", "close", "rename", "remove", "cut"}
CUTS = ({}, {"DISK_KEEP": "60"}, {"DISK_RENAMED": "1"}, {"DISK_RENAMED": "1", "DISK_KEEP": "60"})


class Disk(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not sys.platform.startswith("linux"):
            raise unittest.SkipTest("LD_PRELOAD and fopencookie are those of Linux")
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.program, cls.faults = (os.path.join(cls.folder.name, name) for name in ("disk_steps", "disk_faults.so"))
        library = os.environ.get("LIBRARY") or os.path.join(ROOT, "examples", "tieredkv.c")
        subprocess.check_call(CC + ["-O1", os.path.join(ROOT, "tests", "disk_steps.c"), library, "-o", cls.program, "-lm"])
        subprocess.check_call(CC + ["-O1", "-shared", "-fPIC", os.path.join(ROOT, "tests", "disk_faults.c"), "-o", cls.faults, "-ldl"])

    def setUp(self):
        self.place = os.path.join(self.folder.name, "place")
        os.mkdir(self.place)
        self.addCleanup(shutil.rmtree, self.place)
        self.path = os.path.join(self.place, "talk.tkv")
        self.n_runs = 0

    def run_steps(self, mode, n, fault=None, at=0, **more):
        """Returns the status, and what it printed."""
        self.n_runs += 1
        env = dict(os.environ)
        if fault or more:
            env.update(LD_PRELOAD=self.faults, DISK_UNDER=self.place + "/", DISK_AT=str(at), DISK_FAULT=fault or "", **more)
        run = subprocess.run([self.program, mode, self.path, str(n)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        text = run.stdout.decode()
        self.assertNotIn("fault:", text, (mode, fault, at, more))
        self.assertIn(run.returncode, (0, 1, 3, 4, -9), (mode, fault, at, more, text))
        return run.returncode, text

    def list_calls(self, mode, n):
        """The calls of a run without a fault, and what it printed."""
        log = os.path.join(self.folder.name, "log")
        if os.path.exists(log):
            os.remove(log)
        status, text = self.run_steps(mode, n, DISK_LOG=log)
        self.assertEqual(status, 0, text)
        with open(log) as f:
            return f.read().split(), text

    def points(self, calls, kinds=None):
        """Numbers of calls to try: all, but of runs of writes or of reads the ends and one in EVERY."""
        for i, kind in enumerate(calls):
            inside = kind in ("read", "write") and 0 < i < len(calls) - 1 and calls[i - 1] == kind == calls[i + 1]
            if (kinds is None or kind in kinds) and not (inside and i % EVERY):
                yield i + 1

    def begin(self, files):
        shutil.rmtree(self.place)
        os.mkdir(self.place)
        for name, data in files.items():
            with open(os.path.join(self.place, name), "wb") as f:
                f.write(data)

    def read(self):
        with open(self.path, "rb") as f:
            return f.read()

    @staticmethod
    def numbers(what, text):
        return [int(n) for n in re.findall("^%s ([0-9]+)" % what, text, re.M)]


class Saves(Disk):
    """A file that is replaced as a whole, and a journal that grows."""

    def prepare(self, mode):
        self.assertEqual(self.run_steps(mode, 3)[0], 0)
        old = {"talk.tkv": self.read()}
        calls, text = self.list_calls(mode, 3)
        self.assertEqual(self.numbers("saved", text), [4, 5, 6])
        return old, calls

    def try_point(self, mode, old, fault, at, **more):
        """One run with a fault on a file of 3 turns, and one without on what it left. Returns the first one's output."""
        self.begin(old)
        status, text = self.run_steps(mode, 3, fault, at, **more)
        at_least = max(self.numbers("saved", text) + [3])
        self.assertNotEqual(status, 3, (fault, at, more, text))
        status, after = self.run_steps(mode, 0)
        self.assertEqual(status, 0, (fault, at, more, text, after))
        self.assertIn(self.numbers("has", after)[0], range(at_least, 7), (fault, at, more, text, after))
        status, after = self.run_steps(mode, 1)  # and it goes on
        self.assertEqual(status, 0, (fault, at, more, text, after))
        return text

    def check_faults(self, mode):
        old, calls = self.prepare(mode)
        n = dict.fromkeys(("EIO", "ENOSPC", "SHORT", "KILL", "CUT"), 0)
        for at in self.points(calls):
            text = self.try_point(mode, old, "EIO", at)
            if calls[at - 1] in ("make", "write", "flush", "rename"):
                self.assertIn("Input/output error", text)
            n["EIO"] += 1
            self.try_point(mode, old, "KILL", at)
            n["KILL"] += 1
            cuts = CUTS if calls[at - 1] in CHANGES else CUTS[:1]
            for more in cuts if EVERY == 1 else cuts[at % len(cuts):][:1]:
                self.try_point(mode, old, "CUT", at, **more)
                n["CUT"] += 1
        for at in self.points(calls, ("make", "write", "flush")):
            text = self.try_point(mode, old, "ENOSPC", at, DISK_STICKY="1")  # the disk stays full
            self.assertIn("No space left on device", text)
            n["ENOSPC"] += 1
        for at in self.points(calls, ("read", "write")):
            text = self.try_point(mode, old, "SHORT", at)
            self.assertEqual(self.numbers("saved", text), [4, 5, 6])
            n["SHORT"] += 1
        return n, calls

    def test_a_file_that_is_replaced(self):
        n, calls = self.check_faults("save")
        self.assertEqual([c for c in calls if c not in ("read", "write")],
                         ["open", "close"] + 3 * ["make", "measure", "make", "flush", "close", "rename", "close", "open", "flush", "close"])
        print("save, %d calls: %s; %d runs" % (len(calls), ", ".join("%d %s" % (v, k) for k, v in n.items()), self.n_runs))

    def test_a_journal(self):
        n, calls = self.check_faults("journal")
        self.assertIn("cut", calls)
        print("journal, %d calls: %s; %d runs" % (len(calls), ", ".join("%d %s" % (v, k) for k, v in n.items()), self.n_runs))

    def test_the_first_file(self):
        """Where there is no old file, there is none or a whole one afterwards."""
        for mode in ("save", "journal"):
            self.begin({})
            calls, _ = self.list_calls(mode, 2)
            for at in self.points(calls):
                for fault, more in (("EIO", {}), ("KILL", {}), ("CUT", {}), ("CUT", {"DISK_RENAMED": "1"})):
                    self.begin({})
                    _, text = self.run_steps(mode, 2, fault, at, **more)
                    status, after = self.run_steps(mode, 0)
                    self.assertEqual(status, 0, (mode, fault, at, more, text, after))
                    self.assertIn(self.numbers("has", after)[0], range(max(self.numbers("saved", text) + [0]), 3), (mode, fault, at, more, text))

    def test_a_disk_that_cannot_be_written(self):
        for mode in ("save", "journal"):
            old, _ = self.prepare(mode)
            self.begin(old)
            status, text = self.run_steps(mode, 3, "EROFS", 1, DISK_STICKY="1")
            self.assertEqual((status, self.numbers("has", text), self.numbers("saved", text)), (1, [3], []))
            self.assertEqual(text.count("Read-only file system"), 3)
            self.assertEqual((os.listdir(self.place), self.read()), (["talk.tkv"], old["talk.tkv"]))
            self.begin({})

    def test_a_failed_save_leaves_no_new_file(self):
        old, calls = self.prepare("save")
        for at in self.points(calls, ("make", "write", "flush", "rename")):
            self.begin(old)
            self.run_steps("save", 3, "EIO", at)
            self.assertEqual(os.listdir(self.place), ["talk.tkv"], at)


class Savers(Disk):
    """Two programs that save to one path at once, each of them its own conversation."""

    ROUNDS = 30
    TURNS = 30

    def new_files(self):
        return [name for name in os.listdir(self.place) if name.endswith(".new")]

    def start_both(self):
        return [subprocess.Popen([self.program, "save", self.path, str(self.TURNS)], stdout=subprocess.PIPE) for _ in range(2)]

    def test_both_end_well(self):
        for _ in range(self.ROUNDS // 3):
            self.begin({})
            for run in self.start_both():
                text = run.communicate(timeout=120)[0].decode()
                self.assertEqual((run.returncode, len(self.numbers("saved", text))), (0, self.TURNS), text)
            self.assertEqual(self.new_files(), [])
            self.assertEqual(self.run_steps("save", 0)[0], 0)

    def test_both_are_killed(self):
        self.assertEqual(self.run_steps("save", 3)[0], 0)
        old, left = {"talk.tkv": self.read()}, 0
        rng = random.Random(57)
        for i in range(self.ROUNDS):
            self.begin(old)
            runs = self.start_both()
            time.sleep(rng.uniform(0.002, 0.05))
            for run in runs:
                run.kill()
                run.communicate(timeout=120)
            self.assertLessEqual(len(self.new_files()), 2)
            left += len(self.new_files())
            status, text = self.run_steps("save", 0)
            self.assertEqual(status, 0, (i, text))
            self.assertIn(self.numbers("has", text)[0], range(3, 3 + self.TURNS + 1))
            self.assertEqual(self.run_steps("save", 1)[0], 0)
            self.assertEqual(self.new_files(), [])  # a save removes what killed ones left
        self.assertGreater(left, 0)
        print("%d kills of two savers left %d new files, which the next save removed" % (self.ROUNDS, left))

    def test_files_of_others_stay(self):
        """Only names that a save gives are removed, and no directory, link or locked file."""
        names = ["talk.tkv.new", "talk.tkv.0123456.new", "talk.tkv.012345678.new", "talk.tkv.0123456g.new", "talk.tkv.01234567.newer",
                 "other.tkv.01234567.new", "xtalk.tkv.01234567.new"]
        self.begin({name: b"x" for name in names + ["talk.tkv.aaaaaaaa.new", "talk.tkv.bbbbbbbb.new", "target"]})
        os.mkdir(os.path.join(self.place, "talk.tkv.cccccccc.new"))
        os.symlink("target", os.path.join(self.place, "talk.tkv.dddddddd.new"))
        with open(os.path.join(self.place, "talk.tkv.bbbbbbbb.new"), "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.assertEqual(self.run_steps("save", 1)[0], 0)
        self.assertEqual(sorted(os.listdir(self.place)), sorted(names + ["target", "talk.tkv"] + ["talk.tkv.%s.new" % (8 * c) for c in "bcd"]))


class Reads(Disk):
    def test_an_attached_file(self):
        self.assertEqual(self.run_steps("save", 20)[0], 0)
        calls, text = self.list_calls("attach", 0)
        self.assertEqual(self.numbers("has", text), [20])
        self.assertEqual(calls, ["open", "measure", "map", "close"])
        for at in range(1, 4):
            status, text = self.run_steps("attach", 0, "EIO", at)
            self.assertEqual((status, text), (4, "cannot map 0: Input/output error\n"))
        self.assertEqual(self.run_steps("attach", 0, "EROFS", 1, DISK_STICKY="1"), (0, "has 20\n"))

    def test_a_file_that_cannot_be_read(self):
        self.assertEqual(self.run_steps("save", 3)[0], 0)
        calls, _ = self.list_calls("save", 0)
        for at in self.points(calls, ("open", "read")):
            status, text = self.run_steps("save", 0, "EIO", at)
            self.assertEqual(status, 4)
            self.assertIn("Input/output error", text)


class Spill(Disk):
    """Blocks that a full budget moves to a file."""
    TURNS = 30

    def spill(self, *args, **more):
        status, text = self.run_steps("spill", self.TURNS, *args, **more)
        if status == 4:
            return None
        names = "offloaded", "unwritten", "refused", "blocks", "lost"
        self.assertEqual(status, 0, text)
        found = re.search("^" + ", ".join(name + " ([0-9]+)" for name in names) + "$", text, re.M)
        return dict(zip(names, map(int, found.groups())), has=self.numbers("has", text)[0])

    def test_each_call(self):
        calls, _ = self.list_calls("spill", self.TURNS)
        usual = self.spill()
        self.assertEqual((usual["has"], usual["unwritten"], usual["lost"]), (self.TURNS, 0, 0))
        self.assertGreater(usual["offloaded"], 10)
        tries = unwritten = 0
        every = max(1, len(calls) // 50) if EVERY > 1 else max(1, len(calls) // 3000)
        for at in [1] + list(range(2, len(calls) + 1, every)):
            for fault in ("EIO", "SHORT", "ENOSPC"):
                if fault == "ENOSPC" and calls[at - 1] not in ("make", "write") or fault == "SHORT" and calls[at - 1] not in ("read", "write"):
                    continue
                got = self.spill(fault, at)
                tries += 1
                if calls[at - 1] in ("make", "cut"):
                    self.assertEqual(got, None)  # the file cannot be opened, and the program says so
                    continue
                self.assertEqual((got["has"], got["lost"]), (self.TURNS, 0), (fault, at))  # a retry of the program is enough
                self.assertEqual(got["unwritten"], int(calls[at - 1] == "write" and fault != "SHORT"), (fault, at))
                unwritten += got["unwritten"]
        self.assertGreater(unwritten, 0)
        print("spill, %d calls: %d faults, %d blocks not written, none lost" % (len(calls), tries, unwritten))

    def test_a_disk_that_is_full(self):
        """Appends are refused when nothing more fits. All tokens that were accepted can be read."""
        calls, _ = self.list_calls("spill", self.TURNS)
        writes = [i + 1 for i, kind in enumerate(calls) if kind == "write"]
        for at in (writes[0], writes[len(writes) // 3], writes[-1]):
            got = self.spill("ENOSPC", at, DISK_STICKY="1")
            self.assertEqual(got["lost"], 0)
            self.assertGreater(got["unwritten"], 0)
            if at != writes[-1]:
                self.assertGreater(got["refused"], 0)
                self.assertLess(got["has"], self.TURNS)

    def test_a_disk_that_dies(self):
        """Tokens in the file are errors, those in memory stay, and nothing is taken for something else."""
        calls, _ = self.list_calls("spill", self.TURNS)
        got = self.spill("EIO", len(calls) * 2 // 3, DISK_STICKY="1")
        self.assertTrue(0 < got["lost"] < got["blocks"])


if __name__ == "__main__":
    results.run()
