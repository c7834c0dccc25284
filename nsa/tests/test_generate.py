"""Does cached generation equal the full forward pass, and does selection find its needle?"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from nsa import generate as gen
from nsa.config import NSAConfig
from nsa.model import NSALanguageModel
from scripts import needle

# Blocks small enough that 40 tokens cross every edge: compression, selection and the window.
CONFIG = NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return NSALanguageModel(CONFIG, vocab_size=256, n_layers=2).eval()


@torch.no_grad()
def greedy_by_full_forward(model, tokens, n):
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 13])
def test_greedy_generation_equals_full_forward(model, prompt_len):
    prompt = torch.randint(0, 256, (2, prompt_len), generator=torch.Generator().manual_seed(1))
    out = gen.generate(model, prompt, 27)
    assert torch.equal(out.tokens, greedy_by_full_forward(model, prompt, 27))
    assert out.prefill_tokens_per_s > 0 and out.decode_tokens_per_s > 0


def test_rates_are_those_of_the_whole_batch(model, monkeypatch):
    monkeypatch.setattr(gen, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    out = gen.generate(model, torch.zeros(3, 5, dtype=torch.long), 7)
    assert (out.prefill_tokens_per_s, out.decode_tokens_per_s) == (15, 18)  # a second each
    assert gen.generate(model, torch.zeros(3, 5).long(), 1).decode_tokens_per_s is None


def test_sampling_is_fixed_by_the_seed(model):
    prompt = torch.zeros(1, 5, dtype=torch.long)

    def sample(seed):
        return gen.generate(model, prompt, 20, temperature=1.0, seed=seed).tokens.tolist()

    assert sample(1) == sample(1) != sample(2)


def test_top_1_is_greedy_and_top_k_stays_among_the_best():
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(0)
    best = logits.argmax(-1, keepdim=True)
    assert torch.equal(gen.pick(logits, 0.0, None, g), best)
    assert torch.equal(gen.pick(logits, 5.0, 1, g), best)
    drawn = gen.pick(logits, 5.0, 3, g)
    assert (logits.topk(3).indices == drawn).any(-1).all()
    assert not torch.equal(drawn, best)


def test_temperature_sharpens():
    logits = torch.tensor([[1.0, 0.0]]).expand(4000, 2)
    g = torch.Generator().manual_seed(0)
    for temperature in (0.5, 2.0):
        share = (gen.pick(logits, temperature, None, g) == 0).float().mean().item()
        expected = torch.tensor([1.0, 0.0]).div(temperature).softmax(-1)[0].item()
        assert share == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("kwargs, name", [
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 1, "temperature": -1.0}, "temperature"),
    ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature"),
    ({"max_new_tokens": 1, "top_k": 0}, "top_k"),
    ({"max_new_tokens": 1}, "prompt"),  # an empty one
])  # fmt: skip
def test_bad_settings_are_named(model, kwargs, name):
    with pytest.raises(ValueError, match=name):
        gen.generate(model, torch.zeros(1, 4 * (name != "prompt"), dtype=torch.long), **kwargs)


def test_command_line_generates_from_a_saved_model(model, tmp_path, capsys):
    path = tmp_path / "m.pt"
    gen.save_checkpoint(path, model)
    options = ["--prompt", "KING", "--max_new_tokens", "9", "--device", "cpu"]
    assert gen.main([str(path), *options]) == 0
    out, err = capsys.readouterr()
    prompt = torch.tensor([list(b"KING")])
    expected = bytes(greedy_by_full_forward(model, prompt, 9)[0].tolist())
    assert out == expected.decode("utf-8", errors="replace") + "\n"
    assert "tokens/s" in err


def test_every_option_reaches_generate(model, tmp_path, monkeypatch):
    path, real, seen = tmp_path / "m.pt", gen.generate, []
    gen.save_checkpoint(path, model)
    monkeypatch.setattr(gen, "generate", lambda *a, **how: (seen.append(how), real(*a, **how))[1])
    options = ["--temperature", "0.7", "--top_k", "5", "--seed", "3", "--max_new_tokens", "2",
               "--kv-cache-dtype", "fp8_e4m3"]  # fmt: skip
    assert gen.main([str(path), *options, "--device", "cpu"]) == 0
    assert seen == [dict(temperature=0.7, top_k=5, seed=3, graph=False, kv_cache_dtype="fp8_e4m3")]


@pytest.mark.parametrize("device, words", [
    ("cuda", "CUDA devices"), ("cuda:99", "'cuda:99' is not here"), ("gpu", "cpu, cuda or cuda:N"),
    ("meta", "got 'meta'"),
])  # fmt: skip
def test_a_device_that_is_not_here_is_a_usage_error(device, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        gen.main(["m.pt", "--device", device])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_the_cache_is_as_large_as_the_text(model, monkeypatch):
    seen = []
    layer = model.blocks[0].attention
    make = layer.make_cache
    keep = lambda *args, **kwargs: seen.append(make(*args, **kwargs)) or seen[-1]
    monkeypatch.setattr(layer, "make_cache", keep)
    gen.generate(model, torch.zeros(1, 5, dtype=torch.long), 7)
    assert [(c.max_len, c.growable) for c in seen] == [(12, False)]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("content", [b"not a checkpoint", b"", {"format": "other"}, Evil()])
def test_foreign_file_is_refused_without_running_it(content, tmp_path, capsys):
    path = tmp_path / "m.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="checkpoint"):
        gen.load_checkpoint(path)
    assert "code ran" not in capsys.readouterr().out


def test_weights_of_another_shape_are_refused(model, tmp_path):
    path = tmp_path / "m.pt"
    gen.save_checkpoint(path, model)
    saved = torch.load(path, weights_only=True)
    saved["n_layers"] = 3
    torch.save(saved, path)
    with pytest.raises(ValueError, match="configuration"):
        gen.load_checkpoint(path)


# ---- needle --------------------------------------------------------------------------------------


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


def swapped(*args, **kwargs):
    return needle.select_blocks(*args, **kwargs).flip(2)


def of_another_needle(case):
    """Blocks that do not depend on the one that is searched."""
    given = needle.select_blocks(
        case.q[:, -8:], needle.mean_pool(case.k, needle.L, needle.D), l=needle.L, d=needle.D,
        l_sel=needle.L_SEL, n_sel=16, q_start=8184,
    )  # fmt: skip
    return lambda *args, **kwargs: given


@pytest.mark.parametrize(("how", "weak", "fails"), [
    (lambda case: dict(n_sel=needle.N_INIT + needle.N_LOCAL), 1, "found"),  # the forced ones
    (lambda case: dict(n_sel=16, select=latest), 1, "found"),
    (lambda case: dict(n_sel=16, select=swapped), 1, "found"),
    (lambda case: dict(n_sel=16, select=of_another_needle(case)), 1, "not_chance"),
    (lambda case: dict(n_sel=16), 0.1, "control"),  # dense attention cannot find it either
], ids=["few", "recency", "groups", "given", "weak"])  # fmt: skip
def test_needle_test_sees_what_is_wrong(how, weak, fails, case):
    found = failing(needle.search(dataclasses.replace(case, q=case.q * weak), **how(case)))
    assert fails in found and (how(case).get("select") is swapped or weak < 1 or found == {fails})


def test_needle_needs_room():
    with pytest.raises(ValueError, match="tokens"):
        needle.make_case(512, 8)


@pytest.mark.parametrize("argv, words", [
    (["--backend", "triton"], "triton"), (["--device", "cuda"], "no CUDA device"),
    (["--backend", "triton", "--lengths", "2048", "--seeds", "1"], "triton"),
])  # fmt: skip
def test_needle_says_in_a_line_what_is_not_here(argv, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        needle.main(["--tokens", "2048", "--queries", "2", *argv])
    assert stopped.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_needle_64k_gpu(cuda):
    argv = ["--tokens", "65536", "--queries", "32", "--device", "cuda", "--dtype", "bf16"]
    assert needle.main([*argv, "--backend", "triton"]) == 0


def test_a_model_can_be_trained_on_what_was_generated(model):
    tokens = gen.generate(model, torch.tensor([[1, 2, 3]]), 4).tokens
    assert not tokens.is_inference()
    model(tokens[:, :-1]).sum().backward()
    assert model.embedding.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)


def test_a_checkpoint_keeps_its_dtype_and_says_what_it_lacks(model, tmp_path):
    path = tmp_path / "m.pt"
    gen.save_checkpoint(path, copy.deepcopy(model).bfloat16())
    again = gen.load_checkpoint(path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in again.parameters()) and not again.training
    saved = torch.load(path, weights_only=True)
    for change, words in (
        (lambda s: s.pop("n_layers"), "lacks 'n_layers'"),
        (lambda s: s["config"].update(depth=3), "another kind: .*depth"),
        (lambda s: s.update(config=[1]), "another kind"),
    ):
        broken = copy.deepcopy(saved)
        change(broken)
        torch.save(broken, path)
        with pytest.raises(ValueError, match=words):
            gen.load_checkpoint(path)
