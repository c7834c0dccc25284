"""Do the verbs, their options and usage errors do what they say, and does a person at the terminal
see it?"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.tests import oneshot_faults as faults
from nsa.tests.oneshot_faults import ROOT, Outcome, command, environment, fake_gpu, git, go
from nsa.tests.oneshot_samples import edit, write_sample
from scripts import setup_env
from scripts.oneshot import streams
from scripts.oneshot.__main__ import VERBS, main
from scripts.oneshot.box.checkout import git_facts
from scripts.oneshot.compare import verify
from scripts.oneshot.record.journal import Journal
from scripts.oneshot.record.model import Stage
from scripts.oneshot.record.outputs import scp_line
from scripts.oneshot.run import attach, runner, stages
from scripts.oneshot.run.arguments import seconds
from scripts.oneshot.run.lock import Lock, folder_lock, gpu_lock
from scripts.oneshot.run.progress import Progress


@pytest.mark.parametrize("with_git", [True, False])
def test_sources_edited_during_the_run_are_not_clean(with_git, tmp_path):
    """By git, or by the hash of the sources; an edit is seen by --resume too."""
    source = tmp_path / "src" / "nsa" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    for words in ("init -q", "add .", "commit -qm 1") if with_git else ():
        git(tmp_path / "src", *words.split())
    given = ("--commit", git_facts(tmp_path / "src")["commit"]) if with_git else ()

    def bundle(stages, *options):
        how = dict(fault={"git": str(tmp_path / "src")}, env={"CUDA_TEST_EDIT": str(source)})
        go(tmp_path / "out", stages, *given, *options, **how)
        (folder,) = (p for p in (tmp_path / "out").iterdir() if p.is_dir())
        return json.loads((folder / "bundle.json").read_text())

    edited = bundle("pass,edit")
    found = edited["git"]
    assert found["dirty"] and found["changed_during_run"] is True
    assert f"commit {found['short']} DIRTY" in edited["verdict"]["one_line"]
    assert any("changed while the run was going on" in n["text"] for n in edited["notes"])
    assert not with_git or "1 file changed" in found["diffstat"]
    assert bundle("pass", "--resume")["resumed"] == {}  # the same edited sources
    if not with_git:
        assert list(bundle("pass", "--resume")["resumed"].values()) == [["pass"]]
        source.write_text("x = 3\n")
        assert bundle("pass", "--resume")["resumed"] == {}


def test_budget_skips_and_says_so(tmp_path):
    done = go(tmp_path, "pass,hang", "--budget", "11s")
    assert done.code == 3 and done.bundle["ended_by"] == "budget", done.console
    assert done.stage("hang")["kind"] == "BUDGET"
    assert "; its budget was spent; 0/0 tests; " in done.bundle["verdict"]["one_line"]


def test_a_stage_gets_arguments_from_one_that_passed_and_only_makes_a_partial_run(tmp_path):
    also = {"pass": ["more"], "skip": ["no"]}
    done = go(tmp_path, "skip,pass,bench,raise", "--skip", "raise", fault={"also": also})
    argv = {s["id"]: s["argv"] for s in done.bundle["stages"]}
    assert argv["pass"][-1] == "pass" and argv["bench"][-2:] == ["bench", "more"]
    assert list(argv) == ["env", "skip", "pass", "bench"]
    assert done.bundle["partial"] == "--skip raise"
    assert "partial run (--skip raise)" in done.bundle["verdict"]["one_line"]


def test_what_stands_in_the_way_of_a_run_is_named(tmp_path):
    done = go(tmp_path, "pass", env={"NSA_USE_TRITONSEL": "1"})
    assert done.code == 3 and "NSA_USE_TRITON_SEL" in done.console
    assert done.stage("pass")["status"] == "NOT_RUN"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "abc1234").write_text("x")  # in the place of the folder
    done = go(tmp_path / "out", "pass")
    (line,) = done.console.splitlines()
    assert done.code == 4 and "the runner itself failed" in line and "abc1234" in line


@pytest.mark.parametrize("argv", [
    ["--profile", "huge"], ["--budget", "soon"], ["--only", "nonsense"], ["a", "b"],
    ["--budget", "0"], ["--commit", "../../etc"], ["--resume=yes"], ["--price", "nan"],
    ["--price", "-1"], ["--price", "inf"], ["--gpus", "7", "--profile", "cpu"], ["--dry"],
])  # fmt: skip
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(runner.main(["--dry-run", *argv]))
    assert stop.value.code == 2 and capsys.readouterr().err
    assert [seconds(t) for t in ("15m", "1h", "90s", "45")] == [900, 3600, 90, 45]


@pytest.mark.parametrize("argv, told", [
    ([], ["PROFILE", "BUDGET"]), (["--profile", "cpu"], ["BUDGET"]),
    (["--budget", "2m"], ["PROFILE"]),
])  # fmt: skip
def test_an_option_of_the_environment_is_told_to_mean_nothing(argv, told, monkeypatch, capsys):
    monkeypatch.setenv("PROFILE", "quick")
    monkeypatch.setenv("BUDGET", "2m")
    assert runner.main(["--dry-run", *argv]) == 0
    said = [x for x in capsys.readouterr().err.splitlines() if "environment means nothing" in x]
    assert [x.split()[0] for x in said] == told


@pytest.mark.parametrize("flags, told", [
    (" -- PROFIL=quick", "PROFILE="), (" --jobserver-auth=3,4 -- OUT=/x profile=cpu", "PROFILE="),
    (" -- DRY_RUN=1", "--dry-run of the script"), (" -- out_dir=/x", "OUT="),
    (r" -- OUT=/a\ b BUDGET=2m NSA_COMMIT=abcd PYTHON=/x CUDA_VISIBLE_DEVICES=0", None),
    ("k", None),
])  # fmt: skip
def test_a_slip_behind_make_is_a_usage_error(flags, told, monkeypatch, capsys):
    monkeypatch.setenv("MAKEFLAGS", flags)
    code, said = runner.main(["--dry-run", "--profile", "cpu"]), capsys.readouterr().err
    assert code == (2 if told else 0) and ("did you mean" in said) == bool(told)
    assert not told or said.strip().endswith(f"did you mean {told}?")


@pytest.mark.parametrize("there", [(), ("report.md",), ("report.md", "report.html")])
def test_the_last_words_name_the_reports_that_are_there(there, tmp_path):
    said = []
    run = SimpleNamespace(progress=SimpleNamespace(line=said.append), folder=tmp_path, saved=False,
                          scope="cpu")  # fmt: skip
    for name in there:
        (tmp_path / name).touch()
    data = {"verdict": {"one_line": "PASS"}, "redaction": {"gate": "clean"}}
    runner.Run._last_words(run, data, None, 4)
    assert re.findall(r"report\.\w+", " ".join(said)) == [*there]


def test_verbs(capsys):
    assert main(["fly"]) == 2 and main(["--help"]) == 0
    assert main(["run", "--dry-run", "--profile", "cpu"]) == 0
    assert "train_showcase" in capsys.readouterr().out


def test_gpus_without_a_gpu_are_a_usage_error(monkeypatch, capsys):
    def no_smi():
        raise runner.box.ProbeFailed("nvidia-smi is not installed")

    monkeypatch.setattr(runner.box, "smi_query", no_smi)
    monkeypatch.setattr(runner.box, "nvidia_hardware", lambda: None)
    for profile in ("auto", "quick"):
        assert runner.main(["--gpus", "7", "--profile", profile, "--dry-run"]) == 2
        assert "'7', but no NVIDIA hardware is visible" in capsys.readouterr().err


@pytest.mark.parametrize("profile", stages.PROFILES)
def test_plan_names_real_files(profile):
    standard, quick = ({s.id for s in stages.plan(p)} for p in ("standard", "quick"))
    assert standard - quick == set(stages.LEFT_OUT["quick"]) and quick <= standard
    planned = stages.plan(profile)
    assert len({s.id for s in planned}) == len(planned)
    assert len({s.log_path for s in planned}) == len(planned)
    for stage in planned:
        assert not (stage.gpu and profile == "cpu"), stage.id
        ids = [s.id for s in planned]
        assert stage.after is None or stage.after in ids
        assert all(ids.index(s) < ids.index(stage.id) for s in stage.also if s in ids)
        assert stages.NO_TEST not in stage.argv, f"{stage.id} finds no test file"
        for part in stage.argv:
            if part.endswith(".py"):
                assert (ROOT / part).is_file(), f"{stage.id} names {part}"


# Without the folder of the sources on its path; without docstrings and assertions; without an end.
OF_PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "2", "PYTHONINSPECT": "1"}


@pytest.mark.parametrize("of_python", [{}, OF_PYTHON], ids=["plain", "of_python"])
def test_gpu_profile_without_a_gpu_says_not_run(tmp_path, of_python):
    """The real entry, and a torch that cannot be imported: the report still comes, whatever the
    caller's Python is told by its own variables."""
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise ImportError('torch is blocked')")
    env = {**os.environ, "PYTHONPATH": str(fake.parent), "PYTHON": sys.executable, **of_python}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "runner_oneshot.sh"), "out", "--profile", "quick",
         "--commit", "abc1234f"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    bundle = Outcome(3, "", tmp_path / "out").bundle
    assert bundle["verdict"]["status"] == "NOT_RUN"
    assert {s["status"] for s in bundle["stages"][1:]} == {"NOT_RUN"}
    blocks = [c["text"] for c in bundle["doctor"] if c["level"] == "BLOCK"]
    assert any("torch is blocked" in text for text in blocks)
    report = (tmp_path / "out" / "abc1234" / "report.md").read_text()
    assert "NOT_RUN" in report
    left_out = "decode_serving, more_parity, sel_route, threshold, train_showcase"
    assert f"profile quick leaves out {left_out}" in report
    assert {"report.html", "issue.md"} <= {p.name for p in (tmp_path / "out" / "abc1234").iterdir()}
    assert done.stdout.rstrip().endswith("exit code 3")


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_works_without_docstrings(verb):
    """PYTHONOPTIMIZE=2 strips them, as -OO does."""
    argv = [sys.executable, "-OO", "-m", "scripts.oneshot", verb, "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr


def test_a_usage_error_is_found_before_anything_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "choose", lambda: 1 / 0)
    for argv, says in ((["a", "b"], "unrecognized arguments: b"), (["--only", "x"], "no stage 'x'"),
                       (["--only", ","], "no stage ','"), (["--skip", ""], "no stage ''"),
                       (["--profile", "cpu", "--skip", "fa2_bench"], "no stage")):  # fmt: skip
        assert setup_env.run_report(argv) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        setup_env.run_report(["--profile", "cpu", "--only", "sanity", "--budget", "9m"])


