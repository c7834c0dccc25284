"""Choose the Python that has torch, and set up what is missing around it.

    python3 scripts/setup_env.py --run [options of `scripts.oneshot run`]   becomes the report run
    python3 scripts/setup_env.py --exec -m pytest nsa/tests   becomes the chosen Python, set up
    python3 scripts/setup_env.py --cpu-tests      prints the interpreter of an up-to-date .venv
    python3 scripts/setup_env.py --choose         prints the choice as JSON, installs nothing

Order: (1) $PYTHON; (2) an interpreter on PATH whose torch sees CUDA, used as it is: torch is never
reinstalled and no environment is put around it, only small missing packages go to .deps/ and on
PYTHONPATH; (3) NVIDIA hardware without such a torch: .venv-gpu from requirements.txt; (4) no NVIDIA
hardware: .venv from requirements-cpu.txt. Standard library only, and Python 3.8 can still read it
to say that 3.10 is needed. Messages go to stderr. `--run --dry-run` and `--run --help` install
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import pythons  # noqa: E402
from scripts.oneshot import streams  # noqa: E402
from scripts.oneshot.streams import say  # noqa: E402
from scripts.pythons import LEAST, SetupFailed, joined  # noqa: E402

# Of the caller's Python; no process that is started from here is to have them. With the one,
# `python -m scripts.oneshot` does not find the sources; with the other, no assertion of a test
# counts.
UNWANTED = ("PYTHONSAFEPATH", "PYTHONOPTIMIZE")

CUDA = """
import json
try:
    import torch
    works = torch.cuda.is_available()
    if works:
        torch.ones(1, device="cuda").item()
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "works": works}))
except Exception as error:
    print(json.dumps({"works": False, "error": f"{type(error).__name__}: {error}"[:300]}))
