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
DEVICE = dict(name="NVIDIA H200", driver="580.95", power_limit_w=700, power_default_w=700,
              shared=False, pcie="gen5 x16", mig=False)  # fmt: skip
GIT = {"short": "abc1234", "dirty": False, "source": "git"}
OF_DEVICE, OF_GIT = {*DEVICE, "reason", "hardware", "count"}, {*GIT, "problem"}


def examine(tmp_path, gpu=True, **changes):
    """The checks of a good box with these changes: of the device, of git, of torch, or variables
    of the environment, in capitals."""
    device, git, torch, environ = DEVICE.copy(), GIT.copy(), TORCH.copy(), {}
    for name, value in changes.items():
        of = device if name in OF_DEVICE else git if name in OF_GIT else torch
        (environ if name.isupper() else of)[name] = value
    found = doctor.examine(doctor.Box(gpu, tmp_path, device, torch, git, environ))
    return {check.name: check for check in found}


def test_a_good_box_is_not_blocked_and_code_that_runs_before_ours_is_told(tmp_path):
    assert not [c for c in examine(tmp_path).values() if c.level == "BLOCK"]
    quiet = examine(tmp_path, startup=[], PYTHONPATH="/x/.deps/cp311")
    assert "startup" not in quiet and "startup" not in examine(tmp_path)
    code = dict(startup=["/a/sitecustomize.py"], PYTHONPATH="/p", PYTHONSTARTUP="/s")
    check = examine(tmp_path, **code)["startup"]
    said = "PYTHONPATH has /p; PYTHONSTARTUP is set; /a/sitecustomize.py runs"
    assert check.level == "WARN" and check.text.partition(": ")[2] == said


def test_sources_of_unknown_state_are_not_called_clean(tmp_path):
    check = examine(tmp_path, dirty=None, problem="git ended with 128: index file")["git"]
    assert check.level == "WARN" and "unknown whether clean: git ended with 128" in check.text


def test_the_guide_quotes_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    said = doctor.lines([examine(tmp_path)["flash-attn"]])
    guide = (doctor.ROOT / "docs" / "FA2-Install-Guide.md").read_text()
    assert "```\n" + "\n".join(said) + "\n```\n" in guide
    fix = examine(tmp_path, torch="2.8.0+cu128", cuda_build="12.8")["flash-attn"].fix
    wheel = "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp311-cp311-linux_x86_64.whl"
    assert wheel in fix and wheel in guide


