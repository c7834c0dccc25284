"""Stages that go wrong on purpose, to see that the runner calls each by its name.

python nsa/tests/oneshot_faults.py crash              behave as that stage
python nsa/tests/oneshot_faults.py --run pass,hang OUT_DIR [options of `run`]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT = "abc1234"
# A clean checkout's answers: asking git about this one takes a third of a short run's time.
CLEAN = dict.fromkeys(("head", "diff_sha256", "diffstat", "remote", "source_sha256", "hidden")) | {
    "commit": COMMIT + "f" * 33, "short": COMMIT, "branch": "main", "dirty": False,
    "untracked": 0, "source": "git",
}  # fmt: skip
OUT = Path(os.environ.get("NSA_OUT_DIR", "."))  # of a stage
sys.path.insert(0, str(ROOT))  # run by path, uninstalled

# Secrets by name, their private part in double braces: what must not be found in a bundle. "·" is
# left out; it keeps scanners from taking this file for a leak. None of them is real: the redaction
# test plants them (XXXX.. is part of such a secret, and no unfinished text).
_CANARIES = r"""
github {{ghp_·a1B2c3D4e5a1B2c3D4e5a1B2c3D4e5a1B2c3D4e5}}
github_fine {{github_pat_·11ABCDEFG011ABCDEFG011ABCDEFG011ABCDEFG011ABCDEFG0}}
gitlab {{glpat-·x1y2z3w4v5u6t7s8r9q0}} ¦ hugging_face {{hf_·AbCdEfGhIjAbCdEfGhIjAbCdEfGhIj}}
openai {{sk-·proj1234567890abcdefghij}} ¦ stripe {{sk_live_·51H8abcdefghijklmnop}}
runpod {{rpa_·ABCDEFGHIJ1234567890KLMN}} ¦ aws {{AKIA·IOSFODNN7EXAMPLE}}
google {{AIza·SyA1234567890abcdefghijklmnopqrstuv}} ¦ slack {{xoxb-·123456789012-abcdefABCDEF}}
pypi {{pypi-·AgEIcHlwaS5vcmcCJDEyMzQ1}} ¦ npm {{npm_·abcdefghijklmnopqrstuvwxyz0123456789}}
groq {{gsk_·AbCdEfGhIjAbCdEfGhIjAbCdEfGhIjAbCdEfGhIjAbCdEfGhIj}}
replicate {{r8_·AbCdEfGhIj12345AbCdEfGhIj12345}} ¦ docker {{dckr_pat_·AbCdEfGhIj1234567_-x}}
nvidia {{nvapi-·Ab1-Cd2_Ef3Ab1-Cd2_Ef3Ab1-Cd2_Ef3Ab1-Cd2_Ef3Ab1-Cd2_Ef3}}
google_oauth {{ya29.·a0AfH6SMBx-1234567890_abcdef}}
cookie Cookie: session={{s3ss10n}}; csrf=n0body ¦ ipv6 {{2001:0db8:85a3:0000:0000:8a2e:0370:7334}}
azure DefaultEndpointsProtocol=https;AccountKey={{AbC+dEf/123==}}AbC+dEf/123==AbC+dEf/123==
jwt {{eyJhbGciOiJIUzI1NiJ9·.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl}}
digital_ocean {{dop_v1_·0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef}}
bearer Authorization: Bearer {{opaqueBearerValue123456}} ¦ header x-api-key: {{opaque77777}}
wandb wandb api key: {{0123456789abcdef0123456789·abcdef01234567}} ¦ ip {{203.0.113.7}}
wandb_login wandb login --relogin {{fedcba9876543210fedcba9876543210·fedcba98}}
password db_password={{correct-horse-battery}} ¦ password_option mysql --password {{hunter22}}
token_option tool --auth-token={{opaque-4f9d8c}} ¦ email {{alice@example.com}}
pem -----BEGIN RSA PRI·VATE KEY-----↵{{MIIBOgIBAAJBAKj34GkxFhD9}}↵-----END RSA PRIVATE KEY-----
url https://alice:{{hunter2hunter2}}@git.example.com/o/r?sig=abcdef0123
webhook https://hooks.slack.com/services/·T000/B000/{{XXXXYYYYZZZZ}} ¦ mac {{02:42:ac:11:00:02}}
gpu_uuid {{GPU-12345678-9abc-def0-1234-56789abcdef0}}
"""
_LINES = re.split(" ¦ |\n", _CANARIES.strip().replace("·", ""))
_MARKED = dict(line.split(" ", 1) for line in _LINES)
CANARIES = {name: re.sub("{{|}}", "", text).replace("↵", "\n") for name, text in _MARKED.items()}
PRIVATE = {name: re.search("{{(.*)}}", text)[1] for name, text in _MARKED.items()}


def send(kind: str, **row: object) -> None:
    raw(json.dumps({"kind": kind, **row}).encode() + b"\n")


def raw(data: bytes) -> None:
    fd = int(os.environ["NSA_RESULT_FD"])
    while data:
        data = data[os.write(fd, data) :]


def outcome(name: str = "t::ok", state: str = "passed", reason: str = "") -> None:
    send("test", nodeid=name, outcome=state, duration_s=0.01, reason=reason)


passed = outcome


def bench(**changes: object) -> None:
    send("bench", bench="b", case="b/1", status="VALID", median_us=1.0, why=[], **changes)


def parity(**changes: object) -> None:
    row = {
        "case": "c/1", "op": "sel_fwd", "dtype": "bf16", "path_requested": "triton",
        "path_taken": "triton", "launches": {"_k": 1}, "fallback_reason": None, "mae": 1e-4,
        "max_abs": 1e-3, "limit_mae": 1e-3, "limit_max_abs": 1e-2, "seed": 0, "status": "PASS",
        "why": [], **changes,
    }  # fmt: skip
    send("parity", **row)


def right() -> None:
    passed()
    parity()


def until(done, limit_s: float = 30.0) -> bool:
    """Wait for `done()` to be true. Returns whether it came to be."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def report_xid(number: int) -> None:
    """The fake driver reports `number`; the test passes once the listener has taken it."""
    reported = Path(os.environ["CUDA_TEST_XIDS"])
    half = reported.with_suffix(".half")  # a file that is still empty would be taken, and be lost
    half.write_text(f"{number}\n")
    half.replace(reported)
    until(lambda: not reported.exists())
    right()


