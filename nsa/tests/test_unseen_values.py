"""What a query does not see changes neither its output nor the gradient of its q, NaN included:
0 * NaN is NaN, so a probability of 0 does not keep such a value out of a product."""

import itertools
import math
from itertools import pairwise

import pytest
import torch

import nsa
from nsa import oracle
from nsa.blocks import num_compressed
from nsa.tests.cases import BF16, F16, F32, ends_of
from nsa.tests.helpers import TRITON, deterministic, make_block_indices, make_layer, make_qkv, randn
from nsa.tests.oracle_numbers import NAMES

L, D, L_SEL, W = 8, 4, 16, 9
S = 41  # not whole tiles of queries
BAD = NAN, INF, LARGE = [math.nan, math.inf, 60000.0]
ROUTES = ["reference", "sdpa"]


def routes(names, pytorchs, tritons, kernels=()):
    """Parametrise `backend` and `names`: each of PyTorch's routes, Triton's, and its kernels by
    themselves."""
    cases = [*(("triton", x) for x in tritons), *(("kernels", x) for x in kernels)]
    marks = lambda x: [pytest.mark.kernel, *getattr(x, "marks", ())]
    triton = [pytest.param(by, *getattr(x, "values", x), marks=marks(x)) for by, x in cases]
    plain = [(backend, *x) for backend in ROUTES for x in pytorchs]
    return pytest.mark.parametrize(f"backend, {names}", plain + triton)


@pytest.fixture
def where(backend: str, request: pytest.FixtureRequest) -> dict:
    """dtype and device of a route; the kernels' own in 16 bits, those named so in fp32."""
    if backend in ROUTES:
        return dict(dtype=F32, device="cpu")
    dtype = F32 if backend == "kernels" else F16
    return dict(dtype=dtype, device=request.getfixturevalue("kernel_device"))


def sees_window(S, N, start=0):
    t, key = torch.arange(start, start + S)[:, None], torch.arange(N)
    return (key <= t) & (key > t - W)


def sees_compressed(S, N, start=0):
    t, key = torch.arange(start, start + S)[:, None], torch.arange(N)
    return key * D + L - 1 <= t


def sees_ranges(ranges, N):
    """[B, S, G, N]"""
    key = torch.arange(N)
    return ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(-2)


def sees_blocks(blocks, N, start=0):
    return sees_ranges(oracle.blocks_to_ranges(blocks, L_SEL, start), N)


