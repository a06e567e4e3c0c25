"""The locator: the line of every key, whatever the TOML looks like."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.configs.locate import locate, parse_key

DOCUMENT = '''\
# a comment with = and [brackets]
top = 1
"quoted key" = "a # no comment" # a comment
'literal.key' = 'x'
[a]            # a table
b.c = 2
b."d.e" = 3
text = """
[not.a.table]
no = "key"
quotes "" and \\""" inside""""
after = 4
raw = \'\'\'
[nor] = this
\'\'\'
list = [
  1,   # one
  [2, 3],
  { x = 1, "y z" = [ {w = 2} ] },
]
inline = { p = { q = 1 }, r = "}" }
[ a . "sub table" ]
k = 1979-05-27 07:32:00
[[arr]]
n = 1
[[arr]]
n = 2
[arr.inner]
m = 3
[[arr.deep]]
o = 4
[[arr.deep]]
o = 5
[last]
end = true'''


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("top",), 2),
        (("quoted key",), 3),
        (("literal.key",), 4),
        (("a",), 5),
        (("a", "b"), 6),
        (("a", "b", "c"), 6),
        (("a", "b", "d.e"), 7),
        (("a", "text"), 8),
        (("a", "after"), 12),
        (("a", "raw"), 13),
        (("a", "list"), 16),
        (("a", "list", 0), 17),
        (("a", "list", 1, 1), 18),
        (("a", "list", 2, "y z"), 19),
        (("a", "list", 2, "y z", 0, "w"), 19),
        (("a", "inline", "p", "q"), 21),
        (("a", "inline", "r"), 21),
        (("a", "sub table"), 22),
        (("a", "sub table", "k"), 23),
        (("arr", 0, "n"), 25),
        (("arr", 1), 26),
        (("arr", 1, "n"), 27),
        (("arr", 1, "inner", "m"), 29),
        (("arr", 1, "deep", 0, "o"), 31),
        (("arr", 1, "deep", 1, "o"), 33),
        (("last", "end"), 35),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_of_each_key(keys: tuple[str | int, ...], line: int, newline: str) -> None:
    lines = locate(DOCUMENT.replace("\n", newline))
    assert lines[keys] == line


def test_text_inside_strings_is_no_key() -> None:
    keys = {k for path in locate(DOCUMENT) for k in path}
    assert keys.isdisjoint({"not", "no", "nor"})


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _paths(inner, (*path, i))


def test_every_key_of_a_document_is_found() -> None:
    found = set(locate(DOCUMENT))
    assert set(_paths(tomllib.loads(DOCUMENT))) <= found


_KEYS = st.from_regex(r"[A-Za-z0-9_\-]{1,6}", fullmatch=True)
_STRINGS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)


def _basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _multi(text: str) -> str:
    return '"""\n[x]\ny = 1\n' + text.replace("\\", "\\\\").replace('"""', '""\\"') + ' """'


_SCALARS = st.one_of(
    st.integers(-9, 9).map(str),
    st.booleans().map(lambda b: str(b).lower()),
    st.floats(0, 9).map(lambda f: f"{f:.3f}"),
    _STRINGS.map(_basic),
    _STRINGS.filter(lambda s: not s.endswith('"')).map(_multi),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda v: "[\n " + ",\n # c ]\n ".join(v) + "\n]"),
        st.dictionaries(_KEYS, inner, max_size=3).map(
            lambda d: "{ " + ", ".join(f"{k} = {v}" for k, v in d.items()) + " }"
        ),
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.lists(_KEYS, min_size=1, max_size=2).map(".".join),
        st.dictionaries(_KEYS, _VALUES, max_size=4),
        max_size=4,
    )
)
def test_whatever_tomllib_reads_is_located(tables: dict[str, dict[str, str]]) -> None:
    text = ""
    for header, pairs in tables.items():
        text += f"[{header}] # a table\n" + "".join(f"{k} = {v}\n" for k, v in pairs.items())
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a key of one table is another table, or a newline in { }
        return
    lines = locate(text)
    source = text.split("\n")
    for path in _paths(document):
        line = source[lines[path] - 1]
        if isinstance(path[-1], str):
            assert path[-1] in line


@given(st.text(st.sampled_from("[]{}=.,#\"'\\\n ab1"), max_size=40))
def test_nonsense_ends(text: str) -> None:
    locate(text)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a.b", ("a", "b")),
        ('a."b.c".d', ("a", "b.c", "d")),
        (" a . 'b' ", ("a", "b")),
        ("a.", None),
        ("", None),
        ("a b", None),
        ('"a', None),
        ('"\\q"', None),
    ],
)
def test_parse_key(text: str, keys: tuple[str, ...] | None) -> None:
    assert parse_key(text) == keys
