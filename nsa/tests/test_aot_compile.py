"""Every kernel configuration compiles, fits and does not spill on every supported architecture.

No GPU is needed: Triton compiles to a cubin for the named architecture.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from pathlib import Path

import pytest

from nsa import dispatch, kernels
from nsa.kernels.aot import ARCHS, SHARED_LIMIT, AotCase, Resources, compile_case, lower_case

# Every kernel package offers its configurations in a module aot_cases.
MODULES = sorted(
    f"nsa.kernels.{path.parent.name}.aot_cases"
    for path in Path(kernels.__file__).parent.glob("*/aot_cases.py")
)

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
def own_cache(tmp_path, monkeypatch):
    """A stale cache entry would hide a compiler error."""
    monkeypatch.setenv("TRITON_CACHE_DIR", os.fspath(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # an eighth of the time
    gc.collect()
    gc.disable()  # a sixth of it: the compiler's many objects set off search after search
    yield
    gc.enable()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", MODULES)
def test_cases_compile_and_fit(module, arch, part):
    from nsa.kernels.decode.step import TEAM_PER_SM

    every = importlib.import_module(module).aot_cases(arch)
    cases = every[part::PARTS]
    assert cases and len({c.name for c in every}) == len(every)
    bad = []
    for case in cases:
        try:
            used = compile_case(case, arch)
        except Exception as error:
            bad.append(f"{case.name}: {type(error).__name__}: {str(error)[-300:]}")
            continue
        assert used.registers > 0
        # All programs of a team run at a time, so many on a multiprocessor.
        if "_team_kernel" in case.name and used.shared * TEAM_PER_SM > SHARED_LIMIT[arch]:
            bad.append(f"{case.name}: {used.shared} B of shared memory for each of {TEAM_PER_SM}")
        bad += [f"{case.name}: {p}" for p in used.problems(arch, case.max_spill)]
    assert not bad, f"{len(bad)} of {len(cases)} on sm_{arch}:\n" + "\n".join(bad)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", MODULES)
def test_every_int_argument_may_be_one(module, part):
    """All of them at once in every case, and each alone in one case of every kernel; those for
    sm_90 have every kernel."""
    alone, bad = {}, []

    def attempt(case, ones):
        try:
            lower_case(case, 90, ones)
        except Exception as error:
            why = str(error.__cause__ or error)[-200:]
            bad.append(f"{case.name} with {', '.join(ones)} = 1: {type(error).__name__}: {why}")

    for case in importlib.import_module(module).aot_cases(90):
        alone.setdefault(case.kernel.__name__, case)
    names = sorted(alone)[part::PARTS]
    for case in importlib.import_module(module).aot_cases(90):
        name, ints = case.kernel.__name__, [n for n, t in case.types.items() if t in ("i32", "i64")]
        if name in names and ints:
            attempt(case, ints)
            for one in ints if case.name == alone[name].name else ():
                attempt(case, [one])
    assert names and not bad, "\n".join(bad)


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
    assert any("shared" in p for p in compile_case(huge, 90).problems(90))


def test_a_case_with_wrong_arguments_is_refused():
    from nsa.kernels.triton_sel_kernel.aot_cases import aot_cases

    case = aot_cases(90)[0]
    with pytest.raises(ValueError, match="arguments differ.*extra"):
        compile_case(
            AotCase("x", case.kernel, {**case.types, "extra": "i32"}, case.constexprs), 90
        )
