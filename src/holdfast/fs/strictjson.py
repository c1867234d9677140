"""Strict JSON: no NaN, no duplicate key, no lone surrogate, limited size and depth.

Python accepts all of those. Another program may refuse them or read them differently, so they are refused
here, when reading and when writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from holdfast.errors import JsonInvalid, TooLarge

MAX_BYTES = 16 << 20
MAX_DEPTH = 100
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def decode(text: bytes, *, source: str = "the text", limit: int = MAX_BYTES) -> Any:
    """Read one JSON value; raise `JsonInvalid` with the `source` and the reason."""
    if len(text) > limit:
        raise TooLarge(source, len(text), limit)
    try:
        value = _DECODER.decode(text.decode("utf-8"))
    except RecursionError:
        raise _invalid(source, _TOO_DEEP) from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError, oversized integers
        raise _invalid(source, str(error)) from None
    if b"\\u" in text or _LARGE.search(text) or text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check(value, source)
    return value


def encode(value: object, *, what: str = "the value", limit: int = MAX_BYTES, string_keys: bool = False) -> bytes:
    """Write a value as compact UTF-8 JSON, without a final newline.

    `string_keys` promises that all keys are strings, and skips the check.
    """
    try:
        text = _ENCODER.encode(value).encode("utf-8")
    except RecursionError:
        raise _invalid(what, _TOO_DEEP) from None
    except (ValueError, TypeError) as error:
        raise _invalid(what, str(error)) from None
    if len(text) > limit:
        raise TooLarge(what, len(text), limit)
    if not string_keys or text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check(value, what)
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!a} occurs twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_LARGE = re.compile(rb"[0-9](?:[eE]\+?[0-9]{3,}(?:[\s,\]}]|$)|[0-9]{199})")
"""Every text with an infinite number matches this, and few others. A lone surrogate needs an escape."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _check(value: Any, source: str) -> None:
    """Refuse excessive depth, infinite numbers (1e999), lone surrogates, and keys that are not strings."""
    level, depth = [value], 0  # all values inside `depth` lists and objects
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each, source)
            elif isinstance(each, float) and each in (float("inf"), float("-inf")):
                raise _invalid(source, "a number is too large: the limit is about 1.8e308")
            elif isinstance(each, (dict, list, tuple)):
                if depth == MAX_DEPTH:
                    raise _invalid(source, _TOO_DEEP)
                below.extend(_contents(each, source))
        level, depth = below, depth + 1


def _contents(container: dict[Any, Any] | list[Any] | tuple[Any, ...], source: str) -> Iterable[Any]:
    if not isinstance(container, dict):
        return container
    for key in container:
        if not isinstance(key, str):  # `1` would be written as `"1"`, which may be another key
            raise _invalid(source, f"the key {key!r} is not a string")
        _check_text(key, source)
    return container.values()


def _check_text(text: str, source: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid(source, f"the string {text!a} has a lone surrogate") from None


def _invalid(source: str, problem: str) -> JsonInvalid:
    return JsonInvalid(f"{source} is not valid JSON: {problem}", source=source, problem=problem)
