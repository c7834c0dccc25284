"""Bundles as others find them: a folder or a .tgz, perhaps from a stranger, perhaps cut short."""

from __future__ import annotations

import lzma
import shutil
import stat
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from scripts.oneshot.record.journal import dumps, parse_json, read_events
from scripts.oneshot.record.model import FACTS, SCHEMA, RunRecord, StageResult, check_shape
from scripts.oneshot.record.rows import RowError, parse_row

MAX_MEMBERS = 5000
MAX_ARCHIVE_BYTES = 100 * 2**20
MAX_UNPACKED_BYTES = 500 * 2**20
MAX_JSON_BYTES = 200 * 2**20
# What tarfile raises for an archive that is none.
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, struct.error)
UNREADABLE = (*_BROKEN, EOFError, OSError, OverflowError, ValueError, MemoryError)


class BundleError(ValueError):
    """What was given is no bundle, or one that must not be opened; the text says why."""


class NoBundle(BundleError):
    """There is nothing at the path that could be a bundle."""


def read_bundle(folder: Path) -> dict[str, Any]:
    """The object of bundle.json. BundleError when it is missing, broken or of another schema."""
    path = folder / "bundle.json"
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # a pipe would never end
            raise BundleError(f"{path.name} is no regular file")
        if info.st_size > MAX_JSON_BYTES:
            raise BundleError(f"{path.name} is over {MAX_JSON_BYTES // 2**20} MiB")
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"no bundle.json in {folder}") from None
    except OSError as error:
        raise BundleError(f"bundle.json cannot be read: {error.strerror}") from None
    except BundleError:
        raise
    except ValueError as error:
        raise BundleError(f"bundle.json is not valid JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise BundleError(f"schema of bundle.json must be {SCHEMA!r}, got {found!r}")
    return data


def rebuild(folder: Path) -> tuple[dict[str, Any], str]:
    """The run in `folder` as the object of a bundle, and the file that it was rebuilt from.

    From events.jsonl, whose half last line is dropped; from bundle.json where there is no journal.
    """
    events = read_events(folder / "events.jsonl")
    if any(event.get("ev") == "run_start" for event in events):
        return RunRecord.replay(events).to_bundle(), "events.jsonl"
    data = read_bundle(folder)
    try:
        check_bundle(data)
    except (TypeError, ValueError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
        raise BundleError(f"bundle.json has not the shape of its schema: {text}") from None
    return data, "bundle.json"


def check_bundle(data: dict[str, Any]) -> None:
    """TypeError, ValueError or KeyError unless `data` has the shape of RunRecord.to_bundle()."""
    like = RunRecord().to_bundle()
    of_rows = ("tests", "parity", "bench", "metrics", "notes", "artifacts", "files")
    of_stage = ("id", "status", "reason", "argv", "env", "counts")
    whole = {name: type(x) if isinstance(x, (dict, list)) else object for name, x in like.items()}
    shape = {
        **whole, **dict.fromkeys(of_rows, [dict]), "resumed": {"*": list}, "ended_by": str,
        **{name: FACTS[name] for name in ("run_id", "profile", "scope", "env", "doctor")},
        **dict.fromkeys(("health", "recommend"), (dict, type(None))),
        "verdict": {name: type(x) for name, x in like["verdict"].items()},
        "stages": [dict.fromkeys(of_stage, object)],
    }  # fmt: skip
    check_shape("bundle.json", data, shape)
    for stage in data["stages"]:
        StageResult.from_json(stage)


def read_text(folder: Path, name: Any) -> str | None:
    """A text file of the bundle; None where it is missing or its name leads out of the folder."""
    if not isinstance(name, str) or not name:
        return None
    path = folder / name
    with suppress(OSError, ValueError):  # a pipe would never end
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return path.read_bytes().decode("utf-8", "replace")
    return None


def held_to_rules(rows: Any, kind: str) -> tuple[list[dict[str, Any]], int]:
    """Rows that passed `rows.parse_row` once more, and how many were no rows at all."""
    kept, broken = [], 0
    for row in rows if isinstance(rows, list) else []:
        try:
            checked = parse_row(dumps({**row, "kind": kind}))
            kept.append({**checked, "stage": str(row.get("stage") or "")})
        except (RowError, TypeError, ValueError):
            broken += 1
    return kept, broken


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The folder of a bundle; an archive is unpacked into a private folder that goes away again.

    Nothing of a bundle is executed. BundleError for anything that is no bundle or unsafe to unpack:
    links, devices, absolute or climbing names, too many or too large files.
    """
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise NoBundle(f"{path} is neither a folder nor an archive")
    if path.stat().st_size > MAX_ARCHIVE_BYTES:
        raise BundleError(f"{path.name} is over {MAX_ARCHIVE_BYTES // 2**20} MiB")
    target = Path(tempfile.mkdtemp(prefix="nsa-bundle-"))
    try:
        yield _unpack(path, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _unpack(archive: Path, target: Path) -> Path:
    total, seen = 0, set()
    try:
        with tarfile.open(archive, "r:*") as tar:
            for count, info in enumerate(tar, 1):
                if count > MAX_MEMBERS:
                    raise BundleError(f"{archive.name} has over {MAX_MEMBERS} members")
                parts = _safe_parts(info)
                if info.isdir():
                    continue
                total += info.size
                if total > MAX_UNPACKED_BYTES:
                    limit = MAX_UNPACKED_BYTES // 2**20
                    raise BundleError(f"{archive.name} unpacks to over {limit} MiB")
                if parts in seen:
                    raise BundleError(f"{info.name!r} is in {archive.name} twice")
                seen.add(parts)
                source = tar.extractfile(info)
                out = target.joinpath(*parts)
                out.parent.mkdir(parents=True, exist_ok=True)
                with open(out, "xb") as file:
                    shutil.copyfileobj(source, file)
    except BundleError:
        raise
    except UNREADABLE as error:
        raise BundleError(f"{archive.name} cannot be unpacked: {error}") from None
    tops = {parts[0] for parts in seen}
    if len(tops) != 1 or not (target / next(iter(tops))).is_dir():
        raise BundleError(f"{archive.name} must hold one folder, got {len(tops)} top entries")
    return target / tops.pop()


def _safe_parts(info: tarfile.TarInfo) -> tuple[str, ...]:
    name, parts = info.name, PurePosixPath(info.name).parts
    if not (info.isfile() or info.isdir()):
        raise BundleError(f"{name!r} is a link or a special file")
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(f"{name!r} would leave the folder it is unpacked into")
    if not parts or len(name) > 500 or len(parts) > 20:
        raise BundleError(f"{name[:80]!r} is no usable file name")
    return parts
