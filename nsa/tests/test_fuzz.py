"""scripts/fuzz: a short run of it, and that it finds faults, tells them and repeats them."""

import json
import shlex
from unittest import mock

import pytest
import torch

pytest.importorskip("hypothesis", reason="fuzzing needs hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from nsa import oracle, reference, select
from nsa.tests.helpers import make_block_indices, make_qkv, randn, sent
from scripts.fuzz import __main__ as fuzz
from scripts.fuzz.cases import OPERATIONS, Case
from scripts.fuzz.check import check
from scripts.fuzz.judge import attend, attend_in_dtype
from scripts.oneshot.record.judge import judge
from scripts.oneshot.record.model import Status
from scripts.oneshot.record.rows import parse_row
from scripts.oneshot.run import stages

# ---- short runs ----------------------------------------------------------------------------------


def run_all(space, examples):
    run = fuzz.fuzz("cpu", space, list(OPERATIONS), seed=0, seconds=None, examples=examples)
    assert not run.faults, run.faults[0].told()
    for operation in OPERATIONS:
        assert sum(n for (name, _), n in run.examples.items() if name == operation) == examples


def test_routes_of_pytorch():
    run_all(fuzz.Space.of("cpu", ["reference", "sdpa"]), 8)


@pytest.mark.kernel
def test_kernels_in_the_interpreter():
    if not fuzz.interpreting():
        pytest.skip("the stage fuzz runs them on a GPU")
    run_all(fuzz.Space(fuzz.Space.of("cpu", ["triton"]).routes, 6, 16, 2), 2)


# ---- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sliding", "compressed", "selected"])
def test_what_is_right_is_the_oracles(kind):
    N = {"compressed": 5}.get(kind, 21)
    q, k, v = make_qkv(1, 21, 6, 2, 8, 5, Skv=N, dtype=torch.float64, requires_grad=True)
    t, key = torch.arange(21)[:, None, None], torch.arange(N)
    if kind == "sliding":
        out, seen = oracle.sliding_attention(q, k, v, window=6), (key <= t) & (key > t - 6)
    elif kind == "compressed":
        out, seen = oracle.compressed_attention(q, k, v, l=4, d=4)[0], key * 4 + 3 <= t
    else:
        blocks = make_block_indices("ragged", 1, 21, 2, 3, 4)
        out = oracle.selection_attention(q, k, v, oracle.blocks_to_ranges(blocks, 4))
        seen = (blocks[0][..., None] == key // 4).any(-2) & (key <= t)
    do = randn(*out.shape, seed=3, dtype=torch.float64)
    seen = seen.expand(21, 2, N)
    part = attend(*(x[0].detach() for x in (q, k, v)), seen, 8**-0.5, do[0])
    theirs = attend_in_dtype(*(x[0].detach() for x in (q, k, v)), seen, 8**-0.5)
    torch.testing.assert_close(part.right["out"], out[0].detach())
    torch.testing.assert_close(theirs, out[0].detach())
    for name, grad in zip("qkv", torch.autograd.grad(out, (q, k, v), do), strict=True):
        torch.testing.assert_close(part.right[name], grad[0])
        assert (part.sizes[name] >= part.right[name].abs() - 1e-12).all(), name


# ---- faults --------------------------------------------------------------------------------------


def rounded(attend):
    """Attention whose output has lost its last bits."""

    def run(*args):
        out, lse = attend(*args)
        return out + (out * (1 + 2.0**-8) - out).detach(), lse

    return run


def a_key_too_few(chunked):
    """Rows that see several keys do not see the oldest."""

    def fewer(seen):
        oldest = seen.int().argmax(-1, keepdim=True)
        alone = seen.sum(-1, keepdim=True) < 2
        return seen & ((torch.arange(seen.shape[-1]) != oldest) | alone)

    mask = lambda mask_of: lambda first, last: fewer(mask_of(first, last))
    return lambda q, k, v, mask_of, *more: chunked(q, k, v, mask(mask_of), *more)


PLANTED = {  # operation, where, what, and what is told
    "a key too few": ("sliding", (reference, "_chunked"), a_key_too_few, "out: row"),
    "lost bits": ("compressed", (reference, "_attend"), rounded, "out: row"),
    "NaN that nobody sees": (
        "sliding", (reference, "finite"),
        lambda _: lambda x: (x, torch.zeros(x.shape[:-1], dtype=torch.bool)), "nan at",
    ),
    "NaN that is hidden": (
        "blocks", (reference, "factor"), lambda _: lambda mask, odd: torch.ones(()), "hides it",
    ),
    "a block is missing": (
        "choice", (select, "top_blocks"),
        lambda top_blocks: lambda scores, **how: top_blocks(scores, **{**how, "n_init": 0,
                                                                       "n_local": 1}),
        "must be among",
    ),
    "an exception": (
        "decode", (reference, "_attend"),
        lambda _: mock.Mock(side_effect=RuntimeError("no such thing")), "no such thing",
    ),
}  # fmt: skip


FUZZ = next(s for s in stages.plan("full") if s.id == "fuzz")


def rows_of(monkeypatch, argv):
    """(exit code, rows that a report reads) of the command."""
    code, rows = sent(monkeypatch, fuzz.main, argv)
    return code, [parse_row(json.dumps(row).encode()) for row in rows]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_repeated(name, monkeypatch, capsys, tmp_path):
    operation, (where, what), plant, told = PLANTED[name]
    monkeypatch.setattr(fuzz, "SHRINK_S", 2)
    monkeypatch.setattr(fuzz, "MOST_FAULTS", 1)
    with monkeypatch.context() as faulty:
        faulty.setattr(where, what, plant(getattr(where, what)))
        argv = ["--operations", operation, "--routes", "reference", "--examples", "200",
                "--last", str(tmp_path / "last.json")]  # fmt: skip
        code, rows = rows_of(monkeypatch, argv)
        assert code == 1
        printed = capsys.readouterr().out
        assert told in printed and "1 faults: seed 0" in printed
        command = next(x for x in printed.splitlines() if "again by: " in x)
        again = shlex.split(command.partition("python -m scripts.fuzz ")[2])
        assert fuzz.main(again) == 1
        assert told in capsys.readouterr().out
    assert fuzz.main(again) == 0
    assert Case.from_json((tmp_path / "last.json").read_text()).operation == operation
    test = next(r for r in rows if r["kind"] == "test")
    assert test["outcome"] == "failed" and "again by" in test["reason"]
    assert judge(FUZZ, 1, rows).status is Status.FAIL


@pytest.mark.parametrize("error, argv, code, told", [
    (RuntimeError("CUDA error: an illegal memory access"), "--examples 50", 1, "illegal memory"),
    (fuzz.RouteUnavailable("triton", "no_triton"), "--examples 3 --operations sliding", 3,
     "refused 3 times: sliding on route 'triton' is unavailable"),
], ids=["of the device", "of the route"])  # fmt: skip
def test_an_error_ends_the_run_and_nothing_that_ran_is_no_success(
    error, argv, code, told, monkeypatch, capsys
):
    monkeypatch.setattr(fuzz, "check", mock.Mock(side_effect=error))
    assert fuzz.main(argv.split()) == code
    printed = capsys.readouterr().out
    assert told in printed and printed.count("FAULT") == (code == 1)


@pytest.mark.parametrize("others", [True, False])
def test_a_shared_cards_lack_of_memory_is_no_fault(others, monkeypatch):
    monkeypatch.setattr(fuzz, "check", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 if others else 90)
    run = fuzz.Run("cuda", fuzz.Space.of("cpu", ["reference"]), None)
    run.round("choice", 0, 2)
    assert bool(run.faults) != others and bool(run.refused) == others and not run.examples


def test_time_is_kept(monkeypatch):
    """No example begins once it is over, none of an operation without a route."""
    clock = iter(range(10_000))
    monkeypatch.setattr(fuzz.time, "monotonic", lambda: float(next(clock)))
    seen = []
    monkeypatch.setattr(fuzz, "check", lambda case, device: seen.append(case) or 0.0)
    run = fuzz.fuzz("cpu", fuzz.Space.of("cpu", None), ["sliding"], 0, seconds=30, examples=0)
    assert 0 < len(seen) < 30 and sum(run.examples.values()) == len(seen)
    space = fuzz.Space({"fa2": fuzz.LARGE}, 9, 9, 2)
    run = fuzz.fuzz("cpu", space, ["choice"], 0, seconds=None, examples=3)
    assert not run.examples and not run.faults


def test_what_is_missing_or_no_name_is_told(monkeypatch, capsys):
    for argv in (["--operations", "slide"], ["--routes", "triton,slide"], ["--routes", ","],
                 ["--seconds", "nan"], ["--examples", "0"], ["--case", "{}"], ["--last", "/"],
                 ["--case", '{"operation": "sliding"}']):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            fuzz.main(argv)
        said = capsys.readouterr().err
        assert "got " in said or "no case: 'geometry'" in said
    monkeypatch.setattr(fuzz.importlib.util, "find_spec", lambda name: None)
    assert fuzz.main([]) == 3
    assert "needs hypothesis, which is not installed" in capsys.readouterr().err


def test_a_case_is_its_json():
    space = fuzz.Space.of("cpu", ["reference"])

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(st.one_of([fuzz.cases(operation, space) for operation in OPERATIONS]))
    def same(case):
        assert Case.from_json(case.to_json()) == case

    same()


def test_the_stage_passes_where_every_operation_ran(monkeypatch):
    assert FUZZ.least == len(OPERATIONS)
    assert "fuzz" not in {s.id for s in stages.plan("standard")}
    monkeypatch.setattr(fuzz, "check", lambda case, device: 0.5)
    for operations, status in ((OPERATIONS, Status.PASS), (OPERATIONS[1:], Status.NOT_RUN)):
        argv = ["--operations", ",".join(operations), "--routes", "sdpa", "--examples", "3"]
        code, rows = rows_of(monkeypatch, argv)
        assert code == 0 and judge(FUZZ, 0, rows).status is status


# ---- what it found -------------------------------------------------------------------------------

TINY = dict(G=1, h=2, Dk=16, Dv=16, l=8, d=4, l_sel=16, n_sel=4, w=11)
FOUND = {
    "a query of NaN where there is no compressed key": dict(
        operation="attention", route="reference", dtype="fp32", lengths=[2], packed=True,
        odd=["q", 0, "nan"],
    ),
    "a key of NaN that the only query sees, without a mask": dict(
        operation="compressed", route="sdpa", dtype="fp32", lengths=[1], q_start=7,
        odd=["k_cmp", 0, "nan"],
    ),
    "the same in a window": dict(
        operation="sliding", route="sdpa", dtype="fp16", lengths=[1], odd=["k_win", 0, "nan"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_it_found_is_right(name):
    check(Case.from_json(json.dumps({**FOUND[name], "geometry": TINY})), "cpu")
