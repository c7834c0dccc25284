"""Start one process per GPU for a stage that speaks over torch.distributed.

    python -m scripts.oneshot.run.ranks -n 4 bench/nccl.py --csv nccl.csv

What torchrun does for one host, but the processes inherit NSA_RESULT_FD, which torchrun closes.
The first process that fails ends the others, and so does a signal. Exit code: that of the first
failure, 128 + the number for a signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

from bench.records import doc_parser
from scripts.oneshot.box.processes import die_with_parent, end_children


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torch.distributed reads."""
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


def end(children: list[subprocess.Popen], number: int) -> None:
    """End all that are left and wait for them: until then they hold memory of their GPU."""
    end_children(children, number)
    for child in children:
        child.wait()


def run(n: int, command: list[str]) -> int:
    fd = os.environ.get("NSA_RESULT_FD")
    port = free_port()
    children: list[subprocess.Popen] = []

    def on_signal(number: int, _frame: object) -> None:
        end(children, number)
        os._exit(128 + number)

    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    for rank in range(n):
        children.append(
            subprocess.Popen(
                [sys.executable, *command], env=environment(rank, n, port),
                pass_fds=[int(fd)] if fd else [], preexec_fn=die_with_parent,
            )
        )  # fmt: skip
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code:
                print(f"rank {rank} of {n} ended with exit code {code}", flush=True)
                time.sleep(0.3)  # the others may be about to say why
                end(children, signal.SIGTERM)
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(0.05)


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("-n", type=int, required=True, help="processes, one per GPU")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    args = parser.parse_args(argv)
    if args.n < 1 or not args.command:
        parser.error(f"wants -n N and a Python file, got -n {args.n} {' '.join(args.command)}")
    return run(args.n, args.command)


if __name__ == "__main__":
    raise SystemExit(main())
