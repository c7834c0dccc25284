"""torch.func on the public functions and a layer: right, or refused by name; and nested tensors."""

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NSAAttention, NSAConfig, NSALanguageModel, nsa_attention
from nsa.attention import nsa_decode
from nsa.compress import mean_pool
from nsa.module import NSABlock
from nsa.tests.helpers import TRITON, assert_raises, make_layer, randn

SIZES = dict(l=8, d=4, l_sel=8, n_sel=3, window=16)
CONFIG = NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=16)
ALL = tuple(range(8))


def inputs(seed, S=40, dtype=torch.float64, device="cpu") -> list[Tensor]:
    return make_layer(S, dtype=dtype, device=device, seed=seed)


def stack(samples) -> list[Tensor]:
    return [torch.stack(x) for x in zip(*samples, strict=True)]


def gradients(loss, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("backend", [None, "sdpa", "reference"])
def test_gradients_and_batches_are_those_of_the_plain_call(backend):
    loss = lambda *x: nsa_attention(*x, backend=backend, **SIZES).square().sum()
    samples = [inputs(1), inputs(2)]
    want = [gradients(loss, one) for one in samples]
    torch.testing.assert_close(torch.func.grad(loss, ALL)(*samples[0]), want[0])
    stacked = stack(samples)
    values = torch.vmap(loss)(*stacked)
    torch.testing.assert_close(values, torch.stack([loss(*one) for one in samples]))
    each = torch.vmap(torch.func.grad(loss, ALL))(*stacked)
    for i, grads in enumerate(want):
        torch.testing.assert_close(tuple(x[i] for x in each), grads)
    # One q for all samples: its gradient is one for each of them, or their sum.
    q, rest = samples[0][0], stacked[1:]
    per_sample = torch.vmap(torch.func.grad(loss), (None, *7 * [0]))(q, *rest)
    torch.testing.assert_close(per_sample[0], want[0][0])
    summed = torch.func.grad(lambda q: torch.vmap(lambda *x: loss(q, *x))(*rest).sum())(q)
    torch.testing.assert_close(summed, per_sample.sum(0))


def test_nested_transforms():
    """jacrev is vmap of a backward; a second derivative is the reference's own."""
    one = inputs(1)
    row = lambda q: nsa_attention(q, *one[1:], backend="reference", **SIZES)[0, -1, 0]
    q = one[0].clone().requires_grad_()
    want = torch.stack([torch.autograd.grad(x, q, retain_graph=True)[0] for x in row(q)])
    torch.testing.assert_close(torch.func.jacrev(row)(one[0]), want)
    twice = torch.func.grad(lambda q: torch.func.grad(lambda q: row(q).square().sum())(q).sum())
    (first,) = torch.autograd.grad(row(q).square().sum(), q, create_graph=True)
    torch.testing.assert_close(twice(one[0]), torch.autograd.grad(first.sum(), q)[0])
    _, tangent = torch.func.jvp(row, (one[0],), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, want.sum((1, 2, 3, 4)))
    with pytest.raises(NotImplementedError, match="nsa_attention has no forward-mode .*jacrev"):
        torch.func.jacfwd(row)(one[0])


@pytest.mark.parametrize("by", ["blocks", "ranges", "window"])
def test_kernels_have_no_second_derivative_and_say_so(by, kernel_device):
    q, _, _, k, v, *_ = (x.half().to(kernel_device) for x in inputs(1))
    blocks = torch.zeros(*q.shape[:2], k.shape[2], 1, dtype=torch.int32, device=kernel_device)
    chosen: dict = {"block_indices": blocks, "block_size": 16}
    if by == "ranges":
        chosen = {"ranges": torch.stack([blocks, blocks + 1], -1)}

    def loss(q):
        if by == "window":
            return nsa.sliding_attention(q, k, v, window=9, backend="triton").square().sum()
        return nsa.selection_attention(q, k, v, **chosen, backend="triton").square().sum()

    assert torch.func.grad(loss)(q).abs().max() > 0 or by == "ranges"  # of one key there is none
    for twice in (
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q),
        lambda: torch.autograd.functional.vhp(loss, q, q),
    ):
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            twice()


def test_the_branches_under_vmap():
    q, k_cmp, v_cmp, k, v, *_ = stack([inputs(1), inputs(2)])
    sizes = {n: SIZES[n] for n in ("l", "d", "l_sel", "n_sel")}
    choose = lambda q, k: (nsa.select_blocks(q, k, **sizes),)
    (blocks,) = torch.vmap(choose)(q, k_cmp)
    for call, *tensors in (
        (lambda *x: nsa.compressed_attention(*x, l=8, d=4), q, k_cmp, v_cmp), (choose, q, k_cmp),
        (lambda *x: (nsa.sliding_attention(*x, window=9),), q, k, v),
        (lambda *x: (nsa.selection_attention(*x, block_size=8),), q, k, v, blocks),
    ):  # fmt: skip
        want = stack(call(*(x[i] for x in tensors)) for i in (0, 1))
        torch.testing.assert_close(list(torch.vmap(call)(*tensors)), want)
        none = torch.vmap(call)(*(x[:0] for x in tensors))
        assert [x.shape for x in none] == [(0, *x.shape[1:]) for x in want]


