"""Approvals: the store that a repository may contact and the commands that it may run on this machine.

A repository may come from a stranger. Holdfast contacts the store that its configuration names, and runs the commands
in its records, only if the user has approved exactly these: by naming the store or the command, or afterwards
(`holdfast trust`). A changed address or command needs a new approval, and so does a repository with another path or id.

Approvals are in the user's data directory, one file for each repository; its name is a hash of the repository's path.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from holdfast.errors import Failure, NotApproved, NotFound, UsageFailure
from holdfast.fs import calls, durable
from holdfast.fs.directory import make_directories, resolved
from holdfast.locks.file_lock import FileLocker
from holdfast.store.addresses import FILES, without_secrets
from holdfast.store.model import StructCodec

DATA_VARIABLES = ("HOLDFAST_DATA_DIR", "AGENCY_DATA_DIR")
DIRECTORY = "approvals"
_MOST_BYTES = 1 << 20
_MOST_COMMANDS = 10_000
_FORMAT = ".jvs/format.json"


class Approved(msgspec.Struct, frozen=True, omit_defaults=True):
    """The approvals for one repository: the address of a store, without secrets, and hashes of commands."""

    root: str
    repository_id: str = ""
    store: str = FILES
    commands: tuple[str, ...] = ()


class _Identified(msgspec.Struct):
    repository_id: str = ""


_CODEC = StructCodec(Approved)


def approved(root: str | os.PathLike[str]) -> Approved:
    """The user's approvals for the repository at `root`."""
    real = calls.realpath(root)
    nothing = Approved(os.fsencode(real).decode("utf-8", "replace"), _repository_id(real))
    try:
        path = _path(real)
        found = _CODEC.decode(durable.read(path, limit=_MOST_BYTES), str(path))
    except NotFound:
        return nothing
    same = (found.root, found.repository_id) == (nothing.root, nothing.repository_id)
    return found if same else nothing


def approve(root: str | os.PathLike[str], *, store: str | None = None, commands: Iterable[str] = ()) -> None:
    """Approve the address of a store and the texts of commands for the repository at `root`, for this user on this
    machine. Only the last approved store counts. For checkers, use `Gating.approve`."""

    def add(before: Approved) -> Approved:
        known = dict.fromkeys((*before.commands, *map(_digest, commands)))
        chosen = before.store if store is None else without_secrets(store)
        return msgspec.structs.replace(before, store=chosen, commands=tuple(known)[-_MOST_COMMANDS:])

    _change(root, add)


def revoke(root: str | os.PathLike[str]) -> None:
    """Withdraw all approvals for the repository at `root`."""
    _change(root, lambda before: Approved(before.root, before.repository_id))


def require_store(root: str | os.PathLike[str], address: str) -> None:
    """Raise `NotApproved` unless the user has approved this address for this repository."""
    shown = without_secrets(address)
    if approved(root).store != shown:
        raise _refusal(root, f"the store {shown}, which {calls.realpath(root)} names, is not approved", store=shown)


def are_approved(root: str | os.PathLike[str], commands: Iterable[str]) -> list[bool]:
    """Whether the user has approved each of these commands for this repository."""
    known = approved(root).commands
    return [_digest(each) in known for each in commands]


def require_command(root: str | os.PathLike[str], text: str, shown: str, **facts: object) -> None:
    """Raise `NotApproved`, which displays the command as `shown`, unless the user has approved this text."""
    if not all(are_approved(root, [text])):
        raise _refusal(root, f"{shown} is not approved", **facts)


def _refusal(root: str | os.PathLike[str], message: str, **facts: object) -> NotApproved:
    command = f"holdfast trust --repo {shlex.quote(calls.realpath(root))}"
    hint = f"If you trust this repository, approve its store and commands: '{command}'. To see them, add --show."
    return NotApproved(message, hint=hint, path=calls.realpath(root), **facts)


def _change(root: str | os.PathLike[str], change: Callable[[Approved], Approved]) -> None:
    path = _path(calls.realpath(root))
    make_directories(path.parent, mode=0o700)
    with FileLocker().lock_exclusive(path.with_suffix(".lock")):
        before = approved(root)
        after = change(before)
        if after != before:
            durable.replace(path, _CODEC.encode(after) + b"\n", mode=0o600)


def _path(root: str) -> Path:
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return user_directory() / DIRECTORY / f"{name}.json"


def _digest(command: str) -> str:
    return hashlib.sha256(command.encode("utf-8", "surrogatepass")).hexdigest()


def _repository_id(root: str) -> str:
    """The id in the repository's files: approvals do not apply to another repository at the same path."""
    try:
        content = durable.read(Path(root) / _FORMAT, limit=_MOST_BYTES)
        return msgspec.json.decode(content, type=_Identified).repository_id
    except (Failure, msgspec.DecodeError, RecursionError):
        return ""  # a tracker or ledger without a repository, or records on a server


# --- The user's data directory ----------------------------------------------------------------------


def user_directory() -> Path:
    """The data directory of this user, according to the environment."""
    return resolved(data_directory(None, os.environ))


def data_directory(flag: str | None, environment: Mapping[str, str]) -> Path:
    """The directory of this user's approvals and repository locks."""
    chosen = flag or next(filter(None, map(environment.get, DATA_VARIABLES)), None)
    return Path(chosen) if chosen else _platform_data(environment) / "holdfast"


def _platform_data(environment: Mapping[str, str]) -> Path:
    xdg = environment.get("XDG_DATA_HOME", "")
    if os.path.isabs(xdg):  # the standard: ignore a relative path
        return Path(xdg)
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        hint = "Name a directory: --data-dir, or HOLDFAST_DATA_DIR."
        raise UsageFailure("cannot find the data directory: this user has no home directory", hint=hint)
    if sys.platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    return home / ".local" / "share"
