"""Isolated worktrees: clones that share objects, whose own repository nothing of ours trusts."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import NewIssue
from holdfast.errors import DirectoryReplaced, Failure, Refused
from holdfast.git.isolated import read_head
from holdfast.git.program import Git
from holdfast.issues.tracker import Tracker
from holdfast.repository.agent import AssignmentOptions, take_work
from holdfast.repository.context import MAIN, Consistency, Proof
from holdfast.repository.git_init import adopt_checkout, deinitialise
from holdfast.repository.guard import WorktreePath, worktrees_of
from holdfast.repository.landing import Landings, LandOptions
from holdfast.repository.landing_records import LandingState
from holdfast.repository.opening import open_tracker, place_for_tracker
from holdfast.repository.repository import Repository, find_repository
from tests.repository.stages import files_in, files_stored, put_files
from tests.repository.test_git_home import (
    FILES,
    Case,
    Creation,
    CreationFromASnapshot,
    Removal,
    Renaming,
    home_of,
    of_the_user,
    require_sound,
)
from tests.repository.test_git_home import path as path
from tests.repository.test_git_home import repository as repository
from tests.repository.test_git_home import unprobed as unprobed
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and named pipes")


def commit(top: Path, files: dict[str, str], message: str = "work") -> str:
    """What an agent does: a commit with its own git."""
    put_files(top, files)
    git("add", "-A", at=top)
    git("commit", "-qm", message, at=top)
    return git("rev-parse", "HEAD", at=top)


def snapshot(repository: Repository, name: str = "dev") -> str:
    with repository.lease(name) as lease:
        return repository.snapshot(name, lease).snapshot_id


def branch(repository: Repository, name: str = "hf/dev") -> str:
    return git("rev-parse", f"refs/heads/{name}", at=repository.payload())


@pytest.fixture
def dev(repository: Repository) -> Path:
    repository.worktrees.create("dev", isolated=True)
    return repository.path("dev")


def everything_in(directory: Path) -> dict[str, tuple[int, int]]:
    """Every entry; but not its time, which git updates for objects that it would have written, where it may."""
    return {str(each): (each.lstat().st_ino, each.lstat().st_size) for each in directory.rglob("*")}


# --- The main checkout is none -------------------------------------------------------------------------


def test_commits_of_a_person_stay_while_main_is_looked_at(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit before each git command that Holdfast runs: whatever that knew before it is old by then."""
    made: list[str] = []
    run, one_person = Git.run, threading.Lock()

    def after_a_commit(self: Git, *arguments: str, **how: Any) -> bytes:
        with one_person:
            made.append(commit(path, {"person": str(len(made))}))
        return run(self, *arguments, **how)

    with repository.lease(MAIN) as lease:
        monkeypatch.setattr(Git, "run", after_a_commit)
        repository.snapshot(MAIN, lease, consistency=Consistency.BEST_EFFORT)
        home_of(repository).uncommitted(MAIN)
        home_of(repository).revision(MAIN)
        monkeypatch.undo()

    assert made
    assert git("rev-list", "HEAD", at=path).split()[: len(made)] == made[::-1]
    known = repository.config(MAIN).git
    assert known
    assert not known.isolated


# --- Working in one ------------------------------------------------------------------------------------


def test_an_agent_commits_without_a_write_outside_of_its_directory(
    repository: Repository, dev: Path, path: Path
) -> None:
    before, user = everything_in(path), of_the_user(path)
    assert files_in(dev) == FILES
    assert git("status", "--porcelain", at=dev) == ""
    assert git("symbolic-ref", "--short", "HEAD", at=dev) == "hf/dev"
    made = commit(dev, {"work": "done"})
    git("gc", "-q", at=dev)

    assert everything_in(path) == before
    assert git("cat-file", "-t", made, at=dev) == "commit"
    config = repository.config("dev")
    assert config.git
    assert config.git.isolated is True
    assert of_the_user(path) == user
    require_sound(repository)


