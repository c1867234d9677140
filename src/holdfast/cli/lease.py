"""`holdfast lease`: acquire, renew, release, steal and show the leases of worktrees, and named leases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import LEASE_ID, LEASE_NAME, LEASE_TOKEN, LOCK_ID, TOKEN, WORKTREE, options
from holdfast.cli.entry import Group
from holdfast.cli.output import Output
from holdfast.cli.progress import waiting
from holdfast.cli.repository import OpenedLease, held_lock_id, open_lease, open_repository, refuse_own_lease
from holdfast.clock import format_ago, format_duration
from holdfast.errors import UsageFailure
from holdfast.locks.identity import Liveness
from holdfast.repository.context import Isolation
from holdfast.repository.to_json import lease_state_to_json, lease_to_json

if TYPE_CHECKING:
    from holdfast.leases.rules import Lease
    from holdfast.leases.service import LeaseState
    from holdfast.locks.identity import Holder
    from holdfast.repository.context import WorktreeConfig

HIGH_RISK = "shared (high-risk: nothing keeps writers apart)"
_NOT_VISIBLE = "not visible; the lease belongs to whoever has its id, until it expires"
LEASE_FIELDS = (
    *("lock_id", "token", "worktree", "expires_at", "holder_id", "actor", "purpose", "ttl"),
    *("created_at", "renewed_at", "identity", "detached", "on_behalf_of", "boot_expires_at"),
)

group = Group(
    "lease",
    help=f"""\
A lease is the right of one holder to write to a worktree for a limited time. Its token fences out a
holder that has lost it. Acquire it, renew it in time, and release it; 'holdfast run' does all three.

A lease belongs to whoever knows its id, not to the process that acquired it: each command of an agent may
be a new process. The recorded holder is the process that ran 'lease acquire' (an agent, a script, your
shell; not a shell that was started for this one command), or the one that --holder-pid names. When that
process ends, the lease stays until it is released or expires.

With --name, a lease needs no worktree: it is the right to do the job that it is named after, such as a nightly
build. It has a token, a queue and a ttl like the others. Name jobs, not single runs: the token counter of each
name is kept forever.

\b
Examples:
  eval "$(holdfast lease acquire --ttl 10m --export)"
  holdfast lease renew && holdfast lease release
  holdfast lease acquire --name nightly-job --ttl 1h

