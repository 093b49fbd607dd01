#!/usr/bin/env python3
"""bench/report.py: one page from CSV files of the benchmarks, with pictures that stay in their frames, tables with
headings, colours that can be read, and a sentence for each file that it cannot read."""
import html.parser
import os
import re
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True
import results
sys.path.insert(0, os.path.join(ROOT, "bench"))
import report

QUALITY = ("plan,rival,window,bits,bytes_per_token,ratio,kl,kl_error,kl_999,top1_percent,exact_ppl,ppl,dppl_percent,"
           "dppl_error,passkey_right,passkey_asked\n")
SPEED = "heads,kv_heads,dim,queries,threads,isa,precise,format,ctx,bytes,ns,read_gb_s\n"
RIVALS = "what,ctx,engine,path,format,bytes,time,unit,error,read_gb_s\n"
BUDGET = "tokens,bytes,level,pressure,hot,warm,archive,budget,fp16,total\n"
EVIL = 'a<script>alert("&")</script>'


def quality(plan, bits, kl, rival=0):
    return '"%s",%d,all,%s,100,5,%s,0.0001,0.5,95,17,17,1,0.25,0,0\n' % (plan.replace('"', '""'), rival, bits, kl)


def budget(n, size, limit, level=lambda i: 0):
    return BUDGET + "".join("%d,%d,%d,.5,%d,0,0,%d,%d,%d\n" % (i, size(i), level(i), i, limit, 2048 * i, n)
                            for i in range(1, n + 1))


GOOD = {
    "build/quality/m.csv": QUALITY + quality("preset=compact", 2.3, .005) + quality(EVIL, 4.5, .001)
    + quality("q4_0", 4.5, .04, 1) + quality("streaming", 0, 0, 1),
    "build/speed.csv": SPEED + "".join("32,8,128,1,1,avx2,0,%s,%d,200,%g,20\n" % (name, n, ns) for name, ns in
                                       (("f16", 28), ("tiers", 12)) for n in (4096, 16384)),
    "build/rivals.csv": RIVALS + "decode,4096,ggml,flash,f16,512,344,ns,1e-3,20\n",
    "build/budgets/none.csv": budget(500, lambda i: 2100 * i, 0),
    "build/budgets/50%.csv": budget(500, lambda i: min(2100 * i, 500000), 512000, lambda i: i // 301),
}


class Place(unittest.TestCase):
    """Each test runs in a folder with the files of GOOD."""

    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(place.name)
        for path, text in GOOD.items():
            self.write(path, text)
        self.measured = []
        measure, report.measure = report.measure, lambda kinds, fresh: self.measured.append((kinds, fresh))
        self.addCleanup(setattr, report, "measure", measure)

    def write(self, path, text):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)

    def page(self):
        return report.page(report.find_sources(False))


