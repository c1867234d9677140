"""What everything rests on: the audit trail, the clock, the format, the filesystem, who may write."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.clock import format_duration, parse_instant
from holdfast.errors import AuditChainBroken, NotFound
from holdfast.fs import calls, probe
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.probe import find_capabilities, network_troubles
from holdfast.fs.reserve import LARGE, LARGE_BYTES
from holdfast.store.audit import check_chain
from holdfast.store.files import FileStore
from holdfast.worktrees.checks.leases import LEASES
from holdfast.worktrees.doctor import Examination, Finding, Severity
from holdfast.worktrees.records import FORMAT, FORMAT_VERSION

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
