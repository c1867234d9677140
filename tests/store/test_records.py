"""Records become bytes and come back the same, or are refused; names of documents are safe."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.errors import Corrupt, NameInvalid, TooLarge, UsageFailure
from holdfast.store.records import Document, Family, Key, Stream, StructCodec, View


class Measured(msgspec.Struct, frozen=True):
    """A record with everything that JSON finds difficult."""

    value: float | None = None
    deep: Any = None
    texts: dict[str, str] = {}


CODEC: StructCodec[Measured] = StructCodec(Measured)
LINES: StructCodec[Measured] = StructCodec(Measured, pretty=False)


def nested(depth: int) -> list[Any]:
    return [] if depth == 1 else [nested(depth - 1)]


@pytest.mark.parametrize(
    "record",
    [Measured(), Measured(1e300, [1, {"a": None}], {"é": "\u2028\n\0"}), Measured(deep=nested(90))],
    ids=["empty", "difficult", "deep"],
)
def test_a_record_comes_back_the_same(record: Measured) -> None:
    assert CODEC.decode(CODEC.encode(record), "here") == record
    assert CODEC.decode(CODEC.encode(record) + b"\n", "here") == record
    assert b"\n" not in LINES.encode(record)


@pytest.mark.parametrize(
    "record",
    [
        Measured(float("nan")),
        Measured(float("inf")),
        Measured(deep=nested(150)),
        Measured(deep="\ud800"),
        Measured(value="1"),  # type: ignore[arg-type]
        Measured(deep=object()),
    ],
    ids=["not a number", "infinite", "too deep", "half a character", "another type", "an object"],
)
def test_a_record_that_would_not_come_back_is_refused(record: Any) -> None:
    """Above all `NaN`, which `msgspec` writes as `null`: it would silently become None."""
    with pytest.raises(UsageFailure):
        CODEC.encode(record)


def test_the_limit_is_the_same_for_writing_and_for_reading() -> None:
    codec: StructCodec[Measured] = StructCodec(Measured, limit=100)
    room = 100 - len(codec.encode(Measured(deep="")))
    largest = codec.encode(Measured(deep="x" * room))

    assert len(largest) == 100
    assert codec.decode(largest + b"\n", "here").deep == "x" * room
    with pytest.raises(TooLarge):
        codec.encode(Measured(deep="x" * (room + 1)))
    with pytest.raises(Corrupt, match="here"):
        codec.decode(largest + b" \n", "here")


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a//b", "a/../b", "a/.", "a b", "a\nb", "a\0b", "é", "x" * 129], ids=ascii
)
def test_a_key_with_an_unsafe_name_cannot_be_made(name: str) -> None:
    with pytest.raises(NameInvalid):
        Key(name, CODEC)


def test_a_view_shows_what_it_has_and_refuses_the_rest() -> None:
    family = Family("jit/issues", CODEC)
    view = View({family.key("a"): Document(Measured(1.0), "1"), family.key("b"): None})

    assert view.get(family.key("a")) == Measured(1.0)
    assert view.get(family.key("b")) is None
    for look in (
        lambda: view.get(family.key("c")),
        lambda: view.document(family.key("c")),
        lambda: view.end(Stream("jit/events", LINES)),
        lambda: view.last(Stream("jit/events", LINES)),
    ):
        with pytest.raises(UsageFailure, match="was not named"):
            look()
