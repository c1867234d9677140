"""The nouns of the store: keys, documents, streams, changes. They know nothing of where things are kept."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    Failure,
    JsonInvalid,
    NameInvalid,
    NotFound,
    TooLarge,
    UsageFailure,
)
from holdfast.fs import strictjson
from holdfast.fs.names import is_safe_name, safe_name, split_relative

MOST_BYTES = 4 << 20
"""The largest record."""

Record = TypeVar("Record")
Result = TypeVar("Result")
Encoded = TypeVar("Encoded")


class Codec(Protocol[Encoded]):
    """How records become bytes and come back. What does not come back is `Corrupt`, never a guess."""

    def encode(self, record: Encoded) -> bytes: ...

    def decode(self, content: bytes, source: str) -> Encoded: ...


class StructCodec(Generic[Record]):
    """Records of one `msgspec` type as strict JSON; `source` names the place in what is raised.

    Both ways have a short cut for what is certainly right, at a tenth of the cost; whatever is not is
    looked at in full, which says what is wrong with it, if anything.
    """

    def __init__(
        self, kind: type[Record], *, pretty: bool = True, limit: int = MOST_BYTES, bounded: bool = False
    ) -> None:
        """`bounded` says that the type leaves no room for anything nested too deep."""
        self._kind = kind
        self._pretty = pretty
        self._limit = limit
        self._bounded = bounded

    def encode(self, record: Record) -> bytes:
        """JSON in UTF-8, for documents over several lines, without a final line break.

        A record that would not come back (a NaN, a field of another type) is refused.
        """
        content = self._certainly_encoded(record) or self._encoded(record)
        if len(content) > self._limit:
            raise TooLarge(self._what, len(content), self._limit)
        return content

    def decode(self, content: bytes, source: str) -> Record:
        """The record, if the content is strict JSON and has exactly the right types."""
        text = content.removesuffix(b"\n")
        try:
            record = msgspec.json.decode(text, type=self._kind)
            certain = len(text) <= self._limit and self._is_flat(text) and self._written(record) == text
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            certain = False
        # What we would write just so has no key twice and nothing else that `msgspec` reads over.
        return record if certain else self._decoded(text, source)

    def _certainly_encoded(self, record: Record) -> bytes | None:
        try:
            content = self._written(record)
            msgspec.json.decode(content, type=self._kind)  # every field has its type
            # `msgspec` writes null for numbers that are none, and MessagePack shows them.
            if self._is_flat(content) and not (
                b"null" in content and _NOT_FINITE.search(_MESSAGE_PACK(record))
            ):
                return content
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            pass
        return None

    def _written(self, record: Record) -> bytes:
        content = _JSON(record)
        return msgspec.json.format(content, indent=2) if self._pretty else content

    def _encoded(self, record: Record) -> bytes:
        try:
            value = msgspec.to_builtins(record, str_keys=True)
            msgspec.convert(value, self._kind, str_keys=True)
            content = strictjson.encode(value, what=self._what, limit=self._limit, string_keys=True)
        except (JsonInvalid, msgspec.ValidationError, TypeError) as error:
            raise UsageFailure(f"{self._what} cannot be stored: {error}", problem=str(error)) from None
        return msgspec.json.format(content, indent=2) if self._pretty else content

    def _decoded(self, text: bytes, source: str) -> Record:
        try:
            value = strictjson.decode(text, source=source, limit=self._limit)
            return msgspec.convert(value, self._kind, str_keys=True)
        except (JsonInvalid, TooLarge, msgspec.ValidationError) as error:
            raise Corrupt(
                f"{source} cannot be understood: {error}", source=source, problem=str(error)
            ) from None

    def _is_flat(self, text: bytes) -> bool:
        """Whether a text has so few lists and objects that they cannot be nested too deep."""
        return self._bounded or text.count(b"[") + text.count(b"{") <= strictjson.MAX_DEPTH

    @property
    def _what(self) -> str:
        return f"a record of the type {self._kind.__name__}"


class Unreadable(NamedTuple):
    """What stands in the place of a record that cannot be read or understood, and why it cannot."""

    failure: Failure


class TolerantCodec(Generic[Record]):
    """Reads what another codec reads, and tells where that gives up instead of raising. It writes nothing."""

    def __init__(self, codec: Codec[Record]) -> None:
        self._codec = codec

    def encode(self, record: Record | Unreadable) -> bytes:
        raise UsageFailure("a record that may be unreadable cannot be stored")

    def decode(self, content: bytes, source: str) -> Record | Unreadable:
        try:
            return self._codec.decode(content, source)
        except Corrupt as failure:
            return Unreadable(failure)


_JSON = msgspec.json.Encoder().encode
_MESSAGE_PACK = msgspec.msgpack.Encoder().encode
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""How a NaN or an infinite number begins in MessagePack."""