def deaf() -> None:
    """Ignores every polite signal."""
    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    send("note", level="info", text="deaf from here on")
    time.sleep(600)


OUT_OF_MEMORY = "raise MemoryError('torch.OutOfMemoryError: CUDA out of memory.')"
# Stages by name, each a piece of Python that runs with the names of this module.
FAULTS = {
    "pass": "right(); print('fine')",
    "raise": "passed(); raise RuntimeError('no such luck')",
    "import": "import no_such_module_anywhere",
    "hang": "passed(); print('going to sleep', flush=True); time.sleep(600)",
    "deaf": "deaf()",
    "killed": "passed(); os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "nothing": "print('exit code 0 and no test')",
    "slow": "time.sleep(1.0); right()",
    "until_told": "until((OUT / 'go').exists); (OUT / 'go').unlink(); right()",
    "edit": "Path(os.environ['CUDA_TEST_EDIT']).write_text('x = 2\\n'); right()",
    # The fake nvidia-smi fails from now on.
    "gpu_dies": "Path(os.environ['CUDA_TEST_DEAD']).touch(); os.kill(os.getpid(), signal.SIGKILL)",
    "all_skipped": "outcome('t::s', 'skipped', 'no CUDA device')",
    "liar": "passed(); outcome('t::bad', 'failed', '1 != 2')",
    "wrong_path": "passed(); parity(path_taken='sdpa', fallback_reason='below_min_L')",
    "no_launch": "passed(); parity(launches={})",
    "nan": "passed(); parity(path_requested='sdpa', path_taken='sdpa', mae=float('nan'))",
    "garbage": r"""
right()
out = sys.stdout.buffer
out.write(b"\x1b[31mred\x1b[0m \x00nul \xff\xfe bad utf-8 \x1b]0;title\x07 end\n")
out.write(b"x" * 1_000_000 + b"\n")
out.write("```\n</details> | @someone #123 \u202e\n".encode())
out.write(b"progress 1\rprogress 2\rprogress 3\n")
""",
    "steady": "right(); send('progress', done=1, total=4, text='case 1 of 4'); time.sleep(1.5)",
    "chatty": "passed(); [print(f'line {i} ' + 'y' * 60) for i in range(3000)]",
    "junk_rows": r"""
passed()
raw(b'hello\n{"kind": "nonsense"}\n[1,2]\n' + b"z" * 1_500_000 + b'\n\xff\xfe\n{"kind')
""",
    "orphans": r"""
code = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)\n"
fd = int(os.environ["NSA_RESULT_FD"])  # grandchildren in sessions of their own hold it open
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", code], pass_fds=(fd,), start_new_session=True)
time.sleep(0.3)
right()
""",
    "oom_device": OUT_OF_MEMORY,
    "big_always": OUT_OF_MEMORY,
    "skip": "send('note', level='info', text='flash-attn is not installed'); sys.exit(3)",
    "mute_skip": "sys.exit(3)",
    "unproven_bench": "bench(parity={'status': 'FAIL'})",
    "bench": "bench(path_taken='sdpa', parity={'mae': 0.0, 'max_abs': 0.0, 'status': 'PASS'})",
    "plant": r"""
import tarfile, zipfile
passed()
for name, value in os.environ.items():
    print(f"{name}={value}")
send("note", level="info", text="token " + CANARIES["github"])
for name, text in CANARIES.items():
    print(f"{name} {text}", flush=True)
    print(f"{text}", file=sys.stderr, flush=True)
    if "/" not in text and "\n" not in text:
        (OUT / f"{text[:120]}.csv").write_text("a\n1\n")
        (OUT / f"sub {text[:120]}").mkdir()
        (OUT / f"sub {text[:120]}" / f"{name}.txt").write_text("x\n")
rows = [f'{name},"{text}"' for name, text in CANARIES.items()]
text = "\n".join(CANARIES.values())
for name, content in {
    "rows.csv": "name,value\n" + "\n".join(rows) + "\n",
    "keys.json": json.dumps({text: [text] for text in CANARIES.values()}),
    "lines.jsonl": "".join(json.dumps(t) + "\n" for t in CANARIES.values()),
    "plain.txt": text,
    "core.png": "\x89PNG\r\n\x1a\n\0" + text,
}.items():
    (OUT / name).write_text(content, encoding="latin-1", newline="")
with tarfile.open(OUT / "core.tgz", "w:gz") as tar:
    tar.add(OUT / "plain.txt", arcname="plain.txt")
with zipfile.ZipFile(OUT / "core.zip", "w") as packed:
    packed.writestr("plain.txt", text)
(OUT / "link.txt").symlink_to("/etc/hostname")
raise RuntimeError(" and ".join(CANARIES.values()))
""",
    "plant_rows": """
for name, text in CANARIES.items():
    outcome(f"t::{name}[{text}]", "passed", text)
    parity(case=text, op=text, path_requested=text, path_taken=text, why=[text], dtype=text)
    send("bench", bench=text, case=text, status="SKIPPED", why=[text])
    send("note", level="warn", text=text)
    send("metric", name=text, value=1.0, unit=text)
    send("progress", done=1, total=2, text=text)
""",
    "odd_metrics": """
passed()
send("metric", name="first_call_ms", value="soon", unit="ms")
send("metric", name="peak_vram_mib", value=[1], unit="MiB")
""",
    "nameless_case": "parity(case='', status='FAIL', why=['wrong'])",
    "endless_row": r"passed(); [raw(b'\x00\xffgarbage {' * 4096) for _ in range(200)]",
    "pipes": """
passed()
(OUT / "bench").mkdir(exist_ok=True)
for name in ("events.jsonl", "report.md", "bench/samples.jsonl", ".ballast", "new.csv"):
    (OUT / name).unlink(missing_ok=True)
    os.mkfifo(OUT / name)
""",
    "eats_its_log": "passed(); (OUT / 'logs' / 'eats_its_log.log').unlink()",
    "closes_results": """
passed()
os.close(int(os.environ["NSA_RESULT_FD"]))
print("after the results")
time.sleep(0.2)
""",
    "disk_full": "passed(); raise OSError(28, 'No space left on device')",
    "clock_back": r"""
passed()
(OUT / "made.csv").write_text("a\n1\n")
os.utime(OUT / "made.csv", (time.time() - 86400, time.time() - 86400))
""",
    "big_or_half": f"""
if "--shrink" not in sys.argv:
    {OUT_OF_MEMORY}
send("note", level="warn", text="sizes are 64 here instead of 128")
passed()
""",
    "big_or_few": f"""
if "--fewer" not in sys.argv:
    {OUT_OF_MEMORY}
passed()
""",
    # The stage sys.argv[2] of a card: right, but for the sanity stage of the card CUDA_TEST_BAD.
    "card": """
visible, name = os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[2]
bad, _, fault = os.environ["CUDA_TEST_BAD"].partition(":")
if name == "health":
    other = {"gpu": int(sys.argv[-1])} if "--gpu" in sys.argv else {}
    send("health", device="Test GPU", copy_gbs=1000.0 + int(visible), status="OK", why=[], **other)
elif name == "sanity" and bad in visible.split(","):
    if fault == "killed":  # the driver no longer knows the card
        os.unlink(os.environ["CUDA_TEST_DEAD"].replace("dead", "cards/" + bad))
    behave(fault)
else:
    passed()
    parity(case=f"{name}/{visible}")
""",
    **{f"xid_{number}": f"report_xid({number})" for number in (31, 48, 79)},
    **{f"cuda_{name}": f"cuda_{name}()" for name in ("illegal", "all_memory", "hoard_and_hang")},
}


