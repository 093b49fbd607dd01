#!/usr/bin/env python3
"""Draws CSV files of the benchmarks: bits per value against KL divergence, the speed of decoding, bytes under a
budget, or eviction against compression.

    python3 bench/plot.py build/quality/smollm2.csv bench/quality.svg
    python3 bench/plot.py --speed build/speed.csv build/rivals.csv bench/speed.svg
    python3 bench/plot.py --budget build/budgets/*.csv bench/budget.svg
    python3 bench/plot.py --keep build/quality/smollm2-keep.csv bench/keep.svg

Quality. Left: bits per value of the format of old tokens, metadata included. Right: bits per value of the whole cache
at the end of the window, with exact tokens, tables and free memory; for rivals, only the bytes of their formats.
Points further down and left are better. Plans with loaded tables and the noise floor are left out.

Speed. Nanoseconds per token and KV head of a decode step, against the tokens that it reads. head_dim 128, 32 query
and 8 KV heads, one thread. The rows come from `bench/attend --csv` (only this shape) and `bench/rivals.py --csv`. If
two files have the same row, the later file counts. Dotted lines: time in which a plain loop reads the bytes, at its
median bandwidth in these runs. They are no lower limit: a kernel that asks for several lines ahead reads faster.

Budget. Bytes of the whole cache against its tokens, one line per file of `budget --csv`. Dashed lines: the budgets. A
dot marks a change to the level beside it.

Keep. Plans that evict tokens, plans that compress them, and plans that do both: bytes of the whole cache at the end
of the window, as a share of FP16, against KL divergence. Plans with a + in their name evict tokens, unless they end
in +anchors.

The pictures need matplotlib.
"""
import re
import statistics
import sys

from tables import keeps_old_tokens, read_rows

# Colour and marker of each kind. "others' formats here": formats of other authors that the library implements.
KINDS = {"tieredkv": ("#0072b2", "o"), "others' formats here": ("#e69f00", "s"), "rivals": ("#666666", "^")}
OWN = re.compile(r"[ar]\d|(quality|balanced|compact|extreme)\b")
SIGNS = {"fit": "+fit", "rotate": "+rot", "center": "+mean"}


def label_of(name):
    """Returns a label: the archive's format or the preset, with marks for options; or the rival's name."""
    label, more = name, ""
    for word in name.split():
        key, _, value = word.partition("=")
        if "," in word:
            label = word.split(",")[-1]
        elif key in ("preset", "archive", "name"):
            label = value
        more += SIGNS.get(key, "")
        if (",none" in word or word == "warm=none") and OWN.match(label):
            more += " (no warm)"
    return label + more


def kind_of(row):
    if row["rival"] == "1":
        return "rivals"
    return "tieredkv" if OWN.match(label_of(row["plan"])) else "others' formats here"


# >>picture
def front(points):
    """Returns the Pareto front: points that no other point beats in both coordinates."""
    best, out = float("inf"), []
    for x, y in sorted(points):
        if y < best:
            best = y
            out.append((x, y))
    return out


