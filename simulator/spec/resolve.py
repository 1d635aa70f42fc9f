"""Validated input -> the model and the stack that it names or writes out."""

from __future__ import annotations

from dataclasses import MISSING, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from simulator.spec.fields import shown
from simulator.spec.inputs import ModelInput
from simulator.spec.model import MlaSpec, ModelSpec, MoeSpec, VisionSpec
from simulator.spec.problems import Collector
from simulator.spec.stack import Stack, load_stack
from simulator.spec.yaml_source import FieldPath, load_source

#: More than any model; the layout's cost grows with the layers.
MAX_LAYERS = 10_000
_PARTS: dict[str, Any] = {"moe": MoeSpec, "mla": MlaSpec, "vision": VisionSpec}
_MAY_BE_ABSENT = ("window", "embedding_width", *_PARTS)
_MODEL_REQUIRED = ("layers", "hidden", "heads", "vocab")


def resolve_model(data: Any, folder: Path, report: Collector) -> ModelSpec | None:
    """``model``: a preset, the path of a ``config.json``, or ModelSpec's fields."""
    model = _model(data, folder, report)
    if model is not None and model.layers > MAX_LAYERS:
        report.error(
            ("model",), f"{model.name} has {model.layers:,} layers", f"at most {MAX_LAYERS:,}"
        )
        return None
    return model


def _model(data: Any, folder: Path, report: Collector) -> ModelSpec | None:
    if isinstance(data, str):
        return report.attempt(("model",), lambda: model_by_name(data, folder))
    if not isinstance(data, dict):
        report.error(
            ("model",),
            f"expected a model, got {shown(data)}",
            "write a preset's name, the path of a config.json, or a mapping of its dimensions",
        )
        return None
    entry = report.validate(ModelInput, data, ("model",))
    return None if entry is None else _model_from_fields(entry, folder, report)


def model_by_name(name: str, folder: Path) -> ModelSpec:
    """A preset, or the model of a Hugging Face ``config.json`` (relative to ``folder``)."""
    if name.endswith(".json") or "/" in name or name.startswith("."):
        path = folder / name
        if path.is_dir():
            path = path / "config.json"
        if path.exists() or name.endswith(".json"):
            from simulator.spec.hf_config import model_from_hf_config

            data = load_source(path).data
            return model_from_hf_config(data, name=path.resolve().parent.name)
    from simulator.spec.presets import preset

    return preset(name)


def _model_from_fields(entry: Any, folder: Path, report: Collector) -> ModelSpec | None:
    before = len(report.problems)
    given = {key: getattr(entry, key) for key in entry.model_fields_set if key != "base"}
    base = None
    if entry.base is not None:
        base = report.attempt(("model", "base"), lambda: model_by_name(entry.base, folder))
    for key, cls in _PARTS.items():
        if given.get(key) is not None:
            given[key] = _part(cls, given[key], getattr(base, key, None), ("model", key), report)
    for key in given:
        if given[key] is None and key not in _MAY_BE_ABSENT:
            report.error(("model", key), "is empty", "write a value or leave the field out")
    if len(report.problems) > before:
        return None
    if base is None:
        return _model_from_dimensions(given, report)
    layers = given.pop("layers", base.layers)
    scaled = base if layers == base.layers else base.with_layers(layers)
    return replace(scaled, **given)


def _part(cls: Any, entry: Any, base: Any, path: FieldPath, report: Collector) -> Any:
    """``moe``, ``mla`` or ``vision``, on top of the base model's where it has one."""
    given = {key: getattr(entry, key) for key in entry.model_fields_set}
    if base is not None:
        return replace(base, **given)
    absent = [f.name for f in dataclass_fields(cls) if f.default is MISSING and f.name not in given]
    for name in absent:
        report.error((*path, name), "is missing", "add it")
    return None if absent else cls(**given)


def _model_from_dimensions(given: dict[str, Any], report: Collector) -> ModelSpec | None:
    path: FieldPath = ("model",)
    absent = [key for key in _MODEL_REQUIRED if key not in given]
    if absent:
        report.error(
            path,
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing",
            "add them, or name a preset as base",
        )
        return None
    filled = dict(given)

    def fill(key: str, value: Any, why: str) -> None:
        if key not in filled:
            filled[key] = value
            report.default((*path, key), value, why)

    fill("name", "custom model", "not named")
    fill("kv_heads", given["heads"], "every head has its own keys and values")
    if "head_dim" not in given and given["hidden"] % given["heads"]:
        report.error(
            (*path, "hidden"),
            f"hidden {given['hidden']} is not divisible by heads {given['heads']}",
            "give head_dim",
        )
        return None
    fill("head_dim", given["hidden"] // given["heads"], "hidden / heads")
    fill("ffn", 4 * given["hidden"], "4 x hidden")
    return ModelSpec(**filled)


def resolve_stack(data: Any, report: Collector) -> Stack | None:
    """``stack``: the name of a shipped stack."""
    if not isinstance(data, str):
        report.error(("stack",), f"expected a stack's name, got {shown(data)}")
        return None
    return report.attempt(("stack",), lambda: load_stack(data))
