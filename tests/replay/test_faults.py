"""The proof can fail, and what storage damages is a miss: counted, mended, never a wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.configs import load_config
from kvstrata.handles import Tier
from kvstrata.tiers.keys import page_keys

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("pools.pages=48", "staging.bytes=3MiB")


@pytest.fixture
def open_local(store: Any) -> Any:
    """`open_local(*sets)`: an engine of configs/local.toml, in this process, one row a batch."""

    def make(*sets: str) -> Any:
        from kvstrata.gpu_runtime import OracleRunner
        from kvstrata.tools.engine import open_engine

        path = f"backends.disk.options.path={store.path}"
        config = load_config(ROOT / "configs/local.toml", [path, *sets])
        return open_engine(config, OracleRunner(), max_batch=1)

    return make


# ── L3 ───────────────────────────────────────────────────────────────────────────────────────────


def flip_payload(frames: list[Path]) -> int:
    """B002: a byte in the middle, the length unchanged."""
    with frames[0].open("r+b") as file:
        file.seek(HEADER_BYTES + 15_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
    return 1


def flip_header(frames: list[Path]) -> int:
    """A byte that only the header's own checksum covers."""
    data = bytearray(frames[0].read_bytes())
    data[3000] ^= 1
    frames[0].write_bytes(data)
    return 1


def truncate(frames: list[Path]) -> int:
    """B001: half of a frame, and nothing of another."""
    for path, nbytes in ((frames[0], 10_000), (frames[-1], 0)):
        with path.open("r+b") as file:
            file.truncate(nbytes)
    return 2


def swap(frames: list[Path]) -> int:
    """B002: two good frames under each other's name."""
    first, second = frames[0].read_bytes(), frames[-1].read_bytes()
    frames[0].write_bytes(second)
    frames[-1].write_bytes(first)
    return 2


def code(frames: list[Path]) -> int:
    """B033: what would run if anything were unpickled."""
    bomb = b"cos\nsystem\n(S'touch /tmp/kvstrata-was-here'\ntR."
    frames[0].write_bytes(bomb.ljust(frames[0].stat().st_size, b"\0"))
    return 1


@pytest.mark.parametrize("damage", [flip_payload, flip_header, truncate, swap, code])
@pytest.mark.parametrize("config", ["local", "buffer-only"])
def test_damaged_frames(
    kvstrata: Any, store: Any, small: Any, damage: Callable[[list[Path]], int], config: str
) -> None:
    sets = SMALL if config == "local" else ("pools.pages=48", "pools.max_context_tokens=16384")

    def replay() -> dict[str, Any]:
        report: dict[str, Any] = kvstrata.replay(
            config, small, store, "--batch", "1", sets=sets
        ).wait().ok()  # fmt: skip
        return report

    replay()
    stored = store.check()
    headers = store.headers()
    parents = {header.parent for header in headers.values()}
    leaves = [
        path for path, name in zip(store.frames(), headers, strict=True) if name not in parents
    ]
    bad = damage(leaves)
    report = replay()
    assert report["storage"]["outcomes"]["load"]["corrupt"] == bad
    assert report["storage"]["corrupt_deleted"] == bad
    assert report["control"]["prefetch_short_corrupt"] >= 1
    assert small.hits() <= report["page_hits"] < small.full_pages()
    assert report["storage"]["outcomes"]["store"]["stored"] == bad
    assert store.check() == stored
    report = replay()
    assert report["page_hits"] == small.full_pages()
    assert "corrupt" not in report["storage"]["outcomes"]["load"]
    assert not Path("/tmp/kvstrata-was-here").exists()


def test_frames_that_vanish(kvstrata: Any, store: Any, small: Any, seed: int) -> None:
    """Somebody empties half of the root between two runs: misses, and it is whole again."""
    kvstrata.replay("local", small, store).wait().ok()
    stored = store.check()
    for path in store.frames()[seed % 2 :: 2]:
        path.unlink()
    report = kvstrata.replay("local", small, store).wait().ok()
    assert report["page_hits"] + report["duplicates_in_flight"] >= small.hits()
    assert store.check() == stored


def test_a_lookup_that_is_older_than_the_damage(
    open_local: Any, store: Any, small: Any, names_of: Any
) -> None:
    """Two requests ask L3 for the same pages; the load of the first finds one corrupt. What the
    second was told before then must not keep the page from being stored anew."""
    names = names_of(small, "local")[-1]
    prompt = small.requests[-1].prompt()
    with open_local() as engine:
        engine.scheduler.submit(prompt, engine.namespace)
        engine.scheduler.run_until_idle(30)
    stored = store.check()
    [path] = [p for p in store.frames() if p.name == names[3].key.hex()]
    assert flip_payload([path]) == 1
    with open_local() as engine:
        for _ in range(3):
            engine.scheduler.submit(prompt, engine.namespace)
        results = engine.scheduler.run_until_idle(30)
        assert sorted(r.page_hits for r in results) == [3, len(names), len(names)]
        assert engine.scheduler.counters["pages_mismatched"] == 0
        assert engine.scheduler.cache.counters["prefetch_short_corrupt"] == len(names) - 3
    assert store.check() == stored


# ── L1 and L2: the runner finds it ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tier", ["L1", "L2"])
def test_a_wrong_pool_fails_the_command(kvstrata: Any, store: Any, small: Any, tier: str) -> None:
    """Exit code 1 and a red line, although the replay goes on to its end."""
    plant = {"flip": {"tier": tier, "after": 20}}
    done = kvstrata.replay("local", small, store, "--batch", "1", plant=plant).wait()
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    assert done.report["pages_mismatched"] > 0
    assert done.report["requests"] == len(small.requests)
    assert done.report["page_hits"] == small.hits(), "what control believes is right"
    assert "pages mismatched" in done.out


@pytest.mark.parametrize("tier", [Tier.L1, Tier.L2])
def test_one_flipped_byte_is_found(open_local: Any, small: Any, tier: Tier) -> None:
    """One byte of one page, in this process: the next request that reads the page counts one."""
    prompt = small.requests[-1].prompt()
    with open_local("pools.max_context_tokens=24576") as engine:
        scheduler, core = engine.scheduler, engine.runtime.core

        def run(tokens: bytes) -> Any:
            scheduler.submit(tokens, engine.namespace)
            [result] = scheduler.run_until_idle(30)
            return result

        run(prompt)
        assert run(prompt).hit_pages[Tier.L1] == len(prompt) // 2048
        assert scheduler.counters["pages_mismatched"] == 0
        if tier is Tier.L2:
            for i in range(1, 3):  # others, until they need its room in L1
                assert run(i.to_bytes(4, "little") * (512 * 30)).page_hits == 0
        keys = page_keys(engine.namespace, prompt, 512)
        [node, *_] = scheduler.cache.tree.match(engine.namespace, keys).path
        [extent, *_] = node.l1 if tier is Tier.L1 else node.l2
        page = extent.page_runs[0].first_page
        if tier is Tier.L1:
            core.pools["kv"].data[1, page, 99] ^= 4
        else:
            assert not node.l1
            core.staging.payload("kv", page)[20_000] ^= 4
        assert run(prompt).hit_pages[tier] > 0
        assert scheduler.counters["pages_mismatched"] == 1
        engine.runtime.check_integrity()
