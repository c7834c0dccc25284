"""What each route calls for each branch: SELECTED[route](args, flags) and so on.

Arguments come checked from nsa/attention.py. Packed sequences (args["cu_seqlens"]) go to kernels
as they are; the PyTorch rungs take them one by one. What needs Triton is imported in the calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa import log, reference, rotary, select
from nsa.blocks import cu_seqlens_compressed, num_compressed, num_sel_blocks
from nsa.cache import BranchKV
from nsa.flags import Flags
from nsa.kernels import fa2, sdpa  # which need no Triton
from nsa.layouts import token_positions
from nsa.routes import Route

Args = dict[str, Any]
Rung = Callable[[Args, Flags], Any]


def _only(args: Args, *names: str) -> Args:
    return {name: args[name] for name in names}


def _each_sequence(args: Args, run: Callable[[Args], Any], fill: float = 0) -> Any:
    """run() on each packed sequence as a batch of one; results concatenated as packed again, with
    `fill` for rows of no sequence, whose lse is -inf."""
    cu = args["cu_seqlens"]
    if cu is None:
        return run(args)
    ends = cu.tolist()
    at_k = 0
    parts = []
    for first, last in zip(ends, ends[1:], strict=False):
        one = dict(args, cu_seqlens=None, q_start=0)
        n_k = last - first
        if "l" in args:
            n_k = num_compressed(last - first, args["l"], args["d"])
        for name in ("q", "block_indices", "ranges", "lse"):
            if one.get(name) is not None:
                one[name] = one[name][first:last][None]
        for name in ("k", "v"):
            one[name] = one[name][at_k : at_k + n_k][None]
        at_k += n_k
        parts.append(run(one))

    def joined(results: Sequence[Tensor], fill: float) -> Tensor:
        rows = [x[0] for x in results]
        rest = (args["q"].shape[0] - ends[-1], *rows[0].shape[1:])
        return torch.cat([*rows, rows[0].new_full(rest, fill)])

    if isinstance(parts[0], tuple):
        outs, lses = zip(*parts, strict=True)
        return joined(outs, fill), joined(lses, -math.inf)
    return joined(parts, fill)


def _by_sequence(run: Callable[..., Any], *names: str) -> Rung:
    """The rung that calls run(q, k, v) with the arguments `names` for each packed sequence."""
    return lambda args, flags: _each_sequence(
        args, lambda a: run(a["q"], a["k"], a["v"], **_only(a, *names))
    )


def _packed(args: Args, *names: str) -> Args:
    return _only(args, "softmax_scale", "cu_seqlens", "q_start", *names)


def _packed_compressed(args: Args) -> Args:
    cu = args["cu_seqlens"]
    cu_cmp = None if cu is None else cu_seqlens_compressed(cu, args["l"], args["d"])
    return {**_packed(args, "l", "d"), "cu_seqlens_cmp": cu_cmp}


def _ranges(args: Args) -> Tensor:
    """The rows' clean ranges, whichever way the caller named the keys."""
    if args["ranges"] is not None:
        return select.clean_ranges(args["ranges"], args["k"].shape[1])
    S = args["q"].shape[1]
    t = torch.arange(args["q_start"], args["q_start"] + S, device=args["q"].device)
    return select.blocks_to_ranges(args["block_indices"], args["block_size"], t)


def _block_tokens(
    block_indices: Tensor, block_size: int, q_start: int, cu_seqlens: Tensor | None
) -> int:
    """Tokens of the chosen blocks, summed over queries and groups. Waits for the device."""
    t = token_positions(block_indices, cu_seqlens) + q_start
    return int(select.range_lengths(select.blocks_to_ranges(block_indices, block_size, t)).sum())


def log_block_reads(
    block_indices: Tensor, block_size: int, q_start: int, cu_seqlens: Tensor | None, flags: Flags
) -> None:
    """Log what kernels read that go by blocks (`sel.triton.reads`), when asked for."""
    if log.enabled("sel.triton.reads", flags) and not log.capturing(block_indices):
        tokens = _block_tokens(block_indices, block_size, q_start, cu_seqlens)
        log.log("sel.triton.reads", flags=flags, tokens=tokens,
                rows=block_indices.shape[:-1].numel())  # fmt: skip


Selected = Tensor | tuple[Tensor, Tensor]  # out, and lse where args["return_lse"]


def _selected(run: Callable[..., Selected], args: Args, **more: Any) -> Selected:
    how = _only(args, "softmax_scale", "return_lse")
    return _each_sequence(args, lambda a: run(a["q"], a["k"], a["v"], _ranges(a), **how, **more))


