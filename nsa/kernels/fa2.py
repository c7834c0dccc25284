"""Sliding and compressed attention on FlashAttention-2, dense and varlen, forward and backward.

Two implementations serve, in this order: the flash_attn package, and the FA-2 inside torch. Both
align a causal mask at the bottom right, read heads in groups, and take fp16 or bf16 only.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import signal
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import launches
from nsa.blocks import cu_seqlens_compressed, num_compressed, visible_compressed
from nsa.checks import assert_longest, needs_grad, scale_of
from nsa.errors import must_raise
from nsa.kernels import fa2_wheels
from nsa.layouts import outside
from nsa.unseen import factor_between, finite

FORMS = ("auto", "varlen", "dense")
_GRID = 65535  # batch and heads are grid dimensions y and z

# ---- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """Which FA-2 works here.

    source: "flash_attn", "torch" or None. version: of that source. why_not: None when usable.
    package_reason: None when the flash_attn package works, else "<class>: <what it said>" with
    class one of not installed, undefined symbol, libcudart missing, no kernel image, other.
    wheel: the official flash-attn wheel that fits this torch and Python, or that there is none.
    """

    source: str | None
    version: str | None
    why_not: str | None
    package_reason: str | None
    wheel: str


def wheel() -> str:
    """What fa2_wheels.wheel says of this torch and Python."""
    python = ".".join(str(x) for x in sys.version_info[:2])
    abi = torch.compiled_with_cxx11_abi()
    return fa2_wheels.wheel(torch.__version__, torch.version.cuda, python, abi)


# A wheel built for another torch may crash the process at import, or only fail at the first
# launch: both happen in a child.
_TRIAL = """
import torch, flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
version = flash_attn.__version__
if tuple(int(x) for x in version.split(".")[:2]) < (2, 6):
    raise SystemExit(f"flash_attn {version} is older than 2.6")
if torch.cuda.is_available():
    x = torch.ones(1, 8, 1, 32, device="cuda", dtype=torch.float16)
    assert flash_attn_func(x, x, x, causal=True).sum().item() == 256
print("version", version)
"""


def classify(returncode: int | None, output: str) -> str:
    """Words "<class>: <last line>" for a trial that failed; returncode None is a timeout."""
    lines = [x.strip() for x in output.splitlines() if x.strip()]
    last = lines[-1][:400] if lines else ""
    if returncode is None:
        return "other: importing it did not end in time"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"other: importing it ends the process with {name}"
    for kind, mark in (
        ("not installed", "No module named 'flash_attn'"),
        ("undefined symbol", "undefined symbol"),
        ("libcudart missing", "libcudart"),
        ("no kernel image", "no kernel image"),
    ):
        told = next((x for x in reversed(lines) if mark in x), None)
        if told is not None:
            return f"{kind}: {told[:400]}"
    return f"other: {last or f'exit code {returncode}'}"


def _try_package(timeout_s: float = 90) -> tuple[str | None, str | None]:
    """(version, None) when the flash_attn package works, else (None, reason)."""
    if importlib.util.find_spec("flash_attn") is None:
        return None, "not installed: No module named 'flash_attn'"
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, classify(None, "")
    if child.returncode:
        return None, classify(child.returncode, child.stderr)
    return child.stdout.split()[-1], None


def _try_torch() -> str | None:
    """Why torch's own FA-2 does not work here, None if it does."""
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FA-2"
    try:
        x = torch.ones(1, 8, 1, 32, device="cuda", dtype=torch.float16)
        out, _ = _torch_call(x, x, x, 1.0, True, -1, None, None, 8, 8)
        if out.sum().item() != 256:
            return f"the FA-2 of torch {torch.__version__} returns wrong numbers"
    except RuntimeError as error:
        if must_raise(error):
            raise
        return f"the FA-2 of torch {torch.__version__} fails: {str(error).splitlines()[0][:300]}"
    return None


@functools.cache
def probe() -> Probe:
    """Find the FA-2 to use; tried once per process, the package in a child process first."""
    version, reason = _try_package()
    fits = wheel()
    if not torch.cuda.is_available():
        why = f"no CUDA device; flash_attn: {reason or f'{version} is installed'}"
        return Probe(None, None, why, reason, fits)
    sm = torch.cuda.get_device_capability()
    if sm < (8, 0):
        why = f"FA-2 needs SM 8.0 or newer, got SM {sm[0]}.{sm[1]}"
        return Probe(None, None, why, reason, fits)
    if reason is None:
        return Probe("flash_attn", version, None, None, fits)
    no_torch = _try_torch()
    if no_torch is None:
        return Probe("torch", torch.__version__, None, reason, fits)
    return Probe(None, None, f"flash_attn: {reason}; {no_torch}", reason, fits)


