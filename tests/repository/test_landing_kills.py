"""A lander that is killed or stopped at any step: the next one finishes, and nothing lands twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import GitFailed, LandingPending
from holdfast.git import landing as frozen
from holdfast.git.program import Git
from holdfast.repository.landing_publish import Publisher
from holdfast.repository.landing_records import LandingState, LandingStyle
from proof import effort
from tests.repository.landings import Project, Steps, die, ended, forked, steps_of, stopped_at
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")
EDIT = "M src/f3"


@pytest.fixture
def project(scratch: Path) -> Project:
    """With an uncommitted edit of a person that no landing touches, and a branch that is not checked out."""
    project = Project(scratch)
    project.write("src/f3", "an edit\n")
    git("branch", "integration", at=project.top)
    return project


class Pair:
    """Two entries, one with an issue: each adds, changes and removes a file."""

    def __init__(self, project: Project, number: int, branch: str, style: LandingStyle = LandingStyle.MERGE) -> None:
        self.project, tip = project, project.tip(branch)
        one = project.commit({"src/f0": f"{number}\n", f"new/{number}": "new\n"}, on=tip)
        two = project.commit({"src/f1": f"{number}\n", "new/last": f"{number}\n"}, on=tip)
        self.entries = [
            project.queue(one, branch=branch, style=style, issue_id=project.issue(f"issue {number}")),
            project.queue(two, branch=branch, style=style),
        ]

    def land(self) -> None:
        self.project.landings().wait(self.entries[1].landing_id)

    def require_landed(self, number: int) -> None:
        for each in self.entries:
            assert self.project.entry(each).state is LandingState.LANDED, f"step {number}"


def land_and_die(pair: Pair, number: int, plant: Callable[[], object]) -> None:
    plant()
    Steps(number, die).install()
    pair.land()


def survive_kills(
    project: Project, branch: str, plant: Callable[[], object] = lambda: None, *, undone: bool = False, **how: Any
) -> None:
    """Kill a lander at some of its steps, or at each; after each kill, another one finishes. With `undone`, a person
    undoes what has landed before that."""
    total = steps_of(Pair(project, 0, branch, **how).land, project.root)
    for number in effort.chosen(range(1, total + 1), least=4, salt=branch):
        pair, before = Pair(project, number, branch, **how), project.tip(branch)
        assert ended(forked(partial(land_and_die, pair, number, plant))) in (0, -9)
        project.end_lease(branch)
        if undone and project.tip(branch) != before:
            words = ("commit-tree", "-p", project.tip(branch), "-m", "undo", f"{before}^{{tree}}")
            git("update-ref", f"refs/heads/{branch}", git(*words, at=project.top), at=project.top)
        project.landings().work_off()
        pair.require_landed(number)
        project.verdict(edits=EDIT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("branch", ["trunk", "integration"])
def test_a_lander_that_is_killed_at_any_step_is_succeeded_by_one_that_finishes(project: Project, branch: str) -> None:
    survive_kills(project, branch)


def survive_stops(project: Project, branch: str, plant: Callable[[], object] = lambda: None, rounds: int = 0) -> None:
    """Stop a lander at some of its steps, or at each, until others have landed everything and more; then continue.

    Each step has a turn with every style, over and over until there were this many rounds.
    """
    total = steps_of(Pair(project, 0, branch).land, project.root, in_transactions=False)
    points = list(product(LandingStyle, range(1, total + 1)))
    points = list(islice(cycle(points), max(rounds, len(points))))
    for number, (style, step) in effort.chosen(list(enumerate(points, 1)), least=4, salt=branch):
        pair = Pair(project, number, branch, style)

        def land(pair: Pair = pair) -> None:
            plant()
            pair.land()

        with stopped_at(step, land):
            project.end_lease(branch)
            project.landings().work_off()
            commit = project.commit({"src/f2": f"{number}\n"}, on=project.tip(branch))
            later = project.queue(commit, branch=branch)
            project.landings().work_off()
        project.landings().work_off()
        pair.require_landed(number)
        assert project.entry(later).state is LandingState.LANDED, (style, step)
        project.verdict(edits=EDIT)
        effort.tried["stopped landers"] += 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("branch", ["trunk", "integration"])
def test_a_lander_that_was_stopped_for_longer_than_its_lease_changes_nothing(project: Project, branch: str) -> None:
    survive_stops(project, branch, rounds=250)


def test_a_file_that_git_was_writing_when_it_was_killed_is_written_again(project: Project) -> None:
    pair = Pair(project, 1, "trunk")

    def land() -> None:
        real = frozen.swap

        def swap(*arguments: Any) -> bool:
            (project.top / "src/f0").write_text("")  # git had only begun
            (project.top / "src/f1").unlink()
            (project.top / "new/1").write_text("ne")
            die()
            return real(*arguments)

        frozen.swap = swap  # type: ignore[assignment]
        pair.land()

    assert ended(forked(land)) == -9
    assert (project.top / ".git/index.lock").exists()
    project.end_lease()
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)
    assert (project.top / "new/1").read_text() == "new\n"


def test_a_person_s_write_after_a_kill_stays(project: Project) -> None:
    pair = Pair(project, 1, "trunk")

    def land() -> None:
        frozen.swap = lambda *_: die()  # type: ignore[assignment]
        pair.land()

    assert ended(forked(land)) == -9
    project.write("src/f0", "mine\n")
    project.end_lease()
    project.landings().work_off()
    pair.require_landed(1)
    assert project.status() == f"M src/f0\n {EDIT}"
    assert (project.top / "src/f0").read_text() == "mine\n"
    assert git("show", "trunk:src/f0", at=project.top) == "1"


def test_a_late_swap_of_a_void_intent_is_recognised(project: Project) -> None:
    """A lander is stopped before its swap; a person moves the branch away, and later back to where it was."""
    pair = Pair(project, 1, "integration")
    before = project.tip("integration")

    def land() -> None:
        real = frozen.swap
        stopped: list[bool] = []

        def swap(*arguments: Any) -> bool:
            if not stopped:
                stopped.append(True)
                import os
                import signal

                os.kill(os.getpid(), signal.SIGSTOP)
            return real(*arguments)

        frozen.swap = swap  # type: ignore[assignment]
        pair.land()

    with stopped_at(10**9, land) as child:
        assert child is not None
        other = project.commit({"other": "1\n"}, on=before)
        git("update-ref", "refs/heads/integration", other, at=project.top)
        project.end_lease("integration")
        landings = project.landings()
        lander = landings._lander("integration")
        with landings._repository.lease(name="landing-integration") as lease:
            lander.publisher.recover(lease)
        target = landings.changes.target("integration")
        assert target is not None
        assert target.intent is None
        assert len(target.void) == 1
        git("update-ref", "refs/heads/integration", before, at=project.top)
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)
    target = project.landings().changes.target("integration")
    assert target is not None
    assert not target.void


def killed_before_the_swap(project: Project) -> Pair:
    """Two entries whose lander died when the files of the checkout were those of the new tip, and nothing else was."""
    pair = Pair(project, 1, "trunk")

    def land() -> None:
        frozen.swap = lambda *_: die()  # type: ignore[assignment]
        pair.land()

    assert ended(forked(land)) == -9
    assert (project.top / ".git/index.lock").exists()
    project.end_lease()
    return pair


def test_a_checkout_that_switched_away_after_a_kill_gets_its_files_back(project: Project) -> None:
    pair = killed_before_the_swap(project)
    git("switch", "-q", "-c", "elsewhere", at=project.top)  # git needs no lock of the index for that
    project.landings().work_off()
    pair.require_landed(1)
    assert project.status() == EDIT
    assert (project.top / "src/f0").read_text().startswith("0\n")
    project.verdict(edits=EDIT)


def test_files_go_back_if_a_person_moved_the_branch_after_a_kill(project: Project) -> None:
    pair = killed_before_the_swap(project)
    other = project.commit({"other": "1\n"})
    git("update-ref", "refs/heads/trunk", other, at=project.top)
    project.landings().work_off()
    assert not (project.top / ".git/index.lock").exists()
    git("read-tree", "-m", "-u", f"{other}^", other, at=project.top)
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)


def test_an_interrupt_at_the_swap_leaves_the_lock_and_is_finished_later(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(project, 1, "trunk")

    def swap(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(frozen, "swap", swap)
        with pytest.raises(KeyboardInterrupt):
            pair.land()
    assert (project.top / ".git/index.lock").exists(), "nobody may commit with files of the new tip and an old index"
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)


@pytest.mark.parametrize("edited", [False, True])
def test_a_checkout_that_git_cannot_write_gets_its_files_back(
    project: Project, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    pair, tip, real = Pair(project, 1, "trunk"), project.tip(), Git.run

    def run(git_: Git, *words: str, **more: Any) -> bytes:
        if words[:3] != ("read-tree", "-m", "-u") or "-n" in words:
            return real(git_, *words, **more)
        (project.top / "src/f0").write_text("written by a person\n" if edited else "1")
        (project.top / "new").mkdir()
        (project.top / "new/1").write_text("ne")
        raise GitFailed("no space left", command=[*words], status=128, stderr="error: unable to write file")

    with monkeypatch.context() as patch:
        patch.setattr(Git, "run", run)
        with pytest.raises(GitFailed if edited else LandingPending, match="no space left"):
            project.landings().wait(pair.entries[0].landing_id, wait=0.1)
    assert project.tip() == tip
    assert (project.top / ".git/index.lock").exists() == edited
    if edited:
        assert (project.top / "src/f0").read_text() == "written by a person\n"
        return
    project.verdict(edits=EDIT)
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)


def test_a_branch_that_another_git_keeps_locked_is_waited_for(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_PAUSES", (0.01,))
    pair = Pair(project, 1, "trunk")
    lock = project.top / ".git/refs/heads/trunk.lock"
    lock.touch()
    with pytest.raises(LandingPending, match="trunk cannot be moved"):
        project.landings().wait(pair.entries[0].landing_id, wait=0.1)
    project.verdict(edits=EDIT)
    lock.unlink()
    project.landings().work_off()
    pair.require_landed(1)
    project.verdict(edits=EDIT)


# --- Planted bugs: each must be found ------------------------------------------------------------------


def moves_without_comparing() -> None:
    def swap(git_: Any, branch: str, old: str, new: str, worktree: Path | None = None) -> bool:
        git_.run("update-ref", f"refs/heads/{branch}", new, worktree=worktree)
        return True

    frozen.swap = swap  # type: ignore[assignment]


def finishes_before_the_branch_moves() -> None:
    real = Publisher._swap

    def swap(self: Publisher, intent: Any) -> bool:
        self._finish(intent)
        return real(self, intent)

    Publisher._swap = swap  # type: ignore[method-assign]


def forgets_that_the_branch_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lander that comes next: an intent is given up although it was carried out."""

    def recover(self: Publisher, lease: Any, intent: Any) -> None:
        self._changes.give_up(self._name, intent, lease, "")

    monkeypatch.setattr(Publisher, "_recover_intent", recover)
    monkeypatch.setattr(Publisher, "_recover_void", lambda self, target: None)


def all_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "chosen", lambda items, **_: list(items))


@pytest.mark.long
def test_a_branch_that_moves_without_a_comparison_is_found(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    all_points(monkeypatch)
    with pytest.raises(AssertionError):
        survive_stops(project, "integration", moves_without_comparing)


@pytest.mark.long
def test_an_issue_that_is_finished_before_the_branch_moves_is_found(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_points(monkeypatch)
    with pytest.raises(AssertionError):
        survive_kills(project, "integration", finishes_before_the_branch_moves)


def test_what_a_person_has_undone_after_a_kill_does_not_land_again(project: Project) -> None:
    survive_kills(project, "integration", undone=True, style=LandingStyle.SQUASH)


@pytest.mark.long
def test_a_double_landing_is_found(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    all_points(monkeypatch)
    forgets_that_the_branch_has_moved(monkeypatch)
    with pytest.raises(AssertionError):
        survive_kills(project, "integration", undone=True, style=LandingStyle.SQUASH)
