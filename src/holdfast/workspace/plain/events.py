"""Events of a ledger for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.ledger.log import Recorded


def as_record(recorded: Recorded) -> dict[str, Any]:
    """An event for programs."""
    return {"sequence": recorded.sequence, "event": recorded.event}


def list_record(events: Iterable[Recorded]) -> dict[str, Any]:
    """Some events of a ledger."""
    return {"events": [as_record(each) for each in events]}
