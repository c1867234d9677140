"""Open directories: descending refuses every link, with no gap between check and use."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import IoFailure, NotDurable, NotFound, NotWritable, PathEscape
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, chosen, make_directories, move, rename, status_at
from holdfast.trees.scan import scan_directory
from tests.locks.workers import Line, Workers
from tests.support.descriptors import open_descriptors
from tests.support.loop_mounts import LoopMount

if sys.platform == "win32":
    pytest.skip("Windows has no lookups relative to an open directory", allow_module_level=True)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The directory `root` of `root/a/b/c`, with `outside` beside it."""
    (tmp_path / "root/a/b/c").mkdir(parents=True)
    (tmp_path / "outside/b/c").mkdir(parents=True)
    return tmp_path / "root"


# --- Descending ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", ["a", "a/b", "a/b/c"])
def test_a_directory_below_is_opened(relative: str, top: Path) -> None:
    with Directory.open(top) as root, root.beneath(relative) as below:
        durable.create_in(below, "file", b"content")

    assert (top / relative / "file").read_bytes() == b"content"


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("target", ["outside", "elsewhere in the root", "missing", "itself", "a file"])
@pytest.mark.parametrize("create", [False, True], ids=["open", "create"])
def test_a_symbolic_link_at_any_depth_is_refused(link: str, target: str, create: bool, top: Path) -> None:
    path = top / link
    targets = {
        "outside": top.parent / "outside",
        "elsewhere in the root": top / "other",
        "missing": top / "missing",
        "itself": path,
        "a file": top / "file",
    }
    (top / "other/b/c").mkdir(parents=True)
    (top / "file").touch()
    path.rename(top.parent / "moved")
    path.symlink_to(targets[target])
    before = open_descriptors()

    with Directory.open(top) as root, pytest.raises(PathEscape, match="is a symbolic link") as caught:
        root.beneath("a/b/c", create=create)

    assert str(path) in str(caught.value)
    assert caught.value.facts["path"] == str(path)
    assert not (top / "missing").exists(), "a directory was created through the link"
    assert open_descriptors() - before == set()


