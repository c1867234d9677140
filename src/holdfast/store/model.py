"""The nouns of a store (keys, documents, streams, changes) and the `Store` protocol.

A store keeps *documents*, which transactions create, replace and delete, and *streams*, which they append to.
A transaction names its keys and streams, decides by a pure function, and takes effect as a whole or not
at all, as if transactions ran one after the other. `holdfast.testing` checks these promises.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from holdfast.clock import INSTANT
from holdfast.errors import (
    AlreadyExists,
    Archived,
    Corrupt,
    Failure,
    JsonInvalid,
    NameInvalid,
    NotFound,
    TooLarge,
    UsageFailure,
)
from holdfast.fs import strictjson
from holdfast.fs.names import MAX_NAME, SAFE_NAME, SAFE_PATH, is_safe_name, safe_name, split_relative

if TYPE_CHECKING:
    from holdfast.locks.file_lock import LockStatistics

MOST_BYTES = 4 << 20  # the size limit of an encoded record

# Types of fields that become paths or times. Everything in a file may be forged, so decoding refuses a record with
# a name that leads elsewhere or an invalid time.
SafeName = Annotated[str, msgspec.Meta(pattern=SAFE_NAME, max_length=MAX_NAME)]
SafePath = Annotated[str, msgspec.Meta(pattern=SAFE_PATH, max_length=65_536)]
Instant = Annotated[str, msgspec.Meta(pattern=INSTANT, max_length=64)]
_PATTERN_PROBLEM = r"(?s)Expected `str` matching regex .* - at"

Record = TypeVar("Record")
Result = TypeVar("Result")
Encoded = TypeVar("Encoded")


class Codec(Protocol[Encoded]):
    """Encodes records as bytes and decodes them; raises `Corrupt` for bytes that are not a valid record."""

    def encode(self, record: Encoded) -> bytes: ...
    def decode(self, content: bytes, source: str) -> Encoded: ...


_JSON = msgspec.json.Encoder().encode
_MESSAGE_PACK = msgspec.msgpack.Encoder().encode
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # the first bytes of a NaN or an infinity in MessagePack


class StructCodec(Generic[Record]):
    """Records of one `msgspec` type as strict JSON; `source` names the origin in errors.

    Encoding and decoding try a fast path first, at a tenth of the cost. It accepts only content that is certainly
    valid; everything else takes the strict path, which reports the problem.
    """

    def __init__(
        self, kind: type[Record], *, pretty: bool = True, limit: int = MOST_BYTES, bounded: bool = False
    ) -> None:
        """`bounded` states that values of the type cannot be nested too deeply."""
        self._kind = kind
        self._pretty = pretty
        self._limit = limit
        self._bounded = bounded

    def encode(self, record: Record) -> bytes:
        """JSON in UTF-8 without a final newline, indented if `pretty`. Refuses a record that would not decode to itself
        (a NaN, a field of the wrong type)."""
        content = self._encode_fast(record) or self._encode_strictly(record)
        if len(content) > self._limit:
            raise TooLarge(self._what, len(content), self._limit)
        return content

    def decode(self, content: bytes, source: str) -> Record:
        """The record; `Corrupt` unless the content is strict JSON of exactly the right types."""
        text = content.removesuffix(b"\n")
        try:
            record = msgspec.json.decode(text, type=self._kind)
            # Text that encodes back to itself has no duplicate keys, nor anything else that `msgspec` ignores.
            certain = len(text) <= self._limit and self._is_shallow(text) and self._render(record) == text
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            certain = False
        return record if certain else self._decode_strictly(text, source)

    def _encode_fast(self, record: Record) -> bytes | None:
        try:
            content = self._render(record)
            msgspec.json.decode(content, type=self._kind)  # every field has its type
            if self._is_shallow(content) and is_finite(record, content):
                return content
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            pass
        return None

    def _encode_strictly(self, record: Record) -> bytes:
        try:
            value = msgspec.to_builtins(record, str_keys=True)
            msgspec.convert(value, self._kind, str_keys=True)
            content = strictjson.encode(value, what=self._what, limit=self._limit, string_keys=True)
        except (JsonInvalid, msgspec.ValidationError, TypeError) as error:
            raise UsageFailure(f"{self._what} cannot be stored: {error}", problem=str(error)) from None
        return msgspec.json.format(content, indent=2) if self._pretty else content

    def _decode_strictly(self, text: bytes, source: str) -> Record:
        try:
            value = strictjson.decode(text, source=source, limit=self._limit)
            return msgspec.convert(value, self._kind, str_keys=True)
        except (JsonInvalid, TooLarge, msgspec.ValidationError) as error:
            problem = re.sub(_PATTERN_PROBLEM, "Not a safe name or a valid time - at", str(error))
            raise not_understood(source, problem) from None

    def _render(self, record: Record) -> bytes:
        content = _JSON(record)
        return msgspec.json.format(content, indent=2) if self._pretty else content

    def _is_shallow(self, text: bytes) -> bool:
        """Whether a text certainly stays within the depth limit, because it has few lists and objects."""
        return self._bounded or text.count(b"[") + text.count(b"{") <= strictjson.MAX_DEPTH

    @property
    def _what(self) -> str:
        return f"a record of the type {self._kind.__name__}"


def is_finite(value: object, content: bytes) -> bool:
    """Whether a value, encoded as `content`, has neither NaN nor an infinity. `msgspec` writes both as null in JSON;
    MessagePack keeps them distinct."""
    return not (b"null" in content and _NOT_FINITE.search(_MESSAGE_PACK(value)))


def not_understood(source: str, problem: str) -> Corrupt:
    return Corrupt(f"{source} cannot be understood: {problem}", source=source, problem=problem)


class Unreadable(NamedTuple):
    """The placeholder for a record that cannot be read or decoded."""

    failure: Failure


class TolerantCodec(Generic[Record]):
    """Decodes like another codec, but returns `Unreadable` instead of raising `Corrupt`. Cannot encode."""

    def __init__(self, codec: Codec[Record]) -> None:
        self.codec = codec

    def encode(self, record: Record | Unreadable) -> bytes:
        raise UsageFailure("a record that may be unreadable cannot be stored")

    def decode(self, content: bytes, source: str) -> Record | Unreadable:
        try:
            return self.codec.decode(content, source)
        except Corrupt as failure:
            return Unreadable(failure)


class MemberCodec(Generic[Record]):
    """Decodes like another codec; a record that carries the id of another member is `Corrupt`."""

    __slots__ = ("_codec", "_id_field", "_member")

    def __init__(self, codec: Codec[Record], id_field: str, member: str) -> None:
        self._codec = codec
        self._id_field = id_field
        self._member = member

    def encode(self, record: Record) -> bytes:
        return self._codec.encode(record)

    def decode(self, content: bytes, source: str) -> Record:
        record = self._codec.decode(content, source)
        if (found := getattr(record, self._id_field)) != self._member:
            raise not_understood(source, f"its {self._id_field} is {ascii(found)[:160]}, not {self._member}")
        return record


@functools.lru_cache(maxsize=4096)
def _is_key_name(name: str) -> bool:
    return all(map(is_safe_name, name.split("/")))


class _Named(Generic[Record]):
    """A name and the codec of the records under it. Instances with equal names are equal, whatever their codecs."""

    __slots__ = ("codec", "name")

    def __init__(self, name: str, codec: Codec[Record]) -> None:
        split_relative(name)
        self.name = name
        self.codec = codec

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Key(_Named[Record]):
    """The name of a document, such as `jit/issues/4f1c`, and the codec of its record."""

    __slots__ = ()

    def __init__(self, name: str, codec: Codec[Record]) -> None:
        if not _is_key_name(name):
            raise NameInvalid(f"{name!a} is not a valid document name", what="key", name=ascii(name))
        self.name = name
        self.codec = codec


class Family(_Named[Record]):
    """All documents of one kind, such as `jit/issues`. If `id_field` is given, that field of each record repeats the
    member's name, so a record that was moved or forged cannot be read under another name."""

    __slots__ = ("id_field",)

    def __init__(self, name: str, codec: Codec[Record], *, id_field: str = "") -> None:
        super().__init__(name, codec)
        self.id_field = id_field

    def key(self, member: str) -> Key[Record]:
        """The key of a member; unsafe names are refused."""
        name = safe_name(member, what="key")
        return Key(f"{self.name}/{name}", self.codec_of(name))

    def codec_of(self, member: str) -> Codec[Record]:
        """The codec of one member's record."""
        if not self.id_field:
            return self.codec
        if isinstance(self.codec, TolerantCodec):
            return TolerantCodec(MemberCodec(self.codec.codec, self.id_field, member))
        return MemberCodec(self.codec, self.id_field, member)

    def tolerant(self) -> Family[Record | Unreadable]:
        """The same documents; scanning them yields `Unreadable` for damaged ones instead of raising."""
        return Family(self.name, TolerantCodec(self.codec), id_field=self.id_field)


