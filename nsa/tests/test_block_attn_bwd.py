"""The fused backward of selection: beside its two passes, which test_prefill_kernels.py and
test_union_attn.py hold against the oracle and each other, and never where torch asks for
deterministic algorithms."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.flags import clear_flags_cache
from nsa.kernels.prefill import block_lists
from nsa.kernels.prefill.block_attn_bwd import block_attention_bwd
from nsa.kernels.prefill.block_attn_fwd import block_attention_fwd
from nsa.tests.helpers import deterministic
from nsa.tests.test_union_attn import Case, Problem

pytestmark = pytest.mark.kernel
BF16, F32 = torch.bfloat16, torch.float32
LISTS = {
    "_pair_tiles_kernel", "_tile_counts_kernel", "_tile_members_kernel", "_chunk_ends_kernel",
    "_chunk_fill_kernel",
}  # fmt: skip
SHARED = {*LISTS, "_finite_kernel", "_attn_bwd_delta_kernel", "_block_attn_bwd_dkdv_kernel"}
FUSED = {*SHARED, "_round_kernel", "_round_keys_kernel"}
TWO_PASSES = {*SHARED, "_block_attn_bwd_dq_kernel", "_block_attn_bwd_sum_kernel"}
BIG = dict(D=128, Dv=128, block=64, n=16, dtype=BF16, big=True)
CASES = [
    (Case((37,), h=4, n=3, batch=2), "random"),
    (Case((5, 33, 1, 16), h=3, D=24), "ragged"),
    (Case((40,), h=1, D=48), "one_block"),
    (Case((27,), G=1, h=8, Dv=32, block=32, q_start=70), "clustered"),
    (Case((34,), dtype=F32), "ragged"),
    (Case((4000,), G=4, h=8, **BIG), "random"),
    (Case((4000,), G=4, h=8, **BIG), "one_block"),
    (Case((2000,), G=8, h=4, q_start=777, **BIG), "ragged"),
    (Case((1, 700, 63, 64, 65, 333), h=4, **BIG), "ragged"),
    (Case((600,), G=2, h=1, **BIG), "clustered"),
    (Case((600,), G=1, h=2, **BIG), "random"),
    (Case((500,), G=1, h=8, **{**BIG, "D": 192}, batch=2), "ragged"),
    (Case((300,), G=1, h=5, **{**BIG, "D": 256, "Dv": 256, "block": 128}), "ragged"),
]
ALL = pytest.mark.parametrize(
    "case, kind",
    [pytest.param(*c, marks=[pytest.mark.core] if i == 5 else []) for i, c in enumerate(CASES)],
    ids=str,
)
SOME = pytest.mark.parametrize("case, kind", [CASES[1], CASES[5]], ids=str)


@pytest.fixture
def device(device, case, monkeypatch):
    monkeypatch.setenv("NSA_USE_GLUON", "0")  # see test_hopper.py
    clear_flags_cache()
    if device == "cuda" and torch.cuda.get_device_capability()[0] < 9 and case.D > 128:
        pytest.skip("wide heads are fused on SM 9.0 and 10.0 only")
    return device


class Backward:
    """Gradients of a problem whose forward ran once."""

    def __init__(self, case: Case, kind: str, device: str, monkeypatch) -> None:
        self.case, self.x = case, Problem(case, kind, device, monkeypatch)
        self.forward()

    def forward(self) -> None:
        """To be called again where tensors of the problem are changed."""
        x = self.x
        self.out, self.lse = block_attention_fwd(x.q, x.k, x.v, x.blocks, **x.how, **x.packed)

    def run(self, dq=None):
        x = self.x
        with launches.recording() as counts:
            grads = block_attention_bwd(
                x.do, x.q, x.k, x.v, self.out, self.lse, x.blocks, **x.how, **x.packed, dq=dq
            )
        return grads, counts


def close(got, want, dtype):
    tol = {F32: 1e-5, BF16: 2e-2}.get(dtype, 2e-3)
    for name, a, b in zip("qkv", got, want, strict=False):
        size = b.abs().max().item()
        torch.testing.assert_close(
            a.float(), b.float(), rtol=tol, atol=tol * size, msg=lambda m, n=name: f"d{n}: {m}"
        )


@ALL
def test_one_pass_agrees_with_two(case, kind, device, monkeypatch):
    x = Backward(case, kind, device, monkeypatch)
    got, counts = x.run()
    assert set(counts) == FUSED
    with deterministic():
        want, counts = x.run()
        assert TWO_PASSES <= set(counts)
        close(got, want, case.dtype)
        if device == "cpu":
            return  # the interpreter runs one program after another: it always repeats
        again, _ = x.run()
    for name, a, b in zip("qkv", want, again, strict=True):
        assert torch.equal(a, b), name


@SOME
def test_dq_is_added_without_the_softmax_scale(case, kind, device, monkeypatch):
    """Both ways add dQ / softmax_scale to what an fp32 buffer holds."""
    x = Backward(case, kind, device, monkeypatch)
    scale = x.x.how["softmax_scale"]
    (want, *_), _ = x.run()
    for kernels in (FUSED, TWO_PASSES):
        dq = torch.full(want.shape, 3.0, dtype=F32, device=device)
        if kernels is FUSED:
            (got, *_), counts = x.run(dq)
        else:
            with deterministic():
                (got, *_), counts = x.run(dq)
        assert kernels - {"_round_kernel"} <= set(counts) and got is dq
        close([(dq - 3.0) * scale], [want], case.dtype)


@pytest.mark.parametrize("most", [0, 1 << 26], ids=["sorted", "map"])
@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("case", [Case((1, 37, 20)), Case((29,), batch=2), Case((70,))], ids=str)
def test_lists_hold_every_pair_once_and_in_order(case, per_block, most, kernel_device, monkeypatch):
    """per_block 2: the last block of a sequence has one tile only. No block is as far as the last
    two; their tiles must not wrap around. Packed rows past the last sequence are nobody's."""
    monkeypatch.setattr(block_lists, "CHUNK", 4)
    monkeypatch.setattr(block_lists, "LIST_SIZE", 8)  # several programs, several turns
    monkeypatch.setattr(block_lists, "WORDS", 1)
    monkeypatch.setattr(block_lists, "SHARE", 2)
    monkeypatch.setattr(block_lists, "MAP_BYTES", most)
    x = Problem(case, "ragged", kernel_device, monkeypatch)
    x.blocks.view(-1, case.n)[3] = torch.tensor([2, 3, 2**31 - 1][: case.n])
    per_seq, tile, kv_len = 3, 16, 48
    blocks, cu = x.blocks, x.cu
    if case.packed:
        blocks = torch.cat([blocks, torch.zeros_like(blocks[:5])])
    with launches.recording() as counts:
        lists = block_lists.rows_of_tiles(blocks, per_block, tile, kv_len, cu)
    assert ("_tile_members_kernel" in counts) == (most > 0)
    begins = [case.lengths[0] * b for b in range(case.batch)]
    if case.packed:
        begins = cu.tolist()[:-1]
        first_tiles = [first // tile + i for i, first in enumerate(begins)]
        assert lists.per_seq == len(blocks) // tile + len(begins) + 1
    want = {}
    for at, block in enumerate(x.blocks.flatten().tolist()):
        row = at // case.n
        token, group = row // case.G, row % case.G
        sequence = max(i for i, first in enumerate(begins) if first <= token)
        for nth in range(block * per_block, (block + 1) * per_block):
            if case.packed and 0 <= nth * tile <= token - begins[sequence]:
                want.setdefault((group, sequence, nth), []).append(row)
            elif not case.packed and 0 <= nth < per_seq:
                want.setdefault((sequence, group, nth), []).append(row)
    got, rows = {}, lists.rows.tolist()
    for number, begin, end in zip(
        lists.chunk_tile.tolist(), lists.chunk_begin.tolist(), lists.chunk_end.tolist(),
        strict=True,
    ):  # fmt: skip
        if begin < end:
            assert end - begin <= 4
            rest, nth = divmod(number, lists.per_seq)
            run = (*divmod(rest, case.G), nth)
            if case.packed:
                sequence = max(i for i, first in enumerate(first_tiles) if first <= nth)
                run = (rest, sequence, nth - first_tiles[sequence])
            assert run >= max(got, default=run)
            got.setdefault(run, []).extend(rows[begin:end])
    assert got == want


@pytest.mark.parametrize("case", [Case((90,), G=2, n=4), Case((1, 37, 20), G=3)], ids=str)
def test_pieces_come_once_by_group_and_about_in_order(case, kernel_device, monkeypatch):
    monkeypatch.setattr(block_lists, "CHUNK", 16)
    monkeypatch.setattr(block_lists, "BUCKETS", 16)
    x = Problem(case, "random", kernel_device, monkeypatch)
    tokens = sum(case.lengths)
    lists = block_lists.rows_of_tiles(x.blocks, 1, case.block, 90, x.cu)
    pieces, per_chunk = block_lists.pieces_in_order(lists, 4, tokens, case.G)
    assert per_chunk == 4 and len(pieces) == 1 + 4 * lists.n_chunks
    spans = {}
    for piece in range(4 * lists.n_chunks):
        begin = int(lists.chunk_begin[piece // 4]) + piece % 4 * 4
        end = min(begin + 4, int(lists.chunk_end[piece // 4]))
        if begin < end:
            spans[piece] = int(lists.rows[(begin + end) // 2])
    listed = pieces[1 : 1 + int(pieces[0])].tolist()
    assert sorted(listed) == sorted(spans) and len(spans) > 8
    per_group = 16 // case.G
    buckets = [(spans[p] % case.G, spans[p] // case.G * per_group // tokens) for p in listed]
    assert buckets == sorted(buckets) and len(set(buckets)) > case.G