def write_labels(axes, points):
    """Writes the label of each point at the first free place beside it."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()
    taken = []
    for x, y, _, _ in points:
        px, py = axes.transData.transform((x, y))
        taken.append(Bbox.from_bounds(px - 4, py - 4, 8, 8))
    near = ((6, -3), (-6, -3), (6, 5), (-6, 5), (6, -11), (-6, -11))
    places = [(far * dx, far * dy) for far in (1, 2, 3) for dx, dy in near]
    for x, y, text, colour in points:
        for place in places:
            note = axes.annotate(text, (x, y), place, textcoords="offset points", fontsize=7, color=colour,
                                 ha="left" if place[0] > 0 else "right")
            box = note.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken) or place == places[-1]:
                taken.append(box)
                break
            note.remove()


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tieredkv"  # makes the file reproducible
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, path):
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=120)


def draw(rows, path):
    figure, panels = pyplot().subplots(1, 2, figsize=(11, 5.5), sharey=True, layout="constrained")
    shown = [row for row in rows
             if row["window"] == "all" and float(row["kl"]) > 1e-9 and "tables=" not in row["plan"]]
    for axes, whole in zip(panels, (False, True)):
        points = []
        for kind, (colour, marker) in KINDS.items():
            mine = [row for row in shown if kind_of(row) == kind and (whole or keeps_old_tokens(row))]
            if not mine:
                continue
            x = [16 / float(row["ratio"]) if whole else float(row["bits"]) for row in mine]
            y = [float(row["kl"]) for row in mine]
            axes.errorbar(x, y, [float(row["kl_error"]) for row in mine], fmt=marker, color=colour,
                          markersize=5, capsize=2, linewidth=1, label=kind)
            axes.plot(*zip(*front(zip(x, y))), color=colour, linewidth=0.8, alpha=0.5)
            points += zip(x, y, [label_of(row["plan"]) for row in mine], [colour] * len(mine))
        axes.set_yscale("log")
        axes.set_xlabel("bits per value, whole cache" if whole else "bits per value of old tokens")
        axes.grid(True, linewidth=0.3, alpha=0.5)
        axes.margins(x=0.18)
        write_labels(axes, points)
    panels[0].set_ylabel("KL divergence to the exact cache, nats per token")
    panels[1].legend(fontsize=8)
    save(figure, path)


# >>speed
LINES = {"f16": ("F16", "#d55e00"), "q8": ("8 bits", "#cc79a7"), "kivi4": ("KIVI-4", "#e69f00"),
         "a40/r40": ("A4 + R4", "#56b4e9"), "a30/r30": ("A3 + R3", "#009e73"), "tiers": ("default plan", "#0072b2")}
RIVALS = {"f16": "o", "q8_0": "s", "q4_0": "^"}


def decode_rows(paths):
    """Returns {(engine and path, format): {tokens: (ns, bytes)}}, and the median read bandwidth in bytes per ns."""
    lines, reads = {}, []
    shape = {"heads": "32", "kv_heads": "8", "dim": "128", "queries": "1", "threads": "1", "precise": "0"}
    for path in paths:
        rows = read_rows(path)
        if "what" not in rows[0]:
            shape["isa"] = rows[0]["isa"]  # the first row has the best instruction set
            rows = [dict(row, time=row["ns"]) for row in rows if all(row[key] == shape[key] for key in shape)]
        for row in rows:
            if row.get("what", "decode") == "decode":
                engine = (row.get("engine", "tieredkv") + " " + row.get("path", "")).strip()
                at = lines.setdefault((engine, row["format"]), {})
                at[int(row["ctx"])] = float(row["time"]), float(row["bytes"])
                reads += [float(row["read_gb_s"])] if row["read_gb_s"] else []
    return lines, statistics.median(reads)


def draw_speed(lines, read, path):
    figure, axes = pyplot().subplots(figsize=(9, 6), layout="constrained")
    for (engine, name), at in lines.items():
        tokens = sorted(at)
        ns = [at[n][0] for n in tokens]
        if engine != "tieredkv":
            style = {"linestyle": "--" if "flash" in engine else "-.", "marker": RIVALS[name],
                     "color": "#b07030" if engine.startswith("ik") else "#777777"}
            engine = engine.replace("ik flash", "ik_llama.cpp")
            axes.plot(tokens, ns, linewidth=1, markersize=4, label="%s %s" % (engine, name), **style)
        elif name in LINES:
            label, colour = LINES[name]
            axes.plot(tokens, ns, "o-", color=colour, linewidth=1.6, markersize=4, label=label)
            limit = [at[n][1] / read for n in tokens]
            axes.plot(tokens, limit, ":", color=colour, linewidth=1)
    axes.plot([], [], ":", color="black", linewidth=1, label="reading alone, %.0f GB/s" % read)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: "%gM" % (n / 2**20) if n >= 2**20 else "%gK" % (n / 1024))
    axes.set_yscale("log")
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("ns per token and KV head, one thread")
    axes.grid(True, which="both", linewidth=0.3, alpha=0.5)
    axes.legend(fontsize=8, handlelength=3.5, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


# >>budget
BUDGETS = ("#666666", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")  # the first colour: no budget


def budget_runs(paths):
    """Returns the rows of each run as numbers, the largest budget first."""
    runs = [[{key: float(value) for key, value in row.items()} for row in read_rows(path)] for path in paths]
    return sorted(runs, key=lambda rows: -(rows[0]["budget"] or float("inf")))


def label_of_budget(last):
    if not last["budget"]:
        return "no budget"
    share = last["budget"] / (last["fp16"] / last["tokens"] * last["total"])
    return "budget %.1f MB, %.0f %% of FP16" % (last["budget"] / 1e6, 100 * share)


def draw_budgets(runs, path):
    figure, axes = pyplot().subplots(figsize=(9, 5), layout="constrained")
    limited = 0
    for rows in runs:
        last = rows[-1]
        limited += last["budget"] > 0
        colour = BUDGETS[min(limited, len(BUDGETS) - 1)]
        axes.plot([row["tokens"] for row in rows], [row["bytes"] / 1e6 for row in rows], color=colour, linewidth=1.4,
                  label=label_of_budget(last))
        if last["budget"]:
            axes.axhline(last["budget"] / 1e6, linestyle="--", color=colour, linewidth=0.8)
        for before, row in zip(rows, rows[1:]):
            if row["level"] != before["level"]:
                at = before["tokens"], before["bytes"] / 1e6
                axes.plot(*at, "o", color=colour, markersize=4)
                axes.annotate("%d" % row["level"], at, (0, -11), color=colour, textcoords="offset points", fontsize=8,
                              ha="center")
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("MB, all memory counted")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.legend(fontsize=8)
    save(figure, path)


# >>keep
KEEPING = {"evicted, the others exact": ("#d55e00", "^"), "compressed": ("#0072b2", "o"),
           "evicted and compressed": ("#009e73", "D")}


def keeping_of(name):
    if name.startswith("f16+"):
        return "evicted, the others exact"
    return "evicted and compressed" if "+" in name and not name.endswith("+anchors") else "compressed"


def draw_keeping(rows, path):
    figure, axes = pyplot().subplots(figsize=(9, 5.5), layout="constrained")
    points = []
    for kind, (colour, marker) in KEEPING.items():
        mine = [row for row in rows if row["window"] == "all" and keeping_of(row["plan"]) == kind]
        x = [100 / float(row["ratio"]) for row in mine]
        y = [float(row["kl"]) for row in mine]
        axes.errorbar(x, y, [float(row["kl_error"]) for row in mine], fmt=marker, color=colour, markersize=5,
                      capsize=2, linewidth=1, label=kind)
        points += zip(x, y, [label_of(row["plan"]).replace("f16+", "") for row in mine], [colour] * len(mine))
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the whole cache, % of FP16 of all tokens")
    axes.set_ylabel("KL divergence to the exact cache, nats per token")
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.margins(x=0.18)
    axes.legend(fontsize=8)
    write_labels(axes, points)
    save(figure, path)


def main():
    if sys.argv[1:2] == ["--budget"] and len(sys.argv) > 3:
        draw_budgets(budget_runs(sys.argv[2:-1]), sys.argv[-1])
    elif sys.argv[1:2] == ["--keep"] and len(sys.argv) == 4:
        draw_keeping(read_rows(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["--speed"] and len(sys.argv) > 3:
        draw_speed(*decode_rows(sys.argv[2:-1]), sys.argv[-1])
    elif len(sys.argv) == 3:
        draw(read_rows(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
