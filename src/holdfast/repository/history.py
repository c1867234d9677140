"""History, references and pins. Reading takes no lock and changes nothing.

The history of a worktree follows the parents from its head; only visible snapshots are part of it. A
snapshot that is published or collected meanwhile is seen before or after, never in between: a missing parent
is looked up again from its child, which the same commit has attached to the next ancestor.
"""

from __future__ import annotations

import secrets
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, NotFound
from holdfast.fs.names import checked_text
from holdfast.repository.context import (
    RepositoryContext,
    is_ready,
    reference_name,
    snapshot_not_found,
    usable,
)
from holdfast.repository.records import (
    DESCRIPTORS,
    PINS,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
    Pin,
    Reference,
)
from holdfast.store.model import Create, Decision, Delete, Key, View


class Marks(NamedTuple):
    """What points at a snapshot: worktrees whose head it is, references, pins."""

    heads: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    pinned: bool = False


class HistoryEntry(NamedTuple):
    """A snapshot in history. `parent_id` is its nearest visible ancestor."""

    descriptor: Descriptor
    parent_id: str | None
    marks: Marks = Marks()

    @property
    def warning(self) -> bool:
        """Whether its files may be from different moments."""
        return self.descriptor.consistency_level is Consistency.BEST_EFFORT


class History(NamedTuple):
    """Snapshots, children before parents. `missing` lists parents that do not exist although they should;
    `more` says that the limit was reached."""

    entries: tuple[HistoryEntry, ...]
    missing: tuple[str, ...] = ()
    more: bool = False


def line(context: RepositoryContext, worktree: str, *, limit: int | None = None) -> History:
    """The history of a worktree, newest first. The cost depends on the limit, not on its length."""
    missing: list[str] = []
    walk = _walk(context, context.config(worktree).tip, missing)
    found = list(islice(walk, None if limit is None else limit + 1))
    marks = marks_of(context)
    parents = [each.snapshot_id for each in found[1:]] + [None]
    entries = tuple(
        HistoryEntry(each, parent, marks.get(each.snapshot_id, Marks()))
        for each, parent in zip(found[:limit], parents, strict=False)
    )
    more = len(found) > len(entries)
    return History(entries, () if more else tuple(missing), more)


def everything(context: RepositoryContext, *, limit: int | None = None) -> History:
    """All visible snapshots, newest first, but always children before their parents."""
    known = {name: document.record for name, document in context.store.scan(DESCRIPTORS)}
    seen = {name: each for name, each in known.items() if is_ready(context.places, name)}
    missing: set[str] = set()
    parents = {name: _visible_parent(each, known, seen, missing) for name, each in seen.items()}
    marks = marks_of(context)
    ordered = list(_children_first(seen, parents))
    entries = tuple(
        HistoryEntry(seen[name], parents[name], marks.get(name, Marks())) for name in ordered[:limit]
    )
    really = tuple(sorted(each for each in missing if context.store.read(DESCRIPTORS.key(each)) is None))
    return History(entries, really, limit is not None and len(ordered) > limit)


def marks_of(context: RepositoryContext) -> Mapping[str, Marks]:
    """What points at each snapshot now."""
    heads: dict[str, list[str]] = defaultdict(list)
    references: dict[str, list[str]] = defaultdict(list)
    for name, config in context.store.scan(WORKTREES):
        if config.record.head_snapshot_id is not None:
            heads[config.record.head_snapshot_id].append(name)
    for name, reference in context.store.scan(REFERENCES):
        references[reference.record.snapshot_id].append(name)
    pins = {pin.record.snapshot_id for _, pin in context.store.scan(PINS)}
    return {
        each: Marks(tuple(heads.get(each, ())), tuple(references.get(each, ())), each in pins)
        for each in {*heads, *references, *pins}
    }


def _walk(context: RepositoryContext, start: str | None, missing: list[str]) -> Iterator[Descriptor]:
    """The visible snapshots from `start` through its parents; a gap ends it, and is added to `missing`."""

    def read(snapshot_id: str) -> Descriptor | None:
        document = context.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record

    child: Descriptor | None = None
    here, passed = start, set[str]()
    while here is not None and here not in passed:
        found = read(here)
        if found is None and child is not None:  # collected since we read its child?
            again = read(child.snapshot_id)
            if again is not None and again.parent_id != here:
                child, here = again, again.parent_id
                continue
        if found is None:
            missing.append(here)
            return
        passed.add(here)
        if is_ready(context.places, here):
            yield found
        child, here = found, found.parent_id


def _visible_parent(
    descriptor: Descriptor,
    known: Mapping[str, Descriptor],
    seen: Mapping[str, Descriptor],
    missing: set[str],
) -> str | None:
    passed = {descriptor.snapshot_id}
    here = descriptor.parent_id
    while here is not None and here not in seen and here not in passed:
        passed.add(here)
        if here not in known:
            missing.add(here)
            return None
        here = known[here].parent_id
    return None if here in passed else here


