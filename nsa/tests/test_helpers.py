"""Does the parity judgement fail what it must fail, and do the input makers make what they say?"""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from bench.parity import MAE_LIMIT, assert_parity, measure_parity
from nsa import oracle, select
from nsa.tests.helpers import (
    BLOCK_KINDS,
    RANGE_KINDS,
    make_block_indices,
    make_ranges,
    randn,
    sent,
)

ORACLE = randn(4, 8, 64, seed=1, dtype=torch.float64) * 0.1
GOOD = ORACLE.to(torch.bfloat16)


def judge(out, same_dtype=GOOD, **kw):
    kw = {"path_requested": "sdpa", "path_taken": "sdpa", **kw}
    return measure_parity("case", "op", out, ORACLE, same_dtype, **kw)


def test_equal_quality_passes():
    parity = judge(GOOD)
    assert parity.status == "PASS" and parity.why == [] and 0 < parity.margin <= 0.5


def dead_row(x):
    x = x.clone()
    x[2, 3] = 0
    return x


def one_wrong(x):
    x = x.clone()
    x[1, 1, 5] += 0.05
    return x


def put(value):
    def change(x):
        x = x.clone()
        x[0, 0, 0] = value
        return x

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dead_row, r"row \[2, 3\]"),
        (one_wrong, "max_abs"),
        (lambda x: x + 0.002, "mae"),
        (put(math.nan), "NaN at 1 other places"),
        (put(math.inf), r"\+inf at 1"),
        (lambda x: x[:3], "shape"),
        (torch.zeros_like, "mae"),
    ],
)
def test_wrong_output_fails(change, why):
    parity = judge(change(GOOD))
    assert parity.status == "FAIL"
    assert any(re.search(why, w) for w in parity.why), parity.why


def test_a_dead_row_hides_from_the_mean_but_not_from_the_row():
    out = dead_row(GOOD)
    big = torch.cat([GOOD] * 200), torch.cat([ORACLE] * 200)
    big[0][:4] = out
    parity = measure_parity(
        "c", "op", big[0], big[1], big[0] * 0 + torch.cat([GOOD] * 200), path_requested="sdpa",
        path_taken="sdpa",
    )  # fmt: skip
    assert parity.mae < parity.limit_mae and parity.status == "FAIL"
    assert parity.worst_row_index == [2, 3]


def test_the_allowance_for_rounding_is_one_rounding():
    """Of 16 only where sums of fp32 are compared: of bf16 these would be 12 % of the result."""
    want = torch.full((8, 64), 1.0, dtype=torch.float64)
    step, kw = 2**-7, dict(path_requested="sdpa", path_taken="sdpa")  # what bf16 tells apart at 1
    for same, good, bad in ((want.bfloat16(), 1, 2), (None, 1, 2)):
        for steps, status in ((good, "PASS"), (bad, "FAIL")):
            out = want.bfloat16()
            out[3, 5] += steps * step
            parity = measure_parity("c", "op", out, want, same, **kw)
            assert parity.status == status and parity.limit_max_abs == step, (steps, parity.why)
    same = want.bfloat16()
    same[0, 0] += step
    assert measure_parity("c", "op", same, want, same, **kw).limit_max_abs == 3 * step


def test_same_infinities_agree():
    lse = torch.tensor([[0.5, -math.inf]], dtype=torch.float64)
    kw = dict(path_requested="sdpa", path_taken="sdpa", rows=False)
    assert measure_parity("c", "lse", lse.float(), lse, lse.float(), **kw).status == "PASS"
    other = torch.tensor([[-math.inf, 0.5]])
    parity = measure_parity("c", "lse", other, lse, lse.float(), **kw)
    assert parity.status == "FAIL"
    json.dumps(vars(parity), allow_nan=False)


@pytest.mark.parametrize(
    ("kw", "why"),
    [
        (dict(path_requested="triton", path_taken="sdpa", fallback_reason="dtype"), "ran sdpa"),
        (dict(path_requested="triton", path_taken="triton"), "no kernel launch was counted"),
        (dict(path_requested="triton", path_taken="triton", launches={"_other_kernel": 1},
              expect_kernels=["_sel_kernel"]), "never launched: _sel_kernel"),
        (dict(path_requested="triton", path_taken="triton",
              launches={"_other_kernel": 1, "_sel_kernel": 0}, expect_kernels=["_sel_*"]),
         "never launched: _sel_*"),
        (dict(path_requested="triton", path_taken=None), "ran None"),
    ],
)  # fmt: skip
def test_right_numbers_from_the_wrong_path_are_invalid(kw, why):
    parity = judge(GOOD, **kw)
    assert parity.status == "INVALID" and any(why in w for w in parity.why), parity.why


