use std::ptr::null_mut;
use tieredkv_sys::*;

fn main() {
    let (mut x, mut out) = ([0f32; 2 * 64], [0f32; 2 * 64]); // q, k and v of a model with 2 heads of 64 channels
    let (mut cfg, mut mem, mut kv) = (tkv_config::default(), tkv_memory_info::default(), null_mut());
    x[0] = 1.0;
    (cfg.model.n_layers, cfg.model.n_heads, cfg.model.head_dim) = (1, 2, 64);
    unsafe {
        assert_eq!(tkv_create(&cfg, &mut kv), TKV_OK);
        for _ in 0..1000 {
            assert_eq!(tkv_append(kv, 0, 0, x.as_ptr(), x.as_ptr(), 1), TKV_OK);
            assert_eq!(tkv_attend(kv, 0, 0, x.as_ptr(), 1, out.as_mut_ptr()), TKV_OK);
        }
        assert_eq!(tkv_get_memory(kv, &mut mem), TKV_OK);
        tkv_destroy(kv);
    }
    let [hot, warm, archive] = mem.tier.map(|tier| tier.tokens);
    println!("{hot} hot, {warm} warm, {archive} archive, {} bytes, out {:.1}", mem.total, out[0]);
}
