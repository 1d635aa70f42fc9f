"""A Hugging Face ``config.json`` -> :class:`ModelSpec`, without transformers.

Read are the dimensions, biases, norms and ties that the family's model class has. A present field
that changes the cost but is not counted becomes a warning of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.errors import Problem, UserError, nearest
from simulator.spec.hf_families import FAMILIES, SAME_FAMILY
from simulator.spec.hf_reader import ConfigReader
from simulator.spec.model import ModelSpec
from simulator.spec.yaml_source import read_text


def load_hf_config(path: str | Path, name: str = "") -> ModelSpec:
    """The model of a ``config.json`` file, named after its folder unless ``name`` is given.

    Raises:
        UserError: no small regular file, not JSON, or what :func:`model_from_hf_config` refuses.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
        raise UserError(
            Problem("", "is not JSON", "name a config.json", str(path), line, column)
        ) from None
    return model_from_hf_config(data, name or Path(path).resolve().parent.name)


def model_from_hf_config(data: Any, name: str = "") -> ModelSpec:
    """The model that a ``config.json`` describes; ``data`` is the parsed JSON.

    A nested ``text_config`` is read as the model. Absent keys get the family's defaults; a
    dimension among them is named in the model's warnings.

    Raises:
        UserError: not an object, an unknown ``model_type`` (lists the known ones), or fields of
            wrong type or size (all of them, each with what would be right).
    """
    if not isinstance(data, Mapping):
        kind = "a list" if isinstance(data, list) else f"{data!r}"[:40]
        raise UserError(
            Problem("", f"a config.json is an object, got {kind}", 'write {"model_type": ..}')
        )
    reader, family = _family_reader(data)
    fields = FAMILIES[family](reader)
    _check(reader, fields)
    if reader.problems:
        raise UserError(*reader.problems)
    reader.warn_of_unread()
    title = name or str(data.get("_name_or_path") or "") or family
    source = f"config.json of a {family} model"
    return ModelSpec(name=title, source=source, warnings=tuple(reader.warnings), **fields)


def _family_reader(data: Mapping[str, Any]) -> tuple[ConfigReader, str]:
    """Reader of the language (or vision) model inside ``data``, and its family's name."""
    outer = _known_family(data.get("model_type"))
    inner = data.get("text_config")
    if isinstance(inner, Mapping):
        family = _known_family(inner.get("model_type")) or outer
        if family is not None:
            shared = {k: data[k] for k in ("tie_word_embeddings",) if k in data}
            reader = ConfigReader({**shared, **inner}, "text_config.")
            reader.raw("model_type")
            for part in ("vision_config", "audio_config"):
                if data.get(part) is not None:
                    reader.warnings.append(f"{part}: is not counted, only the text model is")
            return reader, family
    if outer is None:
        raise _unknown_family(data)
    reader = ConfigReader(data)
    reader.raw("model_type")
    return reader, outer


def _known_family(kind: Any) -> str | None:
    if not isinstance(kind, str):
        return None
    family = SAME_FAMILY.get(kind, kind)
    return family if family in FAMILIES else None


def _unknown_family(data: Mapping[str, Any]) -> UserError:
    kind = data.get("model_type")
    known = sorted(FAMILIES)
    if kind is None:
        return UserError(Problem("model_type", "is missing", "known: " + ", ".join(known)))
    shown = repr(kind)[:60]
    close = nearest(kind, known, limit=2) if isinstance(kind, str) and 0 < len(kind) < 60 else []
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return UserError(
        Problem("model_type", f"{shown} is not known", f"{guess}known: {', '.join(known)}")
    )


def _check(reader: ConfigReader, fields: Mapping[str, Any]) -> None:
    """Faults between fields that would make no model."""
    heads, kv_heads = fields["heads"], fields["kv_heads"]
    if heads % kv_heads:
        reader.fault(
            "num_key_value_heads",
            f"{kv_heads:,} do not divide {heads:,} heads",
            "a divisor of num_attention_heads",
        )
    moe = fields.get("moe")
    if moe is not None and moe.top_k > moe.experts:
        reader.fault(
            "num_experts_per_tok",
            f"{moe.top_k:,} exceed {moe.experts:,} experts",
            f"at most {moe.experts:,}",
        )
    if moe is not None and moe.dense_layers > fields["layers"]:
        reader.fault(
            "first_k_dense_replace",
            f"{moe.dense_layers:,} exceed {fields['layers']:,} layers",
            f"at most {fields['layers']:,}",
        )
    vision = fields.get("vision")
    if vision is not None and vision.patch_size > vision.image_size:
        reader.fault(
            "patch_size",
            f"{vision.patch_size:,} exceeds the image size {vision.image_size:,}",
            f"at most {vision.image_size:,}",
        )
