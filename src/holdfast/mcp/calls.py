"""One request of a client: a `Call`, carried out in a worker thread.

The event loop never waits for a file or a lock. A request that the client cancels stops at its next check; if
it has already taken effect, the effect is undone.
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
import mcp_types as types
from mcp import MCPError

from holdfast.errors import Failure, Interrupted, NotFound, UsageFailure
from holdfast.fs.names import counted, in_utf_8, printable
from holdfast.mcp.held import ClientHoldings, Project, ServerSettings, actor_of, find_project

JSON = "application/json"

_log = logging.getLogger(__name__)

Answer = dict[str, Any] | Failure


def attempt(work: Callable[[], Any]) -> Answer:
    """The result of `work`, or its failure. An unexpected exception is logged, and becomes a failure too."""
    try:
        return dict(work() or {})
    except Failure as failure:
        return failure
    except Exception as error:
        _log.exception("a request failed unexpectedly")
        return Failure(f"{type(error).__name__}: {error}")


def as_tool_result(answer: Answer) -> types.CallToolResult:
    """The result of a tool; its structured content is the `data` or the `error` that `--json` prints."""
    if isinstance(answer, Failure):
        record = in_utf_8(answer.as_record())
        text = f"{answer.code}: {printable(answer.message)}\n{printable(answer.hint)}"
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=record, is_error=True)
    record = in_utf_8(answer)
    return types.CallToolResult(
        content=[types.TextContent(text=_text(record))], structured_content=record, is_error=False
    )


def as_contents(uri: str, answer: Answer) -> types.ReadResourceResult:
    """The content of a resource; a failure becomes an error of the protocol, with its record."""
    if isinstance(answer, Failure):
        expected = isinstance(answer, NotFound | UsageFailure)
        raise MCPError(
            code=types.INVALID_PARAMS if expected else types.INTERNAL_ERROR,
            message=f"{answer.code}: {printable(answer.message)}",
            data=in_utf_8(answer.as_record()),
        )
    text = _text(in_utf_8(answer))
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=JSON, text=text)])


def _text(record: object) -> str:
    """JSON that is safe to print: escapes everything that could move a cursor or forge a line."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


REPORT_EVERY = 0.2
"""How often a client gets the progress of a long request."""

Record = dict[str, Any]
"""The result of a step: what the corresponding command prints with `--json`."""

ReportProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class Call:
    """One request. `cancelled` is set when the client cancels it."""

    def __init__(self, settings: ServerSettings, roots: Sequence[str], client: str, held: ClientHoldings) -> None:
        self.client = client
        self.held = held
        self.cancelled = threading.Event()
        self.undo: Callable[[], object] | None = None
        """Undoes the effect of the request if the client cancels it."""
        self.total: int | None = None  # approximate number of files, if known
        self.files = self.size = 0  # files and bytes so far
        self._settings = settings
        self._roots = roots

    @cached_property
    def project(self) -> Project:
        return find_project(self._settings, self._roots)

    @property
    def actor(self) -> str:
        return actor_of(self._settings, self.client)

    def purpose(self, text: str) -> str:
        """The purpose that others see, with the name of the client."""
        return f"{self.client}: {text}" if text else self.client

    def progress(self, files: int, size: int) -> None:
        self.check()
        self.files, self.size = files, size

    def check(self) -> None:
        """Raise if the request was cancelled."""
        if self.cancelled.is_set():
            raise Interrupted


Step = Callable[[Call], Record]


async def carry_out(
    call: Call, step: Step, send: ReportProgress, limiter: anyio.CapacityLimiter | None = None
) -> Answer:
    """Run the step in a thread and report its progress; if the client cancels it, undo it."""
    report = _Progress(call, send)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_set_when_cancelled, call.cancelled)
            group.start_soon(report.repeat)
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


class _Progress:
    def __init__(self, call: Call, send: ReportProgress) -> None:
        self._call = call
        self._send = send
        self._reported = 0

    async def repeat(self) -> None:
        while True:
            await anyio.sleep(REPORT_EVERY)
            await self.once()

    async def once(self) -> None:
        files, size = self._call.files, self._call.size
        if files <= self._reported:
            return
        self._reported = files
        total = self._call.total
        known = float(total) if total is not None and total >= files else None
        await self._send(float(files), known, f"{counted(files, 'file')}, {counted(size, 'byte')}")
