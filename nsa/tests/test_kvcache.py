"""nsa_with_kvcache: decoding, chunks, pages and beams give what whole sequences at once give.

What a call has no business to read is NaN: rows behind a length and pages of nobody; page numbers
behind the last page in use name none. The PyTorch route is judged in fp64 by the oracle, and so are
the Triton kernels.
"""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import dispatch, kvcache, launches, nsa_with_kvcache, oracle, reorder_kvcache
from nsa.cache import NSACache
from nsa.compress import MLPCompression, mean_pool
from nsa.config import NSAConfig
from nsa.tests.helpers import TRITON, assert_raises, randn

SIZES = dict(l=8, d=4, l_sel=16, n_sel=3, window=20)
B, S, HQ, G, DK, DV, PAGE = 2, 64, 4, 2, 16, 24, 16
NAN = float("nan")
# Static caches and pages, each with rings and without.
KINDS = ("static", "static-ring", "pages", "pages-ring")
E4M3 = torch.float8_e4m3fn
NUMBERS = torch.tensor([*range(0x7F), *range(0x80, 0xFF)], dtype=torch.uint8).view(E4M3).double()
ODD = torch.tensor([*range(0x7F), *range(0x80, 0xFF)]) % 2  # between two the even one is taken
_FOUND: dict[tuple[bytes, ...], Tensor] = {}


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


