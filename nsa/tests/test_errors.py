"""What a caller is told: errors name the cause where the obvious mistake is another one; names that
went before; one K and V for all branches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import pytest
import torch

import nsa
from nsa.compress import MLPCompression, mean_pool
from nsa.options import Parser
from nsa.tests.helpers import randn

SIZES = dict(dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=16, n_sel=3)
B, S, HQ, G, D = 2, 64, 4, 2, 16


def blocks(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, 2, dtype=torch.int32)


@pytest.mark.parametrize("indices", [(B, S, G), (B, G, S)])
def test_heads_before_tokens(indices):
    q, k = torch.randn(B, HQ, S, D), torch.randn(B, G, S, D)
    with pytest.raises(ValueError, match=r"look like \[B, H, S, D\]; give x.transpose\(1, 2\)"):
        nsa.selection_attention(q, k, k, blocks(*indices), block_size=16)
    with pytest.raises(ValueError, match=r"keys up to the last query at 3, got 2 keys: these look"):
        nsa.sliding_attention(q, k, k, window=8)


def test_fewer_keys_than_queries_are_no_such_mistake():
    q, k = torch.randn(B, S, HQ, D), torch.randn(B, S - 1, HQ, D)
    with pytest.raises(ValueError, match=r"got 63 keys$"):
        nsa.selection_attention(q, k, k, blocks(B, S, HQ), block_size=16)


def test_indices_of_another_order():
    q, k = torch.randn(B, S, HQ, D), torch.randn(B, S, G, D)
    with pytest.raises(ValueError, match=r"got \[2, 2, 64, 2\].*block_indices.transpose\(1, 2\)"):
        nsa.selection_attention(q, k, k, blocks(B, G, S), block_size=16)


def test_one_sequence_without_a_batch():
    q, k = torch.randn(S, HQ, D), torch.randn(S, G, D)
    with pytest.raises(ValueError, match=r"got shape \[64, 4, 16\]: one sequence is x\[None\]"):
        nsa.selection_attention(q, k, k, blocks(S, G), block_size=16)
    cu = torch.tensor([0, S], dtype=torch.int32)
    with pytest.raises(ValueError, match="with cu_seqlens sequences are packed, without a batch"):
        nsa.sliding_attention(q[None], k[None], k[None], cu_seqlens=cu)
    layer = nsa.NSAAttention(nsa.NSAConfig(**SIZES))
    with pytest.raises(ValueError, match=r"got \[64, 32\]: one sequence is x\[None\]"):
        layer(torch.randn(S, 32))
    model = nsa.NSALanguageModel(nsa.NSAConfig(**SIZES), vocab_size=20, n_layers=1)
    tokens = torch.arange(12)
    _, caches = model.prefill(tokens[None])
    for call in (model, model.prefill, functools.partial(model.step, caches=caches)):
        with pytest.raises(ValueError, match=r"\[B, S\] \(one sequence is tokens\[None\]\), got"):
            call(tokens)
    with pytest.raises(ValueError, match=r"tokens must be \[T\] with cu_seqlens, got \[1, 12\]"):
        model(tokens[None], torch.tensor([0, 12], dtype=torch.int32))


def test_rewinding_more_than_there_is():
    layer = nsa.NSAAttention(nsa.NSAConfig(**SIZES))
    cache = layer.make_cache(batch=1, max_len=64)
    layer.prefill(torch.randn(1, 5, 32), cache)
    with pytest.raises(ValueError, match="from 0 to 5, got 9: the cache holds 5 tokens$"):
        cache.rewind(9)
    layer.step(torch.randn(1, 30, 32), cache)
    with pytest.raises(ValueError, match="from 0 to 8, got 9: .* 35 tokens, and its rings go back"):
        cache.rewind(9)


def test_the_window_goes_by_either_name():
    config = nsa.NSAConfig(**SIZES, window=24)
    assert config == nsa.NSAConfig(**SIZES, w=24) and config.window == config.w == 24
    assert dataclasses.replace(config, window=9) == dataclasses.replace(config, w=9) != config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        nsa.NSAConfig(**SIZES, w=0)


def test_what_was_written_with_the_old_name_is_read(tmp_path):
    model = {name: SIZES[name] for name in ("dim", "heads", "groups", "d_k", "d_v")}
    path = tmp_path / "old.yaml"
    path.write_text(str({"model": model, "nsa": {"w": 24}}))  # a mapping in YAML's flow style
    assert nsa.NSAConfig.from_yaml(path).window == 24
    config = nsa.NSAConfig(**SIZES, window=7)
    before = object.__new__(nsa.NSAConfig)
    state = {**vars(config), "w": 24}
    del state["window"]
    before.__setstate__(state)
    assert before == dataclasses.replace(config, window=24)


# ---- one K and V ---------------------------------------------------------------------------------


@pytest.mark.parametrize("learnt", [False, True])
def test_one_k_and_v_for_all_branches(learnt):
    q, k, v = randn(1, 50, HQ, D, seed=1), randn(1, 50, G, D, seed=2), randn(1, 50, G, 8, seed=3)
    gates = randn(1, 50, HQ, 3, seed=4).sigmoid()
    how = dict(l=8, d=4, l_sel=16, n_sel=3, window=12)
    torch.manual_seed(0)
    phis = [MLPCompression(n, 8, 4) for n in (D, 8)] if learnt else []
    phi_k, phi_v = phis or [functools.partial(mean_pool, l=8, d=4)] * 2
    want = nsa.nsa_attention(q, phi_k(k), phi_v(v), k, v, k, v, gates, **how)
    assert torch.equal(nsa.nsa_attention_shared_kv(q, k, v, gates, *phis, **how), want)
    last = nsa.nsa_attention_shared_kv(q[:, 40:], k, v, gates[:, 40:], *phis, **how)
    torch.testing.assert_close(last, want[:, 40:])
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    packed = nsa.nsa_attention_shared_kv(
        q[0], k[0], v[0], gates[0], *phis, cu_seqlens=cu, max_seqlen=30, **how
    )
    alone = [x[:, 20:] for x in (q, k, v, gates)]
    torch.testing.assert_close(packed[20:], nsa.nsa_attention_shared_kv(*alone, *phis, **how)[0])
    with pytest.raises(ValueError, match="k must hold a key for each of q's 50 tokens, got 40"):
        nsa.nsa_attention_shared_kv(q, k[:, :40], v[:, :40], gates)


# ---- command lines -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["--max-new-tokens", "--max_new_tokens"])
def test_options_go_by_hyphens_and_by_underscores(given, capsys):
    for declared in ("--max-new-tokens", "--max_new_tokens"):
        parser = Parser(prog="x")
        parser.add_argument("-n", declared, type=int)
        parser.add_argument("files", nargs="*")
        args = parser.parse_args([given, "3", "a_b-c"])
        assert vars(args) == {"max_new_tokens": 3, "files": ["a_b-c"]}
        with pytest.raises(SystemExit):
            parser.parse_args(["--help"])
        assert "-n MAX_NEW_TOKENS, --max-new-tokens" in capsys.readouterr().out.replace("\n", " ")
