#!/usr/bin/env python3
"""README.md, the manual, bench/CLAIMS.md and pictures say the same of a figure as the file that it comes from."""
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import switches

read = switches.read  # a file of the repository


def number(text):
    return float(text.replace(",", ""))


def row_of(text, begin):
    """The cells of the row of a table that begins so."""
    rows = [line for line in text.splitlines() if line.startswith("| " + begin)]
    if len(rows) != 1:
        raise ValueError("%d rows begin with %s" % (len(rows), begin))
    return [cell.strip() for cell in rows[0].strip("|").split(" | ")]


class Divergences(unittest.TestCase):
    """bench/QUALITY.md has the figures of plans on SmolLM2; README.md and chapter 6 of the manual round them."""

    PLANS = {"quality": "preset=quality", "balanced": "preset=balanced", "archive A30 + R20": "64,448:a40/r40,a30/r20",
             "compact": "preset=compact", "extreme": "preset=extreme", "archive and warm KIVI4": "64,448:kivi4,kivi4",
             "warm KIVI4, archive KIVI2": "64,448:kivi4,kivi2", "A3 + R3": "preset=balanced",
             "A3 + R2": "64,448:a40/r40,a30/r20", 'A2.5 + R2 ("compact")': "preset=compact",
             'A2 + R1.5 ("extreme")': "preset=extreme", "KIVI-4": "64,448:kivi4,kivi4", "KIVI-2": "64,448:kivi4,kivi2",
             "llama.cpp q4_0 with its Hadamard transform": "q4_0+h", "q8_0": "q8_0"}

    @classmethod
    def setUpClass(cls):
        cls.quality = read("bench/QUALITY.md")
        cls.table = re.search(r"<!-- smollm2\.csv -->(.*?)<!-- end -->", cls.quality, re.S).group(1)

    def check(self, name, bits, kl, growth):
        """`kl` and `growth` are texts. They have as many digits as they like."""
        _, of_bits, _, _, of_kl, *_, of_growth = row_of(self.table, "`%s` |" % self.PLANS[name])
        self.assertEqual(float(bits), float(of_bits), name)
        for said, of in ((kl, of_kl), (growth, of_growth)):
            exact = float(of.split(" +- ")[0])
            self.assertLessEqual(abs(float(said) - exact), 0.501 * 10 ** -len(said.partition(".")[2]), (name, said, of))

    def test_manual(self):
        table = read("src/manual.h").partition("plan                          bits   KL divergence")[2].partition("\n *\n")[0]
        rows = re.findall(r"^ \*   (\S.*?\S)  +([\d.]+) +([\d.]+) +\+?(\S+) %$", table, re.M)
        self.assertEqual(len(rows), 7)
        for row in rows:
            self.check(*row)

    def test_readme(self):
        text = read("README.md")
        n = 0
        for begin in ("SmolLM2-135M, two windows of 4,096 tokens of WikiText-2, ours", "the same, formats of others"):
            for plan in row_of(text, begin)[1].split("; "):
                name, bits, kl, growth = re.match(r"(.*) ([\d.]+), \**([\d.]+?)\**, \+?(\S+) %$", plan).groups()
                self.check(name, bits, kl, growth)
                n += 1
        self.assertEqual(n, 8)

    def test_nine_texts(self):
        section = self.quality.partition("## Nine texts")[2].partition("## Another text")[0]
        cells = row_of(section, "all nine, equal weights")
        balanced, kivi, compact, extreme = cells[1], cells[2], cells[6], cells[7]
        said = row_of(read("README.md"), "nine texts ")[:2]
        self.assertEqual(re.findall(r"bits, \**(\.\d+)", said[1]), [balanced, kivi, compact, extreme])
        self.assertIn("Four windows of 4,096 tokens of each text", section)
        self.assertIn(", four windows of 4,096 each", said[0])
        self.assertIn("nine texts, four windows each", self.quality.partition("## Limits")[2])
        for page in (section, read("src/manual.h")):
            times = re.search(r"balanced\"? has (\.\d\d) times the\s(?: \*\s+)?divergence of KIVI-?4 in the mean", page).group(1)
            self.assertAlmostEqual(float(times), float(balanced) / float(kivi), delta=.02)  # of means with more digits

    def test_longest_text(self):
        """Each page that has limits names the longest text that was read."""
        pages = self.quality + read("bench/LLAMACPP.md")
        longest = max(int(n) for n in re.findall(r"--window \d+:(\d+)", pages))
        for name in ("README.md", "src/manual.h", "bench/QUALITY.md"):
            limits = re.search(r"trained\s+(?: \* +)?for more\s+(?: \* +)?than 8,192 tokens(.{0,300})", read(name), re.S).group(1)
            self.assertIn("{:,}".format(longest), limits, name)


