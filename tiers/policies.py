"""What is decided by taste: each kind of policy is an interface of one or two questions.

To add one, subclass the interface and enter the class in `POLICIES` under its name in the config.
Policies see values only, keep no references, and never block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvstrata.boundary import StatusReport
from kvstrata.errors import ConfigError, Where
from kvstrata.handles import StagingMode, Tier

if TYPE_CHECKING:
    from kvstrata.tiers.node import Node


class EvictionPolicy(ABC):
    """Which of the pages that may leave a tier leaves it first."""

    @abstractmethod
    def priority(self, node: Node) -> float:
        """The node with the least value goes first. A pure function of the node, which does not
        fall while the node is used; called when a node becomes a candidate and when it is taken."""


class LRU(EvictionPolicy):
    """Least recently used first."""

    def priority(self, node: Node) -> float:
        return node.last_used


class WritePolicy(ABC):
    """When pages are copied down."""

    @abstractmethod
    def backup_target(self, node: Node, ready: Tier, mode: StagingMode) -> Tier | None:
        """`node` has just become READY in `ready` (L1 or L2): where should it be copied now?"""


class WriteThrough(WritePolicy):
    """Copy at once, one tier at a time, whatever is not there yet."""

    def backup_target(self, node: Node, ready: Tier, mode: StagingMode) -> Tier | None:
        if mode is StagingMode.CACHE and ready is Tier.L1:
            return None if node.l2 else Tier.L2
        return None if node.l3 else Tier.L3


class PrefetchPolicy(ABC):
    """How much is fetched from L3 for a request before it may run."""

    @abstractmethod
    def wanted(self, located: int) -> int:
        """How many of the `located` pages that L3 seems to hold are fetched."""


class WaitComplete(PrefetchPolicy):
    """Fetch all, and wait until the fetch has ended."""

    def wanted(self, located: int) -> int:
        return located


class RestorePolicy(ABC):
    """Restore a page or compute it again."""

    @abstractmethod
    def restored(self, pages: int, page_tokens: int, status: StatusReport | None) -> int:
        """How many of the `pages` leading pages that L2 or L3 hold are restored; `status` is the
        last report of the runtime, with what transfers and prefill cost."""


class AlwaysRestore(RestorePolicy):
    """Whatever it costs."""

    def restored(self, pages: int, page_tokens: int, status: StatusReport | None) -> int:
        return pages


EVICTION: dict[str, type[EvictionPolicy]] = {"lru": LRU}
WRITE: dict[str, type[WritePolicy]] = {"write_through": WriteThrough}
PREFETCH: dict[str, type[PrefetchPolicy]] = {"wait_complete": WaitComplete}
RESTORE: dict[str, type[RestorePolicy]] = {"always": AlwaysRestore}

POLICIES: dict[str, dict[str, type]] = {
    "eviction": {**EVICTION},
    "write": {**WRITE},
    "prefetch": {**PREFETCH},
    "restore": {**RESTORE},
}
"""By the name of the setting, then by its value."""


def policy_class(kind: str, name: str) -> type:
    """The class for `policies.<kind> = "<name>"`; `ConfigError` lists the names there are."""
    known = POLICIES[kind]
    if name not in known:
        raise ConfigError(
            f"there is no policy {name!r}",
            remedy=f"use one of: {', '.join(sorted(known))}",
            where=Where(key=f"policies.{kind}"),
        )
    return known[name]
