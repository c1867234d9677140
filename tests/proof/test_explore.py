"""The explorer finds the planted races, reports none in correct code, and skips no schedule silently."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from proof.crash import Ending, Kill, Outcome, fresh, run_killed, scratch
from proof.explore import Result, explore
from proof.explorer import run as explorer_run
from proof.explorer.footprints import LOCK_EX, LOCK_NB, LOCK_SH
from tests.proof.explored_tasks import (
    FRESH,
    Listing,
    flock,
    flocked,
    listing,
    load,
    opened,
    save,
    wait_for_file,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no flock on Windows")


def anything(directory: Path, results: Sequence[Result]) -> None:
    """A check that accepts everything."""


def returned(results: Sequence[Result]) -> list[object]:
    return [result.value for result in results if not result.killed]


# --- A stale lock that is removed and created again ----------------------------------------------------


def stale_lock(directory: Path) -> None:
    (directory / "lock").write_bytes(b"stale")


def make(lock: Path) -> bool:
    try:
        with opened(lock, FRESH) as fd:
            calls.write(fd, b"fresh")
    except FileExistsError:
        return False
    return True


def take_by_removing(directory: Path) -> bool:
    """Read, judge, remove, create, as most programs do."""
    lock = directory / "lock"
    if make(lock):
        return True
    try:
        if load(lock) != b"stale":
            return False
        calls.unlink(lock)
    except FileNotFoundError:
        pass
    return make(lock)


def take_by_renaming(directory: Path) -> bool:
    """Rename a draft over the stale lock: both renames succeed, so both tasks win."""
    lock = directory / "lock"
    if load(lock) != b"stale":
        return False
    save(lock, b"fresh", draft=os.urandom(4).hex())
    return True


def take_under_guard(directory: Path) -> bool:
    with flocked(directory / "guard"):
        return take_by_removing(directory)


def at_most_one_winner(directory: Path, results: Sequence[Result]) -> None:
    assert returned(results).count(True) <= 1, "two winners"


@pytest.mark.parametrize(("tasks", "at_least"), [(2, 40), pytest.param(3, 800, marks=pytest.mark.long)])
def test_it_finds_two_winners_of_a_stale_lock_that_is_removed_by_path(tasks: int, at_least: int) -> None:
    explored = explore([take_by_removing] * tasks, prepare=stale_lock, check=at_most_one_winner)

    assert explored.violations
    assert explored.exhausted
    assert explored.states >= at_least
    shortest = explored.violations[0]
    assert shortest.problem == "AssertionError: two winners"
    # One task has judged the old lock, and removes the one that another task has made since.
    actors, does = zip(*(step.split(": ") for step in shortest.steps), strict=True)
    made = does.index("write(lock, b'fresh')")
    removed = does.index("unlink(lock)", made)
    judged = does.index("read(lock)")
    assert judged < made < removed
    assert actors[made] != actors[removed]


def test_it_finds_that_two_renames_both_succeed() -> None:
    explored = explore([take_by_renaming] * 2, prepare=stale_lock, check=at_most_one_winner)

    assert "two winners" in str(explored)


@pytest.mark.long
def test_it_accepts_the_same_lock_under_a_guard() -> None:
    for tasks in (2, 3):
        explored = explore([take_under_guard] * tasks, prepare=stale_lock, check=at_most_one_winner)
        explored.require_clean(at_least=10)


# --- Updates -------------------------------------------------------------------------------------------


def number(directory: Path) -> None:
    (directory / "number").write_bytes(b"0")


def add_without_lock(directory: Path) -> None:
    path = directory / "number"
    save(path, b"%d" % (int(load(path)) + 1), draft=os.urandom(4).hex())


def add_between_two_locks(directory: Path) -> None:
    """Loads under a shared lock and saves under an exclusive one."""
    with flocked(directory / "guard", LOCK_SH):
        content = load(directory / "number")
    with flocked(directory / "guard"):
        save(directory / "number", b"%d" % (int(content) + 1), draft=os.urandom(4).hex())


def add(directory: Path) -> None:
    with flocked(directory / "guard"):
        add_without_lock(directory)


def nothing_lost(directory: Path, results: Sequence[Result]) -> None:
    added = int((directory / "number").read_bytes())
    done = len(returned(results))
    assert done <= added <= len(results), f"{done} additions, but the number is {added}"


@pytest.mark.parametrize("task", [add_without_lock, add_between_two_locks])
def test_it_finds_a_lost_update(task: Callable[[Path], None]) -> None:
    explored = explore([task] * 2, prepare=number, check=nothing_lost)

    assert explored.violations[0].problem == "AssertionError: 2 additions, but the number is 1"


@pytest.mark.parametrize(("tasks", "kills", "at_least"), [(2, 0, 10), (2, 1, 80), (2, 2, 80), (3, 0, 150)])
@pytest.mark.sampled(2)
def test_it_accepts_updates_under_one_lock(tasks: int, kills: int, at_least: int) -> None:
    explored = explore([add] * tasks, prepare=number, check=nothing_lost, kills=kills)

    explored.require_clean(at_least=at_least)


# --- Intermediate states -------------------------------------------------------------------------------


def tree(directory: Path) -> None:
    for name in ("live", "new"):
        (directory / name).mkdir()
        (directory / name / "file").write_bytes(name.encode())


def restore_by_two_renames(directory: Path) -> None:
    calls.rename(directory / "live", directory / "old")
    calls.rename(directory / "new", directory / "live")


def restore_by_exchange(directory: Path) -> None:
    calls.rename_exchange(str(directory / "live"), str(directory / "new"))


def look(directory: Path) -> bytes:
    return load(directory / "live" / "file")


def live_exists(directory: Path) -> None:
    assert (directory / "live" / "file").exists(), "the live tree is missing"


def live_exists_at_the_end(directory: Path, results: Sequence[Result]) -> None:
    live_exists(directory)
    returned(results)


def test_it_finds_the_gap_between_two_renames() -> None:
    by_reader = explore([restore_by_two_renames, look], prepare=tree, check=lambda _, results: returned(results))
    by_death = explore([restore_by_two_renames], prepare=tree, check=live_exists_at_the_end, kills=1)
    by_invariant = explore([restore_by_two_renames], prepare=tree, check=anything, invariant=live_exists)

    assert by_reader.violations[0].problem.startswith("FileNotFoundError")
    assert "the live tree is missing" in by_death.violations[0].problem
    assert "KILLED before rename(new, live)" in by_death.violations[0].steps[-1]
    assert "the live tree is missing" in by_invariant.violations[0].problem


@pytest.mark.skipif(sys.platform != "linux", reason="not every file system can exchange")
def test_it_accepts_an_exchange() -> None:
    tasks = [restore_by_exchange, look]
    explored = explore(tasks, prepare=tree, check=live_exists_at_the_end, invariant=live_exists, kills=1)
    explored.require_clean(at_least=6)


def test_an_assertion_in_a_task_counts() -> None:
    def doubt(directory: Path) -> None:
        assert load(directory / "number") == b"0", "the number has changed"

    explored = explore([add, doubt], prepare=number, check=anything)

    assert explored.violations[0].problem.startswith("in task 1 doubt: AssertionError: the number has changed")


# --- Waiting -------------------------------------------------------------------------------------------


def both(first: str, second: str) -> Callable[[Path], None]:
    def lock_both(directory: Path) -> None:
        with flocked(directory / first), flocked(directory / second):
            pass

    return lock_both


def test_it_finds_a_deadlock_of_tasks_that_lock_in_opposite_order() -> None:
    explored = explore([both("a", "b"), both("b", "a")], check=anything)

    assert not explored.violations
    assert explored.deadlocks[0].problem == (
        "deadlock: 0 lock_both waits at flock(b, exclusive); 1 lock_both waits at flock(a, exclusive)"
    )
    assert explored.replay(explored.deadlocks[0].schedule).problem == explored.deadlocks[0].problem
    with pytest.raises(AssertionError, match="3 deadlocks"):
        explored.require_clean()


def test_it_finds_no_deadlock_of_tasks_that_lock_in_the_same_order() -> None:
    explore([both("a", "b"), both("a", "b")], check=anything).require_clean(at_least=10)
    explore([both("a", "b"), both("b", "c"), both("a", "c")], check=anything).require_clean(at_least=50)


def test_shared_locks_do_not_exclude_each_other() -> None:
    def share(directory: Path) -> bool:
        with flocked(directory / "lock", LOCK_SH), opened(directory / "lock") as second:
            try:
                flock(second, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return False
            return True

    seen: set[tuple[object, ...]] = set()
    explored = explore([share, share], check=lambda _, results: seen.add(tuple(returned(results))))
    explored.require_clean(at_least=5)
    assert seen == {(False, False)}  # each excludes its own second descriptor


def make_file(directory: Path) -> None:
    save(directory / "file", b"here", draft="draft")


def outcomes(tasks: Sequence[Callable[[Path], object]], *, kills: int = 0, timeouts: int = 0) -> set[object]:
    """The values that the last task returns, over all schedules."""
    seen: set[object] = set()
    explored = explore(tasks, check=lambda _, results: seen.add(results[-1].value), kills=kills, timeouts=timeouts)
    assert explored.exhausted
    assert not explored.deadlocks
    return seen


def test_a_task_that_polls_sees_the_change_and_times_out_without_one() -> None:
    assert outcomes([make_file, wait_for_file]) == {"here"}
    assert outcomes([wait_for_file]) == {"too late"}
    assert outcomes([make_file, wait_for_file], timeouts=1) == {"here", "too late"}


def test_a_task_that_polls_forever_is_reported() -> None:
    def wait_forever(directory: Path) -> None:
        while not durable.read_lines_in(Directory.open(directory), "file"):
            time.sleep(0.01)

    explored = explore([wait_forever], check=anything)

    assert explored.deadlocks[0].problem == "deadlock: 0 wait_forever waits at sleep"


def test_a_task_that_spins_forever_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(directory: Path) -> None:
        while not os.fspath(directory).startswith(" "):
            calls.stat(directory)

    monkeypatch.setattr("proof.explorer.search._MOST_STEPS", 100)
    explored = explore([spin], check=anything)

    assert explored.violations[0].problem == "no end after 100 steps"


# --- Kills ---------------------------------------------------------------------------------------------


class TidyUp:
    """Does a lot of cleanup when it fails, none of which may happen when it is killed."""

    def prepare(self, directory: Path) -> None:
        (directory / "file").write_bytes(b"old")

    def operate(self, directory: Path) -> None:
        with flocked(directory / "guard"):
            calls.mkdir(directory / "work")
            try:
                save(directory / "file", b"new", draft="draft")
                calls.link(directory / "file", directory / "work" / "copy")
                calls.unlink(directory / "work" / "copy")
            except BaseException:
                with opened(directory / "failed", FRESH) as fd:
                    calls.write(fd, b"I failed")
                raise
            finally:
                calls.rmdir(directory / "work")

    def check(self, directory: Path, outcome: Outcome) -> None:
        """Accept every state: the test compares them."""


class Durably(TidyUp):
    """Uses the package's own durable operations."""

    def operate(self, directory: Path) -> None:
        durable.replace(directory / "file", b"new")
        durable.create(directory / "another", b"new")
        with Directory.open(directory) as opened:
            durable.append_in(opened, "lines", b"line")
        durable.remove(directory / "file")


