"""The default store: plain files that people can read, on one machine, without a server.

Readers take no lock. They list the intents first and then read the file, so a commit is visible as a whole to all
readers from its commit point on, even before it is applied.

A transaction takes the document locks of everything that it names (but see `_loose`), applies commits that a crash
interrupted, reads, decides and commits:

- one document: write and sync a draft, rename it (or link it, if the document must be new), sync the directory.
  Commit point: the rename or link.
- one record of a stream: append and sync a line, or give a synced draft its number.
- several changes: publish an intent. Commit point: its link (see `intents`; `streams` for batches).
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, cast

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock
from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    Failure,
    IoFailure,
    LockTimeout,
    NotApplied,
    NotDurable,
    NotFound,
    NotWritable,
    OutcomeUnknown,
    Refused,
    StoreMoved,
    TooLarge,
    UsageFailure,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.fs.names import is_safe_name
from holdfast.locks.file_lock import DEFAULT_TIMEOUT, LockStatistics
from holdfast.store import lines, model, stat_cache, streams
from holdfast.store.intents import Intent, Intents, Step, digest, end_before, lines_of, touching
from holdfast.store.layout import (
    INTENTS,
    SHARED,
    Directories,
    DocumentLocks,
    Kind,
    Layout,
    Location,
    OpenDirectories,
    document_locks_until,
    open_directory,
)
from holdfast.store.model import Decide, Document, Family, Key, Record, Result, Stream, View
from holdfast.store.streams import LastNumbers, Planned

Named = Key[Any] | Stream[Any]
_Locations = dict[Named, Location]

# How long a reader waits for the author of lines that are missing, and then for the lock of the stream; in seconds.
_SHORT_PAUSES = (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
_PAUSES = (*_SHORT_PAUSES, 0.064, 0.128, 0.256)
_PATIENCE = 1.0
MOVED_TO = ".holdfast/moved-to"  # the address of the store that has the records now; blocks commits to this one


def _drop_frames(signal: BaseException) -> None:
    """Drop the references that the frames of a traceback hold: a signal may end an `__exit__` before its lock is
    released, and the cleanup that follows needs that lock."""
    import traceback  # slow to load

    traceback.clear_frames(signal.__traceback__)


class _Early(NamedTuple):
    """The decision of a blind transaction, and the draft of its only record, made before it took its lock."""

    now: float
    decision: model.Decision[Any]
    draft: str = ""


class _Attempt:
    """One attempt at a transaction: what it names, the directories that it uses, and its progress.

    `named` is locked; the streams in `loose` only while their lines are written (see `_loose`). `is_loose`: it has
    decided nothing but such lines. `perhaps_made`: it may be past its commit point, so it may take effect despite a
    failure. `overtaken`: a process without the lock (`ledger.lock` was broken by mistake) took its number, so it is
    decided again. `draft`: the early draft of its only record. `numbered`: the records that it has published, with
    stream and numbers. `unsynced`: their names are still to be synced.
    """

    is_loose = False
    perhaps_made = False
    overtaken = False
    draft = ""
    numbered: tuple[Location, list[tuple[int, bytes]]] | None = None
    unsynced = False

    def __init__(self, commit_id: str, named: _Locations, loose: _Locations, opened: OpenDirectories) -> None:
        self.commit_id = commit_id
        self.named = named
        self.loose = loose
        self.opened = opened


def _loose(locations: _Locations) -> _Locations:
    """The named streams whose records stay loose until everything else is applied.

    Every change of a tracker appends to such a stream. Its lock, the last one in lock order, is taken late, so that
    writers of different documents do not wait for each other. A transaction that names nothing else locks it at once.
    In a stream with a head, each entry depends on the one before it, so none is loose.
    """
    found = {each: location for each, location in locations.items() if _may_be_loose(each, location)}
    others = [location.rank for each, location in locations.items() if each not in found]
    return found if others and all(max(others) < location.rank for location in found.values()) else {}


def _places(steps: Sequence[Step]) -> list[tuple[int, bytes]]:
    """The lines of a commit, with the positions that they get unless another program is in the way."""
    return [(each.at + len(line) + 1, line) for each, line in zip(steps, lines_of(steps), strict=True)]


def _may_be_loose(named: Named, location: Location) -> bool:
    return location.kind is Kind.LINES and isinstance(named, Stream) and named.chain is not None and named.head is None


class FileStore:
    """Documents and streams below one directory, located by a layout."""

    skew = SKEW
    trouble = None
    server = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        clock: Clock = SYSTEM_CLOCK,
        agent_id: str = "holdfast",
    ) -> None:
        self.path = resolved(root)
        make_directories(self.path)
        self._root = Directory.open(self.path)
        self._layout = layout or Layout()
        self._clock = clock
        self._locks = DocumentLocks(self._root, timeout, agent_id)
        self._directories = Directories(self._root)
        self._intents = Intents(self._root, self._layout, self._directories, self._locks)
        self._numbers = LastNumbers()
        self._deciding = model.Deciding()
        self._settled: set[str] = set()
        self._keeps_order: bool | None = None
        self.tally = model.Tally(self._locks.statistics)

    @property
    def files(self) -> Self:
        return self

    def close(self) -> None:
        """Close the files that are kept open for speed. A store that is never closed loses no data."""
        try:
            self._locks.close()
            self._directories.close()
        finally:
            self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def read(self, key: Key[Record]) -> Document[Record] | None:
        location = self._locate(key)
        steps = self._intents.pending_steps(key.name)  # at most one
        with OpenDirectories(self._directories) as opened:
            if steps:
                content = self._outcome(*steps[0], opened)
            else:
                content = self._load(location.directory, location.file, opened)
        return self._document(key, location, content)

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        locations: dict[Named, Location] = {key: self._locate(key) for key in keys}
        while True:
            with self._locks.locked(locations.values(), shared=True):
                unfinished = self._intents.unfinished(key.name for key in keys)
                if not unfinished:
                    with OpenDirectories(self._directories) as opened:
                        return self._view(locations, opened, {})
            self._finish(unfinished)

    def read_each(self, keys: Sequence[Key[Any]]) -> View:
        locations: dict[Named, Location] = {key: self._locate(key) for key in keys}
        pending = {step.name: (intent, step) for intent in self._intents.pending() for step in intent.steps}
        with OpenDirectories(self._directories) as opened:

            def document(key: Key[Any]) -> Document[Any] | None:
                location = locations[key]
                if key.name in pending:
                    content = self._outcome(*pending[key.name], opened)
                else:
                    content = self._load(location.directory, location.file, opened)
                return self._document(key, location, content)

            return View({key: document(key) for key in keys})

    def changes(self, family: Family[Record], cursor: bytes = b"") -> model.Changes[Record]:
        now, pending = self._clock.wall(), self._intents.pending_members(family.name)
        directory, start, end = self._layout.family(family.name)
        try:
            with open_directory(self._root, directory) as opened:
                look = stat_cache.look_at(opened, start, end, cursor, pending)
        except NotFound:
            look = stat_cache.empty_look(cursor)
        changed = dict(self._load_members(family, {*look.changed, *pending}, pending))
        removed = look.removed.union(look.changed, pending).difference(changed)
        return model.Changes(look.cursor, changed, removed, look.is_whole, now)

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        pending = self._intents.pending_members(family.name)
        names = self._members(family.name).union(pending)
        yield from self._load_members(family, (each for each in names if each > after), pending)

    def _load_members(
        self, family: Family[Record], names: Iterable[str], pending: Mapping[str, tuple[Intent, Step]]
    ) -> Iterator[tuple[str, Document[Record]]]:
        """The existing members, in the order of their names; `pending` commits count as applied."""
        directory, start, end = self._layout.family(family.name)
        nested = end.startswith("/")  # each member has its own directory
        for name in sorted(names):  # perhaps thousands: keep this short
            try:
                with OpenDirectories(self._directories) as opened:
                    if name in pending:
                        content = self._outcome(*pending[name], opened)
                    elif nested:
                        location = self._layout.locate(f"{family.name}/{name}")
                        content = self._load(location.directory, location.file, opened)
                    else:
                        content = self._load(directory, f"{start}{name}{end}", opened)
            except (IoFailure, Refused, Corrupt) as failure:
                if not isinstance(family.codec, model.TolerantCodec):
                    raise
                yield name, Document(cast("Record", model.Unreadable(failure)), "")
                continue
            if content is not None:
                where = self._root.where(f"{directory}/{start}{name}{end}")
                yield name, Document(family.codec_of(name).decode(content, where), digest(content))

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[model.Entry[Record]]:
        location = self._locate(stream)
        with contextlib.ExitStack() as held:

            def opened() -> Directory | None:
                try:
                    return held.enter_context(open_directory(self._root, location.directory))
                except NotFound:
                    return None

            if location.kind is Kind.NUMBERED:
                hidden = partial(self._hidden_from, location)
                contents = streams.numbered_files(opened(), location, after, self._numbers, hidden)
            else:
                contents = lines.read(opened, location, after, partial(self._await_lines, stream, location))
            for position, content in contents:
                where = self._root.where(location.place_of(position))
                yield model.Entry(position, stream.codec.decode(content, where))

    def _await_lines(self, stream: Stream[Any], location: Location) -> Sequence[tuple[int, bytes]]:
        """Wait until the stream has the lines of all commits until now. Finish those of dead authors; after a while,
        add the lines of a stopped one. Return the lines that cannot be added: this user may not, the disk is full, or
        their author was stopped while it held the lock of the stream. Then no other writer comes first, so they are
        returned with their positions; otherwise with 0."""
        pending = self._lacking(location, self._intents.pending())
        if not pending:
            return ()  # the usual case
        self._finish_if_free(pending)
        is_loose = _may_be_loose(stream, location)
        for pause in _PAUSES if is_loose else _SHORT_PAUSES:
            time.sleep(pause)
            listed = self._intents.pending()
            if not (pending := self._lacking(location, [each for each in pending if each in listed])):
                return ()
        if not is_loose:
            return [each for intent in pending for each in _places(intent.steps_of(location.name))]
        with (
            contextlib.suppress(Failure),
            document_locks_until(time.monotonic() + _PATIENCE),
            self._locks.locked([location]),
        ):
            self._add_lines(location, pending)
            return ()
        return [(0, line) for left in self._lacking(location, pending).values() for line in left]

    def _lacking(self, location: Location, intents: Iterable[Intent]) -> dict[Intent, Sequence[bytes]]:
        """The lines of each intent that the stream lacks; only of those that have some."""
        wanted = {each: steps for each in intents if (steps := each.steps_of(location.name))}
        found: dict[Intent, Sequence[bytes]] = {each: lines_of(steps) for each, steps in wanted.items()}
        with contextlib.suppress(NotFound):
            if wanted:
                with open_directory(self._root, location.directory) as directory:
                    for each, steps in wanted.items():
                        after = lines.search_from(directory, location, end_before(steps))
                        found[each] = lines.find_waiting(directory, location, after, found[each]).lines
        return {each: left for each, left in found.items() if left}

    def _add_lines(self, location: Location, intents: Iterable[Intent]) -> None:
        """Write the lines of these commits that their stream lacks, but nothing else of them: their authors may live.
        The caller holds the lock of the stream."""
        if not (lacking := self._lacking(location, intents)):
            return  # the usual case
        with OpenDirectories(self._directories) as opened:
            directory = opened.get(location.directory, create=True)
            for each in self._intents.surely_pending():
                if each in lacking:
                    steps = each.steps_of(location.name)
                    after = lines.search_from(directory, location, end_before(steps))
                    lines.write_missing(directory, location, after, lines_of(steps))

    def _hidden_from(self, location: Location, directory: Directory) -> int | None:
        """The first number of an unfinished batch. A batch whose author is gone is finished first. Other commits are
        visible from their commit point on, so the reader waits until they are applied, or applies them."""
        if not (found := self._intents.unfinished([location.name])):
            return None  # the usual case
        batches = [each for each in found if all(step.name == location.name for step in each.steps)]
        self._finish(each for each in found if each not in batches)
        with contextlib.suppress(Failure):  # locked by the author or another writer, or not writable for us
            self._finish(batches, wait=False)
        left = (each for each in self._intents.unfinished([location.name]) if each in batches)
        numbers = [streams.first_unfinished(directory, location, each) for each in left]
        return min((each for each in numbers if each is not None), default=None)

    def position_before(self, stream: Stream[Any], end: int | None, count: int) -> int:
        location = self._locate(stream)
        if location.kind is Kind.NUMBERED:
            assert end is not None
            return max(0, end - count)
        try:
            with open_directory(self._root, location.directory) as directory:
                return lines.line_before(directory, location, end, count * lines.USUAL_LENGTH)
        except NotFound:
            return 0

    def watch(self, what: model.Watched) -> model.Watch:
        from holdfast.store.watch import FileWatch  # few commands wait

        return FileWatch(self._root, self._layout, self._intents, what)

    def now(self) -> float:
        return self._clock.wall()

    def transact(
        self, keys: Iterable[Named], decide: Decide[Result], *, commit_id: str | None = None
    ) -> model.Commit[Result]:
        locations = {each: self._locate(each) for each in dict.fromkeys(keys)}
        commit_id = model.checked_commit_id(commit_id)
        self._deciding.refuse_nesting()
        early = self._decide_early(locations, decide) if isinstance(decide, model.Blind) else None
        try:
            return self._transact(locations, decide, commit_id, early)
        except BaseException:
            if early is not None and early.draft:
                self._discard_early(locations, early)
            raise

    def _transact(
        self, locations: _Locations, decide: Decide[Result], commit_id: str, early: _Early | None
    ) -> model.Commit[Result]:
        loose = _loose(locations)
        while True:
            others = [each for each in locations if each not in loose]
            named = {each: self._locate(each) for each in model.with_heads(others)}
            attempt = _Attempt(commit_id, named, loose, OpenDirectories(self._directories))
            commit = self._try(attempt, decide, early)
            if commit is not None:
                return commit
            if attempt.is_loose:
                loose = {}

    def _try(self, attempt: _Attempt, decide: Decide[Result], early: _Early | None) -> model.Commit[Result] | None:
        """One attempt; None if it has to be repeated."""
        try:
            with attempt.opened:
                with self._locks.locked(attempt.named.values()):  # 1. document locks, in order
                    listed = self._intents.all()
                    unfinished = self._unfinished(listed, attempt.named)
                    commit = None if unfinished else self._transact_locked(attempt, decide, early)
                if commit is not None:
                    self._acknowledge(attempt)
                    self._finish_abandoned(listed)
                    return commit
        except Failure as failure:
            if attempt.perhaps_made:
                raise OutcomeUnknown(attempt.commit_id, failure) from failure
            if not attempt.overtaken:
                raise
            self.tally.count(made=False)
            return None
        except BaseException as ended:
            if not isinstance(ended, Exception):
                _drop_frames(ended)
                self._locks.release_interrupted()
                self._deciding.active = False
            raise
        self._finish(unfinished)  # 2. commits of dead processes come first
        return None

    def _unfinished(self, listed: list[Intent], named: _Locations) -> list[Intent]:
        """The commits of dead processes that touch what is named and locked. A stream with loose lines does not show
        whether their authors live: it only gets the lines."""
        shared = {each: location for each, location in named.items() if _may_be_loose(each, location)}
        unfinished = touching(listed, (each.name for each in named if each not in shared))
        if not unfinished:
            for each, location in shared.items():
                self._add_lines(location, touching(listed, [each.name]))
        return unfinished

    def _decide_early(self, locations: dict[Named, Location], decide: model.Blind[Result]) -> _Early:
        """Decide before any lock is taken. If the only change is one record of a numbered stream, also write and sync
        its draft, so that the others do not wait for that."""
        now = self._clock.wall()
        with self._deciding:
            decision = decide.decide_at(now)
        location = next(iter(locations.values()))
        if len(locations) > 1 or len(decision.changes) != 1 or location.kind is not Kind.NUMBERED:
            return _Early(now, decision)
        change = decision.changes[0]
        if not isinstance(change, model.Append) or change.stream not in locations:
            return _Early(now, decision)
        content = change.stream.codec.encode(change.record)
        with contextlib.suppress(NotWritable), OpenDirectories(self._directories) as opened:
            if location.directory not in self._settled:
                self._sync_path_to(location.directory)
                self._settled.add(location.directory)
            drafts = opened.get(streams.drafts_of(location), create=True)
            return _Early(now, decision, streams.write_early(opened.get(location.directory), drafts, content))
        return _Early(now, decision)  # perhaps this user may write to the stream only, or not at all

    def _discard_early(self, locations: dict[Named, Location], early: _Early) -> None:
        with contextlib.suppress(Failure), OpenDirectories(self._directories) as opened:
            drafts = opened.get(streams.drafts_of(next(iter(locations.values()))))
            durable.discard(drafts, early.draft)

    def _acknowledge(self, attempt: _Attempt) -> None:
        """The rest of the work for published records: after the lock is released, so that no other writer waits."""
        if attempt.numbered is not None:
            location, records = attempt.numbered
            directory = attempt.opened.get(location.directory)
            if attempt.unsynced:
                durable.sync_names(directory)
                self._numbers.remember_durable(location, records[-1][0])
            streams.write_receipts(directory, records)

    def _transact_locked(
        self, attempt: _Attempt, decide: Decide[Result], early: _Early | None
    ) -> model.Commit[Result] | None:
        """Steps 3 to 5. None if all records are loose: the locks that are held do not show whether the author of such a
        commit lives, so it needs those of the streams from the beginning."""
        contents: dict[str, bytes] = {}
        view = self._view(attempt.named, attempt.opened, contents)  # 3. read
        view = view.with_loose([each for each in attempt.loose if isinstance(each, Stream)])
        if early is not None:
            now, decision, attempt.draft = early
        else:
            now = self._clock.wall()
            with self._deciding:
                decision = decide(view, now)  # 4. decide
        changes = model.with_head_changes(view, decision.changes)
        model.check_changes(attempt.named.keys() | attempt.loose.keys(), view, changes)
        loose = {each.stream for each in changes if isinstance(each, model.Append) and each.stream in attempt.loose}
        attempt.is_loose = bool(changes) and all(
            isinstance(each, model.Append) and each.stream in loose for each in changes
        )
        if attempt.is_loose:
            return None
        unlocked = {stream: self._end_of_lines(attempt.loose[stream], attempt.opened) for stream in loose}
        planned = streams.plan(changes, view, attempt.named | attempt.loose, contents, unlocked)
        if not planned:
            return model.Commit(attempt.commit_id, now, (), decision.result)
        self._refuse_if_moved(attempt.opened)
        self._settle(attempt.named.values(), [each.location for each in planned])
        try:
            positions = self._commit(attempt, planned)  # 5. commit
        except NotDurable:
            attempt.perhaps_made = True
            raise
        except AlreadyExists:
            attempt.overtaken = len(planned) == 1 and planned[0].location.kind is Kind.NUMBERED
            raise
        attempt.perhaps_made = True
        self.tally.count(made=True)
        return model.Commit(attempt.commit_id, now, positions, decision.result)

    def _end_of_lines(self, location: Location, opened: OpenDirectories) -> lines.End:
        """The end of a stream of lines. Its lock is taken once, because a writer that holds it may undo what it has
        written, and because nothing has happened yet if it cannot be had."""
        with self._locks.locked([location]):
            directory = opened.get(location.directory, create=True)
            at = durable.end_of_lines_in(directory, location.file)[0]
            return lines.End(at, durable.fingerprint_in(directory, location.file, at))

    def _refuse_if_moved(self, opened: OpenDirectories) -> None:
        if self._root.status(MOVED_TO) is None:
            return  # the usual case, in one call
        directory, _, name = MOVED_TO.rpartition("/")
        if (target := self._load(directory, name, opened)) is not None:
            raise StoreMoved(str(self.path), target.decode(errors="replace").strip())

    def set_moved(self, target: str | None) -> None:
        path = self.path / MOVED_TO
        if target is None:
            with contextlib.suppress(NotFound):
                durable.remove(path)
            return
        make_directories(path.parent)
        durable.replace(path, f"{target}\n".encode())
        self._locks.wait_for_holders(self._layout.existing_locks(self._root))  # they may have checked before

    def _view(self, locations: dict[Named, Location], opened: OpenDirectories, contents: dict[str, bytes]) -> View:
        """A view of everything named. Puts the raw content of documents that other programs share into `contents`."""

        def document(key: Key[Any]) -> Document[Any] | None:
            location = locations[key]
            content = self._load(location.directory, location.file, opened)
            if content is not None and key.name.startswith(SHARED):
                contents[key.name] = content
            return self._document(key, location, content)

        return View.of(locations, document, lambda stream: self._tail(locations[stream], opened))

    def _settle(self, locations: Collection[Location], changed: list[Location]) -> None:
        """Make the dependencies of this commit durable: a killed writer may have left them visible but not synced.

        They are the path to each directory that it writes to (once), the names it has read, and the lines of streams.
        A change of the only named document or stream depends on nothing else: the sync of the change covers the content
        before it, also if those are names that another writer of a numbered stream is about to sync.
        """
        if len(locations) == len(changed) == 1 and changed[0].directory in self._settled:
            return  # the usual case
        written = {each.directory for each in changed}
        if len(changed) > 1:
            written.add(INTENTS)
        first_time = written - self._settled
        for directory in first_time:
            self._sync_path_to(directory)
        self._settled |= first_time
        if len(locations) == len(changed) == 1:
            return
        for directory in {each.directory for each in locations if not self._numbers.is_durable(each)}:
            with contextlib.suppress(NotFound), open_directory(self._root, directory) as opened:
                if directory not in first_time:
                    durable.sync_names(opened)
                for each in locations:
                    if each.directory == directory and each.kind is Kind.LINES:
                        durable.sync_in(opened, each.file)

    def _sync_path_to(self, directory: str) -> None:
        parts = directory.split("/") if directory else []
        open_directory(self._root, directory, create=True).close()
        for depth in range(len(parts) + 1):
            with open_directory(self._root, "/".join(parts[:depth])) as above:
                durable.sync_names(above)

    def _commit(self, attempt: _Attempt, planned: list[Planned]) -> tuple[int, ...]:
        """Commit the changes; return the positions of appended records."""
        if len(planned) == 1:
            if planned[0].location.kind is Kind.NUMBERED:
                return self._commit_numbered(attempt, planned[0])
            return self._commit_one(planned[0], attempt.opened)
        if streams.is_batch(planned):
            return self._commit_batch(attempt, planned)
        steps = tuple(each.as_step() for each in streams.in_order(planned))
        mark = durable.new_mark() if any(step.operation == "put" for step in steps) else ""
        intent = Intent(attempt.commit_id, steps, drafts=mark)
        loose = {each.name for each in attempt.loose.values()}
        self._intents.write_drafts(intent, attempt.opened)
        self._intents.publish(intent, attempt.opened)  # commit point
        attempt.perhaps_made = True
        numbers: Iterator[int] = iter(())
        try:
            numbers = iter(self._intents.apply(intent, attempt.opened, loose))
        except (Failure, OSError) as failure:
            # The commit stands. Readers see it through the intent, and the next transaction that needs one of its
            # documents applies it first.
            warnings.warn(NotApplied(attempt.commit_id, failure), stacklevel=2)
        appended = [each for each in planned if each.operation == "append"]
        return tuple(0 if each.location.name in loose else self._position(each, numbers) for each in appended)

    def _position(self, planned: Planned, numbers: Iterator[int]) -> int:
        """The position of an appended record; if it is not applied yet, the intended one."""
        if planned.location.kind is Kind.LINES:
            return planned.next_at()
        number = next(numbers, None)
        if number is None:
            return planned.at
        self._remember(planned.location, number)
        return number

    def _remember(self, location: Location, number: int, *, durable: bool = True) -> None:
        """Remember the last number of a stream, which this process has published and perhaps synced."""
        self._numbers.remember(location, number)
        if durable:
            self._numbers.remember_durable(location, number)
        if (held := self._locks.held_ledger_lock(location)) is not None:
            held.last = number

    def _commit_batch(self, attempt: _Attempt, planned: list[Planned]) -> tuple[int, ...]:
        location, opened = planned[0].location, attempt.opened
        records, intents = opened.get(location.directory, create=True), opened.get(INTENTS, create=True)
        batch = streams.Batch(attempt.commit_id, planned, records, intents)
        batch.write()
        batch.publish_intent()  # commit point
        attempt.perhaps_made = True
        try:
            numbers = batch.apply()
        except (Failure, OSError):  # perhaps another process is finishing it, because our lock was broken by mistake
            numbers = self._intents.apply(batch.intent, opened)
        self._remember(location, numbers[-1])
        streams.prepare_receipts(records)
        attempt.numbered = location, list(zip(numbers, (each.content for each in planned), strict=True))
        return tuple(numbers)

    def _commit_one(self, planned: Planned, opened: OpenDirectories) -> tuple[int, ...]:
        location, content = planned.location, planned.content
        directory = opened.get(location.directory, create=True)
        if location.kind is Kind.LINES:
            durable.append_in(directory, location.file, content, at=planned.at)
            return (planned.next_at(),)
        if planned.operation == "remove":
            durable.remove_in(directory, location.file)
        elif planned.before:
            durable.replace_in(directory, location.file, content)
        else:
            durable.create_in(directory, location.file, content)
        return ()

    def _commit_numbered(self, attempt: _Attempt, planned: Planned) -> tuple[int, ...]:
        location, number = planned.location, planned.at
        name, often = location.numbered(number), self._numbers.are_ours(location)
        directory = attempt.opened.get(location.directory, create=True)
        if attempt.draft:  # if the number is taken, it serves for the next one
            drafts = attempt.opened.get(streams.drafts_of(location))
            durable.publish_new(directory, attempt.draft, name, drafts=drafts, keep_if_taken=True, often=often)
        else:
            draft = durable.write_draft(directory, name, planned.content)
            durable.publish_new(directory, draft, name, often=often)  # under this number or not at all
        attempt.unsynced = self._may_sync_later(location)
        if not attempt.unsynced:
            durable.sync_names(directory, name)
        self._remember(location, number, durable=not attempt.unsynced)
        streams.prepare_receipts(directory)
        attempt.numbered = location, [(number, planned.content)]
        return (number,)

    def _may_sync_later(self, location: Location) -> bool:
        """Whether a new name may be synced after the lock is released, together with those of the writers that wait.
        They build on it before it is durable, so the filesystem must not keep their names and lose this one."""
        held = self._locks.held_ledger_lock(location)
        if held is None or not held.is_contended:
            return False
        from holdfast.fs.mounts import keeps_order  # loaded by the wait

        if self._keeps_order is None:
            self._keeps_order = keeps_order(self.path / location.directory)
        return self._keeps_order

    def _finish_abandoned(self, listed: list[Intent]) -> None:
        """Apply commits of dead processes that nobody has needed so far: other programs see only what is applied."""
        if listed:
            self._finish_if_free(self._intents.abandoned(listed))

    def _finish_if_free(self, intents: Iterable[Intent]) -> None:
        """Apply those of the commits whose documents nobody has locked; not even their authors, which are dead."""
        for each in intents:
            with contextlib.suppress(Failure):  # the next process tries again
                self._finish([each], wait=False)

    def _finish(self, intents: Iterable[Intent], *, wait: bool = True) -> None:
        """Apply unfinished commits of dead processes, under the locks that they need."""
        from holdfast.store.recovery import Recovery  # rarely needed

        locks = self._locks if wait else self._locks.without_waiting()
        try:
            for intent in intents:
                with (
                    locks.locked([self._layout.locate(step.name) for step in intent.steps]),
                    OpenDirectories(self._directories) as opened,
                ):
                    Recovery(self._intents, opened, self._clock.wall()).finish(intent)
        finally:
            if not wait:
                locks.close()

    def _outcome(self, intent: Intent, step: Step, opened: OpenDirectories) -> bytes | None:
        from holdfast.store.recovery import outcome  # rarely needed

        return outcome(self._intents, intent, step, opened)

    def unfinished_commits(self) -> list[model.UnfinishedCommit]:
        # An author holds the locks of everything that it changes. So if these locks are free and the intent
        # still exists, its author is gone.
        locks = self._locks.without_waiting()
        found: list[model.UnfinishedCommit] = []
        try:
            for intent in self._intents.all():
                locations = [self._layout.locate(step.name) for step in intent.steps]
                with contextlib.suppress(LockTimeout), locks.locked(locations):
                    if intent in self._intents.all():
                        documents = tuple(step.name for step in intent.steps)
                        found.append(model.UnfinishedCommit(intent.id, documents, intent.drafts))
        finally:
            locks.close()
        return found

    def finish_commits(self, commits: Iterable[model.UnfinishedCommit]) -> None:
        ids = {each.id for each in commits}
        self._finish([intent for intent in self._intents.all() if intent.id in ids])

    def changes_set_aside(self) -> list[str]:
        return self._intents.set_aside()

    def lock_files(self, directory: str) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(NotFound), open_directory(self._root, directory) as top:
            for each in [top, *(top.enter(name) for name in top.directories())]:
                found += sorted(each.where(name) for name in each.names() if name.endswith(".lock"))
                if each is not top:
                    each.close()
        return found

    def statistics(self) -> model.CommitStatistics:
        """How often this store has committed, had to start over, and waited for document locks."""
        return self.tally.read()

    def lock_statistics(self) -> LockStatistics:
        return self._locks.statistics()

    def _locate(self, what: Named) -> Location:
        location = self._layout.locate(what.name)
        if isinstance(what, Stream) is (location.kind is Kind.DOCUMENT):
            raise UsageFailure(f"{what.name} is a {location.kind.value} in the layout", key=what.name)
        return location

    def _load(self, directory: str, file: str, opened: OpenDirectories) -> bytes | None:
        try:
            return durable.read_in(opened.get(directory), file)
        except NotFound:
            return None  # or even its directory does not exist yet
        except TooLarge as failure:
            raise model.not_understood(self._root.where(f"{directory}/{file}"), failure.message) from None

    def _document(self, key: Key[Record], location: Location, content: bytes | None) -> Document[Record] | None:
        if content is None:
            return None
        return Document(key.codec.decode(content, self._root.where(location.path)), digest(content))

    def _tail(self, location: Location, opened: OpenDirectories) -> model.Tail:
        """The last record of a stream; the caller has applied all pending intents that touch it."""
        content: bytes | Callable[[], bytes]
        try:
            directory = opened.get(location.directory)
        except NotFound:
            position, content = 0, b""
        else:
            if location.kind is Kind.NUMBERED:
                position = self._last_number(location, directory)
                content = partial(durable.read_in, directory, location.numbered(position))
            else:
                position, content = durable.last_line_in(directory, location.file) or (0, b"")
        return model.Tail(position, content, self._root.where(location.place_of(position)))

    def _last_number(self, location: Location, directory: Directory) -> int:
        """The last number of a numbered stream. If it is not the noted one, another program or a killed process may
        have left names that nobody is about to sync."""
        held = self._locks.held_ledger_lock(location)
        noted = None if held is None else held.noted
        number = self._numbers.find_exactly(directory, location, noted)
        if number != noted:
            durable.sync_names(directory)
            self._numbers.remember_durable(location, number)
        if held is not None:
            held.last = number
        return number

    def _members(self, family: str) -> set[str]:
        directory, start, end = self._layout.family(family)
        nested = end.startswith("/")
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