def behave(name: str) -> None:
    exec(compile(FAULTS[name], f"<fault {name}>", "exec"), globals())


# ---- faults that need a GPU ----------------------------------------------------------------------


def cuda_illegal():
    """A Triton kernel writes where no memory is; the context of this process is lost."""
    import torch
    from triton import jit, language

    global tl  # a jitted function looks names up in its module
    tl = language

    @jit
    def astray(X, far):
        tl.store(X + far, 1.0)

    passed()
    x = torch.zeros(16, device="cuda")
    astray[(1,)](x, 1 << 44)
    torch.cuda.synchronize()


def _take_all_memory() -> list:
    """Allocate until nothing fits, in ever smaller pieces."""
    import torch

    taken, size = [], 1 << 33
    while size >= 1 << 20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def cuda_all_memory():
    """Takes the whole memory of the GPU, then asks for more; a smaller try is content."""
    import torch

    if "--shrink" in sys.argv:
        return passed()
    taken = _take_all_memory()
    print(f"{sum(t.numel() for t in taken) >> 20} MiB taken", flush=True)
    taken.append(torch.empty(1 << 33, dtype=torch.uint8, device="cuda"))


def cuda_hoard_and_hang():
    """Holds the whole memory of the GPU and hears no polite signal."""
    taken = _take_all_memory()
    print(f"{len(taken)} pieces taken", flush=True)
    deaf()


