"""Page keys: one function, cryptographic, the same everywhere."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import InputError
from kvstrata.tiers import keys
from kvstrata.tiers.keys import KeyChain, page_keys, partial_key, root_key, token_view

SPACE = hashlib.sha256(b"space").digest()
OTHER = hashlib.sha256(b"other").digest()
tokens_strategy = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


def int32(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def reference(namespace: bytes, tokens: bytes, page_tokens: int) -> bytes:
    """The definition, in other words."""
    key = hashlib.sha256(b"kvstrata/root/1\0" + namespace).digest()
    out = b""
    for at in range(0, len(tokens) // (4 * page_tokens) * 4 * page_tokens, 4 * page_tokens):
        page = tokens[at : at + 4 * page_tokens]
        key = hashlib.sha256(b"kvstrata/page/1\0" + key + page).digest()
        out += key
    return out


@given(tokens_strategy, st.integers(1, 9))
def test_definition(tokens: list[int], page_tokens: int) -> None:
    data = int32(tokens)
    assert page_keys(SPACE, data, page_tokens) == reference(SPACE, data, page_tokens)


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 495, 496, 497, 512, 992, 1000, 4096])
def test_long_pages(page_tokens: int) -> None:
    """Pages that are hashed in pieces have the keys of their definition."""
    data = array("i", range(page_tokens * 3 + 1)).tobytes()
    assert page_keys(SPACE, data, page_tokens) == reference(SPACE, data, page_tokens)


def test_keys_are_pinned() -> None:
    """What is on disk stays valid."""
    key = page_keys(bytes(32), int32([1, 2, 3, 4]), 4)
    assert key.hex() == "0096946b7f127b050ce354d313ec2422edf6f8cdc6089bdd6d09e0c429239592"


def test_same_in_every_process() -> None:
    """B020: three fresh interpreters with different hash seeds derive the same keys."""
    code = (
        "import sys; from kvstrata.tiers.keys import page_keys; from array import array;"
        "sys.stdout.write(page_keys(bytes(32), array('i', range(1000)), 64).hex())"
    )
    source = str(Path(__file__).parents[2] / "src")
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert found == {page_keys(bytes(32), array("i", range(1000)), 64).hex()}


def test_one_key_for_put_and_exists_on_every_rank() -> None:
    """B021: control and the side that stores derive a rank's keys by one function, however the
    tokens arrive there; another rank's are different."""
    ranks = [hashlib.sha256(bytes([rank])).digest() for rank in range(4)]
    tokens = array("i", range(256))
    put = [page_keys(rank, tokens.tobytes(), 64) for rank in ranks]
    exists = [KeyChain(rank, 64, tokens).run().keys for rank in ranks]
    assert put == exists
    assert len(set(put)) == 4


def test_storage_may_come_late() -> None:
    """B023: the chain does not restart. 4 pages, then storage is attached, then 2 more: the keys
    are those of a run that had storage from the beginning."""
    tokens = array("i", range(6 * 16))
    early = KeyChain(SPACE, 16, tokens)
    late = KeyChain(SPACE, 16, tokens[: 4 * 16])
    first = late.run()
    late.extend(tokens[4 * 16 :])
    assert late.run() == early.run()
    assert late.run(0, 4) == first
    assert late.run(4) == early.run(4)
    assert late.run(4).parent == first.key(3)
    assert page_keys(SPACE, tokens[4 * 16 :], 16, parent=first.key(3)) == late.run(4).keys


def test_digest_is_long_and_cryptographic() -> None:
    """B024, B019: SHA-256, never shortened; equal keys are equal content."""
    key = page_keys(SPACE, int32([7] * 64), 64)
    assert len(key) * 8 == 256
    page = b"kvstrata/page/1\0" + root_key(SPACE) + int32([7] * 64)
    assert key == hashlib.sha256(page).digest()


def test_no_two_of_many_are_equal() -> None:
    """B019: 100,000 pages that differ in one token, in 16 bits of it above all: no equal key, nor
    equal first 128 bits."""
    tokens = array("i", ((i << 16) | 0x1234 for i in range(-32768, 32768)))
    tokens.extend(range(-1, -1 - (100_000 - len(tokens)), -1))
    assert len(set(tokens)) == 100_000
    root = root_key(SPACE)
    found = {page_keys(SPACE, tokens[i : i + 1], 1, parent=root)[:16] for i in range(len(tokens))}
    assert len(found) == 100_000


def test_position_and_history_are_in_the_key() -> None:
    """The same page elsewhere, or after something else, is another page."""
    page, other = list(range(4)), list(range(4, 8))
    found = [
        page_keys(SPACE, int32(tokens), 4)[-32:]
        for tokens in (page, page + page, other + page, other + other + page)
    ]
    assert len(set(found)) == 4