def _selected_triton(args: Args, flags: Flags) -> Selected:
    if args["block_indices"] is not None:
        from nsa.kernels.prefill import selection_blocks_triton
        from nsa.kernels.triton_sel_kernel.by_ranges import TIMING

        k, v, blocks, size = (args[n] for n in ("k", "v", "block_indices", "block_size"))
        log.log(
            "sel.triton.path", flags=flags, path="blocks", rows=blocks.shape[:-1].numel(),
            H=args["q"].shape[-2] // k.shape[-2], n=blocks.shape[-1], Skv=k.shape[-3],
        )  # fmt: skip
        where = (blocks, size, args["q_start"], args["cu_seqlens"])
        elements = lambda: _block_tokens(*where) * (k.shape[-1] + v.shape[-1])
        with log.timed(TIMING, k, flags, elements, bucket="blocks"):
            out = selection_blocks_triton(
                args["q"], k, v, blocks, block_size=size, use_gluon=flags.use_gluon,
                **_packed(args, "max_seqlen", "return_lse"),
            )  # fmt: skip
        log_block_reads(*where, flags)
        return out
    from nsa.kernels.triton_sel_kernel.by_ranges import selection_ranges_triton

    q, k, v, ranges, cu = (args[n] for n in ("q", "k", "v", "ranges", "cu_seqlens"))
    if cu is not None:
        q, k, v, ranges = (x[None] for x in (q, k, v, _in_pack(ranges, cu)))
    result = selection_ranges_triton(
        q.unflatten(2, (k.shape[2], -1)), k.transpose(1, 2), v.transpose(1, 2), ranges,
        path=args.get("path"), flags=flags, **_only(args, "softmax_scale", "return_lse"),
    )  # fmt: skip
    rows = lambda x: x.flatten(2, 3) if cu is None else x[0].flatten(1, 2)
    return tuple(map(rows, result)) if args["return_lse"] else rows(result)


