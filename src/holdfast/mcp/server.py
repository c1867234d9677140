"""The server: requests arrive on standard input and are carried out in worker threads.

When the client disconnects (standard input ends) or the process is terminated (SIGTERM), all leases and claims
are released. If the process is killed, they expire.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import anyio
import anyio.to_thread
import mcp_types as types
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from pydantic import ValidationError

from holdfast import __version__
from holdfast.errors import IoFailure
from holdfast.mcp import arguments, calls, tools
from holdfast.mcp.calls import Answer, Call, Record, Step, carry_out
from holdfast.mcp.held import ClientHoldings, ServerSettings
from holdfast.mcp.tools import TOOLS
from holdfast.store.open import sharing_connections

ROOTS_TIMEOUT = 10.0  # for a client to name its roots
_KEY = "roots"

Asked = types.CallToolRequestParams | types.ReadResourceRequestParams


class Roots:
    def __init__(self) -> None:
        self._known: list[str] | None = None

    def watch(self, server: Server[Any]) -> None:
        server.add_notification_handler("notifications/roots/list_changed", types.NotificationParams, self._forget)

    async def ask(self, context: ServerRequestContext[Any], asked: Asked) -> list[str] | types.InputRequiredResult:
        """The roots as URIs, none if the client has no roots; or the question that it must answer first."""
        if self._known is not None:
            return self._known
        capabilities = context.session.client_capabilities
        if capabilities is None or capabilities.roots is None:
            return []
        if context.session.can_send_request:
            self._known = await _requested(context)
            return self._known
        answer = (asked.input_responses or {}).get(_KEY)
        if not isinstance(answer, types.ListRootsResult):
            return types.InputRequiredResult(input_requests={_KEY: types.ListRootsRequest()})
        self._known = [str(each.uri) for each in answer.roots]
        return self._known

    async def _forget(self, context: ServerRequestContext[Any], params: types.NotificationParams) -> None:
        self._known = None


async def _requested(context: ServerRequestContext[Any]) -> list[str]:
    """Ask an older client for its roots; none if it does not answer."""
    try:
        answer = await context.session.send_request(
            types.ListRootsRequest(), types.ListRootsResult, request_read_timeout_seconds=ROOTS_TIMEOUT
        )
    except (MCPError, ValidationError):
        return []
    return [str(each.uri) for each in answer.roots]


INSTRUCTIONS = """\
Several agents and people work in this repository at the same time; Holdfast keeps them apart. \
Claim work with claim_next_work, do it in the directory that the answer names, and end it with finish_work; \
or acquire the lease of a worktree (take_lease) before you write to it, and release it when you are done. \
The server renews what you hold, and releases it when you disconnect. snapshot saves a worktree; snapshots \
are never overwritten. A failure has a code and a hint: E_LOCK_CONFLICT names the holder; after \
E_LOCK_EXPIRED or E_FENCING_MISMATCH stop writing, acquire the lease again and check what has changed."""

MOST_WAITS = 64  # requests that wait for other holders at the same time
GRACE = 1.0  # for requests to end when the process is terminated
LONGEST_CLIENT = 60

Page = types.PaginatedRequestParams | None
Context = ServerRequestContext[Any]


def serve(settings: ServerSettings) -> None:
    """Serve the client on standard input and output until it disconnects."""
    try:
        with sharing_connections():
            anyio.run(_serve, settings)
    except BaseExceptionGroup as group:  # of the tasks that were writing
        lost = group.subgroup(lambda each: isinstance(each, OSError))
        while isinstance(lost, BaseExceptionGroup):
            lost = lost.exceptions[0]
        if not isinstance(lost, OSError):
            raise
        raise IoFailure("write to", "standard output", lost) from None


async def _serve(settings: ServerSettings) -> None:
    held = ClientHoldings()
    session = Session(settings, held)
    async with anyio.create_task_group() as group:
        group.start_soon(_end_at_signals, session, held)
        async with stdio_server() as (requests, responses):
            try:
                await session.server.run(requests, responses, session.server.create_initialization_options())
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(held.release_all)
        group.cancel_scope.cancel()


async def _end_at_signals(session: Session, held: ClientHoldings) -> None:
    """On a termination signal, release everything and end this process by that signal.

    Waiting requests are cancelled and get a moment to end. Nothing else is cleaned up: reading standard
    input cannot be interrupted, and every operation survives a kill.
    """
    if sys.platform == "win32":
        return
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            await session.stop(GRACE)
            await anyio.to_thread.run_sync(held.release_all)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Session:
    """The session with the client; a process has only one."""

    def __init__(self, settings: ServerSettings, held: ClientHoldings) -> None:
        self._settings = settings
        self._held = held
        self._roots = Roots()
        self._waits: anyio.CapacityLimiter | None = None  # threads of requests that wait for other holders
        self._calls: set[Call] = set()
        self.server: Server[Any] = Server(
            "holdfast",
            version=__version__,
            title="Holdfast",
            instructions=INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        self._roots.watch(self.server)

    async def _list_tools(self, context: Context, page: Page) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[offer.as_tool(name) for name, offer in TOOLS.items()])

    async def _list_resources(self, context: Context, page: Page) -> types.ListResourcesResult:
        listed = [offer.as_resource() for offer in tools.RESOURCES if not offer.is_template]
        return types.ListResourcesResult(resources=listed)

    async def _list_templates(self, context: Context, page: Page) -> types.ListResourceTemplatesResult:
        templates = [offer.as_template() for offer in tools.RESOURCES if offer.is_template]
        return types.ListResourceTemplatesResult(resource_templates=templates)

    async def _call_tool(
        self, context: Context, asked: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        offer = TOOLS.get(asked.name)
        if offer is None:
            raise MCPError(code=types.INVALID_PARAMS, message=f"there is no tool {asked.name[:100]!a}")
        roots = await self._roots.ask(context, asked)
        if isinstance(roots, types.InputRequiredResult):
            return roots

        def step(call: Call) -> Record:
            return offer.step(call, arguments.checked(offer.takes, asked.arguments))

        return calls.as_tool_result(await self._carry_out(context, roots, step, waits=offer.waits))

    async def _read_resource(
        self, context: Context, asked: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult | types.InputRequiredResult:
        roots = await self._roots.ask(context, asked)
        if isinstance(roots, types.InputRequiredResult):
            return roots
        answer = await self._carry_out(context, roots, lambda call: tools.read(call, asked.uri))
        return calls.as_contents(asked.uri, answer)

    async def stop(self, grace: float) -> None:
        """Cancel all requests, and wait up to `grace` seconds for them to end."""
        for call in self._calls:
            call.cancelled.set()
        with anyio.move_on_after(grace):
            while self._calls:
                await anyio.sleep(0.01)

    async def _carry_out(self, context: Context, roots: list[str], step: Step, *, waits: bool = False) -> Answer:
        call = Call(self._settings, roots, client_name(context), self._held)
        self._calls.add(call)
        try:
            if waits and self._waits is None:
                self._waits = anyio.CapacityLimiter(MOST_WAITS)
            return await carry_out(call, step, context.session.report_progress, self._waits if waits else None)
        finally:
            self._calls.discard(call)


def client_name(context: Context) -> str:
    """The name of the client, safe to print."""
    params = context.session.client_params
    name = params.client_info.name if params is not None else ""
    shown = "".join(each for each in name if each.isprintable()).strip()[:LONGEST_CLIENT]
    return shown or "an MCP client"
