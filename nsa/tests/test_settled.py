"""The Triton route of selection_attention by ranges and blocks: right, without operations of
PyTorch's and without a device wait, and from the second call on without a second look."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nsa
from nsa import Flags, dispatch, launches, oracle, settled
from nsa.kernels.triton_sel_kernel import selection_attention_triton
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_qkv, make_ranges, randn

pytestmark = pytest.mark.kernel

ON = Flags(triton_sel_force=True)
NAMED = dict(backend="triton", flags=ON)


@pytest.fixture
def no_second_look(monkeypatch):
    """Make the long way of every later call fail."""

    def refuse(*args, **kwargs):
        raise AssertionError("the call was looked at again")

    return lambda: monkeypatch.setattr(dispatch, "run", refuse)


def inputs(device, dtype=torch.float16, B=1, S=3, HQ=4, G=2, Skv=40, D=16, Dv=24):
    return make_qkv(B, S, HQ, G, D, Dv, Skv=Skv, dtype=dtype, seed=1, device=device)


def close_to(out, q, k, v, ranges):
    want = oracle.selection_attention(*(x.double().cpu() for x in (q, k, v)), ranges.cpu())
    torch.testing.assert_close(out.double().cpu(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", (*RANGE_KINDS, *HOSTILE_RANGE_KINDS, "overlap in 64 bits"))
def test_ranges_are_right_the_first_time_and_the_second(kind, kernel_device, no_second_look):
    q, k, v = inputs(kernel_device)
    first = make_ranges(kind.split()[0], 1, 3, 2, 40, 30, seed=3, device=kernel_device)
    first = first.long() if "64 bits" in kind else first
    close_to(nsa.selection_attention(q, k, v, ranges=first, **NAMED), q, k, v, first)
    no_second_look()
    for ranges in (first, first.flip(1).contiguous()):
        with launches.recording() as launched:
            out = nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
        close_to(out, q, k, v, ranges)
        single = ranges.shape[3] == 1
        kernel = "_sel_attn_fwd_dense_kernel" if single else "_sel_attn_fwd_ranges_kernel"
        assert dict(launched) == {kernel: 1}


@pytest.mark.parametrize("n", [0, 1, 2, 130])
def test_any_number_of_ranges(n, kernel_device, no_second_look):
    q, k, v = inputs(kernel_device, Skv=150)
    gen = torch.Generator().manual_seed(n)
    start = torch.randint(0, 149, (1, 3, 2, n), generator=gen)
    ranges = torch.stack([start, start + 1], -1).to(kernel_device, torch.int32)
    for again in (False, True):
        if again:
            no_second_look()
        out = nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
        close_to(out, q, k, v, ranges)
        assert n or (out == 0).all()


@pytest.mark.parametrize("splits, keep_lse", [(2, True), (8, False)])
def test_more_ranges_than_a_pass_holds_are_split_pass_by_pass(splits, keep_lse, kernel_device):
    from nsa.kernels.triton_sel_kernel.in_place import sel_fwd_in_place
    from nsa.kernels.triton_sel_kernel.tiles import Tiles

    q, k, v = inputs(kernel_device, dtype=torch.float32, B=1, S=2, Skv=300)
    start = torch.stack([torch.randperm(100, generator=torch.Generator().manual_seed(i))[:90] * 3
                         for i in range(4)]).view(1, 2, 2, 90)  # fmt: skip
    ranges = torch.stack([start, start + 2], -1).to(kernel_device)
    out, lse = sel_fwd_in_place(
        q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), ranges, None, splits=splits,
        keep_lse=keep_lse, tiles=Tiles(16, 16, 32, 4, 1),
    )  # fmt: skip
    assert (lse is not None) == keep_lse
    want = oracle.selection_attention(*(x.double().cpu() for x in (q, k, v)), ranges.cpu())
    torch.testing.assert_close(out.flatten(2, 3).double().cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_in_any_order_and_more_than_once(dtype, kernel_device, no_second_look):
    q, k, v = inputs(kernel_device, B=1, S=40, D=16, Dv=16)
    gen = torch.Generator().manual_seed(0)
    blocks = torch.randint(-1, 3, (1, 40, 2, 5), generator=gen).to(dtype)
    blocks[0, :7, 0] = -1
    if dtype == torch.int64:
        blocks[0, 8:, 1, 0] = -(1 << 40)  # no block, not block 0
    spans = oracle.blocks_to_ranges(blocks.clamp(min=-1), 16)
    for again in (False, True):
        if again:
            no_second_look()
        call = dict(block_size=16, **NAMED)
        out = nsa.selection_attention(q, k, v, blocks.to(kernel_device), **call)
        close_to(out, q, k, v, spans)


def test_a_block_behind_the_keys_is_told_by_a_settled_call_too(kernel_device):
    if kernel_device != "cpu":
        pytest.skip("a GPU's assertion ends its context")
    q, k, v = inputs(kernel_device, S=40, HQ=1, G=1)
    blocks = torch.zeros(1, 40, 1, 1, dtype=torch.int32)
    call = lambda: nsa.selection_attention(q, k, v, blocks, block_size=16, **NAMED)
    call()
    assert settled._calls
    blocks[0, 7] = 3  # of three blocks
    with pytest.raises(ValueError, match="block_indices must be below 3"):
        call()


@pytest.mark.parametrize("n", [1, 3, 16, 64, 130])
def test_sorted_blocks_are_each_once_and_none_at_the_end(n, kernel_device):
    from nsa.kernels.prefill.ascending import ascending

    gen = torch.Generator().manual_seed(n)
    blocks = torch.randint(-2, max(n, 3), (5, 2, n), generator=gen)
    blocks[0, 0, 0], blocks[1, 1, 0] = 2**31 - 1, -(2**40) + 3
    got = ascending(blocks.to(kernel_device)).tolist()
    for row, mine in zip(blocks.flatten(0, 1).tolist(), sum(got, []), strict=True):
        chosen = sorted({x for x in row if 0 <= x < 2**31 - 1})
        assert mine == chosen + [-1] * (n - len(chosen))


def test_packed_sequences_by_ranges_with_gradients(kernel_device):
    """Of each query's own sequence; one is empty."""
    ends = [0, 9, 9, 30, 41]
    cu = torch.tensor(ends, dtype=torch.int32, device=kernel_device)
    q, k, v = (x[0] for x in inputs(kernel_device, S=41, HQ=2, G=1, Skv=41))
    ranges = make_ranges("out_of_bounds", 1, 41, 1, 20, 15, seed=2, device=kernel_device)[0]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    like = dict(cu_seqlens=cu, max_seqlen=21, ranges=ranges)
    out = nsa.selection_attention(*leaves, **like, **NAMED)
    got = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    out = nsa.selection_attention(*leaves, **like, backend="reference")
    want = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


