"""Secrets and private names as real logs show them: (text, what of it must not be seen).

The values are drawn from a seed, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import base64
import random
import re
import string
from urllib.parse import quote

DIGITS, HEX = string.digits, string.digits + "abcdef"
_ALPHABETS = {"h": HEX, "u": string.ascii_uppercase + DIGITS, "l": string.ascii_lowercase + DIGITS,
              "d": DIGITS, "w": string.ascii_letters + DIGITS}  # fmt: skip
_random = random.Random(34)


def _drawn(match: re.Match[str]) -> str:
    """Return n characters of an alphabet; the first ones are one of each of its kinds."""
    alphabet, n = _ALPHABETS[match[1]], int(match[2])
    kinds = [[c for c in group if c in alphabet]
             for group in (DIGITS, string.ascii_lowercase, string.ascii_uppercase)]  # fmt: skip
    drawn = [_random.choice(kind) for kind in kinds if kind]
    drawn += [_random.choice(alphabet) for _ in range(n - len(drawn))]
    _random.shuffle(drawn)
    return "".join(drawn)


# The box of the tests: what is known of it is searched everywhere.
KNOWN = "Plainlooking/value-42+x"
ENVIRON = {
    "MY_SERVICE_TOKEN": KNOWN, "DB_URL_SECRET": "postgres://svc:sesame-open-77@db.internal/x",
    "USER": "alice", "HOSTNAME": "pod-9f8e7d6c", "NSA_USE_FA2": "1", "OTHER": "not-shown",
    "SSH_CONNECTION": "198.51.100.9 50522 203.0.113.20 22", "CUDA_API_KEY": "should-not-be-shown",
}  # fmt: skip

# Texts between "¦", with their private part in double braces. %h32 stands for 32 drawn hex digits
# (%u: of A-Z and digits, %l: of a-z and digits, %d: digits, %w: all of them), and "↵" for a new
# line. First a user with a password.
_TEXTS = r"""
curl -u alice:{{hunter2}} https://x.example.com/a
curl -u 'bob:{{hunt er2}}' https://x.example.com/a
curl -ubob:{{hunter22}} https://x.example.com/a ¦ curl --user bob:{{hunter2}} -O
curl --user=bob:{{hunter2}} ¦ curl --proxy-user bob:{{hunter2}} x ¦ curl -U bob:{{hunter2}} x
+ docker login -u bob -p {{hunter2}} registry.example.com ¦ sshpass -p '{{hunter2}}' ssh box
sshpass -p{{hunter2}} ssh box ¦ redis-cli -h x -a {{hunter2}} ping
smbclient //nas/share -U bob%{{hunter2}} ¦ 7z x -p{{Hunter2}} a.7z ¦ unzip -P {{hunter2}} a.zip
wget --password {{hunter2}} x ¦ Server=db;Uid=sa;Pwd={{hunter2}};
machine github.com login bob password {{12345678}} ¦ default login bob password {{hunter2}}
localhost:5432:mydb:bob:{{hunter2}} ¦ connecting to bob:{{hunter2}}@db:5432/x
requests.get(u, auth=('bob', '{{hunter2}}')) ¦ cmd -p alice:{{hunter2pw}}
cmd -p {{Sw0rdfish!}} host ¦ lftp -u bob,{{hunter2}} sftp://h ¦ xfreerdp /u:bob /p:{{hunter2}}
mongosh --username a --password {{S3cr3t}} ¦ htpasswd -b f bob {{S3cr3t}}
ldapsearch -w {{S3cr3t}} -x
postgres://bob:{{P@hunter2}}@db/x ¦ bob:{{p@hunter2}}@db:5432/x
https://bob:P@{{ssw0rd!2024}}@git.example.com/x.git ¦ https://{{user:sec/}}ret@host.example.com/
https://bob@example.com:pa/{{s@hunter2}}@host/o/r ¦ https://:{{a:b/c}}@host/
https://{{user:1234/x}}@host/p ¦ postgres://{{bob:80/se@cret}}@db.example.com/x
https://{{bob:8080/x}}@192.0.2.7:80/p ¦ bob:{{hunter2}}@192.0.2.7/x ¦ //bob:{{hunter2}}@host/path
https://bob:it's{{hunter2}}@host/ ¦ https://{{tok@en}}@host/ ¦ ssh://bob:8{{0a/x}}@host/
¦¦ a token, a session, a password
password='{{hunt\'er2 x}}' ¦ {"password": "{{hunt\"er2 x}}", "a": "b"}
MYSQL_PWD={{hunter}} ¦ export DB_PASS={{hunter}} ¦ {'MYSQL_PWD': '{{hunter}}'} ¦ Pwd={{hunter}};
FOO_KEY='{{correct horse battery}}' ¦ FOO_AUTH="{{correct horse}}" ¦ FOO_KEY={{abcd1234}}
password={{$ecretPass1}} ¦ password='{{$ecret Pass}}' ¦ password={{no$ecret}} ¦ password={{%secret}}
token = {{abcdef123456}} ¦ "token": "{{abcdefgh}}" ¦ export HF_TOKEN={{abcdefgh}}
token: {{ABCDEFGHIJKL}} ¦ token%3D{{abcd1234efgh}} ¦ X-Access-Key: {{abcdefgh}}
server token {{12345678-1234-1234-1234-123456789abc}} ¦ 'Authorization': 'Bearer {{abc}}'
session key: {{%h32}} ¦ Set-Cookie: {{id=ab}}; Secure ¦ --api-key '{{abcd}}'
AccountKey{{=ab}} ¦ api_key{{=x}}&y=1
password: "{{my pass phrase, long}}" ¦ {"password": "{{a b,c}}", "a": 1} ¦ password: '{{it''s 5}}'
passwd: {{abc}} ¦ passphrase is {{open-sesame}} ¦ password is {{hunter2}} ¦ PASSWORD={{1234}}
password is '{{hunter2}}' ¦ password "{{hunter2}}" ¦ password => '{{hunter2}}' ¦ DB_PASSWORD={{abc}}
password := {{hunter2}} ¦ password -> {{hunter2}} ¦ pass={{hunter2}} ¦ pw: {{hunter2}}
<password>{{hunter2}}</password> ¦ <Secret>{{hunter2}}</Secret> ¦ PIN: {{4711}} ¦ otp={{123456}}
--pass {{hunter2}} ¦ -password {{hunter22}} ¦ password: |↵  {{hunter2}}↵
¦¦ what a prefix, a service or its length gives away
discord {{M%w23.%w6.%w38}} ¦ slack {{xapp-1-A%u10-%d12-%h40}}
https://x.webhook.office.com/webhookb2/{{%h32/IncomingWebhook/%h32}}
https://open.feishu.cn/open-apis/bot/v2/hook/{{%h32}} ¦ https://chat.example.com/hooks/{{%l26}}
https://hooks.zapier.com/hooks/catch/{{123/%w12}} ¦ brevo {{xkeysib-%h64-%w16}}
age {{AGE-SECRET-KEY-1%u58}} ¦ prime {{pit_%h64}} ¦ databricks {{dapi%h32}} ¦ kaggle {{KGAT_%h32}}
langsmith {{lsv2_pt_%h32_%h10}} ¦ shopify {{shpat_%h32}} ¦ newrelic {{NRAK-%u27}}
atlassian {{ATATT3x%w60}} ¦ scaleway {{SCW%u17}} ¦ sparkpost {{%h40}} ¦ together.ai {{%h64}}
RUNPOD {{%u40}} ¦ mattermost token {{%l26}} ¦ fal {{12345678-1234-1234-1234-123456789abc:%h32}}
hyperstack {{12345678-1234-1234-1234-123456789abc}} ¦ unknown service said {{zq_%w40}} is no key
key AKIA{{IOSFODNN7}}EXAMPLE ¦ key ASIA{{IOSFODNN7}}EXAMPLE ¦ aes key hex: {{%h64}} ¦ key ({{%h64}})
xoxb-{{123456789012}}-abcdef ¦ xoxp-{{123456789012}}-abcdef ¦ xoxa-{{123456789012}}-abcdef
xoxs-{{123456789012}}-abcdef ¦ vast key↵{{%h64}} ¦ https://b/x.bin?sig={{abcdef01}}
s3://b/x.bin?sig={{abcdef01}} ¦ gs://b/x.bin?sig={{abcdef01}} ¦ wss://b/x.bin?sig={{abcdef01}}
¦¦ a user, an address of mail
user {{Alice}} logged in ¦ /tmp/{{alice}}_cache/x ¦ {{bob}}@laptop:~$ ls ¦ {{bob}}@localhost
Alice@{{BOX}} ¦ ssh {{bob}}@box ¦ scp x {{bob}}@box:/tmp ¦ C:\Users\{{bob}}\x
/mnt/c/Users/{{bob}}/x ¦ drwxr-xr-x 2 {{alice}} {{alice}} 40 x ¦ USERNAME={{bob.builder}}
login: {{bob}} ¦ ssh-ed25519 AAAAC3NzaC1lZDI1 {{bob}}@x ¦ /nfs/home/{{bob}}/x.py
{{alice}}%40example.com ¦ mail to {{bob%40example.com}} ¦ {{bob@example.com}}
by {{Bob@Example.COM}} (at) ¦ x={{bob%40mail.example.org}}&y ¦ report_{{bob@example.com}}.csv
/data/users/{{bob}}/x ¦ {{bob=40example.com}} ¦ {{bob&#64;example.com}}
SLURM_JOB_USER={{jane}} ¦ PGUSER={{jane}}
uid=1001({{jane}}) gid=1001({{jane}}) groups=1001({{jane}})
¦¦ a host
on {{POD-9F8E7D6C}} ¦ x_{{pod-9f8e7d6c}}_y ¦ events.out.tfevents.17.{{pod-9f8e7d6c}}.9.0
alice@{{gpubox}}:~$ ¦ root@{{4f2c9a1b7d3e}}:/workspace# ¦ ssh root@{{box}} ¦ bob@{{gpu-17}} said
connect to {{db.internal}}:5432 ¦ at {{gpu-17.lab.corp}} ¦ via {{x.svc.cluster.local}}
via {{nas.lan}} ¦ {{ip-10-0-3-17.ec2.internal}} ¦ {{ip-10-0-3-17}} ¦ {{box.tail1234.ts.net}}
{{ec2-203-0-113-7.compute-1.amazonaws.com}} ¦ https://{{abc123def-8888.proxy.runpod.net}}/lab
ssh -p 12345 root@{{ssh4.vast.ai}} ¦ MASTER_ADDR={{node17}} ¦ SLURM_NODELIST={{gpu[01-04]}}
hostname: {{trainbox}} ¦ bob@{{node-3}}. ¦ at {{worker-3.default.svc}}
{{trainbox}}:1234:1240 [0] NCCL INFO Bootstrap ¦ failed to connect to [{{trainbox}}]:29500
ssh: Could not resolve hostname {{trainbox}}: ¦ Nov 25 10:11:12 {{trainbox}} kernel: NVRM: Xid
¦¦ an address of a network card, of a network
{{02-42-ac-11-00-02}} ¦ {{02:42:AC:11:00:02}} ¦ {{0242.ac11.0002}} ¦ eth_{{02-42-AC-11-00-02}}_x
link/ether {{02:42:ac:11:00:02}} brd ¦ wlx{{0242ac110002}} ¦ hwaddr {{0242ac1100fe}}
log_{{203.0.113.7}}.txt ¦ {{203.0.113.7}}_log ¦ node-{{203-0-113-7}} ¦ {{203-0-113-7.example.net}}
::ffff:{{203.0.113.7}} ¦ [{{2001:db8::7}}]:80 ¦ {{fe80::1}}%eth0 ¦ tcp_{{10.1.2.3}}_29500
run-{{10.1.2.3}}:80 ¦ {{7.113.0.203.in-addr.arpa}} ¦ arn:aws:iam::{{123456789012}}:role/x
{{i-0abcd1234ef567890}} ¦ connect to [{{fd00::1}}]:80 ¦ {{64:ff9b::1}} ¦ recudnn {{10.0.0.70}}
{{fe80::1}}%eth0: unreachable ¦ from {{2001:db8::7}}: refused ¦ NCCL: {{10.0.0.70}} refused
¦¦ a card, a board, a program of somebody else
{'serial': '{{16523}}', 'a': 1} ¦ {"board_id": {{771}}} ¦ Serial Number               : {{165230}}
NVRM: Xid (PCI:{{0000:41:00}}): 79 ¦ PCI bus id {{01:00.0}}
CUDA_VISIBLE_DEVICES=GPU-{{1a2b3c4d}},1 ¦ 00000000:{{3B:00}}.0 off ¦ 0000:{{3b:00}}.0 off
MIG-{{12345678-9abc}}-def0-1234-56789abcdef0 ¦ MIG-{{1a2b3c4d}}
|    0   N/A  N/A     41234    M+C   python {{other.py}}     1810MiB |
|    0   N/A  N/A     {{41234}}    C+G   python other.py         N/A |
"""


def _texts() -> list[tuple[str, str]]:
    lines = [line for line in _TEXTS.strip().splitlines() if not line.startswith("¦¦")]
    made = re.sub("%([hulwd])(\\d+)", _drawn, "\n".join(lines)).replace("↵", "\r")
    texts = [text.replace("\r", "\n") for text in re.split(" ¦ |\n", made)]
    return [(re.sub("{{(.*?)}}", r"\1", text), re.search("{{(.*?)}}", text)[1]) for text in texts]


def _known() -> list[tuple[str, str]]:
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
    coded = [base64.b64encode(around).decode() for around in (data, b"a" + data)]
    framed = base64.b64encode(f"user:{plain}!".encode()).decode()
    safe = base64.urlsafe_b64encode(f"??{plain}>>".encode()).decode()
    parts = [(form, form[2:-2]) for form in forms]
    parts += [(form, form[12:20]) for form in (*coded, coded[0].rstrip("="), framed, safe)]
    parts += [(f"{framed[:12]}\n{framed[12:]}", framed[14:20])]
    parts += [(f"{hexed[:20]}\n{hexed[20:]}", hexed[22:30])]
    return [(f"got {form}.", private) for form, private in parts]


# Prefixes of providers' secrets. What follows them is so plain that no other rule finds it.
PREFIXES = (
    "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glrt- hf_ rpa_ npm_ gsk_ r8_ fw_ api_org_ tgp_v1_ "
    "ntn_ lin_api_ sntrus_ sntrys_ phx_ sbp_ nfp_ jina_ sk_live_ rk_test_ whsec_ pit_ wandb_v1_ "
    "lsv2_pt_ glsa_ glc_ KGAT_ rubygems_ shpat_ dop_v1_ pscale_tkn_ secret_box_ dckr_pat_ "
    "re_abcdef_ sk- pypi- nvapi- pplx- xai- csk- tvly- tskey- GOCSPX- ATATT- xapp- xoxe.xoxp- "
    "xkeysib- ya29. hvs. sl. dp.pt. 1//0 eyJabcdef.eyJ LS0tLS1CRUdJTi "
).split()
# Names of secrets, with a value that gives itself away by nothing else; the weak ones want more.
STRONG = (
    "password passwd passphrase passwort passcode sshpass secret credential api_key access_key "
    "account-key secret_key private_key app_key auth_key signing_key encryption_key master_key "
    "deploy_key license_key access_token auth_token api_token refresh_token security_token "
    "session_token bearer_token bot_token"
).split()
WEAK = "sessid sessionid session key sid auth jwt nonce code sig cred key_id token_value".split()
SHAPES = [
    *_texts(), *_known(),
    *((f"got {prefix}{'abcdefghij' * 4}", prefix) for prefix in PREFIXES),
    *((f"got {name}: hunter-two", "hunter-two") for name in STRONG),
    *((f"{name} = ab0ab0ab0ab0ab0ab0", "ab0ab0") for name in WEAK),
]  # fmt: skip
