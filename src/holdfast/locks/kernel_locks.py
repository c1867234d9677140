"""Who holds a file lock and who waits for it, asked of the kernel itself.

Nothing is written for this into the lock file, which may be anybody's data: the kernel knows who
locked it, other programs included. Only Linux tells (/proc/locks); elsewhere the answer is None.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.fs import calls, durable
from holdfast.fs.mounts import device_number
from holdfast.locks import processes


class FileLockHolder(NamedTuple):
    """A process that holds, or waits for, a lock on a file. What is not known is None."""

    pid: int | None
    command: str | None
    started_at: str | None
    shared: bool
    waiting: bool

    def as_record(self) -> dict[str, object]:
        """Plain values, with a line for people under `shown`."""
        return {**self._asdict(), "shown": str(self)}

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that cannot be seen from here"
        text = f"pid {self.pid}"
        if self.command:
            text += f" ({self.command if len(self.command) <= 80 else self.command[:77] + '...'})"
        return text + (f", running since {self.started_at}" if self.started_at else "")


def find_holders(path: str | os.PathLike[str]) -> list[FileLockHolder] | None:
    """Everybody who holds or waits for a lock on the file at `path`; None if that cannot be known."""
    if sys.platform != "linux":
        return None
    try:
        status = calls.stat(path)
        text = durable.read(Path("/proc/locks")).decode("ascii", "replace")
    except (OSError, Failure):
        return None
    wanted = f"{device_number(status.st_dev, base='02x')}:{status.st_ino}"
    return [_describe(fields) for line in text.splitlines() if (fields := _flock_on(line, wanted))]


def _flock_on(line: str, wanted: str) -> list[str] | None:
    """The fields from the kind of lock on, if this line is about a whole-file lock on `wanted`.

    `1: FLOCK ADVISORY WRITE 1234 fe:00:131 0 EOF`, with `->` before the kind for one who waits.
    """
    fields = line.split()[1:]
    waiting = fields[:1] == ["->"]
    fields = fields[1:] if waiting else fields
    if len(fields) < 5 or fields[0] != "FLOCK" or fields[4] != wanted:
        return None
    return [*fields, "waiting" if waiting else ""]


def _describe(fields: list[str]) -> FileLockHolder:
    shared, waiting = fields[2] == "READ", fields[-1] == "waiting"
    pid = int(fields[3])
    process = processes.find_process(pid) if pid > 0 else None
    if process is None:
        return FileLockHolder(pid if pid > 0 else None, None, None, shared, waiting)
    started = format_instant(round(time.time() - processes.started_ago(process)))  # it is not known better
    return FileLockHolder(pid, processes.command_of(pid), started, shared, waiting)
