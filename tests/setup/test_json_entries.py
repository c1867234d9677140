"""Entries are added to JSON files of any layout and removed without a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Refused
from holdfast.setup.json_entries import JsonEntry, with_entry, without_entry
from proof.effort import rounds

WHERE = "settings.json"


def is_ours(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("command", "")).startswith("holdfast ")


def item(event: str, word: str = "hook") -> JsonEntry:
    return JsonEntry(("hooks", event), {"command": f"holdfast {word}", "list": [1, 2]}, is_ours)


SERVER = JsonEntry(("mcpServers",), {"command": "holdfast mcp"}, is_ours, "holdfast")
ENTRIES = (item("Start"), item("End"), SERVER)


def inserted(text: str | None, entries: tuple[JsonEntry, ...] = ENTRIES) -> str:
    for entry in entries:
        text = with_entry(text, entry, where=WHERE)
    assert text is not None
    return text


def removed(text: str | None, entries: tuple[JsonEntry, ...] = ENTRIES) -> str | None:
    for entry in reversed(entries):
        text = text and without_entry(text, entry, where=WHERE)
    return text


LAYOUTS = [
    "{}",
    "{}\n",
    "{\n}\n",
    " { } ",
    '{"a": 1}',
    '{\n\t"a": {"b": [1, {"c": null}]},\n\t"d": "}]\\""\n}\n',
    '{"hooks": {}}',
    '{"hooks": {"Start": []}, "mcpServers": {}}',
    '{\n  "hooks": {\n    "Start": [\n      {"command": "theirs"}\n    ]\n  }\n}\n',
    '{\n  "hooks": {\n    "Start": [\n    ]\n  },\n  "mcpServers": {"x": {"command": "y"}}\n}',
    '{\r\n  "model": "x",\r\n  "hooks": {"Other": [true, false, 1.5e3]}\r\n}\r\n',
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_removing_entries_restores_every_character(text: str) -> None:
    with_all = inserted(text)

    assert json.loads(with_all)["mcpServers"]["holdfast"] == SERVER.value
    assert json.loads(with_all)["hooks"]["Start"][-1] == ENTRIES[0].value
    assert removed(with_all) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "hooks": st.dictionaries(st.sampled_from(["Start", "End", "X"]), st.lists(values, max_size=2)),
        "mcpServers": st.dictionaries(st.sampled_from("ab"), values, max_size=2),
        "other": values,
    },
)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(documents, st.sampled_from([None, 0, 1, 2, 4, "\t"]), st.booleans())
def test_removing_entries_restores_any_document(document: dict[str, Any], indent: Any, ascii_only: bool) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)

    with_all = inserted(text)

    loaded = json.loads(with_all)
    assert loaded["hooks"]["End"][-1] == ENTRIES[1].value
    assert {key: loaded[key] for key in document if key == "other"} == {
        key: document[key] for key in document if key == "other"
    }
    assert removed(with_all) == text
    assert inserted(with_all) == with_all


def test_a_file_created_for_the_entries_is_removed_with_them() -> None:
    made = inserted(None)

    assert json.loads(made)["hooks"]["Start"] == [ENTRIES[0].value]
    assert removed(made) is None


def test_entries_that_users_added_to_our_file_stay() -> None:
    made = json.loads(inserted(None))
    made["hooks"]["Start"].append({"command": "theirs"})

    rest = removed(json.dumps(made, indent=2))

    assert rest is not None
    assert json.loads(rest) == {"hooks": {"Start": [{"command": "theirs"}]}}


def test_an_older_version_is_replaced_in_place() -> None:
    old = inserted('{"hooks": {"Start": [{"command": "theirs"}]}}', (item("Start", "old"),))

    new = inserted(old, (item("Start", "new"),))

    assert [each["command"] for each in json.loads(new)["hooks"]["Start"]] == ["theirs", "holdfast new"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        "// comment\n{}",
        "[]",
        '{"hooks": []}',
        '{"hooks": {"Start": {}}}',
    ],
)
def test_a_file_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        inserted(text)


def test_a_foreign_member_of_the_same_name_is_left_alone() -> None:
    with pytest.raises(Refused, match="not made by this command"):
        inserted('{"mcpServers": {"holdfast": {"command": "mine"}}}', (SERVER,))
