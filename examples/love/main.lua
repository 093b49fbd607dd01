-- main.lua - the village, drawn with LOVE 11. village.c computes it: the model, its cache and the people.
--
--   cc -O2 -shared -fPIC examples/love/village.c examples/tieredkv.c -o examples/love/libvillage.so -lm -pthread
--   love examples/love [--model FILE] [--script FILE] [--log FILE] [--folder FOLDER] [--silent]
--
-- The window is lit where somebody talks. The line below each house is what its owner remembers, oldest words left:
-- grey is the prompt that all share, blue takes 3 bits a value, yellow 4, and red is exact.
local ffi = require "ffi"
local source = love.filesystem.getSource()
local C, village, view
local keep -- options: strings that C has pointers to
local fonts = {}
local scene -- the whole window as it stands between two paintings of the panel: an opaque canvas
local sprites, house, glow, white -- one texture and its parts, so that one draw call draws all houses

local MAP = {x = 24, y = 46, w = 830, h = 640}
local PANEL = {x = 900, w = 356, graph = 646, ms = 60 / 20} -- the foot of the graph of frames, points for a millisecond
local LIMIT_US = 1000 -- of a frame's work on the cache; the promise is 2 ms
local TIERS = {{"shared prompt", {.48, .53, .58}}, {"archive, 3 bits", {.25, .49, .88}},
  {"warm, 4 bits", {.93, .72, .24}}, {"hot, exact", {.96, .36, .26}}}
local FAMILIES = {{.72, .33, .27}, {.34, .50, .68}, {.62, .48, .72}, {.38, .58, .42}, {.74, .56, .30}}
local AWAY, READING, SILENT, LISTENING, SPEAKING = 0, 1, 2, 3, 4
local KINDS = {[0] = {.55, .82, .95}, {.97, .93, .84}, {.62, .70, .66}, {.93, .72, .24}, {.45, .42, .42}}
local WHITE, GREY, WORK = {.96, .94, .90}, {.62, .66, .68}, {.30, .80, .70}

local function color(c, alpha, light)
  light = light or 1
  love.graphics.setColor(c[1] * light, c[2] * light, c[3] * light, alpha or 1)
end

