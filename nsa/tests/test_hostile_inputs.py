"""Does every public function refuse bad input in one line that names the argument?"""

import functools
import math
import subprocess
import sys

import pytest
import torch

import nsa
from nsa import oracle
from nsa.attention import nsa_decode
from nsa.tests.helpers import (
    HOSTILE_RANGE_KINDS,
    RANGE_KINDS,
    make_block_indices,
    make_qkv,
    make_ranges,
    randn,
)
from nsa.tests.oracle_numbers import NAMES

q, k, v = make_qkv(2, 16, 4, 2, 8, 6)
BLOCKS = make_block_indices("random", 2, 16, 2, 2, 4)
CU = torch.tensor([0, 10, 16], dtype=torch.int32)


def slide(q=q, k=k, v=v, window=5, **kw):
    return nsa.sliding_attention(q, k, v, window=window, **kw)


def select(q=q, k=k, v=v, b=BLOCKS, **kw):
    return nsa.selection_attention(q, k, v, b, **{"block_size": 4, **kw})


def compressed(q=q, k=k[:, :3], v=v[:, :3], l=8, d=4, **kw):
    return nsa.compressed_attention(q, k, v, l=l, d=d, **kw)


def choose(q=q, k=k[:, :3], lse=None, **kw):
    return nsa.select_blocks(q, k, lse, **{**dict(l=8, d=4, l_sel=8, n_sel=3), **kw})


def packed(cu=CU, fn=slide, k=k[0], v=v[0], **kw):
    return fn(q[0], k, v, cu_seqlens=cu, **kw)


GATES = randn(2, 16, 4, 3, seed=1).sigmoid()
LAYER = dict(zip(NAMES, (q, k[:, :3], v[:, :3], k, v, k, v, GATES), strict=True))


def window(k, v):
    return {"k_win": k, "v_win": v}


def layer(**change):
    sizes = dict(l=8, d=4, l_sel=8, n_sel=3, window=5)
    return nsa.nsa_attention(**{**LAYER, **sizes, **change})


@functools.cache
def module():
    torch.manual_seed(0)
    sizes = dict(l=8, d=4, l_sel=8, n_sel=3, w=5)
    return nsa.NSAAttention(nsa.NSAConfig(dim=12, heads=4, groups=2, d_k=8, d_v=6, **sizes))


@functools.cache
def cached(batch=2, n=9):
    """A cache of the module's that holds n tokens."""
    cache = module().make_cache(batch, 20)
    module().prefill(randn(batch, n, 12, seed=4), cache)
    return cache


def decode(q=q[:, :1], gates=None, cache=None):
    return nsa_decode(q, cache or cached(), None, gates)


X = randn(16, 12, seed=1)  # of the module


@functools.cache
def model():
    return nsa.NSALanguageModel(module().config, vocab_size=20, n_layers=1)


TOKENS = torch.arange(12)


def first(Q, K, indices, fn=nsa.selection_attention, **how):
    """A call with K as values and indices of that shape."""
    how = how or dict(block_indices=torch.zeros(*indices, 2).int(), block_size=16)
    x = torch.zeros(*K)
    return lambda: fn(torch.zeros(*Q), x, x, **how)


