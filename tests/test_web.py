#!/usr/bin/env python3
"""examples/web: the program compiles without a warning, the page has all parts and loads nothing, and a browser does what the
page promises (.ci/web_page.mjs). The browser needs clang for WASM, node, PLAYWRIGHT, AXE and CHROMIUM; FOLDER gets its
screenshots.

tests/programs.py says what TKV_TEST_STRICT does."""
import html.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, WARN_C, compile_program, missing

WEB = os.path.join(ROOT, "examples", "web")
MOST_BYTES = 5000000
# Like clang, it runs wasm-opt where it links with -O, and this wasm-opt fails.
FAKE_COMPILER = """import sys
if "-c" not in sys.argv and any(word.startswith("-O") for word in sys.argv):
    sys.exit("wasm-opt: all used features should be allowed")
with open(sys.argv[sys.argv.index("-o") + 1], "wb") as f:
    f.write(b"\\0asm" + " ".join(sys.argv).encode())
"""
# Saves a talk together with its endings, with numbers for all their tokens, and loads that.
FILE_WITH_ENDINGS = """
#include "examples/web/remembers.c"
int main(void) {
    static const char text[] = "The secret number of Romeo is 40886.";
    int numbers[500] = {FILE_VERSION};
    size_t size;
    void *model = llama_read_file("examples/data/demo.gguf", &size);
    if (!model || web_start(model, (int)size, 1310720) < 0) return puts(web.text), 1;
    const int n = web_hear(TALK, text, sizeof text - 1);
    while (web_read(TIERED, TALK, CHUNK) > 0) continue;
    tkv_save_params p;
    memset(&p, 0, sizeof p);
    p.seq = TKV_ALL_SEQS;
    p.model = &web.model_name;
    p.model_bytes = sizeof web.model_name;
    p.tokens = numbers;
    p.n_tokens = FIRST_NUMBERS + SEQS * n;
    if (web_fork() != n || tkv_seq_save(web.of[TIERED].kv, &p, NULL, 0, &size) != TKV_OK) return puts(web.text), 1;
    void *bytes = malloc(size);
    if (!bytes || tkv_seq_save(web.of[TIERED].kv, &p, bytes, size, NULL) != TKV_OK) return puts("no file"), 1;
    const int loaded = web_load(bytes, (int)size);
    printf("%d %s, %d\\n", loaded, web_text(), web_length(TALK) == n);
    return 0;
}
"""


def build(folder, *options):
    """Returns the page, and what the build said."""
    page = os.path.join(folder, "index.html")
    done = subprocess.run([sys.executable, os.path.join(WEB, "build.py"), "-o", page, *options],
                          capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return page, done.stdout


class Parts(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.outside, self.scripts, self.labels = [], [], {}, set()
        self.script = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.labels |= set((attrs.get("aria-labelledby", "") + " " + attrs.get("for", "")).split())
        self.outside += [attrs[name] for name in ("src", "href") if name in attrs and attrs[name] != "data:,"]
        self.script = attrs.get("id", "page") if tag == "script" else None

    def handle_data(self, data):
        if self.script:
            self.scripts[self.script] = self.scripts.get(self.script, "") + data

    def handle_endtag(self, tag):
        self.script = None


class Page(unittest.TestCase):
    def test_program_compiles(self):
        subprocess.run([os.environ.get("CC", "cc"), *WARN_C, "-fsyntax-only", os.path.join(WEB, "remembers.c")], check=True)

    def test_a_file_with_endings_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            source, program = os.path.join(folder, "endings.c"), os.path.join(folder, "endings")
            with open(source, "w", encoding="utf-8") as f:
                f.write(FILE_WITH_ENDINGS)
            compile_program(["cc", "-O1", "-I.", source, "examples/tieredkv.c", "-o", program, "-lm"])
            done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "-1 the file: it is no talk of this page, 1\n"))

    def test_parts(self):
        with tempfile.TemporaryDirectory() as folder:
            fake = os.path.join(folder, "cc.py")
            with open(fake, "w", encoding="utf-8") as f:
                f.write(FAKE_COMPILER)
            page, said = build(folder, "--cc", "%s %s" % (sys.executable, fake))
            with open(page, encoding="utf-8") as f:
                text = f.read()
        self.assertRegex(said, r"index\.html: [\d,]+ bytes, WASM [\d,]+, model 3,241,664\n")
        self.assertLess(len(text), MOST_BYTES)
        parts = Parts(text)
        self.assertEqual(set(parts.scripts), {"chapter", "worker", "wasm", "model", "page"})
        self.assertEqual(len(parts.ids), len(set(parts.ids)))
        self.assertLessEqual(parts.labels, set(parts.ids))
        self.assertEqual(parts.outside, [])
        self.assertNotIn("{{", text)
        self.assertIsNone(re.search(r"https?://|\bimport\(|@import|url\(", text))
        self.assertIn("CHAPTER XI", parts.scripts["chapter"])
        self.assertNotIn("secret number", parts.scripts["chapter"])
        budget = "{:,} bytes".format(int(re.search(r"BUDGET = (\d+)", parts.scripts["page"])[1]))
        for path in ("examples/web/README.md", "README.md"):
            with open(os.path.join(ROOT, path), encoding="utf-8") as f:
                self.assertIn(budget, f.read())
        self.assertIn(budget, text)
        for name in set(re.findall(r"\bat\('([a-z-]+)'\)", parts.scripts["page"])):
            self.assertIn(name, parts.ids)

    def test_functions_of_the_worker(self):
        with open(os.path.join(WEB, "worker.js"), encoding="utf-8") as f:
            used = set(re.findall(r"\bweb\.(web_\w+)", f.read()))
        with open(os.path.join(WEB, "remembers.c"), encoding="utf-8") as f:
            exported = set(re.findall(r"^WEB_EXPORT\((web_\w+)\) .*?\b\1\(", f.read(), re.M))
        self.assertGreater(len(used), 20)
        self.assertEqual(used, exported)


class Browser(unittest.TestCase):
    def test_page(self):
        for name in ("clang", "wasm-ld", "node"):
            if not shutil.which(name):
                missing("%s is missing" % name)
        for name in ("PLAYWRIGHT", "AXE", "CHROMIUM"):
            if not os.environ.get(name):
                missing("%s is not set" % name)
        with tempfile.TemporaryDirectory() as folder:
            shots = os.environ.get("FOLDER") or folder
            page, said = build(shots)
            print(said, end="")
            done = subprocess.run(["node", os.path.join(ROOT, ".ci", "web_page.mjs"), page, shots], cwd=ROOT,
                                  capture_output=True, text=True, timeout=850)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertRegex(done.stdout, r"^1[01]\d passed, 0 failed\n$")


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
