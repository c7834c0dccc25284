"""The smallest selected length from which on Triton selection is safely the faster route.

    python bench/threshold_optimizer.py sel_route.csv --fa2 fa2.csv
    python bench/threshold_optimizer.py results/*.csv --write configs/base.yaml

`sel_triton_min_L` is the smallest tested L such that at it and at every larger tested L each row of
mode `route` (bench_sel_triton.py --route 1; heads, dimensions, N, distribution) has the lower
bounds of its speedup by the device's time and by the host's (wall) at --min-speedup or above. The
rows of other modes compare kernels on packed keys and decide nothing. An UNSTABLE row has to reach
twice that; a SKIPPED one fails, and so does one whose case raised an error. Every length needs the
distributions few, many and mixed, each at every setting that any length was measured at. Where the
longest length fails nothing is proposed, and the deciding cell is named.
The FA-2 minimum lengths, in keys, follow the same rule, by the device's time, per branch and
baseline: SDPA, what is left with NSA_USE_TRITON_SEL=0, and the branch's Triton kernel. --write
writes those against SDPA: with Triton on, NSA_USE_FA2 is best left off, for only without it is
nsa_attention one operator.

Exit code: 0 an answer ("no length qualifies" is one), 1 rows that cannot be trusted, 2 usage, 3 too
few lengths.
Standard library and PyYAML only.
"""

import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import yaml

from bench import records

# What would serve without FA-2, and what stands behind the names of its answers in the record.
FA2_BASELINES = {"sdpa": "", "triton": "_triton"}
DISTRIBUTIONS = ("few", "many", "mixed")
MIN_LENGTHS = 3
ROUNDING = 1e-5  # a CSV holds seven digits
ENVIRONMENT = ("device", "torch", "triton", "driver", "commit")
MODE = "route"  # of the rows that decide
_SEL_COLUMNS = (
    "mode", "N", "H", "D", "Dv", "L", "dist", "streams", "speedup", "ci_low", "ci_high",
    "wall_low", "parity", "status", "path", *ENVIRONMENT,
)  # fmt: skip
_FA2_COLUMNS = ("branch", "S", "speedup", "ci_low", "ci_high", "parity", "status", "device")


@dataclass(frozen=True)
class Cell:
    """One bench row as the rule needs it. lows: the lower bound of its speedup by the device's time
    and, of a route, by wall. why: what is wrong with it by itself, None if nothing."""

    where: str  # file:line
    name: str
    length: int
    group: str  # distribution, or the FA-2 branch
    status: str
    lows: dict[str, float]
    why: str | None
    setting: str = ""  # everything else that was measured at this length: heads, sizes, ...

    @property
    def low(self) -> float:
        return min(self.lows.values(), default=math.inf)

    def failure(self, least: float) -> str | None:
        """Why this cell does not carry the threshold, None when it does."""
        if self.lows and records.carries(self.status, self.lows.values(), least):
            return None
        for name, low in self.lows.items():
            if low < least:
                return f"lower bound {low:.3g}x < {least:g}x{name}"
        return self.why


@dataclass(frozen=True)
class Answer:
    """A minimum length, or None to stay disabled. blocking: the cell that stopped the search."""

    min_length: int | None
    blocking: str | None
    confidence: str
    rows: int


def _count(row: Mapping[str, str], name: str, where: str) -> int:
    if name not in row:
        raise ValueError(f"{where}: no column {name}")
    value = records.finite_cell(row, name, where)
    if value is None or value != int(value) or value < 1:
        raise ValueError(f"{where}: {name} must be a whole number above 0, got {row[name]!r}")
    return int(value)


