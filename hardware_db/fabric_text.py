"""Reads a fabric from the words in which people and run tables describe it."""

from __future__ import annotations

import re
from dataclasses import replace

from hardware_db import loader
from hardware_db.schema import FabricSpec
from simulator.errors import Problem, UserError
from simulator.units import gbps_to_bytes_per_s

_RATE = re.compile(
    r"^(?:(?P<count>\d+)\s*[x*\u00d7]\s*)?(?P<rate>\d+(?:\.\d+)?)\s*"
    r"(?P<prefix>[gt])\s*(?P<unit>b)(?:it)?(?:/s|ps|e\b)?\s*(?P<words>.*)$",
    re.IGNORECASE,
)
_PER_NODE = re.compile(r"\b(per|a|each)\s+(node|host|server)\b|/\s*node\b", re.IGNORECASE)

# A rate stated per node is spread over one NIC per GPU of an eight-GPU server.
_NICS_OF_A_NODE = 8

# Word in the text -> (kind, shipped fabric whose latency it takes).
_KINDS = (
    ("infiniband", "infiniband", "hdr-infiniband"),
    ("ndr", "infiniband", "ndr-infiniband"),
    ("hdr", "infiniband", "hdr-infiniband"),
    ("edr", "infiniband", "hdr-infiniband"),
    ("ib", "infiniband", "hdr-infiniband"),
    ("roce", "roce", "roce-1600"),
    ("rocev2", "roce", "roce-1600"),
    ("rdma", "roce", "roce-1600"),
    ("efa", "efa", "efa-p4d"),
    ("ethernet", "ethernet", "100gbe"),
    ("tcp", "ethernet", "100gbe"),
    ("gbe", "ethernet", "100gbe"),
    ("", "ethernet", "100gbe"),
)


def parse_fabric(text: str) -> FabricSpec:
    """The fabric that ``text`` names or describes.

    A name of the database (``ndr-infiniband``) finds its entry. Otherwise the text is
    ``[COUNT x] RATE Gb[/s] WORDS``: ``8x400Gb NDR InfiniBand``, ``50Gb Ethernet``. A rate "per
    node" is the sum of eight NICs (``1600Gb RoCE per node``); without a count there is one NIC.
    ``RDMA`` alone is taken as RoCE, no word at all as Ethernet without RDMA. What the words do not
    say is assumed: non-blocking, rail-optimised where there are several RDMA NICs, and the
    latency of the shipped fabric of the same kind.

    Raises:
        UserError: the text neither names nor describes a fabric; near names are listed.
    """
    match = _RATE.match(text.strip()) if isinstance(text, str) else None
    if match is not None and not loader.candidates("fabric", text):
        return _described(text.strip(), match)
    try:
        return loader.fabric(text)
    except UserError as error:
        words = "or words such as '8x400Gb NDR InfiniBand'"
        problems = (
            replace(p, hint=f"{p.hint}; {words}" if p.hint else words) for p in error.problems
        )
        raise UserError(*problems) from None


def _described(text: str, match: re.Match[str]) -> FabricSpec:
    if match["unit"] == "B":
        raise UserError(
            Problem("fabric", f"{text!r}: GB are bytes", "write bits, 400Gb for 50 GB/s")
        )
    rate_gbps = float(match["rate"]) * (1000.0 if match["prefix"].lower() == "t" else 1.0)
    count = int(match["count"] or 1)
    if count < 1 or not rate_gbps > 0:
        raise UserError(Problem("fabric", f"{text!r} has no bandwidth", "state a rate above 0"))
    if _PER_NODE.search(match["words"]) and match["count"] is None:
        rate_gbps, count = rate_gbps / _NICS_OF_A_NODE, _NICS_OF_A_NODE
    kind, like = _kind_of(text, match["words"])
    rdma = kind != "ethernet"
    return FabricSpec(
        name=f"{count}x{rate_gbps:g}gb-{kind}",
        title=text,
        aliases=(),
        kind=kind,
        nic_bytes_per_s=gbps_to_bytes_per_s(rate_gbps),
        nics_per_node=count,
        latency_s=loader.fabric(like).latency_s,
        rails=rdma and count > 1,
        oversubscription=1.0,
        nodes_per_leaf=1_000_000,
        rdma=rdma,
    )


def _kind_of(text: str, words: str) -> tuple[str, str]:
    said = set(re.findall(r"[a-z0-9]+", _PER_NODE.sub(" ", words).lower()))
    known = {word for word, _, _ in _KINDS}
    speed_names = {"slingshot", "connectx", "backend", "network", "fabric", "links", "nics", "nic"}
    strange = said - known - speed_names
    if strange:
        raise UserError(
            Problem(
                "fabric",
                f"{text!r}: cannot tell what {', '.join(sorted(strange))} means",
                "say InfiniBand, RoCE, EFA or Ethernet",
            )
        )
    return next((kind, like) for word, kind, like in _KINDS if word in said or not word)
