"""`holdfast repo-lock`: one writer per repository, from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import repo_lock
from holdfast.cli.repo_lock import Heartbeat
from holdfast.clock import parse_duration
from holdfast.errors import IoFailure, LockNotHeld, UsageFailure
from holdfast.locks.repo_lock import DEFAULT_STALE_AFTER, HeldRepoLock, RepoLock
from holdfast.store.approvals import data_directory
from tests.cli.commands import (
    PATIENCE,
    UNTIL_STDIN_ENDS,
    RepoLockHeld,
    Running,
    data,
    envelope,
    error,
    holdfast,
    python,
    wait_until,
)


@pytest.fixture
def data_dir(scratch: Path) -> Path:
    """A data directory that does not exist yet."""
    return scratch / "data"


def lock_file(data_dir: Path, repo_id: str = "here") -> Path:
    return data_dir / "repos" / repo_id / ".lock"


def status(data_dir: Path, *arguments: str) -> list[Mapping[str, Any]]:
    """The repositories in the output of `status`."""
    shown = data(holdfast("repo-lock", "status", *arguments, "--data-dir", data_dir, "--json"))
    repositories: list[Mapping[str, Any]] = shown["repositories"]
    return repositories


# --- run --------------------------------------------------------------------------------------------


def test_the_command_runs_under_the_lock_and_its_exit_status_is_returned(data_dir: Path) -> None:
    program = python(f"import os; raise SystemExit(7 if os.path.exists({str(lock_file(data_dir))!r}) else 1)")
    result = holdfast("repo-lock", "run", "here", "--data-dir", data_dir, "--json", "--", *program)

    assert (result.returncode, result.stdout) == (7, "")
    assert envelope(result.stderr)["data"]["exit_status"] == 7
    assert not lock_file(data_dir).exists()


@pytest.mark.req("RL-04")
def test_a_second_writer_is_refused_at_once_and_told_the_holder(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here") as holder:
        result = holdfast("repo-lock", "run", "here", "--data-dir", data_dir, "--json", "--", "true")
        text = holdfast("repo-lock", "run", "here", "--data-dir", data_dir, "--", "true").stderr

    assert (result.returncode, result.stdout) == (4, "")
    failure = error(result, on="stderr")
    assert failure["code"] == "E_REPO_LOCKED"
    assert (failure["repo_id"], failure["path"]) == ("here", str(lock_file(data_dir)))
    assert failure["info"]["pid"] == holder.pid
    assert text.startswith(f"Error: the repository here is locked by pid {holder.pid} (")


@pytest.mark.req("RL-04")
def test_an_unreadable_lock_counts_as_held(data_dir: Path) -> None:
    lock_file(data_dir).parent.mkdir(parents=True)
    lock_file(data_dir).write_text("{")
    result = holdfast("repo-lock", "run", "here", "--data-dir", data_dir, "--json", "--", "true")

    assert result.returncode == 4
    assert error(result, on="stderr")["info"] is None


def test_two_repositories_have_two_locks(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here"):
        assert holdfast("repo-lock", "run", "there", "--data-dir", data_dir, "--", "true").returncode == 0


def test_a_waiter_gets_the_lock_when_it_is_free(data_dir: Path) -> None:
    waiting = ("repo-lock", "run", "here", "--data-dir", data_dir, "--wait", "forever", "--", "echo", "mine")
    with RepoLockHeld(data_dir, "here") as holder, Running(*waiting) as waiter:
        holder.finish()
        result = waiter.finish()

    assert (result.returncode, result.stdout) == (0, "mine\n")


def test_a_waiter_that_times_out_is_told_the_holder(data_dir: Path) -> None:
    arguments = ("repo-lock", "run", "here", "--data-dir", data_dir, "--wait", "100ms", "--json")
    with RepoLockHeld(data_dir, "here") as holder:
        result = holdfast(*arguments, "--", "true")

    assert result.returncode == 75
    failure = error(result, on="stderr")
    assert failure["code"] == "E_LOCK_TIMEOUT"
    assert f"held by pid {holder.pid} (" in failure["message"]


@pytest.mark.req("RL-05")
def test_the_lock_of_a_dead_holder_is_shown_as_stale_and_taken_over(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here") as holder:
        holder.kill()
        holder.finish()
    (left,) = status(data_dir)
    text = holdfast("repo-lock", "status", "--data-dir", data_dir).stdout
    result = holdfast("repo-lock", "run", "here", "--data-dir", data_dir, "--", "echo", "mine")

    assert (left["state"], left["liveness"]) == ("stale", "dead")
    assert "its process is gone; the next to acquire it takes it over" in text
    assert (result.returncode, result.stdout) == (0, "mine\n")


@pytest.mark.parametrize("repo_id", ["..", ""])
def test_an_unsafe_repository_id_is_refused(data_dir: Path, repo_id: str) -> None:
    result = holdfast("repo-lock", "run", "--data-dir", data_dir, "--json", repo_id, "--", "true")

    assert result.returncode == 2
    assert error(result, on="stderr")["code"] == "E_NAME_INVALID"


@pytest.mark.parametrize("value", ["900ms", "4000d"])
def test_an_age_out_of_range_is_refused(data_dir: Path, value: str) -> None:
    arguments = ("repo-lock", "run", "here", "--data-dir", data_dir, "--stale-after", value, "--json")
    result = holdfast(*arguments, "--", "true")

    assert result.returncode == 2
    assert error(result, on="stderr")["setting"] == "--stale-after"


def test_the_default_age_is_that_of_the_library() -> None:
    assert parse_duration(repo_lock.STALE_AFTER) == DEFAULT_STALE_AFTER


def test_the_stored_command_line_is_short_and_has_no_control_characters(data_dir: Path) -> None:
    arguments = ("repo-lock", "run", "here", "--data-dir", data_dir)
    with Running(*arguments, "--", *UNTIL_STDIN_ENDS, "\x1b[31m", "x" * 100_000) as command:
        assert command.hear() == "running"
        stored = json.loads(lock_file(data_dir).read_text())["cmd"]

    assert stored.isprintable()
    assert len(stored) == 200


# --- While the command runs -------------------------------------------------------------------------


def test_the_lock_is_refreshed_while_the_command_runs(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here", "--stale-after", "1s"):
        first = json.loads(lock_file(data_dir).read_text())["created_at"]
        wait_until(lambda: json.loads(lock_file(data_dir).read_text())["created_at"] > first)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that can be caught")
def test_a_command_whose_lock_is_lost_is_terminated_and_the_exit_status_is_5(data_dir: Path) -> None:
    program = python(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to end', flush=True), sys.exit()))\n"
        "print('running', flush=True)\n"
        "time.sleep(1000)"
    )
    arguments = ("repo-lock", "run", "here", "--data-dir", data_dir, "--stale-after", "1s", "--json")
    with Running(*arguments, "--", *program) as command:
        assert command.hear() == "running"
        lock_file(data_dir).unlink()
        assert command.hear() == "asked to end"
        result = command.finish()

    assert result.returncode == 5
    assert error(result, on="stderr")["code"] == "E_LOCK_NOT_HELD"


def test_the_message_says_that_the_command_was_ended_and_why(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here", "--stale-after", "1s") as holder:
        lock_file(data_dir).unlink()
        assert holder.process.wait(PATIENCE) == 5
        assert "The command was stopped: the lock was broken or taken over" in holder.finish().stderr


class Held(HeldRepoLock):
    """A lock whose refresh can be made to fail."""

    def __init__(self, held: HeldRepoLock) -> None:
        self.__dict__ = held.__dict__
        self.refreshed = 0
        self.fails = False

    def refresh(self) -> None:
        if self.fails:
            raise IoFailure("write", self.path, OSError(28, "No space left on device"))
        super().refresh()
        self.refreshed += 1


class FakeClock:
    """A clock for `Heartbeat` that moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("holdfast.cli.repo_lock.time", clock)
    return clock


