"""Initialising repositories: the result, the refusals, and kills at every call."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import (
    AlreadyExists,
    ConsistencyUnavailable,
    FilesystemUnsafe,
    NestedRepository,
    NotFound,
    Refused,
    UsageFailure,
)
from holdfast.fs.probe import Capabilities
from holdfast.repository import init
from holdfast.repository.context import MAIN, Consistency, Isolation
from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository, find_repository
from proof.crash import Attempt, Outcome, interposed, kill_points
from proof.effort import SHARE
from tests.locks.workers import Line, Workers
from tests.repository.stages import LASTING, events, files_in, json_at, make_repository, put_files, unprobed


@pytest.mark.req("WT-01", "WT-02", "WT-04")
def test_a_new_repository_has_a_format_and_an_exclusive_main(scratch: Path) -> None:
    made = initialise(scratch / "repo")
    repository = Repository(made.root)
    assert made.created
    assert made.filesystem is not None
    assert json_at(made.root / ".jvs/format.json")["version"] == 1
    config = json_at(made.root / ".jvs/worktrees/main/config.json")
    assert config["worktree_id"] == MAIN
    assert config["isolation"] == "exclusive"
    assert config["base_snapshot_id"] is config["head_snapshot_id"] is None
    assert repository.context.config(MAIN).isolation is Isolation.EXCLUSIVE
    assert [entry.name for entry in (made.root / ".jvs/worktrees/main").iterdir()] == ["config.json"]
    assert [entry.event for entry in events(repository)] == ["repository_created"]


@pytest.mark.req("WT-03")
def test_the_directory_of_a_new_main_is_empty(scratch: Path) -> None:
    repository = make_repository(scratch / "repo")
    assert list(repository.path(MAIN).iterdir()) == []


def test_initialising_again_changes_nothing(scratch: Path) -> None:
    first = initialise(scratch, probe=unprobed)
    put_files(scratch / "main", {"work": "kept"})
    again = initialise(scratch)
    assert not again.created
    assert again.format == first.format
    assert files_in(scratch / "main") == {"work": "kept"}
    assert len(events(Repository(scratch))) == 1


@pytest.mark.parametrize("name", ["README.md", ".git/config", "main/work", "worktrees/a/work"])
def test_a_directory_with_content_is_refused_and_left_untouched(scratch: Path, name: str) -> None:
    put_files(scratch, {name: "mine"})
    with pytest.raises(AlreadyExists, match="not empty"):
        initialise(scratch)
    assert files_in(scratch) == {name: "mine"}


def test_a_control_directory_of_another_program_is_refused(scratch: Path) -> None:
    put_files(scratch, {".jvs/format_version": "1"})
    with pytest.raises(AlreadyExists, match="something else"):
        initialise(scratch)
    assert files_in(scratch) == {".jvs/format_version": "1"}


@pytest.mark.parametrize("name", [".jvs", ".holdfast", ".jit", "main", "worktrees"])
@pytest.mark.parametrize("what", ["a file", "a link to nothing", "a link to a directory"])
def test_a_file_or_link_in_place_of_a_directory_is_refused_and_left_untouched(
    scratch: Path, name: str, what: str
) -> None:
    root, elsewhere = scratch / "repo", scratch / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    if what == "a file":
        (root / name).write_text("mine")
    else:
        (root / name).symlink_to(elsewhere if what == "a link to a directory" else "nowhere")
    with pytest.raises(AlreadyExists, match="not a directory"):
        initialise(root, probe=unprobed)
    assert [each.name for each in root.iterdir()] == [name]
    assert list(elsewhere.iterdir()) == []


def test_a_nested_repository_is_refused_unless_it_is_requested(scratch: Path) -> None:
    outer = make_repository(scratch / "outer")
    (scratch / "short").symlink_to(scratch / "outer" / "main")
    places = ["main/inner", "main/a/b", "worktrees/dev/inner", "beside", ".jvs/tmp/inner", "worktrees"]
    for place in [*(outer.root / each for each in places), scratch / "short" / "inner"]:
        with pytest.raises(NestedRepository) as caught:
            initialise(place, probe=unprobed)
        assert caught.value.facts["outer"] == str(outer.root)
        assert not (place / ".jvs").exists()
    for kept in ("beside", ".jvs/tmp/inner", "worktrees"):
        with pytest.raises(NestedRepository):
            initialise(outer.root / kept, nested=True, probe=unprobed)
    made = initialise(outer.root / "main/inner", nested=True, probe=unprobed)
    assert made.created
    (scratch / "foreign" / ".jvs").mkdir(parents=True)  # made by another program
    assert initialise(scratch / "foreign" / "inner", probe=unprobed).created
    assert not initialise(made.root).created  # already exists


def test_a_newer_format_is_refused(scratch: Path) -> None:
    make_repository(scratch)
    path = scratch / ".jvs/format.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(Refused, match="has format 9"):
        initialise(scratch)
    with pytest.raises(Refused, match="has format 9"):
        Repository(scratch)


def test_an_unsafe_filesystem_is_refused_and_nothing_is_created(scratch: Path) -> None:
    def refuse(directory: Path) -> Capabilities:
        raise FilesystemUnsafe(f"{directory} is on a file system that cannot be trusted")

    with pytest.raises(FilesystemUnsafe):
        initialise(scratch / "repo", probe=refuse)
    assert list((scratch / "repo").iterdir()) == []


def test_a_repository_is_found_from_any_directory_below_it(scratch: Path) -> None:
    make_repository(scratch / "repo")
    below = scratch / "repo/main/a/b"
    below.mkdir(parents=True)
    assert find_repository(below) == scratch / "repo"
    with pytest.raises(NotFound, match="not in a Holdfast repository"):
        find_repository(scratch)
    with pytest.raises(NotFound):
        Repository(scratch)


@pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")
def test_of_eight_concurrent_initialisations_one_creates_the_repository_and_all_return_it(scratch: Path) -> None:
    def work(line: Line) -> None:
        while True:
            made = initialise(line.wait(), probe=unprobed)
            line.say((made.created, made.format.repository_id))

    with Workers() as workers:
        crew = workers.start_many(8, work)
        for number in range(40):
            root = scratch / str(number)
            for worker in crew:
                worker.say(root)
            answers = [worker.hear() for worker in crew]
            assert sum(created for created, _ in answers) == 1
            assert len({repository_id for _, repository_id in answers}) == 1


def test_a_repository_that_is_created_during_the_checks_is_recognised(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = initialise(scratch / "repo", probe=unprobed)
    answers = iter([None])  # it is created right after the first check
    known_format = init.known_format
    monkeypatch.setattr(init, "known_format", lambda root: next(answers, known_format(root)))
    again = initialise(scratch / "repo", probe=unprobed)
    assert not again.created
    assert again.format == first.format


# --- Imports -----------------------------------------------------------------------------------------

PROJECT = {"README": "hello", "src/a.py": "print()", "empty": "", ".READY": "a user's own", ".jvs": "a file"}


def test_an_import_copies_the_directory_and_leaves_it_untouched(scratch: Path) -> None:
    put_files(scratch / "project", PROJECT)
    (scratch / "project/src/a.py").chmod(0o755)
    (scratch / "project/link").symlink_to("README")
    made = initialise(scratch / "repo", source=scratch / "project", probe=unprobed)
    main = Repository(made.root).path(MAIN)
    assert made.imported == len(PROJECT) + 1
    assert files_in(main) == files_in(scratch / "project") == {**PROJECT, "link": "hello"}
    assert (main / "link").is_symlink()
    assert (main / "src/a.py").stat().st_mode & 0o777 == 0o755
    (main / "README").write_text("changed")
    assert (scratch / "project/README").read_text() == "hello"
    assert not list((made.root / ".jvs/tmp").iterdir())


def test_a_directory_that_contains_the_repository_cannot_be_imported(scratch: Path) -> None:
    put_files(scratch / "project", PROJECT)
    for root in (scratch / "project", scratch / "project/repo"):
        with pytest.raises(UsageFailure, match="contain each other"):
            initialise(root, source=scratch / "project", probe=unprobed)
    with pytest.raises(NotFound):
        initialise(scratch / "repo", source=scratch / "missing", probe=unprobed)
    with pytest.raises(UsageFailure, match="not a directory"):
        initialise(scratch / "repo", source=scratch / "project/README", probe=unprobed)
    assert files_in(scratch / "project") == PROJECT


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_worktree_of_git_is_not_imported(scratch: Path, kind: str) -> None:
    """Git in the copy would change the index and the branches of the original."""
    put_files(scratch / "project", PROJECT)
    if kind == "file":
        (scratch / "project/.git").write_text("gitdir: /elsewhere/.git/worktrees/project\n")
    else:
        (scratch / "project/.git").symlink_to("/elsewhere/.git")
    with pytest.raises(Refused, match="git worktree or submodule") as refused:
        initialise(scratch / "repo", source=scratch / "project", probe=unprobed)
    assert "git clone" in refused.value.hint
    assert not (scratch / "repo").exists()
    (scratch / "project/.git").unlink()
    (scratch / "project/.git").mkdir()
    assert initialise(scratch / "repo", source=scratch / "project", probe=unprobed).created


def test_an_import_of_files_that_change_fails_unless_best_effort_is_enough(scratch: Path) -> None:
    put_files(scratch / "project", PROJECT)
    writes = itertools.count()

    def change_it(attempt: Attempt) -> Any:
        other = {"README": "src/a.py", "a.py": "README"}.get(Path(str(attempt.arguments[0])).name)
        if other is not None:  # one is about to be read: the other one has been, if this is the second
            (scratch / "project" / other).write_text(f"changed {next(writes)}")
        return attempt.perform()

    with interposed(change_it, ("open",)):
        with pytest.raises(ConsistencyUnavailable) as refused:
            initialise(scratch / "repo", source=scratch / "project", probe=unprobed)
        assert "--consistency best_effort" in refused.value.hint
        made = initialise(
            scratch / "repo", source=scratch / "project", consistency=Consistency.BEST_EFFORT, probe=unprobed
        )
    assert made.imported == len(PROJECT)
    assert next(writes) >= 2


def test_nothing_is_imported_into_an_existing_repository(scratch: Path) -> None:
    put_files(scratch / "project", PROJECT)
    make_repository(scratch / "repo")
    with pytest.raises(AlreadyExists, match="is already a repository"):
        initialise(scratch / "repo", source=scratch / "project", probe=unprobed)


# --- Kills -------------------------------------------------------------------------------------------


class Initialisation:
    """Initialise a repository; after a kill, initialising again completes it."""

    def __init__(self, *, importing: bool) -> None:
        self.importing = importing

    def prepare(self, directory: Path) -> None:
        put_files(directory / "project", {"a": "1", "b/c": "2"})

    def operate(self, directory: Path) -> object:
        source = directory / "project" if self.importing else None
        return initialise(directory / "repo", source=source, probe=unprobed)

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert files_in(directory / "project") == {"a": "1", "b/c": "2"}
        root = directory / "repo"
        try:
            repository = Repository(root)
        except NotFound:
            assert not outcome.acknowledged
            try:
                self.operate(directory)
            except AlreadyExists:  # the import was complete
                assert files_in(root / "main") == {"a": "1", "b/c": "2"}
                initialise(root, probe=unprobed)
            repository = Repository(root)
        expected = {"a": "1", "b/c": "2"} if self.importing else {}
        assert files_in(repository.path(MAIN)) == expected
        assert [entry.event for entry in events(repository)] == ["repository_created"]
        with repository.lease(MAIN) as held:
            held.check()


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("importing", [False, True], ids=["empty", "importing"])
def test_after_a_kill_at_any_call_initialising_again_completes_the_repository(importing: bool) -> None:
    kill_points(Initialisation(importing=importing), names=LASTING, share=SHARE).require_clean(at_least=40)
