"""Stores on servers: transactions that read, decide, and commit if nothing has changed.

An *engine* speaks to one kind of server. It fetches documents as of one instant, and commits a plan if everything
fetched is unchanged; each is a single request. No lock is held in between, so a client that vanishes blocks nobody.

1. Fetch everything named, with the server's time.
2. Decide.
3. Commit under the transaction's id, if everything fetched is unchanged. Commit point: the server's commit.
4. On a conflict, start over, and for a while *take turns*: contenders queue, if the engine has a queue.
5. If the answer to 3 is lost, look up the id, and take it if it is free. If it was taken, the commit happened; if not,
   it never will. The outcome is unknown only if the server cannot be reached; `was_made` resolves it later in this way.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self

from holdfast.errors import (
    Changed,
    Failure,
    NotFound,
    OutcomeUnknown,
    StoreAccessRefused,
    StoreIncompatible,
    StoreUnavailable,
    TooManyRetries,
    UsageFailure,
)
from holdfast.locks.retry import CHANCE
from holdfast.store import archive, model
from holdfast.store.layout import Kind, Layout
from holdfast.store.model import Decide, Document, Family, Key, Record, Result, Stream, View

Named = Key[Any] | Stream[Any]

PATIENCE = 30.0  # how long a transaction is retried after conflicts and lost answers
TIMEOUT = 10.0  # how long a server may take to answer, and how long an unreachable one is retried

_FIRST_PAGE, _LARGEST_PAGE = 64, 4096
_ENOUGH_BYTES = 1 << 20
_LONGEST_PAUSE = 0.05
_TAKE_TURNS_FOR = 1.0
_MOST_CONFLICTS = 1000
_SEAL_EVERY = 128  # commits, on average
_MOST_SEALED_BYTES = 256 << 10
_DROPPED_AT_ONCE = 1000
_RANDOM_BITS = 12  # of the place of a loose record: two in one microsecond rarely collide, and then one is retried
_LEAST_TRIES = 3  # however slow this process is: the deadline alone could end a transaction at its first conflict


ISSUES, CLAIMS = "jit/issues/", "jit/claims/"
TAKEN, IN_PROGRESS, WAITING = 1, 2, 3
STATES = {"backl": WAITING, "in_pr": IN_PROGRESS, **dict.fromkeys(("gated", 'done"', "rejec", "archi"), TAKEN)}
WAITS_FOR_NOTHING = '\n  "dependencies": []'
RANKS = {"crit": 1, "high": 2, "norm": 3, 'low"': 4}
"""How a server finds the queue of issues in their records: by the first characters of the state, without which an issue
is free (as is one that waits for nothing), and of the priority, without which it cannot be understood. Such an issue
comes first, and then the client decides by itself. The order is that of `rules.UrgencyOrder`."""


def field_start(field: str, indent: int = 2) -> str:
    """Where a string begins in the indented JSON of a record. Nothing else looks like that: the strings of JSON have no
    line breaks."""
    return f'\n{" " * indent}"{field}": "'


def as_assigned(assignee: str) -> bytes:
    """An assignee as an issue has it: JSON without quotes."""
    return json.dumps(assignee, ensure_ascii=False)[1:-1].encode()


def queued(name: str, content: bytes | None, state: int = 0) -> tuple[bytes, bytes] | None:
    """The place of an issue in the queue, and its assignee, if it is in this state; or when a claim expires."""
    text = (content or b"").decode("utf-8", "replace")

    def value(field: str, indent: int = 2) -> str:
        start = field_start(field, indent)
        at = text.find(start)
        return "" if at < 0 else text[at + len(start) :].partition("\n")[0].removesuffix(",")

    member = name.partition("/")[2].partition("/")[2]
    if name.startswith(CLAIMS):
        expiry = value("expires_at", 4)
        return (f"{expiry[:-1]}/{member}".encode(), b"") if expiry and not value("held_for", 4) else None
    found = STATES.get(value("state")[:5], 0)
    if found == WAITING and WAITS_FOR_NOTHING in text:
        found = 0
    if content is None or not name.startswith(ISSUES) or found != state:
        return None
    created, updated = value("created_at")[:-1], value("updated_at")[:-1]
    rank = RANKS.get(value("priority")[:4], 0)
    return f"{rank}/{updated or created}/{created}/{member}".encode(), value("assignee")[:-1].encode()


class StoredValue(NamedTuple):
    """The value that a server stores under a name. A document without content does not exist, but its absence may have
    a version. For a stream: the last record and its position, which is 0 if the stream is empty."""

    version: str = ""
    content: bytes | None = None
    position: int = 0


class Fetched(NamedTuple):
    """The values of everything named, as of one instant, and the server's time. Unknown names are missing."""

    found: Mapping[str, StoredValue]
    now: float

    def of(self, name: str) -> StoredValue:
        return self.found.get(name, StoredValue())


