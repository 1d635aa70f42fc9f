"""The command as a process: exit codes, one JSON document on standard output, no tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from simulator import cli
from simulator.errors import UserError


def gpumix(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["gpus"], "gpus"), (["models"], "models"), (["scenarios"], "scenarios")],
)
def test_catalogue_as_json_and_as_a_table(arguments: list[str], key: str) -> None:
    done = gpumix(*arguments, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    entries = json.loads(done.stdout)[key]
    assert len(entries) >= 8
    assert entries[0]["name"] in gpumix(*arguments).stdout


def test_one_gpu_shows_where_its_numbers_come_from() -> None:
    document = json.loads(gpumix("gpus", "H100-SXM", "--json").stdout)
    assert document["gpu"]["name"] == "h100-sxm-80gb"
    assert document["sources"]["memory_bandwidth_bytes_per_s"]["source"]


def test_bad_input_exits_with_2_and_lists_near_names() -> None:
    done = gpumix("gpus", "h1000")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "h100" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_command_exits_with_2() -> None:
    assert gpumix("simulatte").returncode == 2


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m simulator gpus --json | head -c 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""


def test_start_loads_nothing_heavy() -> None:
    code = (
        "import sys; from simulator.cli import build_app; build_app();"
        "print([m for m in ('torch', 'pandas', 'plotly', 'numpy', 'simpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _raising(error: BaseException) -> Callable[[], Callable[..., None]]:
    def command(**_: object) -> None:
        raise error

    return lambda: command


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines (--debug shows where)"),
        (UserError("bad"), 2, "gpumix: bad"),
    ],
)
def test_what_escapes_becomes_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(cli, "build_app", _raising(error))
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == code
    captured = capsys.readouterr().err
    assert words in captured
    assert captured.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_app", _raising(RuntimeError("why")))
    with pytest.raises(RuntimeError, match="why"):
        cli.main(["--debug"])