Q4, K2 = (2, 4, 64, 16), (2, 2, 64, 16)
HEADS_FIRST = r"look like \[B, H, S, D\]"
BAD = {
    ValueError: [
        (first(Q4, K2, (2, 64, 2)), rf"{HEADS_FIRST}; give x.transpose\(1, 2\)"),
        (first(Q4, K2, (2, 2, 64)), HEADS_FIRST),
        (first(Q4, K2, (), nsa.sliding_attention, window=8), "at 3, got 2 keys: these look"),
        (first((2, 64, 4, 16), (2, 63, 4, 16), (2, 64, 4)), r"got 63 keys$"),
        (first((2, 64, 4, 16), (2, 64, 2, 16), K2[:3]), r"\[2, 2, 64, 2\].*indices.transpose\("),
        (first((64, 4, 16), (64, 2, 16), (64, 2)), r"\[64, 4, 16\]: one sequence is x\[None\]"),
        (lambda: slide(cu_seqlens=CU), "sequences are packed, without a batch"),
        (lambda: slide(q=q[0]), r"q must be \[B, S, H, D\], got shape \[16, 4"),
        (lambda: slide(k=k[:1]), "k must have q's batch 2"),
        (lambda: slide(k=k[..., :4]), "k must have q's Dk=8"),
        (lambda: slide(v=v[:, :5]), "v must be k but for Dv"),
        (lambda: slide(v=v[:, :, :1]), "v must be k but for Dv"),
        (lambda: slide(q=q[:, :, :3]), "multiple of k's G=2"),
        (lambda: slide(k=k[:, :, :0], v=v[:, :, :0]), "G=0"),
        (lambda: slide(q=q[..., :0], k=k[..., :0]), "head dimensions"),
        (lambda: slide(k=k.to("meta")), "k must be on q's device cpu"),
        (lambda: slide(window=0), "window must be at least 1, got 0"),
        (lambda: slide(k=k[:, :9], v=v[:, :9]), "k must hold .* query at 15, got 9"),
        (lambda: slide(q_start=1), "up to the last query at 16, got 16"),
        (lambda: slide(softmax_scale=math.nan), "softmax_scale must be a fin"),
        (lambda: slide(softmax_scale=0.0), "number above 0, got 0.0"),
        (lambda: slide(backend="fast"), "backend must be"),
        (lambda: slide(max_seqlen=9), "max_seqlen needs cu_seqlens"),
        (lambda: select(q_start=-1), "q_start must be at least 0"),
        (lambda: select(k=k[:, :9], v=v[:, :9]), "k must hold keys up to .* 15, got 9"),
        (lambda: select(ranges=make_ranges("few", 2, 16, 2, 16, 4)), "either"),
        (lambda: select(b=None), "give either block_indices or ranges"),
        (lambda: select(b=BLOCKS.repeat(1, 1, 2, 1)), r"be \[2, 16, 2, 'n'\], got \[2, 16, 4, 2\]"),
        (lambda: select(b=None, ranges=torch.zeros(2, 16, 2, 1, 3).int()),
         r"ranges must be \[2, 16, 2, 'n', 2\]"),
        (lambda: select(block_size=0), "block_size must be at least 1"),
        (lambda: select(b=BLOCKS + 96), "be below 4, the blocks of 4 in 16 keys, got 9"),
        (lambda: select(block_size=16), "be below 1, the blocks of 16 in 16 keys, got 3"),
        (lambda: select(b=torch.tensor([0, (1 << 32) + 1]).expand(2, 16, 2, 2)),
         f"must be below 4, .* got {(1 << 32) + 1}"),  # none is cut to one that is there
        (lambda: compressed(softmax_scale=-1), "number above 0, got -1"),
        (lambda: compressed(d=3), "d must divide l, got l=8 d=3$"),
        (lambda: compressed(k=k[:, :2], v=v[:, :2]), r"3 compressed keys for q_start \+ S.*got 2"),
        (lambda: compressed(k=k, v=v), "k_cmp must have 3 .* got 16, where there are 16 raw keys"),
        (lambda: choose(k=k), "k_cmp must have 3 .* got 16, where"),
        (lambda: choose(n_init=2), r"n_init \+ n_local, .* got n_sel=3 n_init=2 n_local=2"),
        (lambda: choose(n_sel=0), "n_sel must be at least 1, got 0"),
        (lambda: choose(n_local=0), "n_local must be at least 1"),
        (lambda: choose(l_sel=6), "d must divide l and l_sel"),
        (lambda: choose(lse=torch.zeros(2, 16, 2)), "lse must be"),
        (lambda: choose(lse=torch.zeros(2, 16, 4, device="meta")), "lse must be on q's"),
        (lambda: packed(CU[:1]), r"must be \[nseq \+ 1\]"),
        (lambda: packed(CU + 1), "rise from 0 to T=16"),
        (lambda: packed(torch.tensor([0, 12, 9, 16]).int()), r"or less, got \[0, 12, 9, 16\]"),
        (lambda: packed(max_seqlen=9), "at least 10"),
        (lambda: packed(CU.to("meta")), "cu_seqlens must be on the tokens' device cpu, got meta"),
        (lambda: packed(fn=select, b=BLOCKS[0]), "below 3, the blocks of 4 in 10 keys, got 3"),
        (lambda: packed(fn=select, k=k[0, :9], v=v[0, :9], b=BLOCKS[0]), "q's T=16 packed.*got 9"),
        (lambda: packed(fn=select, b=BLOCKS[0], q_start=1), "must be 0 with cu_seqlens, got 1"),
        (lambda: packed(fn=compressed, k=k[0, :3], v=v[0, :3]), "have 1 compressed .*packed.*3$"),
        # The whole attention names the branch.
        (lambda: layer(gates=GATES[..., :2]), r"gates must be \[2, 16, 4, 3\], got \[2, 16, 4"),
        (lambda: layer(gates=GATES.to("meta")), "gates must be on q's device cpu"),
        (lambda: layer(k_sel=k[:, :9], v_sel=v[:, :9]), "k_sel must hold keys .* at 15, got 9"),
        (lambda: layer(q=q[0]), r"q must be \[B, S, H, D\], got shape \[16, 4, 8\]"),
        (lambda: layer(d=0), "d must be at least 1, got 0"),
        (lambda: layer(l_sel=6), "d must divide l and l_sel"),
        (lambda: layer(n_sel=0), "n_sel must be at least 1"),
        (lambda: layer(n_sel=2), r"at least n_init \+ n_local, .* got n_sel=2 n_init=1 n_lo"),
        (lambda: layer(k_cmp=k, v_cmp=v), "k_cmp must have 3 .* got 16, where .* 16 raw"),
        (lambda: layer(**window(k[:, :3], v[:, :3])), "k_win must have 16 to 16 keys, .* got 3"),
        (lambda: layer(**window(k[:, :12], v[:, :12]), q=q[:, :9], gates=GATES[:, :9], q_start=7),
         "k_win must have 13 to 16 keys, .* got 12"),
        # More would show the future: the last query stands at k_win's last key.
        (lambda: layer(**window(k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))), "16 keys, .* got 32"),
        (lambda: layer(**{n: x[0, :1] if "cmp" in n else x[0] for n, x in LAYER.items()}
                       | window(k[0, :9], v[0, :9]), cu_seqlens=CU),
         "k_win must have q's T=16 packed tokens, got 9"),
        (lambda: layer(**window(k[:, :, :1], v[:, :, :1])), "k_win must have k_cmp's G=2"),
        (lambda: layer(v_win=v[..., :3]), "v_win must have v_cmp's Dv=6"),
        # A decode step names what does not fit the cache.
        (lambda: decode(q[:1, :1]), r"q must be \[2, 1, 4, 8\], got \[1, 1, 4, 8\]"),
        (lambda: select(block_counts=BLOCKS[..., 0].to("meta")),
         "block_counts must be on block_indices' device cpu, got meta"),
        (lambda: decode(q[0]), r"q must be \[2, 0, 4, 8\], got \[16, 4, 8\]"),
        (lambda: decode(q[:, :1].to("meta")), "q must be on the cache's device cpu, got meta"),
        (lambda: decode(q[:, :10], GATES[:, :10]), r"in the cache: T=10, lengths \[9, 9\]"),
        (lambda: decode(gates=GATES[:, 0]), r"gates must be \[2, 1, 4, 3\], got \[2, 4, 3\]"),
        (lambda: decode(randn(3, 4, 4, 8, seed=6), torch.ones(3, 4, 4, 3),
                        nsa.NSACache.stack([cached(), cached(1, 3)])),
         r"in the cache: T=4, lengths \[9, 9, 3\]"),
        (lambda: module()(X, cu_seqlens=CU + 1), "rise from 0 to T=16"),
        (lambda: module()(X, cu_seqlens=CU * 2), r"T=16 or less, got \[0, 20, 32\]"),
        (lambda: module()(X), r"got \[16, 12\]: one sequence is x\[None\]"),
        *((call, r"\[B, S\] \(one sequence is tokens\[None\]\), got") for call in (
            lambda: model()(TOKENS), lambda: model().prefill(TOKENS),
            lambda: model().step(TOKENS, model().prefill(TOKENS[None])[1]))),
        (lambda: model()(TOKENS[None], CU), r"tokens must be \[T\] with cu_seqlens, got \[1, 12\]"),
    ],
    TypeError: [
        (lambda: slide(q=[1]), "q must be a tensor, got list"),
        (lambda: slide(k=k.half()), "k must have q's dtype"),
        (lambda: slide(q=q.int()), "q must be fp16, bf16, fp32 or fp64"),
        (lambda: slide(window=4.0), "window must be an int, got 4.0"),
        (lambda: slide(window=True), "window must be an int, got True"),
        (lambda: slide(softmax_scale="1"), "softmax_scale must be None or a number"),
        (lambda: slide(flags={}), "flags must be an nsa.Flags"),
        (lambda: select(b=BLOCKS.float()), "block_indices must be an int32"),
        (lambda: packed(CU.long()), "int32 tensor"),
        (lambda: packed(max_seqlen="a"), "max_seqlen must be an int, got 'a'"),
        (lambda: packed(max_seqlen=40.5), "max_seqlen must be an int, got 40.5"),
        (lambda: choose(lse=[1]), "lse must be a tensor, got list"),
        (lambda: choose(lse=torch.zeros(2, 16, 4).int()), "lse must be fp16, .*int32"),
        *((lambda n=n: layer(**{n: None}), f"{n} must be a tensor, got NoneType") for n in LAYER),
        (lambda: layer(gates=GATES.int()), "gates must be fp16, .*torch.int32"),
        (lambda: layer(l_sel=None), "l_sel must be an int, got None"),
        (lambda: layer(d="x"), "d must be an int, got 'x'"),
        (lambda: layer(q_start="0"), "q_start must be an int, got '0'"),
        (lambda: layer(q_start=None), "q_start must be an int, got None"),
        (lambda: decode([1]), "q must be a tensor, got list"),
        (lambda: decode(q[:, :1].half()), "have the cache's torch.float32, got torch.float16"),
        (decode, "gates must be a tensor, got NoneType"),
        (lambda: module()([1.0]), "x must be a tensor, got list"),
        (lambda: module()(X, cu_seqlens=[0, 16]), "cu_seqlens must be an int32 tensor"),
        (lambda: module()(X, cu_seqlens=CU, max_seqlen="a"), "max_seqlen must be an"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "match"), [(error, *row) for error, rows in BAD.items() for row in rows]
)
def test_bad_input_names_the_argument(error, call, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("call", [
    lambda: compressed(q=q[:, 15:], q_start=15, backend="sdpa"),  # which needs no mask
    lambda: slide(q=q[:, 15:], backend="sdpa"),
    lambda: nsa.layouts.to_ranges(BLOCKS, 4),
    lambda: nsa.layouts.from_ranges(nsa.layouts.to_ranges(BLOCKS, 4), 4, 4),
])  # fmt: skip
def test_the_default_device_does_not_matter(call):
    want = call()
    with torch.device("meta"):
        got = call()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_window_may_be_any_number_of_the_last_keys_it_needs():
    far, like = torch.cat([k, k + 1], 1), torch.cat([v, v], 1)
    at = dict(q_start=16, k_sel=far, v_sel=like, k_cmp=k[:, :7], v_cmp=v[:, :7])
    want = layer(**at, **window(far, like))
    assert torch.equal(layer(**at, **window(far[:, -20:], like[:, -20:])), want)


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_hostile_ranges_attend_their_valid_union(kind, backend):
    q, k, v = make_qkv(1, 6, 4, 2, 8, 6, Skv=23, dtype=torch.float64, seed=2)
    ranges = make_ranges(kind, 1, 6, 2, 23, 13, seed=3)
    out = nsa.selection_attention(q, k, v, ranges=ranges, backend=backend)
    want = oracle.selection_attention(q, k, v, ranges)
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)


