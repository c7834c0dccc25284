"""Checkpoints of a training run by torch.distributed.checkpoint, complete enough to go on exactly.

A folder holds step-00000100, step-00000200, ...; each has the sharded model and optimizer, the
generator that draws the batches and every rank's random state (written by all ranks in parallel),
and state.json with the step, what was run, and the curve so far. A checkpoint gets its name only
once it is whole, so a run that dies while saving leaves the one before. On several hosts the folder
must be shared between them.
"""

import json
import os
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FORMAT = "nsa-training/1"
KEEP = 2
# What state.json must have, beside when it was saved and what was measured.
STATE = {"about": dict, "step": int, "world": int, "rows": list, "norms": list}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or one of another run; the text says why."""


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _random_state() -> Tensor:
    """Return the state of torch's generators here, the CPU's and then the GPU's, as uint8."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return torch.cat([torch.get_rng_state(), *gpu])


def _set_random_state(state: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[size:])


def _saved_at(path: Path) -> float:
    """Seconds since 1970, of the file's time where the checkpoint itself does not say."""
    file = path / "state.json"
    try:
        return float(json.loads(file.read_text(encoding="utf-8"))["saved_at"])
    except (OSError, ValueError, TypeError, KeyError):
        return file.stat().st_mtime if file.exists() else 0.0


class Checkpoints:
    """Saves into `folder` every `every` steps (0: only at the end), resumes from what is newest.

    about: what the run is (sizes, seed, ...); a checkpoint of something else is refused with a
    CheckpointError that names the difference. resume=False ignores what is there.
    """

    def __init__(self, folder: Path, about: dict, *, every: int = 0, resume: bool = False) -> None:
        self.folder, self.every, self.wanted = Path(folder), every, resume
        self.about = json.loads(json.dumps(about))
        self.world_changed: int | None = None  # the ranks that wrote it, where they are not as many

    def due(self, done: int) -> bool:
        return bool(self.every) and done % self.every == 0

    def _oldest_first(self) -> list[Path]:
        """The checkpoints by when they were saved: an earlier run here may have had more steps."""
        found = [p for p in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)]
        return sorted(found, key=lambda p: (_saved_at(p), p.name))

    def latest(self) -> Path | None:
        """The checkpoint saved last; None where there is none."""
        return next(reversed(self._oldest_first()), None)

    def _tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, draw: torch.Generator,
        rows: list[dict], norms: list[float], measured: dict[str, Any],
    ) -> Path:  # fmt: skip
        """Write the state after `step` steps; older checkpoints but one go away.

        rows, norms and measured are what a resumed run is given back, as JSON.
        """
        rank, world = _ranks()
        final = self.folder / f"step-{step:08d}"
        part = self.folder / f".{final.name}.part"
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        _together()
        state = self._tensors(model, optimizer)
        state |= {"draw": draw.get_state(), f"random/{rank}": _random_state()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled", in one process
            dcp.save(state, checkpoint_id=str(part))
        if rank == 0:
            about = {"format": FORMAT, "step": step, "world": world, "about": self.about}
            about["saved_at"] = time.time()
            text = json.dumps({**about, "rows": rows, "norms": norms, "measured": measured})
            (part / "state.json").write_text(text + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            names = [p for p in self._oldest_first() if p.name <= final.name]
            for old in names[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        _together()
        return final

    def _described(self, path: Path) -> dict[str, Any]:
        try:
            data = json.loads((path / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint {path} is not of format {FORMAT!r}")
        for name, kind in STATE.items():
            if type(data.get(name)) is not kind:
                raise CheckpointError(
                    f"checkpoint {path} cannot be read: {name} of its state.json must be a "
                    f"{kind.__name__}, got {data.get(name)!r}"
                )
        theirs = data["about"]
        for name in sorted({*theirs, *self.about}):
            was, now = theirs.get(name), self.about.get(name)
            if was != now:
                made = f"checkpoint {path} was made with {name} = {was}"
                raise CheckpointError(f"{made}, this run has {now}")
        return data

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, draw: torch.Generator
    ) -> tuple[int, list[dict], list[float], dict[str, Any]]:
        """Load the latest checkpoint into the arguments and return (steps done, rows, norms,
        measured): 0 and empty where resuming was not asked for or there is no checkpoint yet."""
        path = self.latest() if self.wanted else None
        if path is None:
            return 0, [], [], {}
        data = self._described(path)
        rank, world = _ranks()
        state = self._tensors(model, optimizer) | {"draw": draw.get_state()}
        same = data["world"] == world
        if same:
            state[f"random/{rank}"] = _random_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.load(state, checkpoint_id=str(path))
            except dcp.CheckpointException as error:  # of every rank, whichever could not read
                cause = next(iter(error.failures.values()))[0]
                raise CheckpointError(
                    f"checkpoint {path} cannot be read: {type(cause).__name__}: {cause}"
                ) from error
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        draw.set_state(state["draw"])
        if same:
            _set_random_state(state[f"random/{rank}"])
        self.world_changed = None if same else data["world"]
        return data["step"], data["rows"], data["norms"], data.get("measured", {})
