"""The parity judgement that tests, parity stages and benches share.

A result is right when its mean error, its largest error and its worst row are, against the fp64
oracle and beside the plain PyTorch computation in the same dtype, and the kernel asked for ran.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from bench.records import emit, is_number, path_agrees

MAE_LIMIT = dict.fromkeys((torch.float16, torch.bfloat16), 1e-3)
MAE_LIMIT |= {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass
class Parity:
    """One comparison with the oracle; the fields are those of a "parity" record."""

    case: str
    op: str
    dtype: str
    path_requested: str | None
    path_taken: str | None
    launches: dict[str, int]
    fallback_reason: str | None
    mae: float | None
    max_abs: float | None
    ref_same_dtype_max_abs: float | None
    worst_row: float | None
    worst_row_index: list[int] | None
    limit_mae: float
    limit_max_abs: float
    margin: float | None
    seed: int | None
    status: str = "PASS"
    why: list[str] = field(default_factory=list)


LARGE = 1 << 20  # elements: from here on a host takes a good part of a second to compare


def _exact(x: Tensor, like: Tensor) -> Tensor:
    """x in fp64 on the CPU, or where `like` is if that is large."""
    return x.detach().to(like.device if like.numel() >= LARGE else "cpu", torch.float64)


def _error(out: Tensor, oracle: Tensor) -> Tensor:
    """|out - oracle| of fp64 tensors; equal infinities count as no error."""
    return torch.where(out == oracle, torch.zeros_like(out), (out - oracle).abs())


_VARIANT = re.compile(r"_sel_attn_fwd_(dense|varlen|ranges)(_group)?_kernel")


def triton_path(launched: Mapping[str, int]) -> str | None:
    """The Triton route by the kernels that were launched: "triton" with the variants of the
    selection forward among them (triton_ranges, triton_dense_group); None without a launch."""
    names = [name for name, count in launched.items() if count]
    found = (_VARIANT.fullmatch(name) for name in sorted(names))
    words = [word for match in found if match for word in match[0].split("_")[4:-1]]
    return "_".join(["triton", *dict.fromkeys(words)]) if names else None


def never_launched(expected: Sequence[str], launches: Mapping[str, int]) -> list[str]:
    """Return those of the expected kernels, names or patterns, that no launch was counted of."""
    ran = [name for name, count in launches.items() if count]
    return [kernel for kernel in expected if not any(fnmatch(name, kernel) for name in ran)]


def measure_parity(
    case: str, op: str, out: Tensor, oracle: Tensor, same_dtype: Tensor | None = None, *,
    path_requested: str | None, path_taken: str | None, launches: Mapping[str, int] | None = None,
    expect_kernels: Sequence[str] = (), fallback_reason: str | None = None,
    seed: int | None = None, limit_mae: float | None = None, rows: bool = True,
) -> Parity:  # fmt: skip
    """Judge `out` against the fp64 `oracle`; see assert_parity for the rules. Emits nothing."""
    why: list[str] = []
    unfit: str | None = None  # why the plain computation is no measure, which says nothing of `out`
    dtype = out.dtype
    limit_mae = MAE_LIMIT[dtype] if limit_mae is None else limit_mae
    truth = _exact(oracle, out)
    finite = truth[truth.isfinite()]
    scale = finite.abs().amax().item() if finite.numel() else 0.0
    # The rounding of the result itself, and for fp32 the order of the sums.
    floor = torch.finfo(dtype).eps * scale * (16 if dtype in (torch.float32, torch.float64) else 1)
    mae = max_abs = ref_max = worst = margin = None
    worst_at: list[int] | None = None
    limit_max = limit_mae if same_dtype is None else 0.0

    if tuple(out.shape) != tuple(oracle.shape):
        why.append(f"shape {list(out.shape)} is not the oracle's {list(oracle.shape)}")
    elif oracle.numel() == 0:
        why.append("nothing was compared")
    else:
        given = _exact(out, out)
        kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
        for name, test in kinds.items():
            if not torch.equal(test(given), test(truth)):
                spots = (test(given) != test(truth)).nonzero()
                why.append(f"{name} at {len(spots)} other places, first {spots[0].tolist()}")
        error = _error(given, truth)
        mae, max_abs = error.mean().item(), error.max().item()
        per_row = error.mean(-1) if rows and error.ndim > 1 else error
        flat = int(per_row.flatten().nan_to_num(math.inf).argmax())
        worst = per_row.flatten()[flat].item()
        worst_at = [int(i) for i in torch.unravel_index(torch.tensor(flat), per_row.shape)]
        row_limit = limit_max = max(limit_mae, floor)
        if same_dtype is not None and same_dtype.shape != out.shape:
            unfit = f"shape {list(same_dtype.shape)} of the plain computation is not that of out"
        elif same_dtype is not None:
            ref = _error(_exact(same_dtype, out), truth)
            ref_max = ref.max().item()
            if math.isfinite(ref_max):
                limit_max = 2 * ref_max + floor
                ref_rows = ref.mean(-1) if rows and ref.ndim > 1 else ref
                row_limit = 2 * ref_rows.max().item() + floor
            else:
                unfit = "the plain computation has NaN or infinities where the oracle has none"
        if not mae <= limit_mae:
            why.append(f"mae {mae:.3g} > {limit_mae:.3g}")
        if not (unfit or max_abs <= limit_max):
            why.append(f"max_abs {max_abs:.3g} > {limit_max:.3g}")
        if not (unfit or worst <= row_limit):
            why.append(f"row {worst_at} has mean error {worst:.3g} > {row_limit:.3g}")
        margin = max_abs / limit_max if limit_max else None
    status = "FAIL" if why else "INVALID" if unfit else "PASS"
    if unfit:
        why.append(unfit)
    if path_requested == "triton" and path_agrees("triton", path_taken) and launches:
        path_taken = triton_path(launches)  # what ran, not what the caller takes for granted
    if not path_agrees(path_requested, path_taken):
        status = "INVALID"
        why.append(f"asked for {path_requested}, ran {path_taken} ({fallback_reason})")
    elif str(path_requested).startswith("triton") and not sum((launches or {}).values()):
        status = "INVALID"
        why.append("no kernel launch was counted")
    if missing := never_launched(expect_kernels, launches or {}):
        status = "INVALID"
        why.append(f"never launched: {', '.join(missing)}")

    number = lambda x: x if is_number(x) else None
    return Parity(
        case, op, str(dtype).removeprefix("torch."), path_requested, path_taken,
        dict(launches or {}), fallback_reason, number(mae), number(max_abs), number(ref_max),
        number(worst), worst_at, limit_mae, limit_max, number(margin), seed, status, why,
    )  # fmt: skip


def assert_parity(
    case: str, op: str, out: Tensor, oracle: Tensor, same_dtype: Tensor | None = None, **how: Any
) -> Parity:
    """Emit a "parity" record and raise AssertionError unless it is a PASS; how: as measure_parity.

    out: what the kernel returned. oracle: the same quantity in fp64. same_dtype: the plain PyTorch
    computation in out's dtype; None only where there is none. PASS needs all of:
    mean error <= limit_mae (fp16/bf16 1e-3, fp32 1e-4), max error <= 2x that of same_dtype (plus
    one rounding of the largest value), the worst row (last dimension) <= 2x same_dtype's worst row
    by the same floor, the same NaN/inf places, the path asked for, and every kernel of
    `expect_kernels` (a name, or a pattern such as _span_bwd_*) among `launches` (as
    launches.recording() collected them). On route "triton" the record's path_taken names the
    variants that `launches` shows, whatever the caller says.
    """
    parity = measure_parity(case, op, out, oracle, same_dtype, **how)
    emit("parity", dataclasses.asdict(parity))
    assert parity.status == "PASS", f"{case} {op}: {parity.status}: " + "; ".join(parity.why)
    return parity
