"""NSA as an attention backend of vLLM, and nsa.NSALanguageModel as a model that vLLM serves.

    save_for_vllm(nsa.generate.load_checkpoint("showcase.pt"), "folder", max_len=8192)
    llm = vllm.LLM("folder", skip_tokenizer_init=True)
    llm.generate({"prompt_token_ids": list(b"ROMEO:")}, SamplingParams(detokenize=False))

vLLM finds register() by the entry point `vllm.general_plugins` of this package; nothing of vLLM is
replaced. A model of one's own makes an NSALayer for each of its attention layers.

Each of the eight caches of a layer (keys and values: compressed, selection, window, raw) is a cache
layer of vLLM's with pages of its own, as its sparse models keep the keys of their indexers; all
share one block table. One tensor for all of them will not do: nsa_with_kvcache needs each cache
contiguous, and vLLM zeroes and moves block b of a tensor as tensor[b]. What a page holds depends on
that page and those before it, compressed tokens included, so prefix caching is right, and so is a
length that goes back when drafted tokens are refused.

Checked with vLLM 0.33.0.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from vllm import envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    get_kv_quant_mode,
)

from nsa import fp8
from nsa.checks import MOST_STEP_ROWS
from nsa.config import NSAConfig, check_int
from nsa.kvcache import nsa_with_kvcache
from nsa.model import NSALanguageModel

NAME = "NSA"  # of the backend
ARCHITECTURE = "NSAForCausalLM"
CACHES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw")
CACHE_DTYPES = ["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"]


def register() -> None:
    """Make the backend "NSA", the config "nsa" and the model NSAForCausalLM known to vLLM.

    The plugin's entry point; it may be called more than once.
    """
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.NSABackend")
    AutoConfig.register(NSAServedConfig.model_type, NSAServedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")


class NSABackend(AttentionBackend):
    """The attention backend. Layers of dense models cannot choose it: they have no gates."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = CACHE_DTYPES  # type: ignore[assignment]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[NSAImpl]:
        return NSAImpl

    @staticmethod
    def get_builder_cls() -> type[NSAMetadataBuilder]:
        return NSAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(64)]  # which the decode step of a single launch asks for

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # each cache is contiguous

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # NSAMetadataBuilder groups requests by the lengths that the host knows


@dataclass
class Group:
    """Consecutive requests of a batch that have T new tokens each."""

    requests: slice
    tokens: slice
    T: int


@dataclass
class NSAMetadata(AttentionMetadata):
    """block_table int32 [requests, pages], seq_lens int32 [requests] with the new tokens."""

    block_table: Tensor
    seq_lens: Tensor
    groups: list[Group]


class NSAMetadataBuilder(AttentionMetadataBuilder[NSAMetadata]):
    """Groups requests by their number of new tokens, of which nsa_with_kvcache takes one a call."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Graphs of decode steps, of which the fused one reads no value on the host."""
        model = vllm_config.model_config
        heads = model.hf_text_config
        rows = max_decode_query_len(vllm_config) * (
            heads.num_attention_heads // heads.num_key_value_heads
        )
        if model.dtype == torch.float32 or rows > MOST_STEP_ROWS:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NSAMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise NotImplementedError(f"nsa is causal attention, got causal={m.causal!r}")
        lengths = m.query_start_loc_cpu[: m.num_reqs + 1].diff().tolist()
        groups, request, token = [], 0, 0
        for T, run in itertools.groupby(lengths):
            n = len(list(run))
            if T:  # requests that pad a batch have no token
                requests = slice(request, request + n)
                groups.append(Group(requests, slice(token, token + n * T), T))
            request, token = request + n, token + n * T
        return NSAMetadata(m.block_table_tensor, m.seq_lens, groups)


