"""Does cached generation equal the full forward pass, and does selection find its needle?"""

import copy
import dataclasses
import errno
import itertools
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nsa import generate as gen
from nsa.config import NSAConfig
from nsa.model import NSALanguageModel
from nsa.tests.helpers import assert_raises
from scripts import needle

# Blocks small enough that 40 tokens cross every edge: compression, selection and the window.
CONFIG = NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return NSALanguageModel(CONFIG, vocab_size=256, n_layers=2).eval()


@torch.no_grad()
def assert_greedy(model, tokens, n):
    """The last n tokens are each the likeliest one behind those before it, by one forward."""
    assert torch.equal(model(tokens[:, :-1])[:, -n:].argmax(-1), tokens[:, -n:])


@pytest.fixture
def path(model, tmp_path):
    """Where the model is saved."""
    gen.save_checkpoint(tmp_path / "m.pt", model)
    return tmp_path / "m.pt"


@pytest.mark.parametrize("n", [1, 7, 8, 13])
def test_greedy_generation_equals_full_forward(model, n):
    """The cache is as large as the text."""
    prompt = torch.randint(0, 256, (2, n), generator=torch.Generator().manual_seed(1))
    layer = model.blocks[0].attention
    with mock.patch.object(layer, "make_cache", side_effect=layer.make_cache) as made:
        out = gen.generate(model, prompt, 27)
    assert torch.equal(out.tokens[:, :n], prompt) and out.tokens.shape[1] == n + 27
    assert_greedy(model, out.tokens, 27)
    (call,) = made.call_args_list
    cache = layer.make_cache(*call.args, **call.kwargs)
    assert (cache.max_len, cache.growable) == (n + 27, False)


def test_rates_are_those_of_the_whole_batch(model, monkeypatch):
    monkeypatch.setattr(gen, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    prompt = torch.zeros(3, 5, dtype=torch.long)
    out = gen.generate(model, prompt, 7)
    assert (out.prefill_tokens_per_s, out.decode_tokens_per_s) == (15, 18)  # a second each
    assert gen.generate(model, prompt, 1).decode_tokens_per_s is None


def test_sampling_is_fixed_by_the_seed(model):
    prompt = torch.zeros(1, 5, dtype=torch.long)
    sample = lambda seed: gen.generate(model, prompt, 20, temperature=1.0, seed=seed).tokens
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))