def phi(x: Tensor) -> Tensor:
    """Means in fp32 at least, exact of what powers of two as descales leave."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return mean_pool(x, SIZES["l"], SIZES["d"])


@dataclass
class Tokens:
    """Queries, gates, and keys and values of all branches of B sequences of S tokens; with scales
    those of caches of e4m3, some of them outliers, also beyond 448 descales."""

    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    seed: int = 0
    scales: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = ("sel", "win", "raw")
        shapes = {f"{x}_{kind}": (G, DK if x == "k" else DV) for kind in kinds for x in "kv"}
        like = dict(dtype=self.dtype, device=self.device)
        for i, (name, shape) in enumerate({**shapes, "q": (HQ, DK), "gates": (HQ, 3)}.items()):
            self.data[name] = randn(B, S, *shape, seed=self.seed + i, **like)
        for name in ("k_sel", "v_win", "v_raw", "k_raw") if self.scales else ():
            self.data[name][:, 7:60:9] *= 300 if name == "k_raw" else 2000
            self.data[name][:, 3] = 0

    def part(self, starts: list[int], T: int) -> dict[str, Tensor]:
        """T tokens of each sequence from its start on."""
        return {name: rows(x, starts, T) for name, x in self.data.items()} | self.scales

    def expected(self) -> Tensor:
        """The oracle on whole sequences: [B, S, HQ, Dv]. Found once for the same numbers."""
        x = {name: y.cpu() for name, y in (self.data | self.scales).items()}
        key = tuple(y.numpy().tobytes() for y in x.values())
        if key not in _FOUND:
            stored = lambda y, kv: rounded(y, x[f"{kv}_descale"]) if self.scales else y
            x |= {n: stored(y, n[0]) for n, y in x.items() if n[2:] in ("sel", "win", "raw")}
            pool = lambda y: oracle.compress_mean(y, SIZES["l"], SIZES["d"])
            cmp = [stored(pool(x[f"{kv}_raw"]), kv) for kv in "kv"]
            kv = [*cmp, *(x[f"{kv}_{of}"] for of in ("sel", "win") for kv in "kv")]
            q, gates = x["q"].double(), x["gates"].double()
            _FOUND[key] = oracle.nsa_attention(q, *kv, gates, **SIZES)
        return _FOUND[key]


def rows(x: Tensor, starts: list[int], T: int) -> Tensor:
    """T rows of each sequence from its start on."""
    return torch.stack([x[b, n : n + T] for b, n in enumerate(starts)])


class Caches:
    """Empty caches of a kind, NaN throughout, with pages in no order."""

    def __init__(self, kind: str, dtype=torch.float64, device="cpu", *, spare=8, most=32) -> None:
        paged, ring = kind.startswith("pages"), kind.endswith("ring")
        blocks = S // PAGE
        self.table = None
        if paged:
            order = torch.randperm(B * blocks + 3, generator=torch.Generator().manual_seed(5))
            self.table = order[: B * blocks].view(B, blocks).to(device, torch.int32)
        lead = (B * blocks + 3, PAGE) if paged else (B, S)
        rows = {
            "cmp": (lead[0], PAGE // SIZES["d"] if paged else (S - SIZES["l"]) // SIZES["d"] + 1),
            "sel": lead,
            "win": (B, SIZES["window"] + most - 1 + spare) if ring else lead,
            "raw": (B, SIZES["l"] + most - 1 + spare) if ring else lead,
        }
        full = lambda at, kv: torch.full(
            (*at, G, DK if kv == "k" else DV), NAN, dtype=dtype, device=device
        )
        self.all = {f"{x}_{name}_cache": full(at, x) for name, at in rows.items() for x in "kv"}
        self.options = dict(block_table=self.table, ring=ring)

    def call(self, lens, x: dict, *, route=None, **changed) -> Tensor:
        if isinstance(lens, list):
            lens = torch.tensor(lens).to(self.all["k_sel_cache"].device, torch.int32)
        if self.table is not None and not isinstance(lens, int) and "block_table" not in changed:
            # A part of a wider one, as serving engines have it.
            table = self.table.repeat(1, 2)[:, : self.table.shape[1]]
            for b, n in enumerate(lens.tolist()):
                table[b, -(-(n + x["q"].shape[1]) // PAGE) :] = 10**6  # nobody's
            changed["block_table"] = table
        if route is not None:
            changed = {"backend": route, "flags": TRITON, **changed}
        given = {**self.all, **x, **self.options, **SIZES, "phi_k": phi, "phi_v": phi}
        return nsa_with_kvcache(**{**given, "cache_seqlens": lens, **changed})


# (route, dtype, tolerance), to which the fixture adds the device.
ROUTES = [
    pytest.param((None, torch.float64, 1e-9), id="pytorch"),
    pytest.param(("triton", torch.float16, 6e-3), id="triton", marks=pytest.mark.kernel),
]


@pytest.fixture(params=ROUTES)
def route(request):
    """(backend, dtype, tolerance, device)."""
    kernels = request.param[0] == "triton"
    return *request.param, request.getfixturevalue("kernel_device") if kernels else "cpu"


def by_kinds(stored: torch.dtype | None, *interpreted: str) -> list:
    """Every route with every kind of cache; the kernel in the interpreter with these alone, as two
    kinds have pages and none, rings and none. `make test-all` and GPUs run all."""
    late = lambda route, kind: [pytest.mark.nightly] * bool(route.marks and kind not in interpreted)
    return [
        pytest.param(*route.values, kind, stored, id=f"{route.id}-{kind}{'-e4m3' * bool(stored)}",
                     marks=[*route.marks, *late(route, kind)])
        for route in ROUTES for kind in KINDS
    ]  # fmt: skip


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    got, want = got.cpu().double(), want.cpu().double()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def follow(caches, tokens, lens, steps, tolerance=1e-9, *, want=None, without=(), **how):
    """Tokens are appended, so many at each step, and attended as in whole sequences, which give
    `want`; of the branches `without` nothing is given. The lengths then."""
    want = tokens.expected() if want is None else want
    for T in steps:
        x = {n: y for n, y in tokens.part(lens, T).items() if n[2:] not in without}
        out = caches.call(lens, x, **how)
        assert out.dtype == tokens.dtype
        close(out, rows(want, lens, T), tolerance)
        lens = [n + T for n in lens]
    return lens


ALL = [*by_kinds(None, "static", "pages-ring"), *by_kinds(E4M3, "static-ring", "pages")]


@pytest.mark.parametrize("route, kind, stored", ALL, indirect=["route"])
def test_chunks_and_steps_are_the_whole(route, kind, stored):
    """A prompt in chunks, then one token and several at a time. A shorter length forgets tokens:
    other ones take their rows, compressed ones too, each sequence at its own length."""
    backend, dtype, tolerance, device = route
    scales = descales(5, device, exact=backend is not None) if stored else {}
    tokens, other = (Tokens(dtype, device, seed, scales) for seed in (0, 50))
    caches = Caches(kind, stored or dtype, device)
    if stored and backend:  # fp16 rounds by what is around
        tolerance *= tokens.expected().abs().amax().item()
    # Interpreted, a step of 19 tokens takes as long as all others.
    by = None if device == "cpu" else backend
    assert follow(caches, tokens, [0, 0], (5,), tolerance, route=backend) == [5, 5]
    follow(caches, tokens, [5, 5], (19,), tolerance, route=by)
    follow(caches, tokens, [24, 24], (1, 1, 3), tolerance, route=backend)
    lens = [22, 27]
    for name, x in other.data.items():
        for b, n in enumerate(lens):
            x[b, :n] = tokens.data[name][b, :n]
    steps = (1, 4, 1, 5) if backend is None else (1, 3)
    follow(caches, other, lens, steps, tolerance, route=backend)


def test_rings_are_overwritten_in_turn():
    """The smallest rings that T new tokens may have hold all that these read, far around."""
    tokens, T = Tokens(), 3
    caches = Caches("static-ring", spare=0, most=T)
    follow(caches, tokens, [0, 0], [T] * (S // T))
    with pytest.raises(ValueError, match="k_win_cache must be a ring of at least 23 rows for T=4"):
        caches.call([0, 0], tokens.part([0, 0], 4))


def test_a_capacity_of_no_whole_number_of_blocks():
    """The last compressed row stays what it is while tokens behind it come."""
    caches = Caches("static")
    for name, x in caches.all.items():
        caches.all[name] = x[:, : 14 if "cmp" in name else 63].clone()
    follow(caches, Tokens(), [0, 0], (58, 1, 1, 1, 1, 1))


def test_without_new_keys_the_caches_are_read_alone():
    tokens, caches = Tokens(), Caches("pages")
    x = tokens.part([0, 0], 40)
    caches.call([0, 0], x)
    before = {name: cache.clone() for name, cache in caches.all.items()}
    last = {name: x[name][:, -3:] for name in ("q", "gates")}
    out, want = caches.call([40, 37], last), tokens.expected()
    close(out[0], want[0, 37:40])
    for name, x in last.items():  # of the second sequence, three positions earlier
        tokens.data[name][1, 34:37] = x[1]
    close(out[1], tokens.expected()[1, 34:37])
    for name, was in before.items():
        torch.testing.assert_close(caches.all[name], was, rtol=0, atol=0, equal_nan=True)


def test_sequences_share_the_pages_of_a_common_beginning(route):
    backend, dtype, tolerance, device = route
    tokens, caches = Tokens(dtype, device), Caches("pages", dtype, device)
    for x in tokens.data.values():
        x[1, : 2 * PAGE] = x[0, : 2 * PAGE]
    want = tokens.expected()
    # The first sequence alone, then the second from behind what they share.
    one = {name: x[:1] for name, x in tokens.part([0, 0], 45).items()}
    caches.call([0], one, block_table=caches.table[:1])
    caches.table[1, :2] = caches.table[0, :2]
    pages = caches.table[0, :2].long()
    first = {name: cache[pages].clone() for name, cache in caches.all.items()}
    two = {name: x[1:, 2 * PAGE :][:, :6] for name, x in tokens.data.items()}
    out = caches.call([2 * PAGE], two, block_table=caches.table[1:])
    close(out, want[1:, 2 * PAGE : 2 * PAGE + 6], tolerance)
    follow(caches, tokens, [45, 2 * PAGE + 6], (2,), tolerance, route=backend, checked=True)
    for name, was in first.items():
        now = caches.all[name][pages]
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("n", [33, 32, 15], ids=["behind an end", "at an end", "in the first"])
@pytest.mark.parametrize("kind, stored", [*((kind, None) for kind in KINDS), ("pages", E4M3)])
def test_beams(kind, stored, n):
    """Beams change places, then both go on from the second, each with tokens of its own."""
    scales = {name: x[:1].expand(B, G).contiguous() for name, x in descales(7).items()}
    tokens = Tokens(scales=scales if stored else {})
    caches = Caches(kind, stored or torch.float64)
    caches.call(0, tokens.part([0, 0], n))
    for beam_idx in ([1, 0], [1, 1]):
        beam_idx = torch.tensor(beam_idx)
        rest, paged = list(caches.all.values()), []
        if caches.table is not None:
            paged = [x for x in rest if len(x) == len(caches.all["k_sel_cache"])]
            rest = [x for x in rest if len(x) != len(caches.all["k_sel_cache"])]
            pages = dict(block_table=caches.table, page_size=PAGE)
            reorder_kvcache(beam_idx, *paged, **pages, cache_seqlens=torch.tensor([n, n]))
        reorder_kvcache(beam_idx, *rest)
        for x in tokens.data.values():
            x[:, :n] = x[beam_idx, :n]
        n, _ = follow(caches, tokens, [n, n], (1, 3), checked=True)


def test_beams_tell_bad_input():
    cache, lens = torch.zeros(6, 4, 1, 1), torch.tensor([5, 6])
    table, swap = torch.arange(6).view(2, 3), torch.tensor([1, 0])
    pages = dict(block_table=table, page_size=4)
    tell = lambda beam_idx=swap, **how: lambda: reorder_kvcache(beam_idx, cache, **how)
    assert_raises(
        (TypeError, "beam_idx must be an int64 tensor", tell([1, 0])),
        (ValueError, "block_table, cache_seqlens and page_size go", tell(block_table=table)),
        (ValueError, r"beam_idx must name sequences as long .*\[5, 6\]",
         tell(cache_seqlens=lens, **pages)),
        (ValueError, r"caches\[0\] must have B=2 sequences, got \[6, 4", tell()),
        (ValueError, r"beam_idx must name sequences 0 to 1, got \[2, 0\]", tell(swap * 2)),
        (ValueError, r"beam_idx must name sequences 0 to 1, got \[0, -1\]",
         tell(swap - 1, cache_seqlens=lens, **pages)),
        (TypeError, r"caches\[1\] must be a tensor, got list",
         lambda: reorder_kvcache(swap, cache[:2], [1])),
        (ValueError, r"page_size must be the tokens of a page, 8 of no cache of \[\[6, 4, 1, 1\]\]",
         tell(**pages | dict(cache_seqlens=lens, page_size=8))),
        (ValueError, "cache_seqlens must be from 0 to 12, .* got \\[13, 13\\]",
         tell(cache_seqlens=torch.tensor([13, 13]), **pages)),
    )  # fmt: skip
    assert table.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("paged", [False, True])
def test_beams_refused_for_one_cache_move_in_none(paged):
    good, bad = torch.arange(6.0).repeat_interleave(4).view(6, 4, 1, 1), torch.zeros(3, 4, 1, 1)
    table, swap = torch.arange(6).view(2, 3), torch.tensor([1, 0])
    before, how = good.clone(), {}
    if paged:
        how = dict(block_table=table, cache_seqlens=torch.tensor([6, 6]), page_size=4)
    with pytest.raises(ValueError, match=r"caches\[1\]"):
        reorder_kvcache(swap, good if paged else good[:2], bad, **how)
    assert torch.equal(good, before) and table.flatten().tolist() == list(range(6))


@pytest.mark.parametrize("paged", [False, True])
def test_beams_move_once_in_a_cache_that_is_given_twice(paged):
    cache = torch.arange(2.0)[:, None, None, None].repeat(1, 4, 1, 1)
    pages = dict(block_table=torch.tensor([[0], [1]]), cache_seqlens=torch.tensor([3, 3]))
    how = pages | {"page_size": 4} if paged else {}
    reorder_kvcache(torch.tensor([1, 0]), cache, cache.view(2, 4, 1, 1), **how)
    assert cache[:, 0].flatten().tolist() == [1, 0]


@pytest.mark.parametrize("table, length", [
    ([[2, 1], [3, -1]], 6), ([[0, 9], [2, 3]], 8), ([[-2, 1], [2, 3]], 5),
])  # fmt: skip
def test_beams_in_pages_that_do_not_exist_are_refused(table, length):
    """Full ones too, whose numbers alone are copied."""
    cache = torch.arange(4.0)[:, None, None, None].repeat(1, 4, 1, 1)
    pages = dict(block_table=torch.tensor(table), cache_seqlens=torch.full((2,), length))
    with pytest.raises(ValueError, match=r"block_table must name pages of caches\[0\]"):
        reorder_kvcache(torch.tensor([1, 0]), cache, **pages, page_size=4)
    assert cache[:, 0].flatten().tolist() == [0, 1, 2, 3]


def test_beams_wait_for_no_value_of_a_gpu(monkeypatch):
    cache, table = torch.arange(6.0)[:, None, None, None].repeat(1, 4, 1, 1), torch.arange(6)
    table, lens, beams = table.view(2, 3), torch.tensor([6, 6]), torch.tensor([0, 0])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with Waits() as waits:
        reorder_kvcache(beams, cache, block_table=table, cache_seqlens=lens, page_size=4)
    assert not waits.seen
    assert table.tolist() == [[0, 1, 2], [0, 4, 5]] and cache[4].unique().tolist() == [1]


def test_a_ring_is_no_page():
    """Though it has a page's shape, where there are as many pages as sequences."""
    x, page = {n: zeros(2, 1, G, DK) for n in ("k_sel", "v_sel", "k_cmp", "v_cmp")}, 32
    k, v = zeros(2, page, G, DK), zeros(2, page, G, DK)
    cmp = zeros(2, page // SIZES["d"], G, DK)
    with pytest.raises(ValueError, match="k_win_cache must be a ring of its own, got k_sel_cache"):
        nsa_with_kvcache(
            zeros(2, 1, HQ, DK), cmp, cmp.clone(), k, v, k, v, zeros(2, 1, HQ, 3), **x, **SIZES,
            cache_seqlens=0, block_table=torch.tensor([[1], [0]]), ring=True,
        )  # fmt: skip


def test_beams_of_empty_sequences_have_no_pages():
    cache, table = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 4, 1, 1), torch.tensor([[-1], [2]])
    pages = dict(block_table=table, page_size=4)
    reorder_kvcache(torch.tensor([1, 0]), cache, cache_seqlens=torch.tensor([0, 0]), **pages)
    assert cache[:, 0].flatten().tolist() == [0, 1, 2, 3] and table.tolist() == [[-1], [2]]
    table = torch.tensor([[-1], [0], [2]])  # beside two that have some
    pages = dict(block_table=table, page_size=4, cache_seqlens=torch.tensor([0, 3, 3]))
    reorder_kvcache(torch.tensor([0, 2, 1]), cache, **pages)
    assert cache[:, 0].flatten().tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    """q, k_sel, k_win and k_raw are turned by their positions, in the first columns."""
    tokens, turned_before, caches = Tokens(), Tokens(), Caches("pages")
    r = 12  # of 16 columns
    exponent = torch.arange(r // 2, dtype=torch.float64) * 2 / r
    angle = torch.arange(S)[:, None] * 100.0**-exponent
    # Pairs side by side are pairs r / 2 apart of columns in another order.
    order = torch.arange(r).view(-1, 2).T.flatten() if interleaved else torch.arange(r)
    for name in ("q", "k_sel", "k_win", "k_raw"):
        x = turned_before.data[name]
        x[..., order] = oracle.rotary(x[..., order], 100.0)
    turn = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=interleaved)
    follow(caches, tokens, [0, 0], (30, 1, 2), want=turned_before.expected(), **turn)


