"""Makes the sweep's picture: ``python docs/images/sweep.py [SCENARIO]`` (needs a Chromium)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from simulator.planner.executors import Here
from simulator.planner.sweep import make_sweep, run_sweep
from simulator.report.sweep_files import REPORT, write_sweep
from simulator.spec.scenario import load_scenario

PICTURE = Path(__file__).with_name("sweep.png")
SIZE = {"width": 1180, "height": 1130}
SCENARIO = "sweep-micro-batch-tp"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main(name: str) -> None:
    """Run the sweep, write its report, photograph the verdict and the heat maps."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser_path is None:
        sys.exit("no Chromium found: make browser installs one")
    sweep = make_sweep(load_scenario(name))
    rows = list(run_sweep(sweep, Here(), {}))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_sweep(Path(folder), sweep, rows)
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        page = browser.new_page(viewport=SIZE)
        page.goto((Path(folder) / REPORT).as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= 8")
        page.add_style_tag(content="nav, figcaption { display: none }")
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else SCENARIO)
