"""`holdfast lock run`: the command runs under the lock or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast import FileLocker
from tests.cli.commands import FileLockHeld, Running, data, envelope, error, holdfast, python, wait_until


def is_free(path: Path) -> bool:
    """Whether the lock can be acquired immediately."""
    guard = FileLocker(0.0).try_lock_exclusive(path)
    if guard is not None:
        guard.release()
    return guard is not None


@pytest.fixture
def lock(scratch: Path) -> Path:
    return scratch / "a.lock"


# --- The command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 4, 255])
def test_the_exit_status_is_that_of_the_command(lock: Path, status: int) -> None:
    result = holdfast("lock", "run", lock, "--", *python(f"raise SystemExit({status})"))

    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")


def test_the_command_inherits_standard_input_and_output(lock: Path) -> None:
    program = python("import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr)")
    result = holdfast("lock", "run", lock, "--", *program, stdin="hello")

    assert (result.stdout, result.stderr) == ("HELLO\n", "aside\n")


def test_everything_after_the_dashes_belongs_to_the_command(lock: Path) -> None:
    program = python("import sys; print(sys.argv[1:])")
    result = holdfast("lock", "run", lock, "--", *program, "--json", "--", "-x", "--help")

    assert result.stdout == "['--json', '--', '-x', '--help']\n"


def test_the_lock_is_held_while_the_command_runs_and_free_afterwards(lock: Path) -> None:
    with FileLockHeld(lock) as holder:
        assert not is_free(lock)
        holder.finish()
        assert is_free(lock)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc/self/fd")
def test_the_command_inherits_open_descriptors_but_not_the_lock(lock: Path, scratch: Path) -> None:
    program = python(
        "import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')"
        " if os.path.islink(f'/proc/self/fd/{fd}')))"
    )
    given = os.open(scratch / "given", os.O_CREAT | os.O_RDWR)
    try:
        with Running("lock", "run", lock, "--", *program, pass_fds=[given]) as command:
            inherited = command.finish().stdout.split()
    finally:
        os.close(given)

    assert str(scratch / "given") in inherited
    assert not [each for each in inherited if each.startswith(str(lock))]


def test_a_missing_command_is_named_and_leaves_the_lock_free(lock: Path) -> None:
    result = holdfast("lock", "run", lock, "--json", "--", "no-such-command-anywhere")

    assert result.returncode == 127
    assert error(result, on="stderr")["code"] == "E_COMMAND_NOT_FOUND"
    assert "no-such-command-anywhere" in error(result, on="stderr")["message"]
    assert is_free(lock)


def test_a_command_that_is_not_executable_exits_with_126(lock: Path, scratch: Path) -> None:
    (scratch / "plain").write_text("not a program")
    result = holdfast("lock", "run", lock, "--", scratch / "plain")

    assert result.returncode == 126
    assert "plain" in result.stderr


@pytest.mark.parametrize("rest", [[], ["make", "-j4"], ["--"], ["--wait", "1s"]])
def test_without_a_command_the_error_says_where_to_put_it(lock: Path, rest: list[str]) -> None:
    result = holdfast("lock", "run", lock, *rest)

    assert result.returncode == 2
    advice = "Put '--' before the command: -- make -j4" if "make" in rest else "write it after '--'"
    assert advice in result.stderr
    assert "holdfast lock run [OPTIONS] FILE -- COMMAND..." in result.stderr
    assert not lock.exists()


# --- Contention -------------------------------------------------------------------------------------


@pytest.mark.req("FL-04")
def test_a_timeout_names_the_path_the_limit_and_the_holder_and_gives_three_hints(lock: Path) -> None:
    with FileLockHeld(lock) as holder:
        result = holdfast("lock", "run", lock, "--", "true", env={"JIT_LOCK_TIMEOUT": "0.2"})

    assert result.returncode == 75
    assert result.stdout == ""
    first, _, hints = result.stderr.partition("\n\n")
    assert first.startswith(f"Error: Lock timeout: could not acquire lock on {lock} after 200ms")
    if Path("/proc/locks").exists():
        assert f"held by pid {holder.pid} (" in first
        assert re.search(r"started (just now|\S+ ago)", first)
    assert hints.splitlines() == [
        "This usually means another process is running.",
        "Try:",
        "  1. Wait a few seconds and retry",
        f"  2. Check for stuck processes: holdfast lock status {lock}",
        "  3. Increase timeout: JIT_LOCK_TIMEOUT=10 holdfast ...",
        "",
        "Code: E_LOCK_TIMEOUT",
    ]


@pytest.mark.req("FL-04")
def test_a_timeout_is_reported_as_json_on_standard_error(lock: Path) -> None:
    with FileLockHeld(lock) as holder:
        result = holdfast("lock", "run", lock, "--wait", "100ms", "--json", "--", "true")

    assert (result.returncode, result.stdout) == (75, "")
    failure = error(result, on="stderr")
    assert failure["code"] == "E_LOCK_TIMEOUT"
    assert failure["retryable"] is True
    assert (failure["path"], failure["timeout"]) == (str(lock), 0.1)
    if Path("/proc/locks").exists():
        assert [each["pid"] for each in failure["holders"]] == [holder.pid]


def test_the_hint_for_a_timeout_set_by_a_flag_names_the_flag(lock: Path) -> None:
    with FileLockHeld(lock):
        result = holdfast("lock", "run", lock, "--wait", "100ms", "--", "true")

    assert "--wait 10s, or without it JIT_LOCK_TIMEOUT=10 holdfast ..." in result.stderr


@pytest.mark.req("FL-14")
@pytest.mark.parametrize("value", ["five", ""])
def test_a_malformed_timeout_in_the_environment_is_an_error(lock: Path, value: str) -> None:
    env = {"JIT_LOCK_TIMEOUT": value}
    result = holdfast("lock", "run", lock, "--json", "--", "true", env=env)

    assert result.returncode == 2
    assert error(result, on="stderr")["code"] == "E_SETTING_INVALID"
    assert error(result, on="stderr")["setting"] == "JIT_LOCK_TIMEOUT"
    assert not lock.exists()


@pytest.mark.req("FL-14")
def test_the_flag_overrides_the_environment(lock: Path) -> None:
    env = {"JIT_LOCK_TIMEOUT": "five"}

    assert holdfast("lock", "run", lock, "--wait", "1s", "--", "true", env=env).returncode == 0


@pytest.mark.parametrize("value", ["-1s", ""])
def test_a_malformed_timeout_flag_is_an_error(lock: Path, value: str) -> None:
    result = holdfast("lock", "run", lock, "--wait", value, "--json", "--", "true")

    assert result.returncode == 2
    assert error(result, on="stderr")["setting"] == "--wait"
    assert "forever" in error(result, on="stderr")["expected"]


def test_nonblock_fails_at_once_and_names_the_holder(lock: Path) -> None:
    with FileLockHeld(lock) as holder:
        result = holdfast("lock", "run", lock, "--nonblock", "--json", "--", "true")

    assert result.returncode == 4
    failure = error(result, on="stderr")
    assert failure["code"] == "E_LOCK_CONFLICT"
    if Path("/proc/locks").exists():
        assert f"pid {holder.pid}" in failure["message"]


@pytest.mark.parametrize("how", [["--nonblock"], ["--wait", "50ms"]])
def test_the_exit_status_for_a_conflict_can_be_chosen(lock: Path, how: list[str]) -> None:
    with FileLockHeld(lock):
        result = holdfast("lock", "run", lock, *how, "--conflict-status", "99", "--", "true")

    assert result.returncode == 99
    assert result.stderr.startswith("Error: ")


def test_the_chosen_status_does_not_replace_that_of_the_command(lock: Path) -> None:
    result = holdfast("lock", "run", lock, "--conflict-status", "99", "--", "false")

    assert result.returncode == 1


def test_nonblock_and_wait_are_mutually_exclusive(lock: Path) -> None:
    result = holdfast("lock", "run", lock, "--nonblock", "--wait", "1s", "--", "true")

    assert result.returncode == 2
    assert "cannot be used together" in result.stderr


def test_shared_holders_coexist_and_exclude_an_exclusive_one(lock: Path) -> None:
    with FileLockHeld(lock, "--shared"), FileLockHeld(lock, "--shared"):
        assert holdfast("lock", "run", lock, "--nonblock", "--", "true").returncode == 4


@pytest.mark.sampled(1)
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows the waiters")
@pytest.mark.parametrize("options", [[], ["--fair"]], ids=["", "fair"])
def test_a_waiter_without_a_timeout_gets_the_lock_when_it_is_free(lock: Path, options: list[str]) -> None:
    with (
        FileLockHeld(lock, *options) as holder,
        Running("lock", "run", lock, "--wait", "forever", *options, "--", "echo", "mine") as waiter,
    ):
        wait_until(lambda: _waiting(lock) == [waiter.pid])
        holder.finish()
        result = waiter.finish()

    assert (result.returncode, result.stdout) == (0, "mine\n")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows the waiters")
def test_waiters_queued_for_a_fair_lock_are_shown(lock: Path) -> None:
    arguments = ("lock", "run", lock, "--fair", "--wait", "1m", "--", "true")
    with FileLockHeld(lock, "--fair"), Running(*arguments) as first:
        wait_until(lambda: _waiting(lock) == [first.pid])
        with Running(*arguments) as second:
            wait_until(lambda: _waiting(lock) == [first.pid, second.pid])


def _waiting(lock: Path) -> list[int]:
    return [each["pid"] for each in data(holdfast("lock", "status", lock, "--json"))["waiting"]]


# --- JSON output ------------------------------------------------------------------------------------


def test_the_outcome_goes_to_standard_error_because_standard_output_is_the_commands(lock: Path) -> None:
    result = holdfast("lock", "run", lock, "--json", "--", *python("print('{}'); raise SystemExit(9)"))

    assert (result.returncode, result.stdout) == (9, "{}\n")
    outcome = envelope(result.stderr)
    assert (outcome["schema_version"], outcome["ok"]) == (1, True)
    assert set(outcome["data"]) == {"exit_status", "signal", "waited", "held"}
    assert (outcome["data"]["exit_status"], outcome["data"]["signal"]) == (9, None)
    assert 0 <= outcome["data"]["waited"] < 5
    assert 0 < outcome["data"]["held"] < 30


def test_a_usage_error_of_run_goes_to_standard_error_too(lock: Path) -> None:
    result = holdfast("lock", "run", lock, "--json", "--no-such-option", "--", "true")

    assert (result.returncode, result.stdout) == (2, "")
    assert error(result, on="stderr")["code"] == "E_USAGE"


def test_a_lock_in_a_missing_directory_is_not_found(scratch: Path) -> None:
    result = holdfast("lock", "run", scratch / "missing" / "a.lock", "--json", "--", "true")

    assert result.returncode == 3
    assert error(result, on="stderr")["code"] == "E_NOT_FOUND"