def test_block_indices_beyond_the_query_are_cut(backend):
    far = 1 << 32  # in the low half of the last one stands block 1
    blocks = torch.tensor([0, 3, -7, 1 - far]).expand(2, 16, 2, 4)
    got = select(b=blocks, backend=backend)
    want = select(b=torch.tensor([0, 3], dtype=torch.int32).expand(2, 16, 2, 2), backend=backend)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_a_compiled_graph_tells_of_a_block_behind_the_keys():
    torch.compiler.reset()
    call = torch.compile(lambda b: select(b=b, backend="reference"), backend="aot_eager",
                         fullgraph=True)  # fmt: skip
    torch.testing.assert_close(call(BLOCKS), select(backend="reference"))
    with pytest.raises(RuntimeError, match="block_indices must be below 4, the blocks of 4 in 16"):
        call(BLOCKS + 4)


GPU = """
import torch, nsa
x = torch.randn(2, 40, 2, 16, device="cuda", dtype=torch.float16)
last, behind = (torch.full((2, 40, 2, 1), b, device="cuda") for b in (2, 3))
run = lambda b: nsa.selection_attention(x, x, x, b, block_size=16, backend="triton")
run(last)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # nothing waits for the device
    run(last)
graph.replay()
pack, short = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 40, 80], [0, 9, 18]))
def whole(cu_seqlens, max_seqlen=40):
    x = torch.randn(80, 2, 16, device="cuda", dtype=torch.float16)
    nsa.nsa_attention_shared_kv(x, x, x, torch.rand_like(x[..., :3]), l=8, d=4, l_sel=16, n_sel=3,
                                window=8, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
whole(pack)
torch.cuda.synchronize()
print("fine so far", flush=True)
"""
ASSERTED = {
    "run(torch.full((2, 40, 2, 2), 3, device='cuda'))":
        "block_indices must be below 3, the blocks of 16 in 40 keys",
    "run(behind)": "block_indices must be below the blocks of block_size in the keys",
    "whole(short, 9); whole(pack, 9)":
        "max_seqlen must be at least the longest sequence of cu_seqlens",
}  # fmt: skip


