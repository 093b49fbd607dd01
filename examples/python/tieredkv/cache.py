"""The cache: numpy arrays in and out. Each method checks shapes and types before a pointer goes to C."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator, Optional, Sequence, Tuple, Type, Union

import numpy as np
import numpy.typing as npt

from ._native import ffi, lib
from .checks import INT_END, as_int, one_of, refuse
from .config import Config, Value
from .errors import make_error
from .info import Attention, Budget, Layer, Loaded, Memory, Prefix, Quality, SequenceMemory

Array = npt.NDArray[Any]
Rows = Sequence[Tuple[int, int]]
Indices = Union[Sequence[int], Array]
_REASON = 600
_TYPES = {np.dtype(np.float32): lib.TKV_TYPE_F32, np.dtype(np.float16): lib.TKV_TYPE_F16}
_FLUSH = {"due": lib.TKV_FLUSH_DUE, "full": lib.TKV_FLUSH_FULL, "all": lib.TKV_FLUSH_ALL}
_REPORTS = {"json": lib.TKV_REPORT_JSON, "prometheus": lib.TKV_REPORT_PROMETHEUS}
TOKEN_STATES = ("hot", "warm", "archive", "gone", "discarded")


def _rows(name: str, x: Any, heads: int, dim: int, where: str) -> Array:
    """Returns x as a packed array [n][heads][dim] of float32 or float16."""
    if not isinstance(x, np.ndarray):
        raise refuse("%s is a %s, and must be an array of numpy" % (name, type(x).__name__))
    if x.dtype not in _TYPES:
        raise refuse("%s has dtype %s, and must have float32 or float16" % (name, x.dtype))
    if x.ndim != 3 or x.shape[1:] != (heads, dim):
        raise refuse("%s has shape %r, and %s takes (n, %d, %d)" % (name, x.shape, where, heads, dim))
    return np.ascontiguousarray(x)


def _ints(name: str, x: Optional[Indices], n: Optional[int]) -> Any:
    """Returns numbers as an array of C ints, or NULL."""
    if x is None:
        return ffi.NULL
    array = np.asarray(x)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise refuse("%s has shape %r and dtype %s, and must be a list of whole numbers" % (name, array.shape, array.dtype))
    if n is not None and len(array) != n:
        raise refuse("%s has %d entries, and must have %d" % (name, len(array), n))
    if array.size and (int(array.max()) >= INT_END or int(array.min()) < -INT_END):
        raise refuse("%s has a number that is not between -2^31 and 2^31 - 1" % name)
    return ffi.from_buffer("int[]", array.astype(np.int32))


def _floats(name: str, x: Any, n: int) -> Any:
    if x is None:
        return ffi.NULL
    array = np.ascontiguousarray(x, dtype=np.float32)
    if array.shape != (n,):
        raise refuse("%s has shape %r, and must have %d numbers" % (name, array.shape, n))
    return ffi.from_buffer("float[]", array)


def merge_attention(out: Array, lse: Array, out2: Array, lse2: Array) -> Tuple[Array, Array]:
    """Joins attention over two disjoint sets of keys (tkv_merge_attention). out is [rows][heads][dim], lse [rows][heads],
    all float32. Returns both for the union."""
    arrays = [np.ascontiguousarray(x) for x in (out, lse, out2, lse2)]
    if any(x.dtype != np.float32 for x in arrays):
        raise refuse("out and lse must have float32")
    if arrays[0].shape != arrays[2].shape or arrays[0].shape[:-1] != arrays[1].shape or arrays[1].shape != arrays[3].shape:
        raise refuse("shapes differ: out %r and %r, lse %r and %r" % tuple(arrays[i].shape for i in (0, 2, 1, 3)))
    joined, joined_lse = arrays[0].copy(), arrays[1].copy()
    lib.tkv_merge_attention(*(ffi.from_buffer("float[]", x) for x in (joined, joined_lse, arrays[2], arrays[3])),
                            arrays[1].size, joined.shape[-1])
    return joined, joined_lse


class Cache:
    """A cache of keys and values in three tiers.

        with Cache(Config(n_layers=4, n_heads=8, n_kv_heads=2, head_dim=64)) as cache:
            cache.append(layer, k, v)            # [n][2][64] each, keys after RoPE
            out = cache.attend(layer, q)         # q and out are [n][8][64]

    Keywords make a config, as `Config(**keywords)` does. threads: the number of threads that attention of one call runs on.
    Calls from several threads wait for each other, without the GIL. Copies and pickles have the saved bytes of all sequences.
    Every failure of the library raises a TieredKVError with a sentence.
    """

    def __init__(self, config: Optional[Config] = None, *, threads: int = 1, **keywords: Value) -> None:
        self._kv: Any = ffi.NULL
        self._lock = threading.RLock()
        self._shapes: dict[int, Tuple[int, int, int, int, bool]] = {}
        self._threads = max(1, as_int("threads", threads))
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        if config is not None and keywords:
            raise refuse("a cache takes a config or keywords, and both are given")
        self.config = config if config is not None else Config(**keywords)
        text, reason, out = self.config.text.encode(errors="replace"), ffi.new("char[]", _REASON), ffi.new("tkv_cache **")
        status = lib.tkv_create_ex(ffi.NULL, text, len(text), out, reason, _REASON)
        if status != lib.TKV_OK:
            raise make_error(status, ffi.string(reason).decode(errors="replace"))
        self._kv = out[0]

    def close(self) -> None:
        """Frees the cache. Later calls raise StateError."""
        with self._lock:
            kv, self._kv = self._kv, ffi.NULL
            if kv != ffi.NULL:
                lib.tkv_destroy(kv)
                if self._pool is not None:
                    self._pool.shutdown()

    def __reduce__(self) -> Tuple[Any, ...]:
        return _restore, (self.config, self._threads, self.save(None))

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_kv", ffi.NULL) != ffi.NULL:
            self.close()

    @property
    def handle(self) -> Any:
        """The tkv_cache * of cffi, for `tieredkv.lib`."""
        if self._kv == ffi.NULL:
            raise make_error(lib.TKV_ERR_STATE, "the cache is closed")
        return self._kv

    def _call(self, function: Any, *args: Any) -> None:
        with self._lock:
            kv = self.handle
            status = function(kv, *args)
            if status != lib.TKV_OK:
                raise make_error(status, ffi.string(lib.tkv_get_last_error(kv)).decode(errors="replace"))

    def _ask(self, function: Any, *args: Any) -> None:
        """As _call, of functions that set no sentence."""
        with self._lock:
            status = function(self.handle, *args)
        if status != lib.TKV_OK:
            raise make_error(status)

    def _bytes(self, call: Any, function: Any, *args: Any) -> bytes:
        """Returns what a function writes into a buffer, whose size it says first. call: _call or _ask."""
        needed = ffi.new("size_t *")
        with self._lock:
            call(function, *args, ffi.NULL, 0, needed)
            buffer = bytearray(needed[0])
            call(function, *args, ffi.from_buffer("char[]", buffer), len(buffer), needed)
        return bytes(buffer)

    def _shape(self, layer: int) -> Tuple[int, int, int, int, bool]:
        """Returns heads, KV heads, channels of K, channels of V, and whether V is in K."""
        number = as_int("layer", layer)
        if number not in self._shapes:
            info = self.layer(number)
            self._shapes[number] = (info.n_heads, info.n_kv_heads, info.head_dim, info.v_head_dim, info.v_in_k)
        return self._shapes[number]

    @staticmethod
    def _batch(seq: int, batch: Optional[Rows], n: int, first_rows: Optional[Indices]) -> Tuple[list[Tuple[int, int]], Any, Any]:
        """Returns the pairs of a batch, as tkv_rows too, and first_rows. Without a batch, n rows are of seq. The rows must be
        in arrays of n rows."""
        pairs = [(as_int("seq", s), as_int("n", count)) for s, count in ([(seq, n)] if batch is None else batch)]
        first = _ints("first_rows", first_rows, len(pairs))
        end = last = 0
        for i, (_, count) in enumerate(pairs):
            start = end if first == ffi.NULL else first[i]
            if count < 0 or start < 0:
                raise refuse("entry %d of the batch has %d rows from row %d on" % (i, count, start))
            end = start + count
            last = max(last, end)
        if last > n:
            raise refuse("the batch takes rows up to %d, and the array has %d" % (last, n))
        return pairs, ffi.new("tkv_rows[]", pairs or 1), first

    # Tokens.

    def append(self, layer: int, k: Array, v: Optional[Array] = None, *, seq: int = 0, batch: Optional[Rows] = None,
               first_rows: Optional[Indices] = None, positions: Optional[Indices] = None,
               token_positions: Optional[Indices] = None) -> None:
        """Appends tokens to a layer. k is [n][n_kv_heads][head_dim] after RoPE, v is [n][n_kv_heads][v_head_dim].
        batch: pairs of sequence and number of tokens, whose rows follow one another. positions: the position at which each
        sequence must go on. token_positions: one for each token of the batch."""
        _, heads, dim, v_dim, v_in_k = self._shape(layer)
        where = "layer %d" % layer
        k = _rows("k", k, heads, dim, where)
        if v is None and not v_in_k:
            raise refuse("v is missing")
        if v is not None:
            v = _rows("v", v, heads, v_dim, where)
            if len(v) != len(k):
                raise refuse("k has %d tokens, and v has %d" % (len(k), len(v)))
        entries, rows, first = self._batch(seq, batch, len(k), first_rows)
        keep = (_ints("positions", positions, len(entries)),
                _ints("token_positions", token_positions, sum(n for _, n in entries)))  # cffi keeps no pointer alive
        p = ffi.new("tkv_append_params *", {
            "layer": layer, "batch": rows, "n_batch": len(entries), "first_rows": first, "k": ffi.from_buffer(k),
            "k_type": _TYPES[k.dtype], "positions": keep[0], "token_positions": keep[1]})
        if v is not None:
            p.v, p.v_type = ffi.from_buffer(v), _TYPES[v.dtype]
        self._call(lib.tkv_append_ex, p)

    def attend(self, layer: int, q: Array, **options: Any) -> Array:
        """Attention of the newest queries [n][n_heads][head_dim], over all tiers. Returns [n][n_heads][v_head_dim] in the
        type of q. The options are those of attend_full."""
        return self.attend_full(layer, q, **options).out

    def attend_full(self, layer: int, q: Array, *, seq: int = 0, batch: Optional[Rows] = None,
                    first_rows: Optional[Indices] = None, first_queries: Optional[Indices] = None,
                    positions: Optional[Indices] = None, row_ends: Optional[Indices] = None, causal: bool = True,
                    mask: Optional[Array] = None, window: Optional[int] = None, scale: float = 0.0, softcap: float = 0.0,
                    alibi_slopes: Any = None, sink_logits: Any = None, lse: bool = False, scores: bool = False) -> Attention:
        """As attend, and returns log-sum-exps [n][n_heads] and scores [entry][key] too.

        batch           pairs of sequence and number of queries
        first_queries   index of the token of each entry's first query, where it is not of the last tokens
        positions       position of each query, which need not be a token of the sequence (query_positions)
        row_ends        number of tokens that each row sees
        mask            [n][length or more], or one such array for each head: float32 or float16 is added to the logits,
                        bool says which keys are seen
        window          newest keys that a query sees; -1: all
        """
        n_heads, _, dim, v_dim, _ = self._shape(layer)
        q = _rows("q", q, n_heads, dim, "layer %d" % layer)
        entries, rows, first = self._batch(seq, batch, len(q), first_rows)
        keep = (_ints("first_queries", first_queries, len(entries)), _ints("positions", positions, len(q)),
                _ints("row_ends", row_ends, len(q)), _floats("alibi_slopes", alibi_slopes, n_heads),
                _floats("sink_logits", sink_logits, n_heads))
        out = np.zeros((len(q), n_heads, v_dim), q.dtype)
        p = ffi.new("tkv_attend_params *", {
            "layer": layer, "batch": rows, "n_batch": len(entries), "first_rows": first, "first_queries": keep[0],
            "query_positions": keep[1], "row_ends": keep[2], "alibi_slopes": keep[3], "sink_logits": keep[4],
            "q": ffi.from_buffer(q), "q_type": _TYPES[q.dtype], "out": ffi.from_buffer(out), "out_type": _TYPES[q.dtype],
            "scale": scale, "softcap": softcap, "non_causal": not causal, "window": as_int("window", window or 0)})
        out_lse = np.full((len(q), n_heads), -np.inf, np.float32) if lse or scores else None
        if out_lse is not None:
            p.lse = ffi.from_buffer("float[]", out_lse)
        out_scores = None
        with self._lock:  # the length holds until the end of the call
            length = max([self.length(s, layer) for s, _ in entries] or [0])
            if scores:
                out_scores = np.zeros((len(entries), length), np.float32)
                p.scores, p.score_stride = ffi.from_buffer("float[]", out_scores) if length else ffi.NULL, length
            if mask is not None:
                mask = self._mask(mask, n_heads, len(q), length)
                p.mask, p.mask_type, p.mask_stride = ffi.from_buffer(mask), _TYPES[mask.dtype], mask.shape[-1]
                p.mask_head_stride = len(q) * mask.shape[-1] if mask.ndim == 3 else 0
            self._attend(p)
        return Attention(out, out_lse if lse else None, out_scores)

    @staticmethod
    def _mask(mask: Array, n_heads: int, n: int, length: int) -> Array:
        shape = mask.shape if isinstance(mask, np.ndarray) else ()
        if len(shape) not in (2, 3) or shape[:-1] not in ((n,), (n_heads, n)) or shape[-1] < length:
            raise refuse("mask has shape %r, and must have (%d, %d or more), after %d heads where they differ"
                         % (getattr(mask, "shape", None), n, length, n_heads))
        if mask.dtype == np.bool_:
            mask = np.where(mask, np.float32(0), np.float32(-np.inf))
        if mask.dtype not in _TYPES:
            raise refuse("mask has dtype %s, and must have float32, float16 or bool" % mask.dtype)
        return np.ascontiguousarray(mask)

    def _attend(self, p: Any) -> None:
        with self._lock:
            kv, size = self.handle, ffi.new("size_t *")
            if self._pool is None:
                status = lib.tkv_attend_ex(kv, p)
            else:
                status = lib.tkv_get_attend_bytes(kv, p, size)
            if self._pool is not None and status == lib.TKV_OK:
                work = ffi.new("char[]", size[0])
                parts = self._threads
                done = self._pool.map(lambda i: lib.tkv_attend_part(kv, p, i, parts, work, size[0]), range(parts))
                status = min(done)
            if status != lib.TKV_OK:
                reason = ffi.new("char[]", _REASON)
                lib.tkv_validate_attend(kv, p, reason, _REASON)
                raise make_error(status, ffi.string(reason).decode())

    def read(self, layer: int, start: int = 0, n: Optional[int] = None, *, seq: int = 0,
             indices: Optional[Indices] = None) -> Tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Decodes K and V of n tokens from `start` on (all of them without n), or of a list of indices."""
        _, heads, dim, v_dim, _ = self._shape(layer)
        if indices is not None:
            rows = _ints("indices", indices, None)
            n = len(np.asarray(indices))
        elif n is None:
            n = max(0, self.length(seq, layer) - as_int("start", start))
        if as_int("n", n) < 0:
            raise refuse("n is %d, and must be 0 or more" % n)
        k, v = np.zeros((n, heads, dim), np.float32), np.zeros((n, heads, v_dim), np.float32)
        ends = ffi.from_buffer("float[]", k), ffi.from_buffer("float[]", v)
        if indices is not None:
            self._ask(lib.tkv_read_tokens, as_int("seq", seq), layer, rows, n, *ends)
        else:
            self._ask(lib.tkv_read, as_int("seq", seq), layer, as_int("start", start), n, *ends)
        return k, v

    def length(self, seq: int = 0, layer: Optional[int] = None) -> int:
        """Length of a layer of a sequence; without a layer, that of the shortest."""
        number = lib.TKV_ALL_LAYERS if layer is None else as_int("layer", layer)
        with self._lock:
            return int(lib.tkv_get_length(self.handle, as_int("seq", seq), number))

    def positions(self, layer: int, start: int = 0, n: Optional[int] = None, *, seq: int = 0) -> npt.NDArray[np.int32]:
        """Positions of the tokens with indices from `start` on."""
        count = max(0, self.length(seq, layer) - as_int("start", start)) if n is None else as_int("n", n)
        out = np.zeros(max(count, 1), np.int32)
        self._ask(lib.tkv_get_positions, as_int("seq", seq), as_int("layer", layer), as_int("start", start), count,
                  ffi.from_buffer("int[]", out))
        return out[:count]

    def tiers(self, layer: int, start: int = 0, n: Optional[int] = None, *, seq: int = 0) -> list[str]:
        """Where tokens are: "hot", "warm", "archive", "gone" or "discarded"."""
        count = max(0, self.length(seq, layer) - as_int("start", start)) if n is None else as_int("n", n)
        out = ffi.new("uint8_t[]", max(count, 1))
        self._ask(lib.tkv_get_tiers, as_int("seq", seq), as_int("layer", layer), as_int("start", start), count, out)
        return [TOKEN_STATES[out[i]] for i in range(count)]

    # Sequences.

    def reset(self, seq: int = 0) -> None:
        """Empties a sequence."""
        self._call(lib.tkv_seq_reset, as_int("seq", seq))

    def truncate(self, seq: int, n_tokens: int) -> None:
        """Keeps the first n_tokens."""
        self._call(lib.tkv_seq_truncate, as_int("seq", seq), as_int("n_tokens", n_tokens))

    def fork(self, src: int, dst: int, n_tokens: Optional[int] = None) -> None:
        """Makes dst a copy of the first n_tokens of src, or of all. Both share the blocks."""
        n = lib.TKV_UNLIMITED if n_tokens is None else as_int("n_tokens", n_tokens)
        self._call(lib.tkv_seq_fork, as_int("src", src), as_int("dst", dst), n)

    def reorder(self, sources: Indices, first: int = 0) -> None:
        """Sequence first + i goes on from what sequence first + sources[i] had, all at once, as beams do."""
        rows = _ints("sources", sources, None)
        self._call(lib.tkv_seq_reorder, as_int("first", first), rows, len(np.asarray(sources)))

    def remove(self, seq: int, first: int, end: Optional[int] = None) -> None:
        """Removes the tokens with positions first to end - 1; without an end, all from `first` on."""
        self._call(lib.tkv_seq_remove, as_int("seq", seq), as_int("first", first), self._end(end))

    def shift(self, seq: int, first: int, end: Optional[int], delta: int) -> None:
        """Moves the tokens with positions first to end - 1 by delta. The config needs rope."""
        self._call(lib.tkv_seq_shift, as_int("seq", seq), as_int("first", first), self._end(end), as_int("delta", delta))

    def copy(self, src: int, first: int, end: Optional[int], dst: int, at: int) -> None:
        """Appends the tokens of src with positions first to end - 1 to dst, from position `at` on. Both share them."""
        self._call(lib.tkv_seq_copy, as_int("src", src), as_int("first", first), self._end(end), as_int("dst", dst),
                   as_int("at", at))

    def keep(self, seq: int, first: int, indices: Indices) -> None:
        """Of the tokens from index `first` on, keeps those in `indices`."""
        self._call(lib.tkv_seq_keep, as_int("seq", seq), as_int("first", first), _ints("indices", indices, None),
                   len(np.asarray(indices)))

    def slide(self, seq: int, n: int) -> int:
        """Makes room for n more tokens in a text without end. Returns the number of tokens that went."""
        removed = ffi.new("int *")
        self._call(lib.tkv_seq_slide, as_int("seq", seq), as_int("n", n), removed)
        return int(removed[0])

    def pin(self, seq: int, start: int, n: int) -> None:
        """Pins tokens, so that eviction keeps them."""
        self._call(lib.tkv_seq_pin, as_int("seq", seq), as_int("start", start), as_int("n", n), lib.TKV_UNLIMITED)

    def set_sinks(self, seq: int, start: int, n: int, on: bool = True) -> None:
        """Names tokens as attention sinks, which stay exact."""
        self._call(lib.tkv_seq_set_sinks, as_int("seq", seq), as_int("start", start), as_int("n", n), int(on))

    @staticmethod
    def _end(end: Optional[int]) -> int:
        return int(lib.TKV_UNLIMITED) if end is None else as_int("end", end)

    @contextmanager
    def step(self, seq: int = 0) -> Iterator[Cache]:
        """The appends of all layers within it are one unit. An exception aborts it, and no token of it stays."""
        self._call(lib.tkv_seq_begin, as_int("seq", seq))
        try:
            yield self
            self._call(lib.tkv_seq_commit, seq)
        except BaseException:
            with self._lock:
                lib.tkv_seq_abort(self.handle, seq)
            raise

    def reserve(self, seq: int, n: int) -> None:
        """Reserves memory for n more tokens."""
        self._call(lib.tkv_seq_reserve, as_int("seq", seq), as_int("n", n))

    def flush(self, seq: int = 0, mode: str = "due") -> None:
        """Demotes blocks now. mode: "due", "full" or "all"."""
        self._call(lib.tkv_seq_flush, as_int("seq", seq), one_of("mode", mode, _FLUSH))

    def maintain(self, max_work: int) -> int:
        """Does the work of later appends in an idle moment. Returns the number of blocks."""
        done = ffi.new("int *")
        self._call(lib.tkv_maintain, as_int("max_work", max_work), ffi.NULL, ffi.NULL, done)
        return int(done[0])

    # Save and load.

    def save(self, seq: Optional[int] = 0, *, model: bytes = b"", tokens: Optional[Indices] = None, length: int = 0,
             scores: bool = False) -> bytes:
        """Saves a sequence, or with None the whole cache. model: bytes that name the model. tokens: token numbers, which a
        load gives back. length: only the first tokens."""
        name = ffi.from_buffer(model)
        p = ffi.new("tkv_save_params *", {
            "seq": self._seq_or_all(seq), "model": name if model else ffi.NULL, "model_bytes": len(model),
            "length": as_int("length", length), "with_scores": int(scores)})
        if tokens is not None:
            numbers = _ints("tokens", tokens, None)
            p.tokens, p.n_tokens = numbers, len(np.asarray(tokens))
        return self._bytes(self._call, lib.tkv_seq_save, p)

    def load(self, data: bytes, seq: Optional[int] = 0, *, model: bytes = b"", max_tokens: int = 1 << 20) -> Loaded:
        """Loads a saved sequence into an empty one, or with None a whole cache into a new one. model must be that of the
        save. max_tokens: room for token numbers."""
        name, info = ffi.from_buffer(model), ffi.new("tkv_load_info *")
        numbers = np.zeros(max(1, as_int("max_tokens", max_tokens)), np.int32)
        p = ffi.new("tkv_load_params *", {
            "seq": self._seq_or_all(seq), "model": name if model else ffi.NULL, "model_bytes": len(model),
            "tokens": ffi.from_buffer("int[]", numbers), "token_capacity": len(numbers)})
        self._call(lib.tkv_seq_load, p, ffi.from_buffer(data), len(data), info)
        return Loaded(int(info.n_tokens), int(info.n_tables), int(info.n_recoded), numbers[:info.n_saved_tokens].copy())

    @staticmethod
    def _seq_or_all(seq: Optional[int]) -> int:
        return int(lib.TKV_ALL_SEQS) if seq is None else as_int("seq", seq)

    def _prefix(self, function: Any, tokens: Indices, seq: int, model: bytes, salt: bytes) -> Prefix:
        numbers, name, tenant = _ints("tokens", tokens, None), ffi.from_buffer(model), ffi.from_buffer(salt)
        p = ffi.new("tkv_prefix_params *", {
            "seq": as_int("seq", seq), "tokens": numbers, "n_tokens": len(np.asarray(tokens)),
            "model": name if model else ffi.NULL, "model_bytes": len(model), "salt": tenant if salt else ffi.NULL,
            "salt_bytes": len(salt)})
        info = ffi.new("tkv_prefix_info *")
        self._call(function, p, ffi.NULL, info)
        return Prefix(int(info.n_tokens), int(info.n_pages), int(info.n_put))

    def publish_prefix(self, tokens: Indices, seq: int = 0, *, model: bytes = b"", salt: bytes = b"") -> Prefix:
        """Lets other sequences of this cache find the pages of a prompt by its tokens."""
        return self._prefix(lib.tkv_seq_publish_prefix, tokens, seq, model, salt)

    def adopt_prefix(self, tokens: Indices, seq: int, *, model: bytes = b"", salt: bytes = b"") -> Prefix:
        """Takes the longest published prefix into an empty sequence. Append the tokens from n_tokens on."""
        return self._prefix(lib.tkv_seq_adopt_prefix, tokens, seq, model, salt)

    def save_calibration(self) -> bytes:
        """Saves the tables that the cache learned."""
        return self._bytes(self._ask, lib.tkv_save_calibration)

    def load_calibration(self, data: bytes) -> None:
        """Loads saved tables."""
        self._call(lib.tkv_load_calibration, ffi.from_buffer(data), len(data))

    def freeze_calibration(self) -> None:
        """Makes the missing tables now, and stops learning."""
        self._call(lib.tkv_freeze_calibration)

    # Reports.

    def layer(self, layer: int, seq: int = 0) -> Layer:
        """The shape of a layer, and the tokens of a sequence in each tier."""
        raw = ffi.new("tkv_layer_info *")
        with self._lock:
            status = lib.tkv_get_layer(self.handle, as_int("seq", seq), as_int("layer", layer), raw)
        if status != lib.TKV_OK:
            raise make_error(status, "there is no layer %d with a cache, or no sequence %d" % (layer, seq))
        hot, warm, archive = raw.tokens
        return Layer(raw.n_heads, raw.n_kv_heads, raw.head_dim, raw.v_head_dim, bool(raw.v_in_k), raw.length, hot, warm, archive,
                     raw.expired, raw.evicted, raw.offloaded, raw.discarded)

    def memory(self) -> Memory:
        """The memory of the cache, exact to the byte."""
        raw = ffi.new("tkv_memory_info *")
        self._ask(lib.tkv_get_memory, raw)
        return Memory._of(raw)

    def sequence_memory(self, seq: int) -> SequenceMemory:
        """Bytes of a sequence's blocks."""
        raw = ffi.new("tkv_seq_memory_info *")
        self._ask(lib.tkv_seq_get_memory, as_int("seq", seq), raw)
        return SequenceMemory(int(raw.own), int(raw.shared), int(raw.share))

    def budget(self) -> Budget:
        """The budget, and what was done to keep it."""
        raw = ffi.new("tkv_budget_info *")
        self._ask(lib.tkv_get_budget, raw)
        names = [name for name in Budget.__dataclass_fields__ if name != "pressure"]
        return Budget(pressure=float(raw.pressure.average), **{name: int(getattr(raw, name)) for name in names})

    def set_budget(self, n_bytes: int) -> None:
        """Sets another budget; 0: none."""
        self._call(lib.tkv_set_budget, as_int("n_bytes", n_bytes, 0, 1 << 63))

    def quality(self, layer: Optional[int] = None) -> Quality:
        """What the quality meter measured (meter.heads of the config)."""
        raw = ffi.new("tkv_quality_info *")
        self._ask(lib.tkv_get_quality, lib.TKV_ALL_LAYERS if layer is None else as_int("layer", layer), raw)
        return Quality(**{name: getattr(raw, name) for name in Quality.__dataclass_fields__})

    def report(self, kind: str = "json", labels: Optional[str] = None) -> str:
        """A report as text. kind: "json" or "prometheus"."""
        words = ffi.NULL if labels is None else ffi.new("char[]", labels.encode())
        text = self._bytes(self._ask, lib.tkv_print_report, one_of("kind", kind, _REPORTS), words)
        return text[:-1].decode()  # the last byte is zero

    def check(self) -> None:
        """Checks all invariants of the cache. Raises BrokenError."""
        reason = ffi.new("char[]", _REASON)
        with self._lock:
            status = lib.tkv_check(self.handle, reason, _REASON)
        if status != lib.TKV_OK:
            raise make_error(status, ffi.string(reason).decode(errors="replace"))


def _restore(config: Config, threads: int, data: bytes) -> Cache:
    """Makes the cache of a pickle."""
    cache = Cache(config, threads=threads)
    cache.load(data, None)
    return cache
