"""Generate text from a saved showcase model: prefill the prompt once, then decode from the cache.

    python -m nsa.generate showcase.pt --prompt "ROMEO:" --max-new-tokens 200
    python -m nsa.generate showcase.pt --temperature 0.8 --top-k 40 --seed 1

Without --temperature the most likely byte is taken each time. Text goes to stdout, the rates to
stderr. On a GPU it runs under bf16 autocast. --graph replays each step as one CUDA graph; where
that is impossible it decodes without and says why. Exit code: 0, or 2 for a usage error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pickle
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.arguments import check_dtype
from nsa.config import NSAConfig, check_int
from nsa.decode_graph import GraphUnavailable, StepGraph
from nsa.fp8 import KVCacheDtype
from nsa.model import NSALanguageModel
from nsa.options import Parser, device_here, seed64

FORMAT = "nsa-lm/1"


def save_checkpoint(
    path: str | Path, model: NSALanguageModel, state: dict[str, Tensor] | None = None
) -> None:
    """Write the model's configuration and weights: plain numbers and tensors, no pickled code.

    state: the whole weights of a model that is sharded (default: its own state_dict()). A model
    that torch.compile wraps is saved as the one inside. An earlier file stays whole until the new
    one is, and for good if that cannot be written.
    """
    weights = (state or model.state_dict()).items()
    saved = {
        "format": FORMAT,
        "config": dataclasses.asdict(model.config),
        "vocab_size": model.vocab_size,
        "n_layers": model.n_layers,
        "state": {k.replace("_orig_mod.", ""): v.detach().cpu() for k, v in weights},
    }
    path = Path(path).resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        torch.save(saved, path)
        return
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:  # by its name, torch would write that into the file
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> NSALanguageModel:
    """Rebuild the model of `save_checkpoint`, in its dtype. Loads data only (weights_only), never
    code.

    Raises ValueError when the file is not such a checkpoint or holds other weights than its
    configuration describes.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # torch's own text advises to run the file's code
        raise ValueError(f"checkpoint {path} holds something else than tensors and numbers") from e
    except Exception as e:  # of foreign bytes torch.load raises whatever they lead it to
        if isinstance(e, OSError) and e.filename is not None:
            raise  # the file cannot be opened
        why = (str(e).splitlines() or ["it ends too early"])[0]
        raise ValueError(f"checkpoint {path} cannot be read: {why}") from e
    found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
    if found != FORMAT:
        raise ValueError(f"checkpoint {path} must have format {FORMAT!r}, got {found!r}")
    try:
        config, sizes = NSAConfig(**saved["config"]), (saved["vocab_size"], saved["n_layers"])
        model = NSALanguageModel(config, *sizes)
        model.load_state_dict(saved["state"], assign=True)  # in the dtype that was saved
    except KeyError as e:
        raise ValueError(f"checkpoint {path} lacks {e}") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"checkpoint {path} has a configuration of another kind: {e}") from e
    except RuntimeError as e:
        raise ValueError(f"checkpoint {path} does not fit its own configuration: {e}") from e
    return model.to(device).eval()


@dataclass(frozen=True)
class Generated:
    """tokens: int64 [B, prompt + new]; rates in tokens per second over the whole batch.

    graphed: True when steps were replays of a CUDA graph; why_no_graph: why not, where asked.
    """

    tokens: Tensor
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    graphed: bool = False
    why_no_graph: str | None = None


