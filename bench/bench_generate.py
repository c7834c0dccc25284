"""Tokens per second of generating text from a long prompt, with models of random weights.

    python bench/bench_generate.py --S_list 32768 --csv generate.csv

`nsa.generate` (eager and by CUDA graph, caches of bf16 and FP8); `generate` of a LLaMA of
Transformers of the same sizes, where that is installed, with attention "nsa" and "sdpa"; and both
models in vLLM, where that is installed. Greedy. --who names a part of those that shall run.
prefill_s is the time to the first token; a step is what each further token takes. Each row is the
better of two runs.

Proof: what decoding from the cache gave is held against one forward of the model over the whole
text: largest difference of the last logits over the largest logit, of the prompt's first 2048
tokens (`off_short`) and of all (`off`). Both are bf16; an FP8 cache is held against the same bf16
forward, so its limit is wider. So is that of a long prompt: keys of random weights are so alike
that the last bit of bf16 decides which of hundreds of blocks are chosen, and two right ways differ
by 0.15 at 32k. vLLM tells the 20 largest logits only, which are compared. kernels: launches of our
kernels in a step, or with a graph in all of the prompt, the capture and its warm-up (vLLM's engine
captures before); a row of NSA without any is FAILED.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import gc
import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.device import Gpu
from bench.main import bench_parser, parsed
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import integers, note, say, write_csv, write_so_far
from nsa import NSAConfig, NSALanguageModel, launches
from nsa.generate import generate

SIZES = {"dim": 2048, "heads": 32, "groups": 2, "dk": 128, "layers": 4, "vocab": 32000}
DEVICE = "cuda", torch.bfloat16  # of the models
LIMIT, WIDE_LIMIT = 0.05, 0.25
WHO = ["nsa.generate", "transformers", "vllm"]
TOP = 20  # logits of each step that vLLM gives out by default
SHORT = 2048  # tokens of a prompt to which LIMIT applies
COLUMNS = (
    "who", "cache", "how", "B", "S", "new", *SIZES, "prefill_s", "ms_per_step", "tokens_per_s",
    "kernels", "off_short", "off", "status", "why", *PROVENANCE,
)  # fmt: skip


class Run(NamedTuple):
    """Texts [B, S + new], the logits of their last tokens [B, vocab] from the cache (-inf: below
    those that are told), the seconds to the first token and of each step, and how the steps ran."""

    tokens: Tensor
    logits: Tensor
    prefill_s: float
    step_s: float
    how: str


Runner = Callable[[Tensor, int], Run]
Whole = Callable[[Tensor], Tensor]


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def by_nsa(model: NSALanguageModel, graph: bool, cache: str, ids: Tensor, new: int) -> Run:
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, out: Tensor) -> None:
        seen[:] = [out]  # a graph's steps write to the last one's buffer

    hook = model.norm.register_forward_hook(keep)
    try:
        made = generate(model, ids, new, graph=graph, kv_cache_dtype=cache)  # type: ignore[arg-type]
    finally:
        hook.remove()
    with torch.inference_mode():
        logits = torch.nn.functional.linear(seen[0][:, -1], model.embedding.weight)
    steps = ids.shape[0] / made.decode_tokens_per_s
    how = "graph" if made.graphed else f"eager: {made.why_no_graph}" if graph else "eager"
    return Run(made.tokens, logits, ids.numel() / made.prefill_tokens_per_s, steps, how)


def by_transformers(model: Any, ids: Tensor, new: int) -> Run:
    mask = torch.ones_like(ids)
    call = lambda n: model.generate(
        ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False,
        return_dict_in_generate=True, output_logits=n > 1,
    )  # fmt: skip
    begin = clock()
    call(1)
    first = clock()
    made = call(new)
    end = clock()
    steps = (end - first - (first - begin)) / (new - 1)
    return Run(made.sequences, made.logits[-1], first - begin, steps, "eager")


# Logits of the last token, from one forward of the whole text.
last_of = lambda model, ids: model(ids)[:, -1]
last_of_transformers = lambda model, ids: model(ids, logits_to_keep=1).logits[:, -1]


def llama(args: Namespace, attention: str) -> Any:
    """A LlamaForCausalLM on DEVICE. Raises ImportError without Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from nsa.integrations.transformers import add_nsa_parameters

    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.dim, intermediate_size=4 * args.dim,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, head_dim=args.dk,
        num_key_value_heads=args.groups, eos_token_id=None,
        max_position_embeddings=2 * max(args.S_list) + args.new,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    if attention == "nsa":
        add_nsa_parameters(model)
    return model.to(*DEVICE).eval()


