"""Runs of checks in scratch worktrees, with real git and real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import LockConflict, NotApproved, NotFound, Refused, SetupFailed
from holdfast.fs import durable
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.repository import git_init, landing_checks, settings
from holdfast.repository.git_init import adopt_checkout, deinitialise
from holdfast.repository.landing_checks import (
    KEPT_RUNS,
    MOST_LOG,
    CandidateCommit,
    CheckRun,
    check_runs,
    described,
    gate_checks,
    is_running,
    read_log,
    run_checks,
    target_checks,
)
from holdfast.repository.opening import open_tracker, tracker_of
from holdfast.repository.repository import Repository
from holdfast.repository.scratch_worktrees import ScratchWorktree, scratch_worktrees
from holdfast.store.approvals import revoke
from proof.crash import Outcome, kill_points
from proof.effort import SHARE
from tests.issues.test_checkers import is_running as is_alive
from tests.locks.workers import Line, Workers, wait_until
from tests.repository.stages import LASTING, put_files
from tests.repository.test_git_home import killed_at_git
from tests.support.homes import SAFE, approve_programs, copied, git, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and a POSIX shell")

FILES = {"a": "a", "src/b": "b", ".gitignore": "*.o\ncache/\n", "uv.lock": "1"}


def checkout(path: Path) -> Path:
    return copied(make_checkout, path)


def make_checkout(path: Path) -> None:
    git("init", "-q", "-b", "trunk", path)
    put_files(path, FILES)
    commit(path)


def commit(path: Path, **files: str) -> Any:
    put_files(path, files)
    git("add", "-A", at=path)
    git("commit", "-qm", "a commit", at=path)
    return git("rev-parse", "HEAD", at=path)


def opened(top: Path) -> Repository:
    return Repository(top / ".git/holdfast", environment=dict(os.environ))


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)


@pytest.fixture
def top(scratch: Path) -> Path:
    path = checkout(scratch / "project")
    adopt_checkout(path)
    return path


@pytest.fixture
def repository(top: Path) -> Iterator[Repository]:
    with opened(top) as found:
        yield found


def run(
    repository: Repository, *commands: str, commit: str = "HEAD", base: str | None = None, **options: Any
) -> CheckRun:
    settings.change(repository.root, settings.CHECKS, commands)
    tested = CandidateCommit(commit, base=base)
    return run_checks(repository, tested, target_checks(repository), target="trunk", landing_id="one", **options)


def log_of(repository: Repository, made: CheckRun) -> str:
    return read_log(repository.context.paths, made.run_id).decode()


def place(repository: Repository, number: int = 1) -> ScratchWorktree:
    found = {each.number: each for each in scratch_worktrees(repository.context.paths)}
    return found[number]


# --- Runs -----------------------------------------------------------------------------------------------


def test_commands_run_on_the_commit_until_one_fails(repository: Repository, top: Path) -> None:
    first = git("rev-parse", "HEAD", at=top)
    commit(top, a="other")
    made = run(repository, "cat a", "echo no >&2; exit 3", "echo never", commit=first)

    assert (made.passed, made.commit, made.target, made.landing_id) == (False, first, "trunk", "one")
    assert [(each.command, each.passed, each.exit_status) for each in made.commands] == [
        ("cat a", True, 0),
        ("echo no >&2; exit 3", False, 3),
    ]
    lines = log_of(repository, made).splitlines()
    assert (lines[0], lines[1][0], lines[2], lines[3]) == ("$ cat a", "a", "$ echo no >&2; exit 3", "no")
    assert list(check_runs(repository.context.paths)) == [made]
    assert not is_running(repository.context.paths, made)
    assert run(repository, "true").passed is True


def test_commands_see_the_landing_and_nothing_of_the_caller(
    top: Path, monkeypatch: pytest.MonkeyPatch, repository: Repository
) -> None:
    repository.environment = {**os.environ, "GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "x", "HOLDFAST_TOKEN": "7"}
    made = run(repository, "env; git rev-parse HEAD")

    lines = log_of(repository, made).splitlines()
    assert made.passed
    assert {"HOLDFAST_LANDING=one", "HOLDFAST_TARGET=trunk", f"HOLDFAST_COMMIT={made.commit}", made.commit} <= set(
        lines
    )
    assert not [line for line in lines if line.startswith(("GIT_DIR", "GIT_INDEX", "HOLDFAST_TOKEN"))]


def test_git_works_in_it_and_stays_tidy_for_the_user(repository: Repository, top: Path) -> None:
    def seen() -> list[str]:
        return [git(*each.split(), at=top) for each in ("worktree list", "branch -a", "status -s", "stash list")]

    before = seen()
    command = "git status --short; git log -1 --format=%H; git rev-parse --show-toplevel; git diff --quiet HEAD"
    made = run(repository, f"{command} && git ls-files -s --error-unmatch a >/dev/null && git merge-base HEAD trunk")

    assert made.passed
    assert log_of(repository, made).splitlines()[1:3] == [made.commit, str(place(repository).path)]
    assert seen() == before
    git("worktree", "prune", at=top)
    git("gc", "-q", "--prune=now", at=top)
    assert run(repository, "git fsck --connectivity-only && git status --porcelain=v2 --branch").passed
    assert not list(repository.examine())


def test_a_plain_home_has_no_checks(tmp_path: Path) -> None:
    with make_repository(tmp_path / "plain") as plain, pytest.raises(Refused, match="not in a git checkout"):
        run(plain, "true")


# --- Every run starts clean, and warm ---------------------------------------------------------------------

DIRT = {
    "new files": "mkdir d; touch d/x y; mkdir -p n && git init -q n && touch n/z",
    "changed files": "echo changed > a; rm src/b; chmod +x uv.lock",
    "a change of the same size and time": "touch -r a /tmp/$$; printf b > a; touch -r /tmp/$$ a; rm /tmp/$$",
    "a staged change": "echo staged > a; touch s; git add a s",
    "a change that git is told to ignore": "git update-index --assume-unchanged a; echo hidden > a",
    "a change that git is told to skip": "git update-index --skip-worktree a; echo hidden > a",
    "a file outside of a sparse checkout": "git sparse-checkout set src",
    "a commit": "echo more > a; git -c user.name=x -c user.email=x@x commit -qam more",
    "another branch": "git -c advice.detachedHead=false checkout -q HEAD~1",
    "a lock of git": "touch $(git rev-parse --git-dir)/index.lock",
    "a rebase": "mkdir $(git rev-parse --git-dir)/rebase-merge",
    "an ignored file in the way": "git rm -rq --cached src; rm -r src; touch src; echo src >> .gitignore",
    "a directory in the way": "rm a; mkdir a; touch a/x.o",
    "a directory that cannot be read": "mkdir closed; touch closed/x; chmod 0 closed",
    "a link out of it": "rm -r src; ln -s / src; ln -s /tmp link",
}


@pytest.mark.parametrize("dirt", DIRT)
@pytest.mark.sampled(4)
def test_a_check_that_writes_does_not_affect_the_next_run(repository: Repository, top: Path, dirt: str) -> None:
    commit(top, a="newer")
    assert run(repository, f"mkdir cache; touch x.o cache/y; {DIRT[dirt]}").passed
    require_clean(repository, only_root="cannot be read" in dirt)


def require_clean(repository: Repository, *, only_root: bool = False) -> None:
    own = "test ! -e $(git rev-parse --git-dir)/rebase-merge"
    made = run(repository, "git status --porcelain --untracked-files=all; git diff HEAD; cat a; echo; ls -A", own)

    assert made.passed
    lines = log_of(repository, made).splitlines()[1:-3]
    kept = [each for each in lines if each in ("cache", "x.o")]
    assert kept == ["cache", "x.o"] or only_root  # others can only empty the worktree
    assert [each for each in lines if each not in kept] == ["newer", ".git", ".gitignore", "a", "src", "uv.lock"]


@pytest.mark.parametrize("fault", ["new files", "a change that git is told to skip", "a rebase"])
def test_a_worktree_that_is_not_reset_is_found(
    repository: Repository, top: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Planted: files are not cleaned up, the index of the commands is used, their git directory stays."""
    commit(top, a="newer")
    assert run(repository, f"mkdir cache; touch x.o cache/y; {DIRT[fault]}").passed
    used = place(repository)
    match fault:
        case "new files":
            monkeypatch.setattr(ScratchWorktree, "check_out", lambda self, commit: self._connect(commit))
        case "a rebase":
            monkeypatch.setattr(ScratchWorktree, "_connect", lambda self, commit: None)
        case _:
            (used.records / "index").unlink()
            (used.git_dir / "index").rename(used.records / "index")
    with pytest.raises(AssertionError):
        require_clean(repository)