def test_top_1_is_greedy_and_top_k_stays_among_the_best():
    """A higher temperature draws lesser ones more often."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(0))
    best, two = logits.argmax(-1, keepdim=True), torch.tensor([[1.0, 0.0]])
    assert torch.equal(gen.pick(logits, 0.0, None, g), best)
    assert torch.equal(gen.pick(logits, 5.0, 1, g), best)
    drawn = gen.pick(logits, 5.0, 3, g)
    assert (logits.topk(3).indices == drawn).any(-1).all() and not torch.equal(drawn, best)
    tied = gen.pick(torch.zeros(400, 50), 5.0, 3, g)
    assert set(tied.flatten().tolist()) == set(torch.zeros(50).topk(3).indices.tolist())
    for temperature in (0.5, 2.0):
        share = (gen.pick(two.expand(4000, 2), temperature, None, g) == 0).float().mean()
        want = two.div(temperature).softmax(-1)[0, 0]
        torch.testing.assert_close(share, want, atol=0.03, rtol=0)


def test_a_temperature_near_0_takes_the_best(model):
    logits, g = torch.randn(9, 50) * 30, torch.Generator().manual_seed(0)
    for top_k in (None, 3):
        assert torch.equal(gen.pick(logits, 1e-40, top_k, g), logits.argmax(-1, keepdim=True))


def test_bad_settings_are_named(model):
    good = {"prompt": torch.zeros(1, 4, dtype=torch.long), "max_new_tokens": 1}
    bad = [
        (ValueError, "max_new_tokens must be at least 1, got 0", {"max_new_tokens": 0}),
        (TypeError, "max_new_tokens must be an int, got 2.0", {"max_new_tokens": 2.0}),
        *((ValueError, "temperature must be 0 or larger and finite", {"temperature": value})
          for value in (-1.0, math.nan, math.inf)),
        (TypeError, "temperature must be a number, got 'a'", {"temperature": "a"}),
        (ValueError, "top_k must be None or at least 1, got 0", {"top_k": 0}),
        (TypeError, "top_k must be None or an int, got 2.5", {"top_k": 2.5}),
        *((ValueError, f"seed must be an integer of 64 bits, got {value}", {"seed": value})
          for value in (2**64, None)),
        (ValueError, r"prompt must be .* got \[1, 0\]", {"prompt": good["prompt"][:, :0]}),
        (TypeError, "prompt must be an int32 or int64 tensor, got list", {"prompt": [[1, 2]]}),
        (TypeError, "prompt .* got torch.float32", {"prompt": torch.zeros(1, 4)}),
        (ValueError, "prompt must hold tokens from 0 to 255, got 256",
         {"prompt": torch.tensor([[1, 256]])}),
        (ValueError, "prompt must hold tokens from 0 to 255, got -1",
         {"prompt": torch.tensor([[1, -1]])}),
    ]  # fmt: skip
    call = lambda how: lambda: gen.generate(model, **{**good, **how})
    assert_raises(*((error, words, call(how)) for error, words, how in bad))


def test_command_line_generates_from_a_saved_model(model, path, capsys):
    options = ["--prompt", "KING", "--max_new_tokens", "9", "--device", "cpu"]
    assert gen.main([str(path), *options]) == 0
    out, err = capsys.readouterr()
    tokens = gen.generate(model, torch.tensor([list(b"KING")]), 9).tokens
    assert_greedy(model, tokens, 9)
    expected = bytes(tokens[0].tolist())
    assert out == expected.decode("utf-8", errors="replace") + "\n" and "tokens/s" in err


def test_every_option_reaches_generate(path, monkeypatch):
    spy = mock.Mock(side_effect=gen.generate)
    monkeypatch.setattr(gen, "generate", spy)
    options = ["--temperature", "0.7", "--top_k", "5", "--seed", "3", "--max_new_tokens", "2",
               "--kv-cache-dtype", "fp8_e4m3"]  # fmt: skip
    assert gen.main([str(path), *options, "--device", "cpu"]) == 0
    how = dict(temperature=0.7, top_k=5, seed=3, graph=False, kv_cache_dtype="fp8_e4m3")
    assert [call.kwargs for call in spy.call_args_list] == [how]


@pytest.mark.parametrize("options, names", [
    ("--top-k 5", "--top-k"), ("--seed 0", "--seed"), ("--top-k 5 --seed 3", "--top-k and --seed"),
    ("--top-k 5 --seed 3 --temperature 0.5", None), ("", None),
])  # fmt: skip
def test_options_of_samples_are_told_to_mean_nothing_without_a_temperature(
    options, names, path, capsys
):
    argv = [str(path), "--max-new-tokens", "1", "--device", "cpu", *options.split()]
    assert gen.main(argv) == 0
    told = f"no effect of {names}: --temperature 0 takes the best byte\n"
    err = capsys.readouterr().err
    assert err.startswith(told) if names else "no effect" not in err


def test_a_prompt_may_be_any_bytes(path, monkeypatch):
    spy = mock.Mock(side_effect=gen.generate)
    monkeypatch.setattr(gen, "generate", spy)
    options = ["--prompt", "\udcffa\u00e9", "--max-new-tokens", "1", "--device", "cpu"]
    assert gen.main([str(path), *options]) == 0
    assert spy.call_args.args[1].tolist() == [list(b"\xffa\xc3\xa9")]


@pytest.mark.parametrize("vocab_size", [50, 300])
def test_a_model_of_other_tokens_than_bytes_is_a_usage_error(vocab_size, path, capsys):
    gen.save_checkpoint(path, NSALanguageModel(CONFIG, vocab_size, 1))
    with pytest.raises(SystemExit, match="2"):
        gen.main([str(path), "--device", "cpu"])
    words = f"{path} must have a vocab_size of 256, one token per byte, got {vocab_size}"
    assert words in capsys.readouterr().err


FEW = ["--tokens", "2048", "--queries", "2"]


@pytest.mark.parametrize("main, argv, words", [
    (gen.main, ["m.pt", "--device", "cuda"], "CUDA devices"),
    (gen.main, ["m.pt", "--device", "cuda:99"], "'cuda:99' is not here"),
    (gen.main, ["m.pt", "--device", "gpu"], "cpu, cuda or cuda:N"),
    (gen.main, ["m.pt", "--device", "meta"], "got 'meta'"),
    (needle.main, [*FEW, "--backend", "triton"], "triton"),
    (needle.main, [*FEW, "--device", "cuda"], "no CUDA device"),
    (needle.main, ["--backend", "triton", "--lengths", "2048", "--seeds", "1"], "triton"),
])  # fmt: skip
def test_what_is_not_here_is_a_usage_error(main, argv, words, monkeypatch, capsys):
    """Told in its last line."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("content", [b"not a checkpoint", b"", {"format": "other"}, Evil()])
def test_foreign_file_is_refused_without_running_it(content, path, capsys):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="checkpoint"):
        gen.load_checkpoint(path)
    assert "code ran" not in capsys.readouterr().out


