#!/usr/bin/env python3
"""Hands tensors of PyTorch to tieredkv_cuda.cu through ctypes: a sketch of a decoder's cache.

    nvcc -O3 -arch=native -shared -Xcompiler -fPIC -DTIEREDKV_IMPLEMENTATION tieredkv_cuda.cu -o libtieredkv_cuda.so
    python3 examples/cuda_torch.py

Memory is PyTorch's: the two pieces are tensors of bytes, k, v, q and out are tensors too, and work goes into PyTorch's
stream, so nothing here waits. A model would call append and attend in the place of its cache and its attention.
"""
import ctypes
import os
import sys

F32, F16, BF16 = 0, 1, 2  # tkv_type
CONFIG_BYTES = 4096       # more than a tkv_config has


class Desc(ctypes.Structure):
    _fields_ = [("cfg", ctypes.c_void_p), ("n_seqs", ctypes.c_int), ("max_tokens", ctypes.c_int),
                ("max_queries", ctypes.c_int)]


class Cache:
    """A cache of tieredkv on the current GPU. `config`: text as tkv_parse_config reads it."""

    def __init__(self, library, config, torch):
        self.torch, self.lib = torch, ctypes.CDLL(library)
        self.lib.tkvcu_strerror.restype = self.lib.tkvcu_last_error.restype = ctypes.c_char_p
        self.lib.tkvcu_last_error.argtypes = self.lib.tkvcu_destroy.argtypes = [ctypes.c_void_p]
        self.cu = ctypes.c_void_p()
        cfg, why = ctypes.create_string_buffer(CONFIG_BYTES), ctypes.create_string_buffer(200)
        text = config.encode()
        self.check(self.lib.tkv_parse_config(cfg, None, text, ctypes.c_size_t(len(text)), why,
                                             ctypes.c_size_t(200)), why)
        desc = Desc(ctypes.cast(cfg, ctypes.c_void_p), 0, 0, 1)
        sizes = (ctypes.c_size_t(), ctypes.c_size_t())
        self.check(self.lib.tkvcu_query(ctypes.byref(desc), ctypes.byref(sizes[0]), ctypes.byref(sizes[1]), why,
                                        ctypes.c_size_t(200)), why)
        self.memory = [torch.empty(n.value, dtype=torch.uint8, device="cuda") for n in sizes]
        self.check(self.lib.tkvcu_create(
            ctypes.byref(desc), self.at(self.memory[0]), sizes[0], self.at(self.memory[1]), sizes[1],
            self.stream(), ctypes.byref(self.cu)), why)

    def close(self):
        self.lib.tkvcu_destroy(self.cu)

    def check(self, status, why=None):
        if status:
            said = why.value if why is not None else self.lib.tkvcu_last_error(self.cu)
            raise RuntimeError("%s: %s" % (self.lib.tkvcu_strerror(status).decode(), said.decode()))

    def at(self, tensor):
        assert tensor.is_contiguous()
        return ctypes.c_void_p(tensor.data_ptr())

    def type_of(self, tensor):
        return {self.torch.float32: F32, self.torch.float16: F16, self.torch.bfloat16: BF16}[tensor.dtype]

    def stream(self):
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)

    def append(self, layer, k, v):
        """k, v: [sequence][token][KV head][channel], up to 64 tokens, keys after RoPE."""
        self.check(self.lib.tkvcu_append(self.cu, layer, self.at(k), self.at(v), self.type_of(k), k.shape[1], None,
                                         self.stream()))

    def attend(self, layer, q):
        """q: [sequence][query][head][channel], the last tokens' queries. Returns the same shape."""
        out = self.torch.empty_like(q)
        self.check(self.lib.tkvcu_attend(self.cu, layer, self.at(q), self.type_of(q), q.shape[1], None,
                                         self.at(out), None, None, self.stream()))
        return out

    def word(self):
        """Bits of what went wrong on the device, TKVCU_WORD_ in tieredkv_cuda.cu. Waits."""
        word = self.torch.zeros(1, dtype=self.torch.int32, device="cuda")
        self.check(self.lib.tkvcu_status(self.cu, self.at(word), 0, self.stream()))
        return int(word.item())


def main():
    try:
        import torch
    except ImportError:
        print("There is no PyTorch here: nothing was run.")
        return 1
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was run.")
        return 1
    library = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "libtieredkv_cuda.so")
    layers, heads, kv_heads, dim, tokens = 2, 32, 8, 128, 600
    cache = Cache(library, "n_layers = %d\nn_heads = %d\nn_kv_heads = %d\nhead_dim = %d\nmax_seqs = 2\n"
                  "max_tokens = 4096\nallocation_unit = 16\n" % (layers, heads, kv_heads, dim), torch)
    keys, values = [], []
    for _ in range(tokens):
        k, v = (torch.randn(2, 1, kv_heads, dim, dtype=torch.float16, device="cuda") for _ in range(2))
        keys.append(k)
        values.append(v)
        for layer in range(layers):
            cache.append(layer, k, v)
    q = torch.randn(2, 1, heads, dim, dtype=torch.float16, device="cuda")
    out = cache.attend(0, q)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *(torch.cat(x, 1).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
                             for x in (keys, values))).transpose(1, 2)
    error = ((out - exact).float().norm() / exact.float().norm()).item()
    print("%d tokens of 2 sequences; attention differs from exact FP16 by %.3f of its size; errors: %d" %
          (tokens, error, cache.word()))
    cache.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
