"""A seeded run of workers over backends that are slow, hung, failing, lying, corrupting, killed.

    python -m kvstrata.backends.testing.soak --operations 10000 --seed 7

Every buffer is poisoned while nobody has it, every page that is LOADED is compared byte by byte,
every job is counted in and out. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.backends.base import BackendContext, HealthState, HostRegion, ObjectId, StorageBackend
from kvstrata.backends.jobs import JobResult, PageIO, WorkerSettings
from kvstrata.backends.policies import BreakerSettings, ProcessSettings, RetrySettings
from kvstrata.backends.process import ProcessBackend
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
from kvstrata.backends.worker import StorageWorker
from kvstrata.boundary import Outcome

PAGE_BYTES = 8192
CHAINS, DEPTH = 12, 8
BUFFERS = 96
OUTSTANDING = 8
MOST_PAGES = 6
LATE_S = 1.5
"""A result may come so long after its deadline: for threads that wait for a processor."""
PACE_S = 0.01
POISON = 0xA5
STUCK_S = 60.0

_KINDS = ["load"] * 9 + ["store"] * 8 + ["lookup"] * 2 + ["drop"]
_DATA = ("read", "write", "exists", "delete")


def _each(**kinds: float) -> dict[str, dict[str, float]]:
    return {operation: dict(kinds) for operation in _DATA}


SCENES: Mapping[str, tuple[bool, dict[str, dict[str, float]]]] = {
    "healthy": (False, {}),
    "slow": (False, _each(slow=0.3)),
    "hung": (False, _each(hang=0.02)),
    "failing": (
        False,
        _each(error=0.03, unavailable=0.1, busy=0.05, miscount=0.03) | {"usage": {"raise": 0.5}},
    ),
    "lying": (False, _each(lie=0.15)),
    "corrupting": (False, {"read": {"corrupt": 0.1, "short": 0.1}, "write": {"corrupt": 0.1}}),
    "healthy process": (True, {}),
    "killed process": (True, _each(kill=0.004, segfault=0.004, exit=0.004, unavailable=0.03)),
    "hung process": (True, _each(hang=0.004, gil=0.004, lie=0.02)),
}
"""Name → whether in a process of its own, and the faults."""


@dataclass
class SceneReport:
    """What one backend came to. All of `WRONG` are 0 when all is well."""

    jobs: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    """Pages by outcome."""
    retries: int = 0
    opened: int = 0
    restarts: int = 0
    wrong_bytes: int = 0
    stray_writes: int = 0
    """Buffers that were written to while nobody had them, or while they were only lent to read."""
    missing: int = 0
    """Results or releases that never came."""
    doubled: int = 0
    late: int = 0
    seconds: float = 0.0


WRONG = ("wrong_bytes", "stray_writes", "missing", "doubled", "late")


@dataclass(frozen=True)
class SoakReport:
    """What the whole run came to."""

    seed: int
    scenes: dict[str, SceneReport]
    leaks: list[str]

    @property
    def passed(self) -> bool:
        return not self.leaks and not any(
            getattr(scene, name) for scene in self.scenes.values() for name in WRONG
        )

    def table(self) -> str:
        columns = ("jobs", "retries", "opened", "restarts", *WRONG)
        lines = [f"seed {self.seed}", f"{'':16}" + "".join(f"{c:>13}" for c in columns)]
        for name, scene in self.scenes.items():
            figures = "".join(f"{getattr(scene, c):>13}" for c in columns)
            outcomes = ", ".join(f"{n} {o}" for o, n in scene.pages.most_common())
            lines += [f"{name:16}{figures}", f"{'':16}  {outcomes} ({scene.seconds:.1f} s)"]
        lines.append("left behind: " + (", ".join(self.leaks) or "nothing"))
        return "\n".join(lines)


@functools.lru_cache(CHAINS * DEPTH)
def content(chain: int, depth: int) -> bytes:
    return random.Random(f"{chain} {depth}").randbytes(PAGE_BYTES)


def name_of(chain: int, depth: int) -> ObjectId:
    digest = hashlib.sha256(f"{chain} {depth}".encode()).digest()
    return ObjectId(hashlib.sha256(b"soak").digest(), digest)


class Buffers:
    """Pages of one shared mapping, poisoned while they are free."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstrata-soak", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, BUFFERS * PAGE_BYTES)
        memory = mmap.mmap(self.fd, BUFFERS * PAGE_BYTES)
        self.view = memoryview(memory)
        self.view[:] = bytes([POISON]) * len(self.view)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.region = HostRegion(self.fd, address, BUFFERS * PAGE_BYTES)
        self.free = list(range(BUFFERS))
        self._poison = bytes([POISON]) * PAGE_BYTES

    def page(self, i: int) -> memoryview:
        return self.view[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]

    def is_clean(self, i: int) -> bool:
        return self.page(i) == self._poison

    def give_back(self, i: int) -> None:
        self.page(i)[:] = self._poison
        self.free.append(i)


