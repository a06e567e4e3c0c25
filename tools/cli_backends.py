"""`kvstrata backends list | show | conformance`, and `status | detach | attach` of `cli_admin`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.backends.base import StorageBackend
from kvstrata.backends.registry import PluginInfo, build_options, list_plugins, load_plugin
from kvstrata.configs.read import parse_value
from kvstrata.configs.schema import Secret
from kvstrata.errors import InputError, PluginError, Where
from kvstrata.tools import cli_admin

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
for command in (cli_admin.status, cli_admin.detach, cli_admin.attach):
    app.command()(command)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A plugin, as `backends list` has it.")]


@app.command("list")
def list_() -> None:
    """List the storage plugins that are installed, and say which of them cannot be used."""
    table = Table("name", "distribution", "version")
    table.add_column("status", overflow="fold")
    for info in list_plugins():
        distributions = ", ".join(info.distributions)
        table.add_row(info.name, distributions, _versions(info), Text(_status(info)))
    Console().print(table)


def _versions(info: PluginInfo) -> str:
    found = []
    for name in info.distributions:
        try:
            found.append(version(name))
        except (PackageNotFoundError, ValueError):
            found.append("?")
    return ", ".join(found)


def _status(info: PluginInfo) -> str:
    try:
        load_plugin(info.name)
    except PluginError as exc:
        return f"broken: {exc.message}"
    return "ok"


@app.command()
def show(name: Name) -> None:
    """Show a plugin and the options of its table in a configuration."""
    plugin = load_plugin(name)
    console = Console()
    console.print(Text(f"{name}: {plugin.__module__}.{plugin.__qualname__}"))
    if plugin.__doc__:  # its own: what it inherits is the contract
        paragraphs = inspect.cleandoc(plugin.__doc__).split("\n\n")
        console.print(Text("\n\n".join(" ".join(p.split()) for p in paragraphs)))
    fields = msgspec.structs.fields(plugin.Options)
    if not fields:
        console.print("It has no options.")
        return
    docs = _field_docs(plugin.Options)
    table = Table()
    for title in ("option", "type", "default", "what it is"):
        table.add_column(title, overflow="fold")
    for field in fields:
        table.add_row(
            Text(field.encode_name),
            Text(_type_text(field.type)),
            Text(_default_text(field)),
            Text(docs.get(field.name, "")),
        )
    console.print(table)


def _field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The docstrings under the fields of `struct` and its bases, where the source is there."""
    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls is msgspec.Struct or not issubclass(cls, msgspec.Struct):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        lines = body.body if isinstance(body, ast.ClassDef) else []
        for field, doc in pairwise(lines):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match doc:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docs[field.target.id] = " ".join(text.split())
    return docs


def _type_text(kind: Any) -> str:
    """`kind` as people write it: `int >= 1`, `int | str`, `block | drop`."""
    meta = getattr(kind, "__metadata__", ())
    if meta:
        signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        bounds = [
            f"{sign} {bound}"
            for m in meta
            for name, sign in signs
            if (bound := getattr(m, name, None)) is not None
        ]
        return " ".join([_type_text(kind.__origin__), *bounds])
    if isinstance(kind, type) and get_origin(kind) is None:
        return "none" if kind is type(None) else kind.__name__
    args = [_type_text(a) if isinstance(a, type) else str(a) for a in get_args(kind)]
    if get_origin(kind) is dict:
        return f"table of {args[1]}"
    if get_origin(kind) in (tuple, list):
        return f"list of {args[0]}"
    return " | ".join(args) or str(kind)


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "(required)"
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if isinstance(value, Secret):
        return "(hidden)" if value else '""'
    return f'"{value}"' if isinstance(value, str) else str(value)


@app.command()
def conformance(
    name: Name,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the plugin; repeatable."),
    ] = None,
) -> None:
    """Run the conformance suite against a plugin. It writes to and deletes from the store that the
    options name: use an empty one. Exit code 1 when a check fails."""
    from kvstrata.backends.testing import run_conformance

    results = run_conformance(_factory(name, option or []))
    table = Table("check", "result")
    table.add_column("why", overflow="fold")
    for result in results:
        table.add_row(Text(result.name), "ok" if result.passed else "FAILED", Text(result.message))
    console = Console()
    console.print(table)
    failed = sum(not result.passed for result in results)
    console.print(f"{len(results) - failed} of {len(results)} checks passed", highlight=False)
    if failed or not results:
        raise typer.Exit(1)


def _factory(name: str, options: list[str]) -> Callable[[], StorageBackend]:
    plugin = load_plugin(name)
    table: dict[str, Any] = {}
    for text in options:
        where = Where(key=f"--option {text}")
        key, equals, value = text.partition("=")
        if not key.strip() or not equals:
            raise InputError("this is not an option", remedy="write KEY=VALUE", where=where)
        table[key.strip()] = parse_value(value.strip(), where)
    built = build_options(plugin, table, Where(key="--option"))
    return lambda: plugin(built)