def _children_first(seen: Mapping[str, Descriptor], parents: Mapping[str, str | None]) -> Iterator[str]:
    """Newest first by creation time, but every child before its parent, whatever the clocks said."""
    children: dict[str, int] = defaultdict(int)
    for parent in parents.values():
        if parent is not None:
            children[parent] += 1
    ready = sorted((each.created_at, name) for name, each in seen.items() if not children[name])
    left = set(seen)
    while ready:
        _, name = ready.pop()
        left.discard(name)
        yield name
        parent = parents[name]
        if parent is not None:
            children[parent] -= 1
            if not children[parent]:
                insort(ready, (seen[parent].created_at, parent))
    yield from sorted(left)  # only if the parents form a cycle: still not left out


# --- References and pins ------------------------------------------------------------------------------


def create_reference(context: RepositoryContext, name: str, snapshot_id: str, *, note: str = "") -> Reference:
    """Name a snapshot; the name must be free."""
    key, named = REFERENCES.key(reference_name(name)), DESCRIPTORS.key(snapshot_id)
    checked_text(note, what="note")

    def decide(view: View, now: float) -> Decision[Reference]:
        _require_usable(view, snapshot_id)
        existing = view.get(key)
        if existing is not None:
            raise AlreadyExists(
                f"the reference {name} already exists: it names {existing.snapshot_id}",
                hint="Choose another name, or delete it first: 'holdfast ref delete'.",
                name=name,
                snapshot_id=existing.snapshot_id,
            )
        made = Reference(name=name, snapshot_id=snapshot_id, created_at=format_instant(now), note=note)
        facts = {"name": name, "snapshot_id": snapshot_id, "note": note}
        return Decision([Create(key, made), context.audit(view, now, "reference_created", **facts)], made)

    return context.store.transact([key, named, context.trail.stream], decide).result


def delete_reference(context: RepositoryContext, name: str) -> Reference:
    """Delete a name. The snapshot stays until it is collected, if nothing else protects it."""

    def facts(found: Reference) -> dict[str, object]:
        return {"name": name, "snapshot_id": found.snapshot_id, "note": found.note}

    missing = NotFound(f"there is no reference {name}", hint="List the references: 'holdfast ref list'.")
    return _delete(context, REFERENCES.key(name), missing, "reference_deleted", facts)


def references(context: RepositoryContext) -> list[Reference]:
    """All references, by name. Takes no lock."""
    return [document.record for _, document in context.store.scan(REFERENCES)]


def add_pin(
    context: RepositoryContext, snapshot_id: str, *, reason: str = "", keep_for: float | None = None
) -> Pin:
    """Protect a snapshot from collection, for `keep_for` seconds or until the pin is removed."""
    pin_id = secrets.token_hex(4)
    checked_text(reason, what="reason")
    key, named = PINS.key(pin_id), DESCRIPTORS.key(snapshot_id)

    def decide(view: View, now: float) -> Decision[Pin]:
        _require_usable(view, snapshot_id)
        made = Pin(
            pin_id=pin_id,
            snapshot_id=snapshot_id,
            created_at=format_instant(now),
            reason=reason,
            until=None if keep_for is None else format_instant(now + keep_for),
            holder_id=context.holder.holder_id,
        )
        facts = {"pin_id": pin_id, "snapshot_id": snapshot_id, "reason": reason, "until": made.until}
        return Decision([Create(key, made), context.audit(view, now, "pin_added", **facts)], made)

    return context.store.transact([key, named, context.trail.stream], decide).result


def remove_pin(context: RepositoryContext, pin_id: str) -> Pin:
    """Remove one pin; others on the same snapshot stay."""

    def facts(found: Pin) -> dict[str, object]:
        return {"pin_id": pin_id, "snapshot_id": found.snapshot_id, "reason": found.reason}

    missing = NotFound(f"there is no pin {pin_id}", hint="List the pins: 'holdfast pin list'.")
    return _delete(context, PINS.key(pin_id), missing, "pin_removed", facts)


def pins(context: RepositoryContext) -> list[Pin]:
    """All pins, expired ones included, by snapshot and age. Takes no lock."""
    found = [document.record for _, document in context.store.scan(PINS)]
    return sorted(found, key=lambda pin: (pin.snapshot_id, pin.created_at, pin.pin_id))


def _require_usable(view: View, snapshot_id: str) -> None:
    descriptor = view.get(DESCRIPTORS.key(snapshot_id))
    if descriptor is None:
        raise snapshot_not_found(snapshot_id)
    usable(descriptor)


Protection = TypeVar("Protection", Reference, Pin)


def _delete(
    context: RepositoryContext,
    key: Key[Protection],
    missing: NotFound,
    event: str,
    facts: Callable[[Protection], dict[str, object]],
) -> Protection:
    def decide(view: View, now: float) -> Decision[Protection]:
        found = view.get(key)
        if found is None:
            raise missing
        return Decision([Delete(key), context.audit(view, now, event, **facts(found))], found)

    return context.places.reserve.relieve(
        lambda: context.store.transact([key, context.trail.stream], decide).result
    )
