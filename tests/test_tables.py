#!/usr/bin/env python3
"""bench/tables.py: tables from CSV files, and QUALITY.md has a command for each of its own."""
import os
import re
import sys
import unittest

sys.dont_write_bytecode = True
import results

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import tables


def row(plan, window, kl, **more):
    values = dict(plan=plan, window=window, bits="2.5", bytes_per_token="100", ratio="5", kl=str(kl),
                  kl_error="0.001", kl_999="0.5", top1_percent="95", exact_ppl="17.5",
                  dppl_percent="1", dppl_error="0.25", passkey_right="3", passkey_asked="0")
    values.update(more)
    return values


class Tables(unittest.TestCase):
    def test_table(self):
        rows = [row("a", "0:9", 0.25), row("a", "9:9", 0.5), row("a", "all", 0.375)]
        said = tables.table(rows)
        self.assertEqual(said[0], "Windows 0:9, 9:9. Perplexity of the exact cache 17.500 / 17.500.")
        self.assertEqual(said[-1], "| `a` | 2.50 | 100 | 5.00 | 0.375 +- 0.0010 | 0.250 / 0.500 | 0.500 "
                                   "| 95.0 | +1.00 +- 0.25 |")
        for r in rows:
            r["passkey_asked"] = "5"
        self.assertTrue(tables.table(rows)[-1].endswith("| 3 of 5 |"))

    def test_sides(self):
        rows = [row("a", "0:9", 0.25), row("a", "all", 0.25), row("a tables=512", "all", 0.5),
                row("b tables=512", "all", 1), row("a tables=4096", "all", 0.125)]
        said = tables.sides(rows)
        self.assertIn("KL, learned online | KL, `tables=512` | KL, `tables=4096` |", said[2])
        cells = said[-1].split(" | ")
        self.assertEqual(cells[2:5], ["0.250 +- 0.0010", "0.500 +- 0.0010", "0.125 +- 0.0010"])
        self.assertEqual(len(said), 5)  # b has no row without tables

    def test_tasks(self):
        head = dict(plan="a", ratio="3.701", asked="8", low="0.3", high="0.95")
        rows = [dict(head, depth="all", exact_right="4", right="3"), dict(head, depth="5", exact_right="1", right="0"),
                dict(head, depth="95", exact_right="3", right="3")]
        said = tables.table_of(rows, None)
        self.assertTrue(said[0].endswith("| 5 % | 95 % |"))
        self.assertEqual(said[-1], "| `a` | 3.70 | 8 | 4 | 3, 75.0 (30.0 to 95.0) | 0 of 1 | 3 of 3 |")
        for r in rows:
            r.update(exact_right="0", right="0")
        self.assertIn("| 0, - (30.0 to 95.0) |", tables.table_of(rows, None)[-1])
        names = ("acc", "acc_norm", "same", "same_norm")
        choice = dict(plan="a", ratio="3.7", asked="10", moved_nats="0.25")
        for n, name in enumerate(names):
            choice.update({name: str(n + 5), name + "_low": "0.1", name + "_high": "0.9"})
        self.assertEqual(tables.table_of([choice], None)[-1], "| `a` | 3.70 | 10 | 5, 50.0 (10.0 to 90.0) | "
                         "6, 60.0 (10.0 to 90.0) | 7, 70.0 (10.0 to 90.0) | 8, 80.0 (10.0 to 90.0) | 0.250 |")

    def test_commands(self):
        page = ("    quality MODEL --csv build/quality/x.csv \\\n        --plan y\n\n"
                "<!-- x.csv -->\nold\n<!-- end -->\n")
        self.assertEqual(tables.command_of(page, "x"), "quality MODEL --csv build/quality/x.csv --plan y")
        with self.assertRaises(SystemExit):
            tables.command_of(page, "y")

    def test_page(self):
        with open(tables.PAGE) as f:
            page = f.read()
        names = [match.group(2) for match in tables.PLACE.finditer(page)]
        self.assertEqual(len(names), len(re.findall(r"<!-- end -->", page)))
        self.assertGreater(len(names), 3)
        for name in names:
            self.assertRegex(tables.command_of(page, name), "^build/bench/(quality|tasks) ", name)


if __name__ == "__main__":
    results.run()
