"""Does the training showcase judge honestly: does its probe find leaks, do its checks fail?"""

import csv
import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch

from nsa import attention
from nsa.tests.helpers import sent
from scripts import train_showcase as ts
from scripts.training import CORPUS

CPU = torch.device("cpu")


def causal_sum(tokens):
    """Logits that depend on every token up to t and on none after it."""
    return torch.nn.functional.one_hot(tokens, ts.VOCAB).float().cumsum(1)


def look_ahead(reach, size):
    ahead = lambda sums: torch.nn.functional.pad(sums[:, reach:], (0, 0, 0, reach))
    return lambda tokens: causal_sum(tokens) + size * ahead(causal_sum(tokens))


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
    tokens, leaky = torch.randint(0, ts.VOCAB, (1, 40)), ts.planted_leak(causal_sum, 0.02)
    for tolerance, leaks in ((0.01, True), (0.03, False)):
        assert bool(ts.causality_probe(leaky, tokens, [10], tolerance=tolerance).leaks) == leaks


def test_corpus_is_the_one_described_and_split_without_overlap():
    """Its cross entropies, and those of a text with a known answer: add-one smoothing keeps both
    a little above ln 2 and 0."""
    text = torch.tensor(list(b"ab" * 4000))
    assert ts.ngram_cross_entropy(text, text, 1) == pytest.approx(math.log(2), abs=0.05)
    assert 0 < ts.ngram_cross_entropy(text, text, 2) < 0.1
    data = CORPUS.read_bytes()
    readme = (CORPUS.parent / "README.md").read_text()
    assert hashlib.sha256(data).hexdigest() in readme and "public domain" in readme
    train, held_out = ts.load_corpus()
    assert torch.cat([train, held_out]).tolist() == list(data)
    bigram, unigram = (ts.ngram_cross_entropy(train, held_out, n) for n in (2, 1))
    assert 2.0 < bigram < unigram < 4.0  # English text: about 2.5 and 3.3 nats per byte


def run_of(*losses):
    row = {"val_loss": None, "lr": 1e-3, "tokens_per_s": None}
    rows = [{"step": i, "loss": x, **row} for i, x in enumerate(losses)]
    return ts.Run(None, rows, [1.0] * len(rows), 0.1, 1.0, 1.0, {}, {}, {})


GOOD = dict(
    run=run_of(5.5, 4.0, 3.0), probe=ts.Probe(0.0, 1.0, 1e-3, (3,)),
    selftest=ts.Probe(0.5, 1.0, 1e-3, (3,)), flow=ts.Probe(0.0, 1.0, 1e-6, (3,)),
)  # fmt: skip


@pytest.mark.parametrize("bad, failing", [
    ({}, ""), ({"run": run_of(5.5, math.nan, 3.0)}, "finite"),
    ({"run": run_of(5.5, 5.5)}, "loss_fell"),
    ({"run": run_of(5.55, 5.5, 5.6, 5.48)}, "loss_fell"),  # only noise
    ({"run": run_of(5.5, math.nan)}, "finite loss_fell"),
    ({"probe": GOOD["selftest"]}, "no_leak"),
    ({"selftest": GOOD["probe"]}, "probe_finds_planted_leak"),
    ({"probe": replace(GOOD["probe"], min_after=0.0)}, "probe_finds_planted_leak"),
    ({"flow": replace(GOOD["flow"], max_before=1e-3)}, "no_gradient_to_the_future"),
    ({"flow": replace(GOOD["flow"], max_before=math.nan)}, "no_gradient_to_the_future"),
    ({"flow": replace(GOOD["flow"], min_after=0.0)}, "no_gradient_to_the_future"),
])  # fmt: skip
def test_each_check_fails_for_its_own_reason(bad, failing):
    checks = ts.check_results(*{**GOOD, **bad}.values())
    assert {name for name, passed, _ in checks if not passed} == set(failing.split())


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
    return lambda q, k, v, **how: window(q, k, v.roll(-1, 1) if when(q) else v, **how)


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

    def leak(module, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: grad + 1e-3 * grad.roll(1, 1))

    hook = untrained[0].blocks[0].register_forward_pre_hook(leak)
    try:
        probe, _, flow = ts.probe_model(*untrained, CPU)
    finally:
        hook.remove()
    assert not probe.leaks and flow.leaks


