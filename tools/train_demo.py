#!/usr/bin/env python3
"""Trains the demo model, examples/data/demo.gguf, from scratch on the CPU.

    pip install torch==2.13.0 tokenizers gguf numpy
    tools/train_demo.py                    takes about two hours on two cores; a new start continues from a checkpoint

The model is a Llama of 3.0 million weights: head_dim 64, 4 query heads, 2 KV heads, a context of 2,048 tokens, and a
byte-level BPE vocabulary of 1,024. The GGUF has its weights in Q8_0.

Two texts, both in the public domain: Leo Tolstoy, War and Peace, translated by Louise and Aylmer Maude (Project
Gutenberg's edition), and works of William Shakespeare (the excerpt tinyshakespeare). The last 5 % of each are held out.
Training sequences get secret numbers of five digits, questions for them, and repeated passages. Without them, a model
of this size does not learn to attend to distant tokens.

The result depends only on --seed, and on the order of additions in threads. --out holds a checkpoint (every 100 steps)
and the log. After training, the log is copied to the folder of the model.
"""

import argparse
import csv
import json
import math
import os
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = dict(vocab=1024, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, ffn=640, context=2048,
              rope_theta=100000.0, eps=1e-5)
TEXTS = ("war_and_peace.txt", "tinyshakespeare.txt")
HELD_OUT = 0.05
# (steps, tokens of a sequence, dense: many passages and numbers repeat). The model first learns text. Then it learns to
# look back on short dense sequences, and later over growing distances.
PHASES = ((900, 512, False), (200, 1024, False), (600, 256, True), (150, 512, True), (200, 1024, True),
          (500, 2048, True))
STEPS = sum(steps for steps, _, _ in PHASES)
NAMES = """Anna Vasili Pierre Helene Andrew Natasha Nicholas Sonya Boris Vera Julie Marya Kutuzov Bagration Denisov
Dolokhov Anatole Lise Bolkonski Rostov Petya Platon Murat Davout Barclay Speranski Alpatych Balaga Tushin Timokhin
Hamlet Ophelia Romeo Juliet Macbeth Othello Iago Lear Cordelia Prospero Miranda Ariel Caliban Brutus Cassius Portia
Shylock Antonio Orlando Rosalind Viola Orsino Malvolio Benedick Beatrice Hero Falstaff Hotspur Richard Edward Henry
Clarence Gloucester Warwick Margaret Coriolanus Menenius Volumnia Petruchio Katharina Lucentio Bianca Leontes
Perdita Florizel Angelo Isabella Claudio Lucio""".split()


# >>text

def plant(name, digits):
    return f"\nThe secret number of {name} is {digits}.\n"


def ask(name):
    return f"\nThe secret number of {name} is"


def read_texts(folder):
    """Returns [(training part, held-out part)] of the texts."""
    pairs = []
    for name in TEXTS:
        text = open(os.path.join(folder, name), encoding="utf-8").read().replace("\r\n", "\n")
        cut = text.rfind("\n\n", 0, int(len(text) * (1 - HELD_OUT)))
        pairs.append((text[:cut], text[cut:]))
    return pairs


