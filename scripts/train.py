"""Train NSA and dense attention on the same text and steps, on one GPU or on several (FSDP2).

    python scripts/train.py --attention nsa,dense --steps 300
    torchrun --nproc-per-node 4 scripts/train.py --attention nsa,dense --seq 4096,16384,65536
    torchrun --nproc-per-node 4 scripts/train.py --save-every 100 --resume    # goes on where it was

The model, the data, the order of the batches, the schedule and the initial weights outside of
attention are the same for both: `dense` replaces each NSA layer by causal grouped-query attention
of the same heads, through torch's SDPA. Parameters are sharded with FSDP2 under torchrun and
gathered in bf16 on a GPU; gradients are added up in fp32. Lengths of --seq are trained one after
the other, each with as many tokens per step as the first: the default --batch is large enough that
every rank has whole sequences of the longest. Where a --batch of yours is not, tokens per step
differ; a line says so, and rates.csv has them.

Into --out: train.csv (attention, seq, step, loss, val_loss, lr, tokens_per_s), rates.csv (tokens/s
of every run), train.svg with both, and checkpoints/<attention>-<seq>/. A resumed run gives the very
losses and weights of one that was never interrupted, on as many ranks; on a GPU add --deterministic
for kernels that add up in no fixed order.

Exit code: 0 done, 1 a loss, of training or held out, is not finite, 2 usage error, 3 no such
device.
"""

import argparse
import functools
import itertools
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from bench.main import names
from bench.ranks import join_ranks, leave_ranks
from bench.records import (
    amount,
    check_flags,
    emit,
    file_target,
    folder_target,
    integers,
    note,
    positive,
    write_csv,
)
from nsa.config import NSAConfig
from nsa.generate import save_checkpoint
from nsa.model import NSALanguageModel
from nsa.module import NSAAttention
from nsa.options import Parser, seed64
from nsa.rotary import rotary
from scripts.checkpoints import CheckpointError, Checkpoints
from scripts.training import PRESETS, VOCAB, Preset, Run, load_corpus, train, training_flags

ATTENTIONS = ("nsa", "dense")
CURVE = ("attention", "seq", "step", "loss", "val_loss", "lr", "tokens_per_s")
RATES = (
    "attention", "seq", "batch", "tokens_per_step", "world", "parameters", "tokens_per_s",
    "first_step_s", "peak_vram_mib", "val_loss",
)  # fmt: skip


