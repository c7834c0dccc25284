"""Training over ranks: a resumed run is the run that was never interrupted; dense beside NSA."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import needle, train, training
from scripts.checkpoints import CheckpointError, Checkpoints

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--seq", "64", "--batch", "4", "--log_every", "2"]

# Several runs in the same ranks: starting processes is most of the time of such a test.
DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from scripts import train
made, real = [], train.setup
train.setup = lambda args: made[0] if made else made.append(real(args)) or made[0]
destroy, train.dist.destroy_process_group = train.dist.destroy_process_group, lambda: None
for argv in json.loads(sys.argv[2]):
    assert train.main(argv) == 0, argv
train.dist.barrier()
destroy()
train.leave_ranks(0)
"""


def python(*command, **env):
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env},
    )  # fmt: skip


def torchrun(*command):
    how = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    done = python(*how, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(folder, name="train"):
    with (folder / f"{name}.csv").open() as f:
        return list(csv.DictReader(f))


@pytest.mark.nightly  # three of torchrun; within a process runs are resumed below
def test_fresh_processes_go_on_bit_by_bit(tmp_path):
    whole, parts, driver = tmp_path / "whole", tmp_path / "parts", tmp_path / "driver.py"
    driver.write_text(DRIVER)
    options = [*SMALL, "--steps", "6"]
    first = [*options, "--out", str(whole), "--save", str(tmp_path / "whole.pt")]
    half = [*options, "--out", str(parts), "--stop_at", "3", "--save", str(tmp_path / "half.pt")]
    torchrun(str(driver), str(ROOT), json.dumps([first, half]))
    assert len(curve(parts)) == 3
    said = torchrun("scripts/train.py", *options, "--out", str(parts), "--resume", "--save",
                    str(tmp_path / "parts.pt"))  # fmt: skip
    assert "step 1/6" not in said and said.count("step 6/6") == 1  # one rank speaks
    last = "checkpoints/nsa-64/step-00000006/state.json"
    once, again = (json.loads((folder / last).read_text()) for folder in (whole, parts))
    assert [r["loss"] for r in once["rows"]] == [r["loss"] for r in again["rows"]]
    assert once["norms"] == again["norms"] and len(set(once["norms"])) == 6
    assert [r["step"] for r in again["rows"]] == list(range(6))
    state = lambda name: torch.load(tmp_path / f"{name}.pt", weights_only=True)["state"]
    want, half, got = map(state, ("whole", "half", "parts"))
    assert set(want) == set(got)
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not any(torch.equal(want[name], half[name]) for name in want if "weight" in name)


def test_ranks_leave_without_the_teardown_that_may_abort(monkeypatch):
    """With its code and all that it printed; a process that is no rank ends as any other."""
    leave = "import atexit, os\nfrom bench.ranks import leave_ranks\natexit.register(os.abort)\n"
    done = python("-c", leave + "print('said')\nleave_ranks(3)", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (3, "said\n"), done.stderr
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="3"):
        train.leave_ranks(3)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """NSA and dense attention, three steps each, in this process."""
    out = tmp_path_factory.mktemp("both")
    options = [*SMALL, *"--attention nsa,dense --layers 1 --steps 3 --save_every 1".split()]
    assert train.main([*options, "--out", str(out)]) == 0
    return out, options


def test_both_attentions_see_the_same_steps(both):
    out, _ = both
    rows, measured = curve(out), curve(out, "rates")
    assert [r["attention"] for r in rows] == ["nsa"] * 3 + ["dense"] * 3
    assert [r["step"] for r in rows] == ["0", "1", "2"] * 2
    halves = rows[:3], rows[3:]
    assert [r["lr"] for r in halves[0]] == [r["lr"] for r in halves[1]]
    assert all(float(h[2]["loss"]) < float(h[0]["loss"]) for h in halves)
    assert [r["attention"] for r in measured] == ["nsa", "dense"]
    assert all(r["tokens_per_step"] == "256" and float(r["tokens_per_s"]) > 0 for r in measured)
    pytest.importorskip("matplotlib")
    picture = (out / "train.svg").read_text()
    assert all(word in picture for word in ("nsa", "dense", "nats per byte", "tokens/s"))


def test_a_checkpoint_of_another_run_is_refused(both, capsys):
    out, options = both
    for name, other, words in (("lr", "0.5", "0.006, this run has 0.5"), ("seed", "7", "0, this")):
        more = [f"--{name}", other, "--resume", "--out", str(out)]
        assert train.main([*options, *more]) == 2
        assert f"was made with {name} = {words}" in capsys.readouterr().err


@pytest.fixture
def parts():
    """What a checkpoint is made of: a model, its optimizer, and what draws."""
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters()), torch.Generator().manual_seed(3)


