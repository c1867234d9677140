"""Swap races: a directory is exchanged with a symbolic link while a command works in it.

Two ways. `swept` exchanges the two right before the n-th file system call of the command, for every n: no gap between
check and use is missed. `raced` lets another process exchange them as fast as it can, as an attacker would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
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
"""The status of a command that made fewer calls than the one to swap before."""
CALLS = (
    *("open", "stat", "access", "link", "rename", "replace", "unlink", "mkdir", "rmdir", "scandir", "listdir", "chdir"),
    *("readlink", "realpath", "symlink", "chmod", "utime", "mknod", "rename_noreplace", "rename_exchange", "lchown"),
    *("setxattr", "clone", "snapshot_subvolume", "statvfs", "free_space", "open_without_links"),
)
"""The calls that look a name up: between two others, a swap makes no difference."""


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
)


def exchange(one: Path, other: Path) -> None:
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
        self.directory = victim.root / scenario.directory
        self.decoy = victim.root / f"{scenario.directory}-decoy"
        self.build()
        self._before = recorded(victim)

    def build(self) -> None:
        if self.victim.root.exists():
            remove_everything(self.victim.root)
        self._blueprint.build(self.victim.root)
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
    """Swap before each of these calls; with `back`, swap back before the next one. Stops at the end of the command."""
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
        escapes += arena.escapes(f"swapped before call {number}{' and back' if back else ''}", outcome)
    return Tally(rounds, swapped, met, escapes)


def _swapping(arena: Arena, number: int, *, back: bool) -> Callable[[], int]:
    def work() -> int:
        made = 0

        def intercept(attempt: Attempt) -> Any:
            nonlocal made
            if str(attempt.arguments[0]).startswith("/proc/"):
                return attempt.perform()
            made += 1
            if made == number or (back and made == number + 1):
                with contextlib.suppress(OSError):  # the command has moved or removed it
                    exchange(arena.directory, arena.decoy)
            return attempt.perform()

        from holdfast.__main__ import main

        sys.argv = ["holdfast", *arena.command]
        with interposed(intercept, CALLS):
            status = main()
        return status if made >= number else ENDED

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
