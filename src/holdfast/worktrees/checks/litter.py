"""What dead processes have left behind, and nobody misses."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast.clock import format_duration
from holdfast.errors import LockConflict, NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.worktrees import scratch
from holdfast.worktrees.control import Control
from holdfast.worktrees.doctor import Examination, Finding, Severity

DRAFT_AGE = 3600.0
"""A draft lives for milliseconds. Should its process really have been stopped for longer than this, its
commit fails when it goes on, as if the disk were full: nothing is lost by removing it."""

_DRAFT = re.compile(r"\..+-[0-9a-f]{12}\.tmp", re.ASCII | re.DOTALL)
_PROBE = re.compile(r"\.holdfast-probe-[0-9a-f]{12}", re.ASCII)
_CONTROL = (".jvs", ".holdfast", ".jit", "ledger")
"""Where drafts are written."""
_TREES = ("snapshots", "remnants", "quarantine", "tmp")
"""What is in there is users' content, or in a scratch."""


def scratches(examination: Examination) -> Iterator[Finding]:
    """Scratches whose process is gone; not one that a pending operation still needs."""
    control = examination.control
    left = list(scratch.abandoned(control.places))
    needed = {each.operation_id for each in examination.operations().values()}  # after that: it may end
    for each in left:
        if each.scratch_id in needed or _is_young_and_empty(each.path, examination.now):
            continue
        if not scratch.is_abandoned(each.path):  # when we looked first it was just about to be locked
            continue
        if _explains_a_tree(examination, each.scratch_id.removesuffix(scratch.SWEPT)):
            continue
        who = f"{each.intent.holder_id} ({each.intent.purpose})" if each.intent else "a process"
        yield Finding(
            "scratch-abandoned",
            Severity.WARNING,
            each.scratch_id,
            f"{each.path} was left by {who} that is gone",
            "It takes space. Nothing in it was ever visible, or it was on its way out.",
            "remove it",
            fix=partial(_sweep, control, each.scratch_id),
        )


def _is_young_and_empty(path: Path, now: float) -> bool:
    """Whether somebody may have made it just now, and be about to lock it; if not, it takes no space."""
    if path.name.endswith(scratch.SWEPT):
        return False
    try:
        with Directory.open(path) as directory:
            return not set(directory.names()) - {scratch.LOCK} and now - calls.stat(path).st_mtime < DRAFT_AGE
    except (NotFound, FileNotFoundError):
        return True


def _explains_a_tree(examination: Examination, snapshot_id: str) -> bool:
    """Whether there is an unpublished tree of which nothing but this scratch tells what it is."""
    try:
        with Directory.open(examination.control.places.snapshots) as directory:
            there = directory.status(snapshot_id) is not None
    except NotFound:
        return False
    return there and examination.descriptor(snapshot_id) is None


def _sweep(control: Control, scratch_id: str) -> None:
    if not scratch.sweep(control.places, scratch_id):
        raise LockConflict(f"somebody else is looking at the scratch {scratch_id}", scratch_id=scratch_id)


def drafts(examination: Examination) -> Iterator[Finding]:
    """Files that were to be published, and never were."""
    root = examination.control.places.root
    for name in _CONTROL:
        for path, age in _litter_below(root / name, examination.file_time, is_top=True):
            yield Finding(
                "draft-left",
                Severity.WARNING,
                str(path.relative_to(root)),
                f"{path} was written {format_duration(age)} ago and never published",
                "Its process died. Nobody ever reads it.",
                "remove it",
                fix=partial(_remove, path),
            )


def _litter_below(path: Path, now: float, *, is_top: bool = False) -> Iterator[tuple[Path, float]]:
    try:
        with Directory.open(path) as directory:
            names, below = sorted(directory.names()), set(directory.directories())
            statuses = {each: directory.status(each) for each in names if _is_litter(each)}
    except NotFound:
        return
    for name, status in statuses.items():
        if status is not None and now - status.st_mtime >= DRAFT_AGE:
            yield path / name, now - status.st_mtime
    for name in sorted(below):
        if not (is_top and name in _TREES) and not _is_litter(name):
            yield from _litter_below(path / name, now)


def _is_litter(name: str) -> bool:
    return bool(_DRAFT.fullmatch(name) or _PROBE.fullmatch(name))


def _remove(path: Path) -> None:
    from holdfast.trees import remove_tree

    with Directory.open(path.parent) as directory:
        status = directory.status(path.name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            durable.remove_in(directory, path.name)
            return
    remove_tree(path)
