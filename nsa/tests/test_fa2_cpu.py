"""FA-2 without a GPU: the probe's words, the index arithmetic on a stand-in, the refusals.

The stand-in has FlashAttention's contract (bottom-right causal mask, window, groups of heads,
cu_seqlens) in plain PyTorch, so folding, trimming and packing are compared with the oracle.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from nsa import oracle, reference, rungs
from nsa.attention import compressed_attention, sliding_attention
from nsa.blocks import num_compressed
from nsa.flags import Flags
from nsa.kernels import fa2, fa2_wheels
from nsa.tests import test_unseen_values as unseen
from nsa.tests.helpers import assert_raises, grads, make_qkv, randn
from nsa.tests.test_sdpa import COMPRESSED, SLIDING, matches
from scripts.fuzz.cases import LAYOUTS, laid_out


def _one(q, k, v, scale, causal, left):
    """q [Sq, H, Dk], k [Sk, G, Dk] -> out [Sq, H, Dv], lse [H, Sq] as FA-2 has it."""
    Sq, Sk, h = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(h, 1), v.repeat_interleave(h, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    behind = torch.arange(Sq)[:, None] + Sk - Sq - torch.arange(Sk)
    seen = (behind >= (0 if causal else -Sk)) & (behind <= (left if left >= 0 else Sk))
    scores = scores.masked_fill(~seen, -math.inf)
    assert Sk and seen.any(1).all(), "a row without keys was sent to FlashAttention"
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture
def calls(monkeypatch):
    """Put the stand-in in place of _call; yields the shapes that reach it."""
    seen = []

    def stand_in(q, k, v, *, scale, causal, left=-1, cu_q=None, cu_k=None, max_q=0, max_k=0):
        seen.append(("dense" if cu_q is None else "varlen", tuple(q.shape), tuple(k.shape)))
        if cu_q is None:
            parts = [_one(*x, scale, causal, left) for x in zip(q, k, v, strict=True)]
            return torch.stack([p[0] for p in parts]), torch.stack([p[1].T for p in parts]).detach()
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert cu_q[-1] <= len(q) and cu_k[-1] <= len(k)
        assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
        spans = zip(*(pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True)
        one = lambda a, b, c, e: _one(q[a:b], k[c:e], v[c:e], scale, causal, left)
        parts = [one(*of_q, *of_k) for of_q, of_k in spans if of_q[0] < of_q[1]]
        outs, lses = [p[0] for p in parts], [p[1].T for p in parts]
        rest = q.new_full((len(q) - cu_q[-1], *outs[0].shape[1:]), math.nan)  # what memory held
        return torch.cat([*outs, rest]), torch.cat([*lses, rest[..., 0]]).detach()

    monkeypatch.setattr(fa2, "_call", stand_in)
    return seen


@pytest.mark.parametrize("form", ["auto", "varlen"])
@pytest.mark.parametrize("S, q_start, l, d", [
    *COMPRESSED, (3, 28, 8, 4), (9, 2, 8, 2), (8, 0, 8, 4), (30, 6, 6, 3), (2, 10, 8, 4),
])  # fmt: skip
def test_compressed_folding_matches_the_oracle(S, q_start, l, d, form, calls):
    N = num_compressed(q_start + S, l, d) + (q_start % 2)  # sometimes a key too many
    inputs = make_qkv(2, S, 6, 2, 8, 5, Skv=N, dtype=torch.float64, seed=S)
    without_grad = lambda out, lse: (out, lse.detach().double())
    of = lambda f, **how: lambda *x: without_grad(*f(*x, l=l, d=d, q_start=q_start, **how))
    libs = reference.compressed_attention, oracle.compressed_attention
    matches(of(fa2.compressed_fa2, form=form), *map(of, libs), inputs)
    assert {c[0] for c in calls} <= {"varlen" if form == "varlen" else "dense"}


@pytest.mark.parametrize("form", ["auto", "varlen"])
@pytest.mark.parametrize("S, q_start, w", SLIDING)
def test_sliding_window_matches_the_oracle(S, q_start, w, form, calls):
    inputs = make_qkv(2, S, 4, 2, 8, 8, Skv=q_start + S + 2, dtype=torch.float64, seed=w)
    of = lambda f, **how: lambda *x: f(*x, window=w, q_start=q_start, **how)
    libs = reference.sliding_attention, oracle.sliding_attention
    matches(of(fa2.sliding_fa2, form=form), *map(of, libs), inputs)
    assert calls[0][2][0 if form == "varlen" else 1] <= (w + S - 1) * 2


PACKED = [0, 19, 19, 24, 25, 57, 65]  # an empty sequence, ones shorter than l, one of just l


def test_packed_sequences_equal_each_alone(calls):
    cu, l, d = torch.tensor(PACKED, dtype=torch.int32), 8, 4
    spans = list(pairwise(PACKED))
    counts = [num_compressed(b - a, l, d) for a, b in spans]
    q, k, v = make_qkv(1, PACKED[-1], 4, 2, 8, 8, dtype=torch.float64)
    _, kc, vc = make_qkv(1, 1, 4, 2, 8, 8, Skv=sum(counts), dtype=torch.float64, seed=1)
    want = []
    keys = zip(kc.split(counts, 1), vc.split(counts, 1), strict=True)
    for (a, b), cmp in zip(spans, keys, strict=True):
        win = oracle.sliding_attention(q[:, a:b], k[:, a:b], v[:, a:b], window=6)
        want.append([*oracle.compressed_attention(q[:, a:b], *cmp, l=l, d=d), win])
    want = [torch.cat(x, 1)[0] for x in zip(*want, strict=True)]
    for form, longest in product(("auto", "varlen"), (None, 32)):
        kw = dict(cu_seqlens=cu, max_seqlen=longest, form=form)
        out, lse = fa2.compressed_fa2(q[0], kc[0], vc[0], l=l, d=d, **kw)
        win = fa2.sliding_fa2(q[0], k[0], v[0], window=6, **kw)
        torch.testing.assert_close([out, lse.double(), win], want)
    assert [c[0] for c in calls] == ["varlen"] * 8


def test_packed_sequences_too_short_for_any_key(calls):
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = make_qkv(1, 7, 4, 2, 8, Skv=0, requires_grad=True)
    out, lse = fa2.compressed_fa2(q[0], k[0], v[0], l=8, d=4, cu_seqlens=cu)
    assert not out.any() and lse.isneginf().all() and not calls
    out.sum().backward()
    assert not q.grad.any()


def test_gradients_of_a_pack_match_the_reference(calls):
    S, cmp, win = 27, dict(l=8, d=4), dict(window=6)
    grad_out = randn(1, S, 4, 8, seed=5, dtype=torch.float64)
    pack = dict(cu_seqlens=torch.tensor([0, S], dtype=torch.int32))
    for run, plain, n in (
        (lambda *x: fa2.compressed_fa2(*(t[0] for t in x), **cmp, **pack)[0][None],
         lambda *x: reference.compressed_attention(*x, **cmp)[0], num_compressed(S, 8, 4)),
        (lambda *x: fa2.sliding_fa2(*(t[0] for t in x), **win, **pack)[None],
         lambda *x: reference.sliding_attention(*x, **win), S),
    ):  # fmt: skip
        inputs = make_qkv(1, S, 4, 2, 8, 8, Skv=n, dtype=torch.float64, seed=3)
        torch.testing.assert_close(grads(run, inputs, grad_out), grads(plain, inputs, grad_out))


@pytest.mark.parametrize("bad", unseen.BAD)
@pytest.mark.parametrize("name, form", [
    *product(["sliding", "sliding chunk", "compressed"], ["auto", "varlen"]),
    ("sliding", "packed"), ("compressed", "packed"),
])  # fmt: skip
def test_unseen_values_have_no_effect(name, form, bad, calls):
    packed = form == "packed"
    case = unseen.packed_case if packed else unseen.branch_case
    how = dict(cu_seqlens=torch.tensor(unseen.CU).int()) if packed else dict(form=form)
    if name == "compressed":
        run = lambda *x: fa2.compressed_fa2(*x, l=unseen.L, d=unseen.D, **how)[0]
    else:
        how |= dict(window=unseen.W, q_start=unseen.S - 6 if "chunk" in name else 0)
        run = lambda *x: fa2.sliding_fa2(*x, **how)
    unseen.check(run, *case("reference", name)[1:], bad)


@pytest.mark.parametrize("packed", [False, True])
def test_the_lse_tells_of_keys_alone(packed, calls):
    n = num_compressed(unseen.S, unseen.L, unseen.D)
    q, k, v = (x.clone() for x in unseen.inputs(n, packed=packed))
    how = dict(cu_seqlens=torch.tensor([0, unseen.S], dtype=torch.int32)) if packed else {}
    k[..., -1, :, 3], v[..., 0, :, 3] = math.inf, math.nan
    lse = fa2.compressed_fa2(q, k, v, l=unseen.L, d=unseen.D, **how)[1]
    sees = unseen.sees_compressed(unseen.S, n)[:, -1]
    lse = lse if packed else lse[0]
    assert lse[sees].isnan().all() and not lse[~sees].isnan().any()


@pytest.mark.parametrize("flags, forms", [
    (Flags(), {"varlen"}), (Flags(fa2_force_varlen=True), {"varlen"}),
    (Flags(fa2_force_dense=True), {"dense"}),
])  # fmt: skip
def test_the_rungs_follow_the_force_flags(flags, forms, calls):
    cu = torch.tensor([0, 9, 30], dtype=torch.int32)
    q, k, v = (x[0] for x in make_qkv(1, 30, 4, 2, 8, 8))
    args = dict(q=q, k=k, v=v, window=5, softmax_scale=None, q_start=0, cu_seqlens=cu,
                max_seqlen=21)  # fmt: skip
    none = dict(args, q=q[:0], k=k[:0], v=v[:0], cu_seqlens=cu * 0, max_seqlen=0)
    assert rungs._sliding_fa2(none, flags).shape == (0, 4, 8) and not calls
    want = sliding_attention(q, k, v, window=5, cu_seqlens=cu, backend="reference")
    torch.testing.assert_close(rungs._sliding_fa2(args, flags), want)
    n = num_compressed(9, 4, 2) + num_compressed(21, 4, 2)
    args = dict(args, k=k[:n], v=v[:n], l=4, d=2)
    want = compressed_attention(q, k[:n], v[:n], l=4, d=2, cu_seqlens=cu, backend="reference")
    for a, b in zip(rungs._compressed_fa2(args, flags), want, strict=True):
        torch.testing.assert_close(a, b)
    assert {c[0] for c in calls} == forms


USABLE = fa2.Probe("torch", "2", None, None, "")


@pytest.fixture
def operator(monkeypatch):
    """What reaches the operator, which computes in fp32 as FA-2 would."""
    given = []

    def called(*args):
        given.append(args)
        parts = [_one(*(t.float() for t in one), *args[3:6]) for one in zip(*args[:3], strict=True)]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])

    monkeypatch.setattr(fa2, "_require", lambda *_: USABLE)
    monkeypatch.setattr(fa2, "_torch_call", called)
    return given


def test_a_call_gets_one_head_dimension_a_multiple_of_eight(operator, monkeypatch):
    q, k, v = make_qkv(2, 9, 4, 2, 12, 6)
    out, lse = fa2._call(q, k, v, scale=0.3, causal=True)
    (args,) = operator
    assert [x.shape[-1] for x in args[:3]] == [16] * 3 and args[-2:] == (9, 9)
    assert lse.shape == (2, 9, 4)
    want = oracle.sliding_attention(q, k, v, window=9, softmax_scale=0.3)
    torch.testing.assert_close(out, want.float())
    monkeypatch.setattr(fa2, "_GRID", 3)
    with pytest.raises(NotImplementedError, match="up to 3 sequences and heads, got 2 and 4"):
        fa2._call(q, k, v, scale=0.3, causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_gets_what_loads_of_16_bytes_may_read(layout, operator):
    """FA-2 asks for the last stride alone, and an address that is not aligned ends the context."""
    x = [laid_out(t, layout) for t in make_qkv(2, 9, 4, 2, 16, dtype=torch.float16)]
    fa2._call(*x, scale=0.25, causal=True)
    for t, was in zip(operator[0], x, strict=False):
        assert torch.equal(t, was) and t.stride(-1) == 1
        assert (t.data_ptr() - t.untyped_storage().data_ptr()) % 16 == 0
        assert all(n * 2 % 16 == 0 for n in t.stride()[:-1])
        assert t.data_ptr() == was.data_ptr() or layout not in ("plain", "heads first", "sliced")


def test_only_a_dense_causal_call_leaves_its_right_side_open():
    cu = torch.tensor([0, 4], dtype=torch.int32)
    every = product((True, False), (-1, 4), (cu, None))
    closed = [(c, left, x is cu) for c, left, x in every if fa2._right(c, left, x) == 0]
    assert closed == [(True, -1, True), (True, 4, True), (True, 4, False)]


@pytest.mark.parametrize("sm, dims, grad, refused", [
    ((8, 9), (192, 232), True, True), ((8, 6), (232, 64), True, True),
    ((12, 0), (232, 232), True, True), ((12, 1), (232, 232), True, True),
    ((12, 0), (224, 224), True, False), ((12, 0), (232, 232), False, False),
    ((9, 0), (256, 256), True, False), ((8, 0), (256, 256), True, False),
])  # fmt: skip
def test_large_heads_have_no_backward_on_small_cards(sm, dims, grad, refused, monkeypatch):
    monkeypatch.setattr(fa2, "probe", lambda: USABLE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: sm)
    like = dict(is_cuda=True, dtype=torch.float16, device="cuda:0", requires_grad=grad)
    q, v = (SimpleNamespace(shape=(1, 9, 4, D), **like) for D in dims)
    if refused:
        words = f"no backward for head dimension 232 on SM {sm[0]}.{sm[1]}"
        with pytest.raises(NotImplementedError, match=words):
            fa2._require(q, q, v)
    else:
        assert fa2._require(q, q, v) is USABLE


# ---- refusals and the probe ----------------------------------------------------------------------


def test_cpu_tensors_and_wrong_forms_are_refused():
    x = make_qkv(1, 16, 4, 2, 8, dtype=torch.float16)
    cu, flat = torch.tensor([0, 16], dtype=torch.int32), [t[0] for t in x]
    win = lambda **how: lambda: fa2.sliding_fa2(*x, window=4, **how)
    cmp = lambda x=x, **how: lambda: fa2.compressed_fa2(*x, l=4, d=2, **how)
    assert_raises(
        *((NotImplementedError, "CUDA tensors, got q on cpu", call) for call in (win(), cmp())),
        (ValueError, "form must be one of auto, varlen, dense, got 'flat'", win(form="flat")),
        (ValueError, "with cu_seqlens, got 'dense'", cmp(flat, cu_seqlens=cu, form="dense")),
    )


def test_without_cuda_the_probe_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fa2.importlib.util, "find_spec", lambda name: None)
    fa2.probe.cache_clear()
    found = fa2.probe()
    assert found.source is None and found.why_not.startswith("no CUDA device")
    assert found.package_reason == "not installed: No module named 'flash_attn'"
    assert fa2.probe() is found
    fa2.probe.cache_clear()


@pytest.mark.parametrize("returncode, text, kind", [
    (1, "ModuleNotFoundError: No module named 'flash_attn'", "not installed"),
    (1, "Traceback\nImportError: x/flash_attn_2_cuda.so: undefined symbol: _ZN3c10E\n",
     "undefined symbol"),
    (1, "ImportError: libcudart.so.12: cannot open shared object file", "libcudart missing"),
    (1, "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
     "Compile with TORCH_USE_CUDA_DSA", "no kernel image"),
    (1, "ImportError: cannot import name 'flash_attn_func' from 'flash_attn'", "other"),
    (-11, "", "other: importing it ends the process with SIGSEGV"), (3, "", "other: exit code 3"),
    (None, "", "other: importing it did not end in time"),
])  # fmt: skip
def test_why_the_package_does_not_work(returncode, text, kind):
    reason = fa2.classify(returncode, text)
    assert reason.startswith(kind) and "\n" not in reason
    if ":" not in kind:
        assert text.splitlines()[-1 if "Compile" not in text else 0].strip() in reason


@pytest.mark.parametrize("body, expected", [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "other: importing it ends"),
    ("raise ImportError('a.so: undefined symbol: _ZN2at')", "undefined symbol: ImportError"),
    ("__version__ = '2.5.9'\ndef flash_attn_func(): pass\nflash_attn_varlen_func = 1",
     "other: flash_attn 2.5.9 is older than 2.6"),
])  # fmt: skip
def test_a_broken_package_is_tried_in_a_child(body, expected, tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    (tmp_path / "torch.py").write_text("")  # the child need not load the real one
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fa2.importlib.util, "find_spec", lambda name: object())
    version, reason = fa2._try_package(60)
    assert version is None and reason.startswith(expected)


@pytest.mark.parametrize("of, machine, said", [
    (("2.8.0+cu128", "12.8", "3.12", True), "x86_64",
     "fits is flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl from"),
    (("2.6.0", "12.4", "3.9.1", False), "x86_64",
     "fits is flash_attn-2.8.3+cu12torch2.6cxx11abiFALSE-cp39-cp39-linux_x86_64.whl from"),
    (("2.4.1", "12.4", "3.13", False), "x86_64", "no official wheel for torch 2.4, CUDA 12"),
    (("2.10.0+cu128", "12.8", "3.12", True), "x86_64", "no official wheel for torch 2.10, CUDA"),
    (("2.11.0+cu130", "13.0", "3.12", True), "x86_64", "no official wheel for torch 2.11, CUDA"),
    (("2.8.0+cu129", "12.9", "3.12", True), "aarch64", "no official wheel for torch 2.8, CUDA"),
    (("2.8.0+cu126", "12.6", "3.14", True), "x86_64", "CUDA 12, Python 3.14 on x86_64: torch's"),
    (("2.13.0+cpu", None, "3.12", True), "x86_64", "torch 2.13.0+cpu is built without CUDA"),
])  # fmt: skip
def test_a_wheel_is_named_where_one_is_published(of, machine, said, monkeypatch):
    monkeypatch.setattr(fa2_wheels.platform, "machine", lambda: machine)
    assert said in fa2_wheels.wheel(*of)


def test_the_probe_asks_for_this_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"no official wheel for torch 2.11, CUDA 13, Python {python} on" in fa2.wheel()


def test_the_operator_of_torch_takes_what_it_is_given():
    """Shapes, schema and autograd of the operator on meta tensors, dense and varlen."""
    q = torch.randn(2, 8, 4, 16, device="meta", dtype=torch.float16, requires_grad=True)
    k = torch.randn(2, 8, 2, 16, device="meta", dtype=torch.float16, requires_grad=True)
    out, lse = fa2._torch_call(q, k, k, 0.25, True, 3, None, None, 8, 8)
    assert out.shape == q.shape and lse.shape == (2, 4, 8) and not lse.requires_grad
    cu = torch.zeros(3, dtype=torch.int32, device="meta")
    flat = [x.flatten(0, 1) for x in (q, k, k)]
    out, lse = fa2._torch_call(*flat, 0.25, True, -1, cu, cu, 8, 8)
    assert out.shape == (16, 4, 16) and lse.shape == (4, 16)
    out.sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
