"""Are the public names there for Python and for type checkers alike?"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

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
