#!/usr/bin/env python3
"""tools/rename.py brings old programs to today's names, the tables of CHANGELOG.md are complete, and tools/release.py makes
a release. CC is the compiler (cc).

tools/names/ has the public names of older headers. The examples of commit c076984 are read from the history of git; a clone
that does not have it skips them.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import release
import rename

CC = os.environ.get("CC", "cc").split()
OLD = "c076984"


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def git(*arguments):
    return subprocess.run(("git" if shutil.which("git") else "false", "-C", ROOT) + arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class Complete(unittest.TestCase):
    """Each public name of an older header is there today, or is in a table."""

    def setUp(self):
        self.table = rename.Table(read("CHANGELOG.md"))
        self.today = rename.todays_names()

    def renamed(self, text):
        """A type in today's names. `const` on a pointer's target may come, int may become a status."""
        text = re.sub(r"\w+", lambda m: self.table.renames.get(m.group(), m.group()), text)
        text = re.sub(r"\bconst ", "", text).replace("char * (int)", "char * (tkv_status)")
        return re.sub(r"^int (?=\(tkvcu)", "tkv_status ", text)

    def missing(self, names, table, today):
        """Names without a row, and renames to something with other parameters or another type."""
        for (kind, name), what in names.items():
            owner, _, field = name.partition(".")
            if kind == "field":
                struct = table.renames.get(owner, owner)
                new = "%s.%s" % (struct, table.fields.get((owner, field), field))
                if (owner, field) in table.sentences or owner in table.sentences:
                    continue
                *path, last = new.split(".")[1:]
                for part in path:  # tkv_config.budget.pressure: through the structs of today
                    struct = today.get(("field", "%s.%s" % (struct, part)), "?")
                found = today.get(("field", "%s.%s" % (struct, last)))
                if found is None or self.renamed(what) != self.renamed(found) and found != "const void *":
                    yield "%s %s: %s, today %s" % (name, what, new, found)
                continue
            new = table.renames.get(name, name)
            found = today.get((kind, new))
            if found is not None and self.renamed(what) == self.renamed(found):
                continue
            rows = table.calls.get(name, [])
            if not rows and name not in table.sentences:
                yield "%s %s %s: %s, today %s" % (kind, name, what, new, found)
            for left, target, right in rows:
                if ("function", target) not in today:
                    yield "%s: no function %s" % (name, target)
                    continue
                counts = [len(rename.split_list(signature.partition("(")[2][:-1]))
                          for signature in (what, today["function", target])]
                if counts != [len(left), len(right)]:
                    yield "%s: %d and %d arguments, the functions have %d and %d" % ((name, len(left), len(right)) + tuple(counts))

    def test_every_old_name(self):
        files = sorted(os.listdir(os.path.join(ROOT, "tools", "names")))
        self.assertIn(OLD + ".txt", files)
        for name in files:
            names = rename.names_of(os.path.join(ROOT, "tools", "names", name))
            self.assertGreater(len(names), 600)
            self.assertEqual(list(self.missing(names, self.table, self.today)), [], name)

    def test_what_the_table_must_have(self):
        """Without a row, each of these is found."""
        names = rename.names_of(os.path.join(ROOT, "tools", "names", OLD + ".txt"))
        for row in ("tkv_begin -> tkv_seq_begin", "tkv_pair -> tkv_format_pair", "TKV_HOT -> TKV_TIER_HOT", "n_layers -> model.n_layers",
                    "tkv_attend_params.mass -> tkv_attend_params.scores", "tkv_quality(kv, out) -> tkv_get_quality(kv, TKV_ALL_LAYERS, out)",
                    "tkv_remat_restore -> gone: tkv_seq_recompute", "tkvcu_trim -> tkvcu_truncate"):
            text = read("CHANGELOG.md")
            self.assertIn("    %s\n" % row, text)
            table = rename.Table(text.replace("    %s\n" % row, ""))
            self.assertNotEqual(list(self.missing(names, table, self.today)), [], row)

    def test_right_sides_exist(self):
        known = {name for _, name in self.today}
        for old, new in self.table.renames.items():
            if not re.match(r"tkv_(tokens|blocks)_", old):  # names of Prometheus
                self.assertIn(new, known, old)
            self.assertNotIn(("function", old), self.today)
        for name, rows in self.table.calls.items():
            for left, target, right in rows:
                self.assertIn(("function", target), self.today, name)

    def test_names_that_change_twice(self):
        table = rename.Table("### Functions\n\n    tkv_a -> tkv_b\n    tkv_c -> tkv_d\n    tkv_b -> tkv_c\n")
        self.assertEqual(table.renames, {"tkv_a": "tkv_d", "tkv_b": "tkv_d", "tkv_c": "tkv_d"})

    def test_names_file_is_that_of_the_commit(self):
        if git("cat-file", "-e", OLD).returncode:
            self.skipTest("this clone has no commit " + OLD)
        with tempfile.TemporaryDirectory() as place:
            lines = []
            for part in ("src/api.h", "src/cuda/api.h"):
                with open(os.path.join(place, "api.h"), "wb") as f:
                    f.write(git("show", "%s:%s" % (OLD, part)).stdout)
                lines += subprocess.check_output([sys.executable, os.path.join(ROOT, "tools", "rename.py"), "--names",
                                                  os.path.join(place, "api.h")]).decode().splitlines()
        self.assertEqual(read("tools", "names", OLD + ".txt").splitlines(), lines)

    def test_names(self):
        header = ('/* tkv_no(int); */\n#define TKV_ONE 1\n#ifndef TKV_API\n#define TKV_API extern\n#endif\n#define tkv_f TKV_NAME_(tkv_f)\n'
                  "typedef enum tkv_e { TKV_A = 0, TKV_B, TKV_LAST_ = 2 } tkv_e;\ntypedef struct tkv_o tkv_o;\n"
                  "typedef struct tkv_s {\n    int a, *b;\n    void (*f)(void *user, int n);\n    float c[4];\n} tkv_s;\n"
                  "typedef int (*tkv_call)(void *user);\nTKV_API const char *tkv_f(tkv_o *kv, const float *x,\n    int);\nTKV_API void tkv_g(void);\n")
        self.assertEqual([" ".join(row).rstrip() for row in rename.public_names(header)], [
            "function tkv_f const char * (tkv_o *, const float *, int)", "function tkv_g void (void)", "type tkv_call function",
            "type tkv_e enum", "type tkv_o opaque", "type tkv_s struct", "constant TKV_A", "constant TKV_B", "constant TKV_ONE",
            "field tkv_s.a int", "field tkv_s.b int *", "field tkv_s.f void (*)(void *user, int n)", "field tkv_s.c float[4]"])


class Program(unittest.TestCase):
    """tools/rename.py on files that this class writes."""

    def setUp(self):
        self.place = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.place)

    def tool(self, files, *options):
        for name, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(self.place, name)), exist_ok=True)
            with open(os.path.join(self.place, name), "w", newline="") as f:
                f.write(text)
        run = subprocess.run([sys.executable, os.path.join(ROOT, "tools", "rename.py"), self.place] + list(options),
                             stdout=subprocess.PIPE, check="--check" not in options)
        texts = {}
        for name in files:
            with open(os.path.join(self.place, name), newline="") as f:
                texts[name] = f.read()
        return texts, run.stdout.decode().replace(self.place + os.sep, "").splitlines(), run.returncode

    def change(self, text, name="a.c"):
        return self.tool({name: text}, "--write")[0][name]

    def said(self, text, name="a.c"):
        return self.tool({name: text})[1][:-1]

    def test_whole_identifiers(self):
        self.assertEqual(self.change("tkv_begin(kv, 0); my_tkv_begin(); tkv_begins(); /* tkv_begin */ // TKV_HOT, TKV_HOTTER\n"),
                         "tkv_seq_begin(kv, 0); my_tkv_begin(); tkv_begins(); /* tkv_seq_begin */ // TKV_TIER_HOT, TKV_HOTTER\n")

    def test_writes_only_when_told(self):
        text = "tkv_begin(kv, 0);\r\nx();\r\n"
        self.assertEqual(self.tool({"a.c": text})[0]["a.c"], text)
        texts, said, _ = self.tool({"a.c": text}, "--diff")
        self.assertEqual(texts["a.c"], text)
        self.assertIn("+tkv_seq_begin(kv, 0);", said)
        self.assertEqual(said[-1], "1 names to change in 1 of 1 files; 0 lines above need a person")
        self.assertEqual(self.tool({"a.c": text}, "--check")[2], 1)
        self.assertEqual(self.tool({"a.c": text}, "--write")[0]["a.c"], "tkv_seq_begin(kv, 0);\r\nx();\r\n")
        self.assertEqual(self.tool({"a.c": "tkv_seq_begin(kv, 0);\n"}, "--check")[2], 0)

    def test_strings_of_c_are_listed(self):
        text = 'puts("tkv_begin: no");\nconst char *t = "a\\n"\n  "hot_tokens = 64", *u = "{\\"warm\\": 1}", *w = "warm: 3";\n'
        self.assertEqual(self.change(text), text)
        self.assertEqual(self.said(text), ["a.c:1: tkv_begin: in a string: tkv_seq_begin",
                                           "a.c:3: hot_tokens: a key in a string: tiers.hot_tokens", "a.c:3: warm: a key in a string: tiers.warm"])

    def test_strings_of_lua_and_python_are_code(self):
        self.assertEqual(self.change('ffi.cdef[[ int tkv_begin(void *, int); ]]\n', "a.lua"), 'ffi.cdef[[ int tkv_seq_begin(void *, int); ]]\n')
        self.assertEqual(self.change('f = getattr(lib, "tkv_begin")\n', "a.py"), 'f = getattr(lib, "tkv_seq_begin")\n')
        self.assertEqual(self.said("cfg = new('tkv_config')\ncfg.n_layers = 2\nlib.tkv_quality(kv, out)\nx.tiers = 1\n", "a.py"),
                         ["a.py:2: n_layers: if it is a field of tkv_config: model.n_layers",
                          "a.py:3: tkv_quality: tkv_get_quality(kv, TKV_ALL_LAYERS, out)"])

    def test_fields_by_type(self):
        self.assertEqual(self.change("void f(tkv_config *c, other *o) { tkv_config cfg = {0}, *p = &cfg; c->n_layers = o->n_layers; "
                                     "cfg.hot.k = p[0].warm.k; (*c).policy.min_level = n_layers; }\n"),
                         "void f(tkv_config *c, other *o) { tkv_config cfg = {0}, *p = &cfg; c->model.n_layers = o->n_layers; "
                         "cfg.tiers.hot.k = p[0].tiers.warm.k; (*c).budget.pressure.min_level = n_layers; }\n")

    def test_fields_of_members(self):
        files = {"a.h": "typedef struct app { tkv_config cfg; tkv_attend_params call[2]; int n_layers; } app;\n",
                 "b.c": "void f(app *a) { a->cfg.spill.store = g; a->call[1].mass = x; a->n_layers = 1; }\n"}
        self.assertEqual(self.tool(files, "--write")[0]["b.c"],
                         "void f(app *a) { a->cfg.offload.write = g; a->call[1].scores = x; a->n_layers = 1; }\n")

    def test_designators(self):
        self.assertEqual(self.change("tkv_config c = {.n_layers = 2, .spill = {.user = u}};\nf(&(tkv_attend_params){.mass = m});\n"),
                         "tkv_config c = {.model.n_layers = 2, .offload = {.user = u}};\nf(&(tkv_attend_params){.scores = m});\n")
        self.assertEqual(self.change("tkv_config c = {.spill = {.store = f, .fetch = g}, .warm = {TKV_F16, TKV_F16}};\n"),
                         "tkv_config c = {.offload = {.write = f, .read = g}, .tiers.warm = {TKV_F16, TKV_F16}};\n")

    def test_two_types_of_a_name(self):
        text = "void f(tkv_evict_view *x) { x->mass; }\nvoid g(tkv_attend_params *x) { x->mass; }\n"
        self.assertEqual(self.change(text), text)
        self.assertEqual(self.said(text), ["a.c:%d: mass: a field of tkv_attend_params or of tkv_evict_view: which one?" % n for n in (1, 2)])

    def test_filled_by_position(self):
        self.assertEqual(self.said("tkv_config a = {0}, b = {};\ntkv_pair p = {TKV_F16, TKV_F16};\ntkv_config c = {1, 2};\n"
                                   "tkv_evict_config e[] = {\n  {1},\n  {.n_layers = 2}};\n"),
                         ["a.c:3: tkv_config: filled by position: its fields may have moved",
                          "a.c:5: tkv_evict_config: filled by position: its fields may have moved"])

    def test_calls(self):
        self.assertEqual(self.change("n = tkv_seq_len(s->kv, f(1, 2)) + tkv_seq_len(kv, tkv_seq_len(kv, 0));\n"),
                         "n = tkv_get_length(s->kv, f(1, 2), TKV_ALL_LAYERS) + tkv_get_length(kv, tkv_get_length(kv, 0, TKV_ALL_LAYERS), TKV_ALL_LAYERS);\n")
        self.assertEqual(self.change("tkv_pin(kv, 0, a,\n        n, 1);\ntkv_pin(kv, 0, a, n, 0);\n"),
                         "tkv_seq_pin(kv, 0, a,\n        n, TKV_UNLIMITED);\ntkv_seq_pin(kv, 0, a, n, TKV_OFF);\n")
        self.assertEqual(self.said("tkv_pin(kv, 0, a, n, on);\np = tkv_pin;\n"),
                         ["a.c:%d: tkv_pin: tkv_seq_pin(kv, seq, start, n, TKV_UNLIMITED); tkv_seq_pin(kv, seq, start, n, TKV_OFF)" % n
                          for n in (1, 2)])
        self.assertEqual(self.change("tkv_maintain(kv, 8, &n);\n"), "tkv_maintain(kv, 8, NULL, NULL, &n);\n")
        self.assertEqual(self.tool({"a.c": "tkv_maintain(kv, 8, NULL, NULL, &n);\n"}, "--check")[2], 0)  # a second run changes nothing

    def test_words_are_listed(self):
        text = "x = tkv_isa_of(kv);\nif (n == TKV_NONE) tkv_remat_flops(r, 0, 1, 2);\n"
        texts, said, _ = self.tool({"a.c": text}, "--write")
        self.assertEqual(texts["a.c"], text.replace("TKV_NONE", "TKV_OFF"))
        self.assertEqual(said[:3], ["a.c:1: tkv_isa_of: tkv_get_build(kv, &build), then build.isa",
                                    "a.c:2: TKV_NONE: now TKV_OFF; as a layer: TKV_ALL_LAYERS; as a sequence: TKV_NO_SEQ; as a step: TKV_NEVER",
                                    "a.c:2: tkv_remat_flops: gone: tkv_seq_recompute counts tkv_remat_info.flops"])

    def test_types_of_others(self):
        """A field of a type that is not the library's stays, also if a member elsewhere has the variable's name."""
        files = {"a.h": "struct app { tkv_config cfg; };\nstruct other { llama_config cfg; };\n",
                 "b.c": "void f(void) { llama_config cfg; cfg.n_layers = 3; }\nvoid g(tkv_config *cfg) { cfg->n_layers = 3; }\n",
                 "c.c": "void h(struct other *o) { o->cfg.n_layers = 2; }\n"}
        texts, said, _ = self.tool(files, "--write")
        self.assertEqual(texts["b.c"], files["b.c"].replace("cfg->n", "cfg->model.n"))
        self.assertEqual(texts["c.c"], files["c.c"])
        self.assertEqual(said[:-1], ["c.c:1: n_layers: a field of tkv_config or of another type: which one?"])

    def test_a_second_run_changes_nothing(self):
        text = ("struct app { tkv_config model; };\n"
                "void f(struct app *a) { tkv_config model = {.n_layers = 1}; a->model.n_layers = model.n_layers; }\n")
        once = self.change(text)
        self.assertEqual(once, text.replace(".n_layers", ".model.n_layers"))
        self.assertEqual(self.change(once), once)

    def test_tokens(self):
        for text in ("int x = 1'000; tkv_begin(kv, 0); char c = 'a';\n", 'auto s = u8R"(\")"; tkv_begin(kv, 0); puts("");\n',
                     'puts("a\\\r\n tkv_begun"); tkv_begin(kv, 0);\r\n'):
            self.assertEqual(self.change(text), text.replace("begin", "seq_begin"))
        text = 'puts("a\\\r\n tkv_begin");\r\n'  # a string of two lines
        self.assertEqual((self.change(text), self.said(text)), (text, ["a.c:2: tkv_begin: in a string: tkv_seq_begin"]))
        self.assertEqual(self.change("tkv_create_from_text(t, size, h // host\n, &kv, why, n);\n"),
                         "tkv_create_ex(h // host\n, t, size, &kv, why, n);\n")

    def test_brackets_that_do_not_close(self):
        """Branches of the preprocessor may open more brackets than they close."""
        text = "tkv_config c = {\n#if A\n.x = f(1,\n#else\n.x = f(2,\n#endif\n3)};\ntkv_begin(kv, 0);\ntkv_config d[\n"
        self.assertEqual(self.change(text), text.replace("begin", "seq_begin"))

    def test_encodings(self):
        """Bytes that are no UTF-8 stay and are printed as they are. A file with zero bytes is listed."""
        for name, data in (("a.c", b"/* caf\xe9 */ tkv_begin(kv, 0);\n"), ("b.c", "tkv_begin(kv, 0);\n".encode("utf-16"))):
            with open(os.path.join(self.place, name), "wb") as f:
                f.write(data)
        command = [sys.executable, os.path.join(ROOT, "tools", "rename.py"), "--diff", "--write", self.place]
        said = subprocess.check_output(command, env={**os.environ, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"})
        self.assertIn(b"\n+/* caf\xe9 */ tkv_seq_begin(kv, 0);\n", said)
        self.assertIn(b"b.c:1: UTF-16, or no text: not read\n", said)
        with open(os.path.join(self.place, "a.c"), "rb") as f:
            self.assertEqual(f.read(), b"/* caf\xe9 */ tkv_seq_begin(kv, 0);\n")

    def test_links_are_left_out(self):
        """An editor's lock is a link to nowhere, and a link may lead out of the tree."""
        with tempfile.TemporaryDirectory() as elsewhere:
            target = os.path.join(elsewhere, "b.c")
            with open(target, "w") as f:
                f.write("tkv_begin(kv, 0);\n")
            os.symlink("nowhere", os.path.join(self.place, ".#a.c"))
            os.symlink(target, os.path.join(self.place, "b.c"))
            self.assertEqual(self.tool({"a.c": "tkv_begin(kv, 0);\n"}, "--write")[1],
                             ["1 names changed in 1 of 1 files; 0 lines above need a person"])
            with open(target) as f:
                self.assertEqual(f.read(), "tkv_begin(kv, 0);\n")

    def test_a_path_that_is_missing(self):
        self.tool({"a.c": "tkv_begin(kv, 0);\n"})
        done = subprocess.run([sys.executable, os.path.join(ROOT, "tools", "rename.py"), "--write", self.place, "/nowhere"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, b"", b"rename.py: there is no /nowhere\n"))
        with open(os.path.join(self.place, "a.c")) as f:
            self.assertEqual(f.read(), "tkv_begin(kv, 0);\n")

    def test_all_files_or_none(self):
        """A file that cannot be written leaves the others as they were."""
        names = [os.path.join(self.place, name) for name in ("a.c", "b.c")]
        for name in names:
            with open(name, "w") as f:
                f.write("old\n")
        with unittest.mock.patch("rename.os.access", lambda path, mode: path != names[1]):  # root may write all
            with self.assertRaisesRegex(PermissionError, "b.c cannot be written"):
                rename.write({name: "new\n" for name in names})
        with open(names[0]) as f:
            self.assertEqual(f.read(), "old\n")

    def test_moved_fields_of_each_version(self):
        """A struct is listed if its fields have moved since one of the versions."""
        first, last = ({("type", "tkv_s"): "struct", ("field", "tkv_s." + a): "int", ("field", "tkv_s." + b): "int"}
                       for a, b in ("xy", "yx"))
        for versions, moved in (([last, first], {"tkv_s"}), ([first, last], {"tkv_s"}), ([last], set())):
            self.assertEqual(rename.Rename(rename.Table(""), versions, last).moved, moved)

    def test_left_out(self):
        text = "tkv_begin(kv, 0);\n"
        files = {name: text for name in ("tieredkv.h", ".git/a.c", "build/a.c", "a.txt", "b.c")}
        self.assertEqual([name for name, new in self.tool(files, "--write")[0].items() if new != text], ["b.c"])


