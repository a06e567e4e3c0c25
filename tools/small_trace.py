"""Make the small trace that the package ships: `python -m kvstrata.tools.small_trace > FILE`.

Synthetic: conversations of several turns that share a system prompt and arrive interleaved, as in
the traces that Mooncake published. The same seed makes the same bytes everywhere.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field

from kvstrata.tools.trace import BLOCK_TOKENS

SEED = 20240507
CONVERSATIONS = 12
TURNS = 5
SYSTEM_BLOCKS = 2


@dataclass(slots=True)
class _Conversation:
    length: int
    """Tokens so far, answers included."""
    blocks: list[int] = field(default_factory=list)
    """Ids of its full blocks."""


def small_trace(seed: int = SEED) -> str:
    """The trace as text, one JSON object a line."""
    rng = random.Random(seed)
    next_id = SYSTEM_BLOCKS
    system = list(range(SYSTEM_BLOCKS))
    talks = [
        _Conversation(SYSTEM_BLOCKS * BLOCK_TOKENS, list(system)) for _ in range(CONVERSATIONS)
    ]
    left = [TURNS] * CONVERSATIONS
    lines: list[str] = []
    timestamp_ms = 0
    while any(left):
        waiting = [i for i, turns in enumerate(left) if turns]
        i = waiting[_draw(rng, 0, min(len(waiting), 6) - 1)]
        left[i] -= 1
        talk = talks[i]
        talk.length += _draw(rng, 200, 2400)
        while len(talk.blocks) < talk.length // BLOCK_TOKENS:
            talk.blocks.append(next_id)
            next_id += 1
        ids = list(talk.blocks)
        if talk.length % BLOCK_TOKENS:  # a begun block has an id of its own until it is full
            ids.append(next_id)
            next_id += 1
        output_length = _draw(rng, 20, 400)
        request = {
            "timestamp": timestamp_ms,
            "input_length": talk.length,
            "output_length": output_length,
            "hash_ids": ids,
        }
        lines.append(json.dumps(request))
        talk.length += output_length
        timestamp_ms += _draw(rng, 0, 3) * 1000
    return "\n".join(lines) + "\n"


def _draw(rng: random.Random, low: int, high: int) -> int:
    """A whole number in `low … high`, from `random()`: its sequence is the same in every Python."""
    return low + int(rng.random() * (high - low + 1))


if __name__ == "__main__":
    sys.stdout.write(small_trace())
