"""Preparing a new worktree for work: files of `main`, ports, and setup commands; and teardown before a removal.

A worktree is prepared once, under its lease. Its record says so only once everything has succeeded, so the next agent
repeats a setup that failed or was killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, Failure, NotFound, Refused, SetupFailed, TeardownFailed
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, entry_exists, failing_to, make_directories, opened
from holdfast.fs.names import printable, split_relative
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import WORKTREES, Isolation, settled_config, worktree_keys
from holdfast.repository.payloads import RESERVED
from holdfast.repository.scratch_worktrees import is_scratch_name, scratch_worktrees
from holdfast.repository.settings import (
    LAST_PORT,
    SETUP,
    TEARDOWN,
    Ports,
    Settings,
    read_settings,
    require_approved,
)
from holdfast.store.approvals import user_directory
from holdfast.store.model import Decision, Replace, StructCodec, View

if TYPE_CHECKING:
    from holdfast.leases.service import HeldLease
    from holdfast.repository.repository import Repository

TIME_LIMIT = 3600.0  # seconds, for each command
LONGEST_OUTPUT = 4000  # characters of a failed command's output that are reported, from its end
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"))
_WRITE = os.O_WRONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW"))
_RIGHTS = 0o777
_ANYWHERE = "**"
_LONGEST_PATH = 4096  # no program can open what has a longer one
PORTS_FILE = "ports.json"
_MOST_BYTES = 64 << 20


class Preparation(NamedTuple):
    """The preparation of a new worktree: the number of files copied, and the commands run."""

    copied: int
    commands: tuple[str, ...]


def check_setup(repository: Repository) -> None:
    """Raise `NotApproved` if there are setup commands that the user has not approved."""
    require_approved(repository.root, read_settings(repository.root), SETUP)


def prepare(repository: Repository, worktree: str, lease: HeldLease | None) -> Preparation | None:
    """Prepare a worktree that is not yet prepared, under its lease (a shared one has none). Returns None if there is
    nothing to do. Raises `SetupFailed` if a command fails; the worktree stays."""
    settings = read_settings(repository.root)
    if not _is_unprepared(repository, worktree, settings):
        return None
    require_approved(repository.root, settings, SETUP)
    copied = copy_files(repository, settings, repository.path(worktree))
    _run_all(repository, worktree, lease, settings.setup, SetupFailed)
    _mark(repository, worktree)
    return Preparation(copied, settings.setup)


def prepare_leased(repository: Repository, worktree: str) -> Preparation | None:
    """Acquire the lease of a new worktree and prepare it."""
    if repository.config(worktree).isolation is Isolation.SHARED:
        return prepare(repository, worktree, None)
    if not _is_unprepared(repository, worktree, read_settings(repository.root)):
        return None
    with repository.lease(worktree, purpose="setup") as lease:
        return prepare(repository, worktree, lease)


def skip_setup(repository: Repository, worktree: str) -> Preparation | None:
    """Mark a new worktree as prepared without preparing it; None if there is nothing to do."""
    if not _is_unprepared(repository, worktree, read_settings(repository.root)):
        return None
    _mark(repository, worktree)
    return Preparation(0, ())


def tear_down(repository: Repository, worktree: str, lease: HeldLease | None, *, force: bool) -> None:
    """Run the teardown commands before a removal; raises `TeardownFailed` or `NotApproved`, unless `force`."""
    settings = read_settings(repository.root)
    try:
        require_approved(repository.root, settings, TEARDOWN)
        _run_all(repository, worktree, lease, settings.teardown, TeardownFailed)
    except Failure:
        if not force:
            raise


def worktree_variables(repository: Repository, worktree: str) -> dict[str, str]:
    """The environment variables that the settings give to commands in a worktree: its ports."""
    wanted = read_settings(repository.root).ports
    if wanted is None:
        return {}
    if not is_scratch_name(worktree):
        repository.config(worktree)  # raises `NotFound`, which suggests similar names
    ports = lease_ports(repository.root, worktree, wanted, lambda: _living(repository))
    return {"HOLDFAST_PORT": str(ports[0]), "HOLDFAST_PORTS": " ".join(map(str, ports))}


def free_ports(repository: Repository) -> None:
    """Free the ports of removed worktrees, if possible; otherwise, the next request for ports does."""
    with contextlib.suppress(Failure):
        release_ports(repository.root, lambda: _living(repository))


def _living(repository: Repository) -> dict[str, str]:
    found = {each.worktree_id: each.created_at for each in repository.worktrees.configs()}
    return found | {each.name: each.name for each in scratch_worktrees(repository.context.paths)}


def _is_unprepared(repository: Repository, worktree: str, settings: Settings) -> bool:
    wanted = bool(settings.setup or settings.copy) and worktree != repository.context.paths.main
    return wanted and repository.config(worktree).prepared_at is msgspec.UNSET


def _mark(repository: Repository, worktree: str) -> None:
    created_at = repository.config(worktree).created_at

    def decide(view: View, now: float) -> Decision[None]:
        config = settled_config(view, worktree)
        if config.created_at != created_at:  # another worktree has the name by now
            return Decision([], None)
        marked = msgspec.structs.replace(config, prepared_at=format_instant(now))
        return Decision([Replace(WORKTREES.key(worktree), marked)], None)

    repository.context.store.transact(worktree_keys(worktree), decide)


# --- Commands -----------------------------------------------------------------------------------------


def _run_all(
    repository: Repository,
    worktree: str,
    lease: HeldLease | None,
    commands: Sequence[str],
    failure: type[SetupFailed | TeardownFailed],
) -> None:
    if not commands:
        return
    from holdfast.issues.gates import run_checker
    from holdfast.issues.model import Checker

    path = repository.path(worktree)
    variables = {**repository.environment, **worktree_variables(repository, worktree)}
    variables |= {"HOLDFAST_REPO": str(repository.root), "HOLDFAST_WORKTREE": worktree}
    for name, value in (("LOCK_ID", lease and lease.lock_id), ("TOKEN", lease and str(lease.token))):
        variables.pop(f"HOLDFAST_{name}", None)
        variables |= {f"HOLDFAST_{name}": value} if value else {}
    for command in commands:
        result = run_checker(Checker(command, TIME_LIMIT, None, {}), path, variables)
        if lease is not None:
            lease.check()
        if not result.passed:
            how = result.message or f"exit status {result.exit_code}"
            message = f"{failure.what} of {worktree} failed: {printable(command)!r} ended with {how}"
            output = f"{result.stdout}{result.stderr}"[-LONGEST_OUTPUT:]
            raise failure(
                message,
                worktree=worktree,
                path=str(path),
                command=command,
                exit_code=result.exit_code,
                output=output,
            )


# --- Copying ------------------------------------------------------------------------------------------


def copy_files(repository: Repository, settings: Settings, target: Path) -> int:
    """Copy the files of `main` that the settings name into a directory; return how many."""
    if not settings.copy:
        return 0
    main = repository.path(repository.context.paths.main)
    with Directory.open(main) as source, Directory.open(target) as directory:
        return sum(_copy(source, directory, path) for path in _matches(repository, source, settings))


def files_to_copy(repository: Repository, settings: Settings) -> list[tuple[str, int, int]]:
    """The paths, sizes and times of what `copy_files` copies; a directory stands for everything in it."""
    found = []
    with Directory.open(repository.path(repository.context.paths.main)) as source:
        for path in sorted({*_matches(repository, source, settings)}):
            above, _, name = path.rpartition("/")
            with source.beneath(above) if above else Directory.open(source.path) as directory:
                status = directory.status(name)
            if status is not None:
                found.append((path, status.st_size, status.st_mtime_ns))
    return found


def _matches(repository: Repository, main: Directory, settings: Settings) -> Iterator[str]:
    """The paths in `main` that the patterns match, without anything below them; not those of other worktrees."""
    paths = repository.context.paths
    others = (each for each in (*paths.foreign(paths.main), paths.worktrees) if each.is_relative_to(main.path))
    left_out = {each.relative_to(main.path).as_posix() for each in others}
    return _below(main, {tuple(split_relative(each)) for each in settings.copy}, left_out)


def _below(main: Directory, patterns: set[tuple[str, ...]], others: set[str]) -> Iterator[str]:
    """The paths below a directory that a pattern matches; no link is followed, and control directories and `others` are
    left out. Enters each directory once, with what is left of each pattern there: a pattern may be a stranger's."""
    waiting = [("", patterns)]
    while waiting:
        at, wanted = waiting.pop()
        wanted = {each[start:] for each in wanted for start in _starts(each)}
        with _at(main, at) as directory:
            for name in sorted(directory.names()):
                if name.lower() in RESERVED or f"{at}{name}" in others:
                    continue
                found = {each for each in wanted if each[0] == _ANYWHERE or fnmatchcase(name, each[0])}
                if any(len(each) == 1 for each in found):
                    yield f"{at}{name}"
                elif found and len(at) < _LONGEST_PATH and directory.is_directory(name):
                    rest = {each if each[0] == _ANYWHERE else each[1:] for each in found}
                    waiting.append((f"{at}{name}/", rest))


