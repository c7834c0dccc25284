"""Prefill and training kernels: compressed, selected and sliding attention, the choice of blocks.

Importing this package needs Triton; a kernel's own module is imported when it runs.
"""

from nsa.kernels.prefill.blocks.ops import selection_blocks_triton
from nsa.kernels.prefill.choice.ops import select_blocks_triton
from nsa.kernels.prefill.fused import nsa_prefill_triton
from nsa.kernels.prefill.span.ops import compressed_attention_triton, sliding_attention_triton
from nsa.kernels.prefill.turn import split_turned_triton

__all__ = [
    "compressed_attention_triton",
    "nsa_prefill_triton",
    "select_blocks_triton",
    "selection_blocks_triton",
    "sliding_attention_triton",
    "split_turned_triton",
]
