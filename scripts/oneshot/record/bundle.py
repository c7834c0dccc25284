"""The folder of one run and what is made of it: earlier runs, check sums, the archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import shutil
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.record.journal import write_atomic

KEEP_PREVIOUS = 3
WARN_BYTES = 10 * 2**20
REFUSE_BYTES = 25 * 2**20
SUMS = "SHA256SUMS"


def _written(run: Path) -> int:
    """When a run wrote its last, in ns. Not its name: "unknown" has no date."""
    for path in (run / "events.jsonl", run / "bundle.json", run):
        with suppress(OSError):
            return path.stat().st_mtime_ns
    return 0


def previous_runs(folder: Path) -> list[Path]:
    """Earlier runs of the same commit, oldest first."""
    found = (p for p in (folder / "prev").glob("*") if p.is_dir())
    return sorted(found, key=lambda p: (_written(p), p.name))


def free_name(path: Path) -> Path:
    """`path`, or where that is taken the first of path-2, path-3, ... that is not."""
    others = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def set_aside(folder: Path, run_id: str | None) -> Path | None:
    """Move what an earlier run left in `folder` to prev/<run_id>; keep it and the newest two."""
    items = [p for p in folder.iterdir() if p.name not in ("prev", ".ballast")]
    if not items:
        return None
    target = free_name(folder / "prev" / (run_id or "unknown"))
    target.mkdir(parents=True)
    for item in items:
        os.replace(item, target / item.name)
    others = [p for p in previous_runs(folder) if p != target]  # a clock may have been ahead
    for old in others[: 1 - KEEP_PREVIOUS]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def members(folder: Path) -> list[Path]:
    """The files that belong to the bundle of this run, sorted by name."""
    hidden = lambda parts: parts[0] == "prev" or any(part.startswith(".") for part in parts)
    found = (p for p in folder.rglob("*") if not hidden(p.relative_to(folder).parts))
    return sorted(p for p in found if p.is_file())


def inventory(folder: Path) -> list[dict[str, Any]]:
    """The `files` of bundle.json: everything but bundle.json itself and the check sums."""
    size = lambda p: {"bytes": p.stat().st_size, "sha256": sha256(p)}
    files = [p for p in members(folder) if p.name not in ("bundle.json", SUMS)]
    return [{"path": p.relative_to(folder).as_posix(), **size(p)} for p in files]


def write_sums(folder: Path) -> None:
    """SHA256SUMS, which `sha256sum -c SHA256SUMS` checks inside the folder."""
    files = [p for p in members(folder) if p.name != SUMS]
    lines = (f"{sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in files)
    write_atomic(folder / SUMS, "".join(lines))


def renew_sums(folder: Path, names: Iterable[str]) -> None:
    """The sums of `names` anew and all others as they are, for a report that is made again."""
    path = folder / SUMS
    if not path.is_file():
        return
    listed = [line.partition("  ") for line in path.read_text(encoding="utf-8").splitlines()]
    lines = {name: digest for digest, _, name in listed}
    lines |= {name: sha256(folder / name) for name in names}
    write_atomic(path, "".join(f"{lines[name]}  {name}\n" for name in sorted(lines)))


def archive(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tgz")


def pack(folder: Path) -> tuple[Path, str, int]:
    """<folder>.tgz with nobody's name in it: (path, sha256, bytes). ValueError when over 25 MiB."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in members(folder):
                info = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
                data = path.read_bytes()
                info.size, info.mode, info.mtime = len(data), 0o644, int(path.stat().st_mtime)
                tar.addfile(info, io.BytesIO(data))
    data = buffer.getvalue()
    if len(data) > REFUSE_BYTES:
        size = f"{len(data) / 2**20:.1f} MiB"
        raise ValueError(f"the archive is {size}, over the limit of {REFUSE_BYTES // 2**20} MiB")
    target = archive(folder)
    write_atomic(target, data)
    return target, hashlib.sha256(data).hexdigest(), len(data)
