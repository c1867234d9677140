"""`holdfast lock`: the lease of a worktree, for agents whose every command is a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from holdfast.cli.entry import Group
from holdfast.cli.options import (
    LEASE_FIELDS,
    UNLIMITED,
    duration,
    duration_or_none,
    field_of,
    json_option,
    tell,
)
from holdfast.cli.output import Output
from holdfast.cli.repository import (
    LOCK_ID,
    TOKEN,
    WORKTREE,
    OpenedRepository,
    held_lock_id,
    lock_id_option,
    open_repository,
    open_worktree,
    refuse_own_lock,
    repo_option,
    worktree_option,
)
from holdfast.clock import format_duration
from holdfast.errors import UsageFailure
from holdfast.locks.identity import Liveness
from holdfast.repository.records import Isolation
from holdfast.repository.to_json import lease_state_to_json as lease_state_to_json
from holdfast.repository.to_json import lease_state_word
from holdfast.repository.to_json import lease_to_json as lease_to_json

if TYPE_CHECKING:
    from holdfast.leases.rules import Lease
    from holdfast.leases.service import LeaseState
    from holdfast.locks.identity import Holder
    from holdfast.repository.records import WorktreeConfig


group = Group(
    "lock",
    help=f"""\
The lock of a worktree: a lease, which one holder has for a limited time, with a token that fences out
whoever has lost it. Acquire it, renew it in time, and release it; 'holdfast run' does all three.

The lock does not belong to the process that acquired it, but to whoever knows its id: an agent's every
command may be a new process. Its holder is recorded as the process that ran 'lock acquire' (an agent, a
script, your shell; not a shell that was started for this one command), or as --holder-pid names it.
When that process ends the lock stays: it lasts until it is released or its time is up.

\b
Example:
  eval "$(holdfast lock acquire --ttl 10m --export)"
  holdfast lock renew && holdfast lock release

