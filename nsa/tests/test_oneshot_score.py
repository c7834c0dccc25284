"""The score of a run, its trend over runs, and the rows as traces of flashinfer-bench."""

from __future__ import annotations

import json
import shutil

import pytest

from nsa.tests.oneshot_samples import bench_row, real_rows
from nsa.tests.test_oneshot_compare import made
from nsa.tests.test_oneshot_compare import other_sources as other_sources
from scripts.oneshot.__main__ import main
from scripts.oneshot.compare import export, trend, verify
from scripts.oneshot.record import bundle
from scripts.oneshot.record.reading import rebuild
from scripts.oneshot.record.score import CASES, score

HEALTH = {"copy_gbs": 4000.0, "gemm_bf16_tflops": 500.0}


def rows_of(*shares, **changes):
    """A row of each case that took its roofline time over its share: by FLOPs, and for the last
    by bytes."""
    work = [{"flops": 5e10, "bytes": 1e6}] * 5 + [{"flops": 1e9, "bytes": 4e8}]
    return [
        bench_row(name, 100.0 / share, None, **{**case, **amounts, **changes})
        for (name, case), share, amounts in zip(CASES.items(), shares, work, strict=True)
    ]


def test_the_score_is_the_geometric_mean_of_the_shares_of_the_roofline():
    found = score(rows_of(0.5, 0.5, 0.5, 0.5, 0.5, 0.5), HEALTH)
    assert found["percent"] == 50.0 and not found["missing"]
    assert found["cases"]["decode 64k"] == {"us": 200.0, "roofline_us": pytest.approx(100.0)}
    assert score(rows_of(1, 1, 1, 0.8, 1, 0.1), HEALTH)["percent"] == pytest.approx(65.642)
    half = {**HEALTH, "gemm_bf16_tflops": 250.0}  # what the card itself can do counts
    assert score(rows_of(0.25, 0.25, 0.25, 0.25, 0.25, 0.5), half)["percent"] == 50.0


def test_blocks_that_neighbours_share_have_no_part_in_the_score():
    fast = [{**row, "sharing": "shared"} for row in rows_of(*[1.0] * 6)[:4]]
    assert score([*fast, *rows_of(*[0.5] * 6)], HEALTH)["percent"] == 50.0
    assert score(fast, HEALTH)["missing"] == dict.fromkeys(CASES, "not timed")


def test_an_unstable_row_counts_and_is_named(tmp_path):
    rows = rows_of(*[0.5] * 6)
    shaky = rows[3] | {"status": "UNSTABLE", "why": ["drift"]}
    found = score([*rows[:3], shaky, *rows[4:]], HEALTH)
    assert found["percent"] == 50.0 and found["unstable"] == {"prefill 32k backward": "drift"}
    better = score([shaky | {"median_us": 1.0}, *rows], HEALTH)
    assert better["percent"] == 50.0 and not better["unstable"]  # of two rows the VALID one


@pytest.mark.parametrize("case", CASES)
def test_there_is_no_score_without_a_row_of_each_case_and_the_cards_own_rates(case):
    lacks = "its row lacks time, bytes or FLOPs"
    for changes, why in (
        ({"status": "INVALID", "why": 7}, "INVALID: 7"), ({"S": 4096}, "not timed"),
        ({"n_sel": 8}, "not timed"), ({"B": 2}, "not timed"), ({"bytes": None}, lacks),
        ({"median_us": 1e300}, lacks),
    ):  # fmt: skip
        rows = [r | changes if r["case"] == case else r for r in rows_of(*[0.5] * 6)]
        found = score(rows, HEALTH)
        assert found["percent"] is None and found["missing"] == {case: why}
    for health in (None, {}, {"copy_gbs": 4000.0}, {**HEALTH, "copy_gbs": 0}):
        found = score(rows_of(*[0.5] * 6), health)
        assert found["percent"] is None and len(found["missing"]) == len(CASES)


