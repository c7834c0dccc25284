"""A small NSA language model: embedding, blocks, norm and a head tied to the embedding."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.cache import NSACache
from nsa.config import NSAConfig, check_int
from nsa.dispatch import Backend
from nsa.flags import Flags
from nsa.fp8 import KVCacheDtype
from nsa.module import NSABlock
from nsa.nested import run_packed


class NSALanguageModel(nn.Module):
    """Tokens int64 [B, S] -> logits [B, S, vocab_size]; packed [T] with cu_seqlens as well.

    >>> config = NSAConfig(
    ...     dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, window=16
    ... )
    >>> model, tokens = NSALanguageModel(config, vocab_size=50, n_layers=2), torch.arange(40)[None]
    >>> logits, caches = model.prefill(tokens[:, :39], max_len=64)
    >>> next_logits = model.step(tokens[:, 39:], caches)
    >>> torch.testing.assert_close(torch.cat([logits, next_logits], 1), model(tokens))
    """

    def __init__(
        self, config: NSAConfig, vocab_size: int, n_layers: int, *, backend: Backend | None = None,
        flags: Flags | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_int("vocab_size", vocab_size, 1)
        check_int("n_layers", n_layers, 1)
        self.config, self.vocab_size, self.n_layers = config, vocab_size, n_layers
        self.embedding = nn.Embedding(vocab_size, config.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            NSABlock(config, backend=backend, flags=flags) for _ in range(n_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)

    def _embed(self, tokens: Tensor, ndim: int = 2) -> Tensor:
        if not isinstance(tokens, Tensor) or tokens.ndim != ndim:
            lead = "[B, S] (one sequence is tokens[None])" if ndim == 2 else "[T] with cu_seqlens"
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens must be {lead}, got {got}")
        return self.embedding(tokens)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Logits [B, S, vocab] of tokens int64 [B, S]; [T, vocab] of packed [T].

        cu_seqlens int32 [nseq + 1] and max_seqlen as in nsa/attention.py, with its ValueError or
        TypeError; jagged nested tokens [B, j] are a pack. A token outside of the vocabulary is
        nn.Embedding's IndexError on a CPU; a GPU stops with a device-side assert.
        """
        if isinstance(tokens, Tensor) and tokens.is_nested:
            return run_packed(self.forward, tokens, cu_seqlens)
        x = self._embed(tokens, 2 if cu_seqlens is None else 1)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return self._logits(x)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, max_len: int | None = None, *, count_reads: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> tuple[Tensor, list[NSACache]]:  # fmt: skip
        """Logits [B, S, vocab] of the prompt, without gradients, and one cache per layer.

        max_len: fixed capacity of the caches, at least S or ValueError; None lets them grow.
        kv_cache_dtype: as NSACache's; FP8 ones have descales of 1.
        """
        x = self._embed(tokens)
        check_int("max_len", max_len, max(tokens.shape[1], 1), optional=True)
        room = max(2 * tokens.shape[1], 64) if max_len is None else max_len
        caches = [
            block.attention.make_cache(  # type: ignore[operator, union-attr]
                tokens.shape[0],
                room,
                growable=max_len is None,
                count_reads=count_reads,
                kv_cache_dtype=kv_cache_dtype,
            )
            for block in self.blocks
        ]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.prefill(x, cache)  # type: ignore[operator]
        return self._logits(x), caches

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[NSACache]) -> Tensor:
        """Logits [B, T, vocab] of the T newest tokens [B, T], without gradients; the caches take
        them up.

        caches: one per layer, as prefill() made them. Raises ValueError when they are not as many,
        or tokens have not their batch, or do not fit any more. A step that raises leaves all
        caches as they were.
        """
        if len(caches) != self.n_layers:
            raise ValueError(f"caches must be {self.n_layers}, one per layer, got {len(caches)}")
        x = self._embed(tokens)
        with contextlib.ExitStack() as stack:
            for cache in caches:
                stack.enter_context(cache.kept_if_raised(x))
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block.step(x, cache)  # type: ignore[operator]
            return self._logits(x)
