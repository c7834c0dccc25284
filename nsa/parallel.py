"""Context parallelism: one sequence over the ranks of a torch.distributed group, forward and back.

The sequence is cut into 2 * W chunks and rank r of W holds chunks r and 2 * W - 1 - r, so that
every rank has early and late queries and the causal work is even. Keys and values travel, queries
do not: those of the selection branch are gathered whole; the compressed ones, d times fewer, after
each rank compressed its own; of the window only the last w - 1 tokens of every chunk. Each chunk is
then a call of nsa_attention with its q_start: the kernels, the routes and the choice of blocks are
those of one GPU. Backward adds the gradients of gathered tensors up with reduce-scatter, in fp32
for half precision.

The selection branch's keys and values travel beside compressed attention, the choice of blocks and
the window; only the attention of the selected blocks waits for them (nsa/arrival.py).

Gradients of parameters (projections, phi) are each rank's part: sum them over the group. Every
rank must run the backward pass.

    >>> from nsa import NSAConfig
    >>> world = dict(rank=0, world_size=1)  # torchrun sets them
    >>> dist.init_process_group("gloo", store=dist.HashStore(), **world)
    >>> config = NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, window=16)
    >>> layer, x = NSAAttention(config), torch.randn(1, 64, 32)  # the whole sequence
    >>> y = nsa_layer_parallel(layer, shard(x))
    >>> torch.testing.assert_close(unshard(y), layer(x))
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nsa import exchange
from nsa.arguments import FLOATS, check_tensor
from nsa.arrival import selection_waits
from nsa.attention import nsa_attention
from nsa.blocks import num_compressed
from nsa.cache import BranchKV
from nsa.checks import scale_of
from nsa.config import check_sizes
from nsa.device import resolve_flags
from nsa.dispatch import Backend, parse_backend
from nsa.exchange import Group, resolve_group
from nsa.flags import Flags
from nsa.module import NSAAttention
from nsa.parallel_cache import ParallelNSACache
from nsa.untraced import untraced

Compression = Callable[[Tensor], Tensor]
_MAX_NDIM = 8


def chunk_length(S: int, world: int) -> int:
    """Tokens per chunk of a sequence of S tokens. ValueError unless 2 * world divides S."""
    if S < 1 or S % (2 * world):
        raise ValueError(
            f"the sequence must be a multiple of 2 * world size = {2 * world} tokens, got {S}; "
            "padding at its end changes no earlier output"
        )
    return S // (2 * world)


def chunks_of(rank: int, world: int) -> tuple[int, int]:
    """The two chunks, of 2 * world, that a rank holds."""
    return rank, 2 * world - 1 - rank


def positions(S: int, group: Group = None, device: torch.device | str | None = None) -> Tensor:
    """int64 [S / W]: where this rank's tokens stand in the whole sequence of S tokens."""
    group = resolve_group(group)
    c = chunk_length(S, group.size())
    chunk = torch.arange(c, device=device)
    return torch.cat([chunk + c * j for j in chunks_of(group.rank(), group.size())])


def _check_dim(x: Tensor, dim: int) -> None:
    """Raise TypeError or ValueError unless x is a tensor with dimension `dim`."""
    check_tensor("x", x)
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dimension of x, of shape {list(x.shape)}, got {dim!r}")


