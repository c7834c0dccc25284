"""Rows that benches, tests and scripts hand over: a JSON line to the runner, a CSV line to disk.

Standard library only. A row that would claim a number without its proof cannot be built.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import math
import os
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.options import Parser

NUMBERED = ("VALID", "UNSTABLE")  # the rows that have numbers
BENCH_STATUSES = (*NUMBERED, "INVALID", "SKIPPED", "FAILED")
# What no row may hold without a passed parity: fields of BenchRow, and columns of single benches.
NUMBERS = (
    "median_us", "p20_us", "p80_us", "p95_us", "min_us", "ci95_us", "base_median_us",
    "base_ci95_us", "wall_us", "base_wall_us", "wall_speedup", "wall_speedup_ci95", "speedup",
    "speedup_ci95", "gbs", "tflops", "peak_frac", "base_gbs", "base_tflops", "base_peak_frac",
    "timed_us", "elapsed_us", "enqueue_us", "base_enqueue_us", "wall_min_us",
    "base_wall_min_us", "busbw_gbs", "algbw_gbs", "efficiency",
    "tokens_per_s", "ms_total", "ms_cmp", "ms_sel", "ms_win",
)  # fmt: skip
# What may stand behind the name of a route: the words of its variants (triton_dense_group).
VARIANTS = {
    "triton": {"dense", "varlen", "ranges", "single", "group"},
    "fa2": {"torch", "flash", "attn", "dense", "varlen"},
}
CSV_STDOUT = "-"
SAMPLES_KEPT = 200  # raw times of a row; of a longer series every k-th
# What the lower bound of every speedup has to be for a threshold to lie so low.
MIN_SPEEDUP = 1.2


def carries(status: str, lows: Iterable[float | None], least: float) -> bool:
    """Return whether a row with these lower bounds carries a threshold that asks for `least`.

    A VALID row does where none is lower; an UNSTABLE one, whose samples drift or spread by a few
    percent, where none is below twice that.
    """
    factor = {"VALID": 1.0, "UNSTABLE": 2.0}.get(status)
    return factor is not None and all(low is not None and low >= factor * least for low in lows)


# Counts of a health row (bench/corruption.py); one above 0 says that no result can be trusted.
CARD_FAULTS = {
    "memory_wrong_words": "words of memory were read back other than written",
    "bf16_products_differing": "repetitions of a bf16 matmul differ from the first",
    "bf16_product_values_wrong": "sampled values of a bf16 matmul are not those of fp64",
    "fp32_products_differing": "repetitions of an fp32 matmul differ from the first",
    "fp32_product_values_wrong": "sampled values of an fp32 matmul are not those of fp64",
}


def card_faults(health: Mapping[str, Any] | None) -> list[str]:
    """Return in words each fault that a health row counted; a sound card has none."""
    counts = {name: (health or {}).get(name) for name in CARD_FAULTS}
    return [f"{n} {CARD_FAULTS[name]}" for name, n in counts.items() if type(n) is int and n > 0]


def is_number(value: Any) -> bool:
    """A finite number, which a float can hold; true and false are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


# What the host may wait for a call: so many times its time and the host's own work, and so many us.
# A device's time is its own; a host may be used by others meanwhile.
FAR_OVER = {"perf_counter": (5.0, 2.0)}
FAR_OVER_DEVICE = (1.5, 30.0)
TIMES = ("min_us", "p20_us", "median_us", "p80_us", "p95_us", "wall_us", "base_median_us",
         "base_wall_us")  # fmt: skip


