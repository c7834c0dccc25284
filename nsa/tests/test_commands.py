"""Do `make` and the shell scripts run what they promise, and nothing more?"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import nsa
from nsa.options import Parser

ROOT = Path(__file__).resolve().parents[2]

# Stands for python3: setup_env.py names it as the interpreter; pytest ends with the given code.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exit "${TOO_OLD:-0}"; fi
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
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("run_tests.sh", "runner_oneshot.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
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


def test_cd_goes_to_this_clone(tree, tmp_path):
    (tmp_path / "other" / "scripts").mkdir(parents=True)
    for script in ("runner_oneshot.sh", "run_tests.sh"):
        code, ran, said = tree("bash", f"scripts/{script}", CDPATH=str(tmp_path / "other"))
        assert code == 0 and ran and str(tmp_path / "other") not in said, said


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("0", "0", 0), ("5", "0", 0), ("0", "5", 0), ("5", "5", 5), ("1", "0", 1), ("0", "2", 2)],
)
def test_a_selection_may_match_in_one_of_the_two_runs(tree, first, second, code):
    got, ran, text = tree("bash", "scripts/run_tests.sh", "-k", "X", FIRST=first, SECOND=second)
    assert got == code, text
    tests = [line for line in ran if "-m pytest" in line]
    assert all(line.endswith("-k X") for line in tests)
    assert ["kernel" in line for line in tests] == [True] * (1 if first == "1" else 2)
    assert tests[0].startswith("ran: 0 ") and "not kernel" in tests[0]
    assert len(tests) == 1 or tests[1].startswith("ran: 1 ")


def test_lint_sets_its_environment_up_first(tree):
    code, ran, text = tree("make", "lint")
    assert code == 0, text
    assert [line.split()[2:] for line in ran] == [
        ["scripts/setup_env.py", "--cpu-tests"],
        ["-m", "ruff", "check", "nsa", "bench", "scripts", "examples"],
        ["-m", "ruff", "format", "--check", "nsa", "bench", "scripts", "examples"],
        ["-m", "mypy"],
    ]


def test_docs_are_of_all_that_is_public(tree):
    code, ran, text = tree("make", "docs")
    assert code == 0, text
    *_, command = ran
    modules = {f"nsa.{name}" for name in nsa._MODULES} | {"nsa", "nsa.integrations.transformers"}
    assert command.split()[2:6] == ["-m", "pdoc", "-o", "artifacts/docs"]
    assert set(command.split()[6:]) == modules
    for name in modules:
        assert importlib.util.find_spec(name), name


def test_variables_count_on_the_command_line_alone(tree):
    makefile = (ROOT / "Makefile").read_text()
    names = re.findall(r"command line,\$\(origin (\w+)\)", makefile)
    assert len(names) == 8 and all(re.search(rf"^#:.*\b{name}=", makefile, re.M) for name in names)
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
