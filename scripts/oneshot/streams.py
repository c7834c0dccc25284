"""Standard streams that are closed, full or gone cost no run. Python 3.8 can read this file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress


def open_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed: else the next file that is opened takes its
    number, and what a child prints lands in it. Characters that cannot be encoded are escaped."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", closefd=False))
        with suppress(AttributeError):  # something else stands for it
            getattr(sys, name).reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a line to stderr, if that can be written."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """End this process with `code`: no stream that is full changes it, and no exit hook of this
    interpreter prints after the last line."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def leave_by(main: Callable[[], int]) -> None:
    """Call main() and leave() with its code, or with that of an exit of argparse."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 2
    leave(code)


def last_answer(text: str) -> dict | None:
    """Return the last line that is an object of JSON: an exit hook may have printed after it."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return None
