"""Snapshots of a work tree as commits of its repository.

The steps have the numbers of docs/decisions/0013. They never touch the user's index, HEAD, branches, stash, hooks and
reflogs, nor wait for git's locks. `git gc --prune=now` may run at any moment: all objects that a new commit needs, and
that neither HEAD nor the parent snapshot keeps, go into one pack with a `.keep` file, until a reference keeps them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from holdfast.errors import ConsistencyUnavailable, Failure, GitFailed, NotFound
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.directory import Directory, entry_exists, failing_to, make_directories, rename, sync_parents
from holdfast.git.checkout import is_worktree_of
from holdfast.git.contents import (
    LINK,
    NONE,
    SNAPSHOTS,
    TREE,
    Difference,
    differences,
    differences_in,
    entries,
    sizes,
)
from holdfast.git.look import Look, WorkTree, entry_count, start_index
from holdfast.git.program import Background, Git
from holdfast.git.worktrees import head_commit, unlock
from holdfast.trees.walker import shown

if TYPE_CHECKING:
    from holdfast.trees.scan import Progress

_MOST_ROUNDS = 6
_MOST_NAMED = 5
_KEEP = "holdfast "
SHA256_LENGTH = 64  # of an object's name in a repository of that kind
_OBJECT = re.compile("[0-9a-f]{40,64}")
_TRAILER = "Holdfast-Snapshot"  # makes every commit, and so the name of its pack, a new one


class GitSource(msgspec.Struct, frozen=True):
    """The source of a capture: the work tree at `top`, the private index that outlives captures, and a directory in
    scratch for the new objects and the working copy of the index."""

    git: Git
    top: Path
    index: Path
    objects: Path


class LeftOut(NamedTuple):
    """The entries that a snapshot leaves out: the numbers of ignored ones and nested repositories, and a few names."""

    ignored: int
    nested: int
    names: tuple[str, ...]


class GitCaptured(NamedTuple):
    """The result of a capture. Without a `commit`, the tree equals the parent's and nothing was stored."""

    commit: str | None
    tree: str
    files: int
    bytes: int
    left_out: LeftOut
    changed_meanwhile: bool
    pack: Path | None


class Sums(NamedTuple):
    """The tree of the private index, the sum of its file sizes, and the number of nested repositories in it."""

    tree: str
    bytes: int
    links: int


def capture(
    source: GitSource,
    *,
    snapshot_id: str,
    parent_tree: str | None,
    message: str,
    quiesced: bool,
    progress: Progress | None = None,
    may_skip: bool = False,
) -> GitCaptured:
    """Store the work tree as a commit, whose objects are durable, and safe from `git gc`, when this returns.

    The parent of the commit is the one that is checked out. `parent_tree` is the tree of the parent snapshot, which a
    reference keeps: if nothing differs from it, nothing is stored; ignored files are then not counted if the caller
    `may_skip` the snapshot. Raises `ConsistencyUnavailable` if `quiesced` and
    the files changed meanwhile. A kill leaves the scratch directory, and perhaps a pack with a `.keep` file.
    """
    working, sums = start(source)
    text = f"{message.rstrip()}\n\n{_TRAILER}: {snapshot_id}\n"
    look = working.look(keep=True)
    if look.is_clean and sums is not None and sums.tree == parent_tree:
        return _unchanged(source, working, sums, [], [] if may_skip else working.ignored())
    with Background(working.ignored) as ignored:
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            look, nested = take_changes(working, look)  # 1. new contents become objects in scratch
            if progress is not None:
                progress(len(look.changed), 0)
            try:
                with Background(working.look) as second_look:
                    packed = _pack(source, working, parent_tree, text)
                    counted = sums_of(source, packed.tree, sums, (packed.base, packed.differences))
                    if packed.tree == parent_tree:
                        return _unchanged(source, working, counted, nested, [] if may_skip else ignored.result())
                    after = second_look.result()
                break
            except GitFailed:  # an object is missing: pruned a moment ago, or known from a snapshot that was deleted
                if not rounds_left:
                    raise
                look = working.look(keep=True)
        left = ignored.result()
    changed = not _equal_after(after, nested)
    if changed and quiesced:
        raise _changed(source.top, after)
    moved = _move_pack(source, packed.path, snapshot_id)  # 2. into the repository, with a `.keep` file
    publish_index(source, working, counted)
    files = entry_count(source.index) - counted.links
    left_out = LeftOut(len(left), counted.links + len(nested), _names([*nested, *left]))
    return GitCaptured(packed.commit, packed.tree, files, counted.bytes, left_out, changed, moved)


