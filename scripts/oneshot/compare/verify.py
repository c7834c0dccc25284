"""The `verify` verb: is a bundle whole, does it keep its own rules, does it leak nothing by shape.

Checks the sums of every file, the schema, that bundle.json says what the journal says and the
reports give its verdict, that no number stands without its proof, that times, intervals, ratios,
rates, margins and stability are those of the raw times, that the CSVs are what the rows give, that
nothing but PASS stands without a reason, and looks for secrets once more. Exit code 0: all of it
holds; 1: something does not; 2: usage, or no bundle there.

It finds what was damaged or edited by halves. It cannot tell who made a bundle, or that the times
were taken: whoever invents journal, raw times and reports together, with new sums, is not found.
Tables of the reports are made anew and compared where the sources that verify are those of the run;
plots and logs are not compared.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from bench.records import SAMPLES_KEPT, card_faults, claimed, doc_parser
from scripts.oneshot.box.checkout import git_facts, same_sources
from scripts.oneshot.compare.comparison import EVENT_RESOLUTION_US
from scripts.oneshot.record import bundle as bundles
from scripts.oneshot.record import reading
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.gate import decoded, found_in
from scripts.oneshot.record.journal import dumps, parse_json, read_events
from scripts.oneshot.record.judge import Status
from scripts.oneshot.record.markdown import cell, is_interval
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.record.outputs import short_report
from scripts.oneshot.record.reading import BundleError, NoBundle, opened, read_bundle, read_text
from scripts.oneshot.record.redact import Redactor
from scripts.oneshot.record.rows import NUMBERED, RowError, is_number, parse_row
from scripts.oneshot.report.tables import check_csvs, check_health, check_texts

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = "bench/samples.jsonl"
NO_SUMS = f"no {bundles.SUMS}"
# By a later `render`, which renews their sums.
REWRITTEN = ("report.md", "report.html", "issue.md", "plots/")
ROUNDED_US = 0.002  # raw times are written in ns
AHEAD = timedelta(hours=1)
ALIKE = 1.25  # a median of ratios and the ratio of medians


def check(folder: Path) -> Iterator[str]:
    """Everything that is wrong with the bundle in `folder`, one sentence each."""
    yield from check_sums(folder)
    try:
        data = read_bundle(folder)
    except BundleError as error:
        yield str(error)
        return
    of_folder = (check_journal, check_samples, check_csvs, check_health, check_reports)
    try:
        for found in (check_rules(data), check_cards(data), *(c(data, folder) for c in of_folder)):
            yield from found
        if made_by_these_sources(data):
            yield from check_texts(reading.rebuild(folder)[0], folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        yield f"bundle.json has not the shape of its schema: {type(error).__name__}: {error}"
    redaction = data.get("redaction")
    kept = redaction.get("kept") if isinstance(redaction, dict) else None
    yield from check_secrets(folder, tuple(k for k in kept or () if isinstance(k, str)))


def verified(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The run at `path`, a folder or an archive, and what speaks against it; that it has no sums
    does not, for it may not have come to its end. Raises BundleError for one that cannot be read.
    """
    with opened(path) as folder:
        try:
            found = [p for p in dict.fromkeys(check(folder)) if not p.startswith(NO_SUMS)]
            return reading.rebuild(folder)[0], found
        except (AttributeError, KeyError, TypeError) as error:
            raise BundleError(f"broken bundle: {error!r}") from None


def made_by_these_sources(data: Mapping[str, Any]) -> bool:
    """Whether the run was made by the sources that verify it now: only these render it alike."""
    return same_sources(git_facts(ROOT), data["git"])


