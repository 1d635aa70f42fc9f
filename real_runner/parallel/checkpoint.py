"""Checkpoints of uneven training that load under other shares and another world size.

Each parameter is one flat tensor in torch.distributed.checkpoint's format, written by the ranks
that hold parts of it, under ``value.NAME``, ``first_moment.NAME`` and ``second_moment.NAME``; the
format's own metadata says which elements are where.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from real_runner.parallel.uneven import UnevenTrainer
from simulator.errors import UserError

_COUNTERS = "counters"


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` and on of the flat tensor ``name`` of ``size`` elements, held here."""

    name: str
    size: int
    start: int
    data: Tensor


class _Saver(DefaultSavePlanner):
    """Writes pieces instead of a state dictionary."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(p.name, p.start): p for p in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(p) for p in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        offset = write_item.index.offset
        assert offset is not None
        return self._pieces[write_item.index.fqn, offset[0]].data


def _write_item(piece: Piece) -> WriteItem:
    start = torch.Size([piece.start])
    return WriteItem(
        MetadataIndex(piece.name, start),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(start, piece.data.shape),
            TensorProperties(dtype=piece.data.dtype),
            torch.Size([piece.size]),
        ),
    )


class _Loader(DefaultLoadPlanner):
    """Reads what overlaps each piece from whatever chunks were written."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(p.name, p.start): p for p in pieces}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.is_coordinator = is_coordinator
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for p in self._pieces.values() for item in self._reads(p)])

    def _reads(self, piece: Piece) -> list[ReadItem]:
        stored = self._stored.get(piece.name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size[0] != piece.size:
            held = "nothing" if stored is None else "another size"
            raise UserError(
                f"the checkpoint is of another model: it holds {held} for {piece.name} "
                f"({piece.size} elements)"
            )
        items = []
        for chunk in stored.chunks:
            first = max(piece.start, chunk.offsets[0])
            end = min(piece.start + piece.data.numel(), chunk.offsets[0] + chunk.sizes[0])
            if end > first:
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index=MetadataIndex(piece.name, torch.Size([piece.start])),
                        dest_offsets=torch.Size([first - piece.start]),
                        storage_index=MetadataIndex(piece.name, chunk.offsets),
                        storage_offsets=torch.Size([first - chunk.offsets[0]]),
                        lengths=torch.Size([end - first]),
                    )
                )
        return items

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None
        data = self._pieces[read_item.dest_index.fqn, offset[0]].data
        return data.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The piece's own memory was written."""


def _moments(trainer: UnevenTrainer) -> list[tuple[Tensor, Tensor]]:
    """AdamW's moments of each unit's shard; zeros before the first step."""
    state: dict[Tensor, Any] = {} if trainer.optimizer is None else trainer.optimizer.state
    found = []
    for unit in trainer.units:
        kept = state.get(unit.shard, {})
        zeros = torch.zeros_like(unit.shard)
        found.append((kept.get("exp_avg", zeros), kept.get("exp_avg_sq", zeros.clone())))
    return found


def _pieces(trainer: UnevenTrainer, moments: list[tuple[Tensor, Tensor]]) -> list[Piece]:
    pieces = []
    for unit, (first, second) in zip(trainer.units, moments, strict=True):
        kinds = (("value", unit.shard), ("first_moment", first), ("second_moment", second))
        for slot, (start, stop), here in unit.local_slices():
            for kind, tensor in kinds:
                part = tensor.detach()[here : here + stop - start]
                pieces.append(Piece(f"{kind}.{slot.name}", slot.numel, start, part))
    return pieces


def save_checkpoint(trainer: UnevenTrainer, folder: str | Path) -> None:
    """Writes parameters, moments and counters; all ranks call it together."""
    pieces = _pieces(trainer, _moments(trainer))
    if trainer.ranks.rank == 0:
        counters = torch.tensor([trainer.steps, trainer.loss_scale.value], dtype=torch.float64)
        pieces.append(Piece(_COUNTERS, 2, 0, counters))
    alone = trainer.ranks.world == 1
    save({}, checkpoint_id=str(folder), planner=_Saver(pieces), no_dist=alone)


def load_checkpoint(trainer: UnevenTrainer, folder: str | Path) -> None:
    """Reads a checkpoint into a trainer of the same model, whatever its shares and world size.

    Raises UserError where the checkpoint is of another model.
    """
    moments = _moments(trainer)
    counters = torch.zeros(2, dtype=torch.float64)
    pieces = [*_pieces(trainer, moments), Piece(_COUNTERS, 2, 0, counters)]
    try:
        alone = trainer.ranks.world == 1
        load({}, checkpoint_id=str(folder), planner=_Loader(pieces), no_dist=alone)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from None
        raise
    trainer.steps, trainer.loss_scale.value = int(counters[0]), float(counters[1])
    if trainer.optimizer is None:
        return
    held = [m for u, m in zip(trainer.units, moments, strict=True) if u.shard.numel()]
    step = torch.tensor(float(trainer.steps))
    trainer.optimizer.load_state_dict(
        {
            "state": {
                i: {"step": step.clone(), "exp_avg": first, "exp_avg_sq": second}
                for i, (first, second) in enumerate(held)
            },
            "param_groups": trainer.optimizer.state_dict()["param_groups"],
        }
    )
