"""A claim that is held, and kept alive by a heartbeat, as an object to work under.

The heartbeat extends the claim in the background, so that nobody has to remember. When that fails for
good, or has not succeeded for as long as the claim lasts, the claim is *lost*: `lost` is set, `check`
raises from then on, and what is appended through it is refused, whatever its owner believes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import Failure, LockExpired, LockNotHeld
from holdfast.ledger.claims import Claim
from holdfast.ledger.desk import ClaimDesk
from holdfast.ledger.events import Recorded

BEATS = 3
"""How many times a claim is extended in the time that it lasts."""


class HeldClaim:
    """A claim on a node. Used as a context manager, also an asynchronous one, it ends with its block."""

    def __init__(self, desk: ClaimDesk, claim: Claim, ttl: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.lost = threading.Event()
        self.claim = claim
        self.ttl = ttl
        self._desk = desk
        self._clock = clock
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._reason: Failure | None = None
        self._valid_until = clock.boot() + min(ttl, claim.expiry() - desk.ledger.store.now())
        self._heart: threading.Thread | None = None

    @property
    def node_id(self) -> str:
        return self.claim.node_id

    @property
    def owner(self) -> str:
        return self.claim.owner

    def check(self) -> None:
        """Raise if this claim is not held any more: call it before every piece of work."""
        if self._ended.is_set() or self._pid != os.getpid():
            raise LockNotHeld(f"the claim on {self.node_id} was released", node_id=self.node_id)
        if not self.lost.is_set() and self._clock.boot() >= self._valid_until:
            self._lose(
                LockExpired(f"the claim on {self.node_id} was not extended in time", node_id=self.node_id)
            )
        if self._reason is not None:
            raise self._reason

    def extend(self, ttl: float | None = None) -> Claim:
        """Let the claim run on; if that is refused, it is lost."""
        self.check()
        began = self._clock.boot()
        ttl = self.ttl if ttl is None else ttl
        try:
            self.claim = self._desk.extend(self.node_id, self.owner, ttl=ttl, claim_id=self.claim.claim_id)
        except (LockNotHeld, LockExpired) as failure:
            self._lose(failure)
            raise
        self._valid_until = began + ttl
        return self.claim

    def append(self, event: Mapping[str, Any]) -> Recorded:
        """Add an event to the ledger, only if the claim is held at that very moment."""
        self.check()
        return self._desk.append(event, self.node_id, self.owner, claim_id=self.claim.claim_id)

    def beat(self) -> Self:
        """Keep the claim alive in the background until it is released or lost."""
        if self._heart is None:
            self._heart = threading.Thread(target=self._keep_alive, name="holdfast-claim", daemon=True)
            self._heart.start()
        return self

    def release(self) -> None:
        """Give the claim back; twice is fine, and so is one that has been lost."""
        if self._ended.is_set() or self._pid != os.getpid():
            return
        self._ended.set()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join()
        with contextlib.suppress(LockNotHeld):
            self._desk.release(self.node_id, self.owner, claim_id=self.claim.claim_id)

    def _keep_alive(self) -> None:
        pause = self.ttl / BEATS
        while not self._ended.wait(pause):
            try:
                self.extend()
                pause = self.ttl / BEATS
            except Failure:
                if self.lost.is_set():
                    return
                pause = min(1.0, self.ttl / (4 * BEATS))  # a store that does not answer: try again

    def _lose(self, reason: Failure) -> None:
        self._reason = reason
        self.lost.set()

    def __enter__(self) -> Self:
        return self.beat()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self.beat()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.release)
