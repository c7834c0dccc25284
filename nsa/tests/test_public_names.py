"""Are the public names there for Python, type checkers and the wheel, and do their examples run?"""

from __future__ import annotations

import ast
import doctest
import importlib
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
    assert seen == nsa._WHERE


def test_every_name_loads():
    for name in nsa.__all__:
        assert getattr(nsa, name) is not None
    for name, module in nsa._WHERE.items():
        assert getattr(importlib.import_module(module), name) is getattr(nsa, name)


EXAMPLES = ("attention", "cache", "layouts", "model", "module", "parallel")


@pytest.mark.parametrize("name", [*EXAMPLES, "integrations.transformers"])
def test_examples_in_docstrings_run(name):
    if name == "integrations.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    failed, attempted = doctest.testmod(importlib.import_module(f"nsa.{name}"))
    assert attempted and not failed


def test_the_wheel_has_the_library_and_no_corpus(monkeypatch):
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")
    monkeypatch.chdir(Path(nsa.__file__).parents[1])
    whole = setuptools.Distribution({"script_name": "setup.py"})
    whole.parse_config_files(["pyproject.toml"])
    command = whole.get_command_obj("build_py")
    command.ensure_finalized()
    files = {path.partition("lib/")[2] for path in command.get_outputs()}
    assert {"nsa/py.typed", "nsa/attention.py", "nsa/integrations/transformers.py"} <= files
    assert not [name for name in files if name.startswith(("nsa/tests", "nsa/data"))]
    assert all(name.endswith((".py", "py.typed")) for name in files)
