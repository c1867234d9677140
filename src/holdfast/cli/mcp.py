"""`holdfast mcp`: the server for agents that speak the Model Context Protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.issue_view import ACTOR_VARIABLE
from holdfast.cli.options import data_directory, json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import LOCK_ID, REPO, WORKTREE, current_directory, token_named
from holdfast.errors import ExtraMissing

if TYPE_CHECKING:
    from holdfast.mcp.held import GivenLease


@click.command(short_help="Serve an agent that speaks MCP, over standard input and output.")
@click.option(
    "--repo",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False),
    help="The project directory of a client that does not name one (by its roots).  "
    f"[default: {REPO}, else the current directory]",
)
@click.option(
    "--actor",
    metavar="KIND:NAME",
    help=f"In whose name work is claimed.  [default: {ACTOR_VARIABLE}, else agent:NAME-OF-THE-CLIENT]",
)
@click.option(
    "--data-dir", metavar="DIRECTORY", help="Where the repo locks are.  [default: as 'repo-lock' has it]"
)
@json_option
@click.pass_obj
def mcp(output: Output, *, repo: str | None, actor: str | None, data_dir: str | None) -> None:
    """Serve one agent that speaks the Model Context Protocol, over standard input and output.

    This is not for people: a coding agent starts it. 'holdfast setup' writes that down for the agents that
    it knows; for others, name the command 'holdfast' with the argument 'mcp'.

    What the agent takes (leases, work) this process holds and keeps alive, and gives back when the agent
    goes away. It needs the package mcp: pip install 'mcp>=2'.

    \b
    Example:
      holdfast mcp --repo .
    """
    from holdfast.fs.names import checked_actor
    from holdfast.locks.identity import calling_agent
    from holdfast.locks.retry import lock_timeout, retry_config

    output.leave_stdout_to_the_command()
    try:
        from holdfast.mcp.held import ServerSettings
        from holdfast.mcp.server import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "holdfast":
            raise  # a defect of ours
        raise ExtraMissing(
            f"serving agents needs the package mcp, version 2 or later, which cannot be loaded: {error}",
            hint="Install it: pip install 'mcp>=2'.",
            extra="mcp",
        ) from error
    named = repo or os.environ.get(REPO)
    who = actor or os.environ.get(ACTOR_VARIABLE)
    settings = ServerSettings(
        here=current_directory(),
        repo=Path(os.path.abspath(named)) if named else None,
        data_directory=data_directory(data_dir, os.environ),
        given=_given_lease(),
        client=calling_agent(),
        actor=checked_actor(who, "--actor" if actor else ACTOR_VARIABLE) if who else None,
        lock_timeout=lock_timeout(os.environ),
        retry=retry_config(os.environ),
    )
    if sys.stdin is not None and sys.stdin.isatty():
        output.diagnostic("Waiting for a client that speaks MCP on standard input. Ctrl-C ends this.")
    serve(settings)


def _given_lease() -> GivenLease | None:
    """The lease that the environment hands on, as 'holdfast run' does."""
    from holdfast.mcp.held import GivenLease

    worktree, lock_id = os.environ.get(WORKTREE), os.environ.get(LOCK_ID)
    return GivenLease(worktree, lock_id, token_named(os.environ)) if worktree and lock_id else None