"""


class WrongPython(SetupFailed):
    """The interpreter that the caller named is none, or too old."""


def nvidia_hardware() -> str | None:
    try:
        from scripts.oneshot.box import env as box

        if hidden := box.why_hidden(os.environ):  # then there is nothing to install a torch for
            say(f"== {hidden}")
            return None
        return box.nvidia_hardware()
    except Exception as error:  # an old Python, or a box without /proc: nvidia-smi decides
        if shutil.which("nvidia-smi"):
            return f"nvidia-smi is there ({type(error).__name__} while looking closer)"
        return None


def choose(install: bool = True) -> dict:
    """Choose the interpreter to use, and say why. Raises SetupFailed."""
    given, hardware = os.environ.get("PYTHON"), nvidia_hardware()
    choice = {"hardware": hardware, "problems": [], "missing": [], "pythonpath": ""}

    def beside(path: str, why: str) -> dict:
        """Choose this interpreter, with the small packages that it lacks beside it."""
        choice.update(python=path, why=why)
        if install:
            folder, choice["missing"], problem = pythons.add_small_packages(path)
            choice["problems"] += [problem] if problem else []
            choice["pythonpath"] = str(folder) if folder else ""
        return choice

    if given:
        path = shutil.which(given)
        facts = pythons.ask(path, pythons.FACTS, timeout_s=20) if path else None
        if facts is None:
            raise WrongPython(f"PYTHON={given} is no interpreter that runs")
        if tuple(facts["version"]) < LEAST:
            version = ".".join(map(str, facts["version"]))
            raise WrongPython(f"PYTHON={given} is Python {version}; 3.10 or later is needed")
        return beside(path, "given as PYTHON")
    if hardware:
        say(f"== {hardware}; looking for a torch that sees it")
        for facts in pythons.distinct(pythons.interpreters()):
            if not facts["has_torch"]:
                continue
            seen = pythons.ask(facts["path"], CUDA) or {"works": False, "error": "no answer"}
            if seen["works"]:
                why = f"torch {seen['torch']} of {facts['path']} sees the GPU; used as it is"
                return beside(facts["path"], why)
            blind = f"{facts['path']}: torch {seen.get('torch', '')} does not see the GPU"
            choice["problems"].append(blind + (f" ({seen['error']})" if seen.get("error") else ""))
    names = (".venv-gpu", "requirements.txt") if hardware else (".venv", "requirements-cpu.txt")
    folder, requirements = (ROOT / name for name in names)
    choice["why"] = f"{folder.name} from {requirements.name}"
    choice["python"] = str(folder / "bin" / "python")
    if install:
        choice["python"] = pythons.make_venv(folder, requirements)
    return choice


def usage_error(argv: list[str]) -> str | None:
    """Return what the run would refuse `argv` with. A dry run says it, which needs the standard
    library alone: nobody should wait for an installation to hear of a slip of the pen."""
    python = pythons.first_able()
    if python is None:
        return None  # the run itself will say what is wrong
    try:
        done = subprocess.run(
            [python, "-m", "scripts.oneshot", "run", *argv, "--dry-run"], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, check=False,
            cwd=str(ROOT),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stderr.decode("utf-8", "replace") if done.returncode == 2 else None


def run_report(argv: list[str]) -> int:
    """Become `python -m scripts.oneshot run`. A failed set-up still gets a report that says so."""
    run = ["-m", "scripts.oneshot", "run", *argv]
    if {"--dry-run", "-h", "--help"} & set(argv):
        if python := pythons.first_able():
            return become(python, run, "")
        say("no Python 3.10 or later on PATH")
        return 3
    if (refused := usage_error(argv)) is not None:
        say(refused.rstrip())
        return 2
    try:
        choice = choose()
    except WrongPython as error:
        say(f"ERROR {error}")
        return 2
    except SetupFailed as error:
        say(f"ERROR {error}")
        python = pythons.first_able()
        if python is None:
            say("no Python 3.10 or later: not even a report can be written")
            return 3
        failed = "set-up failed: " + " ".join(str(error).split())
        choice = {"python": python, "why": "the only Python there is", "hardware": None,
                  "problems": [failed], "missing": [], "pythonpath": ""}  # fmt: skip
    say(f"== Python: {choice['python']} ({choice['why']})")
    shown = {k: choice[k] for k in ("why", "hardware", "problems", "missing")}
    told = {"ONESHOT_SETUP": json.dumps(shown)}
    return become(choice["python"], run, choice["pythonpath"], **told)


def become(python: str, argv: list[str], pythonpath: str, **variables: str) -> int:
    """Go on as `python argv` in the root of the sources, with the small packages on its path."""
    env = {**os.environ, **variables}
    if pythonpath:
        env["PYTHONPATH"] = joined(Path(pythonpath))
    os.chdir(ROOT)
    os.execve(python, [python, *argv], env)


def run_python(argv: list[str]) -> int:
    """Become the chosen interpreter with `argv`, its small packages installed."""
    try:
        choice = choose()
    except SetupFailed as error:
        say(f"ERROR {error}")
        return 3
    say(f"== Python: {choice['python']} ({choice['why']})")
    return become(choice["python"], argv, choice["pythonpath"])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for name in UNWANTED:
        os.environ.pop(name, None)
    if argv[:1] == ["--run"]:
        return run_report(argv[1:])
    if argv[:1] == ["--exec"] and argv[1:]:
        return run_python(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_mutually_exclusive_group(required=True)
    for name in ("--run", "--exec"):
        group.add_argument(name, action="store_true", help="must come first, its arguments after")
    group.add_argument("--cpu-tests", action="store_true")
    group.add_argument("--choose", action="store_true")
    args = parser.parse_args(argv)
    if args.run or args.exec:
        parser.error("--run and --exec must come first; --exec needs arguments")
    try:
        if args.cpu_tests:
            print(pythons.make_venv(ROOT / ".venv", ROOT / "requirements-cpu.txt"))
        else:
            print(json.dumps(choose(install=False), indent=1))
    except SetupFailed as error:
        say(f"ERROR {error}")
        return 3
    return 0


def _stopped(number: int, _frame: object) -> None:
    say(f"stopped by {signal.Signals(number).name} during the set-up: nothing ran")
    sys.exit(128 + number)


if __name__ == "__main__":
    streams.open_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # a child of this process is killed
        signal.signal(number, _stopped)
    streams.leave_by(main)
