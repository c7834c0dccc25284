"""The decode step as one function: allocation, split choice and the launches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from nsa.blocks import num_compressed
from nsa.checks import MOST_STEP_ROWS, needs_grad, scale_of
from nsa.config import check_choice
from nsa.kernels.decode import cluster
from nsa.kernels.decode.choose import _decode_candidates_kernel
from nsa.kernels.decode.cluster import StepProblem
from nsa.kernels.decode.scan import _decode_scan_kernel
from nsa.kernels.decode.selected import _decode_merge_kernel, _decode_selected_kernel
from nsa.kernels.decode.team import _decode_team_kernel
from nsa.kernels.launch import by_layout, launch_planned, on_its_device, prepare_planned
from nsa.kernels.tiles import (
    LOG2E,
    arch_of,
    cdiv,
    check_e4m3,
    dot_size,
    head_constants,
    pow2,
    sm_count,
    small_shared,
)
from nsa.routes import RouteUnavailable
from nsa.untraced import untraced

SCAN_PER_SM = 2  # programs that the scan aims at: as many as run at a time, all of one length
SELECTED_PER_SM = 2  # the same of the selected blocks: more splits are more to merge
SELECTED_SPLITS = 16  # per token and group, a block each by default
EARLY_PROGRAMS = 32  # sequences * groups up to which the launches of a step overlap
MANY_TILES = 8  # of 64 keys per SM: from here on larger tiles
# Blocks of which the kernel of the selected blocks itself sums and ranks the scores: for few
# sequences and groups, and from EARLY_PROGRAMS on.
SINGLE_BLOCKS = 64, 128
CHUNK_BLOCKS = 32, 128  # more go by chunks of so many, of which a launch of its own takes the best
CANDIDATES = 128  # that the chunks are to leave
RANKED = 256  # up to here comparing all with all is quicker than a search
TEAM_PER_SM = 2  # programs of the step in one launch that run at a time
LEAST_TEAM = 16  # for a sequence and group: smaller teams are slower than several launches
TEAM_BLOCKS = 256  # of longer contexts too: H200, 64k, 42 us and 30
SEARCH_CANDIDATES = 1 << 15  # a search holds each against 32 cuts, and tensors of 2^20 are the most


def choice_sizes(
    n_tiles: int, nb: int, n_blocks: int, n_sel: int, programs: int = 1
) -> tuple[int, dict[str, int]]:
    """How the best of n_blocks are found that lie in n_tiles tiles of nb: (chunks, constants)."""
    chunk, n_pad = pow2(max(n_tiles, cdiv(n_blocks, nb))), pow2(n_sel)
    single = chunk <= max(SINGLE_BLOCKS[programs >= EARLY_PROGRAMS] // nb, 1)
    if not single:
        # Few at a time are quick, and more programs run at a time; but n_pad of each chunk are
        # candidates, which are to be ranked as well. H200, 64 sequences of 32k: 64 instead of 128
        # blocks take 12 instead of 22 us.
        least, most = CHUNK_BLOCKS
        chunk = min(max(pow2(cdiv(n_blocks * n_pad, CANDIDATES)), least), most)
        chunk = max(chunk // nb, 1)
    chunks = 1 if single else cdiv(n_blocks, chunk * nb)
    n = chunk * nb if single else pow2(chunks) * n_pad
    return chunks, dict(CHUNK=chunk, SINGLE=single, N=n, N_PAD=n_pad, RANKED=n <= RANKED)


def scan_tile(arch: int, size: int, dim: int, dv: int, rows: int) -> int:
    """Keys of a tile of the scan that fit beside `rows` queries."""
    if arch == 0:
        return 16
    widest = max(dim, dv)
    if small_shared(arch) and (widest > 128 and rows > 64 or widest > 192 and rows > 16):
        return 32
    return 32 if size == 4 else 64


def scan_splits(n_tiles: int, tiles_win: int, room: int) -> tuple[int, int]:
    """Of the compressed keys and of the window's, at the longest length: so many that all programs
    have work and few wait for a place, of which each sequence and group has `room`. H200, 16
    sequences of 8k: 46.1 us with four and two splits on room for four, 41.9 with two and two. Of
    few sequences a quarter more than there is room for is better than a third tile for each."""
    room, each = max(room, 2), 1
    more = room * 5 // 4 if room >= 32 else room
    while cdiv(n_tiles, each) + cdiv(tiles_win, each) > (room if each == 1 else more):
        each += 1
    splits = min(cdiv(n_tiles, each), 64)
    return splits, min(tiles_win, more - splits, 8)


def large_tiles(size: int, dim: int, dv: int, rows: int) -> bool:
    """Do tiles of 128 keys fit the registers?"""
    return size == 2 and max(dim, dv) <= 128 and rows <= 32


def why_not_decode(l: int, d: int, l_sel: int) -> str | None:
    """Why these block sizes have no decode kernel, None when they have."""
    ratio = l_sel // d if d else 0
    if d < 1 or l_sel % d or ratio & (ratio - 1) or ratio > 16:
        return f"l_sel / d must be a power of two up to 16, got l_sel={l_sel}, d={d}"
    if l - d > l_sel:
        return f"l - d must not exceed l_sel, got l={l}, d={d}, l_sel={l_sel}"
    return None


@dataclass(frozen=True)
class StepPlan:
    """What a step launches, from shapes alone. floats: sizes of the scratch buffers of 4 bytes an
    element, in the order in which nsa_decode_triton names them, from `offsets` (bytes) on. scan,
    choice, selected, merge: constants of the kernels; whole: of a team's, which has all phases or
    one. compiled: of each layout of the arguments, see by_layout()."""

    splits_cmp: int
    splits_win: int
    splits_sel: int
    share: int  # selected blocks of a split
    n_tiles: int
    chunks: int
    candidates: bool  # a launch of its own takes them
    merged: bool  # by the programs of the selected blocks
    team: int  # programs for a sequence and group, of a step in one launch; 0 for several launches
    floats: list[int]
    offsets: list[int]
    scan: dict[str, Any]
    choice: dict[str, Any]
    selected: dict[str, Any]
    merge: dict[str, Any]
    whole: tuple[dict[str, Any], ...]
    compiled: dict[tuple, dict[int, tuple]] = field(default_factory=dict)

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of those that are launched."""
        if self.team:
            return ("_decode_team_kernel",)
        launched = {
            "_decode_scan_kernel": self.splits_cmp + self.splits_win,
            "_decode_candidates_kernel": self.candidates and self.splits_cmp and self.splits_sel,
            "_decode_selected_kernel": self.splits_sel, "_decode_merge_kernel": not self.merged,
        }  # fmt: skip
        return tuple(name for name, programs in launched.items() if programs)

    @functools.cached_property
    def size(self) -> int:
        """Of all scratch buffers."""
        return sum(self.floats)

    def buffers(self, scratch: Tensor, lens: Tensor | int, known: bool) -> list[Tensor] | list[int]:
        """The scratch buffers; of kernels that are known addresses: splitting takes 10 to 16 us."""
        if known:
            base = scratch.data_ptr()
            found = [base + offset for offset in self.offsets]
        else:
            found = list(torch.split_with_sizes(scratch, self.floats))
            found[-2:] = (x.view(torch.int32) for x in found[-2:])
        if not self.candidates:
            found[-2:] = lens, lens
        return found


