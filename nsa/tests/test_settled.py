"""The Triton route of selection_attention by ranges and blocks: right, without operations of
PyTorch's and without a device wait, and from the second call on without a second look."""

import functools
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nsa
from nsa import Flags, dispatch, launches, oracle, settled
from nsa.kernels.triton_sel_kernel import selection_attention_triton
from nsa.tests.helpers import (
    HOSTILE_RANGE_KINDS,
    RANGE_KINDS,
    Watch,
    make_layer,
    make_qkv,
    make_ranges,
    randn,
)

pytestmark = pytest.mark.kernel

ON = Flags(triton_sel_force=True)
NAMED = dict(backend="triton", flags=ON)
attend = functools.partial(nsa.selection_attention, **NAMED)


@pytest.fixture
def no_second_look(monkeypatch):
    """Make the long way of every later call fail."""
    refuse = mock.Mock(side_effect=AssertionError("the call was looked at again"))
    return lambda: monkeypatch.setattr(dispatch, "run", refuse)


def inputs(device, S=3, HQ=4, G=2, Skv=40, D=16, Dv=24):
    return make_qkv(1, S, HQ, G, D, Dv, Skv=Skv, dtype=torch.float16, seed=1, device=device)


@pytest.fixture
def ranged(kernel_device):
    """q, k and v, and ranges of any kind."""
    make = functools.partial(make_ranges, B=1, S=3, G=2, Skv=40, L=30, device=kernel_device)
    return *inputs(kernel_device), make


def close_to(out, q, k, v, ranges):
    want = oracle.selection_attention(*(x.double().cpu() for x in (q, k, v)), ranges.cpu())
    torch.testing.assert_close(out.double().cpu(), want, rtol=2e-3, atol=2e-3)


def single_keys(n, device):
    start = torch.randint(0, 149, (1, 3, 2, n), generator=torch.Generator().manual_seed(n))
    return torch.stack([start, start + 1], -1).to(device, torch.int32)


