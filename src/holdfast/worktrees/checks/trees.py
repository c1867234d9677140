"""The trees of snapshots: those that nothing describes, those that are not there, those that changed."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from holdfast.errors import Corrupt, LockConflict, NotFound, Refused
from holdfast.fs.directory import Directory, make_directories, move
from holdfast.fs.names import is_safe_name
from holdfast.store.audit import AuditReader
from holdfast.store.model import Decision, View
from holdfast.trees.retained_dirs import Need
from holdfast.worktrees import scratch
from holdfast.worktrees.collecting import collector_locked
from holdfast.worktrees.control import Control
from holdfast.worktrees.doctor import Examination, Finding, Severity
from holdfast.worktrees.naming import is_ready
from holdfast.worktrees.sweeping import need_of_all, retire, sweep, untrimmed

_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)

_GONE = frozenset({"snapshots_collected", "tree_removed"})
"""The events after which a snapshot is rightly not there."""


def orphans(examination: Examination) -> Iterator[Finding]:
    """Trees without a descriptor.

    A publisher keeps a scratch of the same id from before its tree appears until its descriptor is there.
    So: first the trees, then who works now, then the descriptors; what is not in the making then, and has
    no descriptor, will never get one. What the audit trail knows tells a snapshot that never was from
    one that is lost. While an operation is pending nothing is judged: it may have to be finished first.
    """
    control = examination.control
    trees = _names(control)
    making = {each.scratch_id for each in scratch.in_use(control.places)}
    orphaned = [
        each
        for each in trees
        if _ID.fullmatch(each)
        and each not in making
        and examination.descriptor(each) is None
        and _is_directory(control, each)
    ]
    if orphaned and not examination.operations():
        known = _history_of(examination, orphaned)
        needed = _needed(control)
        for each in orphaned:
            yield _orphan(control, each, known.get(each), is_needed=needed is None or each in needed)
    for name in trees:
        if not _is_ours(examination, name):
            yield Finding(
                "snapshot-directory-strange",
                Severity.WARNING,
                name,
                f"{control.places.snapshots / name!s:.300} is not the tree of a snapshot",
                "Somebody put it there; Holdfast does not use it.",
                "nothing: it is not ours to remove",
            )


def _needed(control: Control) -> Need | None:
    """What trees need of each other; None if one of them cannot say."""
    try:
        return need_of_all(control.places)
    except Corrupt:
        return None


def _orphan(control: Control, snapshot_id: str, event: str | None, *, is_needed: bool) -> Finding:
    """What a tree without a descriptor is, by the last event that the trail has of it."""
    if event in _GONE:
        return _not_missed(control, snapshot_id, is_needed=is_needed)
    if event is not None:
        return _lost(snapshot_id)
    never_published = scratch.is_left(control.places, snapshot_id) or not is_ready(
        control.places, snapshot_id
    )
    if never_published:
        return _not_missed(control, snapshot_id, is_needed=is_needed)
    return _unknown(control, snapshot_id, is_needed=is_needed)


def _unknown(control: Control, snapshot_id: str, *, is_needed: bool) -> Finding:
    place = control.places.quarantine / snapshot_id
    return Finding(
        "tree-unknown",
        Severity.WARNING,
        snapshot_id,
        f"{control.places.tree(snapshot_id)} is a whole tree, but nothing tells where it comes from",
        "It is not visible. Perhaps it was copied here, or its descriptor and the audit trail were lost.",
        "nothing: other snapshots may have directories in it"
        if is_needed
        else f"move it to {place}, where you can look at it",
        fix=None if is_needed else partial(_quarantine, control, snapshot_id, place),
        facts={"quarantine": None if is_needed else str(place)},
    )


def _quarantine(control: Control, snapshot_id: str, place: Path) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        facts = {"tree": snapshot_id, "moved_to": str(place)}
        return Decision([control.audit(view, now, "tree_quarantined", **facts)], None)

    make_directories(place.parent)
    move(control.places.tree(snapshot_id), place)
    control.store.transact([control.trail.stream], decide)


def _not_missed(control: Control, snapshot_id: str, *, is_needed: bool) -> Finding:
    return Finding(
        "tree-orphaned",
        Severity.WARNING,
        snapshot_id,
        f"{control.places.tree(snapshot_id)} belongs to no snapshot: its process died before it was "
        "published, or it was deleted",
        "It takes space. It is not visible, and the audit trail shows that it is not missed.",
        "remove it, but for what other snapshots need of it" if is_needed else "remove it",
        fix=partial(_retire, control, snapshot_id),
    )


def _lost(snapshot_id: str) -> Finding:
    return Finding(
        "descriptor-missing",
        Severity.ERROR,
        snapshot_id,
        f"the snapshot {snapshot_id} was published and never deleted, but its descriptor is gone",
        "Its files are still there, but it cannot be seen or restored.",
        "nothing: bring the descriptor back from a copy; its tree is kept as it is",
    )


def _history_of(examination: Examination, snapshot_ids: Sequence[str]) -> dict[str, str]:
    """The last event in the audit trail that mentions each of these snapshots, if one does."""
    wanted, last = set(snapshot_ids), dict[str, str]()
    control = examination.control
    for entry in AuditReader(
        control.store, control.trail, verified=True
    ).read():  # a forged one proves nothing
        for each in wanted.intersection(_texts(entry.facts)):
            last[each] = entry.event
    return last


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _retire(control: Control, snapshot_id: str) -> None:
    """Put it among the remnants, and remove of it what nobody needs; the trail says so."""

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([control.audit(view, now, "tree_removed", tree=snapshot_id)], None)

    if _is_there(control, snapshot_id):
        retire(control, [snapshot_id])
        control.store.transact([control.trail.stream], decide)
        with contextlib.suppress(LockConflict, Corrupt, Refused):  # then it is found among the remnants
            _sweep(control)


def remnants(examination: Examination) -> Iterator[Finding]:
    """What is left of trees whose snapshots are gone, though nobody needs it, or not all of it."""
    control = examination.control
    if not untrimmed(control.places):
        return
    try:
        with collector_locked(control):  # nobody else is at it, and nobody begins
            found = untrimmed(control.places)
    except LockConflict:
        return
    for name, need in found.items():
        why = "has more than other snapshots need" if need else "no other snapshot needs it"
        yield Finding(
            "remnant-excessive",
            Severity.WARNING,
            name,
            f"{control.places.remnants / name} is left of a deleted snapshot, and {why}",
            "It takes space. A collection did not come to its end, or what needed it was removed since.",
            "remove what is not needed",
            fix=partial(_sweep, control),
        )


def _sweep(control: Control) -> None:
    with collector_locked(control):
        sweep(control)


def incomplete(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose tree is not there, or was never completed."""
    for snapshot_id, descriptor in examination.descriptors.items():
        if descriptor.doomed_by is None and not is_ready(examination.control.places, snapshot_id):
            now = examination.descriptor(snapshot_id)  # a collection dooms before it takes a tree away
            if now is not None and now.doomed_by is None:
                yield Finding(
                    "snapshot-incomplete",
                    Severity.ERROR,
                    snapshot_id,
                    f"the tree of the snapshot {snapshot_id} is not there, or has no .READY",
                    "It cannot be restored, and is not shown. It was whole when it was published.",
                    "nothing: bring its directory back from a copy",
                )


