"""Models by name."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from simulator.errors import UserError
from simulator.spec import presets
from simulator.spec.parameters import total_parameters
from simulator.spec.presets import preset, preset_names, preset_table


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("llama3.1_8b", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("GPT2", "gpt2-small"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("bert_base", "bert-base"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("BLOOM", "bloom-176b"),
        ("GPT-1T", "megatron-1t"),
        ("GPT-1008.0B", "megatron-1t"),
    ],
)
def test_names_forgive(spelling: str, name: str) -> None:
    assert preset(spelling).name == name


def test_sizes_that_differ_by_a_dot_stay_apart() -> None:
    assert preset("gpt3-1.3b").hidden == 2048
    assert preset("gpt3-13b").hidden == 5120


@pytest.mark.parametrize("name", ["lama-3.1-8b", "llama-3.1-9b"])
def test_unknown_name_lists_near_ones(name: str) -> None:
    with pytest.raises(UserError, match=r"did you mean .*llama-3\.1-8b"):
        preset(name)


@pytest.mark.parametrize("name", ["", "   ", "../etc", "x" * 5000])
def test_hopeless_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="no model is called") as caught:
        preset(name)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("name", preset_names())
def test_entry_is_plausible_and_sourced(name: str) -> None:
    model = preset(name)
    assert model.name == name
    assert len(model.source) > 10
    assert model.heads % model.kv_heads == 0
    assert 50e6 < total_parameters(model) < 2e12
    assert 0 <= model.window_layers <= model.layers
    assert (model.window is None) == (model.window_layers == 0)


def test_table_has_a_row_for_every_name() -> None:
    rows = preset_table()
    assert tuple(row.name for row in rows) == preset_names()
    mixtral = next(row for row in rows if row.name == "mixtral-8x7b")
    assert mixtral.active < mixtral.parameters


def test_duplicate_keys_are_refused() -> None:
    import yaml

    with pytest.raises(UserError, match="twice"):
        yaml.load("a: 1\na: 2\n", Loader=presets._StrictLoader)


def test_entry_with_an_unknown_field_is_refused() -> None:
    entry = {"layers": 1, "hidden": 8, "heads": 1, "source": "here", "hiden": 8}
    with pytest.raises(UserError, match="hiden"):
        presets._spec("odd", entry, "odd.yaml")


def test_index_finds_every_entry_that_the_files_hold() -> None:
    # The index scans text for speed; the parsed files are what it must agree with.
    parsed = {n for file in presets._texts() for n in presets._family(file)}
    assert parsed == set(preset_names())


def test_measured_layers_are_expressible(data_dir: Path) -> None:
    with open(data_dir / "layers.csv", encoding="utf-8") as stream:
        rows = {row["model"]: row for row in csv.DictReader(stream)}
    assert rows
    for name, row in rows.items():
        model = preset(name)
        assert (model.hidden, model.ffn) == (int(row["hidden"]), int(row["ffn_hidden"])), name
        if row["heads"]:
            assert (model.heads, model.kv_heads) == (int(row["heads"]), int(row["kv_heads"])), name
