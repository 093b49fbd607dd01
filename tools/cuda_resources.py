#!/usr/bin/env python3
"""Reports what nvcc makes of tieredkv_cuda.cu: registers, spills and resident warps of each kernel, and the instructions
of a key tile (64 tokens of a KV head) in attention, read from the machine code. Needs nvcc and g++, no GPU. Uses the
standard library only.

    python3 tools/cuda_resources.py             all architectures; tables as in bench/GPU.md
    python3 tools/cuda_resources.py --quick     sm_80 and sm_90
    python3 tools/cuda_resources.py --check     only figures with a limit (LIMITS below); exits with 1 if one is exceeded
                                                --ptxas FILE: output of `nvcc -Xptxas -v` for all architectures

How instructions are counted: the tool compiles a kernel with only the loop over key tiles (tkvcu_attend_key_range). Sides
are constants, as the host lays them out. Rare branches are removed (TKVCU_UNLIKELY: a maximum that grows, masks, softcap,
copies of 8-bit sides). The loop over key tiles is the one with matrix products. In it, loops over K's slabs count once per
pair of slabs. Branches between formats are not counted.
Share of issue slots: 132 multiprocessors with 4 schedulers at 1.755 GHz issue 9.27e11 instructions per second. The bytes of
a key tile arrive at 4.3 TB/s.
"""
import concurrent.futures
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ARCHS = [80, 86, 89, 90, 100, 120]
QUICK = [80, 90]
ISSUE = 132 * 4 * 1.755e9  # of an H200
PACE = 4.3e12              # bytes a second

# Registers of a multiprocessor are 65536 everywhere; shared memory in bytes, most warps.
MULTIPROCESSOR = {80: (164 << 10, 64), 86: (100 << 10, 48), 89: (100 << 10, 48), 90: (228 << 10, 64),
                  100: (228 << 10, 64), 120: (100 << 10, 48)}
RESERVED = 1024  # shared memory that the system reserves per thread block

# Plans whose key tiles are counted: name, preset, tier.
PLANS = [("default, archive A30/R30", "balanced", 0), ("default, warm A40/R40", "balanced", 1),
         ("A25/R20", "compact", 0), ("A20/R15", "extreme", 0), ("KIVI-4", "kivi", 1), ("KIVI-2", "kivi", 0)]

# Limits on sm_80 and sm_90: bytes spilled by any kernel, stack of the append kernels. On sm_90: warps per scheduler of
# attention with 4 columns, and the share of issue slots. The share has no limit for the plans of SHARE_FREE.
LIMITS = {"spill": 0, "stack": 0, "warps": 4, "share": 0.75}
SHARE_FREE = {"A20/R15"}

HOST = """
#include "tests/cuda_on_cpu.h"
#include "tieredkv_cuda.cu"
int main(int argc, char **argv) {
    tkv_config cfg = tkv_default_config();
    tkvcu_config config = {&cfg, 0, 0, 1};
    size_t cache, work, shared;
    tkvcu *cu;
    cfg.model.n_layers = 1;
    cfg.model.n_heads = 32;
    cfg.model.n_kv_heads = 8;
    cfg.limits.max_tokens = 4096;
    cfg.format.allocation_unit = 16;
    cfg.model.head_dim = atoi(argv[2]);
    if (argc < 4 || tkv_apply_preset(&cfg, argv[1]) || tkvcu_get_required_bytes(&config, &cache, &work, NULL, 0)) return 1;
    cache = (cache + 255) / 256 * 256;
    if (tkvcu_create(&config, aligned_alloc(256, cache), cache, aligned_alloc(256, (work + 255) / 256 * 256), work,
                     NULL, &cu)) return 1;
    if (!strcmp(argv[3], "threads")) {
        const tkvcu_append_launch a = tkvcu_select_append_kernel(cfg.model.head_dim);
        printf("append %d %zu combine %d 0 truncate %d 0", a.threads, a.shared, TKVCU_COMBINE_THREADS, TKVCU_TRUNCATE_THREADS);
        printf(" prefill1 %d %zu prefill2 %d %zu", TKVCU_PREFILL_THREADS,
               cfg.model.head_dim == 64 ? sizeof(tkvcu_prefill_shared<64, 1>) : sizeof(tkvcu_prefill_shared<128, 1>), TKVCU_PREFILL_THREADS,
               cfg.model.head_dim == 64 ? sizeof(tkvcu_prefill_shared<64, 2>) : sizeof(tkvcu_prefill_shared<128, 2>));
        return 0;
    }
    for (int nt = 1; nt <= 2; nt++) {
        tkvcu_select_attend_kernel(&cu->attend_plan, cfg.model.head_dim, nt, &shared);
        printf("%d %zu ", cu->attend_plan.groups, shared);
    }
    const tkvcu_side *s = tkvcu_find_view(cu, 0)->side + atoi(argv[3]) * 8 * 2;
    for (int i = 0; i < 2; i++, s++)
        printf("\\n%d %d %d %d %d %d %d %d %d %d %d %d %u %u", s->kind, s->half_bits, s->group, s->slabs[0],
               s->slabs[1], s->slabs[2], s->slabs[3], s->slabs[4], s->slabs[5], s->slabs[6], s->top, s->table,
               (unsigned)s->bytes, (unsigned)s->code_bytes);
    return 0;
}
"""

