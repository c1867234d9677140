"""The demo's repository, its agents, which are real processes, and the task that each agent runs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories, opened
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.issues.tracker import Tracker
from holdfast.locks.kernel_locks import is_holding
from holdfast.repository.init import initialise
from holdfast.repository.ledgers import OpenLedger, init_ledger, open_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository

ROW = 6
"""The number of issues in a row, which are independent of each other."""
STEPS = 4


class Stage(NamedTuple):
    """The directories of one demo."""

    root: Path
    notes: Path
    """The notes that tasks make of their writes, outside all worktrees, and the output of the agents."""

    @classmethod
    def at(cls, directory: Path) -> Stage:
        return cls(directory / "repository", directory / "notes")

    def repository(self) -> Repository:
        return Repository(self.root)

    def tracker(self) -> Tracker:
        return open_tracker(self.root, actor="auto:demo")

    def ledger(self) -> OpenLedger:
        return open_ledger(self.root)

    def note(self, name: str, record: dict[str, object]) -> None:
        """Record a completed write durably: anything noted here must never be lost."""
        durable.create(self.notes / name, strictjson.encode(record))

    def noted(self) -> list[dict[str, object]]:
        with Directory.open(self.notes) as notes:
            names = sorted(name for name in notes.names() if name.endswith(".json"))
        return [strictjson.decode(durable.read(self.notes / name)) for name in names]


def set_up(stage: Stage, *, issues: int, seed: int, store: str | None) -> Sequence[str]:
    """Create the repository, the ledger and the queue; return the ids of the issues.

    The issues are in rows: each one depends on two of the row before it.
    """
    make_directories(stage.notes)
    initialise(stage.root, store=store)
    init_ledger(stage.root)
    tracker = stage.tracker()
    tracker.initialise()
    chance = random.Random(seed)
    queue = []
    for index in range(issues):
        start = (index // ROW - 1) * ROW
        row_before = [str(each) for each in range(start, start + ROW)] if start >= 0 else []
        on = tuple(chance.sample(row_before, 2)) if row_before else ()
        priority, title = chance.choice(list(Priority)), f"Part {index + 1} of {issues}"
        queue.append(NewIssue(title=title, key=str(index), depends_on=on, priority=priority))
    return [each.issue.id for each in tracker.create_all(queue)]


def work(stage: Stage, directory: Path, *, issue: str, token: int, seed: int) -> None:
    """Do the task of an issue: write a file per step into `directory`, the worktree, and then the result.

    Every attempt has its own files and notes each of them once it is durable, so that the check can tell whether any
    write of any attempt was lost.
    """
    chance = random.Random(f"{seed}/{issue}/{token}")
    for step in range(1, STEPS + 1):
        name = f"attempt-{token}-step-{step}.txt"
        durable.replace(directory / name, f"{issue} {token} {step}\n".encode())
        stage.note(f"{issue}-{token}-{step}.json", {"issue": issue, "token": token, "file": name})
        time.sleep(chance.uniform(0.05, 0.35))
    durable.replace(directory / "result.txt", f"{issue} by attempt {token}\n".encode())


class AgentExit(NamedTuple):
    """How an agent ended, and whether the demo had killed or paused it."""

    agent: int
    exit_status: int
    killed: bool
    paused: bool


class Agent:
    """An agent: one process, with everything that it starts, in its own process group."""

    def __init__(self, number: int, name: str, command: list[str], log: Path) -> None:
        self.number, self.name = number, name
        self.killed = self.paused = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        with Directory.open(log.parent) as logs, opened(logs.at(log.name), flags, dir_fd=logs.fd) as output:
            self._process = subprocess.Popen(  # in a new session: Ctrl-C is for the demo, which ends its agents
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit(self) -> AgentExit:
        return AgentExit(self.number, self._process.wait(), self.killed, self.paused)

    def kill(self) -> None:
        """Kill the agent's own process, as a crash would; its command dies with it."""
        self.killed = True
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop the whole group, as if its machine had been suspended."""
        self.paused = True
        self._signal_group("SIGSTOP")

    def resume(self) -> None:
        self._signal_group("SIGCONT")

    def end(self) -> None:
        """Kill the whole group."""
        self._signal_group("SIGKILL")
        self._process.wait()

    def is_committing(self) -> bool:
        """Whether the agent holds a lock: paused now, it would block every other agent."""
        return is_holding(self._process.pid)

    def _signal_group(self, name: str) -> None:
        if sys.platform == "win32":
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, getattr(signal, name))