def why_no_time(row: Mapping[str, Any]) -> list[str]:
    """Why a bench row's times cannot be true: not above zero, more than the host saw go by, or far
    under what the host waits for a call and that nothing else explains."""
    number = lambda name: row[name] if is_number(row.get(name)) else math.nan  # over no limit
    why = [f"{name} is {number(name):g}" for name in TIMES if number(name) <= 0]
    timed, elapsed = number("timed_us"), number("elapsed_us")
    if timed > 1.02 * elapsed + 100.0:
        why.append(f"the clock counts {timed:.0f} us in calls that took the host {elapsed:.0f} us")
    factor, slack_us = FAR_OVER.get(str(row.get("timer")), FAR_OVER_DEVICE)
    for of, says in (("", "a call"), ("base_", "the baseline")):
        wall, time, busy = (number(f"{of}{n}_us") for n in ("wall_min", "median", "enqueue"))
        if wall > factor * (time + busy) + slack_us:
            of_host = f"{says} takes the host {wall:.1f} us at least, and {busy:.1f} of them to"
            why.append(f"{of_host} enqueue, and {time:.1f} us by the clock")
    return why


def _plain(value: Any) -> Any:
    """`value` as JSON may hold it: no NaN or infinity, no tuples, no numpy scalars."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return _plain(value.item())
    return value


_emitting = threading.Lock()


def emit(kind: str, row: Mapping[str, Any]) -> None:
    """Send one row to the runner: a JSON line on the descriptor NSA_RESULT_FD, else nothing. NaN
    and infinities become null. Raises TypeError for values that JSON cannot hold. Several processes
    and threads may share the descriptor: a pipe takes only PIPE_BUF bytes (4096) in one piece, so
    locks keep longer rows whole: a POSIX lock, which ends with its process, however it ends,
    excludes processes and no threads. Where the descriptor cannot be locked, rows up to PIPE_BUF
    stay whole all the same."""
    given = os.environ.get("NSA_RESULT_FD")
    if not given:
        return
    fd = int(given)
    data = (json.dumps({"kind": kind, **_plain(row)}, allow_nan=False) + "\n").encode()
    with _emitting:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_UN)


def told(of: str, checks: Iterable[tuple[str, bool, str]]) -> bool:
    """Print (check, passed, what was seen) and send each as the test `of`::check; did all pass?"""
    good = True
    for name, passed, seen in checks:
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {seen}")
        row = {"nodeid": f"{of}::{name}", "outcome": "passed" if passed else "failed"}
        emit("test", {**row, "duration_s": 0.0, "reason": None if passed else seen})
        good &= passed
    return good


def out_dir() -> Path | None:
    """The folder of the report that is being made, None outside of the runner."""
    folder = os.environ.get("NSA_OUT_DIR")
    return Path(folder) if folder else None


def note(text: str, level: str = "info") -> None:
    """A sentence for the report; also printed to stderr."""
    emit("note", {"level": level, "text": text})
    print(text, file=sys.stderr)


def path_agrees(requested: Any, taken: Any) -> bool:
    """True when `taken` is the requested route or a known variant of it (triton, triton_dense)."""
    if not (requested and taken and isinstance(requested, str) and isinstance(taken, str)):
        return False
    words = taken.removeprefix(requested + "_").split("_")
    return taken == requested or (
        taken.startswith(requested + "_") and VARIANTS.get(requested, set()).issuperset(words)
    )


def other_path(row: Mapping[str, Any]) -> str:
    return f"asked for {row.get('path_requested')}, ran {row.get('path_taken')}"


def beyond(parity: Mapping[str, Any]) -> list[str]:
    """Which errors of a comparison are over the limits that it names itself."""
    number = lambda name: parity[name] if is_number(parity.get(name)) else math.nan
    out = [
        f"{name} {number(name):g} is over its limit {number(f'limit_{name}'):g}"
        for name in ("mae", "max_abs")
        if number(name) > number(f"limit_{name}")
    ]
    return out + [f"margin {number('margin'):g} is over 1"] * (number("margin") > 1)


def unproven(row: Mapping[str, Any]) -> list[str]:
    """Why a bench row may not show a time."""
    parity = row.get("parity")
    if not isinstance(parity, dict) or parity.get("status") != "PASS":
        return ["no passed parity check of this case"]
    if wrong := beyond(parity):
        return wrong
    if not row.get("path_taken"):
        return ["no path is named that ran"]
    if row.get("path_requested") and not path_agrees(row["path_requested"], row["path_taken"]):
        return [other_path(row)]
    if not is_number(row.get("median_us")) or row["median_us"] <= 0:
        return ["no finite median above 0"]
    return why_no_time(row)


def claimed(row: Mapping[str, Any]) -> list[str]:
    """Which of NUMBERS a row has."""
    return [name for name in NUMBERS if row.get(name) is not None]


@dataclass(frozen=True)
class BenchRow:
    """One timed case. VALID and UNSTABLE rows have numbers and their proof; the others have `why`.

    Times in microseconds; speedup is baseline over candidate, so more than 1 is faster. `columns`
    holds what one bench adds (L, dist, S, ...). Raises ValueError for a row that claims too much.
    """

    bench: str
    case: str
    status: str
    why: Sequence[str] = ()
    candidate: str | None = None
    baseline: str | None = None
    path_requested: str | None = None
    path_taken: str | None = None
    parity: Mapping[str, Any] | None = None
    cache: str | None = None  # cold | warm
    timer: str | None = None
    order: str | None = None
    n: int | None = None
    pairs: int | None = None
    outliers: int | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    ci95_us: Sequence[float] | None = None
    base_median_us: float | None = None
    base_ci95_us: Sequence[float] | None = None
    wall_us: float | None = None  # per call as a host sees it that calls back to back
    base_wall_us: float | None = None
    # A call's time until the host is free again; None if wall_us is of other calls than the median.
    enqueue_us: float | None = None
    base_enqueue_us: float | None = None
    wall_min_us: float | None = None  # of the fastest round, where others use the host as well
    base_wall_min_us: float | None = None
    timed_us: float | None = None  # all that the clock said of the sampled calls
    elapsed_us: float | None = None  # by another counter of the host, meanwhile
    judged: int | None = None  # sampled calls, drawn at random, whose output was judged
    draw: int | None = None  # seed of that, and of the inputs of every sample
    wall_speedup: float | None = None
    wall_speedup_ci95: Sequence[float] | None = None
    first_call_ms: float | None = None
    speedup: float | None = None
    speedup_ci95: Sequence[float] | None = None
    launch_bound: bool | None = None  # the host is what takes the time; None on the host's clock
    batches: int | None = None
    gap_batches: int | None = None  # batches whose times hold gaps that the host left
    bytes: int | None = None
    flops: int | None = None
    gbs: float | None = None
    tflops: float | None = None
    bound: str | None = None  # memory | compute: which ceiling is nearer
    peak_frac: float | None = None
    base_ran: str | None = None  # the attention operators of a call of the baseline
    base_gbs: float | None = None
    base_tflops: float | None = None
    base_bound: str | None = None
    base_peak_frac: float | None = None
    sm_mhz: Sequence[int] | None = None  # lowest and highest
    sm_mhz_median: float | None = None
    power_w: float | None = None
    reasons: Sequence[str] | None = None  # why the clocks were held down; None where nobody knows
    stop: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in BENCH_STATUSES:
            raise ValueError(f"status must be one of {BENCH_STATUSES}, got {self.status!r}")
        if self.status in NUMBERED:
            if wrong := unproven(vars(self)):
                raise ValueError(f"{self.case}: {'; '.join(wrong)}")
            if self.speedup is not None and self.speedup_ci95 is None:
                raise ValueError(f"{self.case}: a speedup needs its confidence interval")
        if self.status != "VALID" and not self.why:
            raise ValueError(f"{self.case}: status {self.status} needs a reason in `why`")
        if self.status not in NUMBERED:
            if numbers := claimed({**self.columns, **vars(self)}):
                raise ValueError(
                    f"{self.case}: a {self.status} row has no numbers, got {', '.join(numbers)}"
                )
        clash = set(self.columns) & {f.name for f in dataclasses.fields(self)}
        if clash:
            raise ValueError(f"{self.case}: columns repeat {', '.join(sorted(clash))}")

    def record(self) -> dict[str, Any]:
        """The row as it goes to the runner."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**_plain(row.pop("columns")), **_plain(row)}

    def csv(self) -> dict[str, Any]:
        """The row as CSV wants it: times in ms, intervals in columns of their own, one `why`.

        ms [ms_low, ms_high], base_ms, wall_ms, base_wall_ms; speedup [ci_low, ci_high],
        wall_speedup [wall_low, wall_high]; parity, mae, max_abs.
        """
        ms = lambda us: None if us is None else us / 1e3
        low, high = self.ci95_us or (None, None)
        slow, fast = self.speedup_ci95 or (None, None)
        wall_low, wall_high = self.wall_speedup_ci95 or (None, None)
        proof = self.parity or {}
        return {
            **self.record(), "ms": ms(self.median_us), "ms_low": ms(low), "ms_high": ms(high),
            "base_ms": ms(self.base_median_us), "wall_ms": ms(self.wall_us),
            "base_wall_ms": ms(self.base_wall_us), "wall_low": wall_low, "wall_high": wall_high,
            "ci_low": slow, "ci_high": fast, "parity": proof.get("status"), "mae": proof.get("mae"),
            "max_abs": proof.get("max_abs"), "path": self.path_taken, "why": "; ".join(self.why),
            "sm_mhz": self.sm_mhz and self.sm_mhz[0],
        }  # fmt: skip

    def line(self) -> str:
        """The row for people: time, ratio with its interval, share of the ceiling, or why not."""
        why = "; ".join(self.why)
        if self.median_us is None:
            return f"{self.case:66} {self.status}: {why}"
        text = f"{self.case:66} {self.median_us:9.2f} us"
        if self.speedup is not None:
            low, high = self.speedup_ci95
            text += f"  {self.speedup:5.2f}x [{low:.2f}, {high:.2f}] of {self.baseline}"
            if self.base_peak_frac:
                text += f" (at {self.base_peak_frac:.0%} of its {self.base_bound})"
        if self.peak_frac:
            text += f"  {self.peak_frac:4.0%} of {self.bound}"
        return text + ("" if self.status == "VALID" else f"  {self.status}: {why}")

    def emit(self) -> BenchRow:
        """Send the row to the runner; returns it."""
        emit("bench", self.record())
        return self


