"""Synthetic training data: the same samples whatever rank they land on."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(index: int, length: int, vocab: int, *, seed: int) -> Tensor:
    """Token ids (length,) of one sequence: a walk with a fixed stride and some noise.

    Learnable, so that a run's loss falls; ``index`` counts sequences over all steps.
    """
    generator = torch.Generator().manual_seed((seed << 32) + index)
    start = torch.randint(0, vocab, (1,), generator=generator)
    stride = torch.randint(1, min(8, vocab) + 1, (1,), generator=generator)
    walk = (start + stride * torch.arange(length)) % vocab
    noise = torch.randint(0, vocab, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.05, noise, walk)


def micro_batches(
    first: int,
    sizes: tuple[int, ...],
    length: int,
    vocab: int,
    device: torch.device,
    *,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of consecutive samples from ``first`` on, (size, length) each."""
    found = []
    for size in sizes:
        rows = [sample(first + i, length + 1, vocab, seed=seed) for i in range(size)]
        ids = torch.stack(rows).to(device)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
        first += size
    return found
