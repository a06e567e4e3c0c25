"""CUDA events that are recorded again and again, without giving the interpreter lock away."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.gpu_runtime import cuda_driver


class ReusedEvent:
    """Who waits for it, waits for the last `record`. Other than torch's, its short calls keep the
    interpreter lock (see `cuda_driver`). The host spins for it: streams and queries are faster
    than for one that lets the host sleep (cuEventCreate in CUDA's documentation)."""

    def __init__(self, stream: torch.cuda.Stream, *, timing: bool = False) -> None:
        """Recorded on `stream` already."""
        make: Any = torch.cuda.Event
        self._torch = make(enable_timing=timing)
        self._torch.record(stream)  # torch makes it now
        self.handle = int(self._torch.cuda_event)
        """As the driver knows it."""

    def record(self, stream: torch.cuda.Stream, *, may_block: bool = False) -> None:
        """`may_block`: others fill this stream, so that the driver may wait for room. Then the lock
        is given away: what makes room may need it."""
        if may_block:
            self._torch.record(stream)
        else:
            cuda_driver.record(self.handle, stream.cuda_stream)

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """What `stream` does next waits for the event."""
        cuda_driver.wait(stream.cuda_stream, self.handle)

    def has_passed(self) -> bool:
        return cuda_driver.has_passed(self.handle)

    def synchronize(self) -> None:
        if not self.has_passed():
            self._torch.synchronize()

    def ms_until(self, later: ReusedEvent) -> float:
        """Of two that have passed and were made with `timing`; a float of 32 bits."""
        return float(self._torch.elapsed_time(later._torch))
