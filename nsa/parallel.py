"""Context parallelism: one sequence over the ranks of a torch.distributed group, forward and back.

The sequence is cut into 2 * W chunks and rank r of W holds chunks r and 2 * W - 1 - r, so that
every rank has early and late queries and the causal work is even. Keys and values travel, queries
do not: those of the selection branch are gathered whole; the compressed ones, d times fewer, after
each rank compressed its own; of the window only the last w - 1 tokens of every chunk. Each chunk is
then a call of nsa_attention with its q_start: the kernels, the routes and the choice of blocks are
those of one GPU. Backward adds the gradients of gathered tensors up with reduce-scatter, in fp32
for half precision.

Gradients of parameters (projections, phi) are each rank's part: sum them over the group. Every
rank must run the backward pass.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.attention import nsa_attention
from nsa.blocks import num_compressed
from nsa.config import check_blocks
from nsa.flags import Flags
from nsa.module import NSAAttention

Group = dist.ProcessGroup | DeviceMesh | None
Compression = Callable[[Tensor], Tensor]

# ---- who holds what ------------------------------------------------------------------------------


def resolve_group(group: Group) -> dist.ProcessGroup:
    """The process group of `group`: itself, that of a 1-D DeviceMesh, or the default one.

    Raises RuntimeError without torch.distributed, ValueError for a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed is not initialised; run under torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh such as mesh['context'], got {group.ndim}-D"
            )
        return group.get_group()
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or DeviceMesh, got {type(group).__name__}")
    return group


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


