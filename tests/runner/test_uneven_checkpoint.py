"""A checkpoint goes on under other shares and another world size as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from uneven_cases import SPECS, Case, difference, gathered, samples  # noqa: E402

from real_runner.launch import RankContext, launch  # noqa: E402
from real_runner.model import Transformer  # noqa: E402
from real_runner.parallel.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from real_runner.parallel.ranks import make_ranks  # noqa: E402
from real_runner.parallel.uneven import Options, UnevenTrainer  # noqa: E402
from simulator.errors import UserError  # noqa: E402

OPTIONS = Options(precision="fp64", learning_rate=1e-2, seed=5)
WRITER = Case("tied gpt", (0.2, 0.0, 0.8), ((1, 1), (2,), (1,)), OPTIONS)


def trainer_of(context: RankContext, case: Case) -> UnevenTrainer:
    model = Transformer(SPECS[case.spec])
    return UnevenTrainer(model, make_ranks(case.shares, context.device), case.options)


def continue_training(trainer: UnevenTrainer, case: Case, rank: int, first: int) -> None:
    """Two steps; cases whose batches sum to the same sizes in order see the same samples."""
    for step in (first, first + 1):
        flat = [b for row in samples(replace(case, batches=WRITER.batches), step) for b in row]
        sizes = [sum(len(row) for row in case.batches[:r]) for r in range(len(case.batches) + 1)]
        trainer.step(flat[sizes[rank] : sizes[rank + 1]])


def write(context: RankContext, folder: str) -> dict[str, Any]:
    trainer = trainer_of(context, WRITER)
    continue_training(trainer, WRITER, context.rank, 0)
    save_checkpoint(trainer, folder)
    continue_training(trainer, WRITER, context.rank, 2)
    return gathered(trainer, "value")


def resume(context: RankContext, folder: str, case: Case) -> dict[str, Any]:
    trainer = trainer_of(context, case)
    load_checkpoint(trainer, folder)
    assert trainer.steps == 2
    continue_training(trainer, case, context.rank, 2)
    return gathered(trainer, "value")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Checkpoint after two steps on three ranks, and the values after two more there."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return folder, launch(write, (folder,), world=3, threads=1, timeout_s=60)[0]


def test_resumes_in_one_process(written: tuple[str, dict[str, Any]]) -> None:
    folder, expected = written
    case = replace(WRITER, shares=(1.0,), batches=((1, 1, 2, 1),))
    values = resume(RankContext(0, 1, torch.device("cpu")), folder, case)
    assert difference(values, expected) < 1e-10


def test_resumes_on_two_ranks(written: tuple[str, dict[str, Any]]) -> None:
    folder, expected = written
    case = replace(WRITER, shares=(0.65, 0.35), batches=((1,), (1, 2, 1)))
    for values in launch(resume, (folder, case), world=2, threads=1, timeout_s=60):
        assert difference(values, expected) < 1e-10


def test_another_model_is_refused(written: tuple[str, dict[str, Any]]) -> None:
    case = replace(WRITER, spec="llama", shares=(1.0,), batches=((1, 1, 2, 1),))
    with pytest.raises(UserError, match="another model"):
        resume(RankContext(0, 1, torch.device("cpu")), written[0], case)
