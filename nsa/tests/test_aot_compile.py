"""Every kernel configuration compiles, fits and does not spill on every supported architecture.

No GPU is needed: Triton compiles to a cubin for the named architecture.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace

import pytest

from nsa import dispatch
from nsa.kernels.aot import (
    ARCHS,
    MODULES,
    SHARED_LIMIT,
    AotCase,
    Resources,
    cases_of,
    compile_case,
    compiled,
    content,
)
from scripts import lock as locks

PARTS = 4  # of a module's cases for one architecture: a slow machine has minutes for each

pytestmark = [
    pytest.mark.skipif(
        dispatch.interpreting(), reason="TRITON_INTERPRET=1 replaces the compiler"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


@pytest.fixture(autouse=True)
def own_cache():
    with locks.fresh_cache():
        yield


def known() -> dict[str, list]:
    """Entries of the lock; none where TEST_ALL asks for every configuration to be compiled."""
    return {} if os.environ.get("TEST_ALL") else locks.read()["kernels"]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", MODULES)
def test_cases_compile_and_fit(module, arch, part):
    from nsa.kernels.decode.step import TEAM_PER_SM

    every, lock = cases_of(module, arch), locks.read()["kernels"]
    cases = every[part::PARTS]
    assert cases and len({c.name for c in every}) == len(every)
    found, bad = locks.compile_cases(cases, arch, known())
    for name, (_, ptx, *used) in found.items():
        used = Resources(*used)
        if lock and lock.get(name, [0, 0])[1] != ptx:
            bad.append(f"{name}: other PTX than the lock's; `make lock`, and say so")
        assert used.registers > 0
        # All programs of a team run at a time, so many on a multiprocessor.
        if "_team_kernel" in name and used.shared * TEAM_PER_SM > SHARED_LIMIT[arch]:
            bad.append(f"{name}: {used.shared} B of shared memory for each of {TEAM_PER_SM}")
    assert len(found) == len(cases) and not bad, (
        f"{len(bad)} of {len(cases)} on sm_{arch}:\n" + "\n".join(bad)
    )


def test_the_lock_has_no_other_cases():
    lock = locks.read()["kernels"]
    if not lock:
        pytest.skip("the lock is of another release of Triton")
    names = {locks.label(c, arch) for m in MODULES for arch in ARCHS for c in cases_of(m, arch)}
    assert set(lock) == names, "`make lock`"


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", MODULES)
def test_every_int_argument_may_be_one(module, part):
    """Cases for sm_90 are of every kernel. Those that the lock knows have passed."""
    cases, trusted = cases_of(module, 90), known()
    kernels = sorted({c.kernel.__name__ for c in cases})[part::PARTS]
    names = {c.name for c in cases if c.kernel.__name__ in kernels
             and locks.known_entry(trusted, c, 90) is None}  # fmt: skip
    bad = locks.lower_with_ones(cases, names)
    assert kernels and not bad, "\n".join(f"{name} with {why}" for name, why in bad.items())


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


def unrounded_sums(ptx: str) -> list[str]:
    """Sums over threads in which each adds its own product unrounded to the rounded one of another
    thread: the two threads then hold different sums."""
    found, products, neighbours = [], {}, {}
    for line in ptx.splitlines():
        op, _, registers = line.strip().partition(" ")
        to, *of = re.findall(r"%\w+", registers) or [""]
        if op == "mul.f32":
            products[to] = set(of)
        elif op == "shfl.sync.bfly.b32":
            neighbours[to] = products.get(of[0])
        elif op == "fma.rn.f32" and neighbours.get(of[2]) == set(of[:2]):
            found.append(line.strip())
    return found


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("name", ["_decode_candidates_kernel", "_decode_selected_kernel"])
def test_threads_rank_blocks_by_the_same_scores(name, heads):
    """A thread that holds a score one bit apart from another's ranks a block ahead of itself, so
    that a row has one block too few and reads the index of another call."""
    from nsa.kernels.decode.aot_cases import aot_cases

    cases = [c for c in aot_cases(90) if c.kernel.__name__ == name]
    case = next(c for c in cases if name.endswith("candidates_kernel") or c.constexprs["SINGLE"])
    case = replace(case, constexprs={**case.constexprs, "HEADS": heads})
    assert not unrounded_sums(compiled(case, 90).asm["ptx"])


def test_an_unrounded_sum_is_seen():
    product, other = "mul.f32 \t%r3, %r1, %r2;", "shfl.sync.bfly.b32 \t%r4, %r3, 1, 31, -1;"
    assert unrounded_sums(f"{product}\n\t{other}\n\tfma.rn.f32 \t%r5, %r1, %r2, %r4;")
    assert not unrounded_sums(f"{product}\n\t{other}\n\tadd.f32 \t%r5, %r3, %r4;")


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
        case = AotCase("c", module.kernel, {"X": "*i32", "n": "i32"}, {"D": D})
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


def test_an_oversized_tile_is_caught():
    """256 keys at D = 256 need more shared memory than any part has."""
    from nsa.kernels.triton_sel_kernel.aot_cases import aot_cases

    case = next(
        c for c in aot_cases(90) if c.name == "_sel_attn_fwd_ranges_kernel-bf16-D256-Dv256-H16"
    )
    huge = AotCase(
        case.name, case.kernel, case.types, {**case.constexprs, "BLOCK_L": 256}, 8, 3
    )
    assert any("shared" in p for p in compile_case(huge, 90)[0].problems(90))


def test_a_case_with_wrong_arguments_is_refused():
    from nsa.kernels.triton_sel_kernel.aot_cases import aot_cases

    case = aot_cases(90)[0]
    with pytest.raises(ValueError, match="arguments differ.*extra"):
        compile_case(
            AotCase("x", case.kernel, {**case.types, "extra": "i32"}, case.constexprs), 90
        )
