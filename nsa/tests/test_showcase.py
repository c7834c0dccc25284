"""Does the training showcase judge honestly: does its probe find leaks, do its checks fail?"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from scripts import train_showcase as ts

CPU = torch.device("cpu")


def causal_sum(tokens):
    """Logits that depend on every token up to t and on none after it."""
    return torch.nn.functional.one_hot(tokens, ts.VOCAB).float().cumsum(1)


def test_probe_passes_a_causal_function_and_sees_its_allowed_changes():
    tokens = torch.randint(0, ts.VOCAB, (1, 50))
    probe = ts.causality_probe(causal_sum, tokens, [0, 7, 31, 48], tolerance=1e-5)
    assert probe.max_before == 0.0 and not probe.leaks and not probe.blind


@pytest.mark.parametrize("reach", [1, 5])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_probe_finds_a_look_ahead(reach, size):
    def leaky(tokens):
        ahead = causal_sum(tokens).roll(-reach, dims=1)
        ahead[:, -reach:] = 0
        return causal_sum(tokens) + size * ahead

    tokens = torch.randint(0, ts.VOCAB, (1, 50))
    assert ts.causality_probe(leaky, tokens, [7, 31], tolerance=1e-5).leaks


def test_probe_that_sees_nothing_says_that_it_is_blind():
    def constant(tokens):
        return torch.zeros(*tokens.shape, ts.VOCAB)

    tokens = torch.randint(0, ts.VOCAB, (1, 20))
    assert ts.causality_probe(constant, tokens, [3], tolerance=1e-5).blind


def test_probe_counts_nan_as_a_leak():
    def broken(tokens):
        return causal_sum(tokens) * math.nan

    probe = ts.causality_probe(broken, torch.zeros(1, 20, dtype=torch.long), [3, 5], 1e-5)
    assert probe.leaks and probe.blind


def test_planted_leak_is_found_just_above_the_tolerance():
    tokens = torch.randint(0, ts.VOCAB, (1, 40))
    leaky = ts.planted_leak(causal_sum, 0.02)
    assert ts.causality_probe(leaky, tokens, [10], tolerance=0.01).leaks
    assert not ts.causality_probe(leaky, tokens, [10], tolerance=0.03).leaks


def test_ngram_cross_entropies_on_text_with_a_known_answer():
    text = torch.tensor(list(b"ab" * 4000))
    # Add-one smoothing keeps both a little above ln 2 and 0.
    assert ts.ngram_cross_entropy(text, text, 1) == pytest.approx(math.log(2), abs=0.05)
    assert 0 < ts.ngram_cross_entropy(text, text, 2) < 0.1


def test_corpus_is_the_one_described_and_split_without_overlap():
    import hashlib

    data = ts.CORPUS.read_bytes()
    readme = (ts.CORPUS.parent / "README.md").read_text()
    assert hashlib.sha256(data).hexdigest() in readme and "public domain" in readme
    train, held_out = ts.load_corpus()
    assert torch.cat([train, held_out]).tolist() == list(data)
    bigram, unigram = (ts.ngram_cross_entropy(train, held_out, n) for n in (2, 1))
    assert 2.0 < bigram < unigram < 4.0  # English text: about 2.5 and 3.3 nats per byte


def good_run(losses=(5.5, 4.0, 3.0)):
    rows = [
        {"step": i, "loss": x, "val_loss": None, "lr": 1e-3, "tokens_per_s": None}
        for i, x in enumerate(losses)
    ]
    return ts.Run(None, rows, [1.0] * len(rows), 0.1, 1.0, 1.0, {}, {}, {})


CLEAN = ts.Probe(0.0, 1.0, 1e-3, (3,))
LEAK = ts.Probe(0.5, 1.0, 1e-3, (3,))


@pytest.mark.parametrize(
    ("run", "probe", "selftest", "failing"),
    [
        (good_run(), CLEAN, LEAK, set()),
        (good_run((5.5, math.nan, 3.0)), CLEAN, LEAK, {"finite"}),
        (good_run((5.5, 5.5)), CLEAN, LEAK, {"loss_fell"}),
        (good_run((5.5, math.nan)), CLEAN, LEAK, {"finite", "loss_fell"}),
        (good_run(), LEAK, LEAK, {"no_leak"}),
        (good_run(), CLEAN, CLEAN, {"probe_finds_planted_leak"}),
        (good_run(), replace(CLEAN, min_after=0.0), LEAK, {"probe_finds_planted_leak"}),
    ],
)
def test_each_check_fails_for_its_own_reason(run, probe, selftest, failing):
    assert {n for n, passed, _ in ts.check_results(run, probe, selftest) if not passed} == failing


def test_curve_files_never_hold_nan(tmp_path):
    run = good_run((5.5, math.inf, 3.0))
    run.grad_norms[2] = math.nan
    ts.write_curve(run.rows, run.grad_norms, tmp_path)
    with (tmp_path / "train.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == ("step", "loss", "val_loss", "lr", "tokens_per_s")
    assert [r["loss"] for r in rows] == ["5.5", "", "3.0"]

    def refuse(text):
        raise AssertionError(text)

    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    assert parsed[2]["grad_norm"] is None and parsed[1]["loss"] is None