SILENT = dict(driver=None, name=None, reason="nvidia-smi did not answer", hardware="PCI")
BOXES = [
    # What is different; a check, its level, words of its text and, after "->", of its fix.
    ({}, "gpu OK NVIDIA H200"), ({}, "torch OK 2.11.0+cu130"), (dict(mig=True), "mig WARN slice"),
    ({}, "flash-attn WARN not installed"),
    (dict(triton="3.6.0+git5b1", triton_pin="pytorch-triton==3.6.0+git5b1"), "triton OK +git5b1"),
    (dict(cuda_driver="13.2"), "cuda OK 13.2"), (dict(gpu=False), "gpu OK cpu profile was chosen"),
    (dict(torch_error="ImportError: no torch"), "torch BLOCK no torch"),
    (dict(cuda_build=None), "torch BLOCK without CUDA"), (dict(hip="6.0"), "torch BLOCK ROCm"),
    (dict(cuda_works=None, cuda_error="driver on your system is too old"), "torch BLOCK too old"),
    (dict(CUDA_VISIBLE_DEVICES="", cuda_build=None), "torch BLOCK hides every GPU -> unset it"),
    (dict(CUDA_VISIBLE_DEVICES="0"), "torch OK 2.11.0+cu130"),
    (dict(triton=None), "triton BLOCK not installed"),
    (dict(triton="3.2.0"), "triton WARN torch names triton==3.6.0"),
    (dict(torch="2.4.0+cu121"), "torch WARN older than 2.10"),
    (dict(torch="2.4.0", gpu=False), "torch WARN older than 2.10"),
    (dict(torch="2.16.0", triton="2.1.0", triton_pin=None), "triton WARN older than 3.6"),
    # A CPU wheel names none: the table speaks for it.
    (dict(torch="2.13.0+cpu", triton_pin=None), "triton WARN torch names triton==3.7.1"),
    (dict(triton_pin="triton>=3.7; python_version > '3'"), "triton WARN torch names triton>=3.7"),
    (dict(triton="of unknown version"), "triton WARN unknown version"),
    (dict(gpu=False, name=None), "gpu WARN no NVIDIA hardware is visible"),
    (dict(cuda_driver="12.8", cuda_works=None), "cuda BLOCK CUDA 12.8 only"),
    (dict(cuda_driver="12.8"), "cuda WARN CUDA 12.8 only"),  # cuda-compat
    (dict(NSA_QQQQQQQQQQQQ="1"), "flags WARN unknown: NSA_QQQQQQQQQQQQ"),
    (dict(NSA_USE_FA="1"), "flags BLOCK NSA_USE_FA2"), (dict(dirty=True), "git WARN changes"),
    (dict(NSA_USE_FA2="perhaps"), "flags BLOCK NSA_USE_FA2"),
    (dict(python="3.9.1"), "python BLOCK 3.9.1"), (dict(python_h=False), "compiler WARN Python.h"),
    (dict(device={"sm": "7.5"}), "arch BLOCK 7.5"),
    (dict(device={"sm": "11.0"}), "arch BLOCK sm_110"),
    # An older card does not run what is built for a newer one.
    (dict(device={"sm": "8.0"}, arch_list=["sm_86", "sm_90"]), "arch BLOCK sm_80"),
    (dict(packages={}), "packages BLOCK pytest"), (dict(shared=True), "quiet WARN in use"),
    (dict(flash_attn="broken: undefined symbol"), "flash-attn WARN undefined symbol"),
    (dict(power_limit_w=300), "power WARN 300 W of 700 W"),
    (dict(pcie="gen4 x4 (max x16)"), "pcie WARN x4"),
    (dict(source="hash of the sources", problem="no git"), "git WARN no git"),
    # A restart helps a driver that does not answer, and no box without a card.
    (SILENT, "driver BLOCK did not answer -> restart the box"),
    ({**SILENT, "reason": "none visible", "hardware": None}, "driver BLOCK none -> --gpus all"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), BOXES)
