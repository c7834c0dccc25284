"""NSACache: what decoding keeps of one layer, in static buffers.

Three caches with their own keys and values: compressed tokens and a ring of the raw ones that the
next are made of; every token for selection; a ring of the last tokens for the window. A step of at
most max_step tokens finds its rows from lengths on the device, so one captured CUDA graph appends
at every length.

    >>> from nsa import NSAAttention
    >>> layer = NSAAttention(NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, window=16))
    >>> caches = [layer.make_cache(batch=1, max_len=64) for _ in range(2)]
    >>> filled = [layer.prefill(torch.randn(1, n, 32), c) for n, c in zip((40, 9), caches)]
    >>> both = NSACache.stack(caches)  # one batch of different lengths
    >>> drafted = layer.step(torch.randn(2, 4, 32), both)
    >>> both.rewind(3)  # of the four drafted tokens one was right
    >>> both.lengths
    [41, 10]
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import fp8, select
from nsa.arguments import check_beside, check_device, check_tensor
from nsa.blocks import num_compressed, visible_compressed
from nsa.cache_rows import CacheRows
from nsa.checks import needs_grad
from nsa.compress import made_by
from nsa.config import NSAConfig, check_int
from nsa.fp8 import KVCacheDtype
from nsa.transforms import refuse_tokens


@dataclass(frozen=True)
class BranchKV:
    """Keys and values of the three branches, new ones each [B, T, G, Dk] or [B, T, G, Dv]."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


@dataclass(frozen=True)
class Reads:
    """Keys read per KV group, summed over the counted queries.

    sel: tokens of the blocks that were used. cmp, win: rows of the views that were handed over; of
    the fused step, whose kernels read the cache in place, what the lengths on the device allow.
    """

    cmp: int
    sel: int
    win: int

    @property
    def total(self) -> int:
        return self.cmp + self.sel + self.win


_RINGS = ("k_win", "v_win", "k_raw", "v_raw")
_BUFFERS = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw")


class Mark(NamedTuple):
    """What a cache was before tokens were appended to it, see NSACache.mark()."""

    lengths: list[int]
    highest: list[int]
    counted: int
    rings: dict[str, Tensor]


