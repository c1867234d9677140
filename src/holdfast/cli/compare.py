"""`holdfast status`, `diff` and `verify`: compare worktrees and snapshots, and check snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.options import json_option, repo_option, worktree_option
from holdfast.cli.output import Output
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_worktree
from holdfast.cli.snapshot import brief_change_lines, change_lines, change_summary
from holdfast.cli.styled import Span
from holdfast.errors import Corrupt, NotFound, PartialSnapshot, UsageFailure
from holdfast.fs.names import counted
from holdfast.repository.to_json import comparison_to_json
from holdfast.trees.manifest import escaped

if TYPE_CHECKING:
    from holdfast.repository.compare import Comparison
    from holdfast.repository.snapshot_service import Snapshots
    from holdfast.trees.repair import RepairedFile

_all_option = click.option(
    "--all", "everything", is_flag=True, help="List every entry of directories that were added or removed."
)


@click.command()
@_all_option
@repo_option
@worktree_option
@json_option
@click.pass_obj
def status(output: Output, /, *, everything: bool, **where: Any) -> None:
    """Show the changes in a worktree since its head: A is added, M modified, D deleted.

    The entries of a large directory that was added or deleted are only counted, unless you give --all.

    \b
    Examples:
      holdfast status
      holdfast status --worktree experiment --json
    """
    opened = open_worktree(**where)
    found = opened.repository.snapshots.status(opened.worktree)
    clean = not found.changes
    record = {"worktree": opened.worktree, "clean": clean, **comparison_to_json(found)}
    head = f"head {found.old.label}" if found.old.descriptor else "no snapshot"
    last = "Nothing has changed." if clean else change_summary(found.changes)
    lines = [f"{opened.worktree}: {head}", *_change_lines(found, everything=everything), last]
    output.result(record, lines, paint=_paint_change)


@click.command()
@click.argument("old", metavar="[A", required=False)
@click.argument("new", metavar="[B]]", required=False)
@click.option("--patch", is_flag=True, help="Show the differing lines of text files.")
@click.option("--stat", is_flag=True, help="Show how many lines of each file differ.")
@_all_option
@repo_option
@worktree_option
@json_option
@click.pass_obj
def diff(
    output: Output, /, *, old: str | None, new: str | None, patch: bool, stat: bool, everything: bool, **where: Any
) -> None:
    """Show the differences from snapshot A (default: head) to B (default: the worktree as it is).

    \b
    Examples:
      holdfast diff
      holdfast diff v1 head --stat
      holdfast diff head~1 --patch
    """
    if patch and stat:
        raise UsageFailure("--patch and --stat cannot be used together", hint="Choose one of them.")
    opened = open_worktree(**where)
    found = opened.repository.snapshots.compare(opened.worktree, old, new)
    record = comparison_to_json(found)
    lines: Iterable[str] = _change_lines(found, everything=everything)
    if patch:
        record["patches"], lines = _patches(opened.repository.snapshots, found)
    elif stat:
        record["lines"], lines = _statistics(opened.repository.snapshots, found)
    last = [] if patch else [change_summary(found.changes) if found.changes else "No difference."]
    output.result(record, [*lines, *last], paint=_paint_change)


_SIGN_STYLES = {"+": "green", "-": "red", "@": "cyan", "A ": "green", "D ": "red", "M ": "yellow"}


def _paint_change(line: str) -> list[Span]:
    """A line of a patch, or of a list of changes, in the style of its first character."""
    if line.startswith(("--- ", "+++ ")):
        return [Span(line, "bold")]
    return [Span(line, _SIGN_STYLES.get(line[:1]) or _SIGN_STYLES.get(line[:2], ""))]


def _change_lines(found: Comparison, *, everything: bool) -> Iterator[str]:
    return change_lines(found.changes) if everything else brief_change_lines(found.changes)


def _patches(snapshots: Snapshots, found: Comparison) -> tuple[list[object], Iterable[str]]:
    made = list(snapshots.patches(found))
    records: list[object] = [
        {"path": escaped(each.change.path), "binary": each.lines is None, "lines": list(each.lines or ())}
        for each in made
    ]
    by_path = {each.change.path: each for each in made}
    lines: list[str] = []
    for change in found.changes:
        here = by_path.get(change.path)
        if here is not None and here.lines is None:
            lines.append(f"{escaped(change.path)}: {change.what}, not text")
        else:
            lines += (here and here.lines) or change_lines([change])
    return records, lines


def _statistics(snapshots: Snapshots, found: Comparison) -> tuple[list[object], Iterable[str]]:
    made = [(escaped(each.change.path), each) for each in snapshots.patches(found)]
    records: list[object] = [
        {"path": path, "binary": each.lines is None, "added": each.added, "removed": each.removed}
        for path, each in made
    ]
    width = max((len(path) for path, _ in made), default=0)
    return records, (
        f"{path:<{width}} | " + ("not text" if each.lines is None else f"+{each.added} -{each.removed}")
        for path, each in made
    )


@click.command()
@click.argument("snapshot", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Verify all snapshots of the repository.")
@click.option("--repair", is_flag=True, help="Restore lost and changed content from other snapshots and worktrees.")
@repo_option
@worktree_option
@json_option
@click.pass_obj
def verify(output: Output, /, *, snapshot: str | None, everything: bool, repair: bool, **where: Any) -> None:
    """Read the whole content of a snapshot (default: head) and compare it with its hashes.

    If there are differences, the command names them and exits with status 6. It changes nothing, except with --repair,
    which restores a damaged file if another snapshot or a worktree has a file with the same hash. In a git checkout,
    snapshots share their objects, so only a worktree can have such a file.

    \b
    Examples:
      holdfast verify
      holdfast verify --all --json
      holdfast verify --all --repair
    """
    if snapshot is not None and everything:
        raise UsageFailure("--all takes no snapshot", hint="Name one, or verify all of them.")
    opened = open_worktree(**where)
    snapshots = opened.repository.snapshots
    if everything:
        ids = snapshots.all_ids()
    else:
        ids = [snapshots.named(snapshot or "head", seen_from=opened.worktree).snapshot_id]
    results = _verify_all(snapshots, ids, may_vanish=everything)
    repaired: list[RepairedFile] = []
    if repair and (damaged := [each for each, found in results if any(one["what"] != "extra" for one in found)]):
        with showing("Repairing"):
            repaired = snapshots.repair(damaged)
        results = _verify_all(snapshots, ids, may_vanish=everything)
    if problems := [problem for _, found in results for problem in found]:
        damaged = [snapshot_id for snapshot_id, found in results if found]
        advice = "Restore the rest from a backup" if repair else "Run 'holdfast verify --all --repair'"
        still = f" ({len(repaired)} repaired; no sound copy of the rest was found)" if repair else ""
        if all(each["what"] == "extra" for each in problems):
            advice, still = "Remove the extra entries", f" ({len(repaired)} repaired)" if repair else ""
        raise Corrupt(
            f"{counted(len(damaged), 'snapshot')} damaged{still}: {_first_few(problems)}",
            hint=f"{advice}, and do not trust the disk.",
            snapshots=damaged,
            problems=problems,
            repaired=[each._asdict() for each in repaired],
        )
    verified = [snapshot_id for snapshot_id, _ in results]
    lines = [f"Repaired {each.path} from {each.source}" for each in repaired]
    lines += [f"{each}: verified" for each in verified] or ["No snapshot yet."]
    output.result({"verified": verified, "problems": [], "repaired": [each._asdict() for each in repaired]}, lines)


def _verify_all(snapshots: Snapshots, ids: list[str], *, may_vanish: bool) -> list[tuple[str, list[dict[str, str]]]]:
    results = []
    with showing("Verifying", total=len(ids), noun="snapshots", sized=False) as progress:
        for each in _verify(snapshots, ids, may_vanish=may_vanish):
            results.append(each)
            if progress is not None:
                progress(len(results), 0)
    return results


def _verify(snapshots: Snapshots, ids: list[str], *, may_vanish: bool) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Each snapshot and its problems; `may_vanish` skips snapshots that a garbage collection deletes meanwhile."""
    for snapshot_id in ids:
        try:
            found = [each._asdict() for each in snapshots.verify(snapshot_id)]
        except PartialSnapshot as partial:
            found = [{"path": "", "what": "ready", "detail": partial.message}]
        except NotFound:
            if not may_vanish:
                raise
            continue
        yield snapshot_id, [{"snapshot_id": snapshot_id, **each} for each in found]


def _first_few(problems: list[dict[str, str]]) -> str:
    shown = [f"{each['snapshot_id']}: {each['path']}: {each['detail']}" for each in problems[:5]]
    return "; ".join(shown) + ("; ..." if len(problems) > 5 else "")
