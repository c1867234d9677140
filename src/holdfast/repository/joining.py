"""Joining a repository whose records are on a server, with a clone of the git repository; and leaving it.

The checkout of the clone becomes a worktree with its own name, which is also the name of the clone. Every record of a
worktree or snapshot names the clone that has its directory or content. The steps of a join:

1. Check that the store has a git repository and that this is a clone of it: HEAD descends from its first commit.
2. Write the name and the identity of the clone to its own files, which mean nothing without step 4.
3. **Commit point**: one transaction for the checkout's record, a format that older programs refuse, and an audit entry.
4. Write the address of the store, which also approves it.

After a kill, the same command continues. `docs/decisions/0019-clones-share-a-store.md` has the reasons.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, LockConflict, NotFound, Refused
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.fs.durable import new_mark
from holdfast.fs.probe import require_safe
from holdfast.git import worktrees as linked
from holdfast.git.checkout import CLONE, Checkout, clone_in, main_checkout
from holdfast.git.program import Git
from holdfast.leases.service import LeaseService
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import (
    FORMAT,
    JOINED_VERSION,
    MAIN,
    OPERATIONS,
    WORKTREES,
    Isolation,
    RepositoryContext,
    RepositoryFormat,
    RepositoryPaths,
    WorktreeConfig,
    operation_pending,
    worktree_keys,
)
from holdfast.repository.git_home import GitHome
from holdfast.repository.git_init import checked_checkout, finish_deinit
from holdfast.repository.git_paths import GitPaths
from holdfast.repository.home import Home, PlainHome
from holdfast.repository.init import CONTROL, is_repository, refuse_nested
from holdfast.repository.payloads import worktree_exists, worktree_name
from holdfast.repository.repository import checked_format
from holdfast.store.addresses import FILES, remember, without_secrets
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Change, Create, Decision, Replace, Store, View
from holdfast.store.open import CONFIG, address_of, configure_store, open_address, read_config, same_store, write_config


def may_be_plain(root: Path) -> bool:
    """Whether a directory is missing or empty, or has joined a plain home, or begun to."""
    try:
        with Directory.open(root) as directory:
            return {CONTROL, ".holdfast"}.issuperset(directory.names()) or read_config(root).clone != MAIN
    except NotFound:
        return True


class Joined(NamedTuple):
    """The result of `join`: the repository, the name and checkout of this clone, and whether it joined just now."""

    root: Path
    format: RepositoryFormat
    name: str
    checkout: Path
    is_new: bool


def join(
    address: str, start: str | os.PathLike[str] = ".", *, git_dir: str | None = None, name: str | None = None
) -> Joined:
    """Join the repository at an address with the clone that contains `start` or that `git_dir` (`GIT_DIR`) names; or,
    if its content is in a content store, with the empty or missing directory `start`.

    Without `name`, the clone is named after the machine. Naming the store approves it. Raises `NotFound` if the store
    has no repository, and `Refused` if that repository is not in git or this is not a clone of it. A clone that has
    already joined is left alone; in the clone `main`, this only records the first commit, if it is not yet known.
    """
    if git_dir is None and may_be_plain(resolved(start)):
        return _join_plain(resolved(start), address, name)
    checkout = checked_checkout(os.fspath(start), git_dir)
    root, git = Path(checkout.common) / "holdfast", Git(Path(checkout.common))
    git.run("rev-parse", "--git-common-dir")  # refuses an old git, and the repository of another user
    remember(address)
    _refuse_other_store(root, address)
    wanted = None if name is None else worktree_name(name, new=True)
    with contextlib.closing(_opened(root, address)) as store:
        found = checked_format(store, root)
        if not found.home:
            shown, hint = without_secrets(address), "Join it with an empty directory: 'holdfast join ADDRESS DIR'."
            raise Refused(f"the repository in {shown} is not in a git checkout", hint=hint, store=shown)
        if is_repository(root) and not clone_in(checkout.common)[1]:
            return _recorded(store, root, git, Path(checkout.top or ""))
        _require_clone(git, checkout, found)  # 1
        finish_deinit(git)
        make_directories(root)
        require_safe(root, records_elsewhere=True)
        make_directories(root / CONTROL / "guards")
        with FileLocker(follow_links=False).lock_exclusive(root / CONTROL / "guards" / "init.lock"):
            return _joined(_GitClone(root, git, checkout), store, wanted, address)


def _refuse_other_store(root: Path, address: str) -> None:
    config = read_config(root)
    known = config.store
    if known == FILES and config.clone != MAIN:
        return  # an unfinished join
    if is_repository(root) and not (known != FILES and same_store(root, address, known)):
        message = f"{root} is already a repository, with its records in {address_of(root)}"
        raise AlreadyExists(message, hint="Move them: 'holdfast migrate --to ADDRESS'. Or join from another clone.")


def _opened(root: Path, address: str) -> Store:
    """The open store; refused unless it has a repository."""
    shown = without_secrets(address)
    missing = NotFound(
        f"the store {shown} has no repository",
        hint="Create it in the first clone: 'holdfast init --store ADDRESS', or 'holdfast migrate --to ADDRESS'.",
        store=shown,
    )
    if not address.startswith(("postgres", "etcd")):
        hint = "Name a server: postgresql://… or etcd://…. Other machines cannot reach local files."
        raise Refused(f"{shown} is not a server", hint=hint, store=shown)
    try:
        store = open_address(root, address, create=False)
        found = store.read(FORMAT)
    except NotFound:
        raise missing from None
    if found is None:
        store.close()
        raise missing
    return store


def _join_plain(root: Path, address: str, wanted: str | None) -> Joined:
    """Join a plain home with an empty directory."""
    remember(address)
    _refuse_other_store(root, address)
    with contextlib.closing(_opened(root, address)) as store:
        found = checked_format(store, root)
        if found.home:
            checked_checkout(os.fspath(root), None)  # raises: it is not a clone
        if not found.content:
            message = f"the content of the repository in {without_secrets(address)} is on one filesystem"
            hint = "Mount that here. Or name a content store for it: 'holdfast init DIR --content ADDRESS' there."
            raise Refused(message, hint=hint)
        refuse_nested(root, nested=False)
        make_directories(root, mode=0o777)
        require_safe(root, records_elsewhere=True)
        make_directories(root / CONTROL / "guards")
        with FileLocker(follow_links=False).lock_exclusive(root / CONTROL / "guards" / "init.lock"):
            return _joined(_PlainClone(root), store, wanted, address)


def _require_clone(git: Git, checkout: Checkout, found: RepositoryFormat) -> None:
    """1. Refuse a clone whose history does not contain the first commit of the repository."""
    if not found.history:
        hint = "Run the same command in the clone 'main' first: it records the first commit."
        raise Refused("the store does not have the first commit of the repository", hint=hint)
    head = linked.head_commit(git, Path(checkout.top or ""))
    is_here = head is not None and git.succeeds("cat-file", "-e", found.history)
    if not is_here or not git.succeeds("merge-base", "--is-ancestor", found.history, f"{head}"):
        message = (
            f"{checkout.top} is not a clone of this repository: its history does not begin with {found.history[:12]}"
        )
        hint = "Clone the right repository. If this is a shallow clone of it: 'git fetch --unshallow'."
        raise Refused(message, hint=hint, path=checkout.top, history=found.history)


def _recorded(store: Store, root: Path, git: Git, top: Path) -> Joined:
    """Record the first commit in the format, if it is missing, and return the clone `main`."""
    head = linked.head_commit(git, top)

    def decide(view: View, now: float) -> Decision[RepositoryFormat]:
        found = view.get(FORMAT)
        assert found is not None
        if found.history or head is None:
            return Decision([], found)
        known = msgspec.structs.replace(found, history=linked.first_commit(git, head))
        return Decision([Replace(FORMAT, known)], known)

    return Joined(root, store.transact([FORMAT], decide).result, MAIN, top, False)


class _GitClone:
    """The files of a joining clone of the git repository."""

    def __init__(self, root: Path, git: Git, checkout: Checkout) -> None:
        self.root, self._git, self._checkout = root, git, checkout

    def read(self) -> tuple[str, str]:
        """The name and the identity of the clone; `main` if it has none."""
        return clone_in(self._checkout.common)

    def note(self, name: str, identity: str) -> None:
        durable.replace(self.root / CLONE[1], f"{name}\n{identity}\n".encode())
        if main_checkout(self._checkout.common) is None:  # a bare repository: its checkout is a linked worktree
            linked.set_name(self._git, Path(self._checkout.top or ""), name)

    def forget(self) -> None:
        durable.remove(self.root / CLONE[1])

    def home(self) -> Home:
        return GitHome(GitPaths(self.root))


class _PlainClone:
    """The files of a directory that joins a plain home."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self) -> tuple[str, str]:
        found = read_config(self.root)
        return found.clone, found.clone_id

    def note(self, name: str, identity: str) -> None:
        write_config(self.root, msgspec.structs.replace(read_config(self.root), clone=name, clone_id=identity))

    def forget(self) -> None:
        durable.remove(self.root / CONFIG)

    def home(self) -> Home:
        paths = RepositoryPaths(self.root)
        paths.main = self.read()[0]
        return PlainHome(paths)


