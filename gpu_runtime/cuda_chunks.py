"""What a chunk's turn needs, and the loop over the chunks of a copy in C.

The loop runs without the interpreter lock, and takes a fraction of the time that Python takes when
it was not there for some milliseconds. It is compiled when it is first needed, by the compiler that
Triton needs as well; where there is none `CudaCopies` does the same in Python.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.cuda_driver import Numbers
from kvstrata.gpu_runtime.cuda_events import ReusedEvent
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.gpu_runtime.hurry import Hurry

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("enqueue.c")
HEADER = 8
"""Numbers before the page numbers of an order: pages, first piece, pieces, words from a page of the
chunk to the next, words from the chunk's address to its first page, and whether the places of the
pages in the chunk follow; else they are one behind the other. The rest is not used."""
COMPILE_S = 60.0
PAUSE = 440
"""The host sleeps a nanosecond for so many bytes of a chunk from one look whether the chunk before
is ready to the next: an eighth of the time that it moves, at 55 GB/s. A timer adds 0.06 ms."""
_STOPPED = -1
"""Behind the kernel that was late."""
_compiling = threading.Lock()
_REFUSED = (
    "cuEventSynchronize", "cuStreamWaitEvent", "cuEventQuery", "cuGraphLaunch", "cuEventRecord",
    "a copy through chunks",
)  # fmt: skip
"""By the numbers of `enqueue.c`."""


class _Copy(ctypes.Structure):
    """As in `enqueue.c`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "turn", "ring", "out", "hurry", "pause", "kernels", "bus", "host", "host_step",
            "nbytes", "joins", "border", "header", "first_piece", "pieces", "page_words", "chunks",
            "chunk", "late", "late_graph", "stops", "leaves", "refused",
        )
    ]  # fmt: skip


@dataclass(eq=False, slots=True)
class Step:
    """What one chunk's turn needs, again and again: an order for the kernel, and two events."""

    turn: int
    """Its place in the ring."""
    chunk: torch.Tensor
    pinned: torch.Tensor
    """The order, as the host writes it: int64 [HEADER + 2 * ORDER_PAGES]."""
    order: torch.Tensor
    """The same on the device, as the kernel reads it."""
    moved: ReusedEvent
    """Behind the kernel."""
    bussed: ReusedEvent
    """Behind the copy engine."""
    numbers: Numbers = field(init=False)
    """`pinned`."""
    address: int = field(init=False)
    """Of `chunk`."""
    captured: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    """The kernel with this chunk and order, by the number of the memory: what can be launched."""

    def __post_init__(self) -> None:
        self.numbers, self.address = self.pinned.numpy(), self.chunk.data_ptr()

    def write_order(self, copy: PageCopy, *, page_bytes: int) -> Numbers:
        """For all pages of `copy`, one behind the other in the chunk, or in their places in one
        that is staging on the device. `page_bytes`: from a page there to the next. Returns the copy
        that brings it to the device: addresses there and here, and bytes; int64 [3, 1]."""
        names, at, word = [copy.pages], 0, copy.memory.layout.word_bytes
        if copy.is_staged_on_device:
            names.append(copy.slots)
            at = (copy.part_address - self.address) // word
        pieces, end = copy.pieces, HEADER + len(names) * len(copy.pages)
        self.numbers[:5] = len(copy.pages), pieces.start, len(pieces), page_bytes // word, at
        self.numbers[5] = copy.is_staged_on_device
        self.numbers[HEADER:end] = np.concatenate(names)
        return np.array([[self.order.data_ptr()], [self.pinned.data_ptr()], [8 * end]], np.int64)


