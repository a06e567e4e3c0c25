"""`TransformersRunner`: a Hugging Face decoder whose KV is in the runtime's pools.

The model keeps no cache of its own. Its attention (`hf_attention`) writes and reads the pools
through ReqToToken, so a row's prefix may have been computed in any batch, attached from L1,
restored from L2 or fetched from L3. Rotary embeddings are applied before: a key belongs to its
position.

What is bit-equal: a step's logits depend on the bytes in the pools and on the shapes of the step.
Rows that share a step, the sizes of chunks and the padding of decodes change the order in which
floating-point kernels add, so between different shapes logits are close and not equal, as they are
with any batching server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ConfigError, InputError, Where
from kvstrata.gpu_runtime.base import ForwardContext, ForwardResult, ForwardRow
from kvstrata.gpu_runtime.hf_attention import NAME, PagedStep, Span, register
from kvstrata.gpu_runtime.hf_drafting import Drafter
from kvstrata.gpu_runtime.hf_models import component_spec_of
from kvstrata.gpu_runtime.pools import ComponentPool
from kvstrata.gpu_runtime.sampling import SamplingParams, decode_params, draw

Weights = Callable[[bytes], Mapping[str, torch.Tensor]]
"""The weights that the payload of a `NewEpoch` names, as `state_dict` calls them, on any device.
Called on the compute stream's thread: it may block, and serving waits for it."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One row of a step: where it is, what it computes, how its tokens are chosen."""

    index: int
    """Of the row in the call."""
    row: ForwardRow
    params: SamplingParams
    draft: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.row.count + len(self.draft)

    @property
    def kept(self) -> int:
        """Positions whose logits it needs, the last ones."""
        return 1 + len(self.draft) if self.row.samples else 0

    def tokens(self) -> npt.NDArray[np.int32]:
        start = self.row.start
        known = self.row.tokens[start : start + self.row.count]
        return np.concatenate((known, np.asarray(self.draft, np.int32)))


