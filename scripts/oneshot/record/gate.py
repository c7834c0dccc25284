"""The last search for private text: over every file and file name of a bundle."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.oneshot.record.bundle import free_name
from scripts.oneshot.record.journal import write_atomic
from scripts.oneshot.record.redact import Redactor

MOST_FINDINGS = 500
_MARKUP = (".html", ".htm", ".svg", ".xml")
_PLACEHOLDER = re.compile(
    r"<((?:secret|email|gpu|pci|mac|ip)-\d+|user|host|venv|repo|board|pid|process)>"
)


def gate(folder: Path, redactor: Redactor) -> dict[str, Any]:
    """Clean every file and file name under `folder`, then look again.

    Returns {"gate": "clean"|"failed", "findings": [{rule, file, line, count}], "removed": [...]}.
    A file that is no UTF-8 text is removed: nobody can vouch for it. An earlier run with check sums
    passed its own gate and is left as it was sealed.
    """
    findings: list[dict[str, Any]] = []
    removed: list[str] = []

    def found(rule: str, file: str, line: int | None, count: int = 1) -> None:
        findings.append({"rule": rule, "file": file, "line": line, "count": count})

    for path in sorted(_unsealed(folder), key=lambda p: -len(p.parts)):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # a pipe, a device
            path.unlink()
            removed.append(redactor.text(path.name))
            continue
        if path.is_file():
            name = redactor.text(path.relative_to(folder).as_posix())
            text = decoded(path)
            if text is None:
                path.unlink()
                removed.append(name)
                continue
            before, clean = redactor.counts.total(), redactor.text(text)
            if path.suffix in _MARKUP:  # there a bare placeholder would be a tag
                clean = _PLACEHOLDER.sub(r"&lt;\1&gt;", clean)
            if clean != text:
                if redactor.counts.total() == before:
                    redactor.counts["other"] += 1
                for number, line in enumerate(text.split("\n"), 1):
                    for rule, count in found_in(line, redactor)[1].items():
                        found(rule, name, number, count)
                write_atomic(path, clean)
        safe = _safe_name(path.name, redactor)
        if safe != path.name:
            found("name", safe, 0)
            path.rename(free_name(path.with_name(safe)))
    del findings[MOST_FINDINGS:]
    fine = len(findings)
    for path in _unsealed(folder):
        name = path.relative_to(folder).as_posix()
        for text in (name, (decoded(path) or "") if path.is_file() else ""):
            clean, rules = found_in(text, redactor)
            for rule in (rules or ("other",)) if clean != text else ():
                found(rule, found_in(name, redactor)[0], None)
    state = "clean" if len(findings) == fine else "failed"
    return {"gate": state, "findings": findings, "removed": removed}


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


def decoded(path: Path) -> str | None:
    """The text of a file; None for one that is no UTF-8 text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def found_in(text: str, redactor: Redactor) -> tuple[str, Counter[str]]:
    """`text` without anything private, and what was found in it by rule, which counts no more: it
    is counted once, over the whole file."""
    kept, redactor.counts = redactor.counts, Counter()
    clean = redactor.text(text)
    found, redactor.counts = redactor.counts, kept
    return clean, found