@pytest.mark.parametrize("kind", ["static", "pages"])
@pytest.mark.parametrize("stored", [None, E4M3], ids=str)
def test_given_compressed_tokens_are_those_of_phi(kind, stored):
    tokens = Tokens(scales=descales(6) if stored else {})
    caches, want, lens = Caches(kind, stored or torch.float64), tokens.expected(), [0, 0]
    raw = {x: tokens.data[f"{x}_raw"] for x in "kv"}
    if stored:
        raw = {x: rounded(y, tokens.scales[f"{x}_descale"]) for x, y in raw.items()}
    every = {x: phi(y) for x, y in raw.items()}
    none = dict(k_raw_cache=None, v_raw_cache=None, phi_k=None, phi_v=None)
    given = lambda lens, T: {n: y for n, y in tokens.part(lens, T).items() if "raw" not in n}
    due = lambda n: max(0, (n - SIZES["l"]) // SIZES["d"] + 1)
    for T in (30, 1, 1, 5, 2):
        x, most = given(lens, T), (T - 1) // SIZES["d"] + 1
        for name, y in every.items():
            padded = torch.cat([y, torch.full_like(y[:, :9], NAN)], 1)
            made = x[f"{name}_cmp"] = rows(padded, [due(n) for n in lens], most)
            for b, n in enumerate(lens):  # what is not due is not looked at
                made[b, due(n + T) - due(n) :] = NAN
        close(caches.call(lens, x, **none), rows(want, lens, T))
        lens = [lens[0] + T, lens[1] + T - 2 * (T == 30)]
    short = given(lens, 4) | {"k_cmp": every["k"][:, :0], "v_cmp": every["v"][:, :0]}
    with pytest.raises(ValueError, match="k_cmp must have the 1 compressed tokens"):
        caches.call(lens, short, **none)


def test_branches_may_share_keys_and_their_cache():
    tokens, caches = Tokens(), Caches("pages")
    for name, kind in itertools.product("kv", ("win", "raw")):
        tokens.data[f"{name}_{kind}"] = tokens.data[f"{name}_sel"]
        caches.all[f"{name}_{kind}_cache"] = caches.all[f"{name}_sel_cache"]
    follow(caches, tokens, [0, 0], (21, 1, 4), without=("win", "raw"))


def learnt_phis(dtype, device):
    torch.manual_seed(3)
    make = lambda width: MLPCompression(width, SIZES["l"], SIZES["d"]).to(device, dtype)
    return dict(phi_k=make(DK), phi_v=make(DV))


# Kind of cache, number and phi once; `make test-all` and GPUs run all.
EACH = [*zip(KINDS, ("fp16", "e4m3") * 2, ("mean", "mean", "learnt", "learnt"), strict=True)]


@pytest.mark.kernel
@pytest.mark.parametrize("kind, stored, compression", [
    pytest.param(*case, id="-".join(case), marks=[] if case in EACH else [pytest.mark.nightly])
    for case in itertools.product(KINDS, ("fp16", "e4m3"), ("mean", "learnt"))
])  # fmt: skip
def test_kernels_store_what_pytorch_stores(kind, stored, compression, kernel_device, monkeypatch):
    """Every row of every cache, byte by byte but for what a learnt phi made; and no other row."""
    if kernel_device == "cuda" and stored == "e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before SM 8.9")
    monkeypatch.setattr(kvcache, "_attend", lambda q, *_: q)
    like, phis = (torch.float16, kernel_device), {}
    if compression == "learnt":
        phis = learnt_phis(*like)
    if stored == "e4m3":
        scales = torch.tensor([[0.5, 0.03], [0.1, 2.0]], device=kernel_device)
        phis |= dict(k_descale=scales, v_descale=scales.flip(0).contiguous())
    tokens, held = Tokens(*like), E4M3 if stored == "e4m3" else torch.float16
    tokens.data["k_raw"][:, 9] = 3e4
    tokens.data["v_sel"][:, 20] = -6e4
    ours, theirs = (Caches(kind, held, kernel_device) for _ in range(2))
    lens = [0, 0]
    for T in (21, 3, 5, 1, 1):
        part = tokens.part(lens, T)
        theirs.call(lens, part, route="reference", **phis)
        with launches.recording() as counts:
            ours.call(lens, part, route="triton", **phis)
        assert counts["_decode_write_kernel"] == 1, counts
        for name, got in ours.all.items():
            want = theirs.all[name]
            if compression == "learnt" and "cmp" in name:
                got, want = got.float(), want.float()
                step = 0.15 if stored == "e4m3" else 0.01
                torch.testing.assert_close(got, want, rtol=step, atol=step / 30, equal_nan=True)
                theirs.all[name].copy_(ours.all[name])
            else:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (name, T)
        lens = [lens[0] + T - 5 * (T == 3), lens[1] + T - (T == 3)]


