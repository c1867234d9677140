"""Histories as drawings."""

from __future__ import annotations

from holdfast.cli.history import drawn


def drawing(*history: tuple[str, str | None]) -> list[str]:
    lines = []
    for (name, _), each in zip(history, drawn(history), strict=True):
        lines += [*each.before, f"{each.first} {name}"]
    return lines


def test_one_line_is_a_line() -> None:
    assert drawing(("c", "b"), ("b", "a"), ("a", None)) == ["* c", "* b", "* a"]


def test_two_lines_meet_where_they_come_from() -> None:
    assert drawing(("d", "b"), ("c", "b"), ("b", "a"), ("a", None)) == [
        "* d",
        "| * c",
        "|/",
        "* b",
        "* a",
    ]


def test_a_line_passes_behind_another_one() -> None:
    assert drawing(("f", "a"), ("e", "d"), ("c", "a"), ("a", None), ("d", None)) == [
        "* f",
        "| * e",
        "| | * c",
        "|_|/",
        "* | a",
        "* d",
    ]


def test_three_lines_meet_at_once() -> None:
    assert drawing(("d", "a"), ("c", "a"), ("b", "a"), ("a", None)) == [
        "* d",
        "| * c",
        "| | * b",
        "|_|/",
        "|/",
        "* a",
    ]


def test_lines_that_have_nothing_in_common_stand_one_below_the_other() -> None:
    assert drawing(("b", None), ("a", None)) == ["* b", "* a"]


def test_what_is_beside_further_lines_goes_on() -> None:
    first, second = drawn([("b", "a"), ("a", None)])
    assert first.further == "|"
    assert second.further == " "
