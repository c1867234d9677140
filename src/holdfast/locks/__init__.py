"""Locks that need only a file system, who holds them, and whether that holder is still alive."""
