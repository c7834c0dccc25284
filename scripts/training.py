"""The training loop: text, model, optimizer, curve; on one device or spread with FSDP2."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.records import write_atomic, write_csv
from nsa import dispatch, launches
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.model import NSALanguageModel

if TYPE_CHECKING:
    from scripts.checkpoints import Checkpoints

CSV_FIELDS = ("step", "loss", "val_loss", "lr", "tokens_per_s")
VOCAB = 256
CORPUS = Path(__file__).resolve().parent.parent / "nsa" / "data" / "shakespeare.txt"


@dataclass(frozen=True)
class Preset:
    """Sizes of a run; batch counts the sequences of a step over all ranks."""

    config: NSAConfig
    layers: int
    steps: int
    seq: int
    batch: int
    lr: float
    val_windows: int


PRESETS = {
    # One CPU core, well under a minute; the blocks shrink with the sequence so that selection still
    # has more candidates than it may take.
    "cpu": Preset(
        NSAConfig(64, heads=4, groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=4, window=32),
        layers=2, steps=200, seq=128, batch=4, lr=6e-3, val_windows=8),
    # The paper's block sizes; 2048 tokens are 32 selection blocks for 16 choices.
    "cuda": Preset(NSAConfig(512, heads=8, groups=2, d_k=64, d_v=64), layers=4, steps=300,
                   seq=2048, batch=8, lr=1e-3, val_windows=16),
}  # fmt: skip


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the text as bytes: (train, held out), int64 [n], split 90 / 10 in reading order."""
    text = torch.frombuffer(bytearray(CORPUS.read_bytes()), dtype=torch.uint8).long()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    """Return windows of seq + 1 bytes at the given starts: int64 [len(starts), seq + 1]."""
    return text[starts[:, None] + torch.arange(seq + 1)]


@dataclass
class Measured:
    """What a run measured so far; checkpoints carry it, so a resumed run adds to it.

    first_step_s has the kernels' compilation in it; timed_steps and timed_s are the steps after.
    """

    first_step_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    peak_vram_mib: float | None = None


