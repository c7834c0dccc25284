"""Hand-made bundles for the tests of the runner and of the report: `write_sample(folder, name)`.

all_pass   a standard run on a GPU where everything was right
gpu_fail   one wrong backward case, one invalid bench, FA-2 skipped, capped power, dirty tree
cpu        the CPU profile
crash      the machine died in the middle of triton_bwd: half a last line in the journal, no run_end
incomplete a run where all that ran was right, and whose budget cut the rest
no_gpu     NVIDIA hardware whose driver does not answer: doctor blocks, every GPU stage NOT_RUN
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import stats
from scripts.oneshot.record.journal import dumps, read_events, write_json
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.record.rows import parse_row, test_counts

SAMPLES = ("all_pass", "gpu_fail", "cpu", "crash", "incomplete", "no_gpu")

_PLAN = (
    ("env", "Environment", "box"), ("routing", "Routing: flags and ladder", "box"),
    ("sanity", "GPU sanity", "parity"), ("triton_fwd", "Triton selection forward", "parity"),
    ("triton_bwd", "Triton selection backward", "parity"), ("health", "Box health", "box"),
    ("sel_bench", "Selection bench", "bench"), ("decode_bench", "Decode bench", "bench"),
    ("prefill_bench", "Prefill bench", "bench"), ("fa2_probe", "FlashAttention-2 probe", "box"),
    ("train_showcase", "Training showcase", "train"),
)  # fmt: skip


_PARITY = """{
"kind": "parity", "case": "", "op": "sel_fwd", "dtype": "bf16", "path_requested": "triton",
"path_taken": "triton_dense_group", "launches": {"_sel_attn_fwd_dense_group_kernel": 1},
"fallback_reason": null, "mae": 2.1e-4, "max_abs": 3.9e-3, "ref_same_dtype_max_abs": 3.1e-3,
"worst_row": 2.4e-3, "limit_mae": 1e-3, "limit_max_abs": 6.2e-3, "seed": 0, "status": "PASS",
"why": []
}"""


def parity_row(case: str, **changes: Any) -> dict[str, Any]:
    """A parity row that passes, with `changes`."""
    return {**json.loads(_PARITY), "case": case, "margin": 3.9e-3 / 6.2e-3, **changes}


_BENCH = """{
"kind": "bench", "bench": "sel", "candidate": "triton", "baseline": "sdpa", "cache": "cold",
"timer": "cuda_event", "n": 60, "pairs": 30, "order": "ABBA", "launch_bound": false,
"bytes": 8388608, "flops": 1e9, "peak_frac": 0.71, "sm_mhz": [2520, 2565],
"reasons": ["SwPowerCap"], "stop": "noise", "status": "VALID", "why": [],
"path_requested": "triton", "path_taken": "triton_varlen",
"parity": {"mae": 2e-4, "max_abs": 3e-3, "status": "PASS"}
}"""


def bench_row(case: str, median_us: float, speedup: float | None, **changes: Any) -> dict[str, Any]:
    """A valid bench row, with `changes`."""
    parts = {"p20": 0.99, "p80": 1.01, "p95": 1.03, "min": 0.98, "median": 1.0}
    times = {f"{name}_us": median_us * part for name, part in parts.items()}
    times |= {"ci95_us": [median_us * 0.995, median_us * 1.005], "wall_us": median_us + 6}
    rates = {"gbs": 8_388_608 / median_us / 1e3}
    rates["tflops"] = changes.get("flops", 1e9) / median_us / 1e6
    base = {
        "base_median_us": median_us * speedup if speedup else None, "speedup": speedup,
        "speedup_ci95": [speedup * 0.98, speedup * 1.02] if speedup else None,
    }  # fmt: skip
    return {**json.loads(_BENCH), **times, "case": case, **base, **rates, **changes}


def test_row(nodeid: str, outcome: str = "passed", reason: str | None = None) -> dict[str, Any]:
    row = {"kind": "test", "nodeid": nodeid, "outcome": outcome}
    return {**row, "duration_s": 0.4, "reason": reason}


test_row.__test__ = False


class _Writer:
    """Collects events with a fixed clock, so that a golden report made of them stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events, self.seconds = folder, [], 0.0

    def add(self, ev: str, step_s: float = 0.2, **fields: Any) -> None:
        self.seconds = round(self.seconds + step_s, 3)
        minutes, seconds = divmod(self.seconds, 60)
        stamp = f"2026-11-21T10:{int(minutes):02d}:{seconds:06.3f}Z"
        seq = len(self.events) + 1
        self.events.append({"seq": seq, "t": stamp, "m": self.seconds, "ev": ev, **fields})

    def log(self, stage: str, text: str) -> str:
        path = self.folder / "logs" / f"{stage}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return f"logs/{stage}.log"

    def stage(
        self, stage: str, rows: Sequence[dict] = (), *, status: str = "PASS", wall_s: float = 9.5,
        log: str = "done\n", **result: Any,
    ) -> None:  # fmt: skip
        path, start = self.log(stage, log), round(self.seconds + 0.2, 3)
        self.add("stage_start", stage=stage, attempt=1, log=path)
        checked = [parse_row(dumps(row)) for row in rows]
        for row in checked:
            self.add("row", 0.01, stage=stage, row=row)
        known = {**_planned(stage)[0], "status": status, "wall_s": wall_s, "log": path,
                 "start_s": start, "rc": {"PASS": 0, "FAIL": 1, "SKIPPED": 3}.get(status),
                 "env": {"NSA_SEL_TRITON_MIN_L": "1"} if stage.startswith("triton") else {},
                 "counts": test_counts(checked)}  # fmt: skip
        self.add("stage_end", wall_s, stage=stage, result={**known, **result})


