"""`kvstrata config check | show`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvstrata.configs import ByteSize, Config, Secret, load_config
from kvstrata.configs.source import Keys
from kvstrata.units import format_size

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]

HIDDEN = "(hidden)"
_SECRET_ENDINGS = ("key", "password", "secret", "token", "credentials")


@app.command()
def check(file: ConfigFile, overrides: Overrides = None) -> None:
    """Check a configuration, without allocating anything; print what it amounts to."""
    config = load_config(file, overrides or ())
    table = Table("tier", "what", "size", "pages", title=f"{file}: OK", title_justify="left")
    pools = config.pools
    table.add_row(
        "L1",
        f"device {config.device.kind}",
        format_size(pools.pages * config.page_bytes),
        str(pools.pages),
    )
    rows = f"ReqToToken, {pools.max_requests} x {pools.max_context_tokens}"
    table.add_row("", rows, format_size(config.req_to_token_bytes), "")
    staging = config.staging
    table.add_row("L2", staging.mode, format_size(staging.bytes), str(config.staging_pages))
    backend = config.l3_backend
    if backend is None:
        table.add_row("L3", "none", "", "")
    else:
        table.add_row("L3", f"{config.l3.backend} ({backend.plugin})", "", "")
    console = Console()
    console.print(table)
    for part in config.components:
        console.print(
            f"page of {part.name}: {format_size(part.page_bytes)} = {part.page_tokens} tokens x "
            f"{part.layers} layers x 2 x {part.kv_heads} heads x {part.head_dim} x {part.dtype}",
            highlight=False,
        )
    for note in _notes(config):
        console.print(f"note: {note}", highlight=False)


def _notes(config: Config) -> Iterator[str]:
    pools = config.pools
    need = -(-pools.max_context_tokens // pools.page_tokens)
    if need > pools.pages:
        yield (
            f"a request of max_context_tokens needs {need} pages of L1, which has {pools.pages}: "
            "longer requests will be refused"
        )


@app.command()
def show(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print every setting in effect, as TOML. Defaults are marked, secrets are not shown."""
    config = load_config(file, overrides or ())
    for line in _lines(config):
        typer.echo(line)


def _lines(config: Config) -> Iterator[str]:
    for name, section in (
        ("namespace", config.identity),
        ("device", config.device),
        ("pools", config.pools),
        ("staging", config.staging),
        ("l3", config.l3),
        *((f"backends.{name}", backend) for name, backend in config.backends.items()),
        ("policies", config.policies),
        ("scheduler", config.scheduler),
        ("admin", config.admin),
    ):
        yield from _section(config, f"[{name}]", section, tuple(name.split(".")))


def _section(config: Config, header: str, section: msgspec.Struct, keys: Keys) -> Iterator[str]:
    """A struct as a table: its settings first, then the tables in it."""
    yield header
    tables: list[tuple[str, msgspec.Struct, Keys]] = []
    title = header.strip("[]")
    for field in msgspec.structs.fields(section):
        name = field.encode_name
        value = getattr(section, field.name)
        here: Keys = (*keys, name)
        if isinstance(value, msgspec.Struct):
            tables.append((f"[{title}.{name}]", value, here))
        elif isinstance(value, tuple) and any(isinstance(v, msgspec.Struct) for v in value):
            tables += [(f"[[{title}.{name}]]", v, (*here, i)) for i, v in enumerate(value)]
        else:
            line = f"{name} = {_text(config, value, here)}"
            yield line if here in config.source.given else f"{line:<40} # default"
    yield ""
    for inner, value, here in tables:
        yield from _section(config, inner, value, here)


def _text(config: Config, value: Any, keys: Keys) -> str:
    """`value` in TOML's syntax."""
    name = str(keys[-1])
    if isinstance(value, Secret) or keys in config.source.secrets:
        return f'"{HIDDEN}"' if value else '""'
    if isinstance(value, str) and value and name.lower().endswith(_SECRET_ENDINGS):
        return f'"{HIDDEN}"'
    if isinstance(value, ByteSize):
        return f'"{value.text}"'
    if value is None:
        return '"" # not set'
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False, default=str)
