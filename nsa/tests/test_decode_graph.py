"""Decoding at lengths that only the device knows: mixed batches, rewinding, replays of one step."""

import itertools
from dataclasses import replace

import pytest
import torch

from bench import bench_decode, decode_graph
from bench.clock import CudaClock, clock_for
from bench.decode_graph import ModuleStep, more_rows
from bench.decode_step import Step
from bench.records import read_csv
from bench.summarize_decode_csv import summarize
from bench.timing import Budget, prove
from nsa import generate as gen
from nsa import launches
from nsa.cache import NSACache
from nsa.config import NSAConfig
from nsa.decode_graph import GraphUnavailable, StepGraph, _at_every_length
from nsa.model import NSALanguageModel
from nsa.module import NSAAttention, NSABlock
from nsa.tests.helpers import TRITON, SteadyClock, assert_raises, randn
from nsa.tests.test_bench_decode import one_thread as one_thread

CONFIG = NSAConfig(dim=24, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)
# First tokens (below l, l_sel and w), every phase of the compression stride, and past the ring.
LENGTHS = (1, 7, 8, 11, 28)
S = 36


def make(phi="mlp", seed=0, **kw):
    torch.manual_seed(seed)
    return NSAAttention(replace(CONFIG, phi=phi), **kw)


def filled(layer, x, n, max_len=S, **kw):
    cache = layer.make_cache(len(x), max_len, **kw)
    layer.prefill(x[:, :n], cache)
    return cache


@pytest.fixture(scope="module", params=["mlp", "mean"])
def double(request):
    layer = make(request.param).double()
    x = randn(len(LENGTHS), S, 24, seed=1, dtype=torch.float64)
    with torch.no_grad():
        return layer, x, layer(x)


def mixed(layer, x, lengths=LENGTHS, **kw):
    """One cache whose sequence b holds lengths[b] tokens; rows beyond them are NaN."""
    parts = [filled(layer, x[b : b + 1], n, **kw) for b, n in enumerate(lengths)]
    for part, n in zip(parts, lengths, strict=True):
        for kv, kind in itertools.product("kv", ("cmp", "sel", "win", "raw")):
            used = part.emitted if kind == "cmp" else n
            getattr(part, f"{kv}_{kind}")[:, used:] = float("nan")
    return NSACache.stack(parts)


def tokens_at(x, cache, T):
    """The next T tokens of every sequence."""
    return torch.stack([x[b, n : n + T] for b, n in enumerate(cache.lengths)])


@pytest.mark.parametrize("T", [1, 3, 8])
def test_sequences_of_different_lengths_decode_as_each_alone(double, T):
    """All of the lengths at once, unused rows NaN, through several emissions and the ring's end."""
    layer, x, whole = double
    cache = mixed(layer, x)
    assert cache.mixed and cache.lens.tolist() == cache.lengths == list(LENGTHS)
    while cache.length + T <= S:
        want = tokens_at(whole, cache, T)
        out = layer.step(tokens_at(x, cache, T), cache)
        torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    assert cache.lens.tolist() == cache.lengths


def most_back(cache):
    """How many tokens this cache says that it can forget."""
    with pytest.raises(ValueError, match="n must be an int from 0 to") as told:
        cache.rewind(10**6)
    return int(str(told.value).split("from 0 to ")[1].split(",")[0])


@pytest.mark.parametrize("n", [5, 13, 28])
@pytest.mark.parametrize("story", ["twice", "append_between", "trial_step"])
def test_rewinding_again_goes_no_further_back_than_the_rings(double, story, n):
    """After any chain of rewinds all that rewind() still allows decodes as if nothing had been."""
    layer, x, whole = double
    cache, other = filled(layer, x, n), x * 3 + 1
    if story == "twice":
        cache.rewind(min(5, most_back(cache)))
    elif story == "append_between":
        layer.step(other[:, :8], cache)
        cache.rewind(8)
        layer.step(other[:, :1], cache)
    else:  # as StepGraph's warm-up does
        with _at_every_length([cache]):
            layer.step(other[:, :8], cache)
        assert cache.lengths == [n] * len(x)
    cache.rewind(most_back(cache))
    start = cache.length
    assert start == max(0, max(cache.highest) - 8)
    for copy in (cache.row(0), NSACache.stack([cache, cache])) if start else ():
        assert most_back(copy) == 0
    out = torch.cat([layer.step(x[:, i : i + 1], cache) for i in range(start, S)], 1)
    torch.testing.assert_close(out, whole[:, start:], atol=1e-13, rtol=0)


