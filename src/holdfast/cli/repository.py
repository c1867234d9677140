"""How commands find and open the repository, the worktree and the lease that they work with.

An option wins over the environment, which wins over the current directory: `--repo` or `HOLDFAST_REPO`,
else the nearest directory upwards that has `.jvs/`; `--worktree` or `HOLDFAST_WORKTREE`, else the worktree
around the current directory, else `main`. `--lock-id` or `HOLDFAST_LOCK_ID` names the lease, because each
command of an agent is a new process. `HOLDFAST_ACTOR` distinguishes agents that share one process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import ACTOR, LEASE_ID, LOCK_ID, REPO, TOKEN, WORKTREE, options
from holdfast.cli.child import without_store_secrets
from holdfast.cli.options import store_address
from holdfast.cli.output import CommandFailed, printable
from holdfast.errors import (
    Failure,
    LockConflict,
    LockNotHeld,
    LockReentry,
    NotFound,
    SettingInvalid,
    SetupFailed,
    TeardownFailed,
    UsageFailure,
)

if TYPE_CHECKING:
    from holdfast.leases.queue import DeadlockWatch
    from holdfast.leases.service import LeaseService
    from holdfast.locks.flock_wait import LockWait
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.context import Proof
    from holdfast.repository.repository import Repository
    from holdfast.repository.waits import LockWaits, NotedWait

MOST_SHOWN = 20  # lines of the output of a failed command
wait_option = options.wait_option("How long to wait if another holder has the lease")


class OpenedRepository(NamedTuple):
    repository: Repository
    worktree: str  # which the command works with


class OpenedLease(NamedTuple):
    """The lease that a command works with: that of a worktree, or a named one."""

    repository: Repository
    service: LeaseService
    worktree: str
    name: str | None

    @property
    def subject(self) -> str:
        return self.worktree if self.name is None else self.name

    @property
    def variable(self) -> str:
        """The environment variable for the id of this kind of lease."""
        return LOCK_ID if self.name is None else LEASE_ID

    def waiting_text(self) -> str:
        """The text to show while the command waits for the lease."""
        return lease_waited_for(self.service, self.subject, "lease" if self.name else "worktree")


def lease_waited_for(service: LeaseService, subject: str, kind: str) -> str:
    from holdfast.cli.progress import waiting_for

    state, what = service.state(subject), f"the {kind} {subject}"
    if state is None:
        return waiting_for(what)
    return waiting_for(what, state.lease.actor or state.lease.holder_id, state.time_left)


def current_directory() -> Path:
    """The current directory; `NotFound` if it was removed or replaced since the shell entered it."""
    try:
        return Path(os.getcwd())
    except FileNotFoundError:
        raise NotFound(
            "the current directory is gone: it was removed, or replaced by a restore in place",
            hint='Enter it again: cd "$PWD". Or name the repository with --repo.',
        ) from None


def open_repository(
    flag: str | None, environment: Mapping[str, str] = os.environ, *, to_examine: bool = False
) -> Repository:
    """Open the repository that a command works with; `to_examine` opens it even if its store is unusable."""
    from holdfast.repository.repository import Repository, find_repository

    chosen = flag or environment.get(REPO)
    root = Path(chosen) if chosen else find_repository(current_directory(), environment.get("GIT_DIR"))
    actor, address = environment.get(ACTOR), store_address(environment)
    try:
        return Repository(
            root,
            actor=actor,
            ledger_address=address,
            to_examine=to_examine,
            environment=without_store_secrets(environment),
        )
    except NotFound as failure:
        if chosen:
            with contextlib.suppress(NotFound):  # not opened: the worktree would be ambiguous
                failure.hint = f"It is in the repository {find_repository(chosen)}: name that one."
        raise


def open_worktree(
    repo: str | None, worktree: str | None, environment: Mapping[str, str] = os.environ, *, to_examine: bool = False
) -> OpenedRepository:
    """Open the repository, and choose the worktree, which need not exist."""
    from holdfast.repository.payloads import worktree_name

    repository = open_repository(repo, environment, to_examine=to_examine)
    chosen = worktree or environment.get(WORKTREE)
    name = worktree_name(chosen) if chosen else repository.worktree_around(current_directory())
    return OpenedRepository(repository, name)


def open_lease(repo: str | None, worktree: str | None, name: str | None) -> OpenedLease:
    """Open the repository, and choose the lease, which need not exist."""
    if name is None:
        repository, chosen = open_worktree(repo, worktree)
        return OpenedLease(repository, repository.leases, chosen, None)
    from holdfast.repository.payloads import lease_name

    if worktree is not None:
        raise UsageFailure("--name is for a lease without a worktree", hint="Leave out --name or --worktree.")
    repository = open_repository(repo)
    return OpenedLease(repository, repository.named_leases, "", lease_name(name))


@contextlib.contextmanager
def showing_output() -> Iterator[None]:
    """Show people the output of a setup or teardown command that fails in the block."""
    try:
        yield
    except (SetupFailed, TeardownFailed) as failure:
        lines = [printable(line) for line in str(failure.facts["output"]).rstrip("\n").split("\n")]
        shown = [f"  {line}" for line in lines[-MOST_SHOWN:] if line]
        raise CommandFailed(failure, advice="\n".join([*shown, printable(failure.hint)])) from failure


def known_lock_id(flag: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    return flag or environment.get(LOCK_ID) or None


def held_lock_id(opened: OpenedLease, flag: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The id of the lease that the caller holds; `LockNotHeld` if it names none."""
    if lock_id := flag or environment.get(opened.variable):
        return lock_id
    named = "" if opened.name is None else f"--name {opened.name} "
    how = f"export {opened.variable}=$(holdfast lease acquire {named}--field lock_id)"
    raise LockNotHeld("no lease was named", hint=f"Name your lease with --lock-id, or in {opened.variable}: {how}")


