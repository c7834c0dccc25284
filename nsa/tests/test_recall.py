"""The needle test of a trained model: are its texts fair, and is what it counts right?"""

from __future__ import annotations

import csv
import signal

import pytest
import torch
from torch import nn

from scripts import recall
from scripts.training import VOCAB

CPU = torch.device("cpu")


def texts(batch=5, tokens=96, pairs=6, seed=0):
    return recall.make_texts(batch, tokens, pairs, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens, pairs", [(4, 1), (24, 6), (96, 6), (256, 64)])
def test_every_answer_is_hidden_once_and_asked_for_once(tokens, pairs):
    t = texts(tokens=tokens, pairs=pairs)
    hay = tokens - 2 * pairs
    assert t.tokens.shape == (5, tokens) and t.asked.tolist() == list(range(hay, tokens, 2))
    for b in range(5):
        text = t.tokens[b].tolist()
        keys = [i for i, x in enumerate(text[:hay]) if x in recall.KEYS]
        assert sorted(keys) == sorted(t.places[b].tolist()) and len(keys) == pairs
        assert len({text[i] for i in keys}) == pairs
        for at, place, answer in zip(t.asked, t.places[b], t.answers[b], strict=True):
            assert text[at] == text[place] and answer == text[place + 1] in recall.VALUES
        rest = [x for i, x in enumerate(text[:hay]) if i not in keys and i - 1 not in keys]
        assert all(x < recall.KEYS[0] for x in rest)
    assert not torch.equal(t.tokens, texts(tokens=tokens, pairs=pairs, seed=1).tokens)


@pytest.mark.parametrize("tokens, pairs", [(23, 6), (400, 65), (96, 0)])
def test_pairs_without_room_are_refused(tokens, pairs):
    with pytest.raises(ValueError, match=f"pairs must be from 1 to 64 .* got {pairs}"):
        texts(tokens=tokens, pairs=pairs)


class Looks(nn.Module):
    """Answers by looking back at most `far` tokens; else the first value that there is."""

    def __init__(self, far):
        super().__init__()
        self.far = far

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, VOCAB)
        for b, row in enumerate(tokens.tolist()):
            for t, x in enumerate(row):
                seen = [i for i in range(max(0, t - self.far), t) if row[i] == x]
                logits[b, t, row[seen[0] + 1] if seen else recall.VALUES[0]] = 1.0
        return logits


def test_what_is_found_is_counted_by_depth():
    rows = recall.ask(Looks(10**6), 100, 7, 6, CPU, batch_tokens=300)
    assert sum(r["n"] for r in rows) == 42 and recall.share(rows, 100) == 1.0
    assert all(r["found"] == r["n"] for r in rows)
    near = recall.ask(Looks(40), 100, 40, 6, CPU)
    assert [r["depth"] for r in near] == [i / 10 for i in range(10)]
    assert sum(r["found"] for r in near[:4]) < 0.1 * sum(r["n"] for r in near[:4])
    assert near[8]["found"] == near[8]["n"] > 0
    assert 0.2 < recall.share(near, 100) < 0.7


def test_depth_is_a_pairs_place_in_the_whole_text(monkeypatch):
    """Of 90 tokens, the questions among them."""
    made, real = [], recall.make_texts
    monkeypatch.setattr(recall, "make_texts", lambda *a: made.append(real(*a)) or made[-1])
    rows = recall.ask(Looks(10**6), 90, 30, 5, CPU)
    (t,) = made
    want = [sum(i <= p / 9 < i + 1 for p in t.places.flatten().tolist()) for i in range(10)]
    assert [r["n"] for r in rows] == want and want[8] > 0 and want[9] == 0


def test_the_likeliest_of_all_bytes_is_the_answer():
    class Hesitates(Looks):
        def forward(self, tokens):
            logits = super().forward(tokens)
            logits[..., 7] = 2.0  # likelier than the right value, which is the likeliest of values
            return logits

    rows = recall.ask(Hesitates(10**6), 96, 3, 6, CPU)
    assert sum(r["n"] for r in rows) == 18 and recall.share(rows, 96) == 0


