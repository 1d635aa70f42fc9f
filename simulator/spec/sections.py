"""The scenario file as a whole: its top-level sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from simulator.spec.fields import FreeMapping, InputModel, Name, Share, Text
from simulator.spec.inputs import (
    FIELDS_TAG,
    NAME_TAG,
    ClusterInput,
    ModelInput,
    PlanInput,
    ReplayInput,
    WorkloadInput,
    name_or_fields,
)
from simulator.spec.purchase_inputs import EconomicsInput, PurchaseInput


class SectionsInput(InputModel):
    """The top-level fields that need nothing looked up."""

    title: Text | None = None
    purchase: PurchaseInput | None = None
    economics: EconomicsInput | None = None
    risk: Share = 0.05
    outputs: FreeMapping = Field({})
    replay: ReplayInput | None = None


class ScenarioInput(SectionsInput):
    """A GPUMix scenario: a model, a workload, a cluster and, if given, a plan for it."""

    model: Annotated[
        Annotated[Text, Tag(NAME_TAG)] | Annotated[ModelInput, Tag(FIELDS_TAG)],  # type: ignore[valid-type]
        Discriminator(name_or_fields),
    ]
    workload: WorkloadInput
    cluster: ClusterInput
    stack: Name | None = None
    plan: PlanInput | None = None
    sweep: Annotated[
        dict[str, Any],
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": {"type": "array", "minItems": 1, "maxItems": 10_000},
            }
        ),
    ] = Field({})
