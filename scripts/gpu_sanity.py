"""The three smallest proofs that a box works: a matmul, a Triton kernel, a selection kernel.

    python scripts/gpu_sanity.py
    TRITON_INTERPRET=1 python scripts/gpu_sanity.py --interpret       # without a GPU

Each is held against fp64. Exit code: 0 all right, 1 one is wrong, 3 there is nothing to run on.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench.parity import measure_parity
from bench.records import doc_parser, emit, note
from nsa import launches
from nsa.dispatch import interpreting


def report(
    case: str, out: torch.Tensor, ref: torch.Tensor, same: torch.Tensor, path: str, seed: int,
    counts: Mapping[str, int] | None = None, kernels: Sequence[str] = (),
) -> bool:  # fmt: skip
    """Emit one parity row: `out` against the fp64 `ref`, beside `same`, PyTorch in out's dtype."""
    parity = measure_parity(
        f"sanity/{case}", case, out, ref, same, path_requested=path, path_taken=path,
        launches=counts, expect_kernels=kernels, seed=seed,
    )  # fmt: skip
    emit("parity", dataclasses.asdict(parity))
    good = parity.status == "PASS"
    error = "-" if parity.max_abs is None else f"{parity.max_abs:.3g}"
    limit = f"limit {parity.limit_max_abs:.3g}"
    text = f"{'ok  ' if good else 'BAD '} {case:20} max-abs {error} ({limit})"
    print("; ".join([text, *parity.why]))
    return good


def matmul(device: str, dtype: torch.dtype) -> bool:
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(64, 64, generator=gen).to(dtype) / 64  # small products: bf16 rounds by value
    b = torch.randn(64, 64, generator=gen).to(dtype)
    ref = a.double() @ b.double()
    out = a.to(device) @ b.to(device)
    return report("matmul", out, ref, a @ b, "torch", seed=0)


def triton_axpy(device: str) -> bool:
    """A kernel of one line: proves that Triton compiles, launches and writes on this box."""
    global tl  # a jitted function looks names up in its module
    import triton
    import triton.language as tl

    @triton.jit
    def _axpy_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        y = tl.load(y_ptr + at, mask=at < n, other=0.0)
        tl.store(out_ptr + at, 2.0 * x + y, mask=at < n)

    gen = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 100, generator=gen), torch.randn(10, 100, generator=gen)
    xd, yd = x.to(device), y.to(device)
    out = torch.full_like(xd, float("nan"))
    with launches.recording() as counts:
        start = time.perf_counter()
        _axpy_kernel[(triton.cdiv(x.numel(), 128),)](xd, yd, out, x.numel(), BLOCK=128)
        if device == "cuda":
            torch.cuda.synchronize()
        first_ms = (time.perf_counter() - start) * 1e3
        if counts.source != "hook":
            launches.bump("_axpy_kernel")
    emit("metric", {"name": "first_call_ms", "value": round(first_ms, 1), "unit": "ms"})
    return report(
        "triton_axpy", out, 2 * x.double() + y.double(), 2 * x + y, "triton", 1, counts,
        kernels=("_axpy_kernel",),
    )  # fmt: skip


def selection(device: str, dtype: torch.dtype) -> bool:
    """sel_attn_fwd_dense at a small shape against plain softmax attention in fp64."""
    from nsa.kernels.triton_sel_kernel.sel_fwd import sel_attn_fwd_dense

    N, H, L, D = 4, 4, 48, 32
    gen = torch.Generator().manual_seed(2)
    Q, K, V = (torch.randn(N, n, D, generator=gen).to(dtype) for n in (H, L, L))
    plain = lambda q, k, v: torch.softmax(q @ k.transpose(1, 2) / D**0.5, dim=-1) @ v
    with launches.recording() as counts:
        out = sel_attn_fwd_dense(Q.to(device), K.to(device), V.to(device))
    return report(
        "sel_attn_fwd_dense", out, plain(Q.double(), K.double(), V.double()), plain(Q, K, V),
        "triton", 2, counts,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("--interpret", action="store_true", help="on CPU, kernels interpreted")
    args = parser.parse_args(argv)
    if args.interpret:
        if not interpreting():
            parser.error("--interpret needs TRITON_INTERPRET=1 in the environment")
        device, dtype = "cpu", torch.float16  # the interpreter's bf16 dot is wrong
    elif torch.cuda.is_available():
        device, dtype = "cuda", torch.bfloat16
        properties = torch.cuda.get_device_properties(0)
        print(f"{properties.name}, SM {properties.major}.{properties.minor}")
    else:
        note("torch sees no CUDA device", "warn")
        return 3
    good = [matmul(device, dtype), triton_axpy(device), selection(device, dtype)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
