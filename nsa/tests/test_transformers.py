"""NSA in Transformers' own models, by name: equal to dense attention where it must be, trained,
packed, padded, saved and loaded, and refused by name where it does not belong."""

import copy
from inspect import signature
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from nsa import nsa_attention  # noqa: E402
from nsa.compress import mean_pool  # noqa: E402
from nsa.integrations import transformers as integration  # noqa: E402
from nsa.tests.helpers import assert_raises  # noqa: E402

SIZES = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "window": 6, "backend": "reference"}
# The cache's name in forward(), by release: the other one is, or becomes, an error.
LAYER = transformers.models.llama.modeling_llama.LlamaAttention
CACHE = next(x for x in ("cache", "past_key_values") if x in signature(LAYER.forward).parameters)
KINDS = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}


def make(kind: str = "llama", name: str = "nsa", nsa: dict | None = None, **more):
    config_class, model_class = (getattr(transformers, n) for n in KINDS[kind])
    config = config_class(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, nsa=dict(nsa or SIZES), **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=name).double().eval()


def learnt(**how) -> torch.nn.Module:
    """A model with NSA's own parameters."""
    model = make(**how)
    integration.add_nsa_parameters(model)
    return model.double()


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


def heads(*sizes: int) -> list[torch.Tensor]:
    """Random [2, h, 40, 8] for each of `sizes`."""
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(2, h, 40, 8, generator=gen, dtype=torch.float64) for h in sizes]


@pytest.fixture
def spied(monkeypatch):
    """What nsa_attention is called with."""
    spy = mock.Mock(side_effect=nsa_attention)
    monkeypatch.setattr(integration, "nsa_attention", spy)
    return spy.call_args_list


def test_the_function_is_nsa_attention():
    layer, (q, k, v) = make().model.layers[0].self_attn, heads(4, 2, 2)
    got, _ = integration.nsa_attention_forward(layer, q, k, v, None, scaling=0.3)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sizes = {n: s for n, s in SIZES.items() if n != "backend"}
    gates = torch.full((2, 40, 4, 3), 1 / 3, dtype=torch.float64)
    cmp = mean_pool(k, 8, 4), mean_pool(v, 8, 4)
    want = nsa_attention(q, *cmp, k, v, k, v, gates, softmax_scale=0.3, **sizes)
    torch.testing.assert_close(got, want)


def test_padding_changes_nothing(spied):
    """One call of NSA for each layer, whatever the number of sequences and their lengths; one of
    padding alone is in nobody's way."""
    model, ids = make(), tokens(5, 30)
    mask = torch.ones_like(ids)
    mask[0, 25:], mask[1, :11], mask[4] = 0, 0, 0
    got = model(ids, attention_mask=mask).logits
    assert [(list(c.args[0].shape), c.kwargs["cu_seqlens"].tolist()) for c in spied] == 2 * [
        ([104, 4, 8], [0, 25, 44, 74, 104])
    ]
    assert got.isfinite().all()
    for row, there, one in zip(got[:4], mask.bool(), ids, strict=False):
        torch.testing.assert_close(row[there], model(one[None, there]).logits[0])


@pytest.mark.parametrize("kind, cached", [("llama", True), ("qwen3", False)])
def test_position_ids_that_begin_anew_are_a_pack(kind, cached):
    """Each sequence as if alone, gradients too; in training the cache is on by default."""
    model, ids, lengths = learnt(kind=kind).train(), tokens(2, 30), (11, 5, 14)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    got = model(ids, position_ids=positions, use_cache=cached).logits
    parts = ids.split(lengths, 1)
    want = torch.cat([model(part, use_cache=cached).logits for part in parts], 1)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(x.logsumexp(-1).sum(), model.parameters()) for x in (got, want)]
    torch.testing.assert_close(*grads)
    one = model(ids[:1], position_ids=positions[:1], use_cache=cached).logits  # not expanded
    torch.testing.assert_close(one, want[:1])
    pad = lambda x: F.pad(x, (3, 2))  # a batch that a collator made of packs
    more = dict(attention_mask=pad(torch.ones_like(ids)), position_ids=pad(positions))
    padded = model(pad(ids), use_cache=cached, **more).logits[:, 3:-2]
    torch.testing.assert_close(padded, want)


