"""The whole run as data: which stages, with which command, proof, limit and order.

What a reader decides by comes first, so that a run that is cut short has the valuable part: what
the box is, whether the kernels are right, how fast they are at real sizes. `estimate_s` is what the
stage took in the runs of bench/results/stage_seconds.csv; a budget skips stages by it.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.oneshot.record.model import SHARDS, Stage, bench

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ("cpu", "quick", "standard", "full")
PYTEST = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", "--durations=8")
# Compiling kernels takes most of a parity stage: several processes share it.
SHARDED = ("{python}", "-m", SHARDS, *PYTEST[2:])
NO_TEST = "nsa/tests/no_such_test_file.py"  # pytest then ends with a usage error, never with PASS

ENV_STAGE = Stage(
    "env", "What the box is, and the doctor", ("{python}", "-m", "scripts.oneshot", "doctor"),
    proof="output", timeout_s=150, estimate_s=6, gpu=False, outputs=("env.json",), group="box",
)  # fmt: skip


def tests(*patterns: str) -> tuple[str, ...]:
    """Return the test files that match, so that a stage imports only the modules it needs."""
    found = {p for pattern in patterns for p in (ROOT / "nsa" / "tests").glob(pattern)}
    return tuple(sorted(p.relative_to(ROOT).as_posix() for p in found)) or (NO_TEST,)


# Tests of more_parity, and how many a GPU has at least, by their files.
MORE_TESTS = (
    "test_triton_sel_parity*.py", "test_triton_sel_backward_gpu.py", "test_backward*.py",
    "test_gradcheck*.py", "test_train_smoke.py", "test_decode.py", "test_decode_append.py",
    "test_decode_graph.py", "test_kvcache.py", "test_prefill_compile.py", "test_prefill_limits.py",
    "test_block_attn.py", "test_block_lists.py", "test_selection_lse.py", "test_sums.py",
    "test_key_sums.py", "test_head_padding.py", "test_packs.py", "test_distributions.py",
    "test_unseen_values.py", "test_probes.py",
)  # fmt: skip
MORE_LEAST = {"test_triton_sel_parity": 50, "test_triton_sel_backward": 8, "test_backward": 13,
              "test_gradcheck": 16, "test_train_smoke": 9}  # fmt: skip


def beside(one: Stage) -> tuple[str, ...]:
    """Return SHARDED with the kernels of a stage, whose argv ends with its table, compiled too."""
    command = shlex.join((*one.argv[1:-2], "--compile_only"))
    return (*SHARDED[:3], "--beside", command, *SHARDED[3:])


# Stages that a profile does not have; the report names those of `quick`.
LEFT_OUT = {"quick": ("decode_serving", "more_parity", "sel_route", "threshold", "train_showcase")}


def plan(profile: str) -> list[Stage]:
    """Return the stages of a profile in order. Raises ValueError for an unknown profile."""
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    return [ENV_STAGE, *(_cpu() if profile == "cpu" else _gpu(profile))]


_ON = ("USE_TRITON_SEL", "SEL_TRITON_ALLOW_GRAD", "TEST_TRITON_SEL", "SEL_TRITON_MIN_L")
TRITON_ON = {f"NSA_{name}": "1" for name in _ON}
# A parity stage judges the kernels themselves, also where the SM 8.9 policy would not pick them.
PARITY = {**TRITON_ON, "NSA_TRITON_SEL_FORCE": "1"}
PREFILL_ON = {"NSA_USE_TRITON_SEL": "1"}
FROM_64 = {"NSA_SEL_TRITON_MIN_L": "64"}
STEP = {**PREFILL_ON, "NSA_TRITON_SEL_FORCE": "1", **FROM_64}


GROUPS = {"parity": "parity", "tests": "parity", "row": "box", "output": "box"}  # by proof


def _stage(id: str, title: str, proof: str, command: Any, *seconds: Any, **fields: Any) -> Stage:
    """Make a stage whose log is called after it. command: what follows {python} as text, or a whole
    argv; seconds: its limit and its estimate."""
    argv = ("{python}", *command.split()) if isinstance(command, str) else command
    fields = {"log": f"{id}.txt", "group": GROUPS[proof], **fields}
    return Stage(id, title, argv, proof, *seconds, **fields)


ROUTING = _stage(
    "routing", "Flags and the ladder of each branch", "output",
    "scripts/print_routing.py --json {out}/routing.json", 90, 5, outputs=("routing.json",), log="",
)  # fmt: skip
SEL_RANGES = _stage(
    "sel_ranges", "A sample of the ranges that selection makes", "output",
    "scripts/print_selection_ranges.py --out {out}/sel_ranges.jsonl", 90, 5,
    outputs=("sel_ranges.jsonl",),
)  # fmt: skip


def _summary(table: str, *seconds: float) -> Stage:
    command, files = "bench/summarize_decode_csv.py {out}/" + table, ("decode_summary.txt",)
    fields = {"needs": (table,), "outputs": files, "group": "bench"}
    return _stage("decode_summary", "Decode summary", "output", command, *seconds, **fields)


def _gpu(profile: str) -> list[Stage]:
    stages = [*_of_every_profile(profile), THRESHOLD]
    if profile == "full":
        stages[-1:] = [*PREFILL_SIZES, *FA2, THRESHOLD, SEL_RANGES, *DECODE, FUZZ, *SELECTION]
    stages = [stage for stage in stages if stage.id not in LEFT_OUT.get(profile, ())]
    without_torch = ("threshold", "decode_summary")
    return [replace(stage, ahead=stage.id not in without_torch) for stage in stages]


def _of_every_profile(profile: str) -> list[Stage]:
    """Return the first stages; some take longer in profile full and have fewer cases in quick."""
    full, quick = profile == "full", profile == "quick"
    by_profile = lambda *three: three[("quick", "standard", "full").index(profile)]
    kernels = ("-m", "kernel" if full else "core")
    prefill = bench(
        "prefill_bench", "Prefill: NSA against dense attention", "bench_prefill",
        by_profile("--S_list 8192 --sharing random --seconds 0.3", "--seconds 0.4",
                   "--S_list 8192,32768,65536 --ops full,cmp,sel,win,select,turn,pack"),
        900 if full else 300, csv="prefill.csv", least=by_profile(11, 17, 43),
        estimate_s=by_profile(24, 48, 190), env=PREFILL_ON,
    )  # fmt: skip
    serving = bench(
        "decode_serving", "Decode at serving sizes: eager, as a graph, and the layer's whole step",
        "bench_decode", f"--preset {'serving' if full else 'serving_short'} --quick",
        600 if full else 240, estimate_s=100 if full else 24, required=False, env=STEP,
    )  # fmt: skip
    cells = "--N 256 --H 8 --D 64 --Dv 64 --L_list 16,64,256"
    if full:
        cells = "--N 64,1024 --H 2,8 --D 64,128 --L_list 16,64,128,256,1024"
    route = bench(  # what the threshold is decided by
        "sel_route", "Selection bench: Triton against packing plus SDPA, as callers get them",
        "bench_sel_triton", f"--route 1 {cells} --iters 10 --seconds 0.005",
        400 if full else 150, estimate_s=110 if full else 12, env=FROM_64,
    )  # fmt: skip
    health = _stage(
        "health", "Box health: copy, GEMM, PCIe, launch latency, noise floor, corruption", "row",
        "bench/health.py" + (" --deep" if full else ""), 120, 30 if full else 7, required=False,
        outputs=("health.json",),  # the benches take their peaks from it
    )  # fmt: skip
    showcase = _stage(
        "train_showcase", "Training showcase", "tests", "scripts/train_showcase.py --out {out}",
        900 if full else 300, 18, env=TRITON_ON, outputs=("train.jsonl",), group="train",
    )  # fmt: skip
    of_prefill = _parity(
        "prefill_parity", "Parity of prefill, mostly at the sizes of the benches",
        (*beside(prefill), *tests("test_prefill_kernels.py", "test_hopper.py", "test_turn.py"),
         *kernels),
        2700 if full else 420, by_profile(54, 56, 130), least=170 if full else 60,
    )  # fmt: skip
    of_decode = _parity(
        "decode_parity", "Parity of the decode step",
        (*(SHARDED if quick else beside(serving)),
         *tests("test_decode_kernels.py", "test_decode_cluster.py"), *kernels,
         # No decode step is timed in a quick report.
         *(("-k", "static and T1 and not fp8") if quick else ())),
        1800 if full else 300, by_profile(17, 29, 80), least=by_profile(10, 36, 80),
    )  # fmt: skip
    of_more = _parity(
        "more_parity", "Parity of selection by ranges, packs, other sizes, gradients, training",
        (*beside(showcase), *tests(*MORE_TESTS), "-m", "kernel or core" if full else "core",
         # train_showcase asks the same of the model that it trained.
         *(() if full else ("-k", "not see_the_future"))),
        2700 if full else 420, 200 if full else 66, least=400 if full else 148,
        of_files=MORE_LEAST, env={**PARITY, "NSA_TEST_TRAIN": "1"},
    )  # fmt: skip
    return [ROUTING, SANITY, health, of_prefill, prefill, of_decode, serving, of_more, route,
            showcase]  # fmt: skip


def _parity(id: str, title: str, *more: Any, **fields: Any) -> Stage:
    return _stage(id, title, "parity", *more, **{"env": PARITY, **fields})


SANITY = _stage(
    "sanity", "Matmul, one Triton kernel and one selection kernel against fp64", "parity",
    "scripts/gpu_sanity.py", 180, 4, log="sanity.out",
)  # fmt: skip
FUZZ = _stage(
    "fuzz", "Public functions on drawn shapes, packs, layouts, values and dtypes", "tests",
    "-m scripts.fuzz --seconds 600 --device cuda --last {out}/fuzz_last.json", 1300, 610, least=7,
    required=False, env=PARITY, outputs=("fuzz_last.json",),
)  # fmt: skip
ALSO_PREFILL = dict(estimate_s=60, required=False, env=PREFILL_ON)
PREFILL_SIZES = [
    bench("prefill_b128", "Prefill: selection by blocks of 128, as MiniMax-M3 has them",
          "bench_prefill", "--l_sel 128 --ops sel --sharing random,shared", 300, least=8,
          **ALSO_PREFILL),
    bench("prefill_d192", "Prefill: heads of 192 and 128, the paper's", "bench_prefill",
          "--D 192 --ops full,cmp,sel,win", 300, least=20, **ALSO_PREFILL),
]  # fmt: skip
FA2 = [
    _stage("fa2_probe", "Is a FlashAttention-2 usable here, and which", "row",
           "scripts/fa2_probe.py", 120, 4, required=False),
    _stage("fa2_varlen", "FlashAttention-2 parity, dense and varlen", "parity",
           (*PYTEST, *tests("test_fa2*.py"), "-k", "fa2_gpu_varlen"), 240, 13, least=28,
           required=False, after="fa2_probe", env={"NSA_USE_FA2": "1", "NSA_TEST_FA2": "1"}),
    bench("fa2_bench", "FlashAttention-2 by branch", "bench_fa2", "", 240, csv="fa2.csv",
          estimate_s=65, required=False, after="fa2_varlen", env={"NSA_USE_FA2": "1"}),
]  # fmt: skip
THRESHOLD = _stage(
    "threshold", "Proposed sel_triton_min_L", "row",
    "bench/threshold_optimizer.py {out}/sel_route.csv", 60, 1, needs=("sel_route.csv",),
    also={"fa2_bench": ("--fa2", "{out}/fa2.csv")}, group="bench",
)  # fmt: skip
DECODE = [
    bench(
        "decode_bench", "Decode step, by branch", "bench_decode",
        "--B 1 --dim 256 --heads 8 --groups 2 --dk 32 --dv 32 --l 16 --d 8 --l_sel 32 --n_sel "
        "8 --w 128 --S_list 512,1024,2048,4096 --iters 64 --warmup 8 --branch_force_mode env "
        "--more 0", 240, csv="decode_gpu_final.csv", estimate_s=50, env=STEP,
    ),
    _summary("decode_gpu_final.csv", 60, 1),
]  # fmt: skip
CELLS = ("--N 64,256,1024 --H 2,4,8 --D 64,128 --Dv 64,128 --streams 1,2 --L_list "
         "16,32,64,128,256,512,1024 --seconds 0.03 --dist")  # fmt: skip
SPANS = {
    "sel_dense": ("few", "one span per row, Triton against packed SDPA"),
    "sel_varlen": ("many", "eight equal spans per row"),
    "sel_mixed": ("mixed", "2, 4 or 8 spans of random length"),
}
SELECTION = [
    # A decode step has no threshold, so these cells are not among its evidence.
    bench("sel_decode", "Selection bench: one query per sequence, blocks of the paper's choice",
          "bench_sel_triton", "--decode 1 --N 64,256,1024 --H 2,4 --n_sel 8,16 --D 64,128 "
          "--Dv 64,128 --L_list 128,256,512 --seconds 0.03", 360, estimate_s=90, env=FROM_64),
    *(bench(id, f"Selection bench: {what}", "bench_sel_triton", f"{CELLS} {dist}", 1200,
            estimate_s=540, env=FROM_64) for id, (dist, what) in SPANS.items()),
]  # fmt: skip


# One small case of each backward that the core of test_prefill_kernels.py has not: the selection
# kernels', the ones in one pass, those by unions, of the rotary turn.
ONE_PASS = "test_block_attn.py::test_one_pass_agrees_with_two"
UNIONS = "test_block_attn.py::test_unions_agree_with_single_queries"
BACKWARD = tuple(f"nsa/tests/{name}" for name in (
    "test_backward_varlen.py::test_backward_parity_ranges",
    "test_backward_varlen.py::test_backward_parity_dense",
    f"{ONE_PASS}[1-34+0-G2h2-D16v16-b16n3-float32-ragged]",
    f"{ONE_PASS}[1-40+0-G2h1-D48v16-b16n3-float16-one_block]",
    "test_prefill_kernels.py::test_keys_beside_the_edges_of_tiles",
    f"{UNIONS}[1-27+70-G1h1-D16v32-b32n3-float16-ragged]",
    "test_turn.py::test_every_part_and_gradient_is_the_oracles",
))  # fmt: skip
INTERPRET = {"TRITON_INTERPRET": "1"}


def _cpu_tests(id: str, title: str, *argv: str, seconds=(180, 20), **fields: Any) -> Stage:
    fields = {"env": INTERPRET, **fields}
    return _stage(id, title, "tests", (*PYTEST, *argv), *seconds, **fields)


def _cpu() -> list[Stage]:
    """Return the stages without a GPU: kernels in Triton's interpreter at tiny shapes."""
    stages = [
        replace(ROUTING, estimate_s=4, log="routing.txt"),
        _stage("sanity", "Matmul, one Triton kernel and one selection kernel, interpreted",
               "parity", "scripts/gpu_sanity.py --interpret", 90, 4, env=INTERPRET,
               log="sanity.out"),
        _cpu_tests("triton_fwd", "Selection forward parity, interpreted",
                   *tests("test_triton_sel_parity.py"), "-k", "triton_sel_parity", "-m", "kernel",
                   seconds=(90, 20), least=78),
        _cpu_tests("prefill_parity", "Prefill and decode kernels parity, interpreted",
                   *tests("test_prefill_kernels.py", "test_decode_kernels.py"), "-m",
                   "kernel and core", seconds=(180, 45), least=91),
        _cpu_tests("backward_parity", "Backward parity of every family of kernels, interpreted",
                   *BACKWARD, least=34),
        _cpu_tests("probes", "Numbers of an earlier oracle; drawn cases, gradients of PyTorch's "
                   "routes", *tests("test_probes.py"), least=24),
        _cpu_tests("triton_wrapper", "Selection wrapper and its fallbacks on CPU",
                   *tests("test_triton_sel_wrapper_cpu.py"), seconds=(90, 4), env={}, least=35),
        # UNSTABLE is shown, but a box without a quiet core proves the step all the same.
        _stage("decode_bench", "Decode step on CPU (small)", "row",
               "bench/bench_decode.py --B 1 --dim 64 --heads 4 --groups 2 --dk 16 --dv 16 --l 16 "
               "--d 8 --l_sel 32 --n_sel 4 --w 64 --S_list 128,256 --iters 10 --warmup 2 --csv "
               "{out}/decode_cpu.csv", 90, 4, outputs=("decode_cpu.csv",), least=10,
               group="bench"),
        _summary("decode_cpu.csv", 90, 4),
        replace(SEL_RANGES, estimate_s=4),
        _stage("train_showcase", "Training showcase (tiny)", "tests",
               "scripts/train_showcase.py --device cpu --steps 20 --out {out}", 150, 20,
               outputs=("train.jsonl",), least=5, group="train"),
    ]  # fmt: skip
    return [replace(stage, gpu=False) for stage in stages]


def choose(
    stages: list[Stage], only: tuple[str, ...], skip: tuple[str, ...]
) -> tuple[list[Stage], str | None]:
    """Return the stages after --only and --skip, and words for what was left out.

    The environment is always captured. Raises ValueError for an id that is no stage.
    """
    known = [s.id for s in stages]
    for name in (*only, *skip):
        if name not in known:
            raise ValueError(f"no stage {name!r}; stages: {', '.join(known)}")
    wanted = lambda id: id == ENV_STAGE.id or ((not only or id in only) and id not in skip)
    keep = [s for s in stages if wanted(s.id)]
    if len(keep) == len(stages):
        return keep, None
    given = (("--only", only), ("--skip", skip))
    return keep, " ".join(f"{option} {','.join(ids)}" for option, ids in given if ids)
