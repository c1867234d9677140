"""The capability probe, on local file systems and on loop mounts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import FilesystemUnsafe
from holdfast.fs import calls, mounts
from holdfast.fs.probe import find_capabilities, require_safe
from tests.support.loop_mounts import LoopMount

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="probes Linux file systems")


def test_a_local_directory_has_every_required_capability(tmp_path: Path) -> None:
    found = find_capabilities(tmp_path)
    assert found.troubles() == []
    assert found.flock
    assert found.link
    assert found.symlink
    assert found.case_sensitive
    assert not found.network
    assert require_safe(tmp_path) == found


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    find_capabilities(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_does_not_exclude_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "flock", lambda fd, operation: None)
    assert not find_capabilities(tmp_path).flock
    with pytest.raises(FilesystemUnsafe, match="do not exclude other processes"):
        require_safe(tmp_path)


def test_a_process_that_another_thread_starts_meanwhile_does_not_look_like_a_lock_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = getattr(calls, "flock")  # noqa: B009 (absent on Windows)
    with contextlib.ExitStack() as started:

        def flock_and_start(fd: int, operation: int) -> None:
            flock(fd, operation)
            sleeper = started.enter_context(subprocess.Popen(["sleep", "99"], pass_fds=[fd]))
            started.callback(sleeper.kill)

        monkeypatch.setattr(calls, "flock", flock_and_start)
        assert find_capabilities(tmp_path).flock


def test_a_rename_that_replaces_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "rename_noreplace", os.replace)
    assert not find_capabilities(tmp_path).rename_noreplace


def test_a_file_system_with_neither_links_nor_exclusive_renames_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "no links here")

    found = find_capabilities(tmp_path)._replace(link=False, rename_noreplace=False)
    assert "overwriting" in found.troubles()[0]
    monkeypatch.setattr(calls, "link", refuse)
    assert not find_capabilities(tmp_path).link


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p", "fuse.juicefs"])
def test_network_file_systems_are_recognised(kind: str) -> None:
    assert mounts.is_network(kind)
    assert not mounts.is_network("ext4")


def test_a_tmpfs_is_recognised() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert mounts.filesystem_kind("/dev/shm") == "tmpfs"


@pytest.mark.parametrize(("kind", "reflink"), [("ext4", False), ("xfs", True), ("btrfs", True)])
def test_reflinks_are_detected_where_supported(
    loop_mount: Callable[[str], LoopMount], kind: str, reflink: bool
) -> None:
    found = find_capabilities(loop_mount(kind).path)
    assert found.kind == kind
    assert found.reflink is reflink
    assert found.rename_exchange
    assert found.troubles() == []


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [("ext4", (), True), ("ext4", ("-O", "^has_journal"), False), ("xfs", (), True), ("btrfs", (), False)],
    ids=["ext4", "ext4 without a journal", "xfs", "btrfs"],
)
def test_a_filesystem_keeps_the_order_of_names_if_it_has_a_journal(
    loop_mount: Callable[..., LoopMount], kind: str, options: tuple[str, ...], expected: bool
) -> None:
    assert mounts.keeps_order(loop_mount(kind, *options).path) is expected
