"""The prefill kernels against the fp64 oracle (small) and the fp64 reference (GPU sizes).

Small shapes run in Triton's interpreter and on a GPU; those marked `big` on a GPU only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa import launches, oracle, select
from nsa.kernels import prefill
from nsa.kernels.prefill import fused, hopper
from nsa.kernels.prefill.blocks import ops as blocks_ops
from nsa.kernels.prefill.blocks.fwd_triton import gated_block_attention_fwd
from nsa.kernels.prefill.choice import score_topn_triton
from nsa.kernels.prefill.choice.score_topn_triton import _block_topn_kernel, topn_warps
from nsa.kernels.prefill.combine import combine_bwd
from nsa.kernels.prefill.span import bwd_triton as span_bwd
from nsa.kernels.prefill.span import ops as span_ops
from nsa.kernels.tiles import pow2
from nsa.tests import cases
from nsa.tests.cases import BF16, F16, F32, NAMES, PAPER, SHAPES, WIDE, Inputs, Shape, check, flat
from nsa.tests.helpers import BLOCK_KINDS, deterministic, make_block_indices, randn

pytestmark = pytest.mark.kernel
CORE = pytest.mark.core
# The core is what every report runs; the other head sizes cost minutes of compiling.
ALL = pytest.mark.parametrize("shape", [
    *(pytest.param(s, marks=CORE if i in (2, 6, 7, 9) else []) for i, s in enumerate(SHAPES)),
    *cases.CHUNKS,
], ids=str)  # fmt: skip

# Forward and backward of spans and of chosen blocks, whichever kernels the launchers choose.
SPANS = ["_span_fwd_*", "_span_bwd_*"]
BLOCKS = ["_block_attn_*", "_block_attn_bwd_*"]


# ---- branches ------------------------------------------------------------------------------------


@ALL
def test_compressed(shape, device):
    x, sizes = Inputs(shape, device), dict(l=shape.l, d=shape.d, **shape.at)
    ours = lambda *t: prefill.compressed_attention_triton(*t, **sizes, **x.packing(compressed=True))
    theirs = lambda i, *t, plain=False: x.exact(plain).compressed_attention(*t, **sizes)
    check("compressed", x, NAMES[:3], ours, theirs, SPANS[: 1 + bool(len(x.k_cmp))])


@ALL
def test_sliding(shape, device):
    x, window = Inputs(shape, device, seed=1), dict(window=shape.w, **shape.at)
    ours = lambda *t: prefill.sliding_attention_triton(*t, **window, **x.packing())[0]
    theirs = lambda i, *t, plain=False: (x.exact(plain).sliding_attention(*t, **window),)
    check("sliding", x, ["q", "k", "v"], ours, theirs, SPANS)


def selected_case(shape: Shape, device: str, kind: str, seed: int) -> None:
    x, chosen = Inputs(shape, device, seed=seed), shape.indices(kind, device)
    parts = chosen.flatten(0, -3).split(x.seqs)
    ours = lambda *t: prefill.selection_blocks_triton(
        *t, x.stride(chosen), block_size=shape.l_sel, **shape.at, **x.packing()
    )
    theirs = lambda i, *t, plain=False: (x.by_blocks(plain, *t, parts[i][None]),)
    check(f"selected-{kind}", x, ["q", "k", "v"], ours, theirs, BLOCKS)


@ALL
def test_selected(shape, device):
    selected_case(shape, device, "ragged", seed=2)


@CORE
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("shape", [Shape((35, 1, 9)), SHAPES[6]], ids=str)
def test_selected_distributions(shape, kind, device):
    selected_case(shape, device, kind, seed=3)


def chosen_by(x: Inputs) -> dict:
    """What select_blocks_triton takes beside tensors."""
    return dict(x.shape.sizes, **x.shape.at, **x.packing(compressed=True, longest=True))


def whole_case(case: str, x: Inputs, call=prefill.nsa_prefill_triton) -> None:
    """The fused operator: block choice as the kernels made it, everything else against fp64. Where
    each query chooses all blocks, selection goes as dense attention."""
    shape, chosen = x.shape, []
    dense = max(shape.keys) <= shape.n_sel * shape.l_sel

    def ours(q, k_cmp, v_cmp, k, v, *win_and_gates):
        *win, gates = win_and_gates
        if shape.q_start:  # from the first key on that the window of a chunk reaches
            win = [t[:, max(0, shape.q_start + 1 - shape.w) :] for t in win]
        how = dict(shape.whole, **x.packing(longest=True))
        out, aux = call(q, k_cmp, v_cmp, k, v, *win, gates, **how)
        blocks, lse = aux["block_indices"].reshape(-1, shape.G, shape.n_sel), aux["lse"]
        T = len(x.do)
        assert not shape.beyond or ((blocks[T:] == -1).all() and lse[T:].isneginf().all())
        if T and (shape.q_start or shape.beyond or dense) and torch.is_grad_enabled():
            given = x.layout(x.q), x.layout(x.k_cmp), lse[:T] if shape.packed else lse
            alone = prefill.select_blocks_triton(*given, **chosen_by(x))
            assert torch.equal(blocks[:T], alone.reshape(blocks[:T].shape))
        chosen[:] = x.split(blocks[:T])
        return out

    def theirs(i, q, k_cmp, v_cmp, k, v, k_win, v_win, gates, plain=False):
        lib = x.exact(plain)
        cmp, _ = lib.compressed_attention(q, k_cmp, v_cmp, l=shape.l, d=shape.d, **shape.at)
        sel = x.by_blocks(plain, q, k, v, chosen[i][None])
        win = lib.sliding_attention(q, k_win, v_win, window=shape.w, **shape.at)
        return (gates[..., :1] * cmp + gates[..., 1:2] * sel + gates[..., 2:] * win,)

    here = ["_every_block_kernel"] if dense else ["_block_topn_kernel", "_block_attn_*"]
    kernels = [*SPANS, *here, *BLOCKS[1:] * (not dense), "_combine_bwd_kernel"]
    check(case, x, NAMES, ours, theirs, kernels, ["_span_*", *here])


@ALL
def test_whole(shape, device):
    whole_case("whole", Inputs(shape, device, seed=6))


# Keys first seen by the second query of a tile, or of its neighbour; 17 compressed keys, of which
# max_seqlen allows no more: one in a tile of its own. Then windows in tiles of 16 keys and 16
# queries: the first or last key is the neighbour of a tile's edge, so that the tile without a mask
# is one further.
LAST_ALONE = Shape((68, 5), G=1, l=4, d=4)
EDGES = [
    (test_compressed, Shape((45,), G=1, h=4, l=4, d=2)),
    (test_compressed, Shape((50,), G=1, dtype=F32, l=4, d=2)),
    (test_compressed, replace(LAST_ALONE, h=4)),
    (test_whole, LAST_ALONE),
    (test_sliding, Shape((70,), G=1, dtype=F32, w=31)),
    (test_sliding, Shape((70,), G=1, D=48, w=34)),
]


@pytest.mark.parametrize("test, shape", EDGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_keys_beside_the_edges_of_tiles(test, shape, device):
    test(shape, device)


def test_queries_of_a_key_split_over_programs(kernel_device, monkeypatch):
    """As on a GPU, where the splits are many: whole tiles for each, none for the last."""
    if kernel_device == "cuda":
        pytest.skip("there the launcher splits them itself")
    real, seen = span_bwd.launch, []

    def split(kernel, grid, *args, **constants):
        if kernel is not span_bwd._span_bwd_dkdv_kernel:
            return real(kernel, grid, *args, **constants)
        whole = args[9:11]
        parts = [x.new_full((4, *x.shape[1:]), float("nan"), dtype=F32) for x in whole]
        real(kernel, (*grid[:2], 4), *args[:9], *parts, *args[11:], **constants)
        for x, part in zip(whole, parts, strict=True):
            x[0] = part.sum(0)
        seen.append(len(whole))

    monkeypatch.setattr(span_bwd, "launch", split)
    shape = Shape((90,), G=1, dtype=F32)
    with deterministic():
        test_compressed(shape, kernel_device)
        test_sliding(shape, kernel_device)
    assert seen == [2, 2]


# ---- the choice of blocks ------------------------------------------------------------------------


def choice(x: Inputs, **scale) -> tuple[Tensor, dict]:
    """block_indices, and what was launched for them."""
    shape, q, k = x.shape, x.layout(x.q), x.layout(x.k_cmp)
    how = dict(l=shape.l, d=shape.d, **shape.at, **x.packing(compressed=True), **scale)
    _, lse = prefill.compressed_attention_triton(q, k, k, **how)
    with launches.recording() as counts:
        got = prefill.select_blocks_triton(q, k, x.stride(lse), **chosen_by(x), **scale)
    return got, counts


# Compressed keys reach beyond the forced blocks, and into blocks of the next tile of 16 keys; the
# last of 79 tokens see two such tiles exactly.
OVERLAPPING = dict(l=16, d=2, l_sel=4, n_sel=6)
SEVERAL_TILES = [
    Shape((79,), G=1, dtype=F32, **{**OVERLAPPING, "n_sel": 17}),
    Shape((79,), G=1, h=1, D=48, **OVERLAPPING),
    # More than the 32 blocks of the least ranking.
    Shape((20,), q_start=131, dtype=F32, **OVERLAPPING),
]


@ALL
def test_choice_of_blocks(shape, device):
    x = Inputs(shape, device, seed=5)
    got, counts = choice(x)
    assert sum(counts.values()) >= 1
    where = device if shape.big else "cpu"
    fn = select.select_blocks if shape.big else oracle.select_blocks
    want = torch.cat([
        fn(*(t[None].to(where).double() for t in pair), **shape.sizes, **shape.at)[0]
        for pair in zip(x.split(x.q), x.split(x.k_cmp, "k_cmp"), strict=True)
    ])  # fmt: skip
    got, want = got.reshape(want.shape).cpu(), want.cpu()
    differ = (got != want).any(-1).float().mean().item()
    # Scores of two blocks may round to the other order; forced blocks and padding never may.
    assert differ <= (1e-3 if shape.dtype == F32 else 0.02), f"{differ:.2%} of the rows differ"
    assert torch.equal((got < 0).sum(-1), (want < 0).sum(-1))


@pytest.mark.parametrize("shape", SEVERAL_TILES, ids=str)
def test_choice_among_several_tiles_of_keys(shape, device):
    test_choice_of_blocks(shape, device)


@CORE
@pytest.mark.parametrize("lengths", [(140,), (139, 3)], ids=str)
def test_slabs_of_queries_choose_what_all_at_once_do(lengths, kernel_device, monkeypatch):
    """The last slab has more blocks to rank than the first: more than the 32 of the smallest."""
    x = Inputs(Shape(lengths, G=1, h=1, l=4, d=2, l_sel=4), kernel_device, seed=8)
    whole, _ = choice(x)
    monkeypatch.setattr(score_topn_triton, "SLAB_BYTES", 1)
    slabs, counts = choice(x)
    assert counts["_block_topn_kernel"] >= 2
    assert torch.equal(slabs, whole)


def test_the_choice_of_blocks_takes_a_softmax_scale_as_given(kernel_device):
    x = Inputs(Shape((50,), G=1, dtype=F32, **OVERLAPPING), kernel_device)
    scaled, plain = choice(x, softmax_scale=0.5)[0], choice(x)[0]
    x.q *= 2
    assert torch.equal(scaled, choice(x)[0]) and not torch.equal(plain, scaled)


RANKINGS = {
    "random": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)),
    "ties": lambda n: torch.arange(n) * 7 % 5 / 4.0,
    "equal": lambda n: torch.ones(n),
    "nothing": lambda n: torch.zeros(n),
    "rising": lambda n: torch.arange(n) * 1e-3,
    "nan": lambda n: torch.where(torch.arange(n) % 3 == 0, float("nan"), torch.arange(n) * 1.0),
}


@CORE
@pytest.mark.parametrize("seen, n_sel, n_init, n_local", [
    *((seen, *sizes) for seen in (1, 16, 17, 64, 250)
      for sizes in ((1, 0, 1), (3, 1, 2), (5, 0, 1), (16, 1, 2))), (33000, 16, 1, 2),
])  # fmt: skip
def test_ranks(seen, n_sel, n_init, n_local, kernel_device):
    """The kernel alone, one query: forced blocks, then scores, then the lower index; no write past
    its row."""
    blocks = max(pow2(seen), 32)
    own = seen - 1
    forced = {b: 2 * seen - (own - b) for b in range(seen) if own - b < n_local}
    forced |= {b: seen for b in range(min(n_init, seen)) if b not in forced}
    for kind, ranking in RANKINGS.items():
        scores = torch.full((2 * blocks,), 1e9)  # what lies behind the query must not count
        scores[:seen] = ranking(seen)
        out = torch.full((3, n_sel), 99, dtype=torch.int32, device=kernel_device)
        # Tokens, keys and blocks are one: the query at seen - 1 sees as many blocks.
        _block_topn_kernel[(1, 1)](
            scores.to(kernel_device), out[1:], out, out, 1, seen, own, 0, 1, 2 * blocks,
            VARLEN=False, BLOCK_Q=1, BLOCK_N=16, NB=16, BLOCKS=blocks, N_SEL=n_sel,
            N_PAD=pow2(n_sel), N_INIT=n_init, N_LOCAL=n_local, G=1, l=1, d=1, l_sel=1,
            num_warps=topn_warps(blocks),
        )  # fmt: skip
        score = scores.nan_to_num(0.0).tolist()
        order = sorted(range(seen), key=lambda b, s=score: (-forced.get(b, 0), -s[b], b))
        want = sorted(order[:n_sel])
        assert out[1].tolist() == want + [-1] * (n_sel - len(want)), kind
        assert (out[0] == 99).all() and (out[2] == 99).all(), kind


def assert_a_nan_query_harms_no_other(q: Tensor, k: Tensor, lse: Tensor, at: int, **how) -> dict:
    """Query `at` keeps its forced blocks, of which there are two, and others what they chose.
    Returns what was launched."""
    want = prefill.select_blocks_triton(q, k, lse, **how)
    q[:, at] = float("nan")
    with launches.recording() as counts:
        got = prefill.select_blocks_triton(q, k, lse, **how)
    others, own = torch.arange(q.shape[1], device=q.device) != at, at // how["l_sel"]
    assert torch.equal(got[:, others], want[:, others])
    for row in got[0, at].tolist():
        assert {0, own} < set(row) <= set(range(own + 1)) and row == sorted(set(row))
    return counts


def test_a_nan_query_keeps_its_forced_blocks_and_harms_no_other(kernel_device):
    like = dict(device=kernel_device, dtype=F16)
    q, k = randn(1, 90, 4, 16, seed=1, **like), randn(1, 21, 2, 16, seed=2, **like)
    lse = randn(1, 90, 4, seed=3, device=kernel_device)
    how = dict(l=8, d=4, l_sel=16, n_sel=3, n_init=1, n_local=1)
    assert_a_nan_query_harms_no_other(q, k, lse, 85, **how)


# ---- gates ---------------------------------------------------------------------------------------


def any_gates(x: Inputs) -> Inputs:
    """Of both signs, some 0, some large; the last query's are positive."""
    gates = randn(*x.gates.shape, seed=70, device=x.device)
    at = torch.arange(gates.numel(), device=x.device).view(gates.shape)
    gates = gates.masked_fill(at % 7 == 0, 0.0).masked_fill(at % 7 == 1, -0.0)
    gates = torch.where(at % 41 == 2, gates * 30, gates)
    gates[-1] = gates[-1].abs()
    x.gates = gates.to(x.shape.dtype)
    return x


