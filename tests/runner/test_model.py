"""The runner's model: parameter counts, values, and logits against Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from real_runner.layers import Details, RmsNorm, window_of  # noqa: E402
from real_runner.model import Transformer, materialise, token_loss  # noqa: E402
from simulator.errors import UserError  # noqa: E402
from simulator.spec.model import MlaSpec, ModelSpec, MoeSpec  # noqa: E402
from simulator.spec.parameters import total_parameters  # noqa: E402
from simulator.spec.presets import preset, preset_names  # noqa: E402

TINY = ModelSpec("tiny", 2, 32, 48, 4, 2, 8, 67, max_positions=64)


def build(spec: ModelSpec, details: Details | None = None, seed: int = 1) -> Transformer:
    return materialise(Transformer(spec, details), seed=seed, device="cpu", dtype=torch.float64)


def tokens(spec: ModelSpec, batch: int = 2, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, spec.vocab, (batch, length), generator=generator)


def cut(name: str) -> ModelSpec:
    """A preset of at most four layers, with both kinds where it has dense and MoE layers."""
    spec = preset(name)
    short = spec.with_layers(min(spec.layers, 4))
    if short.moe and short.moe.experts > 16:
        short = replace(short, moe=replace(short.moe, experts=16))
    return short


@pytest.mark.parametrize("name", preset_names())
def test_parameter_count_is_that_of_the_spec(name: str) -> None:
    spec = cut(name)
    try:
        model = Transformer(spec)
    except UserError as error:
        assert spec.vision or not spec.causal, error
        return
    count = sum(p.numel() for p in model.parameters())
    assert count == total_parameters(spec)


def test_llama_2_7b_has_its_published_size() -> None:
    model = Transformer(preset("llama-2-7b"))
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_what_the_runner_lacks_is_named() -> None:
    with pytest.raises(UserError, match="mlm_head"):
        Transformer(replace(TINY, causal=False, mlm_head=True))


def test_same_seed_gives_same_values() -> None:
    first, second, other = build(TINY, seed=1), build(TINY, seed=1), build(TINY, seed=2)
    assert torch.equal(first.head.output.weight, second.head.output.weight)
    assert not torch.equal(first.head.output.weight, other.head.output.weight)


VARIANTS = {
    "windowed": replace(TINY, window=4, window_layers=1),
    "alibi": replace(TINY, position="alibi"),
    "moe": replace(TINY, moe=MoeSpec(4, 2, 24, shared_experts=1, shared_gate=True)),
    "latent": replace(TINY, kv_heads=4, mla=MlaSpec(16, 8, 4, 8, q_lora_rank=12)),
    "four norms": replace(TINY, norms_per_layer=4, qk_norm="head", activation="geglu"),
    "parallel": replace(TINY, parallel_block=True, norms_per_layer=1, qk_norm="full"),
    "narrow embedding": replace(TINY, embedding_width=16, tied_embeddings=True, head_bias=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_depends_only_on_those_before_it(name: str) -> None:
    spec = VARIANTS[name]
    model, ids = build(spec), tokens(spec)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % spec.vocab
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-12)
    assert not torch.allclose(before[:, 9], after[:, 9], atol=1e-6)


def test_window_hides_what_is_far() -> None:
    spec = replace(TINY, layers=1, window=4, window_layers=1)
    model, ids = build(spec), tokens(spec)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % spec.vocab
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[2:6] > 1e-8).all()
    assert (difference[6:] == 0).all()


def test_full_layers_close_groups_of_windowed_ones() -> None:
    spec = preset("gemma-3-27b")  # one full layer after five windowed ones: arXiv 2503.19786
    full = [i for i in range(spec.layers) if window_of(spec, i) is None]
    assert full == list(range(5, 60, 6))


def test_every_parameter_gets_a_gradient() -> None:
    for spec in VARIANTS.values():
        model, ids = build(spec), tokens(spec, batch=4)
        token_loss(model(ids), ids.roll(-1)).backward()
        idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert idle == [], (spec, idle)


def test_rms_norm_equals_its_formula() -> None:
    torch.manual_seed(0)
    norm = RmsNorm(16, 1e-5).double()
    norm.weight.data.normal_()
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    expected = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    assert torch.allclose(norm(x), expected, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))
