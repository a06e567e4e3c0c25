"""What copies through chunks are made of, once: the steps of a ring, and a kernel for each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.cuda_chunks import HEADER, Step
from kvstrata.gpu_runtime.cuda_events import ReusedEvent
from kvstrata.gpu_runtime.device_pages import DevicePages

HAS_TRITON = find_spec("triton") is not None
"""Without it torch gathers, with more launches and one more pass over the data."""
if HAS_TRITON:
    from kvstrata.gpu_runtime.gather import fetch_order, move_pieces

ORDER_PAGES = 2048
"""Most pages of one chunk."""


def new_steps(
    device: torch.device,
    count: int,
    chunk_bytes: int,
    kernels: torch.cuda.Stream,
    bus: torch.cuda.Stream,
) -> list[Step]:
    """A ring of steps that use two chunks in turn."""
    chunks = [torch.empty(chunk_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    numbers = HEADER + 2 * ORDER_PAGES
    return [
        Step(
            turn,
            chunks[turn % 2],
            torch.zeros(numbers, dtype=torch.int64, pin_memory=True),
            torch.zeros(numbers, dtype=torch.int64, device=device),
            ReusedEvent(kernels),
            ReusedEvent(bus),
        )
        for turn in range(count)
    ]


def capture(
    steps: Sequence[Step], memory: DevicePages, starts: torch.Tensor, *, out: bool
) -> list[tuple[torch.cuda.CUDAGraph, int]]:
    """The kernel for each step, as it was captured, and as it can be launched; all or none. It
    gathers, if `out`, or scatters. `starts`: of the pieces, int64 words, on the device."""
    device = starts.device
    layout, pool = memory.layout, memory.first_word
    grid = torch.cuda.get_device_properties(device).multi_processor_count

    def launch(step: Step) -> None:
        if out:  # else it comes with the pages
            fetch_order(step.pinned, step.order)
        move_pieces(
            pool,
            starts,
            step.order,
            step.chunk.view(pool.dtype),
            page_stride=layout.page_stride,
            piece_bytes=layout.piece_bytes,
            out=out,
            aligned=layout.is_multiple_of(16),
            grid=grid,
        )

    torch.cuda.synchronize(device)
    steps[0].pinned[0] = 0  # no pages
    stream = torch.cuda.Stream(priority=-1)  # a graph's kernels keep the priority
    with torch.cuda.stream(stream):
        steps[0].order.zero_()
        launch(steps[0])  # compiles, which a capture does not allow
    stream.synchronize()
    captured: list[tuple[torch.cuda.CUDAGraph, int]] = []
    try:
        with cuda_driver.no_collection():
            for step in steps:
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    launch(step)
                captured.append((graph, cuda_driver.instantiate(graph.raw_cuda_graph())))
    except BaseException:
        for _, kernel in captured:
            cuda_driver.destroy(kernel)
        raise
    return captured
