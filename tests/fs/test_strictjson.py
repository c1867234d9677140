"""Strict JSON: only documents that every parser reads the same way are accepted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ExitStatus, JsonInvalid, TooLarge
from holdfast.fs.strictjson import MAX_BYTES, MAX_DEPTH, decode, encode
from proof.effort import rounds

# --- Decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"null", None),
        (b" true\n", True),
        (b"-0.5e-3", -0.0005),
        (b"1e308", 1e308),
        (b"1e-999", 0.0),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        ('"é\u2028😀"'.encode(), "é\u2028😀"),
        (rb'"\ud83d\ude00"', "😀"),
        (rb'"\\ud83d"', "\\ud83d"),
        (b'{"a":{"a":[1,{}]}}', {"a": {"a": [1, {}]}}),
        (b'{"a":1,"A":2}', {"a": 1, "A": 2}),
    ],
    ids=lambda each: ascii(each)[:30],
)
def test_valid_json_is_decoded(text: bytes, value: object) -> None:
    assert decode(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"NaN", "NaN is not JSON"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b"Infinity", "Infinity is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"1e999", "a number is too large"),
        (b"[-1E+400]", "a number is too large"),
        (b'{"a":{"b":1.5e309}}', "a number is too large"),
        (b"9" * 250 + b"e99", "a number is too large"),
        (b"1" + b"0" * 309 + b".0", "a number is too large"),
        (b"9" * 5000, "limit"),
        (b'{"a":1,"a":1}', "the key 'a' occurs twice in one object"),
        (b'[{"x":{"b":1,"c":2,"b":3}}]', "the key 'b' occurs twice in one object"),
        (rb'{"a":1,"\u0061":2}', "the key 'a' occurs twice in one object"),
        (rb'"\ud800"', "has a lone surrogate"),
        (rb'["\uDFFF"]', "has a lone surrogate"),
        (rb'{"\ud800":1}', "has a lone surrogate"),
        (rb'{"a":{"b":"\ude00\ud83d"}}', "has a lone surrogate"),
        (b"\xef\xbb\xbf{}", "Expecting value"),
        (b"\xff\xfe{\0}\0", "codec can't decode"),
        (b'"\xff"', "codec can't decode"),
        (b'"\xed\xa0\x80"', "codec can't decode"),
        (b'"\xc0\xaf"', "codec can't decode"),
        (b"", "Expecting value"),
        (b"\0", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"{}x", "Extra data"),
        (b"{'a':1}", "Expecting property name"),
        (b"[1,]", "Expecting value|Illegal trailing comma"),
        (b'{"a":1,}', "Expecting property name|Illegal trailing comma"),
        (b'"a\nb"', "Invalid control character"),
        (b"01", "Extra data"),
        (b"+1", "Expecting value"),
        (b".5", "Expecting value"),
        (b"0x10", "Extra data"),
        (b"undefined", "Expecting value"),
        (b"// comment\n1", "Expecting value"),
    ],
    ids=lambda each: ascii(each)[:30],
)
def test_json_that_other_parsers_may_reject_or_read_differently_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(JsonInvalid, match=problem) as caught:
        decode(text, source="/a/b.json")

    assert str(caught.value).startswith("/a/b.json is not valid JSON: ")
    assert caught.value.facts["source"] == "/a/b.json"
    assert caught.value.exit_status is ExitStatus.CORRUPT


def nested(depth: int, inner: bytes = b"") -> bytes:
    return b"[" * depth + inner + b"]" * depth


@pytest.mark.parametrize("inner", [b"", b"1", b'"x"', b"1,2"], ids=ascii)
def test_nesting_depth_is_limited(inner: bytes) -> None:
    assert decode(nested(MAX_DEPTH, inner)) is not None

    for depth in (MAX_DEPTH + 1, MAX_DEPTH + 2, 1000, 100_000):
        with pytest.raises(JsonInvalid, match=f"nested deeper than {MAX_DEPTH}"):
            decode(nested(depth, inner))


def test_objects_count_toward_depth_like_lists() -> None:
    def objects(depth: int) -> bytes:
        return b'{"a":' * depth + b"1" + b"}" * depth

    assert decode(objects(MAX_DEPTH)) is not None
    with pytest.raises(JsonInvalid, match="nested deeper"):
        decode(objects(MAX_DEPTH + 1))


def test_many_siblings_are_not_deep() -> None:
    assert len(decode(b"[" + b"[],{}," * 10_000 + b"0]")) == 20_001
    assert decode(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]


def test_a_text_over_the_limit_is_refused_without_parsing() -> None:
    assert decode(b'"123"', limit=5) == "123"
    with pytest.raises(TooLarge, match=r"/a/b\.json is 6 bytes; the limit is 5"):
        decode(b"broken", source="/a/b.json", limit=5)
    assert MAX_BYTES == 16 << 20


# --- Encoding -----------------------------------------------------------------------------------------


def test_output_is_compact_utf8_in_insertion_order() -> None:
    assert encode({"b": [1, 2.5, None], "a": "é"}) == '{"b":[1,2.5,null],"a":"é"}'.encode()


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        {"a": math.inf},
        [-math.inf],
        {math.nan: 1},
        "\ud800",
        {"a": ["\udfff"]},
        {"\ud800": 1},
        {1: 2},
        {1: "a", "1": "b"},
        {True: 1},
        {None: 1},
        {"a": {2.5: 1}},
        {(1, 2): 3},
        {1, 2},
        b"bytes",
        object(),
        10**5000,
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_value_that_could_not_be_decoded_again_is_not_encoded(value: object) -> None:
    with pytest.raises(JsonInvalid, match=r"^the lock record is not valid JSON: "):
        encode(value, what="the lock record")


def test_a_value_that_contains_itself_is_not_encoded() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(JsonInvalid):
        encode(value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: (inner,)])
def test_a_value_too_deep_to_decode_is_not_encoded(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert decode(encode(value)) is not None

    for _ in range(2):
        value = wrap(value)
        with pytest.raises(JsonInvalid, match="nested deeper"):
            encode(value)


def test_a_value_over_the_size_limit_is_not_encoded() -> None:
    assert encode("é", limit=4) == '"é"'.encode()
    with pytest.raises(TooLarge, match="the value is 4 bytes; the limit is 3"):
        encode("é", limit=3)


# --- Round trips --------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(values)
@example(10**4000)
@example(1.7976931348623157e308)
@example(5e-324)
@example(-0.0)
@example("\u2028\x7f\0\\ud800")
def test_an_encoded_value_decodes_to_the_same_value(value: object) -> None:
    text = encode(value)

    again = decode(text)

    assert again == value
    assert repr(again) == repr(value)
    assert encode(again) == text
    assert b"\n" not in text, "it fits on one line"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=rounds(300, least=5))
@given(anything)
@example({1: "a", "1": "b"})
@example([["\ud800"]])
def test_every_value_that_encodes_also_decodes(value: object) -> None:
    try:
        text = encode(value)
    except JsonInvalid:
        return
    assert encode(decode(text)) == text


@settings(deadline=None, max_examples=rounds(500, least=5))
@given(st.binary() | st.text('{}[]",:0123456789eE+-.\\ud8Nalnftr', max_size=30).map(str.encode))
def test_every_accepted_text_decodes_as_in_the_standard_library(text: bytes) -> None:
    try:
        value = decode(text)
    except JsonInvalid:
        return
    assert json.loads(text.decode("utf-8")) == value
    assert decode(encode(value)) == value
