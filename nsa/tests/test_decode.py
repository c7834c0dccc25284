"""Does decoding continue prefill exactly, emit compressed tokens on time, and count true reads?"""

import copy
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from nsa import attention, blocks, dispatch, oracle
from nsa.cache import BranchKV, NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.model import NSALanguageModel
from nsa.module import NSAAttention, NSABlock
from nsa.tests.helpers import assert_raises, randn

SIZES = dict(l=8, d=4, l_sel=8, n_sel=3, w=12)
CONFIG = NSAConfig(dim=24, heads=4, groups=2, d_k=8, d_v=6, **SIZES)
S, F64 = 43, torch.float64


@pytest.fixture(scope="module", params=["mlp", "mean"])
def layer(request):
    torch.manual_seed(0)
    module = NSAAttention(replace(CONFIG, phi=request.param)).double()
    x = randn(2, S, 24, seed=1, dtype=torch.float64)
    with torch.no_grad():
        return module, x, module(x)


def decode(module, x, split, steps, **kw):
    """Return the outputs of a prompt of `split` tokens and of steps of these sizes in turn, and
    the cache."""
    cache, sizes = module.make_cache(x.shape[0], S, **kw), itertools.cycle(steps)
    parts = [module.prefill(x[:, :split], cache)] if split else []
    while len(cache) < x.shape[1]:
        parts.append(module.step(x[:, len(cache) :][:, : next(sizes)], cache))
    return torch.cat(parts, 1), cache


# The cache knows only the values that phi makes, so that the kind of phi is a small part of these.
@pytest.mark.parametrize("layer, split, steps", [
    *(("mlp", split, [1]) for split in (0, 1, 7, 8, 9, 11, 12, 13, 16, 24, 31, 42, 43)),
    *(("mlp", 10, steps) for steps in ([2], [3, 1, 5], [8], [9, 1], [20, 2])),
    *(("mean", *case) for case in ((0, [1]), (8, [1]), (13, [1]), (10, [9, 1]))),
], ids=str, indirect=["layer"])  # fmt: skip
def test_decode_continues_prefill(layer, split, steps):
    """Also more tokens at once than the ring keeps room for (max_step 8)."""
    module, x, whole = layer
    # After 20 tokens no ring and no chosen block but the first holds a token of the prompt.
    n = min(S, split + 20) if split and steps == [1] else S
    out, cache = decode(module, x[:, :n], split, steps)
    torch.testing.assert_close(out, whole[:, :n], atol=1e-13, rtol=0)
    assert (cache.length, cache.emitted) == (n, blocks.num_compressed(n, 8, 4))
    assert cache.lens.tolist() == [n, n] and cache.lens.dtype == torch.int32


def test_layer_matches_the_oracle_end_to_end(layer):
    """Projections, rotary, phi, gates and output, rebuilt from the paper with the oracle."""
    module, x, whole = layer
    gate, at = module.gate, {"base": module.config.rope_base}
    q, k, v = (x @ module.qkv.weight.T).split((32, 48, 36), dim=-1)
    q = oracle.rotary(q.unflatten(-1, (4, 8)), **at)
    k = oracle.rotary(k.unflatten(-1, (6, 8)), **at).chunk(3, 2)
    v = v.unflatten(-1, (6, 6)).chunk(3, 2)
    cmp = [oracle.compress_mean(y[0], 8, 4) for y in (k, v)]
    if module.config.phi == "mlp":
        weights = lambda phi: (phi.position, *phi.inner.parameters(), *phi.outer.parameters())
        phis = (module.phi_k, k[0]), (module.phi_v, v[0])
        cmp = [oracle.compress_mlp(y, *weights(phi), 8, 4) for phi, y in phis]
    hidden = x @ gate.inner.weight.T + gate.inner.bias
    hidden = hidden / (1 + torch.exp(-hidden))
    gates = 1 / (1 + torch.exp(-(hidden @ gate.outer.weight.T + gate.outer.bias)))
    sizes = dict(l=8, d=4, l_sel=8, n_sel=3, window=12)
    gates = gates.reshape(2, S, 4, 3)
    out = oracle.nsa_attention(q, *cmp, k[1], v[1], k[2], v[2], gates, **sizes)
    torch.testing.assert_close(out.flatten(-2) @ module.out.weight.T, whole, atol=1e-12, rtol=0)


