"""Which Pythons there are, and how packages get into one. Python 3.8 can read this file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.oneshot.streams import last_answer, say

ROOT = Path(__file__).resolve().parent.parent
LEAST = (3, 10)
STAMP = ".requirements.sha256"
# Of pip's own settings only where it gets packages from: not --user, a target or no dependencies.
PIP_KEPT = re.compile(
    r"PIP_(?:(?:EXTRA_)?INDEX_URL|NO_INDEX|FIND_LINKS|TRUSTED_HOST|(?:CLIENT_)?CERT|PROXY"
    r"|CACHE_DIR|NO_CACHE_DIR|DEFAULT_TIMEOUT|TIMEOUT|RETRIES|CONFIG_FILE|KEYRING_PROVIDER)"
)
PIP_SET = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_NO_DEPS": "0", "PIP_DRY_RUN": "0",
           "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}  # fmt: skip

# module -> (distribution, what it needs itself): installed with --no-deps, so that no resolver can
# touch torch.
SMALL = {
    "jinja2": ("jinja2", ("markupsafe",)), "yaml": ("pyyaml", ()), "packaging": ("packaging", ()),
    "pytest": ("pytest", ("pluggy", "iniconfig", "packaging", "pygments")),
    "pytest_timeout": ("pytest-timeout", ()), "pynvml": ("nvidia-ml-py", ()),
    "hypothesis": ("hypothesis", ("sortedcontainers",)), "numpy": ("numpy", ()),
    "matplotlib": ("matplotlib", ("contourpy", "cycler", "fonttools", "kiwisolver", "pillow",
                                  "pyparsing", "python-dateutil", "six", "packaging")),
}  # fmt: skip
# Named by pytest and hypothesis on Python 3.10 only.
SMALL_310 = ("exceptiongroup", "tomli", "typing_extensions")

FACTS = """
import importlib.util, json, sys
out = {"version": list(sys.version_info[:2]), "prefix": sys.prefix, "executable": sys.executable,
       "has_torch": importlib.util.find_spec("torch") is not None}
if len(sys.argv) > 1:
    out["missing"] = [m for m in sys.argv[1].split(",") if importlib.util.find_spec(m) is None]
print(json.dumps(out))
"""
# How this interpreter runs pip: its own, or the one that is packed into it for new environments.
PIP = """
import glob, importlib.util, json, os
argv = ["-m", "pip"] if importlib.util.find_spec("pip") else None
packed = importlib.util.find_spec("ensurepip")
if argv is None and packed is not None:
    wheels = glob.glob(os.path.join(os.path.dirname(packed.origin), "_bundled", "pip-*.whl"))
    argv = [os.path.join(sorted(wheels)[-1], "pip")] if wheels else None
