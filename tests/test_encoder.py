#!/usr/bin/env python3
"""Compares tkv_encode_block and tkv_decode_block byte for byte and bit for bit with the encoder of tests/encoder.py.

    python3 tests/test_encoder.py [--seed=N] [--cases=N] [compiler flags]

Cases go through a small C program, so that CC may be a cross compiler: RUNNER="qemu-s390x" runs it. A failing
case prints what makes it again. Under flags such as -ffast-math the bytes may differ: see test_format.c.
"""
import contextlib
import io
import os
import shlex
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not here")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from encoder import FORMATS, K, SHARED, TOKENS, V, Share, Side, decode, encode, golden, round_up

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Reads cases of little-endian words from stdin: format, side, head_dim, group, tokens, stride, whether there
# is a share, and if so its tiles of widths 1..8, half bits, top + 1000, whether V is inside K, and order,
# mean and importance at each position; the floats.
# Writes per case: size and two statuses, the block, the decoded floats. With a share the block comes from the
# best kernels here, and the first status says whether the scalar ones agree.
PROGRAM = r"""
#include "white.h"
#include <stdio.h>
#include <stdlib.h>

static int get(uint32_t *u) {
    unsigned char b[4];
    if (fread(b, 1, 4, stdin) != 4) return 0;
    *u = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    return 1;
}

static void put(uint32_t u) {
    unsigned char b[4];
    int i;
    for (i = 0; i < 4; i++) b[i] = (unsigned char)(u >> 8 * i & 0xff);
    fwrite(b, 1, 4, stdout);
}

static uint32_t in[64 * 512], out[64 * 256];
static float x[64 * 512], y[64 * 256];

static int get_share(tkvi_share *s, int pad) {
    static uint8_t order[TKV_MAX_HEAD_DIM];
    static float mean[TKV_MAX_HEAD_DIM];
    static uint8_t importance[TKV_MAX_HEAD_DIM];
    uint32_t u;
    int i;
    memset(s, 0, sizeof *s);
    for (i = 1; i <= TKVI_MAX_WIDTH; i++) {
        if (!get(&u)) return 0;
        s->tiles.n[i] = (uint16_t)u;
    }
    if (!get(&u)) return 0;
    s->half_bits = (int)u;
    if (!get(&u)) return 0;
    s->top = (int)u - 1000;
    if (!get(&u)) return 0;
    s->v_in_k = (int)u;
    for (i = 0; i < pad; i++) {
        if (!get(&u)) return 0;
        order[i] = (uint8_t)u;
    }
    for (i = 0; i < pad; i++) {
        if (!get(&u)) return 0;
        mean[i] = tkvi_from_bits(u);
    }
    for (i = 0; i < pad; i++) {
        if (!get(&u)) return 0;
        importance[i] = (uint8_t)u;
    }
    s->order = order;
    s->mean = mean;
    s->importance = importance;
    return 1;
}

int main(void) {
    uint32_t h[7], i;
    while (get(&h[0])) {
        tkv_codec c;
        size_t size;
        unsigned char *dst;
        tkv_status encoded, decoded;
        tkvi_share share;
        memset(&c, 0, sizeof c);
        for (i = 1; i < 7; i++)
            if (!get(&h[i])) return 1;
        if (h[4] > 64 || h[5] > 512 || h[2] > 256) return 1;
        if (h[6] && !get_share(&share, tkvi_round_up((int)h[2], 16))) return 1;
        for (i = 0; i < h[4] * h[5]; i++)
            if (!get(&in[i])) return 1;
        memcpy(x, in, sizeof x);
        memset(y, 0, sizeof y);
        if (h[6]) {
            tkvi_side s;
            unsigned char *again;
            tkvi_side_init(&s, &tkvi_formats[h[0]], (tkv_side)h[1], (int)h[2], 64, TKVI_BLOCK, &share);
            dst = (unsigned char *)malloc(2 * s.bytes);
            if (!dst) return 1;
            again = dst + s.bytes;
            memset(dst, 0xa5, 2 * s.bytes);
            tkvi_encode_side(&s, tkvi_kernels_for(TKV_ISA_AUTO)->simd_ops, x, h[5], (int)h[4], dst);
            tkvi_encode_side(&s, &tkvi_simd_ops_scalar, x, h[5], (int)h[4], again);
            size = s.bytes;
            encoded = (tkv_status)-(memcmp(dst, again, size) != 0);
            decoded = TKV_OK;
            tkvi_decode_side(&s, dst, 0, (int)h[4], y, h[2]);
        } else {
            c.format = (tkv_format)h[0];
            c.side = (tkv_side)h[1];
            c.head_dim = (int)h[2];
            c.options.group_size = (int)h[3];
            size = tkv_get_block_bytes(&c);
            dst = (unsigned char *)malloc(size + 1);
            if (!dst) return 1;
            memset(dst, 0xa5, size + 1);
            encoded = tkv_encode_block(&c, x, (ptrdiff_t)h[5], (int)h[4], dst, size);
            decoded = tkv_decode_block(&c, dst, size, (int)h[4], y, 0);
        }
        memcpy(out, y, sizeof out);
        put((uint32_t)size);
        put((uint32_t)encoded);
        put((uint32_t)decoded);
        fwrite(dst, 1, size, stdout);
        for (i = 0; i < h[4] * h[2]; i++) put(out[i]);
        free(dst);
    }
    return 0;
}
"""


