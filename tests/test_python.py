#!/usr/bin/env python3
"""examples/python: the package builds, its methods do what the header says, and its cache runs models of transformers.

Needs cffi, numpy and setuptools; for the models torch, transformers, gguf and accelerate, and SmolLM2 in build/models (make model). What is
missing is skipped and counted. TKV_TEST_STRICT=1: then it fails, and the package is built as users build it, from its source archive."""
import ast
import copy
import glob
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest
import warnings
import weakref

sys.dont_write_bytecode = True
os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
import numpy as np  # tests/run.sh skips this file where numpy is missing
import results
from programs import ROOT, STRICT

PACKAGE = os.path.join(ROOT, "examples", "python")
DEMO = os.path.join(ROOT, "examples", "data", "demo_prompt.txt")
built = tempfile.TemporaryDirectory()


def need(*names):
    """Skips a class whose packages are not here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            if STRICT:
                raise RuntimeError("%s is missing" % name)
            raise unittest.SkipTest("%s is missing" % name)


def checkout():
    """Copies what a build needs into a folder, once. Returns the folder of the package."""
    place = os.path.join(built.name, "checkout")
    if not os.path.exists(place):
        shutil.copytree(PACKAGE, os.path.join(place, "examples", "python"),
                        ignore=shutil.ignore_patterns("build", "*.egg-info", "tieredkv.h", "__pycache__"))
        shutil.copy(os.path.join(ROOT, "tieredkv.h"), place)
    return os.path.join(place, "examples", "python")


def run(words, **options):
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise AssertionError("%s\n%s\n%s" % (" ".join(words), done.stdout, done.stderr))
    return done.stdout


def archive():
    """Makes the source archive, once. Returns its path."""
    folder = checkout()
    if not os.path.exists(os.path.join(folder, "dist")):
        run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=folder)
    [path] = glob.glob(os.path.join(folder, "dist", "*.tar.gz"))
    return path


def has_wheels():
    """Whether pip can install without fetching anything: setuptools makes wheels by itself since 70.1."""
    import setuptools
    return importlib.util.find_spec("wheel") is not None or tuple(map(int, setuptools.__version__.split(".")[:2])) >= (70, 1)


def install():
    """Builds and installs the package into a folder, once, and imports it."""
    need("cffi", "numpy", "setuptools")
    target = os.path.join(built.name, "installed")
    if not os.path.exists(target):
        environment, source = dict(os.environ), checkout()
        if STRICT:
            source = archive()
        else:  # half the time of the compiler
            environment["TIEREDKV_CFLAGS"] = "-O1 -g0 -DTKV_NO_AVX512"
        words = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", target, source]
        if not STRICT and not has_wheels():
            words = ["setup.py", "--quiet", "build", "--build-lib", target]
        run([sys.executable, *words], env=environment, cwd=checkout())
        sys.path.insert(0, target)
    return importlib.import_module("tieredkv")


def build_native():
    spec = importlib.util.spec_from_file_location("build_native", os.path.join(PACKAGE, "build_native.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tearDownModule():
    built.cleanup()


class Declarations(unittest.TestCase):
    """What cffi reads is what the header says."""

    def setUp(self):
        self.build = build_native()
        with open(os.path.join(ROOT, "tieredkv.h"), encoding="ascii") as f:
            self.header = f.read()
        self.text = self.build.read_declarations(self.header)

    def test_every_function(self):
        with open(os.path.join(ROOT, "src", "api.h"), encoding="ascii") as f:
            api = f.read()
        declared = re.findall(r"^TKV_API [^;]*?\b(tkv_\w+)\(", api, re.M)
        self.assertGreater(len(declared), 80)
        self.assertEqual(re.findall(r"^extern [^;]*?\b(tkv_\w+)\(", self.text, re.M), declared)

    def test_every_type_and_status(self):
        with open(os.path.join(ROOT, "src", "api.h"), encoding="ascii") as f:
            api = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.S)
        types = re.findall(r"^\} (tkv_\w+);", api, re.M)
        self.assertGreater(len(types), 60)
        self.assertEqual(re.findall(r"^\} (tkv_\w+);", self.text, re.M), types)
        for name, number in re.findall(r"\bX\((TKV_\w+), (-?\d+),", self.header):
            self.assertIn("%s = %s," % (name, number), self.text)

    def test_no_macro_and_no_comment_is_left(self):
        self.assertNotRegex(self.text, r"/\*|\\$|TKV_API|TKV_STATUS_LIST|extern \"C\"")
        self.assertEqual({line.split()[0] for line in re.findall(r"^#.*$", self.text, re.M)}, {"#define"})

    def test_small_header(self):
        header = ("/* ======== api.h ======== */\n#ifndef TIEREDKV_H\n#define TKV_A (-3) /* why */\n#define TKV_S \"text\"\n"
                  "#define TKV_STATUS_LIST(X) \\\n    X(TKV_OK, 0, \"ok\") \\\n    X(TKV_ERR_B, -7, \"b (c), d\")\n"
                  "typedef enum s { TKV_STATUS_LIST(TKV_STATUS_ENUM_) LAST } s;\nextern \"C\" {\n/* one\n * two */\n"
                  "TKV_API int f(int x); /* x */\n}\n#endif /* TIEREDKV_H */\nint g(void) { return 0; }\n")
        self.assertEqual(self.build.read_declarations(header).split("\n"), [
            "#define TKV_A -3", "", "typedef enum s { TKV_OK = 0, TKV_ERR_B = -7, LAST } s;", "extern int f(int x);  ", ""])


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tkv = install()
        cls.place = os.path.dirname(cls.tkv.__file__)

    def test_it_has_the_header_and_types(self):
        with open(os.path.join(self.tkv.get_include(), "tieredkv.h"), "rb") as f, open(os.path.join(ROOT, "tieredkv.h"), "rb") as g:
            self.assertEqual(f.read(), g.read())
        self.assertTrue(os.path.exists(os.path.join(self.place, "py.typed")))
        self.assertEqual(run([sys.executable, "setup.py", "--version"], cwd=checkout()).split()[-1], self.tkv.__version__)
        if has_wheels():
            self.assertTrue(os.path.isdir(os.path.join(built.name, "installed", "tieredkv-%s.dist-info" % self.tkv.__version__)))

    def test_source_archive(self):
        """It has the header, so it builds outside of a checkout."""
        with tarfile.open(archive()) as files:
            names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
        self.assertLessEqual({"setup.py", "pyproject.toml", "build_native.py", "README.md", "tieredkv/tieredkv.h", "tieredkv/py.typed",
                              "tieredkv/transformers.py", "tieredkv/_native.pyi"}, names)

    def test_syntax_is_that_of_python_3_9(self):
        files = glob.glob(os.path.join(PACKAGE, "*.py")) + glob.glob(os.path.join(PACKAGE, "tieredkv", "*.py*"))
        self.assertGreater(len(files), 8)
        for name in files:
            with open(name, encoding="utf-8") as f:
                ast.parse(f.read(), name, feature_version=(3, 9))

    def test_types(self):
        need("mypy")
        words = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", os.path.join(built.name, "mypy"), "tieredkv"]
        self.assertEqual(run(words, cwd=checkout()), "")

    def test_readme_runs(self):
        with open(os.path.join(PACKAGE, "README.md"), encoding="utf-8") as f:
            code = re.findall(r"```python\n(.*?)```", f.read(), re.S)[0]
        self.assertLessEqual(len(code.splitlines()), 22)
        environment = dict(os.environ, PYTHONPATH=os.path.join(built.name, "installed"))
        said = run([sys.executable, "-c", code], env=environment)
        self.assertRegex(said, r"^2000 tokens in \d+ bytes, [2-6]\.\d times less than FP16\n$")


def attend_exactly(q, k, v, see=None, scale=None):
    """Attention in float64. q [n][heads][dim], k and v [length][kv_heads][dim]; see [n][length]; default: causal."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1).astype(float), np.repeat(v, group, 1).astype(float)
    logits = np.einsum("nhd,lhd->hnl", q.astype(float), k) * (scale or q.shape[2] ** -0.5)
    if see is None:
        see = np.tri(len(q), len(k), len(k) - len(q), dtype=bool)
    logits = np.where(see, logits, -np.inf)
    top = logits.max(2, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(2, keepdims=True)
    return np.einsum("hnl,lhd->nhd", weights / total, v), (np.log(total) + top)[:, :, 0].T, (weights / total).sum((0, 1))


class Numpy(unittest.TestCase):
    """Each method of Cache and Config."""

    MODEL = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    EXACT = {"hot": "f32", "hot_tokens": "unlimited"}

    @classmethod
    def setUpClass(cls):
        cls.tkv = install()

    def setUp(self):
        self.random = np.random.default_rng(7)

    def make(self, **keywords):
        cache = self.tkv.Cache(**{**self.MODEL, **keywords})
        self.addCleanup(cache.close)
        return cache

    def tokens(self, n, heads=2, dtype=np.float32):
        return self.random.standard_normal((n, heads, 32)).astype(dtype)

    def fill(self, cache, n, seq=0):
        """Appends n tokens to both layers. Returns k and v of layer 0."""
        all_k, all_v = self.tokens(n), self.tokens(n)
        for layer in range(2):
            for at in range(0, n, 256):
                cache.append(layer, all_k[at:at + 256], all_v[at:at + 256], seq=seq)
        return all_k, all_v

    def refuses(self, kind, sentence, call, *args, **keywords):
        with self.assertRaisesRegex(kind, sentence) as caught:
            call(*args, **keywords)
        self.assertIsInstance(caught.exception, self.tkv.TieredKVError)
        self.assertLess(caught.exception.status, 0)

    def test_every_method_is_tried(self):
        source = inspect.getsource(Numpy)
        for kind in (self.tkv.Cache, self.tkv.Config):
            for name, _ in inspect.getmembers(kind, callable):
                if not name.startswith("_"):
                    self.assertRegex(source, r"[.]%s[(,]" % name)

    def test_attention(self):
        for threads in (1, 3):
            cache = self.make(threads=threads, **self.EXACT)
            k, v = self.fill(cache, 300)
            q = self.tokens(5, 4)
            out, lse, scores = attend_exactly(q, k, v)
            self.assertLess(np.abs(cache.attend(0, q) - out).max(), 1e-5)
            full = cache.attend_full(0, q, lse=True, scores=True)
            self.assertLess(np.abs(full.lse - lse).max(), 1e-4)
            self.assertLess(np.abs(full.scores[0] - scores).max(), 1e-3)
            self.assertIsNone(cache.attend_full(0, q).lse)
            np.testing.assert_array_equal(full.out, cache.attend(0, q))

    def test_options_of_attention(self):
        cache = self.make(**self.EXACT)
        k, v = self.fill(cache, 100)
        q = self.tokens(3, 4)
        mask = self.random.random((3, 100)) < 0.5
        mask[:, 0] = True
        causal = np.tri(3, 100, 97, dtype=bool)
        near = np.arange(100)[None] > np.arange(97, 100)[:, None] - 10
        checks = [({"mask": mask}, {"see": mask & causal}),
                  ({"mask": np.where(mask, 0, -np.inf).astype(np.float16)}, {"see": mask & causal}),
                  ({"window": 10}, {"see": near & causal}), ({"scale": 0.5}, {"scale": 0.5}),
                  ({"causal": False}, {"see": np.ones((3, 100), bool)}),
                  ({"row_ends": [100, 100, 100]}, {"see": np.ones((3, 100), bool)}),
                  ({"first_queries": [20]}, {"see": np.tri(3, 100, 20, dtype=bool)}),
                  ({"positions": [50, 99, 7]}, {"see": np.arange(100)[None] <= np.array([50, 99, 7])[:, None]})]
        for options, expected in checks:
            with self.subTest(options=list(options)):
                self.assertLess(np.abs(cache.attend(0, q, **options) - attend_exactly(q, k, v, **expected)[0]).max(), 1e-5)
        plain = cache.attend(0, q)
        for options in ({"softcap": 1.0}, {"alibi_slopes": [0.1] * 4}, {"sink_logits": np.zeros(4)}):
            self.assertGreater(np.abs(cache.attend(0, q, **options) - plain).max(), 1e-4)

    def test_half_floats_and_strides(self):
        cache = self.make(**self.EXACT)
        k, v = self.tokens(64, dtype=np.float16), self.tokens(64, dtype=np.float16)
        cache.append(0, k, v)
        q = self.tokens(2, 4, np.float16)
        out = cache.attend(0, q)
        self.assertEqual(out.dtype, np.float16)
        self.assertLess(np.abs(out - attend_exactly(q, k, v)[0]).max(), 2e-3)
        wide = np.zeros((64, 2, 64), np.float32)
        wide[:, :, ::2] = k
        cache.append(1, wide[:, :, ::2], np.asfortranarray(v))
        np.testing.assert_array_equal(cache.read(1)[0], k)
        cache.reset()
        cache.append(0, k[::-1], v[::-1, ::-1, ::-1])
        np.testing.assert_array_equal(cache.read(0)[1], v[::-1, ::-1, ::-1])

    def test_batches(self):
        cache = self.make(max_seqs=3, **self.EXACT)
        k, v = self.tokens(10), self.tokens(10)
        cache.append(0, k, v, batch=[(0, 4), (2, 6)])
        self.assertEqual([cache.length(seq, 0) for seq in range(3)], [4, 0, 6])
        q = self.tokens(5, 4)
        out = cache.attend(0, q, batch=[(0, 2), (2, 3)])
        self.assertLess(np.abs(out[:2] - attend_exactly(q[:2], k[:4], v[:4])[0]).max(), 1e-5)
        self.assertLess(np.abs(out[2:] - attend_exactly(q[2:], k[4:], v[4:])[0]).max(), 1e-5)
        self.assertEqual(cache.attend_full(0, q, batch=[(0, 2), (2, 3)], scores=True).scores.shape, (2, 6))
        cache.append(0, k, v, batch=[(0, 2), (1, 3)], first_rows=[5, 0], positions=[4, 0])
        np.testing.assert_array_equal(cache.read(0, 4, seq=0)[0], k[5:7])
        self.refuses(ValueError, "rows up to 11, and the array has 10", cache.append, 0, k, v, batch=[(0, 5), (1, 6)])
        self.refuses(ValueError, "rows up to 11, and the array has 10", cache.append, 0, k, v, batch=[(0, 5)], first_rows=[6])
        self.refuses(ValueError, "entry 0 of the batch has -1 rows from row 0 on", cache.append, 0, k, v, batch=[(0, -1)])
        self.refuses(ValueError, "entry 0 of the batch has 2 rows from row -1 on", cache.append, 0, k, v, batch=[(0, 2)], first_rows=[-1])
        self.refuses(ValueError, "rows up to 11, and the array has 10", cache.append, 0, k, v, first_rows=[1])
        mask = np.zeros((2, 5), bool)
        self.refuses(ValueError, r"mask has shape \(2, 5\), and must have \(2, 6 or more\)", cache.attend, 0, q[:2], mask=mask,
                     batch=zip((1, 2), (1, 1)))
        empty = cache.attend_full(0, q[:0], lse=True, scores=True)
        self.assertEqual((empty.out.shape, empty.lse.shape, empty.scores.shape), ((0, 4, 32), (0, 4), (1, 6)))
        cache.append(0, k[:0], v[:0])
        self.assertEqual(cache.length(0, 0), 6)
        self.refuses(self.tkv.RangeError, "position", cache.append, 0, k, v, positions=[3])

    def test_read(self):
        cache = self.make(**self.EXACT)
        k, v = self.fill(cache, 100)
        for got, want in zip(cache.read(0), (k, v)):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(cache.read(0, 10, 5)[1], v[10:15])
        np.testing.assert_array_equal(cache.read(0, indices=[7, 3, 7])[0], k[[7, 3, 7]])
        self.assertEqual(cache.read(0, indices=[])[0].shape, (0, 2, 32))
        self.refuses(IndexError, "not in the cache", cache.read, 0, 90, 11)
        self.refuses(ValueError, "n is -1", cache.read, 0, 0, -1)

    def test_sequences(self):
        cache = self.make(max_seqs=3, rope={"dim": 32}, evict={"policy": "sliding", "keep_tokens": 4096})
        k, v = self.fill(cache, 500)
        cache.fork(0, 1)
        cache.fork(0, 2, 100)
        self.assertEqual([cache.length(seq) for seq in range(3)], [500, 500, 100])
        self.assertGreater(cache.sequence_memory(1).shared, 0)
        cache.truncate(1, 450)
        self.assertEqual(cache.length(1), 450)
        cache.remove(1, 10, 20)
        self.assertEqual(cache.tiers(0, 8, 4, seq=1), ["warm", "warm", "gone", "gone"])
        cache.remove(1, 440)
        self.assertEqual(cache.length(1), 440)
        cache.shift(1, 20, None, -10)
        self.assertEqual(cache.positions(0, 18, 4, seq=1)[2:].tolist(), [10, 11])
        cache.reset(2)
        self.assertEqual(cache.length(2), 0)
        cache.copy(0, 64, 128, 2, 0)
        self.assertEqual((cache.length(2), cache.positions(0, seq=2).tolist()), (64, list(range(64))))
        self.fill(cache, 8, seq=2)
        cache.keep(2, 64, [65, 70])
        self.assertEqual(cache.length(2), 66)
        cache.pin(0, 0, 10)
        cache.set_sinks(0, 495, 2)
        cache.set_sinks(0, 495, 2, on=False)
        self.assertEqual(cache.slide(2, 4), 0)
        cache.check()
        self.refuses(ValueError, "no sequence 3", cache.fork, 0, 3)
        self.refuses(ValueError, "", cache.fork, 0, 0)
        self.refuses(ValueError, "n_tokens is -1", cache.truncate, 0, -1)
        self.refuses(self.tkv.StateError, "", cache.keep, 0, 100, [101])

    def test_steps_and_work(self):
        cache = self.make()
        k, v = self.tokens(8), self.tokens(8)
        with cache.step():
            for layer in range(2):
                cache.append(layer, k, v)
        with self.assertRaises(ZeroDivisionError):
            with cache.step():
                cache.append(0, k, v)
                raise ZeroDivisionError
        self.assertEqual((cache.length(0, 0), cache.length(0, 1)), (8, 8))
        with self.assertRaises(self.tkv.StateError):  # layers of other lengths
            with cache.step():
                cache.append(0, k, v)
        self.assertEqual(cache.length(0, 0), 8)
        cache.reserve(0, 64)
        cache.flush()
        self.fill(cache, 600)
        cache.flush(0, "all")
        self.assertGreater(cache.layer(0).warm_tokens, 0)
        self.assertGreaterEqual(cache.maintain(4), 0)
        self.refuses(ValueError, "mode is 'some', and must be one of due, full, all", cache.flush, 0, "some")

    def test_save_and_load(self):
        cache = self.make(max_seqs=2)
        self.fill(cache, 700)
        q = self.tokens(1, 4)
        data = cache.save(0, model=b"m", tokens=range(700))
        loaded = cache.load(data, 1, model=b"m")
        self.assertEqual((loaded.n_tokens, loaded.tokens.tolist()), (700, list(range(700))))
        np.testing.assert_array_equal(cache.attend(0, q, seq=0), cache.attend(0, q, seq=1))
        self.refuses(self.tkv.StateError, "", cache.load, data, 1, model=b"m")
        cache.reset(1)
        self.refuses(self.tkv.ConfigError, "another model", cache.load, data, 1, model=b"n")
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 1
        self.refuses(self.tkv.DataError, "", cache.load, bytes(damaged), 1, model=b"m")
        self.refuses(self.tkv.DataError, "", cache.load, data[:100], 1, model=b"m")
        self.refuses(self.tkv.CapacityError, "", cache.load, data, 1, model=b"m", max_tokens=10)
        self.assertEqual(cache.length(1), 0)
        other = self.make(max_seqs=2)
        other.load(cache.save(None), None)
        for twin in (other, copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            np.testing.assert_array_equal(twin.attend(0, q), cache.attend(0, q))
        third = self.make()
        third.load_calibration(cache.save_calibration())
        third.freeze_calibration()
        self.refuses(self.tkv.DataError, "", third.load_calibration, b"nothing")

    def test_prefixes(self):
        cache = self.make(max_seqs=2)
        prompt = self.random.integers(0, 1000, 1300)
        self.fill(cache, 400)
        cache.freeze_calibration()  # pages are found with the tables that coded them
        cache.reset()
        self.fill(cache, 1300)
        published = cache.publish_prefix(prompt, 0, model=b"m")
        self.assertEqual(cache.adopt_prefix(prompt + 1, 1, model=b"m").n_tokens, 0)
        found = cache.adopt_prefix(prompt, 1, model=b"m")
        self.assertEqual((found.n_tokens, cache.length(1)), (published.n_tokens, published.n_tokens))
        self.assertGreaterEqual(found.n_pages, 1)

    def test_reports(self):
        cache = self.make(budget={"bytes": "4M"}, meter={"heads": 2})
        self.fill(cache, 2000)
        for _ in range(40):
            self.fill(cache, 1)
            cache.attend(0, self.tokens(1, 4))
        memory, budget, quality, layer = cache.memory(), cache.budget(), cache.quality(), cache.layer(0)
        tiers = [x for tier in (memory.hot, memory.warm, memory.archive) for x in (tier.codes, tier.metadata)]
        self.assertEqual(memory.total, sum(tiers) + memory.tables + memory.index + memory.scratch + memory.exact_copies
                         + memory.states + memory.slack)
        self.assertEqual(memory.hot.tokens + memory.warm.tokens + memory.archive.tokens, 2 * 2040)
        self.assertLessEqual(memory.total, budget.budget)
        self.assertEqual(budget.budget, 4 << 20)
        self.assertEqual((quality.heads, layer.length, layer.n_kv_heads), (2, 2040, 2))
        self.assertEqual(json.loads(cache.report())["config"]["model.n_layers"], 2)
        self.assertIn('shard="a"', cache.report("prometheus", "shard=a"))
        cache.set_budget(3 << 20)
        self.assertEqual(cache.budget().budget, 3 << 20)
        self.refuses(self.tkv.BudgetError, "", cache.set_budget, 1000)
        self.refuses(ValueError, "n_bytes is -1", cache.set_budget, -1)
        self.refuses(ValueError, "n_bytes is '3M', and must be a whole number", cache.set_budget, "3M")
        self.refuses(ValueError, "", cache.report, "xml")
        self.refuses(ValueError, "", cache.report, "prometheus", "part=a")
        self.refuses(ValueError, "no layer 2 with a cache", cache.layer, 2)

    def test_wrong_arrays(self):
        cache = self.make()
        k, v, q = self.tokens(4), self.tokens(4), self.tokens(4, 4)
        for bad, sentence in ((k[:, :1], r"k has shape \(4, 1, 32\), and layer 0 takes \(n, 2, 32\)"),
                              (k[0], r"k has shape \(2, 32\)"), (k.astype(np.float64), "k has dtype float64"),
                              (k.astype(np.int32), "k has dtype int32"), (k.tolist(), "k is a list"),
                              (k.astype(k.dtype.newbyteorder()), "k has dtype [<>]f4"), (None, "k is a NoneType")):
            self.refuses(ValueError, sentence, cache.append, 0, bad, v)
        self.refuses(ValueError, "k has 4 tokens, and v has 3", cache.append, 0, k, v[:3])
        self.refuses(ValueError, "v is missing", cache.append, 0, k)
        self.refuses(ValueError, "no layer 7", cache.append, 7, k, v)
        self.refuses(ValueError, "layer is 'x', and must be a whole number", cache.append, "x", k, v)
        self.refuses(ValueError, "seq is 1099511627776, and must be from -2147483648 to 2147483647", cache.append, 0, k, v, seq=1 << 40)
        self.refuses(ValueError, "no sequence 1", cache.append, 0, k, v, seq=1)
        self.refuses(self.tkv.NonFiniteError, "NaN", cache.append, 0, k * np.nan, v)
        self.refuses(self.tkv.CapacityError, "max_append", cache.append, 0, self.tokens(513), self.tokens(513))
        self.refuses(ValueError, "token_positions has 2 entries, and must have 4", cache.append, 0, k, v, token_positions=[1, 2])
        self.refuses(ValueError, "token_positions has shape", cache.append, 0, k, v, token_positions=[0.5] * 4)
        self.assertEqual(cache.length(), 0)
        cache.append(0, k, v, token_positions=[0, 1, 2, 9])
        self.refuses(ValueError, r"q has shape \(4, 2, 32\)", cache.attend, 0, k)
        self.refuses(IndexError, "more queries than tokens: append to sequence 0 first", cache.attend, 0, self.tokens(5, 4))
        self.refuses(ValueError, r"mask has shape \(4, 3\), and must have \(4, 4 or more\)", cache.attend, 0, q,
                     mask=np.zeros((4, 3), np.float32))
        self.refuses(ValueError, "mask has dtype int64", cache.attend, 0, q, mask=np.zeros((4, 4), np.int64))
        self.refuses(ValueError, "alibi_slopes has shape", cache.attend, 0, q, alibi_slopes=[1.0])
        self.refuses(ValueError, "", cache.attend, 0, q, window=-7)
        self.refuses(ValueError, "softcap is negative or not finite", cache.attend, 0, q, softcap=-1.0)
        cache.check()

    def test_a_mask_for_each_head(self):
        cache = self.make(**self.EXACT)
        self.fill(cache, 20)
        q, mask = self.tokens(3, 4), self.random.standard_normal((4, 3, 20)).astype(np.float32)
        out = cache.attend(0, q, mask=mask)
        for head in range(4):
            np.testing.assert_array_equal(out[:, head], cache.attend(0, q, mask=mask[head])[:, head])
        np.testing.assert_array_equal(cache.attend(0, q, mask=mask[0]), cache.attend(0, q, mask=np.stack([mask[0]] * 4)))
        self.refuses(ValueError, r"mask has shape \(3, 3, 20\)", cache.attend, 0, q, mask=mask[:3])

    def test_reorder(self):
        cache = self.make(max_seqs=4, **self.EXACT)
        keys = [self.fill(cache, n, seq)[0] for seq, n in enumerate((5, 9, 70, 3))]
        cache.reorder([1, 0])
        cache.reorder(np.array([2, 2, 0]), first=1)
        for seq, (source, n) in enumerate(((1, 9), (3, 3), (3, 3), (0, 5))):
            self.assertEqual(cache.length(seq), n)
            np.testing.assert_array_equal(cache.read(0, seq=seq)[0], keys[source])
        self.refuses(ValueError, "sources has 4; it must be 0 to n - 1", cache.reorder, [0, 4])
        self.refuses(ValueError, "there are fewer sequences", cache.reorder, [0] * 5)
        self.refuses(ValueError, "list of whole numbers", cache.reorder, [0.5])
        cache.check()

    def test_closed(self):
        with self.tkv.Cache(**self.MODEL) as cache:
            self.assertNotEqual(cache.handle, self.tkv.ffi.NULL)
        cache.close()
        self.refuses(self.tkv.StateError, "the cache is closed", cache.length)
        self.refuses(self.tkv.StateError, "the cache is closed", cache.append, 0, self.tokens(1), self.tokens(1))
        self.refuses(ValueError, "threads is 'a'", self.tkv.Cache, threads="a", **self.MODEL)

    def test_threads_wait_for_each_other(self):
        cache = self.make(max_seqs=4, threads=2)
        failed = []

        def work(seq):
            try:
                random = np.random.default_rng(seq)
                for _ in range(30):
                    k = random.standard_normal((8, 2, 32)).astype(np.float32)
                    cache.append(0, k, k, seq=seq)
                    cache.attend(0, np.repeat(k, 2, 1), seq=seq)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seq,)) for seq in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        self.assertEqual([cache.length(seq, 0) for seq in range(4)], [240] * 4)
        cache.check()

    def test_threads_that_change_the_cache_of_another(self):
        """Lengths change between calls, and the cache is closed: calls answer or raise, and write nowhere else."""
        cache, failed = self.make(threads=2), []
        k, q, mask = self.tokens(64), self.tokens(4, 4), np.ones((4, 4000), bool)
        cache.append(0, k, k)

        def repeat(call):
            try:
                while True:
                    call()
            except Exception as error:
                failed.append(str(error))

        def grow():
            cache.append(0, k, k)
            if cache.length(0, 0) > 3000:
                cache.truncate(0, 64)

        calls = (grow, lambda: cache.attend_full(0, q, scores=True, mask=mask), lambda: cache.attend(0, q, batch=[(0, 4)]))
        threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        cache.close()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, ["the cache is closed"] * 3)

    def test_merge(self):
        cache = self.make(max_seqs=2, **self.EXACT)
        k, v, q = self.tokens(90), self.tokens(90), self.tokens(1, 4)
        cache.append(0, k[:50], v[:50])
        cache.append(0, k[50:], v[50:], seq=1)
        (a, la, _), (b, lb, _) = (cache.attend_full(0, q, seq=seq, lse=True) for seq in range(2))
        out, lse = self.tkv.merge_attention(a, la, b, lb)
        want, want_lse, _ = attend_exactly(q, k, v)
        self.assertLess(max(np.abs(out - want).max(), np.abs(lse - want_lse).max()), 1e-5)
        self.refuses(ValueError, "shapes differ", self.tkv.merge_attention, a, la, b[:0], lb)
        self.refuses(ValueError, "float32", self.tkv.merge_attention, a.astype(float), la, b, lb)

    def test_configs(self):
        Config = self.tkv.Config
        config = Config(**self.MODEL, max_seqs=2, preset="compact", tiers={"sink_tokens": 8}, archive="a30/r20",
                        layers={"0": {"window": 256}}, budget={"bytes": "8M"}, meter={"heads": 1})
        lines = config.to_text()
        for line in ("model.n_layers = 2", "tiers.sink_tokens = 8", "tiers.archive = a30/r20", "layers[0].window = 256",
                     "budget.bytes = 8388608", "meter.heads = 1"):
            self.assertIn(line + "\n", lines)
        for style in ("lines", "json", "toml", "nested"):
            self.assertEqual(Config.from_text(config.to_text(style)).to_text(), lines)
        self.assertEqual(pickle.loads(pickle.dumps(config)).to_text(), lines)
        self.assertGreater(config.estimate_context(2), 1000)
        memory = Config(**self.MODEL).estimate_memory(4000)
        self.assertEqual(memory.hot.tokens + memory.warm.tokens + memory.archive.tokens, 8000)
        with self.tkv.Cache(Config.from_text("model.n_layers = 1\nmodel.n_heads = 2\nmodel.head_dim = 16\n")) as cache:
            self.assertEqual(cache.layer(0).head_dim, 16)
        bad = self.tkv.ConfigError
        self.refuses(bad, "model.n_heads is 0", Config, n_layers=2)
        self.refuses(bad, "tiers.hot_tokenz is no key; the nearest one is tiers.hot_tokens", Config, **self.MODEL, tiers={"hot_tokenz": 1})
        self.refuses(bad, "model is 3, and must be a mapping", Config, model=3, n_layers=2)
        self.refuses(bad, "model.n_layers is many", Config, n_layers="many")
        self.refuses(bad, "has no text", Config, n_layers=object())
        self.refuses(bad, "line 2", Config.from_text, "model.n_layers = 1\nmodel.heads = 2\n")
        self.refuses(bad, "preset", Config, **self.MODEL, preset="no such")
        self.refuses(ValueError, "style is 'xml'", config.to_text, "xml")
        self.refuses(ValueError, "both are given", self.tkv.Cache, config, n_layers=2)
        self.refuses(ValueError, "", config.estimate_memory, -1)
        self.refuses(ValueError, "", Config(**self.MODEL).estimate_context)
        self.refuses(self.tkv.BudgetError, "", self.tkv.Cache, **self.MODEL, budget={"bytes": 1000})
        self.refuses(self.tkv.InstructionSetError, "", self.tkv.Cache, **self.MODEL, host={"isa": "neon"})


