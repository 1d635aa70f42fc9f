"""The hardware database: every entry loads, is believable and sourced; names forgive."""

from __future__ import annotations

import csv
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import hardware_db
from hardware_db.entry import parse_entry
from hardware_db.names import NameIndex
from hardware_db.schema import BASES, Spec
from simulator.errors import UserError
from simulator.units import GIB

LOADERS: dict[str, tuple[Callable[[str], Spec], Callable[[], tuple[str, ...]]]] = {
    "gpu": (hardware_db.gpu, hardware_db.gpus),
    "node": (hardware_db.node, hardware_db.nodes),
    "fabric": (hardware_db.fabric, hardware_db.fabrics),
    "link": (hardware_db.link, hardware_db.links),
}
ENTRIES = [(kind, name) for kind, (_, names) in LOADERS.items() for name in names()]


@pytest.fixture
def no_directories() -> Iterator[None]:
    yield
    hardware_db.forget_directories()


def gpu_text(called: str, **changes: str) -> str:
    """A shipped GPU's file under another name, with the fields in ``changes`` replaced."""
    changed = {"name": called, "aliases": "[]", **changes}
    lines = (Path(hardware_db.__file__).parent / "gpus" / "l4.yaml").read_text().splitlines()
    kept, dropping = [], False
    for line in lines:
        if not line.startswith(" "):
            dropping = line.split(":")[0] in changed
        if not dropping:
            kept.append(line)
    return "\n".join([*kept, *(f"{key}: {value}" for key, value in changed.items())])


def test_the_database_is_large_enough() -> None:
    assert len(hardware_db.gpus()) >= 24
    assert len(hardware_db.nodes()) >= 14
    assert len(hardware_db.fabrics()) >= 10


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_loads_and_is_plausible(kind: str, name: str) -> None:
    spec = LOADERS[kind][0](name)
    assert spec.name == name
    assert hardware_db.plausibility(spec) == []


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_quantity_is_sourced(kind: str, name: str) -> None:
    facts = hardware_db.provenance(name, kind)
    spec = LOADERS[kind][0](name)
    words = {"name", "title", "aliases", "vendor", "architecture", "compute_capability", "form"}
    words |= {"kind", "intra_node", "fabric", "peak_flops"}
    wanted = {field.name for field in fields(spec)} - words
    if kind == "gpu":
        wanted |= {f"peak_flops.{dtype}" for dtype in hardware_db.gpu(name).peak_flops}
    assert set(facts) == wanted
    assert all(fact.basis in BASES and len(fact.source) > 10 for fact in facts.values())


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_spelling_finds_its_entry(kind: str, name: str) -> None:
    load = LOADERS[kind][0]
    spec = load(name)
    for text in (name.upper(), name.replace("-", " "), name.replace("-", "_"), *spec.aliases):
        assert load(text) is spec, text


@pytest.mark.parametrize("name", hardware_db.nodes())
def test_nodes_name_entries_that_exist(name: str) -> None:
    node = hardware_db.node(name)
    assert all(hardware_db.gpu(slot).name == slot for slot in node.gpus)
    assert hardware_db.link(node.intra_node).name == node.intra_node
    if node.fabric is not None:
        fabric = hardware_db.fabric(node.fabric)
        assert fabric.name == node.fabric
        assert fabric.nics_per_node in (None, node.nics)
        assert fabric.nic_bytes_per_s == node.nic_bytes_per_s


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100-sxm-80gb"),
        ("H100-SXM", "h100-sxm-80gb"),
        ("NVIDIA H100 SXM5 80GB", "h100-sxm-80gb"),
        ("a100-sxm4-40", "a100-sxm-40gb"),
        ("3090", "rtx-3090"),
        # Names as torch.cuda.get_device_name() gives them:
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
    ],
)
def test_gpu_names_forgive(text: str, name: str) -> None:
    assert hardware_db.gpu(text).name == name


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UserError, match=r"unknown gpu 'h10'.*h100"):
        hardware_db.gpu("h10")
    with pytest.raises(UserError, match=r"dgx-h100"):
        hardware_db.node("dgx-h10")
    with pytest.raises(UserError, match="name is needed"):
        hardware_db.gpu("  ")


def test_an_ambiguous_name_lists_what_it_may_mean() -> None:
    with pytest.raises(UserError, match="a100-pcie-40gb, a100-pcie-80gb"):
        hardware_db.gpu("A100 PCIe")
    with pytest.raises(UserError, match="unknown"):
        hardware_db.gpu("80gb")


def test_no_spelling_means_two_entries() -> None:
    for kind, (load, names) in LOADERS.items():
        index = NameIndex({name: load(name).aliases for name in names()})
        for name in names():
            for text in (name, *load(name).aliases):
                assert index.candidates(text) == [name], (kind, text)


