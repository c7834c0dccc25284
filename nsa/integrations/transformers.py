"""NSA as an attention implementation of Hugging Face Transformers, by the name "nsa".

    >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    >>> from nsa.integrations.transformers import add_nsa_parameters
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ...     nsa={"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "window": 512},
    ... )
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="nsa")
    >>> parts = add_nsa_parameters(model)  # learnable compression and gates; before the optimizer

To import this module is to register the name. A model that was saved with these parameters is
loaded with them by from_pretrained, that of AutoModelForCausalLM too:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     again = AutoModelForCausalLM.from_pretrained(folder)
    >>> again.config._attn_implementation, len(again.model.layers[0].self_attn.nsa.phi_k.inner.bias)
    ('nsa', 8)

Causal self-attention that goes through AttentionInterface is served (LLaMA, Qwen, ...); what is not
causal, and cross attention, is refused by name. Of a multimodal model name the language model
alone: attn_implementation={"text_config": "nsa"}, with `nsa` in its text_config. The model has one
key and one value projection per layer, so the three branches share them; the paper gives each its
own (section 3.3.3). Without add_nsa_parameters compression is mean pooling and every gate is 1/3:
nothing is learnt for NSA, and no weight is added. A model that was trained dense needs training
before it is of use.

generate() decodes from an nsa.NSACache inside of the default (dynamic) cache, see
nsa/integrations/transformers_cache.py; with nsa={"kv_cache_dtype": "fp8_e4m3"} in the config that
holds FP8 (descales of 1). Batches with padding on either side run as one pack, and so
do sequences that position_ids or cu_seq_lens_q tell apart. Checked with Transformers 5.4, 5.17 and
5.24.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from nsa.attention import nsa_attention
from nsa.checks import autocast_on
from nsa.compress import make_compression, mean_pool
from nsa.fp8 import is_fp8
from nsa.integrations.transformers_cache import cache_layer
from nsa.integrations.transformers_packs import Pack, nsa_mask, pack_for
from nsa.log import warn_once
from nsa.module import GateMLP

NAME = "nsa"
SIZES = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "n_init": 1, "n_local": 2, "window": 512}


@functools.cache
def register() -> None:
    """Make attn_implementation="nsa" known to Transformers, as the import of this module does.

    Models whose config speaks of NSA parameters are made with them from then on.
    """
    AttentionInterface.register(NAME, nsa_attention_forward)
    AttentionMaskInterface.register(NAME, nsa_mask)
    register_module_module_registration_hook(_complete)


def settings(config: Any) -> dict[str, Any]:
    """The sizes, and backend, kv_cache_dtype and phi if given, of a model's config.nsa over SIZES.

    kv_cache_dtype: "auto" or "fp8_e4m3", what generate() keeps. phi is what add_nsa_parameters
    notes. Raises ValueError for any other name.
    """
    given = dict(getattr(config, "nsa", None) or {})
    unknown = set(given) - set(SIZES) - {"backend", "kv_cache_dtype", "phi"}
    if unknown:
        allowed = ", ".join([*SIZES, "backend", "kv_cache_dtype"])
        raise ValueError(f"config.nsa must hold some of {allowed}, got {sorted(unknown)[0]!r}")
    is_fp8(given.get("kv_cache_dtype", "auto"))  # or an error that says what it may be
    return {**SIZES, **given}


class NSAParameters(nn.Module):
    """What NSA learns in one attention layer: phi of keys and values (Eq. 7) and the gates (Eq. 5).

    Gates come from the layer's input, which the attention function does not see: a hook on the
    layer computes them before each forward pass.
    """

    def __init__(self, dim: int, heads: int, d_k: int, d_v: int, l: int, d: int, phi: str) -> None:
        super().__init__()
        self.gate = GateMLP(dim, heads)
        self.phi_k = make_compression(phi, d_k, l, d)
        self.phi_v = make_compression(phi, d_v, l, d)
        self.gates: Tensor | None = None
        self.unfilled = self.gate.inner.weight.is_meta  # until from_pretrained has filled it

    def train(self, mode: bool = True) -> NSAParameters:
        """As nn.Module.train(), which from_pretrained calls last: ValueError where weights lack."""
        if self.unfilled and not self.gate.inner.weight.is_meta:
            self.unfilled = False
            for name, p in self.named_parameters():
                if not getattr(p, "_is_hf_initialized", False) or p.is_meta:
                    raise ValueError(_WITHOUT.format(name))
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Without the gates that a forward pass left that failed: they cannot be copied."""
        return {**super().__getstate__(), "gates": None}


_WITHOUT = (
    "the model's config.nsa['phi'] speaks of NSA parameters, of which its weights lack {}: load "
    "it with a config without 'phi', then call add_nsa_parameters"
)


