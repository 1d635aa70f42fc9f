"""Measured runs in CSV form: each row becomes a layout that can be predicted, or a reason why not.

The format is the one that ``gpumix validate`` documents: one row is one run, an empty cell means
not known. A value that the prediction needs and the row lacks is filled in only with a stated
assumption; where no assumption is sound the row is refused with the field's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulator.errors import Problem, UserError
from simulator.interop.run_cluster import row_cluster, stage_assignment
from simulator.interop.run_rows import RunRow, read_table
from simulator.spec.cluster import Cluster
from simulator.spec.layout import Layout, build_layout
from simulator.spec.model import ModelSpec, MoeSpec
from simulator.spec.plan import Plan, Recompute, Schedule, Sharding
from simulator.spec.presets import preset
from simulator.spec.stack import Stack, load_stack, stack_names
from simulator.spec.workload import Workload

#: Vocabulary taken where a row names none: GPT-2's 50,257 padded to a multiple of 1,024.
ASSUMED_VOCAB = 51200

#: Norm, activation, position and biases by architecture family; the rest of a shape is in the row.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "dropout": 0.1,
            "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_bias": True,
            "tied_embeddings": True},
    "mpt": {"norm": "layernorm", "activation": "gelu", "position": "alibi",
            "tied_embeddings": True},
    "llama": {},
    "bert": {"norm": "layernorm", "activation": "gelu", "position": "learned", "causal": False,
             "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_bias": True,
             "tied_embeddings": True, "dropout": 0.1, "final_norm": False},
    "vit": {"norm": "layernorm", "activation": "gelu", "position": "learned", "causal": False,
            "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_bias": True},
    "mixtral": {},
    "deepseek": {},
}  # fmt: skip

_SHARDING = {
    "none": Sharding.NONE, "zero0": Sharding.NONE, "zero1": Sharding.ZERO1,
    "zero2": Sharding.ZERO2, "zero3": Sharding.ZERO3, "fsdp": Sharding.ZERO3,
    "hsdp": Sharding.ZERO3,
}  # fmt: skip
_RECOMPUTE = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
_ATTENTION = {
    "": "auto", "auto": "auto", "unfused": "unfused", "flash": "auto", "flash1": "flash1",
    "flash1/triton": "flash1", "triton": "flash1", "flash2": "flash2", "flash3": "flash3",
}  # fmt: skip


#: What is taken where a row leaves a cell of its plan empty.
_USUAL: Mapping[str, str] = {
    "tp": "1", "pp": "1", "cp": "1", "ep": "1", "sharding": "none", "recompute": "none",
    "attention": "the stack's own", "optimizer": "adamw",
}  # fmt: skip

#: In the notes of a row whose peak is what the runtime logged of the whole device.
_LOGGED_PEAK = "peak as logged"


@dataclass(frozen=True)
class RunCase:
    """A row with what it stands for.

    ``layout`` is None where the row can't be expressed, and ``reason`` says why. ``candidates``
    are layouts that the row leaves open (micro-batch not printed): the fastest one that fits
    counts. ``last_fraction`` is the size of the last micro-batch relative to a whole one.
    ``peaks_of_device`` says that the row's peak is device memory (nvidia-smi), not torch's count.
    """

    row: RunRow
    layout: Layout | None
    reason: str = ""
    assumptions: tuple[str, ...] = ()
    candidates: tuple[Layout, ...] = ()
    last_fraction: float = 1.0
    peaks_of_device: bool = False


def run_case(row: RunRow, *, stack: str | None = None) -> RunCase:
    """What one row stands for; a row that can't be expressed has a reason instead of a layout."""
    notes: list[str] = []
    try:
        return _case(row, notes, stack)
    except UserError as error:
        return RunCase(row, None, "; ".join(map(_in_words, error.problems)), tuple(notes))


def _in_words(problem: Problem) -> str:
    """A fault without its place in the file, which the row has."""
    head = f"{problem.path}: {problem.message}" if problem.path else problem.message
    return f"{head} ({problem.hint})" if problem.hint else head


def _case(row: RunRow, notes: list[str], stack_name: str | None) -> RunCase:
    model = row_model(row, notes.append)
    if not (stack_name or row.text("stack")):
        raise UserError(row.problem("stack", "missing", ", ".join(stack_names())))
    stack = load_stack(stack_name or row.text("stack"))
    cluster = row_cluster(row, notes.append)
    plan, micro_batches, fraction = _row_plan(row, model, cluster, stack, notes)
    sequence = row.integer("seq_len")
    of_device = _LOGGED_PEAK in row.text("notes").lower()
    if of_device:
        notes.append("peak as logged by the runtime: device memory with CUDA context and NCCL")
    if row.number("micro_batch") is None:
        case = _open_case(row, model, cluster, plan, stack.name, sequence, notes)
        return replace(case, peaks_of_device=of_device)
    batch = plan.dp * plan.micro_batch * micro_batches
    if plan.assignment:
        batch = row.integer("global_batch")
    layout = build_layout(model, Workload(sequence, batch), cluster, plan, stack)
    return RunCase(
        row, layout, assumptions=tuple(notes), last_fraction=fraction, peaks_of_device=of_device
    )


