"""What is known of a candidate before any price: its nodes, its workloads' plans, its phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a candidate.

    ``how`` is ``kept``, ``bought``, ``on-demand``, ``reserved`` or ``spot``; ``price`` names the
    input with the price of a node (kept, bought) or of a GPU-hour (rented). Watts are of one node.
    """

    name: str
    how: str
    count: int
    n_gpus: int
    gpus_idle_w: float
    gpus_limit_w: float
    host_w: float
    price: str

    @property
    def is_own(self) -> bool:
        """Whether it stands in the owner's room."""
        return self.how in ("kept", "bought")

    @property
    def rated_w(self) -> float:
        """Power that the room must provide for one node."""
        return self.gpus_limit_w + self.host_w


@dataclass(frozen=True)
class Work:
    """One workload on one cluster under its best plan.

    ``rate`` is the predicted median in tokens/s, ``speed`` names the input with its error,
    ``load`` is the share of the step in which GPUs aren't waiting for other ranks.
    """

    name: str
    tokens: float
    weight: float
    runs_per_year: float | None
    rate: float
    speed: str
    load: float
    flops_per_token: float
    parameters: float


@dataclass(frozen=True)
class Phase:
    """A stretch of the horizon with one cluster. ``spares`` are idle nodes beside it."""

    years: float
    nodes: tuple[Nodes, ...]
    work: tuple[Work, ...]
    spares: int = 0

    @property
    def n_gpus(self) -> int:
        """GPUs that the job runs on."""
        return sum(n.count * n.n_gpus for n in self.nodes)

    @property
    def n_nodes(self) -> int:
        """Nodes that the job runs on."""
        return sum(n.count for n in self.nodes)

    @property
    def own_share(self) -> float:
        """Share of the nodes that the owner must repair himself."""
        return sum(n.count for n in self.nodes if n.is_own) / max(self.n_nodes, 1)

    @property
    def spare_nodes(self) -> Nodes | None:
        """The kind of node that spares are of: the one with most nodes in the own room."""
        own = [n for n in self.nodes if n.is_own]
        return max(own, key=lambda n: (n.how == "bought", n.count)) if own else None


@dataclass(frozen=True)
class CandidateFacts:
    """What is known of a candidate before any price: phases in order, and what isn't kept.

    ``owned_age_years`` and ``owned_value`` (None: by price and age) are of the standing cluster,
    ``lost`` are its nodes that are neither kept nor sold.
    """

    name: str
    phases: tuple[Phase, ...]
    sold: tuple[Nodes, ...] = ()
    lost: tuple[Nodes, ...] = ()
    owned_age_years: float = 0.0
    owned_value: float | None = None
    owned: tuple[Nodes, ...] = ()

    @property
    def horizon_years(self) -> float:
        """Sum of the phases."""
        return sum(p.years for p in self.phases)

    @property
    def wait_years(self) -> float:
        """Time before the last phase."""
        return self.horizon_years - self.phases[-1].years


@dataclass(frozen=True)
class Terms:
    """What is certain: contract and curve."""

    financing_years: float
    price_change_per_year: float
    resale_years: Sequence[float]
    resale_shares: Sequence[float]