The id comes from --lock-id, else from the environment: {LOCK_ID}, or with --name {LEASE_ID}.
""",
)

_ttl_option = options.ttl_option("Time until the lease expires unless renewed, from 100ms to 1d.", default="30s")
_HOLDER_PID = "The process to record as the holder.  [default: the one that runs this command]"
_holder_pid_option = click.option("--holder-pid", metavar="PID", type=click.IntRange(min=1), help=_HOLDER_PID)
_field_option = options.field_option(*LEASE_FIELDS)
_export_option = click.option(
    "--export", is_flag=True, help="Print shell commands that export the lease for later commands."
)


@group.command(short_help="Acquire the lease of a worktree, or a named one.")
@options.worktree_options
@options.name_option
@_ttl_option
@options.wait_option("How long to wait in the queue")
@options.purpose_option
@options.priority_option
@_holder_pid_option
@_field_option
@_export_option
@options.with_output
def acquire(
    output: Output,
    *,
    repo: str | None,
    worktree: str | None,
    name: str | None,
    ttl: float,
    wait: float | None,
    purpose: str,
    priority: int,
    holder_pid: int | None,
    field: str | None,
    export: bool,
) -> None:
    """Acquire the lease of a worktree and print its id. An expired lease is taken over.

    If another holder has it, the error gives that holder's host and purpose, the times of the lease, and
    whether the process is alive.

    \b
    Examples:
      holdfast lease acquire --ttl 10m --purpose "refactoring"
      export HOLDFAST_LOCK_ID=$(holdfast lease acquire --wait 1m --field lock_id)
      eval "$(holdfast lease acquire --name nightly-job --ttl 1h --export)"
    """
    opened = open_lease(repo, worktree, name)
    refuse_own_lease(opened)
    holder = _holder(holder_pid)
    given: dict[str, Any] = {"name": name, "ttl": ttl, "purpose": purpose, "priority": priority, "behalf_of": holder}
    with contextlib.ExitStack() as unless_printed:
        with waiting(wait, opened.waiting_text):
            held = opened.repository.lease(opened.worktree, wait=wait, **given)
            release = partial(opened.service.release, opened.subject, held.lock_id)
            unless_printed.enter_context(options.given_back(release))
        _print_granted(output, opened, held.lease, field=field, export=export)


@group.command(short_help="Take over an expired lease.")
@options.worktree_options
@options.name_option
@_ttl_option
@options.purpose_option
@_holder_pid_option
@_field_option
@_export_option
@options.with_output
def steal(
    output: Output,
    *,
    repo: str | None,
    worktree: str | None,
    name: str | None,
    ttl: float,
    purpose: str,
    holder_pid: int | None,
    field: str | None,
    export: bool,
) -> None:
    """Take over the expired lease of a worktree. A lease that has not expired is refused (status 4).

    'acquire' takes over an expired lease too, but only when the queue is empty.

    \b
    Example:
      holdfast lease steal --worktree experiment --ttl 5m
    """
    opened = open_lease(repo, worktree, name)
    holder = _holder(holder_pid)
    granted = opened.repository.steal(opened.worktree, name=name, ttl=ttl, purpose=purpose, behalf_of=holder)
    _print_granted(output, opened, granted.lease, field=field, export=export)


@group.command(short_help="Renew your lease.")
@options.worktree_options
@options.name_option
@options.lock_id_option
@options.ttl_option("The new ttl, from now: from 100ms to 1d.  [default: unchanged]")
@options.with_output
def renew(
    output: Output, *, repo: str | None, worktree: str | None, name: str | None, lock_id: str | None, ttl: float | None
) -> None:
    """Renew your lease for its full ttl. If this fails (status 5), stop writing.

    \b
    Example:
      holdfast lease renew --ttl 10m
    """
    opened = open_lease(repo, worktree, name)
    lease = opened.service.renew(opened.subject, held_lock_id(opened, lock_id), ttl)
    line = f"{lease.subject}: renewed; expires in {format_duration(lease.ttl)} ({lease.lease_expires_at})"
    output.result(lease_to_json(lease), [line])


@group.command(short_help="Release your lease.")
@options.worktree_options
@options.name_option
@options.lock_id_option
@options.with_output
def release(output: Output, *, repo: str | None, worktree: str | None, name: str | None, lock_id: str | None) -> None:
    """Release your lease. If it is no longer yours, nothing changes (status 5).

    \b
    Example:
      holdfast lease release
    """
    opened = open_lease(repo, worktree, name)
    lease = opened.service.release(opened.subject, held_lock_id(opened, lock_id))
    output.result(lease_to_json(lease), [f"{lease.subject}: released"])


@group.command(short_help="Show the holder of a worktree's lease.")
@options.worktree_options
@options.name_option
@options.with_output
def status(output: Output, *, repo: str | None, worktree: str | None, name: str | None) -> None:
    """Show who holds a worktree's lease, since when and until when, and the queue. Changes nothing.

    \b
    Examples:
      holdfast lease status
      holdfast lease status --worktree experiment --json
    """
    opened = open_lease(repo, worktree, name)
    subject = opened.repository.config(opened.worktree) if opened.name is None else opened.name
    state = opened.service.state(opened.subject)
    output.result(lease_state_to_json(subject, state), lease_state_lines(subject, state))


@group.command("list", short_help="Show all leases.")
@options.in_repository
def list_(output: Output, *, repo: str | None) -> None:
    """Show the holder of every lease: those of worktrees and named ones. Changes nothing.

    \b
    Example:
      holdfast lease list --json
    """
    repository = open_repository(repo)
    states = [(each, repository.leases.state(each.worktree_id)) for each in repository.worktrees.configs()]
    named = [(each.lease.subject, each) for each in repository.named_leases.states()]
    record = {"root": str(repository.root), "worktrees": [lease_state_to_json(*each) for each in states]}
    record["named"] = [lease_state_to_json(*each) for each in named]
    lines = [line for each in states for line in lease_state_lines(*each)]
    output.result(record, [*lines, *(line for each in named for line in lease_state_lines(*each))])


def _print_granted(output: Output, opened: OpenedLease, lease: Lease, *, field: str | None, export: bool) -> None:
    """Print a new lease; if that fails, release it."""
    lines = [
        f"{lease.subject}: leased for {format_duration(lease.ttl)}, unless renewed",
        f"  expires   {lease.lease_expires_at}",
        f"  lock id   {lease.lock_id}",
        f"  token     {lease.fencing_token}",
        f"  export {opened.variable}={lease.lock_id}",
    ]
    if export:
        variables = (LOCK_ID, TOKEN, WORKTREE) if opened.name is None else (LEASE_ID, LEASE_TOKEN, LEASE_NAME)
        values = lease.lock_id, lease.fencing_token, lease.subject
        lines = [f"export {name}={value}" for name, value in zip(variables, values, strict=True)]
    with options.given_back(lambda: opened.service.release(opened.subject, lease.lock_id)):
        options.print_record(output, field, lease_to_json(lease), lines)


def _holder(pid: int | None) -> Holder:
    """The holder to record: the process that runs this command, because it outlives the command."""
    from holdfast.locks.identity import calling_agent, holder_with_pid

    holder = calling_agent() if pid is None else holder_with_pid(pid)
    if holder is None:
        raise UsageFailure(f"there is no process {pid}", pid=pid)
    return holder


def lease_state_lines(subject: WorktreeConfig | str, state: LeaseState | None) -> Iterator[str]:
    """The lease of a worktree, or of a name, and its waiters."""
    name = subject if isinstance(subject, str) else subject.worktree_id
    if not isinstance(subject, str) and subject.isolation is Isolation.SHARED:
        yield f"{name}: {HIGH_RISK}"
    elif state is None:
        yield f"{name}: free"
    else:
        lease, left = state.lease, format_duration(abs(state.time_left))
        yield f"{name}: {lease_summary(state)}"
        if lease.purpose:
            yield f"  purpose   {lease.purpose}"
        yield f"  leased    {format_ago(lease.created_at)}, renewed {format_ago(lease.last_renewed_at)}"
        if state.expired:
            yield f"  expires   {left} ago; the next to acquire it takes it over"
        else:
            yield f"  expires   in {left}, unless renewed"
        hidden = lease.detached and state.liveness is Liveness.UNKNOWN
        yield f"  process   {_NOT_VISIBLE if hidden else state.liveness.value}"
        yield f"  lock id   {lease.lock_id}"
        yield f"  token     {lease.fencing_token}"
        for position, waiter in enumerate(state.waiters, 1):
            yield f"  waiting   {position}. {waiter.holder_id}, joined {format_ago(waiter.since)}"


def lease_summary(state: LeaseState) -> str:
    return f"{'expired, was leased' if state.expired else 'leased'} by {state.lease.who()}"
