"""bench_peers against a peer made of plain PyTorch: what it may claim, and what it must not."""

import importlib
import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import bench_peers, peer_selection, peer_sfnsa
from bench.bench_peers import Match, Rival
from bench.peer_sfnsa import Sfnsa
from bench.prefill_inputs import Prefill
from bench.roofline import Shape
from bench.timing import NotRight, prove
from nsa import reference

# Attention over blocks by the reference, without or with the keys behind a query.
SELECT = """
    import torch
    from nsa import reference, select

    BEHIND = False


    def attend(q, k, v, blocks, size, scale):
        S = q.shape[0]
        end = torch.full((S,), S) if BEHIND else torch.arange(1, S + 1)
        end = end.to(q.device)[:, None, None]
        start = torch.where(blocks < 0, end, torch.minimum(blocks * size, end))
        ranges = torch.stack([start, torch.minimum(start + size, end)], -1)
        return reference.selection_attention(q[None], k[None], v[None], ranges[None],
                                             softmax_scale=scale)[0]

"""
# These stand in for two peers: vLLM's kernels for MiniMax-M3 attend over a paged cache, and cuDNN's
# frontend attends to whole blocks, with the keys behind a query.
OTHERS = """
    SPARSE_BLOCK_SIZE = 128


    def minimax_m3_sparse_attn(q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens,
                               prefix_lens, max_query_len, num_kv_heads, sm_scale, output):
        assert kv_cache.shape[2] == SPARSE_BLOCK_SIZE and int(prefix_lens) == 0
        pages = kv_cache[block_table[0]].transpose(1, 2).flatten(0, 1)[: int(seq_lens)]
        k, v = pages.chunk(2, -1)
        output.copy_(attend(q, k, v, topk_idx.transpose(0, 1), SPARSE_BLOCK_SIZE, sm_scale))


    class NSA:
        @staticmethod
        def selection_attention_wrapper(q, k, v, blocks, counts, cum_seqlen_q_tensor,
                                        cum_seqlen_k_tensor, max_s_q, max_s_k, block_size,
                                        scale_softmax):
            place = torch.arange(blocks.shape[-1], device=q.device)
            blocks = blocks.masked_fill(place >= counts[..., None], -1)
            return {"o_tensor": attend(q, k, v, blocks, block_size, scale_softmax)}
"""
SHAPE = Shape(70, HQ=2, G=1, D=16, Dv=16, l=8, d=4, l_sel=16, n_sel=4, w=20)
# The peer's functions and conventions, in fp32 by the reference.
PEER = """
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
        return attend(q, k, v, topk.transpose(0, 1), NSAHelper.sizes["block_size"], sm_scale)
"""
COMBINE = """
    def fused_sigmoid_combine(a, b, c, w):
        gates = w.float().sigmoid()
        total = sum(gates[..., i, None] * x.float() for i, x in enumerate((a, b, c)))
        return total.to(a.dtype)
"""


@pytest.fixture
def write(tmp_path):
    """Puts source under the name of a module into tmp_path; nothing of it stays imported."""

    def module(name, source):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(SELECT + source))
        importlib.invalidate_caches()

    yield module
    peers = {"flash_nsa", *peer_selection.PEERS}
    for name in [n for n in sys.modules if n.split(".")[0] in peers]:
        del sys.modules[name]


@pytest.fixture
def checkout(tmp_path, write):
    """A folder as the peer's checkout."""
    write("flash_nsa.ops.__init__", "")
    write("flash_nsa.ops.combine", COMBINE)
    write("flash_nsa.__init__", PEER)
    return tmp_path


def match_of(folder, direction, device, window=reference.sliding_attention, shape=SHAPE):
    make = partial(Prefill, shape, device, torch.float16, 2)
    rival = Rival("sfnsa", make=partial(Sfnsa, peer_sfnsa.load(folder), window=window))
    return Match(rival, direction, {"against": "sfnsa"}, make)


