"""Does the training showcase judge honestly: does its probe find leaks, do its checks fail?"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from bench import records
from nsa import attention
from scripts import train_showcase as ts
from scripts.training import CORPUS

CPU = torch.device("cpu")


def causal_sum(tokens):
    """Logits that depend on every token up to t and on none after it."""
    return torch.nn.functional.one_hot(tokens, ts.VOCAB).float().cumsum(1)


def look_ahead(reach, size):
    def leaky(tokens):
        ahead = causal_sum(tokens).roll(-reach, dims=1)
        ahead[:, -reach:] = 0
        return causal_sum(tokens) + size * ahead

    return leaky


@pytest.mark.parametrize(("function", "leaks", "blind"), [
    (causal_sum, False, False), (look_ahead(1, 1e-3), True, False),
    (look_ahead(5, 1.0), True, False), (look_ahead(1, 1.0), True, False),
    (look_ahead(5, 1e-3), True, False),
    (lambda tokens: torch.zeros(*tokens.shape, ts.VOCAB), False, True),
    (lambda tokens: causal_sum(tokens) * math.nan, True, True),
], ids=["causal", "a bit", "far", "much", "far and a bit", "constant", "nan"])  # fmt: skip
def test_a_probe_finds_leaks_and_says_where_it_is_blind(function, leaks, blind):
    tokens = torch.randint(0, ts.VOCAB, (1, 50))
    probe = ts.causality_probe(function, tokens, [0, 7, 31, 44], tolerance=1e-5)
    assert (bool(probe.leaks), bool(probe.blind)) == (leaks, blind)
    assert leaks or blind or probe.max_before == 0.0


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

    data = CORPUS.read_bytes()
    readme = (CORPUS.parent / "README.md").read_text()
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
FLOW = ts.Probe(0.0, 1.0, 1e-6, (3,))


@pytest.mark.parametrize(
    ("run", "probe", "selftest", "flow", "failing"),
    [
        (good_run(), CLEAN, LEAK, FLOW, set()),
        (good_run((5.5, math.nan, 3.0)), CLEAN, LEAK, FLOW, {"finite"}),
        (good_run((5.5, 5.5)), CLEAN, LEAK, FLOW, {"loss_fell"}),
        (good_run((5.55, 5.5, 5.6, 5.48)), CLEAN, LEAK, FLOW, {"loss_fell"}),  # only noise
        (good_run((5.5, math.nan)), CLEAN, LEAK, FLOW, {"finite", "loss_fell"}),
        (good_run(), LEAK, LEAK, FLOW, {"no_leak"}),
        (good_run(), CLEAN, CLEAN, FLOW, {"probe_finds_planted_leak"}),
        (good_run(), replace(CLEAN, min_after=0.0), LEAK, FLOW, {"probe_finds_planted_leak"}),
        (good_run(), CLEAN, LEAK, replace(FLOW, max_before=1e-3), {"no_gradient_to_the_future"}),
        (good_run(), CLEAN, LEAK, replace(FLOW, max_before=math.nan),
         {"no_gradient_to_the_future"}),
        (good_run(), CLEAN, LEAK, replace(FLOW, min_after=0.0), {"no_gradient_to_the_future"}),
    ],
)  # fmt: skip
def test_each_check_fails_for_its_own_reason(run, probe, selftest, flow, failing):
    checks = ts.check_results(run, probe, selftest, flow)
    assert {n for n, passed, _ in checks if not passed} == failing


@pytest.fixture(scope="module")
def untrained():
    """(model, preset, text) of one layer."""
    preset = replace(ts.PRESETS["cpu"], seq=72)
    torch.manual_seed(0)
    return ts.NSALanguageModel(preset.config, ts.VOCAB, 1), preset, ts.load_corpus()[1]


def test_a_model_without_a_leak_passes_in_both_modes_and_at_every_length(untrained):
    clean, selftest, flow = ts.probe_model(*untrained, CPU)
    assert not clean.leaks and not clean.blind and selftest.leaks
    assert not flow.leaks and not flow.blind and not untrained[0].training
    lengths = ts.probe_lengths(untrained[1])
    assert min(lengths) < 40 and max(lengths) > 2 * 72 and all(n % 2 for n in lengths)


def leaky_window(when):
    """The window's values one token late, where `when(q)` says so."""
    window = attention.sliding_attention

    def call(q, k, v, **how):
        return window(q, k, v.roll(-1, 1) if when(q) else v, **how)

    return call


