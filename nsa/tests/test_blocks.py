"""Do block counts, overlaps and read counts match counting by hand?"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from nsa import blocks, oracle, select
from nsa.config import NSAConfig

SIZES = [(32, 16, 64), (8, 4, 8), (8, 8, 16), (4, 2, 12), (6, 3, 3), (16, 4, 8), (1, 1, 1)]


@pytest.mark.parametrize(("l", "d", "l_sel"), SIZES)
def test_counts(l, d, l_sel):
    for S in range(0, 3 * l + 2 * l_sel):
        starts = [i for i in range(0, S + 1, d) if i + l <= S]
        assert blocks.num_compressed(S, l, d) == len(starts)
        assert blocks.visible_compressed(S, l, d) == oracle.visible_count(S, l, d)
        assert blocks.num_sel_blocks(S, l_sel) == len(range(0, S, l_sel))
    every = [blocks.num_compressed(s, l, d) for s in range(3 * l)]
    assert blocks.num_compressed(torch.arange(3 * l), l, d).tolist() == every


def test_paper_sizes_pool_with_one_two_two_two_one():
    matrix = select._pooled(torch.eye(9), 32, 16, 64, n_blocks=2)
    assert (matrix[:, 1] * 2).tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0]


def test_packed_offsets():
    cu = torch.tensor([0, 7, 7, 20, 28], dtype=torch.int32)
    got = blocks.cu_seqlens_compressed(cu, 8, 4)
    assert got.tolist() == [0, 0, 0, 2, 3] and got.dtype == torch.int32


def test_reads_formula_by_counting():
    l, d, l_sel, n_sel, w = 8, 4, 8, 3, 12
    for S in range(1, 60):
        scores = torch.rand(10, generator=torch.Generator().manual_seed(S)).tolist()
        chosen = oracle.top_blocks(scores, S - 1, l_sel, n_sel)
        tokens = {x for j in chosen for x in range(j * l_sel, (j + 1) * l_sel) if x < S}
        want = oracle.visible_count(S - 1, l, d) + len(tokens) + len(range(max(0, S - w), S))
        assert blocks.reads(S, l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w) == want
    assert blocks.reads(0, l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=w) == 0


GOOD = dict(dim=64, heads=4, groups=2, d_k=16, d_v=16)


@pytest.mark.parametrize("change, error, match", [
    (dict(groups=3), ValueError, "groups must divide heads"),
    (dict(d_k=15), ValueError, "d_k must be even"),
    (dict(n_sel=0), ValueError, "n_sel must be at least 1, got 0"),
    (dict(n_sel=4, n_init=2, n_local=3), ValueError, "got n_sel=4 n_init=2 n_local=3"),
    (dict(w=0), ValueError, "w must be at least 1"),
    (dict(w=5, window=6), ValueError, "window and w are one setting, .*, got window=6 w=5"),
    (dict(n_local=0), ValueError, "n_local"),
    (dict(heads=4.0), TypeError, "heads must be an int, got"),
    (dict(l=True), TypeError, "l must be an int, got"),
    (dict(phi="max"), ValueError, "phi must be 'mlp' or 'mean'"),
    (dict(rope_base=float("inf")), ValueError, "rope_base"),
    (dict(l=32, d=12), ValueError, "d must divide"), (dict(l=0), ValueError, "l must"),
    (dict(l=32, d=16, l_sel=24), ValueError, "d must divide"), (dict(d=0), ValueError, "d must"),
    (dict(l_sel=-8), ValueError, "l_sel must"),
])  # fmt: skip
def test_bad_config(change, error, match):
    with pytest.raises(error, match=match):
        NSAConfig(**GOOD | change)


def test_config_from_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {dim: 64, heads: 4, groups: 2, d_k: 16, d_v: 8}\nnsa: {n_sel: 4}\n")
    config = NSAConfig.from_yaml(path)
    assert config == NSAConfig(dim=64, heads=4, groups=2, d_k=16, d_v=8, n_sel=4)
    assert config.heads_per_group == 2
    for text, told in (
        ("model: {dim: 64}\nnsa: {nsel: 4}\n", "nsa.nsel is not a setting; did you mean n_sel"),
        ("model: {dim: 64}\nnsa: {}\n", "missing heads, groups, d_k, d_v"),
        ("model: {}\nnsa: {w: 5, window: 6}\n", "nsa.w and nsa.window are one .*, got 5 and 6"),
        ("model: {window: 5}\nnsa: {w: 6}\n", "model.window and nsa.w are one .*, got 5 and 6"),
        ("model: {l: 8}\nnsa: {l: 16}\n", "model.l and nsa.l are one .*, got 8 and 16"),
        ("nsa: {}\n", "section model must be a mapping, got None"),
        ("model: {dim: 64}\n", "section nsa must be a mapping, got None"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            NSAConfig.from_yaml(path)


def test_the_window_goes_by_either_name():
    config = NSAConfig(**GOOD, window=24)
    assert config == NSAConfig(**GOOD, w=24) and config.window == config.w == 24
    assert replace(config, window=9).window == 9
    with pytest.raises(ValueError, match="window and w are one setting"):
        replace(config, w=9)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_what_was_written_with_the_old_name_is_read(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(str({"model": GOOD, "nsa": {"w": 24}}))  # a mapping in YAML's flow style
    assert NSAConfig.from_yaml(path).window == 24
    config = NSAConfig(**GOOD, window=7)
    before = object.__new__(NSAConfig)
    state = {**vars(config), "w": 24}
    del state["window"]
    before.__setstate__(state)
    assert before == replace(config, window=24)
