"""FlashAttention-2 on a GPU: dense and varlen, forward and backward, against fp64 PyTorch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import nsa
from bench.parity import assert_parity
from nsa import dispatch, launches, reference
from nsa.blocks import num_compressed
from nsa.flags import Flags
from nsa.kernels import fa2
from nsa.tests import test_unseen_values as unseen
from nsa.tests.helpers import make_qkv, randn

HALF, BF = torch.float16, torch.bfloat16
L, D_STRIDE, WINDOW = 32, 16, 96
LENGTHS = [0, 200, 200, 231, 250, 762, 1030]  # cu_seqlens: an empty one, two that see no block
BRANCHES = ("compressed", "sliding")


@pytest.fixture
def source(cuda) -> str:
    """Which FA-2 there is; skip with the reason where there is none."""
    found = fa2.probe()
    if found.why_not is not None:
        pytest.skip(found.why_not)
    return found.source


def attend(lib, branch, q, k, v, **how):
    """The branch of a library: (out, lse) or (out,)."""
    if branch == "compressed":
        return lib.compressed_attention(q, k, v, l=L, d=D_STRIDE, **how)
    return (lib.sliding_attention(q, k, v, window=WINDOW, **how),)


def truth(branch, q, k, v, q_start):
    return attend(reference, branch, q, k, v, q_start=q_start)


def same_dtype(branch, q, k, v, q_start):
    """The same by masked softmax in the inputs' own dtype, scores and all."""
    t = torch.arange(q_start, q_start + q.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    if branch == "compressed":
        seen = key * D_STRIDE + L - 1 <= t
    else:
        seen = (key <= t) & (key > t - WINDOW)
    h = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(h, 2), v.repeat_interleave(h, 2)
    scores = torch.einsum("bshd,bnhd->bhsn", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    out = torch.einsum("bhsn,bnhd->bshd", torch.softmax(scores, -1) * seen, v)
    return (out, None) if branch == "compressed" else (out,)


def each_sequence(run, branch, q, k, v, cu):
    """run() on each packed sequence as a batch of one, packed again."""
    parts, at_k = [], 0
    for a, b in pairwise(cu):
        n = num_compressed(b - a, L, D_STRIDE) if branch == "compressed" else b - a
        part = run(branch, q[None, a:b], k[None, at_k : at_k + n], v[None, at_k : at_k + n], 0)
        parts.append([None if x is None else x[0] for x in part])
        at_k += n
    return [None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)]


def check(case, source, branch, form, inputs, *, cu=None, q_start=0, seed=0):
    """Outputs, lse and gradients of one call, each a parity row; FA-2 launches are counted."""
    flags = Flags(use_fa2=True, fa2_force_varlen=form == "varlen", fa2_force_dense=form == "dense")
    name = f"fa2_{source}_{'varlen' if form == 'varlen' or cu and form == 'auto' else 'dense'}"
    device = inputs[0].device
    kw = {"q_start": q_start, "backend": "fa2", "flags": flags}
    if cu:
        kw["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device=device)
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    with launches.recording() as launched, dispatch.trace() as taken:
        got = attend(nsa, branch, q, k, v, **kw)
        grad_out = randn(*got[0].shape, seed=seed + 9, dtype=q.dtype, device=device)
        got = [*got, *torch.autograd.grad(got[0], (q, k, v), grad_out)]
    torch.cuda.synchronize()

    def plain(run, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        result = each_sequence(run, branch, *leaves, cu) if cu else run(branch, *leaves, q_start)
        return [*result, *torch.autograd.grad(result[0], leaves, grad_out.to(dtype))]

    ops = ["out", *["lse"] * (branch == "compressed"), "dQ", "dK", "dV"]
    want, same = plain(truth, torch.float64), plain(same_dtype, inputs[0].dtype)
    for op, a, b, c in zip(ops, got, want, same, strict=True):
        limit = {"out": 1e-3, "lse": 1e-4}.get(op)
        if limit is None:  # gradients grow with the rows that share a key
            limit = max(1e-3, 2 * (c.double() - b).abs().mean().item())
        assert_parity(
            f"{case}-{branch}-{form}", f"fa2_{branch}_{op}", a, b, c, path_requested="fa2",
            path_taken=taken[0].route.value, launches=launched, seed=seed, rows=op != "lse",
            expect_kernels=[name, f"{name}_bwd"] if op.startswith("d") else [name],
            limit_mae=limit,
        )  # fmt: skip


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("form", ["auto", "varlen", "dense"])
@pytest.mark.parametrize("dtype, HQ, G, Dk, Dv", [
    (BF, 8, 2, 64, 64), (HALF, 8, 2, 64, 64), (BF, 16, 1, 128, 128), (HALF, 4, 4, 128, 64),
    (BF, 4, 2, 192, 128), (BF, 4, 2, 40, 40),
])  # fmt: skip
def test_fa2_gpu_varlen_batches(dtype, HQ, G, Dk, Dv, form, branch, cuda, source):
    S = 333
    N = num_compressed(S, L, D_STRIDE) if branch == "compressed" else S
    inputs = make_qkv(2, S, HQ, G, Dk, Dv, Skv=N, dtype=dtype, device=cuda, seed=HQ)
    case = f"batch-{str(dtype)[6:]}-HQ{HQ}-G{G}-D{Dk}-Dv{Dv}"
    check(case, source, branch, form, inputs, seed=HQ)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("dtype", [BF, HALF])
def test_fa2_gpu_varlen_packed(dtype, form, branch, cuda, source):
    total = sum(num_compressed(b - a, L, D_STRIDE) for a, b in pairwise(LENGTHS))
    N = total if branch == "compressed" else LENGTHS[-1]
    inputs = make_qkv(1, LENGTHS[-1], 8, 2, 64, 64, Skv=N, dtype=dtype, device=cuda, seed=4)
    inputs = [x[0] for x in inputs]
    check(f"packed-{str(dtype)[6:]}", source, branch, form, inputs, cu=LENGTHS, seed=4)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("form", ["auto", "varlen"])
@pytest.mark.parametrize("S, q_start", [(1, 700), (5, 700), (40, 300)])
def test_fa2_gpu_varlen_chunks_and_decode(S, q_start, form, branch, cuda, source):
    """Queries that start late: the last rows of a prompt, and one decode step."""
    end = q_start + S
    N = num_compressed(end, L, D_STRIDE) if branch == "compressed" else end
    inputs = make_qkv(2, S, 8, 2, 64, 64, Skv=N, dtype=BF, device=cuda, seed=S)
    check(f"start{q_start}-S{S}", source, branch, form, inputs, q_start=q_start, seed=S)


def test_fa2_gpu_varlen_short_prompts_see_no_block(cuda, source):
    q, k, v = make_qkv(2, L - 1, 8, 2, 64, 64, Skv=0, dtype=BF, device=cuda, requires_grad=True)
    out, lse = fa2.compressed_fa2(q, k, v, l=L, d=D_STRIDE)
    assert not out.any() and lse.isneginf().all()
    out.sum().backward()
    assert not q.grad.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("branch", BRANCHES)
def test_fa2_gpu_varlen_unseen_values_have_no_effect(branch, packed, source):
    case = unseen.packed_case if packed else unseen.branch_case
    run, x, sees, places = case("fa2", branch, HALF, "cuda")
    unseen.check(run, x, sees, places, math.nan)