def test_the_commits_of_one_land(repository: Repository, dev: Path, path: Path) -> None:
    before, status = files_in(path), git("status", "--porcelain", at=path)
    landings = Landings(repository, actor="human:user")

    def land() -> LandingState:
        with repository.lease("dev") as lease:
            entry = landings.enqueue("dev", Proof.of(lease), LandOptions())
        return landings.wait(entry.landing_id).state

    for content in ("one", "two"):  # the agent goes on where it was
        commit(dev, {"work": content})
        assert land() is LandingState.LANDED
        assert files_in(path) == {**before, "work": content}
    assert git("status", "--porcelain", at=path) == status

    put_files(dev, {"work": "uncommitted"})
    with pytest.raises(Refused, match="is isolated, and has uncommitted changes: work"):
        land()
    assert files_in(path) == {**before, "work": "two"}


def test_commits_arrive_with_a_snapshot_and_when_they_are_asked_for(repository: Repository, dev: Path) -> None:
    home, base = home_of(repository), branch(repository)
    first = commit(dev, {"work": "one"})
    assert branch(repository) == base
    put_files(dev, {"more": "unsaved"})
    taken = snapshot(repository)
    assert branch(repository) == first
    assert git("rev-parse", f"refs/holdfast/snapshots/{taken}^", at=repository.payload()) == first
    assert files_stored(repository.context, taken) == {**FILES, "work": "one", "more": "unsaved"}

    second = commit(dev, {"work": "two"})
    assert home.work_commit("dev") == second == branch(repository)
    git("repack", "-adfq", at=dev)
    third = commit(dev, {"work": "three"})
    git("gc", "-q", "--prune=now", at=dev)
    assert home.work_commit("dev") == third
    assert home.work_commit(MAIN) == git("rev-parse", "HEAD", at=repository.payload())
    repository.worktrees.create("linked", snapshot="dev")
    assert home.work_commit("linked") == third
    require_sound(repository)


def test_the_branch_follows_what_is_checked_out_there(repository: Repository, dev: Path) -> None:
    home = home_of(repository)
    one = commit(dev, {"work": "one"})
    assert home.work_commit("dev") == one
    git("commit", "-q", "--amend", "-m", "better", at=dev)
    amended = git("rev-parse", "HEAD", at=dev)
    assert home.work_commit("dev") == amended == branch(repository)
    git("checkout", "-q", "-b", "other", "HEAD~1", at=dev)
    other = commit(dev, {"other": "x"})
    assert home.work_commit("dev") == other == branch(repository)
    git("checkout", "-q", "--detach", at=dev)
    assert home.work_commit("dev") == other
    git("pack-refs", "--all", at=dev)
    git("checkout", "-q", "hf/dev", at=dev)
    assert home.work_commit("dev") == amended
    git("checkout", "-q", "--orphan", "new", at=dev)
    assert home.work_commit("dev") == amended  # it has no commit yet
    require_sound(repository)


def test_objects_of_the_repository_stay_as_long_as_the_clone_needs_them(
    repository: Repository, dev: Path, path: Path
) -> None:
    git("reset", "-q", "--hard", at=path)
    base = branch(repository)
    git("commit", "-q", "--amend", "--allow-empty", "-m", "rewritten", at=path)
    git("stash", "clear", at=path)
    git("reflog", "expire", "--expire=now", "--all", at=path)
    made = commit(dev, {"work": "done"})
    git("gc", "-q", "--prune=now", at=path)

    git("fsck", "--strict", at=dev)
    assert git("rev-parse", f"{made}~1", at=dev) == base
    snapshot(repository)
    git("gc", "-q", "--prune=now", at=path)
    assert branch(repository) == made
    require_sound(repository)


def test_the_commands_work_as_in_a_linked_worktree(repository: Repository, dev: Path, path: Path) -> None:
    commit(dev, {"work": "one"})
    first = snapshot(repository)
    assert list(repository.snapshots.status("dev").changes) == []
    put_files(dev, {"work": "worse", "src/a": "worse"})
    assert [each.path for each in repository.snapshots.status("dev").changes] == [b"src/a", b"work"]
    with repository.lease("dev") as lease:
        repository.restore(first, "dev", lease, reason="it was better")
    assert files_in(dev) == {**FILES, "work": "one"}
    assert repository.worktree_around(dev / "src") == "dev"
    assert find_repository(dev / ".git/objects") == repository.root
    assert worktrees_of(str(dev / "src/a")) == [WorktreePath(str(repository.root), "dev")]

    repository.worktrees.change_name("dev", "new")
    new = path.with_name("project.worktrees") / "new"
    assert repository.path("new") == new
    made = commit(new, {"work": "after"})
    assert home_of(repository).work_commit("new") == made == branch(repository, "hf/new")
    shutil.rmtree(new)
    with repository.lease("new") as lease:
        repository.restore(first, "new", lease, reason="it is gone")
    assert files_in(new) == {**FILES, "work": "one"}
    assert read_head(new) == made
    commit(new, {"work": "again"})
    snapshot(repository, "new")
    require_sound(repository)