def test_domains_are_apart() -> None:
    """No root is a page, no page is a part of one, no fingerprint is a key."""
    tokens = int32(list(range(8)))
    full = page_keys(SPACE, tokens, 8)
    part = partial_key(root_key(SPACE), tokens)
    prefix = hashlib.sha256(SPACE + tokens).digest()
    assert len({full, part, root_key(SPACE), SPACE, prefix}) == 5
    assert page_keys(SPACE, tokens, 4) != page_keys(SPACE, tokens, 8)
    assert page_keys(SPACE, tokens, 8) != page_keys(OTHER, tokens, 8)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


def test_every_int32_buffer_is_the_same() -> None:
    raw = array("i", range(-5, 27)).tobytes()
    given_as = [
        raw,
        bytearray(raw),
        memoryview(raw),
        array("i", range(-5, 27)),
        memoryview(array("i", range(-5, 27))),
        np.arange(-5, 27, dtype=np.int32),
        np.arange(-5, 27, dtype="<i4"),
        np.arange(-6, 30, dtype=np.int32)[1:33],
    ]
    found = [page_keys(SPACE, tokens, 8) for tokens in given_as]
    assert len(found[0]) == 4 * 32
    assert set(found) == {found[0]}


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(8),
        np.arange(8, dtype=">i4"),
        np.arange(8, dtype=np.uint32),
        np.arange(8, dtype=np.float32),
        np.arange(8, dtype=np.int16),
        np.arange(16, dtype=np.int32)[::2],
        np.arange(16, dtype=np.int32).reshape(4, 4),
        np.array(3, dtype=np.int32),
        array("q", range(8)),
        array("h", range(8)),
        b"\0" * 7,
    ],
    ids=str,
)
def test_anything_else_is_refused(tokens: bytes) -> None:
    """int64 ids, the default of most libraries, would hash to other keys without a word."""
    with pytest.raises(InputError, match="tokens"):
        page_keys(SPACE, tokens, 4)


@pytest.mark.parametrize("page_tokens", [0, -1])
def test_page_size_is_checked(page_tokens: int) -> None:
    with pytest.raises(InputError, match="page_tokens"):
        page_keys(SPACE, b"", page_tokens)


def test_no_tokens_no_pages() -> None:
    assert page_keys(SPACE, b"", 4) == b""
    assert page_keys(SPACE, np.array([], dtype=np.int32), 4) == b""
    assert page_keys(SPACE, int32([1, 2, 3]), 4) == b""


def test_nothing_is_copied() -> None:
    data = bytearray(16)
    view = token_view(data)
    data[0] = 9
    assert view[0] == 9


class Recorder:
    """A digest that notes how much it is given at once."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, data: bytes = b"") -> None:
        self.digests = hashlib.sha256(data)

    def copy(self) -> Recorder:
        other = Recorder()
        other.digests = self.digests.copy()
        return other

    def update(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self.digests.update(data)

    def digest(self) -> bytes:
        return self.digests.digest()


@pytest.mark.parametrize("page_tokens", [64, 495, 496, 497, 511, 512, 4096])
def test_long_pages_keep_the_gil(monkeypatch: pytest.MonkeyPatch, page_tokens: int) -> None:
    """hashlib gives the GIL away from 2048 bytes on, to hash for a microsecond; beside a busy
    thread it costs 5 ms to get it back (31 ms for 50 pages of 512 tokens, instead of 0.2)."""
    tokens = array("i", range(page_tokens * 2))
    expected = page_keys(SPACE, tokens, page_tokens)
    Recorder.sizes.clear()
    monkeypatch.setattr(keys, "hashlib", SimpleNamespace(sha256=Recorder))
    assert page_keys(SPACE, tokens, page_tokens) == expected
    assert max(Recorder.sizes) < 2048
    assert sum(Recorder.sizes) == 2 * (32 + 4 * page_tokens)


# ── chains ───────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(tokens_strategy, max_size=6), st.integers(1, 9))
def test_a_chain_is_the_keys_of_all_its_tokens(pieces: list[list[int]], page_tokens: int) -> None:
    chain = KeyChain(SPACE, page_tokens)
    data = b""
    for piece in pieces:
        before = chain.page_count
        count = chain.extend(int32(piece))
        chain.check_integrity()
        data += int32(piece)
        assert count == chain.page_count - before
        assert chain.keys == page_keys(SPACE, data, page_tokens)
        assert chain.token_count == len(data) // 4
    tail = data[chain.page_count * page_tokens * 4 :]
    assert chain.partial_key() == (partial_key(chain.last_key, tail) if tail else None)


def test_runs_of_a_chain() -> None:
    chain = KeyChain(SPACE, 2, int32(list(range(9))))
    whole = chain.run()
    assert (whole.namespace, whole.parent, whole.first_page_index) == (SPACE, root_key(SPACE), 0)
    assert whole.page_count == 4
    assert chain.run(1, 3) == whole.slice(1, 3)
    assert chain.run(4).page_count == 0
    with pytest.raises(IndexError):
        chain.run(2, 5)
