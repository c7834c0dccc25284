"""Native Sparse Attention (arXiv 2502.11089). Public names load on first use.

`import nsa` itself loads neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "NSAConfig": "nsa.config",
    "Flags": "nsa.flags",
    "get_flags": "nsa.flags",
    "clear_flags_cache": "nsa.flags",
    "RouteUnavailable": "nsa.dispatch",
    "nsa_attention": "nsa.attention",
    "compressed_attention": "nsa.attention",
    "select_blocks": "nsa.attention",
    "selection_attention": "nsa.attention",
    "sliding_attention": "nsa.attention",
    "NSAAttention": "nsa.module",
    "NSABlock": "nsa.module",
    "NSACache": "nsa.cache",
    "NSALanguageModel": "nsa.model",
    "StepGraph": "nsa.decode_graph",
    "GraphUnavailable": "nsa.decode_graph",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