def outcome(run, *tensors):
    """Output, and gradients of all tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    grad = randn(*out.shape, seed=77, dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def close(a, b, tol, what=""):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol, msg=lambda m: f"{what}: {m}")


def check(run, tensors, sees, places, bad):
    """Rows of k and v become `bad`: those of the places (indices of k and v) that nobody sees, then
    those of the others, first in k and then in v.

    sees [(B,) S, (G,) N] of keys. Who sees none of the rows is what it was; if nobody does, the
    gradients of k and v are as well. Who sees one is not finite.
    """
    was, (q, k, v) = outcome(run, *tensors), tensors
    seeing = [(at, who_sees(at, q, k, sees)) for at in places]
    for seen in (False, True):
        together = [(at, rows) for at, rows in seeing if rows.any() == seen]
        for names in (("k", "v") if seen else ("kv",)) if together else ():
            x = {name: t.clone() for name, t in zip("qkv", (q, k, v), strict=True)}
            for name, (at, _) in itertools.product(names, together):
                x[name][at] = bad
            anywhere = torch.stack([rows for _, rows in together]).any(0)
            compare(outcome(run, *x.values()), was, anywhere, k.shape[-2], names, bad)


def who_sees(at, q, k, sees):
    """[(B,) S, G]"""
    hit = torch.zeros(k.shape[:-1], dtype=torch.bool)  # [(B,) N, G]
    hit[at] = True
    hit = hit.transpose(-1, -2)  # [(B,) G, N]
    if sees.ndim == 2:
        sees = sees[:, None]
    found = (sees & (hit[:, None] if q.ndim == 4 else hit)).any(-1)
    return found.expand(*q.shape[:-2], k.shape[-2])


def compare(now, was, seeing, groups, name, bad):
    half = was[1].dtype == F16
    rows = lambda x, which: x.cpu().unflatten(-2, (groups, -1))[which].float()
    for what, a, b in zip(("out", "dq"), now, was, strict=False):
        a, b = rows(a, ~seeing), rows(b, ~seeing)
        assert b.isfinite().all()
        assert a.isfinite().all(), f"{what} of rows that do not see {name} = {bad}"
        close(a, b, 2e-3 if half else 1e-5, what)
    if not seeing.any():
        for what, a, b in zip(("dk", "dv"), now[2:], was[2:], strict=True):
            close(a, b, 5e-3 if half else 1e-5, what)
    elif bad != LARGE:
        odd = ~rows(now[0], seeing).isfinite()
        assert odd.flatten(1).any(-1).all(), f"rows that see {name} = {bad} hide it"
        if math.isnan(bad):
            assert rows(now[0], seeing).isnan().all()
            assert rows(now[1], seeing).isnan().any(-1).all()


def inputs(N, *, B=1, dtype=F32, device="cpu", packed=False, h=2, S=S):
    q, k, v = make_qkv(B, S, 2 * h, 2, 16, Skv=N, dtype=dtype, device=device, seed=N)
    return (q[0], k[0], v[0]) if packed else (q, k, v)


def branch(name, backend, **how):
    """Of q, k and v; in fp32 the routes do not take the kernels of spans, which serve it."""
    cmp, win = nsa.compressed_attention, nsa.sliding_attention
    if backend == "kernels":
        from nsa.kernels.prefill import compressed_attention_triton as cmp
        from nsa.kernels.prefill import sliding_attention_triton as win
    else:
        how = dict(how, backend=backend, flags=TRITON)
    if name == "compressed":
        return lambda *x: cmp(*x, l=L, d=D, **how)[0]
    if name == "sliding":
        first = lambda out: out[0] if isinstance(out, tuple) else out
        return lambda *x: first(win(*x, window=W, **how))
    return lambda *x: nsa.selection_attention(*x, **how)


def causal_ranges(S, N, seed=0):
    """Three ranges a row and group, different ones for all, none after the query."""
    ranges = torch.randint(0, 12, (1, S, 2, 3, 2), generator=torch.Generator().manual_seed(seed))
    start = ranges[..., 0] * 3
    spans = torch.stack([start, start + ranges[..., 1]], -1).to(torch.int32)
    t = torch.arange(N - S, N, dtype=torch.int32)[None, :, None, None, None]
    return spans.minimum(t + 1)


def branch_case(backend, name, dtype=F32, device="cpu", h=2):
    """run, (q, k, v), sees and the places of the bad rows: the last key, one in the middle, rows
    behind the end, and another sequence of the batch."""
    how, every = dict(dtype=dtype, device=device, h=h), slice(None)
    later, middle = (every, slice(-1, None)), (every, slice(20, 21))
    last = (every, slice(S - 1, S))
    if name == "sliding":
        case = {}, inputs(S, B=2, **how), sees_window(S, S), [later, middle, (1,)]
    elif name == "sliding chunk":  # of a longer sequence
        name, places = "sliding", [later, (every, slice(30, 31))]
        case = dict(q_start=S - 6), inputs(S, B=1, S=6, **how), sees_window(6, S, S - 6), places
    elif name == "compressed":
        n = num_compressed(S, L, D)
        places = [(every, slice(n, None)), (every, slice(n - 1, n)), (1,)]
        case = {}, inputs(n + 2, B=2, **how), sees_compressed(S, n + 2), places
    elif name == "blocks":
        blocks = make_block_indices("random", 2, S, 2, 2, L_SEL, seed=1)
        more = dict(block_indices=blocks.to(device), block_size=L_SEL)
        places = [(every, slice(S, None)), last, middle, (1,)]
        case = more, inputs(S + 5, B=2, **how), sees_blocks(blocks, S + 5), places
    else:
        ranges = causal_ranges(12, S)  # of the last queries of so many keys
        more, x = dict(ranges=ranges.to(device)), inputs(S + 5, B=1, S=12, **how)
        case = more, x, sees_ranges(ranges, S + 5), [(every, slice(S, None)), middle, later]
    more, *rest = case
    return branch(name, backend, **more), *rest


CU = [0, 17, 17, 33]  # and rows of no sequence behind


def packed_case(backend, name, dtype=F32, device="cpu", h=2):
    """run, (q, k, v), sees and places: the first and the last key of a sequence, rows of none."""
    spans = [(a, b) for a, b in pairwise(CU) if a < b]
    pack = dict(cu_seqlens=torch.tensor(CU, dtype=torch.int32, device=device))
    if name == "compressed":
        ends = torch.tensor([num_compressed(b - a, L, D) for a, b in spans]).cumsum(0).tolist()
        keys, parts = ends[-1], [(0, ends[0]), (ends[0], ends[1])]
    else:
        keys, parts = S, spans
    sees = torch.zeros(S, 2, keys, dtype=torch.bool)
    ranges = torch.zeros(S, 2, 2, 2, dtype=torch.int32)
    blocks = torch.full((S, 2, 2), -1, dtype=torch.int32)
    for i, ((a, b), (first, last)) in enumerate(zip(spans, parts, strict=True)):
        if name in ("compressed", "sliding"):
            seen = sees_compressed if name == "compressed" else sees_window
            sees[a:b, :, first:last] = seen(b - a, last - first)[:, None]
        else:
            one = make_block_indices("random", 1, b - a, 2, 2, L_SEL, seed=2 * i)
            blocks[a:b], sees[a:b, :, a:b] = one[0], sees_blocks(one, b - a)[0]
            ranges[a:b] = oracle.blocks_to_ranges(one, L_SEL)[0]
    if name == "blocks":
        pack.update(block_indices=blocks.to(device), block_size=L_SEL)
    elif name == "ranges":
        pack.update(ranges=ranges.to(device))
    n = parts[0][1]
    places = [(slice(n, n + 1),), (slice(n - 1, n),), (slice(33, None),)]
    x = inputs(keys, dtype=dtype, device=device, packed=True, h=h)
    return branch(name, backend, **pack), x, sees, places[: 2 if name == "compressed" else 3]


BRANCHES = ["sliding", "sliding chunk", "compressed", "blocks", "ranges"]
PACKED = ["packed sliding", "packed compressed", "packed blocks", "packed ranges"]


def case_of(backend, name, **how):
    build = packed_case if name.startswith("packed") else branch_case
    return build(backend, name.removeprefix("packed "), **how)


@routes(
    "name, bad",
    [*itertools.product(BRANCHES + PACKED, BAD)],
    [*((name, NAN) for name in BRANCHES + PACKED), ("sliding", LARGE), ("compressed", INF),
     ("ranges", INF), pytest.param("blocks", INF, marks=pytest.mark.nightly)],
    [*((name, NAN) for name in BRANCHES[:3]), ("sliding", LARGE)],
)  # fmt: skip
def test_branches(backend, name, bad, where):
    check(*case_of(backend, name, **where), bad)


@pytest.mark.parametrize("two_passes", [False, True])
def test_compressed_backward_of_four_heads(two_passes, kernel_device):
    """Of which there is a kernel that finds all gradients in one pass."""
    case = branch_case("triton", "compressed", F16, kernel_device, h=4)
    with deterministic(two_passes):
        check(*case, NAN)


@pytest.mark.parametrize("bad", BAD[:2])
def test_the_oracle(bad):
    """It gathers what a query sees, and nothing else."""
    _, x, sees, places = branch_case("reference", "sliding", torch.float64)
    check(lambda *x: oracle.sliding_attention(*x, window=W), x, sees, places[:2], bad)


@pytest.mark.parametrize("name", BRANCHES)
def test_an_unseen_score_that_overflows_changes_nothing(backend, name):
    """PyTorch's kernels add the mask, and infinity - infinity is NaN."""
    run, (q, k, v), sees, places = branch_case(backend, name)
    for place in places:
        large = k.clone()
        large[place] = torch.finfo(k.dtype).max / 2
        unseeing = ~who_sees(place, q, k, sees)
        close(*(run(q, x, v).unflatten(-2, (2, -1))[unseeing] for x in (large, k)), 1e-5)


