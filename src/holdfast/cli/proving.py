"""By which right a command publishes: the lock that its caller holds, or one for its own duration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import UNLIMITED, duration_or_none
from holdfast.cli.repository import LOCK_ID, TOKEN, WORKTREE, Opened
from holdfast.errors import LockConflict, SettingInvalid

if TYPE_CHECKING:
    from holdfast.repository.context import Proof

TTL = 20.0
"""How long the lock lasts that a command takes for itself; it is renewed until the command ends."""


wait_option = click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="If somebody else holds the lock: how long to wait for it, such as 30s, 5m; 'none': without limit.  "
    "[default: not at all, fail with status 4]",
)


@contextlib.contextmanager
def proven(
    opened: Opened,
    lock_id: str | None,
    purpose: str,
    *,
    wait: float | None = None,
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
        seconds = None if wait == UNLIMITED else wait or 0.0
        lease = repository.lease(worktree, ttl=TTL, wait=seconds, purpose=purpose)
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
