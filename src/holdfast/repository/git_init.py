"""Adopting a git checkout as the home of a repository, and removing the repository from it again.

git and all checkouts stay as they are. The numbered steps are those of `init`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, Failure, NestedRepository, NotFound, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, make_directories, move
from holdfast.fs.names import counted
from holdfast.fs.probe import require_safe
from holdfast.git import landing, transfer
from holdfast.git import snapshots as commits
from holdfast.git import worktrees as linked
from holdfast.git.checkout import Checkout, find_checkout, main_checkout
from holdfast.git.program import Git
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import MAIN
from holdfast.repository.git_home import GitHome
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.init import (
    CONTROL,
    Initialised,
    initialise_home,
    is_repository,
    known_format,
    require_free_store,
    share_directory,
)
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.repository.scratch_worktrees import remove_unused, scratch_worktrees
from holdfast.store.addresses import remember
from holdfast.store.open import FILES, address_of, configure_store, is_in_files
from holdfast.trees.walker import remove_tree

REMOVED = "holdfast.removed"  # beside the root: what a killed `deinit` leaves


def adopt_checkout(
    start: str | os.PathLike[str], *, git_dir: str | None = None, store: str | None = None, shared: bool = False
) -> Initialised:
    """Make the git checkout that `start` is in, or that `git_dir` (`GIT_DIR`) names, the home of a repository.

    Nothing is copied or moved, and git sees no change. An existing repository is not changed.
    """
    checkout = _checked_checkout(os.fspath(start), git_dir)
    root = Path(checkout.common) / "holdfast"
    known = known_format(root)
    if known is not None:
        return Initialised(root, known, False, None)
    git = Git(Path(checkout.common))
    git.run("rev-parse", "--git-common-dir")  # refuses an old git, and the repository of another user
    if store is not None:
        remember(store)
        require_free_store(root, store)
    remove_tree(root.with_name(REMOVED))
    make_directories(root)
    if shared:
        share_directory(root)
    capabilities = require_safe(root, records_elsewhere=not is_in_files(address_of(root, store)))  # 1
    make_directories(root / CONTROL / "guards")
    with FileLocker(follow_links=False).lock_exclusive(root / CONTROL / "guards" / "init.lock"):  # 2
        known = known_format(root)
        if known is not None:
            return Initialised(root, known, False, None)
        if store is not None:
            configure_store(root, store, check=False)
        if main_checkout(checkout.common) is None:  # 3. git itself cannot tell which one is `main`
            top = Path(checkout.top or "")
            if checkout.git_dir == checkout.common:
                linked.set_main_checkout(git, top)
            else:
                linked.set_name(git, top, MAIN)
        return initialise_home(GitHome(GitPaths(root)), capabilities)


def _checked_checkout(start: str, git_dir: str | None) -> Checkout:
    """The checkout to adopt; refused if there is none, or if a repository of another kind is around it."""
    found = find_checkout(start, git_dir)
    if found is None:
        hint = "Run it inside a git checkout, or name an empty directory: 'holdfast init DIR'."
        raise NotFound(f"{os.path.abspath(start)} is not in a git checkout", hint=hint, path=start)
    if found.top is None:
        hint = "Run it in a checkout: the main one, or a linked worktree ('git worktree add')."
        raise Refused(f"{start} is in the git directory {found.git_dir}, not in a checkout", hint=hint, path=start)
    try:
        found.top.encode()
    except UnicodeEncodeError:
        raise Refused(f"the path {found.top!a} is not valid UTF-8, so it cannot be recorded") from None
    outer = next(filter(is_repository, Path(found.top).parents), None)
    if outer is not None:
        message = f"{found.top} is inside the repository {outer}"
        raise NestedRepository(message, hint="Adopt a clone of it elsewhere.", path=found.top, outer=str(outer))
    if is_repository(Path(found.top)):
        message = f"{found.top} is already a repository, with worktrees of its own"
        raise AlreadyExists(message, hint="Use it as it is, or adopt a checkout elsewhere.", path=found.top)
    return found


class Deinitialised(NamedTuple):
    """What was removed, and the linked worktrees of git that stay."""

    checkout: Path
    snapshots: int
    worktrees: tuple[Path, ...]


def deinitialise(repository: Repository, *, force: bool = False) -> Deinitialised:
    """Remove all references, names and records of a repository in a git home; worktrees, branches and files stay.

    Refused while something is held, or while a worktree has commits that the branch of `main` does not have, or a
    worktree or snapshot has content that is not in a commit; unless `force`. A kill leaves a repository that can be
    removed again.
    """
    home = repository.context.home
    if not isinstance(home, GitHome):
        hint = "Delete its directory when you need nothing in it any more."
        raise Refused(f"{repository.root} is not in a git checkout", hint=hint, path=str(repository.root))
    if address_of(repository.root) != FILES:
        hint = "Move them to files first: 'holdfast migrate --to files'."
        raise Refused("the records of this repository are on a server", hint=hint)
    if not force:
        _refuse_if_held(repository)
        _refuse_if_unlanded(repository, home)
    made = home.stored()
    paths = tuple(Path(each.top) for _, each in home.paths.registrations() if each.top is not None)
    main = home.paths.payload(MAIN)
    for scratch in scratch_worktrees(home.paths):
        remove_unused(scratch)
    home.retire(repository.context, made)
    for each in commits.kept_packs(home.git):
        commits.drop_keep(home.git, each)
    for path in paths:
        with contextlib.suppress(Refused):  # its directory is gone
            linked.clear_name(home.git, path)
    for place in transfer.incoming(home.git):
        transfer.forget_incoming(home.git, place)
    landing.forget_all(home.git)
    for name in ("refs/holdfast/snapshots", "refs/holdfast/incoming", "refs/holdfast"):
        with contextlib.suppress(OSError, NotFound), Directory.open((home.paths.common / name).parent) as above:
            calls.rmdir(above.at(name.rpartition("/")[2]), dir_fd=above.fd)
    repository.close()
    removed = repository.root.with_name(REMOVED)
    remove_tree(removed)
    move(repository.root, removed)  # from here on, there is no repository
    remove_tree(removed)
    return Deinitialised(main, len(made), tuple(path for path in paths if path != main))


def _refuse_if_held(repository: Repository) -> None:
    kinds = ("lease", "operation", "issue", "claim")
    held = [each for each in look_around(repository.root).holdings if each.kind in kinds]
    if held:
        first = held[0]
        message = f"{first.who} holds the {first.kind} {first.what}"
        more = f", and {len(held) - 1} more are held" if len(held) > 1 else ""
        hint = "'holdfast who' lists what is held. Wait for it, or give it up with --force."
        raise Refused(message + more, hint=hint, held=[each.as_record() for each in held])


def _refuse_if_unlanded(repository: Repository, home: GitHome) -> None:
    target = linked.head_commit(home.git, home.paths.payload(MAIN))
    hint = "Land or discard it ('holdfast worktree remove NAME'). Or leave it as it is, without snapshots: --force."
    for config in repository.worktrees.configs():
        name, path = config.worktree_id, home.paths.payload(config.worktree_id)
        if name == MAIN:
            continue
        try:
            commit = linked.head_commit(home.git, path)
        except Failure:
            continue  # its directory is gone
        if commit and not (target and home.git.succeeds("merge-base", "--is-ancestor", commit, target)):
            raise Refused(f"{name} has commits that {MAIN} does not have", hint=hint, worktree=name)
        if next(home.changes(path, None, name), None) is not None:
            raise Refused(f"{name} has changes that are not in a commit", hint=hint, worktree=name)
    uncommitted = [each for each in home.stored() if not home.is_committed(each, target)]
    if uncommitted:
        snapshots = counted(len(uncommitted), "snapshot")
        hint = "Keep what you need ('holdfast export ID DIR', 'git tag NAME'). Then delete the snapshots too: --force."
        raise Refused(f"{snapshots} would be deleted with content that is in no commit", hint=hint, ids=uncommitted)