def check_sums(folder: Path) -> Iterator[str]:
    """SHA256SUMS names every file of the bundle, and each is as it was."""
    path = folder / bundles.SUMS
    if not path.is_file():
        yield f"{NO_SUMS}: the run did not come to its end, or was not packed"
        return
    listed: dict[str, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if not match:
            yield f"{bundles.SUMS}:{number} is no check sum"
        elif match[2].startswith("/") or ".." in PurePosixPath(match[2]).parts:
            yield f"{bundles.SUMS}:{number} names a file outside of the bundle"
        else:
            listed[match[2]] = match[1]
    for name, digest in listed.items():
        file = folder / name
        if file.is_symlink() or not file.is_file():
            yield f"{name} is in {bundles.SUMS} and not in the bundle"
        elif bundles.sha256(file) != digest:
            yield f"{name} was changed after the run: its sha256 is another"
    for file in bundles.members(folder):
        name = file.relative_to(folder).as_posix()
        if name != bundles.SUMS and name not in listed:
            yield f"{name} is not in {bundles.SUMS}"


def check_rules(data: Mapping[str, Any]) -> Iterator[str]:
    """The promises of the report, held against bundle.json."""
    for kind in ("parity", "bench"):
        for row in data[kind]:
            yield from check_row(kind, row)
    known = {status.value for status in Status}
    for stage in data["stages"]:
        name, status = stage["id"], stage["status"]
        if status not in known:
            yield f"stage {name}: unknown status {status!r}"
        elif status != "PASS" and not stage.get("reason"):
            yield f"stage {name} is {status} and gives no reason"
        elif status == "PASS":
            yield from _check_pass(stage, data)
    for test in data["tests"]:
        if test["outcome"] == "skipped" and not test.get("reason"):
            yield f"test {test['nodeid']} was skipped without a reason"
    yield from check_dates(data)
    verdict = data["verdict"]
    if (verdict["status"] == "PASS") != (verdict["exit_code"] == 0):
        yield f"the verdict is {verdict['status']} with exit code {verdict['exit_code']}"
    gate = data["redaction"].get("gate")
    if gate != "clean":
        yield f"the redaction gate is {gate!r}, not clean"


def check_cards(data: Mapping[str, Any]) -> Iterator[str]:
    """A card that corrupts data is called so, and the stage that found it did not pass."""
    health = data["health"] or {}
    of_cards = {f"health_gpu{number}": row for number, row in (health.get("gpus") or {}).items()}
    rows = {"health": health, **of_cards}
    passed = {stage["id"] for stage in data["stages"] if stage["status"] == "PASS"}
    for name, row in rows.items():
        faults = "; ".join(card_faults(row))
        if faults and (row.get("status") != "FAIL" or name in passed):
            yield f"{name} passes for {row.get('status')}, and {faults}"


def check_dates(data: Mapping[str, Any]) -> Iterator[str]:
    """A run does not lie in the future, beyond what clocks differ by, and ends after it began."""
    dates = {name: parse_date(data.get(name)) for name in ("started", "ended")}
    for stage in data["stages"]:
        dates[f"stage {stage['id']}"] = parse_date(stage.get("started"))
    now = datetime.now(timezone.utc)
    for name, date in dates.items():
        if date and date - now > AHEAD:
            yield f"{name}: {date.isoformat()} lies in the future"
    started, ended = dates["started"], dates["ended"]
    if started and ended and ended < started:
        yield f"the run ended {(started - ended).total_seconds():.0f} s before it began"


def parse_date(text: Any) -> datetime | None:
    with suppress(ValueError, TypeError, AttributeError):
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    return None


def _check_pass(stage: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    mine = lambda kind: [row for row in data[kind] if row.get("stage") == stage["id"]]
    outcomes = [test["outcome"] for test in mine("tests")]
    bad = sum(outcome in ("failed", "error") for outcome in outcomes)
    bad += sum(row["status"] != "PASS" for row in mine("parity"))
    bad += sum(row["status"] in ("INVALID", "FAILED") for row in mine("bench"))
    if bad:
        yield f"stage {stage['id']} is PASS with {bad} failed or invalid rows"
    if stage.get("group") == "parity" and not ("passed" in outcomes or mine("parity")):
        yield f"stage {stage['id']} is PASS and no test or parity case ran in it"


def check_row(kind: str, row: Mapping[str, Any]) -> Iterator[str]:
    case = f"{kind} {row.get('case')}"
    try:
        held = parse_row(dumps({**row, "kind": kind}))
    except (RowError, ValueError) as error:
        yield f"{case} is no row: {error}"
        return
    status = row["status"]
    if held["status"] != status:
        yield f"{case} says {status} but is {held['status']}: {'; '.join(held['why'])}"
    if status not in ("PASS", "VALID") and not row.get("why"):
        yield f"{case} is {status} and gives no reason"
    if kind == "bench" and status not in NUMBERED and (numbers := claimed(row)):
        yield f"{case} is {status} and still has numbers: {', '.join(numbers)}"
    yield from (f"{case}: {what}" for what in _contradictions(row))
    reads = [row[n] for n in ("reads_actual", "reads_expected", "reads_seen") if row.get(n)]
    if len(set(reads)) > 1:
        yield f"{case}: keys were read {' and '.join(map(str, reads))} times, by who counts"


def _contradictions(row: Mapping[str, Any]) -> Iterator[str]:
    """Which numbers of a row cannot be of the same samples, or are not what its others give."""
    for name in ("median_us", "base_median_us", "speedup"):
        value = row.get(name)
        ci = row.get("speedup_ci95" if name == "speedup" else name.replace("median", "ci95"))
        if is_number(value) and is_interval(ci) and not ci[0] <= value <= ci[1]:
            yield f"{name} {value:g} lies outside of its own interval [{ci[0]:g}, {ci[1]:g}]"
    ascending = ("min_us", "p20_us", "median_us", "p80_us", "p95_us")
    for low, high in pairwise(n for n in ascending if is_number(row.get(n))):
        if row[low] > row[high] * (1 + 1e-9):
            yield f"{low} {row[low]:g} is over {high} {row[high]:g}"
    median, base, speedup = (row.get(n) for n in ("median_us", "base_median_us", "speedup"))
    given: list[tuple[str, Any, Any]] = []
    if is_number(median) and median > 0:
        for name, amount, unit in (("gbs", "bytes", 1e3), ("tflops", "flops", 1e6)):
            if is_number(row.get(amount)):
                given.append((name, row.get(name), row[amount] / median / unit))
        # What is UNSTABLE may spread as far; its raw times say whether the ratio is theirs.
        if row["status"] == "VALID" and is_number(base) and is_number(speedup) and speedup > 0:
            if not 1 / ALIKE < base / median / speedup < ALIKE:
                yield f"speedup {speedup:g} is not that of {base:g} over {median:g} us"
    of = row.get("parity") if isinstance(row.get("parity"), dict) else row
    error, limit = of.get("max_abs"), of.get("limit_max_abs")
    if is_number(error) and is_number(limit) and limit > 0:
        given.append(("margin", of.get("margin"), error / limit))
    for name, value, right in given:
        if is_number(value) and abs(value - right) > 1e-3 * abs(right) + 1e-12:
            yield f"{name} {value:g} is {right:g} by the row's other numbers"


def check_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """What speaks against rows of the journal of `folder`, which a later run would take over."""
    claims = [row for row in rows if row["kind"] in ("parity", "bench")]
    for row in claims:
        yield from check_row(row["kind"], row)
    benches = [row for row in claims if row["kind"] == "bench"]
    yield from check_samples({"bench": benches, "notes": []}, folder)


def raw_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which raw times a bench row's are."""
    return tuple(row.get(name) for name in ("bench", "case", "candidate", "cache"))


def check_samples(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """What a row says of its times is what its raw times give, where all of them were kept; and
    there are raw times of every row of a bench that keeps them."""
    raw: dict[tuple[Any, ...], list[Any]] = {}
    timed = [row for row in data["bench"] if row["status"] in NUMBERED]
    benches = {row.get("bench") for row in data["bench"] if row.get("order") == "ABBA"}
    lines = read_text(folder, SAMPLES)
    if lines is None:  # none, or dropped on a full disk
        bare = [row for row in timed if row.get("bench") in benches]
        if bare and not any("disk" in str(note.get("text")) for note in data["notes"]):
            yield f"no {SAMPLES}: {len(bare)} rows have times and no raw times support them"
        benches = set()
    for line in (lines or "").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # half a line of a stage that was killed
            kept = parse_json(line)
            benches.add(kept["bench"])
            raw.setdefault(raw_key(kept), []).append(kept)
    for row in timed:
        found = raw.get(raw_key(row))
        if not found:
            if row.get("bench") in benches and is_number(row.get("median_us")):
                yield f"bench {row['case']}: no raw times in {SAMPLES}"
            continue
        # A stage that ran twice, or on several cards, has left several lines.
        wrong = [list(_beside_raw(row, kept)) for kept in found]
        if all(wrong):
            yield from (f"bench {row['case']}: {what}" for what in wrong[0])


def _beside_raw(row: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """Which numbers of a row are not those of these raw times, which were written in ns; of a
    long series, of which not all were kept, whether the median lies among them. There are raw times
    of each median, and a word on why the timing ended."""
    try:
        us, base = ([float(x) for x in kept.get(n) or ()] for n in ("us", "base_us"))
        every, base_every = int(kept["us_every"]), int(kept["base_us_every"] if base else 1)
    except (ValueError, KeyError, TypeError, OverflowError):
        yield "its raw times are no numbers"
        return
    for name, times, kth in (("median_us", us, every), ("base_median_us", base, base_every)):
        if is_number(row.get(name)) and not times:
            yield f"{name} {row[name]:g} has no raw times"
        elif kth != 1 and not SAMPLES_KEPT * (kth - 1) < len(times) * kth:
            yield f"every {kth}. of the times of {name} is said to be kept, of {len(times)}"
    if not row.get("stop"):
        yield "nothing says why its timing ended"
    if not us:
        return
    n = row["n"] if is_number(row.get("n")) else None
    if every != 1 or base_every != 1:
        if n is not None and (every != -(-n // SAMPLES_KEPT) or len(us) != -(-n // every)):
            yield f"n is {n}, and every {every}. of them would not leave {len(us)} raw times"
        for name, times in (("median_us", us), ("base_median_us", base)):
            if times and is_number(row.get(name)) and not min(times) <= row[name] <= max(times):
                yield f"{name} {row[name]:g} is not among its raw times"
        return
    if n not in (None, len(us)):
        yield f"n is {n} and there are {len(us)} raw times"
    given: dict[str, float | None] = {"median_us": statistics.median(us), "min_us": min(us)}
    if base:
        given["base_median_us"] = statistics.median(base)
    with suppress(ImportError):  # stats wants numpy
        from bench import stats

        given |= {f"p{q}_us": stats.quantile(us, q / 100) for q in (20, 80, 95)}
        for name, times in (("ci95_us", us), ("base_ci95_us", base)):
            ci, of_row = stats.median_ci(times) if times else None, row.get(name)
            apart = zip(ci, of_row, strict=True) if ci and is_interval(of_row) else ()
            if any(abs(a - b) > ROUNDED_US for a, b in apart):
                yield f"{name} is not the interval of its raw times"
        shaky = stats.too_few(len(us)) + stats.instability(us, EVENT_RESOLUTION_US)
        if row["status"] == "VALID" and row.get("stop") and shaky:
            yield f"it is VALID, and its raw times are not: {'; '.join(shaky)}"
    for name, value in given.items():
        if is_number(row.get(name)) and abs(row[name] - value) > ROUNDED_US:
            yield f"{name} {row[name]:g} is {value:g} by its raw times"
    if is_number(row.get("speedup")) and len(base) == len(us) and min(us) > 0:
        ratio = statistics.median(b / a for a, b in zip(us, base, strict=True))
        rounding = ROUNDED_US / min(us) + ROUNDED_US / max(min(base), ROUNDED_US)
        if abs(row["speedup"] / ratio - 1) > rounding + 1e-6:
            yield f"speedup {row['speedup']:g} is {ratio:g} by its raw times"


def check_reports(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The reports begin with the verdict of bundle.json. Those of a cut run may be older."""
    if not (folder / bundles.SUMS).is_file():
        return
    line = cell(data["verdict"]["one_line"], 1000)
    short = [t for t in short_report(data).splitlines() if t.startswith("**")]
    for name in ("report.md", "issue.md", "report.html"):
        if (text := read_text(folder, name)) is None:
            continue
        heads, right = re.findall(r"(?m)^\*\*.*", text), {f"**{line}**", *short}
        if name == "report.html":
            try:
                from scripts.oneshot.report.page import inline
            except ImportError:  # it comes with jinja2
                continue
            heads, right = re.findall(r"(?s)<h1>.*?</h1>", text), {f"<h1>{inline(line)}</h1>"}
        if not right.issuperset(heads[:1] or [None]):
            yield f"{name} does not begin with the verdict of bundle.json"


def check_journal(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """bundle.json is what the journal gives, and its list of files is the folder's."""
    events = read_events(folder / "events.jsonl")
    if not events:
        yield "no events.jsonl: nothing supports bundle.json"
        return
    try:
        replayed = json.loads(dumps(RunRecord.replay(events).to_bundle()))
    except (ValueError, KeyError, TypeError) as error:
        yield f"events.jsonl cannot be replayed: {type(error).__name__}: {error}"
        return
    for key in replayed:
        if key != "files" and replayed[key] != data.get(key):
            yield f"{key} in bundle.json is not what events.jsonl gives"
    files = {str(file.get("path")): file.get("sha256") for file in data["files"]}
    for name, digest in files.items():
        if name.startswith(REWRITTEN) or ".." in PurePosixPath(name).parts:
            continue
        if not (folder / name).is_file():
            yield f"{name} is listed in bundle.json and missing"
        elif bundles.sha256(folder / name) != digest:
            yield f"{name} is not the file that bundle.json lists"


def check_secrets(folder: Path, keep: tuple[str, ...] = ()) -> Iterator[str]:
    """What looks private, by rule and file; never the value itself."""
    redactor = Redactor({}, keep=keep, hostnames=(), user="", literals=False)
    for path in folder.rglob("*"):
        if path.is_symlink():
            yield f"{path.relative_to(folder)} is a link"
    for path in bundles.members(folder):
        name, text = path.relative_to(folder).as_posix(), decoded(path)
        if text is None:
            yield f"{name} is neither text nor a picture: nobody can vouch for it"
        for subject in (name, text or ""):
            clean, rules = found_in(subject, redactor)
            found = ", ".join(f"{rule} x{n}" for rule, n in sorted(rules.items())) or "other"
            if clean != subject:
                yield f"{redactor.text(name)} holds something private: {found}"


def main(argv: list[str]) -> int:
    p = doc_parser(__doc__, prog="oneshot verify")
    p.add_argument("bundle", type=Path, help="folder or .tgz of a run")
    args = p.parse_args(argv)
    unread = "its plots"
    try:
        with opened(args.bundle) as folder:
            problems = list(dict.fromkeys(check(folder)))
            files = len(bundles.members(folder))
            data = read_bundle(folder) if not problems else {}
            if data and not made_by_these_sources(data):
                unread = "the tables and plots of its reports, which other sources made"
    except NoBundle as error:
        print(error, file=sys.stderr)
        return 2
    except BundleError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"FAIL {plain(problem)[:500]}")
    if problems:
        print(f"{len(problems)} problems")
        return 1
    print(f"OK {files} files, rules kept, nothing private by shape; not checked: who made it, "
          f"whether the times were taken at all, {unread}")  # fmt: skip
    print(plain(data["verdict"]["one_line"])[:1000])
    return 0