def test_detach_says_what_came_of_it(tmp_path, capsys, monkeypatch):
    def detach(out=tmp_path):
        argv = ["--profile", "cpu", "--detach", "--commit", "abc1234f", str(out)]
        code, said = runner.main(argv), capsys.readouterr()
        return code, said.out + said.err

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # main() sets it
    (tmp_path / "file").write_text("x")
    code, said = detach(tmp_path / "file" / "out")
    assert code == 4 and "cannot be used" in said and "process" not in said
    lock = folder_lock(tmp_path, "abc1234")
    lock.acquire()
    code, said = detach()
    assert code == 75 and f"held by process {os.getpid()}" in said
    lock.release()

    def begin(argv, **_):
        journal = Journal(tmp_path / "abc1234" / "events.jsonl")
        journal.append("run_start", run_id="new")
        return SimpleNamespace(pid=4711, poll=lambda: None)

    monkeypatch.setattr(runner.subprocess, "Popen", begin)
    monkeypatch.setattr(runner.checkout, "git_facts", lambda *_: {"short": "abc1234"})
    monkeypatch.setattr(runner.box, "smi_query", lambda: [])
    for wait_s, does in ((runner.DETACH_WAIT_S, "running"), (0.0, "waiting")):
        monkeypatch.setattr(runner, "DETACH_WAIT_S", wait_s)
        code, said = detach()
        assert code == 0 and said.startswith(f"{does} as process 4711")


