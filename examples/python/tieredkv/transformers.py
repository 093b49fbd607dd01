"""A cache for Hugging Face's transformers (5.24 or later): attention runs on the compressed blocks, on the CPU.

    from tieredkv.transformers import TieredCache   # registers the attention function "tieredkv"
    model.generate(**inputs, cache=TieredCache(model, preset="balanced"))

TieredCache.update only hands the new keys and values on, with a note of their layer. The attention function finds the note,
appends them and attends. With another attention function, update returns all keys and values decoded: that works, but is slow.
Tokens of left padding are not stored.
"""
from __future__ import annotations

import copy
import threading
import warnings
import weakref
from typing import Any, Mapping, Optional, Sequence, Tuple, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from ._native import ffi, lib
from .cache import Cache
from .config import Config, Value
from .errors import TieredKVError, make_error

NAME = "tieredkv"
_NOTE = "_tieredkv_layer"
_handed = threading.local()  # .layer: whose keys are on their way to attention_forward
_TYPES = {torch.float32: lib.TKV_TYPE_F32, torch.float16: lib.TKV_TYPE_F16, torch.bfloat16: lib.TKV_TYPE_BF16}


def _take_handed() -> Any:
    layer, _handed.layer = getattr(_handed, "layer", None), None
    return layer


def _unsupported(sentence: str) -> Exception:
    return make_error(lib.TKV_ERR_UNSUPPORTED, sentence)


def _pointer(x: torch.Tensor) -> Any:
    return ffi.cast("void *", x.data_ptr())


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Returns [batch][heads][n][dim] as [batch][n][heads][dim] without gaps. Most models have it so in memory."""
    if x.device.type != "cpu" or x.dtype not in _TYPES:
        raise _unsupported("keys, values and queries must be float32, float16 or bfloat16 on the CPU, not %s on %s"
                           % (x.dtype, x.device))
    return x.detach().transpose(1, 2).contiguous()


class _NoGradient(torch.autograd.Function):  # type: ignore[misc]
    """Passes its first tensor on. A backward pass through it is refused."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise _unsupported("attention over a TieredCache has no gradients")