@pytest.fixture
def save(tmp_path, parts):
    """save(step) writes a checkpoint of them."""
    return lambda step: Checkpoints(tmp_path, {}).save(step, *parts, [], [], {})


@pytest.mark.parametrize("file, damage", [
    ("state.json", lambda p: p.write_text("")), ("state.json", lambda p: p.write_text("[]")),
    ("state.json", lambda p: p.write_text('{"format": "else"}')),
    ("state.json", lambda p: p.write_text(p.read_text().replace('"norms"', '"names"'))),
    ("state.json", lambda p: p.write_text(p.read_text().replace('"step": 4', '"step": "4"'))),
    ("*.distcp", Path.unlink), ("*.distcp", lambda p: p.write_bytes(p.read_bytes()[:99])),
], ids=["empty", "a list", "another format", "no norms", "text", "no shard", "cut"])  # fmt: skip
def test_a_damaged_checkpoint_is_named(tmp_path, file, damage, parts, save):
    damage(next(save(4).glob(file)))
    with pytest.raises(CheckpointError, match="step-00000004"):
        Checkpoints(tmp_path, {}, resume=True).resume(*parts)


def test_resuming_keeps_what_was_measured(both, tmp_path):
    """Of a finished run nothing is measured again; an unfinished one adds to what it has."""
    out, options = both
    before, last = curve(out, "rates"), "checkpoints/nsa-64/step-00000003"
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    assert train.main([*options, "--resume", "--out", str(tmp_path)]) == 0
    assert curve(tmp_path, "rates") == before and all(float(r["first_step_s"]) > 0 for r in before)
    shutil.rmtree(tmp_path / last)
    assert train.main([*options, "--resume", "--out", str(tmp_path)]) == 0
    after = curve(tmp_path, "rates")
    assert after[0]["first_step_s"] == before[0]["first_step_s"] and after[1] == before[1]
    # Of three steps the first of each process is compilation.
    state = json.loads((tmp_path / last / "state.json").read_text())
    assert state["measured"]["timed_steps"] == 1


def test_random_states_are_restored(tmp_path, parts, save):
    model, optimizer, draw = parts
    torch.manual_seed(1)
    save(4)
    want = torch.rand(2), torch.rand(2, generator=draw), model.weight.clone()
    with torch.no_grad():
        model.weight.zero_()
    torch.manual_seed(9)
    other = torch.Generator()
    done = Checkpoints(tmp_path, {}, resume=True).resume(model, optimizer, other)
    assert done == (4, [], [], {})
    got = torch.rand(2), torch.rand(2, generator=other), model.weight
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_checkpoints_are_due_found_and_told_apart(tmp_path, parts, save):
    due = lambda every: [n for n in range(1, 8) if Checkpoints(tmp_path, {}, every=every).due(n)]
    assert due(3) == [3, 6] and due(0) == []
    for name in ("step-00000009", "step-00000050.tmp", "step-7", ".step-00000002.part",
                 ".step-00000060.part"):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000002.part" / "torn").touch()  # of a run that was killed while it wrote
    for step in (2, 3, 4):
        save(step)
    left = {p.name for p in tmp_path.glob("step-0*")} - {"step-00000050.tmp"}
    # One of a longer run before this one is nobody's to delete.
    assert left == {"step-00000003", "step-00000004", "step-00000009"}
    again = Checkpoints(tmp_path, {"seed": 1}, resume=True)
    assert again.latest().name == "step-00000004" and not list(again.latest().glob("torn"))
    with pytest.raises(CheckpointError, match="made with seed = None, this run has 1"):
        again.resume(*parts)


