"""Optional abilities of a ModelRunner. Its class says by its methods that it has one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvstrata.gpu_runtime.base import ForwardContext


@runtime_checkable
class SupportsBind(Protocol):
    """A ModelRunner that wants to see pools and device before its first step."""

    def bind(self, context: ForwardContext) -> None:
        """Called once, by the runtime's constructor, on the caller's thread: before any `forward`.
        May block (move a model to the device). What it raises, the constructor raises; ConfigError
        for pools that do not fit."""
        ...


@runtime_checkable
class SupportsNewWeights(Protocol):
    """A ModelRunner whose weights can change while it serves."""

    def new_weights(self, payload: bytes) -> None:
        """Compute with other weights from the next `forward` on; `payload` says which.

        Called where `forward` is, between two of its calls. What it raises fails the `NewEpoch`,
        and every row until another one: the weights may be half changed."""
        ...
