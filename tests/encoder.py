#!/usr/bin/env python3
"""A second encoder and decoder of the formats, from the byte diagrams in src/tile.h, src/format_exact.h and
src/format_kivi.h, so that a mistake in the C code is not repeated here. Needs numpy.

    python3 tests/encoder.py --golden > tests/golden.h     the golden blocks of tests/test_format.c
    python3 tests/encoder.py --anchors                     error of min/max coding of N(0,1), simulated

A block is an array [token][channel] of float32, 1..64 tokens, 1..256 channels.
"""
import sys

import numpy as np

# name: number in tkv_format, bits of a code (a value, for exact formats), exact or not
FORMATS = {
    "f32": (1, 32, True),
    "f16": (2, 16, True),
    "bf16": (3, 16, True),
    "q8": (4, 8, False),
    "kivi4": (5, 4, False),
    "kivi3": (6, 3, False),
    "kivi2": (7, 2, False),
}
K, V = 0, 1
TOKENS = 64
F16_MAX = 65504.0


def round_up(n, to):
    return -(-n // to) * to


def to_f16(x):
    """Bits of the nearest halves, ties to even, saturated."""
    return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16).view(np.uint16)


def from_f16(bits):
    return bits.view(np.float16).astype(np.float64)


def to_bf16(x):
    """By arithmetic: a multiple of the last place, ties to even, saturated."""
    x = np.asarray(x, np.float32).astype(np.float64)
    exponent = np.maximum(np.frexp(x)[1], -125)  # x = m * 2^exponent, m in [0.5, 1)
    place = np.ldexp(1.0, exponent - 8)
    largest = (2.0 - 2.0**-7) * 2.0**127
    near = np.clip(np.rint(x / place) * place, -largest, largest).astype(np.float32)
    return (np.copysign(near, x).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Side:
    """Sizes of one side of one head's block, and where its codes stand."""

    def __init__(self, name, which, dim, group=64):
        self.number, self.bits, self.exact = FORMATS[name]
        self.name, self.which, self.dim, self.group = name, which, dim, group
        self.pad = round_up(dim, 16)
        if self.exact:
            self.groups = 0
            self.code_bytes = self.pad * TOKENS * self.bits // 8
            self.meta_shape = (0, 0)
        else:
            self.groups = TOKENS // group if which == K else round_up(dim, group) // group
            tiles = self.pad // 4
            self.code_bytes = tiles * {2: 64, 3: 64, 4: 128, 8: 256}[self.bits]
            if self.bits == 3:
                self.code_bytes += round_up(tiles, 2) // 2 * 64
            self.meta_shape = (self.groups, self.pad if which == K else TOKENS)
        self.meta_bytes = 2 * 2 * self.meta_shape[0] * self.meta_shape[1]
        self.bytes = round_up(self.code_bytes, 64) + round_up(self.meta_bytes, 64)

    def place(self, bit):
        """Byte offset, and bit number in it, of one bit of the codes, as arrays [token][channel]."""
        token, channel = np.indices((TOKENS, self.pad))
        if self.which == K:  # lanes are tokens, four neighbouring channels are reduced
            tile, plane, lane, reduced = channel // 4, token // 16, token % 16, channel % 4
        else:  # lanes are channels, four neighbouring tokens are reduced
            tile, plane = channel // 16 * 4 + token // 16, token % 16 // 4
            lane, reduced = channel % 16, token % 4
        byte = 4 * lane + reduced
        if self.bits == 3 and bit == 2:  # the top bits stand together behind all tiles, two tiles to a vector
            return self.pad // 4 * 64 + tile // 2 * 64 + byte, tile % 2 * 4 + plane
        if self.bits <= 3:  # four planes in a byte
            return tile * 64 + byte, 2 * plane + bit
        if self.bits == 4:  # two planes in a byte
            return tile * 128 + plane // 2 * 64 + byte, plane % 2 * 4 + bit
        return tile * 256 + plane * 64 + byte, np.full_like(token, bit)


def code_group(x, bits):
    """Codes, scale bits and zero bits of one group of float32 values."""
    top = np.float32(2**bits - 1)
    x = np.clip(x, np.float32(-F16_MAX), np.float32(F16_MAX))
    low, high = x[np.argmin(x)], x[np.argmax(x)]  # of equal ones, such as 0 and -0, the first
    scale_bits, zero_bits = to_f16((high - low) / top), to_f16(low + np.float32(0))
    scale, zero = np.float32(from_f16(scale_bits)), np.float32(from_f16(zero_bits))
    if scale == 0:
        return np.zeros(x.shape, np.uint8), scale_bits, zero_bits
    codes = np.rint(np.clip((x - zero) / scale, np.float32(0), top))
    return codes.astype(np.uint8), scale_bits, zero_bits


def encode(side, x):
    x = np.ascontiguousarray(x, np.float32)
    n = len(x)
    assert 1 <= n <= TOKENS and x.shape == (n, side.dim)
    out = np.zeros(side.bytes, np.uint8)
    if side.exact:
        whole = np.zeros((TOKENS, side.pad), np.float32)
        whole[:n, : side.dim] = x
        bits = {"f32": lambda v: v.view(np.uint32), "f16": to_f16, "bf16": to_bf16}[side.name](whole)
        return bits.astype(bits.dtype.newbyteorder("<")).tobytes()  # [token][channel]

    codes = np.zeros((TOKENS, side.pad), np.uint8)
    scale = np.zeros(side.meta_shape, np.uint16)
    zero = np.zeros(side.meta_shape, np.uint16)
    for g in range(side.groups):
        first, end = g * side.group, (g + 1) * side.group
        if side.which == K:
            for c in range(side.dim if first < n else 0):
                group = code_group(x[first:end, c], side.bits)
                codes[first : min(end, n), c], scale[g, c], zero[g, c] = group
        else:
            for t in range(n):
                group = code_group(x[t, first:end], side.bits)
                codes[t, first : min(end, side.dim)], scale[g, t], zero[g, t] = group
    for bit in range(side.bits):
        byte, at = side.place(bit)
        np.bitwise_or.at(out, byte, ((codes >> bit & 1) << at).astype(np.uint8))
    meta = np.concatenate([scale.ravel(), zero.ravel()]).astype("<u2").tobytes()
    out[side.code_bytes : side.code_bytes + side.meta_bytes] = np.frombuffer(meta, np.uint8)
    return out.tobytes()


def decode(side, data, n):
    data = np.frombuffer(data, np.uint8)
    if side.exact:
        rows = data.view("<u4" if side.bits == 32 else "<u2").reshape(TOKENS, side.pad)[:n, : side.dim]
        bits = rows.astype(np.uint32 if side.bits == 32 else np.uint16)
        if side.name == "f16":
            return from_f16(bits).astype(np.float32)
        return (bits if side.bits == 32 else bits.astype(np.uint32) << 16).view(np.float32)

    codes = np.zeros((TOKENS, side.pad), np.int64)
    for bit in range(side.bits):
        byte, at = side.place(bit)
        codes |= (data[byte].astype(np.int64) >> at & 1) << bit
    meta = data[side.code_bytes : side.code_bytes + side.meta_bytes].view("<u2").astype(np.uint16)
    scale, zero = from_f16(meta).reshape(2, *side.meta_shape)
    if side.which == K:
        scale, zero = (np.repeat(m, side.group, axis=0) for m in (scale, zero))
    else:
        scale, zero = (np.repeat(m, side.group, axis=0)[: side.dim].T for m in (scale, zero))
    # exact in double, so that this is the one rounding
    return (scale[:n, : side.dim] * codes[:n, : side.dim] + zero[:n, : side.dim]).astype(np.float32)


# ---- golden blocks


def golden_input(seed, n, dim):
    """Numbers that C makes too, golden_value in test_format.c: integers, then a power of two."""
    index = np.arange(n * dim, dtype=np.uint64) + np.uint64(1000003 * seed + 1)
    mask = np.uint64(0xFFFFFFFF)
    h = index * np.uint64(2654435761) & mask
    h ^= h >> np.uint64(16)
    h = h * np.uint64(2246822519) & mask
    h ^= h >> np.uint64(13)
    channel = np.arange(n * dim) % dim
    v = (h >> np.uint64(8) & np.uint64(0xFFFF)).astype(np.int64) - 32768
    v = np.where(h % np.uint64(97) == 0, 16 * v, v)  # outliers
    v = np.where(h % np.uint64(101) == 0, 0, v)
    v += np.where(channel % 7 == 3, 300000, 0)  # the bias of some keys
    return np.ldexp(v.astype(np.float64), -(9 + channel % 5)).astype(np.float32).reshape(n, dim)


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def decoded_bytes(side, data, n):
    return decode(side, data, n).astype("<f4").tobytes()


def golden():
    shapes = [(64, 64), (33, 40), (80, 23), (128, 64), (256, 1)]
    hashed, whole = [], []
    seed = 0
    for name in FORMATS:
        for which in (K, V):
            for group in (64,) if FORMATS[name][2] else (64, 32):
                for dim, n in shapes:
                    seed += 1
                    side = Side(name, which, dim, group)
                    data = encode(side, golden_input(seed, n, dim))
                    hashed.append((seed, side, n, data))
    for name, group, n in [("kivi2", 64, 64), ("kivi3", 32, 64), ("kivi4", 32, 37), ("q8", 64, 9)]:
        for which in (K, V):
            seed += 1
            side = Side(name, which, 5, group)
            whole.append((seed, side, n, encode(side, golden_input(seed, n, 5))))

    def head(seed, side, n, data):
        return "%d, TKV_%s, TKV_%s, %d, %d, %d, %d, 0x%016xu, 0x%016xu" % (
            seed, side.name.upper(), "KV"[side.which], side.dim, side.group, n, len(data), fnv(data),
            fnv(decoded_bytes(side, data, n)))

    lines = [
        "/* Generated: python3 tests/encoder.py --golden > tests/golden.h */",
        "/* clang-format off */",
        "#ifndef TKV_GOLDEN_H",
        "#define TKV_GOLDEN_H",
        "",
        "/* The input is made from the seed by golden_value in test_format.c. Hashes are 64-bit FNV-1a: of",
        " * the block's bytes, and of the decoded floats as little-endian bytes. If they change, blocks that",
        " * somebody has kept can no longer be read. */",
        "typedef struct golden_block {",
        "    int seed;",
        "    tkv_format format;",
        "    tkv_side side;",
        "    int head_dim, group_size, n_tokens;",
        "    size_t size;",
        "    uint64_t encoded, decoded;",
        "} golden_block;",
        "",
        "static const golden_block golden_hashed[] = {",
    ]
    lines += ["    {%s}," % head(*block) for block in hashed]
    lines += ["};", "", "/* These with all their bytes, one after the other. */"]
    lines += ["static const golden_block golden_whole[] = {"]
    lines += ["    {%s}," % head(*block) for block in whole]
    lines += ["};", "", "static const uint8_t golden_bytes[] = {"]
    data = b"".join(block[3] for block in whole)
    lines += ["    " + " ".join("%d," % b for b in data[i : i + 20]) for i in range(0, len(data), 20)]
    lines += ["};", "", "#endif /* TKV_GOLDEN_H */"]
    print("\n".join(lines))


def anchors():
    """Mean squared error of ideal min/max coding (no fp16) of Gaussian groups, variance one."""
    rng = np.random.default_rng(1)
    for group in (32, 64, 128):
        line = []
        for bits in (2, 3, 4, 8):
            total, rounds = 0.0, 40
            for _ in range(rounds):
                x = rng.standard_normal((20000, group))
                low = x.min(axis=1, keepdims=True)
                step = (x.max(axis=1, keepdims=True) - low) / (2**bits - 1)
                total += np.mean((np.rint((x - low) / step) * step + low - x) ** 2)
            line.append("%d bits %.6g" % (bits, total / rounds))
        print("groups of %d: %s" % (group, ", ".join(line)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--golden"]:
        golden()
    elif sys.argv[1:] == ["--anchors"]:
        anchors()
    else:
        sys.exit(__doc__)