def test_a_removal_keeps_every_commit_of_the_clone(repository: Repository, dev: Path, path: Path) -> None:
    user = of_the_user(path)
    kept = [commit(dev, {"work": "one"})]
    git("checkout", "-q", "-b", "side", "HEAD~1", at=dev)
    below = commit(dev, {"side": "x"})
    kept.append(commit(dev, {"side": "y"}))
    git("branch", "below", below, at=dev)
    put_files(dev, {"side": "stashed"})
    git("stash", "-q", at=dev)
    kept.append(git("rev-parse", "refs/stash", at=dev))
    put_files(dev, {"unsaved": "too"})
    removed = repository.remove_worktree("dev")

    assert removed.saved is not None
    assert files_stored(repository.context, removed.saved)["unsaved"] == "too"
    assert not dev.exists()
    git("gc", "-q", "--prune=now", at=path)
    for each in kept:
        assert git("for-each-ref", "--contains", each, "refs/heads/hf", at=path), each
    assert of_the_user(path) == user
    assert git("for-each-ref", "refs/holdfast/incoming", at=path) == ""
    require_sound(repository)
    assert os.listdir(repository.context.paths.worktrees) == []


def test_deinit_leaves_a_clone_that_the_repository_does_not_know(repository: Repository, dev: Path, path: Path) -> None:
    made = commit(dev, {"work": "one"})
    with pytest.raises(Refused, match="has commits"):
        deinitialise(repository)
    done = deinitialise(repository, force=True)

    assert done.worktrees == (dev,)
    assert git("rev-parse", "hf/dev", at=path) == made
    assert git("worktree", "list", at=path).count("\n") == 0
    assert not any(each.name.startswith("holdfast") for each in (*path.rglob("*"), *(dev / ".git").rglob("*")))
    commit(dev, {"work": "two"})


def test_a_repository_with_sha256_has_isolated_worktrees(scratch: Path) -> None:
    top = scratch / "modern"
    git("init", "-q", "-b", "trunk", "--object-format=sha256", top)
    commit(top, FILES)
    adopt_checkout(top)
    repository = Repository(top)
    repository.worktrees.create("dev", isolated=True)
    made = commit(repository.path("dev"), {"work": "one"})
    snapshot(repository)
    assert branch(repository) == made


def test_the_work_of_an_agent_arrives_at_its_end(repository: Repository, path: Path) -> None:
    tracker: Tracker = open_tracker(place_for_tracker(path), actor="agent:one")
    tracker.initialise()
    issue = tracker.create(NewIssue(title="do it"))
    options = AssignmentOptions(issue_id=issue.id, isolated=True, worktree="dev")
    with take_work(repository, tracker, options) as assignment:
        commit(assignment.path, {"work": "one"})
        saved = assignment.succeed()
    dev = repository.path("dev")
    assert branch(repository) == read_head(dev)
    again = tracker.create(NewIssue(title="more"))
    with take_work(repository, tracker, options._replace(issue_id=again.id)) as assignment:
        git("commit", "-q", "--allow-empty", "-m", "no content differs", at=dev)
        assert assignment.succeed().snapshot_id == saved.snapshot_id
    assert branch(repository) == git("rev-parse", "HEAD", at=dev)
    repository.worktrees.create("linked")
    other = tracker.create(NewIssue(title="other"))
    with (
        pytest.raises(Refused, match="not isolated"),
        take_work(repository, tracker, options._replace(issue_id=other.id, worktree="linked")),
    ):
        pass


# --- What an agent may put there -----------------------------------------------------------------------


def fifo(at: Path) -> None:
    at.unlink(missing_ok=True)
    os.mkfifo(at)


