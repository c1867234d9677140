"""`holdfast issue breakdown`, `import`, `export`, `validate`: operations on many issues."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.issue_view import reading_options, tracking, writing_options
from holdfast.cli.output import Output, counted
from holdfast.cli.progress import showing
from holdfast.errors import Corrupt, ExitStatus
from holdfast.issues.model import SHORT

if TYPE_CHECKING:
    from holdfast.findings import Finding


@click.command()
@click.argument("issue_id", metavar="ID")
@click.option("--part", "parts", metavar="TITLE", multiple=True, required=True, help="A part. Repeatable.")
@writing_options
@click.pass_obj
def breakdown(output: Output, *, issue_id: str, parts: tuple[str, ...], repo: str | None, actor: str | None) -> None:
    """Break the issue ID down into parts: new issues that it depends on.

    The parts inherit its dependencies, priority and labels. All of them are created, or none.

    \b
    Example:
      holdfast issue breakdown 4f1c --part "Read the file" --part "Check the file"
    """
    from holdfast.issues.creating import NewIssue
    from holdfast.issues.reading import created_issues_to_json

    with tracking(repo, actor) as tracker:
        whole = tracker.issue(tracker.find_id(issue_id))
        new = [NewIssue(title=title, priority=whole.priority, labels=whole.labels) for title in parts]
        created = tracker.break_down(whole.id, new)
    record = {"id": whole.id, "parts": [created_issues_to_json(each) for each in created]}
    lines = [f"{whole.id[:SHORT]} now waits for {counted(len(created), 'part')}:"]
    lines += [f"  {each.issue.id[:SHORT]} ({each.issue.state.value}): {each.issue.title}" for each in created]
    output.result(record, lines)


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@writing_options
@click.pass_obj
def import_(output: Output, *, file: str, repo: str | None, actor: str | None) -> None:
    """Import the issues of FILE ('-': standard input) under their ids.

    FILE is the output of 'holdfast issue export', a JSON list of issues, or one issue per line. Ids that already exist
    are refused. Up to 250 issues are imported, all or none; on etcd with its default limits, up to 56, and fewer with
    dependencies. If gates in FILE have checkers, these are listed; they run only once you approve them ('holdfast
    trust').

    \b
    Example:
      holdfast issue import backup.json
    """
    from holdfast.fs import durable
    from holdfast.fs.directory import chosen
    from holdfast.issues.exchange import import_text

    text = sys.stdin.buffer.read() if file == "-" else durable.read(chosen(file))
    with tracking(repo, actor) as tracker:
        with showing("Importing"):
            imported = import_text(tracker, text, "standard input" if file == "-" else file)
        defined = tracker.gates.all()
        brought = {key: gate.checker.command for key in imported.gates if (gate := defined[key]).checker}
    record = {"issues": [issue.id for issue in imported.issues], "gates": imported.gates, "checkers": brought}
    lines = [f"imported {counted(len(imported.issues), 'issue')} and {counted(len(imported.gates), 'gate')}"]
    lines += [f"  the gate {key} comes with the checker: {command}" for key, command in brought.items()]
    output.result(record, [*lines, "Before they can run, approve them: holdfast trust"] if brought else lines)


@click.command()
@reading_options
@click.pass_obj
def export(output: Output, *, repo: str | None) -> None:
    """Print all issues and gates as one JSON object, including unknown fields.

    \b
    Example:
      holdfast issue export > backup.json
    """
    import json

    from holdfast.issues.exchange import exported
    from holdfast.issues.model import GATES

    with tracking(repo) as tracker:
        gates = tracker.store.read(GATES)
        record = exported(tracker.snapshot(), gates.record if gates else None)
    if output.as_json:
        output.result(record)
    else:
        output.text(json.dumps(record, indent=2))


@click.command()
@click.option("--fix", is_flag=True, help="Repair every finding that has only one possible repair.")
@writing_options
@click.pass_obj
def validate(output: Output, *, fix: bool, repo: str | None, actor: str | None) -> int:
    """Check the tracker for inconsistencies. Status 6 if there are findings.

    It finds issues missing from the index and index entries without an issue, files of deleted issues that a
    merge brought back, dependencies on missing issues, cycles, wrong states, undefined gates, expired claims,
    broken files, and commits that a dead process left unfinished. Files that a merge brought back, cycles, broken
    files, and commits that another program interfered with are yours to repair; --fix never overwrites them.

    \b
    Examples:
      holdfast issue validate
      holdfast issue validate --fix
    """
    from holdfast.issues.validate import examine, finding_to_json, repair

    with tracking(repo, actor) as tracker:
        before = examine(tracker)
        left = repair(tracker) if fix else before
    remaining = [finding_to_json(each) for each in left]
    fixed = [each for each in before if finding_to_json(each) not in remaining]
    record: dict[str, Any] = {"findings": remaining, "fixed": [finding_to_json(each) for each in fixed]}
    if left and output.as_json:
        raise Corrupt(f"the tracker has {counted(len(left), 'finding')}", **record)
    lines = [line for each in fixed for line in _finding_lines("fixed", each)]
    lines += [line for each in left for line in _finding_lines("found", each)]
    output.result(record, lines or ["no findings"])
    if left and any(each.fixable for each in left):
        output.diagnostic("'holdfast issue validate --fix' repairs some of these.")
    return ExitStatus.CORRUPT if left else ExitStatus.OK


def _finding_lines(mark: str, finding: Finding) -> Iterator[str]:
    name = f" {finding.subject[:SHORT]}" if finding.subject else ""
    yield f"{mark} {finding.code}:{name} {finding.message}"
    if finding.remedy and mark == "found":
        yield f"  {finding.remedy}"
