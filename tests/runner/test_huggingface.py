"""Logits equal those of Hugging Face transformers for the same config and weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the oracle: pip install transformers")

from real_runner.layers import Details  # noqa: E402
from real_runner.model import Transformer, materialise  # noqa: E402
from simulator.spec.hf_config import model_from_hf_config  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 5},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 16},
    "qwen3_moe": SIZES
    | {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}

_GPT2_NAMES = (
    ("transformer.wte", "embedding.token"),
    ("transformer.wpe", "embedding.position"),
    ("transformer.ln_f", "head.norm"),
    ("transformer.h.", "layers."),
    (".ln_1", ".attention_norm"),
    (".ln_2", ".mlp_norm"),
    (".attn.c_proj", ".attention.out"),
    (".mlp.c_fc", ".mlp.up"),
    (".mlp.c_proj", ".mlp.down"),
)
_LLAMA_NAMES = (
    ("model.embed_tokens", "embedding.token"),
    ("lm_head.weight", "head.output.weight"),
    ("model.norm", "head.norm"),
    ("model.layers.", "layers."),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "mlp_norm"),
    ("self_attn.", "attention."),
    ("o_proj", "out"),
    ("block_sparse_moe", "mlp"),
    ("mlp.gate.weight", "mlp.router.weight"),
    ("_proj", ""),
)


def converted(state: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Weights of transformers under the runner's names; fused matrices are split."""
    result: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        for old, new in _GPT2_NAMES if family == "gpt2" else _LLAMA_NAMES:
            name = name.replace(old, new)
        if family == "gpt2" and ".attn.c_attn" in name:
            for part, piece in zip("qkv", value.chunk(3, dim=-1), strict=True):
                result[name.replace("attn.c_attn", f"attention.{part}")] = piece.t()
        elif family == "gpt2" and value.dim() == 2 and name.startswith("layers"):
            result[name] = value.t()
        elif name.endswith("experts.gate_up"):
            gate, up = value.chunk(2, dim=1)
            result |= {name[:-7] + "gate": gate, name[:-7] + "up": up}
        else:
            result[name] = value
    return result


@pytest.mark.parametrize("family", CASES)
def test_logits_equal(family: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CASES[family])
    config._attn_implementation = config._experts_implementation = "eager"
    oracle = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in oracle.parameters():  # biases and norms away from their neutral values
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    rope = getattr(config, "rope_parameters", None) or {}
    details = Details(rope_theta=float(rope.get("rope_theta", 10_000.0)))
    spec = model_from_hf_config({"model_type": family, **CASES[family]})
    model = Transformer(spec, details)
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    state = converted(oracle.state_dict(), family)
    state = {k: v for k, v in state.items() if k in dict(model.named_parameters())}
    model.load_state_dict(state)
    ids = torch.randint(0, 97, (2, 24))
    # transformers computes norms and rotary tables in fp32 whatever the weights' dtype.
    assert torch.allclose(model(ids), oracle(ids).logits, atol=2e-5, rtol=1e-5)
