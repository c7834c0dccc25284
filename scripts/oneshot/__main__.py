"""Verbs of the report runner.

    python -m scripts.oneshot doctor                      what this box lacks, one fix each
    python -m scripts.oneshot run [out_dir] --profile standard
    python -m scripts.oneshot render BUNDLE               report.md again, from events.jsonl alone
    python -m scripts.oneshot compare A B                 two bundles (folders or .tgz)
    python -m scripts.oneshot verify BUNDLE               check sums, rules and secrets of a bundle
    python -m scripts.oneshot trend BUNDLE_OR_DIR...      score and times of many runs, by date
    python -m scripts.oneshot export BUNDLE --trace OUT   its rows as traces of flashinfer-bench
    python -m scripts.oneshot attach [out_dir]            follow a running or detached run

Exit codes of `run`: 0 all required stages passed; 1 a check failed; 2 usage; 3 a required stage
could not run (no GPU, unfit box, or no time left of its budget), or nothing was proven;
4 infrastructure (timeout, crash, out of memory, no space);
5 only invalid or unstable results; 6 redaction failed, nothing packed; 75 another run holds the GPU
or the folder; 130/143 stopped by SIGINT/SIGTERM after saving what was there; what else would end a
process (SIGQUIT, SIGXCPU, SIGUSR1) counts as SIGTERM. SIGHUP stops nothing.
Every other verb ends with 4 where a file cannot be read or written, and with 130 after SIGINT.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from scripts.oneshot import streams

# Each verb's module, below this package, has main(argv: list[str]) -> int.
VERBS = {
    "doctor": "box.doctor", "run": "run.runner", "render": "report.render",
    "compare": "compare.compare", "verify": "compare.verify", "trend": "compare.trend",
    "export": "compare.export", "attach": "run.attach",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "no help: PYTHONOPTIMIZE=2 strips it").strip())
        return 0 if argv else 2
    if argv[0] not in VERBS:
        print(f"unknown verb {argv[0]!r}; one of: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    verb = importlib.import_module(f"scripts.oneshot.{VERBS[argv[0]]}").main
    if argv[0] == "run":  # it goes on, whatever becomes of its streams
        return verb(argv[1:])
    from scripts.oneshot.record.judge import EXIT_INFRA  # what the box does not let a verb do

    try:
        code = verb(argv[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return EXIT_INFRA
    except OSError as error:
        names = [str(name) for name in (error.filename2 or error.filename,) if name]
        streams.say(": ".join([argv[0], *names, error.strerror or str(error)]))
        return EXIT_INFRA


def _stopped(number: int, _frame: object) -> None:
    """Before the run's own handlers are there nothing is written that would have to be kept."""
    os.write(2, f"stopped by {signal.Signals(number).name} before anything ran\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    streams.open_standard_streams()
    if sys.argv[1:2] == ["run"]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stopped)
    streams.leave_by(main)
