"""The judgement of the demo: what the workers acknowledged against what is there.

A worker that was killed may have done one operation more than it acknowledged: it died in between.
Anything else that is missing, or there twice, or done while somebody else held the lock, is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.demo.crew import Life
from holdfast.demo.scene import Note, Protection, Scene, read_notes
from holdfast.errors import JsonInvalid, NotFound
from holdfast.fs import durable, strictjson


class Tally(NamedTuple):
    """What is known about one of the three things that were shared."""

    acknowledged: int
    present: int
    unacknowledged: int
    turns: int


class Turn(NamedTuple):
    """The time during which a worker was under the protection of a lock."""

    entered_at: float
    left_at: float
    worker: str


class Audit(NamedTuple):
    """The result. Nothing is wrong if there are no findings."""

    tallies: Mapping[Protection, Tally]
    findings: Sequence[str]


def examine(scene: Scene, lives: Sequence[Life]) -> Audit:
    """Judge what the workers with these lives have left behind."""
    notes = {life.name: read_notes(scene, life.name) for life in lives}
    killed = {life.name for life in lives if life.killed_at is not None}
    found: list[str] = [
        _how_it_ended(life) for life in lives if life.killed_at is None and life.exit_status != 0
    ]
    tallies: dict[Protection, Tally] = {}
    for protection, present in _what_is_there(scene, found).items():
        done = {name: [n.number for n in each if _is(n, "done", protection)] for name, each in notes.items()}
        found += _differences(protection, done, present, killed)
        turns = _turns(protection, notes, lives)
        found += _overlaps(protection, turns)
        tallies[protection] = Tally(
            acknowledged=sum(map(len, done.values())),
            present=sum(map(len, present.values())),
            unacknowledged=sum(max(0, len(present.get(name, ())) - len(done[name])) for name in killed),
            turns=len(turns),
        )
    if taken := sum(note.event == "taken" for each in notes.values() for note in each):
        found.append(f"ledger: {taken} times the next number had been taken by somebody else")
    return Audit(tallies, found)


Operations = Mapping[str, Sequence[int]]
"""The numbers of operations, by the worker that did them."""


def _what_is_there(scene: Scene, found: list[str]) -> dict[Protection, Operations]:
    """What the shared files say was done; adds to `found` what they say that makes no sense."""
    return {
        Protection.COUNTER: _in_counter(scene),
        Protection.JOURNAL: _in_journal(scene, found),
        Protection.LEDGER: _in_ledger(scene, found),
    }


def _in_counter(scene: Scene) -> Operations:
    """A worker that counted to three did operations one, two and three."""
    numbers = strictjson.decode(durable.read(scene.counter))
    return {name: range(1, number + 1) for name, number in numbers.items()}


def _in_journal(scene: Scene, found: list[str]) -> Operations:
    try:
        lines = durable.read(scene.journal).split(b"\n")[:-1]
    except NotFound:
        lines = []
    return _by_worker(((f"journal: line {n}", line) for n, line in enumerate(lines, 1)), found)


def _in_ledger(scene: Scene, found: list[str]) -> Operations:
    numbers = scene.event_numbers()
    if numbers != list(range(1, len(numbers) + 1)):
        found.append("ledger: the numbers of the events have gaps")
    return _by_worker(((f"ledger: event {n}", durable.read(scene.event(n))) for n in numbers), found)


def _by_worker(records: Iterable[tuple[str, bytes]], found: list[str]) -> Operations:
    operations: dict[str, list[int]] = {}
    for where, content in records:
        try:
            record = strictjson.decode(content)
            operations.setdefault(str(record["worker"]), []).append(int(record["number"]))
        except (JsonInvalid, KeyError, TypeError, ValueError):
            found.append(f"{where} is damaged")
    return operations


def _differences(
    protection: Protection, done: Operations, present: Operations, killed: set[str]
) -> Iterable[str]:
    where = protection.name.lower()
    lost = twice = unknown = 0
    for name in {*done, *present}:
        acknowledged, there = set(done.get(name, ())), Counter(present.get(name, ()))
        lost += len(acknowledged - set(there))
        twice += sum(count > 1 for count in there.values())
        unknown += max(0, len(set(there) - acknowledged) - (name in killed))
    if lost:
        yield f"{where}: {lost} operations are lost that were acknowledged"
    if twice:
        yield f"{where}: {twice} operations were done more than once"
    if unknown:
        yield f"{where}: {unknown} operations are there that nobody acknowledged"


def _turns(protection: Protection, notes: Mapping[str, Sequence[Note]], lives: Sequence[Life]) -> list[Turn]:
    """Who was under this protection when. One who was killed there stayed until then, at least."""
    turns: list[Turn] = []
    for life in lives:
        entered_at: float | None = None
        for note in notes[life.name]:
            if _is(note, "enter", protection):
                entered_at = note.at
            elif _is(note, "leave", protection) and entered_at is not None:
                turns.append(Turn(entered_at, note.at, life.name))
                entered_at = None
        if entered_at is not None:
            turns.append(Turn(entered_at, life.killed_at or entered_at, life.name))
    return sorted(turns)


def _overlaps(protection: Protection, turns: Sequence[Turn]) -> Iterable[str]:
    overlaps = [
        (earlier, later)
        for earlier, later in pairwise(turns)
        if later.entered_at < earlier.left_at and later.worker != earlier.worker
    ]
    if overlaps:
        earlier, later = overlaps[0]
        yield (
            f"{protection.value}: two holders at once, {len(overlaps)} times; the first time worker "
            f"{later.worker} came in while worker {earlier.worker} was there"
        )


def _is(note: Note, event: str, protection: Protection) -> bool:
    return note.event == event and note.protection is protection


def _how_it_ended(life: Life) -> str:
    how = "did not end" if life.exit_status is None else f"failed with status {life.exit_status}"
    return f"worker {life.name} {how}" + (f": {life.complaint}" if life.complaint else "")
