"""GPT-2's descendants and encoders as Hugging Face configs: LayerNorm, plain MLP, mostly biases.

Defaults are those of the family's configuration class in transformers, the biases, norms and ties
those of its model class.
"""

from __future__ import annotations

from simulator.spec.hf_reader import ConfigReader, Fields, activation_of, head_width
from simulator.spec.model import VisionSpec

BIASED = {
    "norm": "layernorm",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
}


def _gpt_sizes(
    r: ConfigReader, hidden: int, layers: int, heads: int, vocab: int, positions: int
) -> Fields:
    """Dimensions under the names of the GPT-2 generation; keys and values for every head."""
    width = r.whole("n_embd", "hidden_size", "n_embed", default=hidden, essential=True)
    count = r.whole("n_head", "num_attention_heads", "num_heads", default=heads, essential=True)
    return {
        "hidden": width,
        "layers": r.whole(
            "n_layer", "num_hidden_layers", "num_layers", default=layers, essential=True
        ),
        "heads": count,
        "kv_heads": count,
        "head_dim": head_width(r, width, count, None),
        "ffn": r.whole("n_inner", "intermediate_size", "ffn_dim", default=4 * width),
        "vocab": r.whole("vocab_size", default=vocab, essential=True),
        "max_positions": r.whole(
            "n_positions", "max_position_embeddings", "seq_length", default=positions
        ),
    }