def huge(at: Path) -> None:
    with at.open("wb") as file:
        file.truncate(1 << 33)


def link(at: Path) -> None:
    away = at.with_name("elsewhere")
    if at.exists():
        at.rename(away)
    at.symlink_to(away)


def directory(at: Path) -> None:
    at.unlink()
    at.mkdir()


def text(content: str) -> Callable[[Path], object]:
    return lambda at: at.write_text(content)


NO_HEADS: dict[str, Callable[[Path], object]] = {
    "a pipe": fifo,
    "huge": huge,
    "a link": link,
    "a directory": directory,
    "garbage": text("garbage"),
    "a path": text("ref: refs/../../../../x"),
    "absolute": text("ref: /etc/passwd"),
    "itself": text("ref: refs/heads/hf/dev/../../../HEAD"),
    "an unknown commit": text("1" * 40),
}


@pytest.mark.parametrize("kind", NO_HEADS)
@pytest.mark.sampled(1)
def test_a_head_that_is_none_is_refused_and_nothing_waits_for_it(repository: Repository, dev: Path, kind: str) -> None:
    before = branch(repository)
    NO_HEADS[kind](dev / ".git/HEAD")
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    with pytest.raises(Refused, match="cannot be read"):
        home_of(repository).work_commit("dev")
    assert branch(repository) == before
    assert list(repository.examine()) == []
    assert next(iter(repository.snapshots.status("dev").changes), None) is None

    repository.remove_worktree("dev", keep_unsaved=False)  # what cannot be read stays in sight
    [left] = repository.context.paths.worktrees.iterdir()
    assert (left / "README").read_text() == "read me"
    require_sound(repository)


def test_references_that_are_pipes_or_links_are_refused(repository: Repository, dev: Path, path: Path) -> None:
    refs = dev / ".git/refs/heads/hf/dev"
    for spoil in (fifo, huge, link):
        kept = refs.read_bytes()
        spoil(refs)
        with pytest.raises(Refused, match="cannot be read"):
            snapshot(repository)
        refs.unlink()
        refs.write_bytes(kept)
    commit(dev, {"work": "one"})
    shutil.move(dev / ".git/refs/heads/hf", dev / "aside")
    (dev / ".git/refs/heads/hf").symlink_to(path / ".git/refs/heads")
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    (dev / ".git/refs/heads/hf").unlink()
    fifo(dev / ".git/packed-refs")
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)


def trap(top: Path, canary: Path) -> None:
    """Everything by which the configuration of a repository makes git start a program."""
    command = f"touch {canary}; cat"
    for key, value in {
        "core.fsmonitor": f"{command} #",
        "core.sshCommand": command,
        "core.pager": command,
        "core.editor": command,
        "core.alternateRefsCommand": f"{command} #",
        "uploadpack.packObjectsHook": command,
        "filter.trap.clean": command,
        "filter.trap.smudge": command,
        "filter.trap.process": command,
        "diff.external": command,
        "remote.origin.uploadpack": command,
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::sh -c 'touch {canary}'",
        "protocol.ext.allow": "always",
        "extensions.partialClone": "origin",
        "core.repositoryFormatVersion": "1",
        "core.worktree": "/",
    }.items():
        git("config", key, value, at=top)
    hooks = top / ".git/hooks"
    for name in ("post-index-change", "reference-transaction", "pre-auto-gc", "post-checkout", "post-upload-pack"):
        put_files(hooks, {name: f"#!/bin/sh\ntouch {canary}\n"})
        (hooks / name).chmod(0o755)
    git("config", "core.hooksPath", str(hooks), at=top)
    put_files(top, {".gitattributes": "* filter=trap diff=trap\n"})


def test_nothing_that_the_clone_configures_is_run(repository: Repository, dev: Path, scratch: Path) -> None:
    canary = scratch / "canary"
    made = commit(dev, {"work": "one"})
    git("init", "-q", dev / "nested", at=dev)
    commit(dev / "nested", {"file": "x"})
    for top in (dev / "nested", dev):
        trap(top, canary)
    taken = snapshot(repository)
    assert branch(repository) == made
    put_files(dev, {"work": "worse"})
    assert [each.path for each in repository.snapshots.status("dev").changes] == [b"work"]
    with repository.lease("dev") as lease:
        repository.restore(taken, "dev", lease, reason="it was better")
    repository.worktrees.change_name("dev", "new")
    require_sound(repository)
    repository.remove_worktree("new", force=True)
    require_sound(repository)
    assert not canary.exists()


