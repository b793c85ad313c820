"""Memory and cores of this process, with the limits of its control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from vllm.utils.cpu_utils import usable_core_count
from vllm.utils.mem_utils import (
    CgroupFolders,
    available_memory_bytes,
    cgroup_folders,
    format_bytes,
    parse_size,
    total_memory_bytes,
)
from vllm.utils.text import did_you_mean, unknown_key_message

NO_LIMITS = CgroupFolders([], [], [])
MIB = 1 << 20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "self_cgroup"


def test_version_2_limit_of_an_ancestor_counts(tmp_path: Path, membership: Path) -> None:
    mount = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    write(mount / "job", memory__max=f"{96 * MIB}\n", memory__current=f"{70 * MIB}\n")
    write(
        mount / "job", memory__stat=f"anon 5\ninactive_file {30 * MIB}\n", cpu__max="150000 100000"
    )
    write(mount / "job" / "step", memory__max="max\n", memory__current="1\n", cpu__max="max 100000")
    folders = cgroup_folders(membership, mount)
    assert total_memory_bytes(folders) == 96 * MIB
    assert available_memory_bytes(folders) == (96 - 70 + 30) * MIB
    assert usable_core_count(folders) == 1


def test_version_1_in_a_container_that_sees_the_path_of_its_host(
    tmp_path: Path, membership: Path
) -> None:
    mount = tmp_path / "cgroup"
    membership.write_text("4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n")
    write(
        mount / "memory",
        memory__limit_in_bytes=str(64 * MIB),
        memory__usage_in_bytes=str(65 * MIB),
        memory__stat="total_inactive_file 0\n",
    )
    # File names with underscores of their own.
    for name, text in {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}.items():
        (mount / "cpu").mkdir(exist_ok=True)
        (mount / "cpu" / name).write_text(text)
    folders = cgroup_folders(membership, mount)
    assert total_memory_bytes(folders) == 64 * MIB
    assert available_memory_bytes(folders) == 0
    assert usable_core_count(folders) == usable_core_count(NO_LIMITS)


def test_no_control_group(tmp_path: Path) -> None:
    assert cgroup_folders(tmp_path / "nothing") == NO_LIMITS
    assert total_memory_bytes(NO_LIMITS) == psutil.virtual_memory().total
    assert 0 < available_memory_bytes(NO_LIMITS) <= total_memory_bytes(NO_LIMITS)


def test_hyper_threads_share_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 7}, raising=False)
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert usable_core_count(NO_LIMITS, tmp_path) == 3  # {0, 4}, {1}, and 7 which does not say


def test_limits_of_this_machine_are_readable() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes()
    assert usable_core_count() >= 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("7", 7), ("3K", 3072), ("3k", 3000), ("1.5 MiB", 3 * MIB // 2), ("2gb", 2 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "4 PiB", "GiB", "1e9", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_bytes_in_words() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * MIB << 10)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 GiB",
    ]


def test_nearest_name() -> None:
    names = ["block_size", "max_num_seqs"]
    assert did_you_mean("--Block-Sice", names) == " (did you mean 'block_size'?)"
    assert did_you_mean("xyz", names) == ""
    assert unknown_key_message("it", "xyz", names) == (
        "it: unknown key 'xyz'; known keys: block_size, max_num_seqs"
    )