def contenders(args: Namespace) -> Iterator[tuple[str, str, Runner, Whole]]:
    """(who, cache, run, logits of a whole text at its last token) of those that --who names."""
    config = NSAConfig(args.dim, args.heads, args.groups, args.dk, args.dk)
    ours = NSALanguageModel(config, args.vocab, args.layers).to(*DEVICE).eval()
    whole: Whole = partial(last_of, ours)
    for graph, cache in itertools.product((False, True), ("auto", "fp8_e4m3")):
        if "nsa.generate" in args.who:
            yield "nsa.generate", cache, partial(by_nsa, ours, graph, cache), whole
    if "vllm" in args.who:
        for cache in "auto", "fp8_e4m3":
            yield from in_vllm(args, ours, cache, whole)
    del ours, whole
    for attention in ("nsa", "sdpa"):
        try:
            model = llama(args, attention)
        except ImportError as error:
            note(f"Transformers is not timed: {error}")
            return
        whole = partial(last_of_transformers, model)
        if "transformers" in args.who:
            run = partial(by_transformers, model)
            yield f"transformers, {attention}", "auto", run, whole
        if "vllm" in args.who and attention == "sdpa":
            for backend in (None, "TRITON_ATTN"):
                yield from in_vllm(args, model, "auto", whole, backend)


@contextmanager
def engine(
    model: Any, batches: list[int], S: int, new: int, cache: str, attention: str | None = None
) -> Iterator[list[Any]]:
    """A list of one vllm.LLM, emptied at the end so that its memory is free whoever has the list.
    model: an NSALanguageModel or a model of Transformers, for texts of S + new tokens; prompts in
    one chunk each, decoding by CUDA graphs of batches of these sizes. attention: a backend of
    vLLM's, None for its own choice. Raises ImportError without vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    from nsa import NSALanguageModel
    from nsa.integrations.vllm import register, save_for_vllm

    with TemporaryDirectory() as folder:
        if isinstance(model, NSALanguageModel):
            register()
            save_for_vllm(model, folder, max_len=S + new)
        else:
            model.save_pretrained(folder)
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                  "cudagraph_capture_sizes": batches}  # fmt: skip
        made = [vllm.LLM(
            folder, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=cache,
            attention_backend=attention, block_size=64, max_model_len=S + new,
            max_num_batched_tokens=S, max_num_seqs=max(batches), gpu_memory_utilization=0.3,
            enable_prefix_caching=False,  # each run computes its prompts
            logprobs_mode="raw_logits", compilation_config=graphs,
        )]  # fmt: skip
    try:
        yield made
    finally:
        made.clear()
        gc.collect()
        cleanup_dist_env_and_memory()


def by_vllm(llms: list[Any], ids: Tensor, new: int) -> Run:
    """Return the texts and their TOP largest logits, which vLLM tells. A third run gives both,
    since handing logits out costs time."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": x} for x in ids.tolist()]

    def run(n: int, logits: int | None = None) -> tuple[Any, float]:
        greedy = SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=logits
        )
        begin = clock()
        made = llms[0].generate(prompts, greedy, use_tqdm=False)
        return [x.outputs[0] for x in made], clock() - begin

    first, whole = run(1)[1], run(new)[1]
    made = run(new, TOP)[0]
    tokens = torch.tensor([list(x.token_ids) for x in made], device=ids.device)
    vocab = llms[0].llm_engine.vllm_config.model_config.get_vocab_size()
    logits = torch.full((len(made), vocab), -torch.inf)
    for row, x in zip(logits, made, strict=True):
        for token, told in x.logprobs[-1].items():
            row[token] = told.logprob
    steps = (whole - first) / (new - 1)
    return Run(torch.cat([ids, tokens], 1), logits.to(ids.device), first, steps, "graph")


