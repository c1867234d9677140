"""The directories that a client says it works in, its *roots*; asked for once, and again when they change.

Older clients answer a request of ours; newer ones are told that the answer is required, and ask again
with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp import MCPError
from pydantic import ValidationError

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext

PATIENCE = 10.0
"""How long a client has to say what its roots are."""

_KEY = "roots"

Asked = types.CallToolRequestParams | types.ReadResourceRequestParams


class Roots:
    """The roots of one client."""

    def __init__(self) -> None:
        self._known: list[str] | None = None

    def attend(self, server: Server[Any]) -> None:
        """Listen for changes."""
        server.add_notification_handler(
            "notifications/roots/list_changed", types.NotificationParams, self._forget
        )

    async def ask(
        self, context: ServerRequestContext[Any], asked: Asked
    ) -> list[str] | types.InputRequiredResult:
        """The roots as URIs, none if the client has no such thing; or what it has to answer first."""
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

    async def _forget(self, context: ServerRequestContext[Any], told: types.NotificationParams) -> None:
        self._known = None


async def _requested(context: ServerRequestContext[Any]) -> list[str]:
    """Ask an older client. One that says it has roots, but does not tell, has none."""
    try:
        answer = await context.session.send_request(
            types.ListRootsRequest(), types.ListRootsResult, request_read_timeout_seconds=PATIENCE
        )
    except (MCPError, ValidationError):
        return []
    return [str(each.uri) for each in answer.roots]
