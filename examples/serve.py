"""Serving over pages: requests of different lengths share one pool of pages and decode together.

    python examples/serve.py

One attention layer, as an engine sees it: `nsa_with_kvcache` appends to caches that the engine
owns, `block_table` says which pages are whose, `cache_seqlens` how long each sequence is. A request
that starts with the system prompt names its pages instead of computing them again. Every token is
checked against the layer run on the whole sequence. Runs on a GPU in bf16, else on the CPU in a
second.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa import NSAConfig, nsa_attention, nsa_with_kvcache
from nsa.compress import MLPCompression

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIKE = dict(device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
C = NSAConfig(dim=64, heads=4, groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=3, window=24)
PAGE, PAGES = 16, 32  # tokens of a page, and how many there are for all requests
NEW = ("k_raw", "v_raw", "k_sel", "v_sel", "k_win", "v_win")


class Layer(nn.Module):
    """Projections of one layer, without rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(C.dim, C.heads * C.d_k, bias=False)
        self.kv = nn.Linear(C.dim, 6 * C.groups * C.d_k, bias=False)
        self.gate = nn.Linear(C.dim, C.heads * 3)
        self.phi_k, self.phi_v = (MLPCompression(C.d_k, C.l, C.d) for _ in "kv")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Queries, gates, and keys and values by name, each [B, T, G, D]."""
        kv = self.kv(x).unflatten(-1, (6, C.groups, C.d_k)).unbind(-3)
        q = self.q(x).unflatten(-1, (C.heads, C.d_k))
        gates = self.gate(x).sigmoid().unflatten(-1, (C.heads, 3))
        return q, gates, {n: x.contiguous() for n, x in zip(NEW, kv, strict=True)}

    def forward(self, x: Tensor) -> Tensor:
        """The whole sequence at once, which is what serving must give."""
        q, gates, new = self.project(x)
        cmp = self.phi_k(new.pop("k_raw")), self.phi_v(new.pop("v_raw"))
        return nsa_attention(q, *cmp, *new.values(), gates, **C.sizes())


class Pool:
    """The pages of all requests, and which of them are free."""

    def __init__(self) -> None:
        make = lambda rows: torch.empty(PAGES, rows, C.groups, C.d_k, **LIKE)
        self.cmp, self.raw, self.sel, self.win = (
            (make(rows), make(rows)) for rows in (PAGE // C.d, PAGE, PAGE, PAGE)
        )
        self.free = list(range(PAGES))

    def grow(self, pages: list[int], tokens: int) -> None:
        """Give a request pages for so many tokens."""
        while len(pages) * PAGE < tokens:
            pages.append(self.free.pop())


def step(
    layer: Layer, pool: Pool, x: Tensor, tables: list[list[int]], lengths: list[int]
) -> Tensor:
    """Append the T newest tokens x [B, T, dim] of each request and attend from them."""
    for pages, length in zip(tables, lengths, strict=True):
        pool.grow(pages, length + x.shape[1])
    longest = max(map(len, tables))
    block_table = torch.tensor([p + [0] * (longest - len(p)) for p in tables], device=DEVICE)
    q, gates, new = layer.project(x)
    return nsa_with_kvcache(
        q, *pool.cmp, *pool.sel, *pool.win, gates, **new,
        k_raw_cache=pool.raw[0], v_raw_cache=pool.raw[1], phi_k=layer.phi_k, phi_v=layer.phi_v,
        block_table=block_table.int(), cache_seqlens=torch.tensor(lengths, device=DEVICE).int(),
        **C.sizes(),
    )  # fmt: skip


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer, pool = Layer().to(**LIKE), Pool()
    system = torch.randn(1, 3 * PAGE, C.dim, **LIKE)
    shared: list[int] = []
    step(layer, pool, system, [shared], [0])

    prompts = [torch.randn(1, n, C.dim, **LIKE) for n in (40, 7, 23)]
    tables = [list(shared) for _ in prompts]
    lengths = [system.shape[1]] * len(prompts)
    outs = []
    for i, prompt in enumerate(prompts):  # prefill, in chunks as an engine would cut them
        chunks = [
            step(layer, pool, x, [tables[i]], [lengths[i] + 16 * n])
            for n, x in enumerate(prompt.split(16, 1))
        ]
        outs.append(chunks)
        lengths[i] += prompt.shape[1]
    texts = [torch.cat([system, prompt], 1) for prompt in prompts]
    for _ in range(20):  # all requests decode together, each at a length of its own
        x = torch.randn(len(prompts), 1, C.dim, **LIKE)
        out = step(layer, pool, x, tables, lengths)
        for i in range(len(prompts)):
            outs[i].append(out[i : i + 1])
            texts[i] = torch.cat([texts[i], x[i : i + 1]], 1)
            lengths[i] += 1
    for chunks, text in zip(outs, texts, strict=True):
        want = layer(text)[:, system.shape[1] :]
        torch.testing.assert_close(torch.cat(chunks, 1), want, atol=2e-2, rtol=2e-2)
    used = PAGES - len(pool.free)
    alone = sum(-(-n // PAGE) for n in lengths)
    print(f"{len(prompts)} requests of {lengths} tokens in {used} pages; without sharing {alone}")


if __name__ == "__main__":
    main()
