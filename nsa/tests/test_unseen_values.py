"""What a query does not see changes neither its output nor the gradient of its q, NaN included:
0 * NaN is NaN, so a probability of 0 does not keep such a value out of a product."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

import nsa
from nsa import oracle
from nsa.blocks import num_compressed
from nsa.flags import Flags
from nsa.tests.helpers import deterministic, make_block_indices, make_qkv, randn

FLAGS = Flags(use_triton_sel=True, sel_triton_allow_grad=True)
L, D, L_SEL, W = 8, 4, 16, 9
S = 41  # not whole tiles of queries
BAD = [math.nan, math.inf, 60000.0]
F16, F32 = torch.float16, torch.float32

# ---- which keys a query sees, by the definitions -------------------------------------------------


def sees_window(S, N, start=0):
    t, key = torch.arange(start, start + S)[:, None], torch.arange(N)
    return (key <= t) & (key > t - W)


def sees_compressed(S, N, start=0):
    t, key = torch.arange(start, start + S)[:, None], torch.arange(N)
    return key * D + L - 1 <= t


def sees_ranges(ranges, N):
    """[B, S, G, N]"""
    key = torch.arange(N)
    return ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(-2)


def sees_blocks(blocks, N, start=0):
    return sees_ranges(oracle.blocks_to_ranges(blocks, L_SEL, start), N)


# ---- the check -----------------------------------------------------------------------------------


def outcome(run, q, k, v):
    """Output, and gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    grad = randn(*out.shape, seed=77, dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(run, tensors, sees, places, bad):
    """Rows of k and v become `bad`: those of the places (indices of k and v) that nobody sees, then
    those of the others, first in k and then in v.

    sees [(B,) S, (G,) N] of keys. Who sees none of the rows is what it was; if nobody does, the
    gradients of k and v are as well. Who sees one is not finite.
    """
    was, (q, k, _) = outcome(run, *tensors), tensors
    seeing = [who_sees(at, q, k, sees) for at in places]
    for seen in (False, True):
        together = [i for i, x in enumerate(seeing) if x.any() == seen]
        for names in (("k", "v") if seen else ("kv",)) if together else ():
            x = dict(zip("qkv", tensors, strict=True))
            for name in names:
                x[name] = x[name].clone()
                for i in together:
                    x[name][places[i]] = bad
            anywhere = torch.stack([seeing[i] for i in together]).any(0)
            compare(outcome(run, **x), was, anywhere, k.shape[-2], names, bad)


def who_sees(at, q, k, sees):
    """[(B,) S, G]"""
    hit = torch.zeros(k.shape[:-1], dtype=torch.bool)  # [(B,) N, G]
    hit[at] = True
    hit = hit.transpose(-1, -2)  # [(B,) G, N]
    if sees.ndim == 2:
        sees = sees[:, None]
    found = (sees & (hit[:, None] if q.ndim == 4 else hit)).any(-1)
    return found.expand(*q.shape[:-2], k.shape[-2])


def compare(now, was, seeing, groups, name, bad):
    half = was[1].dtype == F16
    rows = lambda x, which: x.cpu().unflatten(-2, (groups, -1))[which].float()
    for what, a, b in zip(("out", "dq"), now, was, strict=False):
        a, b, tol = rows(a, ~seeing), rows(b, ~seeing), 2e-3 if half else 1e-5
        assert b.isfinite().all()
        assert a.isfinite().all(), f"{what} of rows that do not see {name} = {bad}"
        torch.testing.assert_close(a, b, atol=tol, rtol=tol, msg=lambda m, w=what: f"{w}: {m}")
    if not seeing.any():
        for what, a, b in zip(("dk", "dv"), now[2:], was[2:], strict=True):
            tol = 5e-3 if half else 1e-5
            torch.testing.assert_close(a, b, atol=tol, rtol=tol, msg=lambda m, w=what: f"{w}: {m}")
    elif bad != 60000.0:
        odd = ~rows(now[0], seeing).isfinite()
        assert odd.flatten(1).any(-1).all(), f"rows that see {name} = {bad} hide it"
        if math.isnan(bad):
            assert rows(now[0], seeing).isnan().all()
            assert rows(now[1], seeing).isnan().any(-1).all()


def inputs(N, *, B=1, dtype=F32, device="cpu", packed=False, h=2, S=S):
    q, k, v = make_qkv(B, S, 2 * h, 2, 16, Skv=N, dtype=dtype, device=device, seed=N)
    return (q[0], k[0], v[0]) if packed else (q, k, v)


def spans_in_fp32(name, q, k, v, q_start=0):
    """The kernels of spans, which the routes take for 16 bits only."""
    from nsa.kernels.prefill import compressed_attention_triton, sliding_attention_triton

    if name == "compressed":
        return compressed_attention_triton(q, k, v, l=L, d=D, q_start=q_start)[0]
    return sliding_attention_triton(q, k, v, window=W, q_start=q_start)[0]


def sliding(backend, **how):
    return lambda q, k, v: nsa.sliding_attention(
        q, k, v, window=W, backend=backend, flags=FLAGS, **how
    )


def compressed(backend, **how):
    return lambda q, k, v: nsa.compressed_attention(
        q, k, v, l=L, d=D, backend=backend, flags=FLAGS, **how
    )[0]


def selected(backend, blocks, **how):
    return lambda q, k, v: nsa.selection_attention(
        q, k, v, blocks, block_size=L_SEL, backend=backend, flags=FLAGS, **how
    )


def by_ranges(backend, ranges, **how):
    return lambda q, k, v: nsa.selection_attention(
        q, k, v, ranges=ranges, backend=backend, flags=FLAGS, **how
    )


def causal_ranges(S, N, seed=0):
    """Three ranges a row and group, different ones for all, none after the query."""
    ranges = torch.randint(0, 12, (1, S, 2, 3, 2), generator=torch.Generator().manual_seed(seed))
    start = ranges[..., 0] * 3
    spans = torch.stack([start, start + ranges[..., 1]], -1).to(torch.int32)
    t = torch.arange(N - S, N, dtype=torch.int32)[None, :, None, None, None]
    return spans.minimum(t + 1)


# ---- PyTorch's routes ----------------------------------------------------------------------------


def branch_case(backend, name, dtype=F32, device="cpu", h=2):
    """run, (q, k, v), sees and the places of the bad rows: the last key, one in the middle, rows
    behind the end, and another sequence of the batch."""
    how = dict(dtype=dtype, device=device, h=h)
    later = (slice(None), slice(-1, None))
    middle = (slice(None), slice(20, 21))
    if name == "sliding":
        x = inputs(S, B=2, **how)
        return sliding(backend), x, sees_window(S, S), [later, middle, (1,)]
    if name == "sliding chunk":  # of a longer sequence
        x, run = inputs(S, B=1, S=6, **how), sliding(backend, q_start=S - 6)
        return run, x, sees_window(6, S, S - 6), [later, (slice(None), slice(30, 31))]
    if name == "compressed":
        n = num_compressed(S, L, D)
        x = inputs(n + 2, B=2, **how)
        stale = (slice(None), slice(n, None))
        last = (slice(None), slice(n - 1, n))
        return compressed(backend), x, sees_compressed(S, n + 2), [stale, last, (1,)]
    if name == "blocks":
        x = inputs(S + 5, B=2, **how)
        blocks = make_block_indices("random", 2, S, 2, 2, L_SEL, seed=1)
        run = selected(backend, blocks.to(device))
        last = (slice(None), slice(S - 1, S))
        stale = (slice(None), slice(S, None))
        return run, x, sees_blocks(blocks, S + 5), [stale, last, middle, (1,)]
    n = 12  # the last queries of so many keys
    x, ranges = inputs(S + 5, B=1, S=n, **how), causal_ranges(n, S)
    stale = (slice(None), slice(S, None))
    run = by_ranges(backend, ranges.to(device))
    return run, x, sees_ranges(ranges, S + 5), [stale, middle, later]


BRANCHES = ["sliding", "sliding chunk", "compressed", "blocks", "ranges"]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_of_pytorch(backend, name, bad):
    run, x, sees, places = branch_case(backend, name)
    check(run, x, sees, places, bad)


@pytest.mark.parametrize("name", BRANCHES)
def test_an_unseen_score_that_overflows_changes_nothing(backend, name):
    """PyTorch's kernels add the mask, and infinity - infinity is NaN."""
    run, (q, k, v), sees, places = branch_case(backend, name)
    for place in places:
        large = k.clone()
        large[place] = torch.finfo(k.dtype).max / 2
        unseeing = ~who_sees(place, q, k, sees)
        now, was = (run(q, x, v).unflatten(-2, (2, -1))[unseeing] for x in (large, k))
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-5)


