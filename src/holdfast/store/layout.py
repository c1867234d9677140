"""Where every document and stream lives, which lock guards it, and in which order locks are taken.

This is the one table. A key names a row and, if the row has a `{name}`, a member of it. The rows
stand in the order in which their guards are locked: a transaction that touches several takes them in
this order, members of one row by name; so no two transactions can wait for each other, and none can
be written that does otherwise, because nothing else takes these locks.

`{stripe}` spreads the members of a row over 64 guards, for rows whose specification names none: a
guard is never deleted, and one for each of a hundred thousand documents would be litter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from holdfast.errors import UsageFailure
from holdfast.fs.names import safe_name

INTENTS = ".holdfast/intents"
"""Where the intents of commits to several documents are kept."""

STRIPES = 64
MOST_REMEMBERED = 10_000
"""How many places a layout remembers, so as not to work them out again."""


class Kind(Enum):
    """What a row's file is."""

    DOCUMENT = "document"
    LINES = "lines"
    """A stream of which each record is a line of one file."""
    NUMBERED = "numbered"
    """A stream of which each record is a file, `{number}` in its name."""


class Row(NamedTuple):
    """One line of the table: key, path, guard; all relative to the root of the store."""

    key: str
    path: str
    guard: str
    kind: Kind = Kind.DOCUMENT


# fmt: off
_WORKTREE = ".jvs/guards/worktree-{name}.lock"  # all that belongs to one worktree has one guard

TABLE: tuple[Row, ...] = (
    # The repository, its worktrees and snapshots.
    Row("jvs/format",             ".jvs/format.json",                  ".jvs/guards/format.lock"),
    Row("jvs/worktrees/{name}",   ".jvs/worktrees/{name}/config.json", _WORKTREE),
    Row("jvs/leases/{name}",      ".jvs/locks/{name}.json",            _WORKTREE),
    Row("jvs/tokens/{name}",      ".jvs/tokens/{name}.json",           _WORKTREE),
    Row("jvs/queues/{name}",      ".jvs/queues/{name}.json",           _WORKTREE),
    Row("jvs/operations/{name}",  ".jvs/operations/{name}.json",       _WORKTREE),
    Row("jvs/descriptors/{name}", ".jvs/descriptors/{name}.json",      ".jvs/guards/snapshots-{stripe}.lock"),
    Row("jvs/refs/{name}",        ".jvs/refs/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/pins/{name}",        ".jvs/pins/{name}.json",             ".jvs/guards/refs.lock"),
    Row("jvs/retention",          ".jvs/retention.json",               ".jvs/guards/retention.lock"),
    Row("jvs/plans/{name}",       ".jvs/plans/{name}.json",            ".jvs/guards/retention.lock"),
    # Issues: index, gates, issues by id, events.
    Row("jit/index",              ".jit/index.json",                   ".jit/.index.lock"),
    Row("jit/gates",              ".jit/gates.json",                   ".jit/.gates.lock"),
    Row("jit/issues/{name}",      ".jit/issues/{name}.json",           ".jit/issues/{name}.lock"),
    # The ledger, whose guard is the lock file that other programs know too.
    Row("ledger/meta",            "meta.json",                         "ledger/.meta.lock"),
    Row("ledger/events",          "ledger/event-{number}.json",        "ledger/ledger.lock", Kind.NUMBERED),
    # Streams that every change appends to come last and are held briefly.
    Row("jit/events",             ".jit/events.jsonl",                 ".jit/.events.lock", Kind.LINES),
    Row("jvs/audit",              ".jvs/audit/audit.jsonl",            ".jvs/audit/.audit.lock", Kind.LINES),
)
# fmt: on


class Place(NamedTuple):
    """Where one document or stream is. `rank` sorts guards into the order in which they are locked:
    by the rows of the table, members of one row by name (not by path: `a-b.lock` sorts before `a.lock`)."""

    name: str
    kind: Kind
    directory: str
    file: str
    guard: str
    rank: tuple[int, str]

    @property
    def path(self) -> str:
        """The path relative to the root."""
        return f"{self.directory}/{self.file}" if self.directory else self.file

    def numbered(self, number: int) -> str:
        """The file of one record of a numbered stream; past 999999 the numbers simply go on."""
        return self.file.replace("{number}", f"{number:06d}")


class Layout:
    """A table, ready to be looked things up in."""

    def __init__(self, rows: Sequence[Row] = TABLE) -> None:
        self._rows = {row.key.removesuffix("/{name}"): row for row in rows}
        ranks: dict[str, int] = {}
        for row in rows:
            ranks.setdefault(row.guard, len(ranks))
        self._ranks = ranks
        self._places: dict[str, Place] = {}

    def place(self, key: str) -> Place:
        """The place of a key; one that no row has, or whose member is not a safe name, is refused."""
        known = self._places.get(key)
        if known is None:
            known = self._find(key)
            if len(self._places) < MOST_REMEMBERED:
                self._places[key] = known
        return known

    def _find(self, key: str) -> Place:
        row = self._rows.get(key)
        if row is not None and "{name}" not in row.key:
            return self._filled(row, key, "")
        family, _, member = key.rpartition("/")
        row = self._rows.get(family)
        if row is None or "{name}" not in row.key:
            raise UsageFailure(f"there is no place for {key!a} in the layout", key=ascii(key))
        return self._filled(row, key, safe_name(member, what="key"))

    def family(self, family: str) -> tuple[str, str, str]:
        """The directory of a family's members, and what stands before and behind their names there."""
        row = self._rows.get(family)
        if row is None or "{name}" not in row.key:
            raise UsageFailure(f"{family!a} is not a family of the layout", key=ascii(family))
        before, after = row.path.split("{name}")
        directory, _, start = before.rpartition("/")
        return directory, start, after

    def has_own_directory(self, key: str) -> bool:
        """Whether a document is alone in a directory that bears its name."""
        row = self._rows.get(key.rpartition("/")[0])
        return row is not None and "{name}/" in row.path

    def _filled(self, row: Row, key: str, member: str) -> Place:
        stripe = f"{zlib.crc32(member.encode()) % STRIPES:02d}"
        guard = row.guard.replace("{name}", member).replace("{stripe}", stripe)
        directory, _, file = row.path.replace("{name}", member).rpartition("/")
        among = member if "{name}" in row.guard else stripe if "{stripe}" in row.guard else ""
        return Place(key, row.kind, directory, file, guard, (self._ranks[row.guard], among))
