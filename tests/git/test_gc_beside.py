"""`git gc --prune=now` may run at any moment: no capture fails, and no snapshot loses an object."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.git import contents, look, snapshots
from proof import effort
from tests.git.conftest import Home, commit_all, content_of, git, write


@contextmanager
def repeated(*actions: list[str], directory: Path, pause: threading.Lock) -> Iterator[list[str]]:
    """Run git commands one after the other, over and over, during the block; yields what went wrong."""
    done = threading.Event()
    wrong: list[str] = []

    def run() -> None:
        while not done.is_set():
            for action in actions:
                with pause:
                    ended = subprocess.run(["git", *action], cwd=directory, capture_output=True, text=True)
                if ended.returncode:
                    wrong.append(f"git {action}: {ended.stderr}")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield wrong
    finally:
        done.set()
        thread.join()


def test_collecting_garbage_all_the_time_disturbs_nothing(home: Home) -> None:
    write(home.top / ".gitignore", "*.log\n")
    commit_all(home.top)
    linked = home.top.parent / "linked"
    git(home.top, "worktree", "add", "-q", "-b", "w", str(linked))
    agent = Home(linked)
    chance = random.Random(effort.SEED)
    taken: dict[str, dict[bytes, tuple[str, bytes]]] = {}
    captured = None
    # The user stages the agent's very contents and drops them: objects that exist now and vanish the next moment.
    stage, drop = ["--work-tree", str(linked), "add", "-A"], ["reset", "-q", "--mixed"]
    pause = threading.Lock()  # git does not promise that its own `commit` survives a pruning beside it
    with repeated(stage, drop, ["gc", "-q", "--prune=now"], directory=home.top, pause=pause) as wrong:
        for number in range(effort.rounds(400, least=10)):
            for _ in range(chance.randrange(1, 6)):
                write(linked / f"f{chance.randrange(10)}", chance.randbytes(chance.choice((0, 10, 1000))))
            if chance.random() < 0.2:
                with pause:
                    commit_all(linked, f"commit {number}")
            captured = agent.capture(captured)
            if captured.commit is not None:
                taken[captured.commit] = content_of(linked)
    git(home.top, "gc", "-q", "--prune=now")

    assert [each for each in wrong if "'gc'" in each] == []  # files may vanish while the user stages them
    assert git(home.top, "fsck", "--no-dangling", "--full", "--strict") == ""
    assert sorted(snapshots.refs(agent.git).values()) == sorted(taken)
    assert snapshots.kept_packs(agent.git) == {}
    for commit, content in taken.items():
        assert agent.exported(commit) == content
        assert list(contents.verify(agent.git, commit)) == []


def prune(home: Home) -> None:
    git(home.top, "reflog", "expire", "--expire=now", "--all")
    git(home.top, "gc", "-q", "--prune=now")


def test_contents_that_the_user_staged_and_dropped_are_written_again(home: Home) -> None:
    write(home.top / "new", "content")
    write(home.top / ".gitignore", "forced\n")
    write(home.top / "forced", "tracked although ignored")
    git(home.top, "add", "new", "forced", "-f")
    one = home.capture()
    snapshots.delete_refs(home.git, ["s0"])
    git(home.top, "rm", "-q", "--cached", "new", "forced")
    prune(home)
    assert list(contents.verify(home.git, str(one.commit))) != []

    two = home.capture()  # the private index still has both, and their times are right

    assert two.tree == one.tree
    assert home.exported(str(two.commit)) == content_of(home.top)
    assert git(home.top, "fsck", "--no-dangling") == ""


@pytest.mark.parametrize("moment", ["update", "write_tree"])
def test_objects_that_vanish_during_the_capture_are_written_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    write(home.top / "new", "content")
    write(home.top / "deep/er/new", "more content")
    git(home.top, "add", "-A")
    git(home.top, "write-tree")
    git(home.top, "reset", "-q")
    real = getattr(look.WorkTree, moment)

    def pruning(self: look.WorkTree, *arguments: object) -> object:
        result = real(self, *arguments)
        git(home.top, "prune", "--expire=now")
        return result

    monkeypatch.setattr(look.WorkTree, moment, pruning)

    captured = home.capture()

    assert home.exported(str(captured.commit)) == content_of(home.top)
    assert git(home.top, "fsck", "--no-dangling") == ""


def test_the_pack_is_kept_from_its_arrival_until_the_reference_exists(home: Home) -> None:
    write(home.top / "new", os.urandom(10))
    captured = snapshots.capture(home.source(), snapshot_id="s", parent_tree=None, message="m", quiesced=True)
    assert captured.commit is not None
    assert captured.pack is not None
    assert snapshots.kept_packs(home.git) == {"s": captured.pack.with_suffix(".keep")}

    prune(home)
    assert list(contents.verify(home.git, captured.commit)) == []
    snapshots.create_ref(home.git, "s", captured.commit)
    snapshots.drop_keep(home.git, "s")
    prune(home)
    assert not captured.pack.exists()
    assert list(contents.verify(home.git, captured.commit)) == []
    snapshots.delete_refs(home.git, ["s"])
    prune(home)
    assert list(contents.verify(home.git, captured.commit)) != []


def test_a_keep_file_that_its_owner_removes_meanwhile_disturbs_nobody(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = home.git.objects / "pack"
    keeps = [write(place / f"pack-{each}.keep", f"holdfast {each}\n") for each in ("a", "b")]
    read_in = durable.read_in

    def while_the_others_go(directory: Directory, name: str) -> bytes:
        for each in keeps:
            if each.name != name:
                each.unlink(missing_ok=True)
        return read_in(directory, name)

    monkeypatch.setattr(durable, "read_in", while_the_others_go)
    assert len(snapshots.kept_packs(home.git)) == 1
