#!/usr/bin/env python3
"""Builds tieredkv.h from src/. Standard library only, any Python 3; the same bytes on any machine.

    python3 tools/amalgamate.py            write tieredkv.h
    python3 tools/amalgamate.py --check    compare tieredkv.h with what would be written
    python3 tools/amalgamate.py --list     print the parts in order

src/tieredkv.h is the only list. A line `#include "part.h"` there is replaced by the part, under a marker
line; in a part such a line says what the part needs (so that it compiles alone) and is dropped, since the
list must have brought it before. The comment at the top of the list is about the list and stays behind.
Nothing else is touched. An include inside a comment must be indented or stand behind a star.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SRC = os.path.join(ROOT, "src")
LIST = "tieredkv.h"
OUT = os.path.join(ROOT, "tieredkv.h")
COMMAND = "python3 tools/amalgamate.py"
FIRST = "/* tieredkv.h: generated from src/ by tools/amalgamate.py. Edit there, not here. */\n"
MARKER = "/* ======== %s ======== */\n"
MAX_LINE = 120

QUOTED = re.compile(r'#[ ]*include[ ]*"')
INCLUDE = re.compile(r'#include "([^"]*)"( /\*.*\*/)?$')

errors = []


def refuse(name, line, why):
    errors.append("src/%s:%d: %s" % (name, line, why))


def read(name):
    """Lines of a part, without their ends; says what is wrong with its text."""
    with open(os.path.join(SRC, name), "rb") as f:
        data = f.read()
    if not data.endswith(b"\n"):
        refuse(name, data.count(b"\n") + 1, "no newline at the end")
        data += b"\n"
    lines = []
    for i, raw in enumerate(data[:-1].split(b"\n")):
        if b"\r" in raw:
            refuse(name, i + 1, "carriage return")
        if b"\t" in raw:
            refuse(name, i + 1, "tab")
        if any(c >= 127 or (c < 32 and c not in (9, 13)) for c in bytearray(raw)):
            refuse(name, i + 1, "not printable ASCII")
        if raw.endswith(b" "):
            refuse(name, i + 1, "blank at the end of the line")
        if len(raw) > MAX_LINE:
            refuse(name, i + 1, "%d columns, at most %d" % (len(raw), MAX_LINE))
        lines.append(raw.decode("latin-1"))
    return lines


def included(name, number, line, known):
    """The part that this line includes, or None."""
    if not QUOTED.match(line):
        return None
    match = INCLUDE.match(line)
    if not match:
        refuse(name, number, 'write it as: #include "part.h"')
        return None
    if match.group(1) not in known:
        refuse(name, number, '"%s" is not a part in src/' % match.group(1))
        return None
    return match.group(1)


def build():
    """The text of tieredkv.h and the parts in order."""
    known = sorted(n for n in os.listdir(SRC) if n.endswith(".h") and n != LIST)
    out, parts = [FIRST], []
    top = True  # in the comment above the first include of the list
    for i, line in enumerate(read(LIST)):
        part = included(LIST, i + 1, line, known)
        if top and part is None:
            if line and not line.startswith(("/*", " *", "//")):
                refuse(LIST, i + 1, "only a comment may stand before the first include")
                top = False
            continue
        top = False
        if part is None:
            out.append(line + "\n")
        elif part in parts:
            refuse(LIST, i + 1, "%s is listed twice" % part)
        else:
            out.append(MARKER % part)
            for k, text in enumerate(read(part)):
                need = included(part, k + 1, text, known)
                if need is None:
                    out.append(text + "\n")
                elif need not in parts:
                    refuse(part, k + 1, "needs %s, which src/%s lists later or not at all" % (need, LIST))
            parts.append(part)
    for name in known:
        if name not in parts:
            errors.append("src/%s: not listed in src/%s" % (name, LIST))
    return "".join(out).encode("ascii", "replace"), parts


def main(args):
    if args not in ([], ["--check"], ["--list"]):
        sys.stderr.write(__doc__)
        return 2
    if not os.path.exists(os.path.join(SRC, LIST)):
        sys.stderr.write("src/%s is missing\n" % LIST)
        return 1
    text, parts = build()
    if errors:
        sys.stderr.write("\n".join(errors) + "\n")
        return 1
    if args == ["--list"]:
        print("\n".join(parts))
        return 0
    old = None
    if os.path.exists(OUT):
        with open(OUT, "rb") as f:
            old = f.read()
    if args == ["--check"]:
        if old != text:
            sys.stderr.write("tieredkv.h is not what src/ makes of it. Run: %s\n" % COMMAND)
            return 1
        return 0
    if old != text:  # an unchanged file keeps its time: make has nothing to do
        with open(OUT, "wb") as f:
            f.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
