"""Worktrees and snapshots: isolated directories, what was kept of them, and how it comes back."""
