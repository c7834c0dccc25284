"""CacheRows: reading rows of a layer's caches and appending to them, in plain PyTorch.

NSACache and the caches of nsa_with_kvcache are two layouts of the same rows: a subclass says where
a position lies, and everything else is done here. nsa/kernels/decode has the appending as kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nsa import fp8
from nsa.blocks import num_compressed
from nsa.compress import made_by

Phi = Callable[[Tensor], Tensor]


class CacheRows:
    """Caches k_* and v_* of kinds cmp, sel, win and raw, each [.., rows, G, D] and contiguous, of
    `batch` sequences of `lengths` tokens, which lens int32 [B] holds on the device.

    sizes: those of nsa_attention, by name. dtype: of queries, and of keys and values as they come
    and go. k_descale, v_descale: fp32 [B, G] where the caches are e4m3. block_table: the pages of
    every sequence, None for caches that are not in pages; ring: win and raw are rings.
    """

    batch: int
    lengths: list[int]
    lens: Tensor
    max_len: int
    sizes: dict[str, Any]
    dtype: torch.dtype
    block_table: Tensor | None
    ring: bool
    k_descale: Tensor | None
    v_descale: Tensor | None
    world, rank = 1, 0  # of the ranks over which selection's and compressed tokens lie

    def _rows_at(self, name: str, positions: Tensor) -> Tensor:
        """Rows of the cache `name`, flattened over its first two dimensions, that hold `positions`
        [B, n] of every sequence; of a compressed token the position is its number."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def emitted(self) -> int:
        """Compressed tokens of the longest sequence."""
        return num_compressed(self.length, self.sizes["l"], self.sizes["d"])

    @property
    def mixed(self) -> bool:
        """True when sequences differ in length."""
        return min(self.lengths) != max(self.lengths)

    @property
    def descales(self) -> tuple[Tensor, Tensor]:
        """The descales of keys and of values; where the caches are not FP8, tensors that nobody
        reads."""
        if self.k_descale is None or self.v_descale is None:
            return self.lens, self.lens
        return self.k_descale, self.v_descale

    def _descale(self, name: str) -> Tensor | None:
        return self.k_descale if name[0] == "k" else self.v_descale

    def _read(self, name: str, rows: Tensor) -> Tensor:
        """Stored rows [B, n, G, D] of the cache `name` as the numbers that they stand for."""
        return fp8.stands_for(rows, self._descale(name), self.dtype)

    def _stored(self, name: str, x: Tensor) -> Tensor:
        """x [B, n, G, D] as the cache `name` holds it."""
        return fp8.stored(x, self._descale(name), self.dtype)

    def _at(self, name: str, positions: Tensor) -> Tensor:
        """Read the cache `name` at positions [B, n]: [B, n, G, D]."""
        cache = getattr(self, name).flatten(0, 1)
        return self._read(name, cache[self._rows_at(name, positions)])

    def _between(self, kind: str, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values at positions first to last of every sequence: [B, last - first, G, D]."""
        names = f"k_{kind}", f"v_{kind}"
        if self.block_table is None and not (self.ring and kind in ("win", "raw")):
            k, v = (self._read(name, getattr(self, name)[:, first:last]) for name in names)
        else:
            here = torch.arange(first, last, device=self.lens.device).expand(self.batch, -1)
            k, v = (self._at(name, here) for name in names)
        return k, v

    # These three are for sequences of one length, and return keys and values for nsa_attention.

    def compressed(self) -> tuple[Tensor, Tensor]:
        return self._between("cmp", 0, self.emitted)

    def selectable(self) -> tuple[Tensor, Tensor]:
        return self._between("sel", 0, self.length)

    def window(self, T: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the T newest queries and the w - 1 before them."""
        first = max(0, self.length - T - (self.sizes["window"] - 1))
        return self._between("win", first, self.length)

    def _put(self, name: str, positions: Tensor, x: Tensor, here: Tensor | None = None) -> None:
        """Store x [B, n, G, D] in the cache `name` at positions [B, n], or where `here` is true."""
        cache = fp8.as_bytes(getattr(self, name)).flatten(0, 1)
        x = fp8.as_bytes(self._stored(name, x)).flatten(0, 1)
        at = self._rows_at(name, positions).flatten()
        cache.index_copy_(0, at, x if here is None else torch.where(here, x, cache[at]))

    def _write(self, new: Mapping[str, Tensor], positions: Tensor) -> None:
        """Store x [B, T, G, D], by the names of their caches, at positions [B, T]."""
        for name, x in new.items():
            self._put(name, positions, x)

    def _emit(
        self, after: Tensor, T: int, most: int, made: tuple[Tensor | Phi, Tensor | Phi]
    ) -> None:
        """Store the compressed tokens, up to `most` of each sequence, that T new tokens complete,
        with which sequences have `after` [B, 1] tokens.

        made: these tokens [B, n, G, D], keys and values, the first of each sequence first; or phi
        of both, [n, l, G, D] -> [n, 1, G, D] (else ValueError), which makes them of raw tokens.
        """
        l, d = self.sizes["l"], self.sizes["d"]
        first = num_compressed(after - T, l, d)
        count = num_compressed(after, l, d) - first
        # A sequence that completes fewer has its last one again. Values of what is written more
        # than once are the same, so the order of the writes does not matter.
        due = torch.arange(most, device=after.device).minimum((count - 1).clamp(min=0))
        # Without one due, a row that nobody else writes, which keeps what it has: in pages that of
        # the newest token, else that of the next block.
        block, due_now = first + due, (count > 0).expand_as(due).flatten()[:, None, None]
        place = torch.where(count > 0, block, (after - 1) // d - (l // d - 1))
        new = []
        for kind, x in zip("kv", made, strict=True):
            if isinstance(x, Tensor):
                x = x[torch.arange(len(x), device=x.device)[:, None], due.clamp(max=x.shape[1] - 1)]
            else:
                tokens = (block * d)[..., None] + torch.arange(l, device=block.device)
                raw = self._at(f"{kind}_raw", tokens.flatten(1).minimum(after - 1))
                x = made_by(f"phi_{kind}", x, raw.unflatten(1, (-1, l)).flatten(0, 1))
                x = x.unflatten(0, due.shape)[:, :, 0]
            new.append((f"{kind}_cmp", x))
        for name, x in new:
            self._put(name, place, x, due_now)
