"""Do the verbs, their options and usage errors do what they say?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.tests.oneshot_faults import ROOT
from nsa.tests.oneshot_samples import write_sample
from nsa.tests.test_oneshot_faults import bundle_of, run
from scripts import setup_env
from scripts.oneshot.box.checkout import git_facts
from scripts.oneshot.record.journal import Journal
from scripts.oneshot.record.outputs import scp_line
from scripts.oneshot.run import attach, runner, stages
from scripts.oneshot.run.arguments import seconds
from scripts.oneshot.run.lock import folder_lock


def verb(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "scripts.oneshot", *args], cwd=ROOT, capture_output=True, text=True,
        timeout=60, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("with_git", [True, False])
def test_sources_edited_during_the_run_are_not_clean(with_git, tmp_path):
    """By git, or by the hash of the sources; an edit is seen by --resume too."""
    source = tmp_path / "src" / "nsa" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "1"],
                  ) if with_git else ():  # fmt: skip
        subprocess.run(["git", *words], cwd=tmp_path / "src", check=True)
    given = ("--commit", git_facts(tmp_path / "src")["commit"]) if with_git else ()

    def bundle(stages, *options):
        how = dict(fault={"git": str(tmp_path / "src")}, env={"CUDA_TEST_EDIT": str(source)})
        run(tmp_path / "out", stages, *given, *options, **how)
        return bundle_of(next(p for p in (tmp_path / "out").iterdir() if p.is_dir()))

    edited = bundle("pass,edit")
    git = edited["git"]
    assert git["dirty"] and git["changed_during_run"] is True
    assert f"commit {git['short']} DIRTY" in edited["verdict"]["one_line"]
    assert any("changed while the run was going on" in n["text"] for n in edited["notes"])
    assert not with_git or "1 file changed" in git["diffstat"]
    assert bundle("pass", "--resume")["resumed"] == {}  # the same edited sources
    if not with_git:
        assert list(bundle("pass", "--resume")["resumed"].values()) == [["pass"]]
        source.write_text("x = 3\n")
        assert bundle("pass", "--resume")["resumed"] == {}


def test_budget_skips_and_says_so(tmp_path):
    code, console, folder = run(tmp_path, "pass,hang", "--budget", "11s")
    bundle = bundle_of(folder)
    kinds = {s["id"]: s["kind"] for s in bundle["stages"]}
    assert code == 3 and bundle["ended_by"] == "budget" and kinds["hang"] == "BUDGET", console
    assert "; its budget was spent; 0/0 tests; " in bundle["verdict"]["one_line"]


def test_a_stage_gets_arguments_from_one_that_passed(tmp_path):
    also = {"pass": ["more"], "skip": ["no"]}
    _, _, folder = run(tmp_path, "skip,pass,bench", fault={"also": also})
    argv = {s["id"]: s["argv"] for s in bundle_of(folder)["stages"]}
    assert argv["pass"][-1] == "pass" and argv["bench"][-2:] == ["bench", "more"]


def test_only_and_skip_make_a_partial_run(tmp_path):
    code, _, folder = run(tmp_path, "pass,raise", "--only", "pass")
    bundle = bundle_of(folder)
    assert code == 0 and bundle["partial"] == "--only pass"
    assert [s["id"] for s in bundle["stages"]] == ["env", "pass"]
    assert "partial run" in bundle["verdict"]["one_line"]


def test_unknown_flag_of_the_caller_blocks(tmp_path):
    code, console, folder = run(tmp_path, "pass", env={"NSA_USE_TRITONSEL": "1"})
    bundle = bundle_of(folder)
    assert code == 3 and "NSA_USE_TRITON_SEL" in console
    assert bundle["stages"][1]["status"] == "NOT_RUN"


@pytest.mark.parametrize("argv", [
    ["--profile", "huge"], ["--budget", "soon"], ["--only", "nonsense"], ["a", "--out", "b"],
    ["--commit", "../../etc"], ["--resume=yes"], ["--price", "nan"], ["--price", "-1"],
    ["--price", "inf"], ["--gpus", "7", "--profile", "cpu"], ["--dry"],
])  # fmt: skip
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(runner.main(["--dry-run", *argv]))
    assert stop.value.code == 2 and capsys.readouterr().err


def test_unknown_verb():
    assert verb("fly").returncode == 2
    assert verb("--help").returncode == 0


def test_gpus_without_a_gpu_are_a_usage_error(monkeypatch, capsys):
    def no_smi():
        raise runner.box.ProbeFailed("nvidia-smi is not installed")

    monkeypatch.setattr(runner.box, "smi_query", no_smi)
    monkeypatch.setattr(runner.box, "nvidia_hardware", lambda: None)
    for profile in ("auto", "quick"):
        assert runner.main(["--gpus", "7", "--profile", profile, "--dry-run"]) == 2
        assert "'7', but no NVIDIA hardware is visible" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "abc1234").write_text("x")
    code, console, _ = run(tmp_path, "pass")
    assert code == 4 and "Traceback" not in console
    (line,) = console.splitlines()
    assert "the runner itself failed" in line and "abc1234" in line


@pytest.mark.parametrize("profile", stages.PROFILES)
def test_plan_names_real_files(profile):
    planned = stages.plan(profile)
    assert len({s.id for s in planned}) == len(planned)
    assert len({s.log_path for s in planned}) == len(planned)
    for stage in planned:
        assert stage.after is None or stage.after in {s.id for s in planned}
        assert stages.NO_TEST not in stage.argv, f"{stage.id} finds no test file"
        for part in stage.argv:
            if part.endswith(".py"):
                assert (ROOT / part).is_file(), f"{stage.id} names {part}"


def test_what_a_profile_leaves_out_is_known():
    standard, quick = ({s.id for s in stages.plan(p)} for p in ("standard", "quick"))
    assert standard - quick == set(stages.LEFT_OUT["quick"]) and quick <= standard


def test_gpu_profile_without_a_gpu_says_not_run(tmp_path):
    """The real entry, and a torch that cannot be imported: the report still comes."""
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise ImportError('torch is blocked')")
    env = {**os.environ, "PYTHONPATH": str(fake.parent), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "runner_oneshot.sh"), "out", "--profile", "quick",
         "--commit", "abc1234f"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    bundle = bundle_of(tmp_path / "out" / "abc1234")
    assert bundle["verdict"]["status"] == "NOT_RUN"
    assert {s["status"] for s in bundle["stages"][1:]} == {"NOT_RUN"}
    blocks = [c["text"] for c in bundle["doctor"] if c["level"] == "BLOCK"]
    assert any("torch is blocked" in text for text in blocks)
    report = (tmp_path / "out" / "abc1234" / "report.md").read_text()
    assert "NOT_RUN" in report
    left_out = "decode_serving, more_parity, sel_route, threshold, train_showcase"
    assert f"profile quick leaves out {left_out}" in report
    assert done.stdout.rstrip().endswith("exit code 3")


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--only", "nope"], "no stage 'nope'"), (["--budget", "0"], "a time such as 15m"),
     (["a", "--out", "b"], "not both"), (["--profile", "cpu", "--skip", "fa2_bench"], "no stage")],
)  # fmt: skip
def test_a_usage_error_is_found_before_anything_is_installed(argv, says, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "choose", lambda: pytest.fail("it would install"))
    assert setup_env.run_report(argv) == 2
    assert says in capsys.readouterr().err


def test_arguments_that_are_right_go_on_to_the_installation(monkeypatch):
    monkeypatch.setattr(setup_env, "choose", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        setup_env.run_report(["--profile", "cpu", "--only", "sanity", "--budget", "9m"])


def test_attach_follows_to_the_verdict(tmp_path):
    write_sample(tmp_path / "8ac3f21", "all_pass")
    done = verb("attach", str(tmp_path))
    assert done.returncode == 0 and "triton_fwd PASS" in done.stdout


def test_detach_says_what_came_of_it(tmp_path, capsys, monkeypatch):
    def detach(*options):
        code = runner.main(["--profile", "cpu", "--detach", "--commit", "abc1234f", *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # main() sets it
    (tmp_path / "file").write_text("x")
    code, said = detach("--out", str(tmp_path / "file" / "out"))
    assert code == 4 and "cannot be used" in said and "process" not in said
    lock = folder_lock(tmp_path, "abc1234")
    lock.acquire()
    code, said = detach("--out", str(tmp_path))
    assert code == 75 and f"held by process {os.getpid()}" in said
    lock.release()

    def begin(argv, **_):
        journal = Journal(tmp_path / "abc1234" / "events.jsonl")
        journal.append("run_start", run_id="new")
        return SimpleNamespace(pid=4711, poll=lambda: None)

    monkeypatch.setattr(runner.subprocess, "Popen", begin)
    monkeypatch.setattr(runner.checkout, "git_facts", lambda *_: {"short": "abc1234"})
    monkeypatch.setattr(runner.box, "smi_query", lambda: [])
    code, said = detach("--out", str(tmp_path))
    assert code == 0 and said.startswith("running as process 4711")
    monkeypatch.setattr(runner, "DETACH_WAIT_S", 0.0)
    code, said = detach("--out", str(tmp_path))
    assert code == 0 and said.startswith("waiting as process 4711")


def test_attach_once_says_that_a_run_is_running(tmp_path, capsys):
    write_sample(tmp_path / "8ac3f21", "crash")  # its journal ends in the midst of triton_bwd
    lock = folder_lock(tmp_path, "8ac3f21")
    lock.acquire()
    assert attach.main([str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("running: stage 5 of 11, triton_bwd")
    lock.release()
    assert attach.main([str(tmp_path), "--once"]) == 4


def test_times():
    assert [seconds(t) for t in ("15m", "1h", "90s", "45")] == [900, 3600, 90, 45]


def test_scp_line_is_made_of_what_the_box_says():
    path = Path("/x/a.tgz")
    ssh = {"SSH_CONNECTION": "198.51.100.1 5000 203.0.113.2 22", "USER": "u"}
    assert scp_line(ssh, path) == "scp -P 22 u@203.0.113.2:/x/a.tgz ."
    pod = {"RUNPOD_PUBLIC_IP": "203.0.113.9", "RUNPOD_TCP_PORT_22": "40022", "USER": "u"}
    assert scp_line(pod, path) == "scp -P 40022 u@203.0.113.9:/x/a.tgz ."
    assert scp_line({}, path) is None


def test_dry_run_lists_stages():
    done = verb("run", "--dry-run", "--profile", "cpu")
    assert done.returncode == 0 and "train_showcase" in done.stdout
    assert json.dumps(done.stdout)  # plain text