@pytest.mark.parametrize(
    "kind", (*RANGE_KINDS, *HOSTILE_RANGE_KINDS, "overlap in 64 bits", 0, 1, 2, 130)
)
def test_ranges_are_right_the_first_time_and_the_second(kind, ranged, no_second_look):
    """Of any kind, and any number of single keys."""
    q, k, v, make = ranged
    if isinstance(kind, int):
        q, k, v = inputs(q.device, Skv=150)
        first = single_keys(kind, q.device)
    else:
        first = make(kind.split()[0], seed=3)
        first = first.long() if "64 bits" in kind else first
    close_to(attend(q, k, v, ranges=first), q, k, v, first)
    no_second_look()
    for ranges in (first, first.flip(1).contiguous()):
        with launches.recording() as launched:
            out = attend(q, k, v, ranges=ranges)
        close_to(out, q, k, v, ranges)
        n = ranges.shape[3]
        kernel = "_sel_attn_fwd_dense_kernel" if n == 1 else "_sel_attn_fwd_ranges_kernel"
        assert dict(launched) == {kernel: 1}
        assert n or (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_in_any_order_and_more_than_once(dtype, kernel_device, no_second_look):
    q, k, v = inputs(kernel_device, S=40, Dv=16)
    gen = torch.Generator().manual_seed(0)
    blocks = torch.randint(-1, 3, (1, 40, 2, 5), generator=gen).to(dtype)
    blocks[0, :7, 0] = -1
    if dtype == torch.int64:
        blocks[0, 8:, 1, 0] = -(1 << 40)  # no block, not block 0
    spans = oracle.blocks_to_ranges(blocks.clamp(min=-1), 16)
    for again in (False, True):
        if again:
            no_second_look()
        close_to(attend(q, k, v, blocks.to(kernel_device), block_size=16), q, k, v, spans)


def test_a_block_behind_the_keys_is_told_by_a_settled_call_too(kernel_device):
    if kernel_device != "cpu":
        pytest.skip("a GPU's assertion ends its context")
    q, k, v = inputs(kernel_device, S=40, HQ=1, G=1)
    blocks = torch.zeros(1, 40, 1, 1, dtype=torch.int32)
    call = lambda: attend(q, k, v, blocks, block_size=16)
    call()
    assert settled._calls
    blocks[0, 7] = 3  # of three blocks
    with pytest.raises(ValueError, match="block_indices must be below 3"):
        call()


@pytest.mark.parametrize("n", [1, 3, 16, 64, 130])
def test_sorted_blocks_are_each_once_and_none_at_the_end(n, kernel_device):
    from nsa.kernels.prefill.blocks.ascending import ascending

    gen = torch.Generator().manual_seed(n)
    blocks = torch.randint(-2, max(n, 3), (5, 2, n), generator=gen)
    blocks[0, 0, 0], blocks[1, 1, 0] = 2**31 - 1, -(2**40) + 3
    got = ascending(blocks.to(kernel_device)).flatten(0, 1).tolist()
    for row, mine in zip(blocks.flatten(0, 1).tolist(), got, strict=True):
        chosen = sorted({x for x in row if 0 <= x < 2**31 - 1})
        assert mine == chosen + [-1] * (n - len(chosen))


MAKING = {"empty", "view", "_unsafe_view", "transpose", "alias", "detach", "fill_"}
INTERPRETING = {"copy_", "set_", "new_empty"}  # what a launch of the interpreter's takes


@pytest.mark.parametrize("by", ["ranges", "wrapper", "packed"])
def test_the_route_neither_waits_nor_cleans_in_pytorch(by, kernel_device, ranged):
    """Reading a value (_local_scalar_dense, nonzero, ...) waits for the device; sorting and
    merging ranges takes PyTorch thirty launches."""
    q, k, v, make = ranged
    ranges = make("overlap")
    seen = set()
    with Watch(lambda operation, _: seen.add(operation.overloadpacket.__name__)):
        if by == "ranges":
            attend(q, k, v, ranges=ranges)
        elif by == "wrapper":
            kv = k.transpose(1, 2), v.transpose(1, 2)
            selection_attention_triton(q.unflatten(2, (2, 2)), *kv, ranges, **NAMED)
        else:
            cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=kernel_device)
            packed = dict(ranges=ranges[0], cu_seqlens=cu, max_seqlen=2)
            attend(q[0], k[0, :3], v[0, :3], **packed)
    assert not seen & {"sort", "cumsum", "cummax", "scatter_reduce", "nonzero", "unique_dim"}
    if by != "packed":
        assert seen <= MAKING | (INTERPRETING if kernel_device == "cpu" else set()), seen
    elif kernel_device != "cpu":  # where values of cu_seqlens are checked
        assert "_local_scalar_dense" not in seen


def test_the_wrapper_is_settled_too(ranged, no_second_look):
    q, k, v, make = ranged
    ranges = make("overlap")
    own = q.unflatten(2, (2, 2)), k.transpose(1, 2), v.transpose(1, 2), ranges
    first = selection_attention_triton(*own, **NAMED)
    no_second_look()
    again = selection_attention_triton(*own, **NAMED)
    assert torch.equal(first, again) and again.shape == (1, 3, 2, 2, 24)
    close_to(again.flatten(2, 3), q, k, v, ranges)


def test_what_differs_is_looked_at_again(ranged, monkeypatch):
    q, k, v, make = ranged
    ranges = make("many")
    looked, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *a, **kw: looked.append(a) or run(*a, **kw))

    def looks(*args, **how):
        looked.clear()
        attend(*args, **how)
        return len(looked)

    assert [looks(q, k, v, ranges=ranges) for _ in range(3)] == [1, 0, 0]
    wide = k.transpose(1, 2).contiguous().transpose(1, 2)  # another layout of the same keys
    other = Flags(triton_sel_force=True, sel_triton_block_l=16)
    for args, how in (
        ((q, wide, v), {}), ((q, k, v), dict(softmax_scale=0.3)), ((q, k, v), dict(flags=other)),
        ([x.bfloat16() for x in (q, k, v)], {}), ((q[:, :2], k, v), dict(ranges=ranges[:, :2])),
    ):  # fmt: skip
        assert looks(*args, **{"ranges": ranges, **how}) == 1
    with dispatch.trace() as taken:  # which wants to see the decision
        assert looks(q, k, v, ranges=ranges) == 1
    assert [d.route.value for d in taken] == ["triton"]
    assert looks(q.clone().requires_grad_(), k, v, ranges=ranges) == 1
    for scale in (True, [1.0], True):  # also once 1.0, which equals True, is settled
        with pytest.raises(TypeError, match="softmax_scale must be None or a number, got"):
            attend(q, k, v, ranges=ranges, softmax_scale=scale)
        looks(q, k, v, ranges=ranges, softmax_scale=1.0)


