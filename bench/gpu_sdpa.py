#!/usr/bin/env python3
"""Measures PyTorch's attention in FP16 on the shapes of gpu_bench.cu, and prints the speedup of tieredkv over it.

    ./build/gpu_bench --csv build/gpu_bench.csv && python3 bench/gpu_sdpa.py build/gpu_bench.csv      make gpu-bench

It calls scaled_dot_product_attention with grouped heads, by FlashAttention and by cuDNN. A CUDA graph goes through copies of
K and V, together at least 4 times the L2 cache. Times are medians of 50 graphs. The queries of a chunk see all tokens here,
without a causal mask. The speedup is relative to the faster backend.
"""
import csv
import sys

HEADS, KV_HEADS, DIM, RUNS = 32, 8, 128, 50
SHAPES = [(batch, 1, tokens) for batch in (1, 8) for tokens in (8192, 32768, 131072)]
SHAPES += [(1, 64, tokens) for tokens in (8192, 32768)]


def measure(torch, backend, batch, queries, tokens):
    """Returns the microseconds of one call; None if memory is short or the backend refuses the shape."""
    from torch.nn.attention import sdpa_kernel
    attend = torch.nn.functional.scaled_dot_product_attention
    one = 2 * batch * tokens * KV_HEADS * DIM * 2
    copies = max(2, 4 * torch.cuda.get_device_properties(0).L2_cache_size // one + 1)
    if one * copies > torch.cuda.mem_get_info()[0]:
        return None
    q = torch.randn(batch, HEADS, queries, DIM, dtype=torch.float16, device="cuda")
    kv = [[torch.randn(batch, KV_HEADS, tokens, DIM, dtype=torch.float16, device="cuda") for _ in range(2)]
          for _ in range(copies)]
    try:
        with sdpa_kernel(backend):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for k, v in kv[:2]:
                    attend(q, k, v, enable_gqa=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for k, v in kv:
                    attend(q, k, v, enable_gqa=True)
    except RuntimeError as error:
        print("    %s: %s" % (backend, str(error).splitlines()[0]))
        return None
    times = []
    for i in range(RUNS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[RUNS // 2]


def main(args):
    try:
        import torch
    except ImportError:
        print("There is no PyTorch here: nothing was measured.")
        return 1
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was measured.")
        return 1
    from torch.nn.attention import SDPBackend
    rows = list(csv.DictReader(open(args[0]))) if args else []
    print("%s, PyTorch %s" % (torch.cuda.get_device_name(), torch.__version__))
    for batch, queries, tokens in SHAPES:
        us = {}
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            us[name] = measure(torch, backend, batch, queries, tokens)
            torch.cuda.empty_cache()
        here = {name: t for name, t in us.items() if t}
        for name, t in here.items():
            print("%-9s %5d %3d %7d %9.1f us %6.2f TB/s" %
                  (name, batch, queries, tokens, t, 4.0 * batch * tokens * KV_HEADS * DIM / t / 1e6))
        for row in rows:
            if here and tuple(int(row[x]) for x in ("batch", "queries", "tokens")) == (batch, queries, tokens):
                print("%-9s %5d %3d %7d %9.1f us %6.2f times as fast as %s; append %.1f %% of it" %
                      (row["plan"], batch, queries, tokens, float(row["us"]), min(here.values()) / float(row["us"]),
                       min(here, key=here.get), 100 * float(row["append"]) / float(row["us"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