def borders_of(count: int, most: int, *, first: int = 0, last: int = 0) -> list[int]:
    """Where the chunks of `count` pages begin, and the end: of at most `most` each, and about as
    large, as a small one costs as much. But `first` and `last` are, where they are not 0."""
    first = min(first, most, count)
    last = min(last, most, count - first)
    rest = count - first - last
    turns = max(1, -(-rest // most))
    borders = range(first, count - last, max(1, -(-rest // turns)))
    return [*([0] if first else []), *borders, *([count - last] if last else []), count]


def compiled() -> Any:
    """The function of `enqueue.c`; None, and a line in the log, where no compiler makes it. Any
    thread; the first call takes a tenth of a second."""
    with _compiling:
        return _compile()


@lru_cache(maxsize=1)
def _compile() -> Any:
    failures = []
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        try:
            command = shlex.split(name or "")
            if command and shutil.which(command[0]):
                return _compile_by(command)
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as exc:
            said = getattr(exc, "stderr", None) or b""
            failures.append(f"{name}: {exc} {said.decode(errors='replace')[:1000]}")
    logger.warning(
        "no C compiler makes a library of %s, so Python enqueues copies, which takes longer: %s",
        SOURCE,
        "; ".join(failures) or "there is none",
    )
    return None


def _compile_by(command: list[str]) -> Any:
    with TemporaryDirectory(prefix="kvstrata-", ignore_cleanup_errors=True) as folder:
        made = Path(folder, "enqueue.so")
        subprocess.run(
            [
                *command, "-std=c11", "-O2", "-shared", "-fPIC",
                f"-DCOPY_BYTES={ctypes.sizeof(_Copy)}", "-o", str(made), str(SOURCE),
            ],
            check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_S,
        )  # fmt: skip
        library = made.read_bytes()
    fd = os.memfd_create("kvstrata-enqueue")  # the folder may be one that nothing is executed from
    try:
        os.write(fd, library)
        return ctypes.CDLL(f"/proc/self/fd/{fd}").kvstrata_enqueue
    finally:
        os.close(fd)


class ChunkLoop:
    """Of one direction. Called by the thread of its stream only."""

    def __init__(
        self, function: Any, steps: Sequence[Step], hurry: Hurry, *, most_pages: int
    ) -> None:
        """`function`: what was compiled. `most_pages`: of a chunk."""
        self._function, self._hurry = function, hurry
        self._driver = cuda_driver.addresses()
        self._most_pages = most_pages
        rows = [
            (s.address, s.pinned.data_ptr(), s.order.data_ptr(), s.moved.handle, s.bussed.handle)
            for s in steps
        ]
        self._steps = np.array(rows, np.int64)
        self._graphs: list[Numbers] = []
        self._scratch = np.empty(3 * (most_pages + 1), np.int64)

    def add_kernels(self, graphs: Sequence[int]) -> None:
        """Of memory that is prepared: the graph of each step."""
        self._graphs.append(np.array(graphs, np.int64))

    def run(
        self,
        copy: PageCopy,
        borders: Sequence[int],
        number: int,
        turn: int,
        *,
        nbytes: int,
        joins: bool,
        kernels: int,
        bus: int,
        out: bool,
        late: tuple[int, int] | None,
        caught_up: Callable[[], None],
        leaves: bool,
    ) -> tuple[int, int, str]:
        """Enqueue `nbytes` of each page in chunks that begin at `borders`, from step `turn` on, by
        the kernels that were added as `number`. Streams are handles. `late`: the turn and number of
        a kernel that another copy left, as this one `leaves` its last; `caught_up` is called when
        it is launched, and nothing behind it. Returns the next turn, and the driver's code and the
        name of the call that it refused: there it stops."""
        pieces, word = copy.pieces, copy.memory.layout.word_bytes
        assert len(copy.slots) == len(copy.pages) == borders[-1], "chunks of all pages"
        assert max((end - at for at, end in pairwise(borders)), default=0) <= self._most_pages
        assert copy.memory.host_chunk_pages > 0
        job = _Copy(
            turn=turn, ring=len(self._steps), out=out, hurry=self._hurry.word.ctypes.data,
            pause=PAUSE, kernels=kernels, bus=bus, host=copy.part_address,
            host_step=copy.host_step, nbytes=nbytes, joins=joins,
            border=copy.memory.host_chunk_pages, header=HEADER, first_piece=pieces.start,
            pieces=len(pieces), page_words=nbytes // word, chunks=len(borders) - 1, chunk=0,
            late=-1, stops=late is not None, leaves=leaves,
        )  # fmt: skip
        if late is not None:
            job.late, job.late_graph = late[0], self._graphs[late[1]][late[0]]
        arrays = (
            self._driver, self._steps, self._graphs[number], np.array(borders, np.int64),
            np.ascontiguousarray(copy.pages, np.int64),
            np.ascontiguousarray(copy.slots, np.int64), self._scratch,
        )  # fmt: skip
        pointers = [cuda_driver.pointer(array) for array in arrays]
        run = partial(self._function, *pointers, ctypes.byref(job))
        code = int(run())
        if code == _STOPPED:
            caught_up()
            job.stops = 0
            code = int(run())
        return int(job.turn), code, _REFUSED[job.refused]
