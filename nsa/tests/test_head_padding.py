"""Groups whose query heads are made a power of two: nothing tells but the time."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.kernels import prefill
from nsa.kernels.prefill import head_padding, hopper
from nsa.kernels.tiles import pow2
from nsa.tests import test_prefill_kernels as kernels_of
from nsa.tests.cases import BF16, F16, F32, PAPER, WIDE, Shape
from nsa.tests.helpers import deterministic, make_layer

WIDENED = [
    Shape((37,), G=1, h=3, D=24, Dv=16),  # whose queries choose all blocks, by no scores
    Shape((5, 0, 55, 1, 9), h=3),
    Shape((18,), h=5, q_start=41, batch=2, dtype=F32),
    pytest.param(Shape((2100,), h=5, **WIDE, dtype=BF16, n_sel=8, **PAPER), marks=pytest.mark.core),
    Shape((1, 1700, 63, 400), G=1, h=7, D=64, Dv=64, n_sel=4, **PAPER),
    Shape((2048,), G=1, h=12, D=192, Dv=128, dtype=BF16, n_sel=16, **PAPER),
]


@pytest.mark.kernel
@pytest.mark.parametrize("shape", WIDENED, ids=str)
def test_the_whole_operator_against_the_oracle(shape, device, monkeypatch):
    """Outputs, gradients and log-sum-exps; blocks are the best by the real heads' scores."""
    monkeypatch.setattr(head_padding, "heads_to_be", lambda *x: pow2(x[2]))
    monkeypatch.setattr(head_padding, "LEAST_TRAINED", 0)
    for name in ("SPLIT_KEYS", "SPLIT_QUERIES"):
        monkeypatch.setattr(head_padding, name, {4: 0, 8: 0, 16: 0})
    with launches.recording() as counts:
        kernels_of.test_whole(shape, device)
    by_scores = max(shape.keys) > shape.n_sel * shape.l_sel
    assert ("_hide_heads_kernel" in counts) == by_scores, counts
    if shape.big and hopper.enabled(torch.device("cuda")):
        assert counts["_span_fwd_hopper_kernel"] and counts["_block_attn_bwd_hopper_kernel"], counts


@pytest.mark.kernel
@pytest.mark.parametrize("heads, groups", [(5, 1), (7, 2), (12, 1)])
def test_scores_within_attention_are_of_the_real_heads(heads, groups, cuda, monkeypatch):
    if not hopper.enabled(cuda):
        pytest.skip("for Hopper's kernels")
    S, how = 17000, dict(l=32, d=16)
    tensors = make_layer(S, heads * groups, groups, 128, **how, dtype=BF16, device=cuda)
    how |= dict(l_sel=64, n_sel=16, n_init=1, n_local=2, window=512)
    with launches.recording() as counts:
        out, aux = prefill.nsa_prefill_triton(*tensors, **how)
    assert "_hide_heads_kernel" not in counts and counts["_span_pair_fwd_hopper_kernel"], counts
    monkeypatch.setattr(head_padding, "SPLIT_KEYS", {8: S + 1, 16: S + 1})
    with launches.recording() as counts:
        want, wanted = prefill.nsa_prefill_triton(*tensors, **how)
    assert "_span_pair_fwd_hopper_kernel" not in counts
    same = (aux["block_indices"] == wanted["block_indices"])[0]
    assert same.double().mean() > 0.99
    same = same.all(-1)
    torch.testing.assert_close(aux["lse"], wanted["lse"], rtol=1e-4, atol=1e-3)
    rows = same.repeat_interleave(heads, 1)
    torch.testing.assert_close(out[0][rows], want[0][rows], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("change, heads", [
    ({}, 8), (dict(heads=3), 4), (dict(heads=8), 8), (dict(heads=12), 16), (dict(heads=2), 2),
    (dict(heads=17), 17), (dict(d=192), 8), (dict(d=64), 5), (dict(d=64, dv=64), 8),
    (dict(dtype=F32), 5), (dict(dtype=F16), 8), (dict(use_gluon=False), 5),
])  # fmt: skip
def test_which_groups_get_more_heads(change, heads, monkeypatch):
    """A group is widened where the kernels for Hopper serve and take it then."""
    of = dict(heads=5, d=128, dv=128, dtype=BF16, use_gluon=None)
    ask = lambda: head_padding.heads_to_be(torch.device("cuda"), **of | change)
    monkeypatch.setattr(hopper, "why_not", lambda device, use: "off" if use is False else None)
    assert ask() == heads
    monkeypatch.setattr(hopper, "why_not", lambda device, use: "another card")
    assert ask() == (of | change)["heads"]


@pytest.mark.parametrize("heads, tokens, keys, how, to", [
    (5, 4096, 4096, {}, 8), (5, 4095, 4095, {}, 5), (5, 1024, 9000, {}, 8), (5, 1023, 9000, {}, 5),
    (3, 4096, 6143, {}, 3), (3, 1024, 6144, {}, 4), (12, 4096, 10240, {}, 16),
    (12, 4095, 10240, {}, 12), (5, 4096, 4096, dict(dtype=F16), 5),
    (5, 1024, 1024, dict(trained=True), 8), (5, 1023, 1023, dict(trained=True), 5),
    (5, 1024, 1024, dict(trained=True, dtype=F16), 8),
])  # fmt: skip
def test_from_how_many_tokens_on(heads, tokens, keys, how, to, monkeypatch):
    """Forward alone, where selection then goes by keys; with a backward earlier."""
    monkeypatch.setattr(head_padding, "heads_to_be", lambda *x: pow2(x[2]))
    trained, dtype = how.get("trained", False), how.get("dtype", BF16)
    q = torch.empty(1, tokens, 2 * heads, 4, dtype=dtype)
    k = torch.empty(1, keys, 2, 4, dtype=dtype)
    more = head_padding.Padding.of(q, k, k, trained, None)
    assert more == head_padding.Padding(2, heads, to)
    x = more.add(torch.ones(3, 2 * heads, 4))
    assert x.shape == (3, 2 * to, 4) and x.sum() == 3 * 2 * heads * 4
    assert torch.equal(more.cut(x, -2), torch.ones(3, 2 * heads, 4))
    assert torch.equal(more.cut(x[..., 0], -1), torch.ones(3, 2 * heads))
    if not trained:  # sums by keys do not repeat bitwise
        with deterministic():
            assert head_padding.Padding.of(q, k, k, False, None).to == heads