def test_compiled_and_recomputed_training_is_the_same(both, tmp_path):
    out, options = both
    options = [*options, "--attention", "nsa", "--compile", "--compile_backend", "aot_eager"]
    assert train.main([*options, "--recompute", "--out", str(tmp_path)]) == 0
    for want, got in zip(curve(out)[:3], curve(tmp_path), strict=True):
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), abs=1e-4)


def test_dense_attention_is_causal_softmax_of_the_same_heads():
    config = training.PRESETS["cpu"].config
    torch.manual_seed(0)
    layer = train.DenseAttention(config).double()
    x = torch.randn(2, 9, config.dim, dtype=torch.float64)
    weights = layer.qkv.weight.split(layer.widths)
    q, k, v = ((x @ weight.T).unflatten(-1, (-1, 16)) for weight in weights)
    q, k = (train.rotary(t, torch.arange(9), config.rope_base) for t in (q, k))
    k, v = (t.repeat_interleave(config.heads // config.groups, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 4
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    out = torch.einsum("bhts,bshd->bthd", scores.where(seen, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(layer(x), layer.out(out.flatten(-2)))


@pytest.mark.parametrize("argv, words", [
    ("--attention sparse", "--attention: must be from nsa, dense, each once, got sparse"),
    ("--attention dense --save x", "--save is for the NSA model"), ("--seq 8", "--seq must be"),
    ("--steps 0", "--steps: must be a whole number above 0, got '0'"), ("--heads 3", "heads"),
    ("--save_every -1", "--save-every must be 0 or more"),
    ("--batch 4", "--batch must be a multiple of the 3 ranks, got 4"),
    ("--save /dev/null/x", "--save: wants a file that can be written, got '/dev/null/x'"),
    ("--out /dev/null/x", "--out: wants a folder that can be written, got '/dev/null/x'"),
    ("--out /dev/null", "--out: wants a folder that can be written, got '/dev/null'"),
    ("--seed 99999999999999999999", "--seed: must be an integer of 64 bits, got '9999"),
])  # fmt: skip
def test_usage_errors_name_the_option(argv, words, capsys, monkeypatch):
    if "3 ranks" in words:
        monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as stopped:
        train.main(["--device", "cpu", *argv.split()])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("world, options, expected", [
    (1, "64,128,256 --batch 4", [(64, 4), (128, 2), (256, 1)]),
    (1, "64,128", [(64, 4), (128, 2)]), (3, "64", [(64, 6)]),
    (4, "64,128,512", [(64, 32), (128, 16), (512, 4)]),  # a long one for every rank
    (4, "64,512 --batch 8", [(64, 8), (512, 4)]),  # as asked for, and told
    (4, "64,136", [(64, 12), (136, 4)]),  # 8.5 short ones for a long one on every rank
])  # fmt: skip
def test_longer_sequences_keep_the_tokens_per_step(world, options, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    parser = train.build_parser()
    args = parser.parse_args(["--device", "cpu", "--seq", *options.split()])
    planned = train.presets(parser, args, 10_000)
    assert [(p.seq, p.batch) for p in planned] == expected


def test_tokens_per_step_that_differ_are_told(tmp_path, capsys):
    """And so is what --resume found no checkpoint of."""
    options = [*SMALL, "--seq", "64,96", "--layers", "1", "--steps", "1", "--out", str(tmp_path)]
    assert train.main([*options, "--resume"]) == 0
    err = capsys.readouterr().err
    assert "tokens per step differ: 256 at --seq 64, 192 at --seq 96" in err
    for name in ("nsa-64", "nsa-96"):
        assert f"{name}: no checkpoint in {tmp_path / 'checkpoints' / name}: starts at the" in err
    assert [r["tokens_per_step"] for r in curve(tmp_path, "rates")] == ["256", "192"]


@pytest.mark.parametrize("bad, row, name, code", [
    (None, 0, "loss", 0), (0, 0, "loss", 1), (1, 0, "loss", 1), (1, -1, "val_loss", 1),
])  # fmt: skip
def test_one_loss_that_is_not_finite_decides_the_exit_code(
    bad, row, name, code, tmp_path, monkeypatch
):
    """The loss of a second model does not make up for the first one's, and a last step that went
    wrong is seen by the held-out loss alone."""
    real, runs = train.train, []

    def spoilt(*args, **how):
        runs.append(real(*args, **how))
        if len(runs) - 1 == bad:
            runs[-1].rows[row][name] = float("nan")
        return runs[-1]

    monkeypatch.setattr(train, "train", spoilt)
    options = [*SMALL, "--layers", "1", "--steps", "2", "--attention", "dense,nsa"]
    assert train.main([*options, "--out", str(tmp_path)]) == code and len(runs) == 2
    assert len(runs[0].rows) > 1


def test_a_needles_depth_is_its_place_in_the_whole_text():
    """And none lies where a query must look."""
    cases = [needle.make_case(8192, 100, seed=seed) for seed in range(3)]
    first = (8192 - 100) // needle.L_SEL  # the earliest query's own block
    for blocks in (c.needles // needle.L_SEL for c in cases):
        assert blocks.min() >= needle.N_INIT and blocks.max() <= first - needle.N_LOCAL
    none = lambda q, k_cmp, **kw: torch.zeros(1, 100, 2, 1, dtype=torch.int32)
    rows = needle.by_depth([8192], 3, 100, 16, select=none)
    depths = [p / 819.2 for c in cases for p in c.needles.flatten().tolist()]
    assert [r["n"] for r in rows] == [sum(i <= d < i + 1 for d in depths) for i in range(10)]


def test_needles_are_counted_by_depth_and_drawn(tmp_path, capsys):
    recent = lambda q, k_cmp, **kw: torch.arange(28, 32, dtype=torch.int32).expand(1, 8, 2, 4)
    rows = needle.by_depth([2048], 2, 8, 16)
    assert sum(r["n"] for r in rows) == 2 * 8 * needle.GROUPS
    assert all(r["found"] == r["n"] for r in rows)
    blind = needle.by_depth([2048], 2, 8, 16, select=recent)
    assert [r["n"] for r in blind] == [r["n"] for r in rows]
    assert all(r["found"] == 0 for r in blind if r["depth"] < 0.8)  # blocks 28 to 31 of 32
    picture = tmp_path / "needle.svg"
    assert needle.depth_report(blind, None) == 1
    pytest.importorskip("matplotlib")
    assert needle.main(["--lengths", "2048", "--seeds", "1", "--picture", str(picture)]) == 0
    assert "100%" in picture.read_text() and "2,048" in picture.read_text()


@pytest.mark.parametrize("argv, words", [
    ("--queries 0", "--queries: must be a whole number above 0, got '0'"),
    ("--queries -3", "--queries: must be a whole number above 0, got '-3'"),
    ("--n-sel 1000", "--n-sel: must be below 128, the blocks of 8192 tokens, got 1000"),
    ("--n-sel 32 --lengths 4096,2048", "--n-sel: must be below 32, the blocks of 2048 tokens, got"),
    ("--lengths 2048 --picture /", "--picture: wants a file that can be written, got '/'"),
    ("--picture x.svg", "--picture: has no effect without --lengths"),
    ("--seeds 3", "--seeds: has no effect without --lengths"),
    ("--lengths 2048 --tokens 4096", "--tokens: has no effect with --lengths"),
    ("--lengths 2048 --seed 0", "--seed: has no effect with --lengths"),
    ("--lengths 2048 --seeds 1 --picture x.svg", "--picture: import of matplotlib halted"),
])  # fmt: skip
def test_usage_errors_of_needles_name_the_option(argv, words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        needle.main(argv.split())
    assert words in capsys.readouterr().err
