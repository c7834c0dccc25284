"""The baseline is measured work too: each one that works is right, the others say why, and one that
is slower than its name says gives no ratio."""

import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import (
    bench_decode,
    bench_peers,
    bench_prefill,
    bench_sel_triton,
    decode_step,
    formulation,
    recorded,
    sdpa_baselines,
    timing,
)
from bench.device import Ceilings
from bench.timing import measure
from nsa import launches
from nsa.tests.helpers import randn
from nsa.tests.test_bench_decode import one_thread as one_thread
from nsa.tests.test_bench_decode import sent
from nsa.tests.test_timing import BUDGET, LAST, SimulatedClock, planted, said

real = F.scaled_dot_product_attention
Q, K, V = randn(5, 4, 16, seed=1), randn(5, 24, 16, seed=2), randn(5, 24, 16, seed=3)


# ---- which backends of SDPA benches compare with -------------------------------------------------


def test_every_baseline_that_works_is_right():
    """On a CPU: no time of `math` may stand under the name of a kernel that was never there."""
    found = sdpa_baselines.packed_baselines(Q, K, V)
    forms = sdpa_baselines.FORMULATIONS
    names = lambda *backends: {f"sdpa_{b}_{f}" for b in backends for f in forms}
    assert names("math") <= set(found.calls) and all(found.refused.values())
    assert set(found.calls) | set(found.refused) == names(*sdpa_baselines.BACKENDS)
    assert names("efficient", "cudnn") <= set(found.refused).difference(found.calls)
    want = (Q @ K.mT / 4).softmax(-1) @ V
    for name, call in found.calls.items():
        with launches.recording() as launched:
            torch.testing.assert_close(call(), want, msg=name)
        assert launched == {name: 1}


@pytest.mark.parametrize("text, raises", [
    ("CUDA error: unspecified launch failure", True), ("CUDA error: misaligned address", True),
    ("CUDA out of memory", False), ("No available kernel", False),
])  # fmt: skip
def test_a_baseline_that_spoils_the_device_ends_the_search(text, raises, monkeypatch):
    fails = mock.Mock(side_effect=RuntimeError(text))
    monkeypatch.setattr(sdpa_baselines, "packed_sdpa", fails)
    if raises:
        with pytest.raises(RuntimeError, match=text):
            sdpa_baselines.packed_baselines(Q, K, K)
        assert fails.call_count == 1
    else:
        assert set(sdpa_baselines.packed_baselines(Q, K, K).refused.values()) == {text}


def test_a_call_that_nobody_takes_is_told_with_the_reasons():
    refuse = mock.Mock(side_effect=RuntimeError("No available kernel"))
    found = sdpa_baselines.usable({"cudnn": refuse, "flash": refuse})
    assert found.calls == {}
    assert found.why_none() == "cudnn: No available kernel; flash: No available kernel"
    assert sdpa_baselines.usable({"plain": lambda: Q, "none": refuse}).why_none() == ""


def test_math_under_the_name_of_flash_is_no_baseline(monkeypatch):
    """The backend that is asked for is overruled inside of the call."""

    def math(q, k, v, **how):
        with sdpa_kernel(SDPBackend.MATH):
            return real(q, k, v, **how)

    monkeypatch.setattr(sdpa_baselines, "F", SimpleNamespace(scaled_dot_product_attention=math))
    found = sdpa_baselines.packed_baselines(Q, K, K)
    assert "named flash and ran math x1" in found.refused["sdpa_flash_mqa_rows"]
    assert "sdpa_math_mqa_rows" in found.calls
    assert found.label("sdpa_math_gqa") == "sdpa_math_gqa expanded"
    assert found.label("sdpa_math_mqa_rows") == "sdpa_math_mqa_rows"


# ---- in the decode bench -------------------------------------------------------------------------


def thrice(q, k, v, **how):
    return sum(real(q, k, v, **how) for _ in range(3)) / 3


