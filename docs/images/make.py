"""Makes the picture of the README: ``python docs/images/make.py [SCENARIO]`` (needs a Chromium)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from simulator.analysis.predict import predict
from simulator.report.write import write_report
from simulator.spec.scenario import load_scenario

PICTURE = Path(__file__).with_name("report.png")
SIZE = {"width": 1120, "height": 1640}
SCENARIO = "cephalo-small-gpt-2.7b"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main(name: str) -> None:
    """Predict, write the report, photograph its verdict, its shares of time and its step."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser_path is None:
        sys.exit("no Chromium found: make browser installs one")
    scenario = load_scenario(name)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = write_report(Path(folder), scenario, *predict(scenario, evaluator="engine"))
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        page = browser.new_page(viewport=SIZE)
        page.goto(report.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 8")
        # The picture shows what fits one screen; tables and inputs stay in the report.
        page.add_style_tag(
            content="#help, #memory > h3, .scroll, nav, figcaption { display: none }"
        )
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else SCENARIO)
