"""Patches: the differing lines of each changed file, with a limit on the work for one file, and for all of them.

The work is counted in steps, each a comparison of two lines, so the result does not depend on the speed of a machine.
"""

from __future__ import annotations

import difflib
import os
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import NotFound, TooLarge
from holdfast.repository.compare import Comparison, Side, read_file
from holdfast.repository.context import RepositoryContext
from holdfast.repository.history import reading, refuse_if_collected
from holdfast.trees.manifest import escaped

if TYPE_CHECKING:
    from holdfast.repository.home import ReadFile
    from holdfast.trees.results import Change

MOST_TEXT = 4 << 20  # the largest file whose lines are compared
MOST_STEPS = 2_000_000  # for one file, about 0.3 s; after them, the parts that are left count as replaced
_PER_STEP = 32  # characters that can be read in the time of a step
_CONTEXT = 3  # equal lines around a difference
_SAMPLE = 8192  # the number of bytes that decide whether a file is text
_NO_NEWLINE = "\n\\ No newline at end of file"


class Patch(NamedTuple):
    """The differing lines of one file; `lines` is None if the file is not text, or is too large."""

    change: Change
    lines: tuple[str, ...] | None

    @property
    def added(self) -> int:
        return sum(each.startswith("+") for each in (self.lines or ())[2:])

    @property
    def removed(self) -> int:
        return sum(each.startswith("-") for each in (self.lines or ())[2:])


def patches(context: RepositoryContext, comparison: Comparison, *, steps: int = sys.maxsize) -> Iterator[Patch]:
    """A unified diff of every file and symbolic link whose content differs. Once `steps` are used up, every other
    file counts as too large."""
    one, other = _Content(context, comparison.old), _Content(context, comparison.new)
    for change in filter(_has_lines, comparison.changes):
        old: list[str] | None = None
        new: list[str] | None = None
        if steps > 0:
            old = one.lines(change.path) if change.what != "added" else []
            new = other.lines(change.path) if change.what != "removed" else []
        if old is None or new is None:
            yield Patch(change, None)
            continue
        diff, used = unified(old, new, min(steps, MOST_STEPS))
        steps -= used + sum(map(len, (*old, *new))) // _PER_STEP
        header = _header(change) if diff else ()
        yield Patch(change, (*header, *(line for each in diff for line in each.split("\n"))))


def _has_lines(change: Change) -> bool:
    differs = change.what != "modified" or not {"content", "target", "kind"}.isdisjoint(change.aspects)
    return change.kind in ("f", "l") and differs


def _header(change: Change) -> tuple[str, str]:
    # A line break in a name must not begin a line of the header.
    name = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped(change.path))
    before = "/dev/null" if change.what == "added" else f"a/{name}"
    after = "/dev/null" if change.what == "removed" else f"b/{name}"
    return f"--- {before}", f"+++ {after}"


# --- Lines ------------------------------------------------------------------------------------------