def test_what_is_said_of_a_box(tmp_path, changes, says):
    said, _, fix = says.partition("-> ")
    name, level, words = said.strip().split(" ", 2)
    check = examine(tmp_path, **changes)[name]
    assert check.level == level and words in check.text
    assert check.fix or level == "OK"
    assert not fix or fix in check.fix and ("restart" in fix) == ("restart" in check.fix)


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
    torch, triton = ([cell.strip() for cell in line.strip("| \n").split("|")]
                     for line in lines if line.startswith(("| torch |", "| triton |")))  # fmt: skip
    pairs = {".".join(release.split(".")[:2]): named
             for column, named in zip(torch[1:], triton[1:], strict=True)
             for release in column.split(", ")}  # fmt: skip
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

    there = SimpleNamespace(cuDriverGetVersion=answer)
    monkeypatch.setattr(probe_torch.ctypes, "CDLL", {"libcuda.so.1": there}.__getitem__)
    assert probe_torch._cuda_driver() == "12.8"

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(probe_torch.ctypes, "CDLL", absent)
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
    found = examine(tmp_path, count=8)
    assert found["shm"].level == "WARN" and "64 MiB" in found["shm"].text
    assert found["space"].level == "BLOCK"
    assert "shm" not in examine(tmp_path, count=2)
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
    row = ("GPU-1, NVIDIA GeForce RTX 4090, 570.86, 24564, 12, 0, 8.9, 300.00, 450.00, 4, 4, 4, "
           "16, [N/A], [N/A], 41, Enabled, 3105, 10501, 00000000:41:00.0")  # fmt: skip
    fake = Path(fake_python(tmp_path / "nvidia-smi", f"echo '{row}'\n"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    device = box.device_facts(box.smi_query(), {})
    assert device["name"] == "NVIDIA GeForce RTX 4090" and device["sm"] == "8.9"
    assert device["pcie"] == "gen4 x4 (max x16)" and device["power_limit_w"] == 300.0
    assert "uuid" not in device
    for body, says in (("echo 'No devices were found'; exit 6", "ended with 6: No devices"),
                       ("sleep 30", "did not answer")):  # fmt: skip
        fake_python(fake, body)
        with pytest.raises(box.ProbeFailed, match=says):
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
    *((False, "environ", BOX["environ"] | {name: value}) for name, value in (
        ("CUDA_MODULE_LOADING", "EAGER"), ("TRITON_INTERPRET", "1"), ("PYTHONPATH", "/x"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("NSA_LOG_LIMIT", os.fsdecode(b"\xff")),  # it takes any bytes
    )),
    (True, "gpus", [{**GPU, "pcie_gen": 1, "temp_c": 60}]),  # of an idle card
    (True, "environ", BOX["environ"] | dict.fromkeys(
        ("TRITON_CACHE_DIR", "CUDA_API_KEY", "VIRTUAL_ENV", "NSA_COMMIT", "OTHER"), "/x")),
])  # fmt: skip
def test_fingerprint_is_of_this_box_and_no_other(same, name, change):
    assert (box.fingerprint(**BOX) == box.fingerprint(**BOX | {name: change})) is same


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two interpreters on PATH: the second one's torch sees the GPU."""
    answers = {f"/{name}/python3": {"works": name == "b", "torch": "2.11.0"} for name in "ab"}

    def ask(python, code, *args, **kwargs):
        facts = dict(version=[3, 11], prefix=python, executable=python, has_torch=True, missing=[])
        return answers[python] if code is setup_env.CUDA else facts

    monkeypatch.delenv("PYTHON", raising=False)
    for module in (setup_env, pythons):
        monkeypatch.setattr(module, "ROOT", tmp_path)
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


@pytest.mark.parametrize("given, seen", [
    ("", None), (" ", None), ("-1", None), ("0", "PCI"), ("GPU-1a2b", "PCI"), ("MIG-1", "PCI"),
])  # fmt: skip
def test_nothing_is_installed_for_a_card_that_is_hidden(given, seen, monkeypatch):
    monkeypatch.setattr(box, "nvidia_hardware", lambda: "PCI")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert setup_env.nvidia_hardware() == seen


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


def wheel(folder, name, module):
    """A wheel of one empty module, for pip without a network."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as packed:
        for file, text in files.items():
            packed.writestr(file, text)
    return f"{name} @ {path.as_uri()}\n"


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
    requirements.write_text(wheel(tmp_path, "broken", "other"))
    with pytest.raises(pythons.SetupFailed, match="imports fail: broken: ModuleNotFoundError"):
        pythons.make_venv(venv, requirements)
    assert not (venv / pythons.STAMP).exists()
    requirements.write_text(wheel(tmp_path, "good", "good"))
    pythons.make_venv(venv, requirements)
    assert (venv / pythons.STAMP).exists() and not (tmp_path / "astray").exists()


def test_torch_is_unpacked_beside_the_rest(monkeypatch, tmp_path):
    """And what could not be installed so is tried once more, and told."""
    asked, triton = [], 'triton==3.7.1; platform_system == "Linux"'
    requirements = tmp_path / "r.txt"
    requirements.write_text(f"# torch==1\ntorch==2.13.0\n\n{triton}\nnumpy>=1\n")
    fails = lambda _, *argv, silent=False: asked.append((silent, *argv[-2:])) or "no network"
    monkeypatch.setattr(pythons, "pip", fails)
    assert pythons.install("/e/python", requirements) == "no network"
    beside = [(True, "--no-deps", "torch==2.13.0"), (True, triton, "numpy>=1")]
    assert sorted(asked[:2]) == beside and asked[2:] == [(False, "-r", str(requirements))]


def test_an_environment_with_no_pip_at_all_gets_that_of_the_starter(monkeypatch):
    """As Debian's without python3-venv."""
    own = lambda python, *_, **__: {"argv": ["-m", "pip"] if python == sys.executable else None}
    ran, names = [], ("PIP_USER", "PIP_TARGET", "PIP_INDEX_URL")

    def run(argv, env, **_):
        ran.append((argv, *map(env.get, names)))
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(pythons, "ask", own)
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
    assert pythons.ask(sys.executable, "print('[1]')") is None


@pytest.fixture
def became(monkeypatch, tmp_path):
    """What setup_env became: (interpreter, arguments, PYTHONPATH)."""
    calls = []
    become = lambda path, argv, env: calls.append((path, argv[1:], env.get("PYTHONPATH", "")))
    for module in (setup_env, pythons):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env.os, "chdir", lambda _: None)
    monkeypatch.setattr(setup_env.os, "execve", become)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return calls


