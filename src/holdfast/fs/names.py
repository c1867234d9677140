"""Checks that names, relative paths and texts are safe to pass to a filesystem, to store and to print."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping

from holdfast.errors import NameInvalid, PathEscape, SettingInvalid, TooLarge, UsageFailure

MAX_NAME = 128
"""Short enough that the suffixes of drafts and sidecars still fit into 255 bytes."""
LONGEST_TEXT = 1_000
"""For texts on one line: a purpose, a note, a label, a reason, a title."""
LONGEST_ACTOR = 200
LONGEST_DESCRIPTION = 100_000

_SAFE = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
SAFE_NAME = r"\A(?!\.\Z)(?!.*\.\.)[a-zA-Z0-9._-]+\Z"
"""Matches what `is_safe_name` accepts, apart from the length."""
SAFE_PATH = r"\A(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+\Z"
"""Matches what `split_relative` accepts, where `/` separates the parts."""
_DRAFT = re.compile(r"\..+-[0-9a-f]{12}\.tmp", re.ASCII | re.DOTALL)


def safe_name(text: str, *, what: str = "name") -> str:
    """Return `text` if it may be a file name, else raise `NameInvalid` with the reason.

    Letters, digits, dot, underscore and hyphen; no `..` anywhere; not `.`; 1 to 128 characters.
    """
    if is_safe_name(text):
        return text
    import unicodedata

    name = unicodedata.normalize("NFC", text)
    problems = {
        "is empty": not name,
        f"has {len(name)} characters, more than {MAX_NAME}": len(name) > MAX_NAME,
        "contains a path separator": "/" in name or "\\" in name,
        "contains a control character": any(ord(character) < 32 or ord(character) == 127 for character in name),
        "contains characters other than letters, digits, '.', '_' and '-'": not _SAFE.fullmatch(name),
        "is '.' or contains '..'": name == "." or ".." in name,
    }
    problem = next((each for each, is_found in problems.items() if is_found), None)
    if problem is None:
        return name
    raise NameInvalid(f"the {what} {_quoted(text)} {problem}", what=what, name=_quoted(text), problem=problem)


def is_safe_name(text: str) -> bool:
    """Whether `safe_name` would return the text as it is."""
    return bool(_SAFE.fullmatch(text)) and len(text) <= MAX_NAME and text != "." and ".." not in text


def is_draft_name(text: str) -> bool:
    """Whether a draft (see `fs.durable`) may have this name."""
    return bool(_DRAFT.fullmatch(text))


def checked_text(text: str, *, what: str, limit: int = LONGEST_TEXT) -> str:
    """Return `text` if it can be stored, else raise `TooLarge` or, if it is not valid UTF-8, `UsageFailure`.

    Control characters are allowed, because they are escaped when a text is printed.
    """
    if len(text) > limit:
        raise TooLarge(f"the {what}", len(text), limit, unit="characters")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            message = f"the {what} {_quoted(text)} is not valid UTF-8"
            raise UsageFailure(message, hint="Write it in UTF-8.", what=what) from None
    return text


def checked_actor(text: str, setting: str = "actor") -> str:
    """Return an actor of the form `kind:name`, or raise `SettingInvalid`."""
    if not re.fullmatch(r"[^:\s]+:\S+", text) or len(text) > LONGEST_ACTOR:
        raise SettingInvalid(setting, text, f"kind:name, such as agent:alice, of at most {LONGEST_ACTOR} characters")
    return checked_text(text, what=setting)


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def counted(number: int, noun: str) -> str:
    """A number of things for people: `1 file`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("ry") else f"{number} {noun}s"


@functools.lru_cache(maxsize=1024)
def split_relative(relative: str) -> tuple[str, ...]:
    """Split a relative path into its parts; raise `PathEscape` if it could lead upwards or elsewhere."""
    separators, forbidden = ("/", "\0") if sys.platform != "win32" else ("/\\", "\0:")
    parts = re.split(f"[{re.escape(separators)}]", relative)
    if any(part in ("", ".", "..") or any(each in part for each in forbidden) for part in parts):
        raise PathEscape(
            f"{_quoted(relative)} is not a safe relative path: it must not be absolute or empty, nor have "
            "empty, '.' or '..' parts",
            path=_quoted(relative),
        )
    return tuple(parts)


def _quoted(text: str) -> str:
    """The text quoted, escaped, and no longer than a line."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 160 else quoted[:157] + "...'"


def unique_id() -> str:
    """A random UUID (version 4), without the cost of loading `uuid`."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def in_utf_8(value: object) -> object:
    """The value as JSON can represent it, with every string encodable as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(in_utf_8(key)): in_utf_8(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_utf_8(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else in_utf_8(str(value))


def printable(text: str) -> str:
    """The text with everything escaped except visible characters and spaces."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
