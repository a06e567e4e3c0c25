"""Every wait of backups, loads and restores, removed in turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.gpu_runtime import moves
from kvstrata.gpu_runtime.backup import BackupToL2, BackupToL3, StoreQueue
from kvstrata.gpu_runtime.moves import Moves
from kvstrata.gpu_runtime.prefetch import PrefetchToL1, PrefetchToL2

GIVE_UP = "(table.quarantine if self.tier is Tier.L1 else table.strand)(p)"
NOT_HELD = (
    (BackupToL3, "_store", GIVE_UP, "self.tier is Tier.L2 or table.quarantine(p)"),
    (BackupToL3, "__init__", "self._table(name).begin_backup(pages)", "pass"),
    (BackupToL3, "_end_source", "self._table(name).end_backup(p)", "pass"),
)
LEND = "        self.core.staging.end_lend(self.lender, chunk.count)\n"
D2H = "    self.copies.d2h(part, slots, copied)"
D2H_TO_L2 = "    self.copies.d2h(self.source, slots, copied, enqueued=enqueued)"
H2D = "self.copies.h2d(source, target, lambda e: copied(0 if e else n, e or cause))"

# What is planted → where it is looked for, and the edits: owner, function, what becomes what.
WAITS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    # ── backups ──
    "device pages are not held while they are copied to L2": (
        "cache",
        "calm",
        (
            (BackupToL2, "__init__", "core.tables[name].begin_backup(pages)", "pass"),
            (BackupToL2, "_done", "self.core.tables[name].end_backup(pages)", "pass"),
        ),
    ),
    "host pages are given back when the copy into them is enqueued": (
        "cache",
        "calm",
        (
            (BackupToL2, "_granted", "        self.core.staging.give_back(slots)\n", ""),
            (
                BackupToL2,
                "_granted",
                D2H_TO_L2,
                D2H_TO_L2 + "\n    self.core.staging.give_back(slots)",
            ),
        ),
    ),
    "device pages are not held while they are copied to the window": (
        "buffer_only",
        "calm",
        NOT_HELD,
    ),
    "host pages are not held while they are stored": ("cache", "calm", NOT_HELD),
    "device pages are given up when their copy to the window is enqueued": (
        "buffer_only",
        "calm",
        (
            (BackupToL3, "_copy", "        self._end_source(part)\n", ""),
            (BackupToL3, "_copy", D2H, D2H + "\n    self._end_source(part)"),
        ),
    ),
    "the window is stored when the copy into it is enqueued": (
        "buffer_only",
        "calm",
        (
            (BackupToL3, "_copy", "            self._store(index, slots)\n", ""),
            (BackupToL3, "_copy", D2H, D2H + "\n    self._store(index, slots)"),
        ),
    ),
    "window pages are free when their store was reported": (
        "buffer_only",
        "hurried",
        (
            (BackupToL3, "_store", GIVE_UP, "lent.append(table.release(p))"),
            (
                BackupToL3,
                "_store",
                "self.core.staging.give_back(pages)",
                "len(lent) > 1 or self.core.staging.give_back(pages)",
            ),
        ),
    ),
    "host pages are given up when their store was reported": (
        "cache",
        "hurried",
        (
            (BackupToL3, "_store", GIVE_UP, "lent.append(table.end_backup(p))"),
            (
                BackupToL3,
                "_store",
                "            self._end_source(dict(pages))\n",
                "            len(lent) > 1 or self._end_source(dict(pages))\n",
            ),
        ),
    ),
    "BackedUp comes before the store has ended": (
        "",
        "calm",
        (
            (
                BackupToL3,
                "_store",
                "    lent = [True]\n",
                """    lent = [True]
    self.running -= 1
    self.stored[index] = stop - start
    self._finish_if_idle()
""",
            ),
            (BackupToL3, "_store", "        self.running -= 1\n", ""),
            (BackupToL3, "_store", "        self.stored[index] = n\n", ""),
        ),
    ),
    "stores do not wait for their turn": (
        "",
        "calm",
        ((StoreQueue, "join", "self._tell()", "move.ask()"),),
    ),
    "frees of a message come before its backups": (
        "",
        "calm",
        (
            (
                moves,
                "_turn",
                "return 0 if isinstance(action, Backup) else 1 if isinstance(action, Free) else 2",
                "return 0 if isinstance(action, Free) else 1",
            ),
        ),
    ),
    # ── loads ──
    "PrefetchReady comes before the load to L2 has ended": (
        "cache",
        "calm",
        (
            (
                PrefetchToL2,
                "_granted",
                "        self._load(chunk)\n",
                """        self._load(chunk)
        chunk.valid = chunk.count
    self._settle()
