"""Inputs for tests and the parity judgement that tests, parity stages and benches share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAE_LIMIT = {
    torch.float16: 1e-3,
    torch.bfloat16: 1e-3,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}

# ---- inputs --------------------------------------------------------------------------------------


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seeded generator; inputs are drawn on CPU, so every device sees the same numbers."""
    return torch.Generator(device).manual_seed(seed)


def randn(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """N(0, 1) drawn in fp64 on CPU, then cast and moved."""
    x = torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
    return x.to(device=device, dtype=dtype).requires_grad_(requires_grad)


def make_qkv(
    B: int = 1, S: int = 32, HQ: int = 4, G: int = 2, Dk: int = 16, Dv: int | None = None, *,
    Skv: int | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", seed: int = 0, requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [B, S, HQ, Dk], k [B, Skv, G, Dk], v [B, Skv, G, Dv], each N(0, 1)."""
    Dv, Skv = Dv or Dk, S if Skv is None else Skv
    kw = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
    return (
        randn(B, S, HQ, Dk, seed=seed * 1000 + 1, **kw),
        randn(B, Skv, G, Dk, seed=seed * 1000 + 2, **kw),
        randn(B, Skv, G, Dv, seed=seed * 1000 + 3, **kw),
    )


RANGE_KINDS = ("few", "many", "mixed")
HOSTILE_RANGE_KINDS = (
    "empty", "one_key", "last_key", "whole", "duplicate", "overlap", "touching", "unsorted",
    "inverted", "out_of_bounds", "some_empty", "all_but_one_empty",
)  # fmt: skip


def _cut(total: int, parts: int, gen: torch.Generator) -> list[int]:
    """`parts` positive lengths with sum `total`."""
    if parts == 1:
        return [total]
    cuts = (torch.randperm(total - 1, generator=gen)[: parts - 1] + 1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _spread(lengths: list[int], Skv: int, gen: torch.Generator) -> list[tuple[int, int]]:
    """Disjoint spans of these lengths at random places; at least one key apart if room allows."""
    free = Skv - sum(lengths)
    gaps = torch.rand(len(lengths) + 1, generator=gen)
    gaps = (gaps / gaps.sum() * free).long().tolist()
    spans, at = [], 0
    for gap, length in zip(gaps, lengths, strict=False):
        at += gap
        spans.append((at, at + length))
        at += length
    return spans


def make_ranges(
    kind: str, B: int, S: int, G: int, Skv: int, L: int, *, seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """int32 ranges [B, S, G, n, 2] over Skv keys whose rows select L keys (hostile kinds differ).

    few: [(0, L)]. many: 8 equal spans. mixed: 2, 4 or 8 random spans with sum L. The hostile kinds
    are what a wrapper must clean: overlapping, inverted, out of bounds, unsorted or empty ranges.
    """
    if not 0 < L <= Skv:
        raise ValueError(f"L must be in 1..Skv={Skv}, got {L}")
    gen = generator(seed)
    rows: list[list[tuple[int, int]]] = []
    for row in range(B * S * G):
        half = max(1, L // 2)
        if kind == "few":
            spans = [(0, L)]
        elif kind == "many":
            n = min(8, L)
            spans = _spread([L // n + (i < L % n) for i in range(n)], Skv, gen)
        elif kind == "mixed":
            n = min([2, 4, 8][int(torch.randint(3, (1,), generator=gen))], L)
            spans = _spread(_cut(L, n, gen), Skv, gen)
        elif kind == "empty":
            spans = [(0, 0)]
        elif kind == "one_key":
            at = int(torch.randint(Skv, (1,), generator=gen))
            spans = [(at, at + 1)]
        elif kind == "last_key":
            spans = [(Skv - 1, Skv)]
        elif kind == "whole":
            spans = [(0, Skv)]
        elif kind == "duplicate":
            spans = [(0, half), (0, half), (0, half)]
        elif kind == "overlap":
            spans = [(0, half), (half // 2, L), (half // 3, half)]
        elif kind == "touching":
            spans = [(0, half), (half, L), (L, min(L + 1, Skv))]
        elif kind == "unsorted":
            spans = [(half, L), (0, half // 2)]
        elif kind == "inverted":
            spans = [(L, half), (0, half), (5, 5)]
        elif kind == "out_of_bounds":
            spans = [(-7, half), (Skv - 1, Skv + 100), (Skv + 3, Skv + 9), (-9, -3)]
        elif kind == "some_empty":
            spans = [(0, 0)] if row % 3 == 0 else [(0, half), (0, 0)]
        elif kind == "all_but_one_empty":
            spans = [(0, L)] if row == B * S * G - 1 else [(0, 0)]
        else:
            raise ValueError(f"kind must be one of {RANGE_KINDS + HOSTILE_RANGE_KINDS}: {kind!r}")
        rows.append(spans)
    n = max(len(r) for r in rows)
    padded = [[*r, *[(0, 0)] * (n - len(r))] for r in rows]
    return torch.tensor(padded, dtype=torch.int32).view(B, S, G, n, 2).to(device)


BLOCK_KINDS = ("random", "clustered", "one_block", "own_only", "first_only", "all", "ragged")


def make_block_indices(
    kind: str, B: int, S: int, G: int, n_sel: int, l_sel: int, *, seed: int = 0, q_start: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Causal block_indices int32 [B, S, G, n_sel], ascending, -1 padded; row s is query q_start+s.

    random: own block and random earlier ones. clustered: the n_sel latest. one_block: block 0 and
    the own block (every query loads one block: worst for key-major kernels). own_only, first_only.
    all: as many as fit from the start, own last. ragged: random with a random number of blocks,
    none included.
    """
    gen = generator(seed)
    result = torch.full((B, S, G, n_sel), -1, dtype=torch.int32)
    for b in range(B):
        for s in range(S):
            own = (q_start + s) // l_sel
            for g in range(G):
                earlier = torch.randperm(own, generator=gen) if own else torch.zeros(0)
                if kind == "random":
                    row = [own, *earlier[: n_sel - 1].tolist()]
                elif kind == "clustered":
                    row = list(range(max(0, own - n_sel + 1), own + 1))
                elif kind == "one_block":
                    row = [0, own][:n_sel] if own else [0]
                elif kind == "own_only":
                    row = [own]
                elif kind == "first_only":
                    row = [0]
                elif kind == "all":
                    row = [*range(min(own, n_sel - 1)), own]
                elif kind == "ragged":
                    count = int(torch.randint(n_sel + 1, (1,), generator=gen))
                    row = [own, *earlier.tolist()][:count]
                else:
                    raise ValueError(f"kind must be one of {BLOCK_KINDS}, got {kind!r}")
                row = sorted(set(map(int, row)))
                result[b, s, g, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return result.to(device)


# ---- parity --------------------------------------------------------------------------------------


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


def _error(out: Tensor, oracle: Tensor) -> Tensor:
    """|out - oracle| in fp64; equal infinities count as no error."""
    out, oracle = out.detach().to("cpu", torch.float64), oracle.detach().to("cpu", torch.float64)
    return torch.where(out == oracle, torch.zeros_like(out), (out - oracle).abs())


def path_agrees(requested: str | None, taken: str | None) -> bool:
    """True when `taken` is the requested route or a variant of it (triton: triton_dense)."""
    if not requested or not taken:
        return False
    return taken == requested or taken.startswith((requested + "_", requested + "/"))


def measure_parity(
    case: str, op: str, out: Tensor, oracle: Tensor, same_dtype: Tensor | None = None, *,
    path_requested: str | None, path_taken: str | None, launches: Mapping[str, int] | None = None,
    expect_kernels: Sequence[str] = (), fallback_reason: str | None = None,
    seed: int | None = None, limit_mae: float | None = None, rows: bool = True,
) -> Parity:  # fmt: skip
    """Judge `out` against the fp64 `oracle`; see assert_parity for the rules. Emits nothing."""
    why: list[str] = []
    dtype = out.dtype
    limit_mae = MAE_LIMIT[dtype] if limit_mae is None else limit_mae
    finite_oracle = oracle.detach().to("cpu", torch.float64)
    scale = finite_oracle[finite_oracle.isfinite()].abs().amax().item() if oracle.numel() else 0.0
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
        host = out.detach().to("cpu", torch.float64)
        kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
        for name, test in kinds.items():
            if not torch.equal(test(host), test(finite_oracle)):
                spots = (test(host) != test(finite_oracle)).nonzero()
                why.append(f"{name} at {len(spots)} other places, first {spots[0].tolist()}")
        error = _error(out, oracle)
        mae, max_abs = error.mean().item(), error.max().item()
        per_row = error.mean(-1) if rows and error.ndim > 1 else error
        flat = int(per_row.flatten().nan_to_num(math.inf).argmax())
        worst = per_row.flatten()[flat].item()
        worst_at = [int(i) for i in torch.unravel_index(torch.tensor(flat), per_row.shape)]
        row_limit = limit_mae
        if same_dtype is not None:
            ref = _error(same_dtype, oracle)
            ref_max = ref.max().item()
            limit_max = 2 * ref_max + floor
            ref_rows = ref.mean(-1) if rows and ref.ndim > 1 else ref
            row_limit = 2 * ref_rows.max().item() + floor
        else:
            row_limit = limit_max = max(limit_mae, floor)
        if not mae <= limit_mae:
            why.append(f"mae {mae:.3g} > {limit_mae:.3g}")
        if not max_abs <= limit_max:
            why.append(f"max_abs {max_abs:.3g} > {limit_max:.3g}")
        if not worst <= row_limit:
            why.append(f"row {worst_at} has mean error {worst:.3g} > {row_limit:.3g}")
        margin = max_abs / limit_max if limit_max else None
    status = "FAIL" if why else "PASS"
    if not path_agrees(path_requested, path_taken):
        status = "INVALID"
        why.append(f"asked for {path_requested}, ran {path_taken} ({fallback_reason})")
    elif str(path_requested).startswith("triton") and not sum((launches or {}).values()):
        status = "INVALID"
        why.append("no kernel launch was counted")
    missing = [k for k in expect_kernels if not (launches or {}).get(k)]
    if missing:
        status = "INVALID"
        why.append(f"never launched: {', '.join(missing)}")

    def number(x: float | None) -> float | None:
        return x if x is not None and math.isfinite(x) else None

    return Parity(
        case, op, str(dtype).removeprefix("torch."), path_requested, path_taken,
        dict(launches or {}), fallback_reason, number(mae), number(max_abs), number(ref_max),
        number(worst), worst_at, limit_mae, limit_max, number(margin), seed, status, why,
    )  # fmt: skip


def assert_parity(
    case: str, op: str, out: Tensor, oracle: Tensor, same_dtype: Tensor | None = None, *,
    path_requested: str | None, path_taken: str | None, launches: Mapping[str, int] | None = None,
    expect_kernels: Sequence[str] = (), fallback_reason: str | None = None,
    seed: int | None = None, limit_mae: float | None = None, rows: bool = True,
) -> Parity:  # fmt: skip
    """Emit a "parity" record and raise AssertionError unless it is a PASS.

    out: what the kernel returned. oracle: the same quantity in fp64. same_dtype: the plain PyTorch
    computation in out's dtype; None only where there is none. PASS needs all of:
    mean error <= limit_mae (fp16/bf16 1e-3, fp32 1e-4), max error <= 2x that of same_dtype (plus
    one rounding of the largest value), the worst row (last dimension) <= 2x same_dtype's worst row
    by the same floor, the same NaN/inf places, the path asked for, and every kernel of
    `expect_kernels` among `launches` (as launches.recording() collected them).
    """
    from bench.records import emit

    parity = measure_parity(
        case, op, out, oracle, same_dtype, path_requested=path_requested, path_taken=path_taken,
        launches=launches, expect_kernels=expect_kernels, fallback_reason=fallback_reason,
        seed=seed, limit_mae=limit_mae, rows=rows,
    )  # fmt: skip
    emit("parity", dataclasses.asdict(parity))
    assert parity.status == "PASS", f"{case} {op}: {parity.status}: " + "; ".join(parity.why)
    return parity


def grads(fn: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor) -> list[Tensor]:
    """Gradients of fn(*inputs) with the given output gradient, on fresh leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    return list(torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))


def assert_finite(**tensors: Tensor) -> None:
    """Fail and name the tensor that holds NaN or infinity."""
    for name, x in tensors.items():
        bad = ~x.isfinite()
        assert not bad.any(), f"{name} is not finite at {bad.nonzero()[0].tolist()}"
