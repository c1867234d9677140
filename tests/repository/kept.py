"""Snapshots with real trees, made without leases, and checks of whole repositories."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.clock import format_instant
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    WORKTREES,
    Consistency,
    Descriptor,
    RepositoryContext,
    new_snapshot_id,
)
from holdfast.repository.payloads import CaptureOptions, scratch
from holdfast.store.model import Change, Create, Decision, Replace, View
from holdfast.trees.engines import Engine
from holdfast.trees.shared_dirs import read_shared_directories

Content = Mapping[str, str]

_TICK = 0.03


def keep(
    context: RepositoryContext,
    content: Content,
    *,
    worktree: str = MAIN,
    snapshot_id: str | None = None,
    head: bool = True,
    age: float = 0.0,
    note: str = "",
    shared: bool = False,
) -> str:
    """Write files into a worktree, and take a snapshot of it on top of its head.

    With `shared`, a stat cache lets the snapshot share unchanged directories with the head. This needs a pause:
    the cache cannot trust a file that could be written again within the same timestamp tick.
    """
    snapshot_id = snapshot_id or new_snapshot_id()
    payload = context.paths.payload(worktree)
    for name, text in content.items():
        (payload / name).parent.mkdir(parents=True, exist_ok=True)
        (payload / name).write_text(text)
    if shared:
        time.sleep(_TICK)
    base = context.config(worktree).head_snapshot_id
    how = CaptureOptions(
        quiesced=False,
        base=base if base and context.home.is_ready(base) else None,
        cached=worktree if shared else None,
        engine=Engine.LINKED,
    )
    with scratch(context, "snapshot", scratch_id=snapshot_id) as room:
        captured = context.home.capture(room, payload, how)
        context.home.publish(room, snapshot_id)
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
        entry = context.audit(view, now, "snapshot_published", snapshot_id=snapshot_id)
        changes: list[Change] = [Create(key, descriptor), entry]
        if head:
            changes.append(Replace(config_key, moved))
        return Decision(changes, None)

    context.store.transact([key, config_key, context.trail.stream], publish)
    return snapshot_id


def line_of(
    context: RepositoryContext, count: int, *, worktree: str = MAIN, age: float = 0.0, shared: bool = False
) -> list[str]:
    """Take `count` snapshots, one on top of the other; oldest first.

    With `shared`, each adds directories that all later ones share, except for one that changes.
    """
    made: list[str] = []
    for number in range(count):
        content = {f"file-{number}": f"{worktree} {number}"}
        if shared:
            below = f"{worktree}-{number}"
            content |= {f"{below}/first": "1", f"{below}/lost/file": "2", f"{below}/kept/file": "3"}
            if number:
                content[f"{worktree}-{number - 1}/lost/file"] = "changed"
        made.append(keep(context, content, worktree=worktree, age=age, shared=shared))
    return made


def snapshots_of(context: RepositoryContext) -> dict[str, Descriptor]:
    return {name: document.record for name, document in context.store.scan(DESCRIPTORS)}


def trees_of(context: RepositoryContext) -> set[str]:
    return set(context.home.stored())


def remnants_of(context: RepositoryContext) -> set[str]:
    """The deleted snapshots that left a remnant."""
    return {path.name for path in context.paths.remnants.iterdir()} if context.paths.remnants.exists() else set()


def require_no_more_than_needed(context: RepositoryContext) -> None:
    """Remnants hold only directories that a tree refers to."""
    need: dict[str, set[str]] = {}
    for tree in context.paths.snapshots.iterdir():
        for home in read_shared_directories(tree).values():
            need.setdefault(home.tree, set()).add(os.fsdecode(home.path))
    for remnant in remnants_of(context):
        top = context.paths.remnants / remnant
        assert [path.name for path in top.iterdir()] == ["payload"], f"{remnant} is not trimmed"
        kept = {os.path.relpath(each, top / "payload") for each, _, files in os.walk(top / "payload") if files}
        wanted = {each or "." for each in need.get(remnant, ())}
        assert kept <= wanted, f"{remnant} has {kept - wanted}, which no tree needs"
        ends = {os.path.relpath(each, top / "payload") for each, *rest in os.walk(top / "payload") if not any(rest)}
        assert ends <= wanted, f"{remnant} has {ends - wanted}, which no tree needs"


def parents_of(context: RepositoryContext, start: str | None) -> list[str]:
    """A snapshot and its ancestors, back to the oldest; a missing one is an error."""
    found: list[str] = []
    while start is not None:
        found.append(start)
        document = context.store.read(DESCRIPTORS.key(start))
        assert document is not None, f"{start} is missing"
        start = document.record.parent_id
    return found


def require_whole(context: RepositoryContext) -> None:
    """Every snapshot verifies, unless it is doomed and already incomplete."""
    for snapshot_id, descriptor in snapshots_of(context).items():
        if context.home.is_ready(snapshot_id):
            problems = list(context.home.verify(descriptor))
            assert problems == [], f"{snapshot_id}: {problems}"
        else:
            assert descriptor.doomed_by is not None, f"{snapshot_id} is incomplete, but not doomed"


def fingerprint(root: Path) -> dict[str, str]:
    """Names, kinds, modes, link targets and contents of everything below a directory."""
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
