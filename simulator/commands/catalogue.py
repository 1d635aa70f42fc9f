"""``gpumix gpus``, ``models`` and ``scenarios``: what there is to name in a scenario."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.commands.console import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from hardware_db.schema import GpuSpec

_NameArgument = Annotated[str | None, typer.Argument(help="Show this one, with all its values.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    app.command("gpus")(gpus)
    app.command("models")(models)
    app.command("scenarios")(scenarios)


def gpus(
    name: _NameArgument = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="List node types.")] = False,
    fabrics: Annotated[bool, typer.Option("--fabrics", help="List fabrics.")] = False,
    links: Annotated[bool, typer.Option("--links", help="List links inside nodes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the GPUs that are known, or node types, fabrics and links."""
    import hardware_db

    kinds: dict[str, tuple[Any, Any]] = {
        "node": (hardware_db.nodes, hardware_db.node),
        "fabric": (hardware_db.fabrics, hardware_db.fabric),
        "link": (hardware_db.links, hardware_db.link),
        "gpu": (hardware_db.gpus, hardware_db.gpu),
    }
    chosen = [k for k, on in (("node", nodes), ("fabric", fabrics), ("link", links)) if on]
    kind = chosen[0] if chosen else "gpu"
    list_names, find = kinds[kind]
    if name is not None:
        _show_entry(
            kind, asdict(find(name)), hardware_db.provenance(find(name).name, kind), as_json
        )
        return
    specs = [find(entry) for entry in list_names()]
    if as_json:
        print_json({f"{kind}s": [asdict(spec) for spec in specs]})
    else:
        columns, rows, right = _TABLES[kind](specs)
        print_table(columns, rows, title=_TITLES[kind], right=right)


def models(name: _NameArgument = None, as_json: JsonOption = False) -> None:
    """List the models that are known by name."""
    from simulator.spec.presets import preset, preset_table

    if name is not None:
        from simulator.spec.parameters import active_parameters, total_parameters

        model = preset(name)
        values = {k: v for k, v in asdict(model).items() if k != "warnings"}
        values["parameters"] = total_parameters(model)
        values["active_parameters"] = active_parameters(model)
        _show_entry("model", values, {}, as_json)
        return
    rows = [asdict(row) for row in preset_table()]
    if as_json:
        print_json({"models": rows})
        return
    columns = list(rows[0])
    numbers = [i for i, key in enumerate(columns) if isinstance(rows[0][key], (int, float))]
    print_table(
        [column.replace("_", " ") for column in columns],
        [[_cell(value) for value in row.values()] for row in rows],
        right=numbers,
    )


def scenarios(as_json: JsonOption = False) -> None:
    """List the ready scenarios, each of which runs by its name."""
    from simulator.spec.library import list_scenarios

    entries = list_scenarios()
    if as_json:
        print_json({"scenarios": [asdict(entry) for entry in entries]})
    else:
        print_table(["name", "what it shows"], [[e.name, e.summary or e.title] for e in entries])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def _show_entry(kind: str, values: dict[str, Any], facts: Any, as_json: bool) -> None:
    """One entry in full; ``facts`` says where each value is from."""
    if as_json:
        sources = {k: {"source": f.source, "basis": f.basis} for k, f in facts.items()}
        print_json({kind: values, **({"sources": sources} if sources else {})})
        return
    rows = []
    for key, value in values.items():
        parts = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else None
        for path, item in (parts or {key: value}).items():
            fact = facts.get(path)
            rows.append([path, _cell(item), f"{fact.basis}: {fact.source}" if fact else ""])
    if any(row[2] for row in rows):
        print_table(["field", "value", "source"], rows)
    else:
        print_table(["field", "value"], [row[:2] for row in rows])


_Table = tuple[list[str], list[list[str]], list[int]]


def _gpu_table(specs: list[GpuSpec]) -> _Table:
    def tflops(spec: GpuSpec, dtype: str) -> str:
        return f"{spec.peak_flops[dtype] / 1e12:.0f}" if dtype in spec.peak_flops else "-"

    columns = [
        "name", "architecture", "memory GiB", "GB/s", "fp32", "fp16", "bf16", "fp8",
        "NVLink GB/s", "PCIe GB/s", "W", "year",
    ]  # fmt: skip
    rows = [
        [
            spec.name,
            spec.architecture,
            f"{spec.usable_memory_bytes / 2**30:.1f}",
            f"{spec.memory_bandwidth_bytes_per_s / 1e9:,.0f}",
            *(tflops(spec, dtype) for dtype in ("fp32", "fp16", "bf16", "fp8")),
            f"{spec.nvlink_bytes_per_s / 1e9:.0f}" if spec.nvlink_bytes_per_s else "-",
            f"{spec.pcie_bytes_per_s / 1e9:.0f}",
            f"{spec.power_limit_w:.0f}",
            str(spec.release_year),
        ]
        for spec in specs
    ]
    return columns, rows, list(range(2, len(columns)))


def _node_table(specs: list[Any]) -> _Table:
    columns = ["name", "GPUs", "link", "NICs", "Gb/s each", "fabric", "year"]
    rows = []
    for spec in specs:
        kinds = dict.fromkeys(spec.gpus)
        gpus_text = " + ".join(f"{spec.gpus.count(kind)} x {kind}" for kind in kinds)
        rate = f"{spec.nic_bytes_per_s * 8 / 1e9:g}"
        fabric = spec.fabric or "-"
        row = [spec.name, gpus_text, spec.intra_node, str(spec.nics), rate, fabric, str(spec.year)]
        rows.append(row)
    return columns, rows, [3, 4, 6]


def _fabric_table(specs: list[Any]) -> _Table:
    columns = ["name", "kind", "Gb/s per NIC", "NICs", "latency µs", "rails", "oversubscription"]
    rows = [
        [
            spec.name,
            spec.kind,
            f"{spec.nic_bytes_per_s * 8 / 1e9:g}",
            "node's" if spec.nics_per_node is None else str(spec.nics_per_node),
            f"{spec.latency_s * 1e6:g}",
            "yes" if spec.rails else "no",
            f"{spec.oversubscription:g}",
        ]
        for spec in specs
    ]
    return columns, rows, [2, 3, 4, 6]


def _link_table(specs: list[Any]) -> _Table:
    columns = ["name", "kind", "GB/s per GPU", "GB/s per pair", "latency µs", "title"]
    rows = [
        [
            spec.name,
            spec.kind,
            f"{spec.bytes_per_s / 1e9:.0f}",
            f"{spec.pair_bytes_per_s / 1e9:.0f}",
            f"{spec.latency_s * 1e6:g}",
            spec.title,
        ]
        for spec in specs
    ]
    return columns, rows, [2, 3, 4]


_TITLES = {
    "gpu": "Dense peaks in TFLOP/s; links per GPU and direction; usable memory as CUDA reports it",
    "node": "",
    "fabric": "",
    "link": "Per direction",
}
_TABLES: dict[str, Any] = {
    "gpu": _gpu_table,
    "node": _node_table,
    "fabric": _fabric_table,
    "link": _link_table,
}