local function commas(n) -- 12,345,678
  local digits = string.format("%d", n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (digits:gsub("^,", ""))
end

-- >>life
local function options(words)
  local o = {model = source .. "/../data/demo.gguf", folder = love.filesystem.getSaveDirectory()}
  local has_value = {["--model"] = true, ["--script"] = true, ["--log"] = true, ["--folder"] = true}
  local i = 1
  while words[i] do
    if words[i] == "--silent" then o.silent = true
    elseif has_value[words[i]] and words[i + 1] then o[words[i]:sub(3)] = words[i + 1]; i = i + 1
    else error(words[i] .. ": unknown option, or its value is missing", 0) end
    i = i + 1
  end
  return o
end

function love.load(words)
  local header = assert(io.open(source .. "/village.h")):read("*a")
  ffi.cdef((header:gsub("\n#[^\n]*", "\n")))
  local ok, library = pcall(ffi.load, source .. "/libvillage.so")
  if not ok then error("The command at the top of main.lua builds libvillage.so: " .. library, 0) end
  C = library
  keep = options(words)
  love.filesystem.createDirectory("")
  local o, reason = ffi.new("village_options"), ffi.new("char[256]")
  o.model, o.folder, o.script, o.log = keep.model, keep.folder, keep.script, keep.log
  o.is_silent = keep.silent and 1 or 0
  village = C.village_create(o, reason, 256)
  if village == nil then error(ffi.string(reason), 0) end
  for _, size in ipairs {11, 12, 14, 22} do fonts[size] = love.graphics.newFont(size) end
  love.keyboard.setKeyRepeat(true)
end

local due = 0 -- when the next frame is, at 60 a second, where the driver does not wait for the screen

function love.update()
  local now = love.timer.getTime()
  if now < due then love.timer.sleep(due - now) end
  due = math.max(due, now - 1 / 60) + 1 / 60
  view = C.village_frame(village, LIMIT_US)
  if view.quits == 1 then love.event.quit() end
end

function love.quit()
  C.village_destroy(village)
  village = nil
end

function love.keypressed(key) C.village_key(village, key) end
function love.textinput(text) C.village_type(village, text) end
function love.mousepressed(x, y)
  if x < MAP.x + MAP.w then C.village_pick(village, (x - MAP.x) / MAP.w, (y - MAP.y) / MAP.h) end
end

-- >>the map
local function place(p) return math.floor(MAP.x + p.x * MAP.w), math.floor(MAP.y + p.y * MAP.h) end

-- Paints a house of each family, a light and a white field into one texture. Slanted edges are smooth.
local function paint_sprites()
  local light = love.image.newImageData(64, 64)
  light:mapPixel(function(x, y)
    local d = math.sqrt((x - 31.5) ^ 2 + (y - 31.5) ^ 2) / 32
    return 1, 1, 1, math.max(0, 1 - d) ^ 2
  end)
  sprites, house = love.graphics.newCanvas(280, 64, {msaa = 4}), {}
  love.graphics.setCanvas(sprites)
  for family, c in ipairs(FAMILIES) do
    local x = 40 * family - 40
    house[family] = love.graphics.newQuad(x, 0, 40, 40, sprites)
    love.graphics.setColor(0, 0, 0, .3)
    love.graphics.ellipse("fill", x + 20, 31, 17, 5)
    color {.60, .54, .45}
    love.graphics.rectangle("fill", x + 9, 17, 22, 14)
    color(c, 1, .8)
    love.graphics.rectangle("fill", x + 26, 6, 4, 9)
    color(c)
    love.graphics.polygon("fill", x + 5, 18, x + 35, 18, x + 20, 4)
    color {.26, .20, .16}
    love.graphics.rectangle("fill", x + 22, 21, 6, 10)
  end
  love.graphics.setColor(1, 1, 1)
  love.graphics.draw(love.graphics.newImage(light), 200, 0)
  glow = love.graphics.newQuad(200, 0, 64, 64, sprites)
  love.graphics.rectangle("fill", 264, 0, 16, 16)
  white = love.graphics.newQuad(268, 4, 8, 8, sprites)
  love.graphics.setCanvas()
end

-- Paints what does not change: meadow, roads, square and trees.
local function paint_map()
  local cx, cy = MAP.x + MAP.w / 2, MAP.y + MAP.h / 2
  local canvas = love.graphics.newCanvas(1280, 720, {msaa = 4})
  love.graphics.setCanvas(canvas)
  love.graphics.clear(.060, .080, .105)
  for i = 1, 10 do
    love.graphics.setColor(.125, .205, .160, .22)
    love.graphics.ellipse("fill", cx, cy, MAP.w * (.62 - .012 * i), MAP.h * (.62 - .012 * i), 96)
  end
  love.graphics.setLineWidth(5)
  for i = 0, 99 do
    local p = view.person[i]
    local x, y = place(p)
    local to_x, to_y = cx, cy
    if p.road_to >= 0 then to_x, to_y = place(view.person[p.road_to]) end
    love.graphics.setColor(.29, .265, .22)
    love.graphics.line(x, y, to_x, to_y)
    love.graphics.circle("fill", x, y, 4)
  end
  love.graphics.setColor(.30, .275, .235)
  love.graphics.ellipse("fill", cx, cy, 54, 34, 64)
  love.graphics.setColor(.40, .38, .35)
  for i = 0, 9 do -- stones around the fire
    love.graphics.circle("fill", cx + 15 * math.cos(i * .628), cy + 1 + 8 * math.sin(i * .628), 3)
  end
  for i = 0, 59 do
    local x, y = MAP.x + view.tree[i][0] * MAP.w, MAP.y + view.tree[i][1] * MAP.h
    love.graphics.setColor(0, 0, 0, .25)
    love.graphics.ellipse("fill", x, y + 7, 11, 4)
    love.graphics.setColor(.085, .165, .115)
    love.graphics.circle("fill", x, y, 9)
    love.graphics.setColor(.125, .235, .160)
    love.graphics.circle("fill", x - 2, y - 3, 6)
  end
  color(GREY, .9)
  love.graphics.setFont(fonts[11])
  love.graphics.print(ffi.string(C.village_help()), 16, 700)
  scene = love.graphics.newCanvas(1280, 720) -- without samples: it is copied to the window in each frame
  scene:setFilter("nearest", "nearest")
  love.graphics.setCanvas(scene)
  love.graphics.setBlendMode("replace", "premultiplied")
  love.graphics.setColor(1, 1, 1)
  love.graphics.draw(canvas)
  love.graphics.setBlendMode("alpha")
  love.graphics.setCanvas()
end

local function fill(x, y, w, h) love.graphics.draw(sprites, white, x, y, 0, w / 8, h / 8) end

-- Draws what a person remembers as a line of tiers, `w` points for 2,048 tokens.
local function draw_tiers(p, x, y, w, h)
  love.graphics.setColor(0, 0, 0, .45)
  fill(x - 1, y - 1, w + 2, h + 2)
  for i = 1, 4 do
    local part = w / 2048 * (i == 1 and p.n_shared or p.n_own[4 - i])
    color(TIERS[i][2])
    fill(x, y, part, h)
    x = x + part
  end
end

-- Adds light, where colours are premultiplied: without alpha, they are added.
local function draw_glow(x, y, size, r, g, b)
  love.graphics.setColor(r, g, b, 0)
  love.graphics.draw(sprites, glow, x, y, 0, size / 64, size / 64, 32, 32)
end

local function draw_fire(time) -- on the square
  local cx, cy = MAP.x + MAP.w / 2, MAP.y + MAP.h / 2
  for i, c in ipairs {{.95, .35, .12, 9, 22}, {1, .62, .20, 6, 16}, {1, .88, .50, 3, 10}} do
    local sway = 2 * math.sin(time * 5 + i)
    love.graphics.setColor(c[1], c[2], c[3])
    love.graphics.polygon("fill", cx - c[4], cy, cx + sway, cy - c[5] - 2 * math.sin(time * 9 + i), cx + c[4], cy)
    love.graphics.ellipse("fill", cx, cy, c[4], c[4] / 2)
  end
  draw_glow(cx, cy - 6, 210 + 12 * math.sin(time * 5), .45, .22, .07)
end

local function draw_house(i, time)
  local p = view.person[i]
  local x, y = place(p)
  local light = p.state == AWAY and .55 or 1
  love.graphics.setColor(light, light, light)
  love.graphics.draw(sprites, house[p.family + 1], x - 20, y - 30)
  if p.state == SPEAKING then love.graphics.setColor(1, .86, .45)
  elseif p.state == LISTENING then love.graphics.setColor(.62, .85, 1)
  elseif p.state == READING then love.graphics.setColor(.95, .95, .85)
  else love.graphics.setColor(.13, .14, .17) end
  fill(x - 8, y - 9, 7, 6)
  if p.state == SPEAKING then draw_glow(x - 4, y - 6, 90 + 6 * math.sin(time * 4 + i), .80, .58, .24)
  elseif p.state == LISTENING then draw_glow(x - 4, y - 6, 60, .20, .35, .50)
  elseif p.state == READING then draw_glow(x - 4, y - 6, 60, .45, .45, .35) end
  draw_tiers(p, x - 23, y + 5, 46, 4)
end

local function draw_selected()
  local p = view.person[view.selected]
  local x, y = place(p)
  local name = ffi.string(p.name)
  local w = fonts[12]:getWidth(name)
  love.graphics.setColor(1, 1, 1, .85)
  love.graphics.setLineWidth(1.5)
  love.graphics.rectangle("line", x - 27, y - 31, 54, 44, 6)
  love.graphics.setColor(.05, .07, .09, .85)
  love.graphics.rectangle("fill", x - w / 2 - 5, y + 15, w + 10, 17, 5)
  love.graphics.setColor(1, 1, 1)
  love.graphics.setFont(fonts[12])
  love.graphics.print(name, x - w / 2, y + 16)
end

local function draw_bubble(i)
  local p = view.person[i]
  local words = ffi.string(p.words)
  if #words < 2 then return end
  local x, y = place(p)
  local w = fonts[11]:getWidth(words)
  local left = math.max(4, math.min(x - w / 2, MAP.x + MAP.w - w))
  love.graphics.setColor(.97, .93, .84, .94)
  love.graphics.rectangle("fill", left - 6, y - 50, w + 12, 18, 6)
  love.graphics.polygon("fill", x - 4, y - 33, x + 4, y - 33, x, y - 27)
  love.graphics.setColor(.12, .10, .08)
  love.graphics.setFont(fonts[11])
  love.graphics.print(words, left, y - 48)
end

-- >>the panel
local y -- of the next thing in it

local function write(size, c, text, align)
  love.graphics.setFont(fonts[size])
  color(c)
  love.graphics.printf(text, PANEL.x, y, PANEL.w, align or "left")
end

local function draw_bar(label, bytes, most, c)
  write(12, GREY, label)
  write(12, WHITE, bytes > 0 and commas(bytes / 1024) .. " KB" or "-", "right")
  love.graphics.setColor(0, 0, 0, .4)
  love.graphics.rectangle("fill", PANEL.x + 74, y + 4, 200, 8, 2)
  color(c)
  love.graphics.rectangle("fill", PANEL.x + 74, y + 4, 200 * math.min(1, bytes / math.max(1, most)), 8, 2)
  y = y + 18
end

local function draw_memory()
  write(22, WHITE, "A village in 64 MB")
  y = y + 32
  local share = view.used / view.budget
  love.graphics.setColor(0, 0, 0, .45)
  love.graphics.rectangle("fill", PANEL.x, y, PANEL.w, 16, 4)
  color(share > .95 and TIERS[4][2] or TIERS[2][2])
  love.graphics.rectangle("fill", PANEL.x, y, PANEL.w * share, 16, 4)
  write(12, WHITE, string.format("%.1f of %.0f MB", view.used / 1048576, view.budget / 1048576), "center")
  y = y + 21
  write(12, GREY, string.format("in FP16: %.0f MB   compressed, but not shared: %.0f MB", view.fp16 / 1048576,
    view.unshared / 1048576))
  y = y + 16
  write(12, GREY, string.format("%d of 100 awake   %s tokens/s   compression %d of %d", view.n_read,
    commas(view.tokens_per_second), view.level, math.max(0, view.n_levels - 1)))
  y = y + 30
end

local function draw_person()
  local p = view.person[view.selected]
  local states = {[AWAY] = "is asleep", "wakes up", "is silent", "listens", "speaks"}
  love.graphics.setFont(fonts[14])
  color(FAMILIES[p.family + 1], 1, 1.35)
  love.graphics.print(ffi.string(p.name), PANEL.x, y)
  write(12, GREY, states[p.state], "right")
  y = y + 22
  draw_tiers(p, PANEL.x, y, PANEL.w, 12)
  y = y + 17
  local counts = {p.n_shared, p.n_own[2], p.n_own[1], p.n_own[0]}
  for i, tier in ipairs(TIERS) do
    local x = PANEL.x + (i - 1) % 2 * 178
    color(tier[2])
    love.graphics.rectangle("fill", x, y + 3, 9, 9, 2)
    color(GREY)
    love.graphics.setFont(fonts[12])
    love.graphics.print(tier[1] .. ": " .. commas(counts[i]), x + 14, y)
    if i % 2 == 0 then y = y + 16 end
  end
  y = y + 4
  draw_bar("in FP16", p.fp16_bytes, p.fp16_bytes, {.40, .42, .44})
  draw_bar("its own", p.own_bytes, p.fp16_bytes, TIERS[2][2])
  draw_bar("shared", p.shared_bytes, p.fp16_bytes, TIERS[1][2])
  draw_bar("saved file", p.file_bytes, p.fp16_bytes, {.42, .70, .48})
  y = y + 6
end

local function draw_talk()
  local bottom, lines, height = 548, {}, 0
  local prefix = {[0] = "You: ", "", "", "", ""}
  love.graphics.setFont(fonts[14])
  local _, input = fonts[14]:getWrap("> " .. ffi.string(view.typed) .. "_", PANEL.w)
  if view.is_typing == 1 then bottom = bottom - 18 * #input end
  for i = view.n_lines - 1, 0, -1 do -- the newest ones that fit
    local line = view.line[i]
    local text = prefix[line.kind] .. ffi.string(line.text)
    if line.kind == 1 and text == "" then text = "..." end
    local _, wrapped = fonts[14]:getWrap(text, PANEL.w)
    height = height + 18 * #wrapped + 4
    if y + height > bottom then break end
    table.insert(lines, 1, {text, line.kind, 18 * #wrapped + 4})
  end
  for _, line in ipairs(lines) do
    write(14, KINDS[line[2]], line[1])
    y = y + line[3]
  end
  if view.is_typing == 1 then
    y = bottom + 2
    local cursor = math.floor(love.timer.getTime() * 2) % 2 == 0 and "_" or ""
    write(14, KINDS[0], "> " .. ffi.string(view.typed) .. cursor)
  end
end

local function graph_height(ms) return math.min(60, ms * PANEL.ms) end

-- Paints the panel into the scene, ten times a second. The graph of frames is drawn over it in each frame.
local function paint_panel()
  love.graphics.setCanvas(scene)
  love.graphics.setColor(.085, .105, .125)
  love.graphics.rectangle("fill", PANEL.x - 20, 0, 400, 720)
  y = 20
  draw_memory()
  draw_person()
  draw_talk()
  y = 566
  write(12, GREY, string.format("cache work, 99 %% of frames: %.2f ms", view.cache_p99_ms))
  write(12, GREY, love.timer.getFPS() .. " frames/s", "right")
  love.graphics.setColor(0, 0, 0, .35)
  love.graphics.rectangle("fill", PANEL.x, PANEL.graph - 60, PANEL.w, 60)
  love.graphics.setFont(fonts[11])
  love.graphics.setLineWidth(1)
  for ms, c in pairs {[2] = TIERS[4][2], [16.7] = GREY} do
    local at = PANEL.graph - graph_height(ms)
    color(c, .7)
    love.graphics.line(PANEL.x, at, PANEL.x + PANEL.w, at)
    love.graphics.print(ms .. (ms < 3 and " ms" or " ms: 60 frames/s"), PANEL.x + 2, at - 13)
  end
  y = 655
  write(12, KINDS[3], ffi.string(view.message))
  love.graphics.setCanvas()
end

local function draw_frames()
  local n, step = 240, PANEL.w / 240
  for i = 0, n - 1 do
    local at = (view.n_frames + i) % n
    local x, h = PANEL.x + i * step, graph_height(view.cache_ms[at])
    color(GREY, .6)
    fill(x, PANEL.graph - graph_height(view.frame_ms[at]), 1.2, 2)
    color(WORK)
    fill(x, PANEL.graph - h, 1.2, h)
  end
end

local panel_due = 0

function love.draw()
  local time = love.timer.getTime()
  if not scene then
    paint_sprites()
    paint_map()
  end
  if time >= panel_due then
    paint_panel()
    panel_due = time + .1
  end
  love.graphics.setColor(1, 1, 1)
  love.graphics.setBlendMode("replace", "premultiplied")
  love.graphics.draw(scene)
  love.graphics.setBlendMode("alpha", "premultiplied")
  draw_fire(time)
  for i = 0, 99 do draw_house(i, time) end
  love.graphics.setBlendMode("alpha")
  draw_frames()
  draw_selected()
  for i = 0, 99 do draw_bubble(i) end
  local shot = ffi.string(view.shot)
  if shot ~= "" then
    love.graphics.captureScreenshot(function(image)
      local file = assert(io.open(shot, "wb"))
      file:write(image:encode("png"):getString())
      file:close()
    end)
  end
end
