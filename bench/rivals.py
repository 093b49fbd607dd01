#!/usr/bin/env python3
"""Compares the speed of attention with the ggml of llama.cpp and of ik_llama.cpp, on the same shapes, in turns, in one run,
on one thread.

    make build/bench/attend build/bench/prefill
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python
    python3 bench/rivals.py --csv build/rivals.csv

    --ggml DIR        folder of libggml-base and libggml-cpu (the package's)
    --ik DIR          folder of ik_llama.cpp's libggml, built with -DBUILD_SHARED_LIBS=ON -DGGML_IQK_FA_ALL_QUANTS=ON
                      -DGGML_OPENMP=OFF; without it, ik_llama.cpp is left out
    --isa avx2        our kernels (auto); build the others for the same set
    --only decode     tables, separated by commas: decode, chunk, prompt
    --ctx 4096,32768  tokens of decode
    --rounds 3        rounds; a round measures each row once, and times are medians over rounds
    --csv FILE        writes the rows as CSV, for example for bench/plot.py

The shape is head_dim 128, 32 query and 8 KV heads. Times are CPU time.
    decode   one query; enough layers for 96 MB, so that keys and values are not in the processor's caches; ns per token
             and KV head
    chunk    512 causal queries over 4,096 tokens; ms
    prompt   4,096 tokens into an empty cache, in chunks of 512, appends included; ms

The rows of tieredkv come from build/bench/attend and build/bench/prefill. ik_llama.cpp has `flash` only. ggml has two paths. `flash` is
ggml_flash_attn_ext. `plain` is mul_mat, soft_max_ext and mul_mat, with V stored transposed. Both have the layout of
llama.cpp's cache: the heads of a token are neighbours. llama.cpp itself does not use `plain` with quantized V. Errors
are relative L2 distances from double precision on the values before coding (Gaussian; 1,000 or 1,024 tokens).
"""
import argparse
import csv
import ctypes
import glob
import importlib.util
import io
import math
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DIM, HEADS, KV_HEADS, CHUNK, PROMPT = 128, 32, 8, 512, 4096
COLD = 96 << 20
INSTALL = 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python'
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}  # enum ggml_type; the file format fixes these numbers
COLUMNS = ["what", "ctx", "engine", "path", "format", "bytes", "time", "unit", "error", "read_gb_s"]
OURS = {"decode": "f16,q8,kivi4,a40/r40,a30/r30,tiers,a30/r20,kivi2",
        "chunk": "f16,q8,kivi4,a30/r30,tiers,kivi2", "prompt": "f16,tiers"}


# >>ggml: the functions that this program uses
class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


P, I64, INT, SIZE, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t, ctypes.c_float
FUNCTIONS = {
    "ggml_init": (P, InitParams), "ggml_free": (None, P), "ggml_get_data": (P, P), "ggml_version": (ctypes.c_char_p,),
    "ggml_row_size": (SIZE, INT, I64), "ggml_quantize_chunk": (SIZE, INT, P, P, I64, I64, I64, P, P),
    "ggml_new_tensor_3d": (P, P, INT, I64, I64, I64), "ggml_permute": (P, P, P, INT, INT, INT, INT),
    "ggml_view_3d": (P, P, P, I64, I64, I64, SIZE, SIZE, SIZE), "ggml_cpy": (P, P, P, P),
    "ggml_mul_mat": (P, P, P, P), "ggml_soft_max_ext_inplace": (P, P, P, P, F32, F32),
    "ggml_flash_attn_ext": (P, P, P, P, P, P, F32, F32, F32),
    "ggml_new_graph_custom": (P, P, SIZE, ctypes.c_bool), "ggml_build_forward_expand": (None, P, P),
    "ggml_backend_cpu_init": (P,), "ggml_backend_cpu_set_n_threads": (None, P, INT),
    "ggml_backend_graph_compute": (INT, P, P),
}


class Ggml:
    """A ggml: that of llama.cpp ("ggml", in two libraries), or that of ik_llama.cpp ("ik", in one)."""

    def __init__(self, name, folder):
        self.name, self.paths = name, ("flash", "plain") if name == "ggml" else ("flash",)
        libraries = []
        for part in ("ggml-base", "ggml-cpu") if name == "ggml" else ("ggml",):
            found = sorted(path for end in ("so", "dylib", "dll")
                           for path in glob.glob(os.path.join(folder, "*%s.%s" % (part, end))))
            if not found:
                sys.exit("no lib%s in %s" % (part, folder))
            libraries.append(ctypes.CDLL(found[0]))  # with names of its own: both have the same functions
        for name, (result, *arguments) in FUNCTIONS.items():
            library = next((each for each in libraries if hasattr(each, name)), None)
            if not library and name in ("ggml_version", "ggml_soft_max_ext_inplace") and self.name == "ik":
                continue  # it has none
            if not library:
                sys.exit("this ggml has no %s" % name)
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name[len("ggml_"):], function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, 1)


