"""What must not leave the box, and how it is taken out: at capture, and once more over every file.

Placeholders are stable within a run (`<ip-1>` is the same address everywhere), so logs stay
readable; the mapping lives in memory only. Two nets: literal values known to be private on this box
(secret environment variables, names, addresses), wherever they were printed, and secrets by shape.
Best effort: look at a bundle before you post it.
"""

from __future__ import annotations

import base64
import bisect
import getpass
import html
import ipaddress
import json
import os
import re
import site
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from scripts.oneshot.record.shapes import LOWER, SHAPES, Shape, Span, is_opaque

RULES_VERSION = 6

ALLOWED_VARIABLES = re.compile(
    r"(NSA|CUDA|TORCH|PYTORCH|TRITON|FLASH|NCCL|OMP)_\w+|MAX_JOBS|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
)
SECRET_NAME = re.compile(r"(?i)KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|WEBHOOK")
_NOT_SECRET = frozenset(
    "PWD OLDPWD XDG_SESSION_TYPE XDG_SESSION_CLASS XDG_SESSION_DESKTOP SSH_AUTH_SOCK"
    " DESKTOP_SESSION SESSION_MANAGER TOKENIZERS_PARALLELISM".split()
)
# The value of such a variable is a secret even if it is a short word; that of SORT_KEY is none.
_SURELY_SECRET = re.compile(r"(?i)(?:PASS(?:WORD|WD|_?PHRASE|CODE)?|PWD|SECRET)S?$")
# A secret of LEAST to LONG - 1 characters is found neither inside of words nor in codes.
LEAST, LONG = 5, 8
_HOST_VARIABLES = (
    "HOSTNAME HOST RUNPOD_POD_ID RUNPOD_POD_HOSTNAME CONTAINER_ID VAST_CONTAINERLABEL"
    " POD_NAME NODE_NAME".split()
)
_ADDRESS_VARIABLES = ("SSH_CONNECTION", "SSH_CLIENT", "RUNPOD_PUBLIC_IP", "PUBLIC_IPADDR")
# Words too common to be taken for a name: replacing them would garble logs and hide nothing.
_COMMON = frozenset(
    "root user users home admin test tests runner ubuntu debian nobody python torch pytorch cuda"
    " triton nvidia localhost main docker default build github jovyan data work bench report gpu"
    " node host true false none kernel train model".split()
)

# Names of CPUs and GPUs, besides those of this box. A host may be called so; if its hardware's name
# were replaced, the box could be compared with nothing.
_HARDWARE = frozenset(
    "amd epyc ryzen threadripper intel xeon platinum gold silver bronze core atom pentium celeron"
    " processor arm cortex neoverse graviton altra apple nvidia geforce gtx rtx titan tesla quadro"
    " kepler maxwell pascal volta turing ampere ada lovelace hopper blackwell rubin grace vera"
    " spark thor orin jetson radeon instinct".split()
)
_CARD = re.compile(r"(?:gh|gb|gtx|rtx|[abhlptv])\d{1,4}[a-z]{0,3}")  # H100, L40S, GB200

# Where the words of records and reports come from: keys, statuses, headings, names of files.
_OWN_TEXTS = (("templates", "*.j2"), ("scripts/oneshot", "**/*.py"), ("bench", "*.py"))
# A known text, for which {} stands, counts only between these.
_AROUND = {
    "env_secret": (r"(?<![A-Za-z0-9])(){}(?![A-Za-z0-9])",),
    "host": (r"(?<![A-Za-z0-9])(){}(?![A-Za-z0-9])",),
    "user": (r"(?<![A-Za-z0-9])(){}(?![A-Za-z0-9])",),
    "path": (r"(?<![A-Za-z0-9_.-])(){}(?![A-Za-z0-9_])",),
    "ip": (r"(){}",),
}
# The same for a name or a secret that is also a word of ours, where it is meant after all.
_IS = r"'?[ \t]*[:= ][ \t]*[\"']?"
_NEAR = {
    "user": (
        rf"((?<![A-Za-z0-9])(?i:user(?:name)?|login|logname|account){_IS}){{}}(?![\w-])",
        r"(?<![\w.+-])(){}(?=@[\w<-])",
        r"((?<![\w.>~-])/(?:[\w.-]+/)*){}(?![\w-])",
    ),
    "host": (
        rf"((?<![A-Za-z0-9])(?i:host(?:name)?|node|server|pod){_IS}){{}}(?![\w-])",
        r"(@){}(?![\w-])",
    ),
}

