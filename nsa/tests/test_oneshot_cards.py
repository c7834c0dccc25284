"""A report on several GPUs: what runs where, and a broken card is named and harms no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsa.tests import oneshot_faults as faults
from scripts.oneshot.box import cards, watch
from scripts.oneshot.box.env import ProbeFailed
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.run import stages

GPUS = [{"uuid": f"GPU-{i}{i}{i}{i}", "name": "Test GPU"} for i in range(4)]
LOST = {"problem": "nvidia-smi ended with 15: GPU is lost"}


# ---- which cards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text, visible, want", [
    ("all", None, [0, 1, 2, 3]), ("all", "2,3", [2, 3]), ("all", "GPU-3333,GPU-1111", [3, 1]),
    ("0,2", "3", [0, 2]), *((text, None, None) for text in "4 0,0 two 0,,1 MIG-1".split()),
    ("", None, None),
])  # fmt: skip
def test_cards_by_number(text, visible, want):
    """One that is not there is an error."""
    chosen = lambda: cards.select(text, GPUS, {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    if want:
        assert [card.index for card in chosen()] == want
    else:
        says = "--gpus must be all or numbers of nvidia-smi from 0 to 3"
        with pytest.raises(ValueError, match=says):
            chosen()


def test_a_lost_card_keeps_its_number():
    found = cards.select("all", [GPUS[0], LOST, GPUS[2], {"name": "[GPU is lost]"}], {})
    assert [bool(c.problem) for c in found] == [False, True, False, True]
    assert [c.index for c in cards.good(found)] == [0, 2]


# ---- the plan ------------------------------------------------------------------------------------


def planned(profile, count, lost=()):
    found = [cards.Card(i, f"GPU-{i}", "lost" if i in lost else None) for i in range(count)]
    plan = cards.expand(stages.plan(profile), found, profile)
    assert len({s.log_path for s in plan}) == len(plan) == len({s.id for s in plan})
    return {s.id: s for s in plan}


@pytest.mark.parametrize("profile", ["quick", "standard", "full", "cpu"])
def test_one_card_changes_nothing(profile):
    plan = stages.plan(profile)
    assert [*planned(profile, 1).values()] == cards.expand(plan, [], profile) == plan


def test_each_stage_sees_its_cards_alone():
    plan = planned("standard", 4)
    for name in cards.PER_CARD:
        for index in (1, 2, 3):
            own, of = plan[f"{name}_gpu{index}"], {"CUDA_VISIBLE_DEVICES": str(index)}
            assert dict(own.env) == dict(plan[name].env) | of and own.gpus == (index,)
            assert own.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and own.proof == plan[name].proof
    assert plan["health_gpu2"].argv == (*plan["health"].argv, "--gpu", "2")
    assert all(s.env["CUDA_VISIBLE_DEVICES"] == "0" for s in plan.values()
               if s.gpu and len(s.gpus) == 1 and "_gpu" not in s.id)  # fmt: skip
    for name, want in (("nccl", "0,1,2,3"), ("context_parallel_2", "0,1"),
                       ("context_parallel_4", "0,1,2,3")):  # fmt: skip
        stage = plan[name]
        assert stage.env["CUDA_VISIBLE_DEVICES"] == want and stage.env["NCCL_NVLS_ENABLE"] == "0"
        assert stage.argv[3:5] == ("-n", str(len(want.split(",")))) and stage.shrinks
    ids = list(plan)
    assert ids.index("health") < ids.index("health_gpu1") < ids.index("sel_route")
    assert ids.index("prefill_bench") < ids.index("nccl") < ids.index("train_showcase")


@pytest.mark.parametrize("count", [2, 3, 6, 8])
def test_lengths_fit_every_number_of_cards(count):
    plan = planned("full", count)
    together = {f"context_parallel_{n}" for n in (2, count)}
    assert {n for n in plan if n.startswith("context")} == together
    argv = plan[f"context_parallel_{count}"].argv
    for length in argv[argv.index("--S_list") + 1].split(","):
        assert int(length) > 65536 - 32 * count and int(length) % (2 * count * 16) == 0


def test_a_lost_card_is_left_out_of_what_runs_together():
    plan = planned("standard", 4, lost=(0, 2))
    assert plan["sanity"].gpus == (1,) and plan["nccl"].gpus == (1, 3)
    assert "health_gpu0" in plan and "health_gpu2" in plan and "context_parallel_4" not in plan
    assert "nccl" not in planned("standard", 2, lost=(1,))


# ---- whole runs on a box with a fake driver ------------------------------------------------------


SMI = """#!/bin/sh
cd {folder}
if [ "$1" = -i ]; then
  if [ $2 -ge {count} ]; then echo 'No devices were found'; exit 6; fi
  cat $2 2>/dev/null && exit 0
  echo "GPU $2 is lost"; exit 15
