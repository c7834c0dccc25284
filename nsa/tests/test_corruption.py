"""Silent data corruption of a card: planted in its memory and in its products, and what is told."""

from __future__ import annotations

import pytest
import torch

from bench import corruption, health
from bench.records import CARD_FAULTS, card_faults
from scripts.oneshot.compare import verify
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import RunRecord, Stage

MEMORY = ("cpu", 8 * 4 * 1024, 60.0, 1024)  # four blocks of 1024 words


def test_sound_memory_keeps_every_pattern_that_there_is_time_for():
    facts = {"memory_test_mib": 0, "memory_test_patterns": 130, "memory_wrong_words": 0}
    assert corruption.check_memory(*MEMORY) == facts
    assert corruption.check_memory(*MEMORY[:2], 0.0, 1024)["memory_test_patterns"] == 1


def flip(blocks):
    blocks[2][7] ^= 1 << 40


def stuck_low(blocks):
    blocks[1][3] &= ~(1 << 5)


def stuck_high(blocks):
    blocks[1][3] |= -(1 << 63)


def two_addresses_one_word(blocks):
    blocks[3][0] = blocks[0][0]


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [(flip, 130), (stuck_low, 65), (stuck_high, 65), (two_addresses_one_word, 2)],
)
def test_words_that_change_between_write_and_read_are_counted(fault, wrong, monkeypatch):
    write = corruption.write
    monkeypatch.setattr(corruption, "write", lambda *args: (write(*args), fault(args[1])))
    facts = corruption.check_memory(*MEMORY)
    assert facts["memory_wrong_words"] == wrong
    assert card_faults(facts) == [f"{wrong} words of memory were read back other than written"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sound_products_are_alike_and_right(dtype):
    facts = corruption.check_products("cpu", dtype, 0.01, n=256)
    assert any("repeats" in name and count > 0 for name, count in facts.items())
    assert set(facts) & set(CARD_FAULTS) and not card_faults(facts)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("calls", "value", "counted"),
    [
        ({1}, None, "products_differing"),
        (range(10**6), None, "product_values_wrong"),
        (range(10**6), float("nan"), "product_values_wrong"),
    ],
)
def test_a_product_that_is_off_by_its_last_bit_is_found(dtype, calls, value, counted, monkeypatch):
    """Once, or in every call: one element for each row, so that the drawn ones have theirs."""
    mm, called = torch.mm, []

    def faulty(a, b):
        out = mm(a, b)
        if len(called) in calls:
            bits = out.view({2: torch.int16, 4: torch.int32}[out.itemsize])
            out[:, 5] = value if value else (bits ^ 1).view(out.dtype)[:, 5]
        called.append(1)
        return out

    monkeypatch.setattr(corruption.torch, "mm", faulty)
    of = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    facts = corruption.check_products("cpu", of, 0.0, n=64)
    assert [k for k in CARD_FAULTS if facts.get(k)] == [f"{dtype}_{counted}"] and card_faults(facts)


@pytest.mark.parametrize(("deep", "mib"), [(False, 8192), (True, 16384)])
def test_the_health_stage_tests_a_part_of_what_is_free(deep, mib, monkeypatch):
    given = []
    monkeypatch.setattr(health.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(health.torch.cuda, "mem_get_info", lambda: (20 * 2**30, 24 * 2**30))
    monkeypatch.setattr(health, "check_memory", lambda *args: given.append(args) or {"m": 1})
    monkeypatch.setattr(health, "check_products", lambda *args: given.append(args) or {"p": 2})
    assert health.corruption(deep) == {"m": 1, "p": 2}
    assert given[0][:2] == ("cuda", mib * 2**20) and sum(one[2] for one in given) < 25
    assert [one[1] for one in given[1:]] == [torch.bfloat16, torch.float32]


STAGE = Stage("health", "Box health", ("x",), proof="row", timeout_s=9.0, required=False)


@pytest.mark.parametrize("name", CARD_FAULTS)
def test_a_card_that_corrupts_data_fails_the_run_whatever_its_row_says(name):
    row = {"kind": "health", "status": "OK", "why": [], name: 3}
    found = judge(STAGE, 0, [row])
    assert (found.status, found.kind) == (Status.FAIL, "CORRUPTION") and "3 " in found.reason
    assert judge(STAGE, 0, [{**row, name: 0}]).status is Status.PASS
    result = {"id": "health", "status": "PASS", "required": False}
    record = RunRecord.replay([{"ev": "run_start", "plan": [{"id": "health"}]}])
    record.apply({"ev": "row", "stage": "health", "row": {**row, "status": "FAIL"}})
    record.apply({"ev": "stage_end", "stage": "health", "result": result})
    (told,) = verify.check_cards(record.to_bundle())
    assert told.startswith("health passes for FAIL, and 3 ")
    failed = {**result, "status": "FAIL", "reason": found.reason, "kind": found.kind}
    record.apply({"ev": "stage_end", "stage": "health", "result": failed})
    assert not list(verify.check_cards(record.to_bundle()))
    assert record.to_bundle()["verdict"]["exit_code"] == 1
    record.apply({"ev": "row", "stage": "health_gpu1", "row": {**row, "gpu": 1}})
    assert "health_gpu1 passes for OK" in "".join(verify.check_cards(record.to_bundle()))
