"""nsa_with_kvcache: append new keys and values to the caller's own caches, and attend from them.

The caches are plain tensors, static or in pages, and their lengths a tensor on the device, as
serving engines keep them. Of a layer that keeps its own there is NSACache (nsa/cache.py); both run
on the same routes.

    >>> from nsa import nsa_with_kvcache
    >>> from nsa.compress import mean_pool
    >>> phi = lambda x: mean_pool(x, 8, 4)
    >>> page, G, D = 16, 2, 8
    >>> pages = lambda rows: torch.empty(10, rows, G, D)
    >>> caches = [pages(page // 4), pages(page // 4), *(pages(page) for _ in range(4))]
    >>> raw = dict(k_raw_cache=pages(page), v_raw_cache=pages(page), phi_k=phi, phi_v=phi)
    >>> block_table = torch.tensor([[7, 2, 5], [0, 9, 1]], dtype=torch.int32)
    >>> cache_seqlens = torch.zeros(2, dtype=torch.int32)
    >>> names = ("k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw")
    >>> for T in (30, 1, 1):  # a prompt, then token by token
    ...     q, gates = torch.randn(2, T, 4, D), torch.rand(2, T, 4, 3)
    ...     new = {name: torch.randn(2, T, G, D) for name in names}
    ...     out = nsa_with_kvcache(
    ...         q, *caches, gates, cache_seqlens=cache_seqlens, block_table=block_table, **new,
    ...         **raw, l=8, d=4, l_sel=16, n_sel=3, window=12,
    ...     )
    ...     cache_seqlens += T
    >>> list(out.shape), cache_seqlens.tolist()
    ([2, 1, 4, 8], [32, 32])
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, fp8
from nsa.arguments import check_beside, check_device, check_dtype, check_float, check_tensor
from nsa.attention import run_step, step_args
from nsa.blocks import num_compressed
from nsa.cache import BranchKV
from nsa.cache_rows import CacheRows
from nsa.checks import MOST_STEP_ROWS, scale_of
from nsa.config import MOST_INT, NSAConfig, check_int, check_sizes
from nsa.dispatch import Backend, Branch, Route
from nsa.flags import Flags
from nsa.rotary import turn_by
from nsa.transforms import refuse_tokens
from nsa.untraced import untraced


def _read(name: str, x: Tensor) -> list:
    """The values of x, for which a GPU is waited for."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} would have to be read inside a CUDA graph: there only the fused decode step "
            "serves, with checked=False"
        )
    return x.tolist()


