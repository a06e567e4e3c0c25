"""From plain tables to the structs of `schema`; the first thing that is wrong is a ConfigError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from kvstrata.configs.schema import ByteSize, Secret
from kvstrata.configs.source import ConfigSource, Keys
from kvstrata.errors import ConfigError, Where
from kvstrata.units import parse_size

T = TypeVar("T")

_PLACE = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$")
_MISSING = re.compile(r"Object missing required field `(.*)`$")


def convert(value: Any, kind: type[T], base: Keys, source: ConfigSource, help_text: str = "") -> T:
    """`value`, found at `base`, as `kind`. `help_text` is the remedy where none is better."""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode)
    except msgspec.ValidationError as exc:
        message, inner = _split_place(str(exc))
        found = _Finding(message, value, kind, inner)
        raise _explain(found, source.where((*base, *found.keys)), help_text) from None


def nearest(word: str, known: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    """A remedy for an unknown `word`: the name that was meant, or all there are."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}? known: {', '.join(names)}"
    return f"known: {', '.join(names)}" if names else "remove it"


def _decode(kind: type, value: object) -> object:
    if kind is ByteSize:
        if isinstance(value, str):
            value = parse_size(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError('Expected a size in bytes, such as "64MiB"')
        if not 0 < value <= 2**62:
            raise ValueError("Expected a size above 0")
        return ByteSize(value)
    if kind is Secret:
        if not isinstance(value, str):
            raise ValueError("Expected a string")
        return Secret(value)
    raise NotImplementedError(f"no decoder for {kind}")


@dataclass(frozen=True, slots=True)
class _Finding:
    """What msgspec found wrong with `value`: its message, and the path below the value."""

    message: str
    value: Any
    kind: Any
    inner: Keys

    @property
    def keys(self) -> Keys:
        """The path to blame: of an unknown setting its own, not that of its table."""
        match = _UNKNOWN.match(self.message)
        return (*self.inner, match[1]) if match else self.inner


def _explain(found: _Finding, where: Where, help_text: str) -> ConfigError:
    fields = _fields_at(found.kind, found.inner)
    if (match := _UNKNOWN.match(found.message)) is not None:
        remedy = nearest(match[1], list(fields))
        return ConfigError("there is no such setting", remedy=remedy, where=where)
    if (match := _MISSING.match(found.message)) is not None:
        return ConfigError(
            f"the setting {match[1]} is missing",
            remedy=help_text or f"add a line {match[1]} = …",
            where=where,
        )
    message = found.message[:1].lower() + found.message[1:].replace("`", "")
    return ConfigError(
        _shown(found.value, found.kind, found.inner) + message,
        remedy=_default_remedy(found.kind, found.inner) or help_text or "change the value",
        where=where,
    )


def _split_place(text: str) -> tuple[str, Keys]:
    """Take the trailing path off one of msgspec's messages."""
    match = _PLACE.search(text)
    if match is None:
        return text, ()
    steps = _STEP.findall(match[1])
    inner: Keys = tuple(name or (int(index) if index.isdigit() else index) for name, index in steps)
    return text[: match.start()], inner


def _fields_at(kind: Any, inner: Keys) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of the struct at the path `inner` below `kind`; none if it is no struct."""
    for step in inner:
        if isinstance(step, str) and (field := _fields_of(kind).get(step)) is not None:
            kind = field.type
        else:
            args = get_args(_plain(kind))
            kind = args[0] if args else None
    return _fields_of(kind)


def _fields_of(kind: Any) -> dict[str, msgspec.structs.FieldInfo]:
    kind = _plain(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {f.encode_name: f for f in msgspec.structs.fields(kind)}
    return {}


def _plain(kind: Any) -> Any:
    """`kind` without `Annotated`."""
    return getattr(kind, "__origin__", kind) if get_origin(kind) is not tuple else kind


def _shown(value: Any, kind: Any, inner: Keys) -> str:
    """The offending value for the message; nothing for a secret, a table or a long text."""
    if inner and isinstance(inner[-1], str):
        field = _fields_at(kind, inner[:-1]).get(inner[-1])
        if field is not None and field.type is Secret:
            return ""
    try:
        for step in inner:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return ""
    if isinstance(value, (dict, list)):
        return ""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return f"{text}: " if len(text) <= 80 else ""


def _default_remedy(kind: Any, inner: Keys) -> str:
    if not inner or not isinstance(inner[-1], str):
        return ""
    field = _fields_at(kind, inner[:-1]).get(inner[-1])
    if field is None or isinstance(field.default, (msgspec.UnsetType, type(msgspec.NODEFAULT))):
        return ""
    default = field.default
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    return f"the default is {shown}"
