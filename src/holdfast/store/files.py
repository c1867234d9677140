"""The default store: plain files that people can read, on one machine, without a server.

Reading takes no lock. A reader looks for intents first and at the file second: a commit that has been
decided but not yet carried out everywhere is seen whole, by everybody, from the moment it is decided.

A transaction locks the guards of all that it names, in the order of the layout; finishes what a
crashed one left behind; reads, decides, and commits:

- one document: a draft, synced, then renamed (or linked, where it must not replace) and the
  directory synced. Commit point: the rename or link.
- one record of a stream: a line appended and synced, or a numbered file linked.
- several: an intent. Commit point: the link of the intent (see `intents`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import Failure, LockTimeout, NotDurable, NotFound, OutcomeUnknown, UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import is_safe_name
from holdfast.locks.file_locker import DEFAULT_TIMEOUT
from holdfast.store.base import (
    Decide,
    Deciding,
    Watched,
    check_changes,
    check_commit_id,
    new_commit_id,
)
from holdfast.store.guards import Guards
from holdfast.store.intents import (
    Intent,
    Intents,
    Step,
    digest,
    open_directory,
    publish_number,
    read_if_there,
)
from holdfast.store.layout import INTENTS, Kind, Layout, Place
from holdfast.store.records import (
    Append,
    Change,
    Commit,
    Delete,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Result,
    Stream,
    Tail,
    View,
)
from holdfast.store.streams import LastNumbers, last_line, lines, numbered_files
from holdfast.store.watching import FileWatch

Named = Key[Any] | Stream[Any]


class _Progress:
    """How far a transaction has come: a failure after its commit point does not mean that it failed."""

    perhaps_made = False


class _Opened:
    """The directories that a transaction works in, each opened once, closed together."""

    def __init__(self, root: Directory) -> None:
        self._root = root
        self._all: dict[str, Directory] = {}

    def get(self, relative: str, *, create: bool = False) -> Directory:
        found = self._all.get(relative)
        if found is None:
            found = self._all[relative] = open_directory(self._root, relative, create=create)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        for directory in self._all.values():
            directory.close()


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
        self._guards = Guards(self._root, timeout, agent_id)
        self._intents = Intents(self._root, self._layout)
        self._numbers = LastNumbers()
        self._deciding = Deciding()
        self._settled: set[str] = set()

    # --- Reading -----------------------------------------------------------------------------------

    def read(self, key: Key[Record]) -> Document[Record] | None:
        place = self._place(key)
        decided, content = self._decided(key.name)
        if not decided:
            content = self._load(place)
        return self._document(key, place, content)

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        places = {key: self._place(key) for key in keys}
        while True:
            with self._guards.locked(places.values(), shared=True):
                unfinished = self._intents.unfinished(key.name for key in keys)
                if not unfinished:
                    return View({key: self._document(key, at, self._load(at)) for key, at in places.items()})
            self._finish(unfinished)

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        decided = self._decided_members(family.name)
        names = self._members(family.name).union(decided)
        for name in sorted(names):
            key = family.key(name)
            place = self._layout.place(key.name)
            content = decided[name] if name in decided else self._load(place)
            document = self._document(key, place, content)
            if document is not None:
                yield name, document

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        place = self._place(stream)
        decided = [(step.at, step.content.encode()) for step in self._decided_steps(stream.name)]
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
        named = list(keys)
        places = {each: self._place(each) for each in named}
        commit_id = new_commit_id() if commit_id is None else check_commit_id(commit_id)
        self._deciding.refuse_nesting()
        while True:
            progress = _Progress()
            try:
                with self._guards.locked(places.values()):  # 1. all guards, in order
                    unfinished = self._intents.unfinished(each.name for each in named)
                    if not unfinished:
                        commit = self._transact_locked(places, decide, commit_id, progress)
            except Failure as failure:
                if progress.perhaps_made:
                    raise OutcomeUnknown(commit_id, failure) from failure
                raise
            if not unfinished:
                return commit
            self._finish(unfinished)  # 2. somebody's commit comes first: it was decided before ours

    def close(self) -> None:
        """Let go of the directory. Nothing is lost by not doing so."""
        try:
            self._guards.close()
        finally:
            self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _transact_locked(
        self, places: dict[Named, Place], decide: Decide[Result], commit_id: str, progress: _Progress
    ) -> Commit[Result]:
        with _Opened(self._root) as opened:
            return self._transact_in(opened, places, decide, commit_id, progress)

    def _transact_in(
        self,
        opened: _Opened,
        places: dict[Named, Place],
        decide: Decide[Result],
        commit_id: str,
        progress: _Progress,
    ) -> Commit[Result]:
        named = {each: at for each, at in places.items() if isinstance(each, Key)}
        contents = {key: self._load(at, opened) for key, at in named.items()}  # 3. read
        tails = {each: self._tail(at) for each, at in places.items() if isinstance(each, Stream)}
        documents = {key: self._document(key, places[key], content) for key, content in contents.items()}
        view = View(documents, tails)
        now = self._clock.wall()
        with self._deciding:
            decision = decide(view, now)  # 4. decide
        check_changes(places, view, decision.changes)
        steps = _steps(decision.changes, contents, view, places)
        if steps:
            self._settle(list(places.values()), [places[each] for each, _ in steps])
        try:
            self._commit(commit_id, _in_order(steps, places), opened)  # 5. commit
        except NotDurable:
            progress.perhaps_made = True
            raise
        progress.perhaps_made = bool(steps)
        positions = [self._position(step, places[each]) for each, step in steps if isinstance(each, Stream)]
        return Commit(commit_id, now, tuple(positions), decision.result)

    def _settle(self, places: list[Place], changed: list[Place]) -> None:
        """Make durable what this commit rests on: a killed writer may have left it seen but not synced.

        That is the way to the directories that it writes into (once), and what it has read: names, and
        the lines of streams. Only a change of the one document or the one stream of lines that was
        named rests on nothing else: what makes it durable makes durable what was there before it.
        """
        written = {place.directory for place in changed} | ({INTENTS} if len(changed) > 1 else set())
        first_time = written - self._settled
        for directory in first_time:
            self._sync_way_to(directory)
        self._settled |= first_time
        if len(places) == len(changed) == 1 and places[0].kind is not Kind.NUMBERED:
            return
        for directory in {place.directory for place in places}:
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

    def _commit(self, commit_id: str, steps: list[Step], opened: _Opened) -> None:
        if len(steps) == 1:
            self._commit_one(steps[0], opened)
        elif steps:
            intent = Intent(commit_id, tuple(steps))
            self._intents.publish(intent)  # commit point
            with contextlib.suppress(Failure, OSError):
                # It is decided: what we cannot carry out now, readers see all the same, and the
                # next one who needs these documents carries out before anything else.
                self._intents.carry_out(intent)

    def _commit_one(self, step: Step, opened: _Opened) -> None:
        place = self._layout.place(step.name)
        content = step.content.encode()
        directory = opened.get(place.directory, create=True)
        if place.kind is Kind.LINES:
            durable.append_in(directory, place.file, content, at=step.at)
        elif place.kind is Kind.NUMBERED:
            draft = durable.write_draft(directory, place.numbered(step.at), content)
            self._numbers.remember(place, publish_number(directory, place, draft, step.at))
            durable.sync_names(directory, place.file)
        elif step.operation == "remove":
            durable.remove_in(directory, place.file)
        elif step.before:
            durable.replace_in(directory, place.file, content)
        else:
            durable.create_in(directory, place.file, content)

    def _finish(self, intents: Sequence[Intent]) -> None:
        """Carry out what others decided, if it still has to be, under the guards that it needs."""
        for intent in intents:
            with self._guards.locked([self._layout.place(step.name) for step in intent.steps]):
                self._intents.finish(intent)

    # --- After a death ------------------------------------------------------------------------------

    def abandoned_commits(self) -> list[Intent]:
        """Commits that are decided but not carried out, and whose authors are gone. Changes nothing.

        An author holds the guards of all that it changes; so who gets them at once and finds the intent
        still there has found one that nobody is at.
        """
        guards = self._guards.without_waiting()
        found: list[Intent] = []
        try:
            for intent in self._intents.left():
                places = [self._layout.place(step.name) for step in intent.steps]
                with contextlib.suppress(LockTimeout), guards.locked(places):
                    if intent in self._intents.left():
                        found.append(intent)
        finally:
            guards.close()
        return found

    def finish_commits(self, intents: Sequence[Intent]) -> None:
        """Carry out what is left of these commits; one that was carried out meanwhile is left alone."""
        self._finish(intents)

    # --- Where things are --------------------------------------------------------------------------

    def _place(self, what: Named) -> Place:
        place = self._layout.place(what.name)
        if isinstance(what, Stream) is (place.kind is Kind.DOCUMENT):
            raise UsageFailure(f"{what.name} is a {place.kind.value} in the layout", key=what.name)
        return place

    def _load(self, place: Place, opened: _Opened | None = None) -> bytes | None:
        try:
            if opened is not None:
                return read_if_there(opened.get(place.directory), place.file)
            with open_directory(self._root, place.directory) as directory:
                return read_if_there(directory, place.file)
        except NotFound:
            return None  # not even its directory is there yet

    def _document(self, key: Key[Record], place: Place, content: bytes | None) -> Document[Record] | None:
        if content is None:
            return None
        return Document(key.codec.decode(content, self._root.where(place.path)), digest(content))

    def _tail(self, place: Place) -> Tail:
        """The last record of a stream; all that was decided has been carried out when this is asked."""
        last = self._numbers.last if place.kind is Kind.NUMBERED else last_line
        try:
            with open_directory(self._root, place.directory) as directory:
                position, content = last(directory, place) or (0, b"")
        except NotFound:
            position, content = 0, b""
        return Tail(position, content, f"{self._root.where(place.path)}, at {position}")

    def _position(self, step: Step, place: Place) -> int:
        """Where the record of a step is now, which is behind where it was to go if a lock was broken."""
        if place.kind is Kind.LINES:
            return _next_append(step, place)
        with open_directory(self._root, place.directory) as directory:
            number, content = step.at, step.content.encode()
            while read_if_there(directory, place.numbered(number)) not in (content, None):
                number += 1
            return number

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
        return [step for each in self._intents.touching((name,)) for step in each.steps if step.name == name]

    def _decided(self, name: str) -> tuple[bool, bytes | None]:
        """Whether a document is about to be changed by a commit that is decided, and what to."""
        for step in self._decided_steps(name):
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


def _steps(
    changes: Sequence[Change],
    contents: dict[Key[Any], bytes | None],
    view: View,
    places: dict[Named, Place],
) -> list[tuple[Named, Step]]:
    """The changes as they will be carried out, every record encoded, every append at its place."""
    next_at: dict[Stream[Any], int] = {}
    steps: list[tuple[Named, Step]] = []
    for change in changes:
        step: Step
        if isinstance(change, Append):
            place = places[change.stream]
            content = change.stream.codec.encode(change.record).decode()
            if place.kind is Kind.LINES and "\n" in content:
                raise UsageFailure(f"a record for {change.stream.name} is coded with a line break")
            first = view.end(change.stream) + (place.kind is Kind.NUMBERED)
            step = Step(change.stream.name, "append", content, at=next_at.get(change.stream, first))
            next_at[change.stream] = _next_append(step, place)
            steps.append((change.stream, step))
            continue
        before = digest(contents[change.key])
        if isinstance(change, Delete):
            step = Step(change.key.name, "remove", before=before)
        else:
            content = (change.key.codec.encode(change.record) + b"\n").decode()
            step = Step(change.key.name, "put", content, before)
        steps.append((change.key, step))
    return steps


def _next_append(step: Step, place: Place) -> int:
    """Where an append behind this one goes."""
    return step.at + (len(step.content.encode()) + 1 if place.kind is Kind.LINES else 1)


def _in_order(steps: list[tuple[Named, Step]], places: dict[Named, Place]) -> list[Step]:
    """The order of applying: what is pointed to before what points to it, and removals the other way.

    Pointers (an index) come early in the order of locks and what they point to later: so documents
    are put in reverse order, appends follow as they came, and removals go in order at the end.
    """

    if len(steps) == 1:
        return [steps[0][1]]

    def rank(each: tuple[Named, Step]) -> tuple[int, str]:
        return places[each[0]].rank

    puts = sorted((each for each in steps if each[1].operation == "put"), key=rank, reverse=True)
    appends = [each for each in steps if each[1].operation == "append"]
    removals = sorted((each for each in steps if each[1].operation == "remove"), key=rank)
    return [step for _, step in (*puts, *appends, *removals)]
