"""Adopting a git checkout as the home of a repository, and removing the repository from it again.

git and all checkouts stay as they are. The numbered steps are those of `init`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, Failure, NestedRepository, NotApproved, NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import entry_exists, make_directories, move
from holdfast.fs.names import counted
from holdfast.fs.probe import require_safe
from holdfast.git import isolated, landing, transfer
from holdfast.git import snapshots as commits
from holdfast.git import worktrees as linked
from holdfast.git.checkout import CLONE, Checkout, find_checkout, is_confirmed, is_worktree_of, main_checkout
from holdfast.git.configured import ConfiguredProgram
from holdfast.git.program import Git
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import MAIN
from holdfast.repository.git_home import GitHome
from holdfast.repository.git_isolated import fetch_work
from holdfast.repository.git_paths import GitPaths, registered_path
from holdfast.repository.git_place import include_again
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
from holdfast.repository.worktree_changes import forget_clone
from holdfast.store.addresses import remember
from holdfast.store.approvals import approve
from holdfast.store.open import FILES, address_of, configure_store, is_in_files
from holdfast.trees.walker import remove_tree

_OF_WORKTREES = ("lease", "operation")  # kinds of holdings
REMOVED = "holdfast.removed"  # beside the root: left by a killed `deinit`


def adopt_checkout(
    start: str | os.PathLike[str],
    *,
    git_dir: str | None = None,
    store: str | None = None,
    shared: bool = False,
    agree: Callable[[Sequence[ConfiguredProgram]], object] | None = None,
) -> Initialised:
    """Make the git checkout that `start` is in, or that `git_dir` (`GIT_DIR`) names, the home of a repository.

    Nothing is copied or moved, and git sees no change. An existing repository is not changed. If git's configuration
    names programs, `agree` shows them to the user, and raises unless the user approves them; without it, they are
    refused. Then nothing has been created.
    """
    checkout = checked_checkout(os.fspath(start), git_dir)
    root = Path(checkout.common) / "holdfast"
    known = known_format(root)
    if known is not None:
        return Initialised(root, known, False, None)
    git = Git(Path(checkout.common))
    git.run("rev-parse", "--git-common-dir")  # refuses an old git, and the repository of another user
    if store is not None:
        remember(store)
        require_free_store(root, store)
    finish_deinit(git)
    programs = git.programs()
    if programs and agree is None:
        message = f"{programs[0].shown}, which the git configuration of {git.common} names, is not approved"
        raise NotApproved(message, hint="Run 'holdfast init' there: it shows such programs, and asks.", root=str(root))
    if programs and agree is not None:
        agree(programs)
    make_directories(root)
    _approve(root, programs)  # for this command
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
        with contextlib.suppress(NotFound):
            durable.remove(root / CLONE[1])  # left by an unfinished join
        if main_checkout(checkout.common) is None:  # 3. git itself cannot tell which one is `main`
            top = Path(checkout.top or "")
            if checkout.git_dir == checkout.common:
                linked.set_main_checkout(git, top)
            else:
                linked.set_name(git, top, MAIN)
        made = initialise_home(GitHome(GitPaths(root)), capabilities)
        _approve(root, programs)  # for the repository, which now has an id
        return made._replace(programs=tuple(each.shown for each in programs))


def _approve(root: Path, programs: list[ConfiguredProgram]) -> None:
    if programs:
        approve(root, commands=[each.text for each in programs])


def checked_checkout(start: str, git_dir: str | None) -> Checkout:
    """The checkout to adopt; refused if there is none, or if a repository of another kind is around it."""
    found = find_checkout(start, git_dir)
    if found is None:
        hint = "Run it inside a git checkout, or name an empty directory: 'holdfast init DIR'."
        raise NotFound(f"{os.path.abspath(start)} is not in a git checkout", hint=hint, path=start)
    if found.top is None:
        hint = "Run it in a checkout: the main one, or a linked worktree ('git worktree add')."
        raise Refused(f"{start} is in the git directory {found.git_dir}, not in a checkout", hint=hint, path=start)
    if not is_confirmed(found) and (other := main_checkout(found.common)) is not None:
        hint = f"If it was moved: 'git worktree repair {found.top}' in {other}."
        raise Refused(f"{found.top} leads to the repository of {other}, which does not know it", hint=hint, path=start)
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
    """The result of `deinitialise`: the number of removed snapshots, and the linked git worktrees that stay."""

    checkout: Path
    snapshots: int
    worktrees: tuple[Path, ...]


def deinitialise(repository: Repository, *, force: bool = False) -> Deinitialised:
    """Remove all references, names and records of a repository in a git home; worktrees, branches and files stay. An
    isolated worktree stays as a clone. A clone that has joined leaves the others: only its own records are removed.

    Unless `force`, refused while something is held, a worktree has commits that the branch of `main` does not have, or
    a worktree or snapshot has content that is not in a commit. A kill leaves the whole repository or none, and the
    next `init` or `deinit` removes the rest.
    """
    home = repository.context.home
    if not isinstance(home, GitHome):
        hint = "Delete its directory when you no longer need anything in it."
        raise Refused(f"{repository.root} is not in a git checkout", hint=hint, path=str(repository.root))
    is_joined = home.paths.main != MAIN
    if not is_joined and address_of(repository.root) != FILES:
        hint = "Move them to files first: 'holdfast migrate --to files'."
        raise Refused("the records of this repository are on a server", hint=hint)
    if not force:
        _refuse_if_held(repository)
        _refuse_if_unlanded(repository, home)
    if is_joined:
        forget_clone(repository.context, home.paths.main, force=force)
    made = home.stored()
    paths = tuple(Path(each.top) for _, each in home.paths.registrations() if each.top is not None)
    main = home.paths.payload(home.paths.main)
    for scratch in scratch_worktrees(home.paths):
        remove_unused(scratch)
    for path in paths:
        with contextlib.suppress(Refused):  # its commits stay in the clone
            fetch_work(home.paths, home.git, path)
    repository.close()
    removed = repository.root.with_name(REMOVED)
    remove_tree(removed)
    move(repository.root, removed)  # from here on, there is no repository
    finish_deinit(home.git)
    return Deinitialised(main, len(made), tuple(path for path in paths if path != main))


def finish_deinit_around(start: str | os.PathLike[str], git_dir: str | None = None) -> Path | None:
    """Finish a killed `deinit` in the checkout that `start` is in; return its git directory, None if there was none."""
    found = find_checkout(os.fspath(start), git_dir)
    return Path(found.common) if found is not None and finish_deinit(Git(Path(found.common))) else None


def finish_deinit(git: Git) -> bool:
    """Remove what a killed `deinit` left in git, then the root that it moved away; False if there is no such root."""
    removed = git.common / REMOVED
    if not entry_exists(removed):
        return False
    make_directories(removed / CONTROL / "guards")
    with FileLocker(follow_links=False).lock_exclusive(removed / CONTROL / "guards" / "init.lock"):
        if not is_repository(git.common / "holdfast"):  # else this was finished, and a new repository was created
            _forget_everything(git)
        remove_tree(removed)
    return True


def _forget_everything(git: Git) -> None:
    """Delete all references, `.keep` files and names of a repository in git."""
    commits.delete_refs(git, commits.refs(git))
    for each in commits.kept_packs(git):
        commits.drop_keep(git, each)
    for place in transfer.incoming(git):
        transfer.forget_incoming(git, place)
    landing.forget_all(git)
    for git_id in GitPaths(git.common / "holdfast").git_ids():
        _forget_worktree(git, git.common / "worktrees" / git_id)
    include_again(git)
    remove_tree(git.common / "refs" / "holdfast")  # empty directories, and locks of a git that was killed


def _forget_worktree(git: Git, git_dir: Path) -> None:
    """Remove our name from a linked worktree; turn an isolated one into a clone that git no longer knows here. Its
    branch stays in both."""
    top = registered_path(git_dir)
    is_ours = top is not None and is_worktree_of(top, os.fspath(git.common)) is not None
    if top is None or not is_ours or not isolated.is_isolated(Path(top)):
        durable.remove(git_dir / "holdfast")
        return
    remove_tree(git_dir)
    isolated.detach(Path(top))


def _refuse_if_held(repository: Repository) -> None:
    kinds = ("lease", "operation", "issue", "claim")
    main, configs = repository.context.paths.main, repository.worktrees.configs()
    others = {each.worktree_id for each in configs if each.clone != main}
    found = (each for each in look_around(repository.root).holdings if each.kind in kinds)
    held = [each for each in found if main == MAIN or (each.kind in _OF_WORKTREES and each.what not in others)]
    if held:
        first = held[0]
        message = f"{first.who} holds the {first.kind} {first.what}"
        more = f", and {len(held) - 1} more are held" if len(held) > 1 else ""
        hint = "'holdfast who' lists what is held. Wait until it is released, or ignore it: --force."
        raise Refused(message + more, hint=hint, held=[each.as_record() for each in held])


def _refuse_if_unlanded(repository: Repository, home: GitHome) -> None:
    main = home.paths.main
    target = home.work_commit(main)
    hint = "Land or discard it ('holdfast worktree remove NAME'). Or leave it as it is, without snapshots: --force."
    for config in repository.worktrees.configs():
        name, path = config.worktree_id, home.paths.payload(config.worktree_id)
        if name == main or config.clone != main:
            continue
        try:
            commit = home.work_commit(name)
        except Failure:
            continue  # its directory is gone
        if commit and not (target and home.git.succeeds("merge-base", "--is-ancestor", commit, target)):
            raise Refused(f"{name} has commits that {main} does not have", hint=hint, worktree=name)
        if next(home.changes(path, None, name), None) is not None:
            raise Refused(f"{name} has changes that are not in a commit", hint=hint, worktree=name)
    uncommitted = [each for each in home.stored() if not home.is_committed(each, target)]
    if uncommitted:
        snapshots = counted(len(uncommitted), "snapshot")
        hint = "Keep what you need ('holdfast export ID DIR', 'git tag NAME'). Then delete the snapshots too: --force."
        raise Refused(f"{snapshots} would be deleted with content that is in no commit", hint=hint, ids=uncommitted)
