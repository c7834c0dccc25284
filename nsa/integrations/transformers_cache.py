"""A layer of Transformers' dynamic cache that decodes from an nsa.NSACache.

Keys and values of prefill go into an NSACache together with the compressed ones that prefill made;
every step then appends to it and runs nsa_decode. Padding on the left is left out there. Whatever
the NSACache does not serve (gradients, many tokens behind sequences of different lengths, going
back far) turns the layer into a plain DynamicLayer again, and the next step fills a new NSACache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer

from nsa.attention import append_projected, nsa_decode
from nsa.blocks import num_compressed
from nsa.cache import BranchKV, NSACache
from nsa.config import NSAConfig
from nsa.fp8 import KVCacheDtype

ROOM = 256  # tokens that fit behind a prompt before buffers grow, at least


class NSACacheLayer(DynamicLayer):
    """DynamicLayer, or an NSACache that looks like one: keys and values [B, G, N, D] are made of it
    when somebody asks.

    first: how many of the N columns are padding, for each sequence. fresh: what update() was given
    and step() has to append.
    """

    nsa: NSACache | None = None
    first: list[int]
    columns: int
    fresh: tuple[Tensor, Tensor] | None = None
    several = False  # sequences in a row, which were a pack: none of them goes on

    @classmethod
    def of(cls, layer: DynamicLayer) -> NSACacheLayer:
        """The same keys and values."""
        new = cls()
        new.__dict__.update(layer.__dict__)
        return new

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values") and self.nsa is not None:
            x = self.nsa.k_sel if name == "keys" else self.nsa.v_sel
            column = torch.arange(self.columns, device=x.device)
            at = column - torch.tensor(self.first, device=x.device)[:, None]
            rows = x[self.nsa._batch, at.clamp(min=0)]
            return self.nsa._read(name[0], rows).transpose(1, 2)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        if self.nsa is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.fresh = key_states, value_states
        return self.fresh

    def get_seq_length(self, *args: Any) -> int:
        return super().get_seq_length(*args) if self.nsa is None else self.columns

    def reset(self) -> None:
        self._forget()
        self.keys = self.values = None
        self.is_initialized = self.several = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens: -n of them, or all but n as older releases of Transformers."""
        n = tokens_to_remove
        if self.nsa is not None:
            gone = -n if n <= 0 else max(0, self.columns - n)
            try:
                self.nsa.rewind(gone)
            except ValueError:  # further back than its rings reach
                self.leave()
            else:
                self.columns -= gone
                return
        super().crop(n)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self._choose(beam_idx):
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self._choose(lambda all: all.repeat_interleave(repeats)):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self._choose(lambda all: all[indices]):
            super().batch_select_indices(indices)

    def offload(self) -> None:
        self.leave()
        super().offload()

    def _choose(self, rows: Tensor | Callable[[Tensor], Tensor]) -> bool:
        """Keep these sequences; False where the keys are plain."""
        if self.nsa is None:
            return False
        if not isinstance(rows, Tensor):
            rows = rows(torch.arange(self.nsa.batch, device=self.nsa.device))
        self.nsa = self.nsa.select(rows.to(self.nsa.device))
        self.first = [self.first[b] for b in rows.tolist()]
        return True

    def leave(self) -> None:
        """Be a plain DynamicLayer again."""
        if self.nsa is not None:
            keys, values = self.keys, self.values
            self._forget()
            self.keys, self.values = keys, values

    def _forget(self) -> None:
        self.nsa = self.fresh = None

    def plain(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, where key and value are what update() returned."""
        if self.nsa is None:
            return key, value
        fresh = self.fresh
        self.leave()
        return super().update(*fresh)

    def step(
        self, q: Tensor, key: Tensor, gates: Tensor, phi_k: Callable, phi_v: Callable,
        rows: list[tuple[int, int]] | None, how: dict[str, Any],
    ) -> Tensor | None:  # fmt: skip
        """Append what update() was given and attend from it: [B, T, HQ, D].

        None where the NSACache does not serve q [B, T, HQ, D]. rows: the columns of each sequence.
        Raises ValueError for other padding than there was.
        """
        nsa, fresh = self.nsa, self.fresh
        if self.several:
            raise NotImplementedError(
                "nsa takes one sequence a row behind a cache, which holds packed ones"
            )
        if nsa is None:
            return None
        if fresh is None or key is not fresh[0]:
            raise RuntimeError("an NSACacheLayer must be updated with the keys that attend from it")
        many = q.shape[1] > nsa.max_step
        if q.dtype != nsa.dtype or rows is None or many and nsa.mixed:
            return None
        first = [begin for begin, _ in rows]
        end = self.columns + q.shape[1]
        if first != self.first or any(stop != end for _, stop in rows):
            raise ValueError(
                "attention_mask must have the padding that it had with the tokens before: "
                f"{self.first} columns on the left, got {rows}"
            )
        k, v = (x.transpose(1, 2).to(q.dtype) for x in fresh)
        backend, window, made = how.get("backend"), None, None
        if many:
            window = nsa.window_with(k, v)
        else:
            wide = lambda: torch.cat([x.flatten(2) for x in (q, k, k, k, v, v, v)], 2)
            made, _ = append_projected(wide, nsa, phi_k, phi_v, turn=False, backend=backend)
        if made is None:
            nsa.append(BranchKV(k, v, k, v, k, v), phi_k, phi_v)
        self.fresh = None
        self.columns = end
        return nsa_decode(
            q, nsa, window, gates, softmax_scale=how.get("softmax_scale"), backend=backend
        )[0]

    def fill(
        self, heads: int, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor,
        rows: list[tuple[int, int]] | None, how: dict[str, Any], kv_cache_dtype: KVCacheDtype,
    ) -> None:  # fmt: skip
        """Hand the layer's keys over to an NSACache, where all sequences have tokens and end at the
        last column.

        k, v [B, N, G, D]; k_cmp, v_cmp [B, Nc, G, D], or packed [N_total, G, D]. rows: the columns
        of each sequence, None where a row has several.
        """
        B, N, G, d_k = k.shape
        self.several = rows is None
        if rows is None or d_k % 2 or any(end != N or first == N for first, end in rows):
            return
        names = "l", "d", "l_sel", "n_sel", "n_init", "n_local", "window"
        sizes = dict(dim=heads * d_k, heads=heads, groups=G, d_k=d_k, d_v=v.shape[-1])
        config = NSAConfig(**sizes, **{name: how[name] for name in names})
        self.first = [first for first, _ in rows]
        lengths = [N - first for first in self.first]
        if k_cmp.ndim == 3:
            counts = [num_compressed(n, config.l, config.d) for n in lengths]
            k_cmp, v_cmp = (pad_sequence(x.split(counts), True) for x in (k_cmp, v_cmp))
        if any(self.first):
            column = torch.arange(N, device=k.device)
            at = (column + torch.tensor(self.first, device=k.device)[:, None]).clamp(max=N - 1)
            k, v = (x[torch.arange(B, device=k.device)[:, None], at] for x in (k, v))
        room = N + max(ROOM, N // 8)
        like = dict(device=k.device, dtype=k.dtype, kv_cache_dtype=kv_cache_dtype)
        nsa = NSACache(config, B, room, growable=True, **like)
        nsa.fill(BranchKV(k, v, k, v, k, v), k_cmp, v_cmp, lengths)
        self.nsa, self.columns = nsa, N
        del self.keys, self.values


def cache_layer(layer: nn.Module, kwargs: dict[str, Any], ours: bool) -> NSACacheLayer | None:
    """The layer's part of the cache that its forward pass is called with, as an NSACacheLayer.

    None where there is none, or it has another kind, and where gradients are taken, a compiler
    looks or attention is not ours: an NSACacheLayer is a plain DynamicLayer then.
    """
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    cache = getattr(cache, "self_attention_cache", cache)
    at = getattr(layer, "layer_idx", None)
    if not isinstance(cache, Cache) or at is None:
        return None
    serves = ours and not (
        torch.is_grad_enabled() or torch.compiler.is_compiling() or cache.offloading
    )
    layers = cache.layers
    while serves and len(layers) <= at and cache.layer_class_to_replicate is DynamicLayer:
        layers.append(DynamicLayer())
    if at >= len(layers):
        return None
    if serves and type(layers[at]) is DynamicLayer:
        layers[at] = NSACacheLayer.of(layers[at])
    held = layers[at]
    if not isinstance(held, NSACacheLayer):
        return None
    if not serves:
        held.leave()
    return held if serves else None