@pytest.mark.kernel
@pytest.mark.parametrize(
    "table", [[[3, -1]], [[3, 11]], [[3], [5]]], ids=["negative", "none", "short"]
)
def test_a_kernel_writes_no_row_that_is_not_there(table, kernel_device, monkeypatch):
    """Past the table and to pages that do not exist, which nobody checks on a GPU."""
    from nsa.kernels.decode import emit, write

    like = dict(dtype=torch.float16, device=kernel_device)
    around = [torch.zeros(3 + 11 + 3, n, 1, 8, **like) for n in (16, 16, 16, 16, 4, 4)]
    pages = [x[3:-3] for x in around]
    table = torch.tensor(table, dtype=torch.int32, device=kernel_device)[:1]  # 5 is another's
    lens = torch.tensor([20], dtype=torch.int32, device=kernel_device)
    new = [torch.ones(1, 20, 1, 8, **like)] * 2 + [None] * 2
    caches = [*pages[:2], None, None]
    write.write_new(lens, [*new, *new[:2]], [*caches, *pages[2:4]], (lens, lens), table, False)
    where = SimpleNamespace(
        world=1, rank=0, **dict(zip(("k_raw", "v_raw", "k_cmp", "v_cmp"), pages[2:], strict=True)),
        lens=lens, sizes=dict(l=8, d=4), max_len=400, descales=(lens, lens), block_table=table,
        ring=False,
    )  # fmt: skip
    made = torch.ones(5, 1, 8, **like)
    emit.emit_due(lens, where, made, made, 5, 20)
    for x, rows in zip(around, (16, 16, 16, 16, 3, 3), strict=True):
        assert x.count_nonzero() == rows * 8 and bool(x[3 + 3].any())


