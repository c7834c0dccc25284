"""Does the routing table describe the calls that nsa_attention and the layer really make?"""

from types import SimpleNamespace

import pytest
import torch

from nsa import dispatch, nsa_attention, nsa_with_kvcache, selection_attention
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.dispatch import Branch
from nsa.flags import Flags
from nsa.kernels import fa2
from nsa.module import NSAAttention
from scripts import print_routing

SIZES = dict(l=8, d=4, l_sel=16, n_sel=3, w=24)
CONFIG = NSAConfig(dim=32, heads=2, groups=1, d_k=16, d_v=16, **SIZES)


def test_the_cache_of_a_token_is_told(capsys):
    data = print_routing.routing("float16", 16, CONFIG)
    rings = 1 * (16 + 16) * 2 * (1 + 1 / 4)
    assert data["cache_bytes_per_token"] == {"rings": rings, "pages": rings + 2 * 64}
    assert print_routing.main(["--dtype", "float32", "--head_dim", "64"]) == 0
    assert "4 groups: 2176 bytes a token, with rings" in capsys.readouterr().out


def test_lengths_are_those_of_the_calls(monkeypatch):
    seen, make = {}, dispatch.make_request

    def recorded(branch, q, k, v, key_len, *rest):
        seen[branch] = key_len
        return make(branch, q, k, v, key_len, *rest)

    monkeypatch.setattr(dispatch, "make_request", recorded)
    for S in (20, 100):
        seen.clear()
        q, gates = torch.randn(1, S, 2, 16), torch.rand(1, S, 2, 3)
        k = torch.randn(1, S, 1, 16)
        cmp = mean_pool(k, l=8, d=4)
        sizes = {n: v for n, v in SIZES.items() if n != "w"}
        nsa_attention(q, cmp, cmp, k, k, k, k, gates, window=24, **sizes)
        layer = NSAAttention(CONFIG)
        cache = layer.make_cache(batch=1, max_len=S)
        with torch.no_grad():
            layer.prefill(torch.randn(1, S - 1, 32), cache)
            layer.step(torch.randn(1, 1, 32), cache)
            layer(torch.randn(1, S, 32))
        held = [torch.zeros(1, n, 1, 16) for n in (cmp.shape[1], cmp.shape[1], S, S, S, S)]
        new = {name: k[:, :1] for name in ("k_sel", "v_sel", "k_win", "v_win", "k_cmp", "v_cmp")}
        nsa_with_kvcache(
            q[:, :1], *held, gates[:, :1], cache_seqlens=S - 1, window=24, **new, **sizes
        )
        # The threshold is about selection by itself, not as a branch of those above.
        blocks = torch.zeros(1, S, 1, SIZES["n_sel"], dtype=torch.int32)
        selection_attention(q, k, k, blocks, block_size=SIZES["l_sel"])
        assert seen == {b: print_routing.key_length(b, S, CONFIG) for b in Branch}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the decisions go; call it with the flags to have the rows."""
    for owner, name, result in (
        (torch.cuda, "is_available", True), (torch.cuda, "get_device_name", "a GPU"),
        (torch.cuda, "get_device_capability", (9, 0)), (dispatch, "_has_triton", True),
        (fa2, "probe", SimpleNamespace(why_not="no wheel")), (print_routing, "call_kernels", []),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, result=result: result)

    def rows(width=64, **flags):
        monkeypatch.setattr(print_routing, "get_flags", lambda _: Flags(**flags))
        return print_routing.routing("bfloat16", width)["decisions"]

    return rows


def test_the_threshold_in_the_way_is_named(gpu):
    """The paper selects 1024 keys however long the prefill is."""
    rows = gpu(sel_triton_min_L=4096)
    assert {r["branch"] for r in rows} == {b.value for b in Branch}
    at_8k = {r["branch"]: r for r in rows if r["call"].startswith("prefill, 8")}
    triton = at_8k["selected"]["rejected"][0]
    assert at_8k["selected"]["key_len"] == 1024 and triton["reason"] == "below_min_L"
    assert triton["meaning"] == "selected length 1024 is below NSA_SEL_TRITON_MIN_L=4096 (argument)"
    # All of NSA in one operator does not stand against packed SDPA.
    assert at_8k["prefill"]["route"] == "triton" and not at_8k["prefill"]["rejected"]


@pytest.mark.parametrize("flag", ["use_fa2", "debug_timing", "debug_shapes", "debug_compare"])
def test_prefill_is_one_operator_only_where_nothing_works_by_branch(gpu, flag):
    rows = gpu(**{flag: True})
    (row,) = [r for r in rows if r["branch"] == "prefill" and r["call"].startswith("prefill, 8")]
    assert row["route"] == "reference"
    assert [r["reason"] for r in row["rejected"]] == ["unsupported"]


def test_a_request_is_the_calls_own(gpu, monkeypatch):
    """Of both head dimensions, and no gradient of the choice of blocks."""
    seen, real = [], dispatch.decide
    monkeypatch.setattr(dispatch, "decide", lambda r, f: (seen.append(r), real(r, f))[1])
    rows = gpu(width=96)
    assert {(r.d_k, r.d_v) for r in seen} == {(96, 96)}
    training = {r["branch"]: r["needs_grad"] for r in rows if r["call"].startswith("training")}
    assert not training.pop("blocks") and all(training.values())


def test_a_malformed_flag_is_a_usage_error_and_else_the_table_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("NSA_USE_TRITON_SEL", "perhaps")
    assert print_routing.main([]) == 2
    assert "NSA_USE_TRITON_SEL" in capsys.readouterr().err
    monkeypatch.delenv("NSA_USE_TRITON_SEL")
    assert print_routing.main([]) == 0
    out = capsys.readouterr().out
    assert "prefill    prefill, 8192 tokens      1024 keys -> reference" in out
    assert "step       decode step, 8192 tokens" in out
