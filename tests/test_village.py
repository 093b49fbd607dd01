#!/usr/bin/env python3
"""The village of examples/love: the binding for LuaJIT by itself, and the scene in SDL2 and LOVE with scripted keys. It
needs luajit, love, libsdl2-dev and xvfb-run. TKV_TEST_STRICT=1: a test whose tool is missing fails, commands are run
as they are documented, and the whole village is played."""
import functools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

sys.dont_write_bytecode = True
import programs
import results

ROOT = programs.ROOT
LOVE = os.path.join(ROOT, "examples", "love")
NAMES = "Antonio_Rostov", "Antonio Rostov"  # whom the scene selects at its start
SLOW = "sanitize" in os.environ.get("TKV_TEST_CFLAGS", "")
FRAME_MS = 1, 2  # most processor time for the cache's work in half of the frames, and in 99 % of them


def read(name):
    with open(os.path.join(LOVE, name), encoding="utf-8") as f:
        return f.read()


def need(*tools):
    for tool in tools:
        if not shutil.which(tool):
            programs.missing("%s is missing" % tool)


def documented(name, output, more=()):
    """Builds with the cc command at the top of a file, and another output."""
    command = re.search(r"^(?: \*|--) +(cc -O2 .*?)(?: &&.*)?$", read(name), re.M).group(1)
    words = command.split()
    words[words.index("-o") + 1] = output
    words[words.index("examples/tieredkv.c")] = library()
    programs.compile_program(words, more)


@functools.lru_cache(maxsize=None)
def library():
    """The word for the library in a command: as it stands there if STRICT, else an object that is compiled once."""
    if programs.STRICT:
        os.environ.pop("LIBRARY", None)
        return "examples/tieredkv.c"
    place = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(place.cleanup)
    path = os.path.join(place.name, "tieredkv.o")
    subprocess.check_call(["cc", "-O2", "-fPIC", "-c", os.path.join(ROOT, "examples", "tieredkv.c"), "-o", path])
    return path


class Loaded:
    """A shared library for luajit, made by the command in SOURCE."""

    @classmethod
    def setUpClass(cls):
        need("luajit")
        place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(place.cleanup)
        cls.place = place.name
        cls.library = os.path.join(place.name, cls.LIBRARY)
        documented(cls.SOURCE, cls.library)


class Binding(Loaded, unittest.TestCase):
    """tieredkv.lua, with luajit alone."""
    SOURCE, LIBRARY = "tieredkv.lua", "libtieredkv.so"

    def test_by_itself(self):
        run = subprocess.run(["luajit", os.path.join(LOVE, "tieredkv_test.lua"), self.library], capture_output=True,
                             text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""), run.stdout)
        self.assertRegex(run.stdout, r"^\d+ passed, 0 failed\n$")

    @staticmethod
    def structs():
        """The structs that tieredkv.lua declares: name -> names of the fields."""
        found = {}
        for body, name in re.findall(r"^typedef struct \{(.*?)\} (\w+);$", read("tieredkv.lua"), re.M | re.S):
            body = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"\1", body)  # pointers to functions
            found[name] = re.findall(r"(\w+)(?:\[\d+\])?[,;]", body)
        return found

    def test_structs_are_those_of_the_header(self):
        c, lua, structs = "", "", self.structs()
        self.assertEqual(len(structs), read("tieredkv.lua").count("typedef struct {"))
        for name, fields in structs.items():
            c += 'printf("%%zu\\n", sizeof(%s));\n' % name
            lua += "print(ffi.sizeof('%s'))\n" % name
            for field in fields:
                c += 'printf("%%zu\\n", offsetof(%s, %s));\n' % (name, field)
                lua += "print(ffi.offsetof('%s', '%s'))\n" % (name, field)
        source, program = os.path.join(self.place, "sizes.c"), os.path.join(self.place, "sizes")
        with open(source, "w", encoding="utf-8") as f:
            f.write('#include <stdio.h>\n#include "%s/tieredkv.h"\nint main(void) {\n%s return 0; }\n' % (ROOT, c))
        subprocess.check_call(["cc", source, "-o", program])
        script = ("local ffi = require 'ffi'\npackage.path = '%s/?.lua'\nrequire('tieredkv')('%s')\n%s" %
                  (LOVE, self.library, lua))
        self.assertEqual(subprocess.check_output(["luajit", "-e", script], text=True),
                         subprocess.check_output([program], text=True))

    def test_is_short(self):
        self.assertLess(len(read("tieredkv.lua").splitlines()), 150)


