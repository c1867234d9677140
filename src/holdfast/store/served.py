"""What the stores on servers have in common: transactions that read, decide, and commit if nothing moved.

An *engine* knows one kind of server. It fetches some documents as of one moment, and commits a plan if
all that was fetched still is as it was; both are a single request. Nothing is locked between the two,
so a client that vanishes holds up nobody.

1. Fetch all that is named, with the server's time. 2. Decide. 3. Commit, under the transaction's own id:
   commit point is the server's. 4. Somebody was faster: start over, and from then on *in turn*, which
   makes those who meet on one document line up where the engine has a line.
5. The answer got lost: ask for the id, and take it if nobody has it. Who has the id was committed; who
   has lost it can never be. Only if the server cannot be asked either is the outcome unknown; when it can be
   asked again, `ServedStore.was_made` finds it out in the same way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self

from holdfast.errors import (
    Failure,
    OutcomeUnknown,
    StoreUnavailable,
    TooManyRetries,
    UsageFailure,
)
from holdfast.locks.retry import CHANCE
from holdfast.store.layout import Kind, Layout
from holdfast.store.model import (
    Append,
    Change,
    Commit,
    Decide,
    Deciding,
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
    Watch,
    Watched,
    check_changes,
    check_commit_id,
    new_commit_id,
)

Named = Key[Any] | Stream[Any]

PATIENCE = 30.0
"""How long a transaction is tried again when others are faster, or when its outcome must be found out."""

_FIRST_PAGE, _LARGEST_PAGE = 64, 4096
_ENOUGH_BYTES = 1 << 20
_LONGEST_PAUSE = 0.05
_MOMENT = 1.0
_MOST_REMEMBERED = 1000


class StoredValue(NamedTuple):
    """What a server has under one name. Without content there is no document, but perhaps a version of
    its absence. Of a stream: the last record and its position, 0 if there is none."""

    version: str = ""
    content: bytes | None = None
    position: int = 0


class Fetched(NamedTuple):
    """What was named, as of one moment, and the server's time. Names that it does not know are missing."""

    found: Mapping[str, StoredValue]
    now: float

    def of(self, name: str) -> StoredValue:
        return self.found.get(name, StoredValue())


class Addition(NamedTuple):
    """A record for a stream, and the position that it will have."""

    stream: str
    position: int
    content: bytes


class CommitPlan(NamedTuple):
    """All of a commit: its id, what it rests on, what it puts (None: removes), what it adds."""

    id: str
    fetched: Fetched
    named: Sequence[Named]
    puts: Mapping[str, bytes | None]
    additions: Sequence[Addition]

    @property
    def changed(self) -> set[str]:
        return {*self.puts, *(each.stream for each in self.additions)}


class AnswerLost(Exception):
    """The server was asked to commit and did not answer: it may have done so, or may still do so."""


class IdTaken(Exception):
    """A commit with this id is there already, or has been ruled out."""


class Fate(Enum):
    """What has become of a commit that was asked for by its id."""

    MADE = "made"
    RULED_OUT = "ruled out"
    """It was asked for before, when nobody had made it."""
    RULED_OUT_NOW = "ruled out now"
    """Nobody has made it, and from now on nobody can."""


class Attempt(Protocol):
    """One try: `fetched` is what there is, `commit` makes a plan that rests on it come true."""

    fetched: Fetched

    def commit(self, plan: CommitPlan) -> bool:
        """Commit; False if something that was fetched is not as it was. `AnswerLost` or `IdTaken`."""