# ---- one call ------------------------------------------------------------------------------------


def _right(causal: bool, left: int, cu_q: Tensor | None) -> int:
    """The right window. A causal dense call leaves it open: one query then takes the decode path,
    where heads become rows; in varlen that path has had its lse laid out in several ways."""
    return 0 if causal and (left >= 0 or cu_q is not None) else -1


def _torch_call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # The operator behind torch.nn.attention.varlen, whose signature differs from release to
    # release and which has no dense form. It carries its own autograd formula.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=_right(causal, left, cu_q),
    )  # fmt: skip
    return out, lse


def _package_call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    kw = {
        "softmax_scale": scale, "causal": causal, "return_attn_probs": True,
        "window_size": (left, _right(causal, left, cu_q)),
    }  # fmt: skip
    if cu_q is None:
        return flash_attn_func(q, k, v, **kw)[:2]
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **kw)[:2]


def _require(q: Tensor, k: Tensor, v: Tensor) -> Probe:
    """The probe, or NotImplementedError that says what FA-2 cannot take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_cuda:
            raise NotImplementedError(f"FA-2 needs CUDA tensors, got {name} on {x.device}")
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"FA-2 needs fp16 or bf16, got {name} of {x.dtype}")
    found = probe()
    if found.why_not is not None:
        raise NotImplementedError(f"no FA-2 here: {found.why_not}")
    D = max(q.shape[-1], v.shape[-1])
    if D > 256:
        raise NotImplementedError(f"FA-2 takes head dimensions up to 256, got {D}")
    sm = torch.cuda.get_device_capability(q.device)
    grad = needs_grad(q, k, v)
    if grad and D > 224 and (sm in ((8, 6), (8, 9)) or sm[0] == 12):
        raise NotImplementedError(
            f"FA-2 has no backward for head dimension {D} on SM {sm[0]}.{sm[1]}"
        )
    return found


def _call(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, left: int = -1,
    cu_q: Tensor | None = None, cu_k: Tensor | None = None, max_q: int = 0, max_k: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One FA-2 call. Dense q [B, Sq, H, Dk], k [B, Sk, G, Dk]; varlen without B, with cu_seqlens.

    Query i of Sq sees keys up to i + Sk - Sq (causal), at most `left` before that (left >= 0), or
    all. Returns out [.., H, Dv] and natural-log lse fp32 [.., H], which carries no gradient.
    """
    found = _require(q, k, v)
    Dv, D = v.shape[-1], -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    # One head dimension for all three; zeros change neither scores nor the kept columns.
    q, k, v = (F.pad(x, (0, D - x.shape[-1])) if x.shape[-1] < D else x for x in (q, k, v))
    q, k, v = map(_loadable, (q, k, v))
    batch = q.shape[0] if cu_q is None else len(cu_q) - 1
    if max(batch, q.shape[-2]) > _GRID:
        raise NotImplementedError(
            f"FA-2 takes up to {_GRID} sequences and heads, got {batch} and {q.shape[-2]}"
        )
    if cu_q is None:
        max_q, max_k = q.shape[1], k.shape[1]
    call = _package_call if found.source == "flash_attn" else _torch_call
    out, lse = call(q, k, v, scale, causal, left, cu_q, cu_k, max_q, max_k)
    name = f"fa2_{found.source}_{'dense' if cu_q is None else 'varlen'}"
    launches.bump(name, library=True)
    if out.grad_fn is not None:

        def counted(*_: object) -> None:
            launches.bump(f"{name}_bwd", library=True)

        out.grad_fn.register_hook(counted)
    return out[..., :Dv], lse.detach().transpose(-1, -2)  # [B, H, Sq] or [H, T]


