"""NSAAttention and NSABlock: projections, rotary embedding, gates, and the three ways to run them.

Each branch has its own key and value projections (section 3.3.3). The rotary embedding turns q and
all keys before compression, so a compressed token is the same whether it came from prefill or from
decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import attention, dispatch
from nsa.arguments import check_packed, check_tensor
from nsa.cache import BranchKV, NSACache
from nsa.checks import apply_linear, autocast_on, is_plain
from nsa.compress import make_compression
from nsa.config import NSAConfig
from nsa.dispatch import Backend
from nsa.flags import Flags
from nsa.fp8 import KVCacheDtype
from nsa.layouts import token_positions
from nsa.nested import run_packed
from nsa.rotary import branches, split_turned, turn
from nsa.transforms import refuse_tokens, transforming
from nsa.untraced import untraced

FUSED_GATES = 64  # tokens of a step; of more the gates are worth a product of matrices


def _check_kind(cache: Any) -> None:
    """Raise TypeError unless it is an NSACache."""
    if not isinstance(cache, NSACache):
        raise TypeError(f"cache must be an NSACache, got {type(cache).__name__}")


class GateMLP(nn.Module):
    """Gates in (0, 1) per head and branch from the token: x [.., dim] -> [.., HQ, 3], in x's dtype.

    hidden: width of its hidden layer, by default dim / 4 but at least heads. A last dimension other
    than dim, or another dtype than the weights', is nn.Linear's RuntimeError.
    """

    def __init__(self, dim: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(dim, hidden or max(heads, dim // 4))
        self.outer = nn.Linear(hidden or max(heads, dim // 4), heads * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(x))).sigmoid().unflatten(-1, (self.heads, 3))

    def for_kernel(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the last layer, for a kernel that does what follows inner(x).

        None where hooks, adapters or other weights have their say.
        """
        outer = self.outer
        if not is_plain(self, GateMLP) or not is_plain(outer, nn.Linear) or outer.bias is None:
            return None
        return outer.weight, outer.bias


