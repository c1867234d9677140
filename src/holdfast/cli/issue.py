"""`holdfast issue init`, `create`, `list`, `show`, `search`, `update`, `delete`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from holdfast.cli import REPO
from holdfast.cli import issue_view as view
from holdfast.cli.entry import Group, LazyCommand
from holdfast.cli.options import ISSUE_FIELDS, Command, dry_run_option, field_option, limit_option, print_record
from holdfast.cli.output import Output
from holdfast.errors import SettingInvalid, UsageFailure
from holdfast.fs import calls
from holdfast.issues.model import SHORT, Priority, State, issue_summary_to_json
from holdfast.issues.reading import created_issues_to_json, issue_to_json
from holdfast.issues.rules import FINISHED
from holdfast.issues.tracker import KEEP, Query, Tracker, Update, find

if TYPE_CHECKING:
    from holdfast.issues.creating import Created

HELP = """\
Issues: the work to do, its dependencies, and who works on it. They are plain JSON files in .jit/, which any number of
processes may change at the same time. An id may be shortened to any unambiguous prefix.

\b
Example:
  holdfast issue init
  holdfast issue create "Write the parser" --priority high
  holdfast issue claim-next
  holdfast issue finish 4f1c
"""
group = Group(
    "issue",
    help=HELP,
    table={
        "claim": LazyCommand("holdfast.cli.issue_claims:claim", "Claim an issue."),
        "claim-next": LazyCommand("holdfast.cli.issue_claims:claim_next", "Claim the most urgent issue that is ready."),
        "heartbeat": LazyCommand("holdfast.cli.issue_claims:heartbeat", "Renew a claim."),
        "finish": LazyCommand("holdfast.cli.issue_claims:finish", "Mark an issue as done."),
        "release": LazyCommand("holdfast.cli.issue_claims:release", "Give an issue back to the queue."),
        "work": LazyCommand("holdfast.cli.issue_work:work", "Run a command under a claim."),
        "breakdown": LazyCommand("holdfast.cli.issue_many:breakdown", "Break an issue down into parts."),
        "import": LazyCommand("holdfast.cli.issue_many:import_", "Import issues from a file."),
        "export": LazyCommand("holdfast.cli.issue_many:export", "Print all issues and gates as JSON."),
        "validate": LazyCommand("holdfast.cli.issue_many:validate", "Check the tracker and repair it."),
        "locks": LazyCommand("holdfast.cli.issue_claims:locks", "Show who holds the tracker's locks, and who waits."),
    },
)

_states = click.Choice([each.value for each in State])
_priorities = click.Choice([each.value for each in Priority])
_priority_help = "low, normal, high or critical."
_priority_option = click.option("--priority", metavar="PRIORITY", type=_priorities, help=_priority_help)


def _several(name: str, to: str, help: str, choice: click.Choice[str] | None = None) -> Callable[[Command], Command]:
    return click.option(f"--{name}", to, metavar=name.upper(), multiple=True, type=choice, help=help)


def _filtered(command: Command) -> Command:
    for option in (  # in reverse: the last decorator comes first in the help
        view.reading_options,
        field_option(*ISSUE_FIELDS),
        limit_option("Print at most N issues."),
        _several("label", "labels", "Only issues with this label; 'x*' matches a prefix."),
        click.option("--assignee", metavar="KIND:NAME", help="Only issues of this assignee."),
        _several("priority", "priorities", "Only issues of this priority. Repeatable.", _priorities),
        _several("state", "states", "Only issues in this state. Repeatable.", _states),
    ):
        command = option(command)
    return command


@group.command(short_help="Create an empty tracker.")
@click.option("--in-tree", is_flag=True, help="Create it in the main checkout of the git repository, to be committed.")
@view.writing_options
@click.pass_obj
def init(output: Output, *, in_tree: bool, repo: str | None, actor: str | None) -> None:
    """Create an empty tracker in the current directory, or in the one that --repo names.

    In a git checkout that was adopted ('holdfast init'), the tracker is kept in the git directory instead: every
    worktree uses it, and a claim changes nobody's files. With --in-tree, it is in .jit/ of the main checkout, and all
    linked worktrees use it instead of the copy on their own branch.

    An existing tracker keeps its issues. Files for git (.jit/.gitignore, .jit/.gitattributes and .holdfast/.gitignore)
    are added if they are missing.

    \b
    Examples:
      holdfast issue init
      holdfast issue init --in-tree
    """
    from holdfast.repository.opening import place_for_tracker

    if in_tree and repo:
        raise UsageFailure("--in-tree and --repo cannot be used together", hint="Use one of them.")
    is_named = bool(repo or os.environ.get(REPO)) and not in_tree
    place = Path if is_named else partial(place_for_tracker, in_tree=in_tree)
    with view.tracking(repo, actor, place=place) as tracker:
        created, root = tracker.initialise(), tracker.root
    where = ".jit" if is_named or root == Path(calls.realpath(os.curdir)) else f"{root}/.jit"
    output.result({"created": created}, [f"created a tracker in {where}" if created else "a tracker already exists"])


@group.command(short_help="Create an issue, or a batch of them.")
@click.argument("title", required=False)
@click.option("--description", metavar="TEXT", default="", help="The work in detail.")
@_priority_option
@click.option("--depends-on", metavar="ID", multiple=True, help="Wait for this issue. Repeatable.")
@click.option("--gate", "gates", metavar="KEY", multiple=True, help="Require this gate. Repeatable.")
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="Add a label. Repeatable.")
@click.option("--touches", metavar="GLOB", multiple=True, help="The work changes these paths. Repeatable.")
@click.option("--assignee", metavar="KIND:NAME", help="Reserve the issue for this assignee.")
@click.option("--batch", is_flag=True, help="Read a JSON list of issues from standard input.")
@field_option(*ISSUE_FIELDS, "skipped_dependencies")
@view.writing_options
@click.pass_obj
def create(
    output: Output, /, *, batch: bool, field: str | None, repo: str | None, actor: str | None, **given: Any
) -> None:
    """Create an issue. It is ready at once, unless it depends on unfinished issues.

    With --batch, the issues come from standard input: a JSON list of objects with "title" and optionally "description",
    "priority", "depends_on", "gates", "labels", "touches", "context", "assignee", and a "key" by which other issues of
    the batch may depend on it. Up to 250 issues are created, all or none; on etcd with its default limits, up to 56,
    and fewer with dependencies.

    With --touches, 'claim-next' does not hand the issue out while one that touches the same paths is in progress.
    Patterns are relative to the top of the repository: 'src/*.py', '**/test_*.py', or a directory and all it contains.

    \b
    Examples:
      holdfast issue create "Write the parser" --priority high --gate review
      holdfast issue create "Use the parser" --depends-on 4f1c
      echo '[{"title":"A","key":"a"},{"title":"B","depends_on":["a"]}]' |
        holdfast issue create --batch
    """
    from holdfast.issues.creating import NewIssue

    if batch is (given["title"] is not None):
        raise click.UsageError("Give a TITLE, or --batch.", click.get_current_context())
    with view.tracking(repo, actor) as tracker:
        if batch:
            _create_batch(tracker, output, field)
            return
        given["depends_on"] = tuple(map(tracker.find_id, given["depends_on"]))
        given["priority"] = Priority(given["priority"] or "normal")
        [created] = tracker.create_all([NewIssue(**given)])
        print_record(output, field, created_issues_to_json(created), _created_lines(created))


def _create_batch(tracker: Tracker, output: Output, field: str | None) -> None:
    from holdfast.issues.exchange import read_batch

    if sys.stdin is None or sys.stdin.isatty():
        raise UsageFailure("cannot read the batch: standard input is a terminal")
    new = read_batch(sys.stdin.buffer.read(), "standard input")
    keys = {each.key for each in new}
    on = [tuple(name if name in keys else tracker.find_id(name) for name in each.depends_on) for each in new]
    resolved = [msgspec.structs.replace(each, depends_on=names) for each, names in zip(new, on, strict=True)]
    created = tracker.create_all(resolved)
    records = [created_issues_to_json(each) for each in created]
    lines = [line for each in created for line in _created_lines(each)]
    print_record(output, field, {"issues": records, "count": len(records)}, lines, records=records)


def _created_lines(created: Created) -> list[str]:
    issue = created.issue
    lines = [f"created {issue.id[:SHORT]} ({issue.state.value}): {issue.title}"]
    for on, path in created.implied.items():
        implied = " -> ".join(each[:SHORT] for each in path)
        lines.append(f"  skipped the dependency on {on[:SHORT]}, which {implied} implies")
    return lines


@group.command("list", short_help="List issues.")
@click.option("--all", "everything", is_flag=True, help="Include finished issues.")
@_filtered
@click.pass_obj
def list_(output: Output, /, *, everything: bool, **filters: Any) -> None:
    """List issues in the order of their creation.

    Finished issues (done, rejected, archived) are left out, with --json too, unless --all or --state asks for them.
    A broken issue is named on standard error (with --json: under "broken") and left out; the status is still 0.
    'holdfast issue validate' then exits with 6.

    \b
    Examples:
      holdfast issue list --state ready --state in_progress
      holdfast issue list --label 'area:*' --field id
      holdfast issue list --all
    """
    filters["states"] = filters["states"] or ([] if everything else [each for each in State if each not in FINISHED])
    _find(output, (), **filters)


@group.command(short_help="Find issues by words.")
@click.argument("words", nargs=-1, required=True)
@_filtered
@click.pass_obj
def search(output: Output, /, *, words: tuple[str, ...], **filters: Any) -> None:
    """Find the issues with all these WORDS in title, description, labels, context or id.

    \b
    Example:
      holdfast issue search parser --state ready
    """
    _find(output, words, **filters)


def _find(
    output: Output, words: tuple[str, ...], *, repo: str | None, limit: int | None, field: str | None, **filters: Any
) -> None:
    states, priorities = map(State, filters.pop("states")), map(Priority, filters.pop("priorities"))
    with view.tracking(repo) as tracker:
        query = Query(words, tuple(states), tuple(priorities), **filters)
        snapshot = tracker.summaries(finished=query.finished)
        view.show_issues(output, snapshot, islice(find(snapshot, query), limit), field)


@group.command(short_help="Show one issue.")
@click.argument("issue_id", metavar="ID")
@field_option()
@view.reading_options
@click.pass_obj
def show(output: Output, *, issue_id: str, field: str | None, repo: str | None) -> None:
    """Show one issue in full.

    \b
    Examples:
      holdfast issue show 4f1c
      holdfast issue show 4f1c --field state
    """
    with view.tracking(repo) as tracker:
        record = issue_to_json(tracker, tracker.find_id(issue_id))
        print_record(output, field, record, list(view.issue_lines(record)))


@group.command(short_help="Change an issue.")
@click.argument("issue_id", metavar="ID")
@click.option("--title", metavar="TEXT", help="Set the title.")
@click.option("--description", metavar="TEXT", help="Set the description.")
@_priority_option
@click.option("--state", metavar="STATE", type=_states, help="Set the state.")
@click.option("--assignee", metavar="KIND:NAME", help="Set the assignee; 'none' removes it.")
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="Add a label.")
@click.option("--remove-label", "remove_labels", metavar="LABEL", multiple=True, help="Remove a label.")
@click.option("--touches", metavar="GLOB", multiple=True, help="Set the paths that it changes; 'none' removes them.")
@click.option("--context", metavar="KEY=VALUE", multiple=True, help="Set a key; 'KEY=' removes it.")
@click.option("--increment", metavar="KEY[=N]", multiple=True, help="Increment a number in the context.")
@click.option("--if-version", metavar="VERSION", help="Fail unless the issue has this version (see 'show').")
@view.claim_option
@field_option(*ISSUE_FIELDS, "context", "open_gates")
@view.writing_options
@click.pass_obj
def update(output: Output, /, *, issue_id: str, repo: str | None, actor: str | None, **given: Any) -> None:
    """Change an issue. Concurrent changes by others are not lost.

    The state 'done' becomes 'gated' until all gates pass, and is refused while the issue waits for others. The state of
    a claimed issue can be changed only under that claim.

    \b
    Examples:
      holdfast issue update 4f1c --state done
      holdfast issue update 4f1c --label area:parser --context branch=parser
      holdfast issue update 4f1c --increment attempts
    """
    change = _change(given)
    with view.tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id)
        if change == Update():
            raise UsageFailure("there is nothing to change", hint="Name a change: see --help.")
        claim = view.claim_for(found, given["claim_text"])
        issue = tracker.update(found, change, claim=claim, if_version=given["if_version"])
        state, gates = tracker.state(issue), issue.open_gates()
        record = {**issue_summary_to_json(issue, state), "context": issue.context, "open_gates": gates}
        line = f"updated {issue.id[:SHORT]} ({state.value}): {issue.title}"
        if state is State.GATED and gates:
            line += f"; done when these gates pass: {', '.join(gates)}"
        print_record(output, given["field"], record, [line])


def _change(given: dict[str, Any]) -> Update:
    assignee = given["assignee"]
    return Update(
        **{name: given[name] for name in ("title", "description", "remove_labels")},
        priority=Priority(given["priority"]) if given["priority"] else None,
        state=State(given["state"]) if given["state"] else None,
        assignee=KEEP if assignee is None else None if assignee == "none" else assignee,
        add_labels=given["labels"],
        touches=None if not given["touches"] else () if given["touches"] == ("none",) else given["touches"],
        context=dict(_pair(each) for each in given["context"]),
        increments=dict(_increment(each) for each in given["increment"]),
    )


def _pair(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingInvalid("--context", text, "KEY=VALUE, or KEY= to remove it")
    return name, value or None


def _increment(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value or "1")
    except ValueError:
        raise SettingInvalid("--increment", text, "KEY, or KEY=N with a whole number") from None


@group.command(short_help="Delete an issue.")
@click.argument("issue_id", metavar="ID")
@dry_run_option("Show what would be deleted; delete nothing.")
@view.claim_option
@view.writing_options
@click.pass_obj
def delete(output: Output, /, *, issue_id: str, dry_run: bool, claim_text: str | None, **where: Any) -> None:
    """Delete an issue, and remove it from the dependencies of all others.

    \b
    Example:
      holdfast issue delete 4f1c
    """
    with view.tracking(**where) as tracker:
        found = tracker.find_id(issue_id)
        freed = list(tracker.dependents_of(found))
        issue = tracker.issue(found) if dry_run else tracker.delete(found, claim=view.claim_for(found, claim_text))
    record = {**issue_summary_to_json(issue, issue.state), "deleted": not dry_run, "freed": freed}
    line = f"{'would delete' if dry_run else 'deleted'} {found[:SHORT]}: {issue.title}"
    if freed:
        line += f"; no longer a dependency of {', '.join(each[:SHORT] for each in freed)}"
    output.result(record, [line])
