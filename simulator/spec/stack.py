"""The training framework's behaviour as data (``simulator/stacks/*.yaml``).

A stack says what is fused, what is kept for the backward pass, what overlaps with what and what
memory the framework holds beside the model. Every number in the files has its source beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from simulator.errors import UserError, nearest


@dataclass(frozen=True)
class PrecisionRecipe:
    """Bytes per parameter of one precision recipe before sharding, and the compute dtype.

    ``param_bytes`` is the copy that is trained on (sharded under ZeRO-3), ``compute_param_bytes``
    the width of gathered or cast parameters that kernels read, ``grad_bytes`` the gradient buffer
    that lives across micro-batches, ``reduce_bytes`` the width at which gradients are reduced,
    ``master_bytes`` an extra fp32 copy in the optimiser (0 where the parameters are fp32),
    ``moment_bytes`` both Adam moments together. ``compute_dtype`` names the matrix rate.
    ``activation_bytes`` is the width of saved activations. ``autocast`` casts fp32 weights at every
    use; ``fused_grad_accumulation`` lets the weight-gradient product add into ``grad_bytes``-wide
    buffers itself. ``operand_bytes`` is the width of the kept inputs of weight products where it
    differs (fp8; 0: as ``activation_bytes``).
    """

    name: str
    compute_dtype: str
    param_bytes: float
    compute_param_bytes: float
    grad_bytes: float
    reduce_bytes: float
    master_bytes: float
    moment_bytes: float
    activation_bytes: float
    autocast: bool = False
    fused_grad_accumulation: bool = False
    operand_bytes: float = 0.0

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients, master weights and moments together, per parameter."""
        return self.param_bytes + self.grad_bytes + self.master_bytes + self.moment_bytes


@dataclass(frozen=True)
class Kept:
    """Fusion choices of the stack's layer: which kernels run and what autograd keeps.

    Tensors are named in ``cost/operators.py``, which turns these switches into bytes and kernels.

    ``norm_output_kept`` is False where the norm's output is recomputed with the norm in backward;
    ``fused_activation`` keeps only the MLP's first product (both halves where gated) and the
    activation's output, unfused gated activations also keep the activated gate; ``fused_softmax``
    runs scale, mask and softmax as one kernel; ``dropout_masks`` whether dropout masks are kept
    where the model has dropout; ``kv_expanded`` whether K and V are repeated to all heads before
    attention; ``fp32_norm`` whether the norm computes on an fp32 copy that is kept;
    ``rope_kept_bytes`` bytes per element of Q and K kept by an unfused rotary embedding.
    ``logits_bytes`` bytes per local logit that live at the peak of the head's backward pass;
    ``loss_bytes`` bytes per local logit that the loss moves, forward and backward together;
    ``selective`` is what SELECTIVE recompute drops: ``attention-core`` (arXiv 2205.05198) or
    ``op-policy`` (torchtitan: all but matrix products chosen by its policy and attention).
    ``attention`` is the kernel that ``auto`` means on GPUs that have it.
    """

    fused_norm: bool = True
    fused_activation: bool = True
    fused_rope: bool = True
    fused_softmax: bool = True
    fused_residual_dropout: bool = True
    norm_output_kept: bool = True
    dropout_masks: bool = True
    kv_expanded: bool = False
    fp32_norm: bool = False
    rope_kept_bytes: float = 0.0
    logits_bytes: float = 4.0
    loss_bytes: float = 28.0
    selective: str = "attention-core"
    attention: str = "flash2"


@dataclass(frozen=True)
class Overlap:
    """Share of each kind of communication that may hide behind compute (0 none, 1 all).

    ``fsdp_prefetch`` is the number of units gathered ahead. ``pp`` says whether pipeline sends
    overlap with compute of other micro-batches.
    """

    tp: float = 0.0
    dp: float = 1.0
    param_gather: float = 1.0
    fsdp_prefetch: int = 1
    pp: float = 1.0
    cp: float = 1.0
    ep: float = 0.0


@dataclass(frozen=True)
class Framework:
    """Memory and time that the framework itself takes on each rank.

    ``bucket_bytes`` is the gradient bucket of data parallelism; ``grads_in_buckets`` whether the
    gradient buffer itself is the bucket (no copy); ``context_bytes`` CUDA's and the libraries'
    device memory outside the allocator; ``communicator_bytes`` NCCL buffers per communicator;
    ``workspace_bytes`` cuBLAS and friends inside the allocator; ``fragmentation`` expected
    reserved over allocated minus one; ``dispatch_s`` the host's time per kernel launch on the
    reference host and ``compiled_dispatch`` its factor under torch.compile; ``step_overhead_s``
    per step; ``micro_batch_overhead_s`` per micro-batch and model chunk; ``optimizer_fused`` one
    pass over the state against one per operation; ``wgrad_buffers`` whether fused
    weight-gradient accumulation keeps dummy gradients of 2 bytes per parameter of one layer
    (Transformer Engine >= 2.3).
    """

    bucket_bytes: float = 40e6
    grads_in_buckets: bool = True
    context_bytes: float = 0.5e9
    communicator_bytes: float = 0.2e9
    workspace_bytes: float = 0.07e9
    fragmentation: float = 0.05
    dispatch_s: float = 5e-6
    compiled_dispatch: float = 0.5
    step_overhead_s: float = 5e-3
    micro_batch_overhead_s: float = 0.0
    optimizer_fused: bool = True
    wgrad_buffers: bool = False


