#!/usr/bin/env python3
"""Programs that share a prompt through a store of prefixes: examples/store_lmdb.c, store_valkey.c. Each is another process. The text and the
logits are those of adopting once more, whatever happens to the store; a damaged store gives the text of no store.

tests/programs.py says what TKV_TEST_STRICT and TKV_TEST_CFLAGS do."""
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, STRICT, build, has_header

DEMO = os.path.join(ROOT, "examples", "data", "demo.gguf")
PROMPT = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")


def missing(what):
    """A package that is not here: the tests are skipped and counted, or fail where the package was installed."""
    if STRICT:
        raise RuntimeError(what)
    raise unittest.SkipTest(what)


class Store(unittest.TestCase):
    """What all stores have in common. A class has the words that name its store."""
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.place = tempfile.mkdtemp(dir=self.folder.name)
        self.n = 0

    def words(self, *args):
        self.n += 1
        self.logits = os.path.join(self.place, "logits%d" % self.n)
        return [self.program, DEMO, "-f", PROMPT, "-t", "0", "-n", "24", "--logits", self.logits] + self.options() + list(args)

    def read(self, *args):
        """Runs the program. Returns its text, its logits and the numbers of its last lines."""
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


class Lmdb(Store):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not has_header("lmdb.h"):
            missing("lmdb.h is missing: install liblmdb-dev")
        cls.program = build(cls.folder.name, "store_lmdb")

    def options(self):
        return ["--store", os.path.join(self.place, "db")]

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
        path = os.path.join(self.place, "db", "data.mdb")
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
        self.assertLess(os.path.getsize(os.path.join(self.place, "db", "data.mdb")), (2 << 20) + (1 << 22))

    def test_errors(self):
        def refuse(args, sentence):
            done = subprocess.run(args, capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(sentence, done.stderr)
        refuse(self.words("--limit", "0"), "bad value")
        refuse([self.program, DEMO, "--store", os.path.join(self.place, "no", "such", "folder")], "cannot make")
        with open(os.path.join(self.place, "file"), "w") as f:
            f.write("no folder")
        refuse([self.program, DEMO, "--store", os.path.join(self.place, "file")], "cannot open the store")


class Valkey(Store):
    """Plans without tables: so a program whose store fails has the bits of one without a store."""
    PLAN = ["--warm", "kivi4", "--archive", "kivi3"]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not has_header("hiredis/hiredis.h"):
            missing("hiredis.h is missing: install libhiredis-dev")
        cls.program = build(cls.folder.name, "store_valkey")
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        if not server:
            missing("no server: install redis-server or valkey-server")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            cls.port = s.getsockname()[1]
        cls.path = os.path.join(cls.folder.name, "socket")
        cls.server = subprocess.Popen([server, "--port", str(cls.port), "--bind", "127.0.0.1", "--requirepass", "secret",
                                       "--unixsocket", cls.path, "--save", "", "--dir", cls.folder.name,
                                       "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"],
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            try:
                cls.ask("PING")
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the server does not answer")

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        cls.server.wait()
        super().tearDownClass()

    @classmethod
    def ask(cls, *words):
        """Sends a command, and returns the bytes of the reply."""
        with socket.create_connection(("127.0.0.1", cls.port), timeout=5) as s:
            for command in (("AUTH", "secret"), words):
                parts = [w if isinstance(w, bytes) else w.encode() for w in command]
                s.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
                f = s.makefile("rb")
                line = f.readline()
            if line[:1] == b"$":
                return f.read(int(line[1:])) if int(line[1:]) >= 0 else None
            if line[:1] == b"*":
                return [f.read(int(f.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            return line

    def setUp(self):
        super().setUp()
        self.ask("FLUSHALL")
        self.at = ["--port", str(self.port)]
        os.environ["TKV_STORE_PASSWORD"] = "secret"

    def options(self):
        return self.at + self.PLAN

    def without(self):
        """Text and logits without a store, and the time to the first token."""
        at, self.at = self.at, ["--socket", os.path.join(self.place, "none")]
        out = self.read()
        self.at = at
        self.assertEqual(out[2]["found"], 0)
        return out

    def test_a_second_process_adopts(self):
        alone = self.without()
        first = self.read()
        self.assertEqual(first[:2], alone[:2])
        self.assertGreaterEqual(first[2]["put"], 4)
        second = self.read("--metrics", os.path.join(self.place, "metrics"))
        self.assertEqual((second[2]["found"], second[2]["put"]), (4 + 256 * first[2]["put"], 0))
        self.assertEqual(second[0], first[0])
        self.at = ["--socket", self.path]
        self.assertEqual(self.read()[:2], second[:2])
        with open(os.path.join(self.place, "metrics")) as f:
            text = f.read()
        self.assertIn("prefix_store_hits_total %d\n" % second[2]["pages"], text)
        self.assertEqual(self.read("--salt", "tenant")[2]["found"], 0)
        keys = self.ask("KEYS", "*")
        self.assertEqual(len(keys), 2 * first[2]["put"])
        self.assertTrue(0 < int(self.ask("TTL", keys[0])[1:]) <= 86400)

    def test_users_and_passwords(self):
        self.read()
        self.ask("ACL", "SETUSER", "reader", "on", ">word", "~tkv:*", "+mget", "+exists")
        os.environ["TKV_STORE_PASSWORD"] = "word"
        adopted = self.read("--user", "reader")
        self.assertGreaterEqual(adopted[2]["pages"], 4)
        self.assertEqual(self.read("--user", "reader", "--salt", "x")[2]["put"], 0)  # it may not write
        os.environ["TKV_STORE_PASSWORD"] = "wrong"
        self.assertEqual(self.read()[2]["found"], 0)
        del os.environ["TKV_STORE_PASSWORD"]
        self.assertEqual(self.read()[2]["found"], 0)

    def test_wrong_values(self):
        alone = self.without()
        self.read()
        self.read("--salt", "tenant")
        keys = self.ask("KEYS", "*")
        values = {k: self.ask("GET", k) for k in keys}
        for name in ("cut", "flipped", "empty", "of another page or tenant", "no string"):
            for k in keys:
                v = values[k]
                if name == "cut": v = v[:len(v) // 2]
                if name == "flipped": v = v[:5000] + bytes([v[5000] ^ 1]) + v[5001:]
                if name == "empty": v = b""
                if name == "of another page or tenant": v = values[keys[keys.index(k) - 1]]
                self.ask("DEL", k)
                self.ask(*(("LPUSH", k, "x") if name == "no string" else ("SET", k, v)))
            out = self.read()
            self.assertEqual(out[:2], alone[:2], name)
            self.assertEqual((out[2]["found"], out[2]["refused"]), (0, name != "no string"), name)

    def test_servers_that_fail(self):
        alone = self.without()
        kinds = {
            "garbage": b"\x00\xff" * 5000,
            "a long list": b"*1000000000\r\n",
            "a long value": b"*8\r\n$2000000000\r\n" + b"x" * 100000,
            "lists in lists": b"*8\r\n" * 200,
            "an error": b"-ERR no\r\n",
            "a cut": b"*8\r\n$1000\r\nabc",
            "nothing": None,
            "an end": b"",
        }
        for name, answer in kinds.items():
            with self.fake_server(answer):
                out = self.read()
            self.assertEqual(out[:2], alone[:2], name)
            self.assertEqual(out[2]["found"], 0, name)
        # the machine can be busy: a quarter of a second, where each call that waits for the timeout takes 20 ms
        self.assertLess(out[2]["first"], alone[2]["first"] + 250)

    @contextlib.contextmanager
    def fake_server(self, answer, after=None, pause=0):
        """A server on a unix socket. It answers the first command of a connection, and sends `after` again and again, with a pause
        of seconds. b"": it closes the connection."""
        ends = threading.Event()
        path = os.path.join(self.place, "fake")

        def serve():
            open_ones = []
            while not ends.is_set():
                try:
                    s = server.accept()[0]
                except OSError:
                    continue
                s.settimeout(0.2)
                open_ones.append(s)
                try:
                    s.recv(4096)  # AUTH
                    if answer != b"":
                        s.sendall(b"+OK\r\n")
                        s.recv(65536)
                    if answer:
                        s.sendall(answer)
                    while after and not ends.is_set():
                        s.sendall(after)
                        time.sleep(pause)
                    if b"" in (answer, after):
                        s.close()
                except OSError:
                    pass
            for s in open_ones:
                s.close()

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(0.05)
            thread = threading.Thread(target=serve)
            thread.start()
            self.at = ["--socket", path]
            try:
                yield
            finally:
                ends.set()
                thread.join()
                os.remove(path)

    def measure(self, *args):
        """Runs the program as read does. Returns its text and logits, its numbers, and the most memory that it held, in MiB
        (0: the system has no /proc)."""
        # an allocator of a sanitizer holds what was freed
        env = dict(os.environ, ASAN_OPTIONS="quarantine_size_mb=1:" + os.environ.get("ASAN_OPTIONS", ""))
        most = 0
        with tempfile.TemporaryFile("w+") as out, subprocess.Popen(self.words(*args), stdout=out, env=env) as p:
            while p.poll() is None:
                try:
                    with open("/proc/%d/status" % p.pid) as f:
                        most = max([most] + [int(kib) / 1024 for kib in re.findall(r"^VmHWM:\s+(\d+)", f.read(), re.M)])
                except OSError:
                    pass
                time.sleep(0.01)
            self.assertEqual(p.returncode, 0)
            out.seek(0)
            text, logits, numbers = self.parse(out.read())
        return (text, logits), numbers, most

    def test_replies_without_end(self):
        """A reply ends when it is longer than a right one can be, or late. What is too long takes no memory."""
        MIB = 1 << 20
        value = b"$%d\r\n" % MIB + b"x" * MIB + b"\r\n"
        lists = b":1\r\n"
        for _ in range(6):
            lists = b"*8\r\n" + 8 * lists
        # name: what begins the reply, what follows for ever, seconds between, MiB of memory that it may take
        kinds = {
            "a value of 2 GB": (b"*8\r\n$2000000000\r\n", b"x" * 65536, 0, 4),
            "a value of a byte more than allowed": (b"*5\r\n$%d\r\n" % (16 * MIB + 1), b"x" * 65536, 0, 4),
            "a value that trickles": (b"*8\r\n$1000000\r\n", b"x", 0.002, 4),
            "a value alone that trickles": (b"$1000000\r\n", b"x", 0.002, 4),
            "a line": (b"+", b"x" * 65536, 0, 4),
            "a line in a list": (b"*8\r\n-", b"x" * 65536, 0, 4),
            "a number that trickles": (b"*", b"1", 0.002, 4),
            "lists in lists": (b"*8\r\n", lists, 0, 4),
            "a list of many": (b"*2000000000\r\n", b"$-1\r\n" * 16384, 0, 4),
            "a list of a value more": (b"*9\r\n", value, 0, 4),
            "values as long as allowed (--most 1)": (b"*5\r\n", value, 0, 8),
        }
        self.at = ["--socket", os.path.join(self.place, "none")]
        alone, numbers, memory = self.measure()
        for name, (begin, after, pause, most) in kinds.items():
            for tries in range(3):  # the machine can be busy: once in three times it is not
                with self.fake_server(begin, after, pause):
                    out = self.measure(*(["--most", "1"] if "--most" in name else []))
                self.assertEqual(out[0], alone, name)
                self.assertEqual(out[1]["found"], 0, name)
                self.assertLess(out[2], memory + most, name)
                # the timeouts of AUTH and of the call, and 20 ms for each MiB that is allowed; the rest is noise
                late = out[1]["first"] - numbers["first"]
                if late < 40 + (5 * 20 if "--most" in name else 0) + 150:
                    break
            else:
                self.fail("%s: the first token comes %.0f ms later" % (name, late))

    def test_a_server_that_goes(self):
        """It has no page, and closes the connection before the program publishes."""
        alone = self.without()
        with self.fake_server(b"*5\r\n" + 5 * b"$-1\r\n", b""):
            out = self.read()
        self.assertEqual(out[:2], alone[:2])
        self.assertEqual((out[2]["found"], out[2]["put"]), (0, 0))

    def test_a_server_that_dies(self):
        self.read()
        want = self.read()
        for i in range(4):  # it stops in the middle of the program, and wakes up later
            p = subprocess.Popen(self.words("--salt", "" if i % 2 else "d%d" % i), stdout=subprocess.PIPE, text=True)
            time.sleep(random.Random(i).uniform(0.0, 0.3))
            self.server.send_signal(signal.SIGSTOP)
            out = p.communicate(timeout=60)[0]
            self.server.send_signal(signal.SIGCONT)
            self.assertEqual(p.returncode, 0)
            self.assertEqual(self.parse(out)[0], want[0])


if __name__ == "__main__":
    results.run()