def test_a_commit_that_cannot_be_checked_out_fails_alone(repository: Repository, top: Path) -> None:
    good = git("rev-parse", "HEAD", at=top)
    git("config", "filter.broken.clean", "cat", at=top)
    git("config", "filter.broken.smudge", "false", at=top)
    git("config", "filter.broken.required", "true", at=top)
    approve_programs(top)
    bad = commit(top, **{".gitattributes": "a filter=broken\n"})
    made = run(repository, "echo never", commit=bad)

    assert (made.passed, len(made.commands)) == (False, 1)
    assert "smudge filter broken failed" in str(made.commands[0].message)
    assert "smudge filter broken failed" in log_of(repository, made)
    assert run(repository, "git diff --quiet HEAD && test -e src/b", commit=good).passed


def test_the_setup_runs_once_until_its_commands_or_inputs_change(repository: Repository, top: Path) -> None:
    counter = top.parent / "setups"

    def setups(*commands: str) -> int:
        assert run(repository, "test -e made.o").passed
        return counter.read_text().count("x") if counter.exists() else 0

    settings.change(repository.root, settings.SETUP, [f"touch made.o; printf x >> {counter}"])
    assert [setups(), setups()] == [1, 1]
    commit(top, a="no input")
    assert setups() == 1
    (top / "uv.lock").write_text("2")
    commit(top)
    assert [setups(), setups()] == [2, 2]
    settings.change(repository.root, settings.SETUP, [f"printf x >> {counter}; touch made.o"])
    assert [setups(), setups()] == [3, 3]
    settings.change(repository.root, settings.INPUTS, ["src/*"])
    commit(top, **{"src/b": "an input now"})
    assert setups() == 4
    (top / "uv.lock").write_text("3")
    commit(top)
    assert setups() == 4
    (top / ".git/info/exclude").write_text("local\n")
    (top / "local").write_text("1")
    settings.change(repository.root, settings.COPY, ["local"])
    assert setups() == 5
    assert (place(repository).path / "local").read_text() == "1"
    (top / "local").write_text("22")
    assert [setups(), setups()] == [6, 6]
    assert (place(repository).path / "local").read_text() == "22"


