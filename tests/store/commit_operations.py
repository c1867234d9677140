"""Transactions as plain values, and deterministic runs of them: each run leaves the same bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.clock import SYSTEM_CLOCK
from holdfast.locks import ledger_lock
from holdfast.locks.identity import current_holder
from holdfast.store.files import FileStore
from holdfast.store.model import Append, Blind, Change, Create, Decision, Delete, Key, Replace, Stream, View
from tests.store.worlds import INDEX, Listed, Named, Text, World

TIMEOUT = 1.0
"""No other process holds a lock here: a wait this long is a wait for a dead holder."""


# --- Operations --------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A transaction: the keys and streams that it names, and its decision on their content, perhaps a blind one."""

    named: Sequence[Named]
    decide: Callable[[View], Sequence[Change]]
    is_blind: bool = False

    def run(self, store: FileStore, commit_id: str | None = None) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            return Decision(self.decide(view), None)

        blind = Blind(lambda now: decide(View({}), now))
        store.transact(self.named, blind if self.is_blind else decide, commit_id=commit_id)

    def applied_to(self, world: World) -> World:
        return world.changed(self.decide(world.view(self.named)))


def making(*changes: Change, is_blind: bool = False) -> Operation:
    """A transaction that makes exactly these changes."""
    named = [change.stream if isinstance(change, Append) else change.key for change in changes]
    return Operation(list(dict.fromkeys(named)), lambda view: changes, is_blind)


def looking(named: Sequence[Named]) -> Operation:
    """A transaction that changes nothing. It still finishes the intents of dead processes."""
    return Operation(named, lambda view: ())


def touching(named: Iterable[Named]) -> Operation:
    """A transaction that changes everything that it names; each new value depends on the old one."""
    names = list(named)

    def decide(view: View) -> Sequence[Change]:
        return [change for each in names for change in _touched(each, view)]

    return Operation(names, decide)


def restoring(world: World, named: Sequence[Named]) -> Operation:
    """A transaction that restores the documents to their state in this world, byte for byte.

    An intent that reappeared would find the documents as it expects them, and undo this.
    """

    def decide(view: View) -> Sequence[Change]:
        return [change for each in named if isinstance(each, Key) for change in _restored(each, world, view)]

    return Operation(named, decide)


def _restored(key: Key[Any], world: World, view: View) -> Iterator[Change]:
    now, then = view.get(key), world.documents.get(key.name)
    if now == then:
        return
    if then is None:
        yield Delete(key)
    else:
        yield Create(key, then) if now is None else Replace(key, then)


def _touched(each: Named, view: View) -> Iterator[Change]:
    if isinstance(each, Stream):
        last = view.last(each)
        yield Append(each, Text(f"after {last.record.text[-20:] if last else 'nothing'}"))
    elif (record := view.get(each)) is None:
        yield Create(each, Listed(()) if each == INDEX else Text("created"))
    elif isinstance(record, Text):
        yield Replace(each, Text(f"{record.text[-20:]}, touched", record.head))


# --- Directories -------------------------------------------------------------------------------------


class Files(NamedTuple):
    """The content of a directory at one moment, to be copied elsewhere."""

    directories: tuple[str, ...]
    contents: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, directory: Path) -> Files:
        paths = [(str(path.relative_to(directory)), path) for path in sorted(directory.rglob("*"))]
        return cls(
            tuple(name for name, path in paths if path.is_dir()),
            tuple((name, path.read_bytes()) for name, path in paths if path.is_file()),
        )

    def put(self, directory: Path) -> None:
        for name in self.directories:
            os.mkdir(directory / name)
        for name, content in self.contents:
            (directory / name).write_bytes(content)


@contextmanager
def determined(role: str) -> Iterator[None]:
    """Act as a process that does the same, byte for byte, on each run, and is dead afterwards.

    This makes the files that two runs leave comparable. The locks that it leaves are those of a dead process.
    """
    numbers = count(1)

    def numbered_bytes(size: int) -> bytes:
        return hashlib.blake2b(f"{role} {next(numbers)}".encode(), digest_size=size).digest()

    dead = current_holder()._replace(pid=(1 << 31) - 2)
    with (
        _replaced(os, "urandom", numbered_bytes),
        _replaced(SYSTEM_CLOCK, "wall", lambda: 1_700_000_000.0),
        _replaced(ledger_lock, "current_holder", lambda: dead),
    ):
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Like `mock.patch.object`, in a hundredth of the time: a sweep calls this at each of many points."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def run_as(role: str, directory: Path, operation: Operation) -> None:
    """Run the operation on a store that is opened for it alone."""
    with determined(role):
        try:
            _run(directory, operation)
        except Exception as error:
            _drop_tracebacks(error)
            raise


def _run(directory: Path, operation: Operation) -> None:
    with FileStore(directory, timeout=TIMEOUT) as store:
        operation.run(store)


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks: a caller that keeps the error must not keep the store and its open files alive."""
    found: list[BaseException | None] = [error]
    for each in found:
        if each is not None:
            each.__traceback__ = None
            found += [one for one in (each.__cause__, each.__context__) if one not in found]
