"""Identity of holders: which process holds something, whether it is still alive, and for whom a command runs.

A pid alone does not identify a process: it is reused after the process has ended and after a reboot, and it means
another process in another pid namespace or on another host. So a holder is identified by all of these together. Its
liveness is alive, dead or unknown. Only "dead" ever permits a takeover; every doubt is "unknown".

On Linux, all facts come from /proc. Elsewhere psutil is needed; it is slow to load, so it is imported on first use.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from holdfast.fs import calls

_LONGEST_COMMAND = 1 << 16


class Process(NamedTuple):
    """An existing process. `start_time` tells it apart from all others that ever had its pid."""

    pid: int
    start_time: str
    is_zombie: bool
    parent: int = 0


if sys.platform == "linux":

    def find_process(pid: int) -> Process | None:
        """The process with this pid, or None if it is gone or hidden from this user."""
        name = str(pid)
        if not _proc_shows_our_namespace():
            if pid != os.getpid():
                return None
            name = "self"
        try:
            text = calls.read_small(f"/proc/{name}/stat", 1 << 16).decode("utf-8", "replace")
        except OSError:
            return None
        # The command's name is in parentheses, and may itself contain spaces and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        zombie = fields[0] in "ZX" and not _has_live_threads(pid)
        return Process(pid, fields[19], zombie, int(fields[1]))

    def _proc_shows_our_namespace() -> bool:
        """Whether /proc shows our pids; it does not in a new pid namespace that still has the old /proc mounted."""
        try:
            return calls.readlink("/proc/self") == str(os.getpid())
        except OSError:
            return False

    def _has_live_threads(pid: int) -> bool:
        """Whether other threads still run: a process whose first thread has ended looks like a zombie."""
        try:
            with calls.scandir(f"/proc/{pid}/task") as tasks:
                return sum(1 for _ in tasks) > 1
        except OSError:
            return False

    def words_of(pid: int) -> list[str]:
        """The arguments of a process, cut off if very long; empty if they cannot be read."""
        try:
            words = calls.read_small(f"/proc/{pid}/cmdline", _LONGEST_COMMAND).split(b"\0")
        except OSError:
            return []
        return [word.decode("utf-8", "replace") for word in words]

    def started_ago(process: Process) -> float:
        """How many seconds ago a process started, by a clock that cannot be set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.start_time) / os.sysconf("SC_CLK_TCK")

else:

    def find_process(pid: int) -> Process | None:
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
        import psutil

        try:
            return psutil.Process(pid).cmdline()
        except psutil.Error:
            return []

    def started_ago(process: Process) -> float:
        return time.time() - float(process.start_time or "nan")


def command_of(pid: int) -> str | None:
    """The command line of a process; None if it cannot be read."""
    return " ".join(word for word in words_of(pid) if word) or None


def ancestors(pid: int) -> Iterator[Process]:
    """The process, its parent, and so on, up to the first that is not visible."""
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        process = find_process(pid)
        if process is None:
            return
        yield process
        pid = process.parent