def unified(old: list[str], new: list[str], steps: int) -> tuple[list[str], int]:
    """The hunks of a unified diff, and the steps that it took. With too few steps, the hunks are larger than
    necessary, but right."""
    shorter = min(len(old), len(new))
    start = _equal(zip(old, new, strict=False))
    end = min(_equal(zip(reversed(old), reversed(new), strict=False)), shorter - start)
    if start == len(old) == len(new):
        return [], 0
    first = max(0, start - _CONTEXT)  # equal lines at both ends are left out, but for the context
    last = max(0, end - _CONTEXT)
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    matcher = _Matcher(old, new, steps, (start - first, end - last))
    hunks: list[str] = []
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        hunks.append(f"@@ -{_range(first + i1, first + i2)} +{_range(first + j1, first + j2)} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                hunks += [f" {line}" for line in old[i1:i2]]
                continue
            hunks += [f"-{line}" for line in old[i1:i2]]
            hunks += [f"+{line}" for line in new[j1:j2]]
    return hunks, steps - matcher.left


def _equal(pairs: Iterator[tuple[str, str]]) -> int:
    """How many pairs are equal, from the first on."""
    return sum(1 for _ in takewhile(lambda pair: eq(*pair), pairs))


def _range(start: int, stop: int) -> str:
    """Lines in the header of a hunk: the first one from 1, and how many."""
    count = stop - start
    return str(start + 1) if count == 1 else f"{start + 1 if count else start},{count}"


class _Matcher(difflib.SequenceMatcher[str]):
    """Finds equal lines: those that occur once on each side, then others between them, while there are steps left. The
    lines of the `context`, at the beginning and the end, are known to be equal."""

    def __init__(self, old: Sequence[str], new: Sequence[str], steps: int, context: tuple[int, int]) -> None:
        super().__init__(None, old, new)
        self._context = context
        self._old, self._new = old, new
        self._places: dict[str, list[int]] = vars(self)["b2j"]  # public, but unknown to the type checker
        self.left = steps - len(old) - len(new)
        costs = (1 + len(self._places.get(line, ())) for line in old)  # the comparisons that a search makes per line
        self._costs = list(accumulate(costs, initial=0))

    def get_matching_blocks(self) -> list[difflib.Match]:
        lead, tail = self._context
        i = j = lead
        i_end, j_end = len(self._old) - tail, len(self._new) - tail
        found, regions = [difflib.Match(0, 0, lead)], list[tuple[int, int, int, int]]()
        for to_i, to_j, size in (*self._anchors(lead, i_end, j_end), (i_end, j_end, tail)):
            found.append(difflib.Match(to_i, to_j, size))
            regions.append((i, to_i, j, to_j))
            i, j = to_i + 1, to_j + 1
        while regions:
            alo, ahi, blo, bhi = regions.pop()
            cost = self._costs[max(alo, ahi)] - self._costs[alo]
            if alo < ahi and blo < bhi and cost <= self.left:
                self.left -= cost
                x, y, size = self.find_longest_match(alo, ahi, blo, bhi)
                if size:
                    found.append(difflib.Match(x, y, size))
                    regions += [(alo, x, blo, y), (x + size, ahi, y + size, bhi)]
        return [*_merged(sorted(found)), difflib.Match(len(self._old), len(self._new), 0)]

    def _anchors(self, start: int, i_end: int, j_end: int) -> Iterator[tuple[int, int, int]]:
        """Lines that occur once on each side, as many as are in the same order on both."""
        counts = Counter(self._old)
        once = {line: places[0] for line, places in self._places.items() if len(places) == 1}
        ends: list[int] = []  # of the rising sequences by length, each with the smallest possible end
        chains: list[tuple[int, int, Any]] = []
        for i in range(start, i_end):
            line = self._old[i]
            if counts[line] == 1 and start <= (j := once.get(line, -1)) < j_end:
                length = bisect_left(ends, j)
                ends[length : length + 1] = [j]
                chains[length : length + 1] = [(i, j, chains[length - 1] if length else None)]
        chain = chains[-1] if chains else None
        found = []
        while chain is not None:
            i, j, chain = chain
            found.append((i, j, 1))
        return reversed(found)


def _merged(blocks: list[difflib.Match]) -> list[difflib.Match]:
    """The blocks, with neighbours as one."""
    merged = [difflib.Match(0, 0, 0)]
    for x, y, size in blocks:
        a, b, before = merged[-1]
        if size and (a + before, b + before) == (x, y):
            merged[-1] = difflib.Match(a, b, before + size)
        else:
            merged.append(difflib.Match(x, y, size))
    return merged


class _Content:
    """The content of one side's files."""

    def __init__(self, context: RepositoryContext, side: Side) -> None:
        self._context, self._side = context, side
        self._read_stored: ReadFile | None = None

    def lines(self, path: bytes) -> list[str] | None:
        """The lines of a file, the last one with a note if it has no newline; None if it is not text."""
        try:
            content = self._read(path)
        except TooLarge:
            return None
        except NotFound:
            if self._side.descriptor is not None:
                refuse_if_collected(self._context, self._side.descriptor.snapshot_id)
            return None
        if b"\0" in content[:_SAMPLE]:
            return None
        lines = content.decode("utf-8", "backslashreplace").split("\n")
        return lines[:-1] if lines[-1] == "" else [*lines[:-1], lines[-1] + _NO_NEWLINE]

    def _read(self, path: bytes) -> bytes:
        if self._side.descriptor is None:
            return b"" if self._side.files is None else read_file(self._side.files / os.fsdecode(path), MOST_TEXT)
        if self._read_stored is None:
            with reading(self._context, self._side.descriptor.snapshot_id):
                self._read_stored = self._context.home.reader(self._side.descriptor.snapshot_id)
        return self._read_stored(path, MOST_TEXT)
