"""Do the laws of the paper's semantics hold on every PyTorch route, against the fp64 oracle?"""

import functools

import pytest
import torch

import nsa
from nsa import oracle, reference
from nsa.attention import gated_sum
from nsa.compress import MLPCompression, mean_pool
from nsa.rotary import rotary
from nsa.tests.cases import ends_of
from nsa.tests.helpers import make_layer, make_qkv, randn
from nsa.tests.oracle_numbers import NAMES

SIZES = dict(l=8, d=4, l_sel=8, n_sel=3, window=12)
D = torch.float64


def layer_inputs(S, *, HQ=4, G=2, Dk=8, Dv=6, dtype=D, **how):
    """q, three raw key/value pairs and gates of one layer: [B, S, ...]."""
    return dict(zip(NAMES, make_layer(S, HQ, G, Dk, Dv, n_cmp=S, dtype=dtype, **how), strict=True))


def run(x, backend, cu=None, **change):
    sizes = {**SIZES, **change}
    pool = {n: mean_pool(x[n], sizes["l"], sizes["d"], cu) for n in ("k_cmp", "v_cmp")}
    return nsa.nsa_attention(**{**x, **pool}, **sizes, cu_seqlens=cu, backend=backend)


def run_oracle(x, **change):
    sizes = {**SIZES, **change}
    pool = {n: oracle.compress_mean(x[n], sizes["l"], sizes["d"]) for n in ("k_cmp", "v_cmp")}
    return oracle.nsa_attention(**{**x, **pool}, **sizes)


def same(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, atol=tol, rtol=0)


# The oracle is causal, so that of a prefix all that is said of the whole is said as well.
@pytest.mark.parametrize("S", [*range(1, 20), 29, 45])
def test_layer_matches_the_oracle(S, backend):
    x = layer_inputs(S, B=2 if S < 20 else 1, seed=S)
    same(run(x, backend), run_oracle(x))


@pytest.mark.parametrize("change", [
    dict(l=4, d=4, l_sel=4, n_sel=3), dict(l=16, d=4, l_sel=8, n_sel=3), dict(n_sel=16),
    dict(window=1), dict(window=1000), dict(n_init=0, n_local=1, n_sel=1), dict(softmax_scale=0.3),
    dict(n_init=2, n_local=3, n_sel=5, l_sel=4), dict(HQ=1, G=1, Dk=2, Dv=3), dict(HQ=6, Dk=12),
    dict(HQ=3, G=3, Dv=8), dict(q_start=32), dict(q_start=32, n_sel=16, window=64),
    dict(l=1, d=1, l_sel=4),
], ids=str)  # fmt: skip
def test_sizes_match_the_oracle(change, backend):
    """And queries behind keys: one at the end, of which is_causal=True would see key 0 alone."""
    heads = {name: change[name] for name in ("HQ", "G", "Dk", "Dv") if name in change}
    x = layer_inputs(33, seed=3, **heads)
    for name in ("q", "gates"):
        x[name] = x[name][:, change.get("q_start", 0) :]
    change = {} if heads else change
    same(run(x, backend, **change), run_oracle(x, **change))


