"""Does the vLLM backend keep to vLLM's interfaces, and do its tokens equal nsa.generate's?

Needs vllm, which the project does not install; it runs on a CPU. The batches of a runner are made
here from vLLM's own metadata and judged by the oracle in fp64. The engine runs whole, in a process
of its own, with a wheel for GPUs as well: of its compiled CPU functions the three that such a run
calls are written in PyTorch below.
"""

import copy
import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before its first import

from safetensors.torch import load_file  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.v1.attention import backend as interface  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
)

from nsa import NSAConfig, NSALanguageModel, oracle  # noqa: E402
from nsa.compress import MLPCompression, mean_pool  # noqa: E402
from nsa.generate import generate  # noqa: E402
from nsa.integrations import vllm as integration  # noqa: E402
from nsa.tests.helpers import assert_raises, randn  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
C = NSAConfig(
    dim=32, heads=4, groups=2, d_k=8, d_v=16, l=8, d=4, l_sel=8, n_sel=4, window=12, phi="mlp"
)
CARD = dataclasses.replace(C, dim=128, d_k=64, d_v=64, l_sel=16)  # which our kernels take
PAGE, PAGES, S = 16, 24, 90
NAN = float("nan")


def make_model(config: NSAConfig = C) -> NSALanguageModel:
    """Weights with which every branch has a say in the tokens."""
    torch.manual_seed(0)
    model = NSALanguageModel(config, vocab_size=256, n_layers=2).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.mul_(6)
            for phi in (block.attention.phi_k, block.attention.phi_v):
                phi.outer.weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    integration.save_for_vllm(make_model(), path, max_len=256)
    return path


@pytest.fixture
def config(folder):
    return engine_config(folder)


def engine_config(folder, **settings):
    integration.register()
    settings = {"block_size": 64, "dtype": "float32", **settings}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **settings
    ).create_engine_config()


@pytest.mark.parametrize("ours, base", [
    (integration.NSABackend, interface.AttentionBackend),
    (integration.NSAMetadataBuilder, interface.AttentionMetadataBuilder),
    (integration.NSAImpl, interface.AttentionImpl), (integration.NSAPages, AttentionLayerBase),
])  # fmt: skip
def test_classes_are_vllms(ours, base):
    """No abstract method is left, and each method that is vLLM's takes what vLLM gives it."""
    assert issubclass(ours, base) and not inspect.isabstract(ours)
    compared = []
    for name, method in vars(ours).items():
        theirs = inspect.getattr_static(base, name, None)
        both = [getattr(f, "__func__", f) for f in (method, theirs)]  # of a static or class method
        if all(map(inspect.isfunction, both)):
            got, want = (inspect.signature(f).parameters.values() for f in both)
            brief = lambda parameters: [(p.name, p.default) for p in parameters]
            assert brief(got)[: len(want)] == brief(want), name
            compared.append(name)
    assert len(compared) > 1


