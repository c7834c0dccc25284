"""NSACache: what decoding keeps of one layer, in static buffers.

Three caches with their own keys and values: compressed tokens and the raw tail that will become
the next one; every token for selection; a ring of the last tokens for the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import select
from nsa.blocks import num_compressed, visible_compressed
from nsa.config import NSAConfig


@dataclass(frozen=True)
class BranchKV:
    """New keys and values of the three branches, each [B, T, G, Dk] or [B, T, G, Dv]."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


@dataclass(frozen=True)
class Reads:
    """Keys read per KV group, summed over the counted queries."""

    cmp: int
    sel: int
    win: int

    @property
    def total(self) -> int:
        return self.cmp + self.sel + self.win


class NSACache:
    """Keys and values of `batch` sequences of equal length, at most max_len tokens.

    k_cmp, v_cmp [B, Nc_max, G, D]; k_sel, v_sel [B, max_len, G, D]; k_win, v_win a ring
    [B, w + max_step - 1, G, D] where position p lives in row p % rows; lens int32 [B] on the
    device holds the length. growable: a longer sequence doubles the buffers (which moves them, so
    not inside a CUDA graph) instead of raising ValueError. count_reads keeps what each step read.
    """

    def __init__(
        self, config: NSAConfig, batch: int, max_len: int, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        max_step: int = 8, growable: bool = False, count_reads: bool = False,
    ) -> None:  # fmt: skip
        for name, value in (("batch", batch), ("max_len", max_len), ("max_step", max_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        self.config, self.batch, self.max_len, self.max_step = config, batch, max_len, max_step
        self.growable, self.count_reads = growable, count_reads
        self.length = 0
        self.emitted = 0  # compressed tokens in k_cmp, v_cmp
        self._like = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        rows = num_compressed(max_len, config.l, config.d)
        self.k_cmp, self.v_cmp = self._buffers(rows)
        self.k_sel, self.v_sel = self._buffers(max_len)
        self.k_win, self.v_win = self._buffers(config.w + max_step - 1)
        self._tail = self._buffers(0)  # raw tokens from position emitted * d on
        self.lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._counted: list[tuple[int, Tensor, int]] = []

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        c = self.config
        return (
            torch.zeros(self.batch, rows, c.groups, c.d_k, **self._like),
            torch.zeros(self.batch, rows, c.groups, c.d_v, **self._like),
        )

    def __len__(self) -> int:
        return self.length

    @property
    def pending(self) -> int:
        """Raw tokens that wait for the next compressed one."""
        return self._tail[0].shape[1]

    def compressed(self) -> tuple[Tensor, Tensor]:
        """The compressed keys and values so far: [B, emitted, G, D]."""
        return self.k_cmp[:, : self.emitted], self.v_cmp[:, : self.emitted]

    def selectable(self) -> tuple[Tensor, Tensor]:
        """All raw keys and values of the selection branch: [B, length, G, D]."""
        return self.k_sel[:, : self.length], self.v_sel[:, : self.length]

    def window(self, T: int) -> tuple[Tensor, Tensor]:
        """What the T <= max_step newest queries slide over: their keys and the w - 1 before."""
        if T > self.max_step:
            raise ValueError(f"T must be at most max_step={self.max_step}, got {T}")
        first = max(0, self.length - T - (self.config.w - 1))
        rows = torch.arange(first, self.length, device=self.lens.device) % self.k_win.shape[1]
        return self.k_win[:, rows], self.v_win[:, rows]

    def window_with(self, k_win: Tensor, v_win: Tensor) -> tuple[Tensor, Tensor]:
        """The last w - 1 cached tokens, then any number of new ones that are not appended yet."""
        if self.length == 0:
            return k_win, v_win
        first = max(0, self.length - (self.config.w - 1))
        rows = torch.arange(first, self.length, device=self.lens.device) % self.k_win.shape[1]
        return (
            torch.cat([self.k_win[:, rows], k_win], dim=1),
            torch.cat([self.v_win[:, rows], v_win], dim=1),
        )

    @torch.no_grad()
    def append(
        self, new: BranchKV, phi_k: Callable[[Tensor], Tensor], phi_v: Callable[[Tensor], Tensor]
    ) -> None:
        """Add T tokens to the three caches; compressed tokens appear as their blocks fill.

        A compressed token is emitted at every length S with S >= l and (S - l) % d == 0, from the
        last l raw tokens. phi_k, phi_v: [B, n, G, D] -> [B, num_compressed(n), G, D].
        Raises ValueError when the tokens do not fit.
        """
        self._check(new)
        T = new.k_sel.shape[1]
        end = self.length + T
        if end > self.max_len:
            if not self.growable:
                raise ValueError(
                    f"cache holds max_len={self.max_len} tokens, got {self.length} + {T}"
                )
            self._grow(end)
        self.k_sel[:, self.length : end] = new.k_sel
        self.v_sel[:, self.length : end] = new.v_sel
        keep = min(T, self.k_win.shape[1])
        rows = torch.arange(end - keep, end, device=self.lens.device) % self.k_win.shape[1]
        self.k_win[:, rows] = new.k_win[:, T - keep :]
        self.v_win[:, rows] = new.v_win[:, T - keep :]

        k_raw = torch.cat([self._tail[0], new.k_cmp], dim=1)
        v_raw = torch.cat([self._tail[1], new.v_cmp], dim=1)
        fresh = num_compressed(k_raw.shape[1], self.config.l, self.config.d)
        if fresh:
            done = self.emitted + fresh
            self.k_cmp[:, self.emitted : done] = phi_k(k_raw)
            self.v_cmp[:, self.emitted : done] = phi_v(v_raw)
            self.emitted = done
        used = fresh * self.config.d
        self._tail = (k_raw[:, used:].clone(), v_raw[:, used:].clone())
        self.length = end
        self.lens += T

    def _check(self, new: BranchKV) -> None:
        c = self.config
        T = new.k_sel.shape[1]
        for name, x in vars(new).items():
            expected = (self.batch, T, c.groups, c.d_k if name[0] == "k" else c.d_v)
            if tuple(x.shape) != expected:
                raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")
            if x.dtype != self.k_sel.dtype:
                raise TypeError(f"{name} must have the cache's {self.k_sel.dtype}, got {x.dtype}")

    def _grow(self, need: int) -> None:
        self.max_len = max(need, 2 * self.max_len)
        old = (self.k_cmp, self.v_cmp, self.k_sel, self.v_sel)
        self.k_cmp, self.v_cmp = self._buffers(
            num_compressed(self.max_len, self.config.l, self.config.d)
        )
        self.k_sel, self.v_sel = self._buffers(self.max_len)
        for was, now in zip(old, (self.k_cmp, self.v_cmp, self.k_sel, self.v_sel), strict=True):
            now[:, : was.shape[1]] = was

    # ---- counting ---------------------------------------------------------------------------

    def record_reads(self, block_indices: Tensor) -> None:
        """Count what the last T queries read, from the blocks they really used ([B, T, G, n]).

        Counts are per KV group; groups and sequences must agree, since every query of a length
        selects the same number of tokens.
        """
        c, T = self.config, block_indices.shape[1]
        t = torch.arange(self.length - T, self.length, device=block_indices.device)
        ranges = select.blocks_to_ranges(block_indices, c.l_sel, t)
        positions = range(self.length - T, self.length)
        cmp = sum(min(self.emitted, visible_compressed(p, c.l, c.d)) for p in positions)
        win = sum(min(c.w, p + 1) for p in positions)
        self._counted.append((cmp, select.range_lengths(ranges).sum(1), win))

    def reads(self) -> list[Reads]:
        """What each counted call read, in order. Synchronises the device."""
        result = []
        for cmp, sel, win in self._counted:
            low, high = int(sel.min()), int(sel.max())
            if low != high:
                raise AssertionError(f"groups read between {low} and {high} selected keys")
            result.append(Reads(cmp, high, win))
        return result

    def reset_reads(self) -> None:
        """Forget counted reads."""
        self._counted.clear()
