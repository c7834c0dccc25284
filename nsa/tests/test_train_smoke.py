"""Does a small NSA language model train: falling loss, live gradients, same seed same run?"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa import attention
from nsa.flags import Flags
from nsa.model import NSALanguageModel
from nsa.tests.helpers import TRITON
from scripts import train_showcase as ts
from scripts import training

pytestmark = pytest.mark.core

CPU = torch.device("cpu")
TINY = replace(ts.PRESETS["cpu"], steps=12, seq=96, batch=2, val_windows=2)


@pytest.fixture(scope="module")
def text():
    train, held_out = ts.load_corpus()
    return train[:20_000], held_out[:5_000]


@pytest.fixture(scope="module")
def run(text):
    return ts.train(TINY, *text, CPU, seed=3, log_every=4)


def test_train_smoke_loss_falls_and_held_out_loss_follows(run):
    losses = [row["loss"] for row in run.rows]
    assert [row["step"] for row in run.rows] == list(range(TINY.steps))
    assert all(math.isfinite(x) for x in losses + run.grad_norms)
    assert 5.0 < losses[0] < 6.5, "an untrained model must be near ln 256"
    assert losses[-1] < losses[0] - 1.0
    assert abs(run.rows[-1]["val_loss"] - losses[-1]) < 0.7


def gradients(model, batch):
    model.zero_grad()
    training.next_byte_loss(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_live(grads):
    for name, grad in grads.items():
        assert grad is not None, f"{name} got no gradient"
        assert torch.isfinite(grad).all(), f"{name} has a gradient that is not finite"
        assert grad.abs().max() > 0, f"{name} has a zero gradient"


def test_train_gradient_reaches_every_parameter(text):
    torch.manual_seed(0)
    model = NSALanguageModel(TINY.config, vocab_size=ts.VOCAB, n_layers=2)
    by_network(name for name, _ in model.named_parameters())  # as GPUs compare them
    assert_live(gradients(model, training.windows(text[0], torch.tensor([0, 700]), TINY.seq)))


def test_train_same_seed_gives_the_same_run(text):
    few = replace(TINY, steps=3, val_windows=1)
    runs = [ts.train(few, *text, CPU, seed=seed) for seed in (3, 3, 4)]
    losses = [[row["loss"] for row in run.rows] for run in runs]
    # Threads may add in another order, which is told from another seed by far.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert max(abs(a - b) for a, b in zip(losses[0], losses[2], strict=True)) > 1e-2


def test_train_gradients_are_clipped_to_norm_one(text, monkeypatch):
    norms, loss = [], training.next_byte_loss

    def watched(model, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr)
        grads = lambda: torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.register_step_pre_hook(lambda *_: norms.append(grads().norm().item()))
        return optimizer

    monkeypatch.setattr(training, "make_optimizer", watched)
    monkeypatch.setattr(training, "next_byte_loss", lambda *args: 100 * loss(*args))
    run = ts.train(replace(TINY, steps=1), *text, CPU, seed=3)
    assert run.grad_norms[0] > 10 and norms == [pytest.approx(1.0, rel=1e-3)]


def test_train_decays_matrices_alone():
    model = NSALanguageModel(TINY.config, ts.VOCAB, 1)
    groups = training.make_optimizer(model, 0.1).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [{p.ndim for p in g["params"]} for g in groups] == [{2}, {1}]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


# A leak in each branch and in the choice of blocks, as a kernel bug would make it.
LEAKS = {
    "sliding_attention": lambda f: lambda q, k, v, **kw: f(q, k.roll(-1, 1), v, **kw),
    "_selected": lambda f: lambda q, k, v, *rest, **kw: f(q, k, v.roll(-1, 1), *rest, **kw),
    "compressed_attention": lambda f: lambda q, k, v, **kw: f(q, k, v.roll(-1, 1), **kw),
    "select_blocks": lambda f: lambda q, k, lse, **kw: f(q.roll(-1, 1), k, None, **kw),
}


def test_trained_model_does_not_see_the_future(run, text):
    probe, selftest, flow = ts.probe_model(run.model, TINY, text[1], CPU)
    assert not probe.leaks and not probe.blind, probe
    assert selftest.leaks and not flow.leaks and not flow.blind


@pytest.mark.parametrize("name", LEAKS)
def test_trained_model_with_a_leaking_branch_is_caught(name, run, text, monkeypatch):
    monkeypatch.setattr(attention, name, LEAKS[name](getattr(attention, name)))
    assert ts.probe_model(run.model, TINY, text[1], CPU)[0].leaks


# ---- on a GPU ------------------------------------------------------------------------------------

SMALL = replace(ts.PRESETS["cuda"], layers=2, steps=30, seq=1024, batch=2, val_windows=4)


@pytest.fixture(scope="module")
def gpu_run():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return ts.train(SMALL, *ts.load_corpus(), torch.device("cuda"), seed=0, flags=TRITON)


@pytest.mark.long
def test_train_gpu_runs_the_triton_kernels_and_learns(gpu_run):
    losses = [row["loss"] for row in gpu_run.rows]
    assert all(math.isfinite(x) for x in losses + gpu_run.grad_norms)
    assert losses[-1] < losses[0] - 1.0
    taken = {name.split("/")[1] for name in gpu_run.routes}
    assert taken == {"triton"}, f"{gpu_run.routes} {gpu_run.fallbacks}"
    assert sum(gpu_run.launches.values()) >= sum(gpu_run.routes.values()), gpu_run.launches


def test_train_gpu_model_does_not_see_the_future(gpu_run, text, cuda):
    probe, selftest, _ = ts.probe_model(gpu_run.model, SMALL, text[1], cuda)
    assert not probe.leaks and not probe.blind, probe
    assert selftest.leaks


def by_network(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by what they are compared as: those of a compression or a gate are one."""
    networks: dict[str, list[str]] = {}
    for name in names:
        networks.setdefault(re.sub(r"\.(inner|outer|position)\b.*", "", name), []).append(name)
    assert len(networks) == 20 and "blocks.1.attention.phi_v" in networks
    return networks


