"""Entries in somebody else's JSON file, put in and taken out as text, so that the rest stays as it is.

JSON has no comments to mark a block with, and reading and writing it anew would change the layout of
everything. So an entry is inserted behind the last of its siblings, and taking it out removes exactly
the text that was inserted. What else was made for it can be told from the layout: a container that we
had to make has its first entry on a line of its own, while into one that was there and empty the
entry is put right behind the bracket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import JsonInvalid, Refused
from holdfast.fs import strictjson

STEP = "  "
MOST_BYTES = 4 << 20
_BLANK = " \t\r\n"


class JsonNode(NamedTuple):
    """A value in the text: from `start` to `end`. `members` are those of an object or array, by key or
    index; `keys` are where the members themselves begin (an object's with their keys)."""

    start: int
    end: int
    kind: str
    members: dict[str, JsonNode]
    begins: dict[str, int]


class JsonEntry(NamedTuple):
    """One thing to have in a JSON file: at `path`, as an item of an array or as a member of an object.

    `is_ours` tells, from a value that was read, whether it is this entry in any of its versions.
    """

    path: tuple[str, ...]
    value: object
    is_ours: Callable[[object], bool]
    key: str | None = None
    """The key of a member; None for an item of an array."""


def with_entry(text: str | None, entry: JsonEntry, *, where: str) -> str:
    """The text with the entry in it. One that is there already is left if it is the same, else replaced.

    `text` is None if there is no such file yet.
    """
    if text is None:
        return f"{{\n{STEP}{_member(entry.path, entry, STEP)}\n}}\n"
    document = _parsed(text, where)
    holder, missing = _descend(document, entry, where)
    if not missing:
        place, same = _place_of(holder, entry, text)
        if place is not None:
            return text if same else _replaced(text, holder.members[place], entry)
        if entry.key is not None and entry.key in holder.members:
            raise _taken(entry, where)
    return _inserted(text, holder, missing, entry)


def without_entry(text: str, entry: JsonEntry, *, where: str) -> str | None:
    """The text without the entry, and without what was made for it; None if nothing else is left."""
    document = _parsed(text, where)
    holder, missing = _descend(document, entry, where)
    if missing:
        return text
    place, _ = _place_of(holder, entry, text)
    if place is None:
        return text
    trail = [*_trail(document, entry.path), (holder, place)]
    for above, name in reversed(trail):
        if len(above.members) > 1 or not _made_for_it(text, above):
            return _cut(text, above, name)
    return None


# --- Putting in -------------------------------------------------------------------------------------


def _inserted(text: str, holder: JsonNode, missing: Sequence[str], entry: JsonEntry) -> str:
    depth = _depth(text, holder)
    if holder.members:
        last = list(holder.members)[-1]
        at = holder.members[last].end
        gap = _blanks_before(text, holder.begins[last])  # as its neighbour has them
        indent = gap.rpartition("\n")[2] if "\n" in gap else STEP * (depth + 1)
        return f"{text[:at]},{gap}{_member(missing, entry, indent)}{text[at:]}"
    at = holder.start + 1
    return f"{text[:at]}{_member(missing, entry, STEP * (depth + 1))}{text[at:]}"


def _member(missing: Sequence[str], entry: JsonEntry, indent: str) -> str:
    """The entry with the containers that have to be made for it, each with its content on its own line."""
    if missing:
        first, *rest = missing
        inner = indent + STEP
        brackets = "[]" if not rest and entry.key is None else "{}"
        below = _member(rest, entry, inner)
        return f"{json.dumps(first)}: {brackets[0]}\n{inner}{below}\n{indent}{brackets[1]}"
    value = json.dumps(entry.value, indent=len(STEP), ensure_ascii=False).replace("\n", "\n" + indent)
    return value if entry.key is None else f"{json.dumps(entry.key)}: {value}"


def _replaced(text: str, node: JsonNode, entry: JsonEntry) -> str:
    line = text[: node.start].rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip(_BLANK))]
    value = json.dumps(entry.value, indent=len(STEP), ensure_ascii=False).replace("\n", "\n" + indent)
    return text[: node.start] + value + text[node.end :]


# --- Taking out -------------------------------------------------------------------------------------


