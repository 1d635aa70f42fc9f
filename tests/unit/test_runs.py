"""Measured rows to layouts: what is read, what is assumed and said so, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.errors import UserError
from simulator.interop.run_rows import RunRow, read_table, read_tables
from simulator.interop.runs import RunCase, run_case

ROW = {
    "source_id": "own", "model": "toy", "arch": "llama", "layers": "16", "hidden": "2048",
    "ffn_hidden": "5632", "heads": "16", "kv_heads": "8", "vocab": "32000", "seq_len": "2048",
    "gpu": "H100-SXM-80GB", "gpus_per_node": "8", "n_gpus": "8", "intra_node": "NVLink4",
    "stack": "megatron-core", "precision": "bf16", "optimizer": "adam", "tp": "2", "pp": "2",
    "vpp": "1", "cp": "1", "ep": "1", "dp": "2", "sp": "1", "sharding": "zero1",
    "micro_batch": "1", "grad_accum": "8", "global_batch": "16", "recompute": "none",
    "attention": "flash", "compile": "0", "step_time_s": "1.0", "outcome": "ok",
}  # fmt: skip


def case(**changes: str) -> RunCase:
    return run_case(RunRow(2, ROW | changes))


def write(folder: Path, text: str, name: str = "runs.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_full_row_needs_no_assumption() -> None:
    found = case()
    assert found.layout is not None and found.assumptions == ()
    plan = found.layout.plan
    assert (plan.dp, plan.tp, plan.pp, plan.micro_batch) == (2, 2, 2, 1)
    assert found.layout.workload.global_batch == 16
    assert found.layout.model.kv_heads == 8 and plan.sequence_parallel


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("vocab", "vocabulary not given"),
        ("precision", "precision not given: bf16"),
        ("recompute", "recompute not given: none"),
        ("tp", "tp not given: 1"),
        ("kv_heads", "kv_heads not given"),
        ("intra_node", "link inside the node not given"),
    ],
)
def test_what_a_row_lacks_is_assumed_aloud(column: str, said: str) -> None:
    found = case(**{column: "", "dp": "", "global_batch": ""})
    assert found.layout is not None, found.reason
    assert any(text.startswith(said) for text in found.assumptions)


@pytest.mark.parametrize("column", ["layers", "heads", "ffn_hidden", "gpu", "n_gpus", "stack"])
def test_what_cannot_be_assumed_is_a_reason_with_the_field(column: str) -> None:
    found = case(**{column: ""})
    assert found.layout is None
    assert column in found.reason and "missing" in found.reason


def test_nemo_recipes_reduce_gradients_in_bf16() -> None:
    found = case(notes="NeMo recipes of a release")
    assert found.layout is not None and found.layout.plan.precision == "bf16_grad16"
    assert any("NeMo" in text for text in found.assumptions)
    assert case(notes="NeMo recipes", precision="fp8").layout.plan.precision == "fp8"  # type: ignore[union-attr]


def test_old_gpus_without_bf16_take_fp16() -> None:
    found = case(gpu="V100-SXM-16GB", intra_node="NVLink2", precision="", stack="gpumix", vpp="1",
                 sp="0", sharding="none")  # fmt: skip
    assert "precision not given: fp16" in found.assumptions


def test_a_row_without_a_shape_names_a_preset() -> None:
    shape = dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab"), "")
    found = case(model="Llama-2-7B", **shape)
    assert found.layout is not None and found.layout.model.hidden == 4096
    assert "no model is called" in case(model="nonesuch", **shape).reason


def test_a_fraction_of_grad_accum_is_a_smaller_last_micro_batch() -> None:
    found = case(grad_accum="2.5", global_batch="5")
    assert found.layout is not None
    assert found.layout.classes[0].micro_batches == 3
    assert found.last_fraction == pytest.approx(0.5)


def test_contradicting_batches_are_named() -> None:
    found = case(global_batch="512")
    assert any("isn't dp x micro_batch x grad_accum" in text for text in found.assumptions)


def test_an_open_micro_batch_gives_candidates_that_divide_the_batch() -> None:
    found = case(micro_batch="", grad_accum="", global_batch="12", vpp="1")
    sizes = [layout.plan.micro_batch for layout in found.candidates]
    assert sizes == [1, 2]


def test_stage_layers_may_count_embedding_and_head() -> None:
    found = case(stage_layers="9/9")
    assert found.layout is not None and found.layout.plan.stage_layers == (8, 8)
    assert "sums to 17" in case(stage_layers="8/9").reason
    assert "doesn't name 2 stages" in case(stage_layers="16").reason


def test_a_peak_as_logged_is_of_the_device() -> None:
    assert case(notes="peak as logged").peaks_of_device
    assert not case(notes="maximum over ranks").peaks_of_device


def test_interleaving_needs_a_stack_that_has_it() -> None:
    found = case(stack="composer-fsdp", vpp="2", precision="amp_bf16")
    assert found.layout is None and "no interleaved schedule" in found.reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("gpu,seq_len,gpu\na,1,b\n", "1:3: 'gpu': column named twice"),
        ("a;b\n1;2\n", "isn't the header"),
        ("gpu,seq_len\n", "no rows"),
        ("gpu,seq_len\na,nan\n", "2:2: seq_len: 'nan' isn't a finite number"),
        ("gpu,seq_len\n\na,-1\n", "3:2: seq_len: '-1' isn't between"),
        ("gpu,seq_len\na,1e99\n", "2:2: seq_len"),
        ("gpu,seq_len\na,1,2\n", "2:3: has 3 cells"),
        ('gpu,seq_len\n"a,1\n', "isn't a CSV file"),
        ("gpu,seq_len\n" + "a" * 200_000 + ",1\n", "isn't a CSV file"),
        ("gpu,seq_len\na,0x10\n", "isn't a finite number"),
        ("gpu,seq_len\na\0,1\n", "not UTF-8 text"),
    ],
)
def test_malformed_files_are_refused_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_table(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_binary_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(bytes(range(128, 256)))
    for wrong, said in ((path, "not UTF-8"), (tmp_path / "none.csv", "can't be read")):
        with pytest.raises(UserError, match=said):
            read_table(wrong)


def test_a_folder_gives_its_tables_of_either_format(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", "gpu,seq_len\na,1\n")
    header = "gpu,hidden,ffn_hidden,seq_len,dtype,micro_batch,fwd_ms,bwd_ms"
    write(tmp_path, f"{header}\na,1,1,1,fp16,1,1,1\n", "layers.csv")
    write(tmp_path, "name,price\nx,1\n", "other.csv")
    assert [t.kind for t in read_tables([tmp_path])] == ["runs", "layers"]


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "name,price\nx,1\n", "other.csv")
    with pytest.raises(UserError, match="no table of measured runs"):
        read_tables([tmp_path])


def test_blank_lines_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffgpu,seq_len\n\na,1\n,\n")
    table = read_table(path)
    assert [row.line for row in table.rows] == [3]
    assert table.rows[0].text("gpu") == "a"


def mixed(**changes: str) -> RunCase:
    """A pipeline over two A100 and two V100, tensor parallel in pairs."""
    cells = {
        "gpu": "A100-SXM-80GB;V100-SXM-32GB", "n_gpus": "4", "gpus_per_node": "2",
        "inter_node": "100Gb Ethernet", "intra_node": "NVLink2", "stack": "megatron-deepspeed",
        "precision": "fp16", "tp": "2", "pp": "2", "dp": "1", "sp": "0", "sharding": "none",
        "global_batch": "8", "stage_layers": "10/6",
        "stage_gpus": "A100-SXM-80GBx2 | V100-SXM-32GBx2",
    }  # fmt: skip
    return case(**(cells | changes))


def test_a_mixed_pipeline_has_its_gpus_by_stage() -> None:
    found = mixed()
    assert found.layout is not None, found.reason
    classes = found.layout.classes
    assert [(c.stage, c.gpu.name, c.tp, c.layers) for c in classes] == [
        (0, "a100-sxm-80gb", 2, 10), (1, "v100-sxm-32gb", 2, 6)
    ]  # fmt: skip
    assert [g.name for g in found.layout.cluster.groups] == ["a100-sxm-80gb", "v100-sxm-32gb"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage_gpus": "A100-SXM-80GBx2"}, "stage_gpus"),
        ({"stage_gpus": "A100-SXM-80GBx2 | A100-SXM-80GBx1"}, "names 3 GPUs, n_gpus is 4"),
        ({"stage_gpus": "A100-SXM-80GBx2 | T4x2"}, "t4 isn't among"),
        ({"stage_gpus": "", "gpu": "A100-SXM-80GB;T4;L4"}, "3 types for 4 GPUs"),
    ],
)
def test_a_mixed_pipeline_that_does_not_add_up(changes: dict[str, str], said: str) -> None:
    assert said in mixed(**changes).reason


def test_types_without_counts_are_split_evenly_aloud() -> None:
    found = mixed(stage_gpus="", stage_layers="", tp="1", pp="1", dp="4")
    assert "GPUs of each type not given: 2" in found.assumptions
    assert found.layout is not None and found.layout.cluster.counts() == {
        "a100-sxm-80gb": 2, "v100-sxm-32gb": 2
    }  # fmt: skip
