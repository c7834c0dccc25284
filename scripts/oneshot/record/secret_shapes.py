"""Secrets by their shape: what their name, their look or their place gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.oneshot.record.shapes import AFTER, LOWER, NO_SECRET, Shape, Span, shapes

_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_PICTURE = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+")  # as a page and a plot have it
_HEX_KEY = re.compile(
    r"(?i)(?:0x)?(?:(?:[0-9a-f]{32}){1,4}|[0-9a-f]{40}|[0-9a-f]{48}|[0-9a-f]{56}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)


def looks_random(text: str) -> bool:
    """Was `text` drawn from letters of both cases and digits, as most keys are?

    Of two neighbours drawn so six in ten are of unlike class, and an upper-case letter is followed
    by another as often as by a lower-case one; in names of kernels and classes it begins a word.
    Mangled names of C++ are known by what stands before them.
    """
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


def _is_opaque(text: str, least: int) -> bool:
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
    r"(?:(?P<open>\\?[\"'])(?P<quoted>(?:(?!(?P=open))[^\r\n]|''){1,4096})(?P=open)"
    r"|(?P<bare>[^\s\"',;&<>)}\]\\](?:(?!</)[^\s\"',;&<>)}\]\\]){0,511}))"
)
_REST = re.compile(r"(?:(?!</)[^\s\"',;&<>)}\]\\])*")  # of a longer one

# How these names begin: one pattern without alternatives of case is searched much faster.
_STARTS = re.compile(
    r"p(?:ass|wd|w|in)|sshpass|otp|sec(?:ret|ur)|cred|a(?:pi|cc|pp|uth)|priv|sign?|enc|master|deploy|lic"
    r"|refresh|sess|bearer|bot|token|key|sid|jwt|nonce|code"
)
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[]")  # of a function, in a traceback


def _is_secret(kind: str, name: str, sep: str, value: str, quoted: bool) -> bool:
    """Is `value` a secret after `name`, which is of this `kind`, and `sep`?"""
    code = sep != sep.strip() and "=" in sep  # as `token = first_token` of a traceback
    sep = sep.strip().lower()
    if sep.startswith("%") or (sep.startswith("is") and sep != "is"):
        sep = "="
    number = re.fullmatch(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?%?", value) is not None
    keylike = bool(_HEX_KEY.fullmatch(value) or (len(value) >= 16 and looks_random(value)))
    if kind == "strong" and sep not in ("", "is"):
        return quoted or sep == "=" or len(value) >= (4 if number else 3)
    if kind == "strong" and (quoted or sep == "is"):
        return quoted or _is_opaque(value, 6) or "-" in value
    if name in ("pin", "otp"):
        return sep in (":", "=") and value.isdigit() and len(value) >= 4
    if kind == "short":
        assigned = sep in (":", "=", "==", ":=", "=>")
        return assigned and (_is_opaque(value, 4) or (quoted and not value.isalpha()))
    if kind == "token" and (quoted or "=" in sep):
        if code and not quoted:
            return _is_opaque(value, 8)
        return len(value) >= 6 and not number and not value.startswith(("/", "~"))
    if kind == "token" and sep == ":":
        return _is_opaque(value, 8)
    return keylike or (sep not in ("", "is") and _is_opaque(value, 16))


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
        if not cache and _is_secret(kind, name, sep, value, group == "quoted"):
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
_TABLE = r"""
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
    @ :: (?<![\w/.:-])[A-Za-z][\w.+-]*:((?!\d{1,5}@)[^\s:@/"'<>]{3,})@(?!sha\d|v?\d)[A-Za-z]
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
_WORDS = {
    "VALUE": r"(?:\"([^\"\r\n]+)\"|'([^'\r\n]+)'|([^\s\"',;&|<>]+))", "STRONG": _STRONG,
    "SERVICE": "|".join(_SERVICES), "SERVICE_NAMES": " ".join(_SERVICES), "AFTER": AFTER,
}  # fmt: skip
_BY_CODE = (("named", _named), ("random", _random_runs))
SECRETS = (*shapes(_TABLE, **_WORDS), *(Shape(rule, "secret", (), find) for rule, find in _BY_CODE))
