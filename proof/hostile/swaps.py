"""Swap races: a directory is exchanged with a symbolic link while a command works in it.

Two ways. `swept` exchanges the two right before the n-th call of the command that looks the directory up, for every n:
no gap between check and use is missed. `raced` lets another process exchange them as fast as it can, as an attacker
would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from proof.hostile.campaign import Blueprint
from proof.hostile.runner import Job, Outcome, execute, execute_function
from proof.hostile.victim import Victim, changes, leaks, recorded, remove_everything, renew_home
from proof.interpose import Attempt, interposed

_AT_FDCWD = -100
_EXCHANGE = 2
ENDED = 99
"""The status of a command that looked the directory up less often."""
ENOUGH = 10
"""A sweep ends after this many escapes: if all rounds fail, it would take hours."""
CALLS = (
    *("open", "stat", "access", "link", "rename", "replace", "unlink", "mkdir", "rmdir", "scandir", "listdir", "chdir"),
    *("readlink", "realpath", "symlink", "chmod", "utime", "mknod", "rename_noreplace", "rename_exchange", "lchown"),
    *("setxattr", "clone", "snapshot_subvolume", "statvfs", "free_space", "open_without_links"),
)
"""The calls that look names up."""
_LISTING = ("scandir", "listdir")


class Swapper:
    """Exchanges a directory and a link right before the n-th call that looks the directory up.

    Between two such calls the moment makes no difference: all others work in directories that are already open, or
    elsewhere. With `back`, the exchange is undone right after the call. A git that another thread has started ends
    first: git takes paths, so a swap in the middle of its work may lead it astray, as SECURITY.md says.
    """

    def __init__(self, directory: Path, decoy: Path, number: int, *, back: bool = False) -> None:
        self.directory, self.decoy = os.fspath(directory), os.fspath(decoy)
        self._number, self._back = number, back
        self._programs: list[subprocess.Popen[bytes]] = []
        self.met = 0

    @property
    def is_hit(self) -> bool:
        """Whether there was such a call."""
        return self.met >= self._number

    def intercept(self, attempt: Attempt) -> Any:
        """Make a call; for `interposed`."""
        return self.around(attempt.perform) if self._looks_up(attempt) else attempt.perform()

    def start(self, program: subprocess.Popen[bytes], work: Callable[[], None]) -> None:
        """Start a program; for `announced`."""
        self.around(work)
        self._programs.append(program)

    def around(self, work: Callable[[], Any]) -> Any:
        """Do something that looks the directory up."""
        self.met += 1
        if self.met != self._number:
            return work()
        for each in self._programs:
            each.wait()
        self._swap()
        try:
            return work()
        finally:
            if self._back:
                self._swap()

    def _swap(self) -> None:
        with contextlib.suppress(OSError):  # the command has moved or removed it
            exchange(self.directory, self.decoy)

    def _looks_up(self, attempt: Attempt) -> bool:
        options = attempt.options
        descriptors = [options.get("src_dir_fd"), options.get("dst_dir_fd")]
        if attempt.name in _LISTING and _full_path(attempt.arguments[0], None)[1] == os.path.dirname(self.directory):
            return True
        for position, each in enumerate(attempt.arguments[:2]):
            if not isinstance(each, int):
                base, path = _full_path(each, descriptors[position] or options.get("dir_fd"))
                if self._contains(path) and not self._contains(base):
                    return True
        return False

    def _contains(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.directory}/")


def _full_path(name: Any, descriptor: int | None) -> tuple[str, str]:
    """The open directory in which a name is looked up, and the path of the name; empty for what is no name."""
    if isinstance(name, int):
        return "", os.readlink(f"/proc/self/fd/{name}")
    if not isinstance(name, str | bytes | os.PathLike):
        return "", ""
    path = os.fsdecode(name)
    base = os.readlink("/proc/self/cwd" if descriptor is None else f"/proc/self/fd/{descriptor}")
    return ("" if os.path.isabs(path) else base), os.path.normpath(os.path.join(base, path))


@contextlib.contextmanager
def announced(start: Callable[[subprocess.Popen[bytes], Callable[[], None]], None]) -> Iterator[None]:
    """Let `start` start each program that is run inside the block: it looks up what it pleases."""
    original = subprocess.Popen.__init__

    def begin(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, lambda: original(self, *arguments, **options))

    setattr(subprocess.Popen, "__init__", begin)  # noqa: B010 - another signature
    try:
        yield
    finally:
        setattr(subprocess.Popen, "__init__", original)  # noqa: B010


class Scenario(NamedTuple):
    """A directory of the repository, where the link in its place leads to, and the command that works in it."""

    name: str
    directory: str
    target: str
    command: tuple[str, ...]


SCENARIOS = (
    Scenario("worktree remove", "worktrees/spare", "docs", ("worktree", "remove", "spare", "--force")),
    Scenario("worktree remove above", "worktrees", "trap", ("worktree", "remove", "spare", "--force", "--no-snapshot")),
    Scenario("worktree create", "worktrees", "trap", ("worktree", "create", "made", "--from", "head")),
    Scenario("worktree rename", "worktrees", "trap", ("worktree", "rename", "spare", "other")),
    Scenario("scratch of a snapshot", ".jvs/tmp", "trap", ("snapshot", "-m", "x")),
    Scenario("scratch of a sweep", ".jvs/tmp", "trap", ("doctor", "--fix")),
    Scenario("trees of a snapshot", ".jvs/snapshots", "trap", ("snapshot", "-m", "x")),
    Scenario("trees of a collection", ".jvs/snapshots", "trap", ("gc", "run", "--plan", "{plan}")),
    Scenario("remnants of a collection", ".jvs/remnants", "trap", ("gc", "run", "--plan", "{plan}")),
    Scenario("payload of a restore", "main", "docs", ("restore", "v1", "--inplace", "--reason", "x", "--force")),
    Scenario(
        "part of a restore", "main/src", "docs", ("restore", "v1", "--inplace", "--path", "src/deep", "--reason", "x")
    ),
    Scenario("records", ".jvs/worktrees", "trap", ("worktree", "create", "made")),
    Scenario("locks", ".jvs/guards", "trap", ("lease", "acquire", "--ttl", "5m")),
    Scenario("issues", ".jit/issues", "trap", ("issue", "create", "x")),
    Scenario("ledger", "ledger", "trap", ("ledger", "append", '{"type":"note"}')),
    Scenario("everything", ".jvs", "trap", ("snapshot", "-m", "x")),
    Scenario("operations", ".jvs/operations", "trap", ("worktree", "rename", "spare", "other")),
    Scenario("descriptors", ".jvs/descriptors", "trap", ("gc", "run", "--plan", "{plan}")),
    Scenario("intents", ".holdfast/intents", "trap", ("issue", "create", "x")),
    Scenario("audit", ".jvs/audit", "trap", ("lease", "acquire", "--ttl", "5m")),
    Scenario("cache", ".jvs/cache", "trap", ("snapshot", "-m", "x")),
    Scenario("source", "main/src", "docs", ("snapshot", "-m", "x")),
)

_ROOT = "main/.git/holdfast"
GIT_SCENARIOS = (
    Scenario("git: records", f"{_ROOT}/.jvs/worktrees", "trap", ("worktree", "create", "made")),
    Scenario("git: operations", f"{_ROOT}/.jvs/operations", "trap", ("worktree", "rename", "spare", "other")),
    Scenario("git: descriptors", f"{_ROOT}/.jvs/descriptors", "trap", ("gc", "run", "--plan", "{plan}")),
    Scenario("git: guards", f"{_ROOT}/.jvs/guards", "trap", ("worktree", "remove", "spare", "--force")),
    Scenario("git: intents", f"{_ROOT}/.holdfast/intents", "trap", ("snapshot", "-m", "x")),
    Scenario("git: scratch of a snapshot", f"{_ROOT}/.jvs/tmp", "trap", ("snapshot", "-m", "x")),
    Scenario("git: private index", f"{_ROOT}/.jvs/index", "trap", ("snapshot", "-m", "x")),
    Scenario("git: scratch of a sweep", f"{_ROOT}/.jvs/tmp", "trap", ("doctor", "--fix")),
    Scenario("git: issues", f"{_ROOT}/.jit/issues", "trap", ("issue", "create", "x")),
    Scenario("git: all records", _ROOT, "trap", ("lease", "acquire", "--ttl", "5m")),
)
"""In a git home: what Holdfast itself reads and writes. In its own directory, git takes paths and follows links."""


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Exchange two names in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one))


class Tally(NamedTuple):
    """What came of the races: how often a swap was made, how often the command noticed it, and each escape."""

    rounds: int
    swapped: int
    met: int
    escapes: list[str]


class Arena:
    """One scenario in one victim, whose repository is rebuilt for every round."""

    def __init__(self, victim: Victim, blueprint: Blueprint, scenario: Scenario, facts: dict[str, str]) -> None:
        self.victim = victim
        self.scenario = scenario
        self._blueprint = blueprint
        self.command = tuple(word.replace("{plan}", facts["plan"]) for word in scenario.command)
        self.directory = victim.repository / scenario.directory
        self.decoy = victim.repository / f"{scenario.directory}-decoy"
        self.build()
        self._before = recorded(victim)

    def build(self) -> None:
        if self.victim.repository.exists():
            remove_everything(self.victim.repository)
        self._blueprint.build(self.victim.repository)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.decoy.symlink_to(self.victim.home / self.scenario.target)

    def job(self) -> Job:
        return self.victim.job(*self.command)

    def escapes(self, when: str, outcome: Outcome) -> list[str]:
        """What the command did outside, or how it ended badly; the victim is as good as new afterwards."""
        found = changes(self._before, recorded(self.victim))
        if found:
            renew_home(self.victim)
            self._before = recorded(self.victim)
        found += leaks(self.victim)
        found += [outcome.problem] if outcome.problem and outcome.status != ENDED else []
        return [f"{self.scenario.name}, {when}: {'; '.join(found[:3])}"] if found else []


def swept(arena: Arena, numbers: Iterator[int] | range, *, back: bool = False) -> Tally:
    """Swap before each of these lookups; with `back`, swap back after it. Stops at the end of the command."""
    rounds = swapped = met = 0
    escapes: list[str] = []
    for number in numbers:
        arena.build()
        outcome = execute_function(arena.job(), _swapping(arena, number, back=back))
        rounds += 1
        if outcome.status == ENDED:
            break
        swapped += 1
        met += outcome.status != 0
        escapes += arena.escapes(f"swapped before lookup {number}{' and back' if back else ''}", outcome)
        if len(escapes) >= ENOUGH:
            break
    return Tally(rounds, swapped, met, escapes)


def _swapping(arena: Arena, number: int, *, back: bool) -> Callable[[], int]:
    def work() -> int:
        from holdfast.__main__ import main

        swapper = Swapper(arena.directory, arena.decoy, number, back=back)
        sys.argv = ["holdfast", *arena.command]
        with interposed(swapper.intercept, CALLS), announced(swapper.start):
            status = main()
        return status if swapper.is_hit else ENDED

    return work


def raced(arena: Arena, wanted: int) -> Tally:
    """Run the command again and again while another process swaps as fast as it can, until it could swap in as many
    rounds as wanted: on a busy machine, it gets no chance in some."""
    if sys.platform != "linux":
        raise NotImplementedError
    rounds = swapped = met = 0
    escapes: list[str] = []
    while swapped < wanted and rounds < 4 * wanted:
        rounds += 1
        arena.build()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _flip(arena, write)
        os.close(write)
        try:
            outcome = execute(arena.job())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        flips = len(os.read(read, 1 << 16))
        os.close(read)
        swapped += bool(flips)
        met += outcome.status != 0
        escapes += arena.escapes(f"round {rounds}", outcome)
    return Tally(rounds, swapped, met, escapes)


def _flip(arena: Arena, report: int) -> None:
    """Be the attacker; never returns. Each of the first swaps is reported, so that races can be counted."""
    if sys.platform == "win32":
        raise NotImplementedError
    os.set_blocking(report, False)
    count = 0
    while True:
        with contextlib.suppress(OSError):
            exchange(arena.directory, arena.decoy)
            count += 1
            if count < 4096:
                os.write(report, b".")
