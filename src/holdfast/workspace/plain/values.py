"""Any value as JSON can have it; any text as people can be shown it."""

from __future__ import annotations

from collections.abc import Mapping


def in_utf_8(value: object) -> object:
    """The value as JSON can have it, with all strings such that they can be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(in_utf_8(key)): in_utf_8(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_utf_8(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else in_utf_8(str(value))


def printable(text: str) -> str:
    """The text with everything escaped that is not a visible character or a blank."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
