"""Attention functions on projections of your own: all of NSA, a pack, somebody else's indexer.

    python examples/functions.py

Runs on a GPU in bf16 where there is one, else on the CPU in a second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nsa import merge_state, nsa_attention, nsa_attention_shared_kv, selection_attention
from nsa.compress import MLPCompression

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIKE = dict(device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
B, S, HQ, G, D = 1, 512, 8, 2, 64
SIZES = dict(l=32, d=16, l_sel=64, n_sel=4, window=128)


def whole_attention() -> None:
    """Each branch has keys and values of its own (the paper's section 3.3.3), and is trained."""
    q = torch.randn(B, S, HQ, D, **LIKE, requires_grad=True)
    raw_k, raw_v, k_sel, v_sel, k_win, v_win = torch.randn(6, B, S, G, D, **LIKE)
    phi_k, phi_v = (MLPCompression(D, SIZES["l"], SIZES["d"]).to(**LIKE) for _ in "kv")
    gates = torch.rand(B, S, HQ, 3, **LIKE)
    out, aux = nsa_attention(
        q, phi_k(raw_k), phi_v(raw_v), k_sel, v_sel, k_win, v_win, gates, **SIZES, return_aux=True
    )
    out.float().square().mean().backward()
    assert q.grad is not None and phi_k.position.grad is not None
    print("the last query chose blocks", aux["block_indices"][0, -1, 0].tolist(), aux["routes"])


def pack() -> None:
    """Documents of different lengths in a row, without padding."""
    cu_seqlens = torch.tensor([0, 300, 450, 512], dtype=torch.int32, device=DEVICE)
    q, gates = torch.randn(S, HQ, D, **LIKE), torch.rand(S, HQ, 3, **LIKE)
    k, v = torch.randn(2, S, G, D, **LIKE)
    out = nsa_attention_shared_kv(q, k, v, gates, cu_seqlens=cu_seqlens, max_seqlen=300, **SIZES)
    last = nsa_attention_shared_kv(*(x[None, 450:] for x in (q, k, v, gates)), **SIZES)
    torch.testing.assert_close(out[450:], last[0], atol=2e-2, rtol=2e-2)
    print("three documents as one pack:", list(out.shape))


def another_indexer() -> None:
    """Blocks that some other model chose, trained through, beside a prefix that all queries see."""
    q = torch.randn(B, S, HQ, D, **LIKE, requires_grad=True)
    k, v = torch.randn(2, B, S, G, D, **LIKE)
    size = SIZES["l_sel"]
    scores = torch.randn(B, S, G, S // size, device=DEVICE)
    scores[..., 0] = -torch.inf  # block 0 is the prefix
    chosen = scores.topk(4).indices  # in any order; those after the query count for nothing
    counts = torch.randint(1, 5, (B, S, G), device=DEVICE)
    out, lse = selection_attention(
        q, k, v, chosen, block_counts=counts, block_size=size, return_lse=True
    )

    keys, values = (
        x[:, :size].repeat_interleave(HQ // G, 2).transpose(1, 2).float() for x in (k, v)
    )
    scores = q.transpose(1, 2).float() @ keys.mT / D**0.5
    seen = torch.arange(size, device=DEVICE) <= torch.arange(S, device=DEVICE)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    prefix = (scores.softmax(-1) @ values).transpose(1, 2).to(out.dtype)
    out, lse = merge_state(out, lse, prefix, scores.logsumexp(-1).transpose(1, 2))

    counted = torch.arange(4, device=DEVICE) < counts[..., None]
    all_blocks = F.pad(chosen.masked_fill(~counted, -1), (0, 1))  # and block 0
    want = selection_attention(q, k, v, all_blocks, block_size=size)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    (out.float().square().mean() + lse.mean()).backward()
    print("a prefix and another's choice, merged; gradient of q:", q.grad.float().norm().item())


if __name__ == "__main__":
    torch.manual_seed(0)
    whole_attention()
    pack()
    another_indexer()
