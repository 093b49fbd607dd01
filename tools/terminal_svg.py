#!/usr/bin/env python3
"""A picture of what a command prints, as an SVG of a terminal window.

    tools/terminal_svg.py -o run.svg -- make run          runs the command and shows its standard output
    make -s run | tools/terminal_svg.py --show 'make run' > run.svg

Text stays text: it can be selected, searched and read aloud. Nothing is loaded from anywhere; words that two spaces
separate have their own place and width, so that columns meet in any font. Colours and other escape sequences are left
out; a line that was overwritten (a progress bar) shows as it was in the end. If the command fails, so does this, and
writes nothing.
"""

import argparse
import re
import shlex
import subprocess
import sys
import unicodedata
from xml.sax.saxutils import escape, quoteattr

SIZE, ADVANCE, LINE, PAD, BAR = 13, 7.8, 17, 16, 30  # pixels: letter, its width, line, border, the bar on top
STYLE = f"""text {{ font: {SIZE}px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #d6dae0 }}
.command {{ fill: #8fd18a }}"""


def width(text):
    """in columns of a terminal"""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def lines_of(text, columns):
    """the lines as a terminal shows them; a longer one goes on in the next, at a space if there is one"""
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])", "", text)
    lines = []
    for line in text.rstrip("\n").split("\n"):
        line = line.rstrip("\r").rsplit("\r", 1)[-1]
        line = "".join(c for c in line if c == "\t" or unicodedata.category(c) != "Cc").expandtabs(8).rstrip()
        while width(line) > columns:
            cut = max(n for n in range(1, columns + 1) if width(line[:n]) <= columns or n == 1)
            space = line.rfind(" ", 0, cut + 1)
            cut = space if space > 0 and line[:space].strip() else cut  # a word without end is cut
            lines.append(line[:cut].rstrip())
            line = line[cut:].lstrip(" ")
        lines.append(line)
    return lines


def picture(lines, title, columns, commands):
    """lines: what to show, of which the first `commands` were typed"""
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
    p.add_argument("-o", "--out", help="the file; otherwise standard output")
    p.add_argument("--show", help="what is shown as typed, instead of the command")
    p.add_argument("--columns", type=int, default=104)
    p.add_argument("command", nargs="*", help="otherwise standard input is shown")
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
