#!/usr/bin/env python3
"""examples/metrics.c compiles with the command in its first lines, and serves a running cache: Prometheus text and JSON that
agree, an orderly refusal for everything else, and no delay by slow, silent or many clients.

tests/programs.py says what TKV_TEST_STRICT and TKV_TEST_CFLAGS do."""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, STRICT, build, has_header

WARNINGS = "-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow".split()
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Server:
    def __init__(self, program, *options):
        self.process = subprocess.Popen([program, "--port", "0"] + list(options), cwd=ROOT, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        found = re.match(r"http://([0-9.]+):(\d+)/metrics\n$", line)
        if not found:
            raise AssertionError("%r: %s" % (line, self.process.communicate()[1]))
        self.host, self.port = found.group(1), int(found.group(2))

    def end(self, number=signal.SIGTERM):
        """Returns the status, and what the program wrote as an error."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        try:
            err = self.process.communicate(timeout=20)[1]
        finally:
            self.process.kill()
        return self.process.returncode, err

    def connect(self, data=b""):
        s = socket.create_connection((self.host, self.port), timeout=10)
        s.sendall(data)
        return s

    def ask(self, path, method="GET", body=None, headers={}):
        """Returns the status, the headers and the body."""
        c = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            c.request(method, path, body, headers)
            answer = c.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            c.close()

    def figures(self):
        """The lines of /metrics as a dict, without those of the program itself."""
        text = self.ask("/metrics")[2].decode()
        return {name: float(x) for name, x in re.findall(r"^(tkv\S+) (\S+)$", text, re.M)}

    def steps(self):
        return int(re.search(rb"^model_step_seconds_count (\d+)$", self.ask("/metrics")[2], re.M).group(1))


def read_all(s):
    """All bytes until the server closes the connection; a reset is an end, too."""
    got = b""
    try:
        while True:
            piece = s.recv(65536)
            if not piece:
                return got
            got += piece
    except ConnectionError:
        return got
    finally:
        s.close()


@unittest.skipUnless(STRICT or has_header("microhttpd.h"), "microhttpd.h is missing (package libmicrohttpd-dev)")
class Metrics(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.fault = ""  # why no test can run
        try:
            cls.program = build(cls.folder.name, "metrics", WARNINGS)
            cls.server = Server(cls.program)
            cls.addClassCleanup(cls.check_end)
        except AssertionError as e:
            cls.fault = str(e)

    @classmethod
    def check_end(cls):  # after all of it: the end is clean, and a sanitizer found nothing
        ended = cls.server.end()
        if ended != (0, ""):
            raise AssertionError("status %d: %s" % ended)

    def setUp(self):
        if self.fault:
            self.fail(self.fault)

    def need(self, tool):
        if not shutil.which(tool):
            (self.fail if STRICT else self.skipTest)("%s is missing" % tool)

    def assert_alive(self, most=2.0):
        began = time.monotonic()
        self.assertEqual(self.server.ask("/metrics")[0], 200)
        self.assertLess(time.monotonic() - began, most)

    def test_text(self):
        status, headers, body = self.server.ask("/metrics?from=test")
        self.assertEqual((status, headers["Content-Type"]), (200, "text/plain; version=0.0.4; charset=utf-8"))
        self.assertEqual((headers["Connection"], int(headers["Content-Length"])), ("close", len(body)))
        for line in body.decode().splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+)$')
        self.assertTrue(body.endswith(b"\n"))

    def test_text_and_state_agree(self):
        for _ in range(50):  # until no new report came between the requests
            before = self.server.figures()
            status, headers, body = self.server.ask("/state")
            if self.server.figures() == before:
                break
        else:
            self.fail("no two requests saw one report")
        self.assertEqual((status, headers["Content-Type"]), (200, "application/json"))
        state = json.loads(body)
        self.assertEqual(before["tkv_memory_held_bytes"], state["memory"]["total"])
        self.assertEqual(before["tkv_memory_peak_bytes"], state["memory"]["peak"])
        self.assertEqual(sum(x for name, x in before.items() if name.startswith("tkv_memory_bytes{")),
                         state["memory"]["total"])
        for tier in ("hot", "warm", "archive"):
            self.assertEqual(before['tkv_tokens{tier="%s"}' % tier], state["tokens"][tier])
        for name, field in (("tkv_budget_bytes", "bytes"), ("tkv_budget_used_bytes", "used"), ("tkv_level", "level")):
            self.assertEqual(before[name], state["budget"][field])
        self.assertLessEqual(state["budget"]["used"], state["budget"]["bytes"])

    def test_reports_are_new(self):
        first, end = self.server.steps(), time.monotonic() + 120  # not 5: a busy machine made 18 steps in them with TSan
        while self.server.steps() < first + 40 and time.monotonic() < end:
            time.sleep(.1)
        self.assertGreaterEqual(self.server.steps(), first + 40)

    def test_promtool(self):
        self.need("promtool")
        done = subprocess.run(["promtool", "check", "metrics"], input=self.server.ask("/metrics")[2], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        self.assertEqual((done.returncode, done.stdout), (0, b""))

    def test_curl(self):
        self.need("curl")
        base = "http://%s:%d" % (self.server.host, self.server.port)
        for words, status in ((["/metrics"], "200"), (["/state"], "200"), (["/none"], "404"), (["-I", "/state"], "200"),
                              (["-d", "x=1", "/metrics"], "405"), (["-X", "GET", "-d", "x=1", "/metrics"], "413")):
            done = subprocess.run(["curl", "-s", "-o", os.devnull, "-w", "%{http_code}"] + words[:-1] + [base + words[-1]],
                                  capture_output=True, text=True, timeout=10)
            self.assertEqual((done.returncode, done.stdout), (0, status), words)

    def test_head(self):
        for path in ("/metrics", "/state"):
            status, headers, body = self.server.ask(path, "HEAD")
            self.assertEqual((status, body), (200, b""))
            self.assertGreater(int(headers["Content-Length"]), 1000)
        self.assertEqual(self.server.ask("/none", "HEAD")[0], 404)
        answer = read_all(self.server.connect(REQUEST.replace(b"GET", b"HEAD")))
        self.assertTrue(answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n"), answer)

    def test_refusals(self):
        for path in ("/", "/metrics/", "/metric", "/state.json", "//metrics", "/../metrics", "/%00"):
            self.assertEqual(self.server.ask(path)[0], 404, path)
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "BREW"):
            status, headers, _ = self.server.ask("/metrics", method)
            self.assertEqual((status, headers["Allow"]), (405, "GET, HEAD"), method)

    def test_sizes(self):
        """What is too large is refused, or the connection closed, and the server lives."""
        many = b"".join(b"X-%d: %s\r\n" % (i, b"x" * 100) for i in range(1000))
        for data, statuses in (
                (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100000 + b"\r\n\r\n", (431,)),
                (b"GET /metrics HTTP/1.1\r\n" + many + b"\r\n", (431,)),
                (b"GET /" + b"x" * 100000 + b" HTTP/1.1\r\n\r\n", (414, 431)),
                (b"x" * 100000, (400, 414, 431)), (b"\0" * 100, (400, 405)), (b"\r\n" * 1000, ()),
                (REQUEST[:-2] + b"Content-Length: 3\r\n\r\nabc", (413,)),
                (REQUEST[:-2] + b"Content-Length: 99999999999\r\n\r\n", (413,)),
                (REQUEST[:-2] + b"Content-Length: -1\r\n\r\n", (400, 413)),
                (REQUEST[:-2] + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", (413,)),
                (REQUEST[:-2].replace(b"GET", b"POST") + b"Content-Length: 20000000\r\n\r\n" + b"x" * 20000000, (405,))):
            s = socket.create_connection((self.server.host, self.server.port), timeout=10)
            try:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the server closed it before all was sent
            answer = read_all(s)
            found = re.match(rb"HTTP/1\.[01] (\d+) ", answer)
            self.assertTrue(answer == b"" or (found and int(found.group(1)) in statuses), (data[:40], answer[:80]))
            self.assert_alive()
        self.assertEqual(self.server.ask("/metrics", headers={"X": "x" * 2000})[0], 200)

    def test_slow_clients(self):
        """20 clients that send a byte a second keep nobody waiting, and are closed when their time is over."""
        began, first, slowest = time.monotonic(), self.server.steps(), 0
        clients = [self.server.connect(b"G") for _ in range(20)]
        sent, closed = 1, []
        while len(closed) < 20 and time.monotonic() < began + 12:
            asked = time.monotonic()
            self.assertEqual(self.server.ask("/state")[0], 200)
            slowest = max(slowest, time.monotonic() - asked)
            if time.monotonic() > began + sent:
                for s in clients:
                    try:
                        s.sendall(REQUEST[sent:sent + 1])
                    except ConnectionError:
                        pass
                sent += 1
            for s in list(clients):
                s.settimeout(.001)
                try:
                    self.assertEqual(s.recv(1), b"")
                except socket.timeout:
                    continue
                except ConnectionError:
                    pass
                closed.append(time.monotonic() - began)
                clients.remove(s)
                s.close()
            time.sleep(.05)
        self.assertEqual(len(closed), 20)
        self.assertGreater(min(closed), 4)
        self.assertLess(max(closed), 8)
        self.assertLess(slowest, 1)
        self.assertGreater(self.server.steps(), first + 10)  # more than 1,000, but a sanitizer is slow

    def test_silent_clients(self):
        """More silent clients than the server has connections keep nobody out."""
        silent = [self.server.connect() for _ in range(200)]
        self.assert_alive(1.0)
        self.assert_alive(1.0)
        for s in silent:
            s.close()
        self.assert_alive()

    def test_thousand_connections(self):
        """All get an answer if they ask at once, and an answer or a closed connection if others came before they asked."""
        for _ in range(5):
            clients = [self.server.connect(REQUEST) for _ in range(200)]
            for s in clients:
                answer = read_all(s)
                self.assertTrue(answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\n"), answer)
        answered, clients = 0, [self.server.connect() for _ in range(200)]
        for s in clients:
            try:
                s.sendall(REQUEST)
            except ConnectionError:
                pass
        for s in clients:
            answer = read_all(s)
            self.assertTrue(answer == b"" or answer.startswith(b"HTTP/1.1 200 "), answer)
            answered += answer != b""
        self.assertGreater(answered, 20)
        self.assert_alive()
        for _ in range(1000):
            self.assertTrue(read_all(self.server.connect(REQUEST)).startswith(b"HTTP/1.1 200 "))

    def test_address(self):
        self.assertEqual(self.server.host, "127.0.0.1")
        others = ["127.0.0.2"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                s.connect(("192.0.2.1", 9))  # sends nothing; tells the machine's own address
                others.append(s.getsockname()[0])
            except OSError:
                pass
        for host in others:
            with self.assertRaises(OSError):
                socket.create_connection((host, self.server.port), timeout=2)
        if sys.platform.startswith("linux"):
            other = Server(self.program, "--bind", "127.0.0.2")
            self.assertEqual((other.host, other.ask("/state")[0]), ("127.0.0.2", 200))
            self.assertEqual(other.end(), (0, ""))

    def test_ends(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            server = Server(self.program)
            idle, done = server.connect(), server.connect(REQUEST)
            self.assertEqual(server.end(number), (0, ""))
            self.assertEqual(read_all(idle), b"")
            done.close()
        began = time.monotonic()
        server = Server(self.program, "--seconds", "1")
        self.assertEqual(server.wait(), (0, ""))
        self.assertGreater(time.monotonic() - began, 1)

    def test_bad_options(self):
        for options, text in (
                (["--port", str(self.server.port)], "cannot listen on 127.0.0.1, port %d: .*; choose another with --port "
                 r"\(0: a free one\) or --bind" % self.server.port),
                (["--bind", "localhost"], "--bind localhost: it must be an IPv4 address, such as 127.0.0.1"),
                (["--port", "65536"], "--port 65536: bad value"), (["--port", "http"], "--port http: bad value"),
                (["--seconds", "0"], "--seconds 0: bad value"), (["none.gguf", "--port", "0"], "none.gguf: ")):
            done = subprocess.run([self.program] + options, cwd=ROOT, capture_output=True, text=True, timeout=20)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, "^metrics: " + text)


if __name__ == "__main__":
    results.run()
