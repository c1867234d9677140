"""Real clients for the real server: the client of the SDK over standard input and output."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO
from unittest import mock

import anyio
import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from holdfast.__main__ import main
from holdfast.issues.creating import NewIssue
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.opening import open_tracker
from proof.forked import exit_with
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
    fresh: bool = False,
) -> AsyncIterator[Agent]:
    """Start a server and connect a client to it.

    The server is forked from this process, which has loaded the SDK: that takes a new interpreter a second. With
    `fresh` it is a new interpreter, for tests of its start and its end.
    """
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
            stdio_client(server, errlog=log) if fresh or sys.platform == "win32" else _forked(server, log),
            mode=mode,
            client_info=types.Implementation(name=name, version="1"),
            list_roots_callback=None if roots is None else list_roots,
            read_timeout_seconds=PATIENCE,
        ) as client:
            yield Agent(client)


_POPEN = subprocess.Popen


@contextlib.asynccontextmanager
async def _forked(server: StdioServerParameters, log: TextIO) -> AsyncIterator[Any]:
    """Like `stdio_client`, but the child process goes on instead of executing the command."""
    started = partial(subprocess.Popen, preexec_fn=partial(_become, server))
    async with contextlib.AsyncExitStack() as stack:
        with mock.patch.object(subprocess, "Popen", started), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
            streams = await stack.enter_async_context(stdio_client(server, errlog=log))
        yield streams


def _become(server: StdioServerParameters) -> NoReturn:
    """Be the server, in a child that already has its directory and its standard streams."""
    subprocess.Popen = _POPEN  # type: ignore[misc]  # the server starts programs as usual
    gc.freeze()  # what this process had open is not closed once more, by a number that is in use again
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # `Popen` waits until its pipe is closed
    signal.set_wakeup_fd(-1)
    warnings.resetwarnings()
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(server.env or {})
    sys.argv = ["holdfast", *server.args[len(HOLDFAST) - 1 :]]
    contextvars.Context().run(exit_with, main)  # in a context of this process, an event loop is running


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
