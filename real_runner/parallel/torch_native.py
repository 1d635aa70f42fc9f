"""Standard parallelism with torch's own parts: DDP, FSDP2, tensor and pipeline parallelism.

Ranks are ordered as in ``simulator.spec.layout``: tensor parallel fastest, then data, then
pipeline. Every combination trains on the mean loss over all tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from real_runner.initial import initial_values
from real_runner.model import Transformer, token_loss
from real_runner.parallel.flat import DTYPES
from real_runner.parallel.ranks import CommClock
from real_runner.parallel.uneven import Batch, Options, StepResult
from simulator.errors import UserError
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Schedule, Sharding


@dataclass(frozen=True)
class Degrees:
    """Degrees and shapes of a plan whose ranks all do the same.

    ``chunk_layers[stage]`` are the layers of each of the stage's model chunks. ``shard`` is the
    number of ranks that one copy of the sharded state is spread over.
    """

    dp: int
    tp: int
    pp: int
    chunk_layers: tuple[tuple[int, ...], ...]
    micro_batch: int
    micro_batches: int
    sequence_length: int
    sharding: Sharding = Sharding.NONE
    shard: int = 1
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 wraps the model: sharded gradients, or replicas of DTensors (which
        DistributedDataParallel doesn't take) as its hybrid form with shards of one rank."""
        return self.sharding >= Sharding.ZERO2 or (self.dp > 1 and self.tp > 1)

    @property
    def vpp(self) -> int:
        """Model chunks of each pipeline rank."""
        return len(self.chunk_layers[0])


class Chunk(nn.Module):
    """Consecutive layers of a model, with embedding and head where they are at its ends.

    Parameters have the names that they have in the whole model.
    """

    def __init__(self, model: Transformer, layers: range, recomputed: range) -> None:
        super().__init__()
        spec = model.spec
        self.embedding = model.embedding if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        self.head = model.head if layers.stop == spec.layers else None
        self.tied, self.recomputed = spec.tied_embeddings, recomputed

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or the residual stream in, the residual stream or logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for name, layer in self.layers.items():
            if int(name) in self.recomputed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        if self.head is not None:
            table = self.embedding.token.weight if self.tied and self.embedding else None
            x = self.head(x, table)
        return x


def check_native(spec: ModelSpec, degrees: Degrees, *, compiled: bool = False) -> None:
    """Raises UserError naming what can't be combined here."""
    faults = []
    if spec.tied_embeddings and (degrees.tp > 1 or degrees.pp > 1):
        faults.append("tied embeddings with tp or pp")
    if degrees.tp > 1:
        if spec.moe is not None or spec.mla is not None or spec.qk_norm == "full":
            faults.append("tp with experts, latent attention or full-width query norms")
        if spec.kv_heads % degrees.tp or spec.vocab % degrees.tp:
            faults.append(f"tp {degrees.tp} that doesn't divide key/value heads and vocabulary")
        if spec.embedding_norm or spec.embedding_width is not None:
            faults.append("tp with an embedding norm or projection")
    if degrees.sequence_parallel and (spec.position == "learned" or spec.parallel_block):
        faults.append("sequence parallelism with learned positions or parallel blocks")
    if compiled and degrees.tp > 1:
        faults.append("compile with tp")  # redistribution loses its DTensors there (torch 2.13)
    if degrees.pp > 1 and degrees.schedule not in ("gpipe", "1f1b", "interleaved"):
        faults.append(f"schedule {degrees.schedule}")
    if degrees.pp > 1 and degrees.sharding == Sharding.ZERO1:
        faults.append("zero1 with pp")
    if faults:
        raise UserError(f"torch's runtime can't run {'; '.join(faults)}")


def layer_plan(sequence_parallel: bool, *, gated: bool) -> dict[str, ParallelStyle]:
    """Tensor-parallel styles of one layer (arXiv 1909.08053 section 3, 2205.05198 section 4.2)."""
    inner: Any = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=inner),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=inner),
    }
    if gated:
        plan["mlp.gate"] = ColwiseParallel()
    if sequence_parallel:
        gather = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        norm = SequenceParallel(use_local_output=True)
        plan |= {"attention_norm": norm, "mlp_norm": norm, "attention": gather, "mlp": gather}
    return plan


