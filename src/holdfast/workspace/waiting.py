"""Waiting for something in a thread, so that a coroutine may wait for it and change its mind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Got = TypeVar("Got")


async def in_a_thread(
    wait_for_it: Callable[[threading.Event], Got], give_back: Callable[[Got], object]
) -> Got:
    """What `wait_for_it` returns, which runs in a thread and ends soon after the event it is given is set.

    If the coroutine is cancelled the event is set, and what comes too late is given back.
    """
    cancelled = threading.Event()

    def wait() -> Got:
        got = wait_for_it(cancelled)
        if cancelled.is_set():
            give_back(got)
        return got

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        cancelled.set()
        if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
            await asyncio.to_thread(give_back, waiting.result())  # it came while we were being cancelled
        raise
