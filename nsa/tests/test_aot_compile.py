"""Every kernel configuration compiles, fits and does not spill on every supported architecture.

No GPU is needed: Triton compiles to a cubin for the named architecture.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil

import pytest

from nsa import dispatch, kernels
from nsa.kernels.aot import ARCHS, SHARED_LIMIT, AotCase, Resources, content, unrounded_sums
from scripts import lock as locks

pytestmark = [
    pytest.mark.skipif(
        dispatch.interpreting(), reason="TRITON_INTERPRET=1 replaces the compiler"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


# `make lock` compiles for all: whether it did, one architecture of each way to fit kernels tells.
SOME = [a if a in locks.CALLS_OF else pytest.param(a, marks=pytest.mark.nightly) for a in ARCHS]


@pytest.mark.parametrize("arch", SOME)
def test_configurations_compile_and_fit(arch):
    """Those that the lock knows have done so; TEST_ALL=1 asks for every one to be compiled."""
    from nsa.kernels.decode.step import TEAM_PER_SM

    lock = locks.read()["kernels"]
    found, bad = locks.compiled_apart(arch)
    for name, (_, ptx, *used) in found.items():
        used = Resources(*used)
        if lock and lock.get(name, [0, 0])[1] != ptx:
            bad.append(f"{name}: other PTX than the lock's; `make lock`, and say so")
        assert used.registers > 0
        # All programs of a team run at a time, so many on a multiprocessor.
        if "_team_kernel" in name and used.shared * TEAM_PER_SM > SHARED_LIMIT[arch]:
            bad.append(f"{name}: {used.shared} B of shared memory for each of {TEAM_PER_SM}")
    known = {n for n in lock if n.startswith(f"sm_{arch} ")}
    bad += [f"{name}: no call launches it; `make lock`" for name in known - found.keys()]
    assert found and not bad, f"{len(bad)} on sm_{arch}:\n" + "\n".join(bad)


def test_every_kernel_is_in_the_lock():
    lock = locks.read()["kernels"]
    if not lock:
        pytest.skip("the lock is of another release of Triton")
    names = set()
    for found in pkgutil.walk_packages(kernels.__path__, "nsa.kernels."):
        module = importlib.import_module(found.name)
        names |= {n for n, x in vars(module).items() if n.endswith("_kernel") and hasattr(x, "src")}
    assert len(names) > 60
    assert names == {n.removeprefix("sm_90 ").partition("-")[0] for n in lock if "sm_90 " in n}


# Code that says the same is the same content, what it calls or reads is part of it.
HELPER = """
import triton, triton.language as tl
from nsa.tests import test_aot_compile as here
WIDTH = tl.constexpr({width})

@triton.jit
def add(x, y):
    {comment}
    return x {sign} y

@triton.jit
def kernel(X, n, D: tl.constexpr):
    tl.store(X + n, add(D, WIDTH))
"""


def test_content_is_code_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.fspath(tmp_path))

    def made(name, width=4, sign="+", comment="# none", D=2, arch=90):
        package = tmp_path / name / "nsa_case.py"
        package.parent.mkdir()
        text = HELPER.format(width=width, sign=sign, comment=comment)
        package.write_text("\n" * len(name) + text)
        spec = importlib.util.spec_from_file_location("nsa.case", package)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        case = AotCase(module.kernel, {"X": "*i32", "n": "i32"}, {"D": D})
        return content(case, arch)

    first = made("a")
    assert made("bb") == first and made("ccc", comment='"""Other words."""') == first
    others = [made("d", width=8), made("e", sign="-"), made("f", D=3), made("g", arch=80)]
    assert len({first, *others}) == 5


def test_problems_name_what_does_not_fit():
    assert Resources(SHARED_LIMIT[86], 255, 0).problems(86) == []
    assert "shared memory" in Resources(SHARED_LIMIT[86] + 1, 10, 0).problems(86)[0]
    assert Resources(SHARED_LIMIT[86] + 1, 10, 0).problems(90) == []
    assert "spilled" in Resources(0, 255, 64).problems(90)[0]
    assert "threads differ" in Resources(0, 255, 0, unrounded=1).problems(90)[0]


def test_an_unrounded_sum_is_seen():
    product, other = "mul.f32 \t%r3, %r1, %r2;", "shfl.sync.bfly.b32 \t%r4, %r3, 1, 31, -1;"
    assert unrounded_sums(f"{product}\n\t{other}\n\tfma.rn.f32 \t%r5, %r1, %r2, %r4;")
    assert not unrounded_sums(f"{product}\n\t{other}\n\tadd.f32 \t%r5, %r3, %r4;")
