"""Uneven data parallelism trains as one process does: gradients and three optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from uneven_cases import (  # noqa: E402
    SPECS,
    Case,
    gathered,
    random_case,
    run_cases,
    samples,
    tied_everything,
)

from real_runner.launch import RankContext, launch  # noqa: E402
from real_runner.model import Transformer  # noqa: E402
from real_runner.parallel.ranks import make_ranks  # noqa: E402
from real_runner.parallel.uneven import Options, UnevenTrainer  # noqa: E402

SEEDS = range(5)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products run faster on one thread, and other tests use the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases_of(world: int) -> list[Case]:
    exact = [random_case(world, seed) for seed in SEEDS] + [tied_everything(world)]
    narrow = [random_case(world, seed, p) for seed, p in ((3, "bf16"), (4, "fp16"))]
    return exact + narrow


def outcome_of(world: int) -> list[tuple[Case, list[dict[str, float]]]]:
    """(case, differences on each rank); one launch for all cases."""
    cases = cases_of(world)
    if world == 1:
        by_rank = [run_cases(RankContext(0, 1, torch.device("cpu")), cases)]
    else:
        by_rank = launch(run_cases, (cases,), world=world, threads=1, timeout_s=150)
    return [(case, [ranks[i] for ranks in by_rank]) for i, case in enumerate(cases)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_training_equals_one_process(world: int) -> None:
    for case, ranks in outcome_of(world):
        for rank in ranks:
            assert rank["share"] < 0.01, case
            if case.options.precision == "fp64":
                assert max(rank[k] for k in ("gradients", "loss", "norm", "values")) < 1e-10, case
            else:
                # Rounding to 8 (bf16) or 11 (fp16) bits of mantissa; the losses are about 4.
                assert rank["loss"] < 0.05 and rank["norm"] < 0.05, (case, rank)


def alone(options: Options) -> tuple[UnevenTrainer, Case]:
    case = Case("llama", (1.0,), ((2, 1),), options)
    ranks = make_ranks(case.shares, torch.device("cpu"))
    return UnevenTrainer(Transformer(SPECS["llama"]), ranks, options), case


def test_overflowing_fp16_gradients_skip_the_step_and_halve_the_scale() -> None:
    trainer, case = alone(Options(precision="fp16"))
    before = {n: p.clone() for n, p in gathered(trainer, "value").items()}
    trainer.loss_scale.value = 2.0**40
    assert trainer.step(samples(case, 0)[0]).skipped
    assert trainer.loss_scale.value == 2.0**39
    after = gathered(trainer, "value")
    assert all(torch.equal(before[n], after[n]) for n in before)
    trainer.loss_scale.value = 2.0**10
    assert not trainer.step(samples(case, 1)[0]).skipped
    assert any(not torch.equal(p, before[n]) for n, p in gathered(trainer, "value").items())


def test_dropout_draws_the_same_mask_when_a_layer_is_computed_again() -> None:
    gradients = []
    for recompute in (0, None):
        options = Options(precision="fp64", recompute_layers=recompute)
        case = Case("llama", (1.0,), ((2, 1),), options)
        model = Transformer(replace(SPECS["llama"], dropout=0.3))
        trainer = UnevenTrainer(model, make_ranks((1.0,), torch.device("cpu")), options)
        trainer.gradients(samples(case, 0)[0])
        gradients.append(gathered(trainer, "grad"))
    assert all(torch.allclose(gradients[0][n], g, atol=1e-12) for n, g in gradients[1].items())


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="every layer recomputed"):
        alone(Options(offload=True, recompute_layers=1))
    with pytest.raises(ValueError, match="sum to 1"):
        make_ranks((0.5,), torch.device("cpu"))


def test_shares_cut_units_where_they_say() -> None:
    ranks = replace(make_ranks((1.0,), torch.device("cpu")), world=4, shares=(0.5, 0.0, 0.5, 0.0))
    assert ranks.bounds(11) == (0, 6, 6, 11, 11)
    even = replace(ranks, shares=(0.25,) * 4)
    assert even.bounds(11) == (0, 3, 6, 9, 12)


def test_compiled_layers_train_alike() -> None:
    results = []
    # aot_eager traces and partitions as inductor does, without its slow code generation.
    for backend in (None, "aot_eager"):
        options = Options(precision="fp64", recompute_layers=0, compile=backend)
        model = Transformer(replace(SPECS["llama"], layers=1))
        trainer = UnevenTrainer(model, make_ranks((1.0,), torch.device("cpu")), options)
        case = Case("llama", (1.0,), ((2, 2),), options)
        results.append([trainer.step(samples(case, step)[0]) for step in range(3)])
    for eager, compiled in zip(*results, strict=True):
        assert compiled.loss == pytest.approx(eager.loss, abs=1e-10)
        assert compiled.grad_norm == pytest.approx(eager.grad_norm, abs=1e-10)
