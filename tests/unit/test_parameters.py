"""How parameters divide over parallel ranks, and which ones multiply tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from simulator.spec.model import ModelSpec, MoeSpec
from simulator.spec.parameters import (
    active_parameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    matmul_parameters,
    mtp_parameters,
    total_parameters,
    vision_tokens,
)
from simulator.spec.presets import preset

SMALL = ModelSpec("small", layers=2, hidden=8, ffn=32, heads=4, kv_heads=2, head_dim=2, vocab=100)
GPT = replace(
    SMALL,
    kv_heads=4,
    norm="layernorm",
    activation="gelu",
    position="learned",
    max_positions=16,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    norm_bias=True,
    tied_embeddings=True,
)


def test_gpt_layer_is_the_megatron_count() -> None:
    # arXiv 2104.04473 section 5.1: 12 h^2 + 13 h in each layer.
    assert layer_parameters(GPT).total == 12 * 8**2 + 13 * 8


def test_parts_by_how_tensor_parallelism_divides_them() -> None:
    parts = layer_parameters(GPT)
    assert parts.attention_sharded == 8 * 8 + 8 * 8 + 8
    assert parts.attention_kv == 2 * (8 * 8 + 8)
    assert parts.mlp_sharded == 2 * 8 * 32 + 32
    assert parts.row_biases == 8 + 8
    assert parts.norms == 2 * 2 * 8
    assert parts.replicated == parts.norms + parts.row_biases


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen2-57b-a14b"])
def test_parts_sum_to_the_total(name: str) -> None:
    model = preset(name)
    for kind in ("dense", "moe") if model.moe else ("dense",):
        parts = layer_parameters(model, kind)
        assert parts.total == parts.tp_sharded + parts.experts + parts.replicated
        assert all(getattr(parts, f.name) >= 0 for f in fields(parts))


def test_grouped_keys_shrink_only_keys_and_values() -> None:
    full, grouped = layer_parameters(replace(SMALL, kv_heads=4)), layer_parameters(SMALL)
    assert grouped.attention_kv * 2 == full.attention_kv
    assert grouped.attention_sharded == full.attention_sharded


def test_gated_mlp_has_three_matrices() -> None:
    assert layer_parameters(SMALL).mlp_sharded == 3 * 8 * 32


def test_moe_layer_has_all_experts_router_and_shared_experts() -> None:
    moe = MoeSpec(4, 2, ffn=16, shared_experts=2, shared_gate=True, router_bias=True)
    parts = layer_parameters(replace(SMALL, moe=moe), "moe")
    assert parts.mlp_sharded == 0
    assert parts.experts == 4 * 3 * 8 * 16
    assert parts.shared_experts == 3 * 8 * 32
    assert parts.router == 8 * 4 + 8 + 4


def test_moe_layer_of_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no mixture-of-experts"):
        layer_parameters(SMALL, "moe")


def test_latent_attention_down_projections_are_replicated() -> None:
    # arXiv 2405.04434 section 2.1 with V2's widths: q 1536, kv 512 + 64 rotary.
    parts = layer_parameters(preset("deepseek-v2"))
    assert parts.attention_replicated == 5120 * (1536 + 512 + 64)
    assert parts.attention_kv == 0
    assert parts.norms == 2 * 5120 + 1536 + 512


def test_tied_head_counts_once() -> None:
    tied, untied = total_parameters(GPT), total_parameters(replace(GPT, tied_embeddings=False))
    assert untied - tied == 100 * 8
    assert matmul_parameters(GPT) == matmul_parameters(replace(GPT, tied_embeddings=False))


def test_narrow_embedding_projects_both_ways() -> None:
    model = replace(GPT, embedding_width=4)
    assert embedding_parameters(model).token == 100 * 4
    assert embedding_parameters(model).projection == head_parameters(model).projection == 4 * 8


def test_encoder_heads() -> None:
    head = head_parameters(preset("bert-base"))
    assert head.bias == 30522
    assert head.mlm == 768 * 768 + 3 * 768
    assert head.pooler == 768 * 768 + 768 + 2 * 768 + 2
    assert head.lm_head == head.final_norm == 0


def test_vision_transformer_positions_cover_patches_and_class_token() -> None:
    model = preset("vit-b-16")
    assert vision_tokens(model) == 14 * 14 + 1
    assert embedding_parameters(model).position == 197 * 768
    assert vision_tokens(SMALL) == 0


def test_active_parameters_leave_out_idle_experts() -> None:
    model = replace(SMALL, moe=MoeSpec(8, 2, ffn=16))
    assert total_parameters(model) - active_parameters(model) == 2 * 6 * 3 * 8 * 16
    assert active_parameters(SMALL) == total_parameters(SMALL)


def test_matmul_parameters_are_the_matrices_of_one_token() -> None:
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 32
    assert matmul_parameters(SMALL) == 2 * layer + 100 * 8


def test_matmul_parameters_of_experts_count_the_chosen_ones() -> None:
    few = matmul_parameters(replace(SMALL, moe=MoeSpec(8, 1, ffn=16)))
    more = matmul_parameters(replace(SMALL, moe=MoeSpec(8, 3, ffn=16)))
    assert more - few == 2 * 2 * 3 * 8 * 16


def test_prediction_modules_count_apart_from_the_main_model() -> None:
    model = replace(SMALL, mtp_layers=2)
    assert total_parameters(model) == total_parameters(SMALL)
    assert mtp_parameters(model) == 2 * (layer_parameters(SMALL).total + 2 * 64 + 3 * 8)


def test_dense_layers_before_and_between_moe_layers() -> None:
    model = replace(SMALL, layers=7, moe=MoeSpec(4, 1, ffn=16, dense_layers=1, every=2))
    dense, moe = layer_parameters(model).total, layer_parameters(model, "moe").total
    rest = embedding_parameters(model).total + head_parameters(model).total
    assert total_parameters(model) == 4 * dense + 3 * moe + rest
