"""Claims and those who wait for them, as a fold over the events of a ledger.

| event | says |
|---|---|
| `lock_acquired` | `owner` holds the node until `expires_at`; again with the same `claim_id`: extended |
| `lock_released` | `owner` has given it back |
| `lock_reaped` | the claim of `owner` had run out and was cleared away |
| `lock_requested` | `owner` waits for the node, in the order of the ledger within a `priority` |
| `lock_withdrawn` | it does not wait any more |

The first three are those of the specification; other programs write them too, without our further
fields. A lock event that does not have its form is no lock event; `verify` reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import msgspec

from holdfast.clock import parse_instant
from holdfast.errors import NotFound
from holdfast.ledger.log import CHECKPOINT_EVERY, Event, Ledger, Recorded, is_node_id

ACQUIRED, RELEASED, REAPED = "lock_acquired", "lock_released", "lock_reaped"
REQUESTED, WITHDRAWN = "lock_requested", "lock_withdrawn"
KINDS = frozenset((ACQUIRED, RELEASED, REAPED, REQUESTED, WITHDRAWN))


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is reserved for an owner. It counts until `expires_at`, by the store's clock.

    `sequence` is the event that made it what it is, `claim_id` its own id (empty: another program's).
    `holder` is the process that took it, in words, if that is known; see `locks.identity.described`.
    """

    node_id: str
    owner: str
    acquired_at: str
    expires_at: str
    sequence: int
    claim_id: str = ""
    holder: dict[str, str] = {}
    """The process that it was taken for, if whoever took it has said so."""
    purpose: str = ""

    def expiry(self) -> float:
        return parse_instant(self.expires_at)

    def is_expired(self, now: float) -> bool:
        return now >= self.expiry()


class ClaimWaiter(msgspec.Struct, frozen=True, kw_only=True):
    """One who waits for a node. It counts until `until` unless it shows itself again.

    `sequence` is the event with which it began to wait: that is its place in the line.
    """

    node_id: str
    owner: str
    ticket: str
    priority: int
    sequence: int
    until: str
    holder: dict[str, str] = {}
    since: str = ""

    def order(self) -> tuple[int, int]:
        return -self.priority, self.sequence

    def counts(self, now: float) -> bool:
        return now < parse_instant(self.until)


class ClaimState:
    """All claims and waiters behind the event `sequence`. It is changed by `apply` and nothing else."""

    def __init__(self) -> None:
        self.sequence = 0
        self.claims: dict[str, Claim] = {}
        self.lines: dict[str, tuple[ClaimWaiter, ...]] = {}

    def apply(self, recorded: Recorded) -> None:
        """Take in the next event."""
        event = recorded.event
        self.sequence = recorded.sequence
        kind = event.get("type")
        if kind not in KINDS or form_problem(event) is not None:
            return
        if kind == ACQUIRED:
            self._acquired(recorded)
        elif kind == REQUESTED:
            self._requested(recorded)
        elif kind == WITHDRAWN:
            self._set_line(event["node_id"], without=event["ticket"], at=event["timestamp"])
        else:
            self._ended(recorded)

    def line(self, node: str) -> tuple[ClaimWaiter, ...]:
        """Those who wait for a node, in the order in which they will be served."""
        return self.lines.get(node, ())

    def as_record(self) -> dict[str, Any]:
        """The book for a checkpoint."""
        return {
            "claims": [msgspec.to_builtins(each) for each in self.claims.values()],
            "waiters": [msgspec.to_builtins(each) for line in self.lines.values() for each in line],
        }

    @classmethod
    def from_record(cls, record: Any, sequence: int) -> ClaimState | None:
        """The book of a checkpoint; None if that does not have its form."""
        try:
            kept = msgspec.convert(record, _Kept)
        except msgspec.ValidationError:
            return None
        book = cls()
        book.sequence = sequence
        book.claims = {each.node_id: each for each in kept.claims}
        for each in kept.waiters:
            book.lines[each.node_id] = (*book.line(each.node_id), each)
        return book

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimState) and (self.sequence, self.claims, self.lines) == (
            *(other.sequence, other.claims, other.lines),
        )

    __hash__ = None  # type: ignore[assignment]

    # --- One event each ----------------------------------------------------------------------------

    def _acquired(self, recorded: Recorded) -> None:
        event = recorded.event
        node, claim_id = event["node_id"], event.get("claim_id", "")
        before = self.claims.get(node)
        if before is not None and claim_id != "" and before.claim_id == claim_id:  # extended
            began, holder, purpose = before.acquired_at, before.holder, before.purpose
        else:
            began, holder, purpose = event["timestamp"], _holder(event), _purpose(event)
        self.claims[node] = Claim(
            node_id=node,
            owner=event["owner"],
            acquired_at=began,
            expires_at=event["expires_at"],
            sequence=recorded.sequence,
            claim_id=claim_id,
            holder=holder,
            purpose=purpose,
        )
        self._set_line(node, without=claim_id, at=event["timestamp"])

    def _ended(self, recorded: Recorded) -> None:
        """Released or reaped: by its owner or in its name. What names another is not about this claim."""
        event = recorded.event
        claim = self.claims.get(event["node_id"])
        if claim is not None and ends(event, claim):
            del self.claims[claim.node_id]

    def _requested(self, recorded: Recorded) -> None:
        event = recorded.event
        node, ticket = event["node_id"], event["ticket"]
        self._set_line(node, at=event["timestamp"], keep=ticket)
        earlier = next((each for each in self.line(node) if each.ticket == ticket), None)
        waiter = ClaimWaiter(
            node_id=node,
            owner=event["owner"],
            ticket=ticket,
            priority=event["priority"],
            sequence=earlier.sequence if earlier else recorded.sequence,
            until=event["until"],
            holder=_holder(event),
            since=earlier.since if earlier else event["timestamp"],
        )
        others = (each for each in self.line(node) if each.ticket != ticket)
        self.lines[node] = tuple(sorted((*others, waiter), key=ClaimWaiter.order))

    def _set_line(self, node: str, *, at: str, without: str = "", keep: str = "") -> None:
        """Leave out one waiter, and those who had not shown themselves for too long by then."""
        line = self.lines.get(node)
        if line is None:
            return
        now = parse_instant(at)
        left = tuple(
            each for each in line if each.ticket != without and (each.counts(now) or each.ticket == keep)
        )
        if left:
            self.lines[node] = left
        else:
            del self.lines[node]