class Claims(unittest.TestCase):
    """bench/CLAIMS.md rounds what bench/QUALITY.md has."""

    PARTS = {"Q": "SmolLM2-135M-Instruct", "Q8": "A window of 8,192", "QO": "The other methods", "QK": "Dropping tokens",
             "QP": "Passkeys", "QT": "Task accuracy", "[32K](QUALITY.md#kvquant-at-32768-tokens)": "The other methods"}

    def test_numbers_of_quality(self):
        parts = {}
        for part in re.split(r"^## ", read("bench/QUALITY.md"), flags=re.M)[1:]:
            parts[part.partition("\n")[0]] = [number(n) for n in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*|(?<![\w.])\.\d+", part)]
        rows = 0
        for line in read("bench/CLAIMS.md").splitlines():
            cells = line.split(" | ")
            if len(cells) < 4 or not set(cells[2].split(", ")) <= set(self.PARTS):
                continue
            known = [n for name in cells[2].split(", ") for n in parts[self.PARTS[name]]]
            # KL divergences and growths of perplexity. Counts and the arithmetic on them are for the reader.
            for said in re.findall(r"(?<![\w.\d])[+-]?(\d*\.\d+|\d+(?= %))", re.sub(r"\([^)]*\)|\b1 %", "", cells[1])):
                step = 10 ** -len(said.partition(".")[2])
                self.assertTrue(any(abs(float(said) - n) <= 0.501 * step for n in known), "%s in: %s" % (said, line))
            rows += 1
        self.assertGreater(rows, 12)

    def assert_said(self, text):
        self.assertTrue(text in read("bench/CLAIMS.md"), text)

    def test_numbers_of_claims(self):
        """Bytes and lengths that build/bench/claims prints stand in CLAIMS.md and QUALITY.md."""
        library = os.environ.get("LIBRARY", "examples/tieredkv.c").split()
        with tempfile.TemporaryDirectory() as place:
            program = os.path.join(place, "claims")
            subprocess.check_call([os.environ.get("CC", "cc"), "bench/claims.c"] + library + ["-o", program, "-lm", "-pthread"], cwd=ROOT)
            lengths, archive, table = (subprocess.check_output([program, what]).decode() for what in ("lengths", "archive", "bytes"))
        quality = read("bench/QUALITY.md").partition("### What a default cache holds")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|$", quality, re.M)
        self.assertEqual(len(rows), 12)
        for preset, tokens, *said in rows:
            printed = re.search(r"^%s +%d +([\d.]+) +[\d.]+ +([\d.]+) +([\d.]+) +([\d.]+) %%$" % (preset, number(tokens)), lengths, re.M)
            self.assertEqual(list(printed.groups()), said, (preset, tokens))
        times = dict(re.findall(r"^(\S+) +[\d.]+ bits, +([\d.]+) times", archive, re.M))
        for name, digits, form in (("a30/r30", 1, "%s times (A3 + R3, default)"), ("a20/r15", 1, "%s (A2 + R1.5)"), ("a15/r10", 1, "%s (A1.5 + R1"),
                                   ("kivi2", 2, "%s times with groups of 64"), ("kvquant3", 2, "%s times with outliers"), ("fp4", 2, "FP4 is %s times")):
            self.assert_said(form % ("%.*f" % (digits, float(times[name]))))
        gigabytes = {}
        for line in table.splitlines()[2:]:
            shape, tokens, seqs, fp16, plans = re.match(r"(.{34}) +(\d+) +(\d+) +([\d.]+) (.*)", line).groups()
            gigabytes[shape.strip(), int(tokens), int(seqs)] = [float(fp16)] + [float(n) for n in re.findall(r"([\d.]+) \(", plans)]
        big = gigabytes["540B, one KV head per query head", 2048, 512]  # FP16, balanced, compact, extreme, ..., a15/r10
        self.assert_said("become %.0f GB (default), %.0f (A2 + R1.5), %.0f (A1.5 + R1, no warm tier)" % (big[1], big[3], big[7]))
        one = gigabytes["540B, one KV head", 2048, 512]
        self.assert_said("FP16 takes %.0f GB, and the default plan %.0f (B)" % (one[0], one[1]))
        long = gigabytes["70B, 64 KV heads", 32768, 8]
        self.assert_said("%.0f GB become %.0f (default), %.0f (KIVI-2), %.0f (A2 + R1.5), %.0f (A1.5 + R1" % (long[0], long[1], long[4], long[3], long[7]))
        marlin = gigabytes["8B, 8 KV heads", 4096, 1]
        self.assert_said("the default plan %.2f (%s GB)" % (marlin[0] / marlin[1], ("%.3f" % marlin[1])[1:]))


class Switches(unittest.TestCase):
    """README.md and chapter 17 of the manual have the bytes of bench/switches.csv."""

    def test_pages(self):
        of = switches.figures()
        self.assertEqual({"%s -D%s" % (switches.SMALL, name) for name in switches.switches()} - set(of), set())
        for page in switches.PAGES:
            self.assertEqual(switches.filled(read(page), of), read(page), "python3 tools/switches.py --fill")
        self.assertNotEqual(switches.filled(read("README.md"), {build: (n + 1e6, .5) for build, (n, _) in of.items()}), read("README.md"))
        table = re.findall(r"`(TKV_\w+)`", read("README.md").partition("| bytes saved |")[2].partition("\n\n")[0])
        self.assertEqual(sorted(table), sorted(switches.switches()))

    def test_they_are_of_this_library(self):
        """The limit that .ci/run holds the smallest object to is near the file's: the file is not of an old build."""
        limit = int(re.search(r"smallest (\d+) gcc", read(".ci/run")).group(1))
        self.assertLess(abs(switches.figures()[switches.SMALLEST][0] / limit - 1), .03, "run tools/switches.py")


class Picture(unittest.TestCase):
    """What README.md says of the lines of bench/speed.svg."""

    def test_lines(self):
        svg = read("bench/speed.svg")
        text = " ".join(read("README.md").partition("bench/speed.svg)\n")[2].partition("## Use")[0].split())
        legend = re.findall(r">([^<>]+)</text>", svg)
        gigabytes, = [re.search(r"(\d+) GB/s", name).group(1) for name in legend if name.startswith("reading alone")]
        self.assertIn("at %s GB/s" % gigabytes, text)
        lines, x = [], r"(?:M|L) ([\d.]+) ([\d.]+)"
        for path, style in re.findall(r'<path d="(M [^"]*)"[^>]*style="fill: none; ([^"]*)"', svg):
            points = {a: float(b) for a, b in re.findall(x, path)}
            if len(points) > 2 and "linecap: square" in style or "dasharray" in style and len(points) > 2:
                lines.append((re.search(r"stroke: (#\w+)", style).group(1), "dasharray: 1,1.65" in style, "dasharray" in style, points))
        width = min(max(map(float, points)) for _, _, _, points in lines if len(points) == 3)
        lines = [line for line in lines if min(map(float, line[3])) < width]  # those of the legend stand at the right
        broken = {colour for colour, dotted, dashed, _ in lines if dashed and not dotted}
        self.assertEqual(broken, {"#777777", "#b07030"})  # ggml, ik_llama.cpp
        self.assertIn("llama.cpp's ggml (grey) and ik_llama.cpp (brown)", text)
        faster = {}  # colour -> places where a solid line is below its dotted one
        for colour, dotted, dashed, points in lines:
            if not dashed:
                limit, = [p for c, d, _, p in lines if c == colour and d]
                faster[colour] = sorted(float(at) for at in points if points[at] > limit[at])
        places = sorted({float(at) for _, _, _, points in lines for at in points})[:2]  # 4K, 16K
        self.assertEqual({c for c, at in faster.items() if at}, {"#d55e00", "#cc79a7"})
        self.assertEqual([at for at in faster.values() if at], [places, places])
        self.assertIn("F16 and 8 bits are faster than theirs at 4K and 16K tokens", text)


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
