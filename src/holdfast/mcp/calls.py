"""One request of a client: what carries it out sees it as a `Call`, in a thread of its own.

The event loop never waits for a file or a lock. A request that the client cancels is told so, and what it
did nevertheless is taken back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from mcp import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolResult,
    ReadResourceResult,
    TextContent,
    TextResourceContents,
)

from holdfast.errors import Failure, Interrupted, NotFound, UsageFailure
from holdfast.fs.names import in_utf_8, printable
from holdfast.mcp.held import ClientHoldings, Project, ServerSettings, actor_of, find_project

JSON = "application/json"

_log = logging.getLogger(__name__)

Answer = dict[str, Any] | Failure


def attempt(work: Callable[[], Any]) -> Answer:
    """What comes of it. What was not expected to happen is a failure as well, and is logged."""
    try:
        return dict(work() or {})
    except Failure as failure:
        return failure
    except Exception as error:
        _log.exception("a request ended in a way that was not expected")
        return Failure(f"{type(error).__name__}: {error}")


def as_tool_result(answer: Answer) -> CallToolResult:
    """The result of a tool; its structured content is what `--json` has as `data` or as `error`."""
    if isinstance(answer, Failure):
        told = f"{answer.code}: {printable(answer.message)}\n{printable(answer.hint)}"
        return CallToolResult(
            content=[TextContent(text=told)],
            structured_content=in_utf_8(answer.as_record()),
            is_error=True,
        )
    plain = in_utf_8(answer)
    return CallToolResult(content=[TextContent(text=_text(plain))], structured_content=plain)


def as_contents(uri: str, answer: Answer) -> ReadResourceResult:
    """What was read; a failure is raised as an error of the protocol, with its record."""
    if isinstance(answer, Failure):
        expected = isinstance(answer, NotFound | UsageFailure)
        raise MCPError(
            code=INVALID_PARAMS if expected else INTERNAL_ERROR,
            message=f"{answer.code}: {printable(answer.message)}",
            data=in_utf_8(answer.as_record()),
        )
    text = _text(in_utf_8(answer))
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=JSON, text=text)])


def _text(plain: object) -> str:
    """JSON that can be shown as it is: what would move a cursor or forge a line is escaped."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


REPORT_EVERY = 0.2
"""How often a client is told how far a long request is."""

Plain = dict[str, Any]
"""What a step returns: what the command of the same purpose prints with `--json`."""

Tell = Callable[[float, float | None, str | None], Awaitable[None]]
"""Tells the client how far it is: so much, of so much, in words."""


class Call:
    """One request. `cancelled` is set when the client does not want it any more."""

    def __init__(
        self, settings: ServerSettings, roots: Sequence[str], client: str, held: ClientHoldings
    ) -> None:
        self.client = client
        self.held = held
        self.cancelled = threading.Event()
        self.undo: Callable[[], object] | None = None
        """What takes back the effect, if the request turns out to be cancelled when it is done."""
        self.total: int | None = None
        """About how many files there are, if that is known."""
        self.files = self.size = 0
        """How many files and bytes have been dealt with."""
        self._settings = settings
        self._roots = roots

    @cached_property
    def project(self) -> Project:
        """What the client works on."""
        return find_project(self._settings, self._roots)

    @property
    def actor(self) -> str:
        """In whose name work is claimed."""
        return actor_of(self._settings, self.client)

    def purpose(self, text: str) -> str:
        """What others are shown: who, and what for."""
        return f"{self.client}: {text}" if text else self.client

    def progress(self, files: int, size: int) -> None:
        """Note how far it is; raise if it is not wanted any more."""
        self.check()
        self.files, self.size = files, size

    def check(self) -> None:
        """Raise if the request was cancelled."""
        if self.cancelled.is_set():
            raise Interrupted


Step = Callable[[Call], Plain]


async def carry_out(
    call: Call,
    step: Step,
    tell: Tell,
    limiter: anyio.CapacityLimiter | None = None,
) -> Answer:
    """Do it in a thread, telling the client how far it is; if the client cancels it, take it back."""
    report = _Report(call, tell)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_set_when_cancelled, call.cancelled)
            group.start_soon(report.again_and_again)
            answer = await anyio.to_thread.run_sync(attempt, lambda: step(call), limiter=limiter)
            await report.once()
            group.cancel_scope.cancel()
        await anyio.lowlevel.checkpoint_if_cancelled()
    except anyio.get_cancelled_exc_class():
        if call.undo is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(attempt, call.undo)
        raise
    return answer


async def _set_when_cancelled(event: threading.Event) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        event.set()


class _Report:
    """How far it is, told only when it is further."""

    def __init__(self, call: Call, tell: Tell) -> None:
        self._call = call
        self._tell = tell
        self._told = 0

    async def again_and_again(self) -> None:
        while True:
            await anyio.sleep(REPORT_EVERY)
            await self.once()

    async def once(self) -> None:
        files, size = self._call.files, self._call.size
        if files <= self._told:
            return
        self._told = files
        total = self._call.total
        known = float(total) if total is not None and total >= files else None
        await self._tell(float(files), known, f"{files} files, {size} bytes")
