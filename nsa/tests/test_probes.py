"""Probes that every report runs: numbers of an earlier oracle, and cases that nobody knew before.

Drawn cases come from a seed that is printed and stands in every case's name; NSA_PROBE_SEED=N draws
them again.
"""

from __future__ import annotations

import functools
import json
import os
import random
import secrets

import pytest
import torch

import nsa
from nsa import oracle
from nsa.compress import mean_pool
from nsa.tests import oracle_numbers
from nsa.tests.helpers import randn

SEED = int(os.environ.get("NSA_PROBE_SEED") or secrets.randbits(32))
HOW = f"NSA_PROBE_SEED={SEED}"
ROUTES = ("reference", "sdpa")
EARLIER = json.loads(oracle_numbers.FILE.read_text())["cases"]


@pytest.fixture(autouse=True)
def seed_is_printed():
    print(f"drawn cases: {HOW}")


def draws(name: str) -> random.Random:
    """The random numbers of one drawn case."""
    return random.Random(f"{SEED} {name}")


# ---- a third opinion -----------------------------------------------------------------------------


def close(got, want, case):
    if isinstance(want, dict):
        assert set(got) == set(want), case
        for name in want:
            close(got[name], want[name], f"{case}/{name}")
        return
    assert got == pytest.approx(want, rel=1e-9, abs=1e-10), case


@pytest.mark.parametrize("case", EARLIER)
@pytest.mark.parametrize("who", ["oracle", *ROUTES])
def test_outputs_and_gradients_are_those_of_an_earlier_oracle(who, case):
    """A fault that oracle and library have in common is in no number of that file."""

    def layer(**given):
        if who == "oracle":
            return oracle.nsa_attention(**given)
        return nsa.nsa_attention(**given, backend=who)

    close(oracle_numbers.numbers(case, layer), EARLIER[case], f"{who}/{case}")


def test_the_earlier_numbers_are_of_all_cases():
    assert set(EARLIER) == set(oracle_numbers.CASES)
    for case, kept in EARLIER.items():
        assert len(kept["rows"]) >= 2 and set(kept["grads"]) == set(oracle_numbers.NAMES), case


# ---- drawn cases ---------------------------------------------------------------------------------


def window(draw: random.Random, edges: tuple[int, ...], least: int = 1) -> int:
    """A window whose border lies at, or beside, one of these edges."""
    return max(least, draw.choice(edges) + draw.choice([-1, 0, 1]))


@functools.cache
def drawn_layer(number: int):
    """(its name, run(layer) -> output and gradients, the oracle's), fp64, over 256 tokens."""
    draw = draws(f"layer {number}")
    S, G, (l, d) = (
        draw.randint(257, 290),
        1 + number,
        draw.choice([(8, 4), (16, 16), (32, 16), (12, 4)]),
    )
    sizes = dict(l=l, d=d, l_sel=d * draw.randint(1, 5), n_sel=draw.randint(3, 9),
                 window=window(draw, (256, S) if number else (1, 16, 64, 128)))  # fmt: skip
    seed, D = draw.getrandbits(30), torch.float64
    x = {"q": randn(1, S, 2, 4, seed=seed, dtype=D)}
    for i, branch in enumerate(("cmp", "sel", "win")):
        k, v = (randn(1, S, G, 4, seed=seed + 2 * i + j, dtype=D) for j in (1, 2))
        pool = (lambda t: mean_pool(t, l, d)) if branch == "cmp" else (lambda t: t)
        x |= {f"k_{branch}": pool(k), f"v_{branch}": pool(v)}
    x["gates"] = randn(1, S, 2, 3, seed=seed + 9, dtype=D).sigmoid()
    do = randn(1, S, 2, 4, seed=seed + 10, dtype=D)

    def run(layer):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        out = layer(**leaves, **sizes)
        grads = torch.autograd.grad(out, list(leaves.values()), do)
        return dict(zip(("out", *x), (out.detach(), *grads), strict=True))

    return f"{HOW} layer {number} S={S} G={G} {sizes}", run, run(oracle.nsa_attention)


@pytest.mark.parametrize("number", range(2))
def test_a_drawn_layer_and_its_gradients(backend, number):
    """PyTorch's routes against the oracle's own autograd."""
    case, run, want = drawn_layer(number)
    got = run(lambda **given: nsa.nsa_attention(**given, backend=backend))
    for name, value in want.items():
        about = lambda text, name=name: f"{case} {name}: {text}"
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=about)


def drawn_ranges(draw: random.Random, rows: int, keys: int) -> torch.Tensor:
    """int32 ranges [1, rows, 1, n, 2] of 5 to 70 spans: disjoint, touching, some empty."""
    n = draw.randint(5, 70)
    found = []
    for _ in range(rows):
        cuts = sorted(draw.sample(range(keys + 1), 2 * n))
        spans = [(a, b if draw.random() > 0.1 else a) for a, b in zip(cuts[::2], cuts[1::2],
                                                                       strict=True)]  # fmt: skip
        for i in range(1, n):
            if draw.random() < 0.2:  # begins where the one before it ends
                spans[i] = (spans[i - 1][1], max(spans[i][1], spans[i - 1][1]))
        found.append(spans)
    return torch.tensor(found, dtype=torch.int32)[None, :, None]


@pytest.mark.core
@pytest.mark.parametrize("number", range(4))
def test_drawn_ranges_and_their_gradients(number, kernel_device):
    from nsa.tests.test_backward_varlen import run

    draw = draws(f"ranges {number}")
    keys = draw.randint(257, 900)
    ranges = drawn_ranges(draw, 3, keys).to(kernel_device)
    n = ranges.shape[3]
    run(f"{HOW} ranges {number} keys={keys} spans={n}", draw.choice([torch.float16, torch.float32]),
        ranges, kernel_device, S=3, G=1, h=draw.randint(1, 4), Skv=keys,
        D=draw.choice([16, 24]), Dv=draw.choice([16, 24]))  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("branch", ["sliding", "compressed", "selected"])
def test_a_drawn_branch_and_its_gradients(branch, kernel_device):
    """The prefill's kernels at a length over 256."""
    from nsa.tests import test_prefill_kernels as kernels
    from nsa.tests.cases import Shape

    draw = draws(branch)
    S = draw.randint(257, 290)
    l, d = draw.choice([(8, 4), (16, 16), (32, 16)])
    # Of one key the queries' gradients are nothing but rounding, which has no limit.
    shape = Shape((S,), G=1, h=draw.randint(1, 2), l=l, d=d, 
                          w=window(draw, (1, 16, 32, 64, 128, 256, S), 2),
                          l_sel=16 * draw.randint(1, 2), n_sel=draw.randint(3, 6))  # fmt: skip
    print(f"{HOW} {branch} {shape} w={shape.w}")
    if branch == "selected":
        kernels.selected_case(shape, kernel_device, "random", draw.getrandbits(20))
    else:
        getattr(kernels, f"test_{branch}")(shape, kernel_device)
