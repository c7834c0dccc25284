"""The decode step of one launch (cluster.cu): right on a GPU of SM 9.0, sized and built anywhere.

The kernel is CUDA C++, so no interpreter runs it. Caches hold NaN wherever a step may not read.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from nsa.flags import clear_flags_cache
from nsa.kernels.decode import cluster, nsa_decode_triton
from nsa.kernels.decode.cluster import compile_cluster, plan, why_not
from nsa.kernels.tiles import cdiv
from nsa.tests import test_decode_kernels as kernels
from nsa.tests.test_decode_kernels import BF16, F16, F32, GIVEN, WIDE, Caches, Step
from scripts.aot import usage

NAME = "_decode_cluster_kernel"
SMALL = dict(D=64, Dv=64, h=2, d=4, l=8, l_sel=16, w=16)
STEPS = [
    # Clusters of 16, 8, 4 (one and two on a multiprocessor), 2 (likewise) and single blocks.
    Step((9000,), G=4, ring=True, **{**WIDE, "capacity": 20000}),
    Step((3000, 1025), G=4, ring=True, **{**WIDE, "capacity": 10000}),
    Step((4096, 17, 1024, 2000), G=4, **WIDE),
    Step((3000, 17, 1025, 31, 32, 33, 63, 64), G=4, **WIDE),
    Step((4096, 3, 700, 1025) * 3, G=4, ring=True, **WIDE),
    Step((4000, 1, 1100, 65), G=17, **WIDE),
    Step((4096, 3, 700, 1025, 64), G=27, ring=True, **WIDE),
    # One exchange of normalisers, blocks of four and eight warps; many keys to choose from, whose
    # best each block finds first, by rank or of those that reach a bound.
    Step((4000,), G=4, **WIDE),
    Step((14000,), G=4, page=64, **{**WIDE, "capacity": 16000}),
    Step((28000, 8200), G=5, ring=True, **{**WIDE, "capacity": 28160}),
    Step((7000, 300, 90, 2000), G=34, **{**WIDE, "h": 1, "capacity": 8192}),
    # Every kind of cache, other head sizes, heads and dtypes, keys of one block only (l = d).
    Step((9000, 2000), G=4, page=64, ring=True, **{**WIDE, "capacity": 10000}),
    Step((2000, 700), G=2, page=16, **WIDE),
    Step((2000, 700, 64), G=2, ring=True, **{**WIDE, "h": 4, "D": 64, "Dv": 64, "dtype": F16}),
    Step((2500, 1500), G=1, **{**WIDE, "h": 8, "dtype": F16, "n_sel": 8}),
    Step((2500, 99), G=3, **{**WIDE, "h": 1, "n_sel": 32}),
    Step((4000, 2049), G=2, ring=True, **{**WIDE, "l": 16}),
    Step((3999, 130), G=2, **{**WIDE, "d": 8, "l": 16, "l_sel": 32, "w": 48}),
    # Compressed keys in pages, too, of one token and several.
    Step((3999, 64, 65, 1025), G=4, page=64, cmp_paged=True, **WIDE),
    Step((9000,), T=2, G=4, page=16, cmp_paged=True, ring=True, **{**WIDE, "capacity": 10000}),
    Step((3000, 1090) * 15, T=4, G=4, page=64, cmp_paged=True, **{**WIDE, "D": 192, "l": 16}),
    # Keys wider than values, in rings and pages, of which parts are seen.
    Step((9000, 1026), G=4, ring=True, **{**WIDE, "D": 192, "capacity": 10000}),
    Step((4096, 3, 700, 1025) * 6, G=4, page=64, **{**WIDE, "D": 192}),
    Step((2000, 33), G=2, ring=True, page=16, **{**WIDE, "Dv": 64, "dtype": F16, "h": 6}),
    # Several new tokens, whose windows, compressed keys and own blocks begin and end between them.
    Step((8192,), T=4, G=4, ring=True, **{**WIDE, "capacity": 8192}),
    Step((1027, 66, 2, 3000), T=2, G=4, page=64, **WIDE),
    Step((4096, 67, 513, 1040) * 2, T=5, G=4, ring=True, page=64, **WIDE),
    Step((2000, 700, 64), T=8, G=2, ring=True, **{**WIDE, "h": 4, "D": 64, "Dv": 64, "dtype": F16}),
    Step((3000, 70, 1024), T=4, G=4, ring=True, **{**WIDE, "D": 192}),
    Step((4096, 8, 700, 35) * 16, T=8, G=2, **{**WIDE, "h": 1}),
    # Of many sequences those of one share what they read: 3, 4, 8, or 2 of 4 at a time.
    Step((4096, 3, 700, 1025) * 16, T=3, G=4, ring=True, **WIDE),
    Step((4096, 1026, 1090, 34) * 8, T=4, G=4, page=64, **WIDE),
    Step((1087, 8, 3000, 519), T=8, G=34, ring=True, **{**WIDE, "h": 5, "dtype": F16}),
    Step((3000, 1024, 66, 1153) * 8, T=4, G=4, ring=True, page=64, **{**WIDE, "D": 192}),
    # Of 541 tokens the first chosen keys come with the last compressed ones.
    Step((541, 130, 2003, 515) * 4, T=8, G=8, **WIDE | SMALL),
    Step((2048, 1026, 130, 4) * 4, T=4, G=4, **{**WIDE, "D": 64, "Dv": 64, "l": 16, "h": 4}),
]
# The same of e4m3 keys and values: each size of cluster, way to choose, kind of cache, head size.
FP8 = [0, 1, 2, 4, 6, 7, 9, 11, 13, 15, 19, 20, 22, 23, 27, 28, 31]
STEPS += [replace(STEPS[i], fp8=True) for i in FP8]


def marks(s: Step) -> pytest.MarkDecorator:
    """Steps of so many sequences that their results in fp64 take 10 to 30 s are left out of a
    report, since smaller steps run the same code."""
    return pytest.mark.long if s.G == 34 or len(s.lengths) * s.T >= 64 else pytest.mark.core


@pytest.fixture
def served(cuda, kernel_device, monkeypatch):
    """A GPU whose steps go this way."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel for clusters serves SM 9.0")
    monkeypatch.setenv("NSA_USE_CLUSTER", "1")


