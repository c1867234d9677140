"""The agents of the demo: real processes that take work, one piece each, and can be killed and paused."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.issues.tracker import Tracker
from holdfast.locks.kernel_locks import is_holding
from holdfast.repository.init import initialise
from holdfast.repository.opening import OpenLedger, init_ledger, open_ledger, open_tracker
from holdfast.repository.repository import Repository

Command = Callable[[str], list[str]]
"""The command line of the agent with this name."""


class AgentExit(NamedTuple):
    """An agent that there was: which number it had, how it ended, what it said."""

    agent: int
    exit_status: int
    said: str
    killed: bool
    paused: bool


class Agent:
    """One process of the crew, with all that it starts in a group of its own."""

    def __init__(self, number: int, name: str, command: list[str], log: Path) -> None:
        self.number = number
        self.name = name
        self.began = time.monotonic()
        self.killed = self.paused = False
        self._log = log
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        output = calls.open(log, flags, 0o666)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for us, and we end them
            )
        finally:
            calls.close(output)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the agent, as a crash would. What it runs dies with it, as it does for everybody."""
        self.killed = True
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Let nothing of it go on, as if its machine had been put to sleep."""
        self.paused = True
        self._signal_all("SIGSTOP")

    def resume(self) -> None:
        self._signal_all("SIGCONT")

    def is_holding_others_up(self) -> bool:
        """Whether it is in the middle of a commit: until it goes on, nobody else can write there."""
        return is_holding(self._process.pid)

    def end(self) -> AgentExit:
        """What became of it; to be asked when it has ended."""
        said = durable.read(self._log, limit=1 << 20).decode("utf-8", "replace").strip()
        return AgentExit(self.number, self._process.wait(), said, self.killed, self.paused)

    def clear_away(self) -> None:
        """Leave nothing of it."""
        self._signal_all("SIGKILL")
        self._process.wait()

    def _signal_all(self, name: str) -> None:
        if sys.platform == "win32":
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, getattr(signal, name))


class Crew:
    """So many agents at most, at the same time. Leaving its block ends all of them."""

    def __init__(self, size: int, command: Command, logs: Path) -> None:
        self.working: dict[int, Agent] = {}
        self.ended: list[AgentExit] = []
        self._size = size
        self._command = command
        self._logs = logs
        self._started = 0

    def idle(self) -> list[int]:
        """The numbers of those who have nothing to do."""
        return [number for number in range(1, self._size + 1) if number not in self.working]

    def start(self, number: int) -> None:
        """Let one take a piece of work."""
        self._started += 1
        name = f"agent:{number}-{self._started}"  # nobody had it before: claims are told apart by it
        log = self._logs / f"agent-{number}-{self._started}.log"
        self.working[number] = Agent(number, name, self._command(name), log)

    def gather(self) -> list[AgentExit]:
        """Take note of those who have come to an end since."""
        done = [agent for agent in self.working.values() if agent.has_ended()]
        for agent in done:
            del self.working[agent.number]
        ended = [agent.end() for agent in done]
        self.ended += ended
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.working.values():
            agent.clear_away()


ACTOR = "auto:demo"
IN_A_ROW = 6
"""How many issues do not wait for each other."""


class Stage(NamedTuple):
    """The directories of one demo."""

    root: Path
    notes: Path
    """Where tasks note what they have written, outside of all worktrees."""

    @classmethod
    def at(cls, directory: Path) -> Stage:
        return cls(directory / "repository", directory / "notes")

    def repository(self) -> Repository:
        return Repository(self.root)

    def tracker(self) -> Tracker:
        return open_tracker(self.root, actor=ACTOR)

    def ledger(self) -> OpenLedger:
        return open_ledger(self.root)

    def note(self, name: str, record: dict[str, object]) -> None:
        """Note something that is done, durably: what is noted must never be lost."""
        durable.create(self.notes / name, strictjson.encode(record))

    def noted(self) -> list[dict[str, object]]:
        """Everything that was noted."""
        with Directory.open(self.notes) as notes:
            names = sorted(name for name in notes.names() if name.endswith(".json"))
        return [strictjson.decode(durable.read(self.notes / name)) for name in names]


def set_up(stage: Stage, *, issues: int, seed: int, store: str | None) -> Sequence[str]:
    """Make the repository, the queue and the ledger; the ids of the issues."""
    make_directories(stage.notes)
    initialise(stage.root, store=store)
    init_ledger(stage.root)
    tracker = stage.tracker()
    tracker.initialise()
    return [each.issue.id for each in tracker.create_all(_queue(issues, random.Random(seed)))]


def _queue(number: int, chance: random.Random) -> list[NewIssue]:
    """Issues in rows: each waits for two of the row before it."""
    queue: list[NewIssue] = []
    for index in range(number):
        row = index // IN_A_ROW
        before = [str(each) for each in range((row - 1) * IN_A_ROW, row * IN_A_ROW)] if row else []
        queue.append(
            NewIssue(
                title=f"Part {index + 1} of {number}",
                key=str(index),
                depends_on=tuple(chance.sample(before, 2)) if before else (),
                priority=chance.choice(list(Priority)),
            )
        )
    return queue


STEPS = 4


def work(stage: Stage, directory: Path, *, issue: str, token: int, seed: int) -> None:
    """Write into `directory`, which is the worktree: what was begun, step by step, and the result.

    Every attempt has files of its own, and notes what it has written once that is on disk: so it can be
    told afterwards whether anything of anybody was lost.
    """
    chance = random.Random(f"{seed}/{issue}/{token}")
    for step in range(1, STEPS + 1):
        name = f"attempt-{token}-step-{step}.txt"
        durable.replace(directory / name, f"{issue} {token} {step}\n".encode())
        stage.note(f"{issue}-{token}-{step}.json", {"issue": issue, "token": token, "file": name})
        time.sleep(chance.uniform(0.05, 0.35))
    durable.replace(directory / "result.txt", f"{issue} by attempt {token}\n".encode())
