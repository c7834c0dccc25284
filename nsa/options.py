"""Command-line options that are spelled with hyphens, and with underscores as they once were."""

from __future__ import annotations

import argparse
from typing import Any


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
