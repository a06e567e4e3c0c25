"""The return codes of Mooncake's client, one by one, and what each means for a page."""

from __future__ import annotations

import enum

from kvstrata.backends.base import PageResult
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageBusyError, StorageError, StorageUnavailableError


class Cause(enum.Enum):
    """What happened, in the words of this package. Counted under its value."""

    ABSENT = "absent"
    """Never stored, evicted, or being written by somebody else."""
    EXISTS = "exists"
    NO_SPACE = "no_space"
    """Also while an eviction is under way."""
    LEASE_EXPIRED = "lease_expired"
    """The transfer took longer than the lease: what arrived may be another object's bytes."""
    LEASED = "leased"
    """It cannot be removed now: somebody reads it."""
    SEGMENT_LOST = "segment_lost"
    """The transfer to or from the segment failed."""
    MASTER_AWAY = "master_away"
    BAD_SIZE = "bad_size"
    """The buffer is too small, or the object larger than any segment."""
    NOT_READY = "not_ready"
    """The replica is there and cannot be used now."""
    DISK = "disk"
    """A file of the store failed (SSD offload)."""
    REFUSED = "refused"
    """The library or the master does not do this here: a wrong setting."""
    INTERNAL = "internal"
    """Anything else."""


OK = 0
BAD_PARAMETERS = -600
TRANSFER_FAILED = -800
LEASE_EXPIRED = -707

CODES: dict[int, tuple[str, Cause]] = {
    -1: ("internal error", Cause.INTERNAL),
    -10: ("buffer overflow", Cause.NO_SPACE),
    -100: ("shard out of range", Cause.INTERNAL),
    -101: ("no segment", Cause.NO_SPACE),
    -102: ("segment exists", Cause.REFUSED),
    -103: ("client not known to the master", Cause.MASTER_AWAY),
    -200: ("no space", Cause.NO_SPACE),
    -300: ("invalid version", Cause.INTERNAL),
    -400: ("invalid key", Cause.REFUSED),
    -500: ("write failed", Cause.SEGMENT_LOST),
    BAD_PARAMETERS: ("invalid parameters or size", Cause.BAD_SIZE),
    -601: ("another client's object", Cause.REFUSED),
    -700: ("invalid write", Cause.NOT_READY),
    -701: ("invalid read", Cause.NOT_READY),
    -702: ("invalid replica", Cause.NOT_READY),
    -703: ("replica is not ready", Cause.ABSENT),
    -704: ("not found", Cause.ABSENT),
    -705: ("exists", Cause.EXISTS),
    -706: ("has a lease", Cause.LEASED),
    LEASE_EXPIRED: ("lease expired before the transfer ended", Cause.LEASE_EXPIRED),
    -708: ("is being copied", Cause.LEASED),
    -709: ("is not being copied", Cause.INTERNAL),
    -710: ("replica not found", Cause.ABSENT),
    -711: ("replica exists", Cause.EXISTS),
    -712: ("replica is gone", Cause.ABSENT),
    TRANSFER_FAILED: ("transfer failed", Cause.SEGMENT_LOST),
    -900: ("the master does not answer", Cause.MASTER_AWAY),
    -901: ("the master did not answer in time", Cause.MASTER_AWAY),
    -1000: ("etcd failed", Cause.MASTER_AWAY),
    -1001: ("key not in etcd", Cause.MASTER_AWAY),
    -1002: ("etcd transaction failed", Cause.MASTER_AWAY),
    -1003: ("etcd context cancelled", Cause.MASTER_AWAY),
    -1010: ("the master is not serving", Cause.MASTER_AWAY),
    -1011: ("not in this mode", Cause.REFUSED),
    -1100: ("file not found", Cause.ABSENT),
    -1101: ("file cannot be opened", Cause.DISK),
    -1102: ("file cannot be read", Cause.DISK),
    -1103: ("file cannot be written", Cause.DISK),
    -1104: ("invalid file buffer", Cause.DISK),
    -1105: ("file cannot be locked", Cause.DISK),
    -1106: ("invalid file handle", Cause.DISK),
    -1200: ("bucket not found", Cause.ABSENT),
    -1201: ("bucket exists", Cause.DISK),
    -1202: ("too many keys in a bucket", Cause.DISK),
    -1203: ("too many keys", Cause.DISK),
    -1300: ("offload is off", Cause.REFUSED),
    -1301: ("offload failed", Cause.DISK),
    -1400: ("task not found", Cause.INTERNAL),
    -1401: ("too many tasks", Cause.NOT_READY),
}
"""What the library says, and what it is to us. A code that is not here is `Cause.INTERNAL`."""

_OUTCOMES = {
    Cause.ABSENT: Outcome.MISSING,
    Cause.EXISTS: Outcome.EXISTS,
    Cause.NO_SPACE: Outcome.FULL,
    Cause.LEASE_EXPIRED: Outcome.TIMEOUT,
    Cause.LEASED: Outcome.OVERLOADED,
    Cause.SEGMENT_LOST: Outcome.UNAVAILABLE,
    Cause.MASTER_AWAY: Outcome.UNAVAILABLE,
    Cause.BAD_SIZE: Outcome.ERROR,
    Cause.NOT_READY: Outcome.UNAVAILABLE,
    Cause.DISK: Outcome.UNAVAILABLE,
    Cause.REFUSED: Outcome.ERROR,
    Cause.INTERNAL: Outcome.ERROR,
}


def cause_of(code: int) -> Cause:
    """The meaning of a negative return code."""
    return CODES.get(code, ("", Cause.INTERNAL))[1]


def describe(code: int) -> str:
    """The code in words, with its number."""
    return f"Mooncake {code}: {CODES.get(code, ('unknown code',))[0]}"


def failed_page(code: int) -> PageResult:
    """The result of a page whose call returned `code` (negative)."""
    cause = cause_of(code)
    message = "" if cause is Cause.ABSENT else f"{describe(code)} ({cause.value})"
    return PageResult(_OUTCOMES[cause], 0, message)


def storage_error(code: int, what: str) -> StorageError:
    """The error of a call that failed as a whole."""
    text = f"{what}: {describe(code)}"
    outcome = _OUTCOMES[cause_of(code)]
    if outcome is Outcome.UNAVAILABLE:
        return StorageUnavailableError(text)
    if outcome is Outcome.OVERLOADED:
        return StorageBusyError(text)
    return StorageError(text)
