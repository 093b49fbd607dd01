#!/usr/bin/env python3
"""Makes one HTML page from runs of the benchmarks: quality, speed and budgets, with pictures, tables and the commands
that made them. The page loads nothing: no script, no font, no other file.

    make report                     build/report/index.html
    make report ARGS='-o FILE'      another file
    make report ARGS=--fresh        measures the quick runs again

    quality   build/quality/*.csv of `bench/quality --csv`
    speed     build/speed.csv and build/rivals.csv of `make speed` and `make rivals`
    budgets   build/budgets/*.csv of `make budget`

A quick run, of the demo model where one is needed, stands in for what is missing. Its files are kept in build/report.
The page names the commands and the days of its files. Pictures are drawn twice, for wide and for narrow screens.
"""
import argparse
import csv
import glob
import html
import math
import os
import re
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plot
import tables

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUICK = "build/report/"
DEMO = "examples/data/demo.gguf"
QUALITY_PLANS = ("preset=quality", "preset=balanced", "preset=compact", "preset=extreme", "64,448:kivi4,kivi4",
                 "preset=kivi", "64,none,int4", "q8_0", "q4_0", "hf-int4")
BUDGETS = "none", "60%", "35%"


class Bad(Exception):
    """An input that this program cannot read. The text is a sentence."""


# >>inputs
class Source:
    """Files of one kind, and the commands that made them."""

    def __init__(self, files, commands, quick):
        self.files, self.commands, self.quick = files, commands, quick

    def note(self):
        days = sorted({time.strftime("%Y-%m-%d", time.localtime(os.path.getmtime(f))) for f in self.files})
        text = "Measured on %s." % (days[0] if len(days) == 1 else "%s to %s" % (days[0], days[-1]))
        return text + (" A quick run: other work on the machine shows in it." if self.quick else "")


def quick_runs():
    """Returns {kind: [(file, program, command, whether the command prints the file)]}."""
    plans = " ".join("--plan %s" % plan for plan in QUALITY_PLANS)
    return {
        "quality": [(QUICK + "quality.csv", "build/bench/quality",
                     "build/bench/quality %s --text examples/data/demo_prompt.txt --window 0:1400 --cache build/report "
                     "%s --csv %squality.csv" % (DEMO, plans, QUICK), False)],
        "speed": [(QUICK + "speed.csv", "build/bench/attend",
                   "build/bench/attend --csv --mib 16 --formats f16,q8,kivi4,a30/r30,tiers --ctx 1024,4096,16384",
                   True)],
        "budgets": [(QUICK + "budget-%s.csv" % budget, "build/budget",
                     "build/budget %s --budget %s --csv %sbudget-%s.csv" % (DEMO, budget, QUICK, budget), False)
                    for budget in BUDGETS]}


def replace_file(path, data):
    """Replaces a file as a whole. Two runs at once write two new files."""
    new = "%s.%d.new" % (path, os.getpid())
    with open(new, "wb") as f:
        f.write(data)
    os.replace(new, path)


def run_quietly(command, out=None):
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if run.returncode != 0:
        raise Bad("%s failed: %s" % (" ".join(command), run.stderr.decode("utf-8", "replace").strip()[-400:]))
    if out:
        replace_file(out, run.stdout)


def measure(kinds, fresh):
    """Makes the missing files of the quick runs, with a line of progress for each."""
    runs = [run for kind in kinds for run in quick_runs()[kind] if fresh or not os.path.exists(run[0])]
    os.makedirs(QUICK, exist_ok=True)
    for i, (path, program, command, prints) in enumerate(runs):
        print("report: %d of %d, %s" % (i + 1, len(runs), command), file=sys.stderr, flush=True)
        run_quietly(["make", "-s", program])
        run_quietly(command.split(), path if prints else None)


def existing(pattern):
    return sorted(path for path in glob.glob(pattern) if os.path.getsize(path) > 0)


