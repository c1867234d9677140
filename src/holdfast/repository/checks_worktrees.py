"""Checks of worktrees, heads, parents, references and pins."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import msgspec

from holdfast import findings
from holdfast.errors import LockConflict
from holdfast.findings import Finding
from holdfast.fs.directory import is_directory, status_at
from holdfast.repository import history as referring
from holdfast.repository.context import (
    DESCRIPTORS,
    PINS,
    REFERENCES,
    WORKTREES,
    Descriptor,
    Pin,
    Reference,
    RepositoryContext,
    WorktreeConfig,
    settled_config,
    worktree_keys,
)
from holdfast.repository.doctor import Examination, names_in
from holdfast.store.model import Decision, Delete, Key, Replace, View

_CONTROL_FILES = (".jvs", ".holdfast")  # at the top of a payload these names mislead commands


def worktrees(examination: Examination) -> Iterator[Finding]:
    """Worktrees without a directory, and directories without a worktree.

    Reads directories, then operations, then records: a worktree that is being created has an operation until
    the commit that creates its record.
    """
    paths = examination.context.paths
    directories = names_in(paths.worktrees)
    pending = set(examination.operations())
    configs = examination.configs()
    for worktree, config in configs.items():
        path = paths.payload(worktree)
        if config.clone != paths.main or is_directory(path) or worktree in examination.operations():
            continue
        if examination.config(worktree) is not None and not is_directory(path):
            instead = ", and something else is in its place" if status_at(path) is not None else ""
            message = f"the directory of {worktree} is missing{instead}: {path}"
            yield findings.of("worktree-directory-missing", worktree, message, path=str(path))
    for name in directories:
        if name not in configs and name not in pending and status_at(paths.worktrees / name) is not None:
            yield findings.of("worktree-directory-unknown", name, f"{paths.worktrees / name} belongs to no worktree")


def payloads(examination: Examination) -> Iterator[Finding]:
    """Control files among users' files."""
    for worktree in examination.configs():
        payload = examination.context.paths.payload(worktree)
        for name in _CONTROL_FILES if is_directory(payload) else ():
            if status_at(payload / name) is not None:
                message = f"{payload / name} is named like a file of Holdfast, but is a file of {worktree}"
                yield findings.of("control-file-in-payload", f"{worktree}/{name}", message)


def records(examination: Examination) -> Iterator[Finding]:
    """Foreign files beside the record of a worktree."""
    directory = examination.context.paths.root / ".jvs" / "worktrees"
    for worktree in names_in(directory):
        for name in names_in(directory / worktree):
            if name != "config.json" and not name.startswith("."):
                message = f"{directory / worktree / name} is not a file of this version of Holdfast"
                yield findings.of("record-foreign", f"{worktree}/{name}", message)


def heads(examination: Examination) -> Iterator[Finding]:
    """Missing heads, and heads behind the newest snapshot that their worktree published.

    Reads the descriptors before the records: a snapshot moves its head in the commit that publishes it.
    """
    newer = examination.descriptors
    for worktree, config in examination.configs().items():
        start = config.head_snapshot_id or config.base_snapshot_id
        if start is not None and examination.descriptor(start) is None:
            if examination.config(worktree) == config:
                message = f"the head of {worktree} is the snapshot {start}, which does not exist"
                yield findings.of("head-missing", worktree, message, snapshot_id=start)
            continue
        tips = _tips_ahead(examination, newer, config, start)
        if tips:
            yield _head_behind(examination.context, config, start, tips)


def _tips_ahead(
    examination: Examination, descriptors: dict[str, Descriptor], config: WorktreeConfig, start: str | None
) -> list[str]:
    """The newest of the head's descendants that this very worktree has published, one per branch of the history."""
    own = {
        each.snapshot_id
        for each in _descendants(descriptors, start)
        if each.worktree_id == config.worktree_id
        and not each.fetched_from  # its worktree is on another machine
        and each.created_at >= config.created_at  # else it is from an earlier worktree of this name
        and each.doomed_by is None
        and examination.context.home.is_ready(each.snapshot_id, each)
    }
    parents = {descriptors[each].parent_id for each in own}
    return sorted(own - parents)


