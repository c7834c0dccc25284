"""What a type checker makes of public calls. mypy reads this (`make lint`); nobody runs it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import nsa


def functions(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, gates: Tensor, ask: bool) -> None:
    assert_type(nsa.selection_attention(q, k, v, blocks), Tensor)
    assert_type(nsa.selection_attention(q, k, v, blocks, return_lse=True), tuple[Tensor, Tensor])
    either = nsa.selection_attention(q, k, v, blocks, return_lse=ask)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(nsa.nsa_attention_shared_kv(q, k, v, gates, backend="sdpa"), Tensor)
    assert_type(nsa.merge_state(q, gates, q, gates), tuple[Tensor, Tensor])
    nsa.sliding_attention(q, k, v, backend="cuda")  # type: ignore[arg-type]


def layers(layer: nsa.NSAAttention, model: nsa.NSALanguageModel, x: Tensor) -> None:
    cache = layer.make_cache(batch=1, max_len=64)
    assert_type(cache, nsa.NSACache)
    assert_type(layer.prefill(x, cache), Tensor)
    assert_type(layer.step(x, cache), Tensor)
    logits, caches = model.prefill(x)
    assert_type(logits, Tensor)
    assert_type(model.step(x, caches), Tensor)
    nsa.NSAAttention(nsa.NSAConfig(32, 4, 2, 8, 8, window=16), backend="gpu")  # type: ignore[arg-type]


def names(x: Tensor) -> None:
    assert_type(nsa.__version__, str)
    assert_type(nsa.compress.mean_pool(x, 8, 4), Tensor)
    nsa.compress.max_pool(x)  # type: ignore[attr-defined]
    nsa.max_attention(x)  # type: ignore[attr-defined]
    nsa.NSAConfig(32, 4, 2, 8, 8, w=16)  # type: ignore[call-arg]