print(json.dumps({"argv": argv}))
"""
IMPORTS = """
import importlib, json, sys
failed = {}
for name in sys.argv[1].split(","):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps({"failed": failed}))
"""


class SetupFailed(Exception):
    """No environment could be made; the text says why and what to do."""


def ask(python: str, code: str, *args: str, timeout_s: float = 120.0, env=None) -> dict | None:
    """Return the JSON that `code` prints under `python`; None when it gives none."""
    try:
        done = subprocess.run(
            [python, "-c", code, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=timeout_s, check=False, env=env, cwd=str(ROOT),
        )  # fmt: skip
        return last_answer(done.stdout.decode("utf-8", "replace"))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def interpreters() -> list[str]:
    """Return the Pythons on PATH, in its order: python3, python, python3.N of each folder."""
    found = []
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        names = ["python3", "python", *(f"python3.{minor}" for minor in range(20, 9, -1))]
        for name in names:
            path = os.path.join(folder, name)
            if folder and os.access(path, os.X_OK) and path not in found:
                found.append(path)
    return found


def distinct(paths: list[str]) -> list[dict]:
    """Return facts of each different environment among `paths`, Python 3.10 or later only."""
    seen, out = set(), []
    for path in paths:
        facts = ask(path, FACTS, timeout_s=20)
        if facts and facts["prefix"] not in seen and tuple(facts["version"]) >= LEAST:
            seen.add(facts["prefix"])
            out.append({**facts, "path": path})
    return out


def first_able() -> str | None:
    """Return this Python, or if it is older than 3.10 the first on PATH that is not."""
    if sys.version_info[:2] >= LEAST:
        return sys.executable
    return next((facts["path"] for facts in distinct(interpreters())), None)


def pip(
    python: str, *argv: str, timeout_s: float | None = None, silent: bool = False
) -> str | None:
    """Run `pip argv` for `python`, which need not have one. Returns what went wrong, or None."""
    own = (ask(python, PIP, timeout_s=20) or {}).get("argv")
    ours = ask(sys.executable, PIP, timeout_s=20) if own is None else None
    if own is not None:
        command = [python, *own, *argv]
    elif ours and ours["argv"]:
        command = [sys.executable, *ours["argv"], "--python", python, *argv]
    else:
        return "there is no pip: apt-get install python3-pip, or your system's package of that name"
    env = {k: v for k, v in os.environ.items() if PIP_KEPT.fullmatch(k) or k[:4] != "PIP_"}
    off = subprocess.DEVNULL
    out, err = (off, off) if silent else (sys.stderr, None)
    try:
        done = subprocess.run(
            command, stdin=off, stdout=out, stderr=err, check=False, timeout=timeout_s,
            env={**env, **PIP_SET},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"pip: {error}"
    return f"pip ended with {done.returncode}" if done.returncode else None


def install(python: str, requirements: Path) -> str | None:
    """Install `requirements`. Returns what went wrong, or None."""
    # Compiling all of torch takes as long as the rest, and Python keeps what it compiles on import.
    how = ("install", "--quiet", *(() if sys.dont_write_bytecode else ("--no-compile",)))
    wanted = re.findall(r"^[^#\s].*", requirements.read_text(encoding="utf-8"), re.M)
    torch = [line for line in wanted if line.startswith("torch==")]
    if torch:  # as large as the others, which are unpacked beside it
        others = [line for line in wanted if line not in torch]
        once = (*how, "--retries", "0")  # what fails here is tried again, and told, below
        with ThreadPoolExecutor(1) as beside:
            beside.submit(pip, python, *once, "--no-deps", *torch, silent=True)
            pip(python, *once, *others, silent=True)
    return pip(python, *how, "-r", str(requirements))


def digest(requirements: Path, python: str) -> str:
    facts = ask(python, FACTS, timeout_s=20) or {}
    text = requirements.read_text(encoding="utf-8") + str(facts.get("version"))
    return hashlib.sha256(text.encode()).hexdigest()


def make_venv(folder: Path, requirements: Path) -> str:
    """Make an environment with `requirements`, unless its stamp is up to date."""
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    made = python.exists() and stamp.exists()
    if made and stamp.read_text() == digest(requirements, str(python)):
        return str(python)
    if not python.exists():
        base = distinct([sys.executable, *interpreters()])
        if not base:
            raise SetupFailed("no Python 3.10 or later on PATH; install one, or set PYTHON")
        say(f"== making {folder.name} with Python {'.'.join(map(str, base[0]['version']))}")
        done = subprocess.run(
            [base[0]["path"], "-m", "venv", str(folder)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not python.exists():
            shutil.rmtree(folder, ignore_errors=True)
            words = done.stdout.decode("utf-8", "replace").strip().splitlines()
            hint = next((w for w in words if "ensurepip" in w or "venv" in w), "")
            raise SetupFailed(
                f"{base[0]['path']} -m venv failed: {hint or ' '.join(words[-1:])}\n"
                "  fix: apt-get install python3-venv (or your system's package of that name),\n"
                "  or name an interpreter that has the packages: PYTHON=/path/to/python"
            )
    say(f"== installing {requirements.name} into {folder.name}")
    problem = install(str(python), requirements)
    if problem:
        raise SetupFailed(
            f"pip could not install {requirements.name} ({problem})\n"
            "  fix: see its last lines above; without network, set PYTHON to an interpreter that\n"
            "  has the packages"
        )
    wanted = re.findall(r"^[\w-]+", requirements.read_text(encoding="utf-8"), re.M)
    names = [m for m, (name, _) in SMALL.items() if name in wanted]
    names += ["torch"] if "torch" in wanted else []
    failed = names and (ask(str(python), IMPORTS, ",".join(names)) or {"failed": {"Python": "?"}})
    if failed and failed["failed"]:
        said = "; ".join(f"{name}: {why}" for name, why in failed["failed"].items())
        raise SetupFailed(
            f"pip said that it installed {requirements.name}, but imports fail: {said}\n"
            f"  fix: look at `{python} -m pip config list`, remove {folder.name}, and try again"
        )
    stamp.write_text(digest(requirements, str(python)))
    return str(python)


def missing_modules(python: str, env: dict[str, str]) -> list[str] | None:
    facts = ask(python, FACTS, ",".join(SMALL), timeout_s=30, env=env)
    return None if facts is None else facts["missing"]


def add_small_packages(python: str) -> tuple[Path | None, list[str], str | None]:
    """Put what `python` lacks into .deps/<tag>. Returns (folder, still missing, problem)."""
    facts = ask(python, FACTS, timeout_s=20) or {"version": [0, 0], "prefix": python}
    tag = hashlib.sha256(facts["prefix"].encode()).hexdigest()[:8]
    folder = ROOT / ".deps" / f"cp{''.join(map(str, facts['version']))}-{tag}"
    env = {**os.environ, "PYTHONPATH": joined(folder)}
    missing = missing_modules(python, env)
    if missing is None:
        return None, [], f"{python} does not answer"
    if not missing:
        return (folder if folder.exists() else None), [], None
    names = {x for module in missing for x in (SMALL[module][0], *SMALL[module][1])}
    if {"pytest", "hypothesis"} & set(missing) and tuple(facts["version"]) == (3, 10):
        names |= set(SMALL_310)
    wanted = sorted(names)
    say(f"== adding to .deps (torch is left alone): {', '.join(wanted)}")
    folder.mkdir(parents=True, exist_ok=True)
    how = "install --quiet --no-deps --upgrade --timeout 15 --retries 1 --target".split()
    problem = pip(python, *how, str(folder), *wanted, timeout_s=300)
    still = missing_modules(python, env) or []
    if still:
        problem = f"not installed: {', '.join(still)} ({problem or 'pip said it did'})"
        say(f"WARN  {problem}; going on with what is there")
        return folder, still, problem
    return folder, [], None


def joined(folder: Path | None) -> str:
    parts = [str(folder)] if folder else []
    return os.pathsep.join(parts + [p for p in [os.environ.get("PYTHONPATH")] if p])
