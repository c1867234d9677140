"""A marked block is inserted, updated and removed without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Refused
from holdfast.setup.edits import HASH, MARKDOWN, find_block, with_block, without_block
from proof.effort import rounds

WHERE = "AGENTS.md"


def inserted(content: bytes | None, text: str = "hello", version: int = 1, first_line: bytes = b"") -> bytes:
    return with_block(content, text, version=version, comment=MARKDOWN, where=WHERE, first_line=first_line)


def removed(content: bytes, first_line: bytes = b"") -> bytes | None:
    return without_block(content, comment=MARKDOWN, where=WHERE, first_line=first_line)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.binary().filter(lambda content: b"holdfast:" not in content))
def test_removing_the_block_restores_every_byte(content: bytes) -> None:
    assert removed(inserted(content)) == content
    assert removed(inserted(content, first_line=b"#!/bin/sh\n"), b"#!/bin/sh\n") == content


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(
    st.binary().filter(lambda content: b"holdfast:" not in content),
    st.binary().filter(lambda content: b"holdfast:" not in content),
)
def test_text_around_the_block_stays(before: bytes, after: bytes) -> None:
    changed = inserted(before) + after

    assert removed(inserted(changed, "another text", 2)) == before + after


def test_a_file_created_for_the_block_is_removed_with_it() -> None:
    assert removed(inserted(None)) is None
    assert removed(inserted(None) + b"mine") == b"mine"
    assert removed(inserted(b"")) == b""


def test_inserting_the_block_twice_changes_nothing() -> None:
    once = inserted(b"# Mine")

    assert inserted(once) == once


def test_a_newer_version_replaces_the_older_one() -> None:
    old = inserted(b"above\n") + b"below\n"

    new = inserted(old, "other words", 2)

    found = find_block(new, comment=MARKDOWN, where=WHERE)
    assert found is not None
    assert (found.version, found.text) == (2, "other words\n")
    assert new.startswith(b"above\n")
    assert new.endswith(b"below\n")


def test_the_block_goes_right_after_the_first_line_of_a_script() -> None:
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
        b"<!-- holdfast:begin v" + b"9" * 5000 + b" -->\n<!-- holdfast:end -->\n",
    ],
    ids=["no end", "no begin", "the wrong way round", "two", "no version"],
)
def test_broken_markers_are_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="do not enclose one block"):
        inserted(content)
    with pytest.raises(Refused):
        removed(content)
