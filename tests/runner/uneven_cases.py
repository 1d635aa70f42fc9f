"""Random cases of uneven training, run in rank processes and compared with one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from real_runner.launch import RankContext
from real_runner.model import Transformer, materialise, token_loss
from real_runner.parallel.ranks import make_ranks
from real_runner.parallel.uneven import Options, UnevenTrainer
from simulator.spec.model import ModelSpec, MoeSpec

SPECS = {
    "llama": ModelSpec("llama", 3, 32, 48, 4, 2, 8, 61),
    "tied gpt": ModelSpec(
        "gpt", 2, 24, 64, 3, 3, 8, 61, tied_embeddings=True, norm="layernorm", activation="gelu",
        position="learned", max_positions=32, qkv_bias=True, attention_out_bias=True,
        mlp_bias=True, norm_bias=True,
    ),
    "moe": ModelSpec("moe", 2, 32, 48, 4, 4, 8, 61, moe=MoeSpec(4, 2, 24, dense_layers=1)),
    "embedding norm": ModelSpec("norm", 2, 32, 48, 4, 2, 8, 61, embedding_norm=True),
}  # fmt: skip
RANDOM_SPECS = tuple(SPECS)
SPECS["even llama"] = replace(SPECS["llama"], vocab=64)
SPECS["deep llama"] = replace(SPECS["llama"], layers=5)
STEPS = 3


@dataclass(frozen=True)
class Case:
    """``batches[rank]`` lists micro-batch sizes."""

    spec: str
    shares: tuple[float, ...]
    batches: tuple[tuple[int, ...], ...]
    options: Options


def random_case(world: int, seed: int, precision: str = "fp64") -> Case:
    """Shares and batches of any unevenness, some of them zero."""
    rng = random.Random(seed * 100 + world)
    weights = [rng.choice((0.0, 1.0, rng.random())) for _ in range(world)]
    if not any(weights):
        weights[rng.randrange(world)] = 1.0
    if seed == 0:
        weights = [1.0] * world  # the even path
    shares = tuple(w / sum(weights) for w in weights)
    batches = [tuple([rng.randint(1, 3)] * rng.choice((0, 1, 2, 3))) for _ in range(world)]
    if not any(batches):
        batches[0] = (2, 2)
    offload = rng.random() < 0.3
    options = Options(
        precision=precision,
        recompute_layers=None if offload else rng.choice((None, 0, 1)),
        offload=offload,
        prefetch=rng.randint(0, 2),
        learning_rate=1e-2,
        clip=rng.choice((None, 0.5, 100.0)),
        seed=seed,
    )
    return Case(rng.choice(RANDOM_SPECS), shares, tuple(batches), options)


def samples(case: Case, step: int, length: int = 12) -> list[list[tuple[Tensor, Tensor]]]:
    """(tokens, labels) of each rank's micro-batches; some labels aren't counted."""
    generator = torch.Generator().manual_seed(case.options.seed * 10 + step)
    vocab = SPECS[case.spec].vocab
    found = []
    for sizes in case.batches:
        row = []
        for size in sizes:
            ids = torch.randint(0, vocab, (size, length + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
            row.append((ids[:, :-1], labels))
        found.append(row)
    return found


def gathered(trainer: UnevenTrainer, what: str) -> dict[str, Tensor]:
    """Whole parameters (``value``) or gradients (``grad``) by name, from all ranks' shards."""
    result = {}
    for unit in trainer.units:
        source = unit.shard if what == "value" else unit.shard.grad
        assert source is not None
        for slot in unit.slots:
            result[slot.name] = torch.zeros(slot.numel, dtype=source.dtype)
        for slot, (start, stop), here in unit.local_slices():
            result[slot.name][start:stop] = source[here : here + stop - start]
        for slot in unit.slots:
            if trainer.ranks.world > 1:
                dist.all_reduce(result[slot.name])
            result[slot.name] = result[slot.name].view(slot.shape)
    return result


def reference(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The same training in one process with torch's own autograd and AdamW."""
    model = Transformer(SPECS[case.spec])
    materialise(model, seed=case.options.seed, device="cpu", dtype=dtype)
    o = case.options
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.learning_rate, betas=o.betas, eps=o.eps,
        weight_decay=o.weight_decay, foreach=False,
    )  # fmt: skip
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batches = [b for row in samples(case, step) for b in row]
        count = sum(int((labels != -100).sum()) for _, labels in batches)
        optimizer.zero_grad()
        total = sum(float(_backward(model, batch, count)) for batch in batches)
        if step == 0:
            gradients = {n: _grad(p).clone() for n, p in model.named_parameters()}
        square = sum(float(_grad(p).double().square().sum()) for p in model.parameters())
        norms.append(square**0.5)
        if o.clip is not None and norms[-1] > o.clip:
            for p in model.parameters():
                _grad(p).mul_(o.clip / norms[-1])
        for p in model.parameters():
            p.grad = _grad(p)  # a parameter that nothing used still decays
        optimizer.step()
        losses.append(total / count)
    values = {n: p.detach() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "values": values}


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _backward(model: Transformer, batch: tuple[Tensor, Tensor], count: int) -> Tensor:
    loss = token_loss(model(batch[0]), batch[1])
    (loss / count).backward()
    return loss.detach()


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert found.keys() == expected.keys()
    pairs = [(found[n].double(), expected[n].double()) for n in expected]
    return max(float((a - b).abs().max()) for a, b in pairs)


def run_case(context: RankContext, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Differences between a case on the ranks and the same training in one process."""
    ranks = make_ranks(case.shares, context.device)
    trainer = UnevenTrainer(Transformer(SPECS[case.spec]), ranks, case.options)
    expected = reference(case, dtype)
    trainer.gradients(samples(case, 0)[context.rank])
    result = {"gradients": difference(gathered(trainer, "grad"), expected["gradients"])}
    for unit in trainer.units:
        assert unit.shard.grad is not None
        unit.shard.grad.zero_()
    steps = [trainer.step(samples(case, step)[context.rank]) for step in range(STEPS)]
    pairs = list(zip(steps, expected["losses"], expected["norms"], strict=True))
    result["loss"] = max(abs(s.loss - loss) for s, loss, _ in pairs)
    result["norm"] = max(abs(s.grad_norm - norm) / norm for s, _, norm in pairs)
    result["values"] = difference(gathered(trainer, "value"), expected["values"])
    held = sum(u.shard.numel() for u in trainer.units) / sum(u.bounds[-1] for u in trainer.units)
    result["share"] = abs(held - case.shares[context.rank])
    return result


def run_cases(context: RankContext, cases: list[Case]) -> list[dict[str, float]]:
    """All cases one after the other."""
    results = []
    for case in cases:
        context.progress(repr(case))
        wide = case.options.precision == "fp64"
        results.append(run_case(context, case, torch.float64 if wide else torch.float32))
    return results


def tied_everything(world: int) -> Case:
    """Rank 0 holds all state, the last rank does all the work."""
    shares = (1.0, *[0.0] * (world - 1))
    batches = (*[()] * (world - 1), (2, 1))
    return replace(random_case(world, 1), spec="tied gpt", shares=shares, batches=batches)
