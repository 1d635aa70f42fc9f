"""Training with torch's own parallelism in rank processes, compared with one process."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from uneven_cases import SPECS, STEPS, Case, difference, reference, samples

from real_runner.launch import RankContext
from real_runner.model import Transformer
from real_runner.parallel.torch_native import Degrees, NativeTrainer, whole_parameters
from real_runner.parallel.uneven import Options
from simulator.spec.plan import Sharding

LENGTH = 12
ONE = ((3,),)
TWO = ((2,), (1,))
FOUR = Degrees(1, 1, 1, ONE, 2, 2, LENGTH)

#: Plans of four ranks (and fewer) by name: the model and the degrees.
PLANS: dict[str, tuple[str, Degrees]] = {
    "ddp": ("llama", replace(FOUR, dp=2)),
    "ddp tied": ("tied gpt", replace(FOUR, dp=2, chunk_layers=((2,),))),
    "zero1": ("llama", replace(FOUR, dp=2, sharding=Sharding.ZERO1)),
    "zero2": ("llama", replace(FOUR, dp=2, sharding=Sharding.ZERO2, shard=2)),
    "fsdp": ("llama", replace(FOUR, dp=2, sharding=Sharding.ZERO3, shard=2)),
    "fsdp moe": (
        "moe",
        replace(FOUR, dp=2, sharding=Sharding.ZERO3, shard=2, chunk_layers=((2,),)),
    ),
    "tp": ("even llama", replace(FOUR, tp=2)),
    "tp sp": ("even llama", replace(FOUR, tp=2, sequence_parallel=True)),
    "gpipe": ("llama", replace(FOUR, pp=2, chunk_layers=TWO, schedule="gpipe")),
    "1f1b": ("llama", replace(FOUR, pp=2, chunk_layers=TWO)),
    "interleaved": (
        "deep llama",
        replace(FOUR, pp=2, chunk_layers=((1, 1), (2, 1)), schedule="interleaved"),
    ),
    "hsdp": ("llama", replace(FOUR, dp=4, sharding=Sharding.ZERO3, shard=2)),
    "fsdp tp": ("even llama", replace(FOUR, dp=2, tp=2, sharding=Sharding.ZERO3, shard=2)),
    "dp tp": ("even llama", replace(FOUR, dp=2, tp=2)),
    "dp pp": ("llama", replace(FOUR, dp=2, pp=2, chunk_layers=TWO)),
    "fsdp pp": (
        "llama",
        replace(FOUR, dp=2, pp=2, chunk_layers=TWO, sharding=Sharding.ZERO3, shard=2),
    ),
    "tp pp": ("even llama", replace(FOUR, tp=2, pp=2, chunk_layers=TWO, sequence_parallel=True)),
}
OPTIONS = Options(precision="fp64", learning_rate=1e-2, clip=0.5, recompute_layers=1)


def world_of(name: str) -> int:
    degrees = PLANS[name][1]
    return degrees.dp * degrees.tp * degrees.pp


#: Plans whose layers are compiled too.
COMPILED = ("fsdp",)


def run_plans(context: RankContext, names: list[str]) -> dict[str, dict[str, float]]:
    """Differences of each plan from the same training in one process."""
    results = {}
    for name in names:
        context.progress(name)
        spec, degrees = PLANS[name]
        sizes = (degrees.micro_batch,) * degrees.micro_batches
        options = replace(OPTIONS, compile="aot_eager" if name in COMPILED else None)
        case = Case(spec, (), (sizes,) * degrees.dp, options)
        trainer = NativeTrainer(Transformer(SPECS[spec]), degrees, options, context.device)
        replica = trainer.mesh.get_local_rank("replicate") * trainer.mesh.size(2)
        replica += trainer.mesh.get_local_rank("shard")
        steps = [trainer.step(samples(case, step, LENGTH)[replica]) for step in range(STEPS)]
        expected = reference(case, torch.float64)
        values: dict[str, Tensor] = whole_parameters(trainer)
        held = {n: expected["values"][n] for n in values}
        pairs = list(zip(steps, expected["losses"], expected["norms"], strict=True))
        results[name] = {
            "loss": max(abs(s.loss - loss) for s, loss, _ in pairs),
            "norm": max(abs(s.grad_norm - norm) for s, _, norm in pairs),
            "values": difference(values, held),
            "parameters": float(len(values)),
        }
    return results