def launched(caches):
    """out and block_indices of a step that was one launch of this kernel."""
    *found, counts = caches.launched()
    assert dict(counts) == {NAME: 1}
    return found


@pytest.mark.parametrize("step", [pytest.param(s, marks=marks(s)) for s in STEPS], ids=str)
def test_step(step, served):
    caches = Caches(step, "cuda")
    out, indices = launched(caches)
    kernels.assert_proven(f"cluster/{step}", caches, out, indices, {NAME: 1}, [NAME])
    again, same = launched(caches)  # sums have a fixed order
    assert torch.equal(again, out) and torch.equal(same, indices)


@pytest.mark.core
@pytest.mark.parametrize("step", [STEPS[2], STEPS[4], STEPS[9], STEPS[13]], ids=str)
def test_values_near_the_largest(step, served):
    """fp32 holds no 256 of them, so probabilities stay below 1 whatever maximum comes later."""
    caches = Caches(step, "cuda")
    caches.q.mul_(4)  # maxima grow by much, all along the keys
    want = launched(caches)[0]
    size = 2.0 ** (122 if step.dtype == BF16 else 10)
    for _, values in (caches.cmp, caches.sel, caches.win):
        values.mul_(size)
    assert torch.equal(launched(caches)[0].double() / size, want.double())


@pytest.mark.core
@pytest.mark.parametrize(("lens", "groups"), [
    ((4000,), 4), ((2500, 4000), 20), ((4000, 90), 40), ((2500,), 160),
], ids=str)  # fmt: skip
def test_ties_go_to_the_lower_block(lens, groups, served):
    """Of keys all alike, also where the blocks of a cluster share them."""
    step = Step(lens, G=groups, **{**WIDE, "capacity": cdiv(max(lens), 64) * 64})
    caches = Caches(step, "cuda")
    caches.q.zero_()
    for got, n in zip(launched(caches)[1][:, 0].tolist(), lens, strict=True):
        own = (n - 1) // 64
        want = [0, *range(1, 14), own - 1, own] if own >= 16 else [*range(own + 1)]
        assert got == [want + [-1] * (16 - len(want))] * groups


@pytest.mark.parametrize("block", [3, 4, 7, 15, 31, 32, 47])
def test_a_key_of_two_blocks_counts_for_both(block, served):
    """At the edges of a warp's units and of the cluster's blocks."""
    caches = Caches(Step((4000,), G=4, **{**WIDE, "n_sel": 5}), "cuda")
    caches.q.fill_(1)
    caches.cmp[0][:, 4 * block + 3] = 3  # half of its tokens in this block, half in the next
    assert launched(caches)[1][0, 0].tolist() == [[0, block, block + 1, 61, 62]] * 4