class Keys(Loaded, unittest.TestCase):
    """The village without a picture: LuaJIT presses keys, and looks at what a frame would draw."""
    SOURCE, LIBRARY = "village.c", "libvillage.so"

    HEAD = """
local ffi = require "ffi"
ffi.cdef((io.open("examples/love/village.h"):read("*a"):gsub("\\n#[^\\n]*", "\\n")))
ffi.cdef "int usleep(unsigned us);"
local C, o, reason = ffi.load(arg[1]), ffi.new("village_options"), ffi.new("char[256]")
o.model, o.folder, o.is_silent = "examples/data/demo.gguf", arg[2], 1
local v = C.village_create(o, reason, 256)
if v == nil then print(ffi.string(reason)); os.exit(0) end
local view = C.village_frame(v, 1000)
local function frames(n) for _ = 1, n do view = C.village_frame(v, 1000); ffi.C.usleep(2000) end end
local function state() return view.person[view.selected].state end
local function await(which) -- VILLAGE_SILENT is 2, VILLAGE_SPEAKING 4
  for _ = 1, 20000 do
    if state() == which then return end
    frames(1)
  end
  error("state " .. state())
end
local function press(...) for _, key in ipairs {...} do C.village_key(v, key); frames(3) end end
local function print_lines()
  for i = 0, view.n_lines - 1 do
    print(view.line[i].kind, (ffi.string(view.line[i].text):gsub("\\n", "/")))
  end
end
"""

    def run_lua(self, script, folder=None):
        """Returns the lines that a script prints."""
        path = os.path.join(self.place, "keys.lua")
        with open(path, "w", encoding="utf-8") as f:
            f.write(self.HEAD + script + "\nC.village_destroy(v)\n")
        run = subprocess.run(["luajit", path, self.library, folder or self.place], cwd=ROOT, capture_output=True, text=True,
                             timeout=300)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        return run.stdout.splitlines()

    def test_a_number_is_asked_in_a_speech(self):
        lines = self.run_lua("""
await(2)
press("tab")
await(4)
press("n")
await(2)
print_lines()
print("-")
press("i")
frames(20)
print_lines()
""")
        at = lines.index("-")
        kinds, texts = zip(*(line.split("\t") for line in lines[:at]))
        self.assertEqual(kinds, ("0", "1", "3"))  # question, answer, note
        self.assertRegex(texts[1], "^.{20}")
        self.assertRegex(texts[2], r"^Its number, asked from memory: \d+ \(\w+\)$")
        kinds, after = zip(*(line.split("\t") for line in lines[at + 1:]))
        self.assertEqual((kinds, after[:3]), (("4", "4", "3", "3"), texts))  # question and answer are taken back
        self.assertRegex(after[3], r"^Interrupted: [1-9]\d+ tokens were taken back\.$")

    def test_letters_that_are_typed(self):
        lines = self.run_lua("""
press("return")
for _, text in ipairs {"\u00dcber \u0119 and \u00d4, ", "\u201csay\u201d ", "it\u2019s \u2014 \u05d4\u6f22", "\\127\\1"} do
  C.village_type(v, text)
end
print(ffi.string(view.typed))
C.village_type(v, ("x"):rep(500))
print(#ffi.string(view.typed))
press("escape")
print(view.is_typing)
""")
        self.assertEqual(lines[0], "ber  and , \"say\" it's - ")
        self.assertEqual(lines[-2:], ["95", "0"])

    def test_folders(self):
        lines = self.run_lua("""
await(2)
press("s")
for _ = 1, 1000 do
  if view.message[0] ~= 0 then break end
  frames(1)
end
print(ffi.string(view.message))
""", os.path.join(self.place, "none"))
        self.assertEqual(lines, [NAMES[1] + " is not saved: No such file or directory"])
        self.assertEqual(self.run_lua("", "x" * 512), ["the name of the folder is too long"])


