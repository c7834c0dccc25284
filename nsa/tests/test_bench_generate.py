"""The bench of generating: its proof tells a cache that is wrong, and a run without our kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench import bench_generate
from nsa import NSAConfig, NSALanguageModel

SMALL = "--dim 32 --heads 4 --groups 2 --dk 8 --vocab 50 --layers 2".split()
IDS = torch.arange(90)[None] * 7 % 50


def ours():
    torch.manual_seed(0)
    config = NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
    return NSALanguageModel(config, 50, 2)


def timed(run, whole, must_launch=False):
    return bench_generate.timed(run, whole, IDS, 6, 1e-4, must_launch)


def test_decoding_is_held_against_one_forward():
    model = ours()
    run = partial(bench_generate.by_nsa, model, False, "auto")
    row = timed(run, partial(bench_generate.last_of, model))
    assert row["status"] == "VALID" and row["how"] == "eager" and row["off"] < 1e-4
    assert row["ms_per_step"] > 0 and row["tokens_per_s"] > 0
    other = partial(bench_generate.last_of, ours().requires_grad_(False))
    assert timed(run, other)["status"] == "VALID"  # the same weights
    wrong = lambda ids: bench_generate.last_of(model, ids.roll(1, 1))
    row = timed(run, wrong)
    assert row["status"] == "FAILED" and "the last logits are off by" in row["why"]


def test_a_row_of_nsa_without_its_kernels_has_failed():
    model = ours()
    run = partial(bench_generate.by_nsa, model, False, "auto")
    row = timed(run, partial(bench_generate.last_of, model), must_launch=True)
    assert row["status"] == "FAILED" and row["why"] == "no kernel of ours was launched"


@pytest.mark.parametrize("attention", ["nsa", "sdpa"])
def test_transformers_is_timed_by_its_own_generate(attention, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_generate, "DEVICE", ("cpu", torch.float32))
    args = bench_generate.parse([*SMALL, "--S_list", "90", "--new", "6"])
    model = bench_generate.llama(args, attention)
    run = partial(bench_generate.by_transformers, model)
    row = timed(run, partial(bench_generate.last_of_transformers, model))
    assert row["status"] == "VALID", row


def test_logits_of_which_some_are_told():
    want = torch.tensor([[4.0, 1.0, 2.0], [1.0, 2.0, 0.0]])
    told = want.clone().index_fill_(1, torch.tensor([1]), -torch.inf)
    assert bench_generate.off_by(told, want) == 0
    told[1, 0] = 3
    assert bench_generate.off_by(told, want) == 0.5
    told[0] = -torch.inf  # nothing is known of a text
    assert bench_generate.off_by(told, want) == torch.inf
    told[0] = torch.nan
    assert not bench_generate.off_by(told, want) < 9


def test_usage_and_no_card(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_generate.main(SMALL) == 3
    with pytest.raises(SystemExit):
        bench_generate.parse(["--new", "2"])
    assert "--new must be at least 5, got 2" in capsys.readouterr().err
