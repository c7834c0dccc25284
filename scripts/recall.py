"""Needles in a trained model: does it recall what was hidden in a text longer than any it has seen?

    python scripts/recall.py                                     # CPU, twenty minutes
    python scripts/recall.py --attention nsa,dense --lengths 128,256,512,1024
    python scripts/recall.py --device cuda --seq 2048 --lengths 1024,2048,4096,8192,16384

A text is noise, bytes below 128, in which pairs are hidden: a key (128 to 191) and, right behind
it, a value (192 to 255); no key comes twice. At its end every key is asked for once, in another
order, and the byte after it must be its value. Keys and values are new in every text, so nothing
but finding the pair gives the answer: a guess among a text's values is right once in --pairs.

The model is scripts/train.py's, trained on the answers alone, at lengths from an eighth of --seq to
--seq, the short ones more often at first. Then it is asked at --lengths, trained ones and longer,
and what it found is counted by the depth of the pair, in tenths of the text. As a control `dense`
is the same model with dense attention.

Into --out: recall.csv (attention, tokens, depth, found, n) and recall-<attention>.svg.

Exit code: 0 done, 1 a loss is not finite or less than --least was found at --seq, 2 usage error.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.records import check_flags, emit, integers, note, write_csv
from scripts.needle import DEPTHS
from scripts.train import ATTENTIONS, new_model
from scripts.training import PRESETS, autocast, learning_rate, make_optimizer

COLUMNS = ("attention", "tokens", "depth", "found", "n")
KEYS, VALUES = range(128, 192), range(192, 256)


@dataclass(frozen=True)
class Texts:
    """tokens int64 [B, S]; asked int64 [Q]: where the keys stand that are asked for, an answer
    behind each; places int64 [B, Q]: where the pair of each answer is hidden."""

    tokens: Tensor
    asked: Tensor
    places: Tensor

    @property
    def answers(self) -> Tensor:
        return self.tokens[:, self.asked + 1]


def make_texts(batch: int, tokens: int, pairs: int, draw: torch.Generator) -> Texts:
    """Texts of `tokens` bytes with `pairs` pairs, all of them asked for.

    Raises ValueError where the text has no room for pairs and questions.
    """
    hay = tokens - 2 * pairs
    if not 0 < pairs <= len(KEYS) or hay < 2 * pairs:
        raise ValueError(
            f"pairs must be from 1 to {len(KEYS)} and at most a quarter of the {tokens} tokens, "
            f"got {pairs}"
        )
    some = lambda n, of: torch.rand(batch, of, generator=draw).argsort(1)[:, :n]
    text = torch.randint(0, KEYS[0], (batch, tokens), generator=draw)
    keys = KEYS[0] + some(pairs, len(KEYS))
    values = torch.randint(VALUES[0], VALUES[-1] + 1, (batch, pairs), generator=draw)
    places = 2 * some(pairs, hay // 2)
    order = some(pairs, pairs)
    row, asked = torch.arange(batch)[:, None], hay + 2 * torch.arange(pairs)
    text[row, places], text[row, places + 1] = keys, values
    text[row, asked], text[row, asked + 1] = keys.gather(1, order), values.gather(1, order)
    return Texts(text, asked, places.gather(1, order))


def lengths_at(step: int, steps: int, seq: int, pairs: int) -> tuple[int, ...]:
    """Among which lengths a step's is drawn: near pairs teach what far ones then only need."""
    shortest = max(seq // 8, 4 * pairs)
    if step < steps // 2:
        return shortest, shortest, max(seq // 4, shortest), max(seq // 2, shortest)
    return shortest, max(seq // 4, shortest), max(seq // 2, shortest), seq


def train(
    model: nn.Module, args: argparse.Namespace, device: torch.device,
    say: Callable[[str], None] = print,
) -> list[float]:  # fmt: skip
    """Train in place on the answers; the loss of every step, in nats per answer. Ctrl-C ends it
    after the step, with what was learnt; a second one ends it at once."""
    stop: list[int] = []

    def interrupt(number: int, _frame: Any) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        return _train(model, args, device, say, stop)
    finally:
        signal.signal(signal.SIGINT, before)


def _train(
    model: nn.Module, args: argparse.Namespace, device: torch.device, say: Callable[[str], None],
    stop: Sequence[int],
) -> list[float]:  # fmt: skip
    optimizer = make_optimizer(model, args.lr)
    draw = torch.Generator().manual_seed(args.seed)
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        among = lengths_at(step, args.steps, args.seq, args.pairs)
        tokens = among[int(torch.randint(len(among), (1,), generator=draw))]
        texts = make_texts(args.batch, tokens, args.pairs, draw)
        with autocast(device):
            logits = model(texts.tokens.to(device))[:, texts.asked]
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), texts.answers.flatten().to(device)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps or stop:
            recent = torch.stack(losses[-args.log_every :]).mean().item()
            rate = (time.perf_counter() - started) / (step + 1)
            say(f"step {step + 1}/{args.steps} loss {recent:.3f} ({rate:.2f} s a step)")
            if stop or not math.isfinite(recent):
                break
    return torch.stack(losses).tolist()


@torch.no_grad()
def ask(
    model: nn.Module, tokens: int, texts: int, pairs: int, device: torch.device, seed: int = 1,
    batch_tokens: int = 1 << 16,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows {tokens, depth, found, n}: of n pairs hidden at a depth of [depth, depth + 0.1) of texts
    of `tokens`, how many answers were right."""
    model.eval()
    draw = torch.Generator().manual_seed(seed)
    found, n = torch.zeros(DEPTHS, dtype=torch.long), torch.zeros(DEPTHS, dtype=torch.long)
    while texts > 0:
        batch = min(texts, max(1, batch_tokens // tokens))
        these = make_texts(batch, tokens, pairs, draw)
        with autocast(device):
            logits = model(these.tokens.to(device))[:, these.asked]
        # Whatever byte is likeliest, not only among values.
        right = logits.argmax(-1).cpu() == these.answers
        depth = these.places * DEPTHS // tokens
        n += torch.bincount(depth.flatten(), minlength=DEPTHS)
        found += torch.bincount(depth[right], minlength=DEPTHS)
        texts -= batch
    return [
        {"tokens": tokens, "depth": i / DEPTHS, "found": int(found[i]), "n": int(n[i])}
        for i in range(DEPTHS)
    ]


def share(rows: Sequence[dict[str, Any]], tokens: int) -> float:
    mine = [r for r in rows if r["tokens"] == tokens]
    return sum(r["found"] for r in mine) / max(1, sum(r["n"] for r in mine))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--model", choices=sorted(PRESETS), help="sizes of scripts/train_showcase.py's model on a "
        "CPU or a GPU, by default those of --device; the small one learns in fewer steps")
    add("--attention", default="nsa", help="nsa, dense or nsa,dense: one after the other")
    add("--steps", type=int, default=8000)
    add("--seq", type=int, help="longest text trained on (128, with the GPU's model 2048)")
    add("--batch", type=int, default=32, help="texts of a step")
    add("--pairs", type=int, default=16, help="pairs in a text, each asked for")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--lengths", type=integers, help="ask at texts of so many tokens, a,b,c; default from a "
        "half of --seq to eight times as long")  # fmt: skip
    add("--texts", type=int, default=100, help="texts per length")
    add("--least", type=float, default=0.9, help="share that must be found at --seq")
    add("--seed", type=int, default=0)
    add("--log_every", type=int, default=100, metavar="N")
    add("--out", type=Path, default=Path("artifacts/recall"), metavar="DIR")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    args.model = args.model or args.device
    args.seq = args.seq or (2048 if args.model == "cuda" else 128)
    args.lengths = args.lengths or [args.seq * n // 2 for n in (1, 2, 4, 8, 16)]
    args.attention = args.attention.split(",")
    if not set(args.attention) <= set(ATTENTIONS) or len(set(args.attention)) < len(args.attention):
        parser.error(f"--attention must be from {', '.join(ATTENTIONS)}, got {args.attention}")
    for name in ("steps", "seq", "batch", "pairs", "texts", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not args.lr > 0 or not 0 <= args.least <= 1:
        parser.error("--lr must be above 0 and --least from 0 to 1")
    if args.pairs > len(KEYS):
        parser.error(f"--pairs must be at most {len(KEYS)}, got {args.pairs}")
    if min(args.seq, *args.lengths) < 4 * args.pairs:
        parser.error(
            f"--seq and --lengths must be at least 4 * pairs = {4 * args.pairs}, "
            f"got {min(args.seq, *args.lengths)}"
        )
    if args.seq not in args.lengths:
        args.lengths = sorted([*args.lengths, args.seq])
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    check_flags(parser)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    preset, rows, code = PRESETS[args.model], [], 0
    for attention in args.attention:
        torch.manual_seed(args.seed)
        model = new_model(attention, preset.config, preset.layers, device)
        say = lambda text, name=attention: print(f"{name}: {text}", flush=True)
        losses = train(model, args, device, say)
        if not math.isfinite(losses[-1]):
            say("the loss is not finite")
            code = 1
            continue
        mine = []
        for tokens in args.lengths:
            mine += ask(model, tokens, args.texts, args.pairs, device)
            good = share(mine, tokens)
            say(f"{tokens:7} tokens: {good:.1%} found, a guess {1 / args.pairs:.1%}")
            emit("metric", {"name": f"recall/{attention}/{tokens}", "value": good, "unit": "1"})
        reached = share(mine, args.seq) >= args.least
        emit("test", {
            "nodeid": f"recall::{attention}", "outcome": "passed" if reached else "failed",
            "duration_s": 0.0,
            "reason": f"{share(mine, args.seq):.1%} found at {args.seq} tokens, trained length",
        })  # fmt: skip
        code |= not reached
        rows += [{"attention": attention, **r} for r in mine]
        try:
            from scripts import pictures

            picture = args.out / f"recall-{attention}.svg"
            title = f"Pairs recalled by {attention} attention, trained at up to {args.seq} tokens"
            pictures.needle([r for r in mine if r["n"]], picture, title)
        except ImportError:
            note("no picture: matplotlib is not installed")
    write_csv(args.out / "recall.csv", rows, COLUMNS)
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
