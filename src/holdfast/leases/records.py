"""What is stored about a lease: the lease itself, the counter of its tokens, and who waits for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from holdfast.clock import parse_instant
from holdfast.leases.moments import BootMark, Moment
from holdfast.locks.identity import Holder
from holdfast.store.model import Family, Key, Stream, StructCodec


class Identity(msgspec.Struct, frozen=True):
    """What else is known of a holder, so that others can tell whether it is alive."""

    boot_id: str = ""
    machine_id: str = ""
    pid_namespace: str = ""

    @classmethod
    def of(cls, holder: Holder) -> Identity:
        return cls(holder.boot_id, holder.machine_id, holder.pid_namespace)

    def holder(self, holder_id: str) -> Holder | None:
        """The holder with this id and identity, as far as it makes sense."""
        return Holder.from_record({"holder_id": holder_id, **msgspec.structs.asdict(self)})


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A timed right to write. It counts until `lease_expires_at`, by the store's clock; within one boot of
    one machine until `boot_expires_at`, which nobody can move by setting a clock."""

    lock_id: str
    worktree_id: str
    holder_id: str
    created_at: str
    last_renewed_at: str
    lease_expires_at: str
    fencing_token: int
    ttl: float
    purpose: str = ""
    identity: Identity = Identity()
    detached: bool = False
    """Taken for others than the process that asked: the end of the holder's process says nothing."""
    on_behalf_of: str = ""
    """The agent that its holder, a server, holds it for; it and its children act under it too."""
    boot_expires_at: BootMark | None = None
    actor: str = ""
    """In whose name it was taken: tells agents apart that live in one process. Empty if it was not said."""

    def holders(self) -> list[Holder]:
        """Who acts under it: its holder, and the one that this holds it for; as far as they make sense."""
        named = (self.holder_id, self.on_behalf_of)
        return [holder for each in named if each and (holder := self.identity.holder(each))]

    def who(self) -> str:
        """Its holder as others are shown it: by the name that it gave, if it did, and by its process."""
        return f"{self.actor}, {self.holder_id}" if self.actor else self.holder_id

    def expires_at(self) -> float:
        return parse_instant(self.lease_expires_at)

    def time_left(self, moment: Moment, *, for_others: bool) -> float:
        """How long the lease still counts: for its holder, or (with a margin) until others may take it."""
        return moment.until(self.lease_expires_at, self.boot_expires_at, margin=for_others)

    def is_expired(self, moment: Moment) -> bool:
        """Whether its holder must not use it any more."""
        return self.time_left(moment, for_others=False) <= 0

    def may_be_taken(self, moment: Moment) -> bool:
        """Whether others may take its place: never before it has expired for its holder."""
        return self.time_left(moment, for_others=True) <= 0


class TokenCounter(msgspec.Struct, frozen=True):
    """The highest token ever given for a worktree. It outlives every lease, and the worktree too."""

    worktree_id: str
    fencing_token: int


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """One who waits. It shows itself from time to time; who has not done so for long is left out."""

    ticket: str
    holder_id: str
    priority: int
    since: str
    seen_at: str
    purpose: str = ""
    identity: Identity = Identity()
    on_behalf_of: str = ""
    """Who the lease will belong to, if that is not the process that waits."""
    boot_seen_at: BootMark | None = None
    above: tuple[str, ...] = ()
    """The processes that the one that waits descends from: what they hold, it holds too."""
    actor: str = ""
    """In whose name it waits."""

    def unseen_for(self, moment: Moment) -> float:
        return -moment.until(self.seen_at, self.boot_seen_at, margin=False)


class WaitingLine(msgspec.Struct, frozen=True):
    """Those who wait, in the order in which they will be served."""

    worktree_id: str
    waiters: tuple[Waiter, ...] = ()


_LEASE: StructCodec[Lease] = StructCodec(Lease)
_COUNTER: StructCodec[TokenCounter] = StructCodec(TokenCounter)
_LINE: StructCodec[WaitingLine] = StructCodec(WaitingLine)


LEASES: Family[Lease] = Family("jvs/leases", _LEASE)
LINES: Family[WaitingLine] = Family("jvs/queues", _LINE)


class LeaseKeys(NamedTuple):
    """The documents of one worktree's lease. They share a guard, so they are always changed together."""

    worktree: str
    lease: Key[Lease]
    counter: Key[TokenCounter]
    line: Key[WaitingLine]

    @classmethod
    def of(cls, worktree: str) -> LeaseKeys:
        return cls(
            worktree,
            Key(f"jvs/leases/{worktree}", _LEASE),
            Key(f"jvs/tokens/{worktree}", _COUNTER),
            Key(f"jvs/queues/{worktree}", _LINE),
        )

    def all(self) -> list[Key[Any] | Stream[Any]]:
        return [self.lease, self.counter, self.line]
