#!/usr/bin/env python3
"""Compares plans position by position, from the files that bench/quality --positions writes.

    python3 bench/pairs.py PLAN FILE.csv ...

PLAN is the plan that the others are compared with, such as 64,448:kivi4,kivi4. Each file is a text, named by its file
name. For each text and plan it prints the mean KL divergence, then that of each quarter of the windows. Behind it stands
the difference from PLAN with its 95 % interval. The intervals are of paired differences, from the means of batches of 64
neighbouring positions within a window, since neighbours are not independent. A mark tells the outcome: < below PLAN,
> above it, = the interval holds 0. The last lines are of all texts, each with equal weight.
"""
import csv
import math
import os
import sys

BATCH = 64


def read_positions(path):
    """Returns {plan: {(window, position): kl}}."""
    plans = {}
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            plans.setdefault(row["plan"], {})[row["window"], int(row["position"])] = float(row["kl"])
    return plans


def quarter_of(key):
    window, position = key
    return 4 * position // int(window.split(":")[1])


def batch_means(values, keys):
    """Returns the means of batches of neighbours within a window."""
    batches = {}
    for window, position in keys:
        batches.setdefault((window, position // BATCH), []).append(values[window, position])
    return [sum(b) / len(b) for b in batches.values()]


def estimate(values, keys):
    """Returns the mean and the half width of its 95 % interval."""
    means = batch_means(values, keys)
    n = len(means)
    mean = sum(values[k] for k in keys) / len(keys)
    centre = sum(means) / n
    squares = sum((x - centre) ** 2 for x in means)
    return mean, 1.96 * math.sqrt(squares / (n - 1) / n) if n > 1 else math.inf


def compare(plan, other):
    """Returns [(KL, difference, half width)] of the whole and the four quarters; None where nothing is scored."""
    difference = {k: plan[k] - other[k] for k in plan}
    parts = [sorted(plan)] + [sorted(k for k in plan if quarter_of(k) == q) for q in range(4)]
    return [(sum(plan[k] for k in keys) / len(keys),) + estimate(difference, keys) if keys else None
            for keys in parts]


def shown(part):
    if part is None:
        return "%24s" % "-"
    kl, difference, half = part
    mark = "=" if abs(difference) <= half else "<" if difference < 0 else ">"
    return "%.5f %+.5f+-%.5f%s" % (kl, difference, half, mark)


def main():
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    name, paths = sys.argv[1], sys.argv[2:]
    totals = {}
    print("%-12s %-34s %s" % ("text", "plan", "  ".join("%-25s" % part for part in
                                                     ["all", "1st quarter", "2nd", "3rd", "4th"])))
    for path in paths:
        text = os.path.splitext(os.path.basename(path))[0]
        plans = read_positions(path)
        if name not in plans:
            sys.exit("pairs: %s has no plan %s; it has %s" % (path, name, ", ".join(plans)))
        for plan, values in plans.items():
            if values.keys() != plans[name].keys():
                sys.exit("pairs: %s: %s has other positions than %s" % (path, plan, name))
            parts = compare(values, plans[name])
            totals.setdefault(plan, []).append(parts)
            print("%-12s %-34s %s" % (text, plan, "  ".join(map(shown, parts))))
    for plan, texts in totals.items():
        parts = []
        for column in zip(*texts):
            column = [part for part in column if part]
            n = len(column)
            parts.append((sum(p[0] for p in column) / n, sum(p[1] for p in column) / n,
                          math.sqrt(sum(p[2] ** 2 for p in column)) / n) if n else None)
        print("%-12s %-34s %s" % ("%d texts" % len(texts), plan, "  ".join(map(shown, parts))))


if __name__ == "__main__":
    main()