@pytest.mark.kernel
def test_an_error_of_phi_is_the_callers(kernel_device, monkeypatch, recwarn):
    """It comes as it is, and is no failure of the kernel, which serves the next call."""

    def fails(x):
        raise ArithmeticError("of the caller's own")

    decide = dispatch.decide
    kernels = dispatch.Decision(dispatch.Branch.APPEND, dispatch.Route.TRITON)
    by_kernels = lambda r, *a: kernels if r.branch is kernels.branch else decide(r, *a)
    monkeypatch.setattr(dispatch, "decide", by_kernels)  # as on a GPU, by nobody's name
    monkeypatch.setattr(kvcache, "_attend", lambda q, *_: q)
    tokens, like = Tokens(torch.float16, kernel_device), (torch.float16, kernel_device)
    caches, x = Caches("pages", *like), tokens.part([0, 0], 32)
    call = lambda bad: lambda: caches.call([0, 0], x, phi_k=bad)
    assert_raises(
        (ArithmeticError, "of the caller's own", call(fails)),
        (ValueError, r"phi_k must make \[16, 1, 2, 16\]", call(lambda x: x)),
    )
    assert not recwarn.list
    with launches.recording() as counts:
        caches.call([0, 0], x)
    assert counts["_decode_write_kernel"] == 1


