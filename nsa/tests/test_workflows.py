"""Do the workflows parse, and do the commands, files, targets and stages that they name exist?"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml

from bench.records import csv_text
from nsa import dispatch, selection_attention
from nsa.flags import Flags
from nsa.tests import test_threshold_optimizer as evidence
from scripts import modal_bench
from scripts.modal_bench import pr_body
from scripts.oneshot.run.stages import plan

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(name: str) -> tuple[dict, list[dict], list[str]]:
    """A workflow, its steps and the lines that these run."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return workflow, steps, [x.strip() for s in steps for x in s.get("run", "").splitlines()]


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_workflow_has_the_shape_that_github_needs_and_names_what_exists(name):
    workflow, steps, commands = load(name)
    assert set(workflow) >= {"name", True, "permissions", "jobs"}  # YAML 1.1 reads `on` as True
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"] > 0
    for step in steps:
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            pinned = r"[\w.-]+/[\w.-]+@(v\d+|[0-9a-f]{40})|docker://[\w.-]+/[\w.-]+:\d[\d.]+"
            assert re.fullmatch(pinned, step["uses"]), step["uses"]
        # An input or a branch name pasted into a script would be run by the shell.
        assert "${{" not in step.get("run", ""), step

    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    made = [words[1] for words in map(shlex.split, commands) if words[:1] == ["make"]]
    files = re.findall(r"(?:nsa|scripts|bench|configs)/[\w./-]+", "\n".join(commands))
    assert (made or files) and not set(made) - set(targets)
    assert not [x for x in files if not (ROOT / x).is_file()]


def test_smoke_lane_runs_stages_of_the_runner_in_its_environment():
    commands = load("triton-gpu-smoke.yml")[2]
    lines = [c for c in commands if c.startswith("make gpu-report")]
    only = [set(re.search(r"ONLY=(\S+)", line)[1].split(",")) for line in lines]
    ids = {stage.id for stage in plan("standard")}
    assert all("PROFILE=standard" in line for line in lines) and all(x <= ids for x in only)
    assert "more_parity" in only[0]
    # .deps holds a folder per interpreter: only setup_env.py knows which one is on the path.
    python = [c for c in commands if c.startswith("python")]
    assert python and all(c.startswith("python3 scripts/setup_env.py --exec -") for c in python)


def test_sm89_device_takes_the_fallback_of_the_policy(cuda):
    """What the SM 8.9 lane asks of a real card: enabled by flag, kept off by policy."""
    if torch.cuda.get_device_capability() != (8, 9):
        pytest.skip("this is not an SM 8.9 device")
    q = torch.randn(1, 128, 4, 64, device=cuda, dtype=torch.float16)
    k = torch.randn(1, 128, 2, 64, device=cuda, dtype=torch.float16)
    blocks = torch.zeros(1, 128, 2, 1, device=cuda, dtype=torch.int32)
    flags = Flags(use_triton_sel=True, sel_triton_min_L=1)
    with dispatch.trace() as taken:
        selection_attention(q, k, k, blocks, flags=flags)
    (decision,) = taken
    assert decision.route is not dispatch.Route.TRITON
    assert (dispatch.Route.TRITON, "sm89_policy") in decision.rejected


def test_benchmark_command_line_and_choices_are_those_of_the_script():
    workflow, _, commands = load("gpu-benchmark.yml")
    (line,) = [c for c in commands if c.startswith("python scripts/modal_bench.py")]
    profiles = workflow[True]["workflow_dispatch"]["inputs"]["profile"]["options"]
    for profile in profiles:
        words = shlex.split(line.replace("$PROFILE", profile).replace("$GPU", "H100"))
        args = modal_bench.build_parser().parse_args(words[2:])
        assert args.profile == profile and args.config.name == "base.yaml"


# ---- scripts/modal_bench.py ----------------------------------------------------------------------


def bundle(recommend: dict | None) -> dict:
    device = {"name": "NVIDIA H100 80GB HBM3", "sm": "9.0", "driver": "570.86"}
    verdict = {"status": "PASS", "one_line": "PASS - parity 41/41"}
    return {"profile": "standard", "device": device, "verdict": verdict, "recommend": recommend}


@pytest.mark.parametrize("recommend, says", [
    (None, "No `sel_triton_min_L` qualifies on NVIDIA H100 80GB HBM3\n\n"),
    ({"sel_triton_min_L": 512}, "Set `sel_triton_min_L` = 512 on NVIDIA H100 80GB HBM3\n\n"),
    ({"sel_triton_min_L": None, "fa2_min_len_win": 64, "fa2_min_len_cmp": 3},
     "No `sel_triton_min_L` qualifies on NVIDIA H100 80GB HBM3\n\nFlashAttention-2 with Triton "
     "off, by the same rule: `fa2_min_len_win` = 64, `fa2_min_len_cmp` = 3.\n\n"),
])  # fmt: skip
def test_a_pull_request_says_what_it_proposes_and_has_the_bundles_issue(recommend, says, tmp_path):
    assert pr_body(tmp_path, bundle(recommend)) == f"## {says}PASS - parity 41/41\n"
    (tmp_path / "issue.md").write_text("the issue\n")
    assert pr_body(tmp_path, bundle(recommend)) == f"## {says}the issue\n"


