"""JuiceFS: how one is mounted, and what of that stands against keeping shared records on it.

A volume may be mounted by many machines. Locks (flock) and changes go through its one metadata service, so
they reach all of them. But each mount may remember names and attributes for a while, for a second as it
comes, and then a record that another machine has replaced is still read as it was: a lease could be granted
twice. The mount tells its settings in a file at its root, to root alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.fs import calls, durable, strictjson
from holdfast.fs.mounts import mount_point

KIND = "fuse.juicefs"
SAFE_OPTIONS = "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0"
"""How to mount it such that every machine sees what the others have done, at once."""

UNKNOWN = (
    "it is a JuiceFS whose settings cannot be read (only root may): if this mount remembers names, as it "
    f"does by default, locks do not help against old records (mount with {SAFE_OPTIONS})"
)
"""What to say of a mount that does not tell."""

_CONFIGS = (".config", ".jfs.config")
_OWN_INODES = 0x7FFFFFFF00000000
"""The files by which a mount tells of itself have higher inodes than any file in the volume."""
_REMEMBERED = {
    "AttrTimeout": "attr-cache",
    "EntryTimeout": "entry-cache",
    "DirEntryTimeout": "dir-entry-cache",
    "NegEntryTimeout": "negative-entry-cache",
}


class Settings(NamedTuple):
    """What a mount does by itself. `remembers` are its caches of names and attributes, in seconds."""

    remembers: dict[str, float]
    writes_back: bool


def settings_of(path: Path) -> Settings | None:
    """How the JuiceFS at `path` is mounted; None if it does not tell."""
    point = mount_point(path)
    for name in _CONFIGS if point is not None else ():
        config = Path(str(point)) / name
        try:
            if calls.stat(config, follow_symlinks=False).st_ino < _OWN_INODES:
                continue  # a file that somebody keeps there
            return _understood(strictjson.decode(durable.read(config, limit=1 << 20), source=name))
        except (OSError, Failure, AttributeError, KeyError, TypeError, ValueError):
            continue
    return None


def _understood(told: object) -> Settings:
    if not isinstance(told, dict):
        raise TypeError("not the settings of a mount")
    seconds = {option: float(told.get(name) or 0) / 1e9 for name, option in _REMEMBERED.items()}
    seconds["open-cache"] = float(told["Meta"].get("OpenCache") or 0) / 1e9
    seconds["readdir-cache"] = seconds["attr-cache"] if told.get("ReaddirCache") else 0.0
    remembers = {option: value for option, value in seconds.items() if value > 0}
    return Settings(remembers, bool(told["Chunk"].get("Writeback")))


def troubles(path: Path) -> list[str]:
    """What stands against keeping records that several machines share on this mount, in words."""
    settings = settings_of(path)
    if settings is None:
        return [UNKNOWN]
    found = []
    if settings.remembers:
        shown = ", ".join(f"{option} {value:g}s" for option, value in sorted(settings.remembers.items()))
        found.append(
            f"it is a JuiceFS mounted so that it remembers names ({shown}): what other machines have "
            f"written is seen too late (mount with {SAFE_OPTIONS})"
        )
    if settings.writes_back:
        found.append(
            "it is a JuiceFS mounted with --writeback: what was synced is lost with this machine, and other "
            "machines cannot read it until it is uploaded"
        )
    return found
