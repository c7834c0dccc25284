"""Packed sequences: as each alone, whatever their lengths, and at the cost of their tokens."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter

import pytest
import torch

import nsa
from nsa import blocks, launches, rungs
from nsa.compress import mean_pool
from nsa.kernels import prefill
from nsa.kernels.prefill import hopper, packs
from nsa.kernels.prefill.choice import score_topn_triton
from nsa.kernels.prefill.packs import inside_pack
from nsa.layouts import gates_inside
from nsa.tests import helpers
from nsa.tests.cases import F16, NAMES, PAPER, WIDE, Case, Inputs, ends_of
from nsa.tests.helpers import TRITON, deterministic, make_block_indices, randn
from nsa.tests.test_prefill_kernels import whole_case

CLOSE = dict(rtol=2e-3, atol=2e-3)
KERNELS = dict(backend="triton", flags=TRITON)
SIZES = dict(l=8, d=4, l_sel=16, n_sel=3, n_init=1, n_local=1, window=11)


def tensors(T: int, n_cmp: int, h: int, dtype: torch.dtype, device: str, G: int = 2) -> list:
    """As nsa_attention takes them, packed."""
    return helpers.make_layer(T, G * h, G, B=None, n_cmp=n_cmp, dtype=dtype, device=device)


def gradients(xs: list, do: torch.Tensor, **how) -> tuple:
    """out, aux and gradients of nsa_attention."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    out, aux = nsa.nsa_attention(*leaves, **SIZES, **how, return_aux=True)
    return out.detach(), aux, torch.autograd.grad(out, leaves, do, materialize_grads=True)


def mixes() -> list:
    """One long and many short ones, empty ones, none long enough for a compressed key. A GPU's are
    longer, for tiles of 64 keys and more; each compiles for 20 s: a report runs one, and `make
    test` two of each mix."""
    found, big = [], dict(n_sel=4, **WIDE, **PAPER | dict(w=100))
    packs_of = [((0, 53, 1, 3, 0, 16, 0), 9), ((7, 5, 0, 1), 20), ((0, 0), 3)]
    for i, (lengths, beyond) in enumerate(packs_of):
        for h, fixed in [(4, False), (4, True), (2, False)]:
            marks = [pytest.mark.nightly] if fixed or i == 0 and h == 2 else []
            found.append(pytest.param(Case(lengths, h=h, beyond=beyond), fixed, marks=marks))
            if i == 0 and h == 4 and not fixed:
                marks = [pytest.mark.core, pytest.mark.long]
            large = Case(tuple(29 * n for n in lengths), h=4 * h, beyond=29 * beyond, **big)
            found.append(pytest.param(large, fixed, marks=marks))
    return found


@pytest.mark.parametrize("case, fixed", mixes(), ids=str)
def test_a_pack_is_each_sequence_alone(case, fixed, device):
    """Forward and gradients, through the library; rows of no sequence are 0 and get none, whatever
    they hold."""
    attend = lambda *x, **how: nsa.nsa_attention(*x, **how, **KERNELS, return_aux=True)
    with deterministic(fixed), launches.recording() as counts:
        whole_case("pack", Inputs(case, device), attend)
    # One launch each with a gradient, without one, and by the choice's own operator; one more where
    # a call met a later kernel that had to be compiled first, and was made again.
    calls = 3 if any(case.lengths) else 1
    chosen = sum(counts.get(f"_{n}_kernel", 0) for n in ("block_topn", "every_block"))
    assert calls <= chosen <= calls * (2 if device == "cuda" else 1)


