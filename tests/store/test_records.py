"""Records survive a round trip through bytes, or are refused; unsafe names of documents are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt, Failure, NameInvalid, TooLarge, UsageFailure
from holdfast.store.model import Document, Family, Key, Stream, StructCodec, View
from proof.effort import rounds


class Measured(msgspec.Struct, frozen=True):
    """A record with values that JSON handles badly."""

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
def test_a_record_round_trips(record: Measured) -> None:
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
def test_a_record_that_would_not_round_trip_is_refused(record: Any) -> None:
    """In particular `NaN`: `msgspec` writes it as `null`, so it would silently become None."""
    with pytest.raises(UsageFailure):
        CODEC.encode(record)


def test_the_size_limit_is_the_same_for_writing_and_reading() -> None:
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
def test_a_key_with_an_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(NameInvalid):
        Key(name, CODEC)


def test_a_view_has_the_named_keys_and_refuses_others() -> None:
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


class Loose(msgspec.Struct, frozen=True):
    """A record whose fields can each come back as something else, in different ways."""

    anything: Any = None
    number: float | None = None
    counts: dict[int, int] = {}
    names: set[str] = set()
    instant: datetime | None = None


class Slow(StructCodec[Loose]):
    """A codec without the fast paths."""

    def decode(self, content: bytes, source: str) -> Loose:
        return self._decode_strictly(content.removesuffix(b"\n"), source)

    def _encode_fast(self, record: Loose) -> None:
        return None


SLOW = Slow(Loose)


def outcome(act: Callable[[], object]) -> tuple[object, ...]:
    try:
        return ("came back", act())
    except Failure as failure:
        return (type(failure), str(failure), failure.facts)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(
    st.builds(
        Loose,
        anything,
        st.none() | st.floats(),
        st.dictionaries(st.integers(), st.integers()),
        st.sets(st.text()),
        st.none() | st.datetimes(),
    )
)
@example(Loose(float("nan")))
@example(Loose([None, {"a": float("-inf")}]))
@example(Loose(10**30, float("inf")))
@example(Loose(2**70, None))
@example(Loose(nested(101)))
@example(Loose(-0.0, 1e300))
def test_the_fast_path_for_writing_gives_the_same_result(record: Loose) -> None:
    def comes_back(codec: StructCodec[Loose]) -> tuple[object, ...]:
        return outcome(lambda: SLOW.decode(codec.encode(record), "here"))

    for pretty in (True, False):
        assert comes_back(StructCodec(Loose, pretty=pretty)) == comes_back(Slow(Loose, pretty=pretty))


written = st.builds(Loose, anything.filter(lambda each: each == each), st.none(), st.just({1: 2}))


@st.composite
def nearly_written(draw: st.DrawFn) -> bytes:
    """Encoded records with a small edit."""
    try:
        content = StructCodec(Loose, pretty=draw(st.booleans())).encode(draw(written))
    except UsageFailure:
        return b"{}"
    at = draw(st.integers(0, len(content)))
    cut = draw(st.integers(0, 3))
    put = draw(st.sampled_from([b"", b" ", b"0", b"e999", b"NaN", b"null", b"\\ud800", b'"number":null,', b"\xff"]))
    return content[:at] + put + content[at + cut :]


@settings(deadline=None, max_examples=rounds(300, least=5))
@given(nearly_written())
@example(b'{"anything":1,"anything":1}')
@example(b'{"anything":1,"number":null,"counts":{"1":1,"1":1},"names":[],"instant":null}')
@example(b'{"anything":1,"number":null,"counts":{},"names":["a","a"],"instant":null}')
@example(b'{"anything":"\\ud800","number":null,"counts":{},"names":[],"instant":null}')
@example(b'{"anything":1e999,"number":null,"counts":{},"names":[],"instant":null}')
@example(b'{"anything":-0,"number":1,"counts":{},"names":[],"instant":null,"more":1}')
@example(b'{"anything":' + b"[" * 120 + b"]" * 120 + b',"number":null,"counts":{},"names":[],"instant":null}')
def test_the_fast_path_for_reading_gives_the_same_result(content: bytes) -> None:
    def read(codec: StructCodec[Loose]) -> tuple[object, ...]:
        return outcome(lambda: codec.decode(content, "here"))

    assert read(StructCodec(Loose)) == read(SLOW) == read(StructCodec(Loose, pretty=False))
