"""Available memory, from files that look like a machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.memory_limits import available_memory_bytes

GIB = 2**30
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "36 24 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _machine(root: Path, **files: str) -> None:
    kib = 8 * GIB // 1024
    _write(root, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {kib} kB\n", **files})


def test_without_control_groups_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    _machine(tmp_path)
    assert available_memory_bytes(tmp_path) == 8 * GIB


def test_nothing_known(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None


def test_version_2_limit_less_use_plus_cache(tmp_path: Path) -> None:
    _machine(tmp_path)
    group = "sys/fs/cgroup/user/job"
    _write(tmp_path, {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/user/job\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == 2 * GIB


def test_version_2_limit_of_a_group_above(tmp_path: Path) -> None:
    _machine(tmp_path)
    _write(tmp_path, {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": "5\n",
        "sys/fs/cgroup/user/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/user/memory.current": "0\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == GIB


def test_version_1(tmp_path: Path) -> None:
    _machine(tmp_path)
    group = "sys/fs/cgroup/memory/job"
    _write(tmp_path, {
        "proc/self/mountinfo": V1_MOUNT.format(root="/"),
        "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{GIB}\n",
        f"{group}/memory.stat": "total_inactive_file 7\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == GIB + 7


def test_version_1_in_a_container_whose_group_is_the_mount(tmp_path: Path) -> None:
    _machine(tmp_path)
    _write(tmp_path, {
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == GIB


@pytest.mark.parametrize("group", ["/../../outside", "/gone/away"])
def test_a_group_that_is_elsewhere_counts_as_the_mount(tmp_path: Path, group: str) -> None:
    _machine(tmp_path)
    _write(tmp_path, {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == GIB


def test_use_above_the_limit_is_no_memory(tmp_path: Path) -> None:
    _machine(tmp_path)
    _write(tmp_path, {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "5\n",
        "sys/fs/cgroup/memory.current": "9\n",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) == 0


def test_files_that_hold_nonsense_are_passed_over(tmp_path: Path) -> None:
    _machine(tmp_path)
    _write(tmp_path, {
        "proc/meminfo": "MemAvailable: much kB\n",
        "proc/self/mountinfo": "short\n1 2 3 / x - cgroup2 y z\n" + V2_MOUNT,
        "proc/self/cgroup": "nonsense\n0::/\n",
        "sys/fs/cgroup/memory.max": "",
        "sys/fs/cgroup/memory.current": "\xff",
    })  # fmt: skip
    assert available_memory_bytes(tmp_path) is None


def test_this_machine_has_memory() -> None:
    available = available_memory_bytes()
    assert available is not None
    assert available > 2**20