@dataclass
class Run:
    """What one training run left: a row per step, the model, and its rates."""

    model: nn.Module
    rows: list[dict[str, float | int | None]]
    grad_norms: list[float]
    first_step_s: float
    steps_per_s: float | None
    tokens_per_s: float | None
    launches: dict[str, int]
    routes: dict[str, int]
    fallbacks: dict[str, int]
    peak_vram_mib: float | None = None


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up linearly over a tenth of the steps (at most 20), then follow a cosine to a tenth."""
    warm = max(1, min(20, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Compute in bf16 on a GPU; change nothing on a CPU."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte; batch int64 [B, S + 1]."""
    with autocast(batch.device):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def average(values: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the mean of `values` over the ranks."""
    if mesh is not None:
        dist.all_reduce(values, group=mesh.get_group())
        values /= mesh.size()
    return values


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: list[Tensor], mesh: DeviceMesh | None = None) -> float:
    """Return the mean over all windows; batches [b, S + 1] may differ in b, and ranks may not."""
    model.eval()
    sums = torch.stack([next_byte_loss(model, b) * len(b) for b in batches])
    model.train()
    return average(sums.sum() / sum(map(len, batches)), mesh).item()


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def held_out_windows(text: Tensor, preset: Preset, rank: int, world: int) -> Tensor:
    """Return a rank's windows of the held-out text. All ranks have as many, since a forward pass of
    a sharded model is a collective."""
    count = -(-preset.val_windows // world) * world
    span = len(text) - preset.seq - 1
    starts = (torch.arange(count) * (span // max(1, count - 1))).clamp(max=span)
    return windows(text, starts[rank::world], preset.seq)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, lr: float
) -> tuple[Tensor, Tensor]:
    """Take one step. Returns the loss and the norm of the gradients, on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = next_byte_loss(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach(), norm.detach()


def train(
    preset: Preset, train_text: Tensor, val_text: Tensor, device: torch.device, seed: int,
    log_every: int = 10, progress: Callable[[int, str], None] = lambda _done, _text: None,
    flags: Flags | None = None, *, make: Callable[[Preset], nn.Module] | None = None,
    mesh: DeviceMesh | None = None, checkpoints: Checkpoints | None = None,
    stop_at: int | None = None,
) -> Run:  # fmt: skip
    """Train for preset.steps steps; losses stay on the device between two log points.

    make: builds the model, sharded over `mesh` where there is one (default: NSALanguageModel on
    `device`, with `flags` or training_flags()). The batches depend on seed and step alone; each
    rank of `mesh` takes its share. checkpoints: where to save, and from where to go on. stop_at:
    leave after so many steps, with a checkpoint; the schedule stays that of preset.steps.
    """
    rank, world = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    if preset.batch % world:
        raise ValueError(f"batch must be a multiple of the {world} ranks, got {preset.batch}")
    share = preset.batch // world
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    if make is None:
        flags = flags or training_flags(device)
        model = NSALanguageModel(preset.config, VOCAB, preset.layers, flags=flags).to(device)
    else:
        model = make(preset)
    optimizer = make_optimizer(model, preset.lr)
    val = held_out_windows(val_text, preset, rank, world).to(device).split(share)

    rows: list[dict[str, float | int | None]] = []
    norms: list[float] = []
    pending: list[tuple[int, float, Tensor, Tensor]] = []
    measured = Measured()
    first, end = 0, min(preset.steps, stop_at or preset.steps)
    if checkpoints is not None:
        first, rows, norms, before = checkpoints.resume(model, optimizer, draw)
        measured = Measured(**before)
    model.train()
    with launches.recording() as launched, dispatch.trace() as taken:
        started = time.perf_counter()
        for step in range(first, end):
            lr = learning_rate(step, preset.steps, preset.lr)
            picks = torch.randint(0, len(train_text) - preset.seq, (preset.batch,), generator=draw)
            picks = picks[rank * share : (rank + 1) * share]
            batch = windows(train_text, picks, preset.seq).to(device, non_blocking=True)
            pending.append((step, lr, *update(model, optimizer, batch, lr)))

            done, last = step + 1, step == end - 1
            save = checkpoints is not None and (last or checkpoints.due(done))
            if step > first and not last and not save and done % log_every:
                continue
            losses = average(torch.stack([torch.stack(p[2:]) for p in pending]), mesh).tolist()
            elapsed, rate = time.perf_counter() - started, None
            if step == first:
                measured.first_step_s = measured.first_step_s or elapsed
            else:
                measured.timed_steps += len(pending)
                measured.timed_s += elapsed
                rate = len(pending) / elapsed * preset.batch * preset.seq
            for (index, at, *_), (value, norm) in zip(pending, losses, strict=True):
                rows.append(
                    {"step": index, "loss": value, "val_loss": None, "lr": at, "tokens_per_s": rate}
                )
                norms.append(norm)
            pending.clear()
            if last or done % (5 * log_every) == 0:
                rows[-1]["val_loss"] = held_out_loss(model, list(val), mesh)
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated() / 2**20
                measured.peak_vram_mib = max(peak, measured.peak_vram_mib or 0.0)
            if save:
                checkpoints.save(done, model, optimizer, draw, rows, norms, asdict(measured))
            progress(done, f"step {done}/{preset.steps} loss {rows[-1]['loss']:.3f}")
            started = time.perf_counter()
    steps_per_s = measured.timed_steps / measured.timed_s if measured.timed_s else None
    return Run(
        model, rows, norms, measured.first_step_s, steps_per_s,
        steps_per_s and steps_per_s * preset.batch * preset.seq, dict(launched),
        Counter(f"{d.branch.value}/{d.route.value}" for d in taken),
        Counter(f"{d.branch.value}/{r.value}: {why}" for d in taken for r, why in d.rejected),
        measured.peak_vram_mib,
    )  # fmt: skip


def training_flags(device: torch.device) -> Flags:
    """Return this process's flags; on a GPU the Triton kernels and their backward are on unless the
    environment decides otherwise."""
    flags = dispatch.resolve_flags(None, torch.empty(0, device=device))
    if device.type != "cuda":
        return flags
    wanted = {"use_triton_sel": True, "sel_triton_allow_grad": True, "sel_triton_min_L": 1}
    free = {k: v for k, v in wanted.items() if not flags.source(k).startswith("env")}
    return replace(flags, **free)


def finite(row: dict) -> dict:
    """Return `row` with None for what is not finite."""
    lost = lambda v: isinstance(v, float) and not math.isfinite(v)
    return {k: None if lost(v) else v for k, v in row.items()}


def write_curve(
    rows: list[dict], grad_norms: list[float], csv_path: Path, jsonl_path: Path
) -> tuple[Path, Path]:
    """Write the curve as CSV (an empty cell for what was not measured or not finite) and, with the
    gradient norms, as JSON lines."""
    write_csv(str(csv_path), rows, CSV_FIELDS)
    both = (finite({**row, "grad_norm": x}) for row, x in zip(rows, grad_norms, strict=True))
    write_atomic(jsonl_path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in both))
    return csv_path, jsonl_path