def test_short_texts_come_first():
    first, last = (recall.lengths_at(step, 100, 256, 6) for step in (0, 99))
    assert max(first) == 128 and max(last) == 256 and min(first) == min(last) == 32
    assert sum(first) / len(first) < sum(last) / len(last)
    assert recall.lengths_at(0, 100, 48, 6) == (24, 24, 24, 24)


TINY = ["--device", "cpu", "--steps", "3", "--seq", "48", "--batch", "2", "--texts", "2",
        "--pairs", "6", "--lengths", "48,96", "--log_every", "2"]  # fmt: skip


def test_a_run_leaves_its_counts_and_says_when_it_learnt_nothing(tmp_path, capsys):
    argv = [*TINY, "--attention", "nsa,dense", "--out", str(tmp_path)]
    assert recall.main(argv) == 1
    rows = list(csv.DictReader((tmp_path / "recall.csv").open()))
    assert {(r["attention"], r["tokens"]) for r in rows} == {
        (a, n) for a in ("nsa", "dense") for n in ("48", "96")
    }
    assert sum(int(r["n"]) for r in rows) == 2 * 2 * 2 * 6
    said = capsys.readouterr().out
    assert "nsa: step 3/3 loss" in said and "dense:      96 tokens:" in said
    assert recall.main([*TINY, "--least", "0", "--out", str(tmp_path)]) == 0


def test_ctrl_c_asks_what_was_learnt_so_far(tmp_path, monkeypatch, capsys):
    steps, real = [], recall.learning_rate

    def rate(step, *rest):
        steps.append(step)
        if steps.count(1) == 1:
            signal.raise_signal(signal.SIGINT)
        return real(step, *rest)

    monkeypatch.setattr(recall, "learning_rate", rate)
    argv = [*TINY, "--steps", "50", "--least", "0", "--out", str(tmp_path)]
    assert recall.main(argv) == 0 and set(steps) == {0, 1}
    assert "step 2/50" in capsys.readouterr().out and (tmp_path / "recall.csv").is_file()


def test_a_second_ctrl_c_ends_it_at_once_and_the_handler_comes_back(tmp_path, monkeypatch):
    def rate(step, *rest):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(recall, "learning_rate", rate)
    with pytest.raises(KeyboardInterrupt):
        recall.main([*TINY, "--out", str(tmp_path)])
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "recall.csv").exists()


@pytest.mark.parametrize("trained, longer, code", [(1.0, 0.0, 0), (0.0, 1.0, 1)])
def test_what_must_be_found_is_asked_at_the_trained_length(
    trained, longer, code, tmp_path, monkeypatch
):
    def ask(model, tokens, texts, pairs, device):
        found = trained if tokens == 48 else longer
        return [{"tokens": tokens, "depth": 0.0, "found": int(found * 10), "n": 10}]

    monkeypatch.setattr(recall, "train", lambda *a: [1.0])
    monkeypatch.setattr(recall, "ask", ask)
    assert recall.main([*TINY, "--least", "0.5", "--out", str(tmp_path)]) == code


def test_a_loss_that_is_not_finite_is_told(tmp_path, capsys):
    assert recall.main([*TINY, "--lr", "1e30", "--steps", "6", "--least", "0", "--out",
                        str(tmp_path)]) == 1  # fmt: skip
    assert "not finite" in capsys.readouterr().out


@pytest.mark.parametrize("argv, says", [
    (["--attention", "sparse"], "--attention must be from nsa, dense"),
    (["--attention", "nsa,nsa"], "--attention must be from"),
    (["--pairs", "65"], "--pairs must be at most 64, got 65"),
    (["--lengths", "63"], "at least 4 \\* pairs = 64, got 63"),
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--least", "2"], "--least from 0 to 1"),
])  # fmt: skip
def test_bad_arguments_are_named(argv, says, capsys):
    with pytest.raises(SystemExit) as end:
        recall.main(["--device", "cpu", *argv])
    assert end.value.code == 2
    import re

    assert re.search(says, capsys.readouterr().err)


def test_the_model_decides_the_length():
    small, large = (recall.parse(["--device", "cpu", "--model", m]) for m in ("cpu", "cuda"))
    assert (small.seq, large.seq) == (128, 2048)
    assert recall.parse([]).model == recall.parse([]).device
