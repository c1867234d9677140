"""Who holds something, and whether that holder is still there.

A process number alone says little: it is used again after the process has ended, it counts anew
after a restart of the machine, and it means another process in another pid namespace or on another
host. So a holder is identified by all of these together, and the question whether it is alive has
three answers. Only "dead" ever allows anything: whatever is not certain is "unknown".
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from holdfast.fs import calls, lookup

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
            text = lookup.read_small(f"/proc/{name}/stat", 1 << 16).decode("utf-8", "replace")
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
            words = lookup.read_small(f"/proc/{pid}/cmdline", _LONGEST_COMMAND).split(b"\0")
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
        return lookup.read_small(path, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""


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
    return Vantage(_host(), read_small(_BOOT_ID), _pid_namespace())


def holder_with_pid(pid: int) -> Holder | None:
    """Another process of this machine and namespace as a holder; None if there is none to be seen."""
    found = find_process(pid)
    if found is None or found.is_zombie:
        return None
    return current_holder()._replace(pid=pid, start_time=found.start_time)


@functools.lru_cache(maxsize=1)
def boot_clock_id() -> str:
    """Names the boot clock that this process reads: whoever has the same id reads the same clock.

    Empty where there is no way to tell (anywhere but on Linux): then there is none to be relied on.
    """
    boot_id = read_small(_BOOT_ID) if sys.platform == "linux" else ""
    return boot_id + _time_namespace() if boot_id else ""


@functools.lru_cache(maxsize=1)
def _holder_of(pid: int) -> Holder:  # by pid, so that a forked child does not take itself for its parent
    itself, vantage = find_process(pid), current_vantage()
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
    process = find_process(pid)
    if process is None:
        # Gone, or only hidden from this user: the kernel knows which.
        return Liveness.ALIVE if is_there(pid) else Liveness.DEAD
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

    machine = read_small("/etc/machine-id")
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


MOST_ABOVE = 16
"""How far up it is looked for those on whose behalf a command runs."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "fish")


def calling_agent() -> Holder:
    """Who runs this command; this process itself if that cannot be seen."""
    if sys.platform == "win32":
        return current_holder()
    for process in ancestors(os.getppid()):
        if process.pid > 1 and not _is_passing_shell(words_of(process.pid)):
            return holder_with_pid(process.pid) or current_holder()
    return current_holder()


@functools.lru_cache(maxsize=1)
def _above(pid: int) -> tuple[str, ...]:  # by pid, for a forked child has another parent
    here = current_holder()
    found = itertools.islice(ancestors(pid), 1, 1 + MOST_ABOVE)
    return tuple(
        here._replace(pid=each.pid, start_time=each.start_time).holder_id for each in found if each.pid > 1
    )


def processes_above() -> tuple[str, ...]:
    """The ids of the holders that the processes above this one would be, the nearest first."""
    return _above(os.getpid())


def is_ours(holder: Holder) -> bool:
    """Whether this command runs on behalf of `holder`: it is this process, or one that it descends from."""
    if holder.pid <= 1 or holder.vantage != current_vantage():
        return False
    return any(
        (process.pid, process.start_time) == (holder.pid, holder.start_time)
        for process in ancestors(os.getpid())
    )


def acts_under(holders: Iterable[Holder | None], named: str | None, actor: str | None) -> bool:
    """Whether this command, run in the name of `actor`, acts under what `holders` have.

    It does if it runs on behalf of one of them. But one process may be the home of several agents, which
    descent cannot tell apart: so who says its name is not taken for another one that said its own
    (`named`, when it took what it holds). Who says none is known by its process.
    """
    if named and actor and named != actor:
        return False
    return any(holder is not None and is_ours(holder) for holder in holders)


def _is_passing_shell(words: list[str]) -> bool:
    """Whether this is a shell that carries out one command line and is gone then."""
    if not words or words[0].lstrip("-").rpartition("/")[2] not in _SHELLS:
        return False
    options = [word for word in words[1:] if word.startswith("-") and not word.startswith("--")]
    return any("c" in option for option in options[:3])