@pytest.mark.parametrize(("when", "where"), [
    (lambda q: torch.is_grad_enabled(), "training"), (lambda q: q.shape[1] > 100, "tokens"),
    (lambda q: q.shape[1] < 40, "tokens"),
], ids=["with gradients", "long", "short"])  # fmt: skip
def test_a_leak_in_one_mode_or_at_one_length_is_found(when, where, untrained, monkeypatch):
    """As it trains, which takes other code than serving; beyond and below the trained length."""
    monkeypatch.setattr(attention, "sliding_attention", leaky_window(when))
    probe, _, flow = ts.probe_model(*untrained, CPU)
    assert probe.leaks and where in probe.where and flow.leaks


def test_a_backward_that_leaks_is_found_though_no_output_does(untrained):
    """A gradient that reaches a later token, of a forward that is causal."""

    class Leaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + 1e-3 * grad.roll(1, 1)

    block = untrained[0].blocks[0]
    hook = block.register_forward_pre_hook(lambda _m, x: (Leaks.apply(x[0]), *x[1:]))
    try:
        probe, _, flow = ts.probe_model(*untrained, CPU)
    finally:
        hook.remove()
    assert not probe.leaks and flow.leaks


def test_curve_files_never_hold_nan(tmp_path):
    run = good_run((5.5, math.inf, 3.0))
    run.grad_norms[2] = math.nan
    ts.write_curve(run.rows, run.grad_norms, tmp_path / "train.csv", tmp_path / "train.jsonl")
    with (tmp_path / "train.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == ("step", "loss", "val_loss", "lr", "tokens_per_s")
    assert [r["loss"] for r in rows] == ["5.5", "", "3"]

    def refuse(text):
        raise AssertionError(text)

    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    assert parsed[2]["grad_norm"] is None and parsed[1]["loss"] is None


QUICK = ["--device", "cpu", "--steps", "12", "--seq", "64", "--batch", "3"]


@pytest.fixture
def sent(monkeypatch):
    rows = []
    for module in (ts, records):  # a note goes by way of the latter
        monkeypatch.setattr(module, "emit", lambda kind, row: rows.append({"kind": kind, **row}))
    return rows


def outcomes(rows):
    return {r["nodeid"].split("::")[1]: r["outcome"] for r in rows if r["kind"] == "test"}


def test_command_line_records_what_the_report_needs(sent, tmp_path, capsys):
    curve = tmp_path / "curve.csv"
    assert ts.main([*QUICK, "--out", str(tmp_path), "--csv", str(curve)]) == 0
    assert set(outcomes(sent).values()) == {"passed"} and len(outcomes(sent)) == 5
    metrics = {r["name"]: r["value"] for r in sent if r["kind"] == "metric"}
    assert metrics["loss_last"] < metrics["loss_first"] - 1
    assert metrics["steps_per_s"] > 0 and metrics["tokens_per_s"] > 0
    assert 2 < metrics["bigram_cross_entropy"] < metrics["unigram_cross_entropy"] < 4
    for layer in (0, 1):
        for branch in ("cmp", "sel", "win"):
            assert 0 < metrics[f"gate/layer{layer}/{branch}_mean"] < 1
    assert any(name.startswith("routes/selected/") for name in metrics)
    written = [r["path"] for r in sent if r["kind"] == "artifact"]
    assert written == [str(curve), str(tmp_path / "train.jsonl")]
    assert len(curve.read_text().splitlines()) == 13
    assert json.dumps(sent, allow_nan=False)


def test_command_line_fails_when_the_model_sees_the_future(sent, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "sliding_attention", leaky_window(lambda q: True))
    assert ts.main([*QUICK, "--out", str(tmp_path)]) == 1
    failed = {name for name, outcome in outcomes(sent).items() if outcome == "failed"}
    assert failed == {"no_leak", "no_gradient_to_the_future"}


@pytest.mark.parametrize(
    "argv", [["--steps", "0"], ["--batch", "0"], ["--seq", "8"], ["--seq", "100000"], ["--lr", "0"]]
)
def test_command_line_refuses_what_it_cannot_run(argv, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        ts.main(["--device", "cpu", "--out", str(tmp_path), *argv])
    assert stopped.value.code == 2 and argv[0] in capsys.readouterr().err


def test_command_line_without_the_device_says_so(sent, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ts.main(["--device", "cuda", "--out", str(tmp_path)]) == 3
    assert sent == [{"kind": "note", "level": "warn", "text": "no CUDA device"}]
