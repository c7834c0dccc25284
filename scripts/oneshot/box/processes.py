"""Finding and ending every process of a stage, the ones that left its session included."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 1.5  # for the stacks; the supervisor kills 3 s after its SIGABRT
TAG = "ONESHOT_TAG"  # environment variable that a stage and all its descendants carry
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let this child end when its parent is killed, instead of holding the GPU."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def usable_cores() -> int:
    """Count the cores that this process may run on, whatever time a cgroup leaves it there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stat(pid: int) -> tuple[int, str] | None:
    """Return (parent pid, start time) of a process; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else (int(fields[1]), fields[19])


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, whether anybody waited for it or not."""
    return _stat(pid) is not None


def end_children(children: Sequence[Any], number: int) -> None:
    """Signal all (at SIGABRT a child writes its stacks), give them GRACE_S, and kill who is left.

    children: each with pid, send_signal and kill, as subprocess.Popen has them. A handler of a
    signal may call this in the midst of a wait for one of them: it waits for none itself.
    """
    for child in children:
        child.send_signal(number)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(is_running(child.pid) for child in children):
        time.sleep(0.02)
    for child in children:
        child.kill()


class Family:
    """The processes of one stage. `look()` now and then, so that orphans stay known.

    A descendant is known by its parent (seen while the parent lived), by its process group, or by
    the tag in its environment, which survives setsid and a double fork.
    """

    def __init__(self, leader: int, tag: str) -> None:
        self.leader = leader
        self._tag = f"{TAG}={tag}".encode()
        self._known: dict[int, str] = {}

    def look(self) -> dict[int, tuple[int, str]]:
        """Remember the family's processes. Returns what _stat() says of all that run, by pid."""
        running = {}
        children: dict[int, list[int]] = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if stat := _stat(pid):
                running[pid] = stat
                children.setdefault(stat[0], []).append(pid)
        queue = [self.leader, *self._known]
        while queue:
            for child in children.get(queue.pop(), ()):
                if child not in self._known:
                    self._known[child] = running[child][1]
                    queue.append(child)
        return running

    def survivors(self) -> list[int]:
        """Return the pids of the family that still live, without the leader."""
        alive = []
        for pid, (_, started) in self.look().items():
            if pid in (self.leader, os.getpid()):
                continue
            with suppress(OSError):
                if (
                    self._known.get(pid) == started
                    or os.getpgid(pid) == self.leader
                    or self._tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ):
                    alive.append(pid)
        return alive

    def signal_group(self, number: int) -> None:
        with suppress(OSError):
            os.killpg(self.leader, number)

    def kill_survivors(self) -> int:
        """Kill everything that is left. Returns how many there were."""
        total = 0
        for _ in range(5):  # one may fork while we look
            pids = self.survivors()
            total += len(pids)
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
        return total
