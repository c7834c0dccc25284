"""Do `make`, the shell scripts, the examples and the Hub's kernel do what they promise, no more?"""

import base64
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nsa
from bench import bench_prefill
from nsa import plans
from nsa.options import Parser
from scripts import hf_kernel
from scripts.oneshot.run.arguments import OF_MAKE

ROOT = Path(__file__).resolve().parents[2]

# Stands for python3: setup_env.py names it as the interpreter; pytest ends with the given code.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then
  if [ -n "${DIES:-}" ]; then printf 'Fatal Python error: config\\nPython runtime state\\n' >&2; fi
  exit "${TOO_OLD:-0}"
fi
echo "ran: ${TRITON_INTERPRET:-0} $*" >> "$RAN"
printf '%s\\n' "$@" > "$RAN.words"
case "$*" in
  *"setup_env.py --cpu-tests") echo "$0" ;;
  *"-m pytest"*"not kernel"*) exit "${FIRST:-0}" ;;
  *"-m pytest"*) exit "${SECOND:-0}" ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the commands in an empty tree, and how to run one there: (exit code, calls)."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("Makefile", "scripts/run_tests.sh", "scripts/runner_oneshot.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "bin" / "python3"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def call(*argv, **env):
        ran = tmp_path / "ran"
        ran.write_text("")
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        base = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            argv, cwd=tmp_path, env={**base, "PATH": path, "RAN": str(ran), **env},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, ran.read_text().splitlines(), done.stdout + done.stderr

    return call


def test_an_interpreter_that_is_too_old_is_a_usage_error(tree):
    for streams in ("", " 2>/dev/full", " 2>&-"):
        command = f"bash scripts/runner_oneshot.sh{streams}"
        code, ran, said = tree("bash", "-c", command, TOO_OLD="1")
        assert (code, ran) == (2, [])
        assert streams or ("older than Python 3.8" in said and "3.10 or later" in said)


def test_an_interpreter_that_cannot_start_says_why(tree):
    code, ran, said = tree("bash", "scripts/runner_oneshot.sh", TOO_OLD="1", DIES="1")
    assert (code, ran) == (2, []) and "older" not in said
    assert "python3 cannot start: Fatal Python error: config" in said


def test_cd_goes_to_this_clone(tree, tmp_path):
    (tmp_path / "other" / "scripts").mkdir(parents=True)
    for script in ("runner_oneshot.sh", "run_tests.sh"):
        code, ran, said = tree("bash", f"scripts/{script}", CDPATH=str(tmp_path / "other"))
        assert code == 0 and ran and str(tmp_path / "other") not in said, said


@pytest.mark.parametrize("first, second, code", [
    (0, 0, 0), (5, 0, 0), (0, 5, 0), (5, 5, 5), (1, 0, 1), (0, 2, 2),
])  # fmt: skip
def test_a_selection_may_match_in_one_of_the_two_runs(tree, first, second, code):
    ends = dict(FIRST=str(first), SECOND=str(second))
    got, ran, text = tree("bash", "scripts/run_tests.sh", "-k", "X", **ends)
    assert got == code, text
    tests = [line for line in ran if "-m pytest" in line]
    assert all(line.endswith("-k X") and "kernel" in line for line in tests)
    assert len(tests) == (1 if first == 1 else 2)
    assert tests[0].startswith("ran: 0 ") and "not kernel" in tests[0]
    assert len(tests) == 1 or tests[1].startswith("ran: 1 ")


def test_lint_sets_its_environment_up_first(tree):
    code, ran, text = tree("make", "lint")
    assert code == 0, text
    first, *tools = [line.removeprefix("ran: 0 ") for line in ran]
    ruff = [f"-m ruff {verb} nsa bench scripts examples" for verb in ("check", "format --check")]
    assert first == "scripts/setup_env.py --cpu-tests" and tools == [*ruff, "-m mypy"]


def test_docs_are_of_all_that_is_public(tree):
    code, ran, text = tree("make", "docs")
    assert code == 0, text
    modules = {f"nsa.{name}" for name in nsa._MODULES} | {"nsa", "nsa.integrations.transformers"}
    command = ran[-1].split()
    assert command[2:6] == ["-m", "pdoc", "-o", "artifacts/docs"] and set(command[6:]) == modules
    for name in modules:
        assert importlib.util.find_spec(name), name