# Sequences of which each token has a cluster, and of which a block attends for all four.
FEW_AND_MANY = [(2000, 1024), (2000, 1999, 66, 1024) * 8]


@pytest.mark.parametrize("lens", FEW_AND_MANY, ids=len)
def test_what_later_tokens_add_changes_no_earlier_one(lens, served):
    caches = Caches(Step(lens, T=4, G=4, **WIDE), "cuda")
    out, indices = launched(caches)
    for b, n in enumerate(lens):
        for x in (*caches.sel, *caches.win):
            x[b, n - 1] = float("nan")
        if (n - 32) % 16 == 0:  # the last token completes a compressed key
            for x in caches.cmp:
                x[b, (n - 32) // 16] = float("nan")
    other, blocks = launched(caches)
    assert torch.equal(blocks[:, :3], indices[:, :3]) and other[:, 3].isnan().all()
    torch.testing.assert_close(other[:, :3], out[:, :3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("T, page, lens", [
    (1, 0, (4000, 20, 1500)), (1, 64, (4000, 20, 1500)), (4, 64, FEW_AND_MANY[0]),
    (4, 0, FEW_AND_MANY[1]),
], ids=str)  # fmt: skip
def test_branches_add_up_to_the_step(T, page, lens, served, monkeypatch):
    caches = Caches(Step(lens, T=T, G=4, page=page, **WIDE), "cuda")
    out, indices = launched(caches)
    total = 0
    for branch in ("cmp", "sel", "win"):
        given = dict(branch=branch, block_indices=indices if branch == "sel" else None)
        monkeypatch.setattr(kernels, "nsa_decode_triton", partial(nsa_decode_triton, **given))
        part = launched(caches)[0].float()
        assert part.norm() > 0.01 * out.float().norm()
        total = total + part
    torch.testing.assert_close(total, out.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("T, G", [(1, 4), (4, 4), (4, 60)])
def test_one_graph_serves_all_lengths(T, G, served):
    lens = [(4000, 3999), (T, T + 1), (31, 32), (1024, 1025), (700, 2111)]
    step = Step(lens[0], T=T, G=G, **WIDE)
    caches = {n: Caches(replace(step, lengths=n), "cuda", seed=9 * i) for i, n in enumerate(lens)}
    for one in caches.values():  # all keys are there; only the length says which count
        for name in ("cmp", "sel", "win"):
            for mine, first in zip(getattr(one, name), getattr(caches[lens[0]], name), strict=True):
                mine.copy_(first)
    first = caches[lens[0]]
    wants = {n: one.run() for n, one in caches.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, indices = first.run()
    for n, (want, blocks) in wants.items():
        first.lens.copy_(torch.tensor(n, device="cuda"))
        first.q.copy_(caches[n].q)
        first.gates.copy_(caches[n].gates)
        graph.replay()
        assert torch.equal(out, want) and torch.equal(indices, blocks), n


def test_a_nan_query_keeps_its_forced_blocks_and_harms_no_other(served):
    caches = Caches(Step((4000, 2500), G=4, **WIDE), "cuda")
    launched(caches)
    assert kernels.assert_nan_harms_no_other(caches)[0].isnan().all()


def test_who_asks_for_triton_or_has_unaligned_queries_gets_triton(served, monkeypatch):
    caches = Caches(Step((4000,), G=4, **WIDE), "cuda")
    out, _ = launched(caches)
    room = caches.q.new_empty(caches.q.numel() + 4)
    aligned, caches.q = caches.q, room[4:].view_as(caches.q).copy_(caches.q)
    again, _, counts = caches.launched()
    assert NAME not in counts and "_decode_scan_kernel" in counts
    torch.testing.assert_close(again, out, rtol=2e-2, atol=2e-2)
    caches.q = aligned
    assert caches.kernels() == [NAME]
    monkeypatch.setenv("NSA_USE_CLUSTER", "0")
    clear_flags_cache()
    assert NAME not in caches.kernels()
    assert set(caches.launched()[2]) == set(caches.kernels(in_graph=True))


# ---- without a GPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("changed, why", [
    ({}, None), (dict(dim=64, dv=64, dtype=F16, gate_dtype=F32, hq=4), None),
    (dict(l=16, page=64), None), (dict(gate_dtype=F16), "gates"),
    (dict(tokens=8), None), (dict(tokens=9), "8 tokens"), (dict(hq=68), "8 tokens"),
    (dict(dtype=F32, gate_dtype=F32), "fp16 or bf16"), (dict(dim=192), None), (dict(dv=64), None),
    (dict(dim=64), "fp16 or bf16"), (dict(dim=192, dv=192), "fp16 or bf16"), (dict(l=48), "l_sel"),
    (dict(d=32, l_sel=64), "l_sel"), (dict(d=2, l=4, l_sel=8), "l_sel"), (dict(n_sel=3), "local"),
    (dict(n_local=0), "local"), (dict(n_sel=33), "local"), (dict(page=24), "pages"),
    (dict(window=15), "windows"),
])  # fmt: skip
def test_which_sizes_are_served(changed, why):
    found = why_not(GIVEN._replace(**changed))
    assert found is None if why is None else why in found


def plan_of(programs, sms=132, **changed):
    return plan(GIVEN._replace(**{"batch": programs, "groups": 1, "hq": 16, **changed}), sms)


@pytest.mark.parametrize("n_sel", [16, 32, 4])
@pytest.mark.parametrize("max_len", [64, 4096, 8192, 65536, 1 << 17, 1 << 18, 1 << 20])
def test_plans_hold_all_keys_and_fit(max_len, n_sel):
    for (dim, dv), size in itertools.product(cluster.HEAD_SIZES, (2, 1)):
        given = dict(dim=dim, dv=dv, n_sel=n_sel, max_len=max_len, fp8=size == 1)
        for programs in (1, 4, 5, 8, 16, 17, 32, 64, 66, 67, 128, 132, 133, 256, 4096):
            found = plan_of(programs, **given)
            if found is None:  # only where a cluster's shared memory cannot hold the block sums
                assert max_len >= 1 << 18
                continue
            assert found.cluster <= cluster.MOST_BLOCKS and found.cluster & (found.cluster - 1) == 0
            assert found.cluster * found.units * 4 >= cdiv(max_len, 64)
            assert found.shared <= cluster.SHARED_MOST[found.occupancy]
            # Outputs go through rings.
            assert 2 * 16 * dv * 4 <= found.stages * 16 * (dim + dv) * size


def test_few_steps_of_short_contexts_take_the_quick_way():
    for programs, max_len, early, warps in (
        (4, 1024, True, 4), (4, 8192, True, 4), (4, 16384, True, 8), (4, 16640, False, 8),
        (5, 8192, False, 8), (256, 1024, False, 4),
    ):  # fmt: skip
        found = plan_of(programs, max_len=max_len)
        assert (found.early, found.warps) == (early, warps), (programs, max_len)
        assert found.told == (min(4, found.units) if found.cluster > 1 else 0)


def test_a_smaller_gpu_is_filled_as_the_larger():
    for programs, sms, like in ((32, 132, 32), (32, 66, 64), (40, 78, 68), (64, 114, 132)):
        assert plan_of(programs, sms, max_len=65536) == plan_of(like, max_len=65536)


FORMS = [
    (4, 1 << 17, {}), (4, 8192, dict(page=64)), (4, 16384, dict(n_sel=32)),
    (8, 65536, dict(gate_dtype=F32)),
    (16, 65536, dict(hq=4, ring=False)), (32, 8192, dict(dtype=F16)), (64, 65536, {}),
    (132, 8192, dict(n_sel=32)), (256, 32768, {}), (256, 8192, dict(page=16, ring=False, hq=1)),
    (256, 8192, dict(dim=64, dv=64, l=16)), (4, 8192, dict(dim=192)),
    (64, 65536, dict(dim=192, ring=False)), (256, 32768, dict(dim=192, page=64)),
    (16, 8192, dict(dv=64, dtype=F16)), (256, 8192, dict(dim=192, page=64, ring=False, cmp_page=4)),
    (16, 8192, dict(tokens=4, page=64)),
    (256, 8192, dict(tokens=4)), (256, 4096, dict(tokens=8, page=64, ring=False)),
    (256, 8192, dict(tokens=4, dim=192, hq=8)), (64, 8192, dict(tokens=2, dim=192, n_sel=32)),
    (256, 8192, dict(tokens=5, dim=64, dv=64, dtype=F16, gate_dtype=F32)),
    (4, 1 << 17, dict(fp8=True)), (4, 8192, dict(fp8=True, page=64)), (64, 65536, dict(fp8=True)),
    (256, 32768, dict(fp8=True)), (256, 32768, dict(fp8=True, dim=192, page=64)),
    (16, 8192, dict(fp8=True, dv=64, dtype=F16)),
    (256, 8192, dict(fp8=True, dim=64, dv=64, tokens=4, gate_dtype=F32)),
]  # fmt: skip


# One of three shows what does not compile, and all of them whether a rare one still fits.
@pytest.mark.parametrize("programs, max_len, changed", [
    pytest.param(*f, marks=[pytest.mark.nightly] * bool(i % 3)) for i, f in enumerate(FORMS)
], ids=str)  # fmt: skip
def test_every_form_compiles_and_fits(programs, max_len, changed):
    """By NVRTC, for sm_90; cluster.cu itself holds its memory against what cluster.py counts."""
    p = plan_of(programs, max_len=max_len, **changed)
    registers, stack = usage(compile_cluster(p.macros.items(), 90))
    assert stack == 0, f"{stack} bytes of registers spilled"
    assert registers * 32 * p.warps * p.occupancy <= 1 << 16


def test_what_does_not_compile_is_said(monkeypatch):
    defined = plan_of(4).macros
    with pytest.raises(cluster.Unavailable, match="cluster.py counts fewer bytes"):
        cluster.compile_cluster({**defined, "SHARED": defined["SHARED"] - 200}.items(), 90)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(cluster.Unavailable, match="cuda.bindings cannot be imported"):
        cluster.compile_cluster(defined.items(), 90)


@pytest.fixture
def loads(monkeypatch):
    """The mock that loads kernels, as on an H200."""
    asked = mock.Mock(return_value=("function", "cuLaunchKernel"))
    monkeypatch.setattr(cluster, "arch_of", lambda device: 90)
    monkeypatch.setattr(cluster, "sm_count", lambda device: 132)
    monkeypatch.setattr(cluster, "_load", asked)
    for cached in (cluster._kernel, cluster._function):
        cached.cache_clear()
    yield asked
    for cached in (cluster._kernel, cluster._function):
        cached.cache_clear()


def test_where_it_cannot_be_had_steps_take_several_launches(loads):
    loads.side_effect = cluster.Unavailable("no such library")
    ask = lambda use=True, **changed: cluster.cluster_kernel(use, GIVEN._replace(**changed))
    with pytest.warns(RuntimeWarning, match="take several launches.*no such library"):
        assert ask() is None
    # Of a shorter one the cause is the same.
    assert ask() is ask(max_len=8000) is ask(use=False) is None
    assert loads.call_count == 1 and loads.call_args.args[0]["HEADS"] == 16
    for name, x in dict(tokens=9, dtype=F32, page=24, gate_dtype=F16).items():
        assert ask(**{name: x}) is None
    assert ask(gate_dtype=F32) is None and loads.call_count == 2  # of fp32 gates alone


def test_a_dead_context_is_not_taken_for_a_kernel_that_cannot_be_had(loads):
    loads.side_effect = cluster.Unavailable("CUresult: CUDA_ERROR_ILLEGAL_ADDRESS")
    for _ in range(2):
        with pytest.raises(cluster.Unavailable, match="ILLEGAL_ADDRESS"):
            cluster.cluster_kernel(True, GIVEN)


def test_caches_of_many_lengths_load_few_modules(loads):
    for batch in (1, 2, 3):
        for max_len in (*range(100, 100_000, 99), 100):
            kernel = cluster.cluster_kernel(True, GIVEN._replace(batch=batch, max_len=max_len))
        assert kernel.grid == (4 * loads.call_args.args[0]["CLUSTER"], batch)
    asked = [tuple(call.args[0].items()) for call in loads.call_args_list]
    assert len(asked) <= 3 * 12  # clusters of three sizes, a power of two of units each
    assert len(set(asked)) == len(asked)


def test_older_cards_and_processors_are_not_asked(monkeypatch):
    monkeypatch.setattr(cluster, "_kernel", lambda *sizes: 7)
    for arch, taken in ((0, None), (80, None), (89, None), (90, 7), (100, None)):
        monkeypatch.setattr(cluster, "arch_of", lambda device, arch=arch: arch)
        assert cluster.cluster_kernel(True, GIVEN) == taken
        assert cluster.cluster_kernel(False, GIVEN) is None
