#!/usr/bin/env python3
"""Programs that share a prompt through a store of prefixes: examples/store_lmdb.c, store_valkey.c. Each is another process. Whatever happens
to the store, a program that reads the whole prompt has the text of one without a store, and a program that adopts pages has the text and
the logits of adopting once more. Reading and adopting code some blocks at other moments, so their logits are nearly the same, and a
text can part where two tokens are nearly as likely.

TKV_TEST_HIREDIS=DIR takes hiredis from DIR/include and DIR/lib for the tests of TLS, which need hiredis 1.0 or later with its TLS.
tests/programs.py says what TKV_TEST_STRICT and TKV_TEST_CFLAGS do."""
import contextlib
import math
import os
import random
import re
import shutil
import signal
import socket
import ssl
import struct
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


def log_softmax(logits):
    x = struct.unpack("=%df" % (len(logits) // 4), logits)
    total = max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x))
    return [v - total for v in x]


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
        self.prompt = PROMPT
        self.n = 0

    def words(self, *args):
        self.n += 1
        self.logits = os.path.join(self.place, "logits%d" % self.n)
        return [self.program, DEMO, "-f", self.prompt, "-t", "0", "-n", "24", "--logits", self.logits] + self.options() + list(args)

    def take_short_prompt(self):
        """Takes the beginning of the prompt, of two pages: for tests with many runs."""
        self.prompt = os.path.join(self.place, "prompt")
        with open(PROMPT, "rb") as text, open(self.prompt, "wb") as f:
            f.write(text.read(1500))

    def read(self, *args):
        """Runs the program. Returns its text, its logits and the numbers of its last lines."""
        done = subprocess.run(self.words(*args), capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.out, self.sentences = done.stdout, "".join(re.findall(r"store_\w+: .*\n", done.stderr))  # without bars
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


    def assert_close(self, got, want, most=3e-5):
        """Compares the logits of a program that adopts pages with those of one that reads the prompt. Their divergence is 3e-6 or less in
        these tests, with scalar and AVX2 kernels; pages of another text make it 2e-4 or more."""
        p, q = log_softmax(want[1]), log_softmax(got[1])
        self.assertEqual(len(p), len(q))
        self.assertLess(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q)), most)


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
        self.assert_close(second, first)
        other = self.read("--salt", "tenant")  # another tenant finds nothing
        self.assertEqual(other[2]["found"], 0)
        self.assertEqual(other[:2], first[:2])

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

    @unittest.skipUnless(sys.platform.startswith("linux"), "LD_PRELOAD and fopencookie are those of Linux")
    def test_a_disk_that_fails(self):
        """A call on the files of the store fails, or all from one on. The program reads as if no call had failed, or with tables of its own
        if it says so, or says why it ends. The next program finds a whole store, with the page or without."""
        faults = os.path.join(self.place, "disk_faults.so")
        subprocess.check_call(["cc", "-O1", "-shared", "-fPIC", os.path.join(ROOT, "tests", "disk_faults.c"), "-o", faults, "-ldl"])
        self.take_short_prompt()
        log, folder = os.path.join(self.place, "log"), os.path.join(self.place, "db")

        def read_with(**more):
            env = dict(os.environ, LD_PRELOAD=faults, DISK_UNDER=folder, **more)
            return subprocess.run(self.words(), capture_output=True, text=True, timeout=120, env=env)
        want = self.parse(read_with(DISK_LOG=log).stdout)
        adopted = self.read()
        self.assertEqual((adopted[2]["pages"], adopted[2]["refused"]), (1, 0))
        self.assert_close(adopted, want)
        with open(log) as f:
            calls = f.read().split()
        self.assertLess({"make", "write", "flush"}, set(calls))
        went_on, pages, alone = 0, set(), None
        for i in range(12):
            at = 1 + i * len(calls) // 12
            shutil.rmtree(folder)
            done = read_with(DISK_AT=str(at), DISK_FAULT="ENOSPC" if i % 3 == 2 else "EIO", DISK_STICKY=str(i % 2))
            if done.returncode == 0:
                out = self.parse(done.stdout)
                if "shares nothing" in done.stderr:  # its tables are of other tokens
                    alone = alone or out
                    self.assert_close(out, want, 1e-3)
                self.assertEqual(out[:2], (alone if "shares nothing" in done.stderr else want)[:2], at)
                went_on += 1
            else:
                self.assertRegex(done.stderr, r"^store_lmdb: cannot ", at)
            after = self.read()
            self.assertEqual((after[:2], after[2]["refused"]), ((adopted if after[2]["pages"] else want)[:2], 0), at)
            pages.add(after[2]["pages"])
        self.assertGreater(went_on, 4)
        self.assertEqual(pages, {0, 1})

    def damage(self, magic, after):
        """Changes 64 bytes of all values with a magic number, `after` bytes behind it. Returns how many there were."""
        path = os.path.join(self.place, "db", "data.mdb")
        with open(path, "rb") as f:
            data = bytearray(f.read())
        values = [m.start() for m in re.finditer(magic + rb"[\x01-\x09]\x00\x00\x00", bytes(data))]
        for at in values:  # within records
            for i in range(after, after + 64):
                data[at + i] ^= 0x55
        with open(path, "wb") as f:
            f.write(data)
        return len(values)

    def test_damaged_values_are_read_again(self):
        want = self.read("--no-publish")  # nothing is in the store but tables
        first = self.read()
        adopted = self.read()
        self.assertGreaterEqual(self.damage(b"TKVS", 20000), 4)
        again = self.read("--no-publish")
        self.assertEqual((again[2]["found"], again[2]["refused"]), (0, 1))
        self.assertIn("a value of the store is damaged: the prompt is read again from page 0 on\n", self.sentences)
        self.assertEqual(again[0], want[0])
        self.assertLess(adopted[2]["read"], again[2]["read"])
        mended = self.read()  # the damaged pages are replaced
        self.assertEqual((mended[2]["found"], mended[2]["refused"], mended[2]["put"]), (0, 1, first[2]["put"]))
        last = self.read()
        self.assertEqual((last[2]["found"], last[2]["refused"], last[2]["put"]), (adopted[2]["found"], 0, 0))
        self.assertEqual(last[:2], adopted[:2])
        self.assertEqual(self.sentences, "")

    def test_replaced_values_count_once(self):
        """A value that is replaced again and again does not push others out."""
        self.take_short_prompt()
        self.read("--limit", "1", "--salt", "other")
        first = self.read("--limit", "1")
        for _ in range(12):  # an even number: what is damaged twice is whole
            self.damage(b"TKVS", 20000)
            again = self.read("--limit", "1")
            self.assertEqual((again[2]["refused"], again[2]["put"]), (1, first[2]["put"]))
        other = self.read("--limit", "1", "--salt", "other")
        self.assertEqual((other[2]["pages"], other[2]["refused"]), (first[2]["put"], 0))

    def test_damaged_tables_are_replaced(self):
        first, adopted = self.read(), self.read()
        self.assertEqual(self.damage(b"TKVC", 1000), 1)
        mended = self.read()
        self.assertEqual(mended[2]["refused"], 1)
        self.assertIn("the tables in the store are damaged, and are replaced", self.sentences)
        self.assertNotIn("shares nothing", self.sentences)
        self.assertIn("[tables learned", self.out)
        self.assertEqual(mended[:2], (adopted if mended[2]["pages"] else first)[:2])
        last = self.read()
        self.assertEqual((last[2]["found"], last[2]["refused"]), (adopted[2]["found"], 0))
        self.assertEqual(last[:2], adopted[:2])
        self.assertEqual(self.sentences, "")

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


