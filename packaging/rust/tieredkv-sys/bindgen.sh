#!/bin/sh
# Prints the declarations of the header for Rust; `./bindgen.sh -o src/bindings.rs` writes the file. tests/test_consume.py
# compares both.
cd "$(dirname "$0")" && bindgen ../../../tieredkv.h --allowlist-file '.*/tieredkv\.h' --no-layout-tests --no-doc-comments \
    --no-prepend-enum-name --with-derive-default --size_t-is-usize --blocklist-type '__.*' \
    --raw-line '// By bindgen.sh, with bindgen 0.60. Edit nothing here.' \
    --raw-line '#![allow(non_camel_case_types, non_upper_case_globals, dead_code)]' "$@"
