"""Comparison of a work tree with a git tree, and restoring the work tree in place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import Changed, Failure, GitFailed, Refused
from holdfast.fs import calls, durable
from holdfast.git.contents import LINK, NONE, UNKNOWN, Difference, changes_of, differences, differences_in, read_file
from holdfast.git.look import STATUS, Indexed, Look, WorkTree, ignored_among, looked
from holdfast.git.program import Background, Git
from holdfast.git.snapshots import GitSource, git_dir_of, known_sums, publish_index, start, sums_of, with_links
from holdfast.trees.results import Change
from holdfast.trees.walker import shown

_AT_ONCE = 500  # paths as arguments
_MOST_NAMED = 5
_MOST_COMPARED = 1 << 28  # bytes of a file
_HIDING_NOTHING = ("core.ignoreStat=false", "core.ignoreCase=false", "core.fileMode=true", "core.symlinks=true")


def unsaved(git: Git, top: Path, index: Path, tree: str) -> Iterator[Change]:
    """The changes from a tree to the files at `top`, sorted by path. Writes nothing.

    It compares through the private index, or through the user's before the first capture.
    """
    sums = known_sums(git, top, index)
    work = WorkTree(git, top, index if sums else git_dir_of(git, top) / "index")
    look = with_links(work, sums).look()
    staged: dict[bytes, Difference] = {}
    if sums is None or sums.tree != tree:
        raw = work.run("diff-index", "--cached", "-z", "--raw", "--no-abbrev", "--no-renames", tree, "--")
        staged = {each.path: each for each in differences_in(raw)}
    combined = _Combined(work, look, staged)
    found = [each for path in combined.paths() if (each := combined.difference(path)) is not None]
    for change in changes_of(git, found):
        yield change if change.what == "removed" else change._replace(size=_size(top, change))


def foreign_files(git: Git, top: Path, git_dir: Path, index: Path, commit: str) -> set[bytes]:
    """The files at `top`, and nested repositories with a slash, that are neither in a commit nor an incomplete copy of
    a file in it. Ignored files count too. Creates `index`, and reads no other."""

    def run(*arguments: str, content: bytes | None = None) -> bytes:
        how: dict[str, Any] = {"worktree": top, "git_dir": git_dir, "index": index, "settings": _HIDING_NOTHING}
        return git.run(*arguments, content=content, **how)

    run("read-tree", commit)
    staged = (each.partition(b"\t") for each in run("ls-files", "--stage", "-z").split(b"\0"))
    links = [path for facts, _, path in staged if facts.startswith(LINK.encode())]
    if links:  # git would not list the files where a nested repository belongs
        run("update-index", "-z", "--force-remove", "--stdin", content=b"\0".join(links))
    others = run("ls-files", "--others", "-z").split(b"\0")
    found = {*looked(run(*STATUS)).changed, *filter(None, others)}
    return {each for each in found if not _is_part_of(git, commit, top, each)}


def _is_part_of(git: Git, commit: str, top: Path, path: bytes) -> bool:
    try:
        content = durable.read(Path(_where(top, path)), limit=_MOST_COMPARED)
        return read_file(git, commit, path, _MOST_COMPARED).startswith(content)
    except Failure:
        return False


def _size(top: Path, change: Change) -> int:
    try:
        return 0 if change.kind == "m" else calls.stat(_where(top, change.path), follow_symlinks=False).st_size
    except OSError:
        return 0  # gone meanwhile


def _where(top: Path, path: bytes) -> str:
    return os.path.join(top, os.fsdecode(path))


class _Combined:
    """The differences from a tree to the files, combined from two steps: tree to index (`staged`), index to files."""

    def __init__(self, work: WorkTree, look: Look, staged: dict[bytes, Difference]) -> None:
        self._work, self._look, self._staged = work, look, staged
        self._nested = {path.rstrip(b"/") for path in look.nested if work.has_commit(path)}
        doubtful = [path for path, seen in look.changed.items() if path in staged or _may_be_mode_only(seen)]
        self._known = dict(hashes(work, doubtful))

    def paths(self) -> list[bytes]:
        return sorted({*self._look.changed, *self._look.removed, *self._staged, *self._nested})

    def difference(self, path: bytes) -> Difference | None:
        """None if the two steps cancel each other out."""
        before, after = self._before(path), self._after(path)
        if before == after or before[0] == after[0] == NONE:
            return None
        return Difference(path, (before[0], after[0]), (before[1], after[1]))

    def _before(self, path: bytes) -> tuple[str, str]:
        if path in self._staged:
            return self._staged[path].modes[0], self._staged[path].oids[0]
        seen = self._look.changed.get(path) or self._look.removed.get(path)
        return (seen.mode, seen.oid) if seen else (NONE, UNKNOWN)

    def _after(self, path: bytes) -> tuple[str, str]:
        if path in self._look.removed:
            return NONE, UNKNOWN
        if path in self._look.changed:
            now = self._look.changed[path].mode_now or mode_now(_where(self._work.top, path))
            return now, self._known.get(path, UNKNOWN)
        if path in self._nested:
            return LINK, UNKNOWN
        return self._staged[path].modes[1], self._staged[path].oids[1]


def _may_be_mode_only(seen: Indexed) -> bool:
    return seen.mode != seen.mode_now and seen.mode.startswith("100") and seen.mode_now.startswith("100")


def mode_now(where: str) -> str:
    """The mode of a new file or link, as git writes it; zeros if it is gone."""
    try:
        mode = calls.stat(where, follow_symlinks=False).st_mode
    except OSError:
        return NONE
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & stat.S_IXUSR else "100644"


def hashes(work: WorkTree, paths: list[bytes]) -> Iterator[tuple[bytes, str]]:
    """The object names that git would give to the contents of these files, without files that have vanished."""
    files = []
    for path in paths:
        mode = mode_now(_where(work.top, path))
        if mode == "120000":
            target = os.fsencode(calls.readlink(_where(work.top, path)))
            yield path, work.git.run("hash-object", "--stdin", content=target).decode().strip()
        elif mode != NONE:
            files.append(path)
    for first in range(0, len(files), _AT_ONCE):
        some = files[first : first + _AT_ONCE]
        names = work.run("hash-object", "--", *(f"./{os.fsdecode(path)}" for path in some)).decode().split()
        yield from zip(some, names, strict=True)


# --- Restoring in place -------------------------------------------------------------------------------


def restore(source: GitSource, from_tree: str, to_tree: str, path: bytes | None = None) -> str:
    """Turn the files of `from_tree`, as they were captured, into those of `to_tree`, or only those at `path`.

    Writes and removes only files that differ; directories, branches and ignored files stay. It raises with nothing
    changed: `Changed` if a file that it would touch is not as in `from_tree`, `Refused` if another file is in the way.
    Returns the tree of the files that are now there. A kill leaves some files of each tree, and the old index.
    """
    working, sums = start(source)
    if path is not None:
        to_tree = _grafted(source, from_tree, to_tree, path)
    if sums is None or sums.tree != from_tree:
        working.run("read-tree", "-m", "-i", from_tree)  # keeps what it knows of files that are the same
        working.refresh()
    found = list(differences(source.git, from_tree, to_tree, objects=source.objects))
    require_room(source.top, found)
    with Background(lambda: sums_of(source, to_tree, sums, (from_tree, found))) as counted:
        _switch(working, from_tree, to_tree)
        publish_index(source, working, counted.result())
    return to_tree


def _switch(working: WorkTree, from_tree: str, to_tree: str) -> None:
    """Change the files. git checks all of them before it touches one."""
    command = ("read-tree", "-m", "-u", "--no-sparse-checkout", from_tree, to_tree)
    try:
        working.run(*command)
    except GitFailed as failure:
        if "not uptodate" not in str(failure.facts["stderr"]):
            raise
        working.refresh()  # perhaps only its times differ
        try:
            working.run(*command)
        except GitFailed as again:
            said, top = again.facts["stderr"], working.top
            raise Changed(
                f"{top} changed since it was captured; nothing was restored: {said}", path=str(top)
            ) from again


def require_no_ignored(git: Git, top: Path, from_tree: str, to_tree: str, path: bytes | None = None) -> None:
    """Raise `Refused` if `restore` would do so because of an ignored file. Other files in the way may have appeared
    since `from_tree` was captured, or may not be worth keeping: `restore` itself decides about those."""
    found = [each for each in differences(git, from_tree, to_tree) if path is None or _is_below(each.path, path)]
    if in_the_way := _in_the_way(top, found):
        _refuse(top, ignored_among(git, top, in_the_way))


def _is_below(path: bytes, above: bytes) -> bool:
    return (path + b"/").startswith(above.rstrip(b"/") + b"/")


def require_room(top: Path, found: list[Difference]) -> None:
    """Raise `Refused` if a file that is not in the old tree is in the way: git itself would replace an ignored one."""
    _refuse(top, _in_the_way(top, found))


def _in_the_way(top: Path, found: list[Difference]) -> list[bytes]:
    """Untracked files at the path of a new entry, or at a directory above it."""
    ours = {each.path for each in found if each.modes[0] != NONE}
    new = [each.path for each in found if each.modes[0] == NONE and each.modes[1] != LINK]  # links change no file
    above = {path[:end] for path in new for end, byte in enumerate(path) if byte == ord("/")}
    found_above = [path for path in sorted(above) if path not in ours and _is_no_directory(top, path)]
    return [*found_above, *(other for path in new for other in _others(top, path, ours))]


def _refuse(top: Path, in_the_way: list[bytes]) -> None:
    if in_the_way:
        names = [shown(os.fsdecode(path)) for path in in_the_way[:_MOST_NAMED]]
        message = f"files in {top} are in the way, nothing was written: {', '.join(names)}"
        facts = {"path": str(top), "in_the_way": len(in_the_way), "files": names}
        raise Refused(message, hint="Move them away, and try again.", **facts)


def _is_no_directory(top: Path, path: bytes) -> bool:
    where = _where(top, path)
    return mode_now(where) != NONE and not calls.is_directory(where)


def _others(top: Path, path: bytes, ours: set[bytes]) -> Iterator[bytes]:
    """Every file at or below `path` that is not ours."""
    waiting = [path]
    while waiting:
        here = waiting.pop()
        where = _where(top, here)
        if calls.is_directory(where):
            waiting += (here + b"/" + os.fsencode(name) for name in calls.listdir(where))
        elif here not in ours and mode_now(where) != NONE:
            yield here


def _grafted(source: GitSource, from_tree: str, to_tree: str, path: bytes) -> str:
    """A tree like `from_tree`, but with the entries of `to_tree` at `path`."""
    index = source.objects / "graft"
    graft = WorkTree(source.git, source.top, index, source.objects)
    graft.run("read-tree", from_tree)
    name = os.fsdecode(path)
    graft.run("--literal-pathspecs", "rm", "-r", "-q", "-f", "--cached", "--ignore-unmatch", "--sparse", "--", name)
    listed = graft.run("--literal-pathspecs", "ls-tree", "-r", "-z", "--full-tree", to_tree, "--", name)
    graft.run("update-index", "-z", "--replace", "--index-info", content=listed)
    return graft.write_tree()
