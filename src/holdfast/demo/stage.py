"""What the demo is played on: a repository, a queue of issues that wait for each other, and a ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import Priority
from holdfast.issues.tracker import Tracker
from holdfast.repository.init import initialise
from holdfast.repository.opening import OpenLedger, init_ledger, open_ledger, open_tracker
from holdfast.repository.repository import Repository

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