def start(source: GitSource) -> tuple[WorkTree, Sums | None]:
    """Make the working index in scratch; return the work tree with it, and the sums of its tree if they are known."""
    working = WorkTree(source.git, source.top, source.objects / "index", source.objects)
    with Directory.open(source.objects.parent) as scratch:
        if not scratch.make(source.objects.name, durable=False):
            durable.remove(working.index)  # of an earlier attempt
    return started(source, working)


def started(source: GitSource, working: WorkTree) -> tuple[WorkTree, Sums | None]:
    """Make the index of `working`; return the work tree with its links, and the sums of its tree if they are known.

    A private index is trusted only if it is exactly the one that was published last: git would not notice damage.
    """
    sums = known_sums(source.git, source.top, source.index)
    if sums is None:
        durable.remove(source.index)
    working = start_index(working, source.index if sums else None, git_dir_of(source.git, source.top) / "index")
    return with_links(working, sums) if sums else working, sums


def with_links(tree: WorkTree, sums: Sums | None) -> WorkTree:
    """The work tree with the links in its index, whose sums are known or not."""
    return tree if sums is not None and not sums.links else tree.with_links()


def git_dir_of(git: Git, top: Path) -> Path:
    found = is_worktree_of(os.fspath(top), os.fspath(git.common))
    return Path(found.git_dir if found else git.common)


def take_changes(working: WorkTree, look: Look) -> tuple[Look, list[bytes]]:
    """Add the changes to the working index; if a file vanishes or changes its kind meanwhile, look again."""
    before = None
    while True:
        try:
            return look, working.update(look)
        except GitFailed:
            if look == before:
                raise
            before, look = look, working.look(keep=True)


def _unchanged(source: GitSource, working: WorkTree, sums: Sums, nested: list[bytes], left: list[bytes]) -> GitCaptured:
    publish_index(source, working, sums)
    files = entry_count(source.index) - sums.links
    left_out = LeftOut(len(left), sums.links + len(nested), _names([*nested, *left]))
    return GitCaptured(None, sums.tree, files, sums.bytes, left_out, False, None)


def _equal_after(after: Look, nested: list[bytes]) -> bool:
    return not after.changed and not after.removed and set(after.nested) <= set(nested)


def _changed(top: Path, look: Look) -> ConsistencyUnavailable:
    found = sorted({*look.changed, *look.removed, *look.nested})
    names = ", ".join(_names(found)) + (", ..." if len(found) > _MOST_NAMED else "")
    return ConsistencyUnavailable(f"{top} changed during the snapshot: {names}", path=str(top), changed=len(found))


def _names(paths: list[bytes]) -> tuple[str, ...]:
    return tuple(shown(os.fsdecode(path)) for path in paths[:_MOST_NAMED])


class _Packed(NamedTuple):
    """A commit, its tree, and the path, without suffix, of the pack in scratch that has both. `differences` are those
    from the tree `base`."""

    commit: str
    tree: str
    path: Path
    base: str
    differences: list[Difference]


