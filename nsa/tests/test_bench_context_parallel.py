"""The benches of several GPUs on two CPU processes: they prove what they time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import bench_context_parallel as bench
from bench.records import read_csv
from nsa import launches

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--S_list", "64", "--l", "8", "--d", "4", "--l_sel", "16", "--n_sel", "3", "--w", "20"]


def ranks(*command):
    """Two ranks run `command`, as the runner starts them: (process, the rows they sent)."""
    rows_read, rows_write = os.pipe()
    done = subprocess.run(
        [sys.executable, "-m", "scripts.oneshot.run.ranks", "-n", "2", *command], cwd=ROOT,
        capture_output=True, text=True, timeout=200, pass_fds=(rows_write,),
        env={**os.environ, "NSA_RESULT_FD": str(rows_write), "CUDA_VISIBLE_DEVICES": "",
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(rows_write)
    with os.fdopen(rows_read) as f:
        return done, [json.loads(line) for line in f]


# Ways in which an exchange does not do its work; "" does it.
LIES = {
    "one number is off": "real(self, i)\nif self.rank == 1: self.whole[i][-1] += 1",
    # Later than the first six, which say how many calls a sample takes.
    "every second call does nothing": "n += 1\nif n < 7 or n % 2: real(self, i)",
    "an earlier result": "n += 1\nif n < 7 or n % 2: real(self, i); kept = self.whole[i].clone()\n"
    "else: self.whole[i].copy_(kept)",
    "": "real(self, i)",
}
# Each of them in turn, and the bench of context parallelism, in the same ranks.
BENCHES = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
import torch.distributed as dist
from bench import nccl, ranks
device = ranks.join_ranks("cpu", 60.0)
ranks.join_ranks, dist.destroy_process_group = lambda *_: device, lambda: None
real, codes = nccl.Exchange.run, []
for lie in {lies!r}:
    n, kept = 0, None
    body = "".join("    " + line + "\\n" for line in lie.splitlines())
    exec("def run(self, i):\\n    global n, kept\\n" + body)
    nccl.Exchange.run = run
    codes.append(nccl.main(["--mib", "2", "--shrink", "2", "--iters", "3", "--csv", {nccl!r}]))
with open({nccl!r} + ".codes" + str(dist.get_rank()), "w") as f:
    print(*codes, file=f)
sys.argv = ["bench/bench_context_parallel.py", *{argv!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(folder, rows sent) of two ranks that ran both benches: starting them takes most of the
    time."""
    out = tmp_path_factory.mktemp("ranks")
    argv = [*SMALL, "--iters", "3", "--directions", "fwd,bwd,decode", "--csv", str(out / "cp.csv")]
    text = BENCHES.format(lies=[*LIES.values()], argv=argv, nccl=str(out / "nccl.csv"))
    (out / "benches.py").write_text(text)
    done, rows = ranks(str(out / "benches.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, rows


def test_two_ranks_exchange_and_have_no_number_for_what_did_not_do_its_work(two_ranks):
    out, rows = two_ranks
    found = [r for r in rows if r.get("bench") == "nccl"]
    assert len(found) == 8
    *lies, right = (found[i : i + 2] for i in range(0, 8, 2))
    for lie, two in zip(LIES, lies, strict=False):
        assert [row["median_us"] for row in two] == [None] * 2, lie
        assert {row["status"] for row in two} <= {"FAILED", "INVALID"}, lie
    assert lies[0][0]["status"] == "FAILED"
    why = lies[0][0]["why"][0]
    assert why.endswith("numbers of the result are wrong, counted over all ranks")
    # Each rank writes a file of its own, since two prints at once can share a line.
    for rank in range(2):
        codes = (out / f"nccl.csv.codes{rank}").read_text().split()
        assert len(codes) == 4 and codes[0] == "1" and codes[-1] == "0"
    assert [r["op"] for r in right] == ["all_reduce", "all_gather"]
    assert all((r["mib"], r["world"]) == (1, 2) for r in right)
    for row, share in zip(right, (1.0, 0.5), strict=True):
        assert row["parity"]["status"] == "PASS" and row["path_taken"] == "gloo"
        assert row["algbw_gbs"] == pytest.approx(2**20 / row["median_us"] / 1e3)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * share)
    assert [r["parity"] for r in read_csv(out / "nccl.csv")] == ["PASS", "PASS"]


def test_one_dead_rank_ends_the_others(tmp_path):
    script = tmp_path / "one.py"
    dies = "if os.environ['RANK'] == '1': os._exit(7)"
    script.write_text(f"import os, time\n{dies}\ntime.sleep(60)\n")
    done, _ = ranks(str(script))
    assert done.returncode == 7 and "rank 1 of 2 ended with exit code 7" in done.stdout


def test_two_ranks_are_checked_and_timed(two_ranks):
    rows = read_csv(two_ranks[0] / "cp.csv")
    assert [row["direction"] for row in rows] == ["fwd", "bwd", "decode"]
    for row in rows:
        assert row["world"] == "2" and row["parity"] == "PASS" and row["path"] == "reference"
        wall, alone = float(row["ms"]), float(row["base_ms"])
        assert float(row["efficiency"]) == pytest.approx(alone / (2 * wall), rel=1e-4)
        assert float(row["mae"]) < 1e-5
    steps = rows[-1]  # a query sends 4 lses, probabilities of 8 tokens, 2 * 4 rows of 17 numbers
    assert int(steps["sent_bytes"]) == 4 * (4 + 2 * 8 + 2 * 4 * 17)
    assert float(steps["tokens_per_s"]) == pytest.approx(1e3 / float(steps["ms"]), rel=1e-4)


def test_timed_steps_do_their_work(monkeypatch):
    """One that returns what an earlier step had, or what is off by a little, is told."""
    args = bench.parse([*SMALL, "--iters", "3"])
    x, clocked = bench.made(args, 64, "decode", None, torch.device("cpu"))
    found = clocked(None, 1)
    assert not found.why and found.judged[0].status == "PASS" and len(found.samples) == 3
    assert len(found.left) == 3 * bench.STEPS
    real, first = x.step, x.step()
    monkeypatch.setattr(x, "step", lambda: first)
    assert "what an earlier one had returned" in "; ".join(clocked(None, 1).why)
    monkeypatch.setattr(x, "step", lambda: (real()[0] * 1.01, real()[1]))
    assert clocked(None, 1).judged[0].status == "FAIL"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_timed_calls_do_their_work(direction, monkeypatch):
    """One that returns what an earlier call had computed, or what is off by a little, or launches
    other kernels, is told."""
    alone = bench.Sequence1(bench.parse(SMALL), 64, None, torch.device("cpu"))
    real, kept, n = alone.forward, [None], iter(range(999))

    def time(forward):
        monkeypatch.setattr(alone, "forward", forward)
        return bench.timed(alone, direction, 4, None, 1)

    def every_second():
        kept[0] = kept[0] if next(n) % 2 else real()
        return kept[0]

    def sometimes():
        if next(n) % 3:
            launches.bump("_planted_kernel")
        return real()

    found = time(real)
    assert not found.why and found.judged[0].status == "PASS" and len(found.samples) == 4
    assert time(lambda: real() * 1.01).judged[0].status == "FAIL"
    if direction == "fwd":
        assert "what an earlier one had returned" in "; ".join(time(every_second).why)
        assert time(sometimes).why == ["timed calls launched different kernels"]