class TransformersRunner:
    """Implements `ModelRunner` (see there for threads and what is in place when).

    Takes `model` over: sets it to evaluation, replaces its attention, and moves it to the device of
    the pools when a runtime is made with it. One model may serve several runners, which change its
    weights for all then (`new_weights`).
    With a `drafter`, greedy rows that decode verify up to `draft_tokens` guesses a step (counters
    `drafted` and `accepted`); their tokens are those of plain greedy decoding. The KV of a refused
    guess lies behind the row's KV, where nothing reads it before it is written again.

    Raises ConfigError for a model whose KV the pools cannot hold.
    """

    def __init__(
        self,
        model: Any,
        *,
        drafter: Drafter | None = None,
        draft_tokens: int = 4,
        weights: Weights | None = None,
    ) -> None:
        self.spec = component_spec_of(model)
        register()
        model.eval()
        model.set_attn_implementation(NAME)
        self.model = model
        self.check_integrity()
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._drafter, self._draft_tokens = drafter, draft_tokens
        self._weights = weights
        self._pool: ComponentPool | None = None

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        """A row with a token outside of the vocabulary, or a payload that is no `SamplingParams`,
        fails alone."""
        assert self._pool is not None, "bind comes first"
        works: list[_Work] = []
        failed: dict[int, str] = {}
        for index, row in enumerate(rows):
            try:
                works.append(self._work(index, row))
            except InputError as error:
                failed[index] = str(error)
        works.sort(key=lambda work: work.count)  # as PagedStep needs them
        sampled, counters = self._step(works, self._pool, context) if works else ({}, {})
        tokens = [sampled.get(i, []) for i in range(len(rows))]
        return ForwardResult(tokens, dict(counters), failed)

    @torch.inference_mode()
    def _step(
        self, works: Sequence[_Work], pool: ComponentPool, context: ForwardContext
    ) -> tuple[dict[int, list[int]], Counter[str]]:
        return self._choose(works, self._logits(works, pool, context))

    def bind(self, context: ForwardContext) -> None:
        """The pools must fit the model, which moves to their device. Raises ConfigError."""
        pool = next(iter(context.pools.values()))
        mine, theirs = self.spec, pool.spec
        fields = ("layers", "kv_heads", "head_dim", "dtype")
        fits = all(getattr(mine, f) == getattr(theirs, f) for f in fields)
        if len(context.pools) != 1 or not fits:
            raise ConfigError(
                f"the model needs one component like {mine}, the runtime has "
                f"{[p.spec for p in context.pools.values()]}",
                where=Where(key="pools.components"),
                remedy="make them with component_spec_of(model)",
            )
        if self.model.device != pool.data.device:
            self.model.to(pool.data.device)
        self._pool = pool

    @torch.no_grad()
    def new_weights(self, payload: bytes) -> None:
        """Copy the weights that `weights` finds for `payload` over those of the model, in place.
        Raises ConfigError, with nothing changed, when they are of another model."""
        if self._weights is None:
            raise ConfigError(
                "nobody said where other weights come from",
                remedy="give TransformersRunner(…, weights=…)",
                where=Where(key="model"),
            )
        new, mine = self._weights(payload), self.model.state_dict()
        forms = [
            {name: (tuple(w.shape), w.dtype) for name, w in found.items()} for found in (mine, new)
        ]
        if forms[0] != forms[1]:
            odd = sorted({name for name, _ in forms[0].items() ^ forms[1].items()})
            raise ConfigError(
                f"weights of another model: {', '.join(odd[:3])} and {max(0, len(odd) - 3)} more",
                remedy="only the values of weights can change; start anew for another model",
                where=Where(key="model"),
            )
        for name, weight in mine.items():
            weight.copy_(new[name])

    # ── before ───────────────────────────────────────────────────────────────────────────────────

    def _work(self, index: int, row: ForwardRow) -> _Work:
        computed = row.tokens[row.start : row.start + row.count]
        # A token out of range is an assertion on a GPU, which would take the whole process down.
        if computed.min() < 0 or computed.max() >= self._vocabulary:
            raise InputError(
                f"a token that is not in the vocabulary of {self._vocabulary}: {computed.max()}",
                remedy="use the tokenizer of this model",
                where=Where(key="tokens"),
            )
        params = decode_params(row.payload)
        return _Work(index, row, params, self._draft(row, params))

    def _draft(self, row: ForwardRow, params: SamplingParams) -> tuple[int, ...]:
        limit = min(self._draft_tokens, row.room - 1)
        if self._drafter is None or not row.samples or not params.greedy or limit < 1:
            return ()
        draft = tuple(self._drafter.propose(row.tokens, limit))[:limit]
        return draft if all(0 <= token < self._vocabulary for token in draft) else ()

    # ── the step ─────────────────────────────────────────────────────────────────────────────────

    def _logits(
        self, works: Sequence[_Work], pool: ComponentPool, context: ForwardContext
    ) -> torch.Tensor:
        """Logits [positions that are needed, vocabulary], in the order of `works`."""
        spans: list[Span] = []
        kept: list[int] = []
        first = 0
        for work in works:
            spans.append(Span(work.row.slot, work.row.start, work.count, first))
            first += work.count
            kept += range(first - work.kept, first)
        tokens = np.concatenate([work.tokens() for work in works])
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        device = pool.data.device
        step = PagedStep(spans, pool, context.req_to_token)
        output = self.model(
            input_ids=torch.from_numpy(tokens).to(device, torch.int64)[None],
            position_ids=torch.from_numpy(positions).to(device, torch.int64)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.int64, device=device),
            kvstrata_step=step,
        )
        step.check_complete()
        logits: torch.Tensor = output.logits[0]
        return logits

    # ── after ────────────────────────────────────────────────────────────────────────────────────

    def _choose(
        self, works: Sequence[_Work], logits: torch.Tensor
    ) -> tuple[dict[int, list[int]], Counter[str]]:
        """New tokens by index of the row, and the counters. One transfer to the host for all
        greedy rows, one for each that is drawn."""
        counters: Counter[str] = Counter()
        sampled: dict[int, list[int]] = {}
        if not len(logits):
            return sampled, counters
        largest, likely = logits.max(dim=-1)
        finite, best = torch.stack((largest.isfinite().to(torch.int64), likely)).tolist()
        for work, at in _places(works):
            tokens = best[at : at + work.kept]
            if not all(finite[at : at + work.kept]):
                counters["nonfinite_logits"] += 1  # wrong weights or an overflow: greedy, counted
            elif not work.params.greedy:
                position = work.row.start + work.row.count
                tokens = [draw(logits[at], work.params, position)]
            agreed = _agreed(work.draft, tokens)
            sampled[work.index] = tokens[: agreed + 1]
            if work.draft:
                counters["drafted"] += len(work.draft)
                counters["accepted"] += agreed
        return sampled, counters

    def check_integrity(self) -> None:
        """Raise ConfigError when the model does not attend through the pools: its family does not
        let itself be changed, or somebody has changed it since."""
        found = self.model.config.get_text_config(decoder=True)._attn_implementation
        if found != NAME or self.model.training:
            raise ConfigError(
                f"{type(self.model).__name__} has attention {found!r}"
                f"{' and is in training' if self.model.training else ''}",
                remedy="use a family with AttentionInterface, and leave the model to the runner",
                where=Where(key="model"),
            )


def _places(works: Sequence[_Work]) -> Iterator[tuple[_Work, int]]:
    """Each work that samples, and the place of its first logits."""
    at = 0
    for work in works:
        if work.kept:
            yield work, at
        at += work.kept


def _agreed(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading guesses are what the model says itself."""
    for n, (guess, token) in enumerate(zip(draft, tokens, strict=False)):
        if guess != token:
            return n
    return len(draft)
