"""`holdfast config`: the settings of a repository."""

from __future__ import annotations

import click

from holdfast.cli.entry import Group
from holdfast.cli.options import in_repository
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository
from holdfast.repository import settings

_KEYS = "\n".join(f"  {key:18}  {text}" for key, text in settings.DESCRIPTIONS.items())

group = Group(
    "config",
    help=f"""\
Settings of a repository: how new worktrees are prepared, and which checks must pass before work lands. They are stored
in {settings.SETTINGS} at the root of the repository, never in a worktree.

\b
{_KEYS}

Setup runs after 'worktree create', and in 'agent run' before the agent starts in a new worktree. If a command fails,
the worktree is kept, and the agent is not started. Teardown runs before 'worktree remove', under the lease. If a
command fails, the worktree is not removed, except with --force. Each command runs in the worktree, in a shell, for at
most an hour. Setting a command approves it; others run only after 'holdfast trust'.

worktree.directory applies to git checkouts. A directory inside the checkout is hidden from git by a line in
.git/info/exclude. Existing worktrees stay where they are.

Patterns match files and directories of main. Existing files are not replaced, and links are not followed. 'run',
'agent run' and these commands get the ports in HOLDFAST_PORT (the first) and HOLDFAST_PORTS (all). No two of your
worktrees share a port, even across repositories.

Checks run one after the other, in a shell, on the commit that is to land. They run in a scratch worktree beside the
others, which git does not list and which is kept for the next run. It is prepared like a new worktree, and prepared
again only if the setup, a copied file or an input has changed. Before each run, tracked files are reset to the commit,
untracked files are removed, and ignored files are kept. HOLDFAST_LANDING, HOLDFAST_TARGET and HOLDFAST_COMMIT identify
what is checked. When a command ends or times out, its descendants are ended too.

Entries of the landing queue are tested together, in batches of land.batch, or of a quarter of a longer queue. After a
batch that passes, the next is twice as large, up to eight times land.batch; after an entry that fails, half as large.
A batch that fails is tested once more, and then in halves. With a batch of 1, every entry is tested alone. Up to
land.parallel candidates are tested at the same time, each on top of the one before, in as many scratch worktrees.

\b
Example:
  holdfast config set worktree.setup 'uv sync' 'npm ci'
  holdfast config set worktree.copy .env
  holdfast config set worktree.ports 10
  holdfast config set worktree.directory ../agents
  holdfast config set land.checks 'make lint' 'make test'
  holdfast config set land.check_timeout 20m
""",
)
_key_argument = click.argument("key")


@group.command("list", short_help="List the settings.")
@in_repository
def list_(output: Output, *, repo: str | None) -> None:
    """List the settings that differ from their defaults. Changes nothing.

    \b
    Example:
      holdfast config list --json
    """
    found = settings.read_settings(open_repository(repo).root)
    values = {key: value for key in settings.DESCRIPTIONS if (value := found.get(key))}
    output.result(
        {"settings": values}, [f"{key}: {each}" for key, value in values.items() for each in _lines(key, value)]
    )


@group.command(short_help="Print one setting.")
@_key_argument
@in_repository
def get(output: Output, *, key: str, repo: str | None) -> None:
    """Print the setting KEY: one line for each command or pattern; nothing if it is not set.

    \b
    Example:
      holdfast config get worktree.setup
    """
    value = settings.read_settings(open_repository(repo).root).get(key)
    output.result({"key": key, "value": value}, _lines(key, value))


@group.command("set", short_help="Change one setting.")
@_key_argument
@click.argument("values", metavar="VALUE...", nargs=-1, required=True)
@in_repository
def set_(output: Output, *, key: str, values: tuple[str, ...], repo: str | None) -> None:
    """Set KEY to the VALUEs, which replace the current ones. This also approves commands on this machine.

    \b
    Examples:
      holdfast config set worktree.setup 'uv sync' 'npm ci'
      holdfast config set worktree.ports 10 20000
    """
    _change(output, repo, key, values)


@group.command(short_help="Remove one setting.")
@_key_argument
@in_repository
def unset(output: Output, *, key: str, repo: str | None) -> None:
    """Remove the setting KEY.

    \b
    Example:
      holdfast config unset worktree.setup
    """
    _change(output, repo, key, ())


def _change(output: Output, repo: str | None, key: str, values: tuple[str, ...]) -> None:
    value = settings.change(open_repository(repo).root, key, values).get(key)
    output.result(
        {"key": key, "value": value}, [f"{key}: {each}" for each in _lines(key, value)] or [f"{key} is unset"]
    )


def _lines(key: str, value: list[str]) -> list[str]:
    return [" ".join(value)] if key == settings.PORTS and value else value
