"""`holdfast who`: one row per agent, and what needs attention."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import REPO, options, styled
from holdfast.cli import output as cli_output
from holdfast.cli.output import Output
from holdfast.cli.overview_view import (
    AGENT_COLUMNS,
    agent_cells,
    attention_line,
    held_lines,
    problem_lines,
)
from holdfast.cli.repository import current_directory
from holdfast.clock import parse_instant
from holdfast.errors import Failure

if TYPE_CHECKING:
    from holdfast.repository.overview import Overview


@click.command(short_help="Show who does what, who waits, and what is stuck.")
@options.repo_option
@options.data_dir_option
@click.option("--details", is_flag=True, help="Show each lease, claim and lock, its waiters, and how to get it.")
@options.with_output
def who(output: Output, *, repo: str | None, data_dir: str | None, details: bool) -> None:
    """Show one row per agent: its actor, its work and worktree, when it acquired them and when they expire, whether it
    is alive, how many files it has changed since the last snapshot, and what it waits for.

    Anything that needs attention comes first: holders that are dead or about to expire, failed gates, conflicts between
    worktrees, blocked queues, a nearly full disk, an unusable store. A narrow terminal shows fewer columns. --details
    shows each lease, claim and lock instead, with its waiters and the command to get it; waiters for file locks and
    repository locks have no order. 'holdfast who' takes no lock and changes nothing.

    \b
    Examples:
      holdfast who
      holdfast who --details
      holdfast who --json | jq '.data.holdings[] | select(.reclaim.safe)'
    """
    show_overview(output, read_overview(repo, data_dir), details=details)


def show_overview(output: Output, overview: Overview, *, details: bool = False) -> None:
    from holdfast.repository.overview import with_details

    overview = with_details(overview, address=options.store_address(os.environ))
    if output.as_json:
        output.result(overview.as_record())
        return
    width, colour = cli_output.width(sys.stdout), styled.has_colour(sys.stdout)
    for each in overview.attention:
        output.text(styled.as_text(attention_line(each), colour=colour))
    if details or not overview.agents:
        output.text("\n".join(held_lines(overview, width)))
    else:
        now = parse_instant(overview.at)
        lines = styled.table(AGENT_COLUMNS, [agent_cells(each, now) for each in overview.agents], width)
        output.text("\n".join(styled.as_text(line, colour=colour).rstrip() for line in lines))
    for line in problem_lines(overview):
        output.diagnostic(line)


def is_in_workspace() -> bool:
    """Whether there is a repository, tracker or ledger to show."""
    from holdfast.repository.overview import find_workspace

    try:
        return bool(os.environ.get(REPO) or find_workspace(current_directory()))
    except Failure:
        return False


def read_overview(repo: str | None, data_dir: str | None) -> Overview:
    """The overview of the repository around the current directory, or of the one that the user names."""
    from holdfast.locks.repo_lock import RepoLock
    from holdfast.repository.overview import check_workspace, find_workspace, look_around
    from holdfast.store.approvals import data_directory

    chosen, address = repo or os.environ.get(REPO), options.store_address(os.environ)
    root = Path(os.path.abspath(chosen)) if chosen else find_workspace(current_directory())
    if chosen and address is None:
        check_workspace(root)
    locks = RepoLock(data_directory(data_dir, os.environ))
    return look_around(root, repo_locks=locks, address=address)