# Groups of four heads or more take the passes that add dQ. The last tiles have dead rows.
SIGNED = [
    Shape((37,), h=4),
    Shape((5, 0, 20, 1), h=4),
    Shape((37,), G=1, h=3, D=48, Dv=16, dtype=F32),
    Shape((1003,), G=2, h=16, **WIDE, dtype=BF16, n_sel=8, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, **WIDE, dtype=BF16, n_sel=4, **PAPER),
    Shape((600,), G=2, h=8, D=64, Dv=64, n_sel=4, **PAPER),
]


@pytest.mark.parametrize("shape, passes", [
    pytest.param(s, n, marks=CORE if i in (0, 3, 4) else [])
    for i, s in enumerate(SIGNED) for n in (1, 2) if s.big or not i or n == 2
], ids=str)  # fmt: skip
def test_gates_of_any_sign(shape, passes, device):
    with deterministic(passes == 2):
        whole_case(f"signs-{passes}", any_gates(Inputs(shape, device, seed=6)))


@pytest.mark.parametrize("shape", [SIGNED[3]], ids=str)
def test_gates_of_any_sign_through_the_library(shape, device):
    """What test_packs.py does not do in the interpreter either: at a GPU's size."""
    call = lambda *x, **how: nsa.nsa_attention(*x, **how, backend="triton", return_aux=True)
    whole_case("signs-library", any_gates(Inputs(shape, device, seed=6)), call)