""",
            ),
            (PrefetchToL2, "_load", "chunk.valid, chunk.cause = n, cause", "return"),
            (PrefetchToL2, "_settle", "        if not chunk.released:", "        if False:"),
        ),
    ),
    "host pages of a load to L2 that was given up are free at once": (
        "cache",
        "hurried",
        (
            (PrefetchToL2, "_settle", "    if not chunk.released:", "    if False:"),
            (PrefetchToL2, "_settle", "        if chunk.released:", "        if True:"),
            (PrefetchToL2, "_load", "        if self.ended:", "        if False:"),
        ),
    ),
    "window pages of a load that was given up are free at once": (
        "buffer_only",
        "hurried",
        (
            (PrefetchToL1, "_load", "if chunk.released and not copying[0]:", "if not copying[0]:"),
            (
                PrefetchToL1,
                "_load",
                "chunk.count)\n        give_back()\n",
                "chunk.count)\n",
            ),
        ),
    ),
    "window pages are free when they are loaded, and an H2D reads them": (
        "buffer_only",
        "calm",
        (
            (PrefetchToL1, "_load", "if chunk.released and not copying[0]:", "if chunk.released:"),
            (PrefetchToL1, "_load", "        copying[0] = False\n        give_back()\n", ""),
        ),
    ),
    "PrefetchReady comes before the H2D has ended": (
        "buffer_only",
        "calm",
        (
            (
                PrefetchToL1,
                "_load",
                H2D,
                H2D + "\n        self._chunk_done(chunk, n, cause)",
            ),
            (
                PrefetchToL1,
                "_load",
                "give_back()\n        self._chunk_done(chunk, n, cause)\n",
                "give_back()\n        n or self._chunk_done(chunk, n, cause)\n",
            ),
        ),
    ),
    "an H2D is enqueued before the window is loaded": (
        "buffer_only",
        "calm",
        (
            (
                PrefetchToL1,
                "_load",
                "    keys = self.keys.slice(chunk.start, chunk.stop)\n",
                """    keys = self.keys.slice(chunk.start, chunk.stop)
    filled = part_of(self.target, chunk.start, chunk.stop)
    self.copies.h2d(slots, filled, lambda e: copied(chunk.count, e))
""",
            ),
            (PrefetchToL1, "_load", H2D, "pass"),
            (PrefetchToL1, "_load", "        copied(0, cause)\n", "        pass\n"),
        ),
    ),
    "device pages of a load are free while one of its chunks is copied": (
        "buffer_only",
        "lossy",
        (
            (
                PrefetchToL1,
                "_advance",
                "if self.running == 0 and",
                "if (self.running == 0 or self.cause) and",
            ),
        ),
    ),
    "what a backend may hold is given back before it lets go": (
        "cache",
        "hurried",
        (
            (
                PrefetchToL2,
                "_load",
                "        chunk.valid, chunk.cause = n, cause\n",
                LEND + "        chunk.valid, chunk.cause = n, cause\n",
            ),
            (PrefetchToL2, "_load", "chunk.released = True\n" + LEND, "chunk.released = True\n"),
        ),
    ),
    # ── restores outside of batches ──
    "host pages are not held for a Restore": (
        "cache",
        "calm",
        (
            (Moves, "_restore", "core.staging.tables[name].hold(source[name])", "pass"),
            (Moves, "_restore", "core.staging.give_back(source)", "pass"),
        ),
    ),
    "Restored comes before the copy has ended": (
        "cache",
        "calm",
        (
            (
                Moves,
                "_restore",
                "    self.copies.h2d(source, target, done, enqueued=enqueued)",
                "    enqueued()\n    self.copies.h2d(source, target, lambda e: None)\n    done('')",
            ),
        ),
    ),
}


@pytest.mark.no_cover  # what is planted is not what is covered, and tracing takes half the time
@pytest.mark.parametrize("planted", WAITS)
def test_a_removed_wait_is_noticed(planted: str, find_seed: Any) -> None:
    """B052, B056, B057, B059, B062, B063: each of them is one of these waits, left out."""
    mode, weather, edits = WAITS[planted]
    print(find_seed(edits, mode, weather))
