"""From a file and overrides to plain tables, with the origin of every setting."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from kvstrata.configs.locate import locate, parse_key
from kvstrata.configs.source import ConfigSource, Keys, dotted
from kvstrata.errors import ConfigError, Where

MAX_FILE_BYTES = 1 << 20
"""A configuration is a page of text; more than this is another kind of file."""
MOST_NAMES = 12
"""That are offered in place of a file which is not there."""

Table = dict[str, Any]
_PARSER_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def read_config(path: Path, overrides: Sequence[str]) -> tuple[Table, ConfigSource]:
    """The tables of `path` with `overrides` in them. Raises ConfigError; checks no setting."""
    text = _read_text(path)
    table = _parse(path, text)
    source = ConfigSource(file=path, lines=locate(text))
    texts: dict[Keys, str] = {}
    for override in overrides:
        keys, value = _parse_override(override)
        _set(table, keys, value, override)
        texts[keys] = override
    return table, replace(source, overrides=texts, given=frozenset([*source.lines, *texts]))


def take_from_environment(variable: object, keys: Keys, source: ConfigSource) -> str:
    """The value of the environment variable that the setting at `keys` names."""
    if not isinstance(variable, str) or not variable:
        raise ConfigError(
            f"{variable!r} is not the name of an environment variable",
            remedy='write a name in quotes, such as "KVSTRATA_SALT"',
            where=source.where(keys),
        )
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(
            f"the environment variable {variable} is not set",
            remedy=f"export {variable}, or remove the setting",
            where=source.where(keys),
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the value of the environment variable {variable} is not UTF-8",
            remedy="set it to text",
            where=source.where(keys),
        ) from None
    return value


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        _fail(path, None, "there is no such file", _others(path))
    except IsADirectoryError:
        _fail(path, None, "this is a directory", "name a TOML file, such as configs/local.toml")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        _fail(path, None, f"cannot be read: {reason}", "name a TOML file that you may read")
    if len(data) > MAX_FILE_BYTES:
        _fail(path, None, f"is larger than {MAX_FILE_BYTES} bytes", "name a TOML file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        _fail(path, line, f"byte 0x{data[exc.start]:02x} is not UTF-8", "save the file as UTF-8")


def _others(path: Path) -> str:
    """What to use instead of a file that is missing."""
    try:
        names = sorted(p.name for p in path.parent.glob("*.toml"))
    except OSError:
        names = []
    if not names:
        return "check the path; relative paths are relative to the working directory"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{path.parent}/ holds {', '.join(names[:MOST_NAMES])}{more}"


def _parse(path: Path, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        message = str(exc)
        line = None
        if (match := _PARSER_LINE.search(message)) is not None:
            line = int(match[1]) if match[1] else text.rstrip("\n").count("\n") + 1
            message = message[: match.start()]
        _fail(path, line, f"not TOML: {message}", "see https://toml.io for the syntax")
    except RecursionError:
        _fail(path, None, "not a configuration: nested too deeply", "remove the nesting")
    except ValueError as exc:  # numbers with more digits than int() takes
        _fail(path, None, f"not TOML: {exc}", "write a smaller number")


def _fail(path: Path, line: int | None, message: str, remedy: str) -> NoReturn:
    raise ConfigError(message, remedy=remedy, where=Where(path, line)) from None


# ── overrides ────────────────────────────────────────────────────────────────────────────────────


def _parse_override(override: str) -> tuple[Keys, Any]:
    """`section.key=value`: the value is TOML, or a bare string when it is not."""
    where = Where(key=f"--set {override}")
    left, equals, right = override.partition("=")
    keys = parse_key(left.strip())
    if not equals or keys is None or len(keys) < 2:
        raise ConfigError(
            "this is not an override",
            remedy="write section.key=value, such as --set pools.page_tokens=256",
            where=where,
        )
    keys = tuple(int(k) if isinstance(k, str) and k.isdecimal() else k for k in keys)
    return keys, parse_value(right.strip(), where)


def parse_value(text: str, where: Where) -> Any:
    """A value in TOML's syntax; what is none, and opens no quote or bracket, is a bare string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        if text[:1] in ("[", "{", '"', "'") or "\n" in text:
            raise ConfigError(
                "the value is not TOML", remedy="close its quotes and brackets", where=where
            ) from None
        return text
    if len(table) != 1:
        raise ConfigError("this is more than one value", remedy="repeat --set", where=where)
    return table["value"]


def _set(table: Table, keys: Keys, value: Any, override: str) -> None:
    """Put `value` at `keys`; tables on the way are made, list elements must be there."""
    here: Any = table
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list) and isinstance(key, int) and key < len(here):
            if last:
                here[key] = value
            else:
                here = here[key]
        elif isinstance(here, dict):
            if last:
                here[str(key)] = value
            else:
                here = here.setdefault(str(key), {})
        else:
            kind = f"a list of {len(here)}" if isinstance(here, list) else "a value, not a table"
            raise ConfigError(
                f"{dotted(keys[:depth])} is {kind}",
                remedy="name a setting, or an element by its index from 0",
                where=Where(key=f"--set {override}"),
            )
