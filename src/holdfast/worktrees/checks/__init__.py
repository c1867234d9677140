"""The checks of worktrees and snapshots, each a small function; `doctor` says what a check is."""

from __future__ import annotations

from holdfast.worktrees.checks import directories, leases, lines, litter, surroundings, trees, unfinished
from holdfast.worktrees.doctor import Check

CHECKS: tuple[Check, ...] = (
    # What is decided is carried out before anything else is judged.
    Check("commits", unfinished.commits),
    Check("operations", unfinished.operations),
    Check("collections", unfinished.collections),
    Check("plans", unfinished.plans),
    # What is kept.
    Check("trees", trees.orphans),
    Check("snapshots", trees.incomplete),
    Check("content", trees.damaged),
    Check("heads", lines.heads),
    Check("parents", lines.parents),
    Check("references", lines.references),
    Check("pins", lines.pins),
    Check("directories", directories.worktrees),
    Check("payloads", directories.payloads),
    Check("records", directories.records),
    # What dead processes have left behind.
    Check("scratch", litter.scratches),
    Check("remnants", trees.remnants),
    Check("drafts", litter.drafts),
    Check("leases", leases.leases),
    Check("waiters", leases.waiters),
    # What all of it rests on.
    Check("audit", surroundings.trail),
    Check("clock", surroundings.clock),
    Check("format", surroundings.repository_format),
    Check("permissions", surroundings.permissions),
    Check("filesystem", surroundings.filesystem),
    Check("disk", surroundings.disk),
)
"""In this order: a repair may make a later one unnecessary, never an earlier one necessary."""
