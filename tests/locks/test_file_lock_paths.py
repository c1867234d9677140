"""The path of a file lock: kinds of files, permissions, and full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import (
    Failure,
    IoFailure,
    NotFound,
    NotWritable,
    PathEscape,
    Refused,
)
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.repo_lock import RepoLock
from tests.locks.lock_watch import (
    Caller,
    become_nobody,
    descriptors_of,
    is_free,
    linux_only,
    others_get,
    public_directory,
    start_holding,
    wait_until_waiting,
)
from tests.locks.workers import PATIENCE, Line, Workers

if sys.platform == "win32":
    pytest.skip("needs POSIX forks, signals and modes", allow_module_level=True)


@pytest.fixture
def path(scratch: Path) -> Path:
    return scratch / "a.lock"


# --- Kinds of files -----------------------------------------------------------------------------------


def test_a_directory_can_be_locked(scratch: Path, workers: Workers) -> None:
    with FileLocker(0).lock_exclusive(scratch):
        assert not others_get(workers, scratch)
        assert not others_get(workers, scratch, shared=True)
    assert others_get(workers, scratch)


def test_a_missing_directory_is_named_with_a_hint_and_not_created(scratch: Path) -> None:
    with pytest.raises(NotFound, match=str(scratch / "missing")) as caught:
        FileLocker(None).lock_exclusive(scratch / "missing" / "a.lock")

    assert caught.value.hint == "Create the directory first."
    assert os.listdir(scratch) == []


def make_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def take_device(path: Path) -> Path:
    return Path("/dev/null")


@pytest.mark.parametrize("make", [make_fifo, make_socket, take_device], ids=["fifo", "socket", "device"])
def test_a_fifo_socket_or_device_is_refused_at_once(make: Callable[[Path], Path], path: Path) -> None:
    made = make(path)

    with pytest.raises((Refused, IoFailure), match=str(made)):
        FileLocker(None).lock_exclusive(made)
    with pytest.raises((Refused, IoFailure), match=str(made)):
        FileLocker(None).try_lock_shared(made)

    if sys.platform == "linux":
        assert descriptors_of(made) == [] or made == Path("/dev/null")


@pytest.mark.parametrize("target", ["elsewhere.lock", "missing.lock", "a.lock", "."])
def test_a_symbolic_link_at_the_path_is_refused_and_nothing_is_created(
    target: str, path: Path, workers: Workers
) -> None:
    elsewhere = path.with_name("elsewhere.lock")
    elsewhere.write_bytes(b"content")
    path.symlink_to(target)

    for take in (FileLocker.lock_exclusive, FileLocker.try_lock_shared):
        with pytest.raises(PathEscape, match="is a symbolic link"):
            take(FileLocker(None), path)

    assert not path.with_name("missing.lock").exists()
    assert is_free(elsewhere)
    assert elsewhere.read_bytes() == b"content"


def test_a_symbolic_link_that_appears_between_two_uses_is_refused(path: Path) -> None:
    locker = FileLocker(None)
    locker.lock_exclusive(path).release()
    elsewhere = path.rename(path.with_name("elsewhere.lock"))
    path.symlink_to(elsewhere)

    with pytest.raises(PathEscape):
        locker.lock_exclusive(path)
    with pytest.raises(PathEscape):
        locker.try_lock_shared(path)

    assert is_free(elsewhere)


@linux_only
def test_a_symbolic_link_that_appears_during_the_wait_is_refused(path: Path, workers: Workers) -> None:
    holder = start_holding(workers, path)
    waiter = Caller(lambda: FileLocker(PATIENCE).lock_exclusive(path))
    wait_until_waiting(path)
    elsewhere = path.rename(path.with_name("elsewhere.lock"))
    path.symlink_to(elsewhere)

    holder.ask("go on")

    with pytest.raises(PathEscape):
        waiter.result()
    assert is_free(elsewhere)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("control", [".jvs/guards", ".jit", ".holdfast/intents", ".JVS"])
def test_a_symbolic_link_in_a_control_directory_is_refused(scratch: Path, control: str, exists: bool) -> None:
    outside, place = scratch / "outside", scratch / "real" / control
    outside.mkdir()
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    (scratch / "link").symlink_to("real")
    if exists:
        (outside / "a.lock").touch()

    with pytest.raises(PathEscape):
        FileLocker(0).lock_exclusive(scratch / "link" / control / "a.lock")

    assert (outside / "a.lock").exists() is exists
    place.unlink()
    place.mkdir()
    with FileLocker(0).lock_exclusive(scratch / "link" / control / "a.lock"):
        assert (place / "a.lock").exists()


def test_a_symbolic_link_in_the_directory_part_of_the_path_is_followed(scratch: Path) -> None:
    (scratch / "real").mkdir()
    (scratch / "link").symlink_to("real")

    with FileLocker(0).lock_exclusive(scratch / "link" / "a.lock"):
        assert not is_free(scratch / "real" / "a.lock")


def test_a_locker_that_follows_no_links_refuses_one_in_any_part_of_the_path(scratch: Path) -> None:
    locker = FileLocker(0, follow_links=False)
    (scratch / "real/below").mkdir(parents=True)
    path = scratch / "real/below/a.lock"
    locker.lock_exclusive(path).release()
    (scratch / "real").rename(scratch / "moved")
    (scratch / "real").symlink_to("moved")

    with pytest.raises(PathEscape, match=r"real is a symbolic link"):
        locker.lock_exclusive(scratch / "real/below/new.lock")
    assert not (scratch / "moved/below/new.lock").exists()
    with locker.lock_exclusive(scratch / "moved/below/a.lock"):
        assert not is_free(scratch / "moved/below/a.lock")
    with pytest.raises(NotFound, match="its directory does not exist"):
        locker.lock_exclusive(scratch / "missing/a.lock")


# --- Permissions and full disks -----------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as directory:
        yield directory


def failure_of_nobody(workers: Workers, path: Path, *, shared: bool = False) -> tuple[str, str, str] | None:
    """Lock as an unprivileged user; returns the code, message and hint of the failure, or None."""

    def task(line: Line) -> None:
        become_nobody()
        try:
            FileLocker(0).acquire(path, shared=shared)
        except Failure as failure:
            line.say((failure.code, failure.message, failure.hint))
        else:
            line.say(None)

    failure: tuple[str, str, str] | None = workers.start(task).hear()
    return failure


def test_a_new_lock_in_a_read_only_directory_fails_clearly(public: Path, workers: Workers) -> None:
    public.chmod(0o555)

    failure = failure_of_nobody(workers, public / "a.lock")

    assert failure == (
        "E_NOT_WRITABLE",
        f"cannot open the lock file {public}/a.lock: {os.strerror(errno.EACCES)}",
        NotWritable.hint,
    )
    assert os.listdir(public) == []


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_an_existing_lock_file_can_be_locked_with_read_permission_only(
    shared: bool, public: Path, workers: Workers
) -> None:
    path = public / "a.lock"
    path.touch(mode=0o444)
    public.chmod(0o555)

    def lock_and_wait(line: Line) -> None:
        become_nobody()
        with FileLocker(0).acquire(path, shared=shared):
            line.say("held")
            line.wait()

    assert workers.start(lock_and_wait).hear() == "held"
    assert is_free(path, shared=True) is shared
    assert not is_free(path)


def test_a_lock_file_without_read_permission_fails_clearly(public: Path, workers: Workers) -> None:
    path = public / "a.lock"
    path.touch()
    path.chmod(0)

    failure = failure_of_nobody(workers, path, shared=True)

    assert failure is not None
    assert failure[0] == "E_NOT_WRITABLE"
    assert str(path) in failure[1]


def test_a_new_lock_file_has_the_mode_that_the_umask_allows(path: Path) -> None:
    path.parent.chmod(0o755)
    before = os.umask(0o027)
    try:
        FileLocker(0).lock_exclusive(path)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@contextlib.contextmanager
def small_disk(where: Path, options: str) -> Iterator[Path]:
    """A tmpfs with hardly any space."""
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "holdfast-test", str(where)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(directory: Path) -> None:
    """Use up all the free space."""
    with (directory / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


@linux_only
def test_a_new_lock_on_a_disk_without_free_inodes_fails_cleanly(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k,nr_inodes=4") as disk:
        locker = FileLocker(0)
        (disk / "there.lock").touch()
        with contextlib.suppress(OSError):
            for number in range(8):
                (disk / f"filler-{number}").touch()
        before = sorted(os.listdir(disk))

        with pytest.raises(IoFailure) as caught:
            locker.lock_exclusive(disk / "a.lock")

        assert caught.value.facts["errno"] == errno.ENOSPC
        assert caught.value.code == "E_IO"
        assert sorted(os.listdir(disk)) == before
        assert locker.lock_exclusive(disk / "there.lock").held, "an existing file needs no space"
        locker.close()


@linux_only
def test_an_existing_file_can_be_locked_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        fill(disk)
        (disk / "new.lock").touch()
        locker = FileLocker(0)

        with locker.lock_exclusive(disk / "new.lock"):
            assert not is_free(disk / "new.lock")
        locker.close()


@linux_only
def test_a_repo_lock_on_a_full_disk_fails_cleanly_and_leaves_neither_lock_nor_draft(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        repo = disk / "repos" / "repo"
        RepoLock(disk).lock("repo").unlock()
        before = sorted(os.listdir(repo))
        fill(disk)

        with pytest.raises(IoFailure) as caught:
            RepoLock(disk).lock("repo")

        assert caught.value.facts["errno"] == errno.ENOSPC
        assert sorted(os.listdir(repo)) == before
        assert ".lock" not in before
        (disk / "filler").unlink()
        RepoLock(disk).lock("repo").unlock()
