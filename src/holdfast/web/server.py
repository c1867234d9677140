"""The server: uvicorn on a socket that is bound before anything is printed. It drops slow clients."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.errors import UsageFailure
from holdfast.web.app import application, refusal_page
from holdfast.web.live import Live
from holdfast.web.security import Access, Secured

if TYPE_CHECKING:
    from holdfast.web.workspaces import Workspace

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADER_TIME, SEND_TIME = 10.0, 30.0  # seconds that a client has to send the head of a request, and to take a block
MOST_CONNECTIONS, CONNECTIONS_EACH = 512, 128  # more than places for requests: a surplus one is waiting
LARGEST_HEAD = 32 << 10
KEEP_ALIVE = 15


class ServerOptions(NamedTuple):
    """Where to listen, the host names that requests may use, and whether actions are allowed."""

    host: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, ...] = ()  # more names in `Host`, for an address that is not loopback
    writable: bool = False


class _ImpatientProtocol(H11Protocol):
    """Drops a slow client: the head of each request has `HEADER_TIME` to arrive, after at most `KEEP_ALIVE` of idling,
    and what was sent has `SEND_TIME` to be read. If a client, or all clients together, have too many connections, the
    one that is due to be dropped first goes."""

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        open_ = [each for each in self.connections if isinstance(each, _ImpatientProtocol) and not each.is_closing()]
        ours = [each for each in open_ if each.address == self.address]
        for connections, most in ((ours, CONNECTIONS_EACH), (open_, MOST_CONNECTIONS)):
            if len(connections) > most:
                min(connections, key=_ImpatientProtocol.dropped_at).transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self._waiting is not None and self.cycle is not before:
            self._waiting.cancel()
            self._waiting = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._waiting, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_TIME, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    @property
    def address(self) -> str | None:
        return self.client[0] if self.client is not None else None

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def dropped_at(self) -> float:
        """The instant at which it is dropped if nothing arrives, by the clock of the loop."""
        return math.inf if self._waiting is None else self._waiting.when()

    def _wait_for_head(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        idle = KEEP_ALIVE if self.cycle is not None else 0  # a new connection has something to say
        self._waiting = self.loop.call_later(idle + HEADER_TIME, self.transport.abort)


class WebServer:
    """One server, from binding its port until `run` returns."""

    def __init__(self, workspaces: Sequence[Workspace], options: ServerOptions) -> None:
        """Bind the port. Raises `UsageFailure` for an address that is not loopback and has no name, and if the port is
        taken."""
        if options.host not in LOOPBACK and not options.names:
            raise UsageFailure(
                f"{options.host} is not a loopback address: others could reach this server",
                hint="Name the host that browsers will use for it: --allow-host HOST. Better, use an SSH tunnel.",
            )
        self._socket = _bound(options.host, options.port)
        self.port: int = self._socket.getsockname()[1]
        self.access = Access((*options.names, options.host), self.port, writable=options.writable)
        name = options.names[0] if options.names else options.host
        self._host = f"[{name}]" if ":" in name else name
        self.live = Live(workspaces)
        self._app = application(workspaces, self.access, self.live)
        self._server: uvicorn.Server | None = None

    @property
    def one_time_address(self) -> str:
        """The address that lets one browser in."""
        return f"http://{self._host}:{self.port}{self.access.one_time_path}"

    def run(self, *, ready: Callable[[], None], used: Callable[[], None]) -> None:
        """Serve until the process is asked to end. `ready` is called when it serves, `used` when a browser was let in:
        there is a new one-time address then."""
        self._app.state.used = used
        config = uvicorn.Config(
            Secured(self._app, self.access, refusal_page),
            http=_ImpatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        )
        self._server = _Told(config, ready)
        self.live.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.live.stop()
            self._socket.close()

    def stop(self) -> None:
        """Ask `run` to return; from any thread."""
        if self._server is not None:
            self._server.should_exit = True


class _Told(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            transport: Any = getattr(connection, "transport", None)
            if transport is not None:
                transport.close()  # streams of events have no end of their own
        await super().shutdown(sockets)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(128)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise UsageFailure(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            hint="Another program may use the port. Name another one: --port, or --port 0 for any free one.",
        ) from error
    return made
