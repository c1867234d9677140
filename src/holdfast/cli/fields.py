"""`--field`: one value of what a command has to tell, for scripts. The same for all commands that have it.

A name is the one that `--json` has, with dots into what is inside: `context.branch`. One line per record;
texts as they are, nothing for null, all else as JSON. With `--json`: `{"field": ..., "values": [...]}`.
A name that there cannot be is refused before the command has done anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.options import Command
from holdfast.errors import UsageFailure

if TYPE_CHECKING:
    from holdfast.cli.output import Output

ISSUE = (
    *("id", "short_id", "title", "state", "priority", "assignee", "labels", "dependencies"),
    *("gates_required", "created_at", "updated_at"),
)
"""What lists show of an issue."""
LEASE = (
    *("lock_id", "fencing_token", "worktree_id", "lease_expires_at", "holder_id", "actor", "purpose", "ttl"),
    *("created_at", "last_renewed_at", "identity", "detached", "on_behalf_of", "boot_expires_at"),
)
CLAIM = (
    *("claim_id", "node_id", "owner", "acquired_at", "expires_at", "time_left", "sequence"),
    *("purpose", "holder"),
)
SNAPSHOT = (
    *("snapshot_id", "parent_id", "worktree_id", "note", "tag", "created_at", "consistency_level", "engine"),
    *("payload_hash", "files", "bytes", "holder_id", "lock_id", "fencing_token", "restored_from"),
    *("not_preserved", "special", "doomed_by", "warning"),
)
WORKTREE = (
    *("path", "worktree_id", "is_there", "isolation", "high_risk", "label", "created_at"),
    *("base_snapshot_id", "head_snapshot_id", "lock", "operation"),
)
_SHOWN = 5


def field_of(*names: str) -> Callable[[Command], Command]:
    """The option for a command whose records have these fields; without any, it may be whatever there is."""

    def checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and names and value.partition(".")[0] not in names:
            raise _unknown(value, names)
        return value

    some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return click.option(
        "--field",
        metavar="NAME",
        callback=checked,
        help="Print only this field"
        + (f" ({some})" if names else ", such as id or context.branch")
        + ": one value per line, for scripts.",
    )


def tell(
    output: Output,
    field: str | None,
    record: Mapping[str, Any],
    lines: Sequence[str],
    *,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Tell one field, if one was asked for; else all. `records` are what has the fields, if it is many."""
    if field is None:
        output.result(record, lines)
    else:
        show_field(output, [record] if records is None else records, field)


def show_field(output: Output, records: Sequence[Mapping[str, Any]], field: str) -> None:
    """One field of each record: a value per line, or a list for programs."""
    values = [_field(record, field) for record in records]
    if output.as_json:
        output.result({"field": field, "values": values})
    else:
        for value in values:
            output.line(_as_text(value))


def _field(record: Mapping[str, Any], path: str) -> object:
    value: Any = record
    rest = path
    while rest:
        name, _, rest = (rest, "", "") if isinstance(value, dict) and rest in value else rest.partition(".")
        if not isinstance(value, dict) or name not in value:
            raise _unknown(path, record)
        value = value[name]
    return value


def _unknown(path: str, known: Sequence[str] | Mapping[str, Any]) -> UsageFailure:
    return UsageFailure(f"there is no field {path!r}", hint=f"There are: {', '.join(known)}.", field=path)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    import json

    return "" if value is None else json.dumps(value, ensure_ascii=False)