def add_nsa_parameters(model: PreTrainedModel, phi: str = "mlp") -> list[NSAParameters]:
    """Give every causal self-attention layer of `model` learnable compression and gates, layer.nsa.

    They are part of the model's parameters and state dict (`...self_attn.nsa.*`). The config notes
    phi and attn_implementation, so that from_pretrained loads what save_pretrained wrote as NSA.
    For load_state_dict call this on the new model first. phi: "mlp" or "mean". Vision towers,
    encoders and cross attention get none. Raises ValueError for a model without a causal attention
    layer of the LLaMA kind, or one that has them already.
    """
    layers = [m for m in model.modules() if _is_served(m)]
    if not layers:
        raise ValueError(
            "model must have causal self-attention layers with q_proj and k_proj, got "
            f"{type(model).__name__}"
        )
    if any(hasattr(layer, "nsa") for layer in layers):
        raise ValueError("model must not have NSA parameters yet, it has")
    outer = getattr(model.config, "nsa", None)
    for layer in layers:
        if outer and not getattr(layer.config, "nsa", None):  # given to the whole, not to its part
            layer.config.nsa = outer
    added = [_give(layer, phi) for layer in layers]
    for layer in layers:
        layer.config.nsa = {**(getattr(layer.config, "nsa", None) or {}), "phi": phi}
        layer.config.attn_implementation = NAME
    _note(model.config)
    return added


def _is_served(module: nn.Module) -> bool:
    """Is it a causal self-attention layer of the LLaMA kind?"""
    return (
        hasattr(module, "q_proj") and hasattr(module, "k_proj") and hasattr(module, "config")
        and _is_causal(module)
    )  # fmt: skip


def _is_causal(module: nn.Module) -> bool:
    crossed = getattr(module, "is_cross_attention", False)
    return getattr(module, "is_causal", False) is True and not crossed


def _give(layer: nn.Module, phi: str) -> NSAParameters:
    sizes, width = settings(layer.config), layer.head_dim
    heads = layer.q_proj.out_features // width
    part = NSAParameters(layer.q_proj.in_features, heads, width, width, sizes["l"], sizes["d"], phi)
    layer.nsa = part.to(layer.q_proj.weight)
    _watch(layer)
    return part


