"""Host staging: shared page-first memory that is lent to one operation at a time."""

from kvstrata.staging.base import SlotKind, SlotRequest, Slots, StagingSettings
from kvstrata.staging.memory import ALIGNMENT, SharedRegion, aligned
from kvstrata.staging.pages import Pages, PageState, PageTable, stamps
from kvstrata.staging.pool import PinnedHostBufferPool

__all__ = [
    "ALIGNMENT",
    "PageState",
    "PageTable",
    "Pages",
    "PinnedHostBufferPool",
    "SharedRegion",
    "SlotKind",
    "SlotRequest",
    "Slots",
    "StagingSettings",
    "aligned",
    "stamps",
]
