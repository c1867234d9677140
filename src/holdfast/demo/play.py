"""The course of the demo: start workers, kill and stop some while they hold a lock, then judge."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.demo.audit import Tally, examine
from holdfast.demo.crew import Command, Crew
from holdfast.demo.scene import Protection, Scene
from holdfast.errors import Failure
from holdfast.locks.file_locker import FileLocker
from holdfast.locks.ledger_lock import LedgerLock
from holdfast.locks.repo_lock import RepoLock

SETTLE = 1.0
"""How long the workers work undisturbed, at the beginning and at the end."""
BETWEEN_KILLS = 0.6


class Incident(NamedTuple):
    """Something that was done to a worker, `after` so many seconds: `killed`, `stopped` or `resumed`."""

    after: float
    what: str
    worker: str
    held: Protection


class Report(NamedTuple):
    """What was shown. It has passed if there are no findings."""

    seconds: float
    incidents: Sequence[Incident]
    tallies: Mapping[Protection, Tally]
    last_acquired: Mapping[Protection, float]
    findings: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.findings


def play(
    directory: Path,
    *,
    workers: int,
    seconds: float,
    seed: int,
    command: Callable[[float], Command],
    tell: Callable[[Incident], None],
) -> Report:
    """Play the demo in an empty directory. `command` makes a worker's command line, given its deadline."""
    scene = Scene.prepared(directory)
    began = time.monotonic()
    until = began + seconds
    chance = random.Random(seed)
    with Crew(scene, workers, command(until), chance) as crew:
        crew.start()
        incidents = _Mischief(crew, chance, began, tell).make(until - min(SETTLE, seconds / 4))
        crew.wait()
    audit = examine(scene, crew.lives)
    last_acquired, stuck = _acquire_each(scene)
    return Report(seconds, incidents, audit.tallies, last_acquired, [*audit.findings, *stuck])


class _Mischief:
    """Kills and stops workers, each caught while it holds a lock."""

    def __init__(
        self, crew: Crew, chance: random.Random, began: float, tell: Callable[[Incident], None]
    ) -> None:
        self._crew = crew
        self._chance = chance
        self._began = began
        self._tell = tell
        self._incidents: list[Incident] = []

    def make(self, until: float) -> list[Incident]:
        """Make mischief until then, with one long stop in the middle."""
        length = until - time.monotonic()
        time.sleep(min(SETTLE, length / 4))
        stop_at = time.monotonic() + length * 0.3
        stopped = False
        while time.monotonic() < until:
            if not stopped and time.monotonic() >= stop_at:
                stopped = self._stop_one(min(1.5, length / 5))
            else:
                self._kill_one()
            time.sleep(self._chance.uniform(0.5, 1.5) * min(BETWEEN_KILLS, length / 8))
        return self._incidents

    def _kill_one(self) -> None:
        caught = self._crew.catch_holder()
        if caught is not None:
            slot, held = caught
            self._note("killed", self._crew.kill(slot), held)

    def _stop_one(self, duration: float) -> bool:
        caught = self._crew.catch_holder()
        if caught is None:
            return False
        slot, held = caught
        self._note("stopped", self._crew.name_in(slot), held)
        time.sleep(duration)
        self._note("resumed", self._crew.name_in(slot), held)
        self._crew.resume(slot)
        return True

    def _note(self, what: str, worker: str, held: Protection) -> None:
        incident = Incident(round(time.monotonic() - self._began, 3), what, worker, held)
        self._incidents.append(incident)
        self._tell(incident)


def _acquire_each(scene: Scene) -> tuple[dict[Protection, float], list[str]]:
    """Take and release each lock once more; how long that took, and which could not be had."""
    took: dict[Protection, float] = {}
    stuck: list[str] = []
    last_turn: dict[Protection, Callable[[], object]] = {
        Protection.COUNTER: lambda: FileLocker(5.0, fair=True).lock_exclusive(scene.counter_lock).release(),
        Protection.JOURNAL: lambda: RepoLock(scene.data).lock("demo", "audit").unlock(),
        Protection.LEDGER: lambda: LedgerLock(scene.ledger, "audit").acquire().release(),
    }
    for protection, take in last_turn.items():
        began = time.monotonic()
        try:
            take()
        except Failure as failure:
            stuck.append(f"{protection.value}: stuck: {failure.message}")
        took[protection] = time.monotonic() - began
    return took, stuck
