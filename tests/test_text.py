#!/usr/bin/env python3
"""What the cache says of itself is JSON to Python and text to the parser of prometheus_client, and the numbers agree.
Config texts mean to tkv_parse_config what they mean to tomllib and json."""
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = None

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

PROGRAM = r"""
#include "tieredkv.h"
#include <stdio.h>
#include <string.h>
static char text[1 << 18];
static int said(tkv_status st) {
    if (st) fprintf(stderr, "%s\n", tkv_get_status_text(st));
    else fputs(text, stdout);
    return st != TKV_OK;
}
int main(int argc, char **argv) {
    tkv_config cfg = {0};
    static tkv_layer_config layers[12];
    tkv_level ladder[TKV_MAX_LEVELS];
    float frequencies[64];
    tkv_config_arrays room = {layers, 12, ladder, TKV_MAX_LEVELS, frequencies, 64};
    float row[2 * 16], out[2 * 16];
    char reason[200];
    tkv_cache *kv;
    int n, i, seq, bad = 0;
    if (argc < 3) return 2;
    if (tkv_parse_config(&cfg, &room, argv[2], strlen(argv[2]), reason, sizeof reason)) {
        fprintf(stderr, "%s\n", reason);
        return 1;
    }
    if (argv[1][0] >= '0' && argv[1][0] <= '3') return said(tkv_print_config(&cfg, argv[1][0] - '0', text, sizeof text, NULL));
    if (tkv_validate_config(&cfg, reason, sizeof reason) || tkv_create(&cfg, &kv)) {
        fprintf(stderr, "%s\n", reason);
        return 1;
    }
    for (n = 0; n < 1400; n++) {
        for (i = 0; i < 32; i++) row[i] = (float)((n * 32 + i) * 7919 % 257 - 128) * 0.01f;
        seq = n % 7 == 6 ? 2 : 0;
        for (i = 0; i < cfg.model.n_layers; i++) {
            if (!layers[i].no_cache && !layers[i].share_kv) bad |= tkv_append(kv, seq, i, row, row, 1) != TKV_OK;
            if (!layers[i].no_cache) bad |= tkv_attend(kv, seq, i, row, 1, out) != TKV_OK;
        }
    }
    if (argv[1][0] == 's') bad |= said(tkv_print_report(kv, TKV_REPORT_JSON, NULL, text, sizeof text, NULL));
    if (argv[1][0] == 'p') bad |= said(tkv_print_report(kv, TKV_REPORT_PROMETHEUS, argc > 3 ? argv[3] : NULL, text, sizeof text, NULL));
    if (argv[1][0] == 'c') bad |= said(tkv_print_config(&cfg, 1, text, sizeof text, NULL));
    if (argv[1][0] == 't') bad |= said(tkv_print_config(&cfg, 0, text, sizeof text, NULL));
    tkv_destroy(kv);
    return bad;
}
"""

CONFIG = """
model.n_layers = 3        # the second has no cache, the third shares that of the first
model.n_heads = 2
model.head_dim = 16
limits.max_seqs = 4
tiers.archive = a25/r20
meter.every = 4
meter.heads = 1
model.rope.dim = 16
model.rope.frequencies = 1, .5, .25, .125, 1e-2, 1e-3, 1e-4, 1e-5
layers[1].no_cache = true
layers[2].share_kv = 1
"""

LINES, JSON, TOML, NESTED = "0123"

# The fields that the texts below set, and values of them. Layers and levels stand for each of their entries.
FIELDS = {
    "model.n_heads": [8, 64], "model.n_kv_heads": [2], "model.head_dim": [64, 1024], "model.scale": [0.125, 1, 1.5e-3],
    "model.v_in_k": [True, False], "model.window": [4096, "off"], "model.rope.base": [1e6, 10000, 500.25],
    "model.rope.interleaved": [True], "model.rope.kind": ["dynamic", "fixed"], "limits.max_tokens": [131072, 5],
    "limits.state_bytes": [1 << 40, "64K", "1.5G"], "tiers.sink_tokens": ["off", 64], "tiers.hot_tokens": ["unlimited", 1024],
    "tiers.archive": ["a25/r20", "kivi2"], "format.fit": ["clip+norm", "none"], "format.center_k": [True],
    "host.isa": ["scalar"], "host.nonfinite": ["saturate"], "meter.target": [0.99], "budget.bytes": [10 ** 9],
    "budget.pressure.threshold": [[0.5, 0.75], ["zero", 0.25], [0.5]], "budget.pressure.alpha": [0.1],
    "budget.pressure.max_level": [1, "off"], "evict.policy": ["h2o"], "evict.seed": [-5, 0],
    "importance.strategy": ["heavy_hitter"], "promotion.cooldown": ["off"], "offload.keep_exact": [True],
}
ENTRIES = {
    "layers": {"window": [1024, "off"], "warm": ["q8"], "share_kv": [1], "no_cache": [True], "rope.base": [500, 1e4],
               "rope.dim": ["off"]},
    "budget.ladder": {"hot_tokens": ["unlimited", 64], "archive": ["a20/r15"], "from_tokens": [2048]},
}


