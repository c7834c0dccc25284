"""The prefill kernels against the fp64 oracle (small) and the fp64 reference (GPU sizes).

Small shapes run in Triton's interpreter and on a GPU; those marked `big` on a GPU only.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import nsa
from bench.parity import MAE_LIMIT, assert_parity, never_launched
from nsa import blocks, launches, oracle, reference, select
from nsa.compress import mean_pool
from nsa.kernels import prefill
from nsa.kernels.prefill import block_attn, block_select, fused, hopper, span, span_bwd
from nsa.kernels.prefill.block_attn_fwd import gated_block_attention_fwd
from nsa.kernels.prefill.block_select import _block_topn_kernel, topn_warps
from nsa.kernels.prefill.combine import combine_bwd
from nsa.kernels.tiles import pow2
from nsa.tests.helpers import BLOCK_KINDS, deterministic, make_block_indices, randn

pytestmark = pytest.mark.kernel
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Sequence lengths (several: packed, or equal: a batch), heads and NSA sizes of one case."""

    lengths: tuple[int, ...]
    G: int = 2
    h: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = F16
    l: int = 8
    d: int = 4
    l_sel: int = 16
    n_sel: int = 3
    w: int = 11
    packed: bool = False
    big: bool = False
    apart: bool = False  # tensors of strides, each number beside a zero

    def __str__(self) -> str:
        kind = "packed" if self.packed else "dense"
        name = str(self.dtype).removeprefix("torch.")
        size = "x".join(map(str, self.lengths))
        kind += "-apart" * self.apart
        return f"{kind}-{size}-G{self.G}h{self.h}-D{self.D}v{self.Dv}-l{self.l_sel}-{name}"

    @property
    def sizes(self) -> dict[str, int]:
        return dict(l=self.l, d=self.d, l_sel=self.l_sel, n_sel=self.n_sel)


PAPER = dict(l=32, d=16, l_sel=64, w=512, big=True)
SHAPES = [
    Shape((53,)),
    Shape((23, 23), dtype=F32),
    Shape((5, 0, 35, 1, 9), packed=True),
    Shape((37,), G=1, h=3, D=24, Dv=16),
    Shape((7,), G=1, h=1, D=16, Dv=32, dtype=F32),
    Shape((50,), G=1, h=2, l=8, d=8, l_sel=32, n_sel=5, w=64),
    Shape((1000,), G=4, h=16, D=128, Dv=128, dtype=BF16, n_sel=8, **PAPER),
    Shape((2048,), G=1, h=16, D=192, Dv=128, dtype=BF16, n_sel=16, **PAPER),
    Shape((777, 777), G=2, h=8, D=64, Dv=64, n_sel=4, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, D=128, Dv=128, n_sel=4, packed=True, **PAPER),
    Shape((600,), G=1, h=5, D=256, Dv=256, dtype=BF16, n_sel=4, **PAPER),
    Shape((600,), G=2, h=2, D=64, Dv=64, dtype=F32, n_sel=4, **PAPER),
    # The kernels for Hopper have tiles of their own for each number of heads.
    Shape((1531, 1531), G=2, h=4, D=128, Dv=128, n_sel=4, **PAPER),
    Shape((333,), G=1, h=8, D=128, Dv=128, dtype=BF16, n_sel=4, **PAPER),
    Shape((100,), G=1, h=64, D=128, Dv=128, dtype=BF16, n_sel=4, **PAPER),
    Shape((24,), apart=True),
    Shape((9, 15), packed=True, apart=True),
]
# The core is what every report runs; the other head sizes cost minutes of compiling.
CORE = (2, 6, 7, 9)
ALL = pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.core] if i in CORE else []) for i, s in enumerate(SHAPES)],
    ids=str,
)


