"""Converters of block indices: there and back, and against attention computed from each layout."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

from nsa import layouts, selection_attention
from nsa.tests.helpers import BLOCK_KINDS, assert_raises, make_block_indices, randn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
B, S, G, n, SIZE = 2, 45, 2, 4, 8
CU = torch.tensor([0, 20, 20, 45], dtype=torch.int32)
LENGTHS = (20, 0, 25)


@pytest.fixture(params=BLOCK_KINDS)
def dense(request):
    return layouts.clean(make_block_indices(request.param, B, S, G, n, SIZE), SIZE)


@pytest.fixture(params=BLOCK_KINDS)
def packed(request):
    parts = [make_block_indices(request.param, 1, m, G, n, SIZE, seed=m)[0] for m in LENGTHS]
    return layouts.clean(torch.cat(parts), SIZE, CU)


def shuffled(x):
    """Every row in another order: what packages without our order may hand over."""
    order = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return x.gather(-1, order)


def test_clean_keeps_what_is_chosen(dense):
    rough = torch.cat([shuffled(dense), dense.flip(-1), torch.full_like(dense, 99)], -1)
    got = layouts.clean(rough, SIZE)
    assert torch.equal(got[..., :n], dense) and (got[..., n:] == -1).all()
    one = torch.tensor([3, -7, 0, 3, 5, 1]).expand(1, S, 1, 6)
    assert layouts.clean(one, SIZE)[0, 24, 0].tolist() == [0, 1, 3, -1, -1, -1]
    assert layouts.clean(one, SIZE)[0, 44, 0].tolist() == [0, 1, 3, 5, -1, -1]


def test_every_permutation_comes_back(dense):
    forms = "BSGn", "BGSn", "TGn", "GTn"
    x = {form: layouts.permute(dense, "BSGn", form) for form in forms}
    for source, target in itertools.product(forms, forms):
        assert torch.equal(layouts.permute(x[source], source, target, batch=B), x[target])
    assert torch.equal(x["GTn"][1, S + 3], dense[1, 3, 1])
    assert torch.equal(x["BGSn"], dense.transpose(1, 2))


def test_fla(dense, packed):
    for ours, cu in ((dense, None), (packed, CU)):
        indices, counts = layouts.to_fla(ours)
        assert indices.shape[:3] == counts.shape == (*indices.shape[:2], G)
        assert torch.equal(layouts.from_fla(indices, counts, SIZE, cu), ours)
        noisy = torch.where(torch.arange(n) < counts[..., None], indices, 0)  # past the count
        assert torch.equal(layouts.from_fla(noisy, counts, SIZE, cu), ours)
    assert torch.equal(layouts.from_fla(shuffled(dense).long(), n, SIZE), dense)


def test_topk(packed):
    topk = layouts.to_topk(packed)
    assert topk.shape == (G, 45, n) and topk.is_contiguous()
    assert torch.equal(layouts.from_topk(topk, SIZE, CU), packed)
    # Without a mark: all blocks of an early query count, then whatever the memory held.
    t = layouts.token_positions(packed, CU)
    full = torch.stack([(t // SIZE - i) for i in range(n)], -1)
    noise = torch.where(full < 0, 1, full).expand(G, -1, -1)
    got = layouts.from_topk(noise, SIZE, CU, marked=False)
    for row, own in zip(got[:, 0].tolist(), (t // SIZE).tolist(), strict=True):
        want = list(range(max(0, own - n + 1), own + 1))
        assert row == want + [-1] * (n - len(want))


def test_ranges_and_masks(dense, packed):
    for ours, cu in ((dense, None), (packed, CU)):
        ranges = layouts.to_ranges(ours, SIZE, cu)
        assert torch.equal(layouts.from_ranges(ranges, SIZE, n, cu), ours)
    mask = layouts.to_mask(dense, 6)
    assert torch.equal(mask, (dense[..., None] == torch.arange(6)).any(-2).transpose(1, 2))
    assert torch.equal(layouts.from_mask(mask, n), dense)
    assert torch.equal(layouts.from_mask(mask, 9)[..., :n], dense)


def test_attention_is_the_same_from_ranges(packed):
    x = (randn(45, h, 8, seed=h + i) for i, h in enumerate((4, 2, 2)))
    run = functools.partial(
        selection_attention, *x, block_size=SIZE, cu_seqlens=CU, backend="reference"
    )
    ranges = layouts.to_ranges(packed, SIZE, CU)
    torch.testing.assert_close(run(ranges=ranges), run(block_indices=packed))


def test_what_cannot_be_converted_is_refused():
    x, blocks = torch.zeros(B, S, G, n, dtype=torch.int32), torch.zeros(1, 8, 1, 2).int()
    permute, mask = layouts.permute, torch.ones(1, 1, 1, 2, dtype=torch.bool)

    def ranges(*span):
        odd = torch.zeros(1, S, 1, 1, 2, dtype=torch.int32)
        odd[0, 30, 0, 0] = torch.tensor(span)
        return lambda: layouts.from_ranges(odd, SIZE, 4)

    wide = lambda n: lambda: layouts.to_mask(torch.tensor([0, 3, -1]).expand(1, 40, 1, 3), n)
    clean = lambda size: lambda: layouts.clean(blocks, size)
    floats = torch.zeros(1, 8, 1, 2)
    packs = lambda cu: lambda: layouts.clean(x[0], SIZE, cu)
    fla = lambda counts: lambda: layouts.from_fla(x, counts, SIZE)
    assert_raises(
        (ValueError, "source must be one of .* got 'BnSG'", lambda: permute(x, "BnSG", "TGn")),
        (ValueError, "block_indices must be GTn, got shape", lambda: permute(x, "GTn", "TGn")),
        (ValueError, "batch must divide T=90, got 4",
         lambda: permute(x.flatten(0, 1), "TGn", "BSGn", batch=4)),
        *((ValueError, rf"cu_seqlens must rise from 0 to T=45, got \[{ends[0]}, ",
           packs(torch.tensor(ends))) for ends in ([0, 44], [0, 30, 20, 45], [1, 45])),
        (ValueError, r"cu_seqlens must be \[nseq \+ 1\], got shape \[1\]", packs(CU[-1:])),
        (TypeError, "cu_seqlens must be an int32 or int64 tensor, got list", packs([0, 45])),
        (TypeError, "cu_seqlens must be an int32 .* got torch.float32", packs(CU.float())),
        *((TypeError, f"{name} must be a tensor of integers, got torch.float32", call)
          for name, call in (
              ("block_indices", lambda: layouts.clean(floats, 8)),
              ("block_indices", lambda: layouts.from_fla(floats, 2, 8)),
              ("block_indices", lambda: layouts.to_fla(floats)),
              ("block_indices", lambda: layouts.to_ranges(floats, 8)),
              ("block_indices", lambda: layouts.to_mask(floats, 2)),
              ("topk_idx", lambda: layouts.from_topk(floats[0], 8, torch.tensor([0, 1]))),
              ("ranges", lambda: layouts.from_ranges(floats[..., None, :], 8, 2)))),
        (TypeError, "block_indices must be a tensor of integers, got list",
         lambda: layouts.clean([[0]], 8)),
        (TypeError, "block_indices must be a tensor, got list",
         lambda: layouts.permute([[0]], "TGn", "GTn")),
        (ValueError, r"block_counts must be \[2, 45, 2\], .*, got \[2, 2, 45\]",
         fla(torch.ones(B, G, S, dtype=torch.int32))),
        (ValueError, "block_counts must be at least 0, got -1", fla(-1)),
        (TypeError, "block_counts must be an int, got 2.0", fla(2.0)),
        (ValueError, "n must be at least 2", lambda: layouts.from_mask(mask, 1)),
        (ValueError, r"whole blocks of 8 tokens .* \[3, 8\] at \[0, 30, 0, 0\]", ranges(3, 8)),
        # A whole block, but beyond the query.
        (ValueError, r"up to the query, got \[24, 32\] at \[0, 30, 0, 0\]", ranges(24, 32)),
        (ValueError, r"ranges must be \[.., n, 2\] .*, got \[1, 8, 1, 2, 3\]",
         lambda: layouts.from_ranges(torch.zeros(1, 8, 1, 2, 3).int(), 8, 2)),
        (ValueError, "n_blocks must be over every block, of which 3 is one, got 3", wide(3)),
        (ValueError, "at least 0, got -1", wide(-1)),
        (TypeError, "n_blocks must be an int", wide(2.0)),
        *((ValueError, f"block_size must be at least 1, got {size}", clean(size))
          for size in (0, -8)),
    )  # fmt: skip


@pytest.mark.parametrize("code", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_the_migration_note_runs(code):
    assert len(EXAMPLES) == 2
    exec(compile(code, "migration.md", "exec"), {"__name__": "migration"})
