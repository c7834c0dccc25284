"""Which route each branch takes on this box, and why not another; every flag with its source.

    python scripts/print_routing.py
    python scripts/print_routing.py --json routing.json
    NSA_USE_TRITON_SEL=0 python scripts/print_routing.py --dtype float16

The decisions are those of nsa.dispatch.decide for a few typical calls with the paper's sizes, not a
second opinion; keys is the length that a threshold is compared with. On a GPU the kernels of each
call follow, as its own launchers name them, with the reason against each faster one. Last, what a
token takes in the caches of a layer of these sizes.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench.records import emit, file_target, write_target
from nsa import dispatch
from nsa.blocks import num_compressed
from nsa.config import NSAConfig
from nsa.dispatch import Branch
from nsa.flags import Flags, get_flags
from nsa.kvcache import cache_bytes_per_token
from nsa.module import NSAAttention
from nsa.options import Parser

# (what it is, tokens, gradient)
CALLS = (("prefill, 1024 tokens", 1024, False), ("prefill, 8192 tokens", 8192, False),
         ("training, 8192 tokens", 8192, True))  # fmt: skip
STEP = ("decode step, 8192 tokens", 8192, False)
PAPER = NSAConfig(dim=2560, heads=64, groups=4, d_k=192, d_v=128)
FLAG_OF = {"below_min_L": "NSA_SEL_TRITON_MIN_L", "below_min_len": "NSA_FA2_MIN_LEN_CMP"}


def key_length(branch: Branch, S: int, c: NSAConfig) -> int:
    """Return what nsa_attention and decode_step compare with a threshold, of S tokens."""
    if branch in (Branch.SELECTED, Branch.PREFILL):
        return min(c.n_sel * c.l_sel, S)
    if branch is Branch.SLIDING:
        return min(c.w, S)
    return S if branch in (Branch.TURN, Branch.APPEND, Branch.STEP) else num_compressed(S, c.l, c.d)


def _in_the_way(reason: str, request: dispatch.Request, flags: Flags) -> str:
    """Say what a reason means, with the numbers of the threshold that stands in the way."""
    name = FLAG_OF.get(reason)
    if name is None:
        return dispatch.REASONS[reason]
    if reason == "below_min_len" and request.branch is Branch.SLIDING:
        name = "NSA_FA2_MIN_LEN_WIN"
    (flag,) = [f for f in flags.effective() if f["name"] == name]
    what, value = "key length", flag["value"]
    if reason == "below_min_L":
        what, value = "selected length", dispatch.least_selected(flags, request.capability)
    return f"{what} {request.key_len} is below {name}={value} ({flag['source']})"


def call_kernels(dtype: str, config: NSAConfig) -> list[dict[str, Any]]:
    """Return the kernels of each call of a layer of these sizes, in order; none of them runs."""
    from nsa import plans

    layer = NSAAttention(config).to("cuda", getattr(torch, dtype))
    calls = [(what, plans.layer_call(layer, tokens, training=grad)) for what, tokens, grad in CALLS]
    calls.append((STEP[0], plans.step_call(layer, STEP[1])))
    rows = []
    for what, call in calls:
        plan = plans.plan_call(call)
        times = Counter(plan.kernels)  # in order, each once
        rows.append({
            "call": what, "passed_over": plan.passed_over,
            "kernels": [name if n == 1 else f"{name} x{n}" for name, n in times.items()],
            "routes": sorted({f"{d.branch.value}: {d.route.value}" for d in plan.decisions}),
        })  # fmt: skip
    return rows


def routing(dtype: str, head_dim: int, config: NSAConfig | None = None) -> dict:
    """Return flags, ladder and decisions on the current device as one JSON object.

    PREFILL is all branches in one operator; where it is not taken, each branch goes its own way,
    selection then without the threshold, which is about selection_attention by itself.
    """
    config = config or PAPER
    sized = replace(config, d_k=head_dim, d_v=head_dim)
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if cuda else None
    flags = get_flags(name)
    no_fa2 = "no CUDA device"
    if cuda:
        from nsa.kernels import fa2

        no_fa2 = fa2.probe().why_not
    decisions = []
    for branch, ladder in dispatch.LADDER.items():
        for what, tokens, grad in (STEP,) if branch in (Branch.APPEND, Branch.STEP) else CALLS:
            request = dispatch.Request(
                branch=branch, device="cuda" if cuda else "cpu", dtype=dtype, d_k=head_dim,
                d_v=head_dim, key_len=key_length(branch, tokens, config),
                needs_grad=grad and branch is not Branch.BLOCKS,
                capability=torch.cuda.get_device_capability(0) if cuda else None,
                has_triton=dispatch._has_triton(), no_fa2=no_fa2,
            )  # fmt: skip
            decision = dispatch.decide(request, flags)
            rejected = [
                {"route": route.value, "reason": reason,
                 "meaning": _in_the_way(reason, request, flags)}
                for route, reason in decision.rejected
            ]  # fmt: skip
            route = decision.route
            if branch is Branch.PREFILL and not rejected and dispatch.by_branch(flags):
                why = "NSA_USE_FA2 and the debug flags work branch by branch"
                rejected = [{"route": route.value, "reason": "unsupported", "meaning": why}]
                route = dispatch.Route.REFERENCE
            decisions.append({
                "branch": branch.value, "call": what, "key_len": request.key_len,
                "needs_grad": request.needs_grad, "ladder": [route.value for route in ladder],
                "route": route.value, "rejected": rejected,
            })  # fmt: skip
    return {
        "device": name or "cpu", "dtype": dtype, "head_dim": head_dim,
        "sizes": {n: getattr(config, n) for n in ("l", "d", "l_sel", "n_sel", "w")},
        "fa2": no_fa2, "flags": flags.effective(), "decisions": decisions,
        "calls": call_kernels(dtype, sized) if cuda and dispatch._has_triton() else [],
        "cache_bytes_per_token": {
            kind: cache_bytes_per_token(sized, getattr(torch, dtype), ring=kind == "rings")
            for kind in ("rings", "pages")
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=file_target, metavar="PATH", help="the object, too")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args(argv)
    try:
        data = routing(args.dtype, args.head_dim)
    except ValueError as error:  # a malformed flag: the text names it
        print(error, file=sys.stderr)
        return 2
    sizes = " ".join(f"{n}={v}" for n, v in data["sizes"].items())
    print(f"device {data['device']}, {args.dtype}, head dim {args.head_dim}, {sizes}")
    for flag in data["flags"]:
        print(f"  {flag['name']:28} {flag['value']!s:8} {flag['source']}")
    told = lambda r: f"{r['route']}: {r['meaning' if r['reason'] in FLAG_OF else 'reason']}"
    for d in data["decisions"]:
        why = "; ".join(map(told, d["rejected"]))
        what = f"{d['branch']:10} {d['call']:24} {d['key_len']:5} keys -> {d['route']:9}"
        print(f"{what} {f'({why})' if why else ''}".rstrip())
    for call in data["calls"]:
        print(f"{call['call']}: {', '.join(call['kernels']) or 'no kernel of ours'}")
        for kernel, reason in call["passed_over"].items():
            print(f"  not {kernel}: {reason}")
    kinds = data["cache_bytes_per_token"]
    print(
        f"cache of a layer with {PAPER.groups} groups: {kinds['rings']:g} bytes a token, with "
        f"rings for window and raw keys; {kinds['pages']:g} with all in pages"
    )
    if args.json:
        write_target(args.json, json.dumps(data, indent=1) + "\n")
        emit("artifact", {"path": args.json.name})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
