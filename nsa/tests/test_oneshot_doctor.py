"""Does the doctor see what is wrong with a box, and does every finding carry a fix?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import pythons, setup_env
from scripts.oneshot.box import doctor, probe_torch
from scripts.oneshot.box import env as box

TORCH = {
    "python": "3.11.9", "torch": "2.11.0+cu130", "cuda_build": "13.0", "hip": None,
    "cuda_available": True, "cuda_works": True, "triton": "3.6.0", "cxx11abi": True,
    "triton_pin": 'triton==3.6.0; platform_system == "Linux"', "python_h": True,
    "arch_list": ["sm_80", "sm_90", "sm_100", "sm_120"], "flash_attn": "not installed",
    "device": {"name": "NVIDIA H200", "sm": "9.0", "count": 1},
    "packages": {n: "1" for n in ("jinja2", "pytest", "numpy", "pyyaml", "matplotlib",
                                  "nvidia-ml-py")},
}  # fmt: skip
DEVICE = {"name": "NVIDIA H200", "driver": "580.95", "power_limit_w": 700, "power_default_w": 700,
          "shared": False, "pcie": "gen5 x16", "mig": False}  # fmt: skip
GIT = {"short": "abc1234", "dirty": False, "source": "git"}


def examine(tmp_path, torch=None, device=None, git=None, environ=None, gpu=True):
    facts = (DEVICE | (device or {}), TORCH | (torch or {}), GIT | (git or {}))
    return {c.name: c for c in doctor.examine(doctor.Box(gpu, tmp_path, *facts, environ or {}))}


def test_a_good_box_is_not_blocked_and_code_that_runs_before_ours_is_told(tmp_path):
    assert not [c for c in examine(tmp_path).values() if c.level == "BLOCK"]
    quiet = examine(tmp_path, {"startup": []}, environ={"PYTHONPATH": "/x/.deps/cp311"})
    assert "startup" not in quiet and "startup" not in examine(tmp_path, environ={})
    environ = {"PYTHONPATH": "/p", "PYTHONSTARTUP": "/s"}
    check = examine(tmp_path, {"startup": ["/a/sitecustomize.py"]}, environ=environ)["startup"]
    said = "PYTHONPATH has /p; PYTHONSTARTUP is set; /a/sitecustomize.py runs"
    assert check.level == "WARN" and check.text.partition(": ")[2] == said


def test_the_guide_quotes_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    said = doctor.lines([examine(tmp_path)["flash-attn"]])
    guide = (doctor.ROOT / "docs" / "FA2-Install-Guide.md").read_text()
    assert "```\n" + "\n".join(said) + "\n```\n" in guide
    sick = {"torch": "2.8.0+cu128", "cuda_build": "12.8"}
    fix = examine(tmp_path, torch=sick)["flash-attn"].fix
    wheel = "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
    assert wheel in fix and wheel in guide


NO_GPU = {"driver": None, "name": None, "reason": "no NVIDIA hardware", "hardware": None}
BOXES = [
    # (what is different, check, level, words)
    ({}, "gpu", "OK", "NVIDIA H200"), ({}, "torch", "OK", "2.11.0+cu130"),
    ({"torch": {"triton": "3.6.0+git5b1", "triton_pin": "pytorch-triton==3.6.0+git5b1"}},
     "triton", "OK", "3.6.0+git5b1"),
    ({"torch": {"cuda_driver": "13.2"}}, "cuda", "OK", "13.2"),
    ({"gpu": False}, "gpu", "OK", "cpu profile was chosen"),
    ({}, "flash-attn", "WARN", "not installed"),
    ({"torch": {"torch_error": "ImportError: no torch"}}, "torch", "BLOCK", "no torch"),
    ({"torch": {"cuda_build": None}}, "torch", "BLOCK", "without CUDA"),
    ({"torch": {"hip": "6.0"}}, "torch", "BLOCK", "ROCm"),
    ({"torch": {"cuda_works": None, "cuda_error": "driver on your system is too old"}},
     "torch", "BLOCK", "too old"),
    ({"torch": {"triton": None}}, "triton", "BLOCK", "not installed"),
    ({"torch": {"triton": "3.2.0"}}, "triton", "WARN", "torch names triton==3.6.0"),
    ({"torch": {"torch": "2.4.0+cu121"}}, "torch", "WARN", "older than 2.10"),
    ({"torch": {"torch": "2.4.0"}, "gpu": False}, "torch", "WARN", "older than 2.10"),
    ({"torch": {"torch": "2.16.0", "triton": "2.1.0", "triton_pin": None}}, "triton", "WARN",
     "older than 3.6"),
    # A CPU wheel names none: the table speaks for it.
    ({"torch": {"torch": "2.13.0+cpu", "triton": "3.6.0", "triton_pin": None}}, "triton", "WARN",
     "torch names triton==3.7.1"),
    ({"torch": {"triton": "3.6.0", "triton_pin": "triton>=3.7; python_version > '3'"}},
     "triton", "WARN", "torch names triton>=3.7"),
    ({"torch": {"triton": "of unknown version"}}, "triton", "WARN", "unknown version"),
    ({"gpu": False, "device": {"name": None}}, "gpu", "WARN", "no NVIDIA hardware is visible"),
    ({"torch": {"cuda_driver": "12.8", "cuda_works": None}}, "cuda", "BLOCK", "CUDA 12.8 only"),
    ({"torch": {"cuda_driver": "12.8"}}, "cuda", "WARN", "CUDA 12.8 only"),  # cuda-compat
    ({"environ": {"NSA_QQQQQQQQQQQQ": "1"}}, "flags", "WARN", "unknown: NSA_QQQQQQQQQQQQ"),
    ({"torch": {"python": "3.9.1"}}, "python", "BLOCK", "3.9.1"),
    ({"torch": {"device": {"sm": "7.5"}}}, "arch", "BLOCK", "7.5"),
    ({"torch": {"device": {"sm": "11.0"}}}, "arch", "BLOCK", "sm_110"),
    ({"torch": {"device": {"sm": "8.0"}, "arch_list": ["sm_86", "sm_90"]}}, "arch", "BLOCK",
     "sm_80"),  # an older card does not run what is built for a newer one
    ({"torch": {"python_h": False}}, "compiler", "WARN", "Python.h"),
    ({"torch": {"packages": {}}}, "packages", "BLOCK", "pytest"),
    ({"torch": {"flash_attn": "broken: built for another torch (undefined symbol)"}},
     "flash-attn", "WARN", "undefined symbol"),
    ({"device": {"driver": None, "name": None, "reason": "nvidia-smi did not answer"}},
     "driver", "BLOCK", "did not answer"),
    ({"device": {"power_limit_w": 300}}, "power", "WARN", "300 W of 700 W"),
    ({"device": {"shared": True}}, "quiet", "WARN", "in use"),
    ({"device": {"pcie": "gen4 x4 (max x16)"}}, "pcie", "WARN", "x4"),
    ({"device": {"mig": True}}, "mig", "WARN", "slice"),
    ({"git": {"dirty": True}}, "git", "WARN", "changes"),
    ({"git": {"source": "hash of the sources", "problem": "no git"}}, "git", "WARN", "no git"),
    ({"environ": {"NSA_USE_FA": "1"}}, "flags", "BLOCK", "NSA_USE_FA2"),
    ({"environ": {"NSA_USE_FA2": "perhaps"}}, "flags", "BLOCK", "NSA_USE_FA2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "level", "words"), BOXES, ids=[
    f"{s[1]}-{i}" for i, s in enumerate(BOXES)])  # fmt: skip
def test_what_is_said_of_a_box(tmp_path, changes, name, level, words):
    check = examine(tmp_path, **changes)[name]
    assert check.level == level and words in check.text
    assert check.fix or level == "OK"


def test_without_hardware_the_fix_is_to_pass_a_gpu_through(tmp_path):
    """A restart helps a driver that does not answer, and no box without a card."""
    check = examine(tmp_path, device=NO_GPU)["driver"]
    assert check.level == "BLOCK" and "--gpus all" in check.fix and "restart" not in check.fix
    there = {**NO_GPU, "reason": "nvidia-smi did not answer", "hardware": "PCI"}
    assert "restart the box" in examine(tmp_path, device=there)["driver"].fix


def test_a_check_that_fails_itself_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(doctor.CHECKS, "space", lambda b: 1 / 0)
    checks = examine(tmp_path)
    check = checks["doctor"]
    assert check.level == "WARN" and "quiet" in checks  # it hides no other
    assert check.text == "the check of space failed itself: ZeroDivisionError: division by zero"


def test_files_that_python_runs_at_its_start_are_found(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "a.pth").write_text("/no/code\n")
    (packages / "b.pth").write_text("import os\n")
    (packages / "sitecustomize.py").write_text("")
    probe = "from scripts.oneshot.box import probe_torch as p; print(*p._startup(), sep='\\n')"
    done = subprocess.run([venv / "bin" / "python", "-c", probe], capture_output=True, text=True,
                          cwd=Path(__file__).resolve().parents[2])  # fmt: skip
    found = {Path(line).name for line in done.stdout.splitlines() if str(tmp_path) in line}
    assert found == {"b.pth", "sitecustomize.py"}, done.stderr


def test_the_table_of_pairs_is_the_readmes():
    """There a column may hold several releases of torch, and the patch release that is meant."""
    lines = (doctor.ROOT / "README.md").read_text().splitlines()
    named = [line for line in lines if line.startswith(("| torch |", "| triton |"))]
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in named]
    (torch, triton) = rows
    pairs = {
        ".".join(release.split(".")[:2]): named
        for column, named in zip(torch[1:], triton[1:], strict=True)
        for release in column.split(", ")
    }
    assert pairs == doctor.TRITON_OF and len(pairs) == 14
    project = (doctor.ROOT / "pyproject.toml").read_text()
    assert f'"torch>={doctor.LEAST_TORCH},' in project


def test_the_triton_that_is_imported_counts_whatever_it_is_called(monkeypatch):
    names = {"pytorch-triton": "3.6.0+git5b1"}
    monkeypatch.setattr(probe_torch, "_version", names.get)
    monkeypatch.setattr(probe_torch.importlib.util, "find_spec", lambda name: object())
    assert probe_torch._triton() == "3.6.0+git5b1"
    names.clear()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.1"))
    assert probe_torch._triton() == "3.6.1"
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    assert probe_torch._triton() == "of unknown version"
    monkeypatch.setattr(probe_torch.importlib.util, "find_spec", lambda name: None)
    assert probe_torch._triton() is None


def test_the_cuda_of_the_driver(monkeypatch):
    def answer(number):
        number._obj.value = 12080
        return 0

    def library(name):
        if name not in there:
            raise OSError(f"{name}: cannot open shared object file")
        return there[name]

    there = {"libcuda.so.1": SimpleNamespace(cuDriverGetVersion=answer)}
    monkeypatch.setattr(probe_torch.ctypes, "CDLL", library)
    assert probe_torch._cuda_driver() == "12.8"
    there.clear()
    assert probe_torch._cuda_driver() is None


@pytest.mark.parametrize(("quota", "level"), [
    ("150000 100000", "WARN"), ("max 100000", "OK"), ("-1", "OK"), ("100000", "WARN"),
    (None, "OK"),
])  # fmt: skip
def test_few_cores_are_said(tmp_path, monkeypatch, quota, level):
    monkeypatch.setattr(box, "_cgroup", lambda *names: quota if "cpu.max" in names else None)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert examine(tmp_path)["cpus"].level == level


def test_room_that_is_short_is_said(tmp_path, monkeypatch):
    free = {Path("/dev/shm"): 64}
    monkeypatch.setattr(box, "free_mib", lambda path: free.get(path, 3))
    found = examine(tmp_path, device={"count": 8})
    assert found["shm"].level == "WARN" and "64 MiB" in found["shm"].text
    assert found["space"].level == "BLOCK"
    assert "shm" not in examine(tmp_path, device={"count": 2})
    (tmp_path / "file").write_text("x")
    assert examine(tmp_path / "file" / "out")["writable"].level == "BLOCK"


def test_verb():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.oneshot", "doctor", "--json"], cwd=doctor.ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    checks = json.loads(done.stdout)
    blocks = [c for c in checks if c["level"] == "BLOCK"]
    assert done.returncode == (3 if blocks else 0), done.stdout + done.stderr
    assert {"python", "torch", "git", "flags"} <= {c["name"] for c in checks}


def test_smi_is_parsed_and_its_failures_are_words(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    row = ("GPU-1, NVIDIA GeForce RTX 4090, 570.86, 24564, 12, 0, 8.9, 300.00, 450.00, 4, 4, 4, "
           "16, [N/A], [N/A], 41, Enabled, 3105, 10501, 00000000:41:00.0")  # fmt: skip
    fake.write_text(f"#!/bin/sh\necho '{row}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    device = box.device_facts(box.smi_query(), {})
    assert device["name"] == "NVIDIA GeForce RTX 4090" and device["sm"] == "8.9"
    assert device["pcie"] == "gen4 x4 (max x16)" and device["power_limit_w"] == 300.0
    assert "uuid" not in device
    fake.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    with pytest.raises(box.ProbeFailed, match="ended with 6: No devices"):
        box.smi_query()
    fake.write_text("#!/bin/sh\nsleep 30\n")
    with pytest.raises(box.ProbeFailed, match="did not answer"):
        box.smi_query(timeout_s=0.3)
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(box.ProbeFailed, match="not installed"):
        box.smi_query()
    assert box.guarded(lambda: 1 / 0).startswith("<probe failed: ZeroDivisionError")


GPU = {"uuid": "GPU-1", "pci": "0:41:0.0", "mig": "Disabled", "pcie_gen": 5, "temp_c": 41}
BOX = {"device": DEVICE, "torch": TORCH, "environ": {"NSA_USE_FA2": "1"}, "gpus": [GPU], "cpu": "a"}


@pytest.mark.parametrize(("same", "name", "change"), [
    *((False, "gpus", [{**GPU, **other}])
      for other in ({"uuid": "GPU-2"}, {"pci": "0:42:0.0"}, {"mig": "Enabled"})),
    (False, "gpus", [GPU, GPU]), (False, "cpu", "another"), (False, "environ", {}),
    (False, "device", DEVICE | {"power_limit_w": 300}),
    (False, "environ", {"CUDA_MODULE_LOADING": "EAGER"}),
    (False, "environ", {"TRITON_INTERPRET": "1"}), (False, "environ", {"PYTHONPATH": "/x"}),
    (False, "environ", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    (False, "environ", {"NSA_LOG_LIMIT": os.fsdecode(b"\xff")}),  # it takes any bytes
    (True, "gpus", [{**GPU, "pcie_gen": 1, "temp_c": 60}]),  # of an idle card
    (True, "environ", {"TRITON_CACHE_DIR": "/x", "CUDA_API_KEY": "1", "VIRTUAL_ENV": "/x",
                       "NSA_COMMIT": "y", "OTHER": "x"}),
])  # fmt: skip
def test_fingerprint_is_of_this_box_and_no_other(same, name, change):
    kept = {"environ": BOX["environ"] | change} if name == "environ" and change else {name: change}
    assert (box.fingerprint(**BOX) == box.fingerprint(**BOX | kept)) is same


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two interpreters on PATH: the second one's torch sees the GPU."""
    answers = {"/a/python3": {"works": False, "torch": "2.11.0+cpu"},
               "/b/python3": {"works": True, "torch": "2.11.0+cu130"}}  # fmt: skip

    def ask(python, code, *args, **kwargs):
        if code is setup_env.CUDA:
            return answers[python]
        return {"version": [3, 11], "prefix": python, "executable": python, "has_torch": True,
                "missing": []}  # fmt: skip

    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setattr(pythons, "ask", ask)
    monkeypatch.setattr(pythons, "interpreters", lambda: list(answers))
    monkeypatch.setattr(pythons, "make_venv", lambda folder, req: f"{folder.name}/{req.name}")
    return answers


