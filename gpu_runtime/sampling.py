"""Sampling parameters of a request, and how a token is drawn from logits.

The parameters travel as the opaque payload of `OpenRow`; what else sampling needs stays in the
runtime. A draw depends on the logits, the seed and the position alone, so neither the batch that a
row happens to share nor a prefix that came from a cache changes it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct

import msgspec
import torch

from kvstrata.errors import InputError, Where

_NOISE_TAG = b"kvstrata/sampling/1\0"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen. The default, and `temperature` 0, is greedy."""

    temperature: float = 0.0
    """Divides the logits; 0: the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    seed: int = 0
    """64 bits. Requests with equal seeds draw equal numbers at equal positions."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def encode(self) -> bytes:
        """The payload of a request: msgpack. Raises InputError for values out of range."""
        check_params(self)
        return msgspec.msgpack.encode(self)


GREEDY = SamplingParams()


@functools.lru_cache(maxsize=4096)
def decode_params(payload: bytes) -> SamplingParams:
    """The parameters in a payload; b"" is greedy. Raises InputError."""
    if not payload:
        return GREEDY
    try:
        params = msgspec.msgpack.decode(payload, type=SamplingParams)
    except msgspec.DecodeError as exc:
        raise InputError(
            f"a payload that is no SamplingParams: {exc}",
            remedy="make it with SamplingParams(…).encode()",
            where=Where(key="payload"),
        ) from exc
    check_params(params)
    return params


def check_params(params: SamplingParams) -> None:
    """Raise InputError for the first value that is out of range."""
    ranges = {
        "temperature": (0.0 <= params.temperature < math.inf, "0 or more"),
        "top_k": (params.top_k >= 0, "0 (all) or more"),
        "top_p": (0.0 < params.top_p <= 1.0, "above 0, and at most 1"),
        "seed": (0 <= params.seed < 2**64, "a number of 64 bits"),
    }
    for name, (holds, wanted) in ranges.items():
        if not holds:
            raise InputError(
                f"{name} is {getattr(params, name)}",
                remedy=f"it must be {wanted}",
                where=Where(key=f"sampling.{name}"),
            )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that `seed` and `position` decide, the same in every process."""
    digest = hashlib.sha256(_NOISE_TAG + struct.pack("<QQ", seed, position)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` from `logits` [vocabulary], on their device.

    By inversion, in float64, over the tokens from the most to the least likely. The largest of the
    logits must be finite.
    """
    assert not params.greedy, "greedy tokens are not drawn"
    ordered, tokens = logits.to(torch.float64).sort(descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    # The largest becomes 0 first: a tiny temperature must not make it infinite.
    below = torch.softmax((ordered - ordered[0]) / params.temperature, dim=0).cumsum(0)
    if params.top_p < 1.0:
        # The token that crosses top_p still belongs to them, so at least one does.
        kept = int((below < params.top_p).sum()) + 1
        below = below[:kept]
    point = uniform(params.seed, position) * below[-1]
    place = torch.searchsorted(below, point, right=True).clamp(max=len(below) - 1)
    return int(tokens[place])
