"""Stages that go wrong on purpose, to see that the runner calls each by its name.

    python nsa/tests/oneshot_faults.py crash              behave as that stage
    python nsa/tests/oneshot_faults.py --run pass,hang OUT_DIR [options of `run`]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # run by path, uninstalled

CANARIES = {
    "github": "ghp_" + "a1B2c3D4e5" * 4,
    "github_fine": "github_pat_" + "11ABCDEFG0" * 5,
    "gitlab": "glpat-" + "x1y2z3w4v5u6t7s8r9q0",
    "hugging_face": "hf_" + "AbCdEfGhIj" * 3,
    "openai": "sk-" + "proj1234567890abcdefghij",
    "stripe": "sk_live_" + "51H8abcdefghijklmnop",
    "runpod": "rpa_" + "ABCDEFGHIJ1234567890KLMN",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "google": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "pypi": "pypi-" + "AgEIcHlwaS5vcmcCJDEyMzQ1",
    "npm": "npm_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "jwt": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
    "digital_ocean": "dop_v1_" + "0123456789abcdef" * 4,
    "bearer": "Authorization: Bearer " + "opaqueBearerValue123456",
    "wandb": "wandb api key: " + "0123456789abcdef0123456789abcdef01234567",
    "password": "db_password=" + "correct-horse-battery",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIBOgIBAAJBAKj34GkxFhD9\n"
    "-----END RSA PRIVATE KEY-----",
    "url": "https://alice:" + "hunter2hunter2@git.example.com/o/r?sig=abcdef0123",
    "webhook": "https://hooks.slack.com/services/" + "T000/B000/XXXXYYYYZZZZ",
    "ip": "203.0.113.7",
    "ipv6": "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
    "email": "alice@example.com",
    "mac": "02:42:ac:11:00:02",
    "gpu_uuid": "GPU-12345678-9abc-def0-1234-56789abcdef0",
}
# What must not be found in a bundle: the private part of each.
PRIVATE = {name: text for name, text in CANARIES.items()} | {
    "bearer": "opaqueBearerValue123456",
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "password": "correct-horse-battery",
    "pem": "MIIBOgIBAAJBAKj34GkxFhD9",
    "url": "hunter2hunter2",
    "webhook": "XXXXYYYYZZZZ",
}


def send(kind: str, **row: object) -> None:
    raw(json.dumps({"kind": kind, **row}).encode() + b"\n")


def raw(data: bytes) -> None:
    fd = int(os.environ["NSA_RESULT_FD"])
    while data:
        data = data[os.write(fd, data) :]


def passed(name: str = "t::ok") -> None:
    send("test", nodeid=name, outcome="passed", duration_s=0.01, reason="")


def parity(**changes: object) -> None:
    row = {
        "case": "c/1", "op": "sel_fwd", "dtype": "bf16", "path_requested": "triton",
        "path_taken": "triton", "launches": {"_k": 1}, "fallback_reason": None, "mae": 1e-4,
        "max_abs": 1e-3, "limit_mae": 1e-3, "limit_max_abs": 1e-2, "seed": 0, "status": "PASS",
        "why": [], **changes,
    }  # fmt: skip
    send("parity", **row)


def fault_pass() -> int:
    passed()
    parity()
    print("fine")
    return 0


def fault_raise() -> int:
    passed()
    raise RuntimeError("no such luck")


def fault_import() -> int:
    import no_such_module_anywhere  # noqa: F401

    return 0


def fault_hang() -> int:
    passed()
    print("going to sleep", flush=True)
    time.sleep(600)
    return 0


def fault_deaf() -> int:
    """Ignores every polite signal."""
    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
    return 0


def fault_killed() -> int:
    passed()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fault_segfault() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def fault_nothing() -> int:
    print("exit code 0 and no test")
    return 0


def fault_slow() -> int:
    """Right, after a second."""
    time.sleep(1.0)
    passed()
    parity()
    return 0


def fault_oom_once() -> int:
    """Out of GPU memory the first time only."""
    mark = Path(os.environ["NSA_OUT_DIR"]) / "oom.mark"
    if mark.exists():
        passed()
        return 0
    mark.write_text("x")
    raise MemoryError("torch.OutOfMemoryError: CUDA out of memory.")


def fault_gpu_dies() -> int:
    """Takes the driver along: the fake nvidia-smi of the test fails from now on."""
    Path(os.environ["CUDA_TEST_DEAD"]).write_text("x")
    return fault_killed()


def fault_all_skipped() -> int:
    send("test", nodeid="t::s", outcome="skipped", duration_s=0, reason="no CUDA device")
    return 0


def fault_liar() -> int:
    """Exit code 0 with a failed row."""
    passed()
    send("test", nodeid="t::bad", outcome="failed", duration_s=0, reason="1 != 2")
    return 0


def fault_wrong_path() -> int:
    passed()
    parity(path_taken="sdpa", fallback_reason="below_min_L")
    return 0


def fault_no_launch() -> int:
    passed()
    parity(launches={})
    return 0


def fault_nan() -> int:
    passed()
    text = json.dumps({"kind": "parity", "case": "c", "path_requested": "sdpa",
                       "path_taken": "sdpa", "mae": float("nan"), "max_abs": 1.0,
                       "status": "PASS"})  # fmt: skip
    raw(text.encode() + b"\n")
    return 0


def fault_garbage() -> int:
    """Output that breaks naive readers, beside a good result."""
    passed()
    parity()
    out = sys.stdout.buffer
    out.write(b"\x1b[31mred\x1b[0m \x00nul \xff\xfe bad utf-8 \x1b]0;title\x07 end\n")
    out.write(b"x" * 1_000_000 + b"\n")
    out.write("```\n</details> | @someone #123 \u202e\n".encode())
    out.write(b"progress 1\rprogress 2\rprogress 3\n")
    out.flush()
    return 0


def fault_flood() -> int:
    """More output than a log may hold."""
    passed()
    parity()
    for i in range(60_000):
        print(f"line {i} " + "y" * 60)
    return 0


def fault_junk_rows() -> int:
    """A good result and lines on the result channel that are no rows."""
    passed()
    raw(b"hello\n{\"kind\": \"nonsense\"}\n[1,2]\n" + b"z" * 1_500_000 + b"\n\xff\xfe\n{\"kind")
    return 0


def fault_orphans() -> int:
    """Leaves a grandchild in a session of its own that holds the pipes open."""
    code = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)\n"
    fd = int(os.environ["NSA_RESULT_FD"])
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", code], pass_fds=(fd,), start_new_session=True)
    time.sleep(0.3)
    passed()
    parity()
    return 0


def fault_oom_device() -> int:
    raise MemoryError("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


def fault_secrets() -> int:
    """Prints and sends every canary, and names a file after one."""
    for name, text in CANARIES.items():
        print(f"{name}: {text}")
    send("note", level="info", text="token " + CANARIES["github"])
    send("test", nodeid="t::ok", outcome="passed", duration_s=0, reason=CANARIES["slack"])
    out = Path(os.environ["NSA_OUT_DIR"])
    (out / f"{CANARIES['hugging_face']}.csv").write_text(f"a,b\n1,{CANARIES['aws']}\n")
    (out / "data.json").write_text(json.dumps({"who": CANARIES["email"], "k": CANARIES["pem"]}))
    (out / "core.bin").write_bytes(b"\x00\x01" + CANARIES["npm"].encode())
    raise RuntimeError("failed with " + CANARIES["openai"])


def fault_skip() -> int:
    send("note", level="info", text="flash-attn is not installed")
    return 3


def fault_mute_skip() -> int:
    return 3


def fault_unproven_bench() -> int:
    send("bench", bench="b", case="b/1", status="VALID", median_us=1.0, why=[],
         parity={"status": "FAIL"})  # fmt: skip
    return 0


def fault_bench() -> int:
    send("bench", bench="b", case="b/1", status="VALID", median_us=1.0, why=[],
         parity={"mae": 0.0, "max_abs": 0.0, "status": "PASS"})  # fmt: skip
    return 0


FAULTS = {
    name.removeprefix("fault_"): function
    for name, function in list(globals().items())
    if name.startswith("fault_")
}


def stage(name: str, **changes: object):
    """The runner's Stage that behaves as the fault `name`."""
    from scripts.oneshot.model import Stage

    fields: dict = {
        "id": name, "title": f"fault {name}", "proof": "tests", "timeout_s": 30.0,
        "argv": ("{python}", "nsa/tests/oneshot_faults.py", name), "gpu": False, "estimate_s": 1.0,
        **changes,
    }  # fmt: skip
    return Stage(**fields)