def test_curve_files_never_hold_nan(tmp_path):
    run = run_of(5.5, math.inf, 3.0)
    run.grad_norms[2] = math.nan
    ts.write_curve(run.rows, run.grad_norms, tmp_path / "train.csv", tmp_path / "train.jsonl")
    with (tmp_path / "train.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == ("step", "loss", "val_loss", "lr", "tokens_per_s")
    assert [r["loss"] for r in rows] == ["5.5", "", "3"]

    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert parsed[2]["grad_norm"] is None and parsed[1]["loss"] is None


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command: (exit code, rows sent, outcomes of its checks)."""

    def run(*argv):
        code, rows = sent(monkeypatch, ts.main, [*argv, "--out", str(tmp_path)])
        tests = [row for row in rows if row["kind"] == "test"]
        return code, rows, {row["nodeid"].split("::")[1]: row["outcome"] for row in tests}

    return run


QUICK = "--device cpu --steps 12 --seq 64 --batch 3".split()


def test_command_line_records_what_the_report_needs(command, tmp_path):
    curve = tmp_path / "curve.csv"
    code, rows, outcomes = command(*QUICK, "--csv", str(curve))
    assert code == 0 and set(outcomes.values()) == {"passed"} and len(outcomes) == 5
    metrics = {r["name"]: r["value"] for r in rows if r["kind"] == "metric"}
    assert metrics["loss_last"] < metrics["loss_first"] - 1
    assert metrics["steps_per_s"] > 0 and metrics["tokens_per_s"] > 0
    assert 2 < metrics["bigram_cross_entropy"] < metrics["unigram_cross_entropy"] < 4
    for layer in (0, 1):
        for branch in ("cmp", "sel", "win"):
            assert 0 < metrics[f"gate/layer{layer}/{branch}_mean"] < 1
    assert any(name.startswith("routes/selected/") for name in metrics)
    written = [r["path"] for r in rows if r["kind"] == "artifact"]
    assert written == [str(curve), str(tmp_path / "train.jsonl")]
    assert len(curve.read_text().splitlines()) == 13
    assert json.dumps(rows, allow_nan=False)


def test_command_line_fails_when_the_model_sees_the_future(command, monkeypatch):
    monkeypatch.setattr(attention, "sliding_attention", leaky_window(lambda q: True))
    code, _, outcomes = command(*QUICK)
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    assert code == 1 and failed == {"no_leak", "no_gradient_to_the_future"}


def test_command_line_refuses_what_it_cannot_run(command, monkeypatch, capsys):
    with monkeypatch.context() as flags, pytest.raises(SystemExit, match="2"):
        flags.setenv("NSA_SEL_TRITON_MIN_L", "abc")
        command("--device", "cpu")
    assert "NSA_SEL_TRITON_MIN_L must be" in capsys.readouterr().err
    for option, value in (
        ("--steps", "0"), ("--batch", "0"), ("--seq", "8"), ("--seq", "100000"), ("--lr", "0"),
        ("--device", "foo"), ("--device", "meta"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            command("--device", "cpu", option, value)
        assert option in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda:1", "cuda"):
        code, rows, _ = command("--device", device)
        assert code == 3
        assert rows == [{"kind": "note", "level": "warn", "text": "no CUDA device"}]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("option", ["--steps 3", "--save m.pt", "--out .", "--csv x.csv"])
def test_warming_kernels_writes_nothing_and_says_so(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        ts.main(["--device", "cpu", "--compile-only", *option.split()])
    words = f"argument {option.split()[0]}: has no effect with --compile-only"
    assert words in capsys.readouterr().err
