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
    2. probabilities of a rank's compressed tokens in the softmax over all of them, summed over the
       heads of a group (Eq. 10): S / (d * W) numbers of 4 bytes for each of G groups (in a CUDA
       graph S is max_len). Each rank then has those of all tokens and makes the same choice
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

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, exchange, fp8, select
from nsa.attention import gated_sum, selection_attention, sliding_attention
from nsa.blocks import num_sel_blocks, visible_compressed
from nsa.cache import NSACache
from nsa.checks import autocast_on, scale_of
from nsa.config import NSAConfig
from nsa.dispatch import Backend, Branch, Route
from nsa.exchange import Group, resolve_group
from nsa.flags import Flags
from nsa.fp8 import KVCacheDtype

Window = tuple[Tensor, Tensor] | None  # keys and values, None where the cache has them
_MOST_PROBABILITIES = 1 << 26  # of all ranks that are exchanged at a time: 256 MiB

_ALIKE = ("max_step", "growable", "kv_cache_dtype")
_SETTINGS = ("config", "batch", "max_len", "dtype", *_ALIKE)


class ParallelNSACache(NSACache):
    """NSACache of `batch` sequences over the ranks of `group`: layer.prefill, layer.step and what
    calls them take it as they take an NSACache, with the same tokens on every rank.

    A rank's k_sel, v_sel [B, rows + 1, G, D] hold l_sel tokens of every W-th block, its k_cmp and
    v_cmp the compressed tokens that begin there; the last row takes what other ranks keep. Window,
    raw keys and lens are those of NSACache. group: a ProcessGroup, a 1-D DeviceMesh, or None for
    all ranks. The other arguments and what is kept are as for NSACache, but that it counts no
    reads. FP8 halves the memory, not the time: numbers are made of it before they are attended.
    append() takes whole tokens; nsa.parallel.nsa_layer_parallel(cache=) those of shards.

    check: ranks compare sizes, lengths, dtypes, autocast, backend, flags and a layer's config
    before each step, so that an error on one is an error (ValueError or TypeError) on each. It
    waits for the device unless the group has a backend for the CPU ("cpu:gloo,cuda:nccl"): set it
    to False once shapes are settled. A captured step does not compare. Without it, and where a rank
    dies, the others meet that in their next exchange: ExchangeFailed on gloo; on NCCL the watchdog
    ends their processes after the group's timeout.
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
        kv_cache_dtype: KVCacheDtype = "auto",
        k_descale: float | Tensor | None = None,
        v_descale: float | Tensor | None = None,
    ) -> None:
        self.group = resolve_group(group)
        self.world, self.rank, self.check = self.group.size(), self.group.rank(), check
        how: dict[str, Any] = dict(
            device=device, dtype=dtype, max_step=max_step, growable=growable,
            kv_cache_dtype=kv_cache_dtype, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip

        def describe() -> dict[str, Any]:
            NSACache.__init__(self, config, batch, max_len, **how)
            mine = {name: getattr(self, name) for name in _SETTINGS}
            descales = [getattr(self, name).tolist() for name in self._descales()]
            return {**mine, "device type": self.device.type, "descales": descales}

        names = (*_SETTINGS, "device type", "descales")
        exchange.agree_on(describe, names, self.group, "cache")

    def _empty(self, batch: int, max_len: int) -> NSACache:
        how: dict[str, Any] = dict(device=self._like["device"], dtype=self.dtype)
        how |= {name: getattr(self, name) for name in (*_ALIKE, "check")}
        return ParallelNSACache(self.config, batch, max_len, group=self.group, **how)

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

    def _store(self, name: str, first: int, x: Tensor) -> None:
        at = self._places(name[2:], torch.arange(first, first + x.shape[1], device=x.device))
        buffer = getattr(self, name)
        kept = (at < buffer.shape[1] - 1).nonzero()[:, 0]
        fp8.as_bytes(buffer)[:, at[kept]] = fp8.as_bytes(self._stored(name, x[:, kept]))

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: no rank has all compressed tokens."""
        raise NotImplementedError("compressed(): the tokens of a ParallelNSACache lie over ranks")

    def selectable(self) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: no rank has all tokens."""
        raise NotImplementedError("selectable(): the tokens of a ParallelNSACache lie over ranks")

    def agree(self, describe: Any) -> None:
        """Raise what describe() raises, which checks a step's arguments and tells their sizes; with
        `check` ValueError on every rank unless all ranks' sizes, lengths and autocast are equal."""
        if not self.check or self.k_sel.is_cuda and torch.cuda.is_current_stream_capturing():
            describe()
            return
        names = ("batch", "lengths", "max_len")

        def step() -> dict[str, Any]:
            mine = {name: getattr(self, name) for name in names}
            on = autocast_on(self.device)
            autocast = torch.get_autocast_dtype(self.device.type) if on else None
            return {"step": describe(), "autocast": autocast, **mine}

        exchange.agree_on(step, ("step", "autocast", *names), self.group, "step")

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
        flags = _any_keys_by_kernel(flags)
        how = dict(softmax_scale=scale_of(softmax_scale, c.d_k), backend=backend, flags=flags)
        room = self._own_blocks(self.max_len if self.emit_always else self.length)
        rows = room * self._per_block("cmp")
        some = max(_MOST_PROBABILITIES // max(self.batch * c.groups * rows * self.world, 1), 1)
        parts = []
        with dispatch.trace_step(), dispatch._inputs_decide(q.device):  # no autocast of scores
            for first in range(0, max(T, 1), some):
                here = slice(first, min(first + some, T))
                near = None
                if window is not None:
                    n = window[0].shape[1] - T + here.stop  # up to the last of these queries
                    near = window[0][:, :n], window[1][:, :n]
                parts.append(self._attend(q[:, here], first - T, near, gates[:, here], rows, how))
        outs, chosen = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(chosen, 1)

    def _attend(
        self, q: Tensor, first: int, window: Window, gates: Tensor, rows: int, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries q [B, T, HQ, Dk], the first of which stands at lens + first; `rows`
        of k_cmp hold all of a rank's compressed tokens."""
        c, group, rank, lens = self.config, self.group, self.rank, self.lens
        by = functools.partial(self._by, q, how["backend"], how["flags"])
        cmp_spans, win_spans = by(
            "spans", lens, first, q.shape[1], c, rank, self.world, self.k_win.shape[1]
        )
        with_lse = dict(how, return_lse=True)
        k_cmp, v_cmp = self._numbers(by, "cmp", rows, cmp_spans)
        cmp, lse = selection_attention(q, k_cmp, v_cmp, ranges=cmp_spans, **with_lse)
        normalisers = exchange.all_gather(lse[None], group, "normalisers")
        if window is None:
            near = self._numbers(by, "win", self.k_win.shape[1])
            win = selection_attention(q, *near, ranges=win_spans, **how)
        else:
            win = sliding_attention(q, *window, window=c.window, **how)
        lses = exchange.finish(normalisers)
        p = by("probabilities", q, k_cmp, lses, cmp_spans, rows, how["softmax_scale"])
        every = exchange.finish(exchange.all_gather(p[None], group, "probabilities"))
        chosen, sel_spans = by("choose", every, lens, first, c, rank)
        sel, lse_sel = self._selected(by, q, sel_spans, with_lse)
        parts = lse.new_empty(1, 2, *cmp.shape[:-1], c.d_v + 1)
        for part, out, of in ((parts[0, 0], cmp, lse), (parts[0, 1], sel, lse_sel)):
            part[..., :-1] = out
            part[..., -1] = of
        parts = exchange.finish(exchange.all_gather(parts, group, "outputs"))
        return by("merge", parts, win, gates), chosen

    def _numbers(
        self, by: Any, kind: str, size: int, spans: Tensor | None = None, apart: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a branch as attention takes them. Of FP8 they are made anew in every
        step, which only compressed ones, a sixteenth of all, the window and chosen blocks can
        afford."""
        k, v = getattr(self, f"k_{kind}"), getattr(self, f"v_{kind}")
        if not self._descales():
            return k, v
        return by("numbers", k, v, *self.descales, self.dtype, size, spans, apart)

    def _selected(
        self, by: Any, q: Tensor, spans: Tensor, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention to the rows of k_sel and v_sel in spans [B, T, G, n_sel, 2], and its lse. Of
        FP8 each query's own rows become numbers, as if it were a sequence."""
        if not self._descales():
            return selection_attention(q, self.k_sel, self.v_sel, ranges=spans, **how)
        T, size = q.shape[1], self.config.l_sel
        begin = torch.arange(spans.shape[3], device=q.device, dtype=torch.int32) * size
        ends = begin + spans[..., 1] - spans[..., 0]
        ranges = torch.stack([begin.expand_as(ends), ends], -1).flatten(0, 1)[:, None]
        alone = q.flatten(0, 1)[:, None], *self._numbers(by, "sel", size, spans, True)
        out, lse = selection_attention(*alone, ranges=ranges, **how)
        return out.view(-1, T, *out.shape[2:]), lse.view(-1, T, lse.shape[-1])

    def _by(self, q: Tensor, backend: Backend | None, flags: Flags, name: str, *args: Any) -> Any:
        """Function `name` of this module, or the kernel of that name where kernels serve q."""
        choice = dispatch.kernel_or_reference(backend)
        request = dispatch.make_request(
            Branch.BLOCKS, q, self.k_cmp, self.v_cmp, None, flags, choice
        )

        def by_kernel() -> Any:
            from nsa.kernels.decode import parallel

            return getattr(parallel, name)(*args)

        rungs = {Route.TRITON: by_kernel, Route.REFERENCE: lambda: globals()[name](*args)}
        return dispatch.guarded(request, rungs, flags, choice, (name, args))[0]


@functools.cache
def _any_keys_by_kernel(flags: Flags) -> Flags:
    """Return these flags, by which any number of keys is worth a kernel: it waits for nothing, and
    the lengths are on the device."""
    return replace(flags, sel_triton_min_L=1)


def _positions(lens: Tensor, first: int, T: int) -> Tensor:
    """int64 [B, T]: where T queries stand, the first of them at lens + first."""
    return lens.long()[:, None] + torch.arange(first, first + T, device=lens.device)


def spans(
    lens: Tensor, first: int, T: int, config: NSAConfig, rank: int, world: int, ring: int
) -> tuple[Tensor, Tensor]:
    """Rows that each query attends: of this rank's k_cmp, int32 [B, T, G, 1, 2], and of the window
    in a ring of `ring` rows, which may go around its end, [B, T, G, 2, 2]."""
    c, position = config, _positions(lens, first, T)
    per_block = c.l_sel // c.d
    seen = visible_compressed(position, c.l, c.d)
    turns = seen // (per_block * world)
    rest = (seen - turns * (per_block * world) - rank * per_block).clamp(0, per_block)
    n = (position + 1).clamp(max=c.window)
    start = (position + 1 - n) % ring
    end, zero = start + n, torch.zeros_like(n)

    def of_all(*ends: Tensor) -> Tensor:
        of_one = torch.stack(ends, -1).int().unflatten(-1, (-1, 2))[:, :, None]
        return of_one.expand(-1, -1, c.groups, -1, -1).contiguous()

    window = of_all(start, end.clamp(max=ring), zero, (end - ring).clamp(min=0))
    return of_all(zero, turns * per_block + rest), window


def probabilities(
    q: Tensor, k_cmp: Tensor, lses: Tensor, cmp: Tensor, rows: int, scale: float
) -> Tensor:
    """Probabilities of the first `rows` compressed tokens of this rank, summed over the heads of a
    group: [B, T, G, rows]. lses [W, B, T, HQ] of all ranks; cmp as spans() gives it."""
    groups = k_cmp.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.unflatten(2, (groups, -1)).to(wide), k_cmp[:, :rows].to(wide)
    scores = torch.einsum("bsghd,bngd->bsghn", q, k) * scale
    unseen = torch.arange(rows, device=q.device) >= cmp[..., 1:]  # [B, T, G, 1, rows]
    p = (scores - lses.logsumexp(0).unflatten(2, (groups, -1))[..., None]).exp()
    return p.masked_fill(unseen, 0).sum(3)


def choose(
    every: Tensor, lens: Tensor, first: int, config: NSAConfig, rank: int
) -> tuple[Tensor, Tensor]:
    """The blocks that each query attends, int32 [B, T, G, n_sel], by all ranks' probabilities
    [W, B, T, G, rows]; and the rows of this rank's k_sel among them, [B, T, G, n_sel, 2]: (0, 0)
    for blocks of others."""
    c, world, position = config, len(every), _positions(lens, first, every.shape[2])
    by_block = every.unflatten(-1, (-1, c.l_sel // c.d)).movedim(0, -2)  # [.., blocks, W, tokens]
    n_blocks = by_block.shape[3] * world
    choice = dict(l_sel=c.l_sel, n_sel=c.n_sel, n_init=c.n_init, n_local=c.n_local)
    scores = select._pooled(by_block.flatten(3), c.l, c.d, c.l_sel, n_blocks)
    chosen = select.top_blocks(scores, **choice, q_start=position[:, :1])
    start = chosen // world * c.l_sel
    length = (position[..., None, None] + 1 - chosen * c.l_sel).clamp(max=c.l_sel)
    other = (chosen < 0) | (chosen % world != rank)
    own = torch.stack([start, start + length], -1).masked_fill(other[..., None], 0)
    return chosen, own.int()


def numbers(
    k: Tensor, v: Tensor, k_descale: Tensor, v_descale: Tensor, dtype: torch.dtype, size: int,
    spans: Tensor | None, apart: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the keys and values, in dtype, that rows of e4m3 k and v [B, R, G, D] stand for. With
    `apart` they are those in each query's spans [B, T, G, n, 2] of at most `size` rows,
    [B * T, n * size, G, D], and zeros behind a shorter span. Without it they are the first `size`
    rows, [B, size, G, D]; where spans are given, nobody reads rows behind the first span of a
    sequence's last query."""
    caches = (k, k_descale), (v, v_descale)
    if not apart:
        k, v = (fp8.dequantize(x[:, :size], descale, dtype) for x, descale in caches)
        return k, v
    assert spans is not None
    B, T, G, n, _ = spans.shape
    first, end = spans.long().unbind(-1)
    rows = first[..., None] + torch.arange(size, device=k.device)  # [B, T, G, n, size]
    there = (rows < end[..., None]).movedim(2, 4).reshape(B * T, n * size, G, 1)
    rows = rows.clamp(max=k.shape[1] - 1).flatten(3).transpose(2, 3).flatten(1, 2)
    batch = torch.arange(B, device=k.device)[:, None, None]
    group = torch.arange(G, device=k.device)

    def own(x: Tensor, descale: Tensor) -> Tensor:
        some = fp8.as_bytes(x)[batch, rows, group].view(fp8.E4M3)  # [B, T * n * size, G, D]
        some = fp8.dequantize(some, descale, dtype)
        return some.view(B * T, n * size, G, -1).masked_fill(~there, 0)

    return own(*caches[0]), own(*caches[1])


def merge(parts: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """The gated sum (Eq. 5) of win and of the compressed and the selection branch, which come as
    parts [W, 2, B, T, HQ, Dv + 1] of all ranks; the last column is a part's lse."""
    out, lse = parts[..., :-1], parts[..., -1:]
    top = lse.amax(0)
    weight = (lse - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weight.sum(0)
    cmp, sel = (weight * out).sum(0) / total.masked_fill(total == 0, 1)
    return gated_sum(gates, cmp, sel, win).to(win.dtype)
