"""Does decoding continue prefill exactly, emit compressed tokens on time, and count true reads?"""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa import blocks, oracle
from nsa.cache import BranchKV, NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.module import NSAAttention
from nsa.tests.helpers import randn

CONFIG = NSAConfig(dim=24, heads=4, groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=3, w=12)
S = 43


@pytest.fixture(scope="module", params=["mlp", "mean"])
def layer(request):
    torch.manual_seed(0)
    from dataclasses import replace

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
    torch.testing.assert_close(
        out.flatten(-2) @ module.out.weight.T, whole, atol=1e-12, rtol=0
    )


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


def test_ring_rows_are_position_modulo_rows():
    c = cache()
    raw = tokens(50, seed=2)
    c.append(raw, mean, mean)
    rows = c.k_win.shape[1]
    assert rows == CONFIG.w + c.max_step - 1
    for p in range(50 - rows, 50):
        assert torch.equal(c.k_win[:, p % rows], raw.k_win[:, p])


def test_full_cache_raises_or_grows():
    c = cache(max_len=10)
    c.append(tokens(10, seed=3), mean, mean)
    with pytest.raises(ValueError, match="max_len=10 tokens, got 10 \\+ 1"):
        c.append(tokens(1, seed=4), mean, mean)
    assert c.length == 10
    grown = cache(max_len=10, growable=True)
    raw = tokens(33, seed=5)
    for a in range(0, 33, 3):
        grown.append(BranchKV(*(x[:, a : a + 3] for x in vars(raw).values())), mean, mean)
    assert grown.length == 33 and grown.max_len >= 33
    assert torch.equal(grown.selectable()[0], raw.k_sel)
    torch.testing.assert_close(grown.compressed()[0], oracle.compress_mean(raw.k_cmp, 8, 4))


def test_hostile_cache_use(layer):
    module, x, _ = layer
    with pytest.raises(ValueError, match="batch must be a positive int, got 0"):
        NSACache(CONFIG, 0, 4)
    with pytest.raises(ValueError, match="max_len must be a positive int, got 2.0"):
        NSACache(CONFIG, 1, 2.0)
    with pytest.raises(ValueError, match=r"k_sel must be \[1, 2, 2, 8\], got \[3, 2, 2, 8\]"):
        bad = tokens(2, seed=6)
        cache().append(BranchKV(**{**vars(bad), "k_sel": bad.k_sel.expand(3, -1, -1, -1)}),
                       mean, mean)  # fmt: skip
    with pytest.raises(TypeError, match="k_cmp must have the cache's torch.float32"):
        NSACache(CONFIG, 1, 8).append(tokens(2, seed=6), mean, mean)
    used = module.make_cache(2, S)
    module.prefill(x[:, :5], used)
    with pytest.raises(ValueError, match="cache must be empty for prefill, it holds 5"):
        module.prefill(x[:, :5], used)
    with pytest.raises(ValueError, match=r"x must be \[B, S, dim\] with dim=24, got \[5, 24\]"):
        module.step(x[0, :5], used)
    with pytest.raises(ValueError, match="T must be at most max_step=8, got 9"):
        used.window(9)
    assert module.step(x[:, :0], used).shape == (2, 0, 24) and used.length == 5


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


def test_no_counting_unless_asked(layer):
    module, x, _ = layer
    _, c = decode(module, x, 40, [1])
    assert c.reads() == []


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
    with pytest.raises(ValueError, match="caches must be 2, one per layer, got 1"):
        model.step(ids[:, :1], caches[:1])
    with pytest.raises(ValueError, match="max_len=13"):
        model.step(ids[:, :1], model.prefill(ids[:, :13], max_len=13)[1])
