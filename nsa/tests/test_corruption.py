"""Silent data corruption of a card: planted in its memory and in its products, and what is told."""

import pytest
import torch

from bench import corruption, health
from bench.records import CARD_FAULTS, card_faults
from scripts.oneshot.compare import verify
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import RunRecord, Stage

MEMORY = ("cpu", 8 * 4 * 1024, 60.0, 1024)  # four blocks of 1024 words


@pytest.mark.parametrize("fault, wrong", [
    (lambda blocks: blocks[2][7].bitwise_xor_(1 << 40), 130),
    (lambda blocks: blocks[1][3].bitwise_and_(~(1 << 5)), 65),
    (lambda blocks: blocks[1][3].bitwise_or_(-(1 << 63)), 65),
    (lambda blocks: blocks[3][0].copy_(blocks[0][0]), 2),
], ids=["flips", "stuck low", "stuck high", "two addresses, one word"])  # fmt: skip
def test_words_that_change_between_write_and_read_are_counted(fault, wrong, monkeypatch):
    """Sound memory keeps every pattern that there is time for."""
    sound = {"memory_test_mib": 0, "memory_test_patterns": 130, "memory_wrong_words": 0}
    assert corruption.check_memory(*MEMORY) == sound
    assert corruption.check_memory(*MEMORY[:2], 0.0, 1024)["memory_test_patterns"] == 1
    write = corruption.write
    monkeypatch.setattr(corruption, "write", lambda *args: (write(*args), fault(args[1])))
    facts = corruption.check_memory(*MEMORY)
    assert facts["memory_wrong_words"] == wrong
    assert card_faults(facts) == [f"{wrong} words of memory were read back other than written"]


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("calls, value, counted", [
    ({1}, None, "products_differing"), (range(10**6), None, "product_values_wrong"),
    (range(10**6), float("nan"), "product_values_wrong"),
])  # fmt: skip
def test_a_product_that_is_off_by_its_last_bit_is_found(
    name, dtype, calls, value, counted, monkeypatch
):
    """Once, or in every call: one element for each row, so that the drawn ones have theirs. Sound
    products are alike and right."""
    mm, called = torch.mm, []
    facts = corruption.check_products("cpu", dtype, 0.01, n=256)
    assert any("repeats" in fact and count > 0 for fact, count in facts.items())
    assert set(facts) & set(CARD_FAULTS) and not card_faults(facts)

    def faulty(a, b):
        out = mm(a, b)
        if len(called) in calls:
            bits = out.view({2: torch.int16, 4: torch.int32}[out.itemsize])
            out[:, 5] = value if value else (bits ^ 1).view(out.dtype)[:, 5]
        called.append(1)
        return out

    monkeypatch.setattr(corruption.torch, "mm", faulty)
    facts = corruption.check_products("cpu", dtype, 0.0, n=64)
    assert [k for k in CARD_FAULTS if facts.get(k)] == [f"{name}_{counted}"] and card_faults(facts)


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


@pytest.mark.parametrize("name", CARD_FAULTS)
def test_a_card_that_corrupts_data_fails_the_run_whatever_its_row_says(name):
    row = {"kind": "health", "status": "OK", "why": [], name: 3}
    stage = Stage("health", "Box health", ("x",), proof="row", timeout_s=9.0, required=False)
    found = judge(stage, 0, [row])
    assert (found.status, found.kind) == (Status.FAIL, "CORRUPTION") and "3 " in found.reason
    assert judge(stage, 0, [{**row, name: 0}]).status is Status.PASS
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
