"""`holdfast trust`: approve the store and the commands that a repository names."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from holdfast.cli import REPO
from holdfast.cli.options import repo_option_for, store_address, with_output
from holdfast.cli.output import Output, printable
from holdfast.cli.repository import current_directory
from holdfast.errors import FilesUnproven, NotFound, StoreRestored, UsageFailure


@click.command(short_help="Approve the store and the commands that a repository names.")
@repo_option_for(f"The directory.  [default: {REPO}, else the nearest repository, tracker or ledger upwards]")
@click.option("--show", is_flag=True, help="Only show what the repository names, and whether it is approved.")
@click.option("--revoke", is_flag=True, help="Withdraw all approvals for it.")
@click.option("--files", "adopt", is_flag=True, help="Declare that these files belong to the records on the server.")
@click.option("-y", "--yes", is_flag=True, help="Approve without asking.")
@with_output
def trust(output: Output, *, repo: str | None, show: bool, revoke: bool, adopt: bool, yes: bool) -> None:
    """Show what a repository wants Holdfast to contact or run, and approve it on this machine: its store, its setup and
    teardown commands, the checks that work must pass before it lands, the programs that its git configuration names,
    and the checkers of its gates.

    A repository from elsewhere may name a stranger's server, and commands that would run with your permissions. Until
    you approve them, Holdfast contacts no store and runs no command that a repository names. The store that you name
    with 'init', 'migrate' or HOLDFAST_STORE, the commands that you set with 'config' and the gates that you define need
    no approval. Changed addresses and commands, and a copy of the repository at another path, must be approved again.

    If the records are on a server, a machine gets leases only if it is known to see the same files as the others. While
    no other machine has a lease, it becomes known automatically; otherwise, run 'holdfast trust' on a known machine. If
    the files were moved or restored, or the server was restored from a backup, --files declares that these files and
    the present records belong together. Other machines must then prove themselves again, and new fencing tokens are
    higher than every token granted here.

    Approvals are kept in the user data directory (HOLDFAST_DATA_DIR). The checkers are in the store, so they are shown
    only after it is approved.

    \b
    Examples:
      holdfast trust --show
      holdfast trust
      holdfast trust --repo ~/project --yes
    """
    from holdfast.repository.locating import git_home_of
    from holdfast.repository.overview import check_workspace, find_workspace
    from holdfast.store import approvals

    if (show and (revoke or yes or adopt)) or (revoke and (yes or adopt)):
        raise UsageFailure("--show and --revoke cannot be combined with other options", hint="Use one of them alone.")
    chosen = repo or os.environ.get(REPO)
    root = Path(os.path.abspath(chosen)) if chosen else find_workspace(current_directory())
    root = Path(git_home_of(os.fspath(root)) or root)
    check_workspace(root)
    if revoke:
        approvals.revoke(root)
        output.result({"root": str(root), "revoked": True}, [f"Withdrew all approvals for {root}."])
        return
    store, known = _trust_store(output, root, show=show, yes=yes)
    programs = _trust_git(output, root, show=show, yes=yes)
    commands = _trust_settings(output, root, show=show, yes=yes)
    checkers = _trust_checkers(output, root, show=show, yes=yes) if known else []
    content = _trust_content(output, root, show=show, yes=yes) if known else None
    record = {"root": str(root), "store": store, "store_approved": known, "checkers": checkers if known else None}
    record |= {"content": content}
    record |= {"commands": commands, "git_programs": programs}
    record["epoch"] = _trust_files(output, root, adopt=adopt, yes=yes) if known and not show else None
    rest = "The checkers can be read once the store is approved." if not known else "" if show else "Approved."
    output.result(record, [rest] if rest else [])


def _trust_store(output: Output, root: Path, *, show: bool, yes: bool) -> tuple[str, bool]:
    """Show the configured store, and ask for approval; return its address and whether it is approved."""
    from holdfast.store.approvals import approve, approved
    from holdfast.store.open import FILES, address_of

    address = address_of(root)
    known = address in (FILES, approved(root).store)
    _say(output, f"Store: {address}" + ("" if address == FILES else _state(known)))
    if not known and not show:
        _confirm(output, root, "Let Holdfast contact this store for this repository?", yes=yes)
        approve(root, store=address)
        known = True
    return address, known


def _trust_checkers(output: Output, root: Path, *, show: bool, yes: bool) -> list[dict[str, Any]]:
    """Show the checkers of the gates, and approve them exactly as shown; return whether each is approved."""
    from holdfast.repository.opening import open_tracker, tracker_of

    tracker = open_tracker(tracker_of(root), actor="human:trust", address=store_address(os.environ))
    try:
        checkers = {key: gate.checker for key, gate in tracker.gates.all().items() if gate.checker is not None}
        approved = tracker.gates.are_approved(checkers.values())
        for (key, each), known in zip(checkers.items(), approved, strict=True):
            _say(output, f"Checker of {key}: {each.command}{_state(known)}")
            _say(output, *(f"  with {name}={value}" for name, value in each.env.items()))
            _say(output, *([f"  in {each.working_dir}"] if each.working_dir else []))
        if not all(approved) and not show:
            _confirm(output, root, "Let 'holdfast gate check' run these commands?", yes=yes)
            tracker.gates.approve(checkers.values())
            approved = [True] * len(checkers)
    finally:
        tracker.transactions.store.close()
    rows = zip(checkers.items(), approved, strict=True)
    return [{"gate": key, **each._asdict(), "approved": known} for (key, each), known in rows]


def _trust_settings(output: Output, root: Path, *, show: bool, yes: bool) -> list[dict[str, Any]]:
    """Show the commands of the settings, and approve them exactly as shown; return whether each is approved."""
    from holdfast.repository import settings

    commands = settings.commands_of(settings.read_settings(root))
    approved = settings.are_approved(root, commands)
    rows = [(key, each) for key, listed in commands.items() for each in listed]
    for (key, each), known in zip(rows, approved, strict=True):
        _say(output, f"{key}: {each}{_state(known)}")
    if not all(approved) and not show:
        _confirm(
            output,
            root,
            "Let Holdfast run these commands in worktrees, and create worktrees there?",
            yes=yes,
        )
        settings.approve(root, commands)
        approved = [True] * len(rows)
    told = zip(rows, approved, strict=True)
    return [{"setting": key, "command": each, "approved": known} for (key, each), known in told]


def _trust_git(output: Output, root: Path, *, show: bool, yes: bool) -> list[dict[str, Any]]:
    """Show the programs of git's configuration, and approve them exactly as shown; return whether each is approved."""
    from holdfast.git.program import Git
    from holdfast.repository.locating import is_git_home
    from holdfast.store.approvals import approve, are_approved

    programs = Git(root.parent).programs() if is_git_home(os.fspath(root)) else []
    approved = are_approved(root, [each.text for each in programs])
    for each, known in zip(programs, approved, strict=True):
        _say(output, f"git configuration: {each.key} = {each.command}{_state(known)}")
    if not all(approved) and not show:
        _confirm(output, root, "Let git run these programs when Holdfast starts it?", yes=yes)
        approve(root, commands=[each.text for each in programs])
        approved = [True] * len(programs)
    told = zip(programs, approved, strict=True)
    return [{"setting": each.key, "command": each.command, "approved": known} for each, known in told]


