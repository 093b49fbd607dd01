#!/usr/bin/env python3
"""tools/coverage.py and tools/mutate.py on a library of one function: lines and branches that no test runs are found,
mutants that a test can see are killed, the others survive, and floors and arguments count."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import programs
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import coverage
import mutate

TOY = {
    "src/tieredkv.h": '/* The list. */\n#include "toy.h"\n#ifdef TIEREDKV_IMPLEMENTATION\n'
                      '#include "rules/clip.h"\n#endif\n',
    "src/toy.h": "#ifndef TOY_H\n#define TOY_H\nint clip(int x, int most, int *n);\n#endif\n",
    "src/rules/clip.h": """#ifndef CLIP_H
#define CLIP_H
/* Returns x, 10 at most if most < 0. */
int clip(int x, int most, int *n) {
    if (most < 0) most = 10;
    if (x > most) {
        *n = 1;
        return most;
    }
    if (x == -77) {
        x = 3;
    }
    return x;
}
#endif
""",
    "tests/white.h": "",
    "tests/test_toy.c": """#include "../tieredkv.h"
#include <stdio.h>
int main(void) {
    int n = 0, bad = clip(5, -1, &n) != 5 || clip(11, -1, &n) != 10 || clip(7, 6, &n) != 6 || clip(-6, 6, &n) != -6;
    puts(bad ? "clip FAILED" : "clip ok");
    puts(bad ? "0 passed, 1 failed" : "1 passed, 0 failed");
    return bad;
}
""",
}
TWO = """#include "../tieredkv.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef TKV_TEST_TRACE
#define tkv_test_trace(name) (void)(name)
#else
void tkv_test_trace(const char *name);
#endif
static int n;
static int wrong(const char *name, int x, int y) {
    int bad = strstr(name, getenv("TKV_TEST_FILTER") ? getenv("TKV_TEST_FILTER") : "") && clip(x, 6, &n) != y;
    tkv_test_trace(name);
    return bad;
}
int main(void) { return wrong("usual", 5, 5) || wrong("rare", -77, 3); }
"""


class Tools(unittest.TestCase):
    def setUp(self):
        for tool in ("gcc", "gcov", "objdump"):
            if not shutil.which(tool):
                programs.missing("%s is missing" % tool)
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        for folder in ("src/rules", "tests", "tools", "examples", "bench"):
            os.makedirs(os.path.join(self.root, folder))
        for tool in ("amalgamate.py", "coverage.py", "mutate.py"):
            shutil.copy(os.path.join(ROOT, "tools", tool), os.path.join(self.root, "tools"))
        for name, text in TOY.items():
            self.write(name, text)
        self.tool("amalgamate")

    def write(self, name, text):
        with open(os.path.join(self.root, name), "w") as f:
            f.write(text)

    def read(self, name):
        with open(os.path.join(self.root, name)) as f:
            return f.read()

    def tool(self, name, *args):
        run = subprocess.run([sys.executable, os.path.join(self.root, "tools", name + ".py")] + list(args),
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return run.returncode, run.stdout

    def test_coverage(self):
        status, said = self.tool("coverage", "--floors")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"test_toy +\d+\.\d s  1 passed, 0 failed\n")
        # 8 lines with code: two ifs and what they guard, the last return; the body for -77 never ran
        rows = dict(re.findall(r"^(\S+) +(\d+ +\d+ +\S+ +\d+ +\S+)$", said, re.M))
        self.assertEqual(rows["rules/clip.h"].split(), ["8", "1", "87.5", "6", "83.3"])
        status, said = self.tool("coverage", "--keep", "--lines", "clip")
        self.assertIn("rules/clip.h:11: not run: x = 3;\n", said)
        self.assertRegex(said, r"rules/clip\.h:10: branches (01|10): if \(x == -77\) \{\n")
        self.assertEqual(said.count("\n"), 3)  # and an empty line: nothing is wrong
        self.assertEqual(self.tool("coverage", "--keep", "--check")[0], 0)
        floors = self.read("tests/coverage.txt")
        self.assertIn("rules/clip.h                  87.5  83.3\n", floors)
        self.write("tests/coverage.txt", floors.replace("83.3", "83.4") + "rules/gone.h 1 1\n")
        status, said = self.tool("coverage", "--check")  # nothing changed: no program runs again
        self.assertEqual(status, 1)
        self.assertNotIn("1 passed", said)
        self.assertIn("rules/clip.h: 83.3 % of branches, and its floor is 83.4\n", said)
        self.assertIn("rules/gone.h has a floor, but no line\n", said)
        self.write("tests/test_toy.c", self.read("tests/test_toy.c").replace("clip(5, -1, &n) != 5", "1"))
        status, said = self.tool("coverage", "--check")
        self.assertEqual(status, 1)
        self.assertIn("test_toy fails\n", said)

    def test_mutants(self):
        status, said = self.tool("mutate", "-n", "100", "--least", "95")
        self.assertIn("score ", said)
        self.assertEqual(status, 1)
        rows = self.rows()
        verdict = {row[1]: row[0] for row in rows}
        self.assertEqual(set(verdict.values()), {"killed", "survived"})
        self.assertEqual(verdict["rules/clip.h:11"], "survived")  # no test runs it
        survivors = [row for row in rows if row[0] == "survived"]
        for row in survivors:
            self.assertIn("\t".join(row[1:]), said)
        self.assertIn("%d killed, 0 timeout, %d survived" % (len(rows) - len(survivors), len(survivors)), said)
        # all survivors are argued away: no other verdict changes, and the score is 100
        self.write("tests/mutants.txt", "# why\n\n" + "\n\n".join(
            "%s\n- %s\n+ %s\nBecause." % (row[1].split(":")[0], row[2], row[3]) for row in survivors))
        status, said = self.tool("mutate", "-n", "100", "--least", "95")
        self.assertEqual(status, 0, said)
        self.assertIn("0 survived, %d argued" % len(survivors), said)
        self.assertIn("score 100.0 %", said)

    def rows(self):
        return [line.split("\t") for line in self.read("build/mutants.txt").split("\n")[1:-1]]

    def test_users(self):
        # a test that fails without the mutant kills nothing; of two tests, the one that runs the line is tried
        self.write("tests/test_bad.c", '#include "../tieredkv.h"\n#include <stdio.h>\n'
                                       'int main(void) { int n; return printf("%d", clip(-77, 6, &n)) < 9; }\n')
        self.tool("mutate", "-n", "100")
        self.assertEqual({row[1]: (row[0], row[4]) for row in self.rows()}["rules/clip.h:11"],
                         ("survived", "0 of 1 tests, 0 s"))
        self.write("tests/test_two.c", TWO)
        os.remove(os.path.join(self.root, "build", "mutants.txt"))
        said = self.tool("mutate", "-n", "100")[1]
        self.assertRegex(said, r"test_two +0\.\d s, 3 tests\n")  # with what runs outside of both
        verdict = {row[1]: (row[0], row[4].split(",")[0]) for row in self.rows()}
        self.assertEqual(verdict["rules/clip.h:11"], ("killed", "test_two rare"))
        self.write("tests/test_two.c", TWO.replace("-77, 3", "-77, 4"))  # a changed test is compiled again
        os.remove(os.path.join(self.root, "build", "mutants.txt"))
        self.tool("mutate", "-n", "100")
        self.assertEqual({row[1]: row[0] for row in self.rows()}["rules/clip.h:11"], "survived")

    def test_places(self):
        text = "int f(int a) { /* a < 1 */\n    int b[4] = {0};\n    if (a < -2 && !b[0]) return g(\"1 + 2\");\n" \
               "    b[1] = a + 0x10;\n    return 1.5f;\n}\n"
        found = [(kind, new.strip()) for kind, _, _, _, new in mutate.places("x.h", text, {1, 2, 3, 4, 5})]
        self.assertEqual(found, [
            ("constant", "int b[4] = {1};"),
            ("comparison", 'if (a <= -2 && !b[0]) return g("1 + 2");'),
            ("logic", 'if (a < -2 || !b[0]) return g("1 + 2");'),
            ("logic", 'if (a < -2 && b[0]) return g("1 + 2");'),
            ("sign", 'if (a < 2 && !b[0]) return g("1 + 2");'),
            ("constant", 'if (a < -3 && !b[0]) return g("1 + 2");'),
            ("constant", 'if (a < -2 && !b[1]) return g("1 + 2");'),
            ("left out", ";"),
            ("sign", "b[1] = a - 0x10;"),
            ("constant", "b[0] = a + 0x10;"),
            ("constant", "b[1] = a + 17;"),
            ("left out", ";"),
            ("constant", "return (2.0f * 1.5f);")])
        skipped = "\n    if (!TKVI_HAS_EVICT) return 1;\n    TKVI_ASSERT(a > 0);\n"
        self.assertEqual(mutate.places("x.h", skipped, {2, 3}), [])
        first = mutate.choose(mutate.places("x.h", text, {1, 2, 3, 4, 5}), 4, 7)
        self.assertEqual(len(set(m[2] for m in first)), 4)  # one of a line
        self.assertEqual(first, mutate.choose(mutate.places("x.h", text, {1, 2, 3, 4, 5}), 4, 7))

    def test_join(self):
        counts = {1: [1, "10"], 2: [0, "00"]}
        coverage.join(counts, {1: [0, "01"], 2: [1, "0110"], 3: [0, ""]})
        self.assertEqual(counts, {1: [1, "11"], 2: [1, "0110"], 3: [0, ""]})
        text = "\nx = 1;\n    if (!TKVI_HAS_EVICT) return;\n"
        parts = coverage.parts_of(counts, [None, ("a.h", 7), ("a.h", 8)], text)
        self.assertEqual(parts["a.h"].lines, {7: 1})  # no line of the header's own, and no refusal of a switch
        self.assertEqual(parts["a.h"].percents(), (100.0, 50.0))


if __name__ == "__main__":
    results.run()
