"""The log-sum-exp of selection_attention, its gradient, lists of blocks made by others, and merging
with attention over other keys: on every route against the oracle in fp64."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch

import nsa
from bench.parity import assert_parity
from nsa import dispatch, launches, oracle
from nsa.flags import Flags
from nsa.tests.helpers import deterministic, make_block_indices, make_qkv, make_ranges, randn

FLAGS = Flags(sel_triton_allow_grad=True, triton_sel_force=True)
S, G, HQ, N, SIZE = 37, 2, 4, 4, 16
CU = (0, 20, 20, 33)  # rows 33 to 36 are of no sequence


def rough_blocks(seed: int = 3, packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_indices as an indexer may leave them, clean ones): any order, twice, -1 anywhere, in
    the future, and some rows without any."""
    draw = torch.Generator().manual_seed(seed)
    clean = make_block_indices("ragged", 1, S, G, N, SIZE, seed=seed)
    if packed:
        parts = [make_block_indices("ragged", 1, b - a, G, N, SIZE, seed=seed + b)
                 for a, b in zip(CU, CU[1:], strict=False)]  # fmt: skip
        rest = torch.full((1, S - CU[-1], G, N), -1, dtype=torch.int32)
        clean = torch.cat([*parts, rest], 1)
    last = (S - 1) // SIZE if not packed else 0
    future = torch.full_like(clean[..., :1], last)
    if not packed:  # a block that starts after the query counts for nothing
        own = torch.arange(S)[None, :, None, None] // SIZE
        future = future.masked_fill(own >= last, -1)
    else:
        future = future.masked_fill(clean[..., :1] != 0, -1)  # once more
    rough = torch.cat([clean, clean[..., :2], future, torch.full_like(future, -1)], -1)
    order = torch.rand(rough.shape, generator=draw).argsort(-1)
    return rough.gather(-1, order), clean


def given_by(by: str) -> tuple[dict, torch.Tensor]:
    """(arguments that name the keys, their clean ranges)."""
    if by == "blocks":
        rough, clean = rough_blocks()
        return {"block_indices": rough, "block_size": SIZE}, oracle.blocks_to_ranges(clean, SIZE)
    ranges = make_ranges(by, 1, S, G, S, 20, seed=5)
    return {"ranges": ranges}, ranges


def moved(given: dict, device) -> dict:
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def inputs(device="cpu", dtype=torch.float32, grad=True):
    x = make_qkv(1, S, HQ, G, 16, 24, dtype=dtype, device=device, seed=1, requires_grad=grad)
    dout = randn(1, S, HQ, 24, seed=7, dtype=dtype, device=device)
    dlse = randn(1, S, HQ, seed=8, device=device)
    return x, dout, dlse


def true(x, ranges, dout, dlse):
    """(out, lse, dq, dk, dv) by the oracle; the gradient of an lse that is -inf counts as none."""
    wide = [t.detach().double().cpu().requires_grad_() for t in x]
    keys_of = lambda b, s, g: oracle.range_tokens(ranges[b, s, g], S)
    out, lse = oracle._attention(*wide, keys_of, None)
    seen = lse.isfinite()
    total = (out * dout.double().cpu()).sum() + (lse * dlse.double().cpu())[seen].sum()
    total = total + sum(t.sum() * 0 for t in wide)  # where no row has keys
    return [out, lse, *torch.autograd.grad(total, wide)]


def both(out, lse, x, dout, dlse):
    return [out, lse, *torch.autograd.grad([out, lse], x, [dout, dlse])]


@pytest.mark.parametrize("by", ["blocks", "mixed", "overlap", "some_empty", "empty"])
def test_lse_and_its_gradient_on_pytorchs_routes(backend, by):
    given, ranges = given_by(by)
    x, dout, dlse = inputs(dtype=torch.float64)
    dlse = dlse.double()
    want = true(x, ranges, dout, dlse)
    dlse = dlse.masked_fill(want[1] == -math.inf, math.nan)  # as logaddexp of two such gives
    got = nsa.selection_attention(*x, **given, backend=backend, return_lse=True)
    got = both(*got, x, dout, dlse)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
    assert got[1].dtype == torch.float64
    short = [t.float() for t in x]
    assert nsa.selection_attention(*short, **given, return_lse=True)[1].dtype == torch.float32


