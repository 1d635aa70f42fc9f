"""Fresh parameter values that don't depend on how the state is spread over ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements that one random stream fills: a rank draws only the blocks that touch its shard.
BLOCK = 1 << 20

_ONES = ("norm.weight",)
_RESIDUAL_OUTPUTS = ("attention.out.weight", "down.weight", "experts.down")


def initial_values(
    name: str,
    shape: Sequence[int],
    span: tuple[int, int],
    *,
    seed: int,
    std: float,
    layers: int,
    device: torch.device,
) -> Tensor:
    """Elements ``span[0]`` to ``span[1]`` of the flattened parameter ``name``, fp32.

    Norm weights are ones, biases zeros, matrices normal with deviation ``std``, divided by
    sqrt(2 * layers) where they write to the residual stream (GPT-2 section 2.3). The values depend
    on name, seed and kind of device.
    """
    start, stop = span
    if name.endswith(_ONES):
        return torch.ones(stop - start, device=device)
    if name.endswith("bias"):
        return torch.zeros(stop - start, device=device)
    if name.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * max(layers, 1))
    size = math.prod(shape)
    parts = [
        _block(name, block, min(BLOCK, size - block * BLOCK), seed, device)[
            max(start - block * BLOCK, 0) : stop - block * BLOCK
        ]
        for block in range(start // BLOCK, -(-stop // BLOCK))
    ]
    return torch.cat(parts) * std if parts else torch.empty(0, device=device)


def _block(name: str, block: int, size: int, seed: int, device: torch.device) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randn(size, generator=generator, device=device)
