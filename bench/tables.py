#!/usr/bin/env python3
"""Makes the tables of QUALITY.md from CSV files of bench/quality and bench/tasks.

    python3 bench/tables.py FILE.csv [sides]   prints a table
    python3 bench/tables.py --fill             writes the tables of all existing CSV files into QUALITY.md
    python3 bench/tables.py --run [NAME ...]   runs the commands in QUALITY.md (all, or those of NAME), then --fill

In QUALITY.md, a table stands between `<!-- NAME.csv -->` and `<!-- end -->`. Its command is the indented command with
`--csv build/quality/NAME.csv`. `<!-- NAME.csv sides -->` compares learned tables with loaded tables. Commands run in
the root of the repository. TKV_DATA is ../shared/data if it is not set.
"""
import csv
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "bench", "QUALITY.md")
FOLDER = "build/quality/"
PLACE = re.compile(r"(<!-- (\S+)\.csv( sides)? -->\n).*?(<!-- end -->)", re.S)


# >>tables
def read_rows(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def short(x):
    return "%.1e" % x if 0 < x < 1e-5 else "%.5f" % x if x < 0.001 else "%.4f" % x if x < 0.1 else "%.3f" % x if x < 1 else "%.2f" % x


def with_error(row):
    return "%s +- %s" % (short(float(row["kl"])), short(float(row["kl_error"])))


def growth(row):
    return "%+.2f +- %.2f" % (float(row["dppl_percent"]), float(row["dppl_error"]))


def keeps_old_tokens(row):
    return not row["plan"].startswith("streaming")


def bits(row):
    return "%.2f" % float(row["bits"]) if float(row["bits"]) > 0 and keeps_old_tokens(row) else "-"


def layout(head, lines):
    return ["| %s |" % " | ".join(cells) for cells in [head, ["---"] * len(head)] + lines]


def windows_of(rows, plan):
    return [row for row in rows if row["plan"] == plan and row["window"] != "all"]


def caption(rows):
    windows = windows_of(rows, rows[0]["plan"])
    return ["Windows %s. Perplexity of the exact cache %s." % (
        ", ".join(row["window"] for row in windows),
        " / ".join("%.3f" % float(row["exact_ppl"]) for row in windows)), ""]


def table(rows):
    keys = any(row["passkey_asked"] != "0" for row in rows)
    apart = 1 < len(windows_of(rows, rows[0]["plan"])) <= 4
    lines = []
    for row in rows:
        if row["window"] != "all":
            continue
        line = ["`%s`" % row["plan"], bits(row), "%.0f" % float(row["bytes_per_token"]),
                "%.2f" % float(row["ratio"]), with_error(row)]
        if apart:
            line.append(" / ".join(short(float(r["kl"])) for r in windows_of(rows, row["plan"])))
        line += [short(float(row["kl_999"])), "%.1f" % float(row["top1_percent"]), growth(row)]
        if keys:
            line.append("%s of %s" % (row["passkey_right"], row["passkey_asked"]))
        lines.append(line)
    head = ["plan", "bits", "bytes per token", "ratio", "KL divergence"] + ["by window"] * apart
    return caption(rows) + layout(head + ["99.9 %", "top-1 %", "dPPL %"] + ["passkey"] * keys, lines)


def share(row, name, of, low, high):
    """Returns a count, its share in percent and the 95 % interval of the share."""
    n, all_of = int(row[name]), int(row[of])
    percent = "%.1f" % (100.0 * n / all_of) if all_of else "-"
    return "%d, %s (%.1f to %.1f)" % (n, percent, 100 * float(row[low]), 100 * float(row[high]))


def key_table(rows):
    """Returns the table of `tasks passkey`: a line for each plan, with all depths together and apart."""
    depths = list(dict.fromkeys(row["depth"] for row in rows if row["depth"] != "all"))
    lines = []
    for plan in dict.fromkeys(row["plan"] for row in rows):
        by_depth = {row["depth"]: row for row in rows if row["plan"] == plan}
        whole = by_depth["all"]
        lines.append(["`%s`" % plan, "%.2f" % float(whole["ratio"]), whole["asked"], whole["exact_right"],
                      share(whole, "right", "exact_right", "low", "high")]
                     + ["%s of %s" % (by_depth[d]["right"], by_depth[d]["exact_right"]) for d in depths])
    return layout(["plan", "ratio", "asked", "exact right", "plan right of these, % (95 %)"]
                  + ["%s %%" % d for d in depths], lines)


def choice_table(rows):
    """Returns the table of `tasks choice`."""
    counts = ["acc", "acc_norm", "same", "same_norm"]
    lines = [["`%s`" % row["plan"], "%.2f" % float(row["ratio"]), row["asked"]]
             + [share(row, name, "asked", name + "_low", name + "_high") for name in counts]
             + [short(float(row["moved_nats"]))] for row in rows]
    return layout(["plan", "ratio", "asked", "acc, % (95 %)", "acc per byte", "exact's choice, % (95 %)",
                   "exact's choice per byte", "moved, nats"], lines)


def without_tables(plan):
    return " ".join(word for word in plan.split() if not word.startswith("tables="))


def sides(rows):
    """Returns a table that compares plans with and without the word tables=."""
    whole = {row["plan"]: row for row in rows if row["window"] == "all"}
    loaded = [plan for plan in whole if without_tables(plan) != plan and without_tables(plan) in whole]
    words = sorted({word for plan in loaded for word in plan.split() if word.startswith("tables=")},
                   key=lambda word: [int(n) for n in re.findall(r"\d+", word)])
    lines = []
    for plan in dict.fromkeys(map(without_tables, loaded)):
        same = {word: whole[p] for p in loaded for word in words
                if without_tables(p) == plan and word in p.split()}
        shown = [whole[plan]] + [same.get(word) for word in words]
        lines.append(["`%s`" % plan, bits(whole[plan])] + [with_error(row) if row else "-" for row in shown]
                     + [growth(row) if row else "-" for row in shown])
    names = ["learned online"] + ["`%s`" % word for word in words]
    return caption(rows) + layout(["plan", "bits"] + ["KL, " + name for name in names]
                                  + ["dPPL %, " + name for name in names], lines)


def table_of(rows, compares_sides):
    """Returns the table for the columns of a CSV file."""
    if "exact_right" in rows[0]:
        return key_table(rows)
    if "acc_norm" in rows[0]:
        return choice_table(rows)
    return sides(rows) if compares_sides else table(rows)


# >>the page
def find_command(page, name):
    """Returns the indented command that writes this CSV, with continued lines joined; None if there is none."""
    for block in re.findall(r"(?:^    .*\n)+", page, re.M):
        for command in re.sub(r"\\\n\s*", "", block).split("\n"):
            if re.search(r"--csv %s%s\.csv(\s|$)" % (re.escape(FOLDER), re.escape(name)), command):
                return command.strip()
    return None


def command_of(page, name):
    command = find_command(page, name)
    if command:
        return command
    sys.exit("tables: QUALITY.md has no command with --csv %s%s.csv" % (FOLDER, name))


def run(page, names):
    environment = dict(os.environ)
    environment.setdefault("TKV_DATA", os.path.join(os.path.dirname(ROOT), "shared", "data"))
    for i, name in enumerate(names):
        command = command_of(page, name)
        print("tables: %d of %d, %s\n%s" % (i + 1, len(names), name, command), flush=True)
        if subprocess.run(command, shell=True, cwd=ROOT, env=environment).returncode != 0:
            sys.exit("tables: this command failed")


def fill(page):
    def filled(match):
        path = os.path.join(ROOT, FOLDER, match.group(2) + ".csv")
        if not os.path.exists(path):
            print("tables: there is no %s%s.csv; its table does not change. The command is\n%s"
                  % (FOLDER, match.group(2), command_of(page, match.group(2))))
            return match.group(0)
        rows = read_rows(path)
        if not rows:
            sys.exit("tables: %s is empty" % path)
        return match.group(1) + "\n".join(table_of(rows, match.group(3))) + "\n" + match.group(4)

    return PLACE.sub(filled, page)


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    if sys.argv[1] not in ("--fill", "--run"):
        print("\n".join(table_of(read_rows(sys.argv[1]), sys.argv[2:] == ["sides"])))
        return
    with open(PAGE) as f:
        page = f.read()
    known = list(dict.fromkeys(match.group(2) for match in PLACE.finditer(page)))
    unknown = set(sys.argv[2:]) - set(known)
    if unknown:
        sys.exit("tables: unknown table %s; known are %s" % (", ".join(sorted(unknown)), ", ".join(known)))
    if sys.argv[1] == "--run":
        run(page, sys.argv[2:] or known)
    page = fill(page)
    with open(PAGE, "w") as f:
        f.write(page)


if __name__ == "__main__":
    main()
