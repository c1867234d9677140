"""What everything rests on: the audit trail, the clock, the format, the filesystem, who may write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from holdfast.clock import format_duration, parse_instant
from holdfast.errors import AuditChainBroken, Corrupt, LockConflict, NotFound, Refused
from holdfast.fs import calls, probe
from holdfast.fs.directory import Directory, io_failure, make_directories, move
from holdfast.fs.names import is_safe_name
from holdfast.fs.probe import find_capabilities, network_troubles
from holdfast.fs.reserve import LARGE, LARGE_BYTES
from holdfast.repository import payloads
from holdfast.repository.checks_leftovers import LEASES
from holdfast.repository.context import RepositoryContext, is_ready
from holdfast.repository.doctor import Examination, Finding, Severity
from holdfast.repository.gc import collector_locked
from holdfast.repository.gc_sweep import need_of_all, retire, sweep, untrimmed
from holdfast.repository.records import FORMAT, FORMAT_VERSION
from holdfast.store.audit import AuditReader, check_chain
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, View
from holdfast.trees.retained_dirs import Need

MARGIN = 5.0
"""So far clocks of machines that share a repository may be apart."""


def trail(examination: Examination) -> Iterator[Finding]:
    """The chain of the audit trail."""
    control = examination.control
    try:
        check_chain(control.store, control.trail)
    except AuditChainBroken as broken:
        yield Finding(
            "audit-broken",
            Severity.ERROR,
            control.trail.stream.name,
            f"the audit trail is broken: {broken.message}",
            "Somebody changed it by hand, or the disk did. What it says from there on cannot be trusted.",
            "nothing: a trail that is repaired proves nothing; compare it with a copy from before",
            facts=broken.facts,
        )


def clock(examination: Examination) -> Iterator[Finding]:
    """Times in the future: a clock was set back, or those of two machines differ."""
    now = examination.now
    for what, told in _latest_times(examination):
        try:
            ahead = parse_instant(told) - now
        except ValueError:
            continue
        if ahead > MARGIN:
            yield Finding(
                "clock-behind",
                Severity.WARNING,
                what,
                f"{what} is of {told}, which is {format_duration(ahead)} in the future",
                "The clock of this machine was set back, or another one's is ahead. No work is at risk; but "
                "locks seem to last longer, and what is to be kept for some time is kept for longer.",
                "nothing: set the clocks, best by a time server",
                facts={"ahead": round(ahead, 3)},
            )


def _latest_times(examination: Examination) -> Iterator[tuple[str, str]]:
    control = examination.control
    for worktree, document in control.store.scan(LEASES):
        yield f"the lock of {worktree}", document.record.last_renewed_at
    newest = max((each.created_at for each in examination.descriptors.values()), default=None)
    if newest is not None:
        yield "the newest snapshot", newest


def repository_format(examination: Examination) -> Iterator[Finding]:
    """An older format than the one that this program writes; newer ones are refused from the start."""
    document = examination.control.store.read(FORMAT)
    if document is not None and document.record.version < FORMAT_VERSION:
        yield Finding(
            "format-old",
            Severity.NOTE,
            str(document.record.version),
            f"the repository has the format {document.record.version}; the newest is {FORMAT_VERSION}",
            "It works as it is.",
            "nothing",
        )


def permissions(examination: Examination) -> Iterator[Finding]:
    """Directories of the repository that we cannot write, or that anybody can."""
    if sys.platform == "win32":
        return
    root = examination.control.places.root
    for path in _control_directories(root):
        with Directory.open(path.parent) as parent:
            status = parent.status(path.name)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        mode = stat.S_IMODE(status.st_mode)
        where = str(path.relative_to(root))
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield Finding(
                "permissions-open",
                Severity.WARNING,
                where,
                f"everybody on this machine can write into {path} (mode {mode:04o})",
                "Anybody can delete or forge what is kept there.",
                f"nothing: 'chmod o-w {path}' if that is not meant",
                facts={"mode": f"{mode:04o}"},
            )
        if not _can_write(status):
            yield Finding(
                "permissions-missing",
                Severity.ERROR,
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
    """A disk on which nothing more can be kept."""
    root = examination.control.places.root
    try:
        left = calls.free_space(root)
    except OSError as error:
        raise io_failure("look at", root, error) from error
    if left < LARGE * LARGE_BYTES:
        yield Finding(
            "disk-full",
            Severity.WARNING,
            str(root),
            f"the disk that the repository is on is full: {left >> 10} KiB are left",
            "Snapshots fail, and so does asking for a lock. What is there is safe. Locks can be renewed and "
            "released, and garbage can be collected, with what was set aside for that.",
            "nothing: 'holdfast gc plan' shows what may be deleted, or make room elsewhere on the disk",
            facts={"bytes_left": left},
        )


def filesystem(examination: Examination) -> Iterator[Finding]:
    """A filesystem on which the promises do not hold: by its kind, with `strict` by trying it."""
    root = examination.control.places.root
    served = not isinstance(examination.control.store, FileStore)
    if examination.strict:
        troubles = find_capabilities(root / ".jvs").troubles(records_elsewhere=served)
    else:
        troubles = [] if served else network_troubles(root)
    if troubles:
        yield Finding(
            "filesystem-unsafe",
            Severity.WARNING if troubles == [probe.UNKNOWN] else Severity.ERROR,
            str(root),
            f"the repository is on a filesystem that cannot be trusted with it: {'; '.join(troubles)}",
            "Two processes may hold one lock, or what was acknowledged may be lost in a power cut.",
            "nothing: move the repository to a local filesystem, or use one of the server-backed stores",
            facts={"troubles": troubles},
        )


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
    making = {each.scratch_id for each in payloads.in_use(control.places)}
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


def _needed(control: RepositoryContext) -> Need | None:
    """What trees need of each other; None if one of them cannot say."""
    try:
        return need_of_all(control.places)
    except Corrupt:
        return None


def _orphan(control: RepositoryContext, snapshot_id: str, event: str | None, *, is_needed: bool) -> Finding:
    """What a tree without a descriptor is, by the last event that the trail has of it."""
    if event in _GONE:
        return _not_missed(control, snapshot_id, is_needed=is_needed)
    if event is not None:
        return _lost(snapshot_id)
    never_published = payloads.is_left(control.places, snapshot_id) or not is_ready(
        control.places, snapshot_id
    )
    if never_published:
        return _not_missed(control, snapshot_id, is_needed=is_needed)
    return _unknown(control, snapshot_id, is_needed=is_needed)


def _unknown(control: RepositoryContext, snapshot_id: str, *, is_needed: bool) -> Finding:
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


def _quarantine(control: RepositoryContext, snapshot_id: str, place: Path) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        facts = {"tree": snapshot_id, "moved_to": str(place)}
        return Decision([control.audit(view, now, "tree_quarantined", **facts)], None)

    make_directories(place.parent)
    move(control.places.tree(snapshot_id), place)
    control.store.transact([control.trail.stream], decide)


def _not_missed(control: RepositoryContext, snapshot_id: str, *, is_needed: bool) -> Finding:
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


def _retire(control: RepositoryContext, snapshot_id: str) -> None:
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


def _sweep(control: RepositoryContext) -> None:
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
    from holdfast.trees.verify import verify, verify_manifest

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


def _names(control: RepositoryContext) -> list[str]:
    try:
        with Directory.open(control.places.snapshots) as directory:
            return sorted(directory.names())
    except NotFound:
        return []


def _is_directory(control: RepositoryContext, name: str) -> bool:
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


def _is_there(control: RepositoryContext, name: str) -> bool:
    with Directory.open(control.places.snapshots) as directory:
        return directory.status(name) is not None
