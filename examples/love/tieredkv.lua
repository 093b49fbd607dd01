-- tieredkv.lua - the cache for LuaJIT, without LOVE and without C of your own. Copy this file into your program.
--
--   cc -O2 -shared -fPIC examples/tieredkv.c -o libtieredkv.so -lm
--
--   local kv = require("tieredkv")("./libtieredkv.so").create {
--     ["model.n_layers"] = 4, ["model.n_heads"] = 8, ["model.n_kv_heads"] = 2, ["model.head_dim"] = 64,
--     ["limits.max_seqs"] = 100, ["budget.bytes"] = "64M"}
--   kv:append(seq, layer, k, v, n)           -- float arrays of ffi.new, or Lua lists: n tokens, keys after RoPE
--   local out = kv:attend(seq, layer, q, n)  -- a float array [n][n_heads][v_head_dim]
--   kv:fork(0, 1)  kv:truncate(1, 500)  kv:reset(1)  kv:step(1, function() ... appends of all layers ... end)
--   local bytes = kv:save(1, "my model")  kv:load(2, bytes, "my model")
--
-- Keys of the config are those of the manual, chapter 6. Sequences, layers and tokens are numbered from 0, as in C.
-- Each error is a Lua error with the library's sentence; pcall catches it.
local ffi = require "ffi"

ffi.cdef [[
typedef struct tkv_cache tkv_cache;
typedef struct { size_t tokens, codes, metadata; } tkv_tier_bytes;
typedef struct {
  size_t total; tkv_tier_bytes tier[3]; size_t tables, index, scratch, exact_copies, states, slack;
  tkv_tier_bytes offloaded; size_t peak, fp16_bytes; double ratio, ratio_f32;
} tkv_memory_info;
typedef struct { size_t own, shared, share; } tkv_seq_memory_info;
typedef struct {
  int seq; const void *model; size_t model_bytes; const int *tokens; int n_tokens, with_scores, length;
  const void *former; size_t former_bytes; void *scratch; size_t scratch_bytes; void *info;
} tkv_save_params;
typedef struct {
  int seq; const void *model; size_t model_bytes; int *tokens; int token_capacity, recover, attach;
  void (*release)(void *, const void *, size_t); void *release_user; void *scratch; size_t scratch_bytes;
} tkv_load_params;
typedef struct { int n_tokens, n_saved_tokens, n_tables, n_recoded, n_attached; size_t end; } tkv_load_info;
int tkv_create_ex(const void *cfg, const char *text, size_t n, tkv_cache **out, char *reason, size_t size);
void tkv_destroy(tkv_cache *kv);
int tkv_append(tkv_cache *kv, int seq, int layer, const float *k, const float *v, int n);
int tkv_attend(tkv_cache *kv, int seq, int layer, const float *q, int n, float *out);
int tkv_get_length(const tkv_cache *kv, int seq, int layer);
int tkv_seq_begin(tkv_cache *, int seq), tkv_seq_commit(tkv_cache *, int seq), tkv_seq_abort(tkv_cache *, int seq);
int tkv_seq_fork(tkv_cache *kv, int src, int dst, int n);
int tkv_seq_truncate(tkv_cache *kv, int seq, int n);
int tkv_seq_reset(tkv_cache *kv, int seq);
int tkv_maintain(tkv_cache *kv, int max_work, int (*is_time_up)(void *), void *user, int *done);
int tkv_seq_save(tkv_cache *kv, const tkv_save_params *p, void *buf, size_t size, size_t *needed);
int tkv_seq_load(tkv_cache *kv, const tkv_load_params *p, const void *bytes, size_t size, tkv_load_info *out);
int tkv_get_memory(const tkv_cache *kv, tkv_memory_info *out);
int tkv_seq_get_memory(const tkv_cache *kv, int seq, tkv_seq_memory_info *out);
int tkv_get_tiers(const tkv_cache *kv, int seq, int layer, int start, int n, uint8_t *tiers);
const char *tkv_get_status_text(int status), *tkv_get_last_error(const tkv_cache *kv);
]]
local ALL_LAYERS, UNLIMITED = -3, -2

local Cache = {}