fi
if [ $(ls | wc -l) -lt {count} ]; then echo 'GPU is lost'; exit 15; fi
cat *
"""


def go(tmp_path, count, bad="", broken=(), render=False):
    """A run on `count` fake cards, whose nvidia-smi fails if it is asked for all and one of them is
    broken. bad: "number:fault" of the one whose sanity stage goes wrong."""
    env = faults.fake_gpu(tmp_path) | {"CUDA_TEST_BAD": bad, "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "cards").mkdir()
    for i in {*range(count)} - {*broken}:
        line = faults.FAKE_SMI.replace("GPU-12345678", f"GPU-{i}2345678")
        (tmp_path / "cards" / str(i)).write_text(f"{line}\n")
    smi = SMI.format(folder=tmp_path / "cards", count=count)
    (tmp_path / "bin" / "nvidia-smi").write_text(smi)
    how = dict(env=env, fault={"cards": True}, render=render)
    return faults.go(tmp_path / "out", "", "--profile", "standard", "--gpus", "all", **how)


def ends(done):
    return {s["id"]: s["status"] for s in done.bundle["stages"] if s["id"] != "env"}


def test_a_wrong_card_is_named_and_the_others_stand(tmp_path):
    pytest.importorskip("jinja2")
    done = go(tmp_path, 3, bad="1:liar", render=True)
    want = dict.fromkeys(["sanity", "health", "health_gpu1", "health_gpu2", "sanity_gpu1",
                          "sanity_gpu2", "nccl", "later"], "PASS")  # fmt: skip
    assert ends(done) == {**want, "sanity_gpu1": "FAIL"}, done.console
    bundle = done.bundle
    assert done.code == 1 and "wrong: sanity_gpu1 (GPU 1)" in bundle["verdict"]["one_line"]
    assert done.stage("sanity_gpu1")["reason"].startswith("GPU 1: 1 of 2 tests failed")
    cases = {"sanity/0", "sanity/2", "nccl/0,1,2", "later/0"}
    assert {r["case"] for r in bundle["parity"]} == cases
    assert bundle["health"]["copy_gbs"] == 1000.0
    others = {k: v["copy_gbs"] for k, v in bundle["health"]["gpus"].items()}
    assert others == {"1": 1001.0, "2": 1002.0}
    text = (done.folder / "report.md").read_text()
    assert text.count("is not good") == 1 and "GPU 1 is not good: sanity_gpu1 FAIL" in text
    assert "| 0 | Test GPU | 1000 | - | 1/1 | good |" in text
    assert "| 2 | Test GPU | 1002 | - | 1/1 | good |" in text
    assert "- 2 of 3 GPUs are good\n" in text
    assert '<section id="gpus">' in (done.folder / "report.html").read_text()
    assert "CUDA_VISIBLE_DEVICES=1" in (done.folder / "repro" / "sanity_gpu1.sh").read_text()


@pytest.mark.parametrize(("count", "how", "other", "says"), [
    (3, dict(broken=(1,)), {"health_gpu1": "INFRA", "sanity_gpu1": "NOT_RUN"},
     {"health_gpu1": "GPU 1 is lost"}),
    # Its stage is killed and nvidia-smi no longer knows card 1.
    (2, dict(bad="1:killed"), {"sanity_gpu1": "CRASH", "nccl": "NOT_RUN"},
     {"nccl": "GPU 1: it does not answer after sanity_gpu1"}),
], ids=["lost", "dies in a stage"])  # fmt: skip
def test_a_card_that_does_not_answer_costs_its_own_stages_only(count, how, other, says, tmp_path):
    done = go(tmp_path, count, **how)
    names = ["sanity", "health", "nccl", "later"]
    names += [f"{n}_gpu{i}" for n in ("health", "sanity") for i in range(1, count)]
    assert ends(done) == dict.fromkeys(names, "PASS") | other, done.console
    assert done.code == 4
    for name, words in says.items():
        assert words in done.stage(name)["reason"]
    if "broken" in how:
        assert "broken: health_gpu1 (GPU 1)" in done.bundle["verdict"]["one_line"]
        assert done.stage("health_gpu1")["kind"] == "GPU_LOST"
        assert "nccl/0,2" in {r["case"] for r in done.bundle["parity"]}


def test_no_card_that_answers_is_no_gpu(monkeypatch):
    def fails(index):
        raise ProbeFailed("nvidia-smi ended with 9: cannot communicate with the driver")

    monkeypatch.setattr(cards.box, "smi_query", fails)
    with pytest.raises(ProbeFailed, match="no GPU answers"):
        cards.query_each()


# ---- what other cards report ---------------------------------------------------------------------


def test_health_rows_of_all_cards_are_kept_whatever_their_order():
    record = RunRecord()
    rows = [{"gpu": 2, "copy_gbs": 2.0}, {"copy_gbs": 0.5}, {"gpu": 1, "copy_gbs": 1.0}]
    for row in rows:
        record.apply({"ev": "row", "stage": "health", "row": {"kind": "health", **row}})
    assert record.health["copy_gbs"] == 0.5
    assert {k: v["copy_gbs"] for k, v in record.health["gpus"].items()} == {"2": 2.0, "1": 1.0}


@pytest.mark.parametrize("status", ["FAIL", "CRASH", "TIMEOUT", "INFRA", "NOT_RUN", "SKIPPED"])
def test_a_card_is_judged_by_its_own_stages_and_numbers(status):
    """One that was never measured has no numbers, and one that proved nothing is not good."""

    def stage(id, gpu, status="PASS"):
        reason = None if status == "PASS" else "why"
        return {"id": id, "status": status, "gpus": [gpu], "reason": reason}

    health = {"device": "X", "copy_gbs": 4321.0, "gemm_bf16_tflops": 765.0}
    ended = [stage("health", 0), stage("more_parity", 0), stage("health_gpu1", 1)]
    data = {"health": health, "stages": [*ended, stage("more_parity_gpu1", 1, status)]}
    proven = ("more_parity", "PASS"), ("more_parity", "PASS"), ("more_parity_gpu1", "FAIL")
    proof = [{"stage": stage, "status": status} for stage, status in proven]
    first, second = cards.section(data, proof)
    assert (first["verdict"], first["parity"], first["bandwidth"]) == (cards.GOOD, "2/2", "4321")
    assert (second["parity"], second["name"], second["bandwidth"]) == ("0/1", "-", "-")
    assert second["verdict"].replace("\\", "") == f"more_parity_gpu1 {status}: why"
    (said,) = cards.warnings(data)
    assert said.startswith("GPU 1 is not good")


def test_only_the_benched_card_gives_the_ceilings(tmp_path, monkeypatch):
    from bench import health

    rates = "copy_gbs copy_frac gemm_bf16_tflops gemm_frac gemm_sustained_tflops h2d_gbs launch_us"
    rates = [*rates.split(), "aa_noise_floor", "aa_worst", "aa_trials"]
    row = {"device": "X", "driver": "1", "why": [], "status": "OK", **dict.fromkeys(rates, 1.0)}
    sent = []
    monkeypatch.setenv("NSA_OUT_DIR", str(tmp_path))
    monkeypatch.setattr(health.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(health, "Gpu", lambda: None)
    monkeypatch.setattr(health, "measure", lambda gpu, in_use, deep: {**row, "deep": deep})
    monkeypatch.setattr(health, "emit", lambda kind, row: sent.append(row))
    assert health.main(["--gpu", "2"]) == 0 and not list(tmp_path.iterdir())
    assert health.main([]) == 0 and [r.get("gpu") for r in sent] == [2, None]
    assert [p.name for p in tmp_path.iterdir()] == ["health.json"]
    row["status"] = "FAIL"
    assert health.main(["--deep"]) == 1 and [r["deep"] for r in sent] == [False, False, True]


# ---- errors of NVLink ---------------------------------------------------------------------------

LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: Replay Errors: 0
\t Link 17: CRC Errors: 4
GPU 1: NVIDIA B300 SXM6 AC (UUID: GPU-b)
\t Link 0: Tx packets: 11
\t Link 0: Malformed packet Errors: 0
\t Link 0: Link recovery failed events: 1
\t Link 0: FEC Errors - 0: 36140749276
\t Link 0: Effective BER: 15e-255
"""