# A password may hold "@", and "/" where a ":" that begins no port says that it is one. Without
# that, what stands behind "/" is the path, which may hold an "@" too: of what may be a host with
# its port, the "@" counts before what may be one itself, and no version.
URL_USERINFO = re.compile(
    r"\b([a-z][a-z0-9+.-]*://)(?:[^\s/:\"'<>\[]*:(?!\d{1,5}/)(?:[^\s\"'<>]|'(?=\w)){0,4096}@"
    r"|[^\s/\"'<>]+@"
    r"|(?!localhost:)[^\s/:.\"'<>\[]+:\d{1,5}/[^\s\"'<>]{0,4096}(?<!/)@(?=[a-z<]|\d+(?:\.\d+){3})"
    r"(?!sha\d|v\d))",
    re.IGNORECASE,
)
_URL_QUERY = re.compile(r"\b((?:https?|wss?|s3|gs)://[^\s\"'<>?#)]+)\?[^\s\"'<>)]+", re.IGNORECASE)
_SSH_REMOTE = re.compile(r"\b[A-Za-z0-9._-]+@([A-Za-z0-9.-]+\.[A-Za-z]{2,}):(?=[A-Za-z~])")
_SSH_GIT = re.compile(r"\bgit@(?=[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b)")  # everybody's account
_SMI_PROCESS = re.compile(
    r"^(\|\s+\d+\s+\S+\s+\S+\s+)\d+(\s+(?:C|G|C\+G|M\+C)\s+)(.*?)(\s+(?:\d+MiB|N/A)\s*\|)$", re.M
)
# Where a line was broken: by a terminal, a shell, base64, or as a string of JSON writes it.
_BREAK = re.compile(r"[ \t]*\\?\r?\n[ \t]*(?:[>|#][ \t]?)?|(?:\\r)?\\n")
HARMLESS_LENGTH, HARMLESS_NUMBER = 120, 50_000


def _is_path(text: str) -> bool:
    """Is `text` a path of this file system? A key in base64 may begin with "/" too."""
    first = text.split("/")[1] if text.startswith("/") else ""
    return bool(first) and os.path.isdir(f"/{first}")


@lru_cache(maxsize=1)
def _own_words() -> tuple[str, frozenset[str]]:
    """The words of our records and reports, as lines and cut into names.

    They are public, and a report in which `required` or `max` is replaced cannot be read any more.
    Comments and docstrings reach no report.
    """
    root = Path(__file__).resolve().parents[3]
    words: set[str] = set()
    for path in (path for folder, pattern in _OWN_TEXTS for path in (root / folder).glob(pattern)):
        with suppress(OSError):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                text = re.sub(r"^\s*#.*", "", text, flags=re.M)
                # A raw text is no docstring: it is a table, as in shapes.py.
                text = re.sub(r'(r""".*?""")|""".*?"""|#[^\n]*', r"\1", text, flags=re.S)
            words.update(re.findall(r"[A-Za-z_][\w./-]*", text))
    names = {n for word in words for cut in (r"\W+", r"[\W_]+") for n in re.split(cut, word)}
    names |= _own_hardware() | _HARDWARE
    return "\n".join(sorted(words)).lower(), frozenset(name.lower() for name in names)