_FACTS = """{
"run_id": "20261121T100000Z-7f3a", "profile": "standard", "scope": "gpu",
"argv": ["--profile", "standard"], "started": "2026-11-21T10:00:00.000Z",
"git": {"commit": "8ac3f21000000000000000000000000000000000", "short": "8ac3f21",
  "branch": "main", "dirty": false, "diff_sha256": null, "diffstat": null, "untracked": 0,
  "remote": "example.org/o/nsa", "source": "git"},
"device": {"name": "NVIDIA H200", "sm": "9.0", "mem_mib": 143771, "driver": "580.95",
  "power_limit_w": 700.0, "power_default_w": 700.0, "pcie": "gen5 x16", "ecc": "on",
  "mig": false, "shared": false, "l2_mib": 50, "count": 1},
"env": {
  "python": {"version": "3.11.9", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0"},
  "system": {"os": "Ubuntu 24.04", "cpu": "x86 16 cores"},
  "packages": {"numpy": "2.3.1", "flash-attn": "not installed"},
  "variables": {"NSA_USE_TRITON_SEL": "1"},
  "nvidia_smi": {"text": "NVIDIA-SMI 580.95  Driver Version: 580.95\\n"}},
"doctor": [
  {"name": "driver", "level": "OK", "text": "driver 580.95, CUDA 13.0", "fix": null},
  {"name": "disk", "level": "OK", "text": "212 GiB free", "fix": null}]
}"""
_OF_THE_FAILED = """{
"profile": "quick", "argv": ["--profile", "quick"], "price_per_hour": 0.4,
"git": {"commit": "c01d9ee000000000000000000000000000000000", "short": "c01d9ee",
  "branch": "fix", "dirty": true, "diffstat": "2 files changed, 9 insertions(+)",
  "diff_sha256": "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd",
  "untracked": 1, "remote": null, "source": "git"},
"device": {"name": "NVIDIA GeForce RTX 4090", "sm": "8.9", "mem_mib": 24564, "driver": "570.86",
  "power_limit_w": 300.0, "power_default_w": 450.0, "pcie": "gen4 x4 (max x16)", "ecc": "n/a",
  "mig": false, "shared": true, "l2_mib": 72, "count": 1},
"doctor": [{"name": "power", "level": "WARN", "text": "power limit 300 W of 450 W",
  "fix": "times are those of a capped card; ask the host for the full limit"}]
}"""


def _planned(*ids: str) -> list[dict[str, Any]]:
    return [
        {"id": id, "title": title, "group": group, "timeout_s": 120.0,
         "argv": ["{python}", "-m", f"stage_{id}"], "required": id != "fa2_probe"}
        for id, title, group in _PLAN if not ids or id in ids
    ]  # fmt: skip


def _start(w: _Writer, **changes: Any) -> None:
    known = {"env_fingerprint": "ab" * 32, "plan": _planned()}
    w.add("run_start", 0.0, **{**json.loads(_FACTS), **known, **changes})


def _end(w: _Writer, ended_by: str = "normal") -> None:
    w.add("run_end", ended_by=ended_by, complete=True)
    w.add("redaction", summary={"rules_version": 1, "gate": "clean", "replacements": 0, "kept": []})


