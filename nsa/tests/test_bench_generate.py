"""The bench of generating: its proof tells a cache that is wrong, and a run without our kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench import bench_generate
from nsa import NSAConfig, NSALanguageModel

SMALL = "--dim 32 --heads 4 --groups 2 --dk 8 --vocab 50 --layers 2".split()
IDS = torch.arange(90)[None] * 7 % 50


def timed(run, whole, must_launch=False):
    return bench_generate.timed(run, whole, IDS, 6, 1e-4, must_launch)


def test_decoding_is_held_against_one_forward():
    """And a row of ours without its kernels has failed."""
    torch.manual_seed(0)
    config = NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
    model = NSALanguageModel(config, 50, 2)
    run = partial(bench_generate.by_nsa, model, False, "auto")
    whole = partial(bench_generate.last_of, model)
    row = timed(run, whole)
    assert row["status"] == "VALID" and row["how"] == "eager" and row["off"] < 1e-4
    assert row["ms_per_step"] > 0 and row["tokens_per_s"] > 0
    row = timed(run, lambda ids: whole(ids.roll(1, 1)))
    assert row["status"] == "FAILED" and "the last logits are off by" in row["why"]
    row = timed(run, whole, must_launch=True)
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
