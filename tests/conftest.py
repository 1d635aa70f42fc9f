"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the measured tables; tests that need it are skipped where it is absent.

    ``GPUMIX_DATA`` names it; without it, the folder ``shared/data`` beside the checkout is used.
    """
    named = os.environ.get("GPUMIX_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no measured tables at {folder}: set GPUMIX_DATA")
    return folder
