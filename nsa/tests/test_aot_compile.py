"""Every kernel configuration compiles, fits and does not spill on every supported architecture, and
the interface and the launches of calls are what nsa/tests/locks says.

No GPU is needed: Triton compiles to a cubin for the named architecture. On a CPU nothing else runs
the launchers of the kernels for Hopper.
"""

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys

import pytest

from nsa import dispatch, kernels
from scripts import lock as locks
from scripts.aot import ARCHS, SHARED_LIMIT, AotCase, Resources, content, unrounded_sums

pytest.importorskip("triton", reason="Triton is not installed")
replaced = "TRITON_INTERPRET=1 replaces the compiler"
pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason=replaced)


# A process takes its CPU tensors for those of one card alone. Each is forked from this one, which
# has imported all that takes seconds.
SERVER = """
import contextlib, gc, importlib, io, json, os, pkgutil, sys, traceback
from nsa import kernels
from scripts import compile_as_launched as c, lock
for found in pkgutil.walk_packages(kernels.__path__, "nsa.kernels."):
    importlib.import_module(found.name)
gc.disable()  # many objects
for line in sys.stdin:
    if not (child := os.fork()):
        said, code = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(said):
                exec(json.loads(line), {"c": c, "json": json, "lock": lock, "sys": sys})
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            code = traceback.format_exc()
        print(json.dumps([code, said.getvalue()]), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(json.dumps(["the process was killed", ""]), flush=True)
"""


@pytest.fixture(scope="module")
def apart():
    """Runs code in a process of its own, which ends with `ends`: what it printed."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=locks.LOCKS.parents[2], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    def run(code, ends=0):
        server.stdin.write(json.dumps(code) + "\n")
        server.stdin.flush()
        code, said = json.loads(server.stdout.readline())  # the exit code, or a traceback
        assert code == ends, (code, said)
        return said

    yield run
    server.stdin.close()
    server.wait()


@pytest.mark.parametrize("arch", ARCHS)
def test_configurations_compile_and_fit(arch, apart):
    """Those that the lock knows have done so; TEST_ALL=1 asks for every one to be compiled."""
    from nsa.kernels.decode.step import TEAM_PER_SM

    lock = locks.read()["kernels"]
    found, bad = json.loads(apart(f"print(json.dumps(lock.compiled({arch})))"))
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
    """Among them sums that are rounded once in one thread and twice in another."""
    assert Resources(SHARED_LIMIT[86], 255, 0).problems(86) == []
    assert "shared memory" in Resources(SHARED_LIMIT[86] + 1, 10, 0).problems(86)[0]
    assert Resources(SHARED_LIMIT[86] + 1, 10, 0).problems(90) == []
    assert "spilled" in Resources(0, 255, 64).problems(90)[0]
    assert "threads differ" in Resources(0, 255, 0, unrounded=1).problems(90)[0]
    product, other = "mul.f32 \t%r3, %r1, %r2;", "shfl.sync.bfly.b32 \t%r4, %r3, 1, 31, -1;"
    assert unrounded_sums(f"{product}\n\t{other}\n\tfma.rn.f32 \t%r5, %r1, %r2, %r4;")
    assert not unrounded_sums(f"{product}\n\t{other}\n\tadd.f32 \t%r5, %r3, %r4;")


# ---- the other locks -----------------------------------------------------------------------------

SAYS = "is not what nsa/tests/locks says: `make lock`, and say in the commit what changed"


def test_the_public_interface_is_the_locks():
    assert locks.api() == (locks.LOCKS / "api.txt").read_text().splitlines(), SAYS


@pytest.mark.parametrize("arch", locks.CALLS_OF)
def test_calls_launch_what_the_lock_says(arch, apart):
    every = (locks.LOCKS / "calls.txt").read_text().splitlines()
    want = [line for line in every if line.startswith(f"sm_{arch} ")]
    assert len(want) > 30
    assert apart(f"print('\\n'.join(lock.calls({arch})))").splitlines() == want, SAYS


# ---- the launchers, for a GPU that is not here ---------------------------------------------------


def test_a_tile_that_does_not_fit_is_a_failure(apart):
    said = apart(
        "c.SHARED_LIMIT[120] = 9000\n"
        "c.grid = lambda arch, quick: [(c.decode, (1, 1, 16, 64, 64, c.BF16, 8192))]\n"
        'sys.exit(c.main(["--arch", "120"]))',
        ends=1,
    )
    assert "FAILED: decode(1, 1, 16" in said and "shared memory" in said and "1 failed" in said


SAME = """
import functools, torch
c.pretend(90, {})
torch.autograd.set_multithreading_enabled(False)
from bench import bench_prefill as bench
from bench.roofline import Shape
from nsa.kernels import launch
from nsa.plans import plan_call

for name in ("Prefill", "Pack", "Projections"):  # which are on the GPU by default
    setattr(bench, name, functools.partial(getattr(bench, name), device="cpu"))
bench.dense_calls = lambda x: []
bench.check_key_gradients = lambda *args: None
shape = Shape(512, 1, 32, 2, 128, 128, 32, 16, 64, 16, 128)
cells = [(op, way) for op in bench.OPS for way in ("fwd", "bwd") if (op, way) != ("select", "bwd")]
known = set()
for cell in cells:
    planned = plan_call(functools.partial(bench.call_once, shape, *cell)).launches
    known |= {(id(one.memory), one.key) for one in planned}
seen = []

