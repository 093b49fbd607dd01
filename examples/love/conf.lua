function love.conf(t)
  t.identity = "village"
  t.window.title = "A village in 64 MB"
  t.window.width, t.window.height = 1280, 720
  t.modules.audio, t.modules.sound, t.modules.physics, t.modules.joystick = false, false, false, false
end
