"""Try every state that a power cut may leave behind: record an operation once, then take it apart.

The operation of a `Scenario` runs once, for real, and its calls are recorded. Then for a cut after
each of them every state that may be on the disk is built and checked. The rules are those that
POSIX promises, not what one file system happens to do:

1. What was there before the operation is on the disk.
2. A file's content is on the disk as of its last fsync. Of what was written or cut off since, any
   part may be there too, in order, down to half of one write. So a new file may be empty.
3. A change of names is on the disk once a directory that it touches was synced. Of the other
   changes any subset may be there, as far as each is possible after those before it.
4. A rename is one change, both halves or none, also between two directories.
5. A name that is on the disk has its inode, even if the name it was made under is not.

Syncing a file does not sync its name. Not modelled: writes of one file that overtake each other,
and file systems that show zeros or old blocks where content did not arrive.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from holdfast.testing.crash import (
    Attempt,
    Call,
    Ending,
    Outcome,
    Report,
    Scenario,
    fresh,
    interposed,
    judge,
    listening,
    mark,
    scratch,
)

__all__ = ["Disk", "State", "Sync", "Trace", "build", "mark", "power_cuts", "record", "redundant_syncs"]

LIMIT = 4096
"""How many sets of names, and how many contents of each, are tried per cut before the cut is capped."""

T = TypeVar("T")
Names = dict[int, dict[str, int]]
"""The names in each directory, and the node that each stands for."""

_ROOT = 0


# --- What can be seen in a directory ----------------------------------------------------------------


class Node(NamedTuple):
    """What a name stands for, apart from its content. A directory's content is its names."""

    kind: int  # stat.S_IFREG, S_IFDIR or S_IFLNK
    mode: int
    target: str = ""


class Entry(NamedTuple):
    """One path of a state. `twin` is the first path with the same inode: a hard link, if not itself."""

    path: str
    node: Node
    content: bytes
    twin: str


State = tuple[Entry, ...]


def build(state: State, directory: Path) -> None:
    """Make the empty `directory` hold `state`."""
    for path, node, content, twin in state:
        here = f"{directory}/{path}"
        if twin != path:
            os.link(f"{directory}/{twin}", here, follow_symlinks=False)
        elif node.kind == stat.S_IFDIR:
            os.mkdir(here, node.mode)
        elif node.kind == stat.S_IFLNK:
            os.symlink(node.target, here)
        else:
            descriptor = os.open(here, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), node.mode)
            os.write(descriptor, content)
            os.close(descriptor)


def _describe(state: State) -> str:
    shown = {stat.S_IFDIR: "/", stat.S_IFLNK: "@"}
    lines = [each.path + shown.get(each.node.kind, f"={each.content!r}") for each in state]
    return ", ".join(lines) or "(empty)"


# --- What happened ----------------------------------------------------------------------------------


