"""The log-sum-exp of selection_attention, its gradient, lists of blocks made by others, and merging
with attention over other keys: on every route against the oracle in fp64."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch

import nsa
from bench.parity import assert_parity
from nsa import dispatch, launches, oracle
from nsa.flags import Flags
from nsa.tests.cases import BF16, F16
from nsa.tests.helpers import (
    TRITON,
    deterministic,
    make_block_indices,
    make_qkv,
    make_ranges,
    randn,
)

FLAGS = Flags(sel_triton_allow_grad=True, triton_sel_force=True)
F64 = torch.float64
S, G, HQ, N, SIZE = 37, 2, 4, 4, 16
CU = (0, 20, 20, 33)  # rows 33 to 36 are of no sequence
NAMES = ("out", "lse", "dq", "dk", "dv")


def rough_blocks(packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_indices as an indexer may leave them, clean ones): any order, twice, -1 anywhere, in
    the future, and some rows without any."""
    clean = make_block_indices("ragged", 1, S, G, N, SIZE, seed=3)
    last = (S - 1) // SIZE
    future = torch.full_like(clean[..., :1], last)  # which counts for nothing before its start
    future[:, (S - 1) // SIZE * SIZE :] = -1
    if packed:
        clean = torch.full_like(clean, -1)
        for a, b in pairwise(CU):
            clean[:, a:b] = make_block_indices("ragged", 1, b - a, G, N, SIZE, seed=3 + b)
        future = torch.where(clean[..., :1] == 0, 0, -1)  # once more
    rough = torch.cat([clean, clean[..., :2], future, torch.full_like(future, -1)], -1)
    order = torch.rand(rough.shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
    return rough.gather(-1, order), clean


class Problem:
    """q, k and v, what names their keys (`by`: blocks, packed blocks, or a kind of ranges) and what
    the oracle makes of it."""

    def __init__(self, by: str, device="cpu", dtype=F64, grad=True) -> None:
        self.packed, like = by == "packed", dict(dtype=dtype, device=device)
        if by in ("blocks", "packed"):
            rough, clean = rough_blocks(self.packed)
            self.ranges = oracle.blocks_to_ranges(clean, SIZE)
            self.given = {"block_indices": self.one(rough).to(device), "block_size": SIZE}
        else:
            self.ranges = make_ranges(by, 1, S, G, S, 20, seed=5)
            self.given = {"ranges": self.ranges.to(device)}
        if self.packed:
            cu = torch.tensor(CU, dtype=torch.int32, device=device)
            self.given |= {"cu_seqlens": cu, "max_seqlen": 20}
            for a, b in pairwise(CU):
                self.ranges[:, a:b] = oracle.blocks_to_ranges(clean[:, a:b], SIZE) + a
            self.ranges[:, CU[-1] :] = 0
        x = make_qkv(1, S, HQ, G, 16, 24, seed=1, **like)
        self.x = [self.one(t).requires_grad_(grad) for t in x]
        self.dout = self.one(randn(1, S, HQ, 24, seed=7, **like))
        wide = like if dtype == F64 else dict(device=device)
        self.dlse = self.one(randn(1, S, HQ, seed=8, **wide))

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] if self.packed else x

    def true(self, dout=None, dlse=None) -> list[torch.Tensor]:
        """[out, lse, dq, dk, dv]; the gradient of an lse that is -inf counts as none."""
        dout, dlse = self.dout if dout is None else dout, self.dlse if dlse is None else dlse
        full = lambda t: t.detach().double().cpu().reshape(1, S, *t.shape[1 + (not self.packed) :])
        wide = [full(t).requires_grad_() for t in self.x]
        keys_of = lambda b, s, g: oracle.range_tokens(self.ranges[b, s, g], S)
        out, lse = oracle._attention(*wide, keys_of, None)
        seen = lse.isfinite()
        total = (out * full(dout)).sum() + (lse * full(dlse))[seen].sum()
        total = total + sum(t.sum() * 0 for t in wide)  # where no row has keys
        return [self.one(t.detach()) for t in (out, lse, *torch.autograd.grad(total, wide))]

    def attend(self, *x, **how):
        return nsa.selection_attention(*(x or self.x), **self.given, flags=FLAGS, **how)

    def run(self, backend: str) -> list[torch.Tensor]:
        """[out, lse, dq, dk, dv] of a route. Rows without keys: a NaN in the lse's gradient, as
        logaddexp of two such gives, must reach nothing; it is not contiguous either."""
        out, lse = self.attend(backend=backend, return_lse=True)
        dlse = self.dlse.masked_fill(lse.detach() == -math.inf, math.nan).mT.contiguous().mT
        return [out, lse, *torch.autograd.grad([out, lse], self.x, [self.dout, dlse])]


KINDS = ["blocks", "packed", "mixed", "overlap", "some_empty", "empty"]


@pytest.mark.parametrize("by", KINDS)
def test_lse_and_its_gradient_on_pytorchs_routes(backend, by):
    x = Problem(by)
    got = x.run(backend)
    for name, a, b in zip(NAMES, got, x.true(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
    assert got[1].dtype == F64
    assert x.attend(*[t.float() for t in x.x], return_lse=True)[1].dtype == torch.float32


@pytest.mark.core
@pytest.mark.parametrize("by, repeats", [
    *((by, False) for by in ("blocks", "packed", "mixed", "whole", "some_empty")),
    ("blocks", True), ("packed", True),
])  # fmt: skip
def test_lse_and_its_gradient_on_triton(by, repeats, kernel_device):
    """Blocks have one backward more, where torch asks for deterministic algorithms."""
    x = Problem(by, kernel_device, F16)
    with launches.recording() as launched, dispatch.trace() as taken, deterministic(repeats):
        got = x.run("triton")
    assert [d.route.value for d in taken] == ["triton"]
    want, same = x.true(), x.run("reference")
    seen = want[1].isfinite()
    assert torch.equal(got[1].isfinite().cpu(), seen)
    for name, *three in zip(NAMES, got, want, same, strict=True):
        assert_parity(
            f"sel-lse-{by}", name, *(t.cpu()[seen] if name == "lse" else t.cpu() for t in three),
            path_requested="triton", path_taken="triton", launches=launched,
        )  # fmt: skip


def test_a_seen_key_that_is_not_finite_shows_in_the_lse_and_no_other(backend):
    for bad in (math.nan, math.inf):
        x = Problem("mixed", dtype=torch.float32, grad=False)
        _, k, v = x.x
        k[0, 11, 1, 3] = bad
        v[0, 5] = math.nan  # no lse is made of values
        _, lse = x.attend(backend=backend, return_lse=True)
        rows = x.ranges[0, :, 1].long()
        sees = ((rows[..., 0] <= 11) & (rows[..., 1] > 11)).any(-1)
        assert sees.any() and not sees.all()
        no = torch.zeros_like(sees)  # heads 2 and 3 read group 1
        assert torch.equal(lse[0].isnan(), torch.stack([no, no, sees, sees], -1))


def test_without_the_lse_nothing_else_is_returned():
    x = Problem("blocks", dtype=torch.float32)
    assert torch.equal(x.attend(), x.attend(return_lse=True)[0])


@pytest.mark.parametrize("by", ["blocks", "mixed"])
def test_the_lse_alone_the_output_alone_and_once_more(by, kernel_device):
    """Gradients of one of both; a call like an earlier one gives either as well."""
    x = Problem(by, kernel_device, F16)
    attend = functools.partial(x.attend, backend="triton")
    with torch.no_grad():
        first, second = attend(return_lse=True), attend(return_lse=True)
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        assert torch.equal(attend(), first[0]) and torch.equal(attend(), first[0])
    for i, cotangents in enumerate([(x.dout, x.dlse * 0), (x.dout * 0, x.dlse)]):
        got = torch.autograd.grad(attend(return_lse=True)[i], x.x, cotangents[i])
        for name, g, w in zip("qkv", got, x.true(*cotangents)[2:], strict=True):
            how = dict(atol=4e-3, rtol=4e-3, msg=lambda m, n=name: f"d{n}: {m}")
            torch.testing.assert_close(g.double().cpu(), w, **how)


@pytest.mark.parametrize("by", ["block_indices", "ranges"])
def test_rows_without_any_slot_are_empty(by, kernel_device):
    make = lambda *shape: torch.randn(*shape, device=kernel_device).half().requires_grad_()
    q, k, v = make(1, 20, 4, 16), make(1, 20, 2, 16), make(1, 20, 2, 16)
    tail = (0,) if by == "block_indices" else (0, 2)
    none = torch.zeros(1, 20, 2, *tail, dtype=torch.int32, device=kernel_device)
    for backend in ("triton", "sdpa", "reference", "triton"):  # twice: played from its record
        how = {by: none, "block_size": 16, "backend": backend, "flags": TRITON}
        out, lse = nsa.selection_attention(q, k, v, return_lse=True, **how)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert (out == 0).all() and (lse == -math.inf).all(), backend
        assert all((g == 0).all() for g in grads), backend


def test_counts_of_blocks():
    q, k, v = Problem("mixed", dtype=torch.float32, grad=False).x
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


def test_lse_has_a_gradient_under_torch_func():
    x = Problem("blocks")
    tensors = [t.detach() for t in x.x]

    def total(*tensors):
        out, lse = x.attend(*tensors, return_lse=True)
        return (out * x.dout).sum() + torch.where(lse.isinf(), 0, lse * x.dlse).sum()

    got = torch.func.grad(total, argnums=(0, 1, 2))(*tensors)
    torch.testing.assert_close(list(got), x.true()[2:])
    many = [t.expand(3, *t.shape) for t in (*tensors, x.given["block_indices"])]
    attend = lambda *x: nsa.selection_attention(*x, block_size=SIZE, return_lse=True)
    for a, b in zip(torch.vmap(attend)(*many), attend(*(t[0] for t in many)), strict=True):
        torch.testing.assert_close(a[2], b)


# ---- merging -------------------------------------------------------------------------------------


def test_merged_halves_are_the_whole_forward_and_backward():
    x, (_, clean) = Problem("mixed"), rough_blocks()
    how = dict(block_size=SIZE, backend="reference", return_lse=True)
    attend = lambda blocks: nsa.selection_attention(*x.x, blocks, **how)
    halves = [attend(clean.masked_fill(clean % 2 != odd, -1)) for odd in (0, 1)]
    want, got = attend(clean), nsa.merge_state(*halves[0], *halves[1])
    neither = want[1].isinf()
    alone = torch.stack([lse.isinf() for _, lse in halves])
    assert neither.any() and (alone.any(0) & ~neither).any() and (~alone).all(0).any()
    torch.testing.assert_close(list(got), list(want))
    dlse = x.dlse.masked_fill(neither, 0)
    grads = [torch.autograd.grad(result, x.x, [x.dout, dlse]) for result in (got, want)]
    torch.testing.assert_close(*grads)


def test_merging_follows_either_mark_of_rows_without_keys():
    """flash-attn 2 marks them by +inf, and may leave anything in their outputs."""
    out, other = randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2)
    lse = randn(2, 3, seed=3)
    junk = torch.full_like(other, math.nan).requires_grad_()
    for mark in (-math.inf, math.inf):
        none = torch.full_like(lse, mark).requires_grad_()
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
    shape = dict(dtype=BF16, device=cuda)
    x = make_qkv(1, 1000, 64, 4, 128, seed=2, **shape, requires_grad=True)
    blocks = make_block_indices("ragged", 1, 1000, 4, 16, 64, seed=4, device=cuda)
    dout = randn(1, 1000, 64, 128, seed=5, **shape)
    dlse = 100 * randn(1, 1000, 64, seed=6, device=cuda)

    def run(backend, x):
        how = dict(block_size=64, backend=backend, flags=FLAGS, return_lse=True)
        out, lse = nsa.selection_attention(*x, blocks, **how)
        unseen = lse.isinf()
        cotangents = dout.to(out.dtype), dlse.to(lse.dtype).masked_fill(unseen, 0)
        grads = torch.autograd.grad([out, lse], x, cotangents)
        return [out, lse.masked_fill(unseen, 0), *grads]

    with launches.recording() as launched, deterministic(repeats):
        got = run("triton", x)
    same = run("reference", x)
    want = run("reference", [t.detach().double().requires_grad_() for t in x])
    kw = dict(path_requested="triton", path_taken="triton", launches=launched)
    for name, g, w, s in zip(NAMES, got, want, same, strict=True):
        size = 1 if name in ("out", "lse") else w.abs().max()  # gradients of 100 times as much
        assert_parity(f"sel-lse-sizes-{repeats}", name, g / size, w / size, s / size, **kw)
