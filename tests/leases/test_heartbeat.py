"""A held lease renews itself, even after its TTL has changed."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import LockTimeout
from holdfast.leases.service import LeaseService, acquire
from holdfast.store.audit import AuditTrail
from holdfast.store.files import FileStore
from tests.locks.workers import wait_until


def renewed_at(service: LeaseService) -> str:
    state = service.state("main")
    assert state is not None
    return state.lease.last_renewed_at


def was_renewed_after(service: LeaseService, instant: str) -> bool:
    return renewed_at(service) > instant


def test_shortening_a_lease_wakes_its_sleeping_heartbeat(records: Path) -> None:
    service = LeaseService(FileStore(records), AuditTrail())
    with acquire(service, "main", service.request(ttl=3600.0)) as held:
        held.renew(3.0)  # the heartbeat would sleep for 20 minutes
        seen = renewed_at(service)
        for _ in range(3):  # at once, then as often as the new TTL requires
            wait_until(partial(was_renewed_after, service, seen))
            seen = renewed_at(service)
        held.check()


def test_a_waiter_that_is_cancelled_stops_at_once_and_leaves_the_queue(records: Path) -> None:
    service = LeaseService(FileStore(records), AuditTrail())
    cancelled = threading.Event()
    ended: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(LockTimeout) as raised:
            acquire(service, "main", service.request(ttl=3600.0), wait=None, cancelled=cancelled)
        ended.append(raised.value)

    other = LeaseService(FileStore(records), AuditTrail(), holder=service.holder._replace(pid=1))
    with acquire(other, "main", other.request(ttl=3600.0)):
        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: (state := service.state("main")) and len(state.waiters) == 1)
        cancelled.set()
        waiting.join()
        state = service.state("main")
        assert state is not None
        assert state.waiters == ()
    assert len(ended) == 1
