"""`holdfast init` and `deinit`: create a repository, or remove it from a git checkout."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.options import accept_unsafe_server_option, consistency_option, json_option, repo_option
from holdfast.cli.output import Output, counted
from holdfast.cli.progress import showing
from holdfast.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.git.configured import ConfiguredProgram
    from holdfast.repository.context import Consistency
    from holdfast.repository.init import Initialised


@click.command()
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("--import", "source", metavar="DIR", type=click.Path(file_okay=False), help="Copy DIR into main/.")
@consistency_option("the import", default="quiesced")
@click.option("--store", metavar="URL", help="Keep the records in postgresql://… or etcd://…, for several machines.")
@accept_unsafe_server_option
@click.option("--content", metavar="URL", help="Keep content in postgres: or s3://…, for machines that join.")
@click.option("--nested", is_flag=True, help="Allow a repository inside a worktree of another repository.")
@click.option("--shared", is_flag=True, help="Let the group of DIRECTORY use the repository like its owner.")
@click.option("--yes", is_flag=True, help="Approve the programs of the git configuration without asking.")
@json_option
@click.pass_obj
def init(
    output: Output,
    *,
    directory: str | None,
    source: str | None,
    consistency: Consistency | None,
    store: str | None,
    accept_unsafe_server: bool,
    content: str | None,
    nested: bool,
    shared: bool,
    yes: bool,
) -> None:
    """Adopt the git checkout around the current directory, or create a repository in DIRECTORY.

    Without DIRECTORY, inside a git checkout, the checkout becomes 'main' as it is: nothing is copied or moved, and the
    output of 'git status' does not change. Snapshots are commits under refs/holdfast/, new worktrees are git
    worktrees, and the records are in .git/holdfast. 'holdfast deinit' undoes this. If the configuration of the
    repository names programs that git starts, such as filters, they are shown and must be approved.

    A DIRECTORY must be empty; it is created if it is missing. With --content, other machines can join it with a
    directory of their own: the content of snapshots is sent to a content store, 'postgres:' (the records' own server)
    or s3://BUCKET/PREFIX?endpoint=URL. This option can also be added later, for an existing repository.

    An existing repository stays unchanged. Work in DIRECTORY/main, or in more worktrees: 'holdfast worktree create'.
    The filesystem is tested first, and refused if its locks do not work. A directory inside another repository is
    refused too, because commands there would use the new repository. Other users cannot read its records and snapshots,
    unless it is --shared with a group.

    \b
    Examples:
      cd my-project && holdfast init
      holdfast init my-repo
      holdfast init my-repo --import ~/my-project
      holdfast init /shared/my-repo --store postgresql://db.example.org/holdfast
      holdfast init repo --store postgresql://db.example/work --content postgres:
    """
    from holdfast.git.checkout import find_checkout
    from holdfast.repository.git_init import adopt_checkout
    from holdfast.repository.init import configure_content, initialise, is_repository, refuse_unfit
    from holdfast.store.addresses import accepting_unsafe_server
    from holdfast.store.content import checked_address

    if store is not None and accept_unsafe_server:
        store = accepting_unsafe_server(store)
    in_git = directory is None and source is None and find_checkout(os.getcwd(), os.environ.get("GIT_DIR")) is not None
    if content is not None:
        checked_address(content)
        refuse_unfit(in_git, is_served=store is not None or is_repository(Path(directory or ".")))
    if in_git:
        agree = partial(_agree, output, yes=yes)
        given: dict[str, Any] = {"git_dir": os.environ.get("GIT_DIR"), "store": store, "shared": shared}
        made = adopt_checkout(os.getcwd(), **given, agree=agree)
    else:
        chosen = directory or "."
        how: dict[str, Any] = {"consistency": consistency, "store": store, "nested": nested, "shared": shared}
        with showing("Importing") if source else contextlib.nullcontext() as progress:
            made = initialise(chosen, source=source, progress=progress, **how)
    _report(output, made, source, store, content and configure_content(made.root, content))


def _agree(output: Output, programs: Sequence[ConfiguredProgram], *, yes: bool) -> None:
    from holdfast.cli.trust import confirm

    for each in () if output.as_json else programs:
        output.line(f"git configuration: {each.key} = {each.command}")
    confirm(output, "holdfast init --yes", "Let git run these programs when Holdfast starts it?", yes=yes)


def _report(output: Output, made: Initialised, source: str | None, store: str | None, content: str | None) -> None:
    from holdfast.repository.repository import paths_at
    from holdfast.store.addresses import advice_about_secrets
    from holdfast.store.open import address_of

    paths = paths_at(made.root)
    main = paths.payload(paths.main)
    record: dict[str, object] = {
        "root": str(made.root),
        "created": made.created,
        "format": made.format.version,
        "repository_id": made.format.repository_id,
        "main": str(main),
        "filesystem": made.filesystem.kind if made.filesystem else None,
        "imported_files": made.imported,
        "store": address_of(made.root),
        "content": content,
        "approved_programs": list(made.programs),
    }
    if not made.created:
        kept = [f"The content of its snapshots is kept in {content}."] if content else []
        output.result(record, [f"{made.root} is already a repository.", *kept])
        return
    lines = [f"Created a repository in {made.root}."]
    if made.format.home:
        lines = [f"Adopted the git checkout {main}: nothing in it has changed."]
    if made.imported is not None:
        advice = "Take the first snapshot, so that other worktrees can start from it: holdfast snapshot"
        lines += [f"Copied {counted(made.imported, 'file')} from {source}.", advice]
    output.result(record, [*lines, *advice_about_secrets(store or ""), f"Work in {main}."])


@click.command()
@click.option("--force", is_flag=True, help="Remove it even if something is held, or work has not landed.")
@repo_option
@json_option
@click.pass_obj
def deinit(output: Output, *, force: bool, repo: str | None) -> None:
    """Remove Holdfast from a git checkout: its snapshots, references and records. Files, branches and worktrees stay.

    A clone that has joined ('holdfast join') leaves the repository: only the records of its own worktrees are removed.

    Refused while a lease or claim is held or an operation is unfinished, while a worktree has commits that main does
    not have, and while a worktree or snapshot has content that is not committed.

    \b
    Example:
      holdfast deinit
    """
    from holdfast.cli.repository import current_directory, open_repository
    from holdfast.repository.git_init import deinitialise, finish_deinit_around

    try:
        repository = open_repository(repo)
    except NotFound:
        rest = finish_deinit_around(repo or current_directory(), os.environ.get("GIT_DIR"))
        if rest is None:
            raise
        output.result({"removed": str(rest)}, [f"Removed the leftovers of an interrupted deinit in {rest}."])
        return
    with showing("Removing Holdfast"):
        done = deinitialise(repository, force=force)
    lines = [f"Removed {counted(done.snapshots, 'snapshot')} and all records. No file in {done.checkout} has changed."]
    lines += [f"Still a git worktree: {each}" for each in done.worktrees]
    record = {"checkout": str(done.checkout), "snapshots": done.snapshots, "worktrees": list(map(str, done.worktrees))}
    output.result(record, lines)