def _open_case(
    row: RunRow,
    model: ModelSpec,
    cluster: Cluster,
    plan: Plan,
    stack: str,
    sequence: int,
    notes: list[str],
) -> RunCase:
    """A row without a micro-batch: all powers of two that divide the batch, interleaved or not."""
    batch = row.integer("global_batch")
    found = []
    for micro_batch in (1, 2, 4, 8, 16):
        for vpp in (1, 2, 3, 4) if plan.pp > 1 and not row.text("vpp") else (plan.vpp,):
            whole = model.layers % (plan.pp * vpp) == 0
            count = batch / (plan.dp * micro_batch)
            if count % 1 or not whole or (vpp > 1 and count % plan.pp):
                continue
            schedule: Schedule = "interleaved" if vpp > 1 else plan.schedule
            tried = replace(plan, micro_batch=micro_batch, vpp=vpp, schedule=schedule)
            found.append(
                build_layout(model, Workload(sequence, batch), cluster, tried, load_stack(stack))
            )
    if not found:
        raise UserError(Problem("micro_batch", "missing, and no power of two divides the batch"))
    notes.append("micro-batch and interleaving not given: the fastest that fits")
    return RunCase(row, found[0], assumptions=tuple(notes), candidates=tuple(found))


def row_model(row: RunRow, note: Callable[[str], None]) -> ModelSpec:
    """The transformer of a row: its family's form with the row's shape.

    Raises:
        UserError: unknown family, or a shape field missing.
    """
    if not row.text("hidden") and not row.text("layers"):
        return _preset_model(row)
    family = row.choice("arch", {k: k for k in FAMILIES})
    if family == "deepseek":
        return _preset_cut(row, note)
    heads, hidden = row.integer("heads"), row.integer("hidden")
    if hidden % heads:
        raise UserError(Problem("heads", f"{heads} doesn't divide hidden {hidden}"))
    vocab = row.number("vocab")
    if vocab is None:
        note(f"vocabulary not given: {ASSUMED_VOCAB}")
    if not row.text("kv_heads"):
        note("kv_heads not given: as many as heads")
    experts = row.number("num_experts")
    ffn = row.integer("ffn_hidden")
    moe = None
    if experts:
        moe = MoeSpec(experts=int(experts), top_k=row.integer("topk"), ffn=ffn)
    fields = dict(FAMILIES[family])
    if fields.get("position") == "learned":
        fields["max_positions"] = row.integer("seq_len")
    return ModelSpec(
        name=row.text("model") or f"{family}-{row.text('layers')}x{hidden}",
        layers=row.integer("layers"), hidden=hidden, ffn=ffn, heads=heads,
        kv_heads=row.integer("kv_heads", heads), head_dim=hidden // heads,
        vocab=int(vocab if vocab is not None else ASSUMED_VOCAB), moe=moe, **fields,
    )  # fmt: skip


def _preset_model(row: RunRow) -> ModelSpec:
    """A row without a shape names a preset."""
    if not row.text("model"):
        raise UserError(row.problem("hidden", "missing", "give the shape, or a known model's name"))
    model = preset(row.text("model"))
    return replace(model, vocab=row.integer("vocab", model.vocab))


def _preset_cut(row: RunRow, note: Callable[[str], None]) -> ModelSpec:
    """A DeepSeek model: latent attention is not in the row's columns, a preset has it."""
    layers, hidden = row.integer("layers"), row.integer("hidden")
    name = {5120: "deepseek-v2", 2048: "deepseek-v2-lite", 7168: "deepseek-v3"}.get(hidden)
    if name is None:
        raise UserError(Problem("hidden", f"{hidden} is no known DeepSeek width"))
    note(f"latent attention and shared experts as in {name}")
    model = preset(name).with_layers(layers)
    assert model.moe is not None
    moe = replace(model.moe, experts=row.integer("num_experts", model.moe.experts),
                  top_k=row.integer("topk", model.moe.top_k))  # fmt: skip
    return replace(model, vocab=row.integer("vocab", model.vocab), moe=moe)


