"""Which blocks of keys each query attends: what every kernel of selection by blocks goes by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Selection(NamedTuple):
    """blocks int32 [.., G, n_sel]: ascending, none after the query, -1 (no block) at the end;
    queries that belong to no sequence have none. block_size: keys of a block. Query 0 stands at key
    q_start. Packed: seq_begin int32 [T], the first row of each token's sequence, cu_seqlens, and
    max_seqlen, which says whether there are long ones."""

    blocks: Tensor
    block_size: int
    softmax_scale: float
    seq_begin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    q_start: int = 0

    @property
    def packed(self) -> bool:
        return self.seq_begin is not None

    @property
    def strict(self) -> bool:
        """Whether what a query does not see may change no bit of what it gets, as in PyTorch's
        deterministic mode. Ways which do a whole tile of queries anew, by other arithmetic, where
        one of them meets NaN, do not serve then."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def n_sel(self) -> int:
        return self.blocks.shape[-1]

    @property
    def begins(self) -> Tensor:
        """seq_begin as kernels take it; of dense inputs a tensor that they do not read."""
        return self.blocks if self.seq_begin is None else self.seq_begin

    def lengths(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Queries and keys of a sequence, (1, 0) of packed ones, as kernels take them."""
        return (1, 0) if self.packed else (q.shape[1], k.shape[1])
