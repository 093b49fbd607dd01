#!/usr/bin/env python3
"""Makes one page of the parts in this folder: index.html, with style, scripts, WASM, model and chapter inside.

    python3 examples/web/build.py -o build/web/index.html      or: make web

It needs clang with lld, and wasi-libc (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32). WASM_CC is another
compiler with its options, by default `clang --target=wasm32-wasi --sysroot=/usr`. The page loads nothing, so it works from a
disk, and from any server of files.
"""
import argparse
import base64
import gzip
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.dirname(HERE)
COMPILER = "clang --target=wasm32-wasi --sysroot=/usr"
# Parts that the page does not use are left out. Saving and reports stay.
LEFT_OUT = "KVQUANT SQUAT TOKEN_FORMATS SUBSPACE EVICT OFFLOAD DISCARD METER MOVES STATES APPEND_PARTS".split()
LINK_FLAGS = ["-mexec-model=reactor", "-Wl,--gc-sections,--strip-all,-z,stack-size=1048576"]


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return f.read()


def compile_wasm(cc, optimize):
    """Returns the bytes of remembers.c and the library as WASM."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "remembers.wasm")
        objects = []
        for source in os.path.join(HERE, "remembers.c"), os.path.join(EXAMPLES, "tieredkv.c"):
            objects.append(os.path.join(folder, os.path.basename(source) + ".o"))
            subprocess.run([*cc.split(), "-msimd128", "-O" + optimize, *("-DTKV_NO_" + part for part in LEFT_OUT),
                            "-c", source, "-o", objects[-1]], check=True)
        # No -O here: with it, clang runs a wasm-opt that is on the path, and the one of binaryen 108 refuses SIMD.
        subprocess.run([*cc.split(), *LINK_FLAGS, *objects, "-o", out, "-lm"], check=True)
        with open(out, "rb") as f:
            return f.read()


def pack(data):
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def chapter():
    """The prompt of `make run` without its secret numbers."""
    lines = read(EXAMPLES, "data", "demo_prompt.txt").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("The secret number of")).strip()


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("-o", metavar="FILE", required=True, help="the page")
    options.add_argument("--cc", default=os.environ.get("WASM_CC") or COMPILER, help="compiler and its options")
    options.add_argument("-O", metavar="LEVEL", default="3", dest="optimize", help="-O of the compiler, by default 3")
    args = options.parse_args()
    wasm = compile_wasm(args.cc, args.optimize)
    with open(os.path.join(EXAMPLES, "data", "demo.gguf"), "rb") as f:
        model = f.read()
    parts = {"wasm": pack(wasm), "model": pack(model), "chapter": chapter()}
    page = re.sub(r"\{\{([a-z.]+)\}\}",
                  lambda m: parts[m[1]] if m[1] in parts else read(HERE, m[1]).strip(), read(HERE, "index.html"))
    os.makedirs(os.path.dirname(os.path.abspath(args.o)), exist_ok=True)
    with open(args.o, "w", encoding="utf-8") as f:
        f.write(page)
    print(f"{args.o}: {os.path.getsize(args.o):,} bytes, WASM {len(wasm):,}, model {len(model):,}")


if __name__ == "__main__":
    sys.exit(main())
