"""`holdfast join`: join a clone, or an empty directory, on another machine to a repository on a server."""

from __future__ import annotations

import os

import click

from holdfast.cli.options import accept_unsafe_server_option, json_option
from holdfast.cli.output import Output


@click.command()
@click.argument("address")
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("--name", metavar="NAME", help="The name of this clone.  [default: the name of the machine]")
@accept_unsafe_server_option
@json_option
@click.pass_obj
def join(output: Output, *, address: str, directory: str | None, name: str | None, accept_unsafe_server: bool) -> None:
    """Join this clone of the git repository to the repository whose records are at ADDRESS.

    ADDRESS is the store of the first clone: postgresql://… or etcd://…. DIRECTORY is a directory in this clone
    (default: the current one). From then on, all clones share issues, claims, leases, the ledger and the landing queue.
    The checkout becomes a worktree with the name of this clone; each worktree stays in the clone that created it. Work
    lands on a branch of the remote, and snapshots travel through the remote: 'holdfast snapshot push' and 'fetch'.

    If the repository is not in git but has a content store ('holdfast init --content'), DIRECTORY is empty or missing.
    The worktree of this machine is DIRECTORY/worktrees/NAME, empty at first. The content of snapshots is fetched when a
    command needs it: 'holdfast worktree create work --from main:head'.

    Naming the store approves it on this machine. A clone of another repository is refused, and nothing changes in a
    clone that has already joined. To leave the repository, use 'holdfast deinit'.

    \b
    Examples:
      git clone git@example.org:project.git && cd project
      holdfast join 'postgresql://db.example/work?schema=project'
      holdfast join etcd://a.example:2379/project --name laptop
      holdfast join 'postgresql://db.example/work?schema=project' ~/project
    """
    from holdfast.repository.joining import join as join_store
    from holdfast.store.addresses import accepting_unsafe_server, advice_about_secrets
    from holdfast.store.open import address_of

    if accept_unsafe_server:
        address = accepting_unsafe_server(address)
    git_dir = None if directory else os.environ.get("GIT_DIR")
    done = join_store(address, directory or os.getcwd(), git_dir=git_dir, name=name)
    record: dict[str, object] = {
        "root": str(done.root),
        "joined": done.is_new,
        "name": done.name,
        "checkout": str(done.checkout),
        "repository_id": done.format.repository_id,
        "store": address_of(done.root),
    }
    what = "is now" if done.is_new else "is already"
    lines = [f"{done.checkout} {what} the worktree {done.name} of the repository in {address_of(done.root)}."]
    output.result(record, [*lines, *advice_about_secrets(address)])