class Addition(NamedTuple):
    """A record for a stream, and its position."""

    stream: str
    position: int
    content: bytes


class LooseRecord(NamedTuple):
    """A record that is not sealed into its stream yet. If one commit depends on another, its places are higher."""

    stream: str
    place: int
    content: bytes


class ServedChanges(NamedTuple):
    """The members of a family that changed since a cursor, as of one instant, with the server's time and the cursor of
    that instant. Deleted members have no content."""

    cursor: bytes
    found: Mapping[str, StoredValue]
    now: float


class CommitPlan(NamedTuple):
    """A commit: its id, its dependencies, the documents it puts (None: removes), the records it adds to streams, the
    records it leaves loose, and the loose records it seals."""

    id: str
    fetched: Fetched
    named: Sequence[Named]
    puts: Mapping[str, bytes | None]
    additions: Sequence[Addition]
    loose: Sequence[LooseRecord] = ()
    sealed: Sequence[LooseRecord] = ()

    @property
    def changed(self) -> set[str]:
        return {*self.puts, *(each.stream for each in self.additions), *(each.stream for each in self.loose)}


class AnswerLost(Exception):
    """The server did not answer a commit: it may have committed, or may still do so."""


class IdTaken(Exception):
    """A commit with this id exists or has been ruled out."""


