"""The engine `juicefs-clone`: JuiceFS clones a directory by itself, without copying what its files hold.

The clone appears when it is complete. Each of its files is as it was at one moment, but not all at the same;
so for a `quiesced` snapshot the source is read before and looked at after, and `differing` compares the
clone with what was read: another machine's last writes may be in the clone and not yet seen here.

A clone has no hard links: each name has a file of its own. `clone_directory` puts them back.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from holdfast.errors import EngineUnavailable
from holdfast.fs import calls, probe
from holdfast.fs.probe import filesystem_kind
from holdfast.fs.trees.descent import Descent, shown, unreadable, unwritable
from holdfast.fs.trees.files import GONE
from holdfast.fs.trees.manifest import ManifestEntry, decode_entry, directory_of, raw_entries
from holdfast.fs.trees.way import joined

_PROGRAM = "juicefs"


def why_not(source: Path, beside: Path) -> str:
    """Why a directory cannot be cloned to a place; "" if it can."""
    if any(filesystem_kind(each) != probe.KIND for each in (source, beside)):
        return "it is not on JuiceFS"
    if calls.stat(source).st_dev != calls.stat(beside).st_dev:
        return "the snapshots are on another JuiceFS"
    try:
        done = subprocess.run(
            [_PROGRAM, "clone", "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return "the command `juicefs` is not to be found"
    return "" if done.returncode == 0 else "this `juicefs` has no command `clone`"


def clone_directory(source: str, payload: str) -> None:
    """Make the new directory `payload` a clone of `source`, with its hard links.

    `EngineUnavailable` if JuiceFS cannot: an extended attribute without content, for one, is too much for it
    if its records are in an SQL database. Other engines may do then.
    """
    try:
        done = subprocess.run(
            [_PROGRAM, "clone", "--preserve", source, payload],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise _unable(source, f"cannot run `{_PROGRAM}`: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        raise _unable(source, f"`juicefs clone` ended with status {done.returncode}: {said[0]}")
    with Descent(source) as way, Descent(payload) as one, Descent(payload) as other:
        for (first_path, first), *others in _linked(way):
            for path, name in others:
                try:
                    _link_again(one.enter(first_path), first, other.enter(path), name)
                except OSError as error:
                    if error.errno not in GONE:  # by now: that is noticed by whoever looks for changes
                        raise unwritable(other.where(path, name), error) from error


def _unable(source: str, why: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"the engine juicefs-clone cannot be used for {shown(source)}: {why}",
        engine="juicefs-clone",
        reason=why,
    )


def _linked(way: Descent) -> list[list[tuple[str, str]]]:
    """The directory and name of every file that has several names here, those of one file together."""
    found: dict[int, list[tuple[str, str]]] = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        try:
            here = way.enter(path)
            entries = [
                (name, calls.stat(name, dir_fd=here, follow_symlinks=False)) for name in calls.listdir(here)
            ]
        except OSError as error:
            if error.errno not in GONE:
                raise unreadable(way.where(path), error) from error
            continue
        waiting += [joined(path, name) for name, status in entries if stat.S_ISDIR(status.st_mode)]
        for name, status in entries:
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                found.setdefault(status.st_ino, []).append((path, name))
    return [names for names in found.values() if len(names) > 1]


def _link_again(first_directory: int, first: str, directory: int, name: str) -> None:
    """Make two names of the clone one file, if they are the same. The directory's mode and times stay."""
    one = calls.stat(first, dir_fd=first_directory, follow_symlinks=False)
    other = calls.stat(name, dir_fd=directory, follow_symlinks=False)
    if (one.st_size, one.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
        return  # changed between the cloning of the two
    before = calls.fstat(directory)
    writable = before.st_mode & stat.S_IWUSR
    if not writable:
        calls.chmod(directory, stat.S_IMODE(before.st_mode) | stat.S_IRWXU)
    calls.unlink(name, dir_fd=directory)
    calls.link(first, name, src_dir_fd=first_directory, dst_dir_fd=directory, follow_symlinks=False)
    if not writable:
        calls.chmod(directory, stat.S_IMODE(before.st_mode))
    calls.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- Whether a clone is what was read ----------------------------------------------------------------


def differing(clone: Descent, records: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The paths at which a clone is not what these records of a manifest say, by all that a status shows."""
    bodies = dict(records)
    return [
        shown(os.fsdecode(path))
        for directory, body in bodies.items()
        if directory_of(directory, body).kind == "d"
        for path in _differing_in(clone, directory, raw_entries(body), bodies)
    ]


def _differing_in(
    clone: Descent, directory: bytes, entries: Mapping[bytes, bytes], bodies: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    try:
        here = clone.enter(os.fsdecode(directory))
        present = {os.fsencode(name) for name in calls.listdir(here)}
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(clone.where(os.fsdecode(directory)), error) from error
        yield directory
        return
    start = directory + b"/" if directory else b""
    yield from (start + name for name in present - entries.keys() if start + name not in bodies)
    for name, raw in entries.items():
        entry = decode_entry(directory, raw)
        if entry.kind in "fl" and not _is_as_told(here, os.fsdecode(name), entry):
            yield entry.path


def _is_as_told(here: int, name: str, entry: ManifestEntry) -> bool:
    try:
        status = calls.stat(name, dir_fd=here, follow_symlinks=False)
        if entry.kind == "l":
            return (
                stat.S_ISLNK(status.st_mode)
                and os.fsencode(calls.readlink(name, dir_fd=here)) == entry.target
            )
    except OSError as error:
        if error.errno not in (*GONE, errno.EINVAL):
            raise unreadable(name, error) from error
        return False
    told = (entry.mode, entry.size, entry.mtime_ns)
    return stat.S_ISREG(status.st_mode) and told == (
        stat.S_IMODE(status.st_mode),
        status.st_size,
        status.st_mtime_ns,
    )
