"""A model of a disk: every state that a power cut may leave after each step of a recorded operation.

A `Trace` lists the events of an operation. A `Disk` takes these events and computes, after each of them, every
`State` that may exist when the power returns. `powercut` states the rules.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

from proof.interpose import Call

LIMIT = 4096
"""The most sets of names, and contents for each of them, that are tried per cut before the cut is capped."""

T = TypeVar("T")
Names = dict[int, dict[str, int]]
"""The names in each directory, and the node that each refers to."""

_ROOT = 0


# --- States of a directory --------------------------------------------------------------------------


class Node(NamedTuple):
    """The object behind a name, without its content. A directory's content is its names."""

    kind: int  # stat.S_IFREG, S_IFDIR or S_IFLNK
    mode: int
    target: str = ""


class Entry(NamedTuple):
    """One path of a state. `twin` is the first path with the same inode; for a hard link, it differs from `path`."""

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


def describe(state: State) -> str:
    """A state in one line, for messages."""
    shown = {stat.S_IFDIR: "/", stat.S_IFLNK: "@"}
    lines = [each.path + shown.get(each.node.kind, f"={each.content!r}") for each in state]
    return ", ".join(lines) or "(empty)"


# --- Events -----------------------------------------------------------------------------------------


class Edit(NamedTuple):
    """A change of a file's content: `data` written at `offset`; None means truncated at `offset`."""

    file: int
    offset: int
    data: bytes | None

    def applied(self, content: bytes) -> bytes:
        start = content[: self.offset].ljust(self.offset, b"\0")
        return start if self.data is None else start + self.data + content[self.offset + len(self.data) :]

    def halved(self) -> Edit:
        return self if self.data is None else self._replace(data=self.data[: len(self.data) // 2])


class Cell(NamedTuple):
    """One name, and the nodes that it referred to before and after a change; None: the name did not exist."""

    directory: int
    name: str
    before: int | None
    after: int | None
    replacing: bool = False  # any previous node will do


class Naming(NamedTuple):
    """A change of names that happens completely or not at all."""

    cells: tuple[Cell, ...]

    def possible(self, names: Names) -> bool:
        """Whether it can happen with these names: the sources exist, the targets are free."""
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
    """The contents of files, or the names in directories, were synced to the disk."""

    nodes: tuple[int, ...]


class Mark(NamedTuple):
    """A part of the operation announced that it is done; None: the operation returned."""

    label: str | None


class Step(NamedTuple):
    """One event, and the call that caused it."""

    event: Edit | Naming | Sync | Mark
    call: Call | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded operation: the state before it, and the events, in order."""

    nodes: Mapping[int, Node]
    names: Names
    contents: Mapping[int, bytes]
    steps: tuple[Step, ...]

    def without(self, step: Step) -> Trace:
        """The same operation without this step."""
        return Trace(self.nodes, self.names, self.contents, tuple(s for s in self.steps if s is not step))


# --- Possible states of the disk --------------------------------------------------------------------


class Disk:
    """The state that is certainly on the disk, and the changes that may be."""

    def __init__(self, trace: Trace, limit: int, *, in_order: bool = False) -> None:
        """With `in_order`, the disk is that of a filesystem with one journal for all names."""
        self.capped = ""
        self._in_order = in_order
        self._nodes = trace.nodes
        self._files = {number for number, node in trace.nodes.items() if node.kind == stat.S_IFREG}
        self._limit = limit
        self._names: Names = {directory: dict(names) for directory, names in trace.names.items()}
        self._unsynced_names: list[tuple[Naming, bool]] = []  # in order; True: on the disk for certain
        self._contents = dict(trace.contents)
        self._edits: dict[int, list[Edit]] = {}

    def take(self, event: Edit | Naming | Sync | Mark) -> None:
        """Apply the next event."""
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
        """Every state that a power cut may leave now. Sets `capped` if some were left out."""
        self.capped = ""
        possible = {file: self._possible_contents(file) for file in self._files}
        for tree in self._trees():
            files = sorted(self._files.intersection(node for _, node in tree))
            for contents in self._combinations([possible[file] for file in files], "contents of files"):
                yield self._seen(tree, dict(zip(files, contents, strict=True)))

    def latest(self) -> State:
        """The state that processes see while the power is on."""
        names = self._named([True] * len(self._unsynced_names))
        contents = {file: self._possible_contents(file)[-1] for file in self._files}
        return self._seen(tuple(_walk(names)), contents)

    def _sync_names(self, directory: int) -> None:
        self._unsynced_names = [
            (naming, certain or self._in_order or any(cell.directory == directory for cell in naming.cells))
            for naming, certain in self._unsynced_names
        ]
        while self._unsynced_names and self._unsynced_names[0][1]:
            self._unsynced_names.pop(0)[0].apply(self._names)

    def _possible_contents(self, file: int) -> list[bytes]:
        """The possible contents of the file; the last one has everything that was written."""
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
        first = [[True] * count + [False] * (len(choices) - count) for count in range(len(choices) + 1)]
        for chosen in first if self._in_order else self._combinations(choices, "subsets of changed names"):
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
            Entry(path, self._nodes[node], contents.get(node, b""), twins.setdefault(node, path)) for path, node in tree
        )

    def _combinations(self, choices: list[list[T]], what: str) -> Iterable[tuple[T, ...]]:
        """All combinations; if there are too many, the first, the last and a sample, and `capped` says so."""
        total = prod(map(len, choices))
        if total <= self._limit:
            return product(*choices)
        self.capped = f"{self._limit} of {total} {what}"
        chance = random.Random(total)
        sample = [tuple(map(chance.choice, choices)) for _ in range(self._limit - 2)]
        return [tuple(each[0] for each in choices), tuple(each[-1] for each in choices), *sample]


def _walk(names: Names, directory: int = _ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each path and its node, directories before their content."""
    for name, node in sorted(names[directory].items()):
        yield prefix + name, node
        if node in names:
            yield from _walk(names, node, f"{prefix}{name}/")