class Stream(_Named[Record]):
    """The name of an append-only sequence of records, such as `jit/events`. If it has a `head`, every commit that
    appends to it also copies the last record to that document, so that a loss at the end of the stream is noticed.

    A store may keep a record *loose* first and seal it into the stream later, so that commits with nothing else in
    common do not wait for each other. `chain` turns loose records into entries; without it, no record is loose. In
    files, loose records are recognised by their content, so no two of them may be equal."""

    __slots__ = ("chain", "head")

    def __init__(
        self,
        name: str,
        codec: Codec[Record],
        *,
        head: Key[Record] | None = None,
        chain: Callable[[View, Sequence[Record]], list[Append]] | None = None,
    ) -> None:
        super().__init__(name, codec)
        self.head = head
        self.chain = chain


class Document(NamedTuple, Generic[Record]):
    """A record and its version, an opaque string that differs whenever the record does."""

    record: Record
    version: str


class Entry(NamedTuple, Generic[Record]):
    """A record of a stream and its position. Positions increase; they mean nothing else."""

    position: int
    record: Record


class Changes(NamedTuple, Generic[Record]):
    """The changes in a family since a cursor: the members that were created or replaced, as they are now, and the
    names of those that were deleted. If `is_whole`, the store cannot tell: `changed` has every member that exists.

    `cursor` is an opaque value with which the next call continues. Losing it loses no changes, but then the next call
    returns every member. `at` is the store's time.
    """

    cursor: bytes
    changed: Mapping[str, Document[Record]]
    removed: frozenset[str]
    is_whole: bool
    at: float