def test_exec_runs_the_choice_with_its_small_packages(became, monkeypatch, tmp_path, capsys):
    deps = tmp_path / ".deps" / "cp311-0"
    choice = {"python": "/b/python3", "why": "", "pythonpath": str(deps)}
    monkeypatch.setattr(setup_env, "choose", lambda: choice)
    setup_env.main(["--exec", "-m", "pytest", "-k", "x"])
    assert became == [("/b/python3", ["-m", "pytest", "-k", "x"], str(deps))]
    for argv in (["--exec"], ["--choose", "--exec"]):
        with pytest.raises(SystemExit):
            setup_env.main(argv)


def test_what_python_runs_has_its_assertions_and_finds_the_sources(became, monkeypatch):
    for name in setup_env.UNWANTED:
        monkeypatch.setenv(name, "1")
    given = {}
    monkeypatch.setattr(setup_env.os, "execve", lambda path, argv, env: given.update(env))
    setup_env.main(["--run", "--dry-run"])
    assert given and not given.keys() & {"PYTHONSAFEPATH", "PYTHONOPTIMIZE"}


@pytest.mark.parametrize("option", ["--dry-run", "--help"])
def test_a_dry_run_installs_nothing(became, machine, monkeypatch, option):
    for module, name in ((pythons, "make_venv"), (pythons, "pip"), (setup_env, "choose")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something is being installed"))
    setup_env.main(["--run", "out", option])
    ((_, argv, path),) = became
    assert argv == ["-m", "scripts.oneshot", "run", "out", option] and path == ""


# ---- home and cards ------------------------------------------------------------------------------


def test_kernels_are_kept_where_a_user_without_a_home_can_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    own = str(tmp_path / ".triton")
    for environ, home, said in (
        ({"HOME": "/"}, None, own),
        ({}, "~", own), ({}, str(tmp_path / "file" / "x"), own),  # no passwd entry, or a file
        ({}, str(tmp_path), None),
    ):  # fmt: skip
        monkeypatch.setattr(os, "environ", environ)
        if home:
            monkeypatch.setattr(os.path, "expanduser", lambda _, home=home: home)
        box.settle_triton_cache(tmp_path)
        assert os.environ.get("TRITON_CACHE_DIR") == said
        assert str(box.triton_cache()) == (said or f"{own}/cache")
    assert os.environ == {} and (tmp_path / ".triton" / "cache").is_dir()


CARDS = [{"uuid": f"GPU-{n}", "name": f"card {n}", "driver": "580.1", "mem_mib": 80000,
          "power_limit_w": 700, "sm": "9.0"} for n in (11111111, 22222222)]  # fmt: skip
LISTED = """GPU 0: card (UUID: GPU-11111111)
  MIG 1g.10gb Device 0: (UUID: MIG-aaaa)
GPU 1: card (UUID: GPU-22222222)
  MIG 1g.10gb Device 0: (UUID: MIG-bbbb)
"""


@pytest.mark.parametrize(("visible", "uuid", "memory", "mig", "sm"), [
    ("", "GPU-11111111", 80000, False, "9.0"), ("1", "GPU-22222222", 80000, False, "9.0"),
    ("GPU-2222", "GPU-22222222", 80000, False, "9.0"), ("MIG-bbbb", "MIG-bbbb", None, True, "9.0"),
    ("MIG-GPU-22222222/1/0", "MIG-GPU-22222222/1/0", None, True, "9.0"),
    ("MIG-cccc", "MIG-cccc", None, True, None), ("GPU-3333", "GPU-3333", None, False, None),
])  # fmt: skip
def test_a_slice_is_not_its_card(monkeypatch, visible, uuid, memory, mig, sm):
    monkeypatch.setattr(box, "command", lambda *_, **__: LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert box.visible_gpu(CARDS, os.environ)["uuid"] == uuid
    device = box.device_facts(CARDS, {})
    assert (device["mem_mib"], device["mig"], device["sm"]) == (memory, mig, sm)
    assert device["driver"] == "580.1" and (device["power_limit_w"] is None) == (memory is None)
    json.dumps(device)