def test_a_failed_setup_fails_the_run_and_is_repeated(repository: Repository, top: Path) -> None:
    settings.change(repository.root, settings.SETUP, ["test -e ready"])
    made = run(repository, "true")
    assert (made.passed, [each.command for each in made.commands]) == (False, ["test -e ready"])
    assert not run(repository, "true").passed
    commit(top, ready="")
    assert run(repository, "true").passed


def test_a_setup_that_fails_for_the_base_too_blames_no_commit(repository: Repository, top: Path) -> None:
    base = git("rev-parse", "HEAD", at=top)
    away = top.parent / "away"
    settings.change(repository.root, settings.SETUP, [f"test ! -e {away}", "test ! -e broken"])
    assert run(repository, "true", base=base).passed, "the worktree is warm, and yet its setup does not count"
    commit(top, broken="", **{"uv.lock": "2"})
    made = run(repository, "true", base=base)
    assert made.passed is False
    assert described(made) == "the setup 'test ! -e broken' failed: exit status 1"
    away.touch()
    with pytest.raises(SetupFailed, match="not even for the tip of the branch: the setup 'test ! -e"):
        run(repository, "true", base=base)
    assert [each.passed for each in check_runs(repository.context.paths)] == [None, False, True]
    away.unlink()
    assert run(repository, "true", base=base, commit=base).passed


def test_a_worktree_that_was_deleted_is_made_again(repository: Repository) -> None:
    import shutil

    settings.change(repository.root, settings.SETUP, ["touch made.o"])
    assert run(repository, "test -e made.o").passed
    shutil.rmtree(place(repository).path)
    assert run(repository, "test -e made.o && test -e a").passed


