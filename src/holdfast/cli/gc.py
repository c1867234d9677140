"""`holdfast gc`: delete snapshots that nothing protects, by a plan that the user reviews first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import msgspec

from holdfast.cli.entry import Group
from holdfast.cli.options import dry_run_option, duration, json_option, parse_size, repo_option
from holdfast.cli.output import Output, counted, format_size
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_repository
from holdfast.clock import format_duration
from holdfast.errors import SettingInvalid
from holdfast.repository.gc_plan import MOST_KEPT, Proposal, check_policy
from holdfast.repository.retention import Policy
from holdfast.repository.to_json import renamed

MOST_SHOWN = 20
"""How many snapshots of each kind are printed; `--json` has all of them."""

HELP = """\
Delete snapshots that nothing protects. Heads, references, pins and running commands always protect theirs. The history
of the heads is kept in full, unless a policy limits it.

Only snapshots in a plan are deleted: 'plan' shows what would be deleted and why the rest is kept; 'run' checks the plan
again and carries it out, or refuses.

\b
Example:
  holdfast gc policy --keep-last 20 --keep-for 14d
  holdfast gc plan
  holdfast gc run --plan 4f1c9a0b
"""
group = Group("gc", help=HELP)


@group.command(short_help="Show what would be deleted, and why the rest is kept.")
@dry_run_option("Do not store the plan; it cannot be run.")
@repo_option
@json_option
@click.pass_obj
def plan(output: Output, *, dry_run: bool, repo: str | None) -> None:
    """Show which snapshots can be deleted, which are kept and why, and the reclaimable size.

    Deletes nothing, except that it first finishes a 'gc run' that was killed, unless it is a dry run. The plan is
    stored under an id and can be run for one day.

    \b
    Examples:
      holdfast gc plan
      holdfast gc plan --dry-run --json
    """
    gc = open_repository(repo).gc
    with showing("Looking for snapshots to delete"):
        proposal = gc.plan(store=not dry_run)
    output.result(_proposal_to_json(proposal), _proposal_lines(proposal))


def _proposal_to_json(proposal: Proposal) -> dict[str, object]:
    plan = proposal.plan
    return {
        "plan": plan.plan_id if proposal.stored else None,
        "expires_at": plan.expires_at if proposal.stored else None,
        "policy": msgspec.structs.asdict(plan.policy),
        "bytes": plan.bytes,
        "over_budget": proposal.over_budget,
        "delete": [renamed(each._asdict()) for each in proposal.candidates],
        "protected": [
            {"snapshot_id": each, "why": [{"rule": why.protection.value, "text": why.text} for why in reasons]}
            for each, reasons in proposal.protected.items()
        ],
    }


def _proposal_lines(proposal: Proposal) -> Iterator[str]:
    plan, candidates, protected = proposal.plan, proposal.candidates, proposal.protected
    if candidates:
        yield f"{counted(len(candidates), 'snapshot')} can be deleted, which frees {format_size(plan.bytes)}:"
        for each in candidates[:MOST_SHOWN]:
            note = f'  "{each.note}"' if each.note else ""
            yield f"  {each.snapshot_id}  {each.created_at}  of {each.worktree_id}: {each.why}{note}"
        yield from _more(len(candidates))
    else:
        yield "There is nothing to delete."
    yield f"Kept: {counted(len(protected), 'snapshot')}" + (":" if protected else ".")
    for snapshot_id, reasons in list(protected.items())[:MOST_SHOWN]:
        yield f"  {snapshot_id}  {'; '.join(reason.text for reason in reasons)}"
    yield from _more(len(protected))
    if proposal.over_budget:
        yield f"The kept snapshots exceed the budget by {format_size(proposal.over_budget)}."
    if proposal.stored and candidates:
        yield f"To delete them, before {plan.expires_at}: holdfast gc run --plan {plan.plan_id}"


def _more(count: int) -> list[str]:
    return [f"  … and {count - MOST_SHOWN} more; --json shows all"] if count > MOST_SHOWN else []


@group.command(short_help="Delete the snapshots of a plan.")
@click.option("--plan", "plan_id", required=True, metavar="ID", help="The plan, as printed by 'gc plan'.")
@dry_run_option("Only check whether the plan can still be run.")
@repo_option
@json_option
@click.pass_obj
def run(output: Output, *, plan_id: str, dry_run: bool, repo: str | None) -> None:
    """Delete the snapshots of a plan.

    If one of them is in use by now, nothing is deleted (E_GC_PLAN_MISMATCH): make a new plan. The next 'gc plan' or
    'gc run' finishes a run that was killed.

    \b
    Examples:
      holdfast gc run --plan 4f1c9a0b --dry-run
      holdfast gc run --plan 4f1c9a0b
    """
    gc = open_repository(repo).gc
    if dry_run:
        found, deleted = gc.check(plan_id), 0
        line = f"The plan {plan_id} can be run: it would delete {counted(len(found.snapshots), 'snapshot')}."
    else:
        with showing("Deleting", noun="snapshots", sized=False) as progress:
            done = gc.run(plan_id, progress=progress)
        found, deleted = done.plan, len(done.snapshots)
        line = f"Deleted {counted(deleted, 'snapshot')}, freed {format_size(found.bytes)}. The plan {plan_id} is done."
    record = {"dry_run": dry_run, "plan": plan_id, "state": found.state.value, "snapshots": list(found.snapshots)}
    output.result({**record, "deleted": deleted, "bytes": found.bytes}, [line])


Callback = Callable[[click.Context, click.Parameter, str | None], object]


def _or_none(parse: Callback) -> Callback:
    """Read an option with `parse`, except `none`, which removes that part of the policy."""
    return lambda context, parameter, value: value if value in (None, "none") else parse(context, parameter, value)


def _number(context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    if not (value and value.isascii() and value.isdigit() and len(value) < 10):
        raise SettingInvalid(parameter.opts[0], value or "", f"a number from 1 to {MOST_KEPT}, or 'none'")
    return int(value)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    return parse_size(value or "", setting=parameter.opts[0])


@group.command(short_help="Show or set how much history is kept.")
@click.option("--keep-last", metavar="N", callback=_or_none(_number), help="Keep the newest N of each history.")
@click.option("--keep-for", metavar="DURATION", callback=_or_none(duration), help="Keep snapshots younger than this.")
@click.option("--max-bytes", metavar="SIZE", callback=_or_none(_size), help="Keep older ones too, up to this total.")
@dry_run_option("Show what the policy would be; change nothing.")
@repo_option
@json_option
@click.pass_obj
def policy(output: Output, /, *, dry_run: bool, repo: str | None, **parts: float | str | None) -> None:
    """Show the retention policy, or set parts of it; 'none' removes a part.

    A snapshot is kept if any part keeps it. Without a policy, the whole history of every head is kept. A new policy
    deletes nothing: it applies to the next plan.

    \b
    Examples:
      holdfast gc policy --keep-last 20 --keep-for 14d
      holdfast gc policy --max-bytes 50G
      holdfast gc policy --keep-for none
    """
    gc = open_repository(repo).gc
    before = gc.policy
    given = {name: None if value == "none" else value for name, value in parts.items() if value is not None}
    after = msgspec.structs.replace(before, **given)
    check_policy(after)
    if after != before and not dry_run:
        gc.set_policy(after)
    record = {"policy": msgspec.structs.asdict(after), "changed": after != before, "dry_run": dry_run}
    output.result(record, _policy_lines(after))


def _policy_lines(policy: Policy) -> Iterator[str]:
    if policy.keeps_all_history:
        yield "There is no policy: the whole history of every head is kept."
        return
    if policy.keep_last is not None:
        yield f"keep_last  {policy.keep_last}: keep the newest {policy.keep_last} of each history"
    if policy.keep_for is not None:
        yield f"keep_for   {format_duration(policy.keep_for)}: keep younger snapshots"
    if policy.max_bytes is not None:
        yield f"max_bytes  {format_size(policy.max_bytes)}: keep older ones too while all of them fit"