def test_positions_of_one_sequence_are_no_pack():
    """Neither an offset nor a second chunk begins anew; the same tensor changed in place does."""
    model, ids = make(), tokens(1, 24)
    want = model(ids).logits
    positions = torch.arange(24)[None]
    torch.testing.assert_close(model(ids, position_ids=positions).logits, want)
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 14), (14, 24))]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    positions[:, 10:] -= 10
    changed = model(ids, position_ids=positions).logits
    torch.testing.assert_close(changed[:, 10:], model(ids[:, 10:]).logits)
    with pytest.raises(NotImplementedError, match="empty cache only, got 24 tokens"):
        model(ids, position_ids=positions, **{CACHE: cache})
    with torch.no_grad(), pytest.raises(NotImplementedError, match="holds packed ones"):
        cache = model(ids, position_ids=positions).past_key_values
        model(ids[:, :1], position_ids=torch.tensor([[24]]), **{CACHE: cache})


def test_cu_seq_lens_are_a_pack():
    """As flash-attn's integration takes them, and without a look at positions."""
    model, ids = make(), tokens(1, 40)
    ends = torch.tensor([0, 15, 40], dtype=torch.int64)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    of = {f"{name}_{x}": y for name, y in (("cu_seq_lens", ends), ("max_length", 25)) for x in "qk"}
    got = model(ids, position_ids=positions, use_cache=False, **of).logits
    want = [model(part).logits for part in ids.split((15, 25), 1)]
    torch.testing.assert_close(got, torch.cat(want, 1))


def test_it_trains_and_saves():
    model, ids, losses = learnt().train(), tokens(2, 33), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if step == 0:
            grads = {n: p.grad for n, p in model.named_parameters()}
            assert not [n for n, g in grads.items() if g is None or not g.abs().sum()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    again = learnt()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


def test_checkpointing_changes_no_gradient():
    model, ids = learnt().train(), tokens(2, 33)
    gradients = lambda: torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    want = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), want)


@pytest.mark.parametrize("kind, phi", [
    ("llama", None), ("llama", "mlp"), ("llama", "mean"), ("qwen3", "mlp"),
])  # fmt: skip
def test_a_saved_model_is_loaded_as_nsa(kind, phi, tmp_path, capfd):
    """By from_pretrained alone, AutoModelForCausalLM's too, however often it is saved again."""
    model = make(kind).float()
    if phi:
        integration.add_nsa_parameters(model, phi)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.config._attn_implementation == "nsa"
    ids = tokens(2, 33)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert again.config._attn_implementation == "nsa"
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert again.state_dict().keys() == model.state_dict().keys()
    assert "UNEXPECTED" not in (said := capfd.readouterr().err) and "MISSING" not in said
    if phi:
        dense = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
        with pytest.warns(RuntimeWarning, match="runs without them, by attn_implementation='sdpa'"):
            dense(ids)
        model.model.layers[0].self_attn.nsa = None
        with pytest.raises(ValueError, match="before it is loaded"):
            model(ids)


def test_missing_parameters_are_named(tmp_path):
    model = make().float()
    model.config.nsa["phi"] = "mlp"  # as it is said to be, but the weights lack them
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lack gate.inner.weight: .* call add_nsa_parameters"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
              image_size=32, patch_size=8)  # fmt: skip


def llava(implementation):
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=make().config.to_dict() | {"attn_implementation": None},
        image_token_index=60, image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration
    return model._from_config(config, attn_implementation=implementation).eval()