FAKE_RUNNER = """
import json, pathlib, sys
out, profile = pathlib.Path(sys.argv[1]), sys.argv[3]
assert sys.argv[2] == "--profile"
for name, text in (("8ac3f21", profile), ("8ac3f21/prev/old", "wrong")):
    (out / name).mkdir(parents=True)
    (out / name / "bundle.json").write_text(json.dumps(BUNDLE | {"profile": text}))
sys.exit(5)
"""


@pytest.fixture
def fake_runner(tmp_path, monkeypatch):
    """fake_runner(recommend, code) is what runs in place of the runner, with this proposal."""

    def install(recommend=None, code=5):
        script = tmp_path / "fake_runner.py"
        text = FAKE_RUNNER.replace("BUNDLE", repr(bundle(recommend)))
        script.write_text(text.replace("(5)", f"({code})"))
        monkeypatch.setattr(modal_bench, "RUNNER", (sys.executable, str(script)))

    return install


def test_run_report_returns_the_bundle_and_the_runners_exit_code(tmp_path, fake_runner):
    fake_runner({"sel_triton_min_L": 512, "confidence": "measured"})
    out = tmp_path / "out"
    assert modal_bench.main(["--local", "--profile", "quick", "--out", str(out)]) == 5
    assert json.loads((out / "8ac3f21" / "bundle.json").read_text())["profile"] == "quick"
    assert (out / "8ac3f21.tgz").is_file()
    assert (
        (out / "pr_body.md").read_text().startswith("## Set `sel_triton_min_L` = 512 on NVIDIA H")
    )


def test_what_leaves_no_bundle_is_reported(tmp_path, fake_runner, monkeypatch, capsys):
    fake_runner(code=6)  # it failed redaction, and stays where it is
    assert modal_bench.main(["--local", "--out", str(tmp_path / "out")]) == 4
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(modal_bench, "RUNNER", (sys.executable, "-c", "raise SystemExit(3)"))
    assert modal_bench.main(["--local", "--out", str(tmp_path)]) == 4
    assert "exit code: 3" in capsys.readouterr().err
    assert not (tmp_path / "pr_body.md").exists()
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(SystemExit, match="pip install modal"):
        modal_bench.main(["--gpu", "H100", "--out", str(tmp_path)])


def stand_in():
    """modal's names as far as build_app calls them; its functions run here."""

    def function(*, gpu, image, timeout, serialized):
        assert gpu == "H100" and timeout == 60 and serialized
        return lambda function: SimpleNamespace(local=function)

    return mock.Mock(App=lambda name: SimpleNamespace(function=function))


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "modal"])
def test_the_remote_function_runs_here_too(real, tmp_path, monkeypatch, fake_runner):
    """In the checkout where there is no copy at /repo, in the copy where there is one."""
    modal = pytest.importorskip("modal", reason="modal is not installed") if real else stand_in()
    fake_runner()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(modal_bench, "REMOTE_ROOT", str(tmp_path / "repo"))
    _, remote = modal_bench.build_app(modal, "H100", 60)
    assert remote.local("quick")["name"] == "8ac3f21" and sys.path[0] == str(ROOT)
    (tmp_path / "repo" / "scripts").mkdir(parents=True)
    (tmp_path / "repo" / "scripts" / "modal_bench.py").write_text("")
    assert remote.local("quick")["exit_code"] == 5 and sys.path[0] == str(tmp_path / "repo")


BOTH = {"sel_triton_min_L": 64, "fa2_min_len_win": 16}


@pytest.mark.parametrize("recommend, low, entry", [
    (None, 1.5, None), ({"sel_triton_min_L": None}, 1.0, None),
    ({"sel_triton_min_L": 64}, 1.5, {"sel_triton_min_L": 64}), (BOTH, 1.5, BOTH),
])  # fmt: skip
def test_the_proposal_is_what_the_optimizer_writes(recommend, low, entry, tmp_path, monkeypatch):
    config, folder = tmp_path / "base.yaml", tmp_path / "8ac3f21"
    config.write_text((ROOT / "configs" / "base.yaml").read_text())
    folder.mkdir()
    (folder / "bundle.json").write_text(json.dumps(bundle(recommend)))
    device = {"device": "NVIDIA H100 NVL"}  # without an entry so far
    rows = evidence.grid(low=low, **device)
    (folder / "sel_route.csv").write_text(csv_text(rows, evidence.COLUMNS))
    rows = [
        {"branch": "win", "S": S, "w": 64, "speedup": 1.6, "ci_low": 1.5, "ci_high": 1.7,
         "parity": "PASS", "status": "VALID", **evidence.HERE, **device}
        for S in (16, 32, 64)
    ]  # fmt: skip
    (folder / "fa2.csv").write_text(csv_text(rows, list(rows[0])))
    argv = ["--body-from", str(folder), "--out", str(tmp_path), "--config", str(config)]
    with monkeypatch.context() as patch:
        patch.delenv("NSA_RESULT_FD", raising=False)  # no proposal of the run that tests this
        assert modal_bench.main(argv) == 0
    written = yaml.safe_load(config.read_text())["runtime"]["devices"]
    assert written.get("NVIDIA H100 NVL") == entry