class Tree(html.parser.HTMLParser):
    """The open tags of each place in a text, strictly: every tag that is not void is closed, in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            raise AssertionError("</%s> in %s" % (tag, self.open))
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


class Page(Place):
    def test_tags_ids_and_headings(self):
        text = self.page()
        tree = Tree(text)
        self.assertEqual(tree.open, [])
        self.assertTrue(text.startswith("<!DOCTYPE html>\n"))
        ids = [attrs["id"] for _, attrs, _ in tree.tags if "id" in attrs]
        self.assertEqual(len(ids), len(set(ids)))
        pictures = [attrs for tag, attrs, _ in tree.tags if tag == "svg" and attrs.get("role") == "img"]
        self.assertEqual(len(pictures), 6)  # three, in two sizes
        for attrs in pictures:
            self.assertIn(attrs["aria-labelledby"], ids)
        tables = sum(tag == "table" for tag, _, _ in tree.tags)
        self.assertEqual(tables, 3)
        self.assertEqual(sum(tag == "caption" for tag, _, _ in tree.tags), tables)
        for tag, attrs, _ in tree.tags:
            if tag == "th":
                self.assertIn(attrs.get("scope"), ("col", "row"))
            if tag == "a":
                self.assertIn(attrs["href"][1:], ids)
        rows = [parents for tag, _, parents in tree.tags if tag == "th" and "tbody" in parents]
        self.assertEqual(len(rows), 4 + 3 + 2)

    def test_it_loads_nothing(self):
        text = self.page()
        for word in ("http:", "https:", "src=", "<script", "<link", "url(", "@import", "style="):
            self.assertNotIn(word, text)

    def test_names_are_text(self):
        text = self.page()
        self.assertIn("a&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;", text)
        self.assertIn(EVIL, [data for tag, data in Tree(text).texts if tag == "th"])

    def test_a_strict_parser_reads_it(self):
        try:
            import html5lib
        except ImportError:
            self.skipTest("html5lib is not here")
        html5lib.HTMLParser(strict=True).parse(self.page())

    def test_figures(self):
        text = re.sub(r"<[^>]+>", "|", self.page())
        self.assertIn("|preset=compact||2.30||100||5.00||0.0050 \u00b1 0.00010||95.0||+1.00 \u00b1 0.25|", text)
        self.assertIn("|default plan||200||12.0||12.0|", text)
        self.assertIn("|ggml flash f16||512||344.0||\u2013|", text)
        self.assertIn("|50 % of FP16||0.51||0.50||97.7||1||500||2.05|", text)
        self.assertIn("make speed", text)
        self.assertIn("make budget BUDGETS=", text)

    def test_commands_of_known_files(self):
        self.write("build/quality/demo.csv", GOOD["build/quality/m.csv"])
        commands = report.find_sources(False)["quality"].commands
        self.assertRegex(commands[0], r"^build/bench/quality examples/data/demo.gguf --csv build/quality/demo.csv ")
        self.assertEqual(commands[1], "make quality MODEL=m.gguf")


class Sources(Place):
    def test_nothing_is_measured_that_is_there(self):
        self.page()
        self.assertEqual(self.measured, [([], False)])

    def test_quick_runs_stand_in(self):
        for path in ("build/speed.csv", "build/budgets/none.csv", "build/budgets/50%.csv"):
            os.remove(path)
        found = report.find_sources(True)
        self.assertEqual(self.measured, [(["speed", "budgets"], True)])
        self.assertFalse(found["quality"].quick)
        self.assertEqual(found["speed"].files, ["build/report/speed.csv", "build/rivals.csv"])
        self.assertIn(" >build/report/speed.csv", found["speed"].commands[0])
        self.assertEqual(len(found["budgets"].files), 3)
        self.write("build/report/speed.csv", GOOD["build/speed.csv"])
        self.assertIn("A quick run", found["speed"].note())
        self.assertNotIn("A quick run", found["quality"].note())

    def test_a_failing_command(self):
        with self.assertRaisesRegex(report.Bad, "exit 3.* failed: oh$"):
            report.run_quietly(["sh", "-c", "echo oh >&2; exit 3"], "out.csv")
        self.assertFalse(os.path.exists("out.csv"))
        report.run_quietly(["echo", "x"], "out.csv")
        self.assertTrue(os.path.exists("out.csv"))

    def test_files_that_cannot_be_read(self):
        first = GOOD["build/quality/m.csv"].split("\n")[1]
        for path, text, why in (
                ("build/quality/m.csv", "plan,rival\n", "it has no rows"),
                ("build/quality/m.csv", "plan,rival\nx,0\n", "column bits must have a number, and has None"),
                ("build/quality/m.csv", QUALITY + first.replace("0.005", "nan"), "column kl must have a finite number"),
                ("build/quality/m.csv", QUALITY + first.replace("0.005", "<b>"), "column kl must have a number"),
                ("build/quality/m.csv", (QUALITY + first).replace("rival", "other"), "it must have the columns plan"),
                ("build/speed.csv", SPEED + "32,8,128,1,1,avx2,0,f16,4096,200,inf,20\n", "column ns must have a fin"),
                ("build/speed.csv", SPEED.replace("isa", "x") + "32,8,128,1,1,avx2,0,f16,4096,200,9,20\n",
                 "it must be what bench/attend --csv"),
                ("build/budgets/none.csv", BUDGET + "0,1,0,0,0,0,0,0,1,1\n", "tokens must be 1 or more"),
                ("build/budgets/none.csv", "\0\xff" * 10, "build/budgets/none.csv")):
            self.write(path, text)
            with self.assertRaises(report.Bad) as caught:
                self.page()
            self.assertIn(path, str(caught.exception))
            self.assertIn(why, str(caught.exception))
            self.write(path, GOOD[path])
        self.page()


class Pictures(unittest.TestCase):
    def test_ticks(self):
        labels = lambda axis: [label for _, label in axis.ticks]
        self.assertEqual(labels(report.Axis("", 0, 2000)), ["0", "500", "1,000", "1,500", "2,000"])
        self.assertEqual(labels(report.Axis("", 0, 4.7)), ["0", "1", "2", "3", "4"])
        self.assertEqual(labels(report.Axis("", 1e-5, 1, True)), ["1e-05", "1e-04", "0.001", "0.01", "0.1", "1"])
        self.assertEqual(labels(report.Axis("", 9, 450, True)), ["10", "20", "50", "100", "200"])
        self.assertEqual(labels(report.Axis("", 14, 37, True)), ["15", "20", "25", "30", "35"])
        for axis in (report.Axis("", 5, 5), report.Axis("", 5, 5, True), report.Axis("", 0, 0)):
            self.assertGreater(len(axis.ticks), 1)
            self.assertTrue(0 <= axis.at(5) or axis.high < 5)

    def picture(self, width=358):
        return report.Picture(width, 400, report.Axis("x", 0, 10), report.Axis("y", 0, 10), 100)

    def test_places(self):
        p = self.picture()
        self.assertEqual(p.place(0, 0), (56, 356))
        self.assertEqual(p.place(10, 10), (258, 34))
        log = report.Axis("", 1, 100, True)
        self.assertAlmostEqual(log.at(10), .5)
        self.assertEqual(log.at(0), 0)  # below the axis

    def test_labels_do_not_overlap(self):
        p = self.picture()
        for i in range(60):
            x, y = i * 7 % 11, i * 3 % 10
            p.mark(x, y, "s1", "tip")
        for i in range(60):
            p.label(i * 7 % 11, i * 3 % 10, "label %d" % i, "s1")
        boxes = p.taken[60:]
        self.assertGreater(len(boxes), 5)
        for i, a in enumerate(boxes):
            self.assertTrue(a[0] > p.left and a[2] < p.width and a[3] < p.bottom, a)
            for b in p.taken[:60] + boxes[i + 1:]:
                self.assertFalse(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3], (a, b))

    def test_names_at_the_right_move_apart(self):
        p = self.picture()
        before = len(p.parts)
        p.labels_at_the_right([(10, 5, "a", "s1"), (10, 5.1, "b", "s2"), (10, 4.9, "c", "s3"), (10, 0, "d", "s4"),
                               (10, .1, "e", "s5")])
        texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(\w)<', "".join(p.parts[before:]))
        places = sorted((float(y), name) for _, y, name in texts)
        self.assertEqual("".join(name for _, name in places), "baced")
        for (y, _), (below, _) in zip(places, places[1:]):
            self.assertGreaterEqual(below - y, report.LINE - .11)  # written with one digit
        self.assertLessEqual(places[-1][0], p.bottom + 4)

    def test_thinned(self):
        rows = [{"tokens": i, "level": i // 777} for i in range(2000)]
        kept = [row["tokens"] for row in report.thinned(rows)]
        self.assertLess(len(kept), 300)
        self.assertTrue({0, 776, 1553, 1999} <= set(kept))


class Colours(unittest.TestCase):
    """Texts contrast with the page by 4.5 or more (WCAG 2.2, 1.4.3), in light and in dark."""

    def light(self, colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = [c / 12.92 if c <= .04045 else ((c + .055) / 1.055) ** 2.4 for c in parts]
        return .2126 * r + .7152 * g + .0722 * b

    def test_contrast(self):
        self.assertAlmostEqual(self.light("#ffffff"), 1)
        schemes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
                   for block in re.findall(r":root \{([^}]*)\}", report.STYLE)]
        self.assertEqual(len(schemes), 2)
        self.assertEqual(set(schemes[0]), set(schemes[1]))
        for colours in schemes:
            for name in ["text", "muted"] + ["s%d" % i for i in range(7)]:
                for behind in ("page", "code") if name == "text" else ("page",):
                    a, b = sorted((self.light(colours[name]), self.light(colours[behind])))
                    self.assertGreaterEqual((b + .05) / (a + .05), 4.5, (name, behind))


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
