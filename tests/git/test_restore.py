"""A restore in place touches only files that differ, and refuses as a whole what would lose anything."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.errors import Changed, Failure, Refused
from holdfast.git.restore import restore
from tests.git.conftest import Home, commit_all, content_of, fingerprint, git, new_repository, write
from tests.support.homes import approve_programs


def test_files_change_and_nothing_else(home: Home) -> None:
    write(home.top / ".gitignore", "*.log\n")
    write(home.top / "x.log", "ignored")
    write(home.top / "dir/a", "a")
    (home.top / "link").symlink_to("one")
    one, before = home.capture(), content_of(home.top)
    write(home.top / "new/file", "new")
    write(home.top / "one", "changed\n")
    shutil.rmtree(home.top / "dir")
    write(home.top / "dir", "a file")
    (home.top / "link").unlink()
    (home.top / "two").chmod(0o755)
    two, after = home.capture(one), content_of(home.top)
    directory, untouched = home.top.stat().st_ino, (home.top / "sub/three").stat()
    users = fingerprint(home.git.common)

    restore(home.source(), two.tree, one.tree)

    assert content_of(home.top) == before
    assert not (home.top / "new").exists()
    assert home.unsaved(one.tree) == []
    assert home.top.stat().st_ino == directory
    assert (home.top / "sub/three").stat() == untouched
    assert home.capture(one).commit is None
    restore(home.source(), one.tree, two.tree)
    assert content_of(home.top) == after
    assert fingerprint(home.git.common) == users


def test_one_path_is_restored(home: Home) -> None:
    write(home.top / "dir/a", "a")
    write(home.top / "dir/b", "b")
    one = home.capture()
    write(home.top / "dir/a", "changed")
    write(home.top / "dir/c", "new")
    write(home.top / "one", "changed\n")
    two = home.capture(one)

    tree = restore(home.source(), two.tree, one.tree, b"dir")

    assert content_of(home.top / "dir") == {b"a": ("f", b"a"), b"b": ("f", b"b")}
    assert (home.top / "one").read_text() == "changed\n"
    assert home.unsaved(tree) == []
    three = home.capture(two)
    assert three.tree == tree
    restore(home.source(), tree, one.tree, b"one")
    assert content_of(home.top) == home.exported(str(one.commit))
    restore(home.source(), one.tree, two.tree, b"dir/c")
    assert (home.top / "dir/c").read_text() == "new"


def test_an_ignored_file_in_the_way_is_not_overwritten(home: Home) -> None:
    write(home.top / "cache", "old content")
    write(home.top / "deep/cache", "old content")
    one = home.capture()
    (home.top / "cache").unlink()
    shutil.rmtree(home.top / "deep")
    write(home.top / ".gitignore", "cache\n")
    write(home.top / "one", "changed\n")
    two = home.capture(one)
    write(home.top / "cache", "precious")
    before = content_of(home.top)

    with pytest.raises(Refused, match="cache"):
        restore(home.source(), two.tree, one.tree)
    assert content_of(home.top) == before
    (home.top / "cache").unlink()
    write(home.top / "deep", "in the place of a directory, and ignored")
    write(home.top / ".git/info/exclude", "deep\n")
    before = content_of(home.top)
    with pytest.raises(Failure):
        restore(home.source(), two.tree, one.tree)
    assert content_of(home.top) == before


def test_an_ignored_directory_in_the_way_is_not_removed(home: Home) -> None:
    write(home.top / "build", "a file once")
    one = home.capture()
    (home.top / "build").unlink()
    write(home.top / ".gitignore", "/build/\n")
    two = home.capture(one)
    write(home.top / "build/precious", "x")
    before = content_of(home.top)

    with pytest.raises(Refused, match="build"):
        restore(home.source(), two.tree, one.tree)
    assert content_of(home.top) == before


def test_a_write_after_the_capture_is_not_lost(home: Home) -> None:
    write(home.top / "a", "1")
    write(home.top / "b", "1")
    one = home.capture()
    write(home.top / "a", "2")
    write(home.top / "b", "2")
    write(home.top / "added", "2")
    two = home.capture(one)
    for path, content in (("b", "late"), ("added", "late")):
        was = (home.top / path).read_text()
        write(home.top / path, content)
        before = content_of(home.top)
        with pytest.raises(Changed, match=path):
            restore(home.source(), two.tree, one.tree)
        assert content_of(home.top) == before
        write(home.top / path, was)
    (home.top / "b").unlink()
    restore(home.source(), two.tree, one.tree)  # nothing to lose
    assert content_of(home.top) == home.exported(str(one.commit))


def test_a_write_of_the_same_size_in_the_same_instant_is_not_lost(home: Home) -> None:
    write(home.top / "a", "1")
    one = home.capture()
    write(home.top / "a", "2")
    two = home.capture(one)
    was = (home.top / "a").stat()
    write(home.top / "a", "3")
    os.utime(home.top / "a", ns=(was.st_atime_ns, was.st_mtime_ns))

    with pytest.raises(Changed):
        restore(home.source(), two.tree, one.tree)


def test_an_index_that_stands_for_another_tree_is_corrected_first(home: Home) -> None:
    one = home.capture()
    write(home.top / "one", "changed\n")
    two = home.capture(one)
    write(home.top / "two", "changed\n")
    home.capture(two)
    git(home.top, "checkout", "-q", "--", "two")

    restore(home.source(), two.tree, one.tree)

    assert content_of(home.top) == home.exported(str(one.commit))


def test_a_restore_can_be_repeated_after_a_kill(home: Home) -> None:
    for number in range(20):
        write(home.top / f"file{number}", "1")
    one = home.capture()
    for number in range(20):
        write(home.top / f"file{number}", "22")
    two = home.capture(one)
    for number in range(10):  # as an interrupted restore leaves it: some files of each tree, and the old index
        write(home.top / f"file{number}", "1")

    now = home.capture(two)
    assert {each.path for each in home.unsaved(two.tree)} == {b"file%d" % number for number in range(10)}
    restore(home.source(), now.tree, one.tree)
    assert content_of(home.top) == home.exported(str(one.commit))


def test_nested_repositories_stay(home: Home) -> None:
    one = home.capture()
    inner = new_repository(home.top / "inner")
    write(inner / "file", "x")
    commit_all(inner)
    write(home.top / "one", "changed\n")
    two = home.capture(one)

    restore(home.source(), two.tree, one.tree)

    assert (inner / "file").read_text() == "x"
    assert (home.top / "one").read_text() == "one\n"
    restore(home.source(), one.tree, two.tree)
    assert (inner / "file").read_text() == "x"


def test_a_new_file_outside_of_a_sparse_checkout_comes_back(home: Home) -> None:
    git(home.top, "sparse-checkout", "set", "--no-cone", "/one")
    one = home.capture()
    write(home.top / "elsewhere/new", "content")
    two = home.capture(one)
    for tree in (one.tree, two.tree):
        restore(home.source(), home.capture().tree, tree)

    assert (home.top / "elsewhere/new").read_text() == "content"
    assert not (home.top / "two").exists()


def test_a_sparse_checkout_stays_sparse(home: Home) -> None:
    git(home.top, "sparse-checkout", "set", "--no-cone", "/one")
    one = home.capture()
    write(home.top / "one", "changed\n")
    two = home.capture(one)

    restore(home.source(), two.tree, one.tree)

    assert content_of(home.top) == {b"one": ("f", b"one\n")}
    assert home.unsaved(one.tree) == []


def test_filters_and_line_endings_are_restored(home: Home) -> None:
    write(home.top / ".gitattributes", "*.txt text eol=crlf\n*.big filter=rot\n")
    for way in ("clean", "smudge"):
        git(home.top, "config", f"filter.rot.{way}", "tr a-zA-Z n-za-mN-ZA-M")
    approve_programs(home.top)
    write(home.top / "a.txt", "1\r\n")
    write(home.top / "a.big", "Hello")
    one, before = home.capture(), content_of(home.top)
    write(home.top / "a.txt", "2\r\n")
    write(home.top / "a.big", "Other")
    two = home.capture(one)

    restore(home.source(), two.tree, one.tree)

    assert content_of(home.top) == before


def test_the_path_of_the_checkout_may_have_anything(tmp_path: Path) -> None:
    home = Home(new_repository(tmp_path / 'a:b "c"\n\\d;'))
    write(home.top / "file", "1")
    one = home.capture()
    write(home.top / "file", "2")
    two = home.capture(one)

    restore(home.source(), two.tree, one.tree)

    assert (home.top / "file").read_text() == "1"
