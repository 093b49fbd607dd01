#!/bin/sh
# Applies examples/llama.patch to llama.cpp at its version, builds three programs and tests them: 15 minutes on two cores.
#
#     tools/llama_patch.sh [DIR]
#
# DIR (build/llama.cpp) is a tree of llama.cpp v0.5.0. If it is not there, the source comes from a package of npm. The
# programs are in DIR/build/bin. JOBS (2) compile at a time. It needs git, cmake, a C++ compiler, and npm for the source.
set -eu
cd "$(dirname "$0")/.."
dir=${1:-build/llama.cpp}
package=3.22.1 # of node-llama-cpp
commit=de3ff815ea7d559ee917f063901b8986f038abc6

if [ ! -e "$dir" ]; then
    mkdir -p "$dir.npm"
    npm pack --silent --pack-destination "$dir.npm" "node-llama-cpp@$package"
    tar xzf "$dir.npm/node-llama-cpp-$package.tgz" -C "$dir.npm" package/llama/gitRelease.bundle
    git -c advice.detachedHead=false clone -q "$dir.npm/package/llama/gitRelease.bundle" "$dir"
    git -C "$dir" checkout -q "$commit"
fi
dir=$(cd "$dir" && pwd)
cp tieredkv.h "$dir/"
cp examples/ggml_tkv.h examples/tieredkv.c "$dir/src/"
if ! git -C "$dir" apply -R --check "$PWD/examples/llama.patch" 2>/dev/null; then # an applied patch stays
    git -C "$dir" apply "$PWD/examples/llama.patch"
fi
! command -v ninja >/dev/null || export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"
cmake -S "$dir" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_OPENSSL=OFF
cmake --build "$dir/build" --parallel "${JOBS:-2}" --target llama-perplexity llama-bench llama-server
LLAMA_CPP=$dir python3 tests/test_llama_patch.py
