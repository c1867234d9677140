"""Killed operations are finished after a reboot, which changes device numbers.

The file system is unmounted and mounted again through another loop device, so that `st_dev` of everything
in it changes, as after a reboot.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Refused
from holdfast.repository import payloads
from holdfast.repository.context import OPERATIONS
from holdfast.repository.repository import Repository
from holdfast.repository.worktrees import settle
from proof.crash import Ending, Kill, Outcome, cut_short
from tests.repository.interruptions import FEW, SEEN, cases, world
from tests.repository.stages import LASTING, files_in, put_files
from tests.repository.test_worktree_crashes import (
    WORK,
    Case,
    CreationFromASnapshot,
    RemovalOfUnsavedWork,
    Renaming,
    begun,
    names,
)
from tests.support.loop_mounts import LoopMount, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts Linux file systems")

Mount = Callable[[str], LoopMount]


@pytest.fixture
def rebooted(scratch: Path) -> Iterator[Callable[[LoopMount], None]]:
    """Remounts a file system under another device number."""
    taken: list[str] = []

    def reboot(mounted: LoopMount) -> None:
        before = mounted.path.stat().st_dev
        mounted.unmount()
        placeholder = scratch / "placeholder"
        placeholder.write_bytes(bytes(1 << 20))
        for _ in range(20):  # another file occupies the old loop device
            attached = subprocess.run(
                ["losetup", "--find", "--show", str(placeholder)], check=True, capture_output=True, text=True
            )
            taken.append(attached.stdout.strip())
            mounted.mount()
            if mounted.path.stat().st_dev != before:
                return
            mounted.unmount()
        raise AssertionError("the device number never changed")

    yield reboot
    for device in taken:
        run("losetup", "--detach", device)


def killed_points(case: Any, base: Path, names_: tuple[str, ...], *, step: int) -> list[Path]:
    """Directories in each of which the operation was killed before a different call."""
    made: list[Path] = []
    for index in range(1, 1000, step):
        directory = base / f"{type(case).__name__}-{index}"
        directory.mkdir()
        case.prepare(directory)
        if cut_short(partial(case.operate, directory), Kill.BEFORE, index, names=names_) is None:
            break
        made.append(directory)
    return made


@pytest.mark.long
def test_killed_operations_are_finished_after_a_reboot(
    loop_mount: Mount, rebooted: Callable[[LoopMount], None]
) -> None:
    mounted = loop_mount("ext4")
    worktree_cases: list[Case] = [CreationFromASnapshot(), Renaming(), RemovalOfUnsavedWork()]
    killed: list[tuple[Any, Path]] = []
    with world(FEW) as old:
        restoring = cases(old)["restore in place"]
        for case in worktree_cases:
            killed += [(case, each) for each in killed_points(case, mounted.path, LASTING, step=5)]
        killed += [(restoring, each) for each in killed_points(restoring, mounted.path, SEEN, step=5)]
        assert len(killed) >= 30
        rebooted(mounted)
        for case, directory in killed:
            case.check(directory, Outcome(Ending.KILLED))


@pytest.mark.parametrize(
    ("when", "stranger_at", "left"),
    [(Kill.BEFORE, "new", "old"), (Kill.AFTER, "old", "new")],
    ids=["before the move", "after the move"],
)
def test_after_a_reboot_a_foreign_directory_is_told_apart_from_the_renamed_worktree(
    loop_mount: Mount, rebooted: Callable[[LoopMount], None], when: Kill, stranger_at: str, left: str
) -> None:
    mounted = loop_mount("ext4")
    repository = begun(Renaming(), mounted.path / "repo", when)
    put_files(repository.root / "worktrees" / stranger_at, {"precious": "a stranger's"})
    repository.close()
    rebooted(mounted)
    with Repository(mounted.path / "repo") as again:
        settle(again.context, "old")
        assert names(again) == [left]
        assert files_in(again.path(left)) == WORK
        assert files_in(again.root / "worktrees" / stranger_at) == {"precious": "a stranger's"}
        assert again.context.store.read(OPERATIONS.key("old")) is None


@pytest.mark.parametrize("when", [Kill.BEFORE, Kill.AFTER])
def test_an_ambiguous_rename_is_refused_not_guessed(scratch: Path, when: Kill) -> None:
    """In a copy of the repository, every inode number differs."""
    original = begun(Renaming(), scratch / "original", when).root
    stranger = "new" if when is Kill.BEFORE else "old"
    put_files(original / "worktrees" / stranger, {"precious": "a stranger's"})
    run("cp", "-a", str(original), str(scratch / "copy"))
    with Repository(scratch / "copy") as copy:
        before = files_in(copy.root / "worktrees")
        for name in ("old", "new"):
            with pytest.raises(Refused, match="cannot tell") as caught:
                settle(copy.context, name)
            assert "Move the directory that is not the worktree" in caught.value.hint
        repaired = copy.repair()
        assert {finding.code for finding, _ in repaired.failed} == {"operation-unfinished"}
        assert files_in(copy.root / "worktrees") == before
        (copy.root / "worktrees" / stranger).rename(scratch / "elsewhere")
        settle(copy.context, "old")
        assert names(copy) == ["new"]
        assert files_in(copy.path("new")) == WORK


def test_roots_of_subvolumes_are_told_apart_only_within_one_boot() -> None:
    def status(device: int, inode: int) -> os.stat_result:
        return os.stat_result((0o040755, inode, device, 1, 0, 0, 0, 0, 0, 0))

    ours, other = status(50, 256), status(51, 256)
    assert payloads.index_of_inode("50:256", (other, ours), same_boot=True) == 1
    assert payloads.index_of_inode("50:256", (other, ours), same_boot=False) is None
    assert payloads.index_of_inode("50:300", (status(7, 300), other), same_boot=False) == 0
    assert payloads.index_of_inode("50:300", (ours, other), same_boot=True) is None
    assert payloads.index_of_inode(None, (ours, other), same_boot=True) is None