def without_random_names(found: Listing) -> Listing:
    """Mask draft names, which are random in a real process."""
    return tuple((re.sub(r"-[0-9a-f]{12}\.tmp", "-DRAFT.tmp", name), content) for name, content in found)


@pytest.mark.parametrize("scenario", [TidyUp(), Durably()], ids=["cleanup", "durable"])
def test_a_kill_leaves_exactly_the_states_that_sigkill_leaves(scenario: TidyUp) -> None:
    ours: set[Listing] = set()
    explored = explore(
        [scenario.operate],
        prepare=scenario.prepare,
        check=lambda directory, _: ours.add(without_random_names(listing(directory))),
        kills=1,
    )
    explored.require_clean(at_least=5)

    real: set[Listing] = set()
    with scratch() as base:
        for index in count(1):
            with fresh(base) as directory:
                outcome = run_killed(scenario, directory, Kill.BEFORE, index)
                real.add(without_random_names(listing(directory)))
            if outcome.call is None:
                break

    assert ours == real
    assert len(ours) > 5


@pytest.mark.long
def test_a_killed_task_releases_its_lock_and_closes_its_files() -> None:
    explored = explore([add, add], prepare=number, check=nothing_lost, kills=1)

    explored.require_clean(at_least=80)  # a lock that stayed held would be a deadlock
    before = len(os.listdir("/dev/fd"))
    explored = explore([add, add], prepare=number, check=nothing_lost, kills=2)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.long