TORCH_FACTS = {
    "python": "3.11.0", "torch": "2.11.0", "triton": "3.6.0", "triton_pin": "triton==3.6.0",
    "cuda_build": "13.0", "cuda_available": True, "cuda_works": True, "arch_list": ["sm_89"],
    "device": {"name": "Test GPU", "sm": "8.9", "count": 1},
    "packages": {n: "1.0" for n in ("jinja2", "pytest", "numpy", "pyyaml", "psutil")},
}  # fmt: skip


def run_faults(names: list[str], argv: list[str]) -> int:
    """The `run` verb with these stages instead of the profile's.

    `name:seconds` sets a limit, `name!` makes it a stage that needs the GPU.
    torch is not asked, which saves two seconds per run; NO_RENDER in the environment leaves the
    short report in place.
    """
    from scripts.oneshot import env, runner, stages

    env.torch_facts = lambda *_: TORCH_FACTS
    if os.environ.get("NO_RENDER"):
        runner.Run._render = lambda self, limit_s: None
    planned = [stages.ENV_STAGE]
    for name in names:
        name, _, limit = name.partition(":")
        proof = "bench" if "bench" in name else "tests"
        gpu, name = name.endswith("!"), name.rstrip("!")
        planned.append(stage(name, timeout_s=float(limit or 30), proof=proof, gpu=gpu))
    runner.plan = lambda _profile: planned
    return runner.main(["--profile", "cpu", *argv])


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        raise SystemExit(run_faults(sys.argv[2].split(","), sys.argv[3:]))
    raise SystemExit(FAULTS[sys.argv[1]]())
