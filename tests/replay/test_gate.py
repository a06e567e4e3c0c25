"""The gate, on parts of the trace: exact hits, no wrong byte, in every replay configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAX_CALLS_A_BATCH = 12
MAX_DUPLICATES = 32
MAX_RSS_BYTES = 10**9

MEASURED = """
import pathlib, resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
pathlib.Path(sys.argv[1]).write_text(str(memory))
sys.exit(code)
"""
"""Starts a command and writes down its peak memory, in KiB. One that is started from here counts
what this process has when it forks."""

SMALL_L1 = ("pools.pages=256",)
SMALL_TIERS = ("pools.pages=320", "staging.bytes=12MiB")
"""Small enough that the dense part of the trace hits in every tier."""


def check(done: Any, trace: Any, page_tokens: int = 512) -> dict[str, Any]:
    """What holds for every replay of `trace` on an empty L3."""
    report: dict[str, Any] = done.ok()
    assert report["requests"] == len(trace.requests)
    assert report["prompt_tokens"] == trace.prompt_tokens
    assert report["full_pages"] == trace.full_pages(page_tokens)
    assert report["page_hits"] + report["duplicates_in_flight"] == trace.hits(page_tokens)
    assert sum(report["hit_tokens"].values()) == report["page_hits"] * page_tokens
    assert report["pages_verified"] >= report["page_hits"] > 0
    assert report["computed_tokens"] >= report["prompt_tokens"] - report["page_hits"] * page_tokens
    assert done.rss_bytes < MAX_RSS_BYTES
    assert report["peak_memory_bytes"] <= done.rss_bytes
    assert 0 < report["hidden_transfer_share"] <= 1
    return report


CONFIGS = [
    ("replay-cache", "opening", ()),
    ("replay-cache", "dense", SMALL_TIERS),
    ("replay-buffer-only", "opening", ()),
    ("replay-buffer-only", "dense", SMALL_L1),
    ("replay-small-window", "dense", SMALL_L1),
]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("config", "part", "sets"), CONFIGS)
def test_exact_hits(
    kvstrata: Any, store: Any, request: Any, config: str, part: str, sets: Any, batch: int
) -> None:
    trace = request.getfixturevalue(part)
    done = kvstrata.replay(config, trace, store, "--batch", str(batch), sets=sets).wait()
    report = check(done, trace)
    assert report["duplicates_in_flight"] <= (MAX_DUPLICATES if batch > 1 else 0)
    assert 0 < report["calls_per_batch"] <= MAX_CALLS_A_BATCH
    stored = store.check()
    assert report["storage"]["used_bytes"] == store.disk_bytes()
    assert report["storage"]["objects"] == len(stored)
    assert report["storage"]["outcomes"]["store"]["stored"] == len(stored)


def test_hits_in_every_tier(kvstrata: Any, store: Any, dense: Any) -> None:
    done = kvstrata.replay("replay-cache", dense, store, "--batch", "4", sets=SMALL_TIERS).wait()
    assert min(check(done, dense)["hit_tokens"].values()) > 0


@pytest.mark.parametrize("config", ["replay-cache", "replay-buffer-only"])
def test_decode(kvstrata: Any, store: Any, dense: Any, config: str) -> None:
    done = kvstrata.replay(config, dense, store, "--requests", "25", "--decode", "real").wait()
    report = done.ok()
    assert report["page_hits"] + report["duplicates_in_flight"] == dense.hits(first=25)
    outputs = [max(1, r.output_length) for r in dense.requests[:25]]
    assert report["output_tokens"] == sum(outputs) > 1000
    store.check()


@pytest.mark.parametrize("page_tokens", [128, 32])
def test_other_page_size(kvstrata: Any, store: Any, small: Any, page_tokens: int) -> None:
    done = kvstrata.replay(
        "local", small, store, "--page-tokens", str(page_tokens), "--batch", "1",
        sets=("pools.pages=1024",),
    ).wait()  # fmt: skip
    assert check(done, small, page_tokens)["duplicates_in_flight"] == 0
    store.check()


def test_second_process_hits_every_page(kvstrata: Any, store: Any, dense: Any) -> None:
    """What one process stored, the next one finds; then there is nothing left to store."""
    check(kvstrata.replay("replay-cache", dense, store, sets=SMALL_TIERS).wait(), dense)
    before = store.check()
    report = kvstrata.replay("replay-cache", dense, store, sets=SMALL_TIERS).wait().ok()
    assert report["page_hits"] == report["full_pages"] == dense.full_pages()
    assert sum(report["hit_tokens"].values()) == dense.full_pages() * 512
    assert report["storage"]["outcomes"]["load"]["loaded"] >= len(before)
    assert "stored" not in report["storage"]["outcomes"]["store"]
    one = kvstrata.replay("replay-cache", dense, store, "--requests", "1").wait().ok()
    assert one["hit_tokens"] == {"l1": 0, "l2": 0, "l3": one["full_pages"] * 512}
    assert store.check() == before


def test_two_processes_at_once_on_one_root(kvstrata: Any, store: Any, small: Any) -> None:
    """Neither sees a wrong byte, and what both stored is there once."""
    first = kvstrata.replay("local", small, store, "--batch", "1")
    second = kvstrata.replay("local", small, store, "--batch", "1")
    for done in (first.wait(), second.wait()):
        assert done.ok()["page_hits"] >= small.hits()
    store.check()
    report = kvstrata.replay("local", small, store).wait().ok()
    assert report["page_hits"] == small.full_pages()


def test_command_of_its_own(store: Any, small: Any, tmp_path: Path) -> None:
    """One replay as people start it, not forked: what it prints, and the memory it takes."""
    root, memory = Path(__file__).resolve().parents[2], tmp_path / "memory"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, memory, sys.executable, "-m", "kvstrata.tools.cli",
         "replay", "--config", root / "configs/local.toml",
         "--set", f"backends.disk.options.path={store.path}"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "COLUMNS": "200"},
    )  # fmt: skip
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert err == "", "nothing but the table, where nobody watches"
    assert int(memory.read_text()) * 1024 < MAX_RSS_BYTES
    assert "60 requests in" in out
    assert f"{small.full_pages()} full pages" in out
    store.check()
