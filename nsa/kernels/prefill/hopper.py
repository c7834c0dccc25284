"""Which calls go to the kernels for Hopper that are written in Gluon, Triton's lower level.

Gluon is experimental: it serves with the releases of Triton that the kernels were run with, unless
Flags.use_gluon is off. Everything else stays with the Triton kernels of the same meaning.
use_gluon is what the caller's flags say; None: those of this process for the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from nsa.flags import get_flags
from nsa.kernels.launch import pass_over
from nsa.kernels.prefill.packs import MOST_BATCH
from nsa.kernels.tiles import arch_of

WIDTHS = ((64, 64), (128, 128), (192, 128))  # of Q's and V's heads
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")  # of Triton, on an H100 or H200
REMEDY = "Triton kernels serve, up to 2.4 times slower; use torch 2.11 (triton 3.6) or 2.13 (3.7)"


def why_not(device: torch.device, use_gluon: bool | None = None) -> str | None:
    """Return a sentence that says why no call on this device goes to these kernels; None if some
    do."""
    arch = arch_of(device)
    if arch != 90:
        here = f"this is SM {arch // 10}.{arch % 10}" if arch else f"{device} has no SM"
        return f"the Gluon kernels are for SM 9.0, and {here}"
    release = triton.__version__
    if not release.startswith(RELEASES):
        return f"triton {release}: the Gluon kernels were not run with it; {REMEDY}"
    if use_gluon is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        use_gluon = get_flags(name).use_gluon
    return None if use_gluon else "use_gluon is off (NSA_USE_GLUON, or configs/base.yaml)"


def enabled(device: torch.device, use_gluon: bool | None = None) -> bool:
    return why_not(device, use_gluon) is None


def _module(name: str, takes: int) -> Callable[..., ModuleType | None]:
    """Return a function of what usable() of this package's module `name` takes, so many arguments,
    and of use_gluon, that returns the module if it serves the call.

    A planned call keeps why not.
    """

    def serving(*args: Any) -> ModuleType | None:
        device, use_gluon = args[0].device, args[takes] if len(args) > takes else None
        if arch_of(device) != 90:
            return None
        reason = why_not(device, use_gluon)
        if reason is None:
            module = importlib.import_module(f"{__package__}.{name}")
            if module.usable(*args[:takes]):
                return module
            reason = f"it takes {module.TAKES}"
        pass_over(name, reason)
        return None

    return serving


# Their arguments, and what serves else.
forward = _module("span.fwd_hopper", 3)  # q, k, v; span/fwd_triton.py
backward = _module("span.bwd_hopper", 4)  # q, k, v, grad_out; span/bwd_triton.py, in two passes
block_scores = _module("choice.score_hopper", 5)  # q, k_cmp, l, d, l_sel; _block_score_kernel
# The same; block_select, from the log-sum-exp.
_scores_in_attention = _module("choice.score_in_attention_hopper", 5)
# q, k, v, n_sel, block_size, softmax_scale, keys of the longest sequence; blocks/fwd_triton.py
block_forward = _module("blocks.fwd_hopper", 7)
# q, k, v, grad_out, block_size; blocks/bwd_triton.py
block_backward = _module("blocks.bwd_hopper", 5)


def forward_pair(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_win: Tensor, v_win: Tensor,
    use_gluon: bool | None = None,
) -> ModuleType | None:  # fmt: skip
    """forward() of compressed and sliding attention at once; None: each takes its own way."""
    if q.dtype == torch.float16:  # the sum of two branches may pass what that of three does not
        pass_over("span.pair_hopper", "the sum of two branches may not fit fp16")
        return None
    if q.shape[-1] != v_win.shape[-1]:
        pass_over("span.pair_hopper", "it takes Dk = Dv")
        return None
    of_window = forward(q, k_win, v_win, use_gluon)
    return of_window and forward(q, k_cmp, v_cmp, use_gluon)


def forward_with_scores(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, l: int, d: int, l_sel: int, packed: bool = False,
    use_gluon: bool | None = None,
) -> ModuleType | None:  # fmt: skip
    """forward() of compressed attention, alone or with the window, that finds the scores of blocks
    too; None: block_select finds them, from the log-sum-exp."""
    if packed or q.shape[0] * k_cmp.shape[-2] > MOST_BATCH:
        return None  # which ranks packed tiles, see Rows
    scores = _scores_in_attention(q, k_cmp, l, d, l_sel, use_gluon)
    return scores and forward(q, k_cmp, v_cmp, use_gluon)