def find_sources(fresh):
    """Returns {kind: Source}; measures what is missing."""
    with open(tables.PAGE, encoding="utf-8") as f:
        page = f.read()
    found = {}
    quality = existing("build/quality/*.csv")
    if quality:
        names = [os.path.splitext(os.path.basename(path))[0] for path in quality]
        found["quality"] = Source(quality, [tables.find_command(page, name) or "make quality MODEL=%s.gguf" % name
                                            for name in names], False)
    speed = [path for path in ("build/speed.csv", "build/rivals.csv") if existing(path)]
    if "build/speed.csv" in speed:
        found["speed"] = Source(speed, ["make speed"], False)
    budgets = existing("build/budgets/*.csv")
    if budgets:
        names = [os.path.splitext(os.path.basename(path))[0] for path in budgets]
        found["budgets"] = Source(budgets, ["make budget BUDGETS='%s'" % " ".join(names)], False)
    missing = [kind for kind in ("quality", "speed", "budgets") if kind not in found]
    measure(missing, fresh)
    for kind in missing:
        runs = quick_runs()[kind]
        rivals = existing("build/rivals.csv") if kind == "speed" else []
        found[kind] = Source([run[0] for run in runs] + rivals,
                             [run[2] + (" >%s" % run[0] if run[3] else "") for run in runs]
                             + ["make rivals"] * len(rivals), True)
    return found


def number(row, key, path):
    try:
        x = float(row[key])
    except (KeyError, TypeError, ValueError):
        raise Bad("%s: column %s must have a number, and has %r" % (path, key, row.get(key)))
    if not math.isfinite(x):
        raise Bad("%s: column %s must have a finite number, and has %r" % (path, key, row[key]))
    return x


def rows_of(path, columns):
    """Returns the rows of a CSV file. Each column of `columns` is there and holds finite numbers."""
    try:
        rows = tables.read_rows(path)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise Bad("%s: %s" % (path, e))
    if not rows:
        raise Bad("%s: it has no rows; remove it, or measure again" % path)
    for row in rows:
        for column in columns:
            number(row, column, path)
    return rows


# >>pictures
def text_of(x):
    """Writes a number briefly, with commas between thousands."""
    if x and abs(x) < 1e-3:
        return "%.0e" % x
    return "{:,.0f}".format(x) if abs(x) >= 1000 else "%.4g" % x


