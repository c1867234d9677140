"""References and pins: what keeps a snapshot from being collected because somebody says so.

Each change names the snapshot's descriptor in its transaction and refuses one that is doomed: so
either the collector, which dooms first and looks afterwards, sees the reference, or it is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, NotFound
from holdfast.fs.names import checked_text
from holdfast.store.model import Create, Decision, Delete, Key, View
from holdfast.worktrees.control import Control
from holdfast.worktrees.naming import no_snapshot, reference_name, usable
from holdfast.worktrees.records import DESCRIPTORS, PINS, REFERENCES, Descriptor, Pin, Reference


def create_reference(control: Control, name: str, snapshot_id: str, *, note: str = "") -> Reference:
    """Give a snapshot a name, which no other one has."""
    key, named = REFERENCES.key(reference_name(name)), DESCRIPTORS.key(snapshot_id)
    checked_text(note, what="note")

    def decide(view: View, now: float) -> Decision[Reference]:
        _may_be_kept(view, snapshot_id)
        there = view.get(key)
        if there is not None:
            raise AlreadyExists(
                f"there is a reference {name} already: it names {there.snapshot_id}",
                hint="Choose another name, or delete it first: 'holdfast ref delete'.",
                name=name,
                snapshot_id=there.snapshot_id,
            )
        made = Reference(name=name, snapshot_id=snapshot_id, created_at=format_instant(now), note=note)
        facts = {"name": name, "snapshot_id": snapshot_id, "note": note}
        return Decision([Create(key, made), control.audit(view, now, "reference_created", **facts)], made)

    return control.store.transact([key, named, control.trail.stream], decide).result


def delete_reference(control: Control, name: str) -> Reference:
    """Take a name away. The snapshot stays until it is collected, if nothing else keeps it."""
    missing = NotFound(
        f"there is no reference {name}", hint="See 'holdfast ref list' for those that are there."
    )
    return _taken_away(
        control,
        REFERENCES.key(name),
        missing,
        "reference_deleted",
        lambda there: {"name": name, "snapshot_id": there.snapshot_id, "note": there.note},
    )


def references(control: Control) -> list[Reference]:
    """All references, by name. Takes no lock."""
    return [document.record for _, document in control.store.scan(REFERENCES)]


def add_pin(control: Control, snapshot_id: str, *, reason: str = "", keep_for: float | None = None) -> Pin:
    """Keep a snapshot, for `keep_for` seconds or until the pin is removed."""
    pin_id = secrets.token_hex(4)
    checked_text(reason, what="reason")
    key, named = PINS.key(pin_id), DESCRIPTORS.key(snapshot_id)

    def decide(view: View, now: float) -> Decision[Pin]:
        _may_be_kept(view, snapshot_id)
        made = Pin(
            pin_id=pin_id,
            snapshot_id=snapshot_id,
            created_at=format_instant(now),
            reason=reason,
            until=None if keep_for is None else format_instant(now + keep_for),
            holder_id=control.holder.holder_id,
        )
        facts = {"pin_id": pin_id, "snapshot_id": snapshot_id, "reason": reason, "until": made.until}
        return Decision([Create(key, made), control.audit(view, now, "pin_added", **facts)], made)

    return control.store.transact([key, named, control.trail.stream], decide).result


def remove_pin(control: Control, pin_id: str) -> Pin:
    """Take one pin away; others on the same snapshot stay."""
    missing = NotFound(f"there is no pin {pin_id}", hint="See 'holdfast pin list' for those that are there.")
    return _taken_away(
        control,
        PINS.key(pin_id),
        missing,
        "pin_removed",
        lambda there: {"pin_id": pin_id, "snapshot_id": there.snapshot_id, "reason": there.reason},
    )


def pins(control: Control) -> list[Pin]:
    """All pins, also those that have run out, by snapshot and age. Takes no lock."""
    found = [document.record for _, document in control.store.scan(PINS)]
    return sorted(found, key=lambda pin: (pin.snapshot_id, pin.created_at, pin.pin_id))


def _may_be_kept(view: View, snapshot_id: str) -> Descriptor:
    descriptor = view.get(DESCRIPTORS.key(snapshot_id))
    if descriptor is None:
        raise no_snapshot(snapshot_id)
    return usable(descriptor)


Keeping = TypeVar("Keeping", Reference, Pin)


def _taken_away(
    control: Control,
    key: Key[Keeping],
    missing: NotFound,
    event: str,
    facts: Callable[[Keeping], dict[str, object]],
) -> Keeping:
    """Delete what keeps a snapshot, with its audit entry; `missing` is raised if it is not there."""

    def decide(view: View, now: float) -> Decision[Keeping]:
        there = view.get(key)
        if there is None:
            raise missing
        return Decision([Delete(key), control.audit(view, now, event, **facts(there))], there)

    return control.places.reserve.relieve(
        lambda: control.store.transact([key, control.trail.stream], decide).result
    )