def test_attach_follows_to_the_verdict_and_says_once_that_a_run_is_running(tmp_path, capsys):
    write_sample(tmp_path / "passed" / "8ac3f21", "all_pass")
    assert attach.main([str(tmp_path / "passed")]) == 0
    assert "triton_fwd PASS" in capsys.readouterr().out
    write_sample(tmp_path / "8ac3f21", "crash")  # its journal ends in the midst of triton_bwd
    lock = folder_lock(tmp_path, "8ac3f21")
    lock.acquire()
    assert attach.main([str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("running: stage 5 of 11, triton_bwd")
    lock.release()
    assert attach.main([str(tmp_path), "--once"]) == 4


@pytest.mark.parametrize("event", [
    {"ev": "note"}, {"ev": "note", "m": None, "text": "x"}, {"ev": "stage_start", "m": 1.0},
    {"ev": "stage_end", "m": 1.0, "result": None}, {"ev": "stage_end", "m": 1.0, "result": {}},
])  # fmt: skip
def test_attach_passes_over_what_no_run_wrote(event, tmp_path, capsys):
    write_sample(tmp_path / "8ac3f21", "all_pass")
    edit(tmp_path / "8ac3f21", lambda events: events.insert(3, event))
    assert attach.main([str(tmp_path)]) == 0
    assert "triton_fwd PASS" in capsys.readouterr().out


@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, ""), (BrokenPipeError(32, "Broken pipe"), 4, ""),
    (OSError(28, "No space left on device"), 4, "verify: No space left on device"),
])  # fmt: skip
def test_what_ends_a_verb_is_no_verdict(error, code, said, monkeypatch, capsys):
    def verb(_argv):
        raise error

    monkeypatch.setattr(verify, "main", verb)
    assert main(["verify", "x"]) == code
    assert capsys.readouterr().err.strip() == said


