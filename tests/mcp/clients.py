"""Real clients for the real server: the client of the SDK over standard input and output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from holdfast.issues.creating import NewIssue
from holdfast.repository.opening import init_ledger, open_tracker
from tests.cli.commands import HOLDFAST, PATIENCE, environment
from tests.support.homes import make_repository, records_of

NAME = "test-client"
ERAS = ("auto", "legacy")
"""Current clients, and older ones that begin with a handshake."""


class ToolFailed(Exception):
    """Raised when a tool answers with a failure; carries its record."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.record = record
        self.code = record["code"]


class Agent(NamedTuple):
    """A connected client."""

    client: Client

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        """Call a tool and return its answer, which its text must repeat; raise if it fails."""
        result = await self.client.call_tool(tool, arguments)
        if result.is_error:
            raise ToolFailed(result.structured_content)
        [content] = result.content
        assert isinstance(content, types.TextContent)
        assert json.loads(content.text) == result.structured_content
        return result.structured_content

    async def read(self, address: str) -> Any:
        """Read the resource at an address, given without its scheme."""
        result = await self.client.read_resource(f"holdfast://{address}")
        [content] = result.contents
        assert isinstance(content, types.TextResourceContents)
        return json.loads(content.text)

    async def failure(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool that must fail, and return its failure."""
        try:
            answer = await self(tool, **arguments)
        except ToolFailed as failed:
            return failed.record
        raise AssertionError(f"{tool} did not fail: {answer}")


@contextlib.asynccontextmanager
async def connected(
    *options: str | Path,
    cwd: Path,
    mode: str = "auto",
    name: str = NAME,
    env: Mapping[str, str] | None = None,
    roots: list[Path] | None = None,
    errors: Path | None = None,
) -> AsyncIterator[Agent]:
    """Start a server and connect a client to it."""
    server = StdioServerParameters(
        command=HOLDFAST[0],
        args=[*HOLDFAST[1:], "mcp", *map(str, options)],
        env=environment(env),
        cwd=cwd,
    )

    async def list_roots(context: object) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=each.as_uri()) for each in roots or ()])  # type: ignore[arg-type]

    with open(errors or os.devnull, "a") as log:
        async with Client(
            stdio_client(server, errlog=log),
            mode=mode,
            client_info=types.Implementation(name=name, version="1"),
            list_roots_callback=None if roots is None else list_roots,
            read_timeout_seconds=PATIENCE,
        ) as client:
            yield Agent(client)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test and unwrap the exception groups it raises."""
    try:
        anyio.run(test)
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def server_pid(lease: Mapping[str, Any]) -> int:
    """The process ID of the server that holds a lease."""
    return int(str(lease["holder_id"]).split(":")[2])


def send(pid: int, name: str) -> None:
    """Send a signal by its name: not every system has all of them."""
    os.kill(pid, getattr(signal, name))


def make_repo(root: Path, *titles: str) -> Path:
    """Create a repository with a tracker, a ledger and some issues."""
    make_repository(root)
    tracker = open_tracker(records_of(root), actor="human:owner")
    tracker.initialise()
    init_ledger(records_of(root))
    if titles:
        tracker.create_all([NewIssue(title=title) for title in titles])
    return root
