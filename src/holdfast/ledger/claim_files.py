"""Claims as files too: `locks/<node>.lock`, for programs that look there. The ledger decides, always.

A file is only ever written or removed under a guard, after looking at the ledger again: so whoever comes
last leaves what the ledger says, and a process that was killed in between is made good by the next one.
A file without a `claim_id` was made by another program; as long as it has not run out it is respected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import Failure, NotFound
from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.leases.deadlock import Hold, Party, Thing, WaitEdge, process_id
from holdfast.ledger.log import is_node_id
from holdfast.ledger.projection import Claim, ClaimWaiter
from holdfast.locks.file_lock import FileLocker

DIRECTORY = "locks"
ENDING = ".lock"
GUARD = ".guard"
MOST_BYTES = 64 << 10
_TIMEOUT = 30.0


class ClaimFiles:
    """The claim files of one ledger on files, in `<root>/locks/`."""

    def __init__(self, root: Path) -> None:
        self.path = root / DIRECTORY
        self._locker = FileLocker(_TIMEOUT)

    def bring_in_step(
        self, node: str, now: float, current: Callable[[], Claim | None], reap: Callable[[Claim], None]
    ) -> None:
        """Make the file of a node say what the ledger says. `current` looks at the ledger.

        Another program's file that has not run out is left alone, unless the ledger has a claim. One
        that has run out is reaped: first in the ledger, by `reap`, then the file.
        """
        make_directories(self.path)
        with self._locker.lock_exclusive(str(self.path / GUARD)), Directory.open(self.path) as directory:
            claim, found = current(), self._read(directory, node)
            if claim is not None:
                content = _content(claim)
                if self._bytes(directory, node) != content:
                    draft = durable.write_draft(directory, node + ENDING, content, durable=False)
                    durable.publish(directory, draft, node + ENDING)
            elif found is not None:
                self._clear(directory, found, now, reap)

    def nodes(self) -> list[str]:
        """The nodes that have a file."""
        try:
            with Directory.open(self.path) as directory:
                names = directory.names()
        except NotFound:
            return []
        found = (name.removesuffix(ENDING) for name in names if name.endswith(ENDING))
        return sorted(name for name in found if is_node_id(name))

    def read(self, node: str) -> Claim | None:
        """What the file of a node says; None if there is none, or nothing that makes sense."""
        try:
            with Directory.open(self.path) as directory:
                return self._read(directory, node)
        except NotFound:
            return None

    def foreign(self, node: str, now: float) -> Claim | None:
        """The claim that another program's file makes, if it has not run out."""
        found = self.read(node)
        return found if found is not None and not found.claim_id and not found.is_expired(now) else None

    def _clear(self, directory: Directory, found: Claim, now: float, reap: Callable[[Claim], None]) -> None:
        if not found.claim_id:
            if not found.is_expired(now):
                return
            reap(found)
        durable.remove_in(directory, found.node_id + ENDING, durable=False)

    def _read(self, directory: Directory, node: str) -> Claim | None:
        content = self._bytes(directory, node)
        return None if content is None else _claim(content, node)

    def _bytes(self, directory: Directory, node: str) -> bytes | None:
        try:
            return durable.read_in(directory, node + ENDING, limit=MOST_BYTES)
        except NotFound:
            return None


def _claim(content: bytes, node: str) -> Claim | None:
    """The claim that a file makes, if it has the form of one and is about this node."""
    try:
        record = strictjson.decode(content.removesuffix(b"\n"), limit=MOST_BYTES)
        texts = {name: record[name] for name in ("node_id", "owner", "acquired_at", "expires_at")}
        if texts["node_id"] != node or not all(isinstance(each, str) for each in texts.values()):
            return None
        parse_instant(texts["expires_at"])
        return Claim(**texts, sequence=0, claim_id=str(record.get("claim_id", "")))
    except (Failure, KeyError, TypeError, ValueError, AttributeError):
        return None


def _content(claim: Claim) -> bytes:
    record = {
        "node_id": claim.node_id,
        "owner": claim.owner,
        "acquired_at": in_nanoseconds(claim.acquired_at),
        "expires_at": in_nanoseconds(claim.expires_at),
        # Says that the ledger has this claim; one of another program that has none gets a name of ours.
        "claim_id": claim.claim_id or f"event-{claim.sequence}",
    }
    return strictjson.encode(record) + b"\n"


def in_nanoseconds(instant: str) -> str:
    """An instant of the ledger as RFC 3339 with nanoseconds, in UTC."""
    whole, _, rest = instant.partition(".")
    if rest and instant.endswith("Z") and rest[:-1].isdigit():
        return f"{whole}.{rest[:-1][:9]:0<9}Z"
    seconds = parse_instant(instant)
    shown = datetime.fromtimestamp(seconds, UTC)
    return f"{shown:%Y-%m-%dT%H:%M:%S}.{shown.microsecond * 1000:09d}Z"


ACTOR, AGENT, ABOVE, BETWEEN = "actor", "agent", "above", "|"
"""How a `holder` says in whose name it acts; and, of one who waits, for which process and below which."""


def hold(claim: Claim) -> Hold:
    """A claim is its owner's; its process tells who that is where others go by processes only."""
    told = claim.holder
    processes = _processes(told, told.get("holder_id", ""))
    party = Party(claim.owner, claim.owner, processes, actor=told.get(ACTOR, ""))
    return Hold(Thing("claim", claim.node_id), party, claim.claim_id or f"event-{claim.sequence}")


def wait(waiter: ClaimWaiter) -> WaitEdge:
    """One who waits for a claim."""
    told = waiter.holder
    party = Party(
        waiter.owner,
        waiter.owner,
        _processes(told, told.get("holder_id", ""), told.get(AGENT, "")),
        _processes(told, *told.get(ABOVE, "").split(BETWEEN)),
        told.get(ACTOR, ""),
    )
    since = format_instant(parse_instant(waiter.since)) if waiter.since else ""
    return WaitEdge(Thing("claim", waiter.node_id), party, since, waiter.ticket)


def _processes(told: Mapping[str, str], *holder_ids: str) -> frozenset[str]:
    boot_id, namespace = told.get("boot_id", ""), told.get("pid_namespace", "")
    return frozenset(process_id(each, boot_id, namespace) for each in holder_ids if each)
