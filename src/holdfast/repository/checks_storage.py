"""Checks of trees and of what all rests on: the audit trail, the clock, the format, the filesystem."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from holdfast import findings
from holdfast.clock import format_duration, parse_instant
from holdfast.errors import AuditChainBroken, Corrupt, LockConflict, NotFound, Refused
from holdfast.findings import Finding, Severity
from holdfast.fs import calls, probe
from holdfast.fs.directory import Directory, io_failure, make_directories, move
from holdfast.fs.names import is_safe_name
from holdfast.fs.probe import find_capabilities, network_problems
from holdfast.fs.reserve import LARGE, LARGE_BYTES
from holdfast.repository import payloads
from holdfast.repository.checks_leftovers import LEASES
from holdfast.repository.context import FORMAT, FORMAT_VERSION, RepositoryContext, is_ready
from holdfast.repository.doctor import Examination, is_directory, names_in, status_of
from holdfast.repository.gc import collector_locked
from holdfast.repository.gc_sweep import need_of_all, retire, sweep, untrimmed
from holdfast.repository.retention import effect_of
from holdfast.store.audit import AuditEntry, AuditReader, check_chain
from holdfast.store.model import Decision, View
from holdfast.trees.retained_dirs import Need

MARGIN = 5.0  # how far the clocks of machines that share a repository may differ

_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


def trail(examination: Examination) -> Iterator[Finding]:
    """The chain of the audit trail."""
    context = examination.context
    try:
        check_chain(context.store, context.trail)
    except AuditChainBroken as broken:
        yield Finding(
            "audit-broken",
            context.trail.stream.name,
            f"the audit trail is broken: {broken.message}",
            "It was changed by hand, or by the disk. From there on it cannot be trusted.",
            "nothing: a repaired trail proves nothing; compare it with a backup",
            facts=broken.facts,
        )


def clock(examination: Examination) -> Iterator[Finding]:
    """Times in the future: a clock was set back, or the clocks of two machines differ."""
    now = examination.now
    for subject, latest in _latest_times(examination):
        try:
            ahead = parse_instant(latest) - now
        except ValueError:
            continue
        if ahead > MARGIN:
            yield findings.warning(
                "clock-behind",
                subject,
                f"{subject} is of {latest}, which is {format_duration(ahead)} in the future",
                "The clock of this machine was set back, or another one's is ahead. No work is at risk, but "
                "leases and retention last longer.",
                "nothing: set the clocks, best by a time server",
                facts={"ahead": round(ahead, 3)},
            )


def _latest_times(examination: Examination) -> Iterator[tuple[str, str]]:
    context = examination.context
    for worktree, document in context.store.scan(LEASES):
        yield f"the lease of {worktree}", document.record.last_renewed_at
    newest = max((each.created_at for each in examination.descriptors.values()), default=None)
    if newest is not None:
        yield "the newest snapshot", newest


def repository_format(examination: Examination) -> Iterator[Finding]:
    """An older format than the current one; newer ones are refused on opening."""
    document = examination.context.store.read(FORMAT)
    if document is not None and document.record.version < FORMAT_VERSION:
        yield findings.note(
            "format-old",
            str(document.record.version),
            f"the repository has the format {document.record.version}; the newest is {FORMAT_VERSION}",
            "It works as it is.",
            "nothing",
        )


def permissions(examination: Examination) -> Iterator[Finding]:
    """Directories of the repository that this user cannot write, or that anybody can."""
    if sys.platform == "win32":
        return
    root = examination.context.places.root
    for path in _control_directories(root):
        status = status_of(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        mode = stat.S_IMODE(status.st_mode)
        where = str(path.relative_to(root))
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield findings.warning(
                "permissions-open",
                where,
                f"everybody on this machine can write into {path} (mode {mode:04o})",
                "Anybody can delete or forge its content.",
                f"nothing: 'chmod o-w {path}' if that is not meant",
                facts={"mode": f"{mode:04o}"},
            )
        if not _can_write(status):
            yield Finding(
                "permissions-missing",
                where,
                f"this user cannot write into {path} (mode {mode:04o}, owner {status.st_uid})",
                "Commands that change something there will fail.",
                "nothing: only its owner or an administrator can change that",
                facts={"mode": f"{mode:04o}", "owner": status.st_uid},
            )


def _control_directories(root: Path) -> Iterator[Path]:
    """`.jvs` and what is directly in it, and the directory of intents."""
    yield root / ".jvs"
    try:
        with Directory.open(root / ".jvs") as directory:
            names = directory.directories()
    except NotFound:
        return
    for name in names:
        yield root / ".jvs" / name
    with Directory.open(root) as directory:
        if directory.status(".holdfast") is not None:
            yield root / ".holdfast"


def _can_write(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        raise NotImplementedError
    user = os.geteuid()
    if user == 0:
        return True
    needed = stat.S_IWUSR | stat.S_IXUSR
    if status.st_uid != user:
        ours = status.st_gid in (os.getegid(), *os.getgroups())
        needed = stat.S_IWGRP | stat.S_IXGRP if ours else stat.S_IWOTH | stat.S_IXOTH
    return status.st_mode & needed == needed


def disk(examination: Examination) -> Iterator[Finding]:
    """A full disk."""
    root = examination.context.places.root
    try:
        left = calls.free_space(root)
    except OSError as error:
        raise io_failure("look at", root, error) from error
    if left < LARGE * LARGE_BYTES:
        yield findings.warning(
            "disk-full",
            str(root),
            f"the disk that the repository is on is full: {left >> 10} KiB are left",
            "Snapshots fail, and so does acquiring a lease. What exists is safe. Leases can be renewed and "
            "released, and garbage can be collected, out of the reserve.",
            "nothing: 'holdfast gc plan' shows what may be deleted; or free space elsewhere on the disk",
            facts={"bytes_left": left},
        )


def filesystem(examination: Examination) -> Iterator[Finding]:
    """A filesystem on which the promises do not hold: by its kind, with `strict` by trying it."""
    root = examination.context.places.root
    served = examination.context.store.files is None
    if examination.strict:
        troubles = find_capabilities(root / ".jvs").troubles(records_elsewhere=served)
    else:
        troubles = [] if served else network_problems(root)
    if troubles:
        yield Finding(
            "filesystem-unsafe",
            str(root),
            f"the repository is on a filesystem that cannot be trusted with it: {'; '.join(troubles)}",
            "Two processes may hold one lock, or acknowledged writes may be lost in a power cut.",
            "nothing: move the repository to a local filesystem, or use one of the server-backed stores",
            facts={"troubles": troubles},
            severity=Severity.WARNING if troubles == [probe.JUICEFS_UNKNOWN] else Severity.ERROR,
        )


def orphans(examination: Examination) -> Iterator[Finding]:
    """Trees without a descriptor.

    A publisher holds a scratch of the same id from before its tree appears until its descriptor exists. So
    this reads trees, then scratches, then descriptors: a tree that has neither will never get one. The audit
    trail tells a snapshot that was never published from one that is lost. While an operation is pending
    nothing is judged: it may have to be finished first.
    """
    context = examination.context
    trees = names_in(context.places.snapshots)
    making = {each.scratch_id for each in payloads.in_use(context.places)}
    orphaned = [
        each
        for each in trees
        if _ID.fullmatch(each)
        and each not in making
        and examination.descriptor(each) is None
        and is_directory(context.places.tree(each))
    ]
    if orphaned and not examination.operations():
        last = _last_events(context, orphaned)
        needed = _needed(context)
        for each in orphaned:
            yield _orphan(context, each, last.get(each), is_needed=needed is None or each in needed)
    for name in trees:
        if not _is_ours(examination, name):
            yield findings.warning(
                "snapshot-directory-strange",
                name,
                f"{context.places.snapshots / name!s:.300} is not the tree of a snapshot",
                "Holdfast did not create it, and does not use it.",
                "nothing: it is not ours to remove",
            )


def _needed(context: RepositoryContext) -> Need | None:
    """What trees need of each other; None if a tree cannot say."""
    try:
        return need_of_all(context.places)
    except Corrupt:
        return None


def _orphan(context: RepositoryContext, snapshot_id: str, last: AuditEntry | None, *, is_needed: bool) -> Finding:
    """What a tree without a descriptor is, by the last event about it."""
    places = context.places
    if last is not None and not effect_of(last).deletes_snapshot:
        return _lost(snapshot_id)
    if last is not None or payloads.is_left(places, snapshot_id) or not is_ready(places, snapshot_id):
        return _not_missed(context, snapshot_id, is_needed=is_needed)
    return _unknown(context, snapshot_id, is_needed=is_needed)


def _unknown(context: RepositoryContext, snapshot_id: str, *, is_needed: bool) -> Finding:
    target = context.places.quarantine / snapshot_id
    return findings.warning(
        "tree-unknown",
        snapshot_id,
        f"{context.places.tree(snapshot_id)} is a complete tree of unknown origin",
        "It is not visible. Perhaps it was copied here, or its descriptor and the audit trail were lost.",
        "nothing: other snapshots may share its directories"
        if is_needed
        else f"move it to {target}, where you can examine it",
        fix=None if is_needed else partial(_quarantine, context, snapshot_id, target),
        facts={"quarantine": None if is_needed else str(target)},
    )


def _quarantine(context: RepositoryContext, snapshot_id: str, target: Path) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        facts = {"tree": snapshot_id, "moved_to": str(target)}
        return Decision([context.audit(view, now, "tree_quarantined", **facts)], None)

    make_directories(target.parent)
    move(context.places.tree(snapshot_id), target)
    context.store.transact([context.trail.stream], decide)


def _not_missed(context: RepositoryContext, snapshot_id: str, *, is_needed: bool) -> Finding:
    return findings.warning(
        "tree-orphaned",
        snapshot_id,
        f"{context.places.tree(snapshot_id)} belongs to no snapshot: its process died before it was "
        "published, or it was deleted",
        "It takes space. It is not visible, and the audit trail shows that it is not needed.",
        "remove it, but for what other snapshots need of it" if is_needed else "remove it",
        fix=partial(_retire, context, snapshot_id),
    )


def _lost(snapshot_id: str) -> Finding:
    return Finding(
        "descriptor-missing",
        snapshot_id,
        f"the snapshot {snapshot_id} was published and never deleted, but its descriptor is gone",
        "Its files still exist, but it cannot be seen or restored.",
        "nothing: restore the descriptor from a backup; its tree is kept as it is",
    )


def _last_events(context: RepositoryContext, snapshot_ids: Sequence[str]) -> dict[str, AuditEntry]:
    """The last event in the audit trail that mentions each of these snapshots, if one does."""
    ids, last = set(snapshot_ids), dict[str, AuditEntry]()
    reader = AuditReader(context.store, context.trail, verified=True)  # a forged entry proves nothing
    for entry in reader.read():
        last.update(dict.fromkeys(ids.intersection(_texts(entry.facts)), entry))
    return last


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _retire(context: RepositoryContext, snapshot_id: str) -> None:
    """Retire a tree, remove what no tree needs of it, and record that."""

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([context.audit(view, now, "tree_removed", tree=snapshot_id)], None)

    if status_of(context.places.tree(snapshot_id)) is not None:
        retire(context, [snapshot_id])
        context.store.transact([context.trail.stream], decide)
        with contextlib.suppress(LockConflict, Corrupt, Refused):  # then the check of retired trees finds it
            _sweep(context)


def remnants(examination: Examination) -> Iterator[Finding]:
    """Retired trees that have more than other trees need."""
    context = examination.context
    if not untrimmed(context.places):
        return
    try:
        with collector_locked(context):  # no collection runs, and none begins
            found = untrimmed(context.places)
    except LockConflict:
        return
    for name, need in found.items():
        why = "has more than other snapshots need" if need else "no other snapshot needs it"
        yield findings.warning(
            "remnant-excessive",
            name,
            f"{context.places.remnants / name} is left of a deleted snapshot, and {why}",
            "It takes space. A collection was not finished, or the trees that needed it were removed.",
            "remove what is not needed",
            fix=partial(_sweep, context),
        )


def _sweep(context: RepositoryContext) -> None:
    with collector_locked(context):
        sweep(context)


def incomplete(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose tree is missing or incomplete."""
    for snapshot_id, descriptor in examination.descriptors.items():
        if descriptor.doomed_by is None and not is_ready(examination.context.places, snapshot_id):
            now = examination.descriptor(snapshot_id)  # a collection marks before it retires a tree
            if now is not None and now.doomed_by is None:
                yield Finding(
                    "snapshot-incomplete",
                    snapshot_id,
                    f"the tree of the snapshot {snapshot_id} is missing, or has no .READY",
                    "It cannot be restored, and is not shown. It was complete when it was published.",
                    "nothing: restore its directory from a backup",
                )


def damaged(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose content has changed: always the list of files, with `strict` every file."""
    from holdfast.trees.verify import verify, verify_manifest

    context = examination.context
    check = verify if examination.strict else verify_manifest
    for snapshot_id, descriptor in examination.descriptors.items():
        if descriptor.doomed_by is not None or not is_ready(context.places, snapshot_id):
            continue
        problems = list(check(context.places.tree(snapshot_id), descriptor.payload_hash))
        if not problems:
            continue
        now = examination.descriptor(snapshot_id)
        if now is not None and now.doomed_by is None:
            yield Finding(
                "snapshot-damaged",
                snapshot_id,
                f"the content of the snapshot {snapshot_id} has changed: {problems[0]}"
                + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""),
                "The disk or somebody has changed it. Restoring it would give wrong content.",
                "nothing: restore what is missing or changed from a backup",
                facts={"problems": [str(each) for each in problems[:20]], "count": len(problems)},
            )


def _is_ours(examination: Examination, name: str) -> bool:
    """Whether it is, or was, the tree of a snapshot."""
    if _ID.fullmatch(name):
        status = status_of(examination.context.places.tree(name))
        return status is None or stat.S_ISDIR(status.st_mode)
    return is_safe_name(name) and examination.descriptor(name) is not None