class OldExamples(unittest.TestCase):
    """The examples of an old commit, renamed and compiled with today's header."""

    # Those that compile as the tool leaves them, and places of the others that a person has to mend.
    COMPILE = {"quickstart.c", "spill.c"}
    HANDS = {"budget.c": ["tkv_policy_profile", "tkv_tier_pair", "tkv_tier_pair", "tkv_isa_of"],
             "generate.c": ["tkv_tier_of", "tkv_tier_pair", "tkv_isa_of"], "recompute.c": ["tkv_remat_flops"],
             "plan.h": ["tkv_format_from_name", "tkv_evict_from_name"]}

    @classmethod
    def setUpClass(cls):
        archive = git("archive", OLD, "examples")
        if archive.returncode:
            raise unittest.SkipTest("this clone has no commit " + OLD)
        cls.place = tempfile.mkdtemp()
        subprocess.run(["tar", "x", "-C", cls.place], input=archive.stdout, check=True)
        shutil.copy(os.path.join(ROOT, "tieredkv.h"), cls.place)
        cls.programs = sorted(name for name in os.listdir(os.path.join(cls.place, "examples")) if name.endswith(".c"))
        for name in cls.programs:  # declarations alone compile fast
            path = os.path.join(cls.place, "examples", name)
            with open(path) as f:
                text = f.read()
            with open(path, "w") as f:
                f.write(text.replace("#define TIEREDKV_IMPLEMENTATION\n", "\n"))
        cls.before = {name: cls.compile(name, "-fsyntax-only").returncode for name in cls.programs}
        said = subprocess.check_output([sys.executable, os.path.join(ROOT, "tools", "rename.py"), "--write", cls.place]).decode()
        cls.listed = re.findall(r"^%s/examples/(\S+?):(\d+): (\w+): " % re.escape(cls.place), said, re.M)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def compile(cls, name, *flags):
        return subprocess.run(CC + ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", name, *flags, "-lm"],
                              cwd=os.path.join(cls.place, "examples"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def test_without_the_tool_none_compiles(self):
        self.assertEqual(set(self.before.values()) - {0}, set(self.before.values()))

    def test_compiled(self):
        """What does not compile is at a line that the tool lists."""
        self.assertEqual(self.programs, ["budget.c", "generate.c", "quickstart.c", "recompute.c", "spill.c"])
        compiled, places = set(), set()
        for name in self.programs:
            done = self.compile(name, "-fsyntax-only")
            text = done.stdout.decode(errors="replace")
            if done.returncode == 0:
                compiled.add(name)
            errors = re.findall(r"^([\w./]+):(\d+):\d+: error: ", text, re.M)
            self.assertEqual(done.returncode == 0, not errors, text)
            places |= {(os.path.basename(file), line) for file, line in errors}
        self.assertEqual(compiled, self.COMPILE)
        self.assertEqual(places - {(file, line) for file, line, _ in self.listed}, set())
        for file, names in self.HANDS.items():  # and these words are all that a person has to read
            words = [name for where, _, name in sorted(self.listed, key=lambda row: int(row[1]))
                     if where == file and name.startswith("tkv_") and not name.startswith("tkv_evict_kind")]
            self.assertEqual(words, names, file)

    def test_quickstart_runs(self):
        library = [os.path.abspath(file) for file in os.environ.get("LIBRARY", "").split()] or [
            "-O1", os.path.join(ROOT, "examples", "tieredkv.c")]
        done = self.compile("quickstart.c", *library, "-o", "quickstart")
        self.assertEqual(done.returncode, 0, done.stdout.decode())
        said = subprocess.check_output([os.path.join(self.place, "examples", "quickstart")]).decode()
        self.assertIn("2000 tokens: 80 hot, 448 warm, 1472 archive", said)


@unittest.skipUnless(shutil.which("git"), "there is no git")
class Release(unittest.TestCase):
    """tools/release.py on a small tree with a git of its own."""

    def setUp(self):
        self.place = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.place)
        for name in ("src", "tools"):
            shutil.copytree(os.path.join(ROOT, name), os.path.join(self.place, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in release.PRODUCTS:
            shutil.copy(os.path.join(ROOT, name), self.place)
        self.write("src/api.h", release.set_version(re.sub(release.PLACES[0][1], r"\g<1>4.5.6", read("src", "api.h")), "4.5.6"))
        self.write("packaging/rust/x/Cargo.toml", '[package]\nname = "x"\nversion = "4.5.6"\n\n[dependencies]\ny = { version = "4.5.6" }\n')
        self.write("CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n**News.**\n\n## 0.0.9, 2020-01-01\n\n**Old.**\n")
        self.write("Makefile", "check:\n\tpython3 tools/amalgamate.py --check\n")
        self.write("tests/test_house.py", "assert '4.6.0' in open('src/api.h').read()\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments):
        return subprocess.check_output(["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments], cwd=self.place).decode()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")

    def write(self, name, text):
        os.makedirs(os.path.dirname(os.path.join(self.place, name)), exist_ok=True)
        with open(os.path.join(self.place, name), "w", encoding="utf-8") as f:
            f.write(text)

    def read(self, *name):
        with open(os.path.join(self.place, *name), encoding="utf-8") as f:
            return f.read()

    def tool(self, *arguments):
        run = subprocess.run([sys.executable, os.path.join(self.place, "tools", "release.py"), *arguments, "--date", "2026-12-01"],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
        return run.returncode, run.stdout.decode()

    def refuses(self, sentence, *arguments):
        before = self.git("status", "--porcelain")
        status, said = self.tool(*arguments)
        self.assertEqual(status, 1, said)
        self.assertIn(sentence, said)
        self.assertEqual(self.git("status", "--porcelain"), before)

    def test_makes_a_release(self):
        status, said = self.tool("4.6.0")
        self.assertEqual(status, 0, said)
        for line in ("MAJOR 4", "MINOR 6", "PATCH 0", 'STRING "4.6.0"'):
            self.assertIn("#define TKV_VERSION_%s\n" % line, self.read("tieredkv.h"))
        sums = subprocess.check_output(["sha256sum", "tieredkv.h", "tieredkv_cuda.cu"], cwd=self.place).decode()
        self.assertIn(sums, said)
        header, companion = (line.split()[0] for line in sums.splitlines())
        self.assertIn("\n\n## 4.6.0, 2026-12-01\n\nSHA-256 of tieredkv.h: `%s`\\\nSHA-256 of tieredkv_cuda.cu: `%s`\n\n**News.**\n\n## 0.0.9"
                      % (header, companion), self.read("CHANGELOG.md"))
        self.assertIn('version = "4.6.0"\n\n[dependencies]\ny = { version = "4.5.6" }', self.read("packaging", "rust", "x", "Cargo.toml"))
        self.assertIn("function tkv_append tkv_status (tkv_cache *, int, int, const float *, const float *, int)\n", self.read("tools", "names", "4.6.0.txt"))
        self.assertIn("\nfunction tkvcu_append tkv_status (", self.read("tools", "names", "4.6.0.txt"))
        self.assertIn("git tag -a v4.6.0 -m 'tieredkv 4.6.0'", said)
        self.assertEqual(self.git("tag"), "")
        changed = [line[3:] for line in self.git("status", "--porcelain").splitlines()]
        self.assertEqual(changed, ["CHANGELOG.md", "packaging/rust/x/Cargo.toml", "src/api.h", "tieredkv.h", "tools/names/4.6.0.txt"])

    def test_dry_run_writes_nothing(self):
        status, said = self.tool("4.6.0", "--dry-run")
        self.assertEqual(status, 0, said)
        self.assertIn("version 4.5.6 -> 4.6.0 in: packaging/rust/x/Cargo.toml, src/api.h\n", said)
        self.assertIn("would write: CHANGELOG.md, packaging/rust/x/Cargo.toml, src/api.h, tieredkv.h, tieredkv_cuda.cu, tools/names/4.6.0.txt\n", said)
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_lists_the_old_version_elsewhere(self):
        self.write("page.txt", "one\nsee 4.5.6 of it, not 14.5.6 and 4.5.6.2\nnot 4.5.67\n")
        self.commit()
        self.assertIn("still 4.5.6: page.txt:2: see 4.5.6 of it", self.tool("4.6.0", "--dry-run")[1])
        self.assertNotIn("page.txt:3", self.tool("4.6.0", "--dry-run")[1])

    def test_refuses(self):
        self.refuses("no version such as 0.2.0", "4.6")
        self.refuses("4.4.9 is older than 4.5.6", "4.4.9")
        self.git("tag", "v4.7.0")
        self.refuses("there is a tag v4.7.0 already", "4.7.0")
        self.write("new.txt", "x\n")
        self.refuses("not clean", "4.6.0")
        os.remove(os.path.join(self.place, "new.txt"))
        self.write("CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n## 0.0.9, 2020-01-01\n\n**Old.**\n")
        self.commit()
        self.refuses("no section `## Unreleased` with something in it", "4.6.0")

    def test_a_failing_check_fails(self):
        self.write("tests/test_house.py", "raise SystemExit('a test fails')\n")
        self.commit()
        status, said = self.tool("4.6.0")
        self.assertEqual(status, 1)
        self.assertIn("a test fails", said)
        self.assertIn("all files are as they were", said)
        self.assertNotIn("git tag", said)
        self.assertEqual(self.git("status", "--porcelain", "--ignored"), "")

    def test_places(self):
        """Each pattern changes the version of its file and nothing else."""
        old, new = "7.8.9", "7.10.3"
        for pattern, text in (("build.zig.zon", '.{ .name = .tieredkv, .version = "%s", .minimum_zig_version = "0.14.0" }\n'),
                              ("README.md", '`requires = "tieredkv/%s"`, "other/7.8.9"\n'),
                              ("tests/consume/*/CMakeLists.txt", "cmake_minimum_required(VERSION 3.10.1)\nfind_package(tieredkv %s REQUIRED)\n"),
                              ("packaging/*/vcpkg.json", '{ "name": "x", "version": "%s", "y": "1.0.0" }\n')):
            place = dict(release.PLACES)[pattern]
            self.assertEqual(re.subn(place, r"\g<1>" + new, text % old), (text % new, 1))

    def test_bindings(self):
        name = "packaging/rust/tieredkv-sys/src/bindings.rs"
        version = re.findall(r"pub const TKV_VERSION.*\n", release.places("2.13.4", ["src/api.h", name])[name])
        self.assertEqual("".join(version), "pub const TKV_VERSION_MAJOR: u32 = 2;\npub const TKV_VERSION_MINOR: u32 = 13;\n"
                         "pub const TKV_VERSION_PATCH: u32 = 4;\npub const TKV_VERSION_STRING: &[u8; 7usize] = b\"2.13.4\\0\";\n"
                         "pub const TKV_VERSION: u32 = 21304;\n")


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