def clean(folder, name, rows=(), **git):
    """A bundle of the sample, packed as a run leaves it."""

    def change(events):
        events[0].update(run_id=f"{name}-run", started=f"2026-11-{name}T10:00:00Z")
        events[0]["git"].update(short=f"c0ffee{name}", **git)

    one = made(folder / name, rows, change=change)
    bundle.write_sums(one)
    return one


def test_verify_computes_the_score_anew(tmp_path):
    folder = clean(tmp_path, "19")
    data = json.loads((folder / "bundle.json").read_text())
    assert data["score"]["percent"] == 32.4096 and not list(verify.check_journal(data, folder))
    (told,) = verify.check_journal({**data, "score": {**data["score"], "percent": 99.0}}, folder)
    assert told == "score in bundle.json is not what events.jsonl gives"


# ---- trend ---------------------------------------------------------------------------------------


def told_by(verb, *args, capsys, code=0):
    assert main([verb, *map(str, args)]) == code
    return capsys.readouterr()


def test_the_trend_is_a_line_for_each_run_by_date_whatever_holds_it(tmp_path, capsys):
    for name in ("21", "19", "20"):
        clean(tmp_path, name, dirty=name == "20")
    bundle.pack(tmp_path / "21")  # beside its folder: one run, one line
    out = told_by("trend", tmp_path, capsys=capsys).out.splitlines()
    assert out[0] == "scope gpu, GPU NVIDIA H200, driver major 580, power limit 700.0"
    assert out[1].split()[:4] == ["date", "commit", "verdict", "score"]
    cells = [" ".join(line.split()) for line in out[2:5]]
    assert [c.split(" PASS ")[0] for c in cells] == [
        "2026-11-19T10:00 c0ffee19",
        "2026-11-20T10:00 c0ffee20 DIRTY",
        "2026-11-21T10:00 c0ffee21",
    ]
    times = "32.4 % 1.54 ms 8.05 ms 2.96 ms 16.5 ms 14.3 us 18.4 us"
    assert all(c.endswith(times) for c in cells) and out[5:] == [""]


def test_runs_of_two_cards_stand_apart_and_a_missing_case_is_named(tmp_path, capsys):
    def other_card(events):
        events[0]["device"]["name"] = "NVIDIA H100"
        events[0]["run_id"] = "other"

    a = clean(tmp_path, "19")
    b = made(tmp_path / "b", drop=("decode/S=8192/graph",), change=other_card)
    out = told_by("trend", b, a, capsys=capsys).out
    first, second = out.strip().split("\n\n")
    assert "H200" in first and "H100" in second and "H200" not in second
    assert [len(part.splitlines()) for part in (first, second)] == [3, 3]
    assert second.endswith("decode 8k: not timed") and " 32.4 %" not in second


def test_a_bundle_that_does_not_verify_is_left_out_and_named(tmp_path, capsys):
    good, bad = clean(tmp_path, "19"), clean(tmp_path, "20")
    (bad / "env.txt").write_text("other\n")
    (tmp_path / "no.tgz").write_text("no archive")
    said = told_by("trend", tmp_path, capsys=capsys, code=5)
    assert "c0ffee19" in said.out and "c0ffee20" not in said.out
    assert f"left out: {bad} does not verify: env.txt was changed after the run" in said.err
    assert "no.tgz cannot be unpacked" in said.err
    shutil.rmtree(good)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        assert str(path) in told_by("trend", path, capsys=capsys, code=2).err
    with pytest.raises(SystemExit):
        trend.main([])


# ---- export --------------------------------------------------------------------------------------


def assert_is_trace(one):
    """The rules of flashinfer-bench's Trace, Workload, Evaluation and Performance."""
    assert type(one["definition"]) is type(one["solution"]) is str
    work, found = one["workload"], one["evaluation"]
    assert set(work) == {"uuid", "axes", "inputs"} and len(work["uuid"]) == 36
    assert all(type(n) is int and n >= 0 for n in work["axes"].values()) and work["axes"]
    assert all(spec == {"type": "random"} for spec in work["inputs"].values())
    assert found["environment"]["hardware"] and found["timestamp"]
    assert all(isinstance(v, str) for v in found["environment"]["libs"].values())
    of_status = {"PASSED": [1, 1], "INCORRECT_NUMERICAL": [1, 0], "RUNTIME_ERROR": [0, 0]}
    assert [n in found for n in ("correctness", "performance")] == of_status[found["status"]]
    assert all(float(v) >= 0 or v == "NaN" for v in found.get("correctness", {}).values())
    assert all(v >= 0 for v in found.get("performance", {}).values())


