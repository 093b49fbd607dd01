"""Checks of numbers before they go to C."""
from __future__ import annotations

from typing import Any

from ._native import lib
from .errors import TieredKVError, make_error

INT_END = 1 << 31


def refuse(sentence: str) -> TieredKVError:
    return make_error(lib.TKV_ERR_ARG, sentence)


def as_int(name: str, value: Any, least: int = -INT_END, end: int = INT_END) -> int:
    """Returns a whole number from least to end - 1, by default one that a C int holds."""
    try:
        number = int(value.__index__())
    except AttributeError:
        raise refuse("%s is %r, and must be a whole number" % (name, value)) from None
    if not least <= number < end:
        raise refuse("%s is %d, and must be from %d to %d" % (name, number, least, end - 1))
    return number


def one_of(name: str, value: str, table: dict[str, int]) -> int:
    if value not in table:
        raise refuse("%s is %r, and must be one of %s" % (name, value, ", ".join(table)))
    return table[value]