def check_queries(run, tensors, bad):
    """A query of `bad` values changes no other's output, nor its gradient."""
    q, k, v = tensors
    odd, at = q.clone(), q.shape[-3] // 2
    odd[..., at, :, 1] = bad
    others = [row for row in range(q.shape[-3]) if row != at]
    now, was = outcome(run, odd, k, v), outcome(run, q, k, v)
    for x, y in list(zip(now, was, strict=True))[:2]:
        torch.testing.assert_close(x[..., others, :, :], y[..., others, :, :], rtol=1e-5, atol=1e-5)
    if math.isnan(bad):  # of a row that sees a key
        assert not now[0][..., at, :, :].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e36])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_query_changes_no_other(backend, name, bad):
    run, (q, k, v), *_ = branch_case(backend, name)
    check_queries(run, (q, k * 100, v), bad)


CU = [0, 17, 17, 33]  # and rows of no sequence behind


def packed_case(backend, name, dtype=F32, device="cpu", h=2):
    """run, (q, k, v), sees and places: the first and the last key of a sequence, rows of none."""
    how = dict(dtype=dtype, device=device, packed=True, h=h)
    cu = torch.tensor(CU, dtype=torch.int32)
    pack = dict(cu_seqlens=cu.to(device))
    counts = [num_compressed(b - a, L, D) for a, b in zip(CU, CU[1:], strict=False)]
    keys = sum(counts) if name == "compressed" else S
    groups, sees = 2, torch.zeros(S, 2, keys, dtype=torch.bool)
    blocks = torch.full((S, groups, 2), -1, dtype=torch.int32)
    at = 0
    for i, (a, b) in enumerate(zip(CU, CU[1:], strict=False)):
        if name == "compressed":
            sees[a:b, :, at : at + counts[i]] = sees_compressed(b - a, counts[i])[:, None]
            at += counts[i]
        elif name == "sliding":
            sees[a:b, :, a:b] = sees_window(b - a, b - a)[:, None]
        elif b > a:
            one = make_block_indices("random", 1, b - a, groups, 2, L_SEL, seed=i)
            blocks[a:b], sees[a:b, :, a:b] = one[0], sees_blocks(one, b - a)[0]
    x = inputs(keys, **how)
    if name == "compressed":
        places = [(slice(counts[0], counts[0] + 1),), (slice(counts[0] - 1, counts[0]),)]
        return compressed(backend, **pack), x, sees, places
    places = [(slice(17, 18),), (slice(16, 17),), (slice(33, None),)]
    if name == "sliding":
        return sliding(backend, **pack), x, sees, places
    if name == "blocks":
        return selected(backend, blocks.to(device), **pack), x, sees, places
    ranges = torch.zeros(S, groups, 2, 2, dtype=torch.int32)
    for a, b in zip(CU, CU[1:], strict=False):
        if b > a:
            ranges[a:b] = oracle.blocks_to_ranges(blocks[a:b][None], L_SEL)[0]
    return by_ranges(backend, ranges.to(device), **pack), x, sees, places


