"""The snapshots that led to a head, and all lines of a repository. Takes no lock and changes nothing.

A line follows the parents from a head. Only visible snapshots are on it. What is being published or
collected meanwhile is seen before or after, never in between: a parent that has gone is looked for
again from its child, which the same commit has linked to the next one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from holdfast.worktrees.control import Control
from holdfast.worktrees.naming import is_ready
from holdfast.worktrees.records import (
    DESCRIPTORS,
    PINS,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
)


class Marks(NamedTuple):
    """What points at a snapshot."""

    heads: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    pinned: bool = False


class Entry(NamedTuple):
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

    entries: tuple[Entry, ...]
    missing: tuple[str, ...] = ()
    more: bool = False


def line(control: Control, worktree: str, *, limit: int | None = None) -> History:
    """The snapshots that led to the head of a worktree, newest first. Costs what is shown, not all."""
    config = control.config(worktree)
    walk = _Walk(control, config.head_snapshot_id or config.base_snapshot_id)
    found = list(islice(walk, None if limit is None else limit + 1))
    shown = found[:limit]
    marks = marks_of(control)
    parents = [each.snapshot_id for each in found[1:]] + [None]
    entries = tuple(
        Entry(each, parent, marks.get(each.snapshot_id, Marks()))
        for each, parent in zip(shown, parents, strict=False)
    )
    more = len(found) > len(shown)
    return History(entries, () if more else tuple(walk.missing), more)


def everything(control: Control, *, limit: int | None = None) -> History:
    """All visible snapshots, newest first, but always children before their parents."""
    known = {name: document.record for name, document in control.store.scan(DESCRIPTORS)}
    seen = {name: each for name, each in known.items() if is_ready(control.places, name)}
    missing: set[str] = set()
    parents = {name: _visible_parent(each, known, seen, missing) for name, each in seen.items()}
    marks = marks_of(control)
    ordered = list(_children_first(seen, parents))
    entries = tuple(Entry(seen[name], parents[name], marks.get(name, Marks())) for name in ordered[:limit])
    really = tuple(sorted(each for each in missing if control.store.read(DESCRIPTORS.key(each)) is None))
    return History(entries, really, limit is not None and len(ordered) > limit)


def marks_of(control: Control) -> Mapping[str, Marks]:
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

    def __init__(self, control: Control, start: str | None) -> None:
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
