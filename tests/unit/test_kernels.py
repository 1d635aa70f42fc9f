"""Kernel times: limits, shapes, transfer, and measured rows that the fit has not seen."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hardware_db import gpu, gpus
from simulator.cost.kernel_rates import calibration, sustained_clock
from simulator.cost.kernels import (
    attention_flops,
    attention_time_s,
    causal_share,
    gemm_time_s,
    memory_time_s,
    rates,
)
from simulator.errors import UserError

A100 = rates(gpu("a100-sxm-80gb"))
H100 = rates(gpu("h100-sxm-80gb"))
SIZES = np.array([1, 16, 64, 100, 128, 384, 1000, 1024, 4096, 5000, 16384, 65536], float)


def attention(card, kernel="flash2", **changes):
    shape = {
        "batch": 2, "heads": 32, "kv_heads": 32, "q_len": 4096, "kv_len": 4096,
        "head_dim": 128, "v_head_dim": 128, "causal": True, "dtype": "bf16", "backward": False,
    }  # fmt: skip
    return attention_time_s(card, **(shape | {"kernel": kernel} | changes))


@pytest.mark.parametrize("name", gpus())
def test_every_gpu_has_rates_and_stays_below_peak_and_bandwidth(name: str) -> None:
    card = rates(gpu(name))
    m, n, k = np.meshgrid(SIZES, SIZES, SIZES)
    for dtype in card.gemm:
        for pass_ in ("fwd", "dgrad", "wgrad"):
            seconds = gemm_time_s(card, m, n, k, dtype=dtype, pass_=pass_)
            assert (2.0 * m * n * k / seconds <= card.peak_flops[dtype] * (1 + 1e-9)).all()
    moved = 1e10
    assert moved / memory_time_s(card, moved) < card.memory_bandwidth_bytes_per_s
    assert card.basis.startswith(("measured", "transferred from", "assumed"))


@pytest.mark.parametrize("axis", ["m", "n", "k"])
def test_a_larger_product_never_takes_less_time(axis: str) -> None:
    sizes = {"m": 777.0, "n": 3000.0, "k": 2000.0} | {axis: np.arange(1, 9000, 7)}
    for card in (A100, H100, rates(gpu("l4"))):
        seconds = gemm_time_s(card, **sizes, dtype="bf16")
        assert (np.diff(seconds) >= -1e-15).all()


def test_a_tiny_product_costs_its_latency_and_no_product_costs_nothing() -> None:
    tiny = gemm_time_s(A100, 1, 8, 8, dtype="fp16")
    latency = A100.gemm["fp16"].latency_s
    assert latency < tiny < 1.3 * latency
    assert gemm_time_s(A100, 0, 4096, 4096, dtype="fp16") == 0.0
    assert memory_time_s(A100, 0.0) == 0.0


# Best products found by search on each card, TFLOP/s (mamf.csv): the largest rates seen; typical
# large shapes reach 0.8 to 0.95 of them.
@pytest.mark.parametrize(
    ("name", "best"), [("a100-sxm-80gb", 271.2), ("h100-sxm-80gb", 794.5), ("b200", 1745.0)]
)
def test_a_huge_product_reaches_the_measured_fraction(name: str, best: float) -> None:
    size = 16384.0
    rate = 2 * size**3 / gemm_time_s(rates(gpu(name)), size, size, size, dtype="bf16") / 1e12
    assert 0.78 * best < rate < best


def test_sizes_and_batch_broadcast() -> None:
    m, n = np.ones((3, 1)) * 512, np.array([1024.0, 2048.0])
    batch = np.array([1.0, 4.0]).reshape(2, 1, 1)
    seconds = gemm_time_s(H100, m, n, 4096, dtype="fp8", batch=batch, in_bytes=1)
    assert seconds.shape == (2, 3, 2)
    single = gemm_time_s(H100, 512, 2048, 4096, dtype="fp8", batch=4, in_bytes=1)
    assert seconds[1, 2, 1] == single
    lengths = np.array([512.0, 2048.0])
    assert attention(H100, "flash3", q_len=lengths, kv_len=lengths).shape == (2,)


def test_gradient_products_permute_the_forward_sizes() -> None:
    card = replace(A100, gemm={"fp16": replace(A100.gemm["fp16"], backward_factor=1.0)})
    forward = {"m": 4096.0, "n": 11008.0, "k": 1024.0, "dtype": "fp16"}
    assert gemm_time_s(card, **forward, pass_="dgrad") == gemm_time_s(
        card, 4096.0, 1024.0, 11008.0, dtype="fp16"
    )
    assert gemm_time_s(card, **forward, pass_="wgrad") == gemm_time_s(
        card, 11008.0, 1024.0, 4096.0, dtype="fp16"
    )


def test_one_more_tile_than_a_wave_holds_costs_more_than_its_share() -> None:
    # 108 SMs: 108 tiles of 256x128 fill one wave, 109 need a second.
    one = gemm_time_s(A100, 256 * 12, 128 * 9, 8192, dtype="fp16")
    two = gemm_time_s(A100, 256 * 12, 128 * 10, 8192, dtype="fp16")
    assert two / one > 1.03 * 10 / 9


def test_a_causal_flash_kernel_does_half_the_work_and_the_unfused_one_all() -> None:
    assert causal_share(65536, 65536) == pytest.approx(0.5, abs=0.002)
    assert causal_share(1, 4096) == pytest.approx(1.0)
    long = {"q_len": 32768, "kv_len": 32768}
    ratio = attention(H100, "flash3", **long) / attention(H100, "flash3", causal=False, **long)
    assert ratio == pytest.approx(0.5, abs=0.03)
    assert attention(A100, "unfused") == attention(A100, "unfused", causal=False)


# FlashAttention-3, arXiv 2407.08608, figure 5 (H100 SXM5, head 128, 16k tokens, no mask): length
# 4096 was held out of the fit. FlashAttention-2, arXiv 2307.08691: up to 73 % of 312 on A100.
@pytest.mark.parametrize(("kernel", "tflops"), [("flash2", 368.0), ("flash3", 638.0)])
def test_flash_rates_match_a_published_bar(kernel: str, tflops: float) -> None:
    shape = {"batch": 4, "heads": 16, "q_len": 4096, "kv_len": 4096}
    flops = attention_flops(**shape, head_dim=128, v_head_dim=128)
    seconds = attention(H100, kernel, **shape, kv_heads=16, causal=False)
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.08)


def test_newer_attention_is_faster_and_flash_names_the_newest() -> None:
    times = [attention(H100, k) for k in ("flash3", "flash2", "flash1", "unfused")]
    assert times == sorted(times)
    assert attention(H100, "flash") == times[0]
    assert attention(A100, "flash") == attention(A100, "flash2")
    with pytest.raises(UserError, match="flash3"):
        attention(A100, "flash3")


def test_attention_backward_costs_more_than_forward_and_dropout_adds() -> None:
    for kernel in ("unfused", "flash2"):
        forward, backward = attention(A100, kernel), attention(A100, kernel, backward=True)
        assert 1.5 * forward < backward < 4 * forward
        assert attention(A100, kernel, dropout=True) > forward


def test_backward_over_forward_differs_by_gpu() -> None:
    sizes = {"m": 8192.0, "n": 8192.0, "k": 8192.0, "dtype": "fp16"}
    ratios = {}
    for name in ("a100-sxm-80gb", "l4"):
        card = rates(gpu(name))
        both = sum(gemm_time_s(card, **sizes, pass_=p) for p in ("dgrad", "wgrad"))
        ratios[name] = float(both / gemm_time_s(card, **sizes))
    # Layer tables: 1.9 to 2.2 on A100, 2.1 to 2.8 on L4.
    assert 1.8 < ratios["a100-sxm-80gb"] < 2.1
    assert 2.2 < ratios["l4"] < 2.8


def test_transfer_names_its_source_and_heeds_the_power_limit() -> None:
    pcie = rates(gpu("h100-pcie-80gb"))
    assert pcie.basis == "transferred from h100-sxm-80gb"
    assert pcie.gemm["bf16"].efficiency == H100.gemm["bf16"].efficiency
    assert 0.7 < pcie.sustained < 1.0
    assert A100.basis == "measured" and A100.sustained == 1.0
    assert sustained_clock(2.0, 1.0) == 1.0
    assert sustained_clock(1.0, 8.0) == pytest.approx(0.5)


def test_unknown_architecture_dtype_and_kind_are_user_errors() -> None:
    with pytest.raises(UserError, match="stand in"):
        rates(replace(gpu("a100-sxm-80gb"), name="x", architecture="y", compute_capability="0"))
    with pytest.raises(UserError, match="fp8"):
        gemm_time_s(A100, 128, 128, 128, dtype="fp8")
    with pytest.raises(UserError, match="norm"):
        memory_time_s(A100, 1e6, kind="nrom")


def test_references_name_fitted_gpus() -> None:
    table = calibration()
    assert set(table["references"].values()) <= set(table["gpus"])


def test_a_million_products_in_a_few_seconds() -> None:
    m = np.random.default_rng(0).integers(1, 16384, 1_000_000)
    start = time.process_time()
    gemm_time_s(H100, m, 4096, 4096, dtype="bf16")
    assert time.process_time() - start < 5.0  # 0.5 s on an idle core of 2024


def _held_out(data_dir: Path, card: str) -> tuple[np.ndarray, ...]:
    with (data_dir / "gemm.csv").open(newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["gpu"] == card]
    m, n, k, us = (np.array([float(row[c]) for row in rows]) for c in ("m", "n", "k", "time_us"))
    pairs = sorted(set(zip(n, k, strict=True)))  # the fit takes those of even rank
    held = np.array([pairs.index(pair) % 2 == 1 for pair in zip(n, k, strict=True)])
    return m[held], n[held], k[held], us[held] * 1e-6


@pytest.mark.parametrize("card", ["A100-SXM-80GB", "A40", "H100-SXM-80GB"])
def test_products_of_shapes_not_fitted(data_dir: Path, card: str) -> None:
    m, n, k, measured = _held_out(data_dir, card)
    off = np.abs(gemm_time_s(rates(gpu(card)), m, n, k, dtype="fp16") / measured - 1.0)
    assert off.size > 400
    assert np.median(off) < 0.05
    assert np.quantile(off, 0.9) < 0.18
