"""Candidates: what a target would be with entries of its queue on its tip, built without a checkout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import GitFailed
from holdfast.git import landing
from holdfast.git.landing import FrozenWork
from holdfast.git.program import Author, Git
from holdfast.repository.landing_records import Landing, LandingState, LandingStyle

_MOST_SUBJECTS = 3


class Chain:
    """Candidates on one tip: each entry on top of the one before, as long as they merge."""

    def __init__(self, git: Git, tip: str, author: Author, attributes: Path | None = None) -> None:
        """`attributes` is a directory with the attributes of the tip, for merges."""
        self.git = git
        self._attributes = attributes
        self.tip = tip
        self.entries: list[Landing] = []
        self.tips: list[str] = []
        self.trees: list[str] = []  # of the tips
        self.deferred: set[str] = set()  # entries that conflict with an earlier entry, not with the tip
        self._author = author
        self._tree = ""  # of the tip; empty until it is needed

    def end(self) -> str:
        return self.tips[-1] if self.tips else self.tip

    def _end_tree(self) -> str:
        if not self.trees:
            self._tree = self._tree or landing.tree_of(self.git, self.tip)
        return self.trees[-1] if self.trees else self._tree

    def extend(self, entry: Landing) -> Landing | None:
        """Add an entry on top. If it conflicts with the tip, return it with that outcome. If it conflicts only with
        earlier entries, defer it: those may not land."""
        squash = entry.style is LandingStyle.SQUASH
        addition = FrozenWork(entry.commit, message_of(entry), squash=squash)
        try:
            added = landing.add(self.git, self.end(), self._end_tree(), addition, self._author, self._attributes)
        except GitFailed as failure:
            return with_failure(entry, self.tip, f"git cannot merge it: {failure.message}")
        if added.tip is not None:
            self.entries.append(entry)
            self.tips.append(added.tip)
            self.trees.append(f"{added.merged.tree}")
            return None
        alone = (
            added if not self.entries else landing.add(self.git, self.tip, "", addition, self._author, self._attributes)
        )
        if alone.tip is not None:
            self.deferred.add(entry.landing_id)
            return None
        return msgspec.structs.replace(
            entry,
            state=LandingState.CONFLICT,
            conflicts=alone.merged.conflicts,
            against=self.tip,
            reason="; ".join(_others(self.git, entry, self.tip, alone.merged.conflicts)),
        )

    def cut(self, length: int) -> bool:
        """Keep only the first `length` entries. If others are dropped, no entry is deferred any more; returns whether
        one was."""
        was_deferred = length < len(self.entries) and bool(self.deferred)
        del self.entries[length:], self.tips[length:], self.trees[length:]
        if was_deferred:
            self.deferred.clear()
        return was_deferred

    def advance(self, length: int) -> None:
        """Move the tip past the first `length` entries, which are on the target now; keep the rest as it was built."""
        self.tip, self._tree = self.tips[length - 1], self.trees[length - 1]
        del self.entries[:length], self.tips[:length], self.trees[:length]
        self.deferred.clear()


def with_failure(entry: Landing, tip: str, reason: str) -> Landing:
    return msgspec.structs.replace(entry, state=LandingState.FAILED, against=tip, reason=reason)


def message_of(entry: Landing) -> str:
    """The message of the commit that puts an entry on its target."""
    subject = entry.title or f"work of {entry.worktree_id or entry.commit[:12]}"
    if entry.style is LandingStyle.MERGE:
        subject = f"Land {entry.worktree_id or entry.commit[:12]}: {subject}"
    trailers = [f"Holdfast-Landing: {entry.landing_id}"]
    trailers += [f"Holdfast-Issue: {entry.issue_id}"] if entry.issue_id else []
    trailers += [f"Holdfast-Worktree: {entry.worktree_id}"] if entry.worktree_id else []
    return f"{subject}\n\n" + "\n".join(trailers) + "\n"


def _others(git: Git, entry: Landing, tip: str, paths: Sequence[str]) -> Iterator[str]:
    """The commits on the target that touched the conflicting paths since the work began, for its agent."""
    with contextlib.suppress(GitFailed):
        words = "log", f"-{_MOST_SUBJECTS}", "--no-merges", "--format=%h %s", f"{entry.commit}..{tip}", "--"
        found = git.run("--literal-pathspecs", *words, *paths[:50]).decode(errors="replace").splitlines()
        yield from (f"{entry.branch} has: {line}" for line in found)
