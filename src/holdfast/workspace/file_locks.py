"""The file locks below a directory that somebody holds at this very moment, as the kernel has them.

They may be of our own guards, or of anything else: of a file that a build or a cron job locks. Where the
kernel does not tell (anywhere but on Linux) there are none to be seen.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from holdfast.fs import calls
from holdfast.locks.holders import Liveness
from holdfast.locks.kernel_locks import FileLockHolder, find_holders, find_locked_files, with_queue
from holdfast.workspace.holdings import Holding, Reclaim, Waiting

GUARDS = (".jvs/guards", ".jvs/audit", ".jit", ".jit/issues", "ledger", ".holdfast")
"""Where our own are: they are found even if their holder cannot be looked into."""

TURNSTILE = "ledger/.ledger.lock.turnstile"
"""Where our own processes line up for the ledger lock: shown with that, not by itself."""

_OURS = (".jvs/", ".jit/", ".holdfast/", "ledger/", "locks/")


def file_locks(root: Path) -> Iterator[Holding]:
    """Each lock on a file below `root`, with those who wait for it."""
    top = calls.realpath(root)  # as the kernel names what is open
    for path in find_locked_files(top, [os.path.join(top, each) for each in GUARDS]):
        shown = os.path.relpath(path, top)
        if not shown.endswith(".queue") and shown != TURNSTILE:
            yield from _file_lock(path, shown)


def waiting_at(path: Path) -> tuple[Waiting, ...]:
    """Those who wait for the lock on a file, in turn if it is a fair one."""
    return _line(str(path), find_holders(path) or [])


def _file_lock(path: str, shown: str) -> Iterator[Holding]:
    seen = find_holders(path) or []
    waiting = _line(path, seen)
    for holder in (each for each in seen if not each.waiting):
        yield Holding(
            kind="file lock",
            what=shown,
            who=_who(holder),
            since=None,
            until=None,
            time_left=None,
            liveness=Liveness.ALIVE,  # the kernel drops the locks of the dead
            purpose=holder.command or "",
            waiting=waiting,
            reclaim=_reclaim(path, shown, holder),
        )


def _reclaim(path: str, shown: str, holder: FileLockHolder) -> Reclaim:
    if shown.startswith(_OURS):
        return Reclaim(False, "wait: it is held for the duration of one command")
    options = " --shared" if holder.shared else ""
    options += " --fair" if _is_fair(path) else ""
    command = f"holdfast file-lock run {shlex.quote(path)}{options} --timeout 10m -- COMMAND"
    return Reclaim(False, f"wait: {command}")


def _is_fair(path: str) -> bool:
    """Whether those who wait for the lock are served in turn: then who comes has to line up too."""
    try:
        calls.stat(path + ".queue")
    except OSError:
        return False
    return True


def _line(path: str, seen: list[FileLockHolder]) -> tuple[Waiting, ...]:
    waiting = with_queue(path, [each for each in seen if each.waiting])
    return tuple(
        Waiting(_who(each), place, None, each.command or "", Liveness.ALIVE)
        for place, each in enumerate(waiting, 1)
    )


def _who(each: FileLockHolder) -> str:
    return f"pid {each.pid}" if each.pid else "a process that cannot be seen from here"