def test_a_seen_key_that_is_not_finite_shows_in_the_lse_and_no_other(backend):
    given, ranges = given_by("mixed")
    for bad in (math.nan, math.inf):
        (q, k, v), *_ = inputs(grad=False)
        k[0, 11, 1, 3] = bad
        v[0, 5] = math.nan  # no lse is made of values
        _, lse = nsa.selection_attention(q, k, v, **given, backend=backend, return_lse=True)
        rows = ranges[0, :, 1].long()
        sees = ((rows[..., 0] <= 11) & (rows[..., 1] > 11)).any(-1)
        assert sees.any() and not sees.all()
        no = torch.zeros_like(sees)  # heads 2 and 3 read group 1
        assert torch.equal(lse[0].isnan(), torch.stack([no, no, sees, sees], -1))


def test_without_the_lse_nothing_else_is_returned():
    (q, k, v), *_ = inputs()
    blocks, _ = rough_blocks()
    out, _ = nsa.selection_attention(q, k, v, blocks, block_size=SIZE, return_lse=True)
    alone = nsa.selection_attention(q, k, v, blocks, block_size=SIZE)
    assert torch.equal(alone, out)


def test_blocks_of_packed_sequences(backend):
    rough, clean = rough_blocks(packed=True)
    x, dout, dlse = inputs(dtype=torch.float64)
    cu = torch.tensor(CU, dtype=torch.int32)
    flat = [t.detach()[0].requires_grad_() for t in x]
    got = nsa.selection_attention(
        *flat, rough[0], block_size=SIZE, cu_seqlens=cu, backend=backend, return_lse=True
    )
    got = both(*got, flat, dout[0], dlse[0].double())
    for a, b in zip(CU, CU[1:], strict=False):
        one = [t.detach()[:, a:b].requires_grad_() for t in x]
        want = nsa.selection_attention(
            *one, clean[:, a:b], block_size=SIZE, backend="reference", return_lse=True
        )
        want = both(*want, one, dout[:, a:b], dlse[:, a:b].double())
        for name, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(g[a:b], w[0], msg=lambda m, n=name: f"{n}: {m}")
    assert (got[1][CU[-1] :] == -math.inf).all()
    assert all((g[CU[-1] :] == 0).all() for g in (got[0], *got[2:]))


def test_counts_of_blocks():
    (q, k, v), *_ = inputs(grad=False)
    draw = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 3, (1, S, G, N), generator=draw)
    counts = torch.randint(0, N + 1, (1, S, G), generator=draw, dtype=torch.int32)
    junk = blocks.masked_fill(torch.arange(N) >= counts[..., None], 10**6)
    marked = blocks.masked_fill(torch.arange(N) >= counts[..., None], -1)
    attend = functools.partial(nsa.selection_attention, q, k, v, block_size=SIZE)
    assert (counts == 0).any()
    assert torch.equal(attend(junk, block_counts=counts), attend(marked))
    assert torch.equal(attend(blocks, block_counts=2), attend(blocks[..., :2]))
    with pytest.raises(ValueError, match=r"block_counts must be \[1, 37, 2\].*got \[1, 37\]"):
        attend(blocks, block_counts=counts[..., 0])
    with pytest.raises(TypeError, match="block_counts must be int32 or int64, got torch.float32"):
        attend(blocks, block_counts=counts.float())
    with pytest.raises(ValueError, match="block_counts needs block_indices"):
        attend(ranges=torch.zeros(1, S, G, 1, 2, dtype=torch.int32), block_counts=2)


# ---- under transforms ----------------------------------------------------------------------------


def test_lse_has_a_gradient_under_torch_func():
    given, ranges = given_by("blocks")
    x, dout, dlse = inputs(dtype=torch.float64)
    dlse = dlse.double()

    def total(q, k, v):
        out, lse = nsa.selection_attention(q, k, v, **given, return_lse=True)
        return (out * dout).sum() + torch.where(lse.isinf(), 0, lse * dlse).sum()

    want = true(x, ranges, dout, dlse)[2:]
    got = torch.func.grad(total, argnums=(0, 1, 2))(*[t.detach() for t in x])
    torch.testing.assert_close(list(got), list(want))
    many = [t.detach().expand(3, *t.shape) for t in x]
    blocks = given["block_indices"].expand(3, -1, -1, -1, -1)
    attend = lambda q, k, v, b: nsa.selection_attention(
        q, k, v, b, block_size=SIZE, return_lse=True
    )
    out, lse = torch.vmap(attend)(*many, blocks)
    for a, b in zip((out[2], lse[2]), attend(*[t.detach() for t in x], blocks[0]), strict=True):
        torch.testing.assert_close(a, b)