def test_render_names_the_file_that_cannot_be_written(tmp_path, capsys):
    write_sample(tmp_path, "all_pass")
    (tmp_path / "report.md").mkdir()
    assert main(["render", str(tmp_path)]) == 4
    assert capsys.readouterr().err.strip() == f"render: {tmp_path}/report.md: Is a directory"


def test_scp_line_is_made_of_what_the_box_says():
    path = Path("/x/a.tgz")
    pod = {"RUNPOD_PUBLIC_IP": "203.0.113.9", "RUNPOD_TCP_PORT_22": "40022", "USER": "u"}
    assert scp_line(pod, path) == "scp -P 40022 u@203.0.113.9:/x/a.tgz ."
    assert scp_line(pod, Path("/x y/a.tgz")) == "scp -P 40022 'u@203.0.113.9:/x y/a.tgz' ."
    assert scp_line({}, path) is None


# ---- beside what earlier and other runs left -----------------------------------------------------


def test_earlier_runs_stay_as_they_were_sealed(tmp_path):
    """What is a secret only since then changes no byte of them; their archive goes."""
    go(tmp_path, "pass")
    done = go(tmp_path, "pass", env={"MY_TOKEN": "Test GPU"})
    folder = done.folder
    (earlier,) = (folder / "prev").iterdir()
    assert done.code == 0 and list(verify.check(folder)) == list(verify.check(earlier)) == []
    assert "Test GPU" in (earlier / "env.txt").read_text()
    assert "Test GPU" not in (folder / "env.txt").read_text()
    archive = folder.with_name(folder.name + ".tgz")
    assert archive.exists()
    done = go(tmp_path, "pass", fault={"kill": "stage_start:pass"})
    assert done.code == -9 and not archive.exists()
    assert len(list(folder.glob("prev/*/report.md"))) == 2


def test_a_budget_cuts_nothing_that_was_proven(tmp_path):
    first = go(tmp_path, "pass,slow").bundle["run_id"]
    done = go(tmp_path, "pass,bench,slow", "--resume", "--budget", "11")  # none is left to run one
    assert done.bundle["resumed"] == {first: ["pass", "slow"]}, done.console
    assert done.code == 3 and done.stage("bench")["kind"] == "BUDGET"


def test_a_resume_that_was_killed_costs_nothing(tmp_path):
    first = go(tmp_path, "pass").bundle["run_id"]
    assert go(tmp_path, "pass", "--resume", fault={"kill": "stage_start:env"}).code == -9
    done = go(tmp_path, "pass", "--resume")
    assert done.bundle["resumed"] == {first: ["pass"]}, done.console


def test_nothing_is_taken_over_from_another_card(tmp_path):
    """A box of the same kind, rented again: its card has another UUID."""
    env, smi = fake_gpu(tmp_path), tmp_path / "bin" / "nvidia-smi"
    for uuid, taken in (("GPU-12345678", []), ("GPU-12345678", ["pass"]), ("GPU-87654321", [])):
        smi.write_text(re.sub(r"GPU-\d{8}", uuid, smi.read_text()))
        done = go(tmp_path / "out", "pass!", "--profile", "standard", "--resume", env=env)
        assert sum(done.bundle["resumed"].values(), []) == taken, done.console