@pytest.mark.parametrize("S", [9, 24, 37, 53])
def test_no_token_changes_an_earlier_output(S, backend):
    """Edit everything after t, for every t at and around block edges: outputs up to t stay put."""
    x = layer_inputs(S, seed=S)
    y = run(x, backend)
    edges = {0, 1, 6, 7, 8, 11, 12, 15, 16, 23, 24, 31, 36, S // 2, S - 2}
    for t in sorted(e for e in edges if e < S - 1):
        other = {name: 7 * randn(*v.shape, seed=t, dtype=D) for name, v in x.items()}
        edited = {n: torch.cat([v[:, : t + 1], other[n][:, t + 1 :]], 1) for n, v in x.items()}
        moved = (run(edited, backend) - y).abs().amax((0, 2, 3))
        # Chunks may add the same numbers in another order.
        assert moved[: t + 1].max() < 1e-13, f"token after {t} moved {moved.nonzero().tolist()}"
        assert moved[t + 1 :].min() > 1e-9  # the probe can see


def test_branches_that_cover_everything_equal_full_attention(backend):
    x = layer_inputs(35, seed=6)
    for i, name in ((1, "sel"), (2, "win")):
        full = oracle.causal_attention(x["q"], x[f"k_{name}"], x[f"v_{name}"])
        gates = torch.zeros_like(x["gates"])
        gates[..., i] = 1.0
        same(run({**x, "gates": gates}, backend, n_sel=5, window=35), full)


def test_packed_equals_each_sequence_alone(backend):
    lengths = [13, 1, 0, 29, 8]
    x = {name: v[0] for name, v in layer_inputs(51, seed=8).items()}
    parts = zip(*(v.split(lengths) for v in x.values()), strict=True)
    alone = [run({n: t[None] for n, t in zip(x, part, strict=True)}, backend)[0] for part in parts]
    same(run(x, backend, cu=ends_of(lengths)), torch.cat(alone))


def test_groups_are_independent(backend):
    x = layer_inputs(37, seed=10)
    y = run(x, backend)
    other = {n: x[n].clone() for n in NAMES}
    other["q"][:, :, 2:] *= -3
    for name in NAMES[1:-1]:
        other[name][:, :, 1] += 2
    z = run(other, backend)
    assert torch.equal(z[:, :, :2], y[:, :, :2]) and (z - y)[:, :, 2:].abs().max() > 0.1
    swapped = {n: t.flip(2) if t.shape[2] == 2 else t[:, :, [2, 3, 0, 1]] for n, t in x.items()}
    same(run(swapped, backend), y[:, :, [2, 3, 0, 1]])


def test_scores_depend_on_relative_position_only(backend):
    """Rotate from position 0 or 1000: full-cover selection and the window give the same result."""
    q, k, v = make_qkv(1, 21, 4, 2, 8, 6, dtype=D, seed=11)
    blocks = torch.arange(3, dtype=torch.int32).expand(1, 21, 2, 3)

    def both(q, k):
        sel = nsa.selection_attention(q, k, v, blocks, block_size=8, backend=backend)
        return torch.stack([nsa.sliding_attention(q, k, v, window=9, backend=backend), sel])

    turned = []
    for start in (0, 1000):
        at = torch.arange(start, start + 21)
        r_q, r_k = rotary(q, at, 10000.0), rotary(k, at, 10000.0)
        same(r_q, oracle.rotary(q, 10000.0, start))
        turned.append(both(r_q, r_k))
    same(*turned, 1e-10)
    assert ((both(q, k) - turned[0]).abs().amax((1, 2, 3, 4)) > 1e-3).all()


def test_chunks_of_the_reference_change_nothing(monkeypatch):
    """Small ones go through activation checkpointing; the default runs in one piece."""
    x, found = {name: t.requires_grad_() for name, t in layer_inputs(45, seed=3).items()}, []
    for chunk in (1 << 23, 4 * 45 * 7):  # of compressed keys: 31 queries
        monkeypatch.setattr(reference, "_CHUNK_SCORES", chunk)
        out = run(x, "reference")
        found.append([out, *torch.autograd.grad(out.square().sum(), list(x.values()))])
    same(*found)


def test_lse_has_no_gradient(backend):
    q, k, v = make_qkv(1, 20, 4, 2, 8, 6, Skv=4, requires_grad=True)
    out, lse = nsa.compressed_attention(q, k, v, l=8, d=4, backend=backend)
    assert out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_are_summed_in_fp32(dtype):
    """One rounding, at the end."""
    x = [randn(1, 9, 4, 6, seed=i, dtype=dtype) for i in range(3)]
    gates = randn(1, 9, 4, 3, seed=4, dtype=dtype).sigmoid()
    wide = sum(gates[..., i : i + 1].double() * x[i].double() for i in range(3))
    got = gated_sum(gates, *x)
    assert got.dtype == dtype and torch.equal(got, wide.float().to(dtype))


@pytest.mark.parametrize("learnt", [False, True])
def test_one_k_and_v_for_all_branches(learnt):
    q, k, v = make_qkv(1, 50, 4, 2, 16, 8)
    gates = randn(1, 50, 4, 3, seed=4).sigmoid()
    torch.manual_seed(0)
    phis = [MLPCompression(n, 8, 4) for n in (16, 8)] if learnt else []
    phi_k, phi_v = phis or [functools.partial(mean_pool, l=8, d=4)] * 2
    want = nsa.nsa_attention(q, phi_k(k), phi_v(v), k, v, k, v, gates, **SIZES)
    run = lambda q, k, v, gates, **how: nsa.nsa_attention_shared_kv(
        q, k, v, gates, *phis, **SIZES, **how
    )
    assert torch.equal(run(q, k, v, gates), want)
    torch.testing.assert_close(run(q[:, 40:], k, v, gates[:, 40:]), want[:, 40:])
    packed = run(q[0], k[0], v[0], gates[0], cu_seqlens=ends_of([20, 30]), max_seqlen=30)
    alone = run(*(x[:, 20:] for x in (q, k, v, gates)))
    torch.testing.assert_close(packed[20:], alone[0])
    with pytest.raises(ValueError, match="k must hold a key for each of q's 50 tokens, got 40"):
        run(q, k[:, :40], v[:, :40], gates)
