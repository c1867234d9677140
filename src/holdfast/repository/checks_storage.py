"""Checks of trees, and of the foundations: the audit trail, the clock, the format, the filesystem."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from holdfast import findings
from holdfast.clock import format_duration, parse_instant
from holdfast.errors import (
    AuditChainBroken,
    Corrupt,
    Failure,
    LockConflict,
    NotFound,
    PathEscape,
    Refused,
    StoreRestored,
)
from holdfast.findings import Finding, Severity
from holdfast.fs import calls, durable, probe
from holdfast.fs.directory import (
    Directory,
    failing_to,
    io_failure,
    is_directory,
    make_directories,
    move,
    opened,
    status_at,
)
from holdfast.fs.names import is_safe_name
from holdfast.fs.probe import find_capabilities, network_problems
from holdfast.fs.reserve import LARGE, LARGE_BYTES
from holdfast.leases.rules import WORKTREE_LEASES
from holdfast.repository import payloads
from holdfast.repository.context import FORMAT, FORMAT_VERSION, RepositoryContext
from holdfast.repository.doctor import Examination, names_in
from holdfast.repository.gc import trees_locked
from holdfast.repository.gc_sweep import need_of_all, retire, sweep, untrimmed
from holdfast.repository.retention import effect_of
from holdfast.store.archive import archive_of
from holdfast.store.audit import AuditEntry, AuditReader, check_chain
from holdfast.store.model import Decision, View

MARGIN = 5.0  # how far the clocks of machines that share a repository may differ

_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


def trail(examination: Examination) -> Iterator[Finding]:
    """A broken hash chain of the audit trail."""
    context = examination.context
    try:
        check_chain(context.store, context.trail)
    except AuditChainBroken as broken:
        message = f"the audit trail is broken: {broken.message}"
        yield findings.of("audit-broken", context.trail.stream.name, message, **broken.facts)


def clock(examination: Examination) -> Iterator[Finding]:
    """Times in the future: a clock was set back, or the clocks of two machines differ."""
    now = examination.now
    leases = examination.context.store.scan(WORKTREE_LEASES.leases)
    times = [(f"the lease of {name}", each.record.last_renewed_at) for name, each in leases]
    if examination.descriptors:
        times.append(("the newest snapshot", max(each.created_at for each in examination.descriptors.values())))
    for subject, latest in times:
        try:
            ahead = parse_instant(latest) - now
        except ValueError:
            continue
        if ahead > MARGIN:
            message = f"{subject} is dated {latest}, which is {format_duration(ahead)} in the future"
            yield findings.of("clock-behind", subject, message, ahead=round(ahead, 3))


def repository_format(examination: Examination) -> Iterator[Finding]:
    """An older format than the current one; newer ones are refused on opening."""
    document = examination.context.store.read(FORMAT)
    if document is not None and document.record.version < FORMAT_VERSION:
        message = f"the repository has the format {document.record.version}; the newest is {FORMAT_VERSION}"
        yield findings.of("format-old", str(document.record.version), message)


def site(examination: Examination) -> Iterator[Finding]:
    """Files that are not known to be those of the records, and records that are older than the files."""
    known, path = examination.context.site, str(examination.context.paths.root)
    problem = None if known is None else known.problem()
    if isinstance(problem, StoreRestored):
        yield findings.of("store-restored", path, problem.message, None, problem.hint)
    elif problem is not None:
        yield findings.of("files-unproven", path, problem.message, None, problem.hint, **problem.facts)


def permissions(examination: Examination) -> Iterator[Finding]:
    """Directories of the repository that this user cannot write to, or that every user can."""
    if sys.platform == "win32":
        return
    root = examination.context.paths.root
    for path in _control_directories(root):
        status = status_at(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        where, mode = str(path.relative_to(root)), f"{stat.S_IMODE(status.st_mode):04o}"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            message = f"every user of this machine can write to {path} (mode {mode})"
            yield findings.of(
                "permissions-open", where, message, None, f"'chmod o-w {path}' unless intended", mode=mode
            )
        if not _can_write(status):
            message = f"this user cannot write to {path} (mode {mode}, owner {status.st_uid})"
            yield findings.of("permissions-missing", where, message, mode=mode, owner=status.st_uid)


_CONTROL = (".jvs", ".holdfast", ".jit", "ledger")
_TREES = ("snapshots", "remnants", "quarantine", "tmp")  # a tree has the owners of the captured files
_SAME = -1  # keeps the owner
_EXAMINE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def owners(examination: Examination) -> Iterator[Finding]:
    """Records that belong to root in another user's repository, or to another group in a shared one; and records that
    others may read."""
    if sys.platform == "win32":
        return
    with Directory.open(examination.context.paths.root) as root:
        above = root.own_status()
        for top in _CONTROL:
            with contextlib.suppress(NotFound, PathEscape), root.enter(top) as directory:
                own = directory.own_status()
                assert above is not None  # only Windows has no descriptors of directories
                assert own is not None
                right = above if own.st_uid == 0 else own
                wrong = list(_wrong(root, top, lambda found: found.st_uid == 0)) if right.st_uid else []
                if wrong:
                    message = f"{root.path / wrong[0]} belongs to root, not to the user {right.st_uid}{_more(wrong)}"
                    give = partial(_give, root.path, wrong, right.st_uid, right.st_gid)
                    fix = give if os.geteuid() == 0 else None
                    yield findings.of("owner-wrong", top, message, fix, owner=right.st_uid, count=len(wrong))
                if root.is_shared():
                    yield from _of_other_groups(root, top, above.st_gid, may_give=os.geteuid() == 0)
                if top in _CONTROL[:2] and own.st_mode & _open_to(own) and not own.st_mode & stat.S_IWOTH:
                    message = f"other users can enter {directory.shown} (mode {stat.S_IMODE(own.st_mode):04o})"
                    close = partial(_close, directory.path) if os.geteuid() in (0, own.st_uid) else None
                    yield findings.of("permissions-readable", top, message, close)


def _of_other_groups(root: Directory, top: str, group: int, *, may_give: bool) -> Iterator[Finding]:
    if wrong := list(_wrong(root, top, lambda found: found.st_gid != group)):
        message = f"{root.path / wrong[0]} does not belong to the group {group}{_more(wrong)}"
        give = partial(_give, root.path, wrong, _SAME, group) if may_give else None
        yield findings.of("group-wrong", top, message, give, group=group, count=len(wrong))


def _more(paths: list[str]) -> str:
    return f", and {len(paths) - 1} more" if len(paths) > 1 else ""


def _wrong(
    directory: Directory, name: str, is_wrong: Callable[[os.stat_result], bool], levels: int = 9
) -> Iterator[str]:
    """The paths of the wrong entries at and below `name`, as many levels deep as records go."""
    status = directory.status(name)
    if status is not None and is_wrong(status):
        yield name
    if levels and status is not None and stat.S_ISDIR(status.st_mode) and not (levels == 8 and name in _TREES):
        with contextlib.suppress(Failure), directory.enter(name) as below:
            for each in sorted(below.names()):
                yield from (f"{name}/{path}" for path in _wrong(below, each, is_wrong, levels - 1))


def _give(root: Path, paths: list[str], owner: int, group: int) -> None:
    """Give files and directories to an owner and a group. Skip files with other hard links: they may not be ours."""
    for each in paths:
        path = root / each
        with failing_to("change the owner of", path), Directory.open(root) as top:
            parent, _, name = each.rpartition("/")
            directory = top.beneath(parent) if parent else top
            with directory, opened(name, _EXAMINE, dir_fd=directory.fd) as descriptor:
                found = calls.fstat(descriptor)
                is_wrong = found.st_gid != group if owner == _SAME else found.st_uid == 0
                if is_wrong and (stat.S_ISDIR(found.st_mode) or found.st_nlink == 1):
                    calls.chown(descriptor, owner, group)


def _open_to(own: os.stat_result) -> int:
    """The permissions that nobody needs: those of others and, unless the group may write too, those of the group."""
    return stat.S_IRWXO if own.st_mode & stat.S_IWGRP else stat.S_IRWXO | stat.S_IRWXG


def _close(path: Path) -> None:
    with Directory.open(path) as directory, failing_to("restrict access to", path):
        descriptor = directory.fd or 0
        own = calls.fstat(descriptor)
        calls.chmod(descriptor, stat.S_IMODE(own.st_mode) & ~_open_to(own))


_MADE_AGAIN = tuple(f".jvs/{name}" for name in ("cache", "guards", "index", "reserve", "tmp", "waits"))
"""Directories whose content is recreated when needed: to remove a link in their place loses nothing."""


def links(examination: Examination) -> Iterator[Finding]:
    """Symbolic links in place of our own directories and files, in the top levels, which have few entries."""
    with Directory.open(examination.context.paths.root) as root:
        linked = [name for name in (".jvs", ".holdfast", ".jit", "ledger", "worktrees") if root.is_link(name)]
        for top in (".jvs", ".holdfast", ".jit"):
            with contextlib.suppress(NotFound, PathEscape), root.enter(top) as directory:
                linked += [f"{top}/{name}" for name in sorted(directory.names()) if directory.is_link(name)]
        for name in linked:
            fix = partial(_remove_link, examination.context.paths.root, name) if name in _MADE_AGAIN else None
            remedy = "remove the link, not its target; the directory is created when it is needed" if fix else ""
            yield findings.of("control-linked", name, f"{root.where(name)} is a symbolic link", fix, remedy)


def _remove_link(root: Path, name: str) -> None:
    top, _, name = name.rpartition("/")
    with Directory.open(root / top) as directory:
        if directory.is_link(name):
            durable.remove_in(directory, name)


def _control_directories(root: Path) -> Iterator[Path]:
    """`.jvs`, the directories in it, and the directory of intents."""
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
    root = examination.context.paths.root
    try:
        left = calls.free_space(root)
    except OSError as error:
        raise io_failure("examine", root, error) from error
    if left < LARGE * LARGE_BYTES:
        message = f"the disk of the repository is full: {left >> 10} KiB are left"
        yield findings.of("disk-full", str(root), message, bytes_left=left)


def filesystem(examination: Examination) -> Iterator[Finding]:
    """A filesystem on which the promises do not hold, judged by its kind; with `strict`, by testing it."""
    root = examination.context.paths.root
    served = examination.context.store.files is None
    if examination.strict:
        troubles = find_capabilities(root / ".jvs").troubles(records_elsewhere=served)
    else:
        troubles = [] if served else network_problems(root)
    if troubles:
        message = f"the repository is on an unsafe filesystem: {'; '.join(troubles)}"
        found = findings.of("filesystem-unsafe", str(root), message, troubles=troubles)
        yield found._replace(severity=Severity.WARNING) if troubles == [probe.JUICEFS_UNKNOWN] else found


def orphans(examination: Examination) -> Iterator[Finding]:
    """Trees without a descriptor.

    A publisher holds a scratch directory of the same id from before its tree appears until its descriptor exists. So
    this reads trees, then scratch directories, then descriptors: a tree that has neither will never get a descriptor.
    The audit trail distinguishes snapshots that were never published from lost ones. A pending operation may have to
    be finished first, so nothing is judged until then.
    """
    context = examination.context
    trees = names_in(context.paths.snapshots)
    making = {each for found in payloads.in_use(context.paths) for each in (found.scratch_id, *found.uses)}
    orphaned = [
        each
        for each in trees
        if _ID.fullmatch(each)
        and each not in making
        and examination.descriptor(each) is None
        and is_directory(context.paths.tree(each))
    ]
    if orphaned and not examination.operations():
        last, needed = last_events(context, set(orphaned)), None
        archived = archive_of(context.store, context.trail.stream.name) is not None
        with contextlib.suppress(Corrupt):  # the needs of a tree cannot be read: all trees may be needed
            needed = need_of_all(context.paths)
        for each in orphaned:
            is_needed = needed is None or each in needed
            yield _orphan(context, each, last.get(each), is_needed=is_needed, archived=archived)
    for name in trees:
        if not _is_ours(examination, name):
            message = f"{context.paths.snapshots / name!s:.300} is not the tree of a snapshot"
            yield findings.of("snapshot-directory-strange", name, message)


def _orphan(
    context: RepositoryContext, snapshot_id: str, last: AuditEntry | None, *, is_needed: bool, archived: bool
) -> Finding:
    """The finding about a tree without a descriptor, judged by the last event that mentions it. If the trail is
    `archived`, that event may be missing, so even an incomplete tree may have been published."""
    paths, tree = context.paths, context.paths.tree(snapshot_id)
    if last is not None and not effect_of(last).deletes_snapshot:
        message = f"the snapshot {snapshot_id} was published and never deleted, but its descriptor is gone"
        return findings.of("descriptor-missing", snapshot_id, message)
    ready = context.home.is_here(snapshot_id)
    if last is not None or payloads.is_left(paths, snapshot_id) or not (ready or archived):
        message = f"{tree} belongs to no snapshot: its process died before it was published, or it was deleted"
        remedy = "remove it, except for what other snapshots need" if is_needed else ""
        return findings.of("tree-orphaned", snapshot_id, message, partial(_retire, context, snapshot_id), remedy)
    form = "a complete" if ready else "an incomplete"
    message, target = f"{tree} is {form} tree of unknown origin", paths.quarantine / snapshot_id
    if is_needed:
        return findings.of("tree-unknown", snapshot_id, message, quarantine=None)
    fix, remedy = partial(_quarantine, context, snapshot_id, target), f"move it to {target}, where you can examine it"
    return findings.of("tree-unknown", snapshot_id, message, fix, remedy, quarantine=str(target))


def _quarantine(context: RepositoryContext, snapshot_id: str, target: Path) -> None:
    def decide(view: View, now: float) -> Decision[None]:
        facts = {"tree": snapshot_id, "moved_to": str(target)}
        return Decision([context.audit(view, now, "tree_quarantined", **facts)], None)

    make_directories(target.parent)
    move(context.paths.tree(snapshot_id), target)
    context.store.transact([context.trail.stream], decide)


def last_events(context: RepositoryContext, ids: set[str]) -> dict[str, AuditEntry]:
    """The last event in the audit trail that mentions each of these snapshots, if any does."""
    last = dict[str, AuditEntry]()
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
    """Retire a tree, record that, and remove the parts of it that no tree needs."""

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([context.audit(view, now, "tree_removed", tree=snapshot_id)], None)

    if status_at(context.paths.tree(snapshot_id)) is not None:
        retire(context, [snapshot_id])
        context.store.transact([context.trail.stream], decide)
        with contextlib.suppress(LockConflict, Corrupt, Refused):  # then the check `remnants` finds it
            _sweep(context)


def remnants(examination: Examination) -> Iterator[Finding]:
    """Retired trees that have more than other trees need."""
    context = examination.context
    if not untrimmed(context.paths):
        return
    try:
        with trees_locked(context):  # no collection runs, and none begins
            found = untrimmed(context.paths)
    except LockConflict:
        return
    for name, need in found.items():
        why = "has more than other snapshots need" if need else "no other snapshot needs it"
        message = f"{context.paths.remnants / name} is left over from a deleted snapshot, and {why}"
        yield findings.of("remnant-excessive", name, message, partial(_sweep, context))


def _sweep(context: RepositoryContext) -> None:
    with trees_locked(context):
        sweep(context)


def incomplete(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose tree is missing or incomplete."""
    for snapshot_id, descriptor in examination.descriptors.items():
        if descriptor.clone != examination.context.clone:
            continue  # its content is in the clone that took it
        if descriptor.doomed_by is None and not examination.context.home.is_ready(snapshot_id, descriptor):
            now = examination.descriptor(snapshot_id)  # a collection marks before it retires a tree
            if now is not None and now.doomed_by is None:
                message = f"the tree of the snapshot {snapshot_id} is missing, or has no .READY"
                yield findings.of("snapshot-incomplete", snapshot_id, message)


def damaged(examination: Examination) -> Iterator[Finding]:
    """Snapshots whose content has changed. Checks the list of files; with `strict`, every file."""
    context = examination.context
    for done, (snapshot_id, descriptor) in enumerate(examination.descriptors.items(), 1):
        if examination.progress is not None:
            examination.progress(done, len(examination.descriptors))
        if descriptor.doomed_by is not None or not context.home.is_here(snapshot_id):
            continue
        problems = list(context.home.verify(descriptor, every_file=examination.strict))
        if not problems:
            continue
        now = examination.descriptor(snapshot_id)
        if now is not None and now.doomed_by is None:
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            message = f"the content of the snapshot {snapshot_id} has changed: {problems[0]}{more}"
            shown = [str(each) for each in problems[:20]]
            yield findings.of("snapshot-damaged", snapshot_id, message, problems=shown, count=len(problems))


def _is_ours(examination: Examination, name: str) -> bool:
    """Whether the entry is, or was, the tree of a snapshot."""
    if _ID.fullmatch(name):
        status = status_at(examination.context.paths.tree(name))
        return status is None or stat.S_ISDIR(status.st_mode)
    return is_safe_name(name) and examination.descriptor(name) is not None
