"""The life of worktrees as their users see it: created, listed, renamed, removed.

Each operation first brings to its end what a dead process has left pending on the names it is about.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.worktrees.control import Control
from holdfast.worktrees.records import MAIN, WORKTREES, WorktreeConfig


class Worktrees:
    """The worktrees of one repository."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def configs(self) -> Iterator[WorktreeConfig]:
        """The record of each worktree, `main` first, then by name. Takes no lock."""
        found = [document.record for _, document in self._control.store.scan(WORKTREES)]
        yield from sorted(found, key=lambda each: (each.worktree_id != MAIN, each.worktree_id))
