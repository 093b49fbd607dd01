-- tieredkv_test.lua - tries tieredkv.lua with LuaJIT alone.
--
--   cc -O2 -shared -fPIC examples/tieredkv.c -o libtieredkv.so -lm
--   luajit examples/love/tieredkv_test.lua ./libtieredkv.so
local ffi = require "ffi"
package.path = arg[0]:gsub("[^/]*$", "") .. "?.lua;" .. package.path
local tieredkv = require("tieredkv")(arg[1] or "./libtieredkv.so")

local LAYERS, HEADS, KV_HEADS, DIM, N = 2, 4, 2, 32, 64
local config = {["model.n_layers"] = LAYERS, ["model.n_heads"] = HEADS, ["model.n_kv_heads"] = KV_HEADS,
  ["model.head_dim"] = DIM, ["limits.max_seqs"] = 4, ["budget.bytes"] = "4M", ["budget.pressure.min_level"] = 3}
local passed = 0

local function holds(condition, what)
  if not condition then print("failed: " .. what); os.exit(1) end
  passed = passed + 1
end

local function raises(pattern, f)
  local ok, fault = pcall(f)
  holds(not ok and tostring(fault):find(pattern), pattern .. ", not " .. tostring(fault))
end

local function random(n)
  local x = ffi.new("float[?]", n)
  for i = 0, n - 1 do x[i] = 2 * math.random() - 1 end
  return x
end

math.randomseed(7)
local kv = tieredkv.create(config)

-- Attention over exact tokens is the softmax of the book.
local k, v, q = random(N * KV_HEADS * DIM), random(N * KV_HEADS * DIM), random(HEADS * DIM)
for layer = 0, LAYERS - 1 do kv:append(0, layer, k, v, N) end
local out = kv:attend(0, 0, q, 1)
for head = 0, HEADS - 1 do
  local of, sum, weights = math.floor(head / (HEADS / KV_HEADS)), 0, {}
  for i = 0, N - 1 do
    local dot = 0
    for c = 0, DIM - 1 do dot = dot + q[head * DIM + c] * k[(i * KV_HEADS + of) * DIM + c] end
    weights[i] = math.exp(dot / math.sqrt(DIM))
    sum = sum + weights[i]
  end
  local want = 0
  for i = 0, N - 1 do want = want + weights[i] / sum * v[(i * KV_HEADS + of) * DIM] end
  holds(math.abs(want - out[head * DIM]) < 1e-3, "attention of head " .. head)
end

-- A step that fails leaves nothing.
raises("the model fails", function()
  kv:step(0, function() kv:append(0, 0, k, v, N); error("the model fails", 0) end)
end)
holds(kv:length(0) == N and kv:length(0, 0) == N, "the length after a step that failed")
for _ = 2, 20 do kv:step(0, function() for layer = 0, LAYERS - 1 do kv:append(0, layer, k, v, N) end end) end
kv:maintain(1000)
local hot, warm, archive = kv:tiers(0)
holds(hot + warm + archive == 20 * N and warm > 0 and archive > 0, "tiers")

-- A fork shares its bytes, and can be cut.
kv:fork(0, 1)
holds(kv:memory(1).own == 0 and kv:memory(1).shared > 0, "a fork has no bytes of its own")
kv:truncate(1, 1000)
holds(kv:length(1) == 1000 and kv:length(0) == 20 * N, "the fork is cut alone")

-- A saved sequence gives the same bits. A damaged one is refused.
local bytes = kv:save(0, "toy")
holds(kv:load(2, bytes, "toy") == 20 * N, "the length of a loaded sequence")
local a, b = kv:attend(0, 1, q, 1, ffi.new("float[?]", HEADS * DIM)), kv:attend(2, 1, q, 1)
holds(ffi.string(a, 4 * HEADS * DIM) == ffi.string(b, 4 * HEADS * DIM), "the same bits")
kv:reset(2)
local at = math.floor(#bytes / 2)
local damaged = bytes:sub(1, at) .. string.char((bytes:byte(at + 1) + 1) % 256) .. bytes:sub(at + 2)
raises("checksum", function() kv:load(2, damaged, "toy") end)
raises("model", function() kv:load(2, bytes, "another") end)
holds(kv:length(2) == 0, "a refused sequence is empty")

-- Lists of Lua's, sizes that the config leaves to the library, errors of configs, bytes.
local list = {}
for i = 1, KV_HEADS * DIM do list[i] = i / 100 end
kv:append(3, 0, list, list, 1)
holds(kv:length(3, 0) == 1, "a list of Lua's")
raises("a list has 64 of 128 numbers", function() kv:append(3, 0, list, list, 2) end)
raises("a list has 64 of 128 numbers", function() kv:attend(3, 0, list, 1) end)
local plain = tieredkv.create {["model.n_layers"] = 1, ["model.n_heads"] = HEADS, ["model.head_dim"] = DIM,
  ["model.v_head_dim"] = 0}
plain:append(0, 0, q, random(HEADS * DIM), 1)
holds(ffi.sizeof(plain:attend(0, 0, q, 1)) == 4 * HEADS * DIM, "the size of an output, by defaults of the library")
raises("no_heads", function() tieredkv.create {["model.no_heads"] = 1} end)
raises("sequence", function() kv:truncate(99, 0) end)
local m = kv:memory()
holds(tonumber(m.total) <= 4 * 1048576 and m.ratio > 1, "memory within the budget")
kv:destroy()
print(passed .. " passed, 0 failed")
