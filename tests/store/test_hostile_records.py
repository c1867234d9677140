"""Records that name others, or lead elsewhere, are not decoded; whatever is in place of a log ends in a failure."""

from __future__ import annotations

import calendar
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import INSTANT, format_instant, parse_instant
from holdfast.errors import Corrupt, Failure, PathEscape, Refused, TooLarge
from holdfast.fs import durable
from holdfast.fs.directory import Directory, entry_exists
from holdfast.fs.names import SAFE_NAME, SAFE_PATH, is_safe_name, split_relative
from holdfast.ledger.log import CODEC, Recorded
from holdfast.ledger.projection import ClaimState
from holdfast.repository.context import OPERATIONS, REFERENCES
from holdfast.store.audit import AuditTrail
from holdfast.store.files import FileStore
from holdfast.store.model import Unreadable

T = "2024-05-01T10:00:00.000000Z"
REFERENCE = {"name": "v1", "snapshot_id": "00aa", "created_at": T}
OPERATION = {"operation_id": "00aa", "kind": "restore", "worktree_id": "main", "begun_at": T, "holder_id": "h"}
TEXTS = st.lists(st.sampled_from([*"ab./-_\n\0é", ".."]), max_size=8).map("".join)


@given(TEXTS)
def test_the_type_of_names_accepts_what_is_a_safe_name(text: str) -> None:
    assert bool(re.search(SAFE_NAME, text)) is is_safe_name(text)


@given(TEXTS)
@pytest.mark.skipif(sys.platform == "win32", reason="has further separators")
def test_the_type_of_paths_accepts_what_can_be_split(text: str) -> None:
    try:
        split_relative(text)
        safe = True
    except PathEscape:
        safe = False
    assert bool(re.search(SAFE_PATH, text)) is safe


@pytest.mark.parametrize("year", [1899, 1900, 1904, 2000, 2023, 2024, 2100, 2400, 8999, 9000])
def test_the_type_of_instants_accepts_exactly_the_days_of_the_calendar(year: int) -> None:
    for month in range(14):
        for day in range(33):
            text = f"{year}-{month:02}-{day:02}T23:59:60.5-23:59"
            exists = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
            assert bool(re.search(INSTANT, text)) is (exists and 1900 <= year <= 8999), text
            if re.search(INSTANT, text):
                format_instant(parse_instant(text))


@pytest.mark.parametrize("field", ["operation_id", "counterpart", "snapshot_id", "path"])
@pytest.mark.parametrize("name", ["/home/u/docs", "../x", "..", ".", "", "a\0b", "x\n/../y", "x" * 70_000])
def test_an_operation_with_a_name_that_leads_elsewhere_is_corrupt(field: str, name: str) -> None:
    with pytest.raises(Corrupt, match=field):
        OPERATIONS.codec.decode(json.dumps({**OPERATION, field: name}).encode(), "a file")


@pytest.mark.parametrize("time", ["", "not a time", "2024-02-30T00:00:00Z", "2020-01-01", "2020-01-01T00:00:00"])
def test_an_operation_that_began_at_no_time_is_corrupt(time: str) -> None:
    with pytest.raises(Corrupt, match="begun_at"):
        OPERATIONS.codec.decode(json.dumps({**OPERATION, "begun_at": time}).encode(), "a file")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def _put(store: FileStore, path: str, content: bytes) -> Path:
    file = store.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_record_under_the_name_of_another_is_corrupt_and_stops_only_itself(store: FileStore) -> None:
    _put(store, ".jvs/refs/v1.json", json.dumps(REFERENCE).encode())
    _put(store, ".jvs/refs/v2.json", json.dumps(REFERENCE).encode())

    with pytest.raises(Corrupt, match="its name is 'v1', not v2"):
        store.read(REFERENCES.key("v2"))
    with pytest.raises(Corrupt):
        list(store.scan(REFERENCES))
    found = {name: document.record for name, document in store.scan(REFERENCES.tolerant())}
    assert isinstance(found["v2"], Unreadable)
    assert not isinstance(found["v1"], Unreadable)


def test_an_intent_under_the_name_of_another_is_corrupt(store: FileStore) -> None:
    _put(store, ".holdfast/intents/00aa.json", b'{"id":"00bb","steps":[]}')

    with pytest.raises(Corrupt, match="00bb"):
        store.read(REFERENCES.key("v1"))


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"{}\n")
        file.truncate(3 << 30)


def _fifo(path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("has no such files")
    os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_hole, _fifo, Path.mkdir])
def test_what_is_in_place_of_a_log_or_record_is_refused_before_it_is_read(
    store: FileStore, make: Callable[[Path], Any]
) -> None:
    for path in (".jvs/audit/audit.jsonl", ".jvs/refs/v1.json"):
        (store.path / path).parent.mkdir(parents=True)
        make(store.path / path)
    trail = AuditTrail()

    with Directory.open(store.path / ".jvs/audit") as directory:
        for attempt in (durable.last_line_in, durable.end_of_lines_in):
            with pytest.raises((Corrupt, Refused)):
                attempt(directory, "audit.jsonl")
        with pytest.raises((Corrupt, Refused, Failure)):
            durable.append_in(directory, "audit.jsonl", b"{}")
    with pytest.raises(Failure):
        list(store.entries(trail.stream))
    with pytest.raises((Corrupt, Refused)):
        store.read(REFERENCES.key("v1"))
    ((_, document),) = store.scan(REFERENCES.tolerant())
    assert isinstance(document.record, Unreadable)


def test_a_long_torn_tail_is_found_and_a_line_beyond_all_records_is_refused(tmp_path: Path) -> None:
    tail = b"x" * (5 << 20)
    (tmp_path / "log").write_bytes(b"{}\n" + tail)
    with Directory.open(tmp_path) as directory:
        assert durable.last_line_in(directory, "log") == (3, b"{}")
        assert durable.append_in(directory, "log", b"[]") == (3, tail)
        (tmp_path / "log").write_bytes(b"x" * (durable.LONGEST_LINE + 1) + b"\n")
        with pytest.raises(Corrupt, match="line of more than"):
            durable.last_line_in(directory, "log")
        with pytest.raises(TooLarge):
            durable.read_in(directory, "log", limit=100)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with Directory.open(tmp_path) as directory:
        for attempt in (directory.status, directory.enter, lambda each: durable.read_in(directory, each)):
            with pytest.raises(PathEscape):
                attempt(name)
    for look in (entry_exists, Directory.open):
        with pytest.raises(PathEscape):
            look(tmp_path / name)


def test_an_event_that_is_nested_too_deeply_is_corrupt_and_one_of_a_strange_type_has_no_effect() -> None:
    with pytest.raises(Corrupt, match="nested"):
        CODEC.decode(b'{"type":' + b"[" * 100_000, "a file")
    state = ClaimState()
    state.apply(Recorded(1, {"type": ["lock_acquired"], "node_id": "1"}))
    assert state.claims == {}