def _pack(source: GitSource, working: WorkTree, parent_tree: str | None, message: str) -> _Packed:
    """Make a commit of the index, and pack all of its objects that no reference keeps: in scratch, and synced.

    If git fails, files whose objects no longer exist are read again, and the failure is raised.
    """
    head = head_commit(source.git, source.top)
    base, new = _staged(working, (parent_tree, head))
    if base == parent_tree and not new:
        return _Packed("", base, source.objects, base, new)
    files = [each for each in new if each.modes[1] not in (LINK, NONE)]
    try:
        commit, trees = _commit(source, base, new, head, message)
        names = dict.fromkeys(
            (commit, *_unkept(source.git, source.top, head), *trees, *(each.oids[1] for each in files))
        )
        path = source.objects / "pack-new"
        with Background(working.write_tree) as written:  # writes no tree, as all exist; the index records them
            name = source.git.run(
                *("pack-objects", "-q", "--window=0", os.fspath(path)),
                objects=source.objects,
                content="".join(f"{oid}\n" for oid in names).encode(),
                settings=("core.fsync=pack,pack-metadata", "core.fsyncMethod=fsync"),
                private=True,
            )
            written.result()
    except GitFailed:
        found = sizes(source.git, (each.oids[1] for each in files), objects=source.objects)
        working.write_again([each.path for each in files if each.oids[1] not in found])
        raise
    return _Packed(commit, trees[0], path.with_name(f"{path.name}-{name.decode().strip()}"), base, new)


def _staged(working: WorkTree, bases: tuple[str | None, ...]) -> tuple[str, list[Difference]]:
    """The first of the bases that exists, or else the empty tree; and the differences of the index from it."""
    command = ("diff-index", "--cached", "-z", "--raw", "--no-abbrev", "--no-renames")
    for base in filter(None, bases):
        with contextlib.suppress(GitFailed):
            return base, list(differences_in(working.run(*command, base, "--")))
    empty = working.run("hash-object", "-t", "tree", "-w", "--stdin").decode().strip()
    return empty, list(differences_in(working.run(*command, empty, "--")))


def _commit(
    source: GitSource, base: str, new: list[Difference], head: str | None, message: str
) -> tuple[str, list[str]]:
    """Make a commit from a tree and the differences from it; return it, and its trees that may be new, the root first.

    All go to one pack, while `git write-tree` would write a file for each tree.
    """
    text = message.encode(errors="surrogateescape")
    lines = [b"commit refs/heads/new\nmark :1\ncommitter Holdfast <holdfast@localhost> now\n"]
    lines.append(b"data %d\n%s\n" % (len(text), text))
    lines += [f"from {head}\n".encode()] if head else []
    lines += [f"M {TREE} {base} \n".encode()] if base != head else []
    lines += [b"D %s\n" % _quoted(each.path) for each in new if each.modes[1] == NONE]
    lines += [
        f"M {each.modes[1]} {each.oids[1]} ".encode() + _quoted(each.path) + b"\n"
        for each in new
        if each.modes[1] != NONE
    ]
    directories = {each.path[:end] for each in new for end, byte in enumerate(each.path) if byte == ord("/")}
    lines += [b"ls %s\n" % _quoted(path, always=True) for path in (b"", *directories)]
    found = source.git.run(
        *("fast-import", "--quiet", "--force", "--date-format=now", "--depth=0"),
        git_dir=_own_git_dir(source.objects, is_sha256=len(base) == SHA256_LENGTH),
        objects=source.objects,
        content=b"".join([*lines, b"get-mark :1\n"]),
        settings=("fastimport.unpackLimit=0", "core.ignoreCase=false", "core.fsync=none"),
    )
    *listed, commit, _ = found.split(b"\n")  # 040000 tree OID\tpath; or: missing path
    return commit.decode(), [line.split()[2].decode() for line in listed if line.startswith(TREE.encode())]


def _own_git_dir(objects: Path, *, is_sha256: bool) -> Path:
    """A git directory in scratch, for the reference that `git fast-import` insists on."""
    make_git_dir(objects / "git", is_sha256=is_sha256)
    return objects / "git"