class Tail(NamedTuple):
    """The last record of a stream, still encoded and perhaps not read yet: appending needs neither."""

    position: int
    content: bytes | Callable[[], bytes]
    source: str


class Create(NamedTuple):
    """Create a document that does not exist."""

    key: Key[Any]
    record: object


class Replace(NamedTuple):
    """Replace the record of an existing document."""

    key: Key[Any]
    record: object


class Delete(NamedTuple):
    """Delete an existing document."""

    key: Key[Any]


class Append(NamedTuple):
    """Append a record to a stream."""

    stream: Stream[Any]
    record: object


Change = Create | Replace | Delete | Append


class View:
    """The documents and stream ends that a transaction named, as it read them."""

    __slots__ = ("_documents", "_loose", "_tails")

    def __init__(
        self,
        documents: Mapping[Key[Any], Document[Any] | None],
        tails: Mapping[Stream[Any], Tail] | None = None,
        loose: Collection[Stream[Any]] = (),
    ) -> None:
        self._documents = documents
        self._tails = tails or {}
        self._loose = loose

    @classmethod
    def of(
        cls,
        named: Iterable[Key[Any] | Stream[Any]],
        document: Callable[[Key[Any]], Document[Any] | None],
        tail: Callable[[Stream[Any]], Tail],
    ) -> View:
        """A view of everything named, read with these functions."""
        documents: dict[Key[Any], Document[Any] | None] = {}
        tails: dict[Stream[Any], Tail] = {}
        for each in named:
            if isinstance(each, Stream):
                tails[each] = tail(each)
            else:
                documents[each] = document(each)
        return cls(documents, tails)

    def with_loose(self, streams: Collection[Stream[Any]]) -> View:
        """The same view, except that records appended to these streams stay loose."""
        return View(self._documents, self._tails, streams)

    def get(self, key: Key[Record]) -> Record | None:
        """The record of a document, or None if it does not exist."""
        document = self.document(key)
        return None if document is None else document.record

    def document(self, key: Key[Record]) -> Document[Record] | None:
        """The record with its version, or None if the document does not exist."""
        try:
            return self._documents[key]
        except KeyError:
            raise _not_named(key) from None

    def last(self, stream: Stream[Record]) -> Entry[Record] | None:
        """The last entry of a stream, or None if it is empty."""
        if not self.end(stream):
            return None
        tail = self._tails[stream]
        content = tail.content if isinstance(tail.content, bytes) else tail.content()
        return Entry(tail.position, stream.codec.decode(content, tail.source))

    def is_loose(self, stream: Stream[Any]) -> bool:
        """Whether records appended to a stream stay loose until they are sealed."""
        return stream in self._loose

    def end(self, stream: Stream[Any]) -> int:
        """The position of the last entry of a stream, 0 if it is empty."""
        try:
            return self._tails[stream].position
        except KeyError:
            raise _not_named(stream) from None


