"""Comparison of a work tree with a private index: changed, removed, untracked and ignored files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import Failure, GitFailed, NotFound, NotWritable, PathEscape
from holdfast.fs import calls
from holdfast.fs.directory import Directory, close_quietly, failing_to, opened, write_all
from holdfast.fs.mounts import filesystem_kind
from holdfast.git.checkout import find_checkout
from holdfast.git.program import Git
from holdfast.git.worktrees import git_ids
from holdfast.trees.walker import GONE, NOFOLLOW

_CACHE_WORKS = frozenset("apfs bcachefs btrfs ext2 ext3 ext4 f2fs tmpfs xfs zfs".split())
_CHUNK = 1 << 20
_LINK = "160000"
_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)


class Indexed(NamedTuple):
    """The mode and object of a path in the index, and the mode of the file there now: zeros if none, "" if unknown."""

    mode: str
    oid: str
    mode_now: str


class Look(NamedTuple):
    """Paths that differ from the index: changed or new, removed, and nested repositories that are not in it."""

    changed: dict[bytes, Indexed]
    removed: dict[bytes, Indexed]
    nested: list[bytes]

    @property
    def is_clean(self) -> bool:
        return not (self.changed or self.removed or self.nested)


class WorkTree(msgspec.Struct, frozen=True):
    """A work tree, the index that it is compared with, and where new objects go. `links` are links to nested
    repositories in the index."""

    git: Git
    top: Path
    index: Path
    objects: Path | None = None
    links: tuple[bytes, ...] = ()

    def run(
        self, *arguments: str, content: bytes | None = None, alone: bool = False, settings: tuple[str, ...] = ()
    ) -> bytes:
        """Run git here. Nothing that it writes in scratch is synced."""
        return self.git.run(
            *arguments,
            worktree=self.top,
            index=self.index,
            objects=self.objects,
            content=content,
            alone=alone,
            settings=(*_untracked(self.top), "core.looseCompression=0", "core.fsync=none", *settings),
        )

    def look(self, *, keep: bool = False) -> Look:
        """Compare the files with the index. With `keep`, git writes what it learned to the index."""
        found = looked(self.run(*(() if keep else ("--no-optional-locks",)), *STATUS))
        for path in filter(self._is_loop, [each for each, seen in found.changed.items() if seen is _NOTHING]):
            found.removed.update(self._entries(f"{os.fsdecode(path)}/"))
        for path in filter(self._is_abandoned, self.links):
            self._take_apart(path, found)
        return found

    def with_links(self) -> WorkTree:
        """The same, with the links that are in the index now: only then does `look` find what has lost its `.git`."""
        listed = self.run("ls-files", "--stage", "-z").split(b"\0")
        found = tuple(each.partition(b"\t")[2] for each in listed if each.startswith(_LINK.encode()))
        return msgspec.structs.replace(self, links=found)

    def _is_abandoned(self, path: bytes) -> bool:
        """Whether there are files where a nested repository was."""
        where = os.path.join(self.top, os.fsdecode(path))
        found = find_checkout(where)
        if found is not None and found.top == calls.realpath(where):
            return False
        with contextlib.suppress(NotFound, PathEscape, NotWritable), Directory.open(where) as directory:
            return bool(directory.names())
        return False

    def _take_apart(self, path: bytes, found: Look) -> None:
        """Find the files of a former nested repository: while its link is in the index, git takes a directory without
        `.git` for a submodule that is not checked out, and ignores what is in it. That is right if it is empty."""
        name = os.fsdecode(path)
        link = dict(self._entries(name)).get(path)
        if link is None or link.mode != _LINK:
            return  # taken apart since
        words = "ls-files", "--others", "--exclude-standard", "-z", "--", f":(literal){name}/"
        without = msgspec.structs.replace(self, index=self.index.with_name(f"{self.index.name}.none"))
        if others := [each for each in without.run(*words).split(b"\0") if each]:
            found.removed[path] = link
            found.nested.extend(each for each in others if each.endswith(b"/"))
            found.changed.update((each, _NOTHING) for each in others if not each.endswith(b"/"))

    def _is_loop(self, path: bytes) -> bool:
        """Whether a link leads to itself: then git does not notice that the entries below its path are gone."""
        try:
            calls.stat(os.path.join(self.top, os.fsdecode(path)))
        except OSError as error:
            return error.errno == errno.ELOOP
        return False

    def _entries(self, pathspec: str) -> Iterator[tuple[bytes, Indexed]]:
        for each in self.run("ls-files", "--stage", "-z", "--", f":(literal){pathspec}").split(b"\0"):
            if each:
                facts, _, name = each.partition(b"\t")
                mode, oid, _ = facts.decode().split(" ")
                yield name, Indexed(mode, oid, _NOTHING.mode)

    def ignored(self) -> list[bytes]:
        """The paths that git ignores; a directory stands for everything in it."""
        options = ("--others", "--ignored", "--exclude-standard", "--directory", "-z")
        return [path for path in self.run("ls-files", *options).split(b"\0") if path]

    def update(self, look: Look) -> list[bytes]:
        """Bring the index up to date with a look; return the nested repositories that it cannot link to."""
        left_out = [path for path in look.nested if not self.has_commit(path)]
        links = [path.rstrip(b"/") for path in look.nested if path not in left_out]
        self._forget([*look.removed])  # first: a link may have taken the place of a directory above
        self._read([*look.changed, *links])
        return left_out

    def write_again(self, paths: list[bytes]) -> None:
        """Read these files again, and write their objects even if the repository seems to have them."""
        self._forget(paths)
        self._read(paths, alone=True)

    def _forget(self, paths: list[bytes]) -> None:
        if paths:
            self.run("update-index", "-z", "--force-remove", "--stdin", content=b"\0".join(paths))

    def _read(self, paths: list[bytes], *, alone: bool = False) -> None:
        """Add files to the index. git treats every file as a large one here, so that the contents go to one pack
        instead of many small files, except those that a filter changes."""
        if paths:
            options = ("-z", "--add", "--remove", "--replace", "--stdin")
            settings = ("core.bigFileThreshold=1",)
            self.run("update-index", *options, content=b"\0".join(paths), alone=alone, settings=settings)

    def refresh(self) -> None:
        """Let git record in the index which files equal their entries."""
        try:
            self.run("update-index", "-q", "--refresh")
        except GitFailed as failure:
            if failure.facts["status"] != 1:  # 1: some differ
                raise

    def write_tree(self) -> str:
        return self.run("write-tree", "--missing-ok").decode().strip()

    def has_commit(self, path: bytes) -> bool:
        """Whether a commit is checked out in a nested repository. False for a linked worktree of this repository: it
        has snapshots of its own, and changes with every commit there."""
        found = find_checkout(os.path.join(self.top, os.fsdecode(path)))
        if found is None or found.common == os.fspath(self.git.common):
            return False
        try:
            Git(Path(found.common)).run("rev-parse", "--verify", "HEAD", git_dir=Path(found.git_dir))
        except Failure:
            return False
        return True


def _untracked(top: Path) -> tuple[str, str]:
    """Settings for untracked files. git may cache them per directory where a directory's time reveals its changes."""
    works = "true" if filesystem_kind(top) in _CACHE_WORKS else "false"
    return f"core.untrackedCache={works}", "status.showUntrackedFiles=all"