@dataclass(frozen=True)
class KVCaches(CacheRows, BranchKV):
    """Caches of one call, their lengths with the new tokens, and where their rows lie."""

    lens: Tensor
    block_table: Tensor | None
    ring: bool
    sizes: dict[str, int]
    dtype: torch.dtype
    k_raw: Tensor | None = None
    v_raw: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    counters = None
    count_reads = False

    @property
    def max_len(self) -> int:  # type: ignore[override]
        """Tokens that a sequence has rows for."""
        if self.block_table is None:
            return self.k_sel.shape[1]
        return self.block_table.shape[1] * self.k_sel.shape[1]

    @functools.cached_property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """The lengths on the host."""
        return _read("cache_seqlens", self.lens)

    @property
    def batch(self) -> int:  # type: ignore[override]
        return len(self.lens)

    def row(self, b: int) -> KVCaches:
        """Sequence b alone, to read."""
        names = ["lens"] if self.k_descale is None else ["lens", "k_descale", "v_descale"]
        if self.block_table is None:
            names += "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"
        else:
            names += ("block_table", "k_win", "v_win") if self.ring else ("block_table",)
        return replace(self, **{name: getattr(self, name)[b : b + 1] for name in names})

    def _rows_at(self, name: str, positions: Tensor) -> Tensor:
        held, kind = getattr(self, name).shape[1], name[2:]
        ring = self.ring and kind in ("win", "raw")
        if kind == "cmp" and self.block_table is None:
            positions = positions.clamp(0, held - 1)
        elif kind == "cmp":  # in the page of the last token that it is made of
            positions = positions + self.sizes["l"] // self.sizes["d"] - 1
        if self.block_table is not None and not ring:
            return self.block_table.gather(1, positions // held).long() * held + positions % held
        batch = torch.arange(len(positions), device=positions.device)[:, None]
        return batch * held + (positions % held if ring else positions)


Given = dict[str, Any]  # arguments by their names


def _leading(name: str, x: Any) -> tuple[int, ...]:
    """Shape of a cache, [.., .., G, D]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(f"{name} must have 4 dimensions, got shape {list(x.shape)}")
    return tuple(x.shape)


def _check_of_sequences(name: str, x: Any, q: Tensor, *more: str) -> None:
    """Raise unless x holds integers [B, *more] on q's device."""
    check_dtype(name, x, "an int32 or int64 tensor", torch.int32, torch.int64)
    if x.ndim != 1 + len(more) or len(x) != len(q):
        wanted = ", ".join(["B", *more])
        raise ValueError(f"{name} must be [{wanted}] with q's B={len(q)}, got {list(x.shape)}")
    check_device(name, x, q.device)


def _lens_of(cache_seqlens: int | Tensor, q: Tensor, read: bool) -> Tensor:
    """cache_seqlens as int32 [B] on q's device; raises unless it is that, or one number. read:
    look at the numbers, too."""
    if isinstance(cache_seqlens, Tensor):
        _check_of_sequences("cache_seqlens", cache_seqlens, q)
        if read and cache_seqlens.dtype == torch.int64 and cache_seqlens.numel():
            least, most = (int(x) for x in cache_seqlens.aminmax())
            if not -MOST_INT <= least <= most <= MOST_INT:
                raise ValueError(f"cache_seqlens must be int32 numbers, got {least} to {most}")
        return cache_seqlens.int()
    check_int("cache_seqlens", cache_seqlens, 0)
    return torch.full((len(q),), cache_seqlens, dtype=torch.int32, device=q.device)


def _descales(k_descale: Any, v_descale: Any, cache: Tensor, batch: int) -> dict[str, Tensor]:
    """The descales of FP8 caches such as `cache`, by name; ValueError where others have some."""
    if cache.dtype == fp8.E4M3:
        given = dict(k_descale=k_descale, v_descale=v_descale)
        rest = batch, cache.shape[2], cache.device
        return {name: fp8.descale_of(name, x, *rest) for name, x in given.items()}
    if k_descale is not None or v_descale is not None:
        raise ValueError(f"k_descale and v_descale go with caches of {fp8.E4M3}, got {cache.dtype}")
    return {}


def _check_caches(q: Tensor, caches: Given, paged: bool, ring: bool, sizes: Given) -> None:
    """Raise TypeError or ValueError that names the cache unless shapes agree."""
    B, T, HQ, Dk = q.shape
    l, d, window = sizes["l"], sizes["d"], sizes["window"]
    shapes = {name: _leading(name, x) for name, x in caches.items()}
    rows, capacity, G, _ = shapes["k_sel_cache"]
    Dv = shapes["v_sel_cache"][3]
    if G == 0 or HQ % G:
        raise ValueError(f"q must have a multiple of k_sel_cache's G={G} heads, got HQ={HQ}")
    if not paged:
        rows = B
    elif capacity == 0 or capacity % d:
        raise ValueError(
            f"k_sel_cache must have pages of a multiple of d={d} tokens, got {capacity}"
        )
    dtype, owner = q.dtype, "q's"
    if caches["k_sel_cache"].dtype == fp8.E4M3:
        dtype, owner = fp8.E4M3, "k_sel_cache's"
    recent = {"win": window - 1, "raw": l - 1}  # what a ring holds besides the T new tokens
    for name in caches if paged and ring else ():
        of = f"{name[0]}_sel_cache"
        if name[2:5] in recent and caches[name] is caches[of]:
            raise ValueError(f"{name} must be a ring of its own, got {of}, which is in pages")
    for name, (_, have, _, _) in shapes.items():
        kind, lead = name[2:5], (rows, capacity)
        if kind == "cmp" and paged:
            lead = rows, capacity // d
        elif kind == "cmp":
            lead, least = (B, have), num_compressed(capacity, l, d)
            if have < least or have != shapes["k_cmp_cache"][1]:
                raise ValueError(
                    f"{name} must hold the {least} compressed tokens of {capacity}, as many as "
                    f"k_cmp_cache, got {have}"
                )
        elif ring and kind in recent:
            lead, least = (B, have), T + recent[kind]
            if have < least:
                raise ValueError(
                    f"{name} must be a ring of at least {least} rows for T={T}, got {have}"
                )
        x, shape = caches[name], (*lead, G, Dk if name[0] == "k" else Dv)
        if x.dtype != dtype:
            raise TypeError(f"{name} must have {owner} dtype {dtype}, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def _check_values(
    caches: KVCaches, T: int, appending: bool, n_cmp: int | None, alone: bool
) -> None:
    """Raise ValueError where lengths do not fit the caches, or pages do not exist; `alone` also
    where new tokens go to a page that is named elsewhere."""
    capacity, table = caches.max_len, caches.block_table
    what, numbers = f"{capacity} tokens", None
    if table is not None:
        page, pages = caches.k_sel.shape[1], caches.k_sel.shape[0]
        what += f", block_table's {table.shape[1]} pages of {page}"
        numbers = _read("block_table", table)
    named: dict[int, list[int]] = {}  # by page, the sequences whose tokens it has or gets
    written: list[tuple[int, int]] = []
    l, d = caches.sizes["l"], caches.sizes["d"]
    for b, after in enumerate(_read("cache_seqlens", caches.lens)):
        before = after - T
        if before < 0 or after > capacity:
            given = before if appending else after
            least, most = (0, capacity - T) if appending else (T, capacity)
            raise ValueError(
                f"cache_seqlens must be from {least} to {most} for T={T} tokens in caches of "
                f"{what}, got {given} of sequence {b}"
            )
        due = num_compressed(after, l, d) - num_compressed(before, l, d)
        if n_cmp is not None and due > n_cmp:
            raise ValueError(
                f"k_cmp must have the {due} compressed tokens that sequence {b} completes, got "
                f"{n_cmp}"
            )
        if numbers is None:
            continue
        used = numbers[b][: -(-after // page)]
        for i, number in enumerate(used):
            if not 0 <= number < pages:
                raise ValueError(
                    f"block_table must name pages from 0 to {pages - 1}, got {number} at [{b}, {i}]"
                )
            named.setdefault(number, []).append(b)
        written += [(number, b) for number in used[before // page :]]
    for number, b in written if alone and appending else ():
        if len(others := named[number]) > 1:
            other = next((x for x in others if x != b), b)
            raise ValueError(
                f"block_table must not name a page twice that new tokens go to, got {number} for "
                f"sequences {min(b, other)} and {max(b, other)}"
            )


def _check_rotary(cos: Any, sin: Any, q: Tensor, capacity: int) -> None:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin go together")
    if not isinstance(cos, Tensor) or cos.ndim != 2:
        raise ValueError("rotary_cos must be a tensor [positions, rotary_dim / 2]")
    if cos.shape[0] < capacity or not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise ValueError(
            f"rotary_cos must be [positions, rotary_dim / 2] with at least the caches' {capacity} "
            f"positions and rotary_dim up to Dk={q.shape[-1]}, got {list(cos.shape)}"
        )
    check_beside("rotary_cos", cos, q, tuple(cos.shape))
    check_beside("rotary_sin", sin, q, tuple(cos.shape), "rotary_cos's")


@torch.no_grad()
@untraced
def nsa_with_kvcache(
    q: Tensor,
    k_cmp_cache: Tensor,
    v_cmp_cache: Tensor,
    k_sel_cache: Tensor,
    v_sel_cache: Tensor,
    k_win_cache: Tensor,
    v_win_cache: Tensor,
    gates: Tensor,
    *,
    cache_seqlens: int | Tensor,
    k_sel: Tensor | None = None,
    v_sel: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_raw: Tensor | None = None,
    v_raw: Tensor | None = None,
    k_raw_cache: Tensor | None = None,
    v_raw_cache: Tensor | None = None,
    phi_k: Callable[[Tensor], Tensor] | None = None,
    phi_v: Callable[[Tensor], Tensor] | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    block_table: Tensor | None = None,
    ring: bool = False,
    l: int = 32,
    d: int = 16,
    l_sel: int = 64,
    n_sel: int = 16,
    n_init: int = 1,
    n_local: int = 2,
    window: int = 512,
    softmax_scale: float | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    checked: bool = False,
    backend: Backend | None = None,
    flags: Flags | None = None,
) -> Tensor:
    """Append T new tokens of every sequence to the caches, in place, and attend from them (Eq. 5).

    As flash_attn_with_kvcache for Native Sparse Attention: causal, without gradients, and T = 1
    (decoding), a few (speculation) or many (a chunk of a prompt). Returns out [B, T, HQ, Dv].

    q: [B, T, HQ, Dk]. gates: [B, T, HQ, 3] (cmp, sel, win), of any float dtype.
    Caches: contiguous tensors, of q's dtype or all of float8_e4m3fn, of compressed tokens (cmp), of
        all tokens for selection (sel) and for the window (win); k_* have Dk columns, v_* have Dv.
        - static: k_sel_cache [B, capacity, G, Dk], k_win_cache the same, k_cmp_cache
          [B, N, G, Dk] with N >= the compressed tokens of capacity;
        - with block_table int32 [B, blocks] of page numbers: pages k_sel_cache [P, page, G, Dk],
          k_win_cache the same, k_cmp_cache [P, page / d, G, Dk]. Position p of sequence b lies in
          page block_table[b, p // page]; a compressed token lies in the page of the last token it
          is made of (token i in row i + l / d - 1), so what a page holds depends on that page and
          those before it. Sequences with a common beginning may name the same whole pages.
        - ring: k_win_cache and k_raw_cache are rings [B, rows, G, D] in both cases, position p in
          row p % rows: window + T - 1 rows or more, of raw keys l + T - 1 or more; so many more as
          a sequence is to be rewound.
        Rows at and behind a length are never read, and a page number is only used below it.
        Branches that share keys and values may share a cache as well: give one tensor for several.
    cache_seqlens: int or int32 [B] on q's device: the tokens in the caches before this call where
        new ones are given, else the tokens with those of q. A smaller number than before rewinds.
    k_sel, v_sel, k_win, v_win: new keys and values [B, T, G, D], to positions cache_seqlens on.
        Without them the caches hold q's tokens already, compressed ones included. k_win and v_win
        may be left out where k_win_cache is k_sel_cache.
    Compressed tokens that become due are either given or made:
        - k_cmp, v_cmp [B, n, G, D]: from compressed token num_compressed(cache_seqlens[b]) on, n up
          to (T - 1) // d + 1; what a sequence does not complete is not looked at;
        - k_raw, v_raw [B, T, G, D] go to k_raw_cache, v_raw_cache (laid out as k_win_cache), from
          which phi_k, phi_v: [n, l, G, D] -> [n, 1, G, D] make them (nsa.compress). k_raw and v_raw
          may be left out where k_raw_cache is k_sel_cache.
    rotary_cos, rotary_sin: [positions, rotary_dim / 2], at least as many as the caches have: q and
        the new k_sel, k_win and k_raw are turned by their positions first; k_cmp is not.
        rotary_interleaved: pairs are columns 2i and 2i + 1, else i and i + rotary_dim / 2 (which is
        NSAAttention's).
    k_descale, v_descale: with FP8 caches, whose numbers x stand for x * descale (nsa/fp8.py): a
        number, fp32 [G] or [B, G] on q's device, by default 1. They are the same for all branches'
        caches and for all tokens. New keys and values come in q's dtype and are stored as the
        nearest x / descale, at most 448 large; phi_k and phi_v see what the caches stand for.
        Powers of two lose nothing where PyTorch or prefill's kernels serve, which read x * descale
        in q's dtype.
    checked: raise ValueError for lengths that do not fit, page numbers that do not exist and pages
        that two sequences write to; a GPU is waited for. On a CPU the first two always raise. On a
        GPU without it they are the caller's: such tokens are read and written elsewhere.
    backend, flags: as nsa_attention.

    On a GPU up to 128 / (HQ / G) tokens of fp16 or bf16 are one fused decode step that reads no
    value on the host, so that a CUDA graph of the call serves every length. More tokens, and sizes
    that step does not serve, take nsa_attention on rows that are gathered, for which lengths are
    read: RuntimeError inside a capture.

    Raises ValueError or TypeError that names the argument. Nothing is written before the checks.
    """
    refuse_tokens()
    if not isinstance(q, Tensor) or q.ndim != 4 or not q.shape[1] or not q.shape[0]:
        got = list(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q must be [B, T, HQ, Dk] with B and T of at least 1, got {got}")
    check_float("q", q, q)
    B, T, HQ, Dk = q.shape
    sizes = check_sizes(
        l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, window=window
    )
    scale = scale_of(softmax_scale, Dk)
    flags = dispatch.resolve_flags(flags, q)
    check_beside("gates", gates, q, (B, T, HQ, 3))
    if block_table is not None:
        _check_of_sequences("block_table", block_table, q, "blocks")
        block_table = block_table.contiguous()  # kernels take no strides
    appending = k_sel is not None
    phi = phi_k is not None or phi_v is not None
    held: dict[str, Any] = dict(k_cmp=k_cmp_cache, v_cmp=v_cmp_cache, k_sel=k_sel_cache)
    held |= dict(v_sel=v_sel_cache, k_win=k_win_cache, v_win=v_win_cache)
    new: dict[str, Any] = dict(k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win)
    if phi:
        held |= dict(k_raw=k_raw_cache, v_raw=v_raw_cache)
        new |= dict(k_raw=k_raw, v_raw=v_raw)
    else:
        alone = dict(k_raw=k_raw, v_raw=v_raw, k_raw_cache=k_raw_cache, v_raw_cache=v_raw_cache)
        for name, x in alone.items():
            if x is not None:
                raise ValueError(f"{name} goes with phi_k and phi_v, which are None")
    named = {f"{name}_cache": x for name, x in held.items()}
    _check_caches(q, named, block_table is not None, ring, sizes)
    lens = _lens_of(cache_seqlens, q, checked or not q.is_cuda)
    _check_new(new, held, q, dict(phi_k=phi_k, phi_v=phi_v), dict(k_cmp=k_cmp, v_cmp=v_cmp))
    caches = KVCaches(
        lens=lens + T if appending else lens, block_table=block_table, ring=ring, sizes=sizes,
        dtype=q.dtype, **_descales(k_descale, v_descale, k_sel_cache, B), **held,
    )  # fmt: skip
    if rotary_cos is not None or rotary_sin is not None:
        if not appending:
            raise ValueError("rotary_cos must be None without k_sel: the caches hold turned keys")
        _check_rotary(rotary_cos, rotary_sin, q, caches.max_len)
    if checked or not q.is_cuda:
        n_cmp = None if k_cmp is None or not appending else k_cmp.shape[1]
        _check_values(caches, T, appending, n_cmp, checked)
    if appending:
        if rotary_cos is not None and rotary_sin is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            positions = lens.long()[:, None] + torch.arange(T, device=q.device)
            cos, sin = (x[positions][:, :, None].to(wide) for x in (rotary_cos, rotary_sin))
            q = turn_by(q, cos, sin, rotary_interleaved)
            for name, x in new.items():
                if name[0] == "k" and x is not None:
                    new[name] = turn_by(x, cos, sin, rotary_interleaved)
        made: Any = (phi_k, phi_v) if phi else (k_cmp, v_cmp)
        if not k_cmp_cache.shape[1] or (k_cmp is not None and not k_cmp.shape[1]):
            made = None
        _append(dict(caches=caches, new=new, made=made), backend, flags)
    return _attend(q, caches, gates, scale, backend, flags)


def _append(args: dict[str, Any], backend: Backend | None, flags: Flags) -> None:
    """New tokens, and the compressed ones that they complete, into the caches."""
    caches, k, v = args["caches"], args["new"]["k_sel"], args["new"]["v_sel"]
    choice = dispatch.kernel_or_reference(backend)
    request = dispatch.make_request(Branch.APPEND, k, k, v, caches.max_len, flags, choice)
    calls = dispatch.calls(APPEND, args, flags)
    dispatch.guarded(request, calls, flags, choice, ("append", k, caches.k_sel))


def _append_triton(args: dict[str, Any], flags: Flags) -> None:
    from nsa.kernels.decode import emit, write
    from nsa.kernels.tiles import arch_of, check_e4m3

    caches, new, made = args["caches"], args["new"], args["made"]
    if caches.k_descale is not None:
        check_e4m3(arch_of(caches.lens.device))
    T = new["k_sel"].shape[1]
    names = "k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw"
    held, given = [getattr(caches, name) for name in names], [new.get(name) for name in names]
    write.write_new(caches.lens, given, held, caches.descales, caches.block_table, caches.ring)
    if made is None:
        return
    if isinstance(made[0], Tensor):
        k, v = made
        emit.emit_due(caches.lens, caches, k.flatten(0, 1), v.flatten(0, 1), k.shape[1], T)
    else:
        emit.emit(caches, (T - 1) // caches.sizes["d"] + 1, T, *made)


def _append_pytorch(args: dict[str, Any], flags: Flags) -> None:
    caches, new, made = args["caches"], args["new"], args["made"]
    T, after = new["k_sel"].shape[1], caches.lens.long()[:, None]
    here = after - T + torch.arange(T, device=after.device)
    caches._write({name: x for name, x in new.items() if x is not None}, here)
    if made is not None:
        caches._emit(after, T, (T - 1) // caches.sizes["d"] + 1, made)


APPEND: dispatch.Rungs = {Route.TRITON: _append_triton, Route.REFERENCE: _append_pytorch}


def _check_new(new: Given, held: Given, q: Tensor, phi: Given, cmp: Given) -> None:
    """Raise an error that names the argument unless all that goes together is given: new keys and
    values, and phi or what it would make; held: their caches."""
    if new["k_sel"] is None:
        for name, x in (new | cmp).items():
            if x is not None:
                raise ValueError(f"{name} goes with k_sel, which is None")
        return
    B, T = q.shape[:2]
    for name, x in new.items():
        selected = f"{name[0]}_sel"
        if x is not None:
            check_beside(name, x, q, (B, T, *held[name].shape[2:]), dtype=q.dtype)
            theirs = new[selected]
            if held[name] is held[selected] and theirs is not None and x is not theirs:
                raise ValueError(f"{name} must be {selected} or None: both have one cache")
        elif name == selected or held[name] is not held[selected]:
            raise ValueError(f"{name} must be given where k_sel is: its cache is another one")
    made, given = (any(x is not None for x in pair.values()) for pair in (phi, cmp))
    if made == given:
        raise ValueError("give either k_cmp and v_cmp or phi_k and phi_v beside k_sel")
    pairs = phi if made else cmp
    for name, x in pairs.items():
        if x is None:
            raise ValueError(f"{name} must be given too: {' and '.join(pairs)} go together")
        if made and not callable(x):
            raise TypeError(f"{name} must be a function, got {type(x).__name__}")
    for name, x in cmp.items() if given else ():
        n = _leading("k_cmp", cmp["k_cmp"])[1]
        check_beside(name, x, q, (B, n, *held[f"{name[0]}_sel"].shape[2:]), dtype=q.dtype)


def _attend(
    q: Tensor, caches: KVCaches, gates: Tensor, scale: float, backend: Backend | None, flags: Flags
) -> Tensor:
    """Attention of the T newest tokens, by the decode step where it serves so many."""
    many = q.shape[1] * (q.shape[2] // caches.k_sel.shape[2]) > MOST_STEP_ROWS
    args = step_args(q, caches, None, gates, scale, backend)
    return run_step(args, flags, many, caches.max_len)[0][0]


@torch.no_grad()
def reorder_kvcache(
    beam_idx: Tensor,
    *caches: Tensor,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_size: int | None = None,
) -> None:
    """Let sequence b go on from what sequence beam_idx[b] holds, in place; no host synchronisation.

    beam_idx: int64 [B]. caches: static ones and rings [B, rows, G, D], which are copied; or with
    block_table int [B, blocks], cache_seqlens [B] and page_size (tokens) all caches that are in
    pages [P, rows, G, D], rings then in a call of their own. Of pages only the numbers are copied,
    in block_table, and the page that is not full yet: to the page that sequence b had in its place.
    The sequence beam_idx[b] must be as long as b (the beams of one search are); pages that no row
    of block_table names any more are the caller's to use again. Raises ValueError or TypeError that
    names the argument.

    >>> block_table = torch.tensor([[0, 1, 2], [3, 4, 5]])
    >>> cache = torch.arange(6.0)[:, None, None, None].repeat(1, 4, 1, 1)  # pages of 4
    >>> lens = torch.tensor([6, 6])
    >>> pages = dict(block_table=block_table, cache_seqlens=lens, page_size=4)
    >>> reorder_kvcache(torch.tensor([0, 0]), cache, **pages)
    >>> block_table.tolist(), cache[4].flatten().tolist()  # page 4 is now a copy of page 1
    ([[0, 1, 2], [0, 4, 5]], [1.0, 1.0, 1.0, 1.0])
    """
    if not isinstance(beam_idx, Tensor) or beam_idx.dtype != torch.int64 or beam_idx.ndim != 1:
        raise TypeError("beam_idx must be an int64 tensor [B]")
    if len({x is None for x in (block_table, cache_seqlens, page_size)}) > 1:
        raise ValueError("block_table, cache_seqlens and page_size go together")
    B, on_host = len(beam_idx), not beam_idx.is_cuda  # nobody waits for values on a GPU
    if on_host and B and not 0 <= int(beam_idx.min()) <= int(beam_idx.max()) < B:
        raise ValueError(f"beam_idx must name sequences 0 to {B - 1}, got {beam_idx.tolist()}")
    for i, cache in enumerate(caches):
        check_tensor(f"caches[{i}]", cache)
        check_device(f"caches[{i}]", cache, beam_idx.device, "beam_idx's")
        if block_table is None and len(cache) != B:
            raise ValueError(f"caches[{i}] must have B={B} sequences, got {list(cache.shape)}")
    if not B:
        return
    # A tensor may be the cache of several branches.
    caches = tuple({(x.data_ptr(), x.shape, x.stride()): x for x in caches}.values())
    if block_table is None:
        for cache in caches:
            cache.copy_(cache.index_select(0, beam_idx))
        return
    _check_of_sequences("block_table", block_table, beam_idx, "blocks")
    _check_of_sequences("cache_seqlens", cache_seqlens, beam_idx)
    check_int("page_size", page_size, 1)
    assert cache_seqlens is not None and page_size is not None
    rows = [cache.shape[1] for cache in caches if cache.ndim > 1]
    if caches and (len(rows) < len(caches) or max(rows) != page_size):
        raise ValueError(
            f"page_size must be the tokens of a page, {page_size} of no cache of "
            f"{[list(cache.shape) for cache in caches]}"
        )
    lens, table = cache_seqlens.long()[:, None], block_table.long()
    if on_host and not torch.equal(lens[beam_idx], lens):
        raise ValueError(
            "beam_idx must name sequences as long as those in their place, got "
            f"{beam_idx.tolist()} of lengths {cache_seqlens.tolist()}"
        )
    if on_host and not 0 <= int(lens.min()) <= int(lens.max()) <= page_size * table.shape[1]:
        raise ValueError(
            f"cache_seqlens must be from 0 to {page_size * table.shape[1]}, what block_table has "
            f"room for, got {cache_seqlens.tolist()}"
        )
    last = (lens - 1).clamp(min=0) // page_size
    partial = lens[:, 0] % page_size > 0
    to, source = (pages.gather(1, last)[:, 0] for pages in (table, table[beam_idx]))
    # A sequence without such a page does what another does, or copies a page to itself.
    some = partial.int().argmax(0, keepdim=True)  # an index by a 0-d tensor would read it
    source = torch.where(partial, source, to)
    to, source = (torch.where(partial, x, x[some]).clamp(min=0) for x in (to, source))
    # Only values tell which pages are used, and an index by them would wait for a GPU's.
    here = torch.arange(table.shape[1], device=table.device) * page_size < lens
    used = table[here].tolist() if on_host else []
    for i, cache in enumerate(caches):
        if not all(0 <= page < len(cache) for page in used):
            raise ValueError(
                f"block_table must name pages of caches[{i}], which has {len(cache)}, got "
                f"{block_table.tolist()}"
            )
    for cache in map(fp8.as_bytes, caches):
        cache.index_copy_(0, to, cache.index_select(0, source))
    full = torch.arange(table.shape[1], device=table.device) < lens // page_size
    block_table.copy_(torch.where(full, table[beam_idx], table))


def cache_bytes_per_token(
    config: NSAConfig, dtype: torch.dtype = torch.bfloat16, *, ring: bool = True
) -> float:
    """Bytes that each token of a sequence takes in the caches of one layer.

    groups * (d_k + d_v) * itemsize for selection, 1 / d of it for the compressed token that every d
    tokens make, and with ring=False (window and raw keys in pages) twice as much again. dtype is
    that of the caches, torch.float8_e4m3fn of FP8 ones. With rings, as NSACache has them, a
    sequence takes (w + l + 2 * (max_step - 1)) such rows besides, however long it is. Raises
    TypeError for a config or dtype of another kind.

    >>> from nsa import NSAConfig, cache_bytes_per_token
    >>> config = NSAConfig(dim=2560, heads=64, groups=4, d_k=192, d_v=128)
    >>> cache_bytes_per_token(config), cache_bytes_per_token(config, torch.float8_e4m3fn)
    (2720.0, 1360.0)
    """
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an nsa.NSAConfig, got {type(config).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype != fp8.E4M3 and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(
            f"dtype must be a floating type of 16 bits or more or {fp8.E4M3}, got {dtype}"
        )
    row = config.groups * (config.d_k + config.d_v) * dtype.itemsize
    return row * ((1 if ring else 3) + 1 / config.d)