def test_variables_count_on_the_command_line_alone(tree):
    makefile = (ROOT / "Makefile").read_text()
    names = re.findall(r"command line,\$\(origin (\w+)\)", makefile)
    assert set(names) == set(OF_MAKE)
    assert all(re.search(rf"^#:.*\b{name}=", makefile, re.M) for name in names)
    env = {name: "1" for name in names}
    for given, words in (([], ""), (["OUT=/x", "PROFILE=cpu"], " /x --profile cpu"),
                         (["RESUME=1"], " --resume"), (["RESUME=yes"], " --resume"),
                         (["RESUME=0"], ""), (["RESUME="], "")):  # fmt: skip
        ran = tree("make", "gpu-report", *given, **env)[1]
        assert ran == [f"ran: 0 scripts/setup_env.py --run{words}"], given


def test_spaces_and_quotes_reach_the_run_whole(tree, tmp_path):
    tree("make", "gpu-report", "OUT=/my out/it's $x $(y)", "ONLY=a, b", "PRICE=0.4")
    words = (tmp_path / "ran.words").read_text().splitlines()
    assert words == ["scripts/setup_env.py", "--run", "/my out/it's $x $(y)", "--price", "0.4",
                     "--only", "a, b"]  # fmt: skip


@pytest.mark.parametrize("given", ["--max-new-tokens", "--max_new_tokens"])
def test_options_go_by_hyphens_and_by_underscores(given, capsys):
    for declared in ("--max-new-tokens", "--max_new_tokens"):
        parser = Parser(prog="x")
        parser.add_argument("-n", declared, type=int)
        parser.add_argument("files", nargs="*")
        args = parser.parse_args([given, "3", "a_b-c"])
        assert vars(args) == {"max_new_tokens": 3, "files": ["a_b-c"]}
        with pytest.raises(SystemExit):
            parser.parse_args(["--help"])
        assert "-n MAX_NEW_TOKENS, --max-new-tokens" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("spelled", ["--S-list 64 --compile-only", "--S_list 64 --compile_only"])
def test_benches_take_both_spellings(spelled):
    args = bench_prefill.parse(spelled.split())
    assert (list(args.S_list), args.compile_only) == ([64], True)