def test_the_trap_works(dev: Path, scratch: Path) -> None:
    """Otherwise the test before proves nothing."""
    canary = scratch / "canary"
    trap(dev, canary)
    git("config", "--unset", "core.worktree", at=dev)
    put_files(dev, {"README": "other"})
    git("status", at=dev)
    assert canary.exists()


def test_objects_of_other_repositories_do_not_come_along(repository: Repository, dev: Path, scratch: Path) -> None:
    """The agent may not be allowed to read them, and would find them in the repository that it shares objects with."""
    other = scratch / "other"
    git("init", "-q", "-b", "trunk", other)
    secret = commit(other, {"secret": "secret"})
    objects = dev / ".git/objects"
    with (objects / "info/alternates").open("a") as file:
        file.write(f"{other / '.git/objects'}\n")
    (dev / ".git/refs/heads/hf/dev").write_text(f"{secret}\n")
    git("cat-file", "-e", secret, at=dev)
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)

    (objects / secret[:2]).mkdir(exist_ok=True)
    (objects / secret[:2] / secret[2:]).symlink_to(other / ".git/objects" / secret[:2] / secret[2:])
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    shutil.rmtree(objects / secret[:2])
    (objects / secret[:2]).symlink_to(other / ".git/objects" / secret[:2])
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    git("gc", "-q", at=other)
    shutil.rmtree(objects / "pack")
    (objects / "pack").symlink_to(other / ".git/objects/pack")
    git("cat-file", "-e", secret, at=dev)
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    shutil.rmtree(dev / ".git/objects")
    (dev / ".git/objects").symlink_to(other / ".git/objects")
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    with pytest.raises(AssertionError):
        git("cat-file", "-e", secret, at=repository.payload())


def test_a_forged_or_damaged_object_is_refused(repository: Repository, dev: Path) -> None:
    made = commit(dev, {"work": "one"})
    loose = dev / ".git/objects" / made[:2] / made[2:]
    good = loose.read_bytes()
    tree = git("rev-parse", f"{made}^{{tree}}", at=dev)
    forged = f"tree {tree}\nauthor a <a> 1 +0000\ncommitter a <a> 1 +0000\n\nforged\n".encode()
    for content in (zlib.compress(b"commit %d\0%s" % (len(forged), forged)), good[:-5], b"", b"garbage"):
        loose.chmod(0o644)
        loose.write_bytes(content)
        with pytest.raises(Refused, match="cannot be read"):
            snapshot(repository)
    loose.unlink()
    os.mkfifo(loose)
    with pytest.raises(Refused, match="cannot be read"):
        snapshot(repository)
    loose.unlink()
    loose.write_bytes(good)
    packs = dev / ".git/objects/pack"
    for spoil in (fifo, text("garbage")):
        bad = packs / f"pack-{'1' * 40}.pack"
        bad.touch()
        spoil(bad)
        if spoil is not fifo:
            with pytest.raises(Refused, match="cannot be read"):
                snapshot(repository)
        bad.unlink()
    snapshot(repository)
    assert branch(repository) == made
    require_sound(repository)


