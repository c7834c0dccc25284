"""What a private text looks like; and the shapes of names, boxes, addresses and hardware."""

from __future__ import annotations

import ipaddress
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

Span = tuple[int, int]
Find = Callable[[str], Iterator[Span]]
LOWER = {ord(c): c.lower() for c in string.ascii_uppercase}

# What stands where a secret would, and is none: a placeholder, a variable, a type, nothing.
NO_SECRET = re.compile(
    r"(?i)<|&lt\b|\$|\{|\(|\*{3}|\.{3}|%[sd(]|(?:none|null|nil|true|false|yes|no|str|bytes|int|bool"
    r"|float|optional|required|string)\b(?![-.!@#])"
)
AFTER = r"[ \t][^\n|;]{0,200}?(?<!\S)"  # a program and some of its arguments


@dataclass(frozen=True)
class Shape:
    """One kind of private text.

    placeholder: what takes its place; the name of a kind, without brackets, is numbered.
    needs: in lower case; a text that holds none of these is not searched. find: spans in a text.
    """

    rule: str
    placeholder: str
    needs: tuple[str, ...]
    find: Find

    def may_be_in(self, folded: str) -> bool:
        """folded: the text in lower case."""
        return not self.needs or any(map(folded.__contains__, self.needs))


def shapes(rule: str, placeholder: str, *rows: tuple[str, str]) -> list[Shape]:
    """Shapes of (needs, pattern). Of a pattern with groups, what the groups hold is private, but
    for what stands where a secret would, and is none."""

    def finder(pattern: re.Pattern[str]) -> Find:
        def find(text: str) -> Iterator[Span]:
            for match in pattern.finditer(text):
                if not pattern.groups:
                    yield match.span()
                for group in range(1, pattern.groups + 1):
                    if match.start(group) >= 0 and not NO_SECRET.match(match[group]):
                        yield match.span(group)

        return find

    return [Shape(rule, placeholder, tuple(n.split()), finder(re.compile(p))) for n, p in rows]


# Not a version: after "==" or "-cu", inside "lib.so.1.2.3.4", or in the name of a wheel.
_IPV4 = re.compile(
    r"(?<![A-Za-z0-9.])(?<!==)(?<!-cu)(\d{1,3}(?:\.\d{1,3}){3})"
    r"(?![A-Za-z0-9]|\.\d|-py|\.dist-info|\.whl)"
)
# What stands before a version of four parts. Not NCCL's or CUDA's: theirs have three, and logs of
# NCCL are full of addresses.
_LIBRARY = re.compile(
    r"(?i)(?<![a-z])(?:version|cudnn|cublas(?:lt)?|cufft|curand|cusolver|cusparse(?:lt)?|cupti"
    r"|nvrtc|nvjitlink|nvtx|tensorrt)(?:[-_]cu\d+)?[\"']?[ \t]*[:=_]{0,2}[ \t]*[\"']?v?$"
)
_IPV6 = re.compile(r"(?<![\w:.])([0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])")
# What is in use; `a::b` of a program and the step of a slice are not.
_IPV6_NETS = [
    ipaddress.IPv6Network(net)
    for net in ("2000::/3", "64:ff9b::/32", "fc00::/7", "fe80::/10", "ff00::/8")
]


def _ipv4(text: str) -> Iterator[Span]:
    for match in _IPV4.finditer(text):
        with suppress(ValueError):  # a part over 255: a version
            address = ipaddress.IPv4Address(match[1])
            before = text[max(0, match.start() - 40) : match.start()]
            if not (address.is_loopback or address.is_unspecified or _LIBRARY.search(before)):
                yield match.span()


def _ipv6(text: str) -> Iterator[Span]:
    for match in _IPV6.finditer(text):
        for end in (match.end(), match.end() - match[1].endswith(":")):  # a colon of the sentence
            found = text[match.start() : end]
            with suppress(ValueError):
                address = ipaddress.IPv6Address(found)
                if any(address in net for net in _IPV6_NETS) or found.count(":") == 7:
                    yield match.start(), end
                    break