def test_a_checkpoint_keeps_its_dtype_and_says_what_it_lacks(model, path):
    gen.save_checkpoint(path, copy.deepcopy(model).bfloat16())
    again = gen.load_checkpoint(path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in again.parameters()) and not again.training
    saved = torch.load(path, weights_only=True)
    for change, words in (
        (lambda s: s.pop("n_layers"), "lacks 'n_layers'"),
        (lambda s: s.update(n_layers=3), "configuration"),  # the weights' shape is another
        (lambda s: s["config"].update(depth=3), "another kind: .*depth"),
        (lambda s: s.update(config=[1]), "another kind"),
    ):
        broken = copy.deepcopy(saved)
        change(broken)
        torch.save(broken, path)
        with pytest.raises(ValueError, match=words):
            gen.load_checkpoint(path)
    whole = path.read_bytes()
    cut = [whole[: len(whole) * part // 8] for part in range(1, 8)]
    for foreign in (*cut, b"", b"abc", b"hello world this is text", b"PK\x03\x04" * 9):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match=f"checkpoint {path} "):
            gen.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        gen.load_checkpoint(path.with_name("none"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(model, path, monkeypatch):
    before = path.read_bytes()

    def full(saved, file):
        with open(file, "wb") if isinstance(file, (str, Path)) else file as out:
            out.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        gen.save_checkpoint(path, model)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_checkpoint_takes_the_place_of_what_is_there(model, path, monkeypatch):
    """The same bytes and permissions; a link goes on to be one, and no device becomes a file."""
    before, link = path.read_bytes(), path.with_name("link.pt")
    path.chmod(0o640)
    link.symlink_to(path)
    gen.save_checkpoint(link, model)
    assert link.is_symlink() and path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o640
    monkeypatch.setattr(os, "replace", pytest.fail)
    gen.save_checkpoint("/dev/null", model)


def test_a_compiled_model_is_saved_as_the_one_inside(model, path):
    whole, parts = torch.compile(model, backend="eager"), copy.deepcopy(model)
    parts.blocks[0] = torch.compile(parts.blocks[0], backend="eager")
    for compiled in (whole, parts):
        gen.save_checkpoint(path, compiled)
        again = gen.load_checkpoint(path).state_dict()
        assert all(torch.equal(again[name], x) for name, x in model.state_dict().items())


def test_a_model_can_be_trained_on_what_was_generated(model):
    tokens = gen.generate(model, torch.tensor([[1, 2, 3]]), 4).tokens
    assert not tokens.is_inference()
    model(tokens[:, :-1]).sum().backward()
    assert model.embedding.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)


def failing(result) -> set[str]:
    return {name for name, passed, _ in result.checks() if not passed}


@pytest.fixture(scope="module")
def case():
    return needle.make_case(8192, 8)


@pytest.mark.parametrize("seed", [0, 1])
def test_needle_is_selected_by_score_among_competing_keys(seed):
    result = needle.search(needle.make_case(8192, 8, seed=seed), n_sel=16)
    assert failing(result) == set(), result
    assert result.chance < 0.15 and result.found_share_without < 0.15


def latest(q, k_cmp, *, n_sel, q_start, **_):
    own = (q_start + torch.arange(q.shape[1])) // needle.L_SEL
    blocks = own[:, None] + torch.arange(1 - n_sel, 1)
    return blocks[None, :, None].expand(1, -1, needle.GROUPS, -1).to(torch.int32)


def of_another_needle(case):
    """Blocks that do not depend on the one that is searched."""
    sizes = dict(l=needle.L, d=needle.D, l_sel=needle.L_SEL, n_sel=16, q_start=8184)
    pooled = needle.mean_pool(case.k, needle.L, needle.D)
    given = needle.select_blocks(case.q[:, -8:], pooled, **sizes)
    return lambda *args, **kwargs: given


SWAPPED = dict(n_sel=16, select=lambda *args, **how: needle.select_blocks(*args, **how).flip(2))


@pytest.mark.parametrize(("how", "weak", "fails"), [
    (lambda case: dict(n_sel=needle.N_INIT + needle.N_LOCAL), 1, "found"),  # the forced ones
    (lambda case: dict(n_sel=16, select=latest), 1, "found"), (lambda case: SWAPPED, 1, "found"),
    (lambda case: dict(n_sel=16, select=of_another_needle(case)), 1, "not_chance"),
    (lambda case: dict(n_sel=16), 0.1, "control"),  # dense attention cannot find it either
], ids=["few", "recency", "groups", "given", "weak"])  # fmt: skip
def test_needle_test_sees_what_is_wrong(how, weak, fails, case):
    how = how(case)
    found = failing(needle.search(dataclasses.replace(case, q=case.q * weak), **how))
    assert fails in found and (how is SWAPPED or weak < 1 or found == {fails})


def test_needle_needs_room():
    with pytest.raises(ValueError, match="tokens"):
        needle.make_case(512, 8)


def test_needle_64k_gpu(cuda):
    argv = ["--tokens", "65536", "--queries", "32", "--device", "cuda", "--dtype", "bf16"]
    assert needle.main([*argv, "--backend", "triton"]) == 0
