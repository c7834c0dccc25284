"""The Gluon kernels for Hopper: which calls they serve, and right where they run.

On an H100 or H200:  python -m pytest nsa/tests/test_hopper.py
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import nsa
from nsa import blocks, launches, reference
from nsa.flags import clear_flags_cache
from nsa.kernels import prefill
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.blocks import fwd_hopper, tile_blocks
from nsa.kernels.prefill.choice import score_hopper as score
from nsa.kernels.prefill.choice import score_in_attention_hopper, score_topn_triton
from nsa.kernels.prefill.choice.score_topn_triton import Slab
from nsa.kernels.prefill.packs import Rows
from nsa.kernels.prefill.span import bwd_triton as span_bwd
from nsa.kernels.prefill.span import fwd_hopper as span_fwd_hopper
from nsa.kernels.prefill.span.bwd_hopper import query_share
from nsa.kernels.prefill.span.bwd_triton import span_attention_bwd
from nsa.kernels.prefill.span.fwd_hopper import span_pair_fwd_hopper
from nsa.kernels.prefill.span.fwd_triton import span_attention_fwd
from nsa.kernels.prefill.span.kinds import COMPRESSED, SLIDING, Span
from nsa.tests import cases
from nsa.tests import test_prefill_kernels as kernels_of
from nsa.tests.cases import BF16, F16, PAPER, WIDE, Case, Problem, Shape
from nsa.tests.helpers import deterministic, make_layer, randn
from nsa.tests.test_block_attn import PACK

FORWARD, BACKWARD = "_span_fwd_hopper_kernel", "_span_bwd_hopper_kernel"
SELECTION = "_block_attn_bwd_hopper_kernel"
SHARED = "_block_attn_fwd_hopper_kernel"
SCORES, PAIR = "_block_score_hopper_kernel", "_span_pair_fwd_hopper_kernel"
BY_KEYS = ("_block_attn_begin_kernel", "_block_attn_keys_hopper_kernel", "_block_attn_end_kernel")
HALVES = "_round_halves_kernel"
CORE = pytest.mark.core
LONGER, LONGEST = (1, 700, 63, 1063, 31, 129), (1, 1700, 63, 3063, 31, 129)


# test_prefill_kernels.py holds each operator at these shapes to fp64.
SHAPES = [cases.SHAPES[i] for i in (6, 12, 13, 14, 9, 8)]
ALL = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("NSA_USE_GLUON", "1")
    clear_flags_cache()


# ---- which calls they serve, on any machine ------------------------------------------------------


@pytest.fixture
def on_hopper(monkeypatch):
    """As on an H200 with a release that the kernels were run with; no kernel is launched."""
    monkeypatch.setattr(hopper, "arch_of", lambda device: 90)
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    return hopper


def tensors(S=64, hq=8, g=2, d=128, dv=128, dtype=BF16):
    q, do = torch.zeros(1, S, hq, d, dtype=dtype), torch.zeros(1, S, hq, dv, dtype=dtype)
    return q, torch.zeros(1, S, g, d, dtype=dtype), torch.zeros(1, S, g, dv, dtype=dtype), do


def test_they_serve_unless_switched_off(on_hopper, monkeypatch):
    q, k, v, do = tensors()
    wide, *_ = tensors(hq=32)
    calls = [
        lambda: on_hopper.forward(q, k, v),
        lambda: on_hopper.forward_pair(q, k, v, k, v),
        lambda: on_hopper.backward(q, k, v, do),
        lambda: on_hopper.block_backward(q, k, v, do, 64),
        lambda: on_hopper.block_forward(wide, k, v, 16, 64, 1.0, 64),
        lambda: on_hopper.block_scores(q, k, 32, 16, 64),
    ]
    assert all(call() for call in calls)
    narrow = v[..., :64].contiguous()
    for pair in ((k, v, k, narrow), (k, narrow, k, v)):
        assert on_hopper.forward_pair(q, *pair) is None
    assert on_hopper.forward_pair(*(x.half() for x in (q, k, v, k, v))) is None
    monkeypatch.setenv("NSA_USE_GLUON", "0")
    clear_flags_cache()
    assert [call() for call in calls] == [None] * len(calls)


@pytest.mark.parametrize("release, cause", [
    ("3.5.1", "not run with it"), ("3.6.0", None), ("3.7.0", None), ("3.7.1", None),
    ("3.8.0", None), ("3.8.1+git12", None), ("3.9.0", None), ("3.10.0", "not run with it"),
])  # fmt: skip
def test_which_releases_serve_and_why_not_the_others(release, cause, asked, on_hopper, monkeypatch):
    monkeypatch.setattr(on_hopper.triton, "__version__", release)
    why = on_hopper.why_not(torch.device("cuda"), True)
    assert on_hopper.enabled(torch.device("cuda"), True) == (why is None) == (cause is None)
    if cause:
        assert why.startswith(f"triton {release}: ") and cause in why
        assert "use torch 2.11 (triton 3.6) or 2.13 (3.7)" in why


def test_why_another_card_or_a_flag_keeps_the_triton_kernels(on_hopper, monkeypatch):
    device = torch.device("cuda")
    assert "NSA_USE_GLUON" in on_hopper.why_not(device, False)
    for arch, named in ((89, "SM 8.9"), (100, "SM 10.0"), (0, "cuda has no SM")):
        monkeypatch.setattr(on_hopper, "arch_of", lambda device, arch=arch: arch)
        assert named in on_hopper.why_not(device, True)


def test_the_nightly_lane_compiles_for_every_release_that_serves():
    path = Path(nsa.__file__).parents[1] / ".github/workflows/nightly.yml"
    releases = yaml.safe_load(path.read_text())["jobs"]["hopper"]["strategy"]["matrix"]["triton"]
    assert set(hopper.RELEASES) <= {f"{r.rpartition('.')[0]}." for r in releases}


@pytest.mark.parametrize("how, forward, backward, blocks", [
    (dict(dtype=torch.float32), False, False, False), (dict(d=192), True, True, True),
    (dict(d=64, dv=64), True, True, True), (dict(dv=64), False, False, False),
    (dict(hq=6), False, False, False), (dict(hq=2), True, False, False),
    (dict(hq=256), False, False, False), (dict(hq=64), True, True, False),
    (dict(hq=16), True, True, True), (dict(S=0), False, False, False),
])  # fmt: skip
def test_what_they_do_not_take_stays_where_it_was(how, forward, backward, blocks, asked, on_hopper):
    q, k, v, do = tensors(**how)
    for size, taken in ((16, False), (32, blocks), (64, blocks), (96, False)):
        assert (on_hopper.block_backward(q, k, v, do, size) is not None) == taken
    assert (on_hopper.forward(q, k, v) is not None) == forward
    assert (on_hopper.backward(q, k, v, do) is not None) == backward


@pytest.mark.parametrize("how, n_sel, size, scale, serves", [
    (dict(hq=32), 16, 64, 0.1, True), (dict(hq=18), 128, 64, 0.1, True),
    (dict(hq=32, d=64, dv=64), 16, 64, 0.1, True),
    (dict(hq=32, dtype=F16), 1, 64, 1.0, True),
    (dict(hq=16), 16, 64, 0.1, False), (dict(hq=34), 16, 64, 0.1, False),
    (dict(hq=32, d=192), 16, 64, 0.1, True), (dict(hq=32, dv=64), 16, 64, 0.1, False),
    (dict(hq=32, d=192, dv=192), 16, 64, 0.1, False),
    (dict(hq=8, S=6144, d=192), 16, 64, 0.1, True),
    (dict(hq=16, S=4096, d=64, dv=64), 16, 64, 0.1, True),
    (dict(hq=32, dtype=torch.float32), 16, 64, 0.1, False), (dict(hq=32), 129, 64, 0.1, False),
    (dict(hq=32), 0, 64, 0.1, False), (dict(hq=32), 16, 16, 0.1, False),
    (dict(hq=32), 16, 32, 0.1, True), (dict(hq=8, S=6144), 16, 32, 0.1, False),
    (dict(hq=32), 16, 128, 0.1, True), (dict(hq=32), 65, 128, 0.1, False),
    (dict(hq=32), 16, 96, 0.1, False),
    (dict(hq=32), 16, 64, -0.1, False),
    (dict(hq=8, S=6144), 16, 64, 0.1, True), (dict(hq=16, S=4096), 16, 64, 0.1, True),
    (dict(hq=4, S=6144), 16, 64, 0.1, False), (dict(hq=24, S=6144), 16, 64, 0.1, True),
    (dict(hq=8, S=6080), 16, 64, 0.1, False), (dict(hq=8, S=6144), 65, 64, 0.1, False),
    (dict(hq=8, S=6144, dtype=F16), 16, 64, 0.1, False),
])  # fmt: skip
def test_which_selections_share_their_reads(how, n_sel, size, scale, serves, asked, on_hopper):
    q, k, v, _ = tensors(**how)
    found = on_hopper.block_forward(q, k, v, n_sel, size, scale, k.shape[1])
    assert (found is not None) == serves


@pytest.mark.parametrize("how, l, d, l_sel, serves", [
    ({}, 32, 16, 64, True), (dict(hq=32, d=64), 64, 16, 32, True), (dict(hq=2), 16, 16, 128, True),
    (dict(dtype=F16), 256, 16, 64, True), (dict(hq=64), 32, 16, 64, False),
    (dict(hq=6), 32, 16, 64, False), (dict(d=192), 32, 16, 64, True),
    (dict(dtype=torch.float32), 32, 16, 64, False), (dict(S=0), 32, 16, 64, False),
    ({}, 257, 16, 64, False), ({}, 16, 16, 16, False), ({}, 8, 4, 64, False),
    ({}, 2048, 256, 2048, True), ({}, 4096, 512, 4096, False),
])  # fmt: skip
def test_which_block_scores_they_find(how, l, d, l_sel, serves, asked, on_hopper):
    q, k, _, _ = tensors(**how)
    assert (on_hopper.block_scores(q, k, l, d, l_sel) is not None) == serves
    assert on_hopper.block_scores(q, k[:, ::2], l, d, l_sel) is None  # not contiguous
    if k.numel():
        unaligned = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view_as(k)
        assert on_hopper.block_scores(q, unaligned, l, d, l_sel) is None


@pytest.mark.parametrize("how, l, d, l_sel, serves", [
    (dict(hq=8), 32, 16, 64, True), (dict(hq=16), 16, 8, 32, True), (dict(hq=32), 32, 16, 64, True),
    (dict(hq=32, d=64, dv=64), 32, 16, 64, True), (dict(hq=4), 32, 16, 64, False),
    (dict(hq=64), 32, 16, 64, False), ({}, 32, 16, 32, False), ({}, 64, 16, 64, False),
    (dict(dv=64), 32, 16, 64, False), (dict(S=63), 32, 16, 64, False),
])  # fmt: skip
def test_where_attention_scores_blocks(how, l, d, l_sel, serves, asked, on_hopper, monkeypatch):
    q, k, v, _ = tensors(**how)
    assert on_hopper.forward_with_scores(q, k, v, l, d, l_sel) is None  # too few keys
    monkeypatch.setattr(score_in_attention_hopper, "LEAST_KEYS", 64)
    assert (on_hopper.forward_with_scores(q, k, v, l, d, l_sel) is not None) == serves
    assert on_hopper.forward_with_scores(q, k, v, l, d, l_sel, packed=True) is None
    assert on_hopper.forward_with_scores(q, k, v, l, d, l_sel, use_gluon=False) is None
    monkeypatch.setattr(score_in_attention_hopper, "MOST_KEYS", 63)
    assert on_hopper.forward_with_scores(q, k, v, l, d, l_sel) is None


def test_the_files_entry_of_the_gpu_switches_them_off(on_hopper, monkeypatch, tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text("runtime: {devices: {NVIDIA H200: {use_gluon: false}}}")
    monkeypatch.setattr("nsa.flags.CONFIG_PATH", path)
    monkeypatch.delenv("NSA_USE_GLUON", raising=False)
    for name, enabled in (("NVIDIA H200", False), ("NVIDIA H100", True)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert on_hopper.enabled(torch.device("cuda", 0)) == enabled
    path.write_text("runtime: {use_gluon: false}")
    clear_flags_cache()
    assert on_hopper.enabled(torch.device("cuda", 0), True)


@pytest.mark.parametrize("dtype, n_sel, block_size, serves", [
    (BF16, 16, 64, True), (BF16, 64, 64, True), (BF16, 65, 64, False), (BF16, 32, 128, True),
    (BF16, 33, 128, False), (F16, 16, 64, False),
])  # fmt: skip
def test_which_dq_is_summed_in_fp16(dtype, n_sel, block_size, serves, on_hopper):
    module = on_hopper.block_backward(*tensors(dtype=dtype), block_size, True)
    assert module.adds_halves(tensors(dtype=dtype)[0], n_sel, block_size) is serves


def test_long_sequences_of_bf16_go_by_keys(on_hopper, asked):
    q, k, v, _ = tensors(S=12288, hq=32)

    def by_keys(q, k, v):
        module = on_hopper.block_forward(q, k, v, 16, 64, 1.0, k.shape[1])
        return module and module.splits(q, v, 16, k.shape[1])

    assert by_keys(q, k, v) and not by_keys(q.half(), k.half(), v.half())
    assert not by_keys(q[:, 2049:], k[:, 2049:], v[:, 2049:])
    assert by_keys(q[:, 8192:], k, v) and not by_keys(q[:, 8193:], k, v)  # chunks of a prompt
    assert not by_keys(q[:, :, :24].contiguous(), k, v)
    few = q[:, :, :8].contiguous()
    assert by_keys(few, k, v)
    with deterministic():
        assert by_keys(q, k, v) is False and by_keys(few, k, v) is None
    module = on_hopper.block_forward(q, k, v, 65, 64, 1.0, 12288)
    assert not module.splits(q, v, 65, 12288) and module.splits(q, v, 64, 12288)


def test_deterministic_algorithms_keep_the_two_passes(asked, on_hopper, monkeypatch):
    one_pass = mock.Mock()
    monkeypatch.setattr(on_hopper, "backward", mock.Mock(return_value=one_pass))
    monkeypatch.setattr(span_bwd, "keys_for_backward", lambda k: k)
    q, k, v, do = tensors()
    lse = torch.zeros(q.shape[:-1])
    args = do, q, k, v, q, lse, Span(COMPRESSED, 32, 16), 1.0
    found = span_attention_bwd(*args, delta=lse)
    assert found is one_pass.span_attention_bwd_hopper.return_value
    monkeypatch.setattr(span_bwd, "dq_tiles", mock.Mock(side_effect=LookupError("two passes")))
    with deterministic(), pytest.raises(LookupError, match="two passes"):
        span_attention_bwd(*args, delta=lse)
    assert on_hopper.backward.call_count == 1


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("sq, columns", [(1, 1), (8192, 16), (65536, 128), (65536, 2048)])
def test_shares_are_whole_query_tiles(sq, columns, sms):
    share = query_share(sq, columns, 12, sms)
    assert 128 <= share <= 2048 + 12 and share % 12 == 0


# ---- on the card ---------------------------------------------------------------------------------


@pytest.fixture
def device(cuda, kernel_device, asked):
    if not hopper.enabled(cuda):
        pytest.skip("needs SM 9.0 and a release of Triton that the kernels were run with")
    return "cuda"


def pack(*lengths):
    """Where sequences end on the card, and where their compressed keys do."""
    cu = cases.ends_of(lengths, "cuda")
    return cu, blocks.cu_seqlens_compressed(cu, 32, 16)


def counted(run):
    """run() and its launches where all is compiled: a call that meets a kernel to compile begins
    again, and what it launched before counts too."""
    run()
    with launches.recording() as counts:
        return run(), counts


@pytest.mark.parametrize("shape", [
    *SHAPES, Shape((1000,), G=4, h=16, **WIDE, dtype=BF16, n_sel=8, **PAPER | dict(l_sel=32)),
], ids=str)  # fmt: skip
def test_whole(shape, device):
    _, counts = counted(lambda: kernels_of.test_whole(shape, device))
    # Without a gradient once more, where one kernel does both spans, but for fp16. Selection of all
    # blocks is a span too.
    whole = max(shape.keys) <= shape.n_sel * shape.l_sel
    forwards = (4 if shape.dtype == F16 else 2) + 2 * whole
    assert (counts[FORWARD], counts[BACKWARD]) == (forwards, 2 + whole), dict(counts)
    assert (SELECTION in counts) == (shape.h in (4, 8, 16)), dict(counts)
    assert (SHARED in counts) == (shape.h == 16), dict(counts)


PAPERS = dict(D=192, Dv=128, **PAPER)
THEIRS = (
    "_span_fwd_kernel", "_block_score_kernel", "_block_attn_bwd_dkdv_kernel",
    "_span_bwd_dq_kernel", "_span_bwd_dkdv_kernel",
)  # fmt: skip


@pytest.mark.parametrize("shape", [
    cases.SHAPES[7], Shape(PACK, h=4, n_sel=4, **PAPERS),
    Shape((777,), batch=2, h=8, dtype=BF16, n_sel=4, **PAPERS),
], ids=str)  # fmt: skip
def test_whole_with_the_papers_heads(shape, device):
    """With heads of 192 and 128 these kernels serve everything but what neighbours share."""
    _, counts = counted(lambda: kernels_of.test_whole(shape, device))
    assert {FORWARD, SCORES, SELECTION} <= set(counts) and counts[BACKWARD] == 2, dict(counts)
    assert not [name for name in counts if name in THEIRS], dict(counts)
    assert (SHARED in counts) == (shape.h == 16), dict(counts)
    kernels_of.test_compressed(shape, device)
    kernels_of.test_choice_of_blocks(shape, device)


@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[4:], ids=str)
def test_choice_of_blocks(shape, device, monkeypatch):
    """All queries at once and by slabs."""
    for slab_bytes in (score_topn_triton.SLAB_BYTES, 1):
        monkeypatch.setattr(score_topn_triton, "SLAB_BYTES", slab_bytes)
        with launches.recording() as counts:
            kernels_of.test_choice_of_blocks(shape, device)
        assert counts[SCORES] == counts["_block_topn_kernel"] >= 1, dict(counts)
    assert counts[SCORES] > 1


def block_sums(q, k, scale, start, n_blocks, *, l=32, d=16, l_sel=64, real=None):
    """Truth for queries q [B, S, HQ, D] from position `start` on, in fp64: what blocks get,
    [B, G, S, n_blocks], which is the probability of each compressed key, over the first `real`
    heads of a group, times the tokens that it has in the block; and lse [B, G, S, h]."""
    key = torch.arange(k.shape[1], device=q.device) * d
    t = torch.arange(start, start + q.shape[1], device=q.device)
    q = q.double().unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("bsghc,bngc->bgshn", q, k.double()) * scale
    logits.masked_fill_(key + l > t[:, None, None] + 1, float("-inf"))
    block = torch.arange(n_blocks, device=q.device) * l_sel
    overlap = torch.minimum(key[:, None] + l, block + l_sel) - torch.maximum(key[:, None], block)
    p = logits.softmax(-1).nan_to_num()[:, :, :, :real].sum(3)
    return p @ overlap.clamp(min=0).double(), logits.logsumexp(-1)


@pytest.mark.parametrize("heads, width, l, d, l_sel, start, s", [
    (16, 128, 32, 16, 64, 0, 515), (16, 128, 32, 16, 64, 9000, 4200), (8, 64, 32, 16, 64, 137, 515),
    (4, 128, 64, 16, 32, 0, 515), (2, 64, 16, 16, 128, 61, 515), (1, 128, 256, 16, 64, 0, 515),
    (16, 128, 32, 32, 64, 0, 515), (16, 192, 32, 16, 64, 9000, 4200),
    (4, 192, 32, 16, 64, 137, 515),
])  # fmt: skip
def test_block_scores(heads, width, l, d, l_sel, start, s, device):
    """The scores that the ranking reads of each query, all of them written; against fp64. Once with
    so many queries and keys that every place of the kernel's rings serves again and again."""
    b, g = (2, 2) if s < 1000 else (1, 2)
    n = (start + s - l) // d + 1
    if s > 1000:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        assert s // score.tile(heads)[0] * b * g > 3 * sms and n > 2 * score.STAGES * score.KEYS
    q = randn(b, s, g * heads, width, seed=1, dtype=BF16, device=device)
    k = randn(b, n, g, width, seed=2, dtype=BF16, device=device)
    queries, keys = score.tile(heads)
    of_tile = keys * d // l_sel  # blocks
    n_ld = (-(-(start + s) // l_sel // of_tile) + 2) * of_tile
    rows = -(-s // queries) * queries
    want, lse = block_sums(q, k, 0.2, start, n_ld, l=l, d=d, l_sel=l_sel)
    scores = torch.full((b * g, rows, n_ld), float("nan"), device=device)
    score.block_scores(
        q, k, lse.transpose(1, 2).flatten(2).float().contiguous(), l=l, d=d, l_sel=l_sel,
        softmax_scale=0.2, at=Rows.of(q, k, None, None), q_start=start,
        slab=Slab(begin=0, queries=s, scores=scores, rows=rows, n_ld=n_ld),
    )  # fmt: skip
    for begin in range(0, s, queries):
        end = min(begin + queries, s)
        tiles = -(-blocks.num_compressed(start + end, l, d) // keys)
        got, known = scores.unflatten(0, (b, g))[:, :, begin:end], (tiles + 1) * of_tile
        torch.testing.assert_close(
            got[..., :known].double() / 1024, want[:, :, begin:end, :known], rtol=1e-3, atol=1e-5
        )
        assert got[..., known:].isnan().all()


def by_attention(q, k, scale, start, pair, real):
    """(out, lse, NaN or scores [B, G, S, n_ld] of what attention writes by the first `real` heads
    of a group), and out, lse without, where values are the keys."""
    (b, s, hq, _), g = q.shape, k.shape[2]
    queries, _ = span_fwd_hopper.scores_tile(hq // g)
    n_ld, rows = (-(-(start + s) // 2048) + 1) * 32, -(-s // queries) * queries
    scores = torch.full((b * g, rows, n_ld), float("nan"), device=q.device)
    slabs = [Slab(0, s, scores, rows, n_ld)]
    cmp, how = Span(COMPRESSED, 32, 16), dict(q_start=start, heads=real)
    attend, tensors, spans = span_fwd_hopper.span_attention_fwd_hopper, (q, k, k), (cmp,)
    if pair:
        attend, spans = span_pair_fwd_hopper, (cmp, Span(SLIDING, 512))
        how["win_start"] = start
        draw = lambda i, *dims: randn(b, *dims, seed=i, dtype=q.dtype, device=q.device)
        keys = draw(7, start + s, g, q.shape[-1])
        tensors = q, k, k, keys, keys, draw(8, s, hq, 3)
    run = lambda slabs: attend(*tensors, *spans, scale, slabs=slabs, **how)
    return (*run(slabs), scores.unflatten(0, (b, g))[:, :, :s]), run(None)


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("heads, real, width, start, s, scale, dtype", [
    (16, 16, 128, 0, 515, 0.1, BF16), (16, 16, 128, 9000, 4200, 0.1, BF16),
    (8, 8, 64, 137, 515, 0.1, BF16), (4, 4, 128, 0, 2100, 0.1, F16),
    (16, 16, 64, 3000, 40, 0.1, F16), (8, 8, 128, 0, 2600, 2.0, F16), (4, 4, 128, 0, 40, 0.1, BF16),
    (8, 5, 128, 137, 515, 0.1, BF16), (4, 3, 64, 0, 2100, 0.1, F16),
    (16, 12, 128, 0, 515, 0.1, BF16),
])  # fmt: skip
def test_scores_of_attentions_own(heads, real, width, start, s, scale, dtype, pair, device):
    """All that the ranking reads is written, and nothing else; against fp64. With the large scale
    maxima rise again and again."""
    b, g = (2, 2) if s < 1000 else (1, 2)
    n = (start + s - 32) // 16 + 1
    q = randn(b, s, g * heads, width, seed=1, dtype=dtype, device=device)
    k = randn(b, n, g, width, seed=2, dtype=dtype, device=device)
    (out, lse, scores), (want_out, want_lse) = by_attention(q, k, scale, start, pair, real)
    torch.testing.assert_close(out, want_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-4)
    queries, keys = span_fwd_hopper.scores_tile(heads)
    block = torch.arange(scores.shape[-1], device=device)
    for begin in range(0, s, 64):  # of all queries at once fp64 takes much memory
        part = slice(begin, begin + 64)
        want, _ = block_sums(q[:, part], k, scale, start + begin, len(block), real=real)
        got = scores[:, :, part].double() / 2.0**score_in_attention_hopper.SCALE.value
        ends = torch.arange(s, device=device)[part] // queries * queries + queries - 1
        seen = (ends.clamp(max=s - 1) + start + 1 - 32) // 16 + 1
        written = ((-(-seen // keys)).clamp(min=1) + 1) * 32
        here = (block < written[:, None]).expand_as(got)
        assert got[~here].isnan().all()
        torch.testing.assert_close(got[here], want[here] / 32, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "clustered", "constant"])
@pytest.mark.parametrize(
    "heads, b, start, s", [(16, 1, 0, 3100), (8, 2, 777, 1531), (4, 2, 0, 999)]
)
def test_attention_chooses_as_good_blocks(heads, b, start, s, kind, device, monkeypatch):
    """As the kernel that does the products again, for all queries at once and by slabs."""
    g, n = 2, (start + s - 32) // 16 + 1
    draw = lambda i, m, h: randn(b, m, h, 128, seed=i, dtype=BF16, device=device)
    q, k_cmp, keys = draw(1, s, g * heads), draw(2, n, g), draw(3, start + s, g)
    if kind == "constant":
        q, k_cmp = torch.full_like(q, 0.25), torch.full_like(k_cmp, 0.5)
    elif kind == "clustered":
        centre = draw(4, 8, g)
        k_cmp = 2 * centre[:, torch.arange(n, device=device) // 37 % 8] + k_cmp / 2
    gates = randn(b, s, g * heads, 3, seed=5, dtype=BF16, device=device)

    def choose(least, slab_bytes=score_topn_triton.SLAB_BYTES):
        monkeypatch.setattr(score_in_attention_hopper, "LEAST_KEYS", least)
        monkeypatch.setattr(score_topn_triton, "SLAB_BYTES", slab_bytes)
        tensors = q, k_cmp, k_cmp, keys, keys, keys, keys, gates
        sizes = dict(l=32, d=16, l_sel=64, n_sel=8, n_init=1, n_local=2, window=512)
        with torch.no_grad():
            (_, info), counts = counted(
                lambda: prefill.nsa_prefill_triton(*tensors, **sizes, q_start=start)
            )
        return info["block_indices"], counts

    want, counts = choose(1 << 20)
    assert counts[SCORES] == 1
    got, counts = choose(0)
    assert SCORES not in counts and counts["_block_topn_kernel"] == 1
    by_slabs, counts = choose(0, 1)
    assert counts["_block_topn_kernel"] == counts[PAIR] > 1
    assert torch.equal(by_slabs, got)
    if kind == "constant":
        assert torch.equal(got, want)
        return
    for at in range(0, s, 97):
        n_blocks = blocks.num_sel_blocks(start + s, 64)
        sums = block_sums(q[:, at : at + 1], k_cmp, 128**-0.5, start + at, n_blocks)[0][:, :, 0]
        sum_of = lambda x, sums=sums: (sums.gather(2, x.clamp(min=0).long()) * (x >= 0)).sum(2)
        assert (sum_of(got[:, at]) >= sum_of(want[:, at]) * 0.9995).all()


def test_a_nan_query_changes_no_other_score(device):
    others = torch.arange(700, device=device) != 685
    draw = lambda n, h: randn(2, n, h, 128, seed=n, dtype=BF16, device=device)
    scores = lambda q, k: by_attention(q, k, 0.1, 0, True, q.shape[2] // 2)[0][2][:, :, others]
    for heads in (4, 8, 16):
        q, k = draw(700, 2 * heads), draw(42, 2)
        want = scores(q, k)
        q[:, 685] = float("nan")
        torch.testing.assert_close(scores(q, k), want, rtol=0, atol=0, equal_nan=True)


def test_a_nan_query_changes_no_other_choice(device):
    q, k = (randn(1, n, h, 128, seed=n, dtype=BF16, device=device) for n, h in ((700, 32), (42, 2)))
    lse = randn(1, 700, 32, seed=3, device=device)
    how = dict(l=32, d=16, l_sel=64, n_sel=4, n_init=1, n_local=1)
    counts = kernels_of.assert_a_nan_query_harms_no_other(q, k, lse, 685, **how)
    assert counts[SCORES] == 1


def attend(x: Problem, **changes) -> tuple[tuple[torch.Tensor, torch.Tensor], dict]:
    """out and lse of selection over x's blocks, and what was launched."""
    return x.forward(max_seqlen=max(x.case.lengths), **changes)


def with_bad_row(x: Problem, row: int):
    """Which rows of the output [1, S, HQ] see a row of infinite keys and NaN values, and attend()
    with it."""
    k, v = x.k.clone(), x.v.clone()
    k[:, row], v[:, row] = float("inf"), float("nan")
    position = torch.arange(x.q.shape[1], device=x.q.device) + x.case.q_start
    sees = (x.blocks[0] == row // 64).any(-1) & (position >= row)[:, None]
    assert sees.any() and not sees.all()
    return sees.repeat_interleave(x.case.h, 1)[None], *attend(x, k=k, v=v)


ROUND = dict(**WIDE, l_sel=64, dtype=BF16, big=True)
SHARING = [
    pytest.param(Case((2500,), G=4, h=16, n_sel=16, **ROUND), marks=CORE),
    Case((515,), h=12, n_sel=5, q_start=777, **ROUND),
    Case((300,), h=9, n_sel=32, q_start=4037, batch=3, **ROUND),
    Case(LONGER, h=16, n_sel=16, **ROUND),
    Case((1200,), h=16, n_sel=16, **ROUND | dict(D=64, Dv=64, dtype=F16)),
    Case((7,), G=1, h=16, n_sel=1, **ROUND),
    pytest.param(Case((1500,), G=1, h=16, n_sel=16, **ROUND | dict(l_sel=128)), marks=CORE),
    Case(LONGER, h=12, n_sel=5, **ROUND | dict(l_sel=192)),
    pytest.param(Case((1200,), h=16, n_sel=16, **ROUND | dict(D=192)), marks=CORE),
    Case(LONGER, h=12, n_sel=5, **ROUND | dict(D=192, dtype=F16)),
    pytest.param(Case((1500,), G=1, h=16, n_sel=32, **ROUND | dict(l_sel=32)), marks=CORE),
    Case(LONGER, h=12, n_sel=9, **ROUND | dict(D=192, dtype=F16, l_sel=32)),
    Case((1200,), h=16, n_sel=16, q_start=777, **ROUND | dict(D=64, Dv=64, l_sel=32)),
]


@pytest.mark.parametrize("kind", ["random", "clustered", "ragged", "one_block"])
@pytest.mark.parametrize("case", SHARING, ids=str)
def test_shared_reads_agree_with_single_queries(case, kind, device, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    (out, lse), counts = attend(x)
    assert counts[SHARED] == counts["_tile_blocks_kernel"] == 1 and len(counts) == 2
    (want, want_lse), without = attend(x, use_gluon=False)
    assert SHARED not in without
    torch.testing.assert_close(out, want, **cases.tolerance(case.dtype))
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    for _ in range(20):  # a race would show, bitwise
        (again, again_lse), _ = attend(x)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_what_is_shared_does_not_depend_on_neighbours(device, monkeypatch):
    """Bitwise: another choice of the others changes nothing, nor does NaN in what they chose or in
    what is to come."""
    x = Problem(Case((1000,), G=2, h=16, n_sel=8, **ROUND), "random", device, monkeypatch)
    (out, lse), _ = attend(x)
    mine = torch.arange(1000, device=device) % 3 == 1
    others = Problem(x.case, "clustered", device, monkeypatch).blocks
    blocks = torch.where(mine[None, :, None, None], x.blocks, others)
    (again, again_lse), _ = attend(x, block_indices=blocks)
    assert torch.equal(again[:, mine], out[:, mine])
    assert torch.equal(again_lse[:, mine], lse[:, mine])
    assert not torch.equal(again, out)

    for row in (5 * 64 + 3, 999):
        rows, (poisoned, _), counts = with_bad_row(x, row)
        assert counts[SHARED] == 1 and torch.equal(poisoned[~rows], out[~rows])
        assert poisoned[rows].isnan().all()


LONG = [
    pytest.param(Case((2500,), G=4, h=16, n_sel=16, q_start=3000, **ROUND), marks=CORE),
    Case((515,), h=16, n_sel=5, q_start=777, batch=2, **ROUND),
    Case(LONGEST, h=16, n_sel=16, **ROUND),
    Case((7,), G=1, h=16, n_sel=3, q_start=4000, **ROUND),
    pytest.param(Case((2500,), h=4, n_sel=16, q_start=3000, **ROUND), marks=CORE),
    Case((2500,), h=8, n_sel=16, q_start=777, batch=2, **ROUND),
    Case(LONGEST, h=4, n_sel=16, **ROUND),
    Case((1, 1700, 63, 31, 129), h=8, n_sel=5, **ROUND),
    Case((2500,), h=16, n_sel=16, q_start=3000, **ROUND | dict(l_sel=128)),
    Case(LONGEST, h=4, n_sel=8, **ROUND | dict(l_sel=128)),
    pytest.param(Case((2500,), h=16, n_sel=16, q_start=3000, **ROUND | dict(D=192)), marks=CORE),
    Case(LONGEST, h=4, n_sel=5, **ROUND | dict(D=192)),
    Case((2500,), h=8, n_sel=16, q_start=777, batch=2, **ROUND | dict(D=64, Dv=64)),
    Case(LONGEST, h=16, n_sel=16, **ROUND | dict(D=64, Dv=64)),
]


def together(monkeypatch, cost):
    """Tiles go by keys where that saves more than so much."""
    costs = {widths: c._replace(together=cost) for widths, c in tile_blocks.COSTS.items()}
    monkeypatch.setattr(tile_blocks, "COSTS", costs)


@pytest.fixture
def by_keys(monkeypatch):
    """Selection goes by keys however few they are, in every tile where there is a rest."""
    any_length = dict.fromkeys(tile_blocks.SPLIT_KEYS, 0)
    monkeypatch.setattr(tile_blocks, "SPLIT_KEYS", any_length)
    monkeypatch.setattr(tile_blocks, "SPLIT_QUERIES", any_length)
    together(monkeypatch, -(10**6))


def attend_both(x, **changes):
    """(out, lse) by keys, and as without them."""
    got, counts = attend(x, **changes)
    assert all(counts[name] == 1 for name in (*BY_KEYS, SHARED)), dict(counts)
    with deterministic():
        want, counts = attend(x, **changes)
    assert not set(BY_KEYS) & set(counts) and counts.get(SHARED, 0) == (x.case.h == 16)
    return got, want


@pytest.mark.parametrize("kind", ["random", "ragged", "clustered"])
@pytest.mark.parametrize("case", LONG, ids=str)
def test_selection_by_keys_agrees_with_shared_reads(case, kind, device, by_keys, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    (out, lse), (want, want_lse) = attend_both(x)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    norm = want.double().norm()
    assert (out.double() - want.double()).norm() < 4e-3 * norm
    for _ in range(20):  # the order of additions changes
        (again, again_lse), _ = attend(x)
        assert (again.double() - out.double()).norm() < 2e-3 * norm
        torch.testing.assert_close(again_lse, lse, rtol=1e-5, atol=1e-5)


def test_where_tiles_pay_some_go_by_keys(device, by_keys, monkeypatch):
    """The bound between both ways is in the middle of the tiles, and the way of each shows."""
    x = Problem(LONG[0].values[0], "ragged", device, monkeypatch)
    together(monkeypatch, 1500)
    how = dict(queries=8, heads=16, costs=tile_blocks.COSTS[128, 128])
    lists = tile_blocks.tile_blocks(x.blocks, None, 2500, 5500, 3000, 64, **how)
    whole = lists.rest.listed < 0
    share = whole.double().mean().item()
    assert 0.1 < share < 0.9
    (out, _), (want, _) = attend_both(x)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    whole = whole.repeat_interleave(8, 0)[:2500].repeat_interleave(16, 1)[None]
    assert torch.equal(out[whole], want[whole]) and not torch.equal(out[~whole], want[~whole])


@pytest.mark.parametrize("case", [LONG[0], LONG[4]], ids=str)
def test_what_goes_by_keys_does_not_feel_what_it_cannot_see(case, device, by_keys, monkeypatch):
    x = Problem(case, "random", device, monkeypatch)
    (out, lse), _ = attend(x)
    for row in (5 * 64 + 3, 5 * 64 + 63, case.q_start + 700, case.q_start + 2499):
        rows, (poisoned, poisoned_lse), _ = with_bad_row(x, row)
        torch.testing.assert_close(poisoned[~rows], out[~rows], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(poisoned_lse[~rows], lse[~rows], rtol=1e-5, atol=1e-5)
        assert poisoned[rows].isnan().all()


@pytest.mark.parametrize("case", [LONG[0], LONG[4]], ids=str)
def test_scores_of_minus_infinity_tell(case, device, by_keys, monkeypatch):
    """No weight is left of them, as of a row that attends nothing, which has output 0."""
    x = Problem(case, "random", device, monkeypatch)
    sunk = x.sink(1003)
    with deterministic():
        shared, counts = attend(x)
    assert counts.get(SHARED, 0) == (case.h == 16)  # eight queries share what they read
    for out, _ in (attend(x)[0], attend(x, use_gluon=False)[0], shared):
        assert out[sunk].isnan().all() and out[~sunk].isfinite().all()


@pytest.mark.parametrize("branch", ["compressed", "sliding"])
def test_scores_of_minus_infinity_tell_in_a_span(branch, device):
    n = blocks.num_compressed(600, 32, 16) if branch == "compressed" else 600
    draw = lambda i, *dims: randn(1, *dims, 128, seed=i, dtype=BF16, device=device)
    q, k, v = draw(32, 600, 32), draw(2, n, 2), draw(3, n, 2)
    k[..., 0] = k[..., 0].abs() + 1
    q[:, [40, 599], :, 0] = -float("inf")
    sunk = q[..., 0].isinf()
    with launches.recording() as counts:
        if branch == "compressed":
            out, _ = prefill.compressed_attention_triton(q, k, v, l=32, d=16)
        else:
            out, _ = prefill.sliding_attention_triton(q, k, v, window=100)
    assert counts[FORWARD] == 1, dict(counts)
    assert out[sunk].isnan().all() and out[~sunk].isfinite().all()


def test_columns_of_any_size_keep_their_precision(device, by_keys, monkeypatch):
    """Sums in fp16 of columns of V from 2**-90 to 2**90, one value of each far above the others;
    scores from flat to steep."""
    case = LONG[0].values[0]
    x = Problem(case, "random", device, monkeypatch)
    sizes = torch.linspace(-90, 90, 128, device=device).round()
    x.v *= 2.0**sizes
    x.v[:, 77] *= 100.0
    x.q *= torch.logspace(-3, 1, case.h, device=device).repeat(case.G)[:, None].to(x.q.dtype)
    (out, _), (want, _) = attend_both(x)
    error = (out.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    assert error.max() < 8e-3 and error.mean() < 3e-3, (error.max(), error.argmax(), error.mean())


@pytest.mark.parametrize("size", [1.0, 3e4, 1e35])
def test_sums_by_keys_come_near_their_bound(size, device, by_keys, monkeypatch):
    """Equal weights of equal values: no sum can be larger. And what cancels leaves nothing."""
    x = Problem(LONG[0].values[0], "random", device, monkeypatch)
    x.q.zero_()
    x.v.fill_(size)
    x.v[..., 1::2] *= 1.0 - 2.0 * (torch.arange(x.v.shape[1], device=device) % 2)[:, None, None]
    out, _ = attend(x)[0]
    assert (out[..., ::2].double() / size - 1).abs().max() < 8e-3
    assert out[..., 1::2].abs().max() < 0.07 * size  # an odd number of keys, in the own block


@pytest.mark.parametrize("steep", [2.0, 10.0, 40.0])
@pytest.mark.parametrize("case", [LONG[0], LONG[4]], ids=str)
def test_scores_far_above_the_neighbourhood(case, steep, device, by_keys, monkeypatch):
    """Of more and more rows a sum in fp16 overflows: they go the other way, and lse is exact."""
    end = mock.Mock(side_effect=fwd_hopper.end_tiles)
    monkeypatch.setattr(fwd_hopper, "end_tiles", end)
    x = Problem(case, "random", device, monkeypatch)
    x.q *= steep
    (out, lse), (want, want_lse) = attend_both(x)
    torch.testing.assert_close(out, want, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    lists = end.call_args.args[0]
    assert end.call_count == 1
    added = int(lists.rest.whole[0]) - int((lists.rest.listed < 0).sum())
    tiles = lists.counts.numel() * lists.queries // 8
    assert {2.0: added == 0, 10.0: added > 0, 40.0: added > 0.3 * tiles}[steep], (added, tiles)


@pytest.mark.long
@pytest.mark.parametrize("packed", [pytest.param(False, marks=CORE), True])
def test_the_whole_operator_by_keys(packed, device, by_keys, monkeypatch):
    """Gated sums with and without a backward, and gradients, as without sums by keys."""
    lengths = (1500, 40, 2100) if packed else (3000,)
    shape = Shape(lengths, G=2, h=16, **WIDE, dtype=BF16, n_sel=8, **PAPER)
    with launches.recording() as counts:
        kernels_of.test_whole(shape, device)
    assert all(counts[name] >= 1 for name in BY_KEYS), dict(counts)
    x = make_layer(3000, 32, 2, 128, l=32, d=16, dtype=BF16, device=device)
    run = lambda: nsa.nsa_attention(*x, n_sel=8, backend="triton")
    with launches.recording() as counts:
        got = run()
    with deterministic():
        want = run()
    assert counts[BY_KEYS[1]] == 1
    assert (got.double() - want.double()).norm() < 4e-3 * want.double().norm()


BLOCKS = dict(**WIDE, l_sel=64, n_sel=16, dtype=BF16, big=True)
NARROW, WIDER = dict(D=64, Dv=64), dict(D=192)


@pytest.mark.parametrize("case, kind", [
    pytest.param(Case((4000,), G=4, h=16, **BLOCKS), "clustered", marks=CORE),
    (Case((4000,), h=8, **BLOCKS), "one_block"),
    (Case((515,), G=8, h=4, q_start=777, **BLOCKS), "random"),
    (Case((300,), h=16, q_start=37, batch=3, **BLOCKS), "ragged"),
    (Case(LONGER, h=4, **BLOCKS), "ragged"),
    (Case((700,), h=16, **{**BLOCKS, "dtype": F16}), "random"),
    pytest.param(Case((1500,), h=16, **BLOCKS | dict(l_sel=128)), "random", marks=CORE),
    (Case(LONGER, h=4, **BLOCKS | dict(l_sel=192, n_sel=7)), "ragged"),
    (Case((515,), h=8, q_start=777, batch=2, **BLOCKS | dict(l_sel=128)), "clustered"),
    pytest.param(Case((1500,), h=16, **BLOCKS | NARROW), "random", marks=CORE),
    (Case(LONGER, h=4, **BLOCKS | NARROW), "ragged"),
    (Case((700,), h=8, **BLOCKS | NARROW | dict(dtype=F16)), "clustered"),
    pytest.param(Case((1500,), h=16, **BLOCKS | WIDER), "random", marks=CORE),
    (Case(LONGER, h=4, **BLOCKS | WIDER | dict(l_sel=128)), "ragged"),
    (Case((515,), h=8, q_start=777, **BLOCKS | WIDER | dict(dtype=F16)), "clustered"),
    pytest.param(
        Case((1500,), G=4, h=16, **BLOCKS | dict(l_sel=32, n_sel=32)), "random", marks=CORE
    ),
    (Case(LONGER, h=4, **BLOCKS | dict(l_sel=32)), "ragged"),
    (Case((515,), h=8, q_start=777, **BLOCKS | WIDER | dict(dtype=F16, l_sel=32)), "clustered"),
    (Case((515,), h=16, batch=2, **BLOCKS | NARROW | dict(l_sel=32)), "one_block"),
], ids=str)  # fmt: skip
def test_selection_agrees_with_two_passes(case, kind, device, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    got, counts = x.backward()
    added = x.backward(torch.full(got[0].shape, 3.0, device=device))[0]
    with deterministic():
        want, without = x.backward()
    assert counts[SELECTION] == 1 and SELECTION not in without
    assert (HALVES in counts) == (case.dtype == BF16)
    cases.close_gradients(got, want, cases.GRADIENTS[case.dtype])
    added = ((added[0] - 3.0) * x.how["softmax_scale"], *added[1:])
    cases.close_gradients(added, want, cases.GRADIENTS[case.dtype])


def halves_and_fp32(x):
    """dQ summed in fp16, and in fp32 as into a given buffer, which rounds as much before."""
    (dq, *_), counts = x.backward()
    assert counts[SELECTION] == counts[HALVES] == 1
    (exact, *_), counts = x.backward(torch.zeros(dq.shape, device=dq.device))
    assert counts[SELECTION] == 1 and HALVES not in counts
    return dq, exact * x.how["softmax_scale"]


@pytest.mark.parametrize("case", [
    pytest.param(Case((1500,), G=1, h=16, **BLOCKS), marks=CORE),
    Case((200, 900), h=4, **BLOCKS), Case((2000,), G=1, h=8, **{**BLOCKS, "n_sel": 32}),
    Case((700,), h=16, **BLOCKS | WIDER),
], ids=str)  # fmt: skip
def test_rows_of_any_size_keep_their_gradient(case, device, monkeypatch):
    """Sums in fp16 of rows from 2**-90 to 2**60, with one number of K and one of V far larger than
    all others. What is less than 2**-30 of a row's bound may get lost."""
    x = Problem(case, "random", device, monkeypatch)
    rows = x.do.shape[:-1]
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(-90, 61, rows, generator=generator).to(device)
    x.do *= (2.0**sizes)[..., None]
    x.k[..., 5, 0, 3] = 20.0
    x.v[..., 9, 0, 3] = 100.0
    dq, exact = (t.double() for t in halves_and_fp32(x))
    bound = 2 * x.do.double().abs().sum(-1) * 20 * 100 * x.how["softmax_scale"]
    error, norm = (dq - exact).norm(dim=-1), exact.norm(dim=-1)
    assert (error <= 8e-3 * norm + 2**-30 * bound).all()
    common = norm > 2**-20 * bound
    assert common.sum() > 0.5 * common.numel()
    assert (error[common] / norm[common]).mean() < 2.5e-3


@CORE
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("case", [Case((600,), G=1, h=16, **BLOCKS)], ids=str)
def test_sums_come_near_their_bound_without_overflow(case, size, device, monkeypatch):
    """Equal probabilities, values of both signs and keys of the same ones: no dQ can be larger."""
    x = Problem(case, "one_block", device, monkeypatch)
    sign = 1.0 - 2.0 * (torch.arange(x.k.shape[1], device=device) % 2)
    x.q.zero_()
    x.do.fill_(1.0)
    for tensor in (x.k, x.v):
        tensor.copy_((sign * size)[None, :, None, None].expand_as(tensor))
    dq, exact = halves_and_fp32(x)
    assert exact.abs().max() > 120 * size**2 * x.how["softmax_scale"]
    error, norm = ((t[:, 1:].double()).norm(dim=-1) for t in (dq - exact, exact))
    assert (error < 5e-3 * norm).all()


def drawn(shape: Shape, keys: int, device: str, D: int, Dv: int) -> list[torch.Tensor]:
    """q, the output's gradient, k and v of one sequence."""
    draw = lambda i, *dims: randn(1, *dims, seed=i, dtype=shape.dtype, device=device)
    S, G, HQ = shape.lengths[0], shape.G, shape.G * shape.h
    return [draw(0, S, HQ, D), draw(1, S, HQ, Dv), draw(2, keys, G, D), draw(3, keys, G, Dv)]


@pytest.mark.parametrize("width", [128, 192])
@pytest.mark.parametrize("shape", SHAPES[:3:2], ids=str)
def test_chunks_and_deep_scores(shape, width, device):
    """As near the truth as two passes are. With wide keys dS comes of a P that is rounded, too."""
    n, span = blocks.num_compressed(37 + shape.lengths[0], 32, 16), Span(COMPRESSED, 32, 16)
    q, do, k, v = drawn(shape, n, device, width, 128)
    q[..., 0], k[..., 0] = 20.0, -20.0  # every score is lower by 200
    how = dict(q_start=37)

    def run():
        out, lse = span_attention_fwd(q, k, v, span, 0.5, **how)
        return span_attention_bwd(do, q, k, v, out, lse, span, 0.5, **how)

    with launches.recording() as counts:
        got = run()
    assert counts[BACKWARD] == 1
    with deterministic():
        want = run()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = reference.compressed_attention(*leaves, l=32, d=16, softmax_scale=0.5, **how)
    exact = torch.autograd.grad(out, leaves, do.double())
    for name, ours, theirs, true in zip("qkv", got, want, exact, strict=True):
        error, allowed = ((g.double() - true).norm() for g in (ours, theirs))
        assert error < (1.05 if width == 128 else 1.6) * allowed, (name, error, allowed)


def test_nan_stays_where_it_belongs(device, monkeypatch):
    """A NaN reaches what depends on it, and nothing that does not see it. Hopper's kernels take a
    NaN value for one of its key (marked_keys.py): the log-sum-exp of what sees it is NaN too."""

    def run():
        q, k, v = (randn(3, 203, n, 128, seed=n, dtype=BF16, device=device) for n in (16, 1, 1))
        q[1, 40, 3], k[0, 2, 0], v[2, 5, 0] = (float("nan"),) * 3
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = prefill.compressed_attention_triton(*leaves, l=32, d=16)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        return [x.isfinite() for x in (out, lse, *grads)]

    with launches.recording() as counts:
        ours = run()
    assert counts[FORWARD] == counts[BACKWARD] == 1
    monkeypatch.setenv("NSA_USE_GLUON", "0")
    clear_flags_cache()
    theirs = run()
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert torch.equal(a[:2], b[:2]), name
    out, lse = ours[:2]
    sees_it = torch.arange(203, device=device) + 1 >= 5 * 16 + 32
    assert lse[2, 31:][~sees_it[31:]].all() and out[2, ~sees_it].all()
    assert not out[2, sees_it, :, 0].any()


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("kind, heads", [
    pytest.param(*kind, marks=CORE)
    for kind in (("compressed", 8), (48, 8), (512, 8), ("both", 2), ("both", 16))
] + [("choice", 4)])  # fmt: skip
def test_a_nan_stays_in_its_packed_sequence(kind, heads, bad, device):
    """Tiles of keys reach past the end of a sequence, the second of which has no compressed key.
    Compressed attention, windows, both in one kernel, whose tiles share their places, and the
    choice of blocks: what others find is the same to the last bit."""
    cu, cu_cmp = pack(70, 20, 333)
    draw = lambda i, ends, *tail: randn(int(ends[-1]), *tail, seed=i, dtype=BF16, device=device)
    q, gates = draw(0, cu, 2 * heads, 128), draw(1, cu, 2 * heads, 3).sigmoid()
    cmp, win = ([draw(i + j, e, 2, 128) for j in (0, 1)] for i, e in ((2, cu_cmp), (4, cu)))
    lse, spans = draw(6, cu, 2 * heads).float(), (Span(COMPRESSED, 32, 16), Span(SLIDING, 48))
    sizes = dict(l=32, d=16, l_sel=64, n_sel=3, n_init=1, n_local=1, softmax_scale=0.1)

    def run():
        if kind == "compressed":
            ends = dict(cu_seqlens=cu, cu_seqlens_cmp=cu_cmp)
            return prefill.compressed_attention_triton(q, *cmp, l=32, d=16, **ends)
        if kind == "both":
            return span_pair_fwd_hopper(q, *cmp, *win, gates, *spans, 0.1, cu, cu_cmp)
        if kind == "choice":
            ends = dict(cu_q=cu, cu_k=cu_cmp, max_q=333)
            return (score_topn_triton.block_select(q, cmp[0], lse, **ends, **sizes),)
        return prefill.sliding_attention_triton(q, *win, window=kind, cu_seqlens=cu)

    kernel = {"both": PAIR, "choice": SCORES}.get(kind, FORWARD)
    with launches.recording() as counts:
        want = run()
        for x in (q, lse, *win):
            x[cu[bad] : cu[bad + 1]] = float("nan")
        for x in cmp:
            x[cu_cmp[bad] : cu_cmp[bad + 1]] = float("nan")
        got = run()
    assert counts[kernel] == 2, dict(counts)
    for a, b in zip(got, want, strict=True):
        rows = torch.ones(len(a), dtype=torch.bool, device=device)
        rows[cu[bad] : cu[bad + 1]] = False
        assert torch.equal(a[rows], b[rows])
    if kind != "choice":  # the first queries see no compressed key
        assert got[0][~rows][0 if kind == "both" else 40 :].isnan().all()


@pytest.mark.parametrize("window, scale", [(1, 0.1), (100, 0.1), (512, 0.1), (512, 3.0)])
@pytest.mark.parametrize("heads, width", [(1, 128), (2, 64), (8, 128), (16, 128), (64, 64)])
def test_both_spans_of_a_chunk(heads, width, window, scale, device):
    """The gated sum of compressed and sliding attention by one kernel; against fp64. With the large
    scale maxima rise by more than what the softmax lets pass, with the small one by less."""
    start, s, dtype = 137, 700, F16
    draw = lambda i, n, h, d=width: randn(1, n, h, d, seed=i, dtype=dtype, device=device)
    q, gates = draw(0, s, 2 * heads), draw(1, s, 2 * heads, 3).sigmoid()
    n_cmp = (start + s - 32) // 16 + 1
    keys = [draw(2 + i, n, 2) for i, n in enumerate((n_cmp, n_cmp, start + s, start + s))]
    spans = Span(COMPRESSED, 32, 16), Span(SLIDING, window)
    with launches.recording() as counts:
        at = dict(q_start=start, win_start=start)
        out, lse = span_pair_fwd_hopper(q, *keys, gates, *spans, scale, **at)
    assert counts[PAIR] == 1
    wide, k_cmp, v_cmp, k, v, g = (x.double() for x in (q, *keys, gates))
    how = dict(q_start=start, softmax_scale=scale)
    cmp, want_lse = reference.compressed_attention(wide, k_cmp, v_cmp, l=32, d=16, **how)
    win = reference.sliding_attention(wide, k, v, window=window, **how)
    want = g[..., :1] * cmp + g[..., 2:] * win
    torch.testing.assert_close(out.double(), want, atol=4e-3, rtol=0)
    rtol = 1e-6 if scale > 1 else 0  # of an lse in the hundreds
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-4, rtol=rtol)


@pytest.mark.parametrize(
    "window, scale", [*((n, 0.1) for n in (1, 100, 128, 512, 10**9)), (10**9, 3.0)]
)
@pytest.mark.parametrize("heads, width", [
    (1, 128), (2, 128), (4, 64), (8, 128), (16, 128), (64, 64), (16, 192), (2, 192),
])  # fmt: skip
def test_windows_forward(heads, width, window, scale, device):
    """Whole and odd windows, with every width of the narrow tile; against fp64. Of the
    scales see test_both_spans_of_a_chunk."""
    start, s = 137, 700
    draw = lambda i, *dims: randn(1, *dims, seed=i, dtype=F16, device=device)
    q, k = draw(heads, s, 2 * heads, width), draw(7, start + s, 2, width)
    v = draw(8, start + s, 2, min(width, 128))
    with launches.recording() as counts:
        out, lse = span_attention_fwd(q, k, v, Span(SLIDING, window), scale, q_start=start)
    assert counts[FORWARD] == 1
    keys, values = (x[0].double().repeat_interleave(heads, 1) for x in (k, v))
    behind = torch.arange(start, start + s, device=device)[:, None]
    behind = behind - torch.arange(start + s, device=device)
    scores = torch.einsum("shd,thd->hst", q[0].double(), keys) * scale
    scores.masked_fill_((behind < 0) | (behind >= window), float("-inf"))
    want = torch.einsum("hst,thd->shd", scores.softmax(-1), values)
    # A large scale makes an output one value, not a mean of many, and an lse of hundreds.
    wide, narrow = (1e-3, 1e-6) if scale > 1 else (0, 0)
    torch.testing.assert_close(out[0].double(), want, atol=3e-3, rtol=wide)
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1).T, atol=1e-4, rtol=narrow)


@pytest.mark.parametrize("window", [2, 16, 130, 10**9])
@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_windows_of_a_chunk(shape, width, window, device):
    """The first keys are seen by no query; dQ alone, added to what there is and in its place."""
    q, do, k, v = drawn(shape, shape.lengths[0] + 137, device, width, min(width, 128))
    span = Span(SLIDING, window)
    out, lse = span_attention_fwd(q, k, v, span, 0.1, q_start=137)
    backward = lambda **kw: span_attention_bwd(do, q, k, v, out, lse, span, 0.1, q_start=137, **kw)
    with deterministic():
        want = backward()
    with launches.recording() as counts:
        cases.close_gradients(backward(), want, 1e-2)
        full = lambda: torch.full(q.shape, 3.0, device=device)
        added, written = backward(dq=full())[0], backward(dq=full(), first=True)[0]
    assert counts[BACKWARD] == 3
    cases.close_gradients([(added - 3.0) * 0.1], want, 1e-2)
    cases.close_gradients([written * 0.1], want, 1e-2)


@pytest.mark.parametrize("width", [128, 192])
@pytest.mark.parametrize("kind", ["compressed", "sliding"])
def test_gradients_of_other_sequences_stay_clear_of_a_nan(kind, width, device):
    """The last tile of a sequence's queries reaches into the next one's."""
    cu, cu_cmp = pack(70, 133, 41)
    attend, how = prefill.sliding_attention_triton, dict(window=48)
    rows = keys = cu.tolist()
    if kind == "compressed":
        attend, keys = prefill.compressed_attention_triton, cu_cmp.tolist()
        how = dict(l=32, d=16, cu_seqlens_cmp=cu_cmp)
    draw = lambda *dims: randn(*dims, seed=dims[1], dtype=BF16, device=device).requires_grad_()
    q, k, v = draw(rows[-1], 32, width), draw(keys[-1], 2, width), draw(keys[-1], 2, 128)

    def run():
        out, _ = attend(q, k, v, cu_seqlens=cu, **how)
        with launches.recording() as counts:
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert counts[BACKWARD] == 1
        return grads

    want = run()
    with torch.no_grad():
        k[keys[1] - 1] = float("nan")
    for name, a, b, end in zip("qkv", run(), want, (rows[1], keys[1], keys[1]), strict=True):
        torch.testing.assert_close(a[end:], b[end:], msg=lambda m, n=name: n + m)


def test_a_graph_holds_them(device):
    q, k, v = (randn(1, 520, n, 128, seed=n, dtype=BF16, device=device) for n in (16, 1, 1))
    call = lambda: prefill.compressed_attention_triton(q, k, v, l=32, d=16)[0]
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    q.normal_()
    graph.replay()
    assert torch.equal(out, call())