def strided(x: Tensor) -> Tensor:
    """The values of x, each beside a zero."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


class Inputs:
    """Tensors of a shape in kernel layout, and each sequence alone in fp64."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self.stride = strided if shape.apart else lambda x: x
        T, HQ, sizes = sum(shape.lengths), shape.G * shape.h, shape
        kw = dict(dtype=shape.dtype, device=device)
        draw = lambda n, *dims: randn(T, *dims, seed=100 * seed + n, **kw)
        self.q, self.do = draw(1, HQ, sizes.D), self.stride(draw(2, HQ, sizes.Dv))
        self.k, self.v = draw(3, sizes.G, sizes.D), draw(4, sizes.G, sizes.Dv)
        self.k_win, self.v_win = draw(5, sizes.G, sizes.D), draw(6, sizes.G, sizes.Dv)
        self.gates = draw(7, HQ, 3).sigmoid()
        pieces = [
            (mean_pool(k[None], shape.l, shape.d)[0], mean_pool(v[None], shape.l, shape.d)[0])
            for k, v in zip(self.split(draw(8, sizes.G, sizes.D)),
                            self.split(draw(9, sizes.G, sizes.Dv)), strict=True)
        ]  # fmt: skip
        self.k_cmp = torch.cat([k for k, _ in pieces]).to(shape.dtype)
        self.v_cmp = torch.cat([v for _, v in pieces]).to(shape.dtype)

    def split(self, x: Tensor) -> list[Tensor]:
        """Rows by sequence, or compressed rows by sequence."""
        lengths = list(self.shape.lengths)
        if x.shape[0] != sum(lengths):
            lengths = [int(blocks.num_compressed(n, self.shape.l, self.shape.d)) for n in lengths]
        return list(x.split(lengths))

    def layout(self, x: Tensor) -> Tensor:
        """As the kernels take it: packed, or [B, ...]."""
        if not self.shape.packed:
            x = x.reshape(len(self.shape.lengths), -1, *x.shape[1:])
        return self.stride(x.contiguous())

    def packing(self, compressed: bool = False, longest: bool = False) -> dict:
        if not self.shape.packed:
            return {}
        ends = torch.tensor([0, *self.shape.lengths]).cumsum(0)
        cu = self.stride(ends.to(device=self.device, dtype=torch.int32))
        more = {"max_seqlen": max(self.shape.lengths) + 3} if longest else {}
        if compressed:
            cu_cmp = blocks.cu_seqlens_compressed(cu, self.shape.l, self.shape.d)
            more["cu_seqlens_cmp"] = self.stride(cu_cmp)
        return {"cu_seqlens": cu, **more}


def flat(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(-1, *like.shape[1:]) if x.ndim > like.ndim else x


def expected(inputs: Inputs, names: list[str], run, dtype: torch.dtype) -> list[Tensor]:
    """run(tensors of one sequence as [1, ...]) on leaves in `dtype`: outputs, then gradients.

    The oracle loops over tokens in Python: big shapes take the vectorised reference in fp64.
    """
    where = inputs.device if inputs.shape.big else "cpu"
    leaves = {n: getattr(inputs, n).detach().to(where, dtype).requires_grad_() for n in names}
    parts = [inputs.split(leaves[n]) for n in names]
    outs = [run(i, *(p[i][None] for p in parts)) for i in range(len(inputs.shape.lengths))]
    out = torch.cat([o[0][0] for o in outs])
    out = out + 0 * sum(x.sum() for x in leaves.values())  # also where no key is visible
    rest = [torch.cat([o[i][0] for o in outs]) for i in range(1, len(outs[0]))]
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.do.to(where, dtype))
    return [x.detach() for x in (out, *rest, *grads)]


def check(
    case: str, inputs: Inputs, names: list[str], ours, theirs, kernels: list[str],
    without_backward: list[str] | None = None,
) -> None:  # fmt: skip
    """Outputs and gradients of `ours` beside those of `theirs` in fp64 and in the same dtype;
    without_backward: also the output where no gradient is asked for, and its kernels."""
    leaves = {n: getattr(inputs, n).detach().clone().requires_grad_() for n in names}
    with launches.recording() as counts:
        result = ours(*(inputs.layout(x) for x in leaves.values()))
        result = result if isinstance(result, tuple) else (result,)
        out = flat(result[0], inputs.do)
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.do)
    got = [out, *(x.reshape(-1, *x.shape[-1:]) for x in result[1:]), *grads]
    want = expected(inputs, names, theirs, torch.float64)
    same = expected(inputs, names, lambda i, *x: theirs(i, *x, plain=True), inputs.shape.dtype)
    labels = ["out", "lse"][: len(result)] + [f"d{n}" for n in names]
    for label, g, w, s in zip(labels, got, want, same, strict=True):
        # Gradients grow with the number of rows that share a key; the mean is judged beside them.
        if not w.numel():
            continue
        limit = MAE_LIMIT[inputs.shape.dtype]
        if label != "out":
            size = max(1.0, w.nan_to_num(posinf=0, neginf=0).abs().max().item())
            limit *= size if inputs.shape.dtype == F32 else 2 * size
        assert_parity(
            f"{case}/{inputs.shape}/{label}", case, g, w.reshape(g.shape), s.reshape(g.shape),
            path_requested="triton", path_taken="triton", launches=counts, expect_kernels=kernels,
            limit_mae=limit, seed=0, rows=label != "lse",
        )  # fmt: skip
    if without_backward:
        with torch.no_grad(), launches.recording() as counts:
            out = flat(ours(*(inputs.layout(x.detach()) for x in leaves.values())), inputs.do)
        assert_parity(
            f"{case}/{inputs.shape}/no_grad", case, out, want[0].reshape(out.shape),
            same[0].reshape(out.shape), path_requested="triton", path_taken="triton",
            launches=counts, expect_kernels=without_backward,
            limit_mae=MAE_LIMIT[inputs.shape.dtype], seed=0,
        )  # fmt: skip