def outliers(r, x):
    x[r.random(x.shape) < 0.02] *= 16
    return x


def denormal(r, x):
    return np.ldexp(x, r.integers(-150, -20, x.shape))


def large(r, x):
    return x * np.where(r.random(x.shape) < 0.3, 60000, 1)


def zeros(r, x):
    return np.where(r.random(x.shape) < 0.7, np.where(r.random(x.shape) < 0.5, 0.0, -0.0), x)


def ties(r, x):
    """Halves of a power-of-two step above a half-precision minimum, so that many codes are exact ties."""
    top = int(r.choice([3, 7, 15, 255]))
    y = r.integers(0, 2 * top + 1, x.shape) * 0.5
    y[0, :] = y[:, 0] = 0
    y[-1, :] = y[:, -1] = top
    return np.ldexp(y, int(r.integers(-6, 4))) + int(r.integers(-8, 8))


def half_ties(r, x):
    """Values in the middle of two halves: scale and zero are ties."""
    h = r.integers(0, 0x7BFF, x.shape).astype(np.uint16)
    low = h.view(np.float16).astype(np.float64)
    high = (h + np.uint16(1)).astype(np.uint16).view(np.float16).astype(np.float64)
    return (low + high) / 2 * np.where(r.random(x.shape) < 0.5, 1, -1)


def float_bits(r, x):
    """Any finite float."""
    u = r.integers(0, 2**32, x.shape, dtype=np.uint64).astype(np.uint32)
    u = np.where((u & 0x7F800000) == 0x7F800000, u & np.uint32(0x807FFFFF), u).astype(np.uint32)
    return u.view(np.float32)


KINDS = {
    "gaussian": lambda r, x: x,
    "uniform": lambda r, x: r.random(x.shape) * 2 - 1,
    "outliers": outliers,
    "bias": lambda r, x: x + 600 * np.sign(r.standard_normal(x.shape[1])),
    "flat": lambda r, x: np.full(x.shape, r.choice([0.42, -1, 5, 600, 70000, -1e-9])),
    "flat rows": lambda r, x: np.repeat(x[:, :1], x.shape[1], axis=1),
    "flat columns": lambda r, x: np.repeat(x[:1], x.shape[0], axis=0),
    "tiny range": lambda r, x: r.choice([-1, 0.3, 600]) + x * 10.0 ** r.integers(-9, -2),
    "denormal": denormal,
    "large": large,
    "zeros": zeros,
    "ties": ties,
    "half ties": half_ties,
    "float bits": float_bits,
    "uneven columns": lambda r, x: np.round(3 * x**3) * (r.random(x.shape[1]) < 0.8) + np.where(
        r.random(x.shape[1]) < 0.2, 1, 0.125) * x,
    "heavy tails": lambda r, x: r.standard_t(1.5, x.shape),
    "two values": lambda r, x: np.where(x > 1, 7.0, -0.25) * np.sign(x[:1]),
    "nothing": lambda r, x: np.zeros(x.shape),
    "huge": lambda r, x: x * 10.0 ** r.uniform(4, 36),
    "tiny": lambda r, x: x * 10.0 ** r.uniform(-44, -10),
    "scales": lambda r, x: x * 10.0 ** r.uniform(-4, 4, x.shape[1]),
}


