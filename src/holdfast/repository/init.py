"""Creating a repository: `.jvs/` and `main/`, in an empty directory; an existing repository is left alone.

The steps are numbered as in `docs/protocols/worktrees.md`. Commit point: the transaction of step 4. Before it,
there is no repository; after a kill, the same command continues. A store on a server is opened first: if it does not
work, nothing is left behind.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, structs

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, NestedRepository, NotFound, Refused, UsageFailure
from holdfast.fs import calls
from holdfast.fs.directory import (
    Directory,
    entry_exists,
    failing_to,
    io_failure,
    is_directory,
    make_directories,
    move,
    resolved,
    status_at,
)
from holdfast.fs.names import is_draft_name
from holdfast.fs.probe import Capabilities, require_safe
from holdfast.leases.service import LeaseService
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import (
    CONTENT_VERSION,
    FORMAT,
    FORMAT_VERSION,
    MAIN,
    WORKTREES,
    Consistency,
    Isolation,
    RepositoryContext,
    RepositoryFormat,
    RepositoryPaths,
    WorktreeConfig,
)
from holdfast.repository.home import Home, PlainHome
from holdfast.repository.locating import git_home_of
from holdfast.repository.payloads import is_within, scratch
from holdfast.repository.repository import Repository, checked_format
from holdfast.store.addresses import remember
from holdfast.store.audit import AuditTrail
from holdfast.store.content import checked_address
from holdfast.store.model import Create, Decision, Replace, View
from holdfast.store.open import (
    CONFIG,
    address_of,
    configure_store,
    is_in_files,
    open_address,
    open_content,
    open_store,
    same_store,
)

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress

CONTROL, WORKTREES_DIRECTORY = ".jvs", "worktrees"
_OURS = frozenset([CONTROL, ".holdfast", ".jit", MAIN, WORKTREES_DIRECTORY])
_PROBE = ".holdfast-probe-"  # the files of another process's filesystem probe
_OURS_INSIDE = frozenset(["guards", "tmp", "worktrees", "audit", "cache", "snapshots", "remnants", "reserve"])


class Initialised(NamedTuple):
    """The result of creating a repository. `filesystem` is None if the repository already existed; `imported` is the
    number of imported files; `programs` are the programs named in git's configuration, which the user has approved."""

    root: Path
    format: RepositoryFormat
    created: bool
    filesystem: Capabilities | None
    imported: int | None = None
    programs: tuple[str, ...] = ()


def initialise(
    root: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    consistency: Consistency | None = None,
    store: str | None = None,
    nested: bool = False,
    shared: bool = False,
    progress: Progress | None = None,
    probe: Callable[[Path], Capabilities] | None = None,
) -> Initialised:
    """Create a repository in the directory `root`. If `source` is given, it is copied to `main/`; a file that
    changes during the copy raises `ConsistencyUnavailable`, unless `consistency` is best_effort.

    An existing repository is not changed. A directory inside a repository is refused, unless it is in a worktree and
    `nested` is true. If `shared` is true, the group of `root` may do everything that its owner may. `store` is
    the address of a server that keeps the records instead of files. `probe` returns the capabilities of the filesystem
    and refuses an unsafe one; default: `require_safe`.
    """
    paths = RepositoryPaths(resolved(root))
    imported_from = None if source is None else _checked_source(resolved(source), paths.root)
    if store is not None:
        remember(store)
    known = known_format(paths.root)
    if known is None:
        known = _require_free_directory(paths, nested=nested)
    if known is None and store is not None:
        known = require_free_store(paths.root, store)
    if known is None:
        make_directories(paths.root, mode=0o777)
        if shared:
            share_directory(paths.root)  # everything created below inherits this
        served = not is_in_files(address_of(paths.root, store))
        capabilities = probe(paths.root) if probe else require_safe(paths.root, records_elsewhere=served)  # 1
        make_directories(paths.guards)
        with FileLocker(follow_links=False).lock_exclusive(paths.guards / "init.lock"):  # 2
            known = known_format(paths.root)
            if known is None:
                if store is not None:
                    configure_store(paths.root, store, check=False)
                quiesced = consistency is not Consistency.BEST_EFFORT
                return _initialise(paths, imported_from, capabilities, quiesced=quiesced, progress=progress)
    if store is not None and not same_store(paths.root, store, address_of(paths.root)):
        message = f"{paths.root} is already a repository, with its records in {address_of(paths.root)}"
        raise AlreadyExists(message, hint="Move them: 'holdfast migrate --to ADDRESS'.", path=str(paths.root))
    if source is not None:
        message = f"{paths.root} is already a repository: a directory can be imported only into a new one"
        hint = "Copy the files into one of its worktrees, or import into a new repository."
        raise AlreadyExists(message, hint=hint, path=str(paths.root))
    return Initialised(paths.root, known, False, None)


