"""Running a command under the lease of a worktree: what `holdfast run` does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.cli import child, signals
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import LOCK_ID, REPO, TOKEN, WORKTREE, current_directory, refuse_own_lock
from holdfast.errors import Failure, LockExpired, LockNotHeld, NotFound
from holdfast.fs import calls
from holdfast.fs.names import checked_text
from holdfast.leases.service import HeldLease
from holdfast.repository.records import Isolation
from holdfast.repository.repository import Repository

LOST = """\
The command was ended: the lock was lost, so somebody else may be writing.
Look at what it left half done before you run it again."""
NOT_SAVED = """\
The command has succeeded, but no snapshot was taken. What it wrote is still in the worktree."""
LONGEST_PURPOSE = 200
LOOK_EVERY = 1.0


class Wish(NamedTuple):
    """How a command is to be run."""

    ttl: float
    wait: float | None
    purpose: str | None
    priority: int
    snapshot: bool
    note: str
    chdir: bool


def run_leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: Wish
) -> int:
    """Run the command under the lease; end as it ends, or end it if the lease is lost."""
    return child.end_like(_run_leased(repository, worktree, command, output, wish))


def _run_leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: Wish
) -> child.Ended:
    began = time.monotonic()
    checked_text(wish.note, what="note")  # not only when the command has done its work
    directory = repository.path(worktree)
    if wish.snapshot and not (wish.chdir or output.as_json):
        _warn_if_elsewhere(output, worktree, directory)
    with _leased(repository, worktree, command, output, wish) as lease:
        locked = time.monotonic()
        ended = _run(command, lease, _environment(repository, worktree, lease), wish, directory)
        saved = None
        if wish.snapshot and ended.exit_status == 0:
            saved = _save(repository, worktree, lease, wish.note)
        duration = time.monotonic() - locked
    output.result(
        {
            **ended.as_record(),
            "waited": round(locked - began, 6),
            "held": round(duration, 6),
            "worktree_id": worktree,
            "lock_id": lease.lock_id if lease else None,
            "fencing_token": lease.token if lease else None,
            "snapshot_id": saved,
        }
    )
    if saved is not None and not output.as_json:
        output.diagnostic(f"holdfast: what is in {worktree} now is the snapshot {saved}")
    return ended


def _warn_if_elsewhere(output: Output, worktree: str, directory: Path) -> None:
    """What a command writes outside of the worktree is in no snapshot: say so before it does."""
    with contextlib.suppress(OSError, NotFound):  # a current directory that is gone
        here, wanted = current_directory(), calls.stat(directory)
        if not any(os.path.samestat(wanted, calls.stat(each)) for each in (here, *here.parents)):
            output.diagnostic(
                f"holdfast: the command runs in {printable(str(here))}; the snapshot is of {worktree}, "
                "which is elsewhere. To run it there: --chdir"
            )


@contextlib.contextmanager
def _leased(
    repository: Repository, worktree: str, command: tuple[str, ...], output: Output, wish: Wish
) -> Iterator[HeldLease | None]:
    """The lease, renewed in the background; None for a shared worktree, which has none."""
    if repository.control.config(worktree).isolation is Isolation.SHARED:
        output.diagnostic(f"{worktree} is shared (high-risk): others may write while the command runs.")
        yield None
        return
    refuse_own_lock(repository, worktree)
    purpose = _purpose(command) if wish.purpose is None else wish.purpose
    held = repository.lease(worktree, ttl=wish.ttl, wait=wish.wait, purpose=purpose, priority=wish.priority)
    try:
        with signals.kept_back():  # the thread that renews inherits it: no signal is to reach that one
            held.beat()
        yield held
    finally:
        held.release()


def _run(
    command: tuple[str, ...],
    lease: HeldLease | None,
    environment: dict[str, str],
    wish: Wish,
    directory: Path,
) -> child.Ended:
    duty = None if lease is None else signals.Duty(min(LOOK_EVERY, wish.ttl / 10), lease.check)
    where = directory if wish.chdir else None
    mark = None if lease is None else child.Mark(LOCK_ID, lease.lock_id, directory)
    try:
        ended = child.run(command, duty=duty, environment=environment, directory=where, mark=mark)
        if lease is not None:
            lease.check()  # it may have been lost at the very end
    except (LockNotHeld, LockExpired) as failure:
        raise CommandFailed(failure, advice=LOST) from failure
    return ended


def _environment(repository: Repository, worktree: str, lease: HeldLease | None) -> dict[str, str]:
    """What the command is told: which repository and worktree, and by which right."""
    known = {**os.environ, REPO: str(repository.root), WORKTREE: worktree}
    for name in (LOCK_ID, TOKEN):
        known.pop(name, None)  # of some other lock
    if lease is not None:
        known |= {LOCK_ID: lease.lock_id, TOKEN: str(lease.token)}
    return known


def _save(repository: Repository, worktree: str, lease: HeldLease | None, note: str) -> str:
    try:
        return repository.save(worktree, lease, note=note)
    except Failure as failure:
        raise CommandFailed(failure, advice=f"{NOT_SAVED}\n{printable(failure.hint)}") from failure


def _purpose(command: tuple[str, ...]) -> str:
    """The command as those see it who ask what the lock is held for."""
    from shlex import join

    text = printable(join(command))
    return text if len(text) <= LONGEST_PURPOSE else text[: LONGEST_PURPOSE - 3] + "..."
