"""A stage's stdout and stderr as a log file: capped, plain text, redacted line by line."""

from __future__ import annotations

import codecs
import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scripts.oneshot.record.redact import Redactor

LOG_CAP_BYTES = 2 * 1024 * 1024
LINE_CAP = 8192
# CSI, OSC and two-byte escape sequences.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NEWLINE = re.compile(r"\r\n|\n|\r")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")


def plain(text: str) -> str:
    """`text` without terminal escapes and control characters."""
    return _CONTROL.sub("\ufffd", _ANSI.sub("", text))


class StageLog:
    """Keeps the head and the tail of an endless output. Bytes in, lines on disk."""

    def __init__(
        self, path: Path, redactor: Redactor, cap_bytes: int = LOG_CAP_BYTES,
        echo: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.path, self._redactor, self._echo = path, redactor, echo
        self.recent: deque[str] = deque(maxlen=300)
        self._tail: deque[str] = deque()
        self._head_left = self._tail_cap = cap_bytes // 2
        self._tail_bytes = self._left_out = self.lost_to_disk = 0
        self._pem_lines = 0  # lines that may still belong to a PEM block
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""  # the unfinished line
        self._cut = 0  # characters left out of its middle
        self._file = None
        self._stat = os.stat_result([0] * 10)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                path.unlink()  # a pipe would wait for a reader
            self._file = open(path, "w", encoding="utf-8", errors="replace", newline="\n")

    def feed(self, data: bytes) -> None:
        *lines, rest = _NEWLINE.split(self._decoder.decode(data))
        for part in lines:
            self._extend(part)
            self._finish_line()
        self._extend(rest)

    def _extend(self, text: str) -> None:
        self._partial += text
        if (over := len(self._partial) - LINE_CAP) > 0:
            self._cut += over
            self._partial = self._partial[: LINE_CAP // 2] + self._partial[LINE_CAP // 2 + over :]

    def _finish_line(self) -> None:
        line = self._partial
        if self._cut:
            # The cut may run through a secret: give up what touches it, up to a blank.
            head = re.sub(r"\S{0,256}\Z", "", line[: LINE_CAP // 2])
            tail = re.sub(r"\A\S{0,256}", "", line[LINE_CAP // 2 :])
            line = f"{head} [... {self._cut} characters left out ...] {tail}"
        self._partial, self._cut = "", 0
        self._write_line(plain(line))

    def _write_line(self, line: str) -> None:
        if self._pem_lines:  # the body of a key has no shape of its own
            self._pem_lines = 0 if "-----END " in line else self._pem_lines - 1
            return
        if "-----BEGIN " in line and "-----END " not in line:
            self._pem_lines = 200
        self.recent.append(line)
        if self._echo:
            self._echo(self._redactor.text(line))
        size = len(line) + 1
        if self._head_left > 0:
            self._head_left -= size
            self._put(self._redactor.text(line) + "\n")
            return
        self._tail.append(line)
        self._tail_bytes += size
        while self._tail_bytes > self._tail_cap and len(self._tail) > 1:
            self._tail_bytes -= len(self._tail.popleft()) + 1
            self._left_out += 1

    def _put(self, text: str) -> None:
        if self._file is not None and not self.lost_to_disk:  # what is freed is for the verdict
            with suppress(OSError):
                self._file.write(text)
                self._file.flush()
                return
        self.lost_to_disk += 1

    def note(self, text: str) -> None:
        if self._partial:
            self._finish_line()
        self._write_line(f"[supervisor] {text}")

    def close(self) -> None:
        if self._partial:
            self._finish_line()
        if self._left_out:
            self._put(f"[... {self._left_out} lines left out ...]\n")
        for line in self._tail:
            self._put(self._redactor.text(line) + "\n")
        self._tail.clear()
        if self._file is not None:
            with suppress(OSError):
                self._stat = os.fstat(self._file.fileno())
                self._file.close()

    def lost(self) -> str | None:
        """What of the output cannot be read in the file any more, as a sentence; None: all can."""
        if self.lost_to_disk:
            return f"{self.lost_to_disk} lines could not be written to {self.path.name}"
        with suppress(OSError):
            if os.path.samestat(self._stat, os.lstat(self.path)):
                return None
        return f"{self.path.name} was removed or replaced while it ran"

    def uncaught_error(self) -> str | None:
        """The last line of the last Python traceback in the output, if there is one."""
        found = None
        for line in self.recent:
            if line.startswith("Traceback (most recent call last)"):
                found = ""
            elif found == "" and _ERROR_LINE.match(line):
                found = self._redactor.text(line)[:500]
        return "an uncaught Python exception" if found == "" else found


# kind -> what the output of a stage says when that is the cause; the first match names it
CAUSES = {
    "GPU_LOST": r"GPU is lost|fallen off the bus|ERROR_GPU_IS_LOST",
    "OOM_DEVICE": r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
    "CUDA_FAULT": r"illegal memory access|misaligned address|illegal instruction was encountered"
    r"|unspecified launch failure|hardware stack error",
    "NO_SPACE": r"No space left on device|Errno 28",
    "DRIVER_TOO_OLD": r"driver (?:on your system is too old|version is insufficient)",
    "NO_GPU": r"No CUDA GPUs are available|Found no NVIDIA driver",
    "COMPILE_ERROR": r"CompilationError|PTXASError|ptxas fatal|OutOfResources|PassManager::run",
    "IMPORT_ERROR": r"ModuleNotFoundError|ImportError|undefined symbol",
    "OOM_HOST": r"(?m)^MemoryError|Cannot allocate memory",
    "ASSERT": r"AssertionError|device-side assert",
}


def cause_of(lines: list[str]) -> str | None:
    """The typed cause that the last lines of an output speak of, or None."""
    text = "\n".join(lines)
    return next((kind for kind, pattern in CAUSES.items() if re.search(pattern, text)), None)
