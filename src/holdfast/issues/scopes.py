"""Scopes: the paths that work on an issue touches, declared as glob patterns. Pure functions.

A pattern is a path relative to the top of the repository. `*` stands for any characters but `/`, `?` for one of them,
`[a-z]` and `[!a-z]` for one of a set, and `**` for any number of directories. A pattern also matches everything below a
directory that it matches: `src` and `src/**` are the same scope.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from holdfast.errors import SettingInvalid
from holdfast.fs.names import checked_text, split_relative
from holdfast.issues.model import without_repeats

MOST_PATTERNS, LONGEST_PATTERN = 100, 500
_DEEP = "**"
_LAST = 0x10FFFF
_TOKEN = r"(?s)\*+|\?|\[!?\]?[^\]]*\]|."  # not compiled here: most commands compare no paths

T = TypeVar("T")


class Characters(NamedTuple):
    """A set of characters, as ranges of code points that do not overlap, in order."""

    ranges: tuple[tuple[int, int], ...]

    def meets(self, other: Characters) -> bool:
        return any(max(a, c) <= min(b, d) for a, b in self.ranges for c, d in other.ranges)


def checked_touches(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns without duplicates; `SettingInvalid` or `PathEscape` for one that is not a pattern."""
    found = without_repeats(each.rstrip("/") or each for each in patterns)
    for each in found:
        checked_text(each, what="pattern", limit=LONGEST_PATTERN)
        split_relative(each)
    if len(found) > MOST_PATTERNS:
        raise SettingInvalid("touches", f"{len(found)} patterns", f"at most {MOST_PATTERNS} patterns")
    return found


def outside_scope(changed_paths: Iterable[str], globs: Sequence[str]) -> list[str]:
    """The paths that none of the patterns matches; none if there are no patterns, because then nothing is declared."""
    return [path for path in changed_paths if globs and not any(matches(each, path) for each in globs)]


def overlapping(ones: Iterable[str], others: Sequence[str]) -> tuple[str, str] | None:
    """The first two patterns, one of each scope, that some path matches both; None if the scopes are disjoint."""
    return next(((one, other) for one in ones for other in others if overlap(one, other)), None)


@lru_cache(maxsize=4096)
def overlap(one: str, other: str) -> bool:
    """Whether some path matches both patterns. Patterns of other programs that are too long count as matching all."""
    if max(len(one), len(other)) > LONGEST_PATTERN:
        return True
    sides = [*_parts(one), None], [*_parts(other), None]
    return all(map(_is_possible, sides)) and _meet(*sides, _component_meets)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path, or a directory above it."""
    literal = [[_literal(each) for each in name] for name in path.split("/")]
    return _meet([*_parts(pattern), None], literal, _component_meets)


# --- Patterns as sequences ----------------------------------------------------------------------------

_Component = Sequence[Characters | None]  # a set for each character; None for any number of characters


def _parts(pattern: str) -> Iterator[_Component | None]:
    """The components of a pattern; None for any number of them."""
    for each in pattern.split("/"):
        if each == _DEEP:
            yield None
        elif each not in ("", "."):
            yield tuple(map(_characters, re.findall(_TOKEN, each)))


def _characters(token: str) -> Characters | None:
    if token[0] == "*":
        return None
    if token == "?":
        return _without(Characters(()))
    if len(token) > 2 and token[0] == "[":
        is_negated = token[1] == "!"
        chosen = _chosen(token[1 + is_negated : -1])
        return _without(chosen) if is_negated else chosen
    return _literal(token)


def _chosen(text: str) -> Characters:
    """The set between brackets: characters, and ranges such as `a-z`."""
    found = ((ord(first), ord(last or first)) for first, last in re.findall(r"(.)(?:-(.))?", text, re.DOTALL))
    return Characters(tuple(sorted(each for each in found if each[0] <= each[1])))


def _literal(character: str) -> Characters:
    return Characters(((ord(character), ord(character)),))


def _without(excluded: Characters) -> Characters:
    """All characters of a name except these."""
    ranges, start = [], 1
    for first, last in sorted((*excluded.ranges, (ord("/"), ord("/")))):
        if start < first:
            ranges.append((start, first - 1))
        start = max(start, last + 1)
    return Characters((*ranges, *([(start, _LAST)] if start <= _LAST else [])))


def _is_possible(parts: Sequence[_Component | None]) -> bool:
    """Whether any path matches: no name has a character of an empty set, such as `[z-a]`."""
    return all(each is None or each.ranges for part in parts for each in part or ())


def _component_meets(one: _Component, other: _Component) -> bool:
    return _meet(one, other, Characters.meets)


def _meet(one: Sequence[T | None], other: Sequence[T | None], meets: Callable[[T, T], bool]) -> bool:
    """Whether some sequence is described by both, where None stands for any number of items, and any other item for
    one of those that it describes.

    `reached` has the places in `other` that can be reached together with the present place in `one`.
    """
    reached = _skipping(other, {0})
    for item in one:
        if item is None:
            reached = set(range(min(reached), len(other) + 1)) if reached else reached
            continue
        after = set[int]()
        for place in reached - {len(other)}:
            found = other[place]
            if found is None:
                after.add(place)  # it stands for this item, and perhaps for more
            elif meets(item, found):
                after.add(place + 1)
        reached = _skipping(other, after)
    return len(other) in reached


def _skipping(items: Sequence[T | None], places: set[int]) -> set[int]:
    """The places, and those behind items that may stand for nothing."""
    found = set(places)
    for place in places:
        here = place
        while here < len(items) and items[here] is None:
            here += 1
            found.add(here)
    return found
