"""One run at a time per GPU and per output folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scripts.oneshot.record.journal import utc_now

LOCKS = Path("/tmp")  # the same for all, whatever their TMPDIR is


class Locked(Exception):
    """Somebody else holds the lock; the text says who and since when."""


class Lock:
    """An flock on `path`. The kernel frees it when the holder dies, however it dies."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        self._fd: int | None = None

    def acquire(self, wait_s: float = 0.0, stopped: Callable[[], object] = lambda: False) -> None:
        """Take the lock, waiting `wait_s` or until `stopped()`. Raises Locked or OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path, flags)  # another user's file in a sticky folder: no O_CREAT
        except FileNotFoundError:
            fd = os.open(self.path, flags | os.O_CREAT, 0o666)
            with suppress(OSError):
                os.fchmod(fd, 0o666)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline or stopped():
                    holder = "another process"
                    with suppress(ValueError, KeyError, OSError):
                        data = json.loads(os.pread(fd, 4096, 0))
                        holder = f"process {data['pid']} since {data['since']}"
                    os.close(fd)
                    raise Locked(f"{self.what} is held by {holder}") from None
                time.sleep(0.2)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "since": utc_now()}).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, None
        with suppress(OSError):
            if fd is not None:
                os.ftruncate(fd, 0)
                os.close(fd)


def gpu_lock(uuid: str) -> Lock:
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:16]
    folder = LOCKS if os.access(LOCKS, os.W_OK) else Path(tempfile.gettempdir())
    return Lock(folder / f"nsa-gpu-{digest}.lock", "the GPU")


def folder_lock(out: Path, name: str) -> Lock:
    out.mkdir(parents=True, exist_ok=True)
    return Lock(out / f".{name}.lock", f"the folder {name}")
