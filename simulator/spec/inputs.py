"""The scenario file as pydantic models: names, kinds and bounds of every field.

This is the boundary: what passes here is plain data of the right kind, and what does not is
reported all at once. Meaning (names of GPUs, degrees that fit) is checked afterwards, in
``resolve.py`` and ``checks.py``. The published JSON Schema is generated from these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema, create_model

from hardware_db.schema import FabricSpec
from simulator.spec.fields import (
    Bytes,
    Count,
    Factor,
    Flag,
    InputModel,
    Name,
    NodeCount,
    Number,
    PositiveBytes,
    PositiveNumber,
    SmallCount,
    SmallWhole,
    Text,
    Whole,
    Width,
    choice_of,
    refusal,
    shown,
    simplified,
)
from simulator.spec.model import MlaSpec, ModelSpec, MoeSpec, VisionSpec
from simulator.spec.plan import ATTENTION_KERNELS, OFFLOADS, Recompute

#: Model widths and counts that must be at least one.
_POSITIVE = frozenset(
    {"layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"}
    | {"experts", "top_k", "every", "window", "embedding_width"}
    | {"kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"}
    | {"image_size", "patch_size", "channels", "nodes_per_leaf", "nics_per_node"}
)
_NESTED: dict[type, type[InputModel]] = {}

#: Tags that pydantic puts into error locations where a field takes a name or a mapping.
NAME_TAG, FIELDS_TAG = "<name>", "<fields>"


def name_or_fields(value: Any) -> str:
    """Tag of a field that takes a name or a mapping."""
    return FIELDS_TAG if isinstance(value, Mapping) else NAME_TAG


def _input_type(name: str, hint: Any) -> Any:
    """The field type for one dataclass field."""
    options = [a for a in get_args(hint) if a is not NoneType]
    if get_origin(hint) is Literal:
        check, schema = choice_of({str(word): word for word in get_args(hint)})
        return Annotated[str, check, schema]
    if NoneType in get_args(hint):
        return _input_type(name, options[0]) | None
    if hint in _NESTED:
        return _NESTED[hint]
    if hint is bool:
        return Flag
    if hint is int:
        return Width if name in _POSITIVE else Whole
    if hint is float:
        return Number
    return Text


def _mirror(cls: type, skip: tuple[str, ...] = (), **extra: Any) -> type[InputModel]:
    """Input model with the fields of a dataclass, all optional (``base`` may supply them)."""
    hints = get_type_hints(cls)
    definitions: dict[str, Any] = {
        f.name: (_input_type(f.name, hints[f.name]), None)
        for f in dataclass_fields(cls)
        if f.name not in skip
    }
    model = create_model(f"{cls.__name__}Input", __base__=InputModel, **{**definitions, **extra})
    _NESTED[cls] = model
    return model


_mirror(MoeSpec)
_mirror(MlaSpec)
_mirror(VisionSpec)
#: A model written out: ModelSpec's fields, and ``base``: a preset or ``config.json`` to start from.
ModelInput = _mirror(ModelSpec, skip=("warnings",), base=(Text | None, None))
#: A fabric written out: FabricSpec's fields, ``base``, and the NIC rate in Gb/s (10**9 bits/s).
FabricInput = _mirror(
    FabricSpec,
    skip=("aliases",),
    base=(Text | None, None),
    nic_gbps=(Number | None, None),
)

SHARDING_WORDS = {
    "none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": -1,
}  # fmt: skip
_SHARDING_ALSO = {
    "ddp": "none", "no": "none", "zero0": "none", "distributed-optimizer": "zero1",
    "fsdp2": "zero3", "full-shard": "zero3", "hybrid-shard": "hsdp", "false": "none",
}  # fmt: skip
SCHEDULE_WORDS = {word: word for word in ("gpipe", "1f1b", "interleaved", "zb-h1", "layered")}
_SCHEDULE_ALSO = {
    "interleaved-1f1b": "interleaved", "zero-bubble": "zb-h1", "zb": "zb-h1",
    "layered-gradient-accumulation": "layered", "lga": "layered",
}  # fmt: skip
_RECOMPUTE_WORDS = {
    "none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL,
}  # fmt: skip
_RECOMPUTE_ALSO = {"no": "none", "off": "none", "false": "none", "true": "full", "on": "full"}

_RECOMPUTE_CHECK = choice_of(_RECOMPUTE_WORDS, _RECOMPUTE_ALSO)[0].func
RECOMPUTE_NAMES = {value: name for name, value in _RECOMPUTE_WORDS.items()}


def _recompute(value: Any) -> tuple[Recompute, int | None]:
    """``none``, ``selective``, ``full`` or ``{full: n}`` -> kind and layers per stage."""
    if isinstance(value, Mapping):
        if set(value) != {"full"}:
            raise refusal(
                f"expected {{full: n}}, got the keys {shown(', '.join(map(str, value)))}",
                "write full, or {full: 4} to recompute 4 layers of each stage",
            )
        layers = value["full"]
        if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= 10**6:
            raise refusal(f"layers to recompute: {shown(layers)}", "write a whole number above 0")
        return Recompute.FULL, layers
    kind: Recompute = _RECOMPUTE_CHECK(value)  # type: ignore[call-arg]
    return kind, None


def _state_share(value: Any) -> float | list[float] | None:
    """``even`` -> None; a fraction; or a list with a fraction for each replica."""
    if isinstance(value, str) and simplified(value) == "even":
        return None
    if isinstance(value, list) and value and len(value) <= 10_000:
        return [_fraction(item) for item in value]
    return _fraction(value)


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise refusal(
            f"{shown(value)} is not a share of the training state",
            "write even, a fraction from 0 to 1, or a list of one fraction for each replica",
        )
    return float(value)


_FRACTION_SCHEMA = {"type": "number", "minimum": 0, "maximum": 1}
_SHARE_SCHEMA = {
    "anyOf": [
        {"enum": ["even"]},
        _FRACTION_SCHEMA,
        {"type": "array", "items": _FRACTION_SCHEMA, "minItems": 1, "maxItems": 10_000},
    ]
}
_RECOMPUTE_SCHEMA = {
    "anyOf": [
        {"enum": [*_RECOMPUTE_WORDS, *_RECOMPUTE_ALSO, True, False]},
        {
            "type": "object",
            "properties": {"full": {"type": "integer", "minimum": 1, "maximum": 10**6}},
            "required": ["full"],
            "additionalProperties": False,
        },
    ]
}


class WorkloadInput(InputModel):
    """``workload``: what one training job is."""

    sequence_length: Count
    global_batch: Count
    tokens: PositiveNumber | None = None


class GroupInput(InputModel):
    """One entry of ``cluster.groups``: equal nodes, by name or described by their GPUs.

    One of ``node``, ``gpu`` or ``gpus`` says what a node is; the other fields override it.
    """

    node: Name | None = None
    gpu: Name | None = None
    gpus: Annotated[list[Name], Field(min_length=1, max_length=1024)] | None = None
    gpus_per_node: SmallCount | None = None
    count: NodeCount = 1
    name: Name | None = None
    zone: Name | None = None
    intra_node: Name | None = None
    nics: Annotated[SmallWhole | None, Field(description="NICs for GPU traffic, per node")] = None
    nic_gbps: Annotated[Number | None, Field(description="rate of one NIC, Gb/s")] = None
    nic_bytes_per_s: Number | None = None
    host_power_w: Number | None = None
    host_memory_bytes: Bytes | None = None
    dispatch_scale: PositiveNumber | None = None
    year: Whole | None = None


class ClusterInput(InputModel):
    """``cluster``: node groups and the fabric between nodes."""

    groups: Annotated[list[GroupInput], Field(min_length=1, max_length=1000)]
    fabric: (
        Annotated[
            Annotated[Name, Tag(NAME_TAG)] | Annotated[FabricInput, Tag(FIELDS_TAG)],  # type: ignore[valid-type]
            Discriminator(name_or_fields),
        ]
        | None
    ) = None


class AssignmentInput(InputModel):
    """One entry of ``plan.assignment``: one kind of rank on one node group.

    ``micro_batch`` and ``count`` are per data-parallel rank. ``state_share`` is what one rank of
    the entry holds: ``even`` (an equal part of what the other entries leave), a fraction, or a
    list of one fraction for each replica.
    """

    group: Whole
    gpu: Name | None = None
    micro_batch: Count | None = None
    count: Count | None = None
    state_share: Annotated[Any, PlainValidator(_state_share), WithJsonSchema(_SHARE_SCHEMA)] = None
    stage: Whole | None = None
    layers: Count | None = None
    tp: Count | None = None
    replicas: Count | None = None


_SHARDING = choice_of(SHARDING_WORDS, _SHARDING_ALSO)
_SCHEDULE = choice_of(SCHEDULE_WORDS, _SCHEDULE_ALSO)
_ATTENTION = choice_of({k: k for k in ATTENTION_KERNELS}, {"fa2": "flash2", "fa3": "flash3"})
_OFFLOAD = choice_of({k: k for k in OFFLOADS}, {"no": "none", "false": "none"})


class PlanInput(InputModel):
    """``plan``: degrees, batch split, sharding, recompute, precision; all but none optional."""

    dp: Count | None = None
    tp: Count = 1
    pp: Count | None = None
    vpp: Count = 1
    cp: Count = 1
    ep: Count = 1
    sequence_parallel: Flag | None = None
    micro_batch: Count = 1
    schedule: Annotated[str | None, *_SCHEDULE] = None
    sharding: Annotated[int, *_SHARDING] = 0
    shard_degree: Count | None = None
    recompute: Annotated[Any, PlainValidator(_recompute), WithJsonSchema(_RECOMPUTE_SCHEMA)] = (
        Recompute.NONE,
        None,
    )
    precision: Text = "bf16"
    optimizer: Text = "adamw"
    attention: Annotated[str, *_ATTENTION] = "auto"
    compile: Flag = False
    offload: Annotated[str, *_OFFLOAD] = "none"
    stage_layers: Annotated[list[Count], Field(min_length=1, max_length=10_000)] | None = None
    assignment: Annotated[list[AssignmentInput], Field(max_length=10_000)] = Field([])


_PER_RANK = Field(min_length=1, max_length=10_000)


class ReplayInput(InputModel):
    """``replay``: how ``gpumix replay`` runs the plan, and a mixed cluster that it emulates.

    ``slowdown`` and ``memory_bytes`` have one entry for each rank, in rank order: the factor by
    which the rank is slowed, and the bytes that it may allocate. Only a replay reads them.
    """

    steps: Count = 10
    warmup: SmallWhole = 2
    threads: Annotated[SmallCount | None, Field(description="CPU threads of each rank")] = None
    slowdown: Annotated[list[Factor] | None, _PER_RANK] = None
    memory_bytes: Annotated[list[PositiveBytes] | None, _PER_RANK] = None