# ---- merging -------------------------------------------------------------------------------------


def test_merged_halves_are_the_whole_forward_and_backward():
    x, dout, _ = inputs(dtype=torch.float64)
    _, clean = rough_blocks()
    halves = [clean.masked_fill(clean % 2 != odd, -1) for odd in (0, 1)]
    attend = functools.partial(
        nsa.selection_attention, *x, block_size=SIZE, backend="reference", return_lse=True
    )
    want = attend(clean)
    got = nsa.merge_state(*attend(halves[0]), *attend(halves[1]))
    neither = want[1].isinf()
    alone = torch.stack([attend(half)[1].isinf() for half in halves])
    assert neither.any() and (alone.any(0) & ~neither).any() and (~alone).all(0).any()
    torch.testing.assert_close(list(got), list(want))
    dlse = randn(1, S, HQ, seed=9, dtype=torch.float64)
    dlse = dlse.masked_fill(neither, 0)
    grads = [torch.autograd.grad(result, x, [dout, dlse]) for result in (got, want)]
    torch.testing.assert_close(*grads)


def test_merging_follows_either_mark_of_rows_without_keys():
    """flash-attn 2 marks them by +inf, and may leave anything in their outputs."""
    out, other = randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2)
    lse = randn(2, 3, seed=3)
    for mark in (-math.inf, math.inf):
        none = torch.full_like(lse, mark)
        junk = torch.full_like(other, math.nan).requires_grad_()
        none.requires_grad_()
        merged = nsa.merge_state(out, lse, junk, none)
        torch.testing.assert_close(merged, (out, lse))
        grads = torch.autograd.grad([*merged], [junk, none], [torch.ones_like(x) for x in merged])
        assert all((g == 0).all() for g in grads)
        both_none = nsa.merge_state(junk, none, junk, none)
        assert (both_none[0] == 0).all() and (both_none[1] == -math.inf).all()
    half = nsa.merge_state(out.half(), lse, other.half(), lse)
    assert half[0].dtype == torch.float16 and half[1].dtype == torch.float32
    torch.testing.assert_close(half[0], ((out + other) / 2).half(), atol=2e-3, rtol=1e-3)
    with pytest.raises(ValueError, match=r"lse_b must be \[2, 3\], got \[3, 2\]"):
        nsa.merge_state(out, lse, other, lse.mT)


# ---- kernels -------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    "by, repeats",
    [("blocks", False), ("blocks", True), ("packed", False), ("packed", True), ("mixed", False),
     ("whole", False), ("some_empty", False)],
)  # fmt: skip
def test_lse_and_its_gradient_on_triton(by, repeats, kernel_device):
    """Blocks have one backward more, where torch asks for deterministic algorithms."""
    x, dout, dlse = inputs(kernel_device, torch.float16)
    cu, first = None, lambda t: t
    if by == "packed":
        rough, clean = rough_blocks(packed=True)
        given = {"block_indices": rough[0], "block_size": SIZE, "max_seqlen": 20}
        cu = torch.tensor(CU, dtype=torch.int32, device=kernel_device)
        given["cu_seqlens"] = cu
        parts = [oracle.blocks_to_ranges(clean[:, a:b], SIZE) + a
                 for a, b in zip(CU, CU[1:], strict=False)]  # fmt: skip
        ranges = torch.cat([*parts, torch.zeros(1, S - CU[-1], G, N, 2, dtype=torch.int64)], 1)
        first = lambda t: t[0]
    else:
        given, ranges = given_by(by)
    given = moved(given, kernel_device)
    leaves = [first(t.detach()).requires_grad_() for t in x]
    want = true(x, ranges, dout, dlse)
    # Rows without keys: a NaN there, as logaddexp of two such gives, must reach nothing.
    dlse = dlse.masked_fill(want[1].to(dlse.device) == -math.inf, math.nan)

    def run(backend):
        result = nsa.selection_attention(
            *leaves, **given, backend=backend, flags=FLAGS, return_lse=True
        )
        # A gradient that is not contiguous.
        return both(*result, leaves, first(dout), first(dlse).mT.contiguous().mT)

    with launches.recording() as launched, dispatch.trace() as taken:
        if repeats:
            with deterministic():
                got = run("triton")
        else:
            got = run("triton")
    assert [d.route.value for d in taken] == ["triton"]
    same = run("reference")
    kw = dict(path_requested="triton", path_taken="triton", launches=launched)
    seen = want[1].isfinite()
    assert torch.equal(got[1].isfinite().cpu(), first(seen))
    for name, g, w, s in zip(("out", "lse", "dq", "dk", "dv"), got, want, same, strict=True):
        pick = (lambda t: t.cpu()[first(seen)]) if name == "lse" else (lambda t: t.cpu())
        assert_parity(f"sel-lse-{by}", name, pick(g), pick(first(w)), pick(s), **kw)