def test_ports_belong_to_a_scratch_worktree_too(repository: Repository) -> None:
    settings.change(repository.root, settings.PORTS, ["3", "41000"])
    first, second = (log_of(repository, run(repository, "echo $HOLDFAST_PORTS")).splitlines()[1] for _ in range(2))
    assert first == second
    assert len(first.split()) == 3


# --- Processes ------------------------------------------------------------------------------------------


def test_the_time_limit_ends_the_whole_process_tree(repository: Repository, tmp_path: Path) -> None:
    settings.change(repository.root, settings.CHECK_TIMEOUT, ["2s"])
    one, two = (f"sh -c 'echo $$ > {tmp_path / name}; sleep 1000'" for name in ("one", "two"))
    made = run(repository, f"{one} & setsid {two} & sleep 1000", "true")

    assert (made.passed, len(made.commands), made.commands[0].message) == (False, 1, "killed after 2s")
    assert not any(is_alive(int((tmp_path / name).read_text())) for name in ("one", "two"))


def test_no_process_is_left_in_a_scratch_worktree(repository: Repository, tmp_path: Path) -> None:
    daemon = f"(setsid sh -c 'echo $$ > {tmp_path}/pid; sleep 1000' >/dev/null 2>&1 &)"
    wait = f"until [ -s {tmp_path}/pid ]; do sleep 0.01; done"
    assert run(repository, f"{daemon}; {wait}").passed
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_run_can_be_cancelled(repository: Repository, tmp_path: Path) -> None:
    cancelled = threading.Event()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(run, repository, f"echo $$ > {tmp_path}/pid; sleep 1000", "true", cancelled=cancelled)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        (seen,) = check_runs(repository.context.paths)
        assert is_running(repository.context.paths, seen)
        cancelled.set()
        made = waiting.result()
    assert (made.passed, made.cancelled, len(made.commands)) == (None, True, 1)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not is_running(repository.context.paths, seen)


def killed_runner(top: Path, tmp_path: Path) -> int:
    """Kill a process whose check, with a descendant in another session, goes on."""

    def work(line: Line) -> None:
        with opened(top) as own:
            command = f"touch junk; (setsid sh -c 'echo $$ > {tmp_path}/pid; sleep 1000' &); sleep 1000"
            run(own, command)

    with Workers() as workers:
        worker = workers.start(work)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    return int((tmp_path / "pid").read_text())


def test_the_next_run_ends_what_a_killed_one_has_left(repository: Repository, top: Path, tmp_path: Path) -> None:
    left = killed_runner(top, tmp_path)
    (killed,) = check_runs(repository.context.paths)
    assert is_alive(left)
    assert (killed.passed, is_running(repository.context.paths, killed)) == (None, False)

    assert log_of(repository, run(repository, "git status --porcelain")).splitlines()[1].startswith("[exit status 0")
    assert not is_alive(left)
    assert [each.number for each in scratch_worktrees(repository.context.paths)] == [1]
    assert not list(repository.examine())


