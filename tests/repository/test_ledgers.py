"""Opening the ledger of a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, NotFound, SettingInvalid
from holdfast.repository.ledgers import find_ledger, init_ledger, open_ledger


@pytest.mark.req("LG-07")
def test_a_ledger_is_initialised_once_and_then_opened(scratch: Path) -> None:
    made = init_ledger(scratch / "proof", lock_timeout=600.0)
    assert json.loads((scratch / "proof/meta.json").read_bytes()) == {"lock_timeout": "10m"}
    made.ledger.append({"type": "note"})
    with pytest.raises(AlreadyExists):
        init_ledger(scratch / "proof")
    opened = open_ledger(scratch / "proof")
    assert (opened.ledger.sequence, opened.claims.lock_timeout(), opened.files) == (1, 600.0, None)
    assert opened.verify().sound


@pytest.mark.req("LG-07")
def test_a_lock_timeout_out_of_range_creates_nothing(scratch: Path) -> None:
    with pytest.raises(SettingInvalid):
        init_ledger(scratch / "proof", lock_timeout=7200.0)
    assert not (scratch / "proof/meta.json").exists()


def test_opening_creates_nothing(scratch: Path) -> None:
    for place in (scratch / "missing", scratch):
        with pytest.raises(NotFound, match="there is no ledger"):
            open_ledger(place)
    assert os.listdir(scratch) == []


def test_a_ledger_of_another_program_can_be_opened(scratch: Path) -> None:
    (scratch / "ledger").mkdir()
    (scratch / "ledger/event-000001.json").write_text('{"type":"init","timestamp":"2024-01-15T10:30:00Z"}')
    assert open_ledger(scratch).ledger.sequence == 1
    (scratch / "meta.json").write_text('{"conjecture":"x","lock_timeout":"1m0s"}')
    assert open_ledger(scratch).claims.lock_timeout() == 60.0


@pytest.mark.req("LG-09")
def test_claim_files_are_written_if_meta_json_asks_for_them(scratch: Path) -> None:
    init_ledger(scratch, claim_files=True)
    with open_ledger(scratch).claims.claim("1", "a"):
        assert (scratch / "locks/1.lock").exists()
    (scratch / "meta.json").write_text('{"claim_files":"yes"}')
    with pytest.raises(SettingInvalid):
        open_ledger(scratch)


def test_the_nearest_ledger_upwards_is_found_but_not_a_directory_that_only_has_its_name(scratch: Path) -> None:
    inside = scratch / "main" / "src"
    (inside / "ledger").mkdir(parents=True)
    assert find_ledger(inside) is None

    init_ledger(scratch)
    assert find_ledger(inside) == find_ledger(scratch) == scratch
    (inside / "ledger" / "event-000001.json").write_text('{"type":"x","timestamp":"2026-01-01T00:00:00Z"}')
    assert find_ledger(inside) == inside
