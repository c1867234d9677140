"""`holdfast prime`: print the task of an agent, or the work that it can claim."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli import ISSUE_ID, PROMPT_FILE
from holdfast.cli.issue_view import CLAIM_VARIABLE, tracking, writing_options
from holdfast.cli.output import Output
from holdfast.cli.repository import open_worktree
from holdfast.errors import Failure, StoreUnavailable

if TYPE_CHECKING:
    from holdfast.issues.prompt import Workplace
    from holdfast.issues.tracker import Tracker


@click.command(short_help="Print the task of an agent, or the work that it can claim.")
@click.option("--issue", "issue_id", metavar="ID", help="Print this issue.  [default: the one that you have claimed]")
@click.option(
    "--budget",
    metavar="TOKENS",
    type=click.IntRange(200, 10**6),
    default=1500,
    show_default=True,
    help="The maximum length of the text; a token counts as 4 bytes.",
)
@writing_options
@click.pass_obj
def prime(output: Output, *, issue_id: str | None, budget: int, repo: str | None, actor: str | None) -> None:
    """Print what an agent needs to know about its work: the issue, the outcomes of its dependencies, notes of earlier
    attempts, its gates, and what to do at the end. 'holdfast agent run' gives the same text to the agents that it runs.

    The issue is --issue, else HOLDFAST_ISSUE_ID, else the issue of your claim (HOLDFAST_CLAIM_ID), else the only issue
    that the actor has claimed; if it has claimed several, the one of the current worktree. If there is none, the
    command prints which issues are ready, and how to claim one.

    The text never exceeds the budget. If it would, whole sections are cut, the least important first, and the last line
    names them.

    \b
    Examples:
      holdfast prime
      holdfast prime --issue 4f1c --budget 4000
    """
    from holdfast.issues.prompt import Ending, issue_prompt, overview_prompt

    with tracking(repo, actor) as tracker:
        place = _workplace(repo)
        found = tracker.find_id(issue_id) if issue_id else _own_issue(tracker, place)
        if found is None:
            prompt = overview_prompt(tracker, budget=budget)
        else:
            ending = Ending.COMMAND if os.environ.get(PROMPT_FILE) else Ending.SESSION
            prompt = issue_prompt(tracker, found, ending=ending, workplace=place, budget=budget)
    output.result(prompt.as_record(), prompt.text.split("\n"))


def _own_issue(tracker: Tracker, place: Workplace | None) -> str | None:
    from holdfast.issues.model import ClaimId

    claim = os.environ.get(CLAIM_VARIABLE)
    if named := os.environ.get(ISSUE_ID) or (ClaimId.parse(claim).issue_id if claim else None):
        return tracker.find_id(named)
    seen = tracker.summaries(finished=False)
    own = [each.id for each in seen.working() if each.assignee == tracker.actor and not seen.is_abandoned(each)]
    here = [each for each in own if place is not None and place.worktree == f"issue-{each[:8]}"]
    return next(iter(here or own)) if len(here or own) == 1 else None


def _workplace(repo: str | None) -> Workplace | None:
    """The current worktree; None for a tracker without a repository."""
    from holdfast.issues.prompt import Workplace

    try:
        repository, worktree = open_worktree(repo, None)
        return Workplace(worktree, str(repository.path(worktree)))
    except StoreUnavailable:  # the tracker would wait for the same server
        raise
    except Failure:
        return None
