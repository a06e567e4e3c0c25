"""Backends by name: the entry-point group `kvstrata.backends`.

    [project.entry-points."kvstrata.backends"]
    mystore = "my_package:MyBackend"

A plugin is imported only when it is asked for, checked before it is used, and named with its
distribution in every error.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from kvstrata.backends.base import SUPPORTED_VERSIONS, Isolation, StorageBackend
from kvstrata.errors import ConfigError, PluginError, Where

GROUP = "kvstrata.backends"
OWN_DISTRIBUTION = "kvstrata"

_BUILT_IN = {
    "memory": "kvstrata.backends.memory:MemoryBackend",
    "filesystem": "kvstrata.backends.filesystem:FilesystemBackend",
    "mooncake": "kvstrata.backends.mooncake:MooncakeBackend",
}
"""Of this distribution, also when it runs from a checkout, without metadata."""


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A backend that could be loaded; nothing of it has been imported."""

    name: str
    target: str
    """`module:attribute`."""
    distributions: tuple[str, ...]
    """Who claims the name. More than one: the name is refused."""


def list_plugins() -> list[PluginInfo]:
    """All known backends, by name."""
    found: dict[str, dict[str, str]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, {})[_distribution(point)] = point.value
    for name, target in _BUILT_IN.items():
        found.setdefault(name, {})[OWN_DISTRIBUTION] = target
    return [
        PluginInfo(name, next(iter(by_distribution.values())), tuple(sorted(by_distribution)))
        for name, by_distribution in sorted(found.items())
    ]


def load_plugin(name: str) -> type[StorageBackend]:
    """Import and check the backend `name`.

    Raises `PluginError` when there is none, when two distributions claim the name, when its import
    raises anything, or when it does not keep the contract of `StorageBackend`.
    """
    plugins = {info.name: info for info in list_plugins()}
    info = plugins.get(name)
    if info is None:
        raise PluginError(
            f"there is no backend {name!r}",
            remedy=f"use one of {', '.join(plugins)}, or install the distribution that has it",
        )
    if len(info.distributions) > 1:
        raise PluginError(
            f"backend {name!r} is claimed by the distributions "
            f"{' and '.join(repr(d) for d in info.distributions)}",
            remedy="uninstall all but one of them",
        )
    title = f"backend {name!r} of distribution {info.distributions[0]!r}"
    return _checked(title, _import(title, info.target))


def build_options(
    cls: type[StorageBackend], table: dict[str, Any], where: Where | None = None
) -> msgspec.Struct:
    """The options of `cls` from its table in a config file.

    Raises `ConfigError` that names the key: unknown, missing, of a wrong type or impossible.
    """
    try:
        return msgspec.convert(table, cls.Options)
    except (msgspec.ValidationError, ValueError) as error:
        message = str(error)
    where = where or Where()
    text, _, path = message.partition(" - at `$")
    key = path.strip("`.")
    if not key and (field := _named_field(text)):
        key, text = field, "it is missing" if "missing" in text else "there is no such option"
    if key:
        key = f"{where.key}.{key}" if where.key else key
        where = Where(where.file, where.line, key)
    known = ", ".join(field.encode_name for field in msgspec.structs.fields(cls.Options))
    raise ConfigError(
        text, remedy=f"the options of {cls.__name__} are: {known or 'none'}", where=where
    )


def _named_field(message: str) -> str:
    """The field in msgspec's "Object contains unknown field `x`" and the like."""
    if message.startswith("Object ") and message.count("`") == 2:
        return message.split("`")[1]
    return ""


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "(unknown)"


def _import(title: str, target: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything, SystemExit included
        raise PluginError(
            f"{title} cannot be imported from {target!r}: {type(error).__name__}: {error}",
            remedy="repair or reinstall the distribution, or choose another backend",
        ) from error
    return found


def _checked(title: str, found: object) -> type[StorageBackend]:
    def refuse(message: str, remedy: str = "the plugin needs a fix") -> PluginError:
        return PluginError(f"{title} {message}", remedy=remedy)

    if not (isinstance(found, type) and issubclass(found, StorageBackend)):
        raise refuse(f"is {found!r}, not a subclass of kvstrata.backends.StorageBackend")
    version = found.api_version
    if version not in SUPPORTED_VERSIONS:
        raise refuse(
            f"is written for version {version} of the storage contract; "
            f"supported are {' and '.join(map(str, SUPPORTED_VERSIONS))}",
            "install a version of the plugin for this contract",
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise refuse(f"does not implement {missing}")
    if not isinstance(found.isolation, Isolation):
        raise refuse(f"has isolation {found.isolation!r}, not a member of Isolation")
    options = found.Options
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise refuse("has Options that are not a msgspec.Struct")
    if not options.__struct_config__.forbid_unknown_fields:
        raise refuse("has Options without forbid_unknown_fields=True")
    return found