def test_all_gates_negative_or_none(kernel_device):
    """The flag that spares calls without negative gates the signs; 100 rows are four programs."""
    like = dict(dtype=F32, device=kernel_device)
    do, lse = randn(1, 50, 2, 16, seed=1, **like), randn(1, 50, 2, seed=2, **like)
    lse[0, 7] = float("-inf")
    gates = randn(1, 50, 2, 3, seed=3, **like).abs()
    gates[0, 9] = 0.0
    folded = {}
    for sign in (1, -1):
        flag = torch.zeros(1, dtype=torch.int32, device=kernel_device)
        _, _, folded[sign], _ = combine_bwd(do, (do,) * 3, (lse,) * 3, sign * gates, flag)
        assert flag.item() == (sign < 0)
    flag.zero_()
    gates[0, 49, 1, 2] *= -1
    combine_bwd(do, (do,) * 3, (lse,) * 3, gates, flag)
    assert flag.item() == 1
    infinite = folded[1].isinf()
    assert torch.equal(infinite, folded[-1].isinf()) and infinite.sum() == 3 * 2 * 2
    assert torch.equal(folded[1][infinite], folded[-1][infinite])
    bits = folded[-1].view(torch.int32) - folded[1].view(torch.int32)
    assert torch.equal(bits, (~infinite).int())