class _Kept(msgspec.Struct):
    claims: list[Claim]
    waiters: list[ClaimWaiter]


def ends(event: Event, claim: Claim) -> bool:
    """Whether a release or a reaping is about this very claim."""
    claim_id = event.get("claim_id", "")
    return bool(event["owner"] == claim.owner and (not claim_id or claim_id == claim.claim_id))


def form_problem(event: Event) -> str | None:
    """What a lock event lacks to be one, None if nothing."""
    kind = event["type"]
    if not is_node_id(event.get("node_id")):
        return "its node_id is not the id of a node"
    texts = ["ticket"] if kind == WITHDRAWN else ["owner"]
    if kind == REQUESTED:
        texts.append("ticket")
    for name in texts:
        if not (isinstance(event.get(name), str) and event[name]):
            return f"it has no {name}"
    if not isinstance(event.get("claim_id", ""), str):
        return "its claim_id is not a text"
    instants = {ACQUIRED: ["timestamp", "expires_at"], REQUESTED: ["timestamp", "until"]}
    for name in instants.get(kind, ["timestamp"]):
        if not _is_instant(event.get(name)):
            return f"its {name} is not an instant"
    return _request_problem(event) if kind == REQUESTED else None


def _request_problem(event: Event) -> str | None:
    if type(event.get("priority")) is not int:
        return "its priority is not a whole number"
    return None if _is_holder(event.get("holder", {})) else "its holder is not described by texts"


def _holder(event: Event) -> dict[str, str]:
    """Who the event is about, in the words of `Holder.as_record`; nothing if it does not say, or not so."""
    holder = event.get("holder")
    return holder if _is_holder(holder) else {}


def _purpose(event: Event) -> str:
    purpose = event.get("purpose")
    return purpose if isinstance(purpose, str) else ""


def _is_holder(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_instant(value: object) -> bool:
    try:
        parse_instant(value)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        return False
    return True


NAME, VERSION = "claims", "1"
_AT_ONCE = 512

Answer = TypeVar("Answer")


class ClaimProjection:
    """Reads each event once. Several threads may ask; a question sees a book that does not change.

    Events are never read while the book is locked: a store may hold locks of its own while it decides,
    and then ask us.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._book: ClaimState | None = None
        self._kept = 0

    def look(self, ask: Callable[[ClaimState], Answer], *, until: int | None = None) -> Answer:
        """What `ask` finds in the book as it is at the end, or behind the very event `until`."""
        last = self._catch_up(self._opened(until), until)
        with self._lock:
            book = self._book
            if book is not None and (until is None or book.sequence == until):
                self._keep(book, last, until)
                return ask(book)
        return ask(self._rebuilt(until))

    def at_sequence(self, sequence: int) -> ClaimState:
        """The book as it was behind an event; `NotFound` if there is no such event yet."""
        book, _ = self._restored(sequence)
        for each in self._ledger.events(after=book.sequence, until=sequence):
            book.apply(each)
        if book.sequence != sequence:
            raise NotFound(
                f"the ledger has no event {sequence}; its last one is {book.sequence}", sequence=sequence
            )
        return book

    def _opened(self, until: int | None) -> int:
        """How far the book has come; the first time it is taken from its checkpoint."""
        with self._lock:
            if self._book is not None:
                return self._book.sequence
        book, kept = self._restored(until)
        with self._lock:
            if self._book is None:
                self._book, self._kept = book, kept
            return self._book.sequence

    def _catch_up(self, after: int, until: int | None) -> Recorded | None:
        """Take in what is new; the last event of it."""
        last: Recorded | None = None
        source = self._ledger.events(after=after, until=until)
        while chunk := list(islice(source, _AT_ONCE)):
            with self._lock:
                for each in chunk:
                    if self._book is not None and each.sequence > self._book.sequence:
                        self._book.apply(each)
            last = chunk[-1]
        return last

    def _keep(self, book: ClaimState, last: Recorded | None, until: int | None) -> None:
        """Leave a checkpoint now and then; not in the middle of a transaction."""
        due = book.sequence - self._kept >= CHECKPOINT_EVERY
        if due and until is None and last is not None and last.sequence == book.sequence:
            self._ledger.keep(NAME, VERSION, last, book.as_record())
            self._kept = book.sequence

    def _rebuilt(self, until: int | None) -> ClaimState:
        """The book behind `until` where ours is further: events were taken away, or came past the lock."""
        book = self.at_sequence(until or 0)
        with self._lock:
            self._book, self._kept = book, book.sequence
        return book

    def _restored(self, until: int | None) -> tuple[ClaimState, int]:
        found = self._ledger.checkpoint(NAME, VERSION, until=until)
        book = ClaimState.from_record(found.state, found.sequence) if found else None
        book = book or ClaimState()
        return book, book.sequence
