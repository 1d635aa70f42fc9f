"""``gpumix purchase`` as a process: ranking, JSON, report, bad input."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

SMALL: dict[str, Any] = {
    "title": "GPT-125M on one node or another",
    "model": "gpt3-125m",
    "workload": {"sequence_length": 1024, "global_batch": 64, "tokens": 3.0e9},
    "cluster": {"groups": [{"node": "dgx-a100-40gb", "count": 1}]},
    "stack": "torchtitan",
    "purchase": {
        "horizon_years": 3,
        "owned": {"age_years": 3},
        "constraints": {"budget": 400_000},
        "candidates": [
            {"name": "keep", "keep": "all", "plan": {"sharding": "zero3"}},
            {
                "name": "buy", "buy": [{"node": "dgx-h100", "count": 1}],
                "plan": {"sharding": "zero3"},
            },
            {
                "name": "buy dearer", "plan": {"sharding": "zero3"},
                "buy": [{"node": "dgx-h100", "count": 1, "price": 390_000}],
            },
            {
                "name": "rent", "plan": {"sharding": "zero3"},
                "rent": [{"node": "dgx-h100", "tier": "reserved"}],
            },
        ],
    },
    "economics": {"currency": "USD", "draws": 500},
}  # fmt: skip


def gpumix(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulator", "purchase", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def written(folder: Path, **changes: Any) -> str:
    """The small scenario as a file, with sections or dotted fields changed."""
    data = json.loads(json.dumps(SMALL))
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = data
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        if value is None:
            del target[last]
        else:
            target[last] = value
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(data))
    return str(file)


def numbers_in(data: Any) -> Iterator[float]:
    if isinstance(data, float):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from numbers_in(value)
    elif isinstance(data, list):
        for value in data:
            yield from numbers_in(value)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("purchase")
    done = gpumix(written(folder), "--json", "--out", str(folder / "out"), "--date", "2026-12-01")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "out"


def test_candidates_are_ranked_with_ranges(answered: tuple[dict[str, Any], Path]) -> None:
    document, _ = answered
    names = [c["name"] for c in document["candidates"]]
    assert set(names) == {"keep", "buy", "buy dearer", "rent"}
    assert names.index("buy") < names.index("buy dearer")
    for c in document["candidates"]:
        for key in ("cost_per_1e9_tokens", "total_cost", "time_to_train_s", "energy_kwh"):
            assert 0 < c[key]["p10"] <= c[key]["p50"] <= c[key]["p90"]
    feasible = [c["cost_per_1e9_tokens"]["p50"] for c in document["candidates"] if c["feasible"]]
    assert feasible == sorted(feasible)
    assert all(math.isfinite(n) for n in numbers_in(document))


def test_constraints_put_a_candidate_below_the_others(
    answered: tuple[dict[str, Any], Path],
) -> None:
    by_name = {c["name"]: c for c in answered[0]["candidates"]}
    assert by_name["buy"]["feasible"]
    # 8 GPUs x 2.72 USD x 26,298 hours is more than 400,000.
    assert any("budget" in text for text in by_name["rent"]["violations"])
    assert not by_name["rent"]["feasible"]


def test_verdict_is_two_sentences_that_name_the_winner(
    answered: tuple[dict[str, Any], Path],
) -> None:
    document, _ = answered
    assert document["verdict"].startswith(f"Choose {document['candidates'][0]['name']!r}")
    assert document["verdict"].count(". ") == 1


def test_every_assumption_has_a_source_and_a_price_its_date(
    answered: tuple[dict[str, Any], Path],
) -> None:
    found = {a["name"]: a for a in answered[0]["assumptions"]}
    assert all(a["source"] for a in found.values())
    assert found["price of dgx-h100"]["date"] == "2026-06-15"
    assert found["price of dgx-a100-40gb"]["stale"]
    assert "dgx-a100-40gb" in answered[0]["warnings"][0]


def test_report_holds_all_its_sections(answered: tuple[dict[str, Any], Path]) -> None:
    document, out = answered
    page = (out / "report.html").read_text()
    for name in ("cost-time", "cash", "costs", "tornado", "headroom"):
        assert f'id="figure-{name}"' in page
    assert json.loads((out / "result.json").read_text()) == document


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_report_draws_in_a_browser(answered: tuple[dict[str, Any], Path], width: int) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    found = next((p for p in map(shutil.which, ("chromium", "google-chrome")) if p), None)
    if found is None:
        pytest.skip("no Chromium found")
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((answered[1] / "report.html").as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 10")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) == 0
        assert page.locator("#figure-tornado .bars path").count() >= 4
        browser.close()
    assert complaints == []


def test_the_same_question_has_the_same_answer(tmp_path: Path) -> None:
    file = written(tmp_path)
    one = gpumix(file, "--json", "--date", "2026-12-01")
    two = gpumix(file, "--json", "--date", "2026-12-01")
    assert one.stdout == two.stdout


def test_a_budget_searches_node_counts(tmp_path: Path) -> None:
    search = {"nodes": [{"node": "dgx-h100"}, {"gpu": "l40s", "gpus_per_node": 8}], "most": 2}
    file = written(tmp_path, purchase__search=search, purchase__candidates=[], stack="gpumix")
    done = gpumix(file, "--json", "--budget", "330000")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["search"]["budget"] == 330_000
    assert document["search"]["best"][0] == "buy 1 dgx-h100"
    for c in document["candidates"]:
        assert c["upfront_cost"]["p50"] <= 330_000 * 1.02


def test_the_table_starts_with_the_verdict(tmp_path: Path) -> None:
    done = gpumix(written(tmp_path), "--date", "2026-12-01")
    assert done.returncode == 0
    assert done.stdout.startswith("Choose '")
    assert "warning: more than a year old" in done.stdout


def test_what_doesn_t_fit_is_reported_with_what_would(tmp_path: Path) -> None:
    candidates = [{"name": "one box", "buy": [{"node": "dgx-a100-40gb", "count": 1}]}]
    file = written(tmp_path, model="llama-3.1-70b", stack="gpumix", purchase__candidates=candidates,
                   purchase__constraints={})  # fmt: skip
    done = gpumix(file, "--json")
    assert done.returncode == 3
    (candidate,) = json.loads(done.stdout)["candidates"]
    assert not candidate["fits"]
    assert candidate["total_cost"] is None
    assert "doesn't fit on 8 a100-sxm-40gb" in candidate["missing"]
    assert "more dgx-a100-40gb would hold it" in candidate["missing"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"purchase__candidates__1__buy": [{"node": "dgx-h100", "price": -1}]}, "is negative"),
        ({"economics__currency": None}, "economics.currency: the currency is missing"),
        ({"economics__currency": "EUR"}, "exchange_rate"),
        ({"purchase__horizon_years": 0}, "purchase.horizon_years: 0 is too small"),
        ({"purchase__owned": None}, "nothing is owned"),
        ({"purchase__candidates": []}, "nothing to compare"),
        ({"economics__regoin": "us"}, "did you mean 'region'"),
        ({"economics__region": "atlantis"}, "no electricity price for 'atlantis'"),
        ({"purchase__candidates__1__buy": [{"node": "dgx-h1000"}]}, "dgx-h100"),
        ({"workload__tokens": None}, "tokens: is missing"),
        ({"economics__pue": [1.5, 1.2, 1.1]}, "not in order"),
        ({"economics__pue": 0.5}, "at least 1"),
        ({"purchase__candidates__1__name": "keep"}, "'keep' is taken"),
        ({"purchase__candidates__0__keep": [{"group": 3}]}, "there is no group 3"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_its_place(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    done = gpumix(written(tmp_path, **changes))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("gpumix: ")
    assert "scenario.yaml:" in done.stderr


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, economics__currency=None, purchase__horizon_years=-1,
                   economics__pue=0.1)  # fmt: skip
    lines = gpumix(file).stderr.splitlines()
    assert len(lines) == 3


def test_a_scenario_without_the_section_says_so() -> None:
    done = gpumix("llama-3.1-8b-dgx-h100")
    assert done.returncode == 2
    assert "purchase: is missing" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["purchase-a-extend-a100", "purchase-b-256-h100", "purchase-c-university-lab",
     "purchase-d-405b"],
)  # fmt: skip
def test_shipped_scenarios_answer(name: str) -> None:
    done = gpumix(name, "--json", "--date", "2026-12-01", timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["candidates"][0]["feasible"]
    assert all(math.isfinite(n) for n in numbers_in(document))
