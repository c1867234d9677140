"""`holdfast gc`: what is kept and why, and deleting the rest by a plan that can be read first."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from holdfast.cli.entry import Group
from holdfast.cli.options import format_size, json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository, repo_option
from holdfast.clock import format_duration
from holdfast.repository.gc_plan import Proposal
from holdfast.repository.retention import Policy

group = Group(
    "gc",
    help="""\
Delete snapshots that nothing keeps. Heads, references, pins and whatever a running command needs are
always kept. Of the history behind the heads all is kept, unless a policy says how much.

Nothing is deleted that was not in a plan: 'plan' shows what would go and why the rest stays, 'run'
looks again and carries it out, or refuses.

\b
Example:
  holdfast gc policy --keep-last 20 --keep-for 14d
  holdfast gc plan
  holdfast gc run --plan 4f1c9a0b
""",
)


@group.command(short_help="Show what would be deleted, and why the rest is kept.")
@click.option("--dry-run", is_flag=True, help="Do not even write the plan down; it cannot be run then.")
@repo_option
@json_option
@click.pass_obj
def plan(output: Output, *, dry_run: bool, repo: str | None) -> None:
    """Show what may be deleted, what is kept and why, and how many bytes become free. Deletes nothing.

    The plan is written down under an id, by which it can be run within a day.

    \b
    Examples:
      holdfast gc plan
      holdfast gc plan --dry-run --json
    """
    proposal = open_repository(repo).gc.plan(store=not dry_run)
    output.result(proposal_to_json(proposal), proposal_lines(proposal))


@group.command(short_help="Delete what a plan says.")
@click.option("--plan", "plan_id", required=True, metavar="ID", help="The plan, as 'gc plan' has shown it.")
@click.option("--dry-run", is_flag=True, help="Only look whether the plan still fits.")
@repo_option
@json_option
@click.pass_obj
def run(output: Output, *, plan_id: str, dry_run: bool, repo: str | None) -> None:
    """Delete the snapshots of a plan.

    If one of them is needed by now, nothing is deleted (E_GC_PLAN_MISMATCH): make a new plan. After an
    interruption, run the same plan again; it goes on where it was.

    \b
    Examples:
      holdfast gc run --plan 4f1c9a0b --dry-run
      holdfast gc run --plan 4f1c9a0b
    """
    from holdfast.cli.options import format_size

    gc = open_repository(repo).gc
    if dry_run:
        found = gc.check(plan_id)
        deleted, text = 0, f"The plan {plan_id} fits: it would delete {counted(len(found.snapshots))}."
    else:
        done = gc.run(plan_id)
        found, deleted = done.plan, len(done.snapshots)
        text = f"Deleted {counted(deleted)}; {format_size(found.bytes)} are free. The plan {plan_id} is done."
    output.result(
        {
            "dry_run": dry_run,
            "plan": plan_id,
            "state": found.state.value,
            "snapshots": list(found.snapshots),
            "deleted": deleted,
            "bytes": found.bytes,
        },
        [text],
    )


def _number(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "none":
        return value
    from holdfast.errors import SettingInvalid

    if not (value.isascii() and value.isdigit()):
        raise SettingInvalid(parameter.opts[0], value, "a number, or 'none'")
    return int(value)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    from holdfast.cli.options import parse_size

    return value if value in (None, "none") else parse_size(str(value), setting=parameter.opts[0])


def _duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | str | None:
    from holdfast.cli.options import duration

    return value if value in (None, "none") else duration(context, parameter, value)


@group.command(short_help="Show or set how much history is kept.")
@click.option("--keep-last", metavar="N", callback=_number, help="Keep the newest N of each line.")
@click.option("--keep-for", metavar="DURATION", callback=_duration, help="Keep what is younger, such as 14d.")
@click.option(
    "--max-bytes",
    metavar="SIZE",
    callback=_size,
    help="Keep the rest too as long as all snapshots together take no more, such as 50G.",
)
@click.option("--dry-run", is_flag=True, help="Only show what the policy would be.")
@repo_option
@json_option
@click.pass_obj
def policy(
    output: Output,
    *,
    keep_last: int | str | None,
    keep_for: float | str | None,
    max_bytes: int | str | None,
    dry_run: bool,
    repo: str | None,
) -> None:
    """Show the policy of retention, or set parts of it; 'none' takes a part away.

    What any part keeps is kept. Without a policy all history that leads to a head is kept. Setting a
    policy deletes nothing: it says what the next plan may contain.

    \b
    Examples:
      holdfast gc policy --keep-last 20 --keep-for 14d
      holdfast gc policy --max-bytes 50G
      holdfast gc policy --keep-for none
    """
    from holdfast.repository.gc_plan import check_policy

    gc = open_repository(repo).gc
    before = gc.policy
    wanted = _changed(before, keep_last=keep_last, keep_for=keep_for, max_bytes=max_bytes)
    check_policy(wanted)
    if wanted != before and not dry_run:
        gc.set_policy(wanted)
    import msgspec

    output.result(
        {"policy": msgspec.structs.asdict(wanted), "changed": wanted != before, "dry_run": dry_run},
        policy_lines(wanted),
    )


def _changed(policy: Policy, **parts: object) -> Policy:
    import msgspec

    given = {name: None if value == "none" else value for name, value in parts.items() if value is not None}
    return msgspec.structs.replace(policy, **given)


MOST_SHOWN = 20
"""People want to see what goes, and a few of those that stay; programs get everything."""


def proposal_to_json(proposal: Proposal) -> dict[str, object]:
    """Everything that is known about a plan."""
    plan = proposal.plan
    return {
        "plan": plan.plan_id if proposal.stored else None,
        "expires_at": plan.expires_at if proposal.stored else None,
        "policy": msgspec.structs.asdict(plan.policy),
        "bytes": plan.bytes,
        "over_budget": proposal.over_budget,
        "delete": [each._asdict() for each in proposal.candidates],
        "protected": [
            {
                "snapshot_id": snapshot_id,
                "why": [{"rule": reason.protection.value, "text": reason.text} for reason in reasons],
            }
            for snapshot_id, reasons in proposal.protected.items()
        ],
    }


def proposal_lines(proposal: Proposal) -> Iterator[str]:
    """The same for people."""
    plan = proposal.plan
    if proposal.candidates:
        yield f"{counted(len(proposal.candidates))} may be deleted, which frees {format_size(plan.bytes)}:"
        for each in proposal.candidates[:MOST_SHOWN]:
            note = f'  "{each.note}"' if each.note else ""
            yield f"  {each.snapshot_id}  {each.created_at}  of {each.worktree_id}: {each.why}{note}"
        yield from _more(len(proposal.candidates))
    else:
        yield "There is nothing to delete."
    yield f"Kept: {counted(len(proposal.protected))}" + (":" if proposal.protected else ".")
    for snapshot_id, reasons in list(proposal.protected.items())[:MOST_SHOWN]:
        yield f"  {snapshot_id}  {'; '.join(reason.text for reason in reasons)}"
    yield from _more(len(proposal.protected))
    if proposal.over_budget:
        yield f"That is {format_size(proposal.over_budget)} over the budget: what is kept takes more than it."
    if proposal.stored and proposal.candidates:
        yield f"To go ahead, before {plan.expires_at}: holdfast gc run --plan {plan.plan_id}"


def policy_lines(policy: Policy) -> Iterator[str]:
    """What a policy means."""
    if policy.keeps_all_history:
        yield "There is no policy: all history that leads to a head is kept."
        return
    if policy.keep_last is not None:
        yield f"keep_last  {policy.keep_last}: the newest {policy.keep_last} of each line are kept"
    if policy.keep_for is not None:
        yield f"keep_for   {format_duration(policy.keep_for)}: what is younger is kept"
    if policy.max_bytes is not None:
        yield (
            f"max_bytes  {format_size(policy.max_bytes)}: the rest is kept too, "
            "as long as all snapshots together take no more"
        )


def counted(number: int) -> str:
    """So many snapshots, in words."""
    return "1 snapshot" if number == 1 else f"{number} snapshots"


def _more(count: int) -> Iterator[str]:
    if count > MOST_SHOWN:
        yield f"  … and {count - MOST_SHOWN} more; --json shows them all"
