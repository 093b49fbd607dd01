"""A cache of keys and values for transformers, in three tiers: numpy in and out. `tieredkv.transformers` has the cache for
Hugging Face's transformers."""
from ._native import ffi, lib
from .cache import Cache, merge_attention
from .config import Config
from .errors import (ArgumentError, BrokenError, BudgetError, CapacityError, ConfigError, DataError, InstructionSetError,
                     NonFiniteError, NoSourceError, OutOfMemoryError, RangeError, StateError, StoreError, TieredKVError,
                     UnsupportedError)
from .info import Attention, Budget, Layer, Loaded, Memory, Prefix, Quality, SequenceMemory, TierBytes

__version__ = "%d.%d.%d" % (lib.TKV_VERSION_MAJOR, lib.TKV_VERSION_MINOR, lib.TKV_VERSION_PATCH)

__all__ = [
    "ArgumentError", "Attention", "BrokenError", "Budget", "BudgetError", "Cache", "CapacityError", "Config", "ConfigError",
    "DataError", "InstructionSetError", "Layer", "Loaded", "Memory", "NoSourceError", "NonFiniteError", "OutOfMemoryError",
    "Prefix", "Quality", "RangeError", "SequenceMemory", "StateError", "StoreError", "TierBytes", "TieredKVError",
    "UnsupportedError", "ffi", "get_include", "lib", "merge_attention"]


def get_include() -> str:
    """Returns the folder of tieredkv.h, for extensions in C."""
    import os
    return os.path.dirname(os.path.abspath(__file__))
