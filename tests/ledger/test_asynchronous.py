"""The ledger for coroutines: the same operations, and a cancelled task leaves nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.errors import NodeLocked, SequenceMismatch
from holdfast.ledger.asynchronous import AsyncClaims, AsyncLedger
from tests.ledger.ledgers import PATIENCE, open_claims, open_ledger


def test_events_are_appended_read_folded_and_watched(scratch: Path) -> None:
    async def work() -> None:
        ledger = AsyncLedger(open_ledger(scratch))
        assert (await ledger.append({"type": "a"})).sequence == 1
        assert (await ledger.append_if_sequence({"type": "b"}, 1)).sequence == 2
        with pytest.raises(SequenceMismatch):
            await ledger.append_if_sequence({"type": "c"}, 1)
        await ledger.append_many([{"type": "d"}] * 300)
        assert await ledger.sequence() == 302
        assert [each.sequence async for each in ledger.events(after=10)] == list(range(11, 303))
        assert await ledger.fold(lambda count, _: count + 1, 0) == 302
        watched = ledger.watch(after=301, timeout=PATIENCE)
        assert (await anext(watched)).sequence == 302
        waiting = asyncio.ensure_future(anext(watched))
        await ledger.append({"type": "e"})
        assert (await waiting).sequence == 303
        await watched.aclose()

    asyncio.run(work())


def test_many_concurrent_appends_all_succeed(scratch: Path) -> None:
    async def work() -> None:
        ledger = AsyncLedger(open_ledger(scratch))
        made = await asyncio.gather(*(ledger.append({"type": "a"}) for _ in range(20)))
        assert sorted(each.sequence for each in made) == list(range(1, 21))

    asyncio.run(work())


def test_claims_are_taken_extended_released_and_waited_for(scratch: Path) -> None:
    async def work() -> None:
        claims = AsyncClaims(open_claims(scratch))
        async with await claims.claim("1", "a") as held:
            assert [each.owner for each in await claims.active()] == ["a"]
            with pytest.raises(NodeLocked):
                await claims.claim("1", "b")
            await claims.extend("1", "a", claim_id=held.claim.claim_id)
            waiter = asyncio.ensure_future(claims.claim("1", "b", wait=PATIENCE))
            while not claims.claims.waiting():
                await asyncio.sleep(0.01)
        taken = await waiter
        assert taken.owner == "b"
        await claims.release("1", "b")
        assert await claims.reap() == []

    asyncio.run(work())


@pytest.mark.req("LG-19")
def test_a_waiter_that_is_cancelled_leaves_the_queue(scratch: Path) -> None:
    async def work() -> None:
        claims = AsyncClaims(open_claims(scratch))
        held = await claims.claim("1", "a")
        waiter = asyncio.ensure_future(claims.claim("1", "b", wait=None))
        while not claims.claims.waiting():
            await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert claims.claims.waiting() == []
        held.release()
        assert (await claims.claim("1", "c")).owner == "c"

    asyncio.run(work())