def test_each_task_is_killed_in_some_schedule_but_never_more_than_allowed() -> None:
    killed: set[tuple[bool, ...]] = set()

    def note(directory: Path, results: Sequence[Result]) -> None:
        killed.add(tuple(result.killed for result in results))

    explore([add, add, make_file], prepare=number, check=note, kills=1)
    assert killed == {(False,) * 3, (True, False, False), (False, True, False), (False, False, True)}

    killed.clear()
    explore([add, add], prepare=number, check=note, kills=2)
    assert killed == {(False, False), (True, False), (False, True), (True, True)}


# --- Replay and limits ---------------------------------------------------------------------------------


def test_a_schedule_can_be_replayed_and_inspected(tmp_path: Path) -> None:
    explored = explore([add_without_lock, add], prepare=number, check=nothing_lost, kills=1)
    for violation in explored.violations:
        replayed = explored.replay(violation.schedule)
        assert (replayed.problem, replayed.steps) == (violation.problem, violation.steps)

    replayed = explored.replay(explored.violations[0].schedule, tmp_path)
    assert (tmp_path / "number").read_bytes() == b"1"
    assert all(result is not None and result.error is None for result in replayed.results)


def test_a_partial_schedule_is_completed_and_an_impossible_one_is_refused() -> None:
    explored = explore([add, add], prepare=number, check=nothing_lost)

    assert explored.replay("1*3").problem is None
    assert explored.replay("0*4 kill:0").results[0] == Result(Ending.KILLED)
    with pytest.raises(ValueError, match="does not fit"):
        explored.replay("0*4 1*4")  # a task that waits for the lock cannot run


