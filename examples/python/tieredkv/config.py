"""The config of a cache: from keywords or from a text, which the library reads itself."""
from __future__ import annotations

import json
from typing import Any, Mapping, Sequence, Tuple, Union

from ._native import ffi, lib
from .checks import as_int, one_of
from .errors import make_error
from .info import Memory

Value = Union[int, float, bool, str, None, Mapping[str, Any], Sequence[Any]]
STYLES = {"lines": lib.TKV_TEXT_LINES, "json": lib.TKV_TEXT_JSON, "toml": lib.TKV_TEXT_TOML,
          "nested": lib.TKV_TEXT_JSON_NESTED}
# Fields that Config takes by their own name, and their groups.
_MODEL = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "v_in_k", "window", "window_sinks", "scale", "rope")
_LIMITS = ("max_seqs", "max_tokens", "max_append")
_TIERS = ("hot_tokens", "warm_tokens", "hot", "warm", "archive")
_DIRECT = {name: group for group, names in (("model", _MODEL), ("limits", _LIMITS), ("tiers", _TIERS)) for name in names}
_REASON = 600
_MAX_LAYERS, _MAX_FREQUENCIES = 4096, 1 << 18


class Config:
    """A config. It is checked when it is made, and does not change.

    Keywords are the groups of tkv_config with mappings of their fields: `tiers={"hot_tokens": 128}`,
    `budget={"bytes": "512M"}`, `layers={"0-5": {"window": 1024}}`. Fields of the model, max_seqs, max_tokens, max_append,
    hot_tokens, warm_tokens, hot, warm and archive can be given directly. `preset` names a plan. Values are those of a config
    text: numbers, True, "off", "unlimited", "a30/r20", "512M".
    Raises ConfigError with a sentence that names the field or the line.
    """

    def __init__(self, **keywords: Value) -> None:
        tree: dict[str, Any] = {}
        for name, value in keywords.items():
            group = tree.setdefault(_DIRECT[name], {}) if name in _DIRECT else None
            if group is not None and not isinstance(group, dict):
                raise make_error(lib.TKV_ERR_CONFIG, "%s is %r, and must be a mapping of fields" % (_DIRECT[name], group))
            if group is not None:
                group[name] = value
            elif isinstance(value, Mapping) and isinstance(tree.get(name), dict):
                tree[name].update(value)
            else:
                tree[name] = dict(value) if isinstance(value, Mapping) else value
        try:
            text = json.dumps(tree, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise make_error(lib.TKV_ERR_CONFIG, "a value has no text: %s" % error) from None
        self._set(text)

    @classmethod
    def from_text(cls, text: str) -> Config:
        """Reads lines `key = value`, TOML or JSON (see the manual of the header, chapter 6)."""
        self = cls.__new__(cls)
        self._set(text)
        return self

    def _set(self, text: str) -> None:
        self.text = text
        cfg, _ = self._parse()
        reason = ffi.new("char[]", _REASON)
        status = lib.tkv_validate_config(cfg, reason, _REASON)
        if status != lib.TKV_OK:
            raise make_error(status, ffi.string(reason).decode(errors="replace"))
        self.max_append = int(cfg.limits.max_append) or 512  # the most tokens of one append

    def _parse(self) -> Tuple[Any, Any]:
        """Returns a tkv_config, and the arrays that it points to."""
        arrays = [ffi.new("tkv_layer_config[]", _MAX_LAYERS), ffi.new("tkv_level[]", lib.TKV_MAX_LEVELS),
                  ffi.new("float[]", _MAX_FREQUENCIES)]
        room = ffi.new("tkv_config_arrays *", {
            "layers": arrays[0], "n_layers": _MAX_LAYERS, "ladder": arrays[1], "n_levels": lib.TKV_MAX_LEVELS,
            "frequencies": arrays[2], "n_frequencies": _MAX_FREQUENCIES})
        cfg, raw, reason = ffi.new("tkv_config *"), self.text.encode(errors="replace"), ffi.new("char[]", _REASON)
        status = lib.tkv_parse_config(cfg, room, raw, len(raw), reason, _REASON)
        if status != lib.TKV_OK:
            raise make_error(status, ffi.string(reason).decode(errors="replace"))
        return cfg, arrays

    def to_text(self, style: str = "lines") -> str:
        """Writes the fields that are not default. style: "lines", "json", "toml" or "nested"."""
        number, needed, text = one_of("style", style, STYLES), ffi.new("size_t *"), ffi.NULL
        cfg, _arrays = self._parse()
        for _ in range(2):
            status = lib.tkv_print_config(cfg, number, text, needed[0], needed)
            if status != lib.TKV_OK:
                raise make_error(status)
            text = text or ffi.new("char[]", needed[0])
        return str(ffi.string(text).decode())

    def estimate_memory(self, n_tokens: int, n_seqs: int = 1) -> Memory:
        """Forecasts the memory of n_seqs sequences of n_tokens each."""
        out = ffi.new("tkv_memory_info *")
        cfg, _arrays = self._parse()
        status = lib.tkv_estimate_memory(cfg, as_int("n_tokens", n_tokens), as_int("n_seqs", n_seqs), out)
        if status != lib.TKV_OK:
            raise make_error(status)
        return Memory._of(out)

    def estimate_context(self, n_seqs: int = 1) -> int:
        """Forecasts the tokens that each of n_seqs sequences can have within budget.bytes."""
        out = ffi.new("int *")
        cfg, _arrays = self._parse()
        status = lib.tkv_estimate_context(cfg, as_int("n_seqs", n_seqs), out)
        if status != lib.TKV_OK:
            raise make_error(status)
        return int(out[0])

    def __repr__(self) -> str:
        return "Config.from_text(%r)" % self.text