def test_usable_memory_is_what_cuda_reports() -> None:
    # torch out-of-memory messages and device properties; the sources stand in the entries.
    reported_gib = {"a100-sxm-80gb": 79.15, "t4": 14.56, "b200-sxm-180gb": 178.35, "l4": 22.03}
    for name, value in reported_gib.items():
        assert hardware_db.gpu(name).usable_memory_bytes / GIB == pytest.approx(value, abs=0.01)


def test_peaks_are_dense() -> None:
    # stas00/ml-engineering compute/accelerator README, TFLOPS table without sparsity (bf16, fp8).
    for name, bf16, fp8 in (
        ("h100-sxm-80gb", 989, 1979),
        ("h100-pcie-80gb", 756, 1513),
        ("l40s", 362, 733),
        ("b200-sxm-180gb", 2250, 4500),
        ("gb200", 2500, 5000),
    ):
        assert hardware_db.gpu(name).peak("bf16") == pytest.approx(bf16 * 1e12, rel=1e-3)
        assert hardware_db.gpu(name).peak("float8") == pytest.approx(fp8 * 1e12, rel=1e-3)


def test_missing_dtypes_fall_back_or_refuse() -> None:
    v100, p40, a100 = (hardware_db.gpu(name) for name in ("v100", "p40", "a100"))
    assert v100.peak("bf16") == v100.peak("tf32") == v100.peak("fp32")
    assert p40.peak("float16") == p40.peak("fp32") and not p40.supports("fp16")
    with pytest.raises(UserError, match=r"A100.* has no fp8; choose from .*bf16"):
        a100.peak("fp8")
    with pytest.raises(UserError, match="unknown dtype 'fp12'"):
        a100.peak("fp12")


def test_descriptions_pickle_hash_and_become_plain_data() -> None:
    spec = hardware_db.gpu("h100")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(replace(spec))
    assert asdict(spec)["peak_flops"]["bf16"] == spec.peak("bf16")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("usable_memory_bytes", 85 * 10**9 * 2),
        ("memory_bandwidth_bytes_per_s", 3.35e15),
        ("power_limit_w", 7),
        ("peak_flops", {"fp32": 67e12, "fp16": 1979e12, "bf16": 1979e12}),  # with sparsity
        ("peak_flops", {"fp32": 67e12, "tf32": 60e12}),
        ("architecture", "kepler"),
    ],
)
def test_implausible_gpus_are_noticed(field: str, value: object) -> None:
    wrong = replace(hardware_db.gpu("h100"), **{field: value})  # type: ignore[arg-type]
    assert len(hardware_db.plausibility(wrong)) >= 1


def test_implausible_networks_are_noticed() -> None:
    node = hardware_db.node("dgx-h100")
    link = hardware_db.link("nvswitch4")
    fabric = hardware_db.fabric("ndr-infiniband")
    assert hardware_db.plausibility(replace(node, nics=0))
    assert hardware_db.plausibility(replace(link, pair_bytes_per_s=1e9))
    assert hardware_db.plausibility(replace(link, kind="string"))
    assert hardware_db.plausibility(replace(fabric, oversubscription=0.5))
    assert hardware_db.plausibility(replace(fabric, rdma=False))


@pytest.mark.parametrize(
    ("text", "kind", "nics", "gbps"),
    [
        ("8x200Gb HDR InfiniBand", "infiniband", 8, 200),
        ("4x200Gb HDR InfiniBand", "infiniband", 4, 200),
        ("1600Gb RoCE per node", "roce", 8, 200),
        ("8x400Gb NDR InfiniBand", "infiniband", 8, 400),
        ("8x400Gb RDMA", "roce", 8, 400),
        ("50Gb Ethernet", "ethernet", 1, 50),
        ("8 x 400 Gb/s IB", "infiniband", 8, 400),
        ("3.2 Tbps EFA per node", "efa", 8, 400),
        ("40 Gbit/s", "ethernet", 1, 40),
    ],
)
def test_fabrics_in_words(text: str, kind: str, nics: int, gbps: float) -> None:
    fabric = hardware_db.parse_fabric(text)
    assert (fabric.kind, fabric.nics_per_node) == (kind, nics)
    assert fabric.nic_bytes_per_s * 8 == pytest.approx(gbps * 1e9)
    assert fabric.rdma == (kind != "ethernet")
    assert hardware_db.plausibility(fabric) == []


def test_fabric_names_and_nonsense() -> None:
    assert hardware_db.parse_fabric("NDR InfiniBand") is hardware_db.fabric("ndr-infiniband")
    with pytest.raises(UserError, match="8x400Gb NDR InfiniBand"):
        hardware_db.parse_fabric("string and tin cans")
    with pytest.raises(UserError, match="banana"):
        hardware_db.parse_fabric("400Gb banana")
    with pytest.raises(UserError, match="GB are bytes"):
        hardware_db.parse_fabric("50GB/s InfiniBand")
    with pytest.raises(UserError, match="no bandwidth"):
        hardware_db.parse_fabric("0x400Gb InfiniBand")


