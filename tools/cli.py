"""The command `kvstrata`: mounts the commands and maps errors to exit codes.

0: done. 1: the work itself failed (a check found faults, storage is away). 2: something that a
person gave is wrong (arguments, config, plugin, trace): one message on stderr, no traceback.
130: interrupted. A traceback is always a bug in kvstrata.

Start-up is fast: a command's module (and with it torch) is imported only when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from kvstrata import __version__
from kvstrata.errors import CapacityError, StorageError, UserError

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True, slots=True)
class Mount:
    """A command (a function) or a group of commands (a Typer), imported when it is called."""

    module: str
    attribute: str
    help: str


MOUNTS = {
    "replay": Mount("kvstrata.tools.replay", "replay", "Replay a trace through L1, L2 and L3."),
    "generate": Mount("kvstrata.tools.generate", "generate", "Continue prompts with a model."),
    "config": Mount("kvstrata.tools.cli_config", "app", "Check and show configurations."),
    "backends": Mount(
        "kvstrata.tools.cli_backends",
        "app",
        "List and test storage plugins; detach and attach L3 of a process that serves.",
    ),
    "migrate": Mount(
        "kvstrata.tools.cli_migrate", "migrate", "Copy or move frames from one backend to another."
    ),
    "verify": Mount("kvstrata.tools.cli_verify", "verify", "Check every frame of a backend."),
    "inspect": Mount("kvstrata.tools.cli_inspect", "inspect", "Show what a backend holds."),
    "doctor": Mount("kvstrata.tools.cli_doctor", "doctor", "Check what this machine can do."),
    "bench": Mount("kvstrata.tools.bench", "app", "Measure parts of kvstrata."),
    "mooncake": Mount(
        "kvstrata.tools.cli_mooncake", "app", "Start a Mooncake Store, or its nodes."
    ),
}


def build_app(args: Sequence[str]) -> typer.Typer:
    """The application for one command line: imports the command that `args` name, no other."""
    app = typer.Typer(
        rich_markup_mode="markdown",  # joins the lines of a docstring
        name="kvstrata",
        help="Tiered KV-cache storage for LLM servers.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    called = next((arg for arg in args if not arg.startswith("-")), None)
    for name, mount in MOUNTS.items():
        if name != called:
            app.command(name, help=mount.help)(_not_called)
            continue
        target: Any = getattr(import_module(mount.module), mount.attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=mount.help)
        else:
            app.command(name)(target)
    return app


def main(args: Sequence[str] | None = None) -> int:
    """Entry point: runs the command line `args` (None: the process's) and returns the exit code."""
    args = sys.argv[1:] if args is None else list(args)
    return guarded(lambda: build_app(args)(args=args, prog_name="kvstrata"))


def guarded(run: Callable[[], Any]) -> int:
    """Run a command and map what it raises to an exit code and one message on stderr."""
    try:
        run()
    except SystemExit as exc:  # how typer ends, well or not
        return exc.code if isinstance(exc.code, int) else FAILED
    except UserError as exc:
        place = f"{exc.where}: " if str(exc.where) else ""
        _complain(f"{place}{exc.message}\n  {exc.remedy}")
        return USER_ERROR
    except (StorageError, CapacityError) as exc:
        _complain(str(exc))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _complain(message: str) -> None:
    sys.stderr.write(f"kvstrata: error: {message}\n")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Takes the options that come before the command."""


def _not_called() -> None:
    """Stands for a command whose module is not needed for this command line."""


if __name__ == "__main__":
    sys.exit(main())
