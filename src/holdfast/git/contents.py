"""The contents of commits: entries, differences, files, export, verification and reclaimable sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import AlreadyExists, GitFailed, NotFound, TooLarge
from holdfast.fs.directory import Directory, entry_exists, failing_to, rename
from holdfast.fs.durable import discard, draft_name, new_mark
from holdfast.git.program import Git
from holdfast.trees.results import Change, Materialised, Problem
from holdfast.trees.walker import remove_tree, shown

LINK, NONE, TREE = "160000", "000000", "040000"  # modes
UNKNOWN = "?"  # an object
_MOST_RUNS = 64
_MOST_AT_ONCE = 1 << 26  # bytes of a file
SNAPSHOTS = "refs/holdfast/snapshots/"
_KINDS = {"100644": "f", "100755": "f", "120000": "l", LINK: "m", TREE: "d"}


class TreeEntry(NamedTuple):
    """A file, symbolic link or link to a nested repository (`kind` f, l or m) of a commit; `mode` as git writes it."""

    path: bytes
    kind: str
    mode: str
    oid: str
    size: int


class Difference(NamedTuple):
    """One line of git's raw difference between two trees; the modes and objects before and after."""

    path: bytes
    modes: tuple[str, str]
    oids: tuple[str, str]


def entries(git: Git, commit: str, *, objects: Path | None = None) -> Iterator[TreeEntry]:
    """Everything in a commit or tree, in git's order."""
    for record in git.run("ls-tree", "-r", "-l", "-z", "--full-tree", commit, objects=objects).split(b"\0"):
        if record:
            facts, _, path = record.partition(b"\t")
            mode, _, oid, size = facts.decode().split()
            yield TreeEntry(path, _KINDS.get(mode, "f"), mode, oid, int(size) if size.isdigit() else 0)


def differences(
    git: Git, one: str, other: str, *, objects: Path | None = None, trees: bool = False
) -> Iterator[Difference]:
    """The differences from one tree or commit to another; with `trees`, also those of the trees below."""
    options = ("-r", "-t") if trees else ("-r",)
    raw = git.run(
        "diff-tree", "-z", "--raw", "--no-abbrev", "--no-renames", *options, one, other, "--", objects=objects
    )
    yield from differences_in(raw)


def differences_in(raw: bytes) -> Iterator[Difference]:
    fields = iter(raw.split(b"\0"))
    for facts in fields:
        if facts:
            before, after, old, new, _ = facts.decode().removeprefix(":").split()
            yield Difference(next(fields), (before, after), (old, new))


def sizes(git: Git, oids: Iterable[str], *, objects: Path | None = None) -> dict[str, int]:
    """The size of each of these objects, without missing ones."""
    wanted = sorted({oid for oid in oids if oid.strip("0?")})
    if not wanted:
        return {}
    content = "".join(f"{oid}\n" for oid in wanted).encode()
    found = git.run(
        "cat-file", "--batch-check=%(objectname) %(objectsize)", "--buffer", objects=objects, content=content
    )
    words = (line.split() for line in found.decode().splitlines())
    return {oid: int(size) for oid, size in words if size != "missing"}


def compare(git: Git, one: str, other: str) -> Iterator[Change]:
    """The changes from one commit or tree to another, in git's order."""
    yield from changes_of(git, list(differences(git, one, other)))


def changes_of(git: Git, found: list[Difference]) -> Iterator[Change]:
    """Differences as changes, with sizes."""
    known = sizes(git, (each.oids[each.modes[1] != NONE] for each in found if LINK not in each.modes))
    for path, modes, oids in found:
        if modes[0] == NONE:
            yield Change(path, "added", _KINDS.get(modes[1], "f"), size=known.get(oids[1], 0))
        elif modes[1] == NONE:
            yield Change(path, "removed", _KINDS.get(modes[0], "f"), size=known.get(oids[0], 0))
        else:
            yield Change(path, "modified", _KINDS.get(modes[1], "f"), aspects(modes, oids), known.get(oids[1], 0))


def aspects(modes: tuple[str, str], oids: tuple[str, str]) -> tuple[str, ...]:
    one, other = (_KINDS.get(mode, "f") for mode in modes)
    if one != other:
        return ("kind",)
    found = {"content": oids[0] != oids[1] and one != "l", "target": oids[0] != oids[1] and one == "l"}
    found["mode"] = modes[0] != modes[1]
    return tuple(aspect for aspect, different in found.items() if different)


def read_file(git: Git, commit: str, path: bytes, limit: int) -> bytes:
    """The content of a file of a commit, as git stores it; raises `NotFound`, and `TooLarge` beyond `limit` bytes."""
    found = _entry_at(git, commit, path)
    if found is None or found.kind not in "fl":
        raise _no_path(path)
    if found.size > limit:
        raise TooLarge(shown(os.fsdecode(path)), found.size, limit)
    return git.run("cat-file", "blob", found.oid)


def _entry_at(git: Git, commit: str, path: bytes) -> TreeEntry | None:
    """The entry of a commit at exactly this path, which may be a directory (`kind` d); None if there is none."""
    found = git.run("--literal-pathspecs", "ls-tree", "-l", "-z", "--full-tree", commit, "--", os.fsdecode(path))
    for record in found.split(b"\0"):
        facts, _, name = record.partition(b"\t")
        if record and name == path:
            mode, _, oid, size = facts.decode().split()
            return TreeEntry(path, _KINDS.get(mode, "f"), mode, oid, int(size) if size.isdigit() else 0)
    return None


def _no_path(path: bytes) -> NotFound:
    where = shown(os.fsdecode(path))
    return NotFound(f"there is no {where} in the snapshot", path=where)


