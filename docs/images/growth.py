"""Makes the engine's growth picture: ``python docs/images/growth.py`` (needs a Chromium)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright

from benchmarks.engine import run

PICTURE = Path(__file__).with_name("engine-growth.png")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    """Run the benchmark, draw time against classes times micro-batches, photograph it."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser_path is None:
        sys.exit("no Chromium found: make browser installs one")
    rows = run()["growth"]
    figure = go.Figure()
    for classes in sorted({r["rank_classes"] for r in rows}):
        line = [r for r in rows if r["rank_classes"] == classes]
        figure.add_scatter(
            x=[r["classes_x_micro_batches"] for r in line],
            y=[r["total_s"] for r in line],
            name=f"{classes} classes",
        )
    figure.update_layout(
        title="Building and running one step costs what its tasks cost, whatever the GPUs",
        template="plotly_white",
        width=900,
        height=500,
    )
    figure.update_xaxes(type="log", title="rank classes x micro-batches")
    figure.update_yaxes(type="log", title="seconds")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "growth.html"
        figure.write_html(page_file, include_plotlyjs=True, div_id="growth")
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        page = browser.new_page(viewport={"width": 920, "height": 520})
        page.goto(page_file.as_uri())
        page.wait_for_selector("#growth .main-svg")
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