def test_a_prompt_of_many_tokens_needs_no_step(monkeypatch):
    """More rows than the decode step takes go to nsa_attention without being offered to it."""
    monkeypatch.setattr(kvcache, "MOST_STEP_ROWS", 8)
    tokens, caches = Tokens(), Caches("pages")
    with dispatch.trace() as taken:
        caches.call([0, 0], tokens.part([0, 0], 59))
        assert all(t.branch is not dispatch.Branch.STEP for t in taken)
        want = tokens.expected()
        close(caches.call([59, 59], tokens.part([59, 59], 4)), want[:, 59:63], 1e-9)
        assert taken[-1].branch is dispatch.Branch.STEP


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_no_value(kind, kernel_device, monkeypatch):
    """Lengths, page numbers and what is due are known on the device alone."""
    like = torch.float16, kernel_device
    tokens, caches = Tokens(*like), Caches(kind, *like)
    caches.call([0, 0], tokens.part([0, 0], 30))
    monkeypatch.setattr(kvcache, "_check_values", lambda *_: None)  # which a GPU's calls leave out
    monkeypatch.setattr(kvcache, "_read", lambda *_: pytest.fail("a value is read"))
    x, want = tokens.part([30, 27], 3), tokens.expected()
    given = dict(phi_k=phi, phi_v=phi, backend="triton", flags=TRITON)
    given["cache_seqlens"] = torch.tensor([30, 27], dtype=torch.int32, device=kernel_device)
    with Waits() as waits:
        out = nsa_with_kvcache(**caches.all, **x, **caches.options, **SIZES, **given)
    assert not waits.seen
    close(out, rows(want, [30, 27], 3), 6e-3)


