"""An S3-compatible server for tests: moto, which honours conditional writes, unless it is told to ignore them."""

from __future__ import annotations

import os
import secrets
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class S3Server:
    """A server in a thread of this process. With `ignores_conditions`, it drops the headers of conditional requests, as
    some servers do."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, type: str, message: str, *arguments: object) -> None:
                pass

        self.ignores_conditions = False
        self._application: Callable[..., Any] = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, environment: dict[str, Any], start: Any) -> Any:
        if self.ignores_conditions:
            environment.pop("HTTP_IF_NONE_MATCH", None)
        return self._application(environment, start)

    def bucket(self) -> str:
        """The address of a content store in a new bucket."""
        name = f"bucket-{secrets.token_hex(4)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return f"s3://{name}/some/prefix?endpoint={self.endpoint}&region=us-east-1"

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_server(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, with the credentials that it accepts in the environment."""
    monkeypatch.setitem(os.environ, "AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "never shown")
    yield s3_session
    s3_session.ignores_conditions = False