def test_warming_needs_a_gpu():
    config = nsa.NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8)
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        nsa.warmup(config, seqlens=[64], device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device must be a CUDA device, got cuda where there"):
            nsa.warmup(config, seqlens=[64])


@pytest.mark.parametrize("name", ["--window", "--w"])
def test_kernels_are_warmed_for_the_window_that_was_asked_for(name, monkeypatch):
    configs = []
    monkeypatch.setattr(plans, "warmup", lambda config, **_: configs.append(config) or [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert plans.main([name, "128", "--d-k", "64"]) == 0
    assert (configs[0].window, configs[0].d_k) == (128, 64)


@pytest.mark.parametrize("argv, told", [
    ("--seqlens 0", "--seqlens: must be integers of at least 1, such as 64,128, got '0'"),
    ("--seqlens abc", "--seqlens: must be integers of at least 1, such as 64,128, got 'abc'"),
    ("--decode 64,-3", "--decode: must be integers of at least 1, such as 64,128, got '64,-3'"),
    ("--dim 0", "dim must be at least 1, got 0"),
    ("--l 33", "d must divide l and l_sel, got l=33 d=16 l_sel=64"),
])  # fmt: skip
@pytest.mark.parametrize("gpu", [False, True])
def test_what_cannot_be_warmed_is_a_usage_error(argv, told, gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(SystemExit, match="2"):
        plans.main(argv.split())
    assert told in capsys.readouterr().err


# ---- examples ------------------------------------------------------------------------------------


def python(*argv, cwd=None, **env):
    """Run Python, which must succeed, and return what it prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    env.pop("TRITON_INTERPRET", None)
    how = dict(capture_output=True, text=True, timeout=900)
    done = subprocess.run([sys.executable, *argv], env=env, cwd=cwd, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name, *args):
    return python(ROOT / "examples" / f"{name}.py", *args, PYTHONPATH=str(ROOT))


def test_examples_run():
    """All of them here or below."""
    names = sorted(x.stem for x in (ROOT / "examples").glob("*.py"))
    assert names == ["functions", "huggingface", "serve", "train"]
    assert "merged; gradient of q" in example("functions")
    shared = "3 requests of [108, 75, 91] tokens in 12 pages; without sharing 18\n"
    assert example("serve") == shared


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_training_needs_a_step(steps, capsys):
    train = runpy.run_path(str(ROOT / "examples" / "train.py"))["main"]
    with pytest.raises(SystemExit, match="2"):
        train(["--steps", steps])
    assert f"--steps must be at least 1, got {steps}" in capsys.readouterr().err


@pytest.mark.nightly  # test_train.py resumes what it trained
def test_training_resumes_from_what_it_saved(tmp_path):
    args = "--save", str(tmp_path / "model.pt"), "--steps"
    assert example("train", *args, "30").startswith("step 0: loss 5.5")  # ln 256: it knows nothing
    again = example("train", *args, "1")
    assert float(again.splitlines()[0].split()[-1]) < 4


@pytest.mark.nightly  # test_transformers.py trains such models, in a tenth of the time
def test_a_dense_model_goes_on_with_nsa():
    pytest.importorskip("transformers")
    line = r"^(\w+), from the same weights.*loss (\S+) -> (\S+)$"
    losses = re.findall(line, example("huggingface"), re.M)
    end = {name: (float(begin), float(end)) for name, begin, end in losses}
    assert end["nsa"][1] < end["nsa"][0] / 2 and end["dense"][1] < 0.1


# ---- a kernel of the Kernel Hub ------------------------------------------------------------------

# This imports the kernel as the package `kernels` does, which need not be installed.
LOAD = """
import importlib.util, json, sys
from pathlib import Path
import torch
folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
nsa = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nsa)
torch.manual_seed(0)
config = nsa.NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
out = nsa.NSAAttention(config)(torch.randn(1, 50, 32))
import importlib
older = importlib.import_module(f"{name}.nsa")
assert older.nsa_attention is nsa.nsa_attention
importlib.import_module(f"{name}.kernels.prefill.fused")
importlib.import_module(f"{name}.kernels.prefill.turn")
assert hasattr(torch.ops, name) and "prefill" in dir(getattr(torch.ops, name))
assert not [m for m in sys.modules if m.split(".")[0] == "nsa"]
print(out.double().sum().item(), nsa.__version__)
"""


@pytest.mark.parametrize("name, told", [
    ("file", "wants a folder that can be written, got"), ("file/below", "wants a folder"),
    ("", "OUT must have no folder build"),
])  # fmt: skip
def test_the_hubs_kernel_goes_to_a_folder_without_a_build(name, told, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "build").mkdir()
    with pytest.raises(SystemExit, match="2"):
        hf_kernel.main([str(tmp_path / name)])
    assert told in capsys.readouterr().err
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["build", "file"]


def test_it_loads_alone_under_another_name_and_computes_the_same(tmp_path):
    assert hf_kernel.main([str(tmp_path)]) == 0
    names = sorted(x.name for x in (tmp_path / "build").iterdir())
    assert names == ["torch-cpu", "torch-cuda"]
    folder = tmp_path / "build" / "torch-cuda"
    total, version = python("-c", LOAD, str(folder), cwd=tmp_path).split()
    torch.manual_seed(0)
    config = nsa.NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
    out = nsa.NSAAttention(config)(torch.randn(1, 50, 32))
    assert float(total) == out.double().sum().item() and version == nsa.__version__

    metadata = json.loads((folder / "metadata.json").read_text())
    files = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()}
    files = {x for x in files if "__pycache__" not in x}
    assert files == set(metadata["digest"]["files"]) | {"metadata.json"}
    assert {"kernels/decode/cluster.cu", "base.yaml"} <= files and "tests/__init__.py" not in files
    assert metadata["backend"] == {"type": "cuda"} and metadata["id"].isidentifier()
    for name, told in metadata["digest"]["files"].items():
        digest = hashlib.sha256((folder / name).read_bytes()).digest()
        assert base64.b64encode(digest).decode() == told
