"""Command-line options that are spelled with hyphens, and with underscores as they once were."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def seed64(text: str) -> int:
    """A number that torch's generators take, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"must be an integer of 64 bits, got {text!r}")
    return value


def device_named(text: str) -> torch.device:
    """The device of a name, be it here or not, for argparse."""
    import torch  # here, as most readers of options need none

    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return device


def is_here(device: torch.device) -> bool:
    """Whether torch sees the device."""
    import torch

    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def device_here(text: str) -> torch.device:
    """A device that is here, for argparse."""
    import torch

    device = device_named(text)
    if not is_here(device):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} "
            "CUDA devices"
        )
    return device


class Parser(argparse.ArgumentParser):
    """An ArgumentParser to which --top-k and --top_k are one option, whichever it is given."""

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """As ArgumentParser's, with the other spelling of long options; --help shows hyphens first.

        The value is args.top_k.
        """
        both = [
            "--" + name[2:].replace(old, new) if name.startswith("--") else name
            for name in names for old, new in ("_-", "-_")
        ]  # fmt: skip
        return super().add_argument(*dict.fromkeys(both), **kwargs)