def train_tokenizer(texts, path):
    """Trains a byte-level BPE as in GPT-2. It merges no digits, so each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab"], special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    no_digits = str.maketrans("", "", "0123456789")
    tok.train_from_iterator([t.translate(no_digits) for t in texts], trainer)
    tok.save(path)
    return tok


class Slices:
    """Makes training sequences: text with planted numbers and repeated passages, and the weight of each token."""

    def __init__(self, tok, parts, seed):
        self.tok, self.rng = tok, np.random.default_rng(seed)
        self.parts = [np.array(tok.encode(t).ids, dtype=np.int64) for t in parts]
        sizes = np.array([len(p) for p in self.parts], dtype=np.float64)
        self.share = sizes / sizes.sum()

    def passage(self, n):
        part = self.parts[self.rng.choice(len(self.parts), p=self.share)]
        at = self.rng.integers(0, len(part) - n)
        return part[at:at + n]

    def number(self):
        """Returns a name, the tokens of its line, and the index of the space before the digits in this line."""
        name = NAMES[self.rng.integers(len(NAMES))] if self.rng.random() < 0.5 else \
            " ".join(NAMES[i] for i in self.rng.choice(len(NAMES), 2, replace=False))
        digits = "".join(str(d) for d in self.rng.integers(0, 10, 5))
        return name, self.tok.encode(plant(name, digits)).ids, len(self.tok.encode(ask(name)).ids)

    def sequence(self, n, dense):
        """Returns n + 1 tokens, the weight of each as a target, and its kind."""
        tokens = self.passage(n + 1).copy()
        weight = np.ones(n + 1, dtype=np.float32)
        kind = np.zeros(n + 1, dtype=np.int8)  # 1: a digit of an answer
        taken = np.zeros(n + 1, dtype=bool)

        def put(ids, low, high):
            """Writes ids to a free place between low and high, and returns it; -1: no place was found."""
            for _ in range(8):
                if high - len(ids) <= low:
                    return -1
                at = int(self.rng.integers(low, high - len(ids)))
                if not taken[at:at + len(ids)].any():
                    tokens[at:at + len(ids)] = ids
                    taken[at:at + len(ids)] = True
                    return at
            return -1

        if self.rng.random() < 0.1:  # one sequence in ten is plain text
            return tokens, weight, kind
        for _ in range(int(self.rng.integers(0, 3)) if not dense else max(1, n // 256)):  # passages that repeat
            length = int(self.rng.integers(16, 64))
            first = int(self.rng.integers(0, n + 1 - 2 * length))
            put(tokens[first:first + length].copy(), first + length, n + 1)
        names = set()
        for _ in range(int(self.rng.integers(1, max(4, n // 128) + 1)) if not dense else max(3, n // 128)):
            name, ids, start = self.number()
            if name in names:
                continue
            names.add(name)
            at = put(ids, 0, n * 3 // 4)
            if at < 0:
                continue
            weight[at + start:at + start + 6] = 0  # the space and digits of the first line are unpredictable
            for _ in range(int(self.rng.integers(1, 3))):
                back = put(ids, at + len(ids), n + 1)
                if back >= 0:
                    weight[back + start:back + start + 6] = 4
                    kind[back + start + 1:back + start + 6] = 1
        return tokens, weight, kind

    def batch(self, n_sequences, n, dense):
        rows = [self.sequence(n, dense) for _ in range(n_sequences)]
        tokens, weight, kind = (torch.from_numpy(np.stack(x)) for x in zip(*rows))
        return tokens[:, :-1], tokens[:, 1:], weight[:, 1:], kind[:, 1:]


# >>model: Llama (Touvron et al. 2023); RoPE rotates neighbouring channels, as in GGUF

def rope_angles(n):
    half = CONFIG["head_dim"] // 2
    angle = torch.outer(torch.arange(n, dtype=torch.float64),
                        CONFIG["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half))
    return torch.cos(angle).float(), torch.sin(angle).float()


def rope(x, cos, sin):  # [batch][head][token][head_dim]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        q, kv = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
        self.attn_norm = nn.Parameter(torch.ones(c["dim"]))
        self.ffn_norm = nn.Parameter(torch.ones(c["dim"]))
        self.attn_q, self.attn_k, self.attn_v = (nn.Linear(c["dim"], n, bias=False) for n in (q, kv, kv))
        self.attn_output = nn.Linear(q, c["dim"], bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(c["dim"], c["ffn"], bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(c["ffn"], c["dim"], bias=False)

    def forward(self, x, cos, sin, c):
        b, n, _ = x.shape
        h = F.rms_norm(x, (c["dim"],), self.attn_norm, c["eps"])
        q, k, v = (w(h).view(b, n, -1, c["head_dim"]).transpose(1, 2) for w in
                   (self.attn_q, self.attn_k, self.attn_v))
        group = c["n_heads"] // c["n_kv_heads"]
        q, k = rope(q, cos, sin).to(v.dtype), rope(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(a.transpose(1, 2).reshape(b, n, -1))
        h = F.rms_norm(x, (c["dim"],), self.ffn_norm, c["eps"])
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.token_embd = nn.Parameter(torch.randn(c["vocab"], c["dim"]) * 0.02)
        self.blk = nn.ModuleList(Layer(c) for _ in range(c["n_layers"]))
        self.output_norm = nn.Parameter(torch.ones(c["dim"]))
        for layer in self.blk:
            for w in layer.parameters():
                if w.dim() == 2:
                    nn.init.normal_(w, std=w.shape[1] ** -0.5)
            for w in (layer.attn_output.weight, layer.ffn_down.weight):
                w.data.mul_((2 * c["n_layers"]) ** -0.5)

    def forward(self, tokens):
        cos, sin = rope_angles(tokens.shape[1])
        x = self.token_embd[tokens] * 1.0
        for layer in self.blk:
            x = layer(x, cos, sin, self.c)
        return F.rms_norm(x, (self.c["dim"],), self.output_norm, self.c["eps"]) @ self.token_embd.t()


# >>training

def phase_at(step):
    for steps, n, dense in PHASES:
        if step < steps:
            return n, dense
        step -= steps
    return PHASES[-1][1:]


def rate_at(step, steps):
    """Returns the learning rate's factor: it rises over 100 steps, and falls linearly over the last 20 %."""
    return min(1.0, (step + 1) / 100, max(0.02, (steps - step) / (0.2 * steps)))


