"""The last search for private text: over every file and file name of a bundle."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.oneshot.record.journal import write_atomic
from scripts.oneshot.record.redact import Redactor

_PICTURES = {".png": b"\x89PNG\r\n\x1a\n"}
_MARKUP = (".html", ".htm", ".svg", ".xml")
_PLACEHOLDER = re.compile(
    r"<((?:secret|email|gpu|pci|mac|ip)-\d+|user|host|venv|repo|board|pid|process)>"
)


def gate(folder: Path, redactor: Redactor) -> dict[str, Any]:
    """Clean every file and file name under `folder`, then look again.

    Returns {"gate": "clean"|"failed", "findings": [{rule, file, line, count}], "removed": [...]}.
    A file that is neither UTF-8 text nor a known picture is removed: nobody can vouch for it.
    An earlier run with check sums passed its own gate and is left as it was sealed.
    """
    findings: list[dict[str, Any]] = []
    removed: list[str] = []
    for path in sorted(_unsealed(folder), key=lambda p: -len(p.parts)):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # a pipe, a device
            path.unlink()
            removed.append(redactor.text(path.name))
            continue
        if path.is_file():
            _clean_file(path, folder, redactor, findings, removed)
        safe = _safe_name(path.name, redactor)
        if safe != path.name and path.exists():
            findings.append({"rule": "name", "file": safe, "line": 0, "count": 1})
            path.rename(_free_name(path.with_name(safe)))
    still = list(_hits(folder, redactor))
    for file, rule in still:
        findings.append({"rule": rule, "file": file, "line": None, "count": 1})
    return {"gate": "failed" if still else "clean", "findings": findings, "removed": removed}


def _unsealed(folder: Path) -> list[Path]:
    """Everything under `folder` but prev/<run id> of runs that were sealed by their check sums."""
    sealed = {sums.parent for sums in folder.glob("prev/*/SHA256SUMS")}
    return sorted(
        path for path in folder.rglob("*") if path not in sealed and sealed.isdisjoint(path.parents)
    )


def _safe_name(name: str, redactor: Redactor) -> str:
    """`name` without anything private, and so that it stays when it is looked at again."""
    for _ in range(8):  # what is left of a placeholder may look like an address with its neighbours
        clean = redactor.text(name)
        if clean == name:
            return name
        name = re.sub(r"[<>]", "", clean)
    return "private" + Path(name).suffix[:8]


def _free_name(path: Path) -> Path:
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate


def _decode(path: Path) -> str | None:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _clean_file(
    path: Path, folder: Path, redactor: Redactor, findings: list[dict[str, Any]], removed: list[str]
) -> None:
    name = redactor.text(path.relative_to(folder).as_posix())
    text = _decode(path)
    if text is None:
        magic = _PICTURES.get(path.suffix)
        if magic is None or path.read_bytes()[: len(magic)] != magic:
            path.unlink()
            removed.append(name)
        return
    before = redactor.counts.total()
    clean = redactor.text(text)
    if path.suffix in _MARKUP:  # there a bare placeholder would be a tag
        clean = _PLACEHOLDER.sub(r"&lt;\1&gt;", clean)
    if clean == text:
        return
    for number, line in enumerate(text.split("\n"), 1):
        for rule, count in _found(line, redactor)[1].items():
            if len(findings) < 500:
                findings.append({"rule": rule, "file": name, "line": number, "count": count})
    if redactor.counts.total() == before:
        redactor.counts["other"] += 1
    write_atomic(path, clean)


def _found(text: str, redactor: Redactor) -> tuple[str, Counter[str]]:
    """`text` without anything private, and what was found in it by rule, which counts no more: it
    is counted once, over the whole file."""
    kept, redactor.counts = redactor.counts, Counter()
    clean = redactor.text(text)
    found, redactor.counts = redactor.counts, kept
    return clean, found


def _hits(folder: Path, redactor: Redactor) -> list[tuple[str, str]]:
    """(file, rule) of everything private that is still there."""
    out = []
    for path in _unsealed(folder):
        name = path.relative_to(folder).as_posix()
        text = _decode(path) if path.is_file() else ""
        for subject in (name, text or ""):
            clean, found = _found(subject, redactor)
            if clean != subject:
                out += [(_found(name, redactor)[0], rule) for rule in found or ("other",)]
    return out