def make_git_dir(path: Path, *, is_sha256: bool) -> None:
    """Make a git directory without objects, unless it exists. Not synced."""
    with Directory.open(path.parent) as parent:
        if not parent.make(path.name, durable=False):
            return
    with Directory.open(path) as directory:
        directory.make("refs", durable=False)
        durable.create_in(directory, "HEAD", b"ref: refs/heads/none\n", durable=False)
        if is_sha256:
            content = b"[core]\nrepositoryformatversion=1\n[extensions]\nobjectformat=sha256\n"
            durable.create_in(directory, "config", content, durable=False)


def _quoted(path: bytes, *, always: bool = False) -> bytes:
    """A path as `git fast-import` reads it, quoted if need be."""
    if not always and not path.startswith(b'"') and b"\n" not in path:
        return path
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def _unkept(git: Git, top: Path, head: str | None) -> list[str]:
    """The objects of the checked-out commit that no reference keeps: with a detached HEAD, there may be some."""
    try:
        content = calls.read_small(os.fspath(git_dir_of(git, top) / "HEAD"), 5)
    except OSError:
        content = b""
    if head is None or content == b"ref: ":
        return []
    return git.run("rev-list", "--objects", "--no-object-names", head, "--not", "--glob=refs/*").decode().split()


# --- Packs and references -----------------------------------------------------------------------------


def _move_pack(source: GitSource, pack: Path, snapshot_id: str) -> Path:
    """Move a pack into the repository. git sees it once its index arrives, and keeps it because of the `.keep` file."""
    place = source.git.objects / "pack"
    make_directories(place)
    name = f"pack-{pack.name.rpartition('-')[2]}"
    durable.create(place / f"{name}.keep", f"{_KEEP}{snapshot_id}\n".encode(), mode=0o444)
    with Directory.open(pack.parent) as here:
        suffixes = [each.removeprefix(pack.name) for each in here.names() if each.startswith(f"{pack.name}.")]
    for suffix in sorted(suffixes, key=".idx".__eq__):
        with failing_to("move", pack):
            rename(pack.with_name(pack.name + suffix), place / f"{name}{suffix}")
    with Directory.open(place) as directory:
        durable.sync_names(directory)
    return place / f"{name}.pack"


def kept_packs(git: Git) -> dict[str, Path]:
    """The `.keep` files of packs of ours, by the id of their snapshot."""
    found = {}
    with Directory.open(git.objects / "pack") as directory:
        for name in (each for each in directory.names() if each.endswith(".keep")):
            with contextlib.suppress(NotFound):  # its owner, or a `git fetch`, has just removed it
                content = durable.read_in(directory, name).decode(errors="replace")
                if content.startswith(_KEEP):
                    found[content.removeprefix(_KEEP).strip()] = directory.path / name
    return found


def drop_keep(git: Git, snapshot_id: str) -> None:
    """Remove the `.keep` file of a snapshot that has its reference, or that will never have one."""
    if (path := kept_packs(git).get(snapshot_id)) is not None:
        durable.remove(path)


def create_ref(git: Git, snapshot_id: str, commit: str) -> None:
    """3. Create the reference by which git keeps a commit and all that it needs, durably."""
    update_refs(git, f"create {SNAPSHOTS}{snapshot_id} {commit}\n")
    place = git.common / SNAPSHOTS
    with contextlib.suppress(NotFound):  # git may keep references elsewhere
        sync_parents(*(each / "x" for each in (place, place.parent, place.parent.parent)))


def delete_refs(git: Git, ids: Iterable[str]) -> None:
    """Delete the references of snapshots, all or none; those that do not exist are skipped."""
    known = _listed(git)
    if lines := "".join(f"delete {SNAPSHOTS}{each} {known[each][0]}\n" for each in ids if each in known):
        update_refs(git, lines)


