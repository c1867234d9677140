"""The snapshots that led to a head, and all lines of a repository. Takes no lock and changes nothing.

A line follows the parents from a head. Only visible snapshots are on it. What is being published or
collected meanwhile is seen before or after, never in between: a parent that has gone is looked for
again from its child, which the same commit has linked to the next one.
"""

from __future__ import annotations

import heapq
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, NotFound
from holdfast.fs.names import checked_text
from holdfast.repository.context import RepositoryContext, is_ready, no_snapshot, reference_name, usable
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
    """What points at a snapshot."""

    heads: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    pinned: bool = False


class HistoryEntry(NamedTuple):
    """A snapshot as history shows it. `parent_id` is the nearest one before it that is visible."""

    descriptor: Descriptor
    parent_id: str | None
    marks: Marks = Marks()

    @property
    def warning(self) -> bool:
        """Whether its files may be of different moments."""
        return self.descriptor.consistency_level is Consistency.BEST_EFFORT


class History(NamedTuple):
    """Snapshots, children before parents. `missing` are parents that should be there and are not;
    `more` says that the limit was reached."""

    entries: tuple[HistoryEntry, ...]
    missing: tuple[str, ...] = ()
    more: bool = False


def line(control: RepositoryContext, worktree: str, *, limit: int | None = None) -> History:
    """The snapshots that led to the head of a worktree, newest first. Costs what is shown, not all."""
    config = control.config(worktree)
    walk = _Walk(control, config.head_snapshot_id or config.base_snapshot_id)
    found = list(islice(walk, None if limit is None else limit + 1))
    shown = found[:limit]
    marks = marks_of(control)
    parents = [each.snapshot_id for each in found[1:]] + [None]
    entries = tuple(
        HistoryEntry(each, parent, marks.get(each.snapshot_id, Marks()))
        for each, parent in zip(shown, parents, strict=False)
    )
    more = len(found) > len(shown)
    return History(entries, () if more else tuple(walk.missing), more)


def everything(control: RepositoryContext, *, limit: int | None = None) -> History:
    """All visible snapshots, newest first, but always children before their parents."""
    known = {name: document.record for name, document in control.store.scan(DESCRIPTORS)}
    seen = {name: each for name, each in known.items() if is_ready(control.places, name)}
    missing: set[str] = set()
    parents = {name: _visible_parent(each, known, seen, missing) for name, each in seen.items()}
    marks = marks_of(control)
    ordered = list(_children_first(seen, parents))
    entries = tuple(
        HistoryEntry(seen[name], parents[name], marks.get(name, Marks())) for name in ordered[:limit]
    )
    really = tuple(sorted(each for each in missing if control.store.read(DESCRIPTORS.key(each)) is None))
    return History(entries, really, limit is not None and len(ordered) > limit)


def marks_of(control: RepositoryContext) -> Mapping[str, Marks]:
    """What points at each snapshot at this moment."""
    heads: dict[str, list[str]] = defaultdict(list)
    references: dict[str, list[str]] = defaultdict(list)
    for name, config in control.store.scan(WORKTREES):
        if config.record.head_snapshot_id is not None:
            heads[config.record.head_snapshot_id].append(name)
    for name, reference in control.store.scan(REFERENCES):
        references[reference.record.snapshot_id].append(name)
    pins = {pin.record.snapshot_id for _, pin in control.store.scan(PINS)}
    return {
        each: Marks(tuple(heads.get(each, ())), tuple(references.get(each, ())), each in pins)
        for each in {*heads, *references, *pins}
    }


class _Walk(Iterable[Descriptor]):
    """The visible snapshots from one of them up through its parents; `missing` once it has ended there."""

    def __init__(self, control: RepositoryContext, start: str | None) -> None:
        self._control = control
        self._start = start
        self.missing: list[str] = []

    def __iter__(self) -> Iterator[Descriptor]:
        child: Descriptor | None = None
        here, passed = self._start, set[str]()
        while here is not None and here not in passed:
            found = self._read(here)
            if found is None and child is not None:  # collected since we read its child?
                again = self._read(child.snapshot_id)
                if again is not None and again.parent_id != here:
                    child, here = again, again.parent_id
                    continue
            if found is None:
                self.missing.append(here)
                return
            passed.add(here)
            if is_ready(self._control.places, here):
                yield found
            child, here = found, found.parent_id

    def _read(self, snapshot_id: str) -> Descriptor | None:
        document = self._control.store.read(DESCRIPTORS.key(snapshot_id))
        return None if document is None else document.record


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
    """Newest first by their time, as far as every child comes before its parent, whatever clocks said."""
    waiting: dict[str, int] = defaultdict(int)
    for parent in parents.values():
        if parent is not None:
            waiting[parent] += 1
    ready = [_Newest(seen[name]) for name in seen if not waiting[name]]
    heapq.heapify(ready)
    left = set(seen)
    while ready:
        name = heapq.heappop(ready).descriptor.snapshot_id
        left.discard(name)
        yield name
        parent = parents[name]
        if parent is not None:
            waiting[parent] -= 1
            if not waiting[parent]:
                heapq.heappush(ready, _Newest(seen[parent]))
    yield from sorted(left)  # only if somebody made parents go round in a circle: still not left out


class _Newest(msgspec.Struct, frozen=True):
    """Sorts the newest snapshot to the front."""

    descriptor: Descriptor

    def __lt__(self, other: _Newest) -> bool:
        return self._order > other._order

    @property
    def _order(self) -> tuple[str, str]:
        return self.descriptor.created_at, self.descriptor.snapshot_id


def create_reference(control: RepositoryContext, name: str, snapshot_id: str, *, note: str = "") -> Reference:
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


def delete_reference(control: RepositoryContext, name: str) -> Reference:
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


def references(control: RepositoryContext) -> list[Reference]:
    """All references, by name. Takes no lock."""
    return [document.record for _, document in control.store.scan(REFERENCES)]


def add_pin(
    control: RepositoryContext, snapshot_id: str, *, reason: str = "", keep_for: float | None = None
) -> Pin:
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


def remove_pin(control: RepositoryContext, pin_id: str) -> Pin:
    """Take one pin away; others on the same snapshot stay."""
    missing = NotFound(f"there is no pin {pin_id}", hint="See 'holdfast pin list' for those that are there.")
    return _taken_away(
        control,
        PINS.key(pin_id),
        missing,
        "pin_removed",
        lambda there: {"pin_id": pin_id, "snapshot_id": there.snapshot_id, "reason": there.reason},
    )


def pins(control: RepositoryContext) -> list[Pin]:
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
    control: RepositoryContext,
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