def share_directory(path: Path) -> None:
    """Share a directory with its group: new files and directories in it belong to the group, which may change them."""
    with Directory.open(path) as directory, failing_to("share", path):
        if (descriptor := directory.fd) is not None:
            calls.chmod(descriptor, calls.fstat(descriptor).st_mode & 0o7777 | stat.S_ISGID | stat.S_IRWXG)


def _initialise(
    paths: RepositoryPaths,
    source: Path | None,
    capabilities: Capabilities,
    *,
    quiesced: bool,
    progress: Progress | None,
) -> Initialised:
    context = _context_of(PlainHome(paths))
    make_directories(paths.worktrees, mode=0o777)  # 3
    make_directories(paths.snapshots)
    if source is None:
        make_directories(paths.payload(MAIN), mode=0o777)
    files = None if source is None else _import(context, source, quiesced=quiesced, progress=progress)
    record = _commit(context, source)  # 4
    paths.reserve.fill()
    return Initialised(paths.root, record, True, capabilities, files)


def initialise_home(home: Home, capabilities: Capabilities) -> Initialised:
    record = _commit(_context_of(home), None)  # 4
    home.paths.reserve.fill()
    return Initialised(home.paths.root, record, True, capabilities)


def _context_of(home: Home) -> RepositoryContext:
    store, trail = open_store(home.paths.root), AuditTrail()
    return RepositoryContext(home, store, trail, LeaseService(store, trail))


def _commit(context: RepositoryContext, source: Path | None) -> RepositoryFormat:
    """Commit point: from here on, the directory is a repository."""
    repository_id, described = str(uuid.uuid4()), context.home.described(MAIN)
    home = context.home.kind if context.home.has_branches else UNSET
    history = context.home.first_commit() or UNSET

    def decide(view: View, now: float) -> Decision[RepositoryFormat]:
        at = format_instant(now)
        record = RepositoryFormat(
            version=FORMAT_VERSION, repository_id=repository_id, created_at=at, home=home, history=history
        )
        config = WorktreeConfig(
            worktree_id=MAIN,
            isolation=Isolation.EXCLUSIVE,
            created_at=at,
            base_snapshot_id=None,
            head_snapshot_id=None,
            **described,
        )
        facts = {"repository_id": repository_id, "imported_from": str(source) if source else None}
        entry = context.audit(view, now, "repository_created", **facts)
        return Decision([Create(FORMAT, record), Create(WORKTREES.key(MAIN), config), entry], record)

    return context.store.transact([FORMAT, WORKTREES.key(MAIN), context.trail.stream], decide).result


def _require_free_directory(paths: RepositoryPaths, *, nested: bool) -> RepositoryFormat | None:
    """Refuse an unsuitable directory. If another process is creating a repository there, wait and return its format."""
    try:
        refuse_nested(paths.root, nested=nested)
        _refuse_foreign_content(paths.root)
    except (AlreadyExists, Refused):
        if not is_directory(paths.root / CONTROL) or status_at(paths.guards / "init.lock") is None:
            raise
        with FileLocker(follow_links=False).lock_exclusive(paths.guards / "init.lock"):
            known = known_format(paths.root)
        if known is None:
            raise
        return known
    return None