def _starts(pattern: tuple[str, ...]) -> range:
    """The places in a pattern that apply here: `**` stands for no directory, too."""
    leading = next((number for number, each in enumerate(pattern) if each != _ANYWHERE), len(pattern) - 1)
    return range(leading + 1)


def _at(top: Directory, path: str, *, create: bool = False) -> contextlib.AbstractContextManager[Directory]:
    return top.beneath(path.rstrip("/"), create=create, mode=_RIGHTS) if path else contextlib.nullcontext(top)


def _copy(source: Directory, target: Directory, path: str) -> int:
    """Copy the file, the link itself, or the directory with its content at `path`; return the number of files. Replaces
    nothing."""
    above, slash, name = path.rpartition("/")
    copied, waiting = 0, [(above + slash, [name])]
    while waiting:  # not a recursion: a directory may be deep
        at, names = waiting.pop()
        with _at(source, at) as here, _at(target, at, create=True) as there:
            for name in names or sorted(each for each in here.names() if each.lower() not in RESERVED):
                status = here.status(name)
                if status is not None and stat.S_ISDIR(status.st_mode) and len(at) < _LONGEST_PATH:
                    there.enter(name, create=True, mode=stat.S_IMODE(status.st_mode) & _RIGHTS | stat.S_IRWXU).close()
                    waiting.append((f"{at}{name}/", []))
                elif status is not None and there.status(name) is None:
                    copied += _copy_entry(here, there, name, status.st_mode)
    return copied


