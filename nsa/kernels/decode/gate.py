"""The gates of a decode step, from their hidden layer on: silu, product, bias and sigmoid at once.

PyTorch takes three launches, of which the host has to make each for every token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import cdiv, dot_precision

ROWS, COLUMNS, DEPTH = 16, 16, 128  # of a program's product


@triton.jit
def _decode_gate_kernel(
    HIDDEN, WEIGHT, BIAS, OUT, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT = sigmoid(silu(HIDDEN) WEIGHT^T + BIAS): [rows, width], [columns, width], [columns]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, width, DEPTH):
        at = begin + depth
        there = (at < width)[None, :]
        x = tl.load(
            HIDDEN + row[:, None] * width + at[None, :], mask=(row < rows)[:, None] & there,
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        w = tl.load(
            WEIGHT + column[:, None] * width + at[None, :],
            mask=(column < columns)[:, None] & there, other=0.0,
        )  # fmt: skip
        acc = tl.dot((x * tl.sigmoid(x)).to(w.dtype), tl.trans(w), acc, input_precision=PRECISION)
    bias = tl.load(BIAS + column, mask=column < columns, other=0.0).to(tl.float32)
    out = tl.sigmoid(acc + bias[None, :])
    tl.store(
        OUT + row[:, None] * columns + column[None, :], out.to(OUT.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )  # fmt: skip


@on_its_device
def gate(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigmoid(silu(hidden) weight^T + bias) of hidden [.., width] for a few rows, with weight
    [columns, width] and bias [columns], all of one dtype: [.., columns]."""
    columns, width = weight.shape
    hidden, weight, bias = hidden.contiguous(), weight.contiguous(), bias.contiguous()
    out = hidden.new_empty(*hidden.shape[:-1], columns)
    rows = hidden.numel() // width
    launch(
        _decode_gate_kernel, (cdiv(rows, ROWS), cdiv(columns, COLUMNS)),
        hidden, weight, bias, out, rows, columns, width,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, PRECISION=dot_precision(hidden.dtype),
        num_warps=2, num_stages=4,
    )  # fmt: skip
    return out