@CORE
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("h", [2, 16])
def test_two_branches_summed_already(h, keep, kernel_device):
    """What the gated sum takes from the kernel that does both, on any device."""
    big = kernel_device != "cpu"
    S, D, size, dtype = (200, 128, 64, BF16) if big else (23, 16, 16, F32)
    make = lambda i, *tail: randn(1, S, *tail, seed=i, dtype=dtype, device=kernel_device)
    q, o_cmp, o_win = make(0, 2 * h, D), make(1, 2 * h, D), make(2, 2 * h, D)
    k, v, gates = make(3, 2, D), make(4, 2, D), make(5, 2 * h, 3).sigmoid()
    indices = make_block_indices("ragged", 1, S, 2, 2, size, seed=1, device=kernel_device)
    run = lambda *others: gated_block_attention_fwd(
        q, k, v, indices, others, block_size=size, softmax_scale=0.2, keep=keep
    )
    out, lse, both = run(o_cmp, o_win, gates)
    summed = (o_cmp.float() * gates[..., :1] + o_win.float() * gates[..., 2:]).to(dtype)
    again, same, total = run(summed, None, gates)
    assert torch.equal(again, out) and torch.equal(same, lse)
    tolerance = 2e-2 if big else 1e-6
    torch.testing.assert_close(total, both, atol=tolerance, rtol=tolerance)
    assert (both - summed).abs().max() > 0.1  # the selected blocks are in it