def _target(text: str, folder: bool) -> Path:
    """The path `text` if such a thing can be written there, as far as can be told before the hours
    of work for it."""
    path = Path(text)
    try:
        real = path.resolve()
        above = next(p for p in real.parents if p.exists())
        good = not real.exists() or (real.is_dir() == folder and os.access(real, os.W_OK))
        if real.is_file() or not real.exists():  # it is made, or made anew, beside its neighbours
            good &= above.is_dir() and os.access(above, os.W_OK)
    except (OSError, ValueError, RuntimeError, StopIteration):  # no such name, a loop of links
        good = False
    if not good:
        what = "folder" if folder else "file"
        raise argparse.ArgumentTypeError(f"wants a {what} that can be written, got {text!r}")
    return path


def file_target(text: str) -> Path:
    """A file that can be written, for argparse."""
    return _target(text, folder=False)


def folder_target(text: str) -> Path:
    """A folder that can be written, or made, for argparse."""
    return _target(text, folder=True)


def csv_target(text: str) -> str:
    """file_target() as it was spelled, or "-" for stdout."""
    if text != CSV_STDOUT:
        file_target(text)
    return text


def doc_parser(doc: str, **more: Any) -> argparse.ArgumentParser:
    """A Parser whose --help begins with the text `doc` as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return Parser(description=doc, formatter_class=form, **more)


def check_flags(parser: argparse.ArgumentParser) -> None:
    """A malformed NSA_* variable is a usage error, as a malformed argument is one."""
    from nsa.flags import get_flags

    try:
        get_flags()
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def shrunk(name: str, values: Sequence[int], by: int, multiple: int = 1) -> list[int]:
    """`values` of the argument `name` divided by `by`, as multiples of `multiple`, none twice.

    A note tells the report, because a smaller size is another measurement; of several ranks the
    first one speaks.
    """
    if by == 1:
        return list(values)
    small = list(dict.fromkeys(max(v // by // multiple, 1) * multiple for v in values))
    was, now = (",".join(map(str, some)) for some in (values, small))
    if os.environ.get("RANK", "0") == "0":
        note(f"--shrink {by}: {name} is {now} here instead of {was}", "warn")
    return small


def _above_0(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    def of(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"must be a {what} number above 0, got {text!r}")

    return of


# Types of arguments: of a whole number of at least 1; of one above 0, such as a duration.
positive, amount = _above_0(int, "whole"), _above_0(float, "finite")


def integers(text: str) -> list[int]:
    """The type of an argument that lists sizes, a,b,c: none below 1, none twice."""
    try:
        values = [int(x) for x in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants integers like 64,128, got {text!r}") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"wants integers of at least 1, got {text!r}")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"wants every integer once, got {text!r}")
    return values


def say(args: argparse.Namespace, text: str) -> None:
    """A line for people: stdout, or stderr while stdout carries CSV."""
    print(text, file=sys.stderr if args.csv == CSV_STDOUT else sys.stdout, flush=True)


def as_cell(value: Any) -> str:
    """`value` as a cell of a CSV: empty for None and what is not finite, a float by 7 digits."""
    value = _plain(value)
    if value is None:
        return ""
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    if isinstance(value, float):
        return format(value, ".7g")
    # The writer leaves a carriage return unquoted, which a reader takes for the end of the row.
    return str(value).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """`rows` as CSV with a header; a missing or non-finite value is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([as_cell(row.get(name)) for name in columns] for row in rows)
    return out.getvalue()