class NSAAttention(nn.Module):
    """Native Sparse Attention layer (arXiv 2502.11089, section 3): [B, S, dim] -> [B, S, dim].

    flags and backend are passed to nsa_attention; None follows the environment. phi_k and phi_v may
    be replaced by modules that take (x, cu_seqlens=None) as nsa.compress.MLPCompression does, gate
    by one that makes [.., HQ, 3] of x. Raises ValueError or TypeError for an unknown backend, and
    for a config or flags of another kind.
    """

    def __init__(
        self, config: NSAConfig, *, backend: Backend | None = None, flags: Flags | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, NSAConfig):
            raise TypeError(f"config must be an nsa.NSAConfig, got {type(config).__name__}")
        if flags is not None and not isinstance(flags, Flags):
            raise TypeError(f"flags must be an nsa.Flags, got {type(flags).__name__}")
        dispatch.parse_backend(backend)
        c = self.config = config
        self.backend, self.flags = backend, flags
        # One product for queries, keys (cmp, sel, win) and values (the same): eager decoding is
        # bound by the number of launches.
        self.qkv = nn.Linear(c.dim, sum(c.qkv_widths), bias=False)
        self.out = nn.Linear(c.heads * c.d_v, c.dim, bias=False)
        self.gate = GateMLP(c.dim, c.heads)
        self.phi_k = make_compression(c.phi, c.d_k, c.l, c.d)
        self.phi_v = make_compression(c.phi, c.d_v, c.l, c.d)

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"heads={c.heads}, groups={c.groups}, d_k={c.d_k}, d_v={c.d_v}, l={c.l}, d={c.d}, "
            f"l_sel={c.l_sel}, n_sel={c.n_sel}, window={c.window}"
        )

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Weights from before the three projections were one are joined."""
        parts = [f"{prefix}{name}.weight" for name in "qkv"]
        if all(part in state_dict for part in parts):
            state_dict[f"{prefix}qkv.weight"] = torch.cat([state_dict.pop(part) for part in parts])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, BranchKV]:
        """q [.., S, HQ, Dk] and the raw keys and values of the three branches."""
        if transforming():
            return split_turned(self.qkv(x), positions, self.config)
        return attention.turn_projected(
            self.qkv(x), positions, self.config, backend=self.backend, flags=self.flags
        )

    def _project_at(self, x: Tensor, angle: Tensor) -> tuple[Tensor, BranchKV]:
        """_project for few tokens, where launches are the cost: queries and keys turn together."""
        c = self.config
        both, v = self.qkv(x).tensor_split([sum(c.qkv_widths[:2])], dim=-1)
        both = turn(both.unflatten(-1, (c.heads + 3 * c.groups, c.d_k)), angle)
        v = v.unflatten(-1, (3 * c.groups, c.d_v))
        return both[..., : c.heads, :].contiguous(), branches(both[..., c.heads :, :], v)

    def _check(self, x: Tensor, ndim: int) -> None:
        check_tensor("x", x)
        if x.ndim != ndim or x.shape[-1] != self.config.dim:
            lead = "[B, S, dim]" if ndim == 3 else "[T, dim]"
            hint = ": one sequence is x[None], packed ones need cu_seqlens"
            raise ValueError(
                f"x must be {lead} with dim={self.config.dim}, got {list(x.shape)}"
                f"{hint if (x.ndim, ndim) == (2, 3) else ''}"
            )

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Attend within x [B, S, dim], or within each sequence of packed x [T, dim].

        cu_seqlens int32 [nseq + 1] and max_seqlen as in nsa/attention.py. A jagged nested tensor
        [B, j, dim] is a pack. Raises ValueError or TypeError that names the argument.
        """
        if isinstance(x, Tensor) and x.is_nested:
            return run_packed(self.forward, x, cu_seqlens)
        self._check(x, 3 if cu_seqlens is None else 2)
        max_seqlen = check_packed(cu_seqlens, max_seqlen, x)
        q, kv = self._project(x, token_positions(x, cu_seqlens))
        out = attention.nsa_attention(
            q, self.phi_k(kv.k_cmp, cu_seqlens), self.phi_v(kv.v_cmp, cu_seqlens), kv.k_sel,
            kv.v_sel, kv.k_win, kv.v_win, self.gate(x), cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, backend=self.backend, flags=self.flags, **self.config.sizes(),
        )  # fmt: skip
        return self.out(out.flatten(-2))

    def make_cache(
        self, batch: int, max_len: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, max_step: int = 8, growable: bool = False,
        count_reads: bool = False, kv_cache_dtype: KVCacheDtype = "auto",
        k_descale: float | Tensor | None = None, v_descale: float | Tensor | None = None,
    ) -> NSACache:  # fmt: skip
        """An empty cache for this layer, as NSACache; device and dtype are its weights' (under
        autocast the dtype is autocast's) unless given."""
        if device is None or dtype is None:
            # Adapters keep their weights elsewhere, and quantised layers have none.
            weights = [p for p in self.qkv.parameters() if p.is_floating_point()]
            weight = [*weights, *self.parameters(), torch.empty(0)][0]
            device = weight.device if device is None else device
            if dtype is None:
                dtype = weight.dtype
                if autocast_on(weight.device) and dtype != torch.float64:  # which it leaves alone
                    dtype = torch.get_autocast_dtype(weight.device.type)
        return NSACache(
            self.config, batch, max_len, device=device, dtype=dtype, max_step=max_step,
            growable=growable, count_reads=count_reads, kv_cache_dtype=kv_cache_dtype,
            k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip

    def _check_cache(self, cache: NSACache) -> None:
        """Raise ValueError unless the cache was made for sizes like this layer's."""
        for name, ours in vars(self.config).items():
            theirs = getattr(cache.config, name)
            if ours != theirs and name not in ("dim", "phi"):
                raise ValueError(
                    f"cache must be of a layer with {name}={ours} as this one, got {name}={theirs}"
                )

    @untraced  # as step()
    def prefill(self, x: Tensor, cache: NSACache) -> Tensor:
        """Attend within x [B, S, dim] and fill the empty cache with it; without gradients.

        Raises ValueError when the cache holds tokens, and as step() does.
        """
        _check_kind(cache)

        def check() -> dict[str, Any]:
            self._check_cache(cache)
            if cache.length:
                raise ValueError(f"cache must be empty for prefill, it holds {cache.length} tokens")
            return {}

        cache.agree(check)
        return self.step(x, cache)

    # Lengths, which the cache keeps in Python, would be compiled in: anew for every token.
    @torch.no_grad()
    @untraced
    def step(self, x: Tensor, cache: NSACache) -> Tensor:
        """Append the T newest tokens x [B, T, dim] to the cache and attend from them; without
        gradients.

        Raises ValueError when x has not the cache's batch or device, or does not fit any more, and
        when the cache is of a layer with other sizes. A step that raises leaves the cache as it
        was.
        """
        _check_kind(cache)

        # Outside of it an error on one rank of a ParallelNSACache would leave the others waiting.
        def check() -> dict[str, Any]:
            refuse_tokens()
            if cache.config is not self.config:
                self._check_cache(cache)
            self._check(x, 3)
            if x.shape[0] != cache.batch:
                raise ValueError(
                    f"x must have the cache's batch {cache.batch}, got {list(x.shape)}"
                )
            if x.device != cache.lens.device:
                raise ValueError(f"x must be on the cache's {cache.lens.device}, got {x.device}")
            return {
                "T": x.shape[1], "dtype": x.dtype, "backend": self.backend, "flags": self.flags,
                "config": self.config,
            }  # fmt: skip

        cache.agree(check)
        if x.shape[1] == 0:
            return x.clone()
        with cache.kept_if_raised(x):
            return self._step(x, cache)

    def _step(self, x: Tensor, cache: NSACache) -> Tensor:
        # The ring keeps enough for max_step queries; more of them need the keys before they go.
        many = x.shape[1] > cache.max_step
        window = q = made = last = None
        if not many and x.shape[0] * x.shape[1] <= FUSED_GATES and isinstance(self.gate, GateMLP):
            last = self.gate.for_kernel()
        gates = self.gate(x) if last is None else None
        if not many:
            q, made = attention.append_projected(
                lambda: apply_linear(self.qkv, x), cache, self.phi_k, self.phi_v,
                lambda: None if last is None else (apply_linear(self.gate.inner, x), *last),
                backend=self.backend, flags=self.flags,
            )  # fmt: skip
        if gates is None:
            gates = self.gate(x) if made is None else made
        if q is None:
            positions = cache.positions(x.shape[1])
            if many:
                q, kv = self._project(x, positions)
                window = cache.window_with(kv.k_win, kv.v_win)
            else:
                q, kv = self._project_at(x, cache.angles(positions))
            cache.append(kv, self.phi_k, self.phi_v)
        decode = attention.nsa_decode if made is None else attention.decode_appended
        out, _ = decode(q, cache, window, gates, backend=self.backend, flags=self.flags)
        return apply_linear(self.out, out.flatten(-2))


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * W_up x), hidden width 8/3 dim rounded up to a multiple of 32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-8 * dim // 3 // 32) * 32
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class NSABlock(nn.Module):
    """LLaMA-style block: x + NSA(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)).

    >>> config = NSAConfig(
    ...     dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, window=16
    ... )
    >>> block, x = NSABlock(config), torch.randn(2, 40, 32)
    >>> cache = block.attention.make_cache(batch=2, max_len=40)
    >>> parts = [block.prefill(x[:, :39], cache), block.step(x[:, 39:], cache)]
    >>> torch.testing.assert_close(torch.cat(parts, 1), block(x))
    """

    def __init__(
        self, config: NSAConfig, *, backend: Backend | None = None, flags: Flags | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = NSAAttention(config, backend=backend, flags=flags)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config.dim)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """x [B, S, dim], or packed x [T, dim], to the same shape and dtype.

        Arguments and errors as for NSAAttention; of a last dimension other than dim the norm
        complains first (RuntimeError).
        """
        if isinstance(x, Tensor) and x.is_nested:
            return run_packed(self.forward, x, cu_seqlens)
        return self._finish(x, self.attention(self.attention_norm(x), cu_seqlens, max_seqlen))

    @torch.no_grad()
    def prefill(self, x: Tensor, cache: NSACache) -> Tensor:
        """forward() of x [B, S, dim] that fills the empty cache, without gradients. ValueError as
        NSAAttention's."""
        _check_kind(cache)
        with cache.kept_if_raised(x):
            return self._finish(x, self.attention.prefill(self.attention_norm(x), cache))

    @torch.no_grad()
    def step(self, x: Tensor, cache: NSACache) -> Tensor:
        """forward() of the T newest tokens x [B, T, dim], without gradients. ValueError as
        NSAAttention.step's."""
        _check_kind(cache)
        with cache.kept_if_raised(x):
            return self._finish(x, self.attention.step(self.attention_norm(x), cache))
