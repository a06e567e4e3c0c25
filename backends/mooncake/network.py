"""A network of this thread's own, with loopback only.

Mooncake's transfer engine listens on all addresses, whatever it is told, and asks nobody for a
password. In such a network nobody else can reach it: for development, tests and benchmarks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

from kvstrata.errors import StorageError

_CLONE_NEWNET = 0x4000_0000
_CLONE_NEWUSER = 0x1000_0000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def is_exposed() -> bool:
    """This thread's network has interfaces other than loopback."""
    return any(name != "lo" for _, name in socket.if_nameindex())


def enter_private_network() -> int:
    """Move the calling thread, and what it starts from now on, to a new network with loopback only.
    Once a process: threads that Mooncake's library keeps stay in the network that they began in.

    Returns a descriptor of the network it was in, for `return_to_network`. Raises `StorageError`
    where that is not allowed (it takes root, or user namespaces and a process with one thread).
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _unshare()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", b"lo", _IFF_UP)
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
    except OSError as error:
        os.close(before)
        raise StorageError(
            f"no private network: {error.strerror} (root may make one, and where user namespaces "
            "are allowed everybody may)"
        ) from error
    return before


def return_to_network(before: int) -> None:
    """Go back, and close the descriptor."""
    try:
        _check(_libc.setns(before, _CLONE_NEWNET))
    finally:
        os.close(before)


def _unshare() -> None:
    if _libc.unshare(_CLONE_NEWNET) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    if user == 0 or threading.active_count() > 1:
        _check(-1)
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