@pytest.mark.parametrize("call", ASSERTED)
def test_a_gpu_tells_of_what_its_values_forbid(call, cuda):
    """By an assertion on the device, after which it is of no use to this process; of a call that
    was checked before, without numbers."""
    code = f"{GPU}{call}\ntorch.cuda.synchronize()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "fine so far" in done.stdout and done.returncode, done.stderr
    assert ASSERTED[call] in done.stderr and "device-side assert" in done.stderr, done.stderr


def test_raw_keys_of_a_pack_are_told_without_waiting_for_a_gpu(cuda):
    x, cu = k[0].to(cuda), CU.to(cuda)
    how = dict(l=8, d=4, cu_seqlens=cu, max_seqlen=10)
    with pytest.raises(ValueError, match=r"at most T // d = 4 compressed keys .* T=16 .* got 16"):
        nsa.compressed_attention(q[0].to(cuda), x, x, **how)


def test_no_query_no_key_no_block(backend):
    assert slide(q[:, :0], k[:, :0], v[:, :0], backend=backend).shape == (2, 0, 4, 6)
    assert slide(q[:0], k[:0], v[:0], backend=backend).shape == (0, 16, 4, 6)
    none = torch.zeros(2, 16, 2, 0, dtype=torch.int32)
    assert select(b=none, backend=backend).abs().max() == 0
    out, lse = compressed(k=k[:, :0], v=v[:, :0], l=32, d=16, backend=backend)
    assert out.shape == (2, 16, 4, 6) and out.abs().max() == 0
    assert (lse == -math.inf).all()


