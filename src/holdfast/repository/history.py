"""Snapshot names, history, references and pins. Reading takes no lock and changes nothing.

The history of a worktree follows the parents from its head; it contains visible snapshots only. If a parent is missing,
a collection may have deleted it; the same commit attached its child to the next ancestor, so the child is read again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from holdfast.clock import LONGEST_DURATION, format_instant, ttl_within
from holdfast.errors import (
    AlreadyExists,
    Ambiguous,
    Failure,
    NameInvalid,
    NotFound,
    PartialSnapshot,
    Refused,
    SnapshotCollected,
    SnapshotElsewhere,
    UsageFailure,
)
from holdfast.fs.names import checked_text, safe_name, shortened
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    PINS,
    REFERENCES,
    WORKTREES,
    Consistency,
    Descriptor,
    Pin,
    Reference,
    RepositoryContext,
    did_you_mean,
    known_names,
)
from holdfast.store.model import Create, Decision, Delete, Key, View

HEAD = "head"
MOST_STEPS = 1_000_000

_STEPS = re.compile(r"(?P<start>[^~]*)(?P<steps>(?:~\d*)*)", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


def resolve(context: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, seen from `worktree`: visible, but possibly marked for deletion."""
    prefix, colon, name = text.rpartition(":")
    if colon:
        worktree = safe_name(prefix, what="worktree name")
    match = _STEPS.fullmatch(name)
    if match is None or not match["start"]:
        hint = "Use an id, a unique prefix of an id, a reference, head, or head~2."
        raise NameInvalid(f"{text!a} is not the name of a snapshot", hint=hint, name=ascii(text))
    found = visible(context, _start(context, match["start"], worktree, head_only=bool(colon)))
    counts = match["steps"].split("~")[1:]  # `~3` is three, `~1~1` two
    steps = MOST_STEPS + 1 if max(map(len, counts), default=0) > 9 else sum(int(each or 1) for each in counts)
    if steps > MOST_STEPS:
        shown = shortened(text, 100)
        raise NotFound(f"{shown}: only the last {MOST_STEPS} snapshots can be counted back", name=shown)
    for _ in range(steps):
        found = _parent(context, found, text)
    return found


