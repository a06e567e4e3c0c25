"""The memory behind the pool: shared with another process through its descriptor, and no leak."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.memory_limits import free_huge_bytes
from kvstrata.staging import SharedRegion
from kvstrata.staging.memory import HUGE_BYTES

CHILD = textwrap.dedent(
    """
    import mmap, sys
    fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
    memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    assert memory[:5] == b"hello", memory[:5]
    memory[4096:4099] = b"yes"
    memory[nbytes - 1] = 7
    """
)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_child_process_maps_the_same_pages() -> None:
    region = SharedRegion(3 * 4096)
    region.array[:5] = list(b"hello")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(region.fd), str(region.nbytes)],
        pass_fds=(region.fd,),
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert bytes(region.view[4096:4099]) == b"yes"
    assert region.array[-1] == 7
    assert (region.array[5:4096] == 0).all()
    region.close()


def test_the_descriptor_is_not_inherited_unasked() -> None:
    region = SharedRegion(4096)
    assert not os.get_inheritable(region.fd)
    region.close()


def test_views_outlive_close() -> None:
    """Somebody who was lent memory may still touch it, however late."""
    region = SharedRegion(4096)
    late = region.view[100:200]
    region.close()
    del region
    late[:] = bytes(100)
    assert isinstance(late.obj, mmap.mmap)


def test_no_descriptor_leaks() -> None:
    before = open_descriptors()
    for _ in range(200):
        region = SharedRegion(4096)
        region.close()
        region.close()
        del region
    assert open_descriptors() == before


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Free huge pages: 40 where this process may reserve them, none where it may not."""
    knob = Path("/proc/sys/vm/nr_hugepages")
    before = knob.read_text()
    with contextlib.suppress(OSError):
        knob.write_text(str(int(before) + 40))
    yield free_huge_bytes() // HUGE_BYTES
    if knob.read_text() != before:
        knob.write_text(before)


def test_huge_pages_are_taken_or_refused(huge_pages: int) -> None:
    """All at once, for a child as well, and given back; or an error that says how many."""
    before = open_descriptors()
    if huge_pages >= 3:
        region = SharedRegion(5 << 20, huge_pages=True)
        assert region.nbytes == len(region.array) == 6 << 20
        assert free_huge_bytes() // HUGE_BYTES == huge_pages - 3
        address = f"{region.array.ctypes.data:x}-"
        sizes = Path("/proc/self/smaps").read_text().split(address)[1]
        assert "KernelPageSize:     2048 kB" in sizes[: sizes.index("VmFlags")]
        region.array[:5] = list(b"hello")
        subprocess.run(
            [sys.executable, "-c", CHILD, str(region.fd), str(region.nbytes)],
            pass_fds=(region.fd,),
            timeout=60,
            check=True,
        )
        assert region.array[-1] == 7
        region.close()
        del region
        assert free_huge_bytes() // HUGE_BYTES == huge_pages
    with pytest.raises(ConfigError, match=f"{huge_pages} are free") as caught:
        SharedRegion((huge_pages + 1) * HUGE_BYTES, huge_pages=True)
    assert caught.value.where.key == "staging.huge_pages"
    assert f"nr_hugepages={huge_pages + 1}" in caught.value.remedy
    assert open_descriptors() == before


@pytest.mark.parametrize("nbytes", [0, -1, 2**62, 2**70])
def test_impossible_sizes_are_config_errors(nbytes: int) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match="cannot map") as caught:
        SharedRegion(nbytes)
    assert caught.value.where.key == "staging.bytes"
    assert open_descriptors() == before


def test_an_address_space_limit_is_a_config_error() -> None:
    """`ulimit -v`, in a process of its own."""
    code = textwrap.dedent(
        f"""
        import resource
        from kvstrata.errors import ConfigError
        from kvstrata.staging import SharedRegion
        resource.setrlimit(resource.RLIMIT_AS, ({2**32}, {resource.RLIM_INFINITY}))
        try:
            SharedRegion({2**33})
        except ConfigError as error:
            print(error.remedy)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ulimit -v" in done.stdout, done.stderr
