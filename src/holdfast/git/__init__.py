"""A git repository as a home: its checkouts, its worktrees, and snapshots as commits."""