def resolve_usable(context: RepositoryContext, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, if something new may refer to it."""
    return usable(resolve(context, text, worktree=worktree))


def _start(context: RepositoryContext, name: str, worktree: str, *, head_only: bool) -> str:
    """The id of the snapshot at which the steps to parents begin."""
    if name == HEAD:
        tip = context.config(worktree).tip
        if tip is None:
            raise NotFound(f"{worktree} has no snapshot yet", hint="Take one: 'holdfast snapshot'.", worktree=worktree)
        return tip
    if head_only:
        raise NameInvalid(f"only 'head' can follow a worktree and ':', not {name!a}", name=f"{worktree}:{name}")
    name = safe_name(name, what="name of a snapshot")
    if context.store.read(DESCRIPTORS.key(name)) is not None:
        return name
    reference = context.store.read(REFERENCES.key(name))
    return reference.record.snapshot_id if reference is not None else _by_prefix(context, name)


def _by_prefix(context: RepositoryContext, prefix: str) -> str:
    """The only snapshot whose id has this prefix; trees without a descriptor are a last resort."""
    stored = context.home.stored()
    if context.home.contents is not None:
        stored = sorted({*stored, *known_names(context.store, DESCRIPTORS)})
    trees = [each for each in stored if each.startswith(prefix)]
    described = [each for each in trees if context.store.read(DESCRIPTORS.key(each)) is not None]
    candidates = described or trees
    if not candidates:
        raise snapshot_not_found(prefix, known_names(context.store, REFERENCES))
    if len(candidates) > 1 and prefix not in candidates:
        raise Ambiguous(prefix, candidates)
    return prefix if prefix in candidates else candidates[0]


def _parent(context: RepositoryContext, child: Descriptor, text: str) -> Descriptor:
    """The current parent of a snapshot: a collection may replace it at any time."""
    while True:
        if child.parent_id is None:
            raise NotFound(f"{text}: {child.snapshot_id} has no parent", name=text)
        try:
            return visible(context, child.parent_id)
        except NotFound:
            again = visible(context, child.snapshot_id)
            if again.parent_id == child.parent_id:
                raise
            child = again


def visible(context: RepositoryContext, snapshot_id: str) -> Descriptor:
    """The descriptor of a snapshot, by its full id; raises if the snapshot is missing, incomplete or elsewhere."""
    found = context.descriptor(snapshot_id)
    if found is not None and context.home.is_ready(snapshot_id, found):
        return found
    if found is not None:
        refuse_if_collected(context, snapshot_id)
        if found.clone != context.clone:
            message = (
                f"the snapshot {snapshot_id} was taken in the clone {found.clone or MAIN}; its content is not here"
            )
            raise SnapshotElsewhere(message, snapshot_id=snapshot_id, clone=found.clone or MAIN)
    elif snapshot_id not in context.home.stored():
        raise snapshot_not_found(snapshot_id)
    why = "its tree is missing or has no .READY" if found else "it was never published"
    raise PartialSnapshot(f"the snapshot {snapshot_id} is not complete: {why}", snapshot_id=snapshot_id)


def usable(descriptor: Descriptor) -> Descriptor:
    """The same descriptor; raises `Refused` if it is marked for deletion. Pure."""
    if descriptor.doomed_by is not None:
        message = f"the snapshot {descriptor.snapshot_id} is being deleted by the plan {descriptor.doomed_by}"
        hint = "Choose another snapshot. 'holdfast gc plan' lists which are kept, and why."
        raise Refused(message, hint=hint, snapshot_id=descriptor.snapshot_id, plan=descriptor.doomed_by)
    return descriptor


def refuse_if_collected(context: RepositoryContext, snapshot_id: str) -> None:
    """Raise `SnapshotCollected` if a snapshot that was visible is marked for deletion or gone.

    Readers that do not protect a snapshot call this when something is missing. A collection marks a snapshot before it
    deletes anything, so a snapshot that is neither marked nor gone is damaged.
    """
    found = context.descriptor(snapshot_id)
    if found is None or found.doomed_by is not None:
        plan = found.doomed_by if found is not None else None
        by = f"is being deleted by the plan {plan}" if plan else "was deleted by a garbage collection"
        raise SnapshotCollected(f"the snapshot {snapshot_id} {by}", snapshot_id=snapshot_id, plan=plan)


@contextlib.contextmanager
def reading(context: RepositoryContext, *snapshot_ids: str) -> Iterator[None]:
    """Read unprotected snapshots: a failure becomes `SnapshotCollected` if one of them was collected."""
    try:
        yield
    except SnapshotCollected:
        raise
    except Failure:
        for each in snapshot_ids:
            refuse_if_collected(context, each)
        raise


def snapshot_not_found(name: str, references: Iterable[str] = ()) -> NotFound:
    hint = did_you_mean(name, [HEAD, *references]) + "List the snapshots: 'holdfast history --all'."
    return NotFound(f"there is no snapshot {name}", hint=hint, name=name)


def is_snapshot_id(text: str) -> bool:
    """Whether a text has the form of a snapshot's id, which no reference has."""
    return _ID.fullmatch(text) is not None


def reference_name(name: str) -> str:
    """The name, if a reference may have it: neither `head` nor anything in the form of an id."""
    name = safe_name(name, what="name of a reference")
    if name == HEAD or is_snapshot_id(name):
        message = f"a reference cannot be called {name}: the name is reserved for snapshots"
        raise UsageFailure(message, hint="Choose another name.", name=name)
    return name


# --- History ---------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The worktrees whose head a snapshot is, its references, and whether it is pinned."""

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
        """Whether its files may be from different points in time."""
        return self.descriptor.consistency_level is Consistency.BEST_EFFORT


class History(NamedTuple):
    """Snapshots, children before parents. `missing` lists lost parents; `more` says that the limit was reached."""

    entries: tuple[HistoryEntry, ...]
    missing: tuple[str, ...] = ()
    more: bool = False


def worktree_history(context: RepositoryContext, worktree: str, *, limit: int | None = None) -> History:
    """The history of a worktree, newest first. The cost depends on the limit, not on its length."""
    missing: list[str] = []
    walk = _walk(context, context.config(worktree).tip, missing)
    found = list(islice(walk, None if limit is None else limit + 1))
    marks = marks_of(context)
    parents = [each.snapshot_id for each in found[1:]] + [None]
    pairs = zip(found[:limit], parents, strict=False)
    entries = tuple(HistoryEntry(each, parent, marks.get(each.snapshot_id, Marks())) for each, parent in pairs)
    more = len(found) > len(entries)
    return History(entries, () if more else tuple(missing), more)


def all_history(context: RepositoryContext, *, limit: int | None = None) -> History:
    """All visible snapshots, newest first, but always children before their parents."""
    known = {name: document.record for name, document in context.store.scan(DESCRIPTORS)}
    seen = {name: each for name, each in known.items() if context.home.is_ready(name, each)}
    missing: set[str] = set()
    parents = {name: _visible_parent(each, known, seen, missing) for name, each in seen.items()}
    marks = marks_of(context)
    ordered = list(_children_first(seen, parents))
    entries = tuple(HistoryEntry(seen[name], parents[name], marks.get(name, Marks())) for name in ordered[:limit])
    really = tuple(sorted(each for each in missing if context.store.read(DESCRIPTORS.key(each)) is None))
    return History(entries, really, limit is not None and len(ordered) > limit)


def marks_of(context: RepositoryContext) -> Mapping[str, Marks]:
    heads: dict[str, list[str]] = defaultdict(list)
    references: dict[str, list[str]] = defaultdict(list)
    for name, config in context.store.scan(WORKTREES):
        if config.record.head_snapshot_id is not None:
            heads[config.record.head_snapshot_id].append(name)
    for name, reference in context.store.scan(REFERENCES):
        references[reference.record.snapshot_id].append(name)
    pins = {pin.record.snapshot_id for _, pin in context.store.scan(PINS)}
    marked = {*heads, *references, *pins}
    return {each: Marks(tuple(heads[each]), tuple(references[each]), each in pins) for each in marked}


def _walk(context: RepositoryContext, start: str | None, missing: list[str]) -> Iterator[Descriptor]:
    """The visible snapshots from `start` through its parents; ends at a gap, which is added to `missing`."""
    child: Descriptor | None = None
    here, passed = start, set[str]()
    while here is not None and here not in passed:
        found = context.descriptor(here)
        if found is None and child is not None:  # collected since we read its child?
            again = context.descriptor(child.snapshot_id)
            if again is not None and again.parent_id != here:
                child, here = again, again.parent_id
                continue
        if found is None:
            missing.append(here)
            return
        passed.add(here)
        if context.home.is_ready(here, found):
            yield found
        child, here = found, found.parent_id


def _visible_parent(
    descriptor: Descriptor, known: Mapping[str, Descriptor], seen: Mapping[str, Descriptor], missing: set[str]
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
    children = Counter(parent for parent in parents.values() if parent is not None)
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
    yield from sorted(left)  # only if the parents form a cycle


# --- References and pins ------------------------------------------------------------------------------


def create_reference(context: RepositoryContext, name: str, snapshot_id: str, *, note: str = "") -> Reference:
    """Name a snapshot; the name must be free."""
    key, named = REFERENCES.key(reference_name(name)), DESCRIPTORS.key(snapshot_id)
    checked_text(note, what="note")

    def decide(view: View, now: float) -> Decision[Reference]:
        require_usable(view, snapshot_id)
        existing = view.get(key)
        if existing is not None:
            message = f"the reference {name} already exists: it names {existing.snapshot_id}"
            hint = "Choose another name, or delete it first: 'holdfast ref delete'."
            raise AlreadyExists(message, hint=hint, name=name, snapshot_id=existing.snapshot_id)
        made = Reference(name=name, snapshot_id=snapshot_id, created_at=format_instant(now), note=note)
        facts = {"name": name, "snapshot_id": snapshot_id, "note": note}
        return Decision([Create(key, made), context.audit(view, now, "reference_created", **facts)], made)

    return context.store.transact([key, named, context.trail.stream], decide).result


def delete_reference(context: RepositoryContext, name: str) -> Reference:
    """Delete a name. The snapshot stays until it is collected, if nothing else protects it."""
    missing = NotFound(f"there is no reference {name}", hint="List the references: 'holdfast ref list'.")
    return _delete(context, REFERENCES.key(name), missing, "reference_deleted", "note", name=name)


def references(context: RepositoryContext) -> list[Reference]:
    return [document.record for _, document in context.store.scan(REFERENCES)]


def add_pin(context: RepositoryContext, snapshot_id: str, *, reason: str = "", keep_for: float | None = None) -> Pin:
    """Protect a snapshot from collection, for `keep_for` seconds or until the pin is removed."""
    pin_id, holder_id = secrets.token_hex(4), context.holder.holder_id
    checked_text(reason, what="reason")
    if keep_for is not None:
        ttl_within(keep_for, 0.0, LONGEST_DURATION, setting="keep_for")
    key, named = PINS.key(pin_id), DESCRIPTORS.key(snapshot_id)

    def decide(view: View, now: float) -> Decision[Pin]:
        require_usable(view, snapshot_id)
        until = None if keep_for is None else format_instant(now + keep_for)
        facts: dict[str, Any] = {"pin_id": pin_id, "snapshot_id": snapshot_id, "reason": reason, "until": until}
        made = Pin(**facts, created_at=format_instant(now), holder_id=holder_id)
        return Decision([Create(key, made), context.audit(view, now, "pin_added", **facts)], made)

    return context.store.transact([key, named, context.trail.stream], decide).result


def remove_pin(context: RepositoryContext, pin_id: str) -> Pin:
    """Remove one pin; others on the same snapshot stay."""
    missing = NotFound(f"there is no pin {pin_id}", hint="List the pins: 'holdfast pin list'.")
    return _delete(context, PINS.key(pin_id), missing, "pin_removed", "reason", pin_id=pin_id)


def pins(context: RepositoryContext) -> list[Pin]:
    """All pins, expired ones included, the oldest first."""
    found = [document.record for _, document in context.store.scan(PINS)]
    return sorted(found, key=lambda pin: (pin.created_at, pin.pin_id))


def require_usable(view: View, snapshot_id: str) -> Descriptor:
    """The descriptor of a snapshot that something new may refer to; else raise. Pure."""
    descriptor = view.get(DESCRIPTORS.key(snapshot_id))
    if descriptor is None:
        raise snapshot_not_found(snapshot_id)
    return usable(descriptor)


Protection = TypeVar("Protection", Reference, Pin)


def _delete(
    context: RepositoryContext, key: Key[Protection], missing: NotFound, event: str, text: str, **name: str
) -> Protection:
    def decide(view: View, now: float) -> Decision[Protection]:
        found = view.get(key)
        if found is None:
            raise missing
        facts = {**name, "snapshot_id": found.snapshot_id, text: getattr(found, text)}
        return Decision([Delete(key), context.audit(view, now, event, **facts)], found)

    return context.paths.reserve.relieve(lambda: context.store.transact([key, context.trail.stream], decide).result)
