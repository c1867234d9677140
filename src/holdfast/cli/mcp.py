"""`holdfast mcp`: the server for agents that speak the Model Context Protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import ACTOR, LOCK_ID, REPO, WORKTREE
from holdfast.cli.child import without_store_secrets
from holdfast.cli.options import actor_option, data_dir_option, repo_option_for, with_output
from holdfast.cli.output import Output
from holdfast.cli.repository import current_directory, token_named
from holdfast.errors import ExtraMissing

if TYPE_CHECKING:
    from holdfast.mcp.held import GivenLease


@click.command(short_help="Serve an agent over MCP, on standard input and output.")
@repo_option_for(f"The project directory for clients without roots.  [default: {REPO}, else the current directory]")
@actor_option("agent:CLIENT")
@data_dir_option
@with_output
def mcp(output: Output, *, repo: str | None, actor: str | None, data_dir: str | None) -> None:
    """Serve one agent that speaks the Model Context Protocol, on standard input and output.

    A coding agent starts this server; you do not run it yourself. 'holdfast setup' configures supported agents; for
    others, configure the command 'holdfast' with the argument 'mcp'.

    This process holds and renews the leases and claims of the agent, and releases them when the agent
    disconnects. It needs the package mcp: pip install 'mcp>=2'.

    \b
    Example:
      holdfast mcp --repo .
    """
    from holdfast.fs.names import checked_actor
    from holdfast.locks.identity import calling_agent
    from holdfast.locks.retry import lock_timeout, retry_config
    from holdfast.store.approvals import data_directory

    output.leave_stdout_to_the_command()
    try:
        from holdfast.mcp.held import ServerSettings
        from holdfast.mcp.server import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "holdfast":
            raise  # a bug in Holdfast, not a missing package
        raise ExtraMissing(
            f"cannot load the package mcp, version 2 or later, which the server needs: {error}",
            hint="Install it: pip install 'mcp>=2'.",
            extra="mcp",
        ) from error
    named = repo or os.environ.get(REPO)
    name = actor or os.environ.get(ACTOR)
    settings = ServerSettings(
        here=current_directory(),
        repo=Path(os.path.abspath(named)) if named else None,
        data_directory=data_directory(data_dir, os.environ),
        given=_given_lease(),
        client=calling_agent(),
        actor=checked_actor(name, "--actor" if actor else ACTOR) if name else None,
        environment=without_store_secrets(os.environ),
        lock_timeout=lock_timeout(os.environ),
        retry=retry_config(os.environ),
    )
    if sys.stdin is not None and sys.stdin.isatty():
        output.diagnostic("Waiting for a client that speaks MCP on standard input. Press Ctrl-C to stop.")
    serve(settings)


def _given_lease() -> GivenLease | None:
    """The lease in the environment, as 'holdfast run' puts it there."""
    from holdfast.mcp.held import GivenLease

    worktree, lock_id = os.environ.get(WORKTREE), os.environ.get(LOCK_ID)
    return GivenLease(worktree, lock_id, token_named(os.environ)) if worktree and lock_id else None