The id is taken from --lock-id, else from {LOCK_ID} in the environment.
""",
)

_ttl_option = click.option(
    "--ttl",
    metavar="DURATION",
    default="30s",
    show_default=True,
    callback=duration,
    help="How long the lock lasts unless it is renewed, such as 30s, 10m.",
)
_purpose_option = click.option("--purpose", metavar="TEXT", default="", help="What for: others are shown it.")
_holder_pid_option = click.option(
    "--holder-pid",
    metavar="PID",
    type=click.IntRange(min=1),
    help="The process to record as the holder.  [default: the one that runs this command]",
)
_field_option = field_of(*LEASE_FIELDS)
_export_option = click.option(
    "--export",
    is_flag=True,
    help="Print lines for a shell to evaluate, which name the lock to later commands.",
)


@group.command(short_help="Acquire the lock of a worktree.")
@repo_option
@worktree_option
@_ttl_option
@click.option(
    "--wait",
    metavar="DURATION",
    callback=duration_or_none,
    help="How long to wait in line, such as 30s, 5m; 'none': without limit.  "
    "[default: not at all, fail with status 4]",
)
@_purpose_option
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Who waits with a higher one is served first."
)
@_holder_pid_option
@_field_option
@_export_option
@json_option
@click.pass_obj
def acquire(
    output: Output,
    *,
    repo: str | None,
    worktree: str | None,
    ttl: float,
    wait: float | None,
    purpose: str,
    priority: int,
    holder_pid: int | None,
    field: str | None,
    export: bool,
) -> None:
    """Acquire the lock of a worktree and print its id. One that has expired is taken over.

    Who else holds it is named with host, purpose, since when, for how long, and whether it is alive.

    \b
    Examples:
      holdfast lock acquire --ttl 10m --purpose "refactoring"
      export HOLDFAST_LOCK_ID=$(holdfast lock acquire --wait 1m --field lock_id)
    """
    opened = open_worktree(repo, worktree)
    refuse_own_lock(opened.repository, opened.worktree)
    seconds = None if wait == UNLIMITED else wait or 0.0
    held = opened.repository.lease(
        opened.worktree,
        ttl=ttl,
        wait=seconds,
        purpose=purpose,
        priority=priority,
        behalf_of=_holder(holder_pid),
    )
    with _given_back_if_nobody_is_told(opened, held.lease):
        _print_granted(output, held.lease, field=field, export=export)


@group.command(short_help="Take over a lock that has expired.")
@repo_option
@worktree_option
@_ttl_option
@_purpose_option
@_holder_pid_option
@_field_option
@_export_option
@json_option
@click.pass_obj
def steal(
    output: Output,
    *,
    repo: str | None,
    worktree: str | None,
    ttl: float,
    purpose: str,
    holder_pid: int | None,
    field: str | None,
    export: bool,
) -> None:
    """Take over the lock of a worktree, which must have expired: one that has not is left alone.

    'acquire' takes over an expired lock too, but only when nobody waits in line.

    \b
    Example:
      holdfast lock steal --worktree experiment --ttl 5m
    """
    opened = open_worktree(repo, worktree)
    granted = opened.repository.steal(
        opened.worktree, ttl=ttl, purpose=purpose, behalf_of=_holder(holder_pid)
    )
    with _given_back_if_nobody_is_told(opened, granted.lease):
        _print_granted(output, granted.lease, field=field, export=export)


@group.command(short_help="Let your lock last longer.")
@repo_option
@worktree_option
@lock_id_option
@click.option(
    "--ttl", metavar="DURATION", callback=duration, help="How long from now on.  [default: as long as before]"
)
@json_option
@click.pass_obj
def renew(
    output: Output, *, repo: str | None, worktree: str | None, lock_id: str | None, ttl: float | None
) -> None:
    """Let your lock last for another while from now on. If that fails (status 5), stop writing.

    \b
    Example:
      holdfast lock renew --ttl 10m
    """

    opened = open_worktree(repo, worktree)
    lease = opened.repository.desk.renew(opened.worktree, held_lock_id(lock_id), ttl)
    output.result(lease_to_json(lease), [f"{lease.worktree_id}: locked until {lease.lease_expires_at}"])


@group.command(short_help="Give your lock back.")
@repo_option
@worktree_option
@lock_id_option
@json_option
@click.pass_obj
def release(output: Output, *, repo: str | None, worktree: str | None, lock_id: str | None) -> None:
    """Give your lock back. If it is not yours any more (status 5), nothing is touched.

    \b
    Example:
      holdfast lock release
    """

    opened = open_worktree(repo, worktree)
    lease = opened.repository.desk.release(opened.worktree, held_lock_id(lock_id))
    output.result(lease_to_json(lease), [f"{lease.worktree_id}: released"])


@group.command(short_help="Show who holds the lock of a worktree.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def status(output: Output, *, repo: str | None, worktree: str | None) -> None:
    """Show who holds the lock of a worktree, since when and until when, and who waits. Changes nothing.

    \b
    Examples:
      holdfast lock status
      holdfast lock status --worktree experiment --json
    """

    opened = open_worktree(repo, worktree)
    config = opened.repository.control.config(opened.worktree)
    state = opened.repository.desk.state(opened.worktree)
    output.result(lease_state_to_json(config, state), lease_state_lines(config, state))


@group.command("list", short_help="Show the locks of all worktrees.")
@repo_option
@json_option
@click.pass_obj
def list_(output: Output, *, repo: str | None) -> None:
    """Show for each worktree who holds its lock. Changes nothing.

    \b
    Example:
      holdfast lock list --json
    """

    repository = open_repository(repo)
    states = [(each, repository.desk.state(each.worktree_id)) for each in repository.worktrees.configs()]
    output.result(
        {"root": str(repository.root), "worktrees": [lease_state_to_json(*each) for each in states]},
        [line for each in states for line in lease_state_lines(*each)],
    )


@contextlib.contextmanager
def _given_back_if_nobody_is_told(opened: OpenedRepository, lease: Lease) -> Iterator[None]:
    """Release a lock whose id could not be printed: nobody could use it, and everybody would wait for it."""
    try:
        yield
    except BaseException:
        opened.repository.desk.release(opened.worktree, lease.lock_id)
        raise


def _print_granted(output: Output, lease: Lease, *, field: str | None, export: bool) -> None:
    from holdfast.clock import format_duration

    record = lease_to_json(lease)
    if field is not None or output.as_json:
        tell(output, field, record, ())
    elif export:
        values = {LOCK_ID: lease.lock_id, TOKEN: lease.fencing_token, WORKTREE: lease.worktree_id}
        for name, value in values.items():
            output.line(f"export {name}={value}")
    else:
        output.line(f"{lease.worktree_id}: locked for {format_duration(lease.ttl)}, unless it is renewed")
        output.line(f"  expires   {lease.lease_expires_at}")
        output.line(f"  lock id   {lease.lock_id}")
        output.line(f"  token     {lease.fencing_token}")
        output.line(f"  export {LOCK_ID}={lease.lock_id}")


def _holder(pid: int | None) -> Holder:
    """Who holds what this command acquires: the process that runs it, which lives longer than we do."""
    from holdfast.locks.identity import calling_agent, holder_with_pid

    if pid is not None:
        named = holder_with_pid(pid)
        if named is None:
            raise UsageFailure(f"there is no process {pid}", pid=pid)
        return named
    return calling_agent()


HIGH_RISK = "shared (high-risk: nothing keeps writers apart)"


def lease_state_lines(config: WorktreeConfig, state: LeaseState | None) -> Iterator[str]:
    """The same for people."""
    name = config.worktree_id
    if config.isolation is Isolation.SHARED:
        yield f"{name}: {HIGH_RISK}"
    elif state is None:
        yield f"{name}: free"
    else:
        yield f"{name}: {lease_summary(state)}"
        lease = state.lease
        if lease.purpose:
            yield f"  purpose   {lease.purpose}"
        yield f"  since     {lease.created_at}, renewed {lease.last_renewed_at}"
        yield f"  expires   {_expiry(state)}"
        yield f"  process   {_life(state)}"
        yield f"  lock id   {lease.lock_id}"
        yield f"  token     {lease.fencing_token}"
        for place, waiter in enumerate(state.waiters, 1):
            yield f"  waiting   {place}. {waiter.holder_id} since {waiter.since}"


def lease_summary(state: LeaseState) -> str:
    """Who holds a lock, in one line."""
    return f"{lease_state_word(state)}{', was held' if state.expired else ''} by {state.lease.who()}"


def _expiry(state: LeaseState) -> str:
    if state.expired:
        return f"{format_duration(-state.time_left)} ago; the next one who wants it takes it over"
    return f"in {format_duration(state.time_left)}, unless its holder renews it"


def _life(state: LeaseState) -> str:
    if state.lease.detached and state.liveness is Liveness.UNKNOWN:
        return "not to be seen; the lock belongs to whoever has its id, and lasts until it expires"
    return state.liveness.value