def process_exists(pid: int) -> bool:
    """Whether any process has this pid, including zombies and those of other users."""
    if sys.platform == "win32":
        return find_process(pid) is not None
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def read_small(path: str) -> str:
    """The stripped text of a small system file; "" if it cannot be read."""
    try:
        return calls.read_small(path, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""


_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FIRST_TIME_NAMESPACE = 0xEFFFFFFA  # the inode that the kernel gives to the initial time namespace


_MACHINE_FIELDS = ("boot_id", "machine_id", "pid_namespace")


class Liveness(Enum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Holder(NamedTuple):
    """A process, identified even after its end and on other machines. `start_time` is the kernel's count (on Linux,
    clock ticks since boot), so setting the wall clock does not change it. Unknown fields are empty."""

    host: str
    user: str
    pid: int
    start_time: str
    boot_id: str
    machine_id: str
    pid_namespace: str

    @property
    def vantage(self) -> Vantage:
        return Vantage(self.host, self.boot_id, self.pid_namespace)

    @property
    def holder_id(self) -> str:
        return f"{self.host}:{self.user}:{self.pid}:{self.start_time}"

    def as_record(self) -> dict[str, object]:
        """The fields to store beside a lock; `from_record` reads them."""
        return {"holder_id": self.holder_id, **{name: getattr(self, name) for name in _MACHINE_FIELDS}}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Holder | None:
        """The holder in a stored record; None if the record has none."""
        parts = str(record.get("holder_id", "")).split(":")
        if len(parts) != 4 or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 12):
            return None
        values = (record.get(name) for name in _MACHINE_FIELDS)
        extra = [value if isinstance(value, str) else "" for value in values]
        return cls(parts[0], parts[1], int(parts[2]), parts[3], *extra)


class Vantage(NamedTuple):
    """The scope in which a pid is valid: in one vantage, a pid means the same process to everyone."""

    host: str
    boot_id: str
    pid_namespace: str


def current_holder() -> Holder:
    return _holder_of(os.getpid())


@functools.lru_cache(maxsize=1)
def current_vantage() -> Vantage:
    return Vantage(_host(), read_small(_BOOT_ID), _pid_namespace())


def holder_with_pid(pid: int) -> Holder | None:
    """The holder for a pid on this machine and in this namespace; None if the process is not visible or is a zombie."""
    found = find_process(pid)
    if found is None or found.is_zombie:
        return None
    return current_holder()._replace(pid=pid, start_time=found.start_time)


@functools.lru_cache(maxsize=1)
def boot_clock_id() -> str:
    """The id of this process's boot clock: processes with the same id read the same clock. It is empty if unknown
    (always, except on Linux); then the boot clock must not be compared."""
    boot_id = read_small(_BOOT_ID) if sys.platform == "linux" else ""
    return boot_id + _time_namespace() if boot_id else ""


@functools.lru_cache(maxsize=1)
def _holder_of(pid: int) -> Holder:  # cached by pid: a forked child is not its parent
    found, (host, boot_id, pid_namespace) = find_process(pid), current_vantage()
    return Holder(host, _user(), pid, found.start_time if found else "", boot_id, _machine_id(), pid_namespace)


def liveness(holder: Holder, *, here: Holder | None = None) -> Liveness:
    """Whether `holder` still exists, judged from `here` (by default this process). A holder on another host or in
    another pid namespace is unknown. A holder on the same machine before a reboot is dead."""
    vantage = here.vantage if here else current_vantage()
    if holder.host != vantage.host:
        return Liveness.UNKNOWN
    if holder.boot_id != vantage.boot_id:
        # The same machine after a reboot, or another one with the same name?
        machine_id = here.machine_id if here else current_holder().machine_id
        same_machine = bool(holder.machine_id) and holder.machine_id == machine_id
        return Liveness.DEAD if same_machine and holder.boot_id else Liveness.UNKNOWN
    if holder.pid_namespace != vantage.pid_namespace or (sys.platform == "linux" and not vantage.pid_namespace):
        return Liveness.UNKNOWN
    return process_liveness(holder.pid, start_time=holder.start_time)


def liveness_behind(holder: Holder | None, *, detached: bool) -> Liveness:
    """Whether a holder still exists; unknown for None. A detached lease outlives the process that asked for it, so the
    end of that process does not count as dead."""
    found = Liveness.UNKNOWN if holder is None else liveness(holder)
    return Liveness.UNKNOWN if detached and found is Liveness.DEAD else found


def described(holder: Holder, *, detached: bool = False) -> dict[str, str]:
    """The fields of a holder as texts, to store with a lease or claim; `described_liveness` reads them."""
    texts = {name: str(value) for name, value in holder.as_record().items()}
    return {**texts, "detached": "true"} if detached else texts


def described_liveness(record: Mapping[str, object]) -> Liveness:
    """Whether the holder in a record written by `described` still exists; unknown if the record has none."""
    return liveness_behind(Holder.from_record(record), detached=record.get("detached") == "true")


def process_liveness(pid: int, *, start_time: str = "") -> Liveness:
    """Whether the process `pid` exists on this machine and in this namespace, and started at `start_time`, if given."""
    if not 0 < pid < 1 << 31:
        return Liveness.UNKNOWN
    process = find_process(pid)
    if process is None:
        # Gone, or hidden from this user: sending signal 0 tells which.
        return Liveness.ALIVE if process_exists(pid) else Liveness.DEAD
    if process.is_zombie:
        return Liveness.DEAD
    if start_time and process.start_time and process.start_time != start_time:
        return Liveness.DEAD  # another process has this pid now
    return Liveness.ALIVE


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
    """An id of this machine that survives a reboot, hashed because the real one is confidential."""
    from _blake2 import blake2s  # `hashlib` loads OpenSSL, which is slow

    machine = read_small("/etc/machine-id")
    return blake2s(machine.encode(), person=b"holdfast", digest_size=8).hexdigest() if machine else ""


def _pid_namespace() -> str:
    """The namespace in which pids and start times are valid: a time namespace shifts start times."""
    if sys.platform != "linux":
        return ""
    try:
        pids = str(calls.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
    return pids + _time_namespace()


def _time_namespace() -> str:
    """A suffix for the time namespace of this process; "" for the initial one."""
    try:
        times = calls.stat("/proc/self/ns/time").st_ino
    except OSError:
        return ""
    return "" if times == _FIRST_TIME_NAMESPACE else f"+{times}"


if sys.platform != "win32":
    # A child may have the pid of an ancestor, or be in another pid or time namespace.
    for _cached in (_holder_of, current_vantage, boot_clock_id):
        os.register_at_fork(after_in_child=_cached.cache_clear)


MOST_ABOVE = 16  # how many ancestors count as processes on whose behalf a command runs

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "fish")


def calling_agent() -> Holder:
    """The nearest ancestor that is not a passing shell; this process if none is visible."""
    if sys.platform == "win32":
        return current_holder()
    for process in ancestors(os.getppid()):
        if process.pid > 1 and not _is_passing_shell(words_of(process.pid)):
            return holder_with_pid(process.pid) or current_holder()
    return current_holder()


@functools.lru_cache(maxsize=1)
def _above(pid: int) -> tuple[str, ...]:  # cached by pid: a forked child has another parent
    here = current_holder()
    found = itertools.islice(ancestors(pid), 1, 1 + MOST_ABOVE)
    return tuple(here._replace(pid=each.pid, start_time=each.start_time).holder_id for each in found if each.pid > 1)


def processes_above() -> tuple[str, ...]:
    """The holder ids of the ancestors of this process, nearest first."""
    return _above(os.getpid())


def is_ours(holder: Holder) -> bool:
    """Whether this command runs on behalf of `holder`: whether that is this process or an ancestor."""
    if holder.pid <= 1 or holder.vantage != current_vantage():
        return False
    return any((each.pid, each.start_time) == (holder.pid, holder.start_time) for each in ancestors(os.getpid()))


def acts_under(holders: Iterable[Holder | None], named: str | None, actor: str | None) -> bool:
    """Whether this command, run in the name of `actor`, acts under a lease or claim of `holders`. It must run on behalf
    of one of them, and not under a name other than theirs (`named`): several agents may share one process."""
    if named and actor and named != actor:
        return False
    return any(holder is not None and is_ours(holder) for holder in holders)


def _is_passing_shell(words: list[str]) -> bool:
    """Whether this is a shell that runs one command line and ends."""
    if not words or words[0].lstrip("-").rpartition("/")[2] not in _SHELLS:
        return False
    options = [word for word in words[1:] if word.startswith("-") and not word.startswith("--")]
    return any("c" in option for option in options[:3])
