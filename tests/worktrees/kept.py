"""Snapshots with real trees, made without leases, and what can be said of a whole repository."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.clock import format_instant
from holdfast.fs.trees import Engine, capture, verify
from holdfast.store.records import Change, Create, Decision, Replace, View
from holdfast.worktrees.control import Control, new_snapshot_id
from holdfast.worktrees.naming import is_ready
from holdfast.worktrees.records import DESCRIPTORS, MAIN, WORKTREES, Consistency, Descriptor

Content = Mapping[str, str]


def keep(
    control: Control,
    content: Content,
    *,
    worktree: str = MAIN,
    snapshot_id: str | None = None,
    head: bool = True,
    age: float = 0.0,
    note: str = "",
) -> str:
    """Make a worktree hold this, and take a snapshot of it on top of its head."""
    snapshot_id = snapshot_id or new_snapshot_id()
    payload, tree = control.places.payload(worktree), control.places.tree(snapshot_id)
    for name, text in content.items():
        (payload / name).write_text(text)
    before = control.config(worktree).head_snapshot_id
    tree.parent.mkdir(parents=True, exist_ok=True)
    captured = capture(
        payload,
        tree,
        engine=Engine.LINKED,
        base=control.places.tree(before) if before and is_ready(control.places, before) else None,
        cache=None,
        quiesced=False,
    )
    key, config_key = DESCRIPTORS.key(snapshot_id), WORKTREES.key(worktree)

    def publish(view: View, now: float) -> Decision[None]:
        config = view.get(config_key)
        assert config is not None
        descriptor = Descriptor(
            snapshot_id=snapshot_id,
            worktree_id=worktree,
            parent_id=config.head_snapshot_id,
            created_at=format_instant(now - age),
            consistency_level=Consistency.BEST_EFFORT,
            engine=str(captured.engine),
            payload_hash=captured.payload_hash,
            files=captured.files,
            bytes=captured.bytes,
            note=note,
        )
        moved = msgspec.structs.replace(config, head_snapshot_id=snapshot_id)
        entry = control.audit(view, now, "snapshot_published", snapshot_id=snapshot_id)
        changes: list[Change] = [Create(key, descriptor), entry]
        if head:
            changes.append(Replace(config_key, moved))
        return Decision(changes, None)

    control.store.transact([key, config_key, control.trail.stream], publish)
    return snapshot_id


def line_of(control: Control, count: int, *, worktree: str = MAIN, age: float = 0.0) -> list[str]:
    """So many snapshots, one on top of the other, oldest first."""
    return [
        keep(control, {f"file-{number}": f"{worktree} {number}"}, worktree=worktree, age=age)
        for number in range(count)
    ]


def snapshots_of(control: Control) -> dict[str, Descriptor]:
    return {name: document.record for name, document in control.store.scan(DESCRIPTORS)}


def trees_of(control: Control) -> set[str]:
    return {path.name for path in control.places.snapshots.iterdir()}


def parents_of(control: Control, start: str | None) -> list[str]:
    """A line of history, from a snapshot to its oldest ancestor; a missing one is an error."""
    found: list[str] = []
    while start is not None:
        found.append(start)
        document = control.store.read(DESCRIPTORS.key(start))
        assert document is not None, f"{start} is not there"
        start = document.record.parent_id
    return found


def require_whole(control: Control) -> None:
    """Every snapshot that is visible is what it was when it was taken."""
    for snapshot_id, descriptor in snapshots_of(control).items():
        if is_ready(control.places, snapshot_id):
            problems = list(verify(control.places.tree(snapshot_id), descriptor.payload_hash))
            assert problems == [], f"{snapshot_id}: {problems}"
        else:
            assert descriptor.doomed_by is not None, f"{snapshot_id} is not complete, and not doomed"


def fingerprint(root: Path) -> dict[str, str]:
    """What is in a directory, byte for byte: names, kinds, modes, links and contents."""
    found: dict[str, str] = {}
    for directory, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(directory) / name
            status = path.lstat()
            text = f"{stat.S_IFMT(status.st_mode):o} {stat.S_IMODE(status.st_mode):o}"
            if stat.S_ISREG(status.st_mode):
                text += " " + hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                text += " " + str(path.readlink())
            found[str(path.relative_to(root))] = text
    return found
