"""FP8 caches: what is stored, and that attention is that over what the stored numbers stand for.

Expected results come from the oracle on keys and values rounded to the nearest of all numbers of
e4m3. Cases of FP8 among others: test_kvcache.py, test_decode_kernels.py, test_decode_cluster.py.
"""

import functools
import math

import pytest
import torch
from torch import Tensor

from nsa import fp8, nsa_with_kvcache, oracle
from nsa.cache import NSACache
from nsa.config import NSAConfig
from nsa.module import NSAAttention
from nsa.tests.helpers import assert_raises, randn
from nsa.tests.test_kvcache import E4M3, NUMBERS, B, Caches, G, Tokens, close, descales, rounded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_number_becomes_the_nearest(dtype):
    """NaN stays, and infinity is the largest."""
    x = torch.cat([randn(500, seed=1), randn(200, seed=2) * 1e-2, randn(200, seed=3) * 1000])
    special = [0.0, -0.0, 448.0, -448.0, 449.0, 1e4, -6e4, 2.0**-9, 2.0**-10, 1e-7, 17.0, 19.0]
    special += [math.inf, -math.inf, math.nan]
    x = torch.cat([x, torch.tensor(special)]).to(dtype)[None, :, None, None]
    got = fp8.quantize(x, torch.ones(1, 1))
    assert got.dtype == E4M3 and got[0, -1].isnan().all()
    near = x[:, :-1].double().clamp(-448, 448)
    off = (got[:, :-1].double() - near).abs()
    assert torch.equal(off, (near[..., None] - NUMBERS).abs().amin(-1))
    back = fp8.dequantize(got, torch.full((1, 1), 0.25), dtype)
    torch.testing.assert_close(back, (got.double() / 4).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_nan_is_seen_by_those_that_see_its_token():
    tokens, caches = Tokens(scales=descales(8)), Caches("static", E4M3)
    want, x = tokens.expected(), tokens.part([0, 0], 40)
    x["v_win"][1, 25, 0, 3] = math.nan
    out = caches.call(0, x)
    assert out[1, 25:, :2, 3].isnan().all() and caches.all["v_win_cache"][1, 25, 0, 3].isnan()
    out[1, 25:, :2] = want[1, 25:40, :2]  # the heads that see it
    close(out, want[:, :40])


def test_bad_input_names_the_argument():
    tokens, caches, plain = Tokens(), Caches("static", E4M3), Caches("static")
    plain.all["k_sel_cache"] = plain.all["k_sel_cache"].to(torch.float8_e5m2)
    call = lambda caches=caches, **changed: (
        lambda: caches.call(0, tokens.part([0, 0], 4), **changed)
    )
    assert_raises(
        (ValueError, "k_descale must be above 0 and finite in fp32, got 0.0", call(k_descale=0.0)),
        (ValueError, "v_descale must be above 0 and finite in fp32", call(v_descale=1e-50)),
        (ValueError, "v_descale must be above 0 and finite in fp32", call(v_descale=10**400)),
        (ValueError, "k_descale must be above 0 and finite, got",
         call(k_descale=torch.tensor([1.0, -1.0]))),
        (ValueError, r"v_descale must be \[G\] or \[B, G\] with B=2 and G=2, got",
         call(v_descale=torch.ones(3))),
        (TypeError, "v_descale must be a number or an fp32 tensor, got",
         call(v_descale=torch.ones(2).double())),
        (TypeError, "v_win_cache must have k_sel_cache's dtype",
         call(v_win_cache=torch.zeros(B, 64, G, 24))),
        (ValueError, "k_descale and v_descale go with caches of torch.float8",
         call(Caches("static"), k_descale=1.0)),
        (TypeError, "k_sel_cache must have q's dtype torch.float64, got", call(plain)),
    )  # fmt: skip
    assert caches.all["k_sel_cache"].isnan().all(), "written to"


CONFIG = NSAConfig(
    dim=24, heads=4, groups=2, d_k=8, d_v=16, l=8, d=4, l_sel=16, n_sel=3, window=20, phi="mean"
)
BY = dict(k_descale=torch.tensor([0.03, 0.011]), v_descale=0.05)
STORED = dict(kv_cache_dtype="fp8_e4m3", **BY)
same = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def layer_and_x(seed: int = 0) -> tuple[NSAAttention, Tensor]:
    torch.manual_seed(seed)
    return NSAAttention(CONFIG).double(), torch.randn(2, 60, CONFIG.dim, dtype=torch.float64) * 3


def whole(layer: NSAAttention, x: Tensor) -> Tensor:
    """The layer's output by the oracle on rounded keys and values."""
    by = {"k": BY["k_descale"].expand(2, -1), "v": torch.full((2, 2), BY["v_descale"])}
    stored = lambda y, name: rounded(y, by[name[0]])
    with torch.no_grad():
        q, kv = layer._project(x, torch.arange(x.shape[1]))
        kv = {name: stored(y, name) for name, y in vars(kv).items()}
        cmp = [stored(oracle.compress_mean(kv[f"{n}_cmp"], CONFIG.l, CONFIG.d), n) for n in "kv"]
        branches = [kv[f"{n}_{of}"] for of in ("sel", "win") for n in "kv"]
        out = oracle.nsa_attention(q, *cmp, *branches, layer.gate(x), **CONFIG.sizes())
        return layer.out(out.flatten(-2))


@pytest.mark.parametrize("parts", [(60,), (30, 1, 1, 3, 8, 17), (7, 9, 10, 8, 26), (40, *[1] * 20)])
def test_every_split_of_a_layers_sequence(parts):
    layer, x = layer_and_x()
    for how in (dict(max_len=60), dict(max_len=8, growable=True)):
        cache = layer.make_cache(2, **how, **STORED)
        assert cache.dtype == torch.float64 and cache.k_sel.dtype == E4M3
        same(torch.cat([layer.step(one, cache) for one in x.split(parts, 1)], 1), whole(layer, x))


def test_stacked_selected_and_rewound_caches_keep_what_they_stand_for():
    (layer, x), k = layer_and_x(), BY["k_descale"]
    caches = [layer.make_cache(1, 44, **{**STORED, "k_descale": k * (2 - b)}) for b in (0, 1)]
    for b, n in enumerate((30, 41)):
        layer.step(x[b : b + 1, :n], caches[b])
    both = NSACache.stack(caches, max_len=60)
    assert torch.equal(both.k_descale, torch.stack([k * 2, k]))
    turned = both.select(torch.tensor([1, 0]))
    layer.step(torch.stack([x[1, 41:44], x[0, 30:33]]), turned)
    turned.rewind(2)
    out = layer.step(torch.stack([x[1, 42:44], x[0, 31:33]]), turned)
    same(out[0], whole(layer, x)[1, 42:44])
    assert torch.equal(turned.row(1).k_descale, k[None] * 2)


def test_a_filled_cache_goes_on_as_one_that_was_appended_to():
    layer, x = layer_and_x()
    appended, filled = (layer.make_cache(2, 60, **STORED) for _ in range(2))
    layer.step(x[:, :40], appended)
    with torch.no_grad():
        _, kv = layer._project(x[:, :40], torch.arange(40))
    filled.fill(kv, *appended.compressed(), [40, 40])
    for one in x[:, 40:].split(4, 1):
        torch.testing.assert_close(layer.step(one, filled), layer.step(one, appended))


def test_bad_caches_are_told():
    make = lambda **how: lambda: NSACache(CONFIG, 1, 8, **how)
    fp8 = dict(kv_cache_dtype="fp8_e4m3")
    assert_raises(
        (ValueError, "must be 'auto' or 'fp8_e4m3', got 'fp8'", make(kv_cache_dtype="fp8")),
        (ValueError, "k_descale and v_descale go with kv_cache_dtype='fp8_", make(v_descale=1.0)),
        (TypeError, "dtype must be that of queries, got torch.float8_e4m3fn", make(dtype=E4M3)),
        (ValueError, r"k_descale must be \[G\] or \[B, G\] with B=1 and G=2",
         make(k_descale=torch.ones(4), **fp8)),
        (ValueError, "caches must agree in kv_cache_dtype",
         lambda: NSACache.stack([make()(), make(**fp8)()])),
    )  # fmt: skip


def test_the_error_against_a_cache_of_bf16():
    """Of N(0, 1) and descales of 1, at the paper's sizes: what docs/library.md says."""
    S, groups, h, D = 4096, 2, 16, 128
    sizes = dict(l=32, d=16, l_sel=64, n_sel=16, window=512)
    rows = dict(k_cmp=S // 16, v_cmp=S // 16, k_sel=S, v_sel=S, k_win=S, v_win=S)
    exact = [randn(1, n, groups, D, seed=i) for i, n in enumerate(rows.values())]
    q, gates = randn(1, 1, groups * h, D, seed=20).bfloat16(), torch.ones(1, 1, groups * h, 3)

    def step(dtype: torch.dtype, q: Tensor) -> Tensor:
        caches = [x.to(dtype) for x in exact]
        return nsa_with_kvcache(q, *caches, gates, cache_seqlens=S, **sizes).double()

    want = step(torch.float64, q.double())
    off = {x: ((step(x, q) - want).norm() / want.norm()).item() for x in (E4M3, torch.bfloat16)}
    assert 0.03 < off[E4M3] < 0.045, off
    assert 0.001 < off[torch.bfloat16] < 0.006, off
