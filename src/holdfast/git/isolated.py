"""Isolated worktrees: clones that share the objects of the repository, for agents that may write in one directory only.

To git, an isolated worktree is a linked worktree of the repository, with a registration, a branch and an index there;
but its `.git` is a directory, with a repository of its own that the agent commits to. Nothing in that directory is
trusted: git never runs with it, nor reads it. HEAD, branches and objects are read here, as bounded regular files, and
git fetches from a copy of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt, GitFailed, NameInvalid, NotFound, PathEscape, Refused, TooLarge
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, failing_to, make_directories, rename, status_at
from holdfast.git.checkout import CLONE_OF, is_worktree_of, leads_back
from holdfast.git.contents import sizes
from holdfast.git.look import copy_with_time
from holdfast.git.program import Git
from holdfast.git.snapshots import SHA256_LENGTH, make_git_dir
from holdfast.git.transfer import fetch_from
from holdfast.git.worktrees import current_branch, was_elsewhere
from holdfast.trees.walker import remove_tree, synced

DRAFT = ".holdfast-git"  # in the worktree: the directory with its repository, before that takes the place of `.git`
_OID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOOSE, _LOOSE_REST = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{38}|[0-9a-f]{62}")
_PACK = re.compile(r"pack-[0-9a-f]{40,64}\.pack")
_CARRIED = r"^(user|filter)\.|^core\.(autocrlf|eol)$"  # settings of the repository that commits there need
_MOST_OF_A_REF = 1 << 12
_MOST_OF_ALL_REFS = 64 << 20
_MOST_OF_AN_INDEX = 1 << 30
_MOST_LINKS = 5


# --- Creating -----------------------------------------------------------------------------------------


def isolate(git: Git, top: Path) -> None:
    """Turn a new linked worktree into an isolated one. A kill leaves either, or a state that `is_begun` recognizes."""
    found = is_worktree_of(os.fspath(top), os.fspath(git.common))
    if found is None:
        raise Refused(f"{top} is not a worktree of {git.common}", path=str(top))
    draft, branch = top / DRAFT, current_branch(git, top)
    remove_tree(draft)
    with synced(top):
        options = ("--quiet", "--shared", "--no-checkout", "--no-tags", f"--branch={branch}", *_carried(git))
        git.run("clone", *options, "--", os.fspath(git.common), os.fspath(draft))
        copy_with_time(Path(found.git_dir) / "index", draft / ".git" / "index")
        durable.create(draft / ".git" / CLONE_OF, os.fsencode(found.git_dir) + b"\n")
    durable.remove(top / ".git")
    with failing_to("create", top / ".git"):
        rename(draft / ".git", top / ".git")
    remove_tree(draft)
    with Directory.open(top) as directory:
        durable.sync_names(directory)


def _carried(git: Git) -> Iterator[str]:
    """Options of `git clone` that carry over settings of the repository."""
    try:
        listed = git.run("config", "--local", "-z", "--get-regexp", _CARRIED)
    except GitFailed:
        return  # it has none
    for each in os.fsdecode(listed).split("\0"):
        key, given, value = each.partition("\n")
        if key:
            yield f"--config={key}={value if given else 'true'}"


def is_begun(top: Path, common: Path) -> bool:
    """Whether `top` is a worktree of this repository in which `isolate` was killed while it replaced `.git`."""
    registered = leads_back(os.fspath(top / DRAFT / ".git"), os.fspath(top / ".git"))
    return registered is not None and Path(registered).parent == common / "worktrees"


def is_isolated(top: Path) -> bool:
    """Whether a worktree, which the caller knows to belong to the repository, has a repository of its own.

    The main checkout has none: in its `.git`, the file's name is that of our root directory.
    """
    if not calls.is_directory(top / ".git"):
        return False
    found = status_at(top / ".git" / CLONE_OF)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_new(top: Path, git_dir: Path, commit: str) -> bool:
    """Whether only this commit has been checked out in an isolated worktree, and nothing has been staged."""
    tips, clone = read_tips(top), top / ".git"
    if {tips.head, *tips.others} != {commit} or was_elsewhere(clone, commit):
        return False
    index, own = (durable.read(each / "index", limit=_MOST_OF_AN_INDEX) for each in (git_dir, clone))
    return index == own


def detach(top: Path) -> None:
    """Turn an isolated worktree into an ordinary clone."""
    durable.remove(top / ".git" / CLONE_OF)


# --- Reading the agent's repository -------------------------------------------------------------------


class Tips(NamedTuple):
    """The commit that HEAD leads to, None before the first one; and those of all branches and of the stash."""

    head: str | None
    others: tuple[str, ...] = ()


def read_head(top: Path) -> str | None:
    """The commit that is checked out in an isolated worktree; None before the first one. `Refused` if the files that
    name it are not regular, or too large."""
    with _reading(top), Directory.open(top / ".git") as clone:
        return _resolved(clone, "HEAD")


def read_tips(top: Path) -> Tips:
    with _reading(top), Directory.open(top / ".git") as clone:
        found = {oid: None for name, oid in _packed(clone) if name.startswith("refs/heads/")}
        found |= dict.fromkeys(_loose(clone, "refs/heads"))
        found |= dict.fromkeys(filter(None, [_resolved(clone, "refs/stash")]))
        return Tips(_resolved(clone, "HEAD"), tuple(found))


@contextlib.contextmanager
def _reading(top: Path) -> Iterator[None]:
    """Turn the failures that an agent's files can cause into one refusal."""
    try:
        yield
    except (Corrupt, GitFailed, NameInvalid, NotFound, PathEscape, Refused, TooLarge) as failure:
        raise unreadable(top, failure.message) from failure


