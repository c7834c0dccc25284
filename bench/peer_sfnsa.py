"""sfnsa, the fastest other public NSA, on the tensors of bench_peers.py, from its own checkout.

mdy666/Scalable-Flash-Native-Sparse-Attention (MIT): packed tensors [t, h, d], sizes in a class of
its own, gates as logits. Its compressed attention, choice of blocks, selection and gated sum are
called one after another as its module for one GPU does. Its window needs a build of flash-attn;
here that is FA-2, the package's or torch's, whichever nsa.kernels.fa2 finds.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bench.prefill_inputs import Prefill, sampled_gradients
from nsa.kernels import fa2

PACKAGE = "flash_nsa"


def load(folder: Path) -> ModuleType:
    """The peer's package from its checkout. Raises what its import raises."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(str(folder))


class Sfnsa:
    """Its whole NSA on the inputs of `x` (one sequence), and what its results must be.

    Its gates are logits of numbers that bf16 rounds otherwise, and near ties it may choose other
    blocks than NSA: the truth is computed with its own gates and blocks. choice() says how good
    these blocks are.
    """

    name = "sfnsa"

    def __init__(self, package: ModuleType, x: Prefill, window: Callable = fa2.sliding_fa2) -> None:
        s = self.shape = x.shape
        if s.B != 1:
            raise ValueError(f"sfnsa is called on one sequence, got B={s.B}")
        self.x, self.window = x, window
        self.ops = package
        self.combine = importlib.import_module(f"{PACKAGE}.ops.combine").fused_sigmoid_combine
        self.logits = torch.empty_like(x.gates)
        self.topk: Tensor | None = None
        package.NSAHelper.set_hyperparameters(
            kernel_size=s.l, stride=s.d, block_size=s.l_sel, window_size=s.w, top_n=s.n_sel,
            num_init_blocks=1, num_local_blocks=2,
        )  # fmt: skip
        cu_seqlens = torch.tensor([0, s.S], dtype=torch.int32, device=x.q.device)
        package.NSAHelper.init_cu_seqlens(cu_seqlens)

    def refill(self) -> None:
        """Its logits for the present gates, which may be 0 or 1 in bf16."""
        tiny = torch.finfo(torch.bfloat16).eps
        gates = self.x.gates.detach().float()
        self.logits.detach().copy_(gates.clamp(tiny, 1 - tiny).logit())

    def inputs(self) -> list[Tensor]:
        return [self.logits]

    def leaves(self) -> list[Tensor]:
        """What gets a gradient, as NSA's own leaves with the logits for the gates."""
        return [*self.x.inputs()[:7], self.logits]

    def forward(self) -> Tensor:
        x, scale = self.x, self.shape.D**-0.5
        q, k_cmp, v_cmp, k_sel, v_sel, logits = (
            t[0] for t in (x.q, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, self.logits)
        )
        out_cmp, lse = self.ops.compress_attn(q, k_cmp, v_cmp, sm_scale=scale)
        self.topk, _ = self.ops.slc_topk_indices(
            q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True
        )
        out_sel = self.ops.select_attn(q, k_sel, v_sel, self.topk, sm_scale=scale)
        out_win = self.window(x.q, x.k_win, x.v_win, window=self.shape.w)[0]
        return self.combine(out_cmp, out_sel, out_win, logits)[None]

    def blocks(self) -> Tensor:
        """The blocks of its last call as NSA numbers them [1, S, G, n_sel], -1 for none."""
        own = torch.arange(self.shape.S, device=self.topk.device) // self.shape.l_sel
        blocks = self.topk.transpose(0, 1)
        return blocks.masked_fill(blocks > own[:, None, None], -1)[None]

    def choice(self) -> float:
        """The worst sampled query: the scores of its blocks over the best possible, in fp64."""
        return self.x.block_quality(self.blocks()).min().item()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        x = self.x
        kept = x.blocks, x.gates
        x.blocks, x.gates = self.blocks(), self.logits.detach().double().sigmoid()
        try:
            yield
        finally:
            x.blocks, x.gates = kept

    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Outputs of the sampled queries."""
        with self._in_place():
            return self.x.exact("full", dtype)

    def gradients(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Gradients of the sampled queries' outputs: dq of these, then of the other leaves."""
        with self._in_place():
            *grads, gates = sampled_gradients(self.x, "full", dtype)
            slope = (self.x.gates * (1 - self.x.gates)).to(dtype)
        return [*grads, gates * slope]