class NSAImpl(AttentionImpl[NSAMetadata]):
    """Attention of one layer. Raises NotImplementedError that names what NSA lacks.

    config, phi_k and phi_v are NSALayer's; the other arguments are vLLM's.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        config: NSAConfig,
        phi_k: Callable[[Tensor], Tensor],
        phi_v: Callable[[Tensor], Tensor],
    ) -> None:
        lacking = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in lacking.items():
            if value is not None:
                raise NotImplementedError(f"nsa does not take {name}, got {value!r}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"nsa is causal self-attention of a decoder, got attn_type={attn_type!r}"
            )
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(
                f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype!r}"
            )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype
        self.config, self.phi_k, self.phi_v = config, phi_k, phi_v

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: dict[str, Tensor],
        attn_metadata: NSAMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        *,
        gates: Tensor,
    ) -> Tensor:
        """Append the new tokens of all requests to the caches and attend from them.

        query: [tokens, HQ, Dk]. key, value: [tokens, 3 * G, Dk or Dv], the branches (cmp, sel, win)
        one after another; keys are turned, those of cmp not yet compressed. gates:
        [tokens, HQ, 3]. kv_cache: pages by the names CACHES, [P, rows, G, D]. attn_metadata: None
        while vLLM measures memory; then nothing is attended. Writes and returns output
        [tokens, HQ, Dv], of which rows that pad a batch stay as they are.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("nsa has no output_scale: its output is not quantized")
        if attn_metadata is None:
            return output.zero_()
        names = "raw", "sel", "win"
        new = {"q": query, "gates": gates}
        new |= {f"k_{name}": x for name, x in zip(names, key.chunk(3, dim=-2), strict=True)}
        new |= {f"v_{name}": x for name, x in zip(names, value.chunk(3, dim=-2), strict=True)}
        for group in attn_metadata.groups:
            lens = attn_metadata.seq_lens[group.requests] - group.T
            out = nsa_with_kvcache(
                **{name: x[group.tokens].unflatten(0, (-1, group.T)) for name, x in new.items()},
                **{f"{name}_cache": pages for name, pages in kv_cache.items()},
                phi_k=self.phi_k,
                phi_v=self.phi_v,
                # Requests that pad a captured batch have length 0 and vLLM's null block.
                cache_seqlens=lens.clamp(min=0),
                block_table=attn_metadata.block_table[group.requests],
                softmax_scale=self.scale,
                **self.config.sizes(),
            )
            output[group.tokens] = out.flatten(0, 1)
        return output


class NSAPages(nn.Module, AttentionLayerBase):
    """One cache of a layer, as vLLM sees it: rows of G heads of `width`, one for `every` tokens."""

    def __init__(
        self, vllm_config: VllmConfig, name: str, groups: int, width: int, every: int, impl: NSAImpl
    ) -> None:
        super().__init__()
        self.groups, self.width, self.every, self.impl = groups, width, every, impl
        self.kv_cache = torch.tensor([])
        known = vllm_config.compilation_config.static_forward_context
        if name in known:
            raise ValueError(f"prefix must be given to one layer only, got {name!r} twice")
        known[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return NSABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        cache, every = vllm_config.cache_config, self.every
        if cache.block_size % every:
            raise ValueError(
                f"block_size must be a multiple of the model's d={every}, got {cache.block_size}"
            )
        return FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=1,  # a row is contiguous over its heads, as nsa_with_kvcache has it
            head_size=self.groups * self.width,
            head_size_v=0,
            dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, vllm_config.model_config),
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
            tokens_per_state=every,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take pages [P, 1, rows, G * width] as [P, rows, G, width]."""
        if kv_cache.dtype == torch.uint8:  # which is how vLLM allocates FP8
            kv_cache = kv_cache.view(fp8.E4M3)
        self.kv_cache = kv_cache[:, 0].unflatten(-1, (self.groups, self.width))


class NSALayer(nn.Module):
    """Attention of one layer over vLLM's pages; projections, gates and phi are the model's.

    phi_k and phi_v: [n, l, G, D] -> [n, 1, G, D], as nsa_with_kvcache takes them. prefix: the
    layer's name, with its number as the only one. Raises NotImplementedError that names a setting
    of the engine that NSA does not serve, and ValueError for a prefix that is taken.
    """

    def __init__(
        self,
        config: NSAConfig,
        phi_k: Callable[[Tensor], Tensor],
        phi_v: Callable[[Tensor], Tensor],
        *,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        _refuse(vllm_config)
        c = self.config = config
        self.impl = NSAImpl(
            c.heads,
            c.d_k,
            c.d_k**-0.5,
            c.groups,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            config=c,
            phi_k=phi_k,
            phi_v=phi_v,
        )
        self.key = f"{prefix}.{CACHES[0]}"  # by which vLLM files the metadata
        self.pages = nn.ModuleDict(
            {
                name: NSAPages(
                    vllm_config,
                    f"{prefix}.{name}",
                    c.groups,
                    c.d_k if name[0] == "k" else c.d_v,
                    c.d if name.endswith("cmp") else 1,
                    self.impl,
                )
                for name in CACHES
            }
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        """[tokens, HQ, Dv] of the batch that the engine runs; arguments as NSAImpl.forward's."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            raise NotImplementedError("nsa does not serve microbatches (enable_dbo)")
        output = query.new_zeros(*query.shape[:2], self.config.d_v)
        pages = {name: layer.kv_cache for name, layer in self.pages.items()}
        mine = None if metadata is None else metadata[self.key]
        return self.impl.forward(self, query, key, value, pages, mine, output, gates=gates)