def _not_named(what: Key[Any] | Stream[Any]) -> UsageFailure:
    return UsageFailure(f"the decide function reads {what.name}, which was not named", key=what.name)


class Decision(NamedTuple, Generic[Result]):
    """The return value of a decide function: the changes to commit and a result for the caller."""

    changes: Sequence[Change]
    result: Result


class Commit(NamedTuple, Generic[Result]):
    """A committed transaction: its id, the store's time, the positions of its appends, its result. A loose record has
    the position 0 as long as it is not known."""

    id: str
    at: float
    positions: tuple[int, ...]
    result: Result


Decide = Callable[[View, float], Decision[Result]]


class Blind(Generic[Result]):
    """A decide function that reads nothing but the time. A store may call it, and prepare the changes, before it takes
    a lock; the time is then that of the preparation, and not that of the commit."""

    __slots__ = ("decide_at",)

    def __init__(self, decide_at: Callable[[float], Decision[Result]]) -> None:
        self.decide_at = decide_at

    def __call__(self, view: View, now: float) -> Decision[Result]:
        return self.decide_at(now)


Watched = Key[Any] | Family[Any] | Stream[Any]


class Watch(ABC):
    """Reports changes made after the watch was created. A context manager."""

    def wait(self, timeout: float | None = None) -> frozenset[str]:
        """Wait for a change; return the names of documents and streams that changed since the last call, or an empty
        set after the timeout. Changes in quick succession may be reported as one; no change is missed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            changed = self._next(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if changed or (deadline is not None and time.monotonic() >= deadline):
                return frozenset(changed)

    @abstractmethod
    def _next(self, left: float | None) -> Collection[str]:
        """The next changes; empty if there are none in the time left. `wait` calls this again if time remains."""

    def close(self) -> None:  # noqa: B027  # some watches have nothing to close
        """Stop watching."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class UnfinishedCommit(NamedTuple):
    """A commit whose process died before applying it. `drafts` is the suffix of its drafts, which it still needs."""

    id: str
    documents: tuple[str, ...]
    drafts: str


class StoreFiles(Protocol):
    """The part of the interface that only a store in plain files has: directory, document locks, unfinished commits."""

    path: Path

    def lock_files(self, directory: str) -> list[str]:
        """The paths of the document locks in a directory of the store and in those right below it."""

    def unfinished_commits(self) -> list[UnfinishedCommit]:
        """Commits past their commit point whose authors died before applying them. Changes nothing."""

    def finish_commits(self, commits: Iterable[UnfinishedCommit]) -> None:
        """Apply these commits; skip any that were applied meanwhile."""

    def position_before(self, stream: Stream[Any], end: int | None, count: int) -> int:
        """A position with about `count` records between it and `end`, which only a stream of lines may omit."""

    def changes_set_aside(self) -> list[str]:
        """The paths of the records of changes that were not applied because another program's change won."""


class ServerVersion(NamedTuple):
    """The server program of a store and its version; `risk` describes a known defect of this version."""

    program: str
    version: str  # "" if it is not known
    risk: str = ""

    def __str__(self) -> str:
        return f"{self.program} {self.version or 'of unknown version'}"


class CommitStatistics(NamedTuple):
    """Counters of a store since it was opened: successful transactions, attempts that conflicted with another, waits
    for document locks, and the seconds that these took."""

    commits: int = 0
    conflicts: int = 0
    waits: int = 0
    seconds_waited: float = 0.0

    def plus(self, other: CommitStatistics, sign: int = 1) -> CommitStatistics:
        commits, conflicts = self.commits + sign * other.commits, self.conflicts + sign * other.conflicts
        waits, seconds = self.waits + sign * other.waits, self.seconds_waited + sign * other.seconds_waited
        return CommitStatistics(commits, conflicts, waits, seconds)


class Tally:
    """The counts of one store, with those of its document locks, if it has any."""

    def __init__(self, locks: Callable[[], LockStatistics] | None = None) -> None:
        self._locks = locks
        self._counts, self._saved = CommitStatistics(), CommitStatistics()
        self._counting = threading.Lock()

    def count(self, *, made: bool) -> None:
        """Count an attempt to commit."""
        with self._counting:
            self._counts = self._counts.plus(CommitStatistics(commits=made, conflicts=not made))

    def read(self) -> CommitStatistics:
        if self._locks is None:
            return self._counts
        found = self._locks()
        return self._counts._replace(waits=found.contended, seconds_waited=found.seconds_waited)

    def new(self) -> CommitStatistics:
        """The counts since the last call."""
        before, self._saved = self._saved, self.read()
        return self._saved.plus(before, -1)