def test_a_stack_grows_and_counts_as_its_caches(double):
    layer, x, whole = double
    kinds = dict(max_len=9, growable=True, count_reads=True)
    cache = NSACache.stack([filled(layer, x[b : b + 1], 9, **kinds) for b in (0, 1)])
    out = layer.step(x[:2, 9:12], cache)
    torch.testing.assert_close(out, whole[:2, 9:12], atol=1e-13, rtol=0)
    assert len(cache.reads()) == 1 and cache.max_len >= 12


def test_a_step_that_emits_always_changes_nothing_else(double):
    """What a captured step does: compute the due tokens at every length, keep the finished ones."""
    layer, x, _ = double
    caches = [mixed(layer, x), mixed(layer, x)]
    caches[1].emit_always = True
    for _ in range(5):
        outs = [layer.step(tokens_at(x, c, 1), c) for c in caches]
        assert torch.equal(*outs)
        for a, b in zip(*([c.k_cmp, c.v_cmp] for c in caches), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    short = layer.make_cache(len(x), 5)  # no compressed token will ever fit
    short.emit_always = True
    out = torch.cat([layer.step(x[:, t : t + 1], short) for t in range(5)], 1)
    torch.testing.assert_close(out, layer(x[:, :5]), atol=1e-13, rtol=0)


def test_hostile_use_of_mixed_caches(double):
    layer, x, _ = double
    cache, stack = mixed(layer, x), NSACache.stack
    assert most_back(cache) == 1 and most_back(mixed(layer, x, (28, 3))) == 3  # of one for all
    assert most_back(filled(layer, x, 28)) == 8
    one = lambda n=9, **how: filled(layer, x[:1], n, **how)
    counts = dict(count_reads=True)
    full, three = stack([one(3), one(S)]), filled(layer, x, 3)
    one_length = "needs sequences of one length"
    assert_raises(*((ValueError, words, call) for words, call in (
        (f"chunk of 9 tokens .* {one_length}", lambda: layer.step(x[:, :9], cache)),
        (rf"compressed\(\) {one_length}", cache.compressed),
        (rf"selectable\(\) {one_length}", cache.selectable),
        (rf"window\(\) {one_length}", lambda: cache.window(1)),
        ("at least one NSACache, got none", lambda: stack([])),
        ("at least the longest 3, got 2", lambda: stack([three], max_len=2)),
        ("agree in max_step, got 8 and 4", lambda: stack([three, filled(layer, x, 3, max_step=4)])),
        (f"max_len={S} tokens, got {S} \\+ 1", lambda: layer.step(x[:2, :1], full)),
        (f"count_reads {one_length}", lambda: stack([one(n, **counts) for n in (8, 9)])),
        ("agree in growable", lambda: stack([one(growable=True), one()])),
    )))  # fmt: skip
    assert full.lens.tolist() == [3, S]


def test_the_fused_step_reads_lengths_from_the_device_alone(kernel_device):
    """What a replay sees: the host's lengths stay those of the capture while the device's grow.
    fp16 against fp64 of the same weights, as close as rounding of weights and sums allows."""
    layer = make().half().to(kernel_device)
    lengths = (3, 7, 8, 21, 28)
    x = randn(len(lengths), S, 24, seed=4, dtype=torch.float16, device=kernel_device)
    layer.backend = "reference"  # the same choice of blocks: no score is near another's here
    with torch.no_grad():
        whole = layer(x)
    cache = mixed(layer, x, lengths)
    layer.backend, layer.flags = "triton", TRITON
    cache.emit_always = True
    for i in range(5):
        cache.lengths = [n + i for n in lengths]
        new, want = (tokens_at(y, cache, 1) for y in (x, whole))
        cache.lengths = list(lengths)
        out = layer.step(new, cache)
        torch.testing.assert_close(out.double(), want.double(), atol=6e-3, rtol=0)
    assert cache.lens.tolist() == [n + 5 for n in lengths]


def test_generation_without_a_graph_says_why(tmp_path, capsys):
    torch.manual_seed(0)
    model = NSALanguageModel(CONFIG, vocab_size=256, n_layers=1).eval()
    prompt = torch.zeros(1, 4, dtype=torch.long)
    plain, asked = gen.generate(model, prompt, 6), gen.generate(model, prompt, 6, graph=True)
    assert torch.equal(plain.tokens, asked.tokens) and not asked.graphed
    assert "CUDA device, got cpu" in asked.why_no_graph and plain.why_no_graph is None
    gen.save_checkpoint(tmp_path / "m.pt", model)
    argv = [str(tmp_path / "m.pt"), "--max_new_tokens", "4", "--device", "cpu", "--graph"]
    assert gen.main(argv) == 0
    err = capsys.readouterr().err
    assert "decode" in err and "no CUDA graph: " in err and "by CUDA graph" not in err


BIG = NSAConfig(dim=256, heads=32, groups=2, d_k=64, d_v=64)


def on_gpu(device, max_len, lengths):
    torch.manual_seed(0)
    layer = NSAAttention(BIG, flags=TRITON).to(device, torch.bfloat16).eval()
    x = randn(len(lengths), max_len, 256, seed=5, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        caches = [filled(layer, x[b : b + 1], n, max_len) for b, n in enumerate(lengths)]
    return layer, x, NSACache.stack(caches)


@pytest.mark.parametrize("T", [1, 4])
def test_replays_at_changing_lengths_equal_eager_steps_gpu(cuda, T):
    """First tokens, wraps of the ring and 2k contexts in one batch, 200 replays of one capture."""
    lengths = (1, 20, 31, 60, 500, 2000)
    layer, x, cache = on_gpu(cuda, 2800, lengths)
    eager = NSACache.stack([cache])
    graph = StepGraph(lambda x: layer.step(x, cache), x[:, :T], [cache])
    assert cache.lengths == list(lengths) and cache.lens.tolist() == list(lengths)
    assert graph.launches
    for _ in range(200):
        new = tokens_at(x, cache, T)
        want, got = layer.step(new, eager), graph(new)
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-2)
    assert cache.lengths == eager.lengths == cache.lens.tolist() == eager.lens.tolist()


def test_a_graph_refuses_what_it_cannot_replay_gpu(cuda):
    layer, x, cache = on_gpu(cuda, 40, (39,))
    capture = lambda: StepGraph(lambda x: layer.step(x, cache), x[:, :1], [cache])
    graph = capture()
    graph(x[:, 39:])
    assert_raises(
        (ValueError, "max_len=40 tokens, got 40", lambda: graph(x[:, 39:])),
        (ValueError, "x must be", lambda: graph(x[:, :2])),
    )
    cache.rewind(1)
    cache.growable = True
    assert_raises((GraphUnavailable, "max_len", capture))
    cache.growable, layer.backend = False, "reference"
    assert_raises((GraphUnavailable, "fused", capture))


@pytest.mark.parametrize("autocast", [False, True])
def test_generation_by_graph_gives_the_same_text_gpu(cuda, autocast):
    torch.manual_seed(0)
    model = NSALanguageModel(BIG, vocab_size=256, n_layers=2, flags=TRITON).to(cuda).eval()
    model = model if autocast else model.bfloat16()
    prompt = torch.randint(0, 256, (2, 70), device=cuda)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        plain, asked = (gen.generate(model, prompt, 60, graph=graph) for graph in (False, True))
    assert asked.graphed, asked.why_no_graph
    # The rates are rounded alike in both; a rare near-tie of two bytes may still go the other way.
    assert (plain.tokens == asked.tokens).all(1).any()


def test_bench_times_graphs_and_the_layer_gpu(cuda):
    torch.manual_seed(0)
    layer = NSAAttention(BIG, flags=TRITON).to(cuda, torch.bfloat16).eval()
    step, clock = Step(layer, 2, 1500, flags=TRITON), clock_for(cuda)
    assert isinstance(clock, CudaClock)
    rows, missing = timed(layer, step, clock, Budget(0.1, 1.0, 10, warm_s=0.02), cold=True)
    assert missing == {} and set(rows) == {"graph", "module", "module_graph"}
    for name, row in rows.items():
        assert row.status in ("VALID", "UNSTABLE"), (name, row.why)
        assert (row.speedup is not None) == (name == "graph")
    assert rows["module_graph"].median_us > rows["graph"].median_us
    assert step.cache.length == 1500


@pytest.fixture(scope="module")
def bench_step():
    layer = make(seed=2)
    return layer, Step(layer, 2, 41)


QUICK = Budget(0.02, 0.2, 6, warm_s=0, warm_cap_s=0.05)


def timed(layer, step, clock=None, budget=QUICK, cold=False):
    """What the bench finds beyond the step itself."""
    tools = dict(clock=clock or SteadyClock(), cold=cold, budget=budget)
    return more_rows(layer, step, bench_decode.total_case(step, {}), {}, tools)


def test_bench_times_the_layer_over_one_context(bench_step):
    layer, step = bench_step
    seen = set()

    class Spy(SteadyClock):
        def run(self, calls, *, cold):
            assert all(call.before for call in calls)
            times = super().run(calls, cold=cold)
            seen.add((step.cache.length, *step.cache.lens.tolist()))
            return times

    rows, missing = timed(layer, step, Spy())
    assert set(rows) == {"module"} and set(missing) == {"graph", "module_graph"}
    assert all("CUDA device" in why for why in missing.values())
    row = rows["module"]
    assert row.status in ("VALID", "UNSTABLE") and row.wall_us > 0, row.why
    assert seen == {(41, 41, 41)}


class Replayed:
    """A graph's stand-in: its replays are calls."""

    launches = {"k": 1}

    def __init__(self, step, example, caches):
        self.input, self.replay = example, lambda: step(self.input)


def test_a_graph_of_the_layer_is_judged_where_its_step_emits(monkeypatch):
    """36 = l + 7 d: the step adds a compressed token, which the inputs' refill must find there."""
    layer = make(seed=2)
    step = Step(layer, 2, 36)
    monkeypatch.setattr(decode_graph, "StepGraph", Replayed)
    monkeypatch.setattr(decode_graph, "why_no_step_graph", lambda step: None)
    module = ModuleStep(layer, step)
    case = module.case(module.graph(["k"]), "module", bench_decode.total_case(step, {}), {})
    parity, _ = prove(case, case.candidate, 3, "test")
    assert parity.status == "PASS" and step.cache.length == 36


@pytest.mark.parametrize("what, at, told", [
    ("output", 41, ""), ("append", 41, ""), ("window", 41, ""),
    ("emits nothing", 36, "did not emit its token to k_cmp"), ("emits nothing", 35, None),
])  # fmt: skip
def test_bench_sees_a_wrong_layer_step(what, at, told, monkeypatch):
    """36 = l + 7 d: the step is to add a compressed token."""
    layer, good = make(seed=2), NSAAttention.step
    step = Step(layer, 2, at)
    assert timed(layer, step)[0]["module"].status != "FAILED"

    def wrong(self, x, cache):
        out = good(self, x, cache)
        if what == "append":
            cache.v_sel[:, len(cache) - 1] = 0
        if what == "window":
            cache.k_win[:, (len(cache) - 1) % cache.k_win.shape[1]] += 1
        return out * 1.01 if what == "output" else out

    monkeypatch.setattr(NSAAttention, "step", wrong)
    if what == "emits nothing":
        monkeypatch.setattr(NSACache, "_emit", lambda *_: None)
    row = timed(layer, step)[0]["module"]
    assert (row.status == "FAILED") == (row.median_us is None) == (told is not None), row.why
    assert not told or told in row.why[0]


def test_steps_in_a_row_end_where_the_step_stands_and_emit_once(bench_step, monkeypatch):
    layer, step = bench_step
    seen, good = [], NSAAttention.step

    def noted(self, x, cache):
        before, out = cache.emitted, good(self, x, cache)
        seen.append(cache.emitted - before)
        return out

    monkeypatch.setattr(NSAAttention, "step", noted)
    assert ModuleStep(layer, step).in_a_row() == layer.config.d == len(seen)
    assert sum(seen) == 1 and step.S == step.cache.length == 41
    assert step.cache.lens.tolist() == [41, 41]


def test_a_cache_at_another_length_is_judged_at_it(bench_step):
    _, step = bench_step
    case = bench_decode.total_case(step, {})
    short = decode_graph.other_length(41)
    assert short == 27 and decode_graph.other_length(1) == decode_graph.other_length(2) == 1
    with step.at(short):
        assert step.cache.lens.tolist() == [27, 27]
        prove(case, case.candidate, 5, "shorter")
    assert step.S == step.cache.length == 41
    prove(case, case.candidate, 6, "as before")


def test_big_batches_are_judged_by_the_reference(bench_step, monkeypatch):
    """The vectorised fp64 truth agrees with the oracle's: branches, the choice, dense."""
    _, step = bench_step
    step.refill(3)
    chosen = step.blocks.cpu()
    truths = lambda: [step.total_truth(chosen), step.dense_truth()]
    want = truths()
    monkeypatch.setattr(step, "exact", None)
    monkeypatch.setattr(step, "_dense", None)
    torch.testing.assert_close(truths(), want, atol=1e-12, rtol=0)
    chosen[1, 0, 1] = torch.tensor([0, 3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence 1, group 1 chose blocks"):
        step.total_truth(chosen)


def test_filling_in_chunks_reads_the_same(monkeypatch):
    whole = Step(make(), 2, 41).counted
    monkeypatch.setattr("bench.decode_step.FILL_TOKENS", 22)
    assert Step(make(), 2, 41).counted == whole


def test_a_preset_runs_its_cells(monkeypatch, tmp_path, capsys, one_thread):
    cells = bench_decode.PRESETS["serving"][0]
    assert len(cells) == 6 and (64, 32768) in cells
    options = dict(heads=4, groups=2, dk=8, dv=8, branch_force_mode="none")
    monkeypatch.setitem(bench_decode.PRESETS, "serving", (((1, 41), (3, 20)), options))
    sizes = "--dim 24 --l 8 --d 4 --l_sel 8 --n_sel 3 --w 12 --iters 6 --quick --device cpu --dv 16"
    path = str(tmp_path / "p.csv")
    assert bench_decode.main(["--preset", "serving", *sizes.split(), "--csv", path]) == 0
    rows = read_csv(path)
    assert [(r["B"], r["S"], r["dv"]) for r in rows] == [("1", "41", "16"), ("3", "20", "16")]
    for row in rows:
        assert row["ms_graph"] == row["ms_module_graph"] == "" and float(row["ms_module_eager"]) > 0
        assert float(row["ms_module_eager_wall"]) > 0 and row["launch_bound"] == ""
        assert "no graph and module_graph: a CUDA graph needs a CUDA device" in row["why"]
    table = summarize(path)
    assert "| 3 | 20 | - | - | - |" in table and "layer's whole decode step" in table
    with pytest.raises(SystemExit):
        bench_decode.main(["--preset", "serving", "--B", "2"])
    assert "--preset: not allowed with --B" in capsys.readouterr().err


def test_a_compiled_step_launches_the_same_kernels_and_is_compiled_once(kernel_device):
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    config = replace(CONFIG, dim=32, d_k=16, d_v=16, l_sel=16)
    model = NSABlock(config, backend="triton", flags=TRITON).to(kernel_device, torch.float16)
    x = randn(1, 12, 32, seed=1, dtype=torch.float16, device=kernel_device)
    torch._dynamo.reset()
    counters.clear()
    found = []
    for step in (model.step, torch.compile(model.step, backend="eager")):
        cache = model.attention.make_cache(1, 12)
        model.prefill(x[:, :9], cache)
        with launches.recording() as counts:
            out = torch.cat([step(x[:, i : i + 1], cache) for i in range(9, 12)], 1)
        found.append((out, dict(counts)))
    (eager, launched), (compiled, same) = found
    assert launched == same and same["_decode_append_kernel"] == 3
    assert same.get("_decode_merge_kernel", 0) + same.get("_decode_team_kernel", 0) in (3, 12)
    assert torch.equal(eager, compiled)
    assert counters["stats"].get("unique_graphs", 0) <= 2  # before and after attention
    torch._dynamo.reset()
