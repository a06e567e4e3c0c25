"""Pages of another identity are never hits, on one root, end to end (B012 to B017)."""

from __future__ import annotations

from typing import Any

import pytest

REQUESTS = ("--requests", "12")

OTHERS = {
    "revision": ['namespace.revision="2"'],
    "model": ["namespace.model=other"],
    "adapter": ["namespace.adapter=lora-a"],
    "rank": ["namespace.parallel_size=2", "namespace.parallel_rank=1"],
    "size": ["namespace.parallel_size=2"],
    "epoch": ["namespace.epoch=1"],
    "dtype of equal size": ["pools.components.0.dtype=float16"],
    "layout": ["pools.components.0.layout=HND"],
    "heads and head_dim, of equal size": [
        "pools.components.0.kv_heads=2",
        "pools.components.0.head_dim=4",
    ],
    "component": ["pools.components.0.name=other"],
    "page tokens": ["pools.page_tokens=256"],
    "salt": ["namespace.salt_env=KVSTRATA_TEST_SALT"],
}


def test_another_namespace_finds_nothing(kvstrata: Any, store: Any, small: Any) -> None:
    """L1 holds the whole part of the trace: what L3 gives could only be of others."""

    def replay(*sets: str, salt: str = "") -> dict[str, Any]:
        env = {"KVSTRATA_TEST_SALT": salt}
        sets = ("pools.pages=600", *sets)
        running = kvstrata.replay("local", small, store, *REQUESTS, sets=sets, env=env)
        report: dict[str, Any] = running.wait().ok()
        assert report["page_hits"] + report["duplicates_in_flight"] >= small.hits(first=12)
        return report

    first = replay()
    known = len(store.check())
    for name, sets in OTHERS.items():
        report = replay(*sets, salt="hush-a")
        assert report["hit_tokens"]["l3"] == 0, name
        stored = len(store.frames())
        assert stored > known, name
        known = stored
    assert replay(*OTHERS["salt"], salt="hush-b")["hit_tokens"]["l3"] == 0
    for sets in ((), OTHERS["salt"], OTHERS["revision"]):
        report = replay(*sets, salt="hush-a")
        assert report["page_hits"] == report["full_pages"] == first["full_pages"]
    assert len(store.check()) > known, "those of hush-b as well"


@pytest.mark.parametrize("name", ["salt", "salt_env"])
def test_a_salt_is_not_shown(kvstrata: Any, store: Any, small: Any, name: str) -> None:
    value = "hush-hush" if name == "salt" else "KVSTRATA_TEST_SALT"
    done = kvstrata.replay(
        "local", small, store, "--requests", "2",
        sets=[f"namespace.{name}={value}"], env={"KVSTRATA_TEST_SALT": "hush-hush"},
    ).wait()  # fmt: skip
    done.ok()
    assert "hush" not in done.out + done.err + str(done.report)
    for path in store.path.rglob("*"):
        assert "hush" not in path.name
        assert not path.is_file() or b"hush" not in path.read_bytes()
