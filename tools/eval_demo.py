#!/usr/bin/env python3
"""Measures how much the demo model uses its context, on held-out text, with the weights of the GGUF file.

    pip install torch==2.13.0 tokenizers gguf numpy
    tools/eval_demo.py                    prints two tables, in a few minutes on one core; --csv prints CSV
    tools/eval_demo.py --prompt           prints the prompt of `make run` (examples/data/demo_prompt.txt)

Loss: every row scores the same tokens, after different numbers of earlier tokens. So rows can be subtracted, and the
error of a difference is smaller than the error of a row. Errors are standard errors over blocks of 500 tokens.

Recall: held-out text gets eight secret numbers, as in training. One question follows at a given distance. An answer is
right if the space and all digits are the likeliest tokens, so that greedy decoding gives them.
"""

import argparse
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

import train_demo as demo

DATA = os.path.join(demo.HERE, "..", "examples", "data")
CONTEXTS = ((0, 100), (100, 200), (200, 500), (500, 1000), (1000, 1500), (1500, 2000))
BASE = (100, 200)  # all rows are compared with this row
DISTANCES = (200, 500, 1000, 1500)
N_PLANTED = 8
BLOCK, MULTIPLE = 500, 1500  # BLOCK and the length of every row divide MULTIPLE


def load(path):
    """Returns model and tokenizer from the file."""
    import gguf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    reader = gguf.GGUFReader(path)
    model = demo.Model(demo.CONFIG)
    names = {n if n.endswith(".weight") else n + ".weight": n for n in model.state_dict()}
    weights = {}
    for t in reader.tensors:
        value = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        weights[names[t.name]] = torch.from_numpy(value.reshape(tuple(int(n) for n in t.shape[::-1])))
    model.load_state_dict(weights)
    tokens, merges = (reader.get_field("tokenizer.ggml." + n).contents() for n in ("tokens", "merges"))
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return model.eval(), tok


@torch.no_grad()
def losses(model, windows, first, batch):
    """Returns the losses of tokens first, first + 1, ... of each window. Windows are rows of equal length."""
    out = []
    for i in range(0, len(windows), batch):
        tokens = torch.from_numpy(windows[i:i + batch])
        logits = model(tokens[:, :-1])[:, first - 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, first:], reduction="none")
        out.append(loss.numpy())
    return np.concatenate(out)


# >>loss

