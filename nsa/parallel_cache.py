"""ParallelNSACache: an NSACache whose tokens lie over the ranks of a torch.distributed group.

Selection block j, its l_sel tokens and the compressed tokens that begin in it, is kept by rank
j % W of W, so that ranks hold, and read, equally much at every length. The window and the raw keys
that the next compressed token is made of, whose sizes do not grow, are kept by every rank: so each
makes a compressed token by itself, wherever its l tokens are. All ranks make the same calls with
the same tokens, and get the same output.

A step attends to the compressed and to the chosen tokens of each rank and merges the parts by their
log-sum-exp (lse). Its three all-gathers, for each of B * T queries:

    1. the lse of compressed attention over a rank's tokens: HQ numbers of 4 bytes; meanwhile every
       rank attends to the window
    2. probabilities of a rank's compressed tokens, normalised by 1., summed over the heads of a
       group (Eq. 10): S / (d * W) numbers of 4 bytes for each of G groups. Each rank then has those
       of all tokens, and makes the same choice of blocks
    3. both branches' outputs and lse over a rank's tokens: 2 * HQ * (Dv + 1) numbers of 4 bytes

    >>> import torch.distributed as dist
    >>> from nsa import NSAAttention, NSAConfig
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # by torchrun
    >>> config = NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, window=16)
    >>> layer, x = NSAAttention(config), torch.randn(1, 101, 32)
    >>> cache = ParallelNSACache(config, batch=1, max_len=128)
    >>> parts = [layer.prefill(x[:, :100], cache), layer.step(x[:, 100:], cache)]
    >>> torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, exchange, select
from nsa.attention import gated_sum, selection_attention, sliding_attention
from nsa.blocks import num_sel_blocks, visible_compressed
from nsa.cache import NSACache
from nsa.checks import scale_of
from nsa.config import NSAConfig
from nsa.dispatch import Backend
from nsa.exchange import Group, resolve_group
from nsa.flags import Flags

_MOST_PROBABILITIES = 1 << 26  # of all ranks that are exchanged at a time: 256 MiB

_SETTINGS = ("config", "batch", "max_len", "max_step", "dtype", "growable")


class ParallelNSACache(NSACache):
    """NSACache of `batch` sequences over the ranks of `group`: layer.prefill, layer.step and what
    calls them take it as they take an NSACache, with the same tokens on every rank.

    A rank's k_sel, v_sel [B, rows + 1, G, D] hold l_sel tokens of every W-th block, its k_cmp and
    v_cmp the compressed tokens that begin there; the last row takes what other ranks keep. Window,
    raw keys and lens are those of NSACache. group: a ProcessGroup, a 1-D DeviceMesh, or None for
    all ranks. The other arguments and what is kept are as for NSACache, count_reads apart.

    check: ranks compare sizes and lengths before each step, so that an error on one is an error
    (ValueError or TypeError) on each. It waits for the device unless the group has a backend for
    the CPU ("cpu:gloo,cuda:nccl"): set it to False once shapes are settled. A captured step does
    not compare. Without it, and where a rank dies, the others meet that in their next exchange:
    ExchangeFailed on gloo; on NCCL the watchdog ends their processes after the group's timeout.
    """

    parallel = True

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        max_len: int,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_step: int = 8,
        growable: bool = False,
        check: bool = True,
    ) -> None:
        self.group = resolve_group(group)
        self.world, self.rank, self.check = self.group.size(), self.group.rank(), check

        def describe() -> dict[str, Any]:
            NSACache.__init__(
                self,
                config,
                batch,
                max_len,
                device=device,
                dtype=dtype,
                max_step=max_step,
                growable=growable,
            )
            return {name: getattr(self, name) for name in _SETTINGS}

        exchange.agree_on(describe, _SETTINGS, self.group, "cache")

    def _empty(self, batch: int, max_len: int) -> NSACache:
        return ParallelNSACache(
            self.config,
            batch,
            max_len,
            group=self.group,
            max_step=self.max_step,
            growable=self.growable,
            check=self.check,
            **self._like,
        )

    # ---- which rank keeps what ---------------------------------------------------------------

    def _per_block(self, kind: str) -> int:
        """Tokens of a block: raw ones ("sel"), or compressed ones that begin in it ("cmp")."""
        return self.config.l_sel if kind == "sel" else self.config.l_sel // self.config.d

    def _own_blocks(self, tokens: int) -> int:
        """Blocks of so many tokens that a rank has room for."""
        return -(-num_sel_blocks(tokens, self.config.l_sel) // self.world)

    def _rows_of(self, kind: str, max_len: int) -> int:
        return self._own_blocks(max_len) * self._per_block(kind) + 1

    def _places(self, kind: str, index: Tensor) -> Tensor:
        size = self._per_block(kind)
        last = (self.k_sel if kind == "sel" else self.k_cmp).shape[1] - 1
        block = index // size
        row = block // self.world * size + index % size
        return torch.where(block % self.world == self.rank, row, last).clamp(max=last)

    def _store(self, kind: str, buffer: Tensor, first: int, x: Tensor) -> None:
        at = self._places(kind, torch.arange(first, first + x.shape[1], device=x.device))
        kept = (at < buffer.shape[1] - 1).nonzero()[:, 0]
        buffer[:, at[kept]] = x[:, kept]

    def _held(self, kind: str, n: Tensor) -> Tensor:
        """How many of the first n tokens, raw or compressed, this rank keeps: its first rows."""
        size = self._per_block(kind)
        rounds = n // (size * self.world)
        rest = n - rounds * (size * self.world) - self.rank * size
        return rounds * size + rest.clamp(0, size)

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: no rank has all compressed tokens."""
        raise NotImplementedError("compressed(): the tokens of a ParallelNSACache lie over ranks")

    def selectable(self) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: no rank has all tokens."""
        raise NotImplementedError("selectable(): the tokens of a ParallelNSACache lie over ranks")

    # ---- a step ------------------------------------------------------------------------------

    def agree(self, describe: Any) -> None:
        """Raise what describe() raises, which checks a step's arguments and names its sizes; with
        `check` a ValueError on every rank unless all ranks' sizes and lengths are equal."""
        if not self.check or self.k_sel.is_cuda and torch.cuda.is_current_stream_capturing():
            describe()
            return
        names = ("step", "batch", "lengths", "max_len")
        all_of_them = lambda: {
            "step": describe(),
            "batch": self.batch,
            "lengths": self.lengths,
            "max_len": self.max_len,
        }
        exchange.agree_on(all_of_them, names, self.group, "step")

    def attend(
        self,
        q: Tensor,
        window: tuple[Tensor, Tensor] | None,
        gates: Tensor,
        softmax_scale: float | None,
        backend: Backend | None,
        flags: Flags,
    ) -> tuple[Tensor, Tensor]:
        """nsa_decode() of checked arguments, which are equal on all ranks; so are the results."""
        c, T = self.config, q.shape[1]
        if window is None and T > self.max_step:
            raise ValueError(f"window must be given for more than max_step={self.max_step} tokens")
        # Any number of keys is worth a kernel, which waits for nothing; lengths are on the device.
        flags = replace(flags, sel_triton_min_L=1)
        how = dict(softmax_scale=scale_of(softmax_scale, c.d_k), backend=backend, flags=flags)
        blocks = self._own_blocks(self.max_len if self.emit_always else self.length)
        a_query = self.batch * c.groups * blocks * self.world * self._per_block("cmp")
        some = max(_MOST_PROBABILITIES // max(a_query, 1), 1)
        parts = []
        with dispatch._inputs_decide(q.device):  # no autocast of scores
            for first in range(0, T, some):
                last = min(first + some, T)
                rows = slice(first, last)
                near = window and tuple(x[:, : x.shape[1] - T + last] for x in window)
                position = self.lens.long()[:, None] + torch.arange(
                    first - T, last - T, device=q.device
                )
                parts.append(self._attend(q[:, rows], position, near, gates[:, rows], blocks, how))
        outs, chosen = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(chosen, 1)

    def _attend(
        self,
        q: Tensor,
        position: Tensor,
        window: tuple[Tensor, Tensor] | None,
        gates: Tensor,
        blocks: int,
        how: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries q [B, T, HQ, Dk] at position [B, T]; a rank's probabilities are
        those of `blocks` blocks."""
        c, group = self.config, self.group
        seen = self._held("cmp", visible_compressed(position, c.l, c.d))
        spans = self._ranges(torch.zeros_like(seen)[..., None], seen[..., None])
        cmp, lse = selection_attention(
            q, self.k_cmp, self.v_cmp, ranges=spans, return_lse=True, **how
        )
        normalisers = exchange.all_gather(lse[None], group, "normalisers")
        if window is None:
            win = self._slide(q, position, how)
        else:
            win = sliding_attention(q, *window, window=c.window, **how)
        total = exchange.finish(normalisers).logsumexp(0)
        own = self._probabilities(q, total, seen, blocks, how)
        every = exchange.finish(exchange.all_gather(own[None], group, "probabilities"))
        chosen = self._choose(every, position)
        sel, lse_sel = selection_attention(
            q, self.k_sel, self.v_sel, ranges=self._own_ranges(chosen, position), return_lse=True,
            **how,
        )  # fmt: skip
        parts = torch.stack([cmp, sel]).to(lse.dtype)
        parts = torch.cat([parts, torch.stack([lse, lse_sel])[..., None]], -1)
        outs = _merge(exchange.finish(exchange.all_gather(parts[None], group, "outputs")))
        return gated_sum(gates, outs[0], outs[1], win).to(q.dtype), chosen

    def _ranges(self, start: Tensor, end: Tensor) -> Tensor:
        """[B, T, n] -> int32 [B, T, G, n, 2], the same for every group."""
        ranges = torch.stack([start, end], -1).int()[:, :, None]
        return ranges.expand(-1, -1, self.config.groups, -1, -1).contiguous()

    def _slide(self, q: Tensor, position: Tensor, how: dict[str, Any]) -> Tensor:
        """Attention to the window of each query, which may go around the ring's end."""
        rows, n = self.k_win.shape[1], (position + 1).clamp(max=self.config.window)
        start = (position + 1 - n) % rows
        end = start + n
        zero = torch.zeros_like(start)
        spans = self._ranges(
            torch.stack([start, zero], -1), torch.stack([end.clamp(max=rows), end - rows], -1)
        )
        return selection_attention(q, self.k_win, self.v_win, ranges=spans, **how)

    def _probabilities(
        self, q: Tensor, lse: Tensor, seen: Tensor, blocks: int, how: dict[str, Any]
    ) -> Tensor:
        """Probabilities of the first rows of k_cmp, those of `blocks` blocks, of which each query
        sees `seen`; summed over the heads of a group: [B, T, G, rows]."""
        c, scale, rows = self.config, how["softmax_scale"], blocks * self._per_block("cmp")
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.unflatten(2, (c.groups, -1)).to(wide), self.k_cmp[:, :rows].to(wide)
        scores = torch.einsum("bsghd,bngd->bsghn", q, k) * scale
        unseen = torch.arange(rows, device=q.device) >= seen[..., None, None, None]
        p = (scores - lse.unflatten(2, (c.groups, -1))[..., None]).exp()
        return p.masked_fill(unseen, 0).sum(3)

    def _choose(self, every: Tensor, position: Tensor) -> Tensor:
        """Blocks int32 [B, T, G, n_sel] by all ranks' probabilities [W, B, T, G, rows]."""
        c = self.config
        by_block = every.unflatten(-1, (-1, self._per_block("cmp"))).movedim(0, -2)
        scores = select._pooled(by_block.flatten(3), c.l, c.d, c.l_sel, by_block.shape[3:5].numel())
        return select.top_blocks(
            scores, l_sel=c.l_sel, n_sel=c.n_sel, n_init=c.n_init, n_local=c.n_local,
            q_start=position[:, :1],
        )  # fmt: skip

    def _own_ranges(self, chosen: Tensor, position: Tensor) -> Tensor:
        """Rows of k_sel that are this rank's of the chosen blocks; (0, 0) for those of others."""
        size = self.config.l_sel
        start = chosen // self.world * size
        length = (position[..., None, None] + 1 - chosen * size).clamp(max=size)
        own = (chosen >= 0) & (chosen % self.world == self.rank)
        return torch.stack([start, start + length], -1).masked_fill(~own[..., None], 0).int()


def _merge(parts: Tensor) -> Tensor:
    """Outputs [..] of parts [W, .., Dv + 1], whose last column is their lse: 0 where no part has
    keys."""
    out, lse = parts[..., :-1], parts[..., -1:]
    top = lse.amax(0)
    weight = (lse - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weight.sum(0)
    return (weight * out).sum(0) / total.masked_fill(total == 0, 1)