def test_a_users_own_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(gpu_text("lab-l4"))
    spec = hardware_db.load_file(file)
    assert spec.name == "lab-l4" and hardware_db.plausibility(spec) == []


def test_a_registered_directory_comes_first(tmp_path: Path, no_directories: None) -> None:
    (tmp_path / "h100.yaml").write_text(gpu_text("h100-sxm-80gb", title="Ours"))
    (tmp_path / "new.yaml").write_text(gpu_text("lab-1", aliases="[h200]"))
    assert hardware_db.register_directory(tmp_path) == ("h100-sxm-80gb", "lab-1")
    assert hardware_db.gpu("H100").title == "Ours"
    assert hardware_db.gpu("h200").name == "lab-1"
    assert "lab-1" in hardware_db.gpus()
    hardware_db.forget_directories()
    assert hardware_db.gpu("h100").title != "Ours" and "lab-1" not in hardware_db.gpus()


def test_the_environment_names_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_directories: None
) -> None:
    (tmp_path / "one.yaml").write_text(gpu_text("lab-2"))
    monkeypatch.setenv("GPUMIX_HARDWARE_DB", str(tmp_path))
    assert hardware_db.gpu("lab 2").name == "lab-2"
    monkeypatch.setenv("GPUMIX_HARDWARE_DB", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="no directory"):
        hardware_db.gpu("h100")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_count": "58"}, "sm_count: needs value, source and basis"),
        ({"sm_count": "{value: 58, source: x, basis: guess}"}, "'guess' is no basis"),
        ({"sm_count": "{value: 58, source: '', basis: assumed}"}, "sm_count.source: is empty"),
        ({"sm_count": "{value: 5.5, source: x, basis: assumed}"}, "must be whole"),
        ({"sm_count": "{value: .nan, source: x, basis: assumed}"}, "must be finite"),
        ({"sm_count": "{value: many, source: x, basis: assumed}"}, "must be a number"),
        ({"sm_cuont": "1"}, "near ones: sm_count"),
        ({"peak_flops": "{}"}, "peak_flops: must map dtypes to rates"),
        ({"entry": "gpus"}, "no entry kind"),
        ({"name": "../My GPU"}, "no canonical name"),
        ({"title": "x\ntitle: y"}, "'title' is given twice"),
        ({"title": "!!python/object:os.system x"}, "could not determine a constructor"),
    ],
)
def test_faults_of_a_file_are_told(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=r"my\.yaml") as caught:
        parse_entry(gpu_text("mine", **changes), "my.yaml")
    assert message in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    text = "entry: link\nname: x\nkind: pcie\nlatency_s: 1"
    with pytest.raises(UserError) as caught:
        parse_entry(text, "my.yaml")
    assert {p.path for p in caught.value.problems} >= {"title", "bytes_per_s", "latency_s"}


def test_numbers_may_be_written_short() -> None:
    text = gpu_text("mine", power_limit_w="{value: 7e1, source: nameplate, basis: measured}")
    assert parse_entry(text, "my.yaml").facts["power_limit_w"] == (70.0, "nameplate", "measured")


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "x" * 300_000])
def test_files_that_are_no_entries(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml"):
        hardware_db.load_file(file)
    with pytest.raises(UserError, match="directory"):
        hardware_db.load_file(tmp_path)


def test_provenance_needs_no_kind_and_knows_its_own() -> None:
    fact = hardware_db.provenance("A100")["memory_bandwidth_bytes_per_s"]
    assert fact.value == 2039e9 and "A100 datasheet" in fact.source and fact.basis == "datasheet"
    assert "nics" in hardware_db.provenance("dgx-h100")
    with pytest.raises(UserError, match="unknown gpu"):
        hardware_db.provenance("abacus")
    with pytest.raises(UserError, match="none of gpu"):
        hardware_db.provenance("h100", "tpu")


def test_a_canonical_name_reads_one_file_and_no_heavy_module() -> None:
    code = (
        "import sys, hardware_db; from hardware_db import loader;"
        "hardware_db.gpu('h100-sxm-80gb'); info = loader._shipped.cache_info();"
        "assert info.currsize == 1, info;"
        "assert not {'torch', 'pandas', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    root = Path(hardware_db.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_all_names_of_the_measured_tables_resolve(data_dir: Path) -> None:
    tables = [*sorted((data_dir / "runs").glob("*.csv"))]
    tables += [
        data_dir / name for name in ("layers.csv", "gemm.csv", "elementwise.csv", "mamf.csv")
    ]
    seen = {"gpu": set[str](), "intra_node": set[str](), "inter_node": set[str]()}
    for table in tables:
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                for column, values in seen.items():
                    values.update(filter(None, (row.get(column) or "").split(";")))
    assert len({hardware_db.gpu(name).name for name in seen["gpu"]}) >= 20
    assert {hardware_db.link(name).kind for name in seen["intra_node"]} >= {"nvswitch", "pcie"}
    assert all(hardware_db.parse_fabric(text).nic_bytes_per_s > 0 for text in seen["inter_node"])
