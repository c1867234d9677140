"""Footprints: the things that each file system call reads and changes, and the conflicts between tasks.

A call touches *things*: a name in a directory, the content of an inode, the lock on it, the list of names in a
directory, the link count of an inode. Two calls commute if they touch no common thing, or only read it. Adding and
removing *different* names of one directory also commute: they conflict only with calls that read the list, or the
link count.

Not modelled: times, and the size and link count of a directory.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from proof.explorer.files import Descriptors, Found, Label, Tree, is_descriptor
from proof.interpose import Attempt

if sys.platform == "win32":
    LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8  # there is no flock
else:
    import fcntl

    LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN

Thing = tuple[str, Label, str]

_COUNTED = ("list", "links")


class Footprint(NamedTuple):
    """The things that one call would read and change if it were made now."""

    reads: tuple[Thing, ...] = ()
    writes: tuple[Thing, ...] = ()
    boundless: bool = False

    @property
    def changes_files(self) -> bool:
        """Whether the call changes the directory; locks do not count."""
        return self.boundless or any(kind != "lock" for kind, _, _ in self.writes)

    def conflicts_with(self, other: Footprint) -> bool:
        """Whether the order of two calls may matter."""
        if self.boundless or other.boundless:
            return True
        written = [thing for thing in self.writes if thing[0] not in _COUNTED]
        return (
            any(thing in other.writes for thing in written)
            or any(thing in other.reads for thing in self.writes)
            or any(thing in self.reads for thing in other.writes)
        )


NOTHING = Footprint()


class Conflicts:
    """The things on which tasks have conflicted, and the tasks that have slept, over all executions so far.

    New conflicts count only from the next `absorb` on: each search uses one fixed set.
    With `everything`, all calls of different tasks conflict.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self._readers: dict[Thing, int] = {}
        self._writers: dict[Thing, int] = {}
        self._things: set[Thing] = set()
        self._found: set[Thing] = set()
        self._everything = everything
        self._found_boundless = False
        self._sleepers: set[int] = set()
        self._found_sleepers: set[int] = set()

    def note(self, task: int, footprint: Footprint, *, sleeps: bool) -> None:
        """Record the next move of a task."""
        me = 1 << task
        if sleeps:
            self._found_sleepers.add(task)
        self._found_boundless |= footprint.boundless
        for thing in footprint.reads:
            self._readers[thing] = self._readers.get(thing, 0) | me
            if self._writers.get(thing, 0) & ~me:
                self._found.add(thing)
        for thing in footprint.writes:
            self._writers[thing] = self._writers.get(thing, 0) | me
            others = self._readers.get(thing, 0)
            if thing[0] not in _COUNTED:
                others |= self._writers[thing]
            if others & ~me:
                self._found.add(thing)

    def absorb(self) -> bool:
        """Make the new conflicts count; return whether there were any."""
        new = not self._found <= self._things or not self._found_sleepers <= self._sleepers
        new |= self._found_boundless > self._everything
        self._things |= self._found
        self._sleepers |= self._found_sleepers
        self._everything |= self._found_boundless
        return new

    def concern(self, things: Iterable[Thing]) -> bool:
        """Whether tasks conflict on any of these things."""
        return self._everything or not self._things.isdisjoint(things)

    def sleeps(self, task: int) -> bool:
        """Whether a task ever sleeps."""
        return task in self._sleepers