@pytest.mark.kernel
def test_a_graph_serves_every_length(cuda):
    """One captured call, replayed token by token over pages whose numbers change meanwhile."""
    tokens, caches = Tokens(torch.float16, "cuda"), Caches("pages", torch.float16, "cuda")
    want = tokens.expected()
    caches.call([0, 0], tokens.part([0, 0], 26))
    lens = torch.tensor([26, 26], dtype=torch.int32, device=cuda)
    x = tokens.part([26, 26], 1)
    given = dict(phi_k=phi, phi_v=phi, cache_seqlens=lens, flags=TRITON, **caches.options, **SIZES)
    step = lambda **how: nsa_with_kvcache(**caches.all, **x, **given, **how)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = step()
    words = pytest.raises(RuntimeError, match="inside a CUDA graph")
    with words, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(checked=True)
    for n in range(26, S):
        for name, now in tokens.part([n, n], 1).items():
            x[name].copy_(now)
        lens.fill_(n)
        if n == 40:  # the same pages under other numbers
            page = caches.table[0, 1].item()
            free = next(i for i in range(11) if not (caches.table == i).any())
            for cache in caches.all.values():
                cache[free] = cache[page]
                cache[page] = NAN
            caches.table[0, 1] = free
        graph.replay()
        close(out, want[:, n : n + 1], 6e-3)


class Waits(TorchDispatchMode):
    """Names the operations in the block that wait for a value, as an index by a mask does."""

    WAITS = "_local_scalar_dense", "nonzero", "aten.equal", "masked_select", "unique"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func is torch.ops.aten.index.Tensor else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        if by_mask or any(word in str(func) for word in self.WAITS):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


