"""Secrets and private names as real logs show them: (kind, text, what of it must not be seen).

The values are drawn from a seed, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import base64
import random
import string
from urllib.parse import quote

LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
HEX = DIGITS + "abcdef"
WORD = LOWER + UPPER + DIGITS
_random = random.Random(34)


def r(n: int, alphabet: str = WORD) -> str:
    """`n` characters of `alphabet`, one of each of its kinds among the first."""
    kinds = [[c for c in group if c in alphabet] for group in (DIGITS, LOWER, UPPER)]
    drawn = [_random.choice(kind) for kind in kinds if kind]
    drawn += [_random.choice(alphabet) for _ in range(n - len(drawn))]
    _random.shuffle(drawn)
    return "".join(drawn)


TWO_KEYS = r(32, HEX), r(32, HEX)
# The box of the tests: what is known of it is searched everywhere.
KNOWN = "Plainlooking/value-42+x"
ENVIRON = {"MY_SERVICE_TOKEN": KNOWN, "USER": "alice", "HOSTNAME": "pod-9f8e7d6c"}


def _same(kind: str, *texts: tuple[str, str]) -> list[tuple[str, str, str]]:
    return [(kind, text.replace("{}", private), private) for text, private in texts]


SHAPES: list[tuple[str, str, str]] = [
    *_same(
        "user:password",
        ("curl -u alice:{} https://x.example.com/a", "hunter2"),
        ("curl -u 'bob:{}' https://x.example.com/a", "hunt er2"),
        ("curl -ubob:{} https://x.example.com/a", "hunter22"),
        ("curl --user bob:{} -O", "hunter2"),
        ("curl --user=bob:{}", "hunter2"),
        ("curl --proxy-user bob:{} x", "hunter2"),
        ("curl -U bob:{} x", "hunter2"),
        ("+ docker login -u bob -p {} registry.example.com", "hunter2"),
        ("sshpass -p '{}' ssh box", "hunter2"),
        ("sshpass -p{} ssh box", "hunter2"),
        ("redis-cli -h x -a {} ping", "hunter2"),
        ("smbclient //nas/share -U bob%{}", "hunter2"),
        ("7z x -p{} a.7z", "Hunter2"),
        ("unzip -P {} a.zip", "hunter2"),
        ("wget --password {} x", "hunter2"),
        ("Server=db;Uid=sa;Pwd={};", "hunter2"),
        ("machine github.com login bob password {}", "12345678"),
        ("default login bob password {}", "hunter2"),
        ("localhost:5432:mydb:bob:{}", "hunter2"),
        ("connecting to bob:{}@db:5432/x", "hunter2"),
        ("requests.get(u, auth=('bob', '{}'))", "hunter2"),
        ("cmd -p alice:{}", "hunter2pw"),
        ("cmd -p {} host", "Sw0rdfish!"),
        ("lftp -u bob,{} sftp://h", "hunter2"),
        ("xfreerdp /u:bob /p:{}", "hunter2"),
        ("mongosh --username a --password {}", "S3cr3t"),
        ("htpasswd -b f bob {}", "S3cr3t"),
        ("ldapsearch -w {} -x", "S3cr3t"),
    ),
    *_same(
        "token",
        ("token = {}", "abcdef123456"),
        ('"token": "{}"', "abcdefgh"),
        ("export HF_TOKEN={}", "abcdefgh"),
        ("token: {}", "ABCDEFGHIJKL"),
        ("token%3D{}", "abcd1234efgh"),
        ("server token {}", "12345678-1234-1234-1234-123456789abc"),
        ("'Authorization': 'Bearer {}'", "abc"),
    ),
    *_same("session", ("session key: {}", r(32, HEX))),
    *_same(
        "password",
        ('password: "{}"', "my pass phrase, long"),
        ('{"password": "{}", "a": 1}', "a b,c"),
        ("password: '{}'", "it''s 5"),
        ("passwd: {}", "abc"),
        ("passphrase is {}", "open-sesame"),
        ("password is {}", "hunter2"),
        ("password is '{}'", "hunter2"),
        ('password "{}"', "hunter2"),
        ("password => '{}'", "hunter2"),
        ("password := {}", "hunter2"),
        ("password -> {}", "hunter2"),
        ("pass={}", "hunter2"),
        ("pw: {}", "hunter2"),
        ("<password>{}</password>", "hunter2"),
        ("<Secret>{}</Secret>", "hunter2"),
        ("PIN: {}", "4711"),
        ("otp={}", "123456"),
        ("password: |\n  {}\n", "hunter2"),
        ("--pass {}", "hunter2"),
    ),
    *_same(
        "prefix",
        ("discord {}", "M" + r(23) + "." + r(6) + "." + r(38)),
        ("slack {}", "xapp-1-A" + r(10, UPPER + DIGITS) + "-" + r(12, DIGITS) + "-" + r(40, HEX)),
        ("https://x.webhook.office.com/webhookb2/{}", "/IncomingWebhook/".join(TWO_KEYS)),
        ("https://open.feishu.cn/open-apis/bot/v2/hook/{}", r(32, HEX)),
        ("https://chat.example.com/hooks/{}", r(26, LOWER + DIGITS)),
        ("https://hooks.zapier.com/hooks/catch/{}", "123/" + r(12)),
        ("brevo {}", "xkeysib-" + r(64, HEX) + "-" + r(16)),
        ("prime {}", "pit_" + r(64, HEX)),
        ("databricks {}", "dapi" + r(32, HEX)),
        ("kaggle {}", "KGAT_" + r(32, HEX)),
        ("langsmith {}", "lsv2_pt_" + r(32, HEX) + "_" + r(10, HEX)),
        ("shopify {}", "shpat_" + r(32, HEX)),
        ("newrelic {}", "NRAK-" + r(27, UPPER + DIGITS)),
        ("age {}", "AGE-SECRET-KEY-1" + r(58, UPPER + DIGITS)),
        ("atlassian {}", "ATATT3x" + r(60)),
        ("scaleway {}", "SCW" + r(17, UPPER + DIGITS)),
        ("sparkpost {}", r(40, HEX)),
        ("together.ai {}", r(64, HEX)),
        ("RUNPOD {}", r(40, UPPER + DIGITS)),
        ("mattermost token {}", r(26, LOWER + DIGITS)),
        ("hyperstack {}", "12345678-1234-1234-1234-123456789abc"),
        ("fal {}", "12345678-1234-1234-1234-123456789abc:" + r(32, HEX)),
        ("unknown service said {} is no key", "zq_" + r(40)),
    ),
    *_same(
        "hex",
        ("aes key hex: {}", r(64, HEX)),
        ("key ({})", r(64, HEX)),
        ("vast key\n{}", r(64, HEX)),
    ),
]


def _known() -> list[tuple[str, str, str]]:
    """What is known to be secret as it is, in every usual code, and broken over two lines."""
    plain, data = KNOWN, KNOWN.encode()
    by_character = ("%{:02X}", "%{:02x}", "\\x{:02x}", "\\u{:04x}", "&#{};", "\\{:03o}")
    breaks = ("\n", "\r\n    ", "\\\n", "\\n", " \\\n", "\n> ")
    quoted, hexed = quote(plain, safe=""), data.hex()
    forms = [plain, plain.upper(), plain.lower(), quoted, quoted.lower(), quote(quoted, safe="")]
    forms += [hexed, hexed.upper(), data.hex(" "), data.hex(":").upper()]
    forms += ["".join(form.format(byte) for byte in data) for form in by_character]
    forms += [plain[:9] + line_break + plain[9:] for line_break in breaks]
    forms.append(base64.b32encode(data).decode())
    rows = [("known", f"got {form}.", form[2:-2]) for form in forms]
    coded = [base64.b64encode(around).decode() for around in (data, b"a" + data)]
    framed = base64.b64encode(f"user:{plain}!".encode()).decode()
    safe = base64.urlsafe_b64encode(f"??{plain}>>".encode()).decode()
    for form in (*coded, coded[0].rstrip("="), framed, safe):
        rows.append(("known", f"got {form}.", form[12:20]))
    rows.append(("known", f"got {framed[:12]}\n{framed[12:]}.", framed[14:20]))
    rows.append(("known", f"got {hexed[:20]}\n{hexed[20:]}.", hexed[22:30]))
    return rows


NAMES: list[tuple[str, str, str]] = [
    *_same(
        "user",
        ("user {} logged in", "Alice"),
        ("/tmp/{}_cache/x", "alice"),
        ("{}@laptop:~$ ls", "bob"),
        ("{}@localhost", "bob"),
        ("Alice@{}", "BOX"),
        ("ssh {}@box", "bob"),
        ("scp x {}@box:/tmp", "bob"),
        ("C:\\Users\\{}\\x", "bob"),
        ("/mnt/c/Users/{}/x", "bob"),
        ("drwxr-xr-x 2 {} {} 40 x", "alice"),
        ("USERNAME={}", "bob.builder"),
        ("login: {}", "bob"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1 {}@x", "bob"),
    ),
    *_same(
        "mail",
        ("{}%40example.com", "alice"),
        ("mail to {}", "bob%40example.com"),
        ("{}", "bob@example.com"),
        ("by {} (at)", "Bob@Example.COM"),
        ("x={}&y", "bob%40mail.example.org"),
        ("report_{}.csv", "bob@example.com"),
        ("{}", "bob=40example.com"),
        ("{}", "bob&#64;example.com"),
    ),
    *_same(
        "host",
        ("on {}", "POD-9F8E7D6C"),
        ("x_{}_y", "pod-9f8e7d6c"),
        ("events.out.tfevents.17.{}.9.0", "pod-9f8e7d6c"),
        ("alice@{}:~$", "gpubox"),
        ("root@{}:/workspace#", "4f2c9a1b7d3e"),
        ("ssh root@{}", "box"),
        ("bob@{} said", "gpu-17"),
        ("connect to {}:5432", "db.internal"),
        ("at {}", "gpu-17.lab.corp"),
        ("via {}", "x.svc.cluster.local"),
        ("via {}", "nas.lan"),
        ("{}", "ip-10-0-3-17.ec2.internal"),
        ("{}", "ip-10-0-3-17"),
        ("{}", "ec2-203-0-113-7.compute-1.amazonaws.com"),
        ("{}", "box.tail1234.ts.net"),
        ("https://{}/lab", "abc123def-8888.proxy.runpod.net"),
        ("ssh -p 12345 root@{}", "ssh4.vast.ai"),
        ("MASTER_ADDR={}", "node17"),
        ("SLURM_NODELIST={}", "gpu[01-04]"),
        ("hostname: {}", "trainbox"),
        ("bob@{}.", "node-3"),
        ("at {}", "worker-3.default.svc"),
        ("{}:1234:1240 [0] NCCL INFO Bootstrap", "trainbox"),
        ("failed to connect to [{}]:29500", "trainbox"),
        ("ssh: Could not resolve hostname {}:", "trainbox"),
        ("Nov 25 10:11:12 {} kernel: NVRM: Xid", "trainbox"),
    ),
    *_same(
        "mac",
        ("{}", "02-42-ac-11-00-02"),
        ("{}", "02:42:AC:11:00:02"),
        ("{}", "0242.ac11.0002"),
        ("link/ether {} brd", "02:42:ac:11:00:02"),
        ("wlx{}", "0242ac110002"),
        ("hwaddr {}", "0242ac1100fe"),
        ("eth_{}_x", "02-42-AC-11-00-02"),
    ),
    *_same(
        "address",
        ("log_{}.txt", "203.0.113.7"),
        ("{}_log", "203.0.113.7"),
        ("node-{}", "203-0-113-7"),
        ("{}", "203-0-113-7.example.net"),
        ("::ffff:{}", "203.0.113.7"),
        ("[{}]:80", "2001:db8::7"),
        ("{}%eth0", "fe80::1"),
        ("tcp_{}_29500", "10.1.2.3"),
        ("run-{}:80", "10.1.2.3"),
        ("{}", "7.113.0.203.in-addr.arpa"),
        ("arn:aws:iam::{}:role/x", "123456789012"),
        ("{}", "i-0abcd1234ef567890"),
    ),
]

# Prefixes of providers' secrets. What follows them is so plain that no other rule finds it.
PREFIXES = (
    "gho_ github_pat_ glpat- glrt- hf_ rpa_ npm_ gsk_ r8_ fw_ api_org_ tgp_v1_ ntn_ lin_api_ "
    "sntrus_ sntrys_ phx_ sbp_ nfp_ jina_ sk_live_ rk_test_ whsec_ pit_ wandb_v1_ lsv2_pt_ glsa_ "
    "glc_ KGAT_ rubygems_ shpat_ dop_v1_ pscale_tkn_ secret_box_ dckr_pat_ re_abcdef_ sk- pypi- "
    "nvapi- pplx- xai- csk- tvly- tskey- GOCSPX- ATATT- xapp- xoxe.xoxp- xkeysib- ya29. hvs. sl. "
    "dp.pt. 1//0 eyJabcdef.eyJ LS0tLS1CRUdJTi "
).split()

SHAPES += _known() + NAMES
SHAPES += [("prefix", f"got {prefix}{'abcdefghij' * 4}", prefix) for prefix in PREFIXES]
# Names of secrets, with a value that gives itself away by nothing else; the weak ones want more.
STRONG = (
    "password passwd passphrase passwort passcode sshpass secret credential api_key access_key "
    "account-key secret_key private_key app_key auth_key signing_key encryption_key master_key "
    "deploy_key license_key access_token auth_token api_token refresh_token security_token "
    "session_token bearer_token bot_token"
).split()
WEAK = "sessid sessionid session key sid auth jwt nonce code sig cred key_id token_value".split()
SHAPES += [("name", f"got {name}: hunter-two", "hunter-two") for name in STRONG]
SHAPES += [("name", f"{name} = ab0ab0ab0ab0ab0ab0", "ab0ab0") for name in WEAK]
