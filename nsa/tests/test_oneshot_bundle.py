"""The folder of a run: earlier runs are kept, check sums hold, the archive has limits."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from nsa.tests.oneshot_faults import git
from scripts.oneshot.box import checkout, doctor
from scripts.oneshot.record import bundle, judge
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.run import lock
from scripts.oneshot.run.lock import Lock, Locked, gpu_lock


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "abc1234"
    for name in ("report.md", "logs/a.log", ".ballast", "prev/20251101/report.md"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(f"{name}\n")
    return made


def test_earlier_runs_are_moved_and_three_are_kept(folder):
    for n in range(5):
        (folder / "report.md").write_text(f"run {n}")
        bundle.set_aside(folder, f"2026112{n}")
    kept = [p.name for p in bundle.previous_runs(folder)]
    assert kept == ["20261122", "20261123", "20261124"]
    assert (folder / "prev" / "20261124" / "report.md").read_text() == "run 4"
    assert bundle.set_aside(folder, "x") is None  # nothing left to move
    for text in ("first", "second"):  # the same run id twice overwrites nothing
        (folder / "report.md").write_text(text)
        bundle.set_aside(folder, "r")
    assert {p.read_text() for p in folder.glob("prev/r*/report.md")} == {"first", "second"}


def test_runs_are_old_by_when_they_wrote_and_not_by_name(folder):
    """ "unknown" sorts after all dates, and so does the name of a clock that was ahead."""
    for at, name in enumerate(("unknown", "20991231", "20261122")):
        (folder / "prev" / name).mkdir()
        (folder / "prev" / name / "events.jsonl").touch()
        os.utime(folder / "prev" / name / "events.jsonl", (1e9 + at, 1e9 + at))
    os.utime(folder / "prev" / "20251101", (1, 1))
    (folder / "events.jsonl").touch()
    os.utime(folder / "events.jsonl", (5e8, 5e8))  # a clock that went back: spared all the same
    target = bundle.set_aside(folder, "20261121")
    kept = [p.name for p in bundle.previous_runs(folder)]
    assert target.is_dir() and kept == ["20261121", "20991231", "20261122"]


def test_sums_and_archive_hold_this_run_only(folder):
    bundle.write_sums(folder)
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=False)
    assert done.returncode == 0
    path, digest, size = bundle.pack(folder)
    assert digest == bundle.sha256(path) and size == path.stat().st_size
    with tarfile.open(path) as tar:
        names = sorted(tar.getnames())
    assert names == ["abc1234/SHA256SUMS", "abc1234/logs/a.log", "abc1234/report.md"]


def test_too_large_an_archive_is_refused(folder, monkeypatch):
    monkeypatch.setattr(bundle, "REFUSE_BYTES", 100)
    with pytest.raises(ValueError, match="over the limit"):
        bundle.pack(folder)
    assert not folder.with_name("abc1234.tgz").exists()
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError))
    with pytest.raises(OSError):
        bundle.pack(folder)
    assert not list(folder.parent.glob("*abc1234.tgz*"))


def test_one_lock_per_gpu_whatever_tmpdir_says(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert gpu_lock("GPU-1").path.parent == Path("/tmp")
    monkeypatch.setattr(lock, "LOCKS", tmp_path / "absent")  # or read-only
    assert gpu_lock("GPU-1").path.parent == tmp_path


def test_a_lock_follows_no_link_and_a_stopped_run_waits_for_none(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link.lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        Lock(tmp_path / "link.lock", "x").acquire()
    assert (tmp_path / "target").read_text() == "precious"
    held, asked = Lock(tmp_path / "l.lock", "x"), []
    held.acquire()
    with pytest.raises(Locked, match="held by process"):
        Lock(tmp_path / "l.lock", "x").acquire(600, lambda: asked.append(1) or len(asked) > 1)
    assert len(asked) == 2
    held.release()


# ---- which sources -------------------------------------------------------------------------------


def committed(sources):
    git(sources, "init", "-q", "-b", "main")
    git(sources, "add", ".")
    git(sources, "commit", "-q", "-m", "one")
    return facts(sources)


facts = checkout.git_facts


@pytest.fixture
def sources(tmp_path):
    root = tmp_path / "src"
    (root / "nsa").mkdir(parents=True)
    (root / "nsa" / "a.py").write_text("x = 1\n")
    return root


def test_a_name_that_is_not_of_the_locale(sources):
    folder = sources.rename(sources.with_name("ünï"))
    state = committed(folder)
    code = "from scripts.oneshot.box.checkout import git_facts as f; from pathlib import Path; " \
           "import sys; print(f(Path(sys.argv[1]))['commit'])"  # fmt: skip
    environ = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, env=environ, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.decode().strip() == state["commit"]


def test_git_state(sources):
    committed(sources)
    for url, plain in (
        ("git@github.com:o/r.git", "github.com/o/r"),
        ("https://x:tok@h.example/o/r.git?a=b", "h.example/o/r"),
        ("ssh://git@h.example:2222/o/r", "h.example/o/r"),
        ("https://user:sec/ret@h.example/o/r", "h.example/o/r"),
        ("HTTPS://a@b.example:P@s/w@h.example/o/r", "h.example/o/r"),
        ("https://h.example:8443/@o/r", "h.example/@o/r"),
        ("git@h.example:@o/r.git", "h.example/@o/r"),
        ("/srv/a@b/c", "/srv/a@b/c"),
        ("https://alice:P@ssw0rd!2024@git.example.com/o/r.git", "git.example.com/o/r"),
    ):
        assert checkout.plain_remote(url) == plain
    git(sources, "remote", "add", "origin", url)
    clean = facts(sources)
    assert (clean["dirty"], clean["branch"], clean["remote"]) == (False, "main", plain)
    assert clean["commit"].startswith(clean["short"])
    (sources / "nsa" / "b.py").write_text("new\n")
    extra = facts(sources)
    assert extra["dirty"] and extra["untracked"] == 1
    (sources / "nsa" / "a.py").write_text("x = 2\n")
    changed = facts(sources)
    assert changed["diff_sha256"] not in (None, extra["diff_sha256"])
    assert "1 file changed" in changed["diffstat"]


def test_where_git_cannot_tell_the_hash_of_the_sources_does(sources):
    """Without a commit it names them; a copied tree with the commit it came from may be edited."""
    given = lambda: facts(sources, "deadbeef01")
    first, before = facts(sources), given()
    assert first["short"].startswith("nogit-") and len(first["short"]) == 16
    assert checkout.same_sources(before, given()) and before["short"] == "deadbee"
    (sources / "nsa" / "a.py").write_text("x = 3\n")
    assert facts(sources)["short"] != first["short"]
    assert not checkout.same_sources(before, given())
    assert committed(sources)["source_sha256"] is None  # git tells
    foreign = given()  # another .git came along
    (sources / "nsa" / "b.py").write_text("new\n")
    assert not checkout.same_sources(foreign, given())


def test_sources_that_git_was_told_not_to_see_are_not_clean(sources):
    (sources / "nsa" / "b.py").write_text("y = 1\n")
    clean = committed(sources)
    for name, mark in (("nsa/a.py", "--assume-unchanged"), ("nsa/b.py", "--skip-worktree")):
        git(sources, "update-index", mark, name)
        assert facts(sources) == clean  # a mark alone changes nothing
        (sources / name).write_text("x = 2\n")
        found = facts(sources)
        assert found["dirty"] and found["hidden"] == [name]
        git(sources, "update-index", mark.replace("--", "--no-"), name)
        git(sources, "checkout", "-q", name)


LOADED = "conftest.py nsa/conftest.py nsa/x.pth pytest.ini sitecustomize.py torch.py torch.so"


@pytest.mark.parametrize("where", ["", ".git/info/exclude", "nsa/.gitignore"])
def test_a_file_that_is_loaded_counts_however_it_is_hidden(sources, where):
    clean, hashed = committed(sources), checkout.source_hash(sources)
    if where:
        (sources / where).write_text("*\n")
        (sources / "nsa" / "__pycache__").mkdir()
        (sources / "nsa" / "__pycache__" / "a.pyc").write_text("x")
    (sources / ("nsa" if where else "") / "notes.txt").write_text("x")
    assert facts(sources) == clean
    seen = []
    loaded = [*LOADED.split(), "torch/__init__.py"]
    (sources / "torch").mkdir()
    for name in loaded:
        (sources / name).write_text("x")
        found = facts(sources)
        seen += [(found["diff_sha256"], checkout.source_hash(sources))]
        assert found["dirty"] and found["untracked"] == len(seen)
        assert not checkout.same_sources(clean, found)
    hidden = [n for n in loaded if where and (n.startswith("nsa/") or where.startswith(".git/"))]
    assert (found["hidden"] or []) == sorted(hidden)
    assert len({d for d, _ in seen}) == len({h for _, h in seen} | {hashed}) - 1 == len(loaded)


def test_variables_of_another_repository_mean_nothing(sources, tmp_path, monkeypatch):
    """As in a git hook."""
    clean, other = committed(sources), tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    for name, value in {"DIR": ".git", "WORK_TREE": "", "INDEX_FILE": "index"}.items():
        monkeypatch.setenv(f"GIT_{name}", str(other / value))
    assert facts(sources) == clean


def test_names_of_any_bytes_are_sources(sources):
    before = checkout.source_hash(sources)
    assert committed(sources)["dirty"] is False
    (sources / "nsa" / os.fsdecode(b"gr\xfcn.py")).write_text("x")
    assert checkout.source_hash(sources) != before
    for words in ("status", "add ."):  # known to git or not
        git(sources, *words.split())
        found = facts(sources)
        assert found["dirty"] and "problem" not in found


def test_what_runs_wrote_is_no_source(sources):
    """An output folder inside of the sources makes nothing dirty; a source beside it does."""
    clean, out = committed(sources), sources / "nsa" / "mine"
    hashed = checkout.source_hash(sources, out)
    (out / "abc1234" / "logs").mkdir(parents=True)
    for name in ("abc1234/events.jsonl", "abc1234/logs/a.log", "abc1234.tgz", ".abc1234.lock"):
        (out / name).write_text("x")
    assert facts(sources, out=out) == clean
    assert checkout.source_hash(sources, out) == hashed
    assert facts(sources)["untracked"] == 4
    (out / "b.py").write_text("x")
    (out / "package").mkdir()
    (out / "package" / "c.py").write_text("x")
    assert facts(sources, out=out)["untracked"] == 2
    assert checkout.source_hash(sources, out) != hashed


@pytest.mark.parametrize("packed", [False, True])
def test_a_repository_and_a_worktree_without_git_installed(sources, monkeypatch, packed):
    committed(sources)
    tree = sources.parent / "tree"
    git(sources, "worktree", "add", "-q", "-b", "other", str(tree))
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    if packed:
        git(sources, "pack-refs", "--all")
    commits = lambda: [facts(root)["commit"] for root in (tree, sources)]
    own, main = with_git = commits()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert commits() == with_git and own != main


def test_a_given_commit_that_git_does_not_have_is_never_clean(sources, monkeypatch):
    real = committed(sources)
    found = facts(sources, "deadbeefcafe")
    assert found["short"] == "deadbee" and found["head"] == real["commit"]
    assert found["dirty"] is None and found["branch"] is None
    assert real["commit"][:10] in found["source"]
    line = judge.verdict(RunRecord(git=found), [])["one_line"]
    assert f"commit deadbee as given, but git has {real['short'][:7]}" in line
    level, text, _ = doctor.git(doctor.Box(False, sources, {}, {}, found, {}))
    assert level == "WARN" and "deadbee" in text and real["commit"][:10] in text
    monkeypatch.setenv("PATH", "/nonexistent")  # .git is there, git is not
    assert facts(sources, "deadbeefcafe")["head"] == real["commit"]


def test_a_given_name_of_what_is_checked_out_is_that_commit(sources):
    real = committed(sources)
    for name in (real["commit"], real["short"], real["short"].upper(), "main"):
        assert facts(sources, name) == real, name
