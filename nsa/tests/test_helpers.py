"""Does the parity judgement fail what it must fail, and do the input makers make what they say?"""

import json
import math
import re

import pytest
import torch

from bench.parity import MAE_LIMIT, assert_parity, measure_parity
from nsa import oracle, select
from nsa.tests.helpers import BLOCK_KINDS, RANGE_KINDS, make_block_indices, make_ranges, randn
from nsa.tests.helpers import sent as rows_sent

ORACLE = randn(4, 8, 64, seed=1, dtype=torch.float64) * 0.1
GOOD = ORACLE.to(torch.bfloat16)
SDPA = dict(path_requested="sdpa", path_taken="sdpa")
ONES = torch.ones(2, 64, 64, dtype=torch.float64)
LSE = torch.tensor([[0.5, -math.inf]])


def judge(out, oracle=ORACLE, plain=GOOD, **how):
    return measure_parity("case", "op", out, oracle, plain, **{**SDPA, **how})


def put(x, at, value):
    """x with another value at one place, or throughout a row."""
    x = x.clone()
    x[at] = value
    return x


def test_equal_quality_passes():
    parity = judge(GOOD)
    assert parity.status == "PASS" and parity.why == [] and 0 < parity.margin <= 0.5


EXACT, SPOILED = ONES.half(), put(ONES.half(), (1, 3, 2), math.inf)
# An output, what is exact, the plain computation, and what is said of it.
UNFIT = {
    **{name: (out, ORACLE, GOOD, "FAIL", why) for name, out, why in (
        ("row", put(GOOD, (2, 3), 0), r"row \[2, 3\]"),
        ("value", put(GOOD, (1, 1, 5), GOOD[1, 1, 5] + 0.05), "max_abs"),
        ("offset", GOOD + 0.002, "mae"), ("zeros", torch.zeros_like(GOOD), "mae"),
        ("nan", put(GOOD, (0, 0, 0), math.nan), "NaN at 1 other places"),
        ("inf", put(GOOD, (0, 0, 0), math.inf), r"\+inf at 1"),
        ("other shape", GOOD[:3], "shape"),
    )},
    "plain": (put(EXACT, (0, 0, 0), 3), ONES, SPOILED, "INVALID", "plain computation"),
    "plain and output": (put(EXACT, 0, 3), ONES, SPOILED, "FAIL", "mae"),
    "shape": (EXACT, ONES, EXACT[:1, :1, :1], "INVALID", r"\[1, 1, 1\] of the plain computation"),
    "nothing": (torch.zeros(0, 4), torch.zeros(0, 4), None, "FAIL", "nothing was compared"),
    "same infinities": (LSE, LSE.double(), LSE, "PASS", "^$"),
    "other infinities": (LSE.flip(1), LSE.double(), LSE, "FAIL", "-inf at 2"),
}  # fmt: skip


@pytest.mark.parametrize("out, exact, plain, status, why", UNFIT.values(), ids=UNFIT)
def test_what_is_wrong_or_cannot_be_compared_is_no_pass(out, exact, plain, status, why):
    """A plain computation that is not finite widens no limit; equal infinities agree."""
    parity = judge(out, exact, plain, rows=len(exact) != 1)
    assert parity.status == status and re.search(why, "; ".join(parity.why)), parity.why
    json.dumps(vars(parity), allow_nan=False)


def test_a_dead_row_hides_from_the_mean_but_not_from_the_row():
    plain = torch.cat([GOOD] * 200)
    parity = judge(put(plain, (2, 3), 0), torch.cat([ORACLE] * 200), plain)
    assert parity.mae < parity.limit_mae and parity.status == "FAIL"
    assert parity.worst_row_index == [2, 3]


def test_the_allowance_for_rounding_is_one_rounding():
    """Of 16 only where sums of fp32 are compared: of bf16 these would be 12 % of the result."""
    want, step = torch.ones(8, 64, dtype=torch.float64), 2**-7  # what bf16 tells apart at 1
    for plain in (want.bfloat16(), None):
        for steps, status in ((1, "PASS"), (2, "FAIL")):
            parity = judge(put(want, (3, 5), 1 + steps * step).bfloat16(), want, plain)
            assert parity.status == status and parity.limit_max_abs == step, (steps, parity.why)
    same = put(want, (0, 0), 1 + step).bfloat16()
    assert judge(same, want, same).limit_max_abs == 3 * step


def test_a_result_may_be_off_by_twice_what_the_plain_computation_is():
    half = dict.fromkeys((torch.float16, torch.bfloat16), 1e-3)
    assert MAE_LIMIT == {**half, torch.float32: 1e-4, torch.float64: 1e-10}
    for times, status in ((1.9, "PASS"), (2.5, "FAIL")):
        parity = judge(ONES.float() + times * 1e-5, ONES, ONES.float() + 1e-5)
        assert parity.status == status


OTHER, TRITON = {"_other_kernel": 1}, dict(path_requested="triton", path_taken="triton")


@pytest.mark.parametrize("how, why", [
    ({**TRITON, "path_taken": "sdpa", "fallback_reason": "dtype"}, "ran sdpa"),
    (TRITON, "no kernel launch was counted"), ({**TRITON, "path_taken": None}, "ran None"),
    (dict(TRITON, launches=OTHER, expect_kernels=["_sel_kernel"]), "never launched: _sel_kernel"),
    (dict(TRITON, launches=OTHER | {"_sel_kernel": 0}, expect_kernels=["_sel_*"]),
     "never launched: _sel_*"),
])  # fmt: skip
def test_right_numbers_from_the_wrong_path_are_invalid(how, why):
    parity = judge(GOOD, **how)
    assert parity.status == "INVALID" and any(why in w for w in parity.why), parity.why


PATHS = {
    "triton": ["decode_scan"],
    "triton_ranges": ["sel_spans", "sel_attn_fwd_ranges"],
    "triton_dense_group": ["sel_attn_fwd_dense_group", "sel_attn_merge"],
    "triton_dense_varlen": ["sel_attn_fwd_varlen", "sel_attn_fwd_dense"],
}


@pytest.mark.parametrize("path", PATHS)
def test_the_path_of_a_triton_row_is_what_was_launched(path):
    """Whatever variant the caller expected."""
    counts = {f"_{name}_kernel": 1 for name in PATHS[path]}
    parity = judge(GOOD, **{**TRITON, "path_taken": "triton_varlen"}, launches=counts)
    assert (parity.status, parity.path_taken) == ("PASS", path)


def test_record_is_emitted_pass_or_fail(monkeypatch):
    kw = dict(path_requested="triton", path_taken="triton_dense", launches={"_k": 3}, seed=7)

    def both():
        assert_parity("good", "fwd", GOOD, ORACLE, GOOD, **kw)
        with pytest.raises(AssertionError, match="bad fwd: FAIL: mae"):
            assert_parity("bad", "fwd", GOOD * 0, ORACLE, GOOD, **kw)

    _, rows = rows_sent(monkeypatch, both)
    assert [(r["case"], r["status"]) for r in rows] == [("good", "PASS"), ("bad", "FAIL")]
    assert {r["kind"] for r in rows} == {"parity"}
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
    assert (torch.empty(2, dtype=torch.int32).abs() > 10**6).all()