def entry_point() -> str:
    """Its line in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text().partition('"vllm.general_plugins"]\n')[2]
    return text.splitlines()[0]


def test_the_plugin_is_found_by_its_entry_point():
    name, value = entry_point().split(" = ")
    assert name == "nsa"
    for _ in range(2):  # vLLM may load it in each of its processes, and again
        EntryPoint(name, json.loads(value), "vllm.general_plugins").load()()
    assert AttentionBackendEnum["NSA"].get_class() is integration.NSABackend
    assert "NSAForCausalLM" in ModelRegistry.get_supported_archs()


def test_graphs_are_of_steps_that_the_fused_one_serves(folder):
    ask = lambda dtype: integration.NSAMetadataBuilder.get_cudagraph_support(
        engine_config(folder, dtype=dtype), None
    )
    assert ask("bfloat16") == interface.AttentionCGSupport.UNIFORM_BATCH
    assert ask("float32") == interface.AttentionCGSupport.NEVER


class Runner:
    """One layer, its caches in vLLM's shapes full of NaN, and requests of S tokens."""

    def __init__(self, config, requests: int, phi="mean") -> None:
        config.cache_config.block_size = PAGE
        self.phi = [lambda x: mean_pool(x, C.l, C.d)] * 2
        if phi == "mlp":
            torch.manual_seed(3)
            self.phi = [MLPCompression(n, C.l, C.d).double() for n in (C.d_k, C.d_v)]
        self.layer = integration.NSALayer(C, *self.phi, vllm_config=config, prefix="layers.0")
        specs = {}
        for name, pages in self.layer.pages.items():
            spec = specs[f"layers.0.{name}"] = pages.get_kv_cache_spec(config)
            *shape, size = compute_layer_kv_cache_shape_bytes(spec, PAGES)
            assert spec.page_size_bytes * PAGES == torch.Size([*shape, size]).numel()
            pages.bind_kv_cache(torch.full((*shape, size // 4), NAN, dtype=torch.float64))
        assert UniformTypeKVCacheSpecs.from_specs(specs)  # one block table serves them all
        self.builder = integration.NSAMetadataBuilder(
            specs["layers.0.k_sel"], list(specs), config, torch.device("cpu")
        )
        shapes = {"q": (C.heads, C.d_k), "gates": (C.heads, 3)}
        shapes |= {"k": (3 * C.groups, C.d_k), "v": (3 * C.groups, C.d_v)}
        self.data = {
            name: randn(requests, S, *shape, seed=i, dtype=torch.float64)
            for i, (name, shape) in enumerate(shapes.items())
        }
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1
        blocks = -(-S // PAGE)
        self.table = order[: requests * blocks].view(requests, blocks).int()

    def metadata(self, lens, new, table=None):
        """vLLM's metadata of requests with `lens` tokens, `new` of them new."""
        table = self.table if table is None else table
        start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        slots = [
            table[b, p // PAGE] * PAGE + p % PAGE
            for b, (n, T) in enumerate(zip(lens, new, strict=True))
            for p in range(n - T, n)
        ]
        return interface.CommonAttentionMetadata(
            query_start_loc=start, query_start_loc_cpu=start,
            seq_lens=torch.tensor(lens, dtype=torch.int32), num_reqs=len(new),
            num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(lens),
            block_table_tensor=table, slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )  # fmt: skip

    def step(self, common, tokens) -> Tensor:
        """Output of tokens, (request, position) each, of vLLM's or our own metadata."""
        b, t = zip(*tokens, strict=True)
        x = {name: y[list(b), list(t)] for name, y in self.data.items()}
        ours = isinstance(common, integration.NSAMetadata)
        metadata = common if ours else self.builder.build(0, common)
        pages = {name: p.kv_cache for name, p in self.layer.pages.items()}
        out = torch.full((len(tokens), C.heads, C.d_v), NAN, dtype=torch.float64)
        self.layer.impl.forward(
            self.layer, x["q"], x["k"], x["v"], pages, metadata, out, gates=x["gates"]
        )
        return out

    def run(self, lens, new) -> Tensor:
        """A batch whose request b goes from lens[b] - new[b] to lens[b] tokens."""
        common = self.metadata(lens, new)
        pairs = enumerate(zip(lens, new, strict=True))
        return self.step(common, [(b, t) for b, (n, T) in pairs for t in range(n - T, n)])

    def expected(self) -> Tensor:
        k, v = self.data["k"].chunk(3, 2), self.data["v"].chunk(3, 2)
        cmp = [phi(x).detach() for phi, x in zip(self.phi, (k[0], v[0]), strict=True)]
        q, gates = self.data["q"], self.data["gates"]
        return oracle.nsa_attention(q, *cmp, k[1], v[1], k[2], v[2], gates, **C.sizes())


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def rows(want, lens, new):
    """What is wanted of a batch whose request b goes from lens[b] - new[b] to lens[b] tokens."""
    return torch.cat([x[n - T : n] for x, n, T in zip(want, lens, new, strict=False)])


@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_chunks_and_steps_of_requests(config, phi):
    """Requests come one after another, in chunks of any length beside others that decode."""
    runner, lens = Runner(config, 3, phi), [0, 0, 0]
    want = runner.expected()
    batches = [(30, 1, 0), (1, 20, 0), (1, 1, 33), (1, 1, 9), (1, 1, 1), (3, 3, 3), (1, 30, 17)]
    for new in [*batches, *[(1, 1, 1)] * 9]:
        lens = [n + T for n, T in zip(lens, new, strict=True)]
        close(runner.run(lens, list(new)), rows(want, lens, new))


def test_keys_lie_in_vllms_slots(config):
    """Where vLLM's own slot mapping has them, so that what it does by pages is right here."""
    runner, lens = Runner(config, 2), [37, 21]
    slots = runner.metadata(lens, lens).slot_mapping
    runner.run(lens, lens)
    for i, name in enumerate(("raw", "sel", "win")):
        for x in "kv":
            pages = runner.layer.pages[f"{x}_{name}"].kv_cache
            new = rows(runner.data[x], lens, lens).chunk(3, 1)[i]
            assert torch.equal(pages.flatten(0, 1)[slots], new)
    untouched = sorted(set(range(PAGES)) - set(runner.table.flatten().tolist()))
    for pages in runner.layer.pages.values():  # a compressed row lies in a page of its request
        assert pages.kv_cache[untouched].isnan().all()


def test_shared_pages_and_refused_drafts(config):
    """Prefix caching: whole pages of another request. Speculation: lengths go back."""
    runner = Runner(config, 2)
    for x in runner.data.values():
        x[1, : 2 * PAGE] = x[0, : 2 * PAGE]
    runner.table[1, :2] = runner.table[0, :2]
    want = runner.expected()
    first = runner.metadata([70], [70], runner.table[:1])
    close(runner.step(first, [(0, t) for t in range(70)]), want[0, :70])
    close(runner.run([71, 60], [1, 28]), rows(want, [71, 60], [1, 28]))
    refused = {name: x.clone() for name, x in runner.data.items()}
    for x in runner.data.values():
        x[:, 60:] = randn(*x[:, 60:].shape, seed=9, dtype=x.dtype)
    runner.run([75, 64], [4, 4])
    runner.data = refused
    close(runner.run([73, 62], [2, 2]), rows(want, [73, 62], [2, 2]))


def test_rows_that_pad_a_batch_write_to_the_null_block_alone(config):
    """A captured graph runs them like others, of length 0; an eager batch leaves them out.

    What a graph reads is vLLM's tensors as they are at a replay, not as they were at its capture.
    """
    runner = Runner(config, 2)
    want = runner.expected()
    runner.run([30, 12], [30, 12])
    before = {name: p.kv_cache.clone() for name, p in runner.layer.pages.items()}
    table = torch.cat([runner.table, torch.zeros_like(runner.table[:1])])
    common = runner.metadata([1, 1, 1], [1, 1, 1], table.clone())
    captured = runner.builder.build_for_cudagraph_capture(common)
    common.block_table_tensor[2] = 0
    for n in (30, 31):
        common.seq_lens.copy_(torch.tensor([n + 1, n - 17, 0]))
        out = runner.step(captured, [(0, n), (1, n - 18), (0, 0)])
        close(out[:2], rows(want, [n + 1, n - 17], [1, 1]))
    for name, pages in runner.layer.pages.items():
        changed = (pages.kv_cache != before[name]) & ~(pages.kv_cache.isnan())
        got = set(changed.flatten(1).any(1).nonzero().flatten().tolist())
        assert got <= {0, int(runner.table[0, 1]), int(runner.table[1, 0])}
    eager = runner.metadata([33, 15, 0], [1, 1, 0], table)
    close(runner.step(eager, [(0, 32), (1, 14)]), rows(want, [33, 15], [1, 1]))


def test_without_metadata_nothing_is_attended(config):
    runner = Runner(config, 1)
    out = torch.full((3, C.heads, C.d_v), NAN)
    none = dict(query=None, key=None, value=None, kv_cache={}, gates=None)
    assert not runner.layer.impl.forward(None, attn_metadata=None, output=out, **none).any()


@pytest.mark.parametrize("name, value", [
    ("alibi_slopes", [1.0]), ("sliding_window", 64), ("logits_soft_cap", 30.0),
    ("attn_type", interface.AttentionType.ENCODER_ONLY),
    ("kv_sharing_target_layer_name", "layers.0"), ("kv_cache_dtype", "int8_per_token_head"),
])  # fmt: skip
def test_a_layer_refuses_what_nsa_lacks(name, value):
    none = dict(config=C, phi_k=None, phi_v=None)
    with pytest.raises(NotImplementedError, match=name):
        integration.NSAImpl(4, 8, 1.0, 2, **{name: value}, **none)


def test_an_engine_is_refused_by_the_name_of_its_setting(config, monkeypatch):
    make = lambda: integration.NSALayer(C, None, None, vllm_config=config, prefix="layers.0")
    sizes = [f"{x}_parallel_size" for x in "tensor pipeline decode_context prefill_context".split()]
    for owner, name, value, words in (
        *((config.parallel_config, name, 2, f"{name} must be 1, got 2") for name in sizes),
        (config, "kv_transfer_config", "some", "kv_transfer_config"),
        (config, "quant_config", "some", "quantiz"),
        (config.cache_config, "kv_cache_dtype_skip_layers", ["0"], "kv_cache_dtype_skip_layers"),
        *((config.cache_config, "cache_dtype", dtype,
           f"kv_cache_dtype must be auto, fp8 or the model's torch.float32, got '{dtype}'")
          for dtype in ("float16", "bfloat16")),
        (os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH", "1", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            put = patch.setitem if owner is os.environ else patch.setattr
            put(owner, name, value)
            with pytest.raises(NotImplementedError, match=words):
                make()
    config.cache_config.cache_dtype = "float32"  # the model's
    layer, runner = make(), Runner(engine_config(config.model_config.model), 1)
    config.cache_config.block_size = 6
    common, build = runner.metadata([3], [3]), runner.builder.build
    assert_raises(
        (ValueError, "'layers.0.k_cmp' twice", make),
        (ValueError, "multiple of the model's d=4, got 6",
         lambda: layer.pages["k_cmp"].get_kv_cache_spec(config)),
        (NotImplementedError, "causal=False", lambda: build(0, common.replace(causal=False))),
        (NotImplementedError, "output_scale",
         lambda: runner.layer.impl.forward(*[None] * 7, torch.ones(1), gates=None)),
    )  # fmt: skip


def test_layers_of_a_dense_model_cannot_choose_it():
    no = ("use_mla", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")
    yes = ("has_sink", "has_sliding_window", "use_kv_connector")
    reasons = integration.NSABackend.validate_configuration(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16,
        device_capability=None, attn_type="decoder", **dict.fromkeys(no, False),
        **dict.fromkeys(yes, True),
    )  # fmt: skip
    for reason in ("block_size", "non-sparse", "sinks", "sliding window", "KV connector"):
        assert any(reason in x for x in reasons), reason


def test_what_is_no_such_model_is_not_saved(tmp_path):
    file, model, double = tmp_path / "file", make_model(), make_model().double()
    file.write_text("mine")
    save = lambda model, n, to="new": (
        lambda: integration.save_for_vllm(model, tmp_path / to, max_len=n)
    )
    assert_raises(
        (TypeError, "NSALanguageModel, got Linear", save(torch.nn.Linear(2, 2), 9)),
        (ValueError, "max_len must be at least 1, got 0", save(model, 0)),
        (ValueError, "folder must be a directory or a new one, got .*/file'", save(model, 9, file)),
        (ValueError, "folder must be a directory .*/file/x'", save(model, 9, file / "x")),
        (TypeError, "must be of torch.float16, .*, got torch.float64", save(double, 9)),
    )
    assert list(tmp_path.iterdir()) == [file]  # nothing is begun


def test_modules_that_are_one_or_compiled_are_saved_as_copies(tmp_path):
    model = NSALanguageModel(dataclasses.replace(C, d_v=C.d_k), vocab_size=9, n_layers=2)
    model.blocks[0].attention.phi_v = model.blocks[0].attention.phi_k
    model.blocks[1] = model.blocks[0]
    parts = copy.deepcopy(model)
    parts.blocks[1] = torch.compile(parts.blocks[1], backend="eager")
    for saved in (model, torch.compile(model, backend="eager"), parts):
        integration.save_for_vllm(saved, tmp_path, max_len=8)
        found = load_file(tmp_path / "model.safetensors")
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)


def prompts() -> list[list[int]]:
    """The first three fill 4 pages of 64 tokens and outgrow them; the last two share 2 pages."""
    draw = lambda n: torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return [draw(50), draw(60), draw(100), draw(150), draw(150)[:128] + draw(9)]


def serve(folder: str, **settings) -> None:
    """Print the tokens that an engine makes of prompts(), how many of the last it had cached, and
    how often it preempted a request."""
    lib = torch.library.Library("_C", "FRAGMENT")

    def compiled(schema, function):
        lib.define(schema)
        lib.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

    def slot_mapping(start, positions, table, out, size):
        request = torch.arange(len(start) - 1).repeat_interleave(start.diff().long())
        at = positions[: len(request)]
        out[: len(request)] = table[request, at // size].long() * size + at % size

    if not hasattr(torch.ops._C, "greedy_argmax"):
        compiled("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
        compiled("greedy_argmax(Tensor logits) -> Tensor", lambda x: x.argmax(-1))
        compiled(
            "compute_slot_mapping_kernel_impl(Tensor start, Tensor positions, Tensor table, "
            "Tensor(a!) out, int size) -> ()",
            slot_mapping,
        )
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, real = [], Scheduler._preempt_request
    Scheduler._preempt_request = lambda *a, **how: (preempted.append(1), real(*a, **how))[1]
    llm = LLM(
        folder, skip_tokenizer_init=True, max_num_batched_tokens=64, max_num_seqs=3, seed=0,
        **{"enforce_eager": True, **settings},
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    *first, last = ({"prompt_token_ids": x} for x in prompts())
    outs = [*llm.generate(first, greedy), *llm.generate([last], greedy)]
    tokens = [list(x.outputs[0].token_ids) for x in outs]
    print("SERVED", json.dumps([tokens, outs[-1].num_cached_tokens, len(preempted)]))


FEW = {"num_gpu_blocks_override": 5, "block_size": 64}  # 4 pages and vLLM's null block


def check_counts(tokens, cached, preempted, few):
    """With few pages requests are preempted and computed anew, else the last prompt's begin is
    cached. Many a fault would give the same token again and again."""
    assert len({x for got in tokens for x in got}) > 9
    assert (cached == 128 or few) and (preempted > 0) == few


@pytest.mark.parametrize("settings, ours", [
    ({}, "auto"), ({"kv_cache_dtype": "fp8"}, "fp8_e4m3"), (FEW, "auto"),
], ids=["fp32", "fp8", "few-pages"])  # fmt: skip
def test_the_engine_makes_the_tokens_of_generate(folder, tmp_path, settings, ours):
    env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    found = served(folder, tmp_path, {"dtype": "float32", **settings}, env)
    model = make_model()
    for prompt, got in zip(prompts(), found[0], strict=True):
        want = generate(model, torch.tensor([prompt]), 24, kv_cache_dtype=ours)
        assert got == want.tokens[0, len(prompt) :].tolist()
    check_counts(*found, settings is FEW)


COMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GRAPHS = {"enforce_eager": False, "compilation_config": COMPILED}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("runner", ["0", "1"])  # vLLM's older and its second model runner
@pytest.mark.parametrize("settings, allowed", [
    ({}, 0.01), (GRAPHS, 0.01), ({"kv_cache_dtype": "fp8", **GRAPHS}, 0.3), (FEW, 0.01),
], ids=["eager", "graphs", "fp8", "few-pages"])  # fmt: skip
def test_the_engine_on_a_card(tmp_path, settings, allowed, runner):
    """No token's logit is below the largest of one forward by more than rounding explains."""
    model = make_model(CARD).half().cuda()
    integration.save_for_vllm(model, tmp_path / "model", max_len=256)
    few = settings is FEW
    settings = {"dtype": "float16", "block_size": 64, **settings}
    settings |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 28}
    env = dict(VLLM_TARGET_DEVICE="cuda", VLLM_USE_V2_MODEL_RUNNER=runner)
    env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    found = served(tmp_path / "model", tmp_path, settings, env)
    for prompt, got in zip(prompts(), found[0], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got], device="cuda"))[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(got, device="cuda")[:, None])[:, 0]
        behind = (logits.amax(-1) - chosen).max() / logits.abs().max()
        assert behind <= allowed, (prompt[:3], behind)
    check_counts(*found, few)


def served(folder, tmp_path, settings, env):
    """What serve() prints, of a process of its own that finds the plugin by its entry point."""
    info = tmp_path / "nsa_plugin-0.dist-info"  # as an installed nsa has it
    info.mkdir()
    entry = entry_point().replace('"', "")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-plugin\nVersion: 0\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    call = f"from nsa.tests.test_vllm import serve; serve({str(folder)!r}, **{settings})"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, env=env, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("SERVED "))
    return json.loads(line.removeprefix("SERVED "))
