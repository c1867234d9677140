"""What can be known about a process of this machine: is it there, since when, what does it run.

Loads next to nothing: a guard that must be quick asks this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.fs import calls, directory

_LONGEST_COMMAND = 1 << 16


class Process(NamedTuple):
    """A process that exists. `start_time` identifies it among all that ever had its number."""

    pid: int
    start_time: str
    is_zombie: bool
    parent: int = 0


if sys.platform == "linux":

    def find_process(pid: int) -> Process | None:
        """The process with this number, or None if it cannot be seen (gone, or hidden from us)."""
        if not _proc_shows_our_namespace():
            if pid != os.getpid():
                return None
            name = "self"
        else:
            name = str(pid)
        try:
            text = directory.read_small(f"/proc/{name}/stat", 1 << 16).decode("utf-8", "replace")
        except OSError:
            return None
        # The command's name is in parentheses and may itself contain blanks and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        zombie = fields[0] in "ZX" and not _has_live_threads(pid)
        return Process(pid, fields[19], zombie, int(fields[1]))

    def _proc_shows_our_namespace() -> bool:
        """In a new pid namespace without a /proc of its own, /proc counts differently than we do."""
        try:
            return calls.readlink("/proc/self") == str(os.getpid())
        except OSError:
            return False

    def _has_live_threads(pid: int) -> bool:
        """A process whose first thread has ended looks like a zombie while others still run."""
        try:
            with calls.scandir(f"/proc/{pid}/task") as tasks:
                return sum(1 for _ in tasks) > 1
        except OSError:
            return False

    def words_of(pid: int) -> list[str]:
        """The words of a process's command line, of a very long one the first; none if it cannot be read."""
        try:
            words = directory.read_small(f"/proc/{pid}/cmdline", _LONGEST_COMMAND).split(b"\0")
        except OSError:
            return []
        return [word.decode("utf-8", "replace") for word in words]

    def started_ago(process: Process) -> float:
        """How many seconds ago a process started, by the clock that no one can set."""
        import time

        ticks = os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.start_time) / ticks

else:

    def find_process(pid: int) -> Process | None:
        """The process with this number, or None if it cannot be seen (gone, or hidden from us)."""
        import psutil

        try:
            process = psutil.Process(pid)
            zombie = process.status() == psutil.STATUS_ZOMBIE
            return Process(pid, f"{process.create_time():.2f}", zombie, process.ppid())
        except psutil.ZombieProcess:
            return Process(pid, "", True)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None

    def words_of(pid: int) -> list[str]:
        """The words of a process's command line; none if it cannot be read."""
        import psutil

        try:
            return psutil.Process(pid).cmdline()
        except psutil.Error:
            return []

    def started_ago(process: Process) -> float:
        """How many seconds ago a process started."""
        import time

        return time.time() - float(process.start_time or "nan")


def command_of(pid: int) -> str | None:
    """The command line of a process, or None if it cannot be read."""
    return " ".join(word for word in words_of(pid) if word) or None


def ancestors(pid: int) -> Iterator[Process]:
    """The process, its parent, and so on, as far as they can be seen."""
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        process = find_process(pid)
        if process is None:
            return
        yield process
        pid = process.parent


def is_there(pid: int) -> bool:
    """Whether any process has this number, a zombie and one of another user included."""
    if sys.platform == "win32":
        return find_process(pid) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_small(path: str) -> str:
    """The stripped text of a small system file, or "" if there is none."""
    try:
        return directory.read_small(path, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""