def waits(q, k, v, **how):
    time.sleep(0.002)
    return real(q, k, v, **how)


@pytest.mark.parametrize("sdpa", [real, thrice, waits], ids=lambda f: f.__name__)
def test_a_baseline_of_the_cpu_profile_that_was_slowed_down_is_told(
    sdpa, monkeypatch, one_thread, capsys
):
    """And a row shows what its baseline ran and reached."""
    functional = SimpleNamespace(scaled_dot_product_attention=sdpa)
    like = ("--S_list", "41", "--branch_force_mode", "none", "--more", "0")
    _, rows = sent(monkeypatch, *like, replaced=[(decode_step, "F", functional)])
    row = next(row for row in rows if row.get("case") == "decode/S=41")
    if sdpa is not real:
        assert row["speedup"] is None and row["base_median_us"] is None
        told = "; ".join(row["why"]) + capsys.readouterr().err
        assert "its operators take" in told or "ran flash x3" in told
        return
    assert row["status"] in ("VALID", "UNSTABLE"), row["why"]
    assert row["base_ran"] in ("flash x1", "math x1", "math x1, heads expanded")
    assert ("expanded" in row["base_ran"]) == ("expanded" in row["baseline"])
    assert 0 < row["base_peak_frac"] < 1 and row["base_gbs"] > 0 and row["base_tflops"] > 0


# ---- shares of the ceiling -----------------------------------------------------------------------


def row_of(clock, gigabytes, base_us, attends=None, name="dense", flops=None, **case):
    """A case whose baseline moves that much in base_us of a simulated clock."""
    clock.lengths |= {"ours": 50.0, "base": base_us}
    base = dict(
        name=name, path="sdpa", bytes_needed=int(gigabytes * 1e9), attends=attends, flops=flops,
        watched=lambda: real(*[torch.randn(1, 1, 4, 8)] * 3),
    )  # fmt: skip
    ceiling = Ceilings(1000.0, None, "measured")
    return measure(planted(base=base, **case), clock, budget=BUDGET, ceiling=ceiling)


def test_a_baseline_far_below_its_other_sizes_gives_no_ratio():
    """Its share is of its own work."""
    clock = SimulatedClock({})
    first = row_of(clock, 0.05, 100.0)
    assert first.status == "VALID" and first.speedup == pytest.approx(2, rel=0.1)
    assert first.base_peak_frac == pytest.approx(0.5, rel=0.1) and first.base_bound == "memory"
    assert first.peak_frac is None and first.base_gbs == pytest.approx(500, rel=0.1)
    assert row_of(clock, 0.1, 250.0).status == "VALID"  # 40 % after 50 %
    for gigabytes, us in ((0.1, 1000.0), (0.01, 700.0)):  # 10 %; longer than ten times the work
        row = row_of(clock, gigabytes, us)
        assert row.status == "INVALID" and row.speedup is None
        assert said(row).startswith("baseline dense: it reached")
    assert row_of(clock, 0.1, 1000.0, name="another").status == "VALID"
    assert row_of(SimulatedClock({}), 0.1, 1000.0).status == "VALID"
    # Where nobody knows a card's FLOP/s: far below what memory alone allows.
    for us in (100.0, 5000.0):
        row = row_of(clock, 0.05, us, name="dense of flops", flops=10**9)
        assert row.status == "VALID", row.why


def test_a_fused_attention_below_its_floor_gives_no_ratio(monkeypatch):
    """At its first size too."""
    monkeypatch.setattr(timing, "watch", lambda call: formulation.Ran(
        formulation.Counter(flash=1), calls=[(lambda: LAST.__setitem__(0, "base"), (), {})]
    ))  # fmt: skip
    row = row_of(SimulatedClock({}), 0.05, 1000.0, attends="flash")
    assert row.status == "INVALID" and "5.0% of its ceiling, where 15% is the least" in said(row)
    assert row_of(SimulatedClock({}), 0.05, 200.0, attends="flash").status == "VALID"
    # Of a short call, launching it is the most.
    assert row_of(SimulatedClock({}), 0.005, 100.0, attends="flash").status == "VALID"