@pytest.mark.parametrize("relative", ["..", "a/..", "a/../../outside", "/etc", "", ".", "a//b", "a/\0"], ids=ascii)
def test_a_path_that_leads_out_is_refused_before_anything_is_opened(
    relative: str, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Directory.open(top) as root:
        monkeypatch.setattr(calls, "open", lambda *_, **__: pytest.fail("something was opened"))
        with pytest.raises(PathEscape):
            root.beneath(relative, create=True)


def test_a_missing_directory_is_named(top: Path) -> None:
    with Directory.open(top) as root, pytest.raises(NotFound, match=f"{top}/a/missing"):
        root.beneath("a/missing/c")
    with pytest.raises(NotFound, match=f"there is no directory {top}/missing"):
        Directory.open(top / "missing")


def test_a_file_in_the_path_is_an_io_failure_that_names_it(top: Path) -> None:
    (top / "a/file").touch()

    with Directory.open(top) as root, pytest.raises(IoFailure, match=f"{top}/a/file") as caught:
        root.beneath("a/file/c")
    assert caught.value.facts["errno"] == errno.ENOTDIR
    with pytest.raises(IoFailure, match=f"{top}/a/file"):
        Directory.open(top / "a/file")


def test_a_fifo_in_the_path_does_not_hang(top: Path) -> None:
    os.mkfifo(top / "fifo")

    with Directory.open(top) as root, pytest.raises(IoFailure):
        root.beneath("fifo")


def test_missing_directories_are_created_on_request_with_the_given_mode(top: Path) -> None:
    with Directory.open(top) as root, root.beneath("a/new/deep", create=True, mode=0o700) as made:
        assert os.path.samestat(os.stat(top / "a/new/deep"), os.fstat(made.fd or -1))

    assert (top / "a/new").stat().st_mode & 0o777 == 0o700


def test_links_in_a_path_that_the_user_chose_are_followed(top: Path) -> None:
    (top / "link").symlink_to("a")

    with Directory.follow(top / "link") as directory, directory.beneath("b/c") as below:
        assert os.path.samestat(os.fstat(below.fd or -1), os.stat(top / "a/b/c"))
    assert chosen(top / "link/b") == top / "a/b"
    assert chosen(top / "link") == top / "link"  # the last part is the caller's matter


@pytest.mark.parametrize("place", ["a", "a/b", "a/b/c"])
def test_a_link_is_refused_in_every_part_of_another_path(top: Path, place: str) -> None:
    (top / place).rename(top / "elsewhere")
    (top / place).symlink_to(top / "elsewhere")

    for use in (Directory.open, lambda path: status_at(path / "x"), lambda path: rename(path / "x", top / "y")):
        with pytest.raises(PathEscape, match=re.escape(f"{top / place} is a symbolic link")):
            use(top / "a/b/c")


def test_a_move_through_a_link_is_refused_on_either_side(top: Path) -> None:
    (top / "a/b/c/file").write_bytes(b"content")
    (top / "link").symlink_to("a/b/c")

    with pytest.raises(PathEscape, match="symbolic link"):
        move(top / "link/file", top / "a/file")
    with pytest.raises(PathEscape, match="symbolic link"):
        move(top / "a/b/c/file", top / "link/other")
    assert (top / "a/b/c/file").read_bytes() == b"content"


def test_the_mode_of_what_a_link_leads_to_is_never_changed(top: Path) -> None:
    (top / "file").write_bytes(b"content")
    (top / "file").chmod(0o644)
    (top / "link").symlink_to("file")

    with Directory.open(top) as directory:
        if sys.platform == "linux":
            with pytest.raises(OSError, match="symbolic link"):
                calls.chmod("link", 0o777, dir_fd=directory.fd)
        else:
            calls.chmod("link", 0o777, dir_fd=directory.fd)
        calls.chmod("file", 0o600, dir_fd=directory.fd)

    assert stat.S_IMODE((top / "file").stat().st_mode) == 0o600


def test_an_open_directory_stays_the_same_when_its_path_changes(top: Path) -> None:
    with Directory.open(top / "a/b") as directory:
        (top / "a").rename(top / "moved")
        (top / "a").symlink_to(top.parent / "outside")

        durable.create_in(directory, "file", b"content")

    assert (top / "moved/b/file").read_bytes() == b"content"
    assert not (top.parent / "outside/b/file").exists()


def test_no_descriptor_is_leaked_on_success_or_failure(top: Path) -> None:
    before = open_descriptors()

    with Directory.open(top) as root:
        root.beneath("a/b/c").close()
        for relative in ("a/b/missing", "missing", "a/b/c/d"):
            with pytest.raises(NotFound):
                root.beneath(relative)
        assert len(open_descriptors()) == len(before) + (sys.platform == "linux")
    root.close()

    assert open_descriptors() - before == set()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_what_was_created_since_a_directory_was_opened_is_listed(
    loop_mount: Callable[[str], LoopMount], kind: str
) -> None:
    """Also after an earlier listing, and with the calls that list trees."""
    with Directory.open(loop_mount(kind).path) as top:
        top.make("new")
        with top.enter("new") as new:
            for number in range(1, 4):
                durable.create_in(new, f"{number}", b"")
                assert new.fd is not None
                assert len(new.names()) == len(calls.listdir(new.fd)) == len(scan_directory(new.fd).names) == number


def test_descriptors_are_not_inherited_by_child_programs(top: Path) -> None:
    with Directory.open(top) as root, root.beneath("a/b") as below:
        assert not os.get_inheritable(root.fd or -1)
        assert not os.get_inheritable(below.fd or -1)


# --- Swapped directories ------------------------------------------------------------------------------


def swap(top: Path, where: str) -> Callable[[Line], None]:
    """A worker task that keeps swapping a directory for a link that leads outside, and back."""

    def task(line: Line) -> None:
        directory, aside, link = top / where, top / "aside", top / "link"
        outside = top.parent / "outside" / where.removeprefix("a").lstrip("/")
        swaps = os.open(top / "swaps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while not line.has_news():
            link.symlink_to(outside)
            directory.rename(aside)
            link.rename(directory)
            directory.unlink()
            aside.rename(directory)
            os.write(swaps, b".")
        line.say("stopped")

    return task


Write = Callable[[Path, str, str], object]


def write_beneath(top: Path, relative: str, name: str) -> None:
    """Create a file below, the way Holdfast does."""
    with Directory.open(top) as root, root.beneath(relative) as directory:
        durable.create_in(directory, name, b"", durable=False)


def check_then_write(top: Path, relative: str, name: str) -> None:
    """Planted bug: check for links first, then use the path."""
    where = top
    for part in relative.split("/"):
        where = where / part
        if where.is_symlink():
            raise PathEscape(f"{where} is a link")
    (where / name).touch()


def escapes(top: Path, where: str, write: Write, workers: Workers, *, swaps: int) -> bool:
    """Whether anything is written outside while a directory is swapped for a link at least this many times."""
    (top / "swaps").touch()
    swapping = workers.start(swap(top, where))
    outside = top.parent / "outside/b/c"
    written, number = 0, 0
    while not os.listdir(outside) and (written < 100 or (top / "swaps").stat().st_size < swaps):
        number += 1
        with contextlib.suppress(PathEscape, NotFound, IoFailure, OSError):
            write(top, "a/b/c", str(number))
            written += 1
    assert swapping.ask("stop") == "stopped"
    return bool(os.listdir(outside))


@pytest.mark.parametrize("where", ["a", "a/b", "a/b/c"])
def test_swapping_a_directory_for_a_link_never_redirects_a_write_outside(
    where: str, top: Path, workers: Workers
) -> None:
    assert not escapes(top, where, write_beneath, workers, swaps=500)


@pytest.mark.parametrize("where", ["a", "a/b", "a/b/c"])
def test_a_check_before_the_write_is_caught_writing_outside(where: str, top: Path, workers: Workers) -> None:
    assert escapes(top, where, check_then_write, workers, swaps=100_000)


# --- Creating directories -----------------------------------------------------------------------------


def test_missing_directories_are_created_and_existing_ones_left_alone(top: Path) -> None:
    (top / "a/keep").touch()

    make_directories(top / "a/x/y/z")
    make_directories(top / "a/x/y/z")

    assert (top / "a/x/y/z").is_dir()
    assert (top / "a/keep").exists()


def test_each_name_is_durable_before_the_next_is_created(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    mkdir, sync = calls.mkdir, calls.sync_directory

    def watched_mkdir(name: str, mode: int, *, dir_fd: int | None) -> None:
        done.append(f"mkdir {name}")
        mkdir(name, mode, dir_fd=dir_fd)

    def watched_sync(fd: int) -> None:
        done.append("sync")
        sync(fd)

    monkeypatch.setattr(calls, "mkdir", watched_mkdir)
    monkeypatch.setattr(calls, "sync_directory", watched_sync)

    make_directories(top / "x/y")

    assert done == ["mkdir x", "sync", "mkdir y", "sync"]


def test_a_relative_path_is_created_below_the_current_directory(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(top)

    make_directories(Path("x/y"))

    assert (top / "x/y").is_dir()


def test_many_processes_that_create_the_same_directories_all_succeed(top: Path, workers: Workers) -> None:
    def make_all(line: Line) -> None:
        line.wait()
        for number in range(50):
            make_directories(top / f"{number}/x/y")
        line.say("done")

    makers = workers.start_many(4, make_all)
    for maker in makers:
        maker.say("go")

    assert [maker.hear() for maker in makers] == ["done"] * 4
    assert all((top / f"{number}/x/y").is_dir() for number in range(50))


def test_creating_a_directory_below_a_file_is_an_io_failure(top: Path) -> None:
    (top / "file").touch()

    with pytest.raises(IoFailure, match=f"{top}/file"):
        make_directories(top / "file/x")


def test_a_failed_sync_raises_not_durable(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "sync_directory", fail)

    with pytest.raises(NotDurable):
        make_directories(top / "x")


def test_make_reports_whether_the_directory_is_new(top: Path) -> None:
    with Directory.open(top) as root:
        assert root.make("new")
        assert not root.make("new")


def test_a_directory_that_cannot_be_created_is_not_writable(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(calls, "mkdir", refuse)

    with Directory.open(top) as root, pytest.raises(NotWritable, match=f"{top}/new"):
        root.make("new")


# --- Status -------------------------------------------------------------------------------------------


def test_the_status_is_of_the_link_and_not_of_its_target(top: Path) -> None:
    (top / "link").symlink_to("a")

    with Directory.open(top) as root:
        assert root.is_link("link")
        assert not root.is_link("a")
        assert not root.is_link("missing")
        assert root.status("missing") is None
        assert root.directories() == ["a"]
