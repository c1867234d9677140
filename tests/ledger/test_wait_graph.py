"""The holds and waits of claims, as deadlock detection sees them."""

from __future__ import annotations

import os

import pytest

from holdfast.errors import NameInvalid, UsageFailure
from holdfast.leases.deadlock import WaitGraph, find_cycle
from holdfast.leases.service import LeaseService
from holdfast.ledger.log import Ledger
from holdfast.ledger.service import Claims
from holdfast.locks.identity import current_holder, holder_with_pid
from holdfast.store.audit import AuditTrail
from holdfast.store.memory import MemoryStore
from tests.ledger.ledgers import acquired, append_raw

LONG = 3600.0
OTHER = holder_with_pid(os.getppid()) or current_holder()._replace(host="elsewhere")
"""A living process other than this one."""


class Scenario:
    """An agent of this process holds a lease; another process holds a claim and waits for that lease."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.ours = LeaseService(self.store, AuditTrail(), actor="agent:a")
        theirs = LeaseService(self.store, AuditTrail(), holder=OTHER)
        self.ours.acquire("x", self.ours.request(ttl=LONG))
        self.claims().take(self.claims().request("1", "theirs", ttl=LONG, behalf_of=OTHER))
        self.their_wait = theirs.request(ttl=LONG)
        theirs.join_queue("x", self.their_wait)

    def claims(self, actor: str = "") -> Claims:
        return Claims(Ledger(self.store), actor=actor)

    def cycle_with(self, actor: str) -> bool:
        """Whether there is a cycle once this process waits for the claim as this actor."""
        claims = self.claims(actor)
        request = claims.request("1", "somebody", ttl=LONG)
        claims.join_queue(request)
        leases, waits = self.ours.wait_graph(), claims.wait_graph()
        seen = WaitGraph(leases.holds + waits.holds, leases.waits + waits.waits)
        found = {bool(find_cycle(each, seen)) for each in (request.claim_id, self.their_wait.lock_id)}
        claims.leave_queue(request)
        assert len(found) == 1
        return found.pop()


def test_agents_of_one_process_are_distinguished_by_their_actor() -> None:
    scenario = Scenario()
    assert scenario.cycle_with("agent:a")
    assert not scenario.cycle_with("agent:b")
    assert scenario.cycle_with("")  # without an actor, a waiter is known by its process


def test_a_claim_records_its_actor_and_its_process() -> None:
    claims = Claims(Ledger(MemoryStore()), actor="agent:a")
    [mine, others] = [
        claims.take(claims.request(node, "me", behalf_of=behalf_of)).holder
        for node, behalf_of in (("1", None), ("2", OTHER))
    ]
    assert (mine["holder_id"], mine["actor"]) == (current_holder().holder_id, "agent:a")
    assert (others["holder_id"], others["actor"]) == (OTHER.holder_id, "agent:a")
    with pytest.raises((NameInvalid, UsageFailure)):
        Claims(Ledger(MemoryStore()), actor="no kind").request("1", "me")


def test_a_claim_of_another_program_is_held_by_its_owner_and_by_no_process() -> None:
    claims = Claims(Ledger(MemoryStore()))
    append_raw(claims.ledger, acquired("1", "theirs", expires_in=LONG))
    [hold] = claims.wait_graph().holds
    assert (hold.holder.owner, hold.holder.processes) == ("theirs", frozenset())
