//! The C interface of tieredkv: a cache of keys and values for transformers, in three tiers. The comments of `tieredkv.h`
//! document each function and field. `Default` gives zeros, and zero means default in every field of a config.

mod bindings;
pub use bindings::*;
