/*
 * config_texts.h - valid config texts in tests/test_text.c and tests/fuzz/texts.c.
 */
#ifndef TKV_CONFIG_TEXTS_H
#define TKV_CONFIG_TEXTS_H

/* The same config as lines and as JSON. */
static const char sample[] = "# a model\n"
                             "model.n_layers = 6   # of them\n"
                             "model.n_heads=8\n"
                             "  model.n_kv_heads =\t2\r\n"
                             "model.head_dim = 64\n"
                             "\n"
                             "model.scale = 0.125\n"
                             "limits.max_tokens = 4096\n"
                             "tiers.hot_tokens = unlimited\n"
                             "tiers.sink_tokens = off\n"
                             "tiers.archive = a25/r20\n"
                             "tiers.warm = \"kivi4\"\n"
                             "format.fit = clip + norm\n"
                             "format.rotate = v\n"
                             "format.kvquant = post-rope+dense\n"
                             "format.center_k = true\n"
                             "host.nonfinite = saturate\n"
                             "host.isa = scalar\n"
                             "model.rope.dim = 8\n"
                             "model.rope.frequencies = [1, 0.5,\n 0.25, 1e-3] # four\n"
                             "layers[0].share_kv = 0\n"
                             "layers[1-4].window = 1024\n"
                             "layers[5].archive = kivi2/default\n"
                             "layers[5].no_cache = false";

static const char sample_json[] =
    "{\n"
    "  \"model.n_layers\": 6, \"model.n_heads\": 8,\n"
    "  \"model.n_kv_heads\": 2, # comments are taken here, too\n"
    "  \"model.head_dim\" : 64, \"model.scale\": 1.25e-1, \"limits.max_tokens\": 4096,\n"
    "  \"tiers.hot_tokens\": \"unlimited\", \"tiers.sink_tokens\": -1,\n"
    "  \"tiers.archive\": \"a25/r20\", \"tiers.warm\": \"kivi4/kivi4\",\n"
    "  \"format.fit\": \"norm+clip\", \"format.rotate\": \"v\", \"format.kvquant\": \"dense+post-rope\",\n"
    "  \"format.center_k\": 1, \"host.nonfinite\": \"saturate\", \"host.isa\": 1,\n"
    "  \"model.rope.dim\": 8, \"model.rope.frequencies\": [1, 0.5, 0.25,\n 0.001],\n"
    "  \"layers[1-4].window\": 1024,\n"
    "  \"layers[5].archive\": \"kivi2/default\"\n"
    "}\n";

