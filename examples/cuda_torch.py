#!/usr/bin/env python3
"""Passes PyTorch tensors to tieredkv_cuda.cu through ctypes: a sketch of a decoder's cache.

    nvcc -O3 -arch=native -shared -Xcompiler -fPIC -DTIEREDKV_IMPLEMENTATION tieredkv_cuda.cu -o libtieredkv_cuda.so
    python3 examples/cuda_torch.py

PyTorch owns the memory: both pieces of device memory are tensors of bytes. Keys, values, queries and outputs are tensors
as well. Calls use PyTorch's current stream, so append and attend do not wait. A model would call append and attend in place
of its cache and its attention.
"""
import ctypes
import os
import sys

F32, F16, BF16 = 0, 1, 2  # tkv_type
CONFIG_BYTES = 4096       # more than sizeof(tkv_config)
REASON_BYTES = 512


class Config(ctypes.Structure):
    """tkvcu_config."""
    _fields_ = [("cfg", ctypes.c_void_p), ("n_seqs", ctypes.c_int), ("max_tokens", ctypes.c_int),
                ("max_queries", ctypes.c_int)]


class Cache:
    """A cache of tieredkv on the current GPU. `text` is a config as tkv_parse_config reads it."""

    def __init__(self, library, text, torch):
        self.torch, self.lib = torch, ctypes.CDLL(library)
        self.lib.tkv_get_status_text.restype = self.lib.tkvcu_get_last_error.restype = ctypes.c_char_p
        self.lib.tkvcu_get_last_error.argtypes = self.lib.tkvcu_destroy.argtypes = [ctypes.c_void_p]
        self.cu = ctypes.c_void_p()
        cfg, reason = ctypes.create_string_buffer(CONFIG_BYTES), ctypes.create_string_buffer(REASON_BYTES)
        reason_bytes = ctypes.c_size_t(REASON_BYTES)
        text = text.encode()
        self.check(self.lib.tkv_parse_config(cfg, None, text, ctypes.c_size_t(len(text)), reason, reason_bytes), reason)
        config = Config(ctypes.cast(cfg, ctypes.c_void_p), 0, 0, 1)
        sizes = (ctypes.c_size_t(), ctypes.c_size_t())
        self.check(self.lib.tkvcu_get_required_bytes(ctypes.byref(config), ctypes.byref(sizes[0]), ctypes.byref(sizes[1]),
                                                     reason, reason_bytes), reason)
        self.memory = [torch.empty(n.value, dtype=torch.uint8, device="cuda") for n in sizes]
        self.check(self.lib.tkvcu_create(
            ctypes.byref(config), self.at(self.memory[0]), sizes[0], self.at(self.memory[1]), sizes[1],
            self.stream(), ctypes.byref(self.cu)), reason)

    def close(self):
        self.lib.tkvcu_destroy(self.cu)

    def check(self, status, reason=None):
        if status:
            sentence = reason.value if reason is not None else self.lib.tkvcu_get_last_error(self.cu)
            raise RuntimeError("%s: %s" % (self.lib.tkv_get_status_text(status).decode(), sentence.decode()))

    def at(self, tensor):
        assert tensor.is_contiguous()
        return ctypes.c_void_p(tensor.data_ptr())

    def type_of(self, tensor):
        return {self.torch.float32: F32, self.torch.float16: F16, self.torch.bfloat16: BF16}[tensor.dtype]

    def stream(self):
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)

    def append(self, layer, k, v):
        """Appends up to 64 tokens. k, v: [sequence][token][KV head][channel], keys after RoPE."""
        self.check(self.lib.tkvcu_append(self.cu, layer, self.at(k), self.at(v), self.type_of(k), k.shape[1], None,
                                         self.stream()))

    def attend(self, layer, q):
        """Attends with the queries of the last tokens. q and result: [sequence][query][head][channel]."""
        out = self.torch.empty_like(q)
        self.check(self.lib.tkvcu_attend(self.cu, layer, self.at(q), self.type_of(q), q.shape[1], None,
                                         self.at(out), None, None, self.stream()))
        return out

    def flags(self):
        """Returns the device's error flags, TKVCU_FLAG_ in tieredkv_cuda.cu. Waits."""
        flags = self.torch.zeros(1, dtype=self.torch.int32, device="cuda")
        self.check(self.lib.tkvcu_get_flags(self.cu, self.at(flags), 0, self.stream()))
        return int(flags.item())


TEXT = """
model.n_layers = %d
model.n_heads = %d
model.n_kv_heads = %d
model.head_dim = %d
limits.max_seqs = 2
limits.max_tokens = 4096
format.allocation_unit = 16
"""


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
    cache = Cache(library, TEXT % (layers, heads, kv_heads, dim), torch)
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
    print("%d tokens of 2 sequences; attention differs from exact FP16 by %.3f of its size; error flags: %d" %
          (tokens, error, cache.flags()))
    cache.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