class Operations(TorchDispatchMode):
    """The names of PyTorch's operations in the block."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.seen = []
        return super().__enter__()


MAKING = {"empty", "view", "_unsafe_view", "transpose", "alias", "detach", "fill_"}
INTERPRETING = {"copy_", "set_", "new_empty"}  # what a launch of the interpreter's takes


@pytest.mark.parametrize("by", ["ranges", "wrapper", "packed"])
def test_the_route_neither_waits_nor_cleans_in_pytorch(by, kernel_device):
    """Reading a value (_local_scalar_dense, nonzero, ...) waits for the device; sorting and
    merging ranges takes PyTorch thirty launches."""
    q, k, v = inputs(kernel_device)
    ranges = make_ranges("overlap", 1, 3, 2, 40, 30, device=kernel_device)
    with Operations() as operations:
        if by == "ranges":
            nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
        elif by == "wrapper":
            kv = k.transpose(1, 2), v.transpose(1, 2)
            selection_attention_triton(q.unflatten(2, (2, 2)), *kv, ranges, **NAMED)
        else:
            cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=kernel_device)
            nsa.selection_attention(
                q[0], k[0, :3], v[0, :3], ranges=ranges[0], cu_seqlens=cu, max_seqlen=2, **NAMED
            )
    seen = set(operations.seen)
    assert not seen & {"sort", "cumsum", "cummax", "scatter_reduce", "nonzero", "unique_dim"}
    if by != "packed":
        assert seen <= MAKING | (INTERPRETING if kernel_device == "cpu" else set()), seen
    elif kernel_device != "cpu":  # where values of cu_seqlens are checked
        assert "_local_scalar_dense" not in seen


def test_the_wrapper_is_settled_too(kernel_device, no_second_look):
    q, k, v = inputs(kernel_device)
    ranges = make_ranges("overlap", 1, 3, 2, 40, 30, device=kernel_device)
    own = q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), ranges
    first = selection_attention_triton(*own, **NAMED)
    no_second_look()
    again = selection_attention_triton(*own, **NAMED)
    assert torch.equal(first, again) and again.shape == (1, 3, 2, 2, 24)
    close_to(again.flatten(2, 3), q, k, v, ranges)


def test_what_differs_is_looked_at_again(kernel_device, monkeypatch):
    q, k, v = inputs(kernel_device)
    ranges = make_ranges("many", 1, 3, 2, 40, 30, device=kernel_device)
    looked, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *a, **kw: looked.append(a) or run(*a, **kw))

    def looks(*args, **how):
        looked.clear()
        nsa.selection_attention(*args, **{**NAMED, **how})
        return len(looked)

    assert [looks(q, k, v, ranges=ranges) for _ in range(3)] == [1, 0, 0]
    wide = k.transpose(1, 2).contiguous().transpose(1, 2)  # another layout of the same keys
    for args, how in (
        ((q, wide, v), {}), ((q, k, v), dict(softmax_scale=0.3)),
        ((q, k, v), dict(flags=Flags(triton_sel_force=True, sel_triton_block_l=16))),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}),
        ((q[:, :2], k, v), dict(ranges=ranges[:, :2])),
    ):  # fmt: skip
        assert looks(*args, **{"ranges": ranges, **how}) == 1
    with dispatch.trace() as taken:  # which wants to see the decision
        assert looks(q, k, v, ranges=ranges) == 1
    assert [d.route.value for d in taken] == ["triton"]
    assert looks(q.clone().requires_grad_(), k, v, ranges=ranges) == 1
    with pytest.raises(TypeError, match="softmax_scale must be None or a number, got True"):
        nsa.selection_attention(q, k, v, ranges=ranges, softmax_scale=True, **NAMED)
    assert looks(q, k, v, ranges=ranges, softmax_scale=1.0) == 1
    with pytest.raises(TypeError, match="got True"):
        nsa.selection_attention(q, k, v, ranges=ranges, softmax_scale=True, **NAMED)
    with pytest.raises(TypeError, match="softmax_scale must be None or a number"):
        nsa.selection_attention(q, k, v, ranges=ranges, softmax_scale=[1.0], **NAMED)


def test_tensors_that_begin_elsewhere_take_the_long_way_and_are_right(kernel_device):
    """Of the same sizes and strides, but not at 16 bytes: a 16-byte load cannot read them."""
    q, k, v = inputs(kernel_device)
    ranges = make_ranges("mixed", 1, 3, 2, 40, 30, device=kernel_device)
    nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
    for at in (1, 8):
        moved = [torch.cat([x.new_zeros(at), x.flatten()])[at:].view(x.shape) for x in (q, k, v)]
        close_to(nsa.selection_attention(*moved, ranges=ranges, **NAMED), q, k, v, ranges)
    odd = torch.cat([ranges.new_zeros(1), ranges.flatten()])[1:].view(ranges.shape)
    close_to(nsa.selection_attention(q, k, v, ranges=odd, **NAMED), q, k, v, ranges)


def test_a_settled_call_that_fails_is_told_by_the_long_way(kernel_device, monkeypatch):
    from nsa.kernels.triton_sel_kernel import in_place

    q, k, v = inputs(kernel_device)
    ranges = make_ranges("many", 1, 3, 2, 40, 30, device=kernel_device)
    call = lambda: nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
    call()

    def broken(*args, **kwargs):
        raise RuntimeError("ptxas said no")

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "launch_planned", broken)
        with pytest.raises(RuntimeError, match="ptxas said no"):
            call()
    assert not settled._calls
    close_to(call(), q, k, v, ranges)

    def gone(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(in_place, "launch_planned", gone)
    monkeypatch.setattr(dispatch, "run", broken)
    with pytest.raises(RuntimeError, match="illegal memory"):  # of no use to try again
        call()


def test_gradients_are_those_of_the_long_way(kernel_device):
    """A settled call without gradients takes none away from one that needs them."""
    q, k, v = inputs(kernel_device)
    ranges = make_ranges("overlap", 1, 3, 2, 40, 30, device=kernel_device)
    nsa.selection_attention(q, k, v, ranges=ranges, **NAMED)
    leaves = [x.requires_grad_() for x in (k, v)]
    with torch.no_grad():
        assert not nsa.selection_attention(q, k, v, ranges=ranges, **NAMED).requires_grad
    of = lambda **how: nsa.selection_attention(q, k, v, ranges=ranges, **how).square().sum()
    got = torch.autograd.grad(of(**NAMED), leaves)
    want = torch.autograd.grad(of(backend="reference"), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


def test_not_more_calls_are_kept_than_fit(kernel_device, monkeypatch):
    monkeypatch.setattr(settled, "MOST", 2)
    for n in range(1, 6):
        like = dict(seed=n, dtype=torch.float16, device=kernel_device)
        q, k = randn(1, n, 2, 16, **like), randn(1, 8, 1, 16, **like)
        ranges = torch.zeros(1, n, 1, 1, 2, dtype=torch.int32, device=kernel_device)
        nsa.selection_attention(q, k, k, ranges=ranges, **NAMED)
        assert 0 < len(settled._calls) <= 2


@pytest.mark.parametrize("backend", [None, "triton"])
def test_recomputing_ends_where_the_last_tensor_is_saved(backend, kernel_device, recwarn):
    """PyTorch ends it by an error out of the operator, which is no failure: nothing else serves
    instead, the first time nor when the call is settled."""
    if backend is None and kernel_device == "cpu":
        pytest.skip("PyTorch serves, where nobody asks for more")
    q, k, v = inputs(kernel_device, S=20, Skv=20, D=16, Dv=16)
    cmp = [x[:, :4].clone() for x in (k, v)]
    gates = torch.rand(1, 20, 4, 3, device=kernel_device, dtype=q.dtype)
    sizes = dict(l=8, d=4, l_sel=16, n_sel=2, n_init=1, n_local=1, window=8)
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in (q, *cmp, k, v, k, v, gates)]
        call = lambda *x: nsa.nsa_attention(*x, **sizes, backend=backend, flags=ON)
        with launches.recording() as launched:
            out = checkpoint(call, *leaves, use_reentrant=False)
            out.sum().backward()
        assert launched["_block_attn_fwd_kernel"] == 2, dict(launched)
        assert all(x.grad is not None for x in leaves)
    assert not [w for w in recwarn if "failed" in str(w.message)]
