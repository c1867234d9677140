"""Helpers shared by the ledger tests: ledgers on both stores, and events written by other programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.clock import SYSTEM_CLOCK, Clock, format_instant
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import EVENTS, Ledger
from holdfast.ledger.projection import ACQUIRED
from holdfast.ledger.service import Claims
from holdfast.store.files import FileStore
from holdfast.store.model import Append, Decision, Store

PATIENCE = 60.0
_opened: list[FileStore] = []


def open_ledger(root: Path, *, clock: Clock = SYSTEM_CLOCK, timeout: float = PATIENCE) -> Ledger:
    """A ledger on files, with its checkpoints and a long lock timeout."""
    store = FileStore(root, timeout=timeout, clock=clock)
    _opened.append(store)
    return Ledger(store, checkpoint_root=root)


def close_all() -> None:
    """Close every store opened by `open_ledger`."""
    while _opened:
        _opened.pop().close()


def open_claims(root: Path, *, files: bool = False, patience: float = 15.0, clock: Clock = SYSTEM_CLOCK) -> Claims:
    """The claims of a ledger on files."""
    return Claims(open_ledger(root, clock=clock), files=ClaimFiles(root) if files else None, patience=patience)


def claims_on(store: Store) -> Claims:
    """The claims of a ledger on any store."""
    return Claims(Ledger(store))


def acquired(node: str, owner: str, *, expires_in: float, at: float | None = None) -> dict[str, Any]:
    """The event of a claim as another program writes it."""
    now = time.time() if at is None else at
    return {
        "type": ACQUIRED,
        "timestamp": format_instant(now),
        "node_id": node,
        "owner": owner,
        "expires_at": format_instant(now + expires_in),
    }


def append_raw(ledger: Ledger, *events: Mapping[str, Any]) -> None:
    """Append events in one commit as another program may write them, without our checks."""
    changes = [Append(EVENTS, dict(each)) for each in events]
    ledger.store.transact([EVENTS], lambda view, now: Decision(changes, None))


def event_files(root: Path) -> list[Path]:
    """The files of all events, in order."""
    found = (root / "ledger").glob("event-*.json")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def raw_events(root: Path) -> list[Mapping[str, Any]]:
    """All events as any program reads them: from the files alone, which must have no gap."""
    files = event_files(root)
    assert [path.name for path in files] == [f"event-{n:06d}.json" for n in range(1, len(files) + 1)]
    return [json.loads(path.read_bytes()) for path in files]


def put_event(root: Path, number: int, content: bytes) -> None:
    """Write an event file directly under its final name, as no program should."""
    (root / "ledger").mkdir(parents=True, exist_ok=True)
    (root / f"ledger/event-{number:06d}.json").write_bytes(content)


def fill(root: Path, count: int) -> None:
    """Write a ledger of many events, fast."""
    (root / "ledger").mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        content = {"type": "note", "timestamp": "2024-01-15T10:30:00Z", "number": number, "id": f"n-{number}"}
        fd = os.open(root / f"ledger/event-{number:06d}.json", os.O_WRONLY | os.O_CREAT)
        os.write(fd, json.dumps(content, separators=(",", ":")).encode() + b"\n")
        os.close(fd)
