"""A replay as a row of a runs CSV: what ``gpumix validate`` and ``gpumix calibrate`` read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from simulator.errors import UserError
from simulator.interop.run_rows import RunRow
from simulator.interop.runs import FAMILIES, row_model
from simulator.spec.layout import Layout
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Recompute, Sharding
from simulator.spec.presets import preset, preset_names
from simulator.units import GIB

#: Columns of the file, in order.
COLUMNS = (
    "source_id", "model", "arch", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab",
    "num_experts", "topk", "seq_len", "gpu", "gpus_per_node", "n_gpus", "intra_node",
    "inter_node", "stack", "precision", "optimizer", "tp", "pp", "vpp", "cp", "ep", "dp", "sp",
    "sharding", "micro_batch", "grad_accum", "global_batch", "recompute", "attention", "compile",
    "stage_layers", "tokens_per_s_per_gpu", "step_time_s", "peak_allocated_gib",
    "peak_reserved_gib", "outcome", "notes",
)  # fmt: skip

#: In ``sharding`` of a run that the columns can't tell; a reader refuses the row by this word.
INEXPRESSIBLE = "not-in-these-columns"


def runs_csv(
    layout: Layout,
    measured: Mapping[str, Any] | None,
    *,
    outcome: str = "ok",
    notes: str = "",
    emulated: bool = False,
) -> str:
    """CSV text with a header and one row for a run of ``layout``.

    ``measured`` is what the runner returned, None for a run that ended badly. What the format
    can't tell (uneven shares, layered accumulation, emulated devices) is marked in ``sharding`` and
    said in the notes, so that a reader lists the row with the reason and doesn't predict another
    run.
    """
    missing = _inexpressible(layout, emulated)
    row = _model_cells(layout) | _cluster_cells(layout) | _plan_cells(layout)
    if missing:
        row["sharding"] = INEXPRESSIBLE
        notes = "; ".join(filter(None, (notes, f"no columns for: {', '.join(missing)}")))
    row |= {"source_id": "gpumix-replay", "outcome": outcome, "notes": notes}
    if measured is not None:
        reserved = measured["peak_reserved_bytes"]
        row |= {
            "tokens_per_s_per_gpu": measured["tokens_per_s"] / layout.n_gpus,
            "step_time_s": measured["step_time_s"],
            "peak_allocated_gib": measured["peak_allocated_bytes"] / GIB,
            "peak_reserved_gib": "" if reserved is None else reserved / GIB,
        }
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    return text.getvalue()


def _inexpressible(layout: Layout, emulated: bool) -> list[str]:
    """What of the run the columns have no place for."""
    plan, several = layout.plan, any(c.micro_batches > 1 for c in layout.classes)
    found = {
        "an assignment of batch and state to ranks": bool(plan.assignment),
        "layered gradient accumulation": plan.schedule == "layered" and several,
        "schedules other than 1F1B and interleaved": plan.pp > 1
        and plan.schedule not in ("1f1b", "interleaved"),
        "recomputation of some layers": plan.recompute_layers is not None,
        "offloading": plan.offload != "none",
        "partial shard groups": plan.shard_degree is not None,
        "emulated devices": emulated,
        "this model's shape": not _family(layout),
    }
    return [name for name, present in found.items() if present]


def _shape(model: ModelSpec) -> dict[str, Any]:
    moe = model.moe
    return {
        "model": model.name, "layers": model.layers, "hidden": model.hidden,
        "ffn_hidden": moe.ffn if moe else model.ffn, "heads": model.heads,
        "kv_heads": model.kv_heads, "vocab": model.vocab,
        "num_experts": moe.experts if moe else "", "topk": moe.top_k if moe else "",
    }  # fmt: skip


def _family(layout: Layout) -> str:
    """The family that makes this model of its shape, ``preset`` for a known one, or ''."""
    model = layout.model
    if model.name in preset_names() and preset(model.name) == model:
        return "preset"
    cells = {key: str(value) for key, value in _shape(model).items()}
    cells["seq_len"] = str(layout.workload.sequence_length)
    for family in FAMILIES:
        row = RunRow(0, cells | {"arch": family})
        # Latent attention isn't among the columns: a DeepSeek model is told by its preset only.
        if family != "deepseek" and _model_of(row) == model:
            return family
    return ""


def _model_of(row: RunRow) -> ModelSpec | None:
    try:
        return row_model(row, lambda _: None)
    except UserError:
        return None


def _model_cells(layout: Layout) -> dict[str, Any]:
    family = _family(layout)
    if family == "preset":
        return {"model": layout.model.name, "vocab": layout.model.vocab}
    return _shape(layout.model) | {"arch": family}


def _cluster_cells(layout: Layout) -> dict[str, Any]:
    cluster = layout.cluster
    names = [c.gpu.name for c in layout.classes for _ in range(c.ranks)]
    node = cluster.groups[0].node
    return {
        "seq_len": layout.workload.sequence_length,
        "gpu": names[0] if len(set(names)) == 1 else ";".join(names),
        "gpus_per_node": min(len(cluster.groups[0].gpus), layout.n_gpus),
        "n_gpus": layout.n_gpus,
        "intra_node": node.intra_node,
        "inter_node": cluster.fabric.name if cluster.fabric else "",
    }


def _plan_cells(layout: Layout) -> dict[str, Any]:
    plan = layout.plan
    first = layout.classes[0]
    stages = plan.stage_layers
    return {
        "stack": layout.stack.name, "precision": plan.precision, "optimizer": plan.optimizer,
        "tp": plan.tp, "pp": plan.pp, "vpp": plan.vpp, "cp": plan.cp, "ep": plan.ep,
        "dp": layout.dp, "sp": int(plan.sequence_parallel),
        "sharding": Sharding(plan.sharding).name.lower(),
        "micro_batch": first.micro_batch, "grad_accum": first.micro_batches,
        "global_batch": layout.workload.global_batch,
        "recompute": Recompute(plan.recompute).name.lower(), "attention": plan.attention,
        "compile": int(plan.compile),
        "stage_layers": "/".join(map(str, stages)) if stages and plan.pp > 1 else "",
    }  # fmt: skip