class WaitedTooLong(Exception):
    """A commit waited too long for another client and did nothing; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class TimeLimit(threading.local):
    """The deadline of the work that this thread does for an engine: no attempt may wait beyond it."""

    at = math.inf

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[float]:
        """A block that must end within this time; yields its deadline."""
        before = self.at
        self.at = min(before, time.monotonic() + seconds)
        try:
            yield self.at
        finally:
            self.at = before

    def left(self, most: float) -> float:
        """The time that one attempt may take: at most `most`, and hardly more than remains until the deadline."""
        return max(min(0.05, most), min(most, self.at - time.monotonic()))


class Fate(Enum):
    """The fate of a commit."""

    MADE = "made"
    RULED_OUT = "ruled out"  # earlier
    RULED_OUT_NOW = "ruled out now"  # it was not made, and from now on cannot be


class Attempt(NamedTuple):
    """One attempt: the fetched values, and a function that commits a plan based on them. The function returns False on
    a conflict, and raises `AnswerLost`, `WaitedTooLong`, `IdTaken` or `StoreMoved`."""

    fetched: Fetched
    commit: Callable[[CommitPlan], bool]


class Picked(NamedTuple):
    """An attempt that has fetched an issue, and a function that fetches more for it."""

    issue: str
    attempt: Attempt
    fetch: Callable[[Sequence[Named]], Fetched]


class ServerEngine(Protocol):
    """One kind of server. Every method raises `StoreUnavailable` if the server does not answer in time."""

    address: str  # without secrets
    most_sealed: int  # records in one commit

    @property
    def skew(self) -> float: ...

    @property
    def version(self) -> model.ServerVersion | None: ...

    def fetch(self, named: Sequence[Named]) -> Fetched: ...

    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> AbstractContextManager[Attempt]:
        """Fetch in order to commit; `in_turn` queues behind earlier contenders, if the server has a queue."""

    def pick(self, assignee: str, skew: float) -> AbstractContextManager[Picked | None]:
        """Fetch the most urgent free issue that no other client has picked, and its claim; None if the server cannot
        tell which that is."""

    def fate_of(self, commit_id: str) -> Fate:
        """The fate of a commit. If it was not made, take its id, so that it never can be."""

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        """The next members of a family, in the order of their names."""

    def cursor(self) -> bytes:
        """The cursor of this instant; empty if the server cannot report changes, or nothing was ever committed."""

    def changes(self, family: str, cursor: bytes) -> ServedChanges | None:
        """The changes in a family since a cursor; None if the server cannot tell."""

    def page_of_stream(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """The next records of a stream."""

    def bury(self, stream: str, position: int, tombstone: bytes) -> None:
        """Replace a record by a tombstone, and refuse clients that do not know archived streams."""

    def drop_records(self, stream: str, first: int, last: int) -> None:
        """Delete the records of a stream at these positions."""

    def loose_records(self, stream: str, limit: int) -> list[LooseRecord]:
        """The first loose records of a stream."""

    def set_moved(self, target: str | None) -> None:
        """Make every later commit raise `StoreMoved`, and wait for commits in progress. None undoes this."""

    def moved_to(self) -> str | None:
        """The address that the records were moved to, or None."""

    def watch(self, what: model.Watched) -> model.Watch: ...

    def now(self) -> float: ...

    def exceeded_limit(self, changes: int) -> int | None:
        """The limit that a commit exceeds with so many named documents and streams, and added records."""

    def places(self, plan: CommitPlan) -> int:
        """How many changes of the queue of issues a commit needs."""

    def space(self) -> model.ServerSpace | None:
        """The space that the server has left; None if it has no limit of its own."""

    def close(self) -> None: ...


class ServedStore:
    """Documents and streams on a server, behind an engine."""

    files = None
    trouble = None

    def __init__(self, engine: ServerEngine, *, patience: float = PATIENCE) -> None:
        self.engine = engine
        self.patience = patience
        self._layout = Layout()
        self._deciding = model.Deciding()
        self._conflicts: dict[str, float] = {}
        self.tally = model.Tally()

    @property
    def address(self) -> str:
        return self.engine.address

    @property
    def skew(self) -> float:
        return self.engine.skew

    @property
    def server(self) -> Self:
        return self

    @property
    def version(self) -> model.ServerVersion | None:
        return self.engine.version

    def space(self) -> model.ServerSpace | None:
        try:
            return self.engine.space()
        except StoreAccessRefused:
            return None

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def read(self, key: Key[Record]) -> Document[Record] | None:
        self._check(key)
        return self._document(key, self.engine.fetch([key]).of(key.name))

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        for key in keys:
            self._check(key)
        return self._view(keys, self.engine.fetch(keys))

    read_each = read_together

    def changes(self, family: Family[Record], cursor: bytes = b"") -> model.Changes[Record]:
        self._layout.family(family.name)
        found = self.engine.changes(family.name, cursor) if cursor else None
        is_whole, values = found is None, dict[str, StoredValue]()
        while found is None:
            # Pages are read one after the other. Changes made meanwhile are reported as changes since this cursor.
            start = self.engine.cursor()
            values = dict(self._values(family.name, ""))
            now = None if start else self.engine.now()
            found = self.engine.changes(family.name, start) if now is None else ServedChanges(b"", {}, now)
        values |= found.found
        documents = ((name, self._document(family.key(name), value)) for name, value in sorted(values.items()))
        changed = {name: document for name, document in documents if document is not None}
        removed = frozenset() if is_whole else frozenset(values).difference(changed)
        return model.Changes(found.cursor, changed, removed, is_whole, found.now)

    def _values(self, family: str, after: str) -> Iterator[tuple[str, StoredValue]]:
        return _pages(
            lambda last, limit: self.engine.page(family, last, limit), after, lambda found: len(found.content or b"")
        )

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        self._layout.family(family.name)
        for name, found in self._values(family.name, after):
            document = self._document(family.key(name), found)
            if document is not None:
                yield name, document

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[model.Entry[Record]]:
        self._check(stream)
        if after < 0:
            raise UsageFailure(f"{after} is not a position of {stream.name}", stream=stream.name)
        self.seal(stream)
        end = self.end(stream)
        pages = _pages(
            lambda last, limit: self.engine.page_of_stream(stream.name, last, min(limit, end - last)), after, len
        )
        for position, content in pages:
            if content == archive.TOMBSTONE:
                raise archive.unreadable(self, stream.name, after, position)
            yield model.Entry(position, stream.codec.decode(content, self._where(stream.name, position)))
            after = position
            if position >= end:
                return

    def end(self, stream: Stream[Any]) -> int:
        self._check(stream)
        return self.engine.fetch([stream]).of(stream.name).position

    def unfinished_archives(self) -> dict[str, int]:
        found = {stream: archive.archive_of(self, stream) for stream in archive.ARCHIVES}
        lasts = {stream: each.last for stream, each in found.items() if each is not None}
        return {stream: last for stream, last in lasts.items() if self._first(stream) != (last, archive.TOMBSTONE)}

    def _first(self, stream: str) -> tuple[int, bytes]:
        return next(iter(self.engine.page_of_stream(stream, 0, 1)), (0, b""))

    def drop(self, stream: str, last: int) -> None:
        # From the newest to the oldest, after the tombstone is there: so readers never meet a gap.
        if self._first(stream) == (last, archive.TOMBSTONE):
            return
        self.engine.bury(stream, last, archive.TOMBSTONE)
        first, _ = self._first(stream)
        for each in range(last - 1, first - 1, -_DROPPED_AT_ONCE):
            self.engine.drop_records(stream, max(first, each - _DROPPED_AT_ONCE + 1), each)

    def exceeded_limit(self, changes: int) -> int | None:
        return self.engine.exceeded_limit(changes)

    def set_moved(self, target: str | None) -> None:
        self.engine.set_moved(target)

    def moved_to(self) -> str | None:
        return self.engine.moved_to()

    def watch(self, what: model.Watched) -> model.Watch:
        if isinstance(what, Family):
            self._layout.family(what.name)
        else:
            self._check(what)
        return self.engine.watch(what)

    def now(self) -> float:
        return self.engine.now()

    def transact(
        self, keys: Iterable[Named], decide: Decide[Result], *, commit_id: str | None = None
    ) -> model.Commit[Result]:
        once = dict.fromkeys(keys)
        named = [*model.with_heads(each for each in once if not _is_loose(each)), *filter(_is_loose, once)]
        for each in named:
            self._check(each)
        commit_id = model.checked_commit_id(commit_id)
        self._deciding.refuse_nesting()
        tries = _Tries(commit_id, self.patience)
        while True:
            commit = self._try(named, decide, tries)
            if commit is not None:
                return commit

    def _try(self, named: list[Named], decide: Decide[Result], tries: _Tries) -> model.Commit[Result] | None:
        """One attempt; None after a conflict, or if the commit was ruled out."""
        in_turn = tries.conflicts > 0 or self._had_conflict_lately(named)
        with self.engine.attempt(named, in_turn=in_turn) as attempt:  # 1.
            made, commit, loose = self._decide(attempt, named, decide, tries)
        if made:
            self._seal_now_and_then(named, loose)
            return commit
        self._conflicts |= dict.fromkeys((each.name for each in named if not _is_loose(each)), time.monotonic())
        if len(self._conflicts) > _MOST_CONFLICTS:
            self._conflicts = {}
        tries.pause()  # 4.
        return None

    def _decide(
        self, attempt: Attempt, named: list[Named], decide: Decide[Result], tries: _Tries
    ) -> tuple[bool, model.Commit[Result], int]:
        """Steps 2, 3 and 5; returns whether the commit was made, the commit, and the number of its loose records."""
        view, now = self._view(named, attempt.fetched), attempt.fetched.now
        with self._deciding:
            decision = decide(view, now)  # 2.
        changes = model.with_head_changes(view, decision.changes)
        model.check_changes(set(named), view, changes)
        plan, positions = _plan(tries.id, attempt.fetched, named, view, changes, now)
        self._check_size(plan)
        commit = model.Commit(tries.commit_id, now, positions, decision.result)
        try:
            # With nothing to write, the transaction took place when everything was fetched.
            made = not plan.changed or attempt.commit(plan)  # 3.
        except IdTaken:
            raise UsageFailure(f"the commit id {tries.commit_id} was used before", commit_id=tries.commit_id) from None
        except WaitedTooLong as blocked:
            made = tries.failed(blocked.failure)
        except AnswerLost as lost:
            made = self._resolve(tries, lost)  # 5.
        self.tally.count(made=made)
        return made, commit, len(plan.loose)

    def transact_once(self, work: model.Attempted[Result]) -> model.Commit[Result] | None:
        self._deciding.refuse_nesting()
        tries = _Tries(model.checked_commit_id(None), self.patience)
        with self._pick(work) as picked:
            if picked is None:
                return None
            named, attempt = [*work.named(picked.issue)], picked.attempt
            more = work.more(picked.issue, self._view([*named, *work.hints], attempt.fetched))
            if more is None:
                return None
            if more:
                named += more
                found = {**picked.fetch(more).found, **attempt.fetched.found}
                attempt = Attempt(Fetched(found, attempt.fetched.now), attempt.commit)
            made, commit, loose = self._decide(attempt, named, work.decide, tries)
        if not made:
            raise Changed("another commit came first", issue_id=picked.issue)
        self._seal_now_and_then(named, loose)
        return commit

    @contextlib.contextmanager
    def _pick(self, work: model.Attempted[Any]) -> Iterator[Picked | None]:
        if isinstance(work.issue, model.FirstFree):
            with self.engine.pick(*work.issue) as picked:
                yield picked
            return
        named = work.named(work.issue)
        if self._had_conflict_lately(named):
            yield None
            return
        with self.engine.attempt([*named, *work.hints], in_turn=False) as attempt:
            yield Picked(work.issue, attempt, self.engine.fetch)

    def _check_size(self, plan: CommitPlan) -> None:
        size = len(plan.named) + len(plan.additions) + len(plan.loose)
        size += self.engine.places(plan)
        limit = self.engine.exceeded_limit(size)
        if limit is not None:
            raise UsageFailure(
                f"{self.address} accepts at most {limit} documents and records in one commit; this one has {size}",
                hint="Commit less at once, or start etcd with a larger '--max-txn-ops'.",
                size=size,
                limit=limit,
            )

    def statistics(self) -> model.CommitStatistics:
        """How often this store has committed, and how often it had to retry."""
        return self.tally.read()

    def seal(self, stream: Stream[Any]) -> None:
        tries = _Tries("", self.patience)
        with contextlib.suppress(StoreAccessRefused):
            left: bool | None = stream.chain is not None and bool(self.engine.loose_records(stream.name, 1))
            while left is not False:
                left = self._seal_some(stream)
                if left is None:
                    tries.pause()  # another client is sealing too

    def _seal_now_and_then(self, named: Sequence[Named], count: int) -> None:
        """Seal about as many records as became loose since the last time, after one of several commits. If it fails,
        later commits seal more."""
        if count <= CHANCE.randrange(min(_SEAL_EVERY, self.engine.most_sealed // 2)):
            return
        with contextlib.suppress(Failure):
            streams = [each for each in named if isinstance(each, Stream) and each.chain is not None]
            for each in streams * (1 + count // self.engine.most_sealed):
                self._seal_some(each)

    def _seal_some(self, stream: Stream[Any]) -> bool | None:
        """Seal as many records as fit in one commit; return whether more were loose, or None if another client was
        faster."""
        named = model.with_heads([stream])
        with self.engine.attempt(named, in_turn=False) as attempt:
            # Read after the end of the stream: if one of these is sealed meanwhile, that end has changed.
            found = self.engine.loose_records(stream.name, self.engine.most_sealed)
            loose = _fitting(found)
            view = self._view(named, attempt.fetched, loose=False)
            records = [stream.codec.decode(each.content, self._where(f"{stream.name}~", each.place)) for each in loose]
            assert stream.chain is not None
            changes = model.with_head_changes(view, stream.chain(view, records))
            now = attempt.fetched.now
            plan, _ = _plan(model.checked_commit_id(None), attempt.fetched, named, view, changes, now)
            with contextlib.suppress(AnswerLost, WaitedTooLong):  # the next attempt finds out
                if not loose or attempt.commit(plan._replace(sealed=loose)):
                    return len(loose) < len(found) or len(found) == self.engine.most_sealed
        return None

    def _had_conflict_lately(self, named: Sequence[Named]) -> bool:
        since = time.monotonic() - _TAKE_TURNS_FOR
        return bool(self._conflicts) and any(self._conflicts.get(each.name, 0.0) > since for each in named)

    def _resolve(self, tries: _Tries, lost: AnswerLost) -> bool:
        try:
            made = self.engine.fate_of(tries.id) is Fate.MADE
        except Failure as failure:
            raise OutcomeUnknown(tries.commit_id, f"{lost}; then: {failure.message}") from failure
        if not made:
            tries.ruled_out(StoreUnavailable(self.address, lost))
        return made

    def was_made(self, commit_id: str) -> bool:
        """Whether a commit with an unknown outcome was made; if not, it never will be. Raises `StoreUnavailable` as
        long as the server cannot be reached."""
        number = 0
        while (fate := self.engine.fate_of(_attempt_id(commit_id, number))) is Fate.RULED_OUT:
            number += 1  # another attempt followed
        return fate is Fate.MADE

    def _check(self, what: Named) -> None:
        """Refuse names that the file store has no location for: a key that works here must work there too."""
        kind = self._layout.locate(what.name).kind
        if isinstance(what, Stream) is (kind is Kind.DOCUMENT):
            raise UsageFailure(f"{what.name} is a {kind.value} in the layout", key=what.name)

    def _view(self, named: Sequence[Named], fetched: Fetched, *, loose: bool = True) -> View:
        def tail(stream: Stream[Any]) -> model.Tail:
            _, content, position = fetched.of(stream.name)
            return model.Tail(position, content or b"", self._where(stream.name, position))

        found = View.of(named, lambda key: self._document(key, fetched.of(key.name)), tail)
        return found.with_loose([each for each in named if loose and isinstance(each, Stream) and each.chain])

    def _document(self, key: Key[Record], found: StoredValue) -> Document[Record] | None:
        if found.content is None:
            return None
        return Document(key.codec.decode(found.content, self._where(key.name)), found.version)

    def _where(self, name: str, position: int | None = None) -> str:
        at = "" if position is None else f", at {position},"
        return f"{name}{at} in {self.address}"


class _Tries:
    """The attempts of one transaction: their number, the id of the next one, and their deadline. A ruled-out attempt
    has used up its id; the next attempt adds a unique suffix."""

    def __init__(self, commit_id: str, patience: float) -> None:
        self.commit_id = self.id = commit_id
        self.conflicts = 0
        self._ruled_out = 0
        self._deadline = time.monotonic() + patience
        self._last: Failure = Failure("other commits came first")

    def ruled_out(self, reason: Failure) -> None:
        self._ruled_out += 1
        self.id = _attempt_id(self.commit_id, self._ruled_out)
        self.failed(reason)

    def failed(self, reason: Failure) -> bool:
        """Record why an attempt failed; returns False."""
        self._last = reason
        return False

    def pause(self) -> None:
        """Wait for a random time before the next attempt, so that contenders do not collide again."""
        self.conflicts += 1
        if self.conflicts >= _LEAST_TRIES and time.monotonic() >= self._deadline:
            raise TooManyRetries(self.conflicts, self._last)
        if self.conflicts > 2:
            time.sleep(CHANCE.random() * min(_LONGEST_PAUSE, 0.001 * 2 ** min(self.conflicts, 10)))


def _attempt_id(commit_id: str, ruled_out: int) -> str:
    """The id of the attempt that follows this number of ruled-out ones."""
    return f"{commit_id}~{ruled_out}" if ruled_out else commit_id


def _is_loose(what: Named) -> bool:
    """Whether records appended to `what` stay loose until they are sealed."""
    return isinstance(what, Stream) and what.chain is not None


def _fitting(loose: Sequence[LooseRecord]) -> list[LooseRecord]:
    """The first records that together fit in one commit; at least one."""
    sizes = list(accumulate(len(each.content) for each in loose))
    return [each for each, size in zip(loose, sizes, strict=True) if size <= max(sizes[0], _MOST_SEALED_BYTES)]


def _plan(
    commit_id: str, fetched: Fetched, named: Sequence[Named], view: View, changes: Sequence[model.Change], now: float
) -> tuple[CommitPlan, tuple[int, ...]]:
    """The plan, with every record encoded and every append at its position, and these positions. A record that stays
    loose has the position 0, and does not depend on the end of its stream."""
    puts: dict[str, bytes | None] = {}
    additions: list[Addition] = []
    ends: dict[str, int] = {}
    loose: list[LooseRecord] = []
    named = [each for each in named if not (isinstance(each, Stream) and view.is_loose(each))]
    for change in changes:
        if isinstance(change, model.Append) and view.is_loose(change.stream):
            place = (int(now * 1e6) << _RANDOM_BITS) + CHANCE.randrange(1 << _RANDOM_BITS)
            place = max(place, loose[-1].place + 1 if loose else 0)
            loose.append(LooseRecord(change.stream.name, place, change.stream.codec.encode(change.record)))
        elif isinstance(change, model.Append):
            name = change.stream.name
            ends[name] = ends.get(name, view.end(change.stream)) + 1
            additions.append(Addition(name, ends[name], change.stream.codec.encode(change.record)))
        else:
            name = change.key.name
            puts[name] = None if isinstance(change, model.Delete) else change.key.codec.encode(change.record)
    positions = (*(each.position for each in additions), *(0 for _ in loose))
    return CommitPlan(commit_id, fetched, named, puts, additions, loose), positions


def _pages(
    page: Callable[[Any, int], list[tuple[Any, Any]]], start: Any, size: Callable[[Any], int]
) -> Iterator[tuple[Any, Any]]:
    """Everything after `start`, page by page; pages grow as long as their content is small."""
    last, limit = start, _FIRST_PAGE
    while limit > 0 and (found := page(last, limit)):
        yield from found
        last = found[-1][0]
        total = sum(size(content) for _, content in found)
        limit = min(_LARGEST_PAGE, limit * 4) if total < _ENOUGH_BYTES else max(4, limit // 4)


def require_version(address: str, found: str | None, known: int, *, oldest: int) -> None:
    """Refuse a store whose schema version is missing (`NotFound`) or unknown (`StoreIncompatible`)."""
    if found is None:
        raise NotFound(f"there is no store at {address} yet", store=address)
    if found not in map(str, range(oldest, known + 1)):
        raise StoreIncompatible(
            f"the store {address} has the schema version {found}; this version of Holdfast supports {known}",
            store=address,
            found=found,
            known=known,
        )