def package_folder():
    spec = importlib.util.find_spec("llama_cpp")
    for folder in spec.submodule_search_locations if spec else []:
        if glob.glob(os.path.join(folder, "lib", "*ggml-cpu*")):
            return os.path.join(folder, "lib")
    sys.exit("llama.cpp's ggml is missing. Install it with\n    %s\nThat needs cmake and a C++ compiler, and takes "
             "minutes. Or name its folder with --ggml." % INSTALL)


class Graph:
    """A graph: attention of the last `queries` of `ctx` tokens in some layers. prompt: stores each chunk first."""

    def __init__(self, ggml, path, kind, ctx, queries, layers, prompt=False):
        import numpy as np
        self.np, self.g, self.type, self.ctx, self.path = np, ggml, TYPES[kind], ctx, path
        rng = np.random.default_rng(1)
        span = min(ctx, CHUNK * 2)  # number of different tokens; the cache repeats them
        self.k, self.v = (rng.standard_normal((span, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
        self.q = rng.standard_normal((queries, HEADS, DIM), dtype=np.float32)
        row = ggml.row_size(self.type, DIM)
        self.bytes = 2 * row
        work = HEADS * queries * 4 * (DIM + (ctx if path == "plain" else 0))  # `plain` stores a weight for each key
        steps = ctx // CHUNK if prompt else 1
        size = layers * 2 * ctx * KV_HEADS * row + (layers * steps + 1) * work + queries * (ctx + 64) * 2 * steps
        self.context = ggml.init(InitParams(size + 6 * queries * KV_HEADS * DIM * 4 + (64 << 20), None, False))
        self.graph = ggml.new_graph_custom(self.context, 4096, False)
        self.q_tensor = self.tensor(0, (DIM, HEADS, queries), self.q)
        for layer in range(layers):
            k, v = self.store(layer, filled=not prompt)
            for n in range(CHUNK, ctx + 1, CHUNK) if prompt else (ctx,):
                if prompt:
                    self.store_chunk(k, v, n - CHUNK)
                self.result = self.attend(k, v, n, queries)

    def free(self):
        self.g.free(self.context)

    def tensor(self, kind, shape, values=None):
        t = self.g.new_tensor_3d(self.context, kind, *shape)
        if values is not None:
            values = self.np.ascontiguousarray(values)
            ctypes.memmove(self.g.get_data(t), values.ctypes.data, values.nbytes)
        return t

    def quantized(self, values, n):
        """Quantizes rows of floats, and repeats them up to n rows."""
        np = self.np
        values = np.ascontiguousarray(values, dtype=np.float32)
        out = np.empty((len(values), self.g.row_size(self.type, values.shape[1])), dtype=np.uint8)
        self.g.quantize_chunk(self.type, values.ctypes.data, out.ctypes.data, 0, len(values), values.shape[1], None,
                              None)  # ik_llama.cpp has one more argument
        return np.tile(out, (-(-n // len(out)), 1))[:n]

    def store(self, layer, filled):
        """Makes K and V of a layer: a row per token; on the plain path, V has a row per channel."""
        np, ctx = self.np, self.ctx
        k = self.tensor(self.type, (DIM, KV_HEADS, ctx))
        v = self.tensor(self.type, (ctx, DIM, KV_HEADS) if self.path == "plain" else (DIM, KV_HEADS, ctx))
        if filled:
            pairs = [(k, self.k)] + ([(v, self.v)] if self.path == "flash" else [])
            for t, x in pairs:
                bytes_ = self.quantized(x.reshape(-1, DIM), ctx * KV_HEADS)
                ctypes.memmove(self.g.get_data(t), bytes_.ctypes.data, bytes_.nbytes)
            if self.path == "plain":
                rows = self.v.transpose(1, 2, 0).reshape(KV_HEADS * DIM, -1)
                rows = np.tile(rows, (1, -(-ctx // rows.shape[1])))[:, :ctx]
                bytes_ = self.quantized(rows, KV_HEADS * DIM)
                ctypes.memmove(self.g.get_data(v), bytes_.ctypes.data, bytes_.nbytes)
        return k, v

    def store_chunk(self, k, v, at):
        g, c, size = self.g, self.context, self.g.row_size
        chosen = [self.tensor(0, (DIM, KV_HEADS, CHUNK), x[at % len(x):][:CHUNK]) for x in (self.k, self.v)]
        row = size(self.type, DIM)
        for t, x in zip((k, v), chosen):
            if t == v and self.path == "plain":  # transposed: the tokens of a channel are neighbours
                x = g.permute(c, x, 1, 2, 0, 3)
                to = g.view_3d(c, t, CHUNK, DIM, KV_HEADS, size(self.type, self.ctx), size(self.type, self.ctx) * DIM,
                               size(self.type, at))
            else:
                to = g.view_3d(c, t, DIM, KV_HEADS, CHUNK, row, row * KV_HEADS, row * KV_HEADS * at)
            g.build_forward_expand(self.graph, g.cpy(c, x, to))

    def attend(self, k, v, n, queries):
        g, c, np = self.g, self.context, self.np
        row = g.row_size(self.type, DIM)
        seen = np.arange(n)[None, :] <= (n - queries + np.arange(queries))[:, None]
        mask = np.full((-(-queries // 64) * 64, n), -np.inf, dtype=np.float16)
        mask[:queries][seen] = 0
        mask = self.tensor(TYPES["f16"], (n, len(mask), 1), mask)
        q = g.permute(c, self.q_tensor, 0, 2, 1, 3)
        k = g.permute(c, g.view_3d(c, k, DIM, KV_HEADS, n, row, row * KV_HEADS, 0), 0, 2, 1, 3)
        if self.path == "flash":
            v = g.permute(c, g.view_3d(c, v, DIM, KV_HEADS, n, row, row * KV_HEADS, 0), 0, 2, 1, 3)
            out = g.flash_attn_ext(c, q, k, v, mask, DIM ** -0.5, 0.0, 0.0)
        else:
            line = g.row_size(self.type, self.ctx)
            v = g.view_3d(c, v, n, DIM, KV_HEADS, line, line * DIM, 0)
            weights = g.soft_max_ext_inplace(c, g.mul_mat(c, k, q), mask, DIM ** -0.5, 0.0)
            out = g.mul_mat(c, v, weights)
        g.build_forward_expand(self.graph, out)
        return out

    def compute(self):
        """Computes the graph; returns seconds of CPU time."""
        begin = time.process_time()
        if self.g.backend_graph_compute(self.g.backend, self.graph) != 0:
            sys.exit("ggml_backend_graph_compute failed")
        return time.process_time() - begin

    def error(self):
        """Returns the relative L2 error of the last result. Slow: use few queries."""
        np = self.np
        queries = len(self.q)
        out = np.empty((queries, HEADS, DIM) if self.path == "flash" else (HEADS, queries, DIM), dtype=np.float32)
        ctypes.memmove(out.ctypes.data, self.g.get_data(self.result), out.nbytes)
        if self.path == "plain":
            out = out.transpose(1, 0, 2)
        at = np.arange(self.ctx) % len(self.k)
        want = np.empty(out.shape)
        for h in range(HEADS):
            k, v = (x[at, h * KV_HEADS // HEADS].astype(np.float64) for x in (self.k, self.v))
            s = self.q[:, h].astype(np.float64) @ k.T / math.sqrt(DIM)
            s[np.arange(self.ctx)[None, :] > (self.ctx - queries + np.arange(queries))[:, None]] = -np.inf
            w = np.exp(s - s.max(axis=1, keepdims=True))
            want[:, h] = w @ v / w.sum(axis=1, keepdims=True)
        return float(np.linalg.norm(out - want) / np.linalg.norm(want))


# >>measuring: each function yields the rows of one round
def progress(text):
    sys.stderr.write("\r%-60s\r" % text)
    sys.stderr.flush()


def ours(what, ctx, isa):
    for name in OURS[what].split(","):
        progress("%s %d: %s" % (what, ctx, name))
        if what == "decode":
            command = ["attend", "--ctx", str(ctx)]
        else:
            command = ["prefill", "--only", what, "--runs", "1"]
        path = os.path.join(ROOT, "build", "bench", command[0])
        run = subprocess.run([path] + command[1:] + ["--formats", name, "--isa", isa, "--csv"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, universal_newlines=True)
        if run.returncode:
            sys.exit(run.stderr)
        row = next(csv.DictReader(io.StringIO(run.stdout)))
        yield {"what": what, "ctx": ctx, "engine": "tieredkv", "path": "", "format": name,
               "bytes": float(row["bytes"]) if what == "decode" else None,
               "time": float(row["ns" if what == "decode" else "least_ms"]),
               "unit": "ns" if what == "decode" else "ms",
               "error": math.hypot(float(row["error"]), float(row["own_error"])),
               "read_gb_s": float(row["read_gb_s"]) if what == "decode" else None}


def theirs(ggml, what, ctx, errors):
    queries = 1 if what == "decode" else CHUNK
    for kind in TYPES:
        for path in ggml.paths:
            if what == "prompt" and path == "plain" and kind != "f16":
                continue  # 32 tokens of a transposed V share a scale, so a single token cannot be stored
            progress("%s %d: %s %s %s" % (what, ctx, ggml.name, path, kind))
            if (ggml.name, path, kind) not in errors:
                short = Graph(ggml, path, kind, 1024, 4, 1)
                short.compute()
                errors[ggml.name, path, kind] = short.error()
                short.free()
                if errors[ggml.name, path, kind] > 0.3:
                    sys.exit("wrong results of %s: %s %s, %g" % (ggml.name, path, kind,
                                                                 errors[ggml.name, path, kind]))
            layer = 2 * ctx * KV_HEADS * ggml.row_size(TYPES[kind], DIM)
            layers = COLD // layer + 1 if what == "decode" else 1
            graph = Graph(ggml, path, kind, ctx, queries, layers, what == "prompt")
            seconds = [graph.compute()]
            if seconds[0] < 8:  # the first run touches new memory; only short runs need repetition
                seconds = [graph.compute() for _ in range(1 if what == "prompt" else 3)]
            if what == "decode":
                value = statistics.median(seconds) / (layers * ctx * KV_HEADS) * 1e9
            else:
                value = min(seconds) * 1e3
            yield {"what": what, "ctx": ctx, "engine": ggml.name, "path": path, "format": kind, "bytes": graph.bytes,
                   "time": value, "unit": "ns" if what == "decode" else "ms", "error": errors[ggml.name, path, kind],
                   "read_gb_s": None}
            graph.free()


def medians(rows):
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[c] for c in ("what", "ctx", "engine", "path", "format")), []).append(row)
    for same in groups.values():
        out = dict(same[0])
        for column in ("time", "read_gb_s"):
            if out[column] is not None:
                out[column] = statistics.median(row[column] for row in same)
        yield out


def table(rows):
    """Prints the rows. A ratio is the time of ggml's faster path with f16 over the time of the row."""
    print("%-8s %6s %-14s %-9s %7s %10s %8s %9s" % (
        "what", "ctx", "engine", "format", "bytes", "time", "ratio", "error"))
    slower = []
    for shape in dict.fromkeys((row["what"], row["ctx"]) for row in rows):
        same = [row for row in rows if (row["what"], row["ctx"]) == shape]
        base = min(row["time"] for row in same if row["engine"] == "ggml" and row["format"] == "f16")
        for row in same:
            print("%-8s %6d %-14s %-9s %7s %7.1f %s %7.2fx %9.1e" % (
                row["what"], row["ctx"], (row["engine"] + " " + row["path"]).strip(), row["format"],
                "%.1f" % row["bytes"] if row["bytes"] else "", row["time"], row["unit"], base / row["time"],
                row["error"]))
            if row["engine"] == "tieredkv":
                slower += [(row, other) for other in same if other["engine"] != "tieredkv" and other["time"] < row["time"]]
    for row, other in slower:
        print("slower: %s at %d: %s %s %s takes %.1f %s, tieredkv %s %.1f (%.2fx)" % (
            row["what"], row["ctx"], other["engine"], other["path"], other["format"], other["time"], row["unit"], row["format"],
            row["time"], row["time"] / other["time"]))
    if not slower:
        print("tieredkv is never slower in this table")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml")
    parser.add_argument("--ik")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--only", default="decode,chunk,prompt")
    parser.add_argument("--ctx", default="4096,32768")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv")
    args = parser.parse_args()
    for program in ("attend", "prefill"):
        if not os.path.exists(os.path.join(ROOT, "build", "bench", program)):
            sys.exit("build/bench/%s is missing: make build/bench/%s" % (program, program))
    if not importlib.util.find_spec("numpy"):
        sys.exit("numpy is missing: pip install numpy")
    rivals = [Ggml("ggml", args.ggml or package_folder())] + ([Ggml("ik", args.ik)] if args.ik else [])
    rows, errors = [], {}
    shapes = [("decode", int(ctx)) for ctx in args.ctx.split(",")] + [("chunk", PROMPT), ("prompt", PROMPT)]
    shapes = [shape for shape in shapes if shape[0] in args.only.split(",")]
    for _ in range(args.rounds):
        for what, ctx in shapes:
            rows += ours(what, ctx, args.isa)
            for rival in rivals:
                rows += theirs(rival, what, ctx, errors)
    progress("")
    rows = sorted(medians(rows), key=lambda row: shapes.index((row["what"], row["ctx"])))
    print("tieredkv, ggml %s%s: head_dim %d, %d query and %d KV heads, 1 thread, medians of %d rounds" % (
        rivals[0].version().decode(), " and ik_llama.cpp" if args.ik else "", DIM, HEADS, KV_HEADS, args.rounds))
    table(rows)
    if args.csv:
        with open(args.csv, "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