def gpt2(r: ConfigReader) -> Fields:
    return {
        **_gpt_sizes(r, 768, 12, 12, 50257, 1024),
        **BIASED,
        "position": "learned",
        "activation": activation_of(r, "activation_function", default="gelu_new", gated=False),
        "dropout": 0.1 if "resid_pdrop" not in r.config else r.share("resid_pdrop"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
    }


def gpt_neo(r: ConfigReader) -> Fields:
    fields: Fields = {
        **_gpt_sizes(r, 2048, 24, 16, 50257, 2048),
        **BIASED,
        "qkv_bias": False,
        "position": "learned",
        "activation": activation_of(r, "activation_function", default="gelu_new", gated=False),
        "dropout": r.share("resid_dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
        "window": r.whole("window_size", default=256),
    }
    local = 0
    for entry in r.items("attention_types") or [[["global", "local"], fields["layers"] // 2]]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)):
            r.fault("attention_types", "expected [[kinds, repeats], ..]", "[[[global, local], 12]]")
            return fields
        repeats = entry[1] if isinstance(entry[1], int) else 0
        local += entry[0].count("local") * repeats
    fields["window_layers"] = min(local, fields["layers"])
    return fields


def gptj(r: ConfigReader) -> Fields:
    return {
        **_gpt_sizes(r, 4096, 28, 16, 50400, 2048),
        **BIASED,
        "qkv_bias": False,
        "attention_out_bias": False,
        "norms_per_layer": 1,
        "parallel_block": True,
        "head_bias": True,
        "position": "rope",
        "activation": activation_of(r, "activation_function", default="gelu_new", gated=False),
        "dropout": r.share("resid_pdrop"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=False),
    }


def gpt_neox(r: ConfigReader) -> Fields:
    bias = r.flag("attention_bias", default=True)
    return {
        **_gpt_sizes(r, 6144, 44, 64, 50432, 2048),
        **BIASED,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "parallel_block": r.flag("use_parallel_residual", default=True),
        "position": "rope",
        "activation": activation_of(r, "hidden_act", default="gelu", gated=False),
        "dropout": r.share("hidden_dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=False),
    }


def opt(r: ConfigReader) -> Fields:
    fields = {**_gpt_sizes(r, 768, 12, 12, 50272, 2048), **BIASED}
    bias = r.flag("enable_bias", default=True)
    affine = r.flag("layer_norm_elementwise_affine", default=True)
    if not affine:
        r.warn("layer_norm_elementwise_affine", "norms without weights are counted with them")
    width = r.whole("word_embed_proj_dim", default=fields["hidden"])
    before = r.flag("do_layer_norm_before", default=True)
    return fields | {
        # The table keeps two rows for padding (an offset of OPTLearnedPositionalEmbedding).
        "max_positions": fields["max_positions"] + 2,
        "ffn": r.whole("ffn_dim", default=3072),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "final_norm": before and not r.flag("_remove_final_layer_norm", default=False),
        "embedding_width": width if width != fields["hidden"] else None,
        "position": "learned",
        "activation": activation_of(r, "activation_function", default="relu", gated=False),
        "dropout": 0.1 if "dropout" not in r.config else r.share("dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
    }


def bloom(r: ConfigReader) -> Fields:
    return {
        **_gpt_sizes(r, 64, 2, 8, 250880, 2048),
        **BIASED,
        "position": "alibi",
        "embedding_norm": True,
        "activation": "gelu",
        "dropout": r.share("hidden_dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
    }


def mpt(r: ConfigReader) -> Fields:
    attention, mlp = r.nested("attn_config"), r.nested("ffn_config")
    hidden = r.whole("d_model", default=2048, essential=True)
    heads = r.whole("n_heads", default=16, essential=True)
    kind = attention.text("attn_type", default="multihead_attention")
    kv_heads = attention.whole("kv_n_heads", default=heads)
    if mlp.text("ffn_type", default="mptmlp") != "mptmlp":
        r.warn("ffn_config.ffn_type", "only the plain MLP (mptmlp) is counted")
    if attention.flag("qk_ln", default=False):
        r.warn("attn_config.qk_ln", "norms of queries and keys are not counted")
    alibi = attention.flag("alibi", default=True)
    learned = r.flag("learned_pos_emb", default=True) and not alibi
    bias = not r.flag("no_bias", default=True)
    rope = attention.flag("rope", default=False)
    return {
        "hidden": hidden,
        "layers": r.whole("n_layers", default=24, essential=True),
        "heads": heads,
        "kv_heads": 1 if kind == "multiquery_attention" else kv_heads,
        "head_dim": head_width(r, hidden, heads, None),
        "ffn": r.whole("expansion_ratio", default=4) * hidden,
        "vocab": r.whole("vocab_size", default=50368, essential=True),
        "max_positions": r.whole("max_seq_len", default=2048),
        "norm": "layernorm",
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "norm_bias": bias,
        "position": "alibi" if alibi else "rope" if rope else "learned" if learned else "none",
        "activation": "gelu",
        "dropout": max(r.share("resid_pdrop"), attention.share("attn_pdrop")),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
    }


def falcon(r: ConfigReader) -> Fields:
    fields = _gpt_sizes(r, 4544, 32, 71, 65024, 2048)
    grouped = r.optional("num_kv_heads", "n_head_kv")
    # The first 40B config says RefinedWeb and n_head_kv in place of the later key.
    first_form = r.config.get("model_type") == "RefinedWeb"
    new = r.flag("new_decoder_architecture", default=first_form and grouped is not None)
    multi_query = r.flag("multi_query", default=True)
    parallel = new or r.flag("parallel_attn", default=True)
    norms = r.whole("num_ln_in_parallel_attn", default=2 if new else 1)
    bias = r.flag("bias", default=False)
    kv_heads = (grouped or fields["heads"]) if new else 1 if multi_query else fields["heads"]
    return fields | {
        "kv_heads": kv_heads,
        "ffn": r.whole("ffn_hidden_size", default=4 * fields["hidden"]),
        "norm": "layernorm",
        "norm_bias": True,
        "norms_per_layer": norms if parallel else 2,
        "parallel_block": parallel,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "position": "alibi" if r.flag("alibi", default=False) else "rope",
        "activation": activation_of(r, "activation", default="gelu", gated=False),
        "dropout": r.share("hidden_dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings", default=True),
    }


def _architecture(r: ConfigReader) -> str:
    names = r.items("architectures") or [""]
    return str(names[0])


def bert(r: ConfigReader) -> Fields:
    architecture = _architecture(r)
    if r.flag("is_decoder", default=False):
        r.warn("is_decoder", "BERT is counted as an encoder")
    return {
        **_gpt_sizes(r, 768, 12, 12, 30522, 512),
        **BIASED,
        "token_types": r.whole("type_vocab_size", default=2, low=0),
        "position": "learned",
        "causal": False,
        "embedding_norm": True,
        "final_norm": False,
        "pooler": architecture not in ("BertForMaskedLM", "BertLMHeadModel"),
        "mlm_head": architecture != "BertModel",
        "head_bias": architecture != "BertModel",
        "activation": activation_of(r, "hidden_act", default="gelu", gated=False),
        "dropout": 0.1 if "hidden_dropout_prob" not in r.config else r.share("hidden_dropout_prob"),
        "tied_embeddings": True,
    }


def vit(r: ConfigReader) -> Fields:
    labels = r.raw("id2label")
    classes = len(labels) if isinstance(labels, dict) else r.whole("num_labels", default=2)
    classifier = "Classification" in _architecture(r)
    r.raw("vocab_size")
    fields = _gpt_sizes(r, 768, 12, 12, 1, 1)
    qkv_bias = r.flag("qkv_bias", default=True)
    return {
        **fields,
        **BIASED,
        "qkv_bias": qkv_bias,
        "vocab": 0,
        "max_positions": 0,
        "position": "learned",
        "causal": False,
        "pooler": not classifier,
        "activation": activation_of(r, "hidden_act", default="gelu", gated=False),
        "dropout": r.share("hidden_dropout_prob"),
        "tied_embeddings": True,
        "vision": VisionSpec(
            image_size=r.whole("image_size", default=224),
            patch_size=r.whole("patch_size", default=16),
            channels=r.whole("num_channels", default=3),
            classes=classes if classifier else 0,
        ),
    }
