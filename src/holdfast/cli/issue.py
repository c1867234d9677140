"""`holdfast issue init`, `create`, `list`, `show`, `search`, `update`, `delete`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import click
import msgspec

from holdfast.cli.entry import Group, LazyCommand
from holdfast.cli.issue_view import (
    claim_for,
    claim_option,
    field_option,
    issue_summary_to_json,
    reading_options,
    tracking,
    writing_options,
)
from holdfast.cli.options import ISSUE_FIELDS, field_of, tell
from holdfast.cli.output import Output
from holdfast.errors import SettingInvalid, UsageFailure
from holdfast.issues.creating import Created, NewIssue
from holdfast.issues.exchange import read_batch
from holdfast.issues.model import Priority, State
from holdfast.issues.reading import SHORT, created_issues_to_json
from holdfast.issues.tracker import KEEP, Tracker, Update

STATES = ("backlog", "ready", "in_progress", "gated", "done", "rejected", "archived")
PRIORITIES = ("low", "normal", "high", "critical")

_priority = click.option(
    "--priority", metavar="PRIORITY", type=click.Choice(PRIORITIES), help="low, normal, high or critical."
)
_filters = (
    click.option(
        "--state",
        "states",
        metavar="STATE",
        multiple=True,
        type=click.Choice(STATES),
        help="Only issues in this state; may be repeated.",
    ),
    click.option(
        "--priority",
        "priorities",
        metavar="PRIORITY",
        multiple=True,
        type=click.Choice(PRIORITIES),
        help="Only issues of this priority; may be repeated.",
    ),
    click.option("--assignee", metavar="KIND:NAME", help="Only issues of this assignee."),
    click.option(
        "--label",
        "labels",
        metavar="LABEL",
        multiple=True,
        help="Only issues with this label ('x*': like it).",
    ),
    click.option("--limit", metavar="N", type=click.IntRange(1), help="At most this many."),
    field_of(*ISSUE_FIELDS),
    reading_options,
)


class _Filters(TypedDict):
    """What `_finding_options` let somebody say."""

    states: tuple[str, ...]
    priorities: tuple[str, ...]
    assignee: str | None
    labels: tuple[str, ...]
    limit: int | None
    field: str | None
    repo: str | None


def _finding_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that lists issues."""
    for option in reversed(_filters):
        function = option(function)
    return function


@click.command()
@writing_options
@click.pass_obj
def init(output: Output, *, repo: str | None, actor: str | None) -> None:
    """Make an empty tracker in this directory, or in the one that --repo names.

    One that is there already is left as it is.

    \b
    Example:
      holdfast issue init
    """
    with tracking(repo, actor, init=True) as tracker:
        made = tracker.initialise()
    output.result({"created": made}, ["made a tracker in .jit" if made else "there is a tracker already"])


