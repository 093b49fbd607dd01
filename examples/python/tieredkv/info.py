"""What a cache reports about itself."""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

TIERS = ("hot", "warm", "archive")


@dataclass(frozen=True)
class TierBytes:
    """tokens: summed over layers; codes and metadata: bytes."""

    tokens: int
    codes: int
    metadata: int

    @classmethod
    def _of(cls, raw: Any) -> TierBytes:
        return cls(int(raw.tokens), int(raw.codes), int(raw.metadata))


@dataclass(frozen=True)
class Memory:
    """The memory of a cache in bytes (tkv_memory_info). `ratio` compares it with FP16."""

    total: int
    hot: TierBytes
    warm: TierBytes
    archive: TierBytes
    tables: int
    index: int
    scratch: int
    exact_copies: int
    states: int
    slack: int
    offloaded: TierBytes
    peak: int
    fp16_bytes: int
    ratio: float
    ratio_f32: float

    @classmethod
    def _of(cls, raw: Any) -> Memory:
        values: dict[str, Any] = {name: TierBytes._of(raw.tier[i]) for i, name in enumerate(TIERS)}
        for field in fields(cls):
            if field.name not in values:
                value = getattr(raw, field.name)
                values[field.name] = TierBytes._of(value) if field.name == "offloaded" else value
        return cls(**values)


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes of the blocks of a sequence: its own, shared ones, and its share of these."""

    own: int
    shared: int
    share: int


@dataclass(frozen=True)
class Layer:
    """The shape of a layer, and where the tokens of one sequence are (tkv_layer_info)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_in_k: bool
    length: int
    hot_tokens: int
    warm_tokens: int
    archive_tokens: int
    expired: int
    evicted: int
    offloaded: int
    discarded: int


@dataclass(frozen=True)
class Budget:
    """The budget, and what was done to keep it (tkv_budget_info)."""

    budget: int
    used: int
    peak: int
    level: int
    n_levels: int
    pressure: float
    demoted: int
    refused: int
    offloaded: int
    promoted: int
    evicted: int
    discarded: int
    recomputed: int
    pending: int


@dataclass(frozen=True)
class Quality:
    """What the quality meter measured (tkv_quality_info)."""

    samples: int
    coverage: float
    output_error: float
    kl: float
    kl_max: float
    top1: float
    heads: int
    every: int


@dataclass(frozen=True)
class Loaded:
    """What a load found. `tokens` has the saved token numbers."""

    n_tokens: int
    n_tables: int
    n_recoded: int
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prefix:
    """What was published or adopted (tkv_prefix_info)."""

    n_tokens: int
    n_pages: int
    n_put: int


class Attention(NamedTuple):
    """The result of Cache.attend_full: outputs, log-sum-exps and the score of each key, if they were asked for."""

    out: npt.NDArray[np.float32]
    lse: Optional[npt.NDArray[np.float32]]
    scores: Optional[npt.NDArray[np.float32]]
