"""What the GPU benches rest on and a CPU can check: work counts, spans, box health, descriptors."""

import importlib
import json
import random
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bench import bench_context_parallel as RANKS
from bench import bench_decode as DECODE
from bench import bench_fa2 as FA2
from bench import bench_generate as GENERATE
from bench import bench_peers as PEERS
from bench import bench_prefill as PREFILL
from bench import bench_sel_triton as SEL
from bench import health
from bench.cases import truths
from bench.device import Ceilings, Gpu, Watch, ceilings
from bench.parity import never_launched
from bench.prefill_inputs import DOCUMENT, NOISE, Pack, Prefill, Projections, distinct_blocks
from bench.proof import NotRight, Turns, prove
from bench.roofline import BACKWARD, Shape, bytes_needed, flops, pairs
from bench.timing import Budget, measure
from nsa import NSAConfig, NSALanguageModel, launches, oracle, select
from nsa.flags import Flags
from nsa.kernels.row_tiles import tma_usable
from nsa.tests.helpers import SteadyClock, randn

SMALL = Shape(77, B=2, HQ=6, G=2, D=16, Dv=8, l=8, d=4, l_sel=16, n_sel=3, w=20)


def test_pairs_are_those_of_the_oracle():
    """Query by query, as the equations have it; FLOPs and bytes follow from them."""
    s, want = SMALL, dict.fromkeys(("cmp", "sel", "win", "dense"), 0)
    for t in range(s.S):
        chosen = list(range(t // s.l_sel + 1))[-s.n_sel :]  # any n_sel count alike, own included
        want["cmp"] += oracle.visible_count(t, s.l, s.d)
        want["sel"] += sum(min(t + 1, (b + 1) * s.l_sel) - b * s.l_sel for b in chosen)
        want["win"] += min(s.w, t + 1)
        want["dense"] += t + 1
    assert pairs(s) == want
    assert flops(s, "win") == 2 * want["win"] * 2 * 6 * (16 + 8)
    # Four products and two sums turn a pair of the 6 query heads and 3 * 2 key heads.
    assert flops(s, "turn") == 2 * 77 * (6 + 6) * 8 * 6
    assert bytes_needed(s, "turn") == 2 * (2 * 77 * (6 * 16 + 6 * 16 + 6 * 8)) * 2
    assert flops(s, "select") == 2 * want["cmp"] * 2 * 6 * 16
    assert flops(s, "full") == sum(flops(s, part) for part in ("cmp", "sel", "win", "select"))
    assert flops(s, "dense", backward=True) == int(BACKWARD * flops(s, "dense"))
    q, out, kv = 2 * 77 * 6 * 16, 2 * 77 * 6 * 8, 2 * 77 * 2 * (16 + 8)
    assert bytes_needed(s, "win") == 2 * (q + out + kv)
    assert bytes_needed(s, "win", backward=True) == 2 * 2 * (q + out + kv)
    assert bytes_needed(s, "sel") == bytes_needed(s, "win") + 2 * 77 * 2 * 3 * 4


@pytest.mark.parametrize("L", [1, 2, 16, 333])
def test_spans_are_disjoint_and_sum_to_L(L):
    expected = {"few": {1}, "many": {min(8, L)}, "mixed": {min(n, L) for n in (2, 4, 8)}}
    assert set(expected) == set(SEL.DISTRIBUTIONS)
    for dist, counts in expected.items():
        gen = torch.Generator().manual_seed(0)
        drawn = [SEL.spans_of(dist, L, 700, gen) for _ in range(30)]
        assert {len(spans) for spans in drawn} == counts
        for spans in drawn:
            ends = [0, *(end for span in spans for end in span), 700]
            assert ends == sorted(ends) and all(a < b for a, b in spans)
            assert sum(b - a for a, b in spans) == L


@pytest.mark.parametrize("L, n_sel", [(128, 8), (512, 16), (384, 16), (48, 3), (16, 16)])
def test_decode_blocks_are_clamped_at_the_newest_token(L, n_sel):
    gen, size = torch.Generator().manual_seed(0), L // n_sel
    for _ in range(10):
        spans = SEL.block_spans(L, n_sel, 4096, gen)
        assert len(spans) == n_sel and spans[0][0] == 0 and spans[-1][1] <= 4096
        lengths = [b - a for a, b in spans]
        assert lengths == [size] * (n_sel - 1) + [size - size // 2]
        assert all(a % size == 0 for a, _ in spans) and spans == sorted(set(spans))


def test_a_sweep_writes_what_it_timed(monkeypatch, capsys):
    """A row per choice of tiles, the wrong and the failed ones with their reason and no time."""
    pytest.importorskip("triton")
    want = torch.ones(4, 2, 8, dtype=torch.float64)
    rows = SimpleNamespace(q=want.half(), refill=lambda seed: 0, exact=lambda dtype=None: want)

    def candidate(rows, flags, tiles):
        right = lambda part: want.half() * (2 if tiles.num_stages == 2 else 1)
        fails = mock.Mock(side_effect=RuntimeError("out of resource"))
        return fails if tiles.num_stages == 3 else right, "triton", "_kernel"

    monkeypatch.setattr(SEL.Cell, "rows", lambda cell, dtype: rows)
    monkeypatch.setattr(SEL, "candidate", candidate)
    clock = SimpleNamespace(run=lambda calls, cold: [5.0] * len(calls))
    args = SEL.parse("--sweep 2 --N 4 --L_list 64 --dist few --csv".split())
    tried = SEL.sweep(args, clock, None)
    assert len(tried) == 2 * 3 * 3  # block_d 32 and 64, block_l 64
    by = {n: [r for r in tried if r["num_stages"] == n] for n in (1, 2, 3)}
    assert [r["rank"] for r in by[1]] == list(range(1, 7)) and by[1][0]["ms"] == 0.005
    assert all(r["status"] == "FAILED" and "ms" not in r for r in by[2] + by[3])
    assert by[2][0]["why"] == "wrong" and by[3][0]["why"] == "RuntimeError: out of resource"
    columns = {*SEL.SWEEP_COLUMNS, *SEL.Cell._fields}
    assert {"L", "dtype", "block_dv"} <= set(tried[0]) <= columns
    assert "6 right, 12 do not fit" in capsys.readouterr().err


NO_FILE = "wants a file that can be written, got "


@pytest.mark.parametrize("bench, argv, says", [
    (SEL, "--dist lots", "--dist"), (SEL, "--L_list 64,x", "integers"), (SEL, "--N 0", "--N"),
    (SEL, "--decode 1 --L_list 100", "n_sel"), (SEL, "--D 64,x", "--D"),
    (SEL, "--repeat 0", "--repeat"), (SEL, "--decode 1 --n_sel 8,12", "--n_sel"),
    (SEL, "--decode 1 --n_sel 2", "--n_sel"), (SEL, "--route 1 --streams 1,2", "--streams"),
    (SEL, "--decode 1 --route 1", "--route"),
    (SEL, "--iters -3", "--iters: must be a whole number above 0"),
    (SEL, "--warmup -9", "--warmup must be 0 or more, got -9"),
    (SEL, "--seconds nan", "--seconds: must be a finite number"),
    (SEL, "--sweep -1", "--sweep must be 0 or more, got -1"),
    (SEL, "--D 7", "--D must be multiples of 8 up to 256, got 7"),
    (SEL, "--Dv 300", "--Dv must be multiples of 8 up to 256, got 300"),
    (SEL, "--streams 5000", "--streams must be at most 32"),
    (SEL, "--dist few,few", "each once, got few,few"),
    (SEL, "--csv /dev/null/x.csv", f"--csv: {NO_FILE}"), (FA2, "--csv /tmp", f"{NO_FILE}'/tmp'"),
    (FA2, "--branches sel", "--branches"), (FA2, "--dtype fp8", "--dtype"),
    (FA2, "--B 0", "--B: must be a whole number above 0, got '0'"), (FA2, "--w 0", "--w: must be"),
    (FA2, "--d 0", "--d: "), (FA2, "--HQ 5", "--G must divide --HQ, got 4 and 5"),
    (FA2, "--D 7", "--D must be a multiple of 8 up to 256, got 7"),
    (FA2, "--seconds nan", "--seconds: must be a finite number above 0"),
    (FA2, "--S_list 64,64", "wants every integer once, got '64,64'"),
    (PREFILL, "--ops full,half", "--ops"), (PREFILL, "--directions up", "--directions"),
    (PREFILL, "--n-sel 2", "--n_sel must be at least n_init + n_local"),
    (PREFILL, "--G 0", "--G: must be"), (PREFILL, "--d 24", "--d must divide --l, got 24 and 32"),
    (DECODE, "--S_list 64,0", "--S_list: must be a whole number above 0, got '0'"),
    (DECODE, "--S_list 64;128", "--S_list: must be a whole number above 0"),
    (DECODE, "--S_list 64,4 --T 1,5", "--T: must be at most each context length, got 5"),
    (DECODE, "--alike 1.5", "--alike: must be from 0 to 1, got 1.5"),
    (DECODE, "--B x", "--B: must be a whole number above 0, got 'x'"),
    (DECODE, "--groups 3", "groups must divide heads, got heads=64 groups=3"),
    (DECODE, "--d 3", "d must divide l and l_sel"),
    (DECODE, "--warmup -1", "--warmup: must be 0 or more, got -1"),
    (DECODE, "--branch_force_mode all", "--branch_force_mode"),
    (DECODE, "--csv /dev/null/x/decode.csv", f"--csv: {NO_FILE[:-6]}"),
    (PEERS, "--sfnsa /nowhere", "--sfnsa must be a folder with flash_nsa/, got /nowhere"),
    (PEERS, "--no_dense", "--sfnsa must name a checkout"),
    (PEERS, "--directions bwd", "--directions: must be from fwd, fwd+bwd, each once, got bwd"),
    (PEERS, "--G 5", "--G must divide --HQ, got 5 and 64"),
    (PEERS, "--selection fla", "--selection: must be from vllm, cudnn, each once, got fla"),
    (PEERS, "--selection cudnn --directions fwd+bwd", "--selection is forward alone, got"),
    (PEERS, "--selection vllm --D 192", "wants --D and --Dv alike, got 192 and 128"),
    (PEERS, "--sharing some", "--sharing: must be from random, shared, documents, each once"),
    (GENERATE, "--new 2", "--new must be at least 5, got 2"),
    (RANKS, "--S_list 1000 --d 16", "multiples of 2 * W * d = 128, got 1000"),
    *((bench, "", "NSA_SEL_TRITON_MIN_L") for bench in (SEL, PREFILL, FA2)),  # is no number
    (DECODE, "", "NSA_USE_FA2"),
])  # fmt: skip
def test_bad_arguments_are_usage_errors(bench, argv, says, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    if not argv:
        monkeypatch.setenv(says, "many")
    with pytest.raises(SystemExit) as stop:
        bench.parse(argv.split())
    assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("bench, argv", [(DECODE, "--device cuda"), (PEERS, ""), (GENERATE, "")])
def test_without_a_gpu_nothing_is_timed(bench, argv, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(argv.split()) == 3
    assert "no CUDA device: nothing was timed" in capsys.readouterr().err


def test_block_quality_sees_every_wrong_choice():
    """1 for the best blocks; less for a worse one; 0 for what may never be."""
    x = Prefill.__new__(Prefill)
    x.shape, x.at = Shape(64, HQ=2, G=1, D=8, l=8, d=4, l_sel=8, n_sel=5), [63]
    x.q, x.k_cmp = randn(1, 64, 2, 8, seed=0), randn(1, 15, 1, 8, seed=1)
    want = oracle.select_blocks(x.q.double(), x.k_cmp.double(), **x.sizes)
    row = want[0, 63, 0].tolist()
    quality = lambda row: x.block_quality(want.clone().index_put_(at, torch.tensor(row).int()))
    at = tuple(torch.tensor(i) for i in (0, 63, 0))
    assert quality(row).item() == pytest.approx(1.0)
    free = [b for b in row if b not in (0, 6, 7)][0]
    spare = next(b for b in range(1, 6) if b not in row)
    assert 0 < quality(sorted({*row, spare} - {free})) < 1
    for wrong in ([0, 6, 7, free, free], [1, 2, 3, 6, 7], [0, 1, 6, 7, 8], [0, 6, 7, 1, -1]):
        assert quality(wrong) == 0, wrong


def test_distinct_blocks_are_counted_for_four_neighbours_at_a_time():
    """Not twice, not where there is none, and not of queries that lack neighbours at the end."""
    rows = [[0, -1], [0, 1], [1, 0], [0, 2], [0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    blocks = torch.tensor(rows).int()[None, :, None]
    assert distinct_blocks(blocks[:, :4]) == 3
    assert distinct_blocks(blocks) == (3 + 8) / 2
    assert distinct_blocks(torch.cat([blocks, blocks[:, [0] * 9]], 2)) == (3 + 8 + 1 + 1) / 4


@pytest.mark.parametrize("sharing, least, most", [
    ("random", 40, 60), ("shared", 20, 25), ("documents", 28, 42),
])  # fmt: skip
def test_neighbours_share_what_the_sharing_says(sharing, least, most):
    """By the choice that NSA makes itself, in the last queries, at the paper's heads and blocks;
    the same for a seed, and in documents among the blocks of the own one. A shared query is another
    one's mixture with noise next to it, and nothing of it 128 tokens on."""
    x = Prefill(Shape(8192, HQ=16, G=1), "cpu", torch.float32, sharing=sharing)
    x.refill(3)
    first, at = x.q.clone(), x.shape.S - 128
    for query in (x.q[:, 0], x.q[:, 5000]):
        assert 0.9 < query.std() < 1.4
    blocks = select.select_blocks(x.q[:, at:], x.k_cmp, **x.sizes, q_start=at)
    assert least < distinct_blocks(blocks) < most
    own = (blocks >= at // DOCUMENT * DOCUMENT // 64).double().mean()
    assert own > 0.9 if sharing == "documents" else own < 0.6
    if sharing == "shared":
        like = lambda a, b: torch.cosine_similarity(x.q[0, a].flatten(), x.q[0, b].flatten(), 0)
        near = torch.stack([like(t, t + 1) for t in (0, 62, 63, 64, 297, 8190)])
        torch.testing.assert_close(near, torch.full((6,), 1 / (1 + NOISE**2)), atol=0.02, rtol=0)
        assert abs(like(10, 138)) < 0.1 and like(0, 64) < 0.1
    x.refill(3)
    assert torch.equal(x.q, first)
    x.refill(4)
    assert not torch.equal(x.q, first)


@pytest.mark.kernel
@pytest.mark.parametrize("op", PREFILL.READ_BLOCKS)
def test_a_row_counts_the_blocks_that_its_call_chose(op, kernel_device):
    shape = Shape(96, HQ=2, G=1, D=16, Dv=16, l=8, d=4, l_sel=16, n_sel=4, w=12)
    x = Prefill(shape, kernel_device, torch.float16, 2, sharing="shared")
    case = proven(PREFILL.attention_case(x, op, "fwd", {"S": 96}, baselines=[]))
    sizes = "S=96/HQ=2/G=1/D=16/Dv=16/l=8/d=4/l_sel=16/n_sel=4/w=12"
    assert case.name == f"prefill/{op}/fwd/{sizes}/shared"
    want = select.select_blocks(x.q.double(), x.k_cmp.double(), **x.sizes)
    found = case.facts()["distinct_of_4"]
    assert found == pytest.approx(distinct_blocks(want), abs=0.2) and 2 < found < 5
    assert {"sharing", "distinct_of_4", "draw"} <= set(PREFILL.COLUMNS)


def proven(case):
    """What measure() asks of a case before its clock runs and while it does; the clock has tests of
    its own, which take no interpreter."""
    for contender in (case.candidate, *case.baselines):
        prove(case, contender, 0, contender.name)
        turns = Turns(case, contender, random.Random(0))
        turns.settle()
        turns.call.before()
        turns.call()
        turns.call.after()
        turns.marks.check(contender.name)
    return case


@pytest.mark.kernel
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_a_branch_is_timed_beside_its_proof(direction, kernel_device, monkeypatch):
    """Forward, the backward alone, or both in one call; nothing of a result that is off."""
    shape = Shape(40, HQ=2, G=1, D=16, Dv=16, l=8, d=4, l_sel=16, n_sel=3, w=12)
    x = Prefill(shape, kernel_device, torch.float16, 2)
    case = proven(PREFILL.attention_case(x, "win", direction, {"S": 40}))
    ways = direction.split("+")
    assert case.flops == sum(flops(shape, "win", way == "bwd") for way in ways)
    with launches.recording() as seen:
        case.candidate.call()
    assert any(name.startswith("_span_fwd") for name in seen) == ("fwd" in ways)
    assert any(name.startswith("_span_bwd") for name in seen) == ("bwd" in ways)
    real = Prefill.forward
    monkeypatch.setattr(Prefill, "forward", lambda x, op: real(x, op) * 1.01)
    with pytest.raises(NotRight):
        proven(case)
    if "bwd" in ways:
        with pytest.raises(AssertionError, match="gradient 0 of win"):
            PREFILL.attention_case(x, "win", direction, {})


@pytest.mark.kernel
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_rotary_turn_is_timed_beside_its_proof(direction, kernel_device, monkeypatch):
    """Of every column: a kernel that mixes up two branches has no number."""
    turn_split = importlib.import_module("nsa.kernels.prefill.turn_split")
    real, shape = turn_split.turn_split, Shape(70, B=2, HQ=6, G=2, D=24, Dv=16, l=8, d=4, l_sel=16)
    x = Projections(shape, kernel_device, torch.float16)
    case = proven(PREFILL.turn_case(x, direction, {"S": 70}))
    assert case.columns["compared"].endswith("of 70 tokens")
    mixed = lambda parts: (parts[0], parts[3], parts[2], parts[1], *parts[4:])
    mixed_up = lambda qkv, at, parts, *base, **how: real(qkv, at, mixed(parts), *base, **how)
    monkeypatch.setattr(turn_split, "turn_split", mixed_up)
    with pytest.raises(NotRight):
        proven(case)


@pytest.mark.kernel
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_pack_is_timed_beside_its_parts(direction, kernel_device, monkeypatch):
    shape = Shape(32, HQ=4, G=1, D=16, Dv=16, l=8, d=4, l_sel=16, n_sel=3, w=12)
    x = Pack(shape, kernel_device, torch.float16)
    assert x.where(15) == (0, 0, 15) and x.where(18) == (16, 3, 2)
    case = proven(PREFILL.pack_case(x, direction, {"S": 32}))
    assert [c.name for c in case.baselines] == ["nsa its parts"]
    if direction == "fwd":
        real = Pack.forward
        monkeypatch.setattr(Pack, "forward", lambda x, op: real(x, op) + 0.1 * x.q)
        with pytest.raises(NotRight):
            proven(case)


@pytest.mark.kernel
@pytest.mark.parametrize("dist", ["few", "mixed"])
def test_routes_are_timed_beside_their_proof(dist, kernel_device, monkeypatch):
    """What a caller gets on Triton against packing plus SDPA; who returns something else has no
    number. One of the two on a clock."""
    monkeypatch.setattr(SEL, "DEVICE", kernel_device)
    monkeypatch.setattr(SEL, "CACHE_LEN", 64)
    cell = SEL.Cell("route", dist, 4, 2, 16, 16, 12, 1)
    budget = Budget(device_s=0.02, wall_s=1.0, warm_s=0.0, warm_calls=1, min_n=3)
    made = lambda: SEL.case_of(cell, cell.rows(torch.float16), Flags(), {})
    if dist == "few":
        proven(made())
        return
    row = lambda: measure(made(), SteadyClock(), cold=False, budget=budget)
    right = row()
    assert right.status in ("VALID", "UNSTABLE") and right.parity["status"] == "PASS", right.why
    assert right.path_taken == "triton_ranges"
    assert (right.baseline, right.path_requested) == ("packing", "triton")
    low, high = right.wall_speedup_ci95
    assert 0 < low <= right.wall_speedup <= high
    in_place = importlib.import_module("nsa.kernels.triton_sel_kernel.in_place")
    real = in_place.in_place
    beside = lambda q, k, v, ranges, plan: real(q, k, v, ranges + 1, plan)
    monkeypatch.setattr(in_place, "in_place", beside)
    wrong = row()
    assert wrong.status == "FAILED" and wrong.median_us is None


@pytest.mark.kernel
@pytest.mark.parametrize("branch", ["win", "cmp"])
def test_fa2_is_held_against_the_triton_kernel_too(branch, kernel_device):
    """Both rungs that would serve instead give the branch's result; the row tells the keys."""
    x = FA2.Branch.__new__(FA2.Branch)
    x.branch, x.shape = branch, Shape(40, HQ=4, G=2, D=16, Dv=16, l=8, d=4, w=12)
    n = 40 if branch == "win" else 9
    x.key_len = 12 if branch == "win" else n
    like = {"dtype": torch.float16, "device": kernel_device}
    x.q = torch.empty(1, 40, 4, 16, **like)
    x.k, x.v = (torch.empty(1, n, 2, 16, **like) for _ in range(2))
    for i, t in enumerate(x.inputs()):
        t.normal_(generator=torch.Generator(kernel_device).manual_seed(i))
    found = FA2.baselines(x)
    assert [c.name for c in found] == ["sdpa", "triton"]
    for contender in found:
        case = FA2.case_of(x, "dense", {"dtype": "fp16"}, contender)
        assert case.columns["key_len"] == x.key_len
        assert case.baselines == [contender] and case.name.endswith(f"/{contender.name}")
        with launches.recording() as seen:
            out = contender.call()
        torch.testing.assert_close(out.double(), x.exact(), rtol=0, atol=2e-3)
        assert not never_launched(contender.kernels, seen)

    x.triton = mock.Mock(side_effect=NotImplementedError("no tiles fit"))
    assert [c.name for c in FA2.baselines(x)] == ["sdpa"]


def card(name="NVIDIA Fake", **answers):
    """A Gpu without its device; `answers` by the name of the NVML query."""
    gpu = object.__new__(Gpu)
    gpu.name, vars(gpu)["nvml"] = name, (mock.Mock(), None)
    gpu.ask = lambda query, *args: answers.get(query)
    return gpu


POWER = "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"
LINK = dict(nvmlDeviceGetMaxPcieLinkGeneration=4, nvmlDeviceGetMaxPcieLinkWidth=16)
CAPPED = dict(zip(POWER, (300_000, 450_000), strict=True))
GOOD = dict(nvmlDeviceGetTotalEccErrors=0, nvmlDeviceGetRemappedRows=(0, 0, 0, 0))


@pytest.mark.parametrize("answers, row, says", [
    (CAPPED, {"gemm_frac": 0.62},
     "bf16 GEMM run at 62% of what a NVIDIA Fake should do (power-capped at 300 W of 450 W)"),
    ({}, {"copy_frac": 0.5}, "no cause seen in NVML"),
    (LINK, {"h2d_gbs": 6.0}, "upload runs at 6 GB/s of 32"),
    ({}, {"others_mib": 501}, "501 MiB of the card are in use by others"),
    ({"nvmlDeviceGetTotalEccErrors": 3}, {}, "3 uncorrected ECC errors"),
    ({"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, {}, "memory rows wait for a remap"),
    ({**dict.fromkeys(POWER, 450_000), **LINK, **GOOD}, {}, None),
    ({}, {"others_mib": 500}, None), ({}, {"others_mib": None}, None),
])  # fmt: skip
def test_what_holds_a_card_back_is_named(answers, row, says):
    measured = {"copy_frac": 0.9, "gemm_frac": 0.9, "h2d_gbs": 25.0, "others_mib": 3, **row}
    gpu, others_mib = card(**answers), measured.pop("others_mib")
    facts, why = health.hardware(gpu, others_mib)
    found = why + health.judge({**facts, **measured, "why": why}, gpu)
    assert any(says in line for line in found) if says else found == []


@pytest.mark.parametrize("second_version", [True, False])
def test_memory_in_use_is_asked_of_nvml_by_card(second_version, monkeypatch):
    """Also of a library that knows the first version only."""
    used = lambda i, version=1: SimpleNamespace(used=(500 + i + 90 * (version == 1)) * 2**20)
    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetMemoryInfo=used,
        nvmlDeviceGetUUID=lambda i: b"GPU-a" if i else "GPU-b",
        **({"nvmlMemory_v2": 2} if second_version else {}),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    more = 0 if second_version else 90
    assert health.memory_in_use() == {"GPU-b": 500 + more, "GPU-a": 501 + more}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert health.memory_in_use() == {}


def test_measured_ceilings_are_those_of_this_card(tmp_path):
    gpu = card()
    assert ceilings(gpu, None).source == "nominal" == ceilings(gpu, tmp_path).source
    row = {"device": gpu.name, "copy_gbs": 900.0, "gemm_bf16_tflops": 80.0}
    (tmp_path / "health.json").write_text(json.dumps(row))
    assert ceilings(gpu, tmp_path) == Ceilings(900.0, 80.0, "measured")
    (tmp_path / "health.json").write_text(json.dumps({**row, "device": "another"}))
    assert ceilings(gpu, tmp_path).source == "nominal"
    assert ceilings(None, tmp_path).gbs is None


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0),
    ("NVIDIA L4", 121.0), ("NVIDIA L40", 181.0), ("NVIDIA L40S", 362.0), ("NVIDIA A10", 125.0),
    ("NVIDIA A10G", 70.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GH200 480GB", 989.0), ("NVIDIA Titan V", None),
])  # fmt: skip
def test_a_tensor_peak_is_of_that_card_and_no_namesake(name, peak):
    assert card(name).tensor_tflops == peak


def test_a_result_is_exact_in_fp64_and_compared_with_one_of_its_own_dtype():
    both = truths(lambda dtype: torch.ones(1, dtype=dtype), torch.float16)
    assert {name: make().dtype for name, make in both.items()} == {
        "oracle": torch.float64, "same_dtype": torch.float16
    }  # fmt: skip


def test_what_a_card_says_is_in_the_units_it_says():
    """Milliwatts of NVML become watts; reasons come by either name of the query. H100 SXM: 5120
    bits at 2619 MHz, two transfers a clock, 3.35 TB/s."""
    gpu = card(nvmlDeviceGetMemoryBusWidth=5120, nvmlDeviceGetMaxClockInfo=2619)
    assert gpu.bus_gbs == pytest.approx(3352, rel=1e-3)
    assert card(nvmlDeviceGetMemoryBusWidth=5120).bus_gbs is None
    answers = {"nvmlDeviceGetPowerUsage": 512_300, "nvmlDeviceGetClockInfo": 1980}
    new = card(**answers, nvmlDeviceGetCurrentClocksEventReasons=0x8 | 0x1)
    old = card(**answers, nvmlDeviceGetCurrentClocksThrottleReasons=0x8)
    for gpu in (new, old):
        state = gpu.state()
        assert (state["power_w"], state["sm_mhz"]) == (512.3, 1980)
        assert state["reasons"] == ["HwSlowdown"]
    silent = card(**answers).state()  # a slice, or an old driver
    assert silent["reasons"] is Watch(None, states=[silent]).summary()["reasons"] is None
    assert Watch(None, states=[silent, state]).summary()["reasons"] == ["HwSlowdown"]


@pytest.mark.parametrize("arch, dtype, width, whole, usable", [
    (90, torch.bfloat16, 128, 128, True), (0, torch.float16, 16, 16, True),
    (89, torch.bfloat16, 128, 128, False), (90, torch.float32, 128, 128, False),
    (90, torch.bfloat16, 192, 128, True),  # 128 + 64
    (90, torch.bfloat16, 128, 192, False),  # one part must be a power of two
    (90, torch.bfloat16, 24, 16, False),  # 16 + 8: the second part would be padded
    (90, torch.bfloat16, 40, 64, False),
])  # fmt: skip
def test_descriptors_are_used_where_tiles_are_whole(arch, dtype, width, whole, usable):
    k, v = torch.zeros(4, 2, width, dtype=dtype), torch.zeros(4, 2, whole, dtype=dtype)
    assert tma_usable(arch, k, whole=v) is usable
    assert not tma_usable(arch, k[:0], whole=v)
    assert not tma_usable(arch, k[:, :, ::2], whole=v)


# ---- generating ----------------------------------------------------------------------------------

TINY = "--dim 32 --heads 4 --groups 2 --dk 8 --vocab 50 --layers 2".split()
IDS = torch.arange(90)[None] * 7 % 50


def generated(run, whole, must_launch=False):
    return GENERATE.timed(run, whole, IDS, 6, 1e-4, must_launch)


def test_decoding_is_held_against_one_forward():
    """And a row of ours without its kernels has failed."""
    torch.manual_seed(0)
    config = NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
    model = NSALanguageModel(config, 50, 2)
    run = partial(GENERATE.by_nsa, model, False, "auto")
    whole = partial(GENERATE.last_of, model)
    row = generated(run, whole)
    assert row["status"] == "VALID" and row["how"] == "eager" and row["off"] < 1e-4
    assert row["ms_per_step"] > 0 and row["tokens_per_s"] > 0
    row = generated(run, lambda ids: whole(ids.roll(1, 1)))
    assert row["status"] == "FAILED" and "the last logits are off by" in row["why"]
    row = generated(run, whole, must_launch=True)
    assert row["status"] == "FAILED" and row["why"] == "no kernel of ours was launched"


@pytest.mark.parametrize("attention", ["nsa", "sdpa"])
def test_transformers_is_timed_by_its_own_generate(attention, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(GENERATE, "DEVICE", ("cpu", torch.float32))
    args = GENERATE.parse([*TINY, "--S_list", "90", "--new", "6"])
    model = GENERATE.llama(args, attention)
    run = partial(GENERATE.by_transformers, model)
    row = generated(run, partial(GENERATE.last_of_transformers, model))
    assert row["status"] == "VALID", row


def test_logits_of_which_some_are_told():
    want = torch.tensor([[4.0, 1.0, 2.0], [1.0, 2.0, 0.0]])
    told = want.clone().index_fill_(1, torch.tensor([1]), -torch.inf)
    assert GENERATE.off_by(told, want) == 0
    told[1, 0] = 3
    assert GENERATE.off_by(told, want) == 0.5
    told[0] = -torch.inf  # nothing is known of a text
    assert GENERATE.off_by(told, want) == torch.inf
    told[0] = torch.nan
    assert not GENERATE.off_by(told, want) < 9