class Axis:
    def __init__(self, name, low, high, log=False, ticks=None):
        self.name, self.log = name, log
        self.low, self.high = (low, high) if high > low else (low * .9, high * 1.1 or 1)
        self.ticks = ticks or (self.log_ticks() if log else self.linear_ticks())

    def at(self, x):
        """Returns the place of x, 0 to 1."""
        if self.log:
            return math.log(max(x, self.low) / self.low) / math.log(self.high / self.low)
        return (x - self.low) / (self.high - self.low)

    def log_ticks(self):
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0 ** p for p in powers for step in steps]
            ticks = [t for t in ticks if self.low <= t <= self.high]
            if len(ticks) <= 7:
                break
        return [(t, text_of(t)) for t in ticks] if len(ticks) > 2 else self.linear_ticks()

    def linear_ticks(self):
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * .999)
        first = math.ceil(self.low / step - 1e-9)
        return [(i * step, text_of(i * step)) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


MARKS = {  # shapes around (0, 0), so that a series has more than its colour
    "s1": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "s2": "M-3.6 -3.6H3.6V3.6H-3.6Z", "s3": "M0 -4.8L4.6 3.6H-4.6Z",
    "s4": "M0 -5L5 0L0 5L-5 0Z", "s5": "M0 4.8L4.6 -3.6H-4.6Z",
    "s6": "M-4 -1.4H-1.4V-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4Z"}
LETTER, LINE = 6.6, 14  # pixels of a letter and of a line of text at 12 pixels; letters are narrower on average


class Picture:
    """A chart in pixels. Series take the classes s1 to s6, which the page gives colours."""

    def __init__(self, width, height, x, y, right=16):
        self.width, self.height, self.x, self.y = width, height, x, y
        self.left, self.right, self.top, self.bottom = 56, width - right, 34, height - 44
        self.parts, self.taken = [], []
        self.draw_axes()

    def place(self, x, y):
        return (self.left + self.x.at(x) * (self.right - self.left),
                self.bottom - self.y.at(y) * (self.bottom - self.top))

    def text(self, x, y, text, style="", anchor="start"):
        self.parts.append('<text x="%.1f" y="%.1f"%s%s>%s</text>' % (
            x, y, ' class="%s"' % style if style else "", "" if anchor == "start" else ' text-anchor="%s"' % anchor,
            html.escape(text)))

    def draw_axes(self):
        last = -1e9
        for x, label in self.x.ticks:
            px, half = self.place(x, self.y.low)[0], len(label) * LETTER / 2
            self.parts.append('<path class="grid" d="M%.1f %dV%d"/>' % (px, self.top, self.bottom))
            if px - half > last and px + half < self.width:
                self.text(px, self.bottom + 17, label, "muted", "middle")
                last = px + half + 4
        for y, label in self.y.ticks:
            py = self.place(self.x.low, y)[1]
            self.parts.append('<path class="grid" d="M%d %.1fH%d"/>' % (self.left, py, self.right))
            self.text(self.left - 7, py + 4, label, "muted", "end")
        self.text(4, 14, self.y.name, "muted")
        self.text(self.right, self.height - 6, self.x.name, "muted", "end")

    def line(self, points, style, dashes=""):
        path = "M" + "L".join("%.1f %.1f" % self.place(x, y) for x, y in points)
        self.parts.append('<path class="line %s%s" d="%s"/>' % (style, " " + dashes if dashes else "", path))

    def mark(self, x, y, style, tip):
        px, py = self.place(x, y)
        self.parts.append('<path class="mark %s" transform="translate(%.1f %.1f)" d="%s"><title>%s</title></path>'
                          % (style, px, py, MARKS[style], html.escape(tip)))
        self.taken.append((px - 5, py - 5, px + 5, py + 5))

    def label(self, x, y, text, style, spots=((8, 4), (-8, 4), (8, -7), (-8, -7), (8, 15), (-8, 15))):
        """Writes a label at the first free spot beside a point; if all are taken, it writes none."""
        px, py = self.place(x, y)
        for far in (1, 1.7):
            for dx, dy in spots:
                wide = len(text) * LETTER
                x0 = px + far * dx - (wide if dx < 0 else 0 if dx else wide / 2)
                box = x0, py + far * dy - 11, x0 + wide, py + far * dy + 3
                inside = box[0] > self.left and box[2] < self.width and box[1] > self.top - 12 and box[3] < self.bottom
                if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3]
                                      for b in self.taken):
                    self.taken.append(box)
                    self.text(px + far * dx, py + far * dy, text, style,
                              "start" if dx > 0 else "end" if dx < 0 else "middle")
                    return

    def labels_at_the_right(self, ends):
        """Names lines at their right ends. ends: (x, y, text, style). Labels that would overlap move apart."""
        ends = sorted((self.place(x, y) + (text, style) for x, y, text, style in ends), key=lambda e: e[1])
        at, lowest = [], self.top - 8
        for _, py, _, _ in ends:
            at.append(max(py, lowest))
            lowest = at[-1] + LINE
        highest = self.bottom
        for i in reversed(range(len(at))):
            at[i] = min(at[i], highest)
            highest = at[i] - LINE
        for (px, py, text, style), y in zip(ends, at):
            self.parts.append('<path class="leader %s" d="M%.1f %.1fL%d %.1f"/>'
                              % (style, px + 5, py, self.right + 8, y))
            self.text(self.right + 11, y + 4, text, style)

    def svg(self, name, title, style):
        return ('<svg class="%s" role="img" aria-labelledby="%s" viewBox="0 0 %d %d">\n<title id="%s">%s</title>\n'
                "%s\n</svg>" % (style, name, self.width, self.height, name, html.escape(title), "\n".join(self.parts)))


