"""Worktrees as they are shown: as records for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli.lock_view import HIGH_RISK, state_lines, summary
from holdfast.repository.to_json import worktree_to_json as worktree_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.repository.usage import Usage
    from holdfast.repository.worktrees import WorktreeState


def usage_record(usage: Usage) -> dict[str, object]:
    """The processes that work in a worktree, and how many could not be looked into."""
    return {"processes": [each.as_record() for each in usage.users], "hidden_processes": usage.hidden}


COLUMNS = ("WORKTREE", "HEAD", "STATE", "PATH")


def row(state: WorktreeState, here: Path) -> list[str]:
    """A worktree in the table of all; its path as one would write it `here`."""
    head = state.config.head_snapshot_id or "no snapshot"
    path = state.path.relative_to(here) if state.path.is_relative_to(here) else state.path
    return [state.config.worktree_id, head, "; ".join(_marks(state)) or "free", str(path)]


def one_line(state: WorktreeState) -> str:
    """A worktree in a list."""
    head = state.config.head_snapshot_id or "no snapshot"
    return f"{state.config.worktree_id}: {'; '.join([head, *_marks(state)])}"


def _marks(state: WorktreeState) -> list[str]:
    marks = []
    if state.is_shared:
        marks.append(HIGH_RISK)
    elif state.lease is not None:
        marks.append(summary(state.lease))
    if state.operation is not None:
        marks.append(f"being changed: {state.operation.kind.value}")
    if not state.is_there:
        marks.append("its directory is missing")
    if state.config.label:
        marks.append(state.config.label)
    return marks


def lines(state: WorktreeState, usage: Usage) -> Iterator[str]:
    """One worktree with all that is known."""
    config = state.config
    yield from state_lines(config, state.lease)
    yield f"  path      {state.path}{'' if state.is_there else ' (missing)'}"
    yield f"  created   {config.created_at}"
    yield f"  base      {config.base_snapshot_id or 'none'}"
    yield f"  head      {config.head_snapshot_id or 'none'}"
    if config.label:
        yield f"  label     {config.label}"
    if state.operation is not None:
        operation = state.operation
        yield f"  pending   {operation.kind.value}, begun by {operation.holder_id} at {operation.begun_at}"
    for each in usage.users:
        yield f"  in use    {each}"
    if usage.hidden:
        yield f"  in use    perhaps: {usage.hidden} of the running processes may not be looked into"
