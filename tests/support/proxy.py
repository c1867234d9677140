"""Intermediaries between clients and one TCP server.

`Door` accepts clients and leaves serving them to subclasses. `Proxy` forwards to a server, counts round trips, adds
latency, and cuts or unplugs connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal, Self

Cut = Literal["never", "before", "after"]


class Door:
    """Listens on a port (of loopback by default) and serves each client in a thread."""

    def __init__(self, *, listen: str = "127.0.0.1:0") -> None:
        host, _, own_port = listen.partition(":")
        self._listening = socket.create_server((host, int(own_port)))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Talk to a client until either side hangs up."""
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting clients."""
        _hang_up(self._listening)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class Proxy(Door):
    """Listens on a port (of loopback by default) and forwards everything to a server.

    `turns` counts round trips: the times a client spoke after hearing from the server. With `cut` set to "before",
    the next client message is lost with its connection; with "after", the server still receives it and answers, but
    the answer is lost. After that no client is accepted until `cut` is "never" again.

    With `cut_after` set, the connection is cut when this number of bytes of answers has passed, once.

    While it is `unplugged`, nothing passes, and no side is told. `forward` passes what a client sent on to the server.
    """

    def __init__(
        self, port: int, *, delay: float = 0.0, target: str = "127.0.0.1", listen: str = "127.0.0.1:0"
    ) -> None:
        self.turns = 0
        self.delay = delay
        self.cut: Cut = "never"
        self.lost = 0
        self.cut_after: int | None = None
        self.answered = 0  # bytes
        self.unplugged = False
        self.forward: Callable[[socket.socket, bytes], object] = socket.socket.sendall
        self._target = (target, port)
        self._sockets: list[socket.socket] = []
        self._closed = False
        super().__init__(listen=listen)

    def serve(self, client: socket.socket) -> None:
        if self.lost and self.cut != "never":
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=5.0)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets += [client, server]
        connection = _Connection(self, client, server)
        if self._closed:  # since the client was accepted
            self.cut_all_lines()
        threading.Thread(target=connection.pump_answers, daemon=True).start()
        connection.pump_requests()

    def passing(self, chunk: bytes) -> bytes:
        """What passes of an answer."""
        if self.cut_after is not None and len(chunk) > self.cut_after:
            chunk, self.cut_after = chunk[: self.cut_after], None
        elif self.cut_after is not None:
            self.cut_after -= len(chunk)
        self.answered += len(chunk)
        return chunk

    def cut_all_lines(self) -> None:
        """Close every open connection; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            _hang_up(each)

    def close(self) -> None:
        self._closed = True
        super().close()
        for each in self._sockets:
            _hang_up(each)


class _Connection:
    """One connection, and which side spoke last."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._server_spoke = True
        self._doomed = False

    def pump_requests(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._client.recv(1 << 16):
                time.sleep(self._proxy.delay)
                if self._server_spoke:
                    self._proxy.turns += 1
                    self._server_spoke = False
                if self._proxy.cut != "never":
                    self._proxy.lost += 1
                    self._doomed = True
                    if self._proxy.cut == "before":
                        break
                if not self._proxy.unplugged:
                    self._proxy.forward(self._server, chunk)
        if not (self._doomed and self._proxy.cut == "after"):
            self._end()

    def pump_answers(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._server.recv(1 << 16):
                time.sleep(self._proxy.delay)
                if self._doomed:
                    break
                self._server_spoke = True
                passing = self._proxy.passing(chunk)
                if not self._proxy.unplugged:
                    self._client.sendall(passing)
                if len(passing) < len(chunk):
                    break
        self._end()

    def _end(self) -> None:
        _hang_up(self._client)
        _hang_up(self._server)


def _hang_up(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
