"""Where a setting came from: the file, its line, or an override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.errors import Where

Keys = tuple[str | int, ...]
"""The path of a setting: keys of tables, and indexes of arrays."""


def dotted(keys: Keys) -> str:
    """`pools.components[0].head_dim`."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The origin of every setting of one configuration."""

    file: Path | None = None
    lines: Mapping[Keys, int] = field(default_factory=dict)
    """Line (from 1) of each table and key in the file."""
    overrides: Mapping[Keys, str] = field(default_factory=dict)
    """The `--set` text that gave a setting, by its path."""
    secrets: frozenset[Keys] = frozenset()
    """Settings whose value must not be shown."""
    given: frozenset[Keys] = frozenset()
    """Settings that the file or an override gave; the rest are defaults."""

    def where(self, keys: Keys) -> Where:
        """The place of a setting. One that is not given: its nearest table."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.overrides:
                return Where(key=f"--set {dotted(keys)}")
            if keys[:end] in self.lines:
                return Where(self.file, self.lines[keys[:end]], dotted(keys))
            for given in self.overrides:
                if given[:end] == keys[:end]:
                    return Where(key=f"--set {dotted(given)}")
        return Where(self.file, None, dotted(keys) or None)