def test_one_run_per_gpu_whatever_the_folder(tmp_path):
    """Another card of the box is free: the one that a run sees is asked, locked and described."""
    env, smi = fake_gpu(tmp_path), tmp_path / "bin" / "nvidia-smi"
    second = faults.FAKE_SMI.replace("GPU-12345678", "GPU-87654321").replace("300.00", "250")
    smi.write_text(smi.read_text() + f"echo '{second}'\n")
    locks = [Lock(tmp_path / gpu_lock(line.split(",")[0]).path.name, "the GPU")
             for line in (faults.FAKE_SMI, second)]  # fmt: skip
    run = lambda card: go(tmp_path / card, "pass!", "--profile", "standard",
                          env={**env, "CUDA_VISIBLE_DEVICES": card})  # fmt: skip
    locks[0].acquire()
    held, free = run("0"), run("1")
    assert held.code == 75 and "the GPU is held by process" in held.console
    assert free.code == 0 and free.bundle["device"]["power_limit_w"] == 250, free.console
    locks[1].acquire()
    assert run("1").code == 75
    for lock in locks:
        lock.release()


# ---- the terminal --------------------------------------------------------------------------------


def on_terminal(argv, env, columns, limit_s=40.0):
    """(exit code, everything that was written) of a program on a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=ROOT)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + limit_s
    with contextlib.suppress(OSError):  # at its end
        while select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            seen += os.read(master, 1 << 16)
    os.close(master)
    return process.wait(timeout=10), seen.decode("utf-8", "replace")


def test_run_on_a_terminal(tmp_path):
    pytest.importorskip("jinja2", reason="the report needs jinja2")
    env = {**fake_gpu(tmp_path), "TERM": "xterm", "USER": "ann",
           "SSH_CONNECTION": "198.51.100.1 5000 203.0.113.2 2222"}  # fmt: skip
    env = {k: v for k, v in environment(env, render=True).items() if k != "COLUMNS"}
    out = tmp_path / "out"
    argv = command(out, "steady!", "--profile", "standard", "--price", "7200")
    code, text = on_terminal(argv, env, 200)
    live = re.findall(r"\r\x1b\[K(\[[^\r\n]*)(?=\r\x1b)", text)
    assert text.count("\n") < 25, "a live line is rewritten, never repeated"
    assert re.fullmatch(
        r"\[2/2\] steady  0:0\d/0:30  1 passed  case 1 of 4 61C 312W 1980MHz  \$\d\.\d\d", live[-1]
    ), live
    lines = [re.sub(r"\x1b\[K|\r", "", line) for line in text.splitlines() if line.strip()]
    assert code == 0 and lines[-1] == "exit code 0"
    last = "\n".join(lines[-9:])
    assert re.search(r"^PASS - 1/1 tests; parity 1/1; Test GPU", last, re.M)
    folder = out / "abc1234"
    packed = folder.with_name("abc1234.tgz")
    assert f"report:  {folder / 'report.md'}" in last and f"{folder / 'report.html'}  (the" in last
    assert f"bundle:  {packed}" in last
    assert f"sha256:  {hashlib.sha256(packed.read_bytes()).hexdigest()}" in last
    assert f"fetch:   scp -P 2222 ann@203.0.113.2:{packed} ." in last
    assert "you are paying until you destroy the box" in last
    everything = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert b"203.0.113.2" not in everything and b"\x1b" not in everything


def test_how_long_the_run_will_take_yet(monkeypatch):
    """By the estimates of the stages; one that takes longer than its own adds nothing."""
    monkeypatch.setenv("COLUMNS", "99")
    stages = [Stage(name, name, ("x",), "tests", 99.0, estimate_s=60.0) for name in "abc"]
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = Progress(stages, stream)
    progress.next(), progress.next(), progress.begin(stages[1])
    progress.tick(20.0, 99.0, [])
    assert "[2/3] b  0:20/1:39, about 1:40 left" in stream.getvalue()
    progress.tick(80.0, 99.0, [])
    assert stream.getvalue().endswith("about 1:00 left")
    monkeypatch.setenv("COLUMNS", "30")
    progress.tick(81.0, 99.0, [])
    assert len(stream.getvalue().rpartition("\x1b[K")[2]) < 30, "a line that wraps is repeated"


def test_words_that_nobody_can_hear_are_no_error(monkeypatch):
    for stream in (open("/dev/full", "w"), None, open(os.devnull)):
        monkeypatch.setattr(sys, "stderr", stream)
        streams.say("a word")


def test_the_set_up_speaks_to_a_full_stream():
    code = "import scripts.setup_env as s\nraise SystemExit(s.main(['--run', '-x']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=full)
    assert done.returncode == 2
