"""The fused backward of selection: beside its two passes, which test_prefill_kernels.py and
test_union_attn.py hold against the oracle and each other, and never where torch asks for
deterministic algorithms."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.flags import clear_flags_cache
from nsa.tests.helpers import deterministic
from nsa.tests.test_union_attn import Case, Problem

pytestmark = pytest.mark.kernel
BF16, F32 = torch.bfloat16, torch.float32
LISTS = {"_pair_tiles_kernel", "_chunk_ends_kernel", "_chunk_fill_kernel"}
FUSED = {*LISTS, "_attn_bwd_delta_kernel", "_block_attn_bwd_dkdv_kernel"}
TWO_PASSES = {*FUSED, "_block_attn_bwd_dq_kernel", "_block_attn_bwd_sum_kernel"}
BIG = dict(D=128, Dv=128, block=64, n=16, dtype=BF16, big=True)
CASES = [
    (Case((53,), h=4, n=4, batch=2), "random"),
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
def device(kernel_device, case, monkeypatch):
    monkeypatch.setenv("NSA_USE_GLUON", "0")  # see test_hopper.py
    clear_flags_cache()
    if kernel_device == "cpu" and case.big:
        pytest.skip("a GPU's size: the interpreter would take hours")
    if kernel_device == "cuda" and not case.big:
        pytest.skip("the interpreter's size: a GPU's tiles are longer than these sequences")
    if kernel_device == "cuda" and torch.cuda.get_device_capability()[0] < 9 and case.D > 128:
        pytest.skip("wide heads are fused on SM 9.0 and 10.0 only")
    return kernel_device


class Backward:
    """Gradients of a problem whose forward ran once."""

    def __init__(self, case: Case, kind: str, device: str, monkeypatch) -> None:
        from nsa.kernels.prefill.block_attn_fwd import block_attention_fwd

        self.case, self.x = case, Problem(case, kind, device, monkeypatch)
        x = self.x
        self.out, self.lse = block_attention_fwd(x.q, x.k, x.v, x.blocks, **x.how, **x.packed)

    def run(self, dq=None):
        from nsa.kernels.prefill.block_attn_bwd import block_attention_bwd

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
        again, _ = x.run()
    assert TWO_PASSES <= set(counts)
    close(got, want, case.dtype)
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
        assert kernels <= set(counts) and got is dq
        close([(dq - 3.0) * scale], [want], case.dtype)


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("case", [Case((1, 37, 20)), Case((29,), batch=2)], ids=str)
def test_lists_hold_every_pair_once_and_in_order(case, per_block, kernel_device, monkeypatch):
    """per_block 2: the last block of a sequence has one tile only. No block is as far as the last
    two; their tiles must not wrap around."""
    from nsa.kernels.prefill import block_lists

    monkeypatch.setattr(block_lists, "CHUNK", 4)
    monkeypatch.setattr(block_lists, "LIST_SIZE", 8)  # several programs, several turns
    x = Problem(case, "ragged", kernel_device, monkeypatch)
    x.blocks.view(-1, case.n)[3] = torch.tensor([2, 3, 2**31 - 1][: case.n])
    n_seq, per_seq = len(case.lengths) * case.batch, 3
    lists = block_lists.rows_of_tiles(x.blocks, per_block, n_seq, per_seq, x.cu)
    begins = [case.lengths[0] * b for b in range(case.batch)]
    if case.packed:
        begins = x.cu.tolist()[:-1]
    want = {}
    for at, block in enumerate(x.blocks.flatten().tolist()):
        token, group = at // case.n // case.G, at // case.n % case.G
        sequence = max(i for i, first in enumerate(begins) if first <= token)
        for tile in range(block * per_block, (block + 1) * per_block):
            if 0 <= tile < per_seq:
                want.setdefault((sequence, group, tile), []).append(at)
    got, order = {}, lists.order.tolist()
    for tile, begin, end in zip(
        lists.chunk_tile.tolist(), lists.chunk_begin.tolist(), lists.chunk_end.tolist(),
        strict=True,
    ):  # fmt: skip
        if begin < end:
            assert end - begin <= 4
            rest, block = divmod(tile, per_seq)
            run = (*divmod(rest, case.G), block)
            assert run >= max(got, default=run)
            got.setdefault(run, []).extend(order[begin:end])
    assert got == want
