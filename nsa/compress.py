"""phi of Eq. 7: one key (or value) per block of l tokens, every d tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.arguments import check_packed, check_tensor
from nsa.blocks import is_symbol, num_compressed
from nsa.checks import is_plain
from nsa.config import check_compression, check_int
from nsa.errors import callers_own


def block_windows(x: Tensor, l: int, d: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The l tokens of every whole block: x [B, S, G, D] -> [B, Nc, l, G, D].

    With cu_seqlens (int32 [nseq + 1]), x is packed [T, G, D] -> [N_total, l, G, D] and no block
    spans two sequences; a GPU is waited for, since the lengths say how many blocks there are.
    Raises ValueError or TypeError that names the argument.
    """
    check_compression(l, d)
    check_tensor("x", x)
    if x.ndim != (4 if cu_seqlens is None else 3):
        lead = "[B, S, G, D]" if cu_seqlens is None else "[T, G, D] with cu_seqlens"
        raise ValueError(f"x must be {lead}, got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be of a floating dtype, got {x.dtype}")
    if cu_seqlens is None:
        B, S, G, D = x.shape
        if is_symbol(S):  # S // d + 3 blocks: more than one whatever S is, and nobody sees the last
            x = F.pad(x, (0, 0, 0, 0, 0, l + 2 * d))
            if l == d:  # is a view of these contiguous? a tracer would have to know S
                start = torch.arange(S // d + 3, device=x.device)[:, None] * d
                return x[:, start + torch.arange(l, device=x.device)]
        elif S < l:
            return x.new_zeros(B, 0, l, G, D)
        return x.unfold(1, l, d).permute(0, 1, 4, 2, 3)
    check_packed(cu_seqlens, x.shape[0], x)
    counts = num_compressed(cu_seqlens[1:] - cu_seqlens[:-1], l, d).long()
    before = F.pad(counts.cumsum(0), (1, 0))[:-1]
    n = int(counts.sum())
    start = torch.arange(n, device=x.device) - before.repeat_interleave(counts, output_size=n)
    start = start * d + cu_seqlens[:-1].long().repeat_interleave(counts, output_size=n)
    return x[start[:, None] + torch.arange(l, device=x.device)]


def mean_pool(x: Tensor, l: int, d: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The declared simple baseline for phi: [B, S, G, D] -> [B, Nc, G, D] (packed: see
    block_windows). Averages in fp32."""
    blocks = block_windows(x, l, d, cu_seqlens)
    wide = torch.promote_types(x.dtype, torch.float32)
    return blocks.to(wide).mean(-3).to(x.dtype)


class MeanCompression(nn.Module):
    """Mean pooling as a module without parameters."""

    def __init__(self, l: int, d: int) -> None:
        super().__init__()
        self.l, self.d = l, d

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return mean_pool(x, self.l, self.d, cu_seqlens)


class MLPCompression(nn.Module):
    """phi(x) = W2 silu(W1 [x_0 + p_0, ..., x_{l-1} + p_{l-1}] + b1) + b2, shared by the groups.

    p is the learnable intra-block position encoding [l, D]. [B, S, G, D] -> [B, Nc, G, D]. hidden:
    the width of silu's layer, None for D. Raises TypeError or ValueError that names a wrong size.
    """

    def __init__(self, dim: int, l: int, d: int, hidden: int | None = None) -> None:
        super().__init__()
        check_int("dim", dim, 1)
        check_compression(l, d)
        check_int("hidden", hidden, 1, optional=True)
        self.l, self.d = l, d
        self.position = nn.Parameter(torch.empty(l, dim))
        self.reset_parameters()
        self.inner = nn.Linear(l * dim, hidden or dim)
        self.outer = nn.Linear(hidden or dim, dim)

    def reset_parameters(self) -> None:
        """Initialise p; the linear layers have their own, as modules on meta tensors need it."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        blocks = block_windows(x, self.l, self.d, cu_seqlens)  # [.., Nc, l, G, D]
        if x.shape[-1] != self.position.shape[-1]:  # a last dimension of 1 would broadcast
            D = self.position.shape[-1]
            raise ValueError(f"x must have D={D} columns, got shape {list(x.shape)}")
        blocks = blocks + self.position[:, None, :].to(x.dtype)
        flat = blocks.transpose(-3, -2).flatten(-2)  # [.., Nc, G, l * D]
        if is_symbol(x.shape[-3]):  # to a tracer Nc * G can be taken apart by numbers alone
            return self._layers(flat.transpose(-3, -2)).transpose(-3, -2)
        return self._layers(flat)

    def _layers(self, flat: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(flat)))

    def for_kernel(self) -> tuple[Tensor, ...] | None:
        """p, W1, b1, W2 and b2 for a kernel that does forward()'s work.

        None where hooks, adapters or other weights have their say.
        """
        inner, outer = self.inner, self.outer
        if not is_plain(self, MLPCompression) or not all(
            is_plain(layer, nn.Linear) and layer.bias is not None for layer in (inner, outer)
        ):
            return None
        return self.position, inner.weight, inner.bias, outer.weight, outer.bias


def made_by(name: str, phi: Callable[[Tensor], Tensor], raw: Tensor, n: int = 1) -> Tensor:
    """Return the n compressed tokens [B, n, G, D] that phi makes of raw ones [B, N, G, D]. Raises
    ValueError where phi makes another shape."""
    shape = (len(raw), n, *raw.shape[2:])
    with callers_own():
        made = phi(raw)
        if made.shape != shape:
            raise ValueError(
                f"{name} must make {list(shape)} of {list(raw.shape)}, got {list(made.shape)}"
            )
    return made


def make_compression(kind: str, dim: int, l: int, d: int) -> nn.Module:
    """phi by name: "mlp" or "mean"."""
    if kind == "mlp":
        return MLPCompression(dim, l, d)
    if kind == "mean":
        return MeanCompression(l, d)
    raise ValueError(f"phi must be 'mlp' or 'mean', got {kind!r}")
