"""Load a configuration: read, convert, let the plugins check their options, check the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.configs.checks import check, check_admin
from kvstrata.configs.convert import convert, nearest
from kvstrata.configs.read import Table, read_config, take_from_environment
from kvstrata.configs.schema import NAME_PATTERN, SECTIONS, AdminConfig, BackendConfig, Config
from kvstrata.configs.source import ConfigSource, Keys
from kvstrata.errors import ConfigError, PluginError

_REQUIRED = ("namespace", "pools")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path`, with `--set` texts such as `pools.page_tokens=256` applied.

    Reads the file, the environment variables that it names, and imports the storage plugins that
    it names; allocates nothing and touches no storage. Raises ConfigError or PluginError with the
    file, the line, what is wrong and what to do.
    """
    table, source = read_config(Path(path), overrides)
    for name in table:
        if name != "backends" and name not in SECTIONS:
            raise ConfigError(
                "there is no such section",
                remedy=nearest(name, [*SECTIONS, "backends"]),
                where=source.where((name,)),
            )
    for name in _REQUIRED:
        if name not in table:
            raise ConfigError(
                f"the section [{name}] is missing",
                remedy="configs/local.toml shows a complete file",
                where=source.where(()),
            )
    _need_tables(table, source)
    source = _resolve_salt(table, source)
    sections: dict[str, Any] = {
        name: convert(table.get(name, {}), kind, (name,), source) for name, kind in SECTIONS.items()
    }
    backends, source = _backends(table.get("backends", {}), source)
    identity = sections.pop("namespace")
    config = Config(identity=identity, backends=backends, source=source, **sections)
    check(config)
    return config


def load_admin(path: str | Path, overrides: Sequence[str] = ()) -> tuple[AdminConfig, ConfigSource]:
    """`[admin]` alone, for who only wants to reach the process that serves: the rest is that one's
    business, and it has the memory, so it is not checked. Raises ConfigError."""
    table, source = read_config(Path(path), overrides)
    _need_tables({name: value for name, value in table.items() if name == "admin"}, source)
    admin = convert(table.get("admin", {}), AdminConfig, ("admin",), source)
    check_admin(admin, source)
    return admin, source


def _need_tables(table: Table, source: ConfigSource) -> None:
    for name, value in table.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"{name} is a section, not a value",
                remedy=f"write [{name}] on a line of its own, and its settings below",
                where=source.where((name,)),
            )


def _resolve_salt(table: Table, source: ConfigSource) -> ConfigSource:
    """Take `namespace.salt` from the environment where `salt_env` says so."""
    section = table["namespace"]
    variable = section.get("salt_env", "")
    if variable != "":
        keys: Keys = ("namespace", "salt_env")
        if "salt" in section:
            raise ConfigError(
                "salt and salt_env are both given", remedy="keep one", where=source.where(keys)
            )
        section["salt"] = take_from_environment(variable, keys, source)
    return replace(source, secrets=source.secrets | {("namespace", "salt")})


def _backends(tables: Table, source: ConfigSource) -> tuple[dict[str, BackendConfig], ConfigSource]:
    backends: dict[str, BackendConfig] = {}
    for name, table in tables.items():
        base: Keys = ("backends", name)
        if re.fullmatch(NAME_PATTERN, name) is None:
            raise ConfigError(
                f'"{name}" is not a name for a backend',
                remedy="use up to 64 letters, digits, - and _",
                where=source.where(base),
            )
        backend = convert(table, BackendConfig, base, source)
        options, secrets = _options(backend, base, source)
        source = replace(source, secrets=source.secrets | secrets)
        backends[name] = msgspec.structs.replace(backend, options=options)
    return backends, source


def _options(
    backend: BackendConfig, base: Keys, source: ConfigSource
) -> tuple[msgspec.Struct, frozenset[Keys]]:
    """The plugin's validated options, and the paths of those that came from the environment."""
    from kvstrata.backends.registry import load_plugin

    try:
        plugin = load_plugin(backend.plugin)
    except PluginError as exc:
        raise PluginError(
            exc.message, remedy=exc.remedy, where=source.where((*base, "plugin"))
        ) from exc
    at: Keys = (*base, "options")
    options = backend.options
    secrets: dict[Keys, str] = {}
    if isinstance(options, dict):
        options = dict(options)
        for key, value in options.items():
            if isinstance(value, dict) and set(value) == {"env"}:
                options[key] = take_from_environment(value["env"], (*at, key), source)
                secrets[*at, key] = options[key]
    hint = f"see: kvstrata backends show {backend.plugin}"
    try:
        return convert(options, plugin.Options, at, source, hint), frozenset(secrets)
    except ConfigError as exc:
        message = exc.message
        for value in secrets.values():
            message = message.replace(value, "(hidden)") if value else message
        raise ConfigError(message, remedy=exc.remedy, where=exc.where) from None
