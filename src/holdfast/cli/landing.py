"""`holdfast land` and `holdfast landing`: bring the work of worktrees onto a branch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import ACTOR, ISSUE_ID, options
from holdfast.cli.entry import Group
from holdfast.cli.issue_view import claim_for, claim_option
from holdfast.cli.options import (
    FOREVER,
    dry_run_option,
    in_repository,
    into_option,
    lock_id_option,
    priority_option,
    wait_option,
)
from holdfast.cli.output import Output, counted, printable, show_table
from holdfast.cli.progress import waiting, waiting_for
from holdfast.cli.repository import OpenedRepository, open_repository, open_worktree, proven
from holdfast.errors import NotFound, UsageFailure

if TYPE_CHECKING:
    from holdfast.repository.context import Proof
    from holdfast.repository.landing import Landings, LandOptions, Preview
    from holdfast.repository.landing_records import Landing
    from holdfast.repository.repository import Repository

_COLUMNS = ("ID", "STATE", "BRANCH", "FROM", "TITLE")
_actor_option = options.actor_option("human:USER")


@click.command()
@click.argument("work", metavar="[WORKTREE|ISSUE]", required=False)
@into_option
@click.option("--issue", "issue_id", metavar="ID", help="The issue that the landing finishes.")
@click.option(
    "--style",
    type=click.Choice(["merge", "squash"]),
    default="merge",
    show_default=True,
    help="Merge the branch and the work, or squash all changes into one commit.",
)
@priority_option
@click.option(
    "--push",
    metavar="REMOTE",
    is_flag=False,
    flag_value="origin",
    help="Land on this remote's branch, which is then authoritative.  [default: land.push; without a name: origin]",
)
@click.option("--via-branch", is_flag=True, help="Push the merged work to a separate branch, for a pull request.")
@wait_option("How long to wait for the outcome", default=FOREVER, default_text=FOREVER)
@click.option("--no-wait", is_flag=True, help="Queue the work and exit; other processes land it.")
@click.option("--all", "everything", is_flag=True, help="Land everything in the queue, and add nothing to it.")
@dry_run_option("Show what would happen, and change nothing.")
@claim_option
@lock_id_option
@_actor_option
@in_repository
def land(output: Output, **given: Any) -> None:
    """Land the work of a worktree on a branch, through a queue that loses nothing.

    Uncommitted work is committed first. The commit is frozen and queued, and this command helps to drain the queue
    until its own entry has an outcome: it is merged with the tip of the branch without a checkout, and the branch moves
    only if nobody else has moved it. A checkout of the branch follows, like 'git merge --ff-only', and keeps
    uncommitted changes in other files. If uncommitted changes overlap with the work, or a merge or rebase is in
    progress there, nothing is touched: the work waits, and this command says what it waits for.

    Landing finishes the issue. While the work is queued, its claim does not expire. If the work conflicts, the issue
    goes back to its agent, whose prompt then says which files conflict, and with what. The worktree stays as it is.

    With --push, the remote's branch is authoritative: it is fetched, and pushed only if its tip is still the fetched
    one; the local branch follows if it can. If the remote does not allow such a push, --via-branch pushes a separate
    branch instead.

    If this command is killed, the work stays queued; the same command, or any other landing on the branch, continues.

    \b
    Examples:
      holdfast land
      holdfast land issue-4f1c2a9b --into integration --style squash
      holdfast land 4f1c --no-wait
      holdfast land --push origin
      holdfast land --all
    """
    repo, work, actor = given.pop("repo"), given.pop("work"), given.pop("actor")
    if given["everything"]:
        _work_off(output, repo, work, actor, given["into"])
        return
    opened, issue_id = _named(output, repo, work, given["issue_id"])
    landings = landings_of(opened.repository, output, actor)
    how = _options(landings, given, opened.worktree, issue_id)
    if given["dry_run"]:
        _show_preview(output, opened.worktree, landings.preview(opened.worktree, how))
        return
    with proven(opened, given["lock_id"], "land") as proof:
        if given["via_branch"]:
            _push_beside(output, landings, opened.worktree, proof, how)
            return
        entry = landings.enqueue(opened.worktree, proof, how)
    if given["no_wait"]:
        output.result(_record(landings, entry), [f"{entry.landing_id} is queued for {entry.branch}."])
        return
    _conclude(output, landings, entry, given["wait"])


def _push_beside(output: Output, landings: Landings, worktree: str, proof: Proof | None, how: LandOptions) -> None:
    branch, commit = landings.push_beside(worktree, proof, how)
    target, remote = how.branch or landings.default_branch(), how.remote or "origin"
    queued = [each.landing_id for each in landings.queued() if (each.worktree_id, each.branch) == (worktree, target)]
    record = {"branch": branch, "commit": commit, "into": target, "remote": remote, "queued": queued}
    lines = [f"{branch} is on {remote}. Open a pull request from {branch} to {target}."]
    lines += [
        f"{each} stays queued: once {target} contains the work, it has landed. To withdraw it: "
        f"holdfast landing cancel {each}"
        for each in queued
    ]
    output.result(record, lines)


def _conclude(output: Output, landings: Landings, entry: Landing, wait: float | None) -> None:
    from holdfast.repository.landing import require_landed

    with waiting(wait, partial(_waiting_text, landings, entry)):
        entry = require_landed(landings.wait(entry.landing_id, wait=wait))
    landed = f"{entry.landing_id} has landed on {entry.branch} as {(entry.landed_as or '')[:12]}."
    output.result(_record(landings, entry), [landed])


def _waiting_text(landings: Landings, entry: Landing) -> str:
    why = landings.waits_for(entry)
    return waiting_for(f"{entry.landing_id} to land on {entry.branch}" + (f": {why}" if why else ""))


def _work_off(output: Output, repo: str | None, work: str | None, actor: str | None, branch: str | None) -> None:
    if work is not None:
        raise UsageFailure("--all lands every queue, and takes no worktree", hint="Leave out one of them.")
    landings = landings_of(open_repository(repo), output, actor)
    before = {each.landing_id for each in landings.queued()}
    landings.work_off(branch)
    left = landings.queued()
    open_ids = {each.landing_id for each in left}
    decided = [landings.changes.landing(each) for each in sorted(before - open_ids)]
    records = {"decided": [_record(landings, each) for each in decided], "queued": [_record(landings, e) for e in left]}
    output.result(records, [*_lines(landings, [*decided, *left]), f"{counted(len(left), 'entry')} left."])


def _named(
    output: Output, repo: str | None, work: str | None, issue_id: str | None
) -> tuple[OpenedRepository, str | None]:
    """The worktree to land and its issue. The argument names either of them."""
    issue_id = issue_id or os.environ.get(ISSUE_ID) or None if work is None else issue_id
    if work is None:
        return open_worktree(repo, None), issue_id
    repository = open_repository(repo)
    known = [each.worktree_id for each in repository.worktrees.configs()]
    if work in known:
        return OpenedRepository(repository, work), issue_id
    changes = landings_of(repository, output, None).changes
    if changes.has_issues():
        try:
            found = changes.tracker.find_id(work)
        except NotFound as failure:
            hint = "List them: 'holdfast worktree list' and 'holdfast issue list'."
            raise NotFound(f"there is no worktree or issue {work}", hint=hint) from failure
        worktree = f"issue-{found[:8]}"
        if worktree in known:
            return OpenedRepository(repository, worktree), found
        hint = f"Name the worktree that has its work: 'holdfast land WORKTREE --issue {found[:8]}'."
        raise NotFound(f"the issue {found[:8]} has no worktree of its own", hint=hint, issue_id=found)
    raise NotFound(f"there is no worktree {work}", hint="List the worktrees: 'holdfast worktree list'.", worktree=work)


def _options(landings: Landings, given: dict[str, Any], worktree: str, issue_id: str | None) -> LandOptions:
    from holdfast.repository.landing import LandOptions
    from holdfast.repository.landing_records import LandingStyle

    issue = landings.issue_of(worktree, issue_id)
    return LandOptions(
        branch=given["into"],
        issue_id=issue,
        claim=claim_for(issue, given["claim_text"]) if issue else None,
        style=LandingStyle(given["style"]),
        priority=given["priority"],
        remote=given["push"] or landings.default_remote(),
    )


def landings_of(repository: Repository, output: Output, actor: str | None) -> Landings:
    from holdfast.fs.names import checked_actor
    from holdfast.locks.identity import current_holder
    from holdfast.repository.landing import Landings

    named = actor or os.environ.get(ACTOR) or f"human:{current_holder().user.replace(' ', '_') or 'unknown'}"

    def tell(text: str) -> None:
        if not output.as_json:
            output.diagnostic(f"holdfast: {printable(text)}")

    return Landings(repository, actor=checked_actor(named), tell=tell)


def _record(landings: Landings, entry: Landing) -> dict[str, Any]:
    from holdfast.repository.landing_records import landing_to_json

    return {**landing_to_json(entry), "waits_for": landings.waits_for(entry)}


def _show_preview(output: Output, worktree: str, found: Preview) -> None:
    record = {**found._asdict(), "conflicts": list(found.conflicts), "worktree": worktree}
    lines = [f"{worktree} would land on {found.branch}."]
    lines = [f"{found.branch} has all the work of {worktree} already."] if found.is_there else lines
    lines += ["Its uncommitted work would be committed first."] if found.has_uncommitted else []
    lines += [f"It conflicts now, in: {', '.join(found.conflicts)}"] if found.conflicts else []
    lines += [f"{counted(found.ahead, 'entry')} would come first."] if found.ahead else []
    lines += [f"It would wait: {found.waits_for}"] if found.waits_for else []
    output.result(record, lines)


group = Group(
    "landing",
    help="""\