@pytest.mark.parametrize(("hardware", "works", "chosen"), [
    ("a GPU", True, "/b/python3"),  # a torch that sees the GPU is used as it is
    ("a GPU", False, ".venv-gpu/requirements.txt"), (None, True, ".venv/requirements-cpu.txt"),
])  # fmt: skip
def test_the_python_that_is_chosen(machine, monkeypatch, hardware, works, chosen):
    monkeypatch.setattr(setup_env, "nvidia_hardware", lambda: hardware)
    machine["/b/python3"]["works"] = works
    choice = setup_env.choose()
    assert choice["python"] == chosen
    if chosen == "/b/python3":
        assert choice["pythonpath"] == "" and "/a/python3" in choice["problems"][0]


def test_a_given_python_wins_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    assert setup_env.choose(install=False)["python"] == sys.executable
    monkeypatch.setenv("PYTHON", "/no/such/python")
    with pytest.raises(pythons.SetupFailed, match="PYTHON=/no/such/python"):
        setup_env.choose(install=False)


def fake_python(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
    return str(path)


def test_offline_goes_on_and_says_what_is_missing(monkeypatch, tmp_path):
    facts = {"version": [3, 11], "prefix": "p", "missing": ["jinja2", "matplotlib"],
             "argv": ["-m", "pip"]}  # fmt: skip
    calls = tmp_path / "calls"
    answer = f"if [ \"$1\" = -c ]; then echo '{json.dumps(facts)}'; exit; fi\n"
    python = fake_python(tmp_path / "python", f'{answer}echo "$@" >> {calls}; exit 1\n')
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    folder, missing, problem = pythons.add_small_packages(python)
    assert missing == ["jinja2", "matplotlib"] and "pip ended with 1" in problem
    asked = calls.read_text()
    assert "--target" in asked and "--no-deps" in asked and str(folder) in asked
    assert "torch" not in asked.replace(str(tmp_path), "") and "markupsafe" in asked


def test_venv_without_ensurepip_says_what_to_install(monkeypatch, tmp_path):
    python = fake_python(
        tmp_path / "python", "echo 'ensurepip is not available: apt install python3-venv'; exit 1\n"
    )
    monkeypatch.setattr(pythons, "distinct", lambda _: [{"path": python, "version": [3, 11]}])
    (tmp_path / "r.txt").write_text("x\n")
    with pytest.raises(pythons.SetupFailed, match="ensurepip.*\n.*python3-venv"):
        pythons.make_venv(tmp_path / "venv", tmp_path / "r.txt")
    assert not (tmp_path / "venv").exists()


def wheel(folder, name, **files):
    """A wheel of one module, or of the `files` that are given, for pip without a network."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = files or {f"{name}.py": "x = 1\n"}
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as packed:
        for file, text in files.items():
            packed.writestr(file, text)
        packed.writestr(f"{info}/RECORD", "".join(f"{f},,\n" for f in (*files, f"{info}/RECORD")))
    return path


def test_an_environment_is_made_anew_only_where_its_stamp_is_another(monkeypatch, tmp_path):
    """It has no pip, and its user has settings of his own. The stamp says that what was asked for
    can be imported."""
    venv, requirements = tmp_path / "venv", tmp_path / "r.txt"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    requirements.write_text("# nothing\n")
    (venv / pythons.STAMP).write_text(pythons.digest(requirements, str(venv / "bin/python")))
    with monkeypatch.context() as patch:
        patch.setattr(pythons, "pip", lambda *_: "it would install")
        assert pythons.make_venv(venv, requirements) == str(venv / "bin" / "python")
        requirements.write_text("something-new\n")
        with pytest.raises(pythons.SetupFailed, match="could not install r.txt"):
            pythons.make_venv(venv, requirements)
    (venv / pythons.STAMP).unlink()
    for name, value in {"PIP_USER": "1", "PIP_TARGET": str(tmp_path / "astray"),
                        "PIP_REQUIRE_VIRTUALENV": "1", "PIP_NO_INDEX": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pythons, "SMALL", {"good": ("good", ()), "broken": ("broken", ())})
    requirements.write_text(f"broken @ {wheel(tmp_path, 'broken', **{'other.py': ''}).as_uri()}\n")
    with pytest.raises(pythons.SetupFailed, match="imports fail: broken: ModuleNotFoundError"):
        pythons.make_venv(venv, requirements)
    assert not (venv / pythons.STAMP).exists()
    requirements.write_text(f"good @ {wheel(tmp_path, 'good').as_uri()}\n")
    pythons.make_venv(venv, requirements)
    assert (venv / pythons.STAMP).exists() and not (tmp_path / "astray").exists()


def test_torch_is_unpacked_beside_the_rest(monkeypatch, tmp_path):
    """And what could not be installed so is tried once more, and told."""
    asked: list = []
    (requirements := tmp_path / "r.txt").write_text(
        '# torch==1\ntorch==2.13.0\n\ntriton==3.7.1; platform_system == "Linux"\nnumpy>=1\n'
    )
    monkeypatch.setattr(
        pythons,
        "pip",
        lambda _, *argv, silent=False: asked.append((silent, *argv[-2:])) or "no network",
    )
    assert pythons.install("/e/python", requirements) == "no network"
    triton = 'triton==3.7.1; platform_system == "Linux"'
    assert sorted(asked[:2]) == [
        (True, "--no-deps", "torch==2.13.0"), (True, triton, "numpy>=1")
    ]  # fmt: skip
    assert asked[2:] == [(False, "-r", str(requirements))]


def test_an_environment_with_no_pip_at_all_gets_that_of_the_starter(monkeypatch):
    """As Debian's without python3-venv."""
    monkeypatch.setattr(pythons, "ask", lambda python, *_, **__: {
        "argv": ["-m", "pip"] if python == sys.executable else None
    })  # fmt: skip
    ran = []

    def run(argv, env, **_):
        ran.append((argv, env.get("PIP_USER"), env.get("PIP_TARGET"), env.get("PIP_INDEX_URL")))
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(pythons.subprocess, "run", run)
    monkeypatch.setenv("PIP_TARGET", "/astray")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.com")
    assert pythons.pip("/e/python", "install", "x") is None
    argv = [sys.executable, "-m", "pip", "--python", "/e/python", "install", "x"]
    assert ran == [(argv, "0", None, "https://mirror.example.com")]
    monkeypatch.setattr(pythons, "ask", lambda *_, **__: {"argv": None})
    assert "there is no pip" in pythons.pip("/e/python", "install", "x")


def test_what_an_exit_hook_prints_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'bye')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert pythons.ask(sys.executable, pythons.FACTS)["executable"] == sys.executable