class ServerEngine(Protocol):
    """One kind of server. Every method raises `StoreUnavailable` if the server does not answer in time."""

    place: str

    @property
    def skew(self) -> float:
        """How far apart the times are that two clients are told at the same moment."""

    def fetch(self, named: Sequence[Named]) -> Fetched:
        """Everything named, as of one moment."""

    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> AbstractContextManager[Attempt]:
        """Fetch in order to commit; `in_turn` lets those who were there before go first, if it can."""

    def fate_of(self, commit_id: str) -> Fate:
        """What has become of a commit. If it was not made, it never will be: its id is taken."""

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        """The next members of a family, by name in order."""

    def page_of_stream(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """The next records of a stream."""

    def watch(self, what: Watched) -> Watch: ...

    def now(self) -> float: ...

    def close(self) -> None: ...


class ServedStore:
    """Documents and streams on a server, behind an engine."""

    def __init__(
        self, engine: ServerEngine, *, layout: Layout | None = None, patience: float = PATIENCE
    ) -> None:
        self.engine = engine
        self.patience = patience
        self._layout = layout or Layout()
        self._deciding = Deciding()
        self._met: dict[str, float] = {}

    @property
    def place(self) -> str:
        """The address of the store, without secrets."""
        return self.engine.place

    @property
    def skew(self) -> float:
        """How far apart two clients may be that ask for the time at the same moment."""
        return self.engine.skew

    # --- Reading -----------------------------------------------------------------------------------

    def read(self, key: Key[Record]) -> Document[Record] | None:
        self._check(key)
        return self._document(key, self.engine.fetch([key]).of(key.name))

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        for key in keys:
            self._check(key)
        return self._view(keys, self.engine.fetch(keys))

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        self._layout.family(family.name)
        pages = _pages(
            lambda last, limit: self.engine.page(family.name, last, limit),
            "",
            lambda found: len(found.content or b""),
        )
        for name, found in pages:
            document = self._document(family.key(name), found)
            if document is not None:
                yield name, document

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        self._check(stream)
        if after < 0:
            raise UsageFailure(f"{after} is not a position of {stream.name}", stream=stream.name)
        end = self.engine.fetch([stream]).of(stream.name).position
        pages = _pages(
            lambda last, limit: self.engine.page_of_stream(stream.name, last, min(limit, end - last)),
            after,
            len,
        )
        for position, content in pages:
            yield Entry(position, stream.codec.decode(content, self._where(stream.name, position)))
            if position >= end:
                return

    def watch(self, what: Watched) -> Watch:
        if isinstance(what, Family):
            self._layout.family(what.name)
        else:
            self._check(what)
        return self.engine.watch(what)

    def now(self) -> float:
        return self.engine.now()

    # --- Changing ----------------------------------------------------------------------------------

    def transact(
        self,
        keys: Iterable[Named],
        decide: Decide[Result],
        *,
        commit_id: str | None = None,
    ) -> Commit[Result]:
        named = list(dict.fromkeys(keys))
        for each in named:
            self._check(each)
        commit_id = new_commit_id() if commit_id is None else check_commit_id(commit_id)
        self._deciding.refuse_nesting()
        tries = _Tries(commit_id, self.patience)
        while True:
            commit = self._try(named, decide, tries)
            if commit is not None:
                return commit

    def _try(self, named: list[Named], decide: Decide[Result], tries: _Tries) -> Commit[Result] | None:
        """One attempt; None if somebody was faster, or if it is known that it was not made."""
        in_turn = tries.conflicts > 0 or self._met_lately(named)
        with self.engine.attempt(named, in_turn=in_turn) as attempt:  # 1.
            view = self._view(named, attempt.fetched)
            now = attempt.fetched.now
            with self._deciding:
                decision = decide(view, now)  # 2.
            check_changes(set(named), view, decision.changes)
            plan, positions = _plan(tries.id, attempt.fetched, named, view, decision.changes)
            commit = Commit(tries.commit_id, now, positions, decision.result)
            try:
                # Nothing to write: what was fetched was so at one moment, and that is when this happened.
                made = not plan.changed or attempt.commit(plan)  # 3.
            except IdTaken:
                raise UsageFailure(
                    f"the commit id {tries.commit_id} was used before", commit_id=tries.commit_id
                ) from None
            except AnswerLost as lost:
                made = self._resolve(tries, lost)  # 5.
        if made:
            return commit
        self._met = {**self._met, **dict.fromkeys((each.name for each in named), time.monotonic())}
        if len(self._met) > _MOST_REMEMBERED:
            self._met = {}
        tries.pause()  # 4.
        return None

    def _met_lately(self, named: Sequence[Named]) -> bool:
        """Whether others were faster here a moment ago, and will be again if we do not line up at once."""
        since = time.monotonic() - _MOMENT
        return bool(self._met) and any(self._met.get(each.name, 0.0) > since for each in named)

    def was_made(self, commit_id: str) -> bool:
        """Whether a commit of which `OutcomeUnknown` told the id was made; if not, it never will be.

        For who was told so, once the server can be reached again; `StoreUnavailable` as long as it cannot.
        """
        for number in itertools.count():  # each attempt that was ruled out was followed by another
            fate = self.engine.fate_of(attempt_id(commit_id, number))
            if fate is not Fate.RULED_OUT:
                return fate is Fate.MADE
        raise AssertionError("unreachable")

    def _resolve(self, tries: _Tries, lost: AnswerLost) -> bool:
        try:
            made = self.engine.fate_of(tries.id) is Fate.MADE
        except Failure as failure:
            raise OutcomeUnknown(tries.commit_id, f"{lost}; then: {failure.message}") from failure
        if not made:
            tries.ruled_out(StoreUnavailable(self.place, lost))
        return made

    def close(self) -> None:
        """Close the connections. Nothing is lost by not doing so."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    # --- From what the server has to what it means ---------------------------------------------------

    def _check(self, what: Named) -> None:
        """Refuse what the file store has no place for: what works here is to work there too."""
        kind = self._layout.locate(what.name).kind
        if isinstance(what, Stream) is (kind is Kind.DOCUMENT):
            raise UsageFailure(f"{what.name} is a {kind.value} in the layout", key=what.name)

    def _view(self, named: Sequence[Named], fetched: Fetched) -> View:
        documents: dict[Key[Any], Document[Any] | None] = {}
        tails: dict[Stream[Any], Tail] = {}
        for each in named:
            found = fetched.of(each.name)
            if isinstance(each, Stream):
                where = self._where(each.name, found.position)
                tails[each] = Tail(found.position, found.content or b"", where)
            else:
                documents[each] = self._document(each, found)
        return View(documents, tails)

    def _document(self, key: Key[Record], found: StoredValue) -> Document[Record] | None:
        if found.content is None:
            return None
        return Document(key.codec.decode(found.content, self._where(key.name)), found.version)

    def _where(self, name: str, position: int | None = None) -> str:
        return f"{name} in {self.place}" if position is None else f"{name}, at {position}, in {self.place}"


class _Tries:
    """The attempts of one transaction: how many there were, under which id the next is made, and until when.

    An attempt that was ruled out has used up its id; the next one has a mark behind it, which no id has.
    """

    def __init__(self, commit_id: str, patience: float) -> None:
        self.commit_id = self.id = commit_id
        self.conflicts = 0
        self._patience = patience
        self._ruled_out = 0
        self._deadline = time.monotonic() + patience
        self._last: Failure = Failure("others were faster")

    def ruled_out(self, reason: Failure) -> None:
        self._ruled_out += 1
        self.id = attempt_id(self.commit_id, self._ruled_out)
        self._last = reason

    def pause(self) -> None:
        """Before the next attempt: not all at the same moment, and not for ever."""
        self.conflicts += 1
        if time.monotonic() >= self._deadline:
            raise TooManyRetries(self.conflicts, self._last)
        if self.conflicts > 2:
            time.sleep(CHANCE.random() * min(_LONGEST_PAUSE, 0.001 * 2 ** min(self.conflicts, 10)))


def attempt_id(commit_id: str, number: int) -> str:
    """The id of an attempt, after so many that were ruled out."""
    return f"{commit_id}~{number}" if number else commit_id


def _plan(
    commit_id: str, fetched: Fetched, named: Sequence[Named], view: View, changes: Sequence[Change]
) -> tuple[CommitPlan, tuple[int, ...]]:
    """The changes with every record encoded and every append at its place; and these places."""
    puts: dict[str, bytes | None] = {}
    additions: list[Addition] = []
    ends: dict[str, int] = {}
    for change in changes:
        if isinstance(change, Append):
            name = change.stream.name
            ends[name] = ends.get(name, view.end(change.stream)) + 1
            additions.append(Addition(name, ends[name], change.stream.codec.encode(change.record)))
        else:
            name = change.key.name
            puts[name] = None if isinstance(change, Delete) else change.key.codec.encode(change.record)
    positions = tuple(each.position for each in additions)
    return CommitPlan(commit_id, fetched, named, puts, additions), positions


def _pages(
    page: Callable[[Any, int], list[tuple[Any, Any]]], start: Any, size: Callable[[Any], int]
) -> Iterator[tuple[Any, Any]]:
    """All there is behind `start`, page by page; the pages grow as long as their content is small."""
    last, limit = start, _FIRST_PAGE
    while limit > 0 and (found := page(last, limit)):
        yield from found
        last = found[-1][0]
        total = sum(size(content) for _, content in found)
        limit = min(_LARGEST_PAGE, limit * 4) if total < _ENOUGH_BYTES else max(4, limit // 4)
