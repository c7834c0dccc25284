#!/usr/bin/env python3
"""Is a FlashAttention-2 usable here, which one, and why the flash_attn package is not.

    python scripts/fa2_probe.py

Prints the answer and sends it as "metric" rows. Exit code: 0 one can be used, 3 none can.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.records import doc_parser, emit, note
from nsa.kernels import fa2


def main(argv: list[str] | None = None) -> int:
    doc_parser(__doc__).parse_args(argv)
    found = fa2.probe()
    for name in ("source", "version", "why_not", "package_reason", "wheel"):
        emit("metric", {"name": f"fa2_{name}", "value": getattr(found, name), "unit": None})
    which = f"none ({found.why_not})" if found.source is None else f"{found.source} {found.version}"
    print(f"FA-2: {which}")
    print(f"flash_attn package: {found.package_reason or 'works'}")
    print(f"flash_attn wheel: {found.wheel}")
    if found.source is None:
        note(f"no FlashAttention-2 here: {found.why_not}; {found.wheel}")
        return 3
    if found.package_reason is not None:
        note("torch's own FlashAttention-2 is used; the flash_attn package is not: "
             f"{found.package_reason}; {found.wheel}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
