"""NSA as an attention implementation of Hugging Face Transformers, by the name "nsa".

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from nsa.integrations.transformers import add_nsa_parameters, load_pretrained, register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ...     nsa={"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "window": 512},
    ... )
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="nsa")
    >>> parts = add_nsa_parameters(model)  # learnable compression and gates; before the optimizer

A model with these parameters is saved by save_pretrained and loaded by load_pretrained:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     again = load_pretrained(LlamaForCausalLM, folder)

Any decoder model whose attention goes through AttentionInterface will do (LLaMA, Qwen, ...). The
model has one key and one value projection per layer, so the three branches share them; the paper
gives each its own (section 3.3.3). Without add_nsa_parameters compression is mean pooling and every
gate is 1/3: nothing is learnt for NSA, and no weight is added. A model that was trained dense needs
training before it is of use.

generate() works with the default (dynamic) cache, which keeps keys and values: every step
compresses all of them again. Decode with nsa.NSALanguageModel and its cache where speed counts.
Padding on either side is cut away and sequences then run one by one. Packed sequences are refused
where Transformers tells them apart (without a cache). Checked with Transformers 5.23.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from nsa.attention import nsa_attention
from nsa.checks import autocast_on
from nsa.compress import make_compression, mean_pool
from nsa.module import GateMLP

NAME = "nsa"
SIZES = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "n_init": 1, "n_local": 2, "window": 512}


def register() -> None:
    """Make attn_implementation="nsa" known to Transformers."""
    AttentionInterface.register(NAME, nsa_attention_forward)
    AttentionMaskInterface.register(NAME, nsa_mask)


def settings(config: Any) -> dict[str, Any]:
    """The sizes, and backend and phi if given, of a model's config.nsa over SIZES.

    phi is what add_nsa_parameters notes. Raises ValueError for any other name.
    """
    given = dict(getattr(config, "nsa", None) or {})
    unknown = set(given) - set(SIZES) - {"backend", "phi"}
    if unknown:
        allowed = ", ".join([*SIZES, "backend"])
        raise ValueError(f"config.nsa must hold some of {allowed}, got {sorted(unknown)[0]!r}")
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

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gates = None
        if layer.config._attn_implementation == NAME:  # another function would not take them
            self.gates = self.gate(args[0] if args else kwargs["hidden_states"])

    def __getstate__(self) -> dict[str, Any]:
        """Without the gates that a forward pass left that failed: they cannot be copied."""
        return {**super().__getstate__(), "gates": None}


def add_nsa_parameters(model: PreTrainedModel, phi: str = "mlp") -> list[NSAParameters]:
    """Give every attention layer of `model` learnable compression and gates, as layer.nsa.

    They are part of the model's parameters and state dict (`...self_attn.nsa.*`), and the config
    notes phi: load_pretrained loads what save_pretrained wrote. For load_state_dict call this on
    the new model first. phi: "mlp" or "mean". Raises ValueError for a model without an attention
    layer of the LLaMA kind, or one that has them already.
    """
    layers = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    if not layers:
        raise ValueError(
            f"model must have attention layers with q_proj and k_proj, got {type(model).__name__}"
        )
    added = []
    for layer in layers:
        if hasattr(layer, "nsa"):
            raise ValueError("model must not have NSA parameters yet, it has")
        sizes = settings(layer.config)
        width = layer.head_dim
        heads = layer.q_proj.out_features // width
        part = NSAParameters(
            layer.q_proj.in_features, heads, width, width, sizes["l"], sizes["d"], phi
        )
        layer.nsa = part.to(layer.q_proj.weight)
        layer.register_forward_pre_hook(part.before, with_kwargs=True)
        added.append(part)
    for layer in layers:
        layer.config.nsa = {**(getattr(layer.config, "nsa", None) or {}), "phi": phi}
    return added


def load_pretrained(
    model_class: type[PreTrainedModel], path: str | os.PathLike[str], **kwargs: Any
) -> PreTrainedModel:
    """model_class.from_pretrained(path, attn_implementation="nsa", **kwargs) with NSA parameters.

    model_class is the model's own (LlamaForCausalLM, not AutoModelForCausalLM), which by itself
    knows no such parameters and would drop them. Registers the name. Raises ValueError for a model
    that was saved without them: from_pretrained loads it, and add_nsa_parameters adds new ones.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise TypeError(
            "model_class must be the model's own class, such as LlamaForCausalLM, got "
            f"{getattr(model_class, '__name__', model_class)}"
        )
    for name in ("attn_implementation", "output_loading_info"):
        if name in kwargs:
            raise TypeError(f"{name} must not be given: load_pretrained sets it itself")
    register()
    missing = ValueError(
        f"path must hold a model saved with NSA parameters, got {path} without: load it by "
        "from_pretrained, then call add_nsa_parameters"
    )

    def init(self: PreTrainedModel, config: Any, *args: Any, **more: Any) -> None:
        model_class.__init__(self, config, *args, **more)
        phi = (getattr(config.get_text_config(), "nsa", None) or {}).get("phi")
        if phi is None:
            raise missing
        add_nsa_parameters(self, phi)

    same = {"__init__": init, "__module__": model_class.__module__}
    with_nsa = type(model_class.__name__, (model_class,), same)
    model, info = with_nsa.from_pretrained(
        path, attn_implementation=NAME, **kwargs, output_loading_info=True
    )
    if any(".nsa." in key for key in info["missing_keys"]):
        raise missing
    model.__class__ = model_class
    return model


