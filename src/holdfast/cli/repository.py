"""How commands find the repository and the worktree that they are about, and open them.

A flag, over the environment, over the current directory: `--repo` or `HOLDFAST_REPO`, else the nearest
directory upwards that has `.jvs/`; `--worktree` or `HOLDFAST_WORKTREE`, else the worktree that the
current directory is in, else `main`. The lock is named by `--lock-id` or `HOLDFAST_LOCK_ID`, because
an agent's every command is a process of its own; `HOLDFAST_ACTOR` says in whose name, which tells agents
apart that live in one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from holdfast.cli.places import store_address
from holdfast.errors import LockNotHeld, LockReentry, NotFound

if TYPE_CHECKING:
    from holdfast.repository.repository import Repository

REPO, WORKTREE = "HOLDFAST_REPO", "HOLDFAST_WORKTREE"
LOCK_ID, TOKEN = "HOLDFAST_LOCK_ID", "HOLDFAST_TOKEN"
ACTOR = "HOLDFAST_ACTOR"

repo_option = click.option(
    "--repo",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False),
    help=f"The repository.  [default: {REPO}, else the one that the current directory is in]",
)
worktree_option = click.option(
    "--worktree",
    metavar="NAME",
    help=f"The worktree.  [default: {WORKTREE}, else the one that the current directory is in, else main]",
)
lock_id_option = click.option(
    "--lock-id", metavar="ID", help=f"The lock that you hold.  [default: {LOCK_ID}]"
)


class Opened(NamedTuple):
    """A repository and the worktree in it that a command is about."""

    repository: Repository
    worktree: str


def current_directory() -> Path:
    """Where the command was started; a directory that was removed or exchanged since is named as such."""
    try:
        return Path(os.getcwd())
    except FileNotFoundError:
        raise NotFound(
            "the current directory is gone: it was removed, or exchanged by a restore in place",
            hint='Enter it again: cd "$PWD". Or name the repository with --repo.',
        ) from None


def open_repository(
    flag: str | None, environment: Mapping[str, str] = os.environ, *, to_examine: bool = False
) -> Repository:
    """The repository that a command is about; `to_examine` opens it even if its store cannot be used."""
    from holdfast.repository.repository import Repository, find_repository

    chosen, actor, address = flag or environment.get(REPO), environment.get(ACTOR), store_address(environment)
    if not chosen:
        found = find_repository(current_directory())
        return Repository(found, actor=actor, ledger_address=address, to_examine=to_examine)
    try:
        return Repository(chosen, actor=actor, ledger_address=address, to_examine=to_examine)
    except NotFound as failure:
        with contextlib.suppress(NotFound):  # never guessed: which worktree would be meant?
            failure.hint = f"It is in the repository {find_repository(chosen)}: name that one."
        raise


def open_worktree(
    repo: str | None,
    worktree: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    to_examine: bool = False,
) -> Opened:
    """The repository and the worktree that a command is about; it need not be there."""
    from holdfast.repository.payloads import worktree_name

    repository = open_repository(repo, environment, to_examine=to_examine)
    chosen = worktree or environment.get(WORKTREE)
    if chosen:
        return Opened(repository, worktree_name(chosen))
    return Opened(repository, repository.worktree_around(current_directory()))


def held_lock_id(flag: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The id of the lock that the caller holds; `LockNotHeld` if it names none."""
    lock_id = known_lock_id(flag, environment)
    if lock_id is None:
        raise LockNotHeld(
            "no lock was named",
            hint=f"Name the one that you hold with --lock-id, or in {LOCK_ID}: "
            f"export {LOCK_ID}=$(holdfast lock acquire --field lock_id)",
        )
    return lock_id


def known_lock_id(flag: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The id of the lock that the caller holds, if it names one."""
    return flag or environment.get(LOCK_ID) or None


def refuse_own_lock(
    repository: Repository, worktree: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse to ask for a lock that the caller holds: it would wait for itself."""
    state = repository.desk.state(worktree)
    if state is None or state.expired or state.lease.lock_id != environment.get(LOCK_ID):
        return
    raise LockReentry(
        f"you hold the lock of {worktree} already: {LOCK_ID} is {state.lease.lock_id}",
        hint="Do what you want to do under that lock as it is; 'holdfast lock renew' makes it last longer.",
        worktree=worktree,
        lock_id=state.lease.lock_id,
    )
