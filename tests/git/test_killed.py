"""A capture or a restore that is killed leaves scratch, perhaps a `.keep` file, and everything of the user's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.git import program, snapshots
from holdfast.git.restore import restore
from proof import effort
from proof.crash import Ending, Outcome, kill_points
from proof.traced import end_of_group, orphans_are_ours
from tests.git.conftest import Home, commit_all, content_of, fingerprint, git, new_repository, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits for the children of a killed process")


def killed_at(number: int, when: str, work: Callable[[], object]) -> bool:
    """Do the work in a child that is killed at one of its starts of git, with every git that still runs; False if it
    has fewer."""
    with orphans_are_ours():
        status = end_of_group(_start_doomed(number, when, work))
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _start_doomed(number: int, when: str, work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        started = 0
        real = subprocess.Popen

        def deadly(*arguments: Any, **options: Any) -> Any:
            nonlocal started
            started += 1
            if started != number:
                return real(*arguments, **options)
            if when == "during":  # git dies at some moment after its start, and so do we
                kept = {"cwd": options["cwd"], "env": options["env"]}
                process: Any = real(arguments[0], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **kept)
                process.kill()
                process.wait()
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        program.subprocess.Popen = deadly  # type: ignore[attr-defined]
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def prepared(top: Path) -> tuple[Home, snapshots.GitCaptured, snapshots.GitCaptured]:
    home = Home(new_repository(top))
    for name in ("a", "b", "dir/c"):
        write(top / name, "1")
    commit_all(top)
    one = home.capture()
    write(top / "a", "22")
    write(top / "new", "2")
    (top / "b").unlink()
    two = home.capture(one)
    write(top / "a", "333")
    write(top / "dir/d", "3")
    (top / "new").unlink()
    git(top, "add", "a")
    return home, one, two


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_capture_that_is_killed_at_any_start_of_git_leaves_only_scratch(tmp_path: Path, when: str) -> None:
    number = 0
    while True:
        number += 1
        home, _, two = prepared(tmp_path / f"{number}")
        users, files, refs = fingerprint(home.git.common), content_of(home.top), snapshots.refs(home.git)
        source = home.source()
        was_killed = killed_at(
            number,
            when,
            lambda: snapshots.capture(source, snapshot_id="x", parent_tree=two.tree, message="m", quiesced=True),  # noqa: B023
        )

        assert fingerprint(home.git.common) == users
        assert content_of(home.top) == files
        assert snapshots.refs(home.git) == refs
        assert set(snapshots.kept_packs(home.git)) <= {"x"}
        assert git(home.top, "fsck", "--no-dangling") == ""
        shutil.rmtree(source.objects.parent)
        snapshots.drop_keep(home.git, "x")
        captured = home.capture(two)
        assert home.exported(str(captured.commit)) == files
        if not was_killed:
            break
    assert number > 7
    effort.tried["kills at a start of git"] += number - 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_restore_that_is_killed_at_any_start_of_git_is_finished_by_the_next(tmp_path: Path, when: str) -> None:
    number = 0
    while True:
        number += 1
        home, one, two = prepared(tmp_path / f"{number}")
        three = home.capture(two)
        users, files = fingerprint(home.git.common), content_of(home.top)
        source = home.source()
        was_killed = killed_at(number, when, lambda: restore(source, three.tree, one.tree))  # noqa: B023
        target = home.exported(str(one.commit))

        assert fingerprint(home.git.common) == users
        found = content_of(home.top)
        for path in {*files, *target, *found}:  # git unlinks a file, and writes it anew: it may have died in between
            torn = path in target and (path not in found or target[path][1].startswith(found[path][1]))
            assert torn or found.get(path) in (files.get(path), target.get(path))
        now = home.capture(three)
        restore(home.source(), now.tree, one.tree)
        assert content_of(home.top) == target
        if not was_killed:
            break
    assert number > 2


class Captures:
    """A capture up to its reference, killed at every file system call of ours."""

    def prepare(self, directory: Path) -> None:
        prepared(directory / "top")

    def operate(self, directory: Path) -> None:
        home = Home(directory / "top")
        parent = git(home.top, "rev-parse", "refs/holdfast/snapshots/s1^{tree}")
        source = home.source()
        captured = snapshots.capture(source, snapshot_id="x", parent_tree=parent, message="m", quiesced=True)
        assert captured.commit is not None
        snapshots.create_ref(home.git, "x", captured.commit)
        snapshots.drop_keep(home.git, "x")

    def check(self, directory: Path, outcome: Outcome) -> None:
        home = Home(directory / "top")
        assert git(home.top, "fsck", "--no-dangling") == ""
        known = snapshots.refs(home.git)
        git(home.top, "gc", "-q", "--prune=now")
        assert git(home.top, "fsck", "--no-dangling") == ""
        assert outcome.ending is not Ending.SUCCEEDED or "x" in known
        if "x" in known:
            assert home.exported(known["x"]) == content_of(home.top)
        later = snapshots.capture(home.source(), snapshot_id="y", parent_tree=None, message="m", quiesced=True)
        assert home.exported(str(later.commit)) == content_of(home.top)


def test_a_capture_that_is_killed_at_any_call_leaves_a_sound_repository() -> None:
    kill_points(Captures(), share=effort.SHARE).require_clean(at_least=30)