# Forward and backward of spans and of chosen blocks, whichever kernels the launchers choose.
SPANS = ["_span_fwd_*", "_span_bwd_*"]
BLOCKS = ["_block_attn_*", "_block_attn_bwd_*"]


def exact(inputs: Inputs, oracle_fn, reference_fn, plain: bool):
    return reference_fn if plain or inputs.shape.big else oracle_fn


@ALL
def test_compressed(shape, device):
    x = Inputs(shape, device)
    sizes = dict(l=shape.l, d=shape.d)

    def theirs(i, q, k, v, plain=False):
        fn = exact(x, oracle.compressed_attention, reference.compressed_attention, plain)
        return fn(q, k, v, **sizes)

    ours = lambda q, k, v: prefill.compressed_attention_triton(
        q, k, v, **sizes, **x.packing(compressed=True)
    )
    kernels = ["_span_fwd_*", *["_span_bwd_*"] * bool(sum(map(len, x.split(x.k_cmp))))]
    check("compressed", x, ["q", "k_cmp", "v_cmp"], ours, theirs, kernels)


# Keys first seen by the second query of a tile, or of its neighbour; 17 compressed keys, of which
# max_seqlen allows no more: one in a tile of its own.
LAST_ALONE = Shape((68, 5), G=1, l=4, d=4, packed=True)
EDGES = [
    Shape((45,), G=1, h=4, l=4, d=2), Shape((50,), G=1, dtype=F32, l=4, d=2),
    replace(LAST_ALONE, h=4), LAST_ALONE,
]  # fmt: skip


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_keys_beside_the_edges_of_tiles(shape, device):
    (test_whole if shape is LAST_ALONE else test_compressed)(shape, device)


@ALL
def test_sliding(shape, device):
    x = Inputs(shape, device, seed=1)

    def theirs(i, q, k, v, plain=False):
        fn = exact(x, oracle.sliding_attention, reference.sliding_attention, plain)
        return (fn(q, k, v, window=shape.w),)

    ours = lambda q, k, v: prefill.sliding_attention_triton(q, k, v, window=shape.w, **x.packing())[
        0
    ]
    check("sliding", x, ["q", "k", "v"], ours, theirs, SPANS)


# Tiles of 16 keys and 16 queries: the first or last key is the neighbour of a tile's edge, so that
# the tile without a mask is one further.
WINDOWS = [Shape((70,), G=1, dtype=F32, w=31), Shape((70,), G=1, D=48, w=34)]


@pytest.mark.parametrize("shape", WINDOWS, ids=lambda s: f"w{s.w}-D{s.D}")
def test_windows_that_end_beside_the_edge_of_a_tile(shape, device):
    test_sliding(shape, device)


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


def selected_case(shape: Shape, device: str, kind: str, seed: int) -> None:
    x = Inputs(shape, device, seed=seed)
    indices = [
        make_block_indices(kind, 1, n, shape.G, shape.n_sel, shape.l_sel, seed=i, device=device)
        for i, n in enumerate(shape.lengths)
    ]
    ranges = [
        select.blocks_to_ranges(b, shape.l_sel, torch.arange(b.shape[1], device=device))
        for b in indices
    ]

    def theirs(i, q, k, v, plain=False):
        if plain or shape.big:
            clean = select.clean_ranges(ranges[i].to(q.device), k.shape[1])
            return (reference.selection_attention(q, k, v, clean),)
        spans = oracle.blocks_to_ranges(indices[i].cpu(), shape.l_sel)
        return (oracle.selection_attention(q, k, v, spans),)

    ours = lambda q, k, v: prefill.selection_blocks_triton(
        q, k, v, x.layout(torch.cat([b[0] for b in indices])), block_size=shape.l_sel,
        **x.packing(),
    )  # fmt: skip
    check(f"selected-{kind}", x, ["q", "k", "v"], ours, theirs, BLOCKS)