@routes(
    "name, bad",
    [*itertools.product(BRANCHES, [NAN, INF, -INF, 1e36])],
    [*((name, NAN) for name in BRANCHES[:3]), ("compressed", -INF)],
)
def test_a_query_changes_no_other(backend, name, bad, where):
    """Neither its output nor its gradient."""
    run, (q, k, v), *_ = branch_case(backend, name, **where)
    if backend != "triton":
        k = k * 100
    odd, at = q.clone(), q.shape[1] // 2
    odd[:, at, :, 1] = bad
    others = torch.arange(q.shape[1]) != at
    now, was = outcome(run, odd, k, v), outcome(run, q, k, v)
    for x, y in zip(now[:2], was[:2], strict=True):
        close(x[:, others], y[:, others], 1e-5)
    if math.isnan(bad):  # of a row that sees a key
        assert not now[0][:, at].isfinite().all()


ALL = ["sliding", "compressed", "blocks", "ranges"]


@routes(
    "name, n, bad",
    [*itertools.product(ALL, [1, 3], [NAN, INF, -INF])],
    [*itertools.product(ALL, [1, 3], [NAN, -INF])],
)
def test_a_query_that_is_no_number_tells(backend, name, n, bad, where):
    """However few keys it sees, also where all of their scores are -infinity, as of keys unseen."""
    q, k, v = make_qkv(1, n, 4, 2, 16, seed=n, **where)
    q[:, 0, :, 1], k = bad, k.abs()
    first = torch.zeros(1, n, 2, 1, dtype=torch.int32, device=q.device)
    spans = torch.stack([first, first + torch.arange(1, n + 1).to(first)[:, None, None]], -1)
    how = dict(backend=backend, flags=TRITON)
    if name == "sliding":
        out = nsa.sliding_attention(q, k, v, window=W, **how)
    elif name == "compressed":
        out, _ = nsa.compressed_attention(q, k, v, l=1, d=1, **how)
    else:
        given = (
            dict(ranges=spans) if name == "ranges" else dict(block_indices=first, block_size=L_SEL)
        )
        out = nsa.selection_attention(q, k, v, **given, **how)
    assert not out[:, 0].isfinite().any() and out[:, 1:].isfinite().all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_lse_is_that_of_the_seen_keys(backend, name):
    """It is what blocks are chosen by: values have no part in it."""
    n = num_compressed(S, L, D)
    x = dict(zip("qkv", inputs(n), strict=True))
    lse_of = lambda: nsa.compressed_attention(*x.values(), l=L, d=D, backend=backend)[1]
    was = lse_of()
    x[name][:, -1] = NAN
    now, last = lse_of(), sees_compressed(S, n)[:, -1]
    torch.testing.assert_close(now[:, ~last], was[:, ~last])
    assert now[:, last].isnan().all() if name == "k" else torch.equal(now, was)


