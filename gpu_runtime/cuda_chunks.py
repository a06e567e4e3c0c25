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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.cuda_driver import Numbers
from kvstrata.gpu_runtime.cuda_events import ReusedEvent
from kvstrata.gpu_runtime.device_pages import PageCopy

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("enqueue.c")
COMPILE_S = 60.0


@dataclass(eq=False, slots=True)
class Step:
    """What one chunk's turn needs, again and again: an order for the kernel, and two events."""

    chunk: torch.Tensor
    pinned: torch.Tensor
    """The order, as the host writes it: int64 [HEADER + 2 * ORDER_PAGES]."""
    order: torch.Tensor
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


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The function of `enqueue.c`; None, and a line in the log, where it cannot be compiled."""
    names = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    compiler = next((name for name in names if name and shutil.which(name[0])), None)
    if compiler is None:
        logger.info("there is no C compiler: copies are enqueued by Python, which takes longer")
        return None
    with TemporaryDirectory(prefix="kvstrata-") as folder:
        library = f"{folder}/enqueue.so"
        command = [*compiler, "-O2", "-shared", "-fPIC", "-w", "-o", library, str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            return ctypes.CDLL(library).kvstrata_enqueue
        except (OSError, subprocess.SubprocessError) as exc:
            why = getattr(exc, "stderr", b"") or str(exc).encode()
            logger.warning(
                "%s cannot compile %s, so Python enqueues copies, which takes longer: %s",
                compiler[0],
                SOURCE,
                why.decode(errors="replace")[:2000],
            )
            return None


class ChunkLoop:
    """Of one direction. Called by the thread of its stream only."""

    def __init__(self, steps: Sequence[Step], *, header: int, most_pages: int) -> None:
        """`header`: numbers of an order before those of pages, of which there are `most_pages`."""
        self._call = compiled()
        self._driver = cuda_driver.addresses()
        self._header = header
        rows = [(s.address, s.numbers.ctypes.data, s.moved.handle, s.bussed.handle) for s in steps]
        self._steps = np.array(rows, np.int64)
        self._graphs: list[Numbers] = []
        self._scratch = np.empty(3 * most_pages, np.int64)

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
    ) -> tuple[int, int]:
        """Enqueue `nbytes` of each page in chunks that begin at `borders`, from step `turn` on, by
        the kernels that were added as `number`. Streams are handles. Returns the next turn, and the
        driver's code: it stops at the first call that was refused."""
        layout, pieces = copy.memory.layout, copy.pieces
        job = np.array(
            [
                turn, len(self._steps), out, kernels, bus,
                copy.host_address + pieces.start * layout.piece_bytes, copy.host_step, nbytes,
                joins, copy.memory.host_chunk_pages,
                self._header, pieces.start, len(pieces), nbytes // layout.word_bytes,
                len(borders) - 1,
            ],
            np.int64,
        )  # fmt: skip
        arrays = (
            self._driver, self._steps, self._graphs[number], np.array(borders, np.int64),
            np.ascontiguousarray(copy.pages, np.int64),
            np.ascontiguousarray(copy.slots, np.int64), self._scratch, job,
        )  # fmt: skip
        code = int(self._call(*[cuda_driver.pointer(array) for array in arrays]))
        return int(job[0]), code
