"""vLLM's engine as a contender of bench_generate.py, in this process, so that launches count."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

TOP = 20  # logits of each step that vLLM gives out by default


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


def attention_of(llms: list[Any]) -> str:
    """The name of the backend that the engine chose."""
    layers = llms[0].llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return next(iter(layers)).get_attn_backend().get_name()


def generated(llms: list[Any], ids: Tensor, new: int) -> tuple[Tensor, Tensor, float, float]:
    """(texts [B, S + new], logits of the last tokens, seconds to the first token and of a step). Of
    the logits, float32 [B, vocab], vLLM tells the TOP largest; the others are -inf. They and the
    texts are of a third run, since handing logits out costs time."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": x} for x in ids.tolist()]

    def run(n: int, logits: int | None = None) -> tuple[Any, float]:
        greedy = SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=logits
        )
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = llms[0].generate(prompts, greedy, use_tqdm=False)
        torch.cuda.synchronize()
        return [x.outputs[0] for x in made], time.perf_counter() - begin

    first, whole = run(1)[1], run(new)[1]
    made = run(new, TOP)[0]
    tokens = torch.tensor([list(x.token_ids) for x in made], device=ids.device)
    vocab = llms[0].llm_engine.vllm_config.model_config.get_vocab_size()
    logits = torch.full((len(made), vocab), -torch.inf)
    for row, x in zip(logits, made, strict=True):
        for token, told in x.logprobs[-1].items():
            row[token] = told.logprob
    logits = logits.to(ids.device)
    return torch.cat([ids, tokens], 1), logits, first, (whole - first) / (new - 1)
