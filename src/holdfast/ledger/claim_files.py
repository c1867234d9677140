"""Claim files: claims also as `locks/<node>.lock`, for programs that look there. The ledger always decides.

A file is written or removed only under the lock `locks/.guard`, after reading the ledger again: the last
writer leaves the state of the ledger, and the next one repairs the leftovers of a killed process. A file without a
`claim_id` belongs to another program; it is respected until it expires.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from holdfast.clock import parse_instant
from holdfast.errors import Failure, IoFailure, NotFound, Refused, TooLarge
from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.ledger.log import is_node_id
from holdfast.ledger.projection import Claim
from holdfast.locks.file_lock import FileLocker

DIRECTORY = "locks"
ENDING = ".lock"
GUARD = ".guard"
MOST_BYTES = 64 << 10
UNREADABLE = (Refused, TooLarge, IoFailure)
_TIMEOUT = 30.0


class ClaimFiles:
    """The claim files of one ledger on files, in `<root>/locks/`."""

    def __init__(self, root: Path) -> None:
        self.path = root / DIRECTORY
        self._locker = FileLocker(_TIMEOUT, follow_links=False)

    def update(self, node: str, now: float, current: Callable[[], Claim | None], reap: Callable[[Claim], None]) -> None:
        """Make the file of a node match the ledger, which `current` reads. If the ledger has no claim, the file of
        another program stays until it expires, and is then reaped: first in the ledger, by `reap`, then the file."""
        make_directories(self.path)
        with self._locker.lock_exclusive(str(self.path / GUARD)), Directory.open(self.path) as directory:
            claim = current()
            try:
                content = self._content(directory, node)
            except UNREADABLE:
                return  # a directory, link, pipe or huge file: `verify` reports it
            if claim is not None:
                if content != (expected := _encode(claim)):
                    draft = durable.write_draft(directory, node + ENDING, expected, durable=False)
                    durable.publish(directory, draft, node + ENDING)
            elif found := _decode(content, node):
                if not found.claim_id:
                    if not found.is_expired(now):
                        return
                    reap(found)
                durable.remove_in(directory, node + ENDING, durable=False)

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
        """The claim in the file of a node; None if there is no file, or it is malformed."""
        try:
            with Directory.open(self.path) as directory:
                return _decode(self._content(directory, node), node)
        except NotFound:
            return None

    def foreign(self, node: str, now: float) -> Claim | None:
        """The claim in another program's file, if it has not expired."""
        found = self.read(node)
        return found if found is not None and not found.claim_id and not found.is_expired(now) else None

    def _content(self, directory: Directory, node: str) -> bytes | None:
        try:
            return durable.read_in(directory, node + ENDING, limit=MOST_BYTES)
        except NotFound:
            return None


def _decode(content: bytes | None, node: str) -> Claim | None:
    """The claim in a file, if it is well-formed and about this node."""
    if content is None:
        return None
    try:
        record = strictjson.decode(content.removesuffix(b"\n"), limit=MOST_BYTES)
        texts = {name: record[name] for name in ("node_id", "owner", "acquired_at", "expires_at")}
        if texts["node_id"] != node or not all(isinstance(each, str) for each in texts.values()):
            return None
        parse_instant(texts["expires_at"])
        return Claim(**texts, sequence=0, claim_id=str(record.get("claim_id", "")))
    except (Failure, KeyError, TypeError, ValueError, AttributeError):
        return None


def _encode(claim: Claim) -> bytes:
    record = {
        "node_id": claim.node_id,
        "owner": claim.owner,
        "acquired_at": in_nanoseconds(claim.acquired_at),
        "expires_at": in_nanoseconds(claim.expires_at),
        # Says that the ledger has this claim; another program's claim without an id gets one of ours.
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