class Server(Store):
    """A server of Valkey or Redis on a free port. Plans without tables: so a program whose store fails has the bits of one without
    a store."""
    PLAN = ["--warm", "kivi4", "--archive", "kivi3"]

    @classmethod
    def start_server(cls, *words):
        """Starts a server, and waits until it answers. "PORT" in the words is the port."""
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        if not server:
            missing("no server: install redis-server or valkey-server")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            cls.port = s.getsockname()[1]
        cls.server = subprocess.Popen([server] + [str(cls.port) if w == "PORT" else w for w in words]
                                      + ["--bind", "127.0.0.1", "--requirepass", "secret", "--save", "", "--dir", cls.folder.name,
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
    def stop_server(cls):
        cls.server.kill()
        cls.server.wait()

    @classmethod
    def connect(cls):
        return socket.create_connection(("127.0.0.1", cls.port), timeout=5)

    @classmethod
    def ask(cls, *words):
        """Sends a command, and returns the bytes of the reply."""
        with cls.connect() as s:
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

    @staticmethod
    def noise(numbers):
        """Milliseconds by which the time to the first token differs between runs. Sanitizers make it ten times longer."""
        return 150 + 0.25 * numbers["first"]

    @contextlib.contextmanager
    def fake_server(self, answer, after=None, pause=0, greets=True, family=socket.AF_UNIX):
        """A server on a socket of its own. It answers the first command of a connection, and sends `after` again and again, with a pause
        of seconds. b"": it closes the connection. greets: it says OK to AUTH before."""
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
                    if greets and answer != b"":
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

        with socket.socket(family) as server:
            server.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
            server.listen()
            server.settimeout(0.05)
            thread = threading.Thread(target=serve)
            thread.start()
            self.at = ["--socket", path] if family == socket.AF_UNIX else ["--port", str(server.getsockname()[1])]
            try:
                yield
            finally:
                ends.set()
                thread.join()
                if family == socket.AF_UNIX:
                    os.remove(path)


class Valkey(Server):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not has_header("hiredis/hiredis.h"):
            missing("hiredis.h is missing: install libhiredis-dev")
        cls.program = build(cls.folder.name, "store_valkey")
        cls.path = os.path.join(cls.folder.name, "socket")
        cls.start_server("--port", "PORT", "--unixsocket", cls.path)

    @classmethod
    def tearDownClass(cls):
        cls.stop_server()
        super().tearDownClass()

    def test_a_second_process_adopts(self):
        alone = self.without()
        first = self.read()
        self.assertEqual(first[:2], alone[:2])
        self.assertGreaterEqual(first[2]["put"], 4)
        second = self.read("--metrics", os.path.join(self.place, "metrics"))
        self.assertEqual((second[2]["found"], second[2]["put"]), (4 + 256 * first[2]["put"], 0))
        self.assert_close(second, first)
        self.at = ["--socket", self.path]
        self.assertEqual(self.read()[:2], second[:2])
        with open(os.path.join(self.place, "metrics")) as f:
            text = f.read()
        self.assertIn("prefix_store_hits_total %d\n" % second[2]["pages"], text)
        self.assertEqual(self.read("--salt", "tenant")[2]["found"], 0)
        keys = self.ask("KEYS", "*")
        self.assertEqual(len(keys), 2 * first[2]["put"])
        self.assertTrue(0 < int(self.ask("TTL", keys[0])[1:]) <= 86400)

    def test_a_program_without_tls(self):
        done = subprocess.run(self.words("--tls", "authority.crt"), capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("hiredis 1.0 or later", done.stderr)

    def test_users_and_passwords(self):
        self.read()
        self.ask("ACL", "SETUSER", "reader", "on", ">word", "~tkv:*", "+mget", "+strlen")
        os.environ["TKV_STORE_PASSWORD"] = "word"
        adopted = self.read("--user", "reader")
        self.assertGreaterEqual(adopted[2]["pages"], 4)
        self.assertEqual(self.read("--user", "reader", "--salt", "x")[2]["put"], 0)  # it may not write
        self.assertIn("store_valkey: the server refuses: NOPERM ", self.sentences)
        alone = self.without()
        for word, sentence in (("wrong", "the server refuses: WRONGPASS "), (None, "the server refuses: NOAUTH ")):
            os.environ.pop("TKV_STORE_PASSWORD")
            if word: os.environ["TKV_STORE_PASSWORD"] = word
            out = self.read("--metrics", os.path.join(self.place, "metrics"))
            self.assertEqual(out[:2], alone[:2])
            self.assertEqual((out[2]["found"], out[2]["refused"], out[2]["put"]), (0, 0, 0))
            self.assertEqual(self.sentences.count(sentence), 1, self.sentences)
            n_denied = int(re.search(r"^\[server: 0 pages there, .* (\d+) refused\]$", self.out, re.M).group(1))
            self.assertGreaterEqual(n_denied, 1)
            self.assertEqual(self.count("refused"), n_denied)

    def count(self, name):
        """A number of the file that --metrics wrote."""
        with open(os.path.join(self.place, "metrics")) as f:
            return int(re.search(r"^prefix_store_%s_total (\d+)$" % name, f.read(), re.M).group(1))

    def test_wrong_values(self):
        self.take_short_prompt()
        alone = self.without()
        first, adopted = self.read(), self.read()
        self.read("--salt", "tenant")
        keys = self.ask("KEYS", "*")
        values = {k: self.ask("GET", k) for k in keys}
        for name in ("cut", "flipped", "empty", "of another page or tenant", "too long", "no string"):
            for k in keys:
                v = values[k]
                if name == "cut": v = v[:len(v) // 2]
                if name == "flipped": v = v[:5000] + bytes([v[5000] ^ 1]) + v[5001:]
                if name == "empty": v = b""
                if name == "of another page or tenant": v = values[keys[keys.index(k) - 1]]
                if name == "too long": v = bytes((1 << 20) + 1)
                self.ask("DEL", k)
                self.ask(*(("LPUSH", k, "x") if name == "no string" else ("SET", k, v)))
            for words, put in ((["--no-publish"], 0), ([], first[2]["put"])):
                metrics = os.path.join(self.place, "metrics")
                out = self.read("--most", "1", "--metrics", metrics, *words)
                self.assertEqual(out[:2], alone[:2], name)
                self.assertEqual((out[2]["found"], out[2]["refused"], out[2]["put"]), (0, 1, put), name)
                self.assertEqual(self.count("refused"), 1, name)
                self.assertIn("a value of the store is damaged: the prompt is read again from page 0 on", self.sentences, name)
            last = self.read()  # the wrong values were replaced
            self.assertEqual((last[2]["found"], last[2]["refused"], last[2]["put"]), (adopted[2]["found"], 0, 0), name)
            self.assertEqual((last[:2], self.sentences), (adopted[:2], ""), name)

    def test_one_wrong_page(self):
        """Pages before a wrong one are adopted. From it on they are replaced."""
        self.read()
        adopted = self.read()
        keys = sorted(self.ask("KEYS", "*"))
        values = {k: self.ask("GET", k) for k in keys}
        found = []
        for k in keys:
            for wrong in (("SET", k, values[k][:-1]), ("LPUSH", k, "x")):
                self.ask("DEL", k)
                self.ask(*wrong)
                out = self.read()
                self.assertEqual((out[2]["refused"], out[2]["put"]), (1, adopted[2]["pages"] - out[2]["pages"]))
                last = self.read()
                self.assertEqual((last[2]["pages"], last[2]["refused"], self.sentences), (adopted[2]["pages"], 0, ""))
            found.append(out[2]["pages"])
        self.assertEqual(sorted(found), list(range(len(keys))))

    def test_wrong_tables(self):
        """Wrong tables are replaced, whatever they are, and pages are shared again."""
        self.PLAN = []  # the default plan needs tables
        first, adopted = self.read(), self.read()
        self.assertGreaterEqual(adopted[2]["pages"], 4)
        [key] = [k for k in self.ask("KEYS", "*") if self.ask("GET", k)[:4] == b"TKVC"]
        tables = self.ask("GET", key)
        for name in ("cut", "flipped", "empty", "too long", "no string"):
            wrong = {"cut": tables[:-1], "flipped": tables[:1000] + bytes([tables[1000] ^ 1]) + tables[1001:], "empty": b"",
                     "too long": bytes((1 << 20) + 1), "no string": b"x"}[name]
            self.ask("DEL", key)
            self.ask("LPUSH" if name == "no string" else "SET", key, wrong)
            out = self.read("--most", "1", "--metrics", os.path.join(self.place, "metrics"))
            self.assertEqual(out[:2], (adopted if out[2]["pages"] else first)[:2], name)
            self.assertEqual((out[2]["refused"], self.count("refused")), (1, 1), name)
            self.assertIn("are replaced" if name in ("cut", "flipped", "empty") else
                          {"too long": "longer than --most", "no string": "has no string"}[name],
                          self.sentences)
            self.assertNotIn("shares nothing", self.sentences, name)
            self.assertEqual(self.ask("GET", key), tables, name)
            self.assertEqual((self.read()[:2], self.sentences), (adopted[:2], ""), name)

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

    def measure(self, *args):
        """Runs the program as read does. Returns its text and logits, its numbers, and the most memory that it held, in MiB
        (0: the system has no /proc)."""
        # an allocator of a sanitizer holds what was freed
        env = dict(os.environ, ASAN_OPTIONS="quarantine_size_mb=1:" + os.environ.get("ASAN_OPTIONS", ""))
        most = 0
        with tempfile.TemporaryFile("w+") as out, subprocess.Popen(self.words(*args), stdout=out, stderr=subprocess.DEVNULL, env=env) as p:
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
            "values as long as allowed (--most 1)": (b"*2\r\n", value, 0, 4),
        }
        self.take_short_prompt()
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
                if late < 40 + (2 * 20 if "--most" in name else 0) + self.noise(numbers):
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
        first, adopted = self.read(), self.read()
        for i in range(4):  # it stops in the middle of the program, and wakes up later
            p = subprocess.Popen(self.words("--salt", "" if i % 2 else "d%d" % i), stdout=subprocess.PIPE, text=True)
            time.sleep(random.Random(i).uniform(0.0, 0.3))
            self.server.send_signal(signal.SIGSTOP)
            out = p.communicate(timeout=60)[0]
            self.server.send_signal(signal.SIGCONT)
            self.assertEqual(p.returncode, 0)
            got = self.parse(out)
            known = {first[2]["found"]: first, adopted[2]["found"]: adopted}.get(got[2]["found"])
            if known: self.assertEqual(got[:2], known[:2])
            else: self.assert_close(got, first)  # some of the pages came before it stopped


class ValkeyTls(Server):
    """A real server that speaks TLS only. Without hiredis 1.0 each test is skipped by its name, under TKV_TEST_STRICT too: Debian 12 has
    hiredis 0.14."""
    HOME = os.environ.get("TKV_TEST_HIREDIS")
    WORDS = ["-I%s/include" % HOME, "-L%s/lib" % HOME, "-Wl,-rpath,%s/lib" % HOME] if HOME else []
    LACKS = ("hiredis is older than 1.0, or has no TLS"
             if not has_header("hiredis/hiredis.h", WORDS, "HIREDIS_MAJOR >= 1") or not has_header("hiredis/hiredis_ssl.h", WORDS)
             else "openssl/ssl.h is missing" if not has_header("openssl/ssl.h")
             else "there is no openssl command" if not shutil.which("openssl") else None)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if cls.LACKS:
            return
        # hiredis once more, behind its part for TLS, which needs it
        cls.program = build(cls.folder.name, "store_valkey",
                            cls.WORDS + ["-DHIREDIS_TLS", "-lhiredis_ssl", "-lhiredis", "-lssl", "-lcrypto"])
        for name in ("authority", "stranger"):
            cls.openssl("req", "-x509", *cls.new_key(name), "-days", "2", "-out", cls.file(name + ".crt"))
        for name in ("server", "client"):
            cls.openssl("req", *cls.new_key(name), "-out", cls.file(name + ".csr"))
            with open(cls.file("names"), "w") as f:
                f.write("subjectAltName=IP:127.0.0.1\n")
            cls.openssl("x509", "-req", "-in", cls.file(name + ".csr"), "-CA", cls.file("authority.crt"), "-CAkey",
                        cls.file("authority.key"), "-CAcreateserial", "-days", "2", "-extfile", cls.file("names"),
                        "-out", cls.file(name + ".crt"))
        cls.context = ssl.create_default_context(cafile=cls.file("authority.crt"))
        cls.context.load_cert_chain(cls.file("client.crt"), cls.file("client.key"))
        cls.start_server("--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no", "--tls-cert-file", cls.file("server.crt"),
                         "--tls-key-file", cls.file("server.key"), "--tls-ca-cert-file", cls.file("authority.crt"))

    @classmethod
    def tearDownClass(cls):
        if not cls.LACKS:
            cls.stop_server()
        super().tearDownClass()

    @classmethod
    def file(cls, name):
        return os.path.join(cls.folder.name, name)

    @classmethod
    def new_key(cls, name):
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=" + name,
                "-keyout", cls.file(name + ".key")]

    @classmethod
    def openssl(cls, *words):
        subprocess.run(["openssl", *words], check=True, capture_output=True)

    @classmethod
    def connect(cls):
        return cls.context.wrap_socket(super().connect(), server_hostname="127.0.0.1")

    def setUp(self):
        if self.LACKS:
            self.skipTest(self.LACKS)
        super().setUp()
        self.tls = ["--tls", self.file("authority.crt")]
        self.plain = self.at
        self.at = self.plain + self.tls

    def test_a_second_process_adopts(self):
        alone = self.without()
        first = self.read()
        self.assertEqual(first[:2], alone[:2])
        self.assertGreaterEqual(first[2]["put"], 4)
        second = self.read()
        self.assertEqual((second[2]["pages"], second[2]["put"]), (first[2]["put"], 0))
        self.assert_close(second, first)

    def test_wrong_certificates_are_misses(self):
        alone = self.without()
        self.read()
        self.assertGreaterEqual(self.read()[2]["pages"], 4)
        for name, at in (("another authority", self.plain + ["--tls", self.file("stranger.crt")]),
                         ("another host", self.plain + self.tls + ["--host", "localhost"]),
                         ("no TLS", self.plain)):
            self.at = at
            out = self.read("--salt", name)
            self.assertEqual(out[:2], alone[:2], name)
            self.assertEqual((out[2]["found"], out[2]["put"]), (0, 0), name)

    def test_a_server_that_asks_for_a_certificate(self):
        self.read()
        self.ask("CONFIG", "SET", "tls-auth-clients", "yes")
        try:
            self.assertEqual(self.read()[2]["pages"], 0)
            self.at = self.at + ["--cert", self.file("client.crt"), "--key", self.file("client.key")]
            self.assertGreaterEqual(self.read()[2]["pages"], 4)
        finally:
            self.ask("CONFIG", "SET", "tls-auth-clients", "no")

    def test_handshakes_without_end(self):
        self.take_short_prompt()
        alone = self.without()
        for name, begin, after in (("silence", None, None), ("a record that trickles", b"\x16\x03\x03\x40\x00\x02", b"x"),
                                   ("records", b"\x16\x03\x03", b"\x00\x01\x00\x16\x03\x03"), ("no TLS", b"+OK\r\n", b"x"),
                                   ("an end", b"", None)):
            for tries in range(3):
                with self.fake_server(begin, after, 0.002, greets=False, family=socket.AF_INET):
                    self.at = self.at + self.tls
                    out = self.read()
                self.assertEqual(out[:2], alone[:2], name)
                late = out[2]["first"] - alone[2]["first"]
                if late < 20 + self.noise(alone[2]):
                    break
            else:
                self.fail("%s: the first token comes %.0f ms later" % (name, late))

    def test_a_record_that_trickles(self):
        """A reply of a server with a right certificate: bytes of one record of TLS, which never ends."""
        alone = self.without()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file("server.crt"), self.file("server.key"))
        late = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)
            self.at = ["--port", str(server.getsockname()[1])] + self.tls
            thread = threading.Thread(target=self.trickle_record, args=(server, context, late))
            thread.start()
            out = self.read("--timeout", "200")  # the machine can be busy: the handshake must end
            thread.join()
        self.assertEqual(out[:2], alone[:2])
        self.assertEqual(len(late), 1)
        self.assertLess(late[0], 2, "seconds until the program gave up")

    @staticmethod
    def trickle_record(server, context, late):
        raw = server.accept()[0]
        raw.settimeout(10)
        come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(come, go, server_side=True)

        def step(action):
            while True:
                try:
                    return action()
                except ssl.SSLWantReadError:
                    raw.sendall(go.read())
                    come.write(raw.recv(65536))
        step(tls.do_handshake)
        for answer in (b"+OK\r\n", b"*5\r\n$16000\r\n" + b"x" * 16000):
            step(lambda: tls.read(65536))
            tls.write(answer)
            if len(answer) < 100:
                raw.sendall(go.read())
        start = time.monotonic()
        try:
            for byte in go.read()[:1000]:
                raw.sendall(bytes([byte]))
                time.sleep(0.005)
        except OSError:
            pass
        late.append(time.monotonic() - start)
        raw.close()

    def test_errors(self):
        for words, sentence in ((["--tls", self.file("none")], "cannot read the file of --tls"),
                                (["--cert", self.file("client.crt")], "need --tls"),
                                (self.tls + ["--socket", "x"], "exclude each other"),
                                (self.tls + ["--cert", self.file("client.crt"), "--key", self.file("server.key")], "another certificate")):
            self.at = words
            done = subprocess.run(self.words(), capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, sentence in done.stderr), (1, True), done.stderr)


if __name__ == "__main__":
    results.run()