class NSACache(CacheRows):
    """Keys and values of `batch` sequences, at most max_len tokens each.

    k_cmp, v_cmp [B, Nc_max, G, D]; k_sel, v_sel [B, max_len, G, D]; k_win, v_win a ring
    [B, w + max_step - 1, G, D] where position p lives in row p % rows; lens int32 [B] on the
    device holds the lengths, lengths: list[int] what the host knows of them; highest: list[int]
    the greatest length that each sequence was written up to. Sequences grow together; stack() makes
    a cache of sequences of different lengths. growable: a longer sequence doubles the buffers
    (which moves them, so not inside a CUDA graph) instead of raising ValueError. count_reads keeps
    what each step read. Steps over one cache have to go one after another, on one stream or on
    streams that wait for each other.

    dtype is that of queries, and of keys and values as they come and go. kv_cache_dtype says what
    the buffers hold: "auto", the same, or "fp8_e4m3", for each number x one of torch.float8_e4m3fn
    that stands for x * descale (see nsa/fp8.py). k_descale, v_descale: a number, fp32 [G] or
    [B, G], by default 1; new tokens are stored as the nearest x / descale, at most 448 large.
    """

    block_table, ring = None, True  # not in pages, as nsa/kvcache.py says it
    parallel = False  # all tokens are here; nsa/parallel_cache.py has an attend() of its own
    attend: Callable[..., tuple[Tensor, Tensor]]

    @torch.inference_mode(False)  # one that is made in it may be filled outside
    def __init__(
        self, config: NSAConfig, batch: int, max_len: int, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        max_step: int = 8, growable: bool = False, count_reads: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto", k_descale: float | Tensor | None = None,
        v_descale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(config, NSAConfig):
            raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
        for name, value in (("batch", batch), ("max_len", max_len), ("max_step", max_step)):
            check_int(name, value, 1)
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise TypeError(f"dtype must be a floating type, got {dtype!r}")
        if dtype is not None and dtype.itemsize == 1:
            raise TypeError(f"dtype must be that of queries, got {dtype}; see kv_cache_dtype")
        self.config, self.batch, self.max_len, self.max_step = config, batch, max_len, max_step
        self.sizes = config.sizes()
        self.growable, self.count_reads = growable, count_reads
        self.lengths = [0] * batch
        # Rows of the rings hold the positions below this, of which rewind() can go back to some.
        self.highest = [0] * batch
        # A captured step must emit for every length that it will be replayed at, see append.
        self.emit_always = False
        self.dtype, self.kv_cache_dtype = dtype or torch.get_default_dtype(), kv_cache_dtype
        quantized = fp8.is_fp8(kv_cache_dtype)
        stored = fp8.E4M3 if quantized else self.dtype
        self.lens = torch.zeros(batch, dtype=torch.int32, device=device)
        device = self.lens.device  # also of what is made later, when another may be the default
        self._like: dict[str, Any] = {"device": device, "dtype": stored}
        self.k_descale = self.v_descale = None
        if quantized:
            self.k_descale = fp8.descale_of("k_descale", k_descale, batch, config.groups, device)
            self.v_descale = fp8.descale_of("v_descale", v_descale, batch, config.groups, device)
        elif k_descale is not None or v_descale is not None:
            raise ValueError(
                f"k_descale and v_descale go with kv_cache_dtype='fp8_e4m3', got {kv_cache_dtype!r}"
            )
        self.k_cmp, self.v_cmp = self._buffers(self._rows_of("cmp", max_len))
        self.k_sel, self.v_sel = self._buffers(self._rows_of("sel", max_len))
        self.k_win, self.v_win = self._buffers(config.window + max_step - 1)
        self.k_raw, self.v_raw = self._buffers(config.l + max_step - 1)
        # At which the programs of one launch meet, a line of memory for each group.
        self.counters = torch.zeros(batch, config.groups, 32, dtype=torch.int32, device=device)
        self._steps = torch.arange(max_step, device=device)
        self._batch = torch.arange(batch, device=device)[:, None]
        half = torch.arange(config.d_k // 2, device=device, dtype=torch.float64) * 2 / config.d_k
        self.frequencies = config.rope_base**-half  # rotary, fp64 [Dk / 2]
        self.no_turn = torch.zeros_like(half)  # in their place, for keys that are turned already
        self._counted: list[tuple[Tensor, Tensor, Tensor]] = []
        # (backend, flags) -> does append_projected take the kernel; see attention.py.
        self.fused_append: dict[tuple[Any, Any], bool] = {}
        # (backend, flags) with which the fused step served this cache; see attention.py.
        self.fused_step: set[tuple[Any, Any]] = set()

    @torch.inference_mode(False)
    def _buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        c = self.config
        return (
            torch.zeros(self.batch, rows, c.groups, c.d_k, **self._like),
            torch.zeros(self.batch, rows, c.groups, c.d_v, **self._like),
        )

    def _rows_of(self, kind: str, max_len: int) -> int:
        """Rows of k_cmp ("cmp") or k_sel ("sel") for max_len tokens."""
        return max_len if kind == "sel" else num_compressed(max_len, self.config.l, self.config.d)

    def _places(self, kind: str, index: Tensor) -> Tensor:
        """Rows of k_cmp or k_sel where tokens `index`, compressed or not, are kept."""
        return index

    def _store(self, name: str, first: int, x: Tensor) -> None:
        """x [B, n, G, D] into the rows of tokens first to first + n of a cache."""
        getattr(self, name)[:, first : first + x.shape[1]] = self._stored(name, x)

    def _empty(self, batch: int, max_len: int) -> NSACache:
        """A cache of this kind that holds nothing."""
        return type(self)(
            self.config, batch, max_len, max_step=self.max_step, growable=self.growable,
            count_reads=self.count_reads, dtype=self.dtype, device=self._like["device"],
            kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip

    @classmethod
    def stack(cls, caches: Sequence[NSACache], max_len: int | None = None) -> NSACache:
        """One batch out of caches of one layer, each filled to a length of its own.

        max_len: capacity of the new cache, at least every length; default the largest capacity.
        growable and count_reads are theirs, counted reads stay with them. Raises ValueError when
        they disagree, and for sequences of different lengths with count_reads; TypeError for what
        is no NSACache.
        """
        if not caches:
            raise ValueError("caches must hold at least one NSACache, got none")
        for c in caches:
            if not isinstance(c, NSACache):
                raise TypeError(f"caches must be NSACaches, got {type(c).__name__}")
        first = caches[0]
        longest = max(c.length for c in caches)
        alike = "config", "max_step", "dtype", "kv_cache_dtype", "device", "growable", "count_reads"
        for name in alike:
            for c in caches:
                if getattr(c, name) != getattr(first, name):
                    raise ValueError(
                        f"caches must agree in {name}, got {getattr(first, name)} and "
                        f"{getattr(c, name)}"
                    )
        check_int("max_len", max_len, 1, optional=True)
        max_len = max(c.max_len for c in caches) if max_len is None else max_len
        if max_len < longest:
            raise ValueError(f"max_len must be at least the longest {longest}, got {max_len}")
        result = first._empty(sum(c.batch for c in caches), max_len)
        for name in result._descales():
            setattr(result, name, torch.cat([getattr(c, name) for c in caches]))
        result.lengths = [n for c in caches for n in c.lengths]
        result.highest = [n for c in caches for n in c.highest]
        if result.count_reads:
            result._same_length("count_reads")
        at = 0
        for c in caches:
            for name in _BUFFERS:
                was = getattr(c, name)
                rows = min(was.shape[1], getattr(result, name).shape[1])
                getattr(result, name)[at : at + c.batch, :rows] = was[:, :rows]
            result.lens[at : at + c.batch] = c.lens
            at += c.batch
        return result

    def row(self, b: int) -> NSACache:
        """Sequence b alone, to read: a cache of batch 1 whose buffers are views of this one's.

        Appended to, it would write into this cache, whose lengths do not follow. stack([c.row(b)])
        makes a cache of its own.
        """
        check_int("b", b, 0)
        if b >= self.batch:
            raise ValueError(f"b must be below the batch {self.batch}, got {b}")
        one = self._sequences([b], lambda x: x[b : b + 1])
        one.growable = one.count_reads = False
        one.counters, one._batch = self.counters[b : b + 1], self._batch[:1]
        return one

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> NSACache:
        """Sequences `rows`, int32 or int64 [n], in this order as a cache of their own; some may
        repeat. Counted reads stay here. Raises ValueError or TypeError that names the argument.
        """
        check_tensor("rows", rows)
        if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rows must be integers [n], got {rows.dtype} {list(rows.shape)}")
        check_device("rows", rows, self.device, "the cache's")
        which = rows.tolist()
        if not which or not all(0 <= b < self.batch for b in which):
            raise ValueError(f"rows must name sequences 0 to {self.batch - 1}, got {which}")
        one = self._sequences(which, lambda x: x.index_select(0, rows))
        one.counters = self.counters.new_zeros(one.batch, *self.counters.shape[1:])
        one._batch = torch.arange(one.batch, device=self.device)[:, None]
        one.fused_append, one.fused_step = {}, set()
        return one

    def _sequences(self, which: list[int], take: Callable[[Tensor], Tensor]) -> NSACache:
        """Sequences `which`, that take() takes out of each buffer, without counted reads."""
        one = copy.copy(self)
        one.batch, one._counted = len(which), []
        one.lengths = [self.lengths[b] for b in which]
        one.highest = [self.highest[b] for b in which]
        for name in (*_BUFFERS, *self._descales(), "lens"):
            setattr(one, name, take(getattr(self, name)))
        return one

    def agree(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Raise what describe() raises, which checks a step's arguments and tells their sizes."""
        describe()

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:  # an empty cache is one all the same: `cache or make_cache()`
        return True

    def __repr__(self) -> str:
        return (
            f"NSACache(lengths={self.lengths}, max_len={self.max_len}, max_step={self.max_step}, "
            f"{self.dtype}, {self.device}"
            + (f", kv_cache_dtype={self.kv_cache_dtype!r})" if self.k_descale is not None else ")")
        )

    def _descales(self) -> tuple[str, ...]:
        return ("k_descale", "v_descale") if self.k_descale is not None else ()

    @property
    def device(self) -> torch.device:
        return self.k_sel.device

    def _same_length(self, what: str) -> None:
        if self.mixed:
            raise ValueError(f"{what} needs sequences of one length, got {self.lengths}")

    def _rows_at(self, name: str, positions: Tensor) -> Tensor:
        held, kind = getattr(self, name).shape[1], name[2:]
        if kind == "cmp":
            at = self._places(kind, positions.clamp(min=0)).clamp(max=held - 1)
        else:
            at = self._places(kind, positions) if kind == "sel" else positions % held
        return self._batch * held + at

    def _by_cache(self, new: BranchKV) -> dict[str, Tensor]:
        """New keys and values by the names of the caches that they go to."""
        return {name.replace("cmp", "raw"): x for name, x in vars(new).items()}

    def compressed(self) -> tuple[Tensor, Tensor]:
        """The compressed keys and values so far: [B, emitted, G, D]."""
        self._same_length("compressed()")
        return super().compressed()

    def selectable(self) -> tuple[Tensor, Tensor]:
        """All raw keys and values of the selection branch: [B, length, G, D]."""
        self._same_length("selectable()")
        return super().selectable()

    def window(self, T: int) -> tuple[Tensor, Tensor]:
        """What the T <= max_step newest queries slide over: their keys and the w - 1 before."""
        if T > self.max_step:
            raise ValueError(f"T must be at most max_step={self.max_step}, got {T}")
        self._same_length("window()")
        return super().window(T)

    def window_with(self, k_win: Tensor, v_win: Tensor) -> tuple[Tensor, Tensor]:
        """The last w - 1 cached tokens, then any number of new ones that are not appended yet."""
        k_win = self._read("k", self._stored("k", k_win))
        v_win = self._read("v", self._stored("v", v_win))
        if self.length == 0:
            return k_win, v_win
        self._same_length("window_with()")
        first = max(0, self.length - (self.config.window - 1))
        k_before, v_before = self._between("win", first, self.length)
        return torch.cat([k_before, k_win], dim=1), torch.cat([v_before, v_win], dim=1)

    def positions(self, T: int) -> Tensor:
        """Positions of the next T tokens: [B, T] by the device's lengths, [T] for T > max_step."""
        if T <= self.max_step:
            return self.lens[:, None] + self._steps[:T]
        self._same_length(f"a chunk of {T} tokens (more than max_step={self.max_step})")
        return torch.arange(self.length, self.length + T, device=self.lens.device)

    def angles(self, positions: Tensor) -> Tensor:
        """Rotary angles in fp64: [.., D/2]."""
        return positions[..., None] * self.frequencies

    @torch.no_grad()
    def append(
        self, new: BranchKV, phi_k: Callable[[Tensor], Tensor], phi_v: Callable[[Tensor], Tensor]
    ) -> None:
        """Add T tokens to the three caches; compressed tokens appear as their blocks fill.

        A compressed token is emitted at every length S with S >= l and (S - l) % d == 0, from the
        last l raw tokens. phi_k, phi_v: [B, n, G, D] -> [B, num_compressed(n), G, D].
        With T <= max_step rows come from `lens` alone, without waiting for the device; emit_always
        then computes the tokens that might be due even where this length has none.
        Raises ValueError when the tokens do not fit.
        """
        refuse_tokens()
        self._check(new)
        T = new.k_sel.shape[1]
        self._make_room(T)
        if T <= self.max_step:
            self._write(self._by_cache(new), self.positions(T))
            if due := self._due(T):
                self._emit(self.lens.long()[:, None] + T, T, due, (phi_k, phi_v))
        else:
            self._append_chunk(self._by_cache(new), phi_k, phi_v)
        self.lens += T
        self.lengths = [n + T for n in self.lengths]

    @torch.no_grad()
    def fill(self, new: BranchKV, k_cmp: Tensor, v_cmp: Tensor, lengths: Sequence[int]) -> None:
        """Take up the first tokens of every sequence, and the compressed ones that they made.

        new: [B, N, G, D], of which sequence b has the first lengths[b] rows; k_cmp, v_cmp
        [B, Nc, G, D]. What stands in later rows does not matter. Raises ValueError or TypeError
        that names the argument, ValueError also when the cache holds tokens, and where tokens do
        not fit.
        """
        refuse_tokens()
        if self.length:
            raise ValueError(f"cache must be empty to be filled, it holds {self.length} tokens")
        self._check(new)
        c, N = self.config, new.k_sel.shape[1]
        if len(lengths) != self.batch or not all(n in range(N + 1) for n in lengths):
            raise ValueError(
                f"lengths must be {self.batch} numbers from 0 to {N}, got {list(lengths)}"
            )
        least, most = (num_compressed(n, c.l, c.d) for n in (max(lengths), N))
        for name, x, D in (("k_cmp", k_cmp, c.d_k), ("v_cmp", v_cmp, c.d_v)):
            check_tensor(name, x)
            Nc = min(max(least, x.shape[1]), most) if x.ndim == 4 else least
            check_beside(name, x, self.lens, (self.batch, Nc, c.groups, D), "the cache's")
        self._make_room(N)
        named = self._by_cache(new)
        whole = dict(k_sel=new.k_sel, v_sel=new.v_sel, k_cmp=k_cmp, v_cmp=v_cmp)
        for name, x in whole.items():
            self._store(name, 0, x)
        self.lengths = [int(n) for n in lengths]
        self.highest = list(self.lengths)
        self.lens.copy_(torch.tensor(self.lengths, dtype=torch.int32, device=self.device))
        for name in _RINGS:
            ring, x = getattr(self, name), self._stored(name, named[name])
            rows = ring.shape[1]
            row = torch.arange(rows, device=ring.device)
            last = (self.lens[:, None] - 1 - row).clamp(min=0) // rows * rows + row  # that is there
            ring.copy_(x[self._batch, last.clamp(max=N - 1)])

    def append_projected(
        self, qkv: Tensor, phi_k: Callable[[Tensor], Tensor], phi_v: Callable[[Tensor], Tensor],
        gate: tuple[Tensor, Tensor, Tensor] | None = None, turn: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """append() of T <= max_step tokens, the rotary turn and the gates by Triton kernels.

        qkv [B, T, HQ * Dk + 3 * G * Dk + 3 * G * Dv] as projected, of the cache's dtype and
        device: queries, then keys and values by branch (cmp, sel, win). gate: the gates' hidden
        layer [B, T, width] before silu, and weight [3 * HQ, width] and bias [3 * HQ] of the last.
        turn: False where queries and keys are turned already.
        Returns the turned queries [B, T, HQ, Dk] and the gates [B, T, HQ, 3], None without `gate`.
        Raises ValueError or TypeError that names the argument, also where a gradient of it is
        needed; nothing is appended then.
        """
        from nsa.kernels.decode.append import append_turned

        c, T = self.config, qkv.shape[1] if qkv.ndim == 3 else 0
        if not 1 <= T <= self.max_step:
            raise ValueError(
                f"qkv must be [B, T, {sum(c.qkv_widths)}] with T from 1 to max_step="
                f"{self.max_step}, got {list(qkv.shape)}"
            )
        self._check_new(qkv=(qkv, (self.batch, T, sum(c.qkv_widths))))
        if gate is not None:
            hidden, weight, bias = gate
            width, n, device = hidden.shape[-1], 3 * c.heads, qkv.device
            if (
                hidden.shape != (self.batch, T, width) or weight.shape != (n, width)
                or bias.shape != (n,)
            ):  # fmt: skip
                raise ValueError(
                    f"gate must be hidden [{self.batch}, {T}, width], weight [{n}, width] and "
                    f"bias [{n}], got {', '.join(str(list(x.shape)) for x in gate)}"
                )
            if hidden.device != device or weight.device != device or bias.device != device:
                raise ValueError(f"gate must be on qkv's {device}")
        for name, given in (("qkv", (qkv,)), ("gate", gate or ())):
            if needs_grad(*given):
                raise ValueError(f"{name} must need no gradient, of which the kernels keep nothing")
        self._make_room(T)
        turned, gates = append_turned(qkv, self, gate, turn)
        try:
            if due := self._due(T):
                from nsa.kernels.decode import emit

                emit.emit(self, due, T, phi_k, phi_v)
        except BaseException:  # an interrupt too
            self.lens -= T
            raise
        self.lengths = [n + T for n in self.lengths]
        return turned, gates

    def _make_room(self, T: int) -> None:
        if self.growable and self.length + T > self.max_len:
            self._grow(self.length + T)
        self._check_room(T)
        self.mark_written(T)

    def _check_room(self, T: int) -> None:
        if self.length + T > self.max_len:
            raise ValueError(f"cache holds max_len={self.max_len} tokens, got {self.length} + {T}")

    def mark_written(self, T: int) -> None:
        """Rows of T tokens after the lengths are overwritten, whether or not the lengths follow."""
        self.highest = list(map(max, self.highest, [n + T for n in self.lengths]))

    def _due(self, T: int) -> int:
        """How many compressed tokens T new ones complete, at most over the sequences."""
        c = self.config
        if not self.k_cmp.shape[1]:
            return 0
        if self.emit_always:
            return (T - 1) // c.d + 1
        return max(
            num_compressed(n + T, c.l, c.d) - num_compressed(n, c.l, c.d) for n in set(self.lengths)
        )

    def _append_chunk(self, new: dict[str, Tensor], phi_k: Callable, phi_v: Callable) -> None:
        self._same_length("append() of more than max_step tokens")
        start, done = self.length, self.emitted
        end = start + new["k_sel"].shape[1]
        waiting = self._between("raw", done * self.config.d, start)
        for kind, raw, phi in zip("kv", waiting, (phi_k, phi_v), strict=True):
            self._store(f"{kind}_sel", start, new[f"{kind}_sel"])
            held = self._stored(kind, new[f"{kind}_raw"])
            raw = torch.cat([raw, self._read(kind, held)], dim=1)
            if n := num_compressed(raw.shape[1], self.config.l, self.config.d):
                self._store(f"{kind}_cmp", done, made_by(f"phi_{kind}", phi, raw, n))
        for name in _RINGS:
            ring, x = getattr(self, name), self._stored(name, new[name])
            keep = min(x.shape[1], ring.shape[1])
            rows = torch.arange(end - keep, end, device=self.lens.device) % ring.shape[1]
            ring[:, rows] = x[:, x.shape[1] - keep :]

    def rewind(self, n: int | Sequence[int]) -> None:
        """Forget the n newest tokens of every sequence, as when drafted tokens are refused.

        n: a number for all sequences, or one for each. The rings go back to max_step tokens below
        the greatest length ever written, earlier rewinds and the trial steps of a StepGraph
        included. Raises ValueError beyond, and for different n with count_reads.
        """
        same = not isinstance(n, Sequence)
        each: list[int] = list(n) if isinstance(n, Sequence) else [n] * self.batch
        if len(each) != self.batch:
            raise ValueError(f"n must be an int or {self.batch} of them, got {n!r}")
        written = map(max, self.highest, self.lengths)
        most = [
            length - max(0, h - self.max_step)
            for length, h in zip(self.lengths, written, strict=True)
        ]
        if same:
            most = [min(most)] * self.batch
        for b, (one, limit) in enumerate(zip(each, most, strict=True)):
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= limit:
                which = "n" if same else f"n[{b}]"
                held = min(self.lengths) if same else self.lengths[b]
                why = f"the cache holds {held} tokens"
                if limit < held:
                    why += f", and its rings go back by max_step={self.max_step} (see make_cache)"
                raise ValueError(f"{which} must be an int from 0 to {limit}, got {one!r}: {why}")
        if self.count_reads and len(set(each)) > 1:
            raise ValueError(f"n must be the same for all sequences with count_reads, got {n!r}")
        if len(set(each)) == 1:
            self.lens -= each[0]
        else:
            self.lens -= torch.tensor(each, dtype=torch.int32, device=self.device)
        self.lengths = [length - one for length, one in zip(self.lengths, each, strict=True)]

    def reset(self) -> None:
        """Forget all tokens, for new sequences in the same buffers: a StepGraph stays right."""
        self.lens.zero_()
        self.lengths = [0] * self.batch
        self.highest = [0] * self.batch
        self._counted.clear()

    def mark(self, T: int) -> Mark:
        """What restore() needs to undo an append of T tokens."""
        kept = _RINGS if T > self.max_step and self.length else ()
        rings = {name: getattr(self, name).clone() for name in kept}
        return Mark(self.lengths, self.highest, len(self._counted), rings)

    @contextlib.contextmanager
    def kept_if_raised(self, x: Tensor) -> Iterator[None]:
        """Undo an append of x [B, T, ..] where what is inside raises."""
        before = self.mark(x.shape[1] if x.ndim > 1 else 0)
        try:
            yield
        except BaseException:  # an interrupt too
            self.restore(before)
            raise

    def restore(self, mark: Mark) -> None:
        """Back to a mark() after T tokens were appended, or none, and nothing else was done."""
        if self.lengths != mark.lengths:
            self.lens -= self.lengths[0] - mark.lengths[0]
            self.lengths = mark.lengths
        for name, was in mark.rings.items():
            getattr(self, name).copy_(was)
        if mark.rings or not any(mark.lengths):  # else rows below are overwritten for good
            self.highest = mark.highest
        del self._counted[mark.counted :]

    def _check(self, new: BranchKV) -> None:
        c, T = self.config, new.k_sel.shape[1]
        self._check_new(
            **{
                name: (x, (self.batch, T, c.groups, c.d_k if name[0] == "k" else c.d_v))
                for name, x in vars(new).items()
            }
        )

    def _check_new(self, **named: tuple[Tensor, tuple[int, ...]]) -> None:
        """Raise unless each tensor has its shape and the cache's dtype and device."""
        for name, (x, expected) in named.items():
            if x.shape != expected:
                raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")
            if x.dtype != self.dtype:
                raise TypeError(f"{name} must have the cache's {self.dtype}, got {x.dtype}")
            if x.device != self.device:
                raise ValueError(f"{name} must be on the cache's {self.device}, got {x.device}")

    def _grow(self, need: int) -> None:
        max_len = max(need, 2 * self.max_len)
        # All memory first: where there is too little, the cache is as it was.
        grown = {kind: self._buffers(self._rows_of(kind, max_len)) for kind in ("cmp", "sel")}
        for kind, (k, v) in grown.items():
            for name, now in ((f"k_{kind}", k), (f"v_{kind}", v)):
                was = getattr(self, name)
                now[:, : was.shape[1]] = was
                setattr(self, name, now)
        self.max_len = max_len

    def record_reads(
        self, block_indices: Tensor, n_cmp: int | None = None, n_win: int | None = None
    ) -> None:
        """Count what the last T queries read: keys per KV group and query, summed over the T.

        block_indices [B, T, G, n]: the blocks that they really used. n_cmp, n_win: keys of the
        compressed and window views that were handed over, of which an earlier query sees fewer.
        None: the fused step, whose kernels take both bounds from the lengths on the device, as is
        done here. Groups and sequences must agree, since every query of a length selects the same
        number of tokens.
        """
        c, T = self.config, block_indices.shape[1]
        self._same_length("counting reads")
        n = self.lens.long()[:, None]
        i = torch.arange(T, device=n.device)
        t = n - T + i  # [B, T]
        sel = select.range_lengths(select.blocks_to_ranges(block_indices, c.l_sel, t)).sum(1)
        seen = visible_compressed(t, c.l, c.d)
        last = seen[:, -1:].clamp(max=self.k_cmp.shape[1]) if n_cmp is None else n_cmp
        cmp = (last - (seen[:, -1:] - seen)).clamp(min=0).sum(1)
        rows = n.clamp(max=min(c.window - 1 + T, self.k_win.shape[1])) if n_win is None else n_win
        first = torch.zeros_like(n) + rows - (T - 1)  # of the earliest query
        win = torch.minimum(first + i, first.clamp(min=c.window)).sum(1)
        self._counted.append((cmp, sel, win))

    def reads(self) -> list[Reads]:
        """What each counted call read, in order. Synchronises the device."""
        result = []
        for counts in self._counted:
            for name, x in zip(("compressed", "selected", "window"), counts, strict=True):
                low, high = int(x.min()), int(x.max())
                if low != high:
                    raise AssertionError(f"groups read between {low} and {high} {name} keys")
            result.append(Reads(*(int(x.max()) for x in counts)))
        return result

    def reset_reads(self) -> None:
        """Forget counted reads."""
        self._counted.clear()
