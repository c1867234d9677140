"""Forged events of the ledger: nobody appends them by the plain way, and those of other programs are reported."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import pytest

from holdfast.ledger.projection import KINDS
from proof.hostile.runner import Runner
from proof.hostile.victim import Victim, make_repository, make_victim, now, write

FORGED = {
    "lock_acquired": {"node_id": "1.3", "owner": "agent:evil", "expires_at": "2999-01-01T00:00:00Z", "claim_id": "x"},
    "lock_released": {"node_id": "1.2", "owner": "agent:other"},
    "lock_reaped": {"node_id": "1.2", "owner": "agent:other", "reaped_by": "evil"},
}


@pytest.fixture(scope="module")
def template(template: Victim, tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Victim:
    """One that is young enough: the claim in it lasts an hour, and a proof takes longer."""
    if time.time() - os.stat(template.base).st_mtime < 1800:
        return template
    made = make_victim(tmp_path_factory.mktemp("young") / "base")
    make_repository(made, runner.run)
    return made


def event(kind: str) -> dict[str, object]:
    return {"type": kind, "timestamp": now(), **FORGED.get(kind, {"node_id": "1.2", "owner": "agent:evil"})}


@pytest.mark.parametrize("kind", sorted({*KINDS, *FORGED, "lock_anything"}))
def test_an_event_of_the_locks_cannot_be_appended_by_hand(kind: str, victim: Victim, runner: Runner) -> None:
    before = runner.run(victim.job("ledger", "claims", "--json")).out
    outcome = runner.run(victim.job("ledger", "append", json.dumps(event(kind))))
    after = runner.run(victim.job("ledger", "claims", "--json")).out

    assert outcome.status != 0, outcome
    assert outcome.code
    assert _claims(after) == _claims(before)


def _claims(text: str) -> list[object]:
    found: list[object] = [(each["node_id"], each["actor"]) for each in json.loads(text)["data"]["active"]]
    assert found, "there is a claim to lose"
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", sorted(FORGED))
def test_an_agent_cannot_append_them_either(kind: str, victim: Victim, runner: Runner) -> None:
    calls: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}},
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/call"}
        | {"params": {"name": "append_to_ledger", "arguments": {"event": event(kind)}}},
    ]
    calls[0]["params"] |= {"clientInfo": {"name": "x", "version": "1"}}
    lines = "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in calls)
    before = runner.run(victim.job("ledger", "claims", "--json")).out
    outcome = runner.run(victim.job("mcp", "--actor", "agent:me", stdin=lines))
    after = runner.run(victim.job("ledger", "claims", "--json")).out

    assert not outcome.problem, outcome
    assert _claims(after) == _claims(before)
    third = victim.root / "ledger/event-000003.json"
    assert not (third.exists() and kind in third.read_text())


@pytest.mark.parametrize("kind", sorted(FORGED))
def test_verify_reports_one_that_another_program_forged(kind: str, victim: Victim, runner: Runner) -> None:
    """It did not come from the holder of the claim, nor did it wait until the claim expired."""
    write(victim.root / "ledger/event-000003.json", json.dumps({"id": "forged", **event(kind)}) + "\n")
    outcome = runner.run(victim.job("ledger", "verify"))

    assert not outcome.problem, outcome
    assert re.search(r"event-000003|event 3\b|\b3\b", outcome.out + outcome.err), outcome
    assert outcome.status != 0, outcome