def write_atomic(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replace `path` by `content` as a whole: a reader sees the old file or the new one. Its folder
    is made; nothing else stays on failure. A link is replaced, not followed. mode: permissions,
    None for those of a new file."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_target(path: Path, text: str) -> None:
    """write_atomic() to a file that somebody named: a link stays one, permissions stay, and what is
    no file, such as a pipe, is written to. Raises OSError, which names the file."""
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
            return
        write_atomic(path, text, stat.S_IMODE(path.stat().st_mode) if path.exists() else None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_csv(
    target: str | None, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> None:
    """Write `rows` to the path `target` at once or not at all; "-" is stdout, None is nowhere."""
    if target == CSV_STDOUT:
        sys.stdout.write(csv_text(rows, columns))
    elif target is not None:
        write_target(Path(target), csv_text(rows, columns))


def write_so_far(
    target: str | None, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> None:
    """The rows that there are, so that a bench that is stopped leaves them; stdout gets all at the
    end, from write_csv(), and that is where a disk without room is an error."""
    if target != CSV_STDOUT:
        with contextlib.suppress(OSError):
            write_csv(target, rows, columns)


def finite_cell(row: Mapping[str, str], name: str, where: str) -> float | None:
    """The number in a cell, None for an empty one. Raises ValueError for anything else, which names
    `where`, a file and its line, and the column."""
    text = row[name].strip()
    with contextlib.suppress(ValueError):
        value = float(text) if text else None
        if value is None or math.isfinite(value):
            return value
    raise ValueError(f"{where}: {name} must be a finite number, got {text!r}")


def read_csv(path: str | Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV as text. Raises ValueError when there is no header, when it lacks one of
    `columns`, or when a row is cut."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, restkey="_more")
        try:
            header, rows = reader.fieldnames, list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no CSV: {error}") from None
    if not header:
        raise ValueError(f"{path} has no header line")
    if twice := [name for name in dict.fromkeys(header) if list(header).count(name) > 1]:
        raise ValueError(f"{path}:1: twice the column {', '.join(twice)}")
    for number, row in enumerate(rows, 2):
        if "_more" in row or None in row.values():
            raise ValueError(f"{path}:{number} has not the {len(header)} columns that it names")
    if missing := [name for name in columns if name not in header]:
        raise ValueError(f"{path}:1: no column {', '.join(missing)}")
    return rows