_NOTHING = Indexed("000000", "0", "")
STATUS = ("status", "--porcelain=v2", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=dirty")
"""The command whose output `looked` parses. It starts no other git, with other settings, in nested repositories."""


def looked(raw: bytes) -> Look:
    """The look that the output of `STATUS` describes."""
    look = Look({}, {}, [])
    for record in raw.split(b"\0"):
        _sort(record, look)
    return look


def _sort(record: bytes, look: Look) -> None:
    match record[:1]:
        case b"1":  # 1 XY sub mH mI mW hH hI path
            _, state, _, _, mode, now, _, oid, path = record.split(b" ", 8)
            if state[1:] != b".":
                place = look.removed if state[1:] == b"D" else look.changed
                place[path] = Indexed(mode.decode(), oid.decode(), now.decode())
        case b"u":  # u XY sub m1 m2 m3 mW h1 h2 h3 path
            *_, now, _, _, _, path = record.split(b" ", 10)
            (look.changed if now.strip(b"0") else look.removed)[path] = _NOTHING
        case b"?" if record.endswith(b"/"):
            look.nested.append(record[2:])
        case b"?":
            look.changed[record[2:]] = _NOTHING


# --- What is no content of a work tree ----------------------------------------------------------------


class Below(NamedTuple):
    """The contents below a directory that no snapshot of it has: worktrees of the same repository, and repositories of
    their own that git does not ignore."""

    worktrees: list[Path]
    repositories: list[Path]


def below(git: Git, top: Path) -> Below:
    """The contents that would be lost if the worktree at `top` were deleted, or left behind if it were moved."""
    registered = (Path(path) for _, path in git_ids(git))
    worktrees = sorted(each for each in registered if top in each.parents and calls.exists(each))
    others = sorted(Path(path) for path in _with_git(top) if Path(path) not in worktrees)
    ignored = set(ignored_among(git, top, [os.fsencode(each.relative_to(top)) for each in others]))
    return Below(worktrees, [each for each in others if os.fsencode(each.relative_to(top)) not in ignored])


def _with_git(top: Path) -> Iterator[str]:
    """The outermost directories below `top` that have a `.git`, whatever that is: no snapshot contains it. Directories
    that cannot be read are left out, as in a snapshot."""
    waiting = [os.fspath(top)]
    while waiting:
        place = waiting.pop()
        with contextlib.suppress(NotFound, PathEscape, NotWritable), Directory.open(place) as directory:
            if place != os.fspath(top) and directory.status(".git") is not None:
                yield place
            else:
                waiting += [directory.where(name) for name in directory.directories() if name != ".git"]


def ignored_among(git: Git, top: Path, paths: list[bytes]) -> list[bytes]:
    """Those of the paths that git ignores."""
    if not paths:
        return []
    try:
        found = git.run("check-ignore", "--no-index", "-z", "--stdin", worktree=top, content=b"\0".join(paths))
    except GitFailed as failure:
        if failure.facts["status"] != 1:  # 1: none
            raise
        return []
    return found.rstrip(b"\0").split(b"\0")


# --- The private index --------------------------------------------------------------------------------


def start_index(tree: WorkTree, known: Path | None, user_index: Path) -> WorkTree:
    """Make the index of `tree` a copy of the private index `known`, or else of the user's, with its flags cleared; then
    the links of the result are those in the index.

    The copy keeps the time, by which git recognizes entries that may have changed since in the same instant.
    """
    if known is not None and _link(known, tree.index):  # git replaces an index, and never writes into one
        return tree
    if known is not None and copy_with_time(known, tree.index):
        return tree
    if copy_with_time(user_index, tree.index):
        return _look_at_everything(tree)
    tree.run("read-tree", "--empty")
    return tree


def _look_at_everything(tree: WorkTree) -> WorkTree:
    """Clear the flags that keep git from comparing files: they are meant for the user's index only. Returns the work
    tree with the links in its index."""
    assumed: list[bytes] = []
    skipped: list[bytes] = []
    links: list[bytes] = []
    for each in tree.run("ls-files", "-v", "--stage", "-z").split(b"\0"):
        facts, _, path = each.partition(b"\t")
        tag = facts[:1]
        if tag.islower():
            assumed.append(path)
        if tag in b"Ss" and path and calls.exists(os.path.join(tree.top, os.fsdecode(path))):
            skipped.append(path)  # outside a sparse checkout, people use this to hide changes
        if facts[2:].startswith(_LINK.encode()):
            links.append(path)
    for option, paths in (("--no-assume-unchanged", assumed), ("--no-skip-worktree", skipped)):
        if paths:
            tree.run("update-index", "-z", option, "--stdin", content=b"\0".join(paths))
    return msgspec.structs.replace(tree, links=tuple(links))


def _link(known: Path, target: Path) -> bool:
    with Directory.open(known.parent) as here, Directory.open(target.parent) as there:
        try:
            calls.link(
                here.at(known.name),
                there.at(target.name),
                src_dir_fd=here.fd,
                dst_dir_fd=there.fd,
                follow_symlinks=False,
            )
        except OSError:
            return False  # missing, on another filesystem, or one without hard links
    return True


def copy_with_time(source: Path, target: Path) -> bool:
    """Copy a regular file with its time; False if it does not exist, or is not a regular file."""
    with failing_to("copy", source), Directory.open(source.parent) as here, Directory.open(target.parent) as there:
        try:
            descriptor = calls.open(here.at(source.name), os.O_RDONLY | NOFOLLOW | _NONBLOCK, dir_fd=here.fd)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False
        try:
            if not stat.S_ISREG(calls.fstat(descriptor).st_mode):
                return False
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with opened(there.at(target.name), flags, 0o600, dir_fd=there.fd) as fd:
                while chunk := calls.read(descriptor, _CHUNK):
                    write_all(fd, chunk)
                status = calls.fstat(descriptor)
                calls.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            close_quietly(descriptor)
    return True


def entry_count(index: Path) -> int:
    """The number of entries in an index; 0 if it does not exist."""
    with failing_to("read", index):
        try:
            header = calls.read_small(os.fspath(index), 12)
        except FileNotFoundError:
            return 0
    return int.from_bytes(header[8:12], "big")