def nsa_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The padding mask [B, kv_length] if any token is padding, else None: NSA is causal itself."""
    if mask_function is not causal_mask_function:
        raise NotImplementedError(
            "nsa takes plain causal attention only: no sliding or chunked layers, no sequences "
            "packed by position_ids, no bidirectional attention"
        )
    if kv_offset or int(q_offset) + q_length != kv_length:
        raise NotImplementedError(
            f"nsa takes a dynamic cache only: got {kv_length} keys for {q_length} queries at "
            f"{int(q_offset)}"
        )
    if attention_mask is None or bool(attention_mask[:, -kv_length:].all()):
        return None
    return attention_mask[:, -kv_length:]


def nsa_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: query [B, HQ, S, D], key and value [B, G, N, D] -> [B, S, HQ, D].

    The queries are the last S of the N positions. Raises NotImplementedError for what NSA lacks:
    dropout, sliding windows of the model's own, soft caps, attention sinks, 4-D masks. Under
    autocast everything is cast to its dtype, as torch's SDPA does.
    """
    if dropout:
        raise NotImplementedError(f"nsa has no attention dropout, got dropout={dropout}")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"nsa does not take {name}, got {kwargs[name]!r}")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"nsa takes a padding mask [B, N], got attention_mask {list(attention_mask.shape)}"
        )
    how = settings(module.config)
    how["softmax_scale"] = scaling
    learnt: NSAParameters | None = getattr(module, "nsa", None)
    if how.pop("phi", None) is not None and learnt is None:
        raise ValueError(
            "model must have the NSA parameters that its config.nsa['phi'] speaks of, got none: "
            "load it by nsa.integrations.transformers.load_pretrained"
        )
    # Under autocast the model turns queries and keys in fp32, but not values.
    dtype = _attention_dtype(query)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    if learnt is None:
        gates = q.new_full((*q.shape[:-1], 3), 1 / 3)
    else:
        gates, learnt.gates = learnt.gates.to(dtype), None
    if attention_mask is None:
        return _attend(q, k, v, gates, learnt, how), None
    S, N = q.shape[1], k.shape[1]
    # Padding rows give 0; tokens of one sequence must be neighbours.
    out = []
    for b, real in enumerate(attention_mask.bool()):
        at = real.nonzero().flatten()
        if not len(at):
            out.append(q[b : b + 1] * 0)
            continue
        first, end = int(at[0]), int(at[-1]) + 1
        if end - first != len(at):
            raise NotImplementedError(
                f"nsa takes padding before or after a sequence, got it inside sequence {b}"
            )
        low = max(first, N - S)  # the first real query's position
        rows = slice(low - (N - S), max(low, end) - (N - S))
        part = slice(first, end)
        mine = _attend(
            q[b : b + 1, rows], k[b : b + 1, part], v[b : b + 1, part], gates[b : b + 1, rows],
            learnt, how,
        )  # fmt: skip
        pad = (0, 0, 0, 0, rows.start, S - rows.stop)
        out.append(nn.functional.pad(mine, pad))
    return torch.cat(out), None


def _attention_dtype(q: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on and takes q, as torch's SDPA has it, else q's own."""
    if autocast_on(q.device) and q.dtype != torch.float64:
        return torch.get_autocast_dtype(q.device.type)
    return q.dtype


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, learnt: NSAParameters | None,
    how: dict[str, Any],
) -> Tensor:  # fmt: skip
    """NSA of the last S of N positions, all branches on the same keys and values."""
    if learnt is None:
        k_cmp, v_cmp = (mean_pool(x, how["l"], how["d"]) for x in (k, v))
    else:
        k_cmp, v_cmp = learnt.phi_k(k).to(q.dtype), learnt.phi_v(v).to(q.dtype)
    return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, q_start=k.shape[1] - q.shape[1], **how)
