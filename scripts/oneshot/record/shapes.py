"""What a private text looks like; and the shapes of names, boxes, addresses and hardware."""

from __future__ import annotations

import ipaddress
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

Span = tuple[int, int]
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
    find: Callable[[str], Iterator[Span]]


def _private(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    """What a pattern finds, or of one with groups what these hold, but for what stands where a
    secret would, and is none."""
    for match in pattern.finditer(text):
        if not pattern.groups:
            yield match.span()
        for group in range(1, pattern.groups + 1):
            if match.start(group) >= 0 and not NO_SECRET.match(match[group]):
                yield match.span(group)


def shapes(table: str, **words: str) -> list[Shape]:
    """Return the shapes of a table, in which {NAME} stands for words["NAME"].

    A line "rule -> placeholder" begins the shapes of a rule. Below it stands each shape as
    "needs :: pattern", its needs separated by blanks, or "any"; a pattern goes on in the lines that
    are indented further.
    """
    for name, word in words.items():
        table = table.replace(f"{{{name}}}", word)
    found = []
    for line in re.sub(r"\n {5,}", "", table).splitlines():
        if not line.startswith(" "):
            rule, _, placeholder = line.partition(" -> ")
        elif not line.lstrip().startswith("#"):
            needs, _, pattern = line.strip().partition(" ::")
            needed = () if needs == "any" else tuple(needs.split())
            find = partial(_private, re.compile(pattern.lstrip()))
            found.append(Shape(rule, placeholder, needed, find))
    return found


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


_TABLE = r"""
email -> email
    @ %40 =40 &#64; :: (?<![\w.+-])(?:<user>|[\w.+-]+)(?:@|%40|=40|&#64;)[A-Za-z0-9-]+
        (?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b
host -> <host>
    # The prompt of a shell.
    @ :: (?<![\w.+-])(?:{NAME}|<user>)@{HOST}(?=:[~/])
    @ :: \b(?:ssh|scp|sftp|rsync|mosh|sshfs|ssh-copy-id){AFTER}{NAME}@{HOST}
    <user> :: <user>(?:@|%40){HOST}
    # Not a version, an image, a symbol of the C library, an action.
    @ %40 :: (?<![\w.+@/<-])[a-z_][\w-]{1,31}(?:@|%40)(?!v?\d+\b|sha\d|localhost\b)
        ([a-z][\w-]{2,62})(?![\w(\[@/-]|\.\w)
    # Behind a public key.
    aaaa <secret :: (?:AAAA[\w+/=]*|<secret-\d+>) [\w.-]+@([\w.-]+)
    .internal .local .svc .lan .corp .intranet .home.arpa .consul .ts.net ::
        (?<![\w.-])(?!(?:self|cls|args|config|ctx|info|threading|torch|nsa)\.)
        ((?:[a-z0-9_-]+\.)+(?:internal|local|svc|lan|corp|intranet|localdomain
        |home\.arpa|consul|ts\.net))(?![\w(-]|\.\w)
    .amazonaws.com .cloudapp. .googleusercontent.com .runpod. .vast.ai ::
        (?<![\w.-])((?:[a-z0-9_-]+\.)+(?:amazonaws\.com|cloudapp\.(?:net|azure\.com)
        |googleusercontent\.com|proxy\.runpod\.(?:net|io))|ssh\d*\.vast\.ai)(?![\w-]|\.\w)
    - :: (?<![\w.])((?:ip|ec2|node|host|gpu|pod|vm)-(?:\d{1,3}-){3}\d{1,3}
        (?:\.[a-z][\w.-]*)?)(?![\w-])
    - :: (?<![\w.-])((?:\d{1,3}-){3}\d{1,3}(?:\.[a-z][a-z0-9-]+)+)(?![\w-])
    .in-addr.arpa :: \b((?:\d{1,3}\.){4}in-addr\.arpa)\b
    host nodename master_addr nodelist fqdn ::
        (?i)(?<![a-z0-9])(?:host_?name|(?:slurmd?_)?nodename|master_addr|slurm\w*_nodelist|fqdn)
        (?:["']?[ \t]*:[ \t]*|=)["']?(?!localhost\b|\d)
        ([a-z][\w.-]*(?:\[[\d,-]+\])?)(?![\w(\[])
    resolve :: (?i)\bresolve (?:host ?name|host)[ \t]+["']?{HOST}
    connect :: (?i)\bconnect\w*[ \t]+to[ \t]+(?:host[ \t]+)?\[?(?!\d){HOST}\]?:\d{2,5}\b
    nccl :: (?m)^(?!\d){HOST}:\d+:\d+ \[\d+\] NCCL[ ]
    # A line of syslog.
    : :: (?m)^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d {HOST}[ ]
    arn:aws i-0 :: \barn:aws[\w-]*:[\w-]*:[\w-]*:(\d{12}):|\b(i-[0-9a-f]{17})\b
user -> <user>
    @<host %40<host @localhost :: (?<![\w.+-])(?!root@)({NAME})(?:@|%40)(?=<host>|localhost\b)
    user logname :: \b(?:USER|LOGNAME|USERNAME)=(?!root\b)([A-Za-z][\w.-]*)
    login: logname username :: (?i)\b(?:username|login|logname)["']?[ \t]*:[ \t]*["']?
        (?!root\b)([a-z][\w.-]*)
    \users\ :: \b[A-Za-z]:\\+Users\\+([^\\\s"'<>]+)
path -> ~
    /home /users :: (?:(?<![\w/:.-])(?:/[\w.-]+){1,2})?/(?:home|homes|Users|users)/(?!<)
        [A-Za-z0-9._-]+
board -> <board>
    serial board part :: (?i)\b(?:serial(?:[ _]number)?|board[ _]id|(?:board|gpu)[ _]part[ _]
        number)["']?\s*[:=]\s*["']?((?!N/A)[^\s"',;}\]]+)
gpu -> gpu
    gpu- mig- :: (?i)\b(?:GPU|MIG)-[0-9a-f]{8}(?:(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?![\w]))
pci -> pci
    : :: \b(?:[0-9A-Fa-f]{4}){1,2}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b
    # A short one looks like a time, so it must be called by its name.
    pci :: (?i)\bPCI[ :=_-]*(?:(?:bus|id|slot|device|address)[ :=_-]*)*
        ((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)\b
mac -> mac
    : :: (?i)(?<![0-9a-f:-])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:-])
    # Without a letter it may be six sizes of a test.
    - :: (?i)(?<![0-9a-z-])(?=[0-9-]*[a-f])(?:[0-9a-f]{2}-){5}[0-9a-f]{2}(?![0-9a-z-])
    . :: (?i)(?<![0-9a-z.])(?=[0-9.]*[a-f])(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}(?![0-9a-z.])
    wlx enx :: \b(?:wlx|enx)[0-9a-f]{12}\b
    hwaddr mac :: (?i)\b(?:hwaddr|mac(?:[ _]addr(?:ess)?)?)[ \t:=]{1,3}([0-9a-f]{12})\b
"""
_WORDS = {"NAME": r"[A-Za-z_][\w.-]*", "HOST": r"((?!localhost\b)[A-Za-z0-9][\w.-]*)"}
_IPS = (Shape("ip", "ip", (".",), _ipv4), Shape("ip", "ip", (":",), _ipv6))
NAMES = (*shapes(_TABLE, **_WORDS, AFTER=AFTER), *_IPS)
