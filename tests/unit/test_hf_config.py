"""Hugging Face configs: each family reads as its preset, and faulty ones say what is wrong.

The figures are those of the named repositories' config.json on huggingface.co.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import UserError
from simulator.spec.hf_config import load_hf_config, model_from_hf_config
from simulator.spec.hf_families import FAMILIES
from simulator.spec.model import ModelSpec
from simulator.spec.parameters import total_parameters
from simulator.spec.presets import preset


def llama(kind: str, h: int, f: int, n: int, a: int, kv: int, v: int, top: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": n,
        "num_attention_heads": a,
        "num_key_value_heads": kv,
        "vocab_size": v,
        "max_position_embeddings": top,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "use_cache": True,
        "transformers_version": "4.43.0",
    } | more


def gpt(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "bos_token_id": 50256, "initializer_range": 0.02} | more


QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
OPT = {"max_position_embeddings": 2048, "vocab_size": 50272, "dropout": 0.1, "layerdrop": 0.0}
MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "hidden_act": "silu",
    "attention_bias": False,
}
CONFIGS: dict[str, Any] = {
    "llama-3.1-8b": llama(
        "llama", 4096, 14336, 32, 32, 8, 128256, 131072, hidden_act="silu", attention_bias=False
    ),
    "llama-3.2-3b": llama(
        "llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True
    ),
    "mistral-7b-v0.1": llama("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
    "mistral-7b-v0.3": llama("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "mixtral-8x7b": llama(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-7b": llama("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, **QWEN_WINDOW),
    "qwen1.5-moe-a2.7b": llama(
        "qwen2_moe",
        *(2048, 5632, 24, 16, 16, 151936, 8192),
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        **QWEN_WINDOW,
    ),
    "qwen3-8b": llama(
        "qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128, attention_bias=False
    ),
    "qwen3-30b-a3b": llama(
        "qwen3_moe",
        *(2048, 6144, 48, 32, 4, 151936, 40960),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    ),
    "gemma-7b": llama(
        "gemma", 3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, hidden_act="gelu"
    ),
    "gemma-2-9b": llama(
        "gemma2",
        *(3584, 14336, 42, 16, 8, 256000, 8192),
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=4096,
        attn_logit_softcapping=50.0,
    ),
    "gemma-3-1b": llama(
        "gemma3_text",
        *(1152, 6912, 26, 4, 1, 262144, 32768),
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    # Holds only what differs from Gemma3TextConfig's defaults.
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    },
    "phi-3-mini-4k": llama(
        "phi3", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047, resid_pdrop=0.0
    ),
    "nemotron-4-15b": llama(
        "nemotron", 6144, 24576, 32, 48, 8, 256000, 4096, hidden_act="relu2", head_dim=128
    ),
    "deepseek-v2": llama(
        "deepseek_v2",
        *(5120, 12288, 60, 128, 128, 102400, 163840),
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        **MLA,
    ),
    "deepseek-v2-lite": llama(
        "deepseek_v2",
        *(2048, 10944, 27, 16, 16, 102400, 163840),
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        **(MLA | {"q_lora_rank": None}),
    ),
    "deepseek-v3": llama(
        "deepseek_v3",
        *(7168, 18432, 61, 128, 128, 129280, 163840),
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        **MLA,
    ),
    "gpt2-xl": gpt(
        "gpt2", n_embd=1600, n_layer=48, n_head=25, n_positions=1024, n_ctx=1024, vocab_size=50257
    ),
    "gpt-neo-1.3b": gpt(
        "gpt_neo",
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        intermediate_size=None,
        window_size=256,
        attention_types=[[["global", "local"], 12]],
        vocab_size=50257,
        max_position_embeddings=2048,
    ),
    "gpt-j-6b": gpt("gptj", n_embd=4096, n_layer=28, n_head=16, rotary_dim=64, vocab_size=50400),
    "gpt-neox-20b": gpt(
        "gpt_neox",
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        vocab_size=50432,
        hidden_act="gelu_fast",
        rotary_pct=0.25,
        tie_word_embeddings=False,
    ),
    "opt-350m": gpt(
        "opt",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
        activation_function="relu",
        **OPT,
    ),
    "opt-1.3b": gpt(
        "opt",
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        ffn_dim=8192,
        word_embed_proj_dim=2048,
        **OPT,
    ),
    "bloom-176b": gpt(
        "bloom", n_embed=14336, n_layer=70, num_attention_heads=112, vocab_size=250880
    ),
    "mpt-7b-hub": gpt(
        "mpt",
        d_model=4096,
        n_layers=32,
        n_heads=32,
        expansion_ratio=4,
        max_seq_len=2048,
        vocab_size=50432,
        no_bias=True,
        learned_pos_emb=True,
        attn_config={"alibi": True, "attn_type": "multihead_attention", "qk_ln": False},
    ),
    "falcon-7b": gpt(
        "falcon",
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        bias=False,
        alibi=False,
        vocab_size=65024,
    ),
    "falcon-40b": gpt(
        "falcon",
        hidden_size=8192,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_kv_heads=8,
        new_decoder_architecture=True,
        vocab_size=65024,
    ),
    "bert-large": gpt(
        "bert",
        architectures=["BertForPreTraining"],
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=30522,
        type_vocab_size=2,
        hidden_dropout_prob=0.1,
    ),
    "vit-b-16": gpt(
        "vit",
        architectures=["ViTForImageClassification"],
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        image_size=224,
        patch_size=16,
        id2label={str(i): "a thing" for i in range(1000)},
        hidden_dropout_prob=0.0,
    ),
}


def same_shape(model: ModelSpec, other: ModelSpec) -> bool:
    return replace(model, name="", source="") == replace(other, name="", source="")


@pytest.mark.parametrize("name", CONFIGS)
def test_config_reads_as_its_preset(name: str) -> None:
    model = model_from_hf_config(CONFIGS[name], name)
    assert same_shape(model, preset(name))
    assert model.name == name


def test_every_family_is_read_here() -> None:
    read = {config["model_type"] for config in CONFIGS.values()}
    assert set(FAMILIES) <= read


def test_ordinary_config_warns_of_nothing() -> None:
    assert model_from_hf_config(CONFIGS["llama-3.1-8b"]).warnings == ()
    assert model_from_hf_config(CONFIGS["gpt2-xl"]).warnings == ()


@pytest.mark.parametrize(
    ("kind", "more", "name"),
    [
        ("RefinedWebModel", {"n_head": 71, "n_layer": 32, "hidden_size": 4544}, "falcon-7b"),
        (
            "RefinedWeb",
            {"n_head": 128, "n_head_kv": 8, "n_layer": 60, "hidden_size": 8192},
            "falcon-40b",
        ),
    ],
)
def test_first_falcon_configs(kind: str, more: dict[str, int], name: str) -> None:
    config = gpt(kind, vocab_size=65024, parallel_attn=True, bias=False, **more)
    if kind == "RefinedWebModel":
        config["multi_query"] = True
    assert same_shape(model_from_hf_config(config), preset(name))


def test_old_falcon_without_parallel_attention_has_two_norms_and_all_heads() -> None:
    config = CONFIGS["falcon-7b"] | {"parallel_attn": False, "multi_query": False, "alibi": True}
    model = model_from_hf_config(config)
    assert (model.norms_per_layer, model.kv_heads, model.position) == (2, 71, "alibi")


def test_masked_language_model_has_no_pooler() -> None:
    model = model_from_hf_config({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    # Without pooler and next-sentence classifier: a well-known count of bert-base-uncased.
    assert total_parameters(model) == 109_514_298


def test_layer_types_decide_the_window() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = llama("gemma3_text", 64, 128, 6, 4, 2, 1000, 4096, sliding_window=16)
    model = model_from_hf_config(config | {"layer_types": kinds})
    assert (model.window, model.window_layers) == (16, 4)


def test_leading_dense_layers_of_qwen_moe() -> None:
    model = model_from_hf_config(CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [0, 1]})
    assert model.moe is not None
    assert (model.moe.dense_layers, model.moe_layers) == (2, 46)


def test_absent_dimension_is_the_familys_default_and_named() -> None:
    model = model_from_hf_config({"model_type": "llama", "hidden_size": 2048})
    assert model.layers == 32
    assert any("num_hidden_layers: is absent" in w for w in model.warnings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 8),
        ("kv_lora_rank", 512),
        ("sliding_window_size", 128),
        ("quantization_config", {"bits": 4}),
        ("add_cross_attention", True),
        ("linear_key_head_dim", 128),
    ],
)
def test_ignored_field_that_changes_the_cost_is_a_warning(key: str, value: Any) -> None:
    model = model_from_hf_config(CONFIGS["llama-3.1-8b"] | {key: value})
    assert any(w.startswith(key) for w in model.warnings)


def test_vision_tower_is_a_warning() -> None:
    warnings = model_from_hf_config(CONFIGS["gemma-3-4b"]).warnings
    assert any(w.startswith("vision_config") for w in warnings)


def test_text_model_inside_an_unknown_wrapper_is_read() -> None:
    wrapped = {"model_type": "llava_next", "text_config": CONFIGS["mistral-7b-v0.3"]}
    assert same_shape(model_from_hf_config(wrapped), preset("mistral-7b-v0.3"))


@pytest.mark.parametrize("kind", ["mamba2", "lama", None, 7, ["llama"]])
def test_unknown_model_type_lists_the_known(kind: Any) -> None:
    with pytest.raises(UserError, match=r"model_type.*known: bert.*llama.*vit"):
        model_from_hf_config({"model_type": kind, "hidden_size": 64})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "4096", "expected a whole number, got '4096'"),
        ("hidden_size", -1, "out of range"),
        ("hidden_size", 0, "out of range"),
        ("hidden_size", 10**30, "out of range"),
        ("num_hidden_layers", float("nan"), "expected a whole number, got nan"),
        ("num_hidden_layers", float("inf"), "expected a whole number, got inf"),
        ("num_hidden_layers", 1.5, "expected a whole number, got 1.5"),
        ("num_hidden_layers", True, "expected a whole number, got True"),
        ("num_hidden_layers", [32], "expected a whole number, got a list"),
        ("num_attention_heads", 31, "not divisible by 31"),
        ("num_key_value_heads", 5, "do not divide"),
        ("tie_word_embeddings", "yes", "expected true or false"),
        ("hidden_act", "xielu", "is not known"),
        ("hidden_act", 3, "expected text"),
        ("attention_dropout", 2, "expected a probability"),
    ],
)
def test_faulty_field_says_what_would_be_right(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        model_from_hf_config(CONFIGS["llama-3.1-8b"] | {key: value})
    problem = caught.value.problems[0]
    assert message in problem.message
    assert problem.hint


def test_all_faults_are_reported_at_once() -> None:
    config = CONFIGS["mixtral-8x7b"] | {
        "hidden_size": -1,
        "vocab_size": "x",
        "num_local_experts": 1,
    }
    with pytest.raises(UserError) as caught:
        model_from_hf_config(config)
    paths = [p.path for p in caught.value.problems]
    assert paths == ["hidden_size", "vocab_size", "num_experts_per_tok"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt-neo-1.3b", {"attention_types": ["local"]}),
        ("mpt-7b-hub", {"attn_config": []}),
        ("gemma-3-1b", {"layer_types": ["full_attention"]}),
        ("gemma-3-1b", {"layer_types": ["mamba"] * 26}),
        ("deepseek-v3", {"first_k_dense_replace": 62}),
        ("vit-b-16", {"patch_size": 512}),
    ],
)
def test_family_specific_faults(name: str, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(more))):
        model_from_hf_config(CONFIGS[name] | more)


@pytest.mark.parametrize("data", [[], "llama", 3, None])
def test_not_an_object(data: Any) -> None:
    with pytest.raises(UserError, match="is an object"):
        model_from_hf_config(data)


def test_file_is_read_and_named_after_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "my-model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGS["llama-3.1-8b"]), encoding="utf-8")
    assert load_hf_config(path).name == "my-model"


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "{'model_type': 'llama'}"])
def test_file_that_is_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is not JSON"):
        load_hf_config(path)


def test_huge_file_and_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with open(path, "wb") as stream:
        stream.truncate(100_000_000)
    with pytest.raises(UserError, match="too large"):
        load_hf_config(path)
    with pytest.raises(UserError, match="directory"):
        load_hf_config(tmp_path)