def _descendants(descriptors: dict[str, Descriptor], start: str | None) -> Iterator[Descriptor]:
    """All descendants of a snapshot; without one, all descendants of snapshots without a parent, and these."""
    children: dict[str | None, list[Descriptor]] = {}
    for each in descriptors.values():
        children.setdefault(each.parent_id, []).append(each)
    seen, waiting = {start}, [start]
    while waiting:
        for each in children.get(waiting.pop(), ()):
            if each.snapshot_id not in seen:
                seen.add(each.snapshot_id)
                waiting.append(each.snapshot_id)
                yield each


def _head_behind(context: RepositoryContext, config: WorktreeConfig, start: str | None, tips: list[str]) -> Finding:
    one, worktree = len(tips) == 1, config.worktree_id
    message = f"the head of {worktree} is {start}, but its history continues to {', '.join(tips)}"
    fix = partial(_move_head, context, config, tips[0]) if one else None
    remedy = f"move the head to {tips[0]}; no file of the worktree changes" if one else ""
    return findings.of("head-behind", worktree, message, fix, remedy, head_snapshot_id=start, newest=tips)


def _move_head(context: RepositoryContext, before: WorktreeConfig, snapshot_id: str) -> None:
    worktree = before.worktree_id
    key = DESCRIPTORS.key(snapshot_id)

    def decide(view: View, now: float) -> Decision[None]:
        config, descriptor = settled_config(view, worktree), view.get(key)
        if config != before or descriptor is None or descriptor.doomed_by is not None:
            raise LockConflict(f"{worktree} has changed meanwhile", worktree=worktree)
        moved = msgspec.structs.replace(config, head_snapshot_id=snapshot_id)
        facts = {"worktree_id": worktree, "from": before.head_snapshot_id, "to": snapshot_id}
        entry = context.audit(view, now, "head_repaired", **facts)
        return Decision([Replace(WORKTREES.key(worktree), moved), entry], None)

    context.store.transact([*worktree_keys(worktree), key, context.trail.stream], decide)


def parents(examination: Examination) -> Iterator[Finding]:
    """Missing parents. A collection causes none: it attaches the children to another parent in the same commit."""
    descriptors = examination.descriptors
    for each in descriptors.values():
        parent = each.parent_id
        if parent is None or parent in descriptors or examination.descriptor(parent) is not None:
            continue
        now = examination.descriptor(each.snapshot_id)
        if now is not None and now.parent_id == parent:
            message = f"the parent of the snapshot {each.snapshot_id} is {parent}, which does not exist"
            yield findings.of("parent-missing", each.snapshot_id, message, parent_id=parent)


def references(examination: Examination) -> Iterator[Finding]:
    """References to missing snapshots."""
    for each in referring.references(examination.context):
        message = f"the reference {each.name} names the snapshot {each.snapshot_id}, which does not exist"
        yield from _dangling(examination, "reference-dangling", each.name, message, REFERENCES.key(each.name), each)


def pins(examination: Examination) -> Iterator[Finding]:
    """Pins on missing snapshots."""
    for each in referring.pins(examination.context):
        message = f"the pin {each.pin_id} is on the snapshot {each.snapshot_id}, which does not exist"
        yield from _dangling(examination, "pin-dangling", each.pin_id, message, PINS.key(each.pin_id), each)


Referring = TypeVar("Referring", Reference, Pin)
_REMOVALS = {"reference-dangling": "reference_deleted", "pin-dangling": "pin_removed"}


def _dangling(
    examination: Examination, code: str, subject: str, message: str, key: Key[Referring], found: Referring
) -> Iterator[Finding]:
    """A finding if the snapshot is missing while the reference or pin still exists: else both may have been deleted."""
    if examination.descriptor(found.snapshot_id) is not None:
        return
    document = examination.context.store.read(key)
    if document is not None and document.record == found:
        fix = partial(_delete, examination.context, key, found, _REMOVALS[code])
        yield findings.of(code, subject, message, fix, snapshot_id=found.snapshot_id)


def _delete(context: RepositoryContext, key: Key[Referring], found: Referring, event: str) -> None:
    snapshot = DESCRIPTORS.key(found.snapshot_id)

    def decide(view: View, now: float) -> Decision[None]:
        if view.get(snapshot) is not None or view.get(key) != found:
            return Decision([], None)
        facts = {**msgspec.structs.asdict(found), "because": "there is no such snapshot"}
        return Decision([Delete(key), context.audit(view, now, event, **facts)], None)

    context.store.transact([key, snapshot, context.trail.stream], decide)