def tokens(n, seed):
    widths = (8, 6) * 3
    return BranchKV(*(randn(1, n, 2, w, seed=seed + i, dtype=F64) for i, w in enumerate(widths)))


def mean(x):
    return mean_pool(x, CONFIG.l, CONFIG.d)


def append(c, raw, *sizes):
    """Append the next tokens of raw, so many at a time."""
    for n in sizes:
        at = c.length
        c.append(BranchKV(*(x[:, at : at + n] for x in vars(raw).values())), mean, mean)


def cache(max_len=64, **kw):
    return NSACache(CONFIG, 1, max_len, **{"dtype": F64, **kw})


def test_full_cache_raises_or_grows():
    c, raw = cache(max_len=10), tokens(33, seed=5)
    append(c, raw, 10)
    assert_raises((ValueError, r"max_len=10 tokens, got 10 \+ 1", lambda: append(c, raw, 1)))
    assert c.length == 10
    for max_len, sizes in ((4, [33]), (10, [3] * 11)):  # at once, more than twice the room
        grown = cache(max_len=max_len, growable=True)
        append(grown, raw, *sizes)
        assert grown.length == 33 and grown.max_len >= 33
        assert torch.equal(grown.selectable()[0], raw.k_sel)
        torch.testing.assert_close(grown.compressed()[0], oracle.compress_mean(raw.k_cmp, 8, 4))


def test_a_cache_of_inference_mode_goes_on_outside():
    """One that grew there, too."""
    torch.manual_seed(0)
    module, x = NSAAttention(CONFIG).double(), randn(2, 70, CONFIG.dim, seed=1).double()
    with torch.no_grad():
        want = module(x)
        with torch.inference_mode():
            cache = module.make_cache(2, 32, growable=True, dtype=F64)
            module.prefill(x[:, :60], cache)
            chosen = cache.select(torch.tensor([1, 0]))
        got = [module.step(x[:, t : t + 1], cache) for t in range(60, 70)]
        turned = [module.step(x[[1, 0], t : t + 1], chosen) for t in range(60, 70)]
    torch.testing.assert_close(torch.cat(got, 1), want[:, 60:])
    torch.testing.assert_close(torch.cat(turned, 1), want[[1, 0], 60:])


@pytest.mark.parametrize("call, error, told", [
    (lambda c: c.row(-1), ValueError, "b must be at least 0, got -1"),
    (lambda c: c.row(2), ValueError, "b must be below the batch 2, got 2"),
    (lambda c: c.select([0]), TypeError, "rows must be a tensor"),
    (lambda c: c.select(torch.tensor([True, False])), TypeError, "rows must be integers"),
    (lambda c: c.select(torch.tensor([[0]])), TypeError, r"rows must be integers \[n\], got"),
    (lambda c: c.select(torch.tensor([2])), ValueError, "rows must name sequences 0 to 1"),
    (lambda c: c.select(torch.tensor([], dtype=torch.int32)), ValueError, "rows must name seq"),
    (lambda c: c.select(torch.tensor([0], device="meta")), ValueError, "rows must be on the cache"),
    (lambda c: NSACache(None, 1, 8), TypeError, "config must be an NSAConfig, got NoneType"),
    (lambda c: NSACache(CONFIG, 1, 8, dtype="fp16"), TypeError, "dtype must be a floating type"),
    (lambda c: NSACache(CONFIG, 1, 2**40), ValueError, "max_len must be at most 2147483647"),
])  # fmt: skip
def test_what_is_no_sequence_and_no_cache_is_named(call, error, told):
    with pytest.raises(error, match=told):
        call(NSACache(CONFIG, 2, 8))


