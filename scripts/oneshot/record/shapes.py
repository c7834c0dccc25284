"""What a private text looks like: secrets, which their name, their look or their place gives away;
and names, boxes, addresses and hardware.
"""

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

# These stand where a secret would, and are none: a placeholder, a variable (though a password may
# begin with "$" too), a type, nothing.
NO_SECRET = re.compile(
    r"(?i)<|&lt\b|\$(?:[{(]|(?-i:[A-Z_][A-Z0-9_]*)(?![^/:,;)\]}\"'\s])|\d?$)|\{|\(|\*{3}|\.{3}"
    r"|%(?:[sd]\b|\()|(?:none|null|nil|true|false|yes|no|str|bytes|int|bool"
    r"|float|optional|required|string)\b(?![-.!@#$%^+~])"
)


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


_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_PICTURE = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+")  # as a page and a plot have it
_HEX_KEY = re.compile(
    r"(?i)(?:0x)?(?:(?:[0-9a-f]{32}){1,4}|[0-9a-f]{40}|[0-9a-f]{48}|[0-9a-f]{56}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)


def looks_random(text: str) -> bool:
    """Was `text` drawn from letters of both cases and digits, as most keys are? Of two neighbours
    drawn so six in ten are of unlike class, and an upper-case letter is followed by another as
    often as by a lower-case one; in names of kernels and classes it begins a word. Mangled names of
    C++ are known by what stands before them."""
    classes = "".join("9" if c.isdigit() else "A" if c.isupper() else "a" for c in text)
    upper = classes.count("A")
    changes = sum(a != b for a, b in zip(classes, classes[1:], strict=False))
    return (
        len(re.findall("9+", classes)) >= 2
        and min(upper, classes.count("a")) >= 2
        and changes >= 0.4 * len(text)
        and classes.count("Aa") <= 0.75 * upper
    )


def _random_runs(text: str) -> Iterator[Span]:
    """Keys of services that nobody here has heard of."""
    pictures = [m.span() for m in _PICTURE.finditer(text)] if ";base64," in text else []
    for match in _RUN.finditer(text):
        if any(begin <= match.start() < end for begin, end in pictures):
            continue
        if looks_random(match[0]):
            before = text[max(0, match.start() - 200) : match.start()]
            # Mangled C++ begins with _Z; a check sum of a file says so.
            if not re.search(r"(?:(?<![A-Za-z0-9])_Z\w*|(?i:sha\d{1,3})[:=-][\w+/-]*)$", before):
                yield match.span()


def is_opaque(text: str, least: int) -> bool:
    """Letters and digits mixed: no word, no number with its unit, no path, no call."""
    mixed = any(c.isdigit() for c in text) and sum(c.isalpha() for c in text) >= 2
    other = re.match(r"[~.]?/|[\d.]+[A-Za-z%/]+$|\d{4}-\d\d-\d\d", text)
    return len(text) >= least and mixed and not other


_WORD = r"(?<![A-Za-z0-9])"  # a whole word, or the last one after a "_" or "-"
_STRONG = (
    r"pass(?:word|wd|phrase|wort|code)|sshpass|secret|credential"
    r"|(?:api|access|account|secret|private|app|auth|signing|encryption|master|deploy|license)"
    r"[ _-]?key|(?:access|auth|api|refresh|security|session|bearer|bot)[_-]?token"
)
_NAMED = re.compile(
    rf"(?i)(?:(?P<strong>{_STRONG})|{_WORD}(?P<short>pwd|pw|pass|pin|otp)|(?P<token>token)(?!s)"
    rf"|(?P<weak>sessid|sessionid|{_WORD}(?:session|key|sid|auth|jwt|nonce|code|sig|cred)))"
    r"(?:[_-](?:id|key|value|data|base64))?s?\d?(?:[ \t]+for[ \t]+[^\s:]+(?=:))?(?:\\?[\"'])?"
    # How the value follows: as an assignment, as a block of YAML, or beside the name.
    r"(?P<sep>(?:[ \t]+is)?[ \t]*(?:=>|:=|->|={1,2}|:|%3[da])[ \t]*"
    r"(?:[|>][-+]?[ \t]*\r?\n[ \t]*)?|[ \t]+(?:is[ \t]+)?)"
    r"(?:(?P<open>\\?[\"'])(?P<quoted>(?:(?!(?P=open))(?:\\.|[^\r\n])|''){1,4096})(?P=open)"
    r"|(?P<bare>[^\s\"',;&<>)}\]\\](?:(?!</)[^\s\"',;&<>)}\]\\]){0,511}))"
)
_REST = re.compile(r"(?:(?!</)[^\s\"',;&<>)}\]\\])*")  # of a longer one

# How these names begin: one pattern without alternatives of case is searched much faster.
_STARTS = re.compile(
    r"p(?:ass|wd|w|in)|sshpass|otp|sec(?:ret|ur)|cred|a(?:pi|cc|pp|uth)|priv|sign?|enc|master|deploy|lic"
    r"|refresh|sess|bearer|bot|token|key|sid|jwt|nonce|code"
)
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[]")  # of a function, in a traceback


def _is_secret(
    kind: str, name: str, sep: str, value: str, quoted: bool, variable: bool = False
) -> bool:
    """Is `value` a secret after `name`, which is of this `kind`, and `sep`? variable: `name` ends
    that of an environment variable, as MYSQL_PWD."""
    code = sep != sep.strip() and "=" in sep  # as `token = first_token` of a traceback
    sep = sep.strip().lower()
    if sep.startswith("%") or (sep.startswith("is") and sep != "is"):
        sep = "="
    number = re.fullmatch(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?%?", value) is not None
    keylike = bool(_HEX_KEY.fullmatch(value) or (len(value) >= 16 and looks_random(value)))
    if kind == "strong" and sep not in ("", "is"):
        return quoted or sep == "=" or len(value) >= (4 if number else 3)
    if kind == "strong" and (quoted or sep == "is"):
        return quoted or is_opaque(value, 6) or "-" in value
    if name in ("pin", "otp"):
        return sep in (":", "=") and value.isdigit() and len(value) >= 4
    path = value.startswith(("/", "~", "./", "../"))
    if kind == "short":
        assigned = sep in (":", "=", "==", ":=", "=>")
        if assigned and (variable or (name == "pwd" and sep == "=" and not code)):
            return not path and (not number or (sep == "=" and len(value) >= 4))
        return assigned and (is_opaque(value, 4) or (quoted and not value.isalpha()))
    if kind == "token" and (quoted or "=" in sep):
        if code and not quoted:
            return is_opaque(value, 8)
        return len(value) >= 6 and not number and not value.startswith(("/", "~"))
    if kind == "token" and sep == ":":
        return is_opaque(value, 8)
    least = 16
    if variable and sep == "=" and not code and name in ("key", "auth", "cred", "session", "jwt"):
        if quoted and " " in value:
            return True
        least = 8
    return keylike or (sep not in ("", "is") and is_opaque(value, least))


def _named(text: str) -> Iterator[Span]:
    at = 0
    for start in _STARTS.finditer(text.translate(LOWER)):
        match = _NAMED.match(text, start.start()) if start.start() >= at else None
        if match is None:
            continue
        group = "quoted" if match["quoted"] is not None else "bare"
        value = match[group].rstrip(".:") if group == "bare" else match[group]
        if not value or NO_SECRET.match(value) or (group == "bare" and _CALL.match(value)):
            continue
        kind = next(k for k in ("strong", "short", "token", "weak") if match[k])
        cache = kind == "weak" and re.search(r"(?i)cache[ _-]$", text[: match.start()][-8:])
        name, sep = match[kind].lower(), match["sep"]
        variable = match[kind].isupper() and text[: match.start()][-1:] == "_"
        if not cache and _is_secret(kind, name, sep, value, group == "quoted", variable):
            at = match.end()
            end = match.start(group) + len(value)
            if group == "bare" and len(match[group]) == 512:
                at = end = _REST.match(text, at).end()
            yield match.start(group), end


# Of chat, mail, rented GPUs: what stands beside such a name and looks like a key is one.
_SERVICES = (
    "vast runpod lambda paperspace together tensordock jarvislabs coreweave hyperstack datacrunch"
    " verda fluidstack crusoe nebius salad modal replicate sparkpost mailgun mailjet sendgrid"
    " postmark mailchimp resend mattermost telegram discord slack twilio pushover wandb".split()
)


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


_SECRETS = r"""
pem -> secret
    -----begin :: -----BEGIN [A-Z0-9 ]+-----(?s:.*?)(?:-----END [A-Z0-9 ]+-----|\Z)
webhook -> secret
    # Whatever the service: who knows the address may post.
    hook :: (?i)\bhttps?://(?:hooks\.[^\s"'<>/]+/|[^\s"'<>]{0,300}/(?:web)?hook(?:s|b2)?/)
        [^\s"'<>]+
    # Keys that their prefix names, as far as they do not look random anyhow: of hex digits or of
    # one case, short, or in several parts. The first ones are so distinct that they count inside a
    # word too.
token -> secret
    gh github_ gl :: gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}
        |gl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent)-[A-Za-z0-9_-]{16,}
    _ :: (?<![A-Za-z0-9_+-])(?:
        (?:hf|rpa|npm|gsk|r8|fw|api_org|tgp_v1|ntn|lin_api|sntr[uy]s?|phx|sbp|nfp|jina)
        _[A-Za-z0-9]{16,}
        |(?:[rs]k_(?:live|test)|whsec|pit|wandb_v1|lsv2_(?:pt|sk)|gls?[ac]|KGAT|rubygems
        |shp(?:at|ca|pa|ss)|do[opr]_v1|pscale_\w{2,5}|secret_\w+|dckr_[a-z]{2,4})
        _[A-Za-z0-9_.-]{16,}
        |re_[A-Za-z0-9]{6,}_[A-Za-z0-9]{16,})
    - :: (?<![A-Za-z0-9_+-])(?:
        (?:sk|pypi|nvapi|pplx|xai|csk|tvly|tskey|GOCSPX|ATATT|xapp|xox[a-z](?:\.xox[bp])?
        |x(?:key|smtp)sib)-[A-Za-z0-9_-]{10,}
        |NRAK-[A-Z0-9]{20,}|AGE-SECRET-KEY-[A-Z0-9]{20,}|[0-9a-f]{32}-us\d{1,2}\b
        |a[ks]-[A-Za-z0-9]{22}(?![A-Za-z0-9]))
    any :: (?<![A-Za-z0-9_+-])(?:A[KS]IA[A-Z0-9]{16}|SCW[A-Z0-9]{17}|LTAI[A-Za-z0-9]{12,20}
        |AIza[A-Za-z0-9_-]{35}|(?:dapi|(?:pub)?key-|SK|AC|pul-)(?:[0-9a-f]{32}|[0-9a-f]{40}))
        (?![A-Za-z0-9])
    ya29. hvs. hvb. s. sl. .pt. sg. :: (?<![A-Za-z0-9_+-])
        (?:(?:ya29|hv[bs]|sl|dp\.pt|SG\.[A-Za-z0-9_-]{16,})\.[A-Za-z0-9_-]{16,}
        |s\.[A-Za-z0-9]{24}\b)
    any :: \b[0-9a-f]{32}(?::[0-9a-f]{32}|(?:-[0-9a-f]{8}){2})\b
    : :: \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}:[0-9a-f]{32}\b
    :aa :: (?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{33}
    1//0 :: \b1//0[A-Za-z0-9_-]{20,}
    eyj :: (?<![A-Za-z0-9_+-])eyJ[A-Za-z0-9_-]{5,}(?:\.eyJ[A-Za-z0-9_-]{5,}|[\w-]{12,})
        (?:\.[A-Za-z0-9_-]*)*=*
    # A PEM block in base64.
    ls0tls1crudjti :: LS0tLS1CRUdJTi[A-Za-z0-9+/=]+
    aaaa :: \b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S+)[ \t]+(AAAA[A-Za-z0-9+/=]+)
place -> secret
    # curl -u bob:secret, but not docker -u 1000:1000.
    - :: (?<!\S)(?:-[A-Za-z]*[uU]|--(?:proxy-)?user)[ =](?:"[^\s:%"]+[:%]([^"\n]+)"
        |'[^\s:%']+[:%]([^'\n]+)'|(?!\d+:\d+\b)[^\s:%"']+[:%]([^\s"']+))
    -p :: (?<!\S)-p[ \t]+(?!no:)(?:<user>|[A-Za-z_][\w.-]*):([^\s"':/]*[A-Za-z][^\s"':/]*)
    -p :: (?<!\S)-p[ =]["']?((?=\S*[a-z])(?=\S*\d)(?=\S*[A-Z!@#%^&*?])[^\s"'./<]{6,})
    /p: :: (?<!\S)/p(?:assword)?:{VALUE}
    ftp :: \bl?ftp{AFTER}-u[ \t]*[^\s,]+,([^\s"']+)
    curl :: \bcurl{AFTER}-[uU][\w.-]+:([^\s"']+)
    # -p after the option of a user's name, or of a program where it means nothing else.
    -u :: (?<!\S)(?:-u|--username)[ =]?\S+[ \t]+(?:-p[ =]?|--pass[ =]){VALUE}
    sshpass :: \bsshpass[ \t]+-p[ \t]*{VALUE}
    mysql mariadb 7z :: \b(?:mysql\w*|mariadb\w*|7z\w?){AFTER}-p(?!\s){VALUE}
    zip :: \b(?:unzip|zip){AFTER}-P[ \t]+{VALUE}
    ldap :: \bldap\w+{AFTER}-w[ \t]+{VALUE}
    htpasswd :: \bhtpasswd[ \t]+-\w*b\w*[ \t]+\S+[ \t]+\S+[ \t]+{VALUE}
    redis-cli :: \bredis-cli{AFTER}-a[ \t]+{VALUE}
    pass: :: (?<!\S)-pass(?:in|out)?[ \t]+["']?pass:([^\s"'<]+)
    # netrc, in one line and in several; pgpass.
    password :: (?i)\b(?:login|account|user)\s+\S+\s+password[ \t]+(\S+)
    password :: (?im)^[ \t]*password[ \t]+(\S+)[ \t]*$
    : :: (?m)^[\w.*-]+:(?:\d{4,5}|\*):[\w*.-]+:[\w*.-]+:(\S+)$
    @ :: (?:(?<![\w/.:-])|(?<=(?<!:)//))[A-Za-z][\w.+-]*:((?!\d{1,5}@)[^\s:/"'<>]{3,})@
        (?:(?:\d+\.){3}\d|<ip-\d|(?!sha\d|v?\d)[A-Za-z])
    auth :: (?i)\bauth[ \t]*=[ \t]*\([ \t]*["'][^"'\n]*["'][ \t]*,[ \t]*["']([^"'\n]+)
    authorization :: (?i)\b(?:proxy-)?authorization["']?\s*[:=]\s*["']?
        ((?:bearer|basic|token|digest)\s+(?!<)(?:(?!</)[^\s"',;])+|(?!<)(?:(?!</)[^\s"',;]){4,})
    bearer :: (?i)\bbearer\s+([A-Za-z0-9._~+/=-]{12,})
    cookie :: (?i)\b(?:set-)?cookie["']?\s*:\s*["']?([^\s=;,"'<&]+=(?:(?!</)[^\r\n"'])+)
    </ :: (?i)<\w*(?:{STRONG}|token)>([^<>\n]+)</
    login :: \blogin(?:[ \t]+--?[\w-]+)*[ \t]+([0-9a-f]{32,128})\b
    # Alone in its line; and a long number near its name.
    token :: (?im)^[ \t]*[\w.-]*token["']?[ \t]*:[ \t]*["']?
        ((?=[^\s]*[a-z])[^\s"',/]{6,})["']?[ \t]*,?[ \t]*$
    key secret :: (?i)(?<!cache )(?<![A-Za-z0-9])(?:key|secret)s?[\s:="'(\[{-]{1,4}
        (?:(?:is|hex|value)[\s:=]{1,3})?((?:0x)?(?:[0-9a-f]{64}){1,2})\b
    {SERVICE_NAMES} :: (?i)\b(?:{SERVICE})[\w.-]*[ \t:="'-]{1,4}
        (?:[a-z_]+[ \t:="'-]{1,4}){0,2}
        ([0-9a-f]{30,}|[0-9A-Z]{30,}|[0-9a-z]{26}
        |[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b
    # As an option.
    - :: (?i)(?<![\w-])--?(?:[a-z]+-)*(?:token|pass|{STRONG})(?:\\?["'])?(?:=|[ \t]+)
        (?:"([^"\r\n]+)"|'([^'\r\n]+)'|\\?["']?((?!-)(?:(?!</)[^\s"',;&\\]){4,}))
"""
_NAMES = r"""
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
    user logname :: (?<![A-Za-z0-9])(?:PG)?(?:USER|LOGNAME|USERNAME)=(?!root\b)([A-Za-z][\w.-]*)
    uid= gid= groups= :: \b(?:[ug]id|groups)=\d+\((?!root\))([A-Za-z][\w.-]*)\)
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
_WORDS = {
    "AFTER": r"[ \t][^\n|;]{0,200}?(?<!\S)",  # a program and some of its arguments
    "VALUE": r"(?:\"([^\"\r\n]+)\"|'([^'\r\n]+)'|([^\s\"',;&|<>]+))", "STRONG": _STRONG,
    "SERVICE": "|".join(_SERVICES), "SERVICE_NAMES": " ".join(_SERVICES),
    "NAME": r"[A-Za-z_][\w.-]*", "HOST": r"((?!localhost\b)[A-Za-z0-9][\w.-]*)",
}  # fmt: skip


def _shapes(table: str) -> list[Shape]:
    """Return the shapes of a table, in which {NAME} stands for _WORDS["NAME"]. A line "rule ->
    placeholder" begins the shapes of a rule. Below it stands each shape as "needs :: pattern", its
    needs separated by blanks, or "any"; a pattern goes on in the lines that are indented
    further."""
    for name, word in _WORDS.items():
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


SHAPES: tuple[Shape, ...] = (
    *_shapes(_SECRETS), Shape("named", "secret", (), _named),
    Shape("random", "secret", (), _random_runs), *_shapes(_NAMES), Shape("ip", "ip", (".",), _ipv4),
    Shape("ip", "ip", (":",), _ipv6),
)  # fmt: skip
