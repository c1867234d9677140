"""Three-way merge of JSON values, field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ABSENT = object()
"""The value of a field that an object does not have."""

Path = tuple[str, ...]


def merged(old: Any, ours: Any, theirs: Any, decide: Callable[[Path, Any, Any], Any], path: Path = ()) -> Any:
    """`theirs` with the change from `old` to `ours` applied. Lists count as ordered sets: the result has the elements
    that either side added and lacks those that either removed. If both changed a value differently, `decide` gets its
    path, our value and theirs, and returns the value to use."""
    if ours in (old, theirs):
        return theirs
    if theirs == old:
        return ours
    if isinstance(ours, dict) and isinstance(theirs, dict):
        before = old if isinstance(old, dict) else {}
        values = {}
        for name in dict.fromkeys((*theirs, *ours)):
            was, here, there = (each.get(name, ABSENT) for each in (before, ours, theirs))
            values[name] = merged(was, here, there, decide, (*path, name))
        return {name: value for name, value in values.items() if value is not ABSENT}
    if isinstance(ours, list) and isinstance(theirs, list):
        were = {repr(each) for each in old} if isinstance(old, list) else set[str]()
        dropped, known = were.difference(map(repr, ours)), were.union(map(repr, theirs))
        kept = [each for each in theirs if repr(each) not in dropped]
        return kept + [each for each in ours if repr(each) not in known]
    return decide(path, ours, theirs)