@pytest.mark.parametrize("refused", range(4))
def test_a_cache_that_cannot_grow_is_as_it_was(refused, layer, monkeypatch):
    """Whichever of its four buffers there is no memory for."""
    module, x, _ = layer
    c = module.make_cache(2, 32, growable=True)
    module.prefill(x[:, :32], c)
    zeros, asked = torch.zeros, []

    def scarce(*size, **how):
        asked.append(size)
        if len(asked) > refused:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*size, **how)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros", scarce)
        module.step(x[:, 32:33], c)
    assert len(asked) == refused + 1 and (c.max_len, c.lengths) == (32, [32, 32])
    c.rewind(1)
    same_tokens(module, c, x, 31)


@pytest.mark.parametrize("lengths, k, v, error, told", [
    ([9], 6, 6, ValueError, r"lengths must be 2 numbers from 0 to 28, got \[9\]"),
    ([9, 29], 6, 6, ValueError, r"lengths must be 2 numbers from 0 to 28, got \[9, 29\]"),
    ([9, -1], 6, 6, ValueError, "lengths must be 2 numbers"),
    ([9, 28], 5, 6, ValueError, r"k_cmp must be \[2, 6, 2, 8\], got \[2, 5, 2, 8\]"),
    ([9, 28], 6, 7, ValueError, r"v_cmp must be \[2, 6, 2, 6\], got \[2, 7, 2, 6\]"),
    ([9, 12], 1, 1, ValueError, r"k_cmp must be \[2, 2, 2, 8\], got \[2, 1, 2, 8\]"),
    ([9, 12], 2, None, TypeError, "v_cmp must be a tensor"),
])  # fmt: skip
def test_a_cache_is_filled_with_all_of_its_tokens_or_none(lengths, k, v, error, told):
    c = NSACache(CONFIG, 2, 64, dtype=F64)
    new = BranchKV(*(x.expand(2, -1, -1, -1) for x in vars(tokens(28, seed=7)).values()))
    made = [n and randn(2, n, 2, w, seed=w, dtype=F64) for n, w in ((k, 8), (v, 6))]
    with pytest.raises(error, match=told):
        c.fill(new, *made, lengths)
    assert c.lengths == c.highest == c.lens.tolist() == [0, 0]
    c.fill(new, *(randn(2, 6, 2, w, seed=w, dtype=F64) for w in (8, 6)), torch.tensor([9, 28]))
    assert c.lengths == c.lens.tolist() == [9, 28] and type(c.length) is int


def test_a_cache_stays_on_its_device():
    """Whatever is PyTorch's default when it grows, or becomes part of another."""
    c, raw = cache(max_len=10, growable=True), tokens(33, seed=5)
    append(c, raw, 10)
    with torch.device("meta"):
        append(c, raw, 23)
        c = NSACache.stack([c])
    assert c.device.type == c.lens.device.type == "cpu"
    torch.testing.assert_close(c.compressed()[0], oracle.compress_mean(raw.k_cmp, 8, 4))


@pytest.mark.parametrize("T, made", [(8, 1), (40, 9)])
def test_a_phi_that_makes_too_few_tokens_is_refused(T, made):
    """Also of a whole prompt, of which the tokens that are missing would pass for zeros."""
    c, few = cache(), lambda raw: mean(raw)[:, 1:]
    with pytest.raises(
        ValueError, match=rf"phi_v must make \[1, {made}, 2, 6\] of \[1, {T}, 2, 6\]"
    ):
        c.append(tokens(T, seed=7), mean, few)
    assert c.lengths == c.lens.tolist() == [0]


def test_hostile_cache_use(layer):
    module, x, _ = layer
    bad = tokens(2, seed=6)
    wide = replace(bad, k_sel=bad.k_sel.expand(3, -1, -1, -1))
    used = module.make_cache(2, S)
    module.prefill(x[:, :5], used)
    stack = NSACache.stack
    assert_raises(
        (ValueError, "batch must be at least 1, got 0", lambda: NSACache(CONFIG, 0, 4)),
        (TypeError, "max_len must be an int, got 2.0", lambda: NSACache(CONFIG, 1, 2.0)),
        (TypeError, "must be a floating type", lambda: cache(dtype=torch.int32)),
        (TypeError, "caches must be NSACaches, got dict", lambda: stack([cache(), {}])),
        (ValueError, "agree in dtype", lambda: stack([cache(), cache(dtype=torch.float32)])),
        (ValueError, r"must be \[1, 2, 2, 8\], got \[3,", lambda: cache().append(wide, mean, mean)),
        (TypeError, "k_cmp must have the cache's torch.float32",
         lambda: cache(dtype=torch.float32).append(bad, mean, mean)),
        (ValueError, "must be empty .* it holds 5", lambda: module.prefill(x[:, :5], used)),
        (ValueError, r"x must be \[B, S, dim\].* got \[5", lambda: module.step(x[0, :5], used)),
        # Which would pass for both by broadcasting.
        (ValueError, "the cache's batch 2, got", lambda: module.step(x[:1, :1], used)),
        (ValueError, "T must be at most max_step=8, got 9", lambda: used.window(9)),
    )  # fmt: skip
    assert module.step(x[:, :0], used).shape == (2, 0, 24) and used.length == 5