def pick(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One token per row of logits [B, vocab]: the best one (temperature 0) or a sample. [B, 1]."""
    logits = logits.float().cpu()  # one generator, the same draws on every device
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        best = logits.topk(min(top_k, logits.shape[-1]), dim=-1)  # no more than k, though some tie
        logits = torch.full_like(logits, -math.inf).scatter(-1, best.indices, best.values)
    # Differences to the best logit, in fp64, stay finite at any temperature.
    logits = logits.double() - logits.amax(-1, keepdim=True).double()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def generate(
    model: NSALanguageModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    graph: bool = False,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> Generated:
    """Continue `prompt` (int64 [B, S], S >= 1) by max_new_tokens tokens.

    temperature 0 is greedy; otherwise logits are divided by it, cut to the top_k best and sampled
    with `seed`, so the same call gives the same text. graph: capture a step once and replay it,
    where it can be captured; the capture counts as neither prefill nor decoding. kv_cache_dtype: as
    NSACache's, "fp8_e4m3" with descales of 1. Raises TypeError or ValueError that names the
    argument, also for an empty prompt or a token that the model does not know.
    """
    check_dtype("prompt", prompt, "an int32 or int64 tensor", torch.int32, torch.int64)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must be [B, S] with S >= 1, got {list(prompt.shape)}")
    if prompt.numel():
        low, high = torch.stack(prompt.aminmax()).tolist()
        if low < 0 or high >= model.vocab_size:
            raise ValueError(
                f"prompt must hold tokens from 0 to {model.vocab_size - 1}, got "
                f"{low if low < 0 else high}"
            )
    check_int("max_new_tokens", max_new_tokens, 1)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or larger and finite, got {temperature}")
    check_int("top_k", top_k, 1, optional=True)

    def clock() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize(prompt.device)
        return time.perf_counter()

    try:
        generator = torch.Generator().manual_seed(seed)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}") from e
    start = clock()
    with torch.inference_mode():
        logits, caches = model.prefill(
            prompt, prompt.shape[1] + max_new_tokens, kv_cache_dtype=kv_cache_dtype
        )
        tokens = [prompt, pick(logits[:, -1], temperature, top_k, generator).to(prompt.device)]
        prefilled = clock()
        step: Callable[[Tensor], Tensor] = lambda x: model.step(x, caches)
        graphed, why = False, None
        begin = prefilled
        if graph and max_new_tokens > 1:
            try:
                step, graphed = StepGraph(step, tokens[-1], caches), True
            except GraphUnavailable as error:
                why = str(error)
            begin = clock()
        for _ in range(max_new_tokens - 1):
            logits = step(tokens[-1])
            tokens.append(pick(logits[:, -1], temperature, top_k, generator).to(prompt.device))
        decoded = clock()
    batch, steps = prompt.shape[0], max_new_tokens - 1
    return Generated(
        tokens=torch.cat(tokens, dim=1),  # outside, so that a model can be trained on them
        prefill_tokens_per_s=prompt.numel() / (prefilled - start),
        decode_tokens_per_s=batch * steps / (decoded - begin) if steps else None,
        graphed=graphed,
        why_no_graph=why,
    )


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="file written by scripts/train_showcase.py --save")
    parser.add_argument("--prompt", default="ROMEO:\n", help="text to continue (UTF-8 bytes)")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the best byte")
    parser.add_argument("--top-k", type=int, default=None, help="sample among the k best only")
    parser.add_argument("--seed", type=seed64, help="of the samples (default: 0)")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="of keys and values"
    )
    parser.add_argument("--graph", action="store_true", help="replay steps as one CUDA graph")
    parser.add_argument(
        "--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args(argv)
    samples = {"--top-k": args.top_k, "--seed": args.seed}
    unread = " and ".join(name for name, value in samples.items() if value is not None)
    if unread and args.temperature == 0:
        print(f"no effect of {unread}: --temperature 0 takes the best byte", file=sys.stderr)
    args.seed = args.seed or 0
    try:
        model = load_checkpoint(args.checkpoint, args.device)
        if model.vocab_size != 256:
            raise ValueError(
                f"checkpoint {args.checkpoint} must have a vocab_size of 256, one token per byte, "
                f"got {model.vocab_size}"
            )
        text = os.fsencode(args.prompt)  # the bytes that were typed, be they UTF-8 or not
        prompt = torch.tensor(list(text), dtype=torch.long, device=args.device).view(1, len(text))
        with torch.autocast("cuda", torch.bfloat16, enabled=prompt.is_cuda):
            names = ("temperature", "top_k", "seed", "graph", "kv_cache_dtype")
            how: Any = {name: getattr(args, name) for name in names}
            result = generate(model, prompt, args.max_new_tokens, **how)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    print(bytes(result.tokens[0].tolist()).decode("utf-8", errors="replace"))
    rate = result.decode_tokens_per_s
    how = " by CUDA graph" if result.graphed else ""
    print(
        f"prefill {result.prefill_tokens_per_s:.0f} tokens/s"
        + (f", decode {rate:.1f} tokens/s{how}" if rate else ""),
        file=sys.stderr,
    )
    if result.why_no_graph:
        print(f"no CUDA graph: {result.why_no_graph}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
