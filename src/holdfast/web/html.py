"""HTML that is escaped by construction: only `h` makes an `Html`, and `h` escapes every text.

Names of elements and attributes are checked, there are no attributes with scripts or styles, and a link leads to a page
of this server. Control characters, and those that change the direction of text, are shown, not obeyed.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import Final, TypeAlias

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9]*(?:[-:][a-zA-Z0-9]+)*\Z")
_LINK = re.compile(r"/(?!/)|[?#]")
_LINKS = ("href", "src", "action", "data-src", "data-href")
_REFUSED = ("style", "srcdoc", "formaction", "ping")
_REFUSED_TAGS = ("style", "iframe", "object", "embed", "base", "foreignobject")
_VOID = frozenset("br col hr img input link meta".split())
_TEXT_BREAKS = "\n\t"


class Html:
    """A piece of HTML. Only `h`, `join` and `document` of this module make one."""

    __slots__ = ("_text",)

    def __init__(self, text: str, key: object) -> None:
        if key is not _KEY:
            raise TypeError("only `h` makes HTML: it escapes what it is given")
        self._text: Final = text

    def __str__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)


_KEY = object()
Child: TypeAlias = "Html | str | int | Iterable[Child] | None"
Value: TypeAlias = "str | int | float | bool | None"


def h(tag: str, /, *children: Child, **attributes: Value) -> Html:
    """An element. `class_` and `for_` are `class` and `for`; other underscores become hyphens."""
    parts = ["<", _checked_tag(tag)]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        shown = _checked_attribute(name)
        if value is True:
            parts.append(f" {shown}")
            continue
        if shown in _LINKS and not _LINK.match(str(value)):
            raise ValueError(f"{value!r} is not a page of this server")
        parts.append(f' {shown}="{escape(shown_text(str(value)))}"')
    parts.append(">")
    if tag not in _VOID:
        _write(children, parts)
        parts.append(f"</{tag}>")
    return Html("".join(parts), _KEY)


def join(*children: Child) -> Html:
    """Several pieces, one after the other."""
    parts: list[str] = []
    _write(children, parts)
    return Html("".join(parts), _KEY)


def document(page: Html) -> bytes:
    """The page as it is sent."""
    return b"<!doctype html>\n" + str(page).encode("utf-8", "backslashreplace")


def embedded(tag: str, content: str, **attributes: Value) -> Html:
    """A style or script of our own inside a page that is a file: its content is not text, and ends at its end tag."""
    if tag not in ("style", "script") or "</" in content or "<!--" in content:
        raise ValueError("this content could end its element")
    opening = str(h("script", **attributes)).removesuffix("</script>").replace("<script", f"<{tag}", 1)
    return Html(f"{opening}{content}</{tag}>", _KEY)


def _write(children: Child, parts: list[str]) -> None:
    if isinstance(children, Html):
        parts.append(str(children))
    elif isinstance(children, str):
        parts.append(escape(shown_text(children), quote=False))
    elif isinstance(children, int):
        parts.append(str(children))
    elif children is not None:
        for each in children:
            _write(each, parts)


def shown_text(text: str) -> str:
    """The text with control characters as their pictures, and invisible ones as their code points."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


@functools.lru_cache(maxsize=512)
def _shown(character: str) -> str:
    if character.isprintable() or character in _TEXT_BREAKS:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(character) == "Zs":
        return " "
    return f"<U+{code:04X}>"


@functools.cache
def _checked_tag(tag: str) -> str:
    if not _NAME.match(tag) or tag.lower() in _REFUSED_TAGS:
        raise ValueError(f"{tag!r} is not an element that a page may have")
    return tag


@functools.cache
def _checked_attribute(name: str) -> str:
    shown = name.rstrip("_").replace("_", "-")
    if not _NAME.match(shown) or shown.lower().startswith("on") or shown.lower() in _REFUSED:
        raise ValueError(f"{shown!r} is not an attribute that a page may have")
    return shown