class DenseAttention(nn.Module):
    """Causal grouped-query attention of NSAAttention's heads: [B, S, dim] -> [B, S, dim]."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        c = self.config = config
        self.widths = c.heads * c.d_k, c.groups * c.d_k, c.groups * c.d_v
        self.qkv = nn.Linear(c.dim, sum(self.widths), bias=False)
        self.out = nn.Linear(c.heads * c.d_v, c.dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: None = None, max_seqlen: None = None) -> Tensor:
        c, at = self.config, torch.arange(x.shape[-2], device=x.device)
        q, k, v = self.qkv(x).split(self.widths, dim=-1)
        q = rotary(q.unflatten(-1, (c.heads, c.d_k)), at, c.rope_base)
        k = rotary(k.unflatten(-1, (c.groups, c.d_k)), at, c.rope_base)
        v = v.unflatten(-1, (c.groups, c.d_v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(-2))


def prepare(
    model: NSALanguageModel, mesh: DeviceMesh | None, *, recompute: bool = False,
    compiled: bool = False, backend: str = "inductor",
) -> NSALanguageModel:  # fmt: skip
    """Compile, recompute and shard the model block by block, in place.

    Only the forward functions are replaced: names of parameters stay, and FSDP's hooks run outside
    of compiled code.
    """
    faster = functools.partial(torch.compile, backend=backend)
    for block in model.blocks:
        if compiled:
            layer = block.attention
            if isinstance(layer, NSAAttention):
                # The attention itself is not traced: its kernels are chosen when it runs.
                layer._project = faster(layer._project)
                layer.gate.forward = faster(layer.gate.forward)
                block._finish = faster(block._finish)
            else:
                block.forward = faster(block.forward)
        if recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if mesh is not None:
        policy = MixedPrecisionPolicy()
        if mesh.device_type == "cuda":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def setup(args: argparse.Namespace) -> tuple[torch.device, DeviceMesh | None]:
    """Return this rank's device, and the mesh of all ranks under torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return torch.device(args.device), None
    device = join_ranks(args.device, args.timeout)
    return device, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    add("--attention", type=names(*ATTENTIONS), default=["nsa"], help="nsa, dense or both, a,b")
    add("--steps", type=positive, help="default: 200 on CPU, 300 on a GPU")
    add("--seq", type=integers, help="tokens per sequence, a,b,c (128 on CPU, 2048 on a GPU)")
    add("--batch", type=positive, help="sequences per step of the first length, over all ranks")
    add("--lr", type=amount, help="peak learning rate")
    for name in ("layers", "dim", "heads", "groups"):
        add(f"--{name}", type=positive, help="of the model; default by --device")
    add("--seed", type=seed64, default=0)
    add("--recompute", action="store_true", help="activation checkpointing, block by block")
    add("--compile", action="store_true", help="torch.compile of all but the NSA kernels")
    add("--compile-backend", default="inductor", help=argparse.SUPPRESS)
    add("--deterministic", action="store_true", help="deterministic algorithms of torch only")
    add("--save-every", type=int, default=0, metavar="N", help="checkpoint every N steps; there "
        "is one at the end in any case")  # fmt: skip
    add("--resume", action="store_true", help="go on from the latest checkpoints in --out")
    add("--stop-at", type=positive, metavar="N", help="stop after N of --steps steps")
    add("--log-every", type=positive, default=10, metavar="N", help="read the loss every N steps")
    add("--out", type=folder_target, default=Path("artifacts/train"), metavar="DIR")
    trained = "the trained NSA model of the last length, for python -m nsa.generate"
    add("--save", type=file_target, metavar="FILE", help=trained)
    add("--timeout", type=amount, default=600.0, help="seconds until a collective that a rank does "
        "not join fails")  # fmt: skip
    return parser