def unreadable(top: Path, why: str) -> Refused:
    hint = f"Repair its repository: 'git -C {top} fsck' and 'git -C {top} status' say more. The files are untouched."
    return Refused(f"the commits of the isolated worktree {top} cannot be read: {why}", hint=hint, path=str(top))


def _resolved(clone: Directory, name: str) -> str | None:
    """The commit that a reference leads to; None if it does not exist."""
    for _ in range(_MOST_LINKS):
        text = _read(clone, name)
        if text is None:
            return dict(_packed(clone)).get(name)
        if _OID.fullmatch(text):
            return text
        kind, _, target = text.partition(" ")
        if kind != "ref:" or not target.startswith("refs/"):
            raise Refused(f"{name} is not a reference: {text[:80]!a}")
        name = target.strip()
    raise Refused(f"{name} leads through too many references")


def _read(clone: Directory, name: str) -> str | None:
    above, _, last = name.rpartition("/")
    try:
        if not above:
            return _text(durable.read_in(clone, last, limit=_MOST_OF_A_REF))
        with clone.beneath(above) as directory:
            return (
                None if directory.is_directory(last) else _text(durable.read_in(directory, last, limit=_MOST_OF_A_REF))
            )
    except NotFound:
        return None


def _text(content: bytes) -> str:
    return content.decode(errors="replace").strip()


def _packed(clone: Directory) -> Iterator[tuple[str, str]]:
    try:
        content = durable.read_in(clone, "packed-refs", limit=_MOST_OF_ALL_REFS)
    except NotFound:
        return
    for line in content.decode(errors="replace").splitlines():
        oid, _, name = line.partition(" ")
        if _OID.fullmatch(oid):
            yield name, oid


def _loose(clone: Directory, at: str) -> Iterator[str]:
    """The commits of all references below a directory; like git, it skips lock files, dangling references, and names
    that are too long."""
    waiting = [at]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(NotFound), clone.beneath(here) as directory:
            for name in sorted(directory.names()):
                path = f"{here}/{name}"
                if directory.is_directory(name):
                    waiting += [path] if len(path) < _MOST_OF_A_REF else []
                elif not name.endswith(".lock") and (oid := _resolved(clone, path)) is not None:
                    yield oid


# --- Fetching -----------------------------------------------------------------------------------------


def fetch_commits(git: Git, top: Path, room: Path, wanted: dict[str, str]) -> None:
    """Fetch commits of an isolated worktree, with all that they need, to references of the repository, which they
    replace. `room` is a private directory below the root, which is created again, and removed at the end.

    git checks every object on arrival. Durable when this returns. `Refused` if an object is missing or damaged.
    """
    remove_tree(room)
    make_directories(room.parent)
    try:
        with _reading(top):
            _copy(git, top, room, wanted.values())
            fetch_from(git, room, {name: _tip(oid) for name, oid in wanted.items()})
    finally:
        remove_tree(room)


def _tip(oid: str) -> str:
    return f"refs/heads/{oid}-tip"


def _copy(git: Git, top: Path, room: Path, oids: Iterable[str]) -> None:
    """Make a repository with a reference to each commit, and with the objects that only the isolated worktree has."""
    known = sorted(set(oids))
    make_git_dir(room, is_sha256=len(known[0]) == SHA256_LENGTH)
    for name in ("objects/info", "objects/pack"):
        make_directories(room / name)
    above = os.path.relpath(git.objects, room / "objects")  # relative: so no path in it needs quoting
    durable.create(room / "objects/info/alternates", os.fsencode(above) + b"\n", durable=False)
    lines = "".join(f"{oid} {_tip(oid)}\n" for oid in known)
    durable.create(room / "packed-refs", f"# pack-refs with: sorted \n{lines}".encode(), durable=False)
    with Directory.open(top / ".git") as clone, clone.enter("objects") as objects:
        _copy_loose(git, objects, room / "objects")
        _copy_packs(git, objects, room / "objects/pack")


def _copy_loose(git: Git, objects: Directory, target: Path) -> None:
    found: list[str] = []
    for first in filter(_LOOSE.fullmatch, objects.directories()):
        with objects.enter(first) as directory:
            found += [first + name for name in directory.names() if _LOOSE_REST.fullmatch(name)]
    for oid in sorted(set(found) - sizes(git, found).keys()):
        make_directories(target / oid[:2])
        copy_with_time(objects.path / oid[:2] / oid[2:], target / oid[:2] / oid[2:])


def _copy_packs(git: Git, objects: Directory, target: Path) -> None:
    """Copy the packs without their indexes, which git creates again: so the name of each object matches its content."""
    try:
        with objects.enter("pack") as directory:
            names = sorted(filter(_PACK.fullmatch, directory.names()))
    except NotFound:
        return
    for name in names:
        copy_with_time(objects.path / "pack" / name, target / name)
        git.run("index-pack", os.fspath(target / name), settings=("core.fsync=none",))
