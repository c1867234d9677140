"""What is in the directory of a snapshot's tree."""

from __future__ import annotations

PAYLOAD = "payload"
"""The captured directory."""
MANIFEST = "manifest"
"""What every entry of it is."""
READY = ".READY"
"""Written last: a tree that has it is complete. Inside of the payload a file of this name is just a file."""
HOMES = "homes"
"""Which of its directories are in other trees, and where; not there if none is."""
REMNANTS = "remnants"
"""Beside the directory of the trees: what is left of those whose snapshots are gone, for others need it."""
