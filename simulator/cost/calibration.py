"""What measured runs say about a stack on a GPU: few factors, each with a physical meaning.

The kernel and network models are fitted on kernels measured alone. Inside a training step they
run slower (shared bandwidth, clocks under sustained power, strided operands) and the host limits
them; :class:`Tuning` holds by how much. ``hardware_db/calibration/steps.yaml`` is written by
``gpumix calibrate`` and read here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hardware_db.schema import GpuSpec
from simulator.cost.kernel_rates import rates
from simulator.cost.network import LinkParams, Network
from simulator.errors import Problem, UserError


@dataclass(frozen=True)
class Tuning:
    """Factors on predicted times, and host times, of one stack on one GPU type.

    Attributes:
        gemm, attention, memory: time of matrix products, attention kernels and memory-bound
            kernels inside a step over their time alone.
        network: time of communication inside a node over the network model's.
        fabric: the same between nodes.
        dispatch_s: host time per kernel launch; None takes the stack's.
        sync_spread: growth of the host's time per unit of sqrt(2 ln tp): ranks of a
            tensor-parallel group wait for the slowest host at every collective.
        step_overhead_s, micro_batch_overhead_s: None takes the stack's.
        basis: ``prior`` or what it was fitted on.
    """

    gemm: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    network: float = 1.0
    fabric: float = 1.0
    dispatch_s: float | None = None
    sync_spread: float = 0.0
    step_overhead_s: float | None = None
    micro_batch_overhead_s: float | None = None
    basis: str = "prior"


#: No calibration: kernels inside a step as fast as alone, host times of the stack.
UNTUNED = Tuning()

#: Parameters that a fit may change, with the bounds that keep their meaning.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm": (0.85, 2.0),
    "attention": (0.5, 4.0),
    "memory": (0.6, 2.5),
    "network": (0.5, 4.0),
    "fabric": (0.5, 4.0),
    "dispatch_s": (1e-6, 2e-4),
    "sync_spread": (0.0, 1.0),
    "step_overhead_s": (1e-4, 0.5),
    "micro_batch_overhead_s": (0.0, 0.05),
}


def tuned_network(net: Network, tuned: Tuning) -> Network:
    """A network whose links are slower by the calibration's factors."""

    def slower(link: LinkParams, factor: float) -> LinkParams:
        return replace(
            link,
            efficiency=link.efficiency / factor,
            p2p_efficiency=link.p2p_efficiency / factor,
            nvls_efficiency=link.nvls_efficiency / factor,
            latency_s=link.latency_s * factor,
            base_s=link.base_s * factor,
            p2p_base_s=link.p2p_base_s * factor,
        )

    return replace(
        net,
        intra=slower(net.intra, tuned.network),
        pair=slower(net.pair, tuned.network),
        inter=None if net.inter is None else slower(net.inter, tuned.fabric),
    )


@cache
def step_calibration() -> dict[str, Any]:
    """The calibration in use: the shipped one, or the file that GPUMIX_CALIBRATION names.

    Raises:
        UserError: the named file can't be read or isn't a calibration.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    own = os.environ.get("GPUMIX_CALIBRATION")
    if not own:
        path = files("hardware_db") / "calibration" / "steps.yaml"
        return dict(yaml.load(path.read_text("utf-8"), Loader=loader))
    try:
        table = yaml.load(Path(own).read_text("utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = f"can't be read: {type(error).__name__}"
        raise UserError(Problem("GPUMIX_CALIBRATION", reason, source=own)) from None
    if not isinstance(table, dict) or not isinstance(table.get("groups"), dict):
        hint = "a file that gpumix calibrate wrote"
        raise UserError(Problem("GPUMIX_CALIBRATION", "isn't a calibration", hint, source=own))
    return table


def tuning(stack: str, gpu: GpuSpec, table: Mapping[str, Any] | None = None) -> Tuning:
    """The calibration of a stack on a GPU: its own, else the stack's for GPUs like it.

    A GPU without rows takes what its stack does on GPUs whose kernels were measured, or on those
    whose kernel rates are transferred; a stack without rows takes the middle of the others.
    ``table`` is a parsed calibration (default: the shipped one).
    """
    groups = (step_calibration() if table is None else table).get("groups", {})
    transferred = f"{stack}/transferred" if rates(gpu).basis != "measured" else stack
    for key in (f"{stack}/{gpu.name}", transferred, stack, "any"):
        if key in groups:
            return tuning_from_mapping(groups[key]["parameters"], f"calibrated ({key})")
    return Tuning()


def tuning_from_mapping(parameters: Mapping[str, Any], basis: str) -> Tuning:
    """Parameters as a calibration file holds them: plain numbers or ``{value: ...}`` cells."""
    known = {f.name for f in fields(Tuning)} - {"basis"}
    values: dict[str, Any] = {
        name: float(cell["value"] if isinstance(cell, Mapping) else cell)
        for name, cell in parameters.items()
        if name in known
    }
    return replace(Tuning(basis=basis), **values)