def test_the_lock_is_checked_often_and_refreshed_rarely(data_dir: Path, clock: FakeClock) -> None:
    lock = RepoLock(data_dir, stale_after=8 * 3600)
    with lock.lock("here") as plain:
        held = Held(plain)
        heartbeat = Heartbeat(lock, held)
        for _ in range(4 * 3600 // 5):  # every 5 s for 4 h
            clock.now += heartbeat.every
            heartbeat()

    assert heartbeat.every == 5
    assert held.refreshed == 2  # the first time, and 2 h later


def test_a_lost_lock_is_noticed_at_the_next_check(data_dir: Path, clock: FakeClock) -> None:
    lock = RepoLock(data_dir, stale_after=8 * 3600)
    with lock.lock("here") as held:
        heartbeat = Heartbeat(lock, held)
        heartbeat()
        state = lock.state("here")
        assert state is not None
        lock.break_lock("here", state.identity)
        clock.now += 5

        with pytest.raises(LockNotHeld):
            heartbeat()


def test_a_lock_that_cannot_be_refreshed_is_given_up_before_it_is_stale(data_dir: Path, clock: FakeClock) -> None:
    lock = RepoLock(data_dir, stale_after=8 * 3600)
    with lock.lock("here") as plain:
        held = Held(plain)
        heartbeat = Heartbeat(lock, held)
        held.fails = True
        clock.now = 5 * 3600
        heartbeat()
        clock.now = 6 * 3600

        with pytest.raises(LockNotHeld, match="No space left on device"):
            heartbeat()


def test_a_lock_that_can_be_refreshed_again_is_kept(data_dir: Path, clock: FakeClock) -> None:
    lock = RepoLock(data_dir, stale_after=8 * 3600)
    with lock.lock("here") as plain:
        held = Held(plain)
        heartbeat = Heartbeat(lock, held)
        for held.fails, clock.now in [(True, 5 * 3600.0), (False, 5.5 * 3600), (True, 11 * 3600)]:
            heartbeat()

    assert held.refreshed == 1


# --- status and break -------------------------------------------------------------------------------


def test_a_data_directory_without_locks_has_no_repositories(data_dir: Path) -> None:
    result = holdfast("repo-lock", "status", "--data-dir", data_dir)

    assert (result.returncode, result.stdout) == (0, f"No repository has ever been locked in {data_dir}.\n")
    assert not data_dir.exists()


def test_all_repositories_are_shown_in_order_with_the_details_of_their_locks(data_dir: Path) -> None:
    for name in ("c", "a"):
        holdfast("repo-lock", "run", name, "--data-dir", data_dir, "--", "true")
    (data_dir / "repos" / "not a repository").mkdir()
    (data_dir / "repos" / "file").touch()
    with RepoLockHeld(data_dir, "b", "--stale-after", "1h") as holder:
        shown = status(data_dir, "--stale-after", "1h")
        text = holdfast("repo-lock", "status", "--data-dir", data_dir).stdout

    assert [each["repo_id"] for each in shown] == ["a", "b", "c"]
    assert [each["state"] for each in shown] == ["free", "locked", "free"]
    lock = shown[1]
    assert (lock["liveness"], lock["path"]) == ("alive", str(lock_file(data_dir, "b")))
    assert lock["holder"]["pid"] == holder.pid
    assert lock["holder"]["cmd"].startswith("sh -c")
    assert lock["holder"]["created_at"] < lock["expires_at"]
    assert text.splitlines()[0] == "a: free"
    assert f"b: locked by pid {holder.pid} (" in text
    assert f"identity  {lock['identity']}" in text


def test_one_repository_is_shown_if_it_is_named(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "a"), RepoLockHeld(data_dir, "b"):
        assert [each["repo_id"] for each in status(data_dir, "b")] == ["b"]
        assert [each["state"] for each in status(data_dir, "elsewhere")] == ["free"]


def test_a_lock_is_broken_by_its_exact_identity_and_shown(data_dir: Path) -> None:
    with RepoLockHeld(data_dir, "here") as holder:
        identity = status(data_dir)[0]["identity"]
        arguments = ("repo-lock", "break", "here", "--identity", identity, "--data-dir", data_dir, "--json")
        previewed = holdfast(*arguments, "--dry-run")
        assert lock_file(data_dir).exists()
        broken = holdfast(*arguments)
        again = holdfast(*arguments)

    assert data(previewed)["dry_run"] is True
    assert data(broken)["dry_run"] is False
    assert data(previewed)["broken"]["identity"] == data(broken)["broken"]["identity"] == identity
    assert data(broken)["broken"]["holder"]["pid"] == holder.pid
    assert not lock_file(data_dir).exists()
    assert again.returncode == 4
    assert error(again)["code"] == "E_LOCK_CHANGED"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_lock_with_another_identity_is_left_alone(data_dir: Path, options: list[str]) -> None:
    with RepoLockHeld(data_dir, "here"):
        arguments = ("repo-lock", "break", "here", "--identity", "0" * 16, "--data-dir", data_dir)
        result = holdfast(*arguments, *options)
        assert lock_file(data_dir).exists()

    assert result.returncode == 4
    assert "Check the lock again" in result.stderr


def test_breaking_needs_an_identity(data_dir: Path) -> None:
    result = holdfast("repo-lock", "break", "here", "--data-dir", data_dir)

    assert result.returncode == 2
    assert "--identity" in result.stderr


# --- The data directory -----------------------------------------------------------------------------

EVERYTHING = {"HOLDFAST_DATA_DIR": "/h", "AGENCY_DATA_DIR": "/a", "XDG_DATA_HOME": "/x"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in EVERYTHING.items() if name not in names}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows uses other directories")
@pytest.mark.parametrize(
    ("flag", "environment", "chosen"),
    [
        ("/f", EVERYTHING, "/f"),
        (None, EVERYTHING, "/h"),
        ("", EVERYTHING, "/h"),
        (None, without("HOLDFAST_DATA_DIR"), "/a"),
        (None, {**EVERYTHING, "HOLDFAST_DATA_DIR": ""}, "/a"),
        (None, without("HOLDFAST_DATA_DIR", "AGENCY_DATA_DIR"), "/x/holdfast"),
    ],
)
def test_a_flag_overrides_the_environment_which_overrides_the_default(
    flag: str | None, environment: dict[str, str], chosen: str
) -> None:
    assert data_directory(flag, environment) == Path(chosen)


@pytest.mark.parametrize(
    ("platform", "environment", "chosen"),
    [
        ("linux", {}, "/home/me/.local/share/holdfast"),
        ("linux", {"XDG_DATA_HOME": "relative"}, "/home/me/.local/share/holdfast"),
        ("darwin", {}, "/home/me/Library/Application Support/holdfast"),
        ("win32", {}, "/home/me/AppData/Local/holdfast"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/holdfast"),
    ],
)
def test_each_platform_has_its_default_directory(
    monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], chosen: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("HOME", "/home/me")

    assert data_directory(None, environment) == Path(chosen)


def test_without_a_home_directory_the_error_asks_for_a_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)

    with pytest.raises(UsageFailure) as caught:
        data_directory(None, {})

    assert "--data-dir" in caught.value.hint


@pytest.mark.req("RL-01")
def test_the_command_uses_the_directory_from_the_environment(data_dir: Path) -> None:
    program = python(f"import pathlib; print(pathlib.Path({str(lock_file(data_dir))!r}).exists())")
    env = {"AGENCY_DATA_DIR": str(data_dir)}

    assert holdfast("repo-lock", "run", "here", "--", *program, env=env).stdout == "True\n"
