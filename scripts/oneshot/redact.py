"""What must not leave the box, and how it is taken out: at capture, and once more over every file.

Placeholders are stable within a run (`<ip-1>` is the same address everywhere), so logs stay
readable; the mapping lives in memory only. Two nets: literal values known to be private on this box
(secret environment variables, names, addresses), wherever they were printed, and secrets by shape.
Best effort: look at a bundle before you post it.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

RULES_VERSION = 3

ALLOWED_VARIABLES = re.compile(
    r"(NSA|CUDA|TORCH|PYTORCH|TRITON|FLASH|NCCL|OMP)_\w+|MAX_JOBS|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
)
SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|WEBHOOK", re.IGNORECASE
)
_NOT_SECRET = frozenset(
    "PWD OLDPWD XDG_SESSION_TYPE XDG_SESSION_CLASS XDG_SESSION_DESKTOP SSH_AUTH_SOCK"
    " DESKTOP_SESSION SESSION_MANAGER TOKENIZERS_PARALLELISM".split()
)
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

# Where the words of records and reports come from: keys, statuses, headings, names of files.
_OWN_TEXTS = (("templates", "*.j2"), ("scripts/oneshot", "*.py"), ("bench", "*.py"))
# What stands around a name or a secret that is also a word of ours, where it is meant after all.
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

# Prefixes so distinct that they count inside a word too.
_DISTINCT = (
    r"gh[oprsu]_[A-Za-z0-9]{30,}",
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"glpat-[A-Za-z0-9_-]{16,}",
)
_TOKENS = (
    r"hf_[A-Za-z0-9]{20,}",
    r"sk-[A-Za-z0-9_-]{16,}",
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"rpa_[A-Za-z0-9]{16,}",
    r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])",
    r"AIza[A-Za-z0-9_-]{35}",
    r"xox[a-z]-[A-Za-z0-9-]{10,}",
    r"pypi-[A-Za-z0-9_-]{16,}",
    r"npm_[A-Za-z0-9]{20,}",
    r"gsk_[A-Za-z0-9]{20,}",
    r"r8_[A-Za-z0-9]{20,}",
    r"nvapi-[A-Za-z0-9_-]{20,}",
    r"dckr_[a-z]{2,4}_[A-Za-z0-9_-]{16,}",
    r"ya29\.[A-Za-z0-9_-]{16,}",
    r"dop_v1_[a-f0-9]{32,}",
    r"a[ks]-[A-Za-z0-9]{22}(?![A-Za-z0-9])",
    r"eyJ[A-Za-z0-9_-]{5,}\.eyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?",
)
_QUOTE = r"[\"']?"
_SECRET_WORD = (
    r"(?:password|passwd|passphrase|secret|(?:api|access|account|secret|private)[_-]?key"
    r"|(?:access|auth|api)[_-]token)"
)
# (rule, pattern). Of a pattern with a group only the group is replaced. `(?!<)`: not a placeholder.
SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("pem", re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.S)),
    ("token", re.compile("|".join(_DISTINCT))),
    ("token", re.compile(rf"(?<![A-Za-z0-9_+-])(?:{'|'.join(_TOKENS)})")),
    (
        "auth",
        re.compile(
            rf"(?i)\b(?:proxy-)?authorization{_QUOTE}\s*[:=]\s*{_QUOTE}"
            r"((?:(?:bearer|basic|token|digest)\s+)?(?!<)(?:(?!</)[^\s\"',;]){4,})"
        ),
    ),
    ("auth", re.compile(r"(?i)\bbearer\s+((?!<)[A-Za-z0-9._~+/=-]{12,})")),
    (
        "key",
        re.compile(
            r"(?i)\b(?:wandb[ \t]+login(?:[ \t]+--?\w+)*|(?:wandb|api|key)\w*)"
            rf"{_QUOTE}[ \t:=]{{1,4}}{_QUOTE}([0-9a-f]{{40}})(?![0-9a-f])"
        ),
    ),
    (
        "password",
        re.compile(
            rf"(?i){_SECRET_WORD}{_QUOTE}\s*[:=]\s*{_QUOTE}"
            r"((?!<|\d+(?:\.\d+)?\b|None\b|null\b)(?:(?!</)[^\s\"',;&]){6,})"
        ),
    ),
    (
        "password",  # as an option of a command
        re.compile(
            rf"(?i)(?<![\w-])--?(?:[a-z]+-)*(?:token|{_SECRET_WORD}){_QUOTE}(?:=|[ \t]+){_QUOTE}"
            r"((?!<|&lt;|-|None\b|null\b)(?:(?!</)[^\s\"',;&]){4,})"
        ),
    ),
    (
        "cookie",
        re.compile(
            rf"(?i)\b(?:set-)?cookie{_QUOTE}\s*:\s*{_QUOTE}"
            r"([^\s=;,\"'<&]+=(?:(?!</)[^\r\n\"'])+)"
        ),
    ),
    # As a shell writes it, however short.
    ("password", re.compile(rf"(?i){_SECRET_WORD}=((?!<|None\b|null\b)[^\s\"',;&<>]+)")),
    (
        "webhook",
        re.compile(
            r"https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/[^\s\"'<>]+"
        ),
    ),
)

_URL_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@", re.IGNORECASE)
_URL_QUERY = re.compile(r"\b((?:https?|wss?|s3|gs)://[^\s\"'<>?#)]+)\?[^\s\"'<>)]+", re.IGNORECASE)
_SSH_REMOTE = re.compile(r"\b[A-Za-z0-9._-]+@([A-Za-z0-9.-]+\.[A-Za-z]{2,}):(?=[A-Za-z~])")
_SSH_GIT = re.compile(r"\bgit@(?=[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b)")  # everybody's account
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b")
_MAC = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![0-9A-Fa-f:])")
# Not a version: after "==" or "-cu", inside "lib.so.1.2.3.4", or in the name of a wheel.
_IPV4 = re.compile(
    r"(?<![\w.])(?<!==)(?<!-cu)(\d{1,3}(?:\.\d{1,3}){3})(?!\w|\.\d|-py|\.dist-info|\.whl)"
)
# What stands before a version of four parts. Not NCCL's or CUDA's: theirs have three, and logs of
# NCCL are full of addresses.
_LIBRARY = re.compile(
    r"(?i)(?<![a-z])(?:version|cudnn|cublas(?:lt)?|cufft|curand|cusolver|cusparse(?:lt)?|cupti"
    r"|nvrtc|nvjitlink|nvtx|tensorrt)(?:[-_]cu\d+)?[\"']?[ \t]*[:=]{0,2}[ \t]*[\"']?v?$"
)
_IPV6 = re.compile(r"(?<![\w:.])([0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])")
# What is in use; `a::b` of a program and the step of a slice are not.
_IPV6_NETS = [
    ipaddress.IPv6Network(net)
    for net in ("2000::/3", "64:ff9b::/32", "fc00::/7", "fe80::/10", "ff00::/8")
]
_GPU_UUID = re.compile(
    r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?![\w]))", re.IGNORECASE
)
_PCI = re.compile(r"\b(?:[0-9A-Fa-f]{4}){1,2}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b")
# A short one looks like a time, so it must be called by its name.
_PCI_NAMED = re.compile(
    r"(?i)\bPCI[ :=_-]*(?:(?:bus|id|slot|device|address)[ :=_-]*)*"
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)\b"
)
_BOARD = re.compile(
    rf"(?i)\b((?:serial(?:[ _]number)?|board[ _]id|(?:board|gpu)[ _]part[ _]number){_QUOTE}"
    rf"\s*[:=]\s*{_QUOTE})(?!<|&lt;|N/A|None\b|null\b)[^\s\"',;}}\]]+"
)
_SMI_PROCESS = re.compile(
    r"^(\|\s+\d+\s+\S+\s+\S+\s+)\d+(\s+(?:C|G|C\+G|M\+C)\s+)(.*?)(\s+(?:\d+MiB|N/A)\s*\|)$", re.M
)
_HOME = re.compile(
    r"(?:(?<![\w/:.-])(?:/[\w.-]+){1,2})?/(?:home|homes|Users|users)/(?!<)[A-Za-z0-9._-]+"
)


def _is_path(text: str) -> bool:
    """Is `text` a path of this file system? A key in base64 may begin with "/" too."""
    first = text.split("/")[1] if text.startswith("/") else ""
    return bool(first) and os.path.isdir(f"/{first}")


def _site_prefixes() -> list[str]:
    import site
    import sys

    found = {p for p in [*site.getsitepackages(), site.getusersitepackages()] if p}
    found |= {p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))}
    return sorted(found, key=len, reverse=True)


@lru_cache(maxsize=1)
def _own_words() -> tuple[str, frozenset[str]]:
    """The words of our records and reports, as lines and cut into names.

    They are public, and a report in which `required` or `max` is replaced cannot be read any more.
    Comments and docstrings reach no report.
    """
    root = Path(__file__).resolve().parent.parent.parent
    words: set[str] = set()
    for folder, pattern in _OWN_TEXTS:
        for path in (root / folder).glob(pattern):
            with suppress(OSError):
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".py":
                    text = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.S)
                words.update(re.findall(r"[A-Za-z_][\w./-]*", text))
    names = {name for word in words for name in re.split(r"\W+", word)}
    return "\n".join(sorted(words)), frozenset(names)


def _is_own(rule: str, text: str) -> bool:
    """Would replacing `text` garble words of our own? A secret is found inside of words too."""
    words, names = _own_words()
    if rule == "env_secret":
        return text in words
    return rule in _NEAR and text in names


class Redactor:
    """Replaces private text by placeholders and counts what it replaced, by rule.

    A name or a secret that is a word of our own records (`USER=max`, `AUTH_MODE=required`) is
    replaced only where what stands before it says what it is.

    `keep` names categories left alone on the user's request: "host", "ip". Without `literals` only
    what has a private shape is found: for a bundle that was made on another box.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        root: Path | None = None,
        keep: tuple[str, ...] = (),
        hostnames: tuple[str, ...] | None = None,
        user: str | None = None,
        home: str | None = None,
        literals: bool = True,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.keep = frozenset(keep)
        self.counts: Counter[str] = Counter()
        self._numbers: dict[tuple[str, str], str] = {}
        self._kinds: Counter[str] = Counter()
        self._literals: dict[str, tuple[str, str]] = {}  # text -> (rule, placeholder)
        self._near: list[tuple[str, re.Pattern[str], str]] = []  # rule, pattern, replacement
        for name, value in environ.items():
            if SECRET_NAME.search(name) and name not in _NOT_SECRET:
                for piece in {value, *re.split(r"[:@\s]", value)}:
                    if len(piece) >= 8 and piece.lower() not in _COMMON and not _is_path(piece):
                        self._add("env_secret", piece, self._placeholder("secret", piece), name)
        if "host" not in self.keep:
            if hostnames is None:
                hostnames = (socket.gethostname(), os.uname().nodename)
            for name in (*hostnames, *(environ.get(v, "") for v in _HOST_VARIABLES)):
                for piece in (name, name.split(".")[0]):
                    if len(piece) >= 4 and piece.lower() not in _COMMON:
                        self._add("host", piece, "<host>")
        if "ip" not in self.keep:
            for variable in _ADDRESS_VARIABLES:
                for piece in environ.get(variable, "").split():
                    if len(piece) >= 7:
                        self._add("ip", piece, self._placeholder("ip", piece))
        home = home or os.path.expanduser("~")
        paths = [(prefix, "<venv>") for prefix in _site_prefixes()]
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
        if not literals:
            self._literals.clear()
            self._near.clear()
        self._compile()

    def _add(self, rule: str, text: str, placeholder: str, variable: str = "") -> None:
        """Search for `text` from now on. variable: the name of the one that it is the value of."""
        if not text or text in self._literals:
            return
        if not _is_own(rule, text):
            self._literals[text] = (rule, placeholder)
            return
        named = rf"((?<![A-Za-z0-9]){re.escape(variable)}{_IS}){{}}"
        for pattern in _NEAR.get(rule, (named,)):
            found = re.compile(pattern.replace("{}", re.escape(text)))
            self._near.append((rule, found, rf"\g<1>{placeholder}"))

    def _compile(self) -> None:
        forms: dict[str, tuple[str, str]] = {}
        for text, hit in self._literals.items():
            escaped = json.dumps(text)[1:-1]
            for form in (text, escaped, quote(text, safe="")):
                forms.setdefault(form, hit)
        self._forms = forms
        parts = []
        for form in sorted(forms, key=len, reverse=True):
            rule = forms[form][0]
            pattern = re.escape(form)
            if rule in ("host", "user"):
                pattern = rf"(?<![A-Za-z0-9_]){pattern}(?![A-Za-z0-9_])"
            elif rule == "path":
                pattern = rf"(?<![A-Za-z0-9_.-]){pattern}(?![A-Za-z0-9_])"
            parts.append(pattern)
        self._literal_pattern = re.compile("|".join(parts)) if parts else None

    def _placeholder(self, kind: str, value: str) -> str:
        if (kind, value) not in self._numbers:
            self._kinds[kind] += 1
            self._numbers[kind, value] = f"<{kind}-{self._kinds[kind]}>"
        return self._numbers[kind, value]

    # ------------------------------------------------------------------ text

    def text(self, text: str) -> str:
        """`text` with everything private replaced."""

        def numbered(rule: str, kind: str) -> Callable[[re.Match[str]], str]:
            def replace(match: re.Match[str]) -> str:
                whole = match.group(0)
                inner = match.group(1) if match.re.groups else whole
                self.counts[rule] += 1
                return whole.replace(inner, self._placeholder(kind, inner))

            return replace

        if "://" in text:  # before a placeholder is in the middle of it
            text = self._sub("url", _URL_USERINFO, r"\1", text)
            text = self._sub("url", _URL_QUERY, r"\1", text)
        if self._literal_pattern is not None:

            def literal(match: re.Match[str]) -> str:
                rule, placeholder = self._forms[match.group(0)]
                self.counts[rule] += 1
                return placeholder

            text = self._literal_pattern.sub(literal, text)
        for rule, pattern, replacement in self._near:
            text = self._sub(rule, pattern, replacement, text)
        for rule, pattern in SHAPES:
            text = pattern.sub(numbered(rule, "secret"), text)
        if "@" in text:
            text = self._sub("url", _SSH_REMOTE, r"\1/", text)
            text = self._sub("url", _SSH_GIT, "", text)
            text = _EMAIL.sub(numbered("email", "email"), text)
        text = self._sub("path", _HOME, "~", text)
        text = self._sub("process", _SMI_PROCESS, self._smi_process, text)
        text = self._sub("board", _BOARD, r"\1<board>", text)
        text = _GPU_UUID.sub(numbered("gpu", "gpu"), text)
        text = _PCI.sub(numbered("pci", "pci"), text)
        text = _PCI_NAMED.sub(numbered("pci", "pci"), text)
        text = _MAC.sub(numbered("mac", "mac"), text)
        if "ip" not in self.keep:
            text = _IPV4.sub(self._ipv4, text)
            text = _IPV6.sub(self._ipv6, text)
        return text

    def _sub(self, rule: str, pattern: re.Pattern[str], to: Any, text: str) -> str:
        text, n = pattern.subn(to, text)
        if n:
            self.counts[rule] += n
        return text

    @staticmethod
    def _smi_process(match: re.Match[str]) -> str:
        before, kind, name, after = match.groups()
        return f"{before}<pid>{kind}{'<process>'.ljust(len(name))}{after}"

    def _ipv4(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.IPv4Address(match.group(1))
        except ValueError:
            return match.group(0)  # a part over 255: a version
        before = match.string[max(0, match.start() - 40) : match.start()]
        if address.is_loopback or address.is_unspecified or _LIBRARY.search(before):
            return match.group(0)
        self.counts["ip"] += 1
        return self._placeholder("ip", str(address))

    def _ipv6(self, match: re.Match[str]) -> str:
        text = match.group(1)
        for found in (text, text[:-1] if text.endswith(":") else ""):  # a colon of the sentence
            with suppress(ValueError):
                address = ipaddress.IPv6Address(found)
                if any(address in net for net in _IPV6_NETS) or found.count(":") == 7:
                    self.counts["ip"] += 1
                    return self._placeholder("ip", str(address)) + text[len(found) :]
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it redacted, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(k)): self.value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(v) for v in value]
        return value

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that may be shown, values redacted."""
        return {
            name: self.text(value)
            for name, value in sorted(environ.items())
            if ALLOWED_VARIABLES.fullmatch(name) and not SECRET_NAME.search(name)
        }


# ---------------------------------------------------------------------------------- the last gate

_PICTURES = {".png": b"\x89PNG\r\n\x1a\n"}
_MARKUP = (".html", ".htm", ".svg", ".xml")
_PLACEHOLDER = re.compile(
    r"<((?:secret|email|gpu|pci|mac|ip)-\d+|user|host|venv|repo|board|pid|process)>"
)


def gate(folder: Path, redactor: Redactor) -> dict[str, Any]:
    """Clean every file and file name under `folder`, then look again.

    Returns {"gate": "clean"|"failed", "findings": [{rule, file, line, count}], "removed": [...]}.
    A file that is neither UTF-8 text nor a known picture is removed: nobody can vouch for it.
    An earlier run with check sums passed its own gate and is left as it was sealed.
    """
    findings: list[dict[str, Any]] = []
    removed: list[str] = []
    for path in sorted(_unsealed(folder), key=lambda p: -len(p.parts)):
        if path.is_symlink():
            path.unlink()
            removed.append(redactor.text(path.name))
            continue
        if path.is_file():
            _clean_file(path, folder, redactor, findings, removed)
        safe = _safe_name(path.name, redactor)
        if safe != path.name and path.exists():
            findings.append({"rule": "name", "file": safe, "line": 0, "count": 1})
            path.rename(_free_name(path.with_name(safe)))
    still = list(_hits(folder, redactor))
    for file, rule in still:
        findings.append({"rule": rule, "file": file, "line": None, "count": 1})
    return {"gate": "failed" if still else "clean", "findings": findings, "removed": removed}


def _unsealed(folder: Path) -> list[Path]:
    """Everything under `folder` but prev/<run id> of runs that were sealed by their check sums."""
    sealed = {sums.parent for sums in folder.glob("prev/*/SHA256SUMS")}
    return sorted(
        path for path in folder.rglob("*") if path not in sealed and sealed.isdisjoint(path.parents)
    )


def _safe_name(name: str, redactor: Redactor) -> str:
    """`name` without anything private, and so that it stays when it is looked at again."""
    for _ in range(8):  # what is left of a placeholder may look like an address with its neighbours
        clean = redactor.text(name)
        if clean == name:
            return name
        name = re.sub(r"[<>]", "", clean)
    return "private" + Path(name).suffix[:8]


def _free_name(path: Path) -> Path:
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate


def _decode(path: Path) -> str | None:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _clean_file(
    path: Path, folder: Path, redactor: Redactor, findings: list[dict[str, Any]], removed: list[str]
) -> None:
    name = redactor.text(path.relative_to(folder).as_posix())
    text = _decode(path)
    if text is None:
        magic = _PICTURES.get(path.suffix)
        if magic is None or path.read_bytes()[: len(magic)] != magic:
            path.unlink()
            removed.append(name)
        return
    before = Counter(redactor.counts)
    clean = redactor.text(text)
    if path.suffix in _MARKUP:  # there a bare placeholder would be a tag
        clean = _PLACEHOLDER.sub(r"&lt;\1&gt;", clean)
    if clean == text:
        return
    for number, line in enumerate(text.split("\n"), 1):
        at = Counter(redactor.counts)
        redactor.text(line)
        for rule, count in (Counter(redactor.counts) - at).items():
            if len(findings) < 500:
                findings.append({"rule": rule, "file": name, "line": number, "count": count})
        redactor.counts = at  # counted once, over the whole file
    redactor.counts = Counter(redactor.counts)
    if not Counter(redactor.counts) - before:
        redactor.counts["other"] += 1
    from scripts.oneshot.journal import write_atomic

    write_atomic(path, clean)


def _hits(folder: Path, redactor: Redactor) -> list[tuple[str, str]]:
    """(file, rule) of everything private that is still there; counts are left as they were."""
    kept = Counter(redactor.counts)
    out = []
    for path in _unsealed(folder):
        name = path.relative_to(folder).as_posix()
        text = _decode(path) if path.is_file() else ""
        for subject in (name, text or ""):
            before = Counter(redactor.counts)
            if redactor.text(subject) != subject:
                rules = (Counter(redactor.counts) - before) or Counter({"other": 1})
                out += [(redactor.text(name), rule) for rule in rules]
    redactor.counts = kept
    return out