@pytest.fixture
def became(monkeypatch, tmp_path):
    """What setup_env became: (interpreter, arguments, PYTHONPATH)."""
    calls = []
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env.os, "chdir", lambda _: None)
    monkeypatch.setattr(
        setup_env.os, "execve",
        lambda path, argv, env: calls.append((path, argv[1:], env.get("PYTHONPATH", ""))),
    )  # fmt: skip
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return calls


def test_exec_runs_the_choice_with_its_small_packages(became, monkeypatch, tmp_path, capsys):
    deps = tmp_path / ".deps" / "cp311-0"
    monkeypatch.setattr(
        setup_env, "choose", lambda: {"python": "/b/python3", "why": "", "pythonpath": str(deps)}
    )
    setup_env.main(["--exec", "-m", "pytest", "-k", "x"])
    assert became == [("/b/python3", ["-m", "pytest", "-k", "x"], str(deps))]
    for argv in (["--exec"], ["--choose", "--exec"]):
        with pytest.raises(SystemExit):
            setup_env.main(argv)


@pytest.mark.parametrize("option", ["--dry-run", "--help"])
def test_a_dry_run_installs_nothing(became, machine, monkeypatch, option):
    def install(*_):
        raise AssertionError("something is being installed")

    for module, name in ((pythons, "make_venv"), (pythons, "pip"), (setup_env, "choose")):
        monkeypatch.setattr(module, name, install)
    setup_env.main(["--run", "out", option])
    ((_, argv, path),) = became
    assert argv == ["-m", "scripts.oneshot", "run", "out", option] and path == ""
