"""generate() of Transformers' models with NSA: an NSACache inside of the dynamic cache gives what
all keys made anew at every step give."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from nsa import fp8, launches  # noqa: E402
from nsa.integrations.transformers_cache import NSACacheLayer  # noqa: E402
from nsa.tests.test_transformers import CACHE, learnt, make, tokens  # noqa: E402

NEW = 13


def padded(pad: int = 9) -> dict[str, torch.Tensor]:
    """Two prompts of 21 tokens, of which the second's first ones are padding."""
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    ids[1, :pad], mask[1, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache: bool, **more) -> torch.Tensor:
    torch.manual_seed(1)
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": cache, **more}
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("how, pad, plain", [
    ({}, 9, True), ({"num_beams": 3}, 9, False), ({"num_beams": 3}, 0, True),
    ({"do_sample": True, "num_return_sequences": 3}, 9, False),
    ({"prefill_chunk_size": 8}, 9, False), ({"prefill_chunk_size": 8}, 0, True),
    ({"prompt_lookup_num_tokens": 10}, None, False), ({"assistant_model": None}, None, False),
], ids=str)  # fmt: skip
def test_a_cache_changes_nothing(how, pad, plain):
    """Nor do drafts: assisted decoding crops the cache after every round, here by up to ten."""
    model = make() if plain else learnt()
    if pad is None:
        inputs = {"input_ids": tokens(1, 8).repeat(1, 4), "attention_mask": torch.ones(1, 32)}
        want = generate(model, inputs, False)
    else:
        inputs = padded(pad)
        sampling = {name: x for name, x in how.items() if name != "prefill_chunk_size"}
        want = generate(model, inputs, False, **sampling)
    if "assistant_model" in how:
        helper = learnt()
        helper.generation_config.num_assistant_tokens = 10
        helper.generation_config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": helper}
    assert torch.equal(generate(model, inputs, True, **how), want)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("pad", [0, 9])
def test_what_is_compressed_is_kept(pad, how, monkeypatch):
    """phi sees the prompt once, and then the last l tokens whenever a block is full."""
    model, inputs, seen = learnt(), padded(pad=pad), []
    phi = model.model.layers[1].self_attn.nsa.phi_v
    forward = phi.forward

    def spy(x, cu_seqlens=None):
        seen.append(x.shape[:-2].numel())
        return forward(x, cu_seqlens)

    monkeypatch.setattr(phi, "forward", spy)
    generate(model, inputs, True, **how)
    beams = how.get("num_beams", 1)
    assert seen[0] == beams * (42 - pad)
    # d = 4 of which one length is due in each step, or one of two lengths that differ by one.
    due = [n for n in range(22, 21 + NEW) if n % 4 == 0 or (n - pad) % 4 == 0]
    assert seen[1:] == [2 * beams * 8] * len(due)


def filled(pad: int = 9):
    """A model, its cache behind a padded prompt of 21 and four steps, and what it was given."""
    model, inputs = learnt(), padded(pad=pad)
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.cat([inputs["input_ids"], tokens(2, 4, seed=3)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
    with torch.no_grad():
        model(ids[:, :21], attention_mask=mask[:, :21], **{CACHE: cache})
        for at in range(21, 25):
            model(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], **{CACHE: cache})
    assert all(type(x) is NSACacheLayer and x.nsa is not None for x in cache.layers)
    return model, cache, ids, mask


def last_logits(model, ids, mask, cache=None, new: int = 1) -> torch.Tensor:
    with torch.no_grad():
        part = ids if cache is None else ids[:, -new:]
        return model(part, attention_mask=mask, **{CACHE: cache}, use_cache=cache is not None
                     ).logits[:, -new:]  # fmt: skip


CHANGES = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 1])), lambda x: x[[1, 1]]),
    "repeat": (lambda c: c.batch_repeat_interleave(3), lambda x: x.repeat_interleave(3, 0)),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda x: x[1:]),
    "mask": (lambda c: c.batch_select_indices(torch.tensor([True, False])), lambda x: x[:1]),
    "crop": (lambda c: c.crop(-3), lambda x: x[:, :-3]),
    "far": (lambda c: c.crop(-14), lambda x: x[:, :-14]),  # into the second one's padding's end
    "plain": (lambda c: [x.leave() for x in c.layers], lambda x: x),
    "copy": (lambda c: copy.deepcopy(c), lambda x: x),
}


