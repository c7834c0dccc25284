"""How much work NSA's parts really are: bytes that must move and useful FLOPs, by exact counts.

Counts follow the semantics: query t of a sequence of S tokens sees floor((t + 1 - l) / d) + 1
compressed keys once t + 1 >= l, min(w, t + 1) window keys and min(n_sel * l_sel, t + 1) selected
keys (its own block is cut after t). Multiply-adds count as two FLOPs; a backward is 2.5 forwards
(five products for two).
"""

from dataclasses import dataclass

from nsa.blocks import num_compressed

BACKWARD = 2.5


@dataclass(frozen=True)
class Shape:
    """B sequences of S tokens, HQ query heads on G groups, head sizes D and Dv, NSA's sizes."""

    S: int
    B: int = 1
    HQ: int = 64
    G: int = 4
    D: int = 128
    Dv: int = 128
    l: int = 32
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    w: int = 512
    itemsize: int = 2


def pairs(shape: Shape) -> dict[str, int]:
    """(query, key) pairs per head and sequence of each branch, and of dense causal attention."""
    S, n = shape.S, num_compressed(shape.S, shape.l, shape.d)
    # Compressed key i is seen by the queries from i*d + l - 1 on.
    cmp = sum(S - (i * shape.d + shape.l - 1) for i in range(n))
    first = min(S, shape.w)
    win = first * (first + 1) // 2 + (S - first) * shape.w
    sel = 0
    for t in range(S):
        own = t // shape.l_sel
        blocks = min(shape.n_sel, own + 1)
        sel += (blocks - 1) * shape.l_sel + t % shape.l_sel + 1
    return {"cmp": cmp, "sel": sel, "win": win, "dense": S * (S + 1) // 2}


def flops(shape: Shape, part: str, backward: bool = False) -> int:
    """Useful FLOPs of cmp, sel, win, select (the scores alone), dense or full (all of NSA), turn
    (the rotary turn of queries and keys: 6 for a pair)."""
    if part == "turn":
        return 3 * shape.B * shape.S * (shape.HQ + 3 * shape.G) * shape.D
    count = pairs(shape)
    heads = shape.B * shape.HQ
    attention = 2 * (shape.D + shape.Dv) * heads
    work = {name: n * attention for name, n in count.items()}
    work["select"] = 2 * shape.D * heads * count["cmp"]
    work["full"] = work["cmp"] + work["sel"] + work["win"] + (0 if backward else work["select"])
    return int(work[part] * BACKWARD) if backward else work[part]


def bytes_needed(shape: Shape, part: str, backward: bool = False) -> int:
    """Bytes that must cross the memory bus once: queries, keys, values, outputs (and gradients)."""
    rows = shape.B * shape.S
    if part == "turn":  # read and written, in the backward too
        width = shape.HQ * shape.D + 3 * shape.G * (shape.D + shape.Dv)
        return 2 * rows * width * shape.itemsize
    q, o = rows * shape.HQ * shape.D, rows * shape.HQ * shape.Dv
    kv = rows * shape.G * (shape.D + shape.Dv)
    small = shape.B * num_compressed(shape.S, shape.l, shape.d) * shape.G * (shape.D + shape.Dv)
    keys = {"cmp": small, "sel": kv, "win": kv, "dense": kv, "select": small // 2}
    keys["full"] = small + 2 * kv
    elements = q + keys[part] + (0 if part == "select" else o)
    if backward:  # read q, o, do and the keys; write their gradients
        elements = 2 * q + 2 * o + 2 * keys[part]
    extra = rows * shape.G * shape.n_sel * 4 if part in ("sel", "select") else 0
    return elements * shape.itemsize + extra
