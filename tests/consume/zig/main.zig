const std = @import("std");
const tkv = @import("tieredkv");

fn ok(status: tkv.tkv_status) !void {
    if (status != tkv.TKV_OK) return error.TieredKV;
}

pub fn main() !void {
    var x = [_]f32{0} ** (2 * 64); // q, k and v of a model with 2 heads of 64 channels
    var out: [2 * 64]f32 = undefined;
    x[0] = 1;
    var cfg = tkv.tkv_default_config();
    cfg.model.n_layers = 1;
    cfg.model.n_heads = 2;
    cfg.model.head_dim = 64;
    var kv: ?*tkv.tkv_cache = null;
    try ok(tkv.tkv_create(&cfg, &kv));
    defer tkv.tkv_destroy(kv);
    for (0..1000) |_| {
        try ok(tkv.tkv_append(kv, 0, 0, &x, &x, 1));
        try ok(tkv.tkv_attend(kv, 0, 0, &x, 1, &out));
    }
    var mem: tkv.tkv_memory_info = undefined;
    try ok(tkv.tkv_get_memory(kv, &mem));
    std.debug.print("{d} hot, {d} warm, {d} archive, {d} bytes, out {d:.1}\n", .{
        mem.tier[tkv.TKV_TIER_HOT].tokens, mem.tier[tkv.TKV_TIER_WARM].tokens,
        mem.tier[tkv.TKV_TIER_ARCHIVE].tokens, mem.total, out[0],
    });
}
