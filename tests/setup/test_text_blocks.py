"""A marked block goes in, is brought up to date, and comes out without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Refused
from holdfast.setup.edits import HASH, MARKDOWN, find_block, with_block, without_block
from proof.effort import rounds

WHERE = "AGENTS.md"


def put_in(content: bytes | None, text: str = "hello", version: int = 1, first_line: bytes = b"") -> bytes:
    return with_block(content, text, version=version, comment=MARKDOWN, where=WHERE, first_line=first_line)


def taken_out(content: bytes, first_line: bytes = b"") -> bytes | None:
    return without_block(content, comment=MARKDOWN, where=WHERE, first_line=first_line)


@settings(deadline=None, max_examples=rounds(100, least=25))
@given(st.binary().filter(lambda content: b"holdfast:" not in content))
def test_taking_the_block_out_gives_back_every_byte(content: bytes) -> None:
    assert taken_out(put_in(content)) == content
    assert taken_out(put_in(content, first_line=b"#!/bin/sh\n"), b"#!/bin/sh\n") == content


@settings(deadline=None, max_examples=rounds(100, least=25))
@given(
    st.binary().filter(lambda content: b"holdfast:" not in content),
    st.binary().filter(lambda content: b"holdfast:" not in content),
)
def test_what_is_written_around_the_block_stays(before: bytes, after: bytes) -> None:
    changed = put_in(before) + after

    assert taken_out(put_in(changed, "another text", 2)) == before + after


def test_a_file_that_was_made_for_the_block_goes_with_it() -> None:
    assert taken_out(put_in(None)) is None
    assert taken_out(put_in(None) + b"mine") == b"mine"
    assert taken_out(put_in(b"")) == b""


def test_putting_it_in_twice_changes_nothing() -> None:
    once = put_in(b"# Mine")

    assert put_in(once) == once


def test_a_newer_version_takes_the_place_of_the_older_one() -> None:
    old = put_in(b"above\n") + b"below\n"

    new = put_in(old, "other words", 2)

    found = find_block(new, comment=MARKDOWN, where=WHERE)
    assert found is not None
    assert (found.version, found.text) == (2, "other words\n")
    assert new.startswith(b"above\n")
    assert new.endswith(b"below\n")


def test_behind_the_first_line_comes_before_everything_else_of_a_script() -> None:
    script = with_block(
        b"#!/bin/bash\nexit 0\n", "guard", version=1, comment=HASH, where="hook", first_line=b"#!/bin/sh\n"
    )

    assert script == b"#!/bin/bash\n# holdfast:begin v1\nguard\n# holdfast:end\nexit 0\n"


@pytest.mark.parametrize(
    "content",
    [
        b"<!-- holdfast:begin v1 -->\nno end",
        b"<!-- holdfast:end -->\n",
        b"<!-- holdfast:end -->\n<!-- holdfast:begin v1 -->\n",
        2 * b"<!-- holdfast:begin v1 -->\n<!-- holdfast:end -->\n",
    ],
    ids=["no end", "no begin", "the wrong way round", "two"],
)
def test_broken_markers_are_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="do not enclose one block"):
        put_in(content)
    with pytest.raises(Refused):
        taken_out(content)
