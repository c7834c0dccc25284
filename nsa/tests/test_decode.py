"""Does decoding continue prefill exactly, emit compressed tokens on time, and count true reads?"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import nsa
from nsa import attention, blocks, dispatch, oracle
from nsa.cache import BranchKV, NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.model import NSALanguageModel
from nsa.module import NSAAttention
from nsa.tests.helpers import randn

CONFIG = NSAConfig(dim=24, heads=4, groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=3, w=12)
S = 43


@pytest.fixture(scope="module", params=["mlp", "mean"])
def layer(request):
    torch.manual_seed(0)
    module = NSAAttention(replace(CONFIG, phi=request.param)).double()
    x = randn(2, S, 24, seed=1, dtype=torch.float64)
    with torch.no_grad():
        return module, x, module(x)


def decode(module, x, split, steps, **kw):
    cache = module.make_cache(x.shape[0], kw.pop("max_len", S), **kw)
    parts = [module.prefill(x[:, :split], cache)] if split else []
    at = split
    while at < x.shape[1]:
        size = steps[len(parts) % len(steps)]
        parts.append(module.step(x[:, at : at + size], cache))
        at += size
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("split", [0, 1, 7, 8, 9, 11, 12, 13, 16, 24, 31, 42, 43])
def test_decode_continues_prefill(layer, split):
    module, x, whole = layer
    out, cache = decode(module, x, split, [1])
    torch.testing.assert_close(out, whole, atol=1e-13, rtol=0)
    assert (cache.length, cache.emitted) == (S, blocks.num_compressed(S, 8, 4))
    assert cache.lens.tolist() == [S, S] and cache.lens.dtype == torch.int32


@pytest.mark.parametrize("steps", [[2], [3, 1, 5], [8], [9, 1], [20, 2]], ids=str)
def test_multi_token_steps(layer, steps):
    """Also more tokens at once than the ring keeps room for (max_step 8)."""
    module, x, whole = layer
    out, _ = decode(module, x, 10, steps)
    torch.testing.assert_close(out, whole, atol=1e-13, rtol=0)


def test_layer_matches_the_oracle_end_to_end(layer):
    """Projections, rotary, phi, gates and output, rebuilt from the paper with the oracle."""
    module, x, whole = layer
    c = module.config
    at = {"base": c.rope_base}
    q, k, v = (x @ module.qkv.weight.T).split((32, 48, 36), dim=-1)
    q = oracle.rotary(q.unflatten(-1, (4, 8)), **at)
    k = oracle.rotary(k.unflatten(-1, (6, 8)), **at)
    v = v.unflatten(-1, (6, 6))
    phis = []
    for phi, y in ((module.phi_k, k[:, :, :2]), (module.phi_v, v[:, :, :2])):
        if c.phi == "mean":
            phis.append(oracle.compress_mean(y, 8, 4))
        else:
            weights = (phi.position, phi.inner.weight, phi.inner.bias, phi.outer.weight,
                       phi.outer.bias)  # fmt: skip
            phis.append(oracle.compress_mlp(y, *weights, 8, 4))
    gate = module.gate
    hidden = x @ gate.inner.weight.T + gate.inner.bias
    hidden = hidden / (1 + torch.exp(-hidden))
    gates = 1 / (1 + torch.exp(-(hidden @ gate.outer.weight.T + gate.outer.bias)))
    out = oracle.nsa_attention(
        q, *phis, k[:, :, 2:4], v[:, :, 2:4], k[:, :, 4:], v[:, :, 4:],
        gates.reshape(2, S, 4, 3), l=8, d=4, l_sel=8, n_sel=3, window=12,
    )  # fmt: skip
    torch.testing.assert_close(out.flatten(-2) @ module.out.weight.T, whole, atol=1e-12, rtol=0)


# ---- the cache -----------------------------------------------------------------------------------


def tokens(n, seed, batch=1):
    like = dict(dtype=torch.float64)
    return BranchKV(*(
        randn(batch, n, 2, 8 if i % 2 == 0 else 6, seed=seed + i, **like) for i in range(6)
    ))  # fmt: skip


def mean(x):
    return mean_pool(x, CONFIG.l, CONFIG.d)


def cache(max_len=64, **kw):
    return NSACache(CONFIG, 1, max_len, dtype=torch.float64, **kw)


@pytest.mark.parametrize("prefill", [0, 3, 8, 10, 21])
def test_compressed_tokens_appear_exactly_when_their_block_fills(prefill):
    c = cache()
    raw = tokens(45, seed=1)
    parts = [prefill] * bool(prefill) + [1] * (45 - prefill)
    at = 0
    for n in parts:
        before = c.emitted
        c.append(BranchKV(*(x[:, at : at + n] for x in vars(raw).values())), mean, mean)
        at += n
        if n == 1:
            assert (c.emitted - before == 1) == (at >= 8 and (at - 8) % 4 == 0), at
        assert c.pending == at - 4 * c.emitted < 8
    k, v = c.compressed()
    torch.testing.assert_close(k, oracle.compress_mean(raw.k_cmp, 8, 4))
    torch.testing.assert_close(v, oracle.compress_mean(raw.v_cmp, 8, 4))
    k, v = c.selectable()
    assert torch.equal(k, raw.k_sel) and torch.equal(v, raw.v_sel)
    for T in (1, 5, 8):
        k, v = c.window(T)
        assert torch.equal(k, raw.k_win[:, 45 - T - 11 :])
        assert torch.equal(v, raw.v_win[:, 45 - T - 11 :])


def test_full_cache_raises_or_grows():
    c = cache(max_len=10)
    c.append(tokens(10, seed=3), mean, mean)
    with pytest.raises(ValueError, match="max_len=10 tokens, got 10 \\+ 1"):
        c.append(tokens(1, seed=4), mean, mean)
    assert c.length == 10
    at_once = cache(max_len=4, growable=True)
    at_once.append(tokens(33, seed=5), mean, mean)  # more than twice the room
    assert at_once.length == 33 and torch.equal(at_once.selectable()[0], tokens(33, seed=5).k_sel)
    grown = cache(max_len=10, growable=True)
    raw = tokens(33, seed=5)
    for a in range(0, 33, 3):
        grown.append(BranchKV(*(x[:, a : a + 3] for x in vars(raw).values())), mean, mean)
    assert grown.length == 33 and grown.max_len >= 33
    assert torch.equal(grown.selectable()[0], raw.k_sel)
    torch.testing.assert_close(grown.compressed()[0], oracle.compress_mean(raw.k_cmp, 8, 4))


def test_hostile_cache_use(layer):
    module, x, _ = layer
    bad = tokens(2, seed=6)
    wide = BranchKV(**{**vars(bad), "k_sel": bad.k_sel.expand(3, -1, -1, -1)})
    used = module.make_cache(2, S)
    module.prefill(x[:, :5], used)
    stack = NSACache.stack
    for error, words, call in (
        (ValueError, "batch must be at least 1, got 0", lambda: NSACache(CONFIG, 0, 4)),
        (TypeError, "max_len must be an int, got 2.0", lambda: NSACache(CONFIG, 1, 2.0)),
        (TypeError, "must be a floating type", lambda: NSACache(CONFIG, 1, 2, dtype=torch.int32)),
        (TypeError, "caches must be NSACaches, got dict", lambda: stack([cache(), {}])),
        (ValueError, "agree in max_step, got 8 and 2", lambda: stack([cache(), cache(max_step=2)])),
        (ValueError, "agree in dtype", lambda: stack([cache(), NSACache(CONFIG, 1, 64)])),
        (ValueError, r"must be \[1, 2, 2, 8\], got \[3,", lambda: cache().append(wide, mean, mean)),
        (TypeError, "k_cmp must have the cache's torch.float32",
         lambda: NSACache(CONFIG, 1, 8).append(bad, mean, mean)),
        (ValueError, "must be empty .* it holds 5", lambda: module.prefill(x[:, :5], used)),
        (ValueError, r"x must be \[B, S, dim\].* got \[5", lambda: module.step(x[0, :5], used)),
        # Which would pass for both by broadcasting.
        (ValueError, "the cache's batch 2, got", lambda: module.step(x[:1, :1], used)),
        (ValueError, "T must be at most max_step=8, got 9", lambda: used.window(9)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    none = x[:, :0]
    out = module.step(none, used)
    assert out.shape == (2, 0, 24) and out is not none and used.length == 5


# ---- reads ---------------------------------------------------------------------------------------


def test_reads_per_step_follow_the_law(layer):
    module, x, _ = layer
    _, c = decode(module, x, 1, [1], count_reads=True)
    counted = c.reads()
    sizes = dict(l=8, d=4, l_sel=8, n_sel=3, w=12)
    assert [r.total for r in counted] == [blocks.reads(s, **sizes) for s in range(1, S + 1)]
    last = counted[-1]  # 9 compressed; 8 + 8 + 3 of blocks 0, 4, 5; 12 of the window
    assert (last.cmp, last.sel, last.win) == (9, 19, 12)
    c.reset_reads()
    assert c.reads() == []


def test_reads_are_counted_from_the_blocks_really_used(layer):
    module, x, _ = layer
    _, c = decode(module, x, 40, [1], count_reads=True)
    c.reset_reads()
    fewer = torch.tensor([5, -1, -1], dtype=torch.int32).expand(2, 1, 2, 3)
    c.record_reads(fewer)
    assert c.reads()[0].sel == 3
    c.reset_reads()
    uneven = fewer.clone()
    uneven[0, 0, 0, 1] = 4
    c.record_reads(uneven.sort(-1).values)
    with pytest.raises(AssertionError, match="between 3 and 11"):
        c.reads()


@pytest.mark.parametrize("view, wide", [("window", (9, 19, 14)), ("compressed", (11, 19, 12))])
def test_a_view_that_is_too_wide_shows_in_the_reads(view, wide, layer, monkeypatch):
    module, x, _ = layer
    _, c = decode(module, x[:, : S - 1], 40, [1], count_reads=True)
    c.reset_reads()
    good = getattr(NSACache, view)

    def wider(self, *args):
        if view == "window":
            return self.k_win[:, :14], self.v_win[:, :14]
        k, v = good(self)
        return k.repeat(1, 2, 1, 1)[:, :11], v.repeat(1, 2, 1, 1)[:, :11]

    monkeypatch.setattr(NSACache, view, wider)
    module.step(x[:, S - 1 :], c)
    (read,) = c.reads()
    assert (read.cmp, read.sel, read.win) == wide


@pytest.mark.parametrize("T, at", [(1, 43), (8, 43), (8, 9), (3, 20)])
def test_the_fused_steps_reads_are_those_of_the_devices_lengths(T, at, layer):
    module, x, _ = layer
    sizes = dict(l=8, d=4, l_sel=8, n_sel=3, w=12)
    _, c = decode(module, x[:, :at], at, [1])
    composed = module.make_cache(2, S, count_reads=True)
    module.prefill(x[:, : at - T], composed)
    composed.reset_reads()
    module.step(x[:, at - T : at], composed)
    (read,) = composed.reads()
    assert read.total == sum(blocks.reads(n, **sizes) for n in range(at - T + 1, at + 1))
    none = torch.full((2, T, 2, 3), -1, dtype=torch.int32)
    c.record_reads(none)
    assert (c.reads()[0].cmp, c.reads()[0].win) == (read.cmp, read.win)
    c.lens[1] = T  # a device that disagrees with the host
    c.reset_reads()
    c.record_reads(none)
    with pytest.raises(AssertionError, match="groups read between"):
        c.reads()


@pytest.mark.parametrize("how", [dict(flags=Flags(force_parity=True)), dict(backend="reference")])
def test_every_way_to_run_follows_the_layers_settings(how):
    torch.manual_seed(0)
    module, x = NSAAttention(CONFIG, **how), randn(1, 24, 24, seed=1)
    caches = [module.make_cache(1, 40) for _ in range(2)]
    ways = (
        lambda: module(x),
        lambda: [module.prefill(x[:, :n], c) for n, c in zip((20, 11), caches, strict=True)],
        lambda: module.step(x[:, :1], caches[0]),
        lambda: module.step(x[:, :1].repeat(2, 1, 1), NSACache.stack(caches)),
    )
    for way in ways:
        with dispatch.trace() as taken:
            way()
        assert taken and {d.route for d in taken} == {dispatch.Route.REFERENCE}


def test_decoding_takes_a_softmax_scale(layer):
    module, x, _ = layer
    c = module.make_cache(2, S)
    module.prefill(x[:, :30], c)
    q = randn(2, 3, 4, 8, seed=8, dtype=x.dtype)
    gates = randn(2, 3, 4, 3, seed=9, dtype=x.dtype).sigmoid()
    got = attention.nsa_decode(q, c, None, gates, softmax_scale=0.7)[0]
    want = attention.nsa_decode(q * 0.7 * 8**0.5, c, None, gates)[0]
    torch.testing.assert_close(got, want, atol=1e-13, rtol=0)


def test_no_counting_unless_asked(layer):
    module, x, _ = layer
    _, c = decode(module, x, 40, [1])
    assert c.reads() == []
    _, c = decode(module, x, S - 1, [1], count_reads=True)
    q, gates = randn(1, 1, 4, 8, seed=8, dtype=x.dtype), torch.ones(1, 1, 4, 3, dtype=x.dtype)
    attention.nsa_decode(q, c.row(0), None, gates)  # a view to read, not a step of the batch
    assert len(c.reads()) == 2


def test_model_decodes_what_it_computes_in_one_pass():
    torch.manual_seed(1)
    model = nsa.NSALanguageModel(CONFIG, vocab_size=50, n_layers=2).double()
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(2))
    whole = model(ids)
    logits, caches = model.prefill(ids[:, :13])
    parts = [logits]
    for at in range(13, 30):
        parts.append(model.step(ids[:, at : at + 1], caches))
    torch.testing.assert_close(torch.cat(parts, 1), whole.detach(), atol=1e-12, rtol=0)
    for some in (caches[:1], caches * 2):
        with pytest.raises(ValueError, match=f"must be 2, one per layer, got {len(some)}"):
            model.step(ids[:, :1], some)
    with pytest.raises(ValueError, match="max_len must be None or at least 13, got 12"):
        model.prefill(ids[:, :13], max_len=12)
    with pytest.raises(ValueError, match="max_len=13"):
        model.step(ids[:, :1], model.prefill(ids[:, :13], max_len=13)[1])


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

        def fails(*args, _error=error, **kwargs):
            assert c.length == n + T
            raise _error

        with monkeypatch.context() as patch:
            patch.setattr(attention, "nsa_decode", fails)
            with pytest.raises(type(error)):
                module.step(torch.full_like(x[:, :T], 9.0), c)
        assert c.lengths == [n, n] and c.lens.tolist() == [n, n]
    if n == 0:
        assert c.highest == [0, 0]
        module.prefill(x[:, :5], c)
    c.rewind(0)
    same_tokens(module, c, x, n or 5)


def test_a_model_whose_layer_raises_takes_no_token(monkeypatch):
    torch.manual_seed(0)
    model = NSALanguageModel(CONFIG, 50, n_layers=2)
    tokens = torch.randint(50, (2, 14))
    _, caches = model.prefill(tokens[:, :12], 14, count_reads=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    last = model.blocks[1]
    for where, name, call, error in (
        (last, "step", None, TypeError), (last.mlp, "forward", None, TypeError),
        (last, "step", interrupted, KeyboardInterrupt),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(where, name, call)
            with pytest.raises(error):
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
    c = module.make_cache(2, S)
    module.prefill(x[:, :20], c)
    module.step(torch.full_like(x[:, :4], 3.0), c)
    c.rewind([3, 1])
    assert c.lengths == [21, 23] and c.lens.tolist() == [21, 23]
    c.rewind([1, 3])
    same_tokens(module, c, x, 20)
    for n, words in (([1], "an int or 2 of them"), ([9, 0], r"n\[0\] must be an int from 0 to"),
                     ([0, True], r"n\[1\] must be"), (2.0, "n must be an int from 0")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            c.rewind(n)
    counted = module.make_cache(2, S, count_reads=True)
    module.prefill(x[:, :9], counted)
    with pytest.raises(ValueError, match="the same for all sequences with count_reads"):
        counted.rewind([1, 0])


def test_an_emptied_cache_is_as_a_new_one(layer):
    module, x, _ = layer
    c = module.make_cache(2, S, count_reads=True)
    assert c and not len(c)  # empty, but there
    module.prefill(-x, c)
    assert len(c.reads()) == 1
    buffers = [getattr(c, n).data_ptr() for n in ("k_sel", "k_cmp", "k_win", "k_raw", "lens")]
    c.reset()
    assert c.lengths == [0, 0] and c.lens.tolist() == [0, 0] and c.highest == [0, 0]
    assert c.reads() == []
    module.prefill(x[:, :7], c)
    same_tokens(module, c, x, 7)
    assert [getattr(c, n).data_ptr() for n in ("k_sel", "k_cmp", "k_win", "k_raw", "lens")
            ] == buffers  # fmt: skip


def test_a_cache_for_weights_of_another_kind(layer):
    """Quantised layers have no weight to look at; dtype and device are given then."""
    module = copy.deepcopy(layer[0])
    module.qkv.weight = None
    c = module.make_cache(2, S, dtype=torch.float64, device="cpu")
    assert (c.dtype, c.device.type) == (torch.float64, "cpu")