def damaged(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose content is not what it was: always the list of files, with `strict` every file."""
    from holdfast.trees import verify, verify_manifest

    control = examination.control
    look = verify if examination.strict else verify_manifest
    for snapshot_id, descriptor in examination.descriptors.items():
        if descriptor.doomed_by is not None or not is_ready(control.places, snapshot_id):
            continue
        problems = list(look(control.places.tree(snapshot_id), descriptor.payload_hash))
        if not problems:
            continue
        now = examination.descriptor(snapshot_id)
        if now is not None and now.doomed_by is None:
            yield Finding(
                "snapshot-damaged",
                Severity.ERROR,
                snapshot_id,
                f"the snapshot {snapshot_id} is not what it was: {problems[0]}"
                + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""),
                "The disk or somebody has changed it. What is restored from it would be wrong.",
                "nothing: bring what is missing or was changed back from a copy",
                facts={"problems": [str(each) for each in problems[:20]], "count": len(problems)},
            )


def _names(control: Control) -> list[str]:
    try:
        with Directory.open(control.places.snapshots) as directory:
            return sorted(directory.names())
    except NotFound:
        return []


def _is_directory(control: Control, name: str) -> bool:
    try:
        with Directory.open(control.places.snapshots) as directory:
            status = directory.status(name)
    except NotFound:
        return False
    return status is not None and stat.S_ISDIR(status.st_mode)


def _is_ours(examination: Examination, name: str) -> bool:
    """Whether it is, or was, the tree of a snapshot."""
    if _ID.fullmatch(name):
        return _is_directory(examination.control, name) or not _is_there(examination.control, name)
    return is_safe_name(name) and examination.descriptor(name) is not None


def _is_there(control: Control, name: str) -> bool:
    with Directory.open(control.places.snapshots) as directory:
        return directory.status(name) is not None