def shard(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """This rank's two chunks of x, whose dimension `dim` is the whole sequence. Differentiable.

    Raises TypeError or ValueError that names the argument.
    """
    group = resolve_group(group)
    _check_dim(x, dim)
    c = chunk_length(x.shape[dim], group.size())
    return torch.cat([x.narrow(dim, c * j, c) for j in chunks_of(group.rank(), group.size())], dim)


@torch.no_grad()
def unshard(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """The whole of a tensor that shard() cut, on every rank. No gradient.

    Ranks compare shape, dtype and device type first: what differs is a ValueError on each of them.
    """
    group = resolve_group(group)
    world = group.size()

    def describe() -> list[int]:
        _check_dim(x, dim)
        if x.shape[dim] % 2 or x.ndim > _MAX_NDIM:
            raise ValueError(f"x must hold two chunks along dim {dim}, got shape {list(x.shape)}")
        kind = zlib.crc32(f"{x.dtype} {x.device.type}".encode())
        return [dim % x.ndim, kind, *x.shape, *[-1] * (_MAX_NDIM - x.ndim)]

    every = exchange.agree(describe, 2 + _MAX_NDIM, group, "x")
    for rank, row in enumerate(every):
        if row != every[0]:
            shape = lambda r: [n for n in every[r][2:] if n >= 0]
            raise ValueError(
                f"ranks must agree on x's shape, dtype, device type and dim: rank {rank} has "
                f"{shape(rank)}, rank 0 {shape(0)}, here {x.dtype} on {x.device.type} and dim {dim}"
            )
    parts = x.movedim(dim, 0).unflatten(0, (2, -1)).contiguous()
    whole = exchange.finish(exchange.all_gather(parts, group, "x"))
    return exchange.in_order(whole.view(world, *parts.shape), 0).flatten(0, 1).movedim(0, dim)


_NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


def _check_local(tensors: tuple[Tensor, ...], sizes: dict[str, int], world: int) -> None:
    """What a rank can see alone; the rest is nsa_attention's to check."""
    for name, x in zip(_NAMES, tensors, strict=True):
        check_tensor(name, x)
        if x.ndim != 4 or x.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be [B, S / W, heads, D] in a float dtype, got {list(x.shape)} "
                f"{x.dtype}"
            )
        if x.shape[:2] != tensors[0].shape[:2]:
            raise ValueError(
                f"{name} must have q's B and S / W {list(tensors[0].shape[:2])}, got "
                f"{list(x.shape[:2])}"
            )
    l, d = sizes["l"], sizes["d"]
    check_sizes(**sizes)
    tokens = tensors[0].shape[1]
    c = tokens // 2
    if tokens % 2 or tokens == 0 or c % d or c < l - d:
        raise ValueError(
            f"q must hold two chunks of a multiple of d={d} and at least l - d = {l - d} tokens: "
            f"S must be a multiple of 2 * W * d = {2 * world * d}, got {tokens} tokens per rank; "
            "padding at the sequence's end changes no earlier output"
        )


class _Call(NamedTuple):
    """A rank's call of nsa_attention_parallel. sizes, softmax_scale, backend, flags:
    nsa_attention's; config, cache: words for what a layer was given, on which ranks must agree."""

    tensors: tuple[Tensor, ...]
    phi_k: Compression
    phi_v: Compression
    sizes: dict[str, int]
    softmax_scale: float | None
    backend: Backend | None
    flags: Flags | None
    config: str = "none"
    cache: str = "none"


def _agree_on_arguments(make: Callable[[], _Call], group: dist.ProcessGroup) -> _Call:
    """make(), checked on this rank and equal in kind on all of them."""
    made: list[_Call] = []
    rest = "the sizes, softmax_scale, backend and grad mode"

    def describe() -> dict[str, str]:
        made.append(make())
        call = made[0]
        _check_local(call.tensors, call.sizes, group.size())
        q = call.tensors[0]
        resolve_flags(call.flags, q)
        route, grad = parse_backend(call.backend), torch.is_grad_enabled()
        kinds = {
            name: f"{list(x.shape)} {x.dtype} on {x.device.type} requires_grad={x.requires_grad}"
            for name, x in zip(_NAMES, call.tensors, strict=True)
        }
        kinds[rest] = (
            f"sizes {call.sizes}, softmax_scale {scale_of(call.softmax_scale, q.shape[-1])}, "
            f"backend {route and route.value}, grad mode {grad}"
        )
        return kinds | dict(flags=repr(call.flags), config=call.config, cache=call.cache)

    names = [*_NAMES, rest, "flags", "config", "cache"]
    exchange.agree_on(describe, names, group, "arguments")
    return made[0]


def _before(tails: Tensor, chunk: int, c: int, window: int) -> Tensor:
    """The window - 1 tokens before a chunk, if there are as many, from tails [B, 2W, h, G, D]."""
    need = min(window - 1, chunk * c)
    if need == 0:
        return tails[:, 0, :0]
    back = -(-need // tails.shape[2])
    return tails[:, chunk - back : chunk].flatten(1, 2)[:, -need:]


def nsa_attention_parallel(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, phi_k: Compression, phi_v: Compression, group: Group = None,
    l: int = 32, d: int = 16, l_sel: int = 64, n_sel: int = 16, n_init: int = 1, n_local: int = 2,
    window: int = 512, softmax_scale: float | None = None, backend: Backend | None = None,
    flags: Flags | None = None, return_aux: bool = False, check: bool = True,
) -> Tensor | tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """nsa_attention of one sequence spread over the ranks of `group` (see shard).

    q [B, S / W, HQ, Dk], gates [B, S / W, HQ, 3]; keys and values [B, S / W, G, D] of the three
    branches. k_cmp and v_cmp are RAW here, where nsa_attention's are compressed: a block may reach
    into the next chunk, so phi_k and phi_v compress after those tokens came over,
    [B, n, G, D] -> [B, num_compressed(n), G, D] (nsa.compress). group: a ProcessGroup, a 1-D
    DeviceMesh, or None for all ranks. S is a multiple of 2 * W * d. Returns this rank's rows of
    out [B, S / W, HQ, Dv]; with return_aux also {"block_indices", "lse", "routes"} of these rows.

    check: compare the arguments, and what phi gave, of all ranks first, so that an error on one is
    an error on each; it waits for the device, so switch it off once shapes are settled. Attention
    itself is not compared: where one rank alone fails in it, or dies, the others meet that in
    their next exchange (of backward, for example). On gloo they end with RuntimeError, at the
    latest after the group's timeout; on NCCL the watchdog by default ends their processes then
    (TORCH_NCCL_ASYNC_ERROR_HANDLING).
    """
    sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, window=window)
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    call = _Call(tensors, phi_k, phi_v, sizes, softmax_scale, backend, flags)
    return _parallel(lambda: call, resolve_group(group), return_aux, check)


def _parallel(
    make: Callable[[], _Call], group: dist.ProcessGroup, return_aux: bool, check: bool
) -> Tensor | tuple[Tensor, dict[str, Any]]:
    """nsa_attention_parallel of the call that make() gives; what make() raises is an error on every
    rank, with `check`."""
    world, rank = group.size(), group.rank()
    call = _agree_on_arguments(make, group) if check else make()
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = call.tensors
    sizes = call.sizes
    l, d, window = sizes["l"], sizes["d"], sizes["window"]
    c = q.shape[1] // 2
    tail = min(window - 1, c)

    # Edges first: phi needs the first l - d tokens of the next chunk.
    edge = lambda x, part: x.unflatten(1, (2, -1))[:, :, part].flatten(1, 2)
    cut = [edge(x, slice(l - d)) for x in (k_cmp, v_cmp)]
    cut += [edge(x, slice(c - tail, None)) for x in (k_win, v_win)]
    landings: list[exchange.Landing] = []
    names = [f"{x}_{branch}" for branch in ("cmp", "win") for x in "kv"]
    edges = exchange.GatherInOrder.apply(group, names, landings, *cut)
    exchange.land(landings)
    heads_k, heads_v, tails_k, tails_v = (x.unflatten(1, (2 * world, -1)) for x in edges)

    mine = chunks_of(rank, world)
    compressed: list[Tensor] = []

    def compress() -> list[int]:
        for name, x, heads, phi, width in (
            ("phi_k", k_cmp, heads_k, call.phi_k, q.shape[-1]),
            ("phi_v", v_cmp, heads_v, call.phi_v, v_sel.shape[-1]),
        ):
            # What would follow the last chunk is zeros: blocks that reach there are cut off below.
            heads = torch.cat([heads, heads.new_zeros(heads[:, :1].shape)], 1)
            follow = torch.stack([heads[:, j + 1] for j in mine], 1)
            got = phi(torch.cat([exchange.halves(x)[0], follow], 2).flatten(0, 1))
            want = [2 * q.shape[0], c // d, k_sel.shape[2], width]
            if not isinstance(got, Tensor):
                raise TypeError(f"{name} must give a tensor, got {type(got).__name__}")
            if (list(got.shape), got.dtype, got.device) != (want, q.dtype, q.device):
                raise ValueError(
                    f"{name} must give {want} in {q.dtype} on {q.device} for {2 * q.shape[0]} "
                    f"chunks of {c + l - d} tokens, got {list(got.shape)} in {got.dtype} on "
                    f"{got.device}"
                )
            compressed.append(got.unflatten(0, (-1, 2)).flatten(1, 2))
        return [int(x.requires_grad) for x in compressed]

    if not check:
        compress()
    else:
        every = exchange.agree(compress, 2, group, "compression")
        if any(row != every[0] for row in every):
            raise ValueError("ranks must agree on whether phi_k and phi_v have gradients")
    small: list[exchange.Landing] = []
    names = ["compressed k", "compressed v"]
    k_all, v_all = exchange.GatherInOrder.apply(group, names, small, *compressed)
    k_far, v_far = exchange.GatherInOrder.apply(group, ("k_sel", "v_sel"), landings, k_sel, v_sel)
    with selection_waits(lambda: exchange.land(landings)):
        exchange.land(small)
        if q.shape[0] > 1:  # the start of several sequences is a copy: they must be there for it
            exchange.land(landings)
        near = (tails_k, k_win), (tails_v, v_win)
        how = dict(softmax_scale=call.softmax_scale, backend=call.backend, flags=call.flags)
        return _attend(q, (k_all, v_all), (k_far, v_far), near, gates, mine, sizes, how, return_aux)


@untraced  # a compiled nsa_attention would not wait for keys that are on their way
def _attend(
    q: Tensor, cmp: tuple[Tensor, Tensor], sel: tuple[Tensor, Tensor],
    near: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], gates: Tensor,
    mine: tuple[int, int], sizes: dict[str, Any], how: dict[str, Any], return_aux: bool,
) -> Tensor | tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """This rank's two chunks, with the compressed and the selection branch's keys and values of all
    of them, and for the window (every chunk's tails, this rank's own) of both."""
    window, c = sizes["window"], q.shape[1] // 2
    outs, auxes = [], []
    for half, j in enumerate(mine):
        rows = slice(half * c, (half + 1) * c)
        end = (j + 1) * c
        seen = num_compressed(end, sizes["l"], sizes["d"])
        keys = [x[:, :seen] for x in cmp] + [x[:, :end] for x in sel]
        keys += [torch.cat([_before(tails, j, c, window), x[:, rows]], 1) for tails, x in near]
        out, aux = nsa_attention(  # type: ignore[call-overload]
            q[:, rows], *keys, gates[:, rows], q_start=j * c, return_aux=True, **sizes, **how
        )
        outs.append(out)
        auxes.append(aux)
    out = torch.cat(outs, 1)
    if not return_aux:
        return out
    aux = {n: torch.cat([a[n] for a in auxes], 1) for n in ("block_indices", "lse")}
    early, late = (a["routes"] for a in auxes)
    return out, {**aux, "routes": merge_routes(early, late)}


def merge_routes(early: dict[str, str], late: dict[str, str]) -> dict[str, str]:
    """aux["routes"] of both chunks: a branch where they differ has "early+late" routes."""
    return {
        branch: late[branch] if early[branch] == late[branch] else f"{early[branch]}+{late[branch]}"
        for branch in late
    }


def nsa_layer_parallel(
    layer: NSAAttention,
    x: Tensor,
    group: Group = None,
    *,
    cache: ParallelNSACache | None = None,
    check: bool = True,
) -> Tensor:
    """layer(x) with x [B, S / W, dim] of each rank (see shard); returns this rank's rows.

    cache: empty, of the same group; it takes up the sequence, and layer.step(x, cache) then decodes
    with the same tokens on every rank. Each rank has the whole keys and values of all branches for
    that time. check: as for nsa_attention_parallel; the projections are made inside of it.
    """
    group = resolve_group(group)
    new: list[BranchKV] = []

    def project() -> _Call:
        # That of torch.compile passes on to the layer inside of it.
        if not isinstance(getattr(layer, "_orig_mod", layer), NSAAttention):
            raise TypeError(f"layer must be an nsa.NSAAttention, got {type(layer).__name__}")
        layer._check(x, 3)
        if cache is not None:
            if not isinstance(cache, ParallelNSACache) or cache.group is not group:
                raise ValueError(f"cache must be a ParallelNSACache of this group, got {cache!r}")
            layer._check_cache(cache)
            if cache.length:
                raise ValueError(f"cache must be empty, it holds {cache.length} tokens")
        q, kv = layer._project(x, positions(x.shape[1] * group.size(), group, x.device))
        new.append(kv)
        return _Call(
            (q, kv.k_cmp, kv.v_cmp, kv.k_sel, kv.v_sel, kv.k_win, kv.v_win, layer.gate(x)),
            layer.phi_k, layer.phi_v, layer.config.sizes(), None, layer.backend, layer.flags,
            config=repr(layer.config), cache="none" if cache is None else "given",
        )  # fmt: skip

    out = _parallel(project, group, False, check)
    assert isinstance(out, Tensor)
    out = out.flatten(-2)
    if cache is None:
        return layer.out(out)
    whole = {name: unshard(kv, group) for name, kv in vars(new[0]).items()}
    with cache.kept_if_raised(whole["k_sel"]):
        cache.append(BranchKV(**whole), layer.phi_k, layer.phi_v)
        return layer.out(out)