def served(model):
    """Names of the layers with NSA's own parameters."""
    return [name for name, module in model.named_modules() if hasattr(module, "phi_k")]


def test_of_a_multimodal_model_the_language_is_served(tmp_path):
    """Its vision tower keeps its own implementation, or is refused by name; parameters go to
    language layers alone; what is loaded again has the tower's default."""
    ids, image = tokens(1, 40).clamp(max=59), torch.randn(1, 3, 32, 32)
    ids[:, 3:19] = 60
    model, dense, everywhere = (llava(x) for x in ({"text_config": "nsa"}, "sdpa", "nsa"))
    dense.load_state_dict(model.state_dict())
    features = [m.get_image_features(image).pooler_output[0] for m in (model, dense)]
    assert torch.equal(*features)
    integration.add_nsa_parameters(model)
    assert served(model) == [f"model.language_model.layers.{i}.self_attn.nsa" for i in (0, 1)]
    want = model(input_ids=ids, pixel_values=image).logits
    with pytest.raises(NotImplementedError, match='CLIPAttention is not .*{"text_config": "nsa"}'):
        everywhere(input_ids=ids, pixel_values=image)
    with pytest.raises(ValueError, match="causal self-attention layers"):
        integration.add_nsa_parameters(everywhere.model.vision_tower)
    assert len(integration.add_nsa_parameters(everywhere)) == 2
    everywhere.load_state_dict(model.state_dict())
    for saved in (model, everywhere):
        saved.save_pretrained(tmp_path)
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
        assert torch.equal(again(input_ids=ids, pixel_values=image).logits, want)


def test_encoders_and_cross_attention_are_refused():
    sides = {f"{side}_{n}": 2 for side in ("encoder", "decoder")
             for n in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=100, d_model=32, **sides, num_mel_bins=8, max_source_positions=20,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration
    model = model._from_config(config, attn_implementation="nsa").eval()
    states = dict(input_ids=tokens(1, 20), encoder_hidden_states=torch.randn(1, 20, 32))
    integration.add_nsa_parameters(model)
    assert served(model) == [f"model.decoder.layers.{i}.self_attn.nsa" for i in (0, 1)]
    layer, cross = (make().model.layers[0].self_attn for _ in range(2))
    cross.is_cross_attention, (q, k) = True, heads(4, 2)
    forward = integration.nsa_attention_forward
    # Some models say so of one query, which a kernel need not mask.
    forward(layer, q[:, :, :1], k, k, None, is_causal=False)
    whisper, llama = (f"which {name}Attention is not" for name in ("Whisper", "Llama"))
    assert_raises(*((NotImplementedError, words, call) for words, call in (
        (whisper, lambda: model.model.encoder(torch.randn(1, 8, 40))),
        (whisper, lambda: model.model.decoder(**states)),
        (llama, lambda: forward(layer, q, k, k, None, is_causal=False)),
        (llama, lambda: forward(layer, q, k[:, :, :5], k[:, :, :5], None)),
        (llama, lambda: forward(cross, q, k, k, None)),
    )))  # fmt: skip


def test_masks_that_are_not_causal_are_refused():
    """Whatever a mask function is called: it is asked what it shows."""
    from transformers import masking_utils as masks

    # Of a mask that is as wide as no keys are, dense attention takes the first columns.
    given = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert integration.nsa_mask(1, 4, 4, attention_mask=given[:1]) is None
    assert torch.equal(integration.nsa_mask(2, 4, 4, attention_mask=given), given[:, :4])
    narrow = integration.nsa_mask(2, 4, 4, attention_mask=given[:, 1:4])
    assert narrow.tolist() == [[1, 1, 1, 0], [0, 1, 1, 0]]
    sequence = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    packed = masks.and_masks(
        masks.causal_mask_function, masks.packed_sequence_mask_function(sequence)
    )
    ask = lambda f, **more: integration.nsa_mask(1, 8, 8, mask_function=f, **more)
    assert ask(packed).tolist() == [[1, 1, 1, 2, 2, 2, 2, 2]]
    for other, more in (
        (masks.or_masks(packed, lambda b, h, q, k: (q < 2) & (k < 2)), {}),
        (masks.bidirectional_mask_function, {}),
        (masks.sliding_window_causal_mask_function(3), {}), (packed, {"use_vmap": True}),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="causal attention of whole sequences only"):
            ask(other, **more)


@pytest.mark.parametrize("kind, phi, cached", [
    ("llama", None, True), ("llama", "mean", False), ("qwen3", "mlp", True), ("qwen3", None, False),
])  # fmt: skip
def test_mixed_precision(kind, phi, cached, spied):
    """Weights in fp32 under bf16 autocast: attention gets bf16 alone, and nothing else changes."""
    model = make(kind, nsa={**SIZES, "n_sel": 16}).float().train()
    if phi:
        integration.add_nsa_parameters(model, phi)
    dtypes = lambda: {x.dtype for call in spied for x in call.args}
    ids = tokens(2, 21)
    want = model(ids, use_cache=cached).logits
    assert dtypes() == {torch.float32}
    spied.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, use_cache=cached)
        generated = generate(model.eval(), ids, use_cache=cached)
    assert dtypes() == {torch.bfloat16} and generated.shape == (2, 24)
    torch.testing.assert_close(out.logits.float(), want, rtol=0, atol=0.02)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def generate(model, ids, **how) -> torch.Tensor:
    ones = torch.ones_like(ids)
    return model.generate(ids, attention_mask=ones, max_new_tokens=3, do_sample=False, **how)


