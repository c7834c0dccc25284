"""Which sources these are: the commit, and whether what runs is what it says."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.box.env import ProbeFailed, command
from scripts.oneshot.record.redact import URL_USERINFO

SOURCES = ("nsa", "bench", "scripts", "templates", "configs")
# In the root: a stage starts there and would import them, whatever their name shadows.
_IMPORTABLE = ("*.py", "*.so", "*/__init__.py", "pytest.ini", "tox.ini", "setup.cfg")
# What is loaded counts however it is hidden from git: by .gitignore, .git/info/exclude or a user's.
_LOADED = tuple(".py .pyc .so .pth .ini .cfg .toml .yaml .j2 .cu .cuh .h".split())

# Of a diff: content as it is, whatever a user's settings would show.
_DIFF = ("diff", "HEAD", "--no-ext-diff")
HIDDEN_SHOWN = 20
_FACTS = (
    "commit short head branch dirty diff_sha256 diffstat untracked remote source source_sha256 "
    "hidden"
).split()


class Git:
    """Asks git about the sources in `root`. Raises ProbeFailed."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.root, self.timeout_s = root, timeout_s
        # As in a hook of another repository: none of its variables means these sources.
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def __call__(self, *args: str, **variables: str) -> str:
        safe = ["git", "-c", f"safe.directory={self.root}", "-C", str(self.root)]
        how = {"errors": "surrogateescape", "env": {**self._environ, **variables}}
        return command([*safe, "--no-optional-locks", *args], self.timeout_s, **how)

    def names(self, *args: str, **variables: str) -> list[str]:
        """Return the names of files among the sources that a question answers."""
        where = [*SOURCES, *(f":(glob){name}" for name in _IMPORTABLE)]
        found = self(*args, "-z", "--", *where, **variables).encode("utf-8", "surrogateescape")
        return [os.fsdecode(name) for name in found.split(b"\0") if name]


def _changed_unseen(git: Git) -> list[str]:
    """Return changed sources that are marked assume-unchanged or skip-worktree."""
    if not re.search(r"(?m)^[a-zS]", git("ls-files", "-v")):
        return []
    with tempfile.TemporaryDirectory() as folder:  # an index without marks
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        git("read-tree", "HEAD", **index)
        seen = set(git.names(*_DIFF, "--name-only"))
        return [n for n in git.names(*_DIFF, "--name-only", **index) if n not in seen]


def _changes(git: Git, out: Path | None) -> dict[str, Any]:
    """Return how the sources differ from the commit, also where git was told not to look."""
    root = git.root
    diff = git(*_DIFF, "--binary")
    unseen = _changed_unseen(git)
    others = set(git.names("ls-files", "--others", "--exclude-standard"))
    loaded = [n for n in git.names("ls-files", "--others") if n.endswith(_LOADED)]
    ignored = [n for n in loaded if n not in others and "__pycache__" not in Path(n).parts]
    extra = [n for n in others.union(ignored) if not _is_output(root / n, out)]
    hidden = [n for n in unseen + ignored if n in unseen or n in extra]
    if not (diff.strip() or extra or unseen):
        return {"untracked": 0, "dirty": False}
    digest = hashlib.sha256(diff.encode("utf-8", "surrogateescape"))
    for name in sorted(extra + unseen):
        digest.update(os.fsencode(name) + b"\0")
        if (root / name).is_file():  # one that is marked may be deleted
            digest.update((root / name).read_bytes())
    facts = {"untracked": len(extra), "dirty": True, "diff_sha256": digest.hexdigest()}
    stat = git(*_DIFF, "--shortstat").strip() or None
    return {**facts, "hidden": sorted(hidden)[:HIDDEN_SHOWN] or None, "diffstat": stat}