@pytest.mark.parametrize(
    "backend, bad",
    [*(("reference", bad) for bad in BAD),  # of triton a key of infinity has scores of NaN
     *(pytest.param("triton", bad, marks=pytest.mark.kernel) for bad in (NAN, LARGE))],
)  # fmt: skip
def test_choice_of_blocks(backend, bad, where):
    n = num_compressed(S, L, D)
    q, k, _ = inputs(n + 2, dtype=F16, device=where["device"])
    how = dict(l=L, d=D, l_sel=4, n_sel=5, backend=backend, flags=TRITON)
    was = nsa.select_blocks(q, k, **how)
    for row in (n, n - 1, 3):
        bad_k = k.clone()
        bad_k[:, row] = bad
        blind = ~sees_compressed(S, n + 2)[:, row]
        assert torch.equal(nsa.select_blocks(q, bad_k, **how)[:, blind], was[:, blind]), row


def layer(dtype=F32, device="cpu", B=2, h=2):
    """What nsa_attention takes, buffers of compressed and selected keys longer than seen."""
    n = num_compressed(S, L, D)
    make = lambda seed, *dims: randn(B, *dims, seed=seed, dtype=dtype, device=device)
    keys = [make(i, rows, 2, 16) for i, rows in enumerate([n + 2, n + 2, S + 3, S + 3, S, S], 2)]
    return [make(1, S, 2 * h, 16), *keys, make(8, S, 2 * h, 3).sigmoid()]