def stage(name: str, **changes: object):
    """The runner's Stage that behaves as the fault `name`."""
    from scripts.oneshot.record.model import Stage

    argv = ("{python}", "nsa/tests/oneshot_faults.py", name)
    known = dict(id=name, argv=argv, proof="tests", timeout_s=30.0, gpu=False, estimate_s=1.0)
    return Stage(title=f"fault {name}", **{**known, **changes})


TORCH_FACTS = {
    "python": "3.11.0", "torch": "2.11.0", "triton": "3.6.0", "triton_pin": "triton==3.6.0",
    "cuda_build": "13.0", "cuda_available": True, "cuda_works": True, "arch_list": ["sm_89"],
    "device": {"name": "Test GPU", "sm": "8.9", "count": 1},
    "packages": {n: "1.0" for n in ("jinja2", "pytest", "numpy", "pyyaml")},
}  # fmt: skip


def of_cards() -> list:
    """The stages of a run on several cards."""
    from scripts.oneshot.box import cards, env

    card = lambda name, **how: stage("card", id=name, gpu=True, argv=(*stage("card").argv, name),
                                     **{"proof": "parity", **how})  # fmt: skip
    env.nvidia_hardware = lambda: "a fake one"
    cards._together = lambda good, profile: [cards._on(card("nccl"), good)]
    return [card("sanity"), card("health", proof="row", required=False), card("later")]


