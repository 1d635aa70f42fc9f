"""Uneven data parallelism trains as one process does: gradients and three optimiser steps."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from uneven_cases import Case, random_case, run_cases, tied_everything  # noqa: E402

from real_runner.launch import RankContext, launch  # noqa: E402

SEEDS = range(5)


def cases_of(world: int) -> list[Case]:
    exact = [random_case(world, seed) for seed in SEEDS] + [tied_everything(world)]
    narrow = [random_case(world, seed, p) for seed, p in ((3, "bf16"), (4, "fp16"))]
    return exact + narrow


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda w: f"world{w}")
def outcome(request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, float]]]]:
    """(case, differences on each rank), one launch per world size."""
    world = request.param
    cases = cases_of(world)
    if world == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        by_rank = [run_cases(RankContext(0, 1, torch.device("cpu")), cases)]
        torch.set_num_threads(threads)
    else:
        by_rank = launch(run_cases, (cases,), world=world, threads=1, timeout_s=80)
    return [(case, [ranks[i] for ranks in by_rank]) for i, case in enumerate(cases)]


def test_float64_equals_one_process(outcome: list[tuple[Case, list[dict[str, float]]]]) -> None:
    for case, ranks in outcome:
        if case.options.precision == "fp64":
            for rank in ranks:
                assert max(rank[k] for k in ("gradients", "loss", "norm", "values")) < 1e-10, case


def test_mixed_precision_is_near_one_fp32_process(
    outcome: list[tuple[Case, list[dict[str, float]]]],
) -> None:
    # Rounding to 8 (bf16) or 11 (fp16) bits of mantissa; the losses are about 4.
    for case, ranks in outcome:
        if case.options.precision != "fp64":
            for rank in ranks:
                assert rank["loss"] < 0.05 and rank["norm"] < 0.05, (case, rank)


def test_each_rank_holds_its_share(outcome: list[tuple[Case, list[dict[str, float]]]]) -> None:
    for case, ranks in outcome:
        for rank in ranks:
            assert rank["share"] < 0.01, case
