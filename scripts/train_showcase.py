"""Train a small byte-level language model with NSA in every layer, and check how it learned.

    python scripts/train_showcase.py                      # tiny on CPU, small on a GPU
    python scripts/train_showcase.py --steps 20 --device cuda
    python scripts/train_showcase.py --save showcase.pt   # then: python -m nsa.generate showcase.pt

The text is in the repository (nsa/data). A loss that falls proves little, because a model that
sees the future falls fastest, so three facts stand beside it: the held-out loss next to the cross
entropy of byte unigram and bigram models, a causality probe on the trained model (other tokens
after t must change no output up to t, as it serves and as it trains, at several lengths; no output
up to t has a gradient to a token after it), and the same probe on a copy with a planted leak, which
it must find.

Writes train.csv (step,loss,val_loss,lr,tokens_per_s) and train.jsonl into --out. Exit code: 0 all
checks hold, 1 the loss is not finite or did not fall or the probe found a leak, 2 a usage error,
3 no such device.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import spent
from bench.records import (
    amount,
    check_flags,
    doc_parser,
    emit,
    file_target,
    folder_target,
    note,
    positive,
    told,
)
from nsa.config import NSAConfig
from nsa.generate import save_checkpoint
from nsa.model import NSALanguageModel
from nsa.options import device_named, is_here, seed64
from scripts.training import PRESETS, VOCAB, Preset, Run, autocast, load_corpus, train, write_curve

MIN_FALL_NATS = 0.1  # random bytes start at ln 256 = 5.5; twenty steps already fall by more than 1


def ngram_cross_entropy(train: Tensor, held_out: Tensor, order: int) -> float:
    """Return nats per byte of `held_out` under a byte n-gram model of `train` (add-one smoothing).

    order 1: each byte alone; order 2: each byte given the one before it.
    """

    cells = lambda text: text[1:] if order == 1 else text[:-1] * VOCAB + text[1:]
    counts = torch.bincount(cells(train), minlength=VOCAB**order).double() + 1.0
    log_p = (counts / counts.view(-1, VOCAB).sum(-1).repeat_interleave(VOCAB)).log()
    return -log_p[cells(held_out)].mean().item()


@dataclass(frozen=True)
class Probe:
    """The largest change of a logit at or before the edited position, and after it."""

    max_before: float
    min_after: float
    tolerance: float
    positions: tuple[int, ...]
    where: str = ""  # mode and length

    @property
    def leaks(self) -> bool:
        return not self.max_before <= self.tolerance  # NaN is a leak too

    @property
    def blind(self) -> bool:
        """The edits changed nothing at all, so the probe could not have seen a leak."""
        return not self.min_after > self.tolerance


def worst(probes: Sequence[Probe]) -> Probe:
    """Return the first probe that found something, or could not have; else the first."""
    return next((p for p in probes if p.leaks or p.blind), probes[0])


@torch.no_grad()
def causality_probe(
    logits_of: Callable[[Tensor], Tensor], tokens: Tensor, positions: list[int], tolerance: float
) -> Probe:
    """Replace every token after t and compare the logits: none at or before t may move.

    logits_of: tokens [B, S] -> logits [B, S, vocab]. Each t gets its own edit of all later tokens;
    every edited byte differs from the original one. Each goes through the model alone, as a matrix
    product may add up rows in another order by where they stand in a batch.
    """
    generator = torch.Generator().manual_seed(0)
    base = logits_of(tokens).float()
    before, after = [], []
    for t in positions:
        shift = torch.randint(1, VOCAB, (1, tokens.shape[1] - t - 1), generator=generator)
        one = tokens.clone()
        one[:, t + 1 :] = (one[:, t + 1 :] + shift.to(tokens.device)) % VOCAB
        moved = (logits_of(one).float() - base).abs().amax(-1)[0]  # [S]
        before.append(moved[: t + 1].max())
        after.append(moved[t + 1 :].max())
    # Tensor reductions carry NaN on; Python's min and max drop it.
    worst, least = torch.stack(before).max().item(), torch.stack(after).min().item()
    return Probe(worst, least, tolerance, tuple(positions))


def gradient_probe(
    model: NSALanguageModel, tokens: Tensor, positions: list[int], device: torch.device
) -> Probe:
    """Find the largest gradient of a logit at t to the embedding of a token after t, which must be
    nothing, and to one up to t, each relative to the latter."""
    kept: list[Tensor] = []
    hook = model.embedding.register_forward_hook(lambda _m, _i, out: kept.append(out))
    try:
        with torch.enable_grad(), autocast(device):
            logits = model(tokens)[0].float()
    finally:
        hook.remove()
    before, after = [], []
    for t in positions:
        (grad,) = torch.autograd.grad(logits[t].square().sum(), kept[0], retain_graph=True)
        size = grad[0].float().norm(dim=-1)  # [S]
        before.append(size[t + 1 :].max() / size[: t + 1].max())
        after.append((size[: t + 1] > 0).any().float())
    return Probe(torch.stack(before).max().item(), torch.stack(after).min().item(), 1e-6,
                 tuple(positions), f"gradients, {tokens.shape[1]} tokens")  # fmt: skip


def planted_leak(logits_of: Callable[[Tensor], Tensor], size: float) -> Callable[[Tensor], Tensor]:
    """Return the same model, but with the logit of the next token raised by `size`."""

    def leaky(tokens: Tensor) -> Tensor:
        nxt = F.one_hot(tokens.roll(-1, dims=1), VOCAB)
        nxt[:, -1] = 0
        return logits_of(tokens) + size * nxt

    return leaky


def probe_positions(seq: int, config: NSAConfig) -> list[int]:
    """Return positions around edges where leaks live: ends of blocks and of the window."""
    edges = {0, config.l - 2, config.l - 1, config.l, config.l_sel - 1, config.l_sel, config.w}
    edges |= {seq // 2, seq // 2 + config.d - 1, seq - 2}
    return sorted(t for t in edges if 0 <= t <= seq - 2)


@torch.no_grad()
def gate_statistics(model: NSALanguageModel, tokens: Tensor) -> dict[str, float]:
    """Return mean and spread of each layer's three gates over tokens and heads, by name."""
    seen: list[Tensor] = []
    keep = lambda _module, _inputs, out: seen.append(out)
    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            hooks.callback(block.attention.gate.register_forward_hook(keep).remove)
        model(tokens)
    found = {}
    for layer, gates in enumerate(seen):  # [B, S, HQ, 3]
        for branch, values in zip(("cmp", "sel", "win"), gates.float().unbind(-1), strict=True):
            found[f"gate/layer{layer}/{branch}_mean"] = values.mean().item()
            found[f"gate/layer{layer}/{branch}_std"] = values.std().item()
    return found


