"""Servers of an attacker: they record what they receive, and answer in hostile ways."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from holdfast.errors import Failure
from holdfast.store.addresses import EtcdAddress
from holdfast.store.etcd_gateway import Gateway, GatewayError

Talk = Callable[[socket.socket, "Listener"], None]


class Listener:
    """A server on a port of this machine; each connection is talked to in a thread. A context manager."""

    def __init__(self, talk: Talk) -> None:
        self.received = bytearray()
        self.connections = 0
        self.ended = threading.Event()
        self._talk = talk
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        with connection, contextlib.suppress(OSError):
            self._talk(connection, self)

    def hear(self, connection: socket.socket, most: int = 1 << 16) -> bytes:
        content = connection.recv(most)
        self.received += content
        return content

    def close(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def asking_for_the_password(connection: socket.socket, listener: Listener) -> None:
    """Be a PostgreSQL server that wants the password in clear text."""
    request = listener.hear(connection)
    while len(request) == 8 and struct.unpack(">II", request)[1] in (80877103, 80877104):  # TLS or GSS?
        connection.sendall(b"N")
        request = listener.hear(connection)
    connection.sendall(b"R" + struct.pack(">II", 8, 3))
    listener.hear(connection)


def answering(*parts: bytes, pause: float = 0.0, endless: bool = False) -> Talk:
    """Be an HTTP server that answers every request with these parts, and perhaps the last one again and again."""

    def talk(connection: socket.socket, listener: Listener) -> None:
        while listener.hear(connection):
            for part in parts:
                connection.sendall(part)
                listener.ended.wait(pause)
            while endless and not listener.ended.is_set():
                connection.sendall(parts[-1])
                listener.ended.wait(pause)

    return talk


def ask_etcd(port: str) -> int:
    """Ask a server as the store does; for a process with limits, because the answer may be endless."""
    gateway = Gateway(EtcdAddress.parse(f"etcd://127.0.0.1:{port}/x"), timeout=0.5)
    try:
        gateway.ask("/v3/kv/range", {"key": "aA=="})
    except (Failure, GatewayError):
        return 7
    return 0


def http(body: bytes, *, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n{headers}\r\n"
    return head.encode() + body
