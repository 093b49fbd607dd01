#!/usr/bin/env python3
"""Brings programs to today's names: applies the tables `old -> new` of CHANGELOG.md to the files of a tree.

    python3 tools/rename.py PATH ...             counts what it would change, and lists what needs a person
    python3 tools/rename.py --diff PATH ...      prints the changes
    python3 tools/rename.py --write PATH ...     makes them
    python3 tools/rename.py --names HEADER       prints the public names of a header, as in tools/names/

It reads C, C++ and CUDA files, Lua and Python, in UTF-8 or any encoding that has ASCII in it. Hidden folders, folders named
`build`, symbolic links and tieredkv.h itself are left out.

- Whole identifiers are renamed, also in comments. Lua and Python declare C in strings, so there strings are renamed too. In C a
  string is only listed, with names of the table and keys of config texts.
- A row `f(a, b) -> g(b, 0, a)` rewrites calls, if a call has that number of arguments. A literal on the left must be in the call.
- A row with words on its right is never applied. Each use is listed as `file:line: name: words`.
- Fields are renamed in C where the variable's type is declared in the tree. A name that has two types there is listed, also where
  one of them is not the library's.
- Structs that are filled by position are listed, since fields have moved.

The status is 0, or 1 with --check if something needs a change or a person, or 2 if a path is missing or a file cannot be written.
Then no file has changed.
"""
import argparse
import difflib
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
C_FILES = (".c", ".h", ".inc", ".cpp", ".hpp", ".cc", ".cxx", ".hh", ".hxx", ".cu", ".cuh", ".m", ".mm")
OTHER_FILES = (".lua", ".py", ".pyi")

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
TOKEN = re.compile(r"""(?P<comment>/\*.*?\*/|//[^\n]*)
                     | (?P<string>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"
                                 |"(?:\\(?:\r\n|.)|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
                     | (?P<name>[A-Za-z_]\w*) | (?P<number>\.?\d(?:'?[\w.])*) | (?P<space>\s+) | (?P<other>->|.)""", re.S | re.X)


NO_TYPES = {"return", "else", "case", "goto", "sizeof", "new", "delete", "throw", "auto", "struct", "union", "enum", "class",
            "namespace", "using", "typename"}  # words before a name that declare no variable, or say nothing of its type