class Scene:
    """One worker, its backend, and what was asked of it."""

    def __init__(self, name: str, seed: int, root: Path) -> None:
        in_process, faults = SCENES[name]
        self.report = SceneReport()
        self.rng = random.Random(f"{seed} {name}")
        path = root / name.replace(" ", "-")
        path.mkdir()
        options = FaultyOptions(
            faults=faults,
            seed=self.rng.getrandbits(32),
            path=str(path),
            slow_s=0.005,
            hang_s=2.5 if not in_process else 3600.0,
        )
        self.inner = FaultyBackend(options)
        quick = ProcessSettings(restart_delay_s=0.01, restart_delay_max_s=0.1)
        self.backend: StorageBackend = (
            ProcessBackend(FaultyBackend, options, quick) if in_process else self.inner
        )
        self.settings = WorkerSettings(
            retry=RetrySettings(attempts=3, first_delay_s=0.005, max_delay_s=0.05),
            breaker=BreakerSettings(
                failures=8, cooldown_s=0.05, probe_s=0.02, probe_deadline_s=0.5
            ),
            kill_after_s=0.2,
        )
        self.worker = StorageWorker(name, self.backend, self.settings, BackendContext(name))
        self.buffers = Buffers()
        self.condition = threading.Condition()
        self._pace = threading.Event()
        self.outstanding = 0
        self.dones = self.releases = self.moving = 0
        self.worker.start(regions=(self.buffers.region,))

    def run(self, jobs: int) -> None:
        begun = time.monotonic()
        for _ in range(jobs):
            with self.condition:
                self._wait(lambda: self.outstanding < OUTSTANDING)
            if self.worker.condition().state is not HealthState.OK:
                self._pace.wait(PACE_S)  # a server would not ask at full speed for nothing either
            self._submit(self.rng.choice(_KINDS))
            self.worker.check_integrity()
        if not isinstance(self.backend, ProcessBackend):
            self.inner.release()
        with self.condition:
            self._wait(lambda: self.outstanding == 0 and self.releases == self.moving)
        self.report.seconds = time.monotonic() - begun

    def close(self) -> None:
        report, stats = self.report, self.worker.stats()
        report.retries, report.opened = sum(stats.retries.values()), stats.breaker_opened
        if isinstance(self.backend, ProcessBackend):
            report.restarts = self.backend.restarts
        self.worker.close(5.0)
        report.missing += abs(report.jobs - self.dones) + abs(self.moving - self.releases)
        report.missing += BUFFERS - len(self.buffers.free)
        report.stray_writes += sum(not self.buffers.is_clean(i) for i in self.buffers.free)
        os.close(self.buffers.fd)

    def _wait(self, ready: Any) -> None:
        if not self.condition.wait_for(ready, STUCK_S):
            self.report.late += 1

    def _submit(self, kind: str) -> None:
        chain = self.rng.randrange(CHAINS)
        first = self.rng.randrange(DEPTH) if self.rng.random() < 0.3 else 0
        depths = range(first, min(DEPTH, first + self.rng.randint(1, MOST_PAGES)))
        names = [name_of(chain, depth) for depth in depths]
        deadline_s = self.rng.choice([0.1, 0.5, 1.0, 2.0])
        self.report.jobs += 1
        with self.condition:
            self.outstanding += 1
        job = _Job(self, kind, chain, depths, time.monotonic() + deadline_s)
        if kind == "lookup":
            self.worker.lookup(names, deadline_s, job.done)
        elif kind == "drop":
            self.worker.drop(names, deadline_s, job.done)
        else:
            with self.condition:
                self.moving += 1
                self._wait(lambda: len(self.buffers.free) >= len(depths))
                job.taken = [self.buffers.free.pop() for _ in depths]
            self.report.stray_writes += sum(not self.buffers.is_clean(i) for i in job.taken)
            pages = []
            for depth, buffer in zip(depths, job.taken, strict=True):
                payload = self.buffers.page(buffer)
                if kind == "store":
                    payload[:] = content(chain, depth)
                parent = name_of(chain, depth - 1) if depth else None
                pages.append(PageIO(name_of(chain, depth), parent, depth, payload))
            job.end_s = time.monotonic() + deadline_s
            submit = self.worker.load if kind == "load" else self.worker.store
            submit(pages, deadline_s, job.done, job.released)


