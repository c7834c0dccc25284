"""Which route each branch takes on this box, and why not another; every flag with its source.

    python scripts/print_routing.py
    python scripts/print_routing.py --json routing.json
    NSA_USE_TRITON_SEL=1 python scripts/print_routing.py --dtype float16

The decisions are those of nsa.dispatch.decide for a few typical calls, not a second opinion.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench.records import emit
from nsa import dispatch
from nsa.flags import get_flags

# (what it is, key length, gradient)
CALLS = (
    ("decode step, 512 keys", 512, False),
    ("prefill, 1024 keys", 1024, False),
    ("prefill, 8192 keys", 8192, False),
    ("training, 8192 keys", 8192, True),
)


def routing(dtype: str, head_dim: int) -> dict:
    """Flags, ladder and decisions on the current device, as one JSON object."""
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if cuda else None
    flags = get_flags(name)
    no_fa2 = "no CUDA device"
    if cuda:
        from nsa.kernels import fa2

        no_fa2 = fa2.probe().why_not
    decisions = []
    for branch, ladder in dispatch.LADDER.items():
        for what, key_len, grad in CALLS:
            request = dispatch.Request(
                branch=branch, device="cuda" if cuda else "cpu", dtype=dtype, d_k=head_dim,
                d_v=head_dim, key_len=key_len, needs_grad=grad,
                capability=torch.cuda.get_device_capability(0) if cuda else None,
                has_triton=dispatch._has_triton(), no_fa2=no_fa2,
            )  # fmt: skip
            decision = dispatch.decide(request, flags)
            decisions.append({
                "branch": branch.value, "call": what, "key_len": key_len, "needs_grad": grad,
                "ladder": [route.value for route in ladder], "route": decision.route.value,
                "rejected": [
                    {"route": route.value, "reason": reason, "meaning": dispatch.REASONS[reason]}
                    for route, reason in decision.rejected
                ],
            })  # fmt: skip
    return {
        "device": name or "cpu",
        "dtype": dtype,
        "head_dim": head_dim,
        "fa2": no_fa2,
        "flags": flags.effective(),
        "decisions": decisions,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the object there too")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head_dim", type=int, default=64)
    args = parser.parse_args(argv)
    try:
        data = routing(args.dtype, args.head_dim)
    except ValueError as error:  # a malformed flag: the text names it
        print(error, file=sys.stderr)
        return 2
    print(f"device {data['device']}, {args.dtype}, head dim {args.head_dim}")
    for flag in data["flags"]:
        print(f"  {flag['name']:28} {flag['value']!s:8} {flag['source']}")
    for d in data["decisions"]:
        why = ", ".join(f"{r['route']}: {r['reason']}" for r in d["rejected"])
        print(f"{d['branch']:10} {d['call']:22} -> {d['route']:9} {f'({why})' if why else ''}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=1) + "\n")
        emit("artifact", {"path": args.json.name})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
