"""What the stages of a uniform pipeline hold: the few kinds among them, by (pp, vpp)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simulator.spec.layout import layers_by_chunk, stage_layer_counts
from simulator.spec.model import ModelSpec
from simulator.spec.plan import Plan


@dataclass(frozen=True)
class Held:
    """Layers of one stage (or of one of its chunks), dense and MoE."""

    dense: float
    moe: float


@dataclass(frozen=True)
class StageKinds:
    """The stages of ``pp`` ranks with ``vpp`` chunks each.

    ``fullest`` are (stage, layers) of the stages one of which needs the most memory: later ones
    that hold no more than an earlier one are left out. ``first``, ``middle`` and ``last`` are
    layers of the first rank's first chunk, of a chunk of the slowest inner rank (a mean) and of the
    last rank's last chunk, such that each rank's chunks sum to its layers. ``inner_mean`` is the
    mean over inner ranks where ``middle`` is the largest. ``chunk_sizes`` are whole layers of the
    same three chunks.
    """

    pp: int
    vpp: int
    fullest: tuple[tuple[int, Held], ...]
    first: Held
    middle: Held
    last: Held
    inner_mean: Held
    chunk_sizes: tuple[int, int, int]


@lru_cache(maxsize=4096)
def stage_kinds(model: ModelSpec, pp: int, vpp: int) -> StageKinds:
    """Kinds of stages of a model's even pipeline. Raises UserError where layers are too few."""
    plan = Plan(pp=pp, vpp=vpp)
    chunks, moe = layers_by_chunk(model, stage_layer_counts(model, plan), plan)
    held = [Held(sum(c) - sum(m), sum(m)) for c, m in zip(chunks, moe, strict=True)]
    inner = held[1:-1]
    slowest = max(inner or held[:1], key=lambda h: (h.dense + h.moe, h.moe))
    middle = Held(slowest.dense / vpp, slowest.moe / vpp)
    mean = _mean(inner) if inner else slowest
    largest = max((max(c) for c in chunks[1:-1]), default=max(chunks[0]))
    return StageKinds(
        pp=pp,
        vpp=vpp,
        fullest=_fullest(held),
        first=_rest(held[0], middle, vpp),
        middle=middle,
        last=_rest(held[-1], middle, vpp),
        inner_mean=Held(mean.dense / vpp, mean.moe / vpp),
        chunk_sizes=(chunks[0][0], largest, chunks[-1][-1]),
    )


def _mean(held: list[Held]) -> Held:
    n = len(held)
    return Held(sum(h.dense for h in held) / n, sum(h.moe for h in held) / n)


def _rest(whole: Held, middle: Held, vpp: int) -> Held:
    """The end chunk of a rank whose other chunks are middle ones."""
    return Held(whole.dense - (vpp - 1) * middle.dense, whole.moe - (vpp - 1) * middle.moe)


def _fullest(held: list[Held]) -> tuple[tuple[int, Held], ...]:
    """First and last stage, and the inner ones that hold more of something than all before."""
    last = len(held) - 1
    kept = [(0, held[0])]
    for stage in range(1, last):
        one = held[stage]
        # Earlier stages keep as many micro-batches or more.
        if not any(h.dense >= one.dense and h.moe >= one.moe for _, h in kept):
            kept.append((stage, one))
    if last > 0:
        kept.append((last, held[last]))
    return tuple(kept)