def _joined(clone: _GitClone | _PlainClone, store: Store, wanted: str | None, address: str) -> Joined:
    known, identity = clone.read()
    identity = identity or new_mark()
    member = store.read(WORKTREES.key(known))
    has_joined = member is not None and member.record.place and member.record.place.clone_id == identity
    if has_joined and wanted not in (None, known):
        hint = "To change its name, leave ('holdfast deinit') and join again."
        raise AlreadyExists(f"this clone has already joined, as {known}", hint=hint, name=known)
    trail = AuditTrail()
    leases = LeaseService(store, trail)
    for name in _names(known, wanted, leases.holder.host):
        clone.note(name, identity)  # 2
        context = RepositoryContext(clone.home(), store, trail, leases)
        try:
            found, is_new = _commit(context, name, identity)  # 3
        except (AlreadyExists, LockConflict):
            if wanted is not None:
                clone.forget()
                raise
            continue
        checkout = context.paths.payload(name)
        make_directories(checkout, mode=0o777)  # that of a plain home
        configure_store(clone.root, address, check=False)  # 4
        context.paths.reserve.fill()
        return Joined(clone.root, found, name, checkout, is_new)
    raise AssertionError("there is always another name")


def _names(known: str, wanted: str | None, host: str) -> Iterator[str]:
    """The names to try: `wanted` only; else that of an interrupted join, then that of the machine, then numbered."""
    if wanted is not None:
        yield wanted
        return
    if known != MAIN:
        yield known
    base = re.sub(r"[^A-Za-z0-9_]+", "-", host.partition(".")[0]).strip("-") or "clone"
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        if name != MAIN:
            yield worktree_name(name, new=True)


