"""Model families of Hugging Face transformers: what a config's keys mean, and their defaults.

Each function reads one family's ``config.json`` into ModelSpec fields. Defaults are those of the
family's configuration class in transformers, the biases, norms and ties those of its model class.
Llama's descendants are here, the others in :mod:`simulator.spec.hf_gpt_families`.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.spec import hf_gpt_families as gpt
from simulator.spec.hf_reader import ConfigReader, Fields, activation_of, head_width
from simulator.spec.model import MlaSpec, MoeSpec


def _llama_like(
    r: ConfigReader,
    sizes: tuple[int, int, int, int, int | None, int],
    *,
    positions: int = 2048,
    activation: str = "silu",
    gated: bool = True,
    tied: bool = False,
    head_dim: int | None = None,
) -> Fields:
    """Fields that Llama and its descendants share.

    ``sizes`` are the defaults of hidden, ffn, layers, heads, key/value heads (None: as many as
    heads) and vocabulary.
    """
    hidden = r.whole("hidden_size", default=sizes[0], essential=True)
    heads = r.whole("num_attention_heads", default=sizes[3], essential=True)
    return {
        "hidden": hidden,
        "ffn": r.whole("intermediate_size", default=sizes[1], essential=True),
        "layers": r.whole("num_hidden_layers", default=sizes[2], essential=True),
        "heads": heads,
        "kv_heads": r.whole("num_key_value_heads", default=sizes[4] or heads),
        "head_dim": head_width(r, hidden, heads, r.optional("head_dim") or head_dim),
        "vocab": r.whole("vocab_size", default=sizes[5], essential=True),
        "max_positions": r.whole("max_position_embeddings", default=positions),
        "tied_embeddings": r.flag("tie_word_embeddings", default=tied),
        "activation": activation_of(
            r, "hidden_activation", "hidden_act", default=activation, gated=gated
        ),
        "norm": "rmsnorm",
        "position": "rope",
        "dropout": max(r.share("attention_dropout"), r.share("resid_pdrop", "hidden_dropout")),
    }


def _windowed(r: ConfigReader, fields: Fields, default: int | None, every: int | None) -> Fields:
    """Adds the attention window: ``layer_types`` decides, else all but each ``every``-th layer."""
    window = r.optional("sliding_window")
    window = default if window is None and "sliding_window" not in r.config else window
    kinds = r.items("layer_types")
    layers = fields["layers"]
    if kinds is not None:
        unknown = sorted({str(k) for k in kinds} - {"sliding_attention", "full_attention"})
        if unknown:
            hint = "known: sliding_attention, full_attention"
            r.fault("layer_types", f"the layer type {unknown[0][:40]!r} is not known", hint)
        elif len(kinds) != layers:
            hint = f"one for each of the {layers:,} layers"
            r.fault("layer_types", f"has {len(kinds):,} entries", hint)
        count = kinds.count("sliding_attention")
    else:
        count = layers - layers // every if every else layers
    if window is None or count == 0:
        return fields
    return fields | {"window": window, "window_layers": min(count, layers)}


def _biases(r: ConfigReader) -> Fields:
    """``attention_bias`` and ``mlp_bias`` as Llama has them (query, key, value and output)."""
    bias = r.flag("attention_bias", default=False)
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": r.flag("mlp_bias", default=False),
    }


def _llama(r: ConfigReader) -> Fields:
    return _llama_like(r, (4096, 11008, 32, 32, None, 32000)) | _biases(r)


def _mistral(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (4096, 14336, 32, 32, 8, 32000), positions=131072)
    return _windowed(r, fields, 4096, None)


def _mixtral(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (4096, 14336, 32, 32, 8, 32000), positions=131072)
    experts = r.whole("num_local_experts", default=8)
    top_k = r.whole("num_experts_per_tok", default=2)
    fields["moe"] = MoeSpec(experts, top_k, fields["ffn"])
    return _windowed(r, fields, None, None)


def _qwen_window(r: ConfigReader, fields: Fields) -> Fields:
    """Qwen has windows only where ``use_sliding_window`` asks, from ``max_window_layers`` on."""
    if not r.flag("use_sliding_window", default=False):
        r.raw("sliding_window", "max_window_layers", "layer_types")
        return fields
    first = r.whole("max_window_layers", default=28, low=0)
    fields = _windowed(r, fields, 4096, None)
    if r.raw("layer_types") is None and "window" in fields:
        count = max(0, fields["layers"] - first)
        fields["window_layers"] = count
        if not count:
            fields.pop("window")
    return fields


def _qwen2(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (4096, 22016, 32, 32, 32, 151936), positions=32768)
    return _qwen_window(r, fields | {"qkv_bias": True})


def _qwen3(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (4096, 22016, 32, 32, 32, 151936), positions=32768, head_dim=128)
    return _qwen_window(r, fields | _biases(r) | {"qk_norm": "head"})


def _sparse(r: ConfigReader, experts: int, top_k: int, ffn: int, layers: int) -> Fields:
    """Expert counts of Qwen's MoE, with the layers that stay dense."""
    dense = r.items("mlp_only_layers") or []
    leading = sum(1 for i, layer in enumerate(sorted(map(str, dense))) if layer == str(i))
    if leading != len(dense):
        r.warn("mlp_only_layers", "only leading dense layers are counted as dense")
    return {
        "experts": r.whole("num_experts", default=experts),
        "top_k": r.whole("num_experts_per_tok", default=top_k),
        "ffn": r.whole("moe_intermediate_size", default=ffn),
        "every": r.whole("decoder_sparse_step", default=1),
        "dense_layers": min(leading, layers),
    }


