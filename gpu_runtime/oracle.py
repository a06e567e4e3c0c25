"""`OracleRunner`: a model whose KV is known, so that every byte that was moved can be checked.

The KV of a page is a pseudo-random function of (page key, component, layer, position): word i of a
page is `T[i] · m + b` mod 2^64, where T is a fixed random table over layer, K/V, position and lane,
and m (odd) and b come from SHA-256 of the page key and the component. Two pages, two positions of a
page, two layers or two components that were mixed up therefore differ.

A row that runs reads every attached page through ReqToToken, by position, with keys computed anew
from the tokens, and compares every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from kvstrata.gpu_runtime.base import ForwardContext, ForwardResult, ForwardRow
from kvstrata.gpu_runtime.pools import ComponentPool
from kvstrata.tiers.keys import page_keys, partial_key, root_key

KEY = 32
VERIFY_CHUNK_PAGES = 32
"""Pages that are generated and compared at a time: bounded scratch memory."""
FIRST_SAMPLED_TOKEN = 1 << 30
"""Sampled tokens lie above every prompt token of a trace, so that they collide with none."""


class OracleRunner:
    """Implements `ModelRunner`. One instance a runtime; used on its compute stream only."""

    def __init__(self) -> None:
        self._tables: dict[str, torch.Tensor] = {}
        self._key_cache: dict[int, tuple[tuple[int, bytes], int, bytes]] = {}
        """By slot: whose they are (generation and namespace), how many, the keys."""

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        verified = mismatched = 0
        sampled: list[list[int]] = []
        for row in rows:
            keys = self._keys(row, context.page_tokens)
            if row.first_in_batch and row.attached_pages:
                good, bad = self._verify(row, keys, context)
                verified, mismatched = verified + good + bad, mismatched + bad
            self._compute(row, keys, context)
            sampled.append([_sample(keys, row)] if row.samples else [])
        counters = {"pages_verified": verified, "pages_mismatched": mismatched}
        return ForwardResult(sampled, counters if verified else {})

    def _keys(self, row: ForwardRow, page_tokens: int) -> bytes:
        """Keys of the full pages up to the end of this step, from the tokens alone.

        Kept per row between steps and extended, since a decode would hash its prompt each step.
        """
        full = (row.start + row.count) // page_tokens
        mine = (row.generation, row.namespace)
        owner, known, keys = self._key_cache.get(row.slot, (mine, 0, b""))
        if owner != mine or row.first_in_batch or known > full:
            known, keys = 0, b""
        if full > known:
            tokens = row.tokens[known * page_tokens : full * page_tokens].data
            parent = keys[-KEY:] if keys else None
            keys += page_keys(row.namespace, tokens, page_tokens, parent)
        self._key_cache[row.slot] = (mine, full, keys)
        return keys

    def _verify(self, row: ForwardRow, keys: bytes, context: ForwardContext) -> tuple[int, int]:
        """Compare all attached pages, in all components; returns good and bad pages."""
        n, size = row.attached_pages, context.page_tokens
        if len(keys) < n * KEY:  # a wholly cached prompt: its last page ends with this step
            keys = page_keys(row.namespace, row.tokens[: n * size].data, size)
        bad = torch.zeros(n, dtype=torch.bool)
        for name, pool in context.pools.items():
            for first in range(0, n, VERIFY_CHUNK_PAGES):
                last = min(first + VERIFY_CHUNK_PAGES, n)
                slots = context.req_to_token.slots(name, row.slot, first * size, last * size)
                found = _read_positions(pool, slots)
                want = self._generate(name, pool, keys[first * KEY : last * KEY])
                bad[first:last] |= (found != want).flatten(1).any(1).cpu()
        wrong = int(bad.sum())
        return n - wrong, wrong

    def _compute(self, row: ForwardRow, keys: bytes, context: ForwardContext) -> None:
        """Write the KV of the step: whole pages, then the positions of a partial one."""
        size = context.page_tokens
        end = row.start + row.count
        first = row.start // size
        full = end // size
        for name, pool in context.pools.items():
            for a in range(first, full, VERIFY_CHUNK_PAGES):
                b = min(a + VERIFY_CHUNK_PAGES, full)
                slots = context.req_to_token.slots(name, row.slot, a * size, b * size)
                values = self._generate(name, pool, keys[a * KEY : b * KEY])
                _write_positions(pool, slots, values)
            if end % size:
                parent = keys[-KEY:] if keys else root_key(row.namespace)
                start = max(row.start, full * size)
                key = partial_key(parent, row.tokens[full * size : end].data)
                values = self._generate(name, pool, key)[
                    :, :, start - full * size : end - full * size
                ]
                slots = context.req_to_token.slots(name, row.slot, start, end)
                _write_positions(pool, slots, values)

    def _generate(self, component: str, pool: ComponentPool, keys: bytes) -> torch.Tensor:
        """KV of the pages with `keys`, as uint8 or int64 words [pages, planes, tokens, words]."""
        table = self._tables.get(component)
        if table is None:
            table = self._tables[component] = _table(component, pool)
        seeds = np.frombuffer(
            b"".join(
                hashlib.sha256(
                    b"oracle\0" + component.encode() + b"\0" + keys[i : i + KEY]
                ).digest()
                for i in range(0, len(keys), KEY)
            ),
            np.int64,
        ).reshape(-1, 4)
        factors = torch.from_numpy(seeds[:, 0] | 1).to(table.device)[:, None]
        offsets = torch.from_numpy(seeds[:, 1].copy()).to(table.device)[:, None]
        words = torch.addcmul(offsets, table[None, :], factors)
        spec = pool.spec
        shape = (len(seeds), spec.planes, pool.page_tokens, -1)
        per_token = spec.token_bytes
        if per_token % 8:
            raw = words.view(torch.uint8)[:, : pool.page_bytes]
            return raw.reshape(shape)
        return words.view(shape)


def _table(component: str, pool: ComponentPool) -> torch.Tensor:
    """T: int64 [ceil(page bytes / 8)], fixed for a component's name and geometry."""
    seed = hashlib.sha256(b"oracle-table\0" + component.encode()).digest()
    generator = np.random.Generator(np.random.Philox(int.from_bytes(seed[:16], "little")))
    count = -(-pool.page_bytes // 8)
    values = generator.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, count, np.int64)
    return torch.from_numpy(values).to(pool.data.device)