class Log:
    """The log of a run, by kinds of lines."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
        self.frames = [[float(x) for x in line.split()[1:]] for line in lines if line.startswith("frame ")]
        self.lines = [line for line in lines if not line.startswith("frame ")]

    def of(self, kind):
        return [line[len(kind) + 1:] for line in self.lines if line.startswith(kind + " ")]

    def percentile(self, column, percent):
        values = sorted(frame[column] for frame in self.frames)
        return values[len(values) * percent // 100 - (percent == 100)]

    def print_times(self, what):
        row = ["%s %.2f, %.2f, %.2f" % (name, *(self.percentile(column, p) for p in (50, 99, 100)))
               for name, column in (("frame", 1), ("cache", 2), ("cache, processor time", 3))]
        print("%s: %d frames, ms (median, 99 %%, worst): %s" % (what, len(self.frames), "; ".join(row)))


class Scene:
    """Runs of the scene: RUN(script) -> Log. Each has a folder of its own for saved people."""

    TALK = """until silent
next
key return
type What is thy news tonight?
shot {shot}
key return
until speaking
wait .4
key i
until silent
until done
next
key n
until done
key s
until done
frames 120
quit
"""
    LOAD = """key l
until done
key return
type Who art thou?
key return
until silent
quit
"""

    @classmethod
    def setUpClass(cls):
        need(*cls.TOOLS)
        place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(place.cleanup)
        cls.place = place.name
        cls.build()

    def play(self, script, *args):
        path, log = os.path.join(self.place, "script"), os.path.join(self.place, "log")
        with open(path, "w", encoding="utf-8") as f:
            f.write(script)
        env = dict(os.environ, LIBGL_ALWAYS_SOFTWARE="1", SDL_AUDIODRIVER="dummy")
        if SLOW:  # the drivers of X and GL are not what is looked at
            env.update(SDL_VIDEODRIVER="dummy", SDL_RENDER_DRIVER="software")
        run = subprocess.run(self.command() + ["--script", path, "--log", log, "--folder", self.place, *args], cwd=ROOT,
                             env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        self.assertEqual(run.returncode, 0, run.stdout.decode("utf-8", "replace")[-3000:])
        return Log(log)

    def check_frames(self, log, what):
        log.print_times(what)
        self.assertGreater(len(log.frames), 120)
        if not SLOW:
            self.assertLess(log.percentile(3, 50), FRAME_MS[0])
            self.assertLess(log.percentile(3, 99), FRAME_MS[1])

    def test_talk_interrupt_save_and_restore(self):
        shot = os.path.join(self.place, "shot" + self.PICTURE)
        log = self.play(self.TALK.format(shot=shot), "--silent")
        self.check_frames(log, type(self).__name__)
        self.check_picture(shot)
        before, after = log.of("next")
        undone, = log.of("undone")
        self.assertEqual(before.split()[-1], after.split()[-1], "another token is the likeliest one after a rollback")
        print("interrupted: %s tokens taken back; logits have %s bits" %
              (undone.split()[-1], "the same" if before == after else "other"))
        self.assertGreater(int(undone.split()[-1]), 10)
        number, = log.of("number")
        self.assertEqual(*number.split()[-2:])
        saved, = log.of("saved")
        *name, size, fp16, bits, token = saved.split()
        self.assertEqual(" ".join(name), NAMES[1])
        file = os.path.join(self.place, "village-%s.tkv" % NAMES[0])
        self.assertEqual(os.path.getsize(file), int(size))
        self.assertGreater(int(fp16), 3 * int(size))
        said = []
        for _ in range(2):  # in other processes: the same bits, and the same words each time
            again = self.play(self.LOAD, "--silent")
            loaded, = again.of("loaded")
            self.assertEqual(loaded.split()[-2:], [bits, token])
            said += again.of("said")
        self.assertEqual(len(said), 2)
        self.assertEqual(*said)

    def test_damaged_files_are_refused(self):
        file = os.path.join(self.place, "village-%s.tkv" % NAMES[0])
        self.play("until silent\nkey s\nuntil done\nquit\n", "--silent")
        with open(file, "rb") as f:
            good = f.read()
        for bad in (good[:len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1:],
                    good[:1000], b"", b"nonsense" * 100):
            with open(file, "wb") as f:
                f.write(bad)
            log = self.play("until silent\nnext\nkey l\nuntil done\nnext\nuntil done\nquit\n", "--silent")
            refused, = log.of("refused")
            self.assertRegex(refused, r"^%s: [a-z].{15,}$" % NAMES[1])
            self.assertEqual(log.of("loaded"), [])
            before, after = log.of("next")
            self.assertEqual(before, after)  # it is as it was
        os.remove(file)
        refused, = self.play("until silent\nkey l\nuntil done\nquit\n", "--silent").of("refused")
        self.assertIn("there is no saved file", refused)

    def test_keys_while_the_past_is_read(self):
        """Who has read half of its past is not saved before it is loaded, or has read all."""
        self.play("until silent\nkey s\nuntil done\nquit\n", "--silent")
        log = self.play("key s\nkey l\nkey s\nuntil done\nquit\n", "--silent")
        self.assertEqual((len(log.of("saved")), len(log.of("loaded"))), (2, 1))
        self.assertEqual({line.split()[-3] for line in log.of("saved")}, {str(1512 * 2048)})
        log = self.play("key l\nkey a\nkey s\nuntil silent\nframes 60\nquit\n", "--silent")
        names = [line.rsplit(" ", 4)[0] for line in log.of("saved")]
        self.assertEqual(names.count(NAMES[1]), 2)
        self.assertEqual({line.split()[-3] for line in log.of("saved")}, {str(1512 * 2048)})

    def check_colors(self, n_colors, n_bright):
        """A picture is not blank: it has many colours, and the light of windows, letters and fire."""
        self.assertGreater(n_colors, 30)
        self.assertGreater(n_bright, 1000)


class Sdl(Scene, unittest.TestCase):
    TOOLS = "xvfb-run",
    PICTURE = ".bmp"

    @classmethod
    def build(cls):
        if not programs.has_header("SDL2/SDL.h"):
            programs.missing("SDL2/SDL.h is missing")
        cls.program = os.path.join(cls.place, "village")
        documented("village_sdl.c", cls.program, programs.WARN_C)

    def command(self):
        return [self.program] if SLOW else ["xvfb-run", "-a", "-s", "-screen 0 1280x720x24", self.program]

    def check_picture(self, path):
        with open(path, "rb") as f:
            data = f.read()
        at, = struct.unpack("<I", data[10:14])
        pixels = [data[i:i + 3] for i in range(at, len(data) - 3, 4)]
        self.check_colors(len(set(pixels)), sum(min(p) > 200 for p in pixels))

    def test_is_short(self):
        self.assertLess(len(read("village_sdl.c").splitlines()), 400)

    def test_forgets(self):
        """Who has heard too much forgets its oldest own tokens, speaks on, and is interrupted, saved and restored."""
        question = "key return\ntype Tell me of the river, the mill, the horse, the sword and thy mother.\nkey return\n"
        log = self.play("until silent\nkey s\nuntil done\n" + 12 * (question + "until silent\n") +
                        "next\nuntil done\nkey tab\nuntil speaking\nkey i\nuntil silent\nuntil done\nnext\nuntil done\n"
                        "key s\nuntil done\nkey l\nuntil done\nquit\n", "--silent")
        self.assertEqual(log.of("refused"), [])
        self.assertEqual(set(log.of("forgot")), {NAMES[1] + " 256"})
        n_said = len(log.of("said"))
        self.assertIn(n_said, (12, 13))
        if n_said == 12:  # else a short answer ended before the key
            self.assertEqual(*(line.split()[-1] for line in log.of("next")))  # the interrupted answer leaves nothing
        first, last = [line.split()[2:] for line in log.of("saved")]
        n_tokens = 1512 * int(last[1]) // int(first[1])
        self.assertTrue(1512 < n_tokens <= 1984, n_tokens)
        self.assertEqual(log.of("loaded")[0].split()[2:], last[2:])

    def test_keys_in_any_order(self):
        """Keys of any kind, a few frames apart, whatever the people do: all wishes are served, and no one is half saved."""
        dice, script = random.Random(4), ""
        for _ in range(120):
            key = dice.choice("tab tab i i n s s l l g left right return".split())
            script += "key %s\n" % key + ("type Who?\nkey return\n" if key == "return" else "")
            script += "frames %d\n" % dice.choice((1, 1, 2, 5, 40))
        log = self.play(script + "until done\nuntil silent\nnext\nuntil done\nquit\n", "--silent")
        self.assertEqual(len(log.of("next")), 1)
        self.assertTrue(log.of("saved") and log.of("loaded") and log.of("number") and log.of("undone"))
        self.assertEqual({line.split(": ", 1)[1] for line in log.of("refused")} - {"there is no saved file"}, set())
        self.assertGreater(min(int(line.split()[-3]) for line in log.of("saved")), 1424 * 2048)

    def test_small_budget(self):
        """Where the budget has no room for all pasts, some people sleep on. Others do what they are asked."""
        self.program = os.path.join(self.place, "small")
        documented("village_sdl.c", self.program, ["-DVILLAGE_BUDGET=%d" % (6 << 20)])
        log = self.play("until read\nkey c\nuntil done\nkey a\nuntil done\nquit\n", "--silent")
        n_read = len(log.of("read"))
        self.assertTrue(3 < n_read < 50, n_read)
        self.assertGreaterEqual(len(log.of("refused")), 100 - n_read)
        self.assertEqual(len(log.of("number")), n_read)
        self.assertLessEqual(max(frame[6] for frame in log.frames), 6 << 20)

    def test_whole_village(self):
        """All 100 people read, talk, remember their number, and are saved, within the budget: a minute or two."""
        if not programs.STRICT:
            self.skipTest("TKV_TEST_STRICT is not 1")
        log = self.play("until read\nwait 5\nkey g\nwait 3\nkey c\nuntil done\nkey a\nuntil done\n" + 2 * (
            "key return\ntype Who art thou?\nkey return\nuntil silent\nkey l\nuntil done\n") + "quit\n")
        self.check_frames(log, "whole village")
        self.assertEqual(len(log.of("read")), 100)
        self.assertEqual(log.of("refused"), [])
        self.assertLessEqual(max(frame[6] for frame in log.frames), 64 << 20)
        self.assertGreater(len(log.of("said")), 3)
        numbers = [line.split()[-2:] for line in log.of("number")]
        right = sum(said == truth for said, truth in numbers)
        saved = [line.split()[-4:-2] for line in log.of("saved")]
        sizes, fp16 = sum(int(a) for a, _ in saved) / 102400, sum(int(b) for _, b in saved) / 102400
        print("forecast %.1f MB, held %.1f MB; %d of %d know their number; a file has %.0f KB, FP16 %.0f KB" % (
            float(log.of("forecast")[0]) / 1048576, log.frames[-1][6] / 1048576, right, len(numbers), sizes, fp16))
        self.assertEqual((len(numbers), len(saved)), (100, 100))
        # What the selected person says before and after it is restored. Others may go on with what they talked of.
        before, after = [line for line in log.of("said") if line.startswith(NAMES[1] + ": ")]
        self.assertEqual(before, after)
        self.assertGreaterEqual(right, 90)

    def test_errors(self):
        for args, said in ((["--model", "none.gguf"], "cannot read none.gguf"),
                           (["--script", "none"], "cannot read none"), (["--what"], "--what: unknown option")):
            run = subprocess.run([self.program, *args], cwd=ROOT, capture_output=True, text=True)
            self.assertEqual((run.returncode, run.stdout), (1, ""))
            self.assertIn(said, run.stderr)


class Love(Scene, unittest.TestCase):
    TOOLS = "love", "xvfb-run"
    PICTURE = ".png"

    @classmethod
    def build(cls):
        cls.game = os.path.join(cls.place, "love")
        shutil.copytree(LOVE, cls.game, ignore=shutil.ignore_patterns("*.so"))
        documented("village.c", os.path.join(cls.game, "libvillage.so"), programs.WARN_C)

    def command(self):
        model = os.path.join(ROOT, "examples", "data", "demo.gguf")
        return ["xvfb-run", "-a", "-s", "-screen 0 1280x720x24", "love", self.game, "--model", model]

    def check_picture(self, path):
        with open(path, "rb") as f:
            data = f.read()
        self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
        at, packed = 8, b""
        while at < len(data):
            size, kind = struct.unpack(">I4s", data[at:at + 8])
            packed += data[at + 8:at + 8 + size] if kind == b"IDAT" else b""
            at += size + 12
        raw = zlib.decompress(packed)
        self.assertGreater(len(data), 30000)  # a blank picture is a few thousand bytes
        self.assertGreater(len(set(raw[i:i + 64] for i in range(0, len(raw), 64))), 1000)


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