# ---- the fused operator beside itself ------------------------------------------------------------


@CORE
@pytest.mark.parametrize("shape", [Shape((37,), h=1), SHAPES[6], SHAPES[9]], ids=str)
def test_without_gradients_the_same_in_less_memory(shape, device, monkeypatch):
    """Where nobody will ask for a gradient the branches' outputs are not kept; nor are compressed
    and sliding attention's rounded apart where one kernel does both."""
    x, kept = Inputs(shape, device, seed=6), []
    operator = fused._prefill
    monkeypatch.setattr(fused, "_prefill", lambda *a: kept.append(operator(*a)) or kept[-1])
    run = lambda t: prefill.nsa_prefill_triton(*t, **shape.whole, **x.packing(longest=True))
    tensors = x.leaves()
    out, aux = run(tensors)
    with torch.no_grad():
        again, same = run(tensors)
    plain, _ = run([t.detach() for t in tensors])
    assert out.requires_grad and torch.equal(plain, again)
    if hopper.forward_pair(x.q, x.k_cmp, x.v_cmp, x.k_win, x.v_win):
        torch.testing.assert_close(again, out, atol=2e-2, rtol=2e-2)
    else:
        assert torch.equal(again, out)
    assert all(torch.equal(aux[n], same[n]) for n in aux)
    for branch in (2, 3, 4):
        assert [results[branch].numel() for results in kept] == [out.numel(), 0, 0]


