"""One process that hosts a backend, as its parent sees it: started, spoken to, killed, reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from kvstrata.backends.process.wire import (
    ANSWER_TO,
    Answer,
    Channel,
    Failed,
    Message,
    answers,
    unpack_error,
)
from kvstrata.errors import StorageUnavailableError

HOST_MODULE = "kvstrata.backends.process.host"
ASK_CHANNELS = 2
"""For `usage`, `health` and `close`, which never wait for a page."""
SCAN_CHANNELS = 2
EVENTS_TIMEOUT_S = 5.0
"""For the rest of a message that has begun."""

_T = TypeVar("_T")


class Channels:
    """Channels of one kind; each has a thread in the child. Any thread."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._free = list(reversed(channels))  # the first is taken first: `Open` goes there
        self._all = tuple(channels)
        self._condition = threading.Condition()
        self._cut = False

    def take(self) -> Channel | None:
        """Wait for a free one; None when the child is dead."""
        with self._condition:
            self._condition.wait_for(lambda: self._free or self._cut)
            return None if self._cut else self._free.pop()

    def give(self, channel: Channel) -> None:
        with self._condition:
            if self._cut:
                channel.close()
                return
            self._free.append(channel)
            self._condition.notify()

    def cut(self) -> None:
        """The child is dead: nobody waits any more. Those that nobody uses are closed; the others
        are by whoever uses them."""
        with self._condition:
            self._cut = True
            self._condition.notify_all()
            for channel in self._all:
                channel.shutdown()
            while self._free:
                self._free.pop().close()


class Child:
    """Start it on a thread that outlives it: the kernel kills it when that thread ends.

    A call that was sent ends in one of two ways: with its answer, or when `dead` is set, which
    happens after the process was reaped. So no buffer is given back that it could still touch.
    """

    def __init__(self, data_channels: int, fds: Sequence[int]) -> None:
        self.dead = threading.Event()
        self.why = ""
        self.started_at = time.monotonic()
        self._parent = os.getpid()
        kinds = (data_channels, ASK_CHANNELS, SCAN_CHANNELS, 1)
        pairs = [socket.socketpair() for _ in range(sum(kinds))]
        theirs = [pair[1].fileno() for pair in pairs]
        ours = iter([Channel(pair[0]) for pair in pairs])
        self.data, self.asks, self.scans = (
            Channels([next(ours) for _ in range(n)]) for n in kinds[:3]
        )
        self.events = next(ours)
        self.events.socket.settimeout(EVENTS_TIMEOUT_S)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    HOST_MODULE,
                    str(os.getpid()),
                    ",".join(map(str, theirs)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[*theirs, *fds],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
                start_new_session=True,
            )
        except OSError as error:
            for pair in pairs:
                pair[0].close()
            raise StorageUnavailableError(f"its process cannot be started: {error}") from error
        finally:
            for pair in pairs:
                pair[1].close()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def ask(self, channels: Channels, message: Message, fds: Sequence[int] = ()) -> Answer:
        """One call. Raises what the child raised, and `StorageUnavailableError` if it died."""
        channel = channels.take()
        if channel is None:
            raise StorageUnavailableError(self.why)
        with self.using(channels, channel):
            return self.exchange(channel, message, fds)

    def exchange(self, channel: Channel, message: Message, fds: Sequence[int] = ()) -> Answer:
        """As `ask`, on a channel that the caller has taken, within `using`."""
        channel.send(message, fds)
        answer = self.hear(channel)
        if isinstance(answer, Failed):
            raise unpack_error(answer)
        if not isinstance(answer, ANSWER_TO[type(message)]):
            raise ValueError(f"{type(answer).__name__} is no answer to {type(message).__name__}")
        return answer

    def hear(self, channel: Channel) -> Answer:
        """The next message; descriptors that come with it are not wanted."""
        answer, fds = channel.receive(answers)
        for fd in fds:
            os.close(fd)
        return answer

    @contextlib.contextmanager
    def using(self, channels: Channels, channel: Channel) -> Iterator[None]:
        """Give `channel` back afterwards. When the child broke off, or talks nonsense, it is killed
        and waited for."""
        try:
            yield
        except (EOFError, OSError, ValueError) as error:
            channel.close()
            self._break_off(error)
        except BaseException:  # the child's answer, or the end of a generator
            channels.give(channel)
            raise
        channels.give(channel)

    def judge(self, read: Callable[[], _T]) -> _T:
        """What `read` makes of an answer; a child that contradicts itself is killed, too."""
        try:
            return read()
        except ValueError as error:
            self._break_off(error)

    def _break_off(self, error: Exception) -> NoReturn:
        self.kill(f"it talks nonsense: {error}" if isinstance(error, ValueError) else "")
        self.dead.wait()
        raise StorageUnavailableError(self.why) from error

    def kill(self, why: str = "") -> None:
        """Any thread; at once. `dead` follows. Without `why` it had broken off by itself. A fork of
        this process has nothing to say here."""
        if os.getpid() != self._parent:
            return
        with contextlib.suppress(OSError):
            self.why = self.why or why
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def anonymous_bytes(self) -> int:
        """Memory of its own, shared memory not counted; 0 if that cannot be told."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0

    def reap(self) -> None:
        """Wait for its end, which was seen or asked for. What it started itself, and left in its
        group, ends too: it has mapped the same memory."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        pause_s = 0.001
        while _has_others(self.pid):  # none, nearly always; the name is taken until `wait`
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        code = self._process.wait()
        if not self.why or code != -signal.SIGKILL:
            self.why = f"its process ended {_how(code)}"
        self.dead.set()
        for channels in (self.data, self.asks, self.scans):
            channels.cut()
        self.events.close()
        os.close(self.pidfd)


def _has_others(group: int) -> bool:
    """Whether processes of the group run, but for the one that gave it its name."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != group:
            with contextlib.suppress(OSError, ValueError):
                state, _, found = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(found) == group and state not in "ZX":
                    return True
    return False


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