def load(path: str | Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """(file:line, row) of a bench CSV. Raises ValueError for an incomplete file, and OSError."""
    return [
        (f"{path}:{number}", row) for number, row in enumerate(records.read_csv(path, columns), 2)
    ]


def _judge(
    row: Mapping[str, str], where: str, route: str | None
) -> tuple[float | None, str | None]:
    """(lower bound of the speedup, own failure) of a row that may be trusted; raises ValueError."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{where}: {text}")

    status, parity, path = (row.get(name, "").strip() for name in ("status", "parity", "path"))
    if status not in records.BENCH_STATUSES:
        refuse(f"status must be one of {', '.join(records.BENCH_STATUSES)}, got {status!r}")
    if not row["device"].strip():
        refuse("device is empty: nobody knows what was measured")
    three = [records.finite_cell(row, n, where) for n in ("speedup", "ci_low", "ci_high")]
    speedup, low, high = three
    reason = row.get("why", "").strip() or "no reason given"
    if status == "SKIPPED" and speedup is not None:
        refuse(f"a SKIPPED row has no speedup, got {speedup:g}")
    if status == "SKIPPED" or (status == "FAILED" and not parity and speedup is None):  # it raised
        return None, f"{status}: {reason}"
    if parity != "PASS":
        refuse(f"parity must be PASS, got {parity or 'nothing'!r} ({status}: {reason})")
    if route and not records.path_agrees(route, path):
        refuse(f"path must be {route}, got {path or 'nothing'!r}")
    if status in ("INVALID", "FAILED"):
        return None, f"{status}: {reason}"
    if three == [None, None, None]:
        return None, f"no ratio: {reason if row.get('why') else 'too short for the clock'}"
    if None in three:
        refuse("speedup, ci_low and ci_high must come together")
    if not 0 < low <= high or speedup <= 0:
        refuse(f"ci_low must be in 0..ci_high, got {low:g} and {high:g}")
    if not low * (1 - ROUNDING) <= speedup <= high * (1 + ROUNDING):
        refuse(f"speedup must lie in its interval, got {speedup:g} and {low:g}..{high:g}")
    return low, f"UNSTABLE: {reason}" if status == "UNSTABLE" else None


def same_environment(rows: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raise ValueError unless all rows come from one device, software and commit."""
    first_at, first = rows[0]
    for (where, row), name in itertools.product(rows[1:], ENVIRONMENT):
        if row.get(name) != first.get(name):
            both = f"{name} is {row.get(name)!r}, but {first.get(name)!r} at {first_at}"
            raise ValueError(f"{where}: {both}: rows of different environments do not mix")


def _named(row: Mapping[str, str], columns: Sequence[str]) -> str:
    return " ".join(f"{n}={row[n].strip()}" for n in columns if row.get(n))


def selection_cells(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[Cell]:
    """The cells of bench_sel_triton.py's rows of routes. Raises ValueError."""
    cells = []
    for where, row in rows:
        if row["mode"].strip() != MODE:
            continue
        low, why = _judge(row, where, "triton")
        wall = records.finite_cell(row, "wall_low", where)
        if low is not None and wall is None:
            raise ValueError(f"{where}: wall_low must come with a speedup")
        _, *_, L = (_count(row, name, where) for name in ("N", "H", "D", "Dv", "streams", "L"))
        setting = _named(row, ("dist", "N", "H", "D", "Dv", "streams", "dtype"))
        lows = {} if low is None else {"": low, " by wall": wall}
        cells.append(Cell(where, f"L={row['L']} {setting}", L, row["dist"].strip(),
                          row["status"].strip(), lows, why, setting))  # fmt: skip
    return cells


def _keys(row: Mapping[str, str], where: str) -> int:
    """Return the keys that NSA_FA2_MIN_LEN_* is compared with: column key_len, else min(w, S) for
    the window and the number of compressed keys of S tokens for the compressed branch."""
    S = _count(row, "S", where)
    if row.get("key_len"):
        return _count(row, "key_len", where)
    if row["branch"].strip() == "win":
        return min(_count(row, "w", where), S)
    return max(0, (S - _count(row, "l", where)) // _count(row, "d", where) + 1)


def fa2_cells(
    rows: Sequence[tuple[str, Mapping[str, str]]], branch: str, baseline: str = "sdpa"
) -> list[Cell]:
    """The cells of one branch ("win" or "cmp") of bench_fa2.py rows against one baseline ("sdpa" or
    "triton"), by key length. A row that names no baseline was held against SDPA."""
    cells = []
    for where, row in rows:
        kind = row["branch"].strip()
        if kind not in ("win", "cmp"):
            raise ValueError(f"{where}: branch must be win or cmp, got {kind!r}")
        if kind != branch or (row.get("baseline") or "sdpa") != baseline:
            continue
        low, why = _judge(row, where, "fa2" if row.get("path") else None)
        length, lows = _keys(row, where), {} if low is None else {"": low}
        setting = _named(row, ("HQ", "G", "D", "form", "dtype"))
        name = f"{kind} keys={length} {_named(row, ('S', 'w', 'l', 'd', 'baseline'))} {setting}"
        status = row["status"].strip()
        cells.append(Cell(where, name.rstrip(), length, kind, status, lows, why, setting))
    return cells


def missing_evidence(cells: Sequence[Cell], groups: Sequence[str]) -> list[str]:
    """What is missing before the rule can say anything; empty when it can."""
    lengths, gaps = sorted({cell.length for cell in cells}), []
    if len(lengths) < MIN_LENGTHS:
        got = ", ".join(map(str, lengths)) or "none"
        gaps.append(f"at least {MIN_LENGTHS} lengths are needed, got {got}")
    if absent := [g for g in groups if g not in {cell.group for cell in cells}]:
        gaps.append(f"no rows of {', '.join(absent)}")
    return gaps


def smallest(cells: Sequence[Cell], groups: Sequence[str], least: float) -> Answer:
    """Walk down from the longest length until a cell fails, or a setting (heads, sizes, ...) that
    was tested at another length was not tested there."""
    best, blocking = None, None
    wanted = {(c.group, c.setting) for c in cells if not groups or c.group in groups}
    wanted |= {(g, "") for g in set(groups) - {group for group, _ in wanted}}
    for length in sorted({cell.length for cell in cells}, reverse=True):
        here = [cell for cell in cells if cell.length == length]
        untested = sorted(wanted - {(cell.group, cell.setting) for cell in here})
        failed = [cell for cell in here if cell.failure(least)]
        if failed:
            cell = failed[0]
            blocking = f"{cell.name}: {cell.failure(least)} ({Path(cell.where).name})"
            if len(failed) > 1:
                blocking += f", and {len(failed) - 1} more of {len(here)} cells"
            break
        if untested:
            blocking = f"L={length} {untested[0][1] or untested[0][0]}: not tested"
            if len(untested) > 1:
                blocking += f", and {len(untested) - 1} more"
            break
        best = length
    text = f"{len(cells)} cells, and the longest length does not hold"
    if carried := [cell for cell in cells if best is not None and cell.length >= best]:
        worst = min(carried, key=lambda cell: cell.low)
        lengths = len({cell.length for cell in carried})
        text = (
            f"all {len(carried)} cells at {lengths} lengths from {best} on; smallest lower bound "
            f"{worst.low:.2f}x ({worst.name})"
        )
        text += "; one length alone, test longer ones" if lengths == 1 else ""
    return Answer(best, blocking, text, len(cells))


def propose_config(
    text: str, device: str, settings: Mapping[str, Any], comment: str | None = None
) -> str:
    """YAML `text` with `runtime.devices.<device>` given these settings; every other line stays.

    comment stands behind the first setting written. A threshold takes a `use_triton_sel: false`
    away that earlier releases wrote. Raises ValueError when the file has no `runtime.devices` in
    the layout that it ships with.
    """
    try:
        expected = yaml.safe_load(text)
        devices = expected["runtime"]["devices"] or {}
        entry = {**(devices.get(device) or {}), **settings}
        if "use_triton_sel" not in settings and entry.get("use_triton_sel") is False:
            del entry["use_triton_sel"]
        at, mapping = _children(_children(yaml.compose(text))["runtime"][1])["devices"]
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as e:
        raise ValueError(f"the configuration has no mapping runtime.devices: {e!r}") from e
    expected["runtime"]["devices"] = {**devices, device: entry}

    # A device's name stands at four spaces, its settings at six.
    made = lambda indent, pair: indent + yaml.safe_dump(pair, width=1000).strip()
    fresh = [made(" " * 6, {k: v}) for k, v in settings.items()]
    if fresh and comment:
        fresh[0] += f"  # {' '.join(comment.split())}"
    head = made(" " * 4, {device: None}).removesuffix(" null")
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines()
    lines[at] = re.sub(r"\{\s*\}", "", lines[at]).rstrip()
    first = end = _line_after(mapping)
    kept: list[str] = []
    if device in devices:
        first, mine = _children(mapping)[device]
        end, known = _line_after(mine), _children(mine)
        if not known or mine.flow_style:  # {key: value} on one line
            head += lines[end - 1][mine.end_mark.column :].rstrip()
            kept = [made(" " * 6, {k: v}) for k, v in entry.items() if k not in settings]
        else:
            head = lines[first]
            other = {line for k, (line, _) in known.items() if k in settings or k not in entry}
            kept = [lines[i] for i in range(first + 1, end) if i not in other]
    lines[first:end] = [head, *kept, *fresh]
    edited = newline.join(lines) + newline
    try:
        same = yaml.safe_load(edited) == expected
    except yaml.YAMLError:
        same = False
    if not same:
        raise ValueError(
            "the configuration's runtime.devices is not in the layout that it ships with"
        )
    return edited


def _children(mapping: yaml.Node) -> dict[str, tuple[int, yaml.Node]]:
    """By the keys of a mapping: the line of the key, and its value."""
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else ()
    return {key.value: (key.start_mark.line, value) for key, value in pairs}


def _line_after(node: yaml.Node) -> int:
    """The line behind the last one of a value; what stands between it and the next one is none."""
    while isinstance(node, yaml.MappingNode) and not node.flow_style:
        node = node.value[-1][1]
    return node.end_mark.line + 1


def _words(answer: Answer, name: str, unit: str = "", baseline: str = "") -> str:
    head, lower = f"{name} = {answer.min_length}{unit}{baseline}", "not lower because of"
    if answer.min_length is None:
        head = f"{name}{baseline}: no length qualifies, nothing is proposed"
        lower = "deciding cell"
    lines = [head, f"  {answer.confidence}"]
    if answer.blocking:
        lines.append(f"  {lower}: {answer.blocking}")
    return "\n".join(lines)


def fa2_answers(
    rows: Sequence[tuple[str, Mapping[str, str]]], least: float
) -> dict[tuple[str, str], Answer]:
    """The answer of each baseline and branch; where there is too little evidence a note says so."""
    found = {}
    for baseline, branch in itertools.product(FA2_BASELINES, ("win", "cmp")):
        cells = fa2_cells(rows, branch, baseline)
        if gaps := missing_evidence(cells, ()):
            records.note(f"fa2_min_len_{branch} against {baseline}: no proposal: {'; '.join(gaps)}")
        else:
            found[baseline, branch] = smallest(cells, (), least)
    return found


def recommended(answer: Answer, fa2: Mapping[tuple[str, str], Answer]) -> dict[str, Any]:
    """The answers as fields of the record."""
    row: dict[str, Any] = {
        "sel_triton_min_L": answer.min_length, "confidence": answer.confidence,
        "blocking_case": answer.blocking, "rows": answer.rows,
    }  # fmt: skip
    for (baseline, suffix), branch in itertools.product(FA2_BASELINES.items(), ("win", "cmp")):
        one = fa2.get((baseline, branch))
        row[f"fa2_min_len_{branch}{suffix}"] = one and one.min_length
        if one:
            why = filter(None, (one.confidence, one.blocking))
            row[f"fa2_{branch}{suffix}_why"] = "; ".join(why)
    return row


def write(
    path: Path, device: str, sources: Sequence[str], answer: Answer,
    fa2: Mapping[tuple[str, str], Answer],
) -> int:  # fmt: skip
    """Set the device's entry in the configuration `path`, as far as a length qualified; the exit
    code."""
    settings: dict[str, Any] = {}
    comments = []
    if answer.min_length is not None:
        settings["sel_triton_min_L"] = answer.min_length
        comments.append(f"{' '.join(Path(x).name for x in sources)}: {answer.confidence}")
    against_sdpa = {
        f"fa2_min_len_{branch}": one.min_length
        for (baseline, branch), one in fa2.items()
        if baseline == "sdpa" and one.min_length is not None
    }
    if against_sdpa:
        settings |= against_sdpa
        comments.append("fa2_min_len_*: against SDPA, for NSA_USE_FA2=1 with Triton off")
    if not settings:
        print(f"nothing to write in {path}")
        return 0
    try:
        text = path.read_bytes().decode("utf-8")
        records.write_target(path, propose_config(text, device, settings, "; ".join(comments)))
    except (OSError, ValueError) as error:
        print(f"threshold_optimizer: {path}: {error}", file=sys.stderr)
        return 2
    print(f"wrote runtime.devices.{device} in {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = records.doc_parser(__doc__)
    add, least = parser.add_argument, records.MIN_SPEEDUP
    add("csv", nargs="+", metavar="CSV", help="rows of bench_sel_triton.py --route 1")
    add("--fa2", metavar="CSV", help="rows of bench_fa2.py")
    add("--write", type=Path, metavar="YAML", help="set the device's entry here")
    add("--min-speedup", type=float, default=least, help=f"default {least}")
    args = parser.parse_args(argv)
    least = args.min_speedup
    if not (math.isfinite(least) and least >= 1):
        parser.error(f"argument --min-speedup: must be a finite number of 1 or more, got {least}")
    try:
        rows = [row for path in args.csv for row in load(path, _SEL_COLUMNS)]
        more = load(args.fa2, _FA2_COLUMNS) if args.fa2 else []
        if rows + more:
            same_environment(rows + more)
        cells = selection_cells(rows)
        fa2 = fa2_answers(more, least) if args.fa2 else {}
    except (OSError, ValueError) as error:
        records.note(f"no threshold can be proposed: {error}", "warn")
        return 1
    if gaps := missing_evidence(cells, DISTRIBUTIONS):
        records.note(f"no threshold can be proposed: rows of mode {MODE}: {'; '.join(gaps)}")
        return 3
    answer = smallest(cells, DISTRIBUTIONS, least)
    device = rows[0][1]["device"].strip()
    print(f"device: {device}; {len(rows)} rows; at least {least:g}x at the lower bound")
    print(_words(answer, "sel_triton_min_L"))
    print("  for selection_attention called alone; nsa_attention, the layers and decode steps have "
          "no threshold")  # fmt: skip
    for (baseline, branch), one in fa2.items():
        print(_words(one, f"fa2_min_len_{branch}", " keys", f" against {baseline}"))
    about = {"device": device, "min_speedup": least}
    records.emit("recommend", {**recommended(answer, fa2), **about})
    return write(args.write, device, args.csv, answer, fa2) if args.write else 0


if __name__ == "__main__":
    sys.exit(main())
