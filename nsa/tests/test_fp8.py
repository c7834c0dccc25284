"""FP8 caches: what is stored, and that attention is that over what the stored numbers stand for.

Expected results come from the oracle on keys and values rounded here, to the nearest of all numbers
of e4m3. Kernels of a decode step: test_decode_kernels.py and test_decode_cluster.py have FP8 cases.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import fp8, nsa_with_kvcache, oracle, reorder_kvcache
from nsa.cache import NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.module import NSAAttention
from nsa.tests.helpers import randn
from nsa.tests.test_kvcache import PAGE, SIZES, B, Caches, G, Tokens, by_kinds, close

E4M3 = torch.float8_e4m3fn
NUMBERS = torch.tensor([*range(0x7F), *range(0x80, 0xFF)], dtype=torch.uint8).view(E4M3).double()
ODD = torch.tensor([*range(0x7F), *range(0x80, 0xFF)]) % 2  # between two the even one is taken


def descales(seed: int, device: str = "cpu", exact: bool = False) -> dict[str, Tensor]:
    """Of keys and values, one for each sequence and group; exact: powers of two."""
    x = randn(2, B, G, seed=seed).abs() + 0.2
    x = (x.log2().round().exp2() if exact else x).float().to(device)
    return {"k_descale": x[0], "v_descale": x[1]}


def rounded(x: Tensor, descale: Tensor) -> Tensor:
    """x [B, N, G, D] as the nearest number of e4m3 times descale, in fp64."""
    by = descale.cpu().double()[:, None, :, None]
    x = x.cpu().double() / by
    off = (x[..., None] - NUMBERS).abs()
    at = torch.where(off == off.amin(-1, keepdim=True), ODD, 2).argmin(-1)
    return torch.where(x.isnan(), x, NUMBERS[at]) * by


def expected(tokens: Tokens, scales: dict[str, Tensor]) -> Tensor:
    """The oracle on whole sequences of rounded tokens: [B, S, HQ, Dv]."""
    by = {x: scales[f"{x}_descale"] for x in "kv"}
    x = {name: rounded(y, by[name[0]]) for name, y in tokens.data.items() if name[0] in "kv"}
    cmp = {
        n: rounded(oracle.compress_mean(x[f"{n}_raw"], SIZES["l"], SIZES["d"]), by[n]) for n in "kv"
    }
    q, gates = (tokens.data[name].cpu().double() for name in ("q", "gates"))
    return oracle.nsa_attention(
        q, cmp["k"], cmp["v"], x["k_sel"], x["v_sel"], x["k_win"], x["v_win"], gates, **SIZES
    )


@pytest.fixture
def route(request):
    if request.param[0] == "triton":
        return *request.param, request.getfixturevalue("kernel_device")
    return *request.param, "cpu"


# ---- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_number_becomes_the_nearest(dtype):
    x = torch.cat([randn(500, seed=1), randn(200, seed=2) * 1e-2, randn(200, seed=3) * 1000])
    special = [0.0, -0.0, 448.0, -448.0, 449.0, 1e4, -6e4, 2.0**-9, 2.0**-10, 1e-7, 17.0, 19.0]
    x = torch.cat([x, torch.tensor(special)]).to(dtype)[None, :, None, None]
    one = torch.ones(1, 1)
    got = fp8.quantize(x, one)
    assert got.dtype == E4M3
    off = (got.double() - x.double().clamp(-448, 448)).abs()
    least = (x.double().clamp(-448, 448)[..., None] - NUMBERS).abs().amin(-1)
    assert torch.equal(off, least)
    back = fp8.dequantize(got, torch.full((1, 1), 0.25), dtype)
    assert torch.equal(back, (got.double() / 4).to(dtype))


def test_nan_stays_and_infinity_is_the_largest():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])[None, :, None, None]
    got = fp8.dequantize(fp8.quantize(x, torch.full((1, 1), 2.0)), torch.full((1, 1), 2.0), x.dtype)
    torch.testing.assert_close(
        got.flatten(), torch.tensor([float("nan"), 896.0, -896.0]), equal_nan=True
    )


# ---- nsa_with_kvcache ----------------------------------------------------------------------------


def phi(x: Tensor) -> Tensor:
    """Means in fp32 at least, exact of what powers of two as descales leave."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return mean_pool(x, SIZES["l"], SIZES["d"])


@by_kinds("static-ring", "pages")
def test_chunks_and_steps_are_the_whole(kind, route):
    """Sequences with outliers, some beyond 448 descales; what nobody shall read is NaN."""
    backend, dtype, tolerance, device = route
    tokens = Tokens(dtype, device)
    for name in ("k_sel", "v_win", "v_raw", "k_raw"):
        tokens.data[name][:, 7:60:9] *= 300 if name == "k_raw" else 2000
        tokens.data[name][:, 3] = 0
    scales = descales(5, device, exact=backend is not None)
    caches, want, lens = Caches(kind, E4M3, device), expected(tokens, scales), [0, 0]
    largest = want.abs().amax().item()  # fp16 rounds by what is around
    for T in (21, 1, 1, 3, 8):
        by = None if T > 3 and device == "cpu" else backend
        part = tokens.part(lens, T)
        out = caches.call(lens, part, route=by, phi_k=phi, phi_v=phi, **scales)
        assert out.dtype == dtype
        close(out, torch.stack([want[b, n : n + T] for b, n in enumerate(lens)]),
              tolerance * (largest if backend else 1))  # fmt: skip
        lens = [lens[0] + T, lens[1] + T]
        if T == 3:
            lens = [lens[0] - 5, lens[1]]