def train(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    os.makedirs(args.out, exist_ok=True)
    pairs = read_texts(args.text)
    tok_path = os.path.join(args.out, "tokenizer.json")
    tok = train_tokenizer([t for t, _ in pairs], tok_path)
    model = Model(CONFIG)
    matrices = [p for p in model.blk.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    checkpoint, log_path = os.path.join(args.out, "checkpoint.pt"), os.path.join(args.out, "loss.csv")
    step, spent = 0, 0.0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        step, spent = state["step"], state["seconds"]
        rows = [r for r in csv.reader(open(log_path)) if r[0] == "step" or int(r[0]) <= step]
        csv.writer(open(log_path, "w"), lineterminator="\n").writerows(rows)
        print(f"continuing from step {step}")
    else:
        csv.writer(open(log_path, "w"), lineterminator="\n").writerow(
            ["step", "seconds", "sequence", "text_loss", "recall_loss", "recall_right"])
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, "
          f"{sum(len(tok.encode(t).ids) for t, _ in pairs):,} tokens of text")
    slices = Slices(tok, [t for t, _ in pairs], args.seed)
    start = time.time() - spent
    sums = np.zeros(5)
    while step < args.steps:
        n, dense = phase_at(step)
        slices.rng = np.random.default_rng((args.seed, step))
        tokens, targets, weight, kind = slices.batch(args.batch // n, n, dense)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().view(-1, CONFIG["vocab"]), targets.reshape(-1), reduction="none")
        w = weight.reshape(-1)
        (loss * w).sum().div(w.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            for g in o.param_groups:
                g["lr"] = args.lr * rate_at(step, args.steps)
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            asked = kind.reshape(-1) == 1
            right = (logits.view(-1, CONFIG["vocab"])[asked].argmax(-1) == targets.reshape(-1)[asked]).sum()
            sums += [loss[w == 1].sum().item(), (w == 1).sum().item(), loss[asked].sum().item(), asked.sum().item(),
                     right.item()]
        if step % 20 == 0 or step == args.steps:
            seconds = time.time() - start
            row = [step, round(seconds), n, round(sums[0] / sums[1], 4), round(sums[2] / max(sums[3], 1), 4),
                   round(sums[4] / max(sums[3], 1), 4)]
            csv.writer(open(log_path, "a"), lineterminator="\n").writerow(row)
            print("step {} of {}, {} s, sequences of {}: text {}, digits {}, right {}".format(
                row[0], args.steps, *row[1:]), flush=True)
            sums[:] = 0
        if step % 100 == 0 or step == args.steps:
            torch.save(dict(model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers], step=step,
                            seconds=time.time() - start), checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
    return model, tok_path, log_path


# >>export

def export(model, tok_path, path):
    import gguf
    c, tok = CONFIG, json.load(open(tok_path))
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tieredkv demo")
    w.add_description("Trained by tools/train_demo.py on War and Peace and Shakespeare, public domain")
    w.add_license("MIT")
    w.add_context_length(c["context"])
    w.add_embedding_length(c["dim"])
    w.add_block_count(c["n_layers"])
    w.add_feed_forward_length(c["ffn"])
    w.add_head_count(c["n_heads"])
    w.add_head_count_kv(c["n_kv_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["eps"])
    w.add_vocab_size(c["vocab"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    tokens = sorted(tok["model"]["vocab"], key=tok["model"]["vocab"].get)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t == "<|endoftext|>" else gguf.TokenType.NORMAL for t in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]])
    w.add_eos_token_id(0)
    w.add_add_bos_token(False)
    for name, value in model.state_dict().items():
        data = value.detach().float().numpy()
        name = name if name.endswith(".weight") else name + ".weight"
        if data.ndim == 2:
            q = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            w.add_tensor(name, q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", default=os.path.join(HERE, "..", "..", "shared", "data", "text"),
                   help="folder with " + " and ".join(TEXTS))
    p.add_argument("--out", default=os.path.join(HERE, "..", "build", "demo"), help="checkpoint and log")
    p.add_argument("--model", default=os.path.join(HERE, "..", "examples", "data", "demo.gguf"))
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--batch", type=int, default=8192, help="tokens per step")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    model, tok_path, log_path = train(args)
    os.makedirs(os.path.dirname(args.model), exist_ok=True)
    export(model, tok_path, args.model)
    shutil.copyfile(log_path, os.path.splitext(args.model)[0] + "_training.csv")
    print(f"{args.model}: {os.path.getsize(args.model):,} bytes")


if __name__ == "__main__":
    main()
