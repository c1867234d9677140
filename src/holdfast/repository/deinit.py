"""Removing a repository from the git checkout that is its home. git and all checkouts stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, Refused
from holdfast.fs.directory import move
from holdfast.git import snapshots as commits
from holdfast.git import worktrees as linked
from holdfast.repository.context import MAIN
from holdfast.repository.git_home import GitHome
from holdfast.repository.init import REMOVED
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.store.open import FILES, address_of
from holdfast.trees.walker import remove_tree


class Deinitialised(NamedTuple):
    """What was removed, and the linked worktrees of git that stay."""

    checkout: Path
    snapshots: int
    worktrees: tuple[Path, ...]


def deinitialise(repository: Repository, *, force: bool = False) -> Deinitialised:
    """Remove all references, names and records of a repository in a git home; worktrees, branches and files stay.

    Refused while something is held, or while a worktree has commits that the branch of `main` does not have, or changes
    that are not in a commit; unless `force`. A kill leaves a repository that can be removed again.
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
    home.retire(repository.context, made)
    for each in commits.kept_packs(home.git):
        commits.drop_keep(home.git, each)
    for path in paths:
        linked.clear_name(home.git, path)
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
