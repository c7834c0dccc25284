"""How the scripts that run under torchrun start and end their ranks."""

from __future__ import annotations

import datetime
import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist


def join_ranks(device_type: str, timeout_s: float) -> torch.device:
    """Join the group of all ranks; returns this rank's device ("cuda": the GPU of LOCAL_RANK).

    A collective that a rank does not join fails after `timeout_s` seconds.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast fails on some virtual machines
    device, backend = torch.device(device_type), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return device


def leave_ranks(code: int) -> NoReturn:
    """End this process with `code`; call it last, outside of any other handler.

    What a mesh or a sharded tensor holds of a group lives on after destroy_process_group, with
    gloo's threads. One that drops a tensor while the interpreter is torn down aborts the process
    (pytorch/pytorch#179291), so a process that had ranks does without the teardown.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