class ServerSpace(NamedTuple):
    """The space that a server uses and its own limit, in bytes, and the alarms that it has raised. `in_use` is the part
    that is not free for new records. All revisions after the `compacted` one are kept."""

    size: int
    limit: int  # 0 if it is not known
    alarms: tuple[str, ...] = ()
    in_use: int = 0
    revision: int = 0
    compacted: int = 0  # 0 if it is not known, or nothing was ever compacted


class FirstFree(NamedTuple):
    """The most urgent issue that is free: ready by its own record, and assigned to nobody or to `assignee`. One whose
    claim expired more than `skew` seconds ago counts, too."""

    assignee: str
    skew: float


class Attempted(NamedTuple, Generic[Result]):
    """A transaction on one issue that is attempted once. It names `named`, and what `more` returns, which sees a view
    of `named` and of `hints`; None gives up. The commit does not depend on the hints."""

    issue: str | FirstFree
    named: Callable[[str], Sequence[Key[Any] | Stream[Any]]]
    hints: Sequence[Key[Any]]
    more: Callable[[str, View], Sequence[Key[Any]] | None]
    decide: Decide[Result]


class StoreServer(Protocol):
    """The part of the interface that only a store on a server has: its address, version, space and loose records."""

    @property
    def address(self) -> str:
        """The address of the store, without secrets."""

    @property
    def version(self) -> ServerVersion | None:
        """The server's version, once it has answered."""

    def space(self) -> ServerSpace | None:
        """The space that the server has left; None if it has no limit of its own, or this user may not know."""

    def moved_to(self) -> str | None:
        """The address that the records were moved to, or None if they are here."""

    def exceeded_limit(self, changes: int) -> int | None:
        """The limit of one transaction that names this many documents, each appended record counted as another; None if
        the server accepts it."""

    def transact_once(self, work: Attempted[Result]) -> Commit[Result] | None:
        """Attempt a transaction. None if the server cannot tell which issue is the first free one; `Changed` after a
        conflict. Concurrent calls for the first free issue get different ones, if the server can hide one from others
        for a moment."""

    def seal(self, stream: Stream[Any]) -> None:
        """Give the loose records of all commits until now their positions, in the order of these commits. For a user
        without write access they stay loose and are not visible."""

    def end(self, stream: Stream[Any]) -> int:
        """The position of the last record, which is also the number of records."""

    def unfinished_archives(self) -> dict[str, int]:
        """The streams that still have archived records, and the position of the last archived one."""

    def drop(self, stream: str, last: int) -> None:
        """Delete the archived records of a stream up to `last`, which is not its last record."""


class Store(Protocol):
    """The interface of every store: documents and streams, read directly and changed by transactions."""

    @property
    def files(self) -> StoreFiles | None:
        """The file operations of a store in plain files; None for other stores."""

    @property
    def skew(self) -> float:
        """How far the clocks of two clients may differ, in seconds."""

    @property
    def trouble(self) -> Failure | None:
        """The known reason why the store cannot be used, or None."""

    @property
    def server(self) -> StoreServer | None:
        """The operations of a store on a server; None for other stores, and for a store that is not open yet."""

    def read(self, key: Key[Record]) -> Document[Record] | None:
        """The current document, or None if it does not exist. Takes no lock."""

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        """Several documents as of one instant."""

    def read_each(self, keys: Sequence[Key[Any]]) -> View:
        """Several documents, in one request if there is a server. Each is current, but a concurrent commit may be
        visible in only some of them. Takes no lock."""

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        """The members of a family whose names follow `after`, in the order of their names. Takes no lock: members
        created or deleted during the scan may or may not be included."""

    def changes(self, family: Family[Record], cursor: bytes = b"") -> Changes[Record]:
        """The changes in a family since the earlier call that returned `cursor`; without a cursor, every member.

        Includes every commit that ended before this call; the cost is proportional to the changes. A cursor that is
        unknown, too old or from another store counts as no cursor. Takes no lock: on a server, all members are as of
        one instant; in other stores, some changes of a concurrent commit may be missing."""

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        """The entries of a stream after a position, up to its current end. Takes no lock."""

    def transact(
        self, keys: Iterable[Key[Any] | Stream[Any]], decide: Decide[Result], *, commit_id: str | None = None
    ) -> Commit[Result]:
        """Read everything named, decide, commit. `decide` may change only what is named, and may be called repeatedly.

        `commit_id` is a safe name that no other commit ever uses; by default, one is generated. Raises
        `OutcomeUnknown` if the commit may or may not have happened.
        """

    def set_moved(self, target: str | None) -> None:
        """Refuse every later commit with `StoreMoved`, which names the address `target`; None allows commits again.
        When this returns, every commit that was not refused is visible to readers."""

    def watch(self, what: Watched) -> Watch:
        """Report changes made from now on."""

    def now(self) -> float:
        """The store's time: one clock for all clients."""

    def close(self) -> None:
        """Release files and connections. A store that is never closed loses no data."""


