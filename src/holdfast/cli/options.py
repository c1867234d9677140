"""Options that commands share, and the parsing of their values."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from holdfast.cli import ACTOR as ACTOR
from holdfast.cli import LOCK_ID as LOCK_ID
from holdfast.cli import REPO as REPO
from holdfast.cli import STORE
from holdfast.cli import WORKTREE as WORKTREE
from holdfast.errors import Failure, IoFailure, SettingInvalid, UsageFailure

if TYPE_CHECKING:
    from holdfast.cli.output import Output
    from holdfast.repository.context import Consistency


Command = TypeVar("Command", bound=Callable[..., Any])

FOREVER = "forever"


def duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read an option as seconds: `250ms`, `5s`, `1m30s`, `2h`, or a bare number."""
    if value is None:
        return None
    from holdfast.clock import parse_duration

    return parse_duration(value, setting=parameter.opts[0])


def _wait(context: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Seconds to wait; None is forever, as everywhere below the command line."""
    if value.strip().lower() == FOREVER:
        return None
    try:
        return duration(context, parameter, value)
    except SettingInvalid:
        expected = f"a duration such as 250ms, 30s, 5m, 1h30m, or '{FOREVER}'"
        raise SettingInvalid(parameter.opts[0], value, expected) from None


def wait_option(
    help: str, *, default: str | Callable[[], str] = "0s", default_text: str = "do not wait; fail with status 4"
) -> Callable[[Command], Command]:
    """`--wait DURATION`. The command gets seconds, or None for `forever`."""
    text = f"{help}, such as 30s or 5m, or '{FOREVER}'.  [default: {default_text}]"
    return click.option("--wait", metavar="DURATION", default=default, callback=_wait, help=text)


def duration_option(name: str, help: str, *, default: str | None = None) -> Callable[[Command], Command]:
    """`--NAME DURATION`. The command gets seconds, or None if there is no default."""
    return click.option(name, metavar="DURATION", default=default, show_default=True, callback=duration, help=help)


def ttl_option(help: str, *, default: str | None = None) -> Callable[[Command], Command]:
    return duration_option("--ttl", help, default=default)


def repo_option_for(help: str, callback: Callable[..., Any] | None = None) -> Callable[[Command], Command]:
    """`--repo DIR`, for commands that need another help text or a callback."""
    return click.option("--repo", metavar="DIR", type=click.Path(file_okay=False), callback=callback, help=help)


def actor_option(otherwise: str, callback: Callable[..., Any] | None = None) -> Callable[[Command], Command]:
    """`--actor KIND:NAME`; `otherwise` is the default if the environment names no actor."""
    help = f"The actor to act as.  [default: {ACTOR}, else {otherwise}]"
    return click.option("--actor", metavar="KIND:NAME", callback=callback, help=help)


def limit_option(help: str) -> Callable[[Command], Command]:
    return click.option("--limit", metavar="N", type=click.IntRange(1, 10**9), help=help)


def dry_run_option(help: str) -> Callable[[Command], Command]:
    return click.option("--dry-run", is_flag=True, help=help)


archive_option = click.option(
    "--archive",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Also check this segment of the archive. Repeatable: name all of them.",
)
ignore_touches_option = click.option(
    "--ignore-touches", is_flag=True, help="Also claim an issue that touches the same paths as one in progress."
)
json_option = click.option("--json", is_flag=True, expose_value=False, help="Print one JSON object, for programs.")
repo_option = repo_option_for(f"The repository.  [default: {REPO}, else the one around the current directory]")
worktree_option = click.option(
    "--worktree",
    metavar="NAME",
    help=f"The worktree.  [default: {WORKTREE}, else the one around the current directory, else main]",
)
into_option = click.option(
    "--into", metavar="BRANCH", help="The branch to land on.  [default: the one checked out in the main checkout]"
)
lock_id_option = click.option(
    "--lock-id", metavar="ID", help=f"The id of the lease that you hold.  [default: {LOCK_ID}]"
)


LEVELS = ("quiesced", "best_effort")
accept_unsafe_server_option = click.option(
    "--accept-unsafe-server",
    is_flag=True,
    help="Accept a version of etcd that is known to lose data, for a trial; the address records that.",
)


def consistency_option(
    what: str, *, default: str = "the worktree's setting, else quiesced"
) -> Callable[[Command], Command]:
    """`--consistency LEVEL`; `what` is the capture, for the help text."""
    help = f"Whether {what} fails if a file changes meanwhile.  [default: {default}]"
    return click.option("--consistency", type=click.Choice(LEVELS), callback=_level, help=help)


def _level(context: click.Context, parameter: click.Parameter, value: str | None) -> Consistency | None:
    if value is None:
        return None
    from holdfast.repository.context import Consistency

    return Consistency(value)


def with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, and pass the `Output` as the first argument."""
    return json_option(click.pass_obj(command))


def in_repository(command: Callable[..., Any]) -> Callable[..., Any]:
    return repo_option(with_output(command))


def worktree_options(command: Command) -> Command:
    return repo_option(worktree_option(command))


name_option = click.option("--name", metavar="NAME", help="The name of a lease that needs no worktree.")
purpose_option = click.option("--purpose", metavar="TEXT", default="", help="The purpose, shown to others.")
priority_option = click.option(
    "--priority", metavar="N", type=int, default=0, show_default=True, help="Higher priority is served first."
)
data_dir_option = click.option(
    "--data-dir",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="The directory of the repository locks.  [default: HOLDFAST_DATA_DIR, else the user data directory]",
)


def store_address(environment: Mapping[str, str]) -> str | None:
    """The store of ledger and issues that the environment names; it wins over the recorded one."""
    return environment.get(STORE) or None


def temporary_directory(environment: Mapping[str, str]) -> Path:
    chosen = next(filter(None, map(environment.get, ("TMPDIR", "TEMP", "TMP"))), None)
    return Path(chosen or ("C:\\Temp" if sys.platform == "win32" else "/tmp"))


_SIZE = r"(?ai)(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?"  # not compiled here: few commands parse a size


def parse_size(text: str, *, setting: str = "size") -> int:
    """Read `4096`, `500M`, `1.5GiB` as bytes; the units are powers of 1024."""
    match = re.fullmatch(_SIZE, text.strip())
    if match is None or len(text) > 40:  # longer ones are infinite as a float
        raise SettingInvalid(setting, text, "a size such as 4096, 500M, 10G, of at most 40 characters")
    return int(float(match[1]) * 1024 ** " kmgtp".index(match[2].lower() or " "))


ISSUE_FIELDS = (
    *("id", "short_id", "title", "state", "priority", "assignee", "labels", "touches", "dependencies"),
    *("gates_required", "created_at", "updated_at"),
)
SNAPSHOT_FIELDS = (
    *("snapshot_id", "parent_id", "worktree", "note", "tag", "created_at", "consistency_level", "engine"),
    *("payload_hash", "files", "bytes", "holder_id", "lock_id", "token", "restored_from"),
    *("not_preserved", "special", "doomed_by", "warning"),
)
WORKTREE_FIELDS = (
    *("path", "worktree", "exists", "isolation", "high_risk", "label", "created_at"),
    *("base_snapshot_id", "head_snapshot_id", "lease", "operation"),
)
_LISTED = 5


def field_option(*names: str) -> Callable[[Command], Command]:
    """`--field NAME`, for a command whose records have these fields; without names, any field of a record."""

    def checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and names and value.partition(".")[0] not in names:
            raise _unknown(value, names)
        return value

    some = " (" + ", ".join(names[:_LISTED]) + (", ...)" if len(names) > _LISTED else ")")
    help = (
        f"Print only this field{some if names else ', such as id or context.branch'}: one value per line, for scripts."
    )
    return click.option("--field", metavar="NAME", callback=checked, help=help)


@contextlib.contextmanager
def given_back(give_back: Callable[[], object]) -> Iterator[None]:
    """Print a lease or claim in the block. If that fails, or standard output is closed, give it back: nobody knows its
    id, and others would wait."""
    try:
        yield
        if sys.stdout is None:
            raise IoFailure("write to", "standard output", OSError(errno.EBADF, "it is closed"))
    except BaseException:
        with contextlib.suppress(Failure):  # it expires; why it could not be printed matters more
            give_back()
        raise


def print_record(
    output: Output,
    field: str | None,
    record: Mapping[str, Any],
    lines: Sequence[str],
    *,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Print `field` of the record, or of each of `records`; without a field, the whole record."""
    if field is None:
        output.result(record, lines)
    else:
        show_field(output, [record] if records is None else records, field)


def show_field(output: Output, records: Sequence[Mapping[str, Any]], field: str) -> None:
    """Print one field of each record: a value per line, or a list for programs."""
    values = [_field(record, field) for record in records]
    output.result({"field": field, "values": values}, map(_as_text, values))


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
    return UsageFailure(f"there is no field {path!r}", hint=f"The fields are: {', '.join(known)}.", field=path)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    import json

    return "" if value is None else json.dumps(value, ensure_ascii=False)