def test_an_incomplete_search_says_so() -> None:
    few = explore([take_by_removing] * 3, prepare=stale_lock, check=anything, most_schedules=20)
    found = explore([take_by_removing] * 3, prepare=stale_lock, check=at_most_one_winner, most_violations=2)

    for explored, reason in ((few, "20 executions"), (found, "2 findings")):
        assert not explored.exhausted
        assert f"NOT EVERYTHING WAS TRIED: stopped after {reason}" in str(explored)
        with pytest.raises(AssertionError, match="NOT EVERYTHING"):
            explored.require_clean()


def test_an_exploration_with_too_few_states_is_not_clean() -> None:
    explored = explore([lambda directory: None], check=anything)

    with pytest.raises(AssertionError, match="at least 10 states"):
        explored.require_clean(at_least=10)


def test_tasks_are_switched_only_at_the_named_calls() -> None:
    every = explore([take_by_removing] * 2, prepare=stale_lock, check=at_most_one_winner)
    some = explore([take_by_removing] * 2, prepare=stale_lock, check=at_most_one_winner, names=("open", "unlink"))
    none = explore([take_by_removing] * 2, prepare=stale_lock, check=at_most_one_winner, names=())

    assert none.states < some.states < every.states
    assert some.violations
    assert not none.violations


def test_a_task_that_is_not_deterministic_is_refused() -> None:
    numbers = count()

    def fickle(directory: Path) -> None:
        (calls.mkdir if next(numbers) % 3 else calls.rmdir)(directory / "a")

    with pytest.raises(RuntimeError, match="not deterministic"):
        explore([fickle, make_file, make_file], check=anything)


def test_waiting_for_anything_but_a_file_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer_run, "_TIMEOUT", 0.3)
    shared = threading.Lock()

    def hold(directory: Path) -> None:
        with shared:
            calls.mkdir(directory / "a")

    try:
        with pytest.raises(RuntimeError, match="not a file lock"):
            explore([hold, hold], check=anything)
    finally:
        shared.release()


def test_threads_that_are_not_tasks_keep_the_real_calls_and_clocks() -> None:
    elsewhere: list[tuple[bytes, float]] = []

    def with_a_thread(directory: Path) -> bytes:
        def work() -> None:
            time.sleep(0)
            durable.replace(directory.parent / "beside", b"not explored")
            elsewhere.append((os.urandom(8), time.monotonic()))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        calls.stat(directory)
        return os.urandom(8)

    drawn: set[object] = set()
    explore([with_a_thread] * 2, check=lambda _, results: drawn.update(returned(results))).require_clean()

    assert len(drawn) == 2  # the same in every execution, but different for each task
    assert len({chance for chance, _ in elsewhere}) == len(elsewhere) > 1
    assert all(abs(at - time.monotonic()) < 60 for _, at in elsewhere)
    assert (calls.open, time.sleep.__name__, os.urandom.__name__) == (os.open, "sleep", "urandom")
