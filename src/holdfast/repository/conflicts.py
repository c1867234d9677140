"""Conflicts between worktrees, and between a worktree and the branch that work lands on, before anybody merges.

Each worktree counts with its current files, uncommitted work included. Every two are merged without a checkout
(`git/merging.py`), unless their changes cannot meet (`git/pairs.py`). A cache keeps the results by what was merged, so
a second search only checks each worktree for changes, and merges those that changed. git's repository stays unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Changed, Failure, GitFailed, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, make_directories
from holdfast.git.contents import commit_tree, entries
from holdfast.git.current import CurrentTree, known_tree, read_again, read_tree
from holdfast.git.merging import is_attributes, merge, write_attributes
from holdfast.git.pairs import Pair, Touched, changes_between, merge_bases, trees_of
from holdfast.git.program import side_by_side
from holdfast.git.resolutions import RESOLUTIONS
from holdfast.git.snapshots import GitSource
from holdfast.git.worktrees import Registered, commit_of, registered
from holdfast.repository.conflict_cache import LOOK, ConflictCache, Found
from holdfast.repository.context import RepositoryContext
from holdfast.repository.git_home import GitHome
from holdfast.repository.payloads import scratch
from holdfast.repository.repository import Repository

_CLEAN: Found = ((), ())
_MOST_RETRIES = 2
_OBJECTS = "objects"


class WorktreeConflict(NamedTuple):
    """A worktree that conflicts with another one or, if `with_target`, with the branch that work lands on."""

    worktree: str
    other: str
    with_target: bool
    paths: tuple[str, ...]
    messages: tuple[str, ...]

    def as_record(self) -> dict[str, object]:
        """The conflict as JSON values."""
        return {**self._asdict(), "paths": list(self.paths), "messages": list(self.messages)}


class SkippedWorktree(NamedTuple):
    """A worktree that was left out, and why."""

    worktree: str
    reason: str


class ConflictReport(NamedTuple):
    """All conflicts as of now. `target` is the branch, or the commit if none is checked out in `main`; `commit` is its
    tip."""

    target: str
    commit: str
    worktrees: tuple[str, ...]
    conflicts: tuple[WorktreeConflict, ...]
    skipped: tuple[SkippedWorktree, ...]
    merges: int  # the number of merges tried; the other pairs were in the cache, or cannot conflict

    def as_record(self) -> dict[str, object]:
        """The report as JSON values."""
        return {
            "target": self.target,
            "commit": self.commit,
            "worktrees": list(self.worktrees),
            "conflicts": [each.as_record() for each in self.conflicts],
            "skipped": [each._asdict() for each in self.skipped],
            "merges": self.merges,
        }

    def of(self, worktree: str) -> list[WorktreeConflict]:
        """The conflicts of one worktree, each from its point of view."""
        mine = [each for each in self.conflicts if each.worktree == worktree]
        others = [each for each in self.conflicts if not each.with_target and each.other == worktree]
        return [*mine, *(each._replace(worktree=worktree, other=each.worktree) for each in others)]


class _Place(NamedTuple):
    """A worktree, its directory, the index with which it is examined, and the commit that is checked out."""

    name: str
    top: Path
    look: Path
    head: str


class _Side(NamedTuple):
    """One side of a merge: a commit, and the tree of the files, which may have uncommitted work."""

    name: str
    head: str
    tree: str


_Sides = tuple[_Side, _Side]


def find_conflicts(repository: Repository, *, into: str | None = None, only: str | None = None) -> ConflictReport:
    """Find the conflicts of all worktrees, or of one (`only`), with each other and with the branch `into`. A worktree
    that conflicts with the branch does not conflict with those that only have the branch's files there.

    The default of `into` is the branch that is checked out in `main`. Raises `Refused` in a plain home, which has no
    merges, and `NotFound` if there is no such branch or worktree. Takes no lock.
    """
    home = repository.context.home
    if not isinstance(home, GitHome):
        hint = "Use a git checkout: 'holdfast init' in it. To compare worktrees here: 'holdfast diff'."
        raise Refused("conflicts are found by merging, and this repository is not a git checkout", hint=hint)
    if only is not None:
        repository.config(only)
    make_directories(home.paths.caches)
    cache = ConflictCache.read(home.paths.caches)
    for _ in range(_MOST_RETRIES):
        try:
            return _Search(repository.context, home, cache, into, only).run()
        except Changed:  # files were written after a worktree was examined and before its merge
            continue
        except GitFailed:  # the cache may name objects that no longer exist
            cache = ConflictCache.empty(home.paths.caches)
    return _Search(repository.context, home, cache, into, only).run()


class _Search:
    def __init__(
        self, context: RepositoryContext, home: GitHome, cache: ConflictCache, into: str | None, only: str | None
    ) -> None:
        self._context, self._home, self._git = context, home, home.git
        self._cache, self._into, self._only = cache, into, only
        self._skipped: list[SkippedWorktree] = []
        self._places: dict[str, _Place] = {}
        self._missing: set[str] = set()  # worktrees whose uncommitted objects are not in scratch
        self._merges = 0

    def run(self) -> ConflictReport:
        with contextlib.ExitStack() as self._stack:
            known = dict(self._known())
            self._places = {each.name: each for each in self._find_places(known)}
            self._target = self._find_target(known.get(self._home.paths.main))
            sides = self._read_sides()
            pairs = list(self._pairs(sides))
            results = dict(zip(pairs, self._judge(pairs), strict=True))
            known_already = self._of_the_target(results)
        self._cache.save({each.look.name for each in self._places.values()})
        conflicts = tuple(
            WorktreeConflict(one.name, other.name, other is self._target, *found)
            for (one, other), found in results.items()
            if any(found) and (one, other) not in known_already
        )
        names, skipped = tuple(each.name for each in sides), tuple(sorted(self._skipped))
        return ConflictReport(self._target.name, self._target.head, names, conflicts, skipped, self._merges)

    @cached_property
    def _room(self) -> Path:
        """A scratch directory, with a directory for new objects. The caller's thread must be the first to use it."""
        room = self._stack.enter_context(scratch(self._context, "conflicts")).path
        make_directories(room / _OBJECTS)
        return room

    # --- The sides ----------------------------------------------------------------------------------

    def _known(self) -> Iterator[tuple[str, Registered]]:
        """git's registrations, by worktree."""
        names = {Path(each.git_dir).name: name for name, each in self._home.paths.registrations()}
        for each in registered(self._git):
            name = self._home.paths.main if each.git_id is None else names.get(each.git_id)
            if name is not None:
                yield name, each

    def _find_places(self, known: dict[str, Registered]) -> list[_Place]:
        """The worktrees that can be merged; the others are recorded as skipped, with a reason."""
        found = []
        for name, here in known.items():
            if here.head is None or not calls.is_directory(here.path):
                why = "it has no commit yet" if here.head is None else "its directory is gone"
                self._skipped.append(SkippedWorktree(name, why))
            else:
                found.append(_Place(name, here.path, self._home.paths.caches / f"{name}{LOOK}", here.head))
        return sorted(found, key=lambda each: (each.name != self._home.paths.main, each.name))

    def _find_target(self, main: Registered | None) -> _Side:
        branch = self._into or (main and main.branch)
        if self._into is None and main is not None and main.head is None:
            message = f"{main.path} has no commit yet, so there is nothing to merge with"
            raise Refused(message, hint="Make the first one: 'git commit'.", path=str(main.path))
        commit = commit_of(self._git, f"refs/heads/{branch}" if branch else "HEAD")
        return _Side(branch or commit[:12], commit, self._trees([commit])[commit])

    def _read_sides(self) -> list[_Side]:
        """Examine all worktrees, and read those in which something has changed."""
        places = list(self._places.values())
        found = side_by_side(partial(_tried, self._known_tree), places)
        changed = [place for place, tree in zip(places, found, strict=True) if tree is None]
        if changed:
            read = side_by_side(partial(_tried, partial(self._read_tree, self._room)), changed)
            by_place = dict(zip(changed, read, strict=True))
            found = [by_place.get(place, tree) for place, tree in zip(places, found, strict=True)]
        sides = []
        for place, tree in zip(places, found, strict=True):
            if isinstance(tree, CurrentTree):
                sides.append(_Side(place.name, place.head, tree.tree))
                self._missing |= set() if tree.is_complete else {place.name}
            else:
                self._skipped.append(SkippedWorktree(place.name, tree.message if tree else "it cannot be read"))
        return sides

    def _known_tree(self, place: _Place) -> CurrentTree | None:
        tree = known_tree(self._git, place.top, place.look)
        return None if tree is None else CurrentTree(tree, is_complete=False)

    def _read_tree(self, room: Path, place: _Place) -> CurrentTree:
        return read_tree(self._source(place), room)

    def _source(self, place: _Place) -> GitSource:
        return GitSource(self._git, place.top, place.look, self._room / _OBJECTS)

    def _pairs(self, sides: Sequence[_Side]) -> Iterator[tuple[_Side, _Side]]:
        """Every worktree with the target, and every two worktrees."""
        for one in sides:
            if self._only in (None, one.name):
                yield one, self._target
        for one, other in combinations(sides, 2):
            if self._only in (None, one.name, other.name):
                yield one, other

    def _of_the_target(self, results: dict[_Sides, Found]) -> set[_Sides]:
        """The pairs of worktrees whose conflict is that of one of them with the target: the other has changed nothing
        there itself. The first one resolves it when it lands, so the other has nothing to do with it."""
        paths = {
            pair: frozenset(map(os.fsencode, found[0]))
            for pair, found in results.items()
            if found[0] and pair[1] is not self._target
        }
        parted = self._changes([(side, self._target) for side in {side for pair in paths for side in pair}])
        own = {side: changes for (side, _), (changes, _) in parted.items()}
        behind = {
            pair: other
            for pair in paths
            for side, other in (pair, pair[::-1])
            if side in own and paths[pair].isdisjoint(own[side].paths | own[side].above)
        }
        asked = list(dict.fromkeys((other, self._target) for other in behind.values()))
        with_target = dict(zip(asked, self._judge(asked), strict=True))
        return {
            pair for pair, other in behind.items() if set(results[pair][0]) <= set(with_target[other, self._target][0])
        }

    # --- The merges ---------------------------------------------------------------------------------

    def _judge(self, pairs: Sequence[_Sides]) -> list[Found]:
        """The result of each merge, from the cache or tried now."""
        keys = [self._key(one, other) for one, other in pairs]
        known = {key: self._cache.merged(key) for key in keys}
        unknown = {key: pair for key, pair in zip(keys, pairs, strict=True) if known[key] is None}
        meeting = self._meeting(list(unknown.values()))
        todo = [key for key, pair in unknown.items() if pair in meeting]
        found = dict.fromkeys(unknown, _CLEAN) | dict(
            zip(todo, self._merge([unknown[key] for key in todo]), strict=True)
        )
        for key, result in found.items():
            self._cache.put_merged(key, result)
        return [known[key] or found.get(key, _CLEAN) for key in keys]

    def _key(self, one: _Side, other: _Side) -> str:
        """The key in the cache: a hash of everything that decides the outcome of a merge."""
        return _hash(one.head, one.tree, other.head, other.tree, self._rules)

    @cached_property
    def _rules(self) -> str:
        """A hash of what decides a merge besides its two sides: settings, attributes, and recorded resolutions."""
        common = self._git.common
        stamps = (
            *_stamps(common, ["config"]),
            *_stamps(common / "info", ["attributes"]),
            *_stamps(common / RESOLUTIONS),
        )
        return _hash(self._attributes, *stamps)

    @cached_property
    def _attributes(self) -> str:
        """A hash of the attributes of the target; empty if it has none."""
        found = self._cache.attributes(self._target.tree)
        if found is None:
            listed = [each for each in entries(self._git, self._target.tree) if is_attributes(each)]
            found = _hash(*(f"{each.path!r} {each.oid}" for each in listed)) if listed else ""
            self._cache.put_attributes(self._target.tree, found)
        return found

    def _meeting(self, pairs: Sequence[_Sides]) -> set[_Sides]:
        """The pairs whose changes may meet."""
        changes = self._changes(pairs)
        return {pair for pair in pairs if pair not in changes or changes[pair][0].may_meet(changes[pair][1])}

    def _changes(self, pairs: Sequence[_Sides]) -> dict[_Sides, list[Touched]]:
        """What the sides of each pair have changed since they parted, if that is one point in history."""
        bases = self._bases({_ordered(one.head, other.head) for one, other in pairs})
        single = {pair: base for pair in pairs if (base := _only_base(bases, pair)) is not None}
        trees = self._trees(single.values())
        touched = self._touched({(trees[base], side) for pair, base in single.items() for side in pair})
        return {pair: [touched[trees[base], side.tree] for side in pair] for pair, base in single.items()}

    def _bases(self, heads: set[Pair]) -> dict[Pair, list[str]]:
        """The merge bases of pairs of commits; nothing for a pair whose histories are too long."""
        found = {pair: [pair[0]] if pair[0] == pair[1] else self._cache.bases(pair) for pair in heads}
        missing = [pair for pair, bases in found.items() if bases is None]
        if missing:
            new = merge_bases(self._git, [head for pair in missing for head in pair]) or {}
            self._cache.put_bases({pair: new[pair] for pair in missing if pair in new})
            found |= {pair: new.get(pair) for pair in missing}
        return {pair: bases for pair, bases in found.items() if bases is not None}

    def _trees(self, commits: Iterable[str]) -> dict[str, str]:
        found = {each: self._cache.tree(each) for each in commits}
        new = trees_of(self._git, [each for each, tree in found.items() if tree is None])
        self._cache.put_trees(new)
        return {each: tree or new[each] for each, tree in found.items()}

    def _touched(self, wanted: set[tuple[str, _Side]]) -> dict[Pair, Touched]:
        """The paths that each side has changed since its base tree."""
        found = {(base, side.tree): self._cache.changes((base, side.tree)) for base, side in wanted}
        missing = [(base, side) for base, side in wanted if found[base, side.tree] is None and base != side.tree]
        self._write_objects([side for _, side in missing])
        objects = self._room / _OBJECTS if missing else None
        for pair, changes in changes_between(self._git, [(base, side.tree) for base, side in missing], objects=objects):
            self._cache.put_changes(pair, changes)
            found[pair] = changes
        return {pair: Touched.of(changes or {}) for pair, changes in found.items()}

    def _write_objects(self, sides: Iterable[_Side]) -> None:
        """Ensure that all objects of these sides exist: an earlier search has not kept those of uncommitted work."""
        trees = self._trees(each.head for each in sides)
        missing = {each for each in sides if each.name in self._missing}
        needed = [each for each in missing if each.tree != trees[each.head]]
        places = [self._places[each.name] for each in needed]
        self._missing -= {each.name for each in needed}
        sources = {each.name: self._source(each) for each in places}
        found = side_by_side(lambda each: read_again(sources[each.name], self._room, each.head), places)
        for side, tree in zip(needed, found, strict=True):
            if side.tree != tree:
                raise Changed(f"the files of {side.name} keep changing", worktree=side.name)

    def _merge(self, pairs: Sequence[_Sides]) -> list[Found]:
        if not pairs:
            return []
        self._merges += len(pairs)
        self._write_objects({side for pair in pairs for side in pair if side is not self._target})
        attributes = self._room / "attributes" if self._attributes else None
        if attributes is not None:
            write_attributes(self._git, self._target.head, attributes)
        objects, commits = self._room / _OBJECTS, {}
        trees = self._trees(side.head for pair in pairs for side in pair)
        for side in {side for pair in pairs for side in pair}:
            is_committed = side.tree == trees[side.head]
            commits[side] = (
                side.head if is_committed else commit_tree(self._git, side.tree, [side.head], objects=objects)
            )

        def merged(pair: _Sides) -> Found:
            try:
                found = merge(self._git, commits[pair[0]], commits[pair[1]], objects=objects, attributes=attributes)
            except GitFailed as failure:
                if "unrelated histories" not in str(failure.facts["stderr"]):
                    raise
                return (), ("they have no common ancestor",)
            if found.tree is not None:
                return _CLEAN
            one, other = ((commits[side], side.name) for side in pair)
            return found.conflicts, tuple(each.replace(*one).replace(*other) for each in found.messages)

        return side_by_side(merged, pairs)


def _tried(work: Callable[[_Place], CurrentTree | None], item: _Place) -> CurrentTree | Failure | None:
    try:
        return work(item)
    except Failure as failure:
        return failure


def _only_base(bases: dict[Pair, list[str]], pair: _Sides) -> str | None:
    found = bases.get(_ordered(pair[0].head, pair[1].head), [])
    return found[0] if len(found) == 1 else None


def _ordered(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def _stamps(place: Path, names: Sequence[str] | None = None) -> Iterator[str]:
    """Stamps that change with the entries of a directory, or only with those of these names."""
    with contextlib.suppress(Failure), Directory.open(place) as directory:
        for name in sorted(directory.names() if names is None else names):
            status = directory.status(name)
            if status is not None:
                yield f"{name} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()
