"""Repositories: worktrees, snapshots, restore, garbage collection, assignments and the doctor."""
