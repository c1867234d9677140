"""Who holds something, and whether that holder is still there.

A process number alone says little: it is used again after the process has ended, it counts anew
after a restart of the machine, and it means another process in another pid namespace or on another
host. So a holder is identified by all of these together, and the question whether it is alive has
three answers. Only "dead" ever allows anything: whatever is not certain is "unknown".
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.locks import processes

_FIRST_TIME_NAMESPACE = 0xEFFFFFFA
"""The kernel's fixed inode number of the time namespace that every machine starts with."""


class Liveness(Enum):
    """Whether a holder still exists."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Holder(NamedTuple):
    """A process, identified beyond its own life and beyond its own machine.

    `start_time` is the kernel's own count (on Linux clock ticks since boot), not wall clock time, so
    that setting the clock changes nothing. Fields that are not known are empty.
    """

    host: str
    user: str
    pid: int
    start_time: str
    boot_id: str
    machine_id: str
    pid_namespace: str

    @property
    def holder_id(self) -> str:
        """`host:user:pid:start_time`."""
        return f"{self.host}:{self.user}:{self.pid}:{self.start_time}"

    def as_record(self) -> dict[str, object]:
        """The fields to store beside a lock, from which `from_record` makes the holder again."""
        return {
            "holder_id": self.holder_id,
            "boot_id": self.boot_id,
            "machine_id": self.machine_id,
            "pid_namespace": self.pid_namespace,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Holder | None:
        """The holder that `as_record` described, or None if the record does not say."""
        parts = str(record.get("holder_id", "")).split(":")
        if len(parts) != 4 or not _is_number(parts[2]):
            return None
        values = (record.get(name) for name in ("boot_id", "machine_id", "pid_namespace"))
        extra = [value if isinstance(value, str) else "" for value in values]
        return cls(parts[0], parts[1], int(parts[2]), parts[3], *extra)


def current_holder() -> Holder:
    """This process."""
    return _holder_of(os.getpid())


def holder_with_pid(pid: int) -> Holder | None:
    """Another process of this machine and namespace as a holder; None if there is none to be seen."""
    found = processes.find_process(pid)
    if found is None or found.is_zombie:
        return None
    return current_holder()._replace(pid=pid, start_time=found.start_time)


@functools.lru_cache(maxsize=1)
def boot_clock_id() -> str:
    """Names the boot clock that this process reads: whoever has the same id reads the same clock.

    Empty where there is no way to tell (anywhere but on Linux): then there is none to be relied on.
    """
    boot_id = processes.read_small("/proc/sys/kernel/random/boot_id") if sys.platform == "linux" else ""
    return boot_id + _time_namespace() if boot_id else ""


@functools.lru_cache(maxsize=1)
def _holder_of(pid: int) -> Holder:  # by pid, so that a forked child does not take itself for its parent
    itself = processes.find_process(pid)
    return Holder(
        host=_host(),
        user=_user(),
        pid=pid,
        start_time=itself.start_time if itself else "",
        boot_id=processes.read_small("/proc/sys/kernel/random/boot_id"),
        machine_id=_machine_id(),
        pid_namespace=_pid_namespace(),
    )


def liveness(holder: Holder, *, here: Holder | None = None) -> Liveness:
    """Whether `holder` still exists, judged from `here` (this process unless said otherwise).

    Another host, another pid namespace: unknown. The same machine started anew since: dead.
    """
    here = here or current_holder()
    if holder.host != here.host:
        return Liveness.UNKNOWN
    if holder.boot_id != here.boot_id:
        # The same machine after a restart, or another one that goes by the same name?
        same_machine = bool(holder.machine_id) and holder.machine_id == here.machine_id
        return Liveness.DEAD if same_machine and holder.boot_id else Liveness.UNKNOWN
    if holder.pid_namespace != here.pid_namespace or (sys.platform == "linux" and not here.pid_namespace):
        return Liveness.UNKNOWN
    return process_liveness(holder.pid, start_time=holder.start_time)


def process_liveness(pid: int, *, start_time: str = "") -> Liveness:
    """Whether the process `pid` of this machine and namespace exists (and started at `start_time`)."""
    if not 0 < pid < 1 << 31:
        return Liveness.UNKNOWN
    process = processes.find_process(pid)
    if process is None:
        # Gone, or only hidden from this user: the kernel knows which.
        return Liveness.ALIVE if processes.is_there(pid) else Liveness.DEAD
    if process.is_zombie:
        return Liveness.DEAD
    if start_time and process.start_time and process.start_time != start_time:
        return Liveness.DEAD  # the number has been given to another process since
    return Liveness.ALIVE


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


def _host() -> str:
    if sys.platform == "win32":
        import platform

        return platform.node().replace(":", "_")
    return os.uname().nodename.replace(":", "_")


def _user() -> str:
    if sys.platform == "win32":
        import psutil

        return psutil.Process().username().replace(":", "_")
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name.replace(":", "_")
    except KeyError:
        return str(os.getuid())


def _machine_id() -> str:
    """A name for this machine that outlives a restart, hashed because the real one is confidential."""
    import hashlib  # takes its time to load, and who only asks for a boot clock has no use for it

    machine = processes.read_small("/etc/machine-id")
    return hashlib.blake2s(machine.encode(), person=b"holdfast", digest_size=8).hexdigest() if machine else ""


def _pid_namespace() -> str:
    """Where process numbers and start times mean the same; a time namespace shifts the latter."""
    if sys.platform != "linux":
        return ""
    try:
        pids = str(calls.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
    return pids + _time_namespace()


def _time_namespace() -> str:
    """What tells the time namespace of this process from the one that the machine started with."""
    try:
        times = calls.stat("/proc/self/ns/time").st_ino
    except OSError:
        return ""
    return "" if times == _FIRST_TIME_NAMESPACE else f"+{times}"


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_holder_of.cache_clear)  # a child may get the number of an ancestor
    os.register_at_fork(after_in_child=boot_clock_id.cache_clear)  # or be born into another time namespace
