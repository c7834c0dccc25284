"""Command-line options that are spelled with hyphens, and with underscores as they once were."""

from __future__ import annotations

import argparse
from typing import Any


def seed64(text: str) -> int:
    """A number that torch's generators take, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"must be an integer of 64 bits, got {text!r}")
    return value


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
