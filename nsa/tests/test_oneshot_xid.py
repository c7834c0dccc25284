"""Xid errors and memory that is too small: what the driver reports decides over a stage."""

from __future__ import annotations

import sys
import time
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import bench_decode, bench_fa2, bench_prefill, bench_sel_triton
from bench.records import shrunk
from nsa.tests.oneshot_faults import FAKE_PYNVML
from scripts.oneshot.box import watch as watch_module
from scripts.oneshot.box.cards import Card
from scripts.oneshot.box.watch import Watch
from scripts.oneshot.box.xid import Xid, XidListener
from scripts.oneshot.record.journal import dumps
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import Stage, StageResult
from scripts.oneshot.record.rows import parse_row


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose events come from the list `events`: numbers, "ecc" or "lost"."""
    fake = types.ModuleType("pynvml")
    exec(FAKE_PYNVML, fake.__dict__)
    fake.events = []

    def wait(_events, _timeout_ms):
        if not fake.events:
            time.sleep(0.01)
            raise fake.NVMLError_Timeout
        event = fake.events.pop(0)
        if event == "lost":
            raise fake.NVMLError_GpuIsLost
        if event == "ecc":
            return fake.Data(eventType=fake.nvmlEventTypeDoubleBitEccError, eventData=0)
        return fake.Data(eventType=fake.nvmlEventTypeXidCriticalError, eventData=event)

    fake.nvmlEventSetWait_v2 = wait
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def heard(listener, n, limit_s=3.0):
    found, deadline = [], time.monotonic() + limit_s
    while len(found) < n and time.monotonic() < deadline:
        found += listener.take()
        time.sleep(0.01)
    return found


def test_events_come_in_order_and_end_with_a_lost_gpu_or_when_told(nvml):
    nvml.events += [13, 48, "ecc", 31, "lost", 94]
    listener = XidListener("GPU-1")
    listener.start()
    assert [x.number for x in heard(listener, 5)] == [13, 48, 48, 31, 79]
    listener.join(2.0)
    assert not listener.is_alive() and listener.problem is None and listener.take() == []
    nvml.events.clear()
    listener = XidListener(None)
    listener.start()
    assert listener.is_alive() and listener.take() == []
    listener.stop()
    assert not listener.is_alive()


@pytest.mark.parametrize(("missing", "says"), [
    *((name, "Not Supported") for name in
      ("nvmlEventSetCreate", "nvmlInit", "nvmlDeviceRegisterEvents")),
    ("types", "no Xid events"), ("pynvml", "pynvml"),
])  # fmt: skip
def test_a_box_without_events_is_no_fault(nvml, missing, says, monkeypatch):
    def fails(*_):
        raise nvml.NVMLError("Not Supported")

    if missing == "pynvml":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "types":
        nvml.nvmlDeviceGetSupportedEventTypes = lambda handle: 0
    else:
        setattr(nvml, missing, fails)
    listener = XidListener("GPU-1")
    listener.run()
    assert says in listener.problem and listener.take() == []


def test_a_report_says_once_that_nothing_can_be_heard(nvml):
    """No Xid in a report means that there was none only where someone listened."""
    nvml.nvmlDeviceGetSupportedEventTypes = lambda handle: 0
    said = []
    smi = [{"uuid": "GPU-1", "index": 0}]
    watch = Watch([], smi, lambda *_, **__: None, lambda *note: said.append(note), print)
    listener = XidListener("GPU-1")
    listener.run()
    watch._listeners = [(None, listener), (1, listener)]
    watch.hear("a")
    watch.hear("b")
    assert said == [
        (f"{card}Xid errors are not heard (this GPU reports no Xid events)", "info")
        for card in ("", "GPU 1: ")
    ]


def hearing(*heard):
    """A Watch whose listener of card `index` hands out each (index, number) of `heard` once."""
    watch = Watch([], "no card", lambda *_, **__: None, lambda *_: None, lambda *_: None)
    for index, number in heard:
        left = [Xid(number)]
        take = lambda left=left: [left.pop()] if left else []
        watch._listeners.append((index, SimpleNamespace(take=take, problem=None)))
    return watch


@pytest.mark.parametrize(("heard", "gpus", "was", "status", "kind"), [
    ([(None, 94), (None, 79)], (), Status.PASS, Status.INFRA, "GPU_LOST"),
    ([(None, 999)], (), Status.PASS, Status.INFRA, "XID"),  # what nobody knows is no good sign
    ([(None, 48)], (), Status.FAIL, Status.FAIL, "XID"),
    ([(None, 48)], (), Status.TIMEOUT, Status.TIMEOUT, "XID"),
    ([(1, 48)], (0,), Status.PASS, Status.PASS, None),
    ([(1, 48)], (0, 1), Status.PASS, Status.INFRA, "XID"),
    ([(0, 79), (1, 48)], (0,), Status.PASS, Status.INFRA, "GPU_LOST"),
])  # fmt: skip
def test_what_passed_beside_a_faulty_card_is_not_proven(heard, gpus, was, status, kind):
    reason = None if was is Status.PASS else "as it went"
    found = hearing(*heard).beside_faults(StageResult("a", was, reason, gpus=gpus))
    assert (found.status, found.kind) == (status, kind)
    if kind:
        number = 79 if kind == "GPU_LOST" else heard[0][1]
        assert f"Xid {number} (" in found.reason
        assert found.reason.endswith("as it went") == bool(reason)


def test_a_fault_between_two_stages_is_of_neither():
    watch = hearing((None, 48))
    watch.before_stage()
    assert watch.beside_faults(StageResult("a", Status.PASS)).status is Status.PASS


@pytest.mark.parametrize(("answer", "free", "words", "kind"), [
    ("ended with 15: GPU is lost", True, "does not answer", "GPU_LOST"),
    ("nvidia-smi did not answer within 10 s", True, "does not answer", "NO_GPU"),
    (None, False, "still held", "GPU_BUSY"),
])  # fmt: skip
def test_a_card_that_may_not_be_used_has_the_kind_of_its_cause(
    monkeypatch, answer, free, words, kind
):
    def query(index=None):
        if answer:
            raise watch_module.box.ProbeFailed(answer)

    monkeypatch.setattr(watch_module.box, "smi_query", query)
    ended = StageResult("a", Status.CRASH, "killed by SIGKILL")
    after = Stage("b", "b", ("{python}",), "tests", 1.0)
    for cards in ((), (0,)):
        several = [Card(0, "GPU-1"), Card(1, "GPU-2")] if cards else []
        watch = Watch(several, [], *[lambda *_, **__: None] * 3)
        watch.telemetry = SimpleNamespace(wait_for_memory=lambda _: free)
        watch.after_failure(replace(ended, gpus=cards))
        status, why, got = watch.why_not(replace(after, gpus=cards))
        assert (status, got) == (Status.NOT_RUN, kind) and words in why


# ---- half size -----------------------------------------------------------------------------------


def test_sizes_are_halved_and_said(capsys):
    assert shrunk("--S_list", [8192, 32768], 2, 64) == [4096, 16384]
    assert "--S_list is 4096,16384 here instead of 8192,32768" in capsys.readouterr().err
    assert shrunk("--S_list", [64, 100], 2, 64) == [64]  # never below one block, none twice
    assert shrunk("--N", [1], 2) == [1] and shrunk("--N", [7, 8], 1) == [7, 8]
    for bench, argv, name, got in (
        (bench_sel_triton, "--N 256 --L_list 64,128", "N", [128]),
        (bench_prefill, "--S_list 8192", "S_list", [4096]),
        (bench_fa2, "--S_list 512,2048", "S_list", [256, 1024]),
        (bench_decode, "--dim 64", "shrink", 2),
    ):
        assert getattr(bench.parse([*argv.split(), "--shrink", "2"]), name) == got
        with pytest.raises(SystemExit):
            bench.parse([*argv.split(), "--shrink", "0"])


def test_a_bench_without_a_case_that_fits_is_out_of_memory():
    stage = Stage("b", "b", ("{python}", "bench/bench_prefill.py"), "bench", 1.0)
    why = ["out of memory: CUDA out of memory. Tried to allocate 80 GiB"]
    row = parse_row(dumps({"kind": "bench", "case": "c", "status": "SKIPPED", "why": why}))
    said = judge(stage, 0, [row])
    assert (said.status, said.kind) == (Status.SKIPPED, "OOM_DEVICE")
    note = {"kind": "note", "text": f"decode bench: {why[0]}"}
    assert judge(stage, 3, [note]).kind == "OOM_DEVICE"
    assert judge(stage, 3, [{"kind": "note", "text": "no CUDA device"}]).kind is None
