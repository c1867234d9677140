"""`holdfast agent run`: run an agent on one issue, from claiming it to recording the outcome."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli import ACTOR, ISSUE_ID, LOCK_ID, PROMPT_FILE, REPO, TOKEN, WORKTREE
from holdfast.cli.child import RunCommand
from holdfast.cli.entry import Group
from holdfast.cli.issue_view import CLAIM_VARIABLE, tracking, warn_of_broken, writing_options
from holdfast.cli.options import (
    consistency_option,
    ignore_touches_option,
    into_option,
    store_address,
    ttl_option,
    wait_option,
)
from holdfast.cli.output import CommandFailed, Output, printable
from holdfast.cli.repository import lease_waited_for, open_repository, showing_output
from holdfast.clock import format_duration
from holdfast.errors import Failure, FencingMismatch, LockExpired, LockNotHeld, NotFound, UsageFailure
from holdfast.leases.service import COMMAND_TTL
from holdfast.locks.process_tree import Mark

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.cli.child import CommandExit
    from holdfast.issues.model import Issue
    from holdfast.issues.tracker import Tracker
    from holdfast.ledger.log import Ledger
    from holdfast.repository.agent import Assignment, AssignmentOptions, Outcome
    from holdfast.repository.landing import Landings, LandOptions
    from holdfast.repository.landing_records import Landing
    from holdfast.repository.repository import Repository

SHELLS = frozenset(["sh", "ash", "bash", "dash", "fish", "ksh", "zsh"])
NOT_SAVED = "The outcome is recorded, but no snapshot of the work was taken. It is still in the worktree {}."
LOST = """\
The command was stopped: the claim or the lease was lost, so another agent may have this work.
None of it was published. Its files are still in the worktree."""

group = Group("agent", help="Let agents work through the queue, one issue at a time.")


@group.command(cls=RunCommand, short_help="Claim an issue, run an agent on it, save and record its work.")
@click.option("--issue", "issue_id", metavar="ID", help="Claim this issue.")
@click.option("--next", "take_next", is_flag=True, help="Claim the most urgent issue that is ready.")
@ignore_touches_option
@click.option("--worktree", metavar="NAME", help="The worktree.  [default: the issue's own, created from main]")
@click.option("--isolated", is_flag=True, help="Create the worktree as a clone, for an agent in a sandbox.")
@consistency_option("the snapshot", default="retry, then best_effort with a warning")
@click.option("--gate", metavar="KEY", help="The gate that COMMAND passes or fails.")
@ttl_option(
    "How long the claim lasts if this process is killed, from 100ms to 1d; while it lives, it renews the claim.",
    default=format_duration(COMMAND_TTL),
)
@wait_option(
    "How long to wait for the worktree and, with --next, for a ready issue while any is unfinished",
    default_text="do not wait",
)
@click.option("--land", is_flag=True, help="Land the work on a branch; the landing finishes the issue.")
@into_option
@click.option("--no-chdir", is_flag=True, help="Run COMMAND in the current directory, not in the worktree.")
@click.option(
    "--remove-worktree",
    is_flag=True,
    help="Remove the issue's own worktree once the issue is done; a pin protects the snapshot of the work.",
)
@writing_options
@click.pass_obj
def run(
    output: Output,
    /,
    *,
    take_next: bool,
    land: bool,
    into: str | None,
    no_chdir: bool,
    remove_worktree: bool,
    command: tuple[str, ...],
    **given: Any,
) -> int:
    """Claim an issue, create or reuse its worktree, lease the worktree, and run COMMAND in it.

    In its arguments, {prompt} is replaced with the task as text: the issue, the outcomes of its dependencies, notes of
    earlier attempts, its gates, and what to do at the end. {title}, {id} and {worktree} (its path) are replaced too;
    other braces stay. A script should read the task from the file HOLDFAST_PROMPT_FILE instead: in the code of 'sh -c',
    the shell would execute text from the issue, so {prompt} and {title} are refused there.

    If COMMAND succeeds, its work becomes a snapshot, the ledger (if there is one) gets an event, and the issue is done.
    If it fails, the same happens, but the issue goes back to the queue. If COMMAND or Holdfast is killed, the issue
    goes back to the queue when the claim expires, and no work is lost. If files keep changing, the snapshot is retried,
    then taken as best_effort, with a warning. If no snapshot can be taken, the outcome still counts, the work stays in
    the worktree, and the exit status says why.

    In a git checkout, a warning is printed if the worktree already conflicts with another worktree, or with the branch
    that work lands on ('holdfast conflicts').

    A new worktree is set up first ('holdfast config'). If that fails, COMMAND is not started, the issue goes back to
    the queue, and the next attempt repeats the setup.

    COMMAND has HOLDFAST_PROMPT_FILE, HOLDFAST_ISSUE_ID, HOLDFAST_CLAIM_ID, HOLDFAST_WORKTREE, HOLDFAST_LOCK_ID and
    HOLDFAST_TOKEN in its environment. If the claim or the lease is lost, COMMAND is stopped (SIGTERM, then SIGKILL) and
    its work is not published. If COMMAND itself finishes or releases the issue ('holdfast issue finish'), that outcome
    stands. Exits with the status of COMMAND, or with 3 if there is nothing to do.

    With --land, a new worktree starts at the tip of the branch to land on. The work of a COMMAND that succeeds is
    committed and queued for that branch ('holdfast land'), and the issue is done only when the work has landed. If the
    work conflicts or fails a check, the issue goes back to the queue, and the prompt of the next attempt says why
    (status 4 or 1).

    The worktree is kept when the issue is done, so that you can review the work and bring it into main. Then remove it
    ('holdfast worktree remove'). With --remove-worktree, it is removed at once if the issue is done (not while it waits
    for gates) and no process uses it; 'holdfast pin list' shows the snapshot.

    \b
    Examples:
      holdfast agent run --next -- claude -p '{prompt}'
      holdfast agent run --next --land -- ./my-agent
      holdfast agent run --issue 4f1c --gate tests -- make check
      while holdfast agent run --next --wait forever -- ./my-agent; do :; done
    """
    from holdfast.cli import child
    from holdfast.repository.agent import AssignmentOptions, take_work
    from holdfast.store.open import sharing_connections

    click.get_current_context().with_resource(sharing_connections())
    repo, actor = given.pop("repo"), given.pop("actor")
    options = AssignmentOptions(assignee=actor, wait_for_issue=given["wait"] if take_next else 0.0, **given)
    if take_next is (options.issue_id is not None):
        raise click.UsageError("Give --issue ID, or --next.", click.get_current_context())
    _refuse_texts_as_code(command)
    if remove_worktree and options.worktree is not None:
        raise click.UsageError("--remove-worktree is for an issue's own worktree, not for --worktree.")
    if into is not None and not land:
        raise click.UsageError("--into is for --land.")
    environment = {**os.environ, ACTOR: actor} if actor else dict(os.environ)
    repository = open_repository(repo, environment)
    landing = _landing(repository, output, actor, into) if land else None
    options = options._replace(landing=landing[1] if landing else None)
    plan = AgentRun(command, environment, landing, ttl=options.ttl, chdir=not no_chdir, remove_worktree=remove_worktree)
    with tracking(repo or str(repository.root), actor) as tracker:
        ledger = _ledger(repository.root)
        take = partial(take_work, repository, tracker, ledger=ledger)
        with showing_output(), _taken(repository, tracker, options, take) as assignment:
            _tell(output, f"{_name(assignment.issue)} in {assignment.path}")
            warn_of_broken(output, assignment.broken)
            _warn_of_uncommitted(output, repository, assignment)
            _warn_of_conflicts(output, repository, assignment.lease.worktree)
            done = _work_on(assignment, repository, plan, output)
        _report(output, assignment, done)
    return child.end_like(done.ended)


class AgentRun(NamedTuple):
    """The command to run on an issue, and what to do when it has ended."""

    command: tuple[str, ...]
    environment: dict[str, str]
    landing: tuple[Landings, LandOptions] | None
    ttl: float
    chdir: bool
    remove_worktree: bool


class AgentResult(NamedTuple):
    """How the command ended, the outcome for the issue, and why its worktree was kept (None: it was removed)."""

    ended: CommandExit
    outcome: Outcome
    kept: str | None


def _work_on(assignment: Assignment, repository: Repository, plan: AgentRun, output: Output) -> AgentResult:
    """Run the command, then publish its work and record the outcome, unless the claim or the lease was lost."""
    from holdfast.issues.prompt import Ending

    try:
        with assignment.prompt_file(Ending.LANDING if plan.landing else Ending.COMMAND) as (prompt, path):
            variables = plan.environment | _variables(assignment, repository) | {PROMPT_FILE: str(path)}
            ended = _run_command(tuple(_filled(plan.command, assignment, prompt)), assignment, variables, plan)
        outcome = _concluded(assignment, ended, plan.landing)
        kept = _remove_worktree(assignment, outcome, output) if plan.remove_worktree else "not requested"
    except (LockNotHeld, LockExpired, FencingMismatch) as failure:
        raise CommandFailed(failure, advice=LOST) from failure
    return AgentResult(ended, outcome, kept)


def _report(output: Output, assignment: Assignment, done: AgentResult) -> None:
    """Print the outcome. Work that has not landed, or of which no snapshot was taken, is a failure."""
    from holdfast.issues.reading import unreadable_issues_to_json
    from holdfast.repository.agent import outcome_to_json

    ended, outcome, kept = done
    record = {**ended.as_record(), **outcome_to_json(outcome, assignment)}
    broken = unreadable_issues_to_json(assignment.broken)
    record |= {"worktree_removed": kept is None, "worktree_kept": kept, "broken": broken}
    _tell(output, _conclusion(outcome))
    if outcome.warning is not None:
        output.warning(outcome.warning)
    if outcome.landing is not None and not outcome.succeeded:
        raise _not_landed(outcome.landing, record)
    if outcome.not_saved is not None and ended.exit_status == 0:
        raise _not_saved(outcome.not_saved, assignment.lease.worktree, record)
    output.result(record)


def _preparing() -> str:
    return "preparing the worktree…"


@contextlib.contextmanager
def _taken(
    repository: Repository,
    tracker: Tracker,
    options: AssignmentOptions,
    take: Callable[..., AbstractContextManager[Assignment]],
) -> Iterator[Assignment]:
    """Yield the assignment. While it waits for an issue, prepares the worktree, and waits for that, the status line
    says so."""
    from holdfast.cli import child
    from holdfast.cli.issue_view import issue_waited_for
    from holdfast.cli.progress import waiting

    shown: Callable[[], str] = partial(issue_waited_for, tracker) if options.wait_for_issue != 0.0 else str

    def quietly() -> AbstractContextManager[frozenset[int]]:
        nonlocal shown
        shown = _preparing  # after the claim it is created, and after the lease it is set up
        return child.block_signals()

    def leasing(worktree: str) -> None:
        nonlocal shown
        shown = partial(lease_waited_for, repository.leases, worktree, "worktree")

    def text() -> str:
        return shown()

    with contextlib.ExitStack() as stack:
        with waiting(None, text):
            assignment = stack.enter_context(take(options._replace(leasing=leasing), quietly=quietly))
        yield assignment


def _warn_of_uncommitted(output: Output, repository: Repository, assignment: Assignment) -> None:
    """Warn if a new worktree lacks changes that are in main. A failed look must not keep the agent from working."""
    if assignment.in_new_worktree:
        with contextlib.suppress(Failure):
            if changed := repository.worktrees.uncommitted():
                worktree = assignment.lease.worktree
                output.warning(f"main has uncommitted changes, which are not in {worktree}: {changed}")


def _warn_of_conflicts(output: Output, repository: Repository, worktree: str) -> None:
    """Warn if the worktree already conflicts with others. A failed search must not keep the agent from working."""
    if not repository.home.has_branches:
        return
    from holdfast.cli.conflicts import conflict_line
    from holdfast.repository.conflicts import find_conflicts

    with contextlib.suppress(Failure):
        for each in find_conflicts(repository, only=worktree).of(worktree):
            output.warning(f"{conflict_line(each)}. See 'holdfast conflicts --worktree {worktree}'.")


def _refuse_texts_as_code(command: tuple[str, ...]) -> None:
    """Refuse {prompt} and {title} in the code of a shell: whoever wrote the issue could run anything."""
    shell = bool(command) and os.path.basename(command[0]) in SHELLS
    codes = [code for option, code in pairwise(command) if shell and re.fullmatch("-[a-z]*c", option)]
    if any("{prompt}" in code or "{title}" in code for code in codes[:1]):
        hint = "Pass it as a separate argument: sh -c 'my-agent \"$1\"' sh '{prompt}'. Or read HOLDFAST_PROMPT_FILE."
        raise UsageFailure("the text of an issue must not become part of shell code", hint=hint)


def _filled(command: tuple[str, ...], assignment: Assignment, prompt: str) -> Iterator[str]:
    values = {"prompt": prompt, "title": printable(assignment.issue.title)}
    values |= {"id": assignment.issue.id, "worktree": str(assignment.path)}
    for word in command:
        yield re.sub(r"\{(prompt|title|id|worktree)\}", lambda found: values[found[1]], word)


def _run_command(
    command: tuple[str, ...], assignment: Assignment, environment: dict[str, str], plan: AgentRun
) -> CommandExit:
    from holdfast.cli import child

    return child.run(
        command,
        check=child.Periodic(min(1.0, plan.ttl / 10), assignment.check),
        environment=environment,
        directory=assignment.path if plan.chdir else None,
        mark=Mark(LOCK_ID, assignment.lease.lock_id, assignment.path),
    )


def _not_saved(failure: Failure, worktree: str, record: dict[str, Any]) -> CommandFailed:
    failure.facts = {**record, **failure.facts}
    return CommandFailed(failure, advice=f"{NOT_SAVED.format(worktree)}\n{printable(failure.hint)}")


def _remove_worktree(assignment: Assignment, outcome: Outcome, output: Output) -> str | None:
    """Remove the worktree if the issue is done; otherwise, return why it is kept."""
    state = outcome.issue.state.value
    why = f"the issue is {state}"
    if state == "done":
        try:
            assignment.remove_worktree()
            return None
        except Failure as failure:
            why = failure.message
    _tell(output, f"the worktree stays: {why}")
    return why


def _tell(output: Output, text: str) -> None:
    """Print a line for people; standard output belongs to the command."""
    if not output.as_json:
        output.diagnostic(f"holdfast: {printable(text)}")


def _name(issue: Issue) -> str:
    return f"{issue.id[:8]} ({issue.title})"


def _conclusion(outcome: Outcome) -> str:
    state = outcome.issue.state.value
    became = f"is {state}" if outcome.succeeded or state != "ready" else "is back in the queue"
    if outcome.landing is not None and outcome.landing.is_open:
        became = f"is queued to land on {outcome.landing.branch}"
    saved = f"; saved as the snapshot {outcome.snapshot_id}" if outcome.snapshot_id else ""
    if outcome.not_saved is not None and not outcome.succeeded:  # after a success, this is the command's error
        saved = f"; no snapshot of the work was taken: {outcome.not_saved.message}"
    return f"{_name(outcome.issue)} {became}{saved}"


def _landing(
    repository: Repository, output: Output, actor: str | None, branch: str | None
) -> tuple[Landings, LandOptions]:
    """The queue to land in, and the options. Raises before the work begins if it could not land."""
    from holdfast.cli.landing import landings_of
    from holdfast.repository.landing import LandOptions

    landings = landings_of(repository, output, actor)
    landings.require_issues()
    target = landings.target(LandOptions(branch=branch, remote=landings.default_remote()))
    options = LandOptions(branch=target.branch, remote=target.remote.name if target.remote else None)
    landings.help_out(f"{options.branch}")
    return landings, options


def _not_landed(entry: Landing, record: dict[str, Any]) -> CommandFailed:
    from holdfast.repository.landing import require_landed

    try:
        require_landed(entry)
    except Failure as failure:
        failure.facts = {**record, **failure.facts}
        return CommandFailed(failure, advice=f"The issue is back in the queue, with this reason. {failure.hint}")
    raise AssertionError("it has landed")


def _concluded(assignment: Assignment, ended: CommandExit, landing: tuple[Landings, LandOptions] | None) -> Outcome:
    from holdfast.cli.progress import showing

    assignment.lease.check()  # the lease may have been lost at the very end
    if ended.exit_status == 0 and landing is not None:
        return assignment.land(*landing)
    with showing("Saving the work"):
        if ended.exit_status == 0:
            return assignment.succeed()
        how = ended.signal_name or f"exit status {ended.exit_status}"
        return assignment.fail(f"the command ended with {how}", **ended.as_record())


def _variables(assignment: Assignment, repository: Repository) -> dict[str, str]:
    return {
        **repository.variables(assignment.lease.worktree),
        REPO: str(repository.root),
        WORKTREE: assignment.lease.worktree,
        LOCK_ID: assignment.lease.lock_id,
        TOKEN: str(assignment.lease.token),
        CLAIM_VARIABLE: assignment.claim.id.text,
        ISSUE_ID: assignment.issue.id,
    }


def _ledger(root: Path) -> Ledger | None:
    from holdfast.repository.ledgers import open_ledger

    try:
        return open_ledger(root, address=store_address(os.environ)).ledger
    except NotFound:
        return None
