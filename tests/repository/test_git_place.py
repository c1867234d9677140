"""The setting `worktree.directory`: where worktrees of a git home are created, also inside the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.errors import Failure, NotApproved, Refused, SettingInvalid, UsageFailure
from holdfast.repository import settings
from holdfast.repository.context import MAIN
from holdfast.repository.git_init import deinitialise
from holdfast.repository.guard import WorktreePath, worktrees_at, worktrees_of
from holdfast.repository.init import initialise
from holdfast.repository.preparation import prepare_leased
from holdfast.repository.repository import Repository
from tests.locks.workers import Line, Workers
from tests.repository.stages import files_in, files_stored, put_files
from tests.repository.test_git_home import FILES, of_the_user, require_sound
from tests.repository.test_git_home import path as path
from tests.repository.test_git_home import repository as repository
from tests.repository.test_git_home import unprobed as unprobed
from tests.support.homes import SAFE, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.fixture(autouse=True)
def own_data(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(scratch / "data"))


def put_in(repository: Repository, directory: str) -> None:
    settings.change(repository.root, settings.DIRECTORY, [directory])


def test_worktrees_are_created_where_the_setting_says(repository: Repository, path: Path, scratch: Path) -> None:
    places = {"../agents": path.parent / "agents", str(scratch / "abs/deep"): scratch / "abs/deep"}
    for number, (chosen, expected) in enumerate(places.items()):
        put_in(repository, chosen)
        repository.worktrees.create(f"dev{number}", isolated=bool(number))
        assert repository.path(f"dev{number}") == expected / f"dev{number}"
    settings.change(repository.root, settings.DIRECTORY, [])
    repository.worktrees.create("usual")
    assert repository.path("usual") == path.parent / "project.worktrees/usual"
    repository.worktrees.change_name("dev0", "new")
    assert repository.path("new") == path.parent / "agents/new"
    require_sound(repository)
    assert "Holdfast" not in (path / ".git/info/exclude").read_text()


def test_worktrees_inside_the_checkout_are_out_of_its_sight(repository: Repository, path: Path) -> None:
    user, status = of_the_user(path), git("status", "--porcelain", at=path)
    before = (path / ".git/info/exclude").read_bytes()
    put_in(repository, ".agents [1]")
    repository.worktrees.create("dev")
    repository.worktrees.create("alone", isolated=True)
    dev = repository.path("dev")

    assert dev == path / ".agents [1]/dev"
    assert git("status", "--porcelain", at=path) == status
    assert of_the_user(path) == user
    put_files(dev, {"work": "done"})
    for name in ("dev", "alone"):
        inner = str(repository.path(name) / "deep/x")
        assert worktrees_of(inner) == [WorktreePath(str(repository.root), name)]
        assert repository.worktree_around(Path(inner)) == name
    assert worktrees_of(str(path / ".agents [1]")) == [WorktreePath(str(repository.root), MAIN)]
    assert [each.worktree for each in worktrees_at(str(dev))] == ["dev"]
    with repository.lease() as lease:
        taken = repository.snapshot(lease=lease)
    assert set(files_stored(repository.context, taken.snapshot_id)) == {*FILES, "new"}
    assert list(repository.snapshots.status(MAIN).changes) == []
    put_files(path, {"src/a": "worse"})
    with Workers() as workers:

        def work(line: Line) -> None:
            with (dev / "work").open("a"):
                line.say("writes")
                line.wait()

        assert workers.start(work).hear() == "writes"
        with repository.lease() as lease:
            repository.restore(taken.snapshot_id, lease=lease, reason="work in another worktree is no use of main")
    assert files_in(dev)["work"] == "done"
    repository.worktrees.change_name("alone", "other")
    require_sound(repository)
    repository.remove_worktree("other")
    assert (path / ".git/info/exclude").read_bytes() != before

    deinitialise(repository, force=True)
    assert (path / ".git/info/exclude").read_bytes() == before


def test_files_of_other_worktrees_are_not_copied_into_a_new_one(repository: Repository, path: Path) -> None:
    put_in(repository, "agents")
    settings.change(repository.root, settings.COPY, ["**/*.log", "agents"])
    for name in ("one", "two"):
        repository.worktrees.create(name)
        prepare_leased(repository, name)
        put_files(repository.path(name), {f"{name}.log": name})
    assert set(files_in(repository.path("two"))) == {*FILES, "x.log", "two.log"}


def test_lines_that_the_user_wrote_stay(repository: Repository, path: Path) -> None:
    exclude = path / ".git/info/exclude"
    exclude.write_text("*.mine\n/agents/")
    put_in(repository, "agents")
    repository.worktrees.create("dev")
    assert exclude.read_text() == "*.mine\n/agents/"
    put_in(repository, "more")
    repository.worktrees.create("other")
    assert exclude.read_text().splitlines()[-1] == "/more/"
    deinitialise(repository, force=True)
    assert exclude.read_text() == "*.mine\n/agents/\n"


@pytest.mark.parametrize("place", [".", "..", ".git", ".git/x", "src", "inner/below", "../project.worktrees/dev/x"])
@pytest.mark.sampled(1)
def test_a_directory_that_cannot_have_worktrees_is_refused(repository: Repository, path: Path, place: str) -> None:
    repository.worktrees.create("dev")
    git("worktree", "add", "-q", path / "inner", at=path)
    repository.worktrees.adopt(path / "inner")
    put_in(repository, place)
    before = sorted(os.listdir(path))
    with pytest.raises(Refused, match="cannot be in"):
        repository.worktrees.create("other")
    assert sorted(os.listdir(path)) == before
    assert "Holdfast" not in (path / ".git/info/exclude").read_text()


def test_a_link_of_the_tree_does_not_say_where_worktrees_are(repository: Repository, path: Path, scratch: Path) -> None:
    (scratch / "elsewhere").mkdir()
    (path / "agents").symlink_to(scratch / "elsewhere")
    put_in(repository, "agents/below")
    with pytest.raises(Failure):
        repository.worktrees.create("dev")
    assert os.listdir(scratch / "elsewhere") == []


def test_a_directory_that_the_user_has_not_approved_is_refused(
    repository: Repository, path: Path, scratch: Path
) -> None:
    file = repository.root / settings.SETTINGS
    put_in(repository, "../agents")
    file.write_text(file.read_text().replace("../agents", str(scratch / "theirs")))
    with pytest.raises(NotApproved, match=r"^worktree.directory, .* is not approved"):
        repository.worktrees.create("dev")
    assert not (scratch / "theirs").exists()
    settings.approve(repository.root, settings.commands_of(settings.read_settings(repository.root)))
    repository.worktrees.create("dev")
    assert repository.path("dev") == scratch / "theirs/dev"


def test_damaged_settings_stop_a_creation_and_nothing_else(repository: Repository) -> None:
    repository.worktrees.create("dev")
    file = repository.root / settings.SETTINGS
    file.parent.mkdir(exist_ok=True)
    file.write_text("{")
    assert repository.path("dev").name == "dev"
    with pytest.raises(Failure):
        repository.worktrees.create("other")


def test_a_value_that_is_no_path_and_a_plain_home_are_refused(repository: Repository, scratch: Path) -> None:
    for values in (["a", "b"], [" "], ["\0"]):
        with pytest.raises(SettingInvalid):
            settings.change(repository.root, settings.DIRECTORY, values)
    initialise(scratch / "plain", probe=lambda directory: SAFE)
    with pytest.raises(UsageFailure, match="git checkout"):
        settings.change(scratch / "plain", settings.DIRECTORY, ["x"])