def _by_token(pool: ComponentPool) -> torch.Tensor:
    """The pool as [planes, token slots, words a token]; token slot = page · page_tokens + offset.

    Both layouts keep the bytes of a page together; the oracle's KV is defined on the bytes as they
    lie, so a "token" here is the n-th equal share of a page."""
    spec = pool.spec
    kind = torch.int64 if spec.token_bytes % 8 == 0 else torch.uint8
    data = pool.data.view(spec.planes, pool.pages * pool.page_tokens, spec.token_bytes)
    return data.view(kind)


def _read_positions(pool: ComponentPool, slots: torch.Tensor) -> torch.Tensor:
    """KV at token slots, as [pages, planes, tokens, words]."""
    found = _by_token(pool).index_select(1, slots)
    planes, _, words = found.shape
    return found.view(planes, -1, pool.page_tokens, words).transpose(0, 1)


def _write_positions(pool: ComponentPool, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write [pages, planes, tokens, words] to token slots."""
    flat = values.transpose(0, 1).flatten(1, 2)
    _by_token(pool).index_copy_(1, slots.to(torch.int64), flat)


def _sample(keys: bytes, row: ForwardRow) -> int:
    """A token that depends on the whole prefix and the position."""
    position = row.start + row.count
    tail = row.tokens[max(0, position - 16) : position].tobytes()
    digest = hashlib.sha256(keys[-KEY:] + tail + position.to_bytes(4, "little")).digest()
    return FIRST_SAMPLED_TOKEN + int.from_bytes(digest[:3], "little")
