#!/usr/bin/env python3
"""The manual at the top of the header (src/manual.h): its chapters are numbered, and its recipes compile, run and
print what they should. CC is the compiler (cc), CXX that of R21 (c++).

A recipe is the lines between ` * Recipe R<n>: title` and ` * End of recipe`. Each code line begins with ` *     `.
R1 is two files, under lines `// file: name`. The other recipes stand inside main, and lines above `// main:` before it.
"""
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
CC = os.environ.get("CC", "cc").split()
CXX = os.environ.get("CXX", "c++").split()
FLAGS = ["-O1", "-std=c99", "-Wall", "-Wextra", "-Werror"]
CXX_FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fno-exceptions", "-fno-rtti"]

# The names that chapter 3 of the manual promises to a recipe.
PRELUDE = """
#define _XOPEN_SOURCE 600
#include "tieredkv.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, DIM = 32, TOKENS = 64 };
float k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM];
float q[TOKENS * HEADS * DIM], out[TOKENS * HEADS * DIM];
tkv_config cfg;
tkv_cache *kv;
tkv_status st;
char reason[200];
static void fill(float *x, int n) {
    static unsigned state = 1;
    for (int i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}
static void run_model(int n) {
    fill(k, n * KV_HEADS * DIM);
    fill(v, n * KV_HEADS * DIM);
    fill(q, n * HEADS * DIM);
}
"""
MAIN = """
int main(void) {
    cfg = tkv_default_config();
    cfg.model.n_layers = LAYERS;
    cfg.model.n_heads = HEADS;
    cfg.model.n_kv_heads = KV_HEADS;
    cfg.model.head_dim = DIM;
    cfg.limits.max_append = TOKENS;
    run_model(1);
%s
    tkv_destroy(kv);
    return 0;
}
"""


def read(*names):
    with open(os.path.join(ROOT, *names), encoding="ascii") as f:
        return f.read()


def recipes(text):
    """Number -> code of each recipe."""
    found = {}
    for number, body in re.findall(r"^ \* Recipe (R\d+): [^\n]+\n(.*?)^ \* End of recipe$", text, re.M | re.S):
        code = []
        for line in body.splitlines():
            if line != " *" and not line.startswith(" *     "):
                raise ValueError("%s: not a line of code: %s" % (number, line))
            code.append(line[7:])
        if number in found:
            raise ValueError("%s is there twice" % number)
        found[number] = "\n".join(code) + "\n"
    return found


def program(code):
    """A whole program of a recipe."""
    before, mark, inside = code.rpartition("// main:\n")
    return PRELUDE + before + MAIN % inside