def _shape(config: Any) -> dict[str, int]:
    """Returns heads and channels of a layer."""
    n_heads = config.num_attention_heads
    return {"n_heads": n_heads, "n_kv_heads": getattr(config, "num_key_value_heads", None) or n_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // n_heads}


def describe_model(config: Any) -> dict[str, Any]:
    """Returns the keywords of Config for a model of transformers: heads, channels, windows and RoPE."""
    config = config.get_text_config(decoder=True)
    types, options = get_layer_types_and_kwargs(config)
    others = set(types) - {"full_attention", "sliding_attention", "dummy"}
    if others:
        raise _unsupported("layers of type %s are not supported" % ", ".join(sorted(others)))
    shapes = [_shape(layer) for layer in config.per_layer_config]
    layers: dict[str, dict[str, Any]] = {}
    for i, (kind, shape) in enumerate(zip(types, shapes)):
        fields: dict[str, Any] = {name: number for name, number in shape.items() if number != shapes[0][name]}
        if kind == "dummy":  # it reads the keys and values of another layer, or has no attention
            fields = {"no_cache": True}
        if kind == "sliding_attention":
            fields["window"] = options[i]["sliding_window"]
        if fields:
            layers[str(i)] = fields
    out: dict[str, Any] = {"n_layers": len(types), **shapes[0], **({"layers": layers} if layers else {})}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "default" and "rope_theta" in rope:
        dim = int(shapes[0]["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2 * 2
        out["rope"] = {"dim": dim, "base": float(rope["rope_theta"])}
    return out


class TieredLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a TieredCache."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: TieredCache, index: int) -> None:
        self.owner = cast(TieredCache, weakref.proxy(owner))  # a cache is freed with its last name, without gc
        self.index, self.length, self.dtype = index, 0, torch.float32
        super().__init__()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.owner._begin(key_states.shape[0])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        owner, n, self.dtype = self.owner, key_states.shape[-2], key_states.dtype
        if _take_handed() is not None:
            raise _unsupported("the model did not call the attention function %r after its cache" % NAME)
        with owner.lock:
            if self.length == 0:
                self.lazy_initialization(key_states, value_states)
            owner._note_call(n)
            self._check(key_states.shape[0], self.length)
            self.length += n
            if owner.attends:
                notes = key_states.view_as(key_states), value_states.view_as(value_states)
                for note in notes:
                    setattr(note, _NOTE, self)
                _handed.layer = self
                return notes
            owner._check_decoding()
            k, v, before = _packed(key_states), _packed(value_states), self.length - n
            self._check_shapes(n, keys=k, values=v)
            for start in range(0, n, owner.max_append):
                self._append(k, v, start, min(n, start + owner.max_append), before)
            sides = self._decode()
        if torch.is_grad_enabled():
            sides = [_NoGradient.apply(side, key_states, value_states) for side in sides]
        return sides[0], sides[1]

    def _check(self, batch: int, before: int) -> None:
        """Refuses a batch that is not that of the cache, and goes on only where the last call ended."""
        if batch != len(self.owner.rows):
            raise make_error(lib.TKV_ERR_ARG, "the batch has %d rows, and the cache has %d" % (batch, len(self.owner.rows)))
        for row, (seq, pad) in enumerate(zip(self.owner.rows, self.owner.pads)):
            found, expected = self.owner.tiered.length(seq, self.index), max(0, before - pad)
            if found != expected:
                raise make_error(lib.TKV_ERR_STATE, "layer %d has %d tokens of row %d, and not %d: a call failed, or two threads "
                                 "use the cache; crop or reset it" % (self.index, found, row, expected))

    def _check_shapes(self, n: int, **tensors: torch.Tensor) -> None:
        """Refuses queries, keys and values, [batch][n][heads][dim], that are not of this layer."""
        n_heads, heads, dim, v_dim, _ = self.owner.tiered._shape(self.index)
        shapes = {"queries": (n, n_heads, dim), "keys": (n, heads, dim), "values": (n, heads, v_dim)}
        for name, x in tensors.items():
            if x.shape[1:] != shapes[name]:
                raise _unsupported("layer %d has %s of shape %r, and %r was expected from the config of the model" % (
                    self.index, name, tuple(x.shape), (x.shape[0], *shapes[name])))

    def _decode(self) -> list[torch.Tensor]:
        """Returns all keys and values, [batch][heads][length][dim]. Padding and expired tokens are zeros."""
        tiered = self.owner.tiered
        sides: list[list[torch.Tensor]] = [[], []]
        for seq in self.owner.rows:
            for side, rows in zip(tiered.read(self.index, tiered.layer(self.index, seq).expired, seq=seq), sides):
                x = torch.from_numpy(side).to(self.dtype).transpose(0, 1)
                rows.append(torch.nn.functional.pad(x, (0, 0, self.length - x.shape[1], 0)))
        return [torch.stack(rows) for rows in sides]

    @property
    def keys(self) -> Optional[torch.Tensor]:  # decoded, for code that looks into caches
        return self._decode()[0] if self.length else None

    @keys.setter
    def keys(self, value: Optional[torch.Tensor]) -> None:
        self._refuse_write(value)

    @property
    def values(self) -> Optional[torch.Tensor]:
        return self._decode()[1] if self.length else None

    @values.setter
    def values(self, value: Optional[torch.Tensor]) -> None:
        self._refuse_write(value)

    @staticmethod
    def _refuse_write(value: Optional[torch.Tensor]) -> None:
        if value is not None:
            raise _unsupported("keys and values of a TieredCache can be read, but not replaced")

    @property
    def batch_size(self) -> int:
        if not self.length:
            raise AttributeError("batch_size")
        return len(self.owner.rows)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        raise _unsupported("reset the cache, not one layer")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise _unsupported("reorder the cache, not one layer")

    def _batch(self, n: int, start: int, end: int, before: int) -> dict[str, Any]:
        """Returns the batch of the new tokens start to end - 1 of arrays [batch][n], padding left out. `before` tokens of
        transformers' precede the new ones. cffi keeps no pointer alive, so the result must live as long as the call."""
        firsts = [max(start, pad - before) for pad in self.owner.pads]
        entries = [(seq, row, first) for row, (seq, first) in enumerate(zip(self.owner.rows, firsts)) if first < end]
        return {"layer": self.index, "n_batch": len(entries),
                "batch": ffi.new("tkv_rows[]", [(seq, end - first) for seq, _, first in entries] or 1),
                "first_rows": ffi.new("int[]", [row * n + first for _, row, first in entries] or 1)}

    def _append(self, k: torch.Tensor, v: torch.Tensor, start: int, end: int, before: int) -> None:
        """Appends the new tokens start to end - 1 of [batch][n][heads][dim]."""
        batch = self._batch(k.shape[1], start, end, before)
        self.owner.tiered._call(lib.tkv_append_ex, ffi.new("tkv_append_params *", {
            **batch, "k": _pointer(k), "v": _pointer(v), "k_type": _TYPES[k.dtype], "v_type": _TYPES[v.dtype]}))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor], causal: bool,
               append: bool, **options: Any) -> torch.Tensor:
        """Appends the new keys and values, and returns attention of their queries, [batch][n][heads][dim]. append False: another
        layer of the model, with the same keys, has appended them, and the queries are of its last tokens."""
        q, k, v = _packed(query), _packed(key), _packed(value)
        n, before, step = q.shape[1], self.length - q.shape[1], self.owner.max_append
        if not append and n > step:
            raise make_error(lib.TKV_ERR_CAPACITY, "layers share keys, so a call takes at most max_append tokens, %d, and not %d: "
                             "set max_append, or prefill_chunk_size of generate" % (step, n))
        with self.owner.lock:
            self._check(q.shape[0], before if append else self.length)
            self._check_shapes(n, queries=q, **({"keys": k, "values": v} if append else {}))
            bias = None if mask is None else self._read_mask(mask, before, n)
            if bias is not None and bias.shape[1] > 1:  # it says which later tokens a query sees, too
                later = torch.ones(n, n, dtype=torch.bool).triu(1)
                causal = causal and not bool((bias[:, :, before:].gt(-1e30) & later).any())
            table = None if bias is None else self._shift_columns(bias, n)
            out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
            for start in range(0, n, step):
                if append:
                    self._append(k, v, start, min(n, start + step), before)
                if causal:
                    self._attend(q, out, table, start, min(n, start + step), before, causal, options)
            if not causal:
                self._attend(q, out, table, 0, n, before, causal, options)
        return out

    def _shift_columns(self, bias: torch.Tensor, n: int) -> torch.Tensor:
        """Returns a mask [batch][n][length], whose columns of each row begin behind its padding."""
        table = torch.full((len(self.owner.rows), n, self.length), -torch.inf)
        for row, pad in enumerate(self.owner.pads):
            table[row, :, :self.length - pad] = bias[min(row, len(bias) - 1), :, pad:]
        return table

    def _attend(self, q: torch.Tensor, out: torch.Tensor, table: Optional[torch.Tensor], start: int, end: int, before: int,
                causal: bool, options: dict[str, Any]) -> None:
        batch = self._batch(q.shape[1], start, end, before)
        p = ffi.new("tkv_attend_params *", {
            **batch, "q": _pointer(q), "q_type": _TYPES[q.dtype], "out": _pointer(out), "out_type": _TYPES[out.dtype],
            "non_causal": not causal, **options})
        if table is not None:
            p.mask, p.mask_stride = _pointer(table), self.length
        self.owner.tiered._attend(p)

    def _read_mask(self, mask: torch.Tensor, before: int, n: int) -> Optional[torch.Tensor]:
        """Returns a mask as numbers for the logits, [batch or 1][n or 1][length], and notes new padding. None: nothing but
        padding is hidden."""
        if (mask.ndim != 4 or mask.shape[0] not in (1, len(self.owner.rows)) or mask.shape[1] != 1
                or mask.shape[2] not in (1, n) or mask.shape[3] < self.length):
            raise _unsupported("a mask of shape %r is not supported: it must be [batch][1][%d][%d or more]"
                               % (tuple(mask.shape), n, self.length))
        mask = mask[:, 0, :, :self.length]
        if mask.dtype == torch.bool and mask.shape[1] == 1:  # make_mask: which tokens are seen by all later ones
            seen = mask[:, 0].expand(len(self.owner.rows), -1)
            hidden = [int(x) for x in (seen.cumsum(1) == 0).sum(1)]
            for row, seq in enumerate(self.owner.rows):
                if self.owner.tiered.length(seq, self.index) == 0:
                    self.owner.pads[row] = min(hidden[row], self.length)
            if all(int(x.sum()) == self.length - pad for x, pad in zip(seen, self.owner.pads)):
                return None
        if mask.dtype == torch.bool:
            return torch.where(mask, 0.0, -torch.inf)
        return torch.where(mask <= torch.finfo(mask.dtype).min, -torch.inf, mask.float())


class TieredCache(HFCache):  # type: ignore[misc]
    """The cache of a model, for `cache` of generate. Each row of a batch is a sequence of one tieredkv.Cache, `tiered`.

    A reply that crop removes has made the prompt coarser, as its tokens grew older. So when the first single token follows a
    prompt, each row is forked (a mark). A crop to the end of that prompt, or before it, goes on from the marks, and the prompt
    has lost nothing. A mark shares the blocks of its row. It keeps the newest tokens of the prompt as they were: the bytes of the
    hot tail, and of what the reply makes coarser. With a budget a mark goes before anything is compressed more for it.

    model       the model, which gets the attention function "tieredkv"; or its config
    max_seqs    most rows of a batch, beams included; 0: those of the first batch, 16 at least. `tiered` has as many more, for marks
    threads     threads of one call of attention
    keywords    the plan, as in tieredkv.Config: preset="compact", hot_tokens=256, budget={"bytes": "512M"}
    """

    def __init__(self, model: Any, *, max_seqs: int = 0, threads: int = 1, **keywords: Value) -> None:
        self.model_config = getattr(model, "config", model).get_text_config(decoder=True)
        described, layers = describe_model(self.model_config), keywords.get("layers")
        self.keywords: dict[str, Any] = {**described, **keywords}
        if isinstance(layers, Mapping):
            own = described.get("layers", {})
            self.keywords["layers"] = {**own, **{name: {**own.get(name, {}), **fields} for name, fields in layers.items()}}
        self.max_append = Config(**self.keywords).max_append  # raises now, and not in the first forward pass
        self.max_seqs, self.threads, self.lock = max_seqs, threads, threading.RLock()
        self.rows: list[int] = []  # the sequence of each row of the batch
        self.pads: list[int] = []  # tokens of left padding of each row, which are not stored
        self.marks: list[int] = []  # the sequence that is the mark of each row; rows of one prompt share one. Empty: no marks
        self.marked_length = 0  # tokens of a row in its mark, padding included
        self._in_prompt = False  # the last call had several tokens
        self._tiered: Optional[Cache] = None
        self._warned = False
        super().__init__(layers=[TieredLayer(self, i) for i in range(described["n_layers"])])
        if isinstance(model, torch.nn.Module):
            model.set_attn_implementation(NAME)

    @property
    def tiered(self) -> Cache:
        """The tieredkv.Cache, for reports. It exists after the first tokens."""
        if self._tiered is None:
            raise make_error(lib.TKV_ERR_STATE, "the cache has no tokens yet")
        return self._tiered

    @property
    def attends(self) -> bool:
        """Whether the model uses the attention function of this module."""
        return bool(self.model_config._attn_implementation == NAME)

    def _check_decoding(self) -> None:
        """Warns once of the cost of another attention function, and refuses it where padding is not stored."""
        if any(self.pads):
            raise _unsupported("the cache has no padding, so only the attention function %r can go on" % NAME)
        if not self._warned:
            self._warned = True
            warnings.warn("attention is %r, so each step decodes all keys and values; model.set_attn_implementation(%r) avoids it"
                          % (self.model_config._attn_implementation, NAME), stacklevel=2)

    def _begin(self, batch: int) -> None:
        """Gives each row a sequence, before the first token."""
        if any(layer.length for layer in self.layers):
            return
        if self._tiered is None:
            self.max_seqs = self.max_seqs or max(16, batch)
            self._tiered = Cache(threads=self.threads, **{**self.keywords, "max_seqs": 2 * self.max_seqs})
        self._check_room(batch)
        self.reset()
        self.rows, self.pads = list(range(batch)), [0] * batch

    def _check_room(self, batch: int) -> None:
        if batch > self.max_seqs:
            raise make_error(lib.TKV_ERR_CAPACITY, "the batch has %d rows, and max_seqs is %d" % (batch, self.max_seqs))

    def reset(self) -> None:
        """Empties the cache. The next batch may have another size. Learned tables stay."""
        with self.lock:
            for seq in range(2 * self.max_seqs if self._tiered is not None else 0):
                self.tiered.reset(seq)
            for layer in self.layers:
                layer.length = 0
            self.rows, self.pads, self.marks, self._in_prompt = [], [], [], False

    def _note_call(self, n: int) -> None:
        """Called by each layer before it takes n tokens. The first layer of a call of one token marks the prompt before it."""
        if n > 1:
            self._in_prompt = True
        elif self._in_prompt:
            self._in_prompt = False
            self._mark()
        if self.marks and self._is_short_of_memory():
            self._unmark()

    def _is_short_of_memory(self) -> bool:
        """Whether the budget will soon compress more: at 0.8 of it, if the plan has no thresholds of its own."""
        if "budget" not in self.keywords:
            return False
        budget = self.tiered.budget()
        return budget.used > 0.75 * budget.budget

    def _unmark(self) -> None:
        for seq in set(self.marks):
            self.tiered.reset(seq)
        self.marks = []

    def _mark(self) -> None:
        """Forks each row. Without memory for that, or after a call that failed, there are no marks."""
        self._unmark()
        self.marked_length = self.get_seq_length()
        is_whole = all(layer.length in (0, self.marked_length) for layer in self.layers) and all(
            self.tiered.length(seq) == max(0, self.marked_length - pad) for seq, pad in zip(self.rows, self.pads))
        if not is_whole or self._is_short_of_memory():
            return
        try:
            for row, seq in enumerate(self.rows):
                self.tiered.fork(seq, self.max_seqs + row)
                self.marks.append(self.max_seqs + row)
        except TieredKVError:
            self._unmark()

    def _crop_to_marks(self, length: int) -> bool:
        """Goes on from the marks, cut to a length. False: there are none, or they are shorter, or there is no memory for it."""
        if not self.marks or length > self.marked_length:
            return False
        self.marked_length = length
        try:
            for row, seq in enumerate(self.rows):
                self.tiered.truncate(self.marks[row], max(0, length - self.pads[row]))
                self.tiered.fork(self.marks[row], seq)
        except TieredKVError:
            self._unmark()
            return False
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest -tokens_to_remove tokens of each row. The end of a prompt is as it was before its reply."""
        if tokens_to_remove > 0:
            raise make_error(lib.TKV_ERR_ARG, "tokens_to_remove is %d, and must be 0 or less" % tokens_to_remove)
        with self.lock:
            length = max(0, self.get_seq_length() + tokens_to_remove)
            is_whole = tokens_to_remove < 0 and self._crop_to_marks(length)
            for row, seq in enumerate(self.rows):
                if not is_whole:
                    self.tiered.truncate(seq, max(0, length - self.pads[row]))
                self.pads[row] = min(self.pads[row], length)
            for layer in self.layers:
                layer.length = min(layer.length, length)

    def _select(self, chosen: Sequence[int]) -> None:
        """Makes the chosen rows the batch. A row that is chosen again is forked: it shares its blocks."""
        with self.lock:
            if not self.rows or list(chosen) == list(range(len(self.rows))):
                return
            self._check_room(len(chosen))
            if not all(0 <= row < len(self.rows) for row in chosen):
                raise make_error(lib.TKV_ERR_ARG, "rows %r are chosen, and the cache has %d" % (list(chosen), len(self.rows)))
            for row in set(range(len(self.rows))) - set(chosen):
                self.tiered.reset(self.rows[row])
            taken = {self.rows[row] for row in chosen}
            if self.marks:
                for seq in set(self.marks) - {self.marks[row] for row in chosen}:
                    self.tiered.reset(seq)
                self.marks = [self.marks[row] for row in chosen]
            free = [seq for seq in range(self.max_seqs) if seq not in taken]
            rows: list[int] = []
            for row in chosen:
                seq = self.rows[row]
                if seq in rows:
                    seq = free.pop(0)
                    self.tiered.fork(self.rows[row], seq)
                rows.append(seq)
            self.rows, self.pads = rows, [self.pads[row] for row in chosen]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Takes the rows of a beam search."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows."""
        self._select(torch.arange(len(self.rows))[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def __deepcopy__(self, memo: Any) -> TieredCache:
        """A copy in other memory, as chats make it of a prompt. It is of the same model."""
        with self.lock:
            other = TieredCache(self.model_config, max_seqs=self.max_seqs, threads=self.threads, **self.keywords)
            other._tiered, other.rows, other.pads = copy.copy(self._tiered), list(self.rows), list(self.pads)
            other.marks, other.marked_length, other._in_prompt = list(self.marks), self.marked_length, self._in_prompt
            for mine, its in zip(self.layers, other.layers):
                its.length, its.dtype = mine.length, mine.dtype
        return other

    def __reduce__(self) -> Any:
        raise _unsupported("a TieredCache belongs to a model, so only copy.deepcopy copies it; cache.tiered can be pickled")

    def __repr__(self) -> str:
        return "TieredCache(%d layers, %d rows, %d tokens)" % (len(self.layers), len(self.rows), self.get_seq_length())


def make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
              attention_mask: Optional[torch.Tensor] = None, allow_is_causal_skip: bool = True, config: Any = None,
              **options: Any) -> Optional[torch.Tensor]:
    """The mask for attention_forward. A causal mask is None. With padding it is bool [batch][1][1][kv_length]: the tokens that
    all later ones see. Any other mask is that of eager attention, [batch][1][q_length][kv_length]."""
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    ends = bool(q_offset + q_length == kv_offset + kv_length)  # not in a StaticCache, which has room behind the queries
    if allow_is_causal_skip and ends and not chunked:
        if attention_mask is None or bool(attention_mask.all()):
            return None
        more = max(0, kv_offset + kv_length - attention_mask.shape[-1])
        seen = torch.nn.functional.pad(attention_mask.bool(), (0, more))[:, kv_offset:kv_offset + kv_length]
        return seen[:, None, None, :]
    mask: Optional[torch.Tensor] = eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
                                              config=config, **options)
    return mask


def _attend_without_cache(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                          mask: Optional[torch.Tensor], causal: bool, window: int, **options: Any) -> torch.Tensor:
    """Attention over keys that are not in a TieredCache, by sdpa."""
    n, length = query.shape[2], key.shape[2]
    if mask is None or (mask.dtype == torch.bool and mask.shape[-2] == 1):
        rows, columns = torch.arange(length - n, length)[:, None], torch.arange(length)[None, :]
        sees = (columns <= rows) if causal else torch.ones(n, length, dtype=torch.bool)
        if window:
            sees = sees & (columns > rows - window)
        mask = sees[None, None] if mask is None else mask & sees[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **options)[0]


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: Optional[torch.Tensor], dropout: float = 0.0, scaling: Optional[float] = None,
                      is_causal: Optional[bool] = None, softcap: Optional[float] = None, sliding_window: Optional[int] = None,
                      s_aux: Optional[torch.Tensor] = None, position_bias: Optional[torch.Tensor] = None,
                      **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """The attention function of transformers: appends and attends in the TieredCache that key came from."""
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    layer, handed = getattr(key, _NOTE, None), _take_handed()
    if getattr(value, _NOTE, None) is not layer or (handed is not None and handed is not layer):
        raise _unsupported("the model changes keys or values between its cache and its attention")
    if kwargs.get("output_attentions"):
        raise _unsupported("%r has no attention weights to put out: use the attention function 'eager'" % NAME)
    if layer is None:
        if softcap is not None or s_aux is not None:
            raise _unsupported("softcap and learned sinks need a TieredCache")
        return _attend_without_cache(module, query, key, value, attention_mask, causal, sliding_window or 0, dropout=dropout,
                                     scaling=scaling, position_bias=position_bias), None
    if position_bias is not None or dropout:
        raise _unsupported("a position_bias and dropout are not supported by a TieredCache")
    options: dict[str, Any] = {"scale": scaling or 0.0, "softcap": softcap or 0.0, "window": sliding_window or 0}
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    if sinks is not None:
        options["sink_logits"] = ffi.cast("float *", sinks.data_ptr())
    out = layer.attend(query, key, value, attention_mask, causal, handed is not None, **options)
    return _NoGradient.apply(out, query, key, value) if torch.is_grad_enabled() else out, None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