class Edit(NamedTuple):
    """A change of a file's content: `data` written at `offset`; None stands for a cut at `offset`."""

    file: int
    offset: int
    data: bytes | None

    def applied(self, content: bytes) -> bytes:
        start = content[: self.offset].ljust(self.offset, b"\0")
        return start if self.data is None else start + self.data + content[self.offset + len(self.data) :]

    def halved(self) -> Edit:
        return self if self.data is None else self._replace(data=self.data[: len(self.data) // 2])


class Cell(NamedTuple):
    """One name, the node that it stood for and the one that it stands for now; None for nothing."""

    directory: int
    name: str
    before: int | None
    after: int | None
    replacing: bool = False  # what stood there does not matter


class Naming(NamedTuple):
    """A change of names that happens as a whole or not at all."""

    cells: tuple[Cell, ...]

    def possible(self, names: Names) -> bool:
        """Whether it can happen where the names are these: the sources are there, the targets free."""
        kept = {cell.after for cell in self.cells}
        for directory, name, before, _, replacing in self.cells:
            present = names[directory].get(name)
            if present != before and not replacing:
                return False
            if present is not None and present not in kept and names.get(present):
                return False  # a directory that is not empty can be neither removed nor replaced
        return True

    def apply(self, names: Names) -> None:
        for directory, name, before, after, _ in self.cells:
            if after is not None:
                names[directory][name] = after
            elif names[directory].get(name) == before:
                del names[directory][name]


class Sync(NamedTuple):
    """The contents of files, or the names in directories, were brought to the disk."""

    nodes: tuple[int, ...]


class Mark(NamedTuple):
    """A part of the operation announced that it is done; None: the operation returned."""

    label: str | None


class Step(NamedTuple):
    """One thing that happened, and the call that made it happen."""

    event: Edit | Naming | Sync | Mark
    call: Call | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded operation: what was there before, and what happened to it, in order."""

    nodes: Mapping[int, Node]
    names: Names
    contents: Mapping[int, bytes]
    steps: tuple[Step, ...]

    def without(self, step: Step) -> Trace:
        """The same operation, had it left out this step."""
        return Trace(self.nodes, self.names, self.contents, tuple(s for s in self.steps if s is not step))


# --- What may be on the disk ------------------------------------------------------------------------


class Disk:
    """What is certainly on the disk, and what may be there as well."""

    def __init__(self, trace: Trace, limit: int) -> None:
        self.capped = ""
        self._nodes = trace.nodes
        self._files = {number for number, node in trace.nodes.items() if node.kind == stat.S_IFREG}
        self._limit = limit
        self._names: Names = {directory: dict(names) for directory, names in trace.names.items()}
        self._unsynced_names: list[tuple[Naming, bool]] = []  # in order; True: on the disk for certain
        self._contents = dict(trace.contents)
        self._edits: dict[int, list[Edit]] = {}

    def take(self, event: Edit | Naming | Sync | Mark) -> None:
        """Let one more thing happen."""
        if isinstance(event, Edit):
            self._edits.setdefault(event.file, []).append(event)
        elif isinstance(event, Naming):
            self._unsynced_names.append((event, False))
        elif isinstance(event, Sync):
            for node in event.nodes:
                if node in self._names:
                    self._sync_names(node)
                else:
                    self._contents[node] = self._possible_contents(node)[-1]
                    self._edits.pop(node, None)

    def states(self) -> Iterator[State]:
        """Every state that a power cut may leave now. Says in `capped` if these are not all."""
        self.capped = ""
        possible = {file: self._possible_contents(file) for file in self._files}
        for tree in self._trees():
            files = sorted(self._files.intersection(node for _, node in tree))
            for contents in self._combinations([possible[file] for file in files], "contents of files"):
                yield self._seen(tree, dict(zip(files, contents, strict=True)))

    def latest(self) -> State:
        """The state that everybody sees as long as there is no power cut."""
        names = self._named([True] * len(self._unsynced_names))
        contents = {file: self._possible_contents(file)[-1] for file in self._files}
        return self._seen(tuple(_walk(names)), contents)

    def _sync_names(self, directory: int) -> None:
        self._unsynced_names = [
            (naming, certain or any(cell.directory == directory for cell in naming.cells))
            for naming, certain in self._unsynced_names
        ]
        while self._unsynced_names and self._unsynced_names[0][1]:
            self._unsynced_names.pop(0)[0].apply(self._names)

    def _possible_contents(self, file: int) -> list[bytes]:
        """What the file may hold; the last is all that was written."""
        content = self._contents.get(file, b"")
        possible = {content: None}
        for edit in self._edits.get(file, ()):
            half = edit.halved().applied(content)
            content = edit.applied(content)
            possible.pop(content, None)
            possible |= {half: None} if half != content else {}
            possible[content] = None
        return list(possible)

    def _trees(self) -> Iterator[tuple[tuple[str, int], ...]]:
        """Every tree that the names may form, each once."""
        seen = set()
        choices = [[True] if certain else [False, True] for _, certain in self._unsynced_names]
        for chosen in self._combinations(choices, "subsets of changed names"):
            tree = tuple(_walk(self._named(chosen)))
            if tree not in seen:
                seen.add(tree)
                yield tree

    def _named(self, chosen: Iterable[bool]) -> Names:
        names = {directory: dict(entries) for directory, entries in self._names.items()}
        for (naming, certain), persisted in zip(self._unsynced_names, chosen, strict=True):
            if certain or (persisted and naming.possible(names)):
                naming.apply(names)
        return names

    def _seen(self, tree: tuple[tuple[str, int], ...], contents: Mapping[int, bytes]) -> State:
        twins: dict[int, str] = {}
        return tuple(
            Entry(path, self._nodes[node], contents.get(node, b""), twins.setdefault(node, path))
            for path, node in tree
        )

    def _combinations(self, choices: list[list[T]], what: str) -> Iterable[tuple[T, ...]]:
        """All combinations; if they are too many, the first, the last and a sample, and `capped` says so."""
        total = prod(map(len, choices))
        if total <= self._limit:
            return product(*choices)
        self.capped = f"{self._limit} of {total} {what}"
        chance = random.Random(total)
        sample = [tuple(map(chance.choice, choices)) for _ in range(self._limit - 2)]
        return [tuple(each[0] for each in choices), tuple(each[-1] for each in choices), *sample]


def _walk(names: Names, directory: int = _ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each path and its node, directories before what is in them."""
    for name, node in sorted(names[directory].items()):
        yield prefix + name, node
        if node in names:
            yield from _walk(names, node, f"{prefix}{name}/")


# --- Sweeps -----------------------------------------------------------------------------------------


def power_cuts(scenario: Scenario, *, limit: int = LIMIT) -> Report:
    """Record the operation once, then check every state that a power cut after each call may leave.

    The report's points are the different states. A state that may be left by several cuts is checked
    once for each set of promises (marks, and whether the operation had returned).
    """
    with _recorded(scenario) as (trace, base):
        return _explore(trace, scenario, base, limit)


def redundant_syncs(scenario: Scenario, *, limit: int = LIMIT) -> list[Call]:
    """The syncs that the operation could do without, for all that the scenario's check can tell.

    Each one returned is either superfluous, or a promise that the check does not hold it to.
    """
    with _recorded(scenario) as (trace, base):
        syncs = [(step, step.call) for step in trace.steps if isinstance(step.event, Sync) and step.call]
        return [call for step, call in syncs if _unharmed(trace.without(step), scenario, base, limit)]


def record(scenario: Scenario, directory: Path) -> Trace:
    """Prepare the empty `directory`, run the operation there and record what happens."""
    scenario.prepare(directory)
    recorder = _Recorder(directory)
    with interposed(recorder), listening(recorder.mark):
        scenario.operate(directory)
    recorder.mark(None)
    trace = recorder.trace()
    _verify(trace, directory)
    return trace


@contextmanager
def _recorded(scenario: Scenario) -> Iterator[tuple[Trace, Path]]:
    with scratch() as base:
        with fresh(base) as directory:
            trace = record(scenario, directory)
        yield trace, base


def _unharmed(trace: Trace, scenario: Scenario, base: Path, limit: int) -> bool:
    report = _explore(trace, scenario, base, limit, enough=1)
    if report.capped and not report.violations:
        raise RuntimeError(f"cannot tell without trying everything: {report}")
    return not report.violations


def _explore(
    trace: Trace, scenario: Scenario, base: Path, limit: int, *, enough: int | None = None
) -> Report:
    """Check the states of every cut, up to `enough` violations."""
    report = Report(type(scenario).__name__)
    checked: set[tuple[tuple[str, ...], bool, State]] = set()
    report.calls.update(step.call.name for step in trace.steps if step.call is not None)
    for outcome, disk in _cuts(trace, limit):
        for state in disk.states():
            case = (outcome.marks, outcome.acknowledged, state)
            if case in checked:
                continue
            checked.add(case)
            with fresh(base) as directory:
                build(state, directory)
                problem = judge(scenario, directory, outcome)
            report.add(outcome, problem, _describe(state) if problem else "")
            if len(report.violations) == enough:
                return report
        if disk.capped:
            report.capped.append(f"{outcome}: {disk.capped}")
    return report


def _cuts(trace: Trace, limit: int) -> Iterator[tuple[Outcome, Disk]]:
    """Each moment at which the power may be cut, with the disk as it is then."""
    disk = Disk(trace, limit)
    marks: tuple[str, ...] = ()
    yield Outcome(Ending.POWER_CUT, "power cut before the first call"), disk
    for event, call in trace.steps:
        disk.take(event)
        acknowledged = event == Mark(None)
        if isinstance(event, Mark) and event.label is not None:
            marks += (event.label,)
        what = "returned, then power cut; the last was" if acknowledged else "power cut after"
        yield Outcome(Ending.POWER_CUT, what, call, None, marks, acknowledged), disk


# --- Recording --------------------------------------------------------------------------------------


class _Recorder:
    """Makes each call and notes what it changed.

    Files and directories are told apart by inode, so it does not matter through which path or
    descriptor they are reached, nor who opened that. What is not below the directory is ignored.
    """

    def __init__(self, directory: Path) -> None:
        self._count = 0
        self._call: Call | None = None
        self._nodes: dict[int, Node] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._contents: dict[int, bytes] = {}
        self._names: Names = {}
        self._steps: list[Step] = []
        self._device = os.stat(directory).st_dev
        self._survey(directory, self._add(os.stat(directory)))
        self._first_names = {number: dict(names) for number, names in self._names.items()}

    def __call__(self, attempt: Attempt) -> Any:
        self._count += 1
        result = attempt.perform()
        note = self._NOTES.get(attempt.name)
        if note is not None:
            self._call = attempt.numbered(self._count)
            note(self, attempt, result)
        return result

    def mark(self, label: str | None) -> None:
        self._steps.append(Step(Mark(label), self._call))

    def trace(self) -> Trace:
        new: Names = {number: {} for number in self._names if number not in self._first_names}
        return Trace(self._nodes, self._first_names | new, self._contents, tuple(self._steps))

    def _survey(self, directory: Path, number: int) -> None:
        for path in sorted(directory.iterdir()):
            status = path.lstat()
            known = self._number(status)  # of a file that has several names
            target = os.readlink(path) if path.is_symlink() else ""
            node = self._add(status, target) if known is None else known
            self._names[number][path.name] = node
            if node in self._names:
                self._survey(path, node)
            elif self._nodes[node].kind == stat.S_IFREG:
                self._contents[node] = path.read_bytes()

    def _add(self, status: os.stat_result, target: str = "") -> int:
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ValueError("only files, directories and symbolic links can be recorded")
        number = len(self._nodes)
        self._nodes[number] = Node(kind, stat.S_IMODE(status.st_mode), target)
        self._numbers[status.st_dev, status.st_ino] = number
        if kind == stat.S_IFDIR:
            self._names[number] = {}
        return number

    def _number(self, status: os.stat_result) -> int | None:
        return self._numbers.get((status.st_dev, status.st_ino))

    def _place(self, attempt: Attempt, argument: int) -> tuple[int, str] | None:
        """The directory and the name in it that an argument means; None if that is not one of ours."""
        parent, name = os.path.split(os.fsdecode(attempt.arguments[argument]).rstrip("/"))
        directory = self._number(os.stat(parent or ".", dir_fd=_descriptor(attempt, argument)))
        return None if directory is None else (directory, name)

    def _at(self, place: tuple[int, str]) -> int | None:
        return self._names[place[0]].get(place[1])

    def _name(self, *cells: Cell) -> None:
        naming = Naming(cells)
        naming.apply(self._names)
        self._steps.append(Step(naming, self._call))

    def _edit(self, descriptor: int, offset: int, data: bytes | None) -> None:
        file = self._number(os.fstat(descriptor))
        if file is not None:
            self._steps.append(Step(Edit(file, offset, data), self._call))

    def _opened(self, attempt: Attempt, descriptor: int) -> None:
        place = self._place(attempt, 0)
        if attempt.flags & os.O_CREAT and place is not None and self._at(place) is None:
            self._name(Cell(*place, None, self._add(os.fstat(descriptor))))
        elif attempt.flags & os.O_TRUNC:
            self._edit(descriptor, 0, None)

    def _written(self, attempt: Attempt, size: int) -> None:
        descriptor, content = attempt.arguments
        if self._number(os.fstat(descriptor)) is not None:
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            self._edit(descriptor, end - size, bytes(memoryview(content)[:size]))

    def _cut(self, attempt: Attempt, _: None) -> None:
        descriptor, size = attempt.arguments
        self._edit(descriptor, size, None)

    def _cloned(self, attempt: Attempt, _: None) -> None:
        target, source = attempt.arguments
        position = os.lseek(source, 0, os.SEEK_CUR)
        os.lseek(source, 0, os.SEEK_SET)
        self._edit(target, 0, os.read(source, os.fstat(source).st_size))
        os.lseek(source, position, os.SEEK_SET)

    def _synced(self, attempt: Attempt, _: None) -> None:
        node = self._number(os.fstat(attempt.arguments[0]))
        if node is not None:
            self._steps.append(Step(Sync((node,)), self._call))

    def _synced_all(self, attempt: Attempt, _: None) -> None:
        if os.fstat(attempt.arguments[0]).st_dev == self._device:
            self._steps.append(Step(Sync(tuple(self._nodes)), self._call))

    def _made(self, attempt: Attempt, _: None, *, argument: int = 0, target: str = "") -> None:
        place = self._place(attempt, argument)
        if place is not None:
            status = os.lstat(attempt.arguments[argument], dir_fd=_descriptor(attempt, argument))
            self._name(Cell(*place, None, self._add(status, target)))

    def _symlinked(self, attempt: Attempt, _: None) -> None:
        self._made(attempt, None, argument=1, target=os.fsdecode(attempt.arguments[0]))

    def _removed(self, attempt: Attempt, _: None) -> None:
        place = self._place(attempt, 0)
        if place is not None:
            self._name(Cell(*place, self._at(place), None))

    def _linked(self, attempt: Attempt, _: None) -> None:
        source, target = self._place(attempt, 0), self._place(attempt, 1)
        if source is not None and target is not None:
            self._name(Cell(*target, None, self._at(source)))

    def _renamed(self, attempt: Attempt, _: None) -> None:
        source, target = self._place(attempt, 0), self._place(attempt, 1)
        if source is None or target is None:
            return
        node, other = self._at(source), self._at(target)
        if attempt.name == "rename_exchange":
            self._name(Cell(*source, node, other), Cell(*target, other, node))
        elif node != other:  # of two names of one inode, rename keeps both
            replacing = attempt.name != "rename_noreplace"
            self._name(Cell(*source, node, None), Cell(*target, other, node, replacing))

    _NOTES: ClassVar[Mapping[str, Callable[[_Recorder, Attempt, Any], None]]] = {
        "open": _opened,
        "write": _written,
        "ftruncate": _cut,
        "clone": _cloned,
        "fsync": _synced,
        "sync_directory": _synced,
        "sync_filesystem": _synced_all,
        "link": _linked,
        "rename": _renamed,
        "replace": _renamed,
        "rename_noreplace": _renamed,
        "rename_exchange": _renamed,
        "unlink": _removed,
        "rmdir": _removed,
        "mkdir": _made,
        "symlink": _symlinked,
    }


def _descriptor(attempt: Attempt, argument: int) -> int | None:
    """The open directory in which a path argument is looked up; None: the current one."""
    options = attempt.options
    own = options.get("dst_dir_fd" if argument else "src_dir_fd")
    found: int | None = own if own is not None else options.get("dir_fd", options.get("directory"))
    return found


def _verify(trace: Trace, directory: Path) -> None:
    """Raise unless the trace explains what is in the directory: nothing went past `calls`."""
    disk = Disk(trace, LIMIT)
    for step in trace.steps:
        disk.take(step.event)
    explained, present = disk.latest(), Disk(_Recorder(directory).trace(), LIMIT).latest()
    if explained != present:
        raise RuntimeError(
            "something was changed without holdfast.fs.calls, so the trace is not what happened; "
            f"by the trace: {_describe(explained)}; in the directory: {_describe(present)}"
        )