class Footprints:
    """Predicts the footprint of a call from the current directory and locks."""

    def __init__(self, tree: Tree, descriptors: Descriptors) -> None:
        self._tree = tree
        self._descriptors = descriptors
        self._by_name: dict[str, Callable[[Attempt], Footprint]] = {
            "open": self._open,
            "open_without_links": self._open,
            "close": self._close,
            "read": self._read,
            "lseek": self._read,
            "fstat": self._stat,
            "write": self._write,
            "ftruncate": self._write,
            "clone": self._clone,
            "stat": self._stat,
            "readlink": self._stat,
            "scandir": self._list,
            "listdir": self._list,
            "mkdir": lambda attempt: self._create(attempt, 0),
            "symlink": lambda attempt: self._create(attempt, 1),
            "link": self._link,
            "rename": self._rename,
            "replace": self._rename,
            "rename_noreplace": self._rename,
            "rename_exchange": self._rename,
            "unlink": self._remove,
            "rmdir": self._remove,
            "flock": self._lock,
            "flock_interruptible": self._lock,
        }

    def of(self, attempt: Attempt) -> Footprint:
        """The footprint of this call."""
        predict = self._by_name.get(attempt.name)
        return NOTHING if predict is None else predict(attempt)  # no task can observe a sync

    def of_end(self, task: int) -> Footprint:
        """The footprint of the end of a task: its locks."""
        return Footprint(writes=tuple(("lock", label, "") for label in self._descriptors.locked_by(task)))

    def is_blocked(self, attempt: Attempt) -> bool:
        """Whether this call would wait for another task's lock."""
        if attempt.name not in ("flock", "flock_interruptible"):
            return False
        number, operation = attempt.arguments
        if operation & (LOCK_NB | LOCK_UN) or not is_descriptor(number):
            return False
        return bool(self._descriptors.lockers(number, shared=bool(operation & LOCK_SH)))

    # --- Footprints by kind of call ------------------------------------------------------------------

    def _open(self, attempt: Attempt) -> Footprint:
        flags = attempt.flags
        found = self._find(attempt, 0, follow=not flags & getattr(os, "O_NOFOLLOW", 0))
        if found.label is None and flags & os.O_CREAT:
            return _changing(found)
        if found.label is not None and flags & os.O_TRUNC and not flags & os.O_EXCL:
            return _looking(found, writes=[("content", found.label, "")])
        return _looking(found)

    def _close(self, attempt: Attempt) -> Footprint:
        number = attempt.arguments[0]
        locked = self._descriptors.is_locked(number)
        return Footprint(writes=(("lock", self._label(number), ""),)) if locked else NOTHING

    def _read(self, attempt: Attempt) -> Footprint:
        if attempt.name == "lseek" and attempt.arguments[2] != os.SEEK_END:
            return NOTHING  # only the position of its own descriptor
        return Footprint(reads=(("content", self._label(attempt.arguments[0]), ""),))

    def _write(self, attempt: Attempt) -> Footprint:
        return Footprint(writes=(("content", self._label(attempt.arguments[0]), ""),))

    def _clone(self, attempt: Attempt) -> Footprint:
        target, source = (self._label(each) for each in attempt.arguments)
        return Footprint((("content", source, ""),), (("content", target, ""),))

    def _stat(self, attempt: Attempt) -> Footprint:
        follow = attempt.name == "stat" and attempt.options.get("follow_symlinks", True)
        found = self._find(attempt, 0, follow=follow)
        if found.label is None or (found.status is not None and stat.S_ISDIR(found.status.st_mode)):
            return _looking(found)
        return _looking(found, [("content", found.label, ""), ("links", found.label, "")])

    def _list(self, attempt: Attempt) -> Footprint:
        found = self._find(attempt, 0, follow=True)
        return _looking(found) if found.label is None else _looking(found, [("list", found.label, "")])

    def _create(self, attempt: Attempt, argument: int) -> Footprint:
        found = self._find(attempt, argument, follow=False)
        return _changing(found) if found.label is None else _looking(found)

    def _link(self, attempt: Attempt) -> Footprint:
        source = self._find(attempt, 0, follow=attempt.options.get("follow_symlinks", True))
        target = self._find(attempt, 1, follow=False)
        if source.label is None or target.label is not None:
            return _both(_looking(source), _looking(target))
        links = Footprint(writes=(("links", source.label, ""),))
        return _both(_both(_looking(source), links), _changing(target))

    def _rename(self, attempt: Attempt) -> Footprint:
        source, target = (self._find(attempt, each, follow=False) for each in (0, 1))
        refused = target.label is None if attempt.name == "rename_exchange" else False
        refused |= attempt.name == "rename_noreplace" and target.label is not None
        if source.label is None or target.parent is None or refused:
            return _both(_looking(source), _looking(target))
        return _both(_changing(source), _changing(target))

    def _remove(self, attempt: Attempt) -> Footprint:
        found = self._find(attempt, 0, follow=False)
        if found.label is None:
            return _looking(found)
        changed = _changing(found)
        if attempt.name == "rmdir":  # succeeds only if it is empty
            return _both(changed, Footprint(reads=(("list", found.label, ""),)))
        return changed

    def _lock(self, attempt: Attempt) -> Footprint:
        number, operation = attempt.arguments
        thing = ("lock", self._label(number), "")
        if operation & LOCK_UN:
            return Footprint(writes=(thing,)) if self._descriptors.is_locked(number) else NOTHING
        taken = self._descriptors.lockers(number, shared=bool(operation & LOCK_SH))
        fails = taken and operation & LOCK_NB and not self._descriptors.is_locked(number)
        return Footprint(reads=(thing,)) if fails else Footprint(writes=(thing,))

    # --- Path lookup ---------------------------------------------------------------------------------

    def _label(self, number: int) -> Label:
        return self._descriptors[number].label

    def _find(self, attempt: Attempt, argument: int, *, follow: bool) -> Found:
        path = attempt.arguments[argument]
        if is_descriptor(path):
            opened = self._descriptors[path]
            return Found((), None, opened.label, os.fstat(opened.real))
        base = base_of(attempt, argument)
        if base is not None and not os.path.isabs(path):
            return self._tree.look_up(os.fsdecode(path), follow=follow, base=self._descriptors[base])
        relative = self._tree.relative(path)
        if relative is None:
            return Found((), None, None, None, boundless=True)
        return self._tree.look_up(relative, follow=follow)


def descriptors_of(attempt: Attempt) -> list[int]:
    """Our descriptors among the arguments of a call."""
    first = attempt.arguments if attempt.name == "clone" else attempt.arguments[:1]
    return [each for each in (*first, *attempt.options.values()) if is_descriptor(each)]


def paths_of(attempt: Attempt) -> list[Any]:
    """The paths that a call names."""
    return [each for each in attempt.arguments[:2] if isinstance(each, str | os.PathLike)]


def base_of(attempt: Attempt, argument: int) -> int | None:
    """The open directory in which a path argument of a call is looked up, if there is one."""
    options = attempt.options
    if attempt.name in ("link", "rename", "replace", "rename_noreplace", "rename_exchange"):
        number: Any = options.get(("src_dir_fd", "dst_dir_fd")[argument])
    else:
        number = options.get("dir_fd")
    return number if is_descriptor(number) else None


def _looking(found: Found, reads: Iterable[Thing] = (), writes: Iterable[Thing] = ()) -> Footprint:
    names = tuple(("name", label, name) for label, name in found.looked_up)
    return Footprint((*names, *reads), tuple(writes), found.boundless)


def _changing(found: Found) -> Footprint:
    """The last name of a path appears, disappears, or refers to another inode."""
    if found.parent is None:
        return _looking(found)
    last = found.looked_up[-1]
    writes: list[Thing] = [("name", *last), ("list", found.parent, "")]
    if found.label is not None:
        writes.append(("links", found.label, ""))
    return _looking(found._replace(looked_up=found.looked_up[:-1]), writes=writes)


def _both(first: Footprint, second: Footprint) -> Footprint:
    return Footprint(first.reads + second.reads, first.writes + second.writes, first.boundless or second.boundless)
