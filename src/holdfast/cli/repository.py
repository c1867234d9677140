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
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import options
from holdfast.cli.options import ACTOR as ACTOR
from holdfast.cli.options import LOCK_ID as LOCK_ID
from holdfast.cli.options import REPO as REPO
from holdfast.cli.options import TOKEN as TOKEN
from holdfast.cli.options import WORKTREE as WORKTREE
from holdfast.cli.options import lock_id_option as lock_id_option
from holdfast.cli.options import repo_option as repo_option
from holdfast.cli.options import store_address
from holdfast.cli.options import worktree_option as worktree_option
from holdfast.errors import Failure, LockConflict, LockNotHeld, LockReentry, NotFound, SettingInvalid
from holdfast.leases.queue import DeadlockWatch

if TYPE_CHECKING:
    from holdfast.locks.flock_wait import LockWait
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.context import Proof
    from holdfast.repository.repository import Repository
    from holdfast.repository.waits import LockWaits, NotedWait


class OpenedRepository(NamedTuple):
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
) -> OpenedRepository:
    """The repository and the worktree that a command is about; it need not be there."""
    from holdfast.repository.payloads import worktree_name

    repository = open_repository(repo, environment, to_examine=to_examine)
    chosen = worktree or environment.get(WORKTREE)
    if chosen:
        return OpenedRepository(repository, worktree_name(chosen))
    return OpenedRepository(repository, repository.worktree_around(current_directory()))


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


TTL = 20.0
"""How long the lock lasts that a command takes for itself; it is renewed until the command ends."""


wait_option = options.wait_option("How long to wait for the lease of another holder")


@contextlib.contextmanager
def proven(
    opened: OpenedRepository,
    lock_id: str | None,
    purpose: str,
    *,
    wait: float | None = 0.0,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Proof | None]:
    """The proof for a worktree: of the lock that is named, or of one taken for this block if it is free.

    A lock that the environment names counts for the worktree that it names with it. The token is the
    one that came with this lock, never one that is found at the moment. None if there are no locks.
    """
    from holdfast.repository.context import Proof, proof_of
    from holdfast.repository.records import Isolation

    repository, worktree = opened
    control = repository.control
    if control.config(worktree).isolation is Isolation.SHARED:
        yield None
        return
    from_environment = lock_id is None and environment.get(WORKTREE, worktree) == worktree
    named = lock_id or (environment.get(LOCK_ID) if from_environment else None)
    if named:
        yield proof_of(control, worktree, named, token_named(environment) if from_environment else None)
        return
    try:
        lease = repository.lease(worktree, ttl=TTL, wait=wait, purpose=purpose)
    except LockConflict as conflict:
        hint = (
            "Wait for it with --wait 1m: what a dead holder has left runs out by itself. "
            f"If that lock is yours, name it: --lock-id, or {LOCK_ID}."
        )
        raise LockConflict(conflict.message, hint=hint, **conflict.facts) from None
    with lease:
        yield Proof(lease.lock_id, lease.token)


def token_named(environment: Mapping[str, str]) -> int | None:
    """The token that the environment hands on with a lock."""
    text = environment.get(TOKEN)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise SettingInvalid(TOKEN, text, "the number that came with the lock")
    return int(text)


def observe_file_lock(path: str, wait: LockWait, *, shared: bool, fair: bool) -> DeadlockWatch:
    """Look on while this command waits for the lock on a file: for `FileLocker(observer=...)`."""
    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(None, path).for_file_lock(path, since, shared=shared, fair=fair)

    return DeadlockWatch(prepare, wait.timeout, wait.cancel, forks=False)


def observe_repo_lock(lock: RepoLock, repo_id: str, purpose: str, wait: float) -> DeadlockWatch:
    """Look on while this command asks for the lock of a repository again and again."""
    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(lock.data_dir, None).for_repo_lock(lock, repo_id, purpose, since)

    return DeadlockWatch(prepare, wait, forks=False)


def _lock_waits(data_dir: Path | None, path: str | None) -> LockWaits:
    """What is around this command: its repository, if it is in one or the lock is, and the data directory."""
    from holdfast.cli.options import data_directory, store_address
    from holdfast.locks.identity import calling_agent
    from holdfast.repository.waits import LockWaits, surroundings

    if data_dir is None:
        with contextlib.suppress(Failure):  # there is no home directory
            data_dir = data_directory(None, os.environ)
    around = surroundings(_repository(path), data_dir, ledger_address=store_address(os.environ))
    actor, lock_id = os.environ.get(ACTOR) or "", os.environ.get(LOCK_ID) or ""
    return LockWaits(around, agent=calling_agent(), actor=actor, lock_id=lock_id)


def _repository(path: str | None) -> Path | None:
    """The repository that this command is in; else the one that what it is about is in."""
    from holdfast.repository.guard import repository_around

    starts = [os.environ.get(REPO) or "."]
    if path is not None:
        starts.append(os.path.dirname(path) or ".")
    with contextlib.suppress(OSError):  # a current directory that is gone
        found = next(filter(None, map(repository_around, starts)), None)
        return None if found is None else Path(found)
    return None
