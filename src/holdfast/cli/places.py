"""Where things are kept: a flag, over the environment, over the habit of the platform."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import UsageFailure

STORE_VARIABLE = "HOLDFAST_STORE"
DATA_VARIABLES = ("HOLDFAST_DATA_DIR", "AGENCY_DATA_DIR")


def data_directory(flag: str | None, environment: Mapping[str, str]) -> Path:
    """The directory that holds the locks of repositories."""
    chosen = [flag, *(environment.get(name) for name in DATA_VARIABLES)]
    for each in chosen:
        if each:
            return Path(each)
    return _platform_data(environment) / "holdfast"


def store_address(environment: Mapping[str, str]) -> str | None:
    """Where the ledger and the issues are kept, if the environment says so: before what was settled."""
    return environment.get(STORE_VARIABLE) or None


def _platform_data(environment: Mapping[str, str]) -> Path:
    xdg = environment.get("XDG_DATA_HOME", "")
    if os.path.isabs(xdg):  # its standard: a relative one is to be ignored
        return Path(xdg)
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        raise UsageFailure(
            "there is no home directory to keep data in",
            hint="Name a place: --data-dir, or HOLDFAST_DATA_DIR.",
        )
    if sys.platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    return home / ".local" / "share"


def temporary_directory(environment: Mapping[str, str]) -> Path:
    """The directory for what need not last."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if environment.get(name):
            return Path(environment[name])
    return Path("C:\\Temp" if sys.platform == "win32" else "/tmp")