def presets(
    parser: argparse.ArgumentParser, args: argparse.Namespace, longest: int
) -> list[Preset]:
    """Return one preset per length, of the same tokens per step where whole sequences on every rank
    allow it. What cannot be is a usage error."""
    base = PRESETS[args.device]
    if args.save_every < 0:
        parser.error(f"--save-every must be 0 or more, got {args.save_every}")
    if args.save and "nsa" not in args.attention:
        parser.error("--save is for the NSA model, which --attention leaves out")
    check_flags(parser)
    given = lambda *of: {n: v for n in of if (v := getattr(args, n)) is not None}
    try:
        config = replace(base.config, **given("dim", "heads", "groups"))
    except ValueError as error:
        parser.error(str(error))
    base = replace(base, config=config, **given("steps", "lr", "layers", "batch"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    lengths = args.seq or [base.seq]
    for seq in lengths:
        if not 2 * config.l_sel <= seq <= longest:
            parser.error(f"--seq must be {2 * config.l_sel} to {longest}, got {seq}")
    if args.batch is None:
        least = max(base.batch, math.ceil(world * max(lengths) / lengths[0]))
        base = replace(base, batch=math.ceil(least / world) * world)
    elif args.batch % world:
        parser.error(f"--batch must be a multiple of the {world} ranks, got {args.batch}")
    share = lambda seq: max(1, base.batch * lengths[0] // seq // world)  # sequences of a rank
    return [replace(base, seq=seq, batch=share(seq) * world) for seq in lengths]


def summary(attention: str, preset: Preset, run: Run, world: int) -> dict[str, Any]:
    held_out = [r["val_loss"] for r in run.rows if r["val_loss"] is not None]
    return {
        "attention": attention, "seq": preset.seq, "batch": preset.batch, "world": world,
        "tokens_per_step": preset.batch * preset.seq, "val_loss": (held_out or [None])[-1],
        "parameters": sum(p.numel() for p in run.model.parameters()),
        **{n: getattr(run, n) for n in ("tokens_per_s", "first_step_s", "peak_vram_mib")},
    }  # fmt: skip


def report(out: Path, curve: list[dict], rates: list[dict]) -> None:
    write_csv(str(out / "train.csv"), curve, CURVE)
    write_csv(str(out / "rates.csv"), rates, RATES)
    try:
        from scripts.pictures import training

        training(curve, rates, out / "train.svg")
    except ImportError as error:
        note(f"no picture: {error}", "warn")
    for row in rates:
        for name in ("tokens_per_s", "val_loss"):
            label = f"{row['attention']}/{row['seq']}/{name}"
            emit("metric", {"name": label, "value": row[name], "unit": ""})
            shown = "-" if row[name] is None else f"{row[name]:.6g}"
            print(f"{label:28} {shown}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        note("no CUDA device", "warn")
        return 3
    text, held_out = load_corpus()
    planned = presets(parser, args, len(held_out) - 2)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    device, mesh = setup(args)
    first, world = (True, 1) if mesh is None else (mesh.get_rank() == 0, mesh.size())
    if first:
        args.out.mkdir(parents=True, exist_ok=True)
        steps = {p.seq: p.seq * p.batch for p in planned}
        if len(set(steps.values())) > 1:
            told = ", ".join(f"{tokens} at --seq {seq}" for seq, tokens in steps.items())
            note(f"tokens per step differ: {told}", "warn")
    curve, rates = [], []
    try:
        for preset, attention in itertools.product(planned, args.attention):
            about = {**asdict(preset), "attention": attention, "seed": args.seed}
            folder = args.out / "checkpoints" / f"{attention}-{preset.seq}"
            saved = Checkpoints(folder, about, every=args.save_every, resume=args.resume)
            run = train_one(args, attention, preset, (text, held_out), device, mesh, saved)
            curve += [{"attention": attention, "seq": preset.seq, **r} for r in run.rows]
            rates.append(summary(attention, preset, run, world))
            if args.save and attention == "nsa":
                # The whole model on rank 0, on the CPU; every rank must call.
                whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state = get_model_state_dict(run.model, options=whole)
                if first:
                    save_checkpoint(args.save, run.model, state)
            del run
        if first:
            report(args.out, curve, rates)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if mesh is not None:
            dist.destroy_process_group()
    losses = [row[name] for row in curve for name in ("loss", "val_loss")]
    return 0 if all(x is None or math.isfinite(x) for x in losses) else 1


def train_one(
    args: argparse.Namespace, attention: str, preset: Preset, texts: tuple[Tensor, Tensor],
    device: torch.device, mesh: DeviceMesh | None, checkpoints: Checkpoints,
) -> Run:  # fmt: skip
    """Train one kind of attention at one length; the first rank says how it goes."""
    name, first = f"{attention}-{preset.seq}", mesh is None or mesh.get_rank() == 0

    def make(preset: Preset) -> nn.Module:
        flags = training_flags(device)
        model = NSALanguageModel(preset.config, VOCAB, preset.layers, flags=flags)
        if attention == "dense":  # the rest starts with the weights that it has beside NSA
            for block in model.blocks:
                block.attention = DenseAttention(preset.config)
        how = dict(recompute=args.recompute, compiled=args.compile, backend=args.compile_backend)
        return prepare(model.to(device), mesh, **how)

    if args.resume and first and checkpoints.latest() is None:
        note(f"{name}: no checkpoint in {checkpoints.folder}: starts at the first step", "warn")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run = train(
        preset, *texts, device, args.seed, args.log_every,
        lambda _done, line: first and print(f"{name}: {line}", flush=True),
        make=make, mesh=mesh, checkpoints=checkpoints, stop_at=args.stop_at,
    )  # fmt: skip
    if checkpoints.world_changed and first:
        world = 1 if mesh is None else mesh.size()
        note(f"{name}: resumed from {checkpoints.world_changed} ranks on {world}: sums are "
             "added in another order, so not bit by bit", "warn")  # fmt: skip
    return run


if __name__ == "__main__":
    leave_ranks(main())
