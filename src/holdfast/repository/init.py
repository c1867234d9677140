"""Making a repository: `.jvs/` and `main/` in a directory that is empty, or that is a repository already.

1. The store is opened, if it is on a server: one that does not work leaves nothing behind. The directory is
   made, and what its filesystem does is tried out: an unsafe one is refused.
2. One process at a time from here on: a kernel lock on `.jvs/guards/init.lock`.
3. `main/` and `worktrees/` are made; what is imported is copied into a scratch and renamed to `main/`.
4. One transaction makes the format, the record of `main` and the first entry of the audit trail.
   Commit point: before it there is no repository, whatever lies around.

Killed anywhere before the fourth step, the same command goes on from what it finds.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, NestedRepository, NotFound, Refused, UsageFailure
from holdfast.fs import calls
from holdfast.fs.directory import Directory, io_failure, is_there, make_directories, move
from holdfast.fs.probe import Capabilities, require_safe
from holdfast.leases.service import LeaseService
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import RepositoryContext, RepositoryPaths
from holdfast.repository.payloads import scratch
from holdfast.repository.records import (
    FORMAT,
    FORMAT_VERSION,
    MAIN,
    WORKTREES,
    Isolation,
    RepositoryFormat,
    WorktreeConfig,
)
from holdfast.repository.repository import checked_format
from holdfast.store.addresses import remember_secrets
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Create, Decision, Store, View
from holdfast.store.open import (
    CONFIG,
    address_of,
    configure_store,
    is_in_files,
    open_address,
    open_store,
)

CONTROL, WORKTREES_DIRECTORY = ".jvs", "worktrees"
_OURS = frozenset([CONTROL, ".holdfast", ".jit", MAIN, WORKTREES_DIRECTORY])
_PROBE = ".holdfast-probe-"  # what somebody else tries out in it at this moment
_OURS_INSIDE = frozenset(["guards", "tmp", "worktrees", "audit", "cache", "snapshots", "remnants", "reserve"])


class Initialised(NamedTuple):
    """What came of it. `filesystem` is None if nothing had to be done."""

    root: Path
    format: RepositoryFormat
    created: bool
    filesystem: Capabilities | None
    imported: int | None = None
    """How many files were taken in, if a directory was imported."""


def initialise(
    root: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    store: str | None = None,
    nested: bool = False,
    probe: Callable[[Path], Capabilities] | None = None,
) -> Initialised:
    """Make a repository in the directory `root`, with the content of `source` in `main/`, if it is given.

    The source is copied and stays as it is. A directory that is a repository already is left alone; one that
    is in a repository is refused, unless it is in a worktree of it and `nested` says that this is meant.
    `store` is the address of a server that keeps the records, if they are not to be in files; `probe` finds
    out what the filesystem does, and refuses one that is not safe: `require_safe`, unless another is given.
    """
    places = RepositoryPaths(Path(os.path.abspath(root)))
    imported_from = None if source is None else _checked_source(Path(os.path.abspath(source)), places.root)
    if store is not None:
        remember_secrets(store)
    known = _known_format(places.root)
    if known is None:
        known = _require_free_directory(places, nested=nested)
    if known is None and store is not None:
        known = _require_free_store(places.root, store)
    if known is None:
        make_directories(places.root)
        served = not is_in_files(address_of(places.root, store))
        capabilities = probe(places.root) if probe else require_safe(places.root, records_elsewhere=served)
        make_directories(places.guards)
        with FileLocker().lock_exclusive(places.guards / "init.lock"):
            known = _known_format(places.root)
            if known is None:
                if store is not None:
                    configure_store(places.root, store, check=False)
                return _initialise(places, imported_from, capabilities)
    if store is not None and address_of(places.root, store) != address_of(places.root):
        raise AlreadyExists(
            f"{places.root} is a repository already, whose records are kept in {address_of(places.root)}",
            hint="Move them: 'holdfast migrate --to ADDRESS'.",
            path=str(places.root),
        )
    if source is not None:
        raise AlreadyExists(
            f"{places.root} is a repository already: a directory is imported when it is made",
            hint="Copy the files into a worktree of it, or import into a new repository.",
            path=str(places.root),
        )
    return Initialised(places.root, known, False, None)


def _initialise(places: RepositoryPaths, source: Path | None, capabilities: Capabilities) -> Initialised:
    store = open_store(places.root)
    trail = AuditTrail()
    control = RepositoryContext(places, store, trail, LeaseService(store, trail))
    make_directories(places.worktrees)
    make_directories(places.snapshots)
    files = None
    if source is None:
        make_directories(places.payload(MAIN))
    else:
        files = _import(control, source)
    record = _commit(control, source)
    places.reserve.fill()
    return Initialised(places.root, record, True, capabilities, files)


def _commit(control: RepositoryContext, source: Path | None) -> RepositoryFormat:
    """Make it a repository, all at once."""
    repository_id = str(uuid.uuid4())

    def decide(view: View, now: float) -> Decision[RepositoryFormat]:
        at = format_instant(now)
        record = RepositoryFormat(version=FORMAT_VERSION, repository_id=repository_id, created_at=at)
        config = WorktreeConfig(
            worktree_id=MAIN,
            isolation=Isolation.EXCLUSIVE,
            created_at=at,
            base_snapshot_id=None,
            head_snapshot_id=None,
        )
        facts = {"repository_id": repository_id, "imported_from": str(source) if source else None}
        entry = control.audit(view, now, "repository_created", **facts)
        return Decision([Create(FORMAT, record), Create(WORKTREES.key(MAIN), config), entry], record)

    return control.store.transact([FORMAT, WORKTREES.key(MAIN), control.trail.stream], decide).result


def _require_free_directory(places: RepositoryPaths, *, nested: bool) -> RepositoryFormat | None:
    """Refuse a directory in which no repository can be made. Somebody may be making one just now: that is
    waited for, and is what there is then."""
    try:
        refuse_nested(places.root, nested=nested)
        _check_that_it_is_free(places.root)
    except (AlreadyExists, Refused):
        if _mode(places.guards / "init.lock") is None:
            raise
        with FileLocker().lock_exclusive(places.guards / "init.lock"):
            known = _known_format(places.root)
        if known is None:
            raise
        return known
    return None


def _require_free_store(root: Path, address: str) -> RepositoryFormat | None:
    """Refuse a store that does not work, or that has a repository, unless it is the one of this directory,
    which somebody else has made meanwhile: then that."""
    store = open_address(root, address)
    try:
        taken = store.read(FORMAT) is not None
    finally:
        store.close()
    if not taken:
        return None
    if (made_meanwhile := _known_format(root)) is not None:
        return made_meanwhile
    raise AlreadyExists(
        f"the store {address_of(root, address)} has the records of another repository",
        hint="Choose another schema or prefix. To work on that repository from here, share its directory "
        "between the machines: what is in its worktrees is not in the store.",
        path=str(root),
    )


# --- What is there already ----------------------------------------------------------------------------


def _known_format(root: Path) -> RepositoryFormat | None:
    """The format of the repository at `root`, None if there is none; a newer one is refused."""
    if not _is_directory(root / CONTROL):
        return None
    store: Store = open_store(root)
    document = store.read(FORMAT)
    return None if document is None else checked_format(store, root)


def refuse_nested(root: Path, *, nested: bool) -> None:
    """Refuse a directory that is in a repository: from it, and below it, commands would find the new one.

    With `nested` it may be in a worktree, whose snapshots will hold all of the new repository. It may never
    be among what a repository keeps for itself.
    """
    real = Path(calls.realpath(root))
    outer = next(filter(_is_repository, real.parents), None)
    if outer is None:
        return
    inside = real.relative_to(outer).parts
    in_worktree = inside[0] == MAIN or (inside[0] == WORKTREES_DIRECTORY and len(inside) > 1)
    if nested and in_worktree:
        return
    if in_worktree:
        what, hint = "in a worktree of it", "Make it elsewhere; or, if that is what you want, say --nested."
    else:
        what, hint = (
            "beside its worktrees",
            "Make it elsewhere. To work there, 'holdfast worktree create NAME'.",
        )
    raise NestedRepository(
        f"{root} is in the repository {outer} already, {what}", hint=hint, path=str(root), outer=str(outer)
    )


def _is_repository(directory: Path) -> bool:
    """Whether a directory says that it is a repository; if a server keeps its records, that is not asked."""
    return _is_directory(directory / CONTROL) and any(
        is_there(directory / each) for each in (f"{CONTROL}/format.json", CONFIG)
    )


def _check_that_it_is_free(root: Path) -> None:
    """Refuse a directory that has content other than what an interrupted `initialise` leaves."""
    try:
        with Directory.open(root) as directory:
            foreign = sorted(each for each in set(directory.names()) - _OURS if not each.startswith(_PROBE))
            inside: set[str] = set()
            _refuse_in_the_way(directory)
            if directory.status(CONTROL) is not None:
                with directory.enter(CONTROL) as control:
                    inside = set(control.names()) - _OURS_INSIDE
            else:
                foreign += [
                    name for name in (MAIN, WORKTREES_DIRECTORY) if directory.status(name) is not None
                ]
    except NotFound:
        return
    if (inside or foreign) and _known_format(root) is not None:
        return  # somebody has made the repository since it was looked for
    if inside:
        raise AlreadyExists(
            f"{root / CONTROL} was made by something else: it has {_shown(sorted(inside))}",
            hint="Choose another directory.",
            path=str(root),
        )
    if foreign:
        raise AlreadyExists(
            f"{root} is not empty: it has {_shown(foreign)}",
            hint="Make the repository in a new directory, and take this one in: "
            "'holdfast init NEW --import DIR'. It is copied, and stays as it is.",
            path=str(root),
        )


def _refuse_in_the_way(directory: Directory) -> None:
    """Refuse anything but a directory where there must be one: a file, or a link to somewhere else."""
    for name in sorted(_OURS):
        status = directory.status(name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise AlreadyExists(
                f"{directory.where(name)} is in the way: it is not a directory",
                hint="Move it away, or choose another directory.",
                path=directory.where(name),
            )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:3]) + more


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    """What is at a path; None if there is nothing."""
    try:
        return calls.stat(path, follow_symlinks=False).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise io_failure("look at", path, error) from error


# --- Importing ----------------------------------------------------------------------------------------


def _checked_source(source: Path, root: Path) -> Path:
    """The directory to import, if it is one and neither holds the repository nor is in it."""
    try:
        status = calls.stat(source)
    except FileNotFoundError:
        raise NotFound(f"there is no directory {source}", path=str(source)) from None
    except OSError as error:
        raise io_failure("look at", source, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise UsageFailure(f"{source} is not a directory", path=str(source))
    if _is_inside(root, status) or (_is_directory(root) and _is_inside(source, calls.stat(root))):
        raise UsageFailure(
            f"{root} and {source} contain each other: the copy would be part of itself",
            hint="Make the repository beside the directory that it takes in.",
            path=str(source),
        )
    return source


def _is_inside(path: Path, above: os.stat_result) -> bool:
    """Whether a directory (that need not exist) is this one, or is below it."""
    for each in (path, *path.parents):
        try:
            found = calls.stat(each)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (above.st_dev, above.st_ino):
            return True
    return False


def _import(control: RepositoryContext, source: Path) -> int:
    """Copy a directory to `main/`, which appears complete or not at all; return how many files it has."""
    from holdfast.trees.capture import capture_best
    from holdfast.trees.manifest import PAYLOAD
    from holdfast.trees.walker import synced

    main = control.places.payload(MAIN)
    _make_room(main)
    with scratch(control, "import") as room:
        with synced(room.path):
            captured = capture_best(source, room.tree, beside=control.places.snapshots, quiesced=True)
        move(room.tree / PAYLOAD, main)
        return captured.files


def _make_room(main: Path) -> None:
    """An interrupted attempt may have left `main/`: empty it goes, with content it is not ours to judge."""
    try:
        calls.rmdir(main)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise io_failure("remove", main, error) from error
        raise AlreadyExists(
            f"{main} has content already, from an import that was interrupted when it was complete",
            hint="To keep it, run 'holdfast init' without --import. To import anew, move it away first.",
            path=str(main),
        ) from None