def _metric(name: str, value: object, unit: str | None) -> dict[str, Any]:
    return {"kind": "metric", "name": name, "value": value, "unit": unit}


def _parity_cases(op: str, n: int) -> tuple[dict, ...]:
    rows: list[dict] = []
    for i in range(n):
        length = 64 << (i % 4)
        rows.append(test_row(f"nsa/tests/test_{op}.py::test_case[L{length}-{i}]"))
        rows.append(parity_row(f"{op}/dense/L={length}/D=64/bf16/{i}", op=op, seed=i))
    return tuple(rows)


def _sel_rows() -> tuple[dict, ...]:
    like = dict(mode="route", N=256, H=8, D=64, Dv=64, nspans=8, streams=1)
    return tuple(
        bench_row(f"sel/route/L={L}/{dist}", 6.0 + L / 20, speedup, L=L, dist=dist, **like,
                  wall_speedup_ci95=[9.0 * speedup, 9.5 * speedup])
        for dist in ("few", "many", "mixed")
        for L, speedup in ((128, 1.1), (512, 1.31), (1024, 1.62))
    )  # fmt: skip


_RECOMMEND = {
    "kind": "recommend", "sel_triton_min_L": 512, "blocking_case": None,
    "confidence": "lower bound of the speedup >= 1.2 at L >= 512 in few, many, mixed",
}  # fmt: skip


_HEALTH = json.loads("""{
"kind": "health", "copy_gbs": 4010.0, "copy_frac": 0.83, "gemm_bf16_tflops": 730.0,
"gemm_frac": 0.74, "aa_noise_floor": 0.012, "throttled": false, "copy_nominal_gbs": 4814.3,
"gemm_nominal_tflops": 989.0, "memory_used_by_others_mib": 0, "launch_us": 2.4, "h2d_gbs": 54.0,
"status": "OK", "why": []
}""")


