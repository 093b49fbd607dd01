#!/usr/bin/env python3
"""Draws the output of a command as an SVG of a terminal window.

    tools/terminal_svg.py -o run.svg -- make run          runs the command and shows its standard output
    make -s run | tools/terminal_svg.py --show 'make run' > run.svg

The picture contains text that can be selected, searched and read aloud. It loads no other files. Two or more spaces
separate parts of a line; each part has a fixed place and width, so columns align in any font. Colours and other
escape sequences are left out. An overwritten line, such as a progress bar, appears in its final state. If the command
fails, the program fails too and writes no picture.
"""

import argparse
import re
import shlex
import subprocess
import sys
import unicodedata
from xml.sax.saxutils import escape, quoteattr

# Pixels: font size, width of a letter, height of a line, border, title bar.
SIZE, ADVANCE, LINE, PAD, BAR = 13, 7.8, 17, 16, 30
STYLE = f"""text {{ font: {SIZE}px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #d6dae0 }}
.command {{ fill: #8fd18a }}"""


def width(text):
    """Returns the width of a text in columns of a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def lines_of(text, columns):
    """Returns the lines as a terminal shows them. A longer line is split, at a space if there is one."""
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])", "", text)
    lines = []
    for line in text.rstrip("\n").split("\n"):
        line = line.rstrip("\r").rsplit("\r", 1)[-1]
        line = "".join(c for c in line if c == "\t" or unicodedata.category(c) != "Cc").expandtabs(8).rstrip()
        while width(line) > columns:
            cut = max(n for n in range(1, columns + 1) if width(line[:n]) <= columns or n == 1)
            space = line.rfind(" ", 0, cut + 1)
            cut = space if space > 0 and line[:space].strip() else cut  # a word longer than a line is split
            lines.append(line[:cut].rstrip())
            line = line[cut:].lstrip(" ")
        lines.append(line)
    return lines


def picture(lines, title, columns, commands):
    """Returns the SVG of the lines. The first `commands` lines are typed commands."""
    w, h = 2 * PAD + ADVANCE * columns, BAR + PAD + LINE * len(lines) + PAD // 2
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h}" viewBox="0 0 {w:.0f} {h}" role="img" '
           f"aria-label={quoteattr(title)}>",
           f"<title>{escape(title)}</title>",
           f"<style>{STYLE}</style>",
           f'<rect width="{w:.0f}" height="{h}" rx="10" fill="#1b1e24"/>']
    out += [f'<circle cx="{PAD + 5 + 20 * i}" cy="{BAR // 2 + 2}" r="6" fill="{colour}"/>'
            for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))]
    for i, line in enumerate(lines):
        kind = ' class="command"' if i < commands else ""
        for part in re.finditer(r"\S+( \S+)*", line):
            x, y = PAD + ADVANCE * width(line[:part.start()]), BAR + PAD + LINE * i + 3
            out.append(f'<text{kind} x="{x:.1f}" y="{y}" textLength="{ADVANCE * width(part.group()):.1f}">'
                       f"{escape(part.group())}</text>")
    return "\n".join(out + ["</svg>", ""])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--out", help="the output file (standard output)")
    p.add_argument("--show", help="text to show as the typed command (the command)")
    p.add_argument("--columns", type=int, default=104)
    p.add_argument("command", nargs="*", help="command to run; without it, standard input is shown")
    args = p.parse_args()
    if args.command:
        run = subprocess.run(args.command, stdout=subprocess.PIPE)
        if run.returncode:
            sys.exit(f"{shlex.join(args.command)} ended with status {run.returncode}")
        data = run.stdout
    else:
        data = sys.stdin.buffer.read()
    typed = args.show or shlex.join(args.command)
    commands = lines_of("$ " + typed, args.columns) if typed else []
    lines = commands + lines_of(data.decode("utf-8", "replace"), args.columns)
    svg = picture(lines, typed or "terminal", args.columns, len(commands))
    if args.out:
        with open(args.out, "w", encoding="utf-8", newline="\n") as f:
            f.write(svg)
    else:
        sys.stdout.buffer.write(svg.encode())


if __name__ == "__main__":
    main()