def run_faults(names: list[str], argv: list[str]) -> int:
    """The `run` verb with these stages instead of the profile's.

    `name:seconds` sets a limit, `name!` makes it a stage that needs the GPU, `name+` one that can
    shrink; what stands after `=` is another argument of it. `@name` is one of the quick profile.
    torch is not asked, which saves two seconds per run; NO_RENDER in the environment leaves the
    short report in place. REAL_BOX in it leaves the box as it is, for faults of a real GPU.
    """
    from scripts.oneshot.box import env
    from scripts.oneshot.run import lock, runner, stages

    if "CUDA_TEST_DEAD" in os.environ:  # a fake GPU shares its name with those of other tests
        lock.LOCKS = Path(os.environ["TMPDIR"])
    if not os.environ.get("REAL_BOX"):
        env.torch_facts = lambda *_: TORCH_FACTS
    real = {s.id: s for s in stages.plan("quick")}
    fault = json.loads(os.environ.get("ONESHOT_FAULT", "{}"))
    install(fault)
    if os.environ.get("NO_RENDER"):
        runner.Run._render = lambda self, limit_s: None
    planned = [stages.ENV_STAGE, *(of_cards() if "cards" in fault else ())]
    for name in filter(None, names):
        if name.startswith("@"):
            planned.append(real[name[1:]])
            continue
        name, _, limit = name.partition(":")
        proof = "bench" if "bench" in name else "tests"
        gpu, shrinks, name = "!" in name, "+" in name, name.rstrip("!+")
        name, _, more = name.partition("=")
        changes = {"argv": stage(name).argv + ((more,) if more else ()), "shrinks": shrinks}
        if name == "clock_back":
            changes.update(outputs=("made.csv",), proof="output")
        planned.append(stage(name, **{"timeout_s": float(limit or 30), "proof": proof, "gpu": gpu,
                                      **changes}))  # fmt: skip
    runner.plan = lambda _profile: planned
    return runner.main(["--profile", "cpu", *argv])


@dataclass
class Outcome:
    """A run that has ended: its exit code, what it printed, and its output folder."""

    code: int
    console: str
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / COMMIT

    @property
    def bundle(self) -> dict:
        return json.loads((self.folder / "bundle.json").read_text())

    def stage(self, name: str) -> dict:
        return next(s for s in self.bundle["stages"] if s["id"] == name)

    def texts(self) -> str:
        return " ".join(n["text"] for n in self.bundle["notes"])


def command(out: Path, stages: str, *options: str) -> list[str]:
    return [sys.executable, __file__, "--run", stages, str(out), "--commit", COMMIT + "f", *options]


