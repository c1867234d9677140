"""Locks that need only a filesystem, and the identity and liveness of their holders."""