Queues of work waiting to land ('holdfast land'), and its outcomes.

\b
Example:
  holdfast landing list --all
""",
)


@group.command("list", short_help="List what is queued to land.")
@click.option("--all", "everything", is_flag=True, help="Also list entries that have an outcome.")
@in_repository
def list_(output: Output, *, everything: bool, repo: str | None) -> None:
    """List the queued entries in their order, and what they wait for. Changes nothing.

    \b
    Examples:
      holdfast landing list
      holdfast landing list --all --json
    """
    landings = landings_of(open_repository(repo), output, None)
    found = landings.all() if everything else landings.queued()
    if output.as_json:
        output.result({"landings": [_record(landings, each) for each in found]})
    elif found:
        show_table(output, _COLUMNS, [_row(each) for each in found])
        for why in dict.fromkeys(filter(None, map(landings.waits_for, found))):
            output.line(f"Waiting: {why}")
    else:
        output.result({}, ["Nothing is queued to land."])


def _row(entry: Landing) -> tuple[str, ...]:
    return entry.landing_id, entry.state.value, entry.branch, entry.worktree_id or entry.commit[:12], entry.title


def _lines(landings: Landings, entries: list[Landing]) -> Iterator[str]:
    for each in entries:
        why = each.reason or landings.waits_for(each)
        yield f"{each.landing_id}  {each.state.value}  {each.branch}  {each.title}{f': {why}' if why else ''}"


@group.command(short_help="Show one entry.")
@click.argument("landing_id", metavar="ID")
@in_repository
def show(output: Output, *, landing_id: str, repo: str | None) -> None:
    """Show one entry: where it comes from, where it lands, and its outcome. ID may be a prefix. Changes nothing.

    \b
    Example:
      holdfast landing show 4f1c
    """
    landings = landings_of(open_repository(repo), output, None)
    record = _record(landings, landings.find(landing_id))
    shown = {name: value for name, value in record.items() if value not in (None, "", [], False)}
    lines = (f"{name:12}  {', '.join(value) if isinstance(value, list) else value}" for name, value in shown.items())
    output.result(record, lines)


@group.command(short_help="Withdraw an entry from its queue.")
@click.argument("landing_id", metavar="ID")
@click.option("--reason", metavar="TEXT", default="it was cancelled", help="The reason, shown to its agent.")
@_actor_option
@in_repository
def cancel(output: Output, *, landing_id: str, reason: str, actor: str | None, repo: str | None) -> None:
    """Withdraw an entry that has not landed. Its issue goes back to its agent; the worktree stays as it is.

    \b
    Example:
      holdfast landing cancel 4f1c --reason "a better way was found"
    """
    landings = landings_of(open_repository(repo), output, actor)
    entry = landings.cancel(landings.find(landing_id).landing_id, reason)
    output.result(_record(landings, entry), [f"{entry.landing_id} is {entry.state.value}."])


@group.command(short_help="Requeue an entry that did not land.")
@click.argument("landing_id", metavar="ID")
@wait_option("How long to wait for the outcome", default=FOREVER, default_text=FOREVER)
@click.option("--no-wait", is_flag=True, help="Queue it and exit; other processes land it.")
@claim_option
@_actor_option
@in_repository
def retry(
    output: Output,
    *,
    landing_id: str,
    wait: float | None,
    no_wait: bool,
    claim_text: str | None,
    actor: str | None,
    repo: str | None,
) -> None:
    """Queue the same commit again, at the end of the queue. To land newer work, use 'holdfast land' instead.

    \b
    Example:
      holdfast landing retry 4f1c
    """
    landings = landings_of(open_repository(repo), output, actor)
    known = landings.find(landing_id)
    claim = claim_for(known.issue_id, claim_text) if known.issue_id else None
    entry = landings.retry(known.landing_id, claim)
    if no_wait:
        output.result(_record(landings, entry), [f"{entry.landing_id} is queued for {entry.branch}."])
    else:
        _conclude(output, landings, entry, wait)


@group.command(short_help="Show the output of an entry's checks.")
@click.argument("landing_id", metavar="ID")
@click.option("--all", "everything", is_flag=True, help="Show the output of all runs that are kept, the oldest first.")
@in_repository
def log(output: Output, *, landing_id: str, everything: bool, repo: str | None) -> None:
    """Show the output of the last run of the checks for an entry, alone or in a batch, even while it is running. A
    check that failed and then passed is flaky: --all shows both runs. Logs are kept on the machine that ran the checks.
    Changes nothing.

    \b
    Example:
      holdfast landing log 4f1c
    """
    from holdfast.repository.landing_checks import check_runs, read_log

    repository = open_repository(repo)
    entry = landings_of(repository, output, None).find(landing_id)
    paths = repository.paths
    runs = [run.run_id for run in check_runs(paths) if entry.landing_id in (run.landing_id, *run.entries)]
    last = entry.log or next(iter(runs), "")
    if not last:
        hint = "Logs stay on the machine that ran the checks, and only the newest are kept."
        raise NotFound(f"this machine has no check log of {entry.landing_id}", hint=hint, landing=entry.landing_id)
    shown = [*runs[::-1], *([] if last in runs else [last])] if everything else [last]
    texts = [read_log(paths, each).decode(errors="replace") for each in shown]
    record: dict[str, Any] = {"id": entry.landing_id, "run_id": last, "log": texts[-1]}
    if everything:
        record["runs"] = [{"run_id": each, "log": text} for each, text in zip(shown, texts, strict=True)]
    output.result(record, (line for text in texts for line in text.splitlines()))
