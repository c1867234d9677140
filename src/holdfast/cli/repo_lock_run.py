"""Running a command as the only writer of a repository: `holdfast repo-lock run`."""

from __future__ import annotations

import itertools
import time

from holdfast.cli import child
from holdfast.cli.observing import observe_repo_lock
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repo_lock_view import one_line
from holdfast.cli.signals import Duty
from holdfast.clock import format_duration
from holdfast.errors import Failure, LockNotHeld, LockTimeout, RepoLocked
from holdfast.locks.repo_lock import HeldRepoLock, RepoLock

LOST = """\
The command was ended: the lock was broken or taken over, so somebody else may be writing.
Look at what it left half done before you run it again."""
LOOK_EVERY = 5.0
LONGEST_PURPOSE = 200
_PAUSES = (0.02, 0.05, 0.1, 0.25)
_ROUNDING = 0.01


def run_locked(
    lock: RepoLock, repo_id: str, command: tuple[str, ...], output: Output, *, wait: float | None
) -> int:
    """Run the command while holding the lock; end as it ends, or end it if the lock is lost."""
    began = time.monotonic()
    with acquire(lock, repo_id, _purpose(command), wait) as held:
        locked = time.monotonic()
        upkeep = Upkeep(lock, held)
        try:
            ended = child.run(command, duty=Duty(upkeep.every, upkeep))
        except LockNotHeld as failure:
            raise CommandFailed(failure, advice=LOST) from failure
        duration = time.monotonic() - locked
    output.result({**ended.as_record(), "waited": round(locked - began, 6), "held": round(duration, 6)})
    return child.end_like(ended)


def acquire(lock: RepoLock, repo_id: str, purpose: str, wait: float | None) -> HeldRepoLock:
    """Take the lock, asking again until `wait` seconds are over, or the wait is in vain; None: only once."""
    deadline = time.monotonic() + (wait or 0.0)
    try:
        return lock.lock(repo_id, purpose)
    except RepoLocked as failure:
        if wait is None:
            raise
        refused = failure
    lookout = observe_repo_lock(lock, repo_id, purpose, wait)
    try:
        for tries in itertools.count():
            if time.monotonic() >= deadline:
                break
            pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            try:
                return lock.lock(repo_id, purpose)
            except RepoLocked as failure:
                refused = failure
            if lookout.found is not None:
                raise lookout.found
    finally:
        lookout.end()
    raise _timeout(refused, wait) from refused


class Upkeep:
    """Keeps a lock that is held young, and fails as soon as it is seen to be lost.

    It is looked at every few seconds and dated anew every `stale_after / 4`. One that cannot be dated
    anew (a full disk, say) is ours until it is old; it is given up before that.
    """

    def __init__(self, lock: RepoLock, held: HeldRepoLock) -> None:
        self._lock = lock
        self._held = held
        self._refresh_every = lock.stale_after / 4
        self.every = min(LOOK_EVERY, self._refresh_every)
        self._identity: str | None = None
        self._dated_at = time.monotonic()

    def __call__(self) -> None:
        age = time.monotonic() - self._dated_at + _ROUNDING
        if age < self._refresh_every and self._is_as_we_left_it():
            return
        try:
            self._held.refresh()
        except LockNotHeld:
            raise
        except Failure as failure:
            if age >= 3 * self._refresh_every:
                raise self._given_up(failure) from failure
        else:
            self._dated_at = time.monotonic()
            self._identity = self._look()

    def _is_as_we_left_it(self) -> bool:
        return self._identity is not None and self._look() == self._identity

    def _look(self) -> str | None:
        state = self._lock.state(self._held.repo_id)
        return state.identity if state else None

    def _given_up(self, failure: Failure) -> LockNotHeld:
        return LockNotHeld(
            f"the lock of {self._held.repo_id} cannot be kept: {failure.message}",
            repo_id=self._held.repo_id,
            reason=failure.as_record(),
        )


def _timeout(failure: RepoLocked, wait: float) -> LockTimeout:
    holder = {**failure.info, "shown": one_line(failure.info)} if failure.info else {"shown": "somebody"}
    return LockTimeout(failure.path, wait, format_duration(wait), holders=[holder])


def _purpose(command: tuple[str, ...]) -> str:
    """The command as those see it who ask what the lock is held for."""
    from shlex import join

    text = printable(join(command))
    return text if len(text) <= LONGEST_PURPOSE else text[: LONGEST_PURPOSE - 3] + "..."