def test_valid_and_failed_rows_are_exported_as_traces(tmp_path, capsys):
    lost = [
        bench_row("x/wrong", 5.0, 1.1, status="FAILED", why=["over"], N=4, parity={"max_abs": 0.5}),
        bench_row("x/raised", 5.0, 1.1, status="FAILED", why=["boom"], N=5, parity=None),
    ]
    folder, out = made(tmp_path / "a", lost), tmp_path / "out.jsonl"
    data = rebuild(folder)[0]
    traces = {r["case"]: export.trace(r, data) for r in data["bench"]}
    for one in traces.values():
        assert_is_trace(one)
    assert traces["x/wrong"]["evaluation"]["status"] == "INCORRECT_NUMERICAL"
    assert traces["x/raised"]["evaluation"]["status"] == "RUNTIME_ERROR"
    assert "boom" in traces["x/raised"]["evaluation"]["log"]
    assert told_by("export", folder, "--trace", out, capsys=capsys, code=5).err and not out.exists()


def test_the_exported_file_holds_what_the_rows_do(tmp_path, capsys):
    shaky = bench_row("x/shaky", 5.0, 1.1, status="UNSTABLE", why=["drift"])
    no_kernel = bench_row("nccl/all_reduce", 5.0, None, bench="nccl")
    shared = {**real_rows()[1], "case": "shared", "sharing": "shared"}
    folder, out = clean(tmp_path, "19", [shaky, no_kernel, shared]), tmp_path / "deep/out.jsonl"
    said = told_by("export", folder, "--trace", out, capsys=capsys).err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for one in lines:
        assert_is_trace(one)
    count = len(rebuild(folder)[0]["bench"]) - 2
    assert len(lines) == count and said == f"{count} traces in {out}; rows left out: 2\n"
    (one,) = [t for t in lines if t["evaluation"]["log"].startswith("shared:")]
    assert one["definition"] == "nsa_prefill_full_fwd_shared_bf16"
    row = real_rows()[1]
    (one,) = [t for t in lines if row["case"] in t["evaluation"]["log"]]
    assert one["definition"] == "nsa_prefill_full_fwd_bf16" and one["solution"] == "triton_c0ffee19"
    assert one["workload"]["axes"] == {n: row[n] for n in one["workload"]["axes"]}
    assert {"S": 32768, "HQ": 64}.items() <= one["workload"]["axes"].items()
    found = one["evaluation"]
    assert found["performance"] == {
        "latency_ms": 8.05,
        "reference_latency_ms": pytest.approx(8.05 * 3.51),
        "speedup_factor": pytest.approx(3.51),
    }
    assert found["correctness"] == {"max_relative_error": "NaN", "max_absolute_error": 3e-3}
    assert found["environment"] == {
        "hardware": "NVIDIA_H200",
        "libs": {"torch": "2.11.0+cu130", "triton": "3.6.0", "cuda": "13.0", "driver": "580.95"},
    }
    problems = {(t["definition"], json.dumps(t["workload"]["axes"])) for t in lines}
    assert len({t["workload"]["uuid"] for t in lines}) == len(problems)


def test_export_says_what_it_cannot_do(tmp_path, capsys):
    said = told_by("export", tmp_path / "absent", "--trace", "x", capsys=capsys, code=2)
    assert "neither a folder" in said.err
    folder = clean(tmp_path, "19")
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.jsonl"
    assert "wants a file" in told_by("export", folder, "--trace", out, capsys=capsys, code=2).err
    with pytest.raises(SystemExit):
        export.main([str(folder)])