_no_team: set[torch.device] = set()  # on which a team did not fit


def _scan_block(p: StepProblem, rows: int) -> int:
    """Keys of a tile of the scan. Raises NotImplementedError where no tile fits."""
    size, arch, widest = p.dtype.itemsize, arch_of(p.device), max(p.dim, p.dv)
    most = 384 // size  # beside more than 64 rows
    if small_shared(arch) and rows > 64 and widest > most:
        raise NotImplementedError(
            f"q: T * heads per group must be <= 64 for head sizes above {most} on sm_{arch}, got "
            f"{p.tokens * p.hq // p.groups}"
        )
    tiles = p.batch * p.groups * cdiv(num_compressed(p.max_len, p.l, p.d), 64)
    if tiles >= MANY_TILES * _sms(p) and large_tiles(size, p.dim, p.dv, rows):
        return 128
    least, ratio = 8 if p.device.type == "cuda" else 2, p.l_sel // p.d
    return max(scan_tile(arch, size, p.dim, p.dv, rows), least * ratio)


def _sms(p: StepProblem) -> int:
    return sm_count(p.device) if p.device.type == "cuda" else 8


# Cached: in eager mode this arithmetic would take as long as two launches.
@functools.lru_cache(maxsize=1024)
def _plan(p: StepProblem, branch: str | None, alone: bool = False) -> StepPlan:
    check_choice(p.n_sel, p.n_init, p.n_local)
    arch, sms, programs = arch_of(p.device), _sms(p), p.batch * p.groups
    rows, heads = dot_size(p.tokens * (p.hq // p.groups)), dot_size(p.hq // p.groups)
    wide_output = heads * max(p.dim, p.dv)
    block_n = _scan_block(p, rows)
    nb = block_n // (p.l_sel // p.d)
    n_tiles = max(cdiv(num_compressed(p.max_len, p.l, p.d), block_n), 1)
    splits_cmp, splits_win = scan_splits(
        n_tiles, cdiv(p.window + p.tokens - 1, block_n), SCAN_PER_SM * sms // programs
    )
    splits_cmp = splits_cmp if branch in (None, "cmp") else 0
    splits_win = splits_win if branch in (None, "win") else 0
    target = SELECTED_PER_SM * sms
    splits_sel = max(1, min(target // (programs * p.tokens), SELECTED_SPLITS))
    share = cdiv(p.n_sel, splits_sel)
    splits_sel = cdiv(p.n_sel, share) if branch in (None, "sel") else 0
    chunks, choice = choice_sizes(n_tiles, nb, cdiv(p.max_len, p.l_sel), p.n_sel, programs)
    if not choice["RANKED"] and choice["N"] > SEARCH_CANDIDATES:
        raise NotImplementedError(
            f"max_len={p.max_len} with n_sel={p.n_sel}, l_sel={p.l_sel}: more blocks than one step "
            "can choose from"
        )

    room = TEAM_PER_SM * sms // programs
    together = (
        alone and branch is None and room >= max(LEAST_TEAM, splits_cmp + splits_win)
        and cdiv(p.max_len, p.l_sel) <= TEAM_BLOCKS and not small_shared(arch) and block_n <= 64
        and large_tiles(p.dtype.itemsize, p.dim, p.dv, rows)
    )  # fmt: skip
    team = max(splits_cmp + splits_win, min(max(splits_sel, p.hq // p.groups) * p.tokens, room))
    # What the merge adds lets fewer programs run at a time: H200, 128 sequences of 8k, 168 us as a
    # launch of its own and 181 without. Where all do nevertheless, 64 of 8k, 102.5 and 97.5. Many
    # wide heads do not fit, and splits of the scan are merged one after another.
    merged = (
        branch is None and not together and splits_sel == 1 and programs * p.tokens <= target
        and wide_output <= 1 << 12 and splits_cmp + splits_win <= 8
    )  # fmt: skip
    partials = programs * (splits_cmp + splits_win) * rows
    tiles = programs * rows * n_tiles
    parts = 0 if merged else programs * p.tokens * splits_sel * heads
    candidates = 0 if choice["SINGLE"] else programs * p.tokens * chunks * choice["N_PAD"]
    floats = [cdiv(n, 4) * 4 for n in (  # every buffer begins at 16 bytes
              partials * p.dv, partials, partials, tiles * nb, tiles, tiles, parts * p.dv, parts,
              parts, candidates, candidates)]  # fmt: skip
    # Where programs leave much of the GPU idle, those of a launch begin while the one before it
    # ends. Not those of the candidates, which would take places and time from the scan.
    early = (
        arch >= 90 and branch is None and programs <= EARLY_PROGRAMS and choice["N"] <= CANDIDATES
    )
    return StepPlan(
        splits_cmp=splits_cmp, splits_win=splits_win, splits_sel=splits_sel, share=share,
        n_tiles=n_tiles, chunks=chunks, candidates=not choice["SINGLE"], merged=merged,
        team=team if together else 0, floats=floats,
        offsets=[4 * n for n in itertools.accumulate(floats[:-1], initial=0)],
        **_constants(
            p, rows, heads, block_n, nb, [pow2(n) for n in (splits_cmp, splits_win, splits_sel)],
            choice, early, branch is None, merged, programs * p.tokens * chunks <= 2 * sms,
        ),
    )  # fmt: skip


def _constants(
    p: StepProblem, rows: int, heads: int, block_n: int, nb: int, padded: list[int],
    choice: dict[str, Any], early: bool, choose: bool, merged: bool, few: bool,
) -> dict[str, Any]:  # fmt: skip
    """The constants of a StepPlan's kernels, by field. padded: powers of two that hold the splits
    of compressed keys, window and selected blocks; few: so few programs choose blocks."""
    dims = head_constants(p.dim, p.dv, p.dtype)
    wide_output, block_dv = heads * max(p.dim, p.dv), dot_size(p.dv)
    interpret = p.device.type != "cuda"
    pool = tl.float32 if p.dtype == torch.float32 else tl.float16
    splits = dict(zip(("SPLITS_CMP", "SPLITS_WIN", "SPLITS_SEL"), padded, strict=True))
    ahead = {"launch_pdl": True} if early else {}
    choosing = dict(
        ROWS=rows, HEADS=heads, TILE_N=block_n, NB=nb, CHUNK=choice["CHUNK"], N_SEL=p.n_sel,
        N_PAD=choice["N_PAD"], N_INIT=p.n_init, N_LOCAL=p.n_local,
    )  # fmt: skip
    selected = dict(
        BLOCK_N=min(block_n, 64, dot_size(p.l_sel)), SINGLE=choice["SINGLE"], N=choice["N"],
        RANKED=choice["RANKED"],
    )  # fmt: skip
    # The choice takes many warps for a few programs, which end one soon; with many programs what
    # each warp does again counts (addresses, barriers).
    ranked = choice["CHUNK"] * nb
    return dict(
        scan=dict(
            ROWS=rows, BLOCK_N=block_n, NB=nb, POOL_DTYPE=pool, PAGE=0 if p.ring else p.page,
            RING=p.ring, CMP_PAGE=p.cmp_page, APART=p.tokens > 1,
            num_warps=8 if rows > 32 else 4,  # of which 4 have no registers for so many wide rows
            num_stages=2, EARLY=early, **dims,
        ),
        choice=dict(
            num_warps=max(ranked // 16, 4) if few else max(ranked // 64, 1), num_stages=1,
            EARLY=early, SPLITS=padded[0], **choosing,
        ),
        selected=dict(
            PAGE=p.page, CHOOSE=choose, MERGE=merged, EARLY=early, num_stages=2,
            # Neither the candidates nor the output of many wide heads fit the registers of 4.
            num_warps=4 if choice["N"] <= 1024 and wide_output <= 1 << 14 else 8,
            SPLITS=padded[0], **selected, **choosing, **dims, **ahead,
        ),
        merge=dict(
            DV=p.dv, ROWS=rows, HEADS=heads, BLOCK_DV=block_dv,
            # The fewest warps whose registers hold the partial outputs are the fastest: on an
            # H200 16 sequences of 64k take 3 us with one warp and 8 with four.
            num_warps=pow2(cdiv(sum(padded) * block_dv, 32 * 176)), EARLY=early, **splits, **ahead,
        ),
        # One launch for all phases where programs run at the same time.
        whole=tuple(dict(
            PHASE=phase, PAGE=p.page, RING=p.ring, POOL_DTYPE=tl.float16, APART=p.tokens > 1,
            num_warps=4, num_stages=2, **splits,
            **{"launch_cooperative_grid": True} if not interpret else {},
            **choosing, **selected, **dims,
        ) for phase in ((0, 1, 2, 3) if interpret else (-1,))),
    )  # fmt: skip


def _int32(x: Tensor) -> Tensor:
    """x as kernels read it: asked for first, since this is each step's."""
    if x.dtype is torch.int32 and x.is_contiguous():
        return x
    return x.to(torch.int32).contiguous()


class _Step(NamedTuple):
    """Holds the arguments that all launches of one step share. tensors: in the order in which
    _run() names them; lengths: of the page table and of the three caches."""

    problem: StepProblem
    branch: str | None
    tensors: tuple[Tensor, ...]
    counters: Tensor | None
    lengths: tuple[int, int, int, int]
    scale_log2: float


def _run(step: _Step, plan: StepPlan, go: Callable[..., None]) -> None:
    """Launch what `plan` says through `go`, launch_planned() or prepare_planned()."""
    p, branch, tensors, counters, lengths, scale_log2 = step
    table_len, cmp_rows, sel_rows, win_rows = lengths
    groups, heads, tokens, l, d, l_sel = p.groups, p.hq // p.groups, p.tokens, p.l, p.d, p.l_sel
    splits_cmp, splits_sel, chunks = plan.splits_cmp, plan.splits_sel, plan.chunks
    splits_all, n_tiles = plan.splits_cmp + plan.splits_win, plan.n_tiles
    programs = p.batch * groups
    compiled, addresses = by_layout(plan.compiled, lengths, tensors)
    if plan.team and plan.whole[0]["PHASE"] == -1 and not compiled:
        # For a graph, whose capture is no time to compile.
        _run(step, _plan(p, branch), prepare_planned)
    scratch = torch.empty(plan.size, dtype=torch.float32, device=p.device)
    known = len(compiled) == len(plan.kernels)
    Q, KC, VC, KS, VS, KW, VW, GATES, LENS, TABLE, INDICES, OUT, K_DESCALE, V_DESCALE = (
        addresses if known else tensors
    )
    (scan_o, scan_m, scan_l, pooled, spill, tile_max, sel_o, sel_m, sel_l, keys, blocks) = (
        plan.buffers(scratch, LENS, known)
    )
    if plan.team:
        for constants in plan.whole:
            go(
                _decode_team_kernel, (plan.team, programs, 1),
                (Q, KC, VC, KS, VS, KW, VW, GATES, LENS, TABLE, K_DESCALE, V_DESCALE, INDICES,
                 OUT, counters, scan_o, scan_m, scan_l, pooled, spill, tile_max, sel_o, sel_m,
                 sel_l, keys, blocks, table_len, cmp_rows, sel_rows, win_rows, groups, heads,
                 tokens, splits_cmp, splits_all, splits_sel, plan.share, chunks, n_tiles, l, d,
                 l_sel, p.window, scale_log2),
                constants, compiled,
            )  # fmt: skip
        return
    if splits_all:
        go(
            _decode_scan_kernel, (programs, splits_all, 1),
            (Q, KC, VC, KW, VW, LENS, TABLE, K_DESCALE, V_DESCALE, scan_o, scan_m, scan_l,
             pooled, spill, tile_max, table_len, cmp_rows, win_rows, groups, heads, tokens,
             splits_cmp, splits_all, n_tiles, l, d, l_sel, p.window, scale_log2),
            plan.scan, compiled,
        )  # fmt: skip
    if branch is None and plan.candidates:
        go(
            _decode_candidates_kernel, (chunks, programs, tokens),
            (LENS, scan_m, scan_l, pooled, spill, tile_max, keys, blocks, groups, heads, tokens,
             splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks),
            plan.choice, compiled,
        )  # fmt: skip
    if splits_sel:
        go(
            _decode_selected_kernel, (splits_sel, programs, tokens),
            (Q, KS, VS, LENS, TABLE, K_DESCALE, V_DESCALE, INDICES, GATES, OUT, sel_o, sel_m,
             sel_l, scan_o, scan_m, scan_l, pooled, spill, tile_max, keys, blocks, table_len,
             sel_rows, groups, heads, tokens, splits_sel, plan.share, splits_cmp, splits_all,
             n_tiles, l, d, l_sel, chunks, scale_log2),
            plan.selected, compiled,
        )  # fmt: skip
    if not plan.merged:
        go(
            _decode_merge_kernel, (programs, tokens * heads, 1),
            (scan_o, scan_m, scan_l, sel_o, sel_m, sel_l, GATES, OUT, groups, heads, tokens,
             splits_cmp, splits_all, splits_sel), plan.merge, compiled,
        )  # fmt: skip


def _check_step(
    q: Tensor, caches: tuple[Tensor, ...], gates: Tensor, sizes: tuple[int, int, int],
    branch: str | None, block_indices: Tensor | None,
) -> None:  # fmt: skip
    """Raise what nsa_decode_triton() says it raises."""
    if torch.is_grad_enabled() and needs_grad(q, gates, *caches):
        detail = "a decode step has no gradient of q, gates, keys and values"
        raise RouteUnavailable("triton", "needs_grad", detail)
    apart = [not x.is_contiguous() for x in caches]
    if True in apart:  # a copy in every step would be slow without a word
        which = apart.index(True)
        name = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")[which]
        raise ValueError(f"{name} must be contiguous, got strides {caches[which].stride()}")
    if branch not in (None, "cmp", "sel", "win"):
        raise ValueError(f"branch must be None, 'cmp', 'sel' or 'win', got {branch!r}")
    if (branch == "sel") != (block_indices is not None):
        raise ValueError("block_indices go with branch 'sel' and with no other")
    reason = why_not_decode(*sizes)
    if reason:
        raise NotImplementedError(reason)
    k_sel = caches[2]
    rows = q.shape[1] * (q.shape[2] // k_sel.shape[-2])
    if rows > MOST_STEP_ROWS:
        raise NotImplementedError(f"q: T * heads per group must be <= {MOST_STEP_ROWS}, got {rows}")
    if k_sel.dtype == torch.float8_e4m3fn:
        check_e4m3(arch_of(q.device))


@untraced  # launch_planned() goes by addresses
@on_its_device
def nsa_decode_triton(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, lens: Tensor, *, l: int, d: int, l_sel: int, n_sel: int,
    n_init: int, n_local: int, window: int, max_len: int, softmax_scale: float | None = None,
    block_table: Tensor | None = None, window_ring: bool = False, return_indices: bool = False,
    branch: str | None = None, block_indices: Tensor | None = None,
    counters: Tensor | None = None, use_cluster: bool | None = None, cmp_paged: bool = False,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of T new tokens per sequence over its caches; out [B, T, HQ, Dv].

    q [B, T, HQ, Dk] with T * (HQ / G) <= 128 (sm_86, 89 and 120: 64 where heads have more than 384
    bytes); k_cmp [B, N_max, G, Dk], v_cmp [B, N_max, G, Dv];
    k_sel, v_sel [B, capacity, G, *], or pages [P, page, G, *] with block_table int32 [B, n];
    k_win, v_win likewise, or a ring of `capacity` >= window + T - 1 rows when window_ring; all of
    these contiguous. cmp_paged: k_cmp and v_cmp are pages too, [P, page / d, G, *] in the places of
    block_table, compressed key i in row i + l / d - 1: in the page of the last token it is made of.
    gates [B, T, HQ, 3]; lens int [B] on the device, the length including the T new tokens, whose
    keys are in the caches already. max_len bounds every length the call (or a graph captured from
    it) will see. Nothing synchronises with the host; rows beyond a length are never read.
    counters int32 [B, G, 32], zeros at first and these sequences' alone: with them few sequences of
    up to 16k tokens (256 blocks) are one launch outside CUDA graphs where the kernel for clusters
    does not serve; the first such call compiles what a graph will launch.
    branch "cmp", "sel" or "win" launches that branch's programs alone, for measuring: the others
    add nothing. "sel" attends to block_indices int32 [B, T, G, n_sel] that an earlier step chose.
    use_cluster: Flags.use_cluster, by default this process's; see cluster.py.
    k_descale, v_descale fp32 [B, G], with keys and values of float8_e4m3fn (SM 8.9 or newer), whose
    numbers x stand for x * descale; q has 16 bits or 32 all the same.
    Raises NotImplementedError for sizes that no kernel serves, RouteUnavailable where a gradient is
    needed, which nsa.nsa_attention has, and ValueError for caches that are not contiguous.
    """
    caches = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    _check_step(q, caches, gates, (l, d, l_sel), branch, block_indices)
    q, gates, lens = q.contiguous(), gates.contiguous(), _int32(lens)
    batch, tokens, hq, dim = q.shape
    groups, dv = v_sel.shape[-2:]
    fp8 = k_sel.dtype == torch.float8_e4m3fn
    problem = StepProblem(
        q.device, batch, tokens, hq, groups, dim, dv, q.dtype, gates.dtype, l, d, l_sel, n_sel,
        n_init, n_local, window, max_len, 0 if block_table is None else k_sel.shape[1], window_ring,
        k_cmp.shape[1] if cmp_paged else 0, fp8,
    )  # fmt: skip
    scale_log2 = LOG2E * scale_of(softmax_scale, dim)
    if block_indices is not None:
        indices = _int32(block_indices)
    else:
        indices = torch.empty(batch, tokens, groups, n_sel, dtype=torch.int32, device=q.device)
    out = torch.empty(batch, tokens, hq, dv, dtype=q.dtype, device=q.device)
    table = lens if block_table is None else _int32(block_table)
    table_len = 0 if block_table is None else block_table.shape[1]
    lengths = table_len, k_cmp.shape[1], k_sel.shape[1], k_win.shape[1]
    tensors = (q, *caches, gates, lens, table, indices, out)
    descales: tuple[Tensor, ...] = ()
    if fp8:
        assert k_descale is not None and v_descale is not None
        descales = k_descale, v_descale
    whole = cluster.cluster_kernel(use_cluster, problem)
    if whole and whole(tensors, (*lengths, groups, cluster.MODES[branch]), scale_log2, descales):
        return (out, indices) if return_indices else out

    # In a graph launches cost nothing, and several take the device no longer than one.
    alone = counters is not None and not cmp_paged
    alone = alone and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    tensors += descales or (lens, lens)
    step = _Step(problem, branch, tensors, counters, lengths, scale_log2)
    plan = _plan(problem, branch, alone and q.device not in _no_team)
    try:
        _run(step, plan, launch_planned)
    except RuntimeError as error:
        # Less of the GPU is ours than it has (MPS, green contexts): nothing ran.
        if not plan.team or "cooperative launch" not in str(error):
            raise
        _no_team.add(q.device)
        _run(step, _plan(problem, branch), launch_planned)
    return (out, indices) if return_indices else out


def step_kernels(
    q: Tensor, groups: int, dv: int, *, max_len: int, in_graph: bool, l: int, d: int, l_sel: int,
    n_sel: int, n_init: int, n_local: int, window: int, branch: str | None = None, page: int = 0,
    ring: bool = True, gate_dtype: torch.dtype | None = None, use_cluster: bool | None = None,
    fp8: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Names of the kernels that a step of q [B, T, HQ, Dk] with counters launches."""
    problem = StepProblem(
        q.device, *q.shape[:3], groups, q.shape[3], dv, q.dtype, gate_dtype or q.dtype, l, d, l_sel,
        n_sel, n_init, n_local, window, max_len, page, ring, 0, fp8,
    )  # fmt: skip
    if cluster.cluster_kernel(use_cluster, problem):
        return (cluster.NAME,)
    alone = branch is None and not in_graph and q.device not in _no_team
    return _plan(problem, branch, alone).kernels