def _cut(text: str, holder: JsonNode, name: str) -> str:
    names = list(holder.members)
    index = names.index(name)
    start, end = holder.begins[name], holder.members[name].end
    if index > 0:
        start = holder.members[names[index - 1]].end  # with the comma before it
    elif len(names) > 1:
        end = holder.begins[names[1]]  # with the comma behind it
    return text[:start] + text[end:]


def _made_for_it(text: str, holder: JsonNode) -> bool:
    """Whether this container was made for the only entry that it has; see the module's text."""
    return text[holder.start + 1] in "\r\n"


def _trail(document: JsonNode, path: Sequence[str]) -> list[tuple[JsonNode, str]]:
    trail = []
    node = document
    for name in path:
        trail.append((node, name))
        node = node.members[name]
    return trail


# --- Finding ----------------------------------------------------------------------------------------


def _descend(document: JsonNode, entry: JsonEntry, where: str) -> tuple[JsonNode, tuple[str, ...]]:
    """The deepest container on the entry's path that is there, and the names that are missing."""
    node = document
    for depth, name in enumerate(entry.path):
        if node.kind != "object":
            raise _other_shape(entry.path[:depth], "an object", where)
        below = node.members.get(name)
        if below is None:
            return node, entry.path[depth:]
        node = below
    wanted = "array" if entry.key is None else "object"
    if node.kind != wanted:
        raise _other_shape(entry.path, f"an {wanted}", where)
    return node, ()


def _place_of(holder: JsonNode, entry: JsonEntry, text: str) -> tuple[str | None, bool]:
    for name, node in holder.members.items():
        if entry.key is not None and name != entry.key:
            continue
        value = json.loads(text[node.start : node.end])
        if entry.is_ours(value):
            return name, value == entry.value
    return None, False


def _blanks_before(text: str, end: int) -> str:
    start = end
    while start > 0 and text[start - 1] in _BLANK:
        start -= 1
    return text[start:end]


def _depth(text: str, holder: JsonNode) -> int:
    line = text[: holder.start].rpartition("\n")[2]
    return (len(line) - len(line.lstrip(" "))) // len(STEP)


def _other_shape(path: Sequence[str], wanted: str, where: str) -> Refused:
    place = ".".join(path) or "the file"
    return Refused(
        f"{place} in {where} is not {wanted}",
        hint="Holdfast changes only files whose shape it knows. Put it right, or add the entry by hand.",
        path=where,
    )


def _taken(entry: JsonEntry, where: str) -> Refused:
    return Refused(
        f"{where} has an entry {entry.key} already, which was not made by this command",
        hint="Remove or rename that entry first.",
        path=where,
    )


# --- Reading ----------------------------------------------------------------------------------------


def _parsed(text: str, where: str) -> JsonNode:
    try:
        strictjson.decode(text.encode(), source=where, limit=MOST_BYTES)
    except JsonInvalid as error:
        raise Refused(
            f"{where} cannot be changed: {error}",
            hint="Put it right first (comments are not JSON either), or add the entry by hand.",
            path=where,
        ) from None
    node, _ = _value(text, _after_blanks(text, 0))
    return node


def _value(text: str, at: int) -> tuple[JsonNode, int]:
    """The value that begins at `at`, in a text that is known to be JSON; and where it ends."""
    if text[at] in "{[":
        return _container(text, at)
    if text[at] == '"':
        end = _string_end(text, at)
    else:
        end = at
        while end < len(text) and text[end] not in ",]}" + _BLANK:
            end += 1
    return JsonNode(at, end, "plain", {}, {}), end


def _container(text: str, start: int) -> tuple[JsonNode, int]:
    is_object = text[start] == "{"
    members: dict[str, JsonNode] = {}
    begins: dict[str, int] = {}
    at = _after_blanks(text, start + 1)
    while text[at] not in "}]":
        begin, name = at, str(len(members))
        if is_object:
            end = _string_end(text, at)
            name = json.loads(text[at:end])
            at = _after_blanks(text, _after_blanks(text, end) + 1)
        members[name], at = _value(text, at)
        begins[name] = begin
        at = _after_blanks(text, at)
        if text[at] == ",":
            at = _after_blanks(text, at + 1)
    return JsonNode(start, at + 1, "object" if is_object else "array", members, begins), at + 1


def _string_end(text: str, at: int) -> int:
    at += 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at
