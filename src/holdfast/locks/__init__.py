"""Locks that need only a filesystem, their holders, and whether those are still alive."""