@click.command()
@click.argument("title", required=False)
@click.option("--description", metavar="TEXT", default="", help="What is to be done, in detail.")
@_priority
@click.option("--depends-on", metavar="ID", multiple=True, help="It waits for this issue; may be repeated.")
@click.option("--gate", "gates", metavar="KEY", multiple=True, help="It needs this gate; may be repeated.")
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="A label; may be repeated.")
@click.option("--assignee", metavar="KIND:NAME", help="Who shall do it.")
@click.option("--batch", is_flag=True, help="Read a JSON list of issues from standard input.")
@field_of(*ISSUE_FIELDS, "skipped_dependencies")
@writing_options
@click.pass_obj
def create(
    output: Output,
    *,
    title: str | None,
    description: str,
    priority: str | None,
    depends_on: tuple[str, ...],
    gates: tuple[str, ...],
    labels: tuple[str, ...],
    assignee: str | None,
    batch: bool,
    field: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Create an issue with this TITLE. It is ready at once, unless it depends on others.

    With --batch, the issues are read from standard input: a JSON list of objects with "title" and, if
    wanted, "description", "priority", "depends_on", "gates", "labels", "context", "assignee", and a "key"
    by which others of the batch may depend on it. Up to 250 are created all or none.

    \b
    Examples:
      holdfast issue create "Write the parser" --priority high --gate review
      holdfast issue create "Use the parser" --depends-on 4f1c
      echo '[{"title":"A","key":"a"},{"title":"B","depends_on":["a"]}]' |
        holdfast issue create --batch
    """

    if batch is (title is not None):
        raise click.UsageError("Give a TITLE, or --batch.", click.get_current_context())
    with tracking(repo, actor) as tracker:
        if batch:
            create_batch(tracker, output, field)
        else:
            words = {"title": title, "description": description, "priority": priority or "normal"}
            create_one(
                tracker, output, field, words, depends_on, gates=gates, labels=labels, assignee=assignee
            )


@click.command("list")
@_finding_options
@click.pass_obj
def list_(output: Output, /, **filters: Unpack[_Filters]) -> None:
    """List issues in the order in which they were created.

    One that cannot be read is named on standard error (with --json: under "broken") and left out; the
    status is 0 all the same. 'holdfast issue validate' ends with 6 then.

    \b
    Examples:
      holdfast issue list --state ready --state in_progress
      holdfast issue list --label 'area:*' --field id
    """
    _find(output, (), filters)


@click.command()
@click.argument("words", nargs=-1, required=True)
@_finding_options
@click.pass_obj
def search(output: Output, /, *, words: tuple[str, ...], **filters: Unpack[_Filters]) -> None:
    """Find the issues that have all these WORDS in title, description, labels, context or id.

    \b
    Example:
      holdfast issue search parser --state ready
    """
    _find(output, words, filters)


@click.command()
@click.argument("issue_id", metavar="ID")
@field_option
@reading_options
@click.pass_obj
def show(output: Output, *, issue_id: str, field: str | None, repo: str | None) -> None:
    """Show everything that is known of one issue.

    \b
    Examples:
      holdfast issue show 4f1c
      holdfast issue show 4f1c --field state
    """
    from holdfast.cli.issue_view import issue_lines, issue_to_json

    with tracking(repo) as tracker:
        record = issue_to_json(tracker, tracker.find_id(issue_id))
        tell(output, field, record, list(issue_lines(record)))


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--title", metavar="TEXT", help="Another title.")
@click.option("--description", metavar="TEXT", help="Another description.")
@_priority
@click.option("--state", metavar="STATE", type=click.Choice(STATES), help="Where it shall stand.")
@click.option("--assignee", metavar="KIND:NAME", help="Who shall do it; 'none' for nobody.")
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="Add a label.")
@click.option("--remove-label", "remove_labels", metavar="LABEL", multiple=True, help="Take a label off.")
@click.option("--context", metavar="KEY=VALUE", multiple=True, help="Set a key; 'KEY=' removes it.")
@click.option("--increment", metavar="KEY[=N]", multiple=True, help="Count a number in the context up.")
@click.option("--if-version", metavar="VERSION", help="Only if it still has this version, as 'show' says.")
@claim_option
@field_of(*ISSUE_FIELDS, "context", "open_gates")
@writing_options
@click.pass_obj
def update(output: Output, /, *, issue_id: str, repo: str | None, actor: str | None, **words: object) -> None:
    """Change an issue. Changes that others make at the same time are not lost.

    Asking for the state 'done' makes it 'gated' until all its gates are passed, and is refused while it
    waits for other issues. An issue that somebody has claimed is moved only with that claim.

    \b
    Examples:
      holdfast issue update 4f1c --state done
      holdfast issue update 4f1c --label area:parser --context branch=parser
      holdfast issue update 4f1c --increment attempts
    """

    with tracking(repo, actor) as tracker:
        update_one(tracker, output, tracker.find_id(issue_id), words)


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@claim_option
@writing_options
@click.pass_obj
def delete(
    output: Output,
    *,
    issue_id: str,
    dry_run: bool,
    claim_text: str | None,
    repo: str | None,
    actor: str | None,
) -> None:
    """Delete an issue, and take it out of the dependencies of all others with it.

    \b
    Example:
      holdfast issue delete 4f1c
    """
    from holdfast.cli.issue_view import SHORT, issue_summary_to_json

    with tracking(repo, actor) as tracker:
        found = tracker.find_id(issue_id)
        dependents = list(tracker.dependents_of(found))
        issue = tracker.issue(found) if dry_run else tracker.delete(found, claim=claim_for(found, claim_text))
        record = {**issue_summary_to_json(issue, issue.state), "deleted": not dry_run, "freed": dependents}
        freed = (
            f"; no longer waited for by {', '.join(each[:SHORT] for each in dependents)}"
            if dependents
            else ""
        )
        what = "would delete" if dry_run else "deleted"
        output.result(record, [f"{what} {found[:SHORT]}: {issue.title}{freed}"])


def _find(output: Output, words: tuple[str, ...], filters: _Filters) -> None:
    from holdfast.cli.issue_view import show_issues
    from holdfast.issues.model import Priority, State
    from holdfast.issues.tracker import Query, find

    states, priorities = map(State, filters["states"]), map(Priority, filters["priorities"])
    query = Query(words, tuple(states), tuple(priorities), filters["assignee"], filters["labels"])
    with tracking(filters["repo"]) as tracker:
        snapshot = tracker.snapshot()
        show_issues(output, snapshot, find(snapshot, query)[: filters["limit"]], filters["field"])


group = Group(
    "issue",
    help="""\
Issues: what is to be done, what waits for what, and who works on it. They are plain JSON files below
.jit/, which any number of processes may change at the same time. An id may be shortened to any
beginning that no other id has.

\b
Example:
  holdfast issue init
  holdfast issue create "Write the parser" --priority high
  holdfast issue claim-next
  holdfast issue finish 4f1c
""",
    table={
        "init": LazyCommand("holdfast.cli.issue:init", "Make an empty tracker here."),
        "create": LazyCommand("holdfast.cli.issue:create", "Create an issue, or a batch of them."),
        "list": LazyCommand("holdfast.cli.issue:list_", "List issues."),
        "show": LazyCommand("holdfast.cli.issue:show", "Show one issue."),
        "search": LazyCommand("holdfast.cli.issue:search", "Find issues by words."),
        "update": LazyCommand("holdfast.cli.issue:update", "Change an issue."),
        "delete": LazyCommand("holdfast.cli.issue:delete", "Delete an issue."),
        "claim": LazyCommand("holdfast.cli.issue_claims:claim", "Take an issue to work on it."),
        "claim-next": LazyCommand(
            "holdfast.cli.issue_claims:claim_next", "Take the most urgent issue that is ready."
        ),
        "heartbeat": LazyCommand("holdfast.cli.issue_claims:heartbeat", "Keep a claim alive."),
        "finish": LazyCommand("holdfast.cli.issue_claims:finish", "Say that the work on an issue is done."),
        "release": LazyCommand("holdfast.cli.issue_claims:release", "Put an issue back for others."),
        "work": LazyCommand("holdfast.cli.issue_claims:work", "Run a command while holding a claim."),
        "breakdown": LazyCommand("holdfast.cli.issue_many:breakdown", "Break an issue down into parts."),
        "import": LazyCommand("holdfast.cli.issue_many:import_", "Bring in issues from a file."),
        "export": LazyCommand("holdfast.cli.issue_many:export", "Print all issues and gates as JSON."),
        "validate": LazyCommand(
            "holdfast.cli.issue_many:validate", "Check everything; put right what can be."
        ),
        "locks": LazyCommand(
            "holdfast.cli.issue_claims:locks", "See who holds the tracker's locks, and who waits."
        ),
    },
)


def create_one(
    tracker: Tracker,
    output: Output,
    field: str | None,
    words: dict[str, Any],
    depends_on: tuple[str, ...],
    **more: Any,
) -> None:
    """Create the one issue that was described."""
    words["priority"] = Priority(words["priority"])
    new = NewIssue(**words, depends_on=tuple(map(tracker.find_id, depends_on)), **more)
    [created] = tracker.create_all([new])
    tell(output, field, created_issues_to_json(created), _lines(created))


def create_batch(tracker: Tracker, output: Output, field: str | None) -> None:
    """Create what stands on standard input."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageFailure("a batch is read from standard input, and that is a terminal")
    new = read_batch(sys.stdin.buffer.read(), "standard input")
    keys = {each.key for each in new}
    resolved = [
        msgspec.structs.replace(
            each, depends_on=tuple(on if on in keys else tracker.find_id(on) for on in each.depends_on)
        )
        for each in new
    ]
    created = tracker.create_all(resolved)
    records = [created_issues_to_json(each) for each in created]
    lines = [line for each in created for line in _lines(each)]
    tell(output, field, {"issues": records, "count": len(records)}, lines, records=records)


def _lines(created: Created) -> list[str]:
    issue = created.issue
    lines = [f"created {issue.id[:SHORT]} ({issue.state.value}): {issue.title}"]
    for on, way in created.implied.items():
        shown = " -> ".join(each[:SHORT] for each in way)
        lines.append(f"  left out {on[:SHORT]}, which follows from {shown}")
    return lines


def update_one(tracker: Tracker, output: Output, issue_id: str, words: dict[str, Any]) -> None:
    """Make the change, and say what came of it."""
    change = _change(words)
    if change == Update():
        raise UsageFailure("there is nothing to change", hint="Say what shall change: see --help.")
    claim = claim_for(issue_id, words["claim_text"])
    issue = tracker.update(issue_id, change, claim=claim, if_version=words["if_version"])
    state = tracker.state(issue)
    record = {
        **issue_summary_to_json(issue, state),
        "context": issue.context,
        "open_gates": issue.open_gates(),
    }
    line = f"updated {issue.id[:SHORT]} ({state.value}): {issue.title}"
    if state is State.GATED and issue.open_gates():
        line += f"; done when these are passed: {', '.join(issue.open_gates())}"
    tell(output, words["field"], record, [line])


def _change(words: dict[str, Any]) -> Update:
    assignee = words["assignee"]
    return Update(
        title=words["title"],
        description=words["description"],
        priority=Priority(words["priority"]) if words["priority"] else None,
        state=State(words["state"]) if words["state"] else None,
        assignee=KEEP if assignee is None else None if assignee == "none" else assignee,
        add_labels=words["labels"],
        remove_labels=words["remove_labels"],
        context=dict(_pair(each) for each in words["context"]),
        increments=dict(_count(each) for each in words["increment"]),
    )


def _pair(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingInvalid("--context", text, "KEY=VALUE, or KEY= to remove it")
    return name, value or None


def _count(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value or "1")
    except ValueError:
        raise SettingInvalid("--increment", text, "KEY, or KEY=N with a whole number") from None
