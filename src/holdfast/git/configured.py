"""Programs that the configuration of a repository names, and that git would start: filters, merge drivers, helpers.

The user's own configuration, global or of the system, is trusted. `config` and `config.worktree` in the git directory,
and the files that these include, come with the repository: programs that they name need the user's approval, as
commands in our own records do (`docs/decisions/0012`). Those that Holdfast never needs are off (`git/program.py`).

Nearly every configuration names no such program, and a search of its bytes shows that: names of settings are always
written out. git is asked only if a suspicious word is found. Conditions of includes are assumed to hold: a branch that
Holdfast creates can make one true.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import NotFound, Refused, format_size
from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.fs.names import shortened
from holdfast.store import approvals

_CONFIG, _OF_WORKTREE = "config", "config.worktree"
_ALTERNATES = "objects/info/alternates"  # directories of objects elsewhere, which git reads, and touches
_MOST_BYTES = 1 << 20
_DEEPEST = 10  # includes, as with git
_MOST_FILES = 1000
_LONGEST_SHOWN = 200
_SUSPICIOUS = re.compile(
    rb"include|clean|smudge|process|driver|command|gitproxy|askpass|helper|uploadpack|receivepack|\bvcs|promisor"
    rb"|partialclone|protocol|proxy|bundle|recentobjects|refstorage|lfs(push)?url|\[(lfs|http|hook)"
    rb"|:[\"\\\s]*:",  # `::`, however it is quoted
    re.IGNORECASE,
)
_PROGRAMS = re.compile(
    r"""
    core\.(sshcommand|gitproxy|askpass|alternaterefscommand)
    | hook\..*\.(command|event)        # from git 2.54 on
    | filter\..*\.(clean|smudge|process)
    | merge\..*\.driver
    | credential\.(.*\.)?helper
    | remote\..*\.(uploadpack|receivepack|vcs|promisor|proxy|lfs(push)?url)
    | extensions\.partialclone          # git contacts this remote when an object is missing
    | protocol\.(.*\.)?allow            # a remote ext::... is a command
    | (fetch|transfer)\.bundleuri | bundle\..*
    | gc\.recentobjectshook
    # Where only some settings neither start, nor contact, nor write anything, all others count as programs.
    | http\.(?!(.*\.)?(extraheader|postbuffer|version|lowspeed(limit|time)|maxrequests|minsessions|useragent)$).*
    | lfs\.(?!repositoryformatversion$|(.*\.)?(access|locksverify)$|(fetch(in|ex)clude|concurrenttransfers)$).*
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,  # git keeps the case of the middle part, which git-lfs ignores
)
_HELPED = re.compile(r"remote\..*\.(push)?url|url\..*\.(push)?insteadof", re.DOTALL | re.IGNORECASE)
_TRANSPORT = re.compile(r"(url\.)?[a-z0-9]+::", re.IGNORECASE)  # x::y is y by way of the program git-remote-x
_PASSWORD = re.compile(r"://[^/@\s]*@")
_INCLUDES = re.compile(r"include\.path|includeif\..*\.path", re.DOTALL)

MERGE_DRIVER = (
    "holdfast hook merge %O %A %B %P || { git merge-file -q --marker-size=%L -L ours -L base -L theirs "
    "%A %O %B; exit 1; }"
)
"""The merge driver that `holdfast setup git` installs. If Holdfast cannot merge a file, or is no longer installed, git
merges it and writes conflict markers."""

List = Callable[[Path], bytes]
"""Returns the output of `git config --list -z` for one file, without its includes."""


class ConfiguredProgram(NamedTuple):
    """A setting that names a program, or that makes git contact, read or write what it otherwise would not."""

    key: str
    value: str

    @property
    def text(self) -> str:
        """The text that the user approves."""
        return f"git configuration {self.key}={self.value}"

    @property
    def command(self) -> str:
        """The value without the password in an address."""
        return _PASSWORD.sub("://...@", self.value)

    @property
    def shown(self) -> str:
        return shortened(f"{self.key} = {self.command}", _LONGEST_SHOWN)


