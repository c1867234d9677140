"""How a snapshot is named, and which ones may be: by id, by a part of it, by a reference, from a head.

    4f1c9a0b12345678    its id            head      the head of the worktree one is in
    4f1c                as much of it     head~2    its parent's parent
                        as no other has   dev:head  the head of another worktree
    v1                  a reference       v1~1      the parent of what it refers to

A snapshot is *visible* when it has a descriptor and its tree has `.READY`. What is only one of them
was never completed, or is not complete any more: naming it is `PartialSnapshot`. Takes no lock.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterable, Iterator

from holdfast.errors import (
    Ambiguous,
    Failure,
    NameInvalid,
    NotFound,
    PartialSnapshot,
    Refused,
    SnapshotCollected,
    UsageFailure,
)
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.names import is_safe_name, safe_name
from holdfast.worktrees.control import Control, Places, meant, names_in
from holdfast.worktrees.records import DESCRIPTORS, MAIN, REFERENCES, Descriptor

HEAD = "head"
READY = ".READY"

_STEPS = re.compile(r"(?P<start>[^~]*)(?P<steps>(?:~\d*)*)", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
MOST_STEPS = 1_000_000


def resolve(control: Control, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, seen from `worktree`. It is visible; it may be doomed."""
    where, colon, name = text.rpartition(":")
    if colon:
        worktree = safe_name(where, what="worktree name")
    match = _STEPS.fullmatch(name)
    if match is None or not match["start"]:
        raise NameInvalid(
            f"{text!a} is not the name of a snapshot",
            hint="Name it by its id or the first characters of it, a reference, head, or head~2.",
            name=ascii(text),
        )
    found = visible(control, _start(control, match["start"], worktree, of_a_worktree=bool(colon)))
    for _ in range(_count(match["steps"], text)):
        found = _parent(control, found, text)
    return found


def _parent(control: Control, child: Descriptor, text: str) -> Descriptor:
    """The parent of a snapshot as of now: a collection may give it another one at any moment."""
    while True:
        if child.parent_id is None:
            raise NotFound(f"{text}: {child.snapshot_id} has no parent", name=text)
        try:
            return visible(control, child.parent_id)
        except NotFound:
            now = visible(control, child.snapshot_id)
            if now.parent_id == child.parent_id:
                raise
            child = now


def resolve_usable(control: Control, text: str, *, worktree: str = MAIN) -> Descriptor:
    """The snapshot that `text` names, if something new may rest on it."""
    return usable(resolve(control, text, worktree=worktree))


def visible(control: Control, snapshot_id: str) -> Descriptor:
    """The descriptor of a snapshot that is there and complete, by its full id."""
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    ready = is_ready(control.places, snapshot_id)
    if document is not None and ready:
        return document.record
    if document is None and not _has_tree(control.places, snapshot_id):
        raise no_snapshot(snapshot_id)
    if document is not None:
        refuse_if_collected(control, snapshot_id)
    raise PartialSnapshot(
        f"the snapshot {snapshot_id} is not complete: "
        + ("its tree is not there or has no .READY" if document else "it was never published"),
        snapshot_id=snapshot_id,
    )


def refuse_if_collected(control: Control, snapshot_id: str) -> None:
    """Raise `SnapshotCollected` if a snapshot that was there is being deleted by now, or is gone.

    Who reads a snapshot without keeping it asks this when something is missing: a collection dooms a snapshot
    before it takes anything away. If it is neither doomed nor gone, it is damaged.
    """
    document = control.store.read(DESCRIPTORS.key(snapshot_id))
    if document is None or document.record.doomed_by is not None:
        plan = document.record.doomed_by if document is not None else None
        by = f"is being deleted by the plan {plan}" if plan else "was deleted by a garbage collection"
        raise SnapshotCollected(f"the snapshot {snapshot_id} {by}", snapshot_id=snapshot_id, plan=plan)


