"""The fault campaign: every way a run can go wrong, injected once, each held to the same promises.

After each case: the verdict and the exit code are the right ones; `verify` finds nothing, or names
exactly what a run that was cut off could not write; the journal gives a report by itself; nothing
planted is found in any file, name or archive; no process of the run is alive.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the report needs jinja2")

from nsa.tests import oneshot_faults as faults
from nsa.tests.oneshot_faults import CANARIES, COMMIT, PRIVATE, ROOT, Outcome, fake_gpu
from nsa.tests.test_oneshot_page import inert
from scripts.oneshot.box.processes import TAG
from scripts.oneshot.compare import verify
from scripts.oneshot.record.journal import read_events
from scripts.oneshot.record.model import SHARDS, RunRecord
from scripts.oneshot.record.reading import rebuild
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Shape

LEAST = 40

# In the environment of every case; none of it may be found in what the case leaves.
PLANTED = {f"PLANTED_{name.upper()}_TOKEN": text for name, text in CANARIES.items()} | {
    "MY_SERVICE_PASSWORD": "plain-looking-value-4711",
    "HOSTNAME": "pod-9f8e7d6c5b",
}
SECRETS = (*PRIVATE.values(), "plain-looking-value-4711", "pod-9f8e7d6c5b")

NOT_REDACTED = (
    r"no SHA256SUMS: .*",
    r"the redaction gate is 'failed', not clean",
)
# What `verify` may say of a run that was cut off, and nothing else.
CUT_OFF = (
    r"no SHA256SUMS: the run did not come to its end, or was not packed",
    r"no bundle\.json in .*",
    r"the redaction gate is 'pending', not clean",
    r"\w+ in bundle\.json is not what events\.jsonl gives",
    r"report\.md does not begin with the verdict of bundle\.json",  # written before, or after it
)


@dataclass
class Case:
    """One fault: the stages of the run, what goes wrong, and what must come of it."""

    stages: str
    code: int
    status: str
    fault: dict = field(default_factory=dict)
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None  # of the process, where it is not the verdict's
    cut_off: bool = False
    render: bool = False  # the full report, not only the short one
    gpu: bool = False
    told: tuple[str, ...] = ()  # what `verify` must say besides, as patterns
    check: Callable[[Outcome], None] = lambda outcome: None


def go(out: Path, stages: str, *options: str, env=None, **how) -> Outcome:
    """One run, with what is planted in its environment."""
    return faults.go(out, stages, *options, env=PLANTED | (env or {}), **how)


# ---- the promises --------------------------------------------------------------------------------


def everything(out: Path) -> bytes:
    """Every name and every byte under `out`, archives unpacked."""
    parts = []
    for path in sorted(out.rglob("*")):
        parts.append(path.relative_to(out).as_posix().encode("utf-8", "surrogateescape"))
        if path.is_symlink():
            parts.append(os.readlink(path).encode())
        elif path.suffix == ".tgz":
            with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
                for member in tar:
                    parts.append(member.name.encode())
                    if member.isfile():
                        parts.append(tar.extractfile(member).read())
        elif path.is_file():
            parts.append(path.read_bytes())
    return b"\n".join(parts)


def orphans(folder: Path, limit_s: float = 3.0) -> list[str]:
    """Processes that carry the tag of the run in `folder`, once they had time to go."""
    ids = {e["run_id"] for e in read_events(folder / "events.jsonl") if e["ev"] == "run_start"}
    tags = [f"{TAG}={run_id}:".encode() for run_id in ids]
    deadline = time.monotonic() + limit_s
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if any(tag in variables for tag in tags):
                found.append(entry.name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def nothing_leaked(outcome: Outcome) -> None:
    content = everything(outcome.out)
    for secret in SECRETS:
        assert secret.encode() not in content, f"{secret[:12]}... is in the folder"
        assert secret not in outcome.console, f"{secret[:12]}... is on the console"


def whole(outcome: Outcome, told: tuple[str, ...] = ()) -> None:
    """verify finds nothing, or just what is in `told`."""
    found = list(dict.fromkeys(verify.check(outcome.folder)))
    unexpected = [p for p in found if not any(re.fullmatch(t, p) for t in told)]
    assert not unexpected, unexpected
    for pattern in told:
        assert any(re.fullmatch(pattern, p) for p in found), (pattern, found)


def cut_off(outcome: Outcome) -> None:
    """The journal carries the report, and bundle.json is a moment of it as a whole."""
    found = list(dict.fromkeys(verify.check(outcome.folder)))
    assert all(any(re.fullmatch(t, p) for t in CUT_OFF) for p in found), found
    events = read_events(outcome.folder / "events.jsonl")
    if (outcome.folder / "bundle.json").exists():
        moments = [RunRecord.replay(events[:n]).to_bundle() for n in range(1, len(events) + 1)]
        kept = {k: v for k, v in outcome.bundle.items() if k != "files"}
        assert any(kept == {k: m[k] for k in kept} for m in moments)
    assert not [p for p in outcome.folder.rglob("*.tmp")]
    report.render(outcome.folder)
    text = (outcome.folder / "report.md").read_text(encoding="utf-8")
    inert((outcome.folder / "report.html").read_text(encoding="utf-8"))
    data = rebuild(outcome.folder)[0]
    if data["ended_by"] == "crash":
        assert "The run did not end by itself" in text
    if data["redaction"].get("gate") != "clean":
        assert "Not looked over for private data" in text


def held(case: Case, outcome: Outcome) -> None:
    data = rebuild(outcome.folder)[0]
    verdict = data["verdict"]
    assert (verdict["exit_code"], verdict["status"]) == (case.code, case.status), outcome.console
    wanted = case.code if case.exit_code is None else case.exit_code
    assert outcome.code == wanted, outcome.console
    assert all(s["reason"] for s in data["stages"] if s["status"] != "PASS")
    assert not orphans(outcome.folder)
    if case.cut_off:
        cut_off(outcome)
    else:
        whole(outcome, case.told)
        assert outcome.console.rstrip().endswith(f"exit code {case.code}")
    nothing_leaked(outcome)
    case.check(outcome)


# ---- the cases -----------------------------------------------------------------------------------

CASES: dict[str, Case] = {}

# The supervisor is killed right after each edge of a run of two stages.
for edge in (
    "run_start", "stage_start:env", "facts", "stage_end:env", "stage_start:pass", "row:pass",
    "stage_end:pass", "stage_start:bench", "row:bench", "stage_end:bench",
):  # fmt: skip
    CASES[f"killed after {edge}"] = Case(
        "pass,bench", 4, "BROKEN", {"kill": edge}, exit_code=-9, cut_off=True
    )
for edge, fault in {
    "after run_end": {"kill": "run_end"},
    "after the first gate": {"kill": "redaction"},
    "in the short report": {"die_in": "run.runner.short_report", "call": 2},
    "in the gate": {"die_in": "run.runner.gate"},
    "in the list of files": {"die_in": "record.bundle.inventory"},
    "in the check sums": {"die_in": "record.bundle.write_sums"},
    "in packing": {"die_in": "record.bundle.pack"},
}.items():
    CASES[f"killed {edge}"] = Case("pass,bench", 0, "PASS", fault, exit_code=-9, cut_off=True)

# Signals.
CASES |= {
    "SIGTERM before the run began": Case(
        "pass", 143, "STOPPED", {"signal_in": "box.checkout.git_facts", "name": "SIGTERM"},
        check=lambda o: expect(o, **{"pass": "NOT_RUN"}),
    ),
    "SIGTERM while the box is looked at": Case(
        "pass,bench", 143, "STOPPED", {"signal": "stage_start:env", "name": "SIGTERM"},
        check=lambda o: expect(o, bench="NOT_RUN"),
    ),
    "SIGTERM in a hung stage": Case(
        "pass,hang,bench", 143, "STOPPED", {"signal": "row:hang", "name": "SIGTERM"},
        check=lambda o: expect(o, hang="INFRA", bench="NOT_RUN"),
    ),
    "SIGINT in a stage that is deaf": Case(
        "pass,deaf", 130, "STOPPED",
        {"signal": "row:deaf", "name": "SIGINT"},
        check=lambda o: (expect(o, deaf="INFRA"), kind(o, "deaf", "PREEMPTED")),
    ),
    "SIGTERM after the last stage": Case(
        "pass", 0, "PASS", {"signal": "run_end", "name": "SIGTERM"}, render=True,
    ),
    "second SIGINT": Case(
        "pass,deaf", 4, "BROKEN",
        {"signal": "row:deaf", "name": "SIGINT", "delays": [0.0, 0.5]},
        exit_code=130, cut_off=True,
    ),
    "SIGQUIT in a hung stage": Case(
        "pass,hang,bench", 143, "STOPPED", {"signal": "row:hang", "name": "SIGQUIT"},
        check=lambda o: noted(o, "SIGQUIT came, and ended the run as SIGTERM does"),
    ),
    "SIGHUP": Case("pass", 0, "PASS", {"signal": "stage_start:pass", "name": "SIGHUP"}),
}  # fmt: skip

# Stages.
CASES |= {
    "hung stage": Case(
        "pass,hang:1,bench", 4, "BROKEN", check=lambda o: expect(o, hang="TIMEOUT", bench="PASS")
    ),
    "stage that ignores every signal": Case(
        "deaf:1,bench",
        4,
        "BROKEN",
        check=lambda o: (expect(o, deaf="TIMEOUT", bench="PASS"), ended(o, "deaf", "SIGKILL")),
    ),
    "grandchildren in sessions of their own": Case(
        "orphans",
        0,
        "PASS",
        check=lambda o: (expect(o, orphans="PASS"), logged(o, "orphans", "outlived the stage")),
    ),
    "stage killed by SIGKILL": Case(
        "killed,bench", 4, "BROKEN", check=lambda o: expect(o, killed="CRASH", bench="PASS")
    ),
    "stage with a segmentation fault": Case(
        "segfault,bench", 4, "BROKEN", check=lambda o: expect(o, segfault="CRASH", bench="PASS")
    ),
    "hostile bytes on stdout": Case("garbage", 0, "PASS", render=True),
    "garbage on the result pipe": Case(
        "junk_rows", 4, "BROKEN", check=lambda o: expect(o, junk_rows="INFRA")
    ),
    "a result without an end": Case(
        "endless_row,bench", 4, "BROKEN", check=lambda o: expect(o, endless_row="INFRA")
    ),
    "result pipe closed early": Case("closes_results", 0, "PASS"),
    "exit code 0 with a failed test": Case(
        "pass,liar", 1, "FAIL", check=lambda o: expect(o, liar="FAIL")
    ),
    "exit code 0 and nothing ran": Case(
        "pass,nothing", 3, "NOT_RUN", check=lambda o: expect(o, nothing="NOT_RUN")
    ),
    "NaN in a result": Case("pass,nan", 1, "FAIL", check=lambda o: expect(o, nan="FAIL")),
    "another path than asked for": Case(
        "pass,wrong_path", 1, "FAIL", check=lambda o: expect(o, wrong_path="FAIL")
    ),
    "the kernel was never launched": Case(
        "pass,no_launch", 1, "FAIL", check=lambda o: expect(o, no_launch="FAIL")
    ),
    "number without proof": Case(
        "pass,unproven_bench", 5, "INVALID", check=lambda o: expect(o, unproven_bench="FAIL")
    ),
    "module that is missing in a stage": Case(
        "pass,import", 4, "BROKEN", check=lambda o: expect(o, **{"import": "CRASH"})
    ),
    "disk full in a stage": Case(
        "pass,disk_full", 4, "BROKEN", check=lambda o: kind(o, "disk_full", "NO_SPACE")
    ),
    "clock put back in a stage": Case("pass,clock_back", 0, "PASS"),
    "pipes where files belong": Case(
        "pass,pipes,bench",
        0,
        "PASS",
        check=lambda o: (expect(o, bench="PASS"), gone(o, "new.csv")),
    ),
    "stage log that is lost": Case(
        "pass,eats_its_log",
        0,
        "PASS",
        check=lambda o: noted(o, "eats_its_log.log was removed or replaced while it ran"),
    ),
}

# The runner itself.
CASES |= {
    "gate that finds what it cannot clean": Case(
        "pass", 6, "FAIL", {"gates": ["failed", "failed"]}, told=NOT_REDACTED,
        check=lambda o: unpacked(o, "not packed"),
    ),
    "gate that finds something in the reports": Case(
        "pass", 6, "FAIL", {"gates": ["clean", "failed"]}, told=NOT_REDACTED, render=True,
        check=lambda o: unpacked(o, "redaction FAILED, do not post this"),
    ),
    "runner that fails in the midst of a run": Case(
        "pass,slow", 4, "BROKEN", {"fails": "slow"},
        check=lambda o: (expect(o, **{"pass": "PASS"}, slow="CRASH"), said(o, "ZeroDivision")),
    ),
}  # fmt: skip

# The disk of the bundle.
CASES |= {
    "disk full from the start": Case(
        "pass,bench", 0, "PASS", {"disk": 15_000}, exit_code=4, cut_off=True,
        check=lambda o: said(o, "bundle.json could not be written", "exit code 4"),
    ),
    "disk full in the middle of a log": Case(
        "pass,chatty,bench", 0, "PASS", {"disk": 300_000}, check=lambda o: expect(o, bench="PASS")
    ),
    "disk full in packing": Case(
        "pass", 0, "PASS", {"full_in": "record.bundle.pack"},
        check=lambda o: said(o, "no archive", "No space left on device"),
    ),
    "disk full in the check sums": Case(
        "pass", 0, "PASS", {"full_in": "record.bundle.write_sums"},
        told=("no SHA256SUMS: .*",), check=lambda o: said(o, "no archive"),
    ),
}  # fmt: skip

# Secrets of every shape, in every place.
CASES |= {
    "secrets in the environment": Case("plant_environment", 0, "PASS"),
    "secrets in logs": Case("plant_log", 0, "PASS", options=("--verbose",), render=True),
    "secrets in names of files and folders": Case("plant_names", 0, "PASS"),
    "secrets in CSV and JSON": Case("plant_cells", 0, "PASS"),
    "secrets in results": Case("plant_rows", 0, "PASS", render=True),
    "secrets in an exception": Case("pass,plant_error", 4, "BROKEN", render=True),
    "secrets in archives": Case(
        "plant_archive", 0, "PASS",
        check=lambda o: gone(o, "core.tgz", "core.zip", "core.png", "link.txt"),
    ),
    "secrets in arguments": Case(
        "pass", 0, "PASS", options=("--only", "pass", "--price", "1", "--skip", ""),
    ),
}  # fmt: skip

# The GPU and its driver.
CASES |= {
    "GPU lost": Case(
        "pass!,gpu_dies!,slow!,bench", 4, "BROKEN", gpu=True,
        check=lambda o: expect(o, gpu_dies="CRASH", slow="NOT_RUN", bench="PASS"),
    ),
    "out of GPU memory, fits at half size": Case(
        "pass!,big_or_half!+", 0, "PASS", gpu=True, check=lambda o: half_size(o, "big_or_half"),
    ),
    "out of GPU memory, fits with fewer processes": Case(
        f"pass!,big_or_few={SHARDS}!", 0, "PASS", gpu=True, check=lambda o: fewer(o, "big_or_few"),
    ),
    "out of GPU memory at any size": Case(
        "pass!,big_always!+", 4, "BROKEN", gpu=True,
        check=lambda o: kind(o, "big_always", "OOM_DEVICE"),
    ),
    "Xid of our own kernel": Case(
        "xid_31!,pass!", 0, "PASS", gpu=True, check=lambda o: noted(o, "Xid 31", "of the program"),
    ),
    "Xid of the card's memory": Case(
        "xid_48!,pass!", 4, "BROKEN", gpu=True,
        check=lambda o: (kind(o, "xid_48", "XID"), noted(o, "Xid 48", "change the box")),
    ),
    "Xid: fallen off the bus": Case(
        "xid_79!,slow!,bench", 4, "BROKEN", gpu=True,
        check=lambda o: (kind(o, "xid_79", "GPU_LOST"), expect(o, slow="NOT_RUN", bench="PASS")),
    ),
}  # fmt: skip


def expect(outcome: Outcome, **statuses: str) -> None:
    found = {name: outcome.stage(name)["status"] for name in statuses}
    assert found == statuses


def kind(outcome: Outcome, stage: str, wanted: str) -> None:
    assert outcome.stage(stage)["kind"] == wanted, outcome.stage(stage)


def ended(outcome: Outcome, stage: str, signal: str) -> None:
    assert outcome.stage(stage)["signal"] == signal


def logged(outcome: Outcome, stage: str, words: str) -> None:
    assert words in (outcome.folder / "logs" / f"{stage}.log").read_text()


def unpacked(outcome: Outcome, words: str) -> None:
    """No archive, and no report that calls the run clean."""
    assert not list(outcome.out.glob("*.tgz")) and words in outcome.console
    assert "redaction FAILED, do not post this" in (outcome.folder / "report.md").read_text()
    assert not [n for n in ("issue.md", "report.html") if (outcome.folder / n).exists()]


def said(outcome: Outcome, *words: str) -> None:
    assert all(word in outcome.console for word in words), outcome.console


def noted(outcome: Outcome, *words: str) -> None:
    assert all(word in outcome.texts() for word in words), outcome.texts()


def gone(outcome: Outcome, *names: str) -> None:
    assert not [n for n in names if (outcome.folder / n).exists()]
    assert set(names) <= set(outcome.bundle["redaction"]["removed_files"])


def half_size(outcome: Outcome, stage: str) -> None:
    found = outcome.stage(stage)
    assert found["attempt"] == 2 and found["half_size"] and not found["flaky"]
    assert found["argv"][-2:] == ["--shrink", "2"]
    noted(outcome, "one more try at half size", "64 here instead of 128")


def fewer(outcome: Outcome, stage: str) -> None:
    found = outcome.stage(stage)
    assert found["attempt"] == 2 and found["flaky"] and not found["half_size"]
    assert found["argv"][-3:] == [SHARDS, "--fewer", "4"]
    noted(outcome, "one more try with a quarter of the processes")


@pytest.mark.parametrize("name", CASES)
def test_case(tmp_path, name):
    case = CASES[name]
    env, options = dict(case.env), case.options
    if case.gpu:
        env |= fake_gpu(tmp_path)
        options = ("--profile", "standard", *options)
    out = tmp_path / "out"
    outcome = go(out, case.stages, *options, fault=case.fault, env=env, render=case.render)
    held(case, outcome)


# ---- cases that need more than one run -----------------------------------------------------------

MORE: dict[str, Callable[[Path], None]] = {}


def more(name: str) -> Callable:
    def keep(function: Callable[[Path], None]) -> Callable[[Path], None]:
        MORE[name] = function
        return function

    return keep


PASSED = Case("pass", 0, "PASS")


@more("journal cut at every byte of its last line")
def _(tmp: Path) -> None:
    outcome = go(tmp / "out", "pass,liar", fault={"kill": "stage_end:liar"})
    path = outcome.folder / "events.jsonl"
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    before = RunRecord.replay(read_events(path)[:-1]).to_bundle()
    for cut in range(last, len(data) - 1):
        path.write_bytes(data[:cut])
        assert rebuild(outcome.folder)[0] == before, cut
    for cut in (last, (last + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        rebuilt = rebuild(outcome.folder)[0]
        assert rebuilt["verdict"]["exit_code"] == 1  # the failed test was sent before the end
        assert report.render_text(rebuilt, outcome.folder, Shape()).startswith("This report")
        inert(report.render_page(rebuilt, outcome.folder))
    nothing_leaked(outcome)


@more("zeros in the journal, as a file system leaves them")
def _(tmp: Path) -> None:
    outcome = go(tmp / "out", "pass,liar")
    path = outcome.folder / "events.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:6], b"\0" * 4096, b"\xff\xfe{", *lines[6:]]))
    assert rebuild(outcome.folder)[0]["verdict"] == outcome.bundle["verdict"]
    whole(outcome, (r"events\.jsonl was changed after the run.*", r"events\.jsonl is neither.*",
                    r"events\.jsonl is not the file that bundle\.json lists"))  # fmt: skip


@more("folder held by another run")
def _(tmp: Path) -> None:
    first = faults.start(tmp / "out", "until_told", env=PLANTED)
    journal = tmp / "out" / COMMIT / "events.jsonl"
    while not any(e["ev"] == "stage_start" for e in read_events(journal)):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    second = go(tmp / "out", "pass")
    assert second.code == 75 and f"process {first.pid} since" in second.console
    (tmp / "out" / COMMIT / "go").touch()
    console, _ = first.communicate(timeout=30)
    held(PASSED, Outcome(first.returncode, console, tmp / "out"))
    first = faults.start(tmp / "out", "slow", env=PLANTED)
    held(PASSED, go(tmp / "out", "pass", "--wait", "20"))
    first.communicate(timeout=30)


@more("resumed with other arguments of a stage")
def _(tmp: Path) -> None:
    go(tmp / "out", "pass,bench,raise")
    outcome = go(tmp / "out", "pass=other,bench", "--resume")
    held(Case("", 0, "PASS"), outcome)
    assert list(outcome.bundle["resumed"].values()) == [["bench"]]


@more("resumed after the supervisor was killed")
def _(tmp: Path) -> None:
    go(tmp / "out", "pass,bench", fault={"kill": "stage_start:bench"})
    outcome = go(tmp / "out", "pass,bench", "--resume")
    held(Case("", 0, "PASS"), outcome)
    assert list(outcome.bundle["resumed"].values()) == [["pass"]]


@more("resumed from a journal that is garbage")
def _(tmp: Path) -> None:
    first = go(tmp / "out", "pass")
    (first.folder / "events.jsonl").write_bytes(os.urandom(5000) + b'\n{"ev":"stage_end"}\n')
    outcome = go(tmp / "out", "pass", "--resume")
    held(PASSED, outcome)
    assert outcome.bundle["resumed"] == {}


@more("secrets in the remote and the branch")
def _(tmp: Path) -> None:
    repository = tmp / "repository"

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(repository), "-c", "user.name=alice", "-c",
             "user.email=alice@example.com", *words], check=True, capture_output=True,
        )  # fmt: skip

    repository.mkdir()
    git("init", "-q", "-b", CANARIES["gitlab"])
    git("commit", "-q", "--allow-empty", "-m", CANARIES["github"])
    git("remote", "add", "origin", CANARIES["url"] + "&" + CANARIES["password"])
    outcome = go(tmp / "out", "pass", fault={"git": str(repository)})
    held(PASSED, outcome)
    remote = outcome.bundle["git"]["remote"]
    assert remote.startswith("git.") and remote.endswith("/o/r")


def lost_folder(how: str, words: str) -> Callable[[Path], None]:
    """A run whose folder goes after its first stage, and what is beside it at the end."""

    def run(tmp: Path) -> None:
        out = tmp / "out"
        fault = {"lose": "stage_end:pass", "how": how}
        outcome = go(out, "pass,bench", fault=fault)
        assert outcome.code == 0, outcome.console
        (folder,) = (p for p in out.glob(f"{COMMIT}-*") if p.is_dir())
        assert list(verify.check(folder)) == [] and not orphans(folder)
        (note,) = (n["text"] for n in rebuild(folder)[0]["notes"] if words in n["text"])
        assert f"results go on in {folder}" in note and note in outcome.console
        assert folder.with_name(folder.name + ".tgz").is_file()
        assert (folder / "logs" / "pass.log").exists() == (how != "deleted")
        others = {p.name for p in (out / COMMIT).glob("*")}
        assert others == ({"notes.txt"} if how == "replaced" else set())
        nothing_leaked(outcome)

    return run


for how, words in (("deleted", "was deleted"), ("moved", "was moved away"),
                   ("replaced", "was replaced by another folder")):  # fmt: skip
    MORE[f"output folder that is {how}"] = lost_folder(how, words)


@more("standard streams that are closed")
def _(tmp: Path) -> None:
    argv = shlex.join(faults.command(tmp / "out", "pass"))
    closed = ["bash", "-c", f"exec {argv} <&- >&- 2>&-"]
    done = subprocess.run(closed, timeout=60, env=faults.environment(PLANTED), cwd=ROOT)
    held(PASSED, Outcome(done.returncode, f"exit code {done.returncode}", tmp / "out"))


@more("names and a locale that are not UTF-8, and an exit hook that prints")
def _(tmp: Path) -> None:
    strange = os.fsdecode(b"gr\xfcn")
    (tmp / strange).mkdir()
    hook = tmp / strange / "sitecustomize.py"
    hook.write_text("import atexit\natexit.register(print, 'bye')\n")
    env = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "NSA_LOG_LIMIT": "3",
           "PYTHONPATH": str(tmp / strange), "MY_TOKEN": f"unlikely-{strange}"}  # fmt: skip
    outcome = go(tmp / strange / "out", "pass", env=env)
    held(PASSED, outcome)
    assert "bye" not in outcome.console


@more("output folder that cannot be made")
def _(tmp: Path) -> None:
    (tmp / "file").write_text("x")
    outcome = go(tmp / "file" / "out", "pass")
    assert outcome.code == 4 and "cannot be used" in outcome.console
    assert (tmp / "file").read_text() == "x"


@more("output folder on a file system that is read-only")
def _(tmp: Path) -> None:
    outcome = go(Path("/proc/oneshot"), "pass")
    assert outcome.code == 4 and "cannot be used" in outcome.console


@more("console that goes away")
def _(tmp: Path) -> None:
    read, write = os.pipe()
    command = faults.command(tmp / "out", "pass,bench", "--verbose")
    env = faults.environment(PLANTED)
    process = subprocess.Popen(command, stdout=write, stderr=write, cwd=ROOT, env=env)
    os.close(write)
    os.close(read)
    assert process.wait(timeout=30) == 0
    outcome = Outcome(0, "exit code 0", tmp / "out")
    held(Case("", 0, "PASS"), outcome)


def without(module: str) -> Callable[[Path], None]:
    """A run on a box that lacks one module."""

    def run(tmp: Path) -> None:
        blocked = tmp / "blocked"
        blocked.mkdir()
        (blocked / f"{module}.py").write_text(f"raise ImportError('no {module} here')\n")
        gpu = {}
        if module == "pynvml":
            gpu = fake_gpu(tmp)
            (tmp / "modules" / "pynvml.py").unlink()
        env = {**gpu, "PYTHONPATH": str(blocked)}
        options = ("--profile", "standard") if gpu else ()
        outcome = go(tmp / "out", "pass!" if gpu else "pass", *options, env=env, render=True)
        held(PASSED, outcome)
        text = (outcome.folder / "report.md").read_text()
        if module == "jinja2":
            assert "Numbers, logs and the journal are beside this file" in text
            assert f"no {module} here" in outcome.console
        else:
            assert "## What failed?" in text and (outcome.folder / "report.html").exists()

    return run


for module in ("jinja2", "matplotlib", "pynvml"):
    MORE[f"without {module}"] = without(module)


@pytest.mark.parametrize("name", MORE)
def test_case_of_several_runs(tmp_path, name):
    MORE[name](tmp_path)


def test_the_number_of_cases(capsys):
    """Printed, and the number that docs/report.md gives."""
    number = len(CASES) + len(MORE)
    with capsys.disabled():
        print(f"\nfault campaign: {number} cases, {len(CANARIES)} secret shapes")
    assert number >= LEAST and len(CANARIES) >= 20
    page = (ROOT / "docs" / "report.md").read_text()
    assert f"{number} faults" in page and f"{len(CANARIES)} shapes" in page