def test_a_forged_holdfast_file_leads_nowhere(repository: Repository, dev: Path, path: Path) -> None:
    repository.worktrees.create("victim", isolated=True)
    victim = repository.path("victim")
    note = dev / ".git/holdfast"
    mine = note.read_bytes()
    forgeries: list[Callable[[Path], object]] = [
        lambda at: at.write_bytes((victim / ".git/holdfast").read_bytes()),
        lambda at: at.write_text(str(path / ".git")),
        lambda at: at.write_text("../../project/.git/worktrees/victim"),
        lambda at: at.write_bytes(b"/\0/worktrees/x"),
        lambda at: at.write_text("x" * (1 << 20)),
        huge,
        fifo,
        link,
        directory,
        lambda at: at.unlink(),
    ]
    for forge in forgeries:
        forge(note)
        assert WorktreePath(str(repository.root), "victim") not in worktrees_of(str(dev / "x"))
        with pytest.raises((DirectoryReplaced, Failure)):
            snapshot(repository)
        assert {each.code for each in repository.examine()} == {"worktree-disconnected"}
        shutil.rmtree(note) if note.is_dir() and not note.is_symlink() else note.unlink(missing_ok=True)
        (dev / ".git/elsewhere").unlink(missing_ok=True)
        note.write_bytes(mine)
    shutil.move(dev / ".git", dev.with_name("aside"))
    for target in (path / ".git", victim / ".git", dev.with_name("aside")):
        (dev / ".git").symlink_to(target)
        with pytest.raises((DirectoryReplaced, Failure)):
            snapshot(repository)
        (dev / ".git").unlink()
    shutil.move(dev.with_name("aside"), dev / ".git")
    require_sound(repository)


def test_an_isolated_worktree_needs_a_git_checkout(scratch: Path) -> None:
    from holdfast.repository.init import initialise
    from tests.support.homes import SAFE

    initialise(scratch / "plain", probe=lambda directory: SAFE)
    with pytest.raises(Refused, match="no branches") as refused:
        Repository(scratch / "plain").worktrees.create("dev", isolated=True)
    assert refused.value.hint == "Leave out --isolated."


# --- Kills ---------------------------------------------------------------------------------------------


class IsolatedCreation(Creation):
    def act(self, repository: Repository) -> object:
        return repository.worktrees.create("dev", isolated=True)

    def is_new(self, repository: Repository) -> bool:
        if not super().is_new(repository):
            return False
        dev = repository.path("dev")
        assert (dev / ".git").is_dir()
        assert git("status", "--porcelain", at=dev) == ""
        return True


class IsolatedCreationFromASnapshot(CreationFromASnapshot):
    def act(self, repository: Repository) -> object:
        return repository.worktrees.create("dev", snapshot="head", isolated=True)


class IsolatedRenaming(Renaming):
    def arrange(self, repository: Repository) -> None:
        repository.worktrees.create("old", isolated=True)
        commit(repository.path("old"), {"committed": "x"})
        put_files(repository.path("old"), {"work": "unsaved"})

    def is_new(self, repository: Repository) -> bool:
        config = repository.worktrees.configs()[1]
        top = repository.path(config.worktree_id)
        assert files_in(top)["work"] == "unsaved"
        assert home_of(repository).work_commit(config.worktree_id) == read_head(top)
        assert config.git
        assert config.git.branch == f"hf/{config.worktree_id}"
        return config.worktree_id == "new"


class IsolatedRemoval(Removal):
    def arrange(self, repository: Repository) -> None:
        repository.worktrees.create("old", isolated=True)
        top = repository.path("old")
        made = [commit(top, {"committed": "x"})]
        git("checkout", "-q", "-b", "side", "HEAD~1", at=top)
        made.append(commit(top, {"side": "x"}))
        put_files(top, {"work": "unsaved"})
        repository.root.parent.with_name("made").write_text("\n".join(made))

    def is_new(self, repository: Repository) -> bool:
        if not super().is_new(repository):
            return False
        for each in repository.root.parent.with_name("made").read_text().split():
            assert git("for-each-ref", "--contains", each, "refs/heads/hf", at=repository.payload()), "a commit is lost"
        return True


class IsolatedSnapshot(Case):
    def arrange(self, repository: Repository) -> None:
        repository.worktrees.create("dev", isolated=True)
        commit(repository.path("dev"), {"committed": "x"})
        put_files(repository.path("dev"), {"work": "unsaved"})

    def act(self, repository: Repository) -> object:
        return snapshot(repository)

    def is_new(self, repository: Repository) -> bool:
        stored = [files_stored(repository.context, each) for each in repository.snapshots.all_ids()]
        assert all(each["work"] == "unsaved" and each["committed"] == "x" for each in stored)
        assert not stored or branch(repository) == read_head(repository.path("dev"))
        return bool(stored)


CASES: list[type[Case]] = [
    IsolatedCreation,
    IsolatedCreationFromASnapshot,
    IsolatedRenaming,
    IsolatedRemoval,
    IsolatedSnapshot,
]