def token_named(environment: Mapping[str, str]) -> int | None:
    """The token in the environment, which was passed on with a lease; None if there is none."""
    text = environment.get(TOKEN)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise SettingInvalid(TOKEN, text, "the number that came with the lease, of at most 15 digits")
    return int(text)


def refuse_own_lease(opened: OpenedLease, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to acquire a lease that the caller holds: it would wait for itself."""
    state = opened.service.state(opened.subject)
    if state is None or state.expired or state.lease.lock_id != environment.get(opened.variable):
        return
    raise LockReentry(
        f"you already hold the lease of {opened.subject}: {opened.variable} is {state.lease.lock_id}",
        hint="Work under that lease; 'holdfast lease renew' extends it.",
        lock_id=state.lease.lock_id,
        **opened.service.keys(opened.subject).facts(),
    )


def _named_lease(
    opened: OpenedRepository, lock_id: str | None, environment: Mapping[str, str]
) -> tuple[str | None, int | None]:
    """The id of the lease that the caller names, and the token that came with it."""
    if lock_id is not None or environment.get(WORKTREE, opened.worktree) != opened.worktree:
        return lock_id, None
    return environment.get(LOCK_ID), token_named(environment)


def fenced_by_name(
    opened: OpenedRepository, lock_id: str | None, environment: Mapping[str, str] = os.environ
) -> AbstractContextManager[None]:
    """`fenced` for the lease that the caller names: a later holder may have removed the worktree."""
    from holdfast.repository.context import Proof

    named, token = _named_lease(opened, lock_id, environment)
    known = Proof(named, token) if named and token is not None else None
    return opened.repository.fenced(opened.worktree, known)


@contextlib.contextmanager
def proven(
    opened: OpenedRepository,
    lock_id: str | None,
    purpose: str,
    *,
    wait: float | None = 0.0,
    check: Callable[[], object] = lambda: None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Proof | None]:
    """Yield the proof needed to publish in a worktree: of the named lease, else of a lease acquired for this block.
    Before it acquires a lease, it calls `check`, which raises failures that need no lease.

    A lease in the environment counts only for the worktree that the environment names with it. Its token is the one
    that came with the lease, never the current one. Yields None in a shared worktree, which has no lease.
    """
    from holdfast.cli.progress import waiting
    from holdfast.leases.service import OWN_TTL
    from holdfast.repository.context import Isolation, Proof

    repository, worktree = opened
    named, token = _named_lease(opened, lock_id, environment)
    with fenced_by_name(opened, lock_id, environment):
        isolation = repository.config(worktree).isolation
    if named and isolation is not Isolation.SHARED:
        yield repository.proof(worktree, named, token)
        return
    check()
    if isolation is Isolation.SHARED:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            with waiting(wait, lambda: lease_waited_for(repository.leases, worktree, "worktree")):
                lease = stack.enter_context(repository.lease(worktree, ttl=OWN_TTL, wait=wait, purpose=purpose))
        except LockConflict as conflict:
            own = f"If the lease is yours, name it with --lock-id or {LOCK_ID}."
            hint = conflict.hint if "free_at" in conflict.facts else "Wait for it with --wait 1m."
            raise LockConflict(conflict.message, hint=f"{hint} {own}", **conflict.facts) from None
        yield Proof(lease.lock_id, lease.token)


def observe_file_lock(path: str, wait: LockWait, *, shared: bool, fair: bool) -> DeadlockWatch:
    """Look for a deadlock while this command waits for a file lock: for `FileLocker(observer=...)`."""
    from holdfast.leases.queue import DeadlockWatch

    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(None, path).for_file_lock(path, since, shared=shared, fair=fair)

    return DeadlockWatch(prepare, wait.timeout, wait.cancel, forks=False)


def observe_repo_lock(lock: RepoLock, repo_id: str, purpose: str, wait: float | None) -> DeadlockWatch:
    """Look for a deadlock while this command polls for a repository lock."""
    from holdfast.leases.queue import DeadlockWatch

    since = time.time()

    def prepare() -> NotedWait:
        return _lock_waits(lock.data_dir, None).for_repo_lock(lock, repo_id, purpose, since)

    return DeadlockWatch(prepare, wait, forks=False)


def _lock_waits(data_dir: Path | None, path: str | None) -> LockWaits:
    """The waits that this command can see: in its repository or the one around `path`, and in `data_dir`."""
    from holdfast.locks.identity import calling_agent
    from holdfast.repository.waits import LockWaits, wait_context
    from holdfast.store.approvals import data_directory

    if data_dir is None:
        with contextlib.suppress(Failure):  # no home directory
            data_dir = data_directory(None, os.environ)
    around = wait_context(_repository_around(path), data_dir, ledger_address=store_address(os.environ))
    actor, lock_id = os.environ.get(ACTOR) or "", os.environ.get(LOCK_ID) or ""
    return LockWaits(around, agent=calling_agent(), actor=actor, lock_id=lock_id)


def _repository_around(path: str | None) -> Path | None:
    from holdfast.repository.locating import find_repository_root

    starts = [os.environ.get(REPO) or ".", *([] if path is None else [os.path.dirname(path) or "."])]
    with contextlib.suppress(OSError):  # the current directory is gone
        return next((Path(found) for found in map(find_repository_root, starts) if found), None)
    return None