def test_what_nsa_lacks_is_refused():
    ids, hole, model, (q, k) = tokens(1, 12), torch.ones(1, 12), make(), heads(4, 2)
    hole[0, 4] = 0
    integration.add_nsa_parameters(model)
    forward = integration.nsa_attention_forward
    call = lambda mask=None, **how: (
        lambda: forward(make().model.layers[0].self_attn, q, k, k, mask, **how)
    )
    add = lambda module: lambda: integration.add_nsa_parameters(module)
    assert_raises(
        (NotImplementedError, "dropout=0.1", lambda: make(attention_dropout=0.1).train()(ids)),
        (NotImplementedError, "dynamic cache only",
         lambda: generate(make(), ids, cache_implementation="static")),
        *((NotImplementedError, "inside sequence 0",
           lambda at=at: make()(ids, attention_mask=hole, position_ids=at))
          for at in (None, hole.cumsum(1).long() - 1)),
        *((NotImplementedError, f"does not take {name}, got 3", call(**{name: 3}))
          for name in ("sliding_window", "softcap", "s_aux", "position_bias")),
        (NotImplementedError, r"got attention_mask \[1, 1, 9, 9\]", call(torch.ones(1, 1, 9, 9))),
        (ValueError, "got 'blocks'", lambda: make(nsa={"blocks": 3})(ids)),
        (ValueError, "it has", add(model)),
        (ValueError, "q_proj and k_proj", add(torch.nn.Linear(2, 2))),
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="output_attentions=True gives no weights"):
        make()(ids, output_attentions=True)


def test_gates_that_nobody_took_are_in_nobodys_way():
    """Another attention function takes none; one that fails leaves them behind."""
    model, ids = make(), tokens(1, 20)
    parts = [part.double() for part in integration.add_nsa_parameters(model)]
    for implementation in ("nsa", "sdpa"):
        model.set_attn_implementation(implementation)
        model(ids)
        assert [part.gates for part in parts] == [None, None]  # taken, and not kept in memory
    for part in parts:
        part.gates = part.gate(torch.randn(1, 2, 32, dtype=torch.float64))
    again = [m for m in copy.deepcopy(model).modules() if isinstance(m, type(parts[0]))]
    assert [part.gates for part in again] == [None, None]
