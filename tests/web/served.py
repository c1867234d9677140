"""A server of the pages inside the test process, and a client that speaks as a browser does."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.web.server import ServerOptions, WebServer
from holdfast.web.workspaces import WorkspaceSettings, workspaces_of
from tests.cli.commands import PATIENCE


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()


class Client:
    """A client with the cookie of a browser that was let in."""

    def __init__(self, server: WebServer) -> None:
        self.server = server
        self.port = server.port
        opened = self.ask("GET", server.access.one_time_path, cookie=None)
        self.cookie: str = opened.headers["set-cookie"].partition(";")[0]

    def get(self, path: str) -> Answered:
        return self.ask("GET", path)

    def act(self, action: str, **given: str) -> Answered:
        headers = {"content-type": "application/json", "origin": f"http://127.0.0.1:{self.port}"}
        return self.ask("POST", f"/r/harbour/do/{action}", json.dumps(given).encode(), headers)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, **more: Any
    ) -> Answered:
        cookie = more.get("cookie", getattr(self, "cookie", None))
        sent = {**({"cookie": cookie} if cookie else {}), **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answered(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


@contextlib.contextmanager
def serving(
    roots: Sequence[Path], data: Path, *, port: int = 0, writable: bool = True, home: Path | None = None
) -> Iterator[WebServer]:
    """A server in a thread, until the end."""
    settings = WorkspaceSettings("human:ada", None, data, home)
    server = WebServer(workspaces_of(roots, settings), ServerOptions(port=port, writable=writable))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"ready": ready.set, "used": lambda: None})
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