def _commit(context: RepositoryContext, name: str, identity: str) -> tuple[RepositoryFormat, bool]:
    """Commit point of a join. Returns the format, and whether the clone has joined just now."""
    described = context.home.described(name)

    def decide(view: View, now: float) -> Decision[tuple[RepositoryFormat, bool]]:
        found, taken = view.get(FORMAT), view.get(WORKTREES.key(name))
        assert found is not None
        if taken is not None and taken.place and taken.place.clone_id == identity:
            return Decision([], (found, False))
        if taken is not None or name == MAIN:
            raise worktree_exists(name)
        if (pending := view.get(OPERATIONS.key(name))) is not None:
            raise operation_pending(pending)
        joined = msgspec.structs.replace(found, version=max(found.version, JOINED_VERSION))
        config = WorktreeConfig(
            worktree_id=name,
            isolation=Isolation.EXCLUSIVE,
            created_at=format_instant(now),
            base_snapshot_id=None,
            head_snapshot_id=None,
            **described,
        )
        facts = {"worktree_id": name, "clone_id": identity}
        changes: list[Change] = [Create(WORKTREES.key(name), config), context.audit(view, now, "clone_joined", **facts)]
        if joined != found:
            changes.insert(0, Replace(FORMAT, joined))
        return Decision(changes, (joined, True))

    return context.store.transact([FORMAT, *worktree_keys(name), context.trail.stream], decide).result