def commit_tree(git: Git, tree: str, parents: Iterable[str], *, objects: Path | None = None) -> str:
    """Make a commit of a tree, without a reference. With `objects`, it leaves no trace in the repository."""
    after = [option for parent in parents for option in ("-p", parent)]
    settings = ("core.fsync=none",) if objects else ()
    return git.run("commit-tree", tree, *after, "-m", "a tree", objects=objects, settings=settings).decode().strip()


# --- Export -------------------------------------------------------------------------------------------


def export(git: Git, commit: str, destination: Path, only: bytes | None = None) -> Materialised:
    """Create `destination` with the content of a commit, or of the one path `only` of it, as a checkout would have it.

    Line endings and filters follow the commit's own attributes. `destination` appears whole or not at all; not synced.
    """
    only = only or None
    if entry_exists(destination):
        raise AlreadyExists(f"{destination} already exists", path=str(destination))
    if only is not None and _entry_at(git, commit, only) is None:
        raise _no_path(only)
    wanted = [each for each in entries(git, commit) if only is None or (each.path + b"/").startswith(only + b"/")]
    mark = new_mark()
    with Directory.open(destination.parent) as parent:
        draft, index = draft_name(destination.name, mark), draft_name(f"{destination.name}.index", mark)
        parent.make(draft, durable=False)
        top = parent.path / draft
        try:
            _check_out(git, commit, wanted, top, parent.path / index)
            with failing_to("create", destination):
                rename(top if only is None else top / os.fsdecode(only), destination)
        finally:
            discard(parent, index)
            remove_tree(top)
    directories = {parent for each in wanted for parent in _above(each.path, only)}
    links = tuple(shown(os.fsdecode(each.path)) for each in wanted if each.kind == "m")
    return Materialised(len(wanted) - len(links), len(directories), sum(each.size for each in wanted), links)


def _check_out(git: Git, commit: str, wanted: list[TreeEntry], top: Path, index: Path) -> None:
    git.run("read-tree", commit, worktree=top, git_dir=git.common, index=index)
    paths = b"".join(each.path + b"\0" for each in wanted)
    git.run("checkout-index", "-q", "-z", "--stdin", worktree=top, git_dir=git.common, index=index, content=paths)


def _above(path: bytes, only: bytes | None) -> Iterator[bytes]:
    """The directories above a path, down from `only` or from the top, which is included."""
    names = path.split(b"/")
    first = 0 if only is None else only.count(b"/") + 1
    for depth in range(first, len(names)):
        yield b"/".join(names[:depth])


# --- Verification -------------------------------------------------------------------------------------


def verify(git: Git, commit: str) -> Iterator[Problem]:
    """Read every object of a commit's tree and yield the problems; none if the content of each matches its name.
    `what` is `missing`, `content` or `manifest` (the commit or one of its trees)."""
    try:
        tree = git.run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()
        git.run("rev-list", "--objects", "--quiet", "--verify-objects", tree)
        return
    except GitFailed as failure:
        said = str(failure.facts["stderr"])
    found = False
    try:
        listed = list(entries(git, commit))
    except GitFailed as failure:
        yield Problem(commit, "manifest", failure.message)
        return
    for entry in listed:
        if entry.kind != "m" and (problem := _examine(git, entry)) is not None:
            found = True
            yield problem
    if not found:
        yield Problem(commit, "manifest", said)


def damaged_entries(git: Git, commit: str) -> Iterator[TreeEntry]:
    """The files and links of a commit whose content is missing or changed; raises `GitFailed` if a tree is."""
    return (each for each in entries(git, commit) if each.kind != "m" and _examine(git, each) is not None)


def _examine(git: Git, entry: TreeEntry) -> Problem | None:
    where = shown(os.fsdecode(entry.path))
    try:
        if entry.size > _MOST_AT_ONCE:  # git need not have all of it in memory
            git.run("rev-list", "--objects", "--quiet", "--verify-objects", entry.oid)
            return None
        content = git.run("cat-file", "blob", entry.oid)
    except GitFailed as failure:
        return Problem(where, "missing", f"git cannot read it: {failure.message}")
    digest: Callable[[bytes], hashlib._Hash] = hashlib.sha256 if len(entry.oid) == 64 else hashlib.sha1
    if digest(b"blob %d\0" % len(content) + content).hexdigest() != entry.oid:
        return Problem(where, "content", "its content does not match its name")
    return None


def reclaimable(git: Git, deleted: Iterable[str], kept: Iterable[str]) -> int:
    """The bytes on disk of objects that only the snapshots to delete need: neither the kept ones nor other refs. Both
    are given by their commits."""
    lines = list(deleted)
    if not lines:
        return 0
    lines += [f"^{each}" for each in kept]
    content = "".join(f"{line}\n" for line in lines).encode()
    # By default, git leaves out objects of parents, but not of other commits. With this option, it lists these first.
    exact = "--objects-edge-aggressive"
    options = (exact, "--disk-usage", "--stdin", "--not", f"--exclude={SNAPSHOTS}*", "--all")
    return int(git.run("rev-list", *options, content=content).split()[-1])


def reclaimable_sizes(git: Git, deleted: Sequence[str], kept: Iterable[str]) -> list[int]:
    """The reclaimable sizes of the first 0, 1, 2, ... snapshots to delete: exact for up to 64 of them; for more, exact
    at 64 points and interpolated between. Each point is a run of git."""
    step = -(-len(deleted) // _MOST_RUNS) or 1
    still, sizes = list(kept), list[int]()
    for first in reversed(range(0, len(deleted), step)):  # an object that several need is freed with the last
        group = deleted[first : first + step]
        size, number = reclaimable(git, group, still), len(group)
        parts = [size * (each + 1) // number - size * each // number for each in range(number)]
        sizes[:0] = parts
        still += group
    return [0, *accumulate(sizes)]