@functools.lru_cache(maxsize=4096)
def _is_key_name(name: str) -> bool:
    return all(map(is_safe_name, name.split("/")))


class Key(Generic[Record]):
    """The name of one document, such as `jit/issues/4f1c`, and how its record is coded."""

    __slots__ = ("codec", "name")

    def __init__(self, name: str, codec: Codec[Record]) -> None:
        if not _is_key_name(name):
            raise NameInvalid(f"{name!a} cannot be the name of a document", what="key", name=ascii(name))
        self.name = name
        self.codec = codec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Key({self.name!r})"


class Family(Generic[Record]):
    """All documents of one kind, such as `jit/issues`: it makes their keys, and can be scanned."""

    __slots__ = ("codec", "name")

    def __init__(self, name: str, codec: Codec[Record]) -> None:
        split_relative(name)
        self.name = name
        self.codec = codec

    def key(self, member: str) -> Key[Record]:
        """The key of one member; a name that is not safe is refused."""
        return Key(f"{self.name}/{safe_name(member, what='key')}", self.codec)

    def tolerant(self) -> Family[Record | Unreadable]:
        """The same documents for one who looks at them all and can go on without those that are broken."""
        return Family(self.name, TolerantCodec(self.codec))

    def __repr__(self) -> str:
        return f"Family({self.name!r})"


