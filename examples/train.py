"""A training loop to copy: documents of different lengths as packs, bf16, a checkpoint, resuming.

    python examples/train.py [--steps 40] [--save model.pt]

A small language model reads this repository's own pages byte by byte. On a GPU it trains under bf16
autocast, on a CPU in some ten seconds. scripts/train.py does it over several GPUs with FSDP2.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import NSAConfig, NSALanguageModel
from nsa.generate import generate, load_checkpoint, save_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
CONFIG = NSAConfig(
    dim=64, heads=4, groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=4, window=32
)
PACK, LONGEST = 256, 120  # tokens of a step, and of a document


def packs(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens [PACK + 1], cu_seqlens) without end: cuts of pages, each a sequence of its own."""
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.tensor(list(page.read_bytes())) for page in PAGES]
    while True:
        parts, room = [], PACK + 1
        while room:
            text = texts[int(torch.randint(len(texts), (1,), generator=draw))]
            n = min(int(torch.randint(40, LONGEST, (1,), generator=draw)), room)
            at = int(torch.randint(len(text) - n + 1, (1,), generator=draw))
            parts.append(text[at : at + n])
            room -= n
        # The last token of all has nothing after it to predict, and is no query.
        lengths = [len(part) for part in parts[:-1]] + [len(parts[-1]) - 1]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        yield torch.cat(parts).to(DEVICE), ends.to(DEVICE)


def loss_of(model: NSALanguageModel, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(tokens[:-1], cu_seqlens, max_seqlen=LONGEST)
    targets = tokens[1:].clone()
    targets[cu_seqlens[1:-1].long() - 1] = -100  # no document predicts the next one
    return F.cross_entropy(logits.float(), targets, ignore_index=-100)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", type=Path, metavar="FILE", help="resumed from where it exists")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    torch.manual_seed(0)
    if args.save and args.save.exists():
        model = load_checkpoint(args.save, DEVICE).train()
    else:
        model = NSALanguageModel(CONFIG, vocab_size=256, n_layers=2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, (tokens, cu_seqlens) in enumerate(itertools.islice(packs(0), args.steps)):
        loss = loss_of(model, tokens, cu_seqlens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(f"last loss {losses[-1]:.3f}")
    if args.save:
        save_checkpoint(args.save, model)
    prompt = torch.tensor([list(b"The ")], device=DEVICE)
    tokens = generate(model.eval(), prompt, max_new_tokens=20).tokens
    print("it writes:", bytes(tokens[0].tolist()).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
