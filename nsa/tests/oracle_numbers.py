"""Numbers of an earlier commit's oracle, kept as a third opinion: a fault that oracle and library
share today is in neither of them there.

    git show 40b4870:nsa/oracle.py > /tmp/oracle.py
    python nsa/tests/oracle_numbers.py /tmp/oracle.py 40b4870   # writes goldens/oracle.json

Inputs come from Python's random numbers, which are the same in every release, not from torch's.
What today's oracle gives is no reason to write the file anew.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).parent / "goldens" / "oracle.json"
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
# Tokens, query heads, groups, head sizes, NSA's sizes; window borders and n_sel of all kinds.
CASES = {
    "small": dict(S=23, HQ=4, G=2, D=4, Dv=6, l=8, d=4, l_sel=4, n_sel=3, window=5),
    "no_compressed_key": dict(S=7, HQ=2, G=1, D=4, Dv=4, l=8, d=4, l_sel=8, n_sel=3, window=7),
    "long": dict(S=261, HQ=2, G=1, D=4, Dv=4, l=32, d=16, l_sel=64, n_sel=4, window=64),
    "whole_window": dict(S=33, HQ=3, G=3, D=6, Dv=2, l=4, d=2, l_sel=4, n_sel=4, window=33),
}
KEPT = 3  # queries of a case whose numbers are kept: the last and two between


def inputs(case: str) -> tuple[dict[str, Tensor], dict[str, int], Tensor]:
    """(tensors by NAMES [1, S, heads, width] in fp64, NSA's sizes, the output's gradient)."""
    c = dict(CASES[case])
    S, HQ, G, D, Dv = (c.pop(n) for n in ("S", "HQ", "G", "D", "Dv"))
    draw = random.Random(f"oracle numbers of {case}")

    def tensor(*shape: int) -> Tensor:
        flat = [draw.random() * 4 - 2 for _ in range(torch.Size(shape).numel())]
        return torch.tensor(flat, dtype=torch.float64).view(shape)

    n = max((S - c["l"]) // c["d"] + 1, 0) if S >= c["l"] else 0
    sizes = {"q": (S, HQ, D), "gates": (S, HQ, 3)}
    sizes |= {f"k_{b}": (n if b == "cmp" else S, G, D) for b in ("cmp", "sel", "win")}
    sizes |= {f"v_{b}": (n if b == "cmp" else S, G, Dv) for b in ("cmp", "sel", "win")}
    x = {name: tensor(1, *sizes[name]) for name in NAMES}
    x["gates"] = x["gates"].sigmoid()
    return x, c, tensor(1, S, HQ, Dv)


def kept(case: str) -> list[int]:
    S = CASES[case]["S"]
    return sorted({S - 1, S // 2, S // 5})[-KEPT:]


def numbers(case: str, layer: Callable[..., Tensor]) -> dict[str, Any]:
    """What is kept of `layer`, called as nsa.oracle.nsa_attention is: rows of the output, and of
    every input's gradient its sum, its length, and the first of its rows."""
    x, sizes, do = inputs(case)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    out = layer(**leaves, **sizes)
    got = torch.autograd.grad(out, list(leaves.values()), do.to(out.dtype), allow_unused=True)
    grads = {}
    for (name, leaf), g in zip(leaves.items(), got, strict=True):
        g = torch.zeros_like(leaf) if g is None else g
        first = g[0, 0].flatten().tolist() if g.shape[1] else []
        grads[name] = [g.sum().item(), g.norm().item(), *first]
    rows = {str(t): out[0, t].flatten().tolist() for t in kept(case)}
    return {"rows": rows, "total": [out.sum().item(), out.norm().item()], "grads": grads}


def main(path: str, commit: str) -> None:
    spec = importlib.util.spec_from_file_location("earlier_oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = (f'"{case}": {json.dumps(numbers(case, module.nsa_attention))}' for case in CASES)
    whole = ",\n".join(cases)
    FILE.write_text(f'{{"oracle_of": "{commit}", "cases": {{\n{whole}\n}}}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