def _loadable(x: Tensor) -> Tensor:
    """x where FA-2 may load 16 bytes at a time of it, else a copy: it does not ask."""
    step = 16 // x.element_size()
    starts = (x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) == 1 and all(n % step == 0 for n in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _batched(
    q: Tensor, k: Tensor, v: Tensor, form: str, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """Causal _call on dense tensors, in the form asked for."""
    if form != "varlen":
        return _call(q, k, v, scale=scale, causal=True, left=left)
    B, Sq, Sk = q.shape[0], q.shape[1], k.shape[1]
    before = torch.arange(B + 1, device=q.device, dtype=torch.int32)  # sequences
    out, lse = _call(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale=scale, causal=True, left=left,
        cu_q=before * Sq, cu_k=before * Sk, max_q=Sq, max_k=Sk,
    )  # fmt: skip
    return out.unflatten(0, (B, Sq)), lse.unflatten(0, (B, Sq))


def _check_form(form: str, packed: bool) -> None:
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if form == "dense" and packed:
        raise ValueError("form must be 'auto' or 'varlen' with cu_seqlens, got 'dense'")


def _longest(cu_seqlens: Tensor, max_seqlen: int | None) -> int:
    if max_seqlen is None:
        return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    assert_longest(cu_seqlens, max_seqlen)  # FA-2 leaves out what is behind
    return max_seqlen


# ---- sliding -------------------------------------------------------------------------------------


def sliding_fa2(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, softmax_scale: float | None = None,
    q_start: int = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    form: str = "auto",
) -> Tensor:  # fmt: skip
    """Softmax over keys max(0, t + 1 - window) .. t of query t = q_start + s.

    q [B, S, HQ, Dk], k [B, N, G, Dk], v [B, N, G, Dv] -> [B, S, HQ, Dv]; packed [T, ..] with
    cu_seqlens int32 [nseq + 1]. form: "auto" (dense, or varlen when packed), "varlen" or "dense".
    fp16 or bf16 on CUDA, head dimensions up to 256; NotImplementedError says what is missing.
    """
    _check_form(form, cu_seqlens is not None)
    scale = scale_of(softmax_scale, q.shape[-1])
    if q.shape[-3] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + (q.sum() + k[:0].sum() + v[:0].sum())
    if cu_seqlens is not None:
        longest = _longest(cu_seqlens, max_seqlen)
        # FA-2 writes neither outputs nor gradients of rows that belong to no sequence.
        out_of = outside(cu_seqlens, q.shape[0])[:, None, None]
        q, k, v = (x.masked_fill(out_of, 0) for x in (q, k, v))
        (k, odd_k), (v, odd_v) = finite(k), finite(v)
        out = _call(
            q, k, v, scale=scale, causal=True, left=window - 1, cu_q=cu_seqlens, cu_k=cu_seqlens,
            max_q=longest, max_k=longest,
        )[0].masked_fill(out_of, 0)  # fmt: skip
        t = torch.arange(q.shape[0], device=q.device)
        begin = cu_seqlens[torch.searchsorted(cu_seqlens[1:], t, right=True)]
    else:
        begin, high = max(0, q_start + 1 - window), q_start + q.shape[1]
        (k, odd_k), (v, odd_v) = (finite(x[:, begin:high]) for x in (k, v))
        out = _batched(q, k, v, form, scale, window - 1)[0]
        t = torch.arange(q_start - begin, high - begin, device=q.device)
        begin = t.new_zeros(())
    first = torch.maximum(t + 1 - window, begin)
    return _told(out, odd_k | odd_v, first, t + 1)


def _told(x: Tensor, odd: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """x [.., S, HQ, D], NaN for the queries that see an odd key: FA-2 is given finite ones, since
    its products with a probability of 0 would tell others as well (nsa/unseen.py)."""
    return x * factor_between(odd, first, end, x.shape[-2])[..., None].to(x.dtype)


# ---- compressed ----------------------------------------------------------------------------------
#
# The d queries t = l-1 + j*d .. l-1 + j*d + d-1 see the same compressed keys 0 .. j. As d times as
# many heads of one row j, they turn the staircase into a plain causal mask over rows.


def _fold(x: Tensor, G: int) -> Tensor:
    """[.., R, m, G*h, D] -> [.., R, G*(m*h), D]: the m queries of a row become heads, by group."""
    x = x.unflatten(-2, (G, -1)).movedim(-4, -3)
    return x.flatten(-4, -2)


def _unfold(x: Tensor, G: int, m: int) -> Tensor:
    """[.., R, G*(m*h), D] -> [.., R, m, G*h, D]: the inverse of _fold."""
    return x.unflatten(-2, (G, m, -1)).movedim(-3, -4).flatten(-3, -2)


def compressed_fa2(
    q: Tensor, k: Tensor, v: Tensor, *, l: int, d: int, softmax_scale: float | None = None,
    q_start: int = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    form: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over the compressed keys j with j*d + l - 1 <= t = q_start + s (Eq. 8).

    q [B, S, HQ, Dk], k [B, Nc, G, Dk], v [B, Nc, G, Dv] -> out [B, S, HQ, Dv] and natural-log lse
    fp32 [B, S, HQ], without gradient; a query that sees no key has 0 and -inf. Packed: q [T, ..],
    k and v [sum of Nc, ..], cu_seqlens int32 [nseq + 1] of q. form and limits as in sliding_fa2.
    """
    _check_form(form, cu_seqlens is not None)
    scale = scale_of(softmax_scale, q.shape[-1])
    if cu_seqlens is not None:
        return _compressed_packed(q, k, v, l, d, scale, cu_seqlens, max_seqlen)
    B, S, HQ, _ = q.shape
    G = k.shape[2]
    blind = max(0, min(S, l - 1 - q_start))  # queries that see no key
    n = S - blind
    if n == 0:
        zero = q[:0].sum() + k[:0].sum() + v[:0].sum()  # connected, with zero gradients
        lse = torch.full((B, S, HQ), -math.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros(B, S, HQ, v.shape[-1]) + zero, lse
    before = (q_start + blind - (l - 1)) % d  # queries missing from the first row
    seen = num_compressed(q_start + S, l, d)
    (k, odd_k), (v, odd_v) = (finite(x[:, :seen]) for x in (k, v))
    rows = -(-(before + n) // d)
    if rows == 1:
        rows_q = q[:, None, blind:]
        before, m = 0, n
    else:
        m = d
        rows_q = F.pad(q[:, blind:], (0, 0, 0, 0, before, rows * d - before - n))
        rows_q = rows_q.unflatten(1, (rows, d))
    out, lse = _batched(_fold(rows_q, G), k, v, form, scale, -1)
    out = _unfold(out, G, m).flatten(1, 2)[:, before : before + n]
    lse = _unfold(lse[..., None], G, m)[..., 0].flatten(1, 2)[:, before : before + n]
    if blind:
        out = F.pad(out, (0, 0, 0, 0, blind, 0))
        lse = F.pad(lse, (0, 0, blind, 0), value=-math.inf)
    end = visible_compressed(torch.arange(q_start, q_start + S, device=q.device), l, d)
    return _both_told(out, lse, odd_k, odd_v, torch.zeros_like(end), end)


def _both_told(
    out: Tensor, lse: Tensor, odd_k: Tensor, odd_v: Tensor, first: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse, of which the latter is the keys' alone, as _told()."""
    lse = _told(lse[..., None], odd_k, first, end)[..., 0]
    return _told(out, odd_k | odd_v, first, end), lse


def _compressed_packed(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int, scale: float, cu: Tensor,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    R, G = k.shape[0], k.shape[1]
    if R == 0:
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        zero = q[:0].sum() + k.sum() + v.sum()
        return q.new_zeros(*q.shape[:2], v.shape[-1]) + zero, lse
    cu_rows = cu_seqlens_compressed(cu, l, d)
    row = torch.arange(R, device=q.device, dtype=cu.dtype)
    owner = torch.searchsorted(cu_rows[1:], row, right=True)
    first = cu[owner] + (l - 1) + (row - cu_rows[owner]) * d
    at = first[:, None] + torch.arange(d, device=q.device, dtype=cu.dtype)
    # Past the sequence's end its last query stands in: its result is not read.
    at = torch.minimum(at, cu[owner + 1][:, None] - 1)
    longest = num_compressed(_longest(cu, max_seqlen), l, d)
    (k, odd_k), (v, odd_v) = finite(k), finite(v)
    out, lse = _call(
        _fold(q[at.long()], G), k, v, scale=scale, causal=True, cu_q=cu_rows, cu_k=cu_rows,
        max_q=longest, max_k=longest,
    )  # fmt: skip
    token = torch.arange(q.shape[0], device=q.device, dtype=cu.dtype)
    owner = torch.searchsorted(cu[1:], token, right=True)
    past = token - cu[owner] - (l - 1)  # queries since the first that sees a key
    blind = (past < 0) | outside(cu, q.shape[0])
    slot = (cu_rows[owner] * d + past).masked_fill(blind, 0).long()
    out = _unfold(out, G, d).flatten(0, 1)[slot].masked_fill(blind[:, None, None], 0)
    lse = _unfold(lse[..., None], G, d)[..., 0].flatten(0, 1)[slot]
    lse = lse.masked_fill(blind[:, None], -math.inf)
    first = cu_rows[owner].long()
    end = first + torch.where(blind, 0, past // d + 1)
    return _both_told(out, lse, odd_k, odd_v, first, end)
