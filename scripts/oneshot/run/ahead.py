"""A stage's Python, started ahead of its time: it imports, waits for the word, and runs the stage.

    python -m scripts.oneshot.run.ahead FD bench/health.py --deep
    python -m scripts.oneshot.run.ahead FD -m scripts.oneshot.run.shards pytest nsa/tests

Importing PyTorch and Triton takes some four seconds, which each stage of a report would wait for on
one core. A byte on the descriptor FD is the word; where the pipe ends without one, so does this.
Nothing here may use the GPU.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from contextlib import suppress

IMPORTED = ("torch", "triton", "numpy", "bench.timing", "nsa.kernels.prefill", "nsa.kernels.decode",
            "nsa.kernels.triton_sel_kernel", "nsa.module")  # fmt: skip


def import_all(*more: str) -> None:
    """Import what stages need, and these modules. The stage itself tells what is missing."""
    for name in (*IMPORTED, *more):
        with suppress(Exception):
            importlib.import_module(name)


def main(fd: int, target: list[str]) -> None:
    if target[0].startswith("bench/"):  # formulation.py's mode makes PyTorch import its compiler
        import_all("torch._dynamo")
    else:
        import_all()
    if not os.read(fd, 1):
        return
    os.close(fd)
    with suppress(ImportError):
        from bench import spent

        spent.began()
    if target[0] == "-m":
        sys.argv = target[1:]
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = target, os.path.dirname(target[0])
    with open(target[0], "rb") as file:
        code = compile(file.read(), target[0], "exec", dont_inherit=True)
    whole = sys.modules["__main__"].__dict__
    whole.update(__file__=target[0], __spec__=None, __package__=None)
    exec(code, whole)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
