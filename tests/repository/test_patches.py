"""Patches are right, and their work is bounded however large and similar the files are."""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.repository.compare import compare, read_file
from holdfast.repository.context import MAIN
from holdfast.repository.patches import MOST_STEPS, patches, unified
from proof import effort
from tests.repository.test_comparing import Site

LINES = 40_000


def applied(old: Sequence[str], hunks: Sequence[str]) -> list[str]:
    """The new lines, made of the old ones and a patch; asserts that the patch fits."""
    made: list[str] = []
    at = 0
    for line in hunks:
        if line.startswith("@@"):
            first, _, count = line.split()[1][1:].partition(",")
            start = int(first) - (count != "0")
            made += old[at:start]
            at = start
        elif line.startswith("+"):
            made.append(line[1:])
        else:
            assert old[at] == line[1:]
            made += [old[at]] if line.startswith(" ") else []
            at += 1
    return [*made, *old[at:]]


def test_a_patch_makes_the_new_lines_of_the_old_ones() -> None:
    chance = random.Random(7)
    for steps in (MOST_STEPS, 40, 0):
        for _ in range(effort.rounds(20_000)):
            old = [str(chance.randrange(12)) for _ in range(chance.randrange(20))]
            new = [each for each in old if chance.random() < 0.8]
            for _ in range(chance.randrange(4)):
                new.insert(chance.randrange(len(new) + 1), str(chance.randrange(15)))
            hunks, used = unified(old, new, steps)
            assert applied(old, hunks) == new
            assert used <= steps + len(old) + len(new)
            assert bool(hunks) == (old != new)


def numbered(count: int, *, without: int = 0) -> list[str]:
    return [f"line {number}" if not without or number % without else "changed" for number in range(count)]


@pytest.mark.parametrize(
    ("old", "new", "most"),
    [
        (numbered(LINES), numbered(LINES, without=400), 100 * 9),  # one hunk per change
        (numbered(LINES), numbered(LINES, without=2), 2 * LINES),  # one large hunk, in which every second line is equal
        (numbered(LINES), [*numbered(LINES)[:20_000], "new", *numbered(LINES)[20_000:]], 8),
    ],
    ids=["some", "every second line", "one"],
)
def test_a_large_file_has_small_hunks(old: list[str], new: list[str], most: int) -> None:
    hunks, used = unified(old, new, MOST_STEPS)
    assert applied(old, hunks) == new
    assert len(hunks) <= most
    assert used <= MOST_STEPS // 4


class Work:
    """Counts the comparisons of the search for equal lines; ends a test that makes too many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.done = 0
        search = difflib.SequenceMatcher.find_longest_match

        def counted(matcher: difflib.SequenceMatcher[str], *place: int) -> difflib.Match:
            places, lines = vars(matcher)["b2j"], vars(matcher)["a"]
            self.done += sum(1 + len(places.get(line, ())) for line in lines[place[0] : place[1]])
            assert self.done <= limit, "this would take long"
            return search(matcher, *place)

        monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", counted)


def similar(seed: int) -> str:
    """Short lines with few different values: each line of a file equals very many of another."""
    chance = random.Random(seed)
    return "".join(f"{chance.randrange(150)}\n" for _ in range(LINES))


def test_two_large_files_with_similar_lines_are_compared_in_bounded_work(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(scratch)
    names = ("one", "two", "three")
    for number, name in enumerate(names):
        (site.payload / name).write_text(similar(number))
    site.take("v1")
    for number, name in enumerate(names):
        (site.payload / name).write_text(similar(number + 100))
    found = compare(site.context, MAIN, None, None)
    work = Work(monkeypatch, len(names) * MOST_STEPS)
    for each in patches(site.context, found):
        assert each.lines is not None
        new = (site.payload / os.fsdecode(each.change.path)).read_text().splitlines()
        old = similar(names.index(os.fsdecode(each.change.path))).splitlines()
        assert applied(old, each.lines[2:]) == new
    assert work.done <= len(names) * MOST_STEPS


def test_once_the_steps_are_used_up_no_further_file_is_read(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(scratch)
    for number in range(5):
        (site.payload / f"file-{number}").write_text(similar(number))
    read: list[Path] = []

    def counted(path: Path, limit: int) -> bytes:
        read.append(path)
        return read_file(path, limit)

    monkeypatch.setattr("holdfast.repository.patches.read_file", counted)
    found = list(patches(site.context, compare(site.context, MAIN, None, None), steps=2 * LINES))
    assert [each.lines is None for each in found] == [False, False, True, True, True]
    assert len(read) == 2