_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


def newest_first(store: Store, stream: Stream[Record], *, end: int | None = None) -> Iterator[Entry[Record]]:
    """The entries of a stream up to `end`, newest first, in growing blocks: the cost grows with the number used.
    Numbered files need the `end`. Raises `Archived` when it comes to an archived entry."""
    count, last = _FIRST_BLOCK, math.inf if end is None else end
    while last > 0:
        start = _position_before(store, stream, end, count)
        found: list[Entry[Record]] = []
        hidden: Archived | None = None
        try:
            upwards = takewhile(lambda each: each.position <= last, store.entries(stream, after=start))  # noqa: B023
            found.extend(upwards)
        except Archived as archived:
            found = [each for each in store.entries(stream, after=archived.last) if each.position <= last]
            hidden = archived
        yield from reversed(found)
        if hidden is not None:
            raise hidden
        end = last = start
        count = min(4 * count, _LARGEST_BLOCK)


def _position_before(store: Store, stream: Stream[Any], end: int | None, count: int) -> int:
    if store.files is not None:
        return store.files.position_before(stream, end, count)
    if end is None and store.server is not None:
        end = store.server.end(stream)
    return max(0, (end or 0) - count)


class Deciding(threading.local):
    """Marks a thread that runs a decide function, where starting a transaction is refused. The inner transaction would
    wait for locks that the outer one holds; decide functions are pure anyway."""

    active = False

    def refuse_nesting(self) -> None:
        if self.active:
            raise UsageFailure("a transaction was started inside the decide function of another")

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *problem: object) -> None:
        self.active = False


def checked_commit_id(commit_id: str | None) -> str:
    """The given commit id, or a new one. An id that starts with a dot or is not a safe name is refused."""
    if commit_id is None:
        return os.urandom(16).hex()
    if commit_id.startswith("."):
        raise NameInvalid(f"the commit id {commit_id!a} starts with a dot", name=ascii(commit_id))
    return safe_name(commit_id, what="commit id")


def with_heads(named: Iterable[Key[Any] | Stream[Any]]) -> list[Key[Any] | Stream[Any]]:
    """The named keys and streams without duplicates, followed by the heads of the streams."""
    found = dict.fromkeys(named)
    heads = [each.head for each in found if isinstance(each, Stream) and each.head is not None]
    return [*found, *heads]


def with_head_changes(view: View, changes: Sequence[Change]) -> Sequence[Change]:
    """The changes, followed by updates of the heads of all streams that they append to. Pure."""
    last: dict[Key[Any], object] = {}
    for change in changes:
        if isinstance(change, Append) and change.stream.head is not None and not view.is_loose(change.stream):
            last[change.stream.head] = change.record
    if not last:
        return changes
    return [*changes, *((Create if view.get(key) is None else Replace)(key, record) for key, record in last.items())]


def check_changes(named: Collection[Key[Any] | Stream[Any]], view: View, changes: Sequence[Change]) -> None:
    """Refuse changes that are not named or contradict the view. Every store applies these rules."""
    touched: set[Key[Any]] = set()
    target: Key[Any] | Stream[Any] | None = None
    for change in changes:
        before, target = target, change.stream if isinstance(change, Append) else change.key
        if target is not before and target not in named:
            raise UsageFailure(f"a transaction changes {target.name}, which it does not name", key=target.name)
        if isinstance(change, Append):
            continue
        name = change.key.name
        if change.key in touched:
            raise UsageFailure(f"a transaction changes {name} twice", key=name)
        touched.add(change.key)
        exists = view.document(change.key) is not None
        if isinstance(change, Create) and exists:
            raise AlreadyExists(f"{name} already exists", key=name)
        if not isinstance(change, Create) and not exists:
            raise NotFound(f"there is no {name}", key=name)