def _copy_entry(source: Directory, target: Directory, name: str, mode: int) -> int:
    with failing_to("copy", source.where(name)), contextlib.suppress(AlreadyExists, FileExistsError):
        if stat.S_ISLNK(mode):
            calls.symlink(calls.readlink(source.at(name), dir_fd=source.fd), target.at(name), dir_fd=target.fd)
            return 1
        if stat.S_ISREG(mode):
            _copy_file(source, target, name)
            return 1
    return 0


def _copy_file(source: Directory, target: Directory, name: str) -> None:
    """Copy a file as a draft, then publish it: it appears complete or not at all."""
    from holdfast.trees.copy import clone_file, copy_file

    draft = durable.draft_name(name[:100], secrets.token_hex(6))
    with opened(source.at(name), _READ, dir_fd=source.fd) as reading:
        status = calls.fstat(reading)
        descriptor = target.create(draft, _WRITE, stat.S_IMODE(status.st_mode) & 0o700)
        try:
            try:
                if not clone_file(reading, descriptor, status.st_size):
                    copy_file(reading, status, descriptor)
                calls.chmod(descriptor, stat.S_IMODE(status.st_mode) & _RIGHTS)
            finally:
                calls.close(descriptor)
        except BaseException:
            durable.discard(target, draft)
            raise
    durable.publish_new(target, draft, name)


