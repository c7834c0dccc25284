"""Two bundles held against each other: environment, status, proof, and the time of every case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.markdown import is_interval
from scripts.oneshot.record.reading import held_to_rules
from scripts.oneshot.record.rows import NUMBERED, grouped, is_number
from scripts.oneshot.report.evidence import ASSUMED_FLOOR, noise_floor

Row = Mapping[str, Any]
EXIT_SAME, EXIT_WORSE, EXIT_USAGE, EXIT_NOT_COMPARABLE = 0, 1, 2, 5
VERDICTS = ("FASTER", "SLOWER", "SAME", "AMBIGUOUS", "NEW", "GONE", "NOT_COMPARABLE")
EVENT_RESOLUTION_US = 0.5
# Facts that change by themselves from one minute to the next.
VOLATILE = ("utc", "executable", "temp_c", "util_pct", "mem_used_mib", "reason", "persistence")
SECTIONS = ("python", "system", "packages", "variables")
BENCH_KEY = ("bench", "case", "candidate", "cache")  # what tells the bench rows of a run apart


@dataclass(frozen=True)
class Side:
    """One bundle, its rows held to the rules once more."""

    data: Mapping[str, Any]
    bench: list[dict[str, Any]]
    parity: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    floor: float | None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Side:
        kinds = {"bench": "bench", "parity": "parity", "tests": "test"}
        rows = [held_to_rules(data[key], kind)[0] for key, kind in kinds.items()]
        return cls(data, *rows, noise_floor(data["health"]))

    def headline(self) -> str:
        git, device = self.data["git"], self.data["device"]
        python = self.data["env"].get("python", {})
        floor = "not measured" if self.floor is None else f"{100 * self.floor:.1f} %"
        return plain(
            f"{git.get('short')}{' DIRTY' if git.get('dirty') else ''}  "
            f"{device.get('name') or 'no GPU (' + self.data['scope'] + ')'}  "
            f"drv {device.get('driver') or '-'}  torch {python.get('torch') or '-'} "
            f"triton {python.get('triton') or '-'}  floor {floor}  {self.data['verdict']['status']}"
        )


@dataclass(frozen=True)
class Cell:
    case: str
    verdict: str
    why: str
    a_us: float | None = None
    b_us: float | None = None
    a_ci: Sequence[float] | None = None
    b_ci: Sequence[float] | None = None
    change: float | None = None  # B over A, minus 1
    change_ci: Sequence[float] | None = None
    not_asked: bool = False  # GONE because B was not asked for its stage


@dataclass
class Comparison:
    a: str
    b: str
    environment: list[str]
    incomparable: list[str]  # why times are not compared; empty when they are
    status: list[str]
    regressions: list[str]  # parity, tests and stages that were right in A and are not in B
    repaired: list[str]
    cells: list[Cell]
    floor: float
    notes: list[str] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(cell.verdict for cell in self.cells)

    def exit_code(self, fail_on: Sequence[str]) -> int:
        counts = self.counts()
        worse = {"parity": self.regressions, "slower": counts["SLOWER"]}
        worse["ambiguous"] = counts["AMBIGUOUS"]
        if any(worse[name] for name in fail_on):
            return EXIT_WORSE
        judged = any(counts[v] for v in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS"))
        lost = any(c.verdict == "GONE" and not c.not_asked for c in self.cells)
        unknown = self.incomparable or lost or (self.cells and not judged)
        return EXIT_NOT_COMPARABLE if unknown else EXIT_SAME


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` as lines of a table whose columns, but for the last, are as wide as their cells."""
    widths = [min(60, max(map(len, column))) for column in zip(*rows, strict=True)][:-1]
    lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)
    return [plain(line) for line in lines]