def loss_by_context(model, texts):
    """Returns {(low, high): loss of each block of 500 tokens}. All rows have the same blocks."""
    longest = CONTEXTS[-1][1]
    table = {}
    for low, high in CONTEXTS:
        first, blocks = max(low, 1), []  # the first token of a text has no prediction
        for ids in texts:
            n = (len(ids) - longest) // MULTIPLE * MULTIPLE
            ends = range(longest + high - low, longest + n + 1, high - low)
            windows = np.stack([ids[e - high:e] for e in ends])
            loss = losses(model, windows, first, max(1, 4096 // high))
            if first > low:
                loss = np.pad(loss, ((0, 0), (first - low, 0)), constant_values=np.nan)
            blocks.append(np.nanmean(loss.reshape(-1, BLOCK), 1))
        table[low, high] = np.concatenate(blocks)
    return table


def print_loss(table, as_csv):
    base = table[BASE]

    def error(x):
        return x.std(ddof=1) / len(x) ** 0.5

    if as_csv:
        print("tokens_before,loss,error,difference,difference_error,blocks")
    else:
        print(f"Held-out text, {len(base) * BLOCK:,} tokens, nats per token:\n")
        print(f"  tokens before       loss            difference to {BASE[0]}-{BASE[1]}")
    for (low, high), loss in table.items():
        d = loss - base
        if as_csv:
            print(f"{low}-{high},{loss.mean():.4f},{error(loss):.4f},{d.mean():.4f},{error(d):.4f},{len(loss)}")
        else:
            last = "" if (low, high) == BASE else f"{d.mean():+.4f} +- {error(d):.4f}"
            print(f"  {low:5,} - {high:5,}   {loss.mean():.3f} +- {error(loss):.3f}   {last}".rstrip())


# >>recall

def recall(model, tok, texts, distance, n, rng):
    """Returns n rows of booleans: whether the space and each of the five digits are right."""
    length = distance + 300  # space before the number for other numbers
    rows, starts = [], []
    while len(rows) < n:
        names = list(dict.fromkeys(" ".join(rng.choice(demo.NAMES, 1 + i % 2, replace=False)) for i in range(30)))
        rng.shuffle(names)
        numbers = ["".join(str(d) for d in rng.integers(0, 10, 5)) for _ in names]
        ids = texts[rng.choice(len(texts), p=[len(t) / sum(map(len, texts)) for t in texts])]
        at = rng.integers(0, len(ids) - length)
        window = ids[at:at + length].copy()
        taken = np.zeros(length, dtype=bool)
        ask = tok.encode(demo.plant(names[0], numbers[0])).ids
        start = length - len(ask)  # the question is at the end, and its number `distance` tokens before
        for i in range(N_PLANTED):
            plant = tok.encode(demo.plant(names[i], numbers[i])).ids
            for _ in range(1000):
                p = start - distance if i == 0 else rng.integers(0, start - len(plant))
                if not taken[p:p + len(plant)].any():
                    break
            window[p:p + len(plant)], taken[p:p + len(plant)] = plant, True
        window[start:] = ask
        rows.append(window)
        starts.append(start + len(tok.encode(demo.ask(names[0])).ids))
    right = []
    for window, start in zip(rows, starts):
        with torch.no_grad():
            logits = model(torch.from_numpy(window[None, :-1]))[0]
        right.append(logits.argmax(-1).numpy()[start - 1:start + 5] == window[start:start + 6])
    return np.array(right)


def print_recall(model, tok, texts, n, seed, as_csv):
    if as_csv:
        print("tokens_back,asked,right,digits_right")
    else:
        print(f"\nRecall of one of {N_PLANTED} secret numbers of 5 digits, by distance of the question:\n")
        print("  tokens back   right        digits right, after correct digits")
    for distance in DISTANCES:
        right = recall(model, tok, texts, distance, n, np.random.default_rng((seed, distance)))
        whole, digits = int(right.all(1).sum()), right[:, 1:].mean()
        if as_csv:
            print(f"{distance},{n},{whole},{digits:.4f}")
        else:
            print(f"  {distance:11,}   {whole:2} of {n:2}     {100 * digits:.1f} %")


# >>prompt

def prompt(tok, text, n, seed):
    """Returns about n tokens of a text with secret numbers in separate lines, the last one 100 tokens before the end.
    When `make run` asks for them, this one is in the warm tier, and the others are in the archive."""
    rng = np.random.default_rng(seed)
    names = [" ".join(rng.choice(demo.NAMES, 1 + i % 2, replace=False)) for i in range(N_PLANTED)]
    plants = [demo.plant(name, "".join(str(d) for d in rng.integers(0, 10, 5))) for name in names]
    places = np.linspace(20, n * 0.8, N_PLANTED - 1).tolist() + [n - 100]
    lines = text[text.index("CHAPTER"):].split("\n")
    out = ""
    for before, line in zip([""] + lines, lines):
        count = len(tok.encode(out).ids)
        if count > n and before and line:
            return out
        if places and count >= places[0] and before and line:  # within a paragraph
            out += plants[-len(places)][1:]
            places.pop(0)
        out += line + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=os.path.join(DATA, "demo.gguf"))
    p.add_argument("--text", default=os.path.join(demo.HERE, "..", "..", "shared", "data", "text"),
                   help="folder with " + " and ".join(demo.TEXTS))
    p.add_argument("--n", type=int, default=32, help="questions per distance")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--csv", action="store_true")
    p.add_argument("--prompt", action="store_true", help="print the prompt of `make run`")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if not os.path.exists(args.model):
        sys.exit(f"{args.model} is missing: tools/train_demo.py makes it")
    model, tok = load(args.model)
    held_out = [b for _, b in demo.read_texts(args.text)]
    if args.prompt:
        print(prompt(tok, held_out[0], 1400, args.seed), end="")
        return
    texts = [np.array(tok.encode(t).ids, dtype=np.int64) for t in held_out]
    print_loss(loss_by_context(model, texts), args.csv)
    print_recall(model, tok, texts, args.n, args.seed, args.csv)


if __name__ == "__main__":
    main()
