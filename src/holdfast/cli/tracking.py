"""What the commands about issues share: which tracker, in whose name, under which claim."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.fields import field_of
from holdfast.cli.fields import show_field as show_field
from holdfast.cli.options import Command, json_option
from holdfast.cli.output import CommandFailed
from holdfast.cli.places import store_address
from holdfast.cli.repository import ACTOR
from holdfast.errors import LockTimeout, UsageFailure

if TYPE_CHECKING:
    from holdfast.issues.model import ClaimId
    from holdfast.issues.tracker import Tracker

REPO_VARIABLE = "HOLDFAST_REPO"
ACTOR_VARIABLE = ACTOR
CLAIM_VARIABLE = "HOLDFAST_CLAIM_ID"

_repo = click.option(
    "--repo",
    metavar="DIRECTORY",
    type=click.Path(),
    help="Where the tracker is.  [default: HOLDFAST_REPO from the environment, else this directory "
    "or the nearest above it that has a tracker]",
)
_actor = click.option(
    "--actor",
    metavar="KIND:NAME",
    help="Who is doing this.  [default: HOLDFAST_ACTOR from the environment, else human:USER]",
)
claim_option = click.option(
    "--claim",
    "claim_text",
    metavar="CLAIM_ID",
    help="The claim under which you write; refused if it is not in force any more.  "
    "[default: HOLDFAST_CLAIM_ID from the environment, if it is for this issue]",
)
field_option = field_of()


def reading_options(command: Command) -> Command:
    """The options of a command that only looks."""
    return _repo(json_option(command))


def writing_options(command: Command) -> Command:
    """The options of a command that changes something."""
    return _repo(_actor(json_option(command)))


@contextlib.contextmanager
def tracking(repo: str | None, actor: str | None = None, *, init: bool = False) -> Iterator[Tracker]:
    """The tracker, opened as the options and the environment say; with advice if a lock cannot be had."""
    from holdfast.fs.names import checked_actor
    from holdfast.locks.retry import lock_timeout, retry_config
    from holdfast.repository.opening import find_root, open_tracker

    named = repo or os.environ.get(REPO_VARIABLE)
    start = Path(os.path.abspath(named or os.getcwd()))
    timeout, retry = lock_timeout(os.environ), retry_config(os.environ)
    root = start if init else find_root(start)
    who = actor or os.environ.get(ACTOR_VARIABLE)
    who = checked_actor(who, "--actor" if actor else ACTOR_VARIABLE) if who else _person()
    try:
        address = store_address(os.environ)
        yield open_tracker(root, actor=who, address=address, timeout=timeout, retry=retry)
    except LockTimeout as failure:
        raise CommandFailed(failure, advice=lock_advice(failure)) from failure


def lock_advice(failure: LockTimeout) -> str:
    """What to do about a lock that was not to be had in time."""
    seconds = math.ceil(max(10.0, 2 * failure.timeout))
    return (
        "This usually means another holdfast process is running.\n"
        "Try:\n"
        "  1. Wait a few seconds and retry\n"
        "  2. Check for stuck processes: ps aux | grep holdfast\n"
        f"  3. Increase timeout: JIT_LOCK_TIMEOUT={seconds} holdfast ..."
    )


def claim_for(issue_id: str, flag: str | None) -> ClaimId | None:
    """The claim that was shown for this issue: by the option, or by the environment if it is for it."""
    from holdfast.issues.model import ClaimId

    if flag:
        shown = ClaimId.parse(flag)
        if shown.issue_id != issue_id:
            raise UsageFailure(f"the claim {flag} is for {shown.issue_id}, not for {issue_id}")
        return shown
    text = os.environ.get(CLAIM_VARIABLE)
    claim = ClaimId.parse(text) if text else None
    return claim if claim is not None and claim.issue_id == issue_id else None


def _person() -> str:
    from holdfast.locks.identity import current_holder

    return f"human:{current_holder().user.replace(' ', '_') or 'unknown'}"
