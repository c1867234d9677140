"""What stands between clients and one TCP server. `Door` lets clients in; what it does for them is for others
to say. `Proxy` counts who speaks in turn, makes the way longer, and cuts lines."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal, Self

Cut = Literal["never", "before", "after"]


class Door:
    """Listens on a port (of loopback, unless it is told otherwise), and serves each client in a thread."""

    def __init__(self, *, listen: str = "127.0.0.1:0") -> None:
        host, _, own_port = listen.partition(":")
        self._listening = socket.create_server((host, int(own_port)))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Speak with a client until either hangs up."""
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        _hang_up(self._listening)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class Proxy(Door):
    """Listens on a port (of loopback, unless it is told otherwise), and passes everything on.

    `turns` counts how often a client spoke after it had heard the server: round trips. With `cut` set to
    "before", the next thing that a client says gets lost, with its line; with "after", the server still hears
    it and answers, but the answer gets lost. Then nobody is let in until `cut` is "never" again.
    """

    def __init__(
        self, port: int, *, delay: float = 0.0, target: str = "127.0.0.1", listen: str = "127.0.0.1:0"
    ) -> None:
        self.turns = 0
        self.delay = delay
        self.cut: Cut = "never"
        self.lost = 0
        self._target = (target, port)
        self._lines: list[socket.socket] = []
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
        self._lines += [client, server]
        line = _Line(self, client, server)
        if self._closed:  # since it was let in
            self.cut_all_lines()
        threading.Thread(target=line.pump_answers, daemon=True).start()
        line.pump_requests()

    def cut_all_lines(self) -> None:
        """End every connection that there is; new ones are let in."""
        lines, self._lines = self._lines, []
        for each in lines:
            _hang_up(each)

    def close(self) -> None:
        self._closed = True
        super().close()
        for each in self._lines:
            _hang_up(each)


class _Line:
    """One connection, and who spoke last on it."""

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
                self._server.sendall(chunk)
        if not (self._doomed and self._proxy.cut == "after"):
            self._end()

    def pump_answers(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._server.recv(1 << 16):
                time.sleep(self._proxy.delay)
                if self._doomed:
                    break
                self._server_spoke = True
                self._client.sendall(chunk)
        self._end()

    def _end(self) -> None:
        _hang_up(self._client)
        _hang_up(self._server)


def _hang_up(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