@ALL
def test_selected(shape, device):
    selected_case(shape, device, "ragged", seed=2)


@pytest.mark.core
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("shape", [Shape((35, 1, 9), packed=True), SHAPES[6]], ids=str)
def test_selected_distributions(shape, kind, device):
    selected_case(shape, device, kind, seed=3)


@ALL
def test_choice_of_blocks(shape, device):
    x = Inputs(shape, device, seed=5)
    _, lse = prefill.compressed_attention_triton(
        x.layout(x.q), x.layout(x.k_cmp), x.layout(x.k_cmp), l=shape.l, d=shape.d,
        **x.packing(compressed=True),
    )  # fmt: skip
    with launches.recording() as counts:
        got = prefill.select_blocks_triton(
            x.layout(x.q),
            x.layout(x.k_cmp),
            x.stride(lse),
            **shape.sizes,
            **x.packing(True, longest=True),
        )
    assert sum(counts.values()) >= 1
    got = got.reshape(-1, shape.G, shape.n_sel)
    where = device if shape.big else "cpu"
    fn = select.select_blocks if shape.big else oracle.select_blocks
    want = torch.cat([
        fn(q[None].to(where).double(), k[None].to(where).double(), **shape.sizes)[0]
        for q, k in zip(x.split(x.q), x.split(x.k_cmp), strict=True)
    ])  # fmt: skip
    differ = (got.cpu() != want.cpu()).any(-1).float().mean().item()
    # Scores of two blocks may round to the other order; forced blocks and padding never may.
    assert differ <= (1e-3 if shape.dtype == F32 else 0.02), f"{differ:.2%} of the rows differ"
    assert torch.equal((got.cpu() < 0).sum(-1), (want.cpu() < 0).sum(-1))


SMALL_BLOCKS = dict(G=1, h=1, l=4, d=2, l_sel=4)
SLABS = [Shape((140,), **SMALL_BLOCKS), Shape((139, 3), packed=True, **SMALL_BLOCKS)]


@pytest.mark.core
@pytest.mark.parametrize("shape", SLABS, ids=str)
def test_slabs_of_queries_choose_what_all_at_once_do(shape, device, monkeypatch):
    """The last slab has more blocks to rank than the first: more than the 32 of the smallest."""
    x = Inputs(shape, device, seed=8)
    packing, q, k = x.packing(compressed=True), x.layout(x.q), x.layout(x.k_cmp)
    _, lse = prefill.compressed_attention_triton(q, k, k, l=shape.l, d=shape.d, **packing)
    packing = x.packing(compressed=True, longest=True)
    choose = lambda: prefill.select_blocks_triton(q, k, lse, **shape.sizes, **packing)
    whole = choose()
    monkeypatch.setattr(block_select, "SLAB_BYTES", 1)
    with launches.recording() as counts:
        slabs = choose()
    assert counts["_block_topn_kernel"] >= 2
    assert torch.equal(slabs, whole)


# Compressed keys reach beyond the forced blocks, and into blocks of the next tile of 16 keys; the
# last of 79 tokens see two such tiles exactly.
OVERLAPPING = dict(l=16, d=2, l_sel=4, n_sel=6)
CHOICES = [
    (Shape((79,), G=1, dtype=F32, **{**OVERLAPPING, "n_sel": 17}), 0),
    (Shape((79,), G=1, h=1, D=48, **OVERLAPPING), 0),
    (Shape((151,), dtype=F32, **OVERLAPPING), 131),  # more than the 32 blocks of the least ranking
]


