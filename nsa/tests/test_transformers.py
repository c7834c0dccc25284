"""NSA in Transformers' own models, by name: equal to dense attention where it must be, trained,
generating with a cache and with padding."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from nsa import nsa_attention  # noqa: E402
from nsa.compress import mean_pool  # noqa: E402
from nsa.integrations import transformers as integration  # noqa: E402

SIZES = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "window": 6, "backend": "reference"}
KINDS = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def make(kind: str = "llama", name: str = "nsa", nsa: dict | None = None, **more):
    config_class, model_class = (getattr(transformers, n) for n in KINDS[kind])
    config = config_class(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, nsa=dict(nsa or SIZES), **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=name).double().eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_selected_is_dense_attention(kind):
    """With the selection gate alone and every block chosen the logits are the eager model's."""
    nsa = make(kind, nsa={**SIZES, "n_sel": 16})
    dense = make(kind, "eager")
    dense.load_state_dict(nsa.state_dict())
    for part in integration.add_nsa_parameters(nsa):
        part.double()
        with torch.no_grad():
            part.gate.outer.weight.zero_()
            part.gate.outer.bias.copy_(torch.tensor([-60.0, 60.0, -60.0]).repeat(4))
    ids = tokens(2, 45)
    # The eager model's softmax is fp32 whatever the model is.
    torch.testing.assert_close(nsa(ids).logits, dense(ids).logits, rtol=0, atol=1e-6)
    short = make(kind)  # three blocks are not all: the test above could fail
    assert (short(ids).logits - dense(ids).logits).abs().max() > 1e-3


def test_the_function_is_nsa_attention():
    model = make()
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 40, 8, generator=gen, dtype=torch.float64) for h in (4, 2, 2))
    layer = model.model.layers[0].self_attn
    got, _ = integration.nsa_attention_forward(layer, q, k, v, None, scaling=0.3)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sizes = {n: s for n, s in SIZES.items() if n != "backend"}
    want = nsa_attention(
        q, mean_pool(k, 8, 4), mean_pool(v, 8, 4), k, v, k, v,
        torch.full((2, 40, 4, 3), 1 / 3, dtype=torch.float64), softmax_scale=0.3, **sizes,
    )  # fmt: skip
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("learnt", [False, True], ids=["plain", "learnt"])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_with_cache_equals_without(kind, learnt):
    model = make(kind)
    if learnt:
        for part in integration.add_nsa_parameters(model):
            part.double()
    ids = tokens(2, 21)
    run = lambda cache: model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False,
        use_cache=cache, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    with_cache, without = run(True), run(False)
    assert torch.equal(with_cache.sequences, without.sequences)
    for a, b in zip(with_cache.logits, without.logits, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_changes_nothing():
    model = make()
    one, two = tokens(1, 30, seed=5), tokens(1, 17, seed=6)
    pad = torch.zeros(1, 13, dtype=torch.long)
    alone = [model(x).logits for x in (one, two)]
    for left in (True, False):
        ids = torch.cat([one, torch.cat([pad, two] if left else [two, pad], 1)])
        got = model(ids, attention_mask=(ids != 0).long()).logits
        torch.testing.assert_close(got[:1], alone[0])
        torch.testing.assert_close(got[1:, 13:] if left else got[1:, :17], alone[1])
    ids = torch.cat([one, torch.cat([pad, two], 1)])
    both = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=9, do_sample=False)
    single = model.generate(
        two, attention_mask=torch.ones_like(two), max_new_tokens=9, do_sample=False
    )
    assert torch.equal(both[1, 13:], single[0])


def test_a_sequence_of_padding_alone_is_in_nobodys_way():
    model, ids = make(), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1] = 0
    got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[:1], model(ids[:1]).logits)
    assert got.isfinite().all()