def require_free_store(root: Path, address: str) -> RepositoryFormat | None:
    """Refuse a store that does not work or already has a repository. If another process has just created that
    repository in this directory, return its format."""
    store = open_address(root, address)
    try:
        taken = store.read(FORMAT) is not None
    finally:
        store.close()
    if not taken:
        return None
    if (made_meanwhile := known_format(root)) is not None:
        return made_meanwhile
    message = f"the store {address_of(root, address)} has the records of another repository"
    hint = "Choose another schema or prefix. To work on that repository from a clone of it: 'holdfast join ADDRESS'."
    raise AlreadyExists(message, hint=hint, path=str(root))


# --- Existing content ---------------------------------------------------------------------------------


def known_format(root: Path) -> RepositoryFormat | None:
    """The format of the repository at `root`; None if there is no repository. Refuses an unknown format."""
    if not is_directory(root / CONTROL):
        return None
    store = open_store(root)
    return None if store.read(FORMAT) is None else checked_format(store, root)


def refuse_nested(root: Path, *, nested: bool) -> None:
    """Refuse a directory inside a repository: commands run there would find the new one. With `nested`, the directory
    may be in a worktree, whose snapshots will contain the whole new repository."""
    real = resolved(root)
    outer = next((each for each in real.parents if is_repository(each) or git_home_of(str(each))), None)
    if outer is None:
        return
    inside = real.relative_to(outer).parts
    in_worktree = (
        not is_repository(outer) or inside[0] == MAIN or (inside[0] == WORKTREES_DIRECTORY and len(inside) > 1)
    )
    if nested and in_worktree:
        return
    if in_worktree:
        where, hint = "in a worktree", "Choose another directory, or confirm with --nested."
    else:
        where = "beside its worktrees"
        hint = "Choose another directory. To work in this repository: 'holdfast worktree create NAME'."
    message = f"{root} is inside the repository {outer}, {where}"
    raise NestedRepository(message, hint=hint, path=str(root), outer=str(outer))


def is_repository(directory: Path) -> bool:
    """Whether a directory looks like a repository, without asking a server."""
    marks = (f"{CONTROL}/format.json", CONFIG)
    return is_directory(directory / CONTROL) and any(entry_exists(directory / each) for each in marks)


def _refuse_foreign_content(root: Path) -> None:
    """Refuse a directory with content other than what an interrupted `initialise` leaves."""
    try:
        with Directory.open(root) as directory:
            foreign = sorted(each for each in set(directory.names()) - _OURS if not each.startswith(_PROBE))
            inside: set[str] = set()
            _refuse_in_the_way(directory)
            if directory.status(CONTROL) is not None:
                with directory.enter(CONTROL) as private:
                    inside = {each for each in private.names() if each not in _OURS_INSIDE and not is_draft_name(each)}
            else:
                foreign += [name for name in (MAIN, WORKTREES_DIRECTORY) if directory.status(name) is not None]
    except NotFound:
        return
    if (inside or foreign) and known_format(root) is not None:
        return  # another process has just created the repository
    if inside:
        message = f"{root / CONTROL} was created by something else: it contains {_listed(sorted(inside))}"
        raise AlreadyExists(message, hint="Choose another directory.", path=str(root))
    if foreign:
        hint = "Create a repository elsewhere and import a copy: 'holdfast init NEW --import DIR'."
        if ".git" in foreign:
            hint = "To adopt the git checkout as it stands, run 'holdfast init' in it, without DIR."
        raise AlreadyExists(f"{root} is not empty: it contains {_listed(foreign)}", hint=hint, path=str(root))


def _refuse_in_the_way(directory: Directory) -> None:
    """Refuse a file or a link at the path of a directory."""
    for name in sorted(_OURS):
        status = directory.status(name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            message = f"{directory.where(name)} already exists and is not a directory"
            raise AlreadyExists(message, hint="Move it away, or choose another directory.", path=directory.where(name))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:3]) + more


