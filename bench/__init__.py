"""Holdfast compared with its peers on this machine: `make bench`, or `python -m bench` from the root.

A suite is a module with a function `run(*, quick: bool) -> Report`. To add one, name it here.
"""

from __future__ import annotations

SUITES = {
    "locks": "bench.locks",
    "snapshots": "bench.snapshots",
    "startup": "bench.startup",
    "store": "bench.store",
    "issues": "bench.issues",
    "ledger": "bench.ledger",
    "writers": "bench.writers",
    "servers": "bench.servers",
    "scale": "bench.scale",
    "git": "bench.git",
    "conflicts": "bench.conflicts",
    "landing": "bench.landing",
    "web": "bench.web",
}