@pytest.mark.long
def test_train_gpu_loss_and_gradients_agree_with_the_reference_route(text, cuda):
    batch = training.windows(text[0], torch.tensor([0, 700]), 512).to(cuda)
    seen = {}
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        model = NSALanguageModel(SMALL.config, ts.VOCAB, 2, backend=backend, flags=TRITON).to(cuda)
        grads = gradients(model, batch)
        assert_live(grads)
        with torch.no_grad():
            seen[backend] = (training.next_byte_loss(model, batch).item(), grads)
    (fast, fast_grads), (slow, slow_grads) = seen["triton"], seen["reference"]
    assert abs(fast - slow) < 0.01
    # A near tie may choose other blocks in bf16, so directions are compared, not elements; those of
    # a compression or gate network as one: what moves all compressed keys alike (its last bias)
    # changes no softmax, and its gradient is rounding noise.
    for network, names in by_network(fast_grads).items():
        a, b = (torch.cat([g[n].flatten() for n in names]) for g in (fast_grads, slow_grads))
        cosine = torch.cosine_similarity(a, b, dim=0)
        assert cosine > 0.98, f"{network}: cosine {cosine.item():.4f}"


def test_train_rate_warms_up_and_falls_to_a_tenth():
    rates = [training.learning_rate(step, 300, 2.0) for step in range(301)]
    assert rates[:20] == pytest.approx([2.0 * (n + 1) / 20 for n in range(20)])
    assert rates[20] == 2.0 and rates[300] == pytest.approx(0.2)
    assert rates[160] == pytest.approx(1.1) and rates[20:] == sorted(rates[20:], reverse=True)
    assert training.learning_rate(0, 5, 2.0) == 2.0


def small(preset):
    return torch.nn.Sequential(torch.nn.Embedding(ts.VOCAB, 4), torch.nn.Linear(4, ts.VOCAB))


def test_train_a_held_out_loss_ends_in_training_again():
    model = small(TINY).eval()
    modes = []
    model.register_forward_hook(lambda m, *_: modes.append(m.training))
    training.held_out_loss(model, [torch.zeros(1, 5, dtype=torch.long)])
    assert modes == [False] and model.training


def test_train_a_held_out_loss_is_of_all_windows_however_they_are_split(text):
    model, windows = small(TINY), training.held_out_windows(text[1], TINY, 0, 1).repeat(2, 1)
    windows[:3] = 0  # of another loss than the last one
    split = [training.held_out_loss(model, list(windows.split(n))) for n in (4, 3, 1)]
    assert split == pytest.approx(split[:1] * 3)


def test_train_windows_may_end_where_the_text_ends(text):
    """Of seq + 1 bytes there is one window, and a target for each of its inputs."""
    few = replace(TINY, steps=4, batch=8), text[0][: TINY.seq + 1], text[1]
    assert len(ts.train(*few, CPU, seed=0, make=small).rows) == 4


def test_train_ranks_share_the_batches_of_one_process(text, monkeypatch):
    """Each its own part of every batch and of what is held out; losses and rates are of all."""
    seen, loss = [], training.next_byte_loss

    def watched(model, batch):
        seen.append(batch[:, :8].clone())
        return loss(model, batch)

    mean = lambda x, mesh: x if mesh is None else torch.full_like(x, 7.0)
    monkeypatch.setattr(training, "next_byte_loss", watched)
    monkeypatch.setattr(training, "average", mean)
    preset = replace(TINY, steps=4, batch=4, val_windows=4)

    def batches(mesh):
        seen.clear()
        clock = SimpleNamespace(perf_counter=itertools.count().__next__)
        monkeypatch.setattr(training, "time", clock)  # a second between any two readings
        run = ts.train(preset, *text, CPU, seed=3, log_every=2, make=small, mesh=mesh)
        return run, torch.cat(seen[:4]), torch.cat(seen[4:])

    mesh = lambda rank: SimpleNamespace(get_local_rank=lambda: rank, size=lambda: 2)
    _, whole, held_out = batches(None)
    parts = [batches(mesh(rank)) for rank in range(2)]
    per_step = [part.unflatten(0, (4, 2)) for _, part, _ in parts]
    assert torch.equal(torch.cat(per_step, 1).flatten(0, 1), whole)
    every = torch.stack([part for *_, part in parts], 1).flatten(0, 1)
    assert torch.equal(every, held_out)
    rows = parts[1][0].rows
    assert [r["loss"] for r in rows] == [7.0] * 4 and rows[-1]["val_loss"] == 7.0
    assert [r["tokens_per_s"] for r in rows] == [None, 4 * 96, 2 * 4 * 96, 2 * 4 * 96]


def test_train_flags_of_the_environment_stay(monkeypatch):
    monkeypatch.setenv("NSA_USE_TRITON_SEL", "0")
    for free in ("NSA_SEL_TRITON_ALLOW_GRAD", "NSA_SEL_TRITON_MIN_L"):
        monkeypatch.delenv(free, raising=False)
    monkeypatch.setattr(training.dispatch, "resolve_flags", lambda *_: Flags.from_env())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: None)
        flags = training.training_flags(torch.device("cuda"))
    assert not flags.use_triton_sel and flags.sel_triton_allow_grad and flags.sel_triton_min_L == 1