def figure(name, title, draw, legend, note):
    """draw(width, height) returns a Picture. The page shows one of two sizes."""
    items = "".join('<li><svg class="swatch" aria-hidden="true" viewBox="-8 -8 16 16"><path class="mark %s" d="%s"/>'
                    "</svg>%s</li>" % (style, MARKS[style], html.escape(text)) for style, text in legend)
    return "<figure>\n%s%s\n%s\n<figcaption>%s. %s</figcaption>\n</figure>" % (
        '<ul class="legend">%s</ul>\n' % items if items else "", draw(760, 430).svg(name + "-wide", title, "wide"),
        draw(358, 400).svg(name + "-narrow", title, "narrow"), html.escape(title), html.escape(note))


def table(caption, head, rows):
    """The first cell of a row is its heading."""
    lines = ['<section class="scroll" tabindex="0" aria-label="%s">\n<table>\n<caption>%s</caption>'
             % (html.escape(caption), html.escape(caption))]
    names = "".join('<th scope="col">%s</th>' % html.escape(name) for name in head)
    lines.append("<thead><tr>%s</tr></thead>\n<tbody>" % names)
    for first, *cells in rows:
        lines.append('<tr><th scope="row">%s</th>%s</tr>' % (
            html.escape(first), "".join("<td>%s</td>" % html.escape(cell) for cell in cells)))
    return "\n".join(lines) + "\n</tbody>\n</table>\n</section>"


# >>quality
KINDS = {"tieredkv": "s1", "others' formats here": "s2", "rivals": "s3"}
QUALITY_COLUMNS = "bits", "bytes_per_token", "ratio", "kl", "kl_error", "top1_percent", "dppl_percent", "dppl_error"


def quality_picture(name, title, rows, path):
    shown = [row for row in rows if number(row, "kl", path) > 0 and number(row, "bits", path) > 0
             and tables.keeps_old_tokens(row) and "tables=" not in row["plan"]]
    if not shown:
        return ""
    low, high = min(float(r["kl"]) for r in shown), max(float(r["kl"]) for r in shown)
    widest = max(float(r["bits"]) for r in shown)

    def draw(width, height):
        p = Picture(width, height, Axis("bits per value of old tokens", 0, widest * 1.12),
                    Axis("KL divergence to the exact cache, nats per token", low / 2, high * 2, True))
        for kind, style in KINDS.items():
            mine = [(float(r["bits"]), float(r["kl"])) for r in shown if plot.kind_of(r) == kind]
            if len(mine) > 1:
                p.line(plot.front(mine), style, "thin")
        for row in shown:
            x, y, error = (float(row[key]) for key in ("bits", "kl", "kl_error"))
            style = KINDS[plot.kind_of(row)]
            p.line([(x, min(y + error, high * 2)), (x, max(y - error, low / 2))], style, "thin")
            p.mark(x, y, style, "%s: %.2f bits, KL %s" % (row["plan"], x, tables.short(y)))
        for row in shown:
            p.label(float(row["bits"]), float(row["kl"]), plot.label_of(row["plan"]), KINDS[plot.kind_of(row)])
        return p

    kinds = {plot.kind_of(row) for row in shown}
    return figure(name, title, draw, [(style, kind) for kind, style in KINDS.items() if kind in kinds],
                  "Further down and left is better. Bars are standard errors. Lines join the best plans of a kind. A "
                  "label without space is left out; the table has all plans.")