def _qwen2_moe(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (2048, 5632, 24, 16, 16, 151936), positions=32768)
    moe = _sparse(r, 60, 4, 1408, fields["layers"])
    shared = r.whole("shared_expert_intermediate_size", default=5632)
    fields["moe"] = MoeSpec(**moe, shared_experts=1, shared_ffn=shared, shared_gate=True)
    return _qwen_window(r, fields | {"qkv_bias": r.flag("qkv_bias", default=True)})


def _qwen3_moe(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (2048, 6144, 24, 32, 4, 151936), positions=32768)
    fields["moe"] = MoeSpec(**_sparse(r, 128, 8, 768, fields["layers"]))
    return _qwen_window(r, fields | _biases(r) | {"qk_norm": "head"})


def _gemma_like(r: ConfigReader, sizes: tuple[int, int, int, int, int, int], top: int) -> Fields:
    return _llama_like(
        r,
        sizes,
        positions=top,
        activation="gelu_pytorch_tanh",
        tied=True,
        head_dim=256,
    ) | {k: v for k, v in _biases(r).items() if k != "mlp_bias"}


def _gemma(r: ConfigReader) -> Fields:
    # hidden_act names what an early checkpoint was written with; the model uses tanh-GELU.
    return _gemma_like(r, (3072, 24576, 28, 16, 16, 256000), 8192)


def _gemma2(r: ConfigReader) -> Fields:
    fields = _gemma_like(r, (2304, 9216, 26, 8, 4, 256000), 8192)
    return _windowed(r, fields | {"norms_per_layer": 4}, 4096, 2)


def _gemma3(r: ConfigReader) -> Fields:
    fields = _gemma_like(r, (2304, 9216, 26, 8, 4, 262208), 131072)
    fields |= {"norms_per_layer": 4, "qk_norm": "head"}
    every = r.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _windowed(r, fields, 4096, every)


def _phi3(r: ConfigReader) -> Fields:
    fields = _llama_like(r, (3072, 8192, 32, 32, None, 32064), positions=4096)
    return _windowed(r, fields, None, None)


def _nemotron(r: ConfigReader) -> Fields:
    fields = _llama_like(
        r,
        (6144, 24576, 32, 48, None, 256000),
        positions=4096,
        activation="relu2",
        gated=False,
    )
    return fields | _biases(r) | {"norm": "layernorm", "norm_bias": True}


def _deepseek(r: ConfigReader, sizes: tuple[int, int, int, int, int], v3: bool) -> Fields:
    hidden, ffn, layers, heads, vocab = sizes
    fields = _llama_like(r, (hidden, ffn, layers, heads, heads, vocab), positions=2048)
    fields["mla"] = MlaSpec(
        kv_lora_rank=r.whole("kv_lora_rank", default=512),
        qk_nope_head_dim=r.whole("qk_nope_head_dim", default=128),
        qk_rope_head_dim=r.whole("qk_rope_head_dim", default=64),
        v_head_dim=r.whole("v_head_dim", default=128),
        q_lora_rank=1536 if "q_lora_rank" not in r.config else r.optional("q_lora_rank"),
    )
    fields["head_dim"] = fields["mla"].qk_head_dim
    fields["kv_heads"] = fields["heads"]
    if r.flag("attention_bias", default=False):
        r.warn("attention_bias", "biases of the latent projections are not counted")
    routed = r.optional("n_routed_experts") if "n_routed_experts" in r.config else 256 if v3 else 64
    if routed is not None:
        fields["moe"] = MoeSpec(
            experts=routed,
            top_k=r.whole("num_experts_per_tok", default=8 if v3 else 2),
            ffn=r.whole("moe_intermediate_size", default=2048 if v3 else 1407),
            shared_experts=r.whole("n_shared_experts", default=1 if v3 else 0, low=0),
            router_bias=v3,
            dense_layers=r.whole("first_k_dense_replace", default=3 if v3 else 0, low=0),
            every=r.whole("moe_layer_freq", default=1),
        )
    if v3:
        fields["mtp_layers"] = r.whole("num_nextn_predict_layers", default=0, low=0)
    return fields


def _deepseek_v2(r: ConfigReader) -> Fields:
    return _deepseek(r, (4096, 11008, 32, 32, 32000), v3=False)


def _deepseek_v3(r: ConfigReader) -> Fields:
    return _deepseek(r, (7168, 18432, 61, 128, 129280), v3=True)


FAMILIES: dict[str, Callable[[ConfigReader], Fields]] = {
    "bert": gpt.bert,
    "bloom": gpt.bloom,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "falcon": gpt.falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": gpt.gpt2,
    "gpt_neo": gpt.gpt_neo,
    "gpt_neox": gpt.gpt_neox,
    "gptj": gpt.gptj,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": gpt.mpt,
    "nemotron": _nemotron,
    "opt": gpt.opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "vit": gpt.vit,
}

#: Other spellings of a ``model_type``.
SAME_FAMILY = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon", "gemma3": "gemma3_text"}
