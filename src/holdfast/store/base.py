"""The promise that every store keeps, whatever it keeps its documents in.

Every fact that is shared is a *document* with a version. Every change is a *transaction*: it names
the documents that it reads, decides with a pure function, and commits all or nothing.

    store.transact([counter], lambda view, now: Decision([Replace(counter, ...)], result))

`decide` does no I/O, asks no clock (it is handed the store's time) and may be run more than once. It
raises to refuse; then nothing is changed.

1. Atomic: all changes of a commit are seen, or none, also after a crash at any point.
2. Isolated: transactions behave as if they had run one after the other, in an order in which none
   comes before another that had ended when it began. A single `read` takes part in that order.
3. Durable: when `transact` returns, the changes survive a power cut.
4. A commit whose outcome cannot be known raises `OutcomeUnknown` with its id. It is never guessed.
5. A document that cannot be decoded raises `Corrupt` with its place; it is never skipped, and a
   transaction that names it changes nothing. Who scans a *tolerant* family is told `Unreadable` instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

from holdfast.errors import AlreadyExists, NameInvalid, NotFound, UsageFailure
from holdfast.fs.names import safe_name
from holdfast.store.records import (
    Append,
    Change,
    Commit,
    Create,
    Decision,
    Delete,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Replace,
    Result,
    Stream,
    View,
)

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
