"""Small models of several architectures with random weights, as GGUF v3 files, for tests on an outside engine. A token is
a byte of the text."""
import random
import struct

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def byte_tokens():
    """The names that GPT-2's tokenizer has for the 256 bytes, and one merge of two of them, which files must have."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [b for b in range(256) if b not in plain]
    names = {b: chr(b) for b in plain}
    names.update({b: chr(256 + i) for i, b in enumerate(others)})
    return [names[b] for b in range(256)] + ["~~"]


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(x):
    if isinstance(x, bool):
        return struct.pack("<I?", BOOL, x)
    if isinstance(x, int):
        return struct.pack("<II", UINT32, x)
    if isinstance(x, float):
        return struct.pack("<If", FLOAT32, x)
    if isinstance(x, str):
        return struct.pack("<I", STRING) + string(x)
    if isinstance(x[0], int):
        return struct.pack("<IIQ%di" % len(x), ARRAY, INT32, len(x), *x)
    return struct.pack("<IIQ", ARRAY, STRING, len(x)) + b"".join(string(s) for s in x)


def write(path, arch, numbers, tensors, more={}):
    """numbers: metadata without the name of the architecture. tensors: (name, shape, scale), the fastest dimension first.
    more: metadata with whole names. Weights are normal with deviation scale / sqrt(shape[0]); scale 0: ones."""
    rng = random.Random(1)
    keys = {"general.architecture": arch, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": byte_tokens(), "tokenizer.ggml.merges": ["~ ~"], "tokenizer.ggml.add_bos_token": False}
    keys.update({"%s.%s" % (arch, name): x for name, x in numbers.items()})
    keys.update(more)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(string(k) + value(x) for k, x in keys.items())
    data = b""
    for name, shape, scale in tensors:
        count = 1
        for n in shape:
            count *= n
        head += string(name) + struct.pack("<I%dQIQ" % len(shape), len(shape), *shape, 0, len(data))
        deviation = scale / shape[0] ** 0.5
        data += struct.pack("<%df" % count, *[rng.gauss(0, deviation) if scale else 1.0 for _ in range(count)])
        data += bytes(-len(data) % 32)
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + data)


LAYERS, EMBED, FFN, WORDS = 4, 64, 96, 257


def common(heads, kv_heads, dim):
    return {"block_count": LAYERS, "context_length": 2048, "embedding_length": EMBED, "feed_forward_length": FFN,
            "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim,
            "attention.value_length": dim, "rope.dimension_count": dim, "attention.layer_norm_rms_epsilon": 1e-5}


def tensors(heads, kv_heads, dim, more):
    """Those of most architectures, with queries that make attention sharp; more: (name, shape, scale) of each layer."""
    rows = [("token_embd.weight", (EMBED, WORDS), 1), ("output_norm.weight", (EMBED,), 0)]
    for i in range(LAYERS):
        layer = [("attn_norm.weight", (EMBED,), 0), ("attn_q.weight", (EMBED, heads * dim), 2),
                 ("attn_k.weight", (EMBED, kv_heads * dim), 2), ("attn_v.weight", (EMBED, kv_heads * dim), 1),
                 ("attn_output.weight", (heads * dim, EMBED), 1)] + more
        rows += [("blk.%d.%s" % (i, name), shape, scale) for name, shape, scale in layer]
    return rows


DENSE = [("ffn_norm.weight", (EMBED,), 0), ("ffn_gate.weight", (EMBED, FFN), 1), ("ffn_up.weight", (EMBED, FFN), 1),
         ("ffn_down.weight", (FFN, EMBED), 1)]


def llama(path, template, controls=()):
    """A plain Llama with a chat template, and control tokens in its vocabulary."""
    rows = [(name, (EMBED, WORDS + len(controls)) if name == "token_embd.weight" else shape, scale)
            for name, shape, scale in tensors(4, 2, 32, DENSE)]
    write(path, "llama", common(4, 2, 32), rows,
          {"tokenizer.ggml.tokens": byte_tokens() + list(controls),
           "tokenizer.ggml.token_type": [1] * WORDS + [3] * len(controls), "tokenizer.chat_template": template})


def qwen3(path):
    """Heads of 128 channels, with norms."""
    norms = [("attn_q_norm.weight", (128,), 0), ("attn_k_norm.weight", (128,), 0)]
    write(path, "qwen3", common(4, 2, 128), tensors(4, 2, 128, DENSE + norms))


def gemma2(path):
    """A soft cap, and a sliding window in each second layer."""
    numbers = dict(common(4, 1, 64), **{"attention.sliding_window": 100, "attn_logit_softcapping": 2.0,
                                         "final_logit_softcapping": 30.0})
    norms = [("post_attention_norm.weight", (EMBED,), 0), ("post_ffw_norm.weight", (EMBED,), 0)]
    write(path, "gemma2", numbers, tensors(4, 1, 64, DENSE + norms))


def gpt_oss(path):
    """Learned sinks, experts, and a sliding window in each second layer."""
    experts, dim = 4, 64
    numbers = dict(common(4, 2, dim), **{"attention.sliding_window": 128, "expert_count": experts, "expert_used_count": 2,
                                         "expert_feed_forward_length": FFN})
    more = [("post_attention_norm.weight", (EMBED,), 0), ("attn_sinks.weight", (4,), 4), ("attn_output.bias", (EMBED,), 1),
            ("ffn_gate_inp.weight", (EMBED, experts), 1), ("ffn_gate_inp.bias", (experts,), 1)]
    for name, shape in (("gate", (EMBED, FFN)), ("up", (EMBED, FFN)), ("down", (FFN, EMBED))):
        more += [("ffn_%s_exps.weight" % name, shape + (experts,), 1), ("ffn_%s_exps.bias" % name, (shape[1], experts), 1)]
    write(path, "gpt-oss", numbers, tensors(4, 2, dim, more) + [("output.weight", (EMBED, WORDS), 1)])


def mpt(path):
    """ALiBi."""
    numbers = dict(common(4, 4, 16), **{"attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 8.0})
    rows = [("token_embd.weight", (EMBED, WORDS), 1), ("output_norm.weight", (EMBED,), 0)]
    for i in range(LAYERS):
        layer = [("attn_norm.weight", (EMBED,), 0), ("attn_qkv.weight", (EMBED, 3 * EMBED), 1), ("attn_output.weight", (EMBED, EMBED), 1),
                 ("ffn_norm.weight", (EMBED,), 0), ("ffn_up.weight", (EMBED, FFN), 1), ("ffn_down.weight", (FFN, EMBED), 1)]
        rows += [("blk.%d.%s" % (i, name), shape, scale) for name, shape, scale in layer]
    write(path, "mpt", numbers, rows)


def deepseek2(path):
    """MLA: attention to latents, which a product decodes behind it."""
    heads, latent, rotated, dim = 4, 32, 16, 32
    numbers = dict(common(heads, 1, latent + rotated), **{
        "attention.value_length": latent, "attention.key_length_mla": rotated + dim, "attention.value_length_mla": dim,
        "attention.kv_lora_rank": latent, "attention.q_lora_rank": 24, "rope.dimension_count": rotated,
        "leading_dense_block_count": LAYERS, "expert_feed_forward_length": FFN, "expert_shared_count": 1, "expert_count": 2,
        "expert_used_count": 1})
    rows = [("token_embd.weight", (EMBED, WORDS), 1), ("output_norm.weight", (EMBED,), 0)]
    for i in range(LAYERS):
        layer = [("attn_norm.weight", (EMBED,), 0), ("attn_q_a.weight", (EMBED, 24), 1), ("attn_q_a_norm.weight", (24,), 0),
                 ("attn_q_b.weight", (24, heads * (rotated + dim)), 1), ("attn_kv_a_mqa.weight", (EMBED, latent + rotated), 1),
                 ("attn_kv_a_norm.weight", (latent,), 0), ("attn_k_b.weight", (dim, latent, heads), 1),
                 ("attn_v_b.weight", (latent, dim, heads), 1), ("attn_output.weight", (heads * dim, EMBED), 1)] + DENSE
        rows += [("blk.%d.%s" % (i, name), shape, scale) for name, shape, scale in layer]
    write(path, "deepseek2", numbers, rows)