def test_strides_do_not_matter(backend):
    qs = q.transpose(1, 2).contiguous().transpose(1, 2)
    ks = torch.stack([k, k], -1)[..., 0]
    assert not qs.is_contiguous() and not ks.is_contiguous()
    for fn in (slide, select):
        torch.testing.assert_close(fn(q=qs, k=ks, backend=backend), fn(backend=backend))
    blocks = BLOCKS.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(select(b=blocks, backend=backend), select(backend=backend))
    expanded = k[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(
        slide(k=expanded, backend=backend), slide(k=expanded.contiguous(), backend=backend)
    )


@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_extreme_scores_stay_finite(size, backend):
    x = [(t * size).requires_grad_() for t in make_qkv(1, 16, 4, 2, 8, 6, seed=4)]
    outs = [slide(*x, backend=backend), select(*x, BLOCKS[:1], backend=backend)]
    sum(o.sum() for o in outs).backward()
    assert all(o.isfinite().all() for o in outs)
    assert all(t.grad.isfinite().all() for t in x)


def test_inputs_are_not_written_to(backend):
    given = q, k, v, BLOCKS, make_ranges("out_of_bounds", 2, 16, 2, 16, 5)
    before = [x.clone() for x in given]
    select(backend=backend)
    select(b=None, ranges=given[-1], backend=backend)
    layer(backend=backend)
    assert all(map(torch.equal, before, given))