def environment(env=None, fault=None, render=False) -> dict[str, str]:
    """That of a run, without this process's NSA_ variables. fault: see install()."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
    kept |= {} if render else {"NO_RENDER": "1"}
    return kept | {"ONESHOT_FAULT": json.dumps(fault or {}), **(env or {})}


def start(out: Path, stages: str, *options: str, **how) -> subprocess.Popen:
    """A run in a process of its own. how: as for environment()."""
    return subprocess.Popen(
        command(out, stages, *options), cwd=ROOT, env=environment(**how), text=True,
        errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def go(out: Path, stages: str, *options: str, **how) -> Outcome:
    """Wait for a run in a process of its own to end. Arguments as for start()."""
    process = start(out, stages, *options, **how)
    console, _ = process.communicate(timeout=60)
    return Outcome(process.returncode, console, out)


def git(root: Path, *words: str, who: str = "t") -> str:
    """Return what git prints."""
    identity = ["-c", f"user.name={who}", "-c", f"user.email={who}@example.com"]
    how = dict(cwd=root, check=True, capture_output=True, text=True)
    return subprocess.run(["git", *identity, *words], **how).stdout.strip()


def rows_of(argv: list[str], **env: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """How Python ends with these arguments, and the few rows that it sends."""
    read, write = os.pipe()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, pass_fds=[write], capture_output=True,
        env={**kept, "NSA_RESULT_FD": str(write), **env},
    )  # fmt: skip
    os.close(write)
    with open(read) as pipe:
        return done, [json.loads(line) for line in pipe]


# ---- faults of the supervisor itself -------------------------------------------------------------


def install(fault: dict) -> None:
    """Make the supervisor of this process go wrong; `fault` comes as JSON in ONESHOT_FAULT.

    kill / signal: "event" or "event:stage" after which it kills, or signals (with `name`), itself;
    signal_in: "module.function" before which it does; moments: where the folder is kept as it is
    after each event and before each step of packing; disk: bytes that fit into the folder; full_in:
    "module.function" that finds no space; git: root of the repository that is looked at (without
    it git says CLEAN); lose: an event like that of kill, after which the folder is "deleted",
    "moved" or "replaced" (`how`); gates: what the redaction gate finds each time; fails: a stage in
    which the runner itself fails; also: arguments of every stage, by stages that passed; cards: see
    of_cards().
    """
    import functools
    import threading

    from scripts.oneshot.record import journal
    from scripts.oneshot.run import runner

    runner.Context = functools.partial(runner.Context, ladder_s=(0.4, 0.4))
    number = getattr(signal, fault.get("name", "SIGKILL"))
    moments, root = Path(fault.get("moments", "")), fault.get("git")

    def append(real, self, ev, **fields):
        event = real(self, ev, **fields)
        at = {ev, f"{ev}:{fields.get('stage')}"}
        if fault.get("kill") in at:
            os.kill(os.getpid(), signal.SIGKILL)
        if "moments" in fault:
            _keep(self.path.parent, moments)
        if fault.get("lose") in at:
            _lose(self.path.parent, fault["how"])
        if fault.get("signal") in at:
            fault.pop("signal")
            for delay in fault.get("delays", [0.0]):
                threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        return event

    _around(journal.Journal, "append", append)
    ask = lambda facts, _root, *more: facts(Path(root), *more) if root else CLEAN
    _around(runner.checkout, "git_facts", ask)
    if "full_in" in fault:
        _before(fault["full_in"], _no_space)
    if "signal_in" in fault:
        _before(fault["signal_in"], lambda *_: os.kill(os.getpid(), number))
    if "moments" in fault:
        steps = (f"record.bundle.{step}" for step in ("inventory", "write_sums", "pack"))
        for step in ("run.runner.gate", *steps):
            _before(step, lambda folder, *_: _keep(folder, moments))
    if "disk" in fault:
        _small_disk(fault["disk"])
    if "gates" in fault:
        states = iter(fault["gates"])
        runner.gate = lambda *_: {"gate": next(states), "findings": [], "removed": []}
    if "fails" in fault:
        _before("run.runner.run_stage", lambda _, stage: 1 / (stage.id != fault["fails"]))
    if "also" in fault:
        also = {name: tuple(more) for name, more in fault["also"].items()}
        make = lambda real, name, **changes: real(name, also=also, **changes)
        _around(sys.modules[__name__], "stage", make)


def _keep(folder: Path, moments: Path) -> None:
    """Keep the folder of the run as it is now."""
    number = len(list(moments.glob("*")))
    shutil.copytree(folder, moments / f"{number:02}" / folder.name)


def _around(owner: object, name: str, call) -> None:
    """Have owner.name(...) become call(what it was, ...)."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: call(real, *args, **kwargs))


def _before(path: str, action) -> None:
    """Have `action` done with its arguments before each call of the function."""
    import importlib

    name, function = path.rsplit(".", 1)

    def call(real, *args, **kwargs):
        action(*args)
        return real(*args, **kwargs)

    _around(importlib.import_module(f"scripts.oneshot.{name}"), function, call)


