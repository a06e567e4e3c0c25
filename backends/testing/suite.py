"""The conformance suite for plugin authors: what the contract in `base.py` demands, as tests.

With pytest:

    class TestMyBackend(BackendTests):
        @pytest.fixture
        def make_backend(self, tmp_path):
            return lambda: MyBackend(MyOptions(path=str(tmp_path)))

Without: `run_conformance(make_backend)`, or `kvstrata backends conformance NAME`.

`make_backend()` gives a backend that is not open. Each test opens one, works under a namespace of
its own, removes what it wrote and closes it; they may all share one store, but it needs room for
about 16 MiB.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvstrata.backends.base import SUPPORTED_VERSIONS, Health, StorageBackend, WriteRequest
from kvstrata.backends.testing.frames import (
    HEADER,
    PAYLOAD,
    Frames,
    MakeBackend,
    at_once,
    content,
    expect,
    expect_frame,
    opened,
    require,
)
from kvstrata.boundary import Outcome


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One test of `run_conformance`."""

    name: str
    passed: bool
    message: str
    """Why it failed."""
    seconds: float


def run_conformance(make_backend: MakeBackend) -> list[CheckResult]:
    """Run every test of `BackendTests`, without pytest."""
    suite, results = BackendTests(), []
    for name in [name for name in vars(BackendTests) if name.startswith("test_")]:
        start = time.perf_counter()
        message = ""
        try:
            getattr(suite, name)(make_backend)
        except Exception as error:  # noqa: BLE001 (whatever a plugin raises is its result)
            message = f"{type(error).__name__}: {error}"
        title = name.removeprefix("test_").replace("_", " ")
        results.append(CheckResult(title, not message, message, time.perf_counter() - start))
    return results