PACKED = ["sliding", "compressed", "blocks", "ranges"]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", PACKED)
def test_packed_branches_of_pytorch(backend, name, bad):
    run, x, sees, places = packed_case(backend, name)
    check(run, x, sees, places, bad)


@pytest.mark.parametrize("name", ["k", "v"])
def test_lse_is_that_of_the_seen_keys(backend, name):
    """It is what blocks are chosen by: values have no part in it."""
    n = num_compressed(S, L, D)
    q, k, v = inputs(n)
    x = dict(k=k, v=v)
    lse_of = lambda k, v: nsa.compressed_attention(q, k, v, l=L, d=D, backend=backend)[1]
    was = lse_of(**x)
    x[name] = x[name].clone()
    x[name][:, -1] = math.nan
    now = lse_of(**x)
    last = sees_compressed(S, n)[:, -1]
    torch.testing.assert_close(now[:, ~last], was[:, ~last])
    if name == "k":
        assert now[:, last].isnan().all()
    else:
        torch.testing.assert_close(now, was)


def check_choice(backend, bad, device="cpu"):
    n = num_compressed(S, L, D)
    q, k, _ = inputs(n + 2, dtype=F16, device=device)
    choose = lambda k: nsa.select_blocks(
        q, k, l=L, d=D, l_sel=4, n_sel=5, backend=backend, flags=FLAGS
    )
    was = choose(k)
    for row in (n, n - 1, 3):
        bad_k = k.clone()
        bad_k[:, row] = bad
        blind = ~sees_compressed(S, n + 2)[:, row]
        assert torch.equal(choose(bad_k)[:, blind], was[:, blind]), row