def _trust_content(output: Output, root: Path, *, show: bool, yes: bool) -> str | None:
    """Show the content store, if it is not on the server of the records, and ask for approval."""
    from holdfast.repository.content import approve, is_approved
    from holdfast.repository.repository import Repository

    try:
        with Repository(root) as repository:
            contents = repository.home.contents
    except NotFound:  # a tracker or a ledger
        return None
    if contents is None:
        return None
    known = is_approved(root, contents.address)
    _say(output, f"Content store: {contents.address}" + _state(known))
    if not known and not show:
        _confirm(output, root, "Let Holdfast send the content of snapshots there, and fetch it?", yes=yes)
        approve(root, contents.address)
    return contents.address


def _trust_files(output: Output, root: Path, *, adopt: bool, yes: bool) -> int | None:
    """Prove this machine, and admit others; with `adopt`, begin a new epoch instead, and return it."""
    from holdfast.repository.repository import Repository

    try:
        repository = Repository(root)
    except NotFound:  # a tracker or a ledger, or a store without records
        if adopt:
            raise
        return None
    with repository:
        if not adopt:
            try:
                repository.prove_files()
            except (FilesUnproven, StoreRestored) as failure:
                _say(output, f"{failure.message}. {failure.hint}")
            return None
        _confirm(output, root, "Are these the files that the records belong to, and is no other copy in use?", yes=yes)
        epoch = repository.adopt_files()
    _say(output, f"These are now the files of the repository, in the epoch {epoch}.")
    return epoch


def _state(known: bool) -> str:
    return " (approved)" if known else " (not approved)"


def _say(output: Output, *lines: str) -> None:
    for line in () if output.as_json else lines:
        output.line(line)


def _confirm(output: Output, root: Path, question: str, *, yes: bool) -> None:
    confirm(output, f"holdfast trust --repo {shlex.quote(str(root))} --yes", question, yes=yes)


def confirm(output: Output, command: str, question: str, *, yes: bool) -> None:
    """Ask for approval. Raises `UsageFailure` where nobody can answer; `command` approves without a question."""
    if yes:
        return
    if output.as_json or sys.stdin is None or not sys.stdin.isatty():
        raise UsageFailure("approval needs a terminal, or --yes", hint=f"To approve it: '{command}'.")
    click.confirm(printable(question), abort=True, err=True)
