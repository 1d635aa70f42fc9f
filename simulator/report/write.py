"""Puts a report into a directory: all of it, or nothing and a reason."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.errors import Problem, UserError
from simulator.report.prediction_page import prediction_page
from simulator.report.tables import classes_csv, memory_csv, time_csv, timeline_csv
from simulator.report.trace import step_trace

if TYPE_CHECKING:
    from simulator.analysis.predict import Evaluation
    from simulator.analysis.prediction import Prediction
    from simulator.spec.layout import Layout
    from simulator.spec.scenario import Scenario

REPORT = "report.html"
RESULT = "result.json"
_ONLY_WITH_TIMELINE = ("trace.json", "timeline.csv")


def write_report(
    out: Path, scenario: Scenario, prediction: Prediction, layout: Layout, evaluation: Evaluation
) -> Path:
    """Write report.html, result.json, CSV tables and, of an engine run, trace.json.

    Returns the path of report.html. ``result.json`` is the document that ``--json`` prints. Files
    of an earlier report that this one doesn't have are removed.

    Raises:
        UserError: ``out`` is a file or can't be written; then nothing has changed there.
    """
    prepare_directory(out)
    texts = report_texts(scenario, prediction, layout, evaluation)
    stale = [name for name in _ONLY_WITH_TIMELINE if name not in texts]
    if not (out / RESULT).is_file():
        stale = []  # these are not ours
    write_files(out, texts)
    for name in stale:
        (out / name).unlink(missing_ok=True)
    return out / REPORT


def report_texts(
    scenario: Scenario, prediction: Prediction, layout: Layout, evaluation: Evaluation
) -> dict[str, str]:
    """The files of a report by name."""
    document = json.dumps(prediction.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    texts = {
        RESULT: document + "\n",
        "classes.csv": classes_csv(prediction),
        "memory.csv": memory_csv(prediction),
        "time.csv": time_csv(prediction),
    }
    timeline = evaluation.engine.timeline if evaluation.engine else None
    if timeline is not None:
        trace = step_trace(prediction, timeline)
        texts["trace.json"] = json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"
        rows = timeline_csv(timeline)
        if rows is not None:
            texts["timeline.csv"] = rows
    texts[REPORT] = prediction_page(scenario, prediction, layout, evaluation)
    return texts


def prepare_directory(out: Path) -> None:
    """Make the directory of a report. Raises UserError where that is impossible."""
    try:
        if out.exists() and not out.is_dir():
            raise UserError(Problem("--out", f"{out} is a file", "name a directory"))
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _unwritable(out, error) from None


def write_files(out: Path, texts: dict[str, str]) -> None:
    """Write all files through temporary ones; none is replaced until all are on disk.

    Raises:
        UserError: writing failed; the temporary files are removed.
    """
    blocked = [name for name in texts if (out / name).is_dir()]
    if blocked:
        raise UserError(Problem("--out", f"{out / blocked[0]} is a directory", "move it away"))
    ready: dict[Path, Path] = {}
    try:
        for name, text in texts.items():
            ready[_temporary(out, name, text)] = out / name
        for temporary, final in ready.items():
            os.replace(temporary, final)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        for temporary in ready:
            temporary.unlink(missing_ok=True)


def _temporary(out: Path, name: str, text: str) -> Path:
    """A finished temporary file beside the final one; none is left where writing fails."""
    handle, path = tempfile.mkstemp(dir=out, prefix=f".{name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(path, 0o666 & ~_umask())
    except BaseException:
        os.unlink(path)
        raise
    return Path(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(out: Path, error: OSError) -> UserError:
    reason = error.strerror or type(error).__name__
    return UserError(Problem("--out", f"can't write to {out}: {reason}", "name another directory"))