def quality_section(source):
    parts = []
    for i, path in enumerate(source.files):
        name = os.path.splitext(os.path.basename(path))[0]
        rows = [row for row in rows_of(path, QUALITY_COLUMNS) if row.get("window") == "all"]
        if not rows or any(row.get("plan") is None or row.get("rival") not in ("0", "1") for row in rows):
            raise Bad("%s: it must have the columns plan, rival and window of bench/quality --csv" % path)
        parts.append("<h3>%s</h3>" % html.escape(path))
        parts.append(quality_picture("quality-%d" % i, "Loss against size of the plans of %s" % name, rows, path))
        parts.append(table("Plans of %s" % name, ("plan", "bits", "bytes per token", "times smaller than FP16",
                                                 "KL divergence", "same likeliest token, %", "growth of perplexity, %"),
                           [(row["plan"], tables.bits(row), text_of(float(row["bytes_per_token"])),
                             "%.2f" % float(row["ratio"]), tables.with_error(row).replace("+-", "\u00b1"),
                             "%.1f" % float(row["top1_percent"]), tables.growth(row).replace("+-", "\u00b1"))
                            for row in rows]))
    return parts


# >>speed
SERIES = {"f16": "s2", "q8": "s5", "kivi4": "s6", "a40/r40": "s3", "a30/r30": "s4", "tiers": "s1"}
ATTEND_COLUMNS = "heads", "kv_heads", "dim", "queries", "threads", "ctx", "bytes", "ns"
RIVAL_COLUMNS = "ctx", "bytes", "time"


def short_tokens(n):
    return "%gM" % (n / 2**20) if n >= 2**20 else "%gK" % (n / 1024)


def name_of_line(engine, name):
    if engine == "tieredkv":
        return plot.LINES[name][0] if name in plot.LINES else name
    return "%s %s" % (engine, name)


def speed_section(source):
    for path in source.files:
        rows = tables.read_rows(path)
        rows_of(path, RIVAL_COLUMNS if rows and "what" in rows[0] else ATTEND_COLUMNS)
    try:
        lines, read = plot.decode_rows(source.files)
    except (KeyError, ValueError, IndexError, ArithmeticError) as e:
        raise Bad("%s: it must be what bench/attend --csv or bench/rivals.py --csv writes (%s)"
                  % (" or ".join(source.files), e))
    lines = {key: at for key, at in lines.items() if key[0] != "tieredkv" or key[1] in SERIES}
    if not lines:
        raise Bad("%s: no row has the shape of the picture: 32 query and 8 KV heads of 128" % source.files[0])
    every = sorted({n for at in lines.values() for n in at})
    times = [ns for at in lines.values() for ns, _ in at.values()]

    def draw(width, height):
        wide = width > 500
        p = Picture(width, height, Axis("tokens in the cache", every[0], every[-1], True,
                                        [(n, short_tokens(n)) for n in every]),
                    Axis("ns per token and KV head, one thread", min(times) * .8, max(times) * 1.25, True),
                    150 if wide else 108)
        ends = []
        for (engine, name), at in lines.items():
            own, points = engine == "tieredkv", sorted((n, ns) for n, (ns, _) in at.items())
            style = SERIES[name] if own else "s0"
            p.line(points, style, "" if own else "dashed" if "flash" in engine else "dotted")
            for n, ns in points if own else ():
                p.mark(n, ns, style, "%s, %s tokens: %.1f ns" % (name_of_line(engine, name), text_of(n), ns))
            ends.append(points[-1] + (name_of_line(engine, name), style))
        p.labels_at_the_right(ends)
        return p

    return [figure("speed", "Time of a decode step against context", draw, (),
                   "Lower is faster. Reading memory alone ran at %.0f GB/s beside these rows." % read),
            table("ns per token and KV head, by context",
                  ("format", "bytes per token and KV head") + tuple("{:,}".format(n) for n in every),
                  [(name_of_line(engine, name), text_of(max(b for _, b in at.values())))
                   + tuple("%.1f" % at[n][0] if n in at else "\u2013" for n in every)
                   for (engine, name), at in lines.items()])]


# >>budgets
BUDGET_COLUMNS = "tokens", "bytes", "level", "budget", "fp16", "total"


def budget_name(last):
    if not last["budget"]:
        return "no budget"
    return "%.0f %% of FP16" % (100 * last["budget"] / (last["fp16"] / last["tokens"] * last["total"]))