def _own_hardware() -> set[str]:
    """The words of the names of this box's CPU and GPUs, as far as files tell them."""
    told = ""
    for path in (Path("/proc/cpuinfo"), *Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            told += path.read_text(encoding="utf-8", errors="replace")
    lines = re.findall(r"(?m)^(?:model name|Model)[ \t]*:(.*)", told)
    return {word for line in lines for cut in (r"\s+", r"\W+") for word in re.split(cut, line)}


def _forms(secret: str) -> set[str]:
    """How `secret` may be written, in lower case: plain, escaped, or in one of the usual codes."""
    data = secret.encode("utf-8", "surrogateescape")
    octets = [f"{byte:02x}" for byte in data]
    forms = {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], html.escape(secret)}
    forms |= {secret.replace("'", "'\"'\"'"), quote(data), quote(data, safe=""), quote_plus(data)}
    forms |= {quote(quote(data, safe="")), *(sep.join(octets) for sep in ("", " ", ":", "-"))}
    forms |= {sep + sep.join(octets) for sep in ("%", r"\x")}
    forms |= {"".join(rf"\u{ord(c):04x}" for c in secret), "".join(f"&#{ord(c)};" for c in secret)}
    forms |= {"".join(rf"\{byte:03o}" for byte in data)}
    forms |= {base64.b32encode(data).decode().rstrip("=")}
    for before in range(3):  # in base64, alone or in the middle of something
        whole = len(data) + before
        coded = base64.b64encode(b"\0" * before + data + b"\0" * (-whole % 3)).decode()
        coded = coded[(0, 2, 3)[before] : (whole * 4) // 3]  # what depends on the secret alone
        forms |= {coded, coded.translate({ord("+"): "-", ord("/"): "_"})}
    return {form.translate(LOWER) for form in forms if len(form) >= LONG}


def _is_findable(name: str, piece: str, whole: bool) -> bool:
    """Is `piece` of the secret variable `name`, or all of it, so distinct that it is searched for
    everywhere? `true`, 4096 or `basic` are not."""
    if piece.lower() in _COMMON or _is_path(piece):
        return False
    if len(piece) >= LONG or is_opaque(piece, LEAST):
        return True
    number = re.fullmatch(r"[-+]?[\d.,_]+", piece)
    return whole and len(piece) >= LEAST and not number and bool(_SURELY_SECRET.search(name))


def may_be_shown(name: str) -> bool:
    """May the value of the environment variable `name` stand in a bundle?"""
    return bool(ALLOWED_VARIABLES.fullmatch(name)) and not SECRET_NAME.search(name)


class Redactor:
    """Replaces private text by placeholders and counts what it replaced, by rule.

    A name or a secret that is a word of our own records (`USER=max`, `AUTH_MODE=required`) is
    replaced only where what stands before it says what it is.

    `keep` names categories left alone on the user's request: "host", "ip". Without `literals` only
    what has a private shape is found: for a bundle that was made on another box.
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, root: Path | None = None,
        keep: tuple[str, ...] = (), hostnames: tuple[str, ...] | None = None,
        user: str | None = None, home: str | None = None, literals: bool = True,
    ) -> None:  # fmt: skip
        self.keep = frozenset(keep)
        self.counts: Counter[str] = Counter()
        self._numbers: dict[tuple[str, str], str] = {}
        self._kinds: Counter[str] = Counter()
        self._known: set[str] = set()  # texts that are searched for
        self._secrets: dict[str, str] = {}  # form of a secret -> placeholder
        # (length, rule, pattern, replacement) of every other text
        self._patterns: list[tuple[int, str, re.Pattern[str], str]] = []
        self._harmless: set[str] = set()
        if not literals:
            return
        environ = os.environ if environ is None else environ
        for name, value in environ.items():
            if SECRET_NAME.search(name) and name not in _NOT_SECRET:
                for piece in {value, *re.split(r"[:@\s]", value)}:
                    if _is_findable(name, piece, piece == value):
                        self._add("env_secret", piece, self._placeholder("secret", piece), name)
        if "host" not in self.keep:
            if hostnames is None:
                hostnames = (socket.gethostname(), os.uname().nodename)
            for name in (*hostnames, *(environ.get(v, "") for v in _HOST_VARIABLES)):
                for piece in (name, name.split(".")[0]):
                    if len(piece) >= 4 and piece.lower() not in _COMMON:
                        self._add("host", piece, "<host>")
        if "ip" not in self.keep:
            for piece in " ".join(environ.get(v, "") for v in _ADDRESS_VARIABLES).split():
                if len(piece) >= 7:
                    self._add("ip", piece, self._placeholder("ip", piece))
        home = home or os.path.expanduser("~")
        sites = [p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))]
        sites += [*site.getsitepackages(), site.getusersitepackages()]
        paths = [(prefix, "<venv>") for prefix in sites]
        if root is not None:
            paths += [(str(root), "<repo>"), (os.path.realpath(root), "<repo>")]
        if len(home) > 4:
            paths += [(home, "~"), (os.path.realpath(home), "~")]
        for path, placeholder in paths:
            self._add("path", path.rstrip("/"), placeholder)
        names = {environ.get(v, "") for v in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
        if user is None:
            with suppress(Exception):  # no passwd entry in a container
                user = getpass.getuser()
        for name in {user or "", *names}:
            if len(name) >= 3 and name.lower() not in _COMMON:
                self._add("user", name, "<user>")
        self._patterns.sort(key=lambda one: -one[0])  # a long text may hold a short one

    def _add(self, rule: str, text: str, placeholder: str, variable: str = "") -> None:
        """Search for `text` from now on. variable: the name of the one that it is the value of."""
        if not text or text in self._known:
            return
        self._known.add(text)
        words, names = _own_words()
        inside = rule == "env_secret" and len(text) >= LONG
        ours = text.lower() in (words if inside else names)
        ours = ours or (rule in _NEAR and _CARD.fullmatch(text.lower()) is not None)
        if ours and rule in (*_NEAR, "env_secret"):
            named = rf"((?<![A-Za-z0-9]){re.escape(variable)}{_IS}){{}}"
            forms, around, length = {text}, _NEAR.get(rule, (named,)), 0
        elif inside:
            self._secrets.update(dict.fromkeys(_forms(text), placeholder))
            return
        else:
            forms = {text, json.dumps(text)[1:-1], quote(text, safe="")}
            around, length = _AROUND[rule], len(text)
        any_form = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        any_form = f"(?:{any_form})" if rule == "path" else f"(?i:{any_form})"
        for pattern in around:
            found = re.compile(pattern.replace("{}", any_form))
            self._patterns.append((length, rule, found, rf"\g<1>{placeholder}"))

    def _placeholder(self, kind: str, value: str) -> str:
        if kind == "ip":
            with suppress(ValueError):  # however it is written
                value = str(ipaddress.ip_address(value))
        if (kind, value) not in self._numbers:
            self._kinds[kind] += 1
            self._numbers[kind, value] = f"<{kind}-{self._kinds[kind]}>"
        return self._numbers[kind, value]

    def text(self, text: str) -> str:
        """`text` with everything private replaced."""
        if text in self._harmless:
            return text
        clean = self._text(text)
        if clean == text and len(text) <= HARMLESS_LENGTH and len(self._harmless) < HARMLESS_NUMBER:
            self._harmless.add(text)  # records say the same words again and again
        return clean

    def _text(self, text: str) -> str:
        if "://" in text:  # before a placeholder is in the middle of it
            text = self._sub("url", URL_USERINFO, r"\1", text)
            text = self._sub("url", _URL_QUERY, r"\1", text)
        text = self._known_secrets(text)
        if breaks := [match.span() for match in _BREAK.finditer(text)]:
            text = self._known_secrets(text, breaks)
        for _, rule, pattern, replacement in self._patterns:
            text = self._sub(rule, pattern, replacement, text)
        if "@" in text:
            text = self._sub("url", _SSH_REMOTE, r"\1/", text)
            text = self._sub("url", _SSH_GIT, "", text)
        folded = text.translate(LOWER)
        for shape in SHAPES:
            needed = not shape.needs or any(map(folded.__contains__, shape.needs))
            if needed and shape.rule not in self.keep and (spans := sorted(shape.find(text))):
                text = self._replace(text, shape, spans)
                folded = text.translate(LOWER)
        process = lambda m: f"{m[1]}<pid>{m[2]}{'<process>'.ljust(len(m[3]))}{m[4]}"
        return self._sub("process", _SMI_PROCESS, process, text)

    def _known_secrets(self, text: str, breaks: Sequence[Span] = ()) -> str:
        """Replace the values of secret variables, in any case and encoded, in `text` as if its
        `breaks` were not there."""
        # (index among the characters that are left, index in `text`) of what stands after a break.
        starts, parts, at = [(0, 0)], [], 0
        for begin, end in breaks:
            parts.append(text[at:begin])
            starts.append((starts[-1][0] + begin - at, end))
            at = end
        folded = "".join([*parts, text[at:]]).translate(LOWER)

        def origin(index: int) -> int:
            """Where the character at `index` of `folded` stands in `text`."""
            left, first = starts[bisect.bisect_right(starts, (index, sys.maxsize)) - 1]
            return first + index - left

        hits = []
        for form, placeholder in self._secrets.items():
            if form in folded:
                hits += [(*m.span(), placeholder) for m in re.finditer(re.escape(form), folded)]
        first = len(folded)
        for begin, end, placeholder in sorted(hits, reverse=True):
            if end <= first:  # the forms of a secret may overlap
                text = text[: origin(begin)] + placeholder + text[origin(end - 1) + 1 :]
                self.counts["env_secret"] += 1
                first = begin
        return text

    def _replace(self, text: str, shape: Shape, spans: list[Span]) -> str:
        parts, at = [], 0
        for begin, end in spans:
            if begin >= at:
                self.counts[shape.rule] += 1
                placeholder = shape.placeholder
                if placeholder.isalpha():
                    placeholder = self._placeholder(placeholder, text[begin:end])
                parts += [text[at:begin], placeholder]
                at = end
        return "".join([*parts, text[at:]])

    def _sub(self, rule: str, pattern: re.Pattern[str], to: Any, text: str) -> str:
        text, n = pattern.subn(to, text)
        if n:
            self.counts[rule] += n
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it redacted, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(k)): self.value(v) for k, v in value.items()}
        return [self.value(v) for v in value] if isinstance(value, (list, tuple)) else value

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that may be shown, values redacted."""
        return {n: self.text(value) for n, value in sorted(environ.items()) if may_be_shown(n)}