def test_reads_per_step_follow_the_law(layer):
    module, x, _ = layer
    _, c = decode(module, x, 1, [1], count_reads=True)
    counted = c.reads()
    assert [r.total for r in counted] == [blocks.reads(s, **SIZES) for s in range(1, S + 1)]
    last = counted[-1]  # 9 compressed; 8 + 8 + 3 of blocks 0, 4, 5; 12 of the window
    assert (last.cmp, last.sel, last.win) == (9, 19, 12)
    row, q = c.row(0), randn(1, 1, 4, 8, seed=8, dtype=F64)
    attention.nsa_decode(q, row, None, q[..., :3])  # a view to read, not a step of the batch
    assert len(c.reads()) == S
    c.reset_reads()
    assert c.reads() == [] == decode(module, x, 40, [1])[1].reads()


@pytest.mark.parametrize("view, wide", [("window", (9, 19, 14)), ("compressed", (11, 19, 12))])
def test_a_view_that_is_too_wide_shows_in_the_reads(view, wide, layer, monkeypatch):
    module, x, _ = layer
    _, c = decode(module, x[:, : S - 1], S - 1, [1], count_reads=True)
    c.reset_reads()
    compressed = NSACache.compressed
    wider = {
        "window": lambda self, T: (self.k_win[:, :14], self.v_win[:, :14]),
        "compressed": lambda self: [y.repeat(1, 2, 1, 1)[:, :11] for y in compressed(self)],
    }
    monkeypatch.setattr(NSACache, view, wider[view])
    module.step(x[:, S - 1 :], c)
    (read,) = c.reads()
    assert (read.cmp, read.sel, read.win) == wide


@pytest.mark.parametrize("T, at", [(1, 43), (8, 43), (8, 9), (3, 20)])
def test_the_fused_steps_reads_are_those_of_the_devices_lengths(T, at, layer):
    module, x, _ = layer
    c, composed = (decode(module, x[:, :n], n, [1], count_reads=n < at)[1] for n in (at, at - T))
    composed.reset_reads()
    module.step(x[:, at - T : at], composed)
    (read,) = composed.reads()
    assert read.total == sum(blocks.reads(n, **SIZES) for n in range(at - T + 1, at + 1))
    none = torch.full((2, T, 2, 3), -1, dtype=torch.int32)
    c.record_reads(none)
    assert (c.reads()[0].cmp, c.reads()[0].sel, c.reads()[0].win) == (read.cmp, 0, read.win)
    c.lens[1] = T  # a device that disagrees with the host
    c.reset_reads()
    c.record_reads(none)
    with pytest.raises(AssertionError, match="groups read between"):
        c.reads()


@pytest.mark.parametrize("how", [dict(flags=Flags(force_parity=True)), dict(backend="reference")])
def test_every_way_to_run_follows_the_layers_settings(how):
    module, x = NSAAttention(CONFIG, **how), randn(1, 24, 24, seed=1)
    caches = [module.make_cache(1, 40) for _ in range(2)]
    for way in (
        lambda: module(x),
        lambda: [module.prefill(x[:, :n], c) for n, c in zip((20, 11), caches, strict=True)],
        lambda: module.step(x[:, :1], caches[0]),
        lambda: module.step(x[:, :1].repeat(2, 1, 1), NSACache.stack(caches)),
    ):
        with dispatch.trace() as taken:
            way()
        assert taken and {d.route for d in taken} == {dispatch.Route.REFERENCE}


