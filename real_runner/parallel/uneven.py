"""GPUMix data parallelism: uneven batches, uneven state, layered gradient accumulation.

Method: Cephalo (arXiv 2411.01075). Each rank runs its own micro-batches and holds its own share of
parameters, gradients and optimiser state. All micro-batches of a rank go through a unit before the
next unit, so that a unit is gathered once per pass and reduced once per step, however many
micro-batches there are. The loss is a mean over all tokens of all ranks, so that every token weighs
the same whatever rank it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from real_runner.emulate import Slowdown
from real_runner.model import Transformer, token_loss
from real_runner.parallel.flat import DTYPES, FlatUnit
from real_runner.parallel.offload import Boundaries, OnDevice, OnHost
from real_runner.parallel.ranks import CommClock, Ranks

Batch = tuple[Tensor, Tensor]
#: (unit, micro-batch) -> (the unit's input, where its output's gradient enters the graph).
Graphs = dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]


@dataclass(frozen=True)
class Options:
    """How the runtime trains.

    ``recompute_layers`` is how many layers (the first ones) keep only their input for the backward
    pass, None all of them. ``offload`` keeps layer inputs in host memory and needs all layers
    recomputed. ``prefetch`` units are gathered ahead. ``clip`` is the largest global gradient norm.
    ``compile`` names torch.compile's backend for the layers (``inductor``), None runs them eagerly.
    """

    precision: str = "bf16"
    recompute_layers: int | None = None
    offload: bool = False
    prefetch: int = 1
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    seed: int = 0
    slowdown: float = 1.0
    compile: str | None = None


@dataclass(frozen=True)
class StepResult:
    """One step: mean loss per token over all ranks, gradient norm before clipping, tokens.

    ``skipped`` says that fp16 gradients overflowed and the step left the parameters alone.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False


class LossScale:
    """Power of two that fp16 losses are multiplied by (arXiv 1710.03740 section 3.2).

    Halved when gradients overflow, doubled after ``patience`` good steps; always 1 for other
    dtypes.
    """

    def __init__(self, active: bool, patience: int = 2000) -> None:
        self.active, self.patience = active, patience
        self.value = 2.0**16 if active else 1.0
        self._good = 0

    def update(self, finite: bool) -> None:
        """After a step whose gradients were (not) all finite."""
        if not self.active:
            return
        if not finite:
            self.value, self._good = max(self.value / 2, 1.0), 0
        elif (self._good + 1) % self.patience == 0:
            self.value, self._good = self.value * 2, 0
        else:
            self._good += 1


