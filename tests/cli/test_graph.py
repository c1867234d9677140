"""Graphs of `holdfast history --graph`."""

from __future__ import annotations

from holdfast.cli.history import drawn


def drawing(*history: tuple[str, str | None]) -> list[str]:
    lines = []
    for (name, _), each in zip(history, drawn(history), strict=True):
        lines += [*each.before, f"{each.first} {name}"]
    return lines


def test_a_linear_history_is_one_column() -> None:
    assert drawing(("c", "b"), ("b", "a"), ("a", None)) == ["* c", "* b", "* a"]


def test_two_branches_meet_at_their_parent() -> None:
    assert drawing(("d", "b"), ("c", "b"), ("b", "a"), ("a", None)) == [
        "* d",
        "| * c",
        "|/",
        "* b",
        "* a",
    ]


def test_a_branch_passes_behind_another() -> None:
    assert drawing(("f", "a"), ("e", "d"), ("c", "a"), ("a", None), ("d", None)) == [
        "* f",
        "| * e",
        "| | * c",
        "|_|/",
        "* | a",
        "* d",
    ]


def test_three_branches_meet_at_one_parent() -> None:
    assert drawing(("d", "a"), ("c", "a"), ("b", "a"), ("a", None)) == [
        "* d",
        "| * c",
        "| | * b",
        "|_|/",
        "|/",
        "* a",
    ]


def test_unrelated_histories_are_drawn_one_below_the_other() -> None:
    assert drawing(("b", None), ("a", None)) == ["* b", "* a"]


def test_a_column_continues_beside_the_further_lines_of_an_entry() -> None:
    first, second = drawn([("b", "a"), ("a", None)])
    assert first.further == "|"
    assert second.further == " "
