"""Checks of numbers before they go to C."""
from __future__ import annotations

from typing import Any

from ._native import lib
from .errors import TieredKVError, make_error

INT_END = 1 << 31


def refuse(sentence: str) -> TieredKVError:
    return make_error(lib.TKV_ERR_ARG, sentence)


def as_int(name: str, value: Any) -> int:
    """Returns a number that a C int holds."""
    try:
        number = value.__index__()
    except AttributeError:
        raise refuse("%s is %r, and must be a whole number" % (name, value)) from None
    if not -INT_END <= number < INT_END:
        raise refuse("%s is %d, and must be between -2^31 and 2^31 - 1" % (name, number))
    return int(number)


def one_of(name: str, value: str, table: dict[str, int]) -> int:
    if value not in table:
        raise refuse("%s is %r, and must be one of %s" % (name, value, ", ".join(table)))
    return table[value]
