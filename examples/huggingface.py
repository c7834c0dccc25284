"""Turn a dense Transformers model into one with NSA, and train on beside the dense one.

    python examples/huggingface.py

A small LLaMA learns to repeat what it saw 40 tokens before. Two models go on from its weights: a
dense one, and one with NSA, which has compression and gates to learn (`add_nsa_parameters`). Their
losses are printed side by side; the NSA model is saved, loaded, and generates from its cache. Needs
`transformers`. On a CPU it takes some ten seconds.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from nsa.integrations.transformers import add_nsa_parameters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PERIOD, LENGTH, VOCAB = 40, 120, 16
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None,
)  # fmt: skip
NSA = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "window": 16}


def batch(size: int = 8) -> Tensor:
    """Random words, repeated: after the first period everything can be known."""
    return torch.randint(VOCAB, (size, PERIOD), device=DEVICE).repeat(1, LENGTH // PERIOD)


def train(models: dict[str, LlamaForCausalLM], steps: int) -> dict[str, list[float]]:
    """Train all models on the same batches; returns their losses."""
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=2e-3) for n, m in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(steps):
        ids = batch()
        labels = ids.clone()
        labels[:, :PERIOD] = -100
        for name, model in models.items():
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = model(ids, labels=labels).loss
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name].append(loss.item())
    return losses


def main(dense_steps: int = 150, steps: int = 80) -> dict[str, list[float]]:
    """Returns the losses of both models after the change."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**SIZES)).to(DEVICE)
    before = train({"dense": dense}, dense_steps)["dense"]
    print(f"dense: loss {before[0]:.3f} -> {before[-1]:.3f}")

    sparse = LlamaForCausalLM._from_config(LlamaConfig(**SIZES, nsa=NSA), attn_implementation="nsa")
    sparse.load_state_dict(dense.state_dict())
    add_nsa_parameters(sparse)  # before the optimizer is made
    sparse.to(DEVICE)
    losses = train({"nsa": sparse, "dense": dense}, steps)
    for name, values in losses.items():
        print(f"{name}, from the same weights: loss {values[0]:.3f} -> {values[-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        sparse.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()
    ids = batch(1)
    out = again.generate(ids[:, : 2 * PERIOD], max_new_tokens=PERIOD, do_sample=False)
    right = (out[:, 2 * PERIOD :] == ids[:, 2 * PERIOD :]).float().mean().item()
    print(f"generated from the cache: {right:.0%} of the words right")
    assert right > 0.5, right
    return losses


if __name__ == "__main__":
    main()