def _complete(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called for every module that is put into another: layers whose config speaks of parameters
    get them, so that from_pretrained finds a place for what was saved."""
    if child is None:
        return
    if _is_served(child):
        phi = (getattr(child.config, "nsa", None) or {}).get("phi")
        if phi is not None and not hasattr(child, "nsa"):
            _give(child, phi)
        if phi is not None or child.config._attn_implementation == NAME:
            child.config.attn_implementation = NAME
    if isinstance(parent, PreTrainedModel) and hasattr(parent, "config"):
        _note(parent.config)


def _note(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Have config.json say which of its configs name NSA, which Transformers does not keep.

    Returns what it says, None for nothing.
    """
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    named = {key: _note(x) for key, x in parts.items() if isinstance(x, PreTrainedConfig)}
    if any(named.values()):
        config.attn_implementation = {key: name for key, name in named.items() if name}
    return getattr(config, "attn_implementation", None)


def _watch(layer: nn.Module) -> None:
    """Have _before() called before each forward pass of the layer."""
    if not getattr(layer, "nsa_watched", False):
        layer.nsa_watched = True
        layer.register_forward_pre_hook(_before, with_kwargs=True)


def _before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep for the attention function what it does not see: gates of the layer's input, and the
    layer of the cache."""
    ours = layer.config._attn_implementation == NAME  # another function would not take them
    layer.nsa_cache = cache_layer(layer, kwargs, ours)
    learnt = getattr(layer, "nsa", None)
    if learnt is not None:
        x = args[0] if args else kwargs["hidden_states"]
        learnt.gates = learnt.gate(x) if ours else None
        if not ours:
            warn_once(
                "nsa: a model with NSA parameters runs without them, by "
                f"attn_implementation={layer.config._attn_implementation!r}"
            )


def nsa_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: query [B, HQ, S, D], key and value [B, G, N, D] -> [B, S, HQ, D].

    The queries are the last S of the N positions. Raises NotImplementedError for what NSA lacks:
    attention that is not causal, or to another sequence, dropout, sliding windows of the model's
    own, soft caps, attention sinks, 4-D masks. Under autocast everything is cast to its dtype, as
    torch's SDPA does.
    """
    _refuse(module, query, key, attention_mask, dropout, kwargs)
    how = settings(module.config)
    how["softmax_scale"] = scaling
    kv_cache_dtype = how.pop("kv_cache_dtype", "auto")
    learnt: NSAParameters | None = getattr(module, "nsa", None)
    if how.pop("phi", None) is not None and learnt is None:
        raise ValueError(
            "model must have the NSA parameters that its config.nsa['phi'] speaks of, got none: "
            "import nsa.integrations.transformers before it is loaded"
        )
    if not torch.compiler.is_compiling():
        _watch(module)
    held, module.nsa_cache = getattr(module, "nsa_cache", None), None
    # Under autocast the model turns queries and keys in fp32, but not values.
    cast = autocast_on(query.device) and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype(query.device.type) if cast else query.dtype
    q = query.transpose(1, 2).to(dtype)
    if learnt is None:
        gates = q.new_full((*q.shape[:-1], 3), 1 / 3)
        phi_k = phi_v = functools.partial(mean_pool, l=how["l"], d=how["d"])
    else:
        gates, learnt.gates = learnt.gates.to(dtype), None
        phi_k, phi_v = learnt.phi_k, learnt.phi_v
    pack = pack_for(q, attention_mask, kwargs)
    if held is not None:
        columns = held.get_seq_length() + (0 if held.nsa is None else q.shape[1])
        rows = [(0, columns)] * len(q) if pack is None else pack.rows(len(q))
        out = held.step(q, key, gates, phi_k, phi_v, rows, how)
        if out is not None:
            return out, None
        key, value = held.plain(key, value)
    k, v = (x.transpose(1, 2).to(dtype) for x in (key, value))
    out, k_cmp, v_cmp = _attend(q, k, v, gates, phi_k, phi_v, pack, how)
    if held is not None:
        held.fill(q.shape[2], k, v, k_cmp, v_cmp, rows, how, kv_cache_dtype)
    return out, None


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float,
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Raise NotImplementedError that names what NSA lacks; warn that it gives no weights."""
    name, asked = type(module).__name__, kwargs.get("is_causal")
    # Of one query some models say that it is not causal, since a kernel has nothing to mask then.
    causal = _is_causal(module) if asked is None or query.shape[2] == 1 else asked
    if not causal and asked is not True or key.shape[2] < query.shape[2]:
        raise NotImplementedError(
            f"nsa is causal self-attention, which {name} is not (encoders, vision towers, cross "
            "attention): give its model another implementation, and of a multimodal model name the "
            'language model alone, as attn_implementation={"text_config": "nsa"}'
        )
    if kwargs.get("output_attentions"):
        warn_once('nsa: output_attentions=True gives no weights, which only "eager" has')
    if dropout:
        raise NotImplementedError(f"nsa has no attention dropout, got dropout={dropout}")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"nsa does not take {name}, got {kwargs[name]!r}")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"nsa takes a padding mask [B, N], got attention_mask {list(attention_mask.shape)}"
        )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, phi_k: Callable, phi_v: Callable,
    pack: Pack | None, how: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """NSA of the last S of N positions, all branches on the same keys and values.

    Returns the output [B, S, HQ, D], 0 for padding, and compressed keys and values [B, Nc, G, D],
    or those of a pack [N_total, G, D].
    """
    B, S, N = *q.shape[:2], k.shape[1]
    if pack is None:
        k_cmp, v_cmp = phi_k(k).to(q.dtype), phi_v(v).to(q.dtype)
        out = nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, q_start=N - S, **how)
        return out, k_cmp, v_cmp
    if S == N:
        return _attend_packed(q, k, v, gates, phi_k, phi_v, pack, how)
    rows = pack.rows(B)
    if rows is None:
        raise NotImplementedError(
            "nsa takes several sequences in a row with an empty cache only, got "
            f"{N - S} tokens in it"
        )
    # Behind the tokens of a cache queries stand at positions of their own, which a pack has not.
    out, compressed = torch.zeros_like(q), []
    for b, (first, end) in enumerate(rows):
        low = max(first, N - S)  # the first real query's position
        at = slice(low - (N - S), max(low, end) - (N - S))
        mine = (q[b : b + 1, at], k[b : b + 1, first:end], v[b : b + 1, first:end])
        part, *made = _attend(*mine, gates[b : b + 1, at], phi_k, phi_v, None, how)
        out[b : b + 1, at] = part
        compressed.append(made)
    k_cmp, v_cmp = (torch.cat([x[0] for x in made]) for made in zip(*compressed, strict=True))
    return out, k_cmp, v_cmp


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, phi_k: Callable, phi_v: Callable, pack: Pack,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """_attend() of whole sequences in one call."""
    flat = [x.flatten(0, 1) for x in (q, k, v, gates)]
    if pack.tokens is not None:
        flat = [x[pack.tokens] for x in flat]
    q_, k_, v_, gates_ = flat
    cu = pack.cu_seqlens
    k_cmp, v_cmp = phi_k(k_, cu_seqlens=cu).to(q.dtype), phi_v(v_, cu_seqlens=cu).to(q.dtype)
    if not len(q_):
        return torch.zeros_like(q), k_cmp, v_cmp
    out = nsa_attention(
        q_, k_cmp, v_cmp, k_, v_, k_, v_, gates_, cu_seqlens=cu, max_seqlen=pack.max_seqlen, **how
    )
    if pack.tokens is not None:
        out = torch.zeros_like(q).flatten(0, 1).index_copy(0, pack.tokens, out)
    return out.unflatten(0, q.shape[:2]), k_cmp, v_cmp


register()