def _in_pack(ranges: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Ranges [T, G, n, 2] of the keys of each query's own sequence as ranges of the whole pack's;
    empty for a query that is of no sequence. Does not wait for the device."""
    ends = torch.nn.functional.pad(cu_seqlens, (0, 1))  # behind the last sequence: none ends
    token = torch.arange(ranges.shape[0], dtype=torch.int32, device=ranges.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)
    begin = ends[sequence][:, None, None, None]
    length = (ends[sequence + 1][:, None, None, None] - begin).clamp(min=0)
    return ranges.clamp(min=0).minimum(length) + begin


def selected_again(args: Args, flags: Flags) -> Callable[..., Selected | None] | None:
    """What Triton's rung does with (q, k, v, block_indices or ranges) like these, not packed; for
    settled.keep()."""
    if args["block_indices"] is not None:
        from nsa.kernels.prefill import selection_blocks_triton

        return functools.partial(
            selection_blocks_triton, use_gluon=flags.use_gluon, q_start=args["q_start"],
            n_blocks=num_sel_blocks(args["k"].shape[1], args["block_size"]),
            **_only(args, "block_size", "softmax_scale", "return_lse"),
        )  # fmt: skip
    from nsa.kernels.triton_sel_kernel.by_ranges import planned

    k, v = (args[n].transpose(1, 2) for n in ("k", "v"))
    more = args["softmax_scale"], flags, args["return_lse"]
    return planned(args["q"], k, v, args["ranges"], *more)


def _fa2(run: Callable[..., Any], names: tuple[str, ...], args: Args, flags: Flags) -> Any:
    """Packed sequences in one varlen call, unless the dense form is forced."""
    form = "varlen" if flags.fa2_force_varlen else "dense" if flags.fa2_force_dense else "auto"
    names = (*names, "cu_seqlens", "max_seqlen")

    def one(a: Args) -> Any:
        result = run(a["q"], a["k"], a["v"], form=form, **_only(a, *names))
        packed = form == "varlen" or a["cu_seqlens"] is not None
        log.log("fa2.call", flags=flags, call=run.__name__, form="varlen" if packed else "dense",
                q=list(a["q"].shape), k=list(a["k"].shape))  # fmt: skip
        return result

    if form == "dense" and args["cu_seqlens"] is not None:
        return _each_sequence({**args, "max_seqlen": None}, one)
    return one(args)


_COMPRESSED = ("l", "d", "softmax_scale", "q_start")
_compressed_fa2 = functools.partial(_fa2, fa2.compressed_fa2, _COMPRESSED)


def _compressed_triton(args: Args, flags: Flags) -> tuple[Tensor, Tensor]:
    from nsa.kernels.prefill import compressed_attention_triton

    return compressed_attention_triton(
        args["q"], args["k"], args["v"], use_gluon=flags.use_gluon, **_packed_compressed(args)
    )


_SLIDING = ("window", "softmax_scale", "q_start")
_sliding_fa2 = functools.partial(_fa2, fa2.sliding_fa2, _SLIDING)


def _sliding_triton(args: Args, flags: Flags) -> Tensor:
    from nsa.kernels.prefill import sliding_attention_triton

    out, _ = sliding_attention_triton(
        args["q"], args["k"], args["v"], use_gluon=flags.use_gluon, **_packed(args, "window")
    )
    return out


_SELECT = ("l", "d", "l_sel", "n_sel", "n_init", "n_local", "softmax_scale")


def _blocks_triton(args: Args, flags: Flags) -> Tensor:
    from nsa.kernels.prefill import compressed_attention_triton, select_blocks_triton

    packed, lse = _packed_compressed(args), args["lse"]
    if lse is None:
        with torch.no_grad():
            _, lse = compressed_attention_triton(
                args["q"], args["k"], args["k"], use_gluon=flags.use_gluon, **packed
            )
    return select_blocks_triton(
        args["q"], args["k"], lse, use_gluon=flags.use_gluon,
        **{**packed, **_only(args, "max_seqlen", *_SELECT)},
    )  # fmt: skip


def _turn_triton(args: Args, flags: Flags) -> tuple[Tensor, BranchKV]:
    from nsa.kernels.prefill import split_turned_triton

    c = args["config"]
    q, *kv = split_turned_triton(
        args["qkv"], args["positions"], heads=c.heads, groups=c.groups, d_k=c.d_k, d_v=c.d_v,
        rope_base=c.rope_base,
    )  # fmt: skip
    return q, BranchKV(*kv)


def _fused(args: Args, flags: Flags) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The fused operator on tensors like nsa_attention's."""
    from nsa.kernels.prefill import nsa_prefill_triton

    return functools.partial(
        nsa_prefill_triton, **args["sizes"], **_packed(args, "max_seqlen"),
        use_gluon=flags.use_gluon,
    )  # fmt: skip


def prefill_triton(args: Args, flags: Flags) -> tuple[Tensor, dict[str, Any]]:
    """The fused operator on nsa_attention's arguments: out and {"block_indices", "lse"}."""
    out, aux = _fused(args, flags)(*args["tensors"])
    where = (args["sizes"]["l_sel"], args["q_start"], args["cu_seqlens"])
    log_block_reads(aux["block_indices"], *where, flags)
    return out, aux


def prefill_again(args: Args, flags: Flags) -> Callable[..., Tensor]:
    """Return a call of the fused operator for tensors like these, with the cu_seqlens of a pack
    behind them; for settled.keep()."""
    fused = _fused(args, flags)
    if args["cu_seqlens"] is None:
        return lambda *tensors: fused(*tensors)[0]
    return lambda *given: fused(*given[:-1], cu_seqlens=given[-1])[0]


def step_triton(args: Args, flags: Flags) -> tuple[Tensor, Tensor]:
    from nsa.kernels.decode import nsa_decode_triton

    cache = args["cache"]
    out, block_indices = nsa_decode_triton(
        args["q"], cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win,
        cache.v_win, args["gates"], cache.lens, max_len=cache.max_len,
        softmax_scale=args["softmax_scale"], block_table=cache.block_table,
        window_ring=cache.ring, return_indices=True, counters=cache.counters,
        use_cluster=flags.use_cluster, cmp_paged=cache.block_table is not None,
        k_descale=cache.k_descale, v_descale=cache.v_descale, **args["sizes"],
    )  # fmt: skip
    if cache.count_reads:
        cache.record_reads(block_indices)
    return out, block_indices


SELECTED: dict[Route, Rung] = {
    Route.TRITON: _selected_triton,
    Route.SDPA: lambda args, flags: _selected(sdpa.selection_sdpa, args, flags=flags),
    Route.REFERENCE: lambda args, flags: _selected(reference.selection_attention, args),
}
COMPRESSED: dict[Route, Rung] = {
    Route.FA2: _compressed_fa2,
    Route.TRITON: _compressed_triton,
    Route.SDPA: _by_sequence(sdpa.compressed_sdpa, *_COMPRESSED),
    Route.REFERENCE: _by_sequence(reference.compressed_attention, *_COMPRESSED),
}
SLIDING: dict[Route, Rung] = {
    Route.FA2: _sliding_fa2,
    Route.TRITON: _sliding_triton,
    Route.SDPA: _by_sequence(sdpa.sliding_sdpa, *_SLIDING),
    Route.REFERENCE: _by_sequence(reference.sliding_attention, *_SLIDING),
}
BLOCKS: dict[Route, Rung] = {
    Route.TRITON: _blocks_triton,
    Route.REFERENCE: lambda args, flags: _each_sequence(
        args, lambda a: select.select_blocks(a["q"], a["k"], **_only(a, *_SELECT, "q_start")), -1
    ),
}
TURN: dict[Route, Rung] = {
    Route.TRITON: _turn_triton,
    Route.REFERENCE: lambda args, flags: rotary.split_turned(**args),
}
