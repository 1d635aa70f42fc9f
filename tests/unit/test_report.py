"""Reports: figures that add up, pages that hold, traces and tables that others can read."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from simulator.analysis.predict import predict
from simulator.errors import UserError
from simulator.report import html, palette
from simulator.report.curves import memory_curves
from simulator.report.figures import memory_figure, shares_figure, spread
from simulator.report.gantt import timeline_figure
from simulator.report.tables import classes_csv, memory_csv, time_csv, timeline_csv
from simulator.report.trace import step_trace
from simulator.report.words import class_names, percent, probability
from simulator.report.write import prepare_directory, report_texts, write_files, write_report
from simulator.spec.scenario import load_scenario
from tests.predictions import class_prediction, prediction, timeline, uniform_prediction

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that closes what isn't open; keeps all ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (1e-9, "<0.1 %"), (0.9999999, ">99.9 %"), (0.051, "5.1 %"),
     (0.5, "50 %"), (0.985, "98.5 %")],
)  # fmt: skip
def test_a_share_is_never_rounded_to_certainty(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_predicted_probability_is_never_certain() -> None:
    assert (probability(0.0), probability(1.0)) == ("<0.1 %", ">99.9 %")


def test_class_names_are_unique_and_as_short_as_that_allows() -> None:
    assert class_names(prediction()) == ("stage 0, a100", "stage 1, h100")
    same = [class_prediction(i, "l4", 0, micro_batch=b) for i, b in enumerate((13, 6, 6))]
    names = class_names(prediction(classes=tuple(same), gpus={"l4": 3}))
    assert names == ("l4, 8 × 13", "l4, 8 × 6, class 1", "l4, 8 × 6, class 2")


def test_memory_stacks_add_up_to_the_device_memory() -> None:
    drawn = memory_figure(prediction())
    bars = [t for t in drawn.figure.data if t.type == "bar"]
    assert [t.name for t in bars][:2] == ["parameters", "optimiser state"]
    assert sum(t.x[0] for t in bars) == pytest.approx(50.0)
    capacity = [s.x0 for s in drawn.figure.layout.shapes]
    assert capacity == [80.0, 80.0]
    assert "stage 1, h100: 60.0 of 80.0 GiB, 2.0 % risk" in drawn.title


def test_time_shares_add_up_and_the_title_names_the_largest_loss() -> None:
    drawn = shares_figure(prediction())
    for row in range(3):
        assert sum(t.x[row] for t in drawn.figure.data) == pytest.approx(1.0)
    assert drawn.title.startswith("75 % of the step is computation; the largest loss is idle")


def test_many_classes_keep_the_fullest_rows_and_say_what_is_left_out() -> None:
    drawn = memory_figure(uniform_prediction(50))
    labels = drawn.figure.layout.yaxis.ticktext
    assert len(labels) == 20
    assert labels[-1].startswith("stage 49,")
    assert "30 more rows are left out" in drawn.caption


def test_spread_keeps_both_ends_and_the_one_that_must_be_there() -> None:
    assert spread(range(100), 5, 60) == [0, 25, 60, 74, 99]
    assert spread(range(3), 5, 1) == [0, 1, 2]


def test_timeline_bars_are_the_tasks_of_one_pipeline_in_their_lanes() -> None:
    steps = timeline()
    drawn = timeline_figure(prediction(), steps)
    busy_s = sum(float(sum(t.x)) for t in drawn.figure.data) / 1e3
    expected = sum(r.end_ns - r.start_ns for r in steps.records()) / 1e9
    assert busy_s == pytest.approx(expected)
    assert {"forward", "backward", "optimiser step"} <= {t.name for t in drawn.figure.data}
    assert drawn.figure.layout.yaxis.ticktext[0] == "stage 0"
    assert "left out" not in drawn.caption


def test_a_large_timeline_is_cut_to_the_limit_and_says_so() -> None:
    drawn = timeline_figure(prediction(), timeline(micro_batches=32), max_bars=40)
    assert sum(len(t.x) for t in drawn.figure.data) == 40
    assert re.search(r"Shown are 1 of 2 rank classes.*shortest tasks are left out", drawn.caption)


def test_equal_pipelines_are_drawn_once() -> None:
    one, two = timeline(), timeline(pipelines=2)
    p = prediction(classes=tuple(class_prediction(i, "h100", i % 2) for i in range(4)))
    single = timeline_figure(prediction(), one)
    double = timeline_figure(p, replace(two))
    count = [sum(len(t.x) for t in d.figure.data) for d in (single, double)]
    assert count[1] == 2 * count[0]


def test_memory_over_time_peaks_at_the_predicted_peak_and_ends_where_it_began() -> None:
    p, layout, evaluation = predict(
        load_scenario("llama-3.1-8b-dgx-h100"), evaluator="engine", with_suggestions=False
    )
    assert evaluation.engine is not None and evaluation.engine.timeline is not None
    (curve,) = memory_curves(layout, evaluation.engine.timeline, [0])
    assert curve.bytes_.max() == pytest.approx(p.classes[0].device_bytes, rel=1e-9)
    assert curve.bytes_[0] == curve.bytes_[-1] == curve.bytes_.min()
    assert all(a <= b for a, b in pairwise(curve.times_s))


def test_trace_is_sorted_named_and_free_of_negative_durations() -> None:
    p, steps = prediction(), timeline()
    trace = step_trace(p, steps)
    events = trace["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in tasks)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {(e["pid"], e["tid"]) for e in tasks} <= named
    assert {e["pid"] for e in tasks} == processes
    kernels = [e for e in tasks if e["cat"] == "kernel"]
    assert len(kernels) == sum(1 for _ in steps.records())
    assert len({e["args"]["correlation"] for e in kernels}) == len(kernels)
    assert trace["distributedInfo"]["world_size"] == 8
    assert any(e["name"] == "ProfilerStep#0" and e["dur"] > 0 for e in tasks)


def test_trace_names_communication_like_nccl_and_nothing_overlaps_on_a_stream() -> None:
    tasks = [e for e in step_trace(prediction(), timeline())["traceEvents"] if e["ph"] == "X"]
    assert any(e["name"].startswith("ncclDevKernel_SendRecv") for e in tasks)
    for lane in {(e["pid"], e["tid"]) for e in tasks}:
        own = [e for e in tasks if (e["pid"], e["tid"]) == lane]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))


def test_a_huge_trace_keeps_the_first_pipeline_of_each_class() -> None:
    p = prediction(classes=tuple(class_prediction(i, "h100", i % 2) for i in range(4)))
    steps = timeline(pipelines=2)
    assert step_trace(p, steps, max_events=10)["processes_left_out"] == 0
    shared = replace(
        steps,
        graph=replace(
            steps.graph,
            streams=tuple(replace(s, rank_class=s.stage) for s in steps.graph.streams),
        ),
    )
    assert step_trace(p, shared, max_events=10)["processes_left_out"] == 2


def test_tables_hold_every_class_component_and_second() -> None:
    p = prediction()
    rows = {
        name: list(csv.DictReader(io.StringIO(text)))
        for name, text in [
            ("classes", classes_csv(p)), ("memory", memory_csv(p)), ("time", time_csv(p))
        ]
    }  # fmt: skip
    assert [r["gpu"] for r in rows["classes"]] == ["a100", "h100"]
    first = [float(r["bytes"]) for r in rows["memory"] if r["class"] == "0"]
    assert sum(first) == p.classes[0].device_bytes
    assert sum(float(r["seconds"]) for r in rows["time"] if r["class"] == "1") == pytest.approx(2.0)
    steps = timeline()
    tasks = list(csv.DictReader(io.StringIO(timeline_csv(steps) or "")))
    assert len(tasks) == sum(1 for _ in steps.records())


def test_page_is_well_formed_with_unique_ids_and_nothing_from_elsewhere() -> None:
    sections = [
        html.Section("a", "First", [html.figure(memory_figure(prediction()), "figure-memory")]),
        html.Section("b", "Second", [html.table(["x"], [["1"]]), html.cards([("n", "1", "")])]),
    ]
    page = html.page("Title", sections, subtitle="sub", lead=html.banner("risky", "Risky", "why"))
    found = Balanced(page)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    assert {"main", "header", "footer", "nav", "figure", "figcaption", "table"} <= found.tags
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)


def test_a_page_without_figures_is_small() -> None:
    assert len(html.page("Title", [html.Section("a", "A", [html.paragraph("text")])])) < 20_000


def test_hostile_names_stay_text() -> None:
    cls = class_prediction(0, HOSTILE, 0, group=HOSTILE)
    p = prediction(title=HOSTILE, classes=(cls,), gpus={HOSTILE: 4}, fullest=0)
    section = html.Section("m", HOSTILE, [html.figure(memory_figure(p), "figure-memory")])
    body = html.page(HOSTILE, [section], lead=html.notice(HOSTILE, [HOSTILE]))
    assert "<img" not in body
    assert body.count("<script") == body.count("</script>") == 3  # data, Plotly, page
    data = json.loads(re.findall(r'id="figure-memory-data">(.*?)</script>', body)[0])
    assert data["layout"]["yaxis"]["ticktext"][0].startswith("&lt;/script&gt;")


@pytest.mark.parametrize("colours", [palette.MEMORY_COLOURS, palette.TIME_COLOURS])
def test_neighbouring_colours_differ_for_red_green_blind_people(colours: dict[str, str]) -> None:
    for matrix in (DEUTERANOPIA, PROTANOPIA):
        seen = [_lab(_simulated(c, matrix)) for c in colours.values()]
        for a, b in pairwise(seen):
            distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
            assert distance > 20  # a difference of 2.3 is just noticeable (CIE76)


# Machado, Oliveira, Fernandes 2009, table 1, severity 1.0 (linear RGB).
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                (-0.011820, 0.042940, 0.968881))  # fmt: skip
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
              (-0.003882, -0.048116, 1.051998))  # fmt: skip


def _simulated(colour: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    """Linear RGB as a colour-blind person sees it."""
    raw = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in raw]
    return [min(max(sum(m * v for m, v in zip(r, linear, strict=True)), 0.0), 1.0) for r in matrix]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of linear sRGB."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(m * v for m, v in zip(row, rgb, strict=True)) for row in to_xyz]
    f = [
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (v / w for v, w in zip(xyz, white, strict=True))
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def test_a_report_is_complete_reproducible_and_matches_the_json(tmp_path: Path) -> None:
    scenario = load_scenario("llama-3.1-8b-dgx-h100")
    answer = predict(scenario, evaluator="engine", with_suggestions=False)
    path = write_report(tmp_path / "new" / "dir", scenario, *answer)
    assert path == tmp_path / "new" / "dir" / "report.html"
    names = {f.name for f in path.parent.iterdir()}
    assert names == {"report.html", "result.json", "trace.json", "classes.csv", "memory.csv",
                     "time.csv", "timeline.csv"}  # fmt: skip
    result = json.loads((path.parent / "result.json").read_text())
    assert result == json.loads(json.dumps(answer[0].to_json()))
    json.loads((path.parent / "trace.json").read_text())
    page = path.read_text()
    assert not Balanced(page).open
    assert f"{answer[0].tokens_per_s.p50:,.0f}" in page
    assert page == report_texts(scenario, *answer)["report.html"]


def test_closed_form_reports_have_no_trace_and_leave_no_stale_one(tmp_path: Path) -> None:
    scenario = load_scenario("llama-3.1-8b-dgx-h100")
    write_report(tmp_path, scenario, *predict(scenario, evaluator="engine", with_suggestions=False))
    assert (tmp_path / "trace.json").exists()
    answer = predict(scenario, evaluator="closed form", with_suggestions=False)
    write_report(tmp_path, scenario, *answer)
    assert not (tmp_path / "trace.json").exists()
    assert "closed form" in (tmp_path / "report.html").read_text()


def test_out_that_is_a_file_or_below_one_is_the_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        prepare_directory(file)
    with pytest.raises(UserError, match="can't write"):
        prepare_directory(file / "below")
    assert file.read_text() == "mine"


def test_nothing_is_replaced_where_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(UserError, match="can't write"):
        write_files(tmp_path, {"a.txt": "new", "missing/b.txt": "new"})
    (tmp_path / "c.txt").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        write_files(tmp_path, {"a.txt": "new", "c.txt": "new"})
    assert (tmp_path / "a.txt").read_text() == "old"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.txt", "c.txt"]


def test_page_script_exchanges_the_neutral_colours_of_the_palette() -> None:
    script = html.asset("page.js")
    assert all(f'"{c}"' in script for c in (palette.INK, palette.GRID, palette.SURFACE))