def thinned(rows):
    """Leaves out steps that a picture cannot show. Changes of level and the ends stay."""
    step = max(1, len(rows) // 240)
    return [row for i, row in enumerate(rows) if i % step == 0 or i == len(rows) - 1
            or (i + 1 < len(rows) and rows[i + 1]["level"] != row["level"])]


def budgets_section(source):
    for path in source.files:
        for row in rows_of(path, BUDGET_COLUMNS):
            if number(row, "tokens", path) < 1 or number(row, "fp16", path) <= 0:
                raise Bad("%s: tokens must be 1 or more, and fp16 above 0" % path)
    try:
        runs = plot.budget_runs(source.files)
    except ValueError as e:
        raise Bad("%s: it must be what budget --csv writes (%s)" % (" or ".join(source.files), e))
    styles = ["s%d" % (1 + i % 6) for i in range(len(runs))]
    most = max(max(row["bytes"], row["budget"]) for rows in runs for row in rows) / 1e6
    longest = max(rows[-1]["tokens"] for rows in runs)

    def draw(width, height):
        wide = width > 500
        p = Picture(width, height, Axis("tokens in the cache", 0, longest),
                    Axis("MB, all memory counted", 0, most * 1.05), 116 if wide else 100)
        for rows, style in zip(runs, styles):
            last = rows[-1]
            if last["budget"]:
                p.line([(0, last["budget"] / 1e6), (longest, last["budget"] / 1e6)], style, "dashed")
            p.line([(row["tokens"], row["bytes"] / 1e6) for row in thinned(rows)], style)
        for rows, style in zip(runs, styles):
            for before, row in zip(rows, rows[1:]):
                if row["level"] != before["level"]:
                    at = before["tokens"], before["bytes"] / 1e6
                    p.mark(*at, style, "%s, %s tokens: level %d"
                           % (budget_name(rows[-1]), text_of(at[0]), row["level"]))
                    p.label(*at, "%d" % row["level"], style, ((0, -9), (0, 19), (-8, -7), (8, 15)))
        p.labels_at_the_right([(rows[-1]["tokens"], rows[-1]["bytes"] / 1e6, budget_name(rows[-1]), style)
                               for rows, style in zip(runs, styles)])
        return p

    lines = []
    for rows in runs:
        last, peak = rows[-1], max(row["bytes"] for row in rows)
        lines.append((budget_name(last), "%.2f" % (last["budget"] / 1e6) if last["budget"] else "\u2013",
                      "%.2f" % (peak / 1e6), "%.1f" % (100 * peak / last["budget"]) if last["budget"] else "\u2013",
                      "%d" % last["level"], text_of(last["tokens"]), "%.2f" % (last["fp16"] / last["bytes"])))
    return [figure("budgets", "Bytes of the cache under budgets", draw, (),
                   "Dashed lines are the budgets. A mark is a change to the level beside it."),
            table("Runs under budgets", ("budget", "budget, MB", "peak, MB", "peak, % of budget", "last level",
                                         "tokens", "times smaller than FP16"), lines)]


# >>the page
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2128; --muted: #57606a; --rule: #d0d7de;
  --grid: #e4e8ec; --code: #f3f5f7; --s0: #5c6570; --s1: #0b5cad; --s2: #a94400; --s3: #5f5f8c; --s4: #0a6b4b;
  --s5: #9c2a78; --s6: #755700 }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e6e9ee; --muted: #a3adb9; --rule: #3a424c;
  --grid: #29303a; --code: #1d232b; --s0: #a3adb9; --s1: #6cb2fb; --s2: #f5a468; --s3: #b7b7ef; --s4: #62d0a0;
  --s5: #f08fce; --s6: #dfc45c } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 54rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--rule) }
h3 { font-size: 1rem; overflow-wrap: anywhere }
a { color: var(--s1) }
figure { margin: 1rem 0 }
figcaption, .note { color: var(--muted); font-size: .875rem }
svg { display: block; width: 100%; height: auto }
svg text { font-size: 12px; fill: var(--text); stroke: var(--page); stroke-width: 3px; paint-order: stroke }
.wide { max-width: 760px }
.narrow { display: none; max-width: 440px }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0 0 .5rem; padding: 0; list-style: none;
  font-size: .875rem }