NOTHING_NEW = {f"{x}_{name}": None for name in ("sel", "win", "raw") for x in "kv"}
SAME_PAGE = torch.tensor([[0, 1, 2, 3], [0, 1, 7, 8]])
PAGE_AGAIN = torch.tensor([[0, 0, 2, 1], [4, 5, 7, 8]])
ONE = zeros(B, S, G, DK)
BAD = {  # what is changed of a good call, and what is told
    "length": (dict(lens=[30, 33]), "cache_seqlens must be from 0 to 32 .* 33 of sequence 1"),
    "negative": (dict(lens=[-1, 3]), "cache_seqlens must be from 0 to 32 .*, got -1 of sequence 0"),
    "lens dtype": (dict(cache_seqlens=torch.zeros(2)), "cache_seqlens must be an int32 or"),
    "lens shape": (dict(cache_seqlens=torch.zeros(3).int()), r"cache_seqlens must be \[B\] with"),
    "page": (dict(block_table=torch.full((2, 4), 11)), r"block_table must name pages from 0 to 10"),
    "negative page": (dict(block_table=torch.full((2, 4), -1)), r"block_table .*-1 at \[0, 0\]"),
    "table": (dict(block_table=torch.zeros(4).int()), r"block_table must be \[B, blocks\]"),
    "same page": (dict(block_table=SAME_PAGE, checked=True),
                  "block_table must not name a page twice that new tokens go to, got 0 for seq"),
    "same page of one": (dict(block_table=PAGE_AGAIN, checked=True),
                         "that new tokens go to, got 0 for sequences 0 and 0"),
    "page of another": (dict(block_table=SAME_PAGE, checked=True, lens=[0, 32]),
                        "that new tokens go to, got 0 for sequences 0 and 1"),
    "long length": (dict(cache_seqlens=torch.tensor([1, 2**32])),
                    "cache_seqlens must be int32 numbers, got 1 to 4294967296"),
    "long number": (dict(cache_seqlens=2**40), "cache_seqlens must be at most 2147483647"),
    "two for one cache": (dict(kind="static", k_sel_cache=ONE, k_win_cache=ONE),
                          "k_win must be k_sel or None: both have one cache"),
    "no function": (dict(phi_k=3), "phi_k must be a function, got int"),
    "scale": (dict(softmax_scale=10**400), "softmax_scale must be a finite number above 0"),
    "dtype": (dict(k_sel=torch.zeros(B, 32, G, DK)), "k_sel must have q's dtype torch.float64"),
    "shape": (dict(v_win=zeros(B, 3, G, DV)), r"v_win must be \[2, 32, 2, 24\]"),
    "cache dtype": (dict(v_sel_cache=torch.zeros(11, PAGE, G, DV)), "v_sel_cache must have q's"),
    "cache shape": (dict(k_win_cache=zeros(3, PAGE, G, DK)), r"k_win_cache must be"),
    "cmp pages": (dict(k_cmp_cache=zeros(11, 3, G, DK)), "k_cmp_cache must be .11"),
    "strides": (dict(k_sel_cache=zeros(11, G, PAGE, DK).transpose(1, 2)),
                "k_sel_cache must be contiguous"),
    "page size": (dict(k_sel_cache=zeros(11, 6, G, DK)), "k_sel_cache must have p"),
    "gates": (dict(gates=torch.zeros(B, 32, HQ, 2)), r"gates must be \[2, 32, 4, 3\]"),
    "one of two": (dict(v_raw=None), "v_raw must be given where k_sel is"),
    "value alone": (dict(k_sel=None), "v_sel goes with k_sel"),
    "no phi": (dict(phi_v=None), "phi_v must be given too"),
    "raw without phi": (dict(phi_k=None, phi_v=None), "k_raw goes with phi_k and phi_v"),
    "phi's shape": (dict(phi_k=lambda x: x), r"phi_k must make \[16, 1, 2, 16\]"),
    "both": (dict(k_cmp=torch.zeros(B, 1, G, DK)), "give either k_cmp and v_cmp or phi_k"),
    "q": (dict(q=torch.zeros(B, HQ, DK)), r"q must be \[B, T, HQ, Dk\]"),
    "heads": (dict(q=zeros(B, 32, 3, DK), gates=torch.zeros(B, 32, 3, 3)), "HQ=3"),
    "rotary": (dict(rotary_cos=zeros(9, 8), rotary_sin=zeros(9, 8)), "rotary_cos must"),
    "one rotary": (dict(rotary_cos=zeros(64, 8)), "rotary_cos and rotary_sin go together"),
    "static rows": (dict(kind="static", k_cmp_cache=zeros(B, 3, G, DK)),
                    "k_cmp_cache must hold the 15 compressed tokens of 64"),
    "static length": (dict(kind="static", lens=[64, 1], **NOTHING_NEW),
                      "cache_seqlens must be from 32 to 64 for T=32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    changed, told = dict(BAD[name][0]), BAD[name][1]
    tokens, caches = Tokens(), Caches(changed.pop("kind", "pages"))
    before = {n: x.clone() for n, x in caches.all.items()}
    lens = changed.pop("lens", [0, 0])
    table = {"block_table": caches.table}
    with pytest.raises((TypeError, ValueError), match=told):
        caches.call(lens, tokens.part([0, 0], 32), **{**table, **changed})
    if name != "phi's shape":  # which is known once it has run
        for n, was in before.items():
            assert torch.equal(caches.all[n].isnan(), was.isnan()), f"{n} was written to"


def test_bytes_per_token_are_those_of_the_caches():
    config = NSAConfig(dim=32, heads=4, groups=2, d_k=16, d_v=24, l=8, d=4, l_sel=16, w=20)
    tell = kvcache.cache_bytes_per_token

    def size(n):
        one = NSACache(config, 1, n, dtype=torch.float16)
        return sum(x.nbytes for x in vars(one).values() if isinstance(x, Tensor) and x.ndim == 4)

    of_page = sum(x[0].nbytes for x in Caches("pages", torch.float32).all.values())
    assert tell(config, torch.float16) == (size(128) - size(64)) / 64
    assert tell(config, torch.float32, ring=False) == of_page / PAGE
    assert_raises(
        (TypeError, "config must be an nsa.NSAConfig, got int", lambda: tell(3)),
        (TypeError, "dtype must be a torch.dtype", lambda: tell(config, "bf16")),
        *((TypeError, f"dtype must be a floating type.*torch.float8_e4m3fn, got {dtype}",
           lambda dtype=dtype: tell(config, dtype))
          for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)),
    )  # fmt: skip
