"""Names and relative paths: accepted ones are safe to pass to a file system."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
import uuid
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ExitStatus, NameInvalid, PathEscape
from holdfast.fs.names import MAX_NAME, is_safe_name, safe_name, split_relative, unique_id
from proof.effort import rounds

KELVIN = "\u212a"  # looks like a K, and is one after normalisation


# --- Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "main", "A-b_c.d", "0", "-", "_", ".hidden", "a.b.c", "x" * MAX_NAME])
def test_letters_digits_dots_underscores_and_hyphens_make_a_name(name: str) -> None:
    assert safe_name(name) == name
    assert is_safe_name(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        (".", "is '.' or contains '..'"),
        ("..", "is '.' or contains '..'"),
        ("a..b", "is '.' or contains '..'"),
        ("...", "is '.' or contains '..'"),
        ("a/b", "contains a path separator"),
        ("/", "contains a path separator"),
        ("../main", "contains a path separator"),
        ("a\\b", "contains a path separator"),
        ("a\nb", "contains a control character"),
        ("a\0", "contains a control character"),
        ("name\n", "contains a control character"),
        ("\x7f", "contains a control character"),
        ("a b", "contains characters other than"),
        ("é", "contains characters other than"),
        ("a\u2215b", "contains characters other than"),  # looks like a slash
        ("\uff0e\uff0e", "contains characters other than"),  # full-width dots
        ("a\u0085b", "contains characters other than"),
        ("\ud800", "contains characters other than"),
        ("a:b", "contains characters other than"),
        ("x" * (MAX_NAME + 1), "has 129 characters, more than 128"),
    ],
    ids=ascii,
)
def test_any_other_name_is_refused_with_the_reason(name: str, problem: str) -> None:
    with pytest.raises(NameInvalid, match=re.escape(problem)) as caught:
        safe_name(name, what="worktree name")

    assert str(caught.value).startswith("the worktree name '")
    assert caught.value.exit_status is ExitStatus.USAGE
    assert str(caught.value).isprintable(), "a name cannot forge lines of a message"
    assert not is_safe_name(name)


def test_a_name_is_normalised_to_its_composed_form() -> None:
    assert safe_name(f"{KELVIN}eel") == "Keel"
    assert not is_safe_name(f"{KELVIN}eel")


def test_the_message_for_a_very_long_name_is_short() -> None:
    with pytest.raises(NameInvalid) as caught:
        safe_name("x" * 100_000)

    assert len(str(caught.value)) < 400


@settings(deadline=None, max_examples=rounds(500, least=5))
@given(st.text() | st.text("./\\ab\0\n\u212a\u2024\ud800-_", max_size=8))
@example(KELVIN)
@example("..")
@example("a" * MAX_NAME + KELVIN)
def test_no_accepted_name_leads_elsewhere(text: str) -> None:
    try:
        name = safe_name(text)
    except NameInvalid:
        assert not is_safe_name(text)
        return
    assert re.fullmatch(r"[a-zA-Z0-9._-]{1,128}", name)
    assert name == unicodedata.normalize("NFC", text)
    assert os.path.basename(name) == name
    assert os.path.normpath(name) == name
    assert name not in (".", "..")
    assert ".." not in name
    assert safe_name(name) == name
    assert is_safe_name(text) == (text == name)


# --- Relative paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relative", "parts"),
    [
        ("a", ["a"]),
        ("a/b/c", ["a", "b", "c"]),
        ("...", ["..."]),
        (".a/b.", [".a", "b."]),
        ("é/ü", ["é", "ü"]),
    ],
)
def test_a_plain_relative_path_is_split_into_its_parts(relative: str, parts: list[str]) -> None:
    assert list(split_relative(relative)) == parts


@pytest.mark.parametrize(
    "relative",
    ["", "/", "/a", "a/", "a//b", ".", "./a", "a/.", "a/./b", "..", "../a", "a/..", "a/../b", "a\0b", "\0"],
    ids=ascii,
)
def test_a_path_that_could_escape_is_refused(relative: str) -> None:
    with pytest.raises(PathEscape, match="is not a safe relative path"):
        split_relative(relative)


@settings(deadline=None, max_examples=rounds(500, least=5))
@given(st.text() | st.lists(st.sampled_from(["", ".", "..", "a", "b", "/", "\0", "\\", "..."])).map("/".join))
def test_the_parts_of_an_accepted_path_stay_below_the_root(relative: str) -> None:
    try:
        parts = split_relative(relative)
    except PathEscape:
        return
    assert "/".join(parts) == relative or sys.platform == "win32"
    assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)
    joined = PurePosixPath("/root", *parts)
    assert joined.is_relative_to("/root")
    assert len(joined.parts) == 2 + len(parts)
    assert os.path.normpath("/root/" + relative) == "/root/" + relative or sys.platform == "win32"


def test_ids_are_unique_random_uuids() -> None:
    made = [unique_id() for _ in range(1000)]
    assert len(set(made)) == 1000
    for each in made:
        assert str(uuid.UUID(each)) == each
        assert (uuid.UUID(each).version, uuid.UUID(each).variant) == (4, uuid.RFC_4122)
