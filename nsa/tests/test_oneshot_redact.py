"""Does a planted secret survive anywhere, and does harmless text stay as it is?"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nsa.tests.oneshot_faults import CANARIES, PRIVATE
from nsa.tests.oneshot_secrets import ENVIRON, SHAPES
from scripts.oneshot.box.env import _cpu_model
from scripts.oneshot.record.gate import gate
from scripts.oneshot.record.redact import Redactor


def fresh():
    """What redacts on the box of oneshot_secrets."""
    hosts = ("pod-9f8e7d6c.cluster.local",)
    return Redactor(ENVIRON, root=Path("/srv/repo"), hostnames=hosts, user="alice",
                    home="/home/alice")  # fmt: skip


@pytest.fixture
def redactor():
    return fresh()


@pytest.fixture(scope="module")
def boxed():
    return fresh()


KNOWN = ("sesame-open-77", "alice", "pod-9f8e7d6c", "198.51.100.9", "/home/alice/.ssh")


@pytest.mark.parametrize(
    ("text", "private"),
    [*((text, PRIVATE[name]) for name, text in CANARIES.items()), *zip(KNOWN, KNOWN, strict=True)],
)
def test_what_is_private_is_removed_in_every_setting(boxed, text, private):
    settings = (text, f"x={text}", f"({text})", f'"{text}",', f"a {text}\nb", json.dumps([text]))
    for setting in (*settings, f"said {text} loudly"):
        clean = boxed.text(setting)
        assert private not in clean, setting
        assert boxed.text(clean) == clean, "redaction must be stable"


@pytest.mark.parametrize(("text", "private"), SHAPES)
def test_a_shape_of_real_logs_is_removed(boxed, text, private):
    """A pattern that lists kinds knows all of them, not the one that the canary shows."""
    clean = boxed.text(text)
    assert private not in clean
    markup = re.sub(r"<(\w+(?:-\d+)?)>", r"&lt;\1&gt;", clean)
    for again in (clean, markup):
        assert boxed.text(again) == again, "redaction must be stable"


def test_nothing_of_honest_texts_is_eaten(boxed):
    """A real report shortened, measured rows, pages, kernel names, and the code of tracebacks."""
    root, before, read = Path(__file__).resolve().parents[2], sum(boxed.counts.values()), 0
    pages = "README.md docs/*.md nsa/tests/honest_report.md nsa/tests/locks/* bench/results/*/*"
    for pattern in f"{pages} nsa/kernels/**/*.py bench/*.py scripts/*.py".split():
        for path in sorted(root.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            lines = zip(text.split("\n"), boxed.text(text).split("\n"), strict=True)
            assert not [(path.name, *pair) for pair in lines if pair[0] != pair[1]]
            read += len(text)
    assert read > 1_000_000 and sum(boxed.counts.values()) == before


def alone(environ, user="", home="/home/alice", hosts=()):
    """What redacts where nothing but these is known to be private."""
    return Redactor(environ, hostnames=hosts, user=user, home=str(home))


def test_a_secret_named_after_a_picture_is_none():
    """A plot inside a page is base64, and looks like nothing but keys."""
    redactor = alone({})
    picture = base64.b64encode(random.Random(1).randbytes(3000)).decode()
    page = f'<image xlink:href="data:image/png;base64,\n{picture[:1000]}\n{picture[1000:]}"/>'
    assert redactor.text(page) == page
    assert redactor.text(f"said {picture[:200]}") != f"said {picture[:200]}"


HARMLESS = r"""
nvidia-cublas-cu12==12.8.4.1 and libcudnn.so.9.1.0.7 at 127.0.0.1:8000 or 0.0.0.0 ¦ cuBLAS v12.8.4.1
nvidia_cublas-12.8.4.1-py3-none.whl ¦ torch 2.11.0+cu130 driver 580.95.05 ¦ password: None
12:34:56 at::native::add c10::Error std::vector ¦ tokens: 1048576 token=12345678 key=value
commit 0123456789abcdef0123456789abcdef01234567 ¦ sel_fwd/dense/L=64/D=64/bf16 mae 2.1e-04
task gsk_ r8_ nvapi- ya29. wandb login
sha256 abababababababababababababababababababababababababababababababab ¦ task-force sk- AKIA
nsa/tests/test_a.py::test_b[N256-H8-D64-L512-many-bf16] ¦ a user of the root folder
x[1::2] y[100::4] at 12:34.5 of 00:01:02.3, 1:2:3 ¦ std::fe::dead add::be ::1 ::
PCIe gen5 x16, PCI express 4.0 ¦ GPU-accelerated GPU-0 ¦ serial: N/A, serial run: 4 s
password: str = None ¦ /usr/lib/python3/users.py ¦ cudnn 9.1.0.70 ¦ "cudnn": "9.1.0.70"
cudnn-cu12: 9.10.2.21 ¦ nvrtc=12.4.5.8 ¦ tensorrt==10.3.0.26 ¦ cookie: none ¦ cookies: a=b
--max-tokens 4096 --token-file x --key f --tokens abcdef ¦ --no-password --token --verbose
"triton_pin": "triton==3.6.0" ¦ "parity_pass":1051,"PASS": "good" ¦ tokens: 'Tensor' = None
token = first_token + 1 ¦ key=operator.itemgetter(0) ¦ class State(threading.local):
q[0, -queries:] ¦ actions/checkout@v4 memcpy@GLIBC_2.14 image@sha256:12 ¦ malice and Alicedale
https://host.example/@user/x ¦ https://pypi.example/pkg@1.0 ¦ http://[::1]:8000/@vite
http://reg:5000/a@sha256:1 ¦ oci://reg:5000/a@v1.2 ¦ http://host:80/@vite ¦ uid=0(root) gid=0(root)
https://host.example:8443/@user/x ¦ http://localhost:8000/a@1.0 ¦ git+https://h.example/o/r@v1.0
PASSWORD=$DB_PASSWORD ¦ password="$PW" --x ¦ PASSWORD=${PW} ¦ PASSWORD=$(pass x) ¦ password=$1
OLD_PWD=/opt/x ¦ PWD=/opt/x ¦ pass=fwd ¦ N_PASS: 1051 ¦ SORT_KEY='median' ¦ SORT_KEY=name_of_file
at 1.5.2 of 3.10.1 ¦ docker -u 1000:1000 ¦ GPU 0: NVIDIA H200, 143771 MiB
"""


@pytest.mark.parametrize("text", re.split(" ¦ |\n", HARMLESS.strip()))
def test_harmless_text_stays(boxed, text):
    assert boxed.text(text) == text


@pytest.mark.parametrize(("text", "clean"), [
    ("git@github.com: Permission denied", "github.com: Permission denied"),
    ("git@github.com:22/o", "github.com:22/o"),
    ("from 2001:db8::7: refused", "from <ip-3>: refused"),  # 1 and 2 are of SSH_CONNECTION
    ("203.0.113.7 203.0.113.8 203.0.113.7", "<ip-3> <ip-4> <ip-3>"),
    ("/nfs/home/bob/x.py", "~/x.py"), ("{'serial': '16523'}", "{'serial': '<board>'}"),
    ("|    0   N/A  N/A     41234      C   python secret.py     1810MiB |",  # of another tenant
     "|    0   N/A  N/A     <pid>      C   <process>            1810MiB |"),
])  # fmt: skip
def test_what_is_left_can_be_read(redactor, text, clean):
    assert redactor.text(text) == clean


def test_what_a_box_is_called_is_found_in_every_form(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    environ = {"PUBLIC_IPADDR": "203.0.113.9", "RUNPOD_PUBLIC_IP": "203.0.113.8",
               "CI_WEBHOOK": "https://ci.example.com/hidden-path-7"}  # fmt: skip
    redactor = alone(environ, home=tmp_path / "link", hosts=("gpu-box-17.lab.example",))
    said = redactor.text("gpu-box-17.lab.example gpu-box-17 version 203.0.113.9 version "
                         "203.0.113.8 https://ci.example.com/hidden-path-7")  # fmt: skip
    for private in ("gpu-box", "203.0.113", "hidden-path"):
        assert private not in said
    for name in ("real", "link"):  # Python says the one, a shell the other
        assert redactor.text(f"at {tmp_path / name}/x.py") == "at ~/x.py"


def test_a_secret_may_begin_with_a_slash_and_a_path_is_none(tmp_path):
    """One secret key of AWS in 64 begins with it."""
    key, path = "/bPxRfiCYEXAMPLEKEY/K7MDENG", str(tmp_path / "absent" / "key.json")
    environ = {"AWS_SECRET_ACCESS_KEY": key, "SOME_KEY": f"/{key}", "CREDENTIALS": path,
               "SSH_ASKPASS": "/usr/lib/absent"}  # fmt: skip
    redactor = alone(environ)
    assert key not in redactor.text(f"got {key} and /{key}")
    assert redactor.text(f"{path} /usr/lib/absent") == f"{path} /usr/lib/absent"


@pytest.mark.parametrize(("name", "secret"), [
    ("SMALL_PASSWORD", "abc1234"), ("MYSQL_PWD", "hunter"), ("MY_TOKEN", "ab12c"),
    ("DB_SECRET_URL", "db://svc:abc1234@x"),
])  # fmt: skip
def test_a_short_secret_is_found_as_a_whole_word(name, secret):
    redactor = alone({name: secret})
    private = "abc1234" if "abc1234" in secret else secret
    for text in (private, f"it said '{private}'.", f"x={private}&y=1", f"{private}@{private}"):
        assert private not in redactor.text(text)
    assert redactor.text(f"x{private}y") == f"x{private}y"


@pytest.mark.parametrize(("name", "value"), [
    ("TOKEN", "true"), ("KEY", "1"), ("MAX_TOKENS", "131072"), ("AUTH", "basic"), ("PASS", "1234"),
    ("MY_PASSWORD", "123456"), ("SORT_KEY", "hunter"), ("TOKEN_SIZE", "128k"),
    ("MY_SECRET", "test"), ("SESSION", "1.2.3"), ("MY_PASSWORD", "median"),
])  # fmt: skip
def test_a_common_value_of_a_secret_variable_stays(name, value):
    text = f"it said {value} and '{value}'."
    assert alone({name: value}).text(text) == text


@pytest.mark.parametrize(
    "host", "epyc titan tesla geforce blackwell xeon intel amd h100 l40s".split()
)
def test_a_host_may_be_called_as_hardware_is(host):
    """Or the same box, which its CPU and its GPU identify, could be compared with nothing."""
    redactor = alone({"HOSTNAME": f"{host}.example.net"}, hosts=(host,))
    for cpu in (f"AMD {host.upper()} 9654", f"NVIDIA {host.title()} X", f"{host}(R) CPU"):
        assert redactor.value({"cpu": cpu}) == {"cpu": cpu}
    said = redactor.text(f"on {host}.example.net alice@{host}:~$ hostname: {host}")
    assert host not in said and said.count("<host>") == 3


def test_a_host_may_be_called_as_the_hardware_of_this_box_is():
    """Whatever a list says: /proc tells it."""
    hosts = [word for word in re.split(r"\W+", _cpu_model()) if len(word) >= 4]
    assert alone({}, hosts=hosts).text(_cpu_model()) == _cpu_model()


OWN = {"MY_TOKEN": "unverifiable-word", "USER": "max", "HOSTNAME": "median", "X_AUTH": "duration",
       "AUTH_MODE": "required", "SESSION_MODE": "stage_end", "KEY_FILE": "report.html"}  # fmt: skip


@pytest.fixture
def common():
    """On a box whose private values are words of the report."""
    return alone(OWN, "max", "/home/max", ("median",))


def test_words_of_our_own_records_stay(common):
    record = {"ev": "stage_end", "required": True, "duration_s": 1.0, "median_us": 4.0,
              "user": "max-abs of the median", "files": ["report.html"]}  # fmt: skip
    assert common.value(record) == record and not common.counts
    css = "grid-template-columns: max-content; mae, max-abs"
    assert common.text(css) == css
    secret = "unverifiable-word"
    assert common.value({secret: [secret]}) == {"<secret-1>": ["<secret-1>"]}


def test_a_number_or_several_words_of_ours_are_a_secret_all_the_same():
    for secret in ("1_700_000_000", "median required", "duration!"):
        assert secret not in alone({"MY_PASSWORD": secret}).text(f"it said {secret}.")


@pytest.mark.parametrize(("text", "clean"), [
    ("USER=max LOGNAME=max", "USER=<user> LOGNAME=<user>"), ("for user 'max': no", "<user>"),
    ("/scratch/max/x.py /home/max/y", "/scratch/<user>/x.py ~/y"),
    ("max@median:~$", "<user>@<host>"), ("HOSTNAME=median", "=<host>"),
    ("AUTH_MODE=required", "AUTH_MODE=<secret-"),
    ("x: X_AUTH: duration", "X_AUTH: <secret-"),
])  # fmt: skip
def test_a_word_of_ours_that_names_somebody_is_found_by_what_stands_before_it(common, text, clean):
    found = common.text(text)
    assert clean in found and common.text(found) == found


def test_only_allowlisted_variables_are_shown(redactor):
    assert redactor.variables(ENVIRON) == {"NSA_USE_FA2": "1"}
    loads = {"PYTHONPATH": "/opt/x:/home/alice/y", "LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    shown = redactor.variables({**ENVIRON, **loads})  # what else is imported and loaded
    assert shown == {"NSA_USE_FA2": "1", **loads, "PYTHONPATH": "/opt/x:~/y"}


def test_opting_out_by_category():
    kept = Redactor(ENVIRON, keep=("ip", "host"), hostnames=("pod-9f8e7d6c",), user="alice")
    assert kept.text("203.0.113.7 pod-9f8e7d6c alice") == "203.0.113.7 pod-9f8e7d6c <user>"


def test_gate_cleans_an_earlier_run_that_never_had_its_own_and_removes_pipes(tmp_path, redactor):
    folder = tmp_path / "bundle"
    for run in ("sealed", "killed"):
        (folder / "prev" / run / "logs").mkdir(parents=True)
        (folder / "prev" / run / "logs" / "a.log").write_text("alice")
    (folder / "prev" / "sealed" / "SHA256SUMS").write_text("")
    os.mkfifo(folder / "new.csv")
    outcome = gate(folder, redactor)
    assert outcome["gate"] == "clean" and outcome["removed"] == ["new.csv"]
    assert (folder / "prev" / "sealed" / "logs" / "a.log").read_text() == "alice"
    assert (folder / "prev" / "killed" / "logs" / "a.log").read_text() == "<user>"
    assert not (folder / "new.csv").exists()


def test_placeholders_in_markup_are_no_tags(tmp_path, redactor):
    folder = tmp_path / "bundle"
    folder.mkdir()
    pre = "".join(f"<p>serial: 1652 {text}</p>\n" for text in ("alice", *CANARIES.values()))
    for name in ("report.html", "tests.junit.xml", "plot.svg"):
        (folder / name).write_text(f"<div>{pre.replace('&', '&amp;')}</div>")
    assert gate(folder, redactor)["gate"] == "clean"
    for path in folder.iterdir():
        root = ElementTree.fromstring(path.read_text())
        assert {e.tag for e in root.iter()} == {"div", "p"}
        assert root[0].text == "serial: <board> <user>"
        assert not any(private in path.read_text() for private in PRIVATE.values())
    assert gate(folder, redactor)["findings"] == []


def test_gate_fails_closed(tmp_path, redactor, monkeypatch):
    """A hit that cannot be cleaned, in a text or in a name, is a failed gate, not a shrug."""
    (tmp_path / "a.log").write_text(f"1\n{CANARIES['aws']}\n{CANARIES['npm']}")
    monkeypatch.setattr("scripts.oneshot.record.gate.write_atomic", lambda path, text: None)
    hit = {"rule": "token", "file": "a.log", "count": 1}
    findings = [{**hit, "line": line} for line in (2, 3, None)]
    assert gate(tmp_path, redactor) == {"gate": "failed", "findings": findings, "removed": []}
    (tmp_path / "a.log").rename(tmp_path / "alice.txt").write_text("fine\n")
    monkeypatch.setattr("pathlib.Path.rename", lambda self, target: None)
    assert gate(tmp_path, redactor)["gate"] == "failed"
