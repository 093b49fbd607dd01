#!/bin/sh
# Writes src/bindings.rs from the header, by bindgen. tests/test_consume.py compares the file with what this writes.
cd "$(dirname "$0")" && bindgen ../../../tieredkv.h --allowlist-file '.*/tieredkv\.h' --no-layout-tests --no-doc-comments \
    --no-prepend-enum-name --with-derive-default --size_t-is-usize --blocklist-type '__.*' \
    --raw-line '// By bindgen.sh, with bindgen 0.60. Edit nothing here.' \
    --raw-line '#![allow(non_camel_case_types, non_upper_case_globals, dead_code)]' "$@"