class UnevenTrainer:
    """Trains one model on the ranks of the default process group.

    All ranks must build it alike and call :meth:`step` together, each with its own micro-batches
    (possibly none). :attr:`units` hold the state; ``ranks.clock`` the exposed communication.
    """

    def __init__(self, model: Transformer, ranks: Ranks, options: Options) -> None:
        """Takes over the model's parameters. ValueError for options that don't go together."""
        layers = model.spec.layers
        recompute = layers if options.recompute_layers is None else options.recompute_layers
        if options.offload and recompute < layers:
            raise ValueError("offloaded layer inputs need every layer recomputed")
        self.model, self.ranks, self.options = model, ranks, options
        dtypes = DTYPES[options.precision]
        self.units = [FlatUnit(name, m, ranks, dtypes) for name, m in model.units()]
        for unit in self.units:
            unit.initialise(
                seed=options.seed, std=model.details.initial_std, layers=model.spec.layers
            )
        if options.compile is not None:
            for unit in self.units[1:-1]:
                unit.module.compile(backend=options.compile)
        self.loss_scale = LossScale(options.precision == "fp16")
        self.optimizer = self._build_optimizer()
        self.steps = 0
        self._recomputed = recompute
        self._slow = Slowdown(options.slowdown, ranks.device)
        self._visits = self._plan_visits()
        self._visit = self._started = 0
        self._reducing: FlatUnit | None = None

    @property
    def clock(self) -> CommClock:
        """Time for which this rank stood still for communication."""
        return self.ranks.clock

    def _build_optimizer(self) -> torch.optim.AdamW | None:
        """AdamW over this rank's shards; None where it holds no share."""
        shards = [unit.shard for unit in self.units if unit.shard.numel()]
        o = self.options
        if not shards:
            return None
        return torch.optim.AdamW(
            shards,
            lr=o.learning_rate,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=True,
        )

    def _plan_visits(self) -> list[list[FlatUnit]]:
        """Units that each stage of a step reads, in order; all ranks gather in this order."""
        first, *layers, head = self.units
        tied = self.model.spec.tied_embeddings
        visits = [[first], *([u] for u in layers), [first, head] if tied else [head]]
        visits += [[u] for u in reversed(layers)]
        if self.model.embedding.reads_weights_in_backward:
            visits.append([first])
        return visits

    def _enter(self) -> None:
        """Waits for the next visit's units after starting to gather those after it."""
        ahead = min(self._visit + self.options.prefetch + 1, len(self._visits))
        for visit in self._visits[self._started : ahead]:
            for unit in visit:
                unit.start_gather()
        self._started = max(self._started, ahead)
        for unit in self._visits[self._visit]:
            unit.finish_gather()
        self._slow.begin()

    def _leave(self) -> None:
        for unit in self._visits[self._visit]:
            unit.release()
        self._visit += 1

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimiser step on this rank's micro-batches: (tokens, labels), (batch, length) each.

        Label -100 isn't counted. Every rank gets the same result.
        """
        loss, tokens = self.gradients(batches)
        norm = self._grad_norm()
        finite = bool(torch.isfinite(torch.tensor(norm)))
        self.loss_scale.update(finite)
        if finite or not self.loss_scale.active:
            self._update(norm)
        self.steps += 1
        for unit in self.units:
            assert unit.shard.grad is not None
            unit.shard.grad.zero_()
        return StepResult(loss, norm, tokens, skipped=self.loss_scale.active and not finite)

    def gradients(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Adds the gradient of the mean loss to the shards; returns (mean loss, tokens).

        Under fp16 the gradients are multiplied by the loss scale.
        """
        device = self.ranks.device
        count = torch.zeros(1, dtype=torch.float64, device=device)
        for _, labels in batches:
            count += (labels != -100).sum()
        self.ranks.sum_over_ranks(count)
        self._visit = self._started = 0
        boundaries: Boundaries = OnHost(device) if self.options.offload else OnDevice()
        graphs: Graphs = {}
        self._forward(batches, boundaries, graphs)
        # Still on the device: reading it here would stop the host until the device has caught up.
        total = self._head(batches, boundaries, self.loss_scale.value / count.clamp(min=1.0))
        self._backward(len(batches), boundaries, graphs)
        self._finish_reduction()
        self.ranks.sum_over_ranks(total)
        tokens = int(count.item())
        return float(total.item()) / max(tokens, 1), tokens

    def _forward(
        self,
        batches: Sequence[Batch],
        boundaries: Boundaries,
        graphs: Graphs,
    ) -> None:
        """Embedding and layers. Boundary ("x", index, m) is what unit l reads of micro-batch m."""
        n = len(batches)
        self._enter()
        for m, (tokens, _) in enumerate(batches):
            x = self._run(0, m, tokens)
            # Its backward pass reads token ids only, so that the graph is kept: it is small.
            graphs[0, m] = (None, get_gradient_edge(x))
            boundaries.put(("x", 1, m), x.detach())
        self._slow.end(n, None)
        self._leave()
        for index in range(1, len(self.units) - 1):
            self._enter()
            for m in range(n):
                x = boundaries.get(("x", index, m))
                boundaries.prefetch(("x", index, m + 1))
                if index <= self._recomputed:
                    with torch.no_grad():
                        y = self._run(index, m, x)
                else:
                    x = x.detach().requires_grad_()
                    y = self._run(index, m, x)
                    graphs[index, m] = (x, get_gradient_edge(y))
                    boundaries.drop(("x", index, m))
                boundaries.put(("x", index + 1, m), y.detach())
                del y
            self._pay(index, n, x if n else None)
            self._leave()

    def _head(self, batches: Sequence[Batch], boundaries: Boundaries, scale: Tensor) -> Tensor:
        """Logits, loss and their backward pass, one micro-batch after the other; the summed loss.

        Boundary ("g", index, m) is the gradient of unit l's output.
        """
        last = len(self.units) - 1
        head, table = self.units[last], self.model.embedding.token.weight
        tied = self.model.spec.tied_embeddings
        total = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        self._enter()
        shared = self._visits[self._visit]
        for unit in shared:
            unit.start_gradients()
        for m in reversed(range(len(batches))):
            x = boundaries.get(("x", last, m)).detach().requires_grad_()
            boundaries.prefetch(("x", last, m - 1))
            self._seed(last, m)
            logits = head.module(x, table if tied else None)
            loss = token_loss(logits, batches[m][1])
            del logits
            total += loss.detach()
            (loss * scale.squeeze().to(loss.dtype)).backward()
            assert x.grad is not None
            boundaries.drop(("x", last, m))
            boundaries.put(("g", last - 1, m), x.grad)
            del x, loss
        self._slow.end(3 * len(batches), None)
        self._leave()
        for unit in shared:
            self._reduce(unit)
        return total

    def _backward(
        self,
        n: int,
        boundaries: Boundaries,
        graphs: Graphs,
    ) -> None:
        """Layers in reverse, micro-batches in reverse; then the embedding."""
        for index in range(len(self.units) - 2, 0, -1):
            unit, recompute = self.units[index], index <= self._recomputed
            self._enter()
            unit.start_gradients()
            x = None
            for m in reversed(range(n)):
                if recompute:
                    x = boundaries.get(("x", index, m)).detach().requires_grad_()
                    boundaries.prefetch(("x", index, m - 1))
                    output = get_gradient_edge(self._run(index, m, x))
                else:
                    x, output = graphs.pop((index, m))
                gradient = boundaries.get(("g", index, m))
                boundaries.prefetch(("g", index, m - 1))
                torch.autograd.backward(output, gradient)
                assert x is not None and x.grad is not None
                if recompute:
                    boundaries.drop(("x", index, m))
                boundaries.drop(("g", index, m))
                boundaries.put(("g", index - 1, m), x.grad)
                x.grad = None
                del output, gradient
            self._pay(index, n * (3 if recompute else 2), x)
            del x
            self._leave()
            self._reduce(unit)
        first = self.units[0]
        reads = self.model.embedding.reads_weights_in_backward
        if reads:
            self._enter()
        first.start_gradients()
        for m in reversed(range(n)):
            gradient = boundaries.get(("g", 0, m))
            torch.autograd.backward(graphs.pop((0, m))[1], gradient)
            boundaries.drop(("g", 0, m))
        if reads:
            self._leave()
        self._reduce(first)

    def _run(self, index: int, micro_batch: int, x: Tensor) -> Tensor:
        self._seed(index, micro_batch)
        y: Tensor = self.units[index].module(x)
        return y

    def _pay(self, index: int, passes: int, x: Tensor | None) -> None:
        """Further work of a slowed rank after a unit's passes."""
        module = self.units[index].module
        self._slow.end(passes, None if x is None else lambda: module(x.detach()))

    def _seed(self, index: int, micro_batch: int) -> None:
        """Dropout draws the same mask when a layer is computed again."""
        if self.model.spec.dropout:
            where = (self.steps * self.ranks.world + self.ranks.rank) * 4096 + micro_batch
            torch.manual_seed(self.options.seed + where * len(self.units) + index)

    def _reduce(self, unit: FlatUnit) -> None:
        """Starts a unit's reduction; the one before it must be done, so that two buffers do."""
        self._finish_reduction()
        unit.start_reduce()
        self._reducing = unit

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self._reducing.finish_reduce()
            self._reducing = None

    def _grad_norm(self) -> float:
        """Global norm of the unscaled gradient."""
        square = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        for unit in self.units:
            assert unit.shard.grad is not None
            square += torch.linalg.vector_norm(unit.shard.grad).double() ** 2
        self.ranks.sum_over_ranks(square)
        return float(square.sqrt().item()) / self.loss_scale.value

    def _update(self, norm: float) -> None:
        clip = self.options.clip
        factor = 1.0 / self.loss_scale.value
        if clip is not None and norm > clip:
            factor *= clip / norm
        for unit in self.units:
            assert unit.shard.grad is not None
            if factor != 1.0:
                unit.shard.grad.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step()
