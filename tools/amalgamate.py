#!/usr/bin/env python3
"""Builds tieredkv.h from src/ and tieredkv_cuda.cu from src/cuda/. It needs any Python 3 and only the standard
library. It writes the same bytes on any machine.

    python3 tools/amalgamate.py            writes both, and src/prefix.h
    python3 tools/amalgamate.py --check    compares the files with the bytes that it would write
    python3 tools/amalgamate.py --list     prints the parts of tieredkv.h in order

src/tieredkv.h and src/cuda/tieredkv_cuda.h list the parts. The tool replaces each line `#include "folder/part.h"` of a
list with a marker line and the part. A part includes the parts that it needs, so that it compiles alone. The tool
removes these lines and checks that the list has these parts earlier. All parts of a folder are neighbours in the list.
A template has a name that ends in .inc. Each include of a template is replaced by its text, as often as it occurs.
Parts in src/cuda/ may include "tieredkv.h"; this line stays. The comment at the top of a list is not copied. All other
text is copied unchanged. An include inside a comment must be indented or follow a star.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMAND = "python3 tools/amalgamate.py"
FIRST = "/* %s: generated from %s/ by tools/amalgamate.py. Edit there, not here. */\n"
MARKER = "/* ======== %s ======== */\n"
MAX_LINE = 120

QUOTED = re.compile(r'#[ ]*include[ ]*"')
INCLUDE = re.compile(r'#include "([^"]*)"( /\*.*\*/)?$')

class Product:
    """A generated file: folder of its parts, the list there, its name in the root, includes that stay."""

    def __init__(self, src, parts, out, kept=()):
        self.src, self.list, self.out, self.kept = src, parts, out, kept



def parts_in(product):
    """Returns the names of all parts in the product's folder and below, without folders of other products."""
    root, others = os.path.join(ROOT, product.src), [os.path.join(ROOT, p.src) for p in PRODUCTS if p is not product]
    names = []
    for place, folders, files in os.walk(root):
        folders[:] = [f for f in folders if os.path.join(place, f) not in others]
        names += [os.path.relpath(os.path.join(place, n), root).replace(os.sep, "/")
                  for n in files if n.endswith((".h", ".inc"))]
    return sorted(n for n in names if n != product.list)


PRODUCTS = [Product("src", "tieredkv.h", "tieredkv.h"),
            Product("src/cuda", "tieredkv_cuda.h", "tieredkv_cuda.cu", ("tieredkv.h",))]

errors = []


def refuse(product, name, line, reason):
    errors.append("%s/%s:%d: %s" % (product.src, name, line, reason))


def read(product, name):
    """Returns the lines of a part without line ends, and reports errors of its text."""
    with open(os.path.join(ROOT, product.src, name), "rb") as f:
        data = f.read()
    if not data.endswith(b"\n"):
        refuse(product, name, data.count(b"\n") + 1, "no newline at the end")
        data += b"\n"
    lines = []
    for i, raw in enumerate(data[:-1].split(b"\n")):
        if b"\r" in raw:
            refuse(product, name, i + 1, "carriage return")
        if b"\t" in raw:
            refuse(product, name, i + 1, "tab")
        if any(c >= 127 or (c < 32 and c not in (9, 13)) for c in bytearray(raw)):
            refuse(product, name, i + 1, "not printable ASCII")
        if raw.endswith(b" "):
            refuse(product, name, i + 1, "blank at the end of the line")
        if len(raw) > MAX_LINE:
            refuse(product, name, i + 1, "%d columns, at most %d" % (len(raw), MAX_LINE))
        lines.append(raw.decode("latin-1"))
    return lines


def is_template(part):
    return part.endswith(".inc")


def folder_of(part):
    return part.rpartition("/")[0]


def included(product, name, number, line, known):
    """Returns the part that this line includes, or None."""
    if not QUOTED.match(line):
        return None
    match = INCLUDE.match(line)
    if not match:
        refuse(product, name, number, 'write it as: #include "part.h"')
        return None
    if match.group(1) in product.kept:
        return None
    if match.group(1) not in known:
        refuse(product, name, number, '"%s" is not a part in %s/' % (match.group(1), product.src))
        return None
    return match.group(1)


