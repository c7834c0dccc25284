"""bench_peers against a peer made of plain PyTorch: what it may claim, and what it must not."""

from __future__ import annotations

import importlib
import sys
import textwrap
from functools import partial

import pytest
import torch

from bench import bench_peers, peer_sfnsa
from bench.peer_sfnsa import Sfnsa
from bench.prefill_inputs import Prefill
from bench.roofline import Shape
from bench.timing import NotRight, prove
from nsa import reference

SHAPE = Shape(70, HQ=2, G=1, D=16, Dv=16, l=8, d=4, l_sel=16, n_sel=4, w=20)
# The peer's functions and conventions, in fp32 by the reference.
PEER = """
    import torch
    from nsa import reference, select


    class NSAHelper:
        @classmethod
        def set_hyperparameters(cls, **sizes):
            cls.sizes = sizes

        @classmethod
        def init_cu_seqlens(cls, cu_seqlens):
            cls.tokens = int(cu_seqlens[-1])


    def compress_attn(q, k, v, sm_scale):
        h = NSAHelper.sizes
        out, lse = reference.compressed_attention(
            q[None], k[None], v[None], l=h["kernel_size"], d=h["stride"], softmax_scale=sm_scale
        )
        return out[0], lse[0]


    @torch.no_grad()
    def slc_topk_indices(q, k, lse, sm_scale, maybe_efficient_version, scale_slc_p):
        h = NSAHelper.sizes
        n_blocks = -(-NSAHelper.tokens // h["block_size"])
        blocks = select.select_blocks(
            q[None].float(), k[None].float(), l=h["kernel_size"], d=h["stride"],
            l_sel=h["block_size"], n_sel=h["top_n"], n_init=h["num_init_blocks"],
            n_local=h["num_local_blocks"],
        )[0]
        return blocks.masked_fill(blocks < 0, n_blocks).transpose(0, 1).int(), None


    def select_attn(q, k, v, topk, sm_scale):
        size, n = NSAHelper.sizes["block_size"], NSAHelper.tokens
        start = topk.transpose(0, 1)[None] * size
        last = torch.arange(1, n + 1, device=topk.device)[None, :, None, None]
        end = torch.minimum(start + size, last)
        ranges = torch.stack([start.clamp(max=n), end.clamp(max=n)], -1)
        return reference.selection_attention(
            q[None], k[None], v[None], ranges, softmax_scale=sm_scale
        )[0]
"""
COMBINE = """
    def fused_sigmoid_combine(a, b, c, w):
        gates = w.float().sigmoid()
        total = sum(gates[..., i, None] * x.float() for i, x in enumerate((a, b, c)))
        return total.to(a.dtype)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder as the peer's checkout; nothing of it stays imported."""
    folder = tmp_path / "peer"
    (folder / "flash_nsa" / "ops").mkdir(parents=True)
    (folder / "flash_nsa" / "ops" / "__init__.py").touch()
    (folder / "flash_nsa" / "ops" / "combine.py").write_text(textwrap.dedent(COMBINE))
    (folder / "flash_nsa" / "__init__.py").write_text(textwrap.dedent(PEER))
    importlib.invalidate_caches()
    yield folder
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_nsa"]:
        del sys.modules[name]


def match_of(folder, direction, device, window=reference.sliding_attention):
    make = partial(Prefill, device=device, dtype=torch.float16, samples=2)
    return bench_peers.Match(
        SHAPE, direction, {"against": "sfnsa"}, peer_sfnsa.load(folder), make, window
    )


@pytest.mark.kernel
@pytest.mark.parametrize("direction", bench_peers.DIRECTIONS)
def test_a_peer_that_is_right_may_be_timed_beside_nsa(direction, checkout, kernel_device):
    match = match_of(checkout, direction, kernel_device)
    case = match.case()
    for contender in (case.candidate, *case.baselines):
        parity, _ = prove(case, contender, 1, "here")
        assert parity.status == "PASS" and parity.path_taken == contender.path
    assert [c.name for c in case.baselines] == ["sfnsa"]
    assert case.columns == {"against": "sfnsa", "compared": match.peer.x.compared}
    assert match.peer.choice() > 0.99


def late(q, k, v, *, window):
    """One key less than the window has."""
    return reference.sliding_attention(q, k, v, window=window - 1)


class _Halved(torch.autograd.Function):
    """What it gets, with half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def halved(q, k, v, *, window):
    return reference.sliding_attention(q, _Halved.apply(k), v, window=window)


@pytest.mark.kernel
def test_a_peer_with_a_wrong_output_may_not(checkout, kernel_device):
    case = match_of(checkout, "fwd", kernel_device, late).case()
    with pytest.raises(NotRight, match="(mae|max_abs) .* > "):
        prove(case, case.baselines[0], 1, "here")


@pytest.mark.parametrize("window", [late, halved])
def test_a_peer_with_wrong_gradients_may_not(window, checkout):
    peer = Sfnsa(peer_sfnsa.load(checkout), Prefill(SHAPE, "cpu", torch.float16, 2), window)
    peer.x.refill(0)
    peer.refill()
    with pytest.raises(AssertionError, match="gradient . of full of sfnsa: .*(mae|max_abs) .* > "):
        bench_peers.peer_contender(peer, "fwd+bwd")


@pytest.mark.kernel
def test_a_peer_that_chooses_bad_blocks_is_told_by_its_choice(checkout, kernel_device):
    """Its output is right for these blocks: only the column tells."""
    source = (checkout / "flash_nsa" / "__init__.py").read_text()
    worse = source.replace("k[None].float(), l=", "-k[None].float(), l=")
    assert worse != source
    (checkout / "flash_nsa" / "__init__.py").write_text(worse)
    match = match_of(checkout, "fwd", kernel_device)
    case = match.case()
    assert prove(case, case.baselines[0], 1, "here")[0].status == "PASS"
    assert match.peer.choice() < 0.99


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--sfnsa", "/nowhere"], "--sfnsa must be a folder with flash_nsa/, got /nowhere"),
        (["--no_dense"], "--sfnsa must name a checkout"),
        (["--directions", "bwd"], "--directions: must be from fwd, fwd+bwd, each once, got bwd"),
        (["--G", "5"], "--G must divide --HQ, got 5 and 64"),
    ],
)
def test_bad_arguments_are_usage_errors(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_peers.parse(argv)
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_a_peer_that_cannot_be_imported_is_said_so(checkout, monkeypatch, capsys):
    (checkout / "flash_nsa" / "__init__.py").write_text("import pkg_resources_of_old\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench_peers.main(["--sfnsa", str(checkout)]) == 3
    assert "pkg_resources_of_old" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_peers.main([]) == 3
    assert "nothing was timed" in capsys.readouterr().err
