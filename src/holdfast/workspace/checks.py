"""Which checks an examination of a repository makes: those of every layer that keeps something."""

from __future__ import annotations

from holdfast.worktrees.checks import CHECKS
from holdfast.worktrees.doctor import Check


def all_checks() -> tuple[Check, ...]:
    """The checks in the order in which they are made and repaired."""
    return (*CHECKS,)