@CORE
@pytest.mark.parametrize("shape", [SHAPES[6]], ids=str)  # the interpreter always repeats
def test_deterministic_gradients_repeat_bitwise(shape, device):
    x = Inputs(shape, device, seed=7)

    def gradients():
        leaves = x.leaves()
        out, _ = prefill.nsa_prefill_triton(*leaves, **shape.whole)
        return torch.autograd.grad(flat(out, x.do), leaves, x.do)

    with deterministic(), launches.recording() as counts:
        first, again = gradients(), gradients()
    for name, a, b in zip(NAMES, first, again, strict=True):
        assert torch.equal(a, b), name
    assert counts["_block_attn_bwd_dq_kernel"] == 2 and counts["_block_attn_bwd_sum_kernel"] == 4
    assert counts["_span_bwd_dq_kernel"] == 4


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8]], ids=str)
def test_the_future_changes_nothing(shape, device):
    """Other keys and values after a token leave its output as it is, to the last bit."""
    x = Inputs(shape, device, seed=8)
    at = shape.lengths[0] // 2

    def out(future: float) -> Tensor:
        tensors = dict(zip(NAMES, x.leaves(), strict=True))
        for n in NAMES[1:-1]:
            seen = (at - shape.l) // shape.d + 1 if n.endswith("cmp") else at
            tensors[n].data[:, seen:] *= future
        return prefill.nsa_prefill_triton(*tensors.values(), **shape.whole)[0]

    one, other = out(1.0), out(-30.0)
    assert torch.equal(one[:, :at], other[:, :at])
    assert not torch.equal(one[:, at:], other[:, at:])


class _NoGradient(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: None)


OPERATORS = pytest.mark.parametrize("name", ["prefill", "compressed", "sliding", "selected"])


def operator_of(name: str, x: Inputs) -> tuple:
    """A differentiable operator: its leaves, how to call it, and its backward."""
    n, rows = x.shape, x.layout(x.q).shape[:-2]
    chosen = torch.zeros(*rows, n.G, 1, dtype=torch.int32, device=x.device)
    selected = lambda *t, **kw: (prefill.selection_blocks_triton(*t, chosen, **kw), None)
    span, blocks = span_ops._span_attention_bwd, blocks_ops._block_attention_bwd
    leaves, run, how, backward = {
        "prefill": (NAMES, prefill.nsa_prefill_triton, n.whole, fused._prefill_bwd),
        "selected": (["q", "k", "v"], selected, dict(block_size=n.l_sel), blocks),
        "compressed": (NAMES[:3], prefill.compressed_attention_triton, dict(l=n.l, d=n.d), span),
        "sliding": (["q", "k_win", "v_win"], prefill.sliding_attention_triton, dict(window=n.w),
                    span),
    }[name]  # fmt: skip
    return x.leaves(leaves), lambda *t, **kw: run(*t, **how, **kw), backward


@OPERATORS
def test_only_the_output_carries_a_gradient(name, kernel_device, monkeypatch):
    """A gradient of zeros for what the forward keeps would be written, and held, at every step."""
    leaves, call, backward = operator_of(name, Inputs(Shape((23,)), kernel_device))
    launcher = torch.profiler.record_function("nsa::backward")(backward.launcher)
    monkeypatch.setattr(backward, "launcher", launcher)
    out, more = call(*leaves)
    lse = more["lse"] if isinstance(more, dict) else more
    assert out.requires_grad and (lse is None or not lse.requires_grad)
    do = torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.autograd.grad(out, leaves, do)
    kernels = min(e.time_range.start for e in seen.events() if e.name == "nsa::backward")
    before = [e.name for e in seen.events() if e.time_range.start < kernels]
    assert not {"aten::zeros", "aten::zero_", "aten::fill_"} & set(before), before

    out = _NoGradient.apply(call(*leaves)[0])
    unused = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    assert unused == (None,) * len(leaves)


@OPERATORS
def test_a_softmax_scale_is_taken_as_given(name, kernel_device):
    """Twice the default is the same as queries twice as large, to the last bit of the scores."""
    leaves, call, _ = operator_of(name, Inputs(Shape((23,), G=1), kernel_device))
    q, *rest = leaves
    scaled, more = call(q, *rest, softmax_scale=0.5)
    doubled, same = call(2 * q, *rest)
    torch.testing.assert_close(scaled, doubled, rtol=1e-3, atol=1e-3)
    if name == "prefill":
        assert torch.equal(more["block_indices"], same["block_indices"])
    got, want = (torch.autograd.grad(y.sum(), leaves) for y in (scaled, doubled))
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