@pytest.fixture
def installed(tmp_path, write, monkeypatch):
    """Puts a peer's module, that looks behind a query or not, where imports find it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    named = lambda name: peer_selection.PEERS[name][1]
    return lambda name, behind: write(named(name), f"    BEHIND = {behind}\n{OTHERS}")


def selection_of(name, device, shape=SHAPE, sharing="random"):
    args = bench_peers.parse(["--selection", name, "--no_dense"])
    (rival,) = bench_peers.rivals_of(args)
    make = partial(Prefill, shape, device, torch.float16, 2, sharing)
    return Match(rival, "fwd", {"against": name}, make)


def assert_not_right(case):
    with pytest.raises(NotRight, match="(mae|max_abs) .* > "):
        prove(case, case.baselines[0], 5, "here")


@pytest.mark.kernel
@pytest.mark.parametrize(("name", "behind"), [("vllm", False), ("cudnn", True)])
def test_selection_of_another_is_held_against_what_it_says_to_compute(
    name, behind, installed, kernel_device
):
    """cuDNN's reads the own block whole, vLLM's to the query; either one is wrong as the other."""
    installed(name, behind)
    match = selection_of(name, kernel_device, sharing="shared")
    case = match.case()
    assert case.name.startswith("peers/sel/fwd/S=70/") and case.name.endswith("/shared")
    for contender in (case.candidate, *case.baselines):
        assert prove(case, contender, 1, "here")[0].status == "PASS"
    assert case.facts()["distinct_of_4"] > 1 and match.peer.choice() is None
    del sys.modules[peer_selection.PEERS[name][1]]
    installed(name, not behind)
    assert_not_right(selection_of(name, kernel_device).case())


@pytest.mark.kernel
@pytest.mark.parametrize("name", peer_selection.PEERS)
def test_selection_of_another_gets_the_blocks_of_every_refill(
    name, installed, kernel_device, monkeypatch
):
    """By those of earlier inputs it is wrong."""
    installed(name, name == "cudnn")
    case = selection_of(name, kernel_device, replace(SHAPE, S=170)).case()
    monkeypatch.setattr(peer_selection.PEERS[name][0], "refill", lambda peer: None)
    assert_not_right(case)


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


def halved(q, k, v, *, window):
    """Half of the gradient of k."""
    half = k / 2 + k.detach() / 2
    return reference.sliding_attention(q, half, v, window=window)


@pytest.mark.kernel
def test_a_peer_with_a_wrong_output_may_not(checkout, kernel_device):
    assert_not_right(match_of(checkout, "fwd", kernel_device, late).case())


@pytest.mark.parametrize("window", [late, halved])
def test_nor_one_with_wrong_gradients(window, checkout):
    peer = Sfnsa(peer_sfnsa.load(checkout), Prefill(SHAPE, "cpu", torch.float16, 2), window)
    peer.x.refill(0)
    peer.refill()
    with pytest.raises(AssertionError, match="gradient . of full of sfnsa: .*(mae|max_abs) .* > "):
        bench_peers.peer_contender(peer, "fwd+bwd")


@pytest.mark.kernel
def test_a_peer_that_chooses_bad_blocks_is_told_by_its_choice(checkout, write, kernel_device):
    """Its output is right for these blocks: only the column tells."""
    worse = PEER.replace("k[None].float(), l=", "-k[None].float(), l=")
    assert worse != PEER
    write("flash_nsa.__init__", worse)
    # Two blocks to choose from may be as good as each other, whatever numbers a device draws.
    match = match_of(checkout, "fwd", kernel_device, shape=replace(SHAPE, S=300))
    case = match.case()
    assert prove(case, case.baselines[0], 1, "here")[0].status == "PASS"
    assert match.peer.choice() < 0.99


def test_a_peer_that_cannot_be_imported_is_said_so(checkout, write, monkeypatch, capsys):
    write("flash_nsa.__init__", "    import pkg_resources_of_old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    for argv, says in (
        (["--sfnsa", str(checkout)], "pkg_resources_of_old"),
        (["--selection", "cudnn"], "cudnn cannot be imported: ModuleNotFoundError: "),
    ):
        assert bench_peers.main(argv) == 3 and says in capsys.readouterr().err


def test_each_contender_is_asked_for_what_it_computes(monkeypatch):
    """Selection alone has no backward, and every row says which blocks it was timed on."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    args = bench_peers.parse("--S_list 64 --sharing random,shared".split())
    rivals = [Rival("vllm", "sel", commit="1.2"), Rival("dense")]
    found = list(bench_peers.cases(args, rivals, {}))
    assert [c.name for c in found] == [
        "peers/sel/fwd/S=64", "peers/full/fwd/S=64", "peers/sel/fwd/S=64/shared",
        "peers/full/fwd/S=64/shared", "peers/full/fwd+bwd/S=64", "peers/full/fwd+bwd/S=64/shared",
    ]  # fmt: skip
    assert [c.columns["sharing"] for c in found] == [None, None, "shared", "shared", None, "shared"]
    assert found[0].columns["peer_commit"] == "1.2"
    assert set(found[0].columns) | {"distinct_of_4"} <= set(bench_peers.COLUMNS)
