"""Selection by blocks as vLLM and cuDNN's frontend compute it, on the tensors of bench_peers.py.

They get the blocks that NSA chose, have no backward, and must be installed by the user, or lie on
PYTHONPATH as a checkout. What they want besides NSA's tensors is made outside of the clock.
"""

import importlib
import importlib.metadata
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.prefill_inputs import Prefill, row_output
from bench.provenance import described


class SelectionPeer:
    """Selection of one sequence by the blocks in x.blocks, which x.prepare("sel") must have made.

    A forward alone: no leaves that get a gradient, and no choice of its own.
    """

    name: str

    def __init__(self, x: Prefill) -> None:
        if x.shape.B != 1:
            raise ValueError(f"a peer's selection is called on one sequence, got B={x.shape.B}")
        self.x = x

    def leaves(self) -> list[Tensor]:
        return []

    def choice(self) -> None:
        return None

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.x.q.device)

    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Outputs of the sampled queries."""
        return self.x.exact("sel", dtype)


class VllmM3(SelectionPeer):
    """vLLM's Triton kernels for MiniMax-M3 (Apache-2.0), whose pages of K and V are blocks.

    With VLLM_MINIMAX_SPARSE_PREFILL_TILE_Q=4 a version that knows it (pull request 57420) takes
    four queries at a time. The size of a block, 128 there, is a constant of the module that its
    calls read: it is set to l_sel.
    """

    def __init__(self, ops: ModuleType, x: Prefill) -> None:
        super().__init__(x)
        s, q = x.shape, x.q
        ops.SPARSE_BLOCK_SIZE = s.l_sel
        self.ops, tile = ops, getattr(ops, "_PREFILL_TILE_Q", 1)
        self.name = "vllm m3" + f", tiles of {tile} queries" * (tile > 1)
        self.pages = -(-s.S // s.l_sel)
        self.cache = q.new_empty(self.pages, s.G, s.l_sel, s.D + s.Dv, requires_grad=False)
        self.blocks = q.new_empty(s.G, s.S, s.n_sel, dtype=torch.int32)
        self.table = self.ints(*range(self.pages))[None]
        self.ends, self.length, self.before = self.ints(0, s.S), self.ints(s.S), self.ints(0)

    def refill(self) -> None:
        x, s = self.x, self.x.shape
        rows = torch.cat([x.k_sel.detach()[0], x.v_sel.detach()[0]], -1)
        rows = F.pad(rows, (0, 0, 0, 0, 0, self.pages * s.l_sel - s.S))
        self.cache.copy_(rows.unflatten(0, (self.pages, s.l_sel)).transpose(1, 2))
        self.blocks.copy_(x.blocks[0].transpose(0, 1))

    def inputs(self) -> list[Tensor]:
        return [self.cache, self.blocks]

    def forward(self) -> Tensor:
        q, s = self.x.q[0], self.x.shape
        out = q.new_empty(s.S, s.HQ, s.Dv)
        self.ops.minimax_m3_sparse_attn(
            q, self.cache, self.blocks, self.table, self.ends, self.length, self.before,
            max_query_len=s.S, num_kv_heads=s.G, sm_scale=s.D**-0.5, output=out,
        )  # fmt: skip
        return out[None]


class CudnnSelection(SelectionPeer):
    """Selection of cuDNN's frontend. It reads chosen blocks whole, the query's own one too, with
    the keys behind the query: that is its truth."""

    name = "cudnn frontend"

    def __init__(self, package: ModuleType, x: Prefill) -> None:
        super().__init__(x)
        s = x.shape
        self.call = package.NSA.selection_attention_wrapper
        self.blocks = x.q.new_empty(s.S, s.G, s.n_sel, dtype=torch.int32)
        self.counts = x.q.new_empty(s.S, s.G, dtype=torch.int32)
        self.ends = self.ints(0, s.S)

    def refill(self) -> None:
        self.blocks.copy_(self.x.blocks[0])
        self.counts.copy_((self.blocks >= 0).sum(-1))

    def inputs(self) -> list[Tensor]:
        return [self.blocks, self.counts]

    def forward(self) -> Tensor:
        x, s = self.x, self.x.shape
        out = self.call(
            x.q[0], x.k_sel[0], x.v_sel[0], self.blocks, self.counts,
            cum_seqlen_q_tensor=self.ends, cum_seqlen_k_tensor=self.ends, max_s_q=s.S, max_s_k=s.S,
            block_size=s.l_sel, scale_softmax=s.D**-0.5,
        )  # fmt: skip
        return out["o_tensor"][None]

    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        x, s = self.x, self.x.shape
        rows = lambda name, a, b: getattr(x, name)[:, a:b].detach().to(dtype)
        see_all = partial(row_output, "sel", s, s.S - 1)
        outs = [see_all(rows("q", t, t + 1), rows, x.blocks[:, t : t + 1]) for t in x.at]
        return torch.cat(outs, 1)


# By the name that --selection has: the class, the module that it calls, what it is installed by.
PEERS = {
    "vllm": (VllmM3, "vllm.models.minimax_m3.common.ops.sparse_attn", "vllm"),
    "cudnn": (CudnnSelection, "cudnn", "nvidia-cudnn-frontend"),
}


def load(name: str) -> tuple[ModuleType, str | None]:
    """The module of a peer, and its version or commit. Raises what its import raises."""
    _, module, distribution = PEERS[name]
    found = importlib.import_module(module)
    try:
        return found, importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return found, described(Path(str(found.__file__)).parent)
