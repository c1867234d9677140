"""What the demo is played on: the files that the workers share, and what a worker notes about itself.

A worker notes in a file of its own when it has entered and left the protection of a lock, and which
operations it has acknowledged. Acknowledged means: it would have told its user that it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Self

from holdfast.errors import NotFound
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import make_directories


class Protection(Enum):
    """The three locks, each with the thing that it protects."""

    COUNTER = "file lock"
    JOURNAL = "repository lock"
    LEDGER = "ledger lock"


class Scene(NamedTuple):
    """The directory in which everything happens."""

    directory: Path

    @classmethod
    def prepared(cls, directory: Path) -> Self:
        """Make what has to be there before the first worker."""
        scene = cls(directory)
        for each in (scene.ledger, scene.notes):
            make_directories(each)
        durable.create(scene.counter, strictjson.encode({}))
        return scene

    @property
    def counter(self) -> Path:
        """A number for each worker, changed by reading it, adding one and writing it back."""
        return self.directory / "counter.json"

    @property
    def counter_lock(self) -> Path:
        return self.directory / "counter.lock"

    @property
    def data(self) -> Path:
        """The data directory of the repository lock."""
        return self.directory / "data"

    @property
    def journal(self) -> Path:
        """Lines that are added at the end."""
        return self.directory / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        """Numbered files, one for each event."""
        return self.directory / "ledger"

    @property
    def notes(self) -> Path:
        """What each worker notes about itself."""
        return self.directory / "notes"

    def event(self, number: int) -> Path:
        return self.ledger / f"event-{number:06}.json"

    def event_numbers(self) -> list[int]:
        """The numbers of all events, in order."""
        with calls.scandir(self.ledger) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("event-")]
        return sorted(int(name.removeprefix("event-").removesuffix(".json")) for name in names)


class Note(NamedTuple):
    """A line in a worker's notes: `enter` and `leave`, with the time; `done` and `taken`, with a number."""

    event: str
    protection: Protection
    at: float
    number: int


class Notes:
    """The notes of one worker, open for writing."""

    def __init__(self, scene: Scene, worker: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._fd = calls.open(scene.notes / worker, flags, 0o666)

    def write(self, event: str, protection: Protection, number: int = 0, *, synced: bool = False) -> None:
        """Add a line; `synced`: and bring it to the disk."""
        note = {"event": event, "lock": protection.name, "at": time.monotonic(), "number": number}
        calls.write(self._fd, strictjson.encode(note) + b"\n")
        if synced:
            calls.fsync(self._fd)


def read_notes(scene: Scene, worker: str) -> list[Note]:
    """All notes of a worker; a last line that was cut short by its end is left out."""
    try:
        content = durable.read(scene.notes / worker)
    except NotFound:
        return []
    return [_note(record) for record in _records(content)]


def holds(notes: list[Note]) -> Protection | None:
    """What a worker with these notes holds at this moment."""
    inside: Protection | None = None
    for note in notes:
        if note.event == "enter":
            inside = note.protection
        elif note.event == "leave":
            inside = None
    return inside


def _records(content: bytes) -> Iterator[Mapping[str, object]]:
    for line in content.split(b"\n")[:-1]:
        yield strictjson.decode(line)


def _note(record: Mapping[str, object]) -> Note:
    return Note(
        event=str(record["event"]),
        protection=Protection[str(record["lock"])],
        at=float(str(record["at"])),
        number=int(str(record["number"])),
    )
