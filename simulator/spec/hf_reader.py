"""Typed reading of a Hugging Face ``config.json``: faults are collected, unread keys remembered."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from simulator.errors import Problem

#: No dimension of a transformer comes near; keeps products of two exact in float64.
MAX_DIMENSION = 10**9

#: ModelSpec fields by name.
Fields = dict[str, Any]

_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu",
}
_GATED = {"silu": "swiglu", "swish": "swiglu"} | {
    name: "geglu" for name, kind in _PLAIN.items() if kind == "gelu"
}

# Keys that look like a size but cost nothing or are another spelling of one that is read.
_FREE = re.compile(
    r"(_token_?id|_token|_tokens|_eps|_epsilon|_std|_range|_loss_coef|_alpha|_theta|_scaling|_factor"
    r"|_dtype|_version|_path|beams?|_groups?|_sequences|_method|_func|_multiplier|_softcapping)$"
    r"|^(num_labels|n_ctx|n_positions|n_group|topk_group|max_.*|seq_length|.*ngram_size"
    r"|chunk_size_feed_forward|problem_type|pretraining_tp|query_pre_attn_scalar|init_.*"
    r"|rotary_.*|rope_.*|partial_.*|slow_but_exact|offset_alibi|skip_.*|encoder_stride|num_logits.*"
    r"|initializer_.*|layer_norm_.*|norm_topk_prob|scoring_func|summary_.*|n_special|bos.*|eos.*"
    r"|pooler_.*|position_embedding_type|emb_pdrop|embd_pdrop|.*_dropout(_prob)?|layerdrop"
    r"|temperature|top_k|top_p|min_length|hidden_act|kv_channels|mm_tokens.*|_.*)$"
)
_SIZE_LIKE = re.compile(
    r"^(num_|n_|d_)|(_size|_layers?|_heads?|_dim|_rank|_experts?|_width|_ratio|_step|_freq)$|window"
    r"|mamba|ssm|linear_"
)
# Present with another value than these, a key changes the cost in a way that is not counted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "vision_config": (None,),
    "audio_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "attn_logit_soft_cap": (None, 0),
    "clip_qkv": (None, 0),
    "qk_ln": (None, False),
    "qk_layernorm": (None, False),
    "position_embedding_type": (None, "absolute"),
}


class ConfigReader:
    """Reads keys of one config with a check of each; asks every key once for its family.

    A faulty value adds a :class:`Problem` and reads as the default (or 1), so that one pass finds
    every fault. A dimension taken from the family's default adds a warning.
    """

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self.config = config
        self.prefix = prefix
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._read: set[str] = set()

    def raw(self, *keys: str) -> Any:
        """Value of the first of ``keys`` that is present and not null, else None."""
        self._read.update(keys)
        for key in keys:
            if self.config.get(key) is not None:
                return self.config[key]
        return None

    def fault(self, key: str, message: str, hint: str) -> None:
        """Record what is wrong with ``key``."""
        self.problems.append(Problem(self.prefix + key, message, hint))

    def warn(self, key: str, message: str) -> None:
        """Record what is left out of the cost."""
        self.warnings.append(f"{self.prefix}{key}: {message}")

    def whole(self, *keys: str, default: int, low: int = 1, essential: bool = False) -> int:
        """A whole number of at least ``low``; ``essential`` warns where the default is used."""
        value = self.raw(*keys)
        if value is None:
            if essential:
                self.warn(keys[0], f"is absent; {default:,} is the family's default")
            return default
        key = self._present(keys)
        wanted = f"write a whole number from {low:,} to {MAX_DIMENSION:,}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fault(key, f"expected a whole number, got {_shown(value)}", wanted)
            return default
        if not math.isfinite(value) or value != int(value):
            self.fault(key, f"expected a whole number, got {value}", wanted)
            return default
        if not low <= value <= MAX_DIMENSION:
            self.fault(key, f"{int(value):,} is out of range", wanted)
            return default
        return int(value)

    def optional(self, *keys: str, low: int = 1) -> int | None:
        """A whole number, or None where the key is absent or null."""
        return None if self.raw(*keys) is None else self.whole(*keys, default=low, low=low)

    def share(self, *keys: str) -> float:
        """A probability, 0 where absent."""
        value = self.raw(*keys)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            hint = "write a number from 0 to 1"
            self.fault(self._present(keys), f"expected a probability, got {_shown(value)}", hint)
            return 0.0
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            hint = "write true or false"
            self.fault(self._present(keys), f"expected true or false, got {_shown(value)}", hint)
            return default
        return value

    def text(self, *keys: str, default: str) -> str:
        """A word."""
        value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fault(self._present(keys), f"expected text, got {_shown(value)}", "write a name")
            return default
        return value

    def items(self, *keys: str) -> list[Any] | None:
        """A list, or None where absent."""
        value = self.raw(*keys)
        if value is not None and not isinstance(value, list):
            self.fault(self._present(keys), f"expected a list, got {_shown(value)}", "write [..]")
            return None
        return value

    def nested(self, key: str) -> ConfigReader:
        """Reader of the mapping at ``key`` (empty where absent); shares faults and warnings."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            self.fault(key, f"expected a mapping, got {_shown(value)}", "write {...}")
            value = None
        inner = ConfigReader(value or {}, f"{self.prefix}{key}.")
        inner.problems, inner.warnings = self.problems, self.warnings
        return inner

    def warn_of_unread(self) -> None:
        """A warning for every present key that changes the cost but was not read."""
        for key in sorted(k for k in self.config if isinstance(k, str)):
            value = self.config[key]
            if key in self._read:
                continue
            if key in _NEUTRAL:
                if value not in _NEUTRAL[key]:
                    self.warn(key, "changes the cost but is not counted")
            elif _SIZE_LIKE.search(key) and not _FREE.search(key) and value not in (None, False, 0):
                self.warn(key, f"{_shown(value)} is not understood and was left out")

    def _present(self, keys: tuple[str, ...]) -> str:
        return next(key for key in keys if self.config.get(key) is not None)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def activation_of(r: ConfigReader, *keys: str, default: str, gated: bool) -> str:
    """ModelSpec's activation for the name that a config gives it."""
    known = _GATED if gated else _PLAIN
    name = r.text(*keys, default=default)
    if name not in known:
        r.fault(keys[0], f"the activation {name[:40]!r} is not known", "known: " + ", ".join(known))
        return known[default]
    return known[name]


def head_width(r: ConfigReader, hidden: int, heads: int, head_dim: int | None) -> int:
    """Width of one head: given, or hidden / heads."""
    if head_dim is not None:
        return head_dim
    if hidden % heads and not r.problems:
        r.fault("hidden_size", f"{hidden:,} is not divisible by {heads:,} heads", "give head_dim")
    return max(1, hidden // heads)