@pytest.mark.parametrize("shape, start", CHOICES, ids=lambda x: str(x))
def test_choice_among_several_tiles_of_keys(shape, start, device):
    x = Inputs(shape, device, seed=11)
    q, k, sizes = x.layout(x.q)[:, start:], x.layout(x.k_cmp), dict(l=shape.l, d=shape.d)
    _, lse = prefill.compressed_attention_triton(q, k, k, **sizes, q_start=start)
    got = prefill.select_blocks_triton(q, k, lse, **shape.sizes, q_start=start).cpu()
    want = oracle.select_blocks(q.double().cpu(), k.double().cpu(), **shape.sizes, q_start=start)
    differ = (got != want).any(-1).float().mean().item()
    assert differ <= (1e-3 if shape.dtype == F32 else 0.02), f"{differ:.2%} of the rows differ"


RANKINGS = {
    "random": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)),
    "ties": lambda n: torch.arange(n) * 7 % 5 / 4.0,
    "equal": lambda n: torch.ones(n),
    "nothing": lambda n: torch.zeros(n),
    "rising": lambda n: torch.arange(n) * 1e-3,
    "nan": lambda n: torch.where(torch.arange(n) % 3 == 0, float("nan"), torch.arange(n) * 1.0),
}


RANKED = [
    (seen, *sizes)
    for seen in (1, 16, 17, 64, 250)
    for sizes in ((1, 0, 1), (3, 1, 2), (5, 0, 1), (16, 1, 2))
]


@pytest.mark.core
@pytest.mark.parametrize("seen, n_sel, n_init, n_local", [*RANKED, (33000, 16, 1, 2)])
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


@ALL
def test_whole(shape, device):
    """The fused operator: block choice as the kernels made it, everything else against fp64."""
    whole_case("whole", Inputs(shape, device, seed=6))


def whole_case(case: str, x: Inputs, call=prefill.nsa_prefill_triton) -> None:
    shape = x.shape
    chosen: list[Tensor] = []
    names = ["q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates"]

    def ours(*tensors):
        out, aux = call(
            *tensors, **shape.sizes, n_init=1, n_local=2, window=shape.w,
            **x.packing(compressed=True, longest=True),
        )  # fmt: skip
        chosen[:] = x.split(aux["block_indices"].reshape(-1, shape.G, shape.n_sel))
        return out

    def theirs(i, q, k_cmp, v_cmp, k, v, k_win, v_win, gates, plain=False):
        small = not (plain or shape.big)
        lib = oracle if small else reference
        positions = torch.arange(q.shape[1], device=q.device)
        blocks_i = chosen[i][None].to(q.device)
        if small:
            spans = oracle.blocks_to_ranges(blocks_i, shape.l_sel)
        else:
            spans = select.clean_ranges(
                select.blocks_to_ranges(blocks_i, shape.l_sel, positions), k.shape[1]
            )
        cmp, _ = lib.compressed_attention(q, k_cmp, v_cmp, l=shape.l, d=shape.d)
        sel = lib.selection_attention(q, k, v, spans)
        win = lib.sliding_attention(q, k_win, v_win, window=shape.w)
        return (gates[..., :1] * cmp + gates[..., 1:2] * sel + gates[..., 2:] * win,)

    kernels = [*SPANS, *BLOCKS, "_combine_bwd_kernel"]
    check(case, x, names, ours, theirs, kernels, ["_span_*", "_block_attn_*"])


def any_gates(x: Inputs) -> Tensor:
    """Of both signs, some 0, some large; the last query's are positive."""
    gates = randn(*x.gates.shape, seed=70, device=x.device)
    at = torch.arange(gates.numel(), device=x.device).view(gates.shape)
    gates = gates.masked_fill(at % 7 == 0, 0.0).masked_fill(at % 7 == 1, -0.0)
    gates = torch.where(at % 41 == 2, gates * 30, gates)
    gates[-1] = gates[-1].abs()
    return gates.to(x.shape.dtype)


# Groups of four heads or more take the passes that add dQ. The last tiles have dead rows.
SIGNED = [
    Shape((37,), h=4),
    Shape((5, 0, 20, 1), h=4, packed=True),
    Shape((37,), G=1, h=3, D=48, Dv=16, dtype=F32),
    Shape((1003,), G=2, h=16, D=128, Dv=128, dtype=BF16, n_sel=8, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, D=128, Dv=128, dtype=BF16, n_sel=4, packed=True,
          **PAPER),
    Shape((600,), G=2, h=8, D=64, Dv=64, n_sel=4, **PAPER),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, passes",
    [pytest.param(s, n, marks=[pytest.mark.core] if i in (0, 3, 4) else [])
     for i, s in enumerate(SIGNED) for n in (1, 2) if s.big or not i or n == 2],
    ids=str,
)  # fmt: skip
def test_gates_of_any_sign(shape, passes, device):
    x = Inputs(shape, device, seed=6)
    x.gates = any_gates(x)
    with deterministic() if passes == 2 else contextlib.nullcontext():
        whole_case(f"signs-{passes}", x)