# ---- what such a card is known to do -------------------------------------------------------------

LIKE = dict(
    B=1, S=8192, l=32, d=16, l_sel=64, n_sel=16, w=512, dtype="bf16", device="NVIDIA H200",
)  # fmt: skip
CASE = dict(LIKE, op="full", direction="bwd", HQ=64, G=4, D=128, Dv=128)
DECODE = dict(LIKE, dim=2560, heads=64, groups=4, dk=128, dv=128)
SEL = dict(
    mode="dense", N=256, H=8, D=64, Dv=64, L=64, dist="few", streams=1, n_sel=None, dtype="bf16",
    device="NVIDIA H200",
)  # fmt: skip
PEERS = {**CASE, "against": "sfnsa", "peer_commit": "fcf117c", "direction": "fwd", "S": 65536}
# A bench of each kind, a case that was recorded, and its baseline.
RECORDED = {
    "prefill": (bench_prefill, CASE, "dense sdpa_cudnn gqa"),
    "decode": (bench_decode, DECODE, "dense sdpa cudnn gqa"),
    "decode_graph": (bench_decode, DECODE, "dense sdpa cudnn gqa graph"),
    "sel": (bench_sel_triton, SEL, "sdpa_cudnn_gqa"), "peers": (bench_peers, PEERS, "sfnsa"),
}  # fmt: skip


@pytest.mark.parametrize("base_us, changed", [
    (20_000.0, None),
    (10_000.0, {}),  # another library, a capped card
    (20_000.0, {"S": 16384}),
    (20_000.0, {"sharing": "shared"}),
    (20_000.0, {"device": "NVIDIA H100 80GB HBM3"}),
    (20_000.0, {"name": "dense sdpa_flash gqa"}),
    (20_000.0, {"timer": "perf_counter"}),
], ids=["told", "drift", "case", "sharing", "card", "formulation", "clock"])  # fmt: skip
def test_a_baseline_far_over_the_committed_rows_of_its_card_gives_no_ratio(base_us, changed):
    """From the first size on, where there is no other to hold it against: bench/results has 5047 us
    for this one, or nearly. A drift, and what nobody recorded, say nothing."""
    how = {"name": "dense sdpa_cudnn gqa", "timer": "cuda_event", **(changed or {})}
    clock = SimulatedClock({})
    clock.timer = how.pop("timer")
    name = how.pop("name")
    row = row_of(clock, 0.05, base_us, name=name, bench="prefill", columns=CASE | how)
    if changed is not None:
        assert row.status == "VALID" and row.speedup > 1, row.why
        return
    assert row.status == "INVALID" and row.speedup is None and row.base_median_us is None
    told = r"it takes 20\d{3} us here, and on such a card it took 50\d\d \(prefill-\w+.csv\)"
    assert re.search(told, said(row)), row.why


@pytest.mark.parametrize("bench", recorded.KINDS)
def test_committed_baselines_are_found_as_benches_name_their_cases(bench):
    """A column that a bench renames would silence its records."""
    kind, (module, columns, name) = recorded.KINDS[bench], RECORDED[bench]
    assert {*kind.case, kind.baseline, kind.ms} <= set(module.COLUMNS)
    assert recorded.baseline(bench, columns, name, "cuda_event").us > 5
    if bench == "peers":  # another commit may be another program
        assert recorded.baseline(bench, columns | {"peer_commit": "x"}, name, "cuda_event") is None


def test_what_this_library_does_itself_has_no_record():
    """The packing of another commit is another baseline of the same name."""
    route = {**SEL, "mode": "route"}
    every = recorded._baselines(recorded.RESULTS, "sel", "NVIDIA H200")
    assert (*recorded.key_of("sel", route), "packing") in every
    assert recorded.baseline("sel", route, "packing", "cuda_event") is None