def whole(tensors, backend):
    how = dict(l=L, d=D, l_sel=L_SEL, n_sel=3, window=W, backend=backend, flags=TRITON)
    return outcome(lambda *x: nsa.nsa_attention(*x, **how), *tensors)


@routes("bad", [(bad,) for bad in BAD], [(NAN,)])
def test_attention(backend, bad, where):
    tensors, tol = layer(**where), 4e-3 if backend == "triton" else 1e-5
    n, was = num_compressed(S, L, D), whole(tensors, backend)
    last = {1: n - 1, 2: n - 1, 3: S - 1, 4: S - 1, 5: S - 1, 6: S - 1}
    first = (n - 1) * D + L - 1  # that sees the last compressed key
    for of, sequences, behind, seen_from in (
        ((1, 3, 5), slice(1), 0, first),  # keys from the last one on
        ((2, 4, 6), slice(1), 0, first),  # values
        ((1, 2, 3, 4), slice(None), 1, S),  # what is behind the end, where there is room
    ):
        x = [t.clone() for t in tensors]
        for i in of:
            x[i][sequences, last[i] + behind :] = bad
        now = whole(x, backend)
        for what, a, b in zip(("out", "dq"), now, was, strict=False):
            close(a[:, :seen_from], b[:, :seen_from], tol, f"{of} {what}")
            close(a[1:], b[1:], tol, f"{of} {what}")
        if seen_from == S:
            assert all(g.isfinite().all() for g in now[1:])
        elif math.isnan(bad):
            assert now[0][0, -1].isnan().all()


def test_a_query_of_nan_that_sees_nothing():
    """Where there is no compressed key at all."""
    q, k, v = make_qkv(1, 5, 2, 1, 8, Skv=0)
    q[0, 0] = NAN
    out, lse = nsa.compressed_attention(q, k, v, l=L, d=D, backend="reference")
    assert not out.any() and lse.isneginf().all()


GATES = [((INF, NAN),), ((-INF,),)]  # kernels ask whether any gate is negative


@routes("odd", GATES, GATES)
def test_gates_that_are_no_numbers(backend, odd, where):
    """Of one that is none the row tells, by its output and by its q's gradient; the others are what
    they were, and so is what the gradient of the gates is made of."""
    tensors = layer(**where, B=1 if backend == "triton" else 2)
    tol = 4e-3 if backend == "triton" else 1e-5
    was, x = whole(tensors, backend), [t.clone() for t in tensors]
    others = torch.ones(was[0].shape[:-1], dtype=torch.bool)
    for i, (value, gate) in enumerate(itertools.product(odd, range(3))):
        x[7][0, 30 + i, 1, gate] = value
        others[0, 30 + i, 1] = False
    now = whole(x, backend)
    for got, want in zip(now[:2], was[:2], strict=True):
        assert not got[~others].isfinite().all(-1).any(), "hidden"
        close(got[others], want[others], tol)
    close(now[8], was[8], tol)


