"""Ledger claims and their waiters, as a projection of the ledger's events.

| event | effect |
|---|---|
| `lock_acquired` | `owner` holds the node until `expires_at`; with the same `claim_id`: renewed |
| `lock_released` | `owner` released the claim |
| `lock_reaped` | the claim of `owner` had expired and was removed |
| `lock_requested` | `owner` joins the queue, in the order of the ledger within a `priority` |
| `lock_withdrawn` | it leaves the queue |

The first three are the specification's; other programs write them too, without our additional fields. They count as in
the specification's own replay: a release or reap ends the claim on its node, whatever owner it names. A malformed
lock event has no effect. `verify` reports both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import msgspec

from holdfast.clock import Deadline, TimedRight, parse_instant
from holdfast.errors import Archived, JsonInvalid, NotFound, TooLarge
from holdfast.fs import strictjson
from holdfast.ledger.log import CHECKPOINT_EVERY, EVENTS, UNLOCKED, Event, Ledger, Recorded, event_to_json, is_node_id
from holdfast.store.archive import Archivable, Archive
from holdfast.store.model import Entry, Instant, not_understood

ACQUIRED, RELEASED, REAPED = "lock_acquired", "lock_released", "lock_reaped"
REQUESTED, WITHDRAWN = "lock_requested", "lock_withdrawn"
ENDING = (RELEASED, REAPED)
KINDS = frozenset((ACQUIRED, RELEASED, REAPED, REQUESTED, WITHDRAWN))

NAME, VERSION = "claims", "2"  # the checkpoint of this fold
_AT_ONCE = 512


class Claim(TimedRight, msgspec.Struct, frozen=True, kw_only=True):
    """A node reserved for an owner until `expires_at`, by the store's clock. `sequence` is its last event; `claim_id`
    is empty if another program made it; `holder` is the process it is for, if known: see `identity.described`."""

    node_id: str
    owner: str
    acquired_at: Instant
    expires_at: Instant
    sequence: int
    claim_id: str = ""
    holder: dict[str, str] = msgspec.field(default_factory=dict)
    purpose: str = ""

    def deadline(self) -> Deadline:
        return Deadline(self.expires_at)


class ClaimWaiter(msgspec.Struct, frozen=True, kw_only=True):
    """A waiter in the queue of a node. It counts until `until` unless it sends another heartbeat. `sequence` is the
    event with which it began to wait: its position among waiters of the same priority."""

    node_id: str
    owner: str
    ticket: str
    priority: int
    sequence: int
    until: Instant
    holder: dict[str, str] = {}
    since: str = ""

    def order(self) -> tuple[int, int]:
        return -self.priority, self.sequence

    def counts(self, now: float) -> bool:
        return now < parse_instant(self.until)


class ClaimState:
    """All claims and queues after the event `sequence`. Only `apply` changes it. `unlocked` are the records of broken
    locks: the only events that another program may replace."""

    def __init__(self) -> None:
        self.sequence = 0
        self.unlocked: tuple[int, ...] = ()
        self.claims: dict[str, Claim] = {}
        self.queues: dict[str, tuple[ClaimWaiter, ...]] = {}

    def apply(self, recorded: Recorded) -> None:
        """Apply the next event."""
        event = recorded.event
        self.sequence = recorded.sequence
        kind = event.get("type")
        if kind == UNLOCKED:
            self.unlocked += (recorded.sequence,)
        if not isinstance(kind, str) or kind not in KINDS or not has_effect(event):
            return
        if kind == ACQUIRED:
            self._acquired(recorded)
        elif kind == REQUESTED:
            self._requested(recorded)
        elif kind == WITHDRAWN:
            self._prune_queue(event["node_id"], without=event["ticket"], at=event["timestamp"])
        else:
            self.claims.pop(event["node_id"], None)

    def queue(self, node: str) -> tuple[ClaimWaiter, ...]:
        """The waiters for a node, in the order in which they will be served."""
        return self.queues.get(node, ())

    def as_record(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "claims": [msgspec.to_builtins(each) for each in self.claims.values()],
            "waiters": [msgspec.to_builtins(each) for queue in self.queues.values() for each in queue],
            "unlocked": list(self.unlocked),
        }

    @classmethod
    def from_record(cls, record: Any, sequence: int) -> ClaimState | None:
        """The state of a checkpoint; None if it is malformed."""
        try:
            saved = msgspec.convert(record, _Saved)
        except msgspec.ValidationError:
            return None
        state = cls()
        state.sequence, state.unlocked = sequence, tuple(saved.unlocked)
        state.claims = {each.node_id: each for each in saved.claims}
        for each in saved.waiters:
            state.queues[each.node_id] = (*state.queue(each.node_id), each)
        return state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimState) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def _acquired(self, recorded: Recorded) -> None:
        event = recorded.event
        node, claim_id = event["node_id"], event.get("claim_id", "")
        claim_id = claim_id if isinstance(claim_id, str) else ""
        at = event["timestamp"] if _is_instant(event.get("timestamp")) else ""
        before = self.claims.get(node)
        if before is not None and claim_id != "" and before.claim_id == claim_id:  # renewed
            began, holder, purpose = before.acquired_at, before.holder, before.purpose
        else:
            began, holder = at or event["expires_at"], _holder(event)
            purpose = event["purpose"] if isinstance(event.get("purpose"), str) else ""
        fields = {name: event[name] for name in ("node_id", "owner", "expires_at")}
        fields |= {"claim_id": claim_id, "holder": holder, "purpose": purpose}
        self.claims[node] = Claim(**fields, acquired_at=began, sequence=recorded.sequence)
        self._prune_queue(node, without=claim_id, at=at)

    def _requested(self, recorded: Recorded) -> None:
        event = recorded.event
        node, ticket = event["node_id"], event["ticket"]
        self._prune_queue(node, at=event["timestamp"], keep=ticket)
        earlier = next((each for each in self.queue(node) if each.ticket == ticket), None)
        sequence, since = (earlier.sequence, earlier.since) if earlier else (recorded.sequence, event["timestamp"])
        fields = {name: event[name] for name in ("node_id", "owner", "ticket", "priority", "until")}
        waiter = ClaimWaiter(**fields, holder=_holder(event), sequence=sequence, since=since)
        others = (each for each in self.queue(node) if each.ticket != ticket)
        self.queues[node] = tuple(sorted((*others, waiter), key=ClaimWaiter.order))

    def _prune_queue(self, node: str, *, at: str, without: str = "", keep: str = "") -> None:
        """Remove one waiter, and all whose heartbeat was overdue at that time."""
        queue = self.queues.pop(node, None)
        if queue is None:
            return
        now = parse_instant(at) if at else 0.0
        left = tuple(each for each in queue if each.ticket != without and (each.counts(now) or each.ticket == keep))
        if left:
            self.queues[node] = left


class _Saved(msgspec.Struct):
    claims: list[Claim]
    waiters: list[ClaimWaiter]
    unlocked: list[int]


def has_effect(event: Event) -> bool:
    """Whether a lock event counts: one of the specification's, if it has what the specification's replay needs."""
    kind = event["type"]
    if kind in ENDING:
        return is_node_id(event.get("node_id"))
    if kind == ACQUIRED:
        known = is_node_id(event.get("node_id")) and isinstance(event.get("owner"), str)
        return known and _is_instant(event.get("expires_at"))
    return form_problem(event) is None


def form_problem(event: Event) -> str | None:
    """Why a lock event is malformed; None if it is not."""
    kind = event["type"]
    if not is_node_id(event.get("node_id")):
        return "its node_id is not the id of a node"
    texts = {WITHDRAWN: ["ticket"], REQUESTED: ["owner", "ticket"]}
    for name in texts.get(kind, ["owner"]):
        if not (isinstance(event.get(name), str) and event[name]):
            return f"it has no {name}"
    if not isinstance(event.get("claim_id", ""), str):
        return "its claim_id is not a text"
    instants = {ACQUIRED: ["timestamp", "expires_at"], REQUESTED: ["timestamp", "until"]}
    for name in instants.get(kind, ["timestamp"]):
        if not _is_instant(event.get(name)):
            return f"its {name} is not an instant"
    if kind == REQUESTED and type(event.get("priority")) is not int:
        return "its priority is not a whole number"
    if kind == REQUESTED and not _is_holder(event.get("holder", {})):
        return "its holder is not described by texts"
    return None


def _holder(event: Event) -> dict[str, str]:
    """The process that the event is about, as `Holder.as_record` has it; empty if it is malformed."""
    holder = event.get("holder")
    return holder if _is_holder(holder) else {}


def _is_holder(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_instant(value: object) -> bool:
    try:
        parse_instant(value)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def archivable() -> Archivable[Event]:
    """How the ledger is archived: in the lines of 'ledger log', with the claims and queues after the last event."""

    def line(entry: Entry[Event]) -> bytes:
        return strictjson.encode(event_to_json(Recorded(*entry)))

    return Archivable(EVENTS, "ledger", line, lambda event: event.get("timestamp"), ArchivedClaims)


def archived_event(line: bytes) -> Recorded:
    """The event in a line of a segment."""
    try:
        found = strictjson.decode(line)
        return Recorded(int(found["sequence"]), dict(found["event"]))
    except (JsonInvalid, TooLarge, KeyError, TypeError, ValueError) as error:
        raise not_understood("a line of a segment", str(error)) from None


class ArchivedClaims:
    """The claims and queues after the archived events."""

    def __init__(self, archive: Archive | None) -> None:
        self.state = ClaimState() if archive is None else archived_state(archive)

    def add(self, entry: Entry[Event]) -> None:
        self.state.apply(Recorded(*entry))

    def as_record(self) -> dict[str, Any]:
        return self.state.as_record()


def archived_state(archive: Archive) -> ClaimState:
    state = ClaimState.from_record(archive.state, archive.last)
    if state is None:
        raise not_understood("the archive of the ledger", "its claims have an unknown form")
    return state


def state_at_cut(archived: Archived, until: int | None) -> ClaimState:
    """The state after the last archived event; raises the failure again if `until` comes before that."""
    assert isinstance(archived.archive, Archive)
    if until is not None and until < archived.last:
        raise archived
    return archived_state(archived.archive)


Answer = TypeVar("Answer")


class ClaimProjection:
    """The claims of a ledger; reads each event once. Safe to use from several threads. Events are never read while the
    state is locked: a store may hold its own locks while it decides, and query the projection then."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._state: ClaimState | None = None
        self._saved = 0

    def query(self, ask: Callable[[ClaimState], Answer], *, until: int | None = None) -> Answer:
        """The answer of `ask` to the state at the end, or right after the event `until`. The state does not change
        while `ask` runs."""
        try:
            last = self._catch_up(self._open(until), until)
        except Archived as archived:
            last = self._catch_up(self._skip(state_at_cut(archived, until)), until)
        with self._lock:
            state = self._state
            if state is not None and (until is None or state.sequence == until):
                self._save(state, last, until)
                return ask(state)
        state = self.at_sequence(until or 0)  # our state is ahead: events were removed, or bypassed the lock
        with self._lock:
            self._state, self._saved = state, state.sequence
        return ask(state)

    def at_sequence(self, sequence: int) -> ClaimState:
        """The state after an event; `NotFound` if there is no such event yet."""
        state = self._restored(sequence)
        try:
            for each in self._ledger.events(after=state.sequence, until=sequence):
                state.apply(each)
        except Archived as archived:
            state = state_at_cut(archived, sequence)
            for each in self._ledger.events(after=state.sequence, until=sequence):
                state.apply(each)
        if state.sequence != sequence:
            message = f"the ledger has no event {sequence}; the last one before it is {state.sequence}"
            raise NotFound(message, sequence=sequence)
        return state

    def _skip(self, state: ClaimState) -> int:
        """Go on from this state, unless ours is ahead of it; return the sequence."""
        with self._lock:
            if self._state is None or self._state.sequence < state.sequence:
                self._state, self._saved = state, state.sequence
            return self._state.sequence

    def _open(self, until: int | None) -> int:
        """The sequence of the state, which is first restored from its checkpoint."""
        with self._lock:
            earlier = self._state
            if earlier is not None and not earlier.unlocked:
                return earlier.sequence
        if earlier is not None and not self._is_outdated(earlier):
            return earlier.sequence
        state = self._restored(until)
        with self._lock:
            if self._state is earlier or self._state is None:
                self._state, self._saved = state, state.sequence
            return self._state.sequence

    def _restored(self, until: int | None) -> ClaimState:
        found = self._ledger.checkpoint(NAME, VERSION, until=until)
        state = ClaimState.from_record(found.state, found.sequence) if found else None
        return ClaimState() if state is None or self._is_outdated(state) else state

    def _is_outdated(self, state: ClaimState) -> bool:
        """Whether another program has replaced the record of a broken lock by its own event, which only files allow."""
        if self._ledger.store.server is not None:
            return False
        found = (next(self._ledger.events(after=each - 1, until=each), None) for each in state.unlocked)
        return any(each is None or each.event.get("type") != UNLOCKED for each in found)

    def _catch_up(self, after: int, until: int | None) -> Recorded | None:
        """Apply the new events, and return the last of them."""
        last: Recorded | None = None
        source = self._ledger.events(after=after, until=until)
        while chunk := list(islice(source, _AT_ONCE)):
            with self._lock:
                try:
                    for each in chunk:
                        if self._state is not None and each.sequence > self._state.sequence:
                            self._state.apply(each)
                except BaseException:  # a signal: the state may have half of an event
                    self._state = None
                    raise
            last = chunk[-1]
        return last

    def _save(self, state: ClaimState, last: Recorded | None, until: int | None) -> None:
        """Save a checkpoint now and then, but not in the middle of a transaction."""
        due = state.sequence - self._saved >= CHECKPOINT_EVERY
        if due and until is None and last is not None and last.sequence == state.sequence:
            self._ledger.save_checkpoint(NAME, VERSION, last, state.as_record())
            self._saved = state.sequence
