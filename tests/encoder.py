#!/usr/bin/env python3
"""A second encoder and decoder of the formats, from the comments at the top of src/core/tile.h, formats/exact.h,
formats/kivi.h, formats/a.h, formats/r.h, core/log_scale.h and core/rotate.h, so that a mistake in the C code is not
repeated here. Needs numpy.

    python3 tests/encoder.py --golden > tests/golden.h     the golden blocks of tests/test_format.c
    python3 tests/encoder.py --anchors                     error of min/max coding of N(0,1), simulated

A block is an array [token][channel] of float32, 1..64 tokens, 1..256 channels.
"""
import functools
import hashlib
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
# name: number in tkv_format, the side it stores, quarter bits of a value on average
SHARED = {
    "a40": (8, K, 16),
    "a35": (9, K, 14),
    "a30": (10, K, 12),
    "a275": (11, K, 11),
    "a25": (12, K, 10),
    "a225": (13, K, 9),
    "a20": (14, K, 8),
    "a175": (15, K, 7),
    "a15": (16, K, 6),
    "r40": (17, V, 16),
    "r30": (18, V, 12),
    "r20": (19, V, 8),
    "r15": (20, V, 6),
    "r10": (21, V, 4),
}
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


LOW_BITS = {1: 0, 2: 2, 3: 3, 4: 4, 5: 4, 6: 4, 8: 8}  # of the first part; 6 has two more, 1 and 5 one


