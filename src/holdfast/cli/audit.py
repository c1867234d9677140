"""`holdfast audit`: show and verify the audit trail of a repository."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.entry import CommandGroup, LazyCommand
from holdfast.cli.options import archive_option, json_option, limit_option, repo_option
from holdfast.cli.output import Output, counted
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_repository
from holdfast.clock import parse_duration, parse_instant
from holdfast.errors import SettingInvalid

if TYPE_CHECKING:
    from holdfast.repository.repository import Repository
    from holdfast.store.audit import AuditEntry

Since = Callable[[float], float] | None
"""A function from the current time to an instant."""
FOLLOW_PAUSE = 5.0
"""The longest wait for new entries, so that an interruption is noticed on every system."""


def since_option(context: click.Context, parameter: click.Parameter, value: str | None) -> Since:
    """Read a duration (how long ago) or an instant."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        instant = parse_instant(value)
        return lambda now: instant
    try:
        ago = parse_duration(value)
        return lambda now: now - ago
    except SettingInvalid:
        expected = "a duration such as 2h, or an instant such as 2026-01-31T12:00:00Z"
        raise SettingInvalid(parameter.opts[0], value, expected) from None


@click.command(
    "audit",
    cls=CommandGroup,
    short_help="Show or verify the audit trail.",
    table={"archive": LazyCommand("holdfast.cli.archive:audit_archive", "Move old entries from a server to files.")},
)
@click.option("--verify", is_flag=True, help="Verify the whole chain; E_AUDIT_CHAIN_BROKEN names the entry.")
@click.option("--follow", is_flag=True, help="Keep printing new entries until interrupted.")
@limit_option("Show only the last N entries.")
@click.option("--since", metavar="WHEN", callback=since_option, help="Start this long ago (2h), or at this instant.")
@archive_option
@repo_option
@json_option
@click.pass_obj
def audit(
    output: Output,
    *,
    verify: bool,
    follow: bool,
    limit: int | None,
    since: Since,
    archive: Sequence[str],
    repo: str | None,
) -> None:
    """Show the audit trail: every change to the repository, in order.

    Each entry contains the hash of the previous one, and a copy of the last one is kept beside the trail, so
    verification detects entries that were altered, removed, reordered or cut off at the end. It does not detect a
    trail that was replaced together with the copy: store the last hash elsewhere and compare.

    With --json, all entries are in one object; with --json --follow, each is an object on its own line.

    \b
    Examples:
      holdfast audit --limit 20
      holdfast audit --verify --json
      holdfast audit --verify --archive /srv/archive/audit-1-90000.jsonl
      holdfast audit --follow --since 1h
    """
    if CommandGroup.passes_on():
        return
    if archive and not verify:
        raise click.UsageError("--archive needs --verify.", click.get_current_context())
    repository = open_repository(repo)
    reader = repository.audit(verified=verify, last=None if since else limit, segments=tuple(map(Path, archive)))
    start = since(repository.now()) if since else None
    found = (each for each in reader.read() if start is None or parse_instant(each.at) >= start)
    with showing("Verifying") if verify else contextlib.nullcontext():
        entries = list(deque(found, maxlen=limit))
    if follow:
        _follow(output, repository, reader, entries)
        return
    number, last = reader.end
    records = [_record(each) for each in entries]
    lines = [_line(each) for each in entries]
    if verify:
        lines.append(f"The chain is intact: {counted(number, 'entry')}, the last hash is {last}.")
    if archive:
        lines.append(f"This includes {counted(len(archive), 'segment')} of archived entries.")
    elif reader.archived:
        lines.append(f"Entries 1 to {reader.archived} are archived{', and were not checked' if verify else ''}.")
    record = {"entries": records, "verified": verify, "count": number, "last_hash": last, "archived": reader.archived}
    output.result(record, lines or ["The audit trail is empty."])


def _follow(output: Output, repository: Repository, reader: Any, entries: list[AuditEntry]) -> None:
    with repository.watch_audit() as watch:  # before the next read: nothing is missed
        while True:
            for each in entries:
                output.result({"entry": _record(each)}, [_line(each)])
            entries = list(reader.read())
            if not entries:
                watch.wait(FOLLOW_PAUSE)


def _record(entry: AuditEntry) -> dict[str, object]:
    import msgspec  # not above: completing the command takes less time without it

    return msgspec.structs.asdict(entry)


def _line(entry: AuditEntry) -> str:
    facts = " ".join(f"{name}={value}" for name, value in _flat(entry.facts) if value not in (None, ""))
    return f"{entry.number:>6}  {entry.at}  {entry.event}  {facts}  by {entry.actor}"


def _flat(facts: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """The facts of an entry; fields of nested records are named like `old.lock_id`."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