@pytest.mark.core
@pytest.mark.parametrize("longest", [33, 80])
def test_packs_like_an_earlier_one(longest, cuda):
    """Packs of the same sizes are one call to what was settled and recorded; each must go by its
    own ends. Sequences of up to 48 tokens choose all their blocks."""
    packs_of = [(33, 9, 0, 21), (1, 31, 30, 1), (7, 7, 7, 7)]
    if longest > 48:
        packs_of = [(0, *x[:3]) for x in packs_of] + [(2, 80, 0, 5)]
    xs = tensors(90, 90 // SIZES["d"], 4, F16, cuda)
    do = randn(90, 8, 16, seed=11, dtype=F16, device=cuda)
    for lengths in [*packs_of, *packs_of, packs_of[0]]:
        how = dict(cu_seqlens=ends_of(lengths, cuda), max_seqlen=longest, flags=TRITON)
        results = []
        for backend in ("triton", "reference"):
            leaves = [x.detach().clone().requires_grad_() for x in xs]
            out = nsa.nsa_attention(*leaves, **SIZES, **how, backend=backend)
            results.append([out, *torch.autograd.grad(out, leaves, do, materialize_grads=True)])
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_what_serves_a_settled_pack_goes_by_its_own_ends(kernel_device):
    *xs, gates = tensors(40, 6, 4, F16, kernel_device)
    args = dict(
        tensors=(*xs, gates), sizes=SIZES, cu_seqlens=ends_of((9, 30), kernel_device),
        max_seqlen=30, q_start=0, softmax_scale=0.25,
    )  # fmt: skip
    again, cu = rungs.prefill_again(args, TRITON), ends_of((16, 16), kernel_device)
    gates[32:] = math.nan
    how = dict(SIZES, **KERNELS, softmax_scale=0.25, max_seqlen=30)
    want = nsa.nsa_attention(*xs, gates, **how, cu_seqlens=cu)
    assert torch.equal(again(*xs, gates, cu), want) and not want[32:].any()


@pytest.mark.core
def test_more_sequences_than_a_grid_has_room_for(kernel_device, monkeypatch):
    """They are a pack, whose grids go by tiles; with a chunk, whose queries stand behind keys. Four
    heads have a backward in one pass and one in two."""
    S, start, B, h = 9, 21, 2, 4
    n_cmp = blocks.num_compressed(start + S, SIZES["l"], SIZES["d"])
    draw = lambda i, n, *tail: randn(B, n, *tail, seed=i, dtype=F16, device=kernel_device)
    kv = [draw(2 + i, n_cmp if i < 2 else start + S, 2, 16) for i in range(6)]
    xs = [draw(1, S, 2 * h, 16), *kv, draw(9, S, 2 * h, 3).sigmoid()]
    run = lambda: gradients(xs, draw(10, S, 2 * h, 16), **KERNELS, q_start=start)
    grids, real = {}, packs.Rows.of

    def seen(*args):
        at = real(*args)
        grids[at.batch] = at.cu is not None
        return at

    monkeypatch.setattr(packs.Rows, "of", seen)
    for fixed in (False, True):
        grids.clear()
        with deterministic(fixed), monkeypatch.context() as patch:
            want = run()
            assert grids == {B: False}
            patch.setattr(packs, "MOST_BATCH", 2 * B - 1)
            patch.setattr(hopper, "MOST_BATCH", 2 * B - 1)
            got = run()
        assert grids == {B: False, 1: True}
        assert torch.equal(got[1]["block_indices"], want[1]["block_indices"])
        torch.testing.assert_close((got[0], *got[2]), (want[0], *want[2]), **CLOSE)


def test_max_seqlen_is_a_bound_for_the_choice_of_blocks_alone(kernel_device):
    """Elsewhere any number will do, since grids and lists follow from cu_seqlens."""
    if kernel_device == "cuda":
        pytest.skip("the assertion would end this process's use of the GPU")
    lengths = (37, 1, 3)
    cu = ends_of(lengths)
    cu_cmp = blocks.cu_seqlens_compressed(cu, 8, 4)
    how = dict(l=8, d=4, cu_seqlens=cu, cu_seqlens_cmp=cu_cmp)
    q, k_cmp, v_cmp, k, v, *_ = tensors(41, int(cu_cmp[-1]), 4, F16, "cpu")
    _, lse = prefill.compressed_attention_triton(q, k_cmp, v_cmp, **how)
    choose = lambda n: prefill.select_blocks_triton(
        q, k_cmp, lse, l_sel=16, n_sel=3, max_seqlen=n, **how
    )
    chosen = choose(37)
    assert torch.equal(choose(1 << 20), chosen)
    with pytest.raises(RuntimeError, match="max_seqlen must be at least the longest.*got 36"):
        choose(36)
    given = dict(block_size=16, cu_seqlens=cu)
    attend = lambda n: prefill.selection_blocks_triton(q, k, v, chosen, **given, max_seqlen=n)
    assert torch.equal(attend(1), attend(37))


@pytest.mark.parametrize("lengths, beyond", [
    ((5,), 0), ((0, 53, 1, 0, 7, 8, 9), 3), ((0,), 4), ((9, 0, 40) * 200, 1),
], ids=["one", "some", "none", "many"])  # fmt: skip
def test_what_a_pack_is_made_into_first(lengths, beyond, kernel_device):
    """Gates of rows that belong to no sequence are 0, and compressed keys begin where they do."""
    cu = ends_of(lengths).to(kernel_device)
    gates = torch.rand(sum(lengths) + beyond, 6, 3, device=kernel_device)
    gates[sum(lengths) :] = math.nan
    inside, cu_cmp = inside_pack(gates, cu, 8, 4, max(lengths))
    assert torch.equal(cu_cmp, blocks.cu_seqlens_compressed(cu, 8, 4))
    assert torch.equal(inside, gates_inside(gates, cu))
    wrong = torch.tensor([0, 40, 9, 30], dtype=torch.int32, device=kernel_device)
    _, cu_cmp = inside_pack(gates, wrong, 8, 4, 40)  # nobody waits to tell; kernels stay inside
    assert torch.equal(cu_cmp, blocks.cu_seqlens_compressed(wrong, 8, 4))


@pytest.mark.parametrize("kind", ["few", "mixed", "out_of_bounds"])
def test_ranges_of_a_pack_take_one_launch(kind, kernel_device):
    """And their gradients are those of the reference."""
    lengths, more, G, h = (40, 1, 0, 9, 3), 4, 2, 4
    cu, real = ends_of(lengths, kernel_device), sum(lengths)
    draw = lambda i, H: randn(real + more, H, 16, seed=i, dtype=F16, device=kernel_device)
    leaves = [draw(i, H).requires_grad_() for i, H in enumerate((G * h, G, G), 1)]
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 8 - x.shape[-2]))
    make = lambda n: pad(helpers.make_ranges(kind, 1, n, G, n, 1 + n // 2, seed=n)[0])
    parts = [make(n) for n in lengths if n]
    ranges = torch.cat([*parts, parts[0][:more]]).to(kernel_device)
    how = dict(ranges=ranges, cu_seqlens=cu, flags=TRITON)
    results = []
    for backend in ("triton", "reference"):
        with launches.recording() as counts:
            out = nsa.selection_attention(*leaves, **how, backend=backend)
        assert set(counts.values()) == ({1} if backend == "triton" else set())
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    torch.testing.assert_close(*results, rtol=5e-3, atol=5e-3)
    assert not results[0][0][real:].any()


def test_rows_of_no_sequence_on_the_other_routes(backend):
    lengths, more = (30, 0, 5), 7
    cu, real = ends_of(lengths), sum(lengths)
    xs = tensors(real + more, blocks.num_compressed(30, 8, 4), 2, torch.float64, "cpu")
    do = randn(real + more, 4, 16, seed=20, dtype=torch.float64)
    how = dict(cu_seqlens=cu, backend=backend)
    short = [x if "cmp" in n else x[:real] for n, x in zip(NAMES, xs, strict=True)]
    want, _, want_grads = gradients(short, do[:real], **how)
    for name, x in zip(NAMES, xs, strict=True):
        if "cmp" not in name:
            x[real:] = math.nan
    out, aux, grads = gradients(xs, do, **how)
    assert torch.equal(out[:real], want) and not out[real:].any()
    assert (aux["block_indices"][real:] == -1).all() and aux["lse"][real:].eq(-math.inf).all()
    for name, g, w in zip(NAMES, grads, want_grads, strict=True):
        assert torch.equal(g[: len(w)], w) and not g[len(w) :].any(), name


@pytest.fixture(params=[0, 90], ids=["interpreter", "Hopper"])
def costs(request, monkeypatch) -> Counter:
    """Launches nothing: launchers count their programs here, with the tiles of that GPU, and the
    bytes that they ask for."""
    found = Counter()

    def counted(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            found["bytes"] += x.numel() * x.element_size()
            return x

        return made

    for name in ("empty", "zeros", "empty_like", "zeros_like"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name)))

    def count(kernel, grid, *args, **constants):
        found[kernel.__name__] += math.prod(grid)
        assert all(n <= 65535 for n in grid[1:])

    of_gpu = dict(launch=count, arch_of=lambda _: request.param, sm_count=lambda _: 132)
    for module in pkgutil.walk_packages(prefill.__path__, prefill.__name__ + "."):
        loaded = importlib.import_module(module.name)
        for name in of_gpu.keys() & vars(loaded).keys():
            monkeypatch.setattr(loaded, name, of_gpu[name])
    monkeypatch.setattr(hopper, "enabled", lambda device, use_gluon=None: request.param == 90)
    monkeypatch.setattr(score_topn_triton, "SLAB_BYTES", 1 << 18)
    return found


# Of one sequence of 2048 tokens, the first.
MIXES = {
    "one": (2048,), "long and short": (1024, *[16] * 64), "short": (32,) * 64,
    "tiny": (1024, *[1] * 1024), "middling": (128,) * 16, "empty": (2048, *[0] * 1000),
}  # fmt: skip


@pytest.mark.parametrize("fixed", [False, True], ids=["one-pass", "two-pass"])
def test_packs_cost_what_their_tokens_do(fixed, costs):
    """Programs and bytes, beside one sequence of as many tokens, whatever max_seqlen."""
    G, h, D = 2, 16, 128

    def cost(lengths: tuple[int, ...]) -> Counter:
        T, cu = sum(lengths), ends_of(lengths)
        cu_cmp = blocks.cu_seqlens_compressed(cu, 32, 16)
        make = lambda n, *tail: torch.zeros(n, *tail, dtype=torch.bfloat16, requires_grad=True)
        kv = [make(n, G, D) for n in (int(cu_cmp[-1]),) * 2 + (T,) * 4]
        xs = [make(T, G * h, D), *kv, make(T, G * h, 3)]
        costs.clear()
        with deterministic(fixed):
            out, _ = prefill.nsa_prefill_triton(
                *xs, l=32, d=16, l_sel=64, n_sel=16, n_init=1, n_local=2, window=512,
                cu_seqlens=cu, max_seqlen=T,
            )  # fmt: skip
            torch.autograd.grad(out, xs, torch.zeros_like(out))
        return Counter(costs)

    whole = cost(MIXES["one"])
    for mix, lengths in MIXES.items():
        got, one, n_seq = cost(lengths), whole.copy(), len(lengths)
        assert got.keys() <= one.keys()
        assert got.pop("bytes") <= 1.05 * one.pop("bytes") + n_seq * 1024, mix
        for name, n in got.items():
            assert n <= 1.5 * one[name] + 20 * G * (n_seq + 1), (mix, name, n, one[name])


def test_packed_compression_of_rows_of_no_sequence():
    cu, x = ends_of((9, 4)), torch.randn(20, 2, 3, requires_grad=True)
    pooled = mean_pool(x, 4, 4, cu)
    torch.testing.assert_close(pooled, mean_pool(x[:13], 4, 4, cu))
    (grad,) = torch.autograd.grad(pooled.sum(), x)
    assert not grad[13:].any()


def test_blocks_after_the_query_or_past_the_sequence_are_nobodys(kernel_device):
    """A pack's next sequence has keys where they would be."""
    lengths, G, h = (20, 50), 1, 4
    cu = ends_of(lengths, kernel_device)
    q, _, _, k, v, *_ = tensors(70, 1, h, F16, kernel_device, G=G)
    kept = [make_block_indices("ragged", 1, n, G, 3, 16, seed=i)[0] for i, n in enumerate(lengths)]
    kept = torch.cat(kept).to(kernel_device)
    far = kept.masked_fill(kept < 0, 4)
    far[-1] = 1 << 20

    def run(chosen):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        how = dict(block_size=16, cu_seqlens=cu, max_seqlen=50)
        out = prefill.selection_blocks_triton(*leaves, chosen, **how)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    kept[-1] = -1
    for a, b in zip(run(far), run(kept), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