Stamp = tuple[int, int, int, int] | None
_known: dict[tuple[Path, ...], dict[Path, Stamp]] = {}
"""The files of the configurations that this process has found approved, with their stamps at that time."""


def require_approved(common: Path, git_dir: Path, listed: List) -> None:
    """Raise `NotApproved` if git in this directory could start a program that the repository names and the user has not
    approved. Before `holdfast init`, everything passes."""
    files = _files(common, git_dir)
    if files in _known and all(_stamp(path) == stamp for path, stamp in _known[files].items()):
        return
    read: dict[Path, Stamp] = {}
    root = common / "holdfast"
    found = _found(common, files, listed, read)
    if found and calls.exists(root):
        approved = approvals.are_approved(root, (each.text for each in found))
        for each, known in zip(found, approved, strict=True):
            if not known:
                shown = f"{each.shown}, which the git configuration of {common} names,"
                approvals.require_command(root, each.text, shown, setting=each.key, command=each.command)
    _known[files] = read


def programs_of(common: Path, listed: List) -> list[ConfiguredProgram]:
    """All programs that the configuration of a repository and those of its worktrees name."""
    places = [common]
    with contextlib.suppress(NotFound), Directory.open(common / "worktrees") as directory:
        places += [common / "worktrees" / name for name in sorted(directory.directories())]
    files = dict.fromkeys(path for place in places for path in _files(common, place))
    return _found(common, files, listed, {})


def _found(common: Path, files: Iterable[Path], listed: List, read: dict[Path, Stamp]) -> list[ConfiguredProgram]:
    programs = [each for path in files for each in _programs_in(path, listed, read)]
    others = (_content(common / _ALTERNATES, read) or b"").split(b"\n")
    programs += [ConfiguredProgram(_ALTERNATES, os.fsdecode(each)) for each in others if each and each[:1] != b"#"]
    return list(dict.fromkeys(programs))


def _files(common: Path, git_dir: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((common / _CONFIG, common / _OF_WORKTREE, git_dir / _OF_WORKTREE)))


def _programs_in(
    path: Path, listed: List, read: dict[Path, Stamp], above: tuple[Path, ...] = ()
) -> Iterator[ConfiguredProgram]:
    """The programs that one file and its includes name. `read` collects the files that were examined: none is examined
    twice, because files that include each other often would keep us busy forever."""
    path = Path(calls.realpath(path.parent), path.name)  # what the file includes is relative to its directory
    if path in read and path not in above:
        return
    content = _content(path, read)
    if content is None or not _SUSPICIOUS.search(content):
        return
    for record in listed(path).split(b"\0"):
        key, _, value = os.fsdecode(record).partition("\n")
        if (_PROGRAMS.fullmatch(key) and value != MERGE_DRIVER) or _is_helped(key, value):
            yield ConfiguredProgram(key, value)
        elif _INCLUDES.fullmatch(key):
            if path in above or len(above) == _DEEPEST or len(read) >= _MOST_FILES:
                raise Refused(f"the git configuration {path} includes too many files", path=str(path))
            if value.startswith("%("):
                raise Refused(f"the git configuration {path} includes {value}", path=str(path))
            yield from _programs_in(path.parent / os.path.expanduser(value), listed, read, (*above, path))


def _content(path: Path, read: dict[Path, Stamp]) -> bytes | None:
    """The content of a file that git reads; None if there is none."""
    read[path] = _stamp(path)
    try:
        content = calls.read_small(os.fspath(path), _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Refused(f"cannot read the git configuration {path}: {error.strerror}", path=str(path)) from error
    if len(content) >= _MOST_BYTES:
        limit = format_size(_MOST_BYTES)
        raise Refused(f"the git configuration {path} is too large; the limit is {limit}", path=str(path))
    return content


def _is_helped(key: str, value: str) -> bool:
    """Whether a setting makes a program the transport of a remote, or stores references elsewhere."""
    if key == "extensions.refstorage":
        return ":" in value
    return _HELPED.fullmatch(key) is not None and any(map(_TRANSPORT.match, (key, value)))


def _stamp(path: Path) -> Stamp:
    try:
        found = calls.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