.legend li { display: flex; align-items: center; gap: .3rem }
.swatch { width: 16px; height: 16px }
.grid { stroke: var(--grid); fill: none }
svg .muted { fill: var(--muted) }
.line { fill: none; stroke-width: 1.8 }
.thin { stroke-width: 1; opacity: .7 }
.dashed { stroke-width: 1.2; stroke-dasharray: 6 4 }
.dotted { stroke-width: 1.2; stroke-dasharray: 2 3 }
.leader { fill: none; stroke-width: 1; opacity: .45 }
.scroll { overflow-x: auto; margin: 1rem 0 }
.scroll:focus-visible { outline: 2px solid var(--s1) }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--muted); padding-bottom: .3rem }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: bottom }
td { white-space: nowrap }
thead th { font-weight: 600; min-width: 5rem; line-height: 1.3 }
tbody th { font-weight: 500; min-width: 7.5rem; overflow-wrap: break-word }
th:first-child { text-align: left; padding-left: 0 }
pre { padding: .6rem .8rem; background: var(--code); border-radius: 4px; font-size: .8125rem; white-space: pre-wrap;
  overflow-wrap: anywhere }
@media (max-width: 43rem) { .wide { display: none } .narrow { display: block } }
""" + "".join("svg text.s%d { fill: var(--s%d) }\n.line.s%d, .leader.s%d { stroke: var(--s%d) }\n"
              ".mark.s%d { fill: var(--s%d) }\n" % ((i,) * 7) for i in range(7))

SECTIONS = {
    "quality": ("Quality", "The loss of plans against an exact cache of the same model and text.", quality_section),
    "speed": ("Speed", "Attention of one layer: a decode step with 32 query and 8 KV heads of 128, one thread.",
              speed_section),
    "budgets": ("Budgets", "A model generates text while the cache keeps a budget.", budgets_section)}


def version():
    with open(os.path.join(ROOT, "src", "api.h"), encoding="ascii") as f:
        return re.search(r'TKV_VERSION_STRING "(.*)"', f.read()).group(1)


def page(sources):
    """Returns the text of the page."""
    links = " \u00b7 ".join('<a href="#%s">%s</a>' % (kind, SECTIONS[kind][0]) for kind in SECTIONS)
    parts = ['<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>tieredkv: measured</title>\n'
             '<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>%s</style>\n</head>\n'
             "<body>\n<header>\n<h1>tieredkv %s: quality, speed, budgets</h1>\n"
             '<nav aria-label="Sections">%s</nav>\n</header>\n<main>'
             % (STYLE, version(), links)]
    for kind, (title, lead, make) in SECTIONS.items():
        source = sources[kind]
        parts.append('<section id="%s">\n<h2>%s</h2>\n<p>%s</p>' % (kind, title, lead))
        parts += make(source)
        parts.append('<p class="note">%s The commands:</p>\n<pre><code>%s</code></pre>\n</section>' % (
            html.escape(source.note()), html.escape("\n".join(source.commands))))
    return "\n".join(part for part in parts if part) + (
        '\n</main>\n<footer>\n<p class="note">Made by <code>make report</code>. Speeds hold for the machine that ran '
        "the commands.</p>\n</footer>\n</body>\n</html>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", default=QUICK + "index.html", metavar="FILE")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    out = os.path.abspath(args.o) if args.o != QUICK + "index.html" else os.path.join(ROOT, args.o)
    os.chdir(ROOT)
    try:
        text = page(find_sources(args.fresh))
        os.makedirs(os.path.dirname(out), exist_ok=True)
        replace_file(out, text.encode("utf-8"))
    except (Bad, OSError) as e:
        sys.exit("report: %s" % e)
    print("report: %s" % os.path.relpath(out))


if __name__ == "__main__":
    main()
