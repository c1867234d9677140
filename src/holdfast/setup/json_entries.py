"""Entries in other programs' JSON files, inserted and removed as text, so that the rest stays as it is.

JSON has no comments to mark a block with, and parsing and serializing would change the layout of the whole
file. So an entry is inserted after the last of its siblings, and removing it removes exactly the inserted
text. The layout also tells which containers were created for it: a created container has its first entry
on a line of its own, while in an existing empty one the entry follows the bracket directly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import JsonInvalid, Refused
from holdfast.fs import strictjson
from holdfast.setup.edits import MOST_BYTES

STEP = "  "
_BLANK = " \t\r\n"


class JsonNode(NamedTuple):
    """A value in the text, from `start` to `end`."""

    start: int
    end: int
    kind: str
    members: dict[str, JsonNode]  # by key or index
    begins: dict[str, int]  # where each member starts, including its key


class JsonEntry(NamedTuple):
    """An entry at `path`: a member of an object if it has a `key`, else an item of an array."""

    path: tuple[str, ...]
    value: object
    is_ours: Callable[[object], bool]  # recognises a value as this entry, in any version
    key: str | None = None


def with_entry(text: str | None, entry: JsonEntry, *, where: str) -> str:
    """The text with the entry; an older version of it is replaced. `text` is None for a new file."""
    if text is None:
        return f"{{\n{STEP}{_member(entry.path, entry, STEP)}\n}}\n"
    container, missing = _descend(_parsed(text, where), entry, where)
    if not missing:
        if (name := _find(container, entry, text)) is not None:
            return _replaced(text, container.members[name], entry)
        if entry.key is not None and entry.key in container.members:
            raise Refused(
                f"{where} cannot be changed: it has an entry {entry.key} that was not made by this command",
                hint="Remove or rename that entry first.",
                path=where,
            )
    return _inserted(text, container, missing, entry)


def without_entry(text: str, entry: JsonEntry, *, where: str) -> str | None:
    """The text without the entry and the containers created for it; None if nothing else is left."""
    document = _parsed(text, where)
    container, missing = _descend(document, entry, where)
    name = None if missing else _find(container, entry, text)
    if name is None:
        return text
    path, node = [], document
    for step in entry.path:
        path.append((node, step))
        node = node.members[step]
    for above, step in reversed([*path, (container, name)]):
        created_for_it = text[above.start + 1] in "\r\n"
        if len(above.members) > 1 or not created_for_it:
            return _cut(text, above, step)
    return None


def _inserted(text: str, container: JsonNode, missing: Sequence[str], entry: JsonEntry) -> str:
    line = text[: container.start].rpartition("\n")[2]
    depth = (len(line) - len(line.lstrip(" "))) // len(STEP)
    indent = STEP * (depth + 1)
    if not container.members:
        at = container.start + 1
        return f"{text[:at]}{_member(missing, entry, indent)}{text[at:]}"
    last = list(container.members)[-1]
    at, begin = container.members[last].end, container.begins[last]
    gap = text[len(text[:begin].rstrip(_BLANK)) : begin]  # the same blanks as before its neighbour
    indent = gap.rpartition("\n")[2] if "\n" in gap else indent
    return f"{text[:at]},{gap}{_member(missing, entry, indent)}{text[at:]}"


def _member(missing: Sequence[str], entry: JsonEntry, indent: str) -> str:
    """The entry inside the missing containers, each with its content on a line of its own."""
    if missing:
        first, *rest = missing
        inner = indent + STEP
        left, right = "[]" if not rest and entry.key is None else "{}"
        return f"{json.dumps(first)}: {left}\n{inner}{_member(rest, entry, inner)}\n{indent}{right}"
    value = _value_text(entry, indent)
    return value if entry.key is None else f"{json.dumps(entry.key)}: {value}"


def _value_text(entry: JsonEntry, indent: str) -> str:
    return json.dumps(entry.value, indent=len(STEP), ensure_ascii=False).replace("\n", "\n" + indent)


def _replaced(text: str, node: JsonNode, entry: JsonEntry) -> str:
    if json.loads(text[node.start : node.end]) == entry.value:
        return text
    line = text[: node.start].rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip(_BLANK))]
    return text[: node.start] + _value_text(entry, indent) + text[node.end :]


def _cut(text: str, container: JsonNode, name: str) -> str:
    names = list(container.members)
    index = names.index(name)
    start, end = container.begins[name], container.members[name].end
    if index > 0:
        start = container.members[names[index - 1]].end  # with the comma before it
    elif len(names) > 1:
        end = container.begins[names[1]]  # with the comma after it
    return text[:start] + text[end:]


def _descend(document: JsonNode, entry: JsonEntry, where: str) -> tuple[JsonNode, tuple[str, ...]]:
    """The deepest existing container on the entry's path, and the names that are missing."""
    node = document
    for depth, name in enumerate(entry.path):
        _require_kind(node, "object", entry.path[:depth], where)
        if name not in node.members:
            return node, entry.path[depth:]
        node = node.members[name]
    _require_kind(node, "array" if entry.key is None else "object", entry.path, where)
    return node, ()


def _require_kind(node: JsonNode, kind: str, path: Sequence[str], where: str) -> None:
    if node.kind != kind:
        raise Refused(
            f"{where} cannot be changed: {'.'.join(path) or 'its content'} is not an {kind}",
            hint="Correct the file, or add the entry by hand.",
            path=where,
        )


def _find(container: JsonNode, entry: JsonEntry, text: str) -> str | None:
    """The name of the member that is this entry."""
    named = ((name, node) for name, node in container.members.items() if entry.key in (None, name))
    return next((name for name, node in named if entry.is_ours(json.loads(text[node.start : node.end]))), None)


def _parsed(text: str, where: str) -> JsonNode:
    try:
        strictjson.decode(text.encode(), source=where, limit=MOST_BYTES)
    except JsonInvalid as error:
        raise Refused(
            f"{where} cannot be changed: {error}",
            hint="Correct it first (comments are not JSON either), or add the entry by hand.",
            path=where,
        ) from None
    return _value(text, _after_blanks(text, 0))


def _value(text: str, at: int) -> JsonNode:
    """The value that starts at `at`, in a text that is valid JSON."""
    if text[at] in "{[":
        return _container(text, at)
    end = _string_end(text, at) if text[at] == '"' else at
    while text[at] != '"' and end < len(text) and text[end] not in ",]}" + _BLANK:
        end += 1
    return JsonNode(at, end, "scalar", {}, {})


def _container(text: str, start: int) -> JsonNode:
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
        members[name] = _value(text, at)
        begins[name] = begin
        at = _after_blanks(text, members[name].end)
        if text[at] == ",":
            at = _after_blanks(text, at + 1)
    return JsonNode(start, at + 1, "object" if is_object else "array", members, begins)


def _string_end(text: str, at: int) -> int:
    at += 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at
