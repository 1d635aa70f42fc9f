"""What is trained: sequence length, batch and number of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One training job.

    ``sequence_length`` in tokens, ``global_batch`` in sequences per optimiser step, ``tokens`` to
    train on in total (``None``: not asked).
    """

    sequence_length: int
    global_batch: int
    tokens: float | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step consumes."""
        return self.sequence_length * self.global_batch