@contextlib.contextmanager
def reading(control: Control, *snapshot_ids: str) -> Iterator[None]:
    """Read what these snapshots hold, without keeping them: what fails because one is collected says so."""
    try:
        yield
    except SnapshotCollected:
        raise
    except Failure:
        for each in snapshot_ids:
            refuse_if_collected(control, each)
        raise


def usable(descriptor: Descriptor) -> Descriptor:
    """The same snapshot, if it is not about to be deleted. Pure."""
    if descriptor.doomed_by is not None:
        raise Refused(
            f"the snapshot {descriptor.snapshot_id} is being deleted by the plan {descriptor.doomed_by}",
            hint="Choose another snapshot. See 'holdfast gc plan' for what is kept, and why.",
            snapshot_id=descriptor.snapshot_id,
            plan=descriptor.doomed_by,
        )
    return descriptor


def is_ready(places: Places, snapshot_id: str) -> bool:
    """Whether the tree of a snapshot is there and complete."""
    path = places.tree(snapshot_id) / READY
    try:
        return stat.S_ISREG(calls.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_failure("look at", path, error) from error


def no_snapshot(name: str, references: Iterable[str] = ()) -> NotFound:
    return NotFound(
        f"there is no snapshot {name}",
        hint=meant(name, [HEAD, *references]) + "See 'holdfast history --all' for those that are there.",
        name=name,
    )


def reference_name(name: str) -> str:
    """A name that a reference may have: one that cannot be taken for the head or for an id."""
    name = safe_name(name, what="name of a reference")
    if name == HEAD or _ID.fullmatch(name):
        raise UsageFailure(
            f"a reference cannot be called {name}: that names a snapshot already",
            hint="Choose another name.",
            name=name,
        )
    return name


def _start(control: Control, name: str, worktree: str, *, of_a_worktree: bool) -> str:
    """The id of the snapshot from which parents are counted."""
    if name == HEAD:
        config = control.config(worktree)
        head = config.head_snapshot_id or config.base_snapshot_id
        if head is None:
            raise NotFound(
                f"{worktree} has no snapshot yet",
                hint="Take one: 'holdfast snapshot'.",
                worktree=worktree,
            )
        return head
    if of_a_worktree:
        raise NameInvalid(
            f"only the head of a worktree is named with ':', not {name!a}", name=f"{worktree}:{name}"
        )
    name = safe_name(name, what="name of a snapshot")
    if control.store.read(DESCRIPTORS.key(name)) is not None:
        return name
    reference = control.store.read(REFERENCES.key(name))
    if reference is not None:
        return reference.record.snapshot_id
    return _by_beginning(control, name)


def _by_beginning(control: Control, beginning: str) -> str:
    """The one snapshot whose id begins like this; those that are not visible count only if none is."""
    found = [each for each in _trees(control.places) if each.startswith(beginning)]
    seen = [each for each in found if control.store.read(DESCRIPTORS.key(each)) is not None]
    candidates = seen or found
    if not candidates:
        raise no_snapshot(beginning, names_in(control.store, REFERENCES))
    if len(candidates) > 1 and beginning not in candidates:
        raise Ambiguous(beginning, candidates)
    return beginning if beginning in candidates else candidates[0]


def _trees(places: Places) -> list[str]:
    """The ids of all trees, complete or not. Listing names costs little, however many there are."""
    try:
        with Directory.open(places.snapshots) as directory:
            return sorted(name for name in directory.names() if is_safe_name(name))
    except NotFound:
        return []


def _has_tree(places: Places, snapshot_id: str) -> bool:
    return snapshot_id in _trees(places)


def _count(steps: str, text: str) -> int:
    """How many parents up: `~` is one, `~3` three, `~1~1` two."""
    count = sum(int(each or 1) for each in steps.split("~")[1:])
    if count > MOST_STEPS:
        raise NotFound(f"{text}: no line is that long", name=text)
    return count
