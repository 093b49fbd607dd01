#!/usr/bin/env python3
"""Draws the table of bench/quality --csv, bits of a stored value against KL divergence.

    python3 bench/plot.py build/quality/smollm2.csv bench/quality.svg

Left: the format that old tokens have, metadata included. Right: the whole cache at the end of the window,
exact tokens, tables and free room included (rivals: what their formats need and nothing else). Down and left
is better. Plans with loaded tables are left out. The picture wants matplotlib.
"""
import re
import sys

from tables import keeps_old_tokens, read_rows

# One colour and marker each. Others' formats are the library's as well, but somebody else's idea.
KINDS = {"tieredkv": ("#0072b2", "o"), "others' formats here": ("#e69f00", "s"), "rivals": ("#666666", "^")}
OWN = re.compile(r"[ar]\d|(quality|balanced|compact|extreme)\b")
SIGNS = {"fit": "+fit", "rotate": "+rot", "center": "+mean"}


def label_of(name):
    """What tells plans apart: the archive's format or the preset, and more; or the rival's name."""
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
    """The points that no other one beats in both."""
    best, out = float("inf"), []
    for x, y in sorted(points):
        if y < best:
            best = y
            out.append((x, y))
    return out


def write_labels(axes, points):
    """Beside each point, at the first place that is free."""
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


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tieredkv"  # the same file from the same table
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 5.5), sharey=True, layout="constrained")
    shown = [row for row in rows
             if row["window"] == "all" and float(row["kl"]) > 0 and "tables=" not in row["plan"]]
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
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=120)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(read_rows(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