def test_what_comes_beside_the_output_is_the_same():
    seen, one = [], inputs(1)
    want, want_aux = nsa_attention(*one, return_aux=True, **SIZES)

    def loss(q):
        out, aux = nsa_attention(q, *one[1:], return_aux=True, **SIZES)
        seen.append(aux["routes"])
        return out.sum(), (out, aux["lse"], aux["block_indices"])

    _, (out, lse, blocks) = torch.func.grad(loss, has_aux=True)(one[0])
    assert seen == [want_aux["routes"]] and torch.equal(blocks, want_aux["block_indices"])
    assert torch.equal(out, want) and torch.equal(lse, want_aux["lse"])


def test_packs_are_refused_under_vmap():
    cu_seqlens = torch.tensor([0, 18, 40], dtype=torch.int32)
    packed = [torch.stack([x[0], x[0]]) for x in inputs(1)]
    with pytest.raises(NotImplementedError, match="nsa_attention takes no packed sequences under"):
        torch.vmap(lambda *x: nsa_attention(*x, cu_seqlens=cu_seqlens, **SIZES))(*packed)


@pytest.mark.parametrize("call", ["step", "prefill"])
def test_a_cache_is_refused_under_transforms(call):
    """Its steps have no gradient, and a kernel that failed there would not be tried again."""
    layer, x = NSAAttention(CONFIG), randn(3, 1, 2, CONFIG.dim, seed=1)
    run = lambda x: getattr(layer, call)(x, layer.make_cache(1, 9))
    words = "a cache takes no tokens under torch.func"
    assert_raises(
        (NotImplementedError, words, lambda: torch.vmap(run)(x)),
        (NotImplementedError, words, lambda: torch.func.grad(lambda x: run(x).sum())(x[0])),
    )


def test_decode_under_transforms():
    layer = NSAAttention(CONFIG)
    cache, c = layer.make_cache(1, 30), CONFIG
    layer.prefill(randn(1, 20, c.dim, seed=1), cache)
    q, gates = randn(1, 2, c.heads, c.d_k, seed=2), randn(1, 2, c.heads, 3, seed=3)
    run = lambda q: nsa_decode(q, cache, None, gates)[0].sum()
    leaf = q.clone().requires_grad_()
    run(leaf).backward()
    torch.testing.assert_close(torch.func.grad(run)(q), leaf.grad)
    with pytest.raises(NotImplementedError, match="nsa_decode does not run under torch.vmap"):
        torch.vmap(run)(torch.stack([q, q]))


def test_per_sample_gradients_of_a_layer():
    layer = NSAAttention(CONFIG).double()
    weights, x = dict(layer.named_parameters()), randn(3, 40, 32, seed=1, dtype=torch.float64)
    loss = lambda w, x: torch.func.functional_call(layer, w, (x[None],)).square().sum()
    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i in range(3):
        layer.zero_grad()
        loss(weights, x[i]).backward()
        for name, p in weights.items():
            torch.testing.assert_close(each[name][i], p.grad)


def test_kernels_under_transforms(kernel_device):
    """Triton's route takes part: under vmap in one call, with its own backward."""
    how = {**SIZES, "l_sel": 16, "backend": "triton", "flags": TRITON}
    loss = lambda *x: nsa_attention(*x, **how).float().square().sum()
    samples = [inputs(i, 20, torch.float16, kernel_device) for i in (1, 2)]
    each = torch.vmap(torch.func.grad(loss, ALL))(*stack(samples))
    for i, one in enumerate(samples):
        for a, b in zip(each, gradients(loss, one), strict=True):
            torch.testing.assert_close(a[i], b, atol=2e-3, rtol=2e-3)


def jagged(*lengths: int) -> Tensor:
    parts = [randn(n, 32, seed=n) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("kind", [NSAAttention, NSABlock])
def test_a_jagged_tensor_is_a_pack(kind):
    layer, x = kind(CONFIG), jagged(40, 7, 23)
    got = layer(x)
    assert got.is_nested and got.layout is torch.jagged
    torch.testing.assert_close(list(got.unbind()), [layer(part[None])[0] for part in x.unbind()])
    got.values().square().sum().backward()
    assert x.grad.is_nested and x.grad.values().abs().sum() > 0


def test_jagged_tokens_of_a_model():
    model = NSALanguageModel(CONFIG, 50, 2)
    parts = [torch.arange(n) % 50 for n in (31, 12)]
    got = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
    torch.testing.assert_close(list(got.unbind()), [model(part[None])[0] for part in parts])


def test_other_nested_tensors_are_refused():
    layer, parts = NSAAttention(CONFIG), [randn(n, 32, seed=n) for n in (9, 5)]
    with pytest.warns(UserWarning, match="nested"):
        strided = torch.nested.nested_tensor(parts)
    holes = torch.nested.nested_tensor_from_jagged(
        torch.randn(20, 32), torch.tensor([0, 9, 20]), lengths=torch.tensor([4, 11])
    )
    one, pair = inputs(1), jagged(9, 5)
    heads = torch.nested.nested_tensor([one[0][0]], layout=torch.jagged)
    words = "must not be a nested tensor"
    assert_raises(
        *((ValueError, r"\[B, j, \.\.\] of layout torch.jagged without", lambda x=x: layer(x))
          for x in (strided, holes, pair.transpose(1, 2))),
        (ValueError, "cu_seqlens must be None with a nested tensor",
         lambda: layer(pair, torch.tensor([0, 9, 14], dtype=torch.int32))),
        (TypeError, f"x {words}: give x.values",
         lambda: layer.step(jagged(1, 1), layer.make_cache(2, 4))),
        (TypeError, f"q {words}", lambda: nsa_attention(heads, *one[1:], **SIZES)),
        (TypeError, f"x {words}", lambda: mean_pool(heads, 8, 4)),
    )  # fmt: skip