def _tensor_parallel(chunk: Chunk, spec: ModelSpec, degrees: Degrees, mesh: DeviceMesh) -> None:
    inner: Any = Shard(1) if degrees.sequence_parallel else Replicate()
    if chunk.embedding is not None:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=inner)
        parallelize_module(chunk.embedding, mesh, {"token": style})
    for layer in chunk.layers.values():
        plan = layer_plan(degrees.sequence_parallel, gated=spec.gated)
        plan = {name: style for name, style in plan.items() if _has(layer, name)}
        parallelize_module(layer, mesh, plan)
    if chunk.head is not None:
        output = ColwiseParallel(output_layouts=Replicate())
        plan = {"output": output}
        if degrees.sequence_parallel:
            plan["norm"] = SequenceParallel(use_local_output=False)
            plan["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(chunk.head, mesh, plan)


def _has(module: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _shard(chunk: Chunk, degrees: Degrees, mesh: DeviceMesh, precision: str) -> None:
    """FSDP2: one unit per layer, the rest in the root."""
    dtypes = DTYPES[precision]
    mixed = dtypes.compute != dtypes.master
    policy = (
        MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.master)
        if mixed
        else MixedPrecisionPolicy()
    )
    reshard = degrees.sharding == Sharding.ZERO3
    for layer in chunk.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(chunk, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _initialise(chunk: Chunk, model: Transformer, device: torch.device, seed: int) -> None:
    """Values as in one process, each rank keeping its part."""
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            values = initial_values(
                name,
                parameter.shape,
                (0, parameter.numel()),
                seed=seed,
                std=model.details.initial_std,
                layers=model.spec.layers,
                device=device,
            ).view(parameter.shape)
            if isinstance(parameter, DTensor):
                values = distribute_tensor(
                    values.to(parameter.dtype),
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
            parameter.copy_(values)


class NativeTrainer:
    """Trains with torch's DDP, FSDP2, tensor and pipeline parallelism.

    All ranks build it alike; every rank of a replica gets the replica's micro-batches.
    """

    def __init__(
        self, model: Transformer, degrees: Degrees, options: Options, device: torch.device
    ) -> None:
        """Takes over the model's parts. Raises UserError for what can't be combined."""
        check_native(model.spec, degrees, compiled=options.compile is not None)
        self.degrees, self.options, self.device = degrees, options, device
        shard = degrees.shard if degrees.sharding >= Sharding.ZERO2 else 1
        shape = (degrees.pp, degrees.dp // shard, shard, degrees.tp)
        names = ("pp", "replicate", "shard", "tp")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.dtypes = DTYPES[options.precision]
        self.modules = self._build(model)
        self.optimizers = self._build_optimizers()
        self._pipeline = self._build_pipeline(model.spec) if degrees.pp > 1 else None
        self._scale = 1.0

    @property
    def clock(self) -> CommClock | None:
        """torch's runtimes don't tell how long they wait."""
        return None

    def _build(self, model: Transformer) -> list[nn.Module]:
        """This rank's model chunks, parallel and filled."""
        degrees, o = self.degrees, self.options
        recomputed = range(model.spec.layers if o.recompute_layers is None else o.recompute_layers)
        built: list[nn.Module] = []
        for layers in self._own_chunks():
            chunk = Chunk(model, layers, recomputed)
            chunk.to(self.dtypes.master)
            if degrees.tp > 1:
                _tensor_parallel(chunk, model.spec, degrees, self.mesh["tp"])
            if o.compile is not None:
                for layer in chunk.layers.values():
                    layer.compile(backend=o.compile)
            if degrees.fsdp:
                mesh = self.mesh["replicate", "shard"]
                hybrid = degrees.dp > degrees.shard or degrees.sharding < Sharding.ZERO2
                _shard(chunk, degrees, mesh if hybrid else self.mesh["shard"], o.precision)
            chunk.to_empty(device=self.device)
            _initialise(chunk, model, self.device, o.seed)
            if degrees.dp > 1 and not degrees.fsdp:
                group = self.mesh.get_group("replicate")
                built.append(DistributedDataParallel(chunk, process_group=group))
            else:
                built.append(chunk)
        return built

    def _own_chunks(self) -> Iterator[range]:
        """Layers of this rank's chunks: chunk c of all stages comes before chunk c + 1."""
        stage, start = self.mesh.get_local_rank("pp"), 0
        for chunk in range(self.degrees.vpp):
            for other, sizes in enumerate(self.degrees.chunk_layers):
                if other == stage:
                    yield range(start, start + sizes[chunk])
                start += sizes[chunk]

    def _parameters(self) -> list[list[nn.Parameter]]:
        """Parameters by kind and mesh: optimisers and norms take one kind at a time."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for module in self.modules:
            for parameter in module.parameters():
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                groups.setdefault(mesh, []).append(parameter)
        return list(groups.values())

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        o = self.options
        settings: dict[str, Any] = {
            "lr": o.learning_rate,
            "betas": o.betas,
            "eps": o.eps,
            "weight_decay": o.weight_decay,
            "fused": True,
        }
        if self.degrees.sharding == Sharding.ZERO1 and self.degrees.dp > 1:
            # Imported here: it loads TorchScript, which warns that it is deprecated.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            group = self.mesh.get_group("replicate")
            return [
                ZeroRedundancyOptimizer(p, torch.optim.AdamW, process_group=group, **settings)
                for p in self._parameters()
            ]
        return [torch.optim.AdamW(p, **settings) for p in self._parameters()]

    def _build_pipeline(self, spec: ModelSpec) -> Any:
        degrees = self.degrees
        stage = self.mesh.get_local_rank("pp")
        count = degrees.pp * degrees.vpp
        length = degrees.sequence_length
        inner = length // degrees.tp if degrees.sequence_parallel else length
        ids = torch.empty(degrees.micro_batch, length, dtype=torch.long, device="meta")
        wide = self.dtypes.compute if degrees.fsdp else self.dtypes.master
        hidden = torch.empty(degrees.micro_batch, inner, spec.hidden, dtype=wide, device="meta")
        hidden.requires_grad_()  # or the stages send no gradients
        logits = torch.empty(degrees.micro_batch, length, spec.vocab, dtype=wide, device="meta")
        stages: list[Any] = [
            PipelineStage(
                module,
                index,
                count,
                self.device,
                input_args=ids if index == 0 else hidden,
                output_args=logits if index == count - 1 else hidden,
                group=self.mesh.get_group("pp"),
            )
            for module, index in zip(self.modules, range(stage, count, degrees.pp), strict=True)
        ]
        n = degrees.micro_batches
        common: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if degrees.vpp > 1:
            return ScheduleInterleaved1F1B(stages, n, **common)
        single = ScheduleGPipe if degrees.schedule == "gpipe" else Schedule1F1B
        return single(stages[0], n, **common)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Summed loss over the global token count; times dp, since gradients are averaged."""
        return token_loss(logits, labels) * self._scale

    def _autocast(self) -> AbstractContextManager[Any]:
        """Without FSDP2's casts, mixed precision is autocast's."""
        if self.dtypes.compute == self.dtypes.master or self.degrees.fsdp:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtypes.compute)

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimiser step on this replica's micro-batches."""
        device, degrees = self.device, self.degrees
        counted = sum(int((labels != -100).sum()) for _, labels in batches)
        totals = torch.tensor([float(counted), 0.0], dtype=torch.float64, device=device)
        # Every replica is counted by its tp * pp ranks.
        dist.all_reduce(totals)
        tokens = round(totals[0].item() / (degrees.tp * degrees.pp))
        self._scale = degrees.dp / max(tokens, 1)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self._autocast():
            local = self._pipelined(batches) if self._pipeline else self._plain(batches)
        totals[1] = local / degrees.dp
        dist.all_reduce(totals)
        norm = self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
        loss = totals[1].item() / degrees.tp
        return StepResult(loss, norm, tokens)

    def _plain(self, batches: Sequence[Batch]) -> float:
        """Micro-batches one after the other; DDP reduces with the last. The scaled loss."""
        (module,) = self.modules
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (tokens, labels) in enumerate(batches):
            last = i == len(batches) - 1
            hold: Callable[[], AbstractContextManager[Any]] = nullcontext
            if isinstance(module, DistributedDataParallel) and not last:
                hold = module.no_sync
            with hold():
                loss = self._loss(module(tokens), labels)
                total += loss.detach()
                loss.backward()
        return float(total)

    def _pipelined(self, batches: Sequence[Batch]) -> float:
        """All micro-batches through the pipeline; the scaled loss (0 but on the last stage)."""
        assert self._pipeline is not None
        tokens = torch.cat([ids for ids, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
        stage, last = self.mesh.get_local_rank("pp"), self.degrees.pp - 1
        losses: list[Tensor] = []
        inputs = (tokens,) if stage == 0 else ()
        if stage == last:
            self._pipeline.step(*inputs, target=labels, losses=losses)
        else:
            self._pipeline.step(*inputs)
        return float(sum(float(loss.detach()) for loss in losses))

    def _clip(self) -> float:
        """Clips by the global norm over all chunks and stages; returns the norm before."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        groups = self._parameters()
        for group in groups:
            gradients = [p.grad for p in group if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            square += whole.double() ** 2
        if self.degrees.pp > 1:
            dist.all_reduce(square, group=self.mesh.get_group("pp"))
        total = float(square.sqrt())
        clip = self.options.clip
        if clip is not None and total > clip:
            for group in groups:
                for parameter in group:
                    if parameter.grad is not None:
                        parameter.grad.mul_(clip / total)
        return total


def whole_parameters(trainer: NativeTrainer) -> dict[str, Tensor]:
    """This rank's parameters by name, gathered over tp and dp (all their ranks must call)."""
    found = {}
    for module in trainer.modules:
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name.removeprefix("module.")] = whole.detach()
    return found