class _Job:
    """One job as its caller sees it."""

    def __init__(
        self, scene: Scene, kind: str, chain: int, depths: Sequence[int], end_s: float
    ) -> None:
        self.scene, self.kind, self.chain, self.depths = scene, kind, chain, depths
        self.end_s = end_s
        self.taken: list[int] = []
        self.is_done = self.is_released = False

    def done(self, result: JobResult | int) -> None:
        scene, report = self.scene, self.scene.report
        with scene.condition:
            report.doubled += self.is_done
            report.late += time.monotonic() > self.end_s + LATE_S
            self.is_done = True
            scene.dones += 1
            scene.outstanding -= 1
            if isinstance(result, JobResult):
                report.missing += len(result.pages) != len(self.depths)
                for depth, buffer, page in zip(self.depths, self.taken, result.pages, strict=False):
                    report.pages[page.outcome.value] += 1
                    if page.outcome is Outcome.LOADED:
                        good = scene.buffers.page(buffer) == content(self.chain, depth)
                        report.wrong_bytes += not good
            self._settle()

    def released(self) -> None:
        with self.scene.condition:
            self.scene.report.doubled += self.is_released
            self.is_released = True
            self.scene.releases += 1
            self._settle()

    def _settle(self) -> None:
        """The buffers are free when nobody uses them and the bytes were compared."""
        scene = self.scene
        if self.is_done and self.is_released:
            for depth, buffer in zip(self.depths, self.taken, strict=True):
                if self.kind == "store":
                    kept = scene.buffers.page(buffer) == content(self.chain, depth)
                    scene.report.stray_writes += not kept
                scene.buffers.give_back(buffer)
            self.taken = []
        scene.condition.notify_all()


def _held() -> dict[str, set[str]]:
    """Descriptors, threads, children and shared mappings of this process that are ours."""
    gc.collect()
    own = Path("/proc/self")
    return {
        "descriptors": {f"{p.name}" for p in (own / "fd").iterdir()},
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("kvstrata-")},
        "children": set((own / f"task/{os.getpid()}/children").read_text().split()),
        "mappings": {
            line for line in (own / "maps").read_text().splitlines() if "memfd:kv" in line
        },
    }


def run_soak(operations: int, seed: int, scenes: Sequence[str] = tuple(SCENES)) -> SoakReport:
    """`operations` jobs, shared out over the scenes, which run at once, a thread each."""
    before = _held()
    with tempfile.TemporaryDirectory() as root:
        running = {name: Scene(name, seed, Path(root)) for name in scenes}
        share = -(-operations // len(scenes))
        threads = [threading.Thread(target=s.run, args=(share,)) for s in running.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reports = {}
        for name, scene in running.items():
            scene.close()
            reports[name] = scene.report
        running.clear()
        del scene, threads, thread
    after = _held()
    leaks = []
    for kind, found in after.items():
        more = len(found) - len(before[kind])
        if more > 0:
            leaks.append(f"{more} {kind}: {sorted(found - before[kind])}")
    return SoakReport(seed, reports, leaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    report = run_soak(given.operations, seed)
    sys.stdout.write(report.table() + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