def check_results(
    run: Run, probe: Probe, selftest: Probe, flow: Probe
) -> list[tuple[str, bool, str]]:
    """Return (check, passed, what was seen) for everything that decides the exit code."""
    first, last = run.rows[0]["loss"], run.rows[-1]["loss"]
    values = [r["loss"] for r in run.rows] + run.grad_norms
    values += [r["val_loss"] for r in run.rows if r["val_loss"] is not None]
    finite = sum(math.isfinite(v) for v in values)
    tolerance = f"tolerance {probe.tolerance:.3g}"
    where = lambda of: f"positions {list(of.positions)}, {of.where}"
    planted = f"planted leak moved a logit by {selftest.max_before:.3g}, an allowed edit by"
    moved = f"later tokens moved an earlier logit by {probe.max_before:.3g}, {tolerance}"
    share = f"{flow.max_before:.3g} of its largest"
    return [
        ("finite", finite == len(values), f"{finite} of {len(values)} losses and norms are finite"),
        ("loss_fell", last < first - MIN_FALL_NATS, f"{first:.3f} -> {last:.3f} nats per byte"),
        ("probe_finds_planted_leak", selftest.leaks and not probe.blind,
         f"{planted} {probe.min_after:.3g}, {tolerance}"),
        ("no_leak", not probe.leaks, f"{moved}, {where(probe)}"),
        ("no_gradient_to_the_future", not flow.leaks and not flow.blind,
         f"an earlier logit's gradient to a later token is {share}, {where(flow)}"),
    ]  # fmt: skip


