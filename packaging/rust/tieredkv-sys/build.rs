//! Compiles the library. CFLAGS has more words for the compiler, such as switches of the manual's chapter 2: -DTKV_CORE.
use std::{env, path::Path};

fn main() {
    // A checkout and a dependency on git have the header of the project. To publish, copy it here first.
    let folder = if Path::new("tieredkv.h").exists() { "." } else { "../../.." };
    let mut build = cc::Build::new();
    build.file("tieredkv.c").include(folder).warnings(false);
    if env::var("OPT_LEVEL").as_deref() == Ok("0") {
        build.opt_level(2); // a debug build of a Rust program does not debug the kernels
    }
    build.compile("tieredkv");
    if env::var_os("CARGO_CFG_UNIX").is_some() {
        println!("cargo:rustc-link-lib=m");
    }
    println!("cargo:rerun-if-changed={folder}/tieredkv.h");
    println!("cargo:rerun-if-changed=tieredkv.c");
}