class BackendTests:
    """Subclass it, and give it the fixture `make_backend`."""

    # ── the class ────────────────────────────────────────────────────────────────────────────────

    def test_class_attributes(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        require(isinstance(backend, StorageBackend), "not a StorageBackend")
        require(
            backend.api_version in SUPPORTED_VERSIONS,
            f"api_version is none of {SUPPORTED_VERSIONS}",
        )
        config = backend.Options.__struct_config__
        require(config.forbid_unknown_fields, "Options lacks forbid_unknown_fields=True")
        require(config.frozen, "Options lacks frozen=True")

    def test_open_and_close(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            require(backend.concurrency >= 1, "concurrency is below 1")
            require(backend.max_batch >= 1, "max_batch is below 1")
            require(isinstance(backend.health(), Health), "health() gives no Health")
            backend.close(10.0)  # the second call, in `opened`, must not raise

    # ── one frame ────────────────────────────────────────────────────────────────────────────────

    def test_round_trip(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames = Frames()
            request = frames.write(1)
            expect(backend.write([request]), [Outcome.STORED])
            require(
                b"".join(request.buffers) == frames.data(1), "write changed the buffers it was lent"
            )
            require(backend.exists([frames.name(1)]) == [True], "a stored frame does not exist")
            expect_frame(backend, frames, 1)
            backend.delete([frames.name(1)])

    def test_odd_sizes(self, make_backend: MakeBackend) -> None:
        sizes = (1, 511, HEADER, HEADER + 1, 100_003)
        with opened(make_backend) as backend:
            frames = Frames()
            for i, size in enumerate(sizes):
                expect(backend.write([frames.write(i, size)]), [Outcome.STORED])
                expect_frame(backend, frames, i, size)
            backend.delete([frames.name(i) for i in range(len(sizes))])

    def test_gather_and_scatter_lists(self, make_backend: MakeBackend) -> None:
        pieces = 2500  # more than one system call takes
        with opened(make_backend) as backend:
            frames = Frames()
            data = memoryview(frames.data(1, 3 * pieces))
            parts = tuple(data[3 * i : 3 * i + 3] for i in range(pieces))
            request = WriteRequest(frames.name(1), None, 0, parts)
            expect(backend.write([request]), [Outcome.STORED])
            read = frames.read(1, *[5] * (3 * pieces // 5))
            expect(backend.read([read]), [Outcome.LOADED])
            require(content(read) == data, "a gathered frame came back with other bytes")
            backend.delete([frames.name(1)])

    def test_never_overwrites(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames = Frames()
            first, other = frames.write(1), frames.write(2)
            second = WriteRequest(first.object, None, 0, other.buffers)
            expect(backend.write([first]), [Outcome.STORED])
            expect(backend.write([second]), [Outcome.EXISTS])
            expect_frame(backend, frames, 1)
            backend.delete([frames.name(1)])

    def test_missing(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames = Frames()
            expect(backend.read([frames.read(1)]), [Outcome.MISSING])
            require(backend.exists([frames.name(1)]) == [False], "what was never stored exists")
            require(backend.delete([frames.name(1)]) == [False], "deleted what was not there")

    def test_short_frame(self, make_backend: MakeBackend) -> None:
        """Fewer bytes than asked for: LOADED, with their number. The rest is for the worker."""
        with opened(make_backend) as backend:
            frames = Frames()
            backend.write([frames.write(1, 1000)])
            read = frames.read(1, 600, 600)
            result = backend.read([read])[0]
            require(result.outcome is Outcome.LOADED, f"a short frame is {result.outcome}")
            require(result.nbytes == 1000, f"a frame of 1000 bytes is said to have {result.nbytes}")
            require(content(read)[:1000] == frames.data(1, 1000), "wrong bytes of a short frame")
            backend.delete([frames.name(1)])

    def test_first_bytes_of_a_longer_frame(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames = Frames()
            backend.write([frames.write(1)])
            read = frames.read(1, HEADER)
            expect(backend.read([read]), [Outcome.LOADED])
            require(content(read) == frames.data(1)[:HEADER], "wrong first bytes")
            backend.delete([frames.name(1)])

    def test_delete(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames = Frames()
            backend.write([frames.write(1), frames.write(2)])
            gone = backend.delete([frames.name(1), frames.name(3), frames.name(2)])
            require(gone == [True, False, True], f"delete says {gone}")
            expect(backend.read([frames.read(1)]), [Outcome.MISSING])
            expect(backend.write([frames.write(1)]), [Outcome.STORED])
            expect_frame(backend, frames, 1)
            backend.delete([frames.name(1)])

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def test_empty_batches(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            require(not backend.read([]), "read([]) gives results")
            require(not backend.write([]), "write([]) gives results")
            require(not backend.exists([]), "exists([]) gives results")
            require(not backend.delete([]), "delete([]) gives results")

    def test_one_result_a_page_in_order(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames, there = Frames(), [0, 2, 5]
            expect(backend.write([frames.write(i) for i in there]), [Outcome.STORED] * 3)
            reads = [frames.read(i) for i in range(6)]
            outcomes = [Outcome.LOADED if i in there else Outcome.MISSING for i in range(6)]
            expect(backend.read(reads), outcomes)
            for i in there:
                require(content(reads[i]) == frames.data(i), f"page {i} has other bytes")
            found = backend.exists([frames.name(i) for i in range(6)])
            require(found == [i in there for i in range(6)], f"exists says {found}")
            backend.delete([frames.name(i) for i in there])

    def test_largest_batch(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames, count = Frames(), min(backend.max_batch, 128)
            chain = [frames.chained(i) for i in range(count)]
            expect(backend.write(chain), [Outcome.STORED] * count)
            reads = [frames.read(i) for i in range(count)]
            expect(backend.read(reads), [Outcome.LOADED] * count)
            require(
                all(content(read) == frames.data(i) for i, read in enumerate(reads)),
                "a page of a large batch has other bytes",
            )
            require(all(backend.delete([r.object for r in chain])), "not all pages were deleted")

    def test_a_page_without_its_parent(self, make_backend: MakeBackend) -> None:
        """It may be stored or refused; what is refused is not there."""
        with opened(make_backend) as backend:
            frames = Frames()
            result = backend.write([frames.chained(3)])[0]
            allowed = (Outcome.STORED, Outcome.PARENT_MISSING)
            require(result.outcome in allowed, f"a page without its parent is {result.outcome}")
            there = backend.exists([frames.name(3)])[0]
            require(there == result.outcome.is_stored, "a refused page exists")
            backend.delete([frames.name(3)])

    def test_namespaces_are_apart(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            one, other = Frames(), Frames()
            backend.write([one.write(1)])
            require(backend.exists([other.name(1)]) == [False], "a frame of another namespace")
            second = WriteRequest(other.name(1), None, 0, one.write(2).buffers)
            expect(backend.write([second]), [Outcome.STORED])
            expect_frame(backend, one, 1)
            backend.delete([one.name(1), other.name(1)])

    # ── what is there ────────────────────────────────────────────────────────────────────────────

    def test_scan(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            one, other = Frames(), Frames()
            backend.write([one.write(1), one.write(2), other.write(3)])
            found = {stored.object: stored for stored in backend.scan(one.namespace)}
            require(set(found) == {one.name(1), one.name(2)}, "scan of a namespace is wrong")
            least = min(stored.nbytes for stored in found.values())
            require(least >= HEADER + PAYLOAD, "scan gives fewer bytes than were stored")
            everything = {stored.object for stored in backend.scan()}
            require({*found, other.name(3)} <= everything, "scan does not give all objects")
            backend.delete([one.name(1), one.name(2), other.name(3)])

    def test_usage(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames, before = Frames(), backend.usage()
            backend.write([frames.write(1), frames.write(2)])
            after = backend.usage()
            require(after.objects == before.objects + 2, "usage counts objects wrong")
            grown = after.used_bytes - before.used_bytes
            require(grown >= 2 * (HEADER + PAYLOAD), f"two frames took {grown} bytes")
            backend.delete([frames.name(1), frames.name(2)])
            require(backend.usage() == before, "usage is not what it was after a delete")

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def test_calls_at_once(self, make_backend: MakeBackend) -> None:
        with opened(make_backend) as backend:
            frames, threads, each = Frames(), 8, 8

            def work(thread: int) -> None:
                for i in range(thread * each, (thread + 1) * each):
                    expect(backend.write([frames.write(i)]), [Outcome.STORED])
                    expect_frame(backend, frames, i)

            at_once(threads, work)
            backend.delete([frames.name(i) for i in range(threads * each)])

    def test_one_winner_a_name(self, make_backend: MakeBackend) -> None:
        """Many write one object at once: one STORED, the others EXISTS, one whole frame."""
        with opened(make_backend) as backend:
            frames, threads = Frames(), 8
            outcomes: list[Outcome] = []

            def work(thread: int) -> None:
                buffers = frames.write(thread).buffers
                request = WriteRequest(frames.name(99), None, 0, buffers)
                outcomes.append(backend.write([request])[0].outcome)

            at_once(threads, work)
            require(outcomes.count(Outcome.STORED) == 1, f"outcomes of one name: {outcomes}")
            require(outcomes.count(Outcome.EXISTS) == threads - 1, f"outcomes: {outcomes}")
            read = frames.read(99)
            expect(backend.read([read]), [Outcome.LOADED])
            whole = {frames.data(thread) for thread in range(threads)}
            require(content(read) in whole, "the frame is a mixture of two writes")
            backend.delete([frames.name(99)])

    def test_data_before_name(self, make_backend: MakeBackend) -> None:
        """Whatever a reader finds while frames come and go is complete."""
        with opened(make_backend) as backend:
            frames, rounds = Frames(), 60
            done = threading.Event()
            request = frames.write(1)

            def work(thread: int) -> None:
                if thread == 0:
                    try:
                        for _ in range(rounds):
                            backend.write([request])
                            backend.delete([request.object])
                    finally:
                        done.set()
                while not done.is_set():
                    read = frames.read(1)
                    result = backend.read([read])[0]
                    if result.outcome is not Outcome.MISSING:
                        expect([result], [Outcome.LOADED])
                        require(content(read) == frames.data(1), "a reader saw an unfinished frame")

            at_once(3, work)