def _decode_rows() -> tuple[dict, ...]:
    like = dict(bench="decode", dim=256, ms_total=0.2, ms_cmp=0.05, ms_sel=0.08, ms_win=0.06)
    return tuple(
        bench_row(f"decode/S={s}", 180.0 + s / 40, None, S=s, reads_actual=s // 4,
                  reads_expected=s // 4, **like)
        for s in (512, 1024, 2048, 4096)
    )  # fmt: skip


_PAPER = dict(l=32, d=16, l_sel=64, n_sel=16, w=512, dtype="bf16", B=1)


def real_rows() -> tuple[dict, ...]:
    """All of NSA beside dense attention at the paper's sizes: prefill, and decode steps."""
    shape = dict(_PAPER, bench="prefill", op="full", HQ=64, G=4, D=128, Dv=128)
    rows = [
        bench_row(f"prefill/full/{way}/S={S}", ms * 1e3, ratio, S=S, direction=way, flops=flops,
                  baseline="dense sdpa_cudnn gqa", compared=f"18 of {S} queries", **shape)
        for way, S, ms, ratio, flops in (
            ("fwd", 8192, 1.54, 1.13, 485969575936), ("fwd", 32768, 8.05, 3.51, 3242004791296),
            ("bwd", 8192, 2.96, 1.7, 1129506324480), ("bwd", 32768, 16.5, 4.92, 6732551208960),
        )
    ]  # fmt: skip
    win = dict(bench="prefill", op="win", direction="fwd", S=8192, baseline=None)
    rows.append(bench_row("prefill/win/fwd/S=8192", 237.0, None, **win))
    shape = dict(_PAPER, dim=2560, heads=64, groups=4, dk=128, dv=128)
    for S, us, ratio in ((8192, 14.3, 1.25), (65536, 18.4, 2.72)):
        for bench, more in (("decode", ""), ("decode_graph", "/graph")):
            named = dict(bench=bench, S=S, baseline="dense sdpa cudnn gqa")
            rows.append(bench_row(f"decode/S={S}{more}", us, ratio, **named, **shape))
    return tuple(rows)


def _without_kernels(case: str, path: str) -> dict[str, Any]:
    return parity_row(case, path_requested=path, path_taken=path, launches={})


_TRAIN = (_metric("loss_first", 4.17, "nats"), _metric("loss_last", 2.31, "nats"),
          _metric("steps_per_s", 41.0, "1/s"))  # fmt: skip
_FLAGS = _metric("flags", 24, "")

_TRACE = """test_sel_bwd.py::test_case[varlen-L256] FAILED
Traceback (most recent call last):
  File "nsa/tests/helpers.py", line 88, in assert_matches
AssertionError: dK max-abs 0.31 is over 2x the same-dtype error 0.004
"""


def _all_pass(w: _Writer) -> None:
    _start(w)
    w.stage("env", wall_s=1.2)
    w.stage("routing", (_FLAGS,), wall_s=2.0)
    w.stage("sanity", (_without_kernels("sanity/matmul", "torch"),))
    w.stage("triton_fwd", _parity_cases("sel_fwd", 12), wall_s=38.2, first_call_ms=5210.0)
    w.stage("triton_bwd", _parity_cases("sel_bwd", 6), wall_s=41.0, peak_vram_mib=1810.0)
    w.stage("health", (_HEALTH,), wall_s=14.0)
    w.stage("sel_bench", (*_sel_rows(), _RECOMMEND), wall_s=52.0)
    w.stage("decode_bench", _decode_rows(), wall_s=20.0)
    w.stage("prefill_bench", real_rows(), wall_s=70.0)
    w.stage("fa2_probe", (_without_kernels("fa2/probe", "fa2"),))
    w.stage("train_showcase", _TRAIN, wall_s=30.0)
    _end(w)


def _incomplete(w: _Writer) -> None:
    _start(w, argv=["--profile", "standard", "--budget", "3m"])
    w.stage("env", wall_s=1.2)
    w.stage("triton_fwd", _parity_cases("sel_fwd", 12), wall_s=38.2)
    w.stage("health", (_HEALTH,), wall_s=14.0)
    w.stage("prefill_bench", real_rows(), wall_s=70.0)
    cut = dict(kind="BUDGET", signal="SIGABRT", reason="cut by the budget of the run after 9 s")
    w.stage("triton_bwd", _parity_cases("sel_bwd", 2), status="TIMEOUT", wall_s=9.0,
            log="test_sel_bwd.py ...\n", **cut)  # fmt: skip
    for stage in ("routing", "sanity", "sel_bench", "decode_bench", "fa2_probe", "train_showcase"):
        w.stage(stage, status="NOT_RUN", reason="budget: 3 s left", kind="BUDGET", wall_s=0.0)
    _end(w, "budget")


# What a report says of single rows: both ends of what neighbours share, part of a ceiling, a host
# that is slower than the card, problems of several sizes, FA-2 with Triton off and on.
def _odd_prefill() -> tuple[dict, ...]:
    like, none = real_rows()[1], dict.fromkeys(("base_median_us", "speedup", "speedup_ci95"))
    return (
        real_rows()[0],
        {**like, "distinct_of_4": 46.6},
        {**like, "case": f"{like['case']}/shared", "sharing": "shared", "distinct_of_4": 22.32,
         "baseline": None, **none},
    )  # fmt: skip


def _odd_decode() -> tuple[dict, ...]:
    small = dict(_PAPER, bench="decode", S=4096, dim=2560, heads=64, groups=4, dk=192, dv=128)
    serving = {**small, "dk": 128}
    branch = {**small, "bench": "decode_branch", "branch": "cmp"}
    return (
        bench_row("decode/S=4096", 90.0, 1.5, base_peak_frac=0.423, **small),
        bench_row("decode/S=4096/cmp", 40.0, None, **branch),
        bench_row("decode/B=16/S=4096", 200.0, 1.5, **{**serving, "B": 16}),
        bench_row("decode/S=8192/module", 200.0, 1.5, **{**serving, "bench": "decode_module"}),
        bench_row("decode/S=512", 13.0, 0.7, bench="decode", S=512, dim=256),
    )


def _fa2_rows() -> tuple[dict, ...]:
    like = dict(bench="fa2", branch="win", key_len=64, path_requested="fa2", path_taken="fa2_torch")
    slow = dict(launch_bound=True, wall_us=90.0, base_wall_us=45.0, wall_speedup=0.5, batches=9,
                gap_batches=1)  # fmt: skip
    advice = {"kind": "recommend", "sel_triton_min_L": None, "blocking_case": "L=128/few",
              "confidence": "too slow", "fa2_min_len_win": 64, "fa2_win_why": "all 1 cells",
              "fa2_min_len_cmp": None, "fa2_cmp_why": "cmp keys=3: lower bound 0.9x",
              "fa2_min_len_win_triton": None, "fa2_win_triton_why": "0.4x < 1.2x",
              "fa2_min_len_cmp_triton": None}  # fmt: skip
    case = "fa2/win/S=64/bf16/dense"
    return (bench_row(f"{case}/sdpa", 10.0, 4.8, **like, **slow),
            bench_row(f"{case}/triton", 10.0, 0.4, baseline="triton", **like), advice)  # fmt: skip


def _gpu_fail(w: _Writer) -> None:
    _start(w, **json.loads(_OF_THE_FAILED))
    w.stage("env", wall_s=1.0)
    w.stage("routing", (_FLAGS,))
    calls = [{"call": "prefill, 8192 tokens", "kernels": ["_turn_kernel", "_combine_kernel x2"],
              "passed_over": {"_fast_kernel": "heads must be 64 wide"}}]  # fmt: skip
    flags = [{"name": "NSA_USE_FA2", "value": "0", "source": "default"}]
    write_json(w.folder / "routing.json", {"flags": flags, "calls": calls})
    w.stage("sanity", (_without_kernels("sanity/matmul", "torch"),),
            resumed_from="20261120T100000Z-1111")  # fmt: skip
    w.stage("triton_fwd", _parity_cases("sel_fwd", 6), wall_s=31.0)
    bad = parity_row(
        "sel_bwd/varlen/L=256/many", op="sel_bwd", mae=0.012, max_abs=0.31, limit_max_abs=0.008,
        margin=0.31 / 0.008, status="FAIL", path_taken="triton_varlen",
        why=["max_abs 0.31 over 0.008"],
    )  # fmt: skip
    node = "nsa/tests/test_triton_sel_backward_gpu.py::test_varlen[L256]"
    skipped = [("test_sel_cuda_gpu.py::test_ext", "no CUDA extension is built"),
               ("test_big.py::a", "too large"), ("test_big.py::b", "too large")]  # fmt: skip
    tests = [test_row(f"nsa/tests/{name}", "skipped", why) for name, why in skipped]
    rows = (*_parity_cases("sel_bwd", 3), bad, test_row(node, "failed", "dK max-abs 0.31"), *tests)
    why = "1 of 4 parity cases wrong, first sel_bwd/varlen/L=256/many: max_abs 0.31"
    w.stage("triton_bwd", rows, status="FAIL", kind="PARITY", log=_TRACE, reason=why)
    more = dict(aa_worst=0.0019, aa_trials=18, power_w=280.3, sm_mhz=[1530, 1980], odd_key=4,
                torch="2.11.0", commit="abc")  # fmt: skip
    slow = dict(copy_frac=0.58, status="WARN", why=["copy reaches 58 % of the bus peak"])
    w.stage("health", ({**_HEALTH, **more, **slow},))
    unproven = bench_row("sel/varlen/L=256/many", 19.0, 1.4, L=256, dist="many", mode="varlen",
                         parity={"mae": None, "max_abs": None, "status": "FAIL"})  # fmt: skip
    unstable = bench_row("sel/dense/L=64/few", 6.0, 1.02, status="UNSTABLE", mode="dense",
                         why=["IQR 7 % of the median"],
                         parity={"mae": 2e-4, "max_abs": 3e-3, "limit_max_abs": 4.5e-3,
                                 "status": "PASS"})  # fmt: skip
    rows = [{**r, "precision": "fp32 matmul highest, TF32 off"} for r in _sel_rows()]
    rows += [unproven, unstable, *_fa2_rows()]
    first = "sel/varlen/L=256/many: no passed parity check of this case"
    why = f"1 of 11 bench cases invalid, first {first}"
    w.stage("sel_bench", rows, status="FAIL", kind="INVALID", reason=why)
    hung = dict(status="TIMEOUT", wall_s=120.0, signal="SIGABRT", reason="over its limit of 120 s")
    w.stage("decode_bench", _odd_decode(), log="warm up\n" * 30, **hung)
    missing = "flash-attn is not installed: no wheel for torch 2.11"
    rows = [{"kind": "note", "level": "info", "text": missing}]
    rows += [_metric("fa2_source", "torch", None), _metric("fa2_version", "2.7.4", None)]
    w.stage("fa2_probe", rows, status="SKIPPED", reason=missing)
    w.stage("prefill_bench", _odd_prefill(), wall_s=20.0)
    w.stage("train_showcase", (*_TRAIN, _metric("parameters", 1000, "1")))
    _end(w)


def _cpu(w: _Writer) -> None:
    _start(w, profile="cpu", scope="cpu", argv=[],
           device={"name": None, "reason": "no NVIDIA hardware"},
           plan=_planned("env", "triton_fwd", "decode_bench", "train_showcase"))  # fmt: skip
    w.stage("env", wall_s=0.9)
    w.stage("triton_fwd", _parity_cases("sel_fwd", 4), wall_s=60.0)
    w.stage("decode_bench", _decode_rows(), wall_s=12.0)
    w.stage("train_showcase", _TRAIN, wall_s=15.0)
    _end(w)


def _crash(w: _Writer) -> None:
    _start(w)
    w.stage("env", wall_s=1.0)
    w.stage("sanity", (_without_kernels("sanity/matmul", "torch"),))
    w.stage("triton_fwd", _parity_cases("sel_fwd", 5), wall_s=31.0)
    w.add("stage_start", stage="triton_bwd", attempt=1, log=w.log("triton_bwd", "collecting\n"))
    for row in _parity_cases("sel_bwd", 2):
        w.add("row", stage="triton_bwd", row=row)


def _no_gpu(w: _Writer) -> None:
    cause = "nvidia-smi did not answer within 10 s"
    fix = "restart the box; if it stays, take another one"
    blocked = {"name": "driver", "level": "BLOCK", "text": cause, "fix": fix}
    _start(w, device={"name": None, "reason": cause}, doctor=[blocked])
    w.stage("env", wall_s=11.0)
    for stage, _title, _group in _PLAN[1:]:
        w.stage(stage, status="NOT_RUN", reason=f"doctor: {cause}", wall_s=0.0)
    _end(w)


def write_sample(folder: Path, name: str) -> dict[str, Any]:
    """Write the sample bundle `name` into `folder`; returns the object of its bundle.json."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder)
    globals()[f"_{name}"](writer)
    lines = "".join(dumps(event) + "\n" for event in writer.events)
    if name == "crash":
        lines += lines.splitlines()[-1][:40]
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    record = RunRecord.replay(writer.events)
    bundle = write_derived(folder)
    write_json(folder / "env.json", record.env)
    (folder / "env.txt").write_text("torch 2.11.0+cu130\n", encoding="utf-8")
    return bundle


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    """Let `change` edit the list of events in the journal of `folder`."""
    events = read_events(folder / "events.jsonl")
    change(events)
    text = "".join(dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    return folder


def sending(stage: str, rows: Sequence[dict[str, Any]], *, alone: bool = False, drop=()):
    """A change for `edit`: `stage` sends `rows` as well, or these alone; no case in `drop` is."""

    def change(events: list[dict[str, Any]]) -> None:
        left = lambda e: (alone and e["stage"] == stage) or e["row"].get("case") in drop
        events[:] = [e for e in events if e["ev"] != "row" or not left(e)]
        end = lambda e: e["ev"] == "stage_end" and e["stage"] == stage
        at = next(i for i, e in enumerate(events) if end(e))
        events[at:at] = [{"ev": "row", "stage": stage, "row": row, "m": 99.0} for row in rows]

    return change


def raw_times(row: dict[str, Any]) -> dict[str, Any]:
    """Raw times that give this row's statistics, in an order that shows no drift."""
    n = row["n"]
    low, _ = stats.median_ci(range(n))
    known = {0: row.get("min_us") or row["p20_us"], n - 1: row["p95_us"]}
    for at, name in ((0.2, "p20_us"), (0.5, "median_us"), (0.8, "p80_us"), (0.95, "p95_us")):
        at *= n - 1
        known |= {math.floor(at): row[name], math.ceil(at): row[name]}
    known |= {low: row["ci95_us"][0], n - 1 - low: row["ci95_us"][1]}
    at = sorted(known)
    us = np.interp(range(n), at, [known[i] for i in at])
    us = [float(us[i * 37 % n]) for i in range(n)]
    ratio = row.get("speedup") or 1.0
    base = [ratio * x for x in us] if row.get("base_median_us") else []
    return {"us": us, "us_every": 1, "base_us": base, "base_us_every": 1}


def write_derived(folder: Path) -> dict[str, Any]:
    """bundle.json of the journal in `folder`, and of every timed row its raw times."""
    bundle = RunRecord.replay(read_events(folder / "events.jsonl")).to_bundle()
    write_json(folder / "bundle.json", bundle)
    timed = [r for r in bundle["bench"] if r["status"] in ("VALID", "UNSTABLE")]
    lines = [
        dumps({**{n: r.get(n) for n in ("bench", "case", "candidate", "cache")}, **raw_times(r)})
        for r in timed
    ]
    if timed:
        (folder / "bench").mkdir(exist_ok=True)
        (folder / "bench" / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
    return bundle