@pytest.mark.parametrize("shape", [SIGNED[3]], ids=str)
def test_gates_of_any_sign_through_the_library(shape, device):
    """What test_packs.py does not do in the interpreter either: at a GPU's size."""
    x = Inputs(shape, device, seed=6)
    x.gates = any_gates(x)
    call = lambda *x, cu_seqlens_cmp=None, **how: nsa.nsa_attention(
        *x, **how, backend="triton", return_aux=True
    )
    whole_case("signs-library", x, call)


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


@pytest.mark.core
@pytest.mark.parametrize("shape", [Shape((37,), h=1), SHAPES[6], SHAPES[9]], ids=str)
def test_without_gradients_the_same_in_less_memory(shape, device, monkeypatch):
    """Where nobody will ask for a gradient the branches' outputs are not kept; nor are compressed
    and sliding attention's rounded apart where one kernel does both."""
    x, kept = Inputs(shape, device, seed=6), []
    operator = fused._prefill
    monkeypatch.setattr(fused, "_prefill", lambda *a: kept.append(operator(*a)) or kept[-1])
    names = ["q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates"]
    tensors = [x.layout(getattr(x, n)).detach().requires_grad_() for n in names]
    how = dict(shape.sizes, n_init=1, n_local=2, window=shape.w, **x.packing(True, longest=True))
    out, aux = prefill.nsa_prefill_triton(*tensors, **how)
    with torch.no_grad():
        again, same = prefill.nsa_prefill_triton(*tensors, **how)
    plain, _ = prefill.nsa_prefill_triton(*(t.detach() for t in tensors), **how)
    assert out.requires_grad and torch.equal(plain, again)
    if hopper.forward_pair(x.q, x.k_cmp, x.v_cmp, x.k_win, x.v_win):
        torch.testing.assert_close(again, out, atol=2e-2, rtol=2e-2)
    else:
        assert torch.equal(again, out)
    assert all(torch.equal(aux[n], same[n]) for n in aux)
    for branch in (2, 3, 4):
        assert [results[branch].numel() for results in kept] == [out.numel(), 0, 0]


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("shape", [SHAPES[6]], ids=str)  # the interpreter always repeats
def test_deterministic_gradients_repeat_bitwise(shape, device):
    x = Inputs(shape, device, seed=7)
    names = ["q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates"]

    def gradients():
        leaves = [getattr(x, n).detach().clone().requires_grad_() for n in names]
        out, _ = prefill.nsa_prefill_triton(
            *(x.layout(t) for t in leaves), **shape.sizes, n_init=1, n_local=2, window=shape.w,
            **x.packing(compressed=True, longest=True),
        )  # fmt: skip
        return torch.autograd.grad(flat(out, x.do), leaves, x.do)

    with deterministic(), launches.recording() as counts:
        first, again = gradients(), gradients()
    for name, a, b in zip(names, first, again, strict=True):
        assert torch.equal(a, b), name
    assert counts["_block_attn_bwd_dq_kernel"] == 2 and counts["_block_attn_bwd_sum_kernel"] == 4
    assert counts["_span_bwd_dq_kernel"] == 4


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8]], ids=str)
def test_the_future_changes_nothing(shape, device):
    """Other keys and values after a token leave its output as it is, to the last bit."""
    x = Inputs(shape, device, seed=8)
    at = shape.lengths[0] // 2
    names = ("k_cmp", "v_cmp", "k", "v", "k_win", "v_win")

    def out(future: float) -> Tensor:
        tensors = {n: x.layout(getattr(x, n)).clone() for n in names}
        for n, t in tensors.items():
            seen = (at - shape.l) // shape.d + 1 if n.endswith("cmp") else at
            t[:, seen:] *= future
        return prefill.nsa_prefill_triton(
            x.layout(x.q), *tensors.values(), x.layout(x.gates), **shape.sizes, n_init=1,
            n_local=2, window=shape.w,
        )[0]  # fmt: skip

    one, other = out(1.0), out(-30.0)
    assert torch.equal(one[:, :at], other[:, :at])
    assert not torch.equal(one[:, at:], other[:, at:])