/* The same config in tables and objects, in the spellings that people and programs write. */
static const char *const spellings[] = {
    /* whole paths */
    "model.n_layers = 6\nmodel.n_heads = 8\nmodel.head_dim = 64\nmodel.rope.dim = 4\n"
    "model.rope.frequencies = 1, .5\ntiers.hot_tokens = 1024\ntiers.archive = a25/r20\nhost.precise = true\n"
    "budget.bytes = 65536\nbudget.n_levels = 2\nbudget.ladder[0].hot_tokens = unlimited\n"
    "budget.ladder[1].warm = q8\nbudget.pressure.threshold = zero, .5\nlayers[0].window = 7\n"
    "layers[1].window = 7\nlayers[2].window = 7\nlayers[4].sink_tokens = off\nlayers[4].rope.dim = 2\n"
    "layers[4].rope.base = 500\n",
    /* tables */
    "# a model\n[model]\nn_layers = 6 # six\nn_heads = +8\nhead_dim = 6_4\n\n[ model . rope ] # its RoPE\n"
    "dim = 4\nfrequencies = [\n  1.0, # one, and\n  0.5, # a half ]\n]\n[tiers]\r\nhot_tokens = 1_024\r\n"
    "archive = 'a25/r20'\r\n[host]\nprecise = true\n[budget]\nbytes = \"64K\"\nn_levels = 2\n"
    "pressure.threshold = ['zero', 0.5]\n[budget.ladder.0]\nhot_tokens = \"unlimited\"\n"
    "[budget.ladder.1]\nwarm = \"q8\"\n[layers.0-2]\nwindow = 7\n[layers.4]\nsink_tokens = 'off'\n"
    "[layers.4.rope]\ndim = 2\nbase = 5e2",
    /* dotted keys, keys in quotes, tables in braces, and entries of lists */
    "model.n_layers = 6\n\"model\".'n_heads' = 8\n\"model.head_dim\" = 64\n"
    "model.rope = { dim = 4, frequencies = [1, 0.5] }\ntiers = { \"hot_tokens\" = 1024, archive = "
    "\"a25/r20\" }\n"
    "host . precise = true\nbudget.bytes = 65_536\nbudget.n_levels = 2\n[[budget.ladder]]\n"
    "hot_tokens = 'unlimited'\n[[budget.ladder]]\nwarm = 'q8'\n[budget.pressure]\n"
    "threshold = [\"zero\", 0.5,]\n[[layers]]\nwindow = 7\n[[layers]]\nwindow = 7\n[[layers]]\nwindow = 7\n"
    "[[layers]]\n[[layers]]\nsink_tokens = 'off'\n[layers.rope]\ndim = 2\nbase = 500",
    "model = { n_layers = 6, n_heads = 8, head_dim = 64, rope.dim = 4, rope.frequencies = [1, .5] } # all\n"
    "tiers.hot_tokens = 1024\ntiers.archive = a25/r20\nhost = {\n precise = true }\n"
    "budget = { bytes = 64K, n_levels = 2, ladder = [{ hot_tokens = unlimited }, { warm = q8 },] }\n"
    "budget.pressure = { threshold = [zero, .5] }\nlayers[0-1].window = 7\n[layers[2]]\nwindow = 7\n"
    "[\"layers\".\"4\"]\nsink_tokens = off\nrope.dim = 2\n'rope'.base = 500",
    /* objects */
    "{\"model\": {\"n_layers\": 6, \"n_heads\": 8, \"head_dim\": 64, \"rope\": {\"dim\": 4,\n"
    "\"frequencies\": [1, 0.5]}}, \"tiers\": {\"hot_tokens\": 1024, \"archive\": \"a25/r20\"}, \"evict\": "
    "{},\n"
    "\"host\": {\"precise\": true}, \"budget\": {\"bytes\": 65536, \"n_levels\": 2, \"ladder\":\n"
    "[{\"hot_tokens\": \"unlimited\"}, {\"warm\": \"q8\"}], \"pressure\": {\"threshold\": [\"zero\", "
    "0.5]}},\n"
    "\"layers\": {\"0-2\": {\"window\": 7}, \"4\": {\"sink_tokens\": \"off\", \"rope\": {\"dim\": 2, "
    "\"base\": 500}}}}",
    "{\"model\": {\"n_layers\": 6, \"n_heads\": 8, \"head_dim\": 64}, \"model.rope\": {\"dim\": 4,\n"
    "\"frequencies\": [1, 0.5]}, \"tiers.hot_tokens\": 1024, \"tiers\": {\"archive\": \"a25/r20\"},\n"
    "\"host\": {\"precise\": true}, \"budget\": {\"bytes\": \"64K\", \"n_levels\": 2, \"ladder[0]\":\n"
    "{\"hot_tokens\": \"unlimited\"}, \"ladder.1\": {\"warm\": \"q8\"}, \"pressure.threshold\": [\"zero\", "
    "0.5]},\n"
    "\"layers\": [{\"window\": 7}, {\"window\": 7}, {\"window\": 7}, null,\n"
    "{\"sink_tokens\": -1, \"rope\": {\"dim\": 2, \"base\": 500}}, null]}"};

static const char pressure_sample[] = "budget.pressure.profile = aggressive\n"
                                      "budget.pressure.threshold = zero, .5, 0.75\n"
                                      "budget.pressure.hysteresis = zero\n"
                                      "budget.pressure.alpha = 1e-1\n"
                                      "budget.pressure.min_level = 1\n"
                                      "budget.pressure.max_level = off\n";

#endif /* TKV_CONFIG_TEXTS_H */