@pytest.mark.parametrize("bad", BAD)
def test_choice_of_blocks_of_pytorch(bad):
    check_choice("reference", bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_oracle(bad):
    """It gathers what a query sees, and nothing else."""
    _, x, sees, places = branch_case("reference", "sliding", torch.float64)
    run = lambda q, k, v: oracle.sliding_attention(q, k, v, window=W)
    check(run, x, sees, places[:2], bad)


def layer(dtype=F32, device="cpu", B=2, h=2):
    """What nsa_attention takes, buffers of compressed and selected keys longer than seen."""
    n = num_compressed(S, L, D)
    make = lambda seed, *dims: randn(B, *dims, seed=seed, dtype=dtype, device=device)
    return [
        make(1, S, 2 * h, 16), make(2, n + 2, 2, 16), make(3, n + 2, 2, 16), make(4, S + 3, 2, 16),
        make(5, S + 3, 2, 16), make(6, S, 2, 16), make(7, S, 2, 16),
        make(8, S, 2 * h, 3).sigmoid(),
    ]  # fmt: skip


def whole(tensors, backend):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = nsa.nsa_attention(
        *leaves, l=L, d=D, l_sel=L_SEL, n_sel=3, window=W, backend=backend, flags=FLAGS
    )
    grad = randn(*out.shape, seed=9, dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check_whole(tensors, backend, bad, tol):
    n, was = num_compressed(S, L, D), whole(tensors, backend)
    last = {1: n - 1, 2: n - 1, 3: S - 1, 4: S - 1, 5: S - 1, 6: S - 1}
    first = (n - 1) * D + L - 1  # that sees the last compressed key
    for of, sequences, behind, seen_from in (
        ((1, 3, 5), slice(1), 0, first),  # keys from the last one on
        ((2, 4, 6), slice(1), 0, first),  # values
        ((1, 2, 3, 4), slice(None), 1, S),  # what is behind the end, where there is room
    ):
        x = [t.clone() for t in tensors]
        for i in of:
            x[i][sequences, last[i] + behind :] = bad
        now = whole(x, backend)
        for what, a, c in zip(("out", "dq"), now, was, strict=False):
            for got, want in ((a[:, :seen_from], c[:, :seen_from]), (a[1:], c[1:])):
                torch.testing.assert_close(
                    got, want, atol=tol, rtol=tol, msg=lambda m, i=of, w=what: f"{i} {w} {m}"
                )
        if seen_from == S:
            assert all(g.isfinite().all() for g in now[1:])
        elif math.isnan(bad):
            assert now[0][0, -1].isnan().all()


@pytest.mark.parametrize("bad", BAD)
def test_attention_of_pytorch(backend, bad):
    check_whole(layer(), backend, bad, 1e-5)


def test_a_query_of_nan_that_sees_nothing():
    """Where there is no compressed key at all."""
    q, k, v = make_qkv(1, 5, 2, 1, 8, Skv=0)
    q[0, 0] = math.nan
    out, lse = nsa.compressed_attention(q, k, v, l=L, d=D, backend="reference")
    assert not out.any() and lse.isneginf().all()


def check_odd_gates(tensors, backend, odd, tol):
    """Gates are real numbers. Of one that is none the row tells, by its output and by its q's
    gradient; the others are what they were, and so is what the gradient of the gates is made of."""
    was, x = whole(tensors, backend), [t.clone() for t in tensors]
    others = torch.ones(was[0].shape[:-1], dtype=torch.bool)
    for i, (value, branch) in enumerate(itertools.product(odd, range(3))):
        x[7][0, 30 + i, 1, branch] = value
        others[0, 30 + i, 1] = False
    now = whole(x, backend)
    for got, want in zip(now[:2], was[:2], strict=True):
        assert not got[~others].isfinite().all(-1).any(), "hidden"
        torch.testing.assert_close(got[others], want[others], atol=tol, rtol=tol)
    torch.testing.assert_close(now[8], was[8], atol=tol, rtol=tol)


# Kernels ask whether any gate is negative.
GATES = pytest.mark.parametrize("odd", [(math.inf, math.nan), (-math.inf,)], ids=str)


@GATES
def test_gates_that_are_no_numbers(backend, odd):
    check_odd_gates(layer(), backend, odd, 1e-5)


# ---- Triton's kernels ----------------------------------------------------------------------------

NAN_OR_LARGE = [math.nan, 60000.0]  # a key of infinity has scores of NaN


@pytest.mark.parametrize(
    "name, bad", [*((name, math.nan) for name in BRANCHES[:3]), ("compressed", -math.inf)]
)
def test_a_query_of_tritons_kernels_changes_no_other(name, bad, kernel_device):
    run, x, *_ = branch_case("triton", name, F16, kernel_device)
    check_queries(run, x, bad)


@pytest.mark.parametrize(
    ("name", "bad"),
    [(name, math.nan) for name in BRANCHES]
    + [("sliding", 60000.0), ("compressed", math.inf), ("ranges", math.inf),
       pytest.param("blocks", math.inf, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_branches_of_triton(name, bad, kernel_device):
    run, x, sees, places = branch_case("triton", name, F16, kernel_device)
    check(run, x, sees, places, bad)


@pytest.mark.parametrize(
    "name, bad", [*((name, math.nan) for name in BRANCHES[:3]), ("sliding", 60000.0)]
)
def test_spans_of_triton_in_fp32(name, bad, kernel_device):
    _, x, sees, places = branch_case("triton", name, F32, kernel_device)
    start = {"q_start": S - 6} if name == "sliding chunk" else {}
    check(lambda q, k, v: spans_in_fp32(name, q, k, v, **start), x, sees, places, bad)


@pytest.mark.parametrize("bad", [math.nan])
@pytest.mark.parametrize("name", PACKED)
def test_packed_branches_of_triton(name, bad, kernel_device):
    run, x, sees, places = packed_case("triton", name, F16, kernel_device)
    check(run, x, sees, places, bad)


@pytest.mark.parametrize("two_passes", [False, True])
def test_compressed_backward_of_four_heads(two_passes, kernel_device):
    """Of which there is a kernel that finds all gradients in one pass."""
    run, x, sees, places = branch_case("triton", "compressed", F16, kernel_device, h=4)
    with deterministic() if two_passes else contextlib.nullcontext():
        check(run, x, sees, places, math.nan)


@pytest.mark.parametrize("bad", NAN_OR_LARGE)
def test_choice_of_blocks_of_triton(bad, kernel_device):
    check_choice("triton", bad, kernel_device)


@pytest.mark.parametrize("team", [False, True])
def test_decode_of_several_tokens(team, kernel_device, monkeypatch):
    """A new token's keys are not those of the tokens before it."""
    from nsa.kernels.decode import nsa_decode_triton

    monkeypatch.setenv("NSA_USE_CLUSTER", "0")
    T, lens = 4, [39, 30]
    make = lambda seed, *dims: randn(2, *dims, seed=seed, dtype=F16, device=kernel_device)
    q, gates = make(1, T, 4, 16), make(2, T, 4, 3).sigmoid()
    caches = [make(3 + i, 12 if i < 2 else 48, 2, 16) for i in range(6)]

    def run(caches):
        counters = torch.zeros(2, 2, 32, dtype=torch.int32, device=kernel_device)
        with torch.no_grad():
            return nsa_decode_triton(
                q, *caches, gates, torch.tensor(lens, device=kernel_device), l=L, d=D, l_sel=L_SEL,
                n_sel=3, n_init=1, n_local=2, window=W, max_len=48,
                counters=counters if team else None,
            )  # fmt: skip

    was = run(caches)
    for i in range(len(caches)):
        changed = [x.clone() for x in caches]
        # The last compressed key of 39 tokens is that of the last one alone: (39 - 8) % 4 == 3.
        row = num_compressed(lens[0], L, D) - 1 if i < 2 else lens[0] - 1
        seen_from = (row * D + L - 1 if i < 2 else row) - (lens[0] - T)
        changed[i][0, row:] = math.nan
        now = run(changed)
        assert torch.equal(now[1], was[1]), i
        seen_from = max(seen_from, 0)
        torch.testing.assert_close(now[0, :seen_from], was[0, :seen_from], atol=0, rtol=0)
        assert now[0, seen_from:].isnan().all(), i


def test_attention_of_triton(kernel_device):
    check_whole(layer(F16, kernel_device), "triton", math.nan, 4e-3)


@GATES
def test_gates_of_triton_that_are_no_numbers(odd, kernel_device):
    check_odd_gates(layer(F16, kernel_device, B=1), "triton", odd, 4e-3)


@pytest.mark.parametrize("bad", BAD[:2])
@pytest.mark.parametrize("shape, dv", [((1, 70, 2, 24), 24), ((50, 1, 16), 48)], ids=str)
def test_keys_tell_of_their_values(shape, dv, bad, kernel_device):
    from nsa.kernels.prefill.marked_keys import marked

    k, v = (
        randn(*shape[:-1], d, seed=d, dtype=F16, device=kernel_device) for d in (shape[-1], dv)
    )  # fmt: skip
    odd = torch.zeros(shape[:-1], dtype=torch.bool, device=kernel_device)
    odd.view(-1)[[0, 17, -1]] = True
    v[..., 5] = v[..., 5].masked_fill(odd, bad)
    new_k, new_v = marked(k, v)
    assert torch.equal(new_k[~odd], k[~odd]) and torch.equal(new_v[~odd], v[~odd])
    assert new_k[odd].isnan().all() and (new_v[odd] == 0).all()


@pytest.mark.parametrize("dtype", [F16, torch.float32])
def test_a_backward_takes_finite_keys_and_values(dtype, kernel_device):
    from nsa.kernels.prefill.marked_keys import keys_for_backward, values_for_backward

    x = randn(3, 70, 2, 24, seed=1, dtype=dtype, device=kernel_device)
    x[0, 3, 1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    for given in (x, x.transpose(1, 2)):
        most = torch.finfo(dtype).max
        want = torch.nan_to_num(given, nan=0.0, posinf=most, neginf=-most)
        assert torch.equal(keys_for_backward(given), want)
        want = torch.nan_to_num(given, nan=0.0, posinf=0.0, neginf=0.0)
        assert torch.equal(values_for_backward(given), want)


@pytest.mark.parametrize("name", ["k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"])
@pytest.mark.parametrize("h", [pytest.param(16, marks=pytest.mark.core), 4])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_at_a_gpus_sizes(packed, h, name, kernel_device):
    """The last token of a sequence, whose kernels read 64 or 128 keys at a time."""
    if kernel_device == "cpu":
        pytest.skip("a GPU's size")
    n, l, d = 700, 32, 16
    kw = dict(dtype=torch.bfloat16, device=kernel_device)
    n_cmp = num_compressed(n, l, d)
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    shapes = [(n, 2 * h, 128), *[(n_cmp, 2, 128)] * 2, *[(n, 2, 128)] * 4, (n, 2 * h, 3)]
    x = {m: randn(2, *s, seed=i, **kw) for i, (m, s) in enumerate(zip(names, shapes, strict=True))}
    last = (n_cmp - 1) * d + l - 1 if "cmp" in name else n - 1  # the first token that sees it
    how = {}
    if packed:
        cu = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=kernel_device)
        how = dict(cu_seqlens=cu, max_seqlen=n)

    def run(x):
        x = {m: (t.flatten(0, 1) if packed else t).detach().requires_grad_() for m, t in x.items()}
        out = nsa.nsa_attention(**x, **how, flags=FLAGS, backend="triton")
        dq = torch.autograd.grad(out, x["q"], torch.ones_like(out))[0]
        return [t.detach().view(2, n, *t.shape[-2:]) for t in (out, dq)]

    with deterministic():
        want = run(x)
        x[name] = x[name].clone()
        x[name][0, -1] = math.nan
        got = run(x)
    assert got[0][0, last:].isnan().all()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[0, :last], b[0, :last]) and torch.equal(a[1], b[1])
