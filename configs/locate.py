"""Find the line of every key of a TOML text, which `tomllib` does not tell.

`locate` is for a text that `tomllib` has accepted: it follows the structure (tables, arrays of
tables, dotted and quoted keys, inline tables, arrays, all kinds of strings, comments) and checks
nothing. On a text that is not TOML it stops where it is lost, and never loops.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress

from kvstrata.configs.source import Keys

_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_\-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_MULTI_BASIC = re.compile(r'"""(?:"{0,2}(?:\\.|[^"\\]))*"{3,5}', re.DOTALL)
_MULTI_LITERAL = re.compile(r"'''(?:'{0,2}[^'])*'{3,5}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]+")
_STRINGS = (_MULTI_BASIC, _MULTI_LITERAL, _BASIC, _LITERAL)


class _LostError(Exception):
    """The text is not what it should be here."""


def locate(text: str) -> dict[Keys, int]:
    """The line (from 1) of each key and table header of `text`, by path."""
    scanner = _Scanner(text)
    with suppress(_LostError, RecursionError):
        scanner.document()
    return scanner.lines


def parse_key(text: str) -> Keys | None:
    """The parts of a dotted key such as `backends."my disk".options.path`; None if it is none."""
    scanner = _Scanner(text)
    try:
        keys = scanner.key()
    except _LostError:
        return None
    return keys if scanner.at == len(text) else None


class _Scanner:
    """One pass over the text; `at` is the position, `lines` what was found."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Keys, int] = {}
        self._arrays: dict[Keys, int] = {}
        self._counted_to = 0
        self._line = 1

    def document(self) -> None:
        table: Keys = ()
        while True:
            self._skip(_SPACE_AND_LINES)
            if self.at == len(self.text):
                return
            if self._takes("["):
                table = self._header()
            else:
                self._pair(table)

    def key(self) -> Keys:
        parts: list[str | int] = []
        while True:
            self._skip(_SPACE)
            parts.append(self._key_part())
            self._skip(_SPACE)
            if not self._takes("."):
                return tuple(parts)

    def _key_part(self) -> str:
        for pattern in (_BASIC, _LITERAL):
            if (match := pattern.match(self.text, self.at)) is not None:
                self.at = match.end()
                try:
                    value = tomllib.loads(f"k = {match[0]}")["k"]
                except tomllib.TOMLDecodeError:
                    raise _LostError from None
                return str(value)
        return self._need(_BARE_KEY)

    def _header(self) -> Keys:
        """`[a.b]` or `[[a.b]]`, after its first bracket: the path of the table it opens."""
        is_array = self._takes("[")
        line = self._line_here()
        keys = self._resolve(self.key())
        if not (self._takes("]") and (not is_array or self._takes("]"))):
            raise _LostError
        if is_array:
            index = self._arrays.get(keys, -1) + 1
            self._arrays[keys] = index
            self.lines.setdefault(keys, line)
            keys = (*keys, index)
        for end in range(1, len(keys) + 1):
            self.lines.setdefault(keys[:end], line)
        return keys

    def _resolve(self, keys: Keys) -> Keys:
        """A header's path with the index of the last element of each array of tables in it."""
        path: Keys = ()
        for i, key in enumerate(keys):
            path = (*path, key)
            if i < len(keys) - 1 and path in self._arrays:
                path = (*path, self._arrays[path])
        return path

    def _pair(self, table: Keys) -> None:
        line = self._line_here()
        keys = self.key()
        for end in range(1, len(keys) + 1):
            self.lines.setdefault((*table, *keys[:end]), line)
        if not self._takes("="):
            raise _LostError
        self._skip(_SPACE)
        self._value((*table, *keys))

    def _value(self, path: Keys) -> None:
        if self._takes("["):
            self._array(path)
        elif self._takes("{"):
            self._inline_table(path)
        else:
            for pattern in _STRINGS:
                if (match := pattern.match(self.text, self.at)) is not None:
                    self.at = match.end()
                    return
            self._need(_SCALAR)

    def _array(self, path: Keys) -> None:
        index = 0
        while True:
            self._skip(_SPACE_AND_LINES)
            if self._takes("]"):
                return
            self.lines.setdefault((*path, index), self._line_here())
            self._value((*path, index))
            index += 1
            self._skip(_SPACE_AND_LINES)
            if not self._takes(",") and not self.text.startswith("]", self.at):
                raise _LostError

    def _inline_table(self, path: Keys) -> None:
        while True:
            self._skip(_SPACE_AND_LINES)
            if self._takes("}"):
                return
            self._pair(path)
            self._skip(_SPACE_AND_LINES)
            if not self._takes(",") and not self.text.startswith("}", self.at):
                raise _LostError

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted_to, self.at)
        self._counted_to = self.at
        return self._line

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()

    def _need(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise _LostError
        self.at = match.end()
        return match[0]

    def _takes(self, literal: str) -> bool:
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True