def in_vllm(
    args: Namespace, model: Any, cache: str, whole: Whole, attention: str | None = None
) -> Iterator[tuple[str, str, Runner, Whole]]:
    try:
        sizes = args.B_list, max(args.S_list), args.new
        with engine(model, *sizes, cache, attention) as llms:
            layers = llms[0].llm_engine.vllm_config.compilation_config.static_forward_context
            name = next(iter(layers.values())).get_attn_backend().get_name().lower()
            yield f"vllm, {name}", cache, partial(by_vllm, llms), whole
    except ImportError as error:
        note(f"vLLM is not timed: {error}")


def off_by(told: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted logit, of those that are told (not -inf)."""
    unknown = told == -torch.inf
    off = (told - want).masked_fill(unknown, 0).abs().max() / want.abs().max()
    return torch.inf if unknown.all(-1).any() else off.item()


def timed(run: Runner, whole: Whole, ids: Tensor, new: int, limit: float, ours: bool) -> dict:
    """The columns of a row from prefill_s on."""
    run(ids, 3)  # compiles
    counted = []
    for n in (3, 4):  # a step apart; a library's calls (sdpa_...) are no kernels of ours
        with launches.recording() as counts:
            run(ids, n)
        counted.append(sum(n for name, n in counts.items() if name.startswith("_")))
    short = run(ids[:, :SHORT], 5)
    runs = [run(ids, new) for _ in range(2)]
    last, why, offs = runs[-1], [], []
    for made, allowed in (short, limit), (last, WIDE_LIMIT if ids.shape[1] > SHORT else limit):
        with torch.inference_mode():
            want = whole(made.tokens[:, :-1]).float()
        offs.append(off_by(made.logits.float(), want))
        if not offs[-1] <= allowed:
            why.append(f"the last logits are off by {offs[-1]:.3g}, allowed {allowed}")
    kernels = counted[1] - counted[0] if last.how != "graph" else counted[0]
    if ours and not kernels:
        why.append("no kernel of ours was launched")
    steps = min(r.step_s for r in runs)
    return {
        "how": last.how, "prefill_s": min(r.prefill_s for r in runs), "ms_per_step": 1e3 * steps,
        "tokens_per_s": len(ids) / steps, "kernels": kernels, "off_short": offs[0], "off": offs[1],
        "status": "FAILED" if why else "VALID", "why": "; ".join(why),
    }  # fmt: skip


def parse(argv: list[str] | None = None) -> Namespace:
    parser = bench_parser(__doc__, lengths=[32768], sizes=SIZES | {"new": (64, "tokens a text")},
                          shrinks=False)  # fmt: skip
    parser.add_argument("--who", nargs="+", choices=WHO, default=WHO, help="contenders")
    parser.add_argument("--B_list", type=integers, default=[1], help="texts at a time, a,b,c")
    args = parsed(parser, argv)
    if args.new < 5:
        parser.error(f"--new must be at least 5, got {args.new}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        note("torch sees no CUDA device: nothing was timed", "warn")
        return 3
    about, rows, failed = provenance(Gpu()), [], False
    torch.manual_seed(0)
    for who, cache, run, whole in contenders(args):
        for B, S in itertools.product(args.B_list, args.S_list):
            ids = torch.randint(args.vocab, (B, S), device=DEVICE[0])
            row = {"who": who, "cache": cache, "B": B, "S": S, "new": args.new, **about}
            row |= {name: getattr(args, name) for name in SIZES}
            limit = LIMIT if cache == "auto" else WIDE_LIMIT
            row |= timed(run, whole, ids, args.new, limit, "nsa" in who)
            failed |= row["status"] == "FAILED"
            rows.append(row)
            offs = f"{row['off_short']:.3g}, {row['off']:.3g}"
            say(args, f"{who:20} {cache:9} {row['how']:6} B={B} S={S} first token "
                      f"{row['prefill_s']:.3f} s, step {row['ms_per_step']:.3f} ms, "
                      f"{row['tokens_per_s']:.1f} tokens/s, {row['kernels']} launches, off "
                      f"{offs} {row['status']} {row['why']}")  # fmt: skip
            write_so_far(args.csv, rows, COLUMNS)
            torch.cuda.empty_cache()
    write_csv(args.csv, rows, COLUMNS)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