# --- The content store --------------------------------------------------------------------------------


def configure_content(root: Path, address: str) -> str:
    """Name the content store of a plain home, which is then approved; return its address. Raises `AlreadyExists` if the
    home has another one, and `Refused` if the records are not on a server, or this one is in git."""
    from holdfast.repository.content import approve

    checked_address(address)
    with Repository(root) as repository:
        context = repository.context
        refuse_unfit(repository.format.home, is_served=context.store.files is None)
        store = open_content(address, context.store)
        store.prepare()

        def decide(view: View, now: float) -> Decision[str]:
            found = view.get(FORMAT)
            assert found is not None
            if found.content == address:
                return Decision([], address)
            if found.content:
                message = f"the content is already in {found.content}"
                raise AlreadyExists(message, hint="It cannot be moved to another content store.", content=found.content)
            named = structs.replace(found, content=address, version=max(found.version, CONTENT_VERSION))
            entry = context.audit(view, now, "content_configured", content=address)
            return Decision([Replace(FORMAT, named), entry], address)

        done = context.store.transact([FORMAT, context.trail.stream], decide).result
        approve(repository.root, address)
        return done


def refuse_unfit(home: object, *, is_served: bool) -> None:
    """Refuse a content store for a repository that has no use for it."""
    if home:
        hint = "Snapshots of a git checkout travel through a git remote: 'holdfast snapshot push'."
        raise Refused("a content store is for repositories that are not in a git checkout", hint=hint)
    if not is_served:
        hint = "Keep the records on a server: --store ADDRESS, or 'holdfast migrate --to ADDRESS'."
        raise Refused("a content store needs records that other machines reach", hint=hint)


# --- Importing ----------------------------------------------------------------------------------------


def _checked_source(source: Path, root: Path) -> Path:
    """The directory to import; refused if it contains the repository or is inside it."""
    status = status_at(source)
    if status is None:
        raise NotFound(f"there is no directory {source}", path=str(source))
    if not stat.S_ISDIR(status.st_mode):
        raise UsageFailure(f"{source} is not a directory", path=str(source))
    existing = status_at(root) if is_directory(root) else None
    if is_within(root, status) or (existing is not None and is_within(source, existing)):
        message = f"{root} and {source} contain each other: the copy would contain itself"
        raise UsageFailure(message, hint="Create the repository beside the directory to import.", path=str(source))
    _refuse_git_link(source)
    return source


def _refuse_git_link(source: Path) -> None:
    """Refuse a git worktree or submodule, whose `.git` is a file that points to the data: running git in the copy
    would change the original's index and branches."""
    status = status_at(source / ".git")
    if status is not None and not stat.S_ISDIR(status.st_mode):
        message = f"{source} is a git worktree or submodule: its .git points to data elsewhere that a copy would share"
        hint = "Import a clone of it: 'git clone DIR CLONE'. Or import a copy without its .git."
        raise Refused(message, hint=hint, path=str(source))


def _import(context: RepositoryContext, source: Path, *, quiesced: bool, progress: Progress | None) -> int:
    """Copy a directory to `main/`, which appears complete or not at all; return the number of files."""
    from holdfast.trees.capture import capture_best
    from holdfast.trees.manifest import PAYLOAD
    from holdfast.trees.walker import synced

    main = context.paths.payload(MAIN)
    try:
        with Directory.open(main.parent) as directory:
            calls.rmdir(directory.at(main.name), dir_fd=directory.fd)  # left empty by an interrupted attempt
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise io_failure("remove", main, error) from error
        message = f"{main} already has content from an interrupted import"
        hint = "To keep it, run 'holdfast init' without --import. To import again, move it away first."
        raise AlreadyExists(message, hint=hint, path=str(main)) from None
    with scratch(context, "import") as room:
        with synced(room.path):
            beside = context.paths.snapshots
            captured = capture_best(source, room.tree, beside=beside, quiesced=quiesced, progress=progress)
        move(room.tree / PAYLOAD, main)
        return captured.files