def judge_case(a: Row, b: Row, floor: float) -> tuple[str, str, float, list[float] | None]:
    """(verdict, why, change of the median, its interval) of a case that has numbers on both sides.

    floor: relative difference that these boxes show between two runs of the same code.
    """
    a_med, b_med = a["median_us"], b["median_us"]
    if min(a_med, b_med) <= 0:
        return "AMBIGUOUS", "a median that is no time", 0.0, None
    change = b_med / a_med - 1
    for name, row in (("A", a), ("B", b)):
        if not is_interval(row.get("ci95_us")) or row["ci95_us"][0] <= 0:
            return "AMBIGUOUS", f"no confidence interval in {name}", change, None
    (a_lo, a_hi), (b_lo, b_hi) = a["ci95_us"], b["ci95_us"]
    interval = [b_lo / a_hi - 1, b_hi / a_lo - 1]
    shaky = [(n, r["why"]) for n, r in (("A", a), ("B", b)) if r["status"] == "UNSTABLE"]
    if shaky:
        text = "; ".join(f"UNSTABLE in {name}: {'; '.join(why)}" for name, why in shaky)
        return "AMBIGUOUS", text, change, interval
    faster, verdict = change < 0, "AMBIGUOUS"
    # Each end counts against us: the floor covers what moves a whole box, the intervals the rest.
    apart = -interval[1] if faster else interval[0]
    widths = [(hi - lo) / 2 / m for lo, hi, m in ((a_lo, a_hi, a_med), (b_lo, b_hi, b_med))]
    if apart > floor:
        why = _doubts(a, b, faster, floor)
        if why is None:
            verdict = "FASTER" if faster else "SLOWER"
            why = f"intervals {100 * apart:.1f} % apart, over the floor of {100 * floor:.1f} %"
    elif abs(change) > floor:
        near = "over the floor, but the intervals are too near"
        why = "intervals overlap" if apart <= 0 else near
    elif max(widths) <= floor:
        verdict, why = "SAME", "inside the floor"
    else:
        wide = "A" if widths[0] > widths[1] else "B"
        why = f"inside the floor, but the interval of {wide} is wider ({100 * max(widths):.1f} %)"
    return verdict, why, change, interval


def _doubts(a: Mapping[str, Any], b: Mapping[str, Any], faster: bool, floor: float) -> str | None:
    """What speaks against a difference that the medians show."""
    for name, words in (("min_us", "the fastest sample"), ("p80_us", "the 80th percentile")):
        if is_number(a.get(name)) and is_number(b.get(name)):
            if (b[name] < a[name]) is not faster or b[name] == a[name]:
                return f"{words} did not move the same way"
    if str(a.get("timer") or "").startswith("cuda"):
        gap = abs(b["median_us"] - a["median_us"])
        if gap < EVENT_RESOLUTION_US:
            return f"a gap of {gap:.2f} us is below the timer's {EVENT_RESOLUTION_US} us"
    if a.get("launch_bound") or b.get("launch_bound"):
        return None  # the host's time: the card's clock says nothing about it
    clocks = [r["sm_mhz_median"] for r in (a, b) if is_number(r.get("sm_mhz_median"))]
    if len(clocks) == 2 and min(clocks) > 0:
        cycles = b["median_us"] * clocks[1] / (a["median_us"] * clocks[0]) - 1
        if (cycles < 0) is not faster or abs(cycles) <= floor:
            moved = f"SM clock {clocks[0]:g} -> {clocks[1]:g} MHz"
            return f"{moved}: in cycles the change is {100 * cycles:+.1f} %"
    return None


def _keyed(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple, dict[str, Any]]:
    """Rows by the values of `names` and their number among the rows that share these values."""
    groups = grouped(rows, lambda row: tuple(str(row.get(name)) for name in names))
    return {(*key, i): row for key, mine in groups.items() for i, row in enumerate(mine)}