@dataclass(frozen=True)
class Buffers:
    """Memory that comes and goes beside the named training state.

    ``persistent_gradients`` is False where gradients are freed after the optimiser's step, so that
    a step's first backward pass starts without them. ``step_bytes`` are the optimiser step's
    temporaries per parameter that the rank updates. ``gradient_copies`` says how much of the
    gradients data parallelism copies into buckets: ``none``, ``bucket`` (``bucket_bytes`` at a
    time) or ``all`` (DistributedDataParallel without bucket views).

    For sharded parameters: ``gather_copies`` whether a gathered unit is copied out of the
    collective's buffer (FSDP2), ``live_parameters`` elements that stay gathered beyond the current
    unit (DeepSpeed's stage3_max_live_parameters), ``stream_pools`` whether collectives allocate on
    their own streams, whose cached blocks other streams can't reuse. ``logits_cached_bytes`` per
    local logit are blocks freed before the head's peak which its tensors can't reuse. ``outputs``
    whether a pipeline stage keeps its output until the backward pass. ``communicators`` is how many
    NCCL communicators exist even where no parallel dimension needs them.
    """

    persistent_gradients: bool = True
    step_bytes: float = 0.0
    gradient_copies: str = "none"
    gather_copies: bool = False
    live_parameters: float = 0.0
    stream_pools: bool = False
    logits_cached_bytes: float = 0.0
    outputs: bool = False
    communicators: int = 0


@dataclass(frozen=True)
class Stack:
    """One framework: recipes by precision name, fusion, overlap and constants.

    ``schedules`` lists the pipeline schedules it can run; ``uneven_batches`` whether ranks may run
    different micro-batches; ``sources`` maps a dotted field name to where its value is from.
    """

    name: str
    title: str
    recipes: Mapping[str, PrecisionRecipe]
    kept: Kept
    overlap: Overlap
    framework: Framework
    schedules: tuple[str, ...]
    uneven_batches: bool = False
    buffers: Buffers = field(default_factory=Buffers)
    sources: Mapping[str, str] = field(default_factory=dict)

    def recipe(self, precision: str) -> PrecisionRecipe:
        """The recipe for a precision name; UserError lists what the stack knows."""
        if precision not in self.recipes:
            raise UserError(
                f"precision {precision!r} is unknown to stack {self.name}; "
                f"known: {', '.join(self.recipes)}"
            )
        return self.recipes[precision]


def stack_names() -> list[str]:
    """Names of the shipped stacks."""
    folder = resources.files("simulator") / "stacks"
    return sorted(p.name[: -len(".yaml")] for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_stack(name: str) -> Stack:
    """A shipped stack by name; UserError lists the near names."""
    key = name.strip().lower().replace("_", "-")
    if key not in stack_names():
        near = nearest(key, stack_names()) or stack_names()
        raise UserError(f"stack {name!r} is unknown; known: {', '.join(near)}")
    return _read_stack(key)


@cache
def _read_stack(name: str) -> Stack:
    text = (resources.files("simulator") / "stacks" / f"{name}.yaml").read_text("utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return stack_from_mapping(name, data)


def stack_from_mapping(name: str, data: Mapping[str, Any]) -> Stack:
    """Build a Stack from a parsed file: ``{value, source}`` cells become values and sources."""
    sources: dict[str, str] = {}

    def plain(node: Any, path: str) -> Any:
        if isinstance(node, Mapping) and set(node) == {"value", "source"}:
            sources[path] = str(node["source"])
            return node["value"]
        if isinstance(node, Mapping):
            return {k: plain(v, f"{path}.{k}" if path else k) for k, v in node.items()}
        return node

    body = plain(data, "")
    recipes = {key: PrecisionRecipe(name=key, **cells) for key, cells in body["recipes"].items()}
    return Stack(
        name=name,
        title=body["title"],
        recipes=recipes,
        kept=Kept(**body.get("kept", {})),
        overlap=Overlap(**body.get("overlap", {})),
        framework=Framework(**body.get("framework", {})),
        schedules=tuple(body["schedules"]),
        uneven_batches=bool(body.get("uneven_batches", False)),
        buffers=Buffers(**body.get("buffers", {})),
        sources=sources,
    )