def test_a_mask_is_that_of_the_keys():
    longer = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    assert integration.nsa_mask(1, 4, 4, attention_mask=longer[:1]) is None
    got = integration.nsa_mask(2, 4, 4, attention_mask=longer)
    assert torch.equal(got, longer[:, 2:])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_it_trains_and_saves(checkpointing, tmp_path):
    model = make().float().train()
    integration.add_nsa_parameters(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if step == 0:
            silent = [n for n, p in model.named_parameters()
                      if p.grad is None or not p.grad.abs().sum()]  # fmt: skip
            assert not silent
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    again = make().float()
    integration.add_nsa_parameters(again)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("phi", ["mlp", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_by_folder(kind, phi, tmp_path):
    model = make(kind).float()
    integration.add_nsa_parameters(model, phi)
    model.save_pretrained(tmp_path)
    loaded = integration.load_pretrained(type(model), tmp_path)
    assert type(loaded) is type(model)
    ids = tokens(2, 33)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = integration.load_pretrained(type(model), tmp_path / "again", dtype=torch.bfloat16)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    # Transformers itself drops the parameters, with no more than a warning.
    dropped = type(model).from_pretrained(tmp_path, attn_implementation="nsa")
    with pytest.raises(ValueError, match=r"load_pretrained"):
        dropped(ids)


def test_a_model_without_nsa_parameters_is_not_loaded_as_one_with_them(tmp_path):
    model = make().float()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="then call add_nsa_parameters"):
        integration.load_pretrained(type(model), tmp_path)
    model.config.nsa["phi"] = "mlp"  # as it is said to be, but the weights are missing
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="then call add_nsa_parameters"):
        integration.load_pretrained(type(model), tmp_path)


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("phi", [None, "mlp", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(kind, phi, cached, monkeypatch):
    """Weights in fp32 under bf16 autocast: attention gets bf16 alone, and nothing else changes."""
    model = make(kind, nsa={**SIZES, "n_sel": 16}).float().train()
    if phi:
        integration.add_nsa_parameters(model, phi)
    seen = set()

    def spy(*tensors, **kwargs):
        seen.update(x.dtype for x in tensors)
        return nsa_attention(*tensors, **kwargs)

    monkeypatch.setattr(integration, "nsa_attention", spy)
    ids = tokens(2, 21)
    want = model(ids, use_cache=cached).logits
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, use_cache=cached)
        generated = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False,
            use_cache=cached,
        )  # fmt: skip
    assert seen == {torch.bfloat16} and generated.shape == (2, 24)
    torch.testing.assert_close(out.logits.float(), want, rtol=0, atol=0.02)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_what_nsa_lacks_is_refused():
    ids = tokens(1, 12)
    with pytest.raises(NotImplementedError, match="dropout=0.1"):
        make(attention_dropout=0.1).train()(ids)
    with pytest.raises(NotImplementedError, match="dynamic cache only"):
        make().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3,
                        do_sample=False, cache_implementation="static")  # fmt: skip
    with pytest.raises(NotImplementedError, match="packed by position_ids"):
        packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
        make()(ids, position_ids=packed, use_cache=False)
    with pytest.raises(NotImplementedError, match="inside sequence 0"):
        hole = torch.ones_like(ids)
        hole[0, 4] = 0
        make()(ids, attention_mask=hole)
    layer, (q, k) = make().model.layers[0].self_attn, (torch.zeros(1, h, 12, 8) for h in (4, 2))
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "cu_seq_lens_q"):
        with pytest.raises(NotImplementedError, match=f"does not take {name}, got 3"):
            integration.nsa_attention_forward(layer, q, k, k, None, **{name: 3})
    with pytest.raises(NotImplementedError, match=r"got attention_mask \[1, 1, 12, 12\]"):
        integration.nsa_attention_forward(layer, q, k, k, torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match="got 'blocks'"):
        make(nsa={"blocks": 3})(ids)
    model = make()
    integration.add_nsa_parameters(model)
    with pytest.raises(ValueError, match="it has"):
        integration.add_nsa_parameters(model)
    with pytest.raises(ValueError, match="q_proj and k_proj"):
        integration.add_nsa_parameters(torch.nn.Linear(2, 2))


def test_gates_that_nobody_took_are_in_nobodys_way():
    """Another attention function takes none; one that fails leaves them behind."""
    model = make()
    parts = [part.double() for part in integration.add_nsa_parameters(model)]
    model(torch.randint(61, (1, 20)))
    assert [part.gates for part in parts] == [None, None]  # taken, and not kept in memory
    model.set_attn_implementation("sdpa")
    model(torch.randint(61, (1, 20)))
    assert [part.gates for part in parts] == [None, None]
    for part in parts:
        part.gates = part.gate(torch.randn(1, 2, 32, dtype=part.gate.inner.weight.dtype))
    again = [m for m in copy.deepcopy(model).modules() if isinstance(m, type(parts[0]))]
    assert [part.gates for part in again] == [None, None]


def test_a_class_that_is_no_model_is_named(tmp_path):
    with pytest.raises(TypeError, match="the model's own class, .* got AutoModelForCausalLM"):
        integration.load_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    with pytest.raises(TypeError, match="attn_implementation must not be given"):
        integration.load_pretrained(
            transformers.LlamaForCausalLM, tmp_path, attn_implementation="nsa"
        )
