"""Locks that need only a file system, their holders, and whether those are still alive."""
