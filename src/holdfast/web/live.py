"""Live pages: threads watch the stores, and server-sent events tell browsers about changes.

Nothing is polled: a store reports its changes, and the kernel the end of a holder's process. A browser is told only
which records have changed; it asks for its page again, and puts what differs in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import Failure
from holdfast.web.workspaces import AUDIT, ISSUES

if TYPE_CHECKING:
    from holdfast.repository.live import ChangeWatcher
    from holdfast.store.model import Watch
    from holdfast.web.workspaces import Workspace

LOOK_UP = 5.0  # seconds after which a waiting thread checks whether it should end
SETTLE, MOST_SETTLE = 0.05, 0.3  # one commit is reported several times: at its intent, its parts, and its end
TRY_AGAIN = 5.0  # after a store was unavailable
HEARTBEAT = 15.0  # seconds between two heartbeats, which also reveal clients that are gone
MOST_PENDING = 64


class Live:
    """The changes of some workspaces, and the browsers that listen."""

    def __init__(self, workspaces: Sequence[Workspace]) -> None:
        self._workspaces = workspaces
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._holders: list[ChangeWatcher] = []
        self._queues: set[asyncio.Queue[bytes]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed_at: dict[str, float] = {}  # when browsers were last told of a change

    def start(self) -> None:
        """Begin to watch; each kind of records of each workspace has a thread of its own."""
        for workspace in self._workspaces:
            self._holders.append(workspace.watch_holders(partial(self.tell, workspace, AUDIT)))
            self._threads.append(threading.Thread(target=workspace.warm, daemon=True))
            for topic, watch in workspace.watches().items():
                words = (workspace, topic, watch)
                self._threads.append(threading.Thread(target=self._follow, args=words, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        for holders in self._holders:
            holders.close()
        for thread in self._threads:
            thread.join(0.1)  # they hold nothing, and end with the process

    def tell(self, workspace: Workspace, topic: str) -> None:
        """Something of this kind has changed; from any thread."""
        workspace.changed(topic)
        self._announce(workspace, topic)

    def _announce(self, workspace: Workspace, topic: str) -> None:
        self._changed_at[workspace.slug] = at = time.time()
        if self._loop is not None and self._queues:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(
                    self._spread, _event("change", {"workspace": workspace.slug, "topic": topic, "at": at})
                )

    def _spread(self, event: bytes) -> None:
        for queue in self._queues:
            with contextlib.suppress(asyncio.QueueFull):  # enough events are pending to make it look again
                queue.put_nowait(event)

    def _follow(
        self, workspace: Workspace, topic: str, opened: Callable[[], contextlib.AbstractContextManager[Watch]]
    ) -> None:
        while not self._ended.is_set():
            try:
                with opened() as watch:
                    workspace.begin_watch(topic)
                    self._announce(workspace, topic)  # something may have changed before
                    while not self._ended.is_set() and workspace.is_watched(topic):
                        if watch.wait(LOOK_UP):
                            _settle(watch, partial(workspace.changed, topic))
                            if topic == ISSUES and self._queues:
                                with contextlib.suppress(Failure):  # the pages say what is wrong
                                    workspace.issues()  # so that no browser waits for it once it is told
                            self._announce(workspace, topic)
            except Failure:
                if workspace.end_watch(topic):
                    self.tell(workspace, topic)  # the pages say what is wrong
                self._ended.wait(TRY_AGAIN)

    async def events(self) -> AsyncIterator[bytes]:
        """The events for one browser, until it disconnects. The first says which changes it may have missed."""
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_PENDING)
        self._queues.add(queue)
        try:
            yield b"retry: 1000\n" + _event("hello", {**self._changed_at})
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), HEARTBEAT)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._queues.discard(queue)


def _settle(watch: Watch, changed: Callable[[], None]) -> None:
    """Note a change at once, so that a page requested now shows it; then wait briefly until no more is reported."""
    changed()
    end = time.monotonic() + MOST_SETTLE
    while time.monotonic() < end and watch.wait(SETTLE):
        changed()


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