def _beside(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Each key of either side with both values, None where a side has none."""
    for key in dict.fromkeys([*left, *right]):
        yield key, left.get(key), right.get(key)


def _moved(a: Mapping[str, Any], b: Mapping[str, Any], *names: str) -> list[str]:
    """Those of `names` whose values differ, with both."""
    return [
        f"{name} {a.get(name)} -> {b.get(name)}" for name in names if a.get(name) != b.get(name)
    ]


def _stage_words(side: Side, row: Mapping[str, Any] | None, stage: str) -> str:
    """What a side has in place of numbers."""
    if row is not None:
        return f"{row['status']}: {'; '.join(row['why'])}"
    found = next((s for s in side.data["stages"] if s["id"] == stage), None)
    if found is None:
        return f"no stage {stage}"
    reason = f": {found['reason']}" if found.get("reason") else ", without this case"
    return f"stage {stage} {found['status']}{reason}"


def asked_for(a: Side, b: Side, stage: str) -> bool:
    """Was B asked for all that the stage `stage` of A did: the same profile, not left out by
    --only or --skip, its cards among those of B?"""
    if any(a.data[key] != b.data[key] for key in ("profile", "scope")):
        return False
    stages = [{s["id"]: s.get("gpus") or () for s in side.data["stages"]} for side in (a, b)]
    if stage in stages[1]:
        return True
    cards = {gpu for gpus in stages[1].values() for gpu in gpus}
    return not b.data.get("partial") and set(stages[0].get(stage, ())) <= cards


def judge_cells(a: Side, b: Side, floor: float, incomparable: Sequence[str]) -> list[Cell]:
    """Every case of either side, in the order of A, the new ones last."""
    left, right = _keyed(a.bench, BENCH_KEY), _keyed(b.bench, BENCH_KEY)
    for key in [k for k in left if k not in right]:  # the same case in another cache mode
        other = next((k for k in right if k not in left and k[:3] == key[:3]), None)
        if other is not None:
            right[key] = right.pop(other)
    candidates: dict[tuple, set[str]] = {}
    for key in (*left, *right):
        candidates.setdefault(key[:2], set()).add(key[2])
    out, boxes = [], ["unlike boxes, see above"] if incomparable else []
    for key, x, y in _beside(left, right):
        case = key[1] + (f" [{key[2]}]" if len(candidates[key[:2]]) > 1 else "")
        case += f" #{key[-1] + 1}" if key[-1] else ""
        ours, theirs = (row if row and row["status"] in NUMBERED else {} for row in (x, y))
        values = {"a_us": ours.get("median_us"), "a_ci": ours.get("ci95_us")}
        values |= {"b_us": theirs.get("median_us"), "b_ci": theirs.get("ci95_us")}
        stage = (x or y)["stage"]
        if not ours and not theirs:
            why = f"A {_stage_words(a, x, stage)}; B {_stage_words(b, y, stage)}"
            out.append(Cell(case, "NOT_COMPARABLE", f"no numbers: {why}"))
        elif not theirs:
            why = f"B: {_stage_words(b, y, stage)}"
            not_asked = y is None and not asked_for(a, b, stage)
            out.append(Cell(case, "GONE", why, **values, not_asked=not_asked))
        elif not ours:
            out.append(Cell(case, "NEW", f"A: {_stage_words(a, x, stage)}", **values))
        elif unlike := [*boxes, *_moved(x, y, "timer", "cache")]:
            out.append(Cell(case, "NOT_COMPARABLE", "; ".join(unlike), **values))
        else:
            verdict, why, change, interval = judge_case(x, y, floor)
            why = "; ".join([why, *_moved(x, y, "path_taken", "baseline")])
            out.append(Cell(case, verdict, why, **values, change=change, change_ci=interval))
    return out


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    out = {f"device {k}": v for k, v in data["device"].items()}
    for section in SECTIONS:
        before = "" if section == "variables" else f"{section} "
        facts = data["env"].get(section, {}).items()
        out |= {before + k: v for k, v in facts if not isinstance(v, (dict, list))}
    out |= {key: data.get(key) for key in ("profile", "scope", "partial")}
    told = lambda name: name.split(" ")[-1] not in VOLATILE and not name.endswith("_free_mib")
    return {k: v for k, v in out.items() if told(k)}


def environment_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    shown = lambda value: "-" if value is None else value
    facts = _beside(_facts(a), _facts(b))
    out = [plain(f"{key} {shown(x)} -> {shown(y)}")[:300] for key, x, y in facts if x != y]
    changed = lambda name: a["git"].get(name) != b["git"].get(name)
    if changed("diff_sha256"):
        out.append("uncommitted changes differ")
    # Only where git cannot tell the sources have a hash, so one side alone says nothing.
    if changed("source_sha256") and all(one["git"].get("source_sha256") for one in (a, b)):
        out.append("the sources differ, by their hash")
    return out


def box_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run that must be alike where times are compared."""
    device = data["device"]
    if data["scope"] == "cpu":
        return {"scope": "cpu", "CPU": data["env"].get("system", {}).get("cpu")}
    driver = str(device.get("driver") or "").split(".")[0] or None
    card = {"GPU": device.get("name"), "driver major": driver, "MIG": bool(device.get("mig"))}
    return {"scope": data["scope"], **card, "power limit": device.get("power_limit_w")}


def _proofs(a: Side, b: Side) -> tuple[list[str], list[str]]:
    """(what was right in A and is not in B, what was wrong in A and is right in B)."""
    worse, better, gone = [], [], ("absent", "skipped")
    other_card = a.data["device"].get("name") != b.data["device"].get("name")
    lost: dict[tuple[str, str, str, str], list[str]] = {}  # (kind, stage, was, now): names
    for kind, (name, *more), state, good in (
        ("parity", ("case", "op", "dtype"), "status", "PASS"),
        ("test", ("nodeid",), "outcome", "passed"),
    ):
        sides = (_keyed(s.parity if kind == "parity" else s.tests, (name, *more)) for s in (a, b))
        for _, x, y in _beside(*sides):
            was, now = (row[state] if row else "absent" for row in (x, y))
            case = (x or y)[name]
            if now in gone:
                # Another card has its own reasons to skip a test.
                expected = other_card if y else not asked_for(a, b, x["stage"])
                if was == good and not expected:
                    lost.setdefault((kind, x["stage"], was, now), []).append(case)
                continue
            why = "; ".join(y["why"]) if kind == "parity" else str(y.get("reason") or "")
            text = plain(f"{kind} {case} {was} -> {now}" + (f" ({why})" if why else ""))
            if now != good and was in (good, *gone):
                worse.append(text)
            elif now == good and was not in (good, *gone):
                better.append(text)
    for (kind, stage, was, now), names in lost.items():
        said = [f"{kind} {was} -> {now} {len(names)} times in {stage}, first {names[0]}"]
        if len(names) <= 3:
            said = [f"{kind} {name} {was} -> {now}" for name in names]
        worse += map(plain, said)
    for _, x, y in _beside(_keyed(a.bench, BENCH_KEY), _keyed(b.bench, BENCH_KEY)):
        if x and y and x["status"] in NUMBERED and y["status"] in ("INVALID", "FAILED"):
            why = "; ".join(y["why"])
            worse.append(plain(f"bench {x['case']} {x['status']} -> {y['status']} ({why})"))
    return worse, better


def compare(a_data: Row, b_data: Row, force: bool = False) -> Comparison:
    """Everything that changed from bundle object A to bundle object B."""
    a, b = Side.of(a_data), Side.of(b_data)
    floors = [f for f in (a.floor, b.floor) if f is not None]
    floor = max([ASSUMED_FLOOR, *floors])
    x, y = box_of(a_data), box_of(b_data)  # unlike ones make their times two different questions
    incomparable = [plain(text) for text in _moved(x, y, *dict.fromkeys([*x, *y]))]
    notes = []
    if len(floors) < 2:
        notes.append("a noise floor was not measured; at least 1 % is assumed")
    if incomparable and force:
        notes.append(f"times compared by force in spite of: {'; '.join(incomparable)}")
        incomparable = []
    for name, data in (("A", a_data), ("B", b_data)):
        if not data["complete"]:
            notes.append(f"{name} did not run to its end ({data['ended_by']})")
    if a_data["run_id"] == b_data["run_id"]:
        notes.append("A and B are the same run")
    worse, better = _proofs(a, b)
    status = []
    stages = ({s["id"]: s for s in data["stages"]} for data in (a_data, b_data))
    for stage, x, y in _beside(*stages):
        was, now = (s["status"] if s else "absent" for s in (x, y))
        if was != now:
            why = f"  ({y['reason']})" if y and y.get("reason") else ""
            status.append(plain(f"{stage}  {was} -> {now}{why}"))
            unproven = now in ("NOT_RUN", "SKIPPED", "absent") and x and x.get("required", True)
            lost = unproven and (y or asked_for(a, b, stage))
            if was == "PASS" and (lost or now in ("FAIL", "CRASH", "TIMEOUT", "INFRA")):
                worse.append(plain(f"stage {stage} PASS -> {now}"))
    environment, cells = environment_changes(a_data, b_data), judge_cells(a, b, floor, incomparable)
    found = (environment, incomparable, status, worse, better, cells, floor, notes)
    return Comparison(a.headline(), b.headline(), *found)