def update_refs(git: Git, lines: str) -> None:
    """Run these commands of `git update-ref --stdin`, all or none; for references of ours only."""
    unlock(git, *(line.split()[1] for line in lines.splitlines()))
    settings = ("core.logAllRefUpdates=false", "core.fsync=reference", "core.fsyncMethod=fsync")
    git.run("update-ref", "--stdin", content=lines.encode(), settings=settings)


def refs(git: Git) -> dict[str, str]:
    """The commit of each snapshot, by its id."""
    return {name: oids[-1] for name, oids in _listed(git).items()}


def _listed(git: Git) -> dict[str, list[str]]:
    """The object of each reference. For a tag, which a push or fetch with the user's own refspecs leaves here, also
    the commit that it points to."""
    found = git.run("for-each-ref", "--format=%(refname) %(objectname) %(*objectname)", SNAPSHOTS)
    records = (line.removeprefix(SNAPSHOTS).split() for line in found.decode(errors="replace").splitlines())
    return {name: oids for name, *oids in records}


# --- The private index and its sums -------------------------------------------------------------------


def _sums_path(index: Path) -> Path:
    return index.with_name(f"{index.name}.sums")


def _identity(index: Path) -> list[int] | None:
    try:
        with Directory.open(index.parent) as directory:
            status = directory.status(index.name)
    except Failure:
        return None
    return status and [status.st_ino, status.st_size, status.st_mtime_ns]


def known_sums(git: Git, top: Path, index: Path) -> Sums | None:
    """The sums of the private index; None if it cannot be used.

    In a sparse checkout it cannot: it would keep files that are not checked out as they were at its first capture, and
    only the user's index has those of the commit.
    """
    return None if entry_exists(git_dir_of(git, top) / "info" / "sparse-checkout") else _read_sums(index)


def _read_sums(index: Path) -> Sums | None:
    """The recorded sums of the private index; None if there are none, or if they are those of another index."""
    try:
        match strictjson.decode(durable.read(_sums_path(index))):
            case {"index": list(identity), "tree": str(tree), "bytes": int(size), "links": int(links)} if (
                _OBJECT.fullmatch(tree)
            ):
                return Sums(tree, size, links) if identity == _identity(index) else None
    except Failure:
        return None
    return None


Since: TypeAlias = tuple[str, list[Difference]]
"""A tree, and the differences from it."""


def publish_index(source: GitSource, working: WorkTree, sums: Sums) -> None:
    """Make the working index the private one; `sums` are those of its tree."""
    if _identity(working.index) == _identity(source.index):
        return  # git learned nothing new
    with Directory.open(working.index.parent) as scratch:
        durable.sync_in(scratch, working.index.name)
    make_directories(source.index.parent)
    record = {"index": _identity(working.index), **sums._asdict()}  # not that of another process's index there
    rename(working.index, source.index)
    durable.replace(_sums_path(source.index), strictjson.encode(record))


def sums_of(source: GitSource, tree: str, known: Sums | None, since: Since) -> Sums:
    """The sums of a tree, computed from known sums and the differences if possible."""
    git, objects = source.git, source.objects
    changed: list[Difference] | None = None
    if known is not None and known.tree == tree:
        return known
    if known is not None and since[0] == known.tree:
        changed = since[1]
    elif known is not None:
        with contextlib.suppress(GitFailed):  # it was pruned
            changed = list(differences(git, known.tree, tree, objects=objects))
    if known is None or changed is None:
        found = list(entries(git, tree, objects=objects))
        return Sums(tree, sum(each.size for each in found), sum(each.mode == LINK for each in found))
    size = sizes(git, (oid for each in changed for oid in each.oids), objects=objects)
    total = sum(size.get(each.oids[1], 0) - size.get(each.oids[0], 0) for each in changed)
    links = sum((each.modes[1] == LINK) - (each.modes[0] == LINK) for each in changed)
    return Sums(tree, known.bytes + total, known.links + links)
