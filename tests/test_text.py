#!/usr/bin/env python3
"""What the cache says of itself is JSON to Python and text to the parser of prometheus_client, and the numbers agree."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

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
    tkv_layer_config layers[3] = {{{0}}};
    float frequencies[8];
    tkv_config_arrays room = {layers, 3, NULL, 0, frequencies, 8};
    float row[2 * 16], out[2 * 16];
    char reason[200];
    tkv_cache *kv;
    int n, i, seq, bad = 0;
    if (argc < 3) return 2;
    if (tkv_parse_config(&cfg, &room, argv[2], strlen(argv[2]), reason, sizeof reason) ||
        tkv_validate_config(&cfg, reason, sizeof reason) || tkv_create(&cfg, &kv)) {
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


class Reports(unittest.TestCase):
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
    result = unittest.main(exit=False, verbosity=1).result
    bad, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    for test, why in result.skipped:
        print("skipped %s: %s" % (test.id(), why))
    sys.stdout.flush()
    sys.stderr.flush()
    print("%d passed, %d failed, %d skipped" % (result.testsRun - bad - skipped, bad, skipped))
    sys.exit(bad != 0)
