"""The second look at a source: everything in it is still as it was taken in, so it was all so at one moment.

Every identity was taken before the last of the source was read, and is taken again after it. What is equal
in both looks was the same at the moment between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.fs.trees.content import READ
from holdfast.fs.trees.copying import hash_file
from holdfast.fs.trees.descent import Descent, unreadable
from holdfast.fs.trees.files import GONE
from holdfast.fs.trees.intake import Taken
from holdfast.fs.trees.scan import look, marks_by_name
from holdfast.fs.trees.tally import Recent, Tally
from holdfast.fs.trees.way import joined

_ENOUGH = 100


def second_look(source: Descent, taken: Iterable[Taken], tally: Tally) -> None:
    """Note in `tally.changed` what is not as it was taken in."""
    with Descent(source.root) as way:
        for each in taken:
            if each.identity:
                tally.changed += _changed(way, each)
            if len(tally.changed) > _ENOUGH:
                return
        tally.changed += [joined(each.path, each.name) for each in tally.recent if not _is_same(way, each)]


def _changed(way: Descent, taken: Taken) -> list[str]:
    try:
        seen = look(way.enter(taken.path))
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(way.where(taken.path), error) from error
        return [taken.path]
    if seen.identity == taken.identity:
        return []
    before, after = marks_by_name(taken.identity), marks_by_name(seen.identity)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return [joined(taken.path, os.fsdecode(name)) for name in names] or [taken.path]


def _is_same(way: Descent, recent: Recent) -> bool:
    """Read a file again whose times cannot show whether it changed."""
    try:
        reading = calls.open(recent.name, READ, dir_fd=way.enter(recent.path))
        try:
            return hash_file(reading, calls.fstat(reading).st_size).digest == recent.digest
        finally:
            close_quietly(reading)
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(way.where(recent.path, recent.name), error) from error
        return False
