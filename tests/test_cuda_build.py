#!/usr/bin/env python3
"""tieredkv_cuda.cu as C and C++ see it; and, where nvcc is, what nvcc makes of the encoder: it fuses products and
sums where it can, and the bytes of a block must not depend on that."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

USER = """
#define TKVCU_INTERFACE_ONLY
#include "tieredkv_cuda.cu"
#include "tieredkv_cuda.cu"
size_t bytes_of(const tkvcu_config *d, tkvcu *cu, const tkv_cache *kv, void *x, tkvcu_stream s);
size_t bytes_of(const tkvcu_config *d, tkvcu *cu, const tkv_cache *kv, void *x, tkvcu_stream s) {
    size_t a = 0, b = 0;
    tkv_status st = tkvcu_get_required_bytes(d, &a, &b, NULL, 0);
    if (!st) st = tkvcu_import_seq(cu, 0, kv, 0, s);
    if (!st) st = tkvcu_append(cu, 0, x, x, TKV_TYPE_F16, 1, NULL, s);
    if (!st) st = tkvcu_attend(cu, 0, x, TKV_TYPE_F16, 1, NULL, x, NULL, NULL, s);
    return st ? 0 : a + b;
}
"""

# Where a fused product and sum are the two operations: the products are exact.
EXACT = {
    "tkvi_f32(product + zero)": "11 bits of the scale times 8 of the code",
    "(double)c->step * (double)mean_u)": "two floats, in double",
    "(double)c->step * (double)u)": "two floats, in double",
    "tkvi_f32(half_step * (float)tkvi_signed_byte(code & 254)) + mean)": "11 bits of the scale times 8 of the code",
    "tkvi_f64(mean / (double)scale) - middle)": "middle is a whole number times 1/2",
}


def fused(ptx):
    """Source lines of fused operations: {text: how many}."""
    files, at, found = {}, None, {}
    for line in ptx.splitlines():
        match = re.match(r'\s*\.file\s+(\d+)\s+"([^"]*)"', line)
        if match:
            files[match.group(1)] = match.group(2)
    for line in ptx.splitlines():
        match = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if match:
            at = match.groups()
        if re.search(r"\bfma\.", line):
            with open(files[at[0]]) as f:
                text = f.read().splitlines()[int(at[1]) - 1].strip()
            found[text] = found.get(text, 0) + 1
    return found


class Build(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.place)

    def write(self, name, text):
        path = os.path.join(self.place, name)
        with open(path, "w") as f:
            f.write(text)
        return path

    def test_interface(self):
        """Declarations alone, from C99 and C++11, twice in a file, nothing defined."""
        warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes", "-Werror"]
        for name, flags in (("user.c", ["-std=c99"] + warnings), ("user.cpp", ["-x", "c++", "-std=c++11"])):
            run = subprocess.run([os.environ.get("CC", "cc")] + flags +
                                 ["-I", ROOT, "-c", self.write(name, USER), "-o", os.path.join(self.place, "o")],
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertEqual((run.returncode, run.stdout.decode()), (0, ""))
            names = subprocess.check_output(["nm", "--defined-only", os.path.join(self.place, "o")]).decode()
            self.assertEqual(len(re.findall(r"^\S+ \w ", names, re.M)), 1, names)

    @unittest.skipUnless(shutil.which("nvcc"), "no nvcc")
    def test_encoder_without_fusing(self):
        out = os.path.join(self.place, "append.ptx")
        subprocess.check_call(["nvcc", "-O3", "-arch=sm_90", "-lineinfo", "-w", "-ptx", "-I", ROOT, "-I",
                               os.path.join(ROOT, "src", "cuda"), "-o", out,
                               self.write("append.cu", '#include "append.h"\n')])
        with open(out) as f:
            found = fused(f.read())
        self.assertGreater(len(found), 0)  # else nothing was looked at
        for text in found:
            self.assertTrue(any(known in text for known in EXACT), "nvcc fuses: " + text)


if __name__ == "__main__":
    results.run()