def _refuse(vllm_config: VllmConfig) -> None:
    """Raise NotImplementedError for a setting of the engine that NSA does not serve."""
    parallel = vllm_config.parallel_config
    for kind in ("tensor", "pipeline", "decode_context", "prefill_context"):
        name = f"{kind}_parallel_size"
        if (size := getattr(parallel, name)) > 1:
            raise NotImplementedError(f"nsa serves one GPU in vLLM: {name} must be 1, got {size}")
    cache, model = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if getattr(torch, cache, model) != model:  # torch has no auto and no fp8
        raise NotImplementedError(
            f"kv_cache_dtype must be auto, fp8 or the model's {model}, got {cache!r}"
        )
    lacking = {
        "kv_transfer_config": vllm_config.kv_transfer_config,
        "quantization": vllm_config.quant_config,
        "kv_cache_dtype_skip_layers": vllm_config.cache_config.kv_cache_dtype_skip_layers,
        # It would capture chunks of prompts, for which lengths are read on the host.
        "VLLM_USE_BREAKABLE_CUDAGRAPH": envs.VLLM_USE_BREAKABLE_CUDAGRAPH,
    }
    for name, value in lacking.items():
        if value:
            raise NotImplementedError(f"nsa does not serve {name} in vLLM, got {value!r}")


class NSAServedConfig(PretrainedConfig):
    """config.json of an NSALanguageModel: `nsa` holds the fields of NSAConfig."""

    model_type = "nsa"


def save_for_vllm(model: NSALanguageModel, folder: str | Path, *, max_len: int) -> None:
    """Write config.json and model.safetensors, a model directory of vLLM.

    max_len: tokens of the longest sequence, which the model itself does not bound. Modules that
    share weights get a copy each; what torch.compile wraps is saved as what is inside. Raises
    TypeError for a model of another kind or dtype, TypeError or ValueError for another max_len, and
    ValueError where folder is a file.
    """
    from safetensors.torch import save_file

    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, NSALanguageModel):
        raise TypeError(f"model must be an nsa.NSALanguageModel, got {type(model).__name__}")
    check_int("max_len", max_len, 1)
    dtype, allowed = model.embedding.weight.dtype, NSABackend.supported_dtypes
    if dtype not in allowed:
        raise TypeError(f"model must be of {', '.join(map(str, allowed))}, got {dtype}")
    folder, c = Path(folder), model.config
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"folder must be a directory or a new one, got {str(folder)!r}") from None
    # Copies, as tensors that share memory cannot be saved.
    how: dict[str, Any] = dict(copy=True, memory_format=torch.contiguous_format)
    weights = model.state_dict().items()
    state = {k.replace("_orig_mod.", ""): x.detach().to("cpu", **how) for k, x in weights}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": NSAServedConfig.model_type,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.n_layers,
        "hidden_size": c.dim,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.groups,
        "head_dim": c.d_k,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
        "nsa": dataclasses.asdict(c),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class NSAForCausalLM(NSALanguageModel):
    """NSALanguageModel as vLLM calls it: tokens of all requests in one row."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        sizes = NSAConfig(**config.nsa)
        super().__init__(sizes, config.vocab_size, config.num_hidden_layers)
        self.layers = nn.ModuleList()
        for i, block in enumerate(self.blocks):
            a, name = block.attention, f"{prefix}.blocks.{i}".removeprefix(".")
            self.layers.append(
                NSALayer(sizes, a.phi_k, a.phi_v, vllm_config=vllm_config, prefix=name)
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, dim]."""
        return self.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, dim] of input_ids [tokens], or of inputs_embeds, at positions."""
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        for block, layer in zip(self.blocks, self.layers, strict=True):
            a, inner = block.attention, block.attention_norm(x)
            q, kv = a._project(inner, positions)
            k = torch.cat([kv.k_cmp, kv.k_sel, kv.k_win], -2)
            v = torch.cat([kv.v_cmp, kv.v_sel, kv.v_win], -2)
            x = block._finish(x, a.out(layer(q, k, v, a.gate(inner)).flatten(-2)))
        return self.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[tokens, dim] -> [tokens, vocab]."""
        return F.linear(hidden_states, self.embedding.weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the weights that save_for_vllm wrote, all of them. RuntimeError for others."""
        state = dict(weights)
        self.load_state_dict(state)
        return set(state)