def flatten(tree, path=""):
    """A nested document as whole paths of fields: {"layers": {"3": {"window": 1}}} as {"layers[3].window": 1}."""
    flat = {}
    if isinstance(tree, list) and any(isinstance(x, (dict, type(None))) for x in tree):
        tree = {str(i): x for i, x in enumerate(tree) if x is not None}
    if not isinstance(tree, dict):
        return {path: tree}
    for key, value in tree.items():
        key = "[%s]" % key if path and key[0].isdigit() else "." + key if path else key
        for name, x in flatten(value, path + key).items():
            assert name not in flat, name
            flat[name] = x
    return flat


def without_doubles(pairs):
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), keys
    return dict(pairs)


class Document:
    """A random config as a tree, and texts of it in many spellings."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        fields = {name: self.random.choice(values) for name, values in FIELDS.items() if self.random.random() < .5}
        fields["model.n_layers"] = 12
        fields["budget.n_levels"] = 8
        self.tree = {}
        for name, value in fields.items():
            self.put(name.split("."), value)
        for name, most in (("layers", 12), ("budget.ladder", 8)):
            for i in range(most):
                for field, values in ENTRIES[name].items():
                    if self.random.random() < .1:
                        self.put(name.split(".") + [str(i)] + field.split("."), self.random.choice(values))

    def put(self, path, value):
        at = self.tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value

    def one_of(self, *choices):
        return self.random.choice(choices)

    def name(self, name):
        return self.one_of(name, name, '"%s"' % name, "'%s'" % name)

    def blank(self):
        return self.one_of("", " ", " ", "\t")

    def value(self, x):
        if isinstance(x, dict):
            pairs = [self.path(key) + self.blank() + "=" + self.blank() + self.value(y) for key, y in self.pairs(x)]
            return "{ %s }" % ", ".join(pairs)
        if isinstance(x, list):
            space = lambda: self.one_of("", " ", "\n", " # a ], and\n", "# 'a\n")
            items = [space() + self.value(y) + space() for y in x]
            return "[" + ",".join(items) + self.one_of("", ",", " , ") + space() + "]"
        if isinstance(x, str):
            return self.one_of('"%s"', "'%s'") % x
        if isinstance(x, bool):
            return "true" if x else "false"
        text = repr(x)
        if x >= 1000 and isinstance(x, int) and self.random.random() < .5:
            text = format(x, "_d")
        return self.one_of("", "+") + text if x > 0 else text

    def pairs(self, tree):
        """The items of a tree, some of their trees as dotted keys."""
        for key, value in tree.items():
            if isinstance(value, dict) and self.random.random() < .5:
                for below, x in self.pairs(value):
                    yield (key,) + below, x
            else:
                yield (key,), value

    def path(self, names):
        return (self.blank() + "." + self.blank()).join(self.name(name) for name in names)

    def toml(self, tree=None, above=()):
        """The text of a table: its values and dotted keys, then the tables in it, in any order."""
        tree = self.tree if tree is None else tree
        inside = [key for key in tree if isinstance(tree[key], dict) and (not above or self.random.random() < .7)]
        lines = []
        for names, x in self.pairs({key: x for key, x in tree.items() if key not in inside}):
            lines.append(self.blank() + self.path(names) + self.blank() + "=" + self.blank() + self.value(x) +
                         self.one_of("", " # a = b", "\r") + self.one_of("\n", "\n\n"))
        self.random.shuffle(lines)
        text = ["[%s]%s\n" % (self.path(above), self.one_of("", "  # [a]"))] + lines if above else lines
        self.random.shuffle(inside)
        return "".join(text + [self.toml(tree[key], above + (key,)) for key in inside])

    def json(self):
        """Objects; layers and levels as a list or by their index, some paths as one key."""
        def shape(tree, path=()):
            if not isinstance(tree, dict):
                return tree
            if tree and all(key.isdigit() for key in tree) and self.random.random() < .5:
                return [shape(tree[str(i)], path) if str(i) in tree else self.one_of(None, {})
                        for i in range(max(map(int, tree)) + 1)]
            return {".".join(names): shape(x) for names, x in self.pairs(tree)}
        return json.dumps(shape(self.tree), indent=self.one_of(None, 1, 4))


class WithProgram(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.place.cleanup)
        cls.program = os.path.join(cls.place.name, "dump")
        with open(cls.program + ".c", "w") as f:
            f.write(PROGRAM)
        library = os.path.join(ROOT, os.environ.get("LIBRARY", "examples/tieredkv.c"))  # make test compiled it
        subprocess.check_call([os.environ.get("CC", "cc"), "-O1", "-I" + ROOT, cls.program + ".c", library,
                               "-o", cls.program, "-lm"])

    def dump(self, what, config=CONFIG, *args):
        return subprocess.check_output([self.program, what, config] + list(args)).decode()


class Texts(WithProgram):
    """tomllib and json are the second opinion on valid documents."""

    def said(self, style, text):
        return subprocess.run([self.program, style, text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def read(self, text):
        """What tkv_parse_config reads, as whole paths and values."""
        run = self.said(JSON, text)
        self.assertEqual(run.returncode, 0, run.stdout.decode() + text)
        return json.loads(run.stdout.decode(), object_pairs_hook=without_doubles)

    def flat(self, tree):
        """The values as tkv_print_config writes them: without zeros, with its words and in floats."""
        return self.read(json.dumps(flatten(tree)))

    @unittest.skipUnless(tomllib, "tomllib is not here")
    def test_reads_what_tomllib_reads(self):
        n_fields = 0
        for seed in range(60):
            document = Document(seed)
            text = document.toml()
            tree = tomllib.loads(text)
            self.assertEqual(tree, document.tree, text)
            self.assertEqual(self.read(text), self.flat(tree), text)
            n_fields += len(self.read(text))
        self.assertGreater(n_fields, 60 * 15)

    def test_reads_what_json_reads(self):
        for seed in range(60):
            document = Document(seed)
            text = document.json()
            self.assertEqual(self.read(text), self.flat(document.tree), text)

    @unittest.skipUnless(tomllib, "tomllib is not here")
    def test_arrays_of_tables(self):
        text = "".join("[[layers]]\nwindow = %d\n[layers.rope]\nbase = %d\n[[budget.ladder]]\nhot_tokens = %d\n" %
                       (n, 500 + n, 64 * n) for n in range(1, 5)) + "[model]\nn_layers = 4\n[budget.pressure]\nalpha = 0.5\n"
        text = "budget.n_levels = 4\n" + text.replace("[budget.pressure]\n", "[promotion]\nevery = 5\n")
        text = text.replace("alpha = 0.5\n", "")
        said = self.read(text)
        self.assertEqual(said, self.flat(tomllib.loads(text)))
        self.assertEqual(said["layers[3].rope.base"], 504)
        self.assertEqual(said["budget.ladder[3].hot_tokens"], 256)

    def test_writes_what_others_read(self):
        for seed in range(60):
            text = json.dumps(flatten(Document(seed).tree))
            flat = self.read(text)
            nested = self.said(NESTED, text).stdout.decode()
            self.assertEqual(flatten(json.loads(nested, object_pairs_hook=without_doubles)), flat)
            self.assertNotIn(".", "".join(json.loads(nested)))
            toml = self.said(TOML, text).stdout.decode()
            if tomllib:
                self.assertEqual(flatten(tomllib.loads(toml)), flat)
            for style in (LINES, JSON, TOML, NESTED):
                self.assertEqual(self.read(self.said(style, text).stdout.decode()), flat)

    def test_every_field_has_its_table_once(self):
        """A config with all fields: no table and no object begins twice."""
        with open(os.path.join(ROOT, "src", "report", "text.h")) as f:
            rows = set(re.findall(r"TKVI_(?:ROW|NAMED)\(tkv_config, ([\w.]+)", f.read()))
        self.assertGreater(len(rows), 30)
        tree = dict.fromkeys(rows, 1)
        for name in ("tiers.hot", "tiers.warm", "tiers.archive"):
            tree[name] = "q8"
        for name, values in FIELDS.items():
            tree[name] = values[0]
        tree.update({"model.n_layers": 1, "budget.n_levels": 1, "layers[0].rope.base": 5, "layers[0].window": 5,
                     "budget.ladder[0].hot_tokens": 5})
        flat = self.read(json.dumps(tree))
        self.assertLessEqual(rows, set(flat))
        text = json.dumps(flat)
        self.assertEqual(flatten(json.loads(self.said(NESTED, text).stdout.decode(), object_pairs_hook=without_doubles)), flat)
        if tomllib:
            self.assertEqual(flatten(tomllib.loads(self.said(TOML, text).stdout.decode())), flat)

    def test_cut_and_changed_texts(self):
        """Documents with a part missing or a character changed end with a line and a sentence, or are valid."""
        r = random.Random(7)
        for seed in range(150):
            document = Document(seed)
            text = document.toml() if seed % 2 else document.json()
            at = r.randrange(len(text))
            text = text[:at] + r.choice(["", "", "[", "]", "{", "}", "'", '"', "=", ".", "\n", "#", ",", "3"]) + text[at + r.randrange(9):]
            run = self.said(JSON, text)
            self.assertIn(run.returncode, (0, 1))
            if run.returncode:
                self.assertRegex(run.stdout.decode(), r"^line \d+: ")


class Reports(WithProgram):
    def test_config_is_json(self):
        said = json.loads(self.dump("config"))
        self.assertEqual(said["model.n_layers"], 3)
        self.assertEqual(said["tiers.archive"], "a25/r20")
        self.assertEqual(said["model.rope.frequencies"], [1, .5, .25, .125, 1e-2, 1e-3, 1e-4, 1e-5])
        self.assertIs(said["layers[1].no_cache"], True)
        self.assertEqual(self.dump("config", json.dumps(said)), self.dump("config"))
        self.assertEqual(self.dump("config", json.dumps(said, indent=4)), self.dump("config"))
        self.assertEqual(self.dump("config", self.dump("text")), self.dump("config"))

    def test_state(self):
        said = json.loads(self.dump("state"))
        self.assertEqual([s["seq"] for s in said["lengths"]], [0, 2])
        for seq, tokens in zip(said["lengths"], (1200, 200)):
            self.assertEqual(seq["tokens"], tokens)
            self.assertEqual(seq["length"], [tokens, None, None])
            self.assertEqual(sum(seq[t][0] for t in ("hot", "warm", "archive", "expired")), tokens)
        self.assertGreater(said["lengths"][0]["archive"][0], 0)
        self.assertEqual(said["formats"]["archive"], ["a25/r20", None, None])
        self.assertEqual(said["formats"]["calibrated_layers"], 1)
        self.assertEqual(said["config"].get("tiers.hot_tokens", 0), 0)
        self.assertEqual(said["config"]["limits.max_append"], 512)
        memory = dict(said["memory"])
        self.assertEqual(sum(memory.pop(k) for k in list(memory) if k.endswith(("codes", "metadata")) or
                             k in ("tables", "index", "scratch", "exact_copies", "states", "slack")), memory["total"])
        self.assertAlmostEqual(memory["ratio"], memory["fp16_bytes"] / memory["total"], 5)
        self.assertEqual(said["sequences"], {"count": 2, "most": 4, "longest": 1200})
        self.assertGreater(said["quality"]["samples"], 100)
        self.assertGreater(said["quality"]["kl"], 0)

    def test_state_without_a_meter(self):
        config = CONFIG.replace("meter.heads = 1", "meter.heads = 0")
        self.assertIsNone(json.loads(self.dump("state", config))["quality"])
        self.assertNotIn("tkv_quality", self.dump("prometheus", config))

    def test_prometheus(self):
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            self.skipTest("prometheus_client is not here")
        value = 'a "quoted", \\ and\nbroken caf\u00e9'
        label = "model=" + value.replace("\\", "\\\\").replace(",", "\\,")
        families = {f.name: f for f in text_string_to_metric_families(self.dump("prometheus", CONFIG, label))}
        state = json.loads(self.dump("state"))
        for family in families.values():
            self.assertTrue(family.documentation, family.name)
            self.assertEqual(family.type, "counter" if family.samples[0].name.endswith("_total") else "gauge")
            for sample in family.samples:
                self.assertEqual(sample.labels["model"], value)
            labels = [tuple(sorted(s.labels.items())) for s in family.samples]
            self.assertEqual(len(labels), len(set(labels)), family.name)
        self.assertEqual(families["tkv_info"].samples[0].labels["version"], state["version"])
        one = lambda name: families[name].samples[0].value
        self.assertEqual(sum(s.value for s in families["tkv_memory_bytes"].samples), one("tkv_memory_held_bytes"))
        self.assertEqual(one("tkv_memory_held_bytes"), state["memory"]["total"])
        tokens = {s.labels["tier"]: s.value for s in families["tkv_tokens"].samples}
        tokens["offloaded"] = one("tkv_tokens_offloaded")  # of those of the tiers
        tokens["discarded"] = one("tkv_tokens_discarded")  # in no tier
        self.assertEqual(tokens, state["tokens"])
        del tokens["offloaded"]
        self.assertEqual(sum(tokens.values()), 1400)
        self.assertEqual(one("tkv_quality_samples"), state["quality"]["samples"])
        self.assertEqual(families["tkv_quality_samples"].samples[0].name, "tkv_quality_samples_total")
        self.assertAlmostEqual(one("tkv_quality_kl_nats"), state["quality"]["kl"], 7)
        self.assertEqual(one("tkv_sequences"), 2)


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