_NAME = r"[A-Za-z_][\w.-]*"
_HOST = r"((?!localhost\b)[A-Za-z0-9][\w.-]*)"
_PEOPLE_AND_BOXES = (
    *shapes(
        "email",
        "email",
        (
            "@ %40 =40 &#64;",
            r"(?<![\w.+-])(?:<user>|[\w.+-]+)(?:@|%40|=40|&#64;)[A-Za-z0-9-]+"
            r"(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b",
        ),
    ),
    *shapes(
        "host",
        "<host>",
        ("@", rf"(?<![\w.+-])(?:{_NAME}|<user>)@{_HOST}(?=:[~/])"),  # the prompt of a shell
        ("@", rf"\b(?:ssh|scp|sftp|rsync|mosh|sshfs|ssh-copy-id){AFTER}{_NAME}@{_HOST}"),
        ("<user>", rf"<user>(?:@|%40){_HOST}"),
        # Not a version, an image, a symbol of the C library, an action.
        (
            "@ %40",
            r"(?<![\w.+@/<-])[a-z_][\w-]{1,31}(?:@|%40)(?!v?\d+\b|sha\d|localhost\b)"
            r"([a-z][\w-]{2,62})(?![\w(\[@/-]|\.\w)",
        ),
        ("aaaa <secret", r"(?:AAAA[\w+/=]*|<secret-\d+>) [\w.-]+@([\w.-]+)"),  # behind a public key
        (
            ".internal .local .svc .lan .corp .intranet .home.arpa .consul .ts.net",
            r"(?<![\w.-])(?!(?:self|cls|args|config|ctx|info|threading|torch|nsa)\.)"
            r"((?:[a-z0-9_-]+\.)+(?:internal|local|svc|lan|corp|intranet|localdomain"
            r"|home\.arpa|consul|ts\.net))(?![\w(-]|\.\w)",
        ),
        (
            ".amazonaws.com .cloudapp. .googleusercontent.com .runpod. .vast.ai",
            r"(?<![\w.-])((?:[a-z0-9_-]+\.)+(?:amazonaws\.com|cloudapp\.(?:net|azure\.com)"
            r"|googleusercontent\.com|proxy\.runpod\.(?:net|io))|ssh\d*\.vast\.ai)(?![\w-]|\.\w)",
        ),
        (
            "-",
            r"(?<![\w.])((?:ip|ec2|node|host|gpu|pod|vm)-(?:\d{1,3}-){3}\d{1,3}"
            r"(?:\.[a-z][\w.-]*)?)(?![\w-])",
        ),
        ("-", r"(?<![\w.-])((?:\d{1,3}-){3}\d{1,3}(?:\.[a-z][a-z0-9-]+)+)(?![\w-])"),
        (".in-addr.arpa", r"\b((?:\d{1,3}\.){4}in-addr\.arpa)\b"),
        (
            "host nodename master_addr nodelist fqdn",
            r"(?i)(?<![a-z0-9])(?:host_?name|(?:slurmd?_)?nodename|master_addr|slurm\w*_nodelist|fqdn)"
            r"(?:[\"']?[ \t]*:[ \t]*|=)[\"']?(?!localhost\b|\d)"
            r"([a-z][\w.-]*(?:\[[\d,-]+\])?)(?![\w(\[])",
        ),
        ("resolve", rf"(?i)\bresolve (?:host ?name|host)[ \t]+[\"']?{_HOST}"),
        (
            "connect",
            rf"(?i)\bconnect\w*[ \t]+to[ \t]+(?:host[ \t]+)?\[?(?!\d){_HOST}\]?:\d{{2,5}}\b",
        ),
        (" nccl ", rf"(?m)^(?!\d){_HOST}:\d+:\d+ \[\d+\] NCCL "),
        (":", rf"(?m)^[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} "),  # syslog
        ("arn:aws i-0", r"\barn:aws[\w-]*:[\w-]*:[\w-]*:(\d{12}):|\b(i-[0-9a-f]{17})\b"),
    ),
    *shapes(
        "user",
        "<user>",
        (
            "@<host %40<host @localhost",
            rf"(?<![\w.+-])(?!root@)({_NAME})(?:@|%40)(?=<host>|localhost\b)",
        ),
        ("user logname", r"\b(?:USER|LOGNAME|USERNAME)=(?!root\b)([A-Za-z][\w.-]*)"),
        (
            "login: logname username",
            r"(?i)\b(?:username|login|logname)[\"']?[ \t]*:[ \t]*[\"']?"
            r"(?!root\b)([a-z][\w.-]*)",
        ),
        ("\\users\\", r"\b[A-Za-z]:\\+Users\\+([^\\\s\"'<>]+)"),
    ),
    *shapes(
        "path",
        "~",
        (
            "/home /users",
            r"(?:(?<![\w/:.-])(?:/[\w.-]+){1,2})?/(?:home|homes|Users|users)/(?!<)"
            r"[A-Za-z0-9._-]+",
        ),
    ),
)
_HARDWARE_AND_ADDRESSES = (
    *shapes(
        "board",
        "<board>",
        (
            "serial board part",
            r"(?i)\b(?:serial(?:[ _]number)?|board[ _]id|(?:board|gpu)[ _]part[ _]"
            r"number)[\"']?\s*[:=]\s*[\"']?((?!N/A)[^\s\"',;}\]]+)",
        ),
    ),
    *shapes(
        "gpu",
        "gpu",
        (
            "gpu- mig-",
            r"(?i)\b(?:GPU|MIG)-[0-9a-f]{8}(?:(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?![\w]))",
        ),
    ),
    *shapes(
        "pci",
        "pci",
        (":", r"\b(?:[0-9A-Fa-f]{4}){1,2}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b"),
        # A short one looks like a time, so it must be called by its name.
        (
            "pci",
            r"(?i)\bPCI[ :=_-]*(?:(?:bus|id|slot|device|address)[ :=_-]*)*"
            r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)\b",
        ),
    ),
    *shapes(
        "mac",
        "mac",
        (":", r"(?i)(?<![0-9a-f:-])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:-])"),
        # Without a letter it may be six sizes of a test.
        ("-", r"(?i)(?<![0-9a-z-])(?=[0-9-]*[a-f])(?:[0-9a-f]{2}-){5}[0-9a-f]{2}(?![0-9a-z-])"),
        (".", r"(?i)(?<![0-9a-z.])(?=[0-9.]*[a-f])(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}(?![0-9a-z.])"),
        ("wlx enx", r"\b(?:wlx|enx)[0-9a-f]{12}\b"),
        ("hwaddr mac", r"(?i)\b(?:hwaddr|mac(?:[ _]addr(?:ess)?)?)[ \t:=]{1,3}([0-9a-f]{12})\b"),
    ),
    Shape("ip", "ip", (".",), _ipv4),
    Shape("ip", "ip", (":",), _ipv6),
)
NAMES: tuple[Shape, ...] = (*_PEOPLE_AND_BOXES, *_HARDWARE_AND_ADDRESSES)
