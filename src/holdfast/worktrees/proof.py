"""What a holder shows when it publishes: the id of its lease and the token that came with it.

The token belongs to the lock id. It is never read from whatever lease is there at the moment: that
may be a thief's, and a stale holder that picked it up would not be stale any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import FencingMismatch, LockNotHeld
from holdfast.leases.rules import LeaseKeys
from holdfast.store.model import Key, View
from holdfast.worktrees.control import Control, settled_config
from holdfast.worktrees.records import OPERATIONS, WORKTREES, Isolation, WorktreeConfig


class Proof(NamedTuple):
    """The right to publish, as long as the lease that it names is the current one."""

    lock_id: str
    token: int


Permission = Callable[[View, float], WorktreeConfig]
"""The worktree's record, if it may be published into at this moment; else raises. Pure."""


def proof_of(control: Control, worktree: str, lock_id: str, token: int | None = None) -> Proof:
    """The proof of who holds the lease `lock_id`; a token that is not given is the one that it has now."""
    if token is not None:
        return Proof(lock_id, token)
    document = control.store.read(LeaseKeys.of(worktree).lease)
    if document is None or document.record.lock_id != lock_id:
        counter = control.store.read(LeaseKeys.of(worktree).counter)
        raise FencingMismatch(
            f"the lock {lock_id} is not the current one of {worktree}; nothing was published",
            worktree=worktree,
            lock_id=lock_id,
            current_token=counter.record.fencing_token if counter else None,
        )
    return Proof(lock_id, document.record.fencing_token)


def publishing_keys(worktree: str) -> list[Key[Any]]:
    """What a transaction names that asks for a permission."""
    keys = LeaseKeys.of(worktree)
    return [WORKTREES.key(worktree), OPERATIONS.key(worktree), keys.lease, keys.counter]


def permission(control: Control, worktree: str, proof: Proof | None) -> Permission:
    """Whether what comes with this proof may be published, to be asked inside the transaction that does.

    So no steal can come between the question and the publishing. The clock is read now; if it is old
    by then it may let in a holder whose time is up, but never one whose place somebody has taken.
    """
    validate = None if proof is None else control.desk.validator(worktree, proof.lock_id, proof.token)

    def ask(view: View, now: float) -> WorktreeConfig:
        config = settled_config(view, worktree)
        if config.isolation is Isolation.EXCLUSIVE:
            if validate is None:
                raise not_held(worktree)
            validate(view, now)
        return config

    return ask


def check_early(control: Control, worktree: str, proof: Proof | None) -> WorktreeConfig:
    """The same as of now, so that what is bound to be refused costs no work. It proves nothing."""
    view = View({key: control.store.read(key) for key in publishing_keys(worktree)})
    return permission(control, worktree, proof)(view, control.store.now())


def not_held(worktree: str) -> LockNotHeld:
    return LockNotHeld(
        f"{worktree} is an exclusive worktree: this needs its lock",
        hint="Acquire it ('holdfast lock acquire') and hand on its id with --lock-id or HOLDFAST_LOCK_ID, "
        "or work under 'holdfast run'.",
        worktree=worktree,
    )