class Stream(Generic[Record]):
    """The name of an append-only sequence of records, such as `jit/events`."""

    __slots__ = ("_hash", "codec", "name")

    def __init__(self, name: str, codec: Codec[Record]) -> None:
        split_relative(name)
        self.name = name
        self.codec = codec
        self._hash = hash(("stream", name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


class Document(NamedTuple, Generic[Record]):
    """A record with its version, an opaque text that is another one whenever the record is."""

    record: Record
    version: str


class Entry(NamedTuple, Generic[Record]):
    """A record of a stream and its position; positions grow, and mean nothing else."""

    position: int
    record: Record


class Tail(NamedTuple):
    """The last record of a stream, not yet decoded, perhaps not even read: who only appends need neither."""

    position: int
    content: bytes | Callable[[], bytes]
    source: str


class Create(NamedTuple):
    """Put a document where there is none."""

    key: Key[Any]
    record: object


class Replace(NamedTuple):
    """Put another record into a document that is there."""

    key: Key[Any]
    record: object


class Delete(NamedTuple):
    """Remove a document that is there."""

    key: Key[Any]


class Append(NamedTuple):
    """Add a record at the end of a stream."""

    stream: Stream[Any]
    record: object


Change = Create | Replace | Delete | Append


class View:
    """What a transaction has read: each document it named, or None where there is none; and the last
    record of each stream it named."""

    __slots__ = ("_documents", "_tails")

    def __init__(
        self,
        documents: Mapping[Key[Any], Document[Any] | None],
        tails: Mapping[Stream[Any], Tail] | None = None,
    ) -> None:
        self._documents = documents
        self._tails = tails or {}

    def get(self, key: Key[Record]) -> Record | None:
        """The record of a document that the transaction named, or None if there is none."""
        document = self.document(key)
        return None if document is None else document.record

    def document(self, key: Key[Record]) -> Document[Record] | None:
        """The same with its version."""
        try:
            return self._documents[key]
        except KeyError:
            raise _not_named(key) from None

    def last(self, stream: Stream[Record]) -> Entry[Record] | None:
        """The last entry of a stream that the transaction named, or None if it is empty."""
        if not self.end(stream):
            return None
        tail = self._tails[stream]
        content = tail.content if isinstance(tail.content, bytes) else tail.content()
        return Entry(tail.position, stream.codec.decode(content, tail.source))

    def end(self, stream: Stream[Any]) -> int:
        """The position of the last entry, 0 if there is none."""
        try:
            return self._tails[stream].position
        except KeyError:
            raise _not_named(stream) from None


def _not_named(what: Key[Any] | Stream[Any]) -> UsageFailure:
    return UsageFailure(f"a decision looks at {what.name}, which was not named", key=what.name)


class Decision(NamedTuple, Generic[Result]):
    """What a decide function wants: the changes, and what to tell the caller once they are made."""

    changes: Sequence[Change]
    result: Result


class Commit(NamedTuple, Generic[Result]):
    """A transaction that was made: its own id, the store's time, where its appends went, its result."""

    id: str
    at: float
    positions: tuple[int, ...]
    result: Result


Decide = Callable[[View, float], Decision[Result]]
Watched = Key[Any] | Family[Any] | Stream[Any]


class Watch(Protocol):
    """Changes of what is watched, from the moment the watch was made. Used as a context manager."""

    def wait(self, timeout: float | None = None) -> frozenset[str]:
        """The names of the documents and streams that changed since the last call (or since the
        watch was made), waiting for the first one; empty when the time is up. Changes that follow
        each other quickly may be reported as one; none is left out."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *problem: object) -> None: ...


class Store(Protocol):
    """Documents and streams. See the module's text for what is promised."""

    def read(self, key: Key[Record]) -> Document[Record] | None:
        """The document as of now, or None. Takes no lock."""
        ...

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        """Several documents as of one moment."""
        ...

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        """The members of a family that are there, by name in order. Takes no lock: what is created
        or deleted meanwhile may be seen or not."""
        ...

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        """The records of a stream behind a position, up to the end as of now. Takes no lock."""
        ...

    def transact(
        self,
        keys: Iterable[Key[Any] | Stream[Any]],
        decide: Decide[Result],
        *,
        commit_id: str | None = None,
    ) -> Commit[Result]:
        """Read the documents named, decide, commit. Everything that is changed must be named.

        `commit_id` is a safe name that no other commit ever has; without it, one is made.
        """
        ...

    def watch(self, what: Watched) -> Watch:
        """Be told when something changes."""
        ...

    def now(self) -> float:
        """The store's time: one clock for all who share it."""
        ...


class Deciding(threading.local):
    """Marks a thread that is inside a decide function: a transaction begun there is refused.

    It would wait for locks that the outer one holds, and `decide` is to be pure anyway.
    """

    active = False

    def refuse_nesting(self) -> None:
        if self.active:
            raise UsageFailure("a transaction was begun inside the decide function of another")

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *problem: object) -> None:
        self.active = False


def new_commit_id() -> str:
    """An id that no other commit has."""
    return os.urandom(16).hex()


def check_commit_id(commit_id: str) -> str:
    """Refuse a commit id that is not a safe name, or that is a hidden one."""
    if commit_id.startswith("."):
        raise NameInvalid(f"the commit id {commit_id!a} begins with a dot", name=ascii(commit_id))
    return safe_name(commit_id, what="commit id")


def check_changes(
    named: Collection[Key[Any] | Stream[Any]],
    view: View,
    changes: Sequence[Change],
) -> None:
    """Refuse changes that do not fit what was named and read: the same in every store."""
    touched: set[Key[Any]] = set()
    target: Key[Any] | Stream[Any] | None = None
    for change in changes:
        before, target = target, change.stream if isinstance(change, Append) else change.key
        if target is not before and target not in named:
            raise UsageFailure(
                f"a transaction changes {target.name}, which it does not name", key=target.name
            )
        if isinstance(change, Append):
            continue
        if change.key in touched:
            raise UsageFailure(f"a transaction changes {target.name} twice", key=target.name)
        touched.add(change.key)
        _check_presence(change, there=view.document(change.key) is not None)


def _check_presence(change: Create | Replace | Delete, *, there: bool) -> None:
    name = change.key.name
    if isinstance(change, Create) and there:
        raise AlreadyExists(f"{name} is there already", key=name)
    if isinstance(change, Replace | Delete) and not there:
        raise NotFound(f"there is no {name}", key=name)
