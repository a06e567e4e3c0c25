"""Drafters: who guesses the next tokens, for the model to verify in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Drafter(Protocol):
    """Guesses. Called on the compute stream's thread for each greedy row that decodes."""

    def propose(self, tokens: npt.NDArray[np.int32], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow `tokens` (all of a request's, from position 0);
        fewer or none where it has no idea."""
        ...


class PromptLookup:
    """Proposes what followed the last `longest … 1` tokens when they came before, most recently.

    Looks back over `window` tokens at most.
    """

    def __init__(self, longest: int = 3, window: int = 8192) -> None:
        self._longest, self._window = longest, window

    def propose(self, tokens: npt.NDArray[np.int32], limit: int) -> list[int]:
        tokens = tokens[-self._window :]
        if limit < 1:
            return []
        for n in range(min(self._longest, len(tokens) - 1), 0, -1):
            before = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
            places = np.flatnonzero((before == tokens[-n:]).all(axis=1))
            if len(places):
                follows = int(places[-1]) + n
                return [int(t) for t in tokens[follows : follows + limit]]
        return []
