"""The command line: one module per command or group of commands. `entry` runs the command that was typed."""

REPO, WORKTREE = "HOLDFAST_REPO", "HOLDFAST_WORKTREE"
LOCK_ID, TOKEN = "HOLDFAST_LOCK_ID", "HOLDFAST_TOKEN"
ACTOR, ISSUE_ID = "HOLDFAST_ACTOR", "HOLDFAST_ISSUE_ID"
