"""The settings of a repository, in `.holdfast/settings.json` below its root: never in the tree of a worktree.

A repository may come from a stranger, and so may this file. A command in it runs only if the user has approved it:
`change` approves the values that it sets, and `holdfast trust` existing ones. Unknown keys are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holdfast.clock import LONGEST_COMMAND, format_duration, parse_duration
from holdfast.errors import NotFound, SettingInvalid, UsageFailure
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.fs.names import LONGEST_DESCRIPTION, checked_text, printable, split_relative
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.locating import is_git_home
from holdfast.store.model import StructCodec
from holdfast.store.open import SETTINGS as SETTINGS

SETUP, COPY, TEARDOWN, PORTS = "worktree.setup", "worktree.copy", "worktree.teardown", "worktree.ports"
DIRECTORY = "worktree.directory"
CHECKS, CHECK_TIMEOUT, BATCH = "land.checks", "land.check_timeout", "land.batch"
PARALLEL, INPUTS, ENFORCE_TOUCHES = "land.parallel", "land.inputs", "land.enforce_touches"
PUSH = "land.push"
APPROVED = (SETUP, TEARDOWN, DIRECTORY, CHECKS)  # they run programs, or say where to write
DESCRIPTIONS = {
    SETUP: "Commands to run once in a new worktree, such as 'uv sync'.",
    COPY: "Files of main to copy into a new worktree, as patterns: '.env', 'config/*.local', '**/.env'.",
    TEARDOWN: "Commands to run in a worktree before it is removed.",
    PORTS: "How many port numbers to reserve for each worktree, and the first number to use: '10 20000'.",
    DIRECTORY: "Where to create worktrees, relative to the checkout: '../agents'. [default: <checkout>.worktrees]",
    CHECKS: "Commands that a commit must pass before it lands, such as 'make test'.",
    CHECK_TIMEOUT: "How long each of these checks may take. [default: 1h]",
    BATCH: "How many entries of the landing queue are tested together at first. [default: 8]",
    PARALLEL: "How many candidates are tested at the same time. [default: 1]",
    INPUTS: "Patterns of files: if one changes, worktree.setup runs again before checks. [default: lock files]",
    PUSH: "The remote whose branch work lands on, such as 'origin'. [default: the local branch]",
    ENFORCE_TOUCHES: "'true' makes landing refuse work that changes paths outside its issue's --touches.",
}
FIRST_PORT, LAST_PORT = 20_000, 65_535
MOST_PARALLEL, MOST_IN_BATCH = 64, 1000
LOCK_FILES = (
    *("**/*.lock", "**/*-lock.json", "**/*-lock.yaml", "**/bun.lockb", "**/go.sum", "**/npm-shrinkwrap.json"),
    "**/requirements*.txt",
)
_MOST_BYTES = 1 << 20


class Ports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many ports a worktree has, and the first number to use."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    base: Annotated[int, msgspec.Meta(ge=1024, le=LAST_PORT)] = FIRST_PORT


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    schema_version: int = 1
    setup: tuple[str, ...] = msgspec.field(name=SETUP, default=())
    copy: tuple[str, ...] = msgspec.field(name=COPY, default=())
    teardown: tuple[str, ...] = msgspec.field(name=TEARDOWN, default=())
    ports: Ports | None = msgspec.field(name=PORTS, default=None)
    directory: str | None = msgspec.field(name=DIRECTORY, default=None)
    checks: tuple[str, ...] = msgspec.field(name=CHECKS, default=())
    check_timeout: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_COMMAND)] | None = msgspec.field(
        name=CHECK_TIMEOUT, default=None
    )
    batch: Annotated[int, msgspec.Meta(ge=1, le=MOST_IN_BATCH)] | None = msgspec.field(name=BATCH, default=None)
    parallel: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARALLEL)] | None = msgspec.field(name=PARALLEL, default=None)
    inputs: tuple[str, ...] = msgspec.field(name=INPUTS, default=())
    push: str | None = msgspec.field(name=PUSH, default=None)
    enforce_touches: bool = msgspec.field(name=ENFORCE_TOUCHES, default=False)

    def get(self, key: str) -> list[str]:
        """The value of a key as words; empty if it is not set."""
        value: Any = getattr(self, _field(key))
        if isinstance(value, Ports):
            return [str(value.count), str(value.base)]
        if isinstance(value, bool):
            return ["true"] if value else []
        if isinstance(value, int | float):
            return [format_duration(value) if key == CHECK_TIMEOUT else str(value)]
        return [value] if isinstance(value, str) else list(value or ())

    def changed(self, key: str, values: Sequence[str]) -> Settings:
        """The settings with another value; without `values`, with the default."""
        return msgspec.structs.replace(self, **{_field(key): _PARSERS[key](values)})


_CODEC = StructCodec(Settings)


def read_settings(root: Path) -> Settings:
    """The settings of the repository at `root`; the defaults if there are none."""
    path = root / SETTINGS
    try:
        found = _CODEC.decode(durable.read(path, limit=_MOST_BYTES), str(path))
    except NotFound:
        return Settings()
    if found.schema_version != 1:
        raise SettingInvalid("schema_version", str(found.schema_version), f"1, in {path}")
    return found


def change(root: Path, key: str, values: Sequence[str]) -> Settings:
    """Set a key, or remove it if there are no values. The new values count as approved."""
    if key == DIRECTORY and not is_git_home(str(root)):
        raise UsageFailure(f"{key} is for git checkouts: here, worktrees are in {root / 'worktrees'}", setting=key)
    path = root / SETTINGS
    make_directories(path.parent)
    with FileLocker(follow_links=False).lock_exclusive(path.with_suffix(".lock")):
        settings = read_settings(root).changed(key, values)
        if key in APPROVED and values:
            approve(root, {key: settings.get(key)})
        durable.replace(path, msgspec.json.format(_CODEC.encode(settings), indent=2) + b"\n")
    return settings


# --- Approval -----------------------------------------------------------------------------------------


def commands_of(settings: Settings) -> dict[str, list[str]]:
    """The commands and paths that need approval, by key."""
    return {key: commands for key in APPROVED if (commands := settings.get(key))}


def are_approved(root: Path, commands: dict[str, list[str]]) -> list[bool]:
    """Whether the user has approved each of the commands, in order."""
    from holdfast.store import approvals

    return approvals.are_approved(root, [_text(key, each) for key in commands for each in commands[key]])


def approve(root: Path, commands: dict[str, list[str]]) -> None:
    from holdfast.store import approvals

    approvals.approve(root, commands=[_text(key, each) for key in commands for each in commands[key]])


def require_approved(root: Path, settings: Settings, key: str) -> None:
    """Raise `NotApproved` unless the user has approved all values of a key."""
    from holdfast.store.approvals import require_command

    for each in settings.get(key):
        shown = f"{'' if key == DIRECTORY else 'the command of '}{key}, {printable(each)!r},"
        require_command(root, _text(key, each), shown, setting=key, command=each)


def _text(key: str, command: str) -> str:
    return msgspec.json.encode([key, command]).decode()


# --- Values -------------------------------------------------------------------------------------------


def _field(key: str) -> str:
    if key not in _PARSERS:
        known = f"The settings are: {', '.join(_PARSERS)}."
        raise UsageFailure(f"there is no setting {key!r}", hint=known, setting=key)
    return key.partition(".")[2]


def _commands(values: Sequence[str]) -> tuple[str, ...]:
    for each in values:
        if not each.strip() or "\0" in each:
            raise SettingInvalid("a command", each, "a command for the shell")
        checked_text(each, what="command", limit=LONGEST_DESCRIPTION)
    return tuple(values)


def _patterns(values: Sequence[str]) -> tuple[str, ...]:
    for each in values:
        split_relative(checked_text(each, what="pattern"))
    return tuple(values)


def _directory(values: Sequence[str]) -> str | None:
    if not values:
        return None
    if len(values) > 1 or not values[0].strip() or "\0" in values[0]:
        raise SettingInvalid(DIRECTORY, " ".join(values), "one path, absolute or relative to the main checkout")
    return checked_text(values[0], what="path")


def _ports(values: Sequence[str]) -> Ports | None:
    if not values:
        return None
    expected = f"a number from 1 to 1000 and, optionally, a first port from 1024 to {LAST_PORT}, such as '10 20000'"
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) < 9 else -1 for each in values]
    fields = dict(zip(("count", "base"), numbers, strict=False))
    try:
        ports = msgspec.convert(fields, Ports)
    except msgspec.ValidationError:
        raise SettingInvalid(PORTS, " ".join(values), expected) from None
    if len(values) > 2 or ports.base + ports.count - 1 > LAST_PORT:
        raise SettingInvalid(PORTS, " ".join(values), expected)
    return ports


def _number(key: str, most: int, values: Sequence[str]) -> int | None:
    if not values:
        return None
    text = " ".join(values)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise SettingInvalid(key, text, f"a number from 1 to {most}")
    return int(text)


def _time_limit(values: Sequence[str]) -> float | None:
    if not values:
        return None
    text = " ".join(values)
    seconds = parse_duration(text, setting=CHECK_TIMEOUT)
    if not 0 < seconds <= LONGEST_COMMAND:
        expected = f"a duration above 0s and of {format_duration(LONGEST_COMMAND)} at most"
        raise SettingInvalid(CHECK_TIMEOUT, text, expected)
    return seconds


def _remote(values: Sequence[str]) -> str | None:
    if len(values) > 1:
        raise SettingInvalid(PUSH, " ".join(values), "the name of one remote")
    return checked_text(values[0], what="remote") if values else None


def _is_true(values: Sequence[str]) -> bool:
    if list(values) not in ([], ["true"], ["false"]):
        raise SettingInvalid(ENFORCE_TOUCHES, " ".join(values), "true or false")
    return list(values) == ["true"]


_PARSERS: dict[str, Any] = {
    SETUP: _commands,
    COPY: _patterns,
    TEARDOWN: _commands,
    PORTS: _ports,
    DIRECTORY: _directory,
    CHECKS: _commands,
    CHECK_TIMEOUT: _time_limit,
    BATCH: partial(_number, BATCH, MOST_IN_BATCH),
    PARALLEL: partial(_number, PARALLEL, MOST_PARALLEL),
    INPUTS: _patterns,
    PUSH: _remote,
    ENFORCE_TOUCHES: _is_true,
}