def test_model_decodes_what_it_computes_in_one_pass():
    torch.manual_seed(1)
    model = NSALanguageModel(CONFIG, vocab_size=50, n_layers=2).double()
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(2))
    first, whole = ids[:, :13], model(ids)
    logits, caches = model.prefill(first)
    steps = [model.step(ids[:, at : at + 1], caches) for at in range(13, 30)]
    torch.testing.assert_close(torch.cat([logits, *steps], 1), whole.detach(), atol=1e-12, rtol=0)
    step = lambda caches: model.step(ids[:, :1], caches)
    assert_raises(
        (ValueError, "must be 2, one per layer, got 1", lambda: step(caches[:1])),
        (ValueError, "must be 2, one per layer, got 4", lambda: step(caches * 2)),
        (ValueError, "None or at least 13, got 12", lambda: model.prefill(first, max_len=12)),
        (ValueError, "max_len=13", lambda: step(model.prefill(first, max_len=13)[1])),
    )


def same_tokens(module, c, x, first):
    """What decoding gives from here on must be what a whole forward gives."""
    out = torch.cat([module.step(x[:, t : t + 1], c) for t in range(first, x.shape[1])], 1)
    torch.testing.assert_close(out, module(x)[:, first:], atol=1e-13, rtol=0)


@pytest.mark.parametrize("n, T", [(0, 5), (20, 1), (20, 8), (20, 15), (30, 12)])
def test_a_step_that_raises_leaves_the_cache_as_it_was(layer, n, T, monkeypatch):
    """Also a chunk that overwrites the rings: the step after it finds what was there before."""
    module, x, _ = layer
    c = module.make_cache(2, S)
    if n:
        module.prefill(x[:, :n], c)
    for error in (torch.cuda.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()):
        fails = mock.Mock(side_effect=error)
        with mock.patch.object(attention, "nsa_decode", fails), pytest.raises(type(error)):
            module.step(torch.full_like(x[:, :T], 9.0), c)
        assert fails.called and c.lengths == c.lens.tolist() == [n, n]
    if n == 0:
        assert c.highest == [0, 0]
        module.prefill(x[:, :5], c)
    c.rewind(0)
    same_tokens(module, c, x, n or 5)


def test_a_block_that_raises_behind_its_attention_takes_no_token():
    torch.manual_seed(0)
    block, x = NSABlock(CONFIG).double(), randn(2, 22, 24, seed=2, dtype=F64)
    c = block.attention.make_cache(2, 64)
    fails = lambda: mock.patch.object(block.mlp, "forward", side_effect=KeyboardInterrupt)
    with fails(), pytest.raises(KeyboardInterrupt):
        block.prefill(x[:, :20], c)
    assert c.lengths == [0, 0]
    block.prefill(x[:, :20], c)
    with fails(), pytest.raises(KeyboardInterrupt):
        block.step(x[:, 20:21], c)
    assert c.lengths == c.lens.tolist() == [20, 20]
    out = torch.cat([block.step(x[:, t : t + 1], c) for t in (20, 21)], 1)
    torch.testing.assert_close(out, block(x)[:, 20:], atol=1e-13, rtol=0)
    with pytest.raises(TypeError, match="cache must be an NSACache, got NoneType"):
        block.step(x[:, :1], None)


