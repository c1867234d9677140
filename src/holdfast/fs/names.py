"""Names and relative paths that are safe to hand to a file system; texts that are safe to keep."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping

from holdfast.errors import NameInvalid, PathEscape, SettingInvalid, TooLarge, UsageFailure

MAX_NAME = 128
"""The longest name: short enough that a draft's or a sidecar's additions still fit into 255 bytes."""

LONGEST_TEXT = 1_000
"""The longest text that is shown on a line: a purpose, a note, a label, a reason, a title."""

LONGEST_ACTOR = 200
"""The longest name of somebody who does something."""

LONGEST_DESCRIPTION = 100_000
"""The longest text that is shown by itself."""

_SAFE = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


def safe_name(text: str, *, what: str = "name") -> str:
    """Return `text` in NFC if it may be used as a file name, else raise `NameInvalid` saying why.

    Letters, digits, dot, underscore and hyphen; no `..` anywhere; not `.`; 1 to 128 characters.
    """
    if is_safe_name(text):
        return text
    name = text if text.isascii() else _composed(text)
    if not name:
        problem = "is empty"
    elif len(name) > MAX_NAME:
        problem = f"has {len(name)} characters, more than {MAX_NAME}"
    elif "/" in name or "\\" in name:
        problem = "contains a path separator"
    elif any(ord(character) < 32 or ord(character) == 127 for character in name):
        problem = "contains a control character"
    elif not _SAFE.fullmatch(name):
        problem = "contains characters other than letters, digits, '.', '_' and '-'"
    elif name == "." or ".." in name:
        problem = "is '.' or contains '..'"
    else:
        return name
    raise NameInvalid(f"the {what} {_shown(text)} {problem}", what=what, name=_shown(text), problem=problem)


def is_safe_name(text: str) -> bool:
    """Whether `safe_name` would return the text as it is."""
    return bool(_SAFE.fullmatch(text)) and len(text) <= MAX_NAME and text != "." and ".." not in text


def checked_text(text: str, *, what: str, limit: int = LONGEST_TEXT) -> str:
    """Return what somebody wrote for others to read, if it can be kept and shown; else refuse it.

    Control characters are no reason to: whoever shows a text escapes them.
    """
    if len(text) > limit:
        raise TooLarge(f"the {what}", len(text), limit, unit="characters")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageFailure(
                f"the {what} {_shown(text)} is not valid UTF-8", hint="Write it in UTF-8.", what=what
            ) from None
    return text


def checked_actor(text: str, setting: str = "actor") -> str:
    """Somebody, as `kind:name`."""
    if not re.fullmatch(r"[^:\s]+:\S+", text) or len(text) > LONGEST_ACTOR:
        raise SettingInvalid(setting, text, "kind:name, such as agent:alice or human:bob")
    return checked_text(text, what=setting)


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text, cut off if it is too long: for one that is made of others."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


@functools.lru_cache(maxsize=1024)
def split_relative(relative: str) -> tuple[str, ...]:
    """Split a relative path into its parts, refusing everything that could lead upwards or elsewhere."""
    separators, forbidden = ("/", "\0") if sys.platform != "win32" else ("/\\", "\0:")
    parts = re.split(f"[{re.escape(separators)}]", relative)
    if any(part in ("", ".", "..") or any(each in part for each in forbidden) for part in parts):
        raise PathEscape(
            f"{_shown(relative)} is not a plain relative path: it must not be absolute or empty, "
            "nor have empty, '.' or '..' parts",
            path=_shown(relative),
        )
    return tuple(parts)


def _composed(text: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", text)


def _shown(text: str) -> str:
    """The text as it can be shown: quoted, escaped, not longer than a line."""
    shown = ascii(text)
    return shown if len(shown) <= 160 else shown[:157] + "...'"


def unique_id() -> str:
    """A text that nobody else has: a random UUID (version 4), without loading what else makes them."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


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