def met(memory, key, kernel, *_):
    seen.append(kernel.__name__)
    if (id(memory), key) not in known:
        print("not compiled before:", kernel.__name__, key)

launch._launch = met
for cell in cells:
    case = bench.case_of(shape, *cell, {})
    case.refill(1)
    for contender in (case.candidate, *case.baselines):
        contender.call()
print(len(set(seen)), "kernels")
"""


def test_what_a_prefill_bench_launches_was_compiled_before(apart):
    """Compiled side by side, and never again: by the very keys that launches are known by."""
    *missing, last = apart(SAME).splitlines()
    assert not missing and int(last.split()[0]) > 20


LENGTHS = """
import torch
from nsa.kernels.launch import planning
from nsa.kernels.prefill import nsa_prefill_triton

c.pretend(90, {})
torch.autograd.set_multithreading_enabled(False)
known = set()

def run(batch, S, n_cmp, N, q_start, **how):
    make = lambda n, *tail: torch.zeros(*batch, n, *tail, dtype=torch.bfloat16, requires_grad=True)
    window = min(N, S + 511)
    kv = [make(n, 2, 128) for n in (n_cmp, n_cmp, N, N, window, window)]
    x = [make(S, 32, 128), *kv, make(S, 32, 3)]
    call = lambda: nsa_prefill_triton(
        *x, l=32, d=16, l_sel=64, n_sel=16, n_init=1, n_local=2, window=512, q_start=q_start, **how
    )[0]
    with planning() as planned:
        out = call()
        torch.autograd.grad(out, x, torch.zeros_like(out))
        with torch.no_grad():
            call()
    mine = {one.key for one in planned.launches if one.constants and one.kernel.is_gluon()}
    print(len(mine), len(mine - known))
    known.update(mine)

def pack(*lengths):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    T, n_cmp = sum(lengths), sum((n - 32) // 16 + 1 for n in lengths)
    run((), T, n_cmp, T, 0, cu_seqlens=cu_seqlens, max_seqlen=8192)

def prompt(S, q_start=0):
    run((1,), S, (q_start + S - 32) // 16 + 1, q_start + S, q_start)
"""
OF_LENGTHS = {
    "pack": "[8192], [4096] * 2, [2731, 2730, 2731], [1000] * 8 + [192], [8113], [500] * 16",
    "prompt": "(5003,), (5000,), (4890,), (4097, 900), (4500, 512), (4096, 904)",
}


@pytest.mark.parametrize("of", OF_LENGTHS)
def test_kernels_for_hopper_are_compiled_once_whatever_the_lengths(of, apart):
    """One set of kernels serves all prompts, but for multiples of 16 tokens, and one all packs."""
    said = apart(f"{LENGTHS}\nfor n in {OF_LENGTHS[of]}: {of}(*n)")
    (several, new), *others = (map(int, line.split()) for line in said.splitlines())
    assert several == new >= 8 and [n for _, n in others] == [0] * 5, said


FLAGS = """
import os, threading, torch, nsa
from torch.utils.checkpoint import checkpoint
from nsa import dispatch
from nsa.kernels.launch import planning
from nsa.kernels.prefill import hopper

serves = lambda use: nsa.flags.get_flags().use_gluon if use is None else use
c.pretend(90, {})
hopper.why_not = lambda device, use_gluon=None: None if serves(use_gluon) else "off"
dispatch.interpreting = lambda: True
S = 6144  # from which on few heads are served
make = lambda n, heads, d=128: torch.zeros(1, n, heads, d, dtype=torch.bfloat16)
cmp = (S - 32) // 16 + 1
x = [make(S, 8), make(cmp, 2), make(cmp, 2), *(make(S, 2) for _ in range(4)), make(S, 8, 3)]
x = [t.requires_grad_() for t in x]
q, k_cmp, v_cmp, k, v, *_ = x
some = torch.zeros(1, S, 2, 16, dtype=torch.int32)

def names(run):
    with planning() as planned:
        run()
    return [one.kernel.__name__ for one in planned.launches]

for use in (True, False):
    os.environ["NSA_USE_GLUON"] = str(int(not use))
    nsa.flags.clear_flags_cache()
    how = dict(backend="triton", flags=nsa.Flags(use_gluon=use, sel_triton_allow_grad=True))
    for route, call in dict(
        compressed=lambda: nsa.compressed_attention(q, k_cmp, v_cmp, **how)[0],
        sliding=lambda: nsa.sliding_attention(q, k, v, **how),
        selected=lambda: nsa.selection_attention(q, k, v, some, **how),
        whole=lambda: nsa.nsa_attention(*x, **how),
        choice=lambda: nsa.select_blocks(q, k_cmp, l=32, d=16, l_sel=64, n_sel=16, **how),
    ).items():
        for recompute in (False, True):
            outs = []
            run = (lambda: checkpoint(call, use_reentrant=False)) if recompute else call
            passes = [names(lambda: outs.append(run()))]
            if route != "choice":
                go = lambda: passes.append(names(lambda: outs[0].sum().backward()))
                thread = threading.Thread(target=go)
                thread.start()
                thread.join()
            assert len(passes) == 1 + (route != "choice")
            print(json.dumps([use, route, recompute, passes]))
"""


def test_what_the_flags_argument_says_reaches_every_pass(apart):
    """Whatever the environment says, also when another thread runs the backward pass."""
    seen = [json.loads(line) for line in apart(FLAGS).splitlines()]
    assert len(seen) == 20
    for use, *call, passes in seen:
        for names in passes:
            assert any("hopper" in name for name in names) == use, (call, passes)
