"""The command line of the `run` verb."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scripts.oneshot.run.stages import PROFILES

OF_MAKE = ("PROFILE", "BUDGET", "ONLY", "SKIP", "RESUME", "GPUS", "PRICE", "OUT")


def seconds(text: str) -> float:
    """Return the seconds of 15m, 1h, 90s or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not match or float(match.group(1)) <= 0:
        raise argparse.ArgumentTypeError(f"a time such as 15m, 1h or 900, got {text!r}")
    return float(match.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600}[match.group(2)]


def _dollars(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"dollars per hour, 0 or more, got {text!r}")


def _commit(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{3,63}", text):
        raise argparse.ArgumentTypeError(f"a commit id, got {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    what = "Plan, capture, run every stage, judge, render, redact, pack."
    # setup_env.py looks for --dry-run before it installs anything.
    p = argparse.ArgumentParser(prog="oneshot run", description=what, allow_abbrev=False)
    # Of a text without names the stage is unknown, too: it does not mean all of them.
    names = lambda text: tuple(filter(None, map(str.strip, text.split(",")))) or (text,)
    flag = lambda name, words: p.add_argument(name, action="store_true", help=words)
    p.add_argument("out_dir", nargs="?", type=Path, help="default: artifacts/runner")
    profiles = "auto: standard with NVIDIA hardware, cpu without; gpu: standard"
    choices = (*PROFILES, "gpu", "auto")
    p.add_argument("--profile", choices=choices, default="auto", help=profiles)
    p.add_argument("--budget", type=seconds, help="stop starting work after this time (15m)")
    p.add_argument("--only", type=names, default=(), help="stages to run, comma separated")
    p.add_argument("--skip", type=names, default=(), help="stages to leave out")
    flag("--resume", "take over stages that passed within 24 h on the same commit and box")
    flag("--dry-run", "print stages and commands, run nothing")
    gpus = "several GPUs: health and parity of each, then NCCL and context parallelism"
    p.add_argument("--gpus", metavar="all|0,1", help=gpus)
    p.add_argument("--price", type=_dollars, help="dollars per hour, for the running cost")
    p.add_argument("--commit", type=_commit, default=None, help="commit of sources without git")
    p.add_argument("--wait", type=seconds, default=0.0, help="wait for a lock that long")
    flag("--keep-host", "do not redact host names")
    flag("--keep-ip", "do not redact IP addresses")
    flag("--verbose", "show what the stages print")
    flag("--detach", "go on in the background; see attach")
    return p


def slips_of_make(flags: str) -> Iterator[str]:
    """Say what is meant by variables on make's command line (its MAKEFLAGS) that are nearly called
    as an option is: make takes any name, and the run would go on without it."""
    given = re.findall(r"(?:^|\s)(\w+):*=", flags.partition("-- ")[2])
    words = [text[2:] for action in parser()._actions for text in action.option_strings]
    known = {name.upper().replace("-", "_"): f"--{name} of the script" for name in words if name}
    known |= {"OUT_DIR": "OUT=", **{name: f"{name}=" for name in OF_MAKE}}
    for name in given:
        near = difflib.get_close_matches(name.upper(), known, 1, 0.8)
        if near and name not in OF_MAKE:
            yield f"{name}= means nothing to make gpu-report; did you mean {known[near[0]]}?"