def test_a_process_that_is_left_is_found(
    repository: Repository, top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the next run looks for no process."""
    left = killed_runner(top, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ScratchWorktree, "end_processes", lambda self: None)
        run(repository, "true")
        assert is_alive(left)
    os.kill(left, signal.SIGKILL)


def test_the_doctor_removes_what_a_killed_run_has_left(repository: Repository, top: Path, tmp_path: Path) -> None:
    left = killed_runner(top, tmp_path)
    path = place(repository).path
    assert [each.code for each in repository.examine()] == ["scratch-abandoned"]
    repository.repair()

    assert not is_alive(left)
    assert not path.exists()
    assert not list(repository.examine())
    assert run(repository, "test -e a").passed


def test_runs_at_the_same_time_have_worktrees_of_their_own(repository: Repository, top: Path) -> None:
    """Each waits for the other one, so neither ends before both have begun."""
    settings.change(repository.root, settings.PARALLEL, ["2"])
    meet = top.parent / "meet"
    meet.mkdir()
    command = f"pwd > {meet}/$HOLDFAST_CHECK_RUN; until [ $(ls {meet} | wc -l) -ge 3 ]; do sleep 0.01; done; pwd"
    settings.change(repository.root, settings.CHECKS, [command])

    def one(line: Line) -> None:
        with opened(top) as own:
            assert run_checks(
                own, CandidateCommit("HEAD"), target_checks(own), target="trunk", landing_id="other"
            ).passed

    with Workers() as workers, ThreadPoolExecutor() as threads:
        worker = workers.start(one)
        both = list(threads.map(lambda _: run(repository, command), range(2)))
        assert worker.wait() == 0
    assert all(each.passed for each in both)
    assert len({each.read_text() for each in meet.iterdir()}) == 3
    assert len(list(check_runs(repository.context.paths))) == 3
    assert [each.number for each in scratch_worktrees(repository.context.paths)] == [1, 2]  # the third is not kept


def test_a_worktree_in_use_is_not_removed(repository: Repository, top: Path, tmp_path: Path) -> None:
    cancelled = threading.Event()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(run, repository, f"touch {tmp_path}/begun; sleep 1000", cancelled=cancelled)
        wait_until((tmp_path / "begun").exists)
        assert not [each for each in repository.examine() if each.code == "scratch-abandoned"]
        with pytest.raises(LockConflict, match="in use"):
            deinitialise(repository, force=True)
        cancelled.set()
        waiting.result()
    path = place(repository).path
    deinitialise(repository)
    assert not path.exists()
    assert git("status", "--porcelain", at=top) == ""


@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_what_is_not_ours_is_never_touched(repository: Repository, top: Path, tmp_path: Path, kind: str) -> None:
    put_files(tmp_path / "precious", {"file": "precious"})
    foreign = repository.context.paths.worktrees / ".landing-1"
    foreign.parent.mkdir()
    match kind:
        case "directory":
            put_files(foreign, {"file": "precious"})
        case "link":
            foreign.symlink_to(tmp_path / "precious")
        case _:
            foreign.write_text("precious")

    made = run(repository, "pwd")
    assert log_of(repository, made).splitlines()[1] == str(foreign.with_name(".landing-2"))
    assert (foreign if kind == "file" else foreign / "file").read_text() == "precious"


# --- Logs -----------------------------------------------------------------------------------------------


def test_the_log_is_bounded_and_has_the_end_of_each_command(repository: Repository) -> None:
    size = MOST_LOG + (1 << 20)
    made = run(repository, f"yes | head -c {size}; printf '\\377\\000end'", "echo again")

    content = b"".join(iter_log(repository, made))
    assert len(content) < MOST_LOG + (1 << 17)
    assert b"bytes left out]\n" in content
    assert b"\xff\x00end[exit status 0" in content
    assert b"$ echo again\nagain\n[exit status 0" in content
    assert made.passed


def iter_log(repository: Repository, made: CheckRun) -> Iterator[bytes]:
    offset = 0
    while block := read_log(repository.context.paths, made.run_id, offset=offset, limit=1 << 16):
        offset += len(block)
        yield block


def test_the_log_can_be_read_while_the_run_goes_on(repository: Repository, tmp_path: Path) -> None:
    def shown() -> bytes:
        return b"".join(
            read_log(repository.context.paths, each.run_id) for each in check_runs(repository.context.paths)
        )

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(run, repository, f"echo now; until [ -e {tmp_path}/go ]; do sleep 0.01; done")
        wait_until(lambda: b"\nnow\n" in shown())
        (tmp_path / "go").touch()
        assert waiting.result().passed


def test_old_runs_are_forgotten(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_checks, "KEPT_RUNS", 2)
    made = [run(repository, f"echo {number}") for number in range(3)]
    assert KEPT_RUNS > 2
    assert list(check_runs(repository.context.paths)) == made[:0:-1]
    for run_id in (made[0].run_id, "../../../config", ""):
        with pytest.raises(NotFound, match="not kept here"):
            read_log(repository.context.paths, run_id)


# --- Approval -------------------------------------------------------------------------------------------


def test_commands_that_came_with_the_repository_need_approval(repository: Repository, tmp_path: Path) -> None:
    own = repository.root / settings.SETTINGS
    run(repository, "true")
    for key in (settings.CHECKS, settings.SETUP):
        planted = {"schema_version": 1, "land.checks": ["true"], key: [f"touch {tmp_path}/planted"]}
        durable.replace(own, json.dumps(planted).encode())
        with pytest.raises(NotApproved, match=key):
            target_checks(repository)
    with pytest.raises(NotApproved, match=settings.SETUP):
        run_checks(repository, CandidateCommit("HEAD"), [], target="trunk", landing_id="one")
    assert not (tmp_path / "planted").exists()
    settings.approve(repository.root, settings.commands_of(settings.read_settings(repository.root)))
    assert run_checks(
        repository, CandidateCommit("HEAD"), target_checks(repository), target="trunk", landing_id="one"
    ).passed
    assert (tmp_path / "planted").exists()


def test_the_gates_of_the_issues_are_checks(repository: Repository) -> None:
    tracker = open_tracker(tracker_of(repository.root), actor="human:test")
    tracker.initialise()
    tracker.gates.define(Definition("all", command="test -e a && ! env | grep ISSUE_ID"))
    tracker.gates.define(Definition("each", command="echo $HOLDFAST_ISSUE_ID $HOLDFAST_GATE"))
    tracker.gates.define(Definition("people"))
    one, two = (tracker.create(NewIssue(title=title, gates=("all", "each", "people"))).id for title in ("one", "two"))

    found = gate_checks(tracker, [one, two])
    assert [(each.gate, each.issue_ids) for each in found] == [("all", (one, two)), ("each", (one,)), ("each", (two,))]
    made = run_checks(repository, CandidateCommit("HEAD"), found, target="trunk", landing_id="x")
    assert made.passed
    assert [each.issue_ids for each in made.commands] == [(one, two), (one,), (two,)]
    assert f"{two} each" in log_of(repository, made).splitlines()
    revoke(tracker_of(repository.root))
    with pytest.raises(NotApproved, match="gate all"):
        gate_checks(tracker, [one])


# --- Kills ----------------------------------------------------------------------------------------------


class Run:
    """A run in a worktree that is prepared for something else; then a run, and the doctor, find nothing wrong."""

    def prepare(self, directory: Path) -> None:
        top = checkout(directory / "project")
        adopt_checkout(top)
        with opened(top) as repository:
            settings.change(repository.root, settings.SETUP, ["touch made.o"])
            run(repository, "touch junk")
            put_files(top, {"uv.lock": "2"})
            commit(top, a="newer")

    def operate(self, directory: Path) -> object:
        with opened(directory / "project") as repository:
            return run(repository, "cat a; touch junk; rm -r src")

    def check(self, directory: Path, outcome: Outcome) -> None:
        top = directory / "project"
        with opened(top) as repository:
            if outcome.acknowledged:
                assert not list(repository.examine())
            made = run(repository, 'test -e made.o && test -z "$(git status --porcelain)" && cat a')
            assert made.passed
            assert log_of(repository, made).splitlines()[-1].startswith("newer[exit status 0")
            assert set(os.listdir(place(repository).path)) == {".git", ".gitignore", "a", "made.o", "src", "uv.lock"}
            problems = {each.code for each in repository.examine()}
            assert problems <= {"draft-left"}, problems
            assert [each.number for each in scratch_worktrees(repository.context.paths)] == [1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", ["git", "calls"])
def test_a_kill_at_any_step_is_repaired_by_the_next_run(
    at: str, scratch: Path, record_property: Callable[[str, object], None]
) -> None:
    if at == "calls":
        report = kill_points(Run(), names=LASTING, share=SHARE)
        record_property("points", report.points)
        report.require_clean(at_least=5)
        return
    for number in range(1, 100):
        directory = scratch / str(number)
        directory.mkdir()
        Run().prepare(directory)
        ended = killed_at_git(Run(), directory, number, after=bool(number % 2))
        Run().check(directory, Outcome(*_ending(ended)))
        if ended is not None:
            record_property("points", number)
            assert number > 3
            return


def _ending(ended: int | None) -> Any:
    from proof.crash import Ending

    return (Ending.KILLED,) if ended is None else (Ending.SUCCEEDED, "", None, None, (), True)
