"""One call of a public function as data, its inputs, and the call.

A case is made of numbers and words, so that it prints as JSON and runs again from there.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.flags import Flags

OPERATIONS = ("attention", "compressed", "sliding", "blocks", "ranges", "choice", "decode")
KEYS = {"compressed": ["cmp"], "sliding": ["win"], "blocks": ["sel"], "ranges": ["sel"],
        "choice": ["cmp"], "attention": ["cmp", "sel", "win"],
        "decode": ["cmp", "sel", "win"]}  # fmt: skip
LAYOUTS = ("plain", "heads first", "sliced", "odd", "off by one", "strided", "shared")
VALUES = ("normal", "tokens", "channels", "both", "peaked", "apart", "large", "small")
ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e30}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLAGS = Flags(use_triton_sel=True, sel_triton_allow_grad=True, sel_triton_min_L=1,
              triton_sel_force=True)  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """What kernels are compiled for: G groups of h heads, their sizes, and the sizes of NSA."""

    G: int
    h: int
    Dk: int
    Dv: int
    l: int
    d: int
    l_sel: int
    n_sel: int
    w: int
    n_init: int = 1
    n_local: int = 2

    def choice(self) -> dict[str, int]:
        names = ("l", "d", "l_sel", "n_sel", "n_init", "n_local")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Case:
    """lengths: queries of each sequence, all the same unless packed. q_start: keys before them.
    spare: rows behind the last key of a buffer; of a pack, rows that belong to no sequence. odd:
    (tensor, where of 1000, value): one row of it holds that value. steps: of decoding, tokens that
    are appended, or taken back where negative. layouts: of tensors that are not contiguous."""

    operation: str
    route: str
    dtype: str
    geometry: Geometry
    lengths: tuple[int, ...]
    packed: bool = False
    q_start: int = 0
    spare: int = 0
    grad: bool = True
    only: str | None = None
    values: str = "normal"
    odd: tuple[str, int, str] | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    scale: float | None = None
    seed: int = 0

    @property
    def first(self) -> int:
        """Position of the first query of a sequence."""
        return 0 if self.packed else self.q_start

    def to_json(self) -> str:
        plain = dataclasses.asdict(self)
        kept = {f.name: plain[f.name] for f in dataclasses.fields(self)
                if f.default is dataclasses.MISSING or plain[f.name] != f.default}  # fmt: skip
        return json.dumps(kept)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        try:
            given = json.loads(text)
            given["geometry"] = Geometry(**given["geometry"])
            for name in ("lengths", "steps", "odd"):
                if given.get(name) is not None:
                    given[name] = tuple(given[name])
            return cls(**given)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no case: {error}") from None


def num_blocks(n: int, l: int, d: int) -> int:
    return 0 if n < l else (n - l) // d + 1


def resized(x: Tensor, size: float) -> Tensor:
    """Return x times size, within what the dtype holds."""
    most = torch.finfo(x.dtype).max / 2
    return (x.double() * size).clamp(-most, most).to(x.dtype)


def with_values(kind: str, name: str, x: Tensor) -> Tensor:
    """Return x [.., rows, heads, D] with outliers of the size that language models have."""
    half = x.dtype == torch.float16
    if name == "q":
        return resized(x, 8) if kind == "peaked" else x
    if kind in ("tokens", "both"):
        row = torch.arange(x.shape[-3], device=x.device) % 7 == 3
        x = torch.where(row[:, None, None], resized(x, 300 if half else 3000), x)
    if kind in ("channels", "both"):
        column = torch.arange(x.shape[-1], device=x.device) % 6 == 5
        x = torch.where(column, resized(x, 20 if half else 100), x)
    if name[0] == "v" and kind == "apart" and x.ndim == 4:
        of = torch.arange(x.shape[0], device=x.device)[:, None, None, None] % 2 == 1
        x = torch.where(of, resized(x, 2.0**9 if half else 1e6), resized(x, 2.0**-6))
    if name[0] == "v" and kind == "large":
        # Sums over keys are fp32, which holds no larger numbers than bf16.
        x = resized(x, torch.finfo(x.dtype).max / (64 if half else 2**14))
    if name[0] == "v" and kind == "small":
        x = resized(x, 2.0**-6 if half else 1e-30)
    return x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the values of x [.., rows, heads, D] in memory as a caller may have them."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout in ("sliced", "odd"):  # a part of a wider projection; one that no vector load takes
        first = 8 if layout == "sliced" else 1
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 16), math.nan)
        part = wide[..., first : first + x.shape[-1]]
        return part.copy_(x)
    if layout == "off by one":  # contiguous, from an address that no vector load takes
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x


class Inputs:
    """The tensors of a case by name: x as the call gets them, clean with 0 in the odd row."""

    def __init__(self, case: Case, device: str) -> None:
        g, self.case, self.device = case.geometry, case, device
        self.dtype = DTYPES[case.dtype]
        self.draw = torch.Generator().manual_seed(case.seed)
        self.x: dict[str, Tensor] = {}
        self.clean: dict[str, Tensor] = {}
        lead = (sum(case.lengths) + case.spare,)
        if not case.packed:
            lead = (len(case.lengths), case.lengths[0])
        self._make("q", (*lead, g.G * g.h, g.Dk))
        rows = self._rows()
        for kind in KEYS[case.operation]:
            at = (rows[kind],) if case.packed else (len(case.lengths), rows[kind])
            self._make(f"k_{kind}", (*at, g.G, g.Dk))
            if case.operation != "choice":
                self._make(f"v_{kind}", (*at, g.G, g.Dv))
        if case.operation == "attention":
            self._make("gates", (*lead, g.G * g.h, 3))
        self.cu = None
        if case.packed:
            ends = torch.tensor([0, *case.lengths]).cumsum(0)
            self.cu = ends.to(device, torch.int32)
        self.blocks = self._blocks(lead) if case.operation == "blocks" else None
        self.ranges = self._ranges(lead, rows["sel"]) if case.operation == "ranges" else None

    @classmethod
    def of(cls, case: Case, x: dict[str, Tensor]) -> "Inputs":
        """Make inputs of given tensors instead of drawn ones."""
        self = cls.__new__(cls)
        self.case, self.x, self.clean = case, x, x
        self.blocks = self.ranges = self.cu = None
        return self

    def _rows(self) -> dict[str, int]:
        """Return the number of keys of each kind."""
        case, g = self.case, self.case.geometry
        if case.packed:
            T = sum(case.lengths) + case.spare
            n_cmp = sum(num_blocks(n, g.l, g.d) for n in case.lengths)
            return {"cmp": n_cmp, "sel": T, "win": T}
        S, N = case.lengths[0], case.q_start + case.lengths[0]
        n_cmp, spare, window = num_blocks(N, g.l, g.d), min(case.spare, 2), N
        if n_cmp + spare >= N:  # as many as raw keys are taken for them
            spare = 0
        if case.operation == "sliding":
            window = N + case.spare
        elif case.seed % 2:  # nothing before the first query's window
            window = S + min(case.q_start, g.w - 1)
        return {"cmp": n_cmp + spare, "sel": N + case.spare, "win": window}

    def chosen(self) -> dict[str, Tensor]:
        """Return the caller's blocks or ranges by name."""
        given = {"blocks": self.blocks, "ranges": self.ranges}
        return {name: x for name, x in given.items() if x is not None}

    def odd_rows(self) -> dict[str, Tensor]:
        """Return by the odd tensor's name which of its rows holds the odd value."""
        if self.case.odd is None:
            return {}
        name, where, _ = self.case.odd
        x = self.clean[name]
        rows = torch.zeros(x.shape[:-2], dtype=torch.bool, device=x.device)
        if rows.numel():
            rows.view(-1)[where * rows.numel() // 1000] = True
        return {name: rows}

    def _make(self, name: str, shape: tuple[int, ...]) -> None:
        case, layout = self.case, self.case.layouts.get(name, "plain")
        x = torch.randn(*shape, generator=self.draw, dtype=torch.float64)
        if name == "gates":  # of any sign, some of them 0, and not always of the others' dtype
            x = x.masked_fill(x.abs() < 0.2, 0).to(torch.float32 if case.seed % 3 else self.dtype)
        else:
            x = with_values(case.values, name, x.to(self.dtype))
        clean, odd = x, case.odd and case.odd[0] == name
        if layout == "shared" and not odd:  # one head's values for all of them
            x = clean = x[..., :1, :].expand(shape)
        self.clean[name] = clean.to(self.device)
        if odd:
            value, most = ODD[case.odd[2]], torch.finfo(self.dtype).max
            value = value if math.isinf(value) else min(value, most * 0.9)
            rows = self.odd_rows()[name].to(x.device)[..., None, None]
            x, clean = x.masked_fill(rows, value), clean.masked_fill(rows, 0)
            self.clean[name] = clean.to(self.device)
        self.x[name] = laid_out(x.to(self.device), layout)

    def _positions(self, lead: tuple[int, ...]) -> Tensor:
        """Return the position of every query in its sequence; -1 outside of all."""
        case = self.case
        if not case.packed:
            return (torch.arange(lead[1]) + case.q_start).expand(lead)
        each = [torch.arange(n) for n in case.lengths]
        return torch.cat([*each, torch.full((case.spare,), -1)])

    def _blocks(self, lead: tuple[int, ...]) -> Tensor:
        """Draw blocks up to the query's own, in any order, some twice or none: [.., G, n]."""
        g = self.case.geometry
        own = (self._positions(lead) // g.l_sel)[..., None, None]
        share = torch.rand(*lead, g.G, g.n_sel, generator=self.draw)
        blocks = (share * (own + 1)).long()
        none = torch.rand(*lead, g.G, g.n_sel, generator=self.draw) < 0.2
        blocks = blocks.masked_fill(none | (own < 0), -1).to(torch.int32)
        return blocks.to(self.device)

    def _ranges(self, lead: tuple[int, ...], rows: int) -> Tensor:
        """Draw ranges [.., G, n, 2], some of them empty, inverted, over the ends or each other."""
        g = self.case.geometry
        reach = max(self.case.lengths) if self.case.packed else rows
        ends = torch.randint(-3, reach + 4, (*lead, g.G, min(g.n_sel, 4), 2), generator=self.draw)
        long = torch.rand(*lead, g.G, 1, 1, generator=self.draw) < 0.5
        near = ends[..., :1] + torch.arange(2) * 5
        return torch.where(long, ends, near).to(self.device, torch.int32)

    def each(self, *several: dict[str, Tensor]) -> Iterator[list[dict[str, Tensor]]]:
        """Yield these tensors of each sequence alone."""
        case, g = self.case, self.case.geometry
        for b, n in enumerate(case.lengths):
            if not case.packed:
                yield [{name: t[b] for name, t in x.items()} for x in several]
                continue
            first = sum(case.lengths[:b])
            begin = sum(num_blocks(m, g.l, g.d) for m in case.lengths[:b])
            rows, cmp = slice(first, first + n), slice(begin, begin + num_blocks(n, g.l, g.d))
            yield [
                {name: t[cmp if name.endswith("cmp") else rows] for name, t in x.items()}
                for x in several
            ]


def call(case: Case, inputs: Inputs, x: dict[str, Tensor]) -> Any:
    g, cu = case.geometry, inputs.cu
    how: dict[str, Any] = dict(backend=case.route, flags=FLAGS, softmax_scale=case.scale)
    start = {} if case.packed else {"q_start": case.q_start}
    if case.packed:
        # Half of them tell the longest length, which spares the device a wait.
        how |= dict(cu_seqlens=cu, max_seqlen=max(case.lengths) if case.seed % 2 else None)
    if case.operation == "attention":
        return nsa.nsa_attention(*x.values(), **g.choice(), window=g.w, return_aux=True, **start,
                                 **how)  # fmt: skip
    if case.operation == "compressed":
        return nsa.compressed_attention(*x.values(), l=g.l, d=g.d, **start, **how)
    if case.operation == "sliding":
        return nsa.sliding_attention(*x.values(), window=g.w, **start, **how)
    if case.operation == "choice":
        if case.route in ("sdpa", "fa2"):
            how["backend"] = "reference"
        return nsa.select_blocks(*x.values(), **g.choice(), **start, **how)
    named = {"ranges": inputs.ranges} if inputs.blocks is None else {
        "block_indices": inputs.blocks, "block_size": g.l_sel}  # fmt: skip
    return nsa.selection_attention(*x.values(), **named, **start, **how)