@pytest.mark.parametrize("pad, new", [(9, 1), (9, 11), (0, 11)], ids=["one", "many", "no-pad"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_cache_is_as_one_made_anew(pad, change, new):
    """As the dynamic cache changes, and further tokens of any number behind it."""
    model, cache, ids, mask = filled(pad)
    on_cache, on_inputs = CHANGES[change]
    result = on_cache(cache)
    cache = result if change == "copy" else cache
    ids, mask = on_inputs(ids), on_inputs(mask)
    ids = torch.cat([ids, tokens(len(ids), new, seed=5)], 1)
    mask = torch.cat([mask, torch.ones(len(ids), new, dtype=torch.long)], 1)
    assert cache.get_seq_length() == ids.shape[1] - new
    got = last_logits(model, ids, mask, cache, new)
    torch.testing.assert_close(got, last_logits(model, ids, mask, new=new))
    assert all(layer.nsa is not None for layer in cache.layers)  # at once, or filled anew


pairs = lambda a, b: ((a.keys, b.keys), (a.values, b.values))


def test_others_see_keys_and_values():
    """As a dynamic cache has them: [B, G, N, D], and by itself again where gradients are taken or
    another implementation attends."""
    model, cache, ids, mask = filled()
    plain = transformers.DynamicCache(config=model.config)
    ones = torch.ones_like(mask)
    with torch.enable_grad():
        model(ids, attention_mask=mask, **{CACHE: plain})
    assert type(plain.layers[0]).__name__ == "DynamicLayer"
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        for a, b in pairs(ours, theirs):
            assert a.shape == b.shape
            torch.testing.assert_close(a[0], b[0])
            torch.testing.assert_close(a[1, :, 9:], b[1, :, 9:])
    more = torch.cat([ids, tokens(2, 1)], 1), torch.cat([mask, ones[:, :1]], 1)
    with torch.enable_grad():
        got = model(more[0][:, -1:], attention_mask=more[1], **{CACHE: cache}).logits
    torch.testing.assert_close(got, last_logits(model, *more))
    assert cache.layers[0].nsa is None and got.requires_grad
    model, cache, ids, mask = filled(pad=0)
    model.set_attn_implementation("sdpa")
    got = last_logits(model, ids, None, cache)
    assert cache.layers[0].nsa is None
    cache.crop(-1)
    torch.testing.assert_close(got, last_logits(model, ids, None, cache))
    cache.reset()
    assert cache.get_seq_length() == 0


def test_other_padding_than_before_is_told():
    model, cache, ids, mask = filled()
    with pytest.raises(ValueError, match=r"padding that it had .*: \[0, 9\] columns"):
        last_logits(model, ids, torch.ones(2, 26, dtype=torch.long), cache)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"padding that it had"):
        last_logits(model, ids, torch.cat([mask, mask[:1, :1].expand(2, 1)], 1), cache)


def test_fp8_keys_stand_for_those_of_a_plain_cache():
    """Of the first layer to the last bit; logits of steps are as near as four bits are."""
    model, how = learnt().float(), dict(return_dict_in_generate=True, output_logits=True)
    plain = generate(model, padded(), True, **how)
    model.config.nsa["kv_cache_dtype"] = "fp8_e4m3"
    for more in ({}, {"prefill_chunk_size": 8}):
        quantized = generate(model, padded(), True, **how, **more)
        for x, y in zip(plain.logits[1:], quantized.logits[1:], strict=True):
            assert 1e-4 * x.norm() < (x - y).norm() < 0.03 * x.norm()
    assert torch.equal(plain.sequences, quantized.sequences)
    ours, theirs = (x.past_key_values.layers[0] for x in (quantized, plain))
    assert ours.nsa.k_cmp.dtype == ours.nsa.v_win.dtype == fp8.E4M3
    ours.leave()
    one = torch.ones(2, theirs.keys.shape[2])
    for a, b in pairs(ours, theirs):
        want = fp8.dequantize(fp8.quantize(b, one), one, b.dtype)
        assert torch.equal(a[0, :, :21], want[0, :, :21])
        assert torch.equal(a[1, :, 9:21], want[1, :, 9:21])
    model.config.nsa["kv_cache_dtype"] = "fp8"
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'fp8_e4m3', got 'fp8'"):
        generate(model, padded(), True)


@pytest.mark.parametrize("plain, stored", [
    (False, "auto"), (True, "auto"), (False, "fp8_e4m3"),
], ids=["learnt", "plain", "fp8"])  # fmt: skip
def test_a_step_on_a_gpu_appends_in_one_launch(plain, stored, kernel_device):
    """The kernel and PyTorch append the same, bit by bit where both have the same input, and their
    logits agree."""
    if stored == "fp8_e4m3" and kernel_device == "cuda":
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("e4m3 before SM 8.9")
    ids = tokens(2, 20).to(kernel_device)
    models, caches, logits = [], [], []
    for backend in ("triton", "reference"):
        sizes = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "window": 16, "backend": backend}
        sizes["kv_cache_dtype"] = stored
        model = make(nsa=sizes) if plain else learnt(nsa=sizes)
        models.append(model.to(kernel_device, torch.float16))
        model(ids[:, :9])  # one without parameters is known from its first call on
        caches.append(transformers.DynamicCache(config=model.config))
    with torch.no_grad():
        for at, end in (0, 16), (16, 17), (17, 20):
            with launches.recording() as counts:
                logits = [
                    model(ids[:, at:end], **{CACHE: cache}).logits
                    for model, cache in zip(models, caches, strict=True)
                ]
            assert counts.get("_decode_append_kernel", 0) == (2 if at else 0)  # one a layer
            torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)
    for name in ("k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw", "lens"):
        made = (fp8.as_bytes(getattr(cache.layers[0].nsa, name)) for cache in caches)
        assert torch.equal(*made), name