def test_tensors_that_begin_elsewhere_take_the_long_way_and_are_right(ranged):
    """Of the same sizes and strides, but not at 16 bytes: a 16-byte load cannot read them."""
    q, k, v, make = ranged
    ranges = make("mixed")
    attend(q, k, v, ranges=ranges)
    for at in (1, 8):
        moved = [torch.cat([x.new_zeros(at), x.flatten()])[at:].view(x.shape) for x in (q, k, v)]
        close_to(attend(*moved, ranges=ranges), q, k, v, ranges)
    odd = torch.cat([ranges.new_zeros(1), ranges.flatten()])[1:].view(ranges.shape)
    close_to(attend(q, k, v, ranges=odd), q, k, v, ranges)


def test_a_settled_call_that_fails_is_told_by_the_long_way(ranged, monkeypatch):
    from nsa.kernels.triton_sel_kernel import in_place

    q, k, v, make = ranged
    ranges = make("many")
    call = lambda: attend(q, k, v, ranges=ranges)
    call()

    fails = lambda words: mock.Mock(side_effect=RuntimeError(words))
    with monkeypatch.context() as patch:
        patch.setattr(in_place, "launch_planned", fails("ptxas said no"))
        with pytest.raises(RuntimeError, match="ptxas said no"):
            call()
    assert not settled._calls
    close_to(call(), q, k, v, ranges)
    gone = fails("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(in_place, "launch_planned", gone)
    monkeypatch.setattr(dispatch, "run", fails("looked at again"))
    with pytest.raises(RuntimeError, match="illegal memory"):  # of no use to try again
        call()


def test_gradients_are_those_of_the_long_way(ranged):
    """A settled call without gradients takes none away from one that needs them."""
    q, k, v, make = ranged
    ranges = make("overlap")
    attend(q, k, v, ranges=ranges)
    leaves = [x.requires_grad_() for x in (k, v)]
    with torch.no_grad():
        assert not attend(q, k, v, ranges=ranges).requires_grad
    of = lambda backend: attend(q, k, v, ranges=ranges, backend=backend).square().sum()
    got, want = (torch.autograd.grad(of(backend), leaves) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3)


def test_not_more_calls_are_kept_than_fit(kernel_device, monkeypatch):
    monkeypatch.setattr(settled, "MOST", 2)
    for n in range(1, 6):
        like = dict(seed=n, dtype=torch.float16, device=kernel_device)
        q, k = randn(1, n, 2, 16, **like), randn(1, 8, 1, 16, **like)
        ranges = torch.zeros(1, n, 1, 1, 2, dtype=torch.int32, device=kernel_device)
        attend(q, k, k, ranges=ranges)
        assert 0 < len(settled._calls) <= 2


@pytest.mark.parametrize("backend", [None, "triton"])
def test_recomputing_ends_where_the_last_tensor_is_saved(backend, kernel_device, recwarn):
    """PyTorch ends it by an error out of the operator, which is no failure: nothing else serves
    instead, the first time nor when the call is settled."""
    if backend is None and kernel_device == "cpu":
        pytest.skip("PyTorch serves, where nobody asks for more")
    given = make_layer(40, dtype=torch.float16, device=kernel_device)
    sizes = dict(l=8, d=4, l_sel=16, n_sel=2, n_init=1, n_local=1, window=8)
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in given]
        call = lambda *x: nsa.nsa_attention(*x, **sizes, backend=backend, flags=ON)
        with launches.recording() as launched:
            out = checkpoint(call, *leaves, use_reentrant=False)
            out.sum().backward()
        assert launched["_block_attn_fwd_kernel"] == 2, dict(launched)
        assert all(x.grad is not None for x in leaves)
    assert not [w for w in recwarn if "failed" in str(w.message)]
