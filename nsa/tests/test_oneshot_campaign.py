"""The fault campaign: every way a run can go wrong, injected once, each held to the same promises.

After each case: the verdict and the exit code are the right ones; `verify` finds nothing, or names
exactly what a run that was cut off could not write; the journal gives a report by itself; nothing
planted is found in any file, name or archive; no process of the run is alive.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the report needs jinja2")

from nsa.tests import oneshot_faults as faults
from nsa.tests.oneshot_faults import CANARIES, COMMIT, PRIVATE, ROOT, Outcome, fake_gpu
from nsa.tests.test_oneshot_report import inert
from scripts.oneshot.box.processes import TAG
from scripts.oneshot.compare import verify
from scripts.oneshot.record.journal import read_events
from scripts.oneshot.record.model import SHARDS, RunRecord
from scripts.oneshot.record.reading import rebuild
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Shape

# In the environment of every case: every second canary, and the others are told by their shape.
# None of them may be found in what the case leaves.
PLANTED = {f"PLANTED_{n.upper()}_TOKEN": text for n, text in list(CANARIES.items())[::2]} | {
    "MY_SERVICE_PASSWORD": "plain-looking-value-4711",
    "HOSTNAME": "pod-9f8e7d6c5b",
}
SECRETS = (*PRIVATE.values(), "plain-looking-value-4711", "pod-9f8e7d6c5b")

NOT_REDACTED = r"no SHA256SUMS: .*", r"the redaction gate is 'failed', not clean"
# What `verify` may say of a run that was cut off, and nothing else.
CUT_OFF = (
    r"no SHA256SUMS: the run did not come to its end, or was not packed",
    r"no bundle\.json in .*",
    r"the redaction gate is 'pending', not clean",
    r"\w+ in bundle\.json is not what events\.jsonl gives",
    r"report\.md does not begin with the verdict of bundle\.json",  # written before, or after it
)


@pytest.fixture(autouse=True)
def other_sources(monkeypatch):
    """The sources that verify are not those of the run: git need not be asked."""
    monkeypatch.setattr(verify, "git_facts", lambda _: {})


STATUS = {0: "PASS", 1: "FAIL", 4: "BROKEN", 6: "FAIL", 130: "STOPPED", 143: "STOPPED"}


@dataclass
class Case:
    """One fault: the stages of the run, what goes wrong, and what must come of it."""

    stages: str
    code: int
    fault: dict = field(default_factory=dict)
    cut_off: int | None = None  # then the exit code of the process is not the verdict's
    options: tuple[str, ...] = ()
    render: bool = False  # the full report, not only the short one
    gpu: bool = False
    told: tuple[str, ...] = ()  # what `verify` must say besides, as patterns
    ends: dict = field(default_factory=dict)  # of stages: status, and kind and signal if asked
    said: tuple[str, ...] = ()  # on the console
    noted: tuple[str, ...] = ()  # in the notes of the report
    logged: dict[str, tuple[str, ...]] = field(default_factory=dict)
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


def orphans(folder: Path) -> list[str]:
    """Processes that carry the tag of the run in `folder`, once they had time to go."""
    ids = {e["run_id"] for e in read_events(folder / "events.jsonl") if e["ev"] == "run_start"}
    tags = [f"{TAG}={run_id}:".encode() for run_id in ids]

    def found() -> list[str]:
        alive = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes()
                alive += [path.parent.name for tag in tags if tag in variables]
        return alive

    faults.until(lambda: not found(), 3.0)
    return found()


def nothing_leaked(outcome: Outcome) -> None:
    content = everything(outcome.out) + outcome.console.encode()
    assert not [f"{secret[:12]}..." for secret in SECRETS if secret.encode() in content]


def told(outcome: Outcome, patterns: tuple[str, ...]) -> set[str]:
    """Which of the patterns match what `verify` finds, and it finds nothing else."""
    matched = set()
    for problem in verify.check(outcome.folder):
        matching = {p for p in patterns if re.fullmatch(p, problem)}
        assert matching, problem
        matched |= matching
    return matched


def tells_what_passed(outcome: Outcome) -> None:
    """report.md of a run that was cut off has each stage that ended, and how to go on."""
    if not (outcome.folder / "bundle.json").exists() or rebuild(outcome.folder)[0]["ended"]:
        return
    text = (outcome.folder / "report.md").read_text(encoding="utf-8")
    assert "**This run has not ended - " in text and "BROKEN" not in text
    assert "scripts.oneshot render FOLDER" in text and "`--resume`" in text
    went = {"CRASH": "running", "NOT_RUN": "not yet"}
    for stage in outcome.bundle["stages"]:
        assert f"| {stage['id']} | {went.get(stage['status'], stage['status'])} |" in text


def cut_off(outcome: Outcome) -> None:
    """The journal carries the report, and bundle.json is a moment of it as a whole."""
    told(outcome, CUT_OFF)
    events = read_events(outcome.folder / "events.jsonl")
    if (outcome.folder / "bundle.json").exists():
        moments = [RunRecord.replay(events[:n]).to_bundle() for n in range(1, len(events) + 1)]
        kept = {k: v for k, v in outcome.bundle.items() if k != "files"}
        assert any(kept == {k: m[k] for k in kept} for m in moments)
    assert not [p for p in outcome.folder.rglob("*.tmp")]
    tells_what_passed(outcome)
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
    found = verdict["exit_code"], verdict["status"]
    assert found == (case.code, STATUS[case.code]), outcome.console
    assert outcome.code == (case.code if case.cut_off is None else case.cut_off), outcome.console
    assert all(s["reason"] for s in data["stages"] if s["status"] != "PASS")
    assert not orphans(outcome.folder)
    if case.cut_off is not None:
        cut_off(outcome)
    else:
        assert told(outcome, case.told) == set(case.told)
        assert outcome.console.rstrip().endswith(f"exit code {case.code}")
    nothing_leaked(outcome)
    for name, ending in case.ends.items():
        stage = outcome.stage(name)
        assert f"{stage['status']} {stage['kind']} {stage['signal']} ".startswith(f"{ending} "), (
            stage
        )
    assert all(word in outcome.console for word in case.said), outcome.console
    assert all(word in outcome.texts() for word in case.noted), outcome.texts()
    for name, words in case.logged.items():
        log = (outcome.folder / "logs" / f"{name}.log").read_text()
        assert all(word in log for word in words), log
    case.check(outcome)


# ---- the cases -----------------------------------------------------------------------------------

# What becomes of stages that end in these ways, all in one run: status, kind, part of the reason.
ENDINGS = {
    "raise": ("CRASH", None, "RuntimeError: no such luck"),
    "import": ("CRASH", "IMPORT_ERROR", "ModuleNotFoundError"),
    "killed": ("CRASH", None, "killed by SIGKILL"),
    "segfault": ("CRASH", None, "killed by SIGSEGV"),
    "nothing": ("NOT_RUN", None, "no test ran"),
    "all_skipped": ("NOT_RUN", None, "no CUDA device"),
    "liar": ("FAIL", "ASSERT", "t::bad"),
    "wrong_path": ("FAIL", "PARITY", "asked for triton, ran sdpa"),
    "no_launch": ("FAIL", "PARITY", "no launch"),
    "nan": ("FAIL", "PARITY", "mae is missing or not finite"),
    "unproven_bench": ("FAIL", "INVALID", "no passed parity"),
    **dict.fromkeys(("junk_rows", "endless_row"), ("INFRA", "CHANNEL", "unreadable")),
    "oom_device": ("CRASH", "OOM_DEVICE", "out of memory"),
    "disk_full": ("CRASH", "NO_SPACE", "No space left"),
    "skip": ("SKIPPED", None, "flash-attn is not installed"),
    "mute_skip": ("NOT_RUN", None, "nothing could be run"),
    **dict.fromkeys("pass garbage closes_results clock_back eats_its_log pipes bench".split(),
                    ("PASS", None, None)),
}  # fmt: skip


def every_ending(outcome: Outcome) -> None:
    """Each by its name; failures can be repeated; the archive names no user."""
    for name, (status, kind, reason) in ENDINGS.items():
        stage = outcome.stage(name)
        assert (stage["status"], stage["kind"]) == (status, kind), stage
        assert (stage["reason"] is None) if reason is None else (reason in stage["reason"]), stage
    assert outcome.stage("killed")["counts"]["passed"] == 1  # rows of a dead stage are kept
    script = (outcome.folder / "repro" / "raise.sh").read_text()
    assert "python nsa/tests/oneshot_faults.py raise" in script and "no such luck" in script
    assert not (outcome.folder / "repro" / "pass.sh").exists()
    xml = (outcome.folder / "tests" / "liar.junit.xml").read_text()
    assert 'failures="1"' in xml and "1 != 2" in xml
    assert "eats_its_log.log was removed or replaced while it ran" in outcome.texts()
    gone(outcome, "new.csv")
    with tarfile.open(outcome.folder.with_name(COMMIT + ".tgz")) as tar:
        assert {m.uid for m in tar} == {0} and {m.uname for m in tar} == {""}


def blames_no_stage(outcome: Outcome) -> None:
    """bundle.json and the journal say the same of the stage that the runner was killed in."""
    replayed = RunRecord.replay(read_events(outcome.folder / "events.jsonl")).to_bundle()
    for data in (outcome.bundle, replayed):
        stage = next(s for s in data["stages"] if s["id"] == "bench")
        assert (stage["status"], stage["kind"]) == ("CRASH", "RUNNER")
        assert "--resume takes up what passed" in stage["reason"]
    text = (outcome.folder / "report.md").read_text()
    assert "nothing says that the stage is at fault" in text and "crashes again" not in text


def unpacked(outcome: Outcome) -> None:
    """No archive, and no report that calls the run clean."""
    assert not list(outcome.out.glob("*.tgz"))
    assert "redaction FAILED, do not post this" in (outcome.folder / "report.md").read_text()
    assert not [n for n in ("issue.md", "report.html") if (outcome.folder / n).exists()]


def gone(outcome: Outcome, *names: str) -> None:
    assert not [n for n in names if (outcome.folder / n).exists()]
    assert set(names) <= set(outcome.bundle["redaction"]["removed_files"])


def tried_again(outcome: Outcome, stage: str, mark: str, *more: str) -> None:
    """It passed at the second attempt, with more arguments, and is marked so alone."""
    found = outcome.stage(stage)
    assert (found["status"], found["attempt"]) == ("PASS", 2)
    assert [name for name in ("half_size", "flaky") if found[name]] == [mark]
    assert found["argv"][-len(more) :] == list(more)


def sent(name: str, at: str, **more: object) -> dict:
    """The fault of a signal that comes after this event."""
    return {"signal": at, "name": name, **more}


CASES = {
    "every way in which a stage ends": Case(",".join(ENDINGS), 1, render=True, check=every_ending),
    "stages that hang, hear no signal or leave grandchildren": Case(
        "hang:1,deaf:1,orphans,bench", 4,
        ends=dict(hang="TIMEOUT", deaf="TIMEOUT None SIGKILL", orphans="PASS", bench="PASS"),
        # With the stack of every thread.
        logged={"hang": ("going to sleep", "<fault hang>"), "orphans": ("outlived the stage",)}),
    # The supervisor is killed, in a stage and while it packs.
    "killed in a stage": Case("pass,bench", 4, {"kill": "row:bench"}, -9, check=blames_no_stage),
    "killed in packing": Case("pass,bench", 0, {"signal_in": "record.bundle.pack"}, -9),
    # Signals.
    "SIGTERM before the run began": Case(
        "pass", 143, {"signal_in": "box.checkout.git_facts", "name": "SIGTERM"},
        ends={"pass": "NOT_RUN"}),
    "SIGQUIT while the box is looked at": Case(
        "pass,bench", 143, sent("SIGQUIT", "stage_start:env"), ends={"bench": "NOT_RUN"},
        noted=("SIGQUIT came, and ended the run as SIGTERM does",)),
    "SIGTERM in a hung stage": Case("pass,hang,bench", 143, sent("SIGTERM", "row:hang"),
                                    ends=dict(hang="INFRA", bench="NOT_RUN")),
    "SIGINT in a stage that is deaf": Case("pass,deaf", 130, sent("SIGINT", "row:deaf"),
                                           ends={"deaf": "INFRA PREEMPTED"}),
    "SIGTERM after the last stage": Case("pass", 0, sent("SIGTERM", "run_end"), render=True),
    "second SIGINT": Case("pass,deaf", 4, sent("SIGINT", "row:deaf", delays=[0.0, 0.5]), 130),
    "SIGHUP": Case("pass", 0, sent("SIGHUP", "stage_start:pass")),
    # The runner itself.
    "gate that finds what it cannot clean": Case(
        "pass", 6, {"gates": ["failed", "failed"]}, told=NOT_REDACTED, said=("not packed",),
        check=unpacked),
    "gate that finds something in the reports": Case(
        "pass", 6, {"gates": ["clean", "failed"]}, told=NOT_REDACTED, render=True,
        said=("redaction FAILED, do not post this",), check=unpacked),
    "runner that fails in the midst of a run": Case(
        "pass,slow", 4, {"fails": "slow"}, ends={"pass": "PASS", "slow": "CRASH"},
        said=("ZeroDivision",)),
    # The disk of the bundle.
    "disk full from the start": Case("pass,bench", 0, {"disk": 15_000}, 4, said=(
        "bundle.json could not be written", "exit code 4")),
    "disk full in the middle of a log": Case("pass,chatty,bench", 0, {"disk": 300_000},
                                             ends={"bench": "PASS"}),
    "disk full in packing": Case(
        "pass", 0, {"full_in": "record.bundle.write_sums"}, told=("no SHA256SUMS: .*",),
        said=("no archive", "No space left on device")),
    "secrets of every shape in every place": Case(
        "plant,plant_rows", 4, options=("--verbose",), render=True, check=lambda o: (
            gone(o, "core.tgz", "core.zip", "core.png", "link.txt"),
            json.loads((o.folder / "keys.json").read_text()))),
    # The GPU and its driver.
    "GPU lost": Case("pass!,gpu_dies!,slow!,bench", 4, gpu=True,
                     ends=dict(gpu_dies="CRASH", slow="NOT_RUN", bench="PASS")),
    "out of GPU memory": Case(
        f"big_or_half!+,big_or_few={SHARDS}!,big_always!+", 4, gpu=True,
        ends={"big_always": "CRASH OOM_DEVICE"},
        noted=("one more try at half size", "64 here instead of 128",
               "one more try with a quarter of the processes"),
        check=lambda o: (
            tried_again(o, "big_or_half", "half_size", "--shrink", "2"),
            tried_again(o, "big_or_few", "flaky", SHARDS, "--fewer", "4"))),
    "Xid of our own kernel, of the card's memory, and off the bus": Case(
        "xid_31!,xid_48!,xid_79!,slow!,bench", 4, gpu=True,
        ends=dict(xid_31="PASS", xid_48="INFRA XID", xid_79="INFRA GPU_LOST", slow="NOT_RUN",
                  bench="PASS"), noted=("Xid 31", "of the program", "Xid 48", "change the box")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(tmp_path, name):
    case = CASES[name]
    env = fake_gpu(tmp_path) if case.gpu else {}
    options = ("--profile", "standard") if case.gpu else case.options
    how = dict(fault=case.fault, env=env, render=case.render)
    held(case, go(tmp_path / "out", case.stages, *options, **how))


def test_every_moment_of_a_run_is_a_valid_bundle(tmp_path):
    """As it is on disk after each event and before each step of packing: what a kill leaves."""
    out, moments = tmp_path / "out", tmp_path / "moments"
    go(out, "pass,bench", fault={"moments": str(moments)})
    kept = [Outcome(0, "", folder) for folder in sorted(moments.iterdir())]
    assert len(kept) > 15
    for outcome in kept:
        ended = any(e["ev"] == "run_end" for e in read_events(outcome.folder / "events.jsonl"))
        verdict = rebuild(outcome.folder)[0]["verdict"]
        wanted = (0, "PASS") if ended else (4, "BROKEN")
        assert (verdict["exit_code"], verdict["status"]) == wanted, outcome.out
        cut_off(outcome)
    nothing_leaked(Outcome(0, "", moments))


# ---- cases that need more than one run -----------------------------------------------------------

MORE: dict[str, Callable[[Path], None]] = {}


def more(name: str) -> Callable:
    return lambda run: MORE.setdefault(name, run)


PASSED = Case("pass", 0)


@more("journal cut at every byte of its last line, and with zeros as a file system leaves them")
def _(tmp: Path) -> None:
    outcome = go(tmp / "out", "pass,liar", fault={"kill": "stage_end:liar"})
    path = outcome.folder / "events.jsonl"
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    before = RunRecord.replay(read_events(path)[:-1]).to_bundle()
    assert before["verdict"]["exit_code"] == 1  # the failed test was sent before the end
    for cut in range(last, len(data) - 1):
        path.write_bytes(data[:cut])
        assert rebuild(outcome.folder)[0] == before, cut
    for cut in (last, (last + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        rebuilt = rebuild(outcome.folder)[0]
        assert report.render_text(rebuilt, outcome.folder, Shape()).startswith("This report")
        inert(report.render_page(rebuilt, outcome.folder))
    path.write_bytes(data)
    right, lines = rebuild(outcome.folder), data.split(b"\n")
    path.write_bytes(b"\n".join([*lines[:6], b"\0" * 4096, b"\xff\xfe{", *lines[6:]]))
    assert rebuild(outcome.folder) == right
    nothing_leaked(outcome)


@more("folder held by another run")
def _(tmp: Path) -> None:
    first = faults.start(tmp / "out", "until_told", env=PLANTED)
    journal = tmp / "out" / COMMIT / "events.jsonl"
    assert faults.until(lambda: any(e["ev"] == "stage_start" for e in read_events(journal)))
    second = go(tmp / "out", "pass")
    assert second.code == 75 and f"process {first.pid} since" in second.console
    (tmp / "out" / COMMIT / "go").touch()
    console, _ = first.communicate(timeout=30)
    held(PASSED, Outcome(first.returncode, console, tmp / "out"))
    first = faults.start(tmp / "out", "slow", env=PLANTED)
    held(PASSED, go(tmp / "out", "pass", "--wait", "20"))
    first.communicate(timeout=30)


@more("resumed after a kill, with other arguments of a stage and a flag, from garbage")
def _(tmp: Path) -> None:
    """What passed is taken over, and nothing else."""
    first = go(tmp / "out", "pass,bench,slow", fault={"kill": "stage_start:slow"}).bundle
    outcome = go(tmp / "out", "pass,bench=other,slow", "--resume")
    held(PASSED, outcome)
    assert outcome.bundle["resumed"] == {first["run_id"]: ["pass"]}
    assert outcome.stage("pass")["counts"]["passed"] == 1
    assert (outcome.folder / "logs" / "pass.log").read_text() == "fine\n"
    assert (outcome.folder / "prev" / first["run_id"] / "bundle.json").exists()
    outcome = go(tmp / "out", "pass", "--resume", env={"NSA_USE_FA2": "1"})
    assert outcome.bundle["resumed"] == {}
    (outcome.folder / "events.jsonl").write_bytes(os.urandom(5000) + b'\n{"ev":"stage_end"}\n')
    outcome = go(tmp / "out", "pass", "--resume", env={"NSA_USE_FA2": "1"})
    held(PASSED, outcome)
    assert outcome.bundle["resumed"] == {}


@more("secrets in the remote and the branch")
def _(tmp: Path) -> None:
    repository = tmp / "repository"
    repository.mkdir()
    git = lambda *words: faults.git(repository, *words, who="alice")
    git("init", "-q", "-b", CANARIES["gitlab"])
    git("commit", "-q", "--allow-empty", "-m", CANARIES["github"])
    git("remote", "add", "origin", CANARIES["url"] + "&" + CANARIES["password"])
    outcome = go(tmp / "out", "pass", fault={"git": str(repository)})
    held(PASSED, outcome)
    remote = outcome.bundle["git"]["remote"]
    assert remote.startswith("git.") and remote.endswith("/o/r")
    text = report.render_text(outcome.bundle, outcome.folder, Shape())  # of a commit as given
    assert "nothing tells whether the sources are clean" in text


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
        assert not (folder / "prev").exists()
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
    held(PASSED, outcome)


def without(*modules: str) -> Callable[[Path], None]:
    """A run on a box that lacks these modules."""

    def run(tmp: Path) -> None:
        blocked = tmp / "blocked"
        blocked.mkdir()
        for module in modules:
            (blocked / f"{module}.py").write_text(f"raise ImportError('no {module} here')\n")
        env = {**fake_gpu(tmp), "PYTHONPATH": str(blocked)}
        outcome = go(tmp / "out", "pass!", "--profile", "standard", env=env, render=True)
        held(PASSED, outcome)
        text = (outcome.folder / "report.md").read_text()
        if "jinja2" in modules:
            assert "Numbers, logs and the journal are beside this file" in text
            assert "no jinja2 here" in outcome.console
        else:
            assert "## What failed?" in text and (outcome.folder / "report.html").exists()
            assert "The plots were not drawn" in text and "](plots/" not in text

    return run


MORE["without jinja2"] = without("jinja2")
MORE["without matplotlib and pynvml"] = without("matplotlib", "pynvml")


@pytest.mark.parametrize("name", MORE)
def test_case_of_several_runs(tmp_path, name):
    MORE[name](tmp_path)


def test_the_number_of_cases():
    """It is the one that docs/report.md gives."""
    page = (ROOT / "docs" / "report.md").read_text()
    assert f"{len(CASES) + len(MORE) + 1} runs" in page and f"{len(CANARIES)} shapes" in page
