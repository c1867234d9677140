"""Workspaces: a directory opened and wired to its store; the only place that does so."""
