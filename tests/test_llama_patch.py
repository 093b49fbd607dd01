#!/usr/bin/env python3
"""examples/llama.patch: llama.cpp with a KV cache in tiers. Its perplexity tool agrees with its own cache, and its server
goes on from reused, saved, shifted and parallel sequences as from new ones.

LLAMA_CPP=DIR is a tree of llama.cpp at the version of the patch: not patched, or patched, with programs in
DIR/build/bin. tools/llama_patch.sh makes it. Without it all tests are skipped; without programs, those that need them."""
import concurrent.futures
import glob
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.dont_write_bytecode = True
import results
import tiny_gguf
from programs import ROOT, STRICT

DIR = os.environ.get("LLAMA_CPP", "")
PATCH = os.path.join(ROOT, "examples", "llama.patch")
TEXT = os.path.join(ROOT, "bench", "QUALITY.md")
EXACT = "tiered:tiers.hot_tokens=unlimited,tiers.hot=f32"
BUDGET = "tiered:budget.bytes=%d"


def limit_memory():
    """A wrong size in a file must not fill the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def program(name):
    return os.path.join(DIR, "build", "bin", name)


def missing(what, must=False):
    if must and STRICT:
        raise RuntimeError(what)
    raise unittest.SkipTest(what)


def need_programs():
    """Returns a model that has been trained."""
    if not DIR or not os.path.exists(program("llama-server")):
        missing("LLAMA_CPP names no folder with build/bin/llama-server")
    models = glob.glob(os.path.join(ROOT, "build", "models", "SmolLM2*.gguf"))
    if not models:
        missing("SmolLM2 is missing: make model", True)
    return models[0]


class Patch(unittest.TestCase):
    def test_it_applies(self):
        if not DIR:
            missing("LLAMA_CPP names no tree of llama.cpp")
        with open(PATCH, encoding="utf-8") as f:
            names = re.findall(r"^\+\+\+ b/(.*)$", f.read(), re.M)
        words = ["-R"] if os.path.exists(os.path.join(DIR, "src", "llama-kv-tiered.cpp")) else []
        with tempfile.TemporaryDirectory() as place:
            for name in names:
                source, copy = os.path.join(DIR, name), os.path.join(place, name)
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                if os.path.exists(source):
                    with open(source, "rb") as f, open(copy, "wb") as to:
                        to.write(f.read())
            subprocess.run(["git", "init", "-q", place], check=True)
            done = subprocess.run(["git", "apply", "--check", *words, PATCH], cwd=place, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))


class Memory(unittest.TestCase):
    def test_sequences(self):
        model = need_programs()
        with tempfile.TemporaryDirectory() as place:
            path, libraries = os.path.join(place, "llama_memory"), os.path.join(DIR, "build", "bin")
            subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", os.path.join(ROOT, "tests", "llama_memory.c"),
                            "-o", path, "-isystem", os.path.join(DIR, "include"), "-isystem", os.path.join(DIR, "ggml", "include"),
                            "-L" + libraries, "-Wl,-rpath," + libraries, "-lllama", "-lggml", "-lggml-base", "-lm"], check=True)
            done = subprocess.run([path, model, TEXT, os.path.join(place, "state")], capture_output=True, text=True, timeout=900,
                                  preexec_fn=limit_memory)
            self.assertRegex(done.stdout, r"^\d+ checks, 0 failed\n$")
            self.assertEqual(done.returncode, 0)


class Perplexity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = need_programs()
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)

    def run_tool(self, *words, model=None):
        command = [program("llama-perplexity"), "-m", model or self.model, "-f", TEXT, "-c", "512", "-b", "512", "-ub", "64",
                   "--chunks", "2", "-t", "1", "--no-warmup"]
        return subprocess.run(command + list(words), capture_output=True, text=True, timeout=600)

    def find(self, pattern, *words, model=None):
        """The tool can end before its log is written, so it has some tries."""
        for _ in range(8):
            done = self.run_tool(*words, model=model)
            found = re.search(pattern, done.stdout + done.stderr)
            if found:
                return float(found.group(1))
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        raise AssertionError(done.stderr[-2000:])

    def measure(self, *words, model=None):
        return self.find(r"Final estimate: PPL = ([\d.]+)", *words, model=model)

    def divergence(self, base, *words):
        return self.find(r"Mean +KLD: +(-?[\d.]+)", "--kl-divergence-base", base, "--kl-divergence", *words)

    def test_exact_tiers_are_like_f16(self):
        base = os.path.join(self.place.name, "base")
        exact = self.measure("--kv", EXACT, "--kl-divergence-base", base)
        self.assertLess(abs(self.measure() / exact - 1), 0.02)
        noise = self.divergence(base)
        self.assertLess(noise, 0.01)
        self.assertLess(abs(self.divergence(base, "--kv", EXACT)), 1e-5)  # but for 16 bits in the file
        tiered = self.divergence(base, "--kv", "tiered")
        self.assertGreater(tiered, 0)
        self.assertLess(tiered, 0.03)

    def test_sequences_in_a_batch(self):
        alone = self.measure("--kv", EXACT)
        together = self.measure("--kv", EXACT, "-b", "1024")
        self.assertLess(abs(together / alone - 1), 0.005)

    def test_models(self):
        for make in (tiny_gguf.qwen3, tiny_gguf.gemma2, tiny_gguf.gpt_oss, tiny_gguf.mpt):
            with self.subTest(make.__name__):
                path = os.path.join(self.place.name, make.__name__)
                make(path)
                self.assertLess(abs(self.measure("--kv", EXACT, model=path) / self.measure(model=path) - 1), 0.005)
                self.assertLess(abs(self.measure("--kv", EXACT, "--swa-full", model=path) / self.measure(model=path) - 1), 0.005)

    def test_refused(self):
        path = os.path.join(self.place.name, "deepseek2")
        tiny_gguf.deepseek2(path)
        for words, sentence in ((["-m", path, "--kv", "tiered"], "no tiered KV cache for this model: it has latent attention"),
                                (["--kv", "tiered:tiers.hot=kivi9"], "plan of the tiered KV cache: line 1"),
                                (["--kv", "tiered:model.head_dim=4"], "model.* comes from the model"),
                                (["--kv", "tiered:budget.bytes=1K"], "plan of the tiered KV cache: "),
                                (["--kv", "tiered", "-ctk", "q8_0"], "no tiered KV cache: types of keys and values (--cache-type-k"),
                                (["--kv", "tiered", "-ctv", "f32"], "no tiered KV cache: types of keys and values (--cache-type-k"),
                                (["--kv", "tired"], "--kv is plain or tiered[:PLAN]")):
            done = self.run_tool(*words)
            self.assertGreater(done.returncode, 0)
            self.assertIn(sentence, done.stdout + done.stderr)


class Server:
    def __init__(self, model, *words):
        self.place = tempfile.TemporaryDirectory()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = open(os.path.join(self.place.name, "log"), "w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen([program("llama-server"), "-m", model, "--port", str(self.port), "-t", "1", "-tb", "1",
                                         "--slot-save-path", self.place.name, "--no-webui", "--no-warmup", "--seed", "1",
                                         "-b", "256", "-ub", "64", *words],
                                        stdout=self.log, stderr=subprocess.STDOUT, preexec_fn=limit_memory)
        for _ in range(600):
            try:
                if self.ask("/health")["status"] == "ok":
                    return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        raise AssertionError("the server does not start: " + self.text()[-3000:])

    def text(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def ask(self, path, body=None, timeout=300):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request("http://127.0.0.1:%d%s" % (self.port, path), data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())

    def complete(self, prompt, n=24, **more):
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": True, "ignore_eos": True, **more}
        return self.ask("/completion", body)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.status = self.process.wait(timeout=60)
        finally:
            self.process.kill()
            self.log.close()
            self.place.cleanup()


def piece(first, n):
    with open(TEXT, encoding="utf-8") as f:
        return f.read()[first:first + n]


class Serving(unittest.TestCase):
    """Tokens are compressed here from the 65th on."""
    PLAN = "tiered:preset=balanced,tiers.warm_tokens=64"

    @classmethod
    def setUpClass(cls):
        cls.model = need_programs()

    def test_a_prompt_is_reused(self):
        prompt = piece(0, 1500)
        with Server(self.model, "--kv", EXACT, "-np", "1", "-c", "2048", "-cram", "0") as server:
            first = server.complete(prompt)
            longer = server.complete(prompt + first["content"] + " Then", id_slot=0)
            self.assertGreater(longer["tokens_cached"], 0)
            self.assertLess(longer["timings"]["prompt_n"], 40)
            other = server.complete(prompt[:700] + " is another text")
            self.assertLess(other["timings"]["prompt_n"], 40)
            again = server.complete(prompt)
            fresh = server.complete(prompt, cache_prompt=False)
            self.assertEqual(again["content"], fresh["content"])
            self.assertEqual(first["content"], fresh["content"])
        self.assertEqual(server.status, 0)

    def test_slots_are_saved_and_restored(self):
        prompt = piece(2000, 2500)
        with Server(self.model, "--kv", self.PLAN, "-np", "1", "-c", "4096", "-cram", "0") as server:
            server.complete(prompt, n=1)
            saved = server.ask("/slots/0?action=save", {"filename": "talk.bin"})
            self.assertGreater(saved["n_saved"], 500)
            size = os.path.getsize(os.path.join(server.place.name, "talk.bin"))
            self.assertIn("KV cache in tiers, plan: " + self.PLAN.partition(":")[2], server.text())
            went_on = server.complete(prompt)
            server.ask("/slots/0?action=erase", {})
            server.complete(piece(9000, 300), n=1)
            server.ask("/slots/0?action=erase", {})
            restored = server.ask("/slots/0?action=restore", {"filename": "talk.bin"})
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            after = server.complete(prompt)
            self.assertLess(after["timings"]["prompt_n"], 8)
            self.assertEqual(after["content"], went_on["content"])
            self.assertLess(size, saved["n_saved"] * 23040 * 0.6)  # of F16

            # one bit is wrong: nothing is restored, and the server goes on
            with open(os.path.join(server.place.name, "talk.bin"), "r+b") as f:
                f.seek(size // 2)
                byte = f.read(1)
                f.seek(size // 2)
                f.write(bytes([byte[0] ^ 4]))
            with self.assertRaises(urllib.error.HTTPError):
                server.ask("/slots/0?action=restore", {"filename": "talk.bin"})
            self.assertEqual(len(server.complete(prompt)["content"]) > 0, True)
        self.assertEqual(server.status, 0)

    def test_a_context_is_shifted(self):
        with Server(self.model, "--kv", self.PLAN, "-np", "1", "-c", "512", "--context-shift", "-cram", "0") as server:
            done = server.complete(piece(0, 1200), n=400, n_keep=8)
            self.assertEqual(done["tokens_predicted"], 400)
            self.assertIn("slot context shift", server.text())
            self.assertGreater(len(done["content"]), 400)
            self.assertNotIn("tiered KV cache, sequence", server.text())
        self.assertEqual(server.status, 0)

    def test_parallel_sequences(self):
        prompts = [piece(i * 3000, 600 + 150 * i) for i in range(4)]
        for words in ([], ["--kv-unified"]):
            with self.subTest(words), Server(self.model, "--kv", EXACT, "-np", "4", "-c", "4096", "-cram", "0", *words) as server:
                alone = [server.complete(p, cache_prompt=False)["content"] for p in prompts]
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    together = list(pool.map(lambda p: server.complete(p, cache_prompt=False)["content"], prompts))
                # More rows round in another way, which decides between tokens that are alike. tests/llama_memory.c compares logits.
                same = sum(a == b for a, b in zip(alone, together))
                print("texts as alone: %d of 4" % same)
                self.assertGreaterEqual(same, 2)
            self.assertEqual(server.status, 0)

    def test_a_file_of_another_cache_is_refused(self):
        """A server without tiers refuses a file of tiers, and the reverse, and goes on."""
        prompt, kinds = piece(0, 900), (["--kv", "tiered"], [])
        with tempfile.TemporaryDirectory() as place:
            for words in kinds:
                with Server(self.model, *words, "-np", "1", "-c", "1024", "--slot-save-path", place) as server:
                    server.complete(prompt, n=1)
                    server.ask("/slots/0?action=save", {"filename": "tiers" if words else "plain"})
                self.assertEqual(server.status, 0)
            for words in kinds:
                with Server(self.model, *words, "-np", "1", "-c", "1024", "--slot-save-path", place) as server:
                    with self.assertRaises(urllib.error.HTTPError) as raised:
                        server.ask("/slots/0?action=restore", {"filename": "plain" if words else "tiers"})
                    raised.exception.read()
                    self.assertEqual(raised.exception.code, 400)
                    if not words:
                        self.assertIn("the file is of a tiered KV cache, and this context has a plain one", server.text())
                    restored = server.ask("/slots/0?action=restore", {"filename": "tiers" if words else "plain"})
                    self.assertGreater(restored["n_restored"], 100)
                    self.assertLess(server.complete(prompt)["timings"]["prompt_n"], 8)
                self.assertEqual(server.status, 0)

    def test_idle_slots_give_up_the_budget(self):
        """Four slots in one budget, which has room for one of these prompts or two: who asks is answered. A prompt that was given up
        is in the prompt cache."""
        prompts = [piece(i * 1200, 1200) for i in range(5)]
        for words in ([], ["-cram", "0"], ["--kv-unified"]):
            with self.subTest(words), Server(self.model, "--kv", BUDGET % (6 << 20), "-np", "4", "-c", "16384", *words) as server:
                for i, prompt in enumerate(prompts):
                    self.assertEqual(server.complete(prompt, n=8, id_slot=i % 4)["tokens_predicted"], 8)
                again = server.complete(prompts[1], n=8)["timings"]
                self.assertEqual(again["prompt_n"] < 40, words != ["-cram", "0"], again)
                log = server.text()
                self.assertNotIn("Context size has been exceeded", log)
                if words != ["--kv-unified"]:  # a server of these clears idle slots at each task
                    self.assertRegex(log, r"purging slot 1 with \d+ tokens")
                    self.assertRegex(log, r"the budget of the KV cache is full .*; an idle slot was cleared, retrying")
            self.assertEqual(server.status, 0)

    def test_a_full_budget_is_an_error(self):
        with Server(self.model, "--kv", BUDGET % (6 << 20), "-np", "1", "-c", "8192", "-cram", "0") as server:
            short = server.complete(piece(0, 300))["content"]
            with self.assertRaises(urllib.error.HTTPError) as raised:
                server.complete(piece(0, 16000))
            self.assertRegex(json.loads(raised.exception.read())["error"]["message"], r"the budget of the KV cache is full "
                             r"\(--kv: budget.bytes = %d\): no room for 1 tokens of sequence 0: .+" % (6 << 20))
            self.assertEqual(server.complete(piece(0, 300), cache_prompt=False)["content"], short)
        self.assertEqual(server.status, 0)


if __name__ == "__main__":
    results.run()
