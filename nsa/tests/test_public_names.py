"""Are the public names there for Python, type checkers and the wheel, and do their examples run?"""

import ast
import doctest
import functools
import graphlib
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import nsa


def test_type_checkers_see_what_loads_on_first_use():
    tree = ast.parse(Path(nsa.__file__).read_text())
    block = next(
        node for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    )  # fmt: skip
    seen = {}
    for line in block.body:
        for alias in line.names:
            assert alias.asname == alias.name, "only `import X as X` is a public name of the module"
            seen[alias.name] = line.module
    functions = {name: f"nsa{module}" for name, module in nsa._WHERE.items()}
    assert seen == functions | dict.fromkeys(nsa._MODULES, "nsa")


def test_mypy_reads_one_file_of_the_tests():
    text = (Path(nsa.__file__).parents[1] / "pyproject.toml").read_text()
    excluded = ast.literal_eval(re.search(r"\[tool.mypy\]\n.*\nexclude = (.*)", text)[1])
    left_out = lambda name: any(re.search(one, f"nsa/tests/{name}") for one in excluded)
    assert [left_out(x) for x in ("", "typed_calls.py", "cases.py")] == [False, False, True]


def test_every_name_loads():
    for name in nsa.__all__:
        assert getattr(nsa, name) is not None
    for name, module in nsa._WHERE.items():
        assert getattr(importlib.import_module(module, "nsa"), name) is getattr(nsa, name)


def imported(path: Path) -> set[str]:
    """What a file names in its imports, those inside functions included, those for types alone
    not."""
    found = set()
    nodes = [ast.parse(path.read_text())]
    for node in nodes:
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def from_any(path: Path, *packages: str) -> list[str]:
    """What a file imports from one of these."""
    return [name for name in imported(path) if name.startswith(packages)]


RUNNER = ("record", "box", "report", "compare", "run")  # each imports itself and those before it


def test_imports_go_one_way():
    """docs/design.md, "Who imports whom"."""
    root = Path(nsa.__file__).parent
    packages = {p.parent.name for p in (root / "kernels").glob("*/__init__.py")}
    above = "nsa.attention", "nsa.dispatch", "nsa.reference", "nsa.rungs"
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] == "tests":
            continue
        assert not from_any(path, "bench", "scripts", "nsa.tests"), path
        if parts == ("oracle.py",):
            assert {n.split(".")[0] for n in imported(path)} <= {"torch", "__future__", "math"}
        else:
            assert not from_any(path, "nsa.oracle"), path
        if parts[0] == "kernels" and len(parts) > 2:
            others = [f"nsa.kernels.{p}" for p in packages - {parts[1]}]
            wrapper = parts[1:] == ("triton_sel_kernel", "__init__.py")
            assert not from_any(path, *others, *(() if wrapper else above)), path
    runner = root.parent / "scripts" / "oneshot"
    assert {p.parent.name for p in runner.glob("*/__init__.py")} == set(RUNNER)
    for path in runner.glob("*/*.py"):
        later = RUNNER[RUNNER.index(path.parent.name) + 1 :]
        assert not from_any(path, *(f"scripts.oneshot.{folder}" for folder in later)), path


@pytest.mark.parametrize("package", ["nsa", "bench", "scripts"])
def test_imports_have_no_circle(package):
    root = Path(nsa.__file__).parents[1]
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
        if "tests" not in path.parts
    }
    graph = {}
    for module, path in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        graph[module] = names & modules.keys() - {module}
    assert sum(map(len, graph.values())) > len(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


EXAMPLES = ("attention", "cache", "kvcache", "layouts", "model", "module", "parallel")


@pytest.mark.parametrize("name", [*EXAMPLES, "integrations.transformers"])
def test_examples_in_docstrings_run(name):
    if name == "integrations.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    failed, attempted = doctest.testmod(importlib.import_module(f"nsa.{name}"))
    assert attempted and not failed


IN_THE_WHEEL = """
import sys
sys.path.insert(0, sys.argv[1])
from nsa import Flags, flags
assert flags.__file__.startswith(sys.argv[1]), flags.__file__
print(Flags.from_env({}, device_name="NVIDIA H200").sel_triton_min_L)
"""


def test_the_wheel_has_the_library_and_its_thresholds_and_no_corpus(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 builds the wheel")
    root, source = Path(nsa.__file__).parents[1], tmp_path / "source"
    kept = shutil.ignore_patterns("__pycache__", "locks", "goldens")
    for name in ("nsa", "configs"):
        shutil.copytree(root / name, source / name, symlinks=True, ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=source)
    done = run([sys.executable, "-c", build])
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        files = {name for name in wheel.namelist() if not name.startswith("nsa-")}
        about = wheel.read(f"nsa-{nsa.__version__}.dist-info/METADATA").decode()
        wheel.extractall(tmp_path / "site")
    assert {"nsa/py.typed", "nsa/attention.py", "nsa/integrations/transformers.py"} <= files
    assert {"nsa/kernels/decode/cluster.cu", "nsa/base.yaml"} <= files
    assert not [name for name in files if name.startswith(("nsa/tests", "nsa/data"))]
    assert all(name.endswith((".py", "py.typed", ".cu", ".yaml")) for name in files)
    assert "Classifier: Typing :: Typed" in about and "Requires-Dist: torch" in about
    done = run([sys.executable, "-c", IN_THE_WHEEL, str(tmp_path / "site")])
    assert done.stdout == "16\n", done.stderr  # configs/base.yaml's entry of this card


def test_public_modules_need_no_import_of_their_own():
    code = "import nsa; print(nsa.layouts.clean.__name__, nsa.parallel, nsa.compress)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("clean <module 'nsa.parallel'")