def test_a_model_whose_layer_raises_takes_no_token():
    torch.manual_seed(0)
    model = NSALanguageModel(CONFIG, 50, n_layers=2)
    tokens = torch.randint(50, (2, 14))
    _, caches = model.prefill(tokens[:, :12], 14, count_reads=True)
    last = model.blocks[1]
    raises = (last, "step", TypeError), (last.mlp, "forward", TypeError)
    for where, name, error in (*raises, (last, "step", KeyboardInterrupt)):
        with mock.patch.object(where, name, side_effect=error), pytest.raises(error):
            model.step(tokens[:, 12:13], caches)
        assert [c.lengths for c in caches] == [[12, 12]] * 2
        assert [len(c.reads()) for c in caches] == [1, 1]
    out = torch.cat([model.step(tokens[:, t : t + 1], caches) for t in (12, 13)], 1)
    torch.testing.assert_close(out, model(tokens)[:, 12:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [
    {"window": 9}, {"n_sel": 6}, {"n_local": 1}, {"rope_base": 500.0}, {"l": 16}, {"groups": 4},
    {"n_init": 0}, {"d": 2}, {"l_sel": 16}, {"heads": 2}, {"d_k": 6}, {"d_v": 8},
])  # fmt: skip
def test_a_cache_of_other_sizes_is_refused(layer, change):
    module, x, _ = layer
    other = NSACache(replace(CONFIG, **change), 2, S)
    ((name, value),) = change.items()
    ours = getattr(CONFIG, name)
    for call in (module.prefill, module.step):
        with pytest.raises(ValueError, match=f"with {name}={ours} as this one, got {name}={value}"):
            call(x[:, :3], other)
    assert other.length == 0
    other = NSACache(replace(module.config, dim=8), 2, S, dtype=x.dtype)  # it knows no dim
    module.step(x[:, :3], other)
    with pytest.raises(TypeError, match="cache must be an NSACache, got NoneType"):
        module.step(x[:, :3], None)


def test_sequences_take_back_what_each_was_refused(layer):
    module, x, _ = layer
    c, counted = module.make_cache(2, S), module.make_cache(2, S, count_reads=True)
    module.prefill(x[:, :20], c)
    module.step(torch.full_like(x[:, :4], 3.0), c)
    c.rewind([3, 1])
    assert c.lengths == [21, 23] and c.lens.tolist() == [21, 23]
    c.rewind([1, 3])
    same_tokens(module, c, x, 20)
    module.prefill(x[:, :9], counted)
    assert_raises(
        (ValueError, "an int or 2 of them", lambda: c.rewind([1])),
        (ValueError, r"n\[0\] must be an int from 0 to", lambda: c.rewind([9, 0])),
        (ValueError, r"n\[1\] must be", lambda: c.rewind([0, True])),
        (ValueError, "n must be an int from 0", lambda: c.rewind(2.0)),
        (ValueError, "same for all sequences with count_reads", lambda: counted.rewind([1, 0])),
    )


def test_an_emptied_cache_is_as_a_new_one(layer):
    module, x, _ = layer
    c = module.make_cache(2, S, count_reads=True)
    assert c and not len(c)  # empty, but there
    module.prefill(-x, c)
    assert len(c.reads()) == 1
    at = lambda: [getattr(c, n).data_ptr() for n in ("k_sel", "k_cmp", "k_win", "k_raw", "lens")]
    buffers = at()
    c.reset()
    assert c.lengths == c.lens.tolist() == c.highest == [0, 0] and c.reads() == []
    module.prefill(x[:, :7], c)
    same_tokens(module, c, x, 7)
    assert at() == buffers


def test_a_cache_for_weights_of_another_kind(layer):
    """Quantised layers have no weight to look at; dtype and device are given then."""
    module = copy.deepcopy(layer[0])
    module.qkv.weight = None
    c = module.make_cache(2, S, dtype=F64, device="cpu")
    assert (c.dtype, c.device.type) == (F64, "cpu")


class Adapter(torch.nn.Module):
    """An adapter around a linear layer, which keeps the weights elsewhere."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("kind", ["adapters", "quantised", "double under autocast"])
def test_a_model_of_other_weights_decodes(kind):
    torch.manual_seed(0)
    model, tokens = NSALanguageModel(CONFIG, 50, n_layers=2), torch.randint(50, (2, 14))
    if kind == "adapters":
        for block in model.blocks:
            block.attention.qkv = Adapter(block.attention.qkv)
    elif kind == "quantised":
        quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
        model = quantize(model, {torch.nn.Linear}, dtype=torch.qint8)
    else:
        model = model.double()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in kind), torch.no_grad():
        logits, caches = model.prefill(tokens[:, :13])
        out = torch.cat([logits, model.step(tokens[:, 13:], caches)], 1)
        close = dict(atol=0.1, rtol=0.1) if kind == "quantised" else dict(atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out, model(tokens), **close)
