"""A walker reaches the right directory from any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import NotFound
from holdfast.trees.walker import TreeWalker
from proof.effort import rounds
from tests.support.descriptors import open_descriptors

NAMES = ["a", "b", "ab"]
PATHS = ["", *NAMES, *(f"{one}/{two}" for one in NAMES for two in NAMES)]
PATHS += [f"{path}/{name}" for path in PATHS if path.count("/") == 1 for name in NAMES]


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("top")
    for path in PATHS:
        (made / path).mkdir(parents=True, exist_ok=True)
    return made


@given(paths=st.lists(st.sampled_from(PATHS)))
@settings(max_examples=rounds(60, least=5), deadline=None)
def test_each_step_reaches_the_right_directory(top: Path, paths: list[str]) -> None:
    with TreeWalker(top) as walker:
        for path in paths:
            found = walker.enter(path)
            assert os.fstat(found).st_ino == (top / path).stat().st_ino


@given(paths=st.lists(st.sampled_from([*PATHS, "x", "a/x", "a/b/x", "ab/ab/ab/ab", "abc"]), max_size=12))
@settings(max_examples=rounds(60, least=5), deadline=None)
def test_a_failed_step_does_not_mislead_the_next(top: Path, paths: list[str]) -> None:
    with TreeWalker(top) as walker:
        for path in paths:
            if path in PATHS:
                assert os.fstat(walker.enter(path)).st_ino == (top / path).stat().st_ino
            else:
                with pytest.raises(FileNotFoundError):
                    walker.enter(path)


def test_the_root_is_found_after_a_failed_step(top: Path) -> None:
    with TreeWalker(top) as walker:
        with pytest.raises(FileNotFoundError):
            walker.enter("a/x")
        assert os.fstat(walker.enter("")).st_ino == top.stat().st_ino


def test_links_are_not_followed_and_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    before = open_descriptors()
    with TreeWalker(tmp_path) as walker:
        for path in ("link", "link/below"):
            with pytest.raises(OSError, match="link"):
                walker.enter(path)
    assert open_descriptors() - before == set()


def test_a_missing_root_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        TreeWalker(tmp_path / "nothing")