local function floats(x, n) -- an array, or a list of n numbers
  if type(x) == "table" and #x < n then error("a list has " .. #x .. " of " .. n .. " numbers", 3) end
  return type(x) == "table" and ffi.new("float[?]", #x, x) or x
end

local function check(self, status)
  if status == 0 then return self end
  local text = ffi.string(self.C.tkv_get_last_error(self.kv))
  error(text ~= "" and text or ffi.string(self.C.tkv_get_status_text(status)), 3)
end

function Cache:append(seq, layer, k, v, n)
  return check(self, self.C.tkv_append(self.kv, seq, layer, floats(k, n * self.k_row), floats(v, n * self.v_row), n))
end

-- Returns `out`, or an array that the next call uses again. Layers with heads of their own need `out`, and no lists.
function Cache:attend(seq, layer, q, n, out)
  if not out and n * self.out_row > self.out_size then
    self.out_size, self.out = n * self.out_row, ffi.new("float[?]", n * self.out_row)
  end
  out = out or self.out
  check(self, self.C.tkv_attend(self.kv, seq, layer, floats(q, n * self.q_row), n, out))
  return out
end

-- Runs f as one unit: if it raises an error, no layer has any of its tokens.
function Cache:step(seq, f)
  check(self, self.C.tkv_seq_begin(self.kv, seq))
  local ok, fault = pcall(f)
  if ok then return check(self, self.C.tkv_seq_commit(self.kv, seq)) end
  self.C.tkv_seq_abort(self.kv, seq)
  error(fault, 0)
end

function Cache:length(seq, layer) return self.C.tkv_get_length(self.kv, seq, layer or ALL_LAYERS) end
function Cache:fork(src, dst, n) return check(self, self.C.tkv_seq_fork(self.kv, src, dst, n or UNLIMITED)) end
function Cache:truncate(seq, n) return check(self, self.C.tkv_seq_truncate(self.kv, seq, n)) end
function Cache:destroy() self.C.tkv_destroy(ffi.gc(self.kv, nil)); self.kv = nil end -- before garbage is collected
function Cache:reset(seq) return check(self, self.C.tkv_seq_reset(self.kv, seq)) end

-- Codes at most n blocks ahead. Returns how many it did. A frame calls it with what fits: a block takes some 50 us.
function Cache:maintain(n)
  local done = ffi.new("int[1]")
  check(self, self.C.tkv_maintain(self.kv, n, nil, nil, done))
  return done[0]
end

-- Returns a sequence as a string of bytes. `model` names the model; a load must give the same.
function Cache:save(seq, model)
  local p, n = ffi.new("tkv_save_params"), ffi.new("size_t[1]")
  p.seq, p.model, p.model_bytes = seq, ffi.cast("const char *", model), #model
  check(self, self.C.tkv_seq_save(self.kv, p, nil, 0, n))
  local bytes = ffi.new("char[?]", n[0])
  check(self, self.C.tkv_seq_save(self.kv, p, bytes, n[0], n))
  return ffi.string(bytes, n[0])
end

-- Loads such bytes into an empty sequence. Returns the number of its tokens.
function Cache:load(seq, bytes, model)
  local p, info = ffi.new("tkv_load_params"), ffi.new("tkv_load_info")
  p.seq, p.model, p.model_bytes = seq, ffi.cast("const char *", model), #model
  check(self, self.C.tkv_seq_load(self.kv, p, bytes, #bytes, info))
  return info.n_tokens
end

-- Returns numbers of tokens: hot, warm, archive.
function Cache:tiers(seq, layer)
  local n, counts = self:length(seq, layer or 0), {[0] = 0, 0, 0, 0, 0}
  local tiers = ffi.new("uint8_t[?]", n + 1)
  check(self, self.C.tkv_get_tiers(self.kv, seq, layer or 0, 0, n, tiers))
  for i = 0, n - 1 do counts[tiers[i]] = counts[tiers[i]] + 1 end
  return counts[0], counts[1], counts[2]
end

-- Returns a tkv_memory_info of the cache, or a tkv_seq_memory_info of a sequence. Its bytes are for tonumber(x).
function Cache:memory(seq)
  local m = ffi.new(seq and "tkv_seq_memory_info" or "tkv_memory_info")
  check(self, seq and self.C.tkv_seq_get_memory(self.kv, seq, m) or self.C.tkv_get_memory(self.kv, m))
  return m
end

return function(path)
  local C = ffi.load(path or "tieredkv")
  local function create(config)
    local text, out, reason = "", ffi.new("tkv_cache *[1]"), ffi.new("char[200]")
    for key, value in pairs(config) do text = text .. key .. " = " .. tostring(value) .. "\n" end
    if C.tkv_create_ex(nil, text, #text, out, reason, 200) ~= 0 then error(ffi.string(reason), 2) end
    local function size(key, or_else) local x = tonumber(config[key]) or 0; return x > 0 and x or or_else end
    local heads, dim = size("model.n_heads"), size("model.head_dim")
    local kv_heads, v_dim = size("model.n_kv_heads", heads), size("model.v_head_dim", dim)
    return setmetatable({C = C, kv = ffi.gc(out[0], C.tkv_destroy), out_size = 0, out_row = heads * v_dim,
      q_row = heads * dim, k_row = kv_heads * dim, v_row = kv_heads * v_dim}, {__index = Cache})
  end
  return {create = create, C = C}
end