PROBE = """
#define TKVCU_SIDE(b, i) side_of(i)
#define TKVCU_UNLIKELY(x) ((void)(x), 0)
#include "api.h"
#include "layout.h"
static __device__ __forceinline__ tkvcu_side side_of(int i) {
    const tkvcu_side k = {%s}, v = {%s};
    return i ? v : k;
}
#include "attend.h"
__global__ void __launch_bounds__(TKVCU_THREADS, TKVCU_RESIDENT(%d, %d)) unit(tkvcu_job j) {
    TKVCU_SHARED(uint8_t, shared);
    tkvcu_attend_shared<%d, %d> &b = *(tkvcu_attend_shared<%d, %d> *)(void *)shared;
    tkvcu_partials<%d, %d, %d> u;
    const tkvcu_lane me = tkvcu_make_lane<%d>(shared + (sizeof b + 127) / 128 * 128,
                                        TKVCU_SLOTS * j.slot_bytes + TKVCU_WORK(%d, %d, %d), j.slot_bytes);
    tkvcu_clear_partials(u);
    tkvcu_attend_key_range<%d, %d, %d, 0>(j, b, me, u);
    tkvcu_write_partials(j, b, me, u, shared, 1024);
}
"""

HMMA, IMMA, LDGSTS, BRA = 0x3C, 0x37, 0xAE | 0x100, 0x147  # the low 9 bits
NAMES = {0x3C: "HMMA", 0x37: "IMMA", 0x45: "I2F", 0x106: "I2F", 0x36: "IADD", 0x05: "CS2R", 0x118: "NOP", 0x1AE: "LDGSTS", 0x12: "LOP3", 0x19: "SHF", 0x16: "PRMT", 0x184: "LDS", 0x188: "STS",
         0x3B: "LDSM", 0x23: "FFMA", 0x20: "FMUL", 0x21: "FADD", 0x09: "FMNMX", 0x108: "MUFU", 0x32: "HMUL2",
         0x3E: "F2FP", 0x24: "IMAD", 0x25: "IMAD", 0x10: "IADD3", 0x11: "LEA", 0x0C: "ISETP", 0x0B: "FSETP",
         0x147: "BRA", 0x189: "SHFL", 0x148: "WARPSYNC", 0x07: "SEL", 0x08: "FSEL", 0x02: "MOV"}