def _lose(folder: Path, how: str) -> None:
    os.mkfifo(folder / "pipe")  # neither it nor an earlier run is taken along
    (folder / "prev" / "old").mkdir(parents=True)
    folder.rename(folder.with_name("elsewhere"))
    if how == "deleted":
        shutil.rmtree(folder.with_name("elsewhere"))
    if how == "replaced":
        folder.mkdir()
        (folder / "notes.txt").write_text("of somebody else")


def _no_space(*_args: object) -> None:
    raise OSError(28, "No space left on device")


def _small_disk(limit: int) -> None:
    """Whatever the supervisor writes into the bundle fails once `limit` bytes are there."""
    from scripts.oneshot.record import bundle, capture, journal
    from scripts.oneshot.run import runner

    out = next(Path(a) for a in sys.argv[3:] if a.startswith("/"))

    def limit_writes(owner, name, when_full=_no_space):
        def write(real, target, data, *more):
            used = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
            return real(target, data, *more) if used + len(data) <= limit else when_full(target)

        _around(owner, name, write)

    def lose_line(log):
        log.lost_to_disk += 1

    limit_writes(capture.StageLog, "_put", lose_line)
    limit_writes(journal.Journal, "_written", lambda _journal: False)
    limit_writes(Path, "write_bytes")
    limit_writes(journal, "write_atomic")
    runner.write_atomic = bundle.write_atomic = journal.write_atomic


FAKE_PYNVML = """
import os, time
class NVMLError(Exception): pass
class NVMLError_Timeout(NVMLError): pass
class NVMLError_GpuIsLost(NVMLError): pass
nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError = 8, 2
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
class Data:
    def __init__(self, **k): self.__dict__.update(k)
for name, answer in dict(
    Init=None, DeviceGetHandleByUUID=1, DeviceGetHandleByIndex=1, DeviceGetSupportedEventTypes=15,
    EventSetCreate=7, EventSetFree=None, DeviceGetPowerUsage=312400, DeviceGetTemperature=61,
    DeviceGetUtilizationRates=Data(gpu=97), DeviceGetMemoryInfo=Data(used=2**30),
    DeviceGetCurrentClocksEventReasons=0,
).items():
    globals()["nvml" + name] = lambda *_, answer=answer: answer
def nvmlDeviceRegisterEvents(handle, types, events): assert types == 10
def nvmlDeviceGetClockInfo(handle, which): return 1980 if which == 1 else 2619
def nvmlEventSetWait_v2(events, timeout_ms):
    path = os.environ.get("CUDA_TEST_XIDS", "")
    try:
        numbers = open(path).read().split()
        os.unlink(path)
    except OSError:
        time.sleep(0.05)
        raise NVMLError_Timeout()
    return Data(eventType=8, eventData=int(numbers[0]))
"""
FAKE_SMI = (
    "GPU-12345678-9abc-def0-1234-56789abcdef0, Test GPU, 570.86, 24564, 12, 0, 8.9, 300.00, "
    "450.00, 4, 4, 16, 16, [N/A], [N/A], 41, Enabled, 3105, 10501, 00000000:41:00.0"
)


def fake_gpu(folder: Path) -> dict[str, str]:
    """Environment of a box whose nvidia-smi answers until the file `dead` is there."""
    dead, smi = folder / "dead", folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\nif [ -e {dead} ]; then echo 'GPU is lost'; exit 15; fi\n"
                   f"echo '{FAKE_SMI}'\n")  # fmt: skip
    smi.chmod(0o755)
    (folder / "modules").mkdir()
    (folder / "modules" / "pynvml.py").write_text(FAKE_PYNVML)
    return {
        "PATH": f"{smi.parent}:{os.environ['PATH']}", "CUDA_TEST_DEAD": str(dead), "CC": "cc",
        "TMPDIR": str(folder), "PYTHONPATH": str(folder / "modules"),
        "CUDA_TEST_XIDS": str(folder / "xids"),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        from scripts.oneshot import streams

        streams.open_standard_streams()
        streams.leave(run_faults(sys.argv[2].split(","), sys.argv[3:]))
    behave(sys.argv[1])