class Tiles:
    """Where the codes of tiles of these widths stand. Codes are arrays [token][lane], four lanes to a tile
    of K, 16 lanes to four tiles of V."""

    def __init__(self, which, widths):
        self.which = which
        self.widths = np.array(sorted(widths, reverse=True), np.int64)
        self.lanes = 4 * len(widths)
        self.at = 32 * (np.cumsum(self.widths) - self.widths)
        self.bytes = round_up(32 * int(self.widths.sum()), 64)

    @functools.lru_cache(maxsize=None)
    def place(self, bit):
        """Byte offset, bit number in it and whether it exists, of one bit of the codes."""
        token, lane = np.indices((TOKENS, self.lanes))
        if self.which == K:  # tokens are lanes of the tile, four neighbouring channels are reduced
            tile, plane, j = lane // 4, token // 16, 4 * (token % 16) + lane % 4
        else:  # channels are, four neighbouring tokens are reduced
            tile, plane = lane // 16 * 4 + token // 16, token % 16 // 4
            j = 4 * (lane % 16) + token % 4
        width = self.widths[tile]
        low = np.array([LOW_BITS.get(w, 0) for w in range(9)])[width]
        per = 8 // np.maximum(low, 1)  # planes in a byte
        second, k = j // 32, j % 32  # half of the plane, byte in it
        start = self.at[tile]
        cases = [(width == 3) & ((plane == 2) | ((plane == 3) & (bit == 2))), (width == 3) & (plane == 3),
                 bit < low, width == 6]  # else the part of one bit: widths 1 and 5
        byte = start + np.select(cases, [64 + k, j, plane // per * 64 + j, 128 + j], np.where(width == 5, 128, 0) + k)
        at = np.select(cases, [np.where(plane == 2, 3 * second + bit, 6 + second), 6 + bit,
                               plane % per * low + bit, 2 * plane + bit - 4], 4 * second + plane)
        return byte, at, bit < width

    def pack(self, codes, out):
        for bit in range(int(self.widths.max(initial=0))):
            byte, at, there = self.place(bit)
            assert not np.any(codes[:, : self.lanes] >> np.maximum(self.widths.repeat(4), 1) > 0)
            np.bitwise_or.at(out, byte[there], ((codes >> bit & 1) << at)[there].astype(np.uint8))

    def unpack(self, data):
        codes = np.zeros((TOKENS, self.lanes), np.int64)
        for bit in range(int(self.widths.max(initial=0))):
            byte, at, there = self.place(bit)
            codes[there] |= (data[byte[there]].astype(np.int64) >> at[there] & 1) << bit
        return codes


class Share:
    """What a table says of a head. K: widths of tiles; order, mean, importance by position; whether V is inside it.
    V: half bits. Both: top."""

    def __init__(self, top=8, widths=(), order=None, mean=None, half_bits=0, importance=None, viewed=False):
        self.top, self.widths, self.half_bits = top, widths, half_bits
        self.order, self.mean, self.importance, self.viewed = order, mean, importance, viewed


class Side:
    """Sizes of one side of one head's block, and where its codes stand."""

    def __init__(self, name, which, dim, group=64, share=None):
        self.name, self.which, self.dim, self.group = name, which, dim, group
        self.pad = round_up(dim, 16)
        self.shared = name in SHARED
        if self.shared:
            self.number, side, quarters = SHARED[name]
            assert side == which
            self.exact = False
            self.share = share or equal_share(which, quarters, dim)
            if which == K:
                self.tiles = Tiles(K, self.share.widths)
                self.has_outlier = not self.share.viewed
                self.meta_bytes = (2 + self.has_outlier) * self.pad
            else:
                self.tiles = Tiles(V, rotated_widths(self.pad, self.share.half_bits))
                self.meta_bytes = TOKENS
            self.code_bytes = self.tiles.bytes
        else:
            self.number, self.bits, self.exact = FORMATS[name]
            if self.exact:
                self.groups = 0
                self.code_bytes = self.pad * TOKENS * self.bits // 8
                self.meta_shape = (0, 0)
            else:
                self.groups = TOKENS // group if which == K else round_up(dim, group) // group
                self.tiles = Tiles(which, [self.bits] * (self.pad // 4))
                self.code_bytes = self.tiles.bytes
                self.meta_shape = (self.groups, self.pad if which == K else TOKENS)
            self.meta_bytes = 2 * 2 * self.meta_shape[0] * self.meta_shape[1]
        self.bytes = round_up(self.code_bytes, 64) + round_up(self.meta_bytes, 64)


def code_groups(x, bits):
    """Codes, scale bits and zero bits of groups of float32 values, a row each."""
    top = np.float32(2**bits - 1)
    x = np.clip(x, np.float32(-F16_MAX), np.float32(F16_MAX))
    rows = np.arange(len(x))
    low, high = x[rows, np.argmin(x, axis=1)], x[rows, np.argmax(x, axis=1)]  # 0 or -0: the first
    scale_bits, zero_bits = to_f16((high - low) / top), to_f16(low + np.float32(0))
    scale, zero = (from_f16(b).astype(np.float32)[:, None] for b in (scale_bits, zero_bits))
    codes = np.rint(np.clip((x - zero) / np.where(scale == 0, np.float32(1), scale), np.float32(0), top))
    return np.where(scale == 0, 0, codes).astype(np.uint8), scale_bits, zero_bits


def encode(side, x):
    x = np.ascontiguousarray(x, np.float32)
    n = len(x)
    assert 1 <= n <= TOKENS and x.shape == (n, side.dim)
    out = np.zeros(side.bytes, np.uint8)
    if side.shared:
        (encode_a if side.which == K else encode_r)(side, x, out)
        return out.tobytes()
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
        if side.which == K and first < n:
            group, scale[g, : side.dim], zero[g, : side.dim] = code_groups(x[first:end].T, side.bits)
            codes[first : min(end, n), : side.dim] = group.T
        elif side.which == V:
            group, scale[g, :n], zero[g, :n] = code_groups(x[:, first:end], side.bits)
            codes[:n, first : min(end, side.dim)] = group
    side.tiles.pack(codes, out)
    meta = np.concatenate([scale.ravel(), zero.ravel()]).astype("<u2").tobytes()
    out[side.code_bytes : side.code_bytes + side.meta_bytes] = np.frombuffer(meta, np.uint8)
    return out.tobytes()


def decode(side, data, n):
    data = np.frombuffer(data, np.uint8)
    if side.shared:
        return (decode_a if side.which == K else decode_r)(side, data)[:n]
    if side.exact:
        rows = data.view("<u4" if side.bits == 32 else "<u2").reshape(TOKENS, side.pad)[:n, : side.dim]
        bits = rows.astype(np.uint32 if side.bits == 32 else np.uint16)
        if side.name == "f16":
            return from_f16(bits).astype(np.float32)
        return (bits if side.bits == 32 else bits.astype(np.uint32) << 16).view(np.float32)

    codes = side.tiles.unpack(data)
    meta = data[side.code_bytes : side.code_bytes + side.meta_bytes].view("<u2").astype(np.uint16)
    scale, zero = from_f16(meta).reshape(2, *side.meta_shape)
    if side.which == K:
        scale, zero = (np.repeat(m, side.group, axis=0) for m in (scale, zero))
    else:
        scale, zero = (np.repeat(m, side.group, axis=0)[: side.dim].T for m in (scale, zero))
    # exact in double, so that this is the one rounding
    return (scale[:n, : side.dim] * codes[:n, : side.dim] + zero[:n, : side.dim]).astype(np.float32)


# ---- logarithmic scales and the rotation. Floats are np.float32, so that each operation rounds to one.

F = np.float32
D = np.float64
LOG_MANTISSA = [round(1024 * 2 ** (i / 16)) for i in range(16)]
LOG_BORDER = [round(2**23 * (2 ** ((2 * i + 1) / 32) - 1)) for i in range(16)]


def log_code(scale, top):
    if not scale > 0:
        return 0
    bits = int(F(scale).view(np.uint32))
    octave = (bits >> 23) - 127 - (top - 16)
    return min(max(1 + 16 * octave + sum(bits & 0x7FFFFF >= b for b in LOG_BORDER), 1), 255)


def log_value(code, top):
    if code == 0:
        return F(0)
    octave, step = divmod(int(code) - 1, 16)
    return F(np.ldexp(LOG_MANTISSA[step] / 1024, top - 16 + octave))


def rotation_signs():
    """True: the channel changes its sign."""
    digest = np.frombuffer(hashlib.sha256(b"tieredkv").digest(), np.uint8)
    return np.unpackbits(digest, bitorder="little").astype(bool)


def hadamard(y):
    """Of rows of 2^k values, in place; normalised."""
    n, h = y.shape[1], 1
    while h < n:
        pairs = y.reshape(len(y), n // (2 * h), 2, h)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        y = np.stack([a + b, a - b], axis=2).reshape(len(y), n)
        h *= 2
    return y * F(1 / np.sqrt(D(n)))


def rotate(x, back=False):
    y = np.array(x, F)
    dim = y.shape[1]
    n = 1 << dim.bit_length() - 1
    windows = [slice(0, n)] + ([slice(dim - n, dim)] if n < dim else [])
    sign = np.where(rotation_signs()[:dim], F(-1), F(1))
    if not back:
        y *= sign
    for w in windows[::-1] if back else windows:
        y[:, w] = hadamard(y[:, w])
    return y * sign if back else y


# ---- A: allocated keys

A_UNIT = {1: 8, 2: 8, 3: 8, 4: 8, 5: 8, 6: 4}
A_CUTS = {
    1: (0, 384, 768, 1152, 1536),
    2: (0, 300, 600, 900, 1200),
    3: (0, 200, 400, 650, 900),
    4: (0, 120, 260, 420, 600),
    5: (0, 80, 160, 260, 400),
    6: (0, 60, 120, 200, 300),
}
GAINS = (-22, -63, -112, -169, -223, -277)  # of a bit more, by width


def equal_share(which, quarters, dim):
    """Without a table. K: bit by bit to the tile where it saves most; of equals the narrowest, the first."""
    if which == V:
        return Share(half_bits=quarters // 2)
    pad = round_up(dim, 16)
    tiles = round_up(dim, 4) // 4
    row = round_up(3 * pad, 64) - round_up(2 * pad, 64)
    budget = max(2, (2 * (quarters * 4 * tiles - pad) - row) // 32)
    score = [4 * round(8 * float(np.log2(min(4, dim - 4 * i) / 4))) for i in range(tiles)]  # 1/32 octave
    steps = sorted((-score[i] - GAINS[b], b, i) for i in range(tiles) for b in range(6))[:budget]
    widths = [sum(i == tile for _, _, i in steps) for tile in range(tiles)]
    return Share(widths=[w for w in widths if w])


def a_column(x, width, top):
    """Codes, and the two bytes of metadata, of one column of residuals."""
    n = len(x)
    x = np.clip(x, F(-1e30), F(1e30))
    low = x.min()
    step = (x.max() - low) * F(1 / 4096)
    inverse = F(1) / step if step > F(1e-36) else F(0)
    if inverse == 0:
        step = F(0)
    u = np.minimum(((x - low) * inverse).astype(np.int64), 4095)
    sum_u = int(u.sum())
    mean = D(low) + D(step) * D(F(2 * sum_u + n) / F(2 * n))
    if width == 0:
        half = int(to_f16(F(mean)))
        return np.zeros(n, np.int64), half & 255, half >> 8

    most = 2**width - 1

    def moments(v):
        """n times the sums of squared deviations and of products with the deviations of u, over the last axis."""
        total = v.sum(axis=-1)
        return (n * (v * v).sum(axis=-1) - total**2).astype(F), (n * (v * u).sum(axis=-1) - total * sum_u).astype(F)

    cut = np.array(A_CUTS[width])[:, None]
    by = 131072 * most // (4096 - 2 * cut)
    tried = np.minimum(((np.maximum(u - cut, 0) * by >> 16) + 1) // 2, most)
    var, cov = moments(tried)
    best = int(np.argmax(np.where(var > 0, cov / np.where(var > 0, var, 1) * cov, 0)))
    codes, var_codes, cov = tried[best], var[best], cov[best]

    unit = A_UNIT[width]
    scale = F(0)
    var = moments(u)[0]
    if cov > 0 and var > 0:
        scale = (np.sqrt(var / var_codes) if width == 1 else var / cov) * step

    def offset_of(scale, middle):
        """With it, codes whose mean is `middle` above the middle one have the column's mean."""
        if not scale > 0:
            return 0
        v = (mean / D(scale) - middle) * D(unit)
        return int(min(max(v, D(-128)), D(128)) + D(1000.5)) - 1000

    def middle_of(codes):
        return D(2 * int(codes.sum()) - n * most) / D(2 * n)

    log = log_code(scale, top)
    offset = offset_of(log_value(log, top), middle_of(codes))
    if (log == 0 and mean != 0) or abs(offset) > 127:  # too far from the static mean: a larger scale
        log = max(log, log_code(F(abs(mean) * D(unit) / D(120)), top))
        scale = log_value(log, top)
        offset = min(max(offset_of(scale, D(0.5)), -127), 127)
        value = D(low) + D(step) * (u.astype(F) + F(0.5)).astype(D)
        v = value / D(scale) - D(offset) / D(unit) + D(most) / 2 + D(0.5)
        codes = np.clip(v, D(0), D(most)).astype(np.int64)
        offset = min(max(offset_of(scale, middle_of(codes)), -127), 127)
    return codes, log, offset & 255


def a_widths(side):
    widths = np.zeros(side.pad, np.int64)
    widths[: side.tiles.lanes] = side.tiles.widths.repeat(4)
    return widths


def a_residuals(side, x):
    """[token][position], cut."""
    share = side.share
    order = np.arange(side.pad) if share.order is None else share.order
    out = np.zeros((len(x), side.pad), F)
    with np.errstate(over="ignore"):
        for p in np.flatnonzero(order < side.dim):
            out[:, p] = x[:, order[p]] - (F(0) if share.mean is None else F(share.mean[p]))
    return np.clip(out, F(-1e30), F(1e30))


def log8(x):
    """8 log2 of a float, rounded."""
    bits = int(F(x).view(np.uint32))
    borders = [round(2**23 * (2 ** ((2 * i + 1) / 16) - 1)) for i in range(8)]
    return 8 * ((bits >> 23) - 127) + sum(bits & 0x7FFFFF >= b for b in borders)


def find_outlier(side, residuals):
    """The token that deviates most, or 64."""
    n, importance = len(residuals), side.share.importance
    if n < 2:
        return TOKENS
    scores = np.zeros(n, np.int64)
    for p in range(side.pad):
        rated = 255 if importance is None else int(importance[p])
        low, high = residuals[:, p].min(), residuals[:, p].max()
        step = (high - low) * F(1 / 4096)
        if not step > F(1e-36) or rated == 0:
            continue
        u = np.minimum(((residuals[:, p] - low) * (F(1) / step)).astype(np.int64), 4095)
        total = int(u.sum())
        spread = (n - 1) * (n * int((u * u).sum()) - total**2)
        rest = spread - max(total, 4095 * n - total) ** 2 + spread // 1024
        octaves, sixteenths = divmod(80 + rated - 255 + log8(n - 1) - log8(rest), 16)
        unit = F(np.ldexp(LOG_MANTISSA[sixteenths] / 1024, octaves))
        scores += np.minimum((np.abs(n * u - total).astype(F) * unit).astype(np.int64), 1023) ** 2
    return int(np.argmax(scores)) if scores.any() else TOKENS


def outlier_row(side, residuals, slot):
    """Its bytes. A side without an outlier has a row of zeros."""
    row = residuals[slot] if slot < TOKENS else np.zeros(side.pad, F)
    log = log_code(np.abs(row).max() * F(1 / 61), side.share.top)
    step = log_value(log, side.share.top)
    with np.errstate(over="ignore"):
        twice = (row + row) * (F(1) / step) if step > 0 else np.zeros(side.pad, F)
    codes = (np.minimum(np.abs(twice), F(126)).astype(np.int64) + 1) // 2
    codes = np.where(twice < 0, -codes, codes)
    head = [(slot | log << 7) >> p & 1 for p in range(15)] + [0] * (side.pad - 15)
    return ((codes & 127) << 1 | head).astype(np.uint8)


def encode_a(side, x, out):
    codes = np.zeros((TOKENS, side.tiles.lanes), np.int64)
    meta = out[side.code_bytes : side.code_bytes + 2 * side.pad].reshape(2, side.pad)
    share, widths, residuals = side.share, a_widths(side), a_residuals(side, x)
    if side.has_outlier:
        slot = find_outlier(side, residuals)
        out[side.code_bytes + 2 * side.pad :][: side.pad] = outlier_row(side, residuals, slot)
        if slot < TOKENS:
            residuals[slot] = residuals[slot - 1 if slot else 1]
    for p in range(side.pad):
        channel = p if share.order is None else share.order[p]
        if channel >= side.dim:
            continue
        residual = residuals[:, p]
        column, meta[0, p], meta[1, p] = a_column(residual, int(widths[p]), share.top)
        if widths[p]:
            codes[: len(x), p] = column
    side.tiles.pack(codes, out)


def decode_a(side, data):
    codes = side.tiles.unpack(data)
    meta = data[side.code_bytes : side.code_bytes + 2 * side.pad].reshape(2, side.pad)
    share, widths = side.share, a_widths(side)
    out = np.zeros((TOKENS, side.dim), F)
    for p in range(side.pad):
        channel = p if share.order is None else share.order[p]
        if channel >= side.dim:
            continue
        mean = F(0) if share.mean is None else F(share.mean[p])
        w = int(widths[p])
        if w == 0:
            half = np.array([int(meta[0, p]) | int(meta[1, p]) << 8], np.uint16)
            out[:, channel] = F(from_f16(half)[0]) + mean + F(0)  # and a 0 without a sign
            continue
        scale = log_value(meta[0, p], share.top)
        zero = F(D(scale) * (int(meta[1, p].view(np.int8)) / A_UNIT[w] - (2**w - 1) / 2)) + mean
        out[:, channel] = scale * codes[:, p].astype(F) + zero
    if side.has_outlier:
        row = data[side.code_bytes + 2 * side.pad :][: side.pad]
        head = sum(int(row[p] & 1) << p for p in range(15))
        step = log_value(head >> 7, share.top)
        for p in range(side.pad if head & 127 < TOKENS else 0):
            channel = p if share.order is None else share.order[p]
            if channel < side.dim:
                mean = F(0) if share.mean is None else F(share.mean[p])
                out[head & 127, channel] = F(D(step) * (int(row[p]) // 2 - 128 * (row[p] > 127))) + mean
    return out


# ---- R: rotated values

R_MOST = 2047
R_STEP = {1: 1.5960, 2: 0.9955, 3: 0.5860, 4: 0.3350}
R_POINTS = np.array([(27, 27), (-27, -27), (-78, 78), (78, -78),
                     (32, 127), (127, 32), (-32, -127), (-127, -32)])
R_SINGLE = np.array([-120, -40, 40, 120])


def rotated_widths(pad, half_bits):
    slabs = pad // 16
    if half_bits == 3:  # two slabs are one; the last may have no partner
        return [3] * (slabs // 2 * 4) + [2] * (slabs % 2 * 4)
    return [half_bits // 2] * (slabs * 4)


def encode_r(side, x, out):
    n = len(x)
    dim, pad, half_bits = side.dim, side.pad, side.share.half_bits
    pairs = pad // 32 * 32 if half_bits == 3 else 0
    bits = half_bits // 2 if half_bits != 3 else 2
    y = rotate(np.clip(x, F(-1e30), F(1e30)))
    codes = np.zeros((TOKENS, side.tiles.lanes), np.int64)
    for t in range(n):
        most = min(np.abs(y[t]).max(), F(1e30))
        if not most > F(1e-30):
            continue
        u = np.zeros(pad, np.int64)
        u[:dim] = np.clip((y[t] * (F(R_MOST) / most)).astype(np.int64), -R_MOST, R_MOST)
        squares = max(int((u * u).sum()), 1)
        unit = F(1) / np.sqrt(F(squares) / F(dim))
        code, twice = [], 0
        if pairs:
            ab = np.floor(u[:pairs].astype(F) * (unit * F(16 * F(80.2)))).astype(np.int64)
            grid = u[:pairs].reshape(-1, 2, 16).transpose(0, 2, 1).reshape(-1, 2)
            ab = ab.reshape(-1, 2, 16).transpose(0, 2, 1).reshape(-1, 2)
            best = np.argmax(ab @ R_POINTS.T - 8 * (R_POINTS**2).sum(axis=1), axis=1)
            twice += 2 * int((grid * R_POINTS[best]).sum())
            code.append(best)
        v = np.floor(u[pairs:dim].astype(F) * (unit / F(R_STEP[bits]))).astype(np.int64) + 2 ** (bits - 1)
        v = np.clip(v, 0, 2**bits - 1)
        code.append(v)
        rest = 2 * R_SINGLE[v] if half_bits == 3 else 2 * v - (2**bits - 1)
        twice += int((u[pairs:dim] * rest).sum())
        scale = most / F(R_MOST) * (F(2 * squares) / F(twice))
        out[side.code_bytes + t] = log_code(scale * F(64 if half_bits == 3 else 1), side.share.top)
        if scale > 0:
            code = np.concatenate(code)
            codes[t, : len(code)] = code
    side.tiles.pack(codes, out)


def decode_r(side, data):
    half_bits, pairs = side.share.half_bits, side.pad // 32 * 32
    codes = side.tiles.unpack(data)
    scale = np.array([log_value(b, side.share.top) for b in data[side.code_bytes : side.code_bytes + TOKENS]])
    if half_bits == 3:
        levels = np.zeros((TOKENS, side.pad))
        both = R_POINTS[codes[:, : pairs // 2] & 7]  # [token][lane][2]
        levels[:, :pairs] = both.reshape(TOKENS, -1, 16, 2).transpose(0, 1, 3, 2).reshape(TOKENS, pairs)
        levels[:, pairs:] = R_SINGLE[codes[:, pairs // 2 :] & 3]
        scale, middle = scale / F(64), 0.0
    else:
        levels, middle = codes, (2 ** (half_bits // 2) - 1) / 2
    product = scale[:, None].astype(D) * levels[:, : side.dim]
    return rotate((product + (-middle * scale.astype(D))[:, None]).astype(F), back=True)


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
    for name, (_, which, _) in SHARED.items():
        for dim, n in shapes:
            seed += 1
            side = Side(name, which, dim)
            hashed.append((seed, side, n, encode(side, golden_input(seed, n, dim))))
    for name, dim, n in [("a25", 22, 64), ("a20", 5, 37), ("r15", 40, 64), ("r30", 5, 9)]:
        seed += 1
        side = Side(name, SHARED[name][1], dim)
        whole.append((seed, side, n, encode(side, golden_input(seed, n, dim))))

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
