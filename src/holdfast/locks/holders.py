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

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
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
    def vantage(self) -> Vantage:
        """From where its number means it."""
        return Vantage(self.host, self.boot_id, self.pid_namespace)

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


class Vantage(NamedTuple):
    """From where processes are seen: where these are the same, the same number means the same process."""

    host: str
    boot_id: str
    pid_namespace: str


def current_holder() -> Holder:
    """This process."""
    return _holder_of(os.getpid())


@functools.lru_cache(maxsize=1)
def current_vantage() -> Vantage:
    """From where this process sees others: what can be told of it quickly."""
    return Vantage(_host(), processes.read_small(_BOOT_ID), _pid_namespace())


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
    boot_id = processes.read_small(_BOOT_ID) if sys.platform == "linux" else ""
    return boot_id + _time_namespace() if boot_id else ""


@functools.lru_cache(maxsize=1)
def _holder_of(pid: int) -> Holder:  # by pid, so that a forked child does not take itself for its parent
    itself, vantage = processes.find_process(pid), current_vantage()
    return Holder(
        host=vantage.host,
        user=_user(),
        pid=pid,
        start_time=itself.start_time if itself else "",
        boot_id=vantage.boot_id,
        machine_id=_machine_id(),
        pid_namespace=vantage.pid_namespace,
    )


def liveness(holder: Holder, *, here: Holder | None = None) -> Liveness:
    """Whether `holder` still exists, judged from `here` (this process unless said otherwise).

    Another host, another pid namespace: unknown. The same machine started anew since: dead.
    """
    vantage = here.vantage if here else current_vantage()
    if holder.host != vantage.host:
        return Liveness.UNKNOWN
    if holder.boot_id != vantage.boot_id:
        # The same machine after a restart, or another one that goes by the same name?
        machine_id = here.machine_id if here else current_holder().machine_id
        same_machine = bool(holder.machine_id) and holder.machine_id == machine_id
        return Liveness.DEAD if same_machine and holder.boot_id else Liveness.UNKNOWN
    if holder.pid_namespace != vantage.pid_namespace:
        return Liveness.UNKNOWN
    if sys.platform == "linux" and not vantage.pid_namespace:
        return Liveness.UNKNOWN
    return process_liveness(holder.pid, start_time=holder.start_time)


def liveness_behind(holder: Holder | None, *, detached: bool) -> Liveness:
    """Whether the holder of something still exists; None is one that nothing is known of.

    What is detached belongs to more than one process: that its process has ended does not make it dead.
    """
    found = Liveness.UNKNOWN if holder is None else liveness(holder)
    return Liveness.UNKNOWN if detached and found is Liveness.DEAD else found


def described(holder: Holder, *, detached: bool = False) -> dict[str, str]:
    """A holder in plain texts, to be kept in the record of what it holds; see `described_liveness`."""
    texts = {name: str(value) for name, value in holder.as_record().items()}
    return {**texts, "detached": "true"} if detached else texts


def described_liveness(record: Mapping[str, object]) -> Liveness:
    """Whether the holder that `described` has put into words still exists; unknown if there are none."""
    return liveness_behind(Holder.from_record(record), detached=record.get("detached") == "true")


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
    os.register_at_fork(after_in_child=current_vantage.cache_clear)  # it may be in another pid namespace
    os.register_at_fork(after_in_child=boot_clock_id.cache_clear)  # or be born into another time namespace