class Transformers(unittest.TestCase):
    """Small random models. The reference is eager attention with the cache of transformers, and everything is F32."""

    EXACT = {"hot": "f32", "hot_tokens": "unlimited"}

    @classmethod
    def setUpClass(cls):
        install()
        need("torch", "transformers")
        global torch, transformers, tieredkv, tiered
        import tieredkv
        import torch
        import transformers
        import tieredkv.transformers as tiered
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="attention is '")
        transformers.logging.set_verbosity_error()

    def setUp(self):
        torch.manual_seed(3)
        torch.set_num_threads(1)

    def model(self, kind="Llama", **options):
        config = getattr(transformers, kind + ("TextConfig" if kind in ("Gemma3n", "Gemma4") else "Config"))(**{
            "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": None, **options})
        return getattr(transformers, kind + "ForCausalLM")(config).eval()

    def cache(self, model, **keywords):
        return tiered.TieredCache(model.config, **{**self.EXACT, **keywords})

    def forward(self, model, how, ids, cache=None, **inputs):
        model.set_attn_implementation(how)
        with torch.no_grad():
            return model(ids, cache=cache, use_cache=cache is not None, **inputs).logits

    def generate(self, model, how, ids, cache=None, n=24, **options):
        model.set_attn_implementation(how)
        return model.generate(ids, cache=cache, max_new_tokens=n, do_sample=False, **options).tolist()

    def padded(self):
        """Three rows of 60 tokens: padding on the left of two. Returns ids and the inputs for their positions."""
        mask = torch.ones(3, 60, dtype=torch.long)
        mask[0, :33] = 0
        mask[1, :5] = 0
        ids = torch.randint(2, 200, (3, 60)) * mask
        return ids, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def near(self, a, b, shown=None, limit=1e-4):
        difference = (a - b).abs()
        if shown is not None:
            difference = difference * shown[..., None]
        self.assertLess(float(difference.max()), limit)

    def test_logits(self):
        model, ids = self.model(), torch.randint(2, 200, (1, 1200))  # three appends of at most 512 tokens
        exact = self.forward(model, "eager", ids)
        cache = self.cache(model)
        self.near(exact, self.forward(model, "tieredkv", ids, cache))
        self.assertEqual((cache.get_seq_length(), cache.tiered.length(), cache.batch_size), (1200, 1200, 1))
        parts, cache = [], self.cache(model, threads=2)
        for at, end in ((0, 700), (700, 701), (701, 702), (702, 1200)):
            parts.append(self.forward(model, "tieredkv", ids[:, at:end], cache))
        self.near(exact, torch.cat(parts, 1))
        self.near(exact, self.forward(model, "tieredkv", ids))  # without a cache

    def test_greedy_text(self):
        model, ids = self.model(), torch.randint(2, 200, (2, 30))
        want = self.generate(model, "eager", ids, n=100)
        cache = self.cache(model)
        self.assertEqual(self.generate(model, "tieredkv", ids, cache, n=100), want)
        self.assertEqual(cache.tiered.length(0), 129)
        cache.reset()
        self.assertEqual(self.generate(model, "tieredkv", ids[:1], cache, n=100), want[:1])
        self.assertEqual(self.generate(model, "tieredkv", ids, n=100), want)  # the cache of transformers
        with self.assertWarnsRegex(UserWarning, "attention is 'eager', so each step decodes all keys and values"):
            self.assertEqual(self.generate(model, "eager", ids, self.cache(model), n=100), want)  # its attention
        cache = tiered.TieredCache(model, **self.EXACT)  # changes the attention function of the model
        alive = weakref.ref(cache)
        text = model.generate(ids, past_key_values=cache, max_new_tokens=100, do_sample=False)  # the name until transformers 6
        self.assertEqual((text.tolist(), cache.tiered.length(0)), (want, 129))
        del cache
        self.assertIsNone(alive())

    def test_conversation(self):
        """generate goes on in a cache that has the text so far."""
        model, more = self.model(), torch.randint(2, 200, (3, 9))
        ids, inputs = self.padded()
        texts = []
        for how, cache in (("eager", transformers.DynamicCache(config=model.config)), ("tieredkv", self.cache(model))):
            first = self.generate(model, how, ids, cache, attention_mask=inputs["attention_mask"])
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 33), value=1)
            texts.append(self.generate(model, how, torch.cat([torch.tensor(first), more], 1), cache, attention_mask=mask))
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(cache.get_seq_length(), 60 + 24 + 9 + 24 - 1)

    def test_samples(self):
        model, ids, texts = self.model(), torch.randint(2, 200, (2, 30)), []
        for how in ("eager", "tieredkv"):
            torch.manual_seed(5)
            model.set_attn_implementation(how)
            texts.append(model.generate(ids, cache=self.cache(model) if how == "tieredkv" else None, max_new_tokens=20, do_sample=True,
                                        num_return_sequences=4).tolist())
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(len({tuple(text) for text in texts[0]}), 8)

    def test_assistants(self):
        """Drafts that are not taken are cut, behind windows too."""
        ids = torch.randint(2, 200, (1, 20)).repeat(1, 2)
        for model in (self.model(), self.model("Mistral", sliding_window=24)):
            assistant = copy.deepcopy(model)
            with torch.no_grad():
                assistant.model.layers[1].mlp.down_proj.weight.add_(torch.randn(64, 128), alpha=0.05)
            want = self.generate(model, "eager", ids, n=150)
            for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 5}):
                cache = self.cache(model)
                self.assertEqual(self.generate(model, "tieredkv", ids, cache, n=150, **options), want)
                cache.tiered.check()

    def test_left_padding(self):
        model = self.model()
        ids, inputs = self.padded()
        cache = self.cache(model)
        self.near(self.forward(model, "eager", ids, **inputs), self.forward(model, "tieredkv", ids, cache, **inputs),
                  inputs["attention_mask"])
        self.assertEqual([cache.tiered.length(seq) for seq in cache.rows], [27, 55, 60])  # padding is not stored
        mask = {"attention_mask": inputs["attention_mask"]}
        want = self.generate(model, "eager", ids, **mask)
        self.assertEqual(self.generate(model, "tieredkv", ids, self.cache(model), **mask), want)
        self.assertEqual(self.generate(model, "tieredkv", ids, self.cache(model, max_append=16), **mask), want)
        self.assertEqual(self.generate(model, "tieredkv", ids, self.cache(model), prefill_chunk_size=20, **mask), want)

    def test_masks(self):
        model, ids = self.model(), torch.randint(2, 200, (2, 50))
        holes = torch.ones(2, 50, dtype=torch.long)
        holes[0, 10:20] = 0
        holes[1, 45:] = 0  # right padding
        holes[1, :3] = 0
        inputs = {"attention_mask": holes}
        self.near(self.forward(model, "eager", ids, **inputs), self.forward(model, "tieredkv", ids, self.cache(model), **inputs), holes)
        self.near(self.forward(model, "eager", ids, **inputs), self.forward(model, "tieredkv", ids, **inputs), holes)
        blocks = torch.ones(50, 50, dtype=torch.bool).tril()
        blocks[:20, :20] = True  # a prefix sees all of itself
        blocks[30:, 5:9] = False
        added = torch.where(blocks, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, 50, 50)
        exact = self.forward(model, "eager", ids, attention_mask=added)
        for mask in (added, blocks[None, None]):
            for most in (0, 16):
                self.near(exact, self.forward(model, "tieredkv", ids, self.cache(model, limits={"max_append": most}),
                                              attention_mask=mask))
        with self.assertRaisesRegex(Exception, "a mask of shape"):
            self.forward(model, "tieredkv", ids, self.cache(model), attention_mask=added.expand(2, 4, 50, 50))

    def test_static_caches(self):
        """transformers' own caches with room behind the tokens: the mask says where the queries are."""
        ids, mask = torch.randint(2, 200, (2, 40)), torch.ones(2, 40, dtype=torch.long)
        mask[0, :9] = 0
        for model in (self.model(), self.model("Mistral", sliding_window=16)):
            for options in ({}, {"attention_mask": mask}):
                want = self.generate(model, "eager", ids, **options)
                self.assertEqual(self.generate(model, "tieredkv", ids, cache_implementation="static", **options), want)

    def test_crop(self):
        model = self.model()
        ids, inputs = self.padded()
        cache = self.cache(model)
        first = self.forward(model, "tieredkv", ids, cache, **inputs)
        cache.crop(-20)
        self.assertEqual((cache.get_seq_length(), [cache.tiered.length(seq) for seq in cache.rows]), (40, [7, 35, 40]))
        again = self.forward(model, "tieredkv", ids[:, 40:], cache, attention_mask=inputs["attention_mask"],
                             position_ids=inputs["position_ids"][:, 40:])
        self.near(first[:, 40:], again)
        cache.crop(-50)
        self.assertEqual([cache.tiered.length(seq) for seq in cache.rows], [0, 5, 10])
        again = self.forward(model, "tieredkv", ids[:, 10:], cache, attention_mask=inputs["attention_mask"],
                             position_ids=inputs["position_ids"][:, 10:])
        self.near(first[:, 10:], again, inputs["attention_mask"][:, 10:])
        with self.assertRaisesRegex(ValueError, "tokens_to_remove is 3"):
            cache.crop(3)

    def prompt_bits(self, cache, n):
        """The tiers, keys and values of the first n tokens of each row."""
        found = []
        for row, seq in enumerate(cache.rows):
            for layer in range(3):
                held = n - cache.pads[row]
                found.append(cache.tiered.tiers(layer, 0, held, seq=seq))
                found += [side.tobytes() for side in cache.tiered.read(layer, 0, held, seq=seq)]
        return found

    def test_a_reply_that_is_taken_back(self):
        """A reply makes its prompt coarser. Where it is cropped, the prompt is as it was, and so is the next reply."""
        model = self.model()
        ids = torch.randint(2, 200, (3, 300))
        mask = torch.ones(3, 300, dtype=torch.long)
        mask[0, :40] = 0
        plan = {"preset": "compact", "tiers": {"hot_tokens": 64, "warm_tokens": 64}, "warm": "kivi4", "archive": "kivi2"}  # no tables

        def reply(cache, n):
            """Reads the last token of the prompt, and n more. Returns the logits."""
            out = []
            seen = torch.cat([mask, torch.ones(3, n + 1, dtype=torch.long)], 1)
            for i in range(n + 1):
                at = 299 + i
                token = ids[:, 299:] if i == 0 else more[:, i - 1:i]
                out.append(self.forward(model, "tieredkv", token, cache, attention_mask=seen[:, :at + 1],
                                        position_ids=(seen[:, :at + 1].cumsum(1) - 1)[:, at:]))
            return torch.cat(out, 1)
        more = torch.randint(2, 200, (3, 400))
        cache = tiered.TieredCache(model.config, **plan)
        inputs = {"attention_mask": mask[:, :299], "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, :299]}
        self.forward(model, "tieredkv", ids[:, :299], cache, **inputs)
        before, held = self.prompt_bits(cache, 299), cache.tiered.memory().total
        first = reply(cache, 400)
        self.assertNotEqual(self.prompt_bits(cache, 299), before)  # the reply has made it coarser
        other = copy.deepcopy(cache)
        for _ in range(2):  # and again
            cache.crop(-401)
            self.assertEqual((cache.get_seq_length(), cache.pads), (299, [40, 0, 0]))
            self.assertEqual(self.prompt_bits(cache, 299), before)
            self.assertTrue(torch.equal(reply(cache, 400), first))
        other.crop(-401)
        self.assertEqual(self.prompt_bits(other, 299), before)
        # rows that were chosen keep their marks, and a cut before the end of the prompt loses as little
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        cache.crop(-411)
        want = [before[9 * (1 - row % 2) + i] for row in range(3) for i in range(9)]
        got = self.prompt_bits(cache, 289)
        for a, b, pad in zip(got, want, [p for p in cache.pads for _ in range(9)]):
            self.assertEqual(a, b[:289 - pad] if isinstance(a, list) else b[:len(a)])
        cache.tiered.check()
        # a mark costs the tail that the reply makes coarser, and goes with the cache's tokens
        alone = tiered.TieredCache(model.config, **plan)
        self.forward(model, "tieredkv", ids[:, :299], alone, **inputs)
        reply(alone, 400)
        with_marks = alone.tiered.memory().total
        marks = [alone.tiered.sequence_memory(seq).own for seq in alone.marks]
        self.assertEqual(len(marks), 3)
        self.assertLess(sum(marks), held)
        alone._unmark()
        self.assertLess(alone.tiered.memory().total, with_marks)
        alone.crop(-401)
        self.assertNotEqual(self.prompt_bits(alone, 299), before)  # without marks it has stayed coarser
        alone.reset()
        self.assertEqual(alone.marks, [])

    def test_marks_under_a_budget(self):
        """A budget that is short of memory has no marks."""
        model, ids = self.model(), torch.randint(2, 200, (1, 600))
        for most, n_marks in (("64M", 1), ("450K", 0)):
            cache = tiered.TieredCache(model.config, preset="balanced", budget={"bytes": most})
            self.forward(model, "tieredkv", ids[:, :500], cache)
            for i in range(500, 600):
                self.forward(model, "tieredkv", ids[:, i:i + 1], cache)
            budget = cache.tiered.budget()
            self.assertEqual((len(cache.marks), budget.used > 0.75 * budget.budget), (n_marks, not n_marks), budget)
            cache.crop(-150)
            self.assertEqual(cache.get_seq_length(), 450)
            self.forward(model, "tieredkv", ids[:, 450:], cache)
            self.assertEqual(cache.get_seq_length(), 600)
            cache.tiered.check()

    def test_rows(self):
        """Rows are chosen, repeated and reordered by forks."""
        model = self.model()
        ids, inputs = self.padded()
        more = torch.randint(2, 200, (6, 5))

        def after(cache, rows):
            mask = torch.cat([inputs["attention_mask"][rows], torch.ones(len(rows), 5, dtype=torch.long)], 1)
            want = self.forward(model, "eager", torch.cat([ids[rows], more[:len(rows)]], 1), attention_mask=mask,
                                position_ids=(mask.cumsum(1) - 1).clamp(min=0))[:, 60:]
            got = self.forward(model, "tieredkv", more[:len(rows)], cache, attention_mask=mask,
                               position_ids=(mask.cumsum(1) - 1)[:, 60:])
            self.near(want, got)
            cache.tiered.check()

        def fresh(**keywords):
            cache = self.cache(model, **keywords)
            self.forward(model, "tieredkv", ids, cache, **inputs)
            return cache

        for rows in ([2, 0, 1], [1, 1, 1], [2, 2, 0], [0, 1, 2]):
            cache = fresh(max_seqs=3)
            cache.reorder_cache(torch.tensor(rows))
            after(cache, rows)
        cache = fresh()
        cache.batch_repeat_interleave(2)
        self.assertGreater(cache.tiered.sequence_memory(cache.rows[1]).shared, 0)
        after(cache, [0, 0, 1, 1, 2, 2])
        cache = fresh()
        cache.batch_select_indices(torch.tensor([2, 0]))
        after(cache, [2, 0])
        cache = fresh()
        cache.batch_select_indices(torch.tensor([False, True, False]))
        after(cache, [1])
        cache = fresh()
        twin = copy.deepcopy(cache)
        after(cache, [0, 1, 2])
        after(twin, [0, 1, 2])
        cache = fresh(max_seqs=4)
        with self.assertRaisesRegex(Exception, "the batch has 6 rows, and max_seqs is 4"):
            cache.batch_repeat_interleave(2)
        with self.assertRaisesRegex(ValueError, r"rows \[0, 3\] are chosen, and the cache has 3"):
            cache.reorder_cache(torch.tensor([0, 3]))
        with self.assertRaisesRegex(ValueError, "the batch has 1 rows, and the cache has 3"):
            self.forward(model, "tieredkv", ids[:1], cache)

    def test_beams(self):
        model = self.model()
        ids, inputs = self.padded()
        options = {"attention_mask": inputs["attention_mask"], "num_beams": 4, "num_return_sequences": 2}
        want = self.generate(model, "eager", ids, **options)
        cache = self.cache(model, max_seqs=12)
        self.assertEqual(self.generate(model, "tieredkv", ids, cache, **options), want)
        cache.tiered.check()

    def test_windows(self):
        model, ids = self.model("Mistral", sliding_window=24), torch.randint(2, 200, (1, 400))
        exact, cache = self.forward(model, "eager", ids), self.cache(model, max_append=64)
        self.near(exact, self.forward(model, "tieredkv", ids, cache))
        self.assertGreater(cache.tiered.layer(0).expired, 0)
        self.near(exact, self.forward(model, "tieredkv", ids))
        eager = self.cache(model, max_append=64)  # decodes zeros for the tokens that left the window
        self.near(exact, torch.cat([self.forward(model, "eager", part, eager) for part in ids.split(100, 1)], 1))
        cache.crop(-64)
        self.near(exact[:, 336:], self.forward(model, "tieredkv", ids[:, 336:], cache))
        with self.assertRaisesRegex(IndexError, "tokens of the window have expired; 0 tokens can stay, or at least"):
            cache.crop(-390)
        padded, inputs = self.padded()
        self.near(self.forward(model, "eager", padded, **inputs),
                  self.forward(model, "tieredkv", padded, self.cache(model), **inputs), inputs["attention_mask"])
        prompt = ids[:, :100]
        self.assertEqual(self.generate(model, "tieredkv", prompt, self.cache(model)), self.generate(model, "eager", prompt))

    def test_soft_caps_and_mixed_layers(self):
        model = self.model("Gemma2", sliding_window=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
        self.assertEqual(len(set(model.config.layer_types)), 2)
        ids = torch.randint(2, 200, (2, 80))
        self.near(self.forward(model, "eager", ids), self.forward(model, "tieredkv", ids, self.cache(model)))

    def test_architectures(self):
        """Heads, norms, windows and RoPE of other models. Gemma 4 has layers of other shapes, and layers that share keys."""
        ids, mask = torch.randint(2, 200, (2, 50)), torch.ones(2, 50, dtype=torch.long)
        mask[0, :20] = 0
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        gemma = {"vocab_size_per_layer_input": 200, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 16,
                 "layer_types": ["sliding_attention", "full_attention"] * 3}
        gemma3n = {"attention_dropout": 0.0, "activation_sparsity_pattern": [0.0] * 6}
        gemma4 = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        for kind, options in (
                ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}), ("Qwen3", {"head_dim": 32}),
                ("Phi3", {}), ("GPTNeoX", {"num_key_value_heads": 4}), ("SmolLM3", {}), ("Olmo3", {"sliding_window": 16}),
                ("Mixtral", {"num_local_experts": 2, "sliding_window": 16}), ("Gemma3n", {**gemma, **gemma3n}),
                ("Gemma4", {**gemma, **gemma4})):
            with self.subTest(kind):
                model = self.model(kind, **options)
                exact, cache = self.forward(model, "eager", ids, **inputs), self.cache(model)
                self.near(exact, self.forward(model, "tieredkv", ids, cache, **inputs), mask)
                self.near(exact, self.forward(model, "tieredkv", ids, **inputs), mask)
                cache.reset()
                parts = [self.forward(model, "tieredkv", part, cache) for part in ids.split(30, 1)]
                self.near(self.forward(model, "eager", ids), torch.cat(parts, 1))
                text = self.generate(model, "tieredkv", ids, self.cache(model))
                self.assertEqual(text, self.generate(model, "eager", ids))
        model = self.model("Gemma3n", **gemma, **gemma3n)
        with self.assertRaisesRegex(Exception, "layers share keys, so a call takes at most max_append tokens, 16, and not 50"):
            self.forward(model, "tieredkv", ids, self.cache(model, max_append=16))
        text = self.generate(model, "tieredkv", ids, self.cache(model, max_append=16), prefill_chunk_size=16)
        self.assertEqual(text, self.generate(model, "eager", ids))

    def test_learned_sinks(self):
        model = self.model("GptOss", sliding_window=16, num_local_experts=2, num_experts_per_tok=1, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0})
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        ids = torch.randint(2, 200, (2, 40))
        self.near(self.forward(model, "eager", ids), self.forward(model, "tieredkv", ids, self.cache(model)))

    def test_bfloat16(self):
        model, ids = self.model().to(torch.bfloat16), torch.randint(2, 200, (1, 90))
        got = self.forward(model, "tieredkv", ids, self.cache(model))
        self.assertEqual(got.dtype, torch.bfloat16)
        self.near(self.forward(model, "eager", ids).float(), got.float(), limit=5e-2)

    def test_refusals(self):
        model, ids = self.model(), torch.randint(2, 200, (1, 9))
        with self.assertRaisesRegex(Exception, "the cache has no tokens yet"):
            self.cache(model).tiered
        with self.assertRaisesRegex(ValueError, "nearest one is tiers.hot_tokens"):
            tiered.TieredCache(model.config, tiers={"hot_token": 1})
        cache = self.cache(model)
        self.forward(model, "tieredkv", ids, cache)
        with self.assertRaisesRegex(Exception, "not one layer"):
            cache.layers[0].reset()
        with self.assertRaisesRegex(Exception, "can be read, but not replaced"):
            cache.layers[0].keys = ids
        self.assertEqual(tuple(cache.layers[0].keys.shape), (1, 2, 9, 16))
        self.assertEqual(tuple(cache.layers[0].values.shape), (1, 2, 9, 16))
        k = torch.zeros(1, 2, 1, 16)
        cache.layers[0].update(k, k)
        with self.assertRaisesRegex(Exception, "the model changes keys or values between its cache and its attention"):
            tiered.attention_forward(model, torch.zeros(1, 4, 1, 16), k, k, None)
        cache.crop(-1)
        cache.layers[0].update(k, k)
        with self.assertRaisesRegex(Exception, "the model did not call the attention function 'tieredkv' after its cache"):
            cache.layers[1].update(k, k)
        with self.assertRaisesRegex(Exception, "layers of type chunked_attention are not supported"):
            tiered.TieredCache(transformers.LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"], attention_chunk_size=8))
        with self.assertRaisesRegex(Exception, "has no attention weights to put out"):
            self.forward(model, "tieredkv", ids, self.cache(model), output_attentions=True)
        with self.assertRaisesRegex(Exception, "only copy.deepcopy copies it; cache.tiered can be pickled"):
            pickle.dumps(cache)
        for how in ("tieredkv", "eager"):
            model.set_attn_implementation(how)
            with self.assertRaisesRegex(Exception, "has no gradients"):
                model(ids, cache=self.cache(model)).logits.sum().backward()
        with self.assertRaisesRegex(ValueError, "attn_implementation"):  # if this fails, the README has a sentence too many
            model.generate(ids, cache=self.cache(model), attn_implementation="tieredkv")
        other = self.model("DiffLlama")  # attends twice, with halves of the values
        with self.assertRaisesRegex(Exception, "the model changes keys or values between its cache and its attention"):
            self.forward(other, "tieredkv", ids, self.cache(other))
        other = self.model(num_key_value_heads=4)
        with self.assertRaisesRegex(Exception, r"keys of shape \(1, 9, 2, 16\), and \(1, 9, 4, 16\) was expected"):
            self.forward(model, "tieredkv", ids, self.cache(other))  # of another model

    def test_settings_of_layers(self):
        """Those of the caller join those of the model."""
        cache = self.cache(self.model("Mistral", sliding_window=24), layers={"0-2": {"archive": "a20/r20"}, "1": {"window": 8}})
        lines = tieredkv.Config(**cache.keywords).to_text().splitlines()
        self.assertEqual([line for line in lines if line.startswith("layers[1]")], ["layers[1].window = 8", "layers[1].archive = a20/r20"])
        self.assertIn("layers[2].window = 24", lines)

    def test_a_call_that_fails(self):
        """The layers before the failure have its tokens. The next call says so, and a crop makes them equal."""
        model, ids = self.model(), torch.randint(2, 200, (1, 3000))
        cache = self.cache(model, hot="f16", hot_tokens=64, budget={"bytes": "200K"})
        with self.assertRaises(tieredkv.BudgetError):
            for part in ids.split(50, 1):
                self.forward(model, "tieredkv", part, cache)
        with self.assertRaisesRegex(tieredkv.StateError, "layer 2 has .* tokens of row 0, and not .*: a call failed"):
            self.forward(model, "tieredkv", ids[:, :1], cache)
        cache.crop(-51)
        cache.crop(-50)
        self.forward(model, "tieredkv", ids[:, :50], cache)

    def test_threads(self):
        """Two threads that use one cache get errors, and write nowhere else."""
        model, cache, failed = self.model(), None, []
        model.set_attn_implementation("tieredkv")
        cache = self.cache(model)

        def work(rows):
            for _ in range(30):
                try:
                    with torch.no_grad():
                        model(torch.randint(2, 200, (rows, 7)), cache=cache)
                    cache.crop(-3)
                except tieredkv.TieredKVError as error:
                    failed.append(str(error))
                    cache.reset()

        threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertGreater(len(failed), 0)
        cache.tiered.check()


class SmolLM2(unittest.TestCase):
    """A real model from its GGUF."""

    @classmethod
    def setUpClass(cls):
        install()
        need("torch", "transformers", "gguf", "accelerate")
        files = glob.glob(os.path.join(ROOT, "build", "models", "SmolLM2*.gguf"))
        if not files:
            if STRICT:
                raise RuntimeError("build/models has no SmolLM2: make model")
            raise unittest.SkipTest("build/models has no SmolLM2: make model")
        global torch, tiered
        import torch
        import transformers
        import tieredkv.transformers as tiered
        warnings.filterwarnings("ignore", category=FutureWarning)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        place, name = os.path.split(files[0])
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32).eval()
        with open(DEMO, encoding="utf-8") as f:
            cls.ids = cls.tokenizer(f.read(), return_tensors="pt")["input_ids"][:, :768]

    def logits(self, how, ids, cache=None):
        self.model.set_attn_implementation(how)
        with torch.no_grad():
            return self.model(ids, cache=cache, use_cache=cache is not None).logits

    def test_logits(self):
        ids = self.ids[:, :150]
        cache = tiered.TieredCache(self.model.config, hot="f32", hot_tokens="unlimited")
        difference = float((self.logits("eager", ids) - self.logits("tieredkv", ids, cache)).abs().max())
        print("SmolLM2, 150 tokens, everything F32: logits differ by %.1e at most" % difference)
        self.assertLess(difference, 1e-4)

    def test_balanced(self):
        exact = self.logits("eager", self.ids)[0, 320:].log_softmax(-1)
        cache = tiered.TieredCache(self.model.config, preset="balanced", max_append=64)
        got = self.logits("tieredkv", self.ids, cache)[0, 320:].log_softmax(-1)
        kl = float((exact.exp() * (exact - got)).sum(-1).mean())
        same = float((exact.argmax(-1) == got.argmax(-1)).float().mean())
        print("SmolLM2, %d tokens, balanced: KL %.4f, same likeliest token %.1f %%, %s" % (
            self.ids.shape[1], kl, 100 * same, cache.tiered.layer(0)))
        self.assertGreater(cache.tiered.layer(0).archive_tokens, 0)
        self.assertLess(kl, 0.02)

    def test_readme_runs(self):
        with open(os.path.join(PACKAGE, "README.md"), encoding="utf-8") as f:
            code = re.findall(r"```python\n(.*?)```", f.read(), re.S)[1]
        environment = dict(os.environ, PYTHONPATH=os.path.join(built.name, "installed"))
        said = run([sys.executable, "-W", "ignore", "-c", code], env=environment, cwd=ROOT).splitlines()
        self.assertEqual(said, ["The capital of France is Paris.", "TieredCache(30 layers, 1 rows, 6 tokens)"])


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