def git_facts(
    root: Path, commit: str | None = None, out: Path | None = None, timeout_s: float = 20.0
) -> dict[str, Any]:
    """Say which sources these are. `commit` (from --commit or NSA_COMMIT) wins over the repository.

    Where it is not the commit that git has checked out, `head` is that one, and whether the sources
    are clean is unknown: a copied tree may carry another .git along. Where git cannot tell that,
    `source_sha256` is the hash of the sources. Without git or a readable repository the short name
    is `nogit-<that hash>`. What runs wrote into `out` is no source. timeout_s: of each question to
    git. Files whose changes git was told not to see are looked at all the same.
    """
    facts: dict[str, Any] = {**dict.fromkeys(_FACTS), "source": "git"}
    git = Git(root, timeout_s)
    try:
        top = git("rev-parse", "--show-toplevel").strip().encode("utf-8", "surrogateescape")
        if not os.path.samefile(os.fsdecode(top), root):
            raise ProbeFailed("the sources lie inside another repository")
        facts["commit"] = git("rev-parse", "HEAD").strip()
        facts["short"] = git("rev-parse", "--short", "HEAD").strip()
        with suppress(ProbeFailed):
            facts["branch"] = git("symbolic-ref", "--short", "-q", "HEAD").strip()
        with suppress(ProbeFailed):
            facts["remote"] = plain_remote(git("remote", "get-url", "origin").strip())
        facts.update(_changes(git, out))
    except (ProbeFailed, OSError) as error:
        facts["problem"] = str(error)
    if commit:
        head = facts["commit"] or _head_without_git(root)
        if facts["commit"] and not commit.startswith("-"):
            with suppress(ProbeFailed):  # the name of a branch or a tag
                named = git("rev-parse", "--verify", "-q", f"{commit}^{{commit}}").strip()
                commit = head if named == head else commit
        agrees = head is not None and head.startswith(commit.lower())
        if not (agrees and facts["commit"]):
            facts.update(commit=commit, short=commit[:7], source="given by the caller")
        if head and not agrees:
            facts.update(head=head, branch=None, dirty=None)
            facts["source"] += f", git has {head[:10]}"
    elif not facts["commit"] and (read := _head_without_git(root)):
        facts.update(commit=read, short=read[:7], source=".git read without git")
    if facts["dirty"] is None or "problem" in facts:
        facts["source_sha256"] = source_hash(root, out)
    if not facts["short"]:
        name = f"nogit-{facts['source_sha256'][:10]}"
        facts.update(short=name, source="hash of the sources")
    facts["short"] = re.sub(r"[^A-Za-z0-9._-]", "-", facts["short"])[:40].lstrip(".-") or "unnamed"
    return facts


def same_sources(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Do two answers of git_facts speak of the same sources, as far as they can tell?"""
    told = ("commit", "short", "head", "diff_sha256", "source_sha256")
    return all(a.get(k) == b.get(k) for k in told)


def _is_output(path: Path, out: Path | None) -> bool:
    """Did a run write `path` into `out`: in its folder, or as its archive or lock beside that?"""
    if out is None or out not in path.parents:
        return False
    first = out / path.relative_to(out).parts[0]
    return path.suffix in (".tgz", ".lock") if first == path else (first / "events.jsonl").is_file()


def plain_remote(url: str) -> str:
    """Return host and path of a remote, nothing else."""
    url = URL_USERINFO.sub(r"\1", url)
    url = re.sub(r"(?i)^([a-z][a-z0-9+.-]*://)?([^/:]*@|[^/]*@)?", "", url)
    url = re.sub(r"^([^/:]+):(?:\d+/)?", r"\1/", url)
    return re.sub(r"[?#].*$", "", url).removesuffix(".git")


def _head_without_git(root: Path) -> str | None:
    """Return the commit of .git/HEAD, for a box that has the repository but no git."""
    with suppress(OSError):
        folder = root / ".git"
        if folder.is_file():  # of a worktree: the folder is named inside
            folder = root / folder.read_text().strip().removeprefix("gitdir: ")
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if re.fullmatch(r"[0-9a-f]{40,64}", head) else None
        ref = head[5:]
        with suppress(OSError):  # a worktree has its branch in the folder of the repository
            folder = folder / (folder / "commondir").read_text().strip()
        with suppress(OSError):
            return (folder / ref).read_text().strip()
        packed = (folder / "packed-refs").read_text()
        return next((x.split()[0] for x in packed.splitlines() if x.endswith(" " + ref)), None)
    return None


def source_hash(root: Path, out: Path | None = None) -> str:
    """Hash names and contents of the sources, without what runs wrote into `out`."""
    digest = hashlib.sha256()
    paths = {path for folder in SOURCES for path in (root / folder).rglob("*")}
    for path in sorted(paths.union(*(root.glob(name) for name in _IMPORTABLE))):
        if path.is_file() and "__pycache__" not in path.parts and not _is_output(path, out):
            digest.update(os.fsencode(path.relative_to(root).as_posix()) + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
