"""Do the modules train, stay causal, take packed sequences and refuse what they cannot do?"""

import pytest
import torch

import nsa
from nsa import oracle
from nsa.config import NSAConfig
from nsa.module import NSAAttention, NSABlock
from nsa.rotary import rotary
from nsa.tests.cases import ends_of
from nsa.tests.helpers import assert_raises, randn

CONFIG = NSAConfig(dim=24, heads=4, groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=3, w=12)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return NSABlock(CONFIG).double()


def x(S=37, B=1, seed=1):
    return randn(B, S, 24, seed=seed, dtype=torch.float64)


def test_every_parameter_learns(block):
    block(x(B=2)).square().sum().backward()
    for name, p in block.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
        assert p.grad.isfinite().all(), name


def test_weights_of_three_projections_load(block):
    """As they were saved before the projections were one."""
    state = block.state_dict()
    parts = state.pop("attention.qkv.weight").split(block.attention.config.qkv_widths)
    state |= {f"attention.{n}.weight": part for n, part in zip("qkv", parts, strict=True)}
    other = NSABlock(block.attention.config).to(parts[0].dtype)
    assert not torch.equal(other.attention.qkv.weight, block.attention.qkv.weight)
    other.load_state_dict(state)
    assert torch.equal(other.attention.qkv.weight, block.attention.qkv.weight)
    del state["attention.k.weight"]
    with pytest.raises(RuntimeError, match="attention.qkv.weight"):
        other.load_state_dict(state)


def test_packed_equals_each_sequence_alone(block):
    lengths = [9, 1, 0, 27]
    packed = block(x()[0], ends_of(lengths))
    want = torch.cat([block(part)[0] for part in x().split(lengths, 1) if part.shape[1]])
    torch.testing.assert_close(packed, want, atol=1e-13, rtol=0)
    packed.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    for S in (0, 1):
        assert block(x()[:, :S]).shape == (1, S, 24)


@pytest.mark.parametrize("start", [5, 1_000_003])
def test_rotary_matches_the_oracle_far_away_too(start):
    y = randn(2, 9, 3, 8, seed=3)
    got = rotary(y, torch.arange(start, start + 9), 500.0)
    torch.testing.assert_close(got.double(), oracle.rotary(y, 500.0, start), atol=2e-6, rtol=0)


def test_autocast_bf16_runs_and_is_close():
    torch.manual_seed(0)
    model = nsa.NSALanguageModel(CONFIG, vocab_size=32, n_layers=1)
    ids = torch.arange(30)[None] % 32
    plain = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(ids)
        low.float().square().mean().backward()
        logits, caches = model.prefill(ids[:, :20])
        model.step(ids[:, 20:21], caches)
    assert caches[0].k_sel.dtype == torch.bfloat16
    assert (low.float() - plain).abs().max() < 0.05 * plain.abs().max()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_wrong_inputs(block):
    x, cu = torch.zeros(1, 3, 24).double(), torch.tensor([0, 3], dtype=torch.int32)
    make = lambda **given: lambda: NSAAttention(**{"config": CONFIG, **given})
    assert_raises(
        (ValueError, r"x must be \[B, S, dim\] with dim=24, got \[1, 3, 23\]",
         lambda: block.attention(x[..., :23])),
        (ValueError, r"x must be \[T, dim\] with dim=24, got \[1, 3, 24\]",
         lambda: block.attention(x, cu)),
        (ValueError, "n_layers must be at least 1, got 0",
         lambda: nsa.NSALanguageModel(CONFIG, vocab_size=4, n_layers=0)),
        (ValueError, "backend must be", make(backend="cudnn")),
        (TypeError, "flags must be an nsa.Flags, got dict", make(flags={})),
        (TypeError, "config must be an nsa.NSAConfig, got dict", make(config={})),
    )  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_layer_on_meta_tensors_has_shapes():
    layer = NSAAttention(CONFIG).to("meta")
    y = layer(torch.empty(2, 40, CONFIG.dim, device="meta"))
    assert y.shape == (2, 40, CONFIG.dim) and y.device.type == "meta"


def test_a_layer_made_on_meta_tensors_gets_its_parameters():
    with torch.device("meta"):
        layer = NSAAttention(CONFIG)
    layer = layer.to_empty(device="cpu")
    for p in layer.parameters():
        p.detach().fill_(float("nan"))
    for module in layer.modules():
        getattr(module, "reset_parameters", lambda: None)()
    assert layer(torch.randn(1, 20, CONFIG.dim)).isfinite().all()