def _row_plan(
    row: RunRow, model: ModelSpec, cluster: Cluster, stack: Stack, notes: list[str]
) -> tuple[Plan, int, float]:
    """The plan, whole micro-batches per rank and the size of the last one."""
    tp, pp, cp = row.integer("tp", 1), row.integer("pp", 1), row.integer("cp", 1)
    vpp = row.integer("vpp", 1)
    dp = row.integer("dp", max(cluster.n_gpus // (tp * pp * cp), 1))
    notes += [f"{name} not given: {usual}" for name, usual in _USUAL.items() if not row.text(name)]
    micro_batch = row.integer("micro_batch", 1)
    count = _micro_batches(row, dp, micro_batch, notes)
    whole = math.ceil(count - 1e-9)
    fraction = 1.0 if abs(count - whole) < 1e-9 else count - math.floor(count)
    schedule: Schedule = "interleaved" if vpp > 1 else "1f1b"
    if schedule not in stack.schedules:
        raise UserError(row.problem("vpp", f"stack {stack.name} has no {schedule} schedule"))
    plan = Plan(
        dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=row.integer("ep", 1),
        sequence_parallel=_flag(row, "sp"), micro_batch=micro_batch,
        schedule=schedule,
        sharding=row.choice("sharding", _SHARDING, "none"),
        recompute=row.choice("recompute", _RECOMPUTE, "none"),
        precision=_precision(row, cluster, stack, notes),
        optimizer=_optimizer(row.text("optimizer")),
        attention=row.choice("attention", _ATTENTION), compile=_flag(row, "compile"),
        stage_layers=_stage_layers(row, model, pp, notes),
        assignment=stage_assignment(row, cluster, pp),
    )  # fmt: skip
    if row.text("sharding").lower() == "hsdp":
        plan = replace(plan, shard_degree=len(cluster.groups[0].gpus))
    return plan, max(whole, 1), fraction


def _flag(row: RunRow, name: str) -> bool:
    return row.number(name) == 1


def _micro_batches(row: RunRow, dp: int, micro_batch: int, notes: list[str]) -> float:
    """Micro-batches per step and rank; the last one is smaller where it isn't whole."""
    count, batch = row.number("grad_accum"), row.number("global_batch")
    if count is None:
        if batch is None:
            notes.append("neither grad_accum nor global_batch given: one micro-batch per step")
            return 1.0
        count = batch / (dp * micro_batch)
        if count < 1:
            raise UserError(
                row.problem("global_batch", f"{batch:g} is less than dp x micro_batch",
                            f"{dp} x {micro_batch}")
            )  # fmt: skip
    elif batch is not None and row.text("micro_batch"):
        implied = dp * micro_batch * count
        if abs(implied / batch - 1.0) > 0.01:
            notes.append(
                f"global_batch {batch:g} isn't dp x micro_batch x grad_accum: {implied:g} taken"
            )
    return count


def _precision(row: RunRow, cluster: Cluster, stack: Stack, notes: list[str]) -> str:
    """The row's precision; without one, bf16 where the GPUs have it and fp16 elsewhere."""
    named = row.text("precision").lower()
    is_nemo = "nemo recipe" in row.text("notes").lower() and "bf16_grad16" in stack.recipes
    if named == "bf16" and is_nemo:
        notes.append("NeMo's recipes reduce gradients in bf16")
        return "bf16_grad16"
    if named:
        return named
    recent = all(g.supports("bf16") for g in cluster.gpu_types)
    wanted = ("bf16_grad32", "bf16", "fp16") if recent else ("fp16", "fp32")
    chosen = next((name for name in wanted if name in stack.recipes), next(iter(stack.recipes)))
    notes.append(f"precision not given: {chosen}")
    return chosen


def _optimizer(text: str) -> str:
    low = text.lower()
    return "adamw" if "adam" in low or not low else low.split("/")[0].replace("decoupled_", "")


def _stage_layers(
    row: RunRow, model: ModelSpec, pp: int, notes: list[str]
) -> tuple[int, ...] | None:
    """Layers of each stage; where the ends count as blocks, they are taken off the ends."""
    text = row.text("stage_layers")
    if not text or pp == 1:
        return None
    try:
        counts = [int(float(part)) for part in text.split("/")]
    except ValueError:
        raise UserError(Problem("stage_layers", f"{text!r} isn't numbers joined by /")) from None
    if len(counts) != pp:
        raise UserError(Problem("stage_layers", f"{text!r} doesn't name {pp} stages"))
    if sum(counts) == model.layers + 2:
        counts[0] -= 1
        counts[-1] -= 1
        notes.append("stage_layers counts embedding and head as layers")
    if sum(counts) != model.layers:
        raise UserError(
            Problem("stage_layers", f"{text!r} sums to {sum(counts)}, not {model.layers}")
        )
    return tuple(counts)


def read_cases(path: Path, *, stack: str | None = None) -> Iterator[RunCase]:
    """Every row of a file as a case, in file order."""
    for row in read_table(path).rows:
        yield run_case(row, stack=stack)