class Recipes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = tempfile.mkdtemp()
        cls.recipes = recipes(read("src", "manual.h"))
        header, made = os.path.join(ROOT, "tieredkv.h"), os.path.join(ROOT, "build", "tieredkv.o")
        cls.library = os.path.join(cls.place, "tieredkv.o")
        shutil.copy(header, cls.place)  # the recipes stand beside the header, as in a program
        newer = os.path.exists(made) and os.path.getmtime(made) > os.path.getmtime(header)
        compiled = os.environ.get("LIBRARY")  # `make test` has compiled it
        if compiled and cls.links(os.path.abspath(compiled)):
            cls.library = os.path.abspath(compiled)
        elif newer and CC == ["cc"] and cls.links(made):
            cls.library = made
        else:
            source = os.path.join(cls.place, "library.c")
            with open(source, "w") as f:
                f.write('#define TIEREDKV_IMPLEMENTATION\n#include "tieredkv.h"\n')
            subprocess.run(CC + ["-O1", "-DTKV_NO_SIMD", "-c", source, "-o", cls.library], check=True)

    @classmethod
    def links(cls, made):
        """Whether the object that make left links without other flags, such as those of a sanitizer."""
        build = CC + ["-x", "c", "-", "-x", "none", made, "-o", os.path.join(cls.place, "try"), "-lm"]
        text = b"void tkv_destroy(void *); int main(void) { tkv_destroy(0); return 0; }"
        return subprocess.run(build, input=text, stderr=subprocess.DEVNULL).returncode == 0

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def run_text(self, name, text, compiler=CC + FLAGS, suffix=".c"):
        """Compiles a program, links it with the library and returns what it prints."""
        source, binary = os.path.join(self.place, name + suffix), os.path.join(self.place, name)
        with open(source, "w") as f:
            f.write(text)
        build = subprocess.run(compiler + [source, self.library, "-o", binary, "-lm", "-pthread"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(build.returncode, 0, "%s: %s" % (name, build.stdout.decode()))
        done = subprocess.run([binary], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        self.assertEqual(done.returncode, 0, "%s: %s" % (name, done.stdout.decode()))
        if os.environ.get("SHOW"):
            sys.stderr.write("%s prints:\n%s" % (name, done.stdout.decode()))
        return done.stdout.decode()

    def run_recipe(self, number):
        self.assertIn(number, self.recipes)
        return self.run_text(number, program(self.recipes[number]))

    def test_contents_name_every_recipe(self):
        contents = read("src", "manual.h").partition("CONTENTS")[2].partition("1. WHAT IT IS")[0]
        self.assertEqual(set(re.findall(r"\bR\d+\b", contents)), set(self.recipes))
        self.assertLessEqual({"R%d" % i for i in range(1, 8)}, set(self.recipes))
        titles = dict(re.findall(r"^ \* Recipe (R\d+): (.+)$", read("src", "manual.h"), re.M))
        for number, title in titles.items():
            self.assertRegex(contents, r"\b%s %s\n" % (number, re.escape(title)))

    def test_r1_compile_once(self):
        self.assertIn("R1", self.recipes)
        files = dict(re.findall(r"^// file: (\S+)\n(.*?)(?=^// file: |\Z)", self.recipes["R1"], re.M | re.S))
        self.assertEqual(sorted(files), ["program.c", "tieredkv.c"])
        # The library is compiled once for all recipes, from these two lines.
        self.assertEqual(files["tieredkv.c"], '#define TIEREDKV_IMPLEMENTATION\n#include "tieredkv.h"\n')
        self.assertRegex(self.run_text("R1", files["program.c"]), r"^version \d+\.\d+\.\d+, \d+ bytes of config\n$")

    def test_r2_chat_without_end(self):
        said = re.match(r"^25600 tokens, (\d+) held, (\d+) gone\n$", self.run_recipe("R2"))
        self.assertTrue(said)
        held, gone = (int(n) for n in said.groups())
        self.assertEqual(held + gone, 25600)
        self.assertGreater(held, 1024 - 128)
        self.assertLessEqual(held, 1024)
        self.assertEqual(gone % 64, 0)

    def test_r3_loading_a_calibration(self):
        self.assertRegex(self.run_recipe("R3"), r"^\d+ bytes; 64 of 256 tokens are compressed\n$")

    def test_r4_even_frame_time(self):
        said = re.match(r"^(\d+) blocks coded between frames, (\d+) in frames\n$", self.run_recipe("R4"))
        self.assertTrue(said)
        self.assertGreater(int(said.group(1)), 90)
        self.assertLessEqual(int(said.group(2)), 2)  # when a layer makes a table

    def test_r5_budget(self):
        lines = self.run_recipe("R5").splitlines()
        self.assertEqual(lines[:5], ["level %d" % i for i in range(1, 6)])
        self.assertRegex(lines[5], r"^refused, it needs 4\d\d\d\d\d bytes$")
        self.assertRegex(lines[6], r"^full at 3\d\d\d tokens$")
        self.assertEqual(lines[-1], "6400 tokens, peak within the budget")
        self.assertEqual(sum(line.startswith("refused") for line in lines), 1)

    def test_r6_threads(self):
        self.assertEqual(self.run_recipe("R6"), "the same bits, with tasks\n")

    def test_r7_small_contexts(self):
        rows = re.findall(r"^(\d+) tokens: default (\d+) bytes, ratio ([\d.]+); "
                          r"small (\d+) bytes, ratio ([\d.]+)$", self.run_recipe("R7"), re.M)
        self.assertEqual([int(row[0]) for row in rows], [1, 128, 256, 512])
        ratios = {int(row[0]): (row[2], row[4]) for row in rows}
        table = read("src", "manual.h").partition("Small contexts.")[2]
        columns = [int(n) for n in re.search(r"^ \*     tokens +(.*)$", table, re.M).group(1).split()]
        for i, name in enumerate(("default plan", "KIVI4 behind 16 hot tokens")):
            figures = dict(zip(columns, re.search(r"^ \*     %s +(.*)$" % name, table, re.M).group(1).split()))
            for tokens in (128, 256, 512):  # the table of the manual has these numbers
                self.assertAlmostEqual(float(ratios[tokens][i]), float(figures[tokens]), delta=.015)

    def test_r8_two_sets_of_keys(self):
        self.assertEqual(self.run_recipe("R8"), "merged and whole differ by less than 1e-5\n")

    def test_r9_config_as_text(self):
        said = self.run_recipe("R9")
        for line in ('"model.n_layers": 32', '"tiers.archive": "a25/r20"', '"layers[1].warm": "q8"',
                     '[tiers]\nhot_tokens = 128\n', '[layers.5]\nwindow = 1024\n'):
            self.assertIn(line, said)
        self.assertRegex(said, r"line 1: tiers.hot_tokenz is no key; the nearest one is tiers.hot_tokens\n$")

    def test_r11_characters_with_a_common_prompt(self):
        said = re.match(r"^8 characters take ([\d.]+) times .*\ncharacter 3 has 1039 tokens, character 4 1064\n$",
                        self.run_recipe("R11"))
        self.assertLess(float(said.group(1)), 4)

    def test_r22_a_reply_that_is_taken_back(self):
        said = re.match(r"^exact tokens: (\d+) before the replies, (\d+) after two forks, (\d+) after a cut\n$",
                        self.run_recipe("R22"))
        before, forked, cut = map(int, said.groups())
        self.assertEqual(forked, before)
        self.assertLess(cut, before / 2)

    def test_r13_back_to_a_state(self):
        said = re.match(r"^back to 6000: from the state of (\d+) tokens, 4000 bytes\n$", self.run_recipe("R13"))
        self.assertTrue(said)
        self.assertGreater(int(said.group(1)), 6000 - 64 - 0.2 * 400)
        self.assertLessEqual(int(said.group(1)), 6000)

    def test_r14_append_as_parts(self):
        self.assertEqual(self.run_recipe("R14"), "1024 tokens\n")

    def test_r10_rows_from_the_model(self):
        said = re.match(r"^4096 tokens, (\d+) of them discarded; attention asked (\d+) times\n$", self.run_recipe("R10"))
        self.assertTrue(said)
        discarded = int(said.group(1))
        self.assertGreater(discarded, 500)
        self.assertEqual(int(said.group(2)), discarded // 16 * 2)  # heads; K and V together


    def test_r14_sinks_inside_a_text(self):
        said = re.match(r"^4 named sinks; (\d+) of 4000 tokens have expired\n$", self.run_recipe("R15"))
        self.assertTrue(said)
        self.assertGreater(int(said.group(1)), 4000 - 256 - 200)

    def test_r16_a_conversation_in_bytes(self):
        said = re.match(r"^damaged: (.*)\n2048 tokens in (\d+) bytes\n$", self.run_recipe("R16"))
        self.assertTrue(said)
        self.assertIn("damaged", said.group(1))
        self.assertLess(int(said.group(2)), 2048 * 2 * 2 * 2 * 32 * 2)  # less than FP16

    def test_r17_a_journal_and_its_file_attached(self):
        said = re.match(r"^the last of 16 saves wrote (\d+) blocks of (\d+); (\d+) stay in the file\n$",
                        self.run_recipe("R17"))
        self.assertTrue(said)
        new, blocks, attached = (int(x) for x in said.groups())
        self.assertLess(new, blocks / 2)
        self.assertGreater(attached, 0)

    def test_r18_a_whole_cache(self):
        self.assertRegex(self.run_recipe("R18"), r"^3 sequences in \d+ bytes; later answers have the same bits\n$")

    def test_r19_prefixes(self):
        self.assertRegex(self.run_recipe("R19"), r"^3 pages in the store, \d+ bytes\n772 of 1000 tokens need not be read\n$")

    def test_r20_cross_attention(self):
        said = self.run_recipe("R20")
        self.assertEqual(re.findall(r"decoder (\d): the weights of 2 heads sum to ([\d.]+)\n", said),
                         [("0", "2.000"), ("1", "2.000")])
        self.assertGreater(float(said.split()[-5]), 2.5, said)

    @unittest.skipUnless(shutil.which(CXX[0]), "there is no C++ compiler")
    def test_r21_in_cpp(self):
        text = program(self.recipes["R21"])
        self.assertEqual(self.run_text("R21", text, CXX + CXX_FLAGS, ".cpp"), "300 tokens\n")
        owner = "std::unique_ptr<tkv_cache, destroy_cache> cache(made);"
        self.assertIn(owner, text)  # the program counts: with the owner all memory comes back
        counted = """
static int held;
static void *take(void *, size_t size, size_t align) { held++; return aligned_alloc(align, (size + align - 1) / align * align); }
static void give(void *, void *memory, size_t, size_t) { held--; free(memory); }
"""
        text = text.replace("struct destroy_cache", counted + "struct destroy_cache")
        text = text.replace("tkv_cache *made;", "cfg.host.allocator.alloc = take;\ncfg.host.allocator.release = give;\n{\ntkv_cache *made;")
        text = text.replace("    tkv_destroy(kv);\n", '    }\n    printf("%d held\\n", held);\n    tkv_destroy(kv);\n')
        self.assertEqual(self.run_text("R21", text, CXX + CXX_FLAGS, ".cpp"), "300 tokens\n0 held\n")
        text = text.replace(owner, "struct { tkv_cache *kv; tkv_cache *get() { return kv; } } cache = {made};")
        self.assertRegex(self.run_text("R21", text, CXX + CXX_FLAGS, ".cpp"), r"^300 tokens\n[1-9]\d* held\n$")

    def test_a_status_that_is_not_read(self):
        """The flags of chapter 17: only the first of these functions compiles."""
        flags = re.search(r"^ \*     cc (-isystem) FOLDER '(-DTKV_API=[^']+)' -c program\.c$", read("src", "manual.h"), re.M)
        self.assertTrue(flags)
        place = os.path.join(self.place, "apart")
        os.makedirs(place, exist_ok=True)
        for line, compiles in (("return tkv_seq_reset(kv, 0);", True), ("tkv_destroy(kv); return TKV_OK;", True),
                               ("tkv_seq_reset(kv, 0); return TKV_OK;", False)):
            for compiler, flag, suffix in ((CC, "-std=c99", ".c"), (CXX, "-std=c++17", ".cpp")):
                if shutil.which(compiler[0]):
                    source = os.path.join(place, "program" + suffix)
                    with open(source, "w") as f:
                        f.write('#include "tieredkv.h"\ntkv_status end(tkv_cache *kv);\ntkv_status end(tkv_cache *kv) { %s }\n' % line)
                    done = subprocess.run(compiler + [flag, "-Wall", "-Wextra", "-Werror", flags.group(1), self.place, flags.group(2),
                                                      "-c", source, "-o", os.path.join(place, "program.o")], stderr=subprocess.PIPE)
                    self.assertEqual(done.returncode == 0, compiles, "%s: %s" % (line, done.stderr.decode()))


class Freestanding(unittest.TestCase):
    @unittest.skipUnless(shutil.which("nm"), "there is no nm")
    def test_what_it_needs(self):
        """With the flags of chapter 17 an object wants the headers and functions of its table, no fewer and no others."""
        text, rows = re.search(r"Freestanding\. (With (?:.|\n)*?)\n \*\n((?: \*     .*\n)+) \*/", read("src", "manual.h")).groups()
        text = re.sub(r"\n \* +", " ", text)
        flags, smallest = re.findall(r"(?: -[\w]+[\w-]*)+", text)
        headers = set(re.findall(r"\w+\.h", text))
        table = {row[0]: row[1:] for row in (re.split(r"  +", line[2:].strip()) for line in rows.splitlines())}
        self.assertEqual(table.pop("build"), ["libc", "libm"])
        self.assertEqual(set(table), {"all parts", "smallest"})
        for name, more in (("all parts", " -O0"), ("smallest", smallest)):
            with tempfile.TemporaryDirectory() as place:
                library = os.path.join(place, "tieredkv.o")
                done = subprocess.run(CC + ["-std=c99", "-w", "-H"] + (flags + more).split() + [
                    "-c", os.path.join(ROOT, "examples", "tieredkv.c"), "-o", library], stderr=subprocess.PIPE, check=True)
                symbols = subprocess.check_output(["nm", library]).decode()
            self.assertEqual(set(re.findall(r"^\.\. .*?(\w+\.h)$", done.stderr.decode(), re.M)), headers, name)
            self.assertEqual(set(re.findall(r" U _?([a-z]\w*)", symbols)), set(" ".join(table[name]).split()), name)


class Extraction(unittest.TestCase):
    """The test finds what is wrong."""

    TEXT = " * Recipe R3: title\n *     int a;\n *\n *         a++;\n * End of recipe\n"

    def test_code(self):
        self.assertEqual(recipes(self.TEXT), {"R3": "int a;\n\n    a++;\n"})

    def test_text_in_a_recipe(self):
        self.assertRaises(ValueError, recipes, self.TEXT.replace(" *         a", " * a"))

    def test_the_same_number_twice(self):
        self.assertRaises(ValueError, recipes, self.TEXT * 2)

    def test_no_end(self):
        self.assertEqual(recipes(self.TEXT.replace("End of", "end")), {})


def sentences(text):
    """Sentences of the prose, without recipes, tables, lists and drawings."""
    text = re.sub(r"^ \* Recipe .*?^ \* End of recipe$", " *", text, flags=re.M | re.S)
    lines = [line[3:].rstrip() if line.startswith(" * ") else "" for line in text.splitlines()]
    for paragraph in "\n".join(lines).split("\n\n"):
        rows = [row for row in paragraph.split("\n") if row]
        if any(re.match(r"   ", row) or re.search(r"\S {2,}\S", row) for row in rows):
            rows = [row for row in rows if re.match(r"  \S", row) and not re.search(r"\S {2,}\S", row)]
        for sentence in re.split(r"(?<=[.:;?!])\s+", " ".join(row.strip() for row in rows)):
            yield sentence


class Form(unittest.TestCase):
    def test_chapters_are_numbered(self):
        text = read("src", "manual.h")
        chapters = re.findall(r"^ \* (\d+)\. ([A-Z].*)$", text, re.M)
        self.assertGreaterEqual(len(chapters), 15)
        self.assertEqual([int(number) for number, _ in chapters], list(range(1, len(chapters) + 1)))
        contents = re.findall(r"^ \* +(\d+) ([A-Z].*?)(?:  .*)?$", text.partition("\n * 1. ")[0], re.M)
        self.assertEqual([(n, title.lower()) for n, title in contents], [(n, title.lower()) for n, title in chapters])
        references = [int(n) for n in re.findall(r"\bchapter\s(?:\*\s+)?(\d+)", text)]
        self.assertLessEqual(set(references), set(range(1, len(chapters) + 1)))

    def test_lines(self):
        for i, line in enumerate(read("src", "manual.h").splitlines(), 1):
            self.assertLessEqual(len(line), 120, "line %d" % i)
            self.assertEqual(line, line.rstrip(), "line %d" % i)

    def test_costs_name_every_call(self):
        """Each call that can change a cache, or takes it for reading blocks, stands in the table of chapter 8."""
        table = read("src", "manual.h").partition("The most blocks that a call codes")[2].partition("\n * Recipe ")[0]
        calls = set(re.findall(r"^TKV_API \w+ tkv_(?:seq_)?(\w+)\(tkv_cache \*", read("src", "api.h"), re.M))
        self.assertGreater(len(calls), 55)
        same = {"append_ex", "append_part", "attend_ex"}  # as append, attend
        blockless = {"get_importance", "add_scores", "find_top_tokens", "get_prefix_hash", "report_pressure",
                     "refresh_calibration", "reset_quality", "destroy"}
        self.assertEqual(calls - set(re.findall(r"\w+", table)), same | blockless)

    def test_stack_measures_every_call(self):
        calls = set(re.findall(r"^TKV_API [^;]*?\b(tkv_\w+)\(", read("src", "api.h"), re.M))
        self.assertGreater(len(calls), 120)
        self.assertEqual(calls - set(re.findall(r"\b(tkv_\w+)\(", read("tests", "test_stack.c"))), set())

    def test_sizes_of_structs(self):
        """The table of the ABI has the sizes that tests/test_create.c compares, and each struct of the header."""
        table = read("src", "manual.h").partition(" *   ABI. ")[2].partition("tests/test_create.c")[0]
        listed = re.findall(r"\b(\w+) (\d+)/(\d+)(?= |$)", table, re.M)
        self.assertEqual(sorted(listed), sorted(re.findall(r"\bSIZE\((\w+), (\d+), (\d+)\)", read("tests", "test_create.c"))))
        structs = re.findall(r"^typedef struct tkv_(\w+) {", read("src", "api.h"), re.M)
        self.assertGreater(len(structs), 60)
        self.assertEqual(sorted(name for name, _, _ in listed), sorted(structs))

    def test_one_comment(self):
        text = read("src", "manual.h")
        self.assertEqual((text.count("/*"), text.count("*/")), (1, 1))

    def test_sentences_are_short(self):
        long = [s for s in sentences(read("src", "manual.h")) if len(s.split()) > 25]
        self.assertEqual(long, [])

    def test_names_exist(self):
        text = read("src", "manual.h")
        known = set(re.findall(r"\w+", read("src", "api.h") + read("src", "cuda", "api.h") + read("src", "core", "switches.h")))
        known |= {"TKV_PREFIX", "TKV_ASSERT", "TKV_NO_MALLOC", "TKV_NO_AVX512", "tkv_memory_bytes"}  # macros, a name of Prometheus
        names = {name for name in re.findall(r"\b(?:tkv|tkvcu|TKV)_\w+\b", text) if not name.endswith("_")}
        self.assertGreater(len(names), 80)
        self.assertEqual(names - known, set())
        fields = set(re.findall(r"\bcfg\.(\w+(?:\.\w+)*)", text))
        self.assertGreater(len(fields), 20)
        self.assertEqual({field for field in fields if not set(field.split(".")) <= known | {"x"}}, set())
        for path in set(re.findall(r"\b(?:core|formats|examples|tests|bench)/\w+\.\w+\b", text)):
            self.assertTrue(any(os.path.exists(os.path.join(ROOT, base, path)) for base in ("", "src")), path)


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
