"""The report in a real browser: it draws, stays inside the screen and asks nobody for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.analysis.predict import predict
from simulator.report.write import write_report
from simulator.spec.scenario import load_scenario

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip("no Chromium found: make browser installs one")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenario = load_scenario("llama-3.1-70b-mixed-gpumix")
    answer = predict(scenario, evaluator="engine", with_suggestions=False)
    return write_report(tmp_path_factory.mktemp("report"), scenario, *answer)


class Visit:
    """An open page with everything it complained about or asked for."""

    def __init__(self, browser: Any, report: Path, width: int, scheme: str = "light") -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )  # fmt: skip
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 8")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "light"), (1280, "dark")])
def test_report_draws_everything_without_a_network(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    visit = Visit(browser, report, width, scheme)
    assert visit.complaints == []
    assert visit.requests == [report.as_uri()]
    for name in ("shares", "memory", "timeline", "memory-time"):
        assert visit.count(f"#figure-{name} .main-svg") > 0
    assert visit.count("#figure-memory .bars path") >= 10
    assert visit.count("#figure-timeline .bars path") > 1000
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visit.page.evaluate(overflow) == 0
    visit.page.close()


def test_legend_hides_and_shows_a_part_of_a_figure(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, 1280)
    bars = "#figure-memory .bars path"
    before = visit.count(bars)
    button = visit.page.locator("[data-plot=figure-memory][data-trace=activations]")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert visit.count(bars) < before
    button.click()
    assert visit.count(bars) == before
    visit.page.close()


def test_dragging_across_the_timeline_zooms_in(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, 1280)
    plot = visit.page.locator("#figure-timeline .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 300, middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 400, middle, steps=5)
    visit.page.mouse.up()
    shown = "document.getElementById('figure-timeline').layout.xaxis.range"
    visit.page.wait_for_function(f"{shown}[0] > 0")
    low, high = visit.page.evaluate(shown)
    assert high - low == pytest.approx(low / 3, rel=0.1)
    visit.page.close()
