"""The exceptions of the package: one class for each status of the library, with the sentence that it gives."""
from __future__ import annotations

from typing import Dict, Type

from ._native import ffi, lib


class TieredKVError(Exception):
    """An error of the library. `status` is its number, as in tkv_status; str() is the sentence."""

    status: int = 0

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        if status is not None:
            self.status = status


class ArgumentError(TieredKVError, ValueError):
    """A shape, a type or a number is wrong."""

    status = lib.TKV_ERR_ARG


class ConfigError(TieredKVError, ValueError):
    """A config is wrong; or bytes are of another model."""

    status = lib.TKV_ERR_CONFIG


class OutOfMemoryError(TieredKVError, MemoryError):
    status = lib.TKV_ERR_NOMEM


class CapacityError(TieredKVError):
    """max_tokens, max_append or max_seqs is used up."""

    status = lib.TKV_ERR_CAPACITY


class NonFiniteError(TieredKVError, ValueError):
    """A key or a value is NaN or infinite."""

    status = lib.TKV_ERR_NONFINITE


class StateError(TieredKVError):
    """A call is out of order."""

    status = lib.TKV_ERR_STATE


class RangeError(TieredKVError, IndexError):
    """Tokens are not in the cache."""

    status = lib.TKV_ERR_RANGE


class InstructionSetError(TieredKVError):
    status = lib.TKV_ERR_ISA


class BrokenError(TieredKVError):
    """The self-check failed."""

    status = lib.TKV_ERR_BROKEN


class DataError(TieredKVError, ValueError):
    """Bytes are damaged or cut."""

    status = lib.TKV_ERR_DATA


class BudgetError(TieredKVError, MemoryError):
    """The budget is full."""

    status = lib.TKV_ERR_BUDGET


class StoreError(TieredKVError):
    status = lib.TKV_ERR_IO


class NoSourceError(TieredKVError):
    status = lib.TKV_ERR_NO_SOURCE


class UnsupportedError(TieredKVError):
    status = lib.TKV_ERR_UNSUPPORTED


_CLASSES: Dict[int, Type[TieredKVError]] = {c.status: c for c in (
    ArgumentError, ConfigError, OutOfMemoryError, CapacityError, NonFiniteError, StateError, RangeError, InstructionSetError,
    BrokenError, DataError, BudgetError, StoreError, NoSourceError, UnsupportedError)}


def make_error(status: int, sentence: str = "") -> TieredKVError:
    """Returns the exception of a status. Without a sentence, the status has one."""
    text = sentence or str(ffi.string(lib.tkv_get_status_text(status)).decode())
    return _CLASSES.get(status, TieredKVError)(text, status)