def build(product):
    """Returns the text of a product, its parts in order, and for each line its part and its number there, or None."""
    known = parts_in(product)
    out, parts, folders, used = [FIRST % (product.out, product.src)], [], [], set()
    origins = [None]

    def put(line, *origin):
        out.append(line)
        origins.append(origin or None)

    top = True  # True in the comment above the first include of the list
    for i, line in enumerate(read(product, product.list)):
        part = included(product, product.list, i + 1, line, known)
        if top and part is None:
            if line and not line.startswith(("/*", " *", "//")):
                refuse(product, product.list, i + 1, "only a comment may stand before the first include")
                top = False
            continue
        top = False
        if part is None:
            put(line + "\n", product.list, i + 1)
        elif part in parts:
            refuse(product, product.list, i + 1, "%s is listed twice" % part)
        elif is_template(part):
            refuse(product, product.list, i + 1, "%s is a template; a part includes it" % part)
        elif folder_of(part) in folders[:-1]:
            refuse(product, product.list, i + 1, "%s: the other parts of its folder stand further up" % part)
        else:
            put(MARKER % part)
            for k, text in enumerate(read(product, part)):
                need = included(product, part, k + 1, text, known)
                if need is None:
                    put(text + "\n", part, k + 1)
                elif is_template(need):
                    used.add(need)
                    put(MARKER % need)
                    for m, inner in enumerate(read(product, need)):
                        if included(product, need, m + 1, inner, known):
                            refuse(product, need, m + 1, "a template includes nothing")
                        put(inner + "\n", need, m + 1)
                    put(MARKER % part)
                elif need not in parts:
                    refuse(product, part, k + 1,
                           "needs %s, which %s/%s lists later or not at all" % (need, product.src, product.list))
            parts.append(part)
            if folder_of(part) not in folders:
                folders.append(folder_of(part))
    for name in known:
        if name not in parts and name not in used:
            errors.append("%s/%s: not listed in %s/%s" % (product.src, name, product.src, product.list))
    return "".join(out).encode("ascii", "replace"), parts, origins


PREFIX = "src/prefix.h"
PREFIX_TOP = """/*
 * prefix.h - the names that TKV_PREFIX changes: all public functions and types. tools/amalgamate.py makes this file
 * from api.h.
 *
 * >>prefix. A prefix lets two copies of the library live in one program: #define TKV_PREFIX mygame_ before every
 * include.
 */
#ifndef TKV_PREFIX_H
#define TKV_PREFIX_H

#ifdef TKV_PREFIX
#define TKV_PASTE2_(a, b) a##b
#define TKV_PASTE_(a, b) TKV_PASTE2_(a, b)
#define TKV_NAME_(name) TKV_PASTE_(TKV_PREFIX, name)
"""
COMMENT = re.compile(r"/\*.*?\*/", re.S)


def prefix_text():
    """Returns the text of src/prefix.h, with every function and type that src/api.h declares."""
    with open(os.path.join(ROOT, "src", "api.h")) as f:
        api = COMMENT.sub("", f.read())
    names = set(re.findall(r"^TKV_API\b[^;]*?\b(tkv_\w+)\(", api, re.M))
    names |= set(re.findall(r"^(?:typedef )?(?:struct|enum) (tkv_\w+)", api, re.M))
    names |= set(re.findall(r"^typedef [^;{]*\(\*(tkv_\w+)\)", api, re.M))
    return PREFIX_TOP + "".join("#define %s TKV_NAME_(%s)\n" % (n, n) for n in sorted(names)) + """#endif

#endif /* TKV_PREFIX_H */
"""


def update(path, src, text, check):
    """Writes a file that differs. With `check`, only reports the difference and returns 1."""
    out = os.path.join(ROOT, path)
    old = None
    if os.path.exists(out):
        with open(out, "rb") as f:
            old = f.read()
    if old == text:  # keeps the file's time, so make rebuilds nothing
        return 0
    if check:
        sys.stderr.write("%s differs from the text that %s/ generates. Run: %s\n" % (path, src, COMMAND))
        return 1
    with open(out, "wb") as f:
        f.write(text)
    return 0


def main(args):
    if args not in ([], ["--check"], ["--list"]):
        sys.stderr.write(__doc__)
        return 2
    # a tree without src/cuda has one product
    products = [p for p in PRODUCTS if os.path.isdir(os.path.join(ROOT, p.src))]
    for p in products:
        if not os.path.exists(os.path.join(ROOT, p.src, p.list)):
            sys.stderr.write("%s/%s is missing\n" % (p.src, p.list))
            return 1
    status = 0
    if os.path.exists(os.path.join(ROOT, "src", "api.h")):
        status = update(PREFIX, "src", prefix_text().encode("ascii"), args != [])
    built = [build(p) for p in products]
    if errors:
        sys.stderr.write("\n".join(errors) + "\n")
        return 1
    if args == ["--list"]:
        print("\n".join(built[0][1]))
        return 0
    for p, (text, _, _) in zip(products, built):
        status |= update(p.out, p.src, text, args == ["--check"])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
