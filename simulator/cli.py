"""The command ``gpumix``.

Each group of commands is a module of :mod:`simulator.commands` with a function
``register(app)`` that adds its commands to the Typer application; to add one, write the module
and name it in ``GROUPS``. Such a module imports nothing heavy at its top: whatever a command needs
it imports inside its function, so that every command starts fast. A command reports a mistake of
its user by raising :class:`~simulator.errors.UserError` and ends with another exit code than 0 by
raising ``typer.Exit(code)``; this module turns everything else into messages and exit codes:
0 ok, 2 bad input, 3 the plan does not fit, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from simulator.errors import UserError

# Importing makes many objects and no garbage: collecting at every 700 of them costs a command a
# sixth of its start. Long commands still collect, less often.
gc.set_threshold(100_000, 20, 20)

#: Modules of ``simulator.commands``, in the order in which ``--help`` lists them.
GROUPS = ("predict", "plan", "sweep", "purchase", "validate", "calibrate", "replay", "catalogue")

EXIT_OTHER = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_HELP = "What a training plan does on a (mixed) GPU cluster: how fast, and will it fit."


def build_app() -> typer.Typer:
    """The Typer application with every command registered."""
    app = typer.Typer(
        name="gpumix",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for group in GROUPS:
        import_module(f"simulator.commands.{group}").register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"gpumix {version('gpumix')}")
        raise typer.Exit


def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del debug, version  # --debug is read by main(), so that it also works after the command


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    is_debug = "--debug" in given
    try:
        check_package()
        build_app()(args=[a for a in given if a != "--debug"], prog_name="gpumix")
    except UserError as error:
        for problem in error.problems:
            print(f"gpumix: {problem}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except BrokenPipeError:
        _silence_stdout()
        sys.exit(EXIT_OTHER)
    except KeyboardInterrupt:
        print("gpumix: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if is_debug:
            raise
        text = " ".join(str(error).split())[:300]
        print(
            f"gpumix: unexpected {type(error).__name__}: {text} (--debug shows where)",
            file=sys.stderr,
        )
        sys.exit(EXIT_OTHER)
    sys.exit(0)


def check_package() -> None:
    """Refuse to run with another project's ``simulator`` package.

    Raises:
        UserError: ``simulator`` or ``hardware_db`` was imported from elsewhere.
    """
    import hardware_db
    import simulator

    home = Path(__file__).resolve().parent
    found = Path(str(simulator.__file__)).resolve().parent
    beside = Path(str(hardware_db.__file__)).resolve().parent.parent
    if found != home or beside != home.parent:
        other = found if found != home else beside / "hardware_db"
        raise UserError(
            f"the package at {other} shadows GPUMix's own; run gpumix from another directory "
            "or uninstall the other package"
        )


def _silence_stdout() -> None:
    """Keep the interpreter from writing to the closed pipe once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