# --- Ports --------------------------------------------------------------------------------------------
# No two worktrees of this user on this machine have a port in common. Ports belong to the machine, and all repositories
# share them, so the blocks are in one file of the user's data directory, changed under a file lock. Probing is not
# enough: a port looks free until a server listens on it, and another worktree could get it before that.
# A worktree keeps its block as long as it exists, even if it is renamed: the instant of its creation identifies it.
# The block of a removed worktree, or of a repository that is no longer at its path, is free for the next request.

Living = Callable[[], dict[str, str]]
"""The worktrees of a repository by name, each with the instant of its creation. Called under the lock of the blocks, so
it includes every existing worktree that has a block."""


class Block(msgspec.Struct, frozen=True):
    root: str
    worktree: str
    created_at: str
    first: int
    count: int


class Blocks(msgspec.Struct, frozen=True):
    blocks: tuple[Block, ...] = ()


_CODEC = StructCodec(Blocks)


def lease_ports(root: Path, worktree: str, wanted: Ports, living: Living) -> range:
    """The ports of a worktree: the block that it has, else a new one."""
    here = os.fspath(root)

    def decide(blocks: list[Block], known: dict[str, str]) -> tuple[list[Block], range]:
        created_at = known[worktree]
        for each in blocks:
            moved = known.get(each.worktree) != created_at  # it was renamed
            if (each.root, each.created_at) == (here, created_at) and (each.worktree == worktree or moved):
                kept = msgspec.structs.replace(each, worktree=worktree)
                return [kept if other is each else other for other in blocks], _range(each)
        block = Block(here, worktree, created_at, _first_free(blocks, wanted), wanted.count)
        return [*blocks, block], _range(block)

    return _change(here, living, decide)


def release_ports(root: Path, living: Living) -> None:
    """Free the blocks of worktrees that no longer exist."""
    if entry_exists(user_directory() / PORTS_FILE):
        _change(os.fspath(root), living, lambda blocks, known: (blocks, range(0)))


def _change(
    root: str, living: Living, decide: Callable[[list[Block], dict[str, str]], tuple[list[Block], range]]
) -> range:
    path = user_directory() / PORTS_FILE
    make_directories(path.parent, mode=0o700)
    with FileLocker().lock_exclusive(path.with_suffix(".lock")):
        before = _read(path)
        known = living()
        after, result = decide([each for each in before if _is_used(each, root, known)], known)
        if tuple(after) != before:
            durable.replace(path, _CODEC.encode(Blocks(tuple(after))) + b"\n", mode=0o600)
    return result


def _read(path: Path) -> tuple[Block, ...]:
    try:
        return _CODEC.decode(durable.read(path, limit=_MOST_BYTES), str(path)).blocks
    except NotFound:
        return ()


def _is_used(block: Block, root: str, known: dict[str, str]) -> bool:
    return block.created_at in known.values() if block.root == root else calls.is_repository(block.root)


def _first_free(blocks: Iterable[Block], wanted: Ports) -> int:
    first = wanted.base
    for each in sorted(blocks, key=lambda each: each.first):
        if each.first + each.count > first:
            if first + wanted.count <= each.first:
                break
            first = each.first + each.count
    if first + wanted.count - 1 > LAST_PORT:
        hint = "Remove worktrees that you no longer need, or set a smaller 'worktree.ports'."
        raise Refused(f"no block of {wanted.count} consecutive ports is free from {wanted.base} on", hint=hint)
    return first


def _range(block: Block) -> range:
    return range(block.first, block.first + block.count)