@pytest.mark.parametrize("name", NAMES[1:-1])
@pytest.mark.parametrize("h", [pytest.param(16, marks=pytest.mark.core), 4])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_at_a_gpus_sizes(packed, h, name, kernel_device):
    """The last token of a sequence, whose kernels read 64 or 128 keys at a time."""
    if kernel_device == "cpu":
        pytest.skip("a GPU's size")
    n, l, d = 700, 32, 16
    n_cmp = num_compressed(n, l, d)
    kw = dict(l=l, d=d, B=2, dtype=BF16, device=kernel_device)
    x = dict(zip(NAMES, make_layer(n, 2 * h, 2, 128, **kw), strict=True))
    last = (n_cmp - 1) * d + l - 1 if "cmp" in name else n - 1  # the first token that sees it
    how = dict(cu_seqlens=ends_of([n, n], kernel_device), max_seqlen=n) if packed else {}

    def run(x):
        x = {m: (t.flatten(0, 1) if packed else t).detach().requires_grad_() for m, t in x.items()}
        out = nsa.nsa_attention(**x, **how, flags=TRITON, backend="triton")
        dq = torch.autograd.grad(out, x["q"], torch.ones_like(out))[0]
        return [t.detach().view(2, n, *t.shape[-2:]) for t in (out, dq)]

    with deterministic():
        want = run(x)
        x[name] = x[name].clone()
        x[name][0, -1] = NAN
        got = run(x)
    assert got[0][0, last:].isnan().all()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[0, :last], b[0, :last]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("team", [False, True])
def test_decode_of_several_tokens(team, kernel_device, monkeypatch):
    """A new token's keys are not those of the tokens before it."""
    from nsa.kernels.decode import nsa_decode_triton

    monkeypatch.setenv("NSA_USE_CLUSTER", "0")
    T, lens = 4, torch.tensor([39, 30], device=kernel_device)
    make = lambda seed, *dims: randn(2, *dims, seed=seed, dtype=F16, device=kernel_device)
    q, gates = make(1, T, 4, 16), make(2, T, 4, 3).sigmoid()
    caches = [make(3 + i, 12 if i < 2 else 48, 2, 16) for i in range(6)]
    sizes = dict(l=L, d=D, l_sel=L_SEL, n_sel=3, n_init=1, n_local=2, window=W, max_len=48)

    def run(caches):
        counters = torch.zeros(2, 2, 32, dtype=torch.int32, device=kernel_device) if team else None
        with torch.no_grad():
            return nsa_decode_triton(q, *caches, gates, lens, **sizes, counters=counters)

    was = run(caches)
    for i in range(len(caches)):
        changed = [x.clone() for x in caches]
        # The last compressed key of 39 tokens is that of the last one alone: (39 - 8) % 4 == 3.
        row = num_compressed(39, L, D) - 1 if i < 2 else 38
        seen_from = max((row * D + L - 1 if i < 2 else row) - (39 - T), 0)
        changed[i][0, row:] = NAN
        now = run(changed)
        assert torch.equal(now[1], was[1]), i
        assert torch.equal(now[0, :seen_from], was[0, :seen_from]), i
        assert now[0, seen_from:].isnan().all(), i


@pytest.mark.parametrize("dtype", [F16, F32])
def test_a_backward_takes_finite_keys_and_values(dtype, kernel_device):
    from nsa.kernels.prefill.marked_keys import keys_for_backward, values_for_backward

    x = randn(3, 70, 2, 24, seed=1, dtype=dtype, device=kernel_device)
    x[0, 3, 1, :3] = torch.tensor([NAN, INF, -INF])
    most = torch.finfo(dtype).max
    for given in (x, x.transpose(1, 2)):
        assert torch.equal(keys_for_backward(given), torch.nan_to_num(given, 0.0, most, -most))
        assert torch.equal(values_for_backward(given), torch.nan_to_num(given, 0.0, 0.0, 0.0))
