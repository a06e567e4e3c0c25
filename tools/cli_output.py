"""The `--json` of commands: a report to a file, or to stdout with the table on stderr."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from kvstrata.errors import InputError, Where

STDOUT = Path("-")


def table_console(json: Path | None) -> Console:
    """Where the table goes: to stdout, unless the report does."""
    return Console(stderr=json == STDOUT)


def check_output(path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: raises InputError now and not after the
    work. Returns what it is given."""
    if path is None or path == STDOUT:
        return path
    folder = path.absolute().parent
    if path.is_dir():
        raise _no_output(path, "this is a directory")
    if not folder.is_dir():
        raise _no_output(path, f"there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _no_output(path, "permission denied")
    return path


def write_json(report: object, path: Path) -> None:
    """A msgspec struct or dataclass. Raises InputError when the file cannot be written."""
    data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if path == STDOUT:
        typer.echo(data, nl=False)
        return
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise _no_output(path, exc.strerror or str(exc)) from exc


def _no_output(path: Path, reason: str) -> InputError:
    return InputError(
        f"the report cannot be written: {reason}",
        remedy="give a file that you may write; --json takes - for stdout as well",
        where=Where(path),
    )
