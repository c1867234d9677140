"""Pairs of commits: their merge bases, the changes of each side since, and whether the changes can meet at all.

Two sides whose changes do not meet merge without a conflict, so `git merge-tree` need not be started for them. Each
question is asked for many pairs at once, in a few git processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import GitFailed
from holdfast.git.contents import NONE, Difference, differences_in
from holdfast.git.program import Git

Pair = tuple[str, str]
MOST_COMMITS = 50_000
"""Histories that have diverged by more commits than this are not searched for merge bases: git merges them anyway."""


class Touched(NamedTuple):
    """The paths that differ between two trees, and the directories above all of them, above the added ones, and above
    the removed ones."""

    paths: frozenset[bytes]
    above: frozenset[bytes]
    above_added: frozenset[bytes]
    above_removed: frozenset[bytes]

    @classmethod
    def of(cls, changes: dict[bytes, str]) -> Touched:
        """From paths, each with its change: A (added), D (removed) or M (modified)."""
        added, removed = ([path for path, what in changes.items() if what == each] for each in "AD")
        return cls(frozenset(changes), *map(_above, (changes, added, removed)))

    def may_meet(self, other: Touched) -> bool:
        """Whether a merge of the two sides can conflict.

        It cannot if they touch different paths, neither has a file where the other has a directory, and neither adds to
        a directory from which the other removes: that may be a rename of the directory, which moves added files too.
        """
        return not (
            self.paths.isdisjoint(other.paths)
            and self.paths.isdisjoint(other.above)
            and self.above.isdisjoint(other.paths)
            and self.above_added.isdisjoint(other.above_removed)
            and self.above_removed.isdisjoint(other.above_added)
        )


def _above(paths: Iterable[bytes]) -> frozenset[bytes]:
    found: set[bytes] = set()
    for path in paths:
        above = path.rpartition(b"/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition(b"/")[0]
    return frozenset(found)


def trees_of(git: Git, commits: Iterable[str], *, objects: Path | None = None) -> dict[str, str]:
    """The tree of each commit."""
    wanted = sorted(set(commits))
    if not wanted:
        return {}
    content = "".join(f"{commit}^{{tree}}\n" for commit in wanted).encode()
    found = git.run("cat-file", "--batch-check=%(objectname)", objects=objects, content=content).decode()
    return dict(zip(wanted, found.splitlines(), strict=True))


def changes_between(
    git: Git, pairs: Iterable[Pair], *, objects: Path | None = None
) -> Iterator[tuple[Pair, dict[bytes, str]]]:
    """For each pair of trees the paths that differ, and whether each was added (A), removed (D) or modified (M)."""
    wanted = sorted(set(pairs))
    if not wanted:
        return
    content = "".join(f"{one} {other}\n" for one, other in wanted).encode()
    options = ("--stdin", "-r", "-z", "--raw", "--no-abbrev", "--no-renames")
    raw = git.run("diff-tree", *options, objects=objects, content=content)
    for pair, found in zip(wanted, _split(raw), strict=True):
        yield pair, {each.path: _what(each) for each in found}


def _split(raw: bytes) -> list[list[Difference]]:
    """The differences after each line `TREE TREE`, which ends with a newline while all else ends with a NUL."""
    found: list[list[bytes]] = []
    fields = iter(raw.split(b"\0"))
    for field in fields:
        *headers, facts = field.split(b"\n")
        found += [[] for _ in headers]
        if facts:
            found[-1] += [facts, next(fields)]
    return [list(differences_in(b"\0".join(each))) for each in found]


def _what(difference: Difference) -> str:
    if difference.modes[0] == NONE:
        return "A"
    return "D" if difference.modes[1] == NONE else "M"


# --- Merge bases --------------------------------------------------------------------------------------


def merge_bases(git: Git, heads: Sequence[str]) -> dict[Pair, list[str]] | None:
    """The best common ancestors of every two of these commits: an empty list for two that are not related.

    Returns None if the histories are too long. The names in a pair are sorted.
    """
    heads = sorted(set(heads))
    base = _base_of_all(git, heads)
    command = ["rev-list", "--topo-order", "--parents", f"--max-count={MOST_COMMITS}", "--stdin"]
    content = "".join(f"{each}\n" for each in (*heads, *([f"^{base}"] if base else []))).encode()
    lines = git.run(*command, content=content).decode().splitlines()
    if len(lines) == MOST_COMMITS:
        return None
    return _bases_in((line.split() for line in lines), heads, base)


def _base_of_all(git: Git, heads: Sequence[str]) -> str | None:
    try:
        return git.run("merge-base", "--octopus", *heads).decode().split()[0]
    except GitFailed as failure:
        if failure.facts["status"] != 1:
            raise
        return None


def _bases_in(commits: Iterable[list[str]], heads: Sequence[str], base: str | None) -> dict[Pair, list[str]]:
    """`commits` are commits with their parents, children first; `base`, not among them, is an ancestor of all heads.

    A commit is a best common ancestor of two heads if both reach it, and both reach none of its children.
    """
    reached = {head: 1 << number for number, head in enumerate(heads)}  # the heads that reach a commit, as bits
    by_children: dict[str, set[int]] = {}
    found: dict[Pair, list[str]] = {pair: [] for pair in combinations(heads, 2)}

    def judge(commit: str) -> None:
        here, below = reached.get(commit, 0), by_children.get(commit, set())
        if here.bit_count() < 2 or here in below:
            return
        numbers = [number for number in range(len(heads)) if here >> number & 1]
        for one, other in combinations(numbers, 2):
            both = 1 << one | 1 << other
            if not any(each & both == both for each in below):
                found[heads[one], heads[other]].append(commit)

    for commit, *parents in commits:
        judge(commit)
        for parent in parents:
            reached[parent] = reached.get(parent, 0) | reached[commit]
            by_children.setdefault(parent, set()).add(reached[commit])
    if base is not None:
        judge(base)
    return found
