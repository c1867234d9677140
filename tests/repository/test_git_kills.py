"""Operations in a git home, killed together with their git, at every call of git's that changes the disk.

`test_git_home` has the cases. `test_git_crashes` kills our process alone: around each git command, and at each call
of our own.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.git import program
from holdfast.git.checkout import is_worktree_of
from holdfast.git.program import Git
from holdfast.repository.git_home import GitHome
from proof.crash import Ending, Outcome, Report, Scenario, fresh, judge
from proof.crash import scratch as swept_directory
from proof.traced import IS_POSSIBLE, Doomed, end_of_group, orphans_are_ours
from tests.repository.test_git_home import CASES, Case, Creation, Renaming, unprobed

__all__ = ["unprobed"]

pytestmark = [pytest.mark.skipif(not IS_POSSIBLE, reason="traces processes"), pytest.mark.long]

_DIED, _DONE, _TOO_FEW_CALLS, _FAILED = 9, 0, 7, 8


class DiesWithGit:
    """Runs git in a process that dies with the git that it starts for the n-th time."""

    def __init__(self, start: int, call: int) -> None:
        self.left, self.git = start, Doomed(call)
        self.run = program._completed

    def __call__(
        self, command: list[str], directory: Path, environment: Any, content: bytes, inherited: Any, umask: int
    ) -> Any:
        self.left -= 1
        if self.left != 0:
            return self.run(command, directory, environment, content, inherited, umask)
        done = self.git.run(
            command,
            input=content,
            capture_output=True,
            check=False,
            cwd=directory,
            env=environment,
            pass_fds=inherited,
            umask=umask,
        )
        if self.git.died:
            os._exit(_DIED)
        return program._Ended(done.returncode, done.stdout, done.stderr)


def killed_with_git(case: Scenario, directory: Path, start: int, call: int) -> int:
    """Run a case in a child that dies, with everything that it has started, when its git does; return how it ended."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        dying = DiesWithGit(start, call)
        program._completed = dying
        status = _FAILED
        try:
            case.operate(directory)
            status = _DONE if dying.left > 0 else _TOO_FEW_CALLS
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return end_of_group(child)


def sweep(case: Scenario, *, first_violation: bool = False) -> Report:
    """Kill the case with each git that it starts, at each of git's calls; perhaps only until a check fails."""
    report = Report(type(case).__name__, "kills at a call of git")
    with swept_directory() as base, orphans_are_ours():
        for start in itertools.count(1):
            for call in itertools.count(1):
                with fresh(base) as directory:
                    case.prepare(directory)
                    status = killed_with_git(case, directory, start, call)
                    (directory / "project/.git/packed-refs.lock").unlink(missing_ok=True)  # git asks the user to do it
                    assert status != _FAILED, f"it failed at call {call} of git {start}"
                    is_over = status != _DIED
                    outcome = Outcome(
                        Ending.SUCCEEDED if is_over else Ending.KILLED,
                        f"git {start}, call {call}",
                        acknowledged=is_over,
                    )
                    report.add(outcome, judge(case, directory, outcome), "")
                if is_over:
                    break
            if status == _DONE or (first_violation and report.violations):
                break
    return report


@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_any_call_of_git_leaves_the_old_or_the_new(
    case: type[Case], record_property: Callable[[str, object], None]
) -> None:
    report = sweep(case())
    record_property("points", report.points)
    report.require_clean(at_least=2)


def with_git_alone(git: Git, path: Path, old: str, new: str) -> None:
    git.run("branch", "--move", "--", old, new)


def only_if_complete(home: GitHome, path: Path, registrations: Sequence[Path]) -> bool:
    return is_worktree_of(str(path), str(home.paths.common)) is not None


def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("case", "place", "bug"),
    [
        (Renaming, "holdfast.git.worktrees.rename_branch", with_git_alone),
        (Creation, "holdfast.repository.git_home.GitHome._is_begun", only_if_complete),
        (Creation, "holdfast.git.worktrees.unlock", nothing),
    ],
)
def test_a_planted_bug_is_found(
    case: type[Case], place: str, bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, bug)
    assert sweep(case(), first_violation=True).violations