def watched(several, *answers):
    """Return the notes of a run on these cards, where nvidia-smi gives these answers in turn."""
    told, found = [], iter(answers)

    def command(argv, timeout_s):
        assert argv == ["nvidia-smi", "nvlink", "-e"]
        if isinstance(answer := next(found), Exception):
            raise answer
        return answer

    quiet = lambda *_: SimpleNamespace(start=int, stop=int, take=list, problem=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "Telemetry", quiet)
        patch.setattr(watch, "XidListener", quiet)
        patch.setattr(watch.box, "command", command)
        note = lambda text, level="warn": told.append((level, text))
        one = watch.Watch(several, [{}], lambda *_, **__: None, note, lambda _: None)
        one.start(None, 0.0)
        one.stop()
    return told


TWO = [cards.Card(0, "GPU-a"), cards.Card(1, "GPU-b")]
GREW = LINKS.replace("CRC Errors: 4", "CRC Errors: 9").replace("events: 1", "events: 2")
GREW = GREW.replace("packets: 11", "packets: 99").replace("- 0: 3", "- 0: 4")
QUIET = ("info", "NVLink: none of 4 error counters grew")
FAILED = ProbeFailed("nvidia-smi ended with 15")
UNKNOWN = ("info", "NVLink errors are not known (nvidia-smi ended with 15)")


@pytest.mark.parametrize(("several", "answers", "told"), [
    (TWO, (LINKS, GREW), [
        ("warn", "NVLink counted errors during the run: GPU 0 Link 17 CRC Errors +5, "
                 "GPU 1 Link 0 Link recovery failed events +1")]),
    (TWO, (LINKS, LINKS), [QUIET]), (TWO, ("", ""), []), ([], (LINKS, LINKS), []),
    (TWO, (LINKS, LINKS.replace("Errors: 4", "Errors: 0")), [QUIET]),  # the counters began anew
    (TWO, (FAILED,), [UNKNOWN]), (TWO, (LINKS, FAILED), [UNKNOWN]),
])  # fmt: skip
def test_growth_of_nvlink_errors_is_told(several, answers, told):
    assert watched(several, *answers) == told