@pytest.mark.parametrize("kind", ["static", "pages"])
def test_given_compressed_tokens_are_stored_alike(kind):
    tokens, scales = Tokens(), descales(6)
    want, caches, n = expected(tokens, scales), Caches(kind, E4M3), 0
    raw = {x: rounded(tokens.data[f"{x}_raw"], scales[f"{x}_descale"]) for x in "kv"}
    every = {x: phi(y) for x, y in raw.items()}
    for T in (30, 1, 2, 4, 1):
        x = {name: y for name, y in tokens.part([n, n], T).items() if "raw" not in name}
        first, last = (max((m - SIZES["l"]) // SIZES["d"] + 1, 0) for m in (n, n + T))
        x |= {f"{kv}_cmp": y[:, first:last] for kv, y in every.items()}
        raw = dict(k_raw_cache=None, v_raw_cache=None, phi_k=None, phi_v=None)
        close(caches.call([n, n], x, **raw, **scales), want[:, n : n + T], 1e-9)
        n += T


def test_beams_take_pages_of_e4m3():
    tokens, caches, scales, n = Tokens(), Caches("pages", E4M3), descales(7), 37
    scales = {name: x[:1].expand(B, G).contiguous() for name, x in scales.items()}
    caches.call(0, tokens.part([0, 0], n), phi_k=phi, phi_v=phi, **scales)
    beam_idx = torch.tensor([1, 1])
    reorder_kvcache(
        beam_idx, *caches.all.values(), block_table=caches.table, page_size=PAGE,
        cache_seqlens=torch.tensor([n, n]),
    )  # fmt: skip
    for x in tokens.data.values():
        x[:, :n] = x[beam_idx, :n]
    want = expected(tokens, scales)
    out = caches.call([n, n], tokens.part([n, n], 3), phi_k=phi, phi_v=phi, **scales)
    close(out, want[:, n : n + 3], 1e-9)


def test_a_nan_is_seen_by_those_that_see_its_token():
    tokens, caches = Tokens(), Caches("static", E4M3)
    want = expected(tokens, descales(8))
    x = tokens.part([0, 0], 40)
    x["v_win"][1, 25, 0, 3] = float("nan")
    out = caches.call(0, x, phi_k=phi, phi_v=phi, **descales(8))
    assert out[1, 25:, :2, 3].isnan().all() and caches.all["v_win_cache"][1, 25, 0, 3].isnan()
    out[1, 25:, :2] = want[1, 25:40, :2]  # the heads that see it
    close(out, want[:, :40], 1e-9)


@pytest.mark.parametrize(("changed", "told"), [
    (dict(k_descale=0.0), "k_descale must be above 0 and finite, got 0.0"),
    (dict(v_descale=torch.ones(3)), r"v_descale must be \[G\] or \[B, G\] with B=2 and G=2, got"),
    (dict(v_descale=torch.ones(2).double()), "v_descale must be a number or an fp32 tensor, got"),
    (dict(k_descale=torch.tensor([1.0, -1.0])), "k_descale must be above 0 and finite, got"),
    (dict(v_win_cache=torch.zeros(B, 64, G, 24)), "v_win_cache must have k_sel_cache's dtype"),
], ids=["zero", "shape", "dtype", "negative", "a cache of another dtype"])  # fmt: skip
def test_bad_input_names_the_argument(changed, told):
    tokens, caches = Tokens(), Caches("static", E4M3)
    with pytest.raises((TypeError, ValueError), match=told):
        caches.call(0, tokens.part([0, 0], 4), **changed)
    assert caches.all["k_sel_cache"].isnan().all(), "written to"


def test_descales_go_with_caches_of_e4m3():
    tokens, caches = Tokens(), Caches("static")
    with pytest.raises(ValueError, match="k_descale and v_descale go with caches of torch.float8"):
        caches.call(0, tokens.part([0, 0], 4), k_descale=1.0)
    caches.all["k_sel_cache"] = caches.all["k_sel_cache"].to(torch.float8_e5m2)
    with pytest.raises(TypeError, match="k_sel_cache must have q's dtype torch.float64, got"):
        caches.call(0, tokens.part([0, 0], 4))


# ---- NSACache ------------------------------------------------------------------------------------

CONFIG = NSAConfig(
    dim=24, heads=4, groups=2, d_k=8, d_v=16, l=8, d=4, l_sel=16, n_sel=3, window=20, phi="mean"
)
BY = dict(k_descale=torch.tensor([0.03, 0.011]), v_descale=0.05)


def layer_and_x(seed: int = 0) -> tuple[NSAAttention, Tensor]:
    torch.manual_seed(seed)
    return NSAAttention(CONFIG).double(), torch.randn(2, 60, CONFIG.dim, dtype=torch.float64) * 3


def whole(layer: NSAAttention, x: Tensor) -> Tensor:
    """The layer's output by the oracle on rounded keys and values."""
    by = {
        "k": BY["k_descale"].expand(2, -1), "v": torch.full((2, CONFIG.groups), BY["v_descale"])
    }  # fmt: skip
    with torch.no_grad():
        q, kv = layer._project(x, torch.arange(x.shape[1]))
        kv = {name: rounded(y, by[name[0]]) for name, y in vars(kv).items()}
        cmp = [
            rounded(oracle.compress_mean(kv[f"{n}_cmp"], CONFIG.l, CONFIG.d), by[n]) for n in "kv"
        ]
        out = oracle.nsa_attention(
            q, *cmp, kv["k_sel"], kv["v_sel"], kv["k_win"], kv["v_win"], layer.gate(x),
            **CONFIG.sizes(),
        )  # fmt: skip
        return layer.out(out.flatten(-2))


@pytest.mark.parametrize("parts", [(60,), (30, 1, 1, 3, 8, 17), (7, 9, 10, 8, 26), (40, *[1] * 20)])
def test_every_split_of_a_layers_sequence(parts):
    layer, x = layer_and_x()
    cache = layer.make_cache(2, 60, kv_cache_dtype="fp8_e4m3", **BY)
    assert cache.dtype == torch.float64 and cache.k_sel.dtype == E4M3
    got = [layer.step(one, cache) for one in x.split(parts, 1)]
    torch.testing.assert_close(torch.cat(got, 1), whole(layer, x), rtol=1e-5, atol=1e-6)


def test_stacked_selected_rewound_and_grown_caches_keep_what_they_stand_for():
    layer, x = layer_and_x()
    caches = []
    for b, n in enumerate((30, 41)):
        k = BY["k_descale"] if b else BY["k_descale"] * 2
        cache = layer.make_cache(1, 44, kv_cache_dtype="fp8_e4m3", k_descale=k, v_descale=0.05)
        layer.step(x[b : b + 1, :n], cache)
        caches.append(cache)
    both = NSACache.stack(caches, max_len=60)
    assert torch.equal(both.k_descale, torch.stack([BY["k_descale"] * 2, BY["k_descale"]]))
    want = whole(layer, x)[1]
    turned = both.select(torch.tensor([1, 0]))
    layer.step(torch.stack([x[1, 41:44], x[0, 30:33]]), turned)
    turned.rewind(2)
    out = layer.step(torch.stack([x[1, 42:44], x[0, 31:33]]), turned)
    torch.testing.assert_close(out[0], want[42:44], rtol=1e-5, atol=1e-6)
    assert torch.equal(turned.row(1).k_descale, BY["k_descale"][None] * 2)
    grown = layer.make_cache(2, 8, growable=True, kv_cache_dtype="fp8_e4m3", **BY)
    got = [layer.step(one, grown) for one in x.split(7, 1)]
    torch.testing.assert_close(torch.cat(got, 1)[1], want, rtol=1e-5, atol=1e-6)


def test_a_filled_cache_goes_on_as_one_that_was_appended_to():
    layer, x = layer_and_x()
    made = lambda: layer.make_cache(2, 60, kv_cache_dtype="fp8_e4m3", **BY)
    appended, filled = made(), made()
    layer.step(x[:, :40], appended)
    with torch.no_grad():
        _, kv = layer._project(x[:, :40], torch.arange(40))
    filled.fill(kv, *appended.compressed(), [40, 40])
    for one, other in zip(x[:, 40:].split(4, 1), x[:, 40:].split(4, 1), strict=True):
        torch.testing.assert_close(layer.step(one, filled), layer.step(other, appended))


def test_bad_caches_are_told():
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'fp8_e4m3', got 'fp8'"):
        NSACache(CONFIG, 1, 8, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="k_descale and v_descale go with kv_cache_dtype='fp8_"):
        NSACache(CONFIG, 1, 8, v_descale=1.0)
    with pytest.raises(TypeError, match="dtype must be that of queries, got torch.float8_e4m3fn"):
        NSACache(CONFIG, 1, 8, dtype=E4M3)
    with pytest.raises(ValueError, match=r"k_descale must be \[G\] or \[B, G\] with B=1 and G=2"):
        NSACache(CONFIG, 1, 8, kv_cache_dtype="fp8_e4m3", k_descale=torch.ones(4))
    caches = [NSACache(CONFIG, 1, 8), NSACache(CONFIG, 1, 8, kv_cache_dtype="fp8_e4m3")]
    with pytest.raises(ValueError, match="caches must agree in kv_cache_dtype"):
        NSACache.stack(caches)


# ---- the error, as docs/library.md states it -----------------------------------------------------


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
