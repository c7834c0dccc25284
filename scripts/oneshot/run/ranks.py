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
from typing import Any

from bench.records import doc_parser
from scripts.oneshot.box.processes import die_with_parent, end_children


def run(n: int, command: list[str]) -> int:
    fd = os.environ.get("NSA_RESULT_FD")
    with socket.socket() as s:  # for a free port
        s.bind(("127.0.0.1", 0))
        environ = {  # what torch.distributed reads
            "OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(s.getsockname()[1]),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n)),
        }  # fmt: skip
    children: list[subprocess.Popen] = []

    def end(number: int) -> None:
        """End all that are left and wait for them: until then they hold memory of their GPU."""
        end_children(children, number)
        for child in children:
            child.wait()

    def on_signal(number: int, _frame: object) -> None:
        end(number)
        os._exit(128 + number)

    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    for rank in range(n):
        mine = {**environ, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))}
        how: dict[str, Any] = {"env": mine, "preexec_fn": die_with_parent}
        how["pass_fds"] = [int(fd)] if fd else []
        children.append(subprocess.Popen([sys.executable, *command], **how))
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code:
                print(f"rank {rank} of {n} ended with exit code {code}", flush=True)
                time.sleep(0.3)  # the others may be about to say why
                end(signal.SIGTERM)
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
