"""Directories, patterns and markers that are deeper than the stack, or that could be tried forever."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Refused
from holdfast.git.resolutions import normalized
from holdfast.repository.landing_checks import _is_match
from holdfast.repository.preparation import copy_files
from holdfast.repository.repository import Repository
from holdfast.repository.settings import COPY, change, read_settings
from tests.repository.stages import put_files
from tests.repository.test_git_home import path as path
from tests.repository.test_git_home import repository as repository
from tests.repository.test_git_home import unprobed as unprobed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="paths are too long there")

_LEVELS, _STACK = 300, 200
_LONGEST = 5.0  # seconds of processor time: what is tried again and again takes years


@contextlib.contextmanager
def small_stack() -> Iterator[None]:
    """A stack with which no function can call itself for each level of a deep directory."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + _STACK)
    try:
        yield
    finally:
        sys.setrecursionlimit(usual)


def deep(path: Path) -> Path:
    """A directory with a file, many directories below `path`."""
    path.mkdir(parents=True)
    for _ in range(_LEVELS):
        path = path / "d"
        path.mkdir()
    (path / "z").write_text("z")
    return path


def test_a_deep_directory_in_the_way_of_a_restore_is_refused(repository: Repository) -> None:
    top = repository.payload()
    with repository.lease() as lease:
        first = repository.snapshot(lease=lease).snapshot_id
    (top / "README").unlink()
    put_files(top, {".gitignore": "README/\n"})
    deep(top / "README")
    with small_stack(), repository.lease() as lease, pytest.raises(Refused, match="in the way"):
        repository.restore(first, lease=lease, reason="it was better")


def test_deep_references_of_an_isolated_worktree_do_not_prevent_its_removal(repository: Repository) -> None:
    repository.worktrees.create("dev", isolated=True)
    deep(repository.path("dev") / ".git/refs/heads/x")
    with small_stack():
        repository.remove_worktree("dev")

    assert [each.worktree_id for each in repository.worktrees.configs()] == ["main"]


def test_deep_directories_among_the_records_can_be_examined(repository: Repository) -> None:
    for name in (".jvs", ".jvs/worktrees", ".holdfast", ".jit", "ledger"):
        deep(repository.root / name / "x")
    with small_stack():
        assert repository.repair().failed == ()


@pytest.mark.parametrize("pattern", ["**/z", "deep", "**/deep"])
def test_deep_directories_are_copied_into_a_new_worktree(repository: Repository, tmp_path: Path, pattern: str) -> None:
    inner = deep(repository.payload() / "deep")
    change(repository.root, COPY, [pattern])
    with small_stack():
        copied = copy_files(repository, read_settings(repository.root), tmp_path)

    assert copied == 1
    assert (tmp_path / inner.relative_to(repository.payload()) / "z").read_text() == "z"


def test_a_pattern_of_files_to_copy_is_tried_once(repository: Repository, tmp_path: Path) -> None:
    (repository.payload() / "/".join("a" * 60)).mkdir(parents=True)
    change(repository.root, COPY, ["**/a/" * 20 + "x", "**/**/a/**/**/a"])
    begun = time.process_time()
    copied = copy_files(repository, read_settings(repository.root), tmp_path)

    assert (copied, time.process_time() - begun < _LONGEST) == (0, True)
    assert (tmp_path / "a/a/a").is_dir()


def test_a_pattern_of_inputs_is_tried_once() -> None:
    begun = time.process_time()
    matches = [_is_match("a" * 60 + each, ["**", "a"] * 20 + ["b", "*"]) for each in ("x", "bx")]

    assert (matches, time.process_time() - begun < _LONGEST) == ([False, True], True)


def test_settings_that_include_each_other_often_are_read_once(repository: Repository) -> None:
    for number in range(9):
        lines = "".join(f"path = f{number + 1}\n" * 20)
        put_files(repository.root.parent, {f"f{number}": f'[includeIf "gitdir:/nowhere/"]\n{lines}'})
    with (repository.root.parent / "config").open("a") as file:
        file.write("[include]\npath = f0\n")
    begun = time.process_time()
    repository.examine()

    assert time.process_time() - begun < _LONGEST


@pytest.mark.parametrize("levels", [2, _LEVELS])
def test_conflicts_in_conflicts_are_read_to_a_limit(levels: int) -> None:
    text = "<<<<<<< a\n" * levels + "x\n=======\ny\n>>>>>>> b\n" + "=======\nz\n>>>>>>> b\n" * (levels - 1)

    with small_stack():
        assert (normalized(text.encode()) is None) == (levels > 2)


def test_conflicts_among_many_short_lines_need_little_memory() -> None:
    text = b"<<<<<<< a\nx\n=======\ny\n>>>>>>> b\n" + b"\n" * 200_000
    tracemalloc.start()
    try:
        assert normalized(text) is not None
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 5 * len(text)
