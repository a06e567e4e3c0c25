"""The master's HTTP server: is it serving, which segments and keys there are."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

from kvstrata.backends.mooncake.options import parse_address
from kvstrata.errors import StorageError, StorageUnavailableError

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that one process gives to the store."""

    name: str
    """What pages may prefer."""
    endpoint: str
    """HOST:PORT that transfers go to; what a replica's place is."""
    used_bytes: int
    total_bytes: int


def answers(address: str, timeout_s: float) -> bool:
    """Somebody listens at HOST:PORT."""
    try:
        with socket.create_connection(parse_address(address, "address"), timeout_s):
            return True
    except (OSError, ValueError):
        return False


class Admin:
    """Any thread; each question is one connection, and takes `timeout_s` at the most for each of
    its steps. Every method raises `StorageUnavailableError` when there is no answer."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._host, self._port = parse_address(address, "admin")
        self._timeout_s = timeout_s

    def is_serving(self) -> bool:
        """A standby, or a master that still restores a snapshot, is not."""
        found = _json(self._ask("/health"))
        return bool(found.get("service_ready", found.get("status") == "ok"))

    def segments(self) -> list[Segment]:
        """Those that the master counts with, dead ones included until their time is up."""
        found = _json(self._ask("/get_segments_detail"))
        try:
            return [
                Segment(
                    str(one["segment_name"]),
                    str(one["te_endpoint"]),
                    int(one["allocator_used_bytes"]),
                    int(one["allocator_capacity_bytes"]),
                )
                for one in list(found["segments"])
                if one.get("status", "OK") == "OK"
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"the master's list of segments is not understood: {error}"
            ) from error

    def all_keys(self) -> list[str]:
        """Every key of the store, those of others included."""
        return self._ask("/get_all_keys").split()

    def key_count(self) -> int:
        """How many keys the store has, those of others included. Cheap."""
        for line in self._ask("/metrics").splitlines():
            if line.startswith("master_key_count "):
                return int(float(line.split()[1]))
        raise StorageError("the master's metrics have no master_key_count")

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise StorageUnavailableError(
                f"the master's HTTP server {self._host}:{self._port} does not answer: {error}"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise StorageUnavailableError(f"the master answers {answer.status} to {path}")
        return body.decode("utf-8", "replace")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StorageError(f"the master's answer is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
