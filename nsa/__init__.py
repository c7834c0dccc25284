"""Native Sparse Attention (arXiv 2502.11089). Public names load on first use.

`import nsa` itself loads neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "attention": "nsa_attention nsa_attention_shared_kv merge_state compressed_attention "
    "select_blocks selection_attention sliding_attention",
    "cache": "NSACache",
    "config": "NSAConfig",
    "decode_graph": "StepGraph GraphUnavailable",
    "dispatch": "RouteUnavailable",
    "flags": "Flags get_flags clear_flags_cache",
    "kvcache": "nsa_with_kvcache reorder_kvcache cache_bytes_per_token",
    "model": "NSALanguageModel",
    "module": "NSAAttention NSABlock",
    "parallel_cache": "ParallelNSACache",
    "plans": "warmup",
}
_WHERE = {name: f".{module}" for module, names in _NAMES.items() for name in names.split()}

_MODULES = ("compress", "generate", "layouts", "parallel")  # public, by their own names

__all__ = ["__version__", *_WHERE]

# Type checkers and editors read these imports; a test checks that none of the public names is
# missing. They do not see __getattr__, with which they would take any other name for an Any.
if TYPE_CHECKING:
    from nsa import compress as compress
    from nsa import generate as generate
    from nsa import layouts as layouts
    from nsa import parallel as parallel
    from nsa.attention import compressed_attention as compressed_attention
    from nsa.attention import merge_state as merge_state
    from nsa.attention import nsa_attention as nsa_attention
    from nsa.attention import nsa_attention_shared_kv as nsa_attention_shared_kv
    from nsa.attention import select_blocks as select_blocks
    from nsa.attention import selection_attention as selection_attention
    from nsa.attention import sliding_attention as sliding_attention
    from nsa.cache import NSACache as NSACache
    from nsa.config import NSAConfig as NSAConfig
    from nsa.decode_graph import GraphUnavailable as GraphUnavailable
    from nsa.decode_graph import StepGraph as StepGraph
    from nsa.dispatch import RouteUnavailable as RouteUnavailable
    from nsa.flags import Flags as Flags
    from nsa.flags import clear_flags_cache as clear_flags_cache
    from nsa.flags import get_flags as get_flags
    from nsa.kvcache import cache_bytes_per_token as cache_bytes_per_token
    from nsa.kvcache import nsa_with_kvcache as nsa_with_kvcache
    from nsa.kvcache import reorder_kvcache as reorder_kvcache
    from nsa.model import NSALanguageModel as NSALanguageModel
    from nsa.module import NSAAttention as NSAAttention
    from nsa.module import NSABlock as NSABlock
    from nsa.parallel_cache import ParallelNSACache as ParallelNSACache
    from nsa.plans import warmup as warmup

else:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _WHERE:
            raise AttributeError(f"module 'nsa' has no attribute {name!r}")
        value = getattr(importlib.import_module(_WHERE[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
