"""Do launchers that hand plain addresses to kernels take tensors of any strides, or refuse them?"""

from __future__ import annotations

import inspect

import pytest
import torch

from nsa.blocks import cu_seqlens_compressed
from nsa.compress import mean_pool
from nsa.kernels import prefill
from nsa.kernels.decode import nsa_decode_triton
from nsa.kernels.prefill import split_turned_triton
from nsa.kernels.triton_sel_kernel import selection_ranges_triton
from nsa.tests.helpers import make_ranges, randn

pytestmark = pytest.mark.kernel
S, L, D = 24, 8, 4  # tokens, compressed blocks and their stride
CHOICE = dict(l=L, d=D, l_sel=16, n_sel=4, n_init=1, n_local=2)
CU = torch.tensor([0, 9, S], dtype=torch.int32)


def strided(x):
    """The values of x, each beside a zero."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def tensors(device, packed):
    lead = (S,) if packed else (1, S)
    make = lambda seed, *tail: randn(*lead, *tail, seed=seed, dtype=torch.float16, device=device)
    cu = CU.to(device) if packed else None
    kv = dict(k_sel=make(1, 2, 16), v_sel=make(2, 2, 16), k_win=make(3, 2, 16),
              v_win=make(4, 2, 16))  # fmt: skip
    x = dict(q=make(0, 4, 16), k_cmp=mean_pool(make(5, 2, 16), L, D, cu),
             v_cmp=mean_pool(make(6, 2, 16), L, D, cu), **kv, gates=make(7, 4, 3).sigmoid(),
             lse=make(8, 4).float().double())  # fmt: skip
    blocks = torch.tensor([0, 1], dtype=torch.int32, device=device).expand(*lead, 2, 2)
    x["block_indices"] = blocks.contiguous()
    if packed:
        x.update(cu_seqlens=cu, cu_seqlens_cmp=cu_seqlens_compressed(cu, L, D))
    return x


def calls(device):
    def call(fn, *names, ends=("cu_seqlens", "cu_seqlens_cmp"), **sizes):
        def run(x):
            how = {name: x[name] for name in ends if name in x}
            if how and "max_seqlen" in inspect.signature(fn).parameters:
                how["max_seqlen"] = 15
            return fn(*(x[name] for name in names), **sizes, **how)

        return run

    cmp, one = dict(l=L, d=D), ("cu_seqlens",)
    every = "q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"
    return {
        "compressed": call(prefill.compressed_attention_triton, *every[:3], **cmp),
        "sliding": call(prefill.sliding_attention_triton, "q", "k_win", "v_win", ends=one,
                        window=9),
        "choice": call(prefill.select_blocks_triton, "q", "k_cmp", "lse",
                       **{**CHOICE, "l_sel": 4}),
        "selected": call(prefill.selection_blocks_triton, "q", "k_sel", "v_sel", "block_indices",
                         ends=one, block_size=16),
        "prefill": call(prefill.nsa_prefill_triton, *every, window=9, **CHOICE),
    }  # fmt: skip


def outputs(run, x):
    """What run(x) gives, and the gradients of its first output where there are any."""
    leaves = {n: t.detach().requires_grad_(n in ("q", "gates") or n[1:2] == "_")
              for n, t in x.items() if t.is_floating_point()}  # fmt: skip
    found = run({**x, **leaves})
    out = found[0] if isinstance(found, tuple) else found
    if not out.requires_grad:
        return [out]
    grad = strided(randn(*out.shape, seed=9, dtype=out.dtype, device=out.device))
    sources = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return [out, *torch.autograd.grad(out, sources, grad, allow_unused=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["compressed", "sliding", "choice", "selected", "prefill"])
def test_prefill(name, packed, kernel_device):
    x, run = tensors(kernel_device, packed), calls(kernel_device)[name]
    apart = {n: strided(t) for n, t in x.items()}
    assert not any(t.is_contiguous() for t in apart.values())
    for want, got in zip(outputs(run, x), outputs(run, apart), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


def test_turn(kernel_device):
    qkv = randn(1, S, 4 * 16 + 2 * 3 * 32, seed=1, dtype=torch.float16, device=kernel_device)
    at = torch.arange(S, device=kernel_device)
    sizes = dict(heads=4, groups=2, d_k=16, d_v=16, rope_base=1e4)
    for want, got in zip(
        split_turned_triton(qkv, at, **sizes),
        split_turned_triton(strided(qkv), strided(at), **sizes),
        strict=True,
    ):
        assert torch.equal(got, want)  # fmt: skip


@pytest.mark.parametrize("path", ["ranges", "dense", "varlen"])
def test_ranges(path, kernel_device):
    make = lambda seed, *shape: randn(*shape, seed=seed, dtype=torch.float16, device=kernel_device)
    x = [make(0, 1, 6, 2, 2, 16), make(1, 1, 2, S, 16), make(2, 1, 2, S, 16),
         make_ranges("few", 1, 6, 2, S, 3, device=kernel_device)]  # fmt: skip
    if path == "dense":
        x[3] = x[3][..., :1, :]
    want = selection_ranges_triton(*x, path=path)
    got = selection_ranges_triton(*map(strided, x), path=path)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("counters", [False, True])
def test_decode_step(counters, kernel_device):
    """Small tensors may have any strides, and lengths any int dtype; a cache is not copied."""
    make = lambda seed, *shape: randn(*shape, seed=seed, dtype=torch.float16, device=kernel_device)
    pages = [make(seed, 8, 16, 2, 16) for seed in range(4)]
    x = dict(q=make(4, 2, 1, 4, 16), k_cmp=make(5, 2, 16, 2, 16), v_cmp=make(6, 2, 16, 2, 16),
             **dict(zip(("k_sel", "v_sel", "k_win", "v_win"), pages, strict=True)),
             gates=make(7, 2, 1, 4, 3).sigmoid(),
             lens=torch.tensor([40, 30], dtype=torch.int32, device=kernel_device))  # fmt: skip
    table = torch.tensor([[0, 3, 5, 7], [1, 2, 6, 4]], dtype=torch.int32, device=kernel_device)

    def run(table=table, **changed):
        meet = torch.zeros(2, 2, 32, dtype=torch.int32, device=kernel_device)
        return nsa_decode_triton(
            **{**x, **changed}, window=16, max_len=64, block_table=table,
            counters=meet if counters else None, **CHOICE,
        )  # fmt: skip

    want = run()
    small = {name: strided(x[name]) for name in ("q", "gates", "lens")}
    assert torch.equal(run(**small, table=strided(table)), want)
    assert torch.equal(run(lens=x["lens"].long(), table=table.long()), want)
    for name in ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"):
        with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides"):
            run(**{name: strided(x[name])})