def make_share(r, which, dim, x):
    """Anything that a table may say: widths, an order with what is no channel last, means, importance, a window for x."""
    pad = round_up(dim, 16)
    tiles = r.integers(0, pad // 4 + 1) if r.random() < 0.3 else pad // 4
    widths = r.integers(int(r.integers(0, 2)), int(r.integers(2, 8)), tiles)
    order = np.concatenate([r.permutation(dim), np.arange(dim, pad)])
    means = x.mean(axis=0, dtype=np.float64)[order % dim]
    means += r.choice([0.0, 1.0, 600.0]) * r.standard_normal(pad)
    mean = np.clip(means, -65504, 65504).astype(np.float16).astype(np.float32)
    mean[dim:] = 0
    largest = float(np.abs(x).max())
    top = int(np.frexp(largest)[1] + r.integers(-3, 6)) if r.random() < 0.8 else int(r.integers(-96, 97))
    importance = -np.sort(-r.integers(1, 256, pad))
    importance[dim:] = 0
    return Share(max(-96, min(96, top)), sorted(int(w) for w in widths if w), order, mean,
                 int(r.choice([2, 3, 4, 6, 8])), importance, bool(r.random() < 0.2))


def make_case(seed, name, which, dim, group, n, kind, share=False):
    r = np.random.default_rng(seed)
    stride = dim + int(r.integers(0, 2)) * int(r.integers(0, 100))
    x = KINDS[kind](r, r.standard_normal((n, dim))).astype(np.float32)
    padded = np.full((n, stride), np.float32(np.nan))  # what is beyond the head must not be read
    padded[:, :dim] = x
    said = make_share(r, which, dim, x) if share else None
    return (seed, name, which, dim, group, n, kind, share), x, padded, said


def all_cases(seed, count):
    """Every format with every usual head size, then random ones."""
    r = np.random.default_rng(seed)
    formats, kinds = list(FORMATS), list(KINDS)
    for dim in (16, 48, 64, 80, 96, 112, 128, 192, 256, 1, 2, 15, 17, 31, 33, 65, 127, 255):
        for name in formats:
            for which in (K, V):
                n = TOKENS if r.random() < 0.5 else int(r.integers(1, TOKENS + 1))
                yield make_case(int(r.integers(2**31)), name, which, dim, int(r.choice([64, 32])), n,
                                kinds[int(r.integers(len(kinds)))])
        for name in SHARED:
            for share in (False, True):
                n = TOKENS if r.random() < 0.5 else int(r.integers(1, TOKENS + 1))
                yield make_case(int(r.integers(2**31)), name, SHARED[name][1], dim, 64, n,
                                kinds[int(r.integers(len(kinds)))], share)
    for i in range(count):
        dim = int(r.integers(1, 257)) if i % 4 == 0 else int(r.integers(1, 81))
        n = TOKENS if r.random() < 0.3 else int(r.integers(1, TOKENS + 1))
        name = formats[int(r.integers(0 if i % 3 == 0 else 3, len(formats)))]  # more of those with codes
        yield make_case(int(r.integers(2**31)), name, int(r.integers(2)), dim, int(r.choice([64, 32])), n,
                        kinds[i % len(kinds)])
        name = list(SHARED)[int(r.integers(len(SHARED)))]
        yield make_case(int(r.integers(2**31)), name, SHARED[name][1], dim, 64, n, kinds[i % len(kinds)],
                        i % 3 > 0)


def words(case, padded, share):
    """A case as PROGRAM reads it."""
    _, name, which, dim, group, n, _, _ = case
    number = (SHARED if name in SHARED else FORMATS)[name][0]
    out = struct.pack("<7I", number, which, dim, group, n, padded.shape[1], share is not None)
    if share:
        out += struct.pack("<11I", *(share.widths.count(w) for w in range(1, 9)), share.half_bits,
                           share.top + 1000, share.viewed)
        out += share.order.astype("<u4").tobytes() + share.mean.astype("<f4").tobytes()
        out += share.importance.astype("<u4").tobytes()
    return out + padded.astype("<f4").tobytes()


def build(directory, flags):
    source, program = os.path.join(directory, "blocks.c"), os.path.join(directory, "blocks")
    with open(source, "w") as f:
        f.write(PROGRAM)
    library = [] if flags else shlex.split(os.environ.get("LIBRARY", ""))  # `make test` has compiled it
    command = shlex.split(os.environ.get("CC", "cc")) + ["-O1", "-I", os.path.join(ROOT, "tests")] + flags
    command += [source] + (library or [os.path.join(ROOT, "examples", "tieredkv.c")]) + ["-o", program, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(" ".join(command))
        print(done.stderr)
        return None
    return shlex.split(os.environ.get("RUNNER", "")) + [program]


def first_difference(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return int(np.flatnonzero(a != b)[0]), int(np.count_nonzero(a != b))


def compare(case, x, share, answer, at):
    """What is wrong with one answer, or None; and where the next one begins."""
    _, name, which, dim, group, n, _, _ = case
    side = Side(name, which, dim, group, share)
    size, encoded, decoded = struct.unpack_from("<Iii", answer, at)
    at += 12
    data = np.frombuffer(answer, np.uint8, size, at)
    at += size
    got = np.frombuffer(answer, "<u4", n * dim, at)
    at += 4 * n * dim
    if size != side.bytes:
        return "%d bytes, expected %d" % (size, side.bytes), at
    if encoded or decoded:
        return "statuses %d and %d" % (encoded, decoded), at
    want = np.frombuffer(encode(side, x), np.uint8)
    if not np.array_equal(data, want):
        i, count = first_difference(data, want)
        part = "code" if i < side.code_bytes else "metadata"
        return "%d bytes differ, the first is %s byte %d: 0x%02x, expected 0x%02x" % (
            count, part, i, data[i], want[i]), at
    values = decode(side, want.tobytes(), n).astype("<f4").view("<u4").ravel()
    if not np.array_equal(got, values):
        i, count = first_difference(got, values)
        return "%d values differ, the first is token %d channel %d: 0x%08x, expected 0x%08x" % (
            count, i // dim, i % dim, got[i], values[i]), at
    return None, at


def golden_is_current():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        golden()
    with open(os.path.join(ROOT, "tests", "golden.h")) as f:
        return f.read() == text.getvalue()


def main():
    seed, count, flags = 1, 500, []
    for a in sys.argv[1:]:
        if a.startswith("--seed="):
            seed = int(a[7:])
        elif a.startswith("--cases="):
            count = int(a[8:])
        else:
            flags.append(a)
    passed = failed = 0
    np.seterr(under="ignore", over="ignore", divide="ignore")
    with tempfile.TemporaryDirectory() as directory:
        program = build(directory, flags)
        if not program:
            print("0 passed, 1 failed")
            return 1
        cases = list(all_cases(seed, count))
        query = b"".join(words(case, padded, share) for case, _, padded, share in cases)
        done = subprocess.run(program, input=query, capture_output=True)
    at = 0
    for case, x, _, share in cases:
        try:
            wrong, at = compare(case, x, share, done.stdout, at)
        except (struct.error, ValueError):
            print("the program stopped with status %d before this case: %s" % (done.returncode, (case,)))
            failed += 1
            break
        if wrong:
            failed += 1
            if failed <= 10:
                print("make_case%r: %s" % (case, wrong))
        else:
            passed += 1
    if at != len(done.stdout):
        print("%d bytes of the program's output are left" % (len(done.stdout) - at))
        failed += 1
    if golden_is_current():
        passed += 1
    else:
        print("tests/golden.h is not what tests/encoder.py --golden prints")
        failed += 1
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
