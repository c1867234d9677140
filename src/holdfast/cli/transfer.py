"""`holdfast snapshot push` and `fetch`: copy snapshots between machines, through a git remote."""

from __future__ import annotations

import click

from holdfast.cli import options
from holdfast.cli.output import Output, counted, format_size
from holdfast.cli.progress import saying
from holdfast.cli.repository import open_worktree

_remote = click.argument("remote", required=False)


@click.command()
@_remote
@click.argument("snapshot", nargs=-1)
@click.option("--worktree", metavar="NAME", help="Push only the history of this worktree.")
@options.in_repository
def push(
    output: Output,
    *,
    remote: str | None,
    snapshot: tuple[str, ...],
    worktree: str | None,
    repo: str | None,
) -> None:
    """Copy snapshots of a git checkout to REMOTE: each SNAPSHOT that you name, or all of them.

    In a repository with a content store, leave out REMOTE: the content of local snapshots is sent to the content
    store, unless it is already there. A snapshot that you name is sent again.

    REMOTE is a git remote; by default, that of the checked-out branch, else origin. A snapshot is pushed with the
    commits that it builds on, its note, and the name of its holder: anyone who can read the remote can read them.
    Snapshots that the remote already has are not pushed again, and nothing on the remote is ever replaced or deleted.
    Git hooks do not run, so the large files of Git LFS are not copied.

    \b
    Examples:
      holdfast snapshot push
      holdfast snapshot push origin head v1
      holdfast snapshot push --worktree dev
    """
    opened = open_worktree(repo, worktree)
    snapshots = opened.repository.snapshots
    if remote is not None and opened.repository.home.contents is not None:
        snapshot, remote = (remote, *snapshot), None
    of_line = snapshots.line(worktree).entries if worktree else ()
    names = [*snapshot, *(each.descriptor.snapshot_id for each in of_line)]
    with saying("Pushing snapshots"):
        done = snapshots.push(remote, names if snapshot or worktree else None, seen_from=opened.worktree)
    record = {"remote": done.remote, "pushed": list(done.pushed), "known": list(done.known)}
    lines = [f"{each}  pushed" for each in done.pushed]
    output.result(record, [*lines, _summary("pushed to", done.remote, len(done.pushed), len(done.known))])


@click.command()
@_remote
@click.argument("snapshot_id", nargs=-1)
@options.duration_option("--keep-for", "How long a pin protects each of them; 0s for no pin.", default="30d")
@options.worktree_options
@options.with_output
def fetch(
    output: Output,
    *,
    remote: str | None,
    snapshot_id: tuple[str, ...],
    keep_for: float,
    repo: str | None,
    worktree: str | None,
) -> None:
    """Copy snapshots that are missing here from REMOTE: each SNAPSHOT_ID, which may be a prefix, or all of them.

    In a repository with a content store, leave out REMOTE. There, commands fetch what they need; this command fetches
    it in advance.

    REMOTE is a git remote; by default, that of the checked-out branch, else origin. No worktree, head, branch or file
    changes: use 'holdfast export', 'diff' or 'restore' with a fetched snapshot. A pin protects each snapshot from
    garbage collection for 30 days. A snapshot that was deleted here comes back with the next fetch, unless you name
    those that you want. A snapshot that is not what it claims to be is refused (status 7); the others are fetched.

    \b
    Examples:
      holdfast snapshot fetch
      holdfast snapshot fetch origin 4f1c --keep-for 7d
    """
    opened = open_worktree(repo, worktree)
    if remote is not None and opened.repository.home.contents is not None:
        snapshot_id, remote = (remote, *snapshot_id), None
    with saying("Fetching snapshots"):
        done = opened.repository.snapshots.fetch(
            remote, list(snapshot_id) or None, seen_from=opened.worktree, keep_for=keep_for
        )
    fetched = [each.snapshot_id for each in done.fetched]
    record = {"remote": done.remote, "fetched": fetched, "known": list(done.known)}
    lines = []
    for each in done.fetched:
        size = f"{counted(each.files, 'file')}, {format_size(each.bytes)}"
        lines.append(f"{each.snapshot_id}  {each.worktree_id}, {size}{f': {each.note}' if each.note else ''}")
    output.result(record, [*lines, _summary("fetched from", done.remote, len(fetched), len(done.known))])


def _summary(done: str, remote: str, number: int, known: int) -> str:
    already = f"; {known} already there" if known else ""
    return f"{counted(number, 'snapshot')} {done} {remote}{already}."
