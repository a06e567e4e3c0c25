"""Every wait between compute, copies and the host's view of batches, removed in turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.gpu_runtime import sim
from kvstrata.gpu_runtime.batches import BatchEngine
from kvstrata.gpu_runtime.compute import Compute
from kvstrata.gpu_runtime.copy_queue import CopyQueue
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.transfers import Copies
from kvstrata.staging import PageTable

ENQUEUE = """    self._stream.enqueue(part.run, part.nbytes)
"""
LAST = """    return self._stream.record(event)
"""
LAST_EARLY = """    event = self._stream.record(event)
    self._stream.enqueue(part.run, part.nbytes)
    return event
"""


def recorded_early(stream: str) -> tuple[tuple[type, str, str, str], ...]:
    """Of a copy in one slice, the event comes first."""
    late = f'    if self._stream.name != "{stream}":\n    {ENQUEUE}'
    event = LAST_EARLY.replace(
        "    self._stream.enq", f'    if self._stream.name == "{stream}":\n        self._stream.enq'
    )
    return (CopyQueue, "_enqueue", ENQUEUE, late), (CopyQueue, "_enqueue", LAST, event)


COMPUTED = """    compute.enqueue(lambda: self.compute.run(batch))
    compute.record().on_complete(lambda: self._computed(batch))
"""
COMPUTED_EARLY = """    compute.record().on_complete(lambda: self._computed(batch))
    compute.enqueue(lambda: self.compute.run(batch))
"""
COPY_NOW = """        for name, pool in core.pools.items():
            pool.copy_page(int(row.hand[name][-1]), int(part.new_pages[name][0]))
        row.replace_last(part.new_pages)
"""
LET_GO = """    extents = self.core.claim(Tier.L1, given)
    for held in row.held:
        for name, pages in held.items():
            held[name] = pages[~np.isin(pages, given[name])]
    self.core.release_l1(given)
    return extents"""

# What is planted → where it is looked for, and the edits: owner, function, what becomes what.
WAITS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "compute does not wait for KV_READY": (
        "",
        "calm",
        ((BatchEngine, "execute", "compute.wait_event(event)", "pass"),),
    ),
    "a batch's event is recorded before its work": (
        "",
        "calm",
        ((BatchEngine, "execute", COMPUTED, COMPUTED_EARLY),),
    ),
    "a D2H's event is recorded before the copy": (
        "",
        "calm",
        recorded_early("d2h"),
    ),
    "an H2D's event is recorded before the copy": (
        "",
        "calm",
        recorded_early("h2d"),
    ),
    "the host goes on when an H2D is enqueued, the device waits": (
        "",
        "calm",
        (
            (
                Copies,
                "_copy",
                "    state.event.on_complete(finish)\n",
                "    state.event.on_complete(finish) if out else finish()\n",
            ),
        ),
    ),
    "callbacks come before those of the streams that were waited for": (
        "",
        "calm",
        (
            (
                sim._Completions,
                "ready",
                "all(event.query() for event in self.queue[0].after)",
                "True",
            ),
        ),
    ),
    "compute hears of a failed restore from the host": (
        "cache",
        "failing",
        (
            (
                Compute,
                "_set_up",
                "part.copy is not None and part.copy.error",
                "part.copy is not None and part.copy.error and part.copy.event.query()",
            ),
        ),
    ),
    "a row whose restore failed is finished when the host hears of it": (
        "cache",
        "failing",
        (
            (Compute, "_set_up", "row.finished = True", "pass"),
            (
                BatchEngine,
                "_result",
                "        n_valid = row.attached_pages",
                "        row.finished = part.finished = True\n        n_valid = row.attached_pages",
            ),
        ),
    ),
    "the host reads from the row how far a batch came": (
        "",
        "calm",
        (
            (
                BatchEngine,
                "_result",
                "self._hand_over(row, part.kv_len)",
                "self._hand_over(row, row.kv_len)",
            ),
        ),
    ),
    "the host reads from the row whether a batch ended it": (
        "",
        "calm",
        ((BatchEngine, "_result", "finished=part.finished", "finished=row.finished"),),
    ),
    "the private copy is made when the batch is prepared": (
        "cache",
        "calm",
        (
            (BatchEngine, "_admit", "        row.replace_last(part.new_pages)\n", COPY_NOW),
            (Compute, "_set_up", "if part.private_copy:", "if False:"),
        ),
    ),
    "a row does not hold the pages that it attaches": (
        "",
        "calm",
        (
            (BatchEngine, "_admit", "core.tables[name].hold(pages)", "pass"),
            (BatchEngine, "_admit", "row.held.append(check.attach)", "pass"),
        ),
    ),
    "a row holds its pages only until control was handed them": (
        "",
        "calm",
        ((BatchEngine, "_hand_over", "    return self.core.claim(Tier.L1, given)", LET_GO),),
    ),
    "a row goes when control releases it, whatever batches name it": (
        "",
        "calm",
        (
            (BatchEngine, "release", "if row.batches == 0:", "if True:"),
            (BatchEngine, "_result", "if row.released and row.batches == 0:", "if False:"),
        ),
    ),
    "host pages are not held for the restore of a row": (
        "cache",
        "calm",
        (
            (BatchEngine, "_start_restore", "core.staging.tables[name].hold(source[name])", "pass"),
            (BatchEngine, "_start_restore", "core.staging.give_back(source)", "pass"),
        ),
    ),
    "a page is free when control gave it up, whoever uses it": (
        "",
        "calm",
        ((PageTable, "_settle", "(self._holds[pages] == 0) & ~", "~"),),
    ),
    "Freed comes while pages are still in use": (
        "",
        "calm",
        ((RuntimeCore, "settle_frees", "if pending.waits:", "if False:"),),
    ),
}

SEEN_AT = {
    "compute hears of a failed restore from the host": 12,
    "a row whose restore failed is finished when the host hears of it": 60,
    "host pages are not held for the restore of a row": 15,
}
"""Where few seeds notice it, one that did: the search begins there."""


@pytest.mark.no_cover  # what is planted is not what is covered, and tracing takes half the time
@pytest.mark.parametrize("planted", WAITS)
def test_a_removed_wait_is_noticed(planted: str, find_seed: Any) -> None:
    """B052, B053, B054, B056, B058, B059: each of them is one of these waits, left out."""
    mode, weather, edits = WAITS[planted]
    print(find_seed(edits, mode, weather, SEEN_AT.get(planted, 0)))
