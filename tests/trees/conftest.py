"""Collection rules for the tree tests."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    collect_ignore_glob = ["test_*.py"]  # trees need directories that can be opened