@pytest.mark.parametrize(
    ("launched", "path"),
    [
        (["_decode_scan_kernel"], "triton"),
        (["_sel_spans_kernel", "_sel_attn_fwd_ranges_kernel"], "triton_ranges"),
        (["_sel_attn_fwd_dense_group_kernel", "_sel_attn_merge_kernel"], "triton_dense_group"),
        (["_sel_attn_fwd_varlen_kernel", "_sel_attn_fwd_dense_kernel"], "triton_dense_varlen"),
    ],
)
def test_the_path_of_a_triton_row_is_what_was_launched(launched, path):
    """Whatever variant the caller expected."""
    parity = judge(GOOD, path_requested="triton", path_taken="triton_varlen",
                   launches=dict.fromkeys(launched, 1))  # fmt: skip
    assert (parity.status, parity.path_taken) == ("PASS", path)


def test_nothing_compared_is_not_a_pass():
    empty = torch.zeros(0, 4)
    kw = dict(path_requested="sdpa", path_taken="sdpa")
    assert measure_parity("c", "op", empty, empty.double(), **kw).status == "FAIL"


def test_record_is_emitted_pass_or_fail(monkeypatch):
    kw = dict(path_requested="triton", path_taken="triton_dense", launches={"_k": 3}, seed=7)

    def both():
        assert_parity("good", "fwd", GOOD, ORACLE, GOOD, **kw)
        with pytest.raises(AssertionError, match="bad fwd: FAIL: mae"):
            assert_parity("bad", "fwd", GOOD * 0, ORACLE, GOOD, **kw)

    _, rows = sent(monkeypatch, both)
    assert [(r["kind"], r["case"], r["status"]) for r in rows] == [
        ("parity", "good", "PASS"), ("parity", "bad", "FAIL")
    ]  # fmt: skip
    assert rows[0]["launches"] == {"_k": 3} and rows[0]["dtype"] == "bfloat16"


# ---- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RANGE_KINDS)
@pytest.mark.parametrize("L", [1, 2, 9, 64, 100])
def test_ranges_select_exactly_L_keys(kind, L):
    ranges = make_ranges(kind, 2, 4, 2, 100, L, seed=L)
    counts = {len(oracle.range_tokens(r, 100)) for r in ranges.flatten(0, 2)}
    assert counts == {L}
    assert (select.range_lengths(ranges) == L).all()  # disjoint as they come
    assert torch.equal(ranges, make_ranges(kind, 2, 4, 2, 100, L, seed=L))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_block_indices_are_causal_sorted_and_padded(kind):
    blocks = make_block_indices(kind, 1, 40, 2, 3, 4, seed=1, q_start=5)
    for s in range(40):
        for row in blocks[0, s].tolist():
            real = [j for j in row if j >= 0]
            assert row == sorted(set(real)) + [-1] * (3 - len(real))
            assert all(j <= (5 + s) // 4 for j in real)


def test_uninitialised_memory_is_poisoned():
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
    assert torch.ones(1).new_empty(2).isnan().all()
    assert (torch.empty(2, dtype=torch.int32) < -(10**6)).all()


def test_a_plain_computation_that_is_not_finite_widens_no_limit():
    truth = torch.ones(2, 64, 64, dtype=torch.float64)
    out, plain = truth.half(), truth.half()
    out[0, 0, 0] += 2
    plain[1, 3, 2] = float("inf")
    asked = dict(path_requested="sdpa", path_taken="sdpa")
    found = measure_parity("case", "op", out, truth, plain, **asked)
    assert found.status == "INVALID" and "plain computation" in found.why[0]
    out[0] += 2  # which is wrong, whatever it is held against
    found = measure_parity("case", "op", out, truth, plain, **asked)
    assert found.status == "FAIL" and "mae" in found.why[0]
    found = measure_parity("case", "op", truth.half(), truth, plain[:1, :1, :1], **asked)
    assert found.status == "INVALID" and "[1, 1, 1] of the plain computation" in found.why[0]


def test_a_result_may_be_off_by_twice_what_the_plain_computation_is():
    half = dict.fromkeys((torch.float16, torch.bfloat16), 1e-3)
    assert MAE_LIMIT == {**half, torch.float32: 1e-4, torch.float64: 1e-10}
    truth = torch.ones(64, 64, dtype=torch.float64)
    plain = truth.float() + 1e-5
    asked = dict(path_requested="sdpa", path_taken="sdpa")
    for times, status in ((1.9, "PASS"), (2.5, "FAIL")):
        out = truth.float() + times * 1e-5
        assert measure_parity("case", "op", out, truth, plain, **asked).status == status
