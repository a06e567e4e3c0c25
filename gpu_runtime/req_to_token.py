"""ReqToToken: where the KV of each position of each request is, as device tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch


class ReqToToken:
    """int32 [requests, context tokens] a component: the token slot, page · page_tokens + offset.

    Written and read on the compute stream only, so a row that is set up for batch N+1 while N runs
    is ordered behind N.
    """

    def __init__(
        self,
        components: Sequence[str],
        max_requests: int,
        max_context_tokens: int,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self.page_tokens = page_tokens
        padded = -(-max_context_tokens // page_tokens) * page_tokens
        self.tables = {
            name: torch.zeros((max_requests, padded), dtype=torch.int32, device=device)
            for name in components
        }
        self._offsets = torch.arange(page_tokens, dtype=torch.int32, device=device)

    def set_pages(
        self, component: str, slot: int, first_index: int, pages: npt.NDArray[np.int64]
    ) -> None:
        """Positions of page indices `first_index …` of request row `slot` are in `pages`."""
        if not len(pages):
            return
        table = self.tables[component]
        bases = torch.from_numpy(pages).to(table.device, torch.int32) * self.page_tokens
        start = first_index * self.page_tokens
        stop = start + len(pages) * self.page_tokens
        table[slot, start:stop] = (bases[:, None] + self._offsets).flatten()

    def slots(self, component: str, slot: int, start: int, stop: int) -> torch.Tensor:
        """Token slots of positions `start … stop - 1`, int32, on the device."""
        return self.tables[component][slot, start:stop]

    def packed(self, component: str, spans: Iterable[tuple[int, int, int]]) -> torch.Tensor:
        """Token slots of positions of several rows, one after another: (row, start, stop) each."""
        table = self.tables[component]
        return torch.cat([table[slot, start:stop] for slot, start, stop in spans])

    def leading(self, component: str, slots: Sequence[int], stop: int) -> torch.Tensor:
        """Token slots of positions `0 … stop - 1` of several rows, int32 [rows, stop]. Behind the
        pages of a row stands what an earlier request left: mask it."""
        table = self.tables[component]
        return table[torch.tensor(slots, device=table.device), :stop]