# >>names. The public names of a header, by kind.
def split_list(text):
    """Parts between commas that no bracket encloses."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += c
    return parts + [part] if (parts + [part]) != [""] else []


def tidy(kind):
    """A type in one spelling: `const char *`, `tkv_cache **`, `void`."""
    return re.sub(r" ?\* ?", "*", kind.strip()).replace("*", " *", 1)


def declare(text):
    """(name, type) of a declaration such as `const float *x`, `float x[4]` or `int (*f)(void *)`."""
    text = " ".join(text.split()).replace(" [", "[")
    pointer = re.match(r"(.*)\(\*(\w+)\)(\(.*\))$", text)
    if pointer:
        return pointer.group(2), "%s(*)%s" % (pointer.group(1), pointer.group(3))
    kind, name, array = re.match(r"(.*?)(\w*)((?:\[[^\]]*\])*)$", text).groups()
    if not kind.strip():  # a type without a name
        kind, name = name, ""
    return name, tidy(kind) + array


def fields_of(body):
    """(name, type) of each field of a struct."""
    for line in body.split(";"):
        first, *others = split_list(line.strip()) or [""]
        if not first.strip():
            continue
        name, kind = declare(first)
        yield name, kind
        base = re.match(r"[\w ]*", kind).group(0).strip()
        for other in others:
            stars, name, array = re.match(r"\s*(\**)\s*(\w+)((?:\[[^\]]*\])*)", other).groups()
            yield name, base + (" " + stars if stars else "") + array


def public_names(header):
    """Lines `kind name type` of all functions, types, constants and fields."""
    text = re.sub(r"\n[ ]*#define (?:tkv|tkvcu)_\w+ TKV_NAME_[^\n]*", "", COMMENT.sub(" ", header))
    lists = "".join(re.findall(r"#define TKV_\w+_LIST\(X\)(?:[^\n]*\\\n)*[^\n]*", text))
    found = [("constant", name, "") for name in re.findall(r"\bX\(\s*(TKV\w*_\w+)", lists)]
    found += [("constant", name, "") for name in re.findall(r"^[ ]*#define (TKV(?:CU)?_\w+)(?=\s)(?!\s*$)", text, re.M)
              if name != "TKV_API"]
    code = re.sub(r"^[ ]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    for body, name in re.findall(r"typedef enum \w* ?\{([^}]*)\} (\w+);", code):
        found.append(("type", name, "enum"))
        found += [("constant", entry.split("=")[0].strip(), "") for entry in split_list(body) if entry.strip()]
    for body, name in re.findall(r"typedef struct \w* ?\{([^}]*)\} (\w+);", code):
        found.append(("type", name, "struct"))
        found += [("field", "%s.%s" % (name, field), kind) for field, kind in fields_of(body)]
    found += [("type", name, "opaque") for name in re.findall(r"typedef struct \w+ (\w+);", code)]
    found += [("type", name, "function") for name in re.findall(r"typedef [^;{}]*?\(\*(\w+)\)\(", code)]
    for result, name, parameters in re.findall(r"^(?:TKV_API )?((?:const )?\w+ \**)(tkv(?:cu)?_\w+)\(([^;{}]*)\);", code, re.M):
        kinds = [kind for _, kind in map(declare, split_list(parameters))]
        found.append(("function", name, "%s (%s)" % (tidy(result), ", ".join(kinds))))
    found = [row for row in found if not row[1].endswith("_") and "tkvi_" not in row[1].lower()]
    order = ("function", "type", "constant", "field")  # fields keep their order, since programs fill structs by it
    return sorted(dict.fromkeys(found), key=lambda row: (order.index(row[0]), row[1].partition(".")[0]))


def names_of(path):
    """The names of a file of tools/names/, or of a header: (kind, name) -> type."""
    with open(path) as f:
        text = f.read()
    rows = public_names(text) if path.endswith((".h", ".cu")) else [line.split(" ", 2) for line in text.splitlines()]
    return {(row[0], row[1]): row[2] if len(row) > 2 else "" for row in rows}


# >>the table. Rows `old -> new` of CHANGELOG.md, under headings that say what they name.
class Table:
    """renames     name -> new name
    fields      (struct, field) -> path of the new field; structs have their old names
    calls       name -> [(left arguments, new name, right arguments)]
    sentences   name, or (struct, field), -> [what a person has to do]
    keys        keys of config texts that are others now"""

    def __init__(self, changelog):
        self.renames, self.fields, self.calls, self.sentences, self.keys = {}, {}, {}, {}, {}
        section = ""
        for line in changelog.splitlines():
            if line.startswith("#"):
                section = line.lstrip("# ")
            elif line.startswith("    ") and " -> " in line:
                left, right = line.strip().split(" -> ", 1)
                self.add(section, left, right)
        for name in self.renames:  # a name that has changed twice gets its newest name
            for _ in self.renames:
                if self.renames[name] not in self.renames:
                    break
                self.renames[name] = self.renames[self.renames[name]]

    def add(self, section, left, right):
        call, target = re.match(r"(\w+)\((.*)\)$", left), re.match(r"(\w+)\((.*)\)$", right)
        word = re.fullmatch(r"[\w.]+", left) and re.fullmatch(r"[\w.]+", right)
        if section.startswith("Fields of tkv_config") and re.fullmatch(r"\w+", left):
            self.keys[left] = right
            self.fields["tkv_config", left] = right
        elif section.startswith("Fields") or "." in left.split(" ")[0]:
            owner, _, field = left.partition(".")
            if word:
                self.fields[owner, field] = right.partition(".")[2]
            else:
                self.sentences.setdefault((owner, field), []).append(right)
        elif word and re.match(r"(tkv|TKV)(cu|CU)?_", left):
            self.renames[left] = right
        elif call and target:
            self.calls.setdefault(call.group(1), []).append(
                ([x.strip() for x in split_list(call.group(2))], target.group(1),
                 [x.strip() for x in split_list(target.group(2))]))
        elif re.match(r"(tkv|TKV)(cu|CU)?_\w+", left):
            name, _, when = left.partition(" ")
            self.sentences.setdefault(name, []).append("%s: %s" % (when, right) if when else right)

    def call_rows(self, name):
        return ["%s(%s)" % (target, ", ".join(right)) for _, target, right in self.calls.get(name, [])]

    def has(self, name):
        return name in self.renames or name in self.calls or name in self.sentences


# >>C. Tokens of a file, and what is done to them.
class Source:
    def __init__(self, text):
        self.tokens, self.kinds, self.lines, line = [], [], [], 1
        for match in TOKEN.finditer(text):
            self.tokens.append(match.group())
            self.kinds.append("string" if match.lastgroup == "mark" else match.lastgroup)
            self.lines.append(line)
            line += match.group().count("\n")
        self.old = list(self.tokens)
        self.code = [i for i, kind in enumerate(self.kinds) if kind not in ("space", "comment")]

    def at(self, place):
        """The old token at a place of `code`; an empty string outside of it."""
        return self.old[self.code[place]] if 0 <= place < len(self.code) else ""

    def close(self, place):
        """The place of the bracket that closes the one at `place`; the end of `code` without one."""
        depth = 0
        for p in range(place, len(self.code)):
            depth += (self.at(p) in ("(", "[", "{")) - (self.at(p) in (")", "]", "}"))
            if depth == 0:
                return p
        return len(self.code)

    def open(self, place):
        """The place of the bracket that opens the one that closes at `place`; -1 without one."""
        depth = 0
        for p in range(place, -1, -1):
            depth += (self.at(p) in (")", "]", "}")) - (self.at(p) in ("(", "[", "{"))
            if depth == 0:
                return p
        return -1

    def declarations(self, structs):
        """(place, name, struct, is a member) of variables, parameters and fields. The struct is one of `structs`, or empty."""
        braces = []  # of each open brace: whether it is that of a struct
        for p, i in enumerate(self.code):
            token = self.old[i]
            if token == "{":
                braces.append(any(self.at(p - n) in ("struct", "union", "class") for n in (1, 2)))
            elif token == "}" and braces:
                braces.pop()
            elif token in structs and self.at(p - 1) not in (".", "->"):
                q = p + 1
                while True:
                    while self.at(q) in ("*", "const", "&"):
                        q += 1
                    if not re.fullmatch(r"[A-Za-z_]\w*", self.at(q)):
                        break
                    name, q = self.at(q), q + 1
                    while self.at(q) == "[":
                        q = self.close(q) + 1
                    if self.at(q) not in (";", ",", "=", ")", ":"):
                        break
                    yield p, name, token, bool(braces and braces[-1])
                    if self.at(q) == "=":  # jump over a value
                        while self.at(q) not in (",", ";", ""):
                            q = self.close(q) + 1 if self.at(q) in ("(", "[", "{") else q + 1
                    if self.at(q) != ",":
                        break
                    q += 1
            elif self.kinds[i] == "name" and token not in NO_TYPES and self.at(p - 1) not in (".", "->"):
                q = p + 1
                while self.at(q) in ("*", "const", "&"):
                    q += 1
                if re.fullmatch(r"[A-Za-z_]\w*", self.at(q)) and self.at(q + 1) in (";", ",", "=", ")", "[", "{"):
                    yield p, self.at(q), "", bool(braces and braces[-1])


class Rename:
    """What the table does to the files of a tree."""

    def __init__(self, table, versions, today):
        self.table, names = table, {}
        for version in versions:
            names.update(version)
        self.structs = {name for (kind, name), what in names.items() if kind == "type" and what == "struct"}
        self.fields = {tuple(name.split(".")) for kind, name in names if kind == "field"}
        self.kinds = {}  # (struct, field) -> struct of the field
        for (kind, name), what in names.items():
            base = re.sub(r"const |[ *]|\[.*", "", what)
            if kind == "field" and base in self.structs:
                self.kinds[tuple(name.split("."))] = base
        self.moved = {name for name in self.structs
                      if not all(self.keeps_order(name, version, today) for version in versions)}
        self.members = {}  # name of a field of the program's -> structs, and an empty string for all other types
        self.wanted = {field for _, field in list(table.fields) + [key for key in table.sentences if isinstance(key, tuple)]}

    def keeps_order(self, struct, names, today):
        """Whether a struct that is filled by position gets the same fields today."""
        def fields(of, name):
            return [field.partition(".")[2] for kind, field in of if kind == "field" and field.startswith(name + ".")]

        old = [self.table.fields.get((struct, field), field) for field in fields(names, struct)]
        return fields(today, self.table.renames.get(struct, struct))[:len(old)] == old

    def learn(self, source):
        for _, name, struct, is_member in source.declarations(self.structs):
            if is_member:
                self.members.setdefault(name, set()).add(struct)

    def types_of(self, name, place, local):
        """Structs that a name may have at a place. If some of its types are not the library's, the one declared last counts."""
        known = {struct for _, struct in local.get(name, [])}
        before = [struct for declared, struct in local.get(name, []) if declared < place]
        return {before[-1]} if "" in known and before else known

    def types_before(self, source, place, local):
        """Structs that the expression may have that ends before `place`, a `.` or `->`."""
        p = place - 1
        while source.at(p) in ("]", ")"):
            opening = source.open(p)
            if source.at(p) == ")" and not re.match(r"\w", source.at(opening - 1)):  # (*x).y, (x).y
                inside = [source.at(k) for k in range(opening + 1, p) if source.at(k) not in ("*", "&")]
                return self.types_of(inside[0], place, local) if len(inside) == 1 else set()
            p = opening - 1
        name = source.at(p)
        if source.at(p - 1) in (".", "->"):
            if source.at(p - 2) in ("{", ","):  # a designator with two names
                return set()
            owners = self.types_before(source, p - 1, local)
            if owners - {""}:  # a field of the library's, with the name that it had or has today
                return {self.kinds[owner, name] for owner in owners if (owner, name) in self.kinds}
            return {struct for _, struct in local.get("." + name, [])} or self.members.get(name, set())
        if source.at(p + 1) == "(":  # a call
            return set()
        return self.types_of(name, place, local) or self.members.get(name, set())

    def apply(self, text):
        """(new text, number of changes, [(line, name, sentence)]) of a file in C."""
        source, changes, listed = Source(text), 0, []
        local = {}
        for place, name, struct, is_member in source.declarations(self.structs):
            local.setdefault("." + name if is_member else name, []).append((place, struct))
        # fields
        filled = []  # of each open brace: the struct that it fills, if known
        for p, i in enumerate(source.code):
            token = source.old[i]
            if token == "{":
                filled.append(self.filled_by(source, p, local, filled))
                if filled[-1] in self.moved and source.at(p + 1) not in (".", "}") and [source.at(p + 1), source.at(p + 2)] != ["0", "}"]:
                    listed.append((source.lines[i], filled[-1], "filled by position: its fields may have moved"))
            elif token == "}" and filled:
                filled.pop()
            if source.kinds[i] != "name" or token not in self.wanted:
                continue
            if source.at(p - 1) == "." and source.at(p - 2) in ("{", ",") and filled and filled[-1] in self.structs:
                owners = {filled[-1]}
            elif source.at(p - 1) in (".", "->"):
                owners = self.types_before(source, p - 1, local)
            else:
                continue
            others = ["another type"] if "" in owners else []
            owners = {owner for owner in owners if (owner, token) in self.fields}
            new = {self.table.fields.get((owner, token), token) for owner in owners}
            if len(new) > 1 or new - {token} and others:
                listed.append((source.lines[i], token, "a field of %s: which one?" % " or of ".join(sorted(owners) + others)))
            elif new - {token}:
                source.tokens[i] = new.pop()
                changes += 1
            for owner in owners:
                listed += [(source.lines[i], "%s.%s" % (owner, token), s) for s in self.table.sentences.get((owner, token), [])]
        # names
        for i, kind in enumerate(source.kinds):
            if kind == "name":
                name = source.old[i]
                if name in self.table.renames:
                    source.tokens[i] = self.table.renames[name]
                    changes += 1
                if name not in self.table.calls:
                    listed += [(source.lines[i], name, sentence) for sentence in self.table.sentences.get(name, [])]
            elif kind == "comment":
                source.tokens[i], n = self.rename_words(source.old[i])
                changes += n
            elif kind == "string":
                listed += [(source.lines[i] + line, name, sentence) for line, name, sentence in self.strings(source.old[i])]
        # calls, the inner ones first
        for p in range(len(source.code) - 1, -1, -1):
            name, i = source.at(p), source.code[p]
            if name in self.table.calls and source.kinds[i] == "name":
                new = self.call(source, p)
                if new is None:
                    sentences = self.table.sentences.get(name) or self.table.call_rows(name)
                    listed += [(source.lines[i], name, sentence) for sentence in sentences]
                changes += bool(new)
        return "".join(source.tokens), changes, self.joined(listed)

    def joined(self, listed):
        """One entry for each name of a line."""
        entries = {}
        for line, name, sentence in sorted(dict.fromkeys(listed), key=lambda row: row[:2]):
            entries.setdefault((line, name), []).append(sentence)
        return [(line, name, self.became(name) + "; ".join(sentences)) for (line, name), sentences in entries.items()]

    def became(self, name):
        return "now %s; " % self.table.renames[name] if name in self.table.renames and name in self.table.sentences else ""

    def filled_by(self, source, place, local, filled):
        """The struct that a brace after `=`, after a cast or in an array fills, `struct[]` for an array; else an empty string."""
        if source.at(place - 1) == "=" and source.at(place - 3) == "." and filled and filled[-1] in self.structs:
            return self.kinds.get((filled[-1], source.at(place - 2)), "")
        if source.at(place - 1) == "=":
            p, array = place - 2, ""
            while source.at(p) == "]":
                p, array = source.open(p) - 1, array + "[]"
            names = {struct for _, struct in local.get(source.at(p), [])} - {""}
            return next(iter(names)) + array if len(names) == 1 and source.at(p - 1) in names | {","} else ""
        if source.at(place - 1) in ("{", ",") and filled and filled[-1].endswith("[]"):
            return filled[-1][:-2]
        if source.at(place - 1) == ")" and source.at(place - 2) in self.structs and source.at(place - 3) in ("(", "const"):
            return source.at(place - 2)
        return ""

    def call(self, source, place):
        """Rewrites a call in place. True if it did, False if it is a call with the new arguments, None if no row fits."""
        name = source.at(place)
        if source.at(place + 1) != "(":
            return None
        end, arguments, depth = source.close(place + 1), [""], 0
        if end == len(source.code):
            return None
        for i in range(source.code[place + 1] + 1, source.code[end]):
            token = source.old[i]
            depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
            if token == "," and depth == 0:
                arguments.append("")
            else:
                arguments[-1] += source.tokens[i]
        for left, target, right in self.table.calls[name]:
            if len(left) != len(arguments) or any(not re.match(r"[a-z]", x) and x != a.strip() for x, a in zip(left, arguments)):
                continue
            values = {x: a for x, a in zip(left, arguments) if re.match(r"[a-z]", x)}
            parts = [values[x] if x in values else " " + x for x in right]
            source.tokens[source.code[place]] = "%s(%s)" % (target, ",".join([parts[0].lstrip()] + [
                part if part[:1].isspace() else " " + part for part in parts[1:]]))
            for i in range(source.code[place] + 1, source.code[end] + 1):
                source.tokens[i] = ""
            return True
        if any(target == name and len(right) == len(arguments) for _, target, right in self.table.calls[name]):
            return False
        return None

    def rename_words(self, text):
        """(text with whole identifiers renamed, number of changes)"""
        n = 0

        def new(match):
            nonlocal n
            n += match.group() in self.table.renames
            return self.table.renames.get(match.group(), match.group())

        return re.sub(r"\b[A-Za-z_]\w*\b", new, text), n

    def strings(self, text):
        """(line, name, sentence) of what a string has of the table."""
        for match in re.finditer(r"\b[A-Za-z_]\w*\b", text):
            name, line = match.group(), text.count("\n", 0, match.start())
            if self.table.has(name):
                new = self.table.renames.get(name) or "; ".join(self.table.sentences.get(name, self.table.call_rows(name)))
                yield line, name, "in a string: " + new
            elif name in self.table.keys and re.match(r'[ ]*=|\\"[ ]*:', text[match.end():]):
                yield line, name, "a key in a string: " + self.table.keys[name]

    def apply_words(self, text):
        """The same for other languages: all whole identifiers, strings too. Fields are listed."""
        new, changes = self.rename_words(text)
        listed = []
        for match in re.finditer(r"(\.?)\b([A-Za-z_]\w*)\b", text):
            name, line = match.group(2), text.count("\n", 0, match.start()) + 1
            sentences = list(self.table.sentences.get(name, []))
            sentences += self.table.call_rows(name)
            if match.group(1) and name in self.table.keys and "tkv_config" in text:
                sentences.append("if it is a field of tkv_config: " + self.table.keys[name])
            listed += [(line, name, sentence) for sentence in sentences]
        return new, changes, self.joined(listed)