def probe_lengths(preset: Preset) -> list[int]:
    """Return lengths of probes: odd numbers, as no multiple of any block is, from a few blocks to
    twice what the model was trained on."""
    some = (preset.seq - 7, preset.config.l_sel + 3, preset.seq // 2 + 1, 2 * preset.seq + 5)
    return list(dict.fromkeys(n | 1 for n in some))


def probe_model(
    model: NSALanguageModel, preset: Preset, text: Tensor, device: torch.device
) -> tuple[Probe, Probe, Probe]:
    """Probe the trained model, its copy with a planted leak, and its gradients. Returns the worst
    probe of all lengths, in serving and training, of each."""
    found, selftests, flows = [], [], []
    for training in (False, True):

        def logits_of(x: Tensor, training: bool = training) -> Tensor:
            with torch.set_grad_enabled(training), autocast(device):
                return model(x).detach()

        model.train(training)
        for seq in probe_lengths(preset):
            tokens = text[None, :seq].to(device)
            every = probe_positions(tokens.shape[1], preset.config)
            positions = every if seq == preset.seq - 7 else every[1::3]
            # Rounding may differ between two runs in bf16.
            scale = logits_of(tokens).float().abs().max().item()
            tolerance = (1e-2 if device.type == "cuda" else 1e-5) * scale
            probe = causality_probe(logits_of, tokens, positions, tolerance)
            where = f"{'training' if training else 'serving'}, {tokens.shape[1]} tokens"
            found.append(replace(probe, where=where))
            if not selftests:
                leaky = planted_leak(logits_of, 3 * tolerance)
                selftests.append(causality_probe(leaky, tokens, positions, tolerance))
            if training:
                flows.append(gradient_probe(model, tokens, every[1::4], device))
    model.eval()
    return worst(found), selftests[0], worst(flows)


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    add = parser.add_argument
    add("--device", type=device_named, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=positive, help="default: 200 on CPU, 300 on a GPU")
    add("--seq", type=int, help="tokens per sequence (128 on CPU, 2048 on a GPU)")
    add("--batch", type=positive, help="sequences per step (4 on CPU, 8 on a GPU)")
    add("--lr", type=amount, help="peak learning rate")
    add("--seed", type=seed64, default=0)
    add("--out", type=folder_target, metavar="DIR", help="default: artifacts/showcase")
    add("--csv", type=file_target, metavar="FILE", help="default: DIR/train.csv")
    add("--save", type=file_target, metavar="FILE", help="save the trained model here")
    add("--compile_only", action="store_true", help="one step and the probes, to cache kernels")
    args = parser.parse_args(argv)
    check_flags(parser)
    for name in ("steps", "save", "out", "csv"):
        if args.compile_only and getattr(args, name) is not None:
            parser.error(f"argument --{name}: has no effect with --compile-only")
    device = args.device
    if not is_here(device):
        note("no CUDA device", "warn")
        return 3
    given = {k: v for k in ("steps", "seq", "batch", "lr") if (v := getattr(args, k)) is not None}
    preset = replace(PRESETS[device.type], **given)
    train_text, val_text = load_corpus()
    shortest, longest = 2 * preset.config.l_sel, len(val_text) - 2
    if not shortest <= preset.seq <= longest:
        parser.error(f"--seq must be {shortest} to {longest}, got {preset.seq}")
    if args.compile_only:
        made = train(replace(preset, steps=1), train_text, val_text, device, args.seed)
        probe_model(made.model, preset, val_text, device)
        return 0
    spent.begin()
    out = args.out or Path("artifacts/showcase")
    out.mkdir(parents=True, exist_ok=True)

    def progress(done: int, text: str) -> None:
        print(text, flush=True)
        emit("progress", {"done": done, "total": preset.steps, "text": text})

    with spent.on("training"):
        run = train(preset, train_text, val_text, device, args.seed, progress=progress)
    curve = args.csv or out / "train.csv"
    for path in write_curve(run.rows, run.grad_norms, curve, out / "train.jsonl"):
        emit("artifact", {"path": str(path)})
    if args.save:
        save_checkpoint(args.save, run.model)
    with spent.on("probes"):
        probes = probe_model(run.model, preset, val_text, device)
    tell_metrics(run, probes[0], preset, (train_text, val_text), device)
    return 0 if told("train_showcase", check_results(run, *probes)) else 1


def tell_metrics(
    run: Run, probe: Probe, preset: Preset, texts: tuple[Tensor, Tensor], device: torch.device
) -> None:
    """Print and send the numbers of a run."""
    first, last = run.rows[0], run.rows[-1]
    per_byte = {
        "loss_first": first["loss"], "loss_last": last["loss"], "val_loss": last["val_loss"],
        "unigram_cross_entropy": ngram_cross_entropy(*texts, 1),
        "bigram_cross_entropy": ngram_cross_entropy(*texts, 2),
    }  # fmt: skip
    metrics = [
        *((name, value, "nats/byte") for name, value in per_byte.items()),
        ("steps_per_s", run.steps_per_s, "1/s"), ("tokens_per_s", run.tokens_per_s, "1/s"),
        ("first_step_s", run.first_step_s, "s"),
        ("parameters", sum(p.numel() for p in run.model.parameters()), "1"),
        ("leak_max_logit_change", probe.max_before, "logit"),
    ]  # fmt: skip
    if device.type == "cuda":
        metrics.append(("peak_vram_mib", torch.cuda.max_memory_allocated() / 2**20, "MiB"))
    with autocast(device):
        counts = gate_statistics(run.model, texts[1][None, : preset.seq].to(device))
    counts |= {f"routes/{name}": n for name, n in sorted(run.routes.items())}
    counts |= {f"launches/{name}": n for name, n in sorted(run.launches.items())}
    metrics += [(name, value, "1") for name, value in counts.items()]
    if run.fallbacks and device.type == "cuda":
        text = "; ".join(f"{name} ({n} times)" for name, n in sorted(run.fallbacks.items()))
        note(f"routes passed over in training: {text}", "warn")
    for name, value, unit in metrics:
        value = value if value is not None and math.isfinite(value) else None
        emit("metric", {"name": name, "value": value, "unit": unit})
        print(f"{name:32} {'-' if value is None else f'{value:.6g}'} {unit}")


if __name__ == "__main__":
    sys.exit(main())
