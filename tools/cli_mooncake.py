"""`kvstrata mooncake up | store`: a Mooncake Store for development, and nodes of a real one."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvstrata.backends.mooncake import MooncakeOptions
from kvstrata.backends.mooncake.cluster import LocalCluster
from kvstrata.backends.mooncake.network import enter_private_network, is_exposed
from kvstrata.backends.mooncake.store_process import serve
from kvstrata.configs import Config, load_config
from kvstrata.errors import ConfigError, InputError, Where

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

CHECK_S = 0.2
"""How often the processes are looked at."""

ConfigFile = Annotated[Path, typer.Option(help="Configuration file (TOML) with the backend.")]
BackendName = Annotated[
    str | None, typer.Option(help="Its [backends.NAME]; default: the only one with this plugin.")
]
SegmentBytes = Annotated[
    str | None, typer.Option(help="Memory that a store gives, instead of segment_bytes.")
]
Exposed = "Mooncake listens on all addresses of this machine and asks nobody for a password"


@app.callback()
def _mooncake() -> None:
    """A Mooncake Store for development, and nodes of a real one."""


@app.command()
def up(
    config: ConfigFile,
    stores: Annotated[int, typer.Option(min=0, max=64, help="How many stores.")] = 2,
    backend: BackendName = None,
    segment_bytes: SegmentBytes = None,
    private: Annotated[
        bool, typer.Option(help="In a network of its own that has loopback only; needs COMMAND.")
    ] = False,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run this when they are ready, and end them with it.", metavar="[-- COMMAND …]"
        ),
    ] = None,
) -> None:
    """Start a master and stores on this machine, for development.

    Says when they are ready. They end with this command, however it ends; what they hold is in
    memory only.
    """
    options = store_options(load_config(config), backend, segment_bytes)
    if private and not command:
        raise InputError(
            "--private without a command: nobody else could reach the store",
            remedy="add -- COMMAND, for example: -- kvstrata replay --config F",
            where=Where(key="--private"),
        )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if private:
        enter_private_network()
    elif is_exposed():
        typer.echo(f"warning: {Exposed}; --private keeps it to one command", err=True)
    cluster = LocalCluster(options, stores, should_stop=ended.is_set)
    with cluster:
        if ended.is_set():
            raise typer.Exit(130)
        names = ", ".join(cluster.names) or "none"
        typer.echo(f"ready: master {options.master}, stores {names}")
        code = _run(command, cluster, ended) if command else _stay(cluster, ended)
    raise typer.Exit(code)


@app.command()
def store(
    config: ConfigFile, backend: BackendName = None, segment_bytes: SegmentBytes = None
) -> None:
    """Give this machine's memory to the store that a configuration names, until a signal comes.

    A master that is away is waited for. `host` must be an address that clients reach.
    """
    options = store_options(load_config(config), backend, segment_bytes)
    if is_exposed():
        typer.echo(f"warning: {Exposed}; let only the machines of the store reach it", err=True)
    serve(options, lambda name: typer.echo(f"ready: {name}"), until_stdin_ends=False)


def store_options(
    config: Config, backend: str | None, segment_bytes: str | None = None
) -> MooncakeOptions:
    """The options of a mooncake backend, as a store has them. Raises `ConfigError`."""
    found = {name: b for name, b in config.backends.items() if b.plugin == "mooncake"}
    if backend is None and len(found) == 1:
        backend = next(iter(found))
    if backend not in found:
        raise ConfigError(
            f'there is no backend {backend!r} with plugin = "mooncake"'
            if backend
            else f'{len(found)} backends have plugin = "mooncake"',
            remedy=f"choose one with --backend: {', '.join(found) or 'the file has none'}",
            where=config.where("backends"),
        )
    options = found[backend].options
    assert isinstance(options, MooncakeOptions)
    changes = {"role": "store"}
    if segment_bytes is not None:
        changes["segment_bytes"] = segment_bytes
    try:
        changed = msgspec.structs.replace(options, **changes)
        changed.__post_init__()
    except ValueError as error:
        raise InputError(
            str(error), remedy='write bytes or text like "1GiB"', where=Where(key="--segment-bytes")
        ) from error
    return changed


def _stay(cluster: LocalCluster, ended: threading.Event) -> int:
    while not ended.wait(CHECK_S):
        cluster.check()
    return 0


def _run(command: list[str], cluster: LocalCluster, ended: threading.Event) -> int:
    """Until the command ends; a signal is passed on to it. Its exit code."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise InputError(
            f"cannot run {command[0]!r}: {error.strerror}",
            remedy="give a program that is there",
            where=Where(key="COMMAND"),
        ) from error
    try:
        while True:
            try:
                code = process.wait(CHECK_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                cluster.check()
            if ended.is_set():
                ended.clear()
                process.terminate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
