"""Directories are kept open: reused while the path still leads to them, reopened when it does not."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotFound, PathEscape
from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.store.files import FileStore
from holdfast.store.layout import MOST_IDLE, Directories, OpenDirectories
from holdfast.store.model import Create, Replace
from holdfast.testing.backend import ISSUES, Item, apply
from tests.support.descriptors import open_descriptors

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows looks names up by path and keeps no directory open"
)
ONE = ISSUES.key("one")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Directory]:
    (tmp_path / "a/b").mkdir(parents=True)
    with Directory.open(tmp_path) as directory:
        yield directory


@pytest.fixture
def directories(root: Directory) -> Iterator[Directories]:
    made = Directories(root)
    yield made
    made.close()


def used(directories: Directories, relative: str) -> int | None:
    with OpenDirectories(directories) as opened:
        return opened.get(relative).fd


def test_a_directory_is_opened_once_for_many_uses(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    used(directories, "a/b")
    opened: list[Any] = []
    monkeypatch.setattr(calls, "open", lambda *arguments, **rest: opened.append(arguments))

    for _ in range(3):
        used(directories, "a/b")
    assert opened == []


def test_two_users_of_a_directory_never_share_a_descriptor(directories: Directories) -> None:
    used(directories, "a/b")
    with OpenDirectories(directories) as mine, OpenDirectories(directories) as yours:
        assert mine.get("a/b").fd != yours.get("a/b").fd
        assert mine.get("a/b") is mine.get("a/b")


def test_a_directory_that_was_replaced_is_reopened(directories: Directories, root: Directory) -> None:
    used(directories, "a/b")
    (root.path / "a").rename(root.path / "moved")
    (root.path / "a/b").mkdir(parents=True)

    with OpenDirectories(directories) as opened:
        assert opened.get("a/b").status("x") is None
        (root.path / "a/b/x").touch()
        assert opened.get("a/b").status("x") is not None


def test_a_directory_that_is_gone_is_not_found_and_can_be_created_again(
    directories: Directories, root: Directory
) -> None:
    used(directories, "a/b")
    shutil.rmtree(root.path / "a")

    with OpenDirectories(directories) as opened:
        with pytest.raises(NotFound):
            opened.get("a/b")
        assert opened.get("a/b", create=True).names() == []


def test_a_symlink_is_refused_even_in_place_of_a_directory_that_was_kept_open(
    directories: Directories, root: Directory
) -> None:
    used(directories, "a/b")
    (root.path / "elsewhere/b").mkdir(parents=True)
    (root.path / "a").rename(root.path / "moved")
    (root.path / "a").symlink_to("elsewhere")

    with pytest.raises(PathEscape):
        used(directories, "a/b")


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_only_a_few_directories_are_kept_open_and_none_after_closing(directories: Directories, root: Directory) -> None:
    before = open_descriptors(root.path)
    for number in range(MOST_IDLE + 10):
        (root.path / f"d{number}").mkdir()
        used(directories, f"d{number}")
    assert len(open_descriptors(root.path) - before) == MOST_IDLE

    directories.close()
    assert open_descriptors(root.path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_no_thread_uses_a_directory_that_another_thread_has_closed(directories: Directories, root: Directory) -> None:
    names = [f"d{number}" for number in range(MOST_IDLE + 8)]
    for name in names:
        (root.path / name / name).mkdir(parents=True)
    wrong: list[object] = []

    def work(start: int) -> None:
        for number in range(600):
            name = names[(start + number) % len(names)]
            with OpenDirectories(directories) as opened:
                if opened.get(name).status(name) is None:
                    wrong.append(name)

    before = open_descriptors(root.path)
    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    directories.close()
    assert (wrong, open_descriptors(root.path)) == ([], before)


def test_a_store_keeps_working_when_its_directory_is_moved_away_and_replaced(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        apply(store, Create(ONE, Item(1)))
        shutil.copytree(tmp_path / ".jit", tmp_path / "copy")
        apply(store, Replace(ONE, Item(2)))
        (tmp_path / ".jit").rename(tmp_path / "away")
        assert store.read(ONE) is None
        (tmp_path / "copy").rename(tmp_path / ".jit")

        assert store.read(ONE) is not None
        apply(store, Replace(ONE, Item(3)))
        assert '"number": 3' in (tmp_path / ".jit/issues/one.json").read_text()
        assert '"number": 2' in (tmp_path / "away/issues/one.json").read_text()