def test_a_nan_query_keeps_its_forced_blocks_and_harms_no_other(kernel_device):
    like = dict(device=kernel_device, dtype=F16)
    q, k = randn(1, 90, 4, 16, seed=1, **like), randn(1, 21, 2, 16, seed=2, **like)
    lse = randn(1, 90, 4, seed=3, device=kernel_device)
    how = dict(l=8, d=4, l_sel=16, n_sel=3, n_init=1, n_local=1)
    want = prefill.select_blocks_triton(q, k, lse, **how)
    q[:, 85] = float("nan")
    got = prefill.select_blocks_triton(q, k, lse, **how)
    others = [t for t in range(90) if t != 85]
    assert torch.equal(got[:, others], want[:, others])
    for row in got[0, 85].tolist():
        assert {0, 5} < set(row) <= set(range(6)) and row == sorted(set(row))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


def _forwards(x: Inputs) -> dict[str, tuple]:
    """Each differentiable operator: its leaves, and how to call it."""
    n, like = x.shape, ("q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates")
    leaf = {name: x.layout(getattr(x, name)).detach().requires_grad_() for name in like}
    some = lambda *names: [leaf[name] for name in names]
    chosen = torch.zeros(*leaf["q"].shape[:-2], n.G, 1, dtype=torch.int32, device=x.device)
    return {
        "prefill": (list(leaf.values()), lambda *t, **kw: prefill.nsa_prefill_triton(
            *t, **n.sizes, n_init=1, n_local=2, window=n.w, **kw)),
        "compressed": (some("q", "k_cmp", "v_cmp"),
            lambda *t, **kw: prefill.compressed_attention_triton(*t, l=n.l, d=n.d, **kw)),
        "sliding": (some("q", "k_win", "v_win"),
            lambda *t, **kw: prefill.sliding_attention_triton(*t, window=n.w, **kw)),
        "selected": (some("q", "k", "v"), lambda *t, **kw: (prefill.selection_blocks_triton(
            *t, chosen, block_size=n.l_sel, **kw), None)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["prefill", "compressed", "sliding", "selected"])
def test_only_the_output_carries_a_gradient(name, kernel_device, monkeypatch):
    """A gradient of zeros for what the forward keeps would be written, and held, at every step."""
    backward = {"prefill": fused._prefill_bwd, "selected": block_attn._block_attention_bwd}.get(
        name, span._span_attention_bwd
    )
    launcher = torch.profiler.record_function("nsa::backward")(backward.launcher)
    monkeypatch.setattr(backward, "launcher", launcher)
    leaves, call = _forwards(Inputs(Shape((23,)), kernel_device))[name]
    out, more = call(*leaves)
    lse = more["lse"] if isinstance(more, dict) else more
    assert out.requires_grad and (lse is None or not lse.requires_grad)
    do = torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.autograd.grad(out, leaves, do)
    kernels = min(e.time_range.start for e in seen.events() if e.name == "nsa::backward")
    before = [e.name for e in seen.events() if e.time_range.start < kernels]
    assert not {"aten::zeros", "aten::zero_", "aten::fill_"} & set(before), before

    unused = torch.autograd.grad(
        _NoGradient.apply(call(*leaves)[0]).sum(), leaves, allow_unused=True
    )
    assert unused == (None,) * len(leaves)


@pytest.mark.parametrize("name", ["prefill", "compressed", "sliding", "selected"])
def test_a_softmax_scale_is_taken_as_given(name, kernel_device):
    """Twice the default is the same as queries twice as large, to the last bit of the scores."""
    leaves, call = _forwards(Inputs(Shape((23,), G=1), kernel_device))[name]
    q, *rest = leaves
    scaled, more = call(q, *rest, softmax_scale=0.5)
    doubled, same = call(2 * q, *rest)
    torch.testing.assert_close(scaled, doubled, rtol=1e-3, atol=1e-3)
    if name == "prefill":
        assert torch.equal(more["block_indices"], same["block_indices"])
    do = torch.ones_like(scaled)
    for got, want in zip(*(torch.autograd.grad(y, leaves, do) for y in (scaled, doubled)),
                         strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


def test_the_choice_of_blocks_takes_a_softmax_scale_as_given(kernel_device):
    x = Inputs(Shape((50,), G=1, dtype=F32, **OVERLAPPING), kernel_device)
    q, k, sizes = x.layout(x.q), x.layout(x.k_cmp), dict(l=16, d=2)

    def choice(q: Tensor, **scale: float) -> Tensor:
        _, lse = prefill.compressed_attention_triton(q, k, k, **sizes, **scale)
        return prefill.select_blocks_triton(q, k, lse, **x.shape.sizes, **scale)

    assert torch.equal(choice(q, softmax_scale=0.5), choice(2 * q))
    assert not torch.equal(choice(q), choice(2 * q))


def test_block_sizes_without_a_kernel_are_refused():
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="block_size .* got 48"):
        prefill.selection_blocks_triton(q, q, q, torch.zeros(1, 4, 2, 1).int(), block_size=48)


CHUNKED = [
    (Shape((39,)), 21, 18),
    (Shape((38, 38), G=1, dtype=F32), 29, 9),
    (Shape((48,), G=1, h=3, D=24, Dv=16, l=8, d=8, l_sel=32, n_sel=5, w=64), 1, 30),
    (Shape((2048,), G=4, h=16, D=128, Dv=128, dtype=BF16, n_sel=8, **PAPER), 1000, 777),
    (Shape((2048,), G=1, h=16, D=192, Dv=128, dtype=BF16, n_sel=16, **PAPER), 1024, 512),
]


@pytest.mark.parametrize("shape, start, count", CHUNKED, ids=lambda x: str(x))
def test_a_chunk_is_part_of_the_whole(shape, start, count, device):
    """Queries start .. start + count against keys from 0: rows and gradients of the whole."""
    x = Inputs(shape, device, seed=9)
    names = ["q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates"]
    sizes = dict(**shape.sizes, n_init=1, n_local=2, window=shape.w)
    end = start + count
    halo = max(0, start + 1 - shape.w)  # the first key that the chunk's window reaches
    do = x.layout(x.do)

    def leaves() -> list[Tensor]:
        return [x.layout(getattr(x, n)).detach().clone().requires_grad_() for n in names]

    whole = leaves()
    out, aux = prefill.nsa_prefill_triton(*whole, **sizes)
    want = torch.autograd.grad(out[:, start:end], whole, do[:, start:end])
    part = leaves()
    q, k_cmp, v_cmp, k, v, k_win, v_win, gates = part
    with launches.recording() as counts:
        got, got_aux = prefill.nsa_prefill_triton(
            q[:, start:end], k_cmp, v_cmp, k[:, :end], v[:, :end], k_win[:, halo:end],
            v_win[:, halo:end], gates[:, start:end], q_start=start, **sizes,
        )  # fmt: skip
        grads = torch.autograd.grad(got, part, do[:, start:end])
    assert not never_launched([*SPANS, *BLOCKS], counts)
    assert torch.equal(got_aux["block_indices"], aux["block_indices"][:, start:end])
    tol = dict(rtol=1e-4, atol=1e-4) if shape.dtype == F32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, out[:, start:end], **tol)
    for name, g, w in zip(names, grads, want, strict=True):
        torch.testing.assert_close(g, w, msg=lambda m, name=name: f"{name}: {m}", **tol)

    # Each branch by its own operator: the whole one's rows again.
    again, lse = prefill.compressed_attention_triton(
        q[:, start:end], k_cmp, v_cmp, l=shape.l, d=shape.d, q_start=start
    )
    first, first_lse = prefill.compressed_attention_triton(q, k_cmp, v_cmp, l=shape.l, d=shape.d)
    torch.testing.assert_close(again, first[:, start:end], **tol)
    torch.testing.assert_close(lse, first_lse[:, start:end], **tol)
    chosen = prefill.select_blocks_triton(q[:, start:end], k_cmp, lse, **shape.sizes, q_start=start)
    assert torch.equal(chosen, aux["block_indices"][:, start:end])
    for run in (
        lambda q, k, b, t0: prefill.selection_blocks_triton(
            q, k, k, b, block_size=shape.l_sel, q_start=t0
        ),
        lambda q, k, b, t0: prefill.sliding_attention_triton(q, k, k, window=shape.w, q_start=t0)[
            0
        ],
    ):
        blocks_of = aux["block_indices"]
        torch.testing.assert_close(
            run(q[:, start:end], k, blocks_of[:, start:end].contiguous(), start),
            run(q, k, blocks_of, 0)[:, start:end], **tol,
        )  # fmt: skip