# >>the tree
def files_of(paths):
    for path in paths:
        if os.path.isfile(path):
            yield path
        elif not os.path.isdir(path):
            raise FileNotFoundError("there is no %s" % path)
        for place, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "build")
            for name in sorted(names):
                file = os.path.join(place, name)
                if (name.endswith(C_FILES + OTHER_FILES) and name not in ("tieredkv.h", "tieredkv_cuda.cu")
                        and os.path.isfile(file) and not os.path.islink(file)):
                    yield file


def old_names():
    """The names of each file of tools/names/."""
    folder = os.path.join(ROOT, "tools", "names")
    return [names_of(os.path.join(folder, name)) for name in sorted(os.listdir(folder))]


def todays_names():
    return {**names_of(os.path.join(ROOT, "src", "api.h")), **names_of(os.path.join(ROOT, "src", "cuda", "api.h"))}


def read(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        return f.read()


def write(texts):
    """Writes all files, or none if one is closed to this user."""
    for path in texts:
        if not os.access(path, os.W_OK):
            raise PermissionError("%s cannot be written, so no file has changed" % path)
    for path, text in texts.items():
        with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
            f.write(text)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("paths", nargs="+", metavar="PATH", help="files and folders")
    arguments.add_argument("--diff", action="store_true", help="print the changes")
    arguments.add_argument("--write", action="store_true", help="make the changes")
    arguments.add_argument("--check", action="store_true", help="status 1 if something needs a change or a person")
    arguments.add_argument("--names", action="store_true", help="print the public names of headers, and nothing else")
    arguments.add_argument("--table", default=os.path.join(ROOT, "CHANGELOG.md"), metavar="FILE", help="CHANGELOG.md")
    options = arguments.parse_args()
    if options.names:
        for path in options.paths:
            for (kind, name), what in names_of(path).items():
                print(" ".join([kind, name, what]).rstrip())
        return 0
    with open(options.table, encoding="utf-8") as f:
        work = Rename(Table(f.read()), old_names(), todays_names())
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")  # --diff has the bytes of the files
    try:
        texts = {path: read(path) for path in files_of(options.paths)}
        for path, text in texts.items():
            if path.endswith(C_FILES):
                work.learn(Source(text))
        news, total, people = {}, 0, 0
        for path, text in texts.items():
            if "\0" in text:
                print("%s:1: UTF-16, or no text: not read" % path)
                people += 1
                continue
            new, changes, listed = (work.apply if path.endswith(C_FILES) else work.apply_words)(text)
            total, people = total + changes, people + len(listed)
            if new != text:
                news[path] = new
            if options.diff:
                sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), new.splitlines(True), path, path))
            for line, name, sentence in listed:
                print("%s:%d: %s: %s" % (path, line, name, sentence))
        if options.write:
            write(news)
    except OSError as error:
        print("rename.py: %s" % error, file=sys.stderr)
        return 2
    print("%d names %s in %d of %d files; %d lines above need a person"
          % (total, "changed" if options.write else "to change", len(news), len(texts), people))
    return 1 if options.check and (total or people) else 0


if __name__ == "__main__":
    sys.exit(main())
