"""The ledger and its claims for coroutines. Each call runs in a thread; the event loop is never blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

from holdfast.ledger.log import Ledger, Recorded, Reducer, State
from holdfast.ledger.projection import Claim
from holdfast.ledger.service import Claims, HeldClaim

_AT_ONCE = 256  # how many events one call in a thread reads

Result = TypeVar("Result")


class AsyncLedger:
    """A ledger with awaitable methods; see `Ledger`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def append(self, event: Mapping[str, Any]) -> Recorded:
        return await asyncio.to_thread(self.ledger.append, event)

    async def append_if_sequence(self, event: Mapping[str, Any], expected: int) -> Recorded:
        return await asyncio.to_thread(self.ledger.append_if_sequence, event, expected)

    async def append_many(self, events: Iterable[Mapping[str, Any]]) -> list[Recorded]:
        return await asyncio.to_thread(self.ledger.append_many, events)

    async def sequence(self) -> int:
        return await asyncio.to_thread(lambda: self.ledger.sequence)

    async def fold(
        self,
        reducer: Reducer[State],
        initial: State,
        *,
        until: int | None = None,
        name: str | None = None,
        version: str = "1",
    ) -> State:
        return await asyncio.to_thread(self.ledger.fold, reducer, initial, until=until, name=name, version=version)

    async def events(self, *, after: int = 0, until: int | None = None) -> AsyncIterator[Recorded]:
        source = self.ledger.events(after=after, until=until)
        while chunk := await asyncio.to_thread(lambda: list(islice(source, _AT_ONCE))):
            for each in chunk:
                yield each

    async def watch(self, *, after: int | None = None, timeout: float | None = None) -> AsyncGenerator[Recorded, None]:
        cancelled = threading.Event()
        source = self.ledger.watch(after=after, timeout=timeout, cancelled=cancelled)
        try:
            while (each := await _finished(lambda: next(source, None), cancelled)) is not None:
                yield each
        finally:
            cancelled.set()
            source.close()


class AsyncClaims:
    """Claims with awaitable methods; see `Claims`."""

    def __init__(self, claims: Claims) -> None:
        self.claims = claims

    async def claim(
        self,
        node: str,
        owner: str,
        *,
        ttl: float | None = None,
        wait: float | None = 0.0,
        priority: int = 0,
        purpose: str = "",
    ) -> HeldClaim:
        """Claim a node. A cancelled task leaves neither a claim nor a waiter in the queue."""
        cancelled = threading.Event()

        def claim() -> HeldClaim:
            return self.claims.claim(
                node, owner, ttl=ttl, wait=wait, priority=priority, purpose=purpose, cancelled=cancelled
            )

        return await _finished(claim, cancelled, undo=HeldClaim.release)

    async def extend(self, node: str, owner: str, *, ttl: float | None = None, claim_id: str = "") -> Claim:
        return await asyncio.to_thread(self.claims.extend, node, owner, ttl=ttl, claim_id=claim_id)

    async def release(self, node: str, owner: str, *, claim_id: str = "") -> Claim:
        return await asyncio.to_thread(self.claims.release, node, owner, claim_id=claim_id)

    async def reap(self) -> list[Claim]:
        return await asyncio.to_thread(self.claims.reap)

    async def active(self, *, at_sequence: int | None = None, under: str | None = None) -> list[Claim]:
        return await asyncio.to_thread(self.claims.active, at_sequence=at_sequence, under=under)


async def _finished(
    call: Callable[[], Result], cancelled: threading.Event, *, undo: Callable[[Result], object] = lambda result: None
) -> Result:
    """The result of a call in a thread. If the task is cancelled, the call is ended, awaited and undone."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancelled.set()
        try:
            result = await running
        except Exception:
            pass  # it failed: there is nothing to undo
        else:
            await asyncio.to_thread(undo, result)
        raise
