"""Do the prefill kernels refuse, before the forward, calls whose backward has no kernel?"""

from __future__ import annotations

import pytest
import torch

from nsa.kernels.prefill import limits


@pytest.mark.parametrize("arch, d, dv, itemsize, most", [
    (120, 256, 256, 2, 16), (89, 200, 64, 2, 16), (86, 64, 192, 2, 16), (121, 128, 128, 2, 64),
    (86, 192, 128, 2, 64), (86, 64, 64, 2, 128), (80, 256, 256, 2, 64), (90, 128, 128, 2, 64),
    (90, 192, 128, 2, 64), (100, 64, 64, 4, 64), (103, 192, 128, 2, 64), (86, 8, 8, 4, 16),
])  # fmt: skip
def test_most_heads_by_architecture_and_head_size(arch, d, dv, itemsize, most):
    assert limits.most_heads(arch, d, dv, itemsize) == most


@pytest.mark.parametrize("name", ["cmp", "win", "sel", "blocks", "fused"])
def test_more_heads_than_fit_are_refused_before_the_forward(name, monkeypatch):
    """Calls look as if they came from a part with 99 KB of shared memory."""
    pytest.importorskip("triton")
    from nsa.kernels import prefill

    monkeypatch.setattr(limits, "arch_of", lambda device: 120)
    x = torch.zeros(1, 64, 32, 256, dtype=torch.bfloat16)
    q, k = x, x[:, :, :1]
    cmp, lse = k[:, :3], torch.zeros(1, 64, 32)
    blocks = torch.zeros(1, 64, 1, 2, dtype=torch.int32)
    sizes = dict(l=32, d=16, l_sel=64, n_sel=2, n_init=1, n_local=1)
    calls = {
        "cmp": lambda: prefill.compressed_attention_triton(q, cmp, cmp, l=32, d=16),
        "win": lambda: prefill.sliding_attention_triton(q, k, k, window=8),
        "sel": lambda: prefill.selection_blocks_triton(q, k, k, blocks, block_size=64),
        "blocks": lambda: prefill.select_blocks_triton(q, cmp, lse, **sizes),
        "fused": lambda: prefill.nsa_prefill_triton(
            q, cmp, cmp, k, k, k, k, torch.zeros(1, 64, 32, 3), **sizes, window=8
        ),
    }
    with pytest.raises(NotImplementedError, match="at most 16 heads per KV group .* got 32"):
        calls[name]()


@pytest.mark.parametrize("size", [0, -64, 8, 48, 96])
def test_blocks_that_are_not_whole_tiles_are_refused(size):
    with pytest.raises(NotImplementedError, match=f"l_sel must be 16, 32 .* got {size}"):
        limits.check_block_size("l_sel", size)
    for size in (16, 32, 64, 192):
        limits.check_block_size("l_sel", size)