def functions(cubin):
    """Machine code of a cubin: {mangled name: [instructions, 16 bytes each, as integers]}."""
    with open(cubin, "rb") as f:
        data = f.read()
    at, = struct.unpack_from("<Q", data, 0x28)
    n, names = struct.unpack_from("<HH", data, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", data, at + 64 * i) for i in range(n)]
    found = {}
    for section in sections:
        start = sections[names][4] + section[0]
        name = data[start:data.index(b"\0", start)].decode()
        if name.startswith(".text."):
            code = data[section[4]:section[4] + section[5]]
            found[name[6:]] = [int.from_bytes(code[i:i + 16], "little") for i in range(0, len(code), 16)]
    return found


def loops(code, arch):
    """Backward branches: [(first, last instruction)]. The distance has 8 bits more, further down, from sm_90 on."""
    found = []
    for i, word in enumerate(code):
        if word & 0x1FF != BRA:
            continue
        distance = word >> 34 & (1 << 48) - 1
        distance -= (distance >> 47) << 48
        if arch >= 90:
            distance = distance << 8 | word >> 16 & 0xFF
            distance -= (distance >> 48) << 49 if distance > 0 else 0
        to = i + 1 + distance * 4 // 16
        if to < i:
            found.append((to, i))
    return found


def count(code, arch, parts, no_bits):
    """Instructions of a key tile, by name. parts: slabs of each of K's loops in order; a loop takes two at a time."""
    def has(loop, what):
        return sum(word & 0x1FF == what for word in code[loop[0]:loop[1] + 1])
    nested = loops(code, arch)
    unit = max((l for l in nested if has(l, IMMA) and has(l, LDGSTS)), key=lambda l: has(l, IMMA))
    inner = sorted(l for l in nested if unit[0] <= l[0] and l[1] <= unit[1] and l != unit)
    parts = [n // 2 for n in parts if n // 2 > 1]  # one turn is no loop
    zeros = [l for l in inner if has(l, HMMA)]     # slabs that have no bits; KIVI: all
    runs = [l for l in inner if has(l, IMMA) > 1]
    if len(runs) != len(parts) or len(zeros) > 1 or (no_bits > 1 and not zeros):
        raise SystemExit("the loops of the key tile are not as expected: %s in %s" % (inner, unit))
    times = dict(zip(runs, parts))
    times.update((l, no_bits) for l in zeros)
    weight = {i: 1 for i in range(unit[0], unit[1] + 1)}
    for loop, n in times.items():
        for i in range(loop[0], loop[1] + 1):
            weight[i] *= n
    found = {}
    for i, n in weight.items():
        name = NAMES.get(code[i] & 0x1FF, "%03x" % (code[i] & 0x1FF))
        found[name] = found.get(name, 0) + n
    return found


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if done.returncode:
        raise SystemExit("%s\n%s" % (" ".join(command), done.stdout))
    return done.stdout


def nvcc(arch, source, out):
    return run(["nvcc", "-O3", "-std=c++17", "-arch=sm_%d" % arch, "-Xptxas", "-v", "-cubin", "-I", ROOT, "-I",
                os.path.join(ROOT, "src", "cuda"), "-o", out, source])


def kernels(text, arch):
    """From ptxas -v: {(name, whole numbers that it is a template of): (registers, bytes of spills, of stack, of
    static shared memory)}."""
    found = {}
    for part in text.split("Compiling entry function")[1:]:
        if "for 'sm_%d'" % arch not in part:
            continue
        name, numbers = re.match(r" '_Z\d+tkvcu_(\w+?)_kernel(?:I((?:Li\d+E)+)E)?", part).groups()
        stack, stores, loads = map(int, re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        static = re.search(r"(\d+) bytes smem", part)
        found[name, tuple(map(int, re.findall(r"\d+", numbers or "")))] = (
            registers, stores + loads, stack, int(static.group(1)) if static else 0)
    return found


def resident(arch, registers, shared, threads=128):
    """Warps per scheduler: of the blocks of threads that fit."""
    memory, warps = MULTIPROCESSOR[arch]
    per_warp, mine = (registers * 32 + 255) // 256 * 256, threads // 32
    return min(65536 // per_warp // mine, memory // (shared + RESERVED), warps // mine) * mine // 4


class Lab:
    def __init__(self, place):
        self.place = place
        self.host = os.path.join(place, "host")
        source = self.write("host.cpp", HOST)
        run(["g++", "-std=c++17", "-O1", "-w", "-I", ROOT, "-o", self.host, source, "-lm"])

    def write(self, name, text):
        path = os.path.join(self.place, name)
        with open(path, "w") as f:
            f.write(text)
        return path

    def plan(self, preset, head_dim, tier):
        """Groups of V; shared memory for 1 and 2 n-tiles; the fields of both sides of a tier's key tiles."""
        lines = run([self.host, preset, str(head_dim), str(tier)]).splitlines()
        first = list(map(int, lines[0].split()))
        return first[0], (first[1], first[3]), [list(map(int, line.split())) for line in lines[1:]]

    def block(self, name, numbers):
        """Threads and bytes of dynamic shared memory of a kernel that has one number of each, by head_dim and the
        numbers after it."""
        words = run([self.host, "balanced", str(numbers[0] if numbers else 128), "threads"]).split()
        at = words.index(name + "".join(map(str, numbers[1:])))
        return int(words[at + 1]), int(words[at + 2])

    def unit(self, arch, preset, tier, tiles):
        """Instructions of a key tile at head_dim 128 with 4 columns (tiles = 1) or 8, by name; its bytes."""
        groups, _, sides = self.plan(preset, 128, tier)
        text = []
        for kind, half_bits, group, *rest in sides:
            slabs, (top, table, size, code_bytes) = rest[:7], rest[7:]
            text.append("%d, 0, %d, %d, {%s}, %d, 0, %d, %d, %d" % (
                kind, half_bits, group, ", ".join(map(str, slabs)), top, size, code_bytes, table))
        n = (128, tiles, groups)
        source = self.write("unit-%s-%d-%d-%d.cu" % (preset, tier, arch, tiles),
                            PROBE % (text[0], text[1], *n[:2], *n[:2], *n[:2], *n, n[0], *n, *n))
        nvcc(arch, source, source + "bin")
        code, = (c for name, c in functions(source + "bin").items() if "unit" in name)
        kind, half_bits, n = sides[0][0], sides[0][1], sides[0][3:10]
        parts = [8 if half_bits == 16 else 0] + [n[width] for width in range(6, 0, -1)]
        return count(code, arch, parts, 0 if kind == 1 else n[0]), sides[0][12] + sides[1][12]


def main():
    quick, check = "--quick" in sys.argv[1:], "--check" in sys.argv[1:]
    archs, bad = QUICK if quick or check else ARCHS, []
    place = tempfile.mkdtemp()
    try:
        lab = Lab(place)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            if "--ptxas" in sys.argv:
                with open(sys.argv[sys.argv.index("--ptxas") + 1]) as f:
                    said = f.read()
                whole = {a: pool.submit(lambda: said) for a in archs}
            else:
                whole = {a: pool.submit(nvcc, a, os.path.join(ROOT, "tieredkv_cuda.cu"),
                                        os.path.join(place, "all-%d.cubin" % a)) for a in archs}
            units = {(p, a, n): pool.submit(lab.unit, a, p[1], p[2], n)
                     for p in PLANS for a in QUICK for n in ((1, 2) if a == 90 else (1,))
                     if not check or (a, n) == (90, 1)}
            print("| kernel: head_dim, columns, V groups | architecture | registers | spilled bytes | local bytes | "
                  "shared memory, default / KIVI | warps per scheduler |\n|---|---|---|---|---|---|---|")
            shared, others = {}, []
            for preset in ("balanced", "kivi"):
                for dim in (64, 128):
                    groups, both, _ = lab.plan(preset, dim, 0)
                    for nt in (1, 2):
                        shared.setdefault((dim, nt, groups), []).append(both[nt - 1])
            for a in archs:
                if not kernels(whole[a].result(), a):
                    bad.append("sm_%d: nothing was compiled for it" % a)
                for (name, kernel), (registers, spill, stack, static) in sorted(kernels(whole[a].result(), a).items()):
                    if a in QUICK and spill > LIMITS["spill"]:
                        bad.append("sm_%d, %s kernel %s: %d bytes spilled" % (a, name, kernel, spill))
                    if a in QUICK and name == "append" and stack > LIMITS["stack"]:
                        bad.append("sm_%d, %s kernel %s: %d bytes of stack" % (a, name, kernel, stack))
                    if name != "attend":
                        others.append((name, kernel, a, registers, spill, stack, static))
                        continue
                    memory = shared[kernel]
                    warps = [resident(a, registers, m) for m in memory]
                    if a == 90 and kernel[1] == 1 and min(warps) < LIMITS["warps"]:
                        bad.append("attend kernel %s: %d warps per scheduler" % (kernel, min(warps)))
                    print("| %d, %d, %d | sm_%d | %d | %d | %d | %s | %s |" % (
                        kernel[0], 4 * kernel[1], kernel[2], a, registers, spill, stack,
                        " / ".join(map(str, memory)),
                        " / ".join(map(str, warps))))
            print("\n| kernel: head_dim and so on | architecture | threads | registers | spilled bytes | local bytes | "
                  "shared memory | warps per scheduler |\n|---|---|---|---|---|---|---|---|")
            for name, kernel, a, registers, spill, stack, static in others:
                threads, memory = lab.block(name, kernel)
                memory += static
                print("| %s | sm_%d | %d | %d | %d | %d | %d | %d |" % (
                    " ".join([name] + list(map(str, kernel))), a, threads, registers, spill, stack, memory,
                    resident(a, registers, memory, threads)))
            print("\n| key tile of 64 tokens, head_dim 128 | columns | architecture | bytes | instructions | of issue slots at "
                  "4.3 TB/s | most frequent |\n|---|---|---|---|---|---|---|")
            for (plan, a, n), job in units.items():
                found, size = job.result()
                total = sum(found.values())
                share = total / ISSUE * PACE / size
                most = sorted(found.items(), key=lambda x: -x[1])[:9]
                print("| %s | %d | sm_%d | %d | %d | %.1f %% | %s |" % (
                    plan[0], 4 * n, a, size, total, 100 * share, ", ".join("%s %d" % x for x in most)))
                if (a, n) == (90, 1) and plan[0] not in SHARE_FREE and share > LIMITS["share"]:
                    bad.append("%s: %.1f %% of issue slots" % (plan[0], 100 * share))
    finally:
        shutil.rmtree(place)
    for line in bad:
        print("broken: " + line)
    return 1 if check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