@pytest.mark.parametrize("by", ["blocks", "mixed"])
def test_the_lse_alone_the_output_alone_and_once_more(by, kernel_device):
    """Gradients of one of both; a call like an earlier one gives either as well."""
    given, ranges = given_by(by)
    given = moved(given, kernel_device)
    x, dout, dlse = inputs(kernel_device, torch.float16)
    attend = functools.partial(nsa.selection_attention, *x, **given, backend="triton", flags=FLAGS)
    with torch.no_grad():
        first, second = attend(return_lse=True), attend(return_lse=True)
        assert torch.equal(second[0], first[0]) and torch.equal(second[1], first[1])
        assert torch.equal(attend(), first[0]) and torch.equal(attend(), first[0])
    for a, b in ((dout, None), (None, dlse)):
        out, lse = attend(return_lse=True)
        outputs, gradients = ([out], [a]) if b is None else ([lse], [b])
        got = torch.autograd.grad(outputs, x, gradients)
        zero = torch.zeros_like
        want = true(x, ranges, zero(dout) if a is None else a, zero(dlse) if b is None else b)[2:]
        for name, g, w in zip("qkv", got, want, strict=True):
            torch.testing.assert_close(
                g.double().cpu(), w, atol=4e-3, rtol=4e-3, msg=lambda m, n=name: f"d{n}: {m}"
            )


def test_delta_of_a_row_without_keys_is_finite(kernel_device):
    """Kernels that serve several queries at once multiply it by probabilities of 0."""
    from nsa.kernels.prefill.delta import attention_delta

    out, dout, lse, dlse = randn(4, 6, 8, 16, seed=1, device=kernel_device).unbind()
    lse, dlse = lse[..., 0].contiguous(), dlse[..., 0].contiguous()
    lse[2], dlse[2], out[2] = -math.inf, math.nan, 0
    delta, reach = attention_delta(out, dout, lse, dlse)
    want = (out * dout).sum(-1) - dlse.nan_to_num(0)
    torch.testing.assert_close(delta, want)
    torch.testing.assert_close(reach, dout.abs().sum(-1))
    torch.testing.assert_close(attention_delta(out, dout)[0], (out * dout).sum(-1))


@pytest.mark.kernel
@pytest.mark.core
@pytest.mark.parametrize("repeats", [False, True], ids=["", "deterministic"])
def test_lse_and_its_gradient_at_a_models_sizes(repeats, cuda):
    """On SM 9.0 the kernels in Gluon."""
    length, groups, heads, dim, size = 1000, 4, 16, 128, 64
    shape = dict(dtype=torch.bfloat16, device=cuda, requires_grad=True)
    x = make_qkv(1, length, groups * heads, groups, dim, seed=2, **shape)
    blocks = make_block_indices("ragged", 1, length, groups, 16, size, seed=4, device=cuda)
    dout = randn(1, length, groups * heads, dim, seed=5, dtype=torch.bfloat16, device=cuda)
    dlse = 100 * randn(1, length, groups * heads, seed=6, device=cuda)

    def run(backend, x):
        out, lse = nsa.selection_attention(
            *x, blocks, block_size=size, backend=backend, flags=FLAGS, return_lse=True
        )
        seen = lse.isfinite()
        grads = torch.autograd.grad(
            [out, lse], x, [dout.to(out.dtype), dlse.to(lse.dtype).masked_fill(~seen, 0)]
        )
        return [out, lse.masked_fill(~seen, 0), *grads]

    with launches.recording() as launched, deterministic() if repeats else contextlib.nullcontext():
        got = run("triton", x)
    same = run("reference", x)
    want = run("reference", [t.detach().double().requires_grad_() for t in x])
    kw = dict(path_requested="triton", path_taken="triton", launches=launched)
    for name, g, w, s in zip(("out", "lse", "dq", "dk", "dv"), got, want, same, strict=True):
        size = 1 if name in ("out", "lse") else w.abs().max()  # gradients of 100 times as much
        assert_parity(f"sel-lse-sizes-{repeats}", name, g / size, w / size, s / size, **kw)
