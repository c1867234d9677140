"""The default store: plain files that people can read, on one machine, without a server.

Reading takes no lock. A reader looks for intents first and at the file second: a commit that has been
decided but not yet carried out everywhere is seen whole, by everybody, from the moment it is decided.

A transaction locks the guards of all that it names, in the order of the layout; finishes what a
crashed one left behind; reads, decides, and commits:

- one document: a draft, synced, then renamed (or linked, where it must not replace) and the
  directory synced. Commit point: the rename or link.
- one record of a stream: a line appended and synced, or a draft that gets its number.
- several: an intent. Commit point: the link of the intent (see `intents`, and `batches`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    Failure,
    IoFailure,
    LockTimeout,
    NotDurable,
    NotFound,
    OutcomeUnknown,
    Refused,
    UsageFailure,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import is_safe_name
from holdfast.locks.file_lock import DEFAULT_TIMEOUT, LockStatistics
from holdfast.store.intents import Intent, Intents, Step, digest
from holdfast.store.layout import (
    INTENTS,
    Directories,
    DocumentLocks,
    Kind,
    Layout,
    Location,
    OpenDirectories,
    open_directory,
)
from holdfast.store.model import (
    Commit,
    Decide,
    Deciding,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Result,
    Stream,
    Tail,
    TolerantCodec,
    Unreadable,
    View,
    Watched,
    check_changes,
    check_commit_id,
    new_commit_id,
)
from holdfast.store.streams import (
    Batch,
    LastNumbers,
    Planned,
    in_order,
    is_batch,
    last_line,
    lines,
    numbered_files,
    plan,
)
from holdfast.store.watch import FileWatch

Named = Key[Any] | Stream[Any]


class _Progress:
    """How far a transaction has come: a failure after its commit point does not mean that it failed.

    `overtaken` says that somebody who did not have the lock has taken the number that was to be ours
    (`ledger.lock` was broken wrongly): what was decided rests on an old view, and is decided again.
    """

    perhaps_made = False
    overtaken = False


class UnfinishedCommit(NamedTuple):
    """A commit that somebody did not live to carry out. `obstacle`: why nobody else can, if that is so."""

    intent: Intent
    obstacle: Corrupt | None


class FileStore:
    """Documents and streams below one directory, at the places that the layout gives them."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        clock: Clock = SYSTEM_CLOCK,
        agent_id: str = "holdfast",
    ) -> None:
        self.path = Path(os.path.abspath(root))  # the working directory may be another one later
        make_directories(self.path)
        self._root = Directory.open(self.path)
        self._layout = layout or Layout()
        self._clock = clock
        self._guards = DocumentLocks(self._root, timeout, agent_id)
        self._intents = Intents(self._root, self._layout)
        self._directories = Directories(self._root)
        self._numbers = LastNumbers()
        self._deciding = Deciding()
        self._settled: set[str] = set()

    # --- Reading -----------------------------------------------------------------------------------

    def read(self, key: Key[Record]) -> Document[Record] | None:
        place = self._place(key)
        decided, content = self._decided(key.name)
        if not decided:
            with OpenDirectories(self._directories) as opened:
                content = self._load(place, opened)
        return self._document(key, place, content)

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        places: dict[Named, Location] = {key: self._place(key) for key in keys}
        while True:
            with self._guards.locked(places.values(), shared=True):
                unfinished = self._intents.unfinished(key.name for key in keys)
                if not unfinished:
                    with OpenDirectories(self._directories) as opened:
                        return self._view(places, opened)
            self._finish(unfinished)

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        decided = self._decided_members(family.name)
        names = self._members(family.name).union(decided)
        directory, start, end = self._layout.family(family.name)
        nested = end.startswith("/")  # each member has a directory of its own
        for name in sorted(names):  # there may be thousands: no detour for each of them
            if name in decided:
                content = decided[name]
            else:
                try:
                    with OpenDirectories(self._directories) as opened:
                        if nested:
                            content = self._load(self._layout.place(f"{family.name}/{name}"), opened)
                        else:
                            content = self._load_at(directory, f"{start}{name}{end}", opened)
                except (IoFailure, Refused) as failure:
                    if not isinstance(family.codec, TolerantCodec):
                        raise
                    yield name, Document(cast("Record", Unreadable(failure)), "")
                    continue
            if content is not None:
                where = self._root.where(f"{directory}/{start}{name}{end}")
                yield name, Document(family.codec.decode(content, where), digest(content))

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        place = self._place(stream)

        def decided() -> list[tuple[int, bytes]]:
            return [(step.at, step.content.encode()) for step in self._decided_steps(stream.name)]

        contents = numbered_files if place.kind is Kind.NUMBERED else lines
        with contextlib.ExitStack() as opened:
            try:
                directory = opened.enter_context(open_directory(self._root, place.directory))
            except NotFound:
                directory = None
            for position, content in contents(directory, place, after, decided):
                where = f"{self._root.where(place.path)}, at {position}"
                yield Entry(position, stream.codec.decode(content, where))

    def watch(self, what: Watched) -> FileWatch:
        return FileWatch(self._root, self._layout, self._intents, what)

    def now(self) -> float:
        return self._clock.wall()

    # --- Changing ----------------------------------------------------------------------------------

    def transact(
        self,
        keys: Iterable[Named],
        decide: Decide[Result],
        *,
        commit_id: str | None = None,
    ) -> Commit[Result]:
        places = {each: self._place(each) for each in keys}
        commit_id = new_commit_id() if commit_id is None else check_commit_id(commit_id)
        self._deciding.refuse_nesting()
        while True:
            progress = _Progress()
            try:
                with self._guards.locked(places.values()):  # 1. all guards, in order
                    unfinished = self._intents.unfinished(each.name for each in places)
                    if not unfinished:
                        with OpenDirectories(self._directories) as opened:
                            commit = self._transact_locked(opened, places, decide, commit_id, progress)
            except Failure as failure:
                if progress.perhaps_made:
                    raise OutcomeUnknown(commit_id, failure) from failure
                if progress.overtaken:
                    continue
                raise
            if not unfinished:
                return commit
            self._finish(unfinished)  # 2. somebody's commit comes first: it was decided before ours

    def lock_statistics(self) -> LockStatistics:
        """How often this store has taken locks, waited for them, and how long it has held them."""
        return self._guards.statistics()

    def guard_files(self, directory: str) -> list[str]:
        """The paths of the lock files in a directory of the store and in those right below it."""
        found: list[str] = []
        with contextlib.suppress(NotFound), open_directory(self._root, directory) as top:
            places = [top, *(top.enter(name) for name in top.directories())]
            for place in places:
                found += sorted(place.where(name) for name in place.names() if name.endswith(".lock"))
                if place is not top:
                    place.close()
        return found

    def close(self) -> None:
        """Let go of the directory. Nothing is lost by not doing so."""
        try:
            self._guards.close()
            self._directories.close()
        finally:
            self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _transact_locked(
        self,
        opened: OpenDirectories,
        places: dict[Named, Location],
        decide: Decide[Result],
        commit_id: str,
        progress: _Progress,
    ) -> Commit[Result]:
        view = self._view(places, opened)  # 3. read
        now = self._clock.wall()
        with self._deciding:
            decision = decide(view, now)  # 4. decide
        check_changes(places, view, decision.changes)
        planned = plan(decision.changes, view, places)
        if not planned:
            return Commit(commit_id, now, (), decision.result)
        self._settle(places.values(), [each.place for each in planned])
        try:
            positions = self._commit(commit_id, planned, opened, progress)  # 5. commit
        except NotDurable:
            progress.perhaps_made = True
            raise
        except AlreadyExists:
            progress.overtaken = len(planned) == 1 and planned[0].place.kind is Kind.NUMBERED
            raise
        progress.perhaps_made = True
        return Commit(commit_id, now, positions, decision.result)

    def _view(self, places: dict[Named, Location], opened: OpenDirectories) -> View:
        documents: dict[Key[Any], Document[Any] | None] = {}
        tails: dict[Stream[Any], Tail] = {}
        for each, place in places.items():
            if isinstance(each, Stream):
                tails[each] = self._tail(place, opened)
            else:
                documents[each] = self._document(each, place, self._load(place, opened))
        return View(documents, tails)

    def _settle(self, places: Collection[Location], changed: list[Location]) -> None:
        """Make durable what this commit rests on: a killed writer may have left it seen but not synced.

        That is the way to the directories that it writes into (once), and what it has read: names, and
        the lines of streams. Only a change of the one document or the one stream of lines that was
        named rests on nothing else: what makes it durable makes durable what was there before it. And a
        numbered stream whose last number we have synced ourselves need not be synced again.
        """
        if len(places) == 1 and changed[0].directory in self._settled and len(changed) == 1:
            (place,) = places
            if place.kind is not Kind.NUMBERED or self._numbers.is_durable(place):
                return  # most often
        written = {place.directory for place in changed}
        if len(changed) > 1:
            written.add(INTENTS)
        first_time = written - self._settled
        for directory in first_time:
            self._sync_way_to(directory)
        self._settled |= first_time
        if len(places) == len(changed) == 1 and changed[0].kind is not Kind.NUMBERED:
            return
        for directory in {place.directory for place in places if not self._numbers.is_durable(place)}:
            with contextlib.suppress(NotFound), open_directory(self._root, directory) as opened:
                if directory not in first_time:
                    durable.sync_names(opened)
                for place in places:
                    if place.directory == directory and place.kind is Kind.LINES:
                        durable.sync_in(opened, place.file)

    def _sync_way_to(self, directory: str) -> None:
        parts = directory.split("/") if directory else []
        open_directory(self._root, directory, create=True).close()
        for depth in range(len(parts) + 1):
            with open_directory(self._root, "/".join(parts[:depth])) as above:
                durable.sync_names(above)

    def _commit(
        self, commit_id: str, planned: list[Planned], opened: OpenDirectories, progress: _Progress
    ) -> tuple[int, ...]:
        """Make the changes; where the records of streams are now."""
        if len(planned) == 1:
            return self._commit_one(planned[0], opened)
        if is_batch(planned):
            return self._commit_batch(commit_id, planned, opened, progress)
        intent = Intent(commit_id, tuple(each.as_step() for each in in_order(planned)))
        self._intents.publish(intent)  # commit point
        progress.perhaps_made = True
        numbers: Iterator[int] = iter(())
        with contextlib.suppress(Failure, OSError):
            # It is decided: what we cannot carry out now, readers see all the same, and the
            # next one who needs these documents carries out before anything else.
            numbers = iter(self._intents.carry_out(intent))
        return tuple(self._position(each, numbers) for each in planned if each.operation == "append")

    def _commit_batch(
        self, commit_id: str, planned: list[Planned], opened: OpenDirectories, progress: _Progress
    ) -> tuple[int, ...]:
        place = planned[0].place
        records, intents = opened.get(place.directory, create=True), opened.get(INTENTS, create=True)
        batch = Batch(commit_id, planned, records, intents)
        batch.write()
        batch.decide()  # commit point
        progress.perhaps_made = True
        numbers = [each.at for each in planned]
        with contextlib.suppress(Failure, OSError):
            numbers = batch.carry_out()
            self._numbers.remember_durable(place, numbers[-1])
        return tuple(numbers)

    def _position(self, planned: Planned, numbers: Iterator[int]) -> int:
        """Where an appended record is now; not carried out yet, it will be where it was to go."""
        if planned.place.kind is Kind.LINES:
            return planned.behind()
        number = next(numbers, None)
        if number is None:
            return planned.at
        self._numbers.remember_durable(planned.place, number)
        return number

    def _commit_one(self, planned: Planned, opened: OpenDirectories) -> tuple[int, ...]:
        place, content = planned.place, planned.content
        directory = opened.get(place.directory, create=True)
        if place.kind is Kind.LINES:
            durable.append_in(directory, place.file, content, at=planned.at)
            return (planned.behind(),)
        if place.kind is Kind.NUMBERED:
            name, often = place.numbered(planned.at), self._numbers.are_ours(place)
            draft = durable.write_draft(directory, name, content)
            durable.publish_new(directory, draft, name, often=often)  # as decided, or not at all
            durable.sync_names(directory, name)
            self._numbers.remember_durable(place, planned.at)
            return (planned.at,)
        if planned.operation == "remove":
            durable.remove_in(directory, place.file)
        elif planned.before:
            durable.replace_in(directory, place.file, content)
        else:
            durable.create_in(directory, place.file, content)
        return ()

    def _finish(self, intents: Sequence[Intent]) -> None:
        """Carry out what others decided, if it still has to be, under the guards that it needs."""
        for intent in intents:
            with self._guards.locked([self._layout.place(step.name) for step in intent.steps]):
                self._intents.finish(intent)

    # --- After a death ------------------------------------------------------------------------------

    def abandoned_commits(self) -> list[UnfinishedCommit]:
        """Commits that are decided but not carried out, and whose authors are gone. Changes nothing.

        An author holds the guards of all that it changes; so who gets them at once and finds the intent
        still there has found one that nobody is at.
        """
        guards = self._guards.without_waiting()
        found: list[UnfinishedCommit] = []
        try:
            for intent in self._intents.left():
                places = [self._layout.place(step.name) for step in intent.steps]
                with contextlib.suppress(LockTimeout), guards.locked(places):
                    if intent in self._intents.left():
                        found.append(UnfinishedCommit(intent, self._intents.obstacle(intent)))
        finally:
            guards.close()
        return found

    def finish_commits(self, intents: Sequence[Intent]) -> None:
        """Carry out what is left of these commits; one that was carried out meanwhile is left alone."""
        self._finish(intents)

    # --- Where things are --------------------------------------------------------------------------

    def _place(self, what: Named) -> Location:
        place = self._layout.place(what.name)
        if isinstance(what, Stream) is (place.kind is Kind.DOCUMENT):
            raise UsageFailure(f"{what.name} is a {place.kind.value} in the layout", key=what.name)
        return place

    def _load(self, place: Location, opened: OpenDirectories) -> bytes | None:
        return self._load_at(place.directory, place.file, opened)

    def _load_at(self, directory: str, file: str, opened: OpenDirectories) -> bytes | None:
        try:
            return durable.read_in(opened.get(directory), file)
        except NotFound:
            return None  # perhaps not even its directory is there yet

    def _document(self, key: Key[Record], place: Location, content: bytes | None) -> Document[Record] | None:
        if content is None:
            return None
        return Document(key.codec.decode(content, self._root.where(place.path)), digest(content))

    def _tail(self, place: Location, opened: OpenDirectories) -> Tail:
        """The last record of a stream; all that was decided has been carried out when this is asked."""
        content: bytes | Callable[[], bytes]
        try:
            directory = opened.get(place.directory)
        except NotFound:
            position, content = 0, b""  # perhaps not even its directory is there yet
        else:
            if place.kind is Kind.NUMBERED:
                position = self._numbers.find(directory, place)
                content = partial(durable.read_in, directory, place.numbered(position))
            else:
                position, content = last_line(directory, place) or (0, b"")
        return Tail(position, content, f"{self._root.where(place.path)}, at {position}")

    def _members(self, family: str) -> set[str]:
        directory, start, end = self._layout.family(family)
        nested = end.startswith("/")  # each member is a directory with a file in it
        try:
            with open_directory(self._root, directory) as opened:
                names = opened.directories() if nested else opened.names()
        except NotFound:
            return set()
        suffix = "" if nested else end
        found = (
            name[len(start) : len(name) - len(suffix)]
            for name in names
            if name.startswith(start) and name.endswith(suffix)
        )
        return {name for name in found if is_safe_name(name)}

    def _decided_steps(self, name: str) -> list[Step]:
        return [step for each in self._intents.pending() for step in each.steps if step.name == name]

    def _decided(self, name: str) -> tuple[bool, bytes | None]:
        """Whether a document is about to be changed by a commit that is decided, and what to."""
        for step in self._decided_steps(name):  # at most one
            return True, step.content.encode() if step.operation == "put" else None
        return False, None

    def _decided_members(self, family: str) -> dict[str, bytes | None]:
        prefix = family + "/"
        return {
            step.name.removeprefix(prefix): step.content.encode() if step.operation == "put" else None
            for intent in self._intents.pending()
            for step in intent.steps
            if step.name.startswith(prefix)
        }
