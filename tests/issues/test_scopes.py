"""Scopes of issues: which paths a pattern matches, and whether some path matches two patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Failure
from holdfast.issues.scopes import checked_touches, matches, outside_scope, overlap, overlapping

NAMES = ["".join(each) for length in range(1, 6) for each in product("abz", repeat=length)]
PATHS = ["/".join(each) for length in range(1, 6) for each in product("abz", repeat=length)]

characters = st.sampled_from(["a", "b", "?", "*", "[ab]", "[!a]", "[a-b]", "[b-a]", "[!ab]"])
names = st.lists(characters, min_size=1, max_size=4).map("".join).filter(lambda name: "**" not in name)
patterns = st.lists(st.one_of(st.just("**"), characters), min_size=1, max_size=3).map("/".join)


def expected(pattern: list[str], path: list[str]) -> bool:
    """The definition, by trying every number of directories for `**`."""
    if not pattern:
        return True  # everything below what matched
    if pattern[0] == "**":
        return expected(pattern[1:], path) or (bool(path) and expected(pattern, path[1:]))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and expected(pattern[1:], path[1:])


@given(patterns, st.sampled_from(PATHS))
def test_a_pattern_matches_the_paths_that_it_should(pattern: str, path: str) -> None:
    assert matches(pattern, path) == expected(pattern.split("/"), path.split("/"))


@given(patterns, patterns)
def test_two_patterns_overlap_if_and_only_if_some_path_matches_both(one: str, other: str) -> None:
    """Of two patterns with three parts, one with `**`, the shortest path that matches both has at most five."""
    both = [path for path in PATHS if expected(one.split("/"), path.split("/"))]
    is_met = any(expected(other.split("/"), path.split("/")) for path in both)

    assert overlap(one, other) == overlap(other, one) == is_met


@given(names, names)
def test_the_same_holds_within_a_name(one: str, other: str) -> None:
    is_met = any(fnmatchcase(name, one) and fnmatchcase(name, other) for name in NAMES)

    assert overlap(one, other) == overlap(other, one) == is_met


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("src", "src/parser/lexer.py", True),
        ("src/**", "src", True),
        ("src/*.py", "src/parser.py", True),
        ("src/*.py", "src/parser.pyi", False),
        ("src/*.py", "src/parser/lexer.py", False),
        ("**/*.py", "src/parser/lexer.py", True),
        ("**/test_*.py", "src/**", True),
        ("docs/**", "src/**", False),
        ("a*b*c", "*x*", True),
        ("[0-9]*", "[a-f]*", False),
        ("[!a]x", "ax", False),
        ("**", "anything/at/all", True),
        ("a" * 600, "b", True),  # too long to decide: nothing is promised
    ],
)
def test_overlaps(one: str, other: str, meet: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is meet


def test_many_wildcards_take_no_longer_than_their_product() -> None:
    assert not overlap("*a" * 200 + "b", "*a" * 200 + "c")
    assert overlap("**/a/" * 90 + "b", "**/a/" * 90 + "c")  # a/b/a/c, say, with more of them


def test_paths_outside_a_scope_are_named() -> None:
    changed = ["src/a.py", "docs/index.md", "README.md"]

    assert outside_scope(changed, ["src/**", "docs"]) == ["README.md"]
    assert outside_scope(changed, ["**"]) == []
    assert outside_scope(changed, []) == []  # nothing is declared


def test_the_first_patterns_that_overlap_are_told() -> None:
    assert overlapping(["docs/**", "src/*.py"], ["src/a*", "README.md"]) == ("src/*.py", "src/a*")
    assert overlapping(["docs/**"], ["src/**"]) is None
    assert overlapping([], ["src/**"]) is None


def test_patterns_are_kept_once_and_as_paths_in_the_repository() -> None:
    assert checked_touches(["src/", "src", "docs/*"]) == ("src", "docs/*")
    for invalid in ("", "/etc", "../other", "a//b", "./a", "x" * 501):
        with pytest.raises(Failure):
            checked_touches([invalid])
    with pytest.raises(Failure, match="at most 100"):
        checked_touches(map(str, range(101)))
