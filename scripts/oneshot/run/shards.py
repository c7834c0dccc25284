"""Run one pytest command as several processes, each of which takes the next test when it is free.

    python -m scripts.oneshot.run.shards -n 4 pytest nsa/tests/test_prefill_kernels.py -m kernel

Most of a parity stage is compiling kernels on the CPU, which processes do side by side on one GPU.
They are forks of this one, which has imported PyTorch and Triton and never uses the GPU. Each
reports its tests and parity rows through NSA_RESULT_FD as pytest itself does; the outputs are
printed one after the other. Exit code: the worst of the processes that broke, else 1 if any failed
a test; 5 (no tests) only if none had any.

--beside COMMAND runs another program of this Python meanwhile, such as a bench that compiles what a
later stage needs. What comes of it counts for nothing, and it is ended soon after the tests.
"""

from __future__ import annotations

import argparse
import multiprocessing.context
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from bench.records import doc_parser
from scripts.oneshot.box.env import memory_mib
from scripts.oneshot.box.processes import die_with_parent, end_children, usable_cores
from scripts.oneshot.run.ahead import import_all

MOST = 15
TICKETS = 1 << 16  # numbers of tests, of which each process draws the next
BESIDE_S = 5.0  # for what runs beside, once the tests are done: what it compiled is kept
MIB_EACH = 4096  # of the host's memory for each process


def default_shards() -> int:
    """Choose by cores and memory of this host; each is one busy thread, compiler or pytest."""
    return max(1, min(MOST, usable_cores() - 1, (memory_mib() or 8192) // MIB_EACH))


def combined(codes: list[int]) -> int:
    """Return one exit code: the worst of those whose tests are lost, then 1, 0, no tests."""
    odd = [c for c in codes if c not in (0, 1, 5)]
    return max(odd) if odd else next((code for code in (1, 0) if code in codes), 5)


class _Share(multiprocessing.context.ForkProcess):
    """A process of pytest, with the manners of subprocess.Popen."""

    def __init__(self, arguments: list[str], output: IO[bytes]) -> None:
        super().__init__()
        self.arguments, self.output = arguments, output.fileno()
        self.start()

    def run(self) -> None:
        import pytest

        die_with_parent()
        for fd in (1, 2):
            os.dup2(self.output, fd)
        sys.exit(pytest.main(self.arguments))

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            os.kill(self.pid, number)


def run(n: int, command: list[str], beside: Sequence[str] = ()) -> int:
    children: list[tuple[subprocess.Popen | _Share, IO[bytes]]] = []
    shown: set[int] = set()

    def show(i: int) -> int:
        """Print what one said and return its exit code."""
        child, output = children[i]
        shown.add(i)
        output.seek(0)
        name = f"share {i + 1} of {n}" if i < n else "beside"
        print(f"== {name}: exit code {child.poll()}", flush=True)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
        return child.poll()

    def on_signal(number: int, _frame: object) -> None:
        """Pass the signal on and leave nobody behind."""
        end_children([child for child, _ in children], number)
        for i in set(range(len(children))) - shown:
            with suppress(RuntimeError, OSError):  # when the signal came in the midst of a show()
                show(i)
        os._exit(128 + number)

    # Else each takes every core for tiny tensors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import_all("pytest")
    # One file, whose position all processes share: what one has read, no other reads.
    tickets = tempfile.TemporaryFile()
    tickets.write(b"".join(i.to_bytes(4, "little") for i in range(TICKETS)))
    tickets.seek(0)
    for _ in range(n):
        output = tempfile.TemporaryFile()
        share = _Share([*command[1:], "--tickets", str(tickets.fileno())], output)
        children.append((share, output))
    quiet = {k: v for k, v in os.environ.items() if k != "NSA_RESULT_FD"}
    how: dict[str, Any] = dict(stderr=subprocess.STDOUT, env=quiet, preexec_fn=die_with_parent)
    for one in beside:
        output = tempfile.TemporaryFile()
        other = subprocess.Popen([sys.executable, *shlex.split(one)], stdout=output, **how)
        children.append((other, output))
    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):  # not for the forks
        signal.signal(number, on_signal)
    codes = []
    for i, (child, _) in enumerate(children[:n]):
        child.join()
        codes.append(show(i))
    deadline = time.monotonic() + BESIDE_S
    for i, (child, _) in enumerate(children[n:], n):
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.wait()
        show(i)
    return combined([c if c >= 0 else 128 - c for c in codes])


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("-n", type=int, default=0, help="processes; 0 chooses by the host")
    parser.add_argument("--fewer", type=int, default=1, metavar="K",
                        help="a K-th of the processes that the host would get")  # fmt: skip
    parser.add_argument("--beside", action="append", default=[], metavar="COMMAND",
                        help="a script and its arguments")  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help="pytest and its arguments")
    args = parser.parse_args(argv)
    if args.command[:1] != ["pytest"] or args.n < 0 or args.fewer < 1:
        got = f"-n {args.n} --fewer {args.fewer} {' '.join(args.command)}"
        parser.error(f"wants [-n N] [--fewer K] pytest ARGUMENTS, N >= 0, K >= 1, got {got}")
    return run(args.n or max(default_shards() // args.fewer, 1), args.command, args.beside)


if __name__ == "__main__":
    raise SystemExit(main())
