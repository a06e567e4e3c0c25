"""`kvstrata doctor`: can this machine do what a configuration asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.configs import load_config
from kvstrata.tools.cli_options import JsonOption, SetOption
from kvstrata.tools.cli_output import table_console, write_json
from kvstrata.tools.doctor import (
    Check,
    DoctorReport,
    Machine,
    Status,
    check_device,
    check_gds,
    check_libraries,
    check_limits,
    check_memory,
)
from kvstrata.tools.doctor_stores import check_stores

_STYLES = {Status.OK: "green", Status.INFO: "dim", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Configuration file (TOML); default: the machine alone."),
    ] = None,
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Check the device, memory, limits, libraries, and every configured root, each with its remedy.

    Writes a small file into each root and removes it. Exit code 0: what the configuration asks for
    works; 1: something does not (`fail`); 2: wrong use.
    """
    settings = None if config is None else load_config(config, set_ or ())
    machine = Machine()
    checks: list[Check] = []
    with Console(stderr=True).status("looking"):
        checks += check_device(machine, settings)
        checks += check_memory(machine, settings)
        checks += check_limits(machine, settings)
        if settings is not None:
            checks += check_stores(machine, settings)
        checks += check_libraries(machine, settings)
        checks += check_gds(machine)
    counts = [check.status for check in checks]
    report = DoctorReport(
        config=str(config or ""),
        checks=checks,
        failed=counts.count(Status.FAIL),
        warned=counts.count(Status.WARN),
    )
    _print(report, table_console(json))
    if json is not None:
        write_json(report, json)
    if report.failed:
        raise typer.Exit(1)


def _print(report: DoctorReport, console: Console) -> None:
    table = Table("", "what", "", "found", "remedy")
    area = ""
    for check in report.checks:
        if check.area != area and area:
            table.add_section()
        table.add_row(
            check.area if check.area != area else "",
            check.name,
            Text(check.status.value, style=_STYLES[check.status]),
            Text(check.found),
            Text(check.remedy),
        )
        area = check.area
    console.print(table)
    if report.failed:
        console.print(f"{report.failed} failed", style="bold red", highlight=False)
    else:
        console.print(f"nothing failed, {report.warned} warnings", highlight=False)