def shard(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """This rank's two chunks of x, whose dimension `dim` is the whole sequence. Differentiable."""
    group = resolve_group(group)
    c = chunk_length(x.shape[dim], group.size())
    return torch.cat([x.narrow(dim, c * j, c) for j in chunks_of(group.rank(), group.size())], dim)


@torch.no_grad()
def unshard(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """The whole of a tensor that shard() cut, on every rank. No gradient."""
    group = resolve_group(group)
    world = group.size()
    parts = x.movedim(dim, 0)
    if parts.shape[0] % 2:
        raise ValueError(f"x must hold two chunks along dim {dim}, got shape {list(x.shape)}")
    parts = parts.unflatten(0, (2, -1)).contiguous()
    every = _finish(_all_gather(parts, group, "x"))
    return _in_order(every.view(world, *parts.shape), 0).flatten(0, 1).movedim(0, dim)


def _in_order(every: Tensor, at: int) -> Tensor:
    """[W, .., 2 (at dimension at + 1), ..] by rank -> [.., 2W (at dimension at), ..] by chunk."""
    early, late = every.unbind(at + 1)
    return torch.cat([early, late.flip(0)]).movedim(0, at)


# ---- collectives ---------------------------------------------------------------------------------

Pending = tuple[Tensor, "dist.Work | None", str]

# The same calls: torch 2.13 renamed them.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _failed(what: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"rank {dist.get_rank()}: the exchange of {what} failed: a rank died, did not make the "
        f"call, or the group's timeout passed ({type(error).__name__}: {error})"
    )


def _all_gather(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start gathering x of every rank into [W * x.shape[0], ..]."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    if not x.numel():
        return out, None, what
    try:
        work = _ALL_GATHER(out, x.contiguous(), group=group, async_op=True)
    except RuntimeError as error:
        raise _failed(what, error) from error
    return out, work, what


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start adding x [W * n, ..] over the ranks; each keeps its own n rows, in fp32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    if not x.numel():
        return out, None, what
    try:
        work = _REDUCE_SCATTER(out, x, group=group, async_op=True)
    except RuntimeError as error:
        raise _failed(what, error) from error
    return out, work, what


def _finish(pending: Pending) -> Tensor:
    out, work, what = pending
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:
            raise _failed(what, error) from error
    return out


class _Gather(torch.autograd.Function):
    """Gather several tensors in one node, whose backward meets on all ranks in the same order.

    apply(group, names, pending, *tensors): tensors [1, ..] -> [W, ..] each. The results may not be
    read before _finish() of what lands in `pending`.
    """

    @staticmethod
    def forward(ctx, group, names, pending, *tensors):
        ctx.group, ctx.names = group, names
        ctx.dtypes = [x.dtype for x in tensors]
        pending.extend(_all_gather(x, group, name) for name, x in zip(names, tensors, strict=True))
        return tuple(out for out, _, _ in pending)

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        pending = [
            _reduce_scatter(grad, ctx.group, f"the gradient of {name}") if need else None
            for name, grad, need in zip(ctx.names, grads, needed, strict=True)
        ]
        done = [
            None if p is None else _finish(p).to(dtype)
            for p, dtype in zip(pending, ctx.dtypes, strict=True)
        ]
        return (None, None, None, *done)


# ---- agreement -----------------------------------------------------------------------------------

_NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_local(tensors: tuple[Tensor, ...], sizes: dict[str, int], world: int) -> None:
    """What a rank can see alone; the rest is nsa_attention's to check."""
    for name, x in zip(_NAMES, tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 4 or x.dtype not in _DTYPES:
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
    check_blocks(l, d, sizes["l_sel"])
    tokens = tensors[0].shape[1]
    c = tokens // 2
    if tokens % 2 or tokens == 0 or c % d or c < l - d:
        raise ValueError(
            f"q must hold two chunks of a multiple of d={d} and at least l - d = {l - d} tokens: "
            f"S must be a multiple of 2 * W * d = {2 * world * d}, got {tokens} tokens per rank; "
            "padding at the sequence's end changes no earlier output"
        )


def _header(tensors: tuple[Any, ...], sizes: dict[str, int], scale: float | None) -> list[list]:
    """Rows of six ints: one per tensor (shape, dtype, needs grad), then the sizes."""
    rows = []
    for x in tensors:
        shape = list(x.shape[:4]) + [-1] * (4 - x.ndim)
        rows.append([*shape, _DTYPES.index(x.dtype), int(x.requires_grad)])
    bits = -1 if scale is None else struct.unpack("q", struct.pack("d", float(scale)))[0]
    values = [*sizes.values(), bits, int(torch.is_grad_enabled())]
    values += [0] * (-len(values) % 6)
    return rows + [values[i : i + 6] for i in range(0, len(values), 6)]


def _agree(
    tensors: tuple[Any, ...], sizes: dict[str, int], scale: float | None,
    group: dist.ProcessGroup,
) -> None:  # fmt: skip
    """Check this rank's arguments, then that all ranks passed theirs and that they agree.

    Nobody returns before everybody spoke, so a bad argument ends with an error on every rank.
    """
    rows = len(_NAMES) + -(-(len(sizes) + 2) // 6)
    try:
        _check_local(tensors, sizes, group.size())
        mine, error = [[1] * 6, *_header(tensors, sizes, scale)], None
    except (TypeError, ValueError) as caught:
        mine, error = [[0] * 6] * (rows + 1), caught
    cpu = "cpu:" in str(dist.get_backend_config(group))
    where = "cpu" if cpu else torch.device("cuda", torch.cuda.current_device())
    every = _finish(_all_gather(torch.tensor([mine], device=where), group, "argument shapes"))
    if error is not None:
        raise error
    every = every.tolist()
    bad = [rank for rank, table in enumerate(every) if not table[0][0]]
    if bad:
        raise ValueError(f"rank {bad[0]} of {len(every)} refused its arguments: see its error")
    for rank, table in enumerate(every):
        for at, (theirs, first) in enumerate(zip(table[1:], every[0][1:], strict=True)):
            if theirs == first:
                continue
            if at >= len(_NAMES):
                raise ValueError(
                    f"ranks must agree on the sizes, softmax_scale and grad mode: rank {rank} "
                    f"differs from rank 0 (sizes here {sizes}, softmax_scale {scale})"
                )
            tell = lambda r: f"{r[:4]} {_DTYPES[r[4]]} requires_grad={bool(r[5])}"
            raise ValueError(
                f"ranks must agree on {_NAMES[at]}: rank {rank} has {tell(theirs)}, rank 0 "
                f"{tell(first)}"
            )


# ---- attention -----------------------------------------------------------------------------------


def _halves(x: Tensor) -> Tensor:
    """[B, 2c, G, D] -> [1, B, 2, c, G, D]: this rank's row, its two chunks apart."""
    return x.unflatten(1, (2, -1))[None]


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
    window: int = 512, softmax_scale: float | None = None, backend: str | None = None,
    flags: Flags | None = None, return_aux: bool = False, check: bool = True,
) -> Tensor | tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """nsa_attention of one sequence spread over the ranks of `group` (see shard).

    q [B, S / W, HQ, Dk], gates [B, S / W, HQ, 3]; keys and values [B, S / W, G, D] of the three
    branches. Unlike nsa_attention's, k_cmp and v_cmp are raw: phi_k and phi_v compress them,
    [B, n, G, D] -> [B, num_compressed(n), G, D] (nsa.compress), after the tokens that a block
    needs from the next chunk came over. group: a ProcessGroup, a 1-D DeviceMesh, or None for all
    ranks. S is a multiple of 2 * W * d. Returns this rank's rows of out [B, S / W, HQ, Dv]; with
    return_aux also {"block_indices", "lse", "routes"} of these rows.

    check: compare the arguments of all ranks first, so that a mismatch is a ValueError on each of
    them; it waits for the device, so switch it off once shapes are settled. A rank that dies ends
    the others with RuntimeError, at the latest after the group's timeout.
    """
    group = resolve_group(group)
    world, rank = group.size(), group.rank()
    sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, window=window)
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    if check:
        _agree(tensors, sizes, softmax_scale, group)
    c = q.shape[1] // 2
    S = 2 * c * world
    tail = min(window - 1, c)

    # Edges first: phi needs the first l - d tokens of the next chunk. The whole K and V of the
    # selection branch travel while phi and the gathering of its results go on.
    cut = [_halves(x)[:, :, :, : l - d] for x in (k_cmp, v_cmp)]
    cut += [_halves(x)[:, :, :, c - tail :] for x in (k_win, v_win)]
    pending: list[Pending] = []
    names = ("k_cmp", "v_cmp", "k_win", "v_win", "k_sel", "v_sel")
    parts = (*cut, _halves(k_sel), _halves(v_sel))
    gathered = _Gather.apply(group, names, pending, *parts)
    for edge in pending[:4]:
        _finish(edge)
    heads_k, heads_v, tails_k, tails_v = (_in_order(x, 1) for x in gathered[:4])

    mine = chunks_of(rank, world)
    compressed = []
    for x, heads, phi in ((k_cmp, heads_k, phi_k), (v_cmp, heads_v, phi_v)):
        # What would follow the last chunk is zeros: blocks that reach into it are cut off below.
        heads = torch.cat([heads, heads.new_zeros(heads[:, :1].shape)], 1)
        follow = heads[:, [j + 1 for j in mine]]
        raw = torch.cat([_halves(x)[0], follow], 2).flatten(0, 1)
        compressed.append(phi(raw).unflatten(0, (-1, 2))[None])
    small: list[Pending] = []
    both = _Gather.apply(group, ("compressed k", "compressed v"), small, *compressed)
    for one in (*small, *pending[4:]):
        _finish(one)
    n_cmp = num_compressed(S, l, d)
    k_all, v_all = (_in_order(x, 1).flatten(1, 2)[:, :n_cmp] for x in both)
    k_far, v_far = (_in_order(x, 1).flatten(1, 2) for x in gathered[4:])
    del gathered, pending, both, small  # copied in order above; at 1M tokens this is gigabytes

    outs, auxes = [], []
    for half, j in enumerate(mine):
        rows = slice(half * c, (half + 1) * c)
        end = (j + 1) * c
        seen = num_compressed(end, l, d)
        near = [
            torch.cat([_before(tails, j, c, window), x[:, rows]], 1)
            for tails, x in ((tails_k, k_win), (tails_v, v_win))
        ]
        out, aux = nsa_attention(
            q[:, rows], k_all[:, :seen], v_all[:, :seen], k_far[:, :end], v_far[:, :end], *near,
            gates[:, rows], q_start=j * c, softmax_scale=softmax_scale, backend=backend,
            flags=flags, return_aux=True, **sizes,
        )  # fmt: skip
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


def nsa_layer_parallel(layer: NSAAttention, x: Tensor, group: Group = None, *,
                       check: bool = True) -> Tensor:  # fmt: skip
    """layer(x) with x [B, S / W, dim] of each rank (see shard); returns this rank's rows."""
    group = resolve_group(group)
    at = positions(x.shape[1] * group.size(), group, x.device)
    q, kv = layer._project(x, at)
    out = nsa_attention_parallel(
        q, kv.k_cmp, kv.v_cmp, kv.k_sel, kv.v_sel, kv.k_win, kv.v_win, layer.gate(x),
        phi_k=layer.phi_k, phi_v=layer.phi_v, group=group, backend=layer.backend,
        flags=layer.flags, check=check, **layer.config.sizes(),
    )  # fmt: skip
    return layer.out(out.flatten(-2))
